//! Reads and verifies a whole database: `millrace kv check`.
//!
//! 1. CURRENT, the MANIFEST and the logs are replayed as at an opening.
//! 2. Every table of the MANIFEST is read from its first block to its footer. Checked are the
//!    checksums of all blocks, including filters and partitions; that entries are in strict order
//!    and inside the file's bounds; that counts match the properties; and that the table's own
//!    filter finds every key.
//! 3. Every live blob file is read record by record.
//!
//! Damage does not end the check: it is noted with file and offset, and the check continues.

use std::path::Path;

use fs::{Dir, File, Slice};
use reactor::Core;
use rocksfmt::{
    BLOB_FOOTER_BYTES, BLOB_HEADER_BYTES, BLOB_RECORD_HEADER_BYTES, BlobFooter, BlobHeader,
    BlobRecord, BlockCursor, BlockHandle, Comparator, Compression, Decompressor, FileMeta,
    FileName, FilterHandle, FilterKey, FilterLayout, IndexCursor, IndexFormat, IndexLayout,
    KEY_TRAILER_BYTES, LOG_BLOCK_BYTES, ManifestState, ValueType, unpack,
};

use crate::error::{Error, Kind, Result};
use crate::open::recover;
use crate::open::recovery_plan::{Listed, RecoveryPlan};
use crate::options::OpenOptions;
use crate::stored_options::StoredOptions;
use crate::table::Table;
use crate::table_memory::TableMemory;

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Name of the file.
    pub file: String,
    /// Offset in it, if known.
    pub offset: Option<u64>,
    /// Expected against found.
    pub what: String,
}

/// The result of a check.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /// Files read.
    pub files: u64,
    /// Bytes read and verified.
    pub bytes: u64,
    /// Blocks verified.
    pub blocks: u64,
    /// Entries of tables and logs, and blob records.
    pub entries: u64,
    /// What is damaged.
    pub damages: Vec<Damage>,
    /// Oddities that need not be damage.
    pub warnings: Vec<String>,
}

/// Most damages listed per file; further ones are not listed.
const DAMAGES_PER_FILE: usize = 16;
/// Bytes read at a time.
const CHUNK: usize = 1 << 20;

/// Reads and verifies the database in `path`. Calls `progress` from time to time with the bytes
/// done and the total bytes. Suspends for every read.
///
/// # Errors
/// Only those that prevent any check: no database, a lock, a directory that cannot be listed.
pub async fn check(
    core: &Core,
    path: &Path,
    options: &OpenOptions,
    mut progress: impl FnMut(u64, u64),
) -> Result<CheckReport> {
    let dir = Dir::new(core, path);
    let mut report = CheckReport::default();
    let current = match recover::current(&dir).await {
        Ok(current) => current,
        Err(error) if error.kind() == Kind::Corruption => {
            report.note("CURRENT", None, &error);
            return Ok(report);
        }
        Err(error) => return Err(error),
    };
    let _lock = if options.secondary {
        None
    } else {
        Some(crate::open::directory::lock_shared(&dir).await?)
    };
    let entries = dir.list().await.map_err(|e| Error::io(path.display(), &e))?;
    let listed: Vec<Listed> = entries
        .iter()
        .map(|entry| Listed { name: entry.name.clone(), size_bytes: entry.size })
        .collect();
    let manifest_name = FileName::Manifest(current).to_string();
    let state = match recover::manifest(core, &dir, &manifest_name).await {
        Ok(state) => state,
        Err(error) => {
            report.note(&manifest_name, offset_in(&error), &error);
            return Ok(report);
        }
    };
    report.files += 2;
    let mut work = Work { core, dir: &dir, done: 0, total: 0 };
    work.total = total_bytes(&state, &listed);
    match RecoveryPlan::new(&state, &listed) {
        Ok(mut plan) => {
            let stored_options = StoredOptions::read(&dir, &entries).await;
            plan.empty_logs_may_count = stored_options.keeps_logs_at_openings();
            work.total += plan.log_bytes();
            progress(work.done, work.total);
            let strict = OpenOptions { salvage: false, ..options.clone() };
            // A replayed piece is not needed any more.
            let piece = async |_| Ok(());
            let logs =
                recover::logs(core, &dir, &plan, &state, &strict, &mut report.warnings, piece);
            match logs.await {
                Ok(replayed) => {
                    report.files += plan.logs.len() as u64;
                    report.bytes += plan.log_bytes();
                    report.entries += replayed.operations;
                }
                Err(error) => {
                    report.note(&file_in(&error, &manifest_name), offset_in(&error), &error);
                }
            }
            work.done += plan.log_bytes();
            progress(work.done, work.total);
        }
        Err(error) => report.note(&file_in(&error, &manifest_name), None, &error),
    }
    for family in state.column_families.values() {
        let comparator = match family.comparator() {
            Ok(comparator) => comparator,
            Err(error) => {
                report.note(&manifest_name, None, &error);
                continue;
            }
        };
        for (_, meta) in family.files() {
            let old = format!("{:06}.ldb", meta.number);
            let name = if listed.iter().any(|file| file.name == old) {
                old
            } else {
                FileName::Sst(meta.number).to_string()
            };
            let before = work.done;
            let result =
                check_table(&mut work, &name, meta, comparator, &mut report, &mut progress).await;
            if let Err(error) = result {
                report.note(&name, offset_in(&error), &error);
            }
            report.files += 1;
            work.done = before + meta.size_bytes;
            progress(work.done, work.total);
        }
        for blob in family.live_blob_files() {
            let name = FileName::Blob(blob.number).to_string();
            let result = check_blobs(&mut work, &name, family.id, &mut report, &mut progress).await;
            if let Err(error) = result {
                report.note(&name, offset_in(&error), &error);
            }
            report.files += 1;
        }
    }
    progress(work.total, work.total);
    Ok(report)
}

