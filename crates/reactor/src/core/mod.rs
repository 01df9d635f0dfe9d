//! A core: one event loop, its tasks, operations, timers, buffers and channels to other cores.
//!
//! One turn of the loop (`turn`):
//!
//! 1. take messages: from other cores (at most 32 from each) and from foreign threads;
//! 2. run pollers and ready tasks, class by class, within the turn's budget; operations that tasks
//!    start are staged, and submitted early when 16 are staged;
//! 3. publish messages to other cores, one wake-up for each that sleeps;
//! 4. submit everything staged and reap completions in one system call; completions only fill slots
//!    and mark tasks ready, no task runs meanwhile;
//! 5. fire timers; if the turn did nothing, idle (see `idle`).
//!
//! Only the core's own thread touches this state, except
//! [`CoreAddress`](crate::driver::remote::CoreAddress). No borrow of a cell spans a call into a
//! task. A waker borrows only the task table. No future is dropped while a cell is borrowed.
//!
//! The files: `turn`, `operations` (starting them, and the backlog), `call` (other cores), `names`,
//! `images`, `processes` and `compute` (operations that a helper thread makes), `join` and `sleep`
//! (tasks), `stop`. The room uses `driver`, `memory`, `wait` and the tables (`op`, `task`, `timer`,
//! `poller`, `mesh`). A circle stays: files and sockets start operations through their core, and
//! the operation table holds the file or socket of each operation.

mod call;
mod compute;
mod images;
mod join;
mod names;
mod operations;
mod processes;
mod sleep;
mod stop;
mod turn;

use std::any::{Any, TypeId};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use self::call::Calls;
use self::operations::{Backlog, STAGED_FIRST};
use crate::channels::mesh::Mesh;
use crate::driver::remote::{self, CoreAddress, Inbox};
use crate::driver::sim::SimDriver;
use crate::driver::{Completion, Driver, Fd};
use crate::flow::{Board, Flow, FlowReport};
use crate::idle::{Idle, PollMode};
use crate::io::net::{Listener, Socket};
use crate::memory::buf::{Buf, Pool, Promise};
use crate::op::Ops;
use crate::poller::{PollerSlot, Pollers};
use crate::stats::CoreStats;
use crate::task::{Class, Tasks};
use crate::timer::Timers;
use crate::wait::{Elapsed, timeout};

pub use self::join::{JoinHandle, OwnedTask};
pub use self::processes::OtherProcess;
pub use self::sleep::Sleep;
pub(crate) use self::stop::DRAIN_NS;

/// How long a task waits for memory.
const MEMORY_PATIENCE_NS: u64 = 10_000_000_000;

/// The settings of one core; see [`crate::runtime`].
pub(crate) struct CoreConfig {
    pub id: usize,
    pub cores: usize,
    pub memory: usize,
    pub disk_depth: usize,
    pub poll: PollMode,
    pub seed: u64,
    /// What the cores tell each other about devices.
    pub board: Arc<Board>,
}

/// The state of a core.
pub(crate) struct CoreState {
    pub(crate) uid: u32,
    id: usize,
    cores: usize,
    shared: Arc<CoreAddress>,
    inbox: RefCell<Inbox>,
    driver: RefCell<Box<dyn Driver>>,
    ops: RefCell<Ops>,
    backlog: RefCell<Backlog>,
    pub(crate) tasks: RefCell<Tasks>,
    timers: RefCell<Timers>,
    mesh: RefCell<Mesh>,
    pollers: RefCell<Pollers>,
    /// Work for a poller has come: all of them run in the next turn, whatever their back-off.
    pollers_due: Cell<bool>,
    /// Rounds of the pollers so far.
    rounds: Cell<u64>,
    locals: RefCell<BTreeMap<TypeId, Rc<dyn Any>>>,
    /// When the last message of another core or thread was taken.
    heard_at: Cell<u64>,
    /// Latest time of the next turn, in which all pollers run.
    turn_at: Cell<u64>,
    /// The least time between two rounds of the pollers,
    poll_every_ns: Cell<u64>,
    /// until this time.
    seldom_until_ns: Cell<u64>,
    /// When the last round of the pollers began.
    polled_at: Cell<u64>,
    calls: RefCell<Calls>,
    idle: RefCell<Idle>,
    done: RefCell<Vec<Completion>>,
    pool: Pool,
    now: Cell<u64>,
    class: Cell<Class>,
    /// Staged disk operations at which the core submits early: few after a wait, then twice as
    /// many each time.
    submit_batch: Cell<usize>,
    deadline: Cell<u64>,
    random: Cell<u64>,
    /// Cores of the runtime whose main task has ended.
    ended: Cell<usize>,
    disk_depth: usize,
    pub(crate) flow: Flow,
    stats: CoreStats,
}

/// A handle on one core's event loop, through which code reaches everything outside: clock, files,
/// sockets, other cores. Clones are local and cheap; it cannot leave its thread.
#[derive(Clone)]
pub struct Core(Rc<CoreState>);

