//! Makes a damaged directory a database again: `millrace kv check --repair`.
//!
//! 1. The state is that of the MANIFEST, if one can be read and has not lost its end
//!    (`open::unnamed`). Otherwise it is rebuilt from the tables (`rebuild`): they go into levels
//!    by their sequences (`place`), and those that have no order are merged first.
//! 2. What is missing, or cannot be opened, leaves the state. A table with some damaged blocks
//!    stays: it stops only the keys in them. A blob file whose end alone is damaged is written
//!    again (`blobs`).
//! 3. Logs stay as they are, if they can be replayed on the state. Otherwise they become tables
//!    (`logs`), each up to its first damage.
//! 4. The files that leave the state get a second name in the directory `lost`.
//! 5. A new MANIFEST is written, and CURRENT is replaced: before that nothing has changed that a
//!    reader or another repair sees, after that the repair is done. Then obsolete files are
//!    removed.
//! 6. The directory is opened as for writing, without a change: only then the repair succeeded.
//!
//! The number of the first file that a repair makes is in the file `REPAIR` until it is done. After
//! a crash the next repair removes these files: their entries are also in the files that they were
//! made of.
//!
//! Nothing is changed if the directory is locked, or has something that `gate` refuses.

mod blobs;
mod find;
mod logs;
mod merge;
mod place;
mod rebuild;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::Ordering;

use fs::{Dir, DirEntry, LockGuard};
use reactor::Core;
use rocksfmt::{ColumnFamily, FileMeta, FileName, ManifestState};

use crate::db::Db;
use crate::error::{Error, Kind, Result};
use crate::inspect::check::blob_records::BlobRecords;
use crate::inspect::check::{Check, Damage};
use crate::inspect::repair::blobs::LostEnd;
use crate::inspect::repair::find::Found;
use crate::mutant::mutant;
use crate::open::blob_tails::{self, BlobTails};
use crate::open::create::{self, JOURNAL};
use crate::open::directory::lock_shared;
use crate::open::gate::Consent;
use crate::open::load::{Loaded, Loader};
use crate::open::recover;
use crate::open::recovery_plan::{Listed, PlannedLog, RecoveryPlan, first_log};
use crate::options::{OpenOptions, WriteOptions};
use crate::stored_options::{self, StoredOptions};
use crate::version::{Slot, user_key};
use crate::write::job::{Job, MadeFiles, remove_made};
use crate::write::manifest_writer::ManifestWriter;
use crate::write::pace::BusyTime;

/// The directory for files that a repair drops.
const LOST: &str = "lost";
const MISSING_BLOB: &str = "it is missing, with the values in it: their keys stay, and reads of them \
     return an error";
/// Most names that one lost file may get.
const NAMES_MAX: u32 = 1000;

/// Something that a repair drops.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loss {
    /// Name of the file.
    pub file: String,
    /// What is wrong with it, or what of it is lost.
    pub what: String,
    /// Its column family, if known.
    pub column_family: Option<String>,
    /// Its smallest and its largest user key, if known: keys between them may be lost, or have an
    /// older value.
    pub keys: Option<(Vec<u8>, Vec<u8>)>,
    /// Its entries, if known.
    pub entries: Option<u64>,
}

/// The result of a repair.
#[derive(Clone, Debug, Default)]
pub struct RepairReport {
    /// The directory was changed, or would be without `dry_run`.
    pub needed: bool,
    /// No MANIFEST can be read: why.
    pub rebuilt: Option<String>,
    /// Tables of the repaired database.
    pub tables: u64,
    /// Bytes of tables that are merged, because their order is not known.
    pub merged_bytes: u64,
    /// Logs that become tables.
    pub logs: u64,
    /// What is dropped.
    pub lost: Vec<Loss>,
    /// Damaged blocks in tables that stay: reads of their keys return an error.
    pub damages: Vec<Damage>,
    /// What else a user should know.
    pub warnings: Vec<String>,
}

