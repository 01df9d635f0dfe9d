//! A ring of either format, and what both formats share.
//!
//! In one turn of a queue's poller, [`Ring::pop`] takes a batch of chains, records them in the
//! in-flight region and parses them. The poller submits the [`Ring::request`] of each tag to the
//! device. [`Ring::complete`] returns a batch to the guest, and [`Ring::should_signal`] tells
//! whether the guest wants an interrupt. Before the core sleeps, the poller calls
//! [`Ring::arm_kick`]; after it wakes, [`Ring::disarm_kick`].
//!
//! A ring belongs to one core. An invalid request is answered with a status. An inconsistency of
//! the ring itself breaks it: it pops and completes nothing more until the front end stops it and
//! starts a new one. Between pop and completion a request is named by its tag, which is the head or
//! the buffer id that the guest chose, so tags need no lookup.

pub(crate) mod inflight;
pub(crate) mod packed;
pub(crate) mod request;
pub(crate) mod split;

use crate::memory::dirty::DirtyLog;
use crate::memory::{Area, GuestMemory, Lookup};
pub use crate::protocol::config::feature::{
    EVENT_IDX as F_EVENT_IDX, INDIRECT_DESC as F_INDIRECT_DESC, RING_PACKED as F_RING_PACKED,
};
use crate::ring::inflight::InflightArea;
use crate::ring::packed::PackedRing;
use crate::ring::request::{
    Chain, Disk, Finished, Kind, Request, SEGMENTS_MAX, Slot, Status, parse,
};
use crate::ring::split::SplitRing;

pub(crate) const DESC_F_NEXT: u16 = 1;
pub(crate) const DESC_F_WRITE: u16 = 2;
pub(crate) const DESC_F_INDIRECT: u16 = 4;
pub(crate) const DESC_LEN: usize = 16;

/// Largest ring.
const NUM_MAX: u16 = 1 << 15;
/// How many requests ahead of the current one are prefetched.
pub(crate) const AHEAD: u16 = 6;
/// A batch ends early after this many descriptors, so that one ring cannot occupy a core for long.
const WORK_MAX: usize = 4096;

/// Why a ring is broken, or was not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The ring's size is zero, too large, or (split) not a power of two.
    Size(u16),
    /// A part of the ring is not in guest memory.
    Unmapped(&'static str),
    /// A part of the ring is not aligned as required.
    Misaligned(&'static str),
    /// The start index is outside the ring.
    Base(u32),
    /// The in-flight region is inconsistent, or contradicts the ring.
    Inflight(&'static str),
    /// The available index is further ahead than the ring is long.
    AvailableJump {
        /// Our next index.
        next: u16,
        /// The guest's index.
        available: u16,
    },
    /// A head or buffer id is outside the ring.
    HeadRange(u16),
    /// A head or buffer id is already in flight.
    HeadBusy(u16),
    /// A descriptor's successor is outside its table.
    NextRange(u16),
    /// A chain is a loop, or longer than the ring or [`SEGMENTS_MAX`].
    ChainTooLong,
    /// A chain has more than 4 GiB.
    ChainTooLarge,
    /// A readable descriptor after a writable one.
    ReadableAfterWritable,
    /// An indirect table without the feature, inside another, or not at the end of its chain.
    IndirectUnexpected,
    /// An indirect table's length is 0, too large, or not a multiple of a descriptor's length.
    IndirectLength(u32),
    /// An indirect table is not in guest memory.
    IndirectUnmapped(u64),
    /// Memory that the front end shared no longer exists.
    MemoryLost,
    /// The guest kicks all the time without requests.
    KickStorm,
    /// The system refuses to wait for the kick.
    KickUnheard,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Size(num) => write!(f, "ring of {num} descriptors"),
            Fault::Unmapped(part) => write!(f, "{part} is outside guest memory"),
            Fault::Misaligned(part) => write!(f, "{part} is not aligned"),
            Fault::Base(base) => write!(f, "start index {base:#x} is outside the ring"),
            Fault::Inflight(what) => write!(f, "in-flight region: {what}"),
            Fault::AvailableJump { next, available } => {
                write!(f, "available index jumps from {next} to {available}")
            }
            Fault::HeadRange(head) => write!(f, "head {head} is outside the ring"),
            Fault::HeadBusy(head) => write!(f, "head {head} is in flight already"),
            Fault::NextRange(next) => write!(f, "descriptor {next} is outside its table"),
            Fault::ChainTooLong => write!(f, "descriptor chain loops or is too long"),
            Fault::ChainTooLarge => write!(f, "descriptor chain has more than 4 GiB"),
            Fault::ReadableAfterWritable => write!(f, "readable descriptor after a writable one"),
            Fault::IndirectUnexpected => {
                write!(f, "indirect table in a place where it is not allowed")
            }
            Fault::IndirectLength(len) => write!(f, "indirect table of {len} bytes"),
            Fault::IndirectUnmapped(addr) => {
                write!(f, "indirect table at {addr:#x} is outside guest memory")
            }
            Fault::KickStorm => write!(f, "kicked all the time without requests"),
            Fault::KickUnheard => write!(f, "cannot wait for its kick"),
            Fault::MemoryLost => {
                write!(
                    f,
                    "guest memory is lost: its file was truncated, or the host is out of pages"
                )
            }
        }
    }
}

