//! The guest's memory: regions of guest-physical addresses, each a memfd that the target also maps.
//!
//! The target may write to it at any time, so there is never a Rust reference to it: bytes are
//! copied in and out through [`Mapping`], and the rings' numbers are atomics.
//!
//! An address outside the memory is a bug of the caller and panics. Addresses never come from the
//! target: it returns ids and lengths, which the rings check.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

use crate::{Error, Result};

/// The page size of guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// 4 KiB.
    #[default]
    Small,
    /// 2 MiB; the system must have reserved some.
    Huge,
}

/// A shared mapping.
#[derive(Debug)]
pub(crate) struct Mapping {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread. All accesses below are atomics, or
// copies of bytes that another process may change.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a range of a file for reading and writing.
    pub fn new(fd: BorrowedFd<'_>, offset: u64, len: usize, populate: bool) -> Result<Mapping> {
        let flags = libc::MAP_SHARED | if populate { libc::MAP_POPULATE } else { 0 };
        let offset = offset as libc::off_t;
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                fd.as_raw_fd(),
                offset,
            )
        };
        match NonNull::new(at.cast::<u8>()) {
            Some(start) if at != libc::MAP_FAILED => Ok(Mapping { at: start, len }),
            _ => Err(Error::last(format!("mapping {len} bytes of shared memory"))),
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn address(&self) -> u64 {
        self.at.as_ptr() as u64
    }

    /// A pointer to `len` bytes at an offset. All of them are within the mapping.
    #[inline]
    pub fn pointer(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "{len} bytes at {offset} of a mapping of {}",
            self.len
        );
        // SAFETY: the check above ensures that the offset is within the mapping.
        unsafe { self.at.as_ptr().add(offset) }
    }

    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.pointer(offset, bytes.len());
        // SAFETY: `from` has this many bytes, and `bytes` is private memory elsewhere. If another
        // process writes meanwhile, the result is a mix of old and new bytes, nothing worse.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.pointer(offset, bytes.len());
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }
}

macro_rules! atomic {
    ($name:ident, $type:ty) => {
        #[inline]
        pub fn $name(&self, offset: usize) -> &$type {
            let at = self.pointer(offset, size_of::<$type>()).cast::<$type>();
            assert!(at.is_aligned(), "misaligned atomic at {offset}");
            // SAFETY: the address is mapped while `self` lives, and aligned; atomics may be shared
            // with other processes.
            unsafe { &*at }
        }
    };
}

impl Mapping {
    atomic!(u8_at, AtomicU8);
    atomic!(u16_at, AtomicU16);
    atomic!(u32_at, AtomicU32);
    atomic!(u64_at, AtomicU64);
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `self` owns this mapping, and no pointer into it outlives `self`: holders of
        // pointers also hold the memory.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// Creates a memfd.
pub(crate) fn memfd(name: &std::ffi::CStr, size: u64, pages: Pages) -> Result<OwnedFd> {
    let huge = if pages == Pages::Huge { libc::MFD_HUGETLB } else { 0 };
    // SAFETY: the name is a C string, which the call only reads.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | huge) };
    if fd < 0 {
        return Err(Error::last("creating a memfd"));
    }
    // SAFETY: the call above returned this descriptor, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the call takes only integers.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), size as libc::off_t) } < 0 {
        return Err(Error::last(format!("extending a memfd to {size} bytes")));
    }
    Ok(fd)
}

/// A range of guest-physical memory in a memfd of its own.
#[derive(Debug)]
pub struct Region {
    guest_addr: u64,
    map: Mapping,
    fd: OwnedFd,
}

impl Region {
    /// Creates memory at a guest-physical address.
    ///
    /// # Errors
    /// If the system has no memory of this kind.
    pub fn new(guest_addr: u64, size: u64, pages: Pages) -> Result<Region> {
        let fd = memfd(c"guest", size, pages)?;
        let map = Mapping::new(fd.as_fd(), 0, size as usize, true)?;
        Ok(Region { guest_addr, map, fd })
    }

    /// The guest-physical address of the first byte.
    pub fn guest_addr(&self) -> u64 {
        self.guest_addr
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.map.len() as u64
    }

