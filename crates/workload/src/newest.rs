//! The keys that inserts add.

#![expect(clippy::disallowed_types, reason = "a benchmark's own count, taken by inserts only")]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Numbers new keys, and knows up to which all of them have been acknowledged: only those may be
/// asked for.
#[derive(Debug)]
pub struct Newest {
    begun: AtomicU64,
    /// All keys below are there.
    there: AtomicU64,
    /// Acknowledged, but not all that were begun before.
    early: Mutex<BTreeSet<u64>>,
}

impl Newest {
    /// The first `keys` keys are there.
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

    /// The insert of a new key was acknowledged.
    pub fn done(&self, number: u64) {
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        early.insert(number);
        let mut there = self.there.load(Ordering::Relaxed);
        while early.remove(&there) {
            there += 1;
        }
        self.there.store(there, Ordering::Release);
    }

    /// How many keys are there, numbered from 0 without a gap.
    pub fn there(&self) -> u64 {
        self.there.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::Newest;

    #[test]
    fn a_key_is_there_when_it_and_all_before_it_are_acknowledged() {
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
