//! Compaction: merging level 0 into level 1, in the background.
//!
//! All files of level 0 and those of level 1 that overlap them become new files of level 1
//! (`merge_plan.rs` chooses them, `merge.rs` merges them). Files that overlap nothing are not
//! rewritten; they only change their level.
//!
//! Column families that cannot be read and damaged tables are not merged. A merge that finds damage
//! in an input is abandoned, reports it, and leaves that table alone from then on: the next merge
//! is planned around it. Reads of the table continue as before.
//!
//! A failed merge does not end writing: its outputs are removed, and it is retried later
//! (`retry.rs`). A merge that lacks memory is retried with fewer files; a file that repeatedly
//! finds no memory on its own is left alone like a damaged one. Only a MANIFEST or a directory that
//! cannot be written ends writing.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rocksfmt::{FileMeta, FileName, VersionEdit};

use crate::error::{Error, Kind, Result};
use crate::mutant::mutant;
use crate::table::Table;
use crate::version::{Level, Slot, Version};
use crate::write::job::{self, Job, JobCore};
use crate::write::merge::{self, MEMORY_SHARE, Merged, MergedTables};
use crate::write::merge_plan::{self, Memory, Plan};
use crate::write::pace::MergeProgress;
use crate::write::retry::Task;
use crate::write::state::WriteState;

/// Attempts to merge as few files as possible, before a table that finds no memory is left alone;
/// and the same once another table was.
const MEMORY_TRIES: u32 = 8;
const MEMORY_TRIES_LATER: u32 = 2;

/// Merges whenever there is something to merge, until writing ends.
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
            Ok(Attempt::LeftAlone) => {
                state.changed.notify_all();
                continue;
            }
            Ok(Attempt::Nothing) => {
                state.note_success(Task::Merge);
                let wanted = || is_due(state, &state.db.0.current.load());
                state.changed.wait_until(|| wanted() || state.is_ending()).await;
                continue;
            }
            Ok(Attempt::TooMany(error)) => {
                state.pause_for_memory("a merge of fewer files", &error).await;
                continue;
            }
            Ok(Attempt::Failed(error)) => error,
            Err(error) if matches!(error.kind(), Kind::Full | Kind::Memory) => error,
            Err(error) => return state.fail(&error),
        };
        state.back_off(Task::Merge, &failure, since_ns).await;
        if state.is_closing() {
            return;
        }
    }
}

/// The result of an attempt to merge.
enum Attempt {
    /// Files were merged or moved, or were cleared meanwhile.
    Merged,
    /// No family needs a merge.
    Nothing,
    /// A table is left alone from now on.
    LeftAlone,
    /// Memory was lacking for this many files.
    TooMany(Error),
    /// It failed and left nothing.
    Failed(Error),
}

/// Whether a family needs a merge.
pub(crate) fn is_due(state: &WriteState, version: &Version) -> bool {
    planned(state, version, Memory { files: usize::MAX, bytes: u64::MAX }).is_some()
}

/// The first family that needs a merge, and its plan.
fn next_plan(state: &WriteState, version: &Version) -> Option<(u32, Plan)> {
    let bytes = state.core.pool().limit() as u64 / MEMORY_SHARE;
    planned(state, version, Memory { files: state.merges.files_max.get(), bytes })
}

fn planned(state: &WriteState, version: &Version, memory: Memory) -> Option<(u32, Plan)> {
    let left_alone = |slot| state.merges.quarantine.holds(version, slot);
    version.families.iter().find_map(|family| {
        Some((family.id, merge_plan::plan(version, family, memory, &left_alone)?))
    })
}

/// Merges level 0 of the first family that needs it.
///
/// # Errors
/// [`Kind::Full`] and [`Kind::Memory`] of the MANIFEST; all others end writing.
async fn merge_next(state: &WriteState) -> Result<Attempt> {
    let version = state.db.version();
    let Some((family, inputs)) = next_plan(state, &version) else { return Ok(Attempt::Nothing) };
    let compaction = Compaction { state, version, family, inputs, since_ns: state.core.now_ns() };
    let tables = if compaction.inputs.moves {
        MergedTables::default()
    } else {
        match compaction.merge().await {
            Ok(tables) => tables,
            Err(attempt) => return Ok(attempt),
        }
    };
    if !compaction.inputs.moves {
        state.sync_names().await?;
    }
    compaction.install(tables).await
}

