//! The seam between a core's loop and the outside world.
//!
//! A [`Driver`] takes staged operations, submits them in one go, and hands back completions; it
//! also owns the clock. Three exist: `uring` (io_uring), `epoll` (epoll and threads for
//! files, for places that forbid io_uring) and `sim` (everything simulated, from one seed).
//! A driver belongs to one core and is only called by it, never re-entered.
//!
//! Operations carry raw pointers. The loop's operation table owns what they point to until the
//! driver has reported the operation's last completion; a driver must not touch the memory of an
//! operation after that, and must report every operation exactly once (`more == false`).

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Child;
use std::sync::Arc;

use crate::file::{Fd, Mode, Opening, SharedFile};
use crate::image::{Image, ImageOpening};
use crate::process::Program;
use crate::remote::Shared;

pub(crate) mod epoll;
mod file_threads;
pub(crate) mod host;
mod queue;
pub(crate) mod sim;
pub(crate) mod uring;

pub use uring::UringDriver;

/// Names an operation: its slot in the core's operation table.
pub type Token = u32;

/// An operation on a descriptor, as a driver sees it. Lengths and offsets are in bytes.
#[derive(Clone, Copy, Debug)]
pub enum IoOp {
    /// Read from a file at an offset; completes with the bytes read.
    Read {
        /// Descriptor.
        fd: i32,
        /// Where to.
        ptr: *mut u8,
        /// How many at most.
        len: u32,
        /// From where in the file.
        offset: u64,
    },
    /// Write to a file at an offset; completes with the bytes written.
    Write {
        /// Descriptor.
        fd: i32,
        /// From where.
        ptr: *const u8,
        /// How many at most.
        len: u32,
        /// To where in the file.
        offset: u64,
    },
    /// Read from a file at an offset into several pieces of memory; completes with the bytes read.
    ReadV {
        /// Descriptor.
        fd: i32,
        /// Where to: `n` pieces, as a queue's slot keeps them.
        iov: *const libc::iovec,
        /// How many pieces.
        n: u16,
        /// By a thread that blocks.
        threads: bool,
        /// From where in the file.
        offset: u64,
    },
    /// Write several pieces of memory to a file at an offset; completes with the bytes written.
    WriteV {
        /// Descriptor.
        fd: i32,
        /// From where: `n` pieces, as a queue's slot keeps them.
        iov: *const libc::iovec,
        /// How many pieces.
        n: u16,
        /// By a thread that blocks.
        threads: bool,
        /// To where in the file.
        offset: u64,
    },
    /// Give a range's room back or zero it, as `fallocate` does; completes with 0.
    Fallocate {
        /// Descriptor.
        fd: i32,
        /// `FALLOC_FL_*`: punch a hole or zero a range, both of them keeping the size.
        mode: i32,
        /// From where in the file.
        offset: u64,
        /// How much.
        len: u64,
    },
    /// Make durable what has been written to a file, and its length; completes with 0.
    SyncData {
        /// Descriptor.
        fd: i32,
    },
    /// Receive from a stream socket; completes with the bytes received, 0 at its end.
    Recv {
        /// Descriptor.
        fd: i32,
        /// Where to.
        ptr: *mut u8,
        /// How many at most.
        len: u32,
    },
    /// Send to a stream socket; completes with the bytes taken.
    Send {
        /// Descriptor.
        fd: i32,
        /// From where.
        ptr: *const u8,
        /// How many.
        len: u32,
    },
    /// Send several pieces; completes with the bytes taken. `msg` points to a `msghdr`.
    SendMsg {
        /// Descriptor.
        fd: i32,
        /// The message header, owned by the operation table.
        msg: *const libc::msghdr,
    },
    /// Accept a connection; completes with its descriptor.
    Accept {
        /// The listening socket.
        fd: i32,
    },
    /// Wait until a descriptor is readable (or has failed).
    PollIn {
        /// Descriptor.
        fd: i32,
    },
}

