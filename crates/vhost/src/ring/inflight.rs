//! The in-flight region: memory that the front end keeps across a crash of this process, in which
//! each queue records the requests that it has taken and not finished. The layout is vhost-user's.
//! `docs/formats/inflight.md` shows it, with the order of writes and the state after each possible
//! crash.
//!
//! The region is not trusted more than guest memory: it is read once, when a ring starts, and
//! everything read is checked. After that it is only written; the values that are needed later are
//! also kept in private memory. All stores are releases, so a killed process leaves a prefix of
//! them in program order.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::memory::account::Account;
use crate::memory::{Area, MemoryError};
pub use crate::protocol::message::InflightInfo;
use crate::ring::setup::Fault;

/// The version of the layouts. Nonzero marks a region in use.
const VERSION: u16 = 1;
const VERSION_AT: usize = 8;
const DESC_NUM_AT: usize = 10;

/// The name of the region follows the last queue's part: {u64 magic, u64 name}.
const NAME_BYTES: u64 = 64;
const NAME_MAGIC: u64 = u64::from_le_bytes(*b"millrace");

mod split_at {
    pub(super) const LAST_BATCH_HEAD: usize = 12;
    pub(super) const USED_IDX: usize = 14;
    pub(super) const ENTRIES: usize = 16;
    pub(super) const ENTRY_LEN: usize = 16;
    /// Offsets within an entry.
    pub(super) const INFLIGHT: usize = 0;
    pub(super) const NEXT: usize = 6;
    pub(super) const COUNTER: usize = 8;
}

mod packed_at {
    pub(super) const FREE_HEAD: usize = 12;
    pub(super) const OLD_FREE_HEAD: usize = 14;
    /// {u16 used_idx, u16 old_used_idx, u8 used_wrap, u8 old_used_wrap, u16 0}: always written as
    /// one word.
    pub(super) const USED: usize = 16;
    pub(super) const ENTRIES: usize = 32;
    pub(super) const ENTRY_LEN: usize = 32;
    /// Offsets within an entry.
    pub(super) const INFLIGHT: usize = 0;
    pub(super) const NEXT: usize = 2;
    pub(super) const LAST: usize = 4;
    pub(super) const NUM: usize = 6;
    pub(super) const COUNTER: usize = 8;
    /// {u16 id, u16 flags, u32 len}: written as one word.
    pub(super) const WORD: usize = 16;
    pub(super) const ADDR: usize = 24;
}

/// The format of the rings that a region belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Split rings.
    Split,
    /// Packed rings.
    Packed,
}

/// A mapped in-flight region.
#[derive(Clone, Debug)]
pub struct InflightRegion {
    area: Area,
    info: InflightInfo,
    form: Form,
}

/// One queue's part of a region.
#[derive(Clone, Debug)]
pub struct InflightArea {
    pub(crate) area: Area,
    /// Number of entries.
    pub(crate) num: u16,
    pub(crate) form: Form,
}

/// Bytes of one queue's part.
fn stride(form: Form, queue_size: u16) -> u64 {
    let (header, entry) = match form {
        Form::Split => (split_at::ENTRIES, split_at::ENTRY_LEN),
        Form::Packed => (packed_at::ENTRIES, packed_at::ENTRY_LEN),
    };
    (header as u64 + u64::from(queue_size) * entry as u64).next_multiple_of(64)
}

