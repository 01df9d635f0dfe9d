//! Writes SST files of format version 5, which RocksDB 7.8 and newer read.
//!
//! 1. The caller adds entries in the order of internal keys, and writes [`SstBuilder::output`] to
//!    the file at any time. The builder holds the output not yet taken, a block, an index and a
//!    filter.
//! 2. A data block ends when it reaches the block size. Its index entry is written once the next
//!    key is known: the shortest key between the two blocks.
//! 3. [`SstBuilder::finish`] adds filter, index, range tombstones, properties, metaindex and
//!    footer, and returns the file's description for the MANIFEST.
//!
//! The file has the form that all supported versions read: one index block with full internal keys
//! and whole handles, a full Bloom filter over user keys, XXH3 checksums. It has no hash index,
//! partitions, dictionary or unique id, because nothing needs them.

use std::collections::BTreeMap;

use crate::block::builder::BlockBuilder;
use crate::block::checksum::{BLOCK_TRAILER_BYTES, BlockCheck, ChecksumType};
use crate::block::compress::Compressor;
use crate::block::decompress::Compression;
use crate::coding::put_varint;
use crate::error::{Error, Result};
use crate::key::{
    Comparator, InternalKey, KEY_TRAILER_BYTES, SENTINEL_PACKED, SEQUENCE_MAX, ValueType, pack,
    put_internal_key,
};
use crate::manifest::file_meta::FileMeta;
use crate::sst::filter::BloomBuilder;
use crate::sst::footer::{BlockHandle, Footer};

/// Entries per restart point in data blocks.
const RESTART_INTERVAL: u32 = 16;
const FORMAT_VERSION: u32 = 5;
/// Above the types of all entries that every supported version knows.
const SEPARATOR_TYPE: u8 = ValueType::WideColumnEntity as u8;

/// The options of a file.
#[derive(Clone, Debug)]
pub struct SstOptions {
    /// The column family's order.
    pub comparator: Comparator,
    /// The column family's id.
    pub column_family: u32,
    /// The column family's name.
    pub column_family_name: String,
    /// Bytes of entries after which a data block ends.
    pub block_bytes: usize,
    /// For data blocks; a block is stored uncompressed unless compression saves an eighth.
    pub compression: Compression,
    /// Thousandths of a bit of filter for each key; 0 for no filter.
    pub filter_millibits_per_key: u64,
    /// Unix seconds.
    pub creation_time: u64,
}

impl Default for SstOptions {
    fn default() -> SstOptions {
        SstOptions {
            comparator: Comparator::Bytewise,
            column_family: 0,
            column_family_name: "default".to_owned(),
            block_bytes: 4096,
            compression: Compression::None,
            filter_millibits_per_key: 10_000,
            creation_time: 0,
        }
    }
}

/// Builds one SST file; see the module's text.
#[derive(Debug)]
pub struct SstBuilder {
    options: SstOptions,
    check: BlockCheck,
    compressor: Compressor,
    /// The output that the caller has not taken yet, and its offset in the file.
    output: Vec<u8>,
    output_at: u64,
    data: BlockBuilder,
    index: BlockBuilder,
    /// The last key and the handle of the last data block, whose separator needs the next key.
    pending: Option<(Vec<u8>, BlockHandle)>,
    filter: BloomBuilder,
    tombstones: Vec<(Vec<u8>, Vec<u8>)>,
    compressed: bool,
    smallest: Vec<u8>,
    largest: Vec<u8>,
    sequences: Option<(u64, u64)>,
    entries: u64,
    deletions: u64,
    merges: u64,
    merge_operator: String,
    data_blocks: u64,
    raw_key_bytes: u64,
    raw_value_bytes: u64,
    oldest_blob_file: u64,
}

impl SstBuilder {
    /// Starts a file.
    pub fn new(options: SstOptions) -> SstBuilder {
        SstBuilder {
            check: BlockCheck { kind: ChecksumType::Xxh3, base_context: 0 },
            compressor: Compressor::default(),
            output: Vec::new(),
            output_at: 0,
            data: BlockBuilder::new(RESTART_INTERVAL),
            index: BlockBuilder::new(1),
            pending: None,
            filter: BloomBuilder::new(options.filter_millibits_per_key),
            tombstones: Vec::new(),
            compressed: false,
            smallest: Vec::new(),
            largest: Vec::new(),
            sequences: None,
            entries: 0,
            deletions: 0,
            merges: 0,
            merge_operator: "nullptr".to_owned(),
            data_blocks: 0,
            raw_key_bytes: 0,
            raw_value_bytes: 0,
            oldest_blob_file: 0,
            options,
        }
    }

