//! A core: one event loop, its tasks, operations, timers, buffers and channels to other cores.
//!
//! One turn of the loop:
//!
//! 1. take messages: from other cores (at most 32 from each) and from foreign threads;
//! 2. run pollers and ready tasks, class by class, within the turn's budget; operations that tasks
//!    start are staged, and submitted early when 16 are staged;
//! 3. publish messages to other cores, one wake-up for each that sleeps;
//! 4. submit everything staged and reap completions in one system call; completions only fill slots
//!    and mark tasks ready, no task runs meanwhile;
//! 5. fire timers; if the turn did nothing, idle (see `idle`).
//!
//! Only the core's own thread touches this state, except [`crate::remote::Shared`]. No borrow of a
//! cell spans a call into a task. A waker borrows only the task table. No future is dropped while a
//! cell is borrowed.

use std::any::{Any, TypeId};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use crate::buf::{Buf, Pool, Promise};
use crate::driver::sim::SimDriver;
use crate::driver::{Completion, DirEntry, Driver, IoOp, MetaOp, MetaOut, Token, Wait, host};
use crate::file::{Fd, File, Mode, Opening, SharedFile};
use crate::idle::{Idle, PollMode};
use crate::mesh::{Envelope, Mesh};
use crate::net::Listener;
use crate::op::{Hold, Nature, OpId, Ops, Payload};
use crate::poller::{PollerSlot, Pollers};
use crate::remote::{self, Inbox, Remote, Shared};
use crate::stats::CoreStats;
use crate::task::{self, BoxFuture, CLASSES, Class, TaskId, Tasks};
use crate::timer::{TimerId, Timers};

/// Most tasks of one class that run in one turn, whatever time they take.
const TASKS_PER_TURN: usize = 512;
/// Share of one turn of foreground work, and of background and bulk work together.
const BUDGET_NS: u64 = 100_000;
/// With this many staged operations the core submits before the end of the turn.
const STAGED_MAX: usize = 16;
/// The first threshold after a wait, for disk operations: the device may be idle.
const STAGED_FIRST: usize = 2;
/// Messages taken from one other core, or from foreign threads, in one turn.
const MESSAGES_PER_TURN: usize = 32;
/// Most rounds of the pollers in one turn in which nothing else is ready.
const POLLS_PER_TURN: usize = 4;
/// Checks of the pollers between two checks of everything else, while the core spins.
const LOOKS: u32 = 16;
/// How long a task waits for memory.
const MEMORY_PATIENCE_NS: u64 = 10_000_000_000;
/// With more disk operations in flight, those of background work wait.
const BACKGROUND_DEPTH: usize = 32;

/// The settings of one core; see [`crate::runtime`].
pub(crate) struct CoreConfig {
    pub id: usize,
    pub cores: usize,
    pub memory: usize,
    pub disk_depth: usize,
    pub poll: PollMode,
    pub seed: u64,
}

pub(crate) struct Inner {
    pub(crate) uid: u32,
    id: usize,
    cores: usize,
    shared: Arc<Shared>,
    inbox: RefCell<Inbox>,
    driver: RefCell<Box<dyn Driver>>,
    ops: RefCell<Ops>,
    backlog: RefCell<Backlog>,
    pub(crate) tasks: RefCell<Tasks>,
    timers: RefCell<Timers>,
    mesh: RefCell<Mesh>,
    pollers: RefCell<Pollers>,
    /// Work for a poller has come: all of them run in the next turn, whatever their back-off.
    look: Cell<bool>,
    /// Rounds of the pollers so far.
    rounds: Cell<u64>,
    locals: RefCell<BTreeMap<TypeId, Rc<dyn Any>>>,
    /// Latest time of the next turn, in which all pollers run.
    turn_at: Cell<u64>,
    calls: RefCell<Calls>,
    idle: RefCell<Idle>,
    done: RefCell<Vec<Completion>>,
    pool: Pool,
    now: Cell<u64>,
    class: Cell<Class>,
    /// Staged disk operations at which the core submits early: few after a wait, then twice as
    /// many each time.
    lump: Cell<usize>,
    deadline: Cell<u64>,
    random: Cell<u64>,
    /// Cores of the runtime whose main task has ended.
    ended: Cell<usize>,
    disk_depth: usize,
    stats: CoreStats,
}

/// Disk operations that wait for queue depth, by class, in order of arrival.
#[derive(Default)]
struct Backlog([VecDeque<(Token, IoOp)>; CLASSES]);

impl Backlog {
    fn len(&self) -> usize {
        self.0.iter().map(VecDeque::len).sum()
    }

    fn remove(&mut self, token: Token) -> bool {
        for queue in &mut self.0 {
            if let Some(at) = queue.iter().position(|(t, _)| *t == token) {
                queue.remove(at);
                return true;
            }
        }
        false
    }
}

/// Calls to other cores whose answer is pending.
#[derive(Default)]
struct Calls {
    slots: Vec<CallSlot>,
    free: Vec<u32>,
}

#[derive(Default)]
struct CallSlot {
    generation: u32,
    answer: Option<Box<dyn Any + Send>>,
    waker: Option<Waker>,
}

