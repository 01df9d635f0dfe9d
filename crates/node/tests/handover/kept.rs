//! A guest whose node is killed again and again, while the launcher keeps its connection.
//!
//! The outside process also plays the launcher, with the real front door. A front end sends its
//! set-up in pieces, then reads and changes the session, and pauses, stops and starts rings, while
//! nodes are killed at one [`Moment`] after the other, or replaced, and the launcher's program is
//! replaced. In every case:
//!
//! 1. A front end connects once, and its connection is never closed. Each message that has a reply
//!    gets one, in order; nothing else is sent to the front end.
//! 2. The session continues: what a front end reads is what it was told before. A ring that it has
//!    stopped completes nothing, and one that it has paused takes nothing, whichever node serves.
//! 3. The guest reads what it wrote, and no request comes back twice. All finally come back.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;

use frontend::message::{flags, protocol, request};
use frontend::{Connection, Session};
use node::DiskSpec;
use node::simulated::FrontDoor;
use reactor::sim::{Crash, FailureKind, Rng, SimConfig, World};
use reactor::{Class, Core, Event, UnixSocket};
use sim::guest::{END_NS, Guest, QUEUES};

use super::{HEADER, Machine, Outside, Running, message, one_or_two};

/// Size of the configuration that front ends read, and where it has the write cache.
const CONFIG_BYTES: usize = 60;
const WRITE_CACHE: usize = 32;
/// Attempts to meet a moment.
const LOOKS: u64 = 400;
/// A reply comes within this time after the last death of a node.
const REPLY_NS: u64 = 5_000_000_000;

/// When a node is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// It has just been started.
    Begins,
    /// The front end has not sent all of its set-up.
    SetsUp,
    /// A part of a message was sent.
    Partial,
    /// A message is not answered.
    Asked,
    /// A ring is stopped, or being stopped.
    Stopped,
    /// A ring is paused.
    Paused,
    /// Requests of the guest are in flight.
    InFlight,
    /// Any other.
    Other,
}

const MOMENTS: [Moment; 8] = [
    Moment::Begins,
    Moment::SetsUp,
    Moment::Partial,
    Moment::Asked,
    Moment::Stopped,
    Moment::Paused,
    Moment::InFlight,
    Moment::Other,
];

/// What has happened in a world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub started: u64,
    /// Nodes that were killed, by moment.
    pub killed: [u64; MOMENTS.len()],
    /// Upgrades, those after which the successor served, and those on whose way a node was killed.
    pub upgrades: u64,
    pub switched: u64,
    pub killed_upgrading: u64,
    /// Programs of the launcher after the first.
    pub renewed: u64,
    pub power_cuts: u64,
    /// Messages that were answered, rings that were stopped, and that were paused.
    pub answered: u64,
    pub stopped: u64,
    pub paused: u64,
    pub packed: bool,
    pub requests: u64,
    pub resubmitted: u64,
    pub checked_sectors: u64,
    pub trace: (u64, u64),
}

/// A front end, as it is seen from outside.
struct Talk {
    session: Session,
    /// The requests whose replies are due.
    due: RefCell<VecDeque<u32>>,
    /// The replies that are more than an acknowledgement.
    replies: RefCell<VecDeque<Vec<u8>>>,
    /// Notified after each reply.
    heard: Event,
    sets_up: Cell<bool>,
    is_partial: Cell<bool>,
    stops: Cell<bool>,
    pauses: Cell<bool>,
    /// It is to end, and has ended.
    ends: Cell<bool>,
    ended: Cell<bool>,
    answered: Cell<u64>,
    stopped: Cell<u64>,
    paused: Cell<u64>,
}

impl Talk {
    fn is_at(&self, moment: Moment) -> bool {
        match moment {
            Moment::SetsUp => self.sets_up.get(),
            Moment::Partial => self.is_partial.get(),
            Moment::Asked => !self.due.borrow().is_empty(),
            Moment::Stopped => self.stops.get(),
            Moment::Paused => self.pauses.get(),
            Moment::Begins | Moment::InFlight | Moment::Other => true,
        }
    }

