//! Loading a database: the state that all cores share, from the files of a directory.
//!
//! 1. CURRENT names the MANIFEST. Its replay gives column families, files and logs.
//! 2. The logs that hold writes that are in no table are replayed into memory.
//! 3. Tables are opened, several at a time. One that cannot be opened does not prevent the opening:
//!    reads that need it get the error, the rest stays readable.
//! 4. If the database is to be written to, `gate` decides whether it may be.
//!
//! Nothing is written.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use arc_swap::ArcSwap;
use fs::{Dir, DirEntry, LockGuard};
use reactor::{Class, Core};
use rocksfmt::{ColumnFamily, Comparator, FileMeta, FileName, ManifestState};

use crate::compaction_filter::{self, CompactionFilter};
use crate::db::{Db, DbState, NOT_COUNTED};
use crate::error::{Error, Kind, Result};
use crate::family_options::FamilyOptions;
use crate::mem::Mem;
use crate::merge_operator::{FamilyMerge, MergeOperator, OptionsWriter};
use crate::open::blob_tails::{self, BlobTails};
use crate::open::directory;
use crate::open::gate::{self, Consent, Found};
use crate::open::recover;
use crate::open::recovery_plan::{Listed, RecoveryPlan};
use crate::open::unnamed;
use crate::open::wal_replay::Replayed;
use crate::open::within::WITHIN;
use crate::options::{OpenOptions, WriteOptions};
use crate::recycled_tables::RecycledTables;
use crate::slots::Slots;
use crate::stored_options::StoredOptions;
use crate::table::Table;
use crate::table_memory::TableMemory;
use crate::table_options::TableOptions;
use crate::version::{BlobFile, Family, Level, Slot, Version};

/// Tables that are opened at the same time.
const OPENING: usize = 32;

/// A database that was loaded.
pub(crate) struct Loaded {
    pub db: Db,
    /// The logs, if they hold more than fits in memory. They are to be written to tables before
    /// anything is read.
    pub long_logs: Option<RecoveryPlan>,
    /// The blob files that we wrote.
    pub blob_tails: BlobTails,
}

/// Loads a database from a directory.
pub(crate) struct Loader<'a> {
    core: &'a Core,
    dir: &'a Dir,
    options: &'a OpenOptions,
    /// What the caller agreed to, if it opens the database for writing.
    consent: Option<Consent>,
    /// The merge operator that the caller wants for the default column family.
    merge_operator: Option<&'a MergeOperator>,
    /// The state to load instead of that of the current MANIFEST, whose number it has, and the
    /// files that count.
    given: Option<(u64, ManifestState, Vec<DirEntry>)>,
    /// The caller's compaction filters.
    filters: BTreeMap<String, Arc<dyn CompactionFilter>>,
    warnings: Vec<String>,
}

/// The column families of a version, and the tables that are to be opened for them.
#[derive(Default)]
struct Families {
    families: Vec<Family>,
    /// The slots of each family's levels.
    levels: Vec<Vec<Vec<u32>>>,
    /// The tables by slot.
    tables: Vec<(FileMeta, Comparator)>,
    unreadable_blobs: Vec<String>,
}

