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

use super::config::SimConfig;
use super::crash::Crash;
use super::fault::{Fault, FaultCounts};
use super::rng::Rng;
use super::state::State;
use crate::core::Core;
use crate::io::net::Socket;

/// A handle on a simulated world; see the module text. Clones are the same world, so tasks in it
/// can change its faults.
#[derive(Clone)]
pub struct World(pub(super) Rc<WorldState>);

/// The state that all handles share.
pub(super) struct WorldState {
    pub(super) seed: u64,
    pub(super) cores: usize,
    pub(super) state: Rc<RefCell<State>>,
    pub(super) running: Cell<bool>,
    pub(super) abandoned: Cell<usize>,
    /// Processes that start in the next round.
    pub(super) beginning: RefCell<Vec<Beginning>>,
}

/// A process's main task.
pub(super) type Main = Box<dyn FnOnce(Core) -> Pin<Box<dyn Future<Output = ()>>>>;

/// A process to start.
pub(super) struct Beginning {
    pub(super) process: Rc<ProcessState>,
    pub(super) main: Main,
}

/// The control and state of a process that others see.
#[derive(Default)]
pub(super) struct ProcessState {
    pub(super) stopped: Cell<bool>,
    pub(super) ended: Cell<bool>,
    pub(super) killed: Cell<bool>,
    /// Turns until it is killed.
    pub(super) left: Cell<Option<u64>>,
}

/// A process beside the main one of a [`World`]: see [`World::start_process`]. Clones are the same
/// process.
#[derive(Clone)]
pub struct Process(pub(super) Rc<ProcessState>);

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

    /// Suspends it until [`Process::resume`]; nothing is closed.
    pub fn stop(&self) {
        self.0.stopped.set(true);
    }

    /// Resumes it after [`Process::stop`].
    pub fn resume(&self) {
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
    pub(super) detail: String,
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
        World(Rc::new(WorldState { seed, cores, state, running, abandoned, beginning }))
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

    /// The length of a file, in bytes.
    ///
    /// # Errors
    /// When there is none.
    pub fn len(&self, path: impl AsRef<Path>) -> io::Result<u64> {
        Ok(self.0.state.borrow().disk.find(path.as_ref())?.borrow().len())
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

    /// Computations that were made besides the cores, in all runs: see
    /// [`Core::compute`](crate::Core::compute).
    pub fn computations(&self) -> u64 {
        self.0.state.borrow().computations
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
}
