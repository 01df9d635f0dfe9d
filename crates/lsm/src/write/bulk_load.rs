//! Loading sorted entries straight into the bottom level: each is written once, and never merged.
//!
//! 1. The entries go to tables, one behind the other, of the size that merges give theirs.
//! 2. The tables' names are made durable; then one record of the MANIFEST has them all. Before it
//!    nobody sees any of them, behind it everybody sees all. A crash before it leaves files that no
//!    record names, which go at the next opening.
//!
//! The entries have the sequence number 0, as RocksDB gives it to what it ingests into the bottom
//! level. So nothing may be there that a reader could take for older than they are: from the first
//! loaded key to the last the family has no table and no write in memory, which is looked at
//! when nobody else can add one to the tables. A write into that range that comes while the entries
//! are being loaded is newer than they are, and wins, if it comes after that look; otherwise it
//! ends the load. A snapshot that was taken before sees what was loaded, as it does with RocksDB
//! where snapshots are not asked to be consistent with ingestion.

use rocksfmt::{
    Comparator, FileName, LEVELS_MAX, SEEK_TYPE, SEQUENCE_MAX, ValueType, VersionEdit, pack,
};

use crate::db::CfId;
use crate::error::{Error, Kind, Result};
use crate::mem::{Mem, MemCursor};
use crate::table::Table;
use crate::version::{Family, Level, Version, user_key};
use crate::write::job::{ENTRIES_AT_ONCE, Job, Made};
use crate::write::table_writer::{TableWriter, file_bytes};
use crate::write::writer::{Inner, Writer};

impl Writer {
    /// Loads entries, all or nothing, into a part of a column family that has none; see the module
    /// text. `next` puts a key and a value into its two arguments, which come empty, until it
    /// returns false; keys rise. Returns how many there were. Suspends for the disk, and as `next`
    /// does. Durable when done, whatever the durability.
    ///
    /// # Errors
    /// Those of `next`; [`Kind::UnknownColumnFamily`]; [`Kind::Unsupported`] when keys do not rise,
    /// or something is there already between the first and the last: then nothing was loaded.
    /// [`Kind::Full`] when the disk is full: then nothing is left of it. [`Kind::Io`] when the disk
    /// refuses; if that was the MANIFEST, writing has ended.
    pub async fn bulk_load(
        &self,
        family: CfId,
        next: impl AsyncFnMut(&mut Vec<u8>, &mut Vec<u8>) -> Result<bool>,
    ) -> Result<u64> {
        let inner = &*self.0;
        let _working = inner.work()?;
        let version = inner.db.version();
        let job = Job {
            core: inner.core.clone(),
            dir: inner.dir.clone(),
            db: inner.db.clone(),
            compression: inner.options.compression,
            made: Made::default(),
        };
        let mut load = Load::new(&job, version.family(family)?);
        let loaded = async {
            load.all(next).await?;
            install(inner, family, &mut load.tables).await
        };
        let result = loaded.await;
        // Of a change of the MANIFEST that failed nobody knows whether it has them.
        if result.is_err() && !inner.has_failed() {
            inner.remove_files(job.made.take().into_iter().map(FileName::Sst).collect());
        }
        result.map(|()| load.entries)
    }
}

/// Tables that are being written.
struct Load<'a> {
    job: &'a Job,
    family: &'a Family,
    file: Option<TableWriter<'a>>,
    tables: Vec<Table>,
    entries: u64,
}

impl<'a> Load<'a> {
    fn new(job: &'a Job, family: &'a Family) -> Load<'a> {
        Load { job, family, file: None, tables: Vec::new(), entries: 0 }
    }

    async fn all(
        &mut self,
        mut next: impl AsyncFnMut(&mut Vec<u8>, &mut Vec<u8>) -> Result<bool>,
    ) -> Result<()> {
        let order = self.family.comparator;
        let (mut key, mut value, mut last) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            key.clear();
            value.clear();
            if !next(&mut key, &mut value).await? {
                return self.end_file().await;
            }
            if self.entries > 0 && order.cmp_user(user_key(&last), &key).is_ge() {
                let what = format!("entry {} of a bulk load: its key does not rise", self.entries);
                return Err(Error::new(Kind::Unsupported, what));
            }
            key.extend_from_slice(&pack(0, ValueType::Value as u8).to_le_bytes());
            if self.file.as_ref().is_some_and(|file| file.len() >= file_bytes(self.job)) {
                self.end_file().await?;
            }
            let file = match &mut self.file {
                Some(file) => file,
                none => none.insert(
                    TableWriter::create(self.job, self.family, file_bytes(self.job)).await?,
                ),
            };
            file.add(&key, &value).await?;
            std::mem::swap(&mut key, &mut last);
            self.entries += 1;
            if self.entries.is_multiple_of(ENTRIES_AT_ONCE as u64) {
                self.job.core.checkpoint().await;
            }
        }
    }

    async fn end_file(&mut self) -> Result<()> {
        if let Some(file) = self.file.take() {
            self.tables.push(file.finish(0).await?);
        }
        Ok(())
    }
}

