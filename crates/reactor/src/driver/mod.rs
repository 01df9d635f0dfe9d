//! The seam between a core's loop and the outside world.
//!
//! A [`Driver`] takes staged operations, submits them together, and returns completions; it also
//! owns the clock. There are three: `uring` (io_uring), `epoll` (epoll, and threads for files, for
//! systems that forbid io_uring) and `sim` (everything simulated, from one seed). A driver belongs
//! to one core, is called only by it, and is never re-entered.
//!
//! Operations carry raw pointers. The loop's operation table owns their targets until the driver
//! has reported the operation's completion. A driver must not touch the memory of an operation
//! after that, and must report every operation exactly once.
//!
//! This is the lowest room of the crate: it uses only the queues and flags that it shares with
//! other threads (`inbox`, `sleep`) and the alignment of buffers; only tests use more.
//! There is one circle: the simulated driver works on the devices of [`crate::sim`], which speak
//! this module's types. It is here because all writing to an operation's memory is in this room.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Child;
use std::rc::Rc;
use std::sync::Arc;

use self::remote::CoreAddress;
use crate::memory::region::Region;

mod descriptor;
pub(crate) mod epoll;
mod file_threads;
pub(crate) mod host;
mod image;
mod program;
mod queue;
pub(crate) mod remote;
mod shared_file;
pub(crate) mod sim;
pub(crate) mod uring;

pub use descriptor::{Fd, HostFile, LockGuard, SimFd};
pub use image::{Image, ImageInfo, ImageLock, ImageOpening};
pub use program::Program;
pub use shared_file::{Mode, Opening, SharedFile};
pub use uring::UringDriver;

/// An operation's name: its slot in the core's operation table.
pub type Token = u32;

