//! A guest whose machine moves between two hosts, and its disk along with it, from node to node,
//! while nodes are killed and connections are lost at any step.
//!
//! The test plays the guest, its front end, the operators, and the state directories. In every
//! case:
//!
//! 1. The guest reads what it wrote, and no request comes back twice ([`sim::guest`] checks both).
//! 2. Where the guest has begun it finds its disk; where it comes back to, because its migration
//!    has failed, it finds it, too.
//! 3. A guest that has begun at the destination gets nothing at the source.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr as NetAddress;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::rc::Rc;

use frontend::message::request;
use frontend::{Connection, Session};
use node::DiskSpec;
use node::simulated::{Kept, Listen, Node};
use reactor::sim::{Process, Rng, SimConfig, World};
use reactor::{Class, Core, UnixSocket, race};
use sim::guest::{END_NS, Guest, QUEUES, SECTOR, SECTORS, with_disk_at};

use super::{LOOK_NS, PATIENCE_NS, Running, StateDirectory, Told, address, message, serve};

/// The image of each host.
const IMAGES: [&str; 2] = ["/disks/a.img", "/disks/b.img"];
/// How long a guest waits for its disk at the destination before its migration fails.
const BEGIN_NS: u64 = 15_000_000_000;
/// How long a guest is watched that must get nothing.
const NOTHING_NS: u64 = 1_500_000_000;

/// What has happened in a world.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Moves that were begun.
    pub begun: u64,
    /// Moves after which the guest has begun at the other host.
    pub sent: u64,
    /// Migrations that have failed, and those of them whose disk had been given, or was sent.
    pub failed: u64,
    pub given: u64,
    /// Nodes that were killed, and times that all connections were lost.
    pub killed: u64,
    pub resets: u64,
    /// Nodes that have taken over from others while a disk was on its way.
    pub upgraded: u64,
    /// Upgrades that have failed while the disk was being copied from there.
    pub refused: u64,
    /// Guests that went back although they had begun, and got nothing.
    pub nothing: u64,
    pub checked_sectors: u64,
}

/// A host: its disk, its state directory and its node.
struct Host {
    spec: Rc<RefCell<DiskSpec>>,
    /// Where front ends connect, and other nodes.
    address: SocketAddr,
    net: NetAddress,
    kept: Rc<StateDirectory>,
    node: Option<Running>,
    /// Nobody starts it again.
    stays_down: bool,
}

impl Host {
    /// How far the disk is, as the state directory has it.
    fn stage(&self) -> String {
        let transfer = self.kept.transfer("a").unwrap_or_default();
        let stage = transfer.split("\"stage\":\"").nth(1).and_then(|rest| rest.split('"').next());
        stage.unwrap_or("here").to_owned()
    }

    fn completions(&self) -> u64 {
        self.node.as_ref().map_or(0, |node| node.told.completions[0].get())
    }
}

/// The work of a node that also takes disks.
async fn receive_and_serve(core: &Core, node: Node, net: NetAddress, told: &Rc<Told>) {
    // Connections of a process that was killed may hold the address for a moment.
    while node.receive(net).is_err() {
        core.sleep_ns(LOOK_NS).await;
    }
    serve(core, node, told).await;
}

/// A front end's connection to a node.
struct FrontEnd {
    session: Session,
    gone: Rc<Cell<bool>>,
    /// Where its rings were stopped, as far as it was told.
    bases: Rc<RefCell<Vec<Option<u32>>>>,
    stops: bool,
}

/// Everything that is not a node.
struct Outside {
    core: Core,
    world: World,
    rng: Rng,
    guest: Rc<RefCell<Guest>>,
    hosts: [Host; 2],
    /// The host where the machine is, and whether its guest runs.
    at: usize,
    runs: bool,
    front_end: Option<FrontEnd>,
    /// Processes that are to be killed.
    doomed: Vec<Process>,
    report: Report,
}

impl Outside {
    /// Lets the world run for a moment.
    async fn step(&mut self) {
        if self.runs {
            self.guest.borrow_mut().step();
        }
        let ns = self.rng.below(200_000);
        self.core.sleep_ns(ns).await;
        for nth in 0..2 {
            let ended = |node: &Running| node.process.has_ended();
            if self.hosts[nth].node.as_ref().is_none_or(ended) {
                let killed =
                    self.hosts[nth].node.take().is_some_and(|node| node.process.was_killed());
                self.report.killed += u64::from(killed);
                if !self.hosts[nth].stays_down && self.rng.below(10) == 0 {
                    self.start(nth);
                }
            }
        }
        if self.front_end.as_ref().is_none_or(|front_end| front_end.gone.get()) {
            self.front_end = None;
            self.connect();
        }
    }

