//! The gate: whether and how we may write to a directory. Every opening for writing asks here
//! before the first byte of the directory changes, LOCK included.
//!
//! 1. [`may_create`] judges a directory without CURRENT: only an empty one becomes a database.
//! 2. [`check`] judges one that was opened for reading: its OPTIONS, MANIFEST, tables and logs. It
//!    refuses, by name, whatever would be lost, or could not be opened or found by RocksDB
//!    afterwards. `docs/DIRECTORIES.md` has the table of these rules; `e2e/test_gate.py` makes a
//!    directory for each.
//!
//! These are accepted silently: column families, known comparators, `num_levels` and universal
//! compaction with a level below 0, blob files, compressed, recycled and tracked logs,
//! `atomic_flush` (every write is in the log, and recovery restores all families to the same
//! sequence). Options that do not change the files (sizes, rates, caches) are not checked.
//!
//! No file states `db_paths` and `cf_paths`. The MANIFEST has the path of a table outside the first
//! path; tables that are not here are missing. RocksDB 7.8 and newer write `wal_dir` for a database
//! whose first path is not its directory, even if the logs are in the directory. The `cf_paths` of
//! a family without tables are unknown.

use std::collections::BTreeSet;
use std::path::Path;

use fs::DirEntry;
use rocksfmt::{FileName, LEVELS_MAX, ManifestState};

use crate::error::{Error, Kind, Result};
use crate::merge_operator::MergeOperator;
use crate::open::create::{CURRENT_DRAFT, FIRST_OPTIONS};
use crate::option_value;
use crate::slots::Slots;
use crate::stored_options::{OLDEST, StoredOptions};
use crate::table_options::TableOptions;
use crate::version::{Family, Slot};

/// Files that an interrupted creation of a database leaves, and `lost+found` of a file system's
/// root.
const NOTHING: [&str; 9] = [
    "LOCK",
    "IDENTITY",
    "IDENTITY.dbtmp",
    "MANIFEST-000001",
    "MANIFEST-000001.dbtmp",
    FIRST_OPTIONS,
    "OPTIONS-000002.dbtmp",
    "CURRENT.dbtmp",
    "lost+found",
];
/// Most names in an error.
const NAMES_MAX: usize = 4;
/// File numbers must be below this to leave room for new files. RocksDB identifies a log's records
/// by the low 32 bits of the log's number; a writer has at least this many numbers left.
const NUMBERS_END: u64 = (1 << 32) - (1 << 24);
/// The same for sequences, which have 56 bits.
const SEQUENCES_END: u64 = (1 << 56) - (1 << 40);
/// Directory of the old BlobDB's files.
const OLD_BLOBS: &str = "blob_dir";

/// Everything known of an open directory.
pub(crate) struct Found<'a> {
    pub path: &'a Path,
    pub entries: &'a [DirEntry],
    pub stored_options: &'a StoredOptions,
    /// Where `wal_dir` points.
    pub logs_at: LogsAt,
    pub manifest: &'a ManifestState,
    /// The largest sequence found.
    pub last_sequence: u64,
    pub families: &'a [Family],
    pub slots: &'a Slots,
    /// Live blob files that exist but cannot be opened, and why.
    pub unreadable_blobs: &'a [String],
    /// The merge operator that the caller wants.
    pub merge_operator: Option<&'a MergeOperator>,
    /// Column families with writes in the logs that are in no memtable.
    pub unread: &'a BTreeSet<u32>,
    /// The obstacle from prepared transactions in logs kept only for these: see
    /// [`crate::open::recover::prepared`].
    pub prepared: Option<String>,
    /// The evidence that the MANIFEST lost its end: see [`crate::open::unnamed`].
    pub lost_end: Option<String>,
}

/// What the caller has agreed to.
#[derive(Clone, Copy)]
pub(crate) struct Consent {
    /// Writing to a database that RocksDB 7.8 or newer did not write last.
    pub adopt: bool,
}

/// The directory that `wal_dir` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogsAt {
    /// The database's own, that of the database it was copied from, or none.
    Here,
    /// Another directory, for logs.
    Elsewhere,
}

