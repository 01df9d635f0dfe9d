//! Open files: a [`SharedFile`] that any core may hold, and a [`File`], one core's handle on it.
//!
//! An operation holds the core's handle, so a descriptor stays open until the last operation on
//! it is done, and no count that two cores write is touched on the way of a read.
//!
//! A file opened for writing (`write`) is read through the same handle. What its writers change
//! of the shared part (the size, and whether a flush failed) lies on cache lines of its own, and
//! a read looks there only when it came short.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use crate::buf::{BUF_ALIGN, Buf};
use crate::core::Core;
use crate::driver::host::Cleaner;
use crate::driver::{IoOp, MetaOp};
use crate::inbox::Sender;
use crate::op::{Hold, OpId, Payload};
use crate::write::{SyncData, WriteAt};
use loomable::CachePadded;

/// A descriptor of the host, or a number of the simulator's.
#[derive(Debug)]
pub enum Fd {
    /// Closed when dropped.
    Host(OwnedFd),
    /// A regular file of the host, closed by another thread when dropped.
    File(HostFile),
    /// Known to one simulated world only.
    Sim(SimFd),
}

/// A regular file's descriptor. Closing the last one of a removed file gives its blocks back, which
/// may take long: another thread does it.
#[derive(Debug)]
pub struct HostFile {
    /// `None` only while this is dropped.
    fd: Option<OwnedFd>,
    cleaner: Cleaner,
}

impl HostFile {
    pub(crate) fn new(fd: OwnedFd, cleaner: &Cleaner) -> HostFile {
        HostFile { fd: Some(fd), cleaner: cleaner.clone() }
    }

    pub(crate) fn number(&self) -> i32 {
        self.fd.as_ref().map_or(-1, OwnedFd::as_raw_fd)
    }
}

impl Drop for HostFile {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.cleaner.close(fd);
        }
    }
}

/// A descriptor of a simulated world, which learns of it when this is dropped.
#[derive(Debug)]
pub struct SimFd {
    number: i32,
    closing: Sender<i32>,
    host: Option<OwnedFd>,
}

impl SimFd {
    pub(crate) fn new(number: i32, closing: Sender<i32>) -> SimFd {
        SimFd { number, closing, host: None }
    }

    /// One with a descriptor of the host that belongs to it.
    pub(crate) fn with_host(mut self, fd: OwnedFd) -> SimFd {
        self.host = Some(fd);
        self
    }

    /// The descriptor of the host that belongs to it.
    pub(crate) fn host(&self) -> Option<BorrowedFd<'_>> {
        self.host.as_ref().map(OwnedFd::as_fd)
    }
}

impl Drop for SimFd {
    fn drop(&mut self) {
        // A world that is gone needs no telling, and it has room for all its descriptors.
        let _ = self.closing.send(self.number);
    }
}

impl Fd {
    pub(crate) fn number(&self) -> i32 {
        match self {
            Fd::Host(fd) => fd.as_raw_fd(),
            Fd::File(file) => file.number(),
            Fd::Sim(fd) => fd.number,
        }
    }
}

/// What must, or must not, be under the name of a file that is opened for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Nothing: the file is made, or `AlreadyExists`.
    New,
    /// Anything: a file that is there loses what it holds.
    NewOrEmptied,
    /// A file, or `NotFound`. It keeps what it holds.
    Existing,
    /// A file, or `NotFound`, that has no other name and that nobody else has open, in this process
    /// or another; `WouldBlock` where it has, or where the system does not tell. It keeps what it
    /// holds, and whoever gives it to nobody may write over it.
    Unshared,
}

/// How a file is written, and read through the same handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Past the page cache, where the file system can: offsets and lengths are multiples of
    /// [`SharedFile::alignment`].
    Direct,
    /// Through the page cache.
    Buffered,
}

/// An open file, shared between cores.
#[derive(Debug)]
pub struct SharedFile {
    fd: Fd,
    path: PathBuf,
    alignment: u32,
    memory_alignment: u32,
    written: CachePadded<Written>,
}

/// What writing changes.
#[derive(Debug)]
struct Written {
    size: AtomicU64,
    flush_failed: AtomicBool,
}

