//! Writing memtables to tables of level 0, one generation after the other, in the background.
//!
//! The order makes every crash harmless: tables, their names, then the MANIFEST's records that
//! have both the tables and the log numbers, all families at once; only then do readers change
//! over, and only then do logs go. A table that no record names is removed at the next opening.

use std::sync::Arc;

use rocksfmt::{FileMeta, VersionEdit, unpack};

use crate::error::{Error, Kind, Result};
use crate::mem::{Mem, MemCursor, split};
use crate::mutant::mutant;
use crate::table::Table;
use crate::version::{Family, Level, Version};
use crate::write::job::{self, ENTRIES_AT_ONCE, Job, Place};
use crate::write::keep::Keep;
use crate::write::pace::{Pace, Paced};
use crate::write::space::Task;
use crate::write::table_writer::TableWriter;
use crate::write::writer::{Generation, Inner};

/// How long the first generation, which was recovered, may still take when writing has ended, in
/// nanoseconds. Without it whoever opens, writes little and closes would leave ever more logs.
const FIRST_GRACE_NS: u64 = 3_000_000_000;

/// Turns generations into tables until writing ends.
pub(crate) async fn run(inner: &Inner) {
    if let Err(error) = all_generations(inner).await {
        inner.fail(&error);
    }
}

async fn all_generations(inner: &Inner) -> Result<()> {
    let none = || inner.waiting.borrow().is_empty();
    // The families of the first generation that have their tables, where others found no room.
    let mut done = Vec::new();
    loop {
        inner.moved.until(|| !none() || inner.rests()).await;
        // The first generation is what was recovered: writes may wait for it.
        if none() || (inner.rests() && inner.gone.get() > 0) || inner.has_failed() {
            return Ok(());
        }
        let generation = {
            let waiting = inner.waiting.borrow();
            let Some(first) = waiting.front() else { continue };
            Generation { mems: first.mems.clone(), log: None, ..*first }
        };
        let since_ns = inner.core.now_ns();
        let fell_short = match generation_to_tables(inner, &generation, &mut done).await {
            Ok(Outcome::Done) => None,
            Ok(Outcome::GivenUp) => return Ok(()),
            Ok(Outcome::FellShort(error)) => Some(error),
            Err(error) if matches!(error.kind(), Kind::Full | Kind::Memory) => Some(error),
            Err(error) => return Err(error),
        };
        match fell_short {
            Some(error) if error.kind() == Kind::Memory => {
                inner.lacks_memory("a flush", &error).await;
                if inner.rests() {
                    return Ok(());
                }
                continue;
            }
            Some(error) => {
                inner.try_later(Task::Flush, &error, since_ns).await;
                if inner.closing.get() {
                    return Ok(());
                }
                continue;
            }
            None => {}
        }
        inner.has_room(Task::Flush);
        done.clear();
        inner.waiting.borrow_mut().pop_front();
        inner.set_paces();
        inner.gone.set(inner.gone.get() + 1);
        inner.moved.ring();
    }
}

/// What a family of a generation has become.
pub(crate) struct Flushed {
    pub id: u32,
    pub mems: Vec<Arc<Mem>>,
    pub tables: Vec<Table>,
}

/// What became of an attempt to write a generation's tables.
enum Outcome {
    Done,
    /// The tables of some family could not be written.
    FellShort(Error),
    /// Writing has ended.
    GivenUp,
}

