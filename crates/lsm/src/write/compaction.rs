//! Compaction: merging files into deeper levels, in the background.
//!
//! The picker (`picker/`) decides, a [`MergePart`] does the work on another core, and the owner
//! installs the result: one record of the MANIFEST, then the readers' version. Several jobs run at
//! the same time, one for each core at most. A large merge of level 0 is split into ranges of keys,
//! which run on several cores.
//!
//! Column families that cannot be read and damaged tables are not merged. A merge that finds damage
//! in an input is abandoned, reports it, and leaves that table alone from then on: the next merge
//! is planned around it. Reads of the table continue as before.
//!
//! A failed merge does not end writing: its outputs are removed, and it is retried later
//! (`retry.rs`). A merge that lacks memory is retried with fewer files; a file that repeatedly
//! finds no memory on its own is left alone like a damaged one. The same holds for a
//! MANIFEST or a directory that cannot be written.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use reactor::{Core, join_all};
use rocksfmt::{FileMeta, FileName, VersionEdit};

use crate::error::{Error, Kind, Result};
use crate::mutant::mutant;
use crate::table::Table;
use crate::version::{Family, Level, Slot, Version, user_key};
use crate::write::aged::AgedFiles;
use crate::write::compaction_status::LevelCounters;
use crate::write::job::{self, Job, JobCore};
use crate::write::manual::{CompactionLimits, CompactionWatch};
use crate::write::merge::{MEMORY_SHARE, MergePart, Merged, MergedTables};
use crate::write::pace::{MergeCounters, MergeProgress};
use crate::write::picker::{KeyRange, Memory, Picker, Plan};
use crate::write::quarantine::Quarantine;
use crate::write::retry::Task;
use crate::write::split::split;
use crate::write::state::WriteState;

/// Attempts to merge as few files as possible, before a table that finds no memory is left alone;
/// and the same once another table was.
const MEMORY_TRIES: u32 = 8;
const MEMORY_TRIES_LATER: u32 = 2;
/// Most jobs at the same time.
const JOBS_MAX: usize = 4;

/// The merges of a database.
pub(crate) struct Merges {
    /// The jobs under way.
    pub running: RefCell<Vec<Arc<Running>>>,
    /// Tables that merges leave alone.
    pub quarantine: Quarantine,
    /// Files that are due for their age.
    pub aged: AgedFiles,
    /// Most files of level 0 in one merge. Reduced after a merge that lacked memory.
    pub files_max: Cell<usize>,
    /// No merge begins.
    pub paused: Cell<bool>,
    pub limits: Cell<CompactionLimits>,
    /// Jobs begun.
    turn: Cell<usize>,
    /// Nothing could be picked from the version of this epoch while this many jobs had begun or
    /// ended.
    idle: Cell<Option<(u64, u64)>>,
    /// Jobs that have begun or ended.
    changes: Cell<u64>,
    /// What was done to the levels of each family.
    counters: RefCell<BTreeMap<u32, Vec<LevelCounters>>>,
}

/// A job under way.
pub(crate) struct Running {
    pub family: u32,
    pub plan: Arc<Plan>,
    pub progress: MergeProgress,
    pub since_ns: u64,
    /// A user asked for it.
    pub is_requested: bool,
    /// Bytes of its inputs in level 0.
    level0: u64,
    /// The cores that it occupies.
    parts: usize,
}

impl Running {
    /// The number of cores that it occupies.
    pub fn cores(&self) -> usize {
        self.parts
    }
}

impl Merges {
    pub fn new(version: &Version) -> Merges {
        Merges {
            running: RefCell::default(),
            quarantine: Quarantine::new(version),
            aged: AgedFiles::default(),
            files_max: Cell::new(usize::MAX),
            paused: Cell::new(false),
            limits: Cell::default(),
            turn: Cell::new(0),
            idle: Cell::new(None),
            changes: Cell::new(0),
            counters: RefCell::default(),
        }
    }

    /// Bytes of inputs that running jobs have not merged yet, about.
    pub fn bytes_left(&self) -> u64 {
        self.running.borrow().iter().map(|job| job.progress.left()).sum()
    }