/// An operation on a descriptor, as a driver sees it. Lengths and offsets are in bytes.
#[derive(Clone, Copy, Debug)]
pub enum IoOp {
    /// Read from a file at an offset; completes with the bytes read.
    Read {
        /// Descriptor.
        fd: i32,
        /// Destination.
        ptr: *mut u8,
        /// Most bytes.
        len: u32,
        /// Offset in the file.
        offset: u64,
    },
    /// Write to a file at an offset; completes with the bytes written.
    Write {
        /// Descriptor.
        fd: i32,
        /// Source.
        ptr: *const u8,
        /// Most bytes.
        len: u32,
        /// Offset in the file.
        offset: u64,
        /// Complete when the bytes are durable, with what is needed to read them.
        durable: bool,
    },
    /// Read from a file at an offset into several pieces of memory; completes with the bytes read.
    ReadV {
        /// Descriptor.
        fd: i32,
        /// Destination: `n` pieces, which a queue's slot keeps.
        iov: *const libc::iovec,
        /// Number of pieces.
        n: u16,
        /// A thread makes the plain blocking call.
        threads: bool,
        /// Offset in the file.
        offset: u64,
    },
    /// Write several pieces of memory to a file at an offset; completes with the bytes written.
    WriteV {
        /// Descriptor.
        fd: i32,
        /// Source: `n` pieces, which a queue's slot keeps.
        iov: *const libc::iovec,
        /// Number of pieces.
        n: u16,
        /// A thread makes the plain blocking call.
        threads: bool,
        /// Offset in the file.
        offset: u64,
    },
    /// Free a range's disk space or zero the range, as `fallocate` does; completes with 0.
    Fallocate {
        /// Descriptor.
        fd: i32,
        /// `FALLOC_FL_*`: punch a hole or zero a range, both of them keeping the size.
        mode: i32,
        /// Offset in the file.
        offset: u64,
        /// Length.
        len: u64,
    },
    /// Make a file's written data and its length durable; completes with 0.
    SyncData {
        /// Descriptor.
        fd: i32,
    },
    /// Receive from a stream socket; completes with the bytes received, 0 at its end.
    Recv {
        /// Descriptor.
        fd: i32,
        /// Destination.
        ptr: *mut u8,
        /// Most bytes.
        len: u32,
    },
    /// Send to a stream socket; completes with the bytes taken.
    Send {
        /// Descriptor.
        fd: i32,
        /// Source.
        ptr: *const u8,
        /// Number of bytes.
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
    /// Open a file for reading; with direct I/O where the file system supports it.
    Open {
        /// Its path or handle.
        path: PathBuf,
        /// Use the page cache, not direct I/O.
        buffered: bool,
    },
    /// List a directory.
    List {
        /// Its path or handle.
        path: PathBuf,
    },
    /// Read a whole small file.
    ReadSmall {
        /// Its path or handle.
        path: PathBuf,
        /// Most bytes; a longer file is an error.
        max: usize,
    },
    /// Take a shared lock on a file; refused while another holder has an exclusive lock.
    LockShared {
        /// Its path or handle.
        path: PathBuf,
    },
    /// Open a file for reading and writing, or make one.
    OpenForWriting {
        /// Its path or handle.
        path: PathBuf,
        /// What must exist under the name.
        opening: Opening,
        /// Direct I/O or page cache.
        mode: Mode,
    },
    /// Rename a file; an existing file of the new name is replaced. Or rename a directory; an empty
    /// one of the new name is replaced.
    Rename {
        /// Its name.
        from: PathBuf,
        /// Its new name.
        to: PathBuf,
    },
    /// Give a file a second name. If the first one is a symbolic link, its target gets the name.
    Link {
        /// Its name.
        from: PathBuf,
        /// Its new name, which must not exist.
        to: PathBuf,
    },
    /// Make a directory.
    CreateDir {
        /// Its path or handle.
        path: PathBuf,
    },
    /// Remove an empty directory.
    RemoveDir {
        /// Its path or handle.
        path: PathBuf,
    },
    /// Remove a file's name.
    Remove {
        /// Its path or handle.
        path: PathBuf,
    },
    /// Make a directory's names durable.
    SyncDir {
        /// Its path or handle.
        path: PathBuf,
    },
    /// Cut a file to a length, or extend it with zeroes.
    SetLen {
        /// Its path or handle.
        file: Arc<SharedFile>,
        /// In bytes.
        len: u64,
    },
    /// Allocate disk space up to a length; a shorter file grows to it.
    Allocate {
        /// Its path or handle.
        file: Arc<SharedFile>,
        /// In bytes.
        len: u64,
        /// Do not change the file's length.
        keeps_len: bool,
    },
    /// Open a disk image.
    OpenImage {
        /// Its path or handle.
        path: PathBuf,
        /// Options.
        how: ImageOpening,
        /// The descriptor, if the image is open already.
        open: Option<Arc<OwnedFd>>,
        /// Whether holes can be punched, if known.
        holes: Option<bool>,
    },
    /// Start another program.
    StartProcess(Program),
    /// Compute something.
    Compute(Work),
    /// Read the length of an open file, and note it.
    Measure {
        /// Its path or handle.
        file: Arc<SharedFile>,
    },
    /// Find out which parts of a range of an open file are holes.
    Extents {
        /// Its path or handle.
        file: Arc<SharedFile>,
        /// The range, in bytes.
        range: Range<u64>,
        /// Most extents.
        max: usize,
    },
    /// Find out how much space an open file occupies, and how much its file system has left.
    Space {
        /// The file.
        file: Arc<SharedFile>,
    },
    /// Read who has claimed an open file last, or claim it.
    Owner {
        /// The file.
        file: Arc<SharedFile>,
        /// The new owner, if it is to be claimed.
        claim: Option<String>,
    },
    /// Lock an open file as a whole, or unlock it: as [`ImageOpening::lock`].
    LockImage {
        /// The file.
        file: Arc<SharedFile>,
        /// The lock; refused while another holder has one that it excludes.
        lock: ImageLock,
    },
    /// Take an exclusive lock on a file, which is made if it is missing; refused while another
    /// holder has any lock.
    LockExclusive {
        /// Its path or handle.
        path: PathBuf,
    },
}

/// A computation.
#[derive(Clone)]
pub struct Work(pub Arc<dyn Fn() -> Vec<u8> + Send + Sync>);

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").finish_non_exhaustive()
    }
}