    /// Adds an entry.
    ///
    /// # Errors
    /// Corruption for a key that is not an internal key, that must not be in a data block, or that
    /// does not sort after the previous one: the caller has read damaged data.
    pub fn add(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let parsed = InternalKey::parse(key)?;
        let kind = parsed.value_type()?;
        if kind == ValueType::RangeDeletion {
            return Err(Error::corruption("a range tombstone among point entries"));
        }
        let comparator = self.options.comparator;
        if !self.largest.is_empty() && comparator.cmp_internal(&self.largest, key).is_ge() {
            return Err(Error::corruption("keys do not ascend"));
        }
        if let Some((last, handle)) = self.pending.take() {
            let separator = self.separator(last, parsed.user_key);
            self.index_entry(&separator, handle);
        }
        if self.largest.is_empty() {
            self.smallest = key.to_vec();
        }
        self.largest.clear();
        self.largest.extend_from_slice(key);
        self.sequence(parsed.sequence());
        self.entries += 1;
        self.raw_key_bytes += key.len() as u64;
        self.raw_value_bytes += value.len() as u64;
        if kind.is_tombstone() {
            self.deletions += 1;
        } else if kind == ValueType::Merge {
            self.merges += 1;
        }
        if self.options.filter_millibits_per_key > 0 {
            self.filter.add(parsed.user_key);
        }
        self.data.add(key, value);
        if self.data.len() >= self.options.block_bytes {
            self.end_data_block();
        }
        Ok(())
    }

    /// The number of merge operands so far.
    pub fn merges(&self) -> u64 {
        self.merges
    }

    /// Sets the class name of the merge operator, for the properties.
    pub fn names_merge_operator(&mut self, class: &str) {
        self.merge_operator = class.to_owned();
    }

    /// Adds a range tombstone, in any order: it deletes entries from `start` to `end`, exclusive,
    /// with smaller sequences.
    pub fn add_range_tombstone(&mut self, start: &[u8], end: &[u8], sequence: u64) {
        if self.options.comparator.cmp_user(start, end).is_ge() {
            return;
        }
        let mut key = Vec::with_capacity(start.len() + KEY_TRAILER_BYTES);
        put_internal_key(&mut key, start, pack(sequence, ValueType::RangeDeletion as u8));
        self.sequence(sequence);
        self.tombstones.push((key, end.to_vec()));
    }

    /// Records that a value of this file is in that blob file.
    pub fn refers_to_blob_file(&mut self, number: u64) {
        if self.oldest_blob_file == 0 || number < self.oldest_blob_file {
            self.oldest_blob_file = number;
        }
    }

    /// Bytes of the file so far, without the current block and everything after the data.
    pub fn len(&self) -> u64 {
        self.output_at + self.output.len() as u64
    }

    /// Whether no entry was added.
    pub fn is_empty(&self) -> bool {
        self.entries == 0 && self.tombstones.is_empty()
    }

    /// The bytes to write next.
    pub fn output(&self) -> &[u8] {
        &self.output
    }

    /// Drops the output, because the caller has taken it.
    pub fn output_taken(&mut self) {
        self.output_at += self.output.len() as u64;
        self.output.clear();
    }

