//! Mappings of files that others may cut off, such as a guest's memory or a disk image.
//!
//! Touching a page of a mapping behind the end of its file is a signal (`SIGBUS`) that ends the
//! process; so it is where the disk behind the file cannot read a page, where huge pages have run
//! out, and where memory has failed. A node must not end because of one front end's file, so such a
//! mapping gets a [`Guard`]:
//!
//! 1. The handler of the signal finds the mapping that the address lies in, notes that it is lost,
//!    and puts empty memory of the process in place of the *whole* mapping. The access goes on and
//!    meets zeroes.
//! 2. Whoever touched it looks at [`Guard::is_lost`] before believing what was read or telling
//!    anybody what was written. [`losses`] says at the price of one load whether there is any
//!    reason to look.
//!
//! All of the mapping is replaced, although a part of its file may still be there, since half of a
//! guest's memory is of no use, and a front end that cuts its file off must not cost us a signal
//! for each page. What a device is writing to at that moment the kernel holds by itself.
//!
//! A signal elsewhere goes to whoever handled it before.

use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, compiler_fence, fence};

use crate::places::{Place, Places};

static PLACES: Places = Places::new();
static LOSSES: AtomicUsize = AtomicUsize::new(0);
/// What handled the signal before; null until ours is there.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// Keeps a signal in a mapping from ending the process; see the module text.
pub struct Guard(&'static Place);

impl Guard {
    /// Guards `len` bytes of a shared mapping from `start` on.
    ///
    /// # Safety
    /// The range is a mapping of the caller's, made of whole pages (of huge ones where its file has
    /// those), that is unmapped only after the guard is dropped. There are no Rust references
    /// into it: it may become zeroes at any time.
    pub unsafe fn new(start: *mut u8, len: usize) -> Guard {
        install();
        Guard(PLACES.add(start.addr(), start.addr().saturating_add(len)))
    }

    /// Whether the mapping was replaced: what was read since may have been zeroes that nobody
    /// wrote, and what was written went nowhere. Says so of everything that this thread did
    /// before.
    pub fn is_lost(&self) -> bool {
        // The handler ran on this thread, amid an access before this; or on another, and had noted
        // the loss before there were zeroes to be read.
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

/// How many mappings of the process have been lost so far. Says so of everything that this thread
/// did before.
#[inline]
pub fn losses() -> usize {
    compiler_fence(Ordering::SeqCst);
    LOSSES.load(Ordering::Acquire)
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
    let address = unsafe { (*info).si_addr() }.addr();
    if let Some((place, range)) = PLACES.find(address) {
        place.lose();
        LOSSES.fetch_add(1, Ordering::Release);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let start = std::ptr::without_provenance_mut(range.start);
        // SAFETY: the range is a mapping whose owner is in it at this moment and so keeps it, by
        // the contract of `Guard::new`; what is put in its place is mapped just as well.
        if unsafe { libc::mmap(start, range.len(), access, flags, -1, 0) } != libc::MAP_FAILED {
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
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use super::*;

    const LEN: usize = 16 << 12;

    struct Pages(*mut u8);

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: the mapping of `Shared::new`, which nobody touches any more.
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
    fn who_touches_what_was_cut_off_goes_on_and_is_told() {
        let (cut, whole) = (Shared::new(), Shared::new());
        whole.set(5 << 12, 7);
        cut.set(5 << 12, 7);
        cut.cut(1 << 12);
        assert!(!cut.guard.is_lost(), "nobody has touched it");
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
