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
//!   write or finds the bit again, because the bit is set once more after the write, before its
//!   completion is reported. The bit set before the write may be gone by then, taken with the old
//!   bytes. Setting is an atomic OR, whose release pairs with the acquire of the take. Checking
//!   first whether the bit is still set would be wrong, because the check could be done before the
//!   write is visible.
//! - *A writer may die at any instant.* Every granule that differs then was marked before it was
//!   written. (Except if it was taken in between; see `docs/formats/dirty.md`.)
//! - *A copier may die at any instant.* A bit is in `taken` before it leaves `dirty`, and stays
//!   there until the copy is done.
//!
//! There may be any number of writers and one copier. Nobody waits.

use loomable::{AtomicU64, Ordering, mutant, weaken};

/// The two rows, of equal length.
#[derive(Clone, Copy)]
pub(crate) struct Marks<'a> {
    pub dirty: &'a [AtomicU64],
    pub taken: &'a [AtomicU64],
}

impl Marks<'_> {
    /// Marks the granules from `first` to `last` before they are written.
    #[inline]
    pub fn begin(&self, first: u64, last: u64) {
        if !mutant("marks.no_begin") {
            // Acquire: no write moves before this.
            self.set(first, last, Ordering::AcqRel);
        }
    }

    /// Marks them again after the write, whether it succeeded or not.
    #[inline]
    pub fn end(&self, first: u64, last: u64) {
        if !mutant("marks.no_end") {
            self.set(first, last, weaken(Ordering::AcqRel, "marks.end_relaxed"));
        }
    }

    #[inline]
    fn set(&self, first: u64, last: u64, order: Ordering) {
        let mut granule = first;
        while granule <= last {
            let Some(word) = self.dirty.get((granule / 64) as usize) else { return };
            // All bits of one word in one step.
            let end = (granule | 63).min(last);
            let bits = (u64::MAX << (granule % 64)) & (u64::MAX >> (63 - end % 64));
            word.fetch_or(bits, order);
            granule = end + 1;
        }
    }

    /// Takes the marks of a word.
    pub fn take(&self, word: usize) -> u64 {
        let (dirty, taken) = (&self.dirty[word], &self.taken[word]);
        let bits = dirty.load(Ordering::Relaxed);
        if bits == 0 {
            return 0;
        }
        let keep = || taken.fetch_or(bits, Ordering::Relaxed);
        if !mutant("marks.clear_first") {
            keep();
        }
        // Acquire: later reads are at least as new as the marks. Release: a copier that misses a
        // bit here finds it in the other row.
        dirty.fetch_and(!bits, weaken(Ordering::AcqRel, "marks.take_relaxed"));
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
