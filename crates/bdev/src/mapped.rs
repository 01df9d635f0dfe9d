//! A file mapped into memory (`engine=mmap`): what is in the page cache is copied from there, without
//! asking the kernel for more than whether it is there.
//!
//! A mapping has two traps, and a core may step into neither. A page that is not there is read by
//! the fault, and the core would stand still for as long as the disk takes. And a page that cannot
//! be had (the file was cut off, the disk fails) is a signal that ends the process. So:
//!
//! - Only reads are copied, short ones, and only when `mincore` says that all their pages are in
//!   the cache. Everything else is a read or a write of the descriptor, through the same cache,
//!   and both see the same bytes. Writes are never copied: the first one into a clean page waits for
//!   the file system, and may find no room, by signal.
//! - Between the question and the copy the kernel may take a page back. Then the copy waits for the
//!   disk, once; that is rare, and the price of asking a page's place in memory and not holding it.
//! - A handler for `SIGBUS` puts an empty page where the fault was and marks the mapping as broken.
//!   The copy goes on, its result is thrown away, and this and all later reads are reads of the
//!   descriptor, which say what is wrong. Faults elsewhere go to whoever handled them before.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, compiler_fence, fence};

const PAGE: usize = 4096;
/// Longest read that is copied: some 10 µs of the core's time.
const COPY_MAX: usize = 64 << 10;
/// Mappings of a process; more are served by reads of the descriptor.
const MAPPINGS: usize = 256;

/// The place of a mapping, for the signal handler.
struct Guard {
    /// 0: free.
    start: AtomicUsize,
    end: AtomicUsize,
    broken: AtomicBool,
}

static GUARDS: [Guard; MAPPINGS] = [const {
    Guard { start: AtomicUsize::new(0), end: AtomicUsize::new(0), broken: AtomicBool::new(false) }
}; MAPPINGS];

/// What handled the signal before; null until ours is there.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// A mapped file.
pub(crate) struct Mapping {
    base: *mut u8,
    len: usize,
    guard: &'static Guard,
}

// SAFETY: the mapping is read through raw pointers only and stays until this is dropped, which
// happens once; threads may read it at once.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a file; nothing where there is nothing to be won: no place for
    /// another mapping, or a kernel that does not tell what is in the cache.
    pub fn new(fd: BorrowedFd<'_>, len: u64) -> Option<Mapping> {
        let len = usize::try_from(len).ok().filter(|&len| len > 0)?;
        if !tells(fd) {
            return None;
        }
        install();
        let guard = GUARDS.iter().find(|guard| {
            // 1 is no page: taken, and not yet in use.
            let free = guard.start.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
            free.is_ok()
        })?;
        let (any, access) = (std::ptr::null_mut(), libc::PROT_READ);
        // SAFETY: a new mapping at a place of the kernel's choice.
        let base = unsafe { libc::mmap(any, len, access, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            guard.start.store(0, Ordering::Release);
            return None;
        }
        guard.broken.store(false, Ordering::Relaxed);
        guard.end.store(base.addr() + len.next_multiple_of(PAGE), Ordering::Relaxed);
        guard.start.store(base.addr(), Ordering::Release);
        Some(Mapping { base: base.cast(), len, guard })
    }

    /// Copies a range to the segments. False when somebody has to be asked who may wait; then the
    /// segments may hold anything.
    ///
    /// # Safety
    /// The segments are valid for writes, and together `len` bytes long.
    pub unsafe fn read(&self, offset: u64, len: u64, segments: &[libc::iovec]) -> bool {
        let Some(end) = offset.checked_add(len).filter(|&end| end <= self.len as u64) else {
            return false;
        };
        let first = offset as usize / PAGE;
        let pages = (end as usize).div_ceil(PAGE) - first;
        if len as usize > COPY_MAX || self.guard.broken.load(Ordering::Relaxed) {
            return false;
        }
        let mut resident = [0_u8; COPY_MAX / PAGE + 1];
        let start = self.base.wrapping_add(first * PAGE);
        // SAFETY: the range lies in the mapping, and `resident` has a byte for each of its pages:
        // a range of COPY_MAX bytes meets one page more than it would fill.
        if unsafe { libc::mincore(start.cast(), pages * PAGE, resident.as_mut_ptr()) } != 0
            || resident[..pages].iter().any(|page| page & 1 == 0)
        {
            return false;
        }
        let mut at = offset as usize;
        for segment in segments {
            // SAFETY: `at` and the segment's length stay below `end`, which lies in the mapping; the
            // segment is valid. A page that cannot be had becomes an empty one, by the handler.
            unsafe {
                let from = self.base.add(at);
                std::ptr::copy_nonoverlapping(from, segment.iov_base.cast(), segment.iov_len);
            }
            at += segment.iov_len;
        }
        // The handler runs on this thread, amid the copy; or another thread's did, and had marked
        // the mapping before there was an empty page to be read.
        compiler_fence(Ordering::SeqCst);
        fence(Ordering::Acquire);
        !self.guard.broken.load(Ordering::Relaxed)
    }

    /// Whether a page could not be had.
    #[cfg(test)]
    fn broken(&self) -> bool {
        self.guard.broken.load(Ordering::Relaxed)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Nobody copies any more, so nobody faults here.
        self.guard.start.store(1, Ordering::Release);
        // SAFETY: the mapping made in `new`.
        unsafe { libc::munmap(self.base.cast(), self.len) };
        self.guard.start.store(0, Ordering::Release);
    }
}

