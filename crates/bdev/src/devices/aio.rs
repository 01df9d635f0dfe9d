//! Linux AIO (`engine=aio`): reads and writes through `io_submit`, for comparison, and for kernels
//! that forbid io_uring but not this.
//!
//! 1. Requests of one poll are gathered and submitted with one call, when the channel is polled or
//!    [`BATCH`] requests are staged.
//! 2. The kernel writes completions to a ring that is mapped into the process; they are taken from
//!    there without a call. It also signals the core's own eventfd, which ends its sleep.
//! 3. A short transfer, which is rare on a disk, is repeated as a whole by the reactor.
//!
//! All other requests (flush, discards, zeroes, unaligned memory) take the path of `engine=uring`.
//! Only direct I/O is asynchronous here: through the page cache `io_submit` itself would wait for
//! the disk. It can also wait where a file first has to allocate a block.
//!
//! When a channel is dropped, a task of the core holds the operations in the kernel until they are
//! done. Then a thread of its own destroys the context, because that call waits for all processors
//! of the machine.

use std::any::Any;
use std::io;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use reactor::aio_abi::{Event, IOCB_CMD_PREADV, IOCB_CMD_PWRITEV, IOCB_FLAG_RESFD, Iocb, Ring};
use reactor::{Class, Core, FileDone, FileIo, SharedFile};

/// Maximum number of operations in the kernel; more wait here. By default the system allows 65536
/// for all contexts.
const DEPTH: usize = 256;
/// Number of gathered operations that is submitted before the end of the poll.
const BATCH: usize = 32;
/// How often the owner of a dropped context polls its ring.
const DRAIN_NS: u64 = 1_000_000;

/// Segments of a request for which a slot needs no allocation.
const SEGMENTS: usize = 4;

struct Slot {
    iocb: Iocb,
    io: FileIo,
    segments: Vec<libc::iovec>,
    tag: u64,
    context: u32,
    keep: Option<Rc<dyn Any>>,
}

/// How an operation ended.
pub(crate) enum Ended {
    /// With this errno, or 0.
    With(FileDone),
    /// With a short transfer: the operation must be repeated.
    Short { slot: u32 },
}

/// An operation to repeat, as it was staged.
pub(crate) struct Again<'a> {
    pub io: FileIo,
    pub segments: &'a [libc::iovec],
    pub tag: u64,
    pub context: u32,
}

/// One core's context.
pub(crate) struct Aio {
    core: Core,
    /// The kernel's name for the context, which is also the address of its ring.
    context: u64,
    file: Arc<SharedFile>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Not submitted yet, oldest first.
    staged: Vec<u32>,
    in_kernel: usize,
}

