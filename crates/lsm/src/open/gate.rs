//! May we write to this directory, and how? Every opening for writing asks here, before the first
//! byte of the directory changes, LOCK included.
//!
//! 1. [`may_create`] looks at a directory without CURRENT: only an empty one becomes a database.
//! 2. [`check`] looks at one that was opened as for reading: its OPTIONS, its MANIFEST, the tables
//!    and the logs. It refuses by name what would be lost, or what RocksDB would not open or not
//!    find afterwards. `docs/DIRECTORIES.md` has the table of these rules; `e2e/test_gate.py` makes
//!    a directory for each.
//!
//! What is obeyed without a word: column families, comparators that we know, `num_levels` and
//! universal compaction as long as there is a level below 0, blob files, compressed, recycled and
//! tracked logs, `atomic_flush` (every write is in the log, and all families are recovered from it
//! to the same sequence). What does not change the files is not looked at: sizes, rates, caches.
//!
//! Not told by any file: `db_paths` and `cf_paths`. A table in another path than the first has its
//! path in the MANIFEST; tables that are not here are missing. RocksDB 7.8 and newer write
//! `wal_dir` for a database whose first path is not its directory, even where the logs are in it.
//! Of `cf_paths` for a family without tables nothing is known.

use std::collections::BTreeSet;
use std::path::Path;

use fs::DirEntry;
use rocksfmt::{FileName, ManifestState};

use crate::error::{Error, Kind, Result};
use crate::open::choices::{Choices, OLDEST};
use crate::open::create::CURRENT_DRAFT;
use crate::version::{Family, Slot};

/// What an interrupted creation of a database leaves behind, and what a file system's root has.
const NOTHING: [&str; 7] = [
    "LOCK",
    "IDENTITY",
    "IDENTITY.dbtmp",
    "MANIFEST-000001",
    "MANIFEST-000001.dbtmp",
    "CURRENT.dbtmp",
    "lost+found",
];
/// Names that an error shows.
const NAMES_MAX: usize = 4;
/// The first number that no file may have where new ones are to be made. RocksDB tells a log's
/// records by the lower 32 bits of the log's number; a writer has this many numbers left at least.
const NUMBERS_END: u64 = (1 << 32) - (1 << 24);
/// The same of sequences, which have 56 bits.
const SEQUENCES_END: u64 = (1 << 56) - (1 << 40);
/// Where the old kind of BlobDB keeps its files.
const OLD_BLOBS: &str = "blob_dir";

/// What is known of a directory that was opened.
pub(crate) struct Found<'a> {
    pub path: &'a Path,
    pub entries: &'a [DirEntry],
    pub choices: &'a Choices,
    /// Where `wal_dir` leads.
    pub logs_at: LogsAt,
    pub manifest: &'a ManifestState,
    /// The largest sequence that was found.
    pub last_sequence: u64,
    pub families: &'a [Family],
    pub slots: &'a [Slot],
    /// Live blob files that are there and cannot be opened, and why.
    pub unreadable_blobs: &'a [String],
    /// Column families whose writes are in the logs and in no memtable.
    pub unread: &'a BTreeSet<u32>,
    /// What is known of transactions that are prepared in logs that nobody else needs: see
    /// [`crate::open::recover::prepared`].
    pub prepared: Option<String>,
}

/// What the caller agreed to.
#[derive(Clone, Copy)]
pub(crate) struct Consent {
    /// Write to what RocksDB 7.8 and newer did not write last.
    pub adopt: bool,
    /// Give up what cannot be read.
    pub salvage: bool,
}

/// The directory that `wal_dir` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogsAt {
    /// The database's own, or that of the database it was copied from; or there is none.
    Here,
    /// Another one, which is for logs.
    Elsewhere,
}

/// Whether a database may be made in a directory that has no CURRENT.
///
/// # Errors
/// [`Kind::NoDatabase`], with some of what is there.
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
                "{}: there is no CURRENT file, but {name} and perhaps more: a damaged database, in \
                 whose place none is made",
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
            "{}: no database is made here, because the directory is not empty: it has {}{more}",
            path.display(),
            names[..names.len().min(NAMES_MAX)].join(", ")
        ),
    ))
}

