//! A version: the tables and memtables of a database at one moment, shared by all cores. It never
//! changes once it is published.

use std::sync::Arc;

use fs::SharedFile;
use rocksfmt::{Comparator, FileMeta, KEY_TRAILER_BYTES, Properties, RangeTombstones};

use crate::compaction_filter::CompactionFilter;
use crate::error::{Error, Kind, Result};
use crate::family_list::FamilyList;
use crate::family_options::FamilyOptions;
use crate::level_keys::LevelKeys;
use crate::mem::Mem;
use crate::merge_operator::FamilyMerge;
use crate::slots::Slots;
use crate::table::Table;
use crate::table_options::TableOptions;

/// One level: the slots of its tables, and their largest keys side by side for searching.
#[derive(Clone, Default)]
pub(crate) struct Level {
    /// Slots into [`Version::tables`]. Level 0: newest first. Others: by smallest key.
    pub slots: Vec<u32>,
    /// The largest internal keys.
    largest: LevelKeys,
    bytes: u64,
    compensated_bytes: u64,
    /// See [`Slot::blob_bytes`] and [`Slot::large_bytes`].
    pub blob_bytes: u64,
    pub large_bytes: u64,
    /// The largest sequence of its tables, or of tables that it had.
    largest_sequence: u64,
    /// Those of `slots` whose tables have range tombstones.
    covering: Arc<Vec<u32>>,
    /// Those of `slots` that are dense: see [`Slot::is_dense`].
    dense: Arc<Vec<u32>>,
}

impl Level {
    /// A level of tables that are in order.
    pub fn of(tables: Vec<u32>, slots: &Slots) -> Arc<Level> {
        let mut level = Level::default();
        let (mut covering, mut dense) = (Vec::new(), Vec::new());
        for slot in tables {
            let table = &slots[slot as usize];
            level.push(slot, table);
            covering.extend(table.range_tombstones().map(|_| slot));
            dense.extend(table.is_dense().then_some(slot));
        }
        (level.covering, level.dense) = (Arc::new(covering), Arc::new(dense));
        Arc::new(level)
    }

    fn push(&mut self, at: u32, slot: &Slot) {
        self.slots.push(at);
        self.largest.push(&slot.meta().largest);
        self.bytes += slot.meta().size_bytes;
        self.compensated_bytes += slot.compensated_bytes();
        self.blob_bytes += slot.blob_bytes();
        self.large_bytes += slot.large_bytes();
        self.largest_sequence = self.largest_sequence.max(slot.meta().largest_sequence);
    }

    /// This sorted level with tables removed and others added, which do not overlap the rest.
    /// Looks only at these, and copies little more than the list of slots.
    pub fn edited(
        &self,
        slots: &Slots,
        comparator: Comparator,
        removed: &[u32],
        added: &[u32],
    ) -> Arc<Level> {
        let meta = |slot: u32| slots[slot as usize].meta();
        let gone = removed.iter().map(|&slot| (self.find(comparator, &meta(slot).largest), None));
        let mut new = added.to_vec();
        new.sort_by(|&a, &b| comparator.cmp_internal(&meta(a).smallest, &meta(b).smallest));
        let new = new.iter().map(|&slot| (self.find(comparator, &meta(slot).smallest), Some(slot)));
        let mut edits: Vec<(usize, Option<u32>)> = new.chain(gone).collect();
        // A new table comes before the removed one at its place.
        edits.sort_by_key(|&(at, new)| (at, new.is_none()));
        let mut level = Level::default();
        level.slots.reserve(self.slots.len() + added.len());
        let mut at = 0;
        for (to, new) in edits {
            level.copy(self, at, to);
            at = at.max(to);
            match new {
                Some(slot) => level.push(slot, &slots[slot as usize]),
                None => at = to + 1,
            }
        }
        level.copy(self, at, self.slots.len());
        let of = |slots_of: &[u32], bytes: fn(&Slot) -> u64| -> u64 {
            slots_of.iter().map(|&slot| bytes(&slots[slot as usize])).sum()
        };
        let sum = |before: u64, bytes| before + of(added, bytes) - of(removed, bytes);
        level.bytes = sum(self.bytes, |slot| slot.meta().size_bytes);
        level.compensated_bytes = sum(self.compensated_bytes, Slot::compensated_bytes);
        level.blob_bytes = sum(self.blob_bytes, Slot::blob_bytes);
        level.large_bytes = sum(self.large_bytes, Slot::large_bytes);
        level.largest_sequence = level.largest_sequence.max(self.largest_sequence);
        let edited = |these: &Arc<Vec<u32>>, belongs: fn(&Slot) -> bool| {
            Level::edited_part(these, belongs, slots, comparator, (removed, added))
        };
        level.covering = edited(&self.covering, |slot| slot.range_tombstones().is_some());
        level.dense = edited(&self.dense, Slot::is_dense);
        Arc::new(level)
    }

