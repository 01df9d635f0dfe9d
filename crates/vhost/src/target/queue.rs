//! One ring at work: a poller on the ring's own core that carries requests from the guest's memory
//! to the device and back.
//!
//! 1. A turn takes what the device has completed, pops what the guest has made available, and
//!    submits it. What completes at once (memory, a device that does nothing) is given back in the
//!    same turn, all with one publication and at most one signal. How much is submitted in one
//!    turn, and how much a disk may have at its device, says its [`Share`] (`share.rs`): what has
//!    to wait is deferred, and a long request goes in pieces.
//! 2. While the ring is looked at the guest is told not to kick. Before the core sleeps the ring is
//!    armed: the guest's next kick wakes the core, and the device's next completion does anyway.
//! 3. What the connection wants (another memory table, a stop) arrives as [`Command`]s, through a
//!    ring of its own, and is done between two turns.
//!
//! A ring runs from its start to its stop on one core; [`run`] is that life. A stop pops nothing
//! more and waits for what is at the device; then nothing here touches the guest's memory again.
//!
//! What a ring needs while it runs (its poller, the task that waits for kicks, the channel) it
//! owns, and it goes with the ring, however that ends; a start that fails leaves nothing. A
//! [`Remote`] that is dropped stops its ring.
//!
//! A device may take longer than anybody wants to wait for. A ring that is *abandoned* is given up
//! at once: nothing of it is given back or noted any more, as if the process had been killed, and
//! its operations end by themselves. When the last of them has, whoever abandoned the ring hears of
//! it: until then they may still write to the guest's memory and to the disk. Whoever goes on with
//! the ring *holds* what the in-flight region says was begun until then ([`Hold`]).
//!
//! A ring that the guest has made meaningless is broken: its err descriptor says so, it takes
//! nothing more, and only this ring stands still. So is a ring whose memory the front end has taken
//! away from under it (`memory.rs`): each turn asks whether any was lost before it submits what it
//! popped and before it says what was done.

use std::cell::{OnceCell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use atomic_waker::AtomicWaker;
use bdev::{Bdev, Channel, Done, Io, QUEUE_DEPTH};
use reactor::spsc::{Consumer, Producer};
use reactor::{Class, Core, EventFd, EventWatch, OwnedTask, Poller};

use crate::memory::GuestMemory;
use crate::memory::dirty::DirtyLog;
use crate::ring::inflight::InflightArea;
use crate::ring::request::{Disk, Finished, Kind, Request, Status};
use crate::ring::{Fault, Ring, Setup};
use crate::target::seldom::Lines;
use crate::target::share::{Company, Held, PIECE_MIN, Share, Shares, TICKET_SHIFT, cost};
use crate::target::stats::QueueStats;

/// Requests taken in one turn. More would keep the core from its other work for too long.
const TURN: usize = 128;
/// Kicks in a row, beside one for each place of the ring, that bring no request. A guest has no
/// reason for them, and each costs the core some microseconds.
const IDLE_KICKS: u32 = 4096;
/// Commands under way to one ring.
const COMMANDS: usize = 256;

/// What a ring is started with.
pub(crate) struct Start {
    pub disk_name: Arc<str>,
    pub index: u16,
    pub setup: Setup,
    pub memory: Arc<GuestMemory>,
    pub disk: Disk,
    pub inflight: Option<InflightArea>,
    pub log: Option<Arc<DirtyLog>>,
    pub kick: Option<EventFd>,
    pub call: Option<EventFd>,
    pub err: Option<EventFd>,
    /// There is no kick: the core never sleeps.
    pub polled: bool,
    /// A write must be durable when it completes.
    pub through: bool,
    pub enabled: bool,
    /// It was found broken already, in another process or before a rest: it only waits for its
    /// stop.
    pub broken: bool,
    /// Operations of an earlier process may still be under way.
    pub hold: Option<Hold>,
    pub device: Bdev,
    /// The disk among those of the process.
    pub company: Company,
    pub stats: Arc<QueueStats>,
    pub lines: Arc<Lines>,
}

/// What a ring does not submit until [`Remote::release`], because operations of an earlier process
/// are still under way: the requests that this process has left unfinished, which may only be done
/// again, and completed, when no late write and no late read of that process can follow. The ring
/// does not come to rest before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    /// Flushes too, since one of that process may be told of an error that the system tells only
    /// once.
    pub flushes: bool,
}

