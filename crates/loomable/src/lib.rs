//! The atomics, cells, fences and allocations of lock-free code, in one place that loom can take
//! over.
//!
//! Code that is to be proved imports these names and nothing else from `std::sync`. In a normal
//! build they are the standard ones, and [`UnsafeCell`] is a wrapper that costs nothing. Under
//! `--cfg loom` they are loom's, which plays through the interleavings and the stale values that
//! the memory model permits (`tests/loom.rs` of the crates that use this, run by
//! `scripts/loom.sh`).
//!
//! # Mutants
//!
//! A proof that cannot fail proves nothing, so each ordering, fence and check that the proof is
//! about is a *mutation site*: written as [`weaken`]`(Release, "name")` or guarded by
//! [`mutant`]`("name")`. In a normal build both are constants that fold away. Under loom the
//! environment variable `MILLRACE_MUTANT` switches one site to its wrong
//! form, and `proof::find_every_mutant` demands that loom then reports a failure.
//!
//! What loom does not model, and what therefore must not be relied upon here: `SeqCst` on a load,
//! store or read-modify-write counts as `AcqRel`; only `SeqCst` *fences* are real. Sequential
//! consistency is thus always written as a fence.

#[cfg(loom)]
pub mod proof;

#[cfg(loom)]
pub use loom::{
    alloc::{alloc, dealloc},
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence},
    },
};

#[cfg(not(loom))]
pub use std::{
    alloc::{alloc, dealloc},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence},
    },
};

/// A number that is shown and that no access depends on: never loom's, which would play
/// through its values in vain.
pub use std::sync::atomic::AtomicUsize as Gauge;

/// A [`std::cell::UnsafeCell`] with loom's interface: the pointer is lent to a closure, so that
/// loom sees where an access begins and ends.
#[cfg(not(loom))]
#[derive(Debug)]
#[repr(transparent)]
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    /// Wraps `value`.
    pub const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Lends a pointer for reading.
    #[inline(always)]
    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Lends a pointer for writing.
    #[inline(always)]
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// Keeps `T` on cache lines of its own.
///
/// 128 bytes, not 64: the adjacent-line prefetcher of x86 pulls lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
pub struct CachePadded<T>(pub T);

impl<T> std::ops::Deref for CachePadded<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

/// Whether the mutation site `name` has its wrong form: never, in a normal build.
#[cfg(not(loom))]
#[inline(always)]
pub const fn mutant(_name: &str) -> bool {
    false
}

/// Whether the mutation site `name` has its wrong form: when `MILLRACE_MUTANT` says so.
#[cfg(loom)]
pub fn mutant(name: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("MILLRACE_MUTANT").ok()).as_deref() == Some(name)
}

/// `order`, except that the mutant `name` makes it `Relaxed`.
#[inline(always)]
pub fn weaken(order: Ordering, name: &str) -> Ordering {
    if mutant(name) { Ordering::Relaxed } else { order }
}

/// A sequentially consistent fence, which the mutant `name` leaves out.
#[inline(always)]
pub fn fence_seq_cst(name: &str) {
    if !mutant(name) {
        fence(Ordering::SeqCst);
    }
}

/// For a crate whose simulation is to find out what is wrong with it, as an enumeration `$Mutant`
/// of bytes says: `is`, a constant that folds away unless the crate's feature `mutants` is on, and
/// `set_mutant` where it is.
#[macro_export]
macro_rules! mutants {
    ($Mutant:ident) => {
        #[cfg(feature = "mutants")]
        static CHOSEN: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(u8::MAX);

        /// From now on everything in this process is wrong in this way.
        #[cfg(feature = "mutants")]
        #[doc(hidden)]
        pub fn set_mutant(mutant: $Mutant) {
            CHOSEN.store(mutant as u8, std::sync::atomic::Ordering::Relaxed);
        }

        pub(crate) fn is(mutant: $Mutant) -> bool {
            #[cfg(feature = "mutants")]
            return CHOSEN.load(std::sync::atomic::Ordering::Relaxed) == mutant as u8;
            #[cfg(not(feature = "mutants"))]
            {
                let _ = mutant;
                false
            }
        }
    };
}
