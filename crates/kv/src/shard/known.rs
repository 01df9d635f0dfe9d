//! Remembers which keys exist, as far as recent changes tell. A change that only has to know
//! whether its key exists (in a database whose keys are counted, every `SET`) then need not search
//! memtables and tables, let alone read.
//!
//! Of a key it stores 127 bits of its hash, under a secret seed; two keys with the same hash will
//! not occur in practice. There are two generations: new entries go into the young one. When that
//! is full it becomes the old one, and the previous old one is dropped. If the database was empty
//! at first, the knowledge is complete until an entry has been dropped.

use std::mem;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

/// Bytes for a key in each generation, at the tables' maximum load.
const BYTES_PER_KEY: usize = 20;

/// The hash of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint(pub u128);

impl Fingerprint {
    /// A shorter hash for other tables with the same keys.
    #[inline]
    pub fn short(self) -> u64 {
        (self.0 >> 64) as u64
    }
}

/// Two generations of hashes, see the module text.
pub(crate) struct KnownKeys {
    /// Hashes; the lowest bit says whether the key exists.
    young: HashTable<u128>,
    old: HashTable<u128>,
    /// Maximum number of keys of a generation.
    keys_max: usize,
    /// Unknown keys do not exist.
    complete: bool,
}

impl KnownKeys {
    /// Uses `bytes` bytes. `empty` says that the database has no key.
    pub fn new(bytes: usize, empty: bool) -> Self {
        // A table has a power of two of slots, of which seven eighths are used.
        let places = (bytes / (2 * BYTES_PER_KEY)).max(16);
        let keys_max = (1_usize << places.ilog2()) / 8 * 7;
        let table = || HashTable::with_capacity(keys_max);
        Self { young: table(), old: table(), keys_max, complete: empty }
    }

    /// Whether a key exists; `None` if unknown.
    #[inline]
    pub fn get(&self, key: Fingerprint) -> Option<bool> {
        let same = |entry: &u128| entry >> 1 == key.0 >> 1;
        let found = self.young.find(key.short(), same).or_else(|| self.old.find(key.short(), same));
        match found {
            Some(entry) => Some(entry & 1 == 1),
            None => self.complete.then_some(false),
        }
    }

    /// Notes whether a key exists from now on.
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

    /// Forgets everything, because some of it was not written.
    pub fn forget(&mut self) {
        self.clear();
        self.complete = false;
    }

    /// Notes that no key exists any more.
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
    fn knowledge_of_a_database_that_was_empty_is_complete_until_an_entry_is_dropped() {
        let mut known = KnownKeys::new(0, true);
        assert_eq!(known.get(key(1)), Some(false));
        let keys = known.keys_max as u128;
        for n in 0..2 * keys {
            known.set(key(n), n % 3 > 0);
        }
        for n in 0..2 * keys {
            assert_eq!(known.get(key(n)), Some(n % 3 > 0));
        }
        assert_eq!(known.get(key(2 * keys)), Some(false), "nothing is dropped yet");
        known.set(key(2 * keys), true);
        assert_eq!(known.get(key(0)), None);
        assert_eq!(known.get(key(2 * keys)), Some(true));
        known.clear();
        assert_eq!(known.get(key(2 * keys)), Some(false));
        known.forget();
        assert_eq!(known.get(key(2 * keys)), None);
    }

    #[test]
    fn the_last_note_of_a_key_counts() {
        let mut known = KnownKeys::new(0, false);
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