impl std::error::Error for Fault {}

/// What a ring is started with.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Number of descriptors.
    pub num: u16,
    /// Front end's address of the descriptors.
    pub desc: u64,
    /// Front end's address of the available ring, or of a packed ring's driver event area.
    pub avail: u64,
    /// Front end's address of the used ring, or of a packed ring's device event area.
    pub used: u64,
    /// Guest-physical address under which writes to the used ring are marked in the dirty log, if
    /// they are logged.
    pub log: Option<u64>,
    /// The front end's start position: the available index; of a packed ring also the used index
    /// in the upper half, each with its wrap counter in bit 15.
    pub base: u32,
    /// Negotiated virtio features.
    pub features: u64,
}

impl Setup {
    pub(crate) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// The checked number of descriptors.
    pub(crate) fn size(&self) -> Result<usize, Fault> {
        match self.num {
            num @ 1..=NUM_MAX => Ok(usize::from(num)),
            num => Err(Fault::Size(num)),
        }
    }

    /// Maps and checks a part of the ring.
    pub(crate) fn area(
        memory: &GuestMemory,
        addr: u64,
        len: usize,
        align: usize,
        name: &'static str,
    ) -> Result<Area, Fault> {
        let area = memory.user_area(addr, len).ok_or(Fault::Unmapped(name))?;
        if !area.is_aligned(align) {
            return Err(Fault::Misaligned(name));
        }
        Ok(area)
    }
}

/// What recovery found when a ring was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Unfinished requests of an earlier process. The first pops return them again, in their
    /// order.
    pub resubmits: usize,
    /// Whether the front end's start index is neither the expected one nor the used index, to
    /// which a front end falls back.
    pub base_differs: bool,
}

/// A running ring.
#[derive(Debug)]
pub enum Ring {
    /// Descriptor table, available ring and used ring (virtio 1.2, section 2.7).
    Split(Box<SplitRing>),
    /// One descriptor ring (section 2.8).
    Packed(Box<PackedRing>),
}

/// Evaluates the expression for the ring of either format.
macro_rules! either {
    ($self:expr, $ring:ident => $call:expr) => {
        match $self {
            Ring::Split($ring) => $call,
            Ring::Packed($ring) => $call,
        }
    };
}

impl Ring {
    /// Starts a ring at the position that the guest and the in-flight region have. With a region,
    /// unfinished requests of an earlier process are popped again, and the front end's start index
    /// is used only if the region is fresh.
    pub fn start(
        memory: &GuestMemory,
        setup: &Setup,
        inflight: Option<InflightArea>,
    ) -> Result<(Ring, Recovered), Fault> {
        if setup.has(F_RING_PACKED) {
            let (ring, recovered) = PackedRing::start(memory, setup, inflight)?;
            Ok((Ring::Packed(Box::new(ring)), recovered))
        } else {
            let (ring, recovered) = SplitRing::start(memory, setup, inflight)?;
            Ok((Ring::Split(Box::new(ring)), recovered))
        }
    }

