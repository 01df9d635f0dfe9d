//! The split ring (virtio 1.2, section 2.7).
//!
//! A pop reads the available index once, and then the chain of each head, reading each descriptor
//! once into private memory. A completion fills used entries and moves the used index once for the
//! whole batch; this store publishes the batch. The in-flight region is written around it in the
//! order that [`SplitRing::complete`] shows.
//!
//! This file is hot, on the path of every request: no allocation, no division, no system call.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::memory::dirty::DirtyLog;
use crate::memory::{Area, GuestMemory, Lookup};
use crate::ring::inflight::{InflightArea, SplitInflight};
use crate::ring::request::{Disk, Finished, SEGMENTS_MAX};
use crate::ring::setup::{F_EVENT_IDX, F_INDIRECT_DESC, Fault, Recovered, Setup};
use crate::ring::table::{
    AHEAD, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_LEN, RequestTable,
};

const AVAIL_FLAGS: usize = 0;
const AVAIL_IDX: usize = 2;
const AVAIL_RING: usize = 4;
const AVAIL_F_NO_INTERRUPT: u16 = 1;
const USED_FLAGS: usize = 0;
const USED_IDX: usize = 2;
const USED_RING: usize = 4;
const USED_ENTRY_LEN: usize = 8;
const USED_F_NO_NOTIFY: u16 = 1;

/// A running split ring; see [`Ring`](crate::Ring) for its methods.
#[derive(Debug)]
pub struct SplitRing {
    pub(super) requests: RequestTable,
    desc: Area,
    avail: Area,
    used: Area,
    num: u16,
    mask: u16,
    /// The next available entry to take.
    next_avail: u16,
    /// The next used entry to fill, and the used index that the guest sees.
    next_used: u16,
    event_idx: bool,
    indirect: bool,
    inflight: Option<SplitInflight>,
    /// Heads that an earlier process had taken, last one first.
    pub(super) resubmits: Vec<u16>,
    /// Guest-physical address of the used ring, if writes are logged.
    log_addr: Option<u64>,
}

impl SplitRing {
    pub(super) fn start(
        memory: &GuestMemory,
        setup: &Setup,
        inflight: Option<InflightArea>,
    ) -> Result<(SplitRing, Recovered), Fault> {
        let num = setup.size()?;
        if !num.is_power_of_two() {
            return Err(Fault::Size(setup.num));
        }
        let event_idx = setup.has(F_EVENT_IDX);
        let event = if event_idx { 2 } else { 0 };
        let desc = Setup::area(memory, setup.desc, num * DESC_LEN, 16, "descriptor table")?;
        let avail = AVAIL_RING + 2 * num + event;
        let avail = Setup::area(memory, setup.avail, avail, 2, "available ring")?;
        let used = USED_RING + USED_ENTRY_LEN * num + event;
        let used = Setup::area(memory, setup.used, used, 4, "used ring")?;
        let base = u16::try_from(setup.base).map_err(|_| Fault::Base(setup.base))?;
        let next_used = used.load_u16(USED_IDX, Acquire);

        let mut recovered = Recovered::default();
        let mut next_avail = base;
        let mut resubmits = Vec::new();
        let inflight = match inflight {
            None => None,
            Some(region) => {
                let fresh = region.is_fresh();
                let (inflight, heads) = SplitInflight::start(region, setup.num, next_used)?;
                if !fresh {
                    next_avail = next_used.wrapping_add(heads.len() as u16);
                    recovered.base_differs = base != next_avail && base != next_used;
                }
                resubmits = heads;
                Some(inflight)
            }
        };
        recovered.resubmits = resubmits.len();
        resubmits.reverse();
        let ring = SplitRing {
            requests: RequestTable::new(num),
            desc,
            avail,
            used,
            num: setup.num,
            mask: setup.num - 1,
            next_avail,
            next_used,
            event_idx,
            indirect: setup.has(F_INDIRECT_DESC),
            inflight,
            resubmits,
            log_addr: setup.log,
        };
        Ok((ring, recovered))
    }

