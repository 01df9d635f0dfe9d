//! Mappings of files that another process may truncate, such as a guest's memory or a disk image.
//!
//! Touching a page of a mapping beyond the end of its file raises `SIGBUS`, which ends the process.
//! The same happens when the file's disk cannot read a page, when huge pages have run out, and when
//! memory has failed. A node must not end because of one front end's file, so such a mapping gets a
//! [`Guard`]:
//!
//! 1. The signal handler finds the mapping of the address, notes that it is lost, and replaces the
//!    *whole* mapping with empty memory of the process. The access continues and reads zeroes.
//! 2. The code that touched it checks [`Guard::is_lost`] before it trusts the bytes read or reports
//!    the bytes written. [`losses`] tells with one load whether a check is needed.
//!
//! The whole mapping is replaced, although a part of its file may still exist: half of a guest's
//! memory is useless, and a front end that truncates its file must not cost a signal for each page.
//! The kernel itself holds the pages that a device is writing to.
//!
//! A signal at another address goes to the previous handler.

use std::sync::atomic::{AtomicUsize, Ordering, compiler_fence, fence};

use crate::memory::ranges::{RangeSlot, RangeTable};
use crate::process::signals::Place;
use crate::process::work::note_death;

static RANGES: RangeTable = RangeTable::new();
static LOSSES: AtomicUsize = AtomicUsize::new(0);
static PLACE: Place = Place::new();

/// Keeps a `SIGBUS` in a mapping from ending the process; see the module text.
pub struct Guard(&'static RangeSlot);

impl Guard {
    /// Guards `len` bytes of a shared mapping from `start` on.
    ///
    /// # Safety
    /// The range is a mapping of the caller's, made of whole pages (huge ones if its file has
    /// them), that is unmapped only after the guard is dropped. There are no Rust references into
    /// it: it may become zeroes at any time.
    pub unsafe fn new(start: *mut u8, len: usize) -> Guard {
        install();
        Guard(RANGES.add(start.addr(), start.addr().saturating_add(len)))
    }

    /// Whether the mapping was replaced: bytes read since may be zeroes that were never written,
    /// and bytes written are lost. The answer covers all earlier accesses of this thread.
    pub fn is_lost(&self) -> bool {
        // The handler ran on this thread, during an earlier access; or on another one, and noted
        // the loss before there were zeroes to read.
        compiler_fence(Ordering::SeqCst);
        fence(Ordering::Acquire);
        self.0.is_lost()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Guard(lost: {})", self.is_lost())
    }
}

/// Number of mappings of the process lost so far. The answer covers all earlier accesses of this
/// thread.
#[inline]
pub fn losses() -> usize {
    compiler_fence(Ordering::SeqCst);
    LOSSES.load(Ordering::Acquire)
}

/// Installs our handler before the present one, once for the process.
pub(crate) fn install() {
    PLACE.install(libc::SIGBUS, handle);
}

/// Async-signal-safe: atomics and system calls only.
extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a live structure, which for this signal has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    if let Some((place, range)) = RANGES.find(address) {
        place.lose();
        LOSSES.fetch_add(1, Ordering::Release);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let start = std::ptr::without_provenance_mut(range.start);
        // SAFETY: the range is a mapping whose owner is accessing it now and so keeps it, by the
        // contract of `Guard::new`; the memory that replaces it is mapped as well.
        if unsafe { libc::mmap(start, range.len(), access, flags, -1, 0) } != libc::MAP_FAILED {
            return;
        }
    }
    // SAFETY: the arguments are this handler's, which was installed in this place.
    unsafe {
        note_death(signal, info);
        PLACE.pass_on(signal, info, context);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use super::*;

    const LEN: usize = 16 << 12;

    struct Pages(*mut u8);

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: the mapping of `Shared::new`, which is not accessed after this.
            unsafe { libc::munmap(self.0.cast(), LEN) };
        }
    }

    /// The guard goes first.
    struct Shared {
        guard: Guard,
        pages: Pages,
        file: OwnedFd,
    }

    impl Shared {
        fn new() -> Shared {
            // SAFETY: the name is a C string; the descriptor is new and nobody else's; a new
            // mapping replaces nothing.
            unsafe {
                let file = libc::memfd_create(c"guarded".as_ptr(), libc::MFD_CLOEXEC);
                let file = OwnedFd::from_raw_fd(file);
                assert_eq!(libc::ftruncate(file.as_raw_fd(), LEN as i64), 0);
                let access = libc::PROT_READ | libc::PROT_WRITE;
                let any = std::ptr::null_mut();
                let at = libc::mmap(any, LEN, access, libc::MAP_SHARED, file.as_raw_fd(), 0);
                assert_ne!(at, libc::MAP_FAILED);
                Shared { guard: Guard::new(at.cast(), LEN), pages: Pages(at.cast()), file }
            }
        }

        fn cut(&self, len: usize) {
            // SAFETY: takes no pointers.
            assert_eq!(unsafe { libc::ftruncate(self.file.as_raw_fd(), len as i64) }, 0);
        }

        fn byte(&self, at: usize) -> u8 {
            assert!(at < LEN);
            // SAFETY: within the mapping.
            unsafe { self.pages.0.add(at).read_volatile() }
        }

        fn set(&self, at: usize, byte: u8) {
            assert!(at < LEN);
            // SAFETY: within the mapping.
            unsafe { self.pages.0.add(at).write_volatile(byte) }
        }
    }

    /// Without the handler each of these ends the process.
    #[test]
    #[cfg_attr(tsan, ignore = "the fault comes inside the sanitizer, under a lock of its own")]
    fn an_access_to_truncated_memory_continues_and_is_reported() {
        let (cut, whole) = (Shared::new(), Shared::new());
        whole.set(5 << 12, 7);
        cut.set(5 << 12, 7);
        cut.cut(1 << 12);
        assert!(!cut.guard.is_lost(), "it was not accessed yet");
        let before = losses();
        assert_eq!(cut.byte(5 << 12), 0);
        assert!(losses() > before);
        assert!(cut.guard.is_lost() && !whole.guard.is_lost());
        // Now it is memory like any other.
        for at in (0..LEN).step_by(1 << 12) {
            cut.set(at, 9);
            assert_eq!(cut.byte(at), 9);
        }
        assert_eq!(whole.byte(5 << 12), 7);
        let write = Shared::new();
        write.cut(0);
        write.set(LEN - 1, 1);
        assert!(write.guard.is_lost());
    }

    #[test]
    #[cfg_attr(tsan, ignore = "the fault comes inside the sanitizer, under a lock of its own")]
    fn several_threads_may_meet_in_what_is_lost() {
        for _ in 0..50 {
            let cut = Shared::new();
            cut.cut(0);
            let at = cut.pages.0.expose_provenance();
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    scope.spawn(move || {
                        let at = std::ptr::with_exposed_provenance_mut::<u8>(at);
                        // SAFETY: within the mapping, which outlives the threads.
                        unsafe { at.add(thread << 12).read_volatile() }
                    });
                }
            });
            assert!(cut.guard.is_lost());
        }
    }
}
