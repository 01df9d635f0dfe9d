//! A [`BufChannel`]: a channel whose requests own their memory, for callers without unsafe code.
//!
//! 1. [`BufChannel::submit`] moves the buffer of a read or a write into a slot, and submits the
//!    request to a [`Channel`] that holds the slot's owner.
//! 2. While the request is in flight, nothing can reach the buffer: the slot gives it back only
//!    with the completion. If the channel is dropped before, the operation in flight holds it.
//! 3. [`BufChannel::poll`] returns the tag, the status and the buffer.

use std::cell::Cell;
use std::rc::Rc;

use reactor::{Buf, Core};

use crate::channel::Channel;
use crate::device::Bdev;
use crate::error::Error;
use crate::io::{Done, Full, Io, Kind, Status};

/// A request of a [`BufChannel`]. Offset and length are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct BufIo {
    /// The operation.
    pub kind: Kind,
    /// Offset in the device. Ignored for a flush.
    pub offset: u64,
    /// Length. Ignored for a flush.
    pub len: u64,
    /// For a read or a write: where its bytes begin in the buffer.
    pub at: usize,
    /// Force unit access: see [`Io::fua`].
    pub fua: bool,
    /// Returned with the completion.
    pub tag: u64,
}

/// A completed request.
#[derive(Debug)]
pub struct BufDone {
    /// The tag of the request.
    pub tag: u64,
    /// How it ended.
    pub status: Status,
    /// The buffer that came with it.
    pub buf: Option<Buf>,
}

/// One core's access to a device, by requests that own their buffers; see the module text.
pub struct BufChannel {
    channel: Channel,
    slots: Vec<Slot>,
    free: Vec<usize>,
    done: Vec<Done>,
    /// What requests without a buffer hold.
    nothing: Rc<Cell<Option<Buf>>>,
}

/// A request in flight.
struct Slot {
    tag: u64,
    /// Holds the buffer until the completion. The channel's operation holds it, too.
    owner: Rc<Cell<Option<Buf>>>,
}

impl BufChannel {
    /// A channel to the device for this core.
    ///
    /// # Errors
    /// As for [`Bdev::channel`].
    pub fn new(device: &Bdev, core: &Core) -> Result<BufChannel, Error> {
        Ok(BufChannel {
            channel: device.channel(core)?,
            slots: Vec::new(),
            free: Vec::new(),
            done: Vec::new(),
            nothing: Rc::default(),
        })
    }

    /// Submits a request. Its tag comes back from [`BufChannel::poll`] exactly once, with `buf`;
    /// [`Channel::submit`] says what makes a request invalid, and its status then. A read or a
    /// write whose bytes do not lie in `buf` is invalid, too. A read of a null device reads
    /// zeroes.
    ///
    /// # Errors
    /// When [`QUEUE_DEPTH`](crate::QUEUE_DEPTH) requests are in flight: gives the buffer back.
    pub fn submit(&mut self, io: BufIo, mut buf: Option<Buf>) -> Result<(), (Full, Option<Buf>)> {
        let mut segment = None;
        if let (Kind::Read | Kind::Write, Some(buf)) = (io.kind, &mut buf) {
            let len = usize::try_from(io.len).unwrap_or(usize::MAX);
            let mut bytes = io.at.checked_add(len).and_then(|end| buf.get_mut(io.at..end));
            if let (Kind::Read, Some(bytes)) = (io.kind, &mut bytes)
                && self.device().reads_nothing()
            {
                // What the buffer was used for before is nobody's business.
                bytes.fill(0);
            }
            segment = bytes.map(|bytes| libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            });
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { tag: 0, owner: Rc::default() });
            self.slots.len() - 1
        });
        let Slot { tag, owner } = &mut self.slots[slot];
        *tag = io.tag;
        owner.set(buf);
        self.channel.hold(owner.clone());
        let BufIo { kind, offset, len, fua, .. } = io;
        let segments = segment.as_slice();
        let request = Io { kind, offset, len, segments, tag: slot as u64, fua };
        // SAFETY: the segment, if there is one, lies in the buffer that `owner` holds. Nothing
        // takes the buffer out of it until the tag has come back (`poll`, and below if
        // nothing was submitted), so its memory stays allocated and no Rust reference to it
        // is made. The channel was told to hold `owner`, so the same is true after this
        // channel is dropped: the operation in flight drops the buffer with the last clone.
        let submitted = unsafe { self.channel.submit(&request) };
        // Later requests must not keep this buffer.
        self.channel.hold(self.nothing.clone());
        submitted.map_err(|full| {
            self.free.push(slot);
            (full, self.slots[slot].owner.take())
        })
    }

    /// Appends completions to `done` and returns their number. To be called in every turn of the
    /// core.
    pub fn poll(&mut self, done: &mut Vec<BufDone>) -> usize {
        let count = self.channel.poll(&mut self.done);
        for Done { tag: slot, status } in self.done.drain(..) {
            let slot = slot as usize;
            let Slot { tag, owner } = &self.slots[slot];
            done.push(BufDone { tag: *tag, status, buf: owner.take() });
            self.free.push(slot);
        }
        count
    }

    /// Whether [`BufChannel::poll`] would return something. Reads memory only.
    #[inline]
    pub fn ready(&self) -> bool {
        self.channel.ready()
    }

    /// Requests submitted and not yet returned.
    pub fn in_flight(&self) -> usize {
        self.channel.in_flight()
    }

    /// The device of the channel.
    pub fn device(&self) -> &Bdev {
        self.channel.device()
    }
}

impl std::fmt::Debug for BufChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BufChannel({} requests in flight)", self.in_flight())
    }
}