    /// Ends the file. Returns the rest of the output and the file's description without number,
    /// epoch and age, which only the caller knows.
    pub fn finish(mut self) -> (Vec<u8>, FileMeta) {
        self.end_data_block();
        if let Some((last, handle)) = self.pending.take() {
            self.index_entry(&last, handle);
        }
        let tail_start = self.len();
        let filter = match std::mem::replace(&mut self.filter, BloomBuilder::new(0)).finish() {
            filter if filter.is_empty() => None,
            filter => Some(self.block(&filter, 0)),
        };
        let index = std::mem::replace(&mut self.index, BlockBuilder::new(1)).finish().to_vec();
        let index = self.block(&index, 0);
        let tombstones = self.range_tombstones();
        let properties = self.properties(tail_start, filter, index);
        let properties = self.block(&properties, 0);
        let mut metaindex = BlockBuilder::new(1);
        let mut entry = |name: &str, handle: Option<BlockHandle>| {
            if let Some(handle) = handle {
                let mut value = Vec::new();
                put_handle(&mut value, handle);
                metaindex.add(name.as_bytes(), &value);
            }
        };
        entry("fullfilter.rocksdb.BuiltinBloomFilter", filter);
        entry("rocksdb.properties", Some(properties));
        entry("rocksdb.range_del", tombstones);
        let metaindex = metaindex.finish().to_vec();
        let metaindex = self.block(&metaindex, 0);
        self.output.extend_from_slice(&Footer::encode(self.check.kind, metaindex, index));
        let (smallest_sequence, largest_sequence) = self.sequences.unwrap_or_default();
        let size_bytes = self.len();
        let meta = FileMeta {
            number: 0,
            path_id: 0,
            size_bytes,
            smallest: self.smallest,
            largest: self.largest,
            smallest_sequence,
            largest_sequence,
            epoch: 0,
            oldest_blob_file: self.oldest_blob_file,
            oldest_ancestor_time: 0,
            creation_time: self.options.creation_time,
            unique_id: [0; 2],
            tail_bytes: size_bytes - tail_start,
            timestamps_persisted: true,
        };
        (self.output, meta)
    }

    fn sequence(&mut self, sequence: u64) {
        let (low, high) = self.sequences.unwrap_or((sequence, sequence));
        self.sequences = Some((low.min(sequence), high.max(sequence)));
    }

    fn end_data_block(&mut self) {
        if self.data.is_empty() {
            return;
        }
        let last = self.data.last_key().to_vec();
        let mut data = std::mem::replace(&mut self.data, BlockBuilder::new(RESTART_INTERVAL));
        let mut compressor = std::mem::take(&mut self.compressor);
        let block = data.finish();
        let handle = match compressor.compress(self.options.compression, block) {
            Some(smaller) => {
                self.compressed = true;
                self.block(smaller, self.options.compression.to_byte())
            }
            None => self.block(block, 0),
        };
        data.clear();
        self.data = data;
        self.compressor = compressor;
        self.data_blocks += 1;
        self.pending = Some((last, handle));
    }

    /// Appends a block and its trailer.
    fn block(&mut self, bytes: &[u8], compression: u8) -> BlockHandle {
        let handle = BlockHandle { offset: self.len(), size: bytes.len() as u64 };
        let at = self.output.len();
        self.output.reserve(bytes.len() + BLOCK_TRAILER_BYTES);
        self.output.extend_from_slice(bytes);
        self.output.push(compression);
        let checksum = self.check.compute(&self.output[at..], handle.offset);
        self.output.extend_from_slice(&checksum.to_le_bytes());
        handle
    }

    fn index_entry(&mut self, key: &[u8], handle: BlockHandle) {
        let mut value = Vec::with_capacity(20);
        put_handle(&mut value, handle);
        self.index.add(key, &value);
    }

    /// The shortest internal key at or after `last` and before all versions of `next`.
    fn separator(&self, mut last: Vec<u8>, next: &[u8]) -> Vec<u8> {
        let user_len = last.len() - KEY_TRAILER_BYTES;
        if self.options.comparator == Comparator::Bytewise
            && let Some(len) = shorten(&mut last[..user_len], next)
        {
            last.truncate(len);
            last.extend_from_slice(&pack(SEQUENCE_MAX, SEPARATOR_TYPE).to_le_bytes());
        }
        last
    }

    /// Writes the range tombstones and extends the bounds to include them.
    fn range_tombstones(&mut self) -> Option<BlockHandle> {
        if self.tombstones.is_empty() {
            return None;
        }
        let comparator = self.options.comparator;
        let mut tombstones = std::mem::take(&mut self.tombstones);
        tombstones.sort_by(|a, b| comparator.cmp_internal(&a.0, &b.0).then_with(|| b.1.cmp(&a.1)));
        // Of equal ranges at the same sequence one is enough; of two ends the larger one counts.
        tombstones.dedup_by(|later, first| {
            let same = later.0 == first.0;
            if same && comparator.cmp_user(&later.1, &first.1).is_gt() {
                std::mem::swap(&mut later.1, &mut first.1);
            }
            same
        });
        let mut block = BlockBuilder::new(1);
        for (key, end) in &tombstones {
            block.add(key, end);
            let mut behind = end.clone();
            behind.extend_from_slice(&SENTINEL_PACKED.to_le_bytes());
            if self.smallest.is_empty() || comparator.cmp_internal(key, &self.smallest).is_lt() {
                self.smallest.clone_from(key);
            }
            if self.largest.is_empty() || comparator.cmp_internal(&behind, &self.largest).is_gt() {
                self.largest = behind;
            }
            self.raw_key_bytes += key.len() as u64;
            self.raw_value_bytes += end.len() as u64;
        }
        self.entries += tombstones.len() as u64;
        self.deletions += tombstones.len() as u64;
        self.tombstones = tombstones;
        let block = block.finish().to_vec();
        Some(self.block(&block, 0))
    }

