//! Replays a MANIFEST into the state of a database.
//!
//! 1. [`ManifestReplay::record`] takes the log's records in order, decodes and applies them.
//!    Records of an atomic group are held back until the group is complete.
//! 2. [`ManifestReplay::finish`] checks everything that RocksDB checks when it opens a database,
//!    and more that newer versions of RocksDB should check; it sorts every level for reading and
//!    returns a [`ManifestState`].
//!
//! In a finished state a file number is live once; in level 0 the newest file comes first and no
//! two files of the same age overlap; in every other level files are sorted by smallest key and do
//! not overlap. A column family with an unknown comparator is listed, with its files in order of
//! their numbers; [`ColumnFamily::comparator`] returns the error to show on a read.
//!
//! An atomic group that the end of the log cuts off is dropped, as in RocksDB: its writer never
//! learned that it was written.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};
use crate::key::Comparator;
use crate::manifest::edit::{EditKind, VersionEdit};
use crate::manifest::file_meta::{BlobFileMeta, BlobGarbage, FileMeta};
use crate::manifest::levels::sort_levels;
use crate::manifest::state::{ColumnFamily, ManifestState, link, links, live_blob_files};

/// The id of the column family that always exists. Ids of dropped families are never reused.
const DEFAULT_FAMILY: u32 = 0;

/// A column family during replay.
#[derive(Debug, Default)]
struct Family {
    name: String,
    comparator: Option<String>,
    log_number: u64,
    files: BTreeMap<u64, (u32, FileMeta)>,
    blob_files: BTreeMap<u64, BlobFileMeta>,
    /// By the number of a blob file, the SST files that are linked to it.
    linked: BTreeMap<u64, BTreeSet<u64>>,
    timestamps_persisted: Option<bool>,
    has_low_timestamp: bool,
}

/// SST files in one record of a snapshot. The bound keeps the time to build a record short.
const SNAPSHOT_FILES: usize = 256;

impl Family {
    fn live_blob_files(&self) -> impl Iterator<Item = &BlobFileMeta> {
        live_blob_files(&self.linked, &self.blob_files)
    }

    /// Removes files from levels and adds new ones.
    fn apply_files(&mut self, deleted: Vec<(u32, u64)>, new: Vec<(u32, FileMeta)>) -> Result<()> {
        for (level, number) in deleted {
            match self.files.remove(&number) {
                Some((at, file)) if at == level => self.unlink(&file),
                Some((at, _)) => {
                    return Err(Error::corruption(format!(
                        "file {number} deleted from level {level}, it is in level {at}"
                    )));
                }
                None => {
                    return Err(Error::corruption(format!(
                        "file {number} deleted from level {level}, which does not have it"
                    )));
                }
            }
        }
        for (level, file) in new {
            let number = file.number;
            link(&mut self.linked, &file);
            if let Some((at, _)) = self.files.insert(number, (level, file)) {
                return Err(Error::corruption(format!(
                    "file {number} added to level {level}, it is in level {at} already"
                )));
            }
        }
        Ok(())
    }

    /// Forgets the link of an SST file to a blob file.
    fn unlink(&mut self, file: &FileMeta) {
        if let Some(files) = self.linked.get_mut(&file.oldest_blob_file) {
            files.remove(&file.number);
            if files.is_empty() {
                self.linked.remove(&file.oldest_blob_file);
            }
        }
    }

    /// Adds blob files and counts garbage in them.
    fn apply_blobs(&mut self, new: Vec<BlobFileMeta>, garbage: Vec<BlobGarbage>) -> Result<()> {
        for blob in new {
            let number = blob.number;
            if self.blob_files.insert(number, blob).is_some() {
                return Err(Error::corruption(format!("blob file {number} added twice")));
            }
        }
        for garbage in garbage {
            let number = garbage.number;
            let Some(blob) = self.blob_files.get_mut(&number) else {
                return Err(Error::corruption(format!("garbage of unknown blob file {number}")));
            };
            blob.garbage_count = blob.garbage_count.saturating_add(garbage.count);
            blob.garbage_bytes = blob.garbage_bytes.saturating_add(garbage.bytes);
            if blob.garbage_count > blob.total_count || blob.garbage_bytes > blob.total_bytes {
                return Err(Error::corruption(format!(
                    "blob file {number} has {} values ({} bytes), of which {} ({} bytes) are dead",
                    blob.total_count, blob.total_bytes, blob.garbage_count, blob.garbage_bytes
                )));
            }
        }
        Ok(())
    }