    /// The address of the first byte in the front end, as used by SET_VRING_ADDR.
    pub fn user_addr(&self) -> u64 {
        self.map.address()
    }

    /// {guest address, size, user address, offset in the file}, as in messages.
    pub fn encode(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        let words = [self.guest_addr, self.size(), self.user_addr(), 0];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

impl AsFd for Region {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// All of a guest's memory.
#[derive(Debug)]
pub struct Memory {
    regions: Vec<Region>,
}

impl Memory {
    /// Creates one region at address 0.
    ///
    /// # Errors
    /// If the system has no memory of this kind.
    pub fn new(size: u64, pages: Pages) -> Result<Memory> {
        Ok(Memory { regions: vec![Region::new(0, size, pages)?] })
    }

    /// Uses these regions, which must not overlap.
    pub fn with_regions(regions: Vec<Region>) -> Memory {
        Memory { regions }
    }

    /// The regions.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The region that has `len` bytes at an address, and their offset in it.
    #[inline]
    pub(crate) fn find(&self, addr: u64, len: usize) -> (&Mapping, usize) {
        self.regions
            .iter()
            .find(|region| {
                addr.checked_sub(region.guest_addr).is_some_and(|offset| {
                    offset <= region.size() && len as u64 <= region.size() - offset
                })
            })
            .map(|region| (&region.map, (addr - region.guest_addr) as usize))
            .unwrap_or_else(|| panic!("the guest has no {len} bytes at {addr:#x}"))
    }

    /// Translates a guest address into a front end's address.
    pub fn user_addr(&self, addr: u64) -> u64 {
        let (map, offset) = self.find(addr, 1);
        map.address() + offset as u64
    }

    /// Copies bytes out. They must be in one region.
    pub fn read(&self, addr: u64, bytes: &mut [u8]) {
        let (map, offset) = self.find(addr, bytes.len());
        map.read(offset, bytes);
    }

    /// Copies bytes in. They must be in one region.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        let (map, offset) = self.find(addr, bytes.len());
        map.write(offset, bytes);
    }

    /// A byte.
    pub fn u8_at(&self, addr: u64) -> &AtomicU8 {
        let (map, offset) = self.find(addr, 1);
        map.u8_at(offset)
    }

    /// Two aligned bytes.
    pub fn u16_at(&self, addr: u64) -> &AtomicU16 {
        let (map, offset) = self.find(addr, 2);
        map.u16_at(offset)
    }

    /// Four aligned bytes.
    pub fn u32_at(&self, addr: u64) -> &AtomicU32 {
        let (map, offset) = self.find(addr, 4);
        map.u32_at(offset)
    }

    /// Eight aligned bytes.
    pub fn u64_at(&self, addr: u64) -> &AtomicU64 {
        let (map, offset) = self.find(addr, 8);
        map.u64_at(offset)
    }

    /// A pointer to bytes in one region, valid while the memory lives.
    pub(crate) fn pointer(&self, addr: u64, len: usize) -> *mut u8 {
        let (map, offset) = self.find(addr, len);
        map.pointer(offset, len)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn regions_are_found_by_guest_addresses() {
        let regions = [0u64, 1 << 20].map(|at| Region::new(at, 64 << 10, Pages::Small).unwrap());
        let memory = Memory::with_regions(regions.into());
        memory.write((1 << 20) + 8, &7u64.to_le_bytes());
        assert_eq!(memory.u64_at((1 << 20) + 8).load(Ordering::Relaxed), 7);
        assert_eq!(memory.user_addr((1 << 20) + 8), memory.regions()[1].user_addr() + 8);
        let mut bytes = [1; 8];
        memory.read((64 << 10) - 8, &mut bytes);
        assert_eq!(bytes, [0; 8]);
    }

    #[test]
    #[should_panic(expected = "the guest has no 8 bytes at 0xfffc")]
    fn bytes_beyond_a_region_panic() {
        Memory::new(64 << 10, Pages::Small).unwrap().read((64 << 10) - 4, &mut [0; 8]);
    }
}
