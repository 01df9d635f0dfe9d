//! Operations on a file without a future: a [`FileQueue`] takes reads and writes of memory that is
//! not its own (a guest's), and what has completed is taken from it by tag. For a block device's
//! channel, which a poller looks at in every turn.
//!
//! 1. [`FileQueue::submit`] copies the list of segments into a slot and stages the operation. Slots
//!    are made once; the steady state allocates nothing.
//! 2. The slot keeps the list, the file and whatever keeps the memory mapped until the completion
//!    has been reaped, also when the queue is dropped meanwhile, and while the core stops.
//! 3. A device that took or brought part of it is asked for the rest: a read or a write ends with
//!    all of its bytes or with an error.
//! 4. The completion appends tag and outcome to the queue, and the core runs every poller in its
//!    next turn, whatever their back-off.
//!
//! As with futures nobody cancels a write, and a failed flush poisons the file for all cores.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use crate::driver::IoOp;
use crate::file::File;
use crate::op::{Hold, Payload};

/// Most segments of one operation, as the kernel has it.
pub const SEGMENTS_MAX: usize = 1024;

/// Segments of an operation that need no allocation when a slot is first used.
const SEGMENTS: usize = 4;

/// What to do with a file. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileIo {
    /// Read into the segments.
    Read {
        /// From where in the file.
        offset: u64,
    },
    /// Write what the segments hold.
    Write {
        /// To where in the file.
        offset: u64,
    },
    /// Make durable what was written by operations that had completed when this was submitted.
    SyncData,
    /// Give the range's room back; it reads as zeroes then. Behind the end of the file nothing
    /// happens.
    PunchHole {
        /// From where in the file.
        offset: u64,
        /// How much.
        len: u64,
    },
    /// Make the range read as zeroes and keep its room. The file does not grow.
    ZeroRange {
        /// From where in the file.
        offset: u64,
        /// How much.
        len: u64,
    },
}

/// An operation that has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileDone {
    /// As it was submitted.
    pub tag: u64,
    /// As it was submitted: for the submitter's own use.
    pub context: u32,
    /// 0, or the number of the error.
    pub errno: i32,
}

/// The queue has as many operations under way as it takes; nothing was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull;

/// One core's queue of operations on one file; see the module text.
pub struct FileQueue {
    inner: Rc<QueueInner>,
    keep: Option<Rc<dyn Any>>,
}

/// What outlives the queue while operations are under way.
pub(crate) struct QueueInner {
    file: File,
    on_threads: bool,
    slots: RefCell<Vec<Slot>>,
    free: RefCell<Vec<u32>>,
    done: RefCell<Vec<FileDone>>,
    /// Length of `done`, to be looked at for next to nothing.
    ready: Cell<usize>,
    dropped: Cell<bool>,
}

struct Slot {
    tag: u64,
    context: u32,
    io: FileIo,
    /// What is left of a read or a write: its segments from `first` on, the first of them cut.
    segments: Vec<libc::iovec>,
    first: usize,
    left: u64,
    keep: Option<Rc<dyn Any>>,
}

impl File {
    /// A queue of at most `depth` operations under way on this file. With `on_threads` reads and
    /// writes are made by threads that block in the plain calls, whatever the driver has.
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
    /// What each operation submitted from now on holds until it has completed: the owner of the
    /// memory that its segments point into.
    pub fn hold(&mut self, keep: Option<Rc<dyn Any>>) {
        self.keep = keep;
    }

    /// Submits an operation. `segments` belong to reads and writes and are not looked at for
    /// others. Its completion comes with `tag` and `context`, also when it is refused: offsets and
    /// lengths that are no multiple of [`File::alignment`], memory that is not aligned for direct
    /// I/O, or more than [`SEGMENTS_MAX`] segments are `EINVAL`; a write or a sync of a file whose
    /// flush has failed is `EIO`; a read that meets the end of the file is `EIO`.
    ///
    /// # Errors
    /// When as many operations are under way as the queue takes.
    ///
    /// # Safety
    /// Each segment of a read is valid for writes, each of a write for reads, until the tag has
    /// been taken, or, after the queue was dropped, as long as what [`FileQueue::hold`] was given
    /// lives. Anybody may change the memory meanwhile; nobody may have a Rust reference to it.
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

    /// How many completions wait to be taken. One look at memory.
    #[inline]
    pub fn ready(&self) -> usize {
        self.inner.ready.get()
    }

    /// Hands each completion that waits to `each`.
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
    /// Why it cannot be done.
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

    /// Hands what is left of an operation to the device.
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

    /// The device is done with what it was given. To be called without any borrow of the core's.
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

    /// An operation has come to its end.
    fn complete(&self, at: u32, errno: i32) {
        let keep = {
            let mut slots = self.slots.borrow_mut();
            let slot = &mut slots[at as usize];
            if !self.dropped.get() {
                let (tag, context) = (slot.tag, slot.context);
                self.done.borrow_mut().push(FileDone { tag, context, errno });
                self.ready.set(self.ready.get() + 1);
                self.file.core().inner().look_at_pollers();
            }
            slot.keep.take()
        };
        self.free.borrow_mut().push(at);
        // Last: the owner of the memory may do anything when it goes.
        drop(keep);
    }
}

impl Slot {
    /// Notes what the device says. `None` when there is more to do, else how it ended.
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
        // The end of the file, a device that takes nothing, or a direct transfer that ended
        // inside a block, whose rest cannot be asked for.
        if n == 0 || !n.is_multiple_of(shared.alignment() as u64) {
            return Some(libc::EIO);
        }
        self.skip(n as usize);
        None
    }

    /// The first `n` bytes of the segments are done.
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
