//! Tables and blob files that the MANIFEST does not name, and that may be the only copy of writes.
//!
//! A killed flush or merge leaves such tables, and so does a change of the MANIFEST that replaced
//! them. Their entries are also in logs or in tables that are named, so an opening for writing
//! removes them. But if the MANIFEST lost its end, the tables that were added after it are
//! complete, and what they were made of was removed. A table is such a one if nothing in the
//! MANIFEST has removed it, and
//!
//! - a table that the MANIFEST names is missing, and this one is newer and has keys in its range:
//!   it may be the result of a merge; or
//! - logs are missing: the oldest one begins after the last sequence of the MANIFEST, or there is
//!   no record in any and the log that a flush had to leave is gone; and the table has a sequence
//!   that is missing, or keys where no table of the MANIFEST has any. (Merges replace sequences
//!   with 0, but add no keys.) If there is no record in any log, tables that were made to be
//!   ingested do not count: an ingestion that was interrupted leaves them.
//!
//! Only in these two cases the tables are read.
//!
//! The same is true of a blob file that the MANIFEST does not name and a log refers to: it was
//! registered before it got values. Only if there is a blob file without a name the logs are read
//! for this.

use std::collections::BTreeSet;

use fs::{Dir, DirEntry};
use reactor::Core;
use rocksfmt::{
    BlobIndex, BlockCursor, BlockLayout, ColumnFamily, Comparator, FileMeta, FileName,
    KEY_TRAILER_BYTES, LogKind, LogReader, LogRecord, ManifestState, Op, RangeTombstones,
    SEQUENCE_MAX, WriteBatch, unpack,
};

use crate::error::{Error, Kind, Result};
use crate::open::recover;
use crate::open::recovery_plan::first_log;
use crate::open::table_blocks::TableBlocks;
use crate::open::wal_replay::covered;
use crate::table::Table;
use crate::table_memory::TableMemory;
use crate::version::user_key;

/// RocksDB's id in tables that belong to no family yet, as SstFileWriter writes them.
pub(crate) const NO_FAMILY: u64 = i32::MAX as u64;

/// The evidence that a MANIFEST lost its end, as text, if there is any. `entries` lists the
/// directory. Suspends for the disk.
///
/// # Errors
/// The device's.
pub(crate) async fn lost_end(
    core: &Core,
    dir: &Dir,
    manifest: &str,
    state: &ManifestState,
    entries: &[DirEntry],
) -> Result<Option<String>> {
    let named = |number| {
        state
            .column_families
            .values()
            .any(|family| family.files().any(|(_, meta)| meta.number == number))
    };
    let files = entries.iter().filter(|entry| !entry.is_dir);
    if let Some(number) = referred_blob_file(core, dir, state, entries).await? {
        let blob = FileName::Blob(number);
        return Ok(Some(format!(
            "{manifest} has lost its end: it does not name {blob}, which has values that a log refers to"
        )));
    }
    let tables: Vec<(u64, &DirEntry)> = files
        .clone()
        .filter_map(|entry| match FileName::parse(&entry.name) {
            Some(FileName::Sst(number)) => Some((number, entry)),
            _ => None,
        })
        .collect();
    let unnamed: Vec<_> = tables.iter().filter(|(number, _)| !named(*number)).collect();
    if unnamed.is_empty() {
        return Ok(None);
    }
    let missing = state.column_families.values().flat_map(|family| {
        let gone = family.files().map(|(_, meta)| meta).filter(|meta| {
            meta.path_id == 0 && tables.iter().all(|(number, _)| *number != meta.number)
        });
        gone.map(|meta| (family.id, meta))
    });
    let mut logs: Vec<(u64, &DirEntry)> = files
        .filter_map(|entry| match FileName::parse(&entry.name) {
            Some(FileName::Wal(number)) if number >= first_log(state) => Some((number, entry)),
            _ => None,
        })
        .collect();
    logs.sort_unstable_by_key(|(number, _)| *number);
    let begins = match logs.first() {
        Some((number, entry)) => recover::first_sequence(core, dir, &entry.name, *number).await?,
        None => None,
    };
    let search = Search {
        core,
        dir,
        state,
        missing: missing.collect(),
        covered: covered(state),
        logs: logs.into_iter().map(|(number, _)| number).collect(),
        begins,
    };
    let suspects: Vec<_> = unnamed
        .into_iter()
        .filter(|(number, _)| !search.missing.is_empty() || search.lacks_logs(*number))
        .collect();
    if suspects.is_empty() {
        return Ok(None);
    }
    let removed = recover::removed_tables(core, dir, manifest).await?;
    let mut found: Vec<&str> = Vec::new();
    for (number, entry) in suspects.into_iter().filter(|(number, _)| !removed.contains(number)) {
        match search.is_only_copy(*number, entry).await {
            Ok(true) => found.push(&entry.name),
            Ok(false) => {}
            // It is not complete.
            Err(error) if matches!(error.kind(), Kind::Corruption | Kind::Unsupported) => {}
            Err(error) => return Err(error),
        }
    }
    let more = match found.len().saturating_sub(1) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Ok(found.first().map(|first| {
        format!(
            "{manifest} has lost its end: it does not name {first}{more}, and nothing else has \
             the writes in these tables"
        )
    }))
}

