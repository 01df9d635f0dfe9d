//! The end of a file: everything after the data blocks.

use crate::block::builder::BlockBuilder;
use crate::key::SENTINEL_PACKED;
use crate::manifest::file_meta::FileMeta;
use crate::sst::builder::SstBuilder;
use crate::sst::builder::index::{BlockLimits, IndexBlocks, top_level};
use crate::sst::footer::{BlockHandle, Footer};
use crate::sst::metaindex::{FULL_FILTER, PARTITIONED_FILTER};
use crate::sst::step_sort::StepSort;

/// What is written of the tail.
#[derive(Debug, Default)]
pub(super) struct Tail {
    state: State,
    /// First byte after the data blocks.
    pub start: u64,
    /// First byte that a reader needs when it opens the file.
    opening_start: u64,
    /// The lower levels: for each block its last entry of the index, and its handle.
    pub index_parts: Vec<(usize, BlockHandle)>,
    pub filter_parts: Vec<(usize, BlockHandle)>,
    /// The filter, or its upper level.
    filter: Option<BlockHandle>,
    /// The index, or its upper level.
    index: BlockHandle,
    dictionary: Option<BlockHandle>,
    tombstones: Option<BlockHandle>,
}

/// The next work.
#[derive(Debug, Default)]
enum State {
    /// Data blocks that are held back.
    #[default]
    Data,
    /// Hashes of keys.
    Filter,
    /// The lower level of the index.
    IndexParts(Box<IndexBlocks>),
    /// The blocks that a reader needs when it opens the file.
    Opening,
    /// The order of the range tombstones.
    SortTombstones(StepSort),
    /// The range tombstones: in order, the number of those that are in the block, and the block.
    Tombstones(Vec<u32>, usize, Box<BlockBuilder>),
    Done,
}

/// Range tombstones of one step.
const TOMBSTONES_AT_ONCE: usize = if cfg!(test) { 2 } else { 512 };

impl Tail {
    /// Stored bytes of the index, without trailers.
    pub fn index_bytes(&self) -> u64 {
        self.index.size + self.index_parts.iter().map(|(_, part)| part.size).sum::<u64>()
    }

    /// Stored bytes of the upper level of the index, if it has two.
    pub fn top_index_bytes(&self) -> u64 {
        if self.index_parts.is_empty() { 0 } else { self.index.size }
    }

    /// Stored bytes of the filter, without trailers.
    pub fn filter_bytes(&self) -> u64 {
        let parts = self.filter_parts.iter().map(|(_, part)| part.size).sum::<u64>();
        self.filter.map_or(0, |filter| filter.size) + parts
    }

    pub fn has_filter(&self) -> bool {
        self.filter.is_some()
    }
}

impl SstBuilder {
    /// Does a piece of the work of [`SstBuilder::finish`]. Returns whether there is more. No entry
    /// may be added after the first call.
    pub fn finish_step(&mut self) -> bool {
        match std::mem::replace(&mut self.tail.state, State::Done) {
            State::Data => {
                self.end_data();
                self.tail.state = match self.release() {
                    true => State::Data,
                    false => State::Filter,
                };
            }
            State::Filter => {
                self.tail.start = self.out.position();
                self.tail.state = match self.filter.step() {
                    true => State::Filter,
                    false if self.is_partitioned => {
                        let interval = self.options.blocks.index_restart_interval;
                        State::IndexParts(Box::new(IndexBlocks::new(interval)))
                    }
                    false => State::Opening,
                };
            }
            State::IndexParts(blocks) => self.index_parts(blocks),
            State::Opening => {
                self.opening_blocks();
                if !self.tombstones.is_empty() {
                    let order = StepSort::new(self.tombstones.len() as u32);
                    self.tail.state = State::SortTombstones(order);
                }
            }
            State::SortTombstones(mut order) => {
                let all = &self.tombstones;
                let compare = |a: u32, b: u32| {
                    let (a, b) = (&all[a as usize], &all[b as usize]);
                    self.options.comparator.cmp_internal(&a.0, &b.0).then_with(|| b.1.cmp(&a.1))
                };
                self.tail.state = match order.step(compare) {
                    true => State::SortTombstones(order),
                    false => {
                        let block = Box::new(BlockBuilder::new(1));
                        State::Tombstones(order.into_indexes(), 0, block)
                    }
                };
            }
            State::Tombstones(order, done, block) => self.range_tombstones(order, done, block),
            State::Done => return false,
        }
        true
    }

