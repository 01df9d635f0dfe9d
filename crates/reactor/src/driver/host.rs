//! The host's operations that may block: names, lengths, holes, locks, small whole files. A few
//! helper threads make them, so that a core never blocks (law 2); answers go to the asking core's
//! inbox.
//!
//! One more thread only removes and closes files: the later of the two frees a file's blocks, which
//! can take long (50 ms for 64 MiB, measured on a file system that discards them on the device),
//! and other operations must not queue after the removal of many files. For the same reason another
//! one only computes.
//!
//! Operations on images have threads of their own ([`Images`]). An image may be on a file system
//! that does not answer, and then its operation holds a thread for as long as that lasts: other
//! images, and the files of the node itself, must not wait for it.

use std::ffi::CStr;
use std::fs;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::queue::Queue;
use super::{
    DirEntry, Extent, Fd, HostFile, Image, ImageInfo, ImageLock, ImageOpening, MetaOp, MetaOut,
    Mode, Opening, SharedFile, Space,
};
use crate::memory::background;

type Job = Box<dyn FnOnce() + Send>;

/// Most threads for operations on images. Each that hangs holds one, and a disk has at most a few
/// operations at once; so it takes dozens of disks whose file systems do not answer until the
/// others wait. A thread that sleeps costs its kernel stack and the pages of its own that it
/// has touched.
const IMAGE_THREADS_MAX: usize = 64;

/// The helper threads, shared by the cores of a runtime.
pub(crate) struct Helpers {
    queue: Arc<Queue<Job>>,
    cleaner: Cleaner,
    work: Arc<Queue<Job>>,
    images: Arc<Images>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Helpers {
    #[expect(clippy::disallowed_methods, reason = "the reactor is where threads are started")]
    pub fn start(threads: usize) -> io::Result<Helpers> {
        let mut helpers = Helpers {
            queue: Arc::new(Queue::new()),
            cleaner: Cleaner(Arc::new(Queue::new())),
            work: Arc::new(Queue::new()),
            images: Arc::new(Images::new()),
            threads: Vec::with_capacity(threads + 2),
        };
        let names = (0..threads).map(|n| (format!("millrace-help{n}"), &helpers.queue));
        let others = [("millrace-clean", &helpers.cleaner.0), ("millrace-work", &helpers.work)];
        let all = names.chain(others.map(|(name, queue)| (name.to_owned(), queue)));
        for (name, queue) in all.map(|(name, queue)| (name, queue.clone())).collect::<Vec<_>>() {
            let thread = std::thread::Builder::new().name(name);
            // If a later one fails, dropping `helpers` stops the running ones.
            helpers.threads.push(thread.spawn(move || {
                while let Some(job) = queue.pop() {
                    job();
                }
            })?);
        }
        helpers.images.start_one()?;
        background::start_early();
        Ok(helpers)
    }

    /// Makes a name operation and sends the answer. The cores' operation tables bound the queues.
    pub fn run(&self, op: MetaOp, tell: impl FnOnce(io::Result<MetaOut>) + Send + 'static) {
        let queue = match &op {
            MetaOp::Remove { .. } => &self.cleaner.0,
            MetaOp::Compute(_) => &self.work,
            op if is_of_an_image(op) => &self.images.queue,
            _ => &self.queue,
        };
        let cleaner = self.cleaner.clone();
        let job: Job = Box::new(move || tell(perform(op, &cleaner)));
        queue.push(std::iter::once(job));
    }
}

/// Whether only images have the operation, or its file is one.
fn is_of_an_image(op: &MetaOp) -> bool {
    match op {
        MetaOp::OpenImage { .. }
        | MetaOp::LockImage { .. }
        | MetaOp::Owner { .. }
        | MetaOp::Measure { .. }
        | MetaOp::Extents { .. }
        | MetaOp::Space { .. } => true,
        MetaOp::SetLen { file, .. } | MetaOp::Allocate { file, .. } => file.is_image(),
        _ => false,
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.queue.stop();
        self.cleaner.0.stop();
        self.work.stop();
        self.images.queue.stop();
        for thread in self.threads.drain(..) {
            // A job that panicked ended only its own thread; its core panics on the lost answer.
            let _ = thread.join();
        }
    }
}

/// The threads for operations on images. There is always one that waits for the next operation, up
/// to [`IMAGE_THREADS_MAX`]: the thread that takes an operation while no other one is free first
/// starts another, rather than a core, whose processor the new thread would be pinned to. Threads
/// stay until the runtime ends; nobody waits for their end, because they may hang.
struct Images {
    queue: Queue<Job>,
    started: AtomicUsize,
    /// Those that have no operation.
    free: AtomicUsize,
}

impl Images {
    fn new() -> Images {
        Images { queue: Queue::new(), started: 0.into(), free: 0.into() }
    }

