//! Flush: writing memtables to tables of level 0, one generation after the other, in the
//! background.
//!
//! The order makes every crash harmless:
//!
//! 1. The tables become durable, then their names, and the values in blob files to which the tables
//!    refer.
//! 2. One change of the MANIFEST names the tables and the new log numbers, for all families.
//! 3. Readers get the new version.
//! 4. The logs are obsolete.
//!
//! If the values of a blob file cannot be made durable, they are copied from it into the tables:
//! those are written again.
//!
//! If the tables of some family cannot be written, the change covers the families before it, and
//! the others still need the logs. That is correct only if all batches in the tables are in durable
//! logs, and nothing else is. The logs of a failed or recovered generation, and those at
//! `process`, give no such certainty: then the tables wait until one change can name all of them.
//!
//! A table that no record names is removed at the next opening.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fs::NamesMark;
use rocksfmt::{
    BlobIndex, FileMeta, FileName, Fragments, RangeDelAggregator, ValueType, VersionEdit, pack,
    unpack,
};

use crate::error::{Error, Kind, Result};
use crate::mem::{Mem, MemCursor, split};
use crate::merge_operator::merge_bytes_max;
use crate::mutant::mutant;
use crate::read::blob;
use crate::read::reader::Reader;
use crate::read::value::Value;
use crate::table::Table;
use crate::table_options::TablePlace;
use crate::version::{Family, Level, Version};
use crate::write::blob_garbage::BlobMeter;
use crate::write::compaction_iter::{Around, CompactionIter, Place, Rules};
use crate::write::job::{self, ENTRIES_AT_ONCE, Job, JobCore};
use crate::write::pace::{Pace, Paced};
use crate::write::retry::Task;
use crate::write::state::{Generation, WriteState};
use crate::write::table_writer::{NewTable, TableWriter};

/// Time that the first generation, which was recovered, gets after writing has ended, in
/// nanoseconds. Without it a process that opens, writes little and closes would leave more logs
/// each time.
const FIRST_GRACE_NS: u64 = 3_000_000_000;

/// Flushes generations until writing ends.
pub(crate) async fn run(state: &WriteState) {
    if let Err(error) = all_generations(state).await {
        state.fail(&error);
    }
}

async fn all_generations(state: &WriteState) -> Result<()> {
    let none = || state.flushes.waiting.borrow().is_empty();
    let mut progress = Progress::default();
    loop {
        // Until the MANIFEST is replaced, tables would be written in vain.
        let waits = || none() || state.retries.error(Task::Manifest).is_some();
        state.changed.wait_until(|| !waits() || state.is_ending()).await;
        // The first generation holds the recovered writes: new writes may wait for it.
        if none() || (state.is_ending() && state.flushes.done.get() > 0) || state.has_failed() {
            return Ok(());
        }
        let generation = {
            let waiting = state.flushes.waiting.borrow();
            let Some(first) = waiting.front() else { continue };
            first.clone()
        };
        let since_ns = state.core.now_ns();
        let failure = match generation_to_tables(state, &generation, &mut progress).await {
            Ok(Outcome::Done) => None,
            Ok(Outcome::Again) => continue,
            Ok(Outcome::Ended) => return Ok(()),
            Ok(Outcome::Failed(error)) => Some(error),
            Err(error) if error.is_transient() => Some(error),
            Err(error) => return Err(error),
        };
        match failure {
            Some(error) if error.kind() == Kind::Memory => {
                state.pause_for_memory("a flush", &error).await;
                if state.is_ending() {
                    return Ok(());
                }
                continue;
            }
            Some(error) => {
                state.back_off(Task::Flush, &error, since_ns).await;
                if state.is_closing() {
                    return Ok(());
                }
                continue;
            }
            None => {}
        }
        state.note_success(Task::Flush);
        progress = Progress::default();
        state.flushes.waiting.borrow_mut().pop_front();
        state.set_paces();
        state.flushes.done.set(state.flushes.done.get() + 1);
        state.changed.notify_all();
    }
}

