//! Which parts of a device have been written: two rows of bits in shared memory, one bit for each
//! granule, and a third one in that of the process if writes are mirrored.
//!
//! ```text
//!   writer   begin --> [the device writes] --> end     begin, end: set the bits in `dirty`
//!   copier   take ---> [reads the device]  --> finish  take: bits from `dirty` to `taken`
//!                                                      finish: clears them in `taken`
//!   mirrored claim --> [both write] -----> release     claim: bits that are in no row to `claimed`
//!                                                      release: clears them there
//! ```
//!
//! Invariants:
//!
//! - *No completed write is missed.* A copier that takes a bit and then reads the granule reads the
//!   write or finds the bit again, because the bit is looked at once more after the write, before
//!   its completion is reported, and set if it is gone: taken with the old bytes. Both sides order
//!   their two steps with a fence. So a writer that still sees the bit has written before the
//!   copier reads.
//! - *A writer may die at any instant*, unless the rows end with it (`light`). Every granule that
//!   differs then was marked before it was written. (Except if it was taken in between; see
//!   `docs/formats/dirty.md`.)
//! - *A copier may die at any instant.* A bit is in `taken` before it leaves `dirty`, and stays
//!   there until the copy is done.
//! - *A copy overwrites no mirrored write, nor does a mirrored write overwrite a later one.* Who
//!   claims bits looks at the other rows afterwards, and who takes bits at the claims, with fences
//!   between the two steps: one of them sees the other and gives up. A claim is given up for
//!   another one, too. Who has given up marks the granules instead.
//!
//! There may be any number of writers and one copier. Nobody waits. One fence is for any number of
//! writes that have completed, and a bit that is set is only read: an atomic OR would cost a
//! writer on a fast device several times as much. Where the copier has a barrier that is a fence
//! on every processor on which a writer runs, writers need none (`light`).

use loomable::{AtomicU64, Ordering, fence, light_fence, mutant};

/// The rows. The first two are of equal length.
#[derive(Clone, Copy)]
pub(crate) struct Marks<'a> {
    pub dirty: &'a [AtomicU64],
    pub taken: &'a [AtomicU64],
    /// Empty if no writes are mirrored.
    pub claimed: &'a [AtomicU64],
    /// Every copier has a barrier for all processors, and the rows end with the process.
    pub light: bool,
}

impl Marks<'_> {
    /// Marks the granules from `first` to `last` before they are written. Light rows need that not:
    /// a copier finds the marks of [`Marks::end`], and nobody else is left when the writer dies.
    #[inline(always)]
    pub fn begin(&self, first: u64, last: u64) {
        if !self.light && !mutant("marks.no_begin") {
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
        for (word, bits) in words(first, last) {
            let Some(word) = self.dirty.get(word) else { return };
            // Acquire: no write moves before this.
            if word.load(Ordering::Acquire) & bits != bits {
                // Release: a copier that takes the bit reads what was written before.
                word.fetch_or(bits, Ordering::AcqRel);
            }
        }
    }

    /// Claims the granules from `first` to `last` for a write to the device and to the target of
    /// the copy. False if one of them is marked, being copied or claimed: then nothing is claimed,
    /// and the write is to be marked.
    pub fn claim(&self, first: u64, last: u64) -> bool {
        let refused = words(first, last).find(|&(word, bits)| !self.claim_word(word, bits));
        if let Some((refused, _)) = refused {
            let before = words(first, last).take_while(|&(word, _)| word < refused);
            before.for_each(|(word, bits)| self.release_word(word, bits));
        }
        refused.is_none()
    }

    fn claim_word(&self, word: usize, bits: u64) -> bool {
        let Some(claimed) = self.claimed.get(word) else { return false };
        // Acquire: the writes of an earlier claim are done.
        let mut others = claimed.fetch_or(bits, Ordering::AcqRel) & bits;
        let own = bits & !others;
        if mutant("marks.claims_are_shared") {
            others = 0;
        }
        if !mutant("marks.claim_unfenced") {
            fence(Ordering::SeqCst);
        }
        // In this order: a bit is in `taken` before it leaves `dirty`.
        let is_clear = |row: &[AtomicU64]| row[word].load(Ordering::Acquire) & bits == 0;
        let is_free = others == 0 && is_clear(self.dirty) && is_clear(self.taken);
        if !is_free {
            self.release_word(word, own);
        }
        is_free
    }

    /// Ends a claim, after both devices have written or, if they may differ, after `end`.
    pub fn release(&self, first: u64, last: u64) {
        words(first, last).for_each(|(word, bits)| self.release_word(word, bits));
    }

    fn release_word(&self, word: usize, bits: u64) {
        if let Some(claimed) = self.claimed.get(word) {
            // Release: who takes or claims the bits finds the writes done.
            claimed.fetch_and(!bits, Ordering::Release);
        }
    }

    /// Takes the marks of a word, except those that are claimed; `barrier` is one for all
    /// processors.
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
        // Acquire: where a claim has ended, both writes are done.
        let claims = self.claimed.get(word).map_or(0, |claimed| claimed.load(Ordering::Acquire));
        let claims = if mutant("marks.take_claimed") { 0 } else { claims & bits };
        if claims != 0 {
            dirty.fetch_or(claims, Ordering::AcqRel);
            taken.fetch_and(!claims, Ordering::Release);
        }
        bits & !claims
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

/// The words of the granules from `first` to `last`, each with its bits.
fn words(first: u64, last: u64) -> impl Iterator<Item = (usize, u64)> {
    (first / 64..=last / 64).map(move |word| {
        let from = if word == first / 64 { first % 64 } else { 0 };
        let to = if word == last / 64 { last % 64 } else { 63 };
        (word as usize, (u64::MAX << from) & (u64::MAX >> (63 - to)))
    })
}