    /// Starts a thread, unless there are enough.
    ///
    /// # Errors
    /// When the system has none.
    #[expect(clippy::disallowed_methods, reason = "the reactor is where threads are started")]
    fn start_one(self: &Arc<Self>) -> io::Result<()> {
        let more = |n| (n < IMAGE_THREADS_MAX).then_some(n + 1);
        let Ok(nth) = self.started.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) else {
            return Ok(());
        };
        self.free.fetch_add(1, Ordering::Relaxed);
        let images = self.clone();
        let thread = std::thread::Builder::new().name(format!("millrace-img{nth}"));
        let started = thread.spawn(move || images.work()).map(drop);
        if started.is_err() {
            self.free.fetch_sub(1, Ordering::Relaxed);
            self.started.fetch_sub(1, Ordering::Relaxed);
        }
        started
    }

    /// The body of a thread.
    fn work(self: Arc<Self>) {
        while let Some(job) = self.queue.pop() {
            if self.free.fetch_sub(1, Ordering::Relaxed) == 1
                && let Err(error) = self.start_one()
            {
                tracing::warn!("no further thread for operations on images: {error}");
            }
            job();
            self.free.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Closes files on the cleaning thread. Clones are the same.
#[derive(Clone)]
pub(crate) struct Cleaner(Arc<Queue<Job>>);

impl Cleaner {
    pub fn close(&self, fd: OwnedFd) {
        let job: Job = Box::new(move || drop(fd));
        self.0.push(std::iter::once(job));
    }
}

impl std::fmt::Debug for Cleaner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cleaner").finish_non_exhaustive()
    }
}

/// Makes a name operation on the host, blocking.
fn perform(op: MetaOp, cleaner: &Cleaner) -> io::Result<MetaOut> {
    match op {
        MetaOp::Open { path, buffered } => open(&path, buffered, cleaner).map(MetaOut::File),
        MetaOp::List { path } => list(&path).map(MetaOut::List),
        MetaOp::ReadSmall { path, max } => read_small(&path, max).map(MetaOut::Bytes),
        MetaOp::LockShared { path } => lock_shared(&path).map(|fd| MetaOut::Lock(fd.map(Fd::Host))),
        MetaOp::OpenForWriting { path, opening, mode } => {
            open_for_writing(&path, opening, mode, cleaner).map(MetaOut::File)
        }
        MetaOp::Rename { from, to } => rename(&from, &to).map(|()| MetaOut::Done),
        MetaOp::Link { from, to } => link(&from, &to).map(|()| MetaOut::Done),
        MetaOp::CreateDir { path } => create_dir(&path).map(|()| MetaOut::Done),
        MetaOp::RemoveDir { path } => remove_dir(&path).map(|()| MetaOut::Done),
        MetaOp::Remove { path } => remove(&path).map(|()| MetaOut::Done),
        MetaOp::SyncDir { path } => sync_dir(&path).map(|()| MetaOut::Done),
        MetaOp::SetLen { file, len } => {
            set_len(host_fd(&file)?, len)?;
            file.set_size(len);
            Ok(MetaOut::Done)
        }
        MetaOp::Allocate { file, len, keeps_len } => {
            allocate(host_fd(&file)?, len, keeps_len)?;
            if !keeps_len {
                file.grow_size(len);
            }
            Ok(MetaOut::Done)
        }
        MetaOp::OpenImage { path, how, open, holes } => {
            let file = match open {
                Some(open) => open.try_clone()?.into(),
                None => open_device(&path, how)?,
            };
            image(&path, file, how, holes, cleaner).map(MetaOut::Image)
        }
        MetaOp::StartProcess(program) => program.start().map(MetaOut::Process),
        MetaOp::Compute(work) => Ok(MetaOut::Bytes((work.0)())),
        MetaOp::Measure { file } => {
            let len = measure(host_fd(&file)?)?;
            file.set_size(len);
            Ok(MetaOut::Done)
        }
        MetaOp::Extents { file, range, max } => {
            Ok(MetaOut::Extents(extents(host_fd(&file)?, range, max)))
        }
        MetaOp::LockImage { file, lock } => {
            let kind = match lock {
                ImageLock::Exclusive => libc::F_WRLCK,
                ImageLock::Shared => libc::F_RDLCK,
                ImageLock::None => libc::F_UNLCK,
            };
            lock_open(host_fd(&file)?, kind).map(|()| MetaOut::Done)
        }
        MetaOp::Owner { file, claim: None } => owner(host_fd(&file)?).map(MetaOut::Bytes),
        MetaOp::Owner { file, claim: Some(owner) } => {
            claim(host_fd(&file)?, &owner).map(|()| MetaOut::Done)
        }
        MetaOp::Space { file } => space(host_fd(&file)?).map(MetaOut::Space),
        MetaOp::LockExclusive { path } => {
            lock_exclusive(&path).map(|fd| MetaOut::Lock(Some(Fd::Host(fd))))
        }
    }
}

/// The mode of new files, before the process's mask: RocksDB's.
const FILE_MODE: u32 = 0o644;
/// The mode of new directories.
const DIR_MODE: u32 = 0o755;

/// Direct I/O is switched on after the open: an open that makes a file and asks for direct I/O
/// leaves the file there when it is refused.
#[expect(clippy::disallowed_methods, reason = "this is the driver of the reactor's files")]
fn open_for_writing(
    path: &Path,
    opening: Opening,
    mode: Mode,
    cleaner: &Cleaner,
) -> io::Result<Arc<SharedFile>> {
    let mut options = fs::OpenOptions::new();
    // A file that is emptied must not be another one that a link points to.
    let follow = match opening {
        Opening::NewOrEmptied | Opening::OnlyName | Opening::Unshared => libc::O_NOFOLLOW,
        Opening::New | Opening::Existing => 0,
    };
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | follow;
    options.read(true).write(true).mode(FILE_MODE).custom_flags(flags);
    match opening {
        Opening::New => options.create_new(true),
        Opening::NewOrEmptied => options.create(true).truncate(true),
        Opening::Existing | Opening::OnlyName | Opening::Unshared => &mut options,
    };
    let file = options.open(path)?;
    let meta = regular(&file)?;
    let fd = OwnedFd::from(file);
    let is_linked = match opening {
        Opening::Unshared => meta.nlink() != 1 || !is_open_once(&fd),
        Opening::OnlyName => meta.nlink() != 1,
        Opening::New | Opening::NewOrEmptied | Opening::Existing => false,
    };
    if is_linked {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let alignment = match mode {
        Mode::Direct if make_direct(&fd)? => direct_alignment(&fd),
        Mode::Direct | Mode::Buffered => 1,
    };
    let fd = Fd::File(HostFile::new(fd, cleaner));
    let file = SharedFile::new(fd, path.to_owned(), meta.len(), alignment);
    Ok(Arc::new(file.with_device(meta.dev())))
}

/// Metadata of an open file, which must be a regular one.
fn regular(file: &fs::File) -> io::Result<fs::Metadata> {
    let meta = file.metadata()?;
    if meta.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    if !meta.is_file() {
        let text = "not a regular file (a pipe, a socket or a device)";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(meta)
}

/// Opens a small file, without waiting for the other end of a pipe.
#[expect(clippy::disallowed_methods, reason = "this is the driver of the reactor's files")]
fn open_small(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK).open(path)?;
    regular(&file)?;
    Ok(file)
}

/// Sets the signal for a lease's end; the C library's headers define it, `libc` does not.
const F_SETSIG: libc::c_int = 10;

/// Whether nothing else has the file open: then the kernel grants a lease for writing. Descriptors
/// and mappings of other processes count, too. Also false where the file is another user's, or on a
/// file system without leases.
fn is_open_once(fd: &OwnedFd) -> bool {
    let fd = fd.as_raw_fd();
    // If the file is opened between the two calls, the kernel sends a signal: a harmless one, and
    // not the default, which ends the process. SAFETY: takes no pointers.
    if unsafe { libc::fcntl(fd, F_SETSIG, libc::SIGURG) } != 0 {
        return false;
    }
    // SAFETY: takes no pointers.
    let alone = unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) } == 0;
    // SAFETY: takes no pointers.
    alone && unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) } == 0
}

