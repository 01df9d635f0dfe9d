//! The requests in flight of a ring of either format, by tag.
//!
//! This file is hot, on the path of every request: no allocation, no division, no system call.

use crate::memory::dirty::DirtyLog;
use crate::memory::{GuestMemory, Lookup};
use crate::ring::request::{Chain, Disk, Finished, SEGMENTS_MAX, Slot, Status, parse};
use crate::ring::setup::Fault;

pub(crate) const DESC_F_NEXT: u16 = 1;
pub(crate) const DESC_F_WRITE: u16 = 2;
pub(crate) const DESC_F_INDIRECT: u16 = 4;
pub(crate) const DESC_LEN: usize = 16;

/// How many requests ahead of the current one are prefetched.
pub(crate) const AHEAD: u16 = 6;
/// A batch ends early after this many descriptors, so that one ring cannot occupy a core for long.
const WORK_MAX: usize = 4096;

/// The requests of a ring of either format.
#[derive(Debug)]
pub(crate) struct RequestTable {
    /// Indexed by tag.
    pub(crate) slots: Box<[Slot]>,
    /// Requests answered without the device since the last completion.
    pub(super) answered: Vec<Finished>,
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
    pub(super) in_flight: usize,
    pub(super) malformed: u64,
    /// Used entries (packed: descriptors) since the last check for a signal.
    pub(crate) used_since: u32,
    /// Signal once, whatever the guest says.
    pub(crate) signal_due: bool,
}

impl RequestTable {
    pub(crate) fn new(num: usize) -> RequestTable {
        RequestTable {
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
