//! Opening a database and what every core shares of it.
//!
//! 1. CURRENT names the MANIFEST; replaying it gives column families, files and logs.
//! 2. The logs that hold what is not in the files are replayed into memory.
//! 3. Tables are opened, many at a time; one that cannot be opened is noted, not fatal: who needs
//!    it gets the error, the rest stays readable.
//!
//! Opening for reading writes nothing: not a log, not a lock file, not an access time that we could
//! help. The lock file, where there is one, is locked shared, so that no RocksDB opens the
//! directory for writing meanwhile; with `secondary` it is not, and what is served is the state at
//! the opening.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

use arc_swap::ArcSwap;
use fs::{Dir, DirEntry, LockGuard};
use reactor::{Class, Core};
use rocksfmt::{FileMeta, FileName, ManifestState};

use crate::error::{Error, Kind, Result};
use crate::mem::Mem;
use crate::open::adopt;
use crate::open::choices::Choices;
use crate::open::create;
use crate::open::gate::{self, Consent, Found, LogsAt};
use crate::open::recover;
use crate::open::recovery_plan::{Listed, RecoveryPlan, first_log};
use crate::read::blob::BlobFile;
use crate::read::reader::Reader;
use crate::table::Table;
use crate::table_memory::TableMemory;
use crate::version::{Family, Level, Slot, Version};
use crate::write::spares::Spares;
use crate::write::writer::{WriteOptions, Writer};

/// How to open a database.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Serve the state at the opening even while another process writes.
    pub secondary: bool,
    /// Serve what can be read when the log is damaged in its middle, instead of refusing; and
    /// write beside tables that cannot be read.
    pub salvage: bool,
    /// Check every block's checksum when it is read.
    pub verify_checksums: bool,
    /// Block cache of each reader in bytes; 0 for none.
    pub cache_bytes: usize,
    /// What indexes and filters may take together, in bytes: those that do not fit are read when
    /// they are needed.
    pub memory_bytes: usize,
    /// What writes recovered from the log may take, in bytes. Where they need more, opening for
    /// writing makes tables of them first, and opening for reading fails.
    pub recovered_bytes: usize,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            secondary: false,
            salvage: false,
            verify_checksums: true,
            cache_bytes: 0,
            memory_bytes: usize::MAX,
            recovered_bytes: usize::MAX,
        }
    }
}

/// What a database keeps in memory for all cores, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DbMemory {
    /// Indexes, filters and dictionaries of tables.
    pub tables: usize,
    /// What these may take; the top level of partitioned ones may go beyond it.
    pub tables_budget: usize,
    /// Tables whose index or filter had no room and is read when it is needed.
    pub tables_on_demand: usize,
    /// Writes that are in no table yet.
    pub memtables: usize,
}

/// A column family, as listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnFamilyInfo {
    /// Its id; 0 is "default".
    pub id: u32,
    /// Its name.
    pub name: String,
    /// The name of its comparator.
    pub comparator: String,
    /// Why it cannot be read, if it cannot.
    pub refused: Option<String>,
}

pub(crate) struct Shared {
    /// The newest version. Readers hold the one they began with.
    pub current: ArcSwap<Version>,
    /// [`Version::epoch`] of the newest, which tells readers whether theirs still is.
    pub epoch: AtomicU64,
    /// The largest sequence number that is visible.
    pub sequence: AtomicU64,
    /// The number of keys of the default column family, or [`NOT_COUNTED`].
    pub keys: AtomicU64,
    /// Wakes the tasks that renew the views of cores at rest; see [`Db::attach`].
    pub renewals: ArcSwap<Vec<Waker>>,
    /// How often a column family was cleared: snapshots from before have nothing left to show.
    pub clears: AtomicU64,
    /// The next file's number.
    pub next_file: AtomicU64,
    /// Files that tables may be written to.
    pub spares: Spares,
    /// What each core's snapshots still need: the oldest sequence, or [`NO_SNAPSHOT`].
    pub snapshots: ArcSwap<Vec<Arc<AtomicU64>>>,
    pub options: OpenOptions,
    pub path: PathBuf,
    /// The logs held something behind what was recovered: see
    /// [`crate::open::wal_replay::Replayed`].
    pub leftovers: bool,
    /// The numbers of the logs that were replayed.
    pub recovered_logs: Vec<u64>,
    /// The logs, where they hold more than memory may and are to be made tables of.
    pub long_logs: Option<RecoveryPlan>,
    pub manifest: ManifestState,
    pub manifest_name: String,
    pub manifest_number: u64,
    pub choices: Choices,
    pub warnings: Vec<String>,
    /// What tables keep in memory.
    pub tables: Arc<TableMemory>,
    _lock: Option<LockGuard>,
}