    /// Takes up to `max` requests and appends the tags of those that the device must execute. All
    /// are recorded in the in-flight region. Requests that are answered without the device wait for
    /// the next [`Ring::complete`]. Returns how many requests were taken. After an error the ring
    /// is broken and nothing is appended.
    #[inline]
    pub fn pop(
        &mut self,
        memory: &GuestMemory,
        disk: &Disk,
        max: usize,
        tags: &mut Vec<u16>,
    ) -> Result<usize, Fault> {
        either!(self, ring => ring.pop(memory, disk, max, tags))
    }

    /// The request of a tag that was popped and is not completed.
    #[inline]
    pub fn request(&self, tag: u16) -> Request<'_> {
        self.requests().slots[usize::from(tag)].request(tag)
    }

    /// Returns requests to the guest in one batch, together with those answered since the last
    /// call: status bytes, dirty log, used entries, in-flight list, used index, in-flight marks.
    /// Returns how many. A broken ring completes nothing.
    #[inline]
    pub fn complete(
        &mut self,
        memory: &GuestMemory,
        log: Option<&DirtyLog>,
        finished: &[Finished],
    ) -> usize {
        either!(self, ring => ring.complete(memory, log, finished))
    }

    /// Whether to interrupt the guest for the completions since the last call. Always true once
    /// after a start, because the interrupt of an earlier process may have been lost.
    #[inline]
    pub fn should_signal(&mut self) -> bool {
        either!(self, ring => ring.should_signal())
    }

    /// Asks the guest to kick at its next request, before the core sleeps. Returns false if a
    /// request is already there: no kick will come for it.
    #[must_use]
    pub fn arm_kick(&mut self, log: Option<&DirtyLog>) -> bool {
        either!(self, ring => ring.arm_kick(log))
    }

    /// Tells the guest that kicks are not needed.
    pub fn disarm_kick(&mut self, log: Option<&DirtyLog>) {
        either!(self, ring => ring.disarm_kick(log))
    }

    /// Whether a pop would find something.
    #[inline]
    pub fn has_work(&self) -> bool {
        either!(self, ring => ring.has_work())
    }

    /// The position at which another process would continue, in the form of [`Setup::base`].
    pub fn base(&self) -> u32 {
        either!(self, ring => ring.base())
    }

    /// Number of requests that were popped and are not completed, including those answered without
    /// the device.
    pub fn in_flight(&self) -> usize {
        self.requests().in_flight
    }

    /// Tags of requests that were popped and are not completed.
    pub(crate) fn tags_in_flight(&self) -> impl Iterator<Item = u16> + '_ {
        let slots = self.requests().slots.iter().zip(0..=u16::MAX);
        slots.filter(|(slot, _)| slot.busy).map(|(_, tag)| tag)
    }

    /// Kinds of the requests that were popped and are not completed.
    pub(crate) fn kinds_in_flight(&self) -> impl Iterator<Item = Kind> + '_ {
        self.requests().slots.iter().filter(|slot| slot.busy).map(|slot| slot.request(0).kind)
    }

    /// Number of requests answered without the device that wait for the next [`Ring::complete`].
    pub fn answered(&self) -> usize {
        self.requests().answered.len()
    }

    /// Number of requests of an earlier process that are not popped yet. They come before all
    /// others, so popping at most this many takes nothing new: a stopping ring finishes them first.
    pub fn resubmits(&self) -> usize {
        either!(self, ring => ring.resubmits())
    }

    /// Why the ring is broken, if it is.
    pub fn broken(&self) -> Option<Fault> {
        self.requests().broken
    }

    /// Whether memory of the ring itself or its in-flight region is lost: see [`Area::is_lost`].
    pub fn is_lost(&self) -> bool {
        either!(self, ring => ring.is_lost())
    }

    /// Breaks the ring if it is not broken yet. Drops the requests in `tags`, which were popped and
    /// not submitted.
    pub fn break_off(&mut self, fault: Fault, tags: &mut Vec<u16>) -> Fault {
        let requests = either!(self, ring => &mut ring.requests);
        requests.broken.unwrap_or_else(|| requests.break_ring(fault, tags, 0))
    }

    /// Number of malformed requests.
    pub fn malformed(&self) -> u64 {
        self.requests().malformed
    }

    /// Changes whether writes to the ring are logged: see [`Setup::log`].
    pub fn set_log(&mut self, log: Option<u64>) {
        either!(self, ring => ring.set_log(log))
    }

    /// Marks in a dirty log every part of the ring that the device writes. To be called when a ring
    /// starts with an active log: a killed process may have written without marking.
    pub fn log_all(&self, log: &DirtyLog) {
        either!(self, ring => ring.log_all(log))
    }

    fn requests(&self) -> &Requests {
        either!(self, ring => &ring.requests)
    }
}

