//! The writes of a column family that were found in the write-ahead log, sorted for reading.
//!
//! 1. [`RecoveredBuilder::apply`] takes the log's operations in any order of keys and appends key
//!    and value to one arena.
//! 2. [`RecoveredBuilder::freeze`] sorts an array of offsets, once, in short steps. After that
//!    nothing changes, so any core may read.
//! 3. [`Recovered::get`] and [`RecoveredCursor`] search the array. Neither allocates.
//!
//! Order: user keys by the comparator, versions of a key newest first, as in a table. Range
//! tombstones are kept apart; a reader must also check [`Recovered::tombstones`].
//!
//! ```text
//! arena    varint32 key len | varint32 value len | user key | fixed64 packed | value   per entry
//! entries  u64 key prefix | u64 offset into the arena                                  sorted
//! ```
//!
//! The prefix is the eight bytes after the common prefix of all keys, as a number that sorts like
//! the key. It decides nearly every comparison without touching the arena: sorting a million
//! entries takes a tenth of a second, and a lookup one or two cache misses.

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::Arc;

use rocksfmt::{
    Comparator, KEY_TRAILER_BYTES, Op, RangeTombstonesBuilder, RangeTombstonesSorting, SEEK_TYPE,
    ValueType, pack, put_varint, varint32_at,
};

use crate::error::{Error, Result};
use crate::mem::tombstones::TombstoneRuns;

/// Bytes of memory that a range tombstone takes besides its keys, about.
const TOMBSTONE_BYTES: usize = 64;

#[derive(Clone, Copy)]
struct Entry {
    prefix: u64,
    offset: u64,
}

/// Collects operations.
pub(crate) struct RecoveredBuilder {
    comparator: Comparator,
    arena: Vec<u8>,
    entries: Vec<Entry>,
    /// The common prefix of all keys so far; meaningless before the first.
    common: Vec<u8>,
    tombstones: RangeTombstonesBuilder,
    tombstone_count: usize,
    tombstone_bytes: usize,
}

impl RecoveredBuilder {
    pub fn new(comparator: Comparator) -> RecoveredBuilder {
        RecoveredBuilder {
            comparator,
            arena: Vec::new(),
            entries: Vec::new(),
            common: Vec::new(),
            tombstones: RangeTombstonesBuilder::new(comparator),
            tombstone_count: 0,
            tombstone_bytes: 0,
        }
    }

    /// The order of its keys.
    pub fn comparator(&self) -> Comparator {
        self.comparator
    }

    /// Takes an operation that writes a key, with its sequence. Other operations have no effect.
    pub fn apply(&mut self, sequence: u64, op: &Op<'_>) -> Result<()> {
        match *op {
            Op::Put { key, value, .. } => self.insert(key, sequence, ValueType::Value, &[value]),
            Op::Delete { key, .. } => self.insert(key, sequence, ValueType::Deletion, &[]),
            Op::SingleDelete { key, .. } => {
                self.insert(key, sequence, ValueType::SingleDeletion, &[]);
            }
            Op::Merge { key, operand, .. } => {
                self.insert(key, sequence, ValueType::Merge, &[operand]);
            }
            Op::BlobIndex { key, index, .. } => {
                self.insert(key, sequence, ValueType::BlobIndex, &[index]);
            }
            Op::Entity { key, columns, .. } => {
                self.insert(key, sequence, ValueType::WideColumnEntity, &[columns]);
            }
            // A table would have a sequence number of that time after the value, and RocksDB has
            // none for most times either.
            Op::TimedPut { key, value, .. } => {
                self.insert(key, sequence, ValueType::Value, &[value]);
            }
            Op::DeleteRange { begin, end, .. } => self.delete_range(begin, end, sequence)?,
            Op::LogData(_) | Op::Noop | Op::Marker(_) => {}
        }
        Ok(())
    }

    fn delete_range(&mut self, start: &[u8], end: &[u8], sequence: u64) -> Result<()> {
        if self.comparator.cmp_user(start, end).is_ge() {
            // It deletes nothing, and a memtable with nothing else needs no table.
            return Ok(());
        }
        self.tombstones
            .add(start, end, sequence)
            .map_err(|e| Error::format("range deletions of the write-ahead log", &e))?;
        self.tombstone_count += 1;
        self.tombstone_bytes += start.len() + end.len() + TOMBSTONE_BYTES;
        Ok(())
    }