/// A blob file that is there and that the MANIFEST does not name, to which a log refers that
/// counts.
async fn referred_blob_file(
    core: &Core,
    dir: &Dir,
    state: &ManifestState,
    entries: &[DirEntry],
) -> Result<Option<u64>> {
    let families = &state.column_families;
    let mut logs = Vec::new();
    let mut unnamed = BTreeSet::new();
    for entry in entries.iter().filter(|entry| !entry.is_dir) {
        match FileName::parse(&entry.name) {
            Some(FileName::Blob(number)) => {
                let mut families = families.values();
                if !families.any(|family| family.blob_files.contains_key(&number)) {
                    unnamed.insert(number);
                }
            }
            Some(FileName::Wal(number)) if number >= first_log(state) => {
                logs.push((number, &entry.name));
            }
            _ => {}
        }
    }
    if unnamed.is_empty() {
        return Ok(None);
    }
    for (number, name) in logs {
        let counts = |id| families.get(&id).is_some_and(|family| number >= family.log_number);
        let refers = |op: &Op<'_>| match op {
            Op::BlobIndex { cf, index, .. } if counts(*cf) => {
                BlobIndex::parse(index).ok().map(|index| index.file_number)
            }
            _ => None,
        };
        let mut found = None;
        let each = |record: LogRecord<'_>| {
            // The replay reports what does not parse.
            let batch = WriteBatch::parse(record.data).into_iter();
            let mut ops = batch.flat_map(|batch| batch.ops()).filter_map(|op| refers(&op.ok()?.1));
            found = found.or(ops.find(|number| unnamed.contains(number)));
            Ok(())
        };
        let mut reader = LogReader::new(LogKind::Wal { number });
        match recover::feed(core, dir, name, &mut reader, each, async || Ok(())).await {
            Err(error) if error.kind() != Kind::Corruption => return Err(error),
            _ => {}
        }
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// What is known of a directory.
struct Search<'a> {
    core: &'a Core,
    dir: &'a Dir,
    state: &'a ManifestState,
    /// Tables that the MANIFEST names, with their families.
    missing: Vec<(u32, &'a FileMeta)>,
    /// All sequences up to here are in tables that are named, or never existed.
    covered: u64,
    /// The logs that count.
    logs: Vec<u64>,
    /// The sequence with which the oldest of them begins, if it has a record.
    begins: Option<u64>,
}

/// What a table has.
#[derive(Default)]
struct Contents {
    /// The smallest and the largest user key.
    keys: Option<(Vec<u8>, Vec<u8>)>,
    /// One of the sequences is missing elsewhere.
    has_missing: bool,
}

impl Contents {
    fn add(&mut self, order: Comparator, start: &[u8], end: &[u8]) {
        match &mut self.keys {
            None => self.keys = Some((start.to_vec(), end.to_vec())),
            Some((first, last)) => {
                if order.cmp_user(start, first).is_lt() {
                    *first = start.to_vec();
                }
                if order.cmp_user(end, last).is_gt() {
                    *last = end.to_vec();
                }
            }
        }
    }
}