struct Work<'a> {
    core: &'a Core,
    dir: &'a Dir,
    done: u64,
    total: u64,
}

impl CheckReport {
    fn note(&mut self, file: &str, offset: Option<u64>, what: &dyn std::fmt::Display) {
        let of_file = self.damages.iter().filter(|damage| damage.file == file).count();
        if of_file < DAMAGES_PER_FILE {
            let what = what.to_string();
            self.damages.push(Damage { file: file.to_owned(), offset, what });
        }
    }
}

/// The first offset in an error's text ("at offset 5" or "at 5"), if any.
fn offset_in(error: &Error) -> Option<u64> {
    let text = error.to_string();
    text.split(" at ").skip(1).find_map(|rest| {
        let rest = rest.strip_prefix("offset ").unwrap_or(rest);
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..digits].parse().ok()
    })
}

/// The file that an error's text begins with, or `otherwise`.
fn file_in(error: &Error, otherwise: &str) -> String {
    let text = error.to_string();
    let end = text.find([' ', ':']).unwrap_or(text.len());
    match FileName::parse(&text[..end]) {
        Some(_) => text[..end].to_owned(),
        None => otherwise.to_owned(),
    }
}

fn total_bytes(state: &ManifestState, listed: &[Listed]) -> u64 {
    let tables: u64 = state
        .column_families
        .values()
        .flat_map(|family| family.files())
        .map(|(_, meta)| meta.size_bytes)
        .sum();
    let blobs: u64 = listed
        .iter()
        .filter(|file| matches!(FileName::parse(&file.name), Some(FileName::Blob(_))))
        .map(|file| file.size_bytes)
        .sum();
    tables + blobs
}

/// Reads a file in order, one piece ahead.
struct Sequential {
    file: File,
    piece: Option<(u64, Slice)>,
    ahead: Option<(u64, fs::Reading)>,
}

impl Sequential {
    fn new(file: File) -> Sequential {
        Sequential { file, piece: None, ahead: None }
    }

    fn len_at(&self, offset: u64) -> usize {
        self.file.size().saturating_sub(offset).min(CHUNK as u64) as usize
    }

    /// Returns `len` bytes at `offset`; fast when offsets ascend.
    async fn bytes(&mut self, offset: u64, len: usize) -> std::io::Result<Slice> {
        if let Some((start, piece)) = &self.piece
            && let Some(from) = offset.checked_sub(*start)
            && from + len as u64 <= piece.len() as u64
        {
            return Ok(piece.slice(from as usize..from as usize + len));
        }
        if len > CHUNK / 2 {
            return fs::read(&self.file, offset, len).await;
        }
        self.piece = None;
        let piece = match self.ahead.take() {
            Some((start, reading)) if start <= offset && offset - start < CHUNK as u64 / 4 => {
                (start, reading.await?)
            }
            _ => (offset, fs::read(&self.file, offset, self.len_at(offset)).await?),
        };
        let inside = offset - piece.0 + len as u64 <= piece.1.len() as u64;
        let next = piece.0 + piece.1.len() as u64;
        // The next piece starts before this one ends, so that it contains whole blocks that cross
        // the border.
        let from = next.saturating_sub(CHUNK as u64 / 8);
        if next < self.file.size() && from > piece.0 {
            let reading = fs::start_read(&self.file, from, self.len_at(from))?;
            self.ahead = reading.map(|reading| (from, reading));
        }
        let start = piece.0;
        let result = if inside {
            Ok(piece.1.slice((offset - start) as usize..(offset - start) as usize + len))
        } else {
            fs::read(&self.file, offset, len).await
        };
        self.piece = Some(piece);
        result
    }
}