    /// Takes up to `max` requests; [`Ring::pop`](crate::Ring::pop) does the rest.
    #[inline]
    pub(super) fn take(
        &mut self,
        lookup: &mut Lookup<'_>,
        disk: &Disk,
        max: usize,
        tags: &mut Vec<u16>,
    ) -> Result<usize, Fault> {
        let mut taken = 0;
        while taken < max && self.requests.may_go_on() {
            let Some(head) = self.resubmits.pop() else { break };
            // The head is marked, and `next_avail` is already after it.
            self.requests.free_slot(head)?;
            self.read_chain(lookup, head)?;
            self.requests.admit(head, lookup, disk, tags);
            taken += 1;
        }
        if !self.resubmits.is_empty() {
            return Ok(taken);
        }
        let available = self.avail.load_u16(AVAIL_IDX, Acquire);
        let count = available.wrapping_sub(self.next_avail);
        if count > self.num {
            return Err(Fault::AvailableJump { next: self.next_avail, available });
        }
        let count = usize::from(count).min(max - taken);
        // Fetching memory of another processor takes long, so prefetch what is likely to be needed.
        self.requests.prefetch(self.requests.latest, lookup);
        self.used.prefetch(USED_RING + USED_ENTRY_LEN * usize::from(self.next_used & self.mask));
        for ahead in 0..AHEAD.min(count as u16) {
            self.prefetch(ahead, lookup);
        }
        for nth in 0..count {
            if !self.requests.may_go_on() {
                break;
            }
            if nth + usize::from(AHEAD) < count {
                self.prefetch(AHEAD, lookup);
            }
            let at = AVAIL_RING + 2 * usize::from(self.next_avail & self.mask);
            let head = self.avail.load_u16(at, Relaxed);
            self.requests.free_slot(head)?;
            self.read_chain(lookup, head)?;
            if let Some(inflight) = &mut self.inflight {
                inflight.mark(head);
            }
            self.next_avail = self.next_avail.wrapping_add(1);
            self.requests.admit(head, lookup, disk, tags);
            taken += 1;
        }
        Ok(taken)
    }

    /// Prefetches for the head `ahead` entries later. It is read again and checked in its turn.
    #[inline(always)]
    fn prefetch(&self, ahead: u16, lookup: &Lookup<'_>) {
        let at = usize::from(self.next_avail.wrapping_add(ahead) & self.mask);
        let head = self.avail.load_u16(AVAIL_RING + 2 * at, Relaxed);
        self.requests.prefetch(head, lookup);
    }

    /// Copies a head's chain into private memory.
    #[inline]
    fn read_chain(&mut self, lookup: &mut Lookup<'_>, head: u16) -> Result<(), Fault> {
        let requests = &mut self.requests;
        requests.chain.clear();
        let mut at = head;
        for _ in 0..self.num.min(SEGMENTS_MAX as u16) {
            let [addr, word] = self.desc.load_pair(usize::from(at) * DESC_LEN, Relaxed);
            let (len, flags, next) = (word as u32, (word >> 32) as u16, (word >> 48) as u16);
            if flags & DESC_F_INDIRECT != 0 {
                if !self.indirect || flags & DESC_F_NEXT != 0 {
                    return Err(Fault::IndirectUnexpected);
                }
                requests.read_indirect(lookup, addr, len, true)?;
                return requests.chain.finish();
            }
            requests.chain.push(addr, len, flags & DESC_F_WRITE != 0)?;
            if flags & DESC_F_NEXT == 0 {
                return requests.chain.finish();
            }
            if next >= self.num {
                return Err(Fault::NextRange(next));
            }
            at = next;
        }
        Err(Fault::ChainTooLong)
    }

