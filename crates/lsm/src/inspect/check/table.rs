//! The check of one table.

use std::collections::BTreeMap;

use fs::Slice;
use rocksfmt::{
    BLOCK_TRAILER_BYTES, BlobIndex, BlockCursor, BlockHandle, BlockLayout, Comparator, FileMeta,
    FileName, FilterHandle, FilterKey, FilterLayout, IndexFormat, IndexLayout, KEY_TRAILER_BYTES,
    RangeTombstones, SENTINEL_PACKED, ValueType, blob_columns, pack, unpack,
};

use crate::error::{Error, Kind, Result};
use crate::inspect::check::blob_records::BlobRecords;
use crate::inspect::check::{Check, CheckReport};
use crate::open::table_blocks::{TableBlocks, index_handles};
use crate::table::{Filter, IndexBlock, Table};
use crate::table_memory::TableMemory;
use crate::version::user_key;

/// What a table holds, by its entries and range tombstones.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// The smallest and the largest internal key; empty for none.
    pub smallest: Vec<u8>,
    pub largest: Vec<u8>,
    /// The smallest and the largest sequence.
    pub sequences: Option<(u64, u64)>,
    /// The references to each blob file.
    pub blob_files: BTreeMap<u64, u64>,
}

impl Seen {
    /// The oldest blob file to which an entry refers; 0 for none.
    pub fn oldest_blob_file(&self) -> u64 {
        self.blob_files.first_key_value().map_or(0, |(&number, _)| number)
    }

    fn sequence(&mut self, sequence: u64) {
        let (smallest, largest) = self.sequences.unwrap_or((sequence, sequence));
        self.sequences = Some((smallest.min(sequence), largest.max(sequence)));
    }

    /// Takes a range tombstone, which widens the bounds as RocksDB's writers do.
    fn tombstone(&mut self, order: Comparator, (start, end, sequence): (&[u8], &[u8], u64)) {
        let kind = ValueType::RangeDeletion as u8;
        let first = [start, &pack(sequence, kind).to_le_bytes()].concat();
        let last = [end, &SENTINEL_PACKED.to_le_bytes()].concat();
        if self.smallest.is_empty() || order.cmp_internal(&first, &self.smallest).is_lt() {
            self.smallest = first;
        }
        if self.largest.is_empty() || order.cmp_internal(&last, &self.largest).is_gt() {
            self.largest = last;
        }
        self.sequence(sequence);
    }
}

impl Check<'_> {
    /// Reads every block of a table. References to blob files must be in `records`.
    pub(in crate::inspect) async fn table(
        &mut self,
        name: &str,
        meta: &FileMeta,
        comparator: Comparator,
        records: Option<&BlobRecords>,
    ) -> Result<Seen> {
        let core = self.core;
        let memory = TableMemory::new(usize::MAX);
        let table = Table::open(core, self.dir, name, meta.clone(), comparator, &memory).await?;
        let mut check = TableCheck {
            table: &table,
            name,
            blocks: TableBlocks::new(core, name, &table),
            previous: Vec::new(),
            partition: None,
            records,
            wrong: BTreeMap::new(),
            seen: Seen::default(),
        };
        check.filter_blocks(&mut self.report).await;
        let mut entries = 0;
        let mut cursor = BlockCursor::new();
        let mut damaged = false;
        let started = self.done;
        let handles = check.data_handles(&mut self.report).await?;
        for (n, handle) in handles.into_iter().enumerate() {
            match check.data_block(handle, &mut cursor, &mut self.report).await {
                Ok(seen) => entries += seen,
                Err(error) => {
                    damaged = true;
                    self.report.note(name, Some(handle.offset), &error);
                }
            }
            if n % 64 == 63 {
                self.progress_to(started + handle.offset);
                core.checkpoint().await;
            }
        }
        self.report.entries += entries;
        for ((number, what), (references, offset)) in &check.wrong {
            let file = FileName::Blob(*number);
            let what =
                format!("{name} at offset {offset}: {references} values are in {file}, {what}");
            self.report.note(name, Some(*offset), &what);
        }
        if !damaged {
            check.count(entries, &mut self.report);
        }
        let mut seen = check.seen;
        if !check.previous.is_empty() {
            seen.largest = check.previous;
        }
        for tombstone in table.range_tombstones.iter().flat_map(RangeTombstones::iter) {
            seen.tombstone(comparator, tombstone);
        }
        Ok(seen)
    }
}

