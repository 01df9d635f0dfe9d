//! Ingesting finished tables, made by RocksDB's SstFileWriter: they become part of the database by
//! one change of the MANIFEST, without being read into memtables or written again.
//!
//! 1. The files are put into the directory under temporary names ([`Writer::reserve_files`]), which
//!    any recovery discards. They are never changed: they may be links to files of others.
//! 2. [`Writer::ingest`] reads them, unless told not to: checksums, order, counts. It opens them
//!    under the names of tables.
//! 3. The commit task adds them, between two groups of writes. If anything overlaps them, or a
//!    snapshot is held, their entries are newer than all writes so far: the memtables are written
//!    to tables first, and the files get the next sequence number. Otherwise they get 0, as RocksDB
//!    does it, and the memtables stay.
//! 4. A file goes to the deepest level such that nothing overlaps it there or above.
//!
//! The sequence number is in the MANIFEST only: it is that of all entries of the file. No log has a
//! write with this number. Recovery accepts that, because all writes before it are in tables.
//!
//! All files of an ingestion, of all column families, become visible at once, and after a crash all
//! of them are there or none. A crash before the change leaves files that no record names; the next
//! opening removes them.
//!
//! The number of keys stays exact if nothing overlaps the files; else it becomes an estimate.

mod examine;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rocksfmt::{FileMeta, FileName, Properties, VersionEdit, pack, unpack};

use crate::db::CfId;
use crate::error::{Error, Kind, Result};
use crate::mutant::mutant;
use crate::table::Table;
use crate::version::{Family, Level, Version, user_key};
use crate::write::bulk_load::{bottom_level, overlap};
use crate::write::compaction::Reservation;
use crate::write::ingest::examine::{examine, refuse_overlap};
use crate::write::picker::Shape;
use crate::write::retry;
use crate::write::state::{Request, WriteState};
use crate::write::writer::Writer;

/// Files to ingest into a column family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IngestFiles {
    /// The column family.
    pub family: CfId,
    /// Their numbers, from [`Writer::reserve_files`].
    pub numbers: Vec<u64>,
}

/// An ingestion that was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ingested {
    /// Entries of the files.
    pub entries: u64,
    /// Bytes of the files.
    pub bytes: u64,
    /// The sequence number of all entries; 0 if nothing was older.
    pub sequence: u64,
    /// The level of each file, in the order of the call.
    pub levels: Vec<usize>,
}

/// A table that is to be added.
pub(crate) struct NewTable {
    family: CfId,
    table: Table,
}

/// Tables that are ready to be added. If it is dropped, the next opening removes their files.
pub struct Ingestion {
    tables: Vec<NewTable>,
    numbers: Vec<u64>,
}

/// An ingestion on its way through the commit task.
pub(crate) struct Ingesting {
    tables: Vec<NewTable>,
    /// Their entries get a sequence number.
    is_newer: bool,
    /// A change of the MANIFEST has taken the files over, also if it failed.
    is_taken: bool,
    result: Option<Result<Ingested>>,
}

impl Writer {
    /// Numbers for files that are to be ingested. The caller puts each into the directory of the
    /// database, durably, as `NNNNNN.dbtmp`.
    pub fn reserve_files(&self, count: usize) -> Vec<u64> {
        (0..count).map(|_| self.0.db.new_number()).collect()
    }

    /// Adds the files that are in the directory under the names of [`Writer::reserve_files`], all
    /// or none. Their entries are newer than all that was submitted before. With `verify` every
    /// byte of them is read first. Suspends for the disk. The files are gone after an error.
    ///
    /// # Errors
    /// [`Kind::UnknownColumnFamily`]; [`Kind::Unsupported`] if a file was not made for ingestion
    /// (by SstFileWriter), was ingested before with a sequence number, has another order of keys,
    /// range deletions, or a format that RocksDB 7.8 does not read in a directory that it may open,
    /// or two files overlap; [`Kind::Corruption`] if a file is damaged; [`Kind::Full`] and
    /// [`Kind::Io`] if the disk fails. Then nothing was ingested, unless the text says that this is
    /// unknown: the MANIFEST could not be written, and the files may be there after a crash, until
    /// another write has succeeded.
    pub async fn ingest(&self, files: &[IngestFiles], verify: bool) -> Result<Ingested> {
        let ingestion = self.prepare_ingestion(files, verify).await?;
        self.finish_ingestion(ingestion).await
    }