impl Core {
    pub(crate) fn new(
        config: CoreConfig,
        shared: Arc<CoreAddress>,
        inbox: Inbox,
        driver: Box<dyn Driver>,
        mesh: Mesh,
    ) -> Core {
        let uid = remote::register(&shared);
        let mut driver = driver;
        let now = driver.now_ns();
        let simulated = driver.sim().map(|sim| sim.closing());
        let region = driver.region();
        Core(Rc::new(CoreState {
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
            pollers_due: Cell::new(false),
            rounds: Cell::new(0),
            locals: RefCell::default(),
            heard_at: Cell::new(0),
            turn_at: Cell::new(u64::MAX),
            poll_every_ns: Cell::new(0),
            seldom_until_ns: Cell::new(0),
            polled_at: Cell::new(0),
            calls: RefCell::default(),
            idle: RefCell::new(Idle::new(config.poll)),
            done: RefCell::new(Vec::with_capacity(1024)),
            pool: Pool::with_region(config.memory, region),
            now: Cell::new(now),
            class: Cell::new(Class::Control),
            submit_batch: Cell::new(STAGED_FIRST),
            deadline: Cell::new(u64::MAX),
            random: Cell::new(config.seed),
            ended: Cell::new(0),
            disk_depth: config.disk_depth,
            flow: Flow::new(config.board, config.id),
            stats: CoreStats::default(),
        }))
    }

    pub(crate) fn inner(&self) -> &CoreState {
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

    /// The state of flow control on the devices that this core has used.
    pub fn flow(&self) -> Vec<FlowReport> {
        self.0.flow.report(self.now_ns())
    }

    /// Tells flow control how urgent this core's background work is, from 0 to 1: the least part of
    /// its share that its disk operations have beside those of requests. Known for 100 ms.
    pub fn urge_background(&self, urgency: f64) {
        self.0.flow.urge(urgency, self.now_ns());
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

    /// A buffer of `len` bytes into which direct reads cost less, if the core has one free. There
    /// are few: this is for bytes that are soon released.
    pub fn alloc_registered(&self, len: usize) -> Option<Buf> {
        self.0.pool.alloc_registered(len)
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
        let taken = self.0.pool.freed().wait_for(|| {
            let taken = take();
            if taken.is_none() {
                self.0.stats.memory_waits.add(1);
            }
            taken
        });
        timeout(self, MEMORY_PATIENCE_NS, taken).await.map_err(|Elapsed| {
            io::Error::new(
                io::ErrorKind::OutOfMemory,
                format!("no memory for {bytes} bytes: the budget is held by other requests"),
            )
        })
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

    /// Begins a connection to `addr`. Its first send waits until the connection is made, and tells
    /// if it is refused; nobody limits that time.
    ///
    /// # Errors
    /// As the system gives them, if it can tell at once.
    pub fn connect(&self, addr: SocketAddr) -> io::Result<Socket> {
        Socket::connect(self, addr)
    }

    /// Asks for a turn at the time `at_ns` of [`Core::now_ns`]'s clock or before, in which all
    /// pollers run. Only the earliest of several such times is kept: a poller that has nothing to
    /// do yet in that turn asks again.
    pub fn turn_at(&self, at_ns: u64) {
        self.0.turn_at.set(self.0.turn_at.get().min(at_ns));
    }

    /// Lets at least `every_ns` pass between two rounds of the pollers until `until_ns` of
    /// [`Core::now_ns`]'s clock, and sleeps when nothing else has work: for work of this core, or
    /// of another process on its processor, that comes first for some milliseconds. The last call
    /// counts; a time that has passed ends it.
    pub fn poll_seldom(&self, every_ns: u64, until_ns: u64) {
        self.0.poll_every_ns.set(every_ns);
        self.0.seldom_until_ns.set(until_ns);
    }

    /// Adds a poller, which runs in every turn until its handle is dropped.
    pub fn add_poller(&self, poller: impl crate::poller::Poller + 'static) -> PollerSlot {
        Pollers::add(&self.0.pollers, Box::new(poller))
    }
}

impl CoreState {
    /// Calls `f` with the simulated driver, if this is one.
    pub(crate) fn sim<T>(&self, f: impl FnOnce(&mut SimDriver) -> T) -> Option<T> {
        self.driver.borrow_mut().sim().map(f)
    }

    /// Takes ownership of the descriptor that a successful accept returned.
    pub(crate) fn adopt(&self, accepted: i32) -> Fd {
        self.ops.borrow().adopt(accepted)
    }

    /// What other threads hold of this core.
    pub(crate) fn address(&self) -> &Arc<CoreAddress> {
        &self.shared
    }

    /// Makes all pollers run in the next turn, whatever their back-off.
    pub(crate) fn set_pollers_due(&self) {
        self.pollers_due.set(true);
    }
}