    /// Bytes that running jobs have moved out of level 0, about.
    pub fn left_level0(&self) -> u64 {
        let running = self.running.borrow();
        running.iter().map(|job| (job.level0 as f64 * job.progress.part()) as u64).sum()
    }

    /// The files of level 0 of a family whose work running jobs have done, about.
    pub fn level0_merged(&self, family: u32) -> f64 {
        let running = self.running.borrow();
        let of = |job: &Arc<Running>| job.plan.inputs.len() as f64 * job.progress.part();
        running.iter().filter(|job| job.family == family && job.plan.start == 0).map(of).sum()
    }

    /// Whether a job moves bytes out of level 0.
    pub fn drains_level0(&self) -> bool {
        self.running.borrow().iter().any(|job| job.level0 > 0)
    }

    /// Changes with each job that begins or ends.
    pub fn changes(&self) -> u64 {
        self.changes.get()
    }

    /// The cores that running jobs occupy.
    pub fn parts(&self) -> usize {
        self.running.borrow().iter().map(|job| job.parts).sum()
    }

    /// Keeps jobs from writing to a range of user keys of a level below level 0, until the result
    /// is dropped; `None` if one does so already. Without it a job could make a table that
    /// reaches over tables that are added there meanwhile.
    pub fn reserve(
        &self,
        family: &Family,
        level: usize,
        range: (&[u8], &[u8]),
    ) -> Option<Reservation<'_>> {
        self.reserve_plan(family, level, range, Plan::reservation(level, range))
    }

    fn reserve_plan(
        &self,
        family: &Family,
        level: usize,
        range: (&[u8], &[u8]),
        plan: Plan,
    ) -> Option<Reservation<'_>> {
        let mut running = self.running.borrow_mut();
        let mut same = running.iter().filter(|job| job.family == family.id);
        if !same.all(|job| job.plan.is_apart(family.comparator, level, range)) {
            return None;
        }
        let reserved = Arc::new(Running {
            family: family.id,
            plan: Arc::new(plan),
            progress: MergeProgress::new(0, 0, &MergeCounters::default()),
            since_ns: 0,
            is_requested: false,
            level0: 0,
            parts: 0,
        });
        running.push(reserved.clone());
        Some(Reservation { merges: self, reserved })
    }

    /// Counts work on a level of a family.
    pub fn count(&self, family: u32, level: usize, change: impl FnOnce(&mut LevelCounters)) {
        let mut counters = self.counters.borrow_mut();
        let levels = counters.entry(family).or_default();
        levels.resize_with(levels.len().max(level + 1), LevelCounters::default);
        change(&mut levels[level]);
    }

    /// What was done to the levels of a family since the opening.
    pub fn counters(&self, family: u32) -> Vec<LevelCounters> {
        self.counters.borrow().get(&family).cloned().unwrap_or_default()
    }

    /// Keeps jobs from a table, until the result is dropped; `None` if one has it, or writes to its
    /// range of its level.
    pub fn reserve_table(
        &self,
        version: &Version,
        family: &Family,
        level: usize,
        slot: u32,
    ) -> Option<Reservation<'_>> {
        let meta = version.meta(slot);
        let is_input = |job: &Arc<Running>| job.plan.files().any(|(_, busy)| busy == slot);
        if self.running.borrow().iter().any(|job| job.family == family.id && is_input(job)) {
            return None;
        }
        let range = (user_key(&meta.smallest), user_key(&meta.largest));
        let plan = Plan { inputs: vec![slot], ..Plan::reservation(level, range) };
        self.reserve_plan(family, level, range, plan)
    }

    /// Notes that another merge may be possible now.
    pub fn note_change(&self) {
        self.changes.set(self.changes.get() + 1);
    }
}

/// The number of jobs that may run at the same time.
pub(crate) fn jobs_max(core: &Core) -> usize {
    core.cores().min(JOBS_MAX)
}

/// The number of cores that jobs may occupy.
fn parts_max(state: &WriteState) -> usize {
    let most = jobs_max(&state.core);
    match state.merges.limits.get().cores_percent {
        Some(percent) => (percent.div_ceil(100) as usize).clamp(1, most),
        None => most,
    }
}

/// Whether another job may begin beside those that run.
pub(crate) fn has_place(state: &WriteState) -> bool {
    !state.merges.paused.get() && state.merges.parts() < parts_max(state)
}

