//! The gate of a mapping that may be resized: a flag and a use count, without a lock (S4.2).
//!
//! 1. An access enters, uses the mapping and leaves, without waiting in between. If the gate is
//!    closed, it is turned away, and the caller makes a system call instead.
//! 2. A resize closes the gate, waits until nobody is inside, changes the mapping, and opens it.
//!
//! Each core has its own count, so entering writes no cache line that another core writes. A core
//! announces itself before it looks at the flag, and a resize sets the flag before it looks at the
//! counts; a fence between the two steps of each side makes sure that at least one sees the other.

use loomable::{AtomicBool, AtomicUsize, CachePadded, Ordering, fence_seq_cst, mutant, weaken};

/// The gate.
pub(crate) struct Gate {
    closed: CachePadded<AtomicBool>,
    inside: Box<[CachePadded<AtomicUsize>]>,
}

/// An access that has entered; leaves when dropped.
pub(crate) struct Inside<'a>(&'a AtomicUsize);

/// The right to change the mapping once [`Closing::is_alone`]; opens the gate when dropped.
pub(crate) struct Closing<'a>(&'a Gate);

impl Gate {
    /// An open gate for `cores` cores.
    pub fn new(cores: usize) -> Gate {
        let inside = (0..cores).map(|_| CachePadded(AtomicUsize::new(0))).collect();
        Gate { closed: CachePadded(AtomicBool::new(false)), inside }
    }

    /// Enters for an access of core `core`; `None` during a resize, and for a core that the gate
    /// does not know.
    #[inline]
    pub fn enter(&self, core: usize) -> Option<Inside<'_>> {
        let count = &**self.inside.get(core)?;
        count.fetch_add(1, Ordering::Relaxed);
        let inside = Inside(count);
        fence_seq_cst("gate.no_access_fence");
        // Acquire: an access sees the mapping that the last resize left.
        let closed = self.closed.load(weaken(Ordering::Acquire, "gate.look_relaxed"));
        (!closed || mutant("gate.ignore_flag")).then_some(inside)
    }

    /// Closes the gate; `None` while another resize has closed it.
    pub fn close(&self) -> Option<Closing<'_>> {
        // The fence below makes this an acquire: a resize sees what the one before it left.
        if self.closed.swap(true, Ordering::Relaxed) && !mutant("gate.two_resizes") {
            return None;
        }
        let closing = Closing(self);
        fence_seq_cst("gate.no_resize_fence");
        Some(closing)
    }
}

impl Closing<'_> {
    /// Whether nobody is inside, so that the mapping may be changed until this is dropped.
    pub fn is_alone(&self) -> bool {
        // Acquire: the accesses are over.
        let order = weaken(Ordering::Acquire, "gate.count_relaxed");
        let alone = self.0.inside.iter().all(|count| count.load(order) == 0);
        alone || mutant("gate.ignore_count")
    }
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        // Not a store: loom would order it before the swap of a resize that was turned away.
        self.0.closed.swap(false, weaken(Ordering::Release, "gate.open_relaxed"));
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.fetch_sub(1, weaken(Ordering::Release, "gate.leave_relaxed"));
    }
}
