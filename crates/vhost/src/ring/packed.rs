//! The packed ring (virtio 1.2, section 2.8).
//!
//! Driver and device write one array of descriptors in turn. Two bits of each descriptor tell which
//! of them owns it in this lap. A completion writes one used descriptor for each chain, at the
//! position of the oldest chain that is not yet completed, so it may overwrite descriptors of
//! chains in flight: the in-flight region therefore has copies. In a batch the first used
//! descriptor is written last. The guest reads them in order, so this store publishes the whole
//! batch.
//!
//! This file is hot, on the path of every request: no allocation, no division, no system call.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::memory::dirty::DirtyLog;
use crate::memory::{Area, GuestMemory, Lookup};
use crate::ring::inflight::{InflightArea, PackedChain, PackedInflight, Position};
use crate::ring::request::{Disk, Finished, SEGMENTS_MAX};
use crate::ring::setup::{F_EVENT_IDX, F_INDIRECT_DESC, Fault, Recovered, Setup};
use crate::ring::table::{
    AHEAD, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_LEN, RequestTable,
};

const DESC_F_AVAIL: u16 = 1 << 7;
const DESC_F_USED: u16 = 1 << 15;
/// {u16 off_wrap, u16 flags}
const EVENT_LEN: usize = 4;
const EVENT_DISABLE: u32 = 1;
const EVENT_DESC: u32 = 2;
const WRAP: u16 = 1 << 15;

/// A running packed ring; see [`Ring`](crate::Ring) for its methods.
#[derive(Debug)]
pub struct PackedRing {
    pub(super) requests: RequestTable,
    desc: Area,
    driver: Area,
    device: Area,
    num: u16,
    next_avail: Position,
    next_used: Position,
    /// Descriptors between the two positions: taken and not completed.
    taken: u16,
    event_idx: bool,
    indirect: bool,
    inflight: Option<PackedInflight>,
    /// Chains that an earlier process had taken, last one first.
    pub(super) resubmits: Vec<PackedChain>,
    /// The ring's descriptors of the chain being read, in their format there: {addr, len | id |
    /// flags}.
    descs: Vec<[u64; 2]>,
    /// The used lengths of the current completion.
    lens: Vec<u32>,
    /// Guest-physical addresses of the descriptors and of the device event area. They are derived
    /// from the ring's own addresses: the front end's log address is that of a used ring, which
    /// packed rings do not have.
    guest_addrs: Option<(u64, u64)>,
    /// These addresses, if writes are logged.
    log_addrs: Option<(u64, u64)>,
}

