//! One core's requests to a server: they are sent to the hub in pieces, and copied from and to the
//! guest's memory here.

use std::any::Any;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use reactor::inbox::{Inbox, Sender, inbox};
use reactor::{Bell, Class, Core};

use super::hub::{Answer, REQUESTS_MAX, Request, Ticket, What};
use super::{NbdDevice, RANGE_BYTES_MAX, Shared};
use crate::io::{Done, Io, Kind, QUEUE_DEPTH, Status};

/// Most bytes that the pieces of a channel hold together. A piece is at most 1 MiB.
const BYTES_MAX: u64 = 16 << 20;
/// Most pieces of a channel.
const PIECES_MAX: usize = 4 * QUEUE_DEPTH;
/// How often the owner of a dropped channel looks for answers, in nanoseconds.
const DRAIN_NS: u64 = 1_000_000;

const _: () = assert!(PIECES_MAX < REQUESTS_MAX, "the answers of a channel have room");

/// One core's requests to a server.
pub(crate) struct NbdChannel {
    core: Core,
    flight: Option<Flight>,
    keep: Option<Rc<dyn Any>>,
    /// Slots with pieces that are not sent yet, oldest first.
    waiting: VecDeque<u32>,
}

/// The requests in flight.
struct Flight {
    shared: Arc<Shared>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    answers: Inbox<Answer>,
    /// The other end of `answers`, and this core's bell.
    back: (Sender<Answer>, Bell),
    /// What all pieces hold, and their number.
    bytes: u64,
    pieces: usize,
}

/// A request.
struct Slot {
    tag: u64,
    kind: Kind,
    offset: u64,
    len: u64,
    fua: bool,
    segments: Vec<libc::iovec>,
    /// Bytes of the range whose pieces were sent.
    sent: u64,
    /// Pieces that were sent and not answered.
    pieces: u32,
    status: Status,
    /// The owner of the memory.
    keep: Option<Rc<dyn Any>>,
}

impl NbdChannel {
    pub fn new(device: &NbdDevice, core: &Core) -> NbdChannel {
        let (sender, answers) = inbox(REQUESTS_MAX);
        let flight = Flight {
            shared: device.shared.clone(),
            slots: Vec::new(),
            free: Vec::new(),
            answers,
            back: (sender, core.bell()),
            bytes: 0,
            pieces: 0,
        };
        NbdChannel {
            core: core.clone(),
            flight: Some(flight),
            keep: None,
            waiting: VecDeque::new(),
        }
    }

    fn flight(&self) -> &Flight {
        self.flight.as_ref().expect("only the drop takes it")
    }

    pub fn hold(&mut self, keep: Rc<dyn Any>) {
        self.keep = Some(keep);
    }

    #[inline]
    pub fn ready(&self) -> bool {
        self.flight().answers.pure_check()
    }

    /// # Safety
    /// As for [`crate::Channel::submit`]; the range lies in the device.
    pub unsafe fn submit(&mut self, io: &Io<'_>, done: &mut Vec<Done>) {
        let Some(flight) = &mut self.flight else { return };
        if io.kind == Kind::Discard && !flight.shared.trims {
            return done.push(Done { tag: io.tag, status: Status::Unsupported });
        }
        let slot = Slot {
            tag: io.tag,
            kind: io.kind,
            offset: io.offset,
            len: if io.kind == Kind::Flush { 0 } else { io.len },
            fua: io.fua || flight.shared.fua,
            segments: io.segments.to_vec(),
            sent: 0,
            pieces: 0,
            status: Status::Ok,
            keep: self.keep.clone(),
        };
        let at = match flight.free.pop() {
            Some(at) => {
                flight.slots[at as usize] = slot;
                at
            }
            None => {
                flight.slots.push(slot);
                (flight.slots.len() - 1) as u32
            }
        };
        self.waiting.push_back(at);
        self.send();
    }

    #[inline]
    pub fn poll(&mut self, done: &mut Vec<Done>) {
        if !self.ready() {
            return;
        }
        if let Some(flight) = &mut self.flight {
            while let Some(answer) = flight.answers.pop() {
                // SAFETY: the tag of the request has not come back, so its segments are valid.
                let ended = unsafe { flight.take(&answer, true) };
                done.extend(ended);
            }
        }
        self.send();
    }

    /// Sends pieces as far as there is room.
    fn send(&mut self) {
        let Some(flight) = &mut self.flight else { return };
        while let Some(&at) = self.waiting.front() {
            // SAFETY: the tag of the request has not come back, so its segments are valid.
            match unsafe { flight.send(at) } {
                Sent::Part => {}
                Sent::All => drop(self.waiting.pop_front()),
                Sent::NoRoom => return,
            }
        }
    }
}

/// What became of an attempt to send.
enum Sent {
    Part,
    All,
    NoRoom,
}

