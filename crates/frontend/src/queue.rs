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

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use crate::message::{blk, desc};
use crate::packed::available;
use crate::{Desc, Error, Event, Kind, Memory, PackedDesc, PackedRing, Result, SplitRing};

/// Timeout of [`Queue::run`] and the methods that use it.
const PATIENCE: Duration = Duration::from_secs(60);
/// Header and status share one cache line: both are accessed for each request.
const LINE: u64 = 64;
const HEADER_BYTES: u32 = 16;
const STATUS_OFFSET: usize = 16;
/// The status byte before the target has written one.
const NO_STATUS: u8 = 0xff;

/// A request. Offsets and lengths are multiples of 512 bytes. The data is in the slot's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "offset and length need no explanation")]
pub enum Request {
    /// Read into the slot's buffer.
    Read { offset: u64, len: u32 },
    /// Write from the slot's buffer.
    Write { offset: u64, len: u32 },
    /// Make completed writes durable.
    Flush,
    /// Discard a range.
    Discard { offset: u64, len: u32 },
    /// Make a range read as zeroes, possibly by unmapping it.
    WriteZeroes { offset: u64, len: u32, unmap: bool },
    /// Read the serial number, 20 bytes, into the slot's buffer.
    GetId,
}

/// A place for one request. Its index is the request's tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(u16);

impl Slot {
    /// The slot's index, less than the queue's depth.
    #[inline]
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// The target's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The request succeeded.
    Ok,
    /// The request failed.
    IoError,
    /// The target does not support this request.
    Unsupported,
    /// An undefined status; 255 if the target wrote none.
    Other(u8),
}

impl From<u8> for Status {
    #[inline]
    fn from(byte: u8) -> Status {
        match byte {
            0 => Status::Ok,
            1 => Status::IoError,
            2 => Status::Unsupported,
            other => Status::Other(other),
        }
    }
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The slot, which belongs to the caller again.
    pub slot: Slot,
    /// The target's status.
    pub status: Status,
    /// The number of bytes that the target reports as written, including the status.
    pub written: u32,
}

/// The dimensions of a queue; see [`crate::DiskOptions`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub size: u16,
    pub depth: u16,
    pub packed: bool,
    pub indirect: bool,
    pub event_index: bool,
    /// Bytes of a slot's buffer.
    pub slot_bytes: u32,
    /// Descriptors that a full buffer is divided into.
    pub segments: u16,
}

impl Shape {
    /// Descriptors of the longest chain.
    fn stride(&self) -> u16 {
        self.segments + 2
    }

    fn segment_bytes(&self) -> u32 {
        self.slot_bytes / u32::from(self.segments)
    }

    pub fn ring_bytes(&self) -> u64 {
        if self.packed { PackedRing::bytes(self.size) } else { SplitRing::bytes(self.size) }
            .next_multiple_of(4096)
    }

    fn table_bytes(&self) -> u64 {
        if !self.indirect {
            return 0;
        }
        (u64::from(self.stride()) * Desc::BYTES as u64).next_multiple_of(LINE)
    }

    /// Guest memory that a queue needs. The ring comes first.
    pub fn bytes(&self) -> u64 {
        let depth = u64::from(self.depth);
        self.data_offset() + depth * u64::from(self.slot_bytes)
    }

    fn data_offset(&self) -> u64 {
        let depth = u64::from(self.depth);
        (self.ring_bytes() + depth * (LINE + self.table_bytes())).next_multiple_of(4096)
    }

    /// Checks the dimensions.
    pub fn check(&self) -> Result<()> {
        let complaint = if !self.size.is_power_of_two() || self.size > 1 << 14 {
            "the size of a queue must be a power of two, at most 16384"
        } else if self.depth == 0 || self.slot_bytes == 0 || self.segments == 0 {
            "depth, slot size and segments must not be 0"
        } else if !self.slot_bytes.is_multiple_of(512 * u32::from(self.segments)) {
            "a slot's segments must be multiples of 512 bytes"
        } else if self.segments > 1024 {
            "a slot must have at most 1024 segments"
        } else if u32::from(self.depth) * u32::from(self.per_request()) > u32::from(self.size) {
            "the queue has too few descriptors for its depth"
        } else {
            return Ok(());
        };
        Err(Error::new(Kind::System, complaint))
    }

