//! Writes SST files of format version 5, which RocksDB 7.8 and newer read.
//!
//! 1. The caller adds entries in the order of internal keys, and writes [`SstBuilder::output`] to
//!    the file at any time. The builder holds the output not yet taken, a block, the separators of
//!    the blocks and the hashes of the keys.
//! 2. A data block ends when it reaches the block size. Its separator is known with the next key.
//!    If the file gets a dictionary, the first blocks are held back until there are enough of them
//!    to choose one.
//! 3. [`SstBuilder::finish`] adds index, filter, range tombstones, properties, metaindex and footer
//!    (`tail`), and returns the file's description for the MANIFEST.
//!
//! An index or a filter with two levels is one by choice, or because it would be large: a reader
//! that does not keep it in memory then reads a small part of it, and the builder turns the hashes
//! of keys, eight bytes each, into filters early. The lower levels come first in the file's tail,
//! so that everything that a reader needs when it opens the file is at the end.
//!
//! Work that takes long is done in pieces by [`SstBuilder::step`] and [`SstBuilder::finish_step`].
//! Training a dictionary cannot be divided: a caller may take it with [`SstBuilder::training`] and
//! run it elsewhere. A caller that never calls these gets the same file.

mod filter;
pub mod held;
mod index;
pub mod options;
mod properties;
mod tail;

use crate::block::builder::BlockBuilder;
use crate::block::checksum::{BLOCK_TRAILER_BYTES, BlockCheck};
use crate::block::compress::Compressor;
use crate::block::decompress::Compression;
use crate::error::{Error, Result};
use crate::key::{InternalKey, KEY_TRAILER_BYTES, ValueType, pack, put_internal_key};
use crate::sst::builder::filter::FilterWriter;
use crate::sst::builder::held::{Dictionary, DictionaryTraining, HeldBlocks};
use crate::sst::builder::index::{BlockLimits, IndexEntries};
use crate::sst::builder::options::SstOptions;
use crate::sst::builder::tail::Tail;
use crate::sst::footer::BlockHandle;

/// Builds one SST file; see the module's text.
#[derive(Debug)]
pub struct SstBuilder {
    options: SstOptions,
    limits: BlockLimits,
    out: Output,
    compressor: Compressor,
    data: BlockBuilder,
    /// Blocks that wait for the dictionary, and the number of those that were written.
    held: Option<(HeldBlocks, usize)>,
    /// The dictionary, if the caller has made it.
    trained: Option<Vec<u8>>,
    index: IndexEntries,
    /// The separator of the last block needs the next key.
    separator_is_due: bool,
    filter: FilterWriter,
    /// Index and filter have two levels, if they may.
    is_partitioned: bool,
    tombstones: Vec<(Vec<u8>, Vec<u8>)>,
    smallest: Vec<u8>,
    largest: Vec<u8>,
    sequences: Option<(u64, u64)>,
    totals: Totals,
    oldest_blob_file: u64,
    merge_operator: String,
    tail: Tail,
}

/// Counts of a file's contents.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    entries: u64,
    deletions: u64,
    merges: u64,
    range_deletions: u64,
    data_blocks: u64,
    raw_key_bytes: u64,
    raw_value_bytes: u64,
    /// Values in blob files, and their bytes.
    blob_values: u64,
    blob_bytes: u64,
}