/// What the connection wants of a running ring.
pub(crate) enum Command {
    Enable(bool),
    Memory(Arc<GuestMemory>),
    Log(Option<Arc<DirtyLog>>),
    RingLog(Option<u64>),
    Call(Option<EventFd>),
    Err(Option<EventFd>),
    Kick(Option<EventFd>),
    Disk(Disk),
    Through(bool),
    /// Dropped when all commands before it are done.
    Obeyed(#[expect(dead_code, reason = "what counts is when it is dropped")] Obeyed),
    /// Give the ring up; the token is dropped when nothing of it is under way any more.
    Abandon(Obeyed),
    Stop,
}

/// Tells its [`Obedience`] that it was dropped.
pub(crate) struct Obeyed(Arc<Waiting>);

impl Drop for Obeyed {
    fn drop(&mut self) {
        // Release: what the ring did before is seen by the connection that finds the count at 0.
        self.0.count.fetch_sub(1, Ordering::Release);
        self.0.waker.wake();
    }
}

#[derive(Default)]
struct Waiting {
    count: AtomicUsize,
    waker: AtomicWaker,
}

/// Waits until several rings, each on its own core, have done what they were told.
#[derive(Default)]
pub(crate) struct Obedience(Arc<Waiting>);

impl Obedience {
    /// For one ring.
    pub fn token(&self) -> Obeyed {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        Obeyed(self.0.clone())
    }

    /// Whether they are.
    pub fn is_given(&self) -> bool {
        self.0.count.load(Ordering::Acquire) == 0
    }

    /// Ready when all tokens are gone. The token of a ring that has ended may stay as long as its
    /// [`Remote`].
    pub fn poll(&self, cx: &Context<'_>) -> Poll<()> {
        self.0.waker.register(cx.waker());
        match self.0.count.load(Ordering::Acquire) {
            0 => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }
}

/// What the two ends of a ring's commands share.
#[derive(Default)]
struct Bell {
    waker: AtomicWaker,
    /// There was no room for a command.
    overflowed: AtomicBool,
    /// Nothing is to be held any more.
    released: AtomicBool,
}

/// The connection's end.
pub(crate) struct Remote {
    commands: Producer<Command>,
    bell: Arc<Bell>,
}

impl Remote {
    /// Has the ring do something, soon. A connection that sends more than a ring can take in has
    /// its ring stopped.
    pub fn send(&mut self, command: Command) {
        if self.commands.push_published(command).is_err() {
            self.bell.overflowed.store(true, Ordering::Release);
        }
        self.bell.waker.wake();
    }