    /// Descriptors in the ring for one request.
    fn per_request(&self) -> u16 {
        if self.indirect { 1 } else { self.stride() }
    }
}

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

    /// Executes one request and waits for it, using the target's call. Nothing else may be in
    /// flight.
    ///
    /// # Errors
    /// If the request does not complete within a minute; also as for [`Queue::poll`].
    pub fn run(&mut self, slot: Slot, request: Request) -> Result<Completion> {
        assert_eq!(self.in_flight, 0, "other requests are in flight");
        self.submit(slot, request);
        self.publish();
        let mut done = std::mem::take(&mut self.done);
        done.clear();
        let result = if self.wait(PATIENCE) {
            self.poll(&mut done).map(|_| done[0])
        } else {
            Err(Error::new(Kind::Timeout, format!("{request:?} did not complete in time")))
        };
        self.done = done;
        result
    }

    fn run_alone(
        &mut self,
        request: Request,
        before: impl FnOnce(&mut Queue, Slot),
        after: impl FnOnce(&mut Queue, Slot),
    ) -> Result<Status> {
        let slot = self.take().expect("nothing is in flight");
        before(self, slot);
        let completion = self.run(slot, request)?;
        after(self, slot);
        self.give_back(slot);
        Ok(completion.status)
    }

    /// Reads in pieces of a slot's size. Stops at the first failure.
    ///
    /// # Errors
    /// As for [`Queue::run`].
    pub fn read(&mut self, mut offset: u64, bytes: &mut [u8]) -> Result<Status> {
        for piece in bytes.chunks_mut(self.shape.slot_bytes as usize) {
            let len = piece.len() as u32;
            let read = |queue: &mut Queue, slot| queue.read_data(slot, 0, piece);
            let status = self.run_alone(Request::Read { offset, len }, |_, _| (), read)?;
            if status != Status::Ok {
                return Ok(status);
            }
            offset += u64::from(len);
        }
        Ok(Status::Ok)
    }

    /// Writes in pieces of a slot's size. Stops at the first failure.
    ///
    /// # Errors
    /// As for [`Queue::run`].
    pub fn write(&mut self, mut offset: u64, bytes: &[u8]) -> Result<Status> {
        for piece in bytes.chunks(self.shape.slot_bytes as usize) {
            let len = piece.len() as u32;
            let write = |queue: &mut Queue, slot| queue.write_data(slot, 0, piece);
            let status = self.run_alone(Request::Write { offset, len }, write, |_, _| ())?;
            if status != Status::Ok {
                return Ok(status);
            }
            offset += u64::from(len);
        }
        Ok(Status::Ok)
    }

    /// Flushes.
    ///
    /// # Errors
    /// As for [`Queue::run`].
    pub fn flush(&mut self) -> Result<Status> {
        self.run_alone(Request::Flush, |_, _| (), |_, _| ())
    }

    /// Discards a range.
    ///
    /// # Errors
    /// As for [`Queue::run`].
    pub fn discard(&mut self, offset: u64, len: u32) -> Result<Status> {
        self.run_alone(Request::Discard { offset, len }, |_, _| (), |_, _| ())
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// As for [`Queue::run`].
    pub fn write_zeroes(&mut self, offset: u64, len: u32, unmap: bool) -> Result<Status> {
        self.run_alone(Request::WriteZeroes { offset, len, unmap }, |_, _| (), |_, _| ())
    }

    /// Reads the serial number.
    ///
    /// # Errors
    /// As for [`Queue::run`].
    pub fn get_id(&mut self) -> Result<(Status, [u8; 20])> {
        let mut id = [0; 20];
        let clear = |queue: &mut Queue, slot| queue.write_data(slot, 0, &[0; 20]);
        let read = |queue: &mut Queue, slot| queue.read_data(slot, 0, &mut id);
        let status = self.run_alone(Request::GetId, clear, read)?;
        Ok((status, id))
    }
}