    /// Those of a level's slots that belong to a part of it, after some were removed and added.
    fn edited_part(
        part: &Arc<Vec<u32>>,
        belongs: fn(&Slot) -> bool,
        slots: &Slots,
        comparator: Comparator,
        (removed, added): (&[u32], &[u32]),
    ) -> Arc<Vec<u32>> {
        let is_in = |slot: &&u32| belongs(&slots[**slot as usize]);
        if !removed.iter().chain(added).any(|slot| is_in(&slot)) {
            return part.clone();
        }
        let left = part.iter().filter(|slot| !removed.contains(slot));
        let mut all: Vec<u32> = left.chain(added.iter().filter(is_in)).copied().collect();
        let smallest = |slot: u32| &slots[slot as usize].meta().smallest;
        all.sort_by(|&a, &b| comparator.cmp_internal(smallest(a), smallest(b)));
        Arc::new(all)
    }

    /// Appends the tables of another level from one index to before another.
    fn copy(&mut self, other: &Level, from: usize, to: usize) {
        if from >= to {
            return;
        }
        self.slots.extend_from_slice(&other.slots[from..to]);
        self.largest.append(&other.largest, from, to);
    }

    /// Bytes of its tables.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// See [`Slot::compensated_bytes`].
    pub fn compensated_bytes(&self) -> u64 {
        self.compensated_bytes
    }

    /// The largest sequence of its tables, or more.
    pub fn largest_sequence(&self) -> u64 {
        self.largest_sequence
    }

    /// The slots of its tables that have range tombstones, in the order of the level.
    pub fn covering(&self) -> &Arc<Vec<u32>> {
        &self.covering
    }

    /// The slots of its dense tables, in the order of the level: see [`Slot::is_dense`].
    pub fn dense(&self) -> &[u32] {
        &self.dense
    }

    /// The index of the first table of a sorted level that does not end before `seek`.
    pub fn find(&self, comparator: Comparator, seek: &[u8]) -> usize {
        self.largest.find(comparator, seek)
    }
}

/// An open blob file.
pub(crate) struct BlobFile {
    pub file: Arc<SharedFile>,
}

/// A column family in a version.
#[derive(Clone)]
pub(crate) struct Family {
    pub id: u32,
    pub name: String,
    pub comparator_name: String,
    pub comparator: Comparator,
    /// Why it cannot be read, if it cannot.
    pub refused: Option<Error>,
    /// Writes that are in no table yet, the newest first.
    pub mems: Vec<Arc<Mem>>,
    pub levels: Vec<Arc<Level>>,
    /// What shapes its levels.
    pub options: Arc<FamilyOptions>,
    /// Open blob files by number, sorted.
    pub blobs: Vec<(u64, Arc<BlobFile>)>,
    pub merge: FamilyMerge,
    /// Changes values when tables are merged.
    pub filter: Option<Arc<dyn CompactionFilter>>,
    /// How its tables are written.
    pub table_options: Arc<TableOptions>,
}

/// The fewest tombstones of a dense table.
const DENSE_MIN: u64 = 4096;

