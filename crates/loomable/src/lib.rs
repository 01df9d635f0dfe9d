//! The atomics, cells, fences and allocation functions of lock-free code, which loom can replace.
//!
//! Code with a loom proof imports these names and nothing else from `std::sync`. In a normal build
//! they are the standard ones, and [`UnsafeCell`] is a wrapper without cost. Under `--cfg loom`
//! they are loom's, which explores the interleavings and the stale values that the memory model
//! permits (`tests/loom.rs` of the crates that use this crate, run by `scripts/loom.sh`).
//!
//! # Mutants
//!
//! A proof that cannot fail proves nothing. So each ordering, fence and check that a proof is about
//! is a *mutation site*: written as [`weaken`]`(Release, "name")` or guarded by
//! [`mutant`]`("name")`. In a normal build both are constants that fold away. Under loom the
//! environment variable `MILLRACE_MUTANT` switches one site to its wrong form, and
//! `proof::find_every_mutant` requires that loom reports a failure.
//!
//! Loom treats `SeqCst` on a load, store or read-modify-write as `AcqRel`; it models only `SeqCst`
//! *fences*. So sequential consistency is always written as a fence.

#[cfg(loom)]
pub mod proof;

#[cfg(loom)]
pub use loom::{
    alloc::{alloc, dealloc},
    cell::UnsafeCell,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence},
    },
};

/// For lists that are touched only when somebody waits; its users say why at the place.
#[cfg(not(loom))]
#[expect(clippy::disallowed_types, reason = "its users say why at the place")]
pub use std::sync::Mutex;

#[cfg(not(loom))]
pub use std::{
    alloc::{alloc, dealloc},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence},
    },
};

/// A fence for the compiler only, where a barrier of the other side is a fence here at that
/// instant, such as that of `membarrier`. Loom does not know such barriers: there it is a fence.
#[inline(always)]
pub fn light_fence() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
    #[cfg(not(loom))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
}

/// A number for display that no access depends on. Never loom's, which would explore its
/// values in vain.
pub use std::sync::atomic::AtomicUsize as Gauge;

/// A [`std::cell::UnsafeCell`] with loom's interface: the pointer is passed to a closure, so that
/// loom sees the beginning and the end of an access.
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

    /// Passes a pointer for reading to `f`.
    #[inline(always)]
    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Passes a pointer for writing to `f`.
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

/// Whether the mutation site `name` has its wrong form: never in a normal build.
#[cfg(not(loom))]
#[inline(always)]
pub const fn mutant(_name: &str) -> bool {
    false
}

/// Whether the mutation site `name` has its wrong form: if `MILLRACE_MUTANT` names it.
#[cfg(loom)]
pub fn mutant(name: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("MILLRACE_MUTANT").ok()).as_deref() == Some(name)
}

/// Returns `order`, or `Relaxed` in the mutant `name`.
#[inline(always)]
pub fn weaken(order: Ordering, name: &str) -> Ordering {
    if mutant(name) { Ordering::Relaxed } else { order }
}

/// A sequentially consistent fence, omitted in the mutant `name`.
#[inline(always)]
pub fn fence_seq_cst(name: &str) {
    if !mutant(name) {
        fence(Ordering::SeqCst);
    }
}

/// Defines the mutants of a crate that its simulation must find. `$Mutant` is an enumeration of
/// bytes. `is` is a constant that folds away unless the crate's feature `mutants` is on;
/// `set_mutant` exists only with the feature.
#[macro_export]
macro_rules! mutants {
    ($Mutant:ident) => {
        #[cfg(feature = "mutants")]
        static CHOSEN: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(u8::MAX);

        /// Makes everything in this process wrong in this way from now on.
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
