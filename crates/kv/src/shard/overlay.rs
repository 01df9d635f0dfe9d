//! The overlay: the keys that a shard has changed and readers do not see yet, and the changes that
//! wait for keys.
//!
//! A key has an entry while a write of it is in flight, or a change waits for its old value. A
//! change that has to wait joins the queues of all its keys when it arrives, and is made when it is
//! first in each. So changes of one key are made in the order of their arrival, and none waits for
//! one that came later.

use std::collections::VecDeque;
use std::rc::Rc;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Slot;

use crate::expiry::Deadline;
use crate::shard::known::Fingerprint;

/// Capacity kept for further keys.
const ROOM_KEPT: usize = 8192;

/// The sequence number of a write of a shard.
pub(crate) type Ticket = u64;

/// A key and its hash.
#[derive(Clone)]
pub(crate) struct Key {
    hash: u64,
    bytes: Rc<[u8]>,
}

impl Key {
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// What the last write of a key left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Newest {
    Missing,
    There(Deadline),
    /// Exists with this value, which is kept because the next change may need it.
    Value(Rc<[u8]>, Deadline),
}

struct Entry<J> {
    key: Key,
    /// The last write, until readers see it.
    written: Option<(Ticket, Newest)>,
    waiting: VecDeque<Rc<J>>,
}

/// Entries by key, see the module text. `J` is a waiting change.
pub(crate) struct Overlay<J> {
    entries: HashTable<Entry<J>>,
}

impl<J> Default for Overlay<J> {
    fn default() -> Self {
        Self { entries: HashTable::new() }
    }
}

impl<J> Overlay<J> {
    #[inline]
    fn find(&self, key: &[u8], print: Fingerprint) -> Option<&Entry<J>> {
        self.entries.find(print.short(), |entry| *entry.key.bytes == *key)
    }

    /// Whether a change waits for this key.
    pub fn is_awaited(&self, key: &[u8], print: Fingerprint) -> bool {
        self.find(key, print).is_some_and(|entry| !entry.waiting.is_empty())
    }

    /// What the last write of a key left, while readers do not see it yet.
    #[inline]
    pub fn newest(&self, key: &[u8], print: Fingerprint) -> Option<&(Ticket, Newest)> {
        self.find(key, print)?.written.as_ref()
    }

    fn entry(&mut self, key: &[u8], print: Fingerprint) -> &mut Entry<J> {
        let hash = print.short();
        let found =
            self.entries.entry(hash, |entry| *entry.key.bytes == *key, |entry| entry.key.hash);
        match found {
            Slot::Occupied(occupied) => occupied.into_mut(),
            Slot::Vacant(vacant) => {
                let key = Key { hash, bytes: key.into() };
                vacant.insert(Entry { key, written: None, waiting: VecDeque::new() }).into_mut()
            }
        }
    }

    /// Notes a write in flight. Returns the key for [`Overlay::landed`].
    pub fn write(&mut self, key: &[u8], print: Fingerprint, ticket: Ticket, newest: Newest) -> Key {
        let entry = self.entry(key, print);
        entry.written = Some((ticket, newest));
        entry.key.clone()
    }

    /// Notes that readers see a write of a key.
    pub fn landed(&mut self, key: &Key, ticket: Ticket) {
        let same = |entry: &Entry<J>| Rc::ptr_eq(&entry.key.bytes, &key.bytes);
        if let Ok(mut found) = self.entries.find_entry(key.hash, same) {
            let entry = found.get_mut();
            entry.written.take_if(|(last, _)| *last == ticket);
            if entry.written.is_none() && entry.waiting.is_empty() {
                found.remove();
                self.shrink();
            }
        }
    }

    /// Releases the capacity that a change of many keys needed.
    fn shrink(&mut self) {
        if self.entries.is_empty() && self.entries.capacity() > ROOM_KEPT {
            self.entries = HashTable::new();
        }
    }

    /// Reserves capacity for `keys` more keys.
    pub fn reserve(&mut self, keys: usize) {
        self.entries.reserve(keys, |entry| entry.key.hash);
    }

    /// Appends a change to the queue of this key; true when the queue was empty.
    pub fn wait(&mut self, key: &[u8], print: Fingerprint, job: &Rc<J>) -> bool {
        let waiting = &mut self.entry(key, print).waiting;
        waiting.push_back(job.clone());
        waiting.len() == 1
    }

    /// The first change in the queue of this key is done; returns the next.
    pub fn next(&mut self, key: &[u8], print: Fingerprint) -> Option<Rc<J>> {
        let same = |entry: &Entry<J>| *entry.key.bytes == *key;
        let mut found = self.entries.find_entry(print.short(), same).ok()?;
        let entry = found.get_mut();
        entry.waiting.pop_front();
        let next = entry.waiting.front().cloned();
        if next.is_none() && entry.written.is_none() {
            found.remove();
            self.shrink();
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Both keys have the same hash: collisions must be handled.
    const K: Fingerprint = Fingerprint(1 << 100);
    const L: Fingerprint = K;

    #[test]
    fn a_key_has_an_entry_until_its_last_write_has_landed() {
        let mut overlay: Overlay<()> = Overlay::default();
        let first = overlay.write(b"k", K, 1, Newest::There(Deadline::NEVER));
        let second = overlay.write(b"k", K, 2, Newest::Missing);
        assert_eq!(overlay.newest(b"k", K), Some(&(2, Newest::Missing)));
        overlay.landed(&first, 1);
        assert_eq!(overlay.newest(b"k", K), Some(&(2, Newest::Missing)));
        overlay.landed(&second, 2);
        assert!(overlay.newest(b"k", K).is_none() && overlay.entries.is_empty());
    }

    #[test]
    fn changes_take_turns_at_a_key() {
        let mut overlay: Overlay<u8> = Overlay::default();
        let (a, b) = (Rc::new(1), Rc::new(2));
        assert!(overlay.wait(b"k", K, &a));
        assert!(!overlay.wait(b"k", K, &b) && overlay.wait(b"l", L, &b));
        let write = overlay.write(b"k", K, 1, Newest::There(Deadline::NEVER));
        overlay.landed(&write, 1);
        assert!(overlay.is_awaited(b"k", K), "a change still waits");
        assert_eq!(overlay.next(b"k", K), Some(b));
        assert_eq!(overlay.next(b"k", K), None);
        assert_eq!(overlay.next(b"l", L), None);
        assert!(overlay.entries.is_empty());
    }
}
