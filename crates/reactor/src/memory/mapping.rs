//! A file of the host mapped into memory, which any core may copy from and, if it was opened for
//! it, copy to. It may be resized while other cores use it ([`Gate`](super::gate)).
//!
//! A mapping has three hazards that a core must avoid:
//!
//! - A page that is not in memory is read by a page fault, and the core stalls for as long as the
//!   disk takes. So the caller asks [`Resident`](super::resident) first, which asks the kernel.
//! - A page that cannot be read (the file was truncated, the disk fails) raises a signal that ends
//!   the process. A [`Guard`] maps empty memory over the mapping instead. The copy continues, its
//!   result is discarded, and the mapping is not used again before it is resized.
//! - A resize may move the mapping. An access that meets one is turned away.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use loomable::UnsafeCell;

use crate::driver::SharedFile;
use crate::memory::gate::{Closing, Gate};
use crate::memory::guard::Guard;

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// A mapped file, shared between cores.
pub struct Mapping {
    file: Arc<SharedFile>,
    writable: bool,
    gate: Gate,
    /// Read inside the gate, changed by a resize that is alone.
    area: UnsafeCell<Area>,
}

/// The mapping as it is between two resizes.
struct Area {
    /// Declared before `pages`, so that it is dropped first. `None` if nothing is mapped.
    guard: Option<Guard>,
    pages: Pages,
    /// Number of resizes so far.
    version: u64,
}

/// Mapped pages; none if the length is zero.
struct Pages {
    base: *mut u8,
    len: usize,
}

// SAFETY: the pages are accessed through raw pointers only, inside the gate; they are changed and
// unmapped by a resize that is alone, or by the last owner.
unsafe impl Send for Mapping {}
// SAFETY: as above; threads may copy from and to shared pages concurrently, as processes may.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a file that is read and written through the page cache, for
    /// the cores below `cores`; `writable` requires that it was opened for writing. `None` if a
    /// mapping has no use: in a simulated world, for a file that is accessed directly, or if the
    /// kernel does not tell what is in memory.
    pub fn new(
        file: &Arc<SharedFile>,
        len: u64,
        writable: bool,
        cores: usize,
    ) -> Option<Arc<Mapping>> {
        let fd = file.host_fd().filter(|_| file.alignment() == 1)?;
        if !tells(fd) {
            return None;
        }
        let area = Area::map(fd, usize::try_from(len).ok()?, writable)?;
        let (file, area) = (file.clone(), UnsafeCell::new(area));
        Some(Arc::new(Mapping { file, writable, gate: Gate::new(cores), area }))
    }

    /// The mapped file.
    pub fn file(&self) -> &Arc<SharedFile> {
        &self.file
    }

    /// Whether it may be written through.
    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// Calls `access` with the mapping on core `core`; `None` during a resize, or if the mapping is
    /// lost or was lost meanwhile.
    #[inline]
    pub(crate) fn enter<T>(&self, core: usize, access: impl FnOnce(&View<'_>) -> T) -> Option<T> {
        let _inside = self.gate.enter(core)?;
        // SAFETY: a resize changes the area only when nobody is inside the gate.
        let area = unsafe { &*self.area.with(|area| area) };
        let guard = area.guard.as_ref().filter(|guard| !guard.is_lost())?;
        let result = access(&View { pages: &area.pages, version: area.version });
        (!guard.is_lost()).then_some(result)
    }

    /// Closes the gate for a resize; `None` while another resize has closed it.
    pub(crate) fn close(&self) -> Option<Resizing<'_>> {
        Some(Resizing { mapping: self, closing: self.gate.close()? })
    }
}

/// A resize that has begun: accesses are turned away until it is dropped.
pub(crate) struct Resizing<'a> {
    mapping: &'a Mapping,
    closing: Closing<'a>,
}

impl Resizing<'_> {
    /// Maps the first `len` bytes of the file if all accesses that had begun are over. If the
    /// kernel refuses, nothing is mapped, and all accesses are turned away.
    pub fn finish(&self, len: usize) -> bool {
        if !self.closing.is_alone() {
            return false;
        }
        self.mapping.area.with_mut(|area| {
            // SAFETY: the gate is closed and nobody is inside, so nobody else has a reference.
            let area = unsafe { &mut *area };
            area.resize(&self.mapping.file, len, self.mapping.writable);
        });
        true
    }
}