/// Returns false where the file system has no direct I/O.
fn make_direct(fd: &OwnedFd) -> io::Result<bool> {
    // SAFETY: takes no pointers.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: takes no pointers.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_DIRECT) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EINVAL) { Ok(false) } else { Err(error) }
}

#[expect(clippy::disallowed_methods, reason = "this is the driver of the reactor's files")]
fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)
}

fn create_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(DIR_MODE).create(path)
}

/// A link to a symbolic link would not work in another directory, so its target is linked.
fn link(from: &Path, to: &Path) -> io::Result<()> {
    fs::hard_link(fs::canonicalize(from)?, to)
}

fn remove_dir(path: &Path) -> io::Result<()> {
    fs::remove_dir(path)
}

#[expect(clippy::disallowed_methods, reason = "this is the driver of the reactor's files")]
fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path)
}

#[expect(clippy::disallowed_methods, reason = "this is the driver of the reactor's files")]
fn sync_dir(path: &Path) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.read(true).custom_flags(libc::O_CLOEXEC | libc::O_DIRECTORY);
    options.open(path)?.sync_all()
}

fn host_fd(file: &SharedFile) -> io::Result<i32> {
    match file.fd() {
        Fd::File(file) => Ok(file.number()),
        Fd::Host(_) | Fd::Sim(_) => Err(io::Error::from_raw_os_error(libc::EBADF)),
    }
}

