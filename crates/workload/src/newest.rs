//! The keys added by inserts.

#![expect(clippy::disallowed_types, reason = "a benchmark's own count, taken by inserts only")]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Numbers new keys, and knows up to which number all of them are acknowledged: only these may be
/// read.
#[derive(Debug)]
pub struct Newest {
    begun: AtomicU64,
    /// All keys below this number exist.
    there: AtomicU64,
    /// Keys acknowledged before an earlier key.
    early: Mutex<BTreeSet<u64>>,
}

impl Newest {
    /// Starts with the first `keys` keys.
    pub fn new(keys: u64) -> Newest {
        Newest {
            begun: AtomicU64::new(keys),
            there: AtomicU64::new(keys),
            early: Mutex::new(BTreeSet::new()),
        }
    }

    /// The number of the next new key.
    pub fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::Relaxed)
    }

    /// Records that the insert of a new key was acknowledged.
    pub fn done(&self, number: u64) {
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        early.insert(number);
        let mut there = self.there.load(Ordering::Relaxed);
        while early.remove(&there) {
            there += 1;
        }
        self.there.store(there, Ordering::Release);
    }

    /// The number of existing keys, which are numbered from 0 without a gap.
    pub fn there(&self) -> u64 {
        self.there.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::Newest;

    #[test]
    fn a_key_exists_when_it_and_all_before_it_are_acknowledged() {
        let newest = Newest::new(10);
        assert_eq!((newest.begin(), newest.begin(), newest.begin()), (10, 11, 12));
        newest.done(11);
        assert_eq!(newest.there(), 10);
        newest.done(10);
        assert_eq!(newest.there(), 12);
        newest.done(12);
        assert_eq!(newest.there(), 13);
    }
}