    fn insert(&mut self, key: &[u8], sequence: u64, value_type: ValueType, value: &[&[u8]]) {
        if self.entries.is_empty() {
            self.common.extend_from_slice(key);
        } else if !key.starts_with(&self.common) {
            let shared = self.common.iter().zip(key).take_while(|(a, b)| a == b).count();
            self.common.truncate(shared);
        }
        let offset = self.arena.len() as u64;
        self.entries.push(Entry { prefix: 0, offset });
        put_varint(&mut self.arena, key.len() as u64);
        put_varint(&mut self.arena, value.iter().map(|part| part.len() as u64).sum());
        self.arena.extend_from_slice(key);
        self.arena.extend_from_slice(&pack(sequence, value_type as u8).to_le_bytes());
        for part in value {
            self.arena.extend_from_slice(part);
        }
    }

    /// Reserves room for keys and values of this many bytes, if there is as much. Memory that grows
    /// by doubling is copied and faulted in again each time, which for a gigabyte takes longer than
    /// everything else. Unused pages are never touched.
    pub fn reserve(&mut self, bytes: usize) {
        // If this fails, the arena grows as needed, or fails then.
        let _ = self.arena.try_reserve_exact(bytes);
    }

    /// Bytes of memory in use.
    pub fn memory(&self) -> usize {
        self.arena.len() + self.entries.len() * size_of::<Entry>() + self.tombstone_bytes
    }

    /// Whether nothing was written.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.tombstone_count == 0
    }

    /// Sorts everything for reading, in steps.
    pub fn freeze(self) -> Sorting {
        let mut entries = self.entries;
        entries.shrink_to_fit();
        let mut table = Recovered {
            comparator: self.comparator,
            arena: self.arena,
            entries,
            common: self.common,
            tombstones: Arc::default(),
        };
        table.arena.shrink_to_fit();
        let tombstones = Some(self.tombstones.sort());
        Sorting { table, tombstones, sorted: Vec::new(), width: 0, start: 0, left: 0, right: 0 }
    }
}

/// Entries sorted or merged in one step: some hundred microseconds.
const STEP: usize = if cfg!(test) { 3 } else { 1024 };

/// Writes being sorted: first runs of [`STEP`] entries, then pairs of runs, until one run is left.
/// Between two steps the core can do other work.
pub(crate) struct Sorting {
    table: Recovered,
    /// The range tombstones, until they are sorted.
    tombstones: Option<RangeTombstonesSorting>,
    /// The entries that this pass has merged.
    sorted: Vec<Entry>,
    /// The length of the runs; 0 while they are being sorted.
    width: usize,
    /// The start of the pair being merged, and the positions in its halves.
    start: usize,
    left: usize,
    right: usize,
}

impl Sorting {
    /// Does the next step; false if none was left.
    pub fn step(&mut self) -> bool {
        if let Some(mut sorting) = self.tombstones.take() {
            match sorting.step() {
                true => self.tombstones = Some(sorting),
                false => self.table.tombstones = Arc::new(TombstoneRuns::of(sorting.finish())),
            }
            return true;
        }
        let len = self.table.entries.len();
        if self.width == 0 {
            self.sort_run();
            return true;
        }
        if self.width >= len {
            return false;
        }
        if self.sorted.capacity() < len {
            self.sorted.reserve_exact(len);
        }
        self.merge_some();
        if self.sorted.len() == len {
            std::mem::swap(&mut self.table.entries, &mut self.sorted);
            self.sorted.clear();
            self.width = self.width.saturating_mul(2);
            self.begin_pair(0);
        }
        true
    }

    /// The number of entries.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Does all remaining steps and returns the result.
    pub fn finish(mut self) -> Recovered {
        while self.step() {}
        self.table
    }

    fn sort_run(&mut self) {
        let table = &mut self.table;
        let end = table.entries.len().min(self.start + STEP);
        for at in self.start..end {
            table.entries[at].prefix = table.prefix(table.user_key(table.entries[at].offset));
        }
        let mut entries = std::mem::take(&mut table.entries);
        entries[self.start..end].sort_by(|a, b| table.cmp(a, b));
        table.entries = entries;
        self.start = end;
        if end == table.entries.len() {
            self.width = STEP;
            self.begin_pair(0);
        }
    }

