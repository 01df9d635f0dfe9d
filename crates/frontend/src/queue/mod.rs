//! A driver of one queue of a disk.
//!
//! A queue has one slot for each request that may be in flight. A slot has a cache line for header
//! and status, a buffer for data, and a chain that is built once for each shape of request.
//! Submitting the same shape again costs the header, the status byte and an entry of the ring,
//! without allocations and locks.
//!
//! 1. [`Queue::take`] returns a free slot; [`Queue::write_data`] fills its buffer.
//! 2. [`Queue::submit`] stages a request; [`Queue::publish`] publishes all staged requests to the
//!    target, and kicks it if it asks for kicks.
//! 3. [`Queue::poll`] returns completions. The slot with its data then belongs to the caller, which
//!    submits it again or releases it with [`Queue::give_back`].
//!
//! The driver requests interrupts only during [`Queue::wait`]. It checks what the target writes
//! into the used ring: an id that is not in flight, or an index that is too far ahead, is an error
//! of kind [`Kind::Ring`](crate::Kind::Ring). After such an error the queue must not be used.
//!
//! `request` has requests and their results, `shape` the dimensions of a queue, `blocking` the
//! methods that wait for a request.

mod blocking;
mod request;
mod shape;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

pub use self::request::{Completion, Request, Slot, Status};
use self::shape::LINE;
pub(crate) use self::shape::Shape;
use crate::message::{blk, desc};
use crate::packed::available;
use crate::{Desc, Error, Event, Kind, Memory, PackedDesc, PackedRing, Result, SplitRing};

const HEADER_BYTES: u32 = 16;
const STATUS_OFFSET: usize = 16;
/// The status byte before the target has written one.
const NO_STATUS: u8 = 0xff;

/// The data of a chain: its length, and whether the target writes it.
type Data = (u32, bool);

#[derive(Clone, Copy, Debug)]
struct SlotState {
    in_flight: bool,
    /// The data that the prepared chain is built for.
    data: Option<Data>,
    /// Packed rings: number of the ring's descriptors that the request uses now.
    taken: u16,
}

#[derive(Debug)]
enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

/// The positions of both sides. Indexes of a split ring run freely. Those of a packed ring wrap
/// around, with a wrap counter.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    next: u16,
    next_wrap: bool,
    published: u16,
    used: u16,
    used_wrap: bool,
    /// Packed rings: the position and the flags of the first staged chain, and the number of
    /// staged descriptors. These flags are written last.
    staged: Option<(u16, u16)>,
    added: u16,
}

/// A driver of one queue.
#[derive(Debug)]
pub struct Queue {
    ring: Ring,
    memory: Arc<Memory>,
    kick: Arc<Event>,
    call: Arc<Event>,
    shape: Shape,
    slots: Box<[SlotState]>,
    free: Vec<Slot>,
    progress: Progress,
    in_flight: u16,
    /// The slots' cache lines: guest address and pointer.
    lines_addr: u64,
    lines: *mut u8,
    tables_addr: u64,
    data_addr: u64,
    data: *mut u8,
    /// Completions of the methods that wait.
    done: Vec<Completion>,
}

// SAFETY: the pointers lead into memory that `Queue::memory` keeps mapped, and on this side only
// the queue's owner follows them.
unsafe impl Send for Queue {}

