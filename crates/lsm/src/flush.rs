//! Writing memtables to tables of level 0, one generation after the other, in the background; and
//! when there is nothing of that to do, merging level 0 (`compaction.rs`).
//!
//! The order makes every crash harmless: tables, their names, then the MANIFEST's record that
//! has both the table and the log number; only then do readers change over, and only then do
//! logs go. A table that no record names is removed at the next opening.

use std::sync::Arc;

use rocksfmt::{FileName, VersionEdit};

use crate::compaction;
use crate::error::{Error, Result};
use crate::manifest_writer::ManifestWriter;
use crate::mem::{Mem, MemCursor};
use crate::table::Table;
use crate::table_writer::TableWriter;
use crate::version::{Family, Level, Slot};
use crate::writer::{Generation, Inner};

/// Entries between two looks at whether others want the core.
const ENTRIES_AT_ONCE: usize = 32;

/// Turns generations into tables until writing ends.
pub(crate) async fn run(inner: &Inner, mut manifest: ManifestWriter) {
    if let Err(error) = all_generations(inner, &mut manifest).await {
        inner.fail(&error);
    }
}

async fn all_generations(inner: &Inner, manifest: &mut ManifestWriter) -> Result<()> {
    let none = || inner.waiting.borrow().is_empty();
    let ends = || inner.closing.get() || inner.has_failed();
    loop {
        if none() && !ends() {
            if compaction::level0(inner, manifest).await? {
                inner.moved.ring();
                continue;
            }
            inner.moved.until(|| !none() || ends()).await;
        }
        // The first generation is what was recovered: writes may wait for it.
        if none() || (inner.closing.get() && inner.gone.get() > 0) || inner.has_failed() {
            return Ok(());
        }
        let generation = {
            let waiting = inner.waiting.borrow();
            let Some(first) = waiting.front() else { continue };
            Generation { mems: first.mems.clone(), next_log: first.next_log }
        };
        generation_to_tables(inner, manifest, &generation).await?;
        inner.waiting.borrow_mut().pop_front();
        inner.gone.set(inner.gone.get() + 1);
        inner.moved.ring();
    }
}

async fn generation_to_tables(
    inner: &Inner,
    manifest: &mut ManifestWriter,
    generation: &Generation,
) -> Result<()> {
    let version = inner.db.version();
    for family in &version.families {
        let mems: Vec<&Arc<Mem>> =
            generation.mems.iter().filter(|(id, _)| *id == family.id).map(|(_, mem)| mem).collect();
        let mut files = Vec::new();
        // The oldest first: a newer file of level 0 has the larger epoch.
        for mem in mems.iter().rev() {
            if mem.len() > 0 || mem.tombstones().is_some() {
                files.push(table(inner, family, mem, files.len() as u64).await?);
            }
        }
        if !files.is_empty() {
            inner.dir.sync().await.map_err(|e| Error::io(inner.dir.path().display(), &e))?;
        }
        let edit = VersionEdit {
            column_family: family.id,
            log_number: Some(generation.next_log),
            next_file_number: Some(inner.next_file()),
            last_sequence: Some(inner.db.visible()),
            new_files: files.iter().map(|table| (0, table.meta.clone())).collect(),
            ..VersionEdit::default()
        };
        manifest.append(&edit).await?;
        inner.publish(|version| {
            let mut slots = Vec::new();
            for table in files {
                slots.push(version.slots.len() as u32);
                version.slots.push(Slot::Open(Arc::new(table)));
            }
            let Some(at) = version.families.iter().position(|f| f.id == family.id) else { return };
            let family = &mut version.families[at];
            family.mems.retain(|mem| !mems.iter().any(|gone| Arc::ptr_eq(gone, mem)));
            slots.reverse();
            if family.levels.is_empty() {
                family.levels.push(Level::default());
            }
            slots.extend_from_slice(&family.levels[0].slots);
            family.levels[0] = Level::of(slots, &version.slots);
        });
    }
    remove_logs(inner, generation.next_log).await
}

/// Writes one memtable to a table and opens it.
async fn table(inner: &Inner, family: &Family, mem: &Mem, nth: u64) -> Result<Table> {
    let mut writer = TableWriter::create(inner, family).await?;
    let mut cursor = MemCursor::new(mem);
    let mut more = cursor.seek_to_first(mem);
    let mut added = 0;
    let mut last: Vec<u8> = Vec::new();
    while more {
        let key = cursor.key(mem);
        // A log that was replayed twice has the same entry twice.
        if key != &last[..] {
            last.clear();
            last.extend_from_slice(key);
            let value = cursor.value(mem);
            writer.add(key, value.as_ref().map_or(&b""[..], |value| mem.value(value))).await?;
        }
        more = cursor.next(mem);
        added += 1;
        if added % ENTRIES_AT_ONCE == 0 {
            inner.core.checkpoint().await;
        }
    }
    if let Some(tombstones) = mem.tombstones() {
        for (start, end, sequence) in tombstones.iter() {
            writer.add_range_tombstone(start, end, sequence);
        }
    }
    writer.finish(newest_epoch(inner, family) + 1 + nth).await
}

fn newest_epoch(inner: &Inner, family: &Family) -> u64 {
    let version = inner.db.version();
    let slots = version.families.iter().filter(|f| f.id == family.id).flat_map(|f| &f.levels);
    let epochs = slots.flat_map(|level| &level.slots).map(|&slot| version.meta(slot).epoch);
    epochs.max().unwrap_or(0)
}

/// Removes the logs that the MANIFEST has made needless.
async fn remove_logs(inner: &Inner, below: u64) -> Result<()> {
    let io = |e: std::io::Error| Error::io(inner.dir.path().display(), &e);
    for entry in inner.dir.list().await.map_err(io)? {
        if matches!(FileName::parse(&entry.name), Some(FileName::Wal(number)) if number < below) {
            inner.dir.remove(&entry.name).await.map_err(io)?;
        }
    }
    Ok(())
}
