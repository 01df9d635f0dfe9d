//! Mappings of shared files, and long-lived areas of them.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use reactor::{Guard, drop_in_background};

use crate::memory::account::{Account, Entry};
use crate::memory::error::MemoryError;
#[cfg(test)]
use crate::memory::faults;

/// A shared mapping of a part of a file.
#[derive(Debug)]
pub(super) struct Mapping {
    /// Dropped before the pages.
    pub(super) guard: Guard,
    /// The requested range begins `offset_in_map` bytes into the pages.
    pages: Pages,
    offset_in_map: usize,
    len: usize,
    /// Device and inode of the file.
    pub(super) file: (u64, u64),
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
pub(super) struct Source<'a> {
    fd: BorrowedFd<'a>,
    /// Device and inode.
    pub(super) file: (u64, u64),
    /// The alignment of offsets.
    align: u64,
}

impl<'a> Source<'a> {
    pub(super) fn new(
        fd: BorrowedFd<'a>,
        offset: u64,
        len: u64,
    ) -> Result<Source<'a>, MemoryError> {
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
    pub(super) fn new(
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
        // MemoryGuard the guest's memory out of core dumps; a failure is harmless. SAFETY: the
        // range was just mapped, and the advice changes no content.
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
    pub(super) fn base(&self) -> *mut u8 {
        self.pages.map.as_ptr().wrapping_add(self.offset_in_map)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        drop_in_background(UnusedPages(self.map, self.map_len, self.entry.take()));
    }
}

/// Pages to unmap.
struct UnusedPages(
    NonNull<u8>,
    usize,
    #[expect(dead_code, reason = "what counts is that it is dropped afterwards")] Option<Entry>,
);

// SAFETY: a mapping belongs to the process, and no other owner has this one's address.
unsafe impl Send for UnusedPages {}

impl Drop for UnusedPages {
    fn drop(&mut self) {
        // SAFETY: the mapping was that of `Pages`. Every pointer into it belongs to a holder of
        // `Pages`, and all holders are gone.
        unsafe { reactor::unmap(self.0.as_ptr(), self.1) };
    }
}

/// A long-lived part of shared memory. An access that is out of bounds or not aligned panics:
/// offsets come from our own code, never from the guest.
#[derive(Clone, Debug)]
pub struct Area {
    base: *mut u8,
    len: usize,
    mapping: Arc<Mapping>,
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
            if faults::store_buffer::is_on() {
                let area = self.clone();
                return faults::store_buffer::hold(Box::new(move || {
                    area.$store(offset, value, order)
                }));
            }
            #[cfg(test)]
            if !faults::crash::store() {
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
        Ok(Area { base: mapping.base(), len: mapping.len, mapping })
    }

    /// A part of a mapping. `offset + len` must be within it.
    pub(super) fn of_mapping(mapping: &Arc<Mapping>, offset: usize, len: usize) -> Area {
        Area { base: mapping.base().wrapping_add(offset), len, mapping: mapping.clone() }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether some of its memory was missing: reads may have returned zeroes that were never
    /// written, and writes may be lost. Covers everything that this thread did before.
    pub fn is_lost(&self) -> bool {
        self.mapping.guard.is_lost()
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
            mapping: self.mapping.clone(),
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

/// Prefetches a cache line for writing, on processors that support it.
#[inline(always)]
pub(super) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address is allowed: it has no effect that the program can observe,
    // and does not fault.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Makes all earlier stores visible to other processors before any later load.
#[inline]
pub(crate) fn full_fence() {
    #[cfg(test)]
    faults::store_buffer::drain();
    std::sync::atomic::fence(Ordering::SeqCst);
}