/// Merges whenever there is something to merge, until writing ends. [`jobs_max`] tasks do this.
pub(crate) async fn run(state: &WriteState) {
    while !state.is_ending() {
        let since_ns = state.core.now_ns();
        let failure = match merge_next(state).await {
            Ok(Attempt::Merged) => {
                state.merges.files_max.set(usize::MAX);
                state.note_success(Task::Merge);
                state.changed.notify_all();
                continue;
            }
            Ok(Attempt::LeftAlone | Attempt::Again) => {
                state.changed.notify_all();
                continue;
            }
            Ok(Attempt::Nothing) => {
                if state.merges.running.borrow().is_empty() {
                    state.note_success(Task::Merge);
                }
                let wanted = || is_due(state, &state.db.0.current.load());
                state.changed.wait_until(|| wanted() || state.is_ending()).await;
                continue;
            }
            Ok(Attempt::TooMany(error)) => {
                state.pause_for_memory("a merge of fewer files", &error).await;
                continue;
            }
            Ok(Attempt::Failed(error)) => error,
            Err(error) if error.is_transient() => error,
            Err(error) => return state.fail(&error),
        };
        state.back_off(Task::Merge, &failure, since_ns).await;
        if state.is_closing() {
            return;
        }
    }
}

/// The result of an attempt to merge.
pub(crate) enum Attempt {
    /// Files were merged or moved, or were cleared meanwhile.
    Merged,
    /// No family needs a merge.
    Nothing,
    /// A table is left alone from now on.
    LeftAlone,
    /// It could not be installed before something that has happened now: it is to be repeated.
    Again,
    /// Memory was lacking for this many files.
    TooMany(Error),
    /// It failed and left nothing.
    Failed(Error),
}

/// Whether another merge may begin now.
pub(crate) fn is_due(state: &WriteState, version: &Version) -> bool {
    picked(state, version, Memory { files: usize::MAX, bytes: u64::MAX }).is_some()
}

/// The most urgent family, and its plan.
fn picked(state: &WriteState, version: &Version, memory: Memory) -> Option<(u32, Plan)> {
    let merges = &state.merges;
    let now = (version.epoch, merges.changes.get());
    if merges.idle.get() == Some(now) || !has_place(state) {
        return None;
    }
    let left_alone = |slot| merges.quarantine.holds(version, slot);
    let hidden_max = state.blob_hidden_max();
    let running = merges.running.borrow();
    let mut best: Option<(f64, u32, Plan)> = None;
    for family in version.families.iter().filter(|family| family.refused.is_none()) {
        let same = running.iter().filter(|job| job.family == family.id);
        let plans: Vec<&Plan> = same.map(|job| &*job.plan).collect();
        let running = &plans[..];
        let turn = merges.turn.get();
        let compression = state.options.compression;
        let left_alone = &left_alone;
        merges.aged.with(family.id, |aged| {
            let picker = Picker {
                memory,
                hidden_max,
                compression,
                turn,
                aged,
                ..Picker::new(version, family, left_alone, running)
            };
            let due = picker.due();
            let urgency = due.urgency();
            if due.is_nothing() || best.as_ref().is_some_and(|best| best.0 >= urgency) {
                return;
            }
            if let Some(plan) = picker.pick(&due) {
                best = Some((urgency, family.id, plan));
            }
        });
    }
    if best.is_none() {
        merges.idle.set(Some(now));
    }
    best.map(|(_, family, plan)| (family, plan))
}

/// Merges what is most urgent.
///
/// # Errors
/// Those of the MANIFEST and of the directory; one that is not transient ends writing.
async fn merge_next(state: &WriteState) -> Result<Attempt> {
    let version = state.db.version();
    let bytes = state.core.pool().limit() as u64 / MEMORY_SHARE;
    let memory = Memory { files: state.merges.files_max.get(), bytes };
    let Some((family, plan)) = picked(state, &version, memory) else {
        return Ok(Attempt::Nothing);
    };
    Compaction::begin(state, version, family, plan, None).run().await
}

/// See [`Merges::reserve`].
pub(crate) struct Reservation<'a> {
    merges: &'a Merges,
    reserved: Arc<Running>,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let mut running = self.merges.running.borrow_mut();
        running.retain(|job| !Arc::ptr_eq(job, &self.reserved));
        drop(running);
        self.merges.note_change();
    }
}