/// Repairs the database in `path`; with `dry_run` only says what would be done. Calls `progress`
/// from time to time with the bytes read and the total bytes. Suspends for the disk.
///
/// # Errors
/// [`Kind::NoDatabase`], [`Kind::Locked`], [`Kind::Unsupported`] and errors of the device. Unless
/// CURRENT was replaced already, the directory holds what it held before.
pub async fn repair(
    core: &Core,
    path: &Path,
    options: &OpenOptions,
    dry_run: bool,
    mut progress: impl FnMut(u64, u64),
) -> Result<RepairReport> {
    let dir = Dir::new(core, path);
    let entries = list(&dir).await?;
    let is_database = |entry: &DirEntry| {
        use FileName::{Manifest, Sst, Wal};
        entry.name == "CURRENT"
            || matches!(FileName::parse(&entry.name), Some(Manifest(_) | Sst(_) | Wal(_)))
    };
    if !entries.iter().any(is_database) {
        let text = format!("{}: no RocksDB database here, and nothing of one", path.display());
        return Err(Error::new(Kind::NoDatabase, text));
    }
    let has_lock = entries.iter().any(|entry| entry.name == "LOCK");
    if !has_lock {
        // A directory that is refused, or whole, stays without a LOCK file.
        let report = Repair::new(core, &dir, options, true, &mut progress).run(None).await?;
        if dry_run || !report.needed {
            return Ok(report);
        }
    }
    let lock = match dry_run {
        true => lock_shared(&dir).await?,
        false => create::lock(&dir).await?,
    };
    Repair::new(core, &dir, options, dry_run, &mut progress).run(Some(lock)).await
}

async fn list(dir: &Dir) -> Result<Vec<DirEntry>> {
    let listed = dir.list().await;
    if listed.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
        let text = format!("{}: no such directory", dir.path().display());
        return Err(Error::new(Kind::NoDatabase, text));
    }
    listed.map_err(|e| Error::io(format_args!("cannot list {}", dir.path().display()), &e))
}

/// A repair at work.
struct Repair<'a> {
    core: &'a Core,
    options: &'a OpenOptions,
    dry_run: bool,
    entries: Vec<DirEntry>,
    dir: Dir,
    stored_options: StoredOptions,
    /// The references of tables to each blob file, if the MANIFEST is rebuilt.
    references: BTreeMap<u64, u64>,
    /// Blob files that get a new end.
    lost_ends: Vec<LostEnd>,
    /// Damaged OPTIONS files, which are in no listing any more.
    damaged_options: Vec<String>,
    /// Tables and blob files that the MANIFEST does not name, if it is used.
    unnamed: Vec<String>,
    report: RepairReport,
    progress: &'a mut dyn FnMut(u64, u64),
    /// No file has this number or a larger one.
    next_number: u64,
    /// Bytes read, and the total.
    done: u64,
    total: u64,
}

impl<'a> Repair<'a> {
    fn new(
        core: &'a Core,
        dir: &Dir,
        options: &'a OpenOptions,
        dry_run: bool,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Repair<'a> {
        Repair {
            core,
            options,
            dry_run,
            entries: Vec::new(),
            dir: dir.clone(),
            stored_options: StoredOptions::default(),
            references: BTreeMap::new(),
            lost_ends: Vec::new(),
            damaged_options: Vec::new(),
            unnamed: Vec::new(),
            report: RepairReport::default(),
            progress,
            next_number: 0,
            done: 0,
            total: 0,
        }
    }

    async fn run(mut self, lock: Option<LockGuard>) -> Result<RepairReport> {
        self.repair(lock).await?;
        Ok(self.report)
    }