    /// [`Ring::complete`](crate::Ring::complete), of a ring that is not broken.
    #[inline]
    pub(super) fn complete(
        &mut self,
        memory: &GuestMemory,
        log: Option<&DirtyLog>,
        finished: &[Finished],
    ) -> usize {
        // Write status bytes with their log, and the used entries, which the guest does not read
        // before the index moves.
        let (first, mask, used) = (self.next_used, self.mask, &self.used);
        let mut next = first;
        self.requests.answer(memory, log, finished, |head, len, _| {
            let at = USED_RING + USED_ENTRY_LEN * usize::from(next & mask);
            used.store_u32(at, u32::from(head), Relaxed);
            used.store_u32(at + 4, len, Relaxed);
            next = next.wrapping_add(1);
        });
        let count = self.requests.batch.len();
        if count == 0 {
            return 0;
        }
        if let Some(log) = log {
            self.log_entries(log, first, count);
        }
        if let Some(inflight) = &mut self.inflight {
            for &head in &self.requests.batch {
                inflight.link(head);
            }
        }
        self.next_used = next;
        self.used.store_u16(USED_IDX, next, Release);
        if let (Some(log), Some(addr)) = (log, self.log_addr) {
            log.mark(addr.saturating_add(USED_IDX as u64), 2);
        }
        if let Some(inflight) = &mut self.inflight {
            for &head in &self.requests.batch {
                inflight.clear(head);
            }
            inflight.end_batch(next);
        }
        self.requests.batch.clear();
        self.requests.used_since = self.requests.used_since.saturating_add(count as u32);
        count
    }

    fn log_entries(&self, log: &DirtyLog, first: u16, count: usize) {
        let Some(addr) = self.log_addr else { return };
        let first = usize::from(first & self.mask);
        let to_end = count.min(usize::from(self.num) - first);
        for (at, count) in [(first, to_end), (0, count - to_end)] {
            let offset = (USED_RING + USED_ENTRY_LEN * at) as u64;
            log.mark(addr.saturating_add(offset), (USED_ENTRY_LEN * count) as u64);
        }
    }

    /// Whether the guest asks for an interrupt after `since` completions (packed: used
    /// descriptors).
    #[inline]
    pub(super) fn wants_signal(&self, since: u32) -> bool {
        if self.event_idx {
            let event = self.avail.load_u16(AVAIL_RING + 2 * usize::from(self.num), Relaxed);
            u32::from(self.next_used.wrapping_sub(event).wrapping_sub(1)) < since
        } else {
            self.avail.load_u16(AVAIL_FLAGS, Relaxed) & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    fn avail_event(&self) -> usize {
        USED_RING + USED_ENTRY_LEN * usize::from(self.num)
    }

    /// Writes a field of the used ring that controls kicks.
    fn set_kick(&self, at: usize, value: u16, log: Option<&DirtyLog>) {
        self.used.store_u16(at, value, Relaxed);
        if let (Some(log), Some(addr)) = (log, self.log_addr) {
            log.mark(addr.saturating_add(at as u64), 2);
        }
    }

    pub(super) fn request_kick(&self, log: Option<&DirtyLog>) {
        if self.event_idx {
            self.set_kick(self.avail_event(), self.next_avail, log);
        } else {
            self.set_kick(USED_FLAGS, 0, log);
        }
    }

    pub(super) fn refuse_kick(&self, log: Option<&DirtyLog>) {
        if self.event_idx {
            // An index that was just passed is reached again after 65536 requests: at worst a
            // spurious kick.
            self.set_kick(self.avail_event(), self.next_avail.wrapping_sub(1), log);
        } else {
            self.set_kick(USED_FLAGS, USED_F_NO_NOTIFY, log);
        }
    }

    #[inline]
    pub(super) fn has_work(&self) -> bool {
        !self.resubmits.is_empty() || self.avail.load_u16(AVAIL_IDX, Acquire) != self.next_avail
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.next_avail)
    }

    pub(super) fn set_log(&mut self, log: Option<u64>) {
        self.log_addr = log;
    }

    pub(super) fn log_all(&self, log: &DirtyLog) {
        if let Some(addr) = self.log_addr {
            log.mark(addr, self.used.len() as u64);
        }
    }

    pub(super) fn is_lost(&self) -> bool {
        let inflight = self.inflight.as_ref().is_some_and(SplitInflight::is_lost);
        inflight || [&self.desc, &self.avail, &self.used].into_iter().any(Area::is_lost)
    }
}
