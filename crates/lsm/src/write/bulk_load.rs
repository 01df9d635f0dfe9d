//! Loading sorted entries directly into the bottom level: each is written once, and never merged.
//!
//! 1. The entries are written to tables, one after the other, as large as those of merges.
//! 2. The tables' names are made durable. Then one record of the MANIFEST names them all: before it
//!    no reader sees any of them, after it every reader sees all. A crash before it leaves files
//!    that no record names; the next opening removes them.
//!
//! The entries have the sequence number 0, as RocksDB gives it to files that it ingests into the
//! bottom level. So the family must have nothing older: no table and no write in memory from the
//! first loaded key to the last. This is checked during the turn at the MANIFEST, when no other
//! task can add a table. A write into that range during the load makes the load fail if it comes
//! before the check. If it comes later, it is newer than the entries and wins. A snapshot taken
//! before the load sees the loaded entries, as with RocksDB if snapshots are not asked to be
//! consistent with ingestion.

use fs::NamesMark;
use rocksfmt::{Comparator, LEVELS_MAX, SEEK_TYPE, SEQUENCE_MAX, ValueType, VersionEdit, pack};

use crate::db::CfId;
use crate::error::{Error, Kind, Result};
use crate::mem::{Mem, MemCursor};
use crate::table::Table;
use crate::table_options::TablePlace;
use crate::version::{Family, Version, user_key};
use crate::write::compaction::Reservation;
use crate::write::job::{ENTRIES_AT_ONCE, Job, MadeFiles};
use crate::write::pace::BusyTime;
use crate::write::state::WriteState;
use crate::write::table_writer::{NewTable, TableWriter, file_bytes};
use crate::write::writer::Writer;

impl Writer {
    /// Whether a column family has nothing from a key on, not even deletions: a bulk load that
    /// begins there succeeds if nothing is written there meanwhile.
    ///
    /// # Errors
    /// [`Kind::UnknownColumnFamily`].
    pub fn has_nothing_from(&self, family: CfId, key: &[u8]) -> Result<bool> {
        let version = self.0.db.version();
        let family = version.family(family)?;
        let order = family.comparator;
        let slots = family.levels.iter().flat_map(|level| &level.slots);
        let mut metas = slots.map(|&slot| version.meta(slot));
        if !metas.all(|meta| order.cmp_user(user_key(&meta.largest), key).is_lt()) {
            return Ok(false);
        }
        let mut target = key.to_vec();
        target.extend_from_slice(&pack(SEQUENCE_MAX, SEEK_TYPE).to_le_bytes());
        Ok(family.mems.iter().all(|mem| {
            let tombstones = mem.tombstones();
            let mut ranges = tombstones.iter().flat_map(|all| all.iter());
            !MemCursor::new(mem).seek(mem, &target)
                && ranges.all(|(_, end, _)| order.cmp_user(end, key).is_le())
        }))
    }

    /// Loads entries, all or nothing, into an empty key range of a column family. `next` puts a key
    /// and a value into its two arguments, which are empty, until it returns false; keys must
    /// ascend. Returns the number of entries. Suspends for the disk, and as `next` does. The
    /// entries are durable when it returns, whatever the durability.
    ///
    /// # Errors
    /// Those of `next`; [`Kind::UnknownColumnFamily`]; [`Kind::Unsupported`] if keys do not ascend,
    /// or the family has something between the first and the last; [`Kind::Full`] if the disk is
    /// full. Then nothing was loaded. [`Kind::Io`] if the disk fails; if the MANIFEST could not be
    /// written, the load may be there after a crash, until another write has succeeded.
    pub async fn bulk_load(
        &self,
        family: CfId,
        next: impl AsyncFnMut(&mut Vec<u8>, &mut Vec<u8>) -> Result<bool>,
    ) -> Result<u64> {
        let state = &*self.0;
        let _working = state.begin_work()?;
        let version = state.db.version();
        let job = Job {
            core: state.core.clone(),
            dir: state.dir.clone(),
            db: state.db.clone(),
            compression: state.options.compression,
            made: MadeFiles::default(),
            busy: BusyTime::default(),
        };
        let family_now = version.family(family)?;
        let mut load = Load::new(&job, family_now, bottom_level(state, family_now));
        let loaded = async {
            let mark = state.dir.mark();
            load.all(next).await?;
            install(state, family, mark, &mut load.tables, &job.made).await
        };
        let result = loaded.await;
        if result.is_err() {
            state.remove_files(job.made.take());
        }
        result.map(|()| load.entries)
    }
}

/// The tables of a load.
struct Load<'a> {
    job: &'a Job,
    family: &'a Family,
    file: Option<TableWriter<'a>>,
    tables: Vec<Table>,
    entries: u64,
    table: NewTable,
}