    fn begin_pair(&mut self, start: usize) {
        let len = self.table.entries.len();
        (self.start, self.left, self.right) = (start, start, len.min(start + self.width));
    }

    fn merge_some(&mut self) {
        let entries = &self.table.entries;
        let middle = entries.len().min(self.start + self.width);
        let end = entries.len().min(middle + self.width);
        for _ in 0..STEP {
            let from_right = match (self.left < middle, self.right < end) {
                (true, true) => self.table.cmp(&entries[self.right], &entries[self.left]).is_lt(),
                (false, true) => true,
                (true, false) => false,
                (false, false) => return self.begin_pair(end),
            };
            let from = if from_right { &mut self.right } else { &mut self.left };
            self.sorted.push(entries[*from]);
            *from += 1;
        }
    }
}

/// The sorted writes.
pub(crate) struct Recovered {
    comparator: Comparator,
    arena: Vec<u8>,
    entries: Vec<Entry>,
    common: Vec<u8>,
    tombstones: Arc<TombstoneRuns>,
}

/// The ranges of an entry's parts in the arena.
struct Parts {
    key: Range<usize>,
    value: Range<usize>,
}

impl Recovered {
    /// Number of entries, range tombstones not counted.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The arena; the ranges that other methods return refer to it.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.arena
    }

    /// Bytes of memory held.
    pub fn memory(&self) -> usize {
        self.arena.capacity()
            + self.entries.capacity() * size_of::<Entry>()
            + self.tombstones.memory()
    }

    /// The range tombstones.
    pub fn tombstones(&self) -> &Arc<TombstoneRuns> {
        &self.tombstones
    }

    /// The newest entry of a user key visible at a sequence: packed sequence and type, and the
    /// range of its value.
    #[inline]
    pub fn get(&self, user_key: &[u8], sequence: u64) -> Option<(u64, Range<usize>)> {
        let at = self.lower_bound(user_key, pack(sequence, SEEK_TYPE));
        let parts = self.parts(self.entries.get(at)?.offset);
        let (found, trailer) = self.arena.get(parts.key)?.split_last_chunk::<8>()?;
        (found == user_key).then(|| (u64::from_le_bytes(*trailer), parts.value))
    }

    /// Index of the first entry at or after an internal key.
    fn lower_bound(&self, user_key: &[u8], packed: u64) -> usize {
        if !user_key.starts_with(&self.common) {
            // Every key begins with `common`, so all keys are on one side.
            return match self.comparator.cmp_user(user_key, &self.common) {
                Ordering::Greater => self.entries.len(),
                _ => 0,
            };
        }
        let prefix = self.prefix(user_key);
        self.entries.partition_point(|entry| {
            let order = entry.prefix.cmp(&prefix).then_with(|| {
                let key = self.key(entry.offset);
                let (user, trailer) = key.split_last_chunk::<8>().unwrap_or((key, &[0; 8]));
                self.comparator
                    .cmp_user(user, user_key)
                    .then_with(|| packed.cmp(&u64::from_le_bytes(*trailer)))
            });
            order == Ordering::Less
        })
    }

    /// A number that sorts like the key's bytes after `common`, as far as eight bytes tell.
    #[inline]
    fn prefix(&self, user_key: &[u8]) -> u64 {
        let rest = user_key.get(self.common.len()..).unwrap_or_default();
        let prefix = match rest.first_chunk::<8>() {
            Some(eight) => u64::from_be_bytes(*eight),
            None => {
                let mut padded = [0; 8];
                padded[..rest.len()].copy_from_slice(rest);
                u64::from_be_bytes(padded)
            }
        };
        match self.comparator {
            Comparator::Bytewise => prefix,
            Comparator::ReverseBytewise => !prefix,
        }
    }

    #[inline]
    fn parts(&self, offset: u64) -> Parts {
        let read = || {
            let (key_bytes, at) = varint32_at(&self.arena, offset as usize)?;
            let (value_bytes, at) = varint32_at(&self.arena, at)?;
            let key = at..at + key_bytes as usize + KEY_TRAILER_BYTES;
            Some(Parts { value: key.end..key.end + value_bytes as usize, key })
        };
        read().expect("the builder wrote both lengths at every offset")
    }

    fn cmp(&self, a: &Entry, b: &Entry) -> Ordering {
        a.prefix
            .cmp(&b.prefix)
            .then_with(|| self.comparator.cmp_internal(self.key(a.offset), self.key(b.offset)))
    }

    /// The internal key at an offset.
    #[inline]
    fn key(&self, offset: u64) -> &[u8] {
        &self.arena[self.parts(offset).key]
    }

    fn user_key(&self, offset: u64) -> &[u8] {
        let key = self.key(offset);
        &key[..key.len() - KEY_TRAILER_BYTES]
    }
}