/// Writes the tables of all families, and then one change of the MANIFEST. Where one's cannot be
/// written, the change is about those before it. An error ends all writing, unless it is a full
/// disk or a lack of memory.
async fn generation_to_tables(
    inner: &Inner,
    generation: &Generation,
    done: &mut Vec<u32>,
) -> Result<Outcome> {
    let families: Vec<u32> = inner.db.version().families.iter().map(|family| family.id).collect();
    let mut all = Vec::new();
    let mut fell_short = None;
    for id in families {
        let of_family = generation.mems.iter().filter(|(family, _)| *family == id);
        let mems: Vec<Arc<Mem>> = of_family.map(|(_, mem)| mem.clone()).collect();
        if is_cleared(inner, generation, id) || done.contains(&id) {
            continue;
        }
        if !mems.iter().any(|mem| has_entries(mem)) {
            all.push(Flushed { id, mems, tables: Vec::new() });
            continue;
        }
        let (version, own) = (inner.db.version(), mems.clone());
        let pace = inner.flush_pace.clone();
        let work = async move |job: Job| tables(&job, &version, id, &own, &pace).await;
        let grace_ns = if inner.gone.get() == 0 { FIRST_GRACE_NS } else { 0 };
        match job::run(inner, Place::Flush, grace_ns, work).await {
            Ok(Some(tables)) => all.push(Flushed { id, mems, tables }),
            // The next opening removes the tables: no record has them.
            Ok(None) => return Ok(Outcome::GivenUp),
            Err(error) => {
                fell_short = Some(error);
                break;
            }
        }
    }
    if all.iter().any(|family| !family.tables.is_empty()) {
        inner.sync_names().await?;
    }
    let first = mutant("logs_go_first");
    if first && fell_short.is_none() {
        inner.log_is_old(generation).await;
        // The removal is done by another task.
        inner.core.sleep_ns(1_000_000).await;
    }
    let ids: Vec<u32> = all.iter().map(|family| family.id).collect();
    install(inner, generation, all, fell_short.is_none()).await?;
    done.extend(ids);
    if !first && fell_short.is_none() {
        inner.log_is_old(generation).await;
    }
    Ok(fell_short.map_or(Outcome::Done, Outcome::FellShort))
}

/// Whether a memtable is worth a table.
fn has_entries(mem: &Mem) -> bool {
    mem.len() > 0 || mem.tombstones().is_some()
}

/// Puts the tables in the place of the memtables. `last`: afterwards no family needs the
/// generation's logs. A family that had nothing needs no record: what it has is not in these logs.
pub(crate) async fn install(
    inner: &Inner,
    generation: &Generation,
    mut all: Vec<Flushed>,
    last: bool,
) -> Result<()> {
    let turn = inner.manifest_turn().await?;
    // Cleared meanwhile.
    let gone = all.extract_if(.., |family| is_cleared(inner, generation, family.id));
    let gone: Vec<Flushed> = gone.collect();
    let log_number = generation.next_log + u64::from(mutant("log_number_is_newer"));
    let keys = inner.keys_in_tables.get().zip(generation.keys);
    let keys = keys.and_then(|(all, new)| all.checked_add_signed(new));
    let mut edits = Vec::new();
    for family in &mut all {
        for table in &mut family.tables {
            table.meta.epoch = inner.new_epoch();
        }
        // The number of keys goes with the default family's log number.
        let counts = family.id == 0 && keys != inner.keys_in_tables.get();
        if !family.tables.is_empty() || counts {
            edits.push(VersionEdit {
                column_family: family.id,
                keys: keys.filter(|_| family.id == 0),
                log_number: Some(log_number),
                new_files: family.tables.iter().map(|table| (0, table.meta.clone())).collect(),
                ..VersionEdit::default()
            });
        }
    }
    if last {
        if edits.is_empty() {
            edits.push(VersionEdit::default());
        }
        // Only with all of the others: they make the logs needless.
        if let Some(edit) = edits.last_mut() {
            edit.min_log_number_to_keep = Some(log_number);
        }
    }
    for edit in &mut edits {
        edit.last_sequence = Some(generation.last_sequence);
    }
    let tables = all.iter().flat_map(|family| &family.tables);
    let metas: Vec<FileMeta> = tables.map(|table| table.meta.clone()).collect();
    let has_default = all.iter().any(|family| family.id == 0);
    let apply = |version: &mut Version| all.into_iter().for_each(|family| replace(version, family));
    if edits.is_empty() {
        drop(turn);
        inner.db.publish(apply);
    } else {
        if let Err(error) = turn.change(edits, apply).await {
            if error.kind() == Kind::Full {
                job::unmake(&inner.dir, metas.iter().map(|meta| meta.number)).await;
            }
            return Err(error);
        }
    }
    inner.remove_tables(gone.iter().flat_map(|family| &family.tables).map(|table| &table.meta));
    if has_default {
        inner.keys_in_tables.set(keys);
    }
    inner.stats(|stats| {
        stats.flushed_tables += metas.len() as u64;
        stats.flushed_bytes += metas.iter().map(|meta| meta.size_bytes).sum::<u64>();
    });
    Ok(())
}

