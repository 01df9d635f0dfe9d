//! The guest's memory: regions of shared files that the front end sends, mapped once, and the only
//! way to access them.
//!
//! The guest writes its memory while we read it, so there is never a Rust reference to it. Data is
//! copied into private memory first and checked there. [`Area`] is a long-lived part (of a ring, an
//! in-flight region, the dirty log); [`GuestMemory`] translates the addresses in requests. Both
//! check each access against their bounds. All unsafe code for shared memory is in this file.
//!
//! A [`GuestMemory`] is an immutable table. Adding or removing a region creates a new table that
//! shares the mappings of the old one, so a core may continue with its own table until it takes the
//! new one. A mapping is unmapped with the last table or area that holds it.
//!
//! The size of a file is checked when it is mapped. The guest cannot change it, but the front end
//! can truncate the file, and huge pages may run out. An access to missing memory then reads zeroes
//! ([`reactor::Guard`]), and the mapping is lost from then on ([`GuestMemory::is_lost`],
//! [`Area::is_lost`]). Check this whenever [`reactor::losses`] has changed, before acting on what
//! was read and before reporting what was written.

pub(crate) mod account;
pub(crate) mod dirty;
pub(crate) mod elsewhere;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use libc::iovec;
use reactor::Guard;

use crate::memory::account::{Account, Entry, NoRoom, Table};
use crate::memory::dirty::DirtyLog;
use crate::memory::elsewhere::drop_elsewhere;
pub use crate::protocol::message::RegionInfo;

/// Most regions of a table.
pub const REGIONS_MAX: usize = 512;

/// Why memory cannot be mapped.
#[derive(Debug)]
pub enum MemoryError {
    /// The region is empty, or its end is beyond the address space or the file offset's range.
    Range(RegionInfo),
    /// The region shares guest-physical or user addresses with another.
    Overlap(RegionInfo),
    /// The table has [`REGIONS_MAX`] regions.
    TooMany,
    /// The region to remove is not in the table.
    Unknown(RegionInfo),
    /// The file is shorter than the region needs.
    Short {
        /// Bytes that the file must have.
        needed: u64,
        /// Bytes that it has.
        size: u64,
    },
    /// The front end would exceed its share.
    NoRoom(NoRoom),
    /// The descriptor is not a regular file.
    NotAFile,
    /// The system refused.
    Io(io::Error),
}

impl std::fmt::Display for MemoryError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let region = |f: &mut std::fmt::Formatter<'_>, what: &str, r: &RegionInfo| {
            write!(f, "memory region at {:#x} of {:#x} bytes {what}", r.guest_addr, r.size)
        };
        match self {
            MemoryError::Range(r) => region(f, "is empty or too long", r),
            MemoryError::Overlap(r) => region(f, "overlaps another", r),
            MemoryError::Unknown(r) => region(f, "is not in the table", r),
            MemoryError::TooMany => write!(f, "more than {REGIONS_MAX} memory regions"),
            MemoryError::Short { needed, size } => {
                write!(f, "memory file has {size} bytes, {needed} are needed")
            }
            MemoryError::NoRoom(why) => why.fmt(f),
            MemoryError::NotAFile => write!(f, "memory descriptor is not a regular file"),
            MemoryError::Io(_) => write!(f, "mapping memory"),
        }
    }
}

impl std::error::Error for MemoryError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            MemoryError::Io(error) => Some(error),
            _ => None,
        }
    }
}

/// A shared mapping of a part of a file.
#[derive(Debug)]
struct Mapping {
    /// Dropped before the pages.
    guard: Guard,
    /// The requested range begins `offset_in_map` bytes into the pages.
    pages: Pages,
    offset_in_map: usize,
    len: usize,
    /// Device and inode of the file.
    file: (u64, u64),
}

/// The mapped pages.
#[derive(Debug)]
struct Pages {
    map: NonNull<u8>,
    map_len: usize,
    /// `Some` until it is dropped.
    entry: Option<Entry>,
}