fn file_len(len: u64) -> io::Result<libc::off64_t> {
    libc::off64_t::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

/// Repeats a call that a signal interrupts; the call returns 0 on success.
fn uninterrupted(mut call: impl FnMut() -> i32) -> io::Result<()> {
    loop {
        if call() == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn set_len(fd: i32, len: u64) -> io::Result<()> {
    let len = file_len(len)?;
    // SAFETY: takes no pointers.
    uninterrupted(|| unsafe { libc::ftruncate64(fd, len) })
}

/// If the file system cannot allocate, the file only gets its length.
fn allocate(fd: i32, len: u64, keeps_len: bool) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    let end = file_len(len)?;
    let how = if keeps_len { libc::FALLOC_FL_KEEP_SIZE } else { 0 };
    // SAFETY: takes no pointers.
    match uninterrupted(|| unsafe { libc::fallocate64(fd, how, 0, end) }) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => {
            if keeps_len {
                return Ok(());
            }
            if stat(fd)?.st_size < end { set_len(fd, len) } else { Ok(()) }
        }
        result => result,
    }
}

fn stat(fd: i32) -> io::Result<libc::stat64> {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut stat: libc::stat64 = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is live.
    uninterrupted(|| unsafe { libc::fstat64(fd, &raw mut stat) })?;
    Ok(stat)
}

/// The length of a file, or the size of a block device.
fn measure(fd: i32) -> io::Result<u64> {
    let stat = stat(fd)?;
    if stat.st_mode & libc::S_IFMT != libc::S_IFBLK {
        return Ok(stat.st_size as u64);
    }
    let mut size = 0_u64;
    // SAFETY: the request writes a 64-bit number to a live place.
    uninterrupted(|| unsafe { libc::ioctl(fd, BLKGETSIZE64, &raw mut size) })?;
    Ok(size)
}

/// The extended attribute that names the last owner of an image, and its longest value.
const OWNER: &CStr = c"user.millrace.owner";
const OWNER_MAX: usize = 256;

/// The last owner of an open file; empty if there was none.
fn owner(fd: i32) -> io::Result<Vec<u8>> {
    let mut value = vec![0_u8; OWNER_MAX];
    // SAFETY: the name is a C string, and the buffer is live and has this length.
    let len = unsafe { libc::fgetxattr(fd, OWNER.as_ptr(), value.as_mut_ptr().cast(), OWNER_MAX) };
    if len < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ENODATA) => Ok(Vec::new()),
            _ => Err(error),
        };
    }
    value.truncate(len as usize);
    Ok(value)
}

