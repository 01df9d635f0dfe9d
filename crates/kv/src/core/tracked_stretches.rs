//! The keys of the stretches of blob files that connections have read, as sets of hashes.
//!
//! A stretch brings thousands of keys, so a key must cost little: a set has 40 bits of each key's
//! hash, eight of which choose a part, and the rest is in open addressing, so 6 to 11 bytes for a
//! key.
//!
//! A hash stays until its set ends. A write of another key with the same hash, entered or not,
//! announces only that key: if it removed the hash, the next write of the entered key would not be
//! announced. So an equal hash makes invalidations too many and never one too few.
//!
//! There is one set for each connection: it ends with it in one step. A written key is looked up in
//! all of them, so their number is bounded. A write does not know where the old value was, so the
//! stretches cannot be ranges of files here.
//!
//! The memory of all sets is bounded by the caller: beyond a limit the largest one ends, and its
//! connection is told that everything is invalid.

use twox_hash::XxHash3_128;

/// Connections with a set.
const SETS_MAX: usize = 64;
/// Parts of a set, each of which grows by itself, so that no step takes long.
const PARTS: usize = 256;
/// The first length of a part.
const PART_MIN: usize = 16;
/// No hash.
const FREE: u32 = 0;

/// Hashes with the same upper bits.
#[derive(Default)]
struct Part {
    /// A power of two, or none.
    slots: Vec<u32>,
    len: usize,
}

impl Part {
    fn home(&self, hash: u32) -> usize {
        hash as usize & (self.slots.len() - 1)
    }

    fn has(&self, hash: u32) -> bool {
        let Some(last) = self.slots.len().checked_sub(1) else { return false };
        let mut at = self.home(hash);
        loop {
            match self.slots[at] {
                FREE => return false,
                found if found == hash => return true,
                _ => at = (at + 1) & last,
            }
        }
    }

    /// Adds a hash that is not there.
    fn add(&mut self, hash: u32) {
        if self.len * 4 >= self.slots.len() * 3 {
            let length = (self.slots.len() * 2).max(PART_MIN);
            let old = std::mem::replace(&mut self.slots, vec![FREE; length]);
            old.into_iter().filter(|hash| *hash != FREE).for_each(|hash| self.place(hash));
        }
        self.place(hash);
        self.len += 1;
    }

    fn place(&mut self, hash: u32) {
        let last = self.slots.len() - 1;
        let mut at = self.home(hash);
        while self.slots[at] != FREE {
            at = (at + 1) & last;
        }
        self.slots[at] = hash;
    }
}

/// The keys of one connection.
struct Set {
    client: u64,
    parts: Box<[Part; PARTS]>,
    len: usize,
    bytes: usize,
}

impl Set {
    fn new(client: u64) -> Self {
        let parts = Box::new(std::array::from_fn(|_| Part::default()));
        Self { client, parts, len: 0, bytes: size_of::<[Part; PARTS]>() }
    }

    fn enter(&mut self, hash: u64) {
        let (part, hash) = split(hash);
        let part = &mut self.parts[part];
        if !part.has(hash) {
            let before = part.slots.len();
            part.add(hash);
            self.bytes += (part.slots.len() - before) * size_of::<u32>();
            self.len += 1;
        }
    }

    fn has(&self, hash: u64) -> bool {
        let (part, hash) = split(hash);
        self.parts[part].has(hash)
    }
}

/// The part of a hash, and what it keeps of it.
fn split(hash: u64) -> (usize, u32) {
    ((hash >> 56) as usize, (hash as u32).max(FREE + 1))
}

/// The sets of all connections of a core.
pub(crate) struct TrackedStretches {
    seed: u64,
    sets: Vec<Set>,
    /// The bits of hashes that count; a test makes hashes equal with it.
    #[cfg(test)]
    mask: u64,
}

