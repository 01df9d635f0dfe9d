//! A guest whose disk moves from process to process, in a simulated world.
//!
//! One process is outside the others: it plays the guests with their front ends, and starts and
//! ends nodes. There are one or two guests, each with its own disk. Each node is a process with one
//! core, with the real devices, session, rings and upgrade over real sockets. The world decides
//! when a process hears of an event, and into what pieces messages are cut. An attempt to replace a
//! node meets one [`Trouble`], anywhere on its way. In every case:
//!
//! 1. The guest reads what it wrote, and no request comes back twice ([`sim::guest`] checks both):
//!    so nothing was lost, and only one node served.
//! 2. If the old node reports that it has handed over, the successor serves; if it reports why not,
//!    it continues. If either is killed, the other serves, or both end, and then another is
//!    started. A successor finally serves all disks, also those that the old node had not handed
//!    over when it was killed.
//! 3. All requests of the guest finally come back.

pub mod kept;
pub mod moves;
pub mod sends;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

use frontend::{Connection, Session};
use node::DiskSpec;
use node::simulated::{FrontDoor, Kept, Listen, Node};
use reactor::sim::{Access, Crash, FailureKind, Fault, FaultKind, Process, Rng, SimConfig, World};
use reactor::{Class, Core, UnixSocket};
use sim::guest::{END_NS, Guest, QUEUES, with_disk_at};

/// How often a node polls for its next task.
const LOOK_NS: u64 = 400_000;
/// Length of a message's header, in both protocols.
const HEADER: usize = 12;
/// Kinds of messages between nodes.
pub const HELLO: u32 = 1;
const STATE: u32 = 6;
pub const GO: u32 = 8;
const LEAD: u32 = 9;
/// Number of kinds, plus one.
const KINDS: usize = 13;
/// The image of each guest.
const IMAGES: [&str; 2] = ["/disks/a.img", "/disks/b.img"];
/// Longest time between two polls of a waiting guest.
const IDLE_NS: u64 = 20_000_000;
/// The longest time that a slow disk takes for a request.
const STALL_MAX_NS: u64 = 6_000_000_000;
/// How long a process that must end, or serve, may take.
const PATIENCE_NS: u64 = 20_000_000_000;

/// What has happened in a world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub guest: sim::guest::Report,
    /// Nodes that were started without a predecessor.
    pub started: u64,
    pub killed: u64,
    /// Front ends that lost their node, and found another.
    pub reconnected: u64,
    pub upgrades: u64,
    /// Upgrades after which the successor served.
    pub switched: u64,
    /// Worlds with two guests.
    pub two: u64,
    /// Upgrades after which a disk was not quiesced in time, and followed.
    pub followed: u64,
    /// Those in which requests waited for the old node's operations in flight.
    pub held: u64,
    /// Such old nodes that were killed meanwhile, and such successors.
    pub killed_under_way: [u64; 2],
    /// Old nodes that were killed when they had handed over, but had not reported it.
    pub old_killed_between: u64,
    /// Upgrades that the old node gave up, by what it was doing.
    pub gave_up: [u64; 3],
    /// Upgrades that the old node gave up because something took too long.
    pub late: u64,
    /// Upgrades that the old node gave up because the successor has gone.
    pub gone: u64,
    /// Upgrades that either side refused because of the other's version.
    pub version: u64,
    /// Messages that were changed or cut, by kind.
    pub tampered: [u64; KINDS],
    /// Old nodes that were killed before the switch,
    pub old_killed_before: u64,
    /// and when they had handed over.
    pub old_killed_after: u64,
    /// Successors that were killed before the switch,
    pub new_killed_before: u64,
    /// and soon after it.
    pub new_killed_after: u64,
    pub trace: (u64, u64),
}

/// What an old node was doing when it gave up.
const DOING: [&str; 3] = ["starting", "opening", "taking"];

/// The trouble between a node and its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    None,
    KillOld,
    KillNew,
    StopOld,
    StopNew,
    SlowDisk,
    /// A disk is slow, and one of the two is killed when the other disk is handed over.
    KillOldBetween,
    KillNewBetween,
    /// A disk is slow, and one of the two is killed when it is handed over all the same.
    KillOldUnderWay,
    KillNewUnderWay,
    Tamper,
}

/// What a test does to one message.
#[derive(Clone, Copy, Debug)]
enum Tamper {
    /// Only this part of it arrives, in millionths.
    Cut(u64),
    /// It has another version, or an unknown kind.
    Version,
    /// One of its bits is flipped.
    Flip(u64),
    /// Its descriptors are lost.
    NoDescriptors,
    /// It arrives late, unchanged.
    Late,
}

