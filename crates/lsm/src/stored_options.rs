//! The contents of a directory's newest OPTIONS file: the options that the database was created
//! with.
//!
//! RocksDB opens a database without this file, but if it is there, reuses its options; they also
//! say where files may be and of which kind. `gate.rs` checks all of them before anything is
//! written; reading checks only those that change the meaning of values.

use fs::{Dir, DirEntry};
use rocksfmt::{FileName, OptionsFile};

use crate::error::{Error, Result, lacks_resources};
use crate::option_value::{self, unparsable_of_database, unparsable_of_family};

/// The oldest RocksDB that reads what is written here.
pub(crate) const OLDEST: (u64, u64) = (7, 8);

/// The first line of an OPTIONS file that Millrace wrote when it created the database. RocksDB
/// replaces the file when it opens the database for writing.
pub(crate) const OWN_OPTIONS: &str = "# Written by Millrace.";

/// The newest OPTIONS file, if there is one.
#[derive(Default)]
pub(crate) struct StoredOptions {
    /// The file's name.
    pub name: Option<String>,
    /// Its contents, if it can be read.
    pub file: Option<OptionsFile>,
    /// Why it cannot be read.
    pub unreadable: Option<String>,
    /// Millrace wrote it.
    pub is_own: bool,
}

impl StoredOptions {
    /// Reads the newest OPTIONS file of a directory. Suspends for the disk.
    ///
    /// # Errors
    /// When this process lacks descriptors or memory: that says nothing about the file.
    pub async fn read(dir: &Dir, entries: &[DirEntry]) -> Result<StoredOptions> {
        let Some(name) = newest(entries) else { return Ok(StoredOptions::default()) };
        let read = dir.read_small(name, rocksfmt::OPTIONS_BYTES_MAX).await;
        let unreadable = match &read {
            Err(error) if lacks_resources(error) => return Err(Error::io(name, error)),
            Err(error) => Some(error.to_string()),
            Ok(_) => None,
        };
        let text = read.ok();
        let is_own = text.as_ref().is_some_and(|text| text.starts_with(OWN_OPTIONS.as_bytes()));
        let file = text.map(|text| OptionsFile::parse(&text));
        Ok(StoredOptions { name: Some(name.to_owned()), file, unreadable, is_own })
    }

    /// Whether the RocksDB that wrote the file cannot read what is written here.
    pub fn is_older(&self) -> bool {
        let version = self.file.as_ref().and_then(|file| file.rocksdb_version());
        version.is_some_and(is_older)
    }

    /// A database option, unless it is absent or empty.
    pub fn db(&self, key: &str) -> Option<&str> {
        self.file.as_ref()?.db(key).filter(|value| !value.is_empty())
    }

    /// An option of a family, unless it is absent or empty.
    pub fn family(&self, family: &str, key: &str) -> Option<&str> {
        self.file.as_ref()?.column_family(family, key).filter(|value| !value.is_empty())
    }

    /// Why the values of a family are not plain user values, if they are not.
    pub fn refuses_reading(&self, family: &str) -> Option<String> {
        let filters = ["compaction_filter_factory", "compaction_filter", "merge_operator"];
        let is_ttl = |value: &str| {
            ["TtlCompactionFilter", "TtlMergeOperator", "Delete By TTL"]
                .iter()
                .any(|name| value.contains(name))
        };
        let mut values = filters.iter().filter_map(|key| Some((key, self.family(family, key)?)));
        values.find(|(_, value)| is_ttl(value)).map(|(key, value)| {
            format!(
                "column family {family} belongs to a DBWithTTL, whose values end in a time stamp: \
                 that is not supported ({key}={value})"
            )
        })
    }

    /// What the file lacks, if it is truncated or older than one of these families.
    pub fn lacks(&self, families: impl Iterator<Item = impl AsRef<str>>) -> Option<String> {
        if let Some(error) = &self.unreadable {
            return Some(format!("cannot be read: {error}"));
        }
        let file = self.file.as_ref()?;
        if file.rocksdb_version().is_none() {
            return Some("has no rocksdb_version".into());
        }
        if file.section("DBOptions", "").is_none() {
            return Some("has no section DBOptions".into());
        }
        for family in families {
            let family = family.as_ref();
            // A family's section is complete once that of its tables has begun.
            let has = |of: &str| file.kinds(family).any(|kind| kind.starts_with(of));
            if !has("CFOptions") || !has("TableOptions") {
                return Some(format!("does not have all options of column family {family}"));
            }
        }
        None
    }