/// A merge of one family. Its inputs are busy until it is dropped.
pub(crate) struct Compaction<'a> {
    state: &'a WriteState,
    /// The version that was planned on.
    version: Arc<Version>,
    family: u32,
    plan: Arc<Plan>,
    ranges: Vec<KeyRange>,
    running: Arc<Running>,
    done: MergeCounters,
    /// The first of its cores.
    place: usize,
    /// The request that it is a part of.
    watch: Option<CompactionWatch>,
}

impl Drop for Compaction<'_> {
    fn drop(&mut self) {
        let merges = &self.state.merges;
        merges.running.borrow_mut().retain(|job| !Arc::ptr_eq(job, &self.running));
        merges.note_change();
        self.state.set_paces();
        self.state.changed.notify_all();
        // A memtable full of tombstones may wait until level 0 has room for it.
        self.state.queue.arrived.notify_all();
    }
}

impl<'a> Compaction<'a> {
    pub fn begin(
        state: &'a WriteState,
        version: Arc<Version>,
        family: u32,
        plan: Plan,
        watch: Option<CompactionWatch>,
    ) -> Compaction<'a> {
        let merges = &state.merges;
        let place = merges.parts();
        let free = parts_max(state).saturating_sub(place);
        let ranges = split(&version, family, &plan, free);
        let bytes = plan.files().map(|(_, slot)| version.meta(slot).size_bytes).sum();
        let entries = plan.files().map(|(_, slot)| version.entry_bytes(slot)).sum();
        let (plan, done) = (Arc::new(plan), MergeCounters::default());
        let since_ns = state.core.now_ns();
        let progress = MergeProgress::new(bytes, entries, &done);
        let level0 = match (plan.start, plan.output) {
            (0, 1..) => plan.inputs.iter().map(|&slot| version.meta(slot).size_bytes).sum(),
            _ => 0,
        };
        let parts = ranges.len();
        let is_requested = watch.is_some();
        let plan_too = plan.clone();
        let running =
            Running { family, plan: plan_too, progress, since_ns, is_requested, level0, parts };
        let running = Arc::new(running);
        if let Some(watch) = &watch {
            watch.set_current(Some(running.clone()));
        }
        merges.running.borrow_mut().push(running.clone());
        merges.turn.set(merges.turn.get().wrapping_add(1));
        merges.note_change();
        state.set_paces();
        Compaction { state, version, family, plan, ranges, running, done, place, watch }
    }

    /// Merges or moves the files, and installs the result.
    pub async fn run(self) -> Result<Attempt> {
        if self.plan.moves {
            return self.install(MergedTables::default()).await;
        }
        let mark = self.state.dir.mark();
        let tables = match self.merge().await {
            Ok(tables) => tables,
            Err(attempt) => return Ok(attempt),
        };
        if let Err(error) = self.state.sync_names(mark).await {
            self.state.remove_tables(tables.metas());
            return Err(error);
        }
        self.install(tables).await
    }

    fn input_bytes(&self) -> u64 {
        self.plan.files().map(|(_, slot)| self.version.meta(slot).size_bytes).sum()
    }

    /// Merges the inputs on other cores.
    ///
    /// # Errors
    /// The result of the attempt, if there are no tables.
    async fn merge(&self) -> std::result::Result<MergedTables, Attempt> {
        let state = self.state;
        let is_unwanted = || self.watch.as_ref().is_some_and(CompactionWatch::is_cancelled);
        let parts = self.ranges.iter().enumerate().map(|(at, range)| {
            let part = MergePart {
                version: self.version.clone(),
                family: self.family,
                plan: self.plan.clone(),
                range: range.clone(),
                done: self.done.clone(),
                pace: state.paces.merge.clone(),
            };
            let work = async move |job: Job| part.run(&job).await;
            let place = JobCore::Merge(self.place + at);
            Box::pin(job::run_unless(state, place, 0, &is_unwanted, work))
                as Pin<Box<dyn Future<Output = Result<Option<Merged>>>>>
        });
        let mut all = MergedTables::default();
        let mut failed = None;
        for result in join_all(parts.collect()).await {
            match result {
                Ok(Some(Merged::Tables(tables))) => all.append(tables),
                other => failed = Some(other),
            }
        }
        let Some(failed) = failed else { return Ok(all) };
        job::remove_made(&state.dir, all.metas().map(|meta| FileName::Sst(meta.number))).await;
        // Tables that were cleared meanwhile may be gone: nothing is left to merge.
        if !self.stands() {
            return Err(Attempt::Merged);
        }
        Err(self.attempt(failed))
    }

    /// Whether all inputs are still in their levels.
    fn stands(&self) -> bool {
        let newest = self.state.db.version();
        self.plan.files().all(|(level, slot)| newest.is_at(&self.version, self.family, level, slot))
    }

    /// The result of the attempt when a part has no tables.
    fn attempt(&self, failed: Result<Option<Merged>>) -> Attempt {
        match failed {
            // Writing has ended, or the request was cancelled.
            Ok(None | Some(Merged::Tables(_))) => Attempt::Nothing,
            Ok(Some(Merged::Unread(slot, error))) if error.kind() == Kind::Memory => {
                self.lacks_memory(Some(slot), error)
            }
            Ok(Some(Merged::Unread(slot, error))) => {
                self.state.merges.quarantine.add(&self.version, slot, &error);
                self.state.merges.note_change();
                Attempt::LeftAlone
            }
            Err(error) if error.kind() == Kind::Memory => self.lacks_memory(None, error),
            Err(error) => Attempt::Failed(error),
        }
    }

    /// The merge found no memory, to read the table of `slot` or for its outputs. The next merge
    /// takes fewer files. If there are no fewer, the table is left alone after some attempts.
    fn lacks_memory(&self, slot: Option<u32>, error: Error) -> Attempt {
        let (state, plan) = (self.state, &self.plan);
        let files = plan.inputs.len();
        if plan.start == 0 && files > plan.least_files() {
            state.merges.files_max.set((files / 2).max(1));
            return Attempt::TooMany(error);
        }
        state.merges.files_max.set(1);
        let quarantine = &state.merges.quarantine;
        let tries = if quarantine.for_memory() { MEMORY_TRIES_LATER } else { MEMORY_TRIES };
        if state.retries.failures(Task::Merge) + 1 < tries {
            return Attempt::Failed(error);
        }
        let Some(slot) = slot.or(plan.inputs.last().copied()) else {
            return Attempt::Failed(error);
        };
        quarantine.add(&self.version, slot, &error);
        state.merges.note_change();
        state.note_success(Task::Merge);
        Attempt::LeftAlone
    }

    /// Replaces the inputs by the new tables: in the MANIFEST, then for readers. Then the inputs
    /// are obsolete.
    async fn install(self, tables: MergedTables) -> Result<Attempt> {
        let Compaction { state, version, family, plan, .. } = &self;
        let turn = state.manifest_turn().await?;
        if !self.stands() {
            // They were cleared meanwhile.
            drop(turn);
            state.remove_tables(tables.metas());
            return Ok(Attempt::Merged);
        }
        let mut edit = self.edit(&tables);
        edit.blob_garbage = tables.blobs.garbage(turn.state(), &edit);
        if mutant("inputs_go_first") && !plan.moves {
            let name = FileName::Sst(version.meta(plan.inputs[0]).number).to_string();
            state.dir.remove(&name).await.map_err(|e| Error::io(&name, &e))?;
        }
        let written: u64 = tables.metas().map(|meta| meta.size_bytes).sum();
        let MergedTables { tables, staying, .. } = tables;
        let changed = turn.change(vec![edit], |v| replace(v, *family, plan, tables, staying)).await;
        if changed.is_err() && state.wait_for_anchor().await {
            return Ok(Attempt::Again);
        }
        changed?;
        state.paces.note_left_level0(self.running.level0);
        self.count(written);
        if !plan.moves {
            state.db.0.recycled_tables.note_job(self.input_bytes());
            state.remove_tables(plan.files().map(|(_, slot)| version.meta(slot)));
        }
        Ok(Attempt::Merged)
    }

    /// The change of the MANIFEST, without the garbage in blob files.
    fn edit(&self, tables: &MergedTables) -> VersionEdit {
        let Compaction { version, plan, .. } = self;
        let moved = plan.inputs.iter().filter(|_| plan.moves).map(|&slot| version.meta(slot));
        let down = tables.tables.iter().map(|table| &table.meta).chain(moved);
        let staying = tables.staying.iter().map(|table| &table.meta);
        let deleted = plan.files().map(|(level, slot)| (level as u32, version.meta(slot).number));
        VersionEdit {
            column_family: self.family,
            deleted_files: deleted.collect(),
            new_files: down
                .map(|meta| (plan.output as u32, meta.clone()))
                .chain(staying.map(|meta| (0, meta.clone())))
                .collect(),
            ..VersionEdit::default()
        }
    }

    fn count(&self, written: u64) {
        let (plan, bytes) = (&self.plan, self.input_bytes());
        tracing::debug!(
            from = plan.start,
            to = plan.output,
            files = plan.inputs.len(),
            overlapped = plan.overlapped.len(),
            bytes,
            written,
            parts = self.ranges.len(),
            ms = (self.state.core.now_ns() - self.running.since_ns) / 1_000_000,
            "{}",
            if plan.moves { "moved" } else { "merged" }
        );
        self.state.count(|stats| {
            if plan.moves {
                stats.moved_files += plan.inputs.len() as u64;
                return;
            }
            stats.merges += 1;
            stats.merged_bytes += bytes;
            stats.merged_into_bytes += written;
        });
        let of_level: u64 =
            plan.overlapped.iter().map(|&slot| self.version.meta(slot).size_bytes).sum();
        self.state.merges.count(self.family, plan.output, |level| {
            if plan.moves {
                level.moved_bytes += bytes;
                return;
            }
            level.merges += 1;
            level.read_above_bytes += bytes - of_level;
            level.read_bytes += of_level;
            level.written_bytes += written;
            level.ns += self.state.core.now_ns() - self.running.since_ns;
            level.busy_ns += self.done.busy_ns.load(Ordering::Relaxed);
        });
        if let Some(watch) = &self.watch {
            watch.count(plan, bytes, written);
        }
    }
}