    async fn repair(&mut self, lock: Option<LockGuard>) -> Result<()> {
        if !self.dry_run {
            // After a power cut names must be as they are now: that of the MANIFEST in CURRENT, if
            // a repair was killed after it had replaced CURRENT, and those of obsolete tables that
            // were renamed.
            let synced = self.dir.sync().await;
            synced.map_err(|e| Error::io(self.dir.path().display(), &e))?;
        }
        self.entries = list(&self.dir).await?;
        self.remove_unfinished().await?;
        self.choose_options(&[]).await?;
        let numbers = self.entries.iter().filter_map(|e| FileName::parse(&e.name)?.number());
        self.next_number = numbers.fold(1, |next, number| next.max(number.saturating_add(1)));
        let tables = self.entries.iter().filter(|e| {
            matches!(FileName::parse(&e.name), Some(FileName::Sst(_) | FileName::Blob(_)))
        });
        self.total = tables.map(|entry| entry.size).sum();
        let found = find::manifest(self.core, &self.dir, &self.entries).await?;
        let (current, mut state, is_rebuilt) = match found {
            Found::Manifest { number, state, why } => {
                self.report.needed |= why.is_some();
                self.report.warnings.extend(why);
                let mut state = *state;
                self.unnamed = self.gone(&state);
                self.unnamed.retain(|name| {
                    matches!(FileName::parse(name), Some(FileName::Sst(_) | FileName::Blob(_)))
                });
                self.drop_unreadable(&mut state).await?;
                self.relink(&mut state);
                (number, state, false)
            }
            Found::Nothing { why, known } => {
                self.report.needed = true;
                self.report.rebuilt = Some(why);
                let state = self.state_of_files(known.as_deref()).await?;
                let (listed, tails) =
                    (self.listed(), blob_tails::read(self.core, &self.dir, &state).await?);
                for family in state.column_families.values() {
                    self.blob_files(family, &listed, &tails).await;
                    self.lost_ends(family, &tails).await;
                }
                (0, state, true)
            }
        };
        let names: Vec<String> =
            state.column_families.values().map(|family| family.name.clone()).collect();
        self.choose_options(&names).await?;
        self.next_number = self.next_number.max(state.next_number());
        state.next_file_number = self.next_number;
        let db = self.load(current, &state, lock).await?;
        self.report.tables = state.column_families.values().map(|f| f.files().count() as u64).sum();
        let logs = self.logs(&state).await?;
        if !is_rebuilt && logs.is_empty() && !self.report.needed {
            return Ok(());
        }
        self.report.needed = true;
        self.report.logs = logs.len() as u64;
        if !self.dry_run {
            let text = format!("{}\n", self.next_number);
            let noted = self.dir.write_small_atomically(JOURNAL, text.as_bytes()).await;
            noted.map_err(|e| Error::io(JOURNAL, &e))?;
        }
        db.0.next_file.store(self.next_number + 1, Ordering::Relaxed);
        let job = self.job(&db);
        let made = self.make(&job, &mut state, &logs, is_rebuilt).await;
        if self.dry_run {
            return made;
        }
        if let Err(error) = made {
            remove_made(&self.dir, job.made.take().into_iter()).await;
            drop(self.dir.remove(JOURNAL).await);
            return Err(error);
        }
        self.write_ends().await?;
        self.install(current, &state, &db).await?;
        self.open_again().await
    }

    /// Opens the repaired directory as a writer does, so that a repair is never said to have
    /// succeeded when it has not. Nothing is changed.
    async fn open_again(&self) -> Result<()> {
        let consent = Consent { adopt: true };
        let loader = Loader::new(self.core, &self.dir, self.options, Some(consent));
        let opened = loader.load(None).await;
        let explain = |error: Error| {
            let what = format!("repaired, but the directory does not open: {error}");
            Error::new(error.kind(), what)
        };
        opened.map(drop).map_err(explain)
    }