/// An open database. Clones are the same database; any thread may hold one, and every core makes
/// its own [`Reader`] of it.
#[derive(Clone)]
pub struct Db(pub(crate) Arc<Shared>);

/// Tables that are opened at the same time.
const OPENING: usize = 32;
/// In the place of a sequence number: there is no snapshot.
pub(crate) const NO_SNAPSHOT: u64 = u64::MAX;
/// In the place of a number of keys: nobody has counted them.
const NOT_COUNTED: u64 = u64::MAX;
/// How often a directory that another process changes is looked at again.
const SECONDARY_TRIES: u32 = 5;

impl Db {
    /// Opens the database in a directory. Suspends for all its reads.
    ///
    /// # Errors
    /// [`Kind::NoDatabase`], [`Kind::Locked`], damage in CURRENT, MANIFEST or a log, what cannot
    /// be served, or too little memory for its indexes.
    pub async fn open(core: &Core, path: &Path, options: OpenOptions) -> Result<Db> {
        let dir = Dir::new(core, path);
        let mut tries = 1;
        loop {
            let opened = Db::open_once(core, &dir, &options).await;
            match opened {
                // Its writer may have deleted what the MANIFEST still named when we read it.
                Ok(db) if options.secondary && tries < SECONDARY_TRIES && db.has_missing() => {}
                Err(_) if options.secondary && tries < SECONDARY_TRIES => {}
                done => return done,
            }
            tries += 1;
        }
    }

    /// Opens the database in a directory for writing, with the one writer it may have. Suspends
    /// for all its reads, and for a new MANIFEST and a new log.
    ///
    /// Writes found in the log stay in memory and are written to tables in the background. Files
    /// that a crash left behind and nobody refers to are removed.
    ///
    /// # Errors
    /// As for [`Db::open`]; [`Kind::Locked`] also while somebody reads the directory, and
    /// [`Kind::NoDatabase`] only where none is to be made. [`Kind::Older`] where an older RocksDB
    /// than 7.8 wrote the database last, unless it may be adopted. What stands in the way of
    /// writing (`gate.rs`) is told before anything is changed.
    pub async fn open_for_writing(
        core: &Core,
        path: &Path,
        options: OpenOptions,
        write: WriteOptions,
    ) -> Result<(Db, Writer)> {
        let dir = Dir::new(core, path);
        let consent = Consent { adopt: write.adopt, salvage: options.salvage };
        // A directory that is refused stays as it was, without a LOCK file where it had none.
        if look(&dir, write.create).await? == There::WithoutLock {
            drop(Db::open_locked(core, &dir, &options, None, Some(consent)).await?);
        }
        let lock = create::lock(&dir).await?;
        if look(&dir, write.create).await? == There::Nothing {
            create::create(core, &dir).await?;
        }
        let db = Db::open_locked(core, &dir, &options, Some(lock), Some(consent)).await?;
        adopt::note(&dir, &db).await?;
        let manifest = create::take_over(core, &dir, &db, &write).await?;
        let writer = Writer::start(core, &dir, &db, write, manifest).await?;
        Ok((db, writer))
    }

    async fn open_once(core: &Core, dir: &Dir, options: &OpenOptions) -> Result<Db> {
        recover::current(dir).await?;
        let lock = if options.secondary { None } else { Some(lock(dir).await?) };
        Db::open_locked(core, dir, options, lock, None).await
    }