impl SstBuilder {
    /// Starts a file.
    pub fn new(options: SstOptions) -> SstBuilder {
        let blocks = &options.blocks;
        let mut filter = FilterWriter::new(blocks.filter_millibits_per_key);
        if blocks.partition_index && blocks.partition_filter {
            filter.partition(blocks.partition_bytes);
        }
        let compressor = Compressor::new(options.compression, options.codec);
        let holds = options.codec.dictionary_bytes > 0 && compressor.takes_dictionary();
        SstBuilder {
            limits: BlockLimits::new(blocks.block_bytes, blocks.deviation_percent),
            out: Output::new(BlockCheck { kind: blocks.checksum, base_context: 0 }),
            compressor,
            data: BlockBuilder::new(blocks.restart_interval),
            held: holds.then(|| (HeldBlocks::new(options.codec), 0)),
            trained: None,
            index: IndexEntries::default(),
            separator_is_due: false,
            filter,
            is_partitioned: blocks.partition_index,
            tombstones: Vec::new(),
            smallest: Vec::new(),
            largest: Vec::new(),
            sequences: None,
            totals: Totals::default(),
            oldest_blob_file: 0,
            merge_operator: "nullptr".to_owned(),
            tail: Tail::default(),
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
        if self.largest.is_empty() {
            self.smallest = key.to_vec();
        } else if comparator.cmp_internal(&self.largest, key).is_ge() {
            return Err(Error::corruption("keys do not ascend"));
        }
        if !self.data.is_empty() && self.limits.end_before(&self.data, key, value) {
            self.end_data_block();
        }
        if self.separator_is_due {
            self.index.separate(comparator, &self.largest, Some(parsed.user_key));
            self.separator_is_due = false;
        }
        self.largest.clear();
        self.largest.extend_from_slice(key);
        self.sequence(parsed.sequence());
        let totals = &mut self.totals;
        totals.entries += 1;
        totals.raw_key_bytes += key.len() as u64;
        totals.raw_value_bytes += value.len() as u64;
        totals.deletions += u64::from(kind.is_tombstone());
        totals.merges += u64::from(kind == ValueType::Merge);
        self.filter.add(parsed.user_key);
        self.data.add(key, value);
        if self.limits.end_after(&self.data) {
            self.end_data_block();
        }
        Ok(())
    }

    /// The number of merge operands so far.
    pub fn merges(&self) -> u64 {
        self.totals.merges
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

    /// Records that a value of this file, of `bytes` bytes, is in that blob file.
    pub fn refers_to_blob_file(&mut self, number: u64, bytes: u64) {
        self.totals.blob_values += 1;
        self.totals.blob_bytes = self.totals.blob_bytes.saturating_add(bytes);
        if self.oldest_blob_file == 0 || number < self.oldest_blob_file {
            self.oldest_blob_file = number;
        }
    }

    /// Bytes of the file so far, without the current block and everything after the data. Blocks
    /// that are held back count uncompressed.
    pub fn len(&self) -> u64 {
        let held = self.held.as_ref().map_or(0, |(held, _)| held.bytes());
        self.out.position() + held as u64
    }

    /// Whether no entry was added.
    pub fn is_empty(&self) -> bool {
        self.totals.entries == 0 && self.tombstones.is_empty()
    }

    /// The bytes to write next.
    pub fn output(&self) -> &[u8] {
        &self.out.bytes
    }

    /// Drops the output, because the caller has taken it.
    pub fn output_taken(&mut self) {
        self.out.taken();
    }

    /// Does a piece of the work that is left of the entries so far. Returns whether there is more.
    pub fn step(&mut self) -> bool {
        match &self.held {
            Some((held, released)) if held.is_full() || *released > 0 => self.release(),
            _ => false,
        }
    }

    /// The training of the dictionary, if the next [`SstBuilder::step`] would run it. Its result
    /// goes to [`SstBuilder::trained`].
    pub fn training(&self) -> Option<DictionaryTraining> {
        let (held, _) = self.held.as_ref()?;
        if held.is_full() { self.training_of_held() } else { None }
    }

    /// The same for the first [`SstBuilder::finish_step`]. No entry may be added any more.
    pub fn last_training(&mut self) -> Option<DictionaryTraining> {
        self.end_data();
        self.training_of_held()
    }

    fn training_of_held(&self) -> Option<DictionaryTraining> {
        let (held, released) = self.held.as_ref()?;
        if *released > 0 || self.trained.is_some() || held.bytes() == 0 {
            return None;
        }
        match held.dictionary() {
            Dictionary::Trained(training) => Some(training),
            Dictionary::Made(_) => None,
        }
    }

    /// Sets the dictionary that [`SstBuilder::training`] has made.
    pub fn trained(&mut self, dictionary: Vec<u8>) {
        self.trained = Some(dictionary);
    }

    fn sequence(&mut self, sequence: u64) {
        let (low, high) = self.sequences.unwrap_or((sequence, sequence));
        self.sequences = Some((low.min(sequence), high.max(sequence)));
    }

    fn end_data_block(&mut self) {
        if self.data.is_empty() {
            return;
        }
        while self.step() {}
        let block = self.data.finish();
        match &mut self.held {
            Some((held, _)) => held.push(block),
            None => self.index.block(self.out.data_block(block, &mut self.compressor)),
        }
        self.data.clear();
        self.totals.data_blocks += 1;
        self.separator_is_due = true;
        let blocks = &self.options.blocks;
        let is_partitioned = self.is_partitioned && self.filter.is_partitioned();
        if !is_partitioned && self.index_and_filter_bytes() > blocks.whole_bytes_max {
            self.is_partitioned = true;
            self.filter.partition(blocks.partition_bytes);
        }
        self.filter.end_block();
    }

    /// Bytes of index and filter if each is one block, about.
    fn index_and_filter_bytes(&self) -> usize {
        self.index.bytes() + self.filter.bytes()
    }

    /// Chooses the dictionary, or writes a few of the blocks that were held back. Returns whether
    /// there is more to do.
    fn release(&mut self) -> bool {
        const BLOCKS_AT_ONCE: usize = 8;
        let Some((held, released)) = &mut self.held else { return false };
        if *released == 0 {
            let dictionary = self.trained.take();
            let dictionary = dictionary.unwrap_or_else(|| held.dictionary().make());
            self.compressor.set_dictionary(dictionary);
        }
        for _ in 0..BLOCKS_AT_ONCE {
            let Some(block) = held.block(*released) else {
                self.held = None;
                return false;
            };
            self.index.block(self.out.data_block(block, &mut self.compressor));
            *released += 1;
        }
        true
    }
}

/// The bytes of the file that the caller has not taken yet.
#[derive(Debug)]
struct Output {
    bytes: Vec<u8>,
    /// The offset of these in the file.
    offset: u64,
    check: BlockCheck,
    /// A block was compressed.
    has_compressed: bool,
}

impl Output {
    fn new(check: BlockCheck) -> Output {
        Output { bytes: Vec::new(), offset: 0, check, has_compressed: false }
    }

    /// The length of the file so far.
    fn position(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }

    fn taken(&mut self) {
        self.offset += self.bytes.len() as u64;
        self.bytes.clear();
    }

    /// Appends a data block, compressed if that saves enough. Returns its stored size.
    fn data_block(&mut self, block: &[u8], compressor: &mut Compressor) -> u64 {
        let kind = compressor.compression();
        match compressor.compress(block, true) {
            Some(smaller) => self.compressed(smaller, kind).size,
            None => self.block(block, Compression::None.to_byte()).size,
        }
    }

    /// Appends an index block; compressed, if there is a compressor and that saves enough.
    fn index_block(&mut self, block: &[u8], compressor: Option<&mut Compressor>) -> BlockHandle {
        let Some(compressor) = compressor else { return self.block(block, 0) };
        let kind = compressor.compression();
        match compressor.compress(block, false) {
            Some(smaller) => self.compressed(smaller, kind),
            None => self.block(block, Compression::None.to_byte()),
        }
    }

    fn compressed(&mut self, bytes: &[u8], compression: Compression) -> BlockHandle {
        self.has_compressed = true;
        self.block(bytes, compression.to_byte())
    }

    /// Appends a block and its trailer.
    fn block(&mut self, bytes: &[u8], compression: u8) -> BlockHandle {
        let handle = BlockHandle { offset: self.position(), size: bytes.len() as u64 };
        let at = self.bytes.len();
        self.bytes.reserve(bytes.len() + BLOCK_TRAILER_BYTES);
        self.bytes.extend_from_slice(bytes);
        self.bytes.push(compression);
        let checksum = self.check.compute(&self.bytes[at..], handle.offset);
        self.bytes.extend_from_slice(&checksum.to_le_bytes());
        handle
    }
}