impl PackedRing {
    pub(super) fn start(
        memory: &GuestMemory,
        setup: &Setup,
        inflight: Option<InflightArea>,
    ) -> Result<(PackedRing, Recovered), Fault> {
        let num = setup.size()?;
        let desc = Setup::area(memory, setup.desc, num * DESC_LEN, 16, "descriptor ring")?;
        let driver = Setup::area(memory, setup.avail, EVENT_LEN, 4, "driver event area")?;
        let device = Setup::area(memory, setup.used, EVENT_LEN, 4, "device event area")?;
        let guest_addrs = || {
            let desc = memory.user_to_guest(setup.desc, (num * DESC_LEN) as u64)?;
            Some((desc, memory.user_to_guest(setup.used, EVENT_LEN as u64)?))
        };
        let guest_addrs = guest_addrs();
        let position = |half: u16| Position { index: half & !WRAP, wrap: half & WRAP != 0 };
        let mut next_avail = position(setup.base as u16);
        let mut next_used = position((setup.base >> 16) as u16);

        let mut recovered = Recovered::default();
        let mut resubmits = Vec::new();
        let fresh = inflight.as_ref().is_none_or(InflightArea::is_fresh);
        if fresh && next_avail.index.max(next_used.index) >= setup.num {
            return Err(Fault::Base(setup.base));
        }
        let inflight = match inflight {
            None => None,
            Some(region) => {
                let (inflight, state) = PackedInflight::start(
                    region,
                    setup.num,
                    next_used,
                    |at| used_flag(flags_of(load_word(&desc, at.index))) == at.wrap,
                    |at| scrub(&desc, at),
                )?;
                if !fresh {
                    next_used = state.used;
                    let count = state.chains.iter().map(|chain| chain.descs.len() as u16).sum();
                    let base = next_avail;
                    next_avail = next_used.advance(count, setup.num);
                    recovered.base_differs = base != next_avail && base != next_used;
                }
                resubmits = state.chains;
                Some(inflight)
            }
        };
        let taken =
            descriptors_between(next_used, next_avail, setup.num).ok_or(Fault::Base(setup.base))?;
        recovered.resubmits = resubmits.len();
        resubmits.reverse();
        let ring = PackedRing {
            requests: RequestTable::new(num),
            desc,
            driver,
            device,
            num: setup.num,
            next_avail,
            next_used,
            taken,
            event_idx: setup.has(F_EVENT_IDX),
            indirect: setup.has(F_INDIRECT_DESC),
            inflight,
            resubmits,
            descs: Vec::new(),
            lens: Vec::with_capacity(num),
            guest_addrs,
            log_addrs: guest_addrs.filter(|_| setup.log.is_some()),
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
        let mut count = 0;
        while count < max && self.requests.may_go_on() {
            let Some(chain) = self.resubmits.pop() else { break };
            // The chain is marked, and `next_avail` is already after it.
            self.requests.chain.clear();
            let mut id = 0;
            for (i, &desc) in chain.descs.iter().enumerate() {
                let more = self.read_desc(lookup, desc)?;
                if more != (i + 1 < chain.descs.len()) {
                    return Err(Fault::Inflight("chain does not end at its last entry"));
                }
                id = id_of(desc[1]);
            }
            self.requests.chain.finish()?;
            let slot = self.requests.free_slot(id)?;
            (slot.entry, slot.last) = (chain.entry, chain.last);
            slot.count = chain.descs.len() as u16;
            self.requests.admit(id, lookup, disk, tags);
            count += 1;
        }
        if !self.resubmits.is_empty() {
            return Ok(count);
        }
        // Prefetch, as in a split ring.
        self.requests.prefetch(self.requests.latest, lookup);
        for ahead in 0..AHEAD {
            self.prefetch(ahead, lookup);
        }
        while count < max && self.requests.may_go_on() {
            self.prefetch(AHEAD, lookup);
            let first = load_word(&self.desc, self.next_avail.index);
            if !is_available(flags_of(first), self.next_avail.wrap) {
                break;
            }
            let next = self.read_chain(lookup, first)?;
            let id = self.descs.last().map_or(0, |desc| id_of(desc[1]));
            let length = self.descs.len() as u16;
            let slot = self.requests.free_slot(id)?;
            slot.count = length;
            if let Some(inflight) = &mut self.inflight {
                let entries = inflight.mark(&self.descs);
                (slot.entry, slot.last) = entries.ok_or(Fault::ChainTooLong)?;
            }
            self.next_avail = next;
            self.taken += length;
            self.requests.admit(id, lookup, disk, tags);
            count += 1;
        }
        Ok(count)
    }

    /// Prefetches for the descriptor `ahead` positions later, if it is available. It is read again
    /// and checked in its turn.
    #[inline(always)]
    fn prefetch(&self, ahead: u16, lookup: &Lookup<'_>) {
        if ahead < self.num {
            let at = self.next_avail.advance(ahead, self.num);
            let word = load_word(&self.desc, at.index);
            if is_available(flags_of(word), at.wrap) {
                self.requests.prefetch(id_of(word), lookup);
            }
        }
    }

    /// Copies the chain at `next_avail` into private memory. Returns the position after it.
    #[inline]
    fn read_chain(&mut self, lookup: &mut Lookup<'_>, first: u64) -> Result<Position, Fault> {
        self.requests.chain.clear();
        self.descs.clear();
        let mut word = first;
        let mut at = self.next_avail;
        let most = (self.num - self.taken).min(SEGMENTS_MAX as u16);
        while self.descs.len() < usize::from(most) {
            let desc = [self.desc.load_u64(usize::from(at.index) * DESC_LEN, Relaxed), word];
            self.descs.push(desc);
            at = at.advance(1, self.num);
            if !self.read_desc(lookup, desc)? {
                self.requests.chain.finish()?;
                return Ok(at);
            }
            word = load_word(&self.desc, at.index);
        }
        Err(Fault::ChainTooLong)
    }

    /// Adds a descriptor of the ring to the chain. Returns whether another one follows.
    #[inline]
    fn read_desc(
        &mut self,
        lookup: &mut Lookup<'_>,
        [addr, word]: [u64; 2],
    ) -> Result<bool, Fault> {
        let flags = flags_of(word);
        if flags & DESC_F_INDIRECT != 0 {
            if !self.indirect || flags & DESC_F_NEXT != 0 || self.requests.chain.len() > 0 {
                return Err(Fault::IndirectUnexpected);
            }
            self.requests.read_indirect(lookup, addr, word as u32, false)?;
            return Ok(false);
        }
        self.requests.chain.push(addr, word as u32, flags & DESC_F_WRITE != 0)?;
        Ok(flags & DESC_F_NEXT != 0)
    }

    /// [`Ring::complete`](crate::Ring::complete), of a ring that is not broken.
    #[inline]
    pub(super) fn complete(
        &mut self,
        memory: &GuestMemory,
        log: Option<&DirtyLog>,
        finished: &[Finished],
    ) -> usize {
        // Write status bytes with their log, the region's free list, and the end of the batch.
        let first = self.next_used;
        let (mut next, num) = (first, self.num);
        let inflight = &mut self.inflight;
        self.lens.clear();
        let lens = &mut self.lens;
        self.requests.answer(memory, log, finished, |_, len, slot| {
            lens.push(len);
            next = next.advance(slot.count, num);
            if let Some(inflight) = inflight {
                inflight.free(slot.entry, slot.last);
            }
        });
        let count = self.requests.batch.len();
        if count == 0 {
            return 0;
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.begin_batch(next);
        }
        // Write the used descriptors, the first one last.
        let mut at = first;
        let mut commit = 0;
        let mut given = 0;
        for (i, (&id, &len)) in self.requests.batch.iter().zip(&self.lens).enumerate() {
            let word = used_word(id, len, at.wrap);
            if i == 0 {
                commit = word;
            } else {
                self.give(at, word, log);
            }
            let length = self.requests.slots[usize::from(id)].count;
            at = at.advance(length, num);
            given += u32::from(length);
        }
        self.give(first, commit, log);
        if let Some(inflight) = &mut self.inflight {
            for &id in &self.requests.batch {
                inflight.clear(self.requests.slots[usize::from(id)].entry);
            }
            inflight.end_batch(next);
        }
        self.next_used = next;
        self.taken -= given as u16;
        self.requests.batch.clear();
        self.requests.used_since = self.requests.used_since.saturating_add(given);
        count
    }

    #[inline]
    fn give(&self, at: Position, word: u64, log: Option<&DirtyLog>) {
        let offset = usize::from(at.index) * DESC_LEN;
        self.desc.store_u64(offset + 8, word, Release);
        if let (Some(log), Some((addr, _))) = (log, self.log_addrs) {
            log.mark(addr + offset as u64, DESC_LEN as u64);
        }
    }

    /// Whether the guest asks for an interrupt after `since` completions (packed: used
    /// descriptors).
    #[inline]
    pub(super) fn wants_signal(&self, since: u32) -> bool {
        let event = self.driver.load_u32(0, Relaxed);
        match event >> 16 & 3 {
            EVENT_DISABLE => false,
            EVENT_DESC if self.event_idx => {
                let off_wrap = event as u16;
                let mut at = off_wrap & !WRAP;
                if (off_wrap & WRAP != 0) != self.next_used.wrap {
                    at = at.wrapping_sub(self.num);
                }
                since >= u32::from(self.num)
                    || u32::from(self.next_used.index.wrapping_sub(at).wrapping_sub(1)) < since
            }
            _ => true,
        }
    }

    fn set_event(&self, value: u32, log: Option<&DirtyLog>) {
        self.device.store_u32(0, value, Relaxed);
        if let (Some(log), Some((_, addr))) = (log, self.log_addrs) {
            log.mark(addr, EVENT_LEN as u64);
        }
    }

    pub(super) fn request_kick(&self, log: Option<&DirtyLog>) {
        let event =
            if self.event_idx { u32::from(half_of(self.next_avail)) | EVENT_DESC << 16 } else { 0 };
        self.set_event(event, log);
    }

    pub(super) fn refuse_kick(&self, log: Option<&DirtyLog>) {
        self.set_event(EVENT_DISABLE << 16, log);
    }

    #[inline]
    pub(super) fn has_work(&self) -> bool {
        !self.resubmits.is_empty()
            || is_available(
                flags_of(load_word(&self.desc, self.next_avail.index)),
                self.next_avail.wrap,
            )
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(half_of(self.next_avail)) | u32::from(half_of(self.next_used)) << 16
    }

    pub(super) fn set_log(&mut self, log: Option<u64>) {
        self.log_addrs = self.guest_addrs.filter(|_| log.is_some());
    }

    pub(super) fn log_all(&self, log: &DirtyLog) {
        if let Some((desc, device)) = self.log_addrs {
            log.mark(desc, self.desc.len() as u64);
            log.mark(device, EVENT_LEN as u64);
        }
    }

    pub(super) fn is_lost(&self) -> bool {
        let inflight = self.inflight.as_ref().is_some_and(PackedInflight::is_lost);
        inflight || [&self.desc, &self.driver, &self.device].into_iter().any(Area::is_lost)
    }
}

/// Number of descriptors from the used to the available position; `None` if they are more than a
/// lap apart.
fn descriptors_between(used: Position, avail: Position, num: u16) -> Option<u16> {
    match avail.index.checked_sub(used.index) {
        Some(apart) if avail.wrap == used.wrap => Some(apart),
        None if avail.wrap != used.wrap => Some(num - (used.index - avail.index)),
        Some(0) => Some(num),
        _ => None,
    }
}

/// The second half of a descriptor, {u32 len, u16 id, u16 flags}, read as one word.
#[inline]
fn load_word(desc: &Area, index: u16) -> u64 {
    desc.load_u64(usize::from(index) * DESC_LEN + 8, Acquire)
}

#[inline]
fn flags_of(word: u64) -> u16 {
    (word >> 48) as u16
}

#[inline]
fn id_of(word: u64) -> u16 {
    (word >> 32) as u16
}

fn half_of(at: Position) -> u16 {
    at.index | if at.wrap { WRAP } else { 0 }
}

fn used_flag(flags: u16) -> bool {
    flags & DESC_F_USED != 0
}

#[inline]
fn is_available(flags: u16, wrap: bool) -> bool {
    let available = flags & DESC_F_AVAIL != 0;
    available == wrap && used_flag(flags) != wrap
}

#[inline]
fn used_word(id: u16, len: u32, wrap: bool) -> u64 {
    let mut flags = if wrap { DESC_F_AVAIL | DESC_F_USED } else { 0 };
    if len > 0 {
        flags |= DESC_F_WRITE;
    }
    u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48
}

/// Turns a used descriptor that never reached the guest back into one that the device owns.
fn scrub(desc: &Area, at: Position) {
    let word = load_word(desc, at.index);
    if used_flag(flags_of(word)) == at.wrap {
        let flags = if at.wrap { DESC_F_AVAIL } else { DESC_F_USED };
        let word = word & 0xffff_ffff_ffff | u64::from(flags) << 48;
        desc.store_u64(usize::from(at.index) * DESC_LEN + 8, word, Release);
    }
}