impl Queue {
    /// Creates a driver with a zeroed ring at a guest address.
    pub(crate) fn new(
        memory: &Arc<Memory>,
        addr: u64,
        shape: Shape,
        kick: Arc<Event>,
        call: Arc<Event>,
    ) -> Queue {
        let ring = if shape.packed {
            Ring::Packed(PackedRing::new(memory, addr, shape.size))
        } else {
            Ring::Split(SplitRing::new(memory, addr, shape.size))
        };
        let depth = u64::from(shape.depth);
        let lines_addr = addr + shape.ring_bytes();
        let data_addr = addr + shape.data_offset();
        let none = SlotState { in_flight: false, data: None, taken: 0 };
        let mut queue = Queue {
            ring,
            memory: memory.clone(),
            kick,
            call,
            shape,
            slots: vec![none; shape.depth.into()].into(),
            free: (0..shape.depth).rev().map(Slot).collect(),
            progress: Progress { next_wrap: true, used_wrap: true, ..Progress::default() },
            in_flight: 0,
            lines_addr,
            lines: memory.pointer(lines_addr, (depth * LINE) as usize),
            tables_addr: lines_addr + depth * LINE,
            data_addr,
            data: memory.pointer(data_addr, (depth * u64::from(shape.slot_bytes)) as usize),
            done: Vec::with_capacity(shape.depth.into()),
        };
        match &queue.ring {
            Ring::Split(ring) => ring.clear(),
            Ring::Packed(ring) => ring.clear(),
        }
        queue.suppress_calls();
        queue
    }

    /// Most requests in flight.
    pub fn depth(&self) -> usize {
        self.slots.len()
    }

    /// Bytes of a slot's buffer.
    pub fn slot_bytes(&self) -> u32 {
        self.shape.slot_bytes
    }