/// Makes the tables part of the database and takes them; leaves them where that cannot be.
async fn install(inner: &Inner, id: CfId, tables: &mut Vec<Table>) -> Result<()> {
    let (Some(first), Some(last)) = (tables.first(), tables.last()) else { return Ok(()) };
    inner.sync_names().await?;
    let turn = inner.manifest_turn().await?;
    let version = inner.db.version();
    let family = version.family(id)?;
    let range = (user_key(&first.meta.smallest), user_key(&last.meta.largest));
    if let Some(there) = overlap(&version, family, range) {
        let what = format!("a bulk load: between its first and its last key there is {there}");
        return Err(Error::new(Kind::Unsupported, what));
    }
    let level = bottom_level(inner, family);
    if level == 0 {
        let what = format!("a bulk load: column family {} has one level only", family.name);
        return Err(Error::new(Kind::Unsupported, what));
    }
    let mut tables = std::mem::take(tables);
    for table in &mut tables {
        table.meta.epoch = inner.new_epoch();
    }
    let entries: u64 = tables.iter().map(|table| table.properties.num_entries).sum();
    let in_tables = inner.keys_in_tables.get().and_then(|keys| keys.checked_add(entries));
    let edit = VersionEdit {
        column_family: id,
        keys: in_tables.filter(|_| id == 0),
        new_files: tables.iter().map(|table| (level as u32, table.meta.clone())).collect(),
        ..VersionEdit::default()
    };
    let changed = turn.change(vec![edit], |version| put(version, id, level, tables)).await;
    if let Err(error) = &changed
        && error.kind() != Kind::Full
    {
        inner.fail(error);
    }
    changed?;
    if id == 0 {
        inner.keys_in_tables.set(in_tables);
        inner.db.set_keys(inner.db.keys().and_then(|keys| keys.checked_add(entries)));
    }
    Ok(())
}

/// What a family has between two keys, these included.
fn overlap(version: &Version, family: &Family, (first, last): (&[u8], &[u8])) -> Option<String> {
    let order = family.comparator;
    let apart = |from: &[u8], to: &[u8]| {
        order.cmp_user(to, first).is_lt() || order.cmp_user(from, last).is_gt()
    };
    let slots = family.levels.iter().flat_map(|level| &level.slots);
    let mut metas = slots.map(|&slot| version.meta(slot));
    if let Some(meta) = metas.find(|m| !apart(user_key(&m.smallest), user_key(&m.largest))) {
        return Some(format!("table {}", meta.number));
    }
    let written = family.mems.iter().any(|mem| {
        let tombstones = mem.tombstones().into_iter().flat_map(|set| set.iter());
        has_key(mem, order, first, last) || tombstones.into_iter().any(|t| !apart(t.0, t.1))
    });
    written.then(|| "something in memory".to_owned())
}

/// Whether a memtable has an entry between two keys.
fn has_key(mem: &Mem, order: Comparator, first: &[u8], last: &[u8]) -> bool {
    let mut target = first.to_vec();
    // Before every entry of the key.
    target.extend_from_slice(&pack(SEQUENCE_MAX, SEEK_TYPE).to_le_bytes());
    let mut cursor = MemCursor::new(mem);
    cursor.seek(mem, &target) && order.cmp_user(user_key(cursor.key(mem)), last).is_le()
}

/// The deepest level that RocksDB has too, when it opens the directory with the options it wrote.
fn bottom_level(inner: &Inner, family: &Family) -> usize {
    let levels = inner.db.0.stored_options.levels(&family.name);
    levels.clamp(1, LEVELS_MAX as usize).max(family.levels.len()) - 1
}

/// Adds tables to a sorted level.
fn put(version: &mut Version, id: CfId, level: usize, tables: Vec<Table>) {
    let new: Vec<u32> = tables.into_iter().map(|table| version.put(table)).collect();
    let Some(family) = version.families.iter_mut().find(|family| family.id == id) else { return };
    family.levels.resize_with(family.levels.len().max(level + 1), Level::default);
    let all: Vec<u32> = family.levels[level].slots.iter().copied().chain(new).collect();
    family.levels[level] = Level::sorted(all, &version.slots, family.comparator);
}
