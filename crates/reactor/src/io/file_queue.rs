//! Operations on a file without futures: a [`FileQueue`] reads and writes foreign memory (a
//! guest's), and hands out completions by tag. It is made for a block device's channel, which a
//! poller polls in every turn.
//!
//! 1. [`FileQueue::submit`] copies the list of segments into a slot and stages the operation. Slots
//!    are made once; the steady state allocates nothing.
//! 2. The slot keeps the list, the file and the owner of the memory until the completion has been
//!    reaped, also when the queue is dropped meanwhile, and while the core stops.
//! 3. After a partial transfer the rest is requested: a read or a write ends with all of its bytes
//!    or with an error.
//! 4. The completion appends tag and outcome to the queue, and the core runs every poller in its
//!    next turn, whatever their back-off.
//!
//! As with futures, a write is never cancelled, and a failed flush poisons the file for all cores.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use crate::driver::IoOp;
use crate::io::file::{File, FileInner};
use crate::op::{Hold, Payload};

/// Most segments of one operation (the kernel's limit).
pub const SEGMENTS_MAX: usize = 1024;

/// Segments for which a new slot has room.
const SEGMENTS: usize = 4;

/// An operation on a file. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileIo {
    /// Reads into the segments.
    Read {
        /// Offset in the file.
        offset: u64,
    },
    /// Writes the segments.
    Write {
        /// Offset in the file.
        offset: u64,
    },
    /// Makes durable the writes that had completed when this was submitted.
    SyncData,
    /// Frees the range's disk space; it then reads as zeroes. Beyond the end of the file it has no
    /// effect.
    PunchHole {
        /// Offset in the file.
        offset: u64,
        /// Length.
        len: u64,
    },
    /// Makes the range read as zeroes and keeps its disk space. The file does not grow.
    ZeroRange {
        /// Offset in the file.
        offset: u64,
        /// Length.
        len: u64,
    },
}

/// A completed operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileDone {
    /// As it was submitted.
    pub tag: u64,
    /// As it was submitted, for the submitter's own use.
    pub context: u32,
    /// 0, or the number of the error.
    pub errno: i32,
}

/// The queue is at its depth; nothing was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull;

/// One core's queue of operations on one file; see the module text.
pub struct FileQueue {
    inner: Rc<QueueInner>,
    keep: Option<Rc<dyn Any>>,
}

/// The part of the queue that operations in flight keep alive.
pub(crate) struct QueueInner {
    file: File,
    on_threads: bool,
    slots: RefCell<Vec<Slot>>,
    free: RefCell<Vec<u32>>,
    done: RefCell<Vec<FileDone>>,
    /// Length of `done`, for a cheap check.
    ready: Cell<usize>,
    dropped: Cell<bool>,
}

struct Slot {
    tag: u64,
    context: u32,
    io: FileIo,
    /// The rest of a read or a write: its segments from `first` on, the first of them cut.
    segments: Vec<libc::iovec>,
    first: usize,
    left: u64,
    keep: Option<Rc<dyn Any>>,
}

impl File {
    /// A queue of at most `depth` operations in flight on this file. With `on_threads`, threads
    /// make reads and writes with the plain blocking calls, whatever the driver.
    pub fn queue(&self, depth: usize, on_threads: bool) -> FileQueue {
        let slot = |_| Slot {
            tag: 0,
            context: 0,
            io: FileIo::SyncData,
            segments: Vec::with_capacity(SEGMENTS),
            first: 0,
            left: 0,
            keep: None,
        };
        let inner = QueueInner {
            file: self.clone(),
            on_threads,
            slots: RefCell::new((0..depth).map(slot).collect()),
            free: RefCell::new((0..depth as u32).rev().collect()),
            done: RefCell::new(Vec::with_capacity(depth)),
            ready: Cell::new(0),
            dropped: Cell::new(false),
        };
        FileQueue { inner: Rc::new(inner), keep: None }
    }
}

impl FileQueue {
    /// Sets the owner of the memory that the segments point into. Each operation submitted from now
    /// on holds it until it has completed.
    pub fn hold(&mut self, keep: Option<Rc<dyn Any>>) {
        self.keep = keep;
    }