// SAFETY: a mapping belongs to the process, not to a thread. It is unmapped only in `drop`, by its
// last holder, and the memory is accessed only through atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared `Mapping` exposes only its address and lengths.
unsafe impl Sync for Mapping {}

/// A file whose range can be mapped.
struct Source<'a> {
    fd: BorrowedFd<'a>,
    /// Device and inode.
    file: (u64, u64),
    /// The alignment of offsets.
    align: u64,
}

impl<'a> Source<'a> {
    fn new(fd: BorrowedFd<'a>, offset: u64, len: u64) -> Result<Source<'a>, MemoryError> {
        // SAFETY: all-zero bytes are a valid `stat`, a struct of integers.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `fd` is open while it is borrowed, and `stat` is a live local variable.
        if unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } != 0 {
            return Err(MemoryError::Io(io::Error::last_os_error()));
        }
        if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(MemoryError::NotAFile);
        }
        let needed = offset.checked_add(len).ok_or_else(too_long)?;
        let size = stat.st_size as u64;
        if needed > size {
            return Err(MemoryError::Short { needed, size });
        }
        // Huge pages can be mapped only at multiples of their size, which is the file's block size.
        let block = u64::try_from(stat.st_blksize).unwrap_or(0);
        let align = if block.is_power_of_two() { block.max(4096) } else { 4096 };
        Ok(Source { fd, file: (stat.st_dev, stat.st_ino), align })
    }
}

fn too_long() -> MemoryError {
    MemoryError::Io(io::Error::from_raw_os_error(libc::EOVERFLOW))
}

impl Mapping {
    fn new(
        source: &Source<'_>,
        offset: u64,
        len: u64,
        account: &Account,
    ) -> Result<Mapping, MemoryError> {
        let align = source.align;
        let offset_in_map = offset & (align - 1);
        let map_len = len
            .checked_add(offset_in_map)
            .and_then(|len| len.checked_next_multiple_of(align))
            .filter(|&len| len > 0 && len <= isize::MAX as u64)
            .ok_or_else(too_long)?;
        let map_offset = i64::try_from(offset - offset_in_map).map_err(|_| too_long())?;
        let entry = account.enter(map_len).map_err(MemoryError::NoRoom)?;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_len as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                source.fd.as_raw_fd(),
                map_offset,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(MemoryError::Io(io::Error::last_os_error()));
        }
        let pages = Pages {
            map: NonNull::new(map.cast()).ok_or(MemoryError::NotAFile)?,
            map_len: map_len as usize,
            entry: Some(entry),
        };
        // Keep the guest's memory out of core dumps; a failure is harmless. SAFETY: the range was
        // just mapped, and the advice changes no content.
        unsafe { libc::madvise(map, map_len as usize, libc::MADV_DONTDUMP) };
        // SAFETY: the range is the whole mapping, in multiples of its file's pages. It is unmapped
        // after the guard is dropped, and never referenced.
        let guard = unsafe { Guard::new(pages.map.as_ptr(), pages.map_len) };
        Ok(Mapping {
            guard,
            pages,
            offset_in_map: offset_in_map as usize,
            len: len as usize,
            file: source.file,
        })
    }

    /// The start of the requested range; `len` bytes from here are mapped.
    fn base(&self) -> *mut u8 {
        self.pages.map.as_ptr().wrapping_add(self.offset_in_map)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        drop_elsewhere(Unneeded(self.map, self.map_len, self.entry.take()));
    }
}

/// Pages to unmap.
struct Unneeded(
    NonNull<u8>,
    usize,
    #[expect(dead_code, reason = "what counts is that it is dropped afterwards")] Option<Entry>,
);

// SAFETY: a mapping belongs to the process, and no other owner has this one's address.
unsafe impl Send for Unneeded {}

