//! One collection: the task on the owner's core that has the work done, and installs its results.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fs::NamesMark;
use rocksfmt::{BlobGarbage, FileMeta, FileName, ManifestReplay, VersionEdit};

use crate::db::CfId;
use crate::error::{Kind, Result};
use crate::mutant::mutant;
use crate::version::{BlobFile, Version};
use crate::write::blob_garbage;
use crate::write::blob_gc::moves::{Collecting, Moved, Moving};
use crate::write::blob_gc::tables::{References, Rewrite, Rewriting, Rewritten, replace};
use crate::write::blob_gc::{MOVED_MAX, leave_alone};
use crate::write::blob_writer::publish;
use crate::write::job::{self, Job, JobCore};
use crate::write::picker::place;
use crate::write::state::WriteState;

/// A collection.
struct Collection<'a> {
    state: &'a WriteState,
    family: CfId,
    victims: BTreeSet<u64>,
    moved: Arc<Moved>,
    /// Taken before the new files were created.
    mark: NamesMark,
    /// A change that names the new files was tried: it owns them.
    is_tried: bool,
    is_registered: bool,
    /// References to the new files.
    added: References,
    /// Values that the MANIFEST counts as live, and that nothing refers to.
    lost: Vec<BlobGarbage>,
    /// Tables that do not refer to a victim, and tables that did at the beginning, by number.
    clean: BTreeSet<u64>,
    dirty: BTreeSet<u64>,
}

/// Collects the garbage of some blob files of a family.
///
/// # Errors
/// The disk's and the MANIFEST's; some of the values are where they were. One that is not transient
/// ends writing.
pub(super) async fn collect(
    state: &WriteState,
    family: CfId,
    victims: BTreeSet<u64>,
) -> Result<()> {
    let since_ns = state.core.now_ns();
    let newest = victims.last().copied().unwrap_or_default();
    // Between two changes the version and the counts fit each other.
    let turn = state.manifest_turn().await?;
    let version = state.db.version();
    let counted = complete_files(state, turn.state(), family, newest);
    drop(turn);
    let Ok(of_family) = version.family(family) else { return Ok(()) };
    if !victims.iter().all(|victim| counted.contains_key(victim)) {
        state.blob_gc.idle.set(Some(version.epoch));
        return Ok(());
    }
    let suspected: Vec<u32> = suspects(&version, family, newest).map(|(_, slot)| slot).collect();
    let holds = |&slot: &u32| state.merges.quarantine.holds(&version, slot);
    if let Some(damaged) = suspected.iter().copied().find(holds) {
        leave_alone(state, &victims, &format!("{:06}.sst", version.meta(damaged).number));
        return Ok(());
    }
    let dirty: BTreeSet<u64> = suspected.iter().map(|&slot| version.meta(slot).number).collect();
    let collecting = Collecting {
        version: version.clone(),
        family,
        victims: victims.clone(),
        tables: suspected,
        file_bytes: state.blob_file_bytes(&of_family.name),
        values_max: MOVED_MAX as usize,
        pace: state.paces.blob_gc.clone(),
    };
    let mark = state.dir.mark();
    let work = async move |job: Job| collecting.run(&job).await;
    let place = JobCore::Merge(state.merges.parts());
    let (moved, clean, referred) = match job::run(state, place, 0, work).await? {
        None => return Ok(()),
        Some(Moving::Table(slot, error)) if error.kind() != Kind::Memory => {
            state.merges.quarantine.add(&version, slot, &error);
            state.merges.note_change();
            return Ok(());
        }
        Some(Moving::Table(_, error)) => return Err(error),
        Some(Moving::Blob(number, error)) => {
            leave_alone(state, &BTreeSet::from([number]), &error.to_string());
            return Ok(());
        }
        Some(Moving::Done { moved, clean, referred }) => (moved, clean, referred),
    };
    let mut collection = Collection {
        state,
        family,
        lost: lost(&counted, &referred),
        victims,
        moved: Arc::new(moved),
        mark,
        is_tried: false,
        is_registered: false,
        added: References::new(),
        dirty: dirty.difference(&clean).copied().collect(),
        clean,
    };
    let written = collection.write_tables().await;
    let finished = collection.finish(matches!(written, Ok(true))).await;
    collection.count(since_ns);
    written.and(finished)
}