    /// Takes the replies of a launcher.
    async fn hear(&self, from: &UnixSocket) {
        while let Some((bytes, fds)) = message(from, 8).await {
            let word = |at: usize| u32::from_le_bytes(bytes[at..][..4].try_into().unwrap());
            let asked = self.due.borrow_mut().pop_front().expect("a reply to something");
            assert_eq!((word(0), word(4)), (asked, flags::VERSION | flags::REPLY));
            assert!(fds.is_empty(), "a descriptor with a reply to {asked}");
            let body = bytes[HEADER..].to_vec();
            match has_reply(asked) {
                true => self.replies.borrow_mut().push_back(body),
                false => assert_eq!(body, [0; 8], "message {asked} was refused"),
            }
            self.answered.set(self.answered.get() + 1);
            self.heard.notify_all();
        }
        assert!(self.ended.get(), "the connection was closed");
    }

    /// Carries messages to a launcher, in pieces. Asks for an acknowledgement of some.
    async fn tell(&self, core: &Core, rng: &mut Rng, from: &UnixSocket, to: &UnixSocket) {
        let mut acknowledged = false;
        while let Some((mut bytes, fds)) = message(from, 8).await {
            let asked = bytes[0].into();
            if acknowledged && !has_reply(asked) && rng.coin() {
                bytes[4] |= flags::NEED_REPLY as u8;
            }
            if asked == request::SET_PROTOCOL_FEATURES {
                bytes[HEADER] |= protocol::REPLY_ACK as u8;
                acknowledged = true;
            }
            if has_reply(asked) || bytes[4] & flags::NEED_REPLY as u8 != 0 {
                self.due.borrow_mut().push_back(asked);
            }
            let mut fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            let mut left = &bytes[..];
            while !left.is_empty() {
                let length = if rng.coin() { left.len() } else { 1 + rng.index(left.len()) };
                let (piece, rest) = left.split_at(length);
                if to.send(piece, &fds).await.is_err() {
                    return;
                }
                fds.clear();
                left = rest;
                self.is_partial.set(!left.is_empty());
                core.sleep_ns(rng.below(20_000)).await;
            }
            // Some front ends wait for each reply.
            if rng.coin() {
                self.heard.wait_until(|| self.due.borrow().is_empty()).await;
            }
        }
    }

    /// Sends a request, and waits for its reply.
    async fn ask(&self, request: u32, body: &[u8]) -> Vec<u8> {
        self.session.connection().send(request, 0, body, &[]).expect("it is read");
        self.heard.wait_for(|| self.replies.borrow_mut().pop_front()).await
    }

    /// Waits until a message has an effect: a later one is answered.
    async fn done(&self) {
        self.ask(request::GET_QUEUE_NUM, &[]).await;
    }

    async fn config(&self) -> Vec<u8> {
        self.ask(request::GET_CONFIG, &config(0, &[0; CONFIG_BYTES])).await
    }

    /// The life of a front end.
    async fn live(&self, core: &Core, mut rng: Rng, guest: &RefCell<Guest>) {
        let mut known = self.config().await;
        self.sets_up.set(false);
        let asked = [
            request::GET_FEATURES,
            request::GET_PROTOCOL_FEATURES,
            request::GET_QUEUE_NUM,
            request::GET_MAX_MEM_SLOTS,
        ];
        let mut answers = [const { None }; 4];
        while !self.ends.get() {
            core.sleep_ns(rng.below(300_000)).await;
            match rng.below(8) {
                0 | 1 => {
                    let nth = rng.index(asked.len());
                    let answer = self.ask(asked[nth], &[]).await;
                    let expected = answers[nth].get_or_insert_with(|| answer.clone());
                    assert_eq!(answer, *expected, "another answer to {}", asked[nth]);
                }
                2 | 3 => assert_eq!(self.config().await, known, "another configuration"),
                4 => {
                    let cache = &mut known[HEADER + WRITE_CACHE];
                    *cache ^= 1;
                    let cache = [*cache];
                    self.session.set_config(WRITE_CACHE as u32, &cache).expect("it is read");
                }
                5 => self.pause(core, &mut rng, guest).await,
                _ => self.stop(core, &mut rng, guest).await,
            }
        }
        self.done().await;
        self.ended.set(true);
    }

