//! One shard of the cache: entries in a log of segments, found by an open-addressing index.
//!
//! An entry is appended to the newest segment: a header of six bytes, its key, its value. The index
//! has eight bytes for each slot: where the entry is, and 32 bits of its key's hash. There is no
//! allocation for an entry. When the budget is used up, the oldest segment is taken out whole;
//! entries of it that were read since they were written are appended again (a second chance), up to
//! a quarter of a segment: more would displace what was fetched lately and is not read yet.
//!
//! Overhead per entry: 6 bytes of header, up to 3 to align it, and 9 to 14 of the index, which
//! grows by half when it is seven eighths full. What a full segment has left over is given back. An
//! entry larger than a quarter of a segment has one of its own.
//!
//! Invariants: every slot names a live entry, and every live entry has one slot; `live` of a
//! segment is the sum of its live entries' sizes; `bytes_used` never exceeds the budget.

use std::collections::VecDeque;

/// Entries begin at multiples of this, so that 32 bits address 16 GiB.
const UNIT: usize = 4;
const HEADER_BYTES: usize = 6;
const SEGMENT_BYTES_MAX: usize = 1 << 20;
const SEGMENT_BYTES: usize = 64 << 10;
const SEGMENT_BYTES_MIN: usize = 4 << 10;
/// The largest budget of a shard: its segments must be addressable.
pub(super) const BUDGET_BYTES_MAX: usize = 3 << 30;
/// The longest key that is cached: its length has 16 bits.
const KEY_BYTES_MAX: usize = u16::MAX as usize;
const SLOTS_MIN: usize = 32;
const SLOT_BYTES: usize = size_of::<Slot>();

/// The key has no value: the server has said so.
const ABSENT: u32 = (1 << 29) - 1;
/// It was fetched with others, and not read since.
const AHEAD: u32 = 1 << 29;
/// Read since it was written.
const VISITED: u32 = 1 << 30;
/// Not in the index any more.
const DEAD: u32 = 1 << 31;
const LENGTH: u32 = ABSENT;

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The segment's number times its units, plus the offset in units; or [`Slot::FREE`].
    at: u32,
    /// Decides the home slot.
    tag: u32,
}

impl Slot {
    const FREE: Slot = Slot { at: u32::MAX, tag: 0 };

    fn is_free(self) -> bool {
        self.at == u32::MAX
    }
}

#[derive(Debug)]
struct Segment {
    bytes: Vec<u8>,
    live: usize,
    /// What the shard had stored when it began; for entries that got a second chance, about when
    /// they came first.
    began: u64,
}

/// A shard.
#[derive(Debug)]
pub(super) struct Store {
    slots: Vec<Slot>,
    entries: usize,
    /// By number; a free number has no segment.
    segments: Vec<Option<Segment>>,
    /// Numbers, oldest first.
    order: VecDeque<u32>,
    /// The segment that is being filled.
    filling: Option<u32>,
    /// The one that is being filled with entries that get a second chance.
    keeping: Option<u32>,
    segment_bytes: usize,
    budget: usize,
    /// Bytes of all segments and of the index.
    bytes_used: usize,
    /// Bytes of the keys and values that are cached.
    bytes_cached: usize,
    /// Bytes of all entries that were ever stored, also of those that got a second chance.
    stored: u64,
}

/// What is known of a key.
#[derive(Debug)]
pub(super) struct Found {
    /// `None`: it has no value.
    pub value: Option<Vec<u8>>,
    /// It was fetched with others, and this is the first read of it.
    pub is_first: bool,
    /// Bytes that were stored since the segment began in which it is, as a part of the budget, in
    /// 32nds.
    pub age: u64,
}

/// An entry's header, decoded.
#[derive(Clone, Copy)]
struct Header {
    key_len: usize,
    /// The value's length, or [`ABSENT`], with the flags.
    word: u32,
}

impl Header {
    fn read(bytes: &[u8]) -> Header {
        let key_len = u16::from_le_bytes([bytes[4], bytes[5]]);
        let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        Header { key_len: key_len.into(), word }
    }