/// The check of one table.
struct TableCheck<'a> {
    table: &'a Table,
    name: &'a str,
    file: Sequential,
    decompressor: Decompressor,
}

impl TableCheck<'_> {
    /// Reads, checks and unpacks a block.
    async fn block(&mut self, core: &Core, handle: BlockHandle, data: bool) -> Result<Slice> {
        let len = self.table.stored_len(handle)?;
        let place = || format!("{} at offset {}", self.name, handle.offset);
        let stored =
            self.file.bytes(handle.offset, len).await.map_err(|e| Error::io(place(), &e))?;
        let format = |e: rocksfmt::Error| Error::format(place(), &e);
        let byte = self.table.check.verify(&stored, handle.offset).map_err(format)?;
        let payload = stored.slice(0..handle.size as usize);
        if byte == 0 {
            return Ok(payload);
        }
        let codec = Compression::from_byte(byte).map_err(format)?;
        let len =
            codec.decompressed_len(&payload, crate::table::BLOCK_BYTES_MAX).map_err(format)?;
        let mut out = core.alloc_wait(len).await.map_err(|e| Error::io(place(), &e))?;
        let dictionary = self.table.dictionary.as_ref().filter(|_| data);
        self.decompressor.decompress(codec, &payload, dictionary, &mut out).map_err(format)?;
        Ok(Slice::new(out.share(), 0..len))
    }
}

async fn check_table(
    work: &mut Work<'_>,
    name: &str,
    meta: &FileMeta,
    comparator: Comparator,
    report: &mut CheckReport,
    progress: &mut impl FnMut(u64, u64),
) -> Result<()> {
    let memory = TableMemory::new(usize::MAX);
    let table = Table::open(work.core, work.dir, name, meta.clone(), comparator, &memory).await?;
    let core = work.core;
    let file = Sequential::new(core.attach(&table.file));
    let mut check = TableCheck { table: &table, name, file, decompressor: Decompressor::new() };
    check_filter_block(&mut check, core, report).await;
    let mut previous: Vec<u8> = Vec::new();
    let mut entries = 0u64;
    let mut cursor = BlockCursor::new();
    let mut handles = Vec::new();
    let index = (&table.index.data[..], table.index.layout);
    if table.two_level {
        let partitions = index_handles(index.0, &index.1)
            .map_err(|e| Error::format(format_args!("{name}: top-level index"), &e))?;
        for handle in partitions {
            let partition = match check.block(core, handle, false).await {
                Ok(partition) => partition,
                Err(error) => {
                    report.note(name, Some(handle.offset), &error);
                    continue;
                }
            };
            report.blocks += 1;
            let place = format_args!("{name} at offset {}", handle.offset).to_string();
            let parsed = IndexLayout::parse(&partition, table.properties.index_format)
                .and_then(|layout| index_handles(&partition, &layout));
            match parsed {
                Ok(more) => handles.extend(more),
                Err(error) => report.note(name, Some(handle.offset), &Error::format(place, &error)),
            }
        }
    } else {
        handles = index_handles(index.0, &index.1)
            .map_err(|e| Error::format(format_args!("{name}: index"), &e))?;
    }
    let mut filter = FilterCheck::default();
    let mut damaged = false;
    let started = work.done;
    for (n, handle) in handles.into_iter().enumerate() {
        match check.block(core, handle, true).await {
            Err(error) => {
                damaged = true;
                report.note(name, Some(handle.offset), &error);
            }
            Ok(data) => {
                report.blocks += 1;
                report.bytes += handle.size + rocksfmt::BLOCK_TRAILER_BYTES as u64;
                let seen =
                    check_entries(&mut check, core, &data, &mut cursor, &mut previous, &mut filter)
                        .await;
                match seen {
                    Ok(seen) => entries += seen,
                    Err(error) => {
                        damaged = true;
                        report.note(name, Some(handle.offset), &error);
                    }
                }
            }
        }
        if n % 64 == 63 {
            work.done = started + handle.offset;
            progress(work.done, work.total);
            core.checkpoint().await;
        }
    }
    report.entries += entries;
    let tombstones = table.range_tombstones.as_ref().map_or(0, |t| t.len() as u64);
    let counted = table.properties.num_entries.saturating_sub(table.properties.num_range_deletions);
    if !damaged && table.metaindex.properties.is_some() && counted != entries {
        report.note(
            name,
            None,
            &format!("found {entries} entries and {tombstones} range tombstones, but the properties say {counted} entries"),
        );
    }
    Ok(())
}

