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
//! it ends. A failed start leaves nothing. Dropping the [`RingHandle`] stops the ring.
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
//!
//! `command` has the connection's ends of a ring. This file has the ring's life and its turns;
//! `submit`, `complete` and `fault` are parts of [`Queue`] and use its state. This room is hot: no
//! allocation, no lock and no system call for a request.

mod command;
mod complete;
mod fault;
mod submit;

use std::cell::{OnceCell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

use bdev::{Bdev, Channel, Done, Kind};
use reactor::{Class, Core, EventFd, EventWatch, OwnedTask, Poller};

use self::command::WaitToken;
pub(crate) use self::command::{
    Command, CommandQueue, Hold, RingEnd, RingHandle, WaitGroup, command_queue,
};
use self::submit::Cut;
use crate::memory::GuestMemory;
use crate::memory::dirty::DirtyLog;
use crate::ring::inflight::InflightArea;
use crate::ring::request::{Disk, Finished, Status as RequestStatus};
use crate::ring::{Fault, Ring, Setup};
use crate::target::limits::{DiskLimits, RingLimits};
use crate::target::log_limit::LogLimits;
use crate::target::share::{DiskActivity, PIECE_MIN, Share, Shares};
use crate::target::stats::QueueStats;
use crate::target::trouble::{ASK_NS, Trouble};

/// Most requests taken in one turn. More would keep the core from its other work for too long.
const TURN: usize = 128;
/// Most consecutive kicks without a request, in addition to one for each entry of the ring. A guest
/// has no reason for more, and each costs the core some microseconds.
const IDLE_KICKS: u32 = 4096;

/// The arguments of a ring.
pub(crate) struct Start {
    pub disk_name: Arc<str>,
    /// What the core is working on while it works for the disk.
    pub work: u64,
    /// The core of the disk.
    pub home: usize,
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
    pub fua: bool,
    pub enabled: bool,
    /// The ring was already broken, in another process or before it was quiesced: it only waits
    /// for its stop.
    pub broken: bool,
    /// Operations of an earlier process may still be in flight.
    pub hold: Option<Hold>,
    /// The ring takes nothing before [`RingHandle::locked`].
    pub waits_for_lock: bool,
    pub device: Bdev,
    /// The disk's activity, shared with the other disks of the process.
    pub activity: DiskActivity,
    pub limits: Arc<DiskLimits>,
    pub stats: Arc<QueueStats>,
    pub log_limits: Arc<LogLimits>,
    pub trouble: Arc<Trouble>,
}

/// Runs a ring until it is told to stop and its requests are completed.
pub(crate) async fn run(core: Core, start: Start, mut commands: CommandQueue) -> RingEnd {
    let (index, base, broken, hold) = (start.index, start.setup.base, start.broken, start.hold);
    let queue = if broken { Err(()) } else { Queue::start(&core, start) };
    let Ok((queue, watch)) = queue else {
        // The failed ring waits, so that it can be stopped like any other.
        until_stop(&mut commands, hold).await;
        return RingEnd::at(index, base, true);
    };
    let queue = Rc::new(RefCell::new(queue));
    let _slot = core.add_poller(QueuePoller(queue.clone()));
    let mut kick = watch.map(|watch| listen(&core, watch, &queue));
    poll_fn(|cx| {
        commands.signals.waker.register(cx.waker());
        while let Some(command) = commands.commands.pop() {
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
        if commands.signals.overflowed.load(Ordering::Acquire) {
            queue.stopping = true;
        }
        if queue.hold.is_some() && commands.signals.released.load(Ordering::Acquire) {
            queue.release();
        }
        if queue.waits_for_lock && commands.signals.locked.load(Ordering::Acquire) {
            queue.waits_for_lock = false;
        }
        if queue.is_quiesced() {
            return Poll::Ready(());
        }
        queue.waiting = queue.stopping.then(|| cx.waker().clone());
        Poll::Pending
    })
    .await;
    drop(kick);
    let queue = queue.borrow();
    let flushes = queue.abandoned && queue.flushes();
    RingEnd { index, base: queue.ring.base(), broken: queue.ring.broken().is_some(), flushes }
}

/// Waits for the guest's kicks. Each wakes the core, which then runs its pollers.
fn listen(core: &Core, watch: EventWatch, queue: &Rc<RefCell<Queue>>) -> OwnedTask<()> {
    let (queue, work) = (queue.clone(), queue.borrow().work);
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
    let there = core.clone();
    let listening = async move { there.working(work, listening).await };
    core.spawn(Class::Foreground, listening).owned()
}

async fn until_stop(commands: &mut CommandQueue, hold: Option<Hold>) {
    let mut stops = false;
    poll_fn(|cx| {
        commands.signals.waker.register(cx.waker());
        while let Some(command) = commands.commands.pop() {
            match command {
                Command::Stop | Command::Leave => stops = true,
                Command::Abandon(_) => return Poll::Ready(()),
                _ => {}
            }
        }
        stops |= commands.signals.overflowed.load(Ordering::Acquire);
        match stops && (hold.is_none() || commands.signals.released.load(Ordering::Acquire)) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}

/// A running ring.
struct Queue {
    core: Core,
    disk_name: Arc<str>,
    work: u64,
    home: usize,
    index: u16,
    ring: Ring,
    memory: Arc<GuestMemory>,
    /// Holds `memory`, for the channel.
    memory_guard: Rc<MemoryGuard>,
    /// For each tag in flight, the memory that the request was popped with, if it was replaced
    /// since; and the number of such requests.
    popped_with: Box<[Option<Rc<MemoryGuard>>]>,
    popped_before: usize,
    disk: Disk,
    channel: Channel,
    log: Option<Arc<DirtyLog>>,
    call: Option<EventFd>,
    err: Option<EventFd>,
    polled: bool,
    fua: bool,
    enabled: bool,
    stopping: bool,
    abandoned: bool,
    hold: Option<Hold>,
    /// Takes nothing before the image is locked.
    waits_for_lock: bool,
    /// Requests that were popped and are held.
    held: Vec<u16>,
    /// Whether a write was flushed since the start, or may have been.
    flushes_writes: bool,
    /// Dropped with the ring and the last operation of its channel.
    in_flight_token: Rc<OnceCell<WaitToken>>,
    /// The task that waits for the end.
    waiting: Option<Waker>,
    share: Rc<Share>,
    limits: RingLimits,
    /// Requests that were popped and not yet submitted, because the device is full, other
    /// disks have their turn, or the disk's rates are limited. Some pieces of the first one may be
    /// submitted.
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
    log_limits: Arc<LogLimits>,
    trouble: Arc<Trouble>,
    /// Requests that the device has failed and that wait until the disk goes on.
    failed: Vec<u16>,
    /// The in-flight region has the requests that are not completed.
    recorded: bool,
    /// The ring continues with that region, here or in another process.
    leaves: bool,
    device: Bdev,
    told_flush_failed: bool,
}

impl Queue {
    /// Starts the ring. Also returns the watch of its kick.
    fn start(core: &Core, start: Start) -> Result<(Queue, Option<EventWatch>), ()> {
        let Start { disk_name, index, setup, memory, disk: shape, .. } = start;
        let failed = |what: &dyn std::fmt::Display| {
            if let Some(permit) = start.log_limits.not_started.permit(core.now_ns()) {
                let (disk, left_out) = (&*disk_name, permit.left_out);
                tracing::warn!(disk, ring = index, left_out, "cannot start a ring: {what}");
            }
            if let Some(err) = &start.err {
                err.signal();
            }
        };
        let recorded = start.inflight.is_some();
        // Memory lost from here on is found in the first turn.
        let losses = reactor::losses();
        let (ring, recovered) =
            Ring::start(&memory, &setup, start.inflight).map_err(|fault| failed(&fault))?;
        (!memory.is_lost()).then_some(()).ok_or_else(|| failed(&Fault::MemoryLost))?;
        EventFd::can_signal().map_err(|error| failed(&error))?;
        let watch = start.kick.as_ref().map(|kick| kick.watch(core)).transpose();
        let watch = watch.map_err(|error| failed(&error))?;
        let mut channel = start.device.channel(core).map_err(|error| failed(&error))?;
        let in_flight_token = Rc::<OnceCell<_>>::default();
        let memory_guard = MemoryGuard::new(&memory, &in_flight_token);
        channel.hold(memory_guard.clone());
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
        let share = core.local::<Shares>().of(&start.activity);
        let mut queue = Queue {
            core: core.clone(),
            disk_name,
            work: start.work,
            home: start.home,
            index,
            ring,
            memory,
            memory_guard,
            popped_with: vec![None; usize::from(setup.num)].into(),
            popped_before: 0,
            disk: shape,
            channel,
            log: start.log,
            call: start.call,
            err: start.err,
            polled: start.polled,
            fua: start.fua,
            enabled: start.enabled,
            stopping: false,
            abandoned: false,
            hold: start.hold,
            waits_for_lock: start.waits_for_lock,
            held: Vec::new(),
            flushes_writes: start.fua || !start.device.geometry().volatile_cache,
            in_flight_token,
            waiting: None,
            share,
            limits: RingLimits::new(start.limits),
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
            log_limits: start.log_limits,
            trouble: start.trouble,
            failed: Vec::new(),
            recorded,
            leaves: false,
            device: start.device,
            told_flush_failed: false,
        };
        // An earlier process may have died, or been quiesced, before it called the guest for what
        // it has completed.
        queue.call_guest();
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
            Command::Call(call) => {
                // A call at the old descriptor may have come too late, or from a process that has
                // died.
                call.iter().for_each(EventFd::signal);
                self.call = call;
            }
            Command::Err(err) => self.err = err,
            Command::Disk(disk) => self.disk = disk,
            Command::Fua(fua) => {
                self.fua = fua;
                self.flushes_writes |= fua;
            }
            Command::Abandon(token) => {
                let _ = self.in_flight_token.set(token);
                self.abandoned = true;
            }
            Command::Stop => self.stopping = true,
            Command::Leave => (self.stopping, self.leaves) = (true, true),
            Command::Kick(_) | Command::Barrier(_) => {}
        }
    }

    /// Requests are popped with this memory from now on. Those that were popped before point into
    /// the old memory and keep it until they are completed: some of them are not submitted yet.
    fn take_memory(&mut self, memory: Arc<GuestMemory>) {
        let old = std::mem::replace(
            &mut self.memory_guard,
            MemoryGuard::new(&memory, &self.in_flight_token),
        );
        for tag in self.ring.tags_in_flight() {
            let place = &mut self.popped_with[usize::from(tag)];
            if place.is_none() {
                *place = Some(old.clone());
                self.popped_before += 1;
            }
        }
        self.channel.hold(self.memory_guard.clone());
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
    fn is_quiesced(&self) -> bool {
        let has_nothing = match self.waits_for_lock {
            // It has taken nothing. What an earlier process has left stays in the in-flight region,
            // or, if the machine leaves the region behind, is done first.
            true => self.leaves_failed() || self.ring.resubmits() == 0,
            false => self.has_nothing(),
        };
        self.abandoned || (self.stopping && self.hold.is_none() && has_nothing)
    }

    fn has_nothing(&self) -> bool {
        self.channel.in_flight() == 0
            && self.deferred.is_empty()
            && (self.failed.is_empty() || self.leaves_failed())
            && (self.ring.broken().is_some()
                || (self.ring.answered() == 0
                    && (self.ring.resubmits() == 0
                        || self.trouble.is_withheld()
                        || (self.trouble.is_lost() && self.leaves_failed()))))
    }

    /// Whether the ring takes new requests.
    fn takes_new(&self) -> bool {
        self.enabled && !self.stopping && !self.is_paused()
    }

    /// Whether nothing is submitted: the device has failed a request, or the disk is withheld.
    #[inline]
    fn is_paused(&self) -> bool {
        self.trouble.stands_still(self.stopping)
    }

    /// Whether a ring that stops leaves requests that wait in the in-flight region. A machine that
    /// moves leaves the region behind, unless it stays here for now.
    fn leaves_failed(&self) -> bool {
        self.recorded && (self.leaves || self.log.is_none())
    }

    /// Whether [`Queue::retry`] would do anything.
    #[inline]
    fn can_retry(&self) -> bool {
        let waits = self.is_paused() || (self.stopping && self.leaves_failed());
        !self.failed.is_empty() && !waits
    }

    /// What has failed is submitted again, or, if the ring stops and cannot leave it, answered.
    #[cold]
    fn retry(&mut self) {
        if self.stopping {
            let status = RequestStatus::IoError;
            self.finished.extend(self.failed.drain(..).map(|tag| Finished { tag, status }));
        } else {
            let now = self.core.now_ns();
            for tag in self.failed.drain(..) {
                // The pause was not the device's.
                self.begun_ns[usize::from(tag)] = now;
                self.deferred.push_back(tag);
            }
        }
    }

    /// Requests of an earlier process are in flight: a ring that takes nothing new finishes them.
    fn pops(&self) -> bool {
        let wanted = self.takes_new() || self.ring.resubmits() > 0;
        let may = !self.waits_for_lock && !self.is_paused() && !self.abandoned;
        wanted && may && self.ring.broken().is_none()
    }

    /// Pops a batch of requests and submits it as far as possible.
    #[inline]
    fn pop(&mut self) {
        // Requests that an earlier process had begun come first, in batches of their own if they
        // are held, or if nothing new is taken.
        let alone = self.hold.is_some() || !self.takes_new();
        let again = if alone { self.ring.resubmits() } else { 0 };
        let most = if again > 0 { again.min(TURN) } else { TURN };
        let popped = self.ring.pop(&self.memory, &self.disk, most, &mut self.tags);
        self.check_memory();
        match popped {
            Ok(taken) => self.taken += taken as u64,
            Err(fault) => self.broke(fault),
        }
        let tags = std::mem::take(&mut self.tags);
        let now = self.core.now_ns();
        let announces = self.channel.heeds_announcements();
        for (nth, &tag) in tags.iter().enumerate() {
            if announces && let Some(&next) = tags.get(nth + 1) {
                self.announce(next);
            }
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
    }

    /// Announces a read to the device.
    #[inline]
    fn announce(&self, tag: u16) {
        let request = self.ring.request(tag);
        if request.kind == Kind::Read {
            self.channel.announce(request.offset, request.len);
        }
    }

    /// One turn. Returns whether it did anything.
    fn turn(&mut self) -> bool {
        let mut worked = false;
        self.check_memory();
        if self.channel.in_flight() > 0 {
            worked |= self.channel.poll(&mut self.done) > 0;
        }
        self.share.begin_round(self.core.rounds());
        if self.is_paused() {
            self.core.turn_at(self.core.now_ns() + ASK_NS);
        } else if self.can_retry() {
            self.retry();
        }
        if !self.deferred.is_empty()
            && !self.stopping
            && let Some(ask_at_ns) = self.limits.waits_until(self.core.now_ns())
        {
            self.core.turn_at(ask_at_ns);
        }
        while let Some(&tag) = self.deferred.front() {
            if self.is_paused() || self.submit(tag).is_err() {
                break;
            }
            self.deferred.pop_front();
            worked = true;
        }
        if self.deferred.is_empty() && self.pops() && self.ring.has_work() {
            worked = true;
            self.pop();
            self.channel.poll(&mut self.done);
        }
        if !self.done.is_empty() || self.ring.answered() > 0 || !self.finished.is_empty() {
            worked = true;
            self.complete();
        }
        if self.waiting.is_some()
            && self.is_quiesced()
            && let Some(waker) = self.waiting.take()
        {
            waker.wake();
        }
        self.stats.turns.add(1);
        if worked || self.channel.in_flight() > 0 {
            self.share.mark_active(self.core.now_ns());
        }
        if worked {
            self.stats.worked.add(1);
            let waiting = self.deferred.len() + self.held.len() + self.failed.len();
            self.stats.depth.set((self.channel.in_flight() + waiting) as u64);
        }
        worked
    }

    /// Whether a turn would do anything.
    fn has_work(&self) -> bool {
        (self.channel.in_flight() > 0 && self.channel.ready())
            || self.can_submit_deferred()
            || self.can_retry()
            || (self.pops() && self.deferred.is_empty() && self.ring.has_work())
    }

    /// Prepares for the core's sleep. Returns false if it must not sleep.
    fn arm(&mut self) -> bool {
        if self.channel.in_flight() > 0 && self.channel.ready() {
            return false;
        }
        if self.can_submit_deferred() || self.can_retry() {
            return false;
        }
        if self.is_paused() {
            // Another ring may have paused the disk after this one's turn.
            self.core.turn_at(self.core.now_ns() + ASK_NS);
            return true;
        }
        if !self.pops() || !self.deferred.is_empty() {
            // The device's next completion wakes the core.
            return true;
        }
        !self.polled
            && self.ring.arm_kick(self.log.as_deref())
            // A ring whose memory is lost gets no kicks.
            && reactor::losses() == self.losses
    }

    fn disarm(&mut self) {
        if self.pops() {
            self.ring.disarm_kick(self.log.as_deref());
        }
    }
}

/// Keeps the memory of a ring's requests mapped. The ring holds one, and each operation of its
/// channel holds the one that was current when its request was popped.
struct MemoryGuard {
    memory: Arc<GuestMemory>,
    _token: Rc<OnceCell<WaitToken>>,
}

impl MemoryGuard {
    fn new(memory: &Arc<GuestMemory>, token: &Rc<OnceCell<WaitToken>>) -> Rc<MemoryGuard> {
        Rc::new(MemoryGuard { memory: memory.clone(), _token: token.clone() })
    }
}

struct QueuePoller(Rc<RefCell<Queue>>);

impl QueuePoller {
    /// Notes that the core works for the disk meanwhile.
    #[inline]
    fn at_work<T>(&self, work: impl FnOnce(&mut Queue) -> T) -> T {
        let queue = &mut *self.0.borrow_mut();
        let before = queue.core.work_on(queue.work);
        let done = work(queue);
        queue.core.work_on(before);
        done
    }
}

impl Poller for QueuePoller {
    fn poll(&mut self) -> bool {
        self.at_work(Queue::turn)
    }

    fn pure_check(&mut self) -> bool {
        self.at_work(|queue| queue.has_work())
    }

    fn arm(&mut self) -> bool {
        self.at_work(Queue::arm)
    }

    fn disarm(&mut self) {
        self.at_work(Queue::disarm);
    }
}