/// An operation on names, which may block: a driver hands it to the helper pool or simulates it.
#[derive(Clone, Debug)]
pub enum MetaOp {
    /// Open a file for reading; direct I/O where the file system can.
    Open {
        /// Which.
        path: PathBuf,
        /// Through the page cache instead of direct.
        buffered: bool,
    },
    /// The entries of a directory.
    List {
        /// Which.
        path: PathBuf,
    },
    /// The whole of a small file.
    ReadSmall {
        /// Which.
        path: PathBuf,
        /// A longer file is an error.
        max: usize,
    },
    /// A shared lock on a file, refused when somebody holds it exclusively.
    LockShared {
        /// Which.
        path: PathBuf,
    },
    /// Open a file for reading and writing, or make one.
    OpenForWriting {
        /// Which.
        path: PathBuf,
        /// What must, or must not, be there.
        opening: Opening,
        /// Direct or through the page cache.
        mode: Mode,
    },
    /// Give a file another name in the place of whatever has that name.
    Rename {
        /// Its name.
        from: PathBuf,
        /// Its new name.
        to: PathBuf,
    },
    /// Make a directory.
    CreateDir {
        /// Which.
        path: PathBuf,
    },
    /// Remove a file's name.
    Remove {
        /// Which.
        path: PathBuf,
    },
    /// Make a directory's names durable.
    SyncDir {
        /// Which.
        path: PathBuf,
    },
    /// Cut a file to a length, or fill it up to that with zeroes.
    SetLen {
        /// Which.
        file: Arc<SharedFile>,
        /// In bytes.
        len: u64,
    },
    /// Give a file room up to a length, which it grows to if it is shorter.
    Allocate {
        /// Which.
        file: Arc<SharedFile>,
        /// In bytes.
        len: u64,
        /// It keeps the length that it has.
        keeps_len: bool,
    },
    /// Open a disk image.
    OpenImage {
        /// Which.
        path: PathBuf,
        /// How.
        how: ImageOpening,
        /// It is open already, here.
        open: Option<Arc<OwnedFd>>,
        /// Whether holes can be punched, where that is known already.
        holes: Option<bool>,
    },
    /// Start another program.
    StartProcess(Program),
    /// Look how long an open file is, and note it.
    Measure {
        /// Which.
        file: Arc<SharedFile>,
    },
    /// An exclusive lock on a file, which is made if it is missing; refused when somebody holds
    /// any lock on it.
    LockExclusive {
        /// Which.
        path: PathBuf,
    },
}

/// What a [`MetaOp`] answers.
#[derive(Debug)]
pub enum MetaOut {
    /// To what brings nothing back.
    Done,
    /// To `Open` and `OpenForWriting`.
    File(Arc<SharedFile>),
    /// To `OpenImage`.
    Image(Image),
    /// To `StartProcess`.
    Process(Child),
    /// To `List`.
    List(Vec<DirEntry>),
    /// To `ReadSmall`.
    Bytes(Vec<u8>),
    /// To `LockShared` and `LockExclusive`: held while the descriptor lives; `None` where nothing
    /// needs holding.
    Lock(Option<Fd>),
}

/// One entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// File name without the directory.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// How long [`Driver::enter`] may wait for a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Submit and reap, do not wait.
    No,
    /// Until something completes, a wake-up arrives, or this many nanoseconds have passed.
    Ns(u64),
    /// Until something completes or a wake-up arrives.
    Forever,
}

/// A finished step of an operation.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// Which operation.
    pub token: Token,
    /// As system calls return it: a count, a descriptor, or a negated error number.
    pub result: i32,
}

/// See the module text.
pub trait Driver {
    /// Short name for `INFO` and logs.
    fn name(&self) -> &'static str;

    /// The simulated driver, if this is it: its sockets are no descriptors of the host.
    fn sim(&mut self) -> Option<&mut sim::SimDriver> {
        None
    }

    /// Takes an operation for the next `enter`. Never called with more operations unfinished
    /// than `capacity()`.
    fn stage(&mut self, token: Token, op: IoOp);

    /// Starts an operation on names. The answer goes to `shared`'s inbox, or is kept and
    /// delivered there by a later `enter`.
    fn meta(&mut self, token: Token, op: MetaOp, shared: &Arc<Shared>);

    /// Asks for an operation to end early; its completion still comes. Never called for a write
    /// or a sync, which end as the device decides.
    fn cancel(&mut self, token: Token);

    /// Hands what is staged to the device now, without looking for completions. A driver for
    /// which that makes no difference does nothing.
    fn submit(&mut self) {}

    /// Operations staged and not yet submitted.
    fn staged(&self) -> usize;

    /// Most operations on files that may be unfinished at once. Those that wait for a peer are as
    /// many as there are descriptors, and completions beyond what a driver has room for are not
    /// lost.
    fn capacity(&self) -> usize;

    /// Submits what is staged, waits as told, and appends what has completed. A wait should
    /// gather `at_least` completions for [`GATHER_NS`] where that is cheap; after that, and
    /// always elsewhere, one is enough.
    ///
    /// # Errors
    /// Only what makes the driver unusable.
    fn enter(&mut self, wait: Wait, at_least: usize, done: &mut Vec<Completion>) -> io::Result<()>;

    /// Whether `enter(Wait::No)` would find something. Memory reads only.
    fn ready(&mut self) -> bool;

    /// Monotonic nanoseconds.
    fn now_ns(&mut self) -> u64;

    /// Milliseconds since 1970.
    fn unix_time_ms(&mut self) -> u64;
}

/// Longest wait for more than one completion in nanoseconds.
pub(crate) const GATHER_NS: u64 = 200_000;

/// The host's monotonic clock.
#[expect(clippy::disallowed_methods, reason = "the drivers are where the clock is read")]
fn host_now_ns() -> u64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    let start = START.get_or_init(std::time::Instant::now);
    start.elapsed().as_nanos() as u64 + 1
}

/// The host's calendar clock.
#[expect(clippy::disallowed_methods, reason = "the drivers are where the clock is read")]
fn host_unix_time_ms() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}