/// Makes somebody the last owner of an open file.
fn claim(fd: i32, owner: &str) -> io::Result<()> {
    let (value, len) = (owner.as_ptr().cast(), owner.len());
    // SAFETY: the name is a C string, and the value is live and has this length.
    uninterrupted(|| unsafe { libc::fsetxattr(fd, OWNER.as_ptr(), value, len, 0) })
}

/// Unit of `st_blocks`, whatever the block of the file system.
const STAT_BLOCK: u64 = 512;

/// The space of a regular file.
fn space(fd: i32) -> io::Result<Option<Space>> {
    let file = stat(fd)?;
    if file.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Ok(None);
    }
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut stat: libc::statfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is live.
    uninterrupted(|| unsafe { libc::fstatfs64(fd, &raw mut stat) })?;
    let fragment = if stat.f_frsize > 0 { stat.f_frsize } else { stat.f_bsize };
    let bytes = |count: u64| count.saturating_mul(u64::try_from(fragment).unwrap_or(0));
    Ok(Some(Space {
        occupied: u64::try_from(file.st_blocks).unwrap_or(0).saturating_mul(STAT_BLOCK),
        available: bytes(stat.f_bavail),
        total: bytes(stat.f_blocks),
        file_system: file.st_dev,
    }))
}

/// The holes of a range, in at most `max` extents. What the file system does not tell is data.
fn extents(fd: i32, range: Range<u64>, max: usize) -> Vec<Extent> {
    let seek = |at: u64, whence| {
        let at = libc::off_t::try_from(at).unwrap_or(libc::off_t::MAX);
        // The position of the open file, which this changes, is never used. SAFETY: takes no
        // pointers.
        u64::try_from(unsafe { libc::lseek(fd, at, whence) })
            .map_err(|_| io::Error::last_os_error().raw_os_error())
    };
    let (mut found, mut at) = (Vec::new(), range.start);
    let mut add = |at: &mut u64, end: u64, is_hole| {
        found.push(Extent { len: end - *at, is_hole });
        *at = end;
        found.len() < max
    };
    while at < range.end {
        let data = match seek(at, libc::SEEK_DATA) {
            Ok(data) => data.clamp(at, range.end),
            // There is no data before the end of the file.
            Err(Some(libc::ENXIO)) => seek(0, libc::SEEK_END).unwrap_or(0).clamp(at, range.end),
            Err(_) => at,
        };
        if data > at {
            if !add(&mut at, data, true) {
                break;
            }
            continue;
        }
        // The file may be changed meanwhile: a hole here must not end the walk.
        let hole = seek(at, libc::SEEK_HOLE).ok().filter(|hole| *hole > at);
        if !add(&mut at, hole.unwrap_or(range.end).min(range.end), false) {
            break;
        }
    }
    found
}

/// `BLKGETSIZE64`, `BLKSSZGET`, `BLKPBSZGET` and `BLKIOOPT` of linux/fs.h.
const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
const BLKSSZGET: libc::c_ulong = 0x1268;
const BLKPBSZGET: libc::c_ulong = 0x127B;
const BLKIOOPT: libc::c_ulong = 0x1279;

/// Asks a block device for a number.
fn block_number(fd: i32, request: libc::c_ulong) -> io::Result<u32> {
    let mut number = 0_u32;
    // SAFETY: these requests write a 32-bit number to a live place.
    uninterrupted(|| unsafe { libc::ioctl(fd, request, &raw mut number) })?;
    Ok(number)
}

/// Opens a regular file or a block device; other kinds are refused.
#[expect(clippy::disallowed_methods, reason = "this is the driver of the reactor's files")]
fn open_device(path: &Path, how: ImageOpening) -> io::Result<fs::File> {
    let kind = fs::metadata(path)?.file_type();
    let block_device = is_block_device(kind)?;
    let mut options = fs::OpenOptions::new();
    options.read(true).write(!how.read_only);
    // For a block device this excludes mounts and other exclusive users.
    let exclusive = block_device && how.lock && !how.read_only;
    options.custom_flags(libc::O_CLOEXEC | if exclusive { libc::O_EXCL } else { 0 });
    let file = options.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => io::ErrorKind::WouldBlock.into(),
        _ => error,
    })?;
    // The name may belong to another file now.
    if file.metadata()?.file_type() != kind {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the file was replaced while it was opened",
        ));
    }
    Ok(file)
}

