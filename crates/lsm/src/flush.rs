//! Writing memtables to tables of level 0, one generation after the other, in the background; and
//! when there is nothing of that to do, merging level 0 (`compaction.rs`).
//!
//! The order makes every crash harmless: tables, their names, then the MANIFEST's record that
//! has both the table and the log number; only then do readers change over, and only then do
//! logs go. A table that no record names is removed at the next opening.

use std::sync::Arc;

use fs::{FileWriter, Mode};
use rocksfmt::{
    BlobIndex, FileMeta, FileName, InternalKey, SstBuilder, SstOptions, ValueType, VersionEdit,
};

use crate::compaction;
use crate::error::{Error, Result};
use crate::manifest_writer::ManifestWriter;
use crate::mem::{Mem, MemCursor};
use crate::table::Table;
use crate::version::{Family, Level, Slot};
use crate::writer::{Generation, Inner};

/// Entries between two looks at whether others want the core.
const ENTRIES_AT_ONCE: usize = 32;

/// Turns generations into tables until writing ends.
pub(crate) async fn run(inner: &Inner, mut manifest: ManifestWriter) {
    loop {
        let none = || inner.waiting.borrow().is_empty();
        if none() && !inner.closing.get() && !inner.has_failed() {
            match compaction::level0(inner, &mut manifest).await {
                Ok(false) => {
                    inner
                        .moved
                        .until(|| !none() || inner.closing.get() || inner.has_failed())
                        .await;
                }
                Ok(true) => {
                    inner.moved.ring();
                    continue;
                }
                Err(error) => {
                    inner.fail(&error);
                    return;
                }
            }
        }
        // The first generation is what was recovered: writes may wait for it.
        if none() || (inner.closing.get() && inner.gone.get() > 0) || inner.has_failed() {
            return;
        }
        let generation = {
            let waiting = inner.waiting.borrow();
            let Some(first) = waiting.front() else { continue };
            Generation { mems: first.mems.clone(), next_log: first.next_log }
        };
        if let Err(error) = generation_to_tables(inner, &mut manifest, &generation).await {
            inner.fail(&error);
            return;
        }
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
            let mut level = Level::default();
            for slot in slots {
                level.push(slot, version.slots[slot as usize].meta());
            }
            family.levels[0] = level;
        });
    }
    remove_logs(inner, generation.next_log).await
}

/// How a family's tables are written.
pub(crate) fn table_options(inner: &Inner, family: &Family) -> SstOptions {
    SstOptions {
        comparator: family.comparator,
        column_family: family.id,
        column_family_name: family.name.clone(),
        compression: inner.options.compression,
        creation_time: inner.core.unix_time_ms() / 1000,
        ..SstOptions::default()
    }
}

/// Writes one memtable to a table and opens it.
async fn table(inner: &Inner, family: &Family, mem: &Mem, nth: u64) -> Result<Table> {
    let number = inner.new_number();
    let name = FileName::Sst(number).to_string();
    let io = |e: std::io::Error| Error::io(&name, &e);
    let format = |e: rocksfmt::Error| Error::format(&name, &e);
    let file = inner.core.attach(&inner.dir.create(&name, Mode::Direct).await.map_err(io)?);
    let mut writer = FileWriter::new(&file).await.map_err(io)?;
    let mut builder = SstBuilder::new(table_options(inner, family));
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
            let value = value.as_ref().map_or(&b""[..], |value| mem.value(value));
            builder.add(key, value).map_err(format)?;
            let kind = InternalKey::parse(key).and_then(|key| key.value_type()).map_err(format)?;
            if kind == ValueType::BlobIndex {
                builder.refers_to_blob_file(BlobIndex::parse(value).map_err(format)?.file_number);
            }
        }
        more = cursor.next(mem);
        added += 1;
        if added % ENTRIES_AT_ONCE == 0 {
            writer.append(builder.output()).await.map_err(io)?;
            builder.output_taken();
            inner.core.checkpoint().await;
        }
    }
    if let Some(tombstones) = mem.tombstones() {
        for (start, end, sequence) in tombstones.iter() {
            builder.add_range_tombstone(start, end, sequence);
        }
    }
    let (rest, meta) = builder.finish();
    writer.append(&rest).await.map_err(io)?;
    writer.finish().await.map_err(io)?;
    let epoch = newest_epoch(inner, family) + 1 + nth;
    let meta = FileMeta { number, epoch, ..meta };
    Table::open(&inner.core, &inner.dir, &name, meta, family.comparator).await
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