/// The requests of a ring of either format.
#[derive(Debug)]
pub(crate) struct Requests {
    /// Indexed by tag.
    pub(crate) slots: Box<[Slot]>,
    /// Requests answered without the device since the last completion.
    answered: Vec<Finished>,
    /// The tags of the current completion; empty before and after.
    pub(crate) batch: Vec<u16>,
    /// The chain being read.
    pub(crate) chain: Chain,
    /// The tag completed last. A guest with one request at a time uses it for the next one.
    pub(crate) latest: u16,
    /// The region of guest memory that the last address was in.
    pub(crate) region: usize,
    /// Number of descriptors that this pop may still read.
    work: usize,
    pub(crate) broken: Option<Fault>,
    in_flight: usize,
    malformed: u64,
    /// Used entries (packed: descriptors) since the last check for a signal.
    pub(crate) used_since: u32,
    /// Signal once, whatever the guest says.
    pub(crate) signal_due: bool,
}

impl Requests {
    pub(crate) fn new(num: usize) -> Requests {
        Requests {
            slots: (0..num).map(|_| Slot::new()).collect(),
            answered: Vec::with_capacity(num),
            batch: Vec::with_capacity(num),
            chain: Chain::default(),
            latest: 0,
            region: 0,
            work: 0,
            broken: None,
            in_flight: 0,
            malformed: 0,
            used_since: 0,
            signal_due: true,
        }
    }

    /// Begins a pop.
    pub(crate) fn begin(&mut self) -> Result<(), Fault> {
        self.work = WORK_MAX;
        self.broken.map_or(Ok(()), Err)
    }

    /// Ends a failed pop: the requests that it took are neither submitted nor completed.
    #[cold]
    pub(crate) fn break_ring(&mut self, fault: Fault, tags: &mut Vec<u16>, before: usize) -> Fault {
        for tag in tags.drain(before..) {
            self.slots[usize::from(tag)].busy = false;
            self.in_flight -= 1;
        }
        self.drop_all(&[]);
        self.broken = Some(fault);
        fault
    }

    /// Whether this pop may read more descriptors.
    #[inline]
    pub(crate) fn may_go_on(&self) -> bool {
        self.work > 0
    }

    /// Prefetches what a request with this tag is likely to need. Any tag is valid.
    #[inline(always)]
    pub(crate) fn prefetch(&self, tag: u16, lookup: &Lookup<'_>) {
        if let Some(slot) = self.slots.get(usize::from(tag)) {
            slot.prefetch(lookup);
        }
    }

    /// The slot of a tag that the guest chose, if the tag is valid and the slot is free.
    #[inline]
    pub(crate) fn free_slot(&mut self, tag: u16) -> Result<&mut Slot, Fault> {
        match self.slots.get_mut(usize::from(tag)) {
            Some(slot) if !slot.busy => Ok(slot),
            Some(_) => Err(Fault::HeadBusy(tag)),
            None => Err(Fault::HeadRange(tag)),
        }
    }