    /// Removes the files that an unfinished repair has made.
    async fn remove_unfinished(&mut self) -> Result<()> {
        let io = |e: std::io::Error| Error::io(JOURNAL, &e);
        if !self.entries.iter().any(|entry| entry.name == JOURNAL) || self.dry_run {
            return Ok(());
        }
        let text = self.dir.read_small(JOURNAL, 64).await.map_err(io)?;
        let first: Option<u64> = String::from_utf8_lossy(&text).trim().parse().ok();
        // If CURRENT was replaced, the files are the database's. A writer that opens it makes
        // files of other kinds, too.
        let current = recover::current(&self.dir).await.ok();
        let was_opened = |first: u64| {
            self.entries.iter().any(|entry| match FileName::parse(&entry.name) {
                Some(FileName::Sst(_) | FileName::Manifest(_)) | None => false,
                Some(other) => other.number().is_some_and(|number| number >= first),
            })
        };
        let ignores = mutant("current_is_not_asked");
        let first = first.filter(|&first| ignores || current.is_none_or(|current| current < first));
        if let Some(first) = first.filter(|&first| !was_opened(first)) {
            for entry in &self.entries {
                let made = match FileName::parse(&entry.name) {
                    Some(FileName::Sst(number) | FileName::Manifest(number)) => number >= first,
                    _ => false,
                };
                if made {
                    self.dir.remove(&entry.name).await.map_err(|e| Error::io(&entry.name, &e))?;
                }
            }
            self.dir.sync().await.map_err(io)?;
        }
        self.dir.remove(JOURNAL).await.map_err(io)?;
        self.entries = list(&self.dir).await?;
        Ok(())
    }

    /// Takes the newest OPTIONS file that is whole; those after it are lost. Without families, it
    /// must have all options of those that it names.
    async fn choose_options(&mut self, families: &[String]) -> Result<()> {
        loop {
            let stored = StoredOptions::read(&self.dir, &self.entries).await?;
            let own = stored.file.iter().flat_map(|file| file.column_family_names());
            let families = families.iter().map(String::as_str).chain(own);
            let damaged = stored.name.clone().zip(stored.lacks(families.chain(["default"])));
            let Some((name, lacks)) = damaged else {
                self.stored_options = stored;
                return Ok(());
            };
            self.entries.retain(|entry| entry.name != name);
            self.damaged_options.push(name.clone());
            let what = match stored_options::newest(&self.entries) {
                Some(older) => format!("it {lacks}: {older} applies instead, if it is whole"),
                None => format!(
                    "it {lacks}: the defaults of RocksDB apply instead, with the comparators of the \
                     MANIFEST and the merge operators that tables name"
                ),
            };
            self.lose(Loss { file: name, what, ..Loss::default() });
        }
    }

    fn lose(&mut self, loss: Loss) {
        self.report.needed = true;
        self.report.lost.push(loss);
    }

    /// Takes out of a MANIFEST's state what is missing or cannot be opened.
    async fn drop_unreadable(&mut self, state: &mut ManifestState) -> Result<()> {
        let listed = self.listed();
        let tails = blob_tails::read(self.core, &self.dir, state).await?;
        for family in state.column_families.values_mut() {
            let Ok(comparator) = family.comparator() else { continue };
            let name = family.name.clone();
            let records = self.blob_files(family, &listed, &tails).await;
            self.lost_ends(family, &tails).await;
            for level in &mut family.levels {
                let mut kept = Vec::new();
                for meta in level.drain(..) {
                    if meta.path_id != 0 {
                        // The plan of the opening refuses it.
                        kept.push(meta);
                        continue;
                    }
                    let entry = listed.iter().find(|file| is_table(&file.name, meta.number));
                    let what = match entry {
                        None => Some("it is missing".to_owned()),
                        Some(file) => self.verify(&file.name, &meta, comparator, &records).await?,
                    };
                    match what {
                        None => kept.push(meta),
                        Some(what) => self.lose_table(&name, &meta, what),
                    }
                }
                *level = kept;
            }
            let has =
                |number| listed.iter().any(|file| file.name == FileName::Blob(number).to_string());
            let live: Vec<_> = family.live_blob_files().map(|blob| blob.number).collect();
            for number in live.into_iter().filter(|&number| !has(number)) {
                let blob = family.blob_files.remove(&number);
                self.lose(Loss {
                    file: FileName::Blob(number).to_string(),
                    what: MISSING_BLOB.to_owned(),
                    column_family: Some(name.clone()),
                    // One that was left open counts more values than it has.
                    entries: blob
                        .filter(|blob| !blob.is_reserved())
                        .map(|blob| blob.total_count - blob.garbage_count),
                    ..Loss::default()
                });
            }
        }
        let first = first_log(state);
        for (number, synced) in state.wals.split_off(&first) {
            let name = FileName::Wal(number).to_string();
            let what = match listed.iter().find(|file| file.name == name) {
                None => "it is missing, with the writes in it".to_owned(),
                Some(file) if synced.is_some_and(|synced| file.size_bytes < synced) => format!(
                    "it has {} bytes, and had more when it was synced: its last writes",
                    file.size_bytes
                ),
                Some(_) => {
                    state.wals.insert(number, synced);
                    continue;
                }
            };
            self.lose(Loss { file: name, what, ..Loss::default() });
        }
        if !self.report.lost.is_empty() {
            state.keys = None;
        }
        Ok(())
    }