impl SharedFile {
    /// `size` in bytes as found when opened; `alignment` in bytes of offsets and lengths, 1 when
    /// the file is read and written through the page cache.
    pub fn new(fd: Fd, path: PathBuf, size: u64, alignment: u32) -> SharedFile {
        debug_assert!(alignment.is_power_of_two());
        let written = Written { size: size.into(), flush_failed: false.into() };
        let memory_alignment = if alignment == 1 { 1 } else { BUF_ALIGN as u32 };
        SharedFile { fd, path, alignment, memory_alignment, written: CachePadded(written) }
    }

    /// For a file whose direct I/O asks less, or more, of the memory than a [`Buf`] gives.
    pub(crate) fn with_memory_alignment(self, memory_alignment: u32) -> SharedFile {
        debug_assert!(memory_alignment.is_power_of_two());
        SharedFile { memory_alignment, ..self }
    }

    /// Size in bytes when it was opened, and with what has been written through it since.
    pub fn size(&self) -> u64 {
        self.written.size.load(Ordering::Relaxed)
    }

    /// The host's descriptor, for a kernel interface that the reactor has no operation for; `None`
    /// in a simulated world.
    pub fn host_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.fd {
            Fd::Host(fd) => Some(fd.as_fd()),
            Fd::File(file) => file.fd.as_ref().map(OwnedFd::as_fd),
            Fd::Sim(_) => None,
        }
    }

    /// What another process can be handed that is to have this open file, with its lock. In a
    /// simulated world it stands for that, and only of an image.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.fd {
            Fd::Sim(fd) => fd.host(),
            Fd::Host(_) | Fd::File(_) => self.host_fd(),
        }
    }

    pub(crate) fn fd(&self) -> &Fd {
        &self.fd
    }

    /// The file is at least so long now.
    pub(crate) fn grow_size(&self, size: u64) {
        if self.size() < size {
            self.written.size.fetch_max(size, Ordering::Relaxed);
        }
    }

    /// The file is so long now.
    pub(crate) fn set_size(&self, size: u64) {
        self.written.size.store(size, Ordering::Relaxed);
    }

    /// Whether a flush of it has failed, so that it takes no more writes.
    pub fn flush_failed(&self) -> bool {
        self.written.flush_failed.load(Ordering::Relaxed)
    }

    /// A flush of it has failed, here or in the process that had it open before: it takes no more
    /// writes.
    pub fn set_flush_failed(&self) {
        self.written.flush_failed.store(true, Ordering::Relaxed);
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What offsets and lengths of reads and writes must be multiples of, in bytes.
    pub fn alignment(&self) -> usize {
        self.alignment as usize
    }

    /// What the places of a [`FileQueue`](crate::FileQueue)'s segments in memory must be multiples
    /// of, in bytes. Their lengths are multiples of [`SharedFile::alignment`].
    pub fn memory_alignment(&self) -> usize {
        self.memory_alignment as usize
    }
}

pub(crate) struct FileInner {
    shared: Arc<SharedFile>,
    core: Core,
}

impl FileInner {
    pub fn shared(&self) -> &SharedFile {
        &self.shared
    }
}

/// One core's handle on an open file. Clones are local and cheap.
#[derive(Clone)]
pub struct File(Rc<FileInner>);

impl File {
    pub(crate) fn new(core: Core, shared: Arc<SharedFile>) -> File {
        File(Rc::new(FileInner { shared, core }))
    }

    /// Size in bytes when it was opened, and with what has been written through it since, by any
    /// core.
    pub fn size(&self) -> u64 {
        self.0.shared.size()
    }

    /// What offsets and lengths of reads and writes must be multiples of, in bytes.
    pub fn alignment(&self) -> usize {
        self.0.shared.alignment()
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.0.shared.path
    }

    /// The core this handle belongs to.
    pub fn core(&self) -> &Core {
        &self.0.core
    }

    /// Reads `buf.len()` bytes at `offset` into `buf`, once; suspends until the device answers.
    /// The read is started when the future is first polled or by [`ReadAt::start`]; a dropped
    /// future leaves it running, and the buffer returns to the pool when it is done.
    ///
    /// The count is short at the end of the file. Offset and length must be multiples of
    /// [`File::alignment`]. Errors are the device's or the kernel's.
    pub fn read_at(&self, offset: u64, buf: Buf) -> ReadAt {
        ReadAt { file: self.clone(), state: ReadState::New(buf, offset) }
    }