    /// Pauses a ring for a while.
    async fn pause(&self, core: &Core, rng: &mut Rng, guest: &RefCell<Guest>) {
        let ring = rng.below(QUEUES) as u16;
        self.session.set_vring_enable(ring, false).expect("it is read");
        self.done().await;
        self.pauses.set(true);
        self.paused.set(self.paused.get() + 1);
        let (in_flight, before) = guest.borrow().counts(ring);
        core.sleep_ns(rng.below(4_000_000)).await;
        guest.borrow_mut().step();
        let (_, after) = guest.borrow().counts(ring);
        assert!(after - before <= in_flight, "paused ring {ring} was served");
        self.pauses.set(false);
        self.session.set_vring_enable(ring, true).expect("it is read");
    }

    /// Stops one ring or all for a while.
    async fn stop(&self, core: &Core, rng: &mut Rng, guest: &RefCell<Guest>) {
        let one = rng.below(2 * QUEUES);
        let rings: Vec<_> = (0..QUEUES)
            .filter(|&ring| one >= QUEUES || ring == one)
            .map(|ring| ring as u16)
            .collect();
        self.stops.set(true);
        let mut before = Vec::new();
        for &ring in &rings {
            let which = u64::from(ring).to_le_bytes();
            let reply = self.ask(request::GET_VRING_BASE, &which).await;
            let words = [0, 4].map(|at| u32::from_le_bytes(reply[at..][..4].try_into().unwrap()));
            assert_eq!(words[0], u32::from(ring));
            let mut guest = guest.borrow_mut();
            guest.ring_stopped(ring, words[1]);
            guest.step();
            before.push(guest.counts(ring).1);
            self.stopped.set(self.stopped.get() + 1);
        }
        core.sleep_ns(rng.below(4_000_000)).await;
        let mut guest = guest.borrow_mut();
        guest.step();
        for (&ring, before) in rings.iter().zip(before) {
            assert_eq!(guest.counts(ring).1, before, "stopped ring {ring} was served");
            guest.starts_ring(&self.session, ring).expect("it is read");
        }
        self.stops.set(false);
    }
}

/// Whether a request has a reply that is more than an acknowledgement.
fn has_reply(asked: u32) -> bool {
    use request::{
        GET_CONFIG, GET_FEATURES, GET_MAX_MEM_SLOTS, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM,
        GET_VRING_BASE,
    };
    [
        GET_CONFIG,
        GET_FEATURES,
        GET_MAX_MEM_SLOTS,
        GET_PROTOCOL_FEATURES,
        GET_QUEUE_NUM,
        GET_VRING_BASE,
    ]
    .contains(&asked)
}

/// The body of a message about these bytes of the configuration.
fn config(offset: u32, bytes: &[u8]) -> Vec<u8> {
    let numbers = [offset, bytes.len() as u32, 0];
    let header = numbers.iter().flat_map(|number| number.to_le_bytes());
    header.chain(bytes.iter().copied()).collect()
}

impl Outside {
    /// Connects the front end of a machine to its launcher.
    fn connect_kept(&mut self, at: usize) -> Rc<Talk> {
        let machine = &mut self.machines[at];
        machine.connects += 1;
        let target = UnixStream::connect_addr(&machine.address).expect("the launcher listens");
        let target = UnixSocket::from_fd(&self.core, target.into()).expect("a connection");
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let source = UnixSocket::from_fd(&self.core, theirs.into()).expect("a socket");
        let guest = machine.guest.clone();
        let session = guest.borrow().connects(Connection::new(ours)).expect("it is read");
        let talk = Rc::new(Talk {
            session,
            due: RefCell::default(),
            replies: RefCell::default(),
            heard: Event::new(),
            sets_up: Cell::new(true),
            is_partial: Cell::new(false),
            stops: Cell::new(false),
            pauses: Cell::new(false),
            ends: Cell::new(false),
            ended: Cell::new(false),
            answered: Cell::new(0),
            stopped: Cell::new(0),
            paused: Cell::new(0),
        });
        let (hears, from) = (talk.clone(), target.clone());
        self.core.spawn(Class::Foreground, async move { hears.hear(&from).await });
        let (tells, core, mut rng) = (talk.clone(), self.core.clone(), self.rng.fork());
        self.core.spawn(Class::Foreground, async move {
            tells.tell(&core, &mut rng, &source, &target).await;
        });
        let (lives, core, rng) = (talk.clone(), self.core.clone(), self.rng.fork());
        self.core.spawn(Class::Foreground, async move { lives.live(&core, rng, &guest).await });
        talk
    }