#[derive(Default)]
struct Told {
    serves: Cell<bool>,
    hand_over: RefCell<Option<OwnedFd>>,
    stop: Cell<bool>,
    stopped: Cell<bool>,
    outcome: RefCell<Option<Result<u64, String>>>,
    /// Why it never served.
    failed: RefCell<Option<String>>,
    resubmitted: Cell<u64>,
    /// Completed requests of each disk.
    completions: [Cell<u64>; 2],
    /// A successor is the node.
    committed: RefCell<Rc<Cell<bool>>>,
    /// All its disks are served.
    has_all: Cell<bool>,
    /// Disks to detach by force, and the results.
    detach: RefCell<Vec<&'static str>>,
    detached: RefCell<Vec<Result<bool, String>>>,
    names: RefCell<Vec<String>>,
    /// A disk to move, to where, and whether the move is to finish; then whether it is to finish,
    /// or to end.
    begin_move: RefCell<Option<(&'static str, String, bool)>>,
    end_move: Cell<Option<bool>>,
    /// The node to which a disk is to be sent.
    begin_send: Cell<Option<std::net::SocketAddr>>,
    /// A move is under way, or was not possible.
    moving: Cell<bool>,
    /// One of its disks holds, or has held, requests that the predecessor had begun.
    holds: Cell<bool>,
}

/// A node, seen from outside.
struct Running {
    process: Process,
    told: Rc<Told>,
}

impl Running {
    fn serves(&self) -> bool {
        self.told.serves.get() && !self.process.has_ended()
    }
}

/// The work of a node that serves.
async fn serve(core: &Core, node: Node, told: &Rc<Told>) {
    let node = Rc::new(node);
    told.serves.set(true);
    told.committed.replace(node.committed());
    while !told.stop.get() {
        told.has_all.set(node.has_all());
        told.holds.set(told.holds.get() || node.holds());
        told.resubmitted.set(node.resubmitted());
        told.names.replace(node.names());
        for name in told.detach.take() {
            let (node, told) = (node.clone(), told.clone());
            core.spawn(Class::Control, async move {
                let detached = node.detach(name, true).await;
                told.detached.borrow_mut().push(detached);
            });
        }
        let begin = told.begin_move.take();
        if let Some((name, uri, finish)) = begin {
            // A disk that still waits for its predecessor is not moved.
            let _ = node.begin_move(name, &uri, finish).await;
        }
        if let Some(addr) = told.begin_send.take() {
            let node = node.clone();
            core.spawn(Class::Control, async move {
                let _ = node.begin_send("a", addr, true).await;
            });
        }
        if let Some(finish) = told.end_move.take() {
            node.end_move("a", finish).await;
        }
        told.moving.set(node.is_moving());
        for (count, name) in told.completions.iter().zip(["a", "b"]) {
            count.set(node.completions(name));
        }
        let line = told.hand_over.take();
        if let Some(line) = line {
            let outcome = node.hand_over(line).await;
            told.serves.set(outcome.is_err());
            told.stop.set(outcome.is_ok());
            told.outcome.replace(Some(outcome));
        }
        core.sleep_ns(LOOK_NS).await;
    }
    // Plays the clients of a database that have not received their replies.
    for _ in 0..10 {
        core.sleep_ns(LOOK_NS).await;
    }
    node.stop().await;
    told.serves.set(false);
    told.stopped.set(true);
}

/// A front end's connection to a node.
struct FrontEnd {
    _session: Session,
    gone: Rc<Cell<bool>>,
}

/// A guest, its disk, and the address of its front end.
struct Machine {
    guest: Rc<RefCell<Guest>>,
    /// As the state directory has it.
    spec: Rc<RefCell<DiskSpec>>,
    address: SocketAddr,
    front_end: Option<FrontEnd>,
    /// Number of connections.
    connects: u64,
    /// The launcher that listens at the address and keeps the connection, if there is one.
    launcher: Option<FrontDoor>,
}

impl Machine {
    /// A guest that no front end has connected yet.
    fn new(guest: &Rc<RefCell<Guest>>, spec: Rc<RefCell<DiskSpec>>) -> Machine {
        Machine {
            guest: guest.clone(),
            spec,
            address: address(),
            front_end: None,
            connects: 0,
            launcher: None,
        }
    }
}

/// What a state directory keeps.
struct StateDirectory {
    specs: Vec<Rc<RefCell<DiskSpec>>>,
    /// How far disks are on their way to other nodes, by name.
    transfers: RefCell<BTreeMap<String, String>>,
}

impl Kept for StateDirectory {
    fn keep(&self, spec: &DiskSpec) {
        let same = self.specs.iter().find(|known| known.borrow().name == spec.name);
        same.expect("a known disk").replace(spec.clone());
    }

    fn transfer(&self, name: &str) -> Option<String> {
        self.transfers.borrow().get(name).cloned()
    }

    fn keep_transfer(&self, name: &str, transfer: Option<String>) {
        let mut transfers = self.transfers.borrow_mut();
        match transfer {
            Some(transfer) => transfers.insert(name.to_owned(), transfer),
            None => transfers.remove(name),
        };
    }
}

/// Everything that is not a node.
struct Outside {
    core: Core,
    world: World,
    rng: Rng,
    machines: Vec<Machine>,
    report: Rc<RefCell<Report>>,
    /// What a node is told of the write cache.
    told_cache: Option<bool>,
    /// All nodes that have not ended.
    nodes: Vec<Running>,
    idle_ns: u64,
    /// When the current activity began; long activities are polled less often.
    since_ns: u64,
}

impl Outside {
    /// With machines whose nodes know of the write cache, and an empty report.
    fn new(core: Core, world: &World, machines: Vec<Machine>) -> Outside {
        Outside {
            core,
            world: world.clone(),
            rng: world.rng(),
            machines,
            report: Rc::default(),
            told_cache: Some(true),
            nodes: Vec::new(),
            idle_ns: 0,
            since_ns: world.now_ns(),
        }
    }

    fn report<T>(&self, note: impl FnOnce(&mut Report) -> T) -> T {
        note(&mut self.report.borrow_mut())
    }

