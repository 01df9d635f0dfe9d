//! Garbage in blob files: values that nothing refers to any more, as RocksDB counts them.
//!
//! For each blob file, a merge counts the references in its inputs and in its outputs: their
//! number, and the bytes of their records. The difference is garbage. It goes into the MANIFEST's
//! record that replaces the old tables by the new ones. RocksDB drops a blob file that is all
//! garbage.
//!
//! What must hold: the garbage of a file never exceeds the file's values, and is not all of them
//! while a table is linked to the file. RocksDB 7.8 does not open a database that breaks this, and
//! 9.8 opens it *empty* and deletes its files. So the garbage is checked against the MANIFEST's
//! state. Rather too little is recorded than too much: then the file only lives longer.

use std::collections::{BTreeMap, BTreeSet};

use rocksfmt::{
    BLOB_RECORD_HEADER_BYTES, BlobGarbage, BlobIndex, KEY_TRAILER_BYTES, ManifestReplay, ValueType,
    VersionEdit, blob_columns,
};

/// References to one blob file: those in inputs minus those in outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Balance {
    count: i64,
    bytes: i64,
}

/// Whether the tables that are linked to a blob file refer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Links {
    True,
    /// One may be an anchor (`blob_anchor.rs`).
    MayBeFalse,
}

/// Counts the references of a merge, by blob file.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlobMeter(BTreeMap<u64, Balance>);

impl BlobMeter {
    /// Counts an entry of an input, by its internal key.
    #[inline]
    pub fn comes_in(&mut self, key: &[u8], value: &[u8]) {
        self.count(key, value, 1);
    }

    /// Counts an entry of an output.
    #[inline]
    pub fn goes_out(&mut self, key: &[u8], value: &[u8]) {
        self.count(key, value, -1);
    }

    /// Adds the counts of another part of the merge.
    pub fn append(&mut self, other: BlobMeter) {
        for (number, theirs) in other.0 {
            let balance = self.0.entry(number).or_default();
            balance.count += theirs.count;
            balance.bytes = balance.bytes.saturating_add(theirs.bytes);
        }
    }

    #[inline]
    fn count(&mut self, key: &[u8], value: &[u8], one: i64) {
        let kind = key.len().checked_sub(KEY_TRAILER_BYTES).map(|at| key[at]);
        // A value that does not parse is copied, or refused by the table writer.
        if kind == Some(ValueType::BlobIndex as u8)
            && let Ok(index) = BlobIndex::parse(value)
        {
            self.count_reference(key.len() - KEY_TRAILER_BYTES, &index, one);
        } else if kind == Some(ValueType::WideColumnEntity as u8)
            && let Ok(columns) = blob_columns(value)
        {
            for index in columns {
                self.count_reference(key.len() - KEY_TRAILER_BYTES, &index, one);
            }
        }
    }

    #[cold]
    fn count_reference(&mut self, key_bytes: usize, index: &BlobIndex, one: i64) {
        let bytes = (BLOB_RECORD_HEADER_BYTES + key_bytes) as u64;
        let bytes = i64::try_from(bytes.saturating_add(index.size)).unwrap_or(i64::MAX);
        let balance = self.0.entry(index.file_number).or_default();
        balance.count += one;
        balance.bytes = balance.bytes.saturating_add(bytes.saturating_mul(one));
    }

    /// The garbage of a change of a column family, which removes and adds tables as `edit` says.
    /// `state` is the MANIFEST's state before it.
    pub fn garbage(&self, state: &ManifestReplay, edit: &VersionEdit) -> Vec<BlobGarbage> {
        if self.0.values().all(|balance| balance.count <= 0) {
            return Vec::new();
        }
        let positive = |number: i64| u64::try_from(number).unwrap_or(0);
        let garbage = self.0.iter().map(|(&number, balance)| BlobGarbage {
            number,
            count: positive(balance.count),
            bytes: positive(balance.bytes),
        });
        at_most(state, edit, garbage)
    }
}

/// The garbage that the unused part of a blob file becomes which was registered with upper bounds
/// ([`rocksfmt::BlobFileMeta::reserved`]) and ends with `count` values of `bytes`.
///
/// If a table may be linked to the file that does not refer to it, one value that was never there
/// stays alive. RocksDB would else find a linked file of which all is garbage when it drops the
/// last reference, which is corruption to it.
pub(crate) fn unused(
    state: &ManifestReplay,
    family: u32,
    number: u64,
    (count, bytes): (u64, u64),
    links: Links,
) -> Option<BlobGarbage> {
    let live = state.live_blob_files(family);
    let blob = live.iter().find(|blob| blob.number == number && blob.is_reserved())?;
    let spare = u64::from(links == Links::MayBeFalse);
    let count = blob.total_count.saturating_sub(count).saturating_sub(spare);
    let bytes = blob.total_bytes.saturating_sub(bytes);
    let edit = VersionEdit { column_family: family, ..VersionEdit::default() };
    at_most(state, &edit, [BlobGarbage { number, count, bytes }]).pop()
}