    /// Reads a table. Returns why it cannot be used, if it cannot.
    async fn verify(
        &mut self,
        name: &str,
        meta: &FileMeta,
        comparator: rocksfmt::Comparator,
        records: &BlobRecords,
    ) -> Result<Option<String>> {
        let mut check = Check::new(self.core, &self.dir, self.total, &mut *self.progress);
        check.progress_to(self.done);
        let seen = check.table(name, meta, comparator, Some(records)).await;
        let damages = check.report.damages;
        self.done += meta.size_bytes;
        match seen {
            Ok(_) => {
                self.report.damages.extend(damages);
                Ok(None)
            }
            Err(error) if error.kind() == Kind::Corruption => Ok(Some(error.to_string())),
            Err(error) => Err(error),
        }
    }

    /// Reads the blob files of a family. What is damaged stays.
    pub(super) async fn blob_files(
        &mut self,
        family: &ColumnFamily,
        listed: &[Listed],
        tails: &BlobTails,
    ) -> BlobRecords {
        let mut check = Check::new(self.core, &self.dir, self.total, &mut *self.progress);
        check.blob_tails.clone_from(tails);
        check.progress_to(self.done);
        let records = check.blob_files(family, listed).await;
        let (damages, done) = (check.report.damages, check.done);
        self.report.damages.extend(damages);
        self.done = done;
        records
    }

    fn lose_table(&mut self, family: &str, meta: &FileMeta, what: String) {
        let keys = (meta.smallest_user_key().to_vec(), meta.largest_user_key().to_vec());
        self.lose(Loss {
            file: FileName::Sst(meta.number).to_string(),
            what,
            column_family: Some(family.to_owned()),
            keys: Some(keys),
            entries: None,
        });
    }

    fn listed(&self) -> Vec<Listed> {
        let listed = |entry: &DirEntry| Listed { name: entry.name.clone(), size_bytes: entry.size };
        self.entries.iter().map(listed).collect()
    }

    /// Opens the tables of a state, and asks the gate. No log is read.
    async fn load(
        &self,
        current: u64,
        state: &ManifestState,
        lock: Option<LockGuard>,
    ) -> Result<Db> {
        let mut state = state.clone();
        state.min_log_number_to_keep = self.next_number;
        state.wals.clear();
        let consent = Consent { adopt: true };
        let loader = Loader::new(self.core, &self.dir, self.options, Some(consent));
        let Loaded { db, .. } =
            loader.given(current, state, self.entries.clone()).load(lock).await?;
        let broken = db.version().slots.iter().find_map(|slot| match slot {
            Slot::Broken { error, .. } => Some(error.clone()),
            _ => None,
        });
        broken.map_or(Ok(db), Err)
    }

