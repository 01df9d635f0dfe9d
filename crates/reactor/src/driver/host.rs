//! What may block on the host: names, locks, small whole files. A few helper threads do it, so
//! that a core never waits (law 2); answers go to the asking core's inbox.

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use super::queue::Queue;
use super::{DirEntry, MetaOp, MetaOut};
use crate::file::{Fd, SharedFile};

type Job = Box<dyn FnOnce() + Send>;

/// A few threads that run blocking jobs. Shared by the cores of a runtime.
pub(crate) struct Helpers {
    queue: Arc<Queue<Job>>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Helpers {
    #[expect(clippy::disallowed_methods, reason = "the reactor is where threads are started")]
    pub fn start(threads: usize) -> io::Result<Helpers> {
        let mut helpers =
            Helpers { queue: Arc::new(Queue::new()), threads: Vec::with_capacity(threads) };
        for n in 0..threads {
            let queue = helpers.queue.clone();
            let thread = std::thread::Builder::new().name(format!("millrace-help{n}"));
            let thread = thread.spawn(move || {
                while let Some(job) = queue.pop() {
                    job();
                }
            })?;
            // If a later one fails, dropping `helpers` stops those that run.
            helpers.threads.push(thread);
        }
        Ok(helpers)
    }

    /// Queues a job. The queue is as long as the cores' operation tables allow.
    pub fn run(&self, job: Job) {
        self.queue.push(std::iter::once(job));
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.queue.stop();
        for thread in self.threads.drain(..) {
            // A job that panicked took only its own thread; its core panics on the lost answer.
            let _ = thread.join();
        }
    }
}

/// Does a name operation on the host, blocking.
pub(crate) fn perform(op: MetaOp) -> io::Result<MetaOut> {
    match op {
        MetaOp::Open { path, buffered } => open(&path, buffered).map(MetaOut::File),
        MetaOp::List { path } => list(&path).map(MetaOut::List),
        MetaOp::ReadSmall { path, max } => read_small(&path, max).map(MetaOut::Bytes),
        MetaOp::LockShared { path } => lock_shared(&path).map(|fd| MetaOut::Lock(fd.map(Fd::Host))),
    }
}

#[expect(clippy::disallowed_methods, reason = "this is the driver behind the reactor's files")]
fn open(path: &Path, buffered: bool) -> io::Result<Arc<SharedFile>> {
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
    let meta = file.metadata()?;
    if meta.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    let fd = OwnedFd::from(file);
    let alignment = if is_direct { direct_alignment(&fd) } else { 1 };
    Ok(Arc::new(SharedFile::new(Fd::Host(fd), path.to_owned(), meta.len(), alignment)))
}

/// What the file system asks of direct reads, in bytes; 4096 where it does not say.
fn direct_alignment(fd: &OwnedFd) -> u32 {
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
    let align = stat.stx_dio_offset_align;
    if done == 0 && stat.stx_mask & libc::STATX_DIOALIGN != 0 && align.is_power_of_two() {
        align.clamp(512, 1 << 20)
    } else {
        4096
    }
}

#[expect(clippy::disallowed_methods, reason = "this is the driver behind the reactor's files")]
fn list(path: &Path) -> io::Result<Vec<DirEntry>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        // A name that is not UTF-8 is none of an engine's files.
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let meta = match entry.metadata() {
            Ok(meta) => meta,
            // Deleted by its owner between the listing and now.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        entries.push(DirEntry { name, size: meta.len(), is_dir: meta.is_dir() });
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

#[expect(clippy::disallowed_methods, reason = "this is the driver behind the reactor's files")]
fn read_small(path: &Path, max: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(max as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > max {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("longer than {max} bytes")));
    }
    Ok(bytes)
}

/// A shared lock of the open file description, so that no other part of this process can lose
/// it by closing the file. It excludes the exclusive fcntl lock that RocksDB takes for writing.
/// A file that is not there needs no lock: nobody can hold it.
#[expect(clippy::disallowed_methods, reason = "this is the driver behind the reactor's files")]
fn lock_shared(path: &Path) -> io::Result<Option<OwnedFd>> {
    let file = match fs::File::open(path) {
        Ok(file) => OwnedFd::from(file),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_RDLCK as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    // SAFETY: `lock` is live and the command takes a pointer to it.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } != 0 {
        let error = io::Error::last_os_error();
        return Err(match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => io::ErrorKind::WouldBlock.into(),
            _ => error,
        });
    }
    Ok(Some(file))
}