    /// The first part of [`Writer::ingest`], which takes long: reads the files and makes them
    /// tables that no record names yet. Suspends for the disk. The files are gone after an error.
    ///
    /// # Errors
    /// As for [`Writer::ingest`].
    pub async fn prepare_ingestion(
        &self,
        files: &[IngestFiles],
        verify: bool,
    ) -> Result<Ingestion> {
        let state = &*self.0;
        let _working = state.begin_work()?;
        let mark = state.dir.mark();
        let numbers = files.iter().flat_map(|files| files.numbers.iter().copied()).collect();
        let prepared = async {
            let mut tables = Vec::new();
            let version = state.db.version();
            for IngestFiles { family, numbers } in files {
                let family = version.family(*family)?;
                for &number in numbers {
                    let name = FileName::Temp(number).to_string();
                    let place = (&state.dir, &name[..]);
                    let meta =
                        examine(&state.core, &state.db, &version, family, place, verify).await?;
                    let meta = FileMeta { number, ..meta };
                    tables.push(self.take_over(family, meta).await?);
                }
                let own = tables.iter().filter(|new| new.family == family.id);
                refuse_overlap(family, own.map(|new| &new.table.meta).collect())?;
            }
            if !mutant("ingested_names_are_not_synced") {
                state.sync_names(mark).await?;
            }
            if is_newer_than_some(state, &tables)? {
                // So that the commit task has few writes to wait for.
                self.flush().await?;
            }
            Ok(tables)
        };
        let prepared = prepared.await;
        let mut ingestion = Ingestion { tables: Vec::new(), numbers };
        match prepared {
            Ok(tables) => ingestion.tables = tables,
            Err(error) => {
                self.discard_files(&ingestion.numbers).await;
                return Err(error);
            }
        }
        Ok(ingestion)
    }

    /// The second part of [`Writer::ingest`]: adds the tables. Suspends for the disk.
    ///
    /// # Errors
    /// As for [`Writer::ingest`].
    pub async fn finish_ingestion(&self, ingestion: Ingestion) -> Result<Ingested> {
        let state = &*self.0;
        let _working = state.begin_work()?;
        let Ingestion { tables, numbers } = ingestion;
        if tables.is_empty() {
            return Ok(Ingested::default());
        }
        let ingesting = Ingesting { tables, is_newer: false, is_taken: false, result: None };
        let ingesting = Rc::new(RefCell::new(ingesting));
        let done = match self.request(Request::Ingest(ingesting.clone())) {
            Ok(written) => written.await,
            Err(error) => Err(error),
        };
        let result = ingesting.borrow_mut().result.take();
        let is_taken = ingesting.borrow().is_taken;
        let done = done.and_then(|_| {
            result.unwrap_or_else(|| Err(Error::new(Kind::Io, "the database is being closed")))
        });
        if done.is_err() && !is_taken {
            self.discard_files(&numbers).await;
        }
        done
    }

    /// Removes files that were put into the directory and are not ingested. Suspends for the disk.
    pub async fn discard_files(&self, numbers: &[u64]) {
        for &number in numbers {
            for name in [FileName::Temp(number), FileName::Sst(number)] {
                // It has one of the names at most.
                let _ = self.0.dir.remove(&name.to_string()).await;
            }
        }
    }

    /// Gives a file that was examined the name of a table, and opens it.
    async fn take_over(&self, family: &Family, meta: FileMeta) -> Result<NewTable> {
        let state = &*self.0;
        let name = FileName::Sst(meta.number).to_string();
        let renamed = state.dir.rename(&FileName::Temp(meta.number).to_string(), &name).await;
        renamed.map_err(|e| Error::io(&name, &e))?;
        let (core, dir, memory) = (&state.core, &state.dir, &state.db.0.tables);
        let table = Table::open(core, dir, &name, meta, family.comparator, memory).await?;
        Ok(NewTable { family: family.id, table })
    }
}

