//! The plan of an opening, made from the MANIFEST and a listing of the directory alone.
//!
//! Rules, as in RocksDB:
//! - A table in the MANIFEST that is missing, or has another size, cannot be read. Reads that need
//!   it get the error. (RocksDB does this without `paranoid_checks`; with them it does not open the
//!   database.)
//! - A log is needed unless it is below both the smallest log number of a column family and the
//!   smallest number to keep. Logs are replayed in ascending order. The MANIFEST need not mention
//!   them.
//! - An operation in log N applies to a column family whose log number is at most N. For other
//!   families it is in tables already.

use std::collections::BTreeMap;

use rocksfmt::{ColumnFamily, FileName, ManifestState};

use crate::error::{Error, Kind, Result};
use crate::open::blob_tails::BlobTails;

/// What to do about a table that cannot be read.
const RESTORE: &str =
    "stop and restore the file from a backup, or let millrace kv check --repair drop it";
/// Most files that an error names before "and more".
const NAMES_MAX: usize = 5;

/// A file of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub name: String,
    pub size_bytes: u64,
}

/// A log to replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedLog {
    pub number: u64,
    pub name: String,
    pub size_bytes: u64,
}

/// The files of a listing by kind and number.
#[derive(Default)]
struct ByNumber<'a> {
    tables: BTreeMap<u64, &'a Listed>,
    blobs: BTreeMap<u64, &'a Listed>,
    logs: BTreeMap<u64, &'a Listed>,
}

impl ByNumber<'_> {
    fn new(files: &[Listed]) -> ByNumber<'_> {
        let mut by_number = ByNumber::default();
        for file in files {
            match FileName::parse(&file.name) {
                // If both extensions exist, RocksDB's wins.
                Some(FileName::Sst(number)) if file.name.ends_with(".sst") => {
                    by_number.tables.insert(number, file);
                }
                Some(FileName::Sst(number)) => {
                    by_number.tables.entry(number).or_insert(file);
                }
                Some(FileName::Blob(number)) => {
                    by_number.blobs.insert(number, file);
                }
                Some(FileName::Wal(number)) => {
                    by_number.logs.insert(number, file);
                }
                _ => {}
            }
        }
        by_number
    }
}

/// The files to open and the logs to replay.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecoveryPlan {
    /// Logs to replay, in order.
    pub logs: Vec<PlannedLog>,
    /// Whether needed logs may be empty: RocksDB uses `avoid_flush_during_recovery` here.
    pub empty_logs_may_count: bool,
    /// Whether each log counts whatever the logs before it hold: a repair takes what there is.
    pub logs_are_alone: bool,
    /// The end of a log also ends a piece of the replay once it holds at least this many bytes.
    pub border_bytes: Option<u64>,
    /// Logs that all families have flushed, from the first one to keep: RocksDB keeps them while a
    /// transaction is prepared in them.
    pub kept_logs: Vec<PlannedLog>,
    /// Names of the live tables by number: `.sst`, or LevelDB's `.ldb`.
    pub tables: BTreeMap<u64, String>,
    /// Live tables that are missing or have another size, and why they cannot be read.
    pub damaged: BTreeMap<u64, Error>,
    /// Live blob files by number.
    pub blobs: BTreeMap<u64, Listed>,
    /// Live blob files that are missing. Their values cannot be read; everything else can.
    pub blobs_missing: Vec<u64>,
    /// What the live blob files that we wrote hold, if the caller has read them.
    pub blob_tails: BlobTails,
    /// Tables that exist but are not live, left by a crash or by an active writer.
    pub unreferenced: Vec<String>,
}

