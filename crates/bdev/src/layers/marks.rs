//! Which parts of a device have been written: two rows of bits in shared memory, one bit for each
//! granule.
//!
//! ```text
//!   who writes   begin --> [the device writes] --> end        begin, end: the granules' bits in `dirty` are set
//!   who copies   take ---> [reads the device]  --> finish     take: the bits go from `dirty` to `taken`
//!                                                             finish: they go from `taken`
//! ```
//!
//! What must hold:
//!
//! - *No write that has completed is missed.* Who takes a bit and then reads the granule reads the
//!   write or finds the bit again, because the bit is set once more after the write, before anybody
//!   is told of it. The bit that was set before may be gone by then, with the old bytes. Setting is
//!   an atomic or, whose release meets the acquire of the taking; to look first whether the bit is
//!   there still would not do, since the look could be done before the write is seen.
//! - *Who writes may die at any instant.* Whatever differs then was marked before it was written.
//!   (But not if it was taken in between; see `docs/formats/dirty.md`.)
//! - *Who copies may die at any instant.* A bit is in `taken` before it leaves `dirty`, and stays
//!   until the copy is done.
//!
//! Any number may write, and one may copy. Nobody waits for anybody.

use loomable::{AtomicU64, Ordering, mutant, weaken};

/// The two rows, equally long.
#[derive(Clone, Copy)]
pub(crate) struct Marks<'a> {
    pub dirty: &'a [AtomicU64],
    pub taken: &'a [AtomicU64],
}

impl Marks<'_> {
    /// The granules from `first` to `last` are going to be written.
    #[inline]
    pub fn begin(&self, first: u64, last: u64) {
        if !mutant("marks.no_begin") {
            // Acquire: no write goes before this.
            self.set(first, last, Ordering::AcqRel);
        }
    }

    /// They have been written, or may have been.
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
            // All that are in one word at once.
            let through = (granule | 63).min(last);
            let bits = (u64::MAX << (granule % 64)) & (u64::MAX >> (63 - through % 64));
            word.fetch_or(bits, order);
            granule = through + 1;
        }
    }

    /// Takes what is marked in a word.
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
        // Acquire: what is read from now on is as new as what was marked. Release: who misses a bit
        // here finds it in the other row.
        dirty.fetch_and(!bits, weaken(Ordering::AcqRel, "marks.take_relaxed"));
        if mutant("marks.clear_first") {
            keep();
        }
        bits
    }

    /// What was taken is copied.
    pub fn finish(&self, word: usize, bits: u64) {
        self.taken[word].fetch_and(!bits, Ordering::Release);
    }

    /// What was taken and not finished.
    pub fn unfinished(&self, word: usize) -> u64 {
        self.taken[word].load(Ordering::Acquire)
    }
}