    /// Whether RocksDB opens a log that overwrote an older one and has old records after its end.
    /// Two modes do not: one reports damage (`kAbsoluteConsistency`), the other searches for a
    /// valid record after the end forever (`kSkipAnyCorruptedRecords`). Unknown modes count as
    /// these.
    pub fn take_old_records_for_the_end(&self) -> bool {
        let mode = self.db("wal_recovery_mode").unwrap_or("kPointInTimeRecovery");
        ["kPointInTimeRecovery", "kTolerateCorruptedTailRecords"].contains(&mode)
    }

    /// Whether openings by RocksDB keep logs that are still needed, including empty ones.
    pub fn keeps_logs_at_openings(&self) -> bool {
        self.db("avoid_flush_during_recovery").and_then(option_value::flag) == Some(true)
    }

    /// The first option of a family, or of the database if none is named, that is obeyed here but
    /// cannot be parsed: `NAME=VALUE`.
    pub fn unparsable(&self, family: Option<&str>) -> Option<String> {
        let file = self.file.as_ref()?;
        match family {
            Some(family) => unparsable_of_family(|key| file.column_family(family, key)),
            None => unparsable_of_database(|key| file.db(key)),
        }
    }

    /// Whether the file has a section for a family.
    pub fn has_family(&self, family: &str) -> bool {
        self.file.as_ref().is_some_and(|file| file.kinds(family).next().is_some())
    }

    /// What the options say about the blob files of a family.
    pub fn blobs(&self, family: &str) -> StoredBlobs {
        let number = |key| self.family(family, key).and_then(option_value::unsigned);
        let flag = |key| self.family(family, key).and_then(option_value::flag) == Some(true);
        let is_on = flag("enable_blob_files");
        let starting_level = self.family(family, "blob_file_starting_level");
        let compression = self.family(family, "blob_compression_type").unwrap_or(NO_COMPRESSION);
        let plain = compression == NO_COMPRESSION
            && starting_level.and_then(option_value::int).is_none_or(|level| level <= 0);
        let part = |key| self.family(family, key).and_then(option_value::double);
        let is_compressed = is_on && !plain;
        let value_min = number("min_blob_size").unwrap_or(0);
        let collects = flag("enable_blob_garbage_collection");
        let force_threshold =
            part("blob_garbage_collection_force_threshold").filter(|&share| share < 1.0);
        let is_forced = collects && force_threshold.is_some();
        // A RocksDB that keeps the logs at openings cannot read references in them. One that forces
        // the collection of garbage stops (a build with assertions) at a file without links, and
        // keeps one that a crash left open, because it does not know the number of its values.
        StoredBlobs {
            is_on,
            value_min: is_on.then(|| usize::try_from(value_min).unwrap_or(usize::MAX)),
            collects,
            age_cutoff: part("blob_garbage_collection_age_cutoff").unwrap_or(AGE_CUTOFF),
            force_threshold,
            file_bytes: number("blob_file_size").filter(|_| is_on),
            are_supported: !(self.keeps_logs_at_openings() || is_compressed || is_forced),
        }
    }

    /// The number of levels that RocksDB gives a family.
    pub fn levels(&self, family: &str) -> usize {
        let said = self.family(family, "num_levels").and_then(option_value::int);
        // As RocksDB: there is a level 0 in any case.
        said.map_or(LEVELS, |levels| levels.max(1) as usize)
    }
}

/// What OPTIONS say about the blob files of a family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StoredBlobs {
    /// New values are stored in blob files.
    pub is_on: bool,
    /// Least bytes of such a value.
    pub value_min: Option<usize>,
    /// Garbage in blob files is collected.
    pub collects: bool,
    /// The share of the blob files, the oldest ones, of which garbage is collected.
    pub age_cutoff: f64,
    /// The share of garbage in these at which it is collected in any case.
    pub force_threshold: Option<f64>,
    /// The length of a blob file.
    pub file_bytes: Option<u64>,
    /// Whether new values may be stored in blob files.
    pub are_supported: bool,
}

/// RocksDB's default of `blob_garbage_collection_age_cutoff`.
const AGE_CUTOFF: f64 = 0.25;

const NO_COMPRESSION: &str = "kNoCompression";

/// The number of levels if the options do not say.
const LEVELS: usize = 7;

fn is_older(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) < OLDEST
}

/// The name of the newest OPTIONS file.
pub(crate) fn newest(entries: &[DirEntry]) -> Option<&str> {
    let options = entries.iter().filter_map(|entry| match FileName::parse(&entry.name) {
        Some(FileName::Options(number)) => Some((number, entry.name.as_str())),
        _ => None,
    });
    options.max().map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        for older in ["7.7.8", "6.29.5", "5.0", "7", "", "x.y"] {
            assert!(is_older(older), "{older}");
        }
        for newer in ["7.8.3", "7.10.2", "10.0.0", "8.0"] {
            assert!(!is_older(newer), "{newer}");
        }
    }
}
