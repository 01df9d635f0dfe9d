//! The table of a guest's memory regions, and the translation of guest-physical addresses.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use libc::iovec;

use crate::memory::account::{Account, Table};
use crate::memory::area::{Area, Mapping, Source, prefetch};
use crate::memory::dirty::DirtyLog;
use crate::memory::error::{MemoryError, REGIONS_MAX};
#[cfg(test)]
use crate::memory::faults;
use crate::protocol::message::RegionInfo;

#[derive(Clone, Debug)]
struct Region {
    guest_addr: u64,
    size: u64,
    base: *mut u8,
    info: RegionInfo,
    mapping: Arc<Mapping>,
}

// SAFETY: as for `Area`: the pointer is good while the mapping is held, on any thread.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// The guest's memory: its regions, sorted by guest-physical address.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
    /// Tables derived from this one share its account.
    table: Table,
}

impl GuestMemory {
    /// A table without regions.
    pub fn new() -> GuestMemory {
        GuestMemory::default()
    }

    /// The account of its front end.
    pub(crate) fn account(&self) -> &Account {
        self.table.account()
    }

    /// The regions in the order of their guest-physical addresses.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = &RegionInfo> {
        self.regions.iter().map(|region| &region.info)
    }

    /// Whether any region is lost; see [`Area::is_lost`].
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.guard.is_lost())
    }

    /// Returns a table with exactly these regions. Regions that this table has of the same file
    /// keep their mappings, unless they are lost.
    pub fn replace(
        &self,
        table: &[(RegionInfo, BorrowedFd<'_>)],
    ) -> Result<GuestMemory, MemoryError> {
        let mut memory = GuestMemory { regions: Vec::new(), table: self.table.clone() };
        for &(info, fd) in table {
            memory.insert(info, fd, &self.regions)?;
        }
        Ok(memory)
    }

    /// Returns a table with one more region.
    pub fn with_region(
        &self,
        info: RegionInfo,
        fd: BorrowedFd<'_>,
    ) -> Result<GuestMemory, MemoryError> {
        let mut memory = self.clone();
        memory.insert(info, fd, &[])?;
        Ok(memory)
    }

    /// Returns a table without a region, which is identified by its addresses and its size. The
    /// offset is ignored.
    pub fn without_region(&self, info: RegionInfo) -> Result<GuestMemory, MemoryError> {
        let same = |region: &Region| {
            let i = &region.info;
            (i.guest_addr, i.size, i.user_addr) == (info.guest_addr, info.size, info.user_addr)
        };
        let at = self.regions.iter().position(same).ok_or(MemoryError::Unknown(info))?;
        let mut memory = self.clone();
        memory.regions.remove(at);
        Ok(memory)
    }

    fn insert(
        &mut self,
        info: RegionInfo,
        fd: BorrowedFd<'_>,
        old: &[Region],
    ) -> Result<(), MemoryError> {
        let overflows = |start: u64| start.checked_add(info.size).is_none();
        if info.size == 0
            || [info.guest_addr, info.user_addr, info.mmap_offset].into_iter().any(overflows)
        {
            return Err(MemoryError::Range(info));
        }
        if self.regions.len() == REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        let meet = |a: u64, b: u64, b_size: u64| a < b + b_size && b < a + info.size;
        let overlaps = |other: &Region| {
            meet(info.guest_addr, other.guest_addr, other.size)
                || meet(info.user_addr, other.info.user_addr, other.size)
        };
        if self.regions.iter().any(overlaps) {
            return Err(MemoryError::Overlap(info));
        }
        let source = Source::new(fd, info.mmap_offset, info.size)?;
        // The same range of the same file is the same memory.
        let same = |r: &&Region| {
            r.info == info && r.mapping.file == source.file && !r.mapping.guard.is_lost()
        };
        let mapping = match old.iter().find(same) {
            Some(same) => same.mapping.clone(),
            None => {
                let account = self.table.account();
                Arc::new(Mapping::new(&source, info.mmap_offset, info.size, account)?)
            }
        };
        let at = self.regions.partition_point(|r| r.guest_addr < info.guest_addr);
        self.regions.insert(
            at,
            Region {
                guest_addr: info.guest_addr,
                size: info.size,
                base: mapping.base(),
                info,
                mapping,
            },
        );
        Ok(())
    }

    /// A range at a front end's address, such as a ring's, or `None` unless it is within one
    /// region.
    pub fn user_area(&self, user_addr: u64, len: usize) -> Option<Area> {
        let (region, offset) = self.user_region(user_addr, len as u64)?;
        Some(Area::of_mapping(&region.mapping, offset as usize, len))
    }

    /// The guest-physical address of a range at a front end's address.
    pub(crate) fn user_to_guest(&self, user_addr: u64, len: u64) -> Option<u64> {
        let (region, offset) = self.user_region(user_addr, len)?;
        Some(region.guest_addr + offset)
    }

    fn user_region(&self, user_addr: u64, len: u64) -> Option<(&Region, u64)> {
        self.regions.iter().find_map(|region| {
            let offset = user_addr.checked_sub(region.info.user_addr)?;
            (offset <= region.size && len <= region.size - offset).then_some((region, offset))
        })
    }

    /// The guest-physical address of a pointer from [`GuestMemory::segments`].
    pub(crate) fn host_to_guest(&self, host: *mut libc::c_void) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = (host.addr() as u64).checked_sub(region.base.addr() as u64)?;
            (offset < region.size).then(|| region.guest_addr + offset)
        })
    }

    /// Marks written segments in a dirty log. Segments outside this memory are ignored.
    pub(crate) fn log_segments(&self, segments: &[iovec], log: &DirtyLog) {
        for segment in segments {
            if let Some(addr) = self.host_to_guest(segment.iov_base) {
                log.mark(addr, segment.iov_len as u64);
            }
        }
    }

    /// Starts translating addresses. `region` is the region of the last address, to be tried first.
    #[inline]
    pub(crate) fn lookup(&self, region: usize) -> Lookup<'_> {
        let mut lookup =
            Lookup { memory: self, region: 0, guest_addr: 0, size: 0, base: std::ptr::null_mut() };
        if let Some(found) = self.regions.get(region) {
            lookup.take(region, found);
        }
        lookup
    }
}