    /// Lets the guests run for a moment.
    async fn step(&mut self) {
        let before = self.in_flight();
        self.machines.iter().for_each(|machine| machine.guest.borrow_mut().step());
        let waits = before > 0 && self.in_flight() >= before;
        self.idle_ns = if waits { (self.idle_ns * 2).clamp(1000, IDLE_NS) } else { 0 };
        let long_ns = (self.core.now_ns() - self.since_ns) / 8;
        let ns = self.rng.below(60_000 + self.idle_ns + long_ns);
        self.core.sleep_ns(ns).await;
        for at in 0..self.machines.len() {
            let Machine { front_end, launcher, .. } = &mut self.machines[at];
            if launcher.is_some() {
                continue;
            }
            if front_end.as_ref().is_none_or(|front_end| front_end.gone.get()) {
                *front_end = None;
                self.connect(at);
            }
        }
        for node in self.nodes.extract_if(.., |node| node.process.has_ended()) {
            // Its descriptors are closed with it.
            node.told.hand_over.take();
            self.machines[0].guest.borrow_mut().report.resubmitted += node.told.resubmitted.get();
        }
    }

    /// The number of requests that the guests wait for.
    fn in_flight(&self) -> usize {
        self.machines.iter().map(|machine| machine.guest.borrow().in_flight()).sum()
    }

    fn specs(&self) -> Vec<DiskSpec> {
        self.machines.iter().map(|machine| machine.spec.borrow().clone()).collect()
    }

    /// Plays the state directory.
    fn kept(&self) -> Rc<dyn Kept> {
        let specs = self.machines.iter().map(|machine| machine.spec.clone()).collect();
        Rc::new(StateDirectory { specs, transfers: RefCell::default() })
    }

    /// Connects a front end, if a node listens.
    fn connect(&mut self, at: usize) {
        let Ok(stream) = UnixStream::connect_addr(&self.machines[at].address) else { return };
        self.report(|report| report.reconnected += 1);
        self.machines[at].connects += 1;
        let target = UnixSocket::from_fd(&self.core, stream.into()).expect("a connection");
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let session =
            self.machines[at].guest.borrow().connects(Connection::new(ours)).expect("it is read");
        let source = UnixSocket::from_fd(&self.core, theirs.into()).expect("a socket");
        let gone = Rc::new(Cell::new(false));
        let (core, mut rng, to) = (self.core.clone(), self.rng.fork(), target.clone());
        // Its messages arrive in pieces.
        self.core.spawn(Class::Foreground, async move {
            while let Some((bytes, fds)) = message(&source, 8).await {
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                let (head, tail) = bytes.split_at(1 + rng.index(bytes.len()));
                for (part, fds) in [(head, &fds[..]), (tail, &[])] {
                    if to.send(part, fds).await.is_err() {
                        return;
                    }
                    core.sleep_ns(rng.below(20_000)).await;
                }
            }
        });
        let ended = gone.clone();
        self.core.spawn(Class::Foreground, async move {
            while let Ok((1.., _)) = target.recv(&mut Vec::new(), 1000).await {}
            ended.set(true);
        });
        self.machines[at].front_end = Some(FrontEnd { _session: session, gone });
    }

    /// Starts a node without a predecessor.
    async fn start(&mut self) {
        // Messages in flight between two processes that have ended may hold a socket for a moment.
        let free = |machine: &Machine| {
            machine.launcher.is_some() || UnixListener::bind_addr(&machine.address).is_ok()
        };
        self.until("nobody listens", |outside| outside.machines.iter().all(free)).await;
        let door = |machine: &Machine| {
            let door = match &machine.launcher {
                Some(launcher) => launcher.attach(),
                None => UnixListener::bind_addr(&machine.address).map(OwnedFd::from),
            };
            (machine.spec.borrow().clone(), door.expect("nobody listens any more"))
        };
        let disks: Vec<_> = self.machines.iter().map(door).collect();
        let told = Rc::<Told>::default();
        let (own, told_cache, kept) = (told.clone(), self.told_cache, self.kept());
        let process = self.world.start_process(move |core| async move {
            let node = Node::start(&core, disks, told_cache, kept).await;
            serve(&core, node.expect("nobody has the image any more"), &own).await;
        });
        self.nodes.push(Running { process, told });
        self.report(|report| report.started += 1);
    }

    /// Starts a node that takes over.
    fn start_successor(&mut self, line: OwnedFd) -> (Process, Rc<Told>) {
        let (told, specs, kept) = (Rc::<Told>::default(), self.specs(), self.kept());
        let own = told.clone();
        let way_in = |machine: &Machine| {
            let name = machine.spec.borrow().name.clone();
            (name, machine.address.clone(), machine.launcher.clone())
        };
        let all: Vec<_> = self.machines.iter().map(way_in).collect();
        let listen: Listen = Rc::new(move |spec| {
            let (_, address, launcher) = all.iter().find(|(name, ..)| *name == spec.name)?;
            match launcher {
                Some(launcher) => launcher.attach().ok(),
                None => UnixListener::bind_addr(address).ok().map(OwnedFd::from),
            }
        });
        let process = self.world.start_process(move |core| async move {
            match Node::inherit(&core, &specs, line, listen, kept).await {
                Ok(node) => serve(&core, node, &own).await,
                Err(why) => {
                    own.failed.replace(Some(why));
                }
            }
        });
        self.nodes.push(Running { process: process.clone(), told: told.clone() });
        (process, told)
    }

    /// Lets the guests run until a condition is true.
    async fn until(&mut self, what: &str, so: impl Fn(&Outside) -> bool) {
        let end_ns = self.core.now_ns() + PATIENCE_NS;
        while !so(self) {
            assert!(self.core.now_ns() < end_ns, "not within {PATIENCE_NS} ns: {what}");
            self.step().await;
        }
    }

