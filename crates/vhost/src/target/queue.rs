//! A running ring: a poller on the ring's own core that moves requests from guest memory to the
//! device and back.
//!
//! 1. A turn reaps the device's completions, pops the requests that the guest has made available,
//!    and submits them. Requests that complete immediately (memory, null device) are returned to
//!    the guest in the same turn, with one publication and at most one signal. The disk's [`Share`]
//!    (`share.rs`) limits how much is submitted in one turn and how much is at the device: further
//!    requests are deferred, and long requests are split into pieces.
//! 2. While the ring is polled, the guest is told not to kick. Before the core sleeps the ring is
//!    armed: the guest's next kick wakes the core, and so does the device's next completion.
//! 3. The connection sends [`Command`]s (another memory table, a stop) through a queue. They are
//!    executed between two turns.
//!
//! A ring stays on one core from start to stop; [`run`] is its life. A stopping ring pops nothing
//! more and waits for its requests at the device. After that nothing here accesses guest memory.
//!
//! A ring owns its poller, the task that waits for kicks, and its channel, and drops them however
//! it ends. A failed start leaves nothing. Dropping the [`Remote`] stops the ring.
//!
//! A device may take longer than anyone wants to wait. An *abandoned* ring ends immediately:
//! nothing of it is completed or recorded any more, as if the process had been killed, and its
//! operations finish later. A token reports the last of them; until then they may still write to
//! guest memory and to the disk. Until then the ring's successor *holds* the requests that the
//! in-flight region has ([`Hold`]).
//!
//! A ring that the guest has made inconsistent is broken: its err descriptor is signalled and it
//! pops nothing more. Other rings continue. A ring is also broken if the front end has withdrawn
//! its memory (`memory/`): each turn checks for lost memory before it submits what it popped and
//! before it completes requests.

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

/// Most requests taken in one turn. More would keep the core from its other work for too long.
const TURN: usize = 128;
/// Most consecutive kicks without a request, in addition to one for each entry of the ring. A guest
/// has no reason for more, and each costs the core some microseconds.
const IDLE_KICKS: u32 = 4096;
/// Most commands queued for one ring.
const COMMANDS: usize = 256;

/// The arguments of a ring.
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
    /// There is no kick, so the core never sleeps.
    pub polled: bool,
    /// Writes must be durable when they complete.
    pub through: bool,
    pub enabled: bool,
    /// The ring was already broken, in another process or before it was quiesced: it only waits
    /// for its stop.
    pub broken: bool,
    /// Operations of an earlier process may still be in flight.
    pub hold: Option<Hold>,
    pub device: Bdev,
    /// The disk's activity, shared with the other disks of the process.
    pub company: Company,
    pub stats: Arc<QueueStats>,
    pub lines: Arc<Lines>,
}

/// Requests that a ring does not submit before [`Remote::release`], because operations of an
/// earlier process are still in flight: the requests that this process has not finished. They may
/// be executed again, and completed, only when no late read or write of that process can follow.
/// Until then the ring is not quiesced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    /// Whether to hold flushes too: the system reports a write error only once, possibly to a
    /// flush of that process.
    pub flushes: bool,
}

/// A command of the connection to a running ring.
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
    /// Dropped after all earlier commands are executed.
    Obeyed(#[expect(dead_code, reason = "its drop is the signal")] Obeyed),
    /// Abandon the ring. The token is dropped when nothing of the ring is in flight.
    Abandon(Obeyed),
    Stop,
}

/// A token of an [`Obedience`], which counts it until it is dropped.
pub(crate) struct Obeyed(Arc<Waiting>);

impl Drop for Obeyed {
    fn drop(&mut self) {
        // Release: what the ring did before is visible to the connection that reads a count of 0.
        self.0.count.fetch_sub(1, Ordering::Release);
        self.0.waker.wake();
    }
}

#[derive(Default)]
struct Waiting {
    count: AtomicUsize,
    waker: AtomicWaker,
}

/// Waits for several rings on different cores to drop their tokens.
#[derive(Default)]
pub(crate) struct Obedience(Arc<Waiting>);

impl Obedience {
    /// Creates a token, for one ring.
    pub fn token(&self) -> Obeyed {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        Obeyed(self.0.clone())
    }

    /// Whether all tokens are dropped.
    pub fn is_given(&self) -> bool {
        self.0.count.load(Ordering::Acquire) == 0
    }