/// Whether an open database may be written to. Returns warnings.
///
/// # Errors
/// [`Kind::Older`] for what `adopt` would allow; [`Kind::Unsupported`] or [`Kind::Corruption`] with
/// the name of what is in the way.
pub(crate) fn check(found: &Found<'_>, consent: Consent) -> Result<Vec<String>> {
    let refused = |kind, what: String| {
        let text = format!(
            "{}: not opened for writing: {what}; nothing was changed, and --read-only serves what can \
             be read",
            found.path.display()
        );
        Err(Error::new(kind, text))
    };
    let unsupported = |what: String| refused(Kind::Unsupported, what);
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
    for slot in found.slots {
        let Slot::Broken { error, .. } = slot else { continue };
        match error.kind() {
            Kind::Corruption if consent.salvage => {}
            kind => return refused(kind, error.to_string()),
        }
    }
    if let Some(family) = found.families.iter().find(|family| found.unread.contains(&family.id)) {
        return unsupported(format!(
            "writes to column family {} are only in the logs, and its comparator {} is not known \
             here: they would go with the logs. Flush it with RocksDB first",
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

/// An OPTIONS file that is cut would be taken for one with the default of all that it lacks.
fn damaged_options(found: &Found<'_>) -> Option<String> {
    let name = found.choices.name.as_ref()?;
    let families = found.families.iter().map(|family| family.name.as_str());
    let lacks = found.choices.lacks(families)?;
    Some(format!(
        "{name} {lacks}. Opening and closing the database with RocksDB writes a new one; without \
         {name} the OPTIONS file before it counts"
    ))
}

impl Found<'_> {
    /// What stands in the place of a file that is read, or that will be written.
    fn obstacle(&self) -> Option<String> {
        let mut draft = self.entries.iter().filter(|entry| entry.name == CURRENT_DRAFT);
        if draft.any(|entry| entry.is_dir) {
            return Some(format!(
                "{CURRENT_DRAFT} is a directory, and CURRENT is replaced through a file of that name: move it away"
            ));
        }
        self.unreadable_blobs.first().map(|blob| format!("its values cannot be read: {blob}"))
    }

    /// Numbers or sequences that there are too few of. New files get numbers after all that are
    /// there, and nobody wrote so many files: a stray file or damage says so.
    fn used_up(&self) -> Option<String> {
        let is_last = |number: u64| number >= NUMBERS_END;
        let mut names = self.entries.iter().map(|entry| &entry.name);
        if let Some(name) =
            names.find(|name| FileName::parse(name).and_then(FileName::number).is_some_and(is_last))
        {
            return Some(format!(
                "new files would have larger numbers than {name}, and those of logs end at 32 bits: move it \
                 away if it is not the database's"
            ));
        }
        let next = self.manifest.next_number();
        if is_last(next) {
            return Some(format!(
                "the MANIFEST says that new files have numbers from {next} on, and those of logs end at 32 \
                 bits: it is damaged, or other databases' files were put into this one"
            ));
        }
        (self.last_sequence >= SEQUENCES_END).then(|| {
            format!(
                "the last write has the sequence {}, and they end at 56 bits: a MANIFEST or a log is damaged",
                self.last_sequence
            )
        })
    }

    /// What stands in the way in the options of the database as a whole.
    fn choice_of_database(&self) -> Option<String> {
        let is_true = |key: &str| self.choices.db(key) == Some("true");
        if self.entries.iter().any(|entry| entry.name == OLD_BLOBS && entry.is_dir) {
            return Some(format!(
                "{OLD_BLOBS} is the old kind of BlobDB's, which is not supported"
            ));
        }
        if let Some(named) = self.choices.db("wal_dir") {
            let own = Path::new(named) == self.path;
            if self.logs_at == LogsAt::Elsewhere {
                return Some(format!("its logs are in another directory (wal_dir={named})"));
            }
            if !self.choices.is_older() {
                return Some(match own {
                    true => "db_paths puts its tables into another directory (its OPTIONS name \
                             wal_dir, the directory itself, which RocksDB writes then only)"
                        .to_owned(),
                    false => format!(
                        "wal_dir={named} is not this directory: open it with RocksDB once where it \
                         is now, without wal_dir"
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

    /// What stands in the way in a family's options.
    fn choice_of_family(&self, family: &Family) -> Option<String> {
        let name = &family.name;
        let says = |key: &str| self.choices.family(name, key);
        let timestamps = self
            .manifest
            .column_families
            .get(&family.id)
            .is_some_and(|family| !family.timestamps_persisted);
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
            return Some(format!("column family {name} is the old kind of BlobDB's"));
        }
        if says("cf_allow_ingest_behind") == Some("true") {
            return Some(format!("cf_allow_ingest_behind reserves the last level of {name}"));
        }
        match says("compaction_style") {
            Some("kCompactionStyleFIFO") => Some(format!(
                "column family {name} has FIFO compaction (compaction_style), which drops the \
                 oldest tables instead of merging; that is not supported"
            )),
            Some(style) if self.choices.levels(name) < 2 => Some(format!(
                "column family {name} has one level (num_levels=1, compaction_style={style}), \
                 within which nothing is merged here"
            )),
            _ => None,
        }
    }

    /// A filter that its user has and we have not.
    fn filter(&self, family: &Family) -> Option<String> {
        let keys = ["compaction_filter_factory", "compaction_filter"];
        let said = keys.iter().find_map(|key| self.choices.family(&family.name, key))?;
        Some(format!(
            "column family {}: its compaction filter {said} is not applied here: what it would \
             remove stays until RocksDB compacts",
            family.name
        ))
    }

    /// Why it is not known that RocksDB 7.8 or newer, or we, wrote it last.
    fn unknown_writer(&self) -> Option<String> {
        let (major, minor) = OLDEST;
        let then = format!(
            "what is written here is read by RocksDB {major}.{minor} and newer only, not by older \
             ones nor by LevelDB"
        );
        let file = self.choices.file.as_ref();
        match file.and_then(|file| file.rocksdb_version()) {
            Some(version) if self.choices.is_older() => {
                Some(format!("RocksDB {version} wrote this database last, and {then}"))
            }
            Some(_) => None,
            None if self.manifest.ours => None,
            None => Some(format!(
                "there is no OPTIONS file that says who wrote this database, an older RocksDB or \
                 LevelDB perhaps, and {then}"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(names: &[&str]) -> Vec<DirEntry> {
        let entry = |name: &&str| DirEntry { name: (*name).to_owned(), size: 1, is_dir: false };
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

    /// A directory with one family, its OPTIONS file changed by `edit` (a line, or several), and
    /// logs 4 to 9, of which those from 6 on count.
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
        let choices = Choices {
            name: Some("OPTIONS-000007".into()),
            file: Some(rocksfmt::OptionsFile::parse(text.as_bytes())),
            unreadable: None,
        };
        let family = Family {
            id: 0,
            name: "default".into(),
            comparator_name: "leveldb.BytewiseComparator".into(),
            comparator: rocksfmt::Comparator::Bytewise,
            refused: None,
            mems: Vec::new(),
            levels: Vec::new(),
            blobs: Vec::new(),
            merge_operator: String::new(),
        };
        let found = Found {
            path: Path::new("/x"),
            entries: &entries(&["000004.log", "000006.log", "000009.log"]),
            choices: &choices,
            logs_at,
            manifest: &manifest,
            last_sequence: 100,
            families: &[family],
            slots: &[],
            unreadable_blobs: &[],
            unread: &BTreeSet::new(),
            prepared: None,
        };
        check(&found, consent)
    }

    const NO: Consent = Consent { adopt: false, salvage: false };
    const ADOPT: Consent = Consent { adopt: true, salvage: false };

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
    fn what_is_no_obstacle_is_let_through() {
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
