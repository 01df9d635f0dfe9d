//! Running cores in a simulated world.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};

use super::config::SimConfig;
use super::crash::Crash;
use super::fault::{Fault, FaultCounts};
use super::rng::Rng;
use super::state::State;
use super::trace::What;
use crate::core::{Core, CoreConfig, DRAIN_NS, JoinHandle};
use crate::driver::{GATHER_NS, Wait, sim::SimDriver};
use crate::inbox::Inbox;
use crate::mesh::Mesh;
use crate::net::Socket;
use crate::remote::{EndNotice, Remote, Shared};
use crate::runtime::PATIENCE_NS;
use crate::task::Class;

/// A handle on a simulated world; see the module text. Clones are the same world, so tasks in it
/// can change its faults.
#[derive(Clone)]
pub struct World(Rc<Inner>);

struct Inner {
    seed: u64,
    cores: usize,
    state: Rc<RefCell<State>>,
    running: Cell<bool>,
    abandoned: Cell<usize>,
    /// Processes that start in the next round.
    beginning: RefCell<Vec<Beginning>>,
}

type Main = Box<dyn FnOnce(Core) -> Pin<Box<dyn Future<Output = ()>>>>;

struct Beginning {
    process: Rc<ProcessState>,
    main: Main,
}

/// The control and state of a process that others see.
#[derive(Default)]
struct ProcessState {
    stopped: Cell<bool>,
    ended: Cell<bool>,
    killed: Cell<bool>,
    /// Turns until it is killed.
    left: Cell<Option<u64>>,
}

/// A process beside the main one of a [`World`]: see [`World::start_process`]. Clones are the same
/// process.
#[derive(Clone)]
pub struct Process(Rc<ProcessState>);

impl Process {
    /// Kills it after `turns` more turns. Its operations in flight are done in part; its files,
    /// locks and sockets are closed.
    pub fn kill_after(&self, turns: u64) {
        self.0.left.set(Some(turns));
    }

    /// Withdraws [`Process::kill_after`], if it was not killed yet.
    pub fn spare(&self) {
        self.0.left.set(None);
    }

    /// Suspends it until [`Process::go_on`]; nothing is closed.
    pub fn stop(&self) {
        self.0.stopped.set(true);
    }

    /// Resumes it after [`Process::stop`].
    pub fn go_on(&self) {
        self.0.stopped.set(false);
    }

    /// Whether it was killed.
    pub fn was_killed(&self) -> bool {
        self.0.killed.get()
    }

    /// Whether it has returned or was killed.
    pub fn has_ended(&self) -> bool {
        self.0.ended.get()
    }
}

/// The reason why a run failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// Every core waits, and no event is left that could wake one.
    Deadlock,
    /// The run took more than [`SimConfig::turns_max`] turns.
    Turns,
    /// The run took more than [`SimConfig::time_max_ns`] of simulated time.
    Time,
    /// The host process has no descriptor left for a core.
    Host,
    /// The process was killed or power was cut, as the test requested.
    Crash(Crash),
}

/// A failed run; the text names the seed.
pub struct Failure {
    /// The reason.
    pub kind: FailureKind,
    /// The seed of the world.
    pub seed: u64,
    detail: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.kind {
            FailureKind::Deadlock => "every core waits and nothing can wake one",
            FailureKind::Turns => "no end after the most turns allowed",
            FailureKind::Time => "no end after the longest time allowed",
            FailureKind::Host => "the host cannot make a core",
            FailureKind::Crash(Crash::Kill) => "the process was killed",
            FailureKind::Crash(Crash::PowerCut) => "power was cut",
        };
        write!(f, "simulation with seed {}: {why}\n{}", self.seed, self.detail)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Failure {}

/// The state of a core.
enum Status {
    /// It takes a turn when chance picks it.
    Ready,
    /// It is between the halves of a turn.
    Asleep {
        wait: Wait,
        until: Option<u64>,
        at_least: usize,
        /// The time from which one completion is enough.
        gather_until: u64,
        woken: Option<u64>,
    },
    /// It waits for its operations, at its end.
    Draining {
        give_up: u64,
        until: u64,
    },
    Ended,
}

struct Seat {
    core: Core,
    shared: Arc<Shared>,
    /// The core; `None` after its end.
    main: Option<JoinHandle<()>>,
    notice: Option<EndNotice>,
    status: Status,
    /// Its relative chance of being picked.
    weight: u64,
    /// Its process, if it was started in the run.
    process: Option<Rc<ProcessState>>,
}

/// Turns after which the weights of the cores are drawn again.
const WEIGHTS_LAST: u64 = 2048;

/// Prints the seed when a task panics.
struct SayOnPanic(u64);

impl Drop for SayOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the panic came in the simulation with seed {}", self.0);
        }
    }
}

