//! The keys that the connections of a core have read and may keep, with the connections that are to
//! be told when one is written.
//!
//! An entry ends when its key is written: its connections are told once. The number of keys and
//! their memory are bounded: beyond a limit any key is taken out, and its connections are told as
//! if it had been written. Numbers of connections that have gone stay until then; they are never
//! used again.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Slot;
use twox_hash::XxHash3_128;

use crate::shard::delete_range::KeyRange;

/// Memory of an entry without its key and its connections.
const ENTRY_BYTES: usize = size_of::<Entry>() + size_of::<u32>() * 2 + 32;

struct Entry {
    hash: u64,
    key: Box<[u8]>,
    /// The numbers of the connections, in order.
    clients: Vec<u64>,
}

impl Entry {
    fn bytes(&self) -> usize {
        ENTRY_BYTES + self.key.len() + self.clients.capacity() * size_of::<u64>()
    }
}

/// Keys, and the connections that have read each. The entries are dense, so that any can be chosen.
pub(crate) struct TrackedKeys {
    seed: u64,
    entries: Vec<Entry>,
    /// Positions in `entries`.
    places: HashTable<u32>,
    items: usize,
    bytes: usize,
}

impl TrackedKeys {
    /// `seed` makes the hashes secret, so that clients cannot choose keys that collide.
    pub fn new(seed: u64) -> Self {
        Self { seed, entries: Vec::new(), places: HashTable::new(), items: 0, bytes: 0 }
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Number of connections of all keys.
    pub fn items(&self) -> usize {
        self.items
    }

    /// Its memory, approximately.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn hash(&self, key: &[u8]) -> u64 {
        XxHash3_128::oneshot_with_seed(self.seed, key) as u64
    }

    fn find(&self, key: &[u8]) -> Option<usize> {
        if self.entries.is_empty() {
            return None;
        }
        let same = |at: &u32| *self.entries[*at as usize].key == *key;
        self.places.find(self.hash(key), same).map(|at| *at as usize)
    }

    /// Whether a connection is to be told of a key.
    pub fn has(&self, key: &[u8], client: u64) -> bool {
        self.find(key).is_some_and(|at| self.entries[at].clients.binary_search(&client).is_ok())
    }

    /// Enters a connection for a key; false if it was there.
    pub fn enter(&mut self, key: &[u8], client: u64) -> bool {
        let hash = self.hash(key);
        let Self { entries, places, .. } = self;
        let same = |at: &u32| *entries[*at as usize].key == *key;
        match places.entry(hash, same, |at| entries[*at as usize].hash) {
            Slot::Occupied(at) => {
                let entry = &mut entries[*at.get() as usize];
                let Err(place) = entry.clients.binary_search(&client) else { return false };
                self.bytes -= entry.bytes();
                entry.clients.insert(place, client);
                self.bytes += entry.bytes();
            }
            Slot::Vacant(vacant) => {
                // More than four billion entries do not fit into the memory of the table.
                let Ok(at) = u32::try_from(entries.len()) else { return false };
                vacant.insert(at);
                let entry = Entry { hash, key: key.into(), clients: vec![client] };
                self.bytes += entry.bytes();
                entries.push(entry);
            }
        }
        self.items += 1;
        true
    }

    /// Takes a connection out of a key's entry; false if it was not there.
    pub fn leave(&mut self, key: &[u8], client: u64) -> bool {
        let Some(at) = self.find(key) else { return false };
        let entry = &mut self.entries[at];
        let Ok(place) = entry.clients.binary_search(&client) else { return false };
        if entry.clients.len() == 1 {
            self.remove(at);
        } else {
            entry.clients.remove(place);
            self.items -= 1;
        }
        true
    }

    /// Takes a key out; returns its connections.
    pub fn take(&mut self, key: &[u8]) -> Vec<u64> {
        self.find(key).map_or_else(Vec::new, |at| self.remove(at).clients)
    }