impl Drop for Unneeded {
    fn drop(&mut self) {
        // SAFETY: the mapping was that of `Pages`. Every pointer into it belongs to a holder of
        // `Pages`, and all holders are gone.
        unsafe { libc::munmap(self.0.as_ptr().cast(), self.1) };
    }
}

/// A long-lived part of shared memory. An access that is out of bounds or not aligned panics:
/// offsets come from our own code, never from the guest.
#[derive(Clone, Debug)]
pub struct Area {
    base: *mut u8,
    len: usize,
    keep: Arc<Mapping>,
}

// SAFETY: the pointer is valid on any thread while the mapping is held, and is used only for atomic
// accesses.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

macro_rules! access {
    ($load:ident, $store:ident, $type:ty, $atomic:ty) => {
        /// Reads a little-endian number at `offset` bytes.
        #[inline]
        pub(crate) fn $load(&self, offset: usize, order: Ordering) -> $type {
            let at = self.at(offset, size_of::<$type>());
            // SAFETY: `at` checked that the bytes are aligned and within the area, which is mapped
            // while `self` holds the mapping. Other processes change them through their own
            // mappings of the file; this process uses only atomics.
            <$type>::from_le(unsafe { <$atomic>::from_ptr(at.cast()) }.load(order))
        }

        /// Writes a little-endian number at `offset` bytes.
        #[inline]
        pub(crate) fn $store(&self, offset: usize, value: $type, order: Ordering) {
            let at = self.at(offset, size_of::<$type>());
            #[cfg(test)]
            if store_buffer::is_on() {
                let area = self.clone();
                return store_buffer::hold(Box::new(move || area.$store(offset, value, order)));
            }
            #[cfg(test)]
            if !crash::store() {
                return;
            }
            // SAFETY: as for the load.
            unsafe { <$atomic>::from_ptr(at.cast()) }.store(value.to_le(), order);
        }
    };
}