/// Whether a database may be created in a directory without CURRENT.
///
/// # Errors
/// [`Kind::NoDatabase`] with some of the names found; [`Kind::Corruption`] for the remains of a
/// database.
pub(crate) fn may_create(path: &Path, entries: &[DirEntry]) -> Result<()> {
    let is_other = |entry: &&DirEntry| !NOTHING.contains(&entry.name.as_str());
    let names: Vec<&str> =
        entries.iter().filter(is_other).map(|entry| entry.name.as_str()).collect();
    let is_database = |name: &&&str| {
        use FileName::{Blob, Manifest, Options, Sst, Wal};
        let file = FileName::parse(name);
        matches!(file, Some(Wal(_) | Sst(_) | Blob(_) | Manifest(_) | Options(_)))
    };
    if let Some(name) = names.iter().find(is_database) {
        return Err(Error::new(
            Kind::Corruption,
            format!(
                "{}: there is no CURRENT file, but {name}: the database is damaged, and no new one \
                 is created in its place",
                path.display()
            ),
        ));
    }
    if names.is_empty() {
        return Ok(());
    }
    let more = match names.len().saturating_sub(NAMES_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Err(Error::new(
        Kind::NoDatabase,
        format!(
            "{}: cannot create a database: the directory is not empty: it has {}{more}",
            path.display(),
            names[..names.len().min(NAMES_MAX)].join(", ")
        ),
    ))
}

/// Whether an open database may be written to. Returns warnings.
///
/// # Errors
/// [`Kind::Older`] if `adopt` would allow it; otherwise [`Kind::Unsupported`] or
/// [`Kind::Corruption`] with the name of the obstacle.
pub(crate) fn check(found: &Found<'_>, consent: Consent) -> Result<Vec<String>> {
    let refused = |kind, what: String| {
        let text = format!(
            "{}: cannot open for writing: {what}; nothing was changed, and millrace serve \
             --read-only serves everything that can be read",
            found.path.display()
        );
        Err(Error::new(kind, text))
    };
    let unsupported = |what: String| refused(Kind::Unsupported, what);
    if let Some(what) = &found.lost_end {
        let repair = "millrace kv check --repair makes a new one from the tables";
        return refused(Kind::Corruption, format!("{what}: {repair}"));
    }
    if let Some(what) = found.obstacle() {
        return unsupported(what);
    }
    if let Some(what) = damaged_options(found) {
        return unsupported(what);
    }
    if let Some(what) = found.used_up() {
        return unsupported(what);
    }
    if let Some(what) = found.choice_of_database() {
        return unsupported(what);
    }
    if let Some(what) = found.families.iter().find_map(|family| found.choice_of_family(family)) {
        return unsupported(what);
    }
    for slot in found.slots.iter() {
        let Slot::Broken { error, .. } = slot else { continue };
        // A damaged table stays in the MANIFEST as it is, and stops only its range of keys.
        if error.kind() != Kind::Corruption {
            return refused(error.kind(), error.to_string());
        }
    }
    if let Some(family) = found.families.iter().find(|family| found.unread.contains(&family.id)) {
        return unsupported(format!(
            "writes to column family {} are only in the logs, and its comparator {} is unknown \
             here: they would be lost with the logs. Flush it with RocksDB first",
            family.name, family.comparator_name
        ));
    }
    if let Some(error) = found.families.iter().find_map(|family| match family.id {
        0 => family.refused.as_ref(),
        _ => None,
    }) {
        return refused(error.kind(), error.to_string());
    }
    if let Some(what) = found.unknown_writer().filter(|_| !consent.adopt) {
        return Err(Error::new(Kind::Older, format!("{}: {what}", found.path.display())));
    }
    Ok(found.families.iter().filter_map(|family| found.filter(family)).collect())
}

/// Refuses a truncated OPTIONS file: missing options would be taken for defaults.
fn damaged_options(found: &Found<'_>) -> Option<String> {
    let name = found.stored_options.name.as_ref()?;
    let families = found.families.iter().map(|family| family.name.as_str());
    let lacks = found.stored_options.lacks(families)?;
    Some(format!(
        "{name} {lacks}. Open and close the database with RocksDB to write a new one; without \
         {name} the previous OPTIONS file applies"
    ))
}

impl Found<'_> {
    /// An obstacle in the place of a file that is read or will be written.
    fn obstacle(&self) -> Option<String> {
        let mut draft = self.entries.iter().filter(|entry| entry.name == CURRENT_DRAFT);
        if draft.any(|entry| entry.is_dir) {
            return Some(format!(
                "{CURRENT_DRAFT} is a directory, but CURRENT is replaced through a file of that name: move it away"
            ));
        }
        self.unreadable_blobs.first().map(|blob| format!("its values cannot be read: {blob}"))
    }

    /// Refuses when numbers or sequences are nearly used up. New files get larger numbers than all
    /// existing ones, and nobody has written this many files: the cause is a stray file or damage.
    fn used_up(&self) -> Option<String> {
        let is_last = |number: u64| number >= NUMBERS_END;
        let mut names = self.entries.iter().map(|entry| &entry.name);
        if let Some(name) =
            names.find(|name| FileName::parse(name).and_then(FileName::number).is_some_and(is_last))
        {
            return Some(format!(
                "new files would get larger numbers than {name}, but numbers of logs have 32 bits: move it \
                 away if it is not the database's"
            ));
        }
        let next = self.manifest.next_number();
        if is_last(next) {
            return Some(format!(
                "the MANIFEST says that new files get numbers from {next} on, but numbers of logs have 32 \
                 bits: it is damaged, or files of another database were put into this one"
            ));
        }
        (self.last_sequence >= SEQUENCES_END).then(|| {
            format!(
                "the last write has sequence {}, but sequences have 56 bits: a MANIFEST or a log is damaged",
                self.last_sequence
            )
        })
    }

    /// An obstacle in the options of the whole database.
    fn choice_of_database(&self) -> Option<String> {
        let is_true =
            |key: &str| self.stored_options.db(key).and_then(option_value::flag) == Some(true);
        if let Some(option) = self.stored_options.unparsable(None) {
            return Some(format!("{option} cannot be understood: correct it in the OPTIONS file"));
        }
        if self.entries.iter().any(|entry| entry.name == OLD_BLOBS && entry.is_dir) {
            return Some(format!(
                "{OLD_BLOBS} belongs to the old kind of BlobDB, which is not supported"
            ));
        }
        if let Some(named) = self.stored_options.db("wal_dir") {
            let own = Path::new(named) == self.path;
            if self.logs_at == LogsAt::Elsewhere {
                return Some(format!("its logs are in another directory (wal_dir={named})"));
            }
            if !self.stored_options.is_older() {
                return Some(match own {
                    true => "db_paths puts its tables into another directory (RocksDB writes \
                             wal_dir, the directory itself, into OPTIONS only then)"
                        .to_owned(),
                    false => format!(
                        "wal_dir={named} is not this directory: open the database with RocksDB \
                         once where it is now, without wal_dir"
                    ),
                });
            }
        }
        if is_true("allow_ingest_behind") {
            return Some("allow_ingest_behind reserves its last level".into());
        }
        if is_true("allow_2pc") && self.prepared.is_some() {
            return self.prepared.clone();
        }
        None
    }

    /// An obstacle in a family's options.
    fn choice_of_family(&self, family: &Family) -> Option<String> {
        let name = &family.name;
        let says = |key: &str| self.stored_options.family(name, key);
        let timestamps = self
            .manifest
            .column_families
            .get(&family.id)
            .is_some_and(|family| !family.timestamps_persisted || family.has_low_timestamp);
        if timestamps || family.comparator_name.ends_with(".u64ts") {
            return Some(format!("keys of column family {name} have user-defined timestamps"));
        }
        if let Some(factory) = says("table_factory")
            && !["BlockBasedTable", "AdaptiveTableFactory"].contains(&factory)
        {
            return Some(format!(
                "column family {name} has tables of another format (table_factory={factory})"
            ));
        }
        if says("compaction_filter_factory").is_some_and(|filter| filter.contains("BlobIndex")) {
            return Some(format!("column family {name} belongs to the old kind of BlobDB"));
        }
        if let Err(what) = TableOptions::read(self.stored_options, name) {
            return Some(what);
        }
        if let Some(option) = self.stored_options.unparsable(Some(name)) {
            return Some(format!(
                "column family {name}: {option} cannot be understood: correct it in the OPTIONS \
                 file"
            ));
        }
        let levels = self.stored_options.levels(name);
        if levels > LEVELS_MAX as usize {
            return Some(format!(
                "column family {name} has {levels} levels (num_levels), but at most {LEVELS_MAX} \
                 are supported"
            ));
        }
        if says("cf_allow_ingest_behind").and_then(option_value::flag) == Some(true) {
            return Some(format!("cf_allow_ingest_behind reserves the last level of {name}"));
        }
        if let Some(wanted) = self.merge_operator.filter(|_| family.id == 0)
            && let Some(other) = family.merge.other_than(wanted)
        {
            return Some(format!(
                "column family {name} has the merge operator {other}, not {}",
                wanted.to_option()
            ));
        }
        match says("compaction_style") {
            Some("kCompactionStyleFIFO") => Some(format!(
                "column family {name} has FIFO compaction (compaction_style), which drops the \
                 oldest tables instead of merging: that is not supported"
            )),
            Some(style) if levels < 2 => Some(format!(
                "column family {name} has one level (num_levels=1, compaction_style={style}), \
                 but nothing is merged within one level here"
            )),
            _ => None,
        }
    }

    /// A warning about a filter that this engine does not have.
    fn filter(&self, family: &Family) -> Option<String> {
        if family.filter.is_some() {
            return None;
        }
        let keys = ["compaction_filter_factory", "compaction_filter"];
        let said = keys.iter().find_map(|key| self.stored_options.family(&family.name, key))?;
        Some(format!(
            "column family {}: its compaction filter {said} is not applied here: entries that it \
             would remove stay until RocksDB compacts",
            family.name
        ))
    }

    /// Why it is not certain that we or RocksDB 7.8 or newer wrote the database last.
    fn unknown_writer(&self) -> Option<String> {
        let (major, minor) = OLDEST;
        let then = format!(
            "only RocksDB {major}.{minor} and newer read what is written here, not older versions \
             or LevelDB"
        );
        let file = self.stored_options.file.as_ref();
        match file.and_then(|file| file.rocksdb_version()) {
            Some(version) if self.stored_options.is_older() => {
                Some(format!("RocksDB {version} wrote this database last, but {then}"))
            }
            Some(_) => None,
            None if self.manifest.ours => None,
            None => Some(format!(
                "no OPTIONS file says which program wrote this database, perhaps an older RocksDB or \
                 LevelDB, but {then}"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(names: &[&str]) -> Vec<DirEntry> {
        let entry = |name: &&str| DirEntry {
            name: (*name).to_owned(),
            size: 1,
            is_dir: false,
            is_link: false,
        };
        names.iter().map(entry).collect()
    }

    #[test]
    fn only_an_empty_directory_becomes_a_database() {
        let may = |names: &[&str]| may_create(Path::new("/x"), &entries(names));
        for nothing in [&[][..], &["lost+found"], &["LOCK"], &NOTHING] {
            may(nothing).unwrap();
        }
        let error = may(&["a", "b", "c", "d", "e", "f"]).unwrap_err();
        assert_eq!(error.kind(), Kind::NoDatabase);
        assert!(error.to_string().contains("it has a, b, c, d and 2 more"), "{error}");
        for database in
            ["000004.log", "000005.sst", "000005.ldb", "OPTIONS-000007", "MANIFEST-000002"]
        {
            let error = may(&[database]).unwrap_err();
            assert_eq!(error.kind(), Kind::Corruption, "{error}");
            assert!(error.to_string().contains(database), "{error}");
        }
        may(&["LOG"]).unwrap_err();
    }

    /// A directory with one family, its OPTIONS file changed by `edit` (one or more lines), and
    /// logs 4 to 9; those from 6 on are needed.
    fn asked(version: &str, edit: &str, logs_at: LogsAt, consent: Consent) -> Result<Vec<String>> {
        let mut replay = rocksfmt::ManifestReplay::new();
        let edit_builder = rocksfmt::testing::EditBuilder::new;
        replay.record(&edit_builder().required(6, 50, 100).finish()).unwrap();
        replay.record(&edit_builder().numbers(10, &[5]).finish()).unwrap();
        let manifest = replay.finish().unwrap();
        let (database, family) = match edit.contains("compaction") || edit.contains("cf_") {
            true => ("", edit),
            false => (edit, ""),
        };
        let text = format!(
            "[Version]\nrocksdb_version={version}\n[DBOptions]\n{database}\n\
             [CFOptions \"default\"]\n{family}\n[TableOptions/BlockBasedTable \"default\"]\n"
        );
        let stored_options = StoredOptions {
            name: Some("OPTIONS-000007".into()),
            file: Some(rocksfmt::OptionsFile::parse(text.as_bytes())),
            unreadable: None,
            is_own: false,
        };
        let family = Family {
            id: 0,
            name: "default".into(),
            comparator_name: "leveldb.BytewiseComparator".into(),
            comparator: rocksfmt::Comparator::Bytewise,
            refused: None,
            mems: Vec::new(),
            levels: Vec::new(),
            options: std::sync::Arc::default(),
            blobs: Vec::new(),
            merge: Default::default(),
            filter: None,
            table_options: std::sync::Arc::default(),
        };
        let found = Found {
            path: Path::new("/x"),
            entries: &entries(&["000004.log", "000006.log", "000009.log"]),
            stored_options: &stored_options,
            logs_at,
            manifest: &manifest,
            last_sequence: 100,
            families: &[family],
            slots: &Slots::default(),
            unreadable_blobs: &[],
            merge_operator: None,
            unread: &BTreeSet::new(),
            prepared: None,
            lost_end: None,
        };
        check(&found, consent)
    }

    const NO: Consent = Consent { adopt: false };
    const ADOPT: Consent = Consent { adopt: true };

    #[test]
    fn choices_are_refused_by_name() {
        use LogsAt::{Elsewhere, Here};
        for (version, edit, logs_at, consent, text) in [
            ("7.8.3", "wal_dir=/y", Elsewhere, ADOPT, "another directory (wal_dir=/y)"),
            ("7.8.3", "wal_dir=/y", Here, ADOPT, "wal_dir=/y is not this directory"),
            ("7.8.3", "wal_dir=/x/", Here, ADOPT, "db_paths puts its tables"),
            ("6.2.0", "wal_dir=/y", Elsewhere, ADOPT, "another directory (wal_dir=/y)"),
            ("6.2.0", "wal_dir=/x", Here, NO, "RocksDB 6.2.0 wrote this database last"),
            ("8.0.0", "allow_ingest_behind=true", Here, ADOPT, "allow_ingest_behind"),
            ("8.0.0", "cf_allow_ingest_behind=true", Here, ADOPT, "cf_allow_ingest_behind"),
            ("8.0.0", "compaction_style=kCompactionStyleFIFO", Here, ADOPT, "FIFO"),
            ("8.0.0", "compaction_style=kNew", Here, ADOPT, "compaction_style=kNew"),
            ("8.0.0", "max_compaction_bytes=abc", Here, ADOPT, "max_compaction_bytes=abc"),
            ("8.0.0", "num_levels=257\nmax_compaction_bytes=0", Here, ADOPT, "257 levels"),
            ("8.0.0", "allow_2pc=maybe", Here, ADOPT, "allow_2pc=maybe"),
            (
                "8.0.0",
                "compaction_style=kCompactionStyleUniversal\nnum_levels=1",
                Here,
                ADOPT,
                "num_levels=1",
            ),
            (
                "8.0.0",
                "compaction_filter_factory={id=BlobIndexCompactionFilterFactory;}",
                Here,
                ADOPT,
                "old kind of BlobDB",
            ),
        ] {
            let error = asked(version, edit, logs_at, consent).unwrap_err();
            assert!(error.to_string().contains(text), "{edit}: {error}");
            assert!(error.to_string().starts_with("/x: "), "{error}");
        }
    }

    #[test]
    fn harmless_choices_are_accepted() {
        for (version, edit, consent) in [
            ("7.8.3", "", NO),
            ("6.2.0", "wal_dir=/x", ADOPT),
            ("6.2.0", "wal_dir=/the/original", ADOPT),
            ("8.0.0", "compaction_style=kCompactionStyleUniversal\nnum_levels=2", NO),
            ("8.0.0", "compaction_style=kCompactionStyleLevel\nnum_levels=7", NO),
        ] {
            assert_eq!(asked(version, edit, LogsAt::Here, consent).unwrap(), [""; 0], "{edit}");
        }
        let warned = asked("8.0.0", "compaction_filter=mine", LogsAt::Here, NO).unwrap();
        assert!(warned[0].contains("compaction filter mine"), "{warned:?}");
    }
}