    /// Lets a node take over from the one that serves.
    async fn upgrade(&mut self) {
        use Trouble::*;
        self.report(|report| report.upgrades += 1);
        let trouble = match self.rng.below(16) {
            0 | 1 => None,
            2 | 3 => KillOld,
            4 | 5 => KillNew,
            6 => StopOld,
            7 => StopNew,
            8 => SlowDisk,
            9 => KillOldBetween,
            10 => KillNewBetween,
            11 => KillOldUnderWay,
            12 => KillNewUnderWay,
            _ => Tamper,
        };
        let old = self.nodes.iter().find(|node| node.serves()).expect("somebody serves");
        let (old, old_told) = (old.process.clone(), old.told.clone());
        let (mut ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        if trouble == Tamper {
            let far = UnixStream::pair().expect("a pair of sockets");
            let near = std::mem::replace(&mut ours, far.0);
            self.tamper(far.1, near);
        }
        old_told.hand_over.replace(Some(ours.into()));
        let (new, new_told) = self.start_successor(theirs.into());
        // The dialogue takes about this many turns of each.
        let most = match trouble {
            KillOld => 4 + self.rng.below(6),
            _ => 6,
        };
        let turns = self.rng.below(1 << most);
        let (stopped, mut stops_ns) = match trouble {
            StopOld => (Some(&old), self.rng.below(2_000_000)),
            StopNew => (Some(&new), self.rng.below(2_000_000)),
            _ => (Option::None, 0),
        };
        match trouble {
            KillOld => old.kill_after(turns),
            KillNew => new.kill_after(turns),
            SlowDisk | KillOldBetween | KillNewBetween | KillOldUnderWay | KillNewUnderWay => {
                let slow = FaultKind::Stall(100_000_000..STALL_MAX_NS);
                let image = IMAGES[self.rng.index(self.machines.len())];
                self.world.add_fault(Fault::new(slow).of(Access::Write).on(image).chance(300_000));
            }
            _ => {}
        }
        if matches!(trouble, KillOldBetween | KillNewBetween) {
            let (old, told) = (old.clone(), old_told.clone());
            self.until("it is decided", |_| {
                let decided = told.outcome.borrow().is_some() || old.has_ended();
                decided || told.committed.borrow().get()
            })
            .await;
            let killed = if trouble == KillOldBetween { &old } else { &new };
            killed.kill_after(self.rng.below(4));
        }
        if matches!(trouble, KillOldUnderWay | KillNewUnderWay) {
            let (old, old_told, told) = (old.clone(), old_told.clone(), new_told.clone());
            self.until("it is under way, or over", |_| {
                let gave_up = matches!(&*old_told.outcome.borrow(), Some(Err(_)));
                told.holds.get() || gave_up || old.has_ended()
            })
            .await;
            if new_told.holds.get() {
                for _ in 0..self.rng.below(40) {
                    self.step().await;
                }
                let nth = usize::from(trouble == KillNewUnderWay);
                self.report(|report| report.killed_under_way[nth] += 1);
                [&old, &new][nth].kill_after(self.rng.below(4));
            }
        }
        if let Some(stopped) = stopped {
            stops_ns += self.core.now_ns();
            while self.core.now_ns() < stops_ns {
                self.step().await;
            }
            stopped.stop();
            let most_ns = if self.rng.coin() { 1_000_000_000 } else { 12_000_000_000 };
            let end_ns = self.core.now_ns() + self.rng.below(most_ns);
            while self.core.now_ns() < end_ns {
                self.step().await;
            }
            stopped.resume();
        }
        let (process, told) = (old.clone(), old_told.clone());
        self.until("an outcome", |_| told.outcome.borrow().is_some() || process.has_ended()).await;
        self.world.heal();
        // The serving node meets requests.
        (self.since_ns, self.idle_ns) = (self.core.now_ns(), 0);
        for _ in 0..self.rng.below(20) {
            self.step().await;
        }
        let outcome = old_told.outcome.take();
        match outcome {
            Some(Ok(_)) => {
                let (new, told) = (new.clone(), new_told.clone());
                self.until("the successor serves", |_| told.serves.get() || new.has_ended()).await;
                self.until("the old one ends", |_| old.has_ended()).await;
                let killed = new.has_ended();
                let to_be_killed = matches!(trouble, KillNew | KillNewBetween | KillNewUnderWay);
                assert!(!killed || to_be_killed, "{:?}", new_told.failed);
                self.report(|report| report.followed += u64::from(!new_told.has_all.get()));
                self.until("it has all disks", |_| told.has_all.get() || new.has_ended()).await;
                self.report(|report| {
                    report.held += u64::from(new_told.holds.get());
                    report.switched += u64::from(!killed);
                    report.new_killed_after += u64::from(killed);
                    report.old_killed_after += u64::from(old.was_killed());
                });
            }
            Some(Err(why)) => {
                assert!(!new_told.serves.get(), "both serve: {why}");
                if new.has_ended() && matches!(trouble, KillNew | KillNewBetween) {
                    self.report(|report| report.new_killed_before += 1);
                }
                let both = format!("{why} {}", new_told.failed.borrow().as_deref().unwrap_or(""));
                self.report(|report| {
                    let doing = DOING.iter().position(|doing| why.starts_with(doing));
                    report.gave_up[doing.unwrap_or_else(|| panic!("{why}"))] += 1;
                    report.late += u64::from(why.contains("not done within"));
                    report.gone += u64::from(why.contains("has gone"));
                    report.version += u64::from(both.contains("version"));
                });
                // As the process that has started it does.
                new.kill_after(0);
                self.until("the successor ends", |_| new.has_ended()).await;
            }
            Option::None => {
                assert!(matches!(trouble, KillOld | KillOldBetween), "{trouble:?}");
                let (new, told) = (new.clone(), new_told.clone());
                let committed = old_told.committed.borrow().get();
                self.until("it serves or ends", |_| told.serves.get() || new.has_ended()).await;
                assert_eq!(!new.has_ended(), committed, "it was told to serve, or not");
                self.report(|report| match committed {
                    true => report.old_killed_between += 1,
                    false => report.old_killed_before += 1,
                });
                self.until("it has all disks", |_| told.has_all.get() || new.has_ended()).await;
            }
        }
        // Revoke an order to be killed that came too late.
        old.spare();
    }

    /// Carries the dialogue between two sockets, and tampers with one message.
    fn tamper(&mut self, old: UnixStream, new: UnixStream) {
        // The messages of a disk's handover come after five others.
        let disks = self.machines.len();
        let nth = match self.rng.coin() {
            true => 4 + disks + self.rng.index(4),
            false => self.rng.index(6 + 4 * disks),
        };
        let tamper = match self.rng.below(8) {
            0 => Tamper::Version,
            1 => Tamper::Flip(self.rng.next_u64()),
            2 => Tamper::NoDescriptors,
            3 | 4 => Tamper::Late,
            _ => Tamper::Cut(self.rng.below(1_000_000)),
        };
        let nth = match tamper {
            // Two kinds of message have a version.
            Tamper::Version => [0, 4 + disks][self.rng.index(2)],
            // `Taken`, for which the old node waits only for a limited time.
            Tamper::Late if self.rng.coin() => 5 + disks,
            _ => nth,
        };
        // Beyond all limits, or hardly late.
        let most_ns = if self.rng.coin() { 6_000_000_000 } else { 1 << self.rng.below(24) };
        let late_ns = self.rng.below(most_ns);
        let heard_ns = self.rng.below(2_000_000);
        let [old, new] = [old, new].map(|end| UnixSocket::from_fd(&self.core, end.into()));
        let (old, new) = (old.expect("a socket"), new.expect("a socket"));
        let (core, report, left) = (self.core.clone(), self.report.clone(), Cell::new(nth));
        self.core.spawn(Class::Foreground, async move {
            let strike = async |kind: u32| {
                // They decide the upgrade, and are so short that they arrive whole.
                let decides = matches!(kind, GO | LEAD);
                let strikes = left.get() == 0 && (!decides || matches!(tamper, Tamper::Late));
                left.set(left.get().wrapping_sub(1));
                if !strikes {
                    return None;
                }
                report.borrow_mut().tampered[kind as usize] += 1;
                core.sleep_ns(late_ns).await;
                Some(tamper)
            };
            let mut there = pin!(carry(&old, &new, &strike));
            let mut back = pin!(carry(&new, &old, &strike));
            // When one direction has ended both sockets are closed, after a while.
            poll_fn(|cx| {
                match there.as_mut().poll(cx).is_ready() || back.as_mut().poll(cx).is_ready() {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            })
            .await;
            core.sleep_ns(heard_ns).await;
        });
    }

    /// The life of the guests, until all their requests are done or the power is cut.
    async fn live(&mut self, events: u64) {
        for _ in 0..events {
            self.since_ns = self.core.now_ns();
            if !self.nodes.iter().any(Running::serves) {
                self.until("all have ended", |outside| outside.nodes.is_empty()).await;
                self.start().await;
                self.until("it serves", |outside| outside.nodes[0].serves()).await;
            }
            self.since_ns = self.core.now_ns();
            for _ in 0..self.rng.below(60) {
                self.step().await;
            }
            self.since_ns = self.core.now_ns();
            if !self.nodes.iter().any(Running::serves) {
                // It was killed by an earlier order.
                continue;
            }
            if self.rng.below(6) == 0 {
                self.report(|report| report.killed += 1);
                self.nodes[0].process.kill_after(self.rng.below(20));
                self.until("it is dead", |outside| outside.nodes.is_empty()).await;
            } else {
                self.upgrade().await;
            }
        }
        if !self.nodes.iter().any(Running::serves) {
            self.until("all have ended", |outside| outside.nodes.is_empty()).await;
            self.start().await;
        }
        self.since_ns = self.core.now_ns();
        self.machines.iter().for_each(|machine| machine.guest.borrow_mut().ends = true);
        // A slow request may be slow again when the last node resubmits it.
        let end_ns = self.core.now_ns() + END_NS + 2 * STALL_MAX_NS;
        while self.in_flight() > 0 {
            if self.nodes.is_empty() {
                // It was killed by an earlier order.
                self.start().await;
            }
            let lost = self.in_flight();
            assert!(self.core.now_ns() < end_ns, "{lost} requests are lost");
            self.step().await;
        }
        self.nodes.iter().for_each(|node| node.told.stop.set(true));
        self.until("all have ended", |outside| outside.nodes.is_empty()).await;
    }
}

/// The next message of a socket. In both protocols a header of twelve bytes contains the length of
/// the rest, at `len_at`.
async fn message(from: &UnixSocket, len_at: usize) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let (mut bytes, mut fds, mut wanted) = (Vec::new(), Vec::new(), HEADER);
    while bytes.len() < wanted {
        let most = wanted - bytes.len();
        let Ok((1.., more)) = from.recv(&mut bytes, most).await else { return None };
        fds.extend(more);
        if bytes.len() == HEADER {
            wanted += u32::from_le_bytes(bytes[len_at..][..4].try_into().unwrap()) as usize;
        }
    }
    Some((bytes, fds))
}

/// Carries messages from one socket to another, until one of them is closed; `strike` decides what
/// happens to a message of a kind.
async fn carry(from: &UnixSocket, to: &UnixSocket, strike: &impl AsyncFn(u32) -> Option<Tamper>) {
    while let Some((mut bytes, mut fds)) = message(from, 4).await {
        let kind = u32::from_le_bytes(bytes[..4].try_into().unwrap());
        let tamper = strike(kind).await;
        match tamper {
            None | Some(Tamper::Late) => {}
            Some(Tamper::Cut(part)) => {
                bytes.truncate((bytes.len() as u64 * part / 1_000_000) as usize);
            }
            // Of the conversation, or of a disk's state: both follow eight bytes of magic.
            Some(Tamper::Version) if kind == HELLO => bytes[HEADER + 8] += 1,
            // After the disk's name, of one letter.
            Some(Tamper::Version) if kind == STATE => bytes[HEADER + 3 + 8] += 1,
            Some(Tamper::Version) => bytes[0] = 99,
            Some(Tamper::Flip(at)) if kind == STATE => {
                let at = at % ((bytes.len() - HEADER) as u64 * 8);
                bytes[HEADER + at as usize / 8] ^= 1 << (at % 8);
            }
            Some(Tamper::Flip(_)) => bytes[3] ^= 1,
            Some(Tamper::NoDescriptors) => fds.clear(),
        }
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let sent = to.send(&bytes, &fds).await;
        if sent.is_err() || matches!(tamper, Some(Tamper::Cut(_))) {
            return;
        }
    }
}

/// An unused address.
fn address() -> SocketAddr {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("millrace-simulated-{}-{count}", std::process::id());
    SocketAddr::from_abstract_name(name).expect("a short name")
}

/// The outcome for a disk whose device does not answer.
#[derive(Debug)]
#[allow(dead_code, reason = "the program of the mutants uses none of it")]
pub struct Unanswered {
    /// From the beginning of the upgrade until the successor served it.
    pub over_ns: u64,
    /// Its guest's requests that were done meanwhile, with earlier requests still at the device.
    pub done: u64,
    /// The longest wait of its neighbour.
    pub neighbour_ns: u64,
    pub resubmitted: u64,
}

/// An upgrade of a node with two disks, one of which has requests at its device that are not
/// answered for a second after the handover.
pub fn unanswered(seed: u64, access: Access) -> Unanswered {
    with_two(seed, async move |outside| outside.meets_no_answer(access).await)
}

/// An upgrade of a node with two disks in which the successor cannot take these messages of a
/// state, of which there are two or more. Returns the number of each disk's connections, and the
/// number of its completed requests as each node reports it.
#[allow(dead_code, reason = "the program of the mutants does not play it")]
pub fn declined(seed: u64, states: &'static [usize]) -> [(u64, [u64; 2]); 2] {
    with_two(seed, async move |outside| outside.is_declined(states).await)
}

/// A node detaches a disk whose device does not answer; meanwhile it is replaced, or told to end.
#[allow(dead_code, reason = "the program of the mutants does not play it")]
pub fn detached(seed: u64, meanwhile: Meanwhile) {
    with_two(seed, async move |outside| outside.detaches(meanwhile).await)
}

/// What happens during a detach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "the program of the mutants does not play it")]
pub enum Meanwhile {
    Nothing,
    Upgrade,
    End,
}

fn with_two<T: Send + 'static>(
    seed: u64,
    play: impl AsyncFn(&mut Outside) -> T + Clone + Send + 'static,
) -> T {
    let world = World::new(seed, 1, SimConfig::default());
    let mut rng = world.rng();
    let guests = IMAGES.map(|image| with_disk_at(&world, &mut rng, image));
    let run = world.run(|core| {
        let machine = |((guest, uri), name): (&(Rc<RefCell<Guest>>, String), &str)| {
            let spec = format!("name={name} uri={uri} socket=/{name}.sock queues={QUEUES}");
            Machine::new(guest, Rc::new(RefCell::new(spec.parse().expect("a disk"))))
        };
        let mut outside =
            Outside::new(core, &world, guests.iter().zip(["a", "b"]).map(machine).collect());
        let play = play.clone();
        async move { play(&mut outside).await }
    });
    run.unwrap_or_else(|failure| panic!("{failure:?}\n{}", world.newest_events())).remove(0)
}

impl Outside {
    /// The number of a guest's requests that have come back.
    fn done(&self, at: usize) -> u64 {
        let guest = self.machines[at].guest.borrow();
        guest.report.requests - guest.in_flight() as u64
    }