/// A position in [`Recovered`]. It borrows nothing; every call takes its table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecoveredCursor {
    /// The index of the entry plus one; 0 for none.
    at: usize,
}

impl RecoveredCursor {
    pub fn new() -> RecoveredCursor {
        RecoveredCursor::default()
    }

    /// Whether it is on an entry.
    #[inline]
    pub fn valid(&self) -> bool {
        self.at != 0
    }

    /// Moves to the entry with that index, if it exists.
    fn set(&mut self, table: &Recovered, index: Option<usize>) -> bool {
        self.at = match index {
            Some(index) if index < table.len() => index + 1,
            _ => 0,
        };
        self.valid()
    }

    /// Moves to the first entry.
    pub fn seek_to_first(&mut self, table: &Recovered) -> bool {
        self.set(table, Some(0))
    }

    /// Moves to the last entry.
    pub fn seek_to_last(&mut self, table: &Recovered) -> bool {
        self.set(table, table.len().checked_sub(1))
    }

    /// Moves to the first entry at or after an internal key.
    pub fn seek(&mut self, table: &Recovered, key: &[u8]) -> bool {
        let index = seek_index(table, key);
        self.set(table, Some(index))
    }

    /// Moves to the last entry at or before an internal key.
    pub fn seek_for_prev(&mut self, table: &Recovered, key: &[u8]) -> bool {
        let mut index = seek_index(table, key);
        let is_key = |entry: &Entry| table.key(entry.offset) == key;
        // Identical entries (a log replayed twice) are adjacent.
        while table.entries.get(index).is_some_and(is_key) {
            index += 1;
        }
        self.set(table, index.checked_sub(1))
    }

    /// Moves to the next entry; at the end, returns false and is nowhere.
    #[inline]
    pub fn next(&mut self, table: &Recovered) -> bool {
        let index = self.at;
        self.set(table, (index != 0).then_some(index))
    }

    /// Moves to the previous entry; at the start, returns false and is nowhere.
    #[inline]
    pub fn prev(&mut self, table: &Recovered) -> bool {
        let index = self.at.checked_sub(2);
        self.set(table, index)
    }

    /// The current internal key; empty when nowhere.
    #[inline]
    pub fn key<'a>(&self, table: &'a Recovered) -> &'a [u8] {
        match self.entry(table) {
            Some(entry) => table.key(entry.offset),
            None => &[],
        }
    }

    /// The range of the current value in [`Recovered::bytes`].
    #[inline]
    pub fn value_range(&self, table: &Recovered) -> Range<usize> {
        match self.entry(table) {
            Some(entry) => table.parts(entry.offset).value,
            None => 0..0,
        }
    }

    #[inline]
    fn entry<'a>(&self, table: &'a Recovered) -> Option<&'a Entry> {
        table.entries.get(self.at.checked_sub(1)?)
    }
}