/// A handle on one core's event loop, through which code reaches everything outside: clock, files,
/// sockets, other cores. Clones are local and cheap; it cannot leave its thread.
#[derive(Clone)]
pub struct Core(Rc<Inner>);

impl Core {
    pub(crate) fn new(
        config: CoreConfig,
        shared: Arc<Shared>,
        inbox: Inbox,
        driver: Box<dyn Driver>,
        mesh: Mesh,
    ) -> Core {
        let uid = remote::register(&shared);
        let mut driver = driver;
        let now = driver.now_ns();
        let simulated = driver.sim().map(|sim| sim.closing());
        Core(Rc::new(Inner {
            uid,
            id: config.id,
            cores: config.cores,
            shared,
            inbox: RefCell::new(inbox),
            driver: RefCell::new(driver),
            ops: RefCell::new(Ops::new(simulated)),
            backlog: RefCell::default(),
            tasks: RefCell::default(),
            timers: RefCell::default(),
            mesh: RefCell::new(mesh),
            pollers: RefCell::default(),
            look: Cell::new(false),
            rounds: Cell::new(0),
            locals: RefCell::default(),
            turn_at: Cell::new(u64::MAX),
            calls: RefCell::default(),
            idle: RefCell::new(Idle::new(config.poll)),
            done: RefCell::new(Vec::with_capacity(1024)),
            pool: Pool::new(config.memory),
            now: Cell::new(now),
            class: Cell::new(Class::Control),
            lump: Cell::new(STAGED_FIRST),
            deadline: Cell::new(u64::MAX),
            random: Cell::new(config.seed),
            ended: Cell::new(0),
            disk_depth: config.disk_depth,
            stats: CoreStats::default(),
        }))
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.0
    }

    /// This core's number, from 0.
    pub fn id(&self) -> usize {
        self.0.id
    }

    /// Number of cores of the runtime.
    pub fn cores(&self) -> usize {
        self.0.cores
    }

    /// Monotonic nanoseconds, read once per turn.
    pub fn now_ns(&self) -> u64 {
        self.0.now.get()
    }

    /// Monotonic nanoseconds, read now.
    pub fn now_exact_ns(&self) -> u64 {
        self.0.driver.borrow_mut().now_ns()
    }

    /// Milliseconds since 1970.
    pub fn unix_time_ms(&self) -> u64 {
        self.0.driver.borrow_mut().unix_time_ms()
    }

    /// A pseudo-random number from the core's own generator (splitmix64). Its seed comes from
    /// the host, or from the simulator's seed. Not for secrets.
    pub fn random_u64(&self) -> u64 {
        let state = self.0.random.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
        self.0.random.set(state);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// The name of the driver in use.
    pub fn driver_name(&self) -> &'static str {
        self.0.driver.borrow().name()
    }

    /// Whether the core's files are those of a simulated world.
    pub fn is_simulated(&self) -> bool {
        self.0.driver.borrow_mut().sim().is_some()
    }

    /// An eventfd that ends the core's sleep, for a kernel interface that signals one. A signal
    /// only means that the core should check for work; it does not tell the sender.
    pub fn wake_descriptor(&self) -> i32 {
        self.0.shared.event_fd()
    }

