//! The shape of a database, for `kv stat`, INFO and people.

use std::collections::BTreeMap;

use crate::db::Db;
use crate::version::{Family, Level, Slot, Version};
use crate::write::compaction_status::shape_of;

/// A database's shape.
#[derive(Clone, Debug)]
pub struct Stat {
    /// Its id, if it has one.
    pub db_id: Option<String>,
    /// Name of the MANIFEST.
    pub manifest: String,
    /// The newest sequence number.
    pub last_sequence: u64,
    /// The next file number, by the MANIFEST.
    pub next_file_number: u64,
    /// RocksDB's version in the newest OPTIONS file.
    pub rocksdb_version: Option<String>,
    /// Bytes of memory for indexes, filters and recovered writes.
    pub memory_bytes: usize,
    /// Its column families.
    pub column_families: Vec<FamilyStat>,
    /// Warnings of the opening.
    pub warnings: Vec<String>,
}

/// A column family's shape.
#[derive(Clone, Debug)]
pub struct FamilyStat {
    /// Its id.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Its comparator.
    pub comparator: String,
    /// Why it cannot be read, if it cannot.
    pub refused: Option<String>,
    /// Estimated number of live keys.
    pub estimated_keys: u64,
    /// Entries recovered from the log that are in no file.
    pub memtable_entries: usize,
    /// Its levels, down to the last one with files.
    pub levels: Vec<LevelStat>,
    /// The level into which level 0 is merged.
    pub base_level: usize,
    /// Bytes that merges have to read and write until no level exceeds its target, about.
    pub debt_bytes: u64,
    /// Bytes of tables without obsolete versions, about.
    pub live_bytes: u64,
    /// Its live blob files.
    pub blob_files: usize,
    /// Their bytes.
    pub blob_bytes: u64,
    /// Bytes of obsolete values in them, by the MANIFEST.
    pub blob_garbage_bytes: u64,
    /// Features of the files by name (format versions, compressions, filters, index types and
    /// others), with the number of files that have each.
    pub features: BTreeMap<String, u64>,
    /// Its options in the newest OPTIONS file.
    pub options: BTreeMap<String, String>,
}

/// A level's shape.
#[derive(Clone, Debug, Default)]
pub struct LevelStat {
    /// Files.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Their entries, including older versions and tombstones.
    pub entries: u64,
    /// Tombstones among them.
    pub deletions: u64,
    /// Files that could not be opened.
    pub damaged: usize,
    /// The size that it aims at, if it has one.
    pub target_bytes: Option<u64>,
    /// A merge is due from 1 on.
    pub score: f64,
}

impl Db {
    /// Describes the database by what the opening read.
    pub fn stat(&self) -> Stat {
        let state = &*self.0;
        let version = self.version();
        let options = state.stored_options.file.as_ref();
        let memory = self.memory();
        Stat {
            db_id: state.manifest.db_id.clone(),
            manifest: state.manifest_name.clone(),
            last_sequence: self.visible(),
            next_file_number: state.manifest.next_file_number,
            rocksdb_version: options.and_then(|file| file.rocksdb_version()).map(str::to_owned),
            memory_bytes: memory.tables + memory.memtables,
            column_families: version.families.iter().map(|f| self.stat_of(&version, f)).collect(),
            warnings: state.warnings.clone(),
        }
    }

    fn stat_of(&self, version: &Version, family: &Family) -> FamilyStat {
        let mut features = BTreeMap::new();
        let levels = family.levels.iter().map(|level| level_stat(version, level, &mut features));
        let mut levels: Vec<LevelStat> = levels.collect();
        let shape = shape_of(version, family, &|slot| version.table(slot).is_err());
        for (level, shape) in levels.iter_mut().zip(&shape.levels) {
            (level.target_bytes, level.score) = (shape.target_bytes, shape.score);
        }
        let listed = self.0.manifest.column_families.get(&family.id);
        let blobs = listed.into_iter().flat_map(|listed| listed.live_blob_files());
        let options = self.0.stored_options.file.as_ref();
        let options = options.and_then(|file| file.section("CFOptions", &family.name)).cloned();
        FamilyStat {
            id: family.id,
            name: family.name.clone(),
            comparator: family.comparator_name.clone(),
            refused: family.refused.as_ref().map(ToString::to_string),
            estimated_keys: family.estimated_keys(version),
            memtable_entries: family.mems.iter().map(|mem| mem.len()).sum(),
            levels,
            base_level: shape.base_level,
            debt_bytes: shape.debt_bytes,
            live_bytes: shape.live_bytes,
            blob_files: family.blobs.len(),
            blob_bytes: family.blobs.iter().map(|(_, blob)| blob.file.size()).sum(),
            blob_garbage_bytes: blobs.map(|blob| blob.garbage_bytes).sum(),
            features,
            options: options.unwrap_or_default(),
        }
    }
}

/// The shape of a level. Counts the features of its tables.
fn level_stat(version: &Version, level: &Level, features: &mut BTreeMap<String, u64>) -> LevelStat {
    let mut note = |feature: String| *features.entry(feature).or_insert(0) += 1;
    let mut stat = LevelStat::default();
    for &slot in &level.slots {
        stat.files += 1;
        stat.bytes += version.meta(slot).size_bytes;
        let Slot::Open(table) = &version.slots[slot as usize] else {
            stat.damaged += 1;
            continue;
        };
        let properties = &table.properties;
        stat.entries += properties.num_entries;
        stat.deletions += properties.num_deletions;
        note(format!("format version {}", table.footer.format_version));
        note(format!("checksum {:?}", table.check.kind));
        note(format!("index {:?}", properties.index_type));
        note(format!("filter {}", table.filter.describe()));
        note(format!("compression {}", String::from_utf8_lossy(&properties.compression)));
        if table.range_tombstones.is_some() {
            note("range tombstones".to_owned());
        }
        if table.dictionary.is_some() {
            note("compression dictionary".to_owned());
        }
        if table.global_sequence.is_some() {
            note("ingested".to_owned());
        }
    }
    stat
}