    /// Links tables to blob files that are there, which keeps these: a MANIFEST has the oldest one
    /// of each table, and those older than the oldest of all tables count as gone. An older
    /// link than necessary is harmless.
    fn relink(&self, state: &mut ManifestState) {
        let is_there = |number: u64| {
            let name = FileName::Blob(number).to_string();
            self.entries.iter().any(|entry| entry.name == name)
        };
        for family in state.column_families.values_mut() {
            let there: BTreeSet<u64> =
                family.blob_files.keys().copied().filter(|&number| is_there(number)).collect();
            // Only logs may refer to one that was left open.
            let left_open = family.blob_files.values().filter(|blob| blob.is_reserved());
            let mut left_open = left_open.map(|blob| blob.number).find(|one| there.contains(one));
            for meta in family.levels.iter_mut().flatten() {
                let linked = meta.oldest_blob_file;
                if linked != 0 {
                    meta.oldest_blob_file = there.range(linked..).next().copied().unwrap_or(0);
                }
                if let Some(oldest) = left_open.take()
                    && (meta.oldest_blob_file == 0 || meta.oldest_blob_file > oldest)
                {
                    meta.oldest_blob_file = oldest;
                }
            }
        }
    }

    /// The logs that must become tables: all, if one of them cannot be replayed, if it is not known
    /// which of their writes are in tables, or if no table is left that keeps a blob file to which
    /// they refer.
    async fn logs(&mut self, state: &ManifestState) -> Result<Vec<PlannedLog>> {
        let plan = RecoveryPlan::new(state, &self.listed())?;
        let unkept = |family: &ColumnFamily| {
            family.files().next().is_none() && !family.blob_files.is_empty()
        };
        if self.report.rebuilt.is_some() || state.column_families.values().any(unkept) {
            return Ok(plan.logs);
        }
        let strict = OpenOptions { salvage: false, ..self.options.clone() };
        let mut plan = RecoveryPlan {
            empty_logs_may_count: self.stored_options.keeps_logs_at_openings(),
            ..plan
        };
        plan.blob_tails = blob_tails::read(self.core, &self.dir, state).await?;
        let piece = async |_| Ok(());
        let mut warnings = Vec::new();
        let replayed =
            recover::logs(self.core, &self.dir, &plan, state, &strict, &mut warnings, piece);
        match replayed.await {
            Ok(_) => Ok(Vec::new()),
            Err(error) if error.kind() == Kind::Corruption => Ok(plan.logs),
            Err(error) => Err(error),
        }
    }

    fn job(&self, db: &Db) -> Job {
        Job {
            core: self.core.clone(),
            dir: self.dir.clone(),
            db: db.clone(),
            compression: WriteOptions::default().compression,
            made: MadeFiles::default(),
            busy: BusyTime::default(),
        }
    }

    /// Makes the tables that the state lacks.
    async fn make(
        &mut self,
        job: &Job,
        state: &mut ManifestState,
        logs: &[PlannedLog],
        is_rebuilt: bool,
    ) -> Result<()> {
        let version = job.db.version();
        let own = (!self.dry_run).then_some(job);
        let place = (self.core, &self.dir);
        let (tables, losses, last) =
            logs::to_tables(place, own, &version, state, logs, self.options).await?;
        losses.into_iter().for_each(|loss| self.lose(loss));
        if !logs.is_empty() {
            state.keys = None;
            state.wals.clear();
            let after = job.db.next_file();
            state.min_log_number_to_keep = after;
            state.column_families.values_mut().for_each(|family| family.log_number = after);
        }
        state.last_sequence = state.last_sequence.max(last);
        job.db.0.sequence.store(state.last_sequence, Ordering::Release);
        for (id, table) in &tables {
            let Some(family) = state.column_families.get_mut(id) else { continue };
            if family.levels.is_empty() {
                family.levels.push(Vec::new());
            }
            // The newest first.
            family.levels[0].insert(0, table.meta.clone());
        }
        if is_rebuilt {
            self.put_in_order(job, state, tables).await?;
        }
        self.relink(state);
        state.next_file_number = job.db.next_file();
        // As every opening does; it also sorts the levels.
        let sorted = rocksfmt::ManifestReplay::resume(state).finish();
        *state = sorted.map_err(|e| Error::format("the repaired state", &e))?;
        self.report.tables = state.column_families.values().map(|f| f.files().count() as u64).sum();
        Ok(())
    }