impl<'a> Loader<'a> {
    pub fn new(
        core: &'a Core,
        dir: &'a Dir,
        options: &'a OpenOptions,
        consent: Option<Consent>,
    ) -> Loader<'a> {
        let filters = BTreeMap::new();
        let warnings = Vec::new();
        Loader { core, dir, options, consent, merge_operator: None, given: None, filters, warnings }
    }

    /// Loads this state, not that of the current MANIFEST, which has number `current`. Only
    /// `entries` of the directory count.
    pub fn given(self, current: u64, state: ManifestState, entries: Vec<DirEntry>) -> Loader<'a> {
        Loader { given: Some((current, state, entries)), ..self }
    }

    /// For writing as the caller wants.
    pub fn with(self, options: &'a WriteOptions) -> Loader<'a> {
        let filters = options.compaction_filters.clone();
        Loader { merge_operator: options.merge_operator.as_ref(), filters, ..self }
    }

    /// Loads the database. `lock` is held until it is closed. Suspends for all its reads.
    pub async fn load(mut self, lock: Option<LockGuard>) -> Result<Loaded> {
        let (core, dir) = (self.core, self.dir);
        let given = self.given.take();
        let current = match &given {
            Some((current, ..)) => *current,
            None => recover::current(dir).await?,
        };
        let manifest_name = FileName::Manifest(current).to_string();
        let mut lost_end = None;
        let (manifest, entries) = match given {
            Some((_, state, entries)) => (state, entries),
            None => {
                let entries = dir.list().await;
                let entries = entries.map_err(|e| {
                    Error::io(format_args!("cannot list {}", dir.path().display()), &e)
                })?;
                let state = recover::manifest(core, dir, &manifest_name).await?;
                // Tables of an active writer may be in a newer state of its MANIFEST.
                if !self.options.secondary {
                    lost_end =
                        unnamed::lost_end(core, dir, &manifest_name, &state, &entries).await?;
                    self.warnings.extend(lost_end.clone());
                }
                (state, entries)
            }
        };
        let stored_options = StoredOptions::read(dir, &entries).await?;
        let logs_at = directory::logs_at(core, dir, &stored_options, &manifest).await?;
        let mut plan = self.plan(&manifest, &entries, &stored_options)?;
        plan.blob_tails = blob_tails::read(core, dir, &manifest).await?;
        let (mut recovered, is_long) = self.replay_logs(&plan, &manifest).await?;
        let Families { mut families, levels, tables, unreadable_blobs } =
            self.families(&manifest, &plan, &stored_options, &mut recovered).await;
        let table_memory = TableMemory::new(self.options.memory_bytes);
        let slots = self.open_tables(&plan, tables, &table_memory).await?;
        for (family, levels) in families.iter_mut().zip(levels) {
            family.levels = levels.into_iter().map(|level| Level::of(level, &slots)).collect();
            family.merge = merge_operator(family, &slots, &stored_options);
            if let Some(filter) = self.filters.get(&family.name) {
                family.filter = Some(filter.clone());
            }
            if family.filter.is_some() {
                family.options = Arc::new(FamilyOptions::clone(&family.options).with_filter());
            }
        }
        let last_sequence = manifest.last_sequence.max(recovered.last_sequence);
        if let Some(consent) = self.consent {
            let prepared = match stored_options.db("allow_2pc") {
                Some("true") => recover::prepared(core, dir, &plan.kept_logs).await?,
                _ => None,
            };
            let found = Found {
                path: dir.path(),
                entries: &entries,
                stored_options: &stored_options,
                logs_at,
                manifest: &manifest,
                last_sequence,
                families: &families,
                slots: &slots,
                unreadable_blobs: &unreadable_blobs,
                merge_operator: self.merge_operator,
                unread: &recovered.unread,
                prepared,
                lost_end,
            };
            self.warnings.extend(gate::check(&found, consent)?);
        }
        if let Some(wanted) = self.merge_operator
            && let Some(family) = families.iter_mut().find(|family| family.id == 0)
        {
            family.merge = FamilyMerge::of(wanted.clone());
        }
        let id = match &manifest.db_id {
            Some(id) => id.clone(),
            None if self.consent.is_some() => directory::identity(dir).await?,
            None => String::new(),
        };
        let has_within = entries.iter().any(|entry| entry.is_dir && entry.name == WITHIN);
        let version = Version { families: families.into_iter().collect(), slots, epoch: 0 };
        let counted = manifest.keys.zip(recovered.keys);
        let keys = counted.and_then(|(keys, new)| keys.checked_add_signed(new));
        let db = Db(Arc::new(DbState {
            epoch: AtomicU64::new(version.epoch),
            current: ArcSwap::from_pointee(version),
            sequence: AtomicU64::new(last_sequence),
            keys: AtomicU64::new(keys.unwrap_or(NOT_COUNTED)),
            renewals: ArcSwap::default(),
            clears: AtomicU64::new(0),
            keep_sequences: AtomicBool::new(has_within),
            next_file: AtomicU64::new(manifest.next_file_number),
            recycled_tables: RecycledTables::default(),
            snapshots: ArcSwap::default(),
            options: self.options.clone(),
            leftovers: recovered.leftovers,
            recovered_logs: plan.logs.iter().map(|log| log.number).collect(),
            path: dir.path().to_owned(),
            manifest,
            manifest_name,
            manifest_number: current,
            stored_options,
            warnings: self.warnings,
            tables: table_memory,
            id,
            session: rocksfmt::session_id([core.random_u64(), core.random_u64()]),
            _lock: lock,
        }));
        let blob_tails = plan.blob_tails.clone();
        Ok(Loaded { db, long_logs: is_long.then_some(plan), blob_tails })
    }

    fn plan(
        &mut self,
        manifest: &ManifestState,
        entries: &[DirEntry],
        stored_options: &StoredOptions,
    ) -> Result<RecoveryPlan> {
        let listed: Vec<Listed> = entries
            .iter()
            .map(|entry| Listed { name: entry.name.clone(), size_bytes: entry.size })
            .collect();
        let mut plan = RecoveryPlan::new(manifest, &listed)?;
        plan.empty_logs_may_count = stored_options.keeps_logs_at_openings();
        let has_lock = listed.iter().any(|file| file.name == "LOCK");
        self.warnings.extend(plan.lacks_log(manifest, has_lock));
        for blob in &plan.blobs_missing {
            self.warnings.push(format!("{} is missing", FileName::Blob(*blob)));
        }
        Ok(plan)
    }

    /// Replays the logs. Also returns whether they hold more than fits in memory: then nothing of
    /// them is kept, and `long_logs` writes them to tables later.
    async fn replay_logs(
        &mut self,
        plan: &RecoveryPlan,
        manifest: &ManifestState,
    ) -> Result<(Replayed, bool)> {
        let (core, dir, options) = (self.core, self.dir, self.options);
        let writes = self.consent.is_some();
        let mut is_long = false;
        let piece = async |_| {
            is_long = true;
            if writes { Ok(()) } else { Err(too_long(dir, plan, options)) }
        };
        let recovered =
            recover::logs(core, dir, plan, manifest, options, &mut self.warnings, piece).await;
        let mut recovered = recovered?;
        if is_long {
            recovered.memtables.clear();
        }
        Ok((recovered, is_long))
    }

    /// The column families with their recovered writes and their blob files.
    async fn families(
        &mut self,
        manifest: &ManifestState,
        plan: &RecoveryPlan,
        stored_options: &StoredOptions,
        recovered: &mut Replayed,
    ) -> Families {
        let mut all = Families::default();
        for family in manifest.column_families.values() {
            let mut mems = Vec::new();
            if let Some(mut sorting) = recovered.memtables.remove(&family.id) {
                while sorting.step() {
                    self.core.checkpoint().await;
                }
                mems.push(Arc::new(Mem::Recovered(sorting.finish())));
            }
            let refused = refusal(family, stored_options);
            let comparator = family.comparator().unwrap_or(Comparator::Bytewise);
            let mut levels = Vec::new();
            for files in &family.levels {
                let mut slots = Vec::new();
                for meta in files.iter().filter(|_| refused.is_none()) {
                    slots.push(all.tables.len() as u32);
                    all.tables.push((meta.clone(), comparator));
                }
                levels.push(slots);
            }
            let filter = stored_options.family(&family.name, "compaction_filter");
            all.levels.push(levels);
            all.families.push(Family {
                id: family.id,
                name: family.name.clone(),
                comparator_name: family.comparator_name.clone(),
                comparator,
                refused,
                mems,
                // Filled when the tables are open.
                levels: Vec::new(),
                options: Arc::new(FamilyOptions::of(stored_options, &family.name)),
                blobs: open_blobs(self.dir, family, plan, &mut all.unreadable_blobs).await,
                // The tables are not open yet.
                merge: FamilyMerge::default(),
                filter: filter.and_then(compaction_filter::built_in),
                // The gate refuses what cannot be obeyed; reading needs none of it.
                table_options: Arc::new(
                    TableOptions::read(stored_options, &family.name).unwrap_or_default(),
                ),
            });
        }
        self.warnings.extend(all.unreadable_blobs.iter().cloned());
        all
    }

    /// Opens tables, several at a time. Returns their slots in the order of `tables`.
    async fn open_tables(
        &mut self,
        plan: &RecoveryPlan,
        tables: Vec<(FileMeta, Comparator)>,
        memory: &Arc<TableMemory>,
    ) -> Result<Slots> {
        let names: Vec<String> = tables
            .iter()
            .map(|(meta, _)| plan.tables.get(&meta.number).cloned().unwrap_or_default())
            .collect();
        let count = tables.len();
        let damaged = Rc::new(plan.damaged.clone());
        let queue = Rc::new(RefCell::new((0, tables.into_iter().zip(names))));
        let slots = Rc::new(RefCell::new((0..count).map(|_| None).collect::<Vec<Option<Slot>>>()));
        let workers: Vec<_> = (0..OPENING.min(count))
            .map(|_| {
                let (core, dir) = (self.core.clone(), self.dir.clone());
                let (queue, slots, memory) = (queue.clone(), slots.clone(), memory.clone());
                let damaged = damaged.clone();
                self.core.spawn(Class::Foreground, async move {
                    loop {
                        let (at, ((meta, comparator), name)) = {
                            let mut queue = queue.borrow_mut();
                            let Some(next) = queue.1.next() else { return };
                            queue.0 += 1;
                            (queue.0 - 1, next)
                        };
                        let table = match damaged.get(&meta.number) {
                            Some(error) => Err(error.clone()),
                            None => {
                                let meta = meta.clone();
                                Table::open(&core, &dir, &name, meta, comparator, &memory).await
                            }
                        };
                        let slot = match table {
                            Ok(table) => Slot::Open(Arc::new(table)),
                            Err(error) => Slot::Broken { meta: Box::new(meta), error },
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
                self.warnings.push(error.to_string());
            }
        }
        Ok(slots.into())
    }
}

/// Why a column family cannot be read, if it cannot: its order of keys is unknown, or its values
/// mean something else than their bytes.
fn refusal(family: &ColumnFamily, stored_options: &StoredOptions) -> Option<Error> {
    if let Err(e) = family.comparator() {
        return Some(Error::format(format_args!("column family {}", family.name), &e));
    }
    let meaning = stored_options.refuses_reading(&family.name)?;
    Some(Error::new(Kind::Unsupported, meaning))
}

/// The merge operator of a family.
fn merge_operator(family: &Family, slots: &Slots, stored_options: &StoredOptions) -> FamilyMerge {
    let own = family.levels.iter().flat_map(|level| &level.slots);
    let tables = own.filter_map(|&slot| match &slots[slot as usize] {
        Slot::Open(table) => Some(&table.properties),
        Slot::Broken { .. } | Slot::Free => None,
    });
    let named = tables.map(|table| (&table.merge_operator[..], table.num_merge_operands > 0));
    let option = stored_options.family(&family.name, "merge_operator");
    let wrote = match stored_options {
        own if own.is_own => OptionsWriter::Millrace,
        older if older.is_older() => OptionsWriter::OlderRocksDb,
        _ => OptionsWriter::RocksDb,
    };
    FamilyMerge::find(option, wrote, named)
}

/// The logs do not fit in the memory of an opening for reading.
fn too_long(dir: &Dir, plan: &RecoveryPlan, options: &OpenOptions) -> Error {
    Error::new(
        Kind::Memory,
        format!(
            "{}: write-ahead logs of {} MiB, and {} MiB of memory for what is in them: raise \
             --memory, or open it once for writing, which makes tables of them",
            dir.path().display(),
            plan.log_bytes() >> 20,
            options.recovered_bytes >> 20,
        ),
    )
}

/// Opens the blob files of a column family that are there.
async fn open_blobs(
    dir: &Dir,
    family: &ColumnFamily,
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