    /// The records that create the family, then its blob files and its SST files.
    fn snapshot(&self, id: u32, keys: Option<u64>) -> impl Iterator<Item = VersionEdit> {
        let default = Comparator::default().name();
        let add = VersionEdit {
            column_family: id,
            column_family_add: (id != DEFAULT_FAMILY).then(|| self.name.clone()),
            comparator: Some(self.comparator.clone().unwrap_or_else(|| default.to_owned())),
            log_number: Some(self.log_number),
            persist_timestamps: self.timestamps_persisted.filter(|persisted| !persisted),
            ..VersionEdit::default()
        };
        let state = VersionEdit {
            column_family: id,
            log_number: Some(self.log_number),
            keys: keys.filter(|_| id == DEFAULT_FAMILY),
            new_blob_files: self.live_blob_files().cloned().collect(),
            ..VersionEdit::default()
        };
        let mut files = self.files.values().cloned();
        let rest = std::iter::from_fn(move || {
            let new_files: Vec<_> = files.by_ref().take(SNAPSHOT_FILES).collect();
            let edit = VersionEdit { column_family: id, new_files, ..VersionEdit::default() };
            (!edit.new_files.is_empty()).then_some(edit)
        });
        [add, state].into_iter().chain(rest)
    }
}

/// Applies records one after another; see the module's text.
#[derive(Debug)]
pub struct ManifestReplay {
    families: BTreeMap<u32, Family>,
    dropped: BTreeSet<u32>,
    /// Records of an incomplete atomic group, and how many are missing.
    group: Vec<VersionEdit>,
    group_remaining: u32,
    log_number_seen: bool,
    next_file_number: Option<u64>,
    last_sequence: Option<u64>,
    min_log_number_to_keep: u64,
    max_column_family: u32,
    db_id: Option<String>,
    keys: Option<u64>,
    wals: BTreeMap<u64, Option<u64>>,
    ours: bool,
}

impl Default for ManifestReplay {
    fn default() -> Self {
        ManifestReplay::new()
    }
}

impl ManifestReplay {
    /// The state of a database without records: an empty default column family.
    pub fn new() -> ManifestReplay {
        let default = Family { name: "default".into(), ..Family::default() };
        ManifestReplay {
            families: BTreeMap::from([(DEFAULT_FAMILY, default)]),
            dropped: BTreeSet::new(),
            group: Vec::new(),
            group_remaining: 0,
            log_number_seen: false,
            next_file_number: None,
            last_sequence: None,
            min_log_number_to_keep: 0,
            max_column_family: 0,
            db_id: None,
            keys: None,
            wals: BTreeMap::new(),
            ours: false,
        }
    }

    /// The replay that led to `state`, to continue from there.
    pub fn resume(state: &ManifestState) -> ManifestReplay {
        let family = |family: &ColumnFamily| Family {
            name: family.name.clone(),
            comparator: Some(family.comparator_name.clone()),
            log_number: family.log_number,
            files: family
                .files()
                .map(|(level, file)| (file.number, (level as u32, file.clone())))
                .collect(),
            blob_files: family.blob_files.clone(),
            linked: links(family.files().map(|(_, file)| file)),
            timestamps_persisted: Some(family.timestamps_persisted),
            has_low_timestamp: family.has_low_timestamp,
        };
        let families = state.column_families.iter();
        ManifestReplay {
            families: families.map(|(&id, state)| (id, family(state))).collect(),
            log_number_seen: true,
            next_file_number: Some(state.next_file_number),
            last_sequence: Some(state.last_sequence),
            min_log_number_to_keep: state.min_log_number_to_keep,
            max_column_family: state.max_column_family,
            db_id: state.db_id.clone(),
            keys: state.keys,
            wals: state.wals.clone(),
            ..ManifestReplay::new()
        }
    }

    /// The records of a new MANIFEST for the same state, without dead blob files and logs. A record
    /// that adds a column family changes no files, because RocksDB would ignore them. What no
    /// MANIFEST may lack is in the last record: so no reader takes a part of them for the whole.
    pub fn snapshot(&self, next_file_number: u64) -> impl Iterator<Item = VersionEdit> {
        let first = VersionEdit {
            db_id: self.db_id.clone(),
            max_column_family: Some(self.max_column_family),
            min_log_number_to_keep: Some(self.min_log_number_to_keep).filter(|&number| number > 0),
            ours: true,
            ..VersionEdit::default()
        };
        let families = self.families.iter();
        let families = families.flat_map(|(&id, family)| family.snapshot(id, self.keys));
        let last = VersionEdit {
            next_file_number: Some(next_file_number),
            last_sequence: self.last_sequence,
            ..VersionEdit::default()
        };
        [first].into_iter().chain(families).chain([last])
    }