impl Search<'_> {
    /// Whether logs that were there when this table was made are missing, although no table of the
    /// MANIFEST has their writes.
    fn lacks_logs(&self, table: u64) -> bool {
        match self.begins {
            Some(begins) => begins > self.covered + 1,
            // The name of a log of ours is durable before its first record. A log of RocksDB may
            // be empty and newer than the table.
            None if self.state.ours => {
                table > first_log(self.state) && self.logs.iter().all(|&log| log >= table)
            }
            None => true,
        }
    }

    async fn is_only_copy(&self, number: u64, entry: &DirEntry) -> Result<bool> {
        let properties = Table::properties(self.core, self.dir, &entry.name).await?;
        let order = Comparator::from_name(&properties.comparator);
        let order = order.map_err(|e| Error::format(&entry.name, &e))?;
        let family = match properties.column_family_id {
            NO_FAMILY => 0,
            id => u32::try_from(id).unwrap_or(u32::MAX),
        };
        // An ingested table has its sequence in the MANIFEST.
        let largest_sequence = match properties.external_version {
            Some(_) => properties.external_sequence.unwrap_or(0),
            None => SEQUENCE_MAX,
        };
        let meta = FileMeta { number, largest_sequence, ..FileMeta::of_size(entry.size) };
        let memory = TableMemory::new(usize::MAX);
        let table = Table::open(self.core, self.dir, &entry.name, meta, order, &memory).await?;
        // A table that was to be ingested was not made of a log. Without a gap before a record, its
        // ingestion was perhaps interrupted.
        let is_external = properties.external_version.is_some();
        let lacks_logs = self.lacks_logs(number) && !(is_external && self.begins.is_none());
        let contents = self.contents(&entry.name, &table, lacks_logs).await?;
        let Some((first, last)) = &contents.keys else { return Ok(false) };
        let replaces = |meta: &FileMeta| {
            number > meta.number
                && order.cmp_user(meta.smallest_user_key(), last).is_le()
                && order.cmp_user(first, meta.largest_user_key()).is_le()
        };
        if self.missing.iter().any(|(id, meta)| *id == family && replaces(meta)) {
            return Ok(true);
        }
        Ok(lacks_logs
            && match self.state.column_families.get(&family) {
                Some(known) => contents.has_missing || adds_keys(known, order, first, last),
                // A smaller one was dropped.
                None => family > self.state.max_column_family,
            })
    }

    /// Reads a table; up to its first missing sequence if `lacks_logs`.
    async fn contents(&self, name: &str, table: &Table, lacks_logs: bool) -> Result<Contents> {
        let (core, order) = (self.core, table.comparator);
        let mut contents = Contents::default();
        let is_missing = |sequence: u64| {
            sequence > self.covered && self.begins.is_none_or(|begins| sequence < begins)
        };
        for (start, end, sequence) in table.range_tombstones.iter().flat_map(RangeTombstones::iter)
        {
            contents.add(order, start, end);
            contents.has_missing |= is_missing(sequence);
        }
        let mut blocks = TableBlocks::new(core, name, table);
        let mut cursor = BlockCursor::new();
        for handle in blocks.data_handles().await? {
            let block = blocks.read(handle, true).await?;
            let format = |e: rocksfmt::Error| Error::format(name, &e);
            let layout = BlockLayout::parse(&block).map_err(format)?;
            let mut more = cursor.seek_to_first(&block, &layout).map_err(format)?;
            while more {
                let key = cursor.key();
                let Some(trailer) = key.last_chunk::<KEY_TRAILER_BYTES>() else { break };
                contents.add(order, user_key(key), user_key(key));
                let (own, _) = unpack(u64::from_le_bytes(*trailer));
                contents.has_missing |= is_missing(table.global_sequence.unwrap_or(own));
                more = cursor.next(&block, &layout).map_err(format)?;
            }
            if contents.has_missing && lacks_logs {
                break;
            }
            core.checkpoint().await;
        }
        Ok(contents)
    }
}

/// Whether a table with these bounds has keys where its family has none.
fn adds_keys(family: &ColumnFamily, order: Comparator, first: &[u8], last: &[u8]) -> bool {
    let has = |key: &[u8]| {
        family.files().any(|(_, meta)| {
            order.cmp_user(meta.smallest_user_key(), key).is_le()
                && order.cmp_user(key, meta.largest_user_key()).is_le()
        })
    };
    !has(first) || !has(last)
}