    /// Makes a state the current one, and removes what it does not name.
    async fn install(&mut self, current: u64, state: &ManifestState, db: &Db) -> Result<()> {
        let io = |e: std::io::Error| Error::io(self.dir.path().display(), &e);
        let mut gone = self.gone(state);
        gone.extend(self.damaged_options.iter().cloned());
        self.report.warnings.extend(self.unnamed.iter().map(|name| {
            format!("{name} is in {LOST}: the MANIFEST does not name it, and needs nothing of it")
        }));
        self.keep_lost(&gone).await?;
        if self.entries.iter().any(|entry| entry.name == "CURRENT" && entry.is_dir) {
            self.move_current().await?;
        }
        // The names of new tables.
        self.dir.sync().await.map_err(io)?;
        if mutant("lost_files_go_first") {
            for name in &gone {
                drop(self.dir.remove(name).await);
            }
        }
        let number = db.new_number();
        let mut manifest = ManifestWriter::new(self.core, &self.dir, current, state, u64::MAX);
        manifest.begin(number, db.next_file()).await?;
        for name in &gone {
            if let Err(error) = self.dir.remove(name).await {
                self.report.warnings.push(format!("cannot remove {name}: {error}"));
            }
        }
        self.dir.remove(JOURNAL).await.map_err(io)?;
        self.dir.sync().await.map_err(io)
    }

    /// Moves a directory with the name CURRENT away: no file can replace it.
    async fn move_current(&self) -> Result<()> {
        for copy in 0..NAMES_MAX {
            let to = format!("{LOST}/CURRENT.{copy}");
            match self.dir.rename("CURRENT", &to).await {
                Ok(()) => break,
                Err(error) if copy + 1 == NAMES_MAX => return Err(Error::io("CURRENT", &error)),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// The files that a state does not name.
    fn gone(&self, state: &ManifestState) -> Vec<String> {
        let families = || state.column_families.values();
        let first = first_log(state);
        let gone = |name: &&String| match FileName::parse(name) {
            Some(FileName::Sst(number)) => {
                !families().any(|family| family.files().any(|(_, meta)| meta.number == number))
            }
            Some(FileName::Blob(number)) => {
                !families().any(|family| family.live_blob_files().any(|b| b.number == number))
            }
            Some(FileName::Wal(number)) => number < first,
            Some(FileName::Manifest(_)) => true,
            _ => false,
        };
        let names = self.entries.iter().filter(|entry| !entry.is_dir).map(|entry| &entry.name);
        names.filter(gone).cloned().collect()
    }

    /// Gives files a second name in the directory of lost files.
    async fn keep_lost(&self, names: &[String]) -> Result<()> {
        let path = self.dir.path().join(LOST);
        let io = |e: std::io::Error| Error::io(path.display(), &e);
        match self.core.create_dir(&path).await {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(io(error));
            }
            _ => {}
        }
        let lost = Dir::new(self.core, &path);
        for name in names {
            for copy in 0..NAMES_MAX {
                let other = if copy == 0 { name.clone() } else { format!("{name}.{copy}") };
                match lost.link_from(&self.dir, name, &other).await {
                    Ok(()) => break,
                    Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                    Err(error) => return Err(io(error)),
                }
            }
        }
        lost.sync().await.map_err(io)
    }
}

/// Whether this is the name of a table with this number.
fn is_table(name: &str, number: u64) -> bool {
    FileName::parse(name) == Some(FileName::Sst(number))
}

/// The smallest and the largest user key of tables that are not none.
fn hull(order: rocksfmt::Comparator, metas: &[FileMeta]) -> (Vec<u8>, Vec<u8>) {
    let smallest = metas.iter().map(|meta| user_key(&meta.smallest));
    let largest = metas.iter().map(|meta| user_key(&meta.largest));
    let first = smallest.min_by(|a, b| order.cmp_user(a, b)).unwrap_or_default();
    let last = largest.max_by(|a, b| order.cmp_user(a, b)).unwrap_or_default();
    (first.to_vec(), last.to_vec())
}