    /// Writes the first `len` bytes of `buf` at `offset`: all of them, or an error. Suspends
    /// until the device has them, which is not yet durable: see [`File::sync_data`].
    ///
    /// The write is started when the future is first polled or by [`WriteAt::start`]. It is not
    /// cancelled: what the device has been given when the future is dropped, it writes, and the
    /// buffer returns to the pool when that is done; how much of the range then holds the new
    /// bytes is not known. The same holds after an error.
    ///
    /// # Errors
    /// `EINVAL` when offset or length is no multiple of [`File::alignment`]; an error that says so
    /// after a failed flush; `WriteZero` when the device takes nothing; others (`StorageFull`, …)
    /// as the device or the kernel gives them.
    ///
    /// # Panics
    /// When `buf` is shorter than `len`.
    pub fn write_at(&self, offset: u64, buf: Buf, len: usize) -> WriteAt {
        WriteAt::new(self.clone(), offset, buf, len)
    }

    /// Makes durable what was written before: all bytes of writes that had completed when this
    /// was started, and the file's length. Suspends until the device says so. Says nothing of the
    /// file's name ([`Core::sync_dir`]), nor of writes that were still under way.
    ///
    /// # Errors
    /// As the device or the kernel gives them. Then the kernel may have dropped what was written
    /// and forget the error, so that another flush would succeed and mean nothing: this open file
    /// is poisoned, on all cores, and every later write and flush says so. What is durable shows
    /// when it is opened again and read.
    pub fn sync_data(&self) -> SyncData {
        SyncData::new(self.clone())
    }

    /// Cuts the file to `len` bytes, or fills it up to that with zeroes; suspends. Durable after
    /// [`File::sync_data`].
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn set_len(&self, len: u64) -> io::Result<()> {
        let file = self.0.shared.clone();
        self.0.core.meta_done(MetaOp::SetLen { file, len }).await
    }

    /// Gives the first `len` bytes of the file room on the disk; a shorter file grows to `len`
    /// with zeroes. Where the file system cannot, only the length is set. Suspends. Durable after
    /// [`File::sync_data`].
    ///
    /// # Errors
    /// `StorageFull` when there is no room, and then the file may have some of it; others as the
    /// system gives them.
    pub async fn allocate(&self, len: u64) -> io::Result<()> {
        let file = self.0.shared.clone();
        self.0.core.meta_done(MetaOp::Allocate { file, len, keeps_len: false }).await
    }

    /// The same for a file that keeps its length: what is written there later finds its room.
    ///
    /// # Errors
    /// As for [`File::allocate`].
    pub async fn reserve(&self, len: u64) -> io::Result<()> {
        let file = self.0.shared.clone();
        self.0.core.meta_done(MetaOp::Allocate { file, len, keeps_len: true }).await
    }

    pub(crate) fn shared(&self) -> &SharedFile {
        &self.0.shared
    }

    /// Starts an operation on this file, which keeps it open.
    pub(crate) fn start(&self, op: IoOp, payload: Payload) -> OpId {
        let hold = Hold::File { file: self.0.clone() };
        self.0.core.inner().start(op, payload, hold)
    }
}

enum ReadState {
    New(Buf, u64),
    Running(OpId),
    Done,
}

/// A read under way; see [`File::read_at`]. Resolves to the count and the buffer.
pub struct ReadAt {
    file: File,
    state: ReadState,
}

impl ReadAt {
    /// Starts the read now, so that several can run at once before the first is awaited.
    pub fn start(&mut self) {
        if let ReadState::New(..) = self.state {
            let ReadState::New(mut buf, offset) =
                std::mem::replace(&mut self.state, ReadState::Done)
            else {
                return;
            };
            let op = IoOp::Read {
                fd: self.file.0.shared.fd.number(),
                ptr: buf.as_mut_ptr(),
                len: buf.len() as u32,
                offset,
            };
            let id = self.file.start(op, Payload::Buf(buf));
            self.state = ReadState::Running(id);
        }
    }
}

impl Future for ReadAt {
    type Output = (io::Result<usize>, Buf);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.start();
        let ReadState::Running(id) = self.state else { panic!("a finished read polled again") };
        match self.file.0.core.inner().poll_op(id, cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready((result, payload)) => {
                self.state = ReadState::Done;
                let Payload::Buf(buf) = payload else { unreachable!("a read owns a buffer") };
                Poll::Ready((io_result(result), buf))
            }
        }
    }
}

impl Drop for ReadAt {
    fn drop(&mut self) {
        if let ReadState::Running(id) = self.state {
            self.file.0.core.inner().drop_op(id, false);
        }
    }
}

/// A count, or the error whose negated number it is.
pub(crate) fn io_result(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}
