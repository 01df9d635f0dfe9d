//! Starting and stopping cores.
//!
//! [`run`] starts one thread per core, each pinned to its processor, each with its own driver. The
//! caller's function makes every core's main task. A core whose main task has ended continues to
//! serve the others' calls. When all have ended, each core shuts down: it drops its tasks, cancels
//! and reaps its operations, and then frees its memory. If operations remain unfinished after a
//! timeout, the memory is leaked on purpose: the kernel may still write to it. A core that panics
//! shuts down, too, while its thread unwinds.

use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::channels::mesh::Mesh;
use crate::core::{Core, CoreConfig};
use crate::driver::epoll::EpollDriver;
use crate::driver::host::Helpers;
use crate::driver::remote::{CoreAddress, EndNotice};
use crate::driver::{Driver, UringDriver};
use crate::flow::Board;
use crate::idle::PollMode;
use crate::log::Log;
use crate::process::processors::{pin, processors};
use crate::task::Class;

/// Which driver the cores use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DriverKind {
    /// io_uring where the system allows it, else epoll, with one warning in the log.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// epoll, and threads for files.
    Epoll,
}

impl std::str::FromStr for DriverKind {
    type Err = String;
    fn from_str(text: &str) -> Result<DriverKind, String> {
        match text {
            "auto" => Ok(DriverKind::Auto),
            "io_uring" | "uring" => Ok(DriverKind::Uring),
            "epoll" => Ok(DriverKind::Epoll),
            _ => Err(format!("must be auto, io_uring or epoll, not '{text}'")),
        }
    }
}

/// How to run cores.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// Processors to run on, one core each.
    pub processors: Vec<usize>,
    /// Pin each core's thread to its processor. Without, there is a core for each entry of
    /// `processors`, and the system decides where it runs: for a process that has other threads to
    /// run.
    pub pin: bool,
    /// Buffer memory of each core in bytes.
    pub memory: usize,
    /// Most disk operations in flight per core; more wait in the core.
    pub disk_depth: usize,
    /// How cores wait for work.
    pub poll: PollMode,
    /// Which driver.
    pub driver: DriverKind,
    /// Restrict each ring to the operations of the driver, whatever code fills it: a system call
    /// filter does not see a ring's operations. If the kernel cannot restrict a ring, the driver
    /// is epoll.
    pub confined: bool,
    /// The log, if there is one; each core gets a ring of its own in it.
    pub log: Option<Log>,
}

impl Default for RuntimeConfig {
    fn default() -> Self {
        RuntimeConfig {
            processors: processors(),
            pin: true,
            memory: 256 << 20,
            disk_depth: 256,
            poll: PollMode::default(),
            driver: DriverKind::default(),
            confined: false,
            log: None,
        }
    }
}

/// How long a stopping core waits for its operations.
pub(crate) const PATIENCE_NS: u64 = 5_000_000_000;

/// Runs `main` on every core and returns what each returned, by core.
///
/// # Errors
/// When threads or drivers cannot be made; no `main` has run then.
///
/// # Panics
/// When a core panicked.
#[expect(clippy::disallowed_methods, reason = "the reactor is where threads are started")]
pub fn run<F, Fut, T>(config: &RuntimeConfig, main: F) -> io::Result<Vec<T>>
where
    F: Fn(Core) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = T> + 'static,
    T: Send + 'static,
{
    let n = config.processors.len();
    if n == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no processor to run on"));
    }
    ignore_file_size_signal();
    let helpers = Arc::new(Helpers::start(2)?);
    let parts: Vec<_> = (0..n).map(|_| CoreAddress::new()).collect::<io::Result<Vec<_>>>()?;
    let everybody: Vec<_> = parts.iter().map(|(shared, _)| shared.clone()).collect();
    let meshes = Mesh::connect(&everybody);
    let driver_kind = choose(config.driver, config.confined)?;
    let board = Arc::new(Board::new(n));
    let mut threads = Vec::new();
    for (id, ((shared, inbox), mesh)) in parts.into_iter().zip(meshes).enumerate() {
        let cpu = config.processors[id];
        let main = main.clone();
        let helpers = helpers.clone();
        let config = config.clone();
        let notice = EndNotice(everybody.clone());
        let board = board.clone();
        let thread = std::thread::Builder::new().name(format!("millrace-core{id}")).spawn(
            move || -> io::Result<T> {
                let _entered = config.log.as_ref().map(|log| log.enter(Some(id)));
                let notice = notice;
                if config.pin {
                    pin(cpu);
                }
                let driver: Box<dyn Driver> = match driver_kind {
                    DriverKind::Epoll => Box::new(EpollDriver::new(&shared, &helpers)?),
                    _ => Box::new(UringDriver::new(
                        &shared,
                        &helpers,
                        config.confined,
                        config.memory,
                    )?),
                };
                let core_config = CoreConfig {
                    id,
                    cores: config.processors.len(),
                    memory: config.memory,
                    disk_depth: config.disk_depth,
                    poll: config.poll,
                    seed: host_seed(id),
                    board,
                };
                let core = Core::new(core_config, shared, inbox, driver, mesh);
                let panics = ShutDownOnPanic(&core);
                let result = block_on(&core, main(core.clone()));
                drop(notice);
                while !core.all_ended() {
                    core.turn(true);
                }
                drop(panics);
                if !core.shut_down(PATIENCE_NS) {
                    tracing::error!("core {id}: operations still run at the end; leaking memory");
                    std::mem::forget(core);
                }
                Ok(result)
            },
        )?;
        threads.push(thread);
    }
    // All of them end before a panic goes on: whoever catches it may open the same files again.
    let ended: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
    ended
        .into_iter()
        .map(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        .collect()
}