fn range(table: &Table) -> (&[u8], &[u8]) {
    (user_key(&table.meta.smallest), user_key(&table.meta.largest))
}

/// Whether entries of the tables must be newer than something: the database has something between
/// their first and last keys, or a snapshot must not see them.
fn is_newer_than_some(state: &WriteState, tables: &[NewTable]) -> Result<bool> {
    let snapshots = state.db.0.snapshots.load();
    let mut places = snapshots.iter().flat_map(|reader| reader.iter());
    if places.any(|place| place.held(state.core.now_ns()).is_some()) {
        return Ok(true);
    }
    overlaps_some(state, tables)
}

/// Whether the database has something between the first and the last key of a table.
fn overlaps_some(state: &WriteState, tables: &[NewTable]) -> Result<bool> {
    let version = state.db.version();
    for new in tables {
        if overlap(&version, version.family(new.family)?, range(&new.table)).is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the memtables must be written to tables before [`install`].
pub(crate) fn needs_flush(state: &WriteState, ingesting: &RefCell<Ingesting>) -> Result<bool> {
    let mut ingesting = ingesting.borrow_mut();
    ingesting.is_newer = is_newer_than_some(state, &ingesting.tables)?;
    Ok(ingesting.is_newer)
}

/// Ends an ingestion without a change.
pub(crate) fn refuse(ingesting: &RefCell<Ingesting>, error: Error) -> Result<()> {
    answer(ingesting, Err(error))
}

/// Adds the tables, in the commit task. `log_number` is the present log. An error ends writing.
pub(crate) async fn install(
    state: &WriteState,
    log_number: u64,
    ingesting: &RefCell<Ingesting>,
) -> Result<()> {
    let is_newer = ingesting.borrow().is_newer;
    let tables = std::mem::take(&mut ingesting.borrow_mut().tables);
    let turn = state.manifest_turn().await?;
    match is_newer_than_some(state, &tables) {
        // A bulk load does not go through the commit task, nor does a snapshot.
        Ok(true) if !is_newer => {
            let what = "something was loaded between the keys of the files meanwhile, or a snapshot \
                        was taken: try again";
            return answer(ingesting, Err(Error::new(Kind::Unsupported, what)));
        }
        Err(error) => return answer(ingesting, Err(error)),
        Ok(_) => {}
    }
    let version = state.db.version();
    let sequence = if is_newer { state.db.visible() + 1 } else { 0 };
    let Placed { mut edits, tables, reservations, keys, done } =
        place(state, &version, tables, sequence)?;
    let in_tables = state.keys_in_tables.get().zip(keys);
    let in_tables = in_tables.and_then(|(all, new)| all.checked_add(new));
    let of_default = edits.iter_mut().find(|edit| edit.column_family == 0);
    let counts = of_default.is_some();
    if let Some(edit) = of_default {
        edit.keys = in_tables;
        // Without a count, this makes it unknown. All logs before it are obsolete.
        edit.log_number = Some(log_number).filter(|_| is_newer);
    }
    let added: Vec<(CfId, usize, u64)> =
        tables.iter().map(|(id, level, table)| (*id, *level, table.meta.size_bytes)).collect();
    let changed = turn.change(edits, |version| {
        for (id, level, table) in tables {
            version.add_tables(id, level, [table]);
        }
    });
    ingesting.borrow_mut().is_taken = true;
    if let Err(error) = changed.await {
        state.hold_writes();
        let error = match state.holds_writes() {
            _ if !error.is_transient() => return Err(error),
            true => unknown(&error),
            false => retry::refused(&error),
        };
        return answer(ingesting, Err(error));
    }
    drop(reservations);
    for (family, level, bytes) in added {
        state.merges.count(family, level, |level| level.added_bytes += bytes);
    }
    if counts {
        state.keys_in_tables.set(in_tables);
        let all = state.db.keys().zip(keys);
        state.db.set_keys(all.and_then(|(all, new)| all.checked_add(new)));
    }
    if is_newer {
        state.db.0.sequence.store(sequence, Ordering::Release);
    }
    state.changed.notify_all();
    answer(ingesting, Ok(done))
}

/// Tables with their levels, and the change of the MANIFEST that adds them.
struct Placed<'a> {
    edits: Vec<VersionEdit>,
    tables: Vec<(CfId, usize, Table)>,
    reservations: Vec<Reservation<'a>>,
    /// The number of keys that they add to the default family, if it is known.
    keys: Option<u64>,
    done: Ingested,
}

fn place<'a>(
    state: &'a WriteState,
    version: &Version,
    tables: Vec<NewTable>,
    sequence: u64,
) -> Result<Placed<'a>> {
    let mut placed = Placed {
        edits: Vec::new(),
        tables: Vec::new(),
        reservations: Vec::new(),
        keys: Some(0),
        done: Ingested { sequence, ..Ingested::default() },
    };
    for NewTable { family: id, table } in tables {
        let family = version.family(id)?;
        let (level, reservation) = level_for(state, version, family, &table);
        placed.reservations.extend(reservation);
        let table = with_sequence(table, sequence, state.new_epoch());
        let Properties { num_entries, num_deletions, .. } = table.properties;
        placed.done.entries += num_entries;
        placed.done.bytes += table.meta.size_bytes;
        placed.done.levels.push(level);
        if id == 0 {
            let new = num_entries.checked_sub(num_deletions).filter(|_| sequence == 0);
            placed.keys = placed.keys.zip(new).and_then(|(all, new)| all.checked_add(new));
        }
        let new = (level as u32, table.meta.clone());
        match placed.edits.iter_mut().find(|edit| edit.column_family == id) {
            Some(edit) => edit.new_files.push(new),
            None => placed.edits.push(VersionEdit {
                column_family: id,
                new_files: vec![new],
                last_sequence: Some(sequence),
                ..VersionEdit::default()
            }),
        }
        placed.tables.push((id, level, table));
    }
    Ok(placed)
}