/// Whether it is a block device, rather than a regular file; other kinds are an error.
fn is_block_device(kind: fs::FileType) -> io::Result<bool> {
    if kind.is_block_device() || kind.is_file() {
        return Ok(kind.is_block_device());
    }
    let what = if kind.is_dir() { "a directory" } else { "no regular file or block device" };
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

/// Takes the lock, sets direct I/O and finds the image's properties, in this order: nothing is
/// tried on a file that another user has locked. A file from another process has its lock already.
fn image(
    path: &Path,
    file: fs::File,
    how: ImageOpening,
    holes: Option<bool>,
    cleaner: &Cleaner,
) -> io::Result<Image> {
    let meta = file.metadata()?;
    let block_device = is_block_device(meta.file_type())?;
    let file = OwnedFd::from(file);
    if how.lock {
        lock(&file, if how.read_only { libc::F_RDLCK } else { libc::F_WRLCK })?;
    }
    let (alignment, memory_alignment) = match how.mode {
        Mode::Direct if make_direct(&file)? => direct_alignments(&file),
        Mode::Direct | Mode::Buffered => (1, 1),
    };
    let (fd, size) = (file.as_raw_fd(), measure(file.as_raw_fd())?);
    let info = if block_device {
        let queue = |name: &str| sysfs_number(meta.rdev(), name).unwrap_or(0);
        ImageInfo {
            block_device,
            block_size: block_number(fd, BLKSSZGET)?,
            physical_block_size: block_number(fd, BLKPBSZGET)?,
            optimal_io: block_number(fd, BLKIOOPT)?,
            punch_hole: holes.unwrap_or_else(|| {
                queue("discard_max_bytes") > 0 && queue("write_zeroes_max_bytes") > 0
            }),
            zero_range: true,
        }
    } else {
        // Beyond the end of the file both have no effect, if the file system supports them.
        let behind = size.next_multiple_of(1 << 20) as libc::off64_t;
        let has = |mode: i32| {
            let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: takes no pointers.
            !how.read_only && unsafe { libc::fallocate64(fd, mode, behind, 4096) } == 0
        };
        let punch_hole = has(libc::FALLOC_FL_PUNCH_HOLE);
        // Zeroing may allocate space there, which punching frees again.
        let zero_range = punch_hole && has(libc::FALLOC_FL_ZERO_RANGE);
        has(libc::FALLOC_FL_PUNCH_HOLE);
        let block_size = alignment.max(512);
        let physical_block_size = (meta.blksize() as u32).clamp(block_size, 1 << 16);
        ImageInfo {
            block_device,
            block_size,
            physical_block_size,
            optimal_io: 0,
            punch_hole,
            zero_range,
        }
    };
    let fd = Fd::File(HostFile::new(file, cleaner));
    let file = SharedFile::new(fd, path.to_owned(), size, alignment)
        .with_memory_alignment(memory_alignment)
        .with_device(if block_device { meta.rdev() } else { meta.dev() })
        .of_image();
    Ok(Image { file: Arc::new(file), info, _lock: None })
}

/// Reads a setting of a block device's queue from sysfs; a partition's is that of its whole device.
fn sysfs_number(device: u64, name: &str) -> Option<u64> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    let base = format!("/sys/dev/block/{major}:{minor}");
    [format!("{base}/queue/{name}"), format!("{base}/../queue/{name}")]
        .iter()
        .find_map(|path| read_small(Path::new(path), 64).ok())
        .and_then(|text| String::from_utf8(text).ok()?.trim().parse().ok())
}

#[expect(clippy::disallowed_methods, reason = "this is the driver of the reactor's files")]
fn open(path: &Path, buffered: bool, cleaner: &Cleaner) -> io::Result<Arc<SharedFile>> {
    let mut options = fs::OpenOptions::new();
    options.read(true).custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK);
    let direct = if buffered {
        None
    } else {
        let mut options = options.clone();
        options.custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_DIRECT);
        match options.open(path) {
            Ok(file) => Some(file),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => None,
            Err(e) => return Err(e),
        }
    };
    let is_direct = direct.is_some();
    let file = match direct {
        Some(file) => file,
        None => options.open(path)?,
    };
    let meta = regular(&file)?;
    let fd = OwnedFd::from(file);
    let alignment = if is_direct { direct_alignment(&fd) } else { 1 };
    let fd = Fd::File(HostFile::new(fd, cleaner));
    let file = SharedFile::new(fd, path.to_owned(), meta.len(), alignment);
    Ok(Arc::new(file.with_device(meta.dev())))
}

