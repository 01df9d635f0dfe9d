//! What a shard knows of keys that it has changed and readers do not see yet, and who waits for
//! them.
//!
//! A key has an entry while a write of it is on its way, or a change waits for what its old value
//! is. Every change that has to wait stands in the queues of all its keys from its arrival on, and
//! is made when it is first in each: so changes of one key are made in the order of their arrival,
//! and none waits for one that came later.

use std::collections::VecDeque;
use std::rc::Rc;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Slot;

use crate::shard::known::Fingerprint;

/// Keys for which room is kept.
const ROOM_KEPT: usize = 8192;

/// The place of a write among all writes of a shard.
pub(crate) type Ticket = u64;

/// A key and its hash.
#[derive(Clone)]
pub(crate) struct Key {
    hash: u64,
    bytes: Rc<[u8]>,
}

/// What the last write of a key leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Newest {
    Missing,
    There,
    /// There, with this value, kept because the next change may want it.
    Value(Rc<[u8]>),
}

struct Entry<J> {
    key: Key,
    /// The last write, unless readers see it already.
    written: Option<(Ticket, Newest)>,
    waiting: VecDeque<Rc<J>>,
}

/// See the module text. `J` is a change that waits.
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

    /// What the last write of a key leaves that readers do not see yet.
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

    /// A write of a key is on its way. Gives the key for [`Overlay::landed`].
    pub fn write(&mut self, key: &[u8], print: Fingerprint, ticket: Ticket, newest: Newest) -> Key {
        let entry = self.entry(key, print);
        entry.written = Some((ticket, newest));
        entry.key.clone()
    }

    /// Readers see a write of a key.
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

    /// Gives back what a change of many keys needed.
    fn shrink(&mut self) {
        if self.entries.is_empty() && self.entries.capacity() > ROOM_KEPT {
            self.entries = HashTable::new();
        }
    }

    /// Makes room for so many keys more.
    pub fn reserve(&mut self, keys: usize) {
        self.entries.reserve(keys, |entry| entry.key.hash);
    }

    /// Puts a change behind those that wait for this key; true when there was none.
    pub fn wait(&mut self, key: &[u8], print: Fingerprint, job: &Rc<J>) -> bool {
        let waiting = &mut self.entry(key, print).waiting;
        waiting.push_back(job.clone());
        waiting.len() == 1
    }

    /// The first that waited for this key is done; gives the next.
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

    // The same hash, which it must not mind.
    const K: Fingerprint = Fingerprint(1 << 100);
    const L: Fingerprint = K;

    #[test]
    fn a_key_is_known_until_its_last_write_has_landed() {
        let mut overlay: Overlay<()> = Overlay::default();
        let first = overlay.write(b"k", K, 1, Newest::There);
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
        let write = overlay.write(b"k", K, 1, Newest::There);
        overlay.landed(&write, 1);
        assert!(overlay.is_awaited(b"k", K), "somebody still waits");
        assert_eq!(overlay.next(b"k", K), Some(b));
        assert_eq!(overlay.next(b"k", K), None);
        assert_eq!(overlay.next(b"l", L), None);
        assert!(overlay.entries.is_empty());
    }
}