/// The answer of a [`MetaOp`].
#[derive(Debug)]
pub enum MetaOut {
    /// Success of an operation without a result.
    Done,
    /// Of `Open` and `OpenForWriting`.
    File(Arc<SharedFile>),
    /// Of `OpenImage`.
    Image(Image),
    /// Of `StartProcess`.
    Process(Child),
    /// Of `List`.
    List(Vec<DirEntry>),
    /// Of `ReadSmall` and `Compute`, and of `Owner` that reads.
    Bytes(Vec<u8>),
    /// Of `Extents`.
    Extents(Vec<Extent>),
    /// Of `Space`; `None` for a block device.
    Space(Option<Space>),
    /// Of `LockShared` and `LockExclusive`: the descriptor holds the lock; `None` where no lock is
    /// needed.
    Lock(Option<Fd>),
}

/// The space of a regular file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// The space that it occupies; its holes occupy none.
    pub occupied: u64,
    /// The space that its file system has left, for this process.
    pub available: u64,
    /// The size of its file system.
    pub total: u64,
    /// The file system: the same number for all its files.
    pub file_system: u64,
}

/// A part of a file or of a device, of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, not 0.
    pub len: u64,
    /// It occupies no space, and reads as zeroes.
    pub is_hole: bool,
}

/// One entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// File name without the directory.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Whether it is a directory, or a link to one.
    pub is_dir: bool,
    /// Whether it is a symbolic link.
    pub is_link: bool,
}

/// How long [`Driver::enter`] may wait for a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Submit and reap, do not wait.
    No,
    /// Wait for a completion, a wake-up, or this time in nanoseconds.
    Ns(u64),
    /// Wait for a completion or a wake-up.
    Forever,
}

/// A completed operation.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The operation.
    pub token: Token,
    /// A system call's result: a count, a descriptor, or a negated error number.
    pub result: i32,
}

/// The interface of a driver; see the module text.
pub trait Driver {
    /// Short name for `INFO` and logs.
    fn name(&self) -> &'static str;

    /// The simulated driver, if this is one: its sockets are not descriptors of the host.
    fn sim(&mut self) -> Option<&mut sim::SimDriver> {
        None
    }

    /// Memory that is registered with the kernel, if there is some. Reads into it cost less.
    fn region(&self) -> Option<Rc<Region>> {
        None
    }

    /// Takes an operation for the next `enter`. Never called with more than `capacity()` unfinished
    /// operations.
    fn stage(&mut self, token: Token, op: IoOp);

    /// Starts an operation on names. The answer goes to `shared`'s inbox, or is kept and
    /// delivered there by a later `enter`.
    fn meta(&mut self, token: Token, op: MetaOp, shared: &Arc<CoreAddress>);

    /// Cancels an operation; its completion still comes. Never called for a write or a sync, which
    /// only the device ends.
    fn cancel(&mut self, token: Token);

    /// Submits the staged operations now, without reaping. A driver for which that makes no
    /// difference does nothing.
    fn submit(&mut self) {}

    /// Operations staged and not yet submitted.
    fn staged(&self) -> usize;

    /// Most unfinished operations on files. The number of descriptors bounds the operations that
    /// wait for a peer; completions beyond a driver's room are not lost.
    fn capacity(&self) -> usize;

    /// Submits all staged operations, waits according to `wait`, and appends the completions. A
    /// wait should gather `at_least` completions for [`GATHER_NS`] where that is cheap; afterwards,
    /// and in other drivers, one is enough.
    ///
    /// # Errors
    /// Only errors that make the driver unusable.
    fn enter(&mut self, wait: Wait, at_least: usize, done: &mut Vec<Completion>) -> io::Result<()>;

    /// Whether `enter(Wait::No)` would find a completion. Memory reads only.
    fn ready(&mut self) -> bool;

    /// Monotonic nanoseconds.
    fn now_ns(&mut self) -> u64;

    /// Milliseconds since 1970.
    fn unix_time_ms(&mut self) -> u64;
}

/// Longest wait for more than one completion in nanoseconds.
pub(crate) const GATHER_NS: u64 = 200_000;

/// The `RWF_*` flags of a write.
fn rw_flags(durable: bool) -> i32 {
    if durable { libc::RWF_DSYNC } else { 0 }
}

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