fn seek_index(table: &Recovered, key: &[u8]) -> usize {
    let (user_key, trailer) = key.split_last_chunk::<8>().unwrap_or((key, &[0; 8]));
    table.lower_bound(user_key, u64::from_le_bytes(*trailer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rocksfmt::{put_internal_key, unpack};

    fn put<'a>(key: &'a [u8], value: &'a [u8]) -> Op<'a> {
        Op::Put { cf: 0, key, value }
    }

    fn internal(user_key: &[u8], packed: u64) -> Vec<u8> {
        let mut key = Vec::new();
        put_internal_key(&mut key, user_key, packed);
        key
    }

    fn value<'a>(table: &'a Recovered, key: &[u8], sequence: u64) -> Option<(u8, &'a [u8])> {
        let (packed, range) = table.get(key, sequence)?;
        Some((unpack(packed).1, &table.bytes()[range]))
    }

    #[test]
    fn every_operation_is_kept_with_its_type() {
        let mut b = RecoveredBuilder::new(Comparator::Bytewise);
        let ops = [
            put(b"a", b"1"),
            Op::Delete { cf: 0, key: b"b" },
            Op::SingleDelete { cf: 0, key: b"c" },
            Op::Merge { cf: 0, key: b"d", operand: b"+" },
            Op::BlobIndex { cf: 0, key: b"e", index: b"ref" },
            Op::Entity { cf: 0, key: b"f", columns: b"cols" },
            Op::TimedPut { cf: 0, key: b"g", value: b"v", write_time: 0x0102 },
            Op::DeleteRange { cf: 0, begin: b"h", end: b"k" },
            Op::LogData(b"note"),
            Op::Noop,
        ];
        assert!(b.is_empty());
        for (i, op) in ops.iter().enumerate() {
            b.apply(10 + i as u64, op).unwrap();
        }
        let t = b.freeze().finish();
        assert_eq!(t.len(), 7);
        let want: [(&[u8], u8, &[u8]); 7] = [
            (b"a", 0x01, b"1"),
            (b"b", 0x00, b""),
            (b"c", 0x07, b""),
            (b"d", 0x02, b"+"),
            (b"e", 0x11, b"ref"),
            (b"f", 0x16, b"cols"),
            (b"g", 0x01, b"v"),
        ];
        for (key, kind, bytes) in want {
            assert_eq!(value(&t, key, 99), Some((kind, bytes)));
        }
        assert_eq!(t.tombstones().max_sequence(b"i", 99), 17);
        assert_eq!(t.tombstones().max_sequence(b"i", 16), 0);
        assert_eq!(t.tombstones().max_sequence(b"k", 99), 0);
        assert_eq!(t.tombstones().len(), 1);
    }

    #[test]
    fn the_newest_visible_version_is_found() {
        let mut b = RecoveredBuilder::new(Comparator::Bytewise);
        for (sequence, bytes) in [(5, b"five"), (9, b"nine"), (7, b"even")] {
            b.apply(sequence, &put(b"key", bytes)).unwrap();
        }
        let t = b.freeze().finish();
        assert_eq!(value(&t, b"key", 4), None);
        assert_eq!(value(&t, b"key", 5), Some((1, &b"five"[..])));
        assert_eq!(value(&t, b"key", 8), Some((1, &b"even"[..])));
        assert_eq!(value(&t, b"key", 99), Some((1, &b"nine"[..])));
        assert_eq!(value(&t, b"kex", 99), None);
        assert_eq!(value(&t, b"ke", 99), None);
        assert_eq!(value(&t, b"key0", 99), None);
    }

    #[test]
    fn an_empty_memtable_has_nothing() {
        let b = RecoveredBuilder::new(Comparator::Bytewise);
        assert!(b.is_empty());
        let t = b.freeze().finish();
        let mut c = RecoveredCursor::new();
        assert_eq!((t.len(), t.get(b"", 9), t.tombstones().len()), (0, None, 0));
        assert!(!c.seek_to_first(&t) && !c.seek_to_last(&t) && !c.seek(&t, &internal(b"a", 0)));
        assert!(!c.seek_for_prev(&t, &internal(b"a", 0)) && !c.next(&t) && !c.prev(&t));
        assert_eq!((c.key(&t), c.value_range(&t)), (&b""[..], 0..0));
    }

    #[test]
    fn an_empty_range_is_nothing() {
        let mut b = RecoveredBuilder::new(Comparator::Bytewise);
        for (begin, end) in [(b"a", b"a"), (b"b", b"a")] {
            b.apply(9, &Op::DeleteRange { cf: 0, begin, end }).unwrap();
        }
        assert!(b.is_empty());
    }

    #[test]
    fn a_range_tombstone_alone_is_something() {
        let mut b = RecoveredBuilder::new(Comparator::Bytewise);
        b.apply(3, &Op::DeleteRange { cf: 0, begin: b"a", end: b"b" }).unwrap();
        assert!(!b.is_empty());
    }

    /// Sorted by hand like a table.
    type Model = Vec<(Vec<u8>, Vec<u8>)>;

    fn model_and_table(keys: &[(Vec<u8>, bool)], comparator: Comparator) -> (Model, Recovered) {
        let mut b = RecoveredBuilder::new(comparator);
        let mut model = Model::new();
        for (i, (key, delete)) in keys.iter().enumerate() {
            let sequence = i as u64 + 1;
            let bytes = format!("value {i}").into_bytes();
            if *delete {
                b.apply(sequence, &Op::Delete { cf: 0, key }).unwrap();
                model.push((internal(key, pack(sequence, 0)), Vec::new()));
            } else {
                b.apply(sequence, &put(key, &bytes)).unwrap();
                model.push((internal(key, pack(sequence, 1)), bytes));
            }
        }
        model.sort_by(|a, b| comparator.cmp_internal(&a.0, &b.0));
        (model, b.freeze().finish())
    }

    fn keys() -> impl Strategy<Value = Vec<(Vec<u8>, bool)>> {
        // Few letters and a common stem, for equal keys, prefixes of keys and equal eight-byte
        // prefixes.
        let key = proptest::collection::vec(prop_oneof![Just(0u8), Just(1), Just(0xff)], 0..12);
        let stem = proptest::collection::vec(any::<u8>(), 0..4);
        (stem, proptest::collection::vec((key, any::<bool>()), 0..60)).prop_map(|(stem, keys)| {
            let whole = |(key, delete): (Vec<u8>, bool)| ([&stem[..], &key].concat(), delete);
            keys.into_iter().map(whole).collect()
        })
    }

    proptest! {
        #[test]
        fn lookups_and_cursors_agree_with_a_sorted_list(
            keys in keys(),
            probes in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..3), 0u64..70), 1..20),
            reverse: bool,
        ) {
            let comparator =
                if reverse { Comparator::ReverseBytewise } else { Comparator::Bytewise };
            let (model, t) = model_and_table(&keys, comparator);
            prop_assert_eq!(t.len(), model.len());

            let mut c = RecoveredCursor::new();
            let mut more = c.seek_to_first(&t);
            for (key, bytes) in &model {
                prop_assert!(more);
                prop_assert_eq!(c.key(&t), &key[..]);
                prop_assert_eq!(&t.bytes()[c.value_range(&t)], &bytes[..]);
                more = c.next(&t);
            }
            prop_assert!(!more && !c.valid());
            let mut more = c.seek_to_last(&t);
            for (key, _) in model.iter().rev() {
                prop_assert!(more);
                prop_assert_eq!(c.key(&t), &key[..]);
                more = c.prev(&t);
            }
            prop_assert!(!more && !c.valid());

            let own = keys.iter().map(|(key, _)| (key.clone(), 30));
            for (user, sequence) in probes.into_iter().chain(own) {
                let seek = internal(&user, pack(sequence, SEEK_TYPE));
                let at = model.partition_point(|(key, _)| comparator.cmp_internal(key, &seek).is_lt());
                prop_assert_eq!(c.seek(&t, &seek), at < model.len());
                if let Some((key, _)) = model.get(at) {
                    prop_assert_eq!(c.key(&t), &key[..]);
                }
                prop_assert_eq!(c.seek_for_prev(&t, &seek), at > 0);
                if at > 0 {
                    prop_assert_eq!(c.key(&t), &model[at - 1].0[..]);
                }
                let want = model.get(at).filter(|(key, _)| key[..key.len() - 8] == user[..]);
                let got = t.get(&user, sequence).map(|(packed, range)| {
                    (internal(&user, packed), t.bytes()[range].to_vec())
                });
                prop_assert_eq!(got.as_ref(), want);
            }
            for (key, _) in &model {
                prop_assert!(c.seek(&t, key));
                prop_assert_eq!(c.key(&t), &key[..]);
                prop_assert!(c.seek_for_prev(&t, key));
                prop_assert_eq!(c.key(&t), &key[..]);
            }
        }
    }
}
