//! Which parts of a device have been written: two rows of bits in shared memory, one bit for each
//! granule.
//!
//! ```text
//!   writer   begin --> [the device writes] --> end     begin, end: set the bits in `dirty`
//!   copier   take ---> [reads the device]  --> finish  take: bits from `dirty` to `taken`
//!                                                      finish: clears them in `taken`
//! ```
//!
//! Invariants:
//!
//! - *No completed write is missed.* A copier that takes a bit and then reads the granule reads the
//!   write or finds the bit again, because the bit is looked at once more after the write, before
//!   its completion is reported, and set if it is gone: taken with the old bytes. Both sides order
//!   their two steps with a fence. So a writer that still sees the bit has written before the
//!   copier reads.
//! - *A writer may die at any instant.* Every granule that differs then was marked before it was
//!   written. (Except if it was taken in between; see `docs/formats/dirty.md`.)
//! - *A copier may die at any instant.* A bit is in `taken` before it leaves `dirty`, and stays
//!   there until the copy is done.
//!
//! There may be any number of writers and one copier. Nobody waits. One fence is for any number of
//! writes that have completed, and a bit that is set is only read: an atomic OR would cost a
//! writer on a fast device several times as much. Where the copier has a barrier that is a fence
//! on every processor on which a writer runs, writers need none (`light`).

use loomable::{AtomicU64, Ordering, fence, light_fence, mutant};

/// The two rows, of equal length.
#[derive(Clone, Copy)]
pub(crate) struct Marks<'a> {
    pub dirty: &'a [AtomicU64],
    pub taken: &'a [AtomicU64],
    /// Every copier has a barrier for all processors.
    pub light: bool,
}

impl Marks<'_> {
    /// Marks the granules from `first` to `last` before they are written.
    #[inline(always)]
    pub fn begin(&self, first: u64, last: u64) {
        if !mutant("marks.no_begin") {
            self.set(first, last);
        }
    }

    /// Marks the granules of writes again that have completed, whether they succeeded or not.
    #[inline(always)]
    pub fn end(&self, writes: &[(u64, u64)]) {
        if !mutant("marks.end_unfenced") {
            match self.light {
                true => light_fence(),
                false => fence(Ordering::SeqCst),
            }
        }
        for &(first, last) in writes {
            if !mutant("marks.no_end") {
                self.set(first, last);
            }
        }
    }

    #[inline(always)]
    fn set(&self, first: u64, last: u64) {
        // Most writes are short, and most bits are set.
        let is_set = |word: &AtomicU64| word.load(Ordering::Acquire) >> (first % 64) & 1 == 1;
        if first == last && self.dirty.get((first / 64) as usize).is_some_and(is_set) {
            return;
        }
        self.set_each(first, last);
    }

    #[cold]
    fn set_each(&self, first: u64, last: u64) {
        let mut granule = first;
        loop {
            let Some(word) = self.dirty.get((granule / 64) as usize) else { return };
            // All bits of one word in one step.
            let end = (granule | 63).min(last);
            let bits = (u64::MAX << (granule % 64)) & (u64::MAX >> (63 - end % 64));
            // Acquire: no write moves before this.
            if word.load(Ordering::Acquire) & bits != bits {
                // Release: a copier that takes the bit reads what was written before.
                word.fetch_or(bits, Ordering::AcqRel);
            }
            if end == last {
                return;
            }
            granule = end + 1;
        }
    }

    /// Takes the marks of a word; `barrier` is one for all processors.
    pub fn take(&self, word: usize, barrier: impl FnOnce()) -> u64 {
        let (dirty, taken) = (&self.dirty[word], &self.taken[word]);
        let bits = dirty.load(Ordering::Relaxed);
        if bits == 0 {
            return 0;
        }
        let keep = || taken.fetch_or(bits, Ordering::Relaxed);
        if !mutant("marks.clear_first") {
            keep();
        }
        // Release: who misses a bit here finds it in the other row. (No mutant: loom always lets
        // the one who looks see both rows as they are.)
        dirty.fetch_and(!bits, Ordering::Release);
        // Later reads are at least as new as the marks.
        if !mutant("marks.take_unfenced") {
            fence(Ordering::SeqCst);
            barrier();
        }
        if mutant("marks.clear_first") {
            keep();
        }
        bits
    }

    /// Clears taken marks whose granules are copied.
    pub fn finish(&self, word: usize, bits: u64) {
        self.taken[word].fetch_and(!bits, Ordering::Release);
    }

    /// The marks of a word that were taken and not finished.
    pub fn unfinished(&self, word: usize) -> u64 {
        self.taken[word].load(Ordering::Acquire)
    }
}