/// Translates guest-physical addresses. Caches the region of the last one, because most are in the
/// same region.
#[derive(Debug)]
pub(crate) struct Lookup<'a> {
    memory: &'a GuestMemory,
    /// The region's index in the table, and copies of its fields; `size` is 0 if there is no
    /// region.
    region: usize,
    guest_addr: u64,
    size: u64,
    base: *mut u8,
}

impl<'a> Lookup<'a> {
    /// The table.
    pub(crate) fn memory(&self) -> &'a GuestMemory {
        self.memory
    }

    /// The region to try first next time.
    #[inline]
    pub(crate) fn region(&self) -> usize {
        self.region
    }

    #[inline]
    fn take(&mut self, at: usize, region: &Region) {
        self.region = at;
        self.guest_addr = region.guest_addr;
        self.size = region.size;
        self.base = region.base;
    }

    /// The host address of a guest-physical address, and the number of bytes that follow in its
    /// region (at least one).
    #[inline(always)]
    fn find(&mut self, addr: u64) -> Option<(*mut u8, u64)> {
        let mut offset = addr.wrapping_sub(self.guest_addr);
        if offset >= self.size {
            self.search(addr)?;
            offset = addr - self.guest_addr;
        }
        Some((self.base.wrapping_add(offset as usize), self.size - offset))
    }

    #[cold]
    #[inline(never)]
    fn search(&mut self, addr: u64) -> Option<()> {
        let regions = &self.memory.regions;
        let at = regions.partition_point(|r| r.guest_addr <= addr).checked_sub(1)?;
        if addr - regions[at].guest_addr >= regions[at].size {
            return None;
        }
        self.take(at, &regions[at]);
        Some(())
    }

    /// Reads 16 bytes as two little-endian numbers, each byte once: a descriptor or a request's
    /// header.
    #[inline]
    pub(crate) fn read_pair(&mut self, addr: u64) -> Option<[u64; 2]> {
        let (at, left) = self.find(addr)?;
        if left >= 16 && at.addr() & 7 == 0 {
            let at: *mut u64 = at.cast();
            // SAFETY: `find` returned an address in a region that is mapped while the table is
            // borrowed, followed by `left` bytes. Both numbers are within these bytes and aligned,
            // and this process accesses them only with atomics.
            let (a, b) = unsafe { (AtomicU64::from_ptr(at), AtomicU64::from_ptr(at.add(1))) };
            return Some([
                u64::from_le(a.load(Ordering::Relaxed)),
                u64::from_le(b.load(Ordering::Relaxed)),
            ]);
        }
        self.read_pair_slow(addr)
    }

    #[cold]
    #[inline(never)]
    fn read_pair_slow(&mut self, addr: u64) -> Option<[u64; 2]> {
        let mut bytes = [0; 16];
        self.read(addr, &mut bytes)?;
        let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Some([half(0), half(8)])
    }

    /// Copies guest memory out, reading each byte once. Returns `None` if some of the range is not
    /// memory.
    pub(crate) fn read(&mut self, addr: u64, into: &mut [u8]) -> Option<()> {
        let mut done = 0;
        while done < into.len() {
            let (at, left) = self.find(addr.checked_add(done as u64)?)?;
            let n = left.min((into.len() - done) as u64) as usize;
            for (i, byte) in into[done..done + n].iter_mut().enumerate() {
                // SAFETY: `i` is less than `left`, the number of mapped bytes from `at`, and the
                // table is borrowed.
                *byte = unsafe { AtomicU8::from_ptr(at.add(i)) }.load(Ordering::Relaxed);
            }
            done += n;
        }
        Some(())
    }

    /// Copies into guest memory. Returns `None`, after writing the bytes before, if some of the
    /// range is not memory.
    pub(crate) fn write(&mut self, addr: u64, from: &[u8]) -> Option<()> {
        for (i, &byte) in from.iter().enumerate() {
            self.write_u8(addr.checked_add(i as u64)?, byte)?;
        }
        Some(())
    }

    /// Writes one byte.
    #[inline]
    pub(crate) fn write_u8(&mut self, addr: u64, value: u8) -> Option<()> {
        let (at, _) = self.find(addr)?;
        #[cfg(test)]
        if !faults::crash::store() {
            return Some(());
        }
        // SAFETY: `find` returned the address of a mapped byte, and the table is borrowed.
        unsafe { AtomicU8::from_ptr(at) }.store(value, Ordering::Relaxed);
        Some(())
    }

    /// Prefetches the cache line of an address that is likely to be read and written soon. Valid
    /// for any address; only the cached region is considered.
    #[inline(always)]
    pub(crate) fn prefetch(&self, addr: u64) {
        let offset = addr.wrapping_sub(self.guest_addr);
        if offset < self.size {
            prefetch(self.base.wrapping_add(offset as usize));
        }
    }

    /// Whether there is memory at the address.
    #[inline]
    pub(crate) fn has(&mut self, addr: u64) -> bool {
        self.find(addr).is_some()
    }

    /// Appends the segments of a range that is not empty, split where regions meet. Returns `None`,
    /// possibly after appending some, if some of the range is not memory or there would be more
    /// than `max` segments.
    #[inline(always)]
    pub(crate) fn segments(
        &mut self,
        addr: u64,
        len: u64,
        max: usize,
        out: &mut Vec<iovec>,
    ) -> Option<()> {
        let (at, left) = self.find(addr)?;
        if len > left {
            return self.split_segments(addr, len, max, out);
        }
        if out.len() >= max {
            return None;
        }
        out.push(iovec { iov_base: at.cast(), iov_len: len as usize });
        Some(())
    }

    #[cold]
    #[inline(never)]
    fn split_segments(
        &mut self,
        mut addr: u64,
        mut len: u64,
        max: usize,
        out: &mut Vec<iovec>,
    ) -> Option<()> {
        while len > 0 {
            let (at, left) = self.find(addr)?;
            if out.len() >= max {
                return None;
            }
            let n = left.min(len);
            out.push(iovec { iov_base: at.cast(), iov_len: n as usize });
            len -= n;
            // A region ends below 2^64.
            addr = addr.checked_add(n)?;
        }
        Some(())
    }
}