    /// Takes out a key chosen by `random`.
    pub fn take_any(&mut self, random: u64) -> Option<(Box<[u8]>, Vec<u64>)> {
        let count = self.entries.len() as u64;
        let at = random.checked_rem(count)? as usize;
        let Entry { key, clients, .. } = self.remove(at);
        Some((key, clients))
    }

    /// Takes keys of a range out, among those at positions below `*before` from the highest on, as
    /// many as `most` looks find. `*before` is where to go on.
    pub fn take_of_range(
        &mut self,
        range: &KeyRange,
        before: &mut usize,
        most: usize,
    ) -> Vec<(Box<[u8]>, Vec<u64>)> {
        let mut taken = Vec::new();
        *before = (*before).min(self.entries.len());
        for _ in 0..most.min(*before) {
            *before -= 1;
            // What takes its place has been looked at, or was entered since.
            if range.has(&self.entries[*before].key) {
                let Entry { key, clients, .. } = self.remove(*before);
                taken.push((key, clients));
            }
        }
        taken
    }

    fn remove(&mut self, at: usize) -> Entry {
        let last = self.entries.len() - 1;
        let hash = self.entries[at].hash;
        if let Ok(place) = self.places.find_entry(hash, |place| *place as usize == at) {
            place.remove();
        }
        let entry = self.entries.swap_remove(at);
        if at != last {
            let moved = self.entries[at].hash;
            if let Some(place) = self.places.find_mut(moved, |place| *place as usize == last) {
                *place = at as u32;
            }
        }
        self.bytes -= entry.bytes();
        self.items -= entry.clients.len();
        if self.entries.is_empty() {
            self.clear();
        }
        entry
    }

    /// Takes all keys out.
    pub fn clear(&mut self) {
        *self = Self::new(self.seed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_map_from_keys_to_connections(
            steps in proptest::collection::vec((0..6u8, 0..20u8, 1..4u64, any::<u64>()), 0..200)
        ) {
            let mut table = TrackedKeys::new(7);
            let mut model: BTreeMap<Vec<u8>, BTreeSet<u64>> = BTreeMap::new();
            for (step, key, client, random) in steps {
                let key = vec![b'k', key];
                match step {
                    0..=2 => {
                        let new = model.entry(key.clone()).or_default().insert(client);
                        prop_assert_eq!(table.enter(&key, client), new);
                    }
                    3 => {
                        let clients = model.remove(&key).unwrap_or_default();
                        prop_assert_eq!(table.take(&key), clients.into_iter().collect::<Vec<_>>());
                    }
                    4 => {
                        let was = model.get_mut(&key).is_some_and(|of| of.remove(&client));
                        model.retain(|_, of| !of.is_empty());
                        prop_assert_eq!(table.leave(&key, client), was);
                    }
                    _ => match table.take_any(random) {
                        None => prop_assert!(model.is_empty()),
                        Some((key, clients)) => {
                            let known = model.remove(&key[..]).unwrap_or_default();
                            prop_assert_eq!(clients, known.into_iter().collect::<Vec<_>>());
                        }
                    },
                }
                prop_assert_eq!(table.len(), model.len());
                prop_assert_eq!(table.items(), model.values().map(BTreeSet::len).sum::<usize>());
                prop_assert_eq!(table.bytes(), table.entries.iter().map(Entry::bytes).sum::<usize>());
                for (key, clients) in &model {
                    prop_assert!(clients.iter().all(|client| table.has(key, *client)));
                }
            }
            let range = KeyRange { start: vec![b'k', 5], end: Some(vec![b'k', 15]) };
            let mut before = usize::MAX;
            while before > 0 && table.len() > 0 {
                for (key, _) in table.take_of_range(&range, &mut before, 3) {
                    prop_assert!(range.has(&key) && model.remove(&key[..]).is_some());
                }
            }
            prop_assert!(model.keys().all(|key| !range.has(key)) && table.len() == model.len());
        }
    }
}