impl Aio {
    /// # Errors
    /// When the system has no room for another context, or a file has no descriptor.
    pub fn new(core: &Core, file: &Arc<SharedFile>, depth: usize) -> io::Result<Aio> {
        let mut context = 0_u64;
        // SAFETY: the call writes a number to a live place.
        if unsafe { libc::syscall(libc::SYS_io_setup, DEPTH, &raw mut context) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let slot = |_| Slot {
            iocb: Iocb::default(),
            io: FileIo::SyncData,
            segments: Vec::with_capacity(SEGMENTS),
            tag: 0,
            context: 0,
            keep: None,
        };
        let aio = Aio {
            core: core.clone(),
            context,
            file: file.clone(),
            slots: (0..depth).map(slot).collect(),
            free: (0..depth as u32).rev().collect(),
            staged: Vec::with_capacity(depth),
            in_kernel: 0,
        };
        let ring = aio.ring();
        if !ring.is_known() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the layout of its AIO ring is not supported",
            ));
        }
        Ok(aio)
    }

    fn ring(&self) -> &Ring {
        // SAFETY: the kernel maps the ring at the address that is the context's number, until the
        // context is destroyed, which only this value does. The kernel writes `tail` only, and
        // after `io_setup` nothing else of the head; the fields that change are atomics.
        unsafe { &*std::ptr::with_exposed_provenance::<Ring>(self.context as usize) }
    }

    /// Gathers a read or a write. False if there is no room.
    ///
    /// # Safety
    /// The segments are valid until the tag has come back, or as long as `keep` lives.
    pub unsafe fn stage(
        &mut self,
        io: FileIo,
        segments: &[libc::iovec],
        tag: u64,
        context: u32,
        keep: Option<&Rc<dyn Any>>,
    ) -> bool {
        let (opcode, offset) = match io {
            FileIo::Read { offset } => (IOCB_CMD_PREADV, offset),
            FileIo::Write { offset } => (IOCB_CMD_PWRITEV, offset),
            _ => return false,
        };
        let (Some(fd), Some(at)) = (self.file.host_fd(), self.free.pop()) else { return false };
        let slot = &mut self.slots[at as usize];
        slot.segments.clear();
        slot.segments.extend_from_slice(segments);
        (slot.io, slot.tag, slot.context) = (io, tag, context);
        slot.keep = keep.cloned();
        slot.iocb = Iocb {
            data: at.into(),
            rw_flags: 0,
            opcode,
            fd: fd.as_raw_fd() as u32,
            buf: slot.segments.as_ptr().expose_provenance() as u64,
            nbytes: slot.segments.len() as u64,
            offset: offset as i64,
            flags: IOCB_FLAG_RESFD,
            resfd: self.core.wake_descriptor() as u32,
            ..Iocb::default()
        };
        self.staged.push(at);
        true
    }

    pub fn is_batch(&self) -> bool {
        self.staged.len() >= BATCH && self.in_kernel < DEPTH
    }

    /// Submits the gathered operations, as far as there is room. Operations that the kernel refuses
    /// have ended.
    pub fn submit(&mut self, mut ended: impl FnMut(FileDone)) {
        while !self.staged.is_empty() && self.in_kernel < DEPTH {
            let mut batch = [std::ptr::null_mut::<Iocb>(); BATCH];
            let n = self.staged.len().min(BATCH).min(DEPTH - self.in_kernel);
            for (place, &at) in batch.iter_mut().zip(&self.staged[..n]) {
                *place = &raw mut self.slots[at as usize].iocb;
            }
            // SAFETY: `n` pointers to control blocks, which the kernel copies. The segment list (in
            // a slot) and the memory (by the contract of `stage`) stay valid until the completion
            // has been taken from the ring.
            let taken =
                unsafe { libc::syscall(libc::SYS_io_submit, self.context, n, batch.as_mut_ptr()) };
            if taken > 0 {
                self.staged.drain(..taken as usize);
                self.in_kernel += taken as usize;
                continue;
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                // The kernel has no room; there may be some when one of our operations ends.
                Some(libc::EAGAIN) if self.in_kernel > 0 => return,
                Some(libc::EAGAIN) => {
                    self.core.turn_at(self.core.now_ns() + DRAIN_NS);
                    return;
                }
                error => {
                    let at = self.staged.remove(0);
                    ended(self.end(at, error.unwrap_or(libc::EIO)));
                }
            }
        }
    }

    /// Whether there are completions to take or operations to submit.
    pub fn ready(&self) -> bool {
        let ring = self.ring();
        let completed = ring.head.load(Ordering::Relaxed) != ring.tail.load(Ordering::Relaxed);
        completed || (!self.staged.is_empty() && self.in_kernel < DEPTH)
    }

    /// Takes completions from the ring.
    pub fn take(&mut self, mut ended: impl FnMut(Ended)) {
        let (nr, mut head) = (self.ring().nr, self.ring().head.load(Ordering::Relaxed));
        // Everything that the kernel wrote before it moved the tail is visible after this load.
        let tail = self.ring().tail.load(Ordering::Acquire);
        while head != tail {
            let events = self.context as usize + size_of::<Ring>();
            let place = events + head as usize % nr as usize * size_of::<Event>();
            // SAFETY: the ring holds `nr` events after its header, and this one was written before
            // the tail moved past it. The kernel reuses the slot only after `head` has moved.
            let event =
                unsafe { std::ptr::with_exposed_provenance::<Event>(place).read_volatile() };
            head = (head + 1) % nr;
            let at = event.data as u32;
            let Some(slot) = self.slots.get(at as usize) else { continue };
            self.in_kernel -= 1;
            let len: usize = slot.segments.iter().map(|segment| segment.iov_len).sum();
            ended(match event.res {
                res if res == len as i64 => Ended::With(self.end(at, 0)),
                res if res >= 0 || res == i64::from(-libc::EINTR) => Ended::Short { slot: at },
                res => Ended::With(self.end(at, (-res) as i32)),
            });
        }
        self.ring().head.store(head, Ordering::Release);
    }

    /// The operation to repeat.
    pub fn again(&self, slot: u32) -> Again<'_> {
        let Slot { io, segments, tag, context, .. } = &self.slots[slot as usize];
        Again { io: *io, segments, tag: *tag, context: *context }
    }

    /// The owner of an operation's memory.
    pub fn keep(&self, slot: u32) -> Option<Rc<dyn Any>> {
        self.slots[slot as usize].keep.clone()
    }

    /// Frees a slot.
    pub fn release(&mut self, at: u32) {
        self.slots[at as usize].keep = None;
        self.free.push(at);
    }

    /// Ends an operation with this errno, or 0.
    fn end(&mut self, at: u32, errno: i32) -> FileDone {
        self.release(at);
        let Slot { tag, context, .. } = self.slots[at as usize];
        FileDone { tag, context, errno }
    }

    /// Waits until the kernel has completed every operation.
    async fn drain(mut self) {
        while self.in_kernel > 0 {
            self.core.sleep_ns(DRAIN_NS).await;
            let mut again = Vec::new();
            self.take(|ended| {
                if let Ended::Short { slot } = ended {
                    again.push(slot);
                }
            });
            for slot in again {
                self.release(slot);
            }
        }
    }

    /// Spawns a task that waits for the operations in flight, if there are any.
    pub fn leave(mut self) {
        for at in std::mem::take(&mut self.staged) {
            self.release(at);
        }
        if self.in_kernel > 0 {
            let core = self.core.clone();
            core.spawn(Class::Background, self.drain());
        }
    }
}

impl Drop for Aio {
    #[expect(clippy::disallowed_methods, reason = "this call blocks, and no core may wait in it")]
    fn drop(&mut self) {
        let context = self.context;
        // SAFETY: this value's context, which nobody uses any more. The call waits for operations
        // in flight.
        let destroy = move || unsafe { libc::syscall(libc::SYS_io_destroy, context) };
        // A stopping core drops the waiting task. It must not exit before the kernel is done.
        if self.in_kernel > 0 {
            destroy();
            return;
        }
        let name = "millrace-aio".to_owned();
        if std::thread::Builder::new().name(name).spawn(move || _ = destroy()).is_err() {
            destroy();
        }
    }
}