impl MergedTables {
    fn metas(&self) -> impl Iterator<Item = &FileMeta> {
        self.tables.iter().chain(self.staying.as_deref()).map(|table| &table.meta)
    }
}

impl Version {
    /// Whether this version has the table of another version's slot at the same place.
    pub(crate) fn is_at(&self, other: &Version, family: u32, level: usize, slot: u32) -> bool {
        let same = match (self.slots.get(slot as usize), other.slots.get(slot as usize)) {
            (Some(Slot::Open(a)), Some(Slot::Open(b))) => Arc::ptr_eq(a, b),
            _ => false,
        };
        let family = self.families.find(family);
        same && family.is_some_and(|family| family.place_of(self, level, slot).is_some())
    }
}

/// Replaces the inputs of a merge by its outputs.
fn replace(
    version: &mut Version,
    id: u32,
    plan: &Plan,
    tables: Vec<Table>,
    staying: Option<Box<Table>>,
) {
    let staying = staying.map(|table| version.put(*table));
    let mut new: Vec<u32> = tables.into_iter().map(|table| version.put(table)).collect();
    if plan.moves {
        new.extend(&plan.inputs);
    }
    let Some(family) = version.families.find_mut(id) else { return };
    let (comparator, slots, levels) = (family.comparator, &version.slots, &mut family.levels);
    levels.resize_with(levels.len().max(plan.output + 1), Arc::default);
    let start = &levels[plan.start];
    levels[plan.start] = if plan.start == 0 {
        // In the place of the run: files that came meanwhile are newer.
        let oldest = start.slots.iter().rposition(|slot| plan.inputs.contains(slot));
        let (newer, older) = start.slots.split_at(oldest.map_or(0, |last| last + 1));
        let newer = newer.iter().copied().filter(|slot| !plan.inputs.contains(slot));
        Level::of(newer.chain(staying).chain(older.iter().copied()).collect(), slots)
    } else {
        start.edited(slots, comparator, &plan.inputs, &[])
    };
    let output = &levels[plan.output];
    levels[plan.output] = output.edited(slots, comparator, &plan.overlapped, &new);
    if !plan.moves {
        for (_, slot) in plan.files() {
            version.slots.free(slot);
        }
    }
}