impl<'a> Load<'a> {
    fn new(job: &'a Job, family: &'a Family, level: usize) -> Load<'a> {
        let table = NewTable {
            place: TablePlace { level, base_level: 1, is_bottom: true },
            bytes: file_bytes(job, family),
            oldest_ancestor_time: job.core.unix_time_ms() / 1000,
        };
        Load { job, family, file: None, tables: Vec::new(), entries: 0, table }
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
            if self.file.as_ref().is_some_and(|file| file.len() >= self.table.bytes) {
                self.end_file().await?;
            }
            let file = match &mut self.file {
                Some(file) => file,
                none => none.insert(TableWriter::create(self.job, self.family, self.table).await?),
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

/// Adds the tables to the database and takes them out of `tables`. After an error they remain
/// there.
async fn install(
    state: &WriteState,
    id: CfId,
    mark: NamesMark,
    tables: &mut Vec<Table>,
    made: &MadeFiles,
) -> Result<()> {
    let (Some(first), Some(last)) = (tables.first(), tables.last()) else { return Ok(()) };
    state.sync_names(mark).await?;
    let range = (user_key(&first.meta.smallest), user_key(&last.meta.largest));
    let range = (&range.0.to_vec()[..], &range.1.to_vec()[..]);
    let _reserved = reserve_bottom(state, id, range).await?;
    let turn = state.manifest_turn().await?;
    if state.flushes.waiting.borrow().iter().any(|generation| generation.log_failed) {
        // A write of unknown fate in that log would be newer than the entries.
        return Err(state.refusal());
    }
    let version = state.db.version();
    let family = version.family(id)?;
    if let Some(there) = overlap(&version, family, range) {
        let what = format!("a bulk load: between its first and its last key there is {there}");
        return Err(Error::new(Kind::Unsupported, what));
    }
    let level = bottom_level(state, family);
    if level == 0 {
        let what = format!("a bulk load: column family {} has one level only", family.name);
        return Err(Error::new(Kind::Unsupported, what));
    }
    let mut tables = std::mem::take(tables);
    for table in &mut tables {
        table.meta.epoch = state.new_epoch();
    }
    let entries: u64 = tables.iter().map(|table| table.properties.num_entries).sum();
    let in_tables = state.keys_in_tables.get().and_then(|keys| keys.checked_add(entries));
    let bytes: u64 = tables.iter().map(|table| table.meta.size_bytes).sum();
    let edit = VersionEdit {
        column_family: id,
        keys: in_tables.filter(|_| id == 0),
        new_files: tables.iter().map(|table| (level as u32, table.meta.clone())).collect(),
        ..VersionEdit::default()
    };
    // From here on they belong to the change.
    made.take();
    let changed = turn.change(vec![edit], |version| version.add_tables(id, level, tables)).await;
    if let Err(error) = &changed {
        if !error.is_transient() {
            state.fail(error);
        }
        state.hold_writes();
    }
    changed?;
    state.merges.count(id, level, |level| level.added_bytes += bytes);
    if id == 0 {
        state.keys_in_tables.set(in_tables);
        state.db.set_keys(state.db.keys().and_then(|keys| keys.checked_add(entries)));
    }
    Ok(())
}

/// Waits until no job writes to a range of the bottom level, and keeps others out of it.
async fn reserve_bottom<'a>(
    state: &'a WriteState,
    id: CfId,
    range: (&[u8], &[u8]),
) -> Result<Reservation<'a>> {
    loop {
        let version = state.db.version();
        let family = version.family(id)?;
        if let Some(reserved) = state.merges.reserve(family, bottom_level(state, family), range) {
            return Ok(reserved);
        }
        let changes = state.merges.changes();
        let changed = || state.merges.changes() != changes || state.has_failed();
        state.changed.wait_until(changed).await;
        if let Some(error) = state.failure() {
            return Err(error);
        }
    }
}

/// Something that a family has between two keys, both included.
pub(crate) fn overlap(
    version: &Version,
    family: &Family,
    (first, last): (&[u8], &[u8]),
) -> Option<String> {
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
        let tombstones = mem.tombstones();
        has_key(mem, order, first, last)
            || tombstones.iter().flat_map(|all| all.iter()).any(|t| !apart(t.0, t.1))
    });
    written.then(|| "something in memory".to_owned())
}

/// Whether a memtable has an entry between two keys.
fn has_key(mem: &Mem, order: Comparator, first: &[u8], last: &[u8]) -> bool {
    let mut target = first.to_vec();
    // Sorts before every entry of the key.
    target.extend_from_slice(&pack(SEQUENCE_MAX, SEEK_TYPE).to_le_bytes());
    let mut cursor = MemCursor::new(mem);
    cursor.seek(mem, &target) && order.cmp_user(user_key(cursor.key(mem)), last).is_le()
}

/// The deepest level that RocksDB also has when it opens the directory with its stored options.
pub(crate) fn bottom_level(state: &WriteState, family: &Family) -> usize {
    let levels = state.db.0.stored_options.levels(&family.name);
    levels.clamp(1, LEVELS_MAX as usize).max(family.levels.len()) - 1
}