impl World {
    /// A world with this number of cores, which takes all random numbers from `seed`.
    ///
    /// # Panics
    /// Without cores.
    pub fn new(seed: u64, cores: usize, config: SimConfig) -> World {
        assert!(cores > 0, "a world needs a core");
        let state = Rc::new(RefCell::new(State::new(seed, cores, config)));
        let (running, abandoned) = (Cell::new(false), Cell::new(0));
        let beginning = RefCell::default();
        World(Rc::new(Inner { seed, cores, state, running, abandoned, beginning }))
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.0.seed
    }

    /// Simulated nanoseconds since the world began.
    pub fn now_ns(&self) -> u64 {
        self.0.state.borrow().now
    }

    /// Advances the simulated time: the cost of a computation.
    pub fn spend_ns(&self, ns: u64) {
        self.0.state.borrow_mut().now += ns;
    }

    /// Another generator for a test's own choices.
    pub fn rng(&self) -> Rng {
        self.0.state.borrow_mut().schedule.fork()
    }

    /// A hash of all events so far, and their number.
    pub fn trace(&self) -> (u64, u64) {
        let state = self.0.state.borrow();
        (state.trace.hash(), state.trace.count())
    }

    /// The newest events as text, one per line.
    pub fn newest_events(&self) -> String {
        self.0.state.borrow().trace.to_string()
    }

    // Files.

    /// Adds or replaces a file durably; open handles keep the old one.
    pub fn add_file(&self, path: impl AsRef<Path>, bytes: impl Into<Arc<[u8]>>) {
        let bytes: Arc<[u8]> = bytes.into();
        self.0.state.borrow_mut().disk.add(path.as_ref(), bytes.to_vec());
    }

    /// Adds a directory. The directories of added files exist, too.
    pub fn add_dir(&self, path: impl AsRef<Path>) {
        self.0.state.borrow_mut().disk.names.add_dir(path.as_ref());
    }

    /// Removes a file's name durably. False when there is none.
    pub fn remove_file(&self, path: impl AsRef<Path>) -> bool {
        self.0.state.borrow_mut().disk.remove(path.as_ref())
    }

    /// Copies the files of a directory of the host into a directory of this world. Returns their
    /// number.
    ///
    /// # Errors
    /// As the host gives them.
    #[expect(clippy::disallowed_methods, reason = "before the simulation, from the test's host")]
    pub fn import(&self, host: &Path, dir: impl AsRef<Path>) -> io::Result<usize> {
        let mut count = 0;
        for entry in std::fs::read_dir(host)? {
            let entry = entry?;
            let to = dir.as_ref().join(entry.file_name());
            if entry.file_type()?.is_dir() {
                count += self.import(&entry.path(), to)?;
            } else {
                self.add_file(to, std::fs::read(entry.path())?);
                count += 1;
            }
        }
        Ok(count)
    }