    /// Ends its [`Hold`].
    pub fn release(&self) {
        self.bell.released.store(true, Ordering::Release);
        self.bell.waker.wake();
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.send(Command::Stop);
    }
}

/// The ring's end.
pub(crate) struct Orders {
    commands: Consumer<Command>,
    bell: Arc<Bell>,
}

pub(crate) fn remote() -> (Remote, Orders) {
    let (to, from) = reactor::spsc::ring(COMMANDS);
    let bell = Arc::new(Bell::default());
    (Remote { commands: to, bell: bell.clone() }, Orders { commands: from, bell })
}

/// How a ring came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub index: u16,
    /// Where another process would go on.
    pub base: u32,
    /// It does not go on: the guest made it meaningless, or it could not be started.
    pub broken: bool,
    /// It was abandoned with a flush, or a write that is flushed, among what it had begun.
    pub flushes: bool,
}

impl Ended {
    /// A ring that stands where it stood.
    pub fn at(index: u16, base: u32, broken: bool) -> Ended {
        Ended { index, base, broken, flushes: false }
    }
}

/// Runs a ring until it is told to stop and what was popped is given back. Suspends until then.
pub(crate) async fn run(core: Core, start: Start, mut orders: Orders) -> Ended {
    let (index, base, broken, hold) = (start.index, start.setup.base, start.broken, start.hold);
    let queue = if broken { Err(()) } else { Queue::start(&core, start) };
    let Ok((queue, watch)) = queue else {
        // It stays, so that it can be stopped like any other.
        until_stop(&mut orders, hold).await;
        return Ended::at(index, base, true);
    };
    let queue = Rc::new(RefCell::new(queue));
    let _slot = core.add_poller(QueuePoller(queue.clone()));
    let mut kick = watch.map(|watch| listen(&core, watch, &queue));
    poll_fn(|cx| {
        orders.bell.waker.register(cx.waker());
        while let Some(command) = orders.commands.pop() {
            if let Command::Kick(new) = command {
                kick = None;
                match new.map(|kick| kick.watch(&core)).transpose() {
                    Ok(watch) => kick = watch.map(|watch| listen(&core, watch, &queue)),
                    Err(_) => queue.borrow_mut().break_off(Fault::KickUnheard),
                }
            } else {
                queue.borrow_mut().obey(command);
            }
        }
        let mut queue = queue.borrow_mut();
        if orders.bell.overflowed.load(Ordering::Acquire) {
            queue.stopping = true;
        }
        if queue.hold.is_some() && orders.bell.released.load(Ordering::Acquire) {
            queue.release();
        }
        if queue.is_at_rest() {
            return Poll::Ready(());
        }
        queue.waiting = queue.stopping.then(|| cx.waker().clone());
        Poll::Pending
    })
    .await;
    drop(kick);
    let queue = queue.borrow();
    let flushes = queue.abandoned && queue.flushes();
    Ended { index, base: queue.ring.base(), broken: queue.ring.broken().is_some(), flushes }
}

/// Waits for the guest's kicks: each wakes the core, whose pollers then look.
fn listen(core: &Core, watch: EventWatch, queue: &Rc<RefCell<Queue>>) -> OwnedTask<()> {
    let queue = queue.clone();
    let listening = async move {
        loop {
            let heard = watch.raised().await;
            watch.clear();
            let mut queue = queue.borrow_mut();
            if heard.is_err() {
                queue.break_off(Fault::KickUnheard);
            }
            if queue.ring.broken().is_some() || !queue.kicked() {
                return;
            }
        }
    };
    core.spawn(Class::Foreground, listening).owned()
}

async fn until_stop(orders: &mut Orders, hold: Option<Hold>) {
    let mut stops = false;
    poll_fn(|cx| {
        orders.bell.waker.register(cx.waker());
        while let Some(command) = orders.commands.pop() {
            match command {
                Command::Stop => stops = true,
                Command::Abandon(_) => return Poll::Ready(()),
                _ => {}
            }
        }
        stops |= orders.bell.overflowed.load(Ordering::Acquire);
        match stops && (hold.is_none() || orders.bell.released.load(Ordering::Acquire)) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}

/// Keeps the memory of a ring's requests mapped. Each operation of its channel holds the one that
/// was in force when its request was popped, and so does the ring.
struct Keep {
    memory: Arc<GuestMemory>,
    _under_way: Rc<OnceCell<Obeyed>>,
}

/// A request that goes in pieces.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Bytes submitted.
    at: u64,
    /// Pieces at the device.
    under_way: u32,
    /// Of the pieces that have come back, the worst.
    status: bdev::Status,
}

impl Cut {
    const NEW: Cut = Cut { at: 0, under_way: 0, status: bdev::Status::Ok };
}

/// In the device's tag: it is a piece. Below is the request's tag, above the ticket of its share.
const IS_PIECE: u64 = 1 << 16;
const _: () = assert!(IS_PIECE < 1 << TICKET_SHIFT);

/// See the module text.
struct Queue {
    core: Core,
    disk_name: Arc<str>,
    index: u16,
    ring: Ring,
    memory: Arc<GuestMemory>,
    /// Of `memory`: what the channel is told to hold.
    keep: Rc<Keep>,
    /// By tag, of requests popped and not given back: the memory that the request was popped with,
    /// if another has taken its place since. And how many there are.
    popped_with: Box<[Option<Rc<Keep>>]>,
    popped_before: usize,
    disk: Disk,
    channel: Channel,
    log: Option<Arc<DirtyLog>>,
    call: Option<EventFd>,
    err: Option<EventFd>,
    polled: bool,
    through: bool,
    enabled: bool,
    stopping: bool,
    abandoned: bool,
    hold: Option<Hold>,
    /// Popped, and held.
    held: Vec<u16>,
    /// A write was flushed since the start, or may have been.
    flushes_writes: bool,
    /// Dropped when neither the ring nor an operation of its channel is there any more.
    under_way: Rc<OnceCell<Obeyed>>,
    /// Who waits for the end.
    waiting: Option<Waker>,
    share: Rc<Share>,
    /// Popped, and not yet taken by the device: it is full, or others have their turn. Of the
    /// first some pieces may be taken.
    deferred: VecDeque<u16>,
    /// By tag, how far a long request is.
    cuts: Box<[Cut]>,
    /// The segments of a piece. Empty between calls.
    piece: Vec<libc::iovec>,
    tags: Vec<u16>,
    done: Vec<Done>,
    finished: Vec<Finished>,
    /// When each tag's request was popped.
    begun_ns: Box<[u64]>,
    /// Requests taken, and how many there were at the last kick.
    taken: u64,
    taken_at_kick: u64,
    /// Kicks since the last request.
    idle_kicks: u32,
    /// It is broken, and that was said.
    reported: bool,
    /// [`reactor::losses`] when it was looked last.
    losses: usize,
    stats: Arc<QueueStats>,
    lines: Arc<Lines>,
}

impl Queue {
    /// With it what its kick is waited for with.
    fn start(core: &Core, start: Start) -> Result<(Queue, Option<EventWatch>), ()> {
        let Start { disk_name, index, setup, memory, disk: shape, .. } = start;
        let failed = |what: &dyn std::fmt::Display| {
            if let Some(line) = start.lines.not_started.line(core.now_ns()) {
                let (disk, left_out) = (&*disk_name, line.left_out);
                tracing::warn!(disk, ring = index, left_out, "a ring cannot be started: {what}");
            }
            if let Some(err) = &start.err {
                err.signal();
            }
        };
        // What is lost from here on shows in the first turn.
        let losses = reactor::losses();
        let (ring, recovered) =
            Ring::start(&memory, &setup, start.inflight).map_err(|fault| failed(&fault))?;
        (!memory.is_lost()).then_some(()).ok_or_else(|| failed(&Fault::MemoryLost))?;
        EventFd::can_signal().map_err(|error| failed(&error))?;
        let watch = start.kick.as_ref().map(|kick| kick.watch(core)).transpose();
        let watch = watch.map_err(|error| failed(&error))?;
        let mut channel = start.device.channel(core).map_err(|error| failed(&error))?;
        let under_way = Rc::<OnceCell<_>>::default();
        let keep = keep(&memory, &under_way);
        channel.hold(keep.clone());
        if let Some(log) = &start.log {
            ring.log_all(log);
        }
        let (disk, base) = (&*disk_name, ring.base());
        let packed = matches!(ring, Ring::Packed(_));
        match recovered.resubmits {
            0 => tracing::debug!(disk, ring = index, base, packed, "a ring runs"),
            resubmits => {
                tracing::info!(
                    disk,
                    ring = index,
                    base,
                    packed,
                    resubmits,
                    "a ring goes on where it was left"
                );
            }
        }
        start.stats.resubmitted.add(recovered.resubmits as u64);
        let share = core.local::<Shares>().of(&start.company);
        let queue = Queue {
            core: core.clone(),
            disk_name,
            index,
            ring,
            memory,
            keep,
            popped_with: vec![None; usize::from(setup.num)].into(),
            popped_before: 0,
            disk: shape,
            channel,
            log: start.log,
            call: start.call,
            err: start.err,
            polled: start.polled,
            through: start.through,
            enabled: start.enabled,
            stopping: false,
            abandoned: false,
            hold: start.hold,
            held: Vec::new(),
            flushes_writes: start.through || !start.device.geometry().volatile_cache,
            under_way,
            waiting: None,
            share,
            deferred: VecDeque::new(),
            cuts: vec![Cut::NEW; usize::from(setup.num)].into(),
            piece: Vec::new(),
            tags: Vec::with_capacity(TURN),
            done: Vec::with_capacity(TURN),
            finished: Vec::with_capacity(TURN),
            begun_ns: vec![0; usize::from(setup.num)].into(),
            taken: 0,
            taken_at_kick: u64::MAX,
            idle_kicks: 0,
            reported: false,
            losses,
            stats: start.stats,
            lines: start.lines,
        };
        Ok((queue, watch))
    }

    /// The guest has kicked. False when it does nothing but kick: then the ring is broken.
    fn kicked(&mut self) -> bool {
        self.stats.kicks.add(1);
        let idle = std::mem::replace(&mut self.taken_at_kick, self.taken) == self.taken;
        self.idle_kicks = if idle { self.idle_kicks + 1 } else { 0 };
        let storm = self.idle_kicks > IDLE_KICKS + self.begun_ns.len() as u32;
        if storm {
            self.break_off(Fault::KickStorm);
        }
        !storm
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Enable(enabled) => self.enabled = enabled,
            Command::Memory(memory) => self.take_memory(memory),
            Command::Log(log) => {
                if let Some(log) = &log {
                    self.ring.log_all(log);
                }
                self.log = log;
            }
            Command::RingLog(address) => {
                self.ring.set_log(address);
                if let Some(log) = &self.log {
                    self.ring.log_all(log);
                }
            }
            Command::Call(call) => self.call = call,
            Command::Err(err) => self.err = err,
            Command::Disk(disk) => self.disk = disk,
            Command::Through(through) => {
                self.through = through;
                self.flushes_writes |= through;
            }
            Command::Abandon(token) => {
                let _ = self.under_way.set(token);
                self.abandoned = true;
            }
            Command::Stop => self.stopping = true,
            Command::Kick(_) | Command::Obeyed(_) => {}
        }
    }

    /// Requests are popped with this memory from now on. Those that were popped before point into
    /// the memory of then and keep it until they are given back: some of them are not submitted
    /// yet.
    fn take_memory(&mut self, memory: Arc<GuestMemory>) {
        let old = std::mem::replace(&mut self.keep, keep(&memory, &self.under_way));
        for tag in self.ring.tags_in_flight() {
            let place = &mut self.popped_with[usize::from(tag)];
            if place.is_none() {
                *place = Some(old.clone());
                self.popped_before += 1;
            }
        }
        self.channel.hold(self.keep.clone());
        self.memory = memory;
    }

    /// Whether a request is flushed before it is done.
    fn is_flushed(&self, kind: Kind) -> bool {
        kind == Kind::Flush || (kind != Kind::Read && self.flushes_writes)
    }

    /// Whether that is so of a request that was popped and not given back.
    fn flushes(&self) -> bool {
        self.ring.kinds_in_flight().any(|kind| self.is_flushed(kind))
    }

    /// Whether a request that was popped is not submitted yet; `again` says that an earlier process
    /// had begun it.
    fn is_held(&self, tag: u16, again: bool) -> bool {
        let Some(hold) = self.hold else { return false };
        again || (hold.flushes && self.is_flushed(self.ring.request(tag).kind))
    }

    /// No operation of an earlier process is under way any more.
    fn release(&mut self) {
        self.hold = None;
        self.deferred.extend(self.held.drain(..));
    }

    /// Nothing is popped any more, and nothing that was popped is left, or the ring was abandoned.
    fn is_at_rest(&self) -> bool {
        self.abandoned || (self.stopping && self.hold.is_none() && self.has_nothing())
    }

    fn has_nothing(&self) -> bool {
        self.channel.in_flight() == 0
            && self.deferred.is_empty()
            && (self.ring.answered() == 0 || self.ring.broken().is_some())
    }

    fn pops(&self) -> bool {
        self.enabled && !self.stopping && !self.abandoned && self.ring.broken().is_none()
    }

    /// One turn; true when something was done.
    fn turn(&mut self) -> bool {
        let mut worked = false;
        self.look_at_memory();
        if self.channel.in_flight() > 0 {
            worked |= self.channel.poll(&mut self.done) > 0;
        }
        self.share.begin(self.core.rounds());
        while let Some(&tag) = self.deferred.front() {
            if self.submit(tag).is_err() {
                break;
            }
            self.deferred.pop_front();
            worked = true;
        }
        if self.deferred.is_empty() && self.pops() && self.ring.has_work() {
            worked = true;
            // Those that an earlier process had begun come first, and then by themselves.
            let again = if self.hold.is_some() { self.ring.resubmits() } else { 0 };
            let most = if again > 0 { again.min(TURN) } else { TURN };
            let popped = self.ring.pop(&self.memory, &self.disk, most, &mut self.tags);
            self.look_at_memory();
            match popped {
                Ok(taken) => self.taken += taken as u64,
                Err(fault) => self.broke(fault),
            }
            let tags = std::mem::take(&mut self.tags);
            let now = self.core.now_ns();
            for &tag in &tags {
                self.begun_ns[usize::from(tag)] = now;
                if self.ring.request(tag).len > PIECE_MIN {
                    self.cuts[usize::from(tag)] = Cut::NEW;
                }
                if self.is_held(tag, again > 0) {
                    self.held.push(tag);
                } else if !self.deferred.is_empty() || self.submit(tag).is_err() {
                    self.deferred.push_back(tag);
                }
            }
            self.tags = tags;
            self.tags.clear();
            self.channel.poll(&mut self.done);
        }
        if !self.done.is_empty() || self.ring.answered() > 0 {
            worked = true;
            self.give_back();
        }
        if self.waiting.is_some()
            && self.is_at_rest()
            && let Some(waker) = self.waiting.take()
        {
            waker.wake();
        }
        self.stats.turns.add(1);
        if worked || self.channel.in_flight() > 0 {
            self.share.works(self.core.now_ns());
        }
        if worked {
            self.stats.worked.add(1);
            let waiting = self.deferred.len() + self.held.len();
            self.stats.depth.set((self.channel.in_flight() + waiting) as u64);
        }
        worked
    }

    /// Submits a request, or what may be submitted of it now.
    ///
    /// # Errors
    /// When it is not done with that.
    #[inline]
    fn submit(&mut self, tag: u16) -> Result<(), Held> {
        if self.popped_before > 0 {
            return self.submit_held(tag);
        }
        self.submit_now(tag)
    }

    /// The same while another memory than that of now may have to be held for it.
    #[cold]
    fn submit_held(&mut self, tag: u16) -> Result<(), Held> {
        let Some(keep) = self.popped_with[usize::from(tag)].clone() else {
            return self.submit_now(tag);
        };
        self.channel.hold(keep);
        let submitted = self.submit_now(tag);
        self.channel.hold(self.keep.clone());
        submitted
    }

    /// The same of a request whose memory the channel holds.
    #[inline]
    fn submit_now(&mut self, tag: u16) -> Result<(), Held> {
        let request = self.ring.request(tag);
        let kind = match request.kind {
            Kind::Read => bdev::Kind::Read,
            Kind::Write => bdev::Kind::Write,
            Kind::Flush => bdev::Kind::Flush,
            Kind::Discard => bdev::Kind::Discard,
            Kind::WriteZeroes { unmap } => bdev::Kind::WriteZeroes { unmap },
        };
        let now = self.core.now_ns();
        if request.len > PIECE_MIN
            && matches!(kind, bdev::Kind::Read | bdev::Kind::Write)
            && (self.cuts[usize::from(tag)].at > 0 || request.len > self.share.piece(now))
        {
            return self.submit_pieces(tag, kind);
        }
        if self.channel.in_flight() >= QUEUE_DEPTH {
            return Err(Held);
        }
        let ticket = self.share.take(cost(&request), now)?;
        let io = Io {
            kind,
            offset: request.offset,
            len: request.len,
            segments: request.segments,
            tag: u64::from(tag) | ticket,
            through: self.through,
        };
        // SAFETY: the segments lie in the mappings of the memory table that the request was popped
        // with. It is `self.memory` or, once a later table has taken its place (`take_memory`), in
        // `popped_with`, so it is mapped now. The channel was told to hold just this table
        // (`start`, `take_memory`, `submit_held`), and its operations hold it until they
        // have completed, also when this queue is gone. Nothing has a Rust reference to
        // guest memory.
        unsafe { self.channel.submit(&io) }.expect("it has room");
        self.stats.begin(request.kind, request.len);
        Ok(())
    }

    #[cold]
    fn submit_pieces(&mut self, tag: u16, kind: bdev::Kind) -> Result<(), Held> {
        let request = self.ring.request(tag);
        let cut = &mut self.cuts[usize::from(tag)];
        while cut.at < request.len {
            let now = self.core.now_ns();
            let len = (request.len - cut.at).min(self.share.piece(now));
            if self.channel.in_flight() >= QUEUE_DEPTH {
                return Err(Held);
            }
            let ticket = self.share.take(len, now)?;
            if cut.at == 0 {
                self.stats.begin(request.kind, request.len);
            }
            self.piece.clear();
            slice(request.segments, cut.at, len, &mut self.piece);
            let io = Io {
                kind,
                offset: request.offset + cut.at,
                len,
                segments: &self.piece,
                tag: u64::from(tag) | IS_PIECE | ticket,
                through: self.through,
            };
            // SAFETY: parts of the request's segments: see `submit_now`.
            unsafe { self.channel.submit(&io) }.expect("it has room");
            cut.at += len;
            cut.under_way += 1;
        }
        Ok(())
    }

    /// Whether something that was deferred could be submitted, in this round or the next.
    fn can_go_on(&self) -> bool {
        let next = |&tag: &u16| {
            let (request, now) = (self.ring.request(tag), self.core.now_ns());
            let cost = match request.kind {
                Kind::Read | Kind::Write => cost(&request).min(self.share.piece(now)),
                _ => cost(&request),
            };
            self.channel.in_flight() < QUEUE_DEPTH && self.share.has_room(cost, now)
        };
        self.deferred.front().is_some_and(next)
    }

    fn give_back(&mut self) {
        self.look_at_memory();
        let now = match self.done.is_empty() {
            true => 0,
            false => self.core.now_exact_ns(),
        };
        let mut failed = None;
        for mut done in self.done.drain(..) {
            self.share.give_back(done.tag, now);
            // The tag came from a `u16` in `submit_now`.
            let tag = done.tag as u16;
            let Request { kind, len, .. } = self.ring.request(tag);
            if done.tag & IS_PIECE != 0 {
                let cut = &mut self.cuts[usize::from(tag)];
                cut.under_way -= 1;
                if cut.status == bdev::Status::Ok {
                    cut.status = done.status;
                }
                if cut.under_way > 0 || cut.at < len {
                    continue;
                }
                done.status = cut.status;
            }
            let begun = self.begun_ns[usize::from(tag)];
            self.stats.of(kind).latency.add(now.saturating_sub(begun));
            let status = match done.status {
                bdev::Status::Ok => Status::Ok,
                bdev::Status::Unsupported => Status::Unsupported,
                bdev::Status::IoError | bdev::Status::NoSpace => {
                    self.stats.failed(kind, done.status == bdev::Status::NoSpace);
                    failed = Some((tag, done.status));
                    Status::IoError
                }
            };
            self.finished.push(Finished { tag, status });
        }
        if let Some((tag, status)) = failed {
            self.report_failure(tag, status);
        }
        if self.popped_before > 0 {
            for nth in 0..self.finished.len() {
                self.forget_memory_of(self.finished[nth].tag);
            }
        }
        let given = self.ring.complete(&self.memory, self.log.as_deref(), &self.finished);
        self.finished.clear();
        self.stats.completed(given as u64);
        if self.ring.should_signal()
            && let Some(call) = &self.call
        {
            self.stats.signals.add(1);
            call.signal();
        }
    }

    /// A request is given back or dropped: it needs the memory of before no longer, if it had such.
    /// What it wrote there is marked in the dirty log, since only the table of then can say
    /// where that is for the guest.
    #[cold]
    fn forget_memory_of(&mut self, tag: u16) {
        let Some(keep) = self.popped_with[usize::from(tag)].take() else { return };
        self.popped_before -= 1;
        let request = self.ring.request(tag);
        if let (Some(log), Kind::Read) = (&self.log, request.kind) {
            keep.memory.log_segments(request.segments, log);
        }
    }

    /// Says what the device could not do; of several requests that came back together, the last
    /// one.
    #[cold]
    fn report_failure(&self, tag: u16, status: bdev::Status) {
        let full = status == bdev::Status::NoSpace;
        let seldom = if full { &self.lines.full } else { &self.lines.failed };
        let Some(line) = seldom.line(self.core.now_ns()) else { return };
        let Request { kind, offset, len, .. } = self.ring.request(tag);
        let why = if full { "there is no space left" } else { "an I/O error" };
        let (disk, ring, left_out) = (&*self.disk_name, self.index, line.left_out);
        tracing::error!(
            disk,
            ring,
            offset,
            len,
            left_out,
            "the device failed a request ({kind:?}): {why}"
        );
    }

    /// Breaks the ring if some of its memory is lost. Costs one load while nobody's is.
    #[inline]
    fn look_at_memory(&mut self) {
        if reactor::losses() != self.losses {
            self.break_if_lost();
        }
    }

    #[cold]
    fn break_if_lost(&mut self) {
        self.losses = reactor::losses();
        let log = self.log.as_ref().is_some_and(|log| log.is_lost());
        if log || self.memory.is_lost() || self.ring.is_lost() || self.is_old_memory_lost() {
            self.break_off(Fault::MemoryLost);
        }
    }

    /// Whether memory is lost that only requests of before still have.
    fn is_old_memory_lost(&self) -> bool {
        let mut last = None;
        self.popped_with.iter().flatten().any(|keep| {
            let seen = last.replace(keep).is_some_and(|last| Rc::ptr_eq(last, keep));
            !seen && keep.memory.is_lost()
        })
    }

    /// Breaks the ring, if it is not broken already. What was popped and not submitted is dropped.
    #[cold]
    fn break_off(&mut self, fault: Fault) {
        if self.reported {
            return;
        }
        self.tags.extend(self.deferred.drain(..).chain(self.held.drain(..)));
        for nth in 0..self.tags.len() {
            self.forget_memory_of(self.tags[nth]);
        }
        self.ring.break_off(fault, &mut self.tags);
        self.broke(fault);
        if let Some(waker) = self.waiting.as_ref() {
            waker.wake_by_ref();
        }
    }

    #[cold]
    fn broke(&mut self, fault: Fault) {
        if std::mem::replace(&mut self.reported, true) {
            return;
        }
        if let Some(line) = self.lines.broken.line(self.core.now_ns()) {
            let (disk, ring, left_out) = (&*self.disk_name, self.index, line.left_out);
            tracing::warn!(disk, ring, left_out, "the guest broke a ring: {fault}");
        }
        self.stats.broken.add(1);
        if let Some(err) = &self.err {
            err.signal();
        }
    }
}

fn keep(memory: &Arc<GuestMemory>, under_way: &Rc<OnceCell<Obeyed>>) -> Rc<Keep> {
    Rc::new(Keep { memory: memory.clone(), _under_way: under_way.clone() })
}

/// Appends the segments of `len` bytes from `skip` on.
fn slice(segments: &[libc::iovec], skip: u64, len: u64, out: &mut Vec<libc::iovec>) {
    let (mut skip, mut left) = (skip as usize, len as usize);
    for segment in segments {
        let from = skip.min(segment.iov_len);
        let n = (segment.iov_len - from).min(left);
        skip -= from;
        left -= n;
        if n > 0 {
            let iov_base = segment.iov_base.wrapping_byte_add(from);
            out.push(libc::iovec { iov_base, iov_len: n });
        }
        if left == 0 {
            return;
        }
    }
}

struct QueuePoller(Rc<RefCell<Queue>>);

impl Poller for QueuePoller {
    fn poll(&mut self) -> bool {
        self.0.borrow_mut().turn()
    }

    fn pure_check(&mut self) -> bool {
        let queue = self.0.borrow();
        (queue.channel.in_flight() > 0 && queue.channel.ready())
            || queue.can_go_on()
            || (queue.pops() && queue.deferred.is_empty() && queue.ring.has_work())
    }

    fn arm(&mut self) -> bool {
        let queue = &mut *self.0.borrow_mut();
        if queue.channel.in_flight() > 0 && queue.channel.ready() {
            return false;
        }
        if queue.can_go_on() {
            return false;
        }
        if !queue.pops() || !queue.deferred.is_empty() {
            // A completion of the device wakes the core.
            return true;
        }
        !queue.polled
            && queue.ring.arm_kick(queue.log.as_deref())
            // Nobody will kick a ring that is not there.
            && reactor::losses() == queue.losses
    }

    fn disarm(&mut self) {
        let queue = &mut *self.0.borrow_mut();
        if queue.pops() {
            queue.ring.disarm_kick(queue.log.as_deref());
        }
    }
}