    /// Turns the chain that was read into a request, for the device or for the next completion.
    #[inline]
    pub(crate) fn admit(
        &mut self,
        tag: u16,
        lookup: &mut Lookup<'_>,
        disk: &Disk,
        tags: &mut Vec<u16>,
    ) {
        self.work = self.work.saturating_sub(self.chain.len());
        let slot = &mut self.slots[usize::from(tag)];
        slot.busy = true;
        self.in_flight += 1;
        match parse(slot, &self.chain, lookup, disk) {
            None => tags.push(tag),
            Some(status) => {
                self.malformed += u64::from(status != Status::Ok || !slot.has_status());
                self.answered.push(Finished { tag, status });
            }
        }
    }

    /// Reads the indirect table that ends a chain. `linked`: its descriptors name their successors
    /// (split) or follow each other (packed).
    pub(crate) fn read_indirect(
        &mut self,
        lookup: &mut Lookup<'_>,
        addr: u64,
        len: u32,
        linked: bool,
    ) -> Result<(), Fault> {
        let entries = len / DESC_LEN as u32;
        if len == 0 || !len.is_multiple_of(DESC_LEN as u32) || entries > SEGMENTS_MAX as u32 {
            return Err(Fault::IndirectLength(len));
        }
        let mut at = 0;
        for _ in 0..entries {
            let desc = addr
                .checked_add(u64::from(at) * DESC_LEN as u64)
                .and_then(|addr| lookup.read_pair(addr))
                .ok_or(Fault::IndirectUnmapped(addr))?;
            let flags = (desc[1] >> 32) as u16;
            // The upper half of the word is {flags, next} in split rings and {id, flags} in packed
            // rings.
            let flags = if linked { flags } else { (desc[1] >> 48) as u16 };
            if flags & DESC_F_INDIRECT != 0 {
                return Err(Fault::IndirectUnexpected);
            }
            self.chain.push(desc[0], desc[1] as u32, flags & DESC_F_WRITE != 0)?;
            at += 1;
            if linked {
                if flags & DESC_F_NEXT == 0 {
                    return Ok(());
                }
                let next = (desc[1] >> 48) as u16;
                if u32::from(next) >= entries {
                    return Err(Fault::NextRange(next));
                }
                at = u32::from(next);
            }
        }
        if linked { Err(Fault::ChainTooLong) } else { Ok(()) }
    }

    /// Forms a batch of the answered requests and those that the device finished: writes each
    /// status byte, and calls `each` with tag and used length. Ignores tags that are not in flight.
    #[inline]
    pub(crate) fn answer(
        &mut self,
        memory: &GuestMemory,
        log: Option<&DirtyLog>,
        finished: &[Finished],
        mut each: impl FnMut(u16, u32, &Slot),
    ) {
        let mut lookup = memory.lookup(self.region);
        let (slots, batch) = (&mut self.slots, &mut self.batch);
        let mut answer = |&Finished { tag, status }: &Finished| {
            if let Some(slot) = slots.get_mut(usize::from(tag)).filter(|slot| slot.busy) {
                let len = slot.answer(status, &mut lookup, log);
                slot.busy = false;
                each(tag, len, slot);
                batch.push(tag);
            }
        };
        if !self.answered.is_empty() {
            self.answered.drain(..).for_each(|finished| answer(&finished));
        }
        finished.iter().for_each(answer);
        self.in_flight -= self.batch.len();
        self.latest = self.batch.last().copied().unwrap_or(self.latest);
        self.region = lookup.region();
    }

    /// Frees the requests of a broken ring without completing them.
    #[cold]
    pub(crate) fn drop_all(&mut self, finished: &[Finished]) {
        for &Finished { tag, .. } in self.answered.iter().chain(finished) {
            if let Some(slot) = self.slots.get_mut(usize::from(tag)).filter(|slot| slot.busy) {
                slot.busy = false;
                self.in_flight -= 1;
            }
        }
        self.answered.clear();
    }
}
