//! Shows a standard lock's ordering to ThreadSanitizer, which does not see into the standard
//! library as it is shipped: part of taking a lock (after a wait, or when it is contended) happens
//! there. It compiles to nothing, except under `scripts/sanitize.sh thread`.

/// Orders the holders of one lock. Belongs beside the lock.
pub(crate) struct Edge {
    #[cfg(tsan)]
    order: std::sync::atomic::AtomicBool,
}

impl Edge {
    pub const fn new() -> Edge {
        Edge {
            #[cfg(tsan)]
            order: std::sync::atomic::AtomicBool::new(false),
        }
    }

    /// Call after the lock was taken.
    #[inline]
    pub fn taken(&self) {
        #[cfg(tsan)]
        self.order.load(std::sync::atomic::Ordering::Acquire);
    }

    /// Call before the lock is released.
    #[inline]
    pub fn given(&self) {
        #[cfg(tsan)]
        self.order.store(true, std::sync::atomic::Ordering::Release);
    }
}