/// The error of an ingestion when a write of the MANIFEST has failed.
fn unknown(error: &Error) -> Error {
    let text = format!(
        "{error}; it is unknown whether the ingested files will be there after a crash, until another \
         write has succeeded"
    );
    Error::new(Kind::Io, text)
}

fn answer(ingesting: &RefCell<Ingesting>, result: Result<Ingested>) -> Result<()> {
    ingesting.borrow_mut().result = Some(result);
    Ok(())
}

/// The table with the sequence number of all its entries.
fn with_sequence(mut table: Table, sequence: u64, epoch: u64) -> Table {
    let renumbered = |key: &[u8]| {
        let packed = key.last_chunk::<8>().map_or(0, |trailer| u64::from_le_bytes(*trailer));
        [user_key(key), &pack(sequence, unpack(packed).1).to_le_bytes()].concat()
    };
    let meta = &mut table.meta;
    (meta.smallest, meta.largest) = (renumbered(&meta.smallest), renumbered(&meta.largest));
    (meta.smallest_sequence, meta.largest_sequence) = (sequence, sequence);
    meta.epoch = epoch;
    table.global_sequence = Some(sequence);
    table
}

/// The deepest level such that nothing overlaps the table there or above, and no job writes there;
/// and what keeps jobs from writing there. Levels above the one into which level 0 is merged stay
/// empty.
fn level_for<'a>(
    state: &'a WriteState,
    version: &Version,
    family: &Family,
    table: &Table,
) -> (usize, Option<Reservation<'a>>) {
    let order = family.comparator;
    let (first, last) = range(table);
    let overlaps = |level: &Arc<Level>| {
        level.slots.iter().map(|&slot| version.meta(slot)).any(|meta| {
            order.cmp_user(user_key(&meta.largest), first).is_ge()
                && order.cmp_user(user_key(&meta.smallest), last).is_le()
        })
    };
    let bytes: Vec<u64> = family.levels.iter().map(|level| level.bytes()).collect();
    let base = Shape::of(&family.options, &bytes).base;
    let bottom = bottom_level(state, family);
    let free = (0..=bottom).take_while(|&at| !family.levels.get(at).is_some_and(&overlaps));
    let free: Vec<usize> = free.filter(|&at| at >= base).collect();
    let mut deepest_first = free.into_iter().rev();
    deepest_first
        .find_map(|at| Some((at, Some(state.merges.reserve(family, at, (first, last))?))))
        .unwrap_or((0, None))
}
