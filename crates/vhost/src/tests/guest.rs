//! A guest: its memory, and the driver's side of a ring of either format. It shares only `Area`
//! with the code under test, to access its own mapping of the memory.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use crate::*;

/// Guest-physical address of the first byte.
pub(super) const GPA: u64 = 0x4000_0000;
const USER: u64 = 0x7f00_0000_0000;
const AVAIL: usize = 0x1_0000;
const USED: usize = 0x2_0000;
/// One kilobyte for each head: header, status, range of a discard, indirect table, data.
const BUFFERS: usize = 0x4_0000;
const BUFFER_LEN: usize = 1024;
const STATUS: usize = 16;
const TABLE: usize = 64;
const DATA: usize = 512;
pub(super) const MEMORY_LEN: usize = BUFFERS + 256 * BUFFER_LEN;
pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;
const NO_STATUS: u8 = 0xee;

pub(super) fn memfd(len: usize) -> OwnedFd {
    // SAFETY: the name is a C string, and the call accesses no other memory.
    let fd = unsafe { libc::memfd_create(c"guest".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: a call on an open descriptor, which accesses no memory.
    assert_eq!(unsafe { libc::ftruncate(fd, len as i64) }, 0);
    // SAFETY: the system has just returned this descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A request in flight.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub(super) seq: u64,
    /// Number of descriptors that it uses.
    descs: Vec<u16>,
}

pub(super) struct Guest {
    pub(super) memory: GuestMemory,
    pub(super) own: Area,
    pub(super) form: Form,
    pub(super) num: u16,
    pub(super) features: u64,
    pub(super) base: u32,
    free: Vec<u16>,
    pub(super) pending: BTreeMap<u16, Pending>,
    /// Split: indexes. Packed: positions with the wrap counter in bit 15.
    avail: u16,
    used: u16,
    pub(super) _fd: OwnedFd,
}

impl Guest {
    /// A guest whose ring begins at an index (split), or at a position with the wrap counter in bit
    /// 15 (packed).
    pub(super) fn new(form: Form, num: u16, start: u16, features: u64) -> Guest {
        let fd = memfd(MEMORY_LEN);
        let info = RegionInfo {
            guest_addr: GPA,
            size: MEMORY_LEN as u64,
            user_addr: USER,
            mmap_offset: 0,
        };
        let memory = GuestMemory::new().with_region(info, fd.as_fd()).unwrap();
        let own = Area::map(fd.as_fd(), 0, MEMORY_LEN as u64).unwrap();
        let packed = if form == Form::Packed { F_RING_PACKED } else { 0 };
        let base = match form {
            Form::Split => u32::from(start),
            Form::Packed => u32::from(start) | u32::from(start) << 16,
        };
        let guest = Guest {
            memory,
            own,
            form,
            num,
            features: features | packed,
            base,
            free: (0..num).rev().collect(),
            pending: BTreeMap::new(),
            avail: start,
            used: start,
            _fd: fd,
        };
        if form == Form::Split {
            guest.own.store_u16(AVAIL + 2, start, Release);
            guest.own.store_u16(USED + 2, start, Release);
        } else {
            // Descriptors before the start were used in this lap, the others in the lap before.
            for i in 0..num {
                let this_lap = i < start & 0x7fff;
                let flags = if this_lap == (start & 0x8000 != 0) { 0x8080 } else { 0 };
                guest.own.store_u16(usize::from(i) * 16 + 14, flags, Release);
            }
        }
        guest
    }

    pub(super) fn setup(&self) -> Setup {
        Setup {
            num: self.num,
            desc: USER,
            avail: USER + AVAIL as u64,
            used: USER + USED as u64,
            log: Some(GPA + USED as u64),
            base: self.base,
            features: self.features,
        }
    }

    pub(super) fn start(&self, inflight: Option<InflightArea>) -> Ring {
        Ring::start(&self.memory, &self.setup(), inflight).unwrap().0
    }

    /// Offset of a head's buffers in the memory.
    pub(super) fn buffer(head: u16) -> usize {
        BUFFERS + usize::from(head) * BUFFER_LEN
    }

    pub(super) fn status(&self, head: u16) -> u8 {
        self.own.load_u8(Guest::buffer(head) + STATUS, Relaxed)
    }

    pub(super) fn desc(&self, at: usize, addr: u64, len: u32, flags: u16, last: u16) {
        self.own.store_u64(at, addr, Relaxed);
        let word = match self.form {
            Form::Split => u64::from(flags) << 32 | u64::from(last) << 48,
            Form::Packed => u64::from(last) << 32 | u64::from(flags) << 48,
        };
        self.own.store_u64(at + 8, u64::from(len) | word, Release);
    }

    pub(super) fn header(&self, head: u16, kind: u32, sector: u64) {
        let at = Guest::buffer(head);
        self.own.store_u32(at, kind, Relaxed);
        self.own.store_u32(at + 4, 0, Relaxed);
        self.own.store_u64(at + 8, sector, Relaxed);
        self.own.store_u8(at + STATUS, NO_STATUS, Relaxed);
    }

    /// Header, data and status of a request of one sector in a head's buffers.
    pub(super) fn parts(head: u16, kind: u32) -> [(u64, u32, u16); 3] {
        let at = GPA + Guest::buffer(head) as u64;
        let data = if kind == 0 { WRITE } else { 0 };
        [(at, 16, 0), (at + DATA as u64, 512, data), (at + STATUS as u64, 1, WRITE)]
    }

    /// Makes a chain of these descriptors available, possibly through an indirect table. Returns
    /// false if the ring is full.
    pub(super) fn offer(&mut self, seq: u64, parts: &[(u64, u32, u16)], indirect: bool) -> bool {
        let needed = if indirect { 1 } else { parts.len() };
        if self.free.len() < needed {
            return false;
        }
        let descs: Vec<u16> = self.free.split_off(self.free.len() - needed);
        let head = descs[0];
        let mut in_ring = parts.to_vec();
        if indirect {
            let table = Guest::buffer(head) + TABLE;
            for (i, &(addr, len, flags)) in parts.iter().enumerate() {
                let next = if i + 1 < parts.len() && self.form == Form::Split { NEXT } else { 0 };
                self.desc(table + i * 16, addr, len, flags | next, i as u16 + 1);
            }
            in_ring = vec![(GPA + table as u64, parts.len() as u32 * 16, INDIRECT)];
        }
        match self.form {
            Form::Split => {
                for (i, &(addr, len, flags)) in in_ring.iter().enumerate() {
                    let next = descs.get(i + 1).copied();
                    let flags = flags | if next.is_some() { NEXT } else { 0 };
                    self.desc(usize::from(descs[i]) * 16, addr, len, flags, next.unwrap_or(0));
                }
                self.publish(head);
            }
            Form::Packed => {
                let first = self.avail;
                let mut at = first;
                let mut first_flags = 0;
                for (i, &(addr, len, flags)) in in_ring.iter().enumerate() {
                    let wrap = at & 0x8000 != 0;
                    let more = if i + 1 < in_ring.len() { NEXT } else { 0 };
                    let flags = flags | more | if wrap { 0x80 } else { 0x8000 };
                    let offset = usize::from(at & 0x7fff) * 16;
                    if i == 0 {
                        // The head becomes available after the rest.
                        first_flags = flags;
                        let old = self.own.load_u16(offset + 14, Relaxed);
                        self.desc(offset, addr, len, old, head);
                    } else {
                        self.desc(offset, addr, len, flags, head);
                    }
                    at = self.packed_next(at, 1);
                }
                self.own.store_u16(usize::from(first & 0x7fff) * 16 + 14, first_flags, Release);
                self.avail = at;
            }
        }
        self.pending.insert(head, Pending { seq, descs });
        true
    }

    /// Adds a head to the available ring of a split ring.
    pub(super) fn publish(&mut self, head: u16) {
        let at = AVAIL + 4 + 2 * usize::from(self.avail % self.num);
        self.own.store_u16(at, head, Relaxed);
        self.avail = self.avail.wrapping_add(1);
        self.own.store_u16(AVAIL + 2, self.avail, Release);
    }

    fn packed_next(&self, at: u16, by: u16) -> u16 {
        let index = (at & 0x7fff) + by;
        if index >= self.num { (index - self.num) | (!at & 0x8000) } else { index | (at & 0x8000) }
    }

    /// The head of the next request.
    pub(super) fn next_head(&self, indirect: bool, parts: usize) -> Option<u16> {
        let needed = if indirect { 1 } else { parts };
        Some(self.free[self.free.len().checked_sub(needed)?])
    }

    /// Adds a read (even) or write (odd) of one sector whose number is `seq`. Every third request
    /// has its data in two pieces, so that chains have different lengths.
    pub(super) fn add(&mut self, seq: u64, indirect: bool) -> bool {
        let pieces = if seq % 3 == 2 { 2 } else { 1 };
        let Some(head) = self.next_head(indirect, 2 + pieces) else { return false };
        let kind = (seq & 1) as u32;
        self.header(head, kind, seq);
        let [header, (addr, len, flags), status] = Guest::parts(head, kind);
        let halves = [(addr, len / 2, flags), (addr + u64::from(len / 2), len / 2, flags)];
        let parts = match pieces {
            1 => vec![header, (addr, len, flags), status],
            _ => vec![header, halves[0], halves[1], status],
        };
        self.offer(seq, &parts, indirect)
    }

    /// Takes the completions: {seq, head, length}. Panics if the device does anything that a driver
    /// would call broken.
    pub(super) fn collect(&mut self) -> Vec<(u64, u16, u32)> {
        let mut done = Vec::new();
        loop {
            let (id, len) = match self.form {
                Form::Split => {
                    let idx = self.own.load_u16(USED + 2, Acquire);
                    assert!(idx.wrapping_sub(self.used) <= self.num, "used index jumps");
                    if idx == self.used {
                        break;
                    }
                    let at = USED + 4 + 8 * usize::from(self.used % self.num);
                    self.used = self.used.wrapping_add(1);
                    (self.own.load_u32(at, Relaxed), self.own.load_u32(at + 4, Relaxed))
                }
                Form::Packed => {
                    let at = usize::from(self.used & 0x7fff) * 16;
                    let word = self.own.load_u64(at + 8, Acquire);
                    let (avail, used) = (word >> 55 & 1, word >> 63);
                    if avail != used || used != u64::from(self.used >> 15) {
                        break;
                    }
                    ((word >> 32) as u32 & 0xffff, word as u32)
                }
            };
            let head = id as u16;
            let pending = self.pending.remove(&head);
            let pending = pending.unwrap_or_else(|| panic!("id {id} is not a head"));
            if self.form == Form::Packed {
                self.used = self.packed_next(self.used, pending.descs.len() as u16);
            }
            self.free.extend(pending.descs.iter().rev());
            done.push((pending.seq, head, len));
        }
        done
    }

    /// Makes a split ring offer more than it has room for.
    pub(super) fn break_ring(&self) {
        let avail = self.own.load_u16(AVAIL + 2, Relaxed);
        self.own.store_u16(AVAIL + 2, avail.wrapping_add(self.num + 1), Release);
    }

    /// Sets after how many further completions the guest wants an interrupt (event index), or
    /// whether it wants interrupts.
    pub(super) fn want_interrupt(&self, after: Option<u16>) {
        match (self.form, self.features & F_EVENT_IDX != 0) {
            (Form::Split, true) => {
                let at = AVAIL + 4 + 2 * usize::from(self.num);
                let never = self.used.wrapping_sub(1);
                let event = after.map_or(never, |after| self.used.wrapping_add(after));
                self.own.store_u16(at, event, SeqCst);
            }
            (Form::Split, false) => {
                self.own.store_u16(AVAIL, u16::from(after.is_none()), SeqCst);
            }
            (Form::Packed, event_idx) => {
                let flags = match (after, event_idx) {
                    (None, _) => 1,
                    (Some(_), true) => 2,
                    (Some(_), false) => 0,
                };
                let at = self.packed_next(self.used, after.unwrap_or(0));
                self.own.store_u32(AVAIL, u32::from(at) | flags << 16, SeqCst);
            }
        }
        fence(SeqCst);
    }

    /// Whether the device wants a kick for the newest of the last `added` chains (packed:
    /// descriptors).
    pub(super) fn must_kick(&self, added: u16) -> bool {
        fence(SeqCst);
        match (self.form, self.features & F_EVENT_IDX != 0) {
            (Form::Split, true) => {
                let at = USED + 4 + 8 * usize::from(self.num);
                let event = self.own.load_u16(at, Relaxed);
                self.avail.wrapping_sub(event).wrapping_sub(1) < added
            }
            (Form::Split, false) => self.own.load_u16(USED, Relaxed) & 1 == 0,
            (Form::Packed, _) => {
                let word = self.own.load_u32(USED, Relaxed);
                let mut event = word as u16 & 0x7fff;
                if word as u16 & 0x8000 != self.avail & 0x8000 {
                    event = event.wrapping_sub(self.num);
                }
                match word >> 16 {
                    0 => true,
                    1 => false,
                    _ => (self.avail & 0x7fff).wrapping_sub(event).wrapping_sub(1) < added,
                }
            }
        }
    }
}

/// A disk of 1024 sectors with all features.
pub(super) fn disk() -> Disk {
    Disk {
        capacity_sectors: 1024,
        block_size: 512,
        read_only: false,
        discard: true,
        write_zeroes: true,
        write_zeroes_may_unmap: true,
        max_discard_sectors: 64,
        max_write_zeroes_sectors: 32,
        segments_max: u32::MAX,
        segment_bytes_max: u32::MAX,
        serial: *b"serial-0123456789abc",
    }
}

/// A small random generator with a fixed seed.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn roll(&mut self, below: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}