    /// The blob files of a column family that RocksDB keeps; see [`ColumnFamily::live_blob_files`].
    pub fn live_blob_files(&self, family: u32) -> Vec<BlobFileMeta> {
        let Some(family) = self.families.get(&family) else { return Vec::new() };
        family.live_blob_files().cloned().collect()
    }

    /// All blob files of a column family, live or not, by number.
    pub fn blob_files(&self, family: u32) -> impl Iterator<Item = &BlobFileMeta> {
        self.families.get(&family).into_iter().flat_map(|family| family.blob_files.values())
    }

    /// The SST files of a column family with their levels, by number.
    pub fn files(&self, family: u32) -> impl Iterator<Item = (u32, &FileMeta)> {
        let files = self.families.get(&family).into_iter().flat_map(|family| family.files.values());
        files.map(|(level, file)| (*level, file))
    }

    /// The SST files of a column family that are linked to a blob file, with their levels, by
    /// number. Takes as long as there are of them.
    pub fn linked_files(&self, family: u32, blob: u64) -> impl Iterator<Item = (u32, &FileMeta)> {
        let family = self.families.get(&family);
        let numbers = family.and_then(|family| family.linked.get(&blob));
        numbers.into_iter().flatten().filter_map(move |number| {
            let (level, file) = family?.files.get(number)?;
            Some((*level, file))
        })
    }

    /// The id of the next column family; `None` if there is no further one.
    pub fn next_column_family(&self) -> Option<u32> {
        self.max_column_family.checked_add(1)
    }

    /// Decodes and applies the next record of the log.
    pub fn record(&mut self, record: &[u8]) -> Result<()> {
        self.edit(VersionEdit::decode(record)?)
    }

    /// Applies the next edit.
    pub fn edit(&mut self, edit: VersionEdit) -> Result<()> {
        let Some(remaining) = edit.atomic_group_remaining else {
            if self.group_remaining > 0 {
                return Err(Error::corruption(format!(
                    "corrupted atomic group: a record outside it where {} more were expected",
                    self.group_remaining
                )));
            }
            return self.apply(edit);
        };
        if !self.group.is_empty() && remaining.checked_add(1) != Some(self.group_remaining) {
            return Err(Error::corruption(format!(
                "corrupted atomic group: {remaining} records left where {} were expected before this one",
                self.group_remaining
            )));
        }
        self.group.push(edit);
        self.group_remaining = remaining;
        if remaining == 0 {
            for edit in std::mem::take(&mut self.group) {
                self.apply(edit)?;
            }
        }
        Ok(())
    }

    fn apply(&mut self, edit: VersionEdit) -> Result<()> {
        let id = edit.column_family;
        let kind = edit.kind();
        self.apply_globals(&edit)?;
        match kind {
            EditKind::ColumnFamilyAdd => {
                if self.families.contains_key(&id) || self.dropped.contains(&id) {
                    return Err(Error::corruption(format!("column family {id} added twice")));
                }
                self.max_column_family = self.max_column_family.max(id);
                let family = Family {
                    name: edit.column_family_add.clone().unwrap_or_default(),
                    ..Family::default()
                };
                self.families.insert(id, family);
                self.apply_family(edit, kind)
            }
            EditKind::ColumnFamilyDrop => {
                if id == DEFAULT_FAMILY {
                    return Err(Error::corruption("the default column family is dropped"));
                }
                if self.families.remove(&id).is_none() && !self.dropped.contains(&id) {
                    return Err(Error::corruption(format!(
                        "column family {id} dropped, which does not exist"
                    )));
                }
                self.dropped.insert(id);
                Ok(())
            }
            EditKind::WalAddition => {
                for wal in edit.wal_additions {
                    let known = self.wals.entry(wal.number).or_default();
                    *known = (*known).max(wal.synced_bytes);
                }
                Ok(())
            }
            EditKind::WalDeletion => {
                let below = edit.wals_deleted_below.unwrap_or_default();
                self.wals = self.wals.split_off(&below);
                Ok(())
            }
            EditKind::Normal => self.apply_family(edit, kind),
        }
    }