/// The mapping during one access.
pub(crate) struct View<'a> {
    pages: &'a Pages,
    /// Number of resizes so far.
    pub version: u64,
}

impl View<'_> {
    /// Mapped bytes.
    pub fn len(&self) -> usize {
        self.pages.len
    }

    /// Asks the kernel which of `n` pages from page `first` on are in memory: one byte for each,
    /// whose lowest bit tells. False if it does not tell.
    pub fn ask(&self, first: usize, resident: &mut [u8]) -> bool {
        let Some(start) = first.checked_mul(PAGE).filter(|&start| start < self.pages.len) else {
            return false;
        };
        let len = (resident.len() * PAGE).min(self.pages.len - start);
        debug_assert!(len.div_ceil(PAGE) <= resident.len());
        let at = self.pages.base.wrapping_add(start);
        // SAFETY: the range lies in the mapping, and `resident` has a byte for each of its pages.
        unsafe { libc::mincore(at.cast(), len, resident.as_mut_ptr()) == 0 }
    }

    /// Copies `len` bytes from `offset` to `to`.
    ///
    /// # Safety
    /// `to` is valid for writes of `len` bytes.
    #[inline]
    pub unsafe fn copy_out(&self, offset: usize, to: *mut u8, len: usize) {
        assert!(offset <= self.pages.len && len <= self.pages.len - offset);
        // SAFETY: the range lies in the mapping by the line above; the handler of `Guard` replaces
        // a page that cannot be read; `to` is valid by this function's contract, and does not
        // overlap the mapping, whose address nobody else has. Another thread or process may write
        // the pages meanwhile: the copy is then a mixture, as from a file.
        unsafe { std::ptr::copy_nonoverlapping(self.pages.base.add(offset), to, len) }
    }

    /// Copies `len` bytes from `from` to `offset`.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes. The mapping is writable.
    #[inline]
    pub unsafe fn copy_in(&self, offset: usize, from: *const u8, len: usize) {
        assert!(offset <= self.pages.len && len <= self.pages.len - offset);
        // SAFETY: as for `copy_out`.
        unsafe { std::ptr::copy_nonoverlapping(from, self.pages.base.add(offset), len) }
    }
}

impl Area {
    fn map(fd: BorrowedFd<'_>, len: usize, writable: bool) -> Option<Area> {
        let pages = Pages::map(fd, len, writable)?;
        Some(Area { guard: pages.guard(), pages, version: 0 })
    }

    fn resize(&mut self, file: &SharedFile, len: usize, writable: bool) {
        self.version += 1;
        let lost = self.guard.take().is_none_or(|guard| guard.is_lost());
        if lost || !self.pages.remap(len) {
            self.pages = Pages::NONE;
            let pages = file.host_fd().and_then(|fd| Pages::map(fd, len, writable));
            self.pages = pages.unwrap_or(Pages::NONE);
        }
        self.guard = self.pages.guard();
    }
}

impl Pages {
    const NONE: Pages = Pages { base: std::ptr::null_mut(), len: 0 };

    /// Maps the first `len` bytes of a file; `None` if the kernel refuses.
    fn map(fd: BorrowedFd<'_>, len: usize, writable: bool) -> Option<Pages> {
        if len == 0 {
            return Some(Pages::NONE);
        }
        let access = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        let any = std::ptr::null_mut();
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { libc::mmap(any, len, access, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        (base != libc::MAP_FAILED).then_some(Pages { base: base.cast(), len })
    }

    /// Changes the length, keeping what the page tables know. False if nothing has changed.
    fn remap(&mut self, len: usize) -> bool {
        if self.len == 0 || len == 0 {
            return false;
        }
        // SAFETY: the whole mapping, which has no guard now; nobody accesses it or keeps an address
        // in it, by the contract of the gate.
        let base = unsafe { libc::mremap(self.base.cast(), self.len, len, libc::MREMAP_MAYMOVE) };
        if base == libc::MAP_FAILED {
            return false;
        }
        (self.base, self.len) = (base.cast(), len);
        true
    }

    fn guard(&self) -> Option<Guard> {
        // SAFETY: the whole mapping. It is unmapped or moved only after the guard was dropped, and
        // there are no references into it.
        (self.len > 0).then(|| unsafe { Guard::new(self.base, self.len.next_multiple_of(PAGE)) })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping of `map` or `remap`, which nobody accesses any more.
            unsafe { libc::munmap(self.base.cast(), self.len) };
        }
    }
}

/// Whether `mincore` tells the truth about this file. To a process that neither owns the file nor
/// may write it, the kernel says that everything is in memory.
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
    use super::*;
    use crate::driver::Fd;