/// Checks the filter. A file opens without it, but a damaged filter hides keys.
async fn check_filter_block(check: &mut TableCheck<'_>, core: &Core, report: &mut CheckReport) {
    let handle = match check.table.metaindex.filter {
        Some(FilterHandle::Full(handle) | FilterHandle::Partitioned(handle)) => handle,
        None => return,
    };
    let name = check.name;
    match check.block(core, handle, false).await {
        Err(error) => report.note(name, Some(handle.offset), &error),
        Ok(data) => {
            report.blocks += 1;
            if !matches!(check.table.metaindex.filter, Some(FilterHandle::Partitioned(_))) {
                return;
            }
            let format = IndexFormat { first_keys: false, ..check.table.properties.index_format };
            let handles =
                IndexLayout::parse(&data, format).and_then(|layout| index_handles(&data, &layout));
            match handles {
                Err(error) => report.note(name, Some(handle.offset), &error),
                Ok(handles) => {
                    for handle in handles {
                        match check.block(core, handle, false).await {
                            Ok(_) => report.blocks += 1,
                            Err(error) => report.note(name, Some(handle.offset), &error),
                        }
                    }
                }
            }
        }
    }
}

/// The filter partition of the last key.
#[derive(Default)]
struct FilterCheck {
    partition: Option<(BlockHandle, Slice, FilterLayout)>,
}

/// Checks order, bounds and types, and that the file's own filter contains each key.
async fn check_entries(
    check: &mut TableCheck<'_>,
    core: &Core,
    data: &Slice,
    cursor: &mut BlockCursor,
    previous: &mut Vec<u8>,
    filter: &mut FilterCheck,
) -> Result<u64> {
    let (table, name) = (check.table, check.name);
    let comparator = table.comparator;
    let format = |e: rocksfmt::Error| Error::format(name, &e);
    let corrupt = |what: String| Error::new(Kind::Corruption, format!("{name}: {what}"));
    let layout = rocksfmt::BlockLayout::parse(data).map_err(format)?;
    let mut seen = 0;
    let mut more = cursor.seek_to_first(data, &layout).map_err(format)?;
    while more {
        let key = cursor.key();
        let Some(user_len) = key.len().checked_sub(KEY_TRAILER_BYTES) else {
            return Err(corrupt(format!("a key has only {} bytes", key.len())));
        };
        if !previous.is_empty() && comparator.cmp_internal(previous, key).is_ge() {
            return Err(corrupt(format!("entry {seen} of a block is not after the one before")));
        }
        if comparator.cmp_internal(key, &table.meta.smallest).is_lt()
            || comparator.cmp_internal(key, &table.meta.largest).is_gt()
        {
            // Entries of ingested files have sequence 0, and another one in the file's bounds.
            let user = &key[..user_len];
            let outside = comparator.cmp_user(user, table.meta.smallest_user_key()).is_lt()
                || comparator.cmp_user(user, table.meta.largest_user_key()).is_gt();
            if outside || table.global_sequence.is_none() {
                return Err(corrupt("an entry is outside the bounds in the MANIFEST".to_owned()));
            }
        }
        let packed = key.last_chunk::<8>().map_or(0, |t| u64::from_le_bytes(*t));
        let kind = rocksfmt::value_type(packed).map_err(format)?;
        let sequence = table.global_sequence.unwrap_or(unpack(packed).0);
        if kind == ValueType::RangeDeletion || sequence > table.meta.largest_sequence {
            return Err(corrupt(format!(
                "unexpected entry of type {kind:?} with sequence {sequence}"
            )));
        }
        previous.clear();
        previous.extend_from_slice(key);
        let user_key = &previous[..user_len];
        let known = match &table.filter {
            // `TableMemory` is unlimited here, so a table's filter is in memory.
            crate::table::Filter::None | crate::table::Filter::OnDemand(_) => true,
            crate::table::Filter::Full { data, layout } => {
                layout.may_contain(data, &FilterKey::new(user_key))
            }
            crate::table::Filter::Partitioned(top) => {
                let mut scratch = Vec::new();
                let found = rocksfmt::index_lookup(
                    &top.data,
                    &top.layout,
                    comparator,
                    previous,
                    &mut scratch,
                )
                .map_err(format)?;
                let Some(handle) = found else {
                    return Err(corrupt("a key is after the last filter partition".to_owned()));
                };
                if filter.partition.as_ref().is_none_or(|(at, _, _)| *at != handle) {
                    let block = check.block(core, handle, false).await?;
                    let layout = FilterLayout::parse(&block);
                    filter.partition = Some((handle, block, layout));
                }
                filter.partition.as_ref().is_none_or(|(_, block, layout)| {
                    layout.may_contain(block, &FilterKey::new(user_key))
                })
            }
        };
        if !known {
            return Err(corrupt("a key is missing from the filter: gets do not find it".into()));
        }
        seen += 1;
        more = cursor.next(data, &layout).map_err(format)?;
    }
    Ok(seen)
}