    /// Submits an operation. `segments` are used by reads and writes only. Its completion has `tag`
    /// and `context`, also when it is refused: offsets and lengths that are not multiples of
    /// [`File::alignment`], memory that is not aligned for direct I/O, and more than
    /// [`SEGMENTS_MAX`] segments give `EINVAL`; a write or a sync of a poisoned file gives `EIO`; a
    /// read beyond the end of the file gives `EIO`.
    ///
    /// # Errors
    /// When the queue is at its depth.
    ///
    /// # Safety
    /// Each segment of a read is valid for writes, each of a write for reads, until the tag has
    /// been taken, or, after the queue was dropped, as long as the owner given to
    /// [`FileQueue::hold`] lives. The memory may change at any time; there must be no Rust
    /// reference to it.
    pub unsafe fn submit(
        &mut self,
        io: FileIo,
        segments: &[libc::iovec],
        tag: u64,
        context: u32,
    ) -> Result<(), QueueFull> {
        let inner = &self.inner;
        let at = inner.free.borrow_mut().pop().ok_or(QueueFull)?;
        let refused = {
            let mut slots = inner.slots.borrow_mut();
            let slot = &mut slots[at as usize];
            (slot.tag, slot.context, slot.io) = (tag, context, io);
            slot.segments.clear();
            (slot.first, slot.left) = (0, 0);
            if let FileIo::Read { .. } | FileIo::Write { .. } = io {
                slot.left = segments.iter().map(|segment| segment.iov_len as u64).sum();
                if segments.len() <= SEGMENTS_MAX {
                    slot.segments.extend_from_slice(segments);
                }
            }
            let refused = inner.refusal(slot, segments.len());
            if refused.is_none() {
                slot.keep.clone_from(&self.keep);
            }
            refused
        };
        match refused {
            Some(errno) => inner.complete(at, errno),
            None => QueueInner::start(inner, at),
        }
        Ok(())
    }

    /// Number of completions to take. One load.
    #[inline]
    pub fn ready(&self) -> usize {
        self.inner.ready.get()
    }

    /// Hands each pending completion to `each`.
    pub fn take(&mut self, mut each: impl FnMut(FileDone)) {
        if self.inner.ready.get() == 0 {
            return;
        }
        self.inner.ready.set(0);
        for done in self.inner.done.borrow_mut().drain(..) {
            each(done);
        }
    }

    /// The file it works on.
    pub fn file(&self) -> &File {
        &self.inner.file
    }
}

impl Drop for FileQueue {
    fn drop(&mut self) {
        self.inner.dropped.set(true);
    }
}

impl QueueInner {
    pub(crate) fn file(&self) -> &FileInner {
        self.file.inner()
    }

    /// The error of an operation that cannot be started.
    fn refusal(&self, slot: &Slot, segments: usize) -> Option<i32> {
        let shared = self.file.shared();
        let (offset, len, places, lengths) = match slot.io {
            FileIo::Read { offset } | FileIo::Write { offset } => {
                if segments > SEGMENTS_MAX || slot.left > i32::MAX as u64 {
                    return Some(libc::EINVAL);
                }
                let (places, lengths) = slot.segments.iter().fold((0, 0), |(place, len), piece| {
                    (place | piece.iov_base.addr(), len | piece.iov_len)
                });
                (offset, slot.left, places, lengths)
            }
            FileIo::PunchHole { offset, len } | FileIo::ZeroRange { offset, len } => {
                (offset, len, 0, 0)
            }
            FileIo::SyncData => (0, 0, 0, 0),
        };
        let end = offset.checked_add(len).filter(|&end| end <= i64::MAX as u64);
        let sized = matches!(slot.io, FileIo::Read { .. } | FileIo::Write { .. });
        let block_mask = shared.alignment() - 1;
        if end.is_none()
            || (sized && (offset | len) & block_mask as u64 != 0)
            || lengths & block_mask != 0
            || places & (shared.memory_alignment() - 1) != 0
        {
            return Some(libc::EINVAL);
        }
        let reads = matches!(slot.io, FileIo::Read { .. });
        (!reads && shared.flush_failed()).then_some(libc::EIO)
    }