    /// The paths of all files, sorted.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.0.state.borrow().disk.paths()
    }

    /// The bytes of a file that a reader sees now, without rot.
    ///
    /// # Errors
    /// When there is none.
    pub fn bytes(&self, path: impl AsRef<Path>) -> io::Result<Arc<[u8]>> {
        Ok(self.0.state.borrow().disk.find(path.as_ref())?.borrow().bytes().into())
    }

    /// Limits the bytes of all files together: writes, allocations and new files beyond it fail
    /// with ENOSPC; removing or cutting files frees space.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.0.state.borrow_mut().disk.capacity = bytes;
    }

    /// Bytes that all files occupy, with allocations beyond their ends, and 512 for each file.
    pub fn used(&self) -> u64 {
        self.0.state.borrow_mut().close_dropped();
        self.0.state.borrow().used()
    }

    /// Files that are open now.
    pub fn open_files(&self) -> usize {
        self.0.state.borrow_mut().open_files()
    }

    /// Locks on a file that this world's cores hold now.
    pub fn locks_held(&self, path: impl AsRef<Path>) -> usize {
        self.0.state.borrow_mut().locks_held(path.as_ref())
    }

    /// Locks or unlocks a file as another process would.
    pub fn lock_exclusively(&self, path: impl AsRef<Path>, locked: bool) {
        let mut state = self.0.state.borrow_mut();
        if locked {
            state.disk.locked.insert(path.as_ref().to_owned());
        } else {
            state.disk.locked.remove(path.as_ref());
        }
    }

    // Network.

    /// Connects to a simulated listener; the connection belongs to `core`. The other side is
    /// notified later.
    ///
    /// # Errors
    /// `ConnectionRefused` when there is no listener.
    pub fn connect(&self, core: &Core, addr: SocketAddr) -> io::Result<Socket> {
        let fd = self.0.state.borrow_mut().connect(addr)?;
        Ok(Socket::new(core, fd))
    }

    /// Open sockets, including listeners and connections not yet accepted.
    pub fn open_sockets(&self) -> usize {
        self.0.state.borrow_mut().open_sockets()
    }

    /// Resets all connections. Returns the number of sides.
    pub fn reset_connections(&self) -> usize {
        self.0.state.borrow_mut().reset_connections()
    }

    // Faults.

    /// Adds a fault for operations started from now on.
    pub fn add_fault(&self, fault: Fault) {
        self.0.state.borrow_mut().disk.faults.push(fault);
    }

    /// Flips a bit on the medium: every read sees it, until [`World::heal`].
    ///
    /// # Errors
    /// When there is no such file, or it is shorter.
    pub fn rot(&self, path: impl AsRef<Path>, offset: u64, bit: u8) -> io::Result<()> {
        let state = self.0.state.borrow();
        let inode = state.disk.find(path.as_ref())?;
        let mut inode = inode.borrow_mut();
        if offset >= inode.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        *inode.rot.entry(offset).or_insert(0) ^= 1 << (bit % 8);
        Ok(())
    }

    /// Ends all faults: operations started from now on have none, rotten bits are healed, and stuck
    /// operations continue.
    pub fn heal(&self) {
        let mut state = self.0.state.borrow_mut();
        state.disk.faults.clear();
        for path in state.disk.paths() {
            if let Ok(inode) = state.disk.find(&path) {
                inode.borrow_mut().rot.clear();
            }
        }
        state.release_stuck();
    }

    /// The numbers of faults that have struck so far.
    pub fn faults(&self) -> FaultCounts {
        self.0.state.borrow().disk.counts
    }

    /// Operations that a core has submitted to the devices and that have not completed.
    pub fn at_the_device(&self, core: usize) -> usize {
        self.0.state.borrow().ports[core].running.len()
    }

    /// Operations still in flight when their stopping core timed out, in all runs.
    pub fn abandoned(&self) -> usize {
        self.0.abandoned.get()
    }

    // Crashes.

    /// Ends the process now, as a kill or a power cut does: it gets no more completions, and its
    /// actions until the end of the run, which follows soon, have no effect. The run fails with
    /// [`FailureKind::Crash`]; the next run is the next process, on the disk that is left. Between
    /// two runs, the last run's unflushed data is lost in the same way.
    pub fn crash(&self, crash: Crash) {
        self.0.state.borrow_mut().crash(crash);
    }

    /// Makes the crash replace one of the next completions, of any kind and core: chance takes the
    /// number from the range, where 1 is the next. It comes in this run or not at all.
    pub fn crash_at(&self, crash: Crash, completions: std::ops::Range<u64>) {
        self.0.state.borrow_mut().arm(crash, completions);
    }

    // Running.

    /// Runs `main` on every core until all have ended and shut down; returns their results, by
    /// core. A world can run several times in sequence: one process after the other on the same
    /// disk.
    ///
    /// # Errors
    /// See [`FailureKind`]; a requested crash is one.
    ///
    /// # Panics
    /// When a task panics, or when called from a task of this world.
    pub fn run<F, Fut, T>(&self, main: F) -> Result<Vec<T>, Failure>
    where
        F: Fn(Core) -> Fut,
        Fut: Future<Output = T> + 'static,
        T: 'static,
    {
        assert!(!self.0.running.replace(true), "a world has one run at a time");
        let _say = SayOnPanic(self.0.seed);
        self.0.state.borrow_mut().restart(self.0.cores);
        self.0.beginning.take();
        let results: Rc<RefCell<Vec<Option<T>>>> = Rc::default();
        results.borrow_mut().resize_with(self.0.cores, || None);
        let main = |core: Core| {
            let (results, id, main) = (results.clone(), core.id(), main(core));
            async move {
                let result = main.await;
                results.borrow_mut()[id] = Some(result);
            }
        };
        let mut seats = match self.seats(main) {
            Ok(seats) => seats,
            Err(error) => {
                self.0.running.set(false);
                return Err(self.failure(FailureKind::Host, error.to_string()));
            }
        };
        let end = self.rounds(&mut seats);
        for (id, seat) in seats.iter().enumerate() {
            self.clean_up(id, &seat.core);
        }
        drop(seats);
        self.0.state.borrow_mut().armed = None;
        self.0.running.set(false);
        end?;
        Ok(results.take().into_iter().flatten().collect())
    }

    fn failure(&self, kind: FailureKind, detail: String) -> Failure {
        let trace = self.newest_events();
        let detail = format!("{detail}the newest events:\n{trace}");
        Failure { kind, seed: self.0.seed, detail }
    }

    /// Starts another process in this run, with one core of its own. It shares the disk and the
    /// clock with the others, and descriptors that it is given. The run, with all its processes,
    /// ends when its first process has ended.
    pub fn start_process<Fut>(&self, main: impl FnOnce(Core) -> Fut + 'static) -> Process
    where
        Fut: Future<Output = ()> + 'static,
    {
        let process = Rc::<ProcessState>::default();
        let main: Main = Box::new(move |core| Box::pin(main(core)));
        self.0.beginning.borrow_mut().push(Beginning { process: process.clone(), main });
        Process(process)
    }

    /// Gives each started process a seat.
    fn begin(&self, seats: &mut Vec<Seat>) -> io::Result<()> {
        for Beginning { process, main } in self.0.beginning.take() {
            let (shared, inbox) = Shared::new()?;
            let everybody = vec![shared.clone()];
            let mesh = Mesh::connect(&everybody).pop().unwrap_or_default();
            let port = self.0.state.borrow_mut().add_core();
            assert_eq!(port, seats.len(), "each core has a seat");
            let core = self.core((0, 1), port, &shared, inbox, mesh);
            let main = core.spawn(Class::Foreground, main(core.clone()));
            seats.push(Seat::new(core, shared, main, &everybody, Some(process)));
        }
        Ok(())
    }

    /// Makes the core `id` of `cores`, at a port of the devices.
    fn core(
        &self,
        (id, cores): (usize, usize),
        port: usize,
        shared: &Arc<Shared>,
        inbox: Inbox<Remote>,
        mesh: Mesh,
    ) -> Core {
        let driver = SimDriver::new(&self.0.state, port, shared);
        let config = {
            let mut state = self.0.state.borrow_mut();
            CoreConfig {
                id,
                cores,
                memory: state.config.memory,
                disk_depth: state.config.disk_depth,
                poll: state.config.poll,
                seed: state.schedule.next_u64(),
            }
        };
        Core::new(config, shared.clone(), inbox, Box::new(driver), mesh)
    }

    fn seats<F, Fut>(&self, main: F) -> io::Result<Vec<Seat>>
    where
        F: Fn(Core) -> Fut,
        Fut: Future<Output = ()> + 'static,
    {
        let parts = (0..self.0.cores).map(|_| Shared::new()).collect::<io::Result<Vec<_>>>()?;
        let everybody: Vec<_> = parts.iter().map(|(shared, _)| shared.clone()).collect();
        let meshes = Mesh::connect(&everybody);
        let mut seats = Vec::new();
        for (id, ((shared, inbox), mesh)) in parts.into_iter().zip(meshes).enumerate() {
            let core = self.core((id, self.0.cores), id, &shared, inbox, mesh);
            let main = core.spawn(Class::Foreground, main(core.clone()));
            seats.push(Seat::new(core, shared, main, &everybody, None));
        }
        Ok(seats)
    }

    fn rounds(&self, seats: &mut Vec<Seat>) -> Result<(), Failure> {
        let (mut turns, mut looked) = (0u64, u64::MAX);
        let (turns_max, time_max) = {
            let state = self.0.state.borrow();
            (state.config.turns_max, state.now.saturating_add(state.config.time_max_ns))
        };
        let mut ready: Vec<(usize, u64)> = Vec::with_capacity(seats.len());
        loop {
            ready.clear();
            self.begin(seats)
                .map_err(|error| self.failure(FailureKind::Host, error.to_string()))?;
            for (id, seat) in seats.iter_mut().enumerate() {
                let killed =
                    seat.process.as_ref().is_some_and(|process| process.left.get() == Some(0));
                if killed && !matches!(seat.status, Status::Ended) {
                    self.kill(id, seat);
                }
            }
            let mut next: Option<u64> = None;
            {
                let mut state = self.0.state.borrow_mut();
                state.close_dropped();
                if looked != turns {
                    // Only turns change descriptors of the host.
                    state.look_at_host();
                    looked = turns;
                }
                state.arrive();
                state.answer_names();
                if turns.is_multiple_of(WEIGHTS_LAST) {
                    for seat in seats.iter_mut() {
                        seat.weight = 1 << state.schedule.below(5);
                    }
                }
                for (id, seat) in seats.iter_mut().enumerate() {
                    match seat.wakes(id, &mut state) {
                        Some(at) if at <= state.now => ready.push((id, seat.weight)),
                        Some(at) => next = Some(next.map_or(at, |next| next.min(at))),
                        None => {}
                    }
                }
                let first = &seats[..self.0.cores];
                if first.iter().all(|seat| matches!(seat.status, Status::Ended))
                    && state.crashed().is_none()
                {
                    return Ok(());
                }
                if ready.is_empty() && state.crashed().is_none() {
                    let others = [state.next_name(), state.next_arrival()];
                    let next = next.into_iter().chain(others.into_iter().flatten()).min();
                    if let Some(next) = next {
                        state.now = state.now.max(next);
                        if next <= time_max {
                            continue;
                        }
                    }
                }
            }
            let (now, crashed) = (self.now_ns(), self.0.state.borrow().crashed());
            let failed = match crashed {
                Some(crash) => FailureKind::Crash(crash),
                None if now > time_max => FailureKind::Time,
                None if turns >= turns_max => FailureKind::Turns,
                None if ready.is_empty() => FailureKind::Deadlock,
                None => {
                    let id = self.pick(&ready);
                    turns += 1;
                    self.step(id, &mut seats[id]);
                    continue;
                }
            };
            return Err(self.failure(failed, self.describe(seats)));
        }
    }

    fn pick(&self, ready: &[(usize, u64)]) -> usize {
        let mut state = self.0.state.borrow_mut();
        let total = ready.iter().map(|(_, weight)| weight).sum();
        let mut drawn = state.schedule.below(total);
        for &(id, weight) in ready {
            if drawn < weight {
                return id;
            }
            drawn -= weight;
        }
        ready[0].0
    }

    /// Runs a core's turn, or the rest of one.
    fn step(&self, id: usize, seat: &mut Seat) {
        let state = &self.0.state;
        if let Some(left) = seat.process.as_ref().map(|process| &process.left) {
            left.set(left.get().map(|left| left.saturating_sub(1)));
        }
        state.borrow_mut().note(id, u32::MAX, What::Turn);
        match seat.status {
            Status::Ready => {
                let wait = seat.core.work(true);
                if wait == Wait::No {
                    seat.core.finish(Wait::No);
                } else {
                    // As in the kernel: submitting and waiting are one call, and a completion that
                    // has arrived ends the wait.
                    let mut state = state.borrow_mut();
                    state.submit(id);
                    let until = match wait {
                        Wait::Ns(ns) => Some(state.now.saturating_add(ns)),
                        _ => None,
                    };
                    let due = state.due_now(id, 1);
                    let at_least = if due { 1 } else { seat.core.inner().gather(wait) };
                    let gather_until = state.now.saturating_add(GATHER_NS);
                    seat.status =
                        Status::Asleep { wait, until, at_least, gather_until, woken: None };
                    return;
                }
            }
            Status::Asleep { wait, .. } => {
                seat.core.finish(wait);
                seat.status = Status::Ready;
            }
            Status::Draining { give_up, .. } => {
                seat.core.drain(Wait::Ns(DRAIN_NS));
                self.drain(id, seat, give_up);
                return;
            }
            Status::Ended => return,
        }
        let mut context = Context::from_waker(Waker::noop());
        if let Some(main) = &mut seat.main
            && Pin::new(main).poll(&mut context).is_ready()
        {
            seat.main = None;
            state.borrow_mut().note(id, u32::MAX, What::MainEnded);
            drop(seat.notice.take());
        }
        if seat.core.all_ended() {
            let give_up = seat.core.stop(PATIENCE_NS);
            self.drain(id, seat, give_up);
        }
    }

    /// Kills a process.
    fn kill(&self, id: usize, seat: &mut Seat) {
        self.0.state.borrow_mut().note(id, u32::MAX, What::Ended);
        seat.status = Status::Ended;
        seat.core.stop(0);
        self.0.state.borrow_mut().forget(id);
        // Answers in the inbox hold descriptors.
        seat.core.drain(Wait::No);
        seat.core.abandon();
        seat.main = None;
        seat.notice = None;
        if let Some(process) = &seat.process {
            process.killed.set(true);
        }
        seat.ended();
    }

    fn drain(&self, id: usize, seat: &mut Seat, give_up: u64) {
        let now = self.now_ns();
        let left = seat.core.operations_in_flight();
        let mut state = self.0.state.borrow_mut();
        state.submit(id);
        if seat.core.drained() {
            state.note(id, u32::MAX, What::Ended);
            seat.status = Status::Ended;
            seat.ended();
        } else if now >= give_up {
            state.note(id, u32::MAX, What::GaveUp { left: left as u64 });
            self.0.abandoned.set(self.0.abandoned.get() + left);
            seat.status = Status::Ended;
            seat.ended();
        } else {
            seat.status = Status::Draining { give_up, until: now.saturating_add(DRAIN_NS) };
        }
    }

    /// Drops a core. On the host the memory of unfinished operations is leaked, because the kernel
    /// may still write to it; the simulated devices forget it, so it can be freed.
    fn clean_up(&self, port: usize, core: &Core) {
        core.stop(0);
        self.0.state.borrow_mut().forget(port);
        core.abandon();
    }

    fn describe(&self, seats: &[Seat]) -> String {
        use fmt::Write;
        let mut text = String::new();
        for (id, seat) in seats.iter().enumerate() {
            let status = match seat.status {
                Status::Ready => "is ready".to_owned(),
                Status::Asleep { .. } if seat.main.is_none() => {
                    "has ended its main task and serves the others".to_owned()
                }
                Status::Asleep { wait, .. } => format!("waits ({wait:?})"),
                Status::Draining { .. } => "waits for its operations to end".to_owned(),
                Status::Ended => "has ended".to_owned(),
            };
            let stuck = self.0.state.borrow().stuck(id);
            let _ = writeln!(
                text,
                "core {id} {status}; {} tasks, {} operations in flight, {stuck} of them stuck",
                seat.core.live_tasks(),
                seat.core.operations_in_flight(),
            );
        }
        text
    }
}