    async fn open_locked(
        core: &Core,
        dir: &Dir,
        options: &OpenOptions,
        lock: Option<LockGuard>,
        writes: Option<Consent>,
    ) -> Result<Db> {
        let current = recover::current(dir).await?;
        let entries = dir
            .list()
            .await
            .map_err(|e| Error::io(format_args!("listing {}", dir.path().display()), &e))?;
        let manifest_name = FileName::Manifest(current).to_string();
        let manifest = recover::manifest(core, dir, &manifest_name).await?;
        let choices = Choices::read(dir, &entries).await;
        let logs_at = logs_at(core, dir, &choices, &manifest).await?;
        let mut warnings = Vec::new();
        let listed: Vec<Listed> = entries
            .iter()
            .map(|entry| Listed { name: entry.name.clone(), size_bytes: entry.size })
            .collect();
        let mut plan = RecoveryPlan::new(&manifest, &listed)?;
        plan.empty_logs_may_count = choices.keeps_logs_at_openings();
        for blob in &plan.blobs_missing {
            warnings.push(format!("{} is missing", FileName::Blob(*blob)));
        }
        // Whether there is more in the logs than memory may hold. The writer makes tables of it
        // before anybody reads; here it is only looked at.
        let mut is_long = false;
        let piece = async |_| {
            is_long = true;
            if writes.is_some() { Ok(()) } else { Err(too_long(dir, &plan, options)) }
        };
        let recovered =
            recover::logs(core, dir, &plan, &manifest, options, &mut warnings, piece).await;
        let mut recovered = recovered?;
        if is_long {
            recovered.memtables.clear();
        }
        let mut families = Vec::new();
        let mut wanted = Vec::new();
        let mut unreadable_blobs = Vec::new();
        for family in manifest.column_families.values() {
            let mems = match recovered.memtables.remove(&family.id) {
                Some(mut sorting) => {
                    while sorting.step() {
                        core.checkpoint().await;
                    }
                    Some(sorting.finish())
                }
                None => None,
            };
            let comparator = family.comparator();
            let unknown = comparator
                .as_ref()
                .err()
                .map(|e| Error::format(format_args!("column family {}", family.name), e));
            let meaning = choices.refuses_reading(&family.name);
            let refused = unknown.or(meaning.map(|what| Error::new(Kind::Unsupported, what)));
            let comparator = comparator.unwrap_or(rocksfmt::Comparator::Bytewise);
            let mut levels = Vec::new();
            for files in &family.levels {
                let mut level = Level::default();
                for meta in files {
                    if refused.is_none() {
                        level.push(wanted.len() as u32, meta);
                        wanted.push((meta.clone(), comparator));
                    }
                }
                levels.push(level);
            }
            let merge_operator =
                choices.family(&family.name, "merge_operator").unwrap_or("an unknown name");
            families.push(Family {
                id: family.id,
                name: family.name.clone(),
                comparator_name: family.comparator_name.clone(),
                comparator,
                refused,
                mems: mems.map(|mem| Arc::new(Mem::Recovered(mem))).into_iter().collect(),
                levels,
                blobs: open_blobs(dir, family, &plan, &mut unreadable_blobs).await,
                merge_operator: merge_operator.to_owned(),
            });
        }
        warnings.extend(unreadable_blobs.iter().cloned());
        let tables = TableMemory::new(options.memory_bytes);
        let slots = open_tables(core, dir, &plan, wanted, &tables, &mut warnings).await?;
        let last_sequence = manifest.last_sequence.max(recovered.last_sequence);
        if let Some(consent) = writes {
            let prepared = match choices.db("allow_2pc") {
                Some("true") => recover::prepared(core, dir, &plan.kept_logs).await?,
                _ => None,
            };
            let found = Found {
                path: dir.path(),
                entries: &entries,
                choices: &choices,
                logs_at,
                manifest: &manifest,
                last_sequence,
                families: &families,
                slots: &slots,
                unreadable_blobs: &unreadable_blobs,
                unread: &recovered.unread,
                prepared,
            };
            warnings.extend(gate::check(&found, consent)?);
        }
        let version = Version { families, slots, epoch: 0 };
        let counted = manifest.keys.zip(recovered.keys);
        let keys = counted.and_then(|(keys, new)| keys.checked_add_signed(new));
        Ok(Db(Arc::new(Shared {
            epoch: AtomicU64::new(version.epoch),
            current: ArcSwap::from_pointee(version),
            sequence: AtomicU64::new(last_sequence),
            keys: AtomicU64::new(keys.unwrap_or(NOT_COUNTED)),
            renewals: ArcSwap::default(),
            clears: AtomicU64::new(0),
            next_file: AtomicU64::new(manifest.next_file_number),
            spares: Spares::default(),
            snapshots: ArcSwap::default(),
            options: options.clone(),
            leftovers: recovered.leftovers,
            recovered_logs: plan.logs.iter().map(|log| log.number).collect(),
            long_logs: is_long.then_some(plan),
            path: dir.path().to_owned(),
            manifest,
            manifest_name,
            manifest_number: current,
            choices,
            warnings,
            tables,
            _lock: lock,
        })))
    }

    /// A reader for one core, with a cache of its own. A task of the core keeps its view new while
    /// nobody reads: an old one would hold memtables and deleted files.
    pub fn attach(&self, core: &Core) -> Reader {
        let reader = Reader::new(self, core);
        core.spawn(Class::Background, reader.keep_view_new());
        reader
    }