    fn properties(
        &self,
        tail_start: u64,
        filter: Option<BlockHandle>,
        index: BlockHandle,
    ) -> Vec<u8> {
        let mut all: BTreeMap<&str, Vec<u8>> = BTreeMap::new();
        let mut number = |name, value| {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            all.insert(name, bytes);
        };
        number("rocksdb.index.key.is.user.key", 0);
        number("rocksdb.index.value.is.delta.encoded", 0);
        number("rocksdb.num.entries", self.entries);
        number("rocksdb.num.range-deletions", self.tombstones.len() as u64);
        number("rocksdb.deleted.keys", self.deletions);
        number("rocksdb.merge.operands", self.merges);
        number("rocksdb.raw.key.size", self.raw_key_bytes);
        number("rocksdb.raw.value.size", self.raw_value_bytes);
        number("rocksdb.data.size", tail_start);
        number("rocksdb.index.size", index.size + BLOCK_TRAILER_BYTES as u64);
        number("rocksdb.filter.size", filter.map_or(0, |filter| filter.size));
        number("rocksdb.num.data.blocks", self.data_blocks);
        number("rocksdb.format.version", u64::from(FORMAT_VERSION));
        number("rocksdb.tail.start.offset", tail_start);
        number("rocksdb.column.family.id", u64::from(self.options.column_family));
        number("rocksdb.creation.time", self.options.creation_time);
        number("rocksdb.file.creation.time", self.options.creation_time);
        let mut text = |name, value: &str| all.insert(name, value.as_bytes().to_vec());
        text("rocksdb.comparator", self.options.comparator.name());
        text("rocksdb.column.family.name", &self.options.column_family_name);
        let compression =
            if self.compressed { self.options.compression } else { Compression::None };
        text("rocksdb.compression", compression.name());
        text("rocksdb.block.based.table.whole.key.filtering", "1");
        text("rocksdb.block.based.table.prefix.filtering", "0");
        text("rocksdb.merge.operator", &self.merge_operator);
        text("rocksdb.prefix.extractor.name", "nullptr");
        text("rocksdb.property.collectors", "[]");
        if filter.is_some() {
            text("rocksdb.filter.policy", "bloomfilter");
        }
        all.insert("rocksdb.block.based.table.index.type", 0u32.to_le_bytes().to_vec());
        let mut block = BlockBuilder::new(u32::MAX);
        for (name, value) in &all {
            block.add(name.as_bytes(), value);
        }
        block.finish().to_vec()
    }
}

fn put_handle(out: &mut Vec<u8>, handle: BlockHandle) {
    put_varint(out, handle.offset);
    put_varint(out, handle.size);
}

/// Turns `key` into a shorter one that is greater but less than `limit`, and returns its length.
/// `None` if there is none; `key` is then unchanged.
fn shorten(key: &mut [u8], limit: &[u8]) -> Option<usize> {
    let common = key.iter().zip(limit).take_while(|(a, b)| a == b).count();
    let (&mine, &theirs) = (key.get(common)?, limit.get(common)?);
    if mine >= theirs {
        return None;
    }
    if common + 1 < limit.len() || mine + 1 < theirs {
        key[common] += 1;
        return (common + 1 < key.len()).then_some(common + 1).or_else(|| {
            key[common] -= 1;
            None
        });
    }
    // The limit ends in the next byte: increase a later byte of the key.
    let at = key.iter().skip(common + 1).position(|&byte| byte != 0xFF)? + common + 1;
    if at + 1 >= key.len() {
        return None;
    }
    key[at] += 1;
    Some(at + 1)
}