/// A table and the progress of its check.
struct TableCheck<'a> {
    table: &'a Table,
    name: &'a str,
    blocks: TableBlocks<'a>,
    /// The last internal key; empty before the first.
    previous: Vec<u8>,
    /// The filter partition of the last key.
    partition: Option<(BlockHandle, Slice, FilterLayout)>,
    records: Option<&'a BlobRecords>,
    /// Wrong references by blob file and reason: how many, and the block of the first.
    wrong: BTreeMap<(u64, &'static str), (u64, u64)>,
    seen: Seen,
}

impl TableCheck<'_> {
    fn corrupt(&self, what: &str) -> Error {
        Error::new(Kind::Corruption, format!("{}: {what}", self.name))
    }

    fn format(&self, e: &rocksfmt::Error) -> Error {
        Error::format(self.name, e)
    }

    /// Checks the filter. A file opens without it, but a damaged filter hides keys.
    async fn filter_blocks(&mut self, report: &mut CheckReport) {
        let (handle, is_partitioned) = match self.table.metaindex.filter {
            Some(FilterHandle::Full(handle)) => (handle, false),
            Some(FilterHandle::Partitioned(handle)) => (handle, true),
            None => return,
        };
        let data = match self.blocks.read(handle, false).await {
            Ok(data) => data,
            Err(error) => return report.note(self.name, Some(handle.offset), &error),
        };
        report.blocks += 1;
        if !is_partitioned {
            return;
        }
        let format = IndexFormat { first_keys: false, ..self.table.properties.index_format };
        let handles =
            IndexLayout::parse(&data, format).and_then(|layout| index_handles(&data, &layout));
        let handles = match handles {
            Ok(handles) => handles,
            Err(error) => return report.note(self.name, Some(handle.offset), &error),
        };
        for handle in handles {
            match self.blocks.read(handle, false).await {
                Ok(_) => report.blocks += 1,
                Err(error) => report.note(self.name, Some(handle.offset), &error),
            }
        }
    }

    /// The data blocks, by the index.
    async fn data_handles(&mut self, report: &mut CheckReport) -> Result<Vec<BlockHandle>> {
        let (name, table) = (self.name, self.table);
        let (data, layout) = (&table.index.data[..], &table.index.layout);
        if !table.two_level {
            return index_handles(data, layout)
                .map_err(|e| Error::format(format_args!("{name}: index"), &e));
        }
        let partitions = index_handles(data, layout)
            .map_err(|e| Error::format(format_args!("{name}: top-level index"), &e))?;
        let mut handles = Vec::new();
        for handle in partitions {
            let partition = match self.blocks.read(handle, false).await {
                Ok(partition) => partition,
                Err(error) => {
                    report.note(name, Some(handle.offset), &error);
                    continue;
                }
            };
            report.blocks += 1;
            let parsed = IndexLayout::parse(&partition, table.properties.index_format)
                .and_then(|layout| index_handles(&partition, &layout));
            match parsed {
                Ok(more) => handles.extend(more),
                Err(error) => {
                    let place = format!("{name} at offset {}", handle.offset);
                    report.note(name, Some(handle.offset), &Error::format(place, &error));
                }
            }
        }
        Ok(handles)
    }

    /// Reads and checks a data block. Returns its number of entries.
    async fn data_block(
        &mut self,
        handle: BlockHandle,
        cursor: &mut BlockCursor,
        report: &mut CheckReport,
    ) -> Result<u64> {
        let data = self.blocks.read(handle, true).await?;
        report.blocks += 1;
        report.bytes += handle.size + BLOCK_TRAILER_BYTES as u64;
        let layout = BlockLayout::parse(&data).map_err(|e| self.format(&e))?;
        let mut seen = 0;
        let mut more = cursor.seek_to_first(&data, &layout).map_err(|e| self.format(&e))?;
        while more {
            self.entry(cursor.key(), seen).await?;
            let refers =
                cursor.key().len().checked_sub(KEY_TRAILER_BYTES).map(|at| cursor.key()[at]);
            if refers == Some(ValueType::BlobIndex as u8) {
                let index = BlobIndex::parse(&data[cursor.value_range()]);
                let index = index.map_err(|e| self.format(&e))?;
                *self.seen.blob_files.entry(index.file_number).or_default() += 1;
                let key = user_key(cursor.key());
                if let Some(what) = self.records.and_then(|records| records.find(key, &index)) {
                    let wrong = self.wrong.entry((index.file_number, what));
                    wrong.or_insert((0, handle.offset)).0 += 1;
                }
            }
            if refers == Some(ValueType::WideColumnEntity as u8)
                && let Ok(columns) = blob_columns(&data[cursor.value_range()])
            {
                for index in columns {
                    *self.seen.blob_files.entry(index.file_number).or_default() += 1;
                }
            }
            seen += 1;
            more = cursor.next(&data, &layout).map_err(|e| self.format(&e))?;
        }
        Ok(seen)
    }

    /// Checks order, bounds and type of entry `n` of a block, and that the file's own filter
    /// contains its key.
    async fn entry(&mut self, key: &[u8], n: u64) -> Result<()> {
        let (table, comparator) = (self.table, self.table.comparator);
        let Some(user_len) = key.len().checked_sub(KEY_TRAILER_BYTES) else {
            return Err(self.corrupt(&format!("a key has only {} bytes", key.len())));
        };
        let user_key = &key[..user_len];
        if !self.previous.is_empty() && comparator.cmp_internal(&self.previous, key).is_ge() {
            return Err(self.corrupt(&format!("entry {n} of a block is not after the one before")));
        }
        // A table that is in no database has no bounds.
        let bounded = !table.meta.smallest.is_empty();
        if bounded
            && (comparator.cmp_internal(key, &table.meta.smallest).is_lt()
                || comparator.cmp_internal(key, &table.meta.largest).is_gt())
        {
            // Entries of ingested files have sequence 0, and another one in the file's bounds.
            let outside = comparator.cmp_user(user_key, table.meta.smallest_user_key()).is_lt()
                || comparator.cmp_user(user_key, table.meta.largest_user_key()).is_gt();
            if outside || table.global_sequence.is_none() {
                return Err(self.corrupt("an entry is outside the bounds in the MANIFEST"));
            }
        }
        let packed = key.last_chunk::<8>().map_or(0, |t| u64::from_le_bytes(*t));
        let kind = rocksfmt::value_type(packed).map_err(|e| self.format(&e))?;
        let sequence = table.global_sequence.unwrap_or(unpack(packed).0);
        if kind == ValueType::RangeDeletion || sequence > table.meta.largest_sequence {
            let what = format!("unexpected entry of type {kind:?} with sequence {sequence}");
            return Err(self.corrupt(&what));
        }
        self.previous.clear();
        self.previous.extend_from_slice(key);
        if self.seen.smallest.is_empty() {
            self.seen.smallest.extend_from_slice(key);
        }
        self.seen.sequence(sequence);
        let is_known = match &table.filter {
            // `TableMemory` is unlimited here, so a table's filter is in memory.
            Filter::None | Filter::OnDemand(_) => true,
            Filter::Full { data, layout } => layout.may_contain(data, &FilterKey::new(user_key)),
            Filter::Partitioned(top) => self.partition_contains(top, key, user_key).await?,
        };
        match is_known {
            true => Ok(()),
            false => Err(self.corrupt("a key is missing from the filter: gets do not find it")),
        }
    }

    /// Whether the filter partition of a key contains it.
    async fn partition_contains(
        &mut self,
        top: &IndexBlock,
        key: &[u8],
        user_key: &[u8],
    ) -> Result<bool> {
        let comparator = self.table.comparator;
        let found =
            rocksfmt::index_lookup(&top.data, &top.layout, comparator, key, &mut Vec::new());
        let Some(handle) = found.map_err(|e| self.format(&e))? else {
            return Err(self.corrupt("a key is after the last filter partition"));
        };
        if self.partition.as_ref().is_none_or(|(at, _, _)| *at != handle) {
            let block = self.blocks.read(handle, false).await?;
            let layout = FilterLayout::parse(&block);
            self.partition = Some((handle, block, layout));
        }
        let partition = self.partition.as_ref();
        Ok(partition
            .is_none_or(|(_, block, layout)| layout.may_contain(block, &FilterKey::new(user_key))))
    }

    /// Compares the number of entries with the properties.
    fn count(&self, entries: u64, report: &mut CheckReport) {
        let (table, properties) = (self.table, &self.table.properties);
        let counted = properties.num_entries.saturating_sub(properties.num_range_deletions);
        if table.metaindex.properties.is_none() || counted == entries {
            return;
        }
        let tombstones = table.range_tombstones.as_ref().map_or(0, |t| t.len() as u64);
        let what = format!(
            "found {entries} entries and {tombstones} range tombstones, but the properties say \
             {counted} entries"
        );
        report.note(self.name, None, &what);
    }
}