/// The live values of the complete blob files up to `newest` that no log refers to, and their
/// bytes.
fn complete_files(
    state: &WriteState,
    manifest: &ManifestReplay,
    family: CfId,
    newest: u64,
) -> References {
    let in_logs = state.blobs.in_logs(family);
    let mut files = References::new();
    for blob in manifest.live_blob_files(family) {
        let number = blob.number;
        let is_complete = !state.blobs.is_unsealed(number)
            && (!in_logs.contains(&number) || mutant("gc_takes_files_of_logs"));
        if number <= newest && is_complete {
            let count = blob.total_count.saturating_sub(blob.garbage_count);
            files.insert(number, (count, blob.total_bytes.saturating_sub(blob.garbage_bytes)));
        }
    }
    files
}

/// What is counted as live but not referred to.
fn lost(counted: &References, referred: &References) -> Vec<BlobGarbage> {
    let mut lost = Vec::new();
    for (&number, &(count, bytes)) in counted {
        let (some, some_bytes) = referred.get(&number).copied().unwrap_or_default();
        if count > some {
            let (count, bytes) = (count - some, bytes.saturating_sub(some_bytes));
            lost.push(BlobGarbage { number, count, bytes });
        }
    }
    lost
}

/// The tables of a family, with their levels, that may refer to a blob file up to `newest`. Those
/// of the last level come first: level 0 is not to wait for all others.
fn suspects(
    version: &Version,
    family: CfId,
    newest: u64,
) -> impl Iterator<Item = (usize, u32)> + '_ {
    tables(version, family)
        .filter(move |&(_, slot)| (1..=newest).contains(&version.meta(slot).oldest_blob_file))
}

/// Bytes of the keys and values of the tables that may refer to these blob files.
pub(super) fn entry_bytes(version: &Version, family: CfId, victims: &BTreeSet<u64>) -> u64 {
    let newest = victims.last().copied().unwrap_or_default();
    suspects(version, family, newest).map(|(_, slot)| version.entry_bytes(slot)).sum()
}

/// The tables of a family, with their levels, those of the last level first.
fn tables(version: &Version, family: CfId) -> impl Iterator<Item = (usize, u32)> + '_ {
    let family = version.families.find(family);
    let levels = family.into_iter().flat_map(|family| family.levels.iter().enumerate().rev());
    levels.flat_map(|(at, level)| level.slots.iter().map(move |&slot| (at, slot)))
}