    async fn steps(&mut self, most: u64) {
        for _ in 0..self.rng.below(most) {
            self.step().await;
        }
    }

    /// Lets the world run until a condition is true, for at most `ns`.
    async fn within(&mut self, ns: u64, so: impl Fn(&Outside) -> bool) -> bool {
        let end_ns = self.core.now_ns() + ns;
        while !so(self) {
            if self.core.now_ns() >= end_ns {
                return false;
            }
            self.step().await;
            // A guest that waits is looked at less often.
            self.core.sleep_ns(self.rng.below(3_000_000)).await;
        }
        true
    }

    async fn until(&mut self, what: &str, so: impl Fn(&Outside) -> bool) {
        let done = self.within(PATIENCE_NS, so).await;
        let stages = self.hosts.each_ref().map(Host::stage);
        assert!(done, "not within {PATIENCE_NS} ns: {what}; at {}, {stages:?}", self.at);
    }

    /// Starts a node, if nobody listens any more.
    fn start(&mut self, nth: usize) {
        let host = &mut self.hosts[nth];
        let Ok(listener) = UnixListener::bind_addr(&host.address) else { return };
        let disks = vec![(host.spec.borrow().clone(), listener.into())];
        let told = Rc::<Told>::default();
        let (own, kept, net) = (told.clone(), host.kept.clone() as Rc<dyn Kept>, host.net);
        let process = self.world.start_process(move |core| async move {
            let node = Node::start(&core, disks, Some(true), kept).await;
            let node = node.expect("nobody has the image any more");
            receive_and_serve(&core, node, net, &own).await;
        });
        host.node = Some(Running { process, told });
    }

    /// Connects the front end, if a node listens.
    fn connect(&mut self) {
        let Ok(stream) = UnixStream::connect_addr(&self.hosts[self.at].address) else { return };
        let target = UnixSocket::from_fd(&self.core, stream.into()).expect("a connection");
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let session = self.guest.borrow().connects(Connection::new(ours)).expect("it is read");
        let source = UnixSocket::from_fd(&self.core, theirs.into()).expect("a socket");
        let gone = Rc::new(Cell::new(false));
        let bases = Rc::new(RefCell::new(vec![None; QUEUES as usize]));
        let (ended, told) = (gone.clone(), bases.clone());
        self.core.spawn(Class::Foreground, async move {
            let there = async {
                while let Some((bytes, fds)) = message(&source, 8).await {
                    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                    if target.send(&bytes, &fds).await.is_err() {
                        return;
                    }
                }
            };
            let back = async {
                while let Some((bytes, _)) = message(&target, 8).await {
                    let word =
                        |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
                    assert_eq!(word(0), request::GET_VRING_BASE);
                    told.borrow_mut()[word(12) as usize] = Some(word(16));
                }
            };
            // Whoever closes it first, it ends at both sides.
            race(there, back).await;
            ended.set(true);
        });
        self.front_end = Some(FrontEnd { session, gone, bases, stops: false });
    }

    /// Stops the guest and its rings, as the last phase of a migration does.
    async fn stop(&mut self) {
        self.runs = false;
        let end_ns = self.core.now_ns() + PATIENCE_NS;
        loop {
            if let Some(front_end) = &mut self.front_end {
                if !std::mem::replace(&mut front_end.stops, true) {
                    for ring in 0..QUEUES as u32 {
                        let body = [ring.to_le_bytes(), [0; 4]].concat();
                        // It may have gone.
                        let _ = front_end.session.tell(request::GET_VRING_BASE, &body, &[]);
                    }
                }
                let bases: Option<Vec<u32>> = front_end.bases.borrow().iter().copied().collect();
                if let Some(bases) = bases {
                    return self.guest.borrow_mut().moves(&bases);
                }
            }
            assert!(self.core.now_ns() < end_ns, "the rings do not stop");
            self.step().await;
        }
    }

    /// The machine continues at a host.
    fn go_on(&mut self, at: usize) {
        self.front_end = None;
        (self.at, self.runs) = (at, true);
    }