    /// Where the database is.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Its column families, by id.
    pub fn column_families(&self) -> Vec<ColumnFamilyInfo> {
        self.version()
            .families
            .iter()
            .map(|family| ColumnFamilyInfo {
                id: family.id,
                name: family.name.clone(),
                comparator: family.comparator_name.clone(),
                refused: family.refused.as_ref().map(ToString::to_string),
            })
            .collect()
    }

    /// What was wrong when it was opened and did not prevent opening.
    pub fn warnings(&self) -> &[String] {
        &self.0.warnings
    }

    /// The exact number of keys of the default column family, where every write since the database
    /// was made said by how many it changed them; see [`Writer::submit`].
    pub fn keys(&self) -> Option<u64> {
        Some(self.0.keys.load(Ordering::Relaxed)).filter(|&keys| keys != NOT_COUNTED)
    }

    pub(crate) fn set_keys(&self, keys: Option<u64>) {
        self.0.keys.store(keys.unwrap_or(NOT_COUNTED), Ordering::Relaxed);
    }

    /// What is kept in memory now for all cores.
    pub fn memory(&self) -> DbMemory {
        let version = self.0.current.load();
        let mems = version.families.iter().flat_map(|family| &family.mems);
        let on_demand = |slot: &&Slot| matches!(slot, Slot::Open(table) if table.is_on_demand());
        DbMemory {
            tables: self.0.tables.used(),
            tables_budget: self.0.tables.budget(),
            tables_on_demand: version.slots.iter().filter(on_demand).count(),
            memtables: mems.map(|mem| mem.memory()).sum(),
        }
    }

    pub(crate) fn version(&self) -> Arc<Version> {
        self.0.current.load_full()
    }

    /// The sequence number that the oldest snapshot of any core reads at, or what is visible: of
    /// two versions that are not newer, nobody sees the older one.
    pub(crate) fn oldest_seen(&self) -> u64 {
        // In this order: a snapshot that is not registered yet will read at this or later.
        let visible = self.0.sequence.load(Ordering::SeqCst);
        let snapshots = self.0.snapshots.load();
        let oldest = snapshots.iter().map(|held| held.load(Ordering::SeqCst)).min();
        oldest.unwrap_or(NO_SNAPSHOT).min(visible)
    }

    /// The largest sequence number that is visible now. Whoever reads at it needs a version that
    /// goes with it: see [`Reader::now`].
    #[inline]
    pub(crate) fn visible(&self) -> u64 {
        self.0.sequence.load(Ordering::Acquire)
    }

    pub(crate) fn options(&self) -> &OpenOptions {
        &self.0.options
    }

    fn has_missing(&self) -> bool {
        self.version().slots.iter().any(|slot| matches!(slot, Slot::Broken { .. }))
    }
}

/// The logs are longer than whoever only reads can hold.
fn too_long(dir: &Dir, plan: &RecoveryPlan, options: &OpenOptions) -> Error {
    Error::new(
        Kind::Memory,
        format!(
            "{}: write-ahead logs of {} MiB, and {} MiB of memory for what is in them: raise \
             --memory, or open it once without --read-only, which makes tables of them",
            dir.path().display(),
            plan.log_bytes() >> 20,
            options.recovered_bytes >> 20,
        ),
    )
}

pub(crate) async fn lock(dir: &Dir) -> Result<LockGuard> {
    dir.lock_shared("LOCK").await.map_err(|e| match e.kind() {
        std::io::ErrorKind::WouldBlock => Error::new(
            Kind::Locked,
            format!(
                "{}: another process has this database open for writing; close it there, or read \
                 its state as of now with --secondary",
                dir.path().display()
            ),
        ),
        _ => Error::io(format_args!("cannot lock {}", dir.path().join("LOCK").display()), &e),
    })
}

/// What is in a directory that is to be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum There {
    /// Nothing: a database may be made.
    Nothing,
    /// A database that never had a LOCK file, a checkpoint for example.
    WithoutLock,
    /// A database.
    Database,
}

/// Looks before anything is written. Suspends for the disk.
async fn look(dir: &Dir, create: bool) -> Result<There> {
    let entries = match dir.list().await {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            return Err(Error::io(format_args!("listing {}", dir.path().display()), &error));
        }
    };
    let has = |name: &str| entries.iter().any(|entry| entry.name == name);
    if has("CURRENT") {
        return Ok(if has("LOCK") { There::Database } else { There::WithoutLock });
    }
    match create {
        true => gate::may_create(dir.path(), &entries)?,
        false => drop(recover::current(dir).await?),
    }
    Ok(There::Nothing)
}