    /// Replaces the launcher's program, or not.
    fn renew(&mut self, report: &RefCell<Report>) {
        if self.rng.below(3) == 0 {
            report.borrow_mut().renewed += 1;
            for machine in &mut self.machines {
                machine.launcher.as_mut().expect("a launcher").renew().expect("its state");
            }
        }
    }

    /// Lets a node take over from the one that serves. One of both may be killed on the way.
    async fn upgrade_kept(&mut self, report: &RefCell<Report>) {
        self.until("it serves", |outside| outside.nodes[0].serves()).await;
        let (old, old_told) = (self.nodes[0].process.clone(), self.nodes[0].told.clone());
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        old_told.hand_over.replace(Some(ours.into()));
        let (new, told) = self.start_successor(theirs.into());
        let most = 4 + self.rng.below(6);
        let turns = self.rng.below(1 << most);
        match self.rng.below(3) {
            0 => old.kill_after(turns),
            1 => new.kill_after(turns),
            _ => {}
        }
        self.until("an outcome", |_| old_told.outcome.borrow().is_some() || old.has_ended()).await;
        let gave_up = matches!(&*old_told.outcome.borrow(), Some(Err(_)));
        let mut killed = new.was_killed();
        if gave_up {
            assert!(!told.serves.get(), "both serve");
            // As the process that has started it does.
            new.kill_after(0);
            old.spare();
            self.until("the successor ends", |_| new.has_ended()).await;
        } else {
            self.until("the successor serves", |_| told.has_all.get() || new.has_ended()).await;
            self.until("the old one ends", |_| old.has_ended()).await;
            killed = new.was_killed();
            new.spare();
        }
        {
            let mut report = report.borrow_mut();
            report.upgrades += 1;
            report.switched += u64::from(!new.has_ended());
            report.killed_upgrading += u64::from(killed || old.was_killed());
        }
        if old.has_ended() && new.has_ended() {
            self.until("all have ended", |outside| outside.nodes.is_empty()).await;
            self.start().await;
        }
    }

    /// Kills the node at a moment.
    async fn kill_at(&mut self, moment: Moment, talks: &[Rc<Talk>]) -> Moment {
        let some = talks[self.rng.index(talks.len())].clone();
        if !matches!(moment, Moment::Begins | Moment::SetsUp) {
            for _ in 0..self.rng.below(40) {
                self.step().await;
            }
            (self.since_ns, self.idle_ns) = (self.core.now_ns(), 0);
        }
        let is_now = |outside: &Outside| match moment {
            Moment::InFlight => outside.in_flight() > 0,
            moment => some.is_at(moment),
        };
        let mut looks = 0;
        // What is set up once is not waited for.
        while !is_now(self) && moment != Moment::SetsUp && looks < LOOKS {
            looks += 1;
            (self.since_ns, self.idle_ns) = (self.core.now_ns(), 0);
            match looks.is_multiple_of(8) {
                true => self.step().await,
                false => self.core.sleep_ns(self.rng.below(10_000)).await,
            }
        }
        let moment = if is_now(self) { moment } else { Moment::Other };
        let most = match moment {
            Moment::Begins => 80,
            Moment::SetsUp => 200,
            _ if self.rng.coin() => 1,
            _ => 12,
        };
        let turns = self.rng.below(most);
        self.nodes[0].process.kill_after(turns);
        self.until("it is dead", |outside| outside.nodes.is_empty()).await;
        moment
    }