    /// A disk waits for its data: what an operator does with `detach` and `attach --incoming`.
    async fn prepare(&mut self, there: usize) {
        self.hosts[there].stays_down = true;
        if let Some(node) = &self.hosts[there].node {
            node.process.kill_after(0);
        }
        self.until("it ends", |outside| {
            outside.hosts[there].node.as_ref().is_none_or(|node| node.process.has_ended())
        })
        .await;
        self.hosts[there].node = None;
        self.hosts[there].stays_down = false;
        let waits = r#"{"stage":"incoming","id":null}"#;
        self.hosts[there].kept.keep_transfer("a", Some(waits.to_owned()));
        self.until("it serves", |outside| {
            outside.hosts[there].node.as_ref().is_some_and(Running::serves)
        })
        .await;
    }

    /// Lets another process take over from a host's node.
    async fn upgrade(&mut self, nth: usize) {
        let host = &mut self.hosts[nth];
        let Some(old) = host.node.as_ref().filter(|node| node.serves()) else { return };
        let (old, old_told) = (old.process.clone(), old.told.clone());
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        old_told.hand_over.replace(Some(ours.into()));
        host.stays_down = true;
        let (spec, address) = (host.spec.borrow().clone(), host.address.clone());
        let (kept, net) = (host.kept.clone() as Rc<dyn Kept>, host.net);
        let listen: Listen =
            Rc::new(move |_| UnixListener::bind_addr(&address).ok().map(OwnedFd::from));
        let told = Rc::<Told>::default();
        let own = told.clone();
        let process = self.world.start_process(move |core| async move {
            let Ok(node) = Node::inherit(&core, &[spec], theirs.into(), listen, kept).await else {
                return;
            };
            receive_and_serve(&core, node, net, &own).await;
        });
        if self.rng.below(3) == 0 {
            process.kill_after(self.rng.below(200));
            self.doomed.push(process.clone());
        }
        let new = Running { process, told };
        let decided = || old_told.outcome.borrow().is_some() || old.has_ended();
        self.until("an outcome", |_| decided()).await;
        let fails = matches!(&*old_told.outcome.borrow(), Some(Err(_)));
        let settled = || new.process.has_ended() || !fails && new.serves() && old.has_ended();
        self.until("one node", |_| settled()).await;
        let host = &mut self.hosts[nth];
        host.stays_down = false;
        self.report.refused += u64::from(fails && host.stage() == "sending");
        if new.serves() {
            host.node = Some(new);
            self.report.upgraded += 1;
        }
    }

    /// Disturbs what follows.
    fn disturb(&mut self) {
        for nth in 0..2 {
            if self.rng.below(3) == 0
                && let Some(node) = &self.hosts[nth].node
            {
                let most = self.rng.below(13);
                node.process.kill_after(self.rng.below(1 << most));
                self.doomed.push(node.process.clone());
            }
        }
    }

    fn spare(&mut self) {
        self.doomed.drain(..).for_each(|process| process.spare());
    }

    /// Moves the machine to the other host, and its disk along with it.
    async fn migrate(&mut self) {
        let (here, there) = (self.at, 1 - self.at);
        // A move whose machine's migration has failed goes on.
        let goes_on = self.hosts[here].stage() == "sending";
        if !goes_on {
            self.prepare(there).await;
        }
        self.until("it serves", |outside| {
            outside.hosts[here].node.as_ref().is_some_and(Running::serves)
        })
        .await;
        self.steps(30).await;
        let net = self.hosts[there].net;
        if let Some(node) = self.hosts[here].node.as_ref().filter(|_| !goes_on) {
            node.told.begin_send.set(Some(net));
        }
        let begun =
            self.within(2_000_000_000, |outside| outside.hosts[here].stage() == "sending").await;
        self.report.begun += u64::from(begun);
        self.disturb();
        if self.rng.below(3) == 0 {
            self.steps(100).await;
            let nth = self.rng.index(2);
            self.upgrade(nth).await;
        }
        self.steps(150).await;
        if self.rng.below(3) == 0 {
            self.world.reset_connections();
            self.report.resets += 1;
        }
        self.steps(60).await;
        self.stop().await;
        let fails = self.rng.below(4) == 0;
        if fails || self.rng.coin() {
            // The rest may arrive before the machine.
            self.core.sleep_ns(self.rng.below(40_000_000)).await;
        }
        self.go_on(if fails { here } else { there });
        if !fails {
            let begins = |outside: &Outside| outside.hosts[there].stage() == "begun";
            if self.within(BEGIN_NS, begins).await {
                self.spare();
                self.steps(30).await;
                self.report.sent += 1;
                return self.go_back_for_nothing(here, there).await;
            }
            // Its migration fails after all.
            self.stop().await;
            let began = begins(self);
            self.go_on(if began { there } else { here });
            if began {
                return self.spare();
            }
        }
        self.report.failed += 1;
        self.report.given += u64::from(["given", "sent"].contains(&&*self.hosts[here].stage()));
        self.spare();
        let requests = self.guest.borrow().report.requests;
        self.until("the guest goes on", |outside| {
            let guest = outside.guest.borrow();
            guest.report.requests > requests + 20
        })
        .await;
        assert!(["here", "sending", "begun"].contains(&&*self.hosts[here].stage()));
        if self.rng.coin() {
            return;
        }
        // The next move begins anew.
        if let Some(node) = &self.hosts[here].node {
            node.told.end_move.set(Some(false));
        }
        let ended = |outside: &Outside| outside.hosts[here].stage() != "sending";
        while !self.within(5_000_000_000, ended).await {
            if let Some(node) = &self.hosts[here].node {
                node.told.end_move.set(Some(false));
            }
        }
    }

