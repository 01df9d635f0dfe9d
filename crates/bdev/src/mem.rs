//! A device in memory, shared by all cores, which another process can go on with.
//!
//! Its memory is a file without a name (a memfd), mapped as a whole, that takes a page when it is first written. The file
//! is as long as the device can ever become, so a resize moves nothing and no request ever meets memory that is not
//! mapped: a range that was cut off is emptied when the device grows over it again. Nobody can make the file shorter,
//! whoever has it open (it is sealed). Requests of several cores that overlap may mix their bytes, as on a disk.
//!
//! Behind all that a page says what the file is, for the process that takes it over: {magic, size in bytes}.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::channel::{Io, Kind, Status};
use crate::device::{Geometry, SEGMENTS};
use crate::error::{Error, ErrorKind};

/// Room for growth: so many times the first size, and at least [`ROOM_MIN`].
const ROOM: u64 = 4;
const ROOM_MIN: u64 = 64 << 30;
const PAGE: u64 = 4096;
/// Longest discard of one request: emptying resident pages takes the core some 50 ns each.
const DISCARD_MAX: u64 = 16 << 20;
/// "MRmem", a line feed, and the version.
const MAGIC: u64 = u64::from_le_bytes(*b"MRmem\n\0\x01");
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// See the module text.
pub(crate) struct MemDevice {
    base: *mut u8,
    /// Bytes in front of the last page.
    reserved: usize,
    file: OwnedFd,
}

// SAFETY: the mapping belongs to the device until it is dropped. Its bytes are only copied in and
// out through raw pointers, never referred to, so threads that meet there mix bytes and no more.
unsafe impl Send for MemDevice {}
// SAFETY: as above.
unsafe impl Sync for MemDevice {}

impl MemDevice {
    /// An empty device.
    pub fn new(size: u64) -> Result<MemDevice, Error> {
        let text = || format!("mem: no address space for {size} bytes");
        let reserved = size
            .checked_mul(ROOM)
            .and_then(|size| usize::try_from(size.max(ROOM_MIN).next_multiple_of(PAGE)).ok())
            .filter(|reserved| *reserved < isize::MAX as usize - PAGE as usize)
            .ok_or_else(|| Error::new(ErrorKind::Unsupported, text()))?;
        // SAFETY: the name is a C string; the calls about the descriptor take no pointers.
        let file = unsafe {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
            let file = libc::memfd_create(c"millrace-mem".as_ptr(), flags);
            if file < 0 {
                return Err(Error::io(text(), io::Error::last_os_error()));
            }
            let file = OwnedFd::from_raw_fd(file);
            let len = (reserved as u64 + PAGE) as libc::off_t;
            if libc::ftruncate(file.as_raw_fd(), len) != 0
                || libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) != 0
            {
                return Err(Error::io(text(), io::Error::last_os_error()));
            }
            file
        };
        let device = MemDevice::map(file, reserved)?;
        device.header(0).store(MAGIC, Ordering::Relaxed);
        device.set_size(size);
        Ok(device)
    }

    /// The device that a file of another process is, and its size.
    pub fn take(file: OwnedFd) -> Result<(MemDevice, u64), Error> {
        let wrong = |what| Error::new(ErrorKind::Unsupported, format!("mem: {what}"));
        // SAFETY: an all-zero `stat` is a valid value; the calls get a live one and no other pointer.
        let (sealed, len) = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            let known = libc::fstat(file.as_raw_fd(), &raw mut stat) == 0;
            let seals = libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS);
            (known && seals >= 0 && seals & SEALS == SEALS, stat.st_size as u64)
        };
        let reserved = len.checked_sub(PAGE).filter(|len| len.is_multiple_of(PAGE) && *len > 0);
        let reserved =
            reserved.filter(|_| sealed).ok_or_else(|| wrong("not a memory disk's file"))?;
        let device = MemDevice::map(file, reserved as usize)?;
        let size = device.header(1).load(Ordering::Relaxed);
        if device.header(0).load(Ordering::Relaxed) != MAGIC || size == 0 || size > reserved {
            return Err(wrong("a memory disk's file of another version"));
        }
        Ok((device, size))
    }

    fn map(file: OwnedFd, reserved: usize) -> Result<MemDevice, Error> {
        let (any, access) = (std::ptr::null_mut(), libc::PROT_READ | libc::PROT_WRITE);
        let (len, flags) = (reserved + PAGE as usize, libc::MAP_SHARED | libc::MAP_NORESERVE);
        // SAFETY: a new mapping at a place of the kernel's choice; the advice changes no content.
        let base = unsafe { libc::mmap(any, len, access, flags, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            let text = format!("mem: no address space for {len} bytes");
            return Err(Error::io(text, io::Error::last_os_error()));
        }
        // Huge pages where the system has them for shared memory, and no core dump of a disk. It is as good without.
        // SAFETY: the range was just mapped, and the advice changes no content.
        unsafe {
            libc::madvise(base, reserved, libc::MADV_HUGEPAGE);
            libc::madvise(base, len, libc::MADV_DONTDUMP);
        }
        Ok(MemDevice { base: base.cast(), reserved, file })
    }

    /// A number of the last page.
    fn header(&self, nth: usize) -> &AtomicU64 {
        let at = self.base.wrapping_add(self.reserved + 8 * nth).cast();
        // SAFETY: the last page lies behind `reserved` bytes in the mapping and is aligned; all that touch it are atomics.
        unsafe { AtomicU64::from_ptr(at) }
    }

    fn set_size(&self, size: u64) {
        self.header(1).store(size, Ordering::Relaxed);
    }

    /// What another process takes it over by.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
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

    /// Nobody asks for what is behind the smaller of the two sizes meanwhile, but what was asked
    /// for before may still be under way on other cores.
    pub fn resize(&self, old: u64, new: u64) -> Result<(), Error> {
        if new > self.reserved as u64 {
            let text = format!("mem: can grow to {} bytes", self.reserved);
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if new > old {
            self.zero(old, new - old).map_err(|error| Error::io("mem: cannot grow", error))?;
        }
        self.set_size(new);
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
            libc::madvise(whole, (last - first) as usize, libc::MADV_REMOVE)
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for MemDevice {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`; no channel is left, each holds the device.
        unsafe { libc::munmap(self.base.cast(), self.reserved + PAGE as usize) };
    }
}