impl InflightRegion {
    /// Creates a fresh region in a file that cannot be shortened, and returns both.
    pub fn create(
        queues: u16,
        queue_size: u16,
        form: Form,
    ) -> Result<(InflightRegion, OwnedFd), MemoryError> {
        let file_size = u64::from(queues) * stride(form, queue_size) + NAME_BYTES;
        // SAFETY: the name is a C string, and the call accesses no other memory.
        let fd = unsafe {
            libc::memfd_create(c"inflight".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
        };
        if fd < 0 {
            return Err(MemoryError::Io(io::Error::last_os_error()));
        }
        // SAFETY: the system has just returned this descriptor, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: calls on a descriptor that we own; they access no memory of this process.
        let failed = unsafe {
            libc::ftruncate(fd.as_raw_fd(), file_size as i64) != 0
                || libc::fcntl(
                    fd.as_raw_fd(),
                    libc::F_ADD_SEALS,
                    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
                ) != 0
        };
        if failed {
            return Err(MemoryError::Io(io::Error::last_os_error()));
        }
        let info = InflightInfo { mmap_size: file_size, mmap_offset: 0, queues, queue_size };
        Ok((InflightRegion::map(fd.as_fd(), info, form)?, fd))
    }

    /// Maps a region that the front end returns.
    pub fn map(
        fd: BorrowedFd<'_>,
        info: InflightInfo,
        form: Form,
    ) -> Result<InflightRegion, MemoryError> {
        InflightRegion::map_for(&Account::default(), fd, info, form)
    }

    /// Like [`InflightRegion::map`], counted in a front end's account.
    pub(crate) fn map_for(
        account: &Account,
        fd: BorrowedFd<'_>,
        info: InflightInfo,
        form: Form,
    ) -> Result<InflightRegion, MemoryError> {
        let needed = u64::from(info.queues) * stride(form, info.queue_size);
        if info.mmap_size < needed {
            return Err(MemoryError::Short { needed, size: info.mmap_size });
        }
        let area = Area::map_for(account, fd, info.mmap_offset, info.mmap_size)?;
        if !area.is_aligned(8) {
            return Err(MemoryError::Io(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        Ok(InflightRegion { area, info, form })
    }

    /// The region's shape and its place in the file.
    pub fn info(&self) -> InflightInfo {
        self.info
    }

    /// Gives the region a name of its own, by which later processes know it.
    pub fn set_name(&self, name: u64) {
        if let Some(at) = self.name_at() {
            self.area.store_u64(at + 8, name, Release);
            self.area.store_u64(at, NAME_MAGIC, Release);
        }
    }

    /// The name; `None` if it was not set, or the region was made by somebody else.
    pub fn name(&self) -> Option<u64> {
        let at = self.name_at()?;
        let is_set = self.area.load_u64(at, Acquire) == NAME_MAGIC;
        is_set.then(|| self.area.load_u64(at + 8, Relaxed))
    }

    fn name_at(&self) -> Option<usize> {
        let at = u64::from(self.info.queues) * stride(self.form, self.info.queue_size);
        let has_room = at.checked_add(NAME_BYTES)? <= self.info.mmap_size;
        has_room.then_some(usize::try_from(at).ok()?)
    }

    /// One queue's part; `None` beyond the last queue.
    pub fn queue(&self, index: u16) -> Option<InflightArea> {
        if index >= self.info.queues {
            return None;
        }
        let len = stride(self.form, self.info.queue_size);
        let area = self.area.part((u64::from(index) * len) as usize, len as usize)?;
        Some(InflightArea { area, num: self.info.queue_size, form: self.form })
    }
}

impl InflightArea {
    /// Whether the region was never used.
    pub(crate) fn is_fresh(&self) -> bool {
        self.area.load_u16(VERSION_AT, Acquire) == 0
    }

    /// Whether an earlier process used the region. Checks the header against the ring.
    fn in_use(&self, form: Form, ring_num: u16) -> Result<bool, Fault> {
        if self.form != form {
            return Err(Fault::Inflight("made for the other ring format"));
        }
        if ring_num > self.num {
            return Err(Fault::Inflight("fewer entries than the ring"));
        }
        match self.area.load_u16(VERSION_AT, Acquire) {
            0 => Ok(false),
            VERSION if self.area.load_u16(DESC_NUM_AT, Relaxed) == self.num => Ok(true),
            VERSION => Err(Fault::Inflight("number of entries differs from the message")),
            _ => Err(Fault::Inflight("unknown version")),
        }
    }

    /// The last steps of initialization: from here on the region is in use.
    fn set_in_use(&self) {
        self.area.store_u16(DESC_NUM_AT, self.num, Release);
        self.area.store_u16(VERSION_AT, VERSION, Release);
    }
}

/// The region of a split ring.
#[derive(Debug)]
pub(crate) struct SplitInflight {
    area: Area,
    counter: u64,
    last_batch_head: u16,
}

impl SplitInflight {
    /// Takes over a used region, or initializes a fresh one. Returns the heads that were in flight,
    /// in the order in which they were taken.
    pub(crate) fn start(
        region: InflightArea,
        ring_num: u16,
        used_idx: u16,
    ) -> Result<(SplitInflight, Vec<u16>), Fault> {
        let in_use = region.in_use(Form::Split, ring_num)?;
        let mut inflight =
            SplitInflight { area: region.area.clone(), counter: 0, last_batch_head: 0 };
        if !in_use {
            for head in 0..region.num {
                inflight.area.store_u8(entry(head) + split_at::INFLIGHT, 0, Release);
            }
            inflight.area.store_u16(split_at::LAST_BATCH_HEAD, 0, Release);
            // Not 0: the guest may have used the ring before the region was created.
            inflight.area.store_u16(split_at::USED_IDX, used_idx, Release);
            region.set_in_use();
            return Ok((inflight, Vec::new()));
        }
        let head = inflight.area.load_u16(split_at::LAST_BATCH_HEAD, Acquire);
        if head >= region.num {
            return Err(Fault::Inflight("batch begins outside the region"));
        }
        inflight.last_batch_head = head;
        inflight.finish_batch(head, region.num, ring_num, used_idx)?;

        let mut heads = Vec::new();
        for head in 0..region.num {
            if inflight.area.load_u8(entry(head) + split_at::INFLIGHT, Acquire) == 1 {
                if head >= ring_num {
                    return Err(Fault::Inflight("head in flight is outside the ring"));
                }
                let counter = inflight.area.load_u64(entry(head) + split_at::COUNTER, Relaxed);
                heads.push((counter, head));
            }
        }
        heads.sort_unstable();
        inflight.counter = heads.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        Ok((inflight, heads.into_iter().map(|(_, head)| head).collect()))
    }

    /// If the last batch reached the guest but is still marked, unmarks it. The batch has as many
    /// entries, from the head of the list, as the used index is ahead of the region's.
    fn finish_batch(
        &mut self,
        mut head: u16,
        num: u16,
        ring_num: u16,
        used_idx: u16,
    ) -> Result<(), Fault> {
        let known = self.area.load_u16(split_at::USED_IDX, Acquire);
        let finished = used_idx.wrapping_sub(known);
        if finished > ring_num {
            return Err(Fault::Inflight("used index is too far ahead"));
        }
        // Check everything before changing anything: a refused region stays as it is.
        let mut batch = Vec::with_capacity(usize::from(finished));
        for _ in 0..finished {
            if head >= num {
                return Err(Fault::Inflight("batch leads outside the region"));
            }
            batch.push(head);
            head = self.area.load_u16(entry(head) + split_at::NEXT, Relaxed);
        }
        for head in batch {
            self.area.store_u8(entry(head) + split_at::INFLIGHT, 0, Release);
        }
        if finished > 0 {
            self.area.store_u16(split_at::USED_IDX, used_idx, Release);
        }
        Ok(())
    }

    /// See [`Area::is_lost`].
    pub(crate) fn is_lost(&self) -> bool {
        self.area.is_lost()
    }

    /// Records that a head was taken. To be called in the order of the available ring.
    #[inline]
    pub(crate) fn mark(&mut self, head: u16) {
        self.area.store_u64(entry(head) + split_at::COUNTER, self.counter, Release);
        self.counter = self.counter.wrapping_add(1);
        self.area.store_u8(entry(head) + split_at::INFLIGHT, 1, Release);
    }

    /// Adds a head to the batch's list. To be called before the used index moves.
    #[inline]
    pub(crate) fn link(&mut self, head: u16) {
        self.area.store_u16(entry(head) + split_at::NEXT, self.last_batch_head, Release);
        self.last_batch_head = head;
        self.area.store_u16(split_at::LAST_BATCH_HEAD, head, Release);
    }

    /// Marks a head as returned to the guest. To be called after the used index has moved.
    #[inline]
    pub(crate) fn clear(&mut self, head: u16) {
        self.area.store_u8(entry(head) + split_at::INFLIGHT, 0, Release);
    }

    /// Ends the batch, after all its heads are cleared.
    #[inline]
    pub(crate) fn end_batch(&mut self, used_idx: u16) {
        self.area.store_u16(split_at::USED_IDX, used_idx, Release);
    }
}

#[inline]
fn entry(head: u16) -> usize {
    split_at::ENTRIES + usize::from(head) * split_at::ENTRY_LEN
}

/// A position in a packed ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) index: u16,
    pub(crate) wrap: bool,
}

impl Position {
    /// The position `count` descriptors later in a ring of `num`; `count` is at most `num`.
    #[inline]
    pub(crate) fn advance(self, count: u16, num: u16) -> Position {
        let index = u32::from(self.index) + u32::from(count);
        match index.checked_sub(u32::from(num)) {
            None => Position { index: index as u16, wrap: self.wrap },
            Some(index) => Position { index: index as u16, wrap: !self.wrap },
        }
    }
}

/// A chain that an earlier process took from a packed ring.
#[derive(Debug)]
pub(crate) struct PackedChain {
    pub(crate) entry: u16,
    pub(crate) last: u16,
    /// The ring's descriptors at the time when the chain was taken. The ring may have used
    /// descriptors in their place now.
    pub(crate) descs: Vec<[u64; 2]>,
}

/// The state of a packed ring as its region records it.
#[derive(Debug)]
pub(crate) struct PackedState {
    pub(crate) used: Position,
    /// In the order in which they were taken.
    pub(crate) chains: Vec<PackedChain>,
}

/// The region of a packed ring.
#[derive(Debug)]
pub(crate) struct PackedInflight {
    area: Area,
    counter: u64,
    /// First entry of the free list; the number of entries if the list is empty.
    free_head: u16,
    /// Private copy of the region's `next` fields, which are read only when a ring starts.
    next: Box<[u16]>,
    /// Private copy of `old_used_idx` and `old_used_wrap`.
    old_used: Position,
}

impl PackedInflight {
    /// Takes over a used region, or initializes a fresh one. `used` is the position for a fresh
    /// region. `given` tells whether the guest has received the used descriptor at a position.
    /// `scrub` is called for each descriptor that a batch which never reached the guest may have
    /// overwritten.
    pub(crate) fn start(
        region: InflightArea,
        ring_num: u16,
        used: Position,
        given: impl Fn(Position) -> bool,
        scrub: impl Fn(Position),
    ) -> Result<(PackedInflight, PackedState), Fault> {
        let in_use = region.in_use(Form::Packed, ring_num)?;
        let mut inflight = PackedInflight {
            area: region.area.clone(),
            counter: 0,
            free_head: 0,
            next: (1..=region.num).collect(),
            old_used: used,
        };
        if in_use {
            let state = inflight.recover(region.num, ring_num, given, scrub)?;
            return Ok((inflight, state));
        }
        inflight.initialize(region.num, used);
        region.set_in_use();
        Ok((inflight, PackedState { used, chains: Vec::new() }))
    }

    fn initialize(&mut self, num: u16, used: Position) {
        for at in 0..num {
            self.area.store_u8(packed_entry(at) + packed_at::INFLIGHT, 0, Release);
            self.area.store_u16(packed_entry(at) + packed_at::NEXT, at + 1, Release);
        }
        self.area.store_u16(packed_at::FREE_HEAD, 0, Release);
        self.area.store_u16(packed_at::OLD_FREE_HEAD, 0, Release);
        self.store_used(used);
    }

    /// Takes over a used region; for `given` and `scrub` see [`PackedInflight::start`].
    fn recover(
        &mut self,
        num: u16,
        ring_num: u16,
        given: impl Fn(Position) -> bool,
        scrub: impl Fn(Position),
    ) -> Result<PackedState, Fault> {
        let area = self.area.clone();
        for (at, next) in self.next.iter_mut().enumerate() {
            *next = area.load_u16(packed_entry(at as u16) + packed_at::NEXT, Relaxed);
        }
        let word = area.load_u64(packed_at::USED, Acquire);
        let position = |index: u16, wrap: u8| Position { index, wrap: wrap & 1 == 1 };
        let new_used = position(word as u16, (word >> 32) as u8);
        let old_used = position((word >> 16) as u16, (word >> 40) as u8);
        if new_used.index >= ring_num || old_used.index >= ring_num {
            return Err(Fault::Inflight("used index is outside the ring"));
        }
        let old_free_head = area.load_u16(packed_at::OLD_FREE_HEAD, Acquire);
        let free_head = area.load_u16(packed_at::FREE_HEAD, Acquire);
        // A batch that reached the guest counts, although its entries may still be marked.
        let committed = new_used != old_used && given(old_used);
        let (used, free_head) =
            if committed { (new_used, free_head) } else { (old_used, old_free_head) };

        // Check everything before changing anything.
        let mut free = vec![false; usize::from(num)];
        let mut at = free_head;
        while at != num {
            match free.get_mut(usize::from(at)) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return Err(Fault::Inflight("free list is a loop")),
                None => return Err(Fault::Inflight("free list leads outside the region")),
            }
            at = self.next[usize::from(at)];
        }
        let chains = self.read_chains(&free, ring_num)?;

        if !committed && new_used != old_used {
            // The guest would take the other used descriptors of that batch for valid as soon as
            // the first one is.
            let mut at = old_used;
            loop {
                scrub(at);
                at = at.advance(1, ring_num);
                if at.index == new_used.index {
                    break;
                }
            }
        }
        for (at, free) in free.iter().enumerate() {
            if *free {
                area.store_u8(packed_entry(at as u16) + packed_at::INFLIGHT, 0, Release);
            }
        }
        self.free_head = free_head;
        self.old_used = used;
        area.store_u16(packed_at::FREE_HEAD, free_head, Release);
        area.store_u16(packed_at::OLD_FREE_HEAD, free_head, Release);
        self.store_used(used);
        Ok(PackedState { used, chains })
    }

    /// Returns the chains whose first entry is marked and not free, sorted by their counters.
    fn read_chains(&mut self, free: &[bool], ring_num: u16) -> Result<Vec<PackedChain>, Fault> {
        let mut taken = free.to_vec();
        let mut chains = Vec::new();
        let mut descs_left = ring_num;
        for entry in 0..free.len() as u16 {
            let at = packed_entry(entry);
            let marked = self.area.load_u8(at + packed_at::INFLIGHT, Acquire) == 1;
            if free[usize::from(entry)] || !marked {
                continue;
            }
            let count = self.area.load_u16(at + packed_at::NUM, Relaxed);
            let last = self.area.load_u16(at + packed_at::LAST, Relaxed);
            descs_left = descs_left
                .checked_sub(count)
                .filter(|_| count > 0)
                .ok_or(Fault::Inflight("chains are longer than the ring"))?;
            let mut descs = Vec::with_capacity(usize::from(count));
            let mut walk = entry;
            let mut end = entry;
            for _ in 0..count {
                match taken.get_mut(usize::from(walk)) {
                    Some(seen) if !*seen => *seen = true,
                    Some(_) => return Err(Fault::Inflight("an entry is in two lists")),
                    None => return Err(Fault::Inflight("chain leads outside the region")),
                }
                let at = packed_entry(walk);
                let addr = self.area.load_u64(at + packed_at::ADDR, Relaxed);
                let word = self.area.load_u64(at + packed_at::WORD, Relaxed);
                let (id, flags, len) = (word & 0xffff, word >> 16 & 0xffff, word >> 32);
                descs.push([addr, len | id << 32 | flags << 48]);
                end = walk;
                walk = self.next[usize::from(walk)];
            }
            if end != last {
                return Err(Fault::Inflight("chain does not end at its last entry"));
            }
            let counter = self.area.load_u64(at + packed_at::COUNTER, Relaxed);
            chains.push((counter, PackedChain { entry, last, descs }));
        }
        chains.sort_unstable_by_key(|&(counter, ref chain)| (counter, chain.entry));
        self.counter = chains.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        Ok(chains.into_iter().map(|(_, chain)| chain).collect())
    }

    /// See [`Area::is_lost`].
    pub(crate) fn is_lost(&self) -> bool {
        self.area.is_lost()
    }

    /// Writes the used position, new and old.
    fn store_used(&mut self, used: Position) {
        self.old_used = used;
        self.store_used_from(used);
    }

    /// Writes the used position and leaves the old one.
    fn store_used_from(&self, used: Position) {
        let old = self.old_used;
        let word = u64::from(used.index)
            | u64::from(old.index) << 16
            | u64::from(used.wrap) << 32
            | u64::from(old.wrap) << 40;
        self.area.store_u64(packed_at::USED, word, Release);
    }

    /// Records that a chain was taken, with a copy of its descriptors. To be called in the order of
    /// the ring. Returns the chain's first and last entry, or `None` if there are not enough free
    /// entries.
    #[inline]
    pub(crate) fn mark(&mut self, descs: &[[u64; 2]]) -> Option<(u16, u16)> {
        let first = self.free_head;
        let mut last = first;
        let mut free = first;
        for &[addr, word] in descs {
            last = free;
            free = *self.next.get(usize::from(last))?;
            let at = packed_entry(last);
            let (len, id, flags) = (word & 0xffff_ffff, word >> 32 & 0xffff, word >> 48);
            self.area.store_u64(at + packed_at::ADDR, addr, Release);
            self.area.store_u64(at + packed_at::WORD, id | flags << 16 | len << 32, Release);
        }
        let at = packed_entry(first);
        self.area.store_u16(at + packed_at::LAST, last, Release);
        self.area.store_u16(at + packed_at::NUM, descs.len() as u16, Release);
        self.area.store_u64(at + packed_at::COUNTER, self.counter, Release);
        self.counter = self.counter.wrapping_add(1);
        self.area.store_u8(at + packed_at::INFLIGHT, 1, Release);
        self.free_head = free;
        self.area.store_u16(packed_at::FREE_HEAD, free, Release);
        // From here on the chain is in flight.
        self.area.store_u16(packed_at::OLD_FREE_HEAD, free, Release);
        Some((first, last))
    }

    /// Returns a chain's entries to the free list. To be called before the ring is written.
    #[inline]
    pub(crate) fn free(&mut self, first: u16, last: u16) {
        self.next[usize::from(last)] = self.free_head;
        self.area.store_u16(packed_entry(last) + packed_at::NEXT, self.free_head, Release);
        self.free_head = first;
    }

    /// Records where the batch will end. To be called before the ring is written, after all chains
    /// of the batch are freed.
    #[inline]
    pub(crate) fn begin_batch(&mut self, used: Position) {
        self.area.store_u16(packed_at::FREE_HEAD, self.free_head, Release);
        self.store_used_from(used);
    }

    /// Marks a chain as returned to the guest. To be called after the ring is written.
    #[inline]
    pub(crate) fn clear(&mut self, first: u16) {
        self.area.store_u8(packed_entry(first) + packed_at::INFLIGHT, 0, Release);
    }

    /// Ends the batch, after all its chains are cleared.
    #[inline]
    pub(crate) fn end_batch(&mut self, used: Position) {
        self.area.store_u16(packed_at::OLD_FREE_HEAD, self.free_head, Release);
        self.store_used(used);
    }
}

#[inline]
fn packed_entry(at: u16) -> usize {
    packed_at::ENTRIES + usize::from(at) * packed_at::ENTRY_LEN
}
