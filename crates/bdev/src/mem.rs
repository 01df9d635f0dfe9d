//! A device in memory, shared by all cores.
//!
//! Its memory is one anonymous mapping that takes a page when it is first written. Address space
//! is reserved for growth, so a resize moves nothing and no request ever meets memory that is not
//! mapped: a range that was cut off stays mapped, and is emptied when the device grows over it
//! again. Requests of several cores that overlap may mix their bytes, as on a disk.

use std::io;

use crate::channel::{Io, Kind, Status};
use crate::device::{Geometry, SEGMENTS};
use crate::error::{Error, ErrorKind};

/// Room for growth: so many times the first size, and at least [`ROOM_MIN`].
const ROOM: u64 = 4;
const ROOM_MIN: u64 = 64 << 30;
const PAGE: u64 = 4096;
/// Longest discard of one request: emptying resident pages takes the core some 50 ns each.
const DISCARD_MAX: u64 = 16 << 20;

/// See the module text.
pub(crate) struct MemDevice {
    base: *mut u8,
    reserved: usize,
}

// SAFETY: the mapping belongs to the device until it is dropped. Its bytes are only copied in and
// out through raw pointers, never referred to, so threads that meet there mix bytes and no more.
unsafe impl Send for MemDevice {}
// SAFETY: as above.
unsafe impl Sync for MemDevice {}

impl MemDevice {
    pub fn new(size: u64) -> Result<MemDevice, Error> {
        let text = |size: u64| format!("mem: no address space for {size} bytes");
        let reserved = size
            .checked_mul(ROOM)
            .and_then(|size| usize::try_from(size.max(ROOM_MIN).next_multiple_of(PAGE)).ok())
            .ok_or_else(|| Error::new(ErrorKind::Unsupported, text(size)))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), reserved, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(Error::io(text(size), io::Error::last_os_error()));
        }
        let device = MemDevice { base: base.cast(), reserved };
        device.open(size)?;
        Ok(device)
    }

    pub fn geometry(&self, size_bytes: u64, block_size: u32) -> Geometry {
        Geometry {
            size_bytes,
            block_size,
            physical_block_size: block_size.max(PAGE as u32),
            min_io: PAGE as u32,
            opt_io: 0,
            read_only: false,
            // As durable as it will ever be.
            volatile_cache: false,
            discard: true,
            write_zeroes: true,
            zeroes_after_discard: true,
            max_segments: SEGMENTS,
            discard_alignment: PAGE as u32,
            discard_max: DISCARD_MAX,
            write_zeroes_max: DISCARD_MAX,
        }
    }

    /// Makes the first `size` bytes usable.
    fn open(&self, size: u64) -> Result<(), Error> {
        let len = size.next_multiple_of(PAGE) as usize;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range lies in the mapping, callers see to that; it becomes more accessible.
        if unsafe { libc::mprotect(self.base.cast(), len, access) } != 0 {
            let text = format!("mem: cannot have {size} bytes");
            return Err(Error::io(text, io::Error::last_os_error()));
        }
        Ok(())
    }

    /// Nobody asks for what is behind the smaller of the two sizes meanwhile, but what was asked
    /// for before may still be under way on other cores.
    pub fn resize(&self, old: u64, new: u64) -> Result<(), Error> {
        if new > self.reserved as u64 {
            let text = format!("mem: can grow to {} bytes", self.reserved);
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if new > old {
            self.open(new)?;
            self.zero(old, new - old).map_err(|error| Error::io("mem: cannot grow", error))?;
        }
        Ok(())
    }

    /// Does a request at once.
    ///
    /// # Safety
    /// The range lies in the device, and the segments, of a read or a write together as long as
    /// the range, are valid.
    #[inline]
    pub unsafe fn perform(&self, io: &Io<'_>) -> Status {
        let mut at = io.offset as usize;
        match io.kind {
            Kind::Read => {
                for segment in io.segments {
                    // SAFETY: `at` and the segment's length stay in the device, which is mapped as
                    // a whole; the segment is valid. Nobody has a reference to either.
                    unsafe {
                        let from = self.base.add(at);
                        std::ptr::copy(from, segment.iov_base.cast(), segment.iov_len);
                    }
                    at += segment.iov_len;
                }
            }
            Kind::Write => {
                for segment in io.segments {
                    // SAFETY: as above.
                    unsafe {
                        let to = self.base.add(at);
                        std::ptr::copy(segment.iov_base.cast(), to, segment.iov_len);
                    }
                    at += segment.iov_len;
                }
            }
            Kind::Flush => {}
            Kind::Discard | Kind::WriteZeroes { .. } => {
                if let Err(error) = self.zero(io.offset, io.len) {
                    return Status::of(error.raw_os_error().unwrap_or(libc::EIO));
                }
            }
        }
        Status::Ok
    }

    /// Whole pages are given back, and come back as zeroes; their parts are written over.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        let (end, first) = (offset + len, offset.next_multiple_of(PAGE));
        let last = end / PAGE * PAGE;
        if first >= last {
            // SAFETY: the callers' range lies in the device.
            unsafe { self.base.add(offset as usize).write_bytes(0, len as usize) };
            return Ok(());
        }
        // SAFETY: all three parts lie in the callers' range, which lies in the device. What is
        // given back stays mapped.
        let done = unsafe {
            self.base.add(offset as usize).write_bytes(0, (first - offset) as usize);
            self.base.add(last as usize).write_bytes(0, (end - last) as usize);
            let whole = self.base.add(first as usize).cast();
            libc::madvise(whole, (last - first) as usize, libc::MADV_DONTNEED)
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for MemDevice {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; no channel is left, each holds the device.
        unsafe { libc::munmap(self.base.cast(), self.reserved) };
    }
}