impl Seat {
    fn new(
        core: Core,
        shared: Arc<Shared>,
        main: JoinHandle<()>,
        everybody: &[Arc<Shared>],
        process: Option<Rc<ProcessState>>,
    ) -> Seat {
        let (main, notice) = (Some(main), Some(EndNotice(everybody.to_vec())));
        Seat { core, shared, main, notice, status: Status::Ready, weight: 1, process }
    }

    fn ended(&self) {
        if let Some(process) = &self.process {
            process.ended.set(true);
        }
    }

    /// The time when the core can continue: a past time means now, `None` that no event will wake
    /// it.
    fn wakes(&mut self, id: usize, state: &mut State) -> Option<u64> {
        if self.process.as_ref().is_some_and(|process| process.stopped.get()) {
            return None;
        }
        match &mut self.status {
            Status::Ready => Some(0),
            Status::Asleep { until, at_least, gather_until, woken, .. } => {
                if woken.is_none() && !self.shared.sleep().is_asleep() {
                    // Another core took the flag and signals; the signal takes some time.
                    *woken = Some(state.now + state.schedule.within(state.config.wake_ns.clone()));
                }
                let all = state.ports[id].due(*at_least);
                let one = state.ports[id].due(1).map(|at| at.max(*gather_until));
                [*until, *woken, all, one].into_iter().flatten().min()
            }
            Status::Draining { until, .. } => {
                Some(state.ports[id].due(1).map_or(*until, |at| at.min(*until)))
            }
            Status::Ended => None,
        }
    }
}