    /// Lets both guests run for `ns`, or until a condition is true. Returns the longest wait of the
    /// first one.
    async fn watched(&mut self, ns: u64, so: impl Fn() -> bool) -> u64 {
        let (mut done, mut since_ns, mut longest) = (self.done(0), self.core.now_ns(), 0);
        let end_ns = since_ns + ns;
        while !so() && self.core.now_ns() < end_ns {
            self.since_ns = self.core.now_ns();
            self.idle_ns = 0;
            self.step().await;
            self.core.sleep_ns(1_000_000).await;
            let now_ns = self.core.now_ns();
            if std::mem::replace(&mut done, self.done(0)) != self.done(0) {
                since_ns = now_ns;
            }
            longest = longest.max(now_ns - since_ns);
        }
        longest
    }

    #[allow(dead_code, reason = "the program of the mutants does not play it")]
    async fn detaches(&mut self, meanwhile: Meanwhile) {
        const SECOND: u64 = 1_000_000_000;
        self.start().await;
        self.until("it serves", |outside| outside.nodes[0].serves()).await;
        self.watched(SECOND / 20, || false).await;
        let stuck = Fault::new(FaultKind::Stuck).of(Access::Write).on(IMAGES[1]).times(3);
        self.world.add_fault(stuck);
        let world = self.world.clone();
        self.until("requests are stuck", |_| world.faults().stuck == 3).await;
        let (process, told) = (self.nodes[0].process.clone(), self.nodes[0].told.clone());
        told.detach.borrow_mut().push("b");
        let began_ns = self.core.now_ns();
        let neighbour_ns = self.watched(SECOND, || false).await;
        assert!(neighbour_ns < SECOND / 2, "{neighbour_ns}");
        assert!(told.detached.borrow().is_empty(), "its device has not answered");
        match meanwhile {
            Meanwhile::Nothing => {
                // One detach is enough.
                told.detach.borrow_mut().push("b");
                let again = told.clone();
                self.until("it is refused", |_| !again.detached.borrow().is_empty()).await;
                let refused = told.detached.take().remove(0).unwrap_err();
                assert!(refused.contains("was detached"), "{refused}");
                let done = told.clone();
                self.until("it is detached", |_| !done.detached.borrow().is_empty()).await;
                assert_eq!(told.detached.take(), [Ok(true)]);
                let took_ns = self.core.now_ns() - began_ns;
                assert!((4 * SECOND..6 * SECOND).contains(&took_ns), "{took_ns}");
                self.watched(SECOND, || false).await;
                assert_eq!(*told.names.borrow(), ["a", "b"], "its writes are under way");
                self.world.heal();
                let gone = told.clone();
                self.until("it has gone", |_| *gone.names.borrow() == ["a"]).await;
                told.stop.set(true);
            }
            Meanwhile::Upgrade => {
                let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
                told.hand_over.replace(Some(ours.into()));
                let (_, new) = self.start_successor(theirs.into());
                let over = told.clone();
                self.until("an outcome", |_| over.outcome.borrow().is_some()).await;
                let outcome = told.outcome.take();
                assert!(matches!(outcome, Some(Ok(_))), "{outcome:?}");
                let serves = new.clone();
                self.until("it serves", |_| serves.has_all.get()).await;
                assert_eq!(*new.names.borrow(), ["a"]);
                assert!(self.core.now_ns() < began_ns + 4 * SECOND, "it was waited for");
                new.stop.set(true);
            }
            Meanwhile::End => told.stop.set(true),
        }
        let told_ns = self.core.now_ns();
        self.until("it ends", |_| told.stopped.get()).await;
        let took_ns = self.core.now_ns() - told_ns;
        assert!(took_ns < 6 * SECOND, "{meanwhile:?}: {took_ns}");
        // The system lets its process wait for its operations.
        self.world.heal();
        self.until("its process ends", |_| process.has_ended()).await;
        self.until("all have ended", |outside| outside.nodes.is_empty()).await;
    }