    /// Hands the rest of an operation to the device.
    fn start(this: &Rc<QueueInner>, at: u32) {
        let fd = this.file.shared().fd().number();
        let (op, len) = {
            let slots = this.slots.borrow();
            let slot = &slots[at as usize];
            let rest = &slot.segments[slot.first..];
            let (iov, n) = (rest.as_ptr(), rest.len() as u16);
            let threads = this.on_threads;
            let op = match slot.io {
                FileIo::Read { offset } => IoOp::ReadV { fd, iov, n, threads, offset },
                FileIo::Write { offset } => IoOp::WriteV { fd, iov, n, threads, offset },
                FileIo::SyncData => IoOp::SyncData { fd },
                FileIo::PunchHole { offset, len } => {
                    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                    IoOp::Fallocate { fd, mode, offset, len }
                }
                FileIo::ZeroRange { offset, len } => {
                    let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                    IoOp::Fallocate { fd, mode, offset, len }
                }
            };
            (op, slot.left)
        };
        let hold = Hold::Queue { queue: this.clone(), slot: at };
        this.file.core().inner().count_bytes(&op, len);
        this.file.core().inner().start(op, Payload::None, hold);
    }

    /// Takes the device's result. The caller must hold no borrow of the core's cells.
    pub(crate) fn reaped(self: Rc<Self>, at: u32, result: i32) {
        let errno = {
            let mut slots = self.slots.borrow_mut();
            slots[at as usize].reaped(&self.file, result)
        };
        match errno {
            Some(errno) => self.complete(at, errno),
            None => QueueInner::start(&self, at),
        }
    }

    /// Ends an operation.
    fn complete(&self, at: u32, errno: i32) {
        let keep = {
            let mut slots = self.slots.borrow_mut();
            let slot = &mut slots[at as usize];
            if !self.dropped.get() {
                let (tag, context) = (slot.tag, slot.context);
                self.done.borrow_mut().push(FileDone { tag, context, errno });
                self.ready.set(self.ready.get() + 1);
                self.file.core().inner().set_pollers_due();
            }
            slot.keep.take()
        };
        self.free.borrow_mut().push(at);
        // Last: dropping the owner of the memory may run any code.
        drop(keep);
    }
}

impl Slot {
    /// Notes the device's result. `None` when there is more to transfer, else the final error
    /// number.
    fn reaped(&mut self, file: &File, result: i32) -> Option<i32> {
        let shared = file.shared();
        if result == -libc::EINTR {
            return None;
        }
        if result < 0 {
            let errno = -result;
            if self.io == FileIo::SyncData && errno != libc::ECANCELED {
                shared.set_flush_failed();
            }
            return Some(errno);
        }
        let offset = match &mut self.io {
            FileIo::Read { offset } | FileIo::Write { offset } => offset,
            // A sync beside this one failed: it is unknown which writes' bytes were dropped.
            FileIo::SyncData if shared.flush_failed() => return Some(libc::EIO),
            _ => return Some(0),
        };
        let n = (result as u64).min(self.left);
        *offset += n;
        self.left -= n;
        if let FileIo::Write { offset } = self.io {
            shared.grow_size(offset);
        }
        if self.left == 0 {
            return Some(0);
        }
        // The end of the file, a device that takes nothing, or a direct transfer that ended inside
        // a block, whose rest cannot be requested.
        if n == 0 || !n.is_multiple_of(shared.alignment() as u64) {
            return Some(libc::EIO);
        }
        self.skip(n as usize);
        None
    }

    /// Skips the first `n` bytes of the segments.
    fn skip(&mut self, mut n: usize) {
        while n > 0 {
            let segment = &mut self.segments[self.first];
            let step = n.min(segment.iov_len);
            segment.iov_base = segment.iov_base.wrapping_byte_add(step);
            segment.iov_len -= step;
            n -= step;
            if segment.iov_len == 0 {
                self.first += 1;
            }
        }
    }
}

impl std::fmt::Debug for FileQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileQueue({})", self.inner.file.path().display())
    }
}

impl std::fmt::Display for QueueFull {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the queue is full")
    }
}

impl std::error::Error for QueueFull {}

impl FileDone {
    /// Success, or the error.
    ///
    /// # Errors
    /// The operation's.
    pub fn result(&self) -> io::Result<()> {
        if self.errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(self.errno)) }
    }
}