/// Where the logs are. A directory that has a CURRENT is a database's own: older versions of
/// RocksDB always wrote `wal_dir`, and a copy still has its original's.
///
/// # Errors
/// When logs that count are elsewhere: they are not read.
async fn logs_at(
    core: &Core,
    dir: &Dir,
    choices: &Choices,
    manifest: &ManifestState,
) -> Result<LogsAt> {
    let Some(named) = choices.db("wal_dir").filter(|named| Path::new(named) != dir.path()) else {
        return Ok(LogsAt::Here);
    };
    let entries = match core.list(Path::new(named)).await {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(LogsAt::Here),
        // It may be the original's of a copy, as before.
        Err(_) if choices.is_older() => return Ok(LogsAt::Elsewhere),
        Err(error) => return Err(Error::io(format_args!("listing {named} (wal_dir)"), &error)),
    };
    if entries.iter().any(|entry| entry.name == "CURRENT") {
        return Ok(LogsAt::Here);
    }
    let first = first_log(manifest);
    let counts = |entry: &DirEntry| {
        matches!(FileName::parse(&entry.name), Some(FileName::Wal(n)) if n >= first)
            && entry.size > 0
    };
    if entries.iter().any(counts) {
        return Err(Error::new(
            Kind::Unsupported,
            format!(
                "{}: its logs are in another directory, {named} (wal_dir), which is not supported: \
                 opening and closing it with RocksDB puts what is in them into tables",
                dir.path().display()
            ),
        ));
    }
    Ok(LogsAt::Elsewhere)
}

async fn open_blobs(
    dir: &Dir,
    family: &rocksfmt::ColumnFamily,
    plan: &RecoveryPlan,
    unreadable: &mut Vec<String>,
) -> Vec<(u64, Arc<BlobFile>)> {
    let mut blobs = Vec::new();
    for blob in family.live_blob_files() {
        let Some(listed) = plan.blobs.get(&blob.number) else { continue };
        match dir.open(&listed.name).await {
            Ok(file) => blobs.push((blob.number, Arc::new(BlobFile { file }))),
            Err(e) => unreadable.push(format!("{}: {e}", listed.name)),
        }
    }
    blobs.sort_by_key(|(number, _)| *number);
    blobs
}

/// Opens tables, several at a time, in the order given.
async fn open_tables(
    core: &Core,
    dir: &Dir,
    plan: &RecoveryPlan,
    wanted: Vec<(FileMeta, rocksfmt::Comparator)>,
    memory: &Arc<TableMemory>,
    warnings: &mut Vec<String>,
) -> Result<Vec<Slot>> {
    let names: Vec<String> = wanted
        .iter()
        .map(|(meta, _)| plan.tables.get(&meta.number).cloned().unwrap_or_default())
        .collect();
    let count = wanted.len();
    let queue = Rc::new(RefCell::new((0, wanted.into_iter().zip(names))));
    let slots = Rc::new(RefCell::new((0..count).map(|_| None).collect::<Vec<Option<Slot>>>()));
    let workers: Vec<_> = (0..OPENING.min(count))
        .map(|_| {
            let (core, dir, queue, slots) =
                (core.clone(), dir.clone(), queue.clone(), slots.clone());
            let memory = memory.clone();
            core.clone().spawn(Class::Foreground, async move {
                loop {
                    let (at, ((meta, comparator), name)) = {
                        let mut queue = queue.borrow_mut();
                        let Some(next) = queue.1.next() else { return };
                        queue.0 += 1;
                        (queue.0 - 1, next)
                    };
                    let table = Table::open(&core, &dir, &name, meta.clone(), comparator, &memory);
                    let slot = match table.await {
                        Ok(table) => Slot::Open(Arc::new(table)),
                        Err(error) => Slot::Broken { meta, error },
                    };
                    slots.borrow_mut()[at] = Some(slot);
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await;
    }
    let slots: Vec<Slot> = slots.take().into_iter().flatten().collect();
    debug_assert_eq!(slots.len(), count);
    for slot in &slots {
        if let Slot::Broken { error, .. } = slot {
            if error.kind() == Kind::Memory {
                return Err(error.clone());
            }
            warnings.push(error.to_string());
        }
    }
    Ok(slots)
}