#[inline]
fn part_flags(write: bool, next: bool) -> u16 {
    (if write { desc::WRITE } else { 0 }) | (if next { desc::NEXT } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pages;

    /// A target of packed rings, played by the test: no other target supports them.
    struct Target {
        ring: PackedRing,
        next: u16,
        wrap: bool,
        used: u16,
        used_wrap: bool,
    }

    /// A chain as the target reads it.
    struct Chain {
        id: u16,
        taken: u16,
        parts: Vec<(u64, u32, bool)>,
    }

    impl Target {
        fn step(ring: &PackedRing, at: &mut u16, wrap: &mut bool, by: u16) {
            *at += by;
            if *at >= ring.size() {
                *at -= ring.size();
                *wrap = !*wrap;
            }
        }

        fn pop(&mut self) -> Option<Chain> {
            let flags = self.ring.flags(self.next);
            let (avail, used) = (flags & desc::AVAIL != 0, flags & desc::USED != 0);
            if avail != self.wrap || used == self.wrap {
                return None;
            }
            let mut chain = Chain { id: 0, taken: 0, parts: Vec::new() };
            loop {
                let found = self.ring.desc(self.next);
                let turn = desc::AVAIL | desc::USED;
                assert_eq!(found.flags & turn, available(self.wrap), "all of it is there");
                chain.id = found.id;
                chain.taken += 1;
                Target::step(&self.ring, &mut self.next, &mut self.wrap, 1);
                if found.flags & desc::INDIRECT != 0 {
                    for at in (0..u64::from(found.len)).step_by(16) {
                        let mut bytes = [0; 16];
                        self.ring.memory().read(found.addr + at, &mut bytes);
                        let addr = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                        let len = u32::from_le_bytes(bytes[8..12].try_into().unwrap());
                        let flags = u16::from_le_bytes(bytes[14..].try_into().unwrap());
                        assert_eq!(flags & !desc::WRITE, 0);
                        chain.parts.push((addr, len, flags & desc::WRITE != 0));
                    }
                } else {
                    let write = found.flags & desc::WRITE != 0;
                    chain.parts.push((found.addr, found.len, write));
                }
                if found.flags & desc::NEXT == 0 {
                    return Some(chain);
                }
            }
        }

        fn push(&mut self, chain: &Chain, len: u32) {
            let flags = if self.used_wrap { desc::AVAIL | desc::USED } else { 0 };
            self.ring.set_desc(self.used, PackedDesc { addr: 0, len, id: chain.id, flags });
            Target::step(&self.ring, &mut self.used, &mut self.used_wrap, chain.taken);
        }
    }

    fn shape(indirect: bool) -> Shape {
        Shape {
            size: 16,
            depth: 3,
            packed: true,
            indirect,
            event_index: true,
            slot_bytes: 2048,
            segments: 2,
        }
    }

    fn pair(shape: Shape) -> (Queue, Target, Arc<Memory>) {
        let memory = Arc::new(Memory::new(1 << 20, Pages::Small).unwrap());
        let (kick, call) = (Arc::new(Event::new().unwrap()), Arc::new(Event::new().unwrap()));
        let queue = Queue::new(&memory, 4096, shape, kick, call);
        let ring = PackedRing::new(&memory, 4096, shape.size);
        let target = Target { ring, next: 0, wrap: true, used: 0, used_wrap: true };
        (queue, target, memory)
    }

    #[test]
    fn chains_of_a_packed_ring_come_back_in_any_order() {
        for indirect in [false, true] {
            let (mut queue, mut target, memory) = pair(shape(indirect));
            let mut done = Vec::new();
            // With no data, one segment or two, the ring wraps at every position.
            for round in 0..200u64 {
                let slots: Vec<Slot> = std::iter::from_fn(|| queue.take()).collect();
                assert_eq!(slots.len(), 3);
                queue.submit(slots[0], Request::Read { offset: round * 512, len: 512 });
                queue.submit(slots[1], Request::Write { offset: 0, len: 2048 });
                assert!(target.pop().is_none(), "nothing is seen before it is published");
                if round % 3 == 0 {
                    queue.submit(slots[2], Request::Flush);
                } else {
                    queue.give_back(slots[2]);
                }
                queue.publish();
                let mut chains: Vec<Chain> = std::iter::from_fn(|| target.pop()).collect();
                assert_eq!(chains.len(), queue.in_flight());
                let lens = |chain: &Chain| chain.parts.iter().map(|p| p.1).collect::<Vec<_>>();
                assert_eq!(lens(&chains[0]), [16, 512, 1]);
                assert_eq!(lens(&chains[1]), [16, 1024, 1024, 1]);
                let mut header = [0; 16];
                memory.read(chains[0].parts[0].0, &mut header);
                assert_eq!(header[8..], round.to_le_bytes());
                if round % 2 == 0 {
                    chains.reverse();
                }
                for chain in &chains {
                    let (status, _, write) = *chain.parts.last().unwrap();
                    assert!(write);
                    memory.write(status, &[chain.id as u8 % 3]);
                    target.push(chain, 1 + u32::from(chain.id));
                }
                done.clear();
                assert_eq!(queue.poll(&mut done).unwrap(), chains.len());
                for (completion, chain) in done.iter().zip(&chains) {
                    assert_eq!(completion.slot.0, chain.id);
                    assert_eq!(completion.status, Status::from(chain.id as u8 % 3));
                    assert_eq!(completion.written, 1 + u32::from(chain.id));
                    queue.give_back(completion.slot);
                }
                let base = u32::from(target.next | u16::from(target.wrap) << 15);
                assert_eq!(queue.base(), base | base << 16, "both sides are at the same place");
            }
        }
    }

    #[test]
    fn a_packed_ring_is_kicked_when_the_target_asks_for_it() {
        let (mut queue, mut target, memory) = pair(shape(true));
        let [.., device] = target.ring.addresses();
        let event = |off_wrap: u16, flags: u16| {
            memory.write(device, &[off_wrap.to_le_bytes(), flags.to_le_bytes()].concat());
        };
        let mut done = Vec::new();
        for nth in 0..40u16 {
            let (next, wrap) = (target.next, u16::from(target.wrap) << 15);
            // An event at the next descriptor; at the one after it; no kicks; always kick.
            let after = if next == 15 { wrap ^ 0x8000 } else { (next + 1) | wrap };
            let wanted = match nth % 4 {
                0 => (next | wrap, 2, true),
                1 => (after, 2, false),
                2 => (0, 1, false),
                _ => (0, 0, true),
            };
            event(wanted.0, wanted.1);
            let slot = queue.take().unwrap();
            queue.submit(slot, Request::Flush);
            assert_eq!(queue.publish(), wanted.2, "{nth}");
            let chain = target.pop().unwrap();
            target.push(&chain, 1);
            queue.poll(&mut done).unwrap();
            queue.give_back(slot);
        }
    }

    #[test]
    fn what_was_not_in_flight_is_no_completion() {
        for id in [2, 3, 77] {
            let (mut queue, mut target, _memory) = pair(shape(true));
            let slot = queue.take().unwrap();
            queue.submit(slot, Request::Flush);
            queue.publish();
            let chain = target.pop().unwrap();
            target.push(&Chain { id, ..chain }, 1);
            assert_eq!(queue.poll(&mut Vec::new()).unwrap_err().kind(), Kind::Ring);
        }
        let (mut queue, _, memory) = pair(Shape { packed: false, ..shape(false) });
        let ring = SplitRing::new(&memory, 4096, 16);
        let slot = queue.take().unwrap();
        queue.submit(slot, Request::Flush);
        queue.publish();
        ring.set_used_index(2);
        assert_eq!(queue.poll(&mut Vec::new()).unwrap_err().kind(), Kind::Ring);
        let used = ring.addresses()[2];
        for id in [1u8, 4, 99] {
            memory.write(used + 4, &[id, 0, 0, 0, 1, 0, 0, 0]);
            ring.set_used_index(1);
            assert_eq!(queue.poll(&mut Vec::new()).unwrap_err().kind(), Kind::Ring, "{id}");
        }
        memory.write(used + 4, &[0; 8]);
        assert_eq!(queue.poll(&mut Vec::new()).unwrap(), 1);
    }
}