    #[allow(dead_code, reason = "the program of the mutants does not play it")]
    async fn is_declined(&mut self, states: &[usize]) -> [(u64, [u64; 2]); 2] {
        self.start().await;
        self.until("it serves", |outside| outside.nodes[0].serves()).await;
        self.watched(50_000_000, || false).await;
        let (old, old_told) = (self.nodes[0].process.clone(), self.nodes[0].told.clone());
        let (ours, far) = UnixStream::pair().expect("a pair of sockets");
        let (near, theirs) = UnixStream::pair().expect("a pair of sockets");
        let [far, near] = [far, near].map(|end| UnixSocket::from_fd(&self.core, end.into()));
        let (far, near) = (far.expect("a socket"), near.expect("a socket"));
        let struck = states.to_vec();
        self.core.spawn(Class::Foreground, async move {
            let nth = Cell::new(0);
            let strike = async |kind: u32| {
                let strikes = kind == STATE && struck.contains(&nth.get());
                nth.set(nth.get() + usize::from(kind == STATE));
                // In the document, after the disk's name, its magic and its version.
                strikes.then_some(Tamper::Flip(8 * 23))
            };
            let none = async |_| None;
            let mut there = pin!(carry(&far, &near, &strike));
            let mut back = pin!(carry(&near, &far, &none));
            poll_fn(|cx| match (there.as_mut().poll(cx), back.as_mut().poll(cx)) {
                (Poll::Pending, Poll::Pending) => Poll::Pending,
                _ => Poll::Ready(()),
            })
            .await;
        });
        let connected = [0, 1].map(|at| self.machines[at].connects);
        assert_eq!(connected, [1, 1]);
        let before = [0, 1].map(|at| old_told.completions[at].get());
        old_told.hand_over.replace(Some(ours.into()));
        let (new, told) = self.start_successor(theirs.into());
        self.until("an outcome", |_| old_told.outcome.borrow().is_some()).await;
        let outcome = old_told.outcome.take();
        assert!(matches!(outcome, Some(Ok(_))), "{outcome:?}");
        let (process, has_all) = (new.clone(), told.clone());
        self.until("it has all disks", |_| has_all.has_all.get() || process.has_ended()).await;
        self.until("the old one ends", |_| old.has_ended()).await;
        self.watched(50_000_000, || false).await;
        self.machines.iter().for_each(|machine| machine.guest.borrow_mut().ends = true);
        self.until("all is done", |outside| outside.in_flight() == 0).await;
        self.watched(5_000_000, || false).await;
        let after = [0, 1].map(|at| told.completions[at].get());
        told.stop.set(true);
        self.until("all have ended", |outside| outside.nodes.is_empty()).await;
        [0, 1].map(|at| (self.machines[at].connects, [before[at], after[at]]))
    }

