//! The keys of the stretches of blob files that connections have read, as sets of hashes.
//!
//! A stretch brings thousands of keys, so a key must cost little: a set has 39 bits of each key's
//! hash, eight of which choose a part, and the rest is in open addressing, so 6 to 11 bytes for a
//! key. Two keys with one hash make invalidations too many and never one too few: what is told is
//! the key that was written. A written key's hash leaves the set, unless it was entered twice: it
//! may then be another key's, too, so it stays until the set ends.
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
/// The bit of a hash that was entered twice; the others are the hash.
const TWICE: u32 = 1 << 31;

/// Hashes with the same upper bits.
#[derive(Default)]
struct Part {
    /// A power of two, or none. Each slot has a hash, and perhaps [`TWICE`].
    slots: Vec<u32>,
    len: usize,
}

impl Part {
    fn home(&self, hash: u32) -> usize {
        (hash & !TWICE) as usize & (self.slots.len() - 1)
    }

    fn find(&self, hash: u32) -> Option<usize> {
        let last = self.slots.len().checked_sub(1)?;
        let mut at = self.home(hash);
        loop {
            match self.slots[at] {
                FREE => return None,
                found if found & !TWICE == hash => return Some(at),
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

    /// Empties a slot, and closes the gap.
    fn remove(&mut self, mut gap: usize) {
        let last = self.slots.len() - 1;
        let mut at = gap;
        loop {
            at = (at + 1) & last;
            let hash = self.slots[at];
            if hash == FREE {
                break;
            }
            // Whether its home is not within the slots after the gap up to it.
            if at.wrapping_sub(self.home(hash)) & last >= at.wrapping_sub(gap) & last {
                self.slots[gap] = hash;
                gap = at;
            }
        }
        self.slots[gap] = FREE;
        self.len -= 1;
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
        match part.find(hash) {
            // It may be another key.
            Some(at) => part.slots[at] |= TWICE,
            None => {
                let before = part.slots.len();
                part.add(hash);
                self.bytes += (part.slots.len() - before) * size_of::<u32>();
                self.len += 1;
            }
        }
    }

    fn has(&self, hash: u64) -> bool {
        let (part, hash) = split(hash);
        self.parts[part].find(hash).is_some()
    }

    /// Removes a hash that was entered once; false if it was not there.
    fn leave(&mut self, hash: u64) -> bool {
        let (part, hash) = split(hash);
        let part = &mut self.parts[part];
        let Some(at) = part.find(hash) else { return false };
        if part.slots[at] & TWICE == 0 {
            part.remove(at);
            self.len -= 1;
        }
        true
    }
}

/// The part of a hash, and what it keeps of it.
fn split(hash: u64) -> (usize, u32) {
    ((hash >> 56) as usize, (hash as u32 & !TWICE).max(FREE + 1))
}

/// The sets of all connections of a core.
pub(crate) struct TrackedStretches {
    seed: u64,
    sets: Vec<Set>,
}

impl TrackedStretches {
    /// `seed` makes the hashes secret, so that clients cannot choose keys that collide.
    pub fn new(seed: u64) -> Self {
        Self { seed, sets: Vec::new() }
    }

    fn hash(&self, key: &[u8]) -> u64 {
        XxHash3_128::oneshot_with_seed(self.seed, key) as u64
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

    /// Takes a key out of a connection's set, unless its hash may be another key's, too; false if
    /// it was not there.
    pub fn leave(&mut self, key: &[u8], client: u64) -> bool {
        let Some(at) = self.set(client) else { return false };
        let hash = self.hash(key);
        self.sets[at].leave(hash)
    }

    /// Takes a key out of all sets, as [`leave`](Self::leave) does; returns their connections.
    pub fn take(&mut self, key: &[u8]) -> Vec<u64> {
        if self.sets.is_empty() {
            return Vec::new();
        }
        let hash = self.hash(key);
        let had = self.sets.iter_mut().filter_map(|set| set.leave(hash).then_some(set.client));
        had.collect()
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
        /// With few hashes of few homes, so that they collide, and gaps are closed around the end.
        #[test]
        fn a_part_is_a_set(steps in proptest::collection::vec((any::<bool>(), 0..40_u32), 0..200)) {
            let (mut part, mut model) = (Part::default(), BTreeSet::new());
            for (add, number) in steps {
                let hash = number % 8 * 64 + number / 8 + 13;
                match (part.find(hash), add) {
                    (None, true) => part.add(hash),
                    (Some(at), false) => part.remove(at),
                    _ => {}
                }
                match add {
                    true => model.insert(hash),
                    false => model.remove(&hash),
                };
                prop_assert_eq!(part.len, model.len());
                prop_assert!((0..1024).all(|hash| hash == FREE || part.find(hash).is_some() == model.contains(&hash)));
            }
        }

        #[test]
        fn sets_hold_what_was_entered(
            steps in proptest::collection::vec((0..5_u8, 0..30_u16, 1..4_u64), 0..200)
        ) {
            let mut sets = TrackedStretches::new(5);
            // For each key, whether it was entered twice.
            let mut model: BTreeMap<u64, BTreeMap<u16, bool>> = BTreeMap::new();
            let leave = |set: &mut BTreeMap<u16, bool>, number| {
                let found = set.get(&number).copied();
                if found == Some(false) {
                    set.remove(&number);
                }
                found.is_some()
            };
            for (step, number, client) in steps {
                let key = number.to_be_bytes();
                match step {
                    0 | 1 => {
                        let more = (number + 1).to_be_bytes();
                        prop_assert!(sets.enter(client, &[&key, &more]));
                        for number in [number, number + 1] {
                            let set = model.entry(client).or_default();
                            set.entry(number).and_modify(|twice| *twice = true).or_insert(false);
                        }
                    }
                    2 => {
                        let was = model.get_mut(&client).is_some_and(|set| leave(set, number));
                        prop_assert_eq!(sets.leave(&key, client), was);
                    }
                    3 => {
                        let mut told = sets.take(&key);
                        told.sort_unstable();
                        let had = model.iter_mut().filter_map(|(id, set)| leave(set, number).then_some(*id));
                        prop_assert_eq!(told, had.collect::<Vec<_>>());
                    }
                    _ => {
                        sets.end(client);
                        model.remove(&client);
                    }
                }
                prop_assert_eq!(sets.len(), model.values().map(BTreeMap::len).sum::<usize>());
                for (client, set) in &model {
                    prop_assert!((0..32).all(|n| sets.has(&u16::to_be_bytes(n), *client) == set.contains_key(&n)));
                }
            }
        }
    }

    #[test]
    fn a_write_of_one_of_two_keys_with_one_hash_leaves_the_other() {
        let mut set = Set::new(1);
        let (one, same, other) = (7 << 56 | 0x1234, 7 << 56 | 0xFF_0000_1234, 7 << 56 | 0x1235);
        [one, same, other].iter().for_each(|&hash| set.enter(hash));
        assert_eq!(set.len, 2);
        assert!(set.leave(one) && set.leave(other));
        assert!(set.has(same) && set.leave(same), "its write would be told to nobody");
        assert!(!set.has(other) && !set.leave(other));
        // Enough others that the part grows and moves it.
        (0..100).for_each(|more| set.enter(7 << 56 | 0x2000 | more));
        assert!(set.leave(same) && set.has(same));
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