    /// Number of requests in flight.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight.into()
    }

    /// The ring's kick event, for kicks without a request.
    pub fn kick(&self) -> &Event {
        &self.kick
    }

    /// Takes a free slot.
    #[inline]
    pub fn take(&mut self) -> Option<Slot> {
        self.free.pop()
    }

    /// Releases a slot.
    #[inline]
    pub fn give_back(&mut self, slot: Slot) {
        assert!(!self.slots[slot.index()].in_flight, "the slot is in flight");
        self.free.push(slot);
    }

    #[inline]
    fn data_at(&self, slot: Slot, offset: usize, len: usize) -> *mut u8 {
        let bytes = self.shape.slot_bytes as usize;
        assert!(slot.index() < self.slots.len() && offset <= bytes && len <= bytes - offset);
        // SAFETY: `data` has `slot_bytes` bytes for each slot, and the range is within this slot's.
        unsafe { self.data.add(slot.index() * bytes + offset) }
    }

    /// Copies into a slot's buffer.
    #[inline]
    pub fn write_data(&mut self, slot: Slot, offset: usize, bytes: &[u8]) {
        let to = self.data_at(slot, offset, bytes.len());
        // SAFETY: `data_at` checked that `to` has this many bytes; `bytes` is private memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Copies out of a slot's buffer.
    #[inline]
    pub fn read_data(&self, slot: Slot, offset: usize, bytes: &mut [u8]) {
        let from = self.data_at(slot, offset, bytes.len());
        // SAFETY: as in `write_data`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// The guest address of a slot's buffer.
    pub fn data_addr(&self, slot: Slot) -> u64 {
        self.data_addr + slot.index() as u64 * u64::from(self.shape.slot_bytes)
    }

    #[inline]
    fn line(&self, slot: Slot) -> *mut u8 {
        debug_assert!(slot.index() < self.slots.len());
        // SAFETY: `lines` has a line for each slot, and slots come only from `take`.
        unsafe { self.lines.add(slot.index() * LINE as usize) }
    }

    /// Stages a request. Its data, if any, must be in the slot's buffer.
    ///
    /// # Panics
    /// If the slot is in flight, or its buffer is shorter than the request.
    #[inline]
    pub fn submit(&mut self, slot: Slot, request: Request) {
        assert!(!self.slots[slot.index()].in_flight, "the slot is already in flight");
        let (kind, sector, data) = match request {
            Request::Read { offset, len } => (blk::IN, offset / blk::SECTOR, (len, true)),
            Request::Write { offset, len } => (blk::OUT, offset / blk::SECTOR, (len, false)),
            Request::Flush => (blk::FLUSH, 0, (0, false)),
            Request::GetId => (blk::GET_ID, 0, (blk::ID_BYTES, true)),
            Request::Discard { offset, len } => {
                (blk::DISCARD, 0, self.write_range(slot, offset, len, 0))
            }
            Request::WriteZeroes { offset, len, unmap } => {
                let flags = if unmap { blk::UNMAP } else { 0 };
                (blk::WRITE_ZEROES, 0, self.write_range(slot, offset, len, flags))
            }
        };
        assert!(data.0 <= self.shape.slot_bytes, "the slot's buffer is too short");
        let line = self.line(slot);
        // SAFETY: the line has 64 bytes and is aligned, and the slot is not in flight, so the
        // target does not access it.
        unsafe {
            line.cast::<u64>().write_volatile(kind.into());
            line.cast::<u64>().add(1).write_volatile(sector);
            line.add(STATUS_OFFSET).write_volatile(NO_STATUS);
        }
        let laid_out = self.slots[slot.index()].data == Some(data);
        match self.ring {
            Ring::Split(_) => {
                if !laid_out {
                    self.lay_out_split(slot, data);
                }
                let head = slot.0 * self.shape.per_request();
                if let Ring::Split(ring) = &self.ring {
                    ring.set_avail(self.progress.next, head);
                }
                self.progress.next = self.progress.next.wrapping_add(1);
            }
            Ring::Packed(_) => {
                if self.shape.indirect && !laid_out {
                    self.lay_out_table(slot, data);
                }
                self.stage_packed(slot, data);
            }
        }
        let state = &mut self.slots[slot.index()];
        state.data = Some(data);
        state.in_flight = true;
        self.in_flight += 1;
    }

    /// Writes the range of a discard or write-zeroes request into the slot's buffer.
    fn write_range(&mut self, slot: Slot, offset: u64, len: u32, flags: u32) -> Data {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&(offset / blk::SECTOR).to_le_bytes());
        bytes[8..12].copy_from_slice(&(len / blk::SECTOR as u32).to_le_bytes());
        bytes[12..].copy_from_slice(&flags.to_le_bytes());
        self.write_data(slot, 0, &bytes);
        (16, false)
    }

    /// The parts of a request in order: address, length, whether the target writes.
    fn parts(&self, slot: Slot, (len, write): Data) -> impl Iterator<Item = (u64, u32, bool)> {
        let line = self.lines_addr + slot.index() as u64 * LINE;
        let (data, step) = (self.data_addr(slot), self.shape.segment_bytes());
        let pieces = (0..len.div_ceil(step)).map(move |nth| {
            let from = nth * step;
            (data + u64::from(from), step.min(len - from), write)
        });
        std::iter::once((line, HEADER_BYTES, false)).chain(pieces).chain(std::iter::once((
            line + STATUS_OFFSET as u64,
            1,
            true,
        )))
    }

    fn chain_len(&self, data: Data) -> u16 {
        2 + data.0.div_ceil(self.shape.segment_bytes()) as u16
    }

    fn table_addr(&self, slot: Slot) -> u64 {
        self.tables_addr + slot.index() as u64 * self.shape.table_bytes()
    }

    fn lay_out_split(&self, slot: Slot, data: Data) {
        let Ring::Split(ring) = &self.ring else { return };
        let count = self.chain_len(data);
        let first = slot.0 * self.shape.per_request();
        if self.shape.indirect {
            self.lay_out_table(slot, data);
            let len = u32::from(count) * Desc::BYTES as u32;
            let table = self.table_addr(slot);
            ring.set_desc(first, Desc { addr: table, len, flags: desc::INDIRECT, next: 0 });
            return;
        }
        for (nth, (addr, len, write)) in (0..).zip(self.parts(slot, data)) {
            let last = nth + 1 == count;
            let flags = part_flags(write, !last);
            let next = if last { 0 } else { first + nth + 1 };
            ring.set_desc(first + nth, Desc { addr, len, flags, next });
        }
    }

    fn lay_out_table(&self, slot: Slot, data: Data) {
        let (table, count) = (self.table_addr(slot), self.chain_len(data));
        for (nth, (addr, len, write)) in (0..).zip(self.parts(slot, data)) {
            let at = table + u64::from(nth) * Desc::BYTES as u64;
            let bytes = if self.shape.packed {
                // Packed tables have no links: their descriptors follow each other.
                PackedDesc { addr, len, id: 0, flags: part_flags(write, false) }.encode()
            } else {
                let more = nth + 1 < count;
                let next = if more { nth + 1 } else { 0 };
                Desc { addr, len, flags: part_flags(write, more), next }.encode()
            };
            self.memory.write(at, &bytes);
        }
    }

    #[inline]
    fn stage_packed(&mut self, slot: Slot, data: Data) {
        let Ring::Packed(ring) = &self.ring else { return };
        let mut progress = self.progress;
        let mut put = |addr, len, flags, last: bool, first: bool| {
            let flags = flags | available(progress.next_wrap);
            ring.set_body(progress.next, PackedDesc { addr, len, id: slot.0, flags });
            // The first head of the staged chains makes all of them available, so `publish` writes
            // its flags. Until then the target does not read the other heads, so their flags may be
            // written before the rest of their chains.
            if first && progress.staged.is_none() {
                progress.staged = Some((progress.next, flags));
            } else {
                ring.set_flags(progress.next, flags);
            }
            debug_assert!(last || flags & desc::NEXT != 0);
            progress.added += 1;
            progress.next += 1;
            if progress.next == ring.size() {
                progress.next = 0;
                progress.next_wrap = !progress.next_wrap;
            }
        };
        let count = self.chain_len(data);
        if self.shape.indirect {
            let len = u32::from(count) * Desc::BYTES as u32;
            put(self.table_addr(slot), len, desc::INDIRECT, true, true);
        } else {
            for (nth, (addr, len, write)) in (0..).zip(self.parts(slot, data)) {
                let last = nth + 1 == count;
                put(addr, len, part_flags(write, !last), last, nth == 0);
            }
        }
        self.progress = progress;
        self.slots[slot.index()].taken = if self.shape.indirect { 1 } else { count };
    }

    /// Publishes the staged requests, and kicks the target if it asks for kicks. Returns whether it
    /// was kicked.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let progress = &mut self.progress;
        let kick = match &self.ring {
            Ring::Split(ring) => {
                let (old, new) = (progress.published, progress.next);
                if old == new {
                    return false;
                }
                ring.publish(new);
                progress.published = new;
                ring.wants_kick(old, new, self.shape.event_index)
            }
            Ring::Packed(ring) => {
                let Some((head, flags)) = progress.staged.take() else { return false };
                ring.set_flags(head, flags);
                let added = std::mem::take(&mut progress.added);
                ring.wants_kick(progress.next, progress.next_wrap, added)
            }
        };
        if kick {
            self.kick.signal();
        }
        kick
    }

    /// Appends completions. Returns their number.
    ///
    /// # Errors
    /// If the target wrote invalid data into the ring.
    #[inline]
    pub fn poll(&mut self, done: &mut Vec<Completion>) -> Result<usize> {
        match self.ring {
            Ring::Split(_) => self.poll_split(done),
            Ring::Packed(_) => self.poll_packed(done),
        }
    }

    #[inline]
    fn poll_split(&mut self, done: &mut Vec<Completion>) -> Result<usize> {
        let Ring::Split(ring) = &self.ring else { return Ok(0) };
        let index = ring.used_index();
        let count = index.wrapping_sub(self.progress.used);
        if count == 0 {
            return Ok(0);
        }
        if count > self.in_flight {
            return Err(self.broken(format!(
                "the used index went from {} to {index} with {} in flight",
                self.progress.used, self.in_flight
            )));
        }
        let per_request = u32::from(self.shape.per_request());
        for nth in 0..count {
            let Ring::Split(ring) = &self.ring else { break };
            let (id, written) = ring.used(self.progress.used.wrapping_add(nth));
            let (index, rest) = match per_request {
                1 => (id, 0),
                many => (id / many, id % many),
            };
            let completion = match rest {
                0 => self.complete(index, written),
                _ => None,
            };
            match completion {
                Some(completion) => done.push(completion),
                None => {
                    return Err(
                        self.broken(format!("the target completed {id}, which is not in flight"))
                    );
                }
            }
        }
        self.progress.used = index;
        Ok(count.into())
    }

    #[inline]
    fn poll_packed(&mut self, done: &mut Vec<Completion>) -> Result<usize> {
        let mut count = 0;
        while self.in_flight > 0 {
            let Ring::Packed(ring) = &self.ring else { break };
            let at = self.progress.used;
            if !ring.is_used(at, self.progress.used_wrap) {
                break;
            }
            let PackedDesc { len, id, .. } = ring.desc(at);
            let size = ring.size();
            let Some(completion) = self.complete(id.into(), len) else {
                return Err(
                    self.broken(format!("the target completed {id}, which is not in flight"))
                );
            };
            let next = at + self.slots[usize::from(id)].taken;
            self.progress.used = next % size;
            self.progress.used_wrap ^= next >= size;
            done.push(completion);
            count += 1;
        }
        Ok(count)
    }

    /// Takes a slot back from the target. Returns `None` if it is not in flight.
    #[inline]
    fn complete(&mut self, index: u32, written: u32) -> Option<Completion> {
        let state = self.slots.get_mut(index as usize)?;
        if !state.in_flight {
            return None;
        }
        state.in_flight = false;
        self.in_flight -= 1;
        let slot = Slot(index as u16);
        // SAFETY: the status byte is in the slot's line.
        let status = unsafe { self.line(slot).add(STATUS_OFFSET).read_volatile() };
        Some(Completion { slot, status: status.into(), written })
    }

    #[cold]
    fn broken(&self, what: String) -> Error {
        Error::new(Kind::Ring, what)
    }

    /// Waits for a completion, using the target's call. Returns false after `timeout`.
    #[expect(clippy::disallowed_methods, reason = "waits for a target, on no core")]
    pub fn wait(&mut self, timeout: Duration) -> bool {
        match &self.ring {
            Ring::Split(ring) if self.shape.event_index => ring.set_used_event(self.progress.used),
            Ring::Split(ring) => ring.set_avail_flags(0),
            Ring::Packed(ring) => {
                let flags = if self.shape.event_index { 2 } else { 0 };
                ring.set_driver_event(self.progress.used, self.progress.used_wrap, flags);
            }
        }
        // Completions from before the target saw the request for a call are seen here.
        fence(Ordering::SeqCst);
        let end = Instant::now() + timeout;
        let mut ready = self.is_ready();
        while !ready {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.call.wait(left);
            ready = self.is_ready();
        }
        self.suppress_calls();
        ready
    }

    /// Whether [`Queue::poll`] would return something.
    pub fn is_ready(&self) -> bool {
        match &self.ring {
            Ring::Split(ring) => ring.used_index() != self.progress.used,
            Ring::Packed(ring) => ring.is_used(self.progress.used, self.progress.used_wrap),
        }
    }

    /// With event index, the event is half a lap away, which costs one call in 65536 requests.
    fn suppress_calls(&mut self) {
        match &self.ring {
            Ring::Split(ring) if self.shape.event_index => {
                ring.set_used_event(self.progress.used.wrapping_add(0x8000));
            }
            Ring::Split(ring) => ring.set_avail_flags(1),
            Ring::Packed(ring) => ring.set_driver_event(0, false, 1),
        }
    }

    /// The position at which a target without state should continue: the used index of a split
    /// ring, both positions of a packed one.
    pub fn base(&self) -> u32 {
        match &self.ring {
            Ring::Split(ring) => ring.used_index().into(),
            Ring::Packed(_) => {
                let at = |index: u16, wrap: bool| u32::from(index | u16::from(wrap) << 15);
                let progress = &self.progress;
                at(progress.next, progress.next_wrap) | at(progress.used, progress.used_wrap) << 16
            }
        }
    }
}

#[inline]
fn part_flags(write: bool, next: bool) -> u16 {
    (if write { desc::WRITE } else { 0 }) | (if next { desc::NEXT } else { 0 })
}