/// A file of a version: open, or known to be damaged.
#[derive(Clone)]
pub(crate) enum Slot {
    Open(Arc<Table>),
    /// It could not be opened. Reads that need it get this error; the rest stays readable.
    Broken {
        meta: Box<FileMeta>,
        error: Error,
    },
    /// Unused: no level names it.
    Free,
}

impl Slot {
    /// The MANIFEST's record of the file.
    #[inline]
    pub fn meta(&self) -> &FileMeta {
        match self {
            Slot::Open(table) => &table.meta,
            Slot::Broken { meta, .. } => meta,
            Slot::Free => unreachable!("no level names a free slot"),
        }
    }

    /// The range tombstones of the file, if it has any and can be read.
    pub fn range_tombstones(&self) -> Option<&RangeTombstones> {
        match self {
            Slot::Open(table) => table.range_tombstones.as_ref(),
            Slot::Broken { .. } | Slot::Free => None,
        }
    }

    /// Whether at least half of many entries are tombstones of single keys: a scan passes all of
    /// them.
    pub fn is_dense(&self) -> bool {
        match self {
            Slot::Open(table) => {
                let Properties { num_entries, .. } = table.properties;
                let deletions = table.deletions();
                deletions >= DENSE_MIN && deletions >= num_entries / 2
            }
            Slot::Broken { .. } | Slot::Free => false,
        }
    }

    /// Bytes of the values in blob files that the table refers to.
    pub fn blob_bytes(&self) -> u64 {
        match self {
            Slot::Open(table) => table.properties.blob_bytes.min(SAID_MAX),
            Slot::Broken { .. } | Slot::Free => 0,
        }
    }

    /// Bytes of the values in the table, if these are so large that newer ones of the same keys may
    /// be in blob files.
    fn large_bytes(&self) -> u64 {
        let Slot::Open(table) = self else { return 0 };
        let all = &table.properties;
        let references = all.blob_values.saturating_mul(REFERENCE_BYTES);
        let bytes = all.raw_value_size.saturating_sub(references);
        let values = all.num_entries.saturating_sub(all.num_deletions);
        let values = values.saturating_sub(all.blob_values);
        if bytes >= values.saturating_mul(LARGE) { bytes.min(SAID_MAX) } else { 0 }
    }

    /// Bytes of the file, more if it is full of tombstones: merging it frees more than itself.
    pub fn compensated_bytes(&self) -> u64 {
        let table = match self {
            Slot::Open(table) => table,
            Slot::Broken { meta, .. } => return meta.size_bytes,
            // A family was cleared while its files were merged.
            Slot::Free => return 0,
        };
        let bytes = table.meta.size_bytes;
        let Properties { num_entries, num_deletions, raw_value_size, .. } = table.properties;
        let excess = num_deletions.saturating_mul(2).saturating_sub(num_entries);
        let values = num_entries.saturating_sub(num_deletions).max(1);
        let value = raw_value_size / values;
        bytes.saturating_add(excess.saturating_mul(value.max(1)).saturating_mul(2).min(bytes * 8))
    }
}

/// The database at one moment.
#[derive(Clone)]
pub(crate) struct Version {
    pub families: FamilyList,
    pub slots: Slots,
    /// The number of versions before it since the opening.
    pub epoch: u64,
}

impl Version {
    /// An open table.
    #[inline]
    pub fn table(&self, slot: u32) -> Result<&Table> {
        match &self.slots[slot as usize] {
            Slot::Open(table) => Ok(table),
            Slot::Broken { error, .. } => Err(error.clone()),
            Slot::Free => unreachable!("no level names a free slot"),
        }
    }

    /// Puts a table into a free slot.
    pub fn put(&mut self, table: Table) -> u32 {
        self.slots.put(Slot::Open(Arc::new(table)))
    }