    /// Applies the fields that count in records of every kind.
    fn apply_globals(&mut self, edit: &VersionEdit) -> Result<()> {
        if edit.next_file_number.is_some() {
            self.next_file_number = edit.next_file_number;
        }
        if let Some(sequence) = edit.last_sequence {
            if let Some(before) = self.last_sequence
                && sequence < before
            {
                return Err(Error::corruption(format!(
                    "last sequence goes back from {before} to {sequence}"
                )));
            }
            self.last_sequence = Some(sequence);
        }
        if let Some(number) = edit.min_log_number_to_keep {
            self.min_log_number_to_keep = self.min_log_number_to_keep.max(number);
        }
        if let Some(id) = edit.max_column_family {
            self.max_column_family = self.max_column_family.max(id);
        }
        // A program that writes a memtable to a file without a count makes the number unknown.
        if edit.keys.is_some() || (edit.column_family == 0 && edit.log_number.is_some()) {
            self.keys = edit.keys;
        }
        if edit.db_id.is_some() {
            self.db_id.clone_from(&edit.db_id);
        }
        self.ours |= edit.ours;
        Ok(())
    }

    /// Applies the fields that count in the record of a column family.
    fn apply_family(&mut self, edit: VersionEdit, kind: EditKind) -> Result<()> {
        let id = edit.column_family;
        let Some(family) = self.families.get_mut(&id) else {
            if self.dropped.contains(&id) {
                return Ok(());
            }
            return Err(Error::corruption(format!("record of unknown column family {id}")));
        };
        if let Some(name) = edit.comparator {
            if family.comparator.as_ref().is_some_and(|known| *known != name) {
                return Err(Error::corruption(format!(
                    "comparator of column family {id} changes from {} to {name}",
                    family.comparator.as_deref().unwrap_or_default()
                )));
            }
            family.comparator = Some(name);
        }
        if let Some(number) = edit.log_number {
            self.log_number_seen = true;
            // RocksDB warns about a number that goes back, and keeps the larger one.
            family.log_number = family.log_number.max(number);
        }
        if edit.persist_timestamps.is_some() {
            family.timestamps_persisted = edit.persist_timestamps;
        }
        family.has_low_timestamp |= edit.full_history_ts_low.is_some();
        if kind != EditKind::Normal {
            return Ok(());
        }
        family.apply_files(edit.deleted_files, edit.new_files)?;
        family.apply_blobs(edit.new_blob_files, edit.blob_garbage)
    }

    /// Logs below this number are not needed.
    pub fn min_log_number_to_keep(&self) -> u64 {
        self.min_log_number_to_keep
    }

    /// The largest sequence in the records so far.
    pub fn last_sequence(&self) -> u64 {
        self.last_sequence.unwrap_or(0)
    }

    /// Checks the state and sorts it for reading.
    pub fn finish(self) -> Result<ManifestState> {
        let missing = |what| Error::corruption(format!("no {what} entry in MANIFEST"));
        if !self.log_number_seen {
            return Err(missing("log number"));
        }
        let next_file_number = self.next_file_number.ok_or_else(|| missing("next file number"))?;
        let last_sequence = self.last_sequence.ok_or_else(|| missing("last sequence"))?;
        let mut column_families = BTreeMap::new();
        let mut owner = BTreeMap::new();
        for (id, family) in self.families {
            for &number in family.files.keys().chain(family.blob_files.keys()) {
                if let Some(other) = owner.insert(number, id) {
                    return Err(Error::corruption(format!(
                        "file {number} belongs to column families {other} and {id}"
                    )));
                }
            }
            let comparator_name =
                family.comparator.unwrap_or_else(|| Comparator::default().name().to_owned());
            let comparator = Comparator::from_name(comparator_name.as_bytes()).ok();
            let levels = sort_levels(family.files.into_values(), comparator)
                .map_err(|e| e.at(format!("column family {:?}", family.name)))?;
            column_families.insert(
                id,
                ColumnFamily {
                    id,
                    name: family.name,
                    comparator_name,
                    log_number: family.log_number,
                    levels,
                    blob_files: family.blob_files,
                    timestamps_persisted: family.timestamps_persisted.unwrap_or(true),
                    has_low_timestamp: family.has_low_timestamp,
                },
            );
        }
        Ok(ManifestState {
            column_families,
            next_file_number,
            last_sequence,
            min_log_number_to_keep: self.min_log_number_to_keep,
            max_column_family: self.max_column_family,
            db_id: self.db_id,
            keys: self.keys,
            wals: self.wals,
            ours: self.ours,
        })
    }
}
