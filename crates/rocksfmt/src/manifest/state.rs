//! The state that a MANIFEST describes.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::Result;
use crate::key::Comparator;
use crate::manifest::file_meta::{BlobFileMeta, FileMeta};

/// A column family and its files.
#[derive(Clone, Debug)]
pub struct ColumnFamily {
    /// Its id; 0 is "default".
    pub id: u32,
    /// Its name.
    pub name: String,
    /// The name of its comparator.
    pub comparator_name: String,
    /// Logs below this number hold no data that is not in the files.
    pub log_number: u64,
    /// Files by level; level 0 newest first, the others by smallest key. The last level has files.
    pub levels: Vec<Vec<FileMeta>>,
    /// Its blob files by number, live or not; see [`ColumnFamily::live_blob_files`].
    pub blob_files: BTreeMap<u64, BlobFileMeta>,
    /// Whether its files contain user timestamps (if its comparator has them).
    pub timestamps_persisted: bool,
    /// Whether a lowest timestamp of its history was set, so that its keys have timestamps.
    pub has_low_timestamp: bool,
}

impl ColumnFamily {
    /// Its order of keys; an error that names the comparator if this crate does not know it.
    pub fn comparator(&self) -> Result<Comparator> {
        Comparator::from_name(self.comparator_name.as_bytes())
            .map_err(|e| e.at(format!("column family {:?}", self.name)))
    }

    /// All its SST files with their levels, in order of the levels.
    pub fn files(&self) -> impl Iterator<Item = (usize, &FileMeta)> {
        let by_level = self.levels.iter().enumerate();
        by_level.flat_map(|(level, files)| files.iter().map(move |file| (level, file)))
    }

    /// The blob files that RocksDB keeps: not older than the oldest one to which an SST is linked,
    /// and with live values. The others may be missing from the directory.
    pub fn live_blob_files(&self) -> impl Iterator<Item = &BlobFileMeta> {
        let linked = links(self.files().map(|(_, file)| file));
        let live = live_blob_files(&linked, &self.blob_files);
        let live: Vec<&BlobFileMeta> = live.collect();
        live.into_iter()
    }
}

/// The links of SST files to blob files: by the number of a blob file, those of the SST files.
pub(crate) fn links<'a>(files: impl Iterator<Item = &'a FileMeta>) -> BTreeMap<u64, BTreeSet<u64>> {
    let mut linked = BTreeMap::new();
    files.for_each(|file| link(&mut linked, file));
    linked
}

/// Adds the link of an SST file, if it has one.
pub(crate) fn link(linked: &mut BTreeMap<u64, BTreeSet<u64>>, file: &FileMeta) {
    if file.oldest_blob_file != 0 {
        linked.entry(file.oldest_blob_file).or_default().insert(file.number);
    }
}

/// See [`ColumnFamily::live_blob_files`].
pub(crate) fn live_blob_files<'l, 'a: 'l>(
    linked: &'l BTreeMap<u64, BTreeSet<u64>>,
    blob_files: &'a BTreeMap<u64, BlobFileMeta>,
) -> impl Iterator<Item = &'a BlobFileMeta> + use<'l, 'a> {
    let oldest = linked.keys().copied().find(|number| blob_files.contains_key(number));
    let kept = oldest.into_iter().flat_map(|oldest| blob_files.range(oldest..));
    kept.map(|(_, blob)| blob).filter(move |blob| {
        linked.contains_key(&blob.number) || blob.garbage_count < blob.total_count
    })
}

/// The state that a MANIFEST describes.
#[derive(Clone, Debug)]
pub struct ManifestState {
    /// Live column families by id.
    pub column_families: BTreeMap<u32, ColumnFamily>,
    /// A number that no file had when the MANIFEST was written; the directory may have larger
    /// ones.
    pub next_file_number: u64,
    /// The largest sequence in the files.
    pub last_sequence: u64,
    /// Logs below this number are not needed.
    pub min_log_number_to_keep: u64,
    /// The largest column family id ever assigned.
    pub max_column_family: u32,
    /// Identity of the database, if the MANIFEST has it.
    pub db_id: Option<String>,
    /// The number of keys in the default column family's files, if the MANIFEST has it; see
    /// `docs/formats/key-count.md`.
    pub keys: Option<u64>,
    /// The logs that the MANIFEST tracks, with their synced size if known (option
    /// `track_and_verify_wals_in_manifest`; empty without it).
    pub wals: BTreeMap<u64, Option<u64>>,
    /// Whether a record has a field that only Millrace writes. When RocksDB opens a database for
    /// writing it replaces the MANIFEST and writes an OPTIONS file.
    pub ours: bool,
}

impl ManifestState {
    /// A number larger than [`ManifestState::next_file_number`] and than the numbers of all files
    /// and logs that the MANIFEST names, because these may be larger.
    pub fn next_number(&self) -> u64 {
        let families = || self.column_families.values();
        let files = families().flat_map(|family| family.files().map(|(_, file)| file.number));
        let blobs = families().flat_map(|family| family.blob_files.keys().copied());
        let logs = families().map(|family| family.log_number).chain([self.min_log_number_to_keep]);
        let named = files.chain(blobs).chain(logs).chain(self.wals.keys().copied());
        named.fold(self.next_file_number, |next, number| next.max(number.saturating_add(1)))
    }

    /// A live column family by name.
    pub fn column_family(&self, name: &str) -> Option<&ColumnFamily> {
        self.column_families.values().find(|cf| cf.name == name)
    }
}