/// The memtables of a family, and the tables that they became.
pub(crate) struct Flushed {
    pub id: u32,
    pub mems: Vec<Arc<Mem>>,
    pub tables: Vec<Table>,
    /// The references to blob files in the memtables and in the tables.
    pub blobs: BlobMeter,
}

/// What is done of a generation when the tables of some family could not be written.
#[derive(Default)]
struct Progress {
    /// The families whose tables the MANIFEST names.
    done: Vec<u32>,
    /// Tables that it does not name yet.
    kept: Option<Kept>,
}

/// Tables that wait for those of the other families.
struct Kept {
    all: Vec<Flushed>,
    /// Before the first of them.
    mark: NamesMark,
    /// The failures of blob files then.
    blob_failures: u64,
}

impl Kept {
    fn new(state: &WriteState) -> Kept {
        let (mark, blob_failures) = (state.dir.mark(), state.blobs.failures());
        Kept { all: Vec::new(), mark, blob_failures }
    }

    /// Removes the tables.
    fn remove(&self, state: &WriteState) {
        let tables = self.all.iter().flat_map(|family| &family.tables);
        state.remove_files(tables.map(|table| FileName::Sst(table.meta.number)).collect());
    }
}

/// The result of an attempt to flush a generation.
enum Outcome {
    Done,
    /// The tables of some family could not be written.
    Failed(Error),
    /// A blob file that they refer to cannot be made durable: other tables are needed.
    Again,
    /// Writing has ended.
    Ended,
}