    const LEN: usize = 16 * PAGE;

    /// A file of `LEN` sevens, without a name.
    fn mapping(name: &str, cores: usize) -> (std::fs::File, Arc<Mapping>) {
        let dir = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let path = dir.join(format!("mapping-{name}-{}", std::process::id()));
        std::fs::write(&path, vec![7; LEN]).unwrap();
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let fd = Fd::Host(file.try_clone().unwrap().into());
        let shared = Arc::new(SharedFile::new(fd, path, LEN as u64, 1));
        (file, Mapping::new(&shared, LEN as u64, true, cores).unwrap())
    }

    fn byte(mapping: &Mapping, core: usize, at: usize) -> Option<u8> {
        let mut byte = 0;
        // SAFETY: one byte, which is live.
        mapping.enter(core, |view| unsafe { view.copy_out(at, &raw mut byte, 1) })?;
        Some(byte)
    }

    #[test]
    fn an_access_during_a_resize_is_turned_away() {
        let (file, mapping) = mapping("resize", 2);
        file.set_len(4 * LEN as u64).unwrap();
        let resizing = mapping.close().unwrap();
        assert_eq!((byte(&mapping, 0, 0), byte(&mapping, 1, 0)), (None, None));
        assert!(mapping.close().is_none(), "one resize at a time");
        assert!(resizing.finish(4 * LEN));
        drop(resizing);
        assert_eq!((byte(&mapping, 0, 0), byte(&mapping, 1, 4 * LEN - 1)), (Some(7), Some(0)));
        assert_eq!(byte(&mapping, 2, 0), None, "a core that the gate does not know");
        // SAFETY: one byte, which is live; the mapping is writable.
        mapping.enter(0, |view| unsafe { view.copy_in(9, [8].as_ptr(), 1) }).unwrap();
        assert_eq!(byte(&mapping, 1, 9), Some(8));
        let resizing = mapping.close().unwrap();
        assert!(resizing.finish(0));
        drop(resizing);
        assert_eq!(byte(&mapping, 0, 0), None, "nothing is mapped");
    }

    /// A resize waits for an access that is inside.
    #[test]
    fn a_resize_waits_for_an_access() {
        let (_file, mapping) = mapping("inside", 2);
        mapping
            .enter(0, |_| {
                let resizing = mapping.close().unwrap();
                assert!(!resizing.finish(PAGE));
            })
            .unwrap();
        assert_eq!(byte(&mapping, 0, LEN - 1), Some(7), "it is as it was");
        assert!(mapping.close().unwrap().finish(PAGE));
    }

    /// Without the handler the signal ends the test process.
    #[test]
    #[cfg_attr(tsan, ignore = "the fault comes inside the sanitizer, under a lock of its own")]
    fn a_truncated_file_breaks_the_mapping_until_it_is_resized() {
        let (file, mapping) = mapping("cut", 1);
        file.set_len(PAGE as u64).unwrap();
        assert_eq!(byte(&mapping, 0, LEN - 1), None);
        assert_eq!(byte(&mapping, 0, 0), None, "it is not used any more");
        assert!(mapping.close().unwrap().finish(PAGE));
        assert_eq!(byte(&mapping, 0, 0), Some(7));
    }

    /// Cores read while another one grows the file step by step: everybody sees the file's bytes.
    #[test]
    fn cores_read_while_the_file_grows() {
        let (file, mapping) = mapping("grow", 3);
        std::thread::scope(|scope| {
            for core in [1, 2] {
                let mapping = &mapping;
                scope.spawn(move || {
                    let mut seen = 0;
                    while seen < 2000 {
                        if let Some(byte) = byte(mapping, core, LEN - 1) {
                            assert_eq!(byte, 7);
                            seen += 1;
                        }
                    }
                });
            }
            for step in 2..100 {
                file.set_len((step * LEN) as u64).unwrap();
                let resizing = mapping.close().unwrap();
                while !resizing.finish(step * LEN) {
                    std::thread::yield_now();
                }
            }
        });
        assert_eq!(byte(&mapping, 0, 99 * LEN - 1), Some(0));
    }
}