impl Collection<'_> {
    /// Writes all tables again that refer to a victim. Returns false if that is not possible.
    async fn write_tables(&mut self) -> Result<bool> {
        let state = self.state;
        let newest = self.victims.last().copied().unwrap_or_default();
        loop {
            if state.is_ending() {
                return Ok(false);
            }
            let version = state.db.version();
            let changes = state.merges.changes();
            let is_clean = |slot: u32| self.clean.contains(&version.meta(slot).number);
            let left: Vec<(usize, u32)> = suspects(&version, self.family, newest)
                .filter(|&(_, slot)| !is_clean(slot))
                .collect();
            if left.is_empty() {
                return Ok(true);
            }
            if left.iter().any(|&(_, slot)| state.merges.quarantine.holds(&version, slot)) {
                leave_alone(state, &self.victims, "a table that refers to it is damaged");
                return Ok(false);
            }
            let mut is_blocked = true;
            for (level, slot) in left {
                if state.is_ending() {
                    return Ok(false);
                }
                let now = state.db.version();
                let Ok(family) = now.family(self.family) else { return Ok(true) };
                if !now.is_at(&version, self.family, level, slot) {
                    is_blocked = false;
                    continue;
                }
                let Some(reserved) = state.merges.reserve_table(&now, family, level, slot) else {
                    continue;
                };
                is_blocked = false;
                let done = self.write_table(&now, level, slot).await;
                drop(reserved);
                state.changed.notify_all();
                if !done? {
                    return Ok(false);
                }
                // A merge that waits for this table comes before the next table.
                state.core.checkpoint().await;
            }
            if is_blocked {
                // Merges have all of them.
                let may_continue = || state.merges.changes() != changes || state.is_ending();
                state.changed.wait_until(may_continue).await;
            }
        }
    }

    /// Writes a table again. Returns false if that is not possible.
    async fn write_table(
        &mut self,
        version: &Arc<Version>,
        level: usize,
        slot: u32,
    ) -> Result<bool> {
        let state = self.state;
        let rewriting = Rewriting {
            version: version.clone(),
            family: self.family,
            slot,
            place: place(version.family(self.family)?, level),
            moved: self.moved.clone(),
            victims: self.victims.clone(),
            is_dirty: self.dirty.contains(&version.meta(slot).number),
            pace: state.paces.blob_gc.clone(),
        };
        let mark = if self.is_tried { state.dir.mark() } else { self.mark };
        let work = async move |job: Job| rewriting.run(&job).await;
        let place = JobCore::Merge(state.merges.parts());
        match job::run(state, place, 0, work).await? {
            None => Ok(false),
            Some(Rewrite::Unread(error)) if error.kind() == Kind::Memory => Err(error),
            Some(Rewrite::Unread(error)) => {
                state.merges.quarantine.add(version, slot, &error);
                state.merges.note_change();
                Ok(false)
            }
            Some(Rewrite::Clean) => {
                self.clean.insert(version.meta(slot).number);
                Ok(true)
            }
            Some(Rewrite::Done(new)) => {
                if !mutant("moved_values_have_no_names")
                    && let Err(error) = state.sync_names(mark).await
                {
                    state.remove_tables(std::iter::once(&new.table.meta));
                    return Err(error);
                }
                self.install(version, level, slot, *new).await.map(|()| true)
            }
        }
    }

    /// Replaces a table.
    async fn install(
        &mut self,
        version: &Version,
        level: usize,
        slot: u32,
        new: Rewritten,
    ) -> Result<()> {
        let (state, family) = (self.state, self.family);
        let Rewritten { table, blobs, added } = new;
        let turn = state.manifest_turn().await?;
        if !state.db.version().is_at(version, family, level, slot) {
            // It was cleared meanwhile.
            drop(turn);
            state.remove_tables(std::iter::once(&table.meta));
            return Ok(());
        }
        let old = version.meta(slot);
        let (number, bytes) = (table.meta.number, table.meta.size_bytes);
        let mut edit = VersionEdit {
            column_family: family,
            deleted_files: vec![(level as u32, old.number)],
            new_files: vec![(level as u32, table.meta.clone())],
            ..VersionEdit::default()
        };
        let registers = !self.is_registered;
        if registers {
            edit.new_blob_files = self.moved.files.iter().map(|file| file.meta.clone()).collect();
        }
        edit.blob_garbage = blobs.garbage(turn.state(), &edit);
        if mutant("victims_go_first") {
            edit.blob_garbage = self.alive_in_victims(turn.state());
        }
        let moved = self.moved.clone();
        self.is_tried = true;
        if registers {
            let bytes = moved.files.iter().map(|file| file.meta.total_bytes).sum();
            state.blob_gc.space.note_moved(family, bytes);
        }
        let changed = turn.change(vec![edit], |version| {
            replace(version, family, level, slot, table);
            for new in moved.files.iter().filter(|_| registers) {
                let file = Arc::new(BlobFile { file: new.file.clone() });
                publish(version, family, new.meta.number, Some(file));
            }
        });
        changed.await?;
        self.is_registered = true;
        for (number, (count, bytes)) in added {
            let sum = self.added.entry(number).or_default();
            *sum = (sum.0 + count, sum.1 + bytes);
        }
        self.clean.insert(number);
        state.db.0.recycled_tables.note_job(old.size_bytes);
        state.remove_tables(std::iter::once(old));
        state.set_paces();
        state.count(|stats| stats.blob_tables_bytes += bytes);
        Ok(())
    }

    /// Counts what is not used of the new files as garbage, and with `is_done` what is left of the
    /// victims: then nothing refers to them.
    async fn finish(&mut self, is_done: bool) -> Result<()> {
        let (state, family) = (self.state, self.family);
        if !self.is_tried {
            let new = self.moved.files.iter().map(|file| FileName::Blob(file.meta.number));
            state.remove_files(new.collect());
        }
        let turn = state.manifest_turn().await?;
        let mut garbage = if is_done { self.alive_in_victims(turn.state()) } else { Vec::new() };
        let others = self.lost.iter().filter(|lost| !self.victims.contains(&lost.number));
        garbage.extend(others.cloned());
        for file in self.moved.files.iter().filter(|_| self.is_registered) {
            let (count, bytes) = self.added.get(&file.meta.number).copied().unwrap_or_default();
            garbage.push(BlobGarbage {
                number: file.meta.number,
                count: file.meta.total_count.saturating_sub(count),
                bytes: file.meta.total_bytes.saturating_sub(bytes),
            });
        }
        let mut edit = VersionEdit { column_family: family, ..VersionEdit::default() };
        if is_done {
            self.unlink(turn.state(), &mut edit);
        }
        edit.blob_garbage = blob_garbage::at_most(turn.state(), &edit, garbage);
        if edit.blob_garbage.is_empty() {
            return Ok(());
        }
        turn.change(vec![edit], |_| {}).await?;
        if is_done && state.blob_gc.has_any(&self.victims) {
            leave_alone(state, &self.victims, "the MANIFEST keeps it");
        }
        Ok(())
    }

    /// Adds tables again that are linked to a victim without need: as anchors (`blob_anchor.rs`)
    /// of logs that are obsolete now.
    fn unlink(&self, manifest: &ManifestReplay, edit: &mut VersionEdit) {
        let linked = manifest.files(self.family);
        let mut linked: BTreeMap<u64, (u32, &FileMeta)> = linked
            .filter(|(_, file)| self.victims.contains(&file.oldest_blob_file))
            .map(|(level, file)| (file.number, (level, file)))
            .collect();
        if linked.is_empty() {
            return;
        }
        let version = self.state.db.version();
        for (_, slot) in tables(&version, self.family) {
            let meta = version.meta(slot);
            if let Some((level, file)) = linked.remove(&meta.number) {
                let oldest_blob_file = meta.oldest_blob_file;
                edit.deleted_files.push((level, file.number));
                edit.new_files.push((level, FileMeta { oldest_blob_file, ..file.clone() }));
            }
        }
    }

    /// All values of the victims that are not garbage yet.
    fn alive_in_victims(&self, manifest: &ManifestReplay) -> Vec<BlobGarbage> {
        let all = blob_garbage::all_alive(manifest, self.family).into_iter();
        all.filter(|all| self.victims.contains(&all.number)).collect()
    }

    fn count(&self, since_ns: u64) {
        let metas = || self.moved.files.iter().map(|file| &file.meta);
        let bytes: u64 = metas().map(|meta| meta.total_bytes).sum();
        let values: u64 = metas().map(|meta| meta.total_count).sum();
        tracing::debug!(
            files = self.victims.len(),
            values,
            bytes,
            ms = (self.state.core.now_ns() - since_ns) / 1_000_000,
            "collected garbage of blob files"
        );
        self.state.count(|stats| {
            stats.blob_collections += 1;
            stats.blob_moved_values += values;
            stats.blob_moved_bytes += bytes;
        });
    }
}