    /// Adds tables to a level: in level 0 as the newest, below it where they do not overlap others.
    pub fn add_tables(&mut self, id: u32, level: usize, tables: impl IntoIterator<Item = Table>) {
        let new: Vec<u32> = tables.into_iter().map(|table| self.put(table)).collect();
        let slots = &self.slots;
        let Some(family) = self.families.find_mut(id) else { return };
        family.levels.resize_with(family.levels.len().max(level + 1), Arc::default);
        let there = &family.levels[level];
        family.levels[level] = match level {
            0 => Level::of(new.into_iter().chain(there.slots.iter().copied()).collect(), slots),
            _ => there.edited(slots, family.comparator, &[], &new),
        };
    }

    /// The MANIFEST's record of a file.
    #[inline]
    pub fn meta(&self, slot: u32) -> &FileMeta {
        self.slots[slot as usize].meta()
    }

    /// See [`Slot::compensated_bytes`].
    pub fn compensated_bytes(&self, slot: u32) -> u64 {
        self.slots[slot as usize].compensated_bytes()
    }

    /// When the oldest data of a file was written, and when the file was, in Unix seconds; 0 if
    /// unknown. The MANIFEST of an old RocksDB does not say.
    pub fn times(&self, slot: u32) -> (u64, u64) {
        let (data, file) = match &self.slots[slot as usize] {
            Slot::Open(table) => {
                (table.properties.creation_time, table.properties.file_creation_time)
            }
            Slot::Broken { .. } | Slot::Free => (0, 0),
        };
        let known = |time: u64, property: u64| if time > 0 { time } else { property };
        let meta = self.meta(slot);
        (known(meta.oldest_ancestor_time, data), known(meta.creation_time, file))
    }

    /// Bytes of a file's keys and values.
    pub fn entry_bytes(&self, slot: u32) -> u64 {
        match &self.slots[slot as usize] {
            Slot::Open(table) => {
                let Properties { raw_key_size, raw_value_size, .. } = table.properties;
                raw_key_size.saturating_add(raw_value_size)
            }
            Slot::Broken { .. } | Slot::Free => 0,
        }
    }

    /// The range tombstones of a file, if it has any and can be read.
    pub fn tombstones(&self, slot: u32) -> Option<&RangeTombstones> {
        self.slots[slot as usize].range_tombstones()
    }

    /// The family with this id, if it can be read.
    #[inline]
    pub fn family(&self, id: u32) -> Result<&Family> {
        match self.families.first() {
            Some(first) if first.id == id && first.refused.is_none() => Ok(first),
            _ => self.family_slow(id),
        }
    }

    fn family_slow(&self, id: u32) -> Result<&Family> {
        let family = self.families.find(id).ok_or_else(|| {
            Error::new(Kind::UnknownColumnFamily, format!("no column family with id {id}"))
        })?;
        match &family.refused {
            Some(error) => Err(error.clone()),
            None => Ok(family),
        }
    }
}

impl Family {
    /// The deepest level with tables, which is not level 0, and its index.
    pub fn last_level(&self) -> Option<(usize, &Level)> {
        let sorted = self.levels.iter().enumerate().skip(1).rev();
        let mut with_tables = sorted.filter(|(_, level)| !level.slots.is_empty());
        with_tables.next().map(|(at, level)| (at, &**level))
    }

    /// Bytes of values in blob files to which the levels between level 0 and the last one refer.
    pub fn blob_bytes_above_last(&self) -> u64 {
        let last = self.last_level().map_or(1, |(at, _)| at);
        self.levels.iter().take(last).skip(1).map(|level| level.blob_bytes).sum()
    }

    /// Bytes of values in the tables of the last level that are replaced by values in blob files,
    /// of which a level with `blob_bytes` knows.
    pub fn replaced_bytes(&self, blob_bytes: u64) -> u64 {
        let last = self.last_level().filter(|(_, last)| last.large_bytes > 0);
        let Some((_, last)) = last else { return 0 };
        let part = last.large_bytes as f64 / (last.large_bytes as f64 + last.blob_bytes as f64);
        ((blob_bytes as f64 * part) as u64).min(last.large_bytes)
    }