    /// `None`: the key has no value.
    fn value_len(self) -> Option<usize> {
        (self.word & LENGTH != ABSENT).then_some((self.word & LENGTH) as usize)
    }

    fn size(self) -> usize {
        size(self.key_len, self.value_len().unwrap_or(0))
    }

    fn payload(self) -> usize {
        self.key_len + self.value_len().unwrap_or(0)
    }
}

fn size(key_len: usize, value_len: usize) -> usize {
    (HEADER_BYTES + key_len + value_len).next_multiple_of(UNIT)
}

impl Store {
    /// A shard that holds at most `budget` bytes, index included.
    pub fn new(budget: usize) -> Store {
        let budget = budget.min(BUDGET_BYTES_MAX);
        // Small ones waste less of what the newest one has reserved.
        let segment_bytes = (budget / 256)
            .max((budget / 8).min(SEGMENT_BYTES))
            .clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)
            .next_multiple_of(UNIT);
        Store {
            slots: Vec::new(),
            entries: 0,
            segments: Vec::new(),
            order: VecDeque::new(),
            filling: None,
            keeping: None,
            segment_bytes,
            budget,
            bytes_used: 0,
            bytes_cached: 0,
            stored: 0,
        }
    }

    pub fn entries(&self) -> usize {
        self.entries
    }

    pub fn bytes_used(&self) -> usize {
        self.bytes_used
    }

    pub fn bytes_cached(&self) -> usize {
        self.bytes_cached
    }

    /// Bytes of all entries that were ever stored.
    pub fn stored(&self) -> u64 {
        self.stored
    }

    /// What is known of a key: `None` is nothing, `Some(None)` that it has no value.
    #[cfg(test)]
    pub fn get(&mut self, tag: u32, key: &[u8]) -> Option<Option<Vec<u8>>> {
        self.read(tag, key).map(|found| found.value)
    }

    /// Looks up a key. `None`: nothing is known of it.
    pub fn read(&mut self, tag: u32, key: &[u8]) -> Option<Found> {
        let at = self.slots[self.find(tag, key)?].at;
        let (number, offset) = self.place(at);
        let segment = self.segments[number].as_mut()?;
        let age = (self.stored - segment.began) * 32 / self.budget as u64;
        let bytes = &mut segment.bytes;
        let header = Header::read(&bytes[offset..]);
        let is_first = header.word & AHEAD != 0;
        // The first read of what was fetched early shows no more than that it was right to fetch
        // it.
        match is_first {
            true => bytes[offset + 3] &= !((AHEAD >> 24) as u8),
            false => bytes[offset + 3] |= (VISITED >> 24) as u8,
        }
        let value = offset + HEADER_BYTES + header.key_len;
        let value = header.value_len().map(|len| bytes[value..value + len].to_vec());
        Some(Found { value, is_first, age })
    }

    /// Adds a value that was fetched with others, unless the key is there.
    pub fn insert_ahead(&mut self, tag: u32, key: &[u8], value: &[u8]) {
        if value.len() < ABSENT as usize && self.find(tag, key).is_none() {
            self.append(tag, key, value.len() as u32 | AHEAD, Some(value));
        }
    }

    /// Sets what is known of a key. An entry that is too large is left out, and forgotten.
    pub fn insert(&mut self, tag: u32, key: &[u8], value: Option<&[u8]>) {
        self.remove(tag, key);
        self.append(tag, key, value.map_or(ABSENT, |value| value.len() as u32), value);
    }

    /// Forgets a key.
    pub fn remove(&mut self, tag: u32, key: &[u8]) {
        let Some(slot) = self.find(tag, key) else { return };
        let at = self.slots[slot].at;
        self.free_slot(slot);
        let (number, offset) = self.place(at);
        let Some(segment) = self.segments[number].as_mut() else { return };
        segment.bytes[offset + 3] |= (DEAD >> 24) as u8;
        let header = Header::read(&segment.bytes[offset..]);
        segment.live -= header.size();
        self.bytes_cached -= header.payload();
        let is_open = [self.filling, self.keeping].contains(&Some(number as u32));
        if segment.live == 0 && !is_open {
            self.order.retain(|&other| other as usize != number);
            self.release(number);
        }
    }

    /// Forgets everything, and gives the memory back.
    pub fn clear(&mut self) {
        *self = Store { stored: self.stored, ..Store::new(self.budget) };
    }

    fn append(&mut self, tag: u32, key: &[u8], word: u32, value: Option<&[u8]>) {
        let value = value.unwrap_or_default();
        let size = size(key.len(), value.len());
        // Beyond a quarter, one entry would displace too many others.
        if key.len() > KEY_BYTES_MAX || value.len() >= ABSENT as usize || size > self.budget / 4 {
            return;
        }
        if !self.make_slot() {
            return;
        }
        let Some(number) = self.room(size) else { return };
        let Some(segment) = self.segments[number].as_mut() else { return };
        let offset = segment.bytes.len();
        segment.bytes.extend_from_slice(&word.to_le_bytes());
        segment.bytes.extend_from_slice(&(key.len() as u16).to_le_bytes());
        segment.bytes.extend_from_slice(key);
        segment.bytes.extend_from_slice(value);
        segment.bytes.resize(offset + size, 0);
        segment.live += size;
        self.stored += size as u64;
        self.bytes_cached += key.len() + value.len();
        let at = (number * self.segment_bytes + offset) / UNIT;
        self.occupy(Slot { at: at as u32, tag });
    }

    // ---- the log

    fn place(&self, at: u32) -> (usize, usize) {
        let byte = at as usize * UNIT;
        (byte / self.segment_bytes, byte % self.segment_bytes)
    }

    /// A segment with room for an entry of `size` bytes. `None`: the budget is too small.
    fn room(&mut self, size: usize) -> Option<usize> {
        if let Some(number) = self.filling {
            let bytes = &self.segments[number as usize].as_ref()?.bytes;
            if bytes.len() + size <= self.segment_bytes {
                return Some(number as usize);
            }
        }
        let own = size > self.segment_bytes / 4;
        let capacity = if own { size } else { self.segment_bytes };
        if !own && let Some(number) = self.filling.take() {
            self.seal(number);
        }
        if !self.evict_until(capacity) {
            return None;
        }
        let number = self.start_segment(capacity, self.stored);
        if !own {
            self.filling = Some(number as u32);
        }
        Some(number)
    }

    fn start_segment(&mut self, capacity: usize, began: u64) -> usize {
        let bytes = Vec::with_capacity(capacity);
        self.bytes_used += bytes.capacity();
        let segment = Some(Segment { bytes, live: 0, began });
        let number = match self.segments.iter().position(Option::is_none) {
            Some(free) => {
                self.segments[free] = segment;
                free
            }
            None => {
                self.segments.push(segment);
                self.segments.len() - 1
            }
        };
        self.order.push_back(number as u32);
        number
    }

    /// Ends the filling of a segment: what it has left over is given back.
    fn seal(&mut self, number: u32) {
        let number = number as usize;
        let Some(segment) = self.segments[number].as_mut() else { return };
        self.bytes_used -= segment.bytes.capacity();
        segment.bytes.shrink_to_fit();
        self.bytes_used += segment.bytes.capacity();
        if segment.live == 0 {
            self.order.retain(|&other| other as usize != number);
            self.release(number);
        }
    }

    fn release(&mut self, number: usize) {
        if let Some(segment) = self.segments[number].take() {
            self.bytes_used -= segment.bytes.capacity();
        }
    }

    /// Takes out segments until `bytes` more fit into the budget.
    fn evict_until(&mut self, bytes: usize) -> bool {
        while self.bytes_used + bytes > self.budget {
            if !self.evict() {
                return false;
            }
        }
        true
    }

    /// Takes out the oldest segment. Whether there was one.
    fn evict(&mut self) -> bool {
        let Some(number) = self.order.pop_front() else { return false };
        self.filling.take_if(|filling| *filling == number);
        self.keeping.take_if(|keeping| *keeping == number);
        let number = number as usize;
        let Some(segment) = self.segments[number].take() else { return true };
        self.bytes_used -= segment.bytes.capacity();
        let mut again = Vec::new();
        let (mut offset, mut again_bytes) = (0, 0);
        while offset < segment.bytes.len() {
            let header = Header::read(&segment.bytes[offset..]);
            if header.word & DEAD == 0 {
                let at = ((number * self.segment_bytes + offset) / UNIT) as u32;
                let key_at = offset + HEADER_BYTES;
                if let Some((slot, tag)) =
                    self.find_place(at, &segment.bytes[key_at..key_at + header.key_len])
                {
                    self.free_slot(slot);
                    self.bytes_cached -= header.payload();
                    let chance = again_bytes + header.size() <= self.segment_bytes / 4;
                    if header.word & VISITED != 0 && chance {
                        again_bytes += header.size();
                        again.push((tag, offset));
                    }
                }
            }
            offset += header.size();
        }
        for (tag, offset) in again {
            self.append_again(tag, &segment.bytes[offset..], segment.began);
        }
        true
    }

    /// Appends an entry of a segment that was taken out, if it fits without evicting others. These
    /// have segments of their own, which are smaller, so that little is reserved for them.
    fn append_again(&mut self, tag: u32, entry: &[u8], began: u64) {
        let header = Header::read(entry);
        let size = header.size();
        let has_room = |number: &u32| {
            let segment = self.segments[*number as usize].as_ref();
            segment.is_some_and(|it| it.bytes.len() + size <= it.bytes.capacity())
        };
        let capacity = size.max(self.segment_bytes / 4);
        let number = match self.keeping.filter(has_room) {
            Some(number) => number as usize,
            None if size <= self.segment_bytes && self.bytes_used + capacity <= self.budget => {
                if let Some(full) = self.keeping.take() {
                    self.seal(full);
                }
                let number = self.start_segment(capacity, began);
                self.keeping = Some(number as u32);
                number
            }
            None => return,
        };
        let Some(segment) = self.segments[number].as_mut() else { return };
        let offset = segment.bytes.len();
        segment.bytes.extend_from_slice(&entry[..size]);
        segment.bytes[offset + 3] &= !((VISITED >> 24) as u8);
        segment.live += size;
        self.stored += size as u64;
        self.bytes_cached += header.payload();
        let at = (number * self.segment_bytes + offset) / UNIT;
        self.occupy(Slot { at: at as u32, tag });
    }

    // ---- the index

    fn home(&self, tag: u32) -> usize {
        // Below the number of slots, and monotone in the tag.
        ((u64::from(tag) * self.slots.len() as u64) >> 32) as usize
    }

    fn next(&self, slot: usize) -> usize {
        if slot + 1 == self.slots.len() { 0 } else { slot + 1 }
    }

    fn find(&self, tag: u32, key: &[u8]) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        let mut slot = self.home(tag);
        loop {
            let found = self.slots[slot];
            if found.is_free() {
                return None;
            }
            if found.tag == tag {
                let (number, offset) = self.place(found.at);
                let bytes = &self.segments[number].as_ref()?.bytes;
                let key_at = offset + HEADER_BYTES;
                if Header::read(&bytes[offset..]).key_len == key.len()
                    && bytes[key_at..key_at + key.len()] == *key
                {
                    return Some(slot);
                }
            }
            slot = self.next(slot);
        }
    }

    /// The slot that names a place, and its tag.
    fn find_place(&self, at: u32, key: &[u8]) -> Option<(usize, u32)> {
        if self.slots.is_empty() {
            return None;
        }
        let tag = super::tag_of(super::hash(key));
        let mut slot = self.home(tag);
        while !self.slots[slot].is_free() {
            if self.slots[slot].at == at {
                return Some((slot, self.slots[slot].tag));
            }
            slot = self.next(slot);
        }
        None
    }

    /// Makes sure that a slot can be occupied: the index has at least an eighth free.
    fn make_slot(&mut self) -> bool {
        if (self.entries + 1) * 8 <= self.slots.len() * 7 {
            return true;
        }
        let wanted = (self.slots.len() + self.slots.len() / 2).max(SLOTS_MIN);
        // The old one stays until the new one is filled.
        if !self.evict_until(wanted * SLOT_BYTES) {
            return false;
        }
        let old = std::mem::replace(&mut self.slots, vec![Slot::FREE; wanted]);
        self.bytes_used += (wanted - old.len()) * SLOT_BYTES;
        self.entries = 0;
        for slot in old.into_iter().filter(|slot| !slot.is_free()) {
            self.occupy(slot);
        }
        true
    }

    /// Puts an entry into the index, which has a free slot.
    fn occupy(&mut self, entry: Slot) {
        let mut slot = self.home(entry.tag);
        while !self.slots[slot].is_free() {
            slot = self.next(slot);
        }
        self.slots[slot] = entry;
        self.entries += 1;
    }

    /// Empties a slot, and moves entries that were displaced by it.
    fn free_slot(&mut self, slot: usize) {
        let len = self.slots.len();
        let (mut hole, mut slot) = (slot, slot);
        loop {
            slot = self.next(slot);
            let entry = self.slots[slot];
            if entry.is_free() {
                break;
            }
            let from_home = (slot + len - self.home(entry.tag)) % len;
            let from_hole = (slot + len - hole) % len;
            if from_home >= from_hole {
                self.slots[hole] = entry;
                hole = slot;
            }
        }
        self.slots[hole] = Slot::FREE;
        self.entries -= 1;
    }

    #[cfg(test)]
    fn check(&self) {
        let named = self.slots.iter().filter(|slot| !slot.is_free()).count();
        assert_eq!(named, self.entries);
        let mut used = self.slots.len() * SLOT_BYTES;
        let (mut live_entries, mut cached) = (0, 0);
        let present = self.segments.iter().flatten().count();
        assert_eq!(present, self.order.len());
        for (number, segment) in self.segments.iter().enumerate() {
            let Some(segment) = segment else { continue };
            used += segment.bytes.capacity();
            let (mut offset, mut live) = (0, 0);
            while offset < segment.bytes.len() {
                let header = Header::read(&segment.bytes[offset..]);
                if header.word & DEAD == 0 {
                    live += header.size();
                    live_entries += 1;
                    cached += header.payload();
                    let at = ((number * self.segment_bytes + offset) / UNIT) as u32;
                    let key = &segment.bytes[offset + HEADER_BYTES..][..header.key_len];
                    assert!(self.find_place(at, key).is_some(), "an entry without a slot");
                }
                offset += header.size();
            }
            assert_eq!(live, segment.live);
        }
        assert_eq!((live_entries, cached), (self.entries, self.bytes_cached));
        assert_eq!(used, self.bytes_used);
        assert!(used <= self.budget, "{used} of {}", self.budget);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::{hash, tag_of};
    use super::*;

    fn tag(key: &[u8]) -> u32 {
        tag_of(hash(key))
    }

    fn put(store: &mut Store, key: &[u8], value: Option<&[u8]>) {
        store.insert(tag(key), key, value);
    }

    #[test]
    fn an_entry_costs_at_most_32_bytes() {
        for (value_len, budget) in
            [(4096, 64 << 20), (100, 8 << 20), (16, 8 << 20), (9000, 64 << 20)]
        {
            let mut store = Store::new(budget);
            // Until nothing more fits.
            for n in 0_u64.. {
                put(&mut store, &n.to_be_bytes(), Some(&vec![7; value_len]));
                let full = store.bytes_used() + 2 * store.segment_bytes > budget;
                if full && n > 100 {
                    break;
                }
            }
            let last = store.filling.take().unwrap();
            store.seal(last);
            store.check();
            let overhead = store.bytes_used() - store.bytes_cached();
            let each = overhead as f64 / store.entries() as f64;
            assert!(each <= 32.0, "{each} bytes each, with values of {value_len}");
        }
    }

    #[test]
    fn what_is_read_outlives_what_is_not() {
        let mut store = Store::new(1 << 20);
        put(&mut store, b"hot", Some(b"value"));
        for n in 0_u64..100_000 {
            put(&mut store, &n.to_be_bytes(), Some(&[0; 100]));
            assert!(store.get(tag(b"hot"), b"hot").is_some(), "{n}");
        }
        let cold = 0_u64.to_be_bytes();
        assert!(store.get(tag(&cold), &cold).is_none());
        store.check();
    }

    #[test]
    fn an_entry_that_is_too_large_removes_the_old_value() {
        let mut store = Store::new(64 << 10);
        put(&mut store, b"k", Some(b"small"));
        put(&mut store, b"k", Some(&[0; 60 << 10]));
        assert_eq!(store.get(tag(b"k"), b"k"), None);
        put(&mut store, &[b'k'; 70_000], Some(b""));
        assert_eq!(store.entries(), 0);
        store.check();
    }

    #[test]
    fn clearing_gives_all_memory_back() {
        let mut store = Store::new(1 << 20);
        put(&mut store, b"k", Some(&[1; 1000]));
        assert!(store.bytes_used() > 1000);
        store.clear();
        assert_eq!((store.bytes_used(), store.bytes_cached(), store.entries()), (0, 0, 0));
        assert_eq!(store.get(tag(b"k"), b"k"), None);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Put(u16, u16),
        Absent(u16),
        Ahead(u16, u16),
        Get(u16),
        Remove(u16),
        Clear,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let key = 0..400_u16;
        prop::collection::vec(
            prop_oneof![
                20 => (key.clone(), prop_oneof![9 => 0..300_u16, 1 => 0..9000_u16])
                    .prop_map(|(key, len)| Step::Put(key, len)),
                3 => key.clone().prop_map(Step::Absent),
                10 => (key.clone(), 0..300_u16).prop_map(|(key, len)| Step::Ahead(key, len)),
                20 => key.clone().prop_map(Step::Get),
                10 => key.prop_map(Step::Remove),
                1 => Just(Step::Clear),
            ],
            1..600,
        )
    }

    proptest! {
        /// It may forget, but what it says is what was put last, and its accounts are right.
        #[test]
        fn it_says_what_was_put_last(steps in steps(), budget in 20_000..200_000_usize) {
            let mut store = Store::new(budget);
            let mut model = BTreeMap::new();
            for (n, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Put(key, len) => {
                        let value = vec![n as u8; len.into()];
                        put(&mut store, &key.to_be_bytes(), Some(&value));
                        model.insert(key, Some(value));
                    }
                    Step::Absent(key) => {
                        put(&mut store, &key.to_be_bytes(), None);
                        model.insert(key, None);
                    }
                    // A fetched value is as new as what is there; of a key that is not there, as
                    // new as the model.
                    Step::Ahead(key, len) => {
                        let key_bytes = key.to_be_bytes();
                        let value = vec![n as u8; len.into()];
                        if store.find(tag(&key_bytes), &key_bytes).is_none() {
                            model.insert(key, Some(value.clone()));
                        }
                        store.insert_ahead(tag(&key_bytes), &key_bytes, &value);
                        let again = store.read(tag(&key_bytes), &key_bytes);
                        prop_assert_eq!(again.as_ref().map(|found| &found.value), model.get(&key));
                        let first = store.read(tag(&key_bytes), &key_bytes);
                        prop_assert!(first.is_none_or(|found| !found.is_first));
                    }
                    Step::Get(key) => {
                        let key_bytes = key.to_be_bytes();
                        if let Some(value) = store.get(tag(&key_bytes), &key_bytes) {
                            prop_assert_eq!(Some(&value), model.get(&key));
                        }
                    }
                    Step::Remove(key) => {
                        let key_bytes = key.to_be_bytes();
                        store.remove(tag(&key_bytes), &key_bytes);
                        model.remove(&key);
                        prop_assert!(store.get(tag(&key_bytes), &key_bytes).is_none());
                    }
                    Step::Clear => {
                        store.clear();
                        model.clear();
                    }
                }
                store.check();
            }
        }
    }
}
