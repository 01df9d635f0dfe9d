//! Prefetches: hints to the processor that memory will be read soon.

/// Asks the processor to bring the cache line of `place` into its caches, and does not wait for it.
/// Several prefetches overlap, where as many reads that depend on each other would wait for the
/// memory one after the other. Without effect on processors other than x86-64.
#[inline(always)]
pub fn prefetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing as far as the program can tell, and never faults; the
        // address is that of a reference besides. Every x86-64 processor has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