/// Shuts a core down that panics: its tasks and pollers are dropped, so that nobody waits for their
/// answers, and its operations end before the files that they write can be opened by others.
struct ShutDownOnPanic<'a>(&'a Core);

impl Drop for ShutDownOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let shut_down = AssertUnwindSafe(|| self.0.shut_down(PATIENCE_NS));
            if !matches!(catch_unwind(shut_down), Ok(true)) {
                std::mem::forget(self.0.clone());
            }
        }
    }
}

/// Runs turns until the future is done.
pub(crate) fn block_on<T: 'static>(core: &Core, future: impl Future<Output = T> + 'static) -> T {
    let handle = core.spawn(Class::Foreground, future);
    let mut handle = pin!(handle);
    loop {
        // The handle is polled after every turn, so it needs no waker.
        if let Poll::Ready(result) =
            handle.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop()))
        {
            return result;
        }
        core.turn(true);
    }
}

/// Selects the driver of tests on the reactor: `auto`, `io_uring` or `epoll`. It replaces
/// `DriverKind::Auto` only.
const DRIVER_VARIABLE: &str = "MILLRACE_DRIVER";

/// Finds a driver that works on this system.
fn choose(kind: DriverKind, confined: bool) -> io::Result<DriverKind> {
    let kind = match std::env::var(DRIVER_VARIABLE) {
        Ok(text) if kind == DriverKind::Auto => text.parse().map_err(|error| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("{DRIVER_VARIABLE}: {error}"))
        })?,
        _ => kind,
    };
    if kind == DriverKind::Epoll {
        return Ok(kind);
    }
    match UringDriver::probe(confined) {
        Ok(()) => Ok(DriverKind::Uring),
        Err(e) if kind == DriverKind::Uring => {
            Err(io::Error::new(e.kind(), format!("io_uring is not available: {e}")))
        }
        Err(e) => {
            tracing::warn!(
                "io_uring is not available here ({e}); serving through epoll and threads for files, \
                 which costs more processor time per read"
            );
            Ok(DriverKind::Epoll)
        }
    }
}

fn host_seed(id: usize) -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_usize(id);
    hasher.finish()
}

/// The signal that asks a process to hand over to a successor.
pub const UPGRADE: i32 = libc::SIGUSR2;

/// Waits for one of the signals that ask a process to stop, or for [`UPGRADE`], and returns its
/// number. They must be blocked in all threads: call [`block_signals`] before starting any.
///
/// # Errors
/// When the process has no descriptor left.
pub async fn signal(core: &Core) -> io::Result<i32> {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    let set = signals();
    // SAFETY: `set` is live; -1 asks for a new descriptor.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns.
    let fd = std::rc::Rc::new(unsafe { OwnedFd::from_raw_fd(fd) });
    loop {
        crate::io::net::readable(core, &fd).await?;
        // SAFETY: a plain C struct for which all zeroes is a valid value.
        let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
        // SAFETY: reads at most the size of `info` into it.
        let n = unsafe {
            libc::read(fd.as_raw_fd(), (&raw mut info).cast(), std::mem::size_of_val(&info))
        };
        if n == std::mem::size_of_val(&info) as isize {
            return Ok(info.ssi_signo as i32);
        }
    }
}

/// Makes a write beyond the file size limit (`ulimit -f`) fail with `EFBIG` instead of killing the
/// process. The standard library does the same for `SIGPIPE`.
fn ignore_file_size_signal() {
    // SAFETY: SIG_IGN installs no handler, and nothing in this process handles SIGXFSZ.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

fn signals() -> libc::sigset_t {
    // SAFETY: `sigset_t` is plain data, and sigemptyset initialises it before it is read.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        libc::sigaddset(&raw mut set, UPGRADE);
        set
    }
}

/// Blocks the signals that [`signal`] waits for, in this thread and the threads that it starts
/// later. Ignores `SIGXFSZ`, as [`run`] does.
pub fn block_signals() {
    ignore_file_size_signal();
    let set = signals();
    // SAFETY: `set` is live and initialised; no old mask is asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
}
