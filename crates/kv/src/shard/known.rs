//! Which keys are there, as far as the last changes tell: so that a change which only has to know
//! whether its key exists (in a database whose keys are counted, every `SET`) need not look in
//! memtables and tables, let alone read.
//!
//! Of a key it keeps 127 bits of its hash, under a seed that nobody outside knows; two keys of the
//! same will not be met. There are two generations: what is told goes into the young one; when that
//! is full it becomes the old one, and what was old is forgotten. Until something has been
//! forgotten of a database that was empty, it knows all there is.

use std::mem;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

/// Bytes for a key in each generation, as full as the tables are.
const BYTES_PER_KEY: usize = 20;

/// The hash of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint(pub u128);

impl Fingerprint {
    /// For tables of other things by the same key.
    #[inline]
    pub fn short(self) -> u64 {
        (self.0 >> 64) as u64
    }
}

/// See the module text.
pub(crate) struct Known {
    /// Hashes; the lowest bit says whether the key is there.
    young: HashTable<u128>,
    old: HashTable<u128>,
    /// Keys of a generation.
    keys_max: usize,
    /// Keys it does not know are not there.
    complete: bool,
}

impl Known {
    /// Takes so many bytes. `empty` says that the database has no key.
    pub fn new(bytes: usize, empty: bool) -> Self {
        // A table has a power of two of places, of which seven eighths are used.
        let places = (bytes / (2 * BYTES_PER_KEY)).max(16);
        let keys_max = (1_usize << places.ilog2()) / 8 * 7;
        let table = || HashTable::with_capacity(keys_max);
        Self { young: table(), old: table(), keys_max, complete: empty }
    }

    /// Whether a key is there; `None` when it has not been told lately.
    #[inline]
    pub fn get(&self, key: Fingerprint) -> Option<bool> {
        let same = |entry: &u128| entry >> 1 == key.0 >> 1;
        let found = self.young.find(key.short(), same).or_else(|| self.old.find(key.short(), same));
        match found {
            Some(entry) => Some(entry & 1 == 1),
            None => self.complete.then_some(false),
        }
    }

    /// Whether a key is there from now on.
    #[inline]
    pub fn set(&mut self, key: Fingerprint, exists: bool) {
        if self.young.len() >= self.keys_max {
            self.complete &= self.old.is_empty();
            self.old.clear();
            mem::swap(&mut self.young, &mut self.old);
        }
        let entry = (key.0 & !1) | u128::from(exists);
        let same = |entry: &u128| entry >> 1 == key.0 >> 1;
        match self.young.entry(key.short(), same, |entry| Fingerprint(*entry).short()) {
            Entry::Occupied(mut occupied) => *occupied.get_mut() = entry,
            Entry::Vacant(vacant) => drop(vacant.insert(entry)),
        }
    }

    /// What was told was not so.
    pub fn forget(&mut self) {
        self.clear();
        self.complete = false;
    }

    /// There is no key any more.
    pub fn clear(&mut self) {
        self.young.clear();
        self.old.clear();
        self.complete = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u128) -> Fingerprint {
        Fingerprint(n.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835))
    }

    #[test]
    fn it_knows_all_of_a_database_that_was_empty_until_it_forgets() {
        let mut known = Known::new(0, true);
        assert_eq!(known.get(key(1)), Some(false));
        let keys = known.keys_max as u128;
        for n in 0..2 * keys {
            known.set(key(n), n % 3 > 0);
        }
        for n in 0..2 * keys {
            assert_eq!(known.get(key(n)), Some(n % 3 > 0));
        }
        assert_eq!(known.get(key(2 * keys)), Some(false), "nothing is forgotten yet");
        known.set(key(2 * keys), true);
        assert_eq!(known.get(key(0)), None);
        assert_eq!(known.get(key(2 * keys)), Some(true));
        known.clear();
        assert_eq!(known.get(key(2 * keys)), Some(false));
        known.forget();
        assert_eq!(known.get(key(2 * keys)), None);
    }

    #[test]
    fn what_was_told_last_holds() {
        let mut known = Known::new(0, false);
        assert_eq!(known.get(key(7)), None);
        known.set(key(7), true);
        known.set(key(7), false);
        assert_eq!(known.get(key(7)), Some(false));
        for n in 100..100 + known.keys_max as u128 {
            known.set(key(n), true);
        }
        assert_eq!(known.get(key(7)), Some(false), "old");
        known.set(key(7), true);
        assert_eq!(known.get(key(7)), Some(true), "and young again");
    }
}