    /// This core's one value of type `T`, which pollers of one kind share. It is made at the first
    /// call.
    pub fn local<T: Default + 'static>(&self) -> Rc<T> {
        let mut locals = self.0.locals.borrow_mut();
        let local = locals.entry(TypeId::of::<T>()).or_insert_with(|| Rc::new(T::default()));
        local.clone().downcast().unwrap_or_else(|_| unreachable!("it is found by its type"))
    }

    /// Rounds of this core's pollers so far, including the current one.
    pub fn rounds(&self) -> u64 {
        self.0.rounds.get()
    }

    /// Counters of this core.
    pub fn stats(&self) -> &CoreStats {
        &self.0.stats
    }

    /// Tasks alive on this core.
    pub fn live_tasks(&self) -> usize {
        self.0.tasks.borrow().live()
    }

    /// Operations started and not yet reaped.
    pub fn operations_in_flight(&self) -> usize {
        self.0.ops.borrow().running
    }

    /// The core's buffer pool.
    pub fn pool(&self) -> &Pool {
        &self.0.pool
    }

    /// A buffer of `len` bytes, or `None` when the core's memory budget is used up. Caches do not
    /// give way: this is for work that can do without the buffer.
    pub fn alloc(&self, len: usize) -> Option<Buf> {
        self.0.pool.alloc(len)
    }

    /// A buffer of `len` bytes; waits until there is room. Caches give way first.
    ///
    /// # Errors
    /// `OutOfMemory` when the whole budget could not hold it, or when there was no room for ten
    /// seconds: two waiters may each hold memory that the other needs.
    pub async fn alloc_wait(&self, len: usize) -> io::Result<Buf> {
        if !self.0.pool.could_hold(len) {
            return Err(io::Error::new(
                io::ErrorKind::OutOfMemory,
                format!("{len} bytes are more than this core's memory budget"),
            ));
        }
        self.wait_for_memory(len, || self.0.pool.alloc_reclaiming(len)).await
    }

    /// Room for `bytes` in buffers that are about to be allocated; waits until there is room.
    /// Caches give way first. Work that needs several buffers asks for it while it holds none.
    ///
    /// # Errors
    /// `OutOfMemory` when there was no room for ten seconds.
    pub async fn promise(&self, bytes: usize) -> io::Result<Promise> {
        self.wait_for_memory(bytes, || self.0.pool.promise(bytes)).await
    }

    async fn wait_for_memory<T>(
        &self,
        bytes: usize,
        mut take: impl FnMut() -> Option<T>,
    ) -> io::Result<T> {
        let mut limit = None;
        std::future::poll_fn(|cx| {
            if let Some(taken) = take() {
                return Poll::Ready(Ok(taken));
            }
            self.0.stats.memory_waits.add(1);
            self.0.pool.wait(cx.waker().clone());
            let limit = limit.get_or_insert_with(|| self.sleep_ns(MEMORY_PATIENCE_NS));
            Pin::new(limit).poll(cx).map(|()| {
                Err(io::Error::new(
                    io::ErrorKind::OutOfMemory,
                    format!("no memory for {bytes} bytes: the budget is held by other requests"),
                ))
            })
        })
        .await
    }

    /// Starts a task.
    pub fn spawn<T: 'static>(
        &self,
        class: Class,
        future: impl Future<Output = T> + 'static,
    ) -> JoinHandle<T> {
        let state = Rc::new(RefCell::new(JoinState { result: None, waker: None }));
        let slot = state.clone();
        let body: BoxFuture = Box::pin(async move {
            let result = future.await;
            let waker = {
                let mut slot = slot.borrow_mut();
                slot.result = Some(result);
                slot.waker.take()
            };
            if let Some(waker) = waker {
                waker.wake();
            }
        });
        let id = self.0.tasks.borrow_mut().insert(class, body);
        JoinHandle { core: self.clone(), id, state }
    }

    /// Suspends for `ns` nanoseconds.
    pub fn sleep_ns(&self, ns: u64) -> Sleep {
        Sleep { core: self.clone(), deadline: self.now_ns().saturating_add(ns), id: None }
    }

    /// Lets all other ready tasks run first.
    pub async fn yield_now(&self) {
        let mut yielded = false;
        std::future::poll_fn(|cx| {
            if yielded {
                return Poll::Ready(());
            }
            yielded = true;
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    /// Yields if the running class has used up its share of this turn. Long loops of background
    /// work call it every few microseconds.
    pub async fn checkpoint(&self) {
        if self.now_exact_ns() >= self.0.deadline.get() {
            self.yield_now().await;
        }
    }

    pub(crate) async fn meta(&self, op: MetaOp) -> io::Result<MetaOut> {
        let id = self.0.start_meta(op);
        MetaWait { core: self.clone(), id: Some(id) }.await
    }

    /// Opens a file for reading: with direct I/O where the file system supports it, unless
    /// `buffered`.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn open(&self, path: &Path, buffered: bool) -> io::Result<Arc<SharedFile>> {
        match self.meta(MetaOp::Open { path: path.to_owned(), buffered }).await? {
            MetaOut::File(file) => Ok(file),
            other => unreachable!("an open answered {other:?}"),
        }
    }

    /// This core's handle on an open file.
    pub fn attach(&self, file: &Arc<SharedFile>) -> File {
        File::new(self.clone(), file.clone())
    }

    /// The entries of a directory, sorted by name.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        match self.meta(MetaOp::List { path: path.to_owned() }).await? {
            MetaOut::List(entries) => Ok(entries),
            other => unreachable!("a listing answered {other:?}"),
        }
    }

    /// The whole of a file of at most `max` bytes.
    ///
    /// # Errors
    /// `InvalidData` when it is longer; others as the system gives them.
    pub async fn read_small(&self, path: &Path, max: usize) -> io::Result<Vec<u8>> {
        match self.meta(MetaOp::ReadSmall { path: path.to_owned(), max }).await? {
            MetaOut::Bytes(bytes) => Ok(bytes),
            other => unreachable!("a small read answered {other:?}"),
        }
    }

    /// Opens or makes a file for reading and writing. `Mode::Direct` falls back to the page cache
    /// where the file system has no direct I/O; [`SharedFile::alignment`] tells. The file's name is
    /// durable after a [`Core::sync_dir`] of its directory.
    ///
    /// # Errors
    /// As `opening` says; others as the system gives them.
    pub async fn open_for_writing(
        &self,
        path: &Path,
        opening: Opening,
        mode: Mode,
    ) -> io::Result<Arc<SharedFile>> {
        let path = path.to_owned();
        match self.meta(MetaOp::OpenForWriting { path, opening, mode }).await? {
            MetaOut::File(file) => Ok(file),
            other => unreachable!("an open answered {other:?}"),
        }
    }

    /// A name operation without a result.
    pub(crate) async fn meta_done(&self, op: MetaOp) -> io::Result<()> {
        match self.meta(op).await? {
            MetaOut::Done => Ok(()),
            other => unreachable!("an operation without a result answered {other:?}"),
        }
    }

    /// Renames a file atomically; an existing file of the new name is replaced. Durable after a
    /// [`Core::sync_dir`].
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.meta_done(MetaOp::Rename { from: from.to_owned(), to: to.to_owned() }).await
    }

    /// Makes a directory in an existing one. Durable after a [`Core::sync_dir`] of the parent.
    ///
    /// # Errors
    /// `AlreadyExists` when the name is taken; others as the system gives them.
    pub async fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.meta_done(MetaOp::CreateDir { path: path.to_owned() }).await
    }

    /// Removes a file's name; open handles keep the file. Durable after a [`Core::sync_dir`].
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn remove(&self, path: &Path) -> io::Result<()> {
        self.meta_done(MetaOp::Remove { path: path.to_owned() }).await
    }

    /// Makes the names of a directory durable: all files made, renamed and removed before. The
    /// files' contents are not covered.
    ///
    /// # Errors
    /// As the system gives them; the state of names that were not yet durable is then unknown.
    pub async fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.meta_done(MetaOp::SyncDir { path: path.to_owned() }).await
    }

    /// Takes an exclusive lock on a file, which is made if it is missing; the guard holds it. It
    /// excludes RocksDB's lock, and every other lock of this process.
    ///
    /// # Errors
    /// `WouldBlock` when another holder has any lock on it.
    pub async fn lock_exclusive(&self, path: &Path) -> io::Result<LockGuard> {
        match self.meta(MetaOp::LockExclusive { path: path.to_owned() }).await? {
            MetaOut::Lock(fd) => Ok(LockGuard::new(fd)),
            other => unreachable!("a lock answered {other:?}"),
        }
    }

    /// Takes a shared lock on a file; the guard holds it. No lock is taken if there is no file.
    ///
    /// # Errors
    /// `WouldBlock` when another holder has an exclusive lock.
    pub async fn lock_shared(&self, path: &Path) -> io::Result<LockGuard> {
        match self.meta(MetaOp::LockShared { path: path.to_owned() }).await? {
            MetaOut::Lock(fd) => Ok(LockGuard::new(fd)),
            other => unreachable!("a lock answered {other:?}"),
        }
    }

    /// Listens on `addr`, together with the other cores.
    ///
    /// # Errors
    /// `AddrInUse` when another process listens there; others as the system gives them.
    pub fn listen(&self, addr: SocketAddr) -> io::Result<Listener> {
        Listener::bind(self, addr, true)
    }

    /// Listens on `addr` alone: fails when any other socket, also of another core, listens there.
    /// It tells whether a port is free before the cores share it.
    ///
    /// # Errors
    /// As for [`Core::listen`].
    pub fn listen_alone(&self, addr: SocketAddr) -> io::Result<Listener> {
        Listener::bind(self, addr, false)
    }

    /// Asks for a turn at the time `at_ns` of [`Core::now_ns`]'s clock or before, in which all
    /// pollers run. Only the earliest of several such times is kept: a poller that has nothing to
    /// do yet in that turn asks again.
    pub fn turn_at(&self, at_ns: u64) {
        self.0.turn_at.set(self.0.turn_at.get().min(at_ns));
    }

    /// Adds a poller, which runs in every turn until its handle is dropped.
    pub fn add_poller(&self, poller: impl crate::poller::Poller + 'static) -> PollerSlot {
        Pollers::add(&self.0.pollers, Box::new(poller))
    }

    /// Runs `f` on another core (or this one) and waits for its answer.
    pub async fn call<R: Send + 'static>(
        &self,
        core: usize,
        f: impl FnOnce(&Core) -> R + Send + 'static,
    ) -> R {
        if core == self.id() {
            return f(self);
        }
        self.ask(core, move |there, reply| reply.send(there, f(there))).await
    }

    /// Runs the task that `f` makes on another core (or this one), and waits until it has ended.
    /// The task runs to its end also when this future is dropped.
    pub async fn spawn_on<R: Send + 'static, Fut: Future<Output = R> + 'static>(
        &self,
        core: usize,
        class: Class,
        f: impl FnOnce(&Core) -> Fut + Send + 'static,
    ) -> R {
        if core == self.id() {
            return self.spawn(class, f(self)).await;
        }
        self.ask(core, move |there, reply: Reply| {
            let (task, back) = (f(there), there.clone());
            there.spawn(class, async move { reply.send(&back, task.await) });
        })
        .await
    }

    /// Runs `f` on another core, which must send the reply.
    async fn ask<R: 'static>(
        &self,
        core: usize,
        f: impl FnOnce(&Core, Reply) + Send + 'static,
    ) -> R {
        let (slot, generation) = {
            let mut calls = self.0.calls.borrow_mut();
            let slot = calls.free.pop().unwrap_or_else(|| {
                calls.slots.push(CallSlot::default());
                (calls.slots.len() - 1) as u32
            });
            (slot, calls.slots[slot as usize].generation)
        };
        let reply = Reply { to: self.id(), slot, generation };
        let guard = CallGuard { core: self, slot };
        let mut envelope: Option<Envelope> = Some(Box::new(move |there: &Core| f(there, reply)));
        std::future::poll_fn(|cx| {
            if let Some(message) = envelope.take()
                && let Err(message) = self.0.mesh.borrow_mut().send(core, message)
            {
                // The ring is full: the other core lags. Try again next turn.
                envelope = Some(message);
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let mut calls = self.0.calls.borrow_mut();
            let call = &mut calls.slots[slot as usize];
            match call.answer.take() {
                Some(answer) => Poll::Ready(answer),
                None => {
                    call.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
        .downcast::<R>()
        .map(|answer| {
            drop(guard);
            *answer
        })
        .unwrap_or_else(|_| unreachable!("a call's answer has the type its caller expects"))
    }

    /// Runs one turn.
    pub(crate) fn turn(&self, may_wait: bool) {
        let wait = self.work(may_wait);
        self.finish(wait);
    }

    /// The first half of a turn, up to the submission; returns how the core then waits. The
    /// simulator lets other cores run before the second half of a core that waits.
    pub(crate) fn work(&self, may_wait: bool) -> Wait {
        let _entered = task::enter(&self.0);
        let mut worked = self.take_messages();
        let inner = &*self.0;
        inner.now.set(inner.driver.borrow_mut().now_ns());
        if inner.turn_at.get() <= inner.now.get() {
            inner.turn_at.set(u64::MAX);
            inner.look.set(true);
        }
        worked |= inner.poll();
        worked |= self.run_ready();
        inner.mesh.borrow_mut().publish();
        inner.drain_backlog();
        inner.stats.turns.add(1);
        if worked || !may_wait || inner.work_pending() { Wait::No } else { inner.idle_wait() }
    }

    /// The second half of a turn: submits, waits, reaps, and fires timers.
    pub(crate) fn finish(&self, wait: Wait) {
        let _entered = task::enter(&self.0);
        let inner = &*self.0;
        let must_enter = {
            let mut driver = inner.driver.borrow_mut();
            wait != Wait::No || driver.staged() > 0 || driver.ready()
        };
        if must_enter {
            inner.enter(wait);
        }
        if wait != Wait::No {
            inner.shared.sleep().awake();
            inner.lump.set(STAGED_FIRST);
            Pollers::disarm(&inner.pollers);
        }
        inner.now.set(inner.driver.borrow_mut().now_ns());
        inner.fire_timers();
    }

    fn take_messages(&self) -> bool {
        let inner = &*self.0;
        let mut worked = false;
        for from in 0..inner.cores {
            for _ in 0..MESSAGES_PER_TURN {
                let Some(message) = inner.mesh.borrow_mut().receive(from) else {
                    break;
                };
                message(self);
                inner.stats.messages.add(1);
                worked = true;
            }
        }
        for _ in 0..MESSAGES_PER_TURN {
            let Some(message) = inner.inbox.borrow_mut().pop() else {
                break;
            };
            worked = true;
            match message {
                Remote::Wake(id) => inner.tasks.borrow_mut().wake(id),
                Remote::Ended => inner.ended.set(inner.ended.get() + 1),
                Remote::Meta(token, answer) => {
                    let ended = inner.ops.borrow_mut().complete_meta(token, answer);
                    ended.tell();
                }
            }
        }
        worked
    }

    fn run_ready(&self) -> bool {
        let inner = &*self.0;
        let mut worked = false;
        let started = inner.now.get();
        let mut background_started = None;
        for class in 0..CLASSES {
            // Control and foreground share one budget, background and bulk another: the most they
            // can add to a request's turn. Background tasks are few and long, so the clock is read
            // after each. One task of each class runs in any case.
            let ready = inner.tasks.borrow().ready(class).min(TASKS_PER_TURN);
            if ready == 0 {
                continue;
            }
            let (budget_from, look_every) = match class {
                0 | 1 => (started, 16),
                _ => {
                    let now = || inner.driver.borrow_mut().now_ns();
                    (*background_started.get_or_insert_with(now), 1)
                }
            };
            let deadline = budget_from + BUDGET_NS;
            inner.deadline.set(deadline);
            inner
                .class
                .set([Class::Control, Class::Foreground, Class::Background, Class::Bulk][class]);
            for n in 0..ready {
                if n > 0 && n % look_every == 0 && inner.driver.borrow_mut().now_ns() >= deadline {
                    break;
                }
                // Take first, poll afterwards: the borrow ends before the task runs.
                let Some((id, future)) = inner.tasks.borrow_mut().take_ready(class) else {
                    break;
                };
                inner.poll_task(id, future);
                worked = true;
                if inner.driver.borrow().staged() >= STAGED_MAX {
                    inner.enter(Wait::No);
                }
            }
        }
        inner.class.set(Class::Control);
        inner.deadline.set(u64::MAX);
        worked
    }

    /// Ends every task and waits at most `patience_ns` until the driver is done with every buffer.
    /// True when it is.
    pub(crate) fn shut_down(&self, patience_ns: u64) -> bool {
        let give_up = self.stop(patience_ns);
        while !self.drained() {
            if self.now_exact_ns() >= give_up {
                return false;
            }
            self.drain(Wait::Ns(DRAIN_NS));
        }
        true
    }

    /// Ends every task and cancels every operation that may be cancelled. Returns the deadline of
    /// the wait for the others.
    pub(crate) fn stop(&self, patience_ns: u64) -> u64 {
        let inner = &*self.0;
        self.end_tasks();
        let _entered = task::enter(inner);
        drop(inner.pollers.take());
        // Dropped pollers may have started tasks.
        self.end_tasks();
        let unfinished = inner.ops.borrow().unfinished();
        for token in unfinished {
            if inner.backlog.borrow_mut().remove(token) {
                let ended = inner.ops.borrow_mut().complete(token, -libc::ECANCELED);
                ended.tell();
            } else if inner.ops.borrow().may_cancel(token) {
                inner.driver.borrow_mut().cancel(token);
            }
        }
        self.now_exact_ns().saturating_add(patience_ns)
    }

    /// Whether the main tasks of all cores have ended, so that no more calls can come.
    pub(crate) fn all_ended(&self) -> bool {
        self.0.ended.get() >= self.0.cores
    }

    /// Whether the driver is done with every buffer.
    pub(crate) fn drained(&self) -> bool {
        self.0.ops.borrow().running == 0
    }

    /// One step of the wait for [`Core::drained`]. Tasks that messages of other cores start
    /// meanwhile are ended.
    pub(crate) fn drain(&self, wait: Wait) {
        {
            let _entered = task::enter(&self.0);
            self.0.enter(wait);
            self.take_messages();
        }
        self.end_tasks();
    }

    /// Frees what unfinished operations own. Only for a driver that is known to have forgotten
    /// them.
    pub(crate) fn abandon(&self) {
        let unfinished = self.0.ops.borrow().unfinished();
        for token in unfinished {
            let ended = self.0.ops.borrow_mut().complete(token, -libc::ECANCELED);
            ended.tell();
        }
    }

    fn end_tasks(&self) {
        let _entered = task::enter(&self.0);
        // Dropping a future may start or drop tasks and operations.
        loop {
            let futures = self.0.tasks.borrow_mut().clear();
            if futures.is_empty() {
                break;
            }
            drop(futures);
        }
    }
}

impl Inner {
    /// Calls `f` with the simulated driver, if this is one.
    pub(crate) fn sim<T>(&self, f: impl FnOnce(&mut SimDriver) -> T) -> Option<T> {
        self.driver.borrow_mut().sim().map(f)
    }

    /// Takes ownership of the descriptor that a successful accept returned.
    pub(crate) fn adopt(&self, accepted: i32) -> Fd {
        self.ops.borrow().adopt(accepted)
    }

    fn poll_task(&self, id: TaskId, mut future: BoxFuture) {
        self.stats.polls.add(1);
        let waker = task::waker(self.uid, id);
        let done = future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        let leftover = if done {
            self.tasks.borrow_mut().remove(id);
            Some(future)
        } else {
            self.tasks.borrow_mut().put_back(id, future)
        };
        drop(leftover);
    }

    /// Submits, reaps, and marks the tasks of completed operations ready.
    fn enter(&self, wait: Wait) {
        let mut done = self.done.take();
        let at_least = self.gather(wait);
        let result = self.driver.borrow_mut().enter(wait, at_least, &mut done);
        if let Err(error) = result {
            panic!("the {} driver failed: {error}", self.driver.borrow().name());
        }
        self.stats.enters.add(1);
        if wait != Wait::No {
            self.stats.sleeps.add(1);
        }
        self.stats.completions.add(done.len() as u64);
        for completion in done.drain(..) {
            let ended = self.ops.borrow_mut().complete(completion.token, completion.result);
            ended.tell();
        }
        self.done.replace(done);
        if self.backlog.borrow().len() > 0 {
            self.drain_backlog();
        }
    }

    /// Number of completions that ends a wait: several when many disk reads and nothing else are in
    /// flight, because each return to user space costs more than the reads' extra wait.
    pub(crate) fn gather(&self, wait: Wait) -> usize {
        let ops = self.ops.borrow();
        let only_disk = ops.disk_running > 2 * STAGED_MAX && ops.disk_running == ops.running;
        if wait != Wait::No && only_disk { STAGED_MAX } else { 1 }
    }

    /// Runs the pollers, several times while nothing else has work: this spreads the cost of the
    /// rest of the turn over more of their requests. True when they did something.
    fn poll(&self) -> bool {
        let mut worked = false;
        for _ in 0..POLLS_PER_TURN {
            self.rounds.set(self.rounds.get() + 1);
            if !Pollers::run(&self.pollers, self.look.take()) {
                break;
            }
            worked = true;
            if self.tasks.borrow().any_ready() || self.driver.borrow().staged() > 0 {
                break;
            }
        }
        worked
    }

    /// Whether there is work that needs no completion.
    fn work_pending(&self) -> bool {
        self.tasks.borrow().any_ready()
            || self.inbox.borrow().pure_check()
            || self.mesh.borrow().pending()
            || self.look.get()
            || self.next_timer().is_some_and(|at| at <= self.now.get())
    }

    /// Decides how to wait: spins first where that pays, and sets the sleep flag before a wait.
    fn idle_wait(&self) -> Wait {
        let spin_until = self.idle.borrow_mut().spin_until(
            self.now.get(),
            self.pollers.borrow().any(),
            self.mesh.borrow_mut().recent(self.stats.messages.get()),
        );
        let mut looks = 0_u32;
        while let Some(until) = spin_until {
            // The spin is for the pollers; reading the clock costs more than checking them.
            if Pollers::pure_check(&self.pollers) {
                self.idle.borrow_mut().found_work();
                self.poll();
                return Wait::No;
            }
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) {
                if self.driver.borrow_mut().ready() || self.work_pending() {
                    self.idle.borrow_mut().found_work();
                    return Wait::No;
                }
                let now = self.driver.borrow_mut().now_ns();
                self.now.set(now);
                if now >= until {
                    break;
                }
            }
            std::hint::spin_loop();
        }
        if self.idle.borrow().never_sleeps() {
            return Wait::No;
        }
        let work = || !Pollers::arm(&self.pollers) || self.work_pending();
        if !self.shared.sleep().prepare(work) {
            Pollers::disarm(&self.pollers);
            return Wait::No;
        }
        let until_timer = self.next_timer().map(|at| at.saturating_sub(self.now.get()).max(1));
        until_timer.map_or(Wait::Forever, Wait::Ns)
    }

    /// Time of the next timer or requested turn.
    fn next_timer(&self) -> Option<u64> {
        let turn_at = Some(self.turn_at.get()).filter(|&at| at != u64::MAX);
        self.timers.borrow_mut().next().into_iter().chain(turn_at).min()
    }

    fn fire_timers(&self) {
        let now = self.now.get();
        let mut fired = Vec::new();
        if self.timers.borrow_mut().next().is_some_and(|at| at <= now) {
            self.timers.borrow_mut().fire(now, |waker| fired.push(waker));
        }
        for waker in fired {
            waker.wake();
        }
    }

    /// Starts an operation: stages it, or puts it into the backlog until there is room.
    pub(crate) fn start(&self, op: IoOp, payload: Payload, hold: Hold) -> OpId {
        let nature = Nature::of(&op);
        let is_disk = nature.is_disk();
        match op {
            IoOp::Read { len, .. } => self.count_bytes(&op, u64::from(len)),
            IoOp::Write { len, .. } => self.count_bytes(&op, u64::from(len)),
            IoOp::SyncData { .. } => self.stats.disk_syncs.add(1),
            _ => {}
        }
        self.stats.operations.add(1);
        let mut ops = self.ops.borrow_mut();
        let id = ops.insert(payload, hold, nature);
        let mut backlog = self.backlog.borrow_mut();
        let mut driver = self.driver.borrow_mut();
        let class = self.class.get();
        let disk_in_flight = ops.disk_running - backlog.len();
        let room = disk_in_flight <= driver.capacity();
        let disk_room = disk_in_flight <= self.disk_depth
            && (class <= Class::Foreground || disk_in_flight <= BACKGROUND_DEPTH);
        // An operation that waits for a peer may never complete, so it takes no queue depth. The
        // number of descriptors bounds those.
        if is_disk && (!room || !disk_room) {
            backlog.0[class as usize].push_back((id.token, op));
        } else {
            driver.stage(id.token, op);
            // Submit early: the device should not idle until the last task of the turn has run.
            let lump = if is_disk { self.lump.get() } else { STAGED_MAX };
            if driver.staged() >= lump {
                driver.submit();
                self.lump.set((2 * lump).min(STAGED_MAX));
            }
        }
        id
    }

    /// Counts a read or a write of `len` bytes.
    pub(crate) fn count_bytes(&self, op: &IoOp, len: u64) {
        match op {
            IoOp::Read { .. } | IoOp::ReadV { .. } => {
                self.stats.disk_reads.add(1);
                self.stats.disk_bytes.add(len);
            }
            IoOp::Write { .. } | IoOp::WriteV { .. } => {
                self.stats.disk_writes.add(1);
                self.stats.disk_write_bytes.add(len);
            }
            _ => {}
        }
    }

    /// Makes all pollers run in the next turn, whatever their back-off.
    pub(crate) fn look_at_pollers(&self) {
        self.look.set(true);
    }

    fn drain_backlog(&self) {
        let ops = self.ops.borrow();
        let mut backlog = self.backlog.borrow_mut();
        let mut driver = self.driver.borrow_mut();
        while backlog.len() > 0 {
            let in_flight = ops.disk_running - backlog.len();
            let depth = self.disk_depth.min(driver.capacity());
            let next = if in_flight < depth
                && let Some(next) = backlog.0[..2].iter_mut().find_map(VecDeque::pop_front)
            {
                next
            } else if in_flight < depth.min(BACKGROUND_DEPTH)
                && let Some(next) = backlog.0[2..].iter_mut().find_map(VecDeque::pop_front)
            {
                next
            } else {
                return;
            };
            driver.stage(next.0, next.1);
        }
    }

    fn start_meta(&self, op: MetaOp) -> OpId {
        self.stats.operations.add(1);
        let id = self.ops.borrow_mut().insert(Payload::None, Hold::None, Nature::Plain);
        self.driver.borrow_mut().meta(id.token, op, &self.shared);
        id
    }

    pub(crate) fn poll_op(&self, id: OpId, cx: &mut Context<'_>) -> Poll<(i32, Payload)> {
        match self.ops.borrow_mut().take_done(id, cx.waker()) {
            Some(done) => Poll::Ready(done),
            None => Poll::Pending,
        }
    }

    /// Notes that the future of an operation was dropped.
    pub(crate) fn drop_op(&self, id: OpId, cancel: bool) {
        let running = self.ops.borrow_mut().orphan(id);
        if !running {
            return;
        }
        if self.backlog.borrow_mut().remove(id.token) {
            let ended = self.ops.borrow_mut().complete(id.token, -libc::ECANCELED);
            ended.tell();
        } else if cancel {
            self.driver.borrow_mut().cancel(id.token);
        }
    }

    fn answer(&self, slot: u32, generation: u32, answer: Box<dyn Any + Send>) {
        let waker = {
            let mut calls = self.calls.borrow_mut();
            let call = &mut calls.slots[slot as usize];
            if call.generation != generation {
                return;
            }
            call.answer = Some(answer);
            call.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Longest wait of a stopping core before it checks its messages again.
pub(crate) const DRAIN_NS: u64 = 10_000_000;

/// The return address of a call.
struct Reply {
    to: usize,
    slot: u32,
    generation: u32,
}

impl Reply {
    fn send<R: Send + 'static>(self, from: &Core, answer: R) {
        let answer: Box<dyn Any + Send> = Box::new(answer);
        let envelope: Envelope =
            Box::new(move |back: &Core| back.0.answer(self.slot, self.generation, answer));
        from.0.mesh.borrow_mut().send_or_queue(self.to, envelope);
    }
}

struct CallGuard<'a> {
    core: &'a Core,
    slot: u32,
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        let mut calls = self.core.0.calls.borrow_mut();
        let call = &mut calls.slots[self.slot as usize];
        call.generation = call.generation.wrapping_add(1);
        call.answer = None;
        call.waker = None;
        calls.free.push(self.slot);
    }
}

/// A lock on a file, released when dropped. If its open file was shared with another process, that
/// process must drop it, too.
#[derive(Debug)]
pub struct LockGuard {
    fd: Option<Fd>,
    /// Whether another process may have the open file.
    shared: AtomicBool,
}

impl LockGuard {
    fn new(fd: Option<Fd>) -> LockGuard {
        LockGuard { fd, shared: AtomicBool::new(false) }
    }

    /// A lock that another process handed over with its open file ([`LockGuard::descriptor`]).
    pub fn held(fd: OwnedFd) -> LockGuard {
        LockGuard { fd: Some(Fd::Host(fd)), shared: AtomicBool::new(true) }
    }

    /// The open file, if it is the host's; from now on another process may have it.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.shared.store(true, Ordering::Relaxed);
        match &self.fd {
            Some(Fd::Host(fd)) => Some(fd.as_fd()),
            _ => None,
        }
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        // Closing it is not enough: a process that a thread is starting has a copy of each
        // descriptor until it runs its program.
        if let Some(Fd::Host(fd)) = &self.fd
            && !self.shared.load(Ordering::Relaxed)
        {
            host::unlock(fd);
        }
    }
}

struct MetaWait {
    core: Core,
    id: Option<OpId>,
}

impl Future for MetaWait {
    type Output = io::Result<MetaOut>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let id = self.id.expect("a finished operation is not polled again");
        match self.core.0.poll_op(id, cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready((_, payload)) => {
                self.id = None;
                let Payload::Meta(answer) = payload else {
                    unreachable!("a name operation returns its answer")
                };
                Poll::Ready(answer)
            }
        }
    }
}

impl Drop for MetaWait {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.core.0.drop_op(id, false);
        }
    }
}