/// A merge of one family.
struct Compaction<'a> {
    state: &'a WriteState,
    /// The version that was planned on.
    version: Arc<Version>,
    family: u32,
    inputs: Plan,
    since_ns: u64,
}

impl Compaction<'_> {
    /// The inputs, each with its level.
    fn inputs(&self) -> impl Iterator<Item = (usize, u32)> {
        let level0 = self.inputs.level0.iter().map(|&slot| (0, slot));
        level0.chain(self.inputs.level1.iter().map(|&slot| (1, slot)))
    }

    fn input_bytes(&self) -> u64 {
        self.inputs().map(|(_, slot)| self.version.meta(slot).size_bytes).sum()
    }

    /// Merges the inputs on another core.
    ///
    /// # Errors
    /// The result of the attempt, if there are no tables.
    async fn merge(&self) -> std::result::Result<MergedTables, Attempt> {
        let state = self.state;
        let done = Arc::new(AtomicU64::new(0));
        let pace = state.paces.merge.clone();
        let progress = MergeProgress::new(self.since_ns, self.input_bytes(), &done, &pace);
        state.merges.progress.replace(Some(progress));
        state.set_paces();
        let (version, family, plan) = (self.version.clone(), self.family, self.inputs.clone());
        let work =
            async move |job: Job| merge::merge(&job, &version, family, &plan, &done, &pace).await;
        let merged = job::run(state, JobCore::Merge, 0, work).await;
        state.merges.progress.take();
        match merged {
            Ok(Some(Merged::Tables(tables))) => Ok(tables),
            // Writing has ended.
            Ok(None) => Err(Attempt::Nothing),
            Ok(Some(Merged::Unread(slot, error))) if error.kind() == Kind::Memory => {
                Err(self.lacks_memory(Some(slot), error))
            }
            Ok(Some(Merged::Unread(slot, error))) => {
                state.merges.quarantine.add(&self.version, slot, &error);
                Err(Attempt::LeftAlone)
            }
            Err(error) if error.kind() == Kind::Memory => Err(self.lacks_memory(None, error)),
            Err(error) => Err(Attempt::Failed(error)),
        }
    }

    /// The merge found no memory, to read the table of `slot` or for its outputs. The next merge
    /// takes fewer files. If there are no fewer, the table is left alone after some attempts.
    fn lacks_memory(&self, slot: Option<u32>, error: Error) -> Attempt {
        let (state, inputs) = (self.state, &self.inputs);
        let files = inputs.level0.len();
        if files > inputs.least_files() {
            state.merges.files_max.set((files / 2).max(1));
            return Attempt::TooMany(error);
        }
        state.merges.files_max.set(1);
        let quarantine = &state.merges.quarantine;
        let tries = if quarantine.for_memory() { MEMORY_TRIES_LATER } else { MEMORY_TRIES };
        if state.retries.failures(Task::Merge) + 1 < tries {
            return Attempt::Failed(error);
        }
        let Some(slot) = slot.or(inputs.level0.last().copied()) else {
            return Attempt::Failed(error);
        };
        quarantine.add(&self.version, slot, &error);
        state.note_success(Task::Merge);
        Attempt::LeftAlone
    }

    /// Replaces the inputs by the new tables: in the MANIFEST, then for readers. Then the inputs
    /// are obsolete.
    async fn install(self, tables: MergedTables) -> Result<Attempt> {
        let Compaction { state, version, family, inputs, .. } = &self;
        let turn = state.manifest_turn().await?;
        let newest = state.db.version();
        if !self.inputs().all(|(level, slot)| newest.is_at(version, *family, level, slot)) {
            // They were cleared meanwhile.
            drop(turn);
            state.remove_tables(tables.metas());
            return Ok(Attempt::Merged);
        }
        let mut edit = self.edit(&tables);
        edit.blob_garbage = tables.blobs.garbage(turn.state(), &edit);
        if mutant("inputs_go_first") && !inputs.moves {
            let name = FileName::Sst(version.meta(inputs.level0[0]).number).to_string();
            state.dir.remove(&name).await.map_err(|e| Error::io(&name, &e))?;
        }
        let written: u64 = tables.metas().map(|meta| meta.size_bytes).sum();
        let made: Vec<u64> = tables.metas().map(|meta| meta.number).collect();
        let MergedTables { level0, level1, .. } = tables;
        let changed =
            turn.change(vec![edit], |v| replace(v, *family, inputs, level1, level0)).await;
        if let Err(error) = &changed
            && error.kind() == Kind::Full
        {
            job::remove_made(&state.dir, made.into_iter()).await;
        }
        changed?;
        if !inputs.moves {
            self.count(written);
            state.remove_tables(self.inputs().map(|(_, slot)| version.meta(slot)));
        }
        Ok(Attempt::Merged)
    }

    /// The change of the MANIFEST, without the garbage in blob files.
    fn edit(&self, tables: &MergedTables) -> VersionEdit {
        let Compaction { version, inputs, .. } = self;
        let moved = inputs.level0.iter().filter(|_| inputs.moves).map(|&slot| version.meta(slot));
        let level1 = tables.level1.iter().map(|table| &table.meta).chain(moved);
        let level0 = tables.level0.iter().map(|table| &table.meta);
        let deleted = self.inputs().map(|(level, slot)| (level as u32, version.meta(slot).number));
        VersionEdit {
            column_family: self.family,
            deleted_files: deleted.collect(),
            new_files: level1
                .map(|meta| (1, meta.clone()))
                .chain(level0.map(|meta| (0, meta.clone())))
                .collect(),
            ..VersionEdit::default()
        }
    }

    fn count(&self, written: u64) {
        let bytes = self.input_bytes();
        tracing::debug!(
            level0 = self.inputs.level0.len(),
            level1 = self.inputs.level1.len(),
            bytes,
            written,
            ms = (self.state.core.now_ns() - self.since_ns) / 1_000_000,
            "merged level 0 into level 1"
        );
        self.state.count(|stats| {
            stats.merges += 1;
            stats.merged_bytes += bytes;
            stats.merged_into_bytes += written;
        });
    }
}

