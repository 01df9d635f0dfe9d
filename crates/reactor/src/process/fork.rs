//! Tells a process that it was forked.
//!
//! A child of `fork` has a copy of its parent's memory but none of its threads. It must not wait
//! for a core: that core runs in the parent only.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many forks lie between the process that first asked and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A number that differs between a process and its forked children, from the first call on. Cheap:
/// one load.
pub fn fork_generation() -> u64 {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler is a function that lives for ever and only changes an atomic, which
        // is allowed in a forked child. Without memory for the handler the call fails; then forks
        // go unnoticed.
        unsafe { libc::pthread_atfork(None, None, Some(count)) };
    });
    FORKS.load(Ordering::Relaxed)
}