    /// The index of a slot in a level, if the level has it.
    pub fn place_of(&self, version: &Version, level: usize, slot: u32) -> Option<usize> {
        let files = self.levels.get(level)?;
        if level == 0 {
            return files.slots.iter().position(|&other| other == slot);
        }
        let at = match version.slots.get(slot as usize)? {
            Slot::Free => return None,
            used => files.find(self.comparator, &used.meta().largest),
        };
        (files.slots.get(at) == Some(&slot)).then_some(at)
    }

    /// Bytes of memory that a seek of an iterator takes, about: a block of each sorted run, as
    /// stored and unpacked.
    pub fn seek_bytes(&self, version: &Version) -> usize {
        let of_table = |&slot: &u32| {
            let properties = &version.table(slot).ok()?.properties;
            let raw = properties.raw_key_size.saturating_add(properties.raw_value_size);
            let bytes = properties.data_size.saturating_add(raw);
            let each = bytes.checked_div(properties.num_data_blocks).unwrap_or(BLOCK_BYTES_USUAL);
            usize::try_from(each).ok()
        };
        let runs = self.levels.iter().enumerate().flat_map(|(depth, level)| {
            let tables = if depth == 0 { level.slots.len() } else { 1 };
            level.slots.iter().take(tables)
        });
        runs.filter_map(of_table).fold(0, usize::saturating_add)
    }

    /// An estimate of the live keys: the tables' counts of entries, less their tombstones.
    pub fn estimated_keys(&self, version: &Version) -> u64 {
        let tables = self.levels.iter().flat_map(|level| &level.slots);
        let mut keys = 0u64;
        let mut gone = 0u64;
        for &slot in tables {
            let Ok(table) = version.table(slot) else { continue };
            let properties = &table.properties;
            keys = keys.saturating_add(
                properties.num_entries.saturating_sub(properties.num_range_deletions),
            );
            gone = gone.saturating_add(
                properties.num_deletions.saturating_sub(properties.num_range_deletions),
            );
        }
        let in_memory: usize = self.mems.iter().map(|mem| mem.len()).sum();
        // A tombstone is itself an entry and usually hides another.
        keys.saturating_sub(gone.saturating_mul(2)).saturating_add(in_memory as u64)
    }
}

/// Bytes of a reference to a value in a blob file, about.
const REFERENCE_BYTES: u64 = 11;
/// Values of at least so many bytes may be in blob files.
const LARGE: u64 = 256;
/// What a table says of its values counts up to this, so that sums do not overflow.
const SAID_MAX: u64 = 1 << 44;

/// Bytes of a block, stored and unpacked, of a table that does not state its number of blocks.
const BLOCK_BYTES_USUAL: u64 = 8 << 10;

/// The user key of an internal key of the MANIFEST, which was checked to be long enough.
pub(crate) fn user_key(internal: &[u8]) -> &[u8] {
    &internal[..internal.len().saturating_sub(KEY_TRAILER_BYTES)]
}

#[cfg(test)]
mod tests {
    use reactor::sim::Rng;

    use super::*;

    /// A level of tables in any order that do not overlap.
    fn sorted(mut tables: Vec<u32>, slots: &Slots, comparator: Comparator) -> Arc<Level> {
        let smallest = |slot: u32| -> &[u8] { &slots[slot as usize].meta().smallest };
        tables.sort_by(|&a, &b| comparator.cmp_internal(smallest(a), smallest(b)));
        Level::of(tables, slots)
    }

