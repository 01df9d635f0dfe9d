//! A file mapped into memory (`engine=mmap`): reads of cached pages are copied from the mapping.
//! The only system call is the one that asks whether the pages are resident.
//!
//! A mapping has two hazards that a core must avoid. A page that is not resident is read by a page
//! fault, and the core would stall for as long as the disk takes. A page that cannot be read (the
//! file was truncated, the disk fails) raises a signal that ends the process. So:
//!
//! - Only reads are copied, only short ones, and only if `mincore` says that all their pages are
//!   resident. Everything else is a read or a write of the descriptor, through the same cache, so
//!   both see the same bytes. Writes are never copied: the first write to a clean page waits for
//!   the file system, and may find no space, which raises a signal.
//! - The kernel may reclaim a page between `mincore` and the copy. Then the copy waits for the
//!   disk, once. This is rare, and it is the price of not locking the page.
//! - A [`Guard`] maps empty memory over the mapping if a page cannot be read. The copy continues,
//!   its result is discarded, and this and all later reads are reads of the descriptor, which
//!   report the error.

use std::os::fd::{AsRawFd, BorrowedFd};

use reactor::Guard;

const PAGE: usize = 4096;
/// Longest read that is copied: takes some 10 µs of the core's time.
const COPY_MAX: usize = 64 << 10;

/// A mapped file.
pub(crate) struct Mapping {
    /// Declared before `pages`, so that it is dropped first.
    guard: Guard,
    pages: Pages,
}

/// The mapping.
struct Pages {
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping is read through raw pointers only and stays until this is dropped, which
// happens once; threads may read it concurrently.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a file. `None` if the mapping has no use, because the kernel
    /// does not tell what is resident.
    pub fn new(fd: BorrowedFd<'_>, len: u64) -> Option<Mapping> {
        let len = usize::try_from(len).ok().filter(|&len| len > 0)?;
        if !tells(fd) {
            return None;
        }
        let (any, access) = (std::ptr::null_mut(), libc::PROT_READ);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { libc::mmap(any, len, access, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return None;
        }
        let pages = Pages { base: base.cast(), len };
        // SAFETY: the whole mapping, which is unmapped after the guard is dropped. It is only
        // copied from, by raw pointers.
        let guard = unsafe { Guard::new(pages.base, len.next_multiple_of(PAGE)) };
        Some(Mapping { guard, pages })
    }

    /// Copies a range to the segments. False if the descriptor must be read, because the copy might
    /// wait; then the segments may hold anything.
    ///
    /// # Safety
    /// The segments are valid for writes, and together `len` bytes long.
    pub unsafe fn read(&self, offset: u64, len: u64, segments: &[libc::iovec]) -> bool {
        let Some(end) = offset.checked_add(len).filter(|&end| end <= self.pages.len as u64) else {
            return false;
        };
        let first = offset as usize / PAGE;
        let pages = (end as usize).div_ceil(PAGE) - first;
        if len as usize > COPY_MAX || self.guard.is_lost() {
            return false;
        }
        let mut resident = [0_u8; COPY_MAX / PAGE + 1];
        let start = self.pages.base.wrapping_add(first * PAGE);
        // SAFETY: the range lies in the mapping, and `resident` has a byte for each of its pages: a
        // range of COPY_MAX bytes may touch one page more than it would fill.
        if unsafe { libc::mincore(start.cast(), pages * PAGE, resident.as_mut_ptr()) } != 0
            || resident[..pages].iter().any(|page| page & 1 == 0)
        {
            return false;
        }
        let mut at = offset as usize;
        for segment in segments {
            // SAFETY: `at` and the segment's length stay below `end`, which lies in the mapping;
            // the segment is valid. The handler replaces a page that cannot be read by an empty
            // one.
            unsafe {
                let from = self.pages.base.add(at);
                std::ptr::copy_nonoverlapping(from, segment.iov_base.cast(), segment.iov_len);
            }
            at += segment.iov_len;
        }
        !self.guard.is_lost()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `Mapping::new`, which nothing copies from any more.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// Whether `mincore` tells the truth about this file. To a process that neither owns the file nor
/// may write it, the kernel says that everything is resident.
fn tells(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut stat: libc::stat64 = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is live; the others take no pointers.
    unsafe {
        libc::fstat64(fd.as_raw_fd(), &raw mut stat) == 0
            && (libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) & libc::O_ACCMODE == libc::O_RDWR
                || stat.st_uid == libc::geteuid())
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "files of the host, for a test")]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn file(name: &str, len: usize) -> std::fs::File {
        let dir = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let path = dir.join(format!("mapped-{name}-{}", std::process::id()));
        std::fs::write(&path, vec![7; len]).unwrap();
        let options = std::fs::OpenOptions::new().read(true).write(true).clone();
        let file = options.open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file
    }

    fn read(mapping: &Mapping, offset: u64, bytes: &mut [u8]) -> bool {
        let (a, b) = bytes.split_at_mut(bytes.len() / 3);
        let segments = [a, b]
            .map(|part| libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() });
        // SAFETY: the segments are parts of `bytes`, which nobody else uses meanwhile.
        unsafe { mapping.read(offset, bytes.len() as u64, &segments) }
    }

    #[test]
    fn cached_pages_are_copied_and_others_are_left_to_the_descriptor() {
        let file = file("cached", 1 << 20);
        file.sync_all().unwrap();
        // SAFETY: takes no pointers.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        let mapping = Mapping::new(file.as_fd(), 1 << 20).unwrap();
        let mut bytes = vec![0; 6000];
        assert!(!read(&mapping, 5000, &mut bytes), "nothing is read by a fault");
        file.read_exact_at(&mut vec![0; 1 << 20], 0).unwrap();
        assert!(read(&mapping, 5000, &mut bytes) && bytes.iter().all(|&byte| byte == 7));
        for (offset, len) in [((1 << 20) - 512, 1024), (0, COPY_MAX + 512), (u64::MAX, 512)] {
            assert!(!read(&mapping, offset, &mut vec![0; len]), "{offset} {len}");
        }
    }

    /// Without the handler the signal ends the test process.
    #[test]
    fn an_unreadable_page_breaks_the_mapping_and_not_the_process() {
        let file = file("cut", 64 << 10);
        let mapping = Mapping::new(file.as_fd(), 64 << 10).unwrap();
        let other = Mapping::new(file.as_fd(), 64 << 10).unwrap();
        let mut bytes = vec![0; 8192];
        assert!(read(&mapping, 8192, &mut bytes));
        file.set_len(4096).unwrap();
        // As if the file had been truncated between `mincore` and the copy.
        // SAFETY: the page lies in the mapping.
        assert_eq!(unsafe { mapping.pages.base.add(8192).read_volatile() }, 0);
        assert!(mapping.guard.is_lost() && !other.guard.is_lost());
        assert!(!read(&mapping, 0, &mut bytes), "it is not used any more");
        assert!(read(&other, 0, &mut bytes[..4096]));
        assert!(!read(&other, 8192, &mut bytes));
    }
}