/// Puts a family's tables in the place of its memtables.
fn replace(version: &mut Version, flushed: Flushed) {
    let Flushed { id, mems, tables } = flushed;
    let slots: Vec<u32> = tables.into_iter().map(|table| version.put(table)).collect();
    let Some(at) = version.families.iter().position(|family| family.id == id) else { return };
    let family = &mut version.families[at];
    family.mems.retain(|mem| !mems.iter().any(|gone| Arc::ptr_eq(gone, mem)));
    if slots.is_empty() {
        return;
    }
    if family.levels.is_empty() {
        family.levels.push(Level::default());
    }
    let newest_first = slots.into_iter().rev().chain(family.levels[0].slots.iter().copied());
    family.levels[0] = Level::of(newest_first.collect(), &version.slots);
}

/// Whether nobody wants the memtables any more. Then the MANIFEST says a later log already.
fn is_cleared(inner: &Inner, generation: &Generation, id: u32) -> bool {
    inner.cleared.borrow().get(&id).is_some_and(|&first_log| first_log >= generation.next_log)
}

/// Writes the memtables of one family to a table each, the oldest first.
async fn tables(
    job: &Job,
    version: &Version,
    id: u32,
    mems: &[Arc<Mem>],
    pace: &Pace,
) -> Result<Vec<Table>> {
    let mut tables = Vec::new();
    let Some(family) = version.families.iter().find(|family| family.id == id) else {
        return Ok(tables);
    };
    for mem in mems.iter().rev() {
        if has_entries(mem) {
            tables.push(table(job, family, mem, pace).await?);
        }
    }
    Ok(tables)
}

/// Writes one memtable to a table and opens it. Versions that nobody can see are left out.
pub(crate) async fn table(job: &Job, family: &Family, mem: &Mem, pace: &Pace) -> Result<Table> {
    let mut paced = Paced::new(pace);
    let mut writer = TableWriter::create(job, family, mem.memory() as u64).await?;
    let mut cursor = MemCursor::new(mem);
    let mut more = cursor.seek_to_first(mem);
    let mut added = 0;
    let mut last: Vec<u8> = Vec::new();
    let mut keep = Keep::new(job.db.oldest_seen());
    while more {
        let key = cursor.key(mem);
        let (user, packed) = split(key);
        if user != split(&last).0 {
            keep.begin_key(0, false);
        }
        let (sequence, kind) = unpack(packed);
        // A log that was replayed twice has the same entry twice.
        if key != &last[..] && keep.stays(sequence, kind) {
            let value = cursor.value(mem);
            let value = value.as_ref().map_or(&b""[..], |value| mem.value(value));
            writer.add(key, value).await?;
            paced.done(&job.core, (key.len() + value.len()) as u64).await;
        }
        last.clear();
        last.extend_from_slice(key);
        more = cursor.next(mem);
        added += 1;
        if added % ENTRIES_AT_ONCE == 0 {
            job.core.checkpoint().await;
        }
    }
    if let Some(tombstones) = mem.tombstones() {
        for (start, end, sequence) in tombstones.iter() {
            writer.add_range_tombstone(start, end, sequence);
        }
    }
    writer.finish(0).await
}
