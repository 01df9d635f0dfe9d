//! The atomics, cells and allocations of the list, in one place that loom can take over, and its mutation sites.
//!
//! The same arrangement as in the reactor, whose `sync.rs` says how it works: in a normal build these are the standard
//! names; under `--cfg loom` they are loom's, and `MILLRACE_MUTANT` switches one site to its wrong form.

#[cfg(loom)]
pub use loom::{
    alloc::{alloc, dealloc},
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicPtr, Ordering},
    },
};

#[cfg(not(loom))]
pub use std::{
    alloc::{alloc, dealloc},
    sync::{
        Arc,
        atomic::{AtomicPtr, Ordering},
    },
};

/// A number that is shown and that no access depends on: never loom's, which would play through its values in vain.
pub use std::sync::atomic::AtomicUsize as Gauge;

/// A [`std::cell::UnsafeCell`] with loom's interface: the pointer is lent to a closure, so that loom sees where an
/// access begins and ends.
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