    /// Ready when all tokens are dropped. The token of a ring that has ended may live as long as
    /// its [`Remote`].
    pub fn poll(&self, cx: &Context<'_>) -> Poll<()> {
        self.0.waker.register(cx.waker());
        match self.0.count.load(Ordering::Acquire) {
            0 => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }
}

/// Signals beside the queue of commands, shared by both ends.
#[derive(Default)]
struct Bell {
    waker: AtomicWaker,
    /// A command found no room.
    overflowed: AtomicBool,
    /// The [`Hold`] has ended.
    released: AtomicBool,
}

/// The connection's end of a ring's commands.
pub(crate) struct Remote {
    commands: Producer<Command>,
    bell: Arc<Bell>,
}

impl Remote {
    /// Sends a command to the ring. If the queue is full, the ring is stopped: the front end sends
    /// more than the ring can take.
    pub fn send(&mut self, command: Command) {
        if self.commands.push_published(command).is_err() {
            self.bell.overflowed.store(true, Ordering::Release);
        }
        self.bell.waker.wake();
    }

    /// Ends the ring's [`Hold`].
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

/// The ring's end of its commands.
pub(crate) struct Orders {
    commands: Consumer<Command>,
    bell: Arc<Bell>,
}

pub(crate) fn remote() -> (Remote, Orders) {
    let (to, from) = reactor::spsc::ring(COMMANDS);
    let bell = Arc::new(Bell::default());
    (Remote { commands: to, bell: bell.clone() }, Orders { commands: from, bell })
}

/// How a ring ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub index: u16,
    /// The position at which another process would continue.
    pub base: u32,
    /// The ring does not continue: it is broken, or could not be started.
    pub broken: bool,
    /// The ring was abandoned with a flush, or a write that is flushed, in flight.
    pub flushes: bool,
}

impl Ended {
    /// The result of a ring that was never started.
    pub fn at(index: u16, base: u32, broken: bool) -> Ended {
        Ended { index, base, broken, flushes: false }
    }
}

/// Runs a ring until it is told to stop and its requests are completed.
pub(crate) async fn run(core: Core, start: Start, mut orders: Orders) -> Ended {
    let (index, base, broken, hold) = (start.index, start.setup.base, start.broken, start.hold);
    let queue = if broken { Err(()) } else { Queue::start(&core, start) };
    let Ok((queue, watch)) = queue else {
        // The failed ring waits, so that it can be stopped like any other.
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

/// Waits for the guest's kicks. Each wakes the core, which then runs its pollers.
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

/// Keeps the memory of a ring's requests mapped. The ring holds one, and each operation of its
/// channel holds the one that was current when its request was popped.
struct Keep {
    memory: Arc<GuestMemory>,
    _under_way: Rc<OnceCell<Obeyed>>,
}

/// The progress of a request that is submitted in pieces.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Bytes submitted.
    at: u64,
    /// Pieces at the device.
    under_way: u32,
    /// The first failure of the completed pieces.
    status: bdev::Status,
}

impl Cut {
    const NEW: Cut = Cut { at: 0, under_way: 0, status: bdev::Status::Ok };
}

/// In the device's tag: this is a piece. The bits below are the request's tag, those above the
/// share's ticket.
const IS_PIECE: u64 = 1 << 16;
const _: () = assert!(IS_PIECE < 1 << TICKET_SHIFT);

/// A running ring.
struct Queue {
    core: Core,
    disk_name: Arc<str>,
    index: u16,
    ring: Ring,
    memory: Arc<GuestMemory>,
    /// Holds `memory`, for the channel.
    keep: Rc<Keep>,
    /// For each tag in flight, the memory that the request was popped with, if it was replaced
    /// since; and the number of such requests.
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
    /// Requests that were popped and are held.
    held: Vec<u16>,
    /// Whether a write was flushed since the start, or may have been.
    flushes_writes: bool,
    /// Dropped with the ring and the last operation of its channel.
    under_way: Rc<OnceCell<Obeyed>>,
    /// The task that waits for the end.
    waiting: Option<Waker>,
    share: Rc<Share>,
    /// Requests that were popped and not yet submitted, because the device is full or other disks
    /// have their turn. Some pieces of the first one may be submitted.
    deferred: VecDeque<u16>,
    /// Progress of long requests, by tag.
    cuts: Box<[Cut]>,
    /// The segments of a piece. Empty between calls.
    piece: Vec<libc::iovec>,
    tags: Vec<u16>,
    done: Vec<Done>,
    finished: Vec<Finished>,
    /// When each request was popped, by tag.
    begun_ns: Box<[u64]>,
    /// Number of requests taken, now and at the last kick.
    taken: u64,
    taken_at_kick: u64,
    /// Kicks since the last request.
    idle_kicks: u32,
    /// Whether the broken ring was reported.
    reported: bool,
    /// [`reactor::losses`] at the last check.
    losses: usize,
    stats: Arc<QueueStats>,
    lines: Arc<Lines>,
}

impl Queue {
    /// Starts the ring. Also returns the watch of its kick.
    fn start(core: &Core, start: Start) -> Result<(Queue, Option<EventWatch>), ()> {
        let Start { disk_name, index, setup, memory, disk: shape, .. } = start;
        let failed = |what: &dyn std::fmt::Display| {
            if let Some(line) = start.lines.not_started.line(core.now_ns()) {
                let (disk, left_out) = (&*disk_name, line.left_out);
                tracing::warn!(disk, ring = index, left_out, "cannot start a ring: {what}");
            }
            if let Some(err) = &start.err {
                err.signal();
            }
        };
        // Memory lost from here on is found in the first turn.
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
                    "a ring resumes with unfinished requests"
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

    /// Handles a kick. Returns false if the guest only kicks: then the ring is broken.
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
    /// the old memory and keep it until they are completed: some of them are not submitted yet.
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

    /// Whether a request is flushed before it completes.
    fn is_flushed(&self, kind: Kind) -> bool {
        kind == Kind::Flush || (kind != Kind::Read && self.flushes_writes)
    }

    /// Whether a request in flight is flushed before it completes.
    fn flushes(&self) -> bool {
        self.ring.kinds_in_flight().any(|kind| self.is_flushed(kind))
    }

    /// Whether to hold a request that was popped. `again`: an earlier process had begun it.
    fn is_held(&self, tag: u16, again: bool) -> bool {
        let Some(hold) = self.hold else { return false };
        again || (hold.flushes && self.is_flushed(self.ring.request(tag).kind))
    }

    /// Ends the hold: no operation of an earlier process is in flight any more.
    fn release(&mut self) {
        self.hold = None;
        self.deferred.extend(self.held.drain(..));
    }

    /// Whether the ring pops nothing more and has nothing in flight, or was abandoned.
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

    /// One turn. Returns whether it did anything.
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
            // Requests that an earlier process had begun come first, in batches of their own.
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

    /// Submits a request, or as much of it as possible now.
    ///
    /// # Errors
    /// If a part of the request is not submitted yet.
    #[inline]
    fn submit(&mut self, tag: u16) -> Result<(), Held> {
        if self.popped_before > 0 {
            return self.submit_held(tag);
        }
        self.submit_now(tag)
    }

    /// Like [`Queue::submit`], while some requests use old memory.
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

    /// Like [`Queue::submit`], when the channel holds the request's memory.
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
            fua: self.through,
        };
        // SAFETY: the segments lie in the mappings of the memory table that the request was popped
        // with. That table is `self.memory` or, after `take_memory` has replaced it, the one in
        // `popped_with`; so it is mapped now. The channel was told to hold this table (`start`,
        // `take_memory`, `submit_held`), and its operations hold it until they have completed, even
        // after this queue is dropped. There are no Rust references to guest memory.
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
                fua: self.through,
            };
            // SAFETY: parts of the request's segments; as in `submit_now`.
            unsafe { self.channel.submit(&io) }.expect("it has room");
            cut.at += len;
            cut.under_way += 1;
        }
        Ok(())
    }

    /// Whether a deferred request could be submitted, in this round or the next.
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
            // `submit_now` made the tag from a `u16`.
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

    /// Releases the old memory of a request that is completed or dropped, if it has any. Marks what
    /// it wrote there in the dirty log: only the old table can translate the addresses.
    #[cold]
    fn forget_memory_of(&mut self, tag: u16) {
        let Some(keep) = self.popped_with[usize::from(tag)].take() else { return };
        self.popped_before -= 1;
        let request = self.ring.request(tag);
        if let (Some(log), Kind::Read) = (&self.log, request.kind) {
            keep.memory.log_segments(request.segments, log);
        }
    }

    /// Logs a failure of the device; of several in one batch, the last one.
    #[cold]
    fn report_failure(&self, tag: u16, status: bdev::Status) {
        let full = status == bdev::Status::NoSpace;
        let seldom = if full { &self.lines.full } else { &self.lines.failed };
        let Some(line) = seldom.line(self.core.now_ns()) else { return };
        let Request { kind, offset, len, .. } = self.ring.request(tag);
        let why = if full { "no space left" } else { "an I/O error" };
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

    /// Breaks the ring if some of its memory is lost. Costs one load while no memory is lost.
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

    /// Whether memory is lost that only earlier requests use.
    fn is_old_memory_lost(&self) -> bool {
        let mut last = None;
        self.popped_with.iter().flatten().any(|keep| {
            let seen = last.replace(keep).is_some_and(|last| Rc::ptr_eq(last, keep));
            !seen && keep.memory.is_lost()
        })
    }

    /// Breaks the ring if it is not broken yet. Requests that are not submitted are dropped.
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

/// Appends the segments of the `len` bytes that start at `skip`.
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
            // The device's next completion wakes the core.
            return true;
        }
        !queue.polled
            && queue.ring.arm_kick(queue.log.as_deref())
            // A ring whose memory is lost gets no kicks.
            && reactor::losses() == queue.losses
    }

    fn disarm(&mut self) {
        let queue = &mut *self.0.borrow_mut();
        if queue.pops() {
            queue.ring.disarm_kick(queue.log.as_deref());
        }
    }
}
