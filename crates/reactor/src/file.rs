//! Open files: a [`SharedFile`] that any core may hold, and a [`File`], one core's handle on it.
//!
//! An operation holds the core's handle, so a descriptor stays open until the last operation on
//! it is done, and no count that two cores write is touched on the way of a read.

use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::buf::Buf;
use crate::core::Core;
use crate::driver::IoOp;
use crate::mailbox::Mailbox;
use crate::op::{Hold, OpId, Payload};

/// A descriptor of the host, or a number of the simulator's.
#[derive(Debug)]
pub enum Fd {
    /// Closed when dropped.
    Host(OwnedFd),
    /// Known to one simulated world only.
    Sim(SimFd),
}

/// A descriptor of a simulated world, which learns of it when this is dropped.
#[derive(Debug)]
pub struct SimFd {
    number: i32,
    closing: Mailbox<i32>,
}

impl SimFd {
    pub(crate) fn new(number: i32, closing: Mailbox<i32>) -> SimFd {
        SimFd { number, closing }
    }
}

impl Drop for SimFd {
    fn drop(&mut self) {
        // A world that is gone needs no telling, and it has room for all its descriptors.
        let _ = self.closing.post(self.number);
    }
}

impl Fd {
    pub(crate) fn number(&self) -> i32 {
        match self {
            Fd::Host(fd) => fd.as_raw_fd(),
            Fd::Sim(fd) => fd.number,
        }
    }
}

/// An open file, shared between cores.
#[derive(Debug)]
pub struct SharedFile {
    fd: Fd,
    path: PathBuf,
    size: u64,
    alignment: u32,
}

impl SharedFile {
    /// `size` in bytes as found when opened; `alignment` in bytes of offsets and lengths, 1 when
    /// the file is read through the page cache.
    pub fn new(fd: Fd, path: PathBuf, size: u64, alignment: u32) -> SharedFile {
        debug_assert!(alignment.is_power_of_two());
        SharedFile { fd, path, size, alignment }
    }

    /// Size in bytes when it was opened.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What offsets and lengths of reads must be multiples of, in bytes.
    pub fn alignment(&self) -> usize {
        self.alignment as usize
    }
}

pub(crate) struct FileInner {
    shared: Arc<SharedFile>,
    core: Core,
}

/// One core's handle on an open file. Clones are local and cheap.
#[derive(Clone)]
pub struct File(Rc<FileInner>);

impl File {
    pub(crate) fn new(core: Core, shared: Arc<SharedFile>) -> File {
        File(Rc::new(FileInner { shared, core }))
    }

    /// Size in bytes when it was opened.
    pub fn size(&self) -> u64 {
        self.0.shared.size
    }

    /// What offsets and lengths of reads must be multiples of, in bytes.
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
            let hold = Hold::File { _file: self.file.0.clone() };
            let id = self.file.0.core.inner().start(op, Payload::Buf(buf), hold);
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