    async fn meets_no_answer(&mut self, access: Access) -> Unanswered {
        const SECOND: u64 = 1_000_000_000;
        self.start().await;
        self.until("it serves", |outside| outside.nodes[0].serves()).await;
        self.watched(SECOND / 20, || false).await;
        let stuck = Fault::new(FaultKind::Stuck).of(access).on(IMAGES[1]).times(3);
        self.world.add_fault(stuck);
        let world = self.world.clone();
        self.until("requests are stuck", |_| world.faults().stuck == 3).await;
        let (old, old_told) = (self.nodes[0].process.clone(), self.nodes[0].told.clone());
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        old_told.hand_over.replace(Some(ours.into()));
        let (_, new) = self.start_successor(theirs.into());
        let began_ns = self.core.now_ns();
        let over = new.clone();
        let mut neighbour_ns = self.watched(20 * SECOND, || over.holds.get()).await;
        let over_ns = self.core.now_ns() - began_ns;
        assert!(new.holds.get() && new.serves.get(), "it is not over");
        let before = self.done(1);
        neighbour_ns = neighbour_ns.max(self.watched(SECOND, || false).await);
        let done = self.done(1) - before;
        // Neither process has given up, and no stuck request has come back another way.
        assert!(!old.has_ended() && self.machines[1].guest.borrow().in_flight() > 0);
        self.world.heal();
        self.until("the old one ends", |_| old.has_ended()).await;
        self.watched(SECOND / 10, || false).await;
        self.machines.iter().for_each(|machine| machine.guest.borrow_mut().ends = true);
        self.until("all is done", |outside| outside.in_flight() == 0).await;
        let connects = self.report(|report| report.reconnected);
        assert_eq!(connects, 2, "a connection was lost");
        new.stop.set(true);
        self.until("all have ended", |outside| outside.nodes.is_empty()).await;
        Unanswered { over_ns, done, neighbour_ns, resubmitted: new.resubmitted.get() }
    }
}

/// One or two guests, with their disks and images.
fn one_or_two(world: &World, rng: &mut Rng) -> Vec<(Rc<RefCell<Guest>>, DiskSpec, &'static str)> {
    let count = 1 + rng.index(2);
    let with_disk = |(image, name): (&'static str, &str)| {
        let (guest, uri) = with_disk_at(world, rng, image);
        let spec = format!("name={name} uri={uri} socket=/{name}.sock queues={QUEUES}");
        (guest, spec.parse().expect("a disk"), image)
    };
    IMAGES.into_iter().zip(["a", "b"]).take(count).map(with_disk).collect()
}

/// Plays the history of a seed.
///
/// # Panics
/// When something was lost, done twice, or is not as documented.
pub fn handover(seed: u64) -> Report {
    let world = World::new(seed, 1, SimConfig::default());
    let mut rng = world.rng();
    let guests = one_or_two(&world, &mut rng);
    let told_cache = if rng.coin() { Some(true) } else { None };
    let report: Rc<RefCell<Report>> = Rc::default();
    let boots = 1 + rng.below(2);
    for boot in 1..=boots {
        if boot < boots {
            world.crash_at(Crash::PowerCut, 1..1500);
        }
        let events = 2 + rng.below(4);
        let run = world.run(|core| {
            let machine = |(guest, spec, _): &(Rc<RefCell<Guest>>, DiskSpec, &str)| {
                Machine::new(guest, Rc::new(RefCell::new(spec.clone())))
            };
            let mut outside = Outside {
                report: report.clone(),
                told_cache,
                ..Outside::new(core, &world, guests.iter().map(machine).collect())
            };
            async move { outside.live(events).await }
        });
        world.heal();
        for (guest, _, image) in &guests {
            let mut guest = guest.borrow_mut();
            guest.report.processes += 1;
            guest.ends = false;
            match run.as_ref().map_err(|failure| &failure.kind) {
                Ok(_) => {}
                Err(FailureKind::Crash(Crash::PowerCut)) => {
                    guest.report.power_cuts += 1;
                    let bytes = world.bytes(image).expect("the image");
                    guest.wakes_up(&bytes);
                }
                Err(other) => panic!("{other:?}\n{}", world.newest_events()),
            }
        }
    }
    let mut report = report.borrow().clone();
    report.two = u64::from(guests.len() == 2);
    for (guest, ..) in &guests {
        let guest = guest.borrow();
        assert_eq!(guest.in_flight(), 0);
        report.guest.packed |= guest.report.packed;
        report.guest.power_cuts = guest.report.power_cuts;
        report.guest.requests += guest.report.requests;
        report.guest.resubmitted += guest.report.resubmitted;
        report.guest.checked_sectors += guest.report.checked_sectors;
    }
    report.trace = world.trace();
    report
}