/// The alignment of direct reads in bytes; 4096 where the file system does not tell.
fn direct_alignment(fd: &OwnedFd) -> u32 {
    direct_alignments(fd).0
}

/// The same, and the alignment of memory.
fn direct_alignments(fd: &OwnedFd) -> (u32, u32) {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an empty path with AT_EMPTY_PATH names the descriptor itself; `stat` is live.
    let done = unsafe {
        libc::statx(
            fd.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut stat,
        )
    };
    let (align, memory) = (stat.stx_dio_offset_align, stat.stx_dio_mem_align);
    if done == 0 && stat.stx_mask & libc::STATX_DIOALIGN != 0 && align.is_power_of_two() {
        let memory = if memory.is_power_of_two() { memory.min(1 << 20) } else { 512 };
        (align.clamp(512, 1 << 20), memory)
    } else {
        (4096, 512)
    }
}

#[expect(clippy::disallowed_methods, reason = "this is the driver of the reactor's files")]
fn list(path: &Path) -> io::Result<Vec<DirEntry>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        // A name that is not UTF-8 does not belong to an engine, but the directory is not empty.
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_link = entry.file_type()?.is_symlink();
        // The target of a link; a dangling link is skipped.
        let meta = match fs::metadata(entry.path()).or_else(|_| entry.metadata()) {
            Ok(meta) if meta.is_symlink() => {
                entries.push(DirEntry { name, size: 0, is_dir: false, is_link });
                continue;
            }
            Ok(meta) => meta,
            // Deleted by its owner between the listing and now.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        entries.push(DirEntry { name, size: meta.len(), is_dir: meta.is_dir(), is_link });
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

fn read_small(path: &Path, max: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_small(path)?.take(max as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > max {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("longer than {max} bytes")));
    }
    Ok(bytes)
}

/// Takes a shared lock. A missing file needs none: no process can hold a lock on it.
fn lock_shared(path: &Path) -> io::Result<Option<OwnedFd>> {
    match open_small(path) {
        Ok(file) => {
            let fd = OwnedFd::from(file);
            lock(&fd, libc::F_RDLCK).map(|()| Some(fd))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Takes an exclusive lock on a file, which is made if it is missing.
#[expect(clippy::disallowed_methods, reason = "this is the driver of the reactor's files")]
fn lock_exclusive(path: &Path) -> io::Result<OwnedFd> {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(FILE_MODE);
    let file = options.custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK).open(path)?;
    regular(&file)?;
    let fd = OwnedFd::from(file);
    lock(&fd, libc::F_WRLCK).map(|()| fd)
}

/// Releases a lock of [`lock`], also if another process has the open file.
pub(crate) fn unlock(file: &OwnedFd) {
    // On an error the caller closes the file, which has the same effect.
    let _ = lock(file, libc::F_UNLCK);
}

/// Locks a file as a whole, or says `WouldBlock`.
///
/// The lock belongs to the open file description; RocksDB's belongs to the process (`F_SETLK`, with
/// a table of the process's own locks). The two exclude each other, also within one process.
/// Advantages of ours: the kernel refuses a second open in this process, however the path is
/// spelled; and closing another descriptor of the file, which silently ends a process's locks on
/// it, does not end our lock.
fn lock(file: &OwnedFd, kind: i32) -> io::Result<()> {
    lock_open(file.as_raw_fd(), kind)
}

/// The same, by number.
fn lock_open(fd: i32, kind: i32) -> io::Result<()> {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    // SAFETY: `lock` is live and the command takes a pointer to it.
    if unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock) } != 0 {
        let error = io::Error::last_os_error();
        return Err(match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => io::ErrorKind::WouldBlock.into(),
            _ => error,
        });
    }
    Ok(())
}