/// Garbage as far as blob files have live values, but not all of a file's while a table is linked
/// to it after the change `edit`. `state` is the MANIFEST's state before it.
pub(crate) fn at_most(
    state: &ManifestReplay,
    edit: &VersionEdit,
    garbage: impl IntoIterator<Item = BlobGarbage>,
) -> Vec<BlobGarbage> {
    let gone: BTreeSet<u64> = edit.deleted_files.iter().map(|&(_, gone)| gone).collect();
    let new: BTreeSet<u64> = edit.new_files.iter().map(|(_, file)| file.oldest_blob_file).collect();
    let is_linked = |number| {
        let mut old = state.linked_files(edit.column_family, number);
        new.contains(&number) || old.any(|(_, file)| !gone.contains(&file.number))
    };
    let live = state.live_blob_files(edit.column_family);
    let left = live.into_iter().map(|blob| {
        let count = blob.total_count.saturating_sub(blob.garbage_count);
        (blob.number, (count, blob.total_bytes.saturating_sub(blob.garbage_bytes)))
    });
    let left: BTreeMap<u64, (u64, u64)> = left.collect();
    let mut limited = Vec::new();
    for BlobGarbage { number, count, bytes } in garbage {
        let Some(&(left, left_bytes)) = left.get(&number) else { continue };
        if count > left {
            tracing::warn!(
                "{number:06}.blob: {count} of its values became garbage, but only {left} were alive"
            );
        }
        let count = count.min(left.saturating_sub(u64::from(is_linked(number))));
        if count > 0 {
            limited.push(BlobGarbage { number, count, bytes: bytes.min(left_bytes) });
        }
    }
    limited
}

/// All live values in the blob files of a column family: garbage when all of its tables are
/// removed.
pub(crate) fn all_alive(state: &ManifestReplay, family: u32) -> Vec<BlobGarbage> {
    let alive = state.live_blob_files(family).into_iter().map(|blob| BlobGarbage {
        number: blob.number,
        count: blob.total_count.saturating_sub(blob.garbage_count),
        bytes: blob.total_bytes.saturating_sub(blob.garbage_bytes),
    });
    alive.filter(|garbage| garbage.count > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocksfmt::testing::{EditBuilder, file_meta};
    use rocksfmt::{pack, put_internal_key};

    /// Ten values in file 9, four of them garbage, and two tables that are linked to it.
    fn state() -> ManifestReplay {
        let mut replay = ManifestReplay::new();
        let mut first = file_meta(7, b"a", b"c", (1, 2));
        first.oldest_blob_file = 9;
        let mut second = file_meta(8, b"d", b"f", (3, 4));
        second.oldest_blob_file = 9;
        let edit = EditBuilder::new()
            .required(4, 50, 100)
            .numbers(400, &[9, 10, 1000, 0, 0, 0])
            .numbers(401, &[9, 4, 400, 0])
            .add_file(0, &first)
            .add_file(0, &second);
        replay.record(&edit.finish()).unwrap();
        replay
    }

    fn entry(kind: ValueType, user_key: &[u8]) -> Vec<u8> {
        let mut key = Vec::new();
        put_internal_key(&mut key, user_key, pack(5, kind as u8));
        key
    }

    fn dropped(count: usize) -> BlobMeter {
        let mut meter = BlobMeter::default();
        let index = [1, 9, 100, 60, 0];
        for _ in 0..count + 2 {
            meter.comes_in(&entry(ValueType::BlobIndex, b"keys"), &index);
        }
        meter.comes_in(&entry(ValueType::Value, b"keys"), &index);
        for _ in 0..2 {
            meter.goes_out(&entry(ValueType::BlobIndex, b"keys"), &index);
        }
        meter
    }

    fn edit(deleted: &[u64], linked: u64) -> VersionEdit {
        let mut file = file_meta(20, b"a", b"f", (1, 4));
        file.oldest_blob_file = linked;
        VersionEdit {
            deleted_files: deleted.iter().map(|&number| (0, number)).collect(),
            new_files: vec![(1, file)],
            ..VersionEdit::default()
        }
    }

    #[test]
    fn values_in_inputs_that_are_not_in_outputs_are_garbage() {
        let garbage = dropped(2).garbage(&state(), &edit(&[7, 8], 9));
        assert_eq!(garbage, [BlobGarbage { number: 9, count: 2, bytes: 2 * (32 + 4 + 60) }]);
        assert!(dropped(0).garbage(&state(), &edit(&[7, 8], 9)).is_empty());
    }

    #[test]
    fn a_file_is_all_garbage_only_when_no_table_is_linked_to_it() {
        let count = |deleted: &[u64], linked, dies| {
            dropped(dies).garbage(&state(), &edit(deleted, linked))[0].count
        };
        assert_eq!(count(&[7, 8], 0, 6), 6);
        assert_eq!(count(&[7, 8], 0, 7), 6);
        assert_eq!(count(&[7, 8], 9, 6), 5);
        assert_eq!(count(&[7], 0, 6), 5);
        // The bytes do not exceed those of the file either.
        let mut replay = state();
        let edit = VersionEdit {
            blob_garbage: dropped(6).garbage(&replay, &edit(&[7, 8], 0)),
            ..edit(&[7, 8], 0)
        };
        replay.edit(edit).unwrap();
        assert!(replay.live_blob_files(0).is_empty());
    }

    #[test]
    fn a_family_without_tables_has_no_live_values() {
        let mut replay = state();
        let garbage = all_alive(&replay, 0);
        assert_eq!(garbage, [BlobGarbage { number: 9, count: 6, bytes: 600 }]);
        let deleted_files = vec![(0, 7), (0, 8)];
        let edit = VersionEdit { deleted_files, blob_garbage: garbage, ..VersionEdit::default() };
        replay.edit(edit).unwrap();
        assert!(replay.live_blob_files(0).is_empty());
    }
}