impl Area {
    /// Maps `len` bytes of a file from `offset`, for example an in-flight region or a dirty log.
    pub fn map(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<Area, MemoryError> {
        Area::map_for(&Account::default(), fd, offset, len)
    }

    /// Like [`Area::map`], counted in a front end's account.
    pub(crate) fn map_for(
        account: &Account,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
    ) -> Result<Area, MemoryError> {
        let source = Source::new(fd, offset, len)?;
        let mapping = Arc::new(Mapping::new(&source, offset, len, account)?);
        Ok(Area { base: mapping.base(), len: mapping.len, keep: mapping })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether some of its memory was missing: reads may have returned zeroes that were never
    /// written, and writes may be lost. Covers everything that this thread did before.
    pub fn is_lost(&self) -> bool {
        self.keep.guard.is_lost()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of the area, or `None` if it is not within the area.
    pub fn part(&self, offset: usize, len: usize) -> Option<Area> {
        (offset <= self.len && len <= self.len - offset).then(|| Area {
            base: self.base.wrapping_add(offset),
            len,
            keep: self.keep.clone(),
        })
    }

    /// Whether it begins at a multiple of `align`, a power of two.
    pub(crate) fn is_aligned(&self, align: usize) -> bool {
        self.base.addr() & (align - 1) == 0
    }

    #[inline]
    fn at(&self, offset: usize, size: usize) -> *mut u8 {
        let at = self.base.wrapping_add(offset);
        assert!(
            offset < self.len && size <= self.len - offset && at.addr() & (size - 1) == 0,
            "{size} bytes at {offset} of an area of {}",
            self.len
        );
        at
    }

    access!(load_u8, store_u8, u8, AtomicU8);
    access!(load_u16, store_u16, u16, AtomicU16);
    access!(load_u32, store_u32, u32, AtomicU32);
    access!(load_u64, store_u64, u64, AtomicU64);

    /// Prefetches the cache line at `offset` for writing.
    #[inline(always)]
    pub(crate) fn prefetch(&self, offset: usize) {
        prefetch(self.base.wrapping_add(offset));
    }

    /// Reads the 16 bytes at `offset` as two little-endian numbers: first the second one, with
    /// `order`.
    #[inline]
    pub(crate) fn load_pair(&self, offset: usize, order: Ordering) -> [u64; 2] {
        let at: *mut u64 = self.at(offset, 16).cast();
        // SAFETY: `at` checked that the 16 bytes are within the area and aligned; otherwise as for
        // the loads above.
        let (a, b) = unsafe { (AtomicU64::from_ptr(at), AtomicU64::from_ptr(at.add(1))) };
        let b = u64::from_le(b.load(order));
        [u64::from_le(a.load(Ordering::Relaxed)), b]
    }

    /// Sets bits of the byte at `offset`.
    pub(crate) fn set_bits(&self, offset: usize, bits: u8, order: Ordering) {
        let at = self.at(offset, 1);
        // SAFETY: as for the loads and stores above.
        unsafe { AtomicU8::from_ptr(at) }.fetch_or(bits, order);
    }
}

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
        Some(Area {
            base: region.base.wrapping_add(offset as usize),
            len,
            keep: region.mapping.clone(),
        })
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

/// Prefetches a cache line for writing, on processors that support it.
#[inline(always)]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address is allowed: it has no effect that the program can observe,
    // and does not fault.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
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
        if !crash::store() {
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

/// Makes all earlier stores visible to other processors before any later load.
#[inline]
pub(crate) fn full_fence() {
    #[cfg(test)]
    store_buffer::drain();
    std::sync::atomic::fence(Ordering::SeqCst);
}

/// Simulates a processor that delays its stores until a fence, as any processor may: stores into
/// areas wait here. Waiting stores are not forwarded to loads.
#[cfg(test)]
pub(crate) mod store_buffer {
    use std::cell::RefCell;

    type Store = Box<dyn FnOnce()>;

    thread_local! {
        static WAITING: RefCell<Option<Vec<Store>>> = const { RefCell::new(None) };
    }

    pub(super) fn is_on() -> bool {
        WAITING.with_borrow(Option::is_some)
    }

    pub(super) fn hold(store: Store) {
        WAITING.with_borrow_mut(|waiting| waiting.as_mut().expect("it is on").push(store));
    }

    pub(super) fn drain() {
        if let Some(waiting) = WAITING.take() {
            waiting.into_iter().for_each(|store| store());
            WAITING.set(Some(Vec::new()));
        }
    }

    /// Runs `f` on such a processor, then `meanwhile` on another one, while the stores of the first
    /// are delayed.
    pub(crate) fn with<A, B>(f: impl FnOnce() -> A, meanwhile: impl FnOnce() -> B) -> (A, B) {
        WAITING.set(Some(Vec::new()));
        let a = f();
        let waiting = WAITING.take().expect("it was on");
        let b = meanwhile();
        waiting.into_iter().for_each(|store| store());
        (a, b)
    }
}

/// Simulates the end of the process between two stores into shared memory: all stores after the
/// n-th are dropped.
#[cfg(test)]
pub(crate) mod crash {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// Counts a store. Returns whether it is made.
    pub(super) fn store() -> bool {
        let left = LEFT.get();
        LEFT.set(left.map(|left| left.saturating_sub(1)));
        left != Some(0)
    }

    /// Drops every store of this thread after the next `n`.
    pub(crate) fn after(n: u64) {
        LEFT.set(Some(n));
    }

    /// Makes all stores again.
    pub(crate) fn over() {
        LEFT.set(None);
    }

    /// Runs `f` on behalf of another process: its stores are made and not counted.
    pub(crate) fn not_during<T>(f: impl FnOnce() -> T) -> T {
        let left = LEFT.take();
        let result = f();
        LEFT.set(left);
        result
    }

    /// Whether stores are dropped now.
    pub(crate) fn happened() -> bool {
        LEFT.get() == Some(0)
    }
}