    /// The life of the guests, until all their requests are done or the power is cut.
    async fn live_kept(&mut self, events: u64, report: &RefCell<Report>) {
        for machine in &mut self.machines {
            let listener: OwnedFd = UnixListener::bind_addr(&machine.address).unwrap().into();
            let name = machine.spec.borrow().name.clone();
            machine.launcher = Some(FrontDoor::new(&self.core, &name, listener).expect("a door"));
        }
        let talks: Vec<_> = (0..self.machines.len()).map(|at| self.connect_kept(at)).collect();
        self.start().await;
        for nth in 0..events {
            (self.since_ns, self.idle_ns) = (self.core.now_ns(), 0);
            if self.rng.below(4) == 0 {
                self.upgrade_kept(report).await;
                continue;
            }
            let moment = match nth {
                0 if self.rng.coin() => Moment::SetsUp,
                _ => MOMENTS[self.rng.index(MOMENTS.len())],
            };
            if moment == Moment::Other {
                for _ in 0..self.rng.below(20) {
                    self.step().await;
                }
                self.renew(report);
            }
            let moment = self.kill_at(moment, &talks).await;
            report.borrow_mut().killed[moment as usize] += 1;
            (self.since_ns, self.idle_ns) = (self.core.now_ns(), 0);
            for _ in 0..self.rng.below(10) {
                self.step().await;
            }
            self.renew(report);
            self.start().await;
            report.borrow_mut().started += 1;
        }
        (self.since_ns, self.idle_ns) = (self.core.now_ns(), 0);
        self.until("it serves", |outside| outside.nodes.iter().any(Running::serves)).await;
        for _ in 0..self.rng.below(60) {
            self.step().await;
        }
        talks.iter().for_each(|talk| talk.ends.set(true));
        let end_ns = self.core.now_ns() + REPLY_NS;
        while !talks.iter().all(|talk| talk.ended.get()) {
            assert!(self.core.now_ns() < end_ns, "a message is not answered");
            (self.since_ns, self.idle_ns) = (self.core.now_ns(), 0);
            self.step().await;
        }
        self.machines.iter().for_each(|machine| machine.guest.borrow_mut().ends = true);
        let end_ns = self.core.now_ns() + END_NS;
        while self.in_flight() > 0 {
            let lost = self.in_flight();
            assert!(self.core.now_ns() < end_ns, "{lost} requests are lost");
            self.step().await;
        }
        for (talk, machine) in talks.iter().zip(&self.machines) {
            assert_eq!(machine.connects, 1);
            assert!(talk.due.borrow().is_empty() && talk.replies.borrow().is_empty());
            let mut report = report.borrow_mut();
            report.answered += talk.answered.get();
            report.stopped += talk.stopped.get();
            report.paused += talk.paused.get();
        }
        self.nodes.iter().for_each(|node| node.told.stop.set(true));
        self.until("all have ended", |outside| outside.nodes.is_empty()).await;
        for machine in &self.machines {
            machine.launcher.iter().for_each(FrontDoor::freeze);
        }
    }
}

/// Plays the history of a seed.
///
/// # Panics
/// When something was lost, done or answered twice, or is not as documented.
pub fn kept(seed: u64) -> Report {
    let world = World::new(seed, 1, SimConfig::default());
    let mut rng = world.rng();
    let guests = one_or_two(&world, &mut rng);
    let report = Rc::<RefCell<Report>>::default();
    let boots = 1 + rng.below(2);
    for boot in 1..=boots {
        if boot < boots {
            world.crash_at(Crash::PowerCut, 1..1500);
        }
        let events = 3 + rng.below(5);
        let run = world.run(|core| {
            let machine = |(guest, spec, _): &(Rc<RefCell<Guest>>, DiskSpec, &str)| {
                Machine::new(guest, Rc::new(RefCell::new(spec.clone())))
            };
            let mut outside = Outside::new(core, &world, guests.iter().map(machine).collect());
            let report = report.clone();
            async move { outside.live_kept(events, &report).await }
        });
        world.heal();
        report.borrow_mut().power_cuts += u64::from(run.is_err());
        for (guest, _, image) in &guests {
            let mut guest = guest.borrow_mut();
            guest.ends = false;
            match run.as_ref().map_err(|failure| &failure.kind) {
                Ok(_) => {}
                Err(FailureKind::Crash(Crash::PowerCut)) => {
                    let bytes = world.bytes(image).expect("the image");
                    guest.wakes_up(&bytes);
                }
                Err(other) => panic!("{other:?}\n{}", world.newest_events()),
            }
        }
    }
    let mut report = report.borrow().clone();
    for (guest, ..) in &guests {
        let guest = guest.borrow();
        assert_eq!(guest.in_flight(), 0);
        report.packed |= guest.report.packed;
        report.requests += guest.report.requests;
        report.resubmitted += guest.report.resubmitted;
        report.checked_sectors += guest.report.checked_sectors;
    }
    report.trace = world.trace();
    report
}