impl TrackedStretches {
    /// `seed` makes the hashes secret, so that clients cannot choose keys that collide.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            sets: Vec::new(),
            #[cfg(test)]
            mask: u64::MAX,
        }
    }

    fn hash(&self, key: &[u8]) -> u64 {
        let hash = XxHash3_128::oneshot_with_seed(self.seed, key) as u64;
        #[cfg(test)]
        let hash = hash & self.mask;
        hash
    }

    fn set(&self, client: u64) -> Option<usize> {
        self.sets.iter().position(|set| set.client == client)
    }

    /// Enters keys for a connection; false if there are too many others.
    pub fn enter(&mut self, client: u64, keys: &[&[u8]]) -> bool {
        let at = match self.set(client) {
            Some(at) => at,
            None if self.sets.len() >= SETS_MAX => return false,
            None => {
                self.sets.push(Set::new(client));
                self.sets.len() - 1
            }
        };
        for key in keys {
            let hash = self.hash(key);
            self.sets[at].enter(hash);
        }
        true
    }

    /// Whether a connection is to be told of a key.
    pub fn has(&self, key: &[u8], client: u64) -> bool {
        self.set(client).is_some_and(|at| self.sets[at].has(self.hash(key)))
    }

    /// The connections that are to be told of a key.
    pub fn readers(&self, key: &[u8]) -> Vec<u64> {
        if self.sets.is_empty() {
            return Vec::new();
        }
        let hash = self.hash(key);
        self.sets.iter().filter(|set| set.has(hash)).map(|set| set.client).collect()
    }

    /// Ends the set of a connection.
    pub fn end(&mut self, client: u64) {
        self.sets.retain(|set| set.client != client);
    }

    /// Ends the largest set; returns its connection.
    pub fn end_largest(&mut self) -> Option<u64> {
        let client = self.sets.iter().max_by_key(|set| set.bytes)?.client;
        self.end(client);
        Some(client)
    }

    /// Ends all sets; returns their connections.
    pub fn clear(&mut self) -> Vec<u64> {
        self.sets.drain(..).map(|set| set.client).collect()
    }

    /// Number of keys of all sets.
    pub fn len(&self) -> usize {
        self.sets.iter().map(|set| set.len).sum()
    }

    /// Their memory, approximately.
    pub fn bytes(&self) -> usize {
        self.sets.iter().map(|set| set.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// With few hashes of few homes, so that they collide, also around the end.
        #[test]
        fn a_part_is_a_set(numbers in proptest::collection::vec(0..40_u32, 0..200)) {
            let (mut part, mut model) = (Part::default(), BTreeSet::new());
            for number in numbers {
                let hash = number % 8 * 64 + number / 8 + 13;
                if !part.has(hash) {
                    part.add(hash);
                }
                model.insert(hash);
                prop_assert_eq!(part.len, model.len());
                prop_assert!((0..1024).all(|hash| hash == FREE || part.has(hash) == model.contains(&hash)));
            }
        }

        #[test]
        fn sets_hold_what_was_entered(
            steps in proptest::collection::vec((0..5_u8, 0..30_u16, 1..4_u64), 0..200)
        ) {
            let mut sets = TrackedStretches::new(5);
            let mut model: BTreeMap<u64, BTreeSet<u16>> = BTreeMap::new();
            for (step, number, client) in steps {
                let key = number.to_be_bytes();
                match step {
                    0 | 1 => {
                        let more = (number + 1).to_be_bytes();
                        prop_assert!(sets.enter(client, &[&key, &more]));
                        model.entry(client).or_default().extend([number, number + 1]);
                    }
                    2 | 3 => {
                        let mut told = sets.readers(&key);
                        told.sort_unstable();
                        let had = model.iter().filter_map(|(id, set)| set.contains(&number).then_some(*id));
                        prop_assert_eq!(told, had.collect::<Vec<_>>());
                    }
                    _ => {
                        sets.end(client);
                        model.remove(&client);
                    }
                }
                prop_assert_eq!(sets.len(), model.values().map(BTreeSet::len).sum::<usize>());
                for (client, set) in &model {
                    prop_assert!((0..32).all(|n| sets.has(&u16::to_be_bytes(n), *client) == set.contains(&n)));
                }
            }
        }
    }

    /// The writes of keys with the same hash, entered or not, are all announced.
    #[test]
    fn a_write_leaves_the_hash_to_other_keys_that_have_it() {
        let mut sets = TrackedStretches::new(1);
        sets.mask = 0;
        assert!(sets.enter(1, &[b"first", b"second"]) && sets.enter(2, &[b"third"]));
        for key in [&b"first"[..], b"other", b"first", b"second", b"third"] {
            assert_eq!(sets.readers(key), [1, 2]);
            assert!(sets.has(key, 1) && sets.has(key, 2));
        }
        assert_eq!(sets.len(), 2);
        sets.end(1);
        assert_eq!(sets.readers(b"first"), [2]);
    }

    #[test]
    fn the_number_of_sets_is_bounded_and_the_largest_one_ends() {
        let mut sets = TrackedStretches::new(1);
        let keys: Vec<[u8; 4]> = (0..100_000_u32).map(u32::to_be_bytes).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
        for client in 0..SETS_MAX as u64 {
            assert!(sets.enter(client, &keys[..10]));
        }
        assert!(!sets.enter(999, &keys[..1]) && sets.enter(7, &keys));
        let mine = sets.sets[7].bytes;
        assert!(mine < 12 * 100_000, "{mine}");
        assert!(sets.sets[7].len > 99_990);
        assert_eq!(sets.end_largest(), Some(7));
        assert!(sets.enter(999, &keys[..1]) && sets.bytes() < 1_000_000);
        assert_eq!(sets.clear().len(), SETS_MAX);
        assert_eq!(sets.end_largest(), None);
    }
}