/// The future of [`Core::sleep_ns`].
pub struct Sleep {
    core: Core,
    deadline: u64,
    id: Option<TimerId>,
}

impl Future for Sleep {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let core = self.core.clone();
        match self.id {
            None if core.now_ns() >= self.deadline => Poll::Ready(()),
            None => {
                let waker = cx.waker().clone();
                self.id = Some(core.0.timers.borrow_mut().insert(self.deadline, waker));
                Poll::Pending
            }
            Some(id) => {
                if core.0.timers.borrow_mut().poll(id, cx.waker()) {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                }
            }
        }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.core.0.timers.borrow_mut().remove(id);
        }
    }
}

struct JoinState<T> {
    result: Option<T>,
    waker: Option<Waker>,
}

/// A started task: await it for its result. Dropping it leaves the task running; see [`OwnedTask`].
pub struct JoinHandle<T> {
    core: Core,
    id: TaskId,
    state: Rc<RefCell<JoinState<T>>>,
}

/// A task that ends with its owner: dropping this ends the task at its current await, unless it is
/// the task that runs now.
pub struct OwnedTask<T>(Option<JoinHandle<T>>);

impl<T> OwnedTask<T> {
    /// Whether the task has returned.
    pub fn has_ended(&self) -> bool {
        self.0.as_ref().is_none_or(|task| task.state.borrow().result.is_some())
    }
}

impl<T> Drop for OwnedTask<T> {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.cancel();
        }
    }
}

impl<T> JoinHandle<T> {
    /// Binds the task to the returned owner.
    #[must_use = "dropping it ends the task"]
    pub fn owned(self) -> OwnedTask<T> {
        OwnedTask(Some(self))
    }

    /// Ends the task at its current await, unless it is the task that runs now.
    pub fn cancel(self) {
        let future = self.core.0.tasks.borrow_mut().remove(self.id);
        drop(future);
    }

    /// Takes the result, if the task has ended.
    pub fn try_take(&self) -> Option<T> {
        self.state.borrow_mut().result.take()
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = T;
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut state = self.state.borrow_mut();
        match state.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                state.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}