    /// Sometimes somebody starts a machine at the source that has begun at the destination.
    async fn go_back_for_nothing(&mut self, here: usize, there: usize) {
        if self.rng.below(3) > 0 {
            return;
        }
        self.stop().await;
        let before = self.hosts[here].completions();
        self.go_on(here);
        let end_ns = self.core.now_ns() + NOTHING_NS;
        while self.core.now_ns() < end_ns {
            self.step().await;
            self.core.sleep_ns(self.rng.below(20_000_000)).await;
        }
        let after = self.hosts[here].completions();
        assert!(after == before || after == 0, "both hosts serve the disk");
        self.report.nothing += 1;
        self.stop().await;
        self.go_on(there);
    }

    async fn live(&mut self) {
        for _ in 0..1 + self.rng.below(3) {
            self.until("it serves", |outside| {
                outside.hosts[outside.at].node.as_ref().is_some_and(Running::serves)
            })
            .await;
            self.steps(40).await;
            self.migrate().await;
        }
        self.guest.borrow_mut().ends = true;
        let end_ns = self.core.now_ns() + 2 * END_NS;
        while self.guest.borrow().in_flight() > 0 {
            assert!(self.core.now_ns() < end_ns, "requests are lost");
            self.step().await;
        }
        self.report.checked_sectors = self.guest.borrow().report.checked_sectors;
        self.front_end = None;
        for host in &mut self.hosts {
            if let Some(node) = host.node.take() {
                node.process.kill_after(0);
            }
        }
    }
}

/// Plays the history of a seed.
///
/// # Panics
/// When something was lost, done twice, or read wrongly.
pub fn sends(seed: u64) -> Report {
    let world = World::new(seed, 1, SimConfig::default());
    let mut rng = world.rng();
    let (guest, uri) = with_disk_at(&world, &mut rng, IMAGES[0]);
    world.add_file(IMAGES[1], vec![0xEE; (SECTORS * SECTOR) as usize]);
    let host = |nth: usize| {
        let uri = uri.replace(IMAGES[0], IMAGES[nth]);
        let spec = format!("name=a uri={uri} socket=/a.sock queues={QUEUES}");
        Host {
            spec: Rc::new(RefCell::new(spec.parse().expect("a disk"))),
            address: address(),
            net: NetAddress::from(([10, 0, 0, 1 + nth as u8], 7070)),
            kept: Rc::new(StateDirectory { specs: Vec::new(), transfers: RefCell::default() }),
            node: None,
            stays_down: false,
        }
    };
    let hosts = RefCell::new(Some([host(0), host(1)]));
    let report = Rc::<RefCell<Report>>::default();
    let told = report.clone();
    let inside = world.clone();
    let run = world.run(move |core| {
        let mut outside = Outside {
            core,
            world: inside.clone(),
            rng: inside.rng(),
            guest: guest.clone(),
            hosts: hosts.take().expect("one core"),
            at: 0,
            runs: true,
            front_end: None,
            doomed: Vec::new(),
            report: Report::default(),
        };
        let told = told.clone();
        async move {
            outside.live().await;
            told.replace(outside.report.clone());
        }
    });
    if let Err(failure) = run {
        panic!("{:?}\n{}", failure.kind, world.newest_events());
    }
    report.take()
}
