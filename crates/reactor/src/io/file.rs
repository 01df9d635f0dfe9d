//! Open files: a [`SharedFile`] that any core may hold, and a [`File`], one core's handle on it.
//!
//! An operation holds the core's handle, so a descriptor stays open until the last operation on it
//! is done, and a read touches no count that two cores write.
//!
//! A file opened for writing (`write`) is read through the same handle. The fields that writers
//! change (the size, and whether a flush failed) have cache lines of their own, which a read
//! touches only when it came short.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::core::Core;
use crate::driver::{IoOp, MetaOp, SharedFile};
use crate::io::write::{SyncData, WriteAt};
use crate::memory::buf::Buf;
use crate::op::{Hold, OpId, Payload};

pub(crate) struct FileInner {
    shared: Arc<SharedFile>,
    core: Core,
    /// The place of its device in flow control.
    place: u8,
}

impl FileInner {
    pub fn place(&self) -> u8 {
        self.place
    }

    /// Whether its reads and writes go to the device, not to the page cache.
    pub fn is_direct(&self) -> bool {
        self.shared.alignment() > 1
    }

    pub fn shared(&self) -> &SharedFile {
        &self.shared
    }
}

/// One core's handle on an open file. Clones are local and cheap.
#[derive(Clone)]
pub struct File(Rc<FileInner>);

impl File {
    pub(crate) fn new(core: Core, shared: Arc<SharedFile>) -> File {
        let place = core.inner().flow.place(shared.device());
        File(Rc::new(FileInner { shared, core, place }))
    }

    /// Size in bytes: as found when opened, grown by writes through this file since , by any core.
    pub fn size(&self) -> u64 {
        self.0.shared.size()
    }

    /// Alignment in bytes of offsets and lengths of reads and writes.
    pub fn alignment(&self) -> usize {
        self.0.shared.alignment()
    }

    /// The path under which it was opened.
    pub fn path(&self) -> &Path {
        self.0.shared.path()
    }

    /// The core this handle belongs to.
    pub fn core(&self) -> &Core {
        &self.0.core
    }

    /// Reads `buf.len()` bytes at `offset` into `buf`, once. The read is started when the future is
    /// first polled or by [`ReadAt::start`]. A dropped future leaves it running, and the buffer
    /// returns to the pool when it is done.
    ///
    /// The count is short at the end of the file. Offset and length must be multiples of
    /// [`File::alignment`]. Errors are the device's or the kernel's.
    pub fn read_at(&self, offset: u64, buf: Buf) -> ReadAt {
        ReadAt { file: self.clone(), state: ReadState::New(buf, offset) }
    }

    /// Writes the first `len` bytes of `buf` at `offset`: all of them, or an error. They are not
    /// durable before [`File::sync_data`].
    ///
    /// The write is started when the future is first polled or by [`WriteAt::start`]. It is never
    /// cancelled: when the future is dropped, the device still completes what it was given, and the
    /// buffer returns to the pool afterwards. How much of the range then holds the new bytes is
    /// unknown, as after an error.
    ///
    /// # Errors
    /// `EINVAL` when offset or length is not a multiple of [`File::alignment`]; a poisoned file
    /// says so; `WriteZero` when the device takes nothing; others (`StorageFull`, …) as the device
    /// or the kernel gives them.
    ///
    /// # Panics
    /// When `buf` is shorter than `len`.
    pub fn write_at(&self, offset: u64, buf: Buf, len: usize) -> WriteAt {
        WriteAt::new(self.clone(), offset, buf, len, false)
    }

    /// Like [`File::write_at`], but its success means that these bytes are durable, with what is
    /// needed to read them. It says nothing of other writes and of the file's length. For an
    /// aligned overwrite of a direct file this is one request to the device instead of a write
    /// and a flush, where the device can do that.
    ///
    /// # Errors
    /// As [`File::write_at`]. One that the device or the kernel gives poisons the open file, as
    /// [`File::sync_data`] does.
    ///
    /// # Panics
    /// When `buf` is shorter than `len`.
    pub fn write_durably_at(&self, offset: u64, buf: Buf, len: usize) -> WriteAt {
        WriteAt::new(self.clone(), offset, buf, len, true)
    }

    /// Makes durable all bytes of writes that had completed when this was started, and the file's
    /// length. It does not cover the file's name ([`Core::sync_dir`]) or writes still in flight.
    ///
    /// # Errors
    /// As the device or the kernel gives them. The kernel may then have dropped the written data
    /// and forgotten the error, so another flush could succeed without meaning anything. So this
    /// open file is poisoned on all cores: every later write and flush fails. Opening and reading
    /// the file again shows what is durable.
    pub fn sync_data(&self) -> SyncData {
        SyncData::new(self.clone())
    }

    /// Cuts the file to `len` bytes, or extends it with zeroes. Durable after [`File::sync_data`].
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn set_len(&self, len: u64) -> io::Result<()> {
        let file = self.0.shared.clone();
        self.0.core.meta_done(MetaOp::SetLen { file, len }).await
    }

    /// Allocates disk space for the first `len` bytes of the file; a shorter file grows to `len`
    /// with zeroes. Where the file system cannot, only the length is set. Durable after
    /// [`File::sync_data`].
    ///
    /// # Errors
    /// `StorageFull` when there is no space; the file may then have a part of it. Others as the
    /// system gives them.
    pub async fn allocate(&self, len: u64) -> io::Result<()> {
        let file = self.0.shared.clone();
        self.0.core.meta_done(MetaOp::Allocate { file, len, keeps_len: false }).await
    }

    /// Allocates disk space for the first `len` bytes for later writes, without changing the
    /// length.
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

    pub(crate) fn inner(&self) -> &FileInner {
        &self.0
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

/// The future of [`File::read_at`]. Resolves to the count and the buffer.
pub struct ReadAt {
    file: File,
    state: ReadState,
}

impl ReadAt {
    /// Starts the read now, so that several can run before the first is awaited.
    pub fn start(&mut self) {
        if let ReadState::New(..) = self.state {
            let ReadState::New(mut buf, offset) =
                std::mem::replace(&mut self.state, ReadState::Done)
            else {
                return;
            };
            let op = IoOp::Read {
                fd: self.file.0.shared.fd().number(),
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

/// Converts a count or a negated error number.
pub(crate) fn io_result(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}