    #[test]
    fn an_edited_level_is_the_one_that_is_sorted_anew() {
        let mut rng = Rng::new(7);
        for _ in 0..200 {
            let mut slots = Slots::default();
            let order = Comparator::Bytewise;
            let count = rng.below(30) as u8;
            let mut file = |first: u8, last: u8| {
                let meta = rocksfmt::testing::file_meta(first.into(), &[first], &[last], (9, 1));
                slots
                    .put(Slot::Broken { meta: Box::new(meta), error: Error::new(Kind::Io, "none") })
            };
            let old: Vec<u32> = (0..count).map(|n| file(4 * n, 4 * n + 3)).collect();
            let from = rng.below(u64::from(count) + 1) as u8;
            let to = from + rng.below(u64::from(count - from) + 1) as u8;
            // The removed files become as many, more or fewer.
            let new: Vec<u32> =
                (4 * from..4 * to).filter(|_| rng.coin()).map(|n| file(n, n)).collect();
            let removed = &old[from.into()..to.into()];
            let level = sorted(old.clone(), &slots, order);
            let edited = level.edited(&slots, order, removed, &new);
            let rest = old.iter().copied().filter(|slot| !removed.contains(slot));
            let anew = sorted(rest.chain(new).collect(), &slots, order);
            assert_eq!(edited.slots, anew.slots);
            assert!(edited.largest.iter().eq(anew.largest.iter()));
            assert_eq!(
                (edited.bytes, edited.compensated_bytes, edited.blob_bytes, edited.large_bytes),
                (anew.bytes, anew.compensated_bytes, anew.blob_bytes, anew.large_bytes)
            );
        }
    }

    /// A flush or a merge in a large database: only what it touches is copied.
    #[test]
    fn a_change_of_a_large_version_copies_a_few_slots_and_one_family() {
        let (files, families) = (10_000u32, 1000u32);
        let file = |number: u32| {
            let key = number.to_be_bytes();
            let meta = rocksfmt::testing::file_meta(number.into(), &key, &key, (9, 1));
            Slot::Broken { meta: Box::new(meta), error: Error::new(Kind::Io, "none") }
        };
        let slots = Slots::from((0..files).map(|n| file(3 * n)).collect::<Vec<_>>());
        let family = |id: u32| Family {
            id,
            name: format!("f{id}"),
            comparator_name: String::new(),
            comparator: Comparator::Bytewise,
            refused: None,
            mems: Vec::new(),
            levels: vec![Level::of(Vec::new(), &slots), Level::of(Vec::new(), &slots)],
            options: Arc::default(),
            blobs: Vec::new(),
            merge: FamilyMerge::default(),
            filter: None,
            table_options: Arc::default(),
        };
        let mut version =
            Version { families: (0..families).map(family).collect(), slots, epoch: 0 };
        let all = Level::of((0..files).collect(), &version.slots);
        version.families.find_mut(700).unwrap().levels.push(all);
        let before = version.clone();

        // A merge replaces two files by two others.
        let new: Vec<u32> = [1, 2].map(|n| version.slots.put(file(3 * 5000 + n))).into();
        let Version { families, slots, .. } = &mut version;
        let level = &mut families.find_mut(700).unwrap().levels[2];
        *level = level.edited(slots, Comparator::Bytewise, &[5000, 5001], &new);
        [5000, 5001].iter().for_each(|&slot| version.slots.free(slot));

        let copied = |now: &[Arc<Vec<Slot>>], then: &[Arc<Vec<Slot>>]| {
            now.iter().zip(then).filter(|(now, then)| !Arc::ptr_eq(now, then)).count()
        };
        assert!(copied(version.slots.chunks(), before.slots.chunks()) <= 2);
        let pairs = version.families.iter().zip(before.families.iter());
        let changed: Vec<u32> =
            pairs.filter(|(now, then)| !Arc::ptr_eq(now, then)).map(|(now, _)| now.id).collect();
        assert_eq!(changed, [700]);
        let (now, then) = (&version.families[700].levels, &before.families[700].levels);
        assert!(Arc::ptr_eq(&now[0], &then[0]) && Arc::ptr_eq(&now[1], &then[1]));
        // 40 chunks of 256 keys.
        let (chunks, copied) = now[2].largest.copied(&then[2].largest);
        assert!(chunks >= 40 && copied <= 2, "{copied} of {chunks}");
        assert_eq!((now[2].slots.len(), now[2].slots[5000]), (files as usize, new[0]));
        assert!(version.families.find(1000).is_none() && version.family(999).is_ok());
    }
}