impl Flight {
    /// Sends the next piece of a request.
    ///
    /// # Safety
    /// The segments of the request are valid.
    unsafe fn send(&mut self, at: u32) -> Sent {
        let (shared, slot) = (&self.shared, &mut self.slots[at as usize]);
        let writes_zeroes = matches!(slot.kind, Kind::WriteZeroes { .. });
        let (what, has_data) = match slot.kind {
            Kind::Read => (What::Read, true),
            Kind::Write => (What::Write, true),
            Kind::WriteZeroes { .. } if !shared.writes_zeroes => (What::Write, true),
            Kind::WriteZeroes { unmap } => (What::Zeroes { unmap }, false),
            Kind::Flush => (What::Flush, false),
            Kind::Discard => (What::Trim, false),
        };
        let most = if has_data { shared.piece_bytes } else { RANGE_BYTES_MAX };
        let len = (slot.len - slot.sent).min(most);
        let bytes = if has_data { len } else { 0 };
        if self.pieces >= PIECES_MAX || (self.bytes > 0 && self.bytes + bytes > BYTES_MAX) {
            return Sent::NoRoom;
        }
        let mut data = Vec::new();
        if what == What::Write {
            data.reserve_exact(len as usize);
            match writes_zeroes {
                true => data.resize(len as usize, 0),
                // SAFETY: the segments are valid by this function's contract.
                false => unsafe { gather(&slot.segments, slot.sent as usize, &mut data, len) },
            }
        }
        let (sender, bell) = self.back.clone();
        let ticket = Ticket::of_channel(sender, bell, at, slot.sent, bytes);
        let changes = !matches!(slot.kind, Kind::Read | Kind::Flush);
        let (offset, fua) = (slot.offset + slot.sent, slot.fua && changes);
        slot.sent += len;
        slot.pieces += 1;
        self.pieces += 1;
        self.bytes += bytes;
        let is_last = slot.sent == slot.len;
        shared.send(Request { what, offset, len: len as u32, fua, data, ticket });
        if is_last { Sent::All } else { Sent::Part }
    }

    /// Takes an answer, and copies what was read into the guest's memory if `copies` says so.
    /// Returns the completion of the request that ends with it.
    ///
    /// # Safety
    /// If `copies`, the segments of the request are valid.
    unsafe fn take(&mut self, answer: &Answer, copies: bool) -> Option<Done> {
        let Answer { slot: at, place, bytes, status, ref data } = *answer;
        let slot = &mut self.slots[at as usize];
        slot.pieces -= 1;
        self.pieces -= 1;
        self.bytes -= bytes;
        if status != Status::Ok {
            slot.status = status;
        } else if copies && slot.kind == Kind::Read {
            // SAFETY: the segments are valid by this function's contract.
            unsafe { scatter(&slot.segments, place as usize, data) };
        }
        // After a failure the other pieces are sent, too: the request may be done in part.
        if slot.pieces > 0 || slot.sent < slot.len {
            return None;
        }
        slot.keep = None;
        self.free.push(at);
        Some(Done { tag: slot.tag, status: slot.status })
    }
}

impl Drop for NbdChannel {
    /// What was sent may still be done by the server: the memory's owner is told when it is.
    fn drop(&mut self) {
        let Some(mut flight) = self.flight.take().filter(|flight| flight.pieces > 0) else {
            return;
        };
        let core = self.core.clone();
        self.core.spawn(Class::Background, async move {
            while flight.pieces > 0 {
                core.sleep_ns(DRAIN_NS).await;
                while let Some(answer) = flight.answers.pop() {
                    let slot = &mut flight.slots[answer.slot as usize];
                    // Nothing more of it is sent.
                    slot.sent = slot.len;
                    // SAFETY: nothing is copied.
                    let _ = unsafe { flight.take(&answer, false) };
                }
            }
        });
    }
}

/// The parts of the segments that lie in a range of `len` bytes from `from` on.
fn parts(
    segments: &[libc::iovec],
    from: usize,
    len: usize,
) -> impl Iterator<Item = (*mut u8, usize)> {
    let (mut skip, mut left) = (from, len);
    segments.iter().filter_map(move |segment| {
        let skipped = skip.min(segment.iov_len);
        skip -= skipped;
        let len = left.min(segment.iov_len - skipped);
        left -= len;
        (len > 0).then(|| (segment.iov_base.cast::<u8>().wrapping_add(skipped), len))
    })
}

/// Appends `len` bytes of the segments, from `from` on.
///
/// # Safety
/// The segments are valid. Others may change their bytes meanwhile.
unsafe fn gather(segments: &[libc::iovec], from: usize, data: &mut Vec<u8>, len: u64) {
    data.reserve(len as usize);
    for (bytes, len) in parts(segments, from, len as usize) {
        // SAFETY: the part lies in a valid segment, and all parts together are at most as long as
        // the room that was reserved. No reference to the segment exists.
        unsafe {
            std::ptr::copy(bytes, data.as_mut_ptr().add(data.len()), len);
            data.set_len(data.len() + len);
        }
    }
}

/// Copies data into the segments, from `from` on.
///
/// # Safety
/// The segments are valid. Others may change their bytes meanwhile.
unsafe fn scatter(segments: &[libc::iovec], from: usize, mut data: &[u8]) {
    for (bytes, len) in parts(segments, from, data.len()) {
        let (part, rest) = data.split_at(len);
        data = rest;
        // SAFETY: the part lies in a valid segment, of which no reference exists.
        unsafe { std::ptr::copy(part.as_ptr(), bytes, len) };
    }
}