    /// Ends the file. Returns the rest of the output and the file's description without number,
    /// epoch and age, which only the caller knows.
    pub fn finish(mut self) -> (Vec<u8>, FileMeta) {
        while self.finish_step() {}
        let properties = self.properties();
        let properties = self.out.block(&properties, 0);
        let mut metaindex = BlockBuilder::new(1);
        let mut entry = |name: &[u8], handle: Option<BlockHandle>| {
            if let Some(handle) = handle {
                let mut value = Vec::new();
                handle.put(&mut value);
                metaindex.add(name, &value);
            }
        };
        let tail = &self.tail;
        let is_whole = tail.filter_parts.is_empty();
        // In the order of their names.
        entry(FULL_FILTER, tail.filter.filter(|_| is_whole));
        entry(PARTITIONED_FILTER, tail.filter.filter(|_| !is_whole));
        entry(b"rocksdb.compression_dict", tail.dictionary);
        entry(b"rocksdb.properties", Some(properties));
        entry(b"rocksdb.range_del", tail.tombstones);
        let metaindex = self.out.block(metaindex.finish(), 0);
        let footer = Footer::encode(self.out.check.kind, metaindex, tail.index);
        self.out.bytes.extend_from_slice(&footer);
        let (smallest_sequence, largest_sequence) = self.sequences.unwrap_or_default();
        let size_bytes = self.out.position();
        let meta = FileMeta {
            number: self.options.identity.number,
            path_id: 0,
            size_bytes,
            smallest: self.smallest,
            largest: self.largest,
            smallest_sequence,
            largest_sequence,
            epoch: 0,
            oldest_blob_file: self.oldest_blob_file,
            oldest_ancestor_time: self.options.times.oldest_ancestor,
            creation_time: self.options.times.created,
            unique_id: self.options.identity.unique_id(),
            tail_bytes: size_bytes - self.tail.opening_start,
            timestamps_persisted: true,
        };
        (self.out.bytes, meta)
    }

    /// Ends the last data block.
    pub(super) fn end_data(&mut self) {
        self.end_data_block();
        if self.separator_is_due {
            self.index.separate(self.options.comparator, &self.largest, None);
            self.separator_is_due = false;
        }
        // A file of range tombstones only.
        self.is_partitioned &= self.index.len() > 0;
    }

    /// Writes a few blocks of the lower level of the index, or all of that of the filter.
    fn index_parts(&mut self, mut blocks: Box<IndexBlocks>) {
        const BLOCKS_AT_ONCE: usize = 8;
        let options = &self.options.blocks;
        let limits = BlockLimits::new(options.partition_bytes, options.deviation_percent);
        for _ in 0..BLOCKS_AT_ONCE {
            let compressor = options.compress_index.then_some(&mut self.compressor);
            let Some((block, entries)) = blocks.next(&self.index, limits) else {
                for (last, filter) in self.filter.take_partitions() {
                    self.tail.filter_parts.push((last, self.out.block(&filter, 0)));
                }
                self.tail.state = State::Opening;
                return;
            };
            let handle = self.out.index_block(block, compressor);
            self.tail.index_parts.push((entries - 1, handle));
        }
        self.tail.state = State::IndexParts(blocks);
    }

    /// Writes the blocks that a reader needs when it opens the file, except the properties.
    fn opening_blocks(&mut self) {
        let options = &self.options.blocks;
        let (interval, tail) = (options.index_restart_interval, &mut self.tail);
        tail.opening_start = self.out.position();
        tail.filter = match &tail.filter_parts[..] {
            [] => self.filter.take_whole().map(|filter| self.out.block(&filter, 0)),
            parts => Some(self.out.block(&top_level(&self.index, parts, interval), 0)),
        };
        let dictionary = self.compressor.dictionary();
        tail.dictionary = (!dictionary.is_empty()).then(|| self.out.block(dictionary, 0));
        let compressor = options.compress_index.then_some(&mut self.compressor);
        tail.index = if self.is_partitioned {
            let top = top_level(&self.index, &tail.index_parts, interval);
            self.out.index_block(&top, compressor)
        } else {
            self.out.index_block(IndexBlocks::new(interval).whole(&self.index), compressor)
        };
    }

    /// Writes some range tombstones and extends the bounds to include them.
    fn range_tombstones(&mut self, order: Vec<u32>, mut done: usize, mut block: Box<BlockBuilder>) {
        let comparator = self.options.comparator;
        for _ in 0..TOMBSTONES_AT_ONCE {
            let Some(&at) = order.get(done) else {
                self.tombstones = Vec::new();
                self.tail.tombstones = Some(self.out.block(block.finish(), 0));
                return;
            };
            let (key, mut end) = std::mem::take(&mut self.tombstones[at as usize]);
            done += 1;
            // Of equal ranges at the same sequence one is enough; of two ends the larger one
            // counts.
            while let Some(&next) = order.get(done)
                && self.tombstones[next as usize].0 == key
            {
                let (_, other) = std::mem::take(&mut self.tombstones[next as usize]);
                if comparator.cmp_user(&other, &end).is_gt() {
                    end = other;
                }
                done += 1;
            }
            block.add(&key, &end);
            self.totals.raw_key_bytes += key.len() as u64;
            self.totals.raw_value_bytes += end.len() as u64;
            self.totals.entries += 1;
            self.totals.deletions += 1;
            self.totals.range_deletions += 1;
            end.extend_from_slice(&SENTINEL_PACKED.to_le_bytes());
            if self.smallest.is_empty() || comparator.cmp_internal(&key, &self.smallest).is_lt() {
                self.smallest = key;
            }
            if self.largest.is_empty() || comparator.cmp_internal(&end, &self.largest).is_gt() {
                self.largest = end;
            }
        }
        self.tail.state = State::Tombstones(order, done, block);
    }
}