fn index_handles(data: &[u8], layout: &IndexLayout) -> rocksfmt::Result<Vec<BlockHandle>> {
    let mut cursor = IndexCursor::new();
    let mut handles = Vec::new();
    let mut more = cursor.seek_to_first(data, layout)?;
    while more {
        handles.push(cursor.handle());
        more = cursor.next(data, layout)?;
    }
    Ok(handles)
}

async fn check_blobs(
    work: &mut Work<'_>,
    name: &str,
    family: u32,
    report: &mut CheckReport,
    progress: &mut impl FnMut(u64, u64),
) -> Result<()> {
    let shared = work.dir.open(name).await.map_err(|e| Error::io(name, &e))?;
    let mut file = Sequential::new(work.core.attach(&shared));
    let size = shared.size();
    let at = |offset: u64| format!("{name} at offset {offset}");
    let bad = |offset: u64, e: rocksfmt::Error| Error::format(at(offset), &e);
    let Some(end) = size.checked_sub((BLOB_HEADER_BYTES + BLOB_FOOTER_BYTES) as u64) else {
        return Err(Error::new(Kind::Corruption, format!("{name}: only {size} bytes long")));
    };
    let end = end + BLOB_HEADER_BYTES as u64;
    let header = file.bytes(0, BLOB_HEADER_BYTES).await.map_err(|e| Error::io(at(0), &e))?;
    let header = BlobHeader::parse(&header).map_err(|e| bad(0, e))?;
    if header.column_family_id != family {
        return Err(Error::new(
            Kind::Corruption,
            format!(
                "{name}: expected a file of column family {family}, found one of {}",
                header.column_family_id
            ),
        ));
    }
    let mut offset = BLOB_HEADER_BYTES as u64;
    let mut records = 0;
    while offset < end {
        let head = file
            .bytes(offset, BLOB_RECORD_HEADER_BYTES.min((size - offset) as usize))
            .await
            .map_err(|e| Error::io(at(offset), &e))?;
        let head = BlobRecord::parse(&head).map_err(|e| bad(offset, e))?;
        let len = head.record_len();
        if len > end - offset {
            return Err(Error::new(
                Kind::Corruption,
                format!("{}: a record of {len} bytes reaches into the footer", at(offset)),
            ));
        }
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let record = file.bytes(offset, len).await.map_err(|e| Error::io(at(offset), &e))?;
        match head.verify(&record) {
            Ok(_) => {
                records += 1;
                report.bytes += len as u64;
            }
            Err(error) => report.note(name, Some(offset), &bad(offset, error)),
        }
        offset += len as u64;
        work.done += len as u64;
        if records % 256 == 255 {
            progress(work.done, work.total);
            work.core.checkpoint().await;
        }
    }
    report.entries += records;
    let tail = file.bytes(end, BLOB_FOOTER_BYTES).await.map_err(|e| Error::io(at(end), &e))?;
    let footer = BlobFooter::parse(&tail).map_err(|e| bad(end, e))?;
    if footer.count != records {
        return Err(Error::new(
            Kind::Corruption,
            format!("{name}: found {records} whole records, but the footer says {}", footer.count),
        ));
    }
    Ok(())
}

const _: () = assert!(CHUNK.is_multiple_of(LOG_BLOCK_BYTES));
