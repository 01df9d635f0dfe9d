//! A thread that releases memory which others may have shared, without disturbing the cores.
//!
//! The process that closes or unmaps a memory file last frees its pages. This takes the kernel 200
//! ms and more for each GiB; to unmap a GiB whose pages others keep takes some 15 ms. So this
//! thread drops what it is given, in the order in which it receives it: mappings of guest memory,
//! devices in memory, descriptors that a front end has sent.
//!
//! Its processor may be a core's, too, which would then wait for whole turns of the scheduler. So
//! it unmaps in pieces, and sleeps in between ([`unmap`]).
//!
//! Dropping never blocks on another process: see [`crate::admit`].

#![expect(clippy::disallowed_types, reason = "the thread at the other end may wait")]

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
#[expect(
    clippy::disallowed_types,
    reason = "the thread at the other end has nothing else to do"
)]
use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::time::{Duration, Instant};

/// Most waiting objects before those that bring more have to wait.
const WAITING_MAX: usize = 1024;
/// How long the thread unmaps between two pauses, and a pause.
const WORKS: Duration = Duration::from_micros(100);
const PAUSES: Duration = Duration::from_micros(100);
/// The shortest piece that is unmapped at once: a huge page.
const PIECE_MIN: usize = 2 << 20;
/// Mappings that are not longer are not cut into pieces.
const WHOLE_MAX: usize = 8 << 20;

type Thing = Box<dyn Send>;

static THREAD: OnceLock<Option<Sender<Thing>>> = OnceLock::new();
static WAITING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// This is the thread.
    static IS_HERE: Cell<bool> = const { Cell::new(false) };
}

/// Drops an object on the thread, without waiting.
pub fn drop_in_background(what: impl Send + 'static) {
    let Some(thread) = THREAD.get_or_init(start) else { return drop(what) };
    WAITING.fetch_add(1, Ordering::Relaxed);
    // The thread never ends, so this cannot happen.
    if let Err(SendError(what)) = thread.send(Box::new(what)) {
        drop(what);
    }
}

/// Whether too many objects are waiting: then those that bring more have to wait.
pub fn is_background_full() -> bool {
    WAITING.load(Ordering::Relaxed) > WAITING_MAX
}

/// Blocks the calling thread until everything has been dropped, for `most` at most: for a process
/// that ends beside another one. The kernel unmaps what is left at its end, without pauses.
#[expect(clippy::disallowed_methods, reason = "only called when no core runs any more")]
pub fn until_dropped(most: Duration) {
    let began = Instant::now();
    while WAITING.load(Ordering::Relaxed) > 0 && began.elapsed() < most {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Starts the thread, if it does not run. A core that starts it lends it its own processor.
pub(crate) fn start_early() {
    THREAD.get_or_init(start);
}

/// Unmaps memory; on the thread, in pieces.
///
/// # Safety
/// `base` and `len` are those of a mapping, or of several without a gap, that nobody accesses any
/// more, and whose content is nobody's or in a file.
#[expect(clippy::disallowed_methods, reason = "this thread is no core")]
pub unsafe fn unmap(base: *mut u8, len: usize) {
    let (mut at, mut piece, mut worked) = (0, PIECE_MIN, Duration::ZERO);
    while len > WHOLE_MAX && IS_HERE.get() && at < len {
        let part = piece.min(len - at);
        let began = Instant::now();
        // Memory that cannot be given back in parts is unmapped below. SAFETY: a part of the
        // mapping, by this function's contract.
        if unsafe { libc::madvise(base.wrapping_add(at).cast(), part, libc::MADV_DONTNEED) } != 0 {
            break;
        }
        at += part;
        let took = began.elapsed();
        // Most of a mapping may never have been touched.
        piece = match took {
            took if took > WORKS => (piece / 2).max(PIECE_MIN),
            took if took < WORKS / 4 => piece.saturating_mul(2),
            _ => piece,
        };
        worked += took;
        if worked >= WORKS {
            worked = Duration::ZERO;
            std::thread::sleep(PAUSES);
        }
    }
    // SAFETY: by this function's contract.
    unsafe { libc::munmap(base.cast(), len) };
}

/// Returns `None` if the system refuses a thread: then objects are dropped by their owner.
#[expect(clippy::disallowed_methods, reason = "what it does may take seconds")]
fn start() -> Option<Sender<Thing>> {
    let (to, from): (_, Receiver<Thing>) = channel();
    let body = move || {
        IS_HERE.set(true);
        for what in from {
            drop(what);
            WAITING.fetch_sub(1, Ordering::Relaxed);
        }
    };
    std::thread::Builder::new().name("millrace-unmap".to_owned()).spawn(body).ok().map(|_| to)
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the kernel's list of mappings, for a test")]
mod tests {
    use super::*;

    /// A shared mapping of memory, which its drop unmaps, and then what it shares with another one.
    struct Shared(usize, usize);

    impl Drop for Shared {
        fn drop(&mut self) {
            // SAFETY: the mapping that `shared` made for this value alone.
            unsafe { unmap(self.0 as *mut u8, self.1) };
        }
    }

    fn shared(len: usize) -> Shared {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        for page in (0..len.min(64 << 20)).step_by(4096) {
            // SAFETY: within the mapping.
            unsafe { at.cast::<u8>().add(page).write(1) };
        }
        Shared(at as usize, len)
    }

    /// Whether all of that is one mapping; other tests of this process may reuse the addresses.
    fn is_mapped(here: &(usize, usize)) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| {
            let (first, rest) = line.split_once('-').unwrap();
            let end = rest.split_once(' ').unwrap().0;
            let number = |text| usize::from_str_radix(text, 16).unwrap();
            number(first) <= here.0 && here.0 + here.1 <= number(end)
        })
    }

    #[test]
    fn memory_is_unmapped_on_the_thread_and_by_others() {
        // An odd length, and one of which almost nothing was touched.
        for len in [(70 << 20) + 4096, 64 << 30] {
            let shared = shared(len);
            let here = (shared.0, shared.1);
            assert!(is_mapped(&here));
            drop_in_background(shared);
            until_dropped(Duration::from_secs(60));
            assert!(!is_mapped(&here));
        }
        let shared = shared(PIECE_MIN);
        let here = (shared.0, shared.1);
        drop(shared);
        assert!(!is_mapped(&here));
    }
}