impl MergedTables {
    fn metas(&self) -> impl Iterator<Item = &FileMeta> {
        self.level1.iter().chain(self.level0.as_deref()).map(|table| &table.meta)
    }
}

impl Version {
    /// Whether this version has the table of another version's slot at the same place.
    fn is_at(&self, other: &Version, family: u32, level: usize, slot: u32) -> bool {
        let same = match (self.slots.get(slot as usize), other.slots.get(slot as usize)) {
            (Some(Slot::Open(a)), Some(Slot::Open(b))) => Arc::ptr_eq(a, b),
            _ => false,
        };
        let family = self.families.iter().find(|f| f.id == family);
        let level = family.and_then(|family| family.levels.get(level));
        same && level.is_some_and(|level| level.slots.contains(&slot))
    }
}

/// Replaces the inputs of a merge by its outputs.
fn replace(
    version: &mut Version,
    id: u32,
    inputs: &Plan,
    tables: Vec<Table>,
    stays: Option<Box<Table>>,
) {
    let stays = stays.map(|table| version.put(*table));
    let mut new: Vec<u32> = tables.into_iter().map(|table| version.put(table)).collect();
    if inputs.moves {
        new.extend(&inputs.level0);
    }
    let Some(at) = version.families.iter().position(|family| family.id == id) else { return };
    let comparator = version.families[at].comparator;
    let levels = &mut version.families[at].levels;
    levels.resize_with(levels.len().max(2), Level::default);
    let without = |level: &Level, gone: &[u32]| -> Vec<u32> {
        level.slots.iter().copied().filter(|slot| !gone.contains(slot)).collect()
    };
    // In the place of the run: files that came meanwhile are newer.
    let older = levels[0].slots.iter().rposition(|slot| inputs.level0.contains(slot));
    let older = levels[0].slots[older.map_or(0, |last| last + 1)..].len();
    let mut rest0 = without(&levels[0], &inputs.level0);
    rest0.splice(rest0.len() - older..rest0.len() - older, stays);
    let mut level1 = without(&levels[1], &inputs.level1);
    level1.extend(new);
    levels[0] = Level::of(rest0, &version.slots);
    levels[1] = Level::sorted(level1, &version.slots, comparator);
    if !inputs.moves {
        for &slot in inputs.level0.iter().chain(&inputs.level1) {
            version.slots[slot as usize] = Slot::Free;
        }
    }
}
