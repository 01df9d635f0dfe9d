//! Writing memtables to tables of level 0, one generation after the other, in the background.
//!
//! The order makes every crash harmless: tables, their names, then the MANIFEST's record that
//! has both the table and the log number; only then do readers change over, and only then do
//! logs go. A table that no record names is removed at the next opening.

use std::sync::Arc;

use rocksfmt::{FileMeta, ValueType, VersionEdit, unpack};

use crate::error::{Kind, Result};
use crate::job::{self, ENTRIES_AT_ONCE, Job, Place};
use crate::mem::{Mem, MemCursor, split};
use crate::mutant::mutant;
use crate::pace::{Pace, Paced};
use crate::space::Task;
use crate::table::Table;
use crate::table_writer::TableWriter;
use crate::version::{Family, Level, Version};
use crate::writer::{Generation, Inner};

/// Turns generations into tables until writing ends.
pub(crate) async fn run(inner: &Inner) {
    if let Err(error) = all_generations(inner).await {
        inner.fail(&error);
    }
}

async fn all_generations(inner: &Inner) -> Result<()> {
    let none = || inner.waiting.borrow().is_empty();
    // The families of the first generation that have their tables.
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
        match generation_to_tables(inner, &generation, &mut done).await {
            Err(error) if error.kind() == Kind::Full => {
                inner.is_full(Task::Flush, &error);
                inner.until_space(since_ns).await;
                if inner.closing.get() {
                    return Ok(());
                }
                continue;
            }
            Err(error) if error.kind() == Kind::Memory => {
                inner.lacks_memory("a flush", &error).await;
                continue;
            }
            result => result?,
        }
        inner.has_room(Task::Flush);
        done.clear();
        inner.waiting.borrow_mut().pop_front();
        inner.set_paces();
        inner.gone.set(inner.gone.get() + 1);
        inner.moved.ring();
    }
}

async fn generation_to_tables(
    inner: &Inner,
    generation: &Generation,
    done: &mut Vec<u32>,
) -> Result<()> {
    let families: Vec<u32> = inner.db.version().families.iter().map(|family| family.id).collect();
    for id in families {
        let mems: Vec<Arc<Mem>> = generation
            .mems
            .iter()
            .filter(|(family, _)| *family == id)
            .map(|(_, mem)| mem.clone())
            .collect();
        if is_cleared(inner, generation, id) || done.contains(&id) {
            continue;
        }
        let tables = {
            let (mems, version) = (mems.clone(), inner.db.version());
            let pace = inner.flush_pace.clone();
            let work = async move |job: Job| tables(&job, &version, id, &mems, &pace).await;
            job::run(&inner.core, Place::Flush, &inner.db, inner.options.compression, work).await?
        };
        if !tables.is_empty() {
            inner.sync_names().await?;
        }
        if mutant("logs_go_first") {
            inner.log_is_old(generation).await?;
            // The removal is done by another task.
            inner.core.sleep_ns(1_000_000).await;
            return install(inner, id, generation, &mems, tables).await;
        }
        install(inner, id, generation, &mems, tables).await?;
        done.push(id);
    }
    inner.log_is_old(generation).await
}

/// Puts the tables in the place of the memtables.
async fn install(
    inner: &Inner,
    id: u32,
    generation: &Generation,
    mems: &[Arc<Mem>],
    mut tables: Vec<Table>,
) -> Result<()> {
    let turn = inner.manifest_turn().await?;
    if is_cleared(inner, generation, id) {
        drop(turn);
        inner.remove_tables(tables.iter().map(|table| &table.meta));
        return Ok(());
    }
    for table in &mut tables {
        table.meta.epoch = inner.new_epoch();
    }
    let metas: Vec<FileMeta> = tables.iter().map(|table| table.meta.clone()).collect();
    let keys = inner.keys_in_tables.get().zip(generation.keys);
    let keys = keys.and_then(|(all, new)| all.checked_add_signed(new));
    let edit = VersionEdit {
        column_family: id,
        keys: keys.filter(|_| id == 0),
        log_number: Some(generation.next_log + u64::from(mutant("log_number_is_newer"))),
        new_files: metas.iter().map(|meta| (0, meta.clone())).collect(),
        ..VersionEdit::default()
    };
    let changed = turn.change(edit, |version| {
        let slots: Vec<u32> = tables.into_iter().map(|table| version.put(table)).collect();
        let Some(at) = version.families.iter().position(|f| f.id == id) else { return };
        let family = &mut version.families[at];
        family.mems.retain(|mem| !mems.iter().any(|gone| Arc::ptr_eq(gone, mem)));
        if family.levels.is_empty() {
            family.levels.push(Level::default());
        }
        let newest_first = slots.into_iter().rev().chain(family.levels[0].slots.iter().copied());
        family.levels[0] = Level::of(newest_first.collect(), &version.slots);
    });
    if let Err(error) = changed.await {
        if error.kind() == Kind::Full {
            job::unmake(&inner.dir, metas.iter().map(|meta| meta.number)).await;
        }
        return Err(error);
    }
    if id == 0 {
        inner.keys_in_tables.set(keys);
    }
    inner.stats(|stats| {
        stats.flushed_tables += metas.len() as u64;
        stats.flushed_bytes += metas.iter().map(|meta| meta.size_bytes).sum::<u64>();
    });
    Ok(())
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
        if mem.len() > 0 || mem.tombstones().is_some() {
            tables.push(table(job, family, mem, pace).await?);
        }
    }
    Ok(tables)
}

/// Writes one memtable to a table and opens it. Versions that nobody can see are left out.
async fn table(job: &Job, family: &Family, mem: &Mem, pace: &Pace) -> Result<Table> {
    let mut paced = Paced::new(pace);
    let mut writer = TableWriter::create(job, family, mem.memory() as u64).await?;
    let mut cursor = MemCursor::new(mem);
    let mut more = cursor.seek_to_first(mem);
    let mut added = 0;
    let mut last: Vec<u8> = Vec::new();
    // What is older than this and hidden, nobody can see.
    let oldest = job.db.oldest_seen();
    let mut hidden = false;
    while more {
        let key = cursor.key(mem);
        let (user, packed) = split(key);
        hidden &= user == split(&last).0;
        // A log that was replayed twice has the same entry twice.
        if !hidden && key != &last[..] {
            let value = cursor.value(mem);
            let value = value.as_ref().map_or(&b""[..], |value| mem.value(value));
            writer.add(key, value).await?;
            paced.done(&job.core, (key.len() + value.len()) as u64).await;
        }
        let (sequence, kind) = unpack(packed);
        // A merge operand is nothing without what lies below it, nor is a deletion of one version.
        let stands_alone = matches!(
            ValueType::from_byte(kind),
            Some(ValueType::Value | ValueType::Deletion | ValueType::BlobIndex)
        );
        hidden |= sequence <= oldest && stands_alone;
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
