//! Which pages of a device in memory have been written: one bit for each, in the device's own file.
//!
//! The first read of a page of a shared mapping allocates it, so pages never written are not read
//! but answered with zeroes. Writers, readers and discards on several cores use these bits
//! concurrently:
//!
//! ```text
//!   write     copies the bytes --> mark          discard   clear --> gives the pages back
//! ```
//!
//! Invariant: a page whose bit is clear, and which no request touches, is all zeroes. Otherwise
//! hidden data would reappear with the next write to another block of the page. The hard case is a
//! write and a discard of one page at the same time. Both order their two steps with a fence, so
//! either the write finds the bit cleared and sets it again, or the discard gives back the written
//! bytes.

use loomable::{AtomicU64, Ordering, fence, mutant};

/// The bits: page N is bit N % 64 of word N / 64.
#[derive(Clone, Copy)]
pub(crate) struct Pages<'a>(pub &'a [AtomicU64]);

impl Pages<'_> {
    /// Marks the pages from `first` to `last` as written. Returns whether one of them was not.
    #[inline]
    pub fn mark(&self, first: u64, last: u64) -> bool {
        if !mutant("pages.mark_unfenced") {
            fence(Ordering::SeqCst);
        }
        let mut is_new = false;
        each_word(first, last, |word, bits| {
            let word = &self.0[word];
            if word.load(Ordering::Relaxed) & bits != bits {
                word.fetch_or(bits, Ordering::Release);
                is_new = true;
            }
        });
        is_new
    }

    /// Clears the bits of the pages from `first` to `last`, before the pages are given back.
    pub fn clear(&self, first: u64, last: u64) {
        each_word(first, last, |word, bits| {
            self.0[word].fetch_and(!bits, Ordering::Relaxed);
        });
        if !mutant("pages.clear_unfenced") {
            fence(Ordering::SeqCst);
        }
    }

    /// Whether page `first` has been written, and the last page, at most `last`, up to which all
    /// pages are the same.
    #[inline]
    pub fn run(&self, first: u64, last: u64) -> (bool, u64) {
        let mut page = first;
        let written = self.word(page) >> (page % 64) & 1 == 1;
        loop {
            let word = self.word(page);
            let other = if written { !word } else { word } & (u64::MAX << (page % 64));
            let end = (page | 63).min(last);
            let first_other = u64::from(other.trailing_zeros()) + page / 64 * 64;
            if other != 0 && first_other <= end {
                return (written, first_other - 1);
            }
            if end == last {
                return (written, last);
            }
            page = end + 1;
        }
    }

    #[inline]
    fn word(&self, page: u64) -> u64 {
        self.0[(page / 64) as usize].load(Ordering::Acquire)
    }
}

/// Calls `of` with each word that has one of these bits, and with those bits.
#[inline]
fn each_word(first: u64, last: u64, mut of: impl FnMut(usize, u64)) {
    let mut page = first;
    while page <= last {
        let end = (page | 63).min(last);
        of((page / 64) as usize, (u64::MAX << (page % 64)) & (u64::MAX >> (63 - end % 64)));
        page = end + 1;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_the_bits_change() {
        let words: [AtomicU64; 4] = Default::default();
        let pages = Pages(&words);
        assert_eq!(pages.run(0, 255), (false, 255));
        pages.mark(3, 130);
        assert_eq!(pages.run(0, 255), (false, 2));
        assert_eq!(pages.run(3, 255), (true, 130));
        assert_eq!(pages.run(3, 100), (true, 100));
        assert_eq!(pages.run(64, 64), (true, 64));
        assert_eq!(pages.run(131, 255), (false, 255));
        pages.clear(63, 64);
        assert_eq!(pages.run(3, 255), (true, 62));
        assert_eq!(pages.run(63, 255), (false, 64));
        assert_eq!(pages.run(65, 255), (true, 130));
        let model: Vec<bool> = (0..256).map(|page| pages.run(page, page).0).collect();
        let expected: Vec<bool> =
            (0..256).map(|page| (3..=62).contains(&page) || (65..=130).contains(&page)).collect();
        assert_eq!(model, expected);
    }
}
