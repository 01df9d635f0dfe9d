//! What all cores share of an open database: its state and accessors. `open/` makes it.
//!
//! One core writes: it alone changes the version, the sequence and the number of keys. Readers on
//! any core load them without a lock; `Reader::now` says in which order.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Waker;

use arc_swap::ArcSwap;
use fs::LockGuard;
use reactor::Core;
use rocksfmt::{ManifestState, SstIdentity};

use crate::error::{Error, Kind, Result};
use crate::options::OpenOptions;
use crate::read::snapshot::Place;
use crate::recycled_tables::RecycledTables;
use crate::stored_options::StoredOptions;
use crate::table_memory::TableMemory;
use crate::version::{Family, Slot, Version};

/// Names a column family; 0 is "default".
pub type CfId = u32;

/// Memory that a database holds for all cores, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DbMemory {
    /// Indexes, filters and dictionaries of tables.
    pub tables: usize,
    /// The limit for these. The top level of partitioned ones may exceed it.
    pub tables_budget: usize,
    /// Tables whose index or filter did not fit and is read on demand.
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

/// The state that all cores share.
pub(crate) struct DbState {
    /// The newest version. A reader holds the one it began with.
    pub current: ArcSwap<Version>,
    /// [`Version::epoch`] of the newest version. Readers compare it with theirs.
    pub epoch: AtomicU64,
    /// The largest visible sequence number.
    pub sequence: AtomicU64,
    /// The number of keys of the default column family, or [`NOT_COUNTED`].
    pub keys: AtomicU64,
    /// Wakers of the tasks that renew the views of idle cores; see [`Db::attach`].
    pub renewals: ArcSwap<Vec<Waker>>,
    /// How often a column family was cleared. A snapshot from before a clearing has expired.
    pub clears: AtomicU64,
    /// Merges keep the sequence numbers of all values.
    pub keep_sequences: AtomicBool,
    /// The next file's number.
    pub next_file: AtomicU64,
    /// Obsolete table files that new tables are written over.
    pub recycled_tables: RecycledTables,
    /// For each reader, the places of its snapshots.
    pub snapshots: ArcSwap<Vec<Arc<[Place]>>>,
    pub options: OpenOptions,
    pub path: PathBuf,
    /// The logs hold records after the last one that was recovered: see
    /// [`crate::open::wal_replay::Replayed`].
    pub leftovers: bool,
    /// The numbers of the logs that were replayed.
    pub recovered_logs: Vec<u64>,
    /// The state of the MANIFEST at the opening.
    pub manifest: ManifestState,
    pub manifest_name: String,
    pub manifest_number: u64,
    pub stored_options: StoredOptions,
    pub warnings: Vec<String>,
    /// The account of the memory of tables.
    pub tables: Arc<TableMemory>,
    /// The database's id, or empty.
    pub id: String,
    /// The id of this opening, which with a file's number is unique for ever.
    pub session: String,
    /// Held until the database is closed.
    pub _lock: Option<LockGuard>,
}

impl DbState {
    /// The identity of a new table.
    pub fn identity(&self, number: u64) -> SstIdentity {
        SstIdentity { database: self.id.clone(), session: self.session.clone(), number }
    }
}

/// An open database. Clones are the same database; any thread may hold one, and every core makes
/// its own [`Reader`](crate::Reader) of it.
#[derive(Clone)]
pub struct Db(pub(crate) Arc<DbState>);

/// In the place of a number of keys: it is not known.
pub(crate) const NOT_COUNTED: u64 = u64::MAX;

impl Db {
    /// The directory of the database.
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

    /// The column family with a name, which can be read and written.
    ///
    /// # Errors
    /// [`Kind::UnknownColumnFamily`], with the names that there are; else why it is refused.
    pub fn column_family(&self, name: &str) -> Result<CfId> {
        let version = self.version();
        let family = named(&version, name)?;
        version.family(family.id).map(|family| family.id)
    }