/// Whether `mincore` tells the truth of this file: to others than its owner, and those who may write
/// it, it says that everything is there.
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

/// Puts our handler before whatever handles the signal now, once for the process.
fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: plain C structs for which all zeroes are valid values. The handler only does what
        // a handler may. What was there before is kept for ever.
        unsafe {
            let before: &'static mut libc::sigaction = Box::leak(Box::new(std::mem::zeroed()));
            let before = &raw mut *before;
            libc::sigaction(libc::SIGBUS, std::ptr::null(), before);
            BEFORE.store(before, Ordering::Release);
            let mut ours: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = handle;
            ours.sa_sigaction = handler as *const () as usize;
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&raw mut ours.sa_mask);
            libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut());
        }
    });
}

/// Async-signal-safe: atomics and system calls only.
extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a live structure, which for this signal has an address.
    let place = unsafe { (*info).si_addr() }.addr();
    let found = GUARDS.iter().find(|guard| {
        let start = guard.start.load(Ordering::Acquire);
        start > 1 && (start..guard.end.load(Ordering::Relaxed)).contains(&place)
    });
    if let Some(guard) = found {
        guard.broken.store(true, Ordering::Release);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let page = std::ptr::without_provenance_mut(place / PAGE * PAGE);
        // SAFETY: the page lies in a mapping of ours, whose owner reads it at this moment and so
        // keeps it; its bytes are gone anyway.
        let put = unsafe { libc::mmap(page, PAGE, libc::PROT_READ, flags, -1, 0) };
        if put != libc::MAP_FAILED {
            return;
        }
    }
    // SAFETY: stored before our handler was installed, and never changed.
    let before = unsafe { &*BEFORE.load(Ordering::Acquire) };
    match before.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: `before` is live. The fault comes again, to nobody of ours.
            unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) };
        }
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with this flag the field holds such a function.
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without the flag the field holds such a function.
            let handler: extern "C" fn(i32) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
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
    fn what_is_in_the_cache_is_copied_and_what_is_not_is_left_to_others() {
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

    /// Without the handler this test ends the process.
    #[test]
    fn a_page_that_cannot_be_had_breaks_the_mapping_and_not_the_process() {
        let file = file("cut", 64 << 10);
        let mapping = Mapping::new(file.as_fd(), 64 << 10).unwrap();
        let other = Mapping::new(file.as_fd(), 64 << 10).unwrap();
        let mut bytes = vec![0; 8192];
        assert!(read(&mapping, 8192, &mut bytes));
        file.set_len(4096).unwrap();
        // As if the file had been cut between the question and the copy.
        // SAFETY: the page lies in the mapping.
        assert_eq!(unsafe { mapping.base.add(8192).read_volatile() }, 0);
        assert!(mapping.broken() && !other.broken());
        assert!(!read(&mapping, 0, &mut bytes), "it is not used any more");
        assert!(read(&other, 0, &mut bytes[..4096]));
        assert!(!read(&other, 8192, &mut bytes));
    }
}