/// Writes the tables of all families, then one change of the MANIFEST. If the tables of a family
/// cannot be written, the change covers the families before it, or their tables are kept for the
/// next attempt. Only an error that is not transient ends writing.
async fn generation_to_tables(
    state: &WriteState,
    generation: &Generation,
    progress: &mut Progress,
) -> Result<Outcome> {
    let mut kept = progress.kept.take().unwrap_or_else(|| Kept::new(state));
    let written: BTreeSet<u32> = kept.all.iter().map(|family| family.id).collect();
    let families: Vec<u32> = state.db.version().families.iter().map(|family| family.id).collect();
    let failed = state.blobs.failed();
    let mut failure = None;
    let mut mems_of: BTreeMap<u32, Vec<Arc<Mem>>> = BTreeMap::new();
    for (family, mem) in &generation.mems {
        mems_of.entry(*family).or_default().push(mem.clone());
    }
    for (count, id) in (1..).zip(families) {
        if count % ENTRIES_AT_ONCE == 0 {
            state.core.checkpoint().await;
        }
        let mems = mems_of.remove(&id).unwrap_or_default();
        let is_done = written.contains(&id) || progress.done.contains(&id);
        if is_done || is_cleared(state, generation, id) {
            continue;
        }
        if !mems.iter().any(|mem| has_entries(mem)) {
            let (tables, blobs) = (Vec::new(), BlobMeter::default());
            kept.all.push(Flushed { id, mems, tables, blobs });
            continue;
        }
        let (version, own) = (state.db.version(), mems.clone());
        let (began, pace) = (generation.began, state.paces.flush.clone());
        let copied = failed.clone();
        let work =
            async move |job: Job| tables(&job, &version, id, &own, began, &pace, &copied).await;
        let grace_ns = if state.flushes.done.get() == 0 { FIRST_GRACE_NS } else { 0 };
        match job::run(state, JobCore::Flush, grace_ns, work).await {
            Ok(Some((tables, blobs))) => kept.all.push(Flushed { id, mems, tables, blobs }),
            // The next opening removes the tables: no record names them.
            Ok(None) => return Ok(Outcome::Ended),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    if !generation.may_be_divided()
        && !mutant("failed_log_is_divided")
        && let Some(error) = failure
    {
        match error.kind() {
            Kind::Full => kept.remove(state),
            _ => progress.kept = Some(kept),
        }
        return Ok(Outcome::Failed(error));
    }
    if kept.all.iter().any(|family| !family.tables.is_empty()) {
        state.sync_blob_files().await;
        let synced = match state.blobs.failures() == kept.blob_failures {
            true => state.sync_names(kept.mark).await.map(|()| true),
            false => Ok(false),
        };
        if !matches!(synced, Ok(true)) {
            kept.remove(state);
            return synced.map(|_| Outcome::Again);
        }
    }
    let first = mutant("logs_go_first");
    if first && failure.is_none() {
        state.remove_logs_of(generation).await;
        // Another task removes them.
        state.core.sleep_ns(1_000_000).await;
    }
    let ids: Vec<u32> = kept.all.iter().map(|family| family.id).collect();
    install(state, generation, kept.all, failure.is_none()).await?;
    progress.done.extend(ids);
    if !first && failure.is_none() {
        state.remove_logs_of(generation).await;
    }
    Ok(failure.map_or(Outcome::Done, Outcome::Failed))
}

/// Whether a memtable needs a table.
fn has_entries(mem: &Mem) -> bool {
    mem.len() > 0 || mem.tombstones().is_some()
}

/// Replaces memtables by their tables. With `last`, no family needs the generation's logs
/// afterwards. A family without writes needs no record: these logs hold nothing of it.
pub(crate) async fn install(
    state: &WriteState,
    generation: &Generation,
    mut all: Vec<Flushed>,
    last: bool,
) -> Result<()> {
    let turn = state.manifest_turn().await?;
    let known_from = &state.flushes.known_from;
    known_from.set(known_from.get().max(generation.last_sequence));
    // Families that were cleared or dropped meanwhile.
    let version = state.db.version();
    let is_there = |id| version.families.place(id).is_some();
    let gone = all
        .extract_if(.., |family| is_cleared(state, generation, family.id) || !is_there(family.id));
    let gone: Vec<Flushed> = gone.collect();
    let log_number = generation.next_log + u64::from(mutant("log_number_is_newer"));
    let keys = state.keys_in_tables.get().zip(generation.keys);
    let keys = keys.and_then(|(all, new)| all.checked_add_signed(new));
    let mut edits = Vec::new();
    for family in &mut all {
        for table in &mut family.tables {
            table.meta.epoch = state.new_epoch();
        }
        // The number of keys goes with the default family's log number.
        let counts = family.id == 0 && keys != state.keys_in_tables.get();
        if !family.tables.is_empty() || counts {
            let mut edit = VersionEdit {
                column_family: family.id,
                keys: keys.filter(|_| family.id == 0),
                log_number: Some(log_number),
                new_files: family.tables.iter().map(|table| (0, table.meta.clone())).collect(),
                ..VersionEdit::default()
            };
            edit.blob_garbage = family.blobs.garbage(turn.state(), &edit);
            edits.push(edit);
        }
    }
    if last {
        if edits.is_empty() {
            edits.push(VersionEdit::default());
        }
        // The last record, because all of them together make the logs obsolete.
        if let Some(edit) = edits.last_mut() {
            edit.min_log_number_to_keep = Some(log_number);
        }
    }
    for edit in &mut edits {
        edit.last_sequence = Some(generation.last_sequence);
    }
    let tables = all.iter().flat_map(|family| &family.tables);
    let metas: Vec<FileMeta> = tables.map(|table| table.meta.clone()).collect();
    let of_families: Vec<(u32, u64)> = all
        .iter()
        .map(|family| {
            let sizes = family.tables.iter().map(|table| table.meta.size_bytes);
            (family.id, sizes.sum())
        })
        .collect();
    let has_default = all.iter().any(|family| family.id == 0);
    let apply = |version: &mut Version| all.into_iter().for_each(|family| replace(version, family));
    if edits.is_empty() {
        drop(turn);
        state.db.publish(apply);
    } else {
        turn.change(edits, apply).await?;
    }
    if last {
        state.blobs.flushed(generation.next_log);
    }
    state.remove_tables(gone.iter().flat_map(|family| &family.tables).map(|table| &table.meta));
    if has_default {
        state.keys_in_tables.set(keys);
    }
    state.count(|stats| {
        stats.flushed_tables += metas.len() as u64;
        stats.flushed_bytes += metas.iter().map(|meta| meta.size_bytes).sum::<u64>();
    });
    for (family, bytes) in of_families.into_iter().filter(|&(_, bytes)| bytes > 0) {
        state.merges.count(family, 0, |level| level.added_bytes += bytes);
    }
    Ok(())
}

/// Replaces a family's memtables by their tables.
fn replace(version: &mut Version, flushed: Flushed) {
    let Flushed { id, mems, tables, .. } = flushed;
    let slots: Vec<u32> = tables.into_iter().map(|table| version.put(table)).collect();
    let Some(family) = version.families.find_mut(id) else { return };
    family.mems.retain(|mem| !mems.iter().any(|gone| Arc::ptr_eq(gone, mem)));
    if slots.is_empty() {
        return;
    }
    if family.levels.is_empty() {
        family.levels.push(Arc::default());
    }
    let newest_first = slots.into_iter().rev().chain(family.levels[0].slots.iter().copied());
    family.levels[0] = Level::of(newest_first.collect(), &version.slots);
}

/// Whether a family was cleared after these memtables. Then the MANIFEST names a later log already.
fn is_cleared(state: &WriteState, generation: &Generation, id: u32) -> bool {
    state.cleared.borrow().get(&id).is_some_and(|&first_log| first_log >= generation.next_log)
}

/// Writes each memtable of a family to a table, the oldest first. The first of their entries was
/// written at `began`, in Unix seconds. Also counts the references to blob files.
async fn tables(
    job: &Job,
    version: &Arc<Version>,
    id: u32,
    mems: &[Arc<Mem>],
    began: u64,
    pace: &Pace,
    failed: &[u64],
) -> Result<(Vec<Table>, BlobMeter)> {
    let (mut tables, mut blobs) = (Vec::new(), BlobMeter::default());
    let Some(family) = version.families.find(id) else {
        return Ok((tables, blobs));
    };
    for mem in mems.iter().rev() {
        if has_entries(mem) {
            let values = Values { version, family: id, failed };
            tables.push(table(job, family, mem, began, pace, &mut blobs, Some(values)).await?);
        }
    }
    Ok((tables, blobs))
}

/// Writes a memtable to a table and opens it. Versions that no reader can see are omitted.
pub(crate) async fn table(
    job: &Job,
    family: &Family,
    mem: &Mem,
    oldest_ancestor_time: u64,
    pace: &Pace,
    blobs: &mut BlobMeter,
    values: Option<Values<'_>>,
) -> Result<Table> {
    let mut paced = Paced::new(pace, &job.busy);
    let bytes = mem.memory() as u64;
    let table = NewTable { place: TablePlace::FLUSH, bytes, oldest_ancestor_time };
    let mut writer = TableWriter::create(job, family, table).await?;
    let mut cursor = MemCursor::new(mem);
    let mut more = cursor.seek_to_first(mem);
    let mut added = 0;
    // The last entry that refers to a blob file.
    let mut last: Vec<u8> = Vec::new();
    let snapshots = job.db.readable(&job.core);
    let mut around = AroundMem(fragments(job, family, mem, &snapshots).await?);
    let mut iter = CompactionIter::new(Rules {
        snapshots,
        place: Place::Flush,
        merge_operator: family.merge.certain(),
        merge_bytes: merge_bytes_max(&job.core),
        filter: None,
        keep_sequences: false,
    });
    while more {
        let (user, mut packed) = split(cursor.key(mem));
        let value = cursor.value(mem);
        let mut value = value.as_ref().map_or(&b""[..], |value| mem.value(value));
        let copied;
        // A log that was replayed twice gives the same entry twice.
        if unpack(packed).1 == ValueType::BlobIndex as u8 && last != cursor.key(mem) {
            last.clear();
            last.extend_from_slice(cursor.key(mem));
            blobs.comes_in(&last, value);
        }
        if unpack(packed).1 == ValueType::BlobIndex as u8
            && let Some(values) = &values
            && let Some(found) = values.copy(job, user, value).await?
        {
            copied = found;
            (value, packed) = (&copied, pack(unpack(packed).0, ValueType::Value as u8));
        }
        iter.push(&mut around, user, packed, value)?;
        while let Some(output) = iter.next(value) {
            blobs.goes_out(output.key, output.value);
            writer.add(output.key, output.value).await?;
            paced.done(&job.core, (output.key.len() + output.value.len()) as u64).await;
        }
        more = cursor.next(mem);
        added += 1;
        if added % ENTRIES_AT_ONCE == 0 {
            job.core.checkpoint().await;
        }
    }
    iter.finish(&mut around);
    while let Some(output) = iter.next(b"") {
        blobs.goes_out(output.key, output.value);
        writer.add(output.key, output.value).await?;
    }
    for tombstone in around.0.between(None, None) {
        writer.add_range_tombstone(tombstone.start, tombstone.end, tombstone.sequence);
        added += 1;
        if added % ENTRIES_AT_ONCE == 0 {
            job.core.checkpoint().await;
        }
    }
    writer.finish(0).await
}

/// The values that references in memtables name.
pub(crate) struct Values<'a> {
    version: &'a Arc<Version>,
    family: u32,
    /// The blob files that cannot be made durable.
    failed: &'a [u64],
}

impl Values<'_> {
    /// The value of a reference to one of these files. `None` if it has been lost: then it is as
    /// well to keep the reference, which says where it was.
    async fn copy(&self, job: &Job, key: &[u8], index: &[u8]) -> Result<Option<Value>> {
        let number = BlobIndex::parse(index).map(|index| index.file_number);
        if !number.is_ok_and(|number| self.failed.contains(&number)) {
            return Ok(None);
        }
        let mut families = self.version.families.iter();
        let Some(family_at) = families.position(|family| family.id == self.family) else {
            return Ok(None);
        };
        let context = Reader::uncached(&job.db, &job.core).context_at(self.version);
        match blob::read(&context, family_at, key, index).await {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.kind() == Kind::Memory => Err(error),
            Err(error) => {
                tracing::error!("a value is lost: {error}");
                Ok(None)
            }
        }
    }
}

/// The range tombstones of a memtable, of those that the same readers see only the newest.
async fn fragments(job: &Job, family: &Family, mem: &Mem, snapshots: &[u64]) -> Result<Fragments> {
    let mut all = RangeDelAggregator::new(family.comparator, snapshots.to_vec());
    let tombstones = mem.tombstones();
    for (at, (start, end, sequence)) in tombstones.iter().flat_map(|all| all.iter()).enumerate() {
        all.add(start, end, sequence).map_err(|e| Error::format("range deletions", &e))?;
        if at % ENTRIES_AT_ONCE == 0 {
            job.core.checkpoint().await;
        }
    }
    let mut cutting = all.cut();
    while cutting.step() {
        job.core.checkpoint().await;
    }
    Ok(cutting.finish())
}

/// The range tombstones of a memtable.
struct AroundMem(Fragments);

impl Around for AroundMem {
    fn exists_below(&mut self, _: &[u8]) -> bool {
        true
    }

    fn has_tombstones(&self) -> bool {
        !self.0.is_empty()
    }

    fn covered(&mut self, user_key: &[u8], at: u64) -> u64 {
        self.0.max_sequence(user_key, at)
    }
}