    /// Problems that the opening found and that did not prevent it.
    pub fn warnings(&self) -> &[String] {
        &self.0.warnings
    }

    /// The exact number of keys of the default column family. `None` if a write since the database
    /// was made did not state its change; see [`Writer::submit`](crate::Writer::submit).
    pub fn keys(&self) -> Option<u64> {
        Some(self.0.keys.load(Ordering::Relaxed)).filter(|&keys| keys != NOT_COUNTED)
    }

    /// Keeps the sequence numbers of all values from now on: merges into the deepest level give
    /// values the sequence 0 otherwise, as RocksDB does. For whoever tells values apart by
    /// [`Reader::get_numbered`](crate::Reader::get_numbered). Costs a few bytes for each key of
    /// compressed blocks. So it is from the opening on if there is a database within the directory
    /// of this one ([`WITHIN`](crate::WITHIN)).
    pub fn keep_sequences(&self) {
        self.0.keep_sequences.store(true, Ordering::Relaxed);
    }

    pub(crate) fn keeps_sequences(&self) -> bool {
        self.0.keep_sequences.load(Ordering::Relaxed)
    }

    /// The largest sequence number that is visible now.
    pub fn visible_sequence(&self) -> u64 {
        self.visible()
    }

    pub(crate) fn set_keys(&self, keys: Option<u64>) {
        self.0.keys.store(keys.unwrap_or(NOT_COUNTED), Ordering::Relaxed);
    }

    /// The memory that is now held for all cores.
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

    /// Changes the version for every read that begins from now on. Only the core that writes may
    /// call it.
    pub(crate) fn publish(&self, change: impl FnOnce(&mut Version)) {
        let state = &*self.0;
        let mut version = Version::clone(&state.current.load());
        change(&mut version);
        version.epoch += 1;
        let epoch = version.epoch;
        state.current.store(Arc::new(version));
        state.epoch.store(epoch, Ordering::Release);
        for renewal in state.renewals.load().iter() {
            renewal.wake_by_ref();
        }
    }

    /// The sequence numbers that readers may read at, ascending: those of all snapshots of all
    /// cores, and the visible one. Later readers read at the visible one or later. Of two versions
    /// of a key, no reader sees the older one if none of these is between them.
    pub(crate) fn readable(&self, core: &Core) -> Vec<u64> {
        // In this order: a snapshot that is not registered yet will read at this or later.
        let visible = self.0.sequence.load(Ordering::SeqCst);
        let mut all = vec![visible];
        for places in self.0.snapshots.load().iter() {
            all.extend(places.iter().filter_map(|place| place.held(core.now_ns())));
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The largest sequence number that is visible now. To read at it, a caller needs a version
    /// that goes with it: see `Reader::now`.
    #[inline]
    pub(crate) fn visible(&self) -> u64 {
        self.0.sequence.load(Ordering::Acquire)
    }

    pub(crate) fn options(&self) -> &OpenOptions {
        &self.0.options
    }

    /// A number that no file has.
    pub(crate) fn new_number(&self) -> u64 {
        self.0.next_file.fetch_add(1, Ordering::Relaxed)
    }

    /// No file has this number or a larger one.
    pub(crate) fn next_file(&self) -> u64 {
        self.0.next_file.load(Ordering::Relaxed)
    }
}

/// The column family with a name.
///
/// # Errors
/// [`Kind::UnknownColumnFamily`], with the names that there are.
pub(crate) fn named<'a>(version: &'a Version, name: &str) -> Result<&'a Family> {
    const NAMES_MAX: usize = 20;
    let families = &version.families;
    if let Some(family) = families.iter().find(|family| family.name == name) {
        return Ok(family);
    }
    let names: Vec<&str> = families.iter().take(NAMES_MAX).map(|family| &*family.name).collect();
    let more = match families.len().saturating_sub(NAMES_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let names = names.join(", ");
    let what = format!("no column family is named '{name}': the database has: {names}{more}");
    Err(Error::new(Kind::UnknownColumnFamily, what))
}