impl RecoveryPlan {
    /// Decides what to open and replay. `files` lists the database's directory, and its log
    /// directory if that is another one.
    pub fn new(state: &ManifestState, files: &[Listed]) -> Result<RecoveryPlan> {
        let mut there = ByNumber::new(files);
        let mut plan = RecoveryPlan::default();
        for family in state.column_families.values() {
            plan.add_tables(family, &mut there.tables)?;
            plan.add_blobs(family, &there.blobs);
        }
        plan.unreferenced = there.tables.into_values().map(|file| file.name.clone()).collect();

        let first = first_log(state);
        refuse_logs(state, first, &there.logs)?;
        for (&number, &file) in there.logs.range(state.min_log_number_to_keep..) {
            let logs = if number < first { &mut plan.kept_logs } else { &mut plan.logs };
            logs.push(PlannedLog { number, name: file.name.clone(), size_bytes: file.size_bytes });
        }
        Ok(plan)
    }

    /// Adds a family's tables, which leave `there`.
    fn add_tables(
        &mut self,
        family: &ColumnFamily,
        there: &mut BTreeMap<u64, &Listed>,
    ) -> Result<()> {
        let (mut files, mut missing) = (0, Vec::new());
        for (level, file) in family.files() {
            let name = FileName::Sst(file.number).to_string();
            if file.path_id != 0 {
                return Err(Error::new(
                    Kind::Unsupported,
                    format!(
                        "{name} is in another directory (db_paths, path {}): that is not \
                         supported: let RocksDB compact all tables into the first path",
                        file.path_id
                    ),
                ));
            }
            files += 1;
            let found = there.remove(&file.number);
            let what = match found {
                Some(found) if found.size_bytes == file.size_bytes => {
                    self.tables.insert(file.number, found.name.clone());
                    continue;
                }
                Some(found) => format!(
                    "{} has {} bytes, but the MANIFEST says {}",
                    found.name, found.size_bytes, file.size_bytes
                ),
                None => {
                    missing.push(name.clone());
                    format!("{name} is missing")
                }
            };
            let text = format!("{what} (level {level} of {:?}): {RESTORE}", family.name);
            self.damaged.insert(file.number, Error::new(Kind::Corruption, text));
        }
        match missing.first() {
            Some(example) if missing.len() == files => Err(Error::new(
                Kind::Unsupported,
                format!(
                    "all tables of column family {} are missing, {example} for example: they are \
                     lost, or db_paths or cf_paths put them elsewhere, which is not supported",
                    family.name
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Adds a family's blob files.
    fn add_blobs(&mut self, family: &ColumnFamily, there: &BTreeMap<u64, &Listed>) {
        for blob in family.live_blob_files() {
            match there.get(&blob.number) {
                Some(&there) => {
                    self.blobs.insert(blob.number, there.clone());
                }
                None => self.blobs_missing.push(blob.number),
            }
        }
    }

    /// A warning if no log counts. A database of ours that was ever opened has one, while a
    /// checkpoint may do without, and has no LOCK file.
    pub fn lacks_log(&self, state: &ManifestState, has_lock: bool) -> Option<String> {
        let first = first_log(state);
        let held = self.logs.iter().any(|log| log.size_bytes > 0);
        (state.ours && has_lock && first > 0 && !held).then(|| {
            format!(
                "no write-ahead log has records, but the MANIFEST counts on {} or a newer one: unless \
                 this is a copy of a database, writes are lost",
                FileName::Wal(first)
            )
        })
    }

    /// Bytes of log to replay.
    pub fn log_bytes(&self) -> u64 {
        self.logs.iter().fold(0, |sum, log| sum.saturating_add(log.size_bytes))
    }
}

/// The smallest number of a log that is needed.
pub(crate) fn first_log(state: &ManifestState) -> u64 {
    let families = state.column_families.values();
    let smallest = families.map(|family| family.log_number).min().unwrap_or_default();
    smallest.max(state.min_log_number_to_keep)
}

/// Requires the logs that the MANIFEST tracks, with at least the synced length.
fn refuse_logs(state: &ManifestState, first: u64, there: &BTreeMap<u64, &Listed>) -> Result<()> {
    let mut missing = Vec::new();
    for (&number, &synced_bytes) in state.wals.range(first..) {
        let name = FileName::Wal(number).to_string();
        match (there.get(&number), synced_bytes) {
            (None, _) => missing.push(name),
            (Some(file), Some(synced)) if file.size_bytes < synced => {
                return Err(Error::new(
                    Kind::Corruption,
                    format!(
                        "{name} has {} bytes, but the MANIFEST says that {synced} were synced",
                        file.size_bytes
                    ),
                ));
            }
            _ => {}
        }
    }
    refuse_missing("write-ahead logs", &missing)
}

fn refuse_missing(what: &str, missing: &[String]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    let more = match missing.len().saturating_sub(NAMES_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let names = missing[..missing.len().min(NAMES_MAX)].join(", ");
    Err(Error::new(
        Kind::Corruption,
        format!("{what} that the MANIFEST lists are missing: {names}{more}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocksfmt::ManifestReplay;
    use rocksfmt::testing::{EditBuilder, file_meta};

    const BLOB_ADDITION: u32 = 400;
    const LOG_NUMBER: u32 = 2;
    const MIN_LOG: u32 = 10;
    const OLD_WAL_ADDITION: u32 = 8196;

    fn edit() -> EditBuilder {
        EditBuilder::new()
    }

    fn state(edits: &[EditBuilder]) -> ManifestState {
        let mut replay = ManifestReplay::new();
        replay.record(&edit().required(4, 50, 100).finish()).unwrap();
        for edit in edits {
            replay.record(&edit.clone().finish()).unwrap();
        }
        replay.finish().unwrap()
    }

    fn files(names: &[(&str, u64)]) -> Vec<Listed> {
        let listed = |&(name, size_bytes): &(&str, u64)| Listed { name: name.into(), size_bytes };
        names.iter().map(listed).collect()
    }

    fn refused(state: &ManifestState, names: &[(&str, u64)], kind: Kind, text: &str) {
        let e = RecoveryPlan::new(state, &files(names)).unwrap_err();
        assert!(e.to_string().contains(text), "{e} does not say {text:?}");
        assert_eq!(e.kind(), kind);
    }

    fn log_numbers(state: &ManifestState, names: &[(&str, u64)]) -> Vec<u64> {
        let plan = RecoveryPlan::new(state, &files(names)).unwrap();
        plan.logs.iter().map(|log| log.number).collect()
    }

    #[test]
    fn live_tables_that_are_not_there_in_full_are_damaged() {
        let state = state(&[edit()
            .add_file(1, &file_meta(7, b"a", b"b", (1, 2)))
            .add_file(1, &file_meta(8, b"c", b"d", (1, 2)))]);
        let plan = RecoveryPlan::new(
            &state,
            &files(&[("000007.sst", 1007), ("000008.ldb", 1008), ("000030.sst", 5), ("LOG", 1)]),
        )
        .unwrap();
        assert_eq!(plan.tables[&7], "000007.sst");
        assert_eq!(plan.tables[&8], "000008.ldb");
        assert_eq!(plan.unreferenced, ["000030.sst"]);
        let damage = |names: &[(&str, u64)], number| {
            let plan = RecoveryPlan::new(&state, &files(names)).unwrap();
            assert!(!plan.tables.contains_key(&number) && plan.damaged.len() == 1);
            plan.damaged[&number].to_string()
        };
        let missing = damage(&[("000007.sst", 1007)], 8);
        assert!(missing.starts_with("000008.sst is missing (level 1 of \"default\")"), "{missing}");
        let cut = damage(&[("000007.sst", 1006), ("000008.sst", 1008)], 7);
        assert!(cut.starts_with("000007.sst has 1006 bytes, but the MANIFEST says 1007"), "{cut}");
        let both = files(&[("000007.ldb", 3), ("000007.sst", 1007), ("000008.sst", 1008)]);
        assert_eq!(RecoveryPlan::new(&state, &both).unwrap().tables[&7], "000007.sst");
    }

    #[test]
    fn a_family_without_any_of_its_tables_is_refused() {
        let add = |number, key: &[u8]| {
            edit().add_file(1, &file_meta(number, key, key, (1, 2))).column_family(0)
        };
        let state = state(&[add(9, b"a"), add(10, b"b")]);
        let text = "all tables of column family default are missing, 000009.sst";
        refused(&state, &[], Kind::Unsupported, text);
        let plan = RecoveryPlan::new(&state, &files(&[("000009.sst", 1009)])).unwrap();
        assert_eq!(plan.damaged.keys().collect::<Vec<_>>(), [&10]);
    }

    #[test]
    fn an_error_names_some_missing_logs_and_counts_the_rest() {
        let tracked = (3..13).map(|log| edit().numbers(OLD_WAL_ADDITION, &[log, 1]));
        let state = state(&tracked.collect::<Vec<_>>());
        refused(&state, &[], Kind::Corruption, "missing: 000004.log, 000005.log");
        refused(&state, &[], Kind::Corruption, "000008.log and 4 more");
    }

    #[test]
    fn tables_elsewhere_are_refused() {
        let mut file = file_meta(7, b"a", b"b", (1, 2));
        file.path_id = 1;
        let state = state(&[edit().add_file(1, &file)]);
        refused(&state, &[("000007.sst", 1007)], Kind::Unsupported, "db_paths, path 1");
    }

    #[test]
    fn blob_files_may_be_missing() {
        let mut file = file_meta(7, b"a", b"b", (1, 2));
        file.oldest_blob_file = 10;
        let state = state(&[edit()
            .add_file(1, &file)
            .numbers(BLOB_ADDITION, &[10, 5, 500, 0, 0, 0])
            .numbers(BLOB_ADDITION, &[11, 5, 500, 0, 0, 0])]);
        let listing = files(&[("000007.sst", 1007), ("000011.blob", 600)]);
        let plan = RecoveryPlan::new(&state, &listing).unwrap();
        assert_eq!(plan.blobs_missing, [10]);
        assert_eq!(plan.blobs[&11].name, "000011.blob");
    }

    #[test]
    fn logs_from_the_oldest_that_may_count_are_replayed_in_order() {
        let listing = [
            ("000009.log", 90),
            ("000002.log", 20),
            ("1000000.log", 1),
            ("000004.log", 40),
            ("000003.log", 30),
        ];
        let older = edit().numbers(LOG_NUMBER, &[3]).column_family(1);
        let add = edit().add_column_family("x", "leveldb.BytewiseComparator").column_family(1);
        assert_eq!(log_numbers(&state(&[]), &listing), [4, 9, 1_000_000]);
        assert_eq!(log_numbers(&state(&[add.clone(), older]), &listing), [3, 4, 9, 1_000_000]);
        let keep = edit().numbers(MIN_LOG, &[9]);
        assert_eq!(log_numbers(&state(&[keep]), &listing), [9, 1_000_000]);
        let plan = RecoveryPlan::new(&state(&[]), &files(&listing)).unwrap();
        assert_eq!(plan.log_bytes(), 131);
    }

    #[test]
    fn tracked_logs_must_exist_with_their_synced_bytes() {
        let tracked = edit()
            .numbers(OLD_WAL_ADDITION, &[3, 2, 99, 1])
            .numbers(OLD_WAL_ADDITION, &[5, 2, 200, 1])
            .numbers(OLD_WAL_ADDITION, &[6, 1]);
        let state = state(&[tracked]);
        assert_eq!(log_numbers(&state, &[("000005.log", 200), ("000006.log", 0)]), [5, 6]);
        refused(
            &state,
            &[("000005.log", 199), ("000006.log", 0)],
            Kind::Corruption,
            "000005.log has 199 bytes, but the MANIFEST says that 200 were synced",
        );
        refused(&state, &[("000005.log", 200)], Kind::Corruption, "missing: 000006.log");
    }
}
