//! Writes SST files as RocksDB does, in all shapes that readers treat differently.
//!
//! It follows the format (`block_based_table`, format version 5), without an engine: entries come
//! sorted, all data is in memory, and nothing is optimised.

use std::collections::BTreeMap;

use rocksfmt::{
    BlockCheck, BlockHandle, BloomBuilder, ChecksumType, Comparator, InternalKey, SENTINEL_PACKED,
    ValueType, pack, put_internal_key, put_lps, put_varint,
};

/// How data blocks are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Uncompressed.
    Plain,
    /// Snappy.
    Snappy,
    /// LZ4 blocks.
    Lz4,
}

/// How the index is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Index {
    /// One block.
    Plain,
    /// Partitions and a top block.
    TwoLevel,
    /// One block that holds each data block's first key.
    FirstKeys,
}

/// The shape of a file.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Size in bytes at which a data block is closed.
    pub block_bytes: usize,
    /// Entries per restart point.
    pub restart_interval: usize,
    /// How blocks are checked.
    pub checksum: ChecksumType,
    /// How data blocks are stored.
    pub packing: Packing,
    /// How the index is built.
    pub index: Index,
    /// Whether index keys lack sequence and type, and values their length.
    pub lean_index: bool,
    /// Whether there is a Bloom filter.
    pub bloom: bool,
}

/// A finished file.
pub struct Table {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Smallest internal key, as for the MANIFEST.
    pub smallest: Vec<u8>,
    /// Largest internal key, as for the MANIFEST.
    pub largest: Vec<u8>,
    /// Smallest and largest sequence number.
    pub sequences: (u64, u64),
    /// Offset after the last data block.
    pub data_bytes: u64,
}

/// A block under construction.
struct Block {
    interval: usize,
    out: Vec<u8>,
    restarts: Vec<u32>,
    count: usize,
    last_key: Vec<u8>,
}

impl Block {
    fn new(interval: usize) -> Block {
        Block { interval, out: Vec::new(), restarts: vec![0], count: 0, last_key: Vec::new() }
    }

    fn add(&mut self, key: &[u8], value: &[u8], with_length: bool) {
        let restart = self.count.is_multiple_of(self.interval);
        if restart && self.count > 0 {
            self.restarts.push(self.out.len() as u32);
        }
        let shared = match restart {
            true => 0,
            false => self.last_key.iter().zip(key).take_while(|(a, b)| a == b).count(),
        };
        put_varint(&mut self.out, shared as u64);
        put_varint(&mut self.out, (key.len() - shared) as u64);
        if with_length {
            put_varint(&mut self.out, value.len() as u64);
        }
        self.out.extend_from_slice(&key[shared..]);
        self.out.extend_from_slice(value);
        self.last_key = key.to_vec();
        self.count += 1;
    }

    fn finish(mut self) -> Vec<u8> {
        for restart in &self.restarts {
            self.out.extend_from_slice(&restart.to_le_bytes());
        }
        self.out.extend_from_slice(&(self.restarts.len() as u32).to_le_bytes());
        self.out
    }
}

/// The index entry of one block.
struct Lead {
    last: Vec<u8>,
    first: Vec<u8>,
    handle: BlockHandle,
}

/// A file under construction.
pub struct TableBuilder {
    shape: Shape,
    check: BlockCheck,
    bytes: Vec<u8>,
    block: Block,
    block_first: Vec<u8>,
    leads: Vec<Lead>,
    bloom: BloomBuilder,
    ranges: Block,
    smallest: Option<Vec<u8>>,
    largest: Vec<u8>,
    sequences: (u64, u64),
    counts: Counts,
    external: bool,
}

#[derive(Default)]
struct Counts {
    entries: u64,
    deletions: u64,
    range_deletions: u64,
    raw_key: u64,
    raw_value: u64,
}

/// Entries of one index partition.
const PARTITION: usize = 8;

impl TableBuilder {
    /// An empty file.
    pub fn new(shape: Shape) -> TableBuilder {
        TableBuilder {
            shape,
            check: BlockCheck { kind: shape.checksum, base_context: 0 },
            bytes: Vec::new(),
            block: Block::new(shape.restart_interval),
            block_first: Vec::new(),
            leads: Vec::new(),
            bloom: BloomBuilder::new(10_000),
            ranges: Block::new(1),
            smallest: None,
            largest: Vec::new(),
            sequences: (u64::MAX, 0),
            counts: Counts::default(),
            external: false,
        }
    }

    /// Makes it a file to be ingested, as SstFileWriter makes them: all entries must have sequence
    /// number 0.
    pub fn external(mut self) -> TableBuilder {
        self.external = true;
        self
    }

    /// Appends an entry.
    pub fn add(&mut self, user_key: &[u8], sequence: u64, kind: ValueType, value: &[u8]) {
        let mut key = Vec::new();
        put_internal_key(&mut key, user_key, pack(sequence, kind as u8));
        let last = &self.block.last_key;
        // A user key's versions stay in one block, so that a lean index tells blocks apart.
        let same_user = InternalKey::split(last).is_some_and(|last| last.user_key == user_key);
        if self.block.out.len() >= self.shape.block_bytes && !same_user {
            self.close_block();
        }
        if self.block.count == 0 {
            self.block_first = key.clone();
        }
        self.block.add(&key, value, true);
        self.bloom.add(user_key);
        self.counts.entries += 1;
        self.counts.deletions += u64::from(kind == ValueType::Deletion);
        self.counts.raw_key += key.len() as u64;
        self.counts.raw_value += value.len() as u64;
        self.cover(&key, sequence);
    }

    /// Adds a range tombstone; by ascending start, the newest first where starts are equal.
    pub fn add_range(&mut self, start: &[u8], end: &[u8], sequence: u64) {
        let mut key = Vec::new();
        put_internal_key(&mut key, start, pack(sequence, ValueType::RangeDeletion as u8));
        self.ranges.add(&key, end, true);
        self.counts.entries += 1;
        self.counts.deletions += 1;
        self.counts.range_deletions += 1;
        self.cover(&key, sequence);
        let mut sentinel = Vec::new();
        put_internal_key(&mut sentinel, end, SENTINEL_PACKED);
        self.cover(&sentinel, sequence);
    }

    fn cover(&mut self, key: &[u8], sequence: u64) {
        let before = |a: &[u8], b: &[u8]| Comparator::Bytewise.cmp_internal(a, b).is_lt();
        if self.smallest.as_ref().is_none_or(|smallest| before(key, smallest)) {
            self.smallest = Some(key.to_vec());
        }
        if self.largest.is_empty() || before(&self.largest, key) {
            self.largest = key.to_vec();
        }
        self.sequences = (self.sequences.0.min(sequence), self.sequences.1.max(sequence));
    }

    fn store(&mut self, contents: &[u8], packing: Packing) -> BlockHandle {
        let offset = self.bytes.len() as u64;
        let (kind, packed) = match packing {
            Packing::Plain => (0, None),
            Packing::Snappy => (1, snap::raw::Encoder::new().compress_vec(contents).ok()),
            Packing::Lz4 => {
                let mut out = Vec::new();
                put_varint(&mut out, contents.len() as u64);
                out.extend_from_slice(&lz4_flex::block::compress(contents));
                (4, Some(out))
            }
        };
        // As in RocksDB, data that compression does not shrink is stored uncompressed.
        let (kind, stored) = match &packed {
            Some(packed) if packed.len() < contents.len() => (kind, packed.as_slice()),
            _ => (0, contents),
        };
        self.bytes.extend_from_slice(stored);
        self.bytes.push(kind);
        let sum = self.check.compute(&self.bytes[offset as usize..], offset);
        self.bytes.extend_from_slice(&sum.to_le_bytes());
        BlockHandle { offset, size: stored.len() as u64 }
    }

    fn close_block(&mut self) {
        let interval = self.shape.restart_interval;
        let block = std::mem::replace(&mut self.block, Block::new(interval));
        if block.count == 0 {
            return;
        }
        let last = block.last_key.clone();
        let handle = self.store(&block.finish(), self.shape.packing);
        self.leads.push(Lead { last, first: std::mem::take(&mut self.block_first), handle });
    }

    fn index_block(&self, leads: &[Lead]) -> Vec<u8> {
        let mut block = Block::new(1);
        for lead in leads {
            let mut value = encode(lead.handle);
            if self.shape.index == Index::FirstKeys {
                put_lps(&mut value, &lead.first);
            }
            match (self.shape.lean_index, InternalKey::split(&lead.last)) {
                (true, Some(last)) => block.add(last.user_key, &value, false),
                _ => block.add(&lead.last, &value, true),
            }
        }
        block.finish()
    }

    /// The finished file.
    pub fn finish(mut self) -> Table {
        self.close_block();
        let data_bytes = self.bytes.len() as u64;
        let mut meta: BTreeMap<&[u8], BlockHandle> = BTreeMap::new();
        let mut filter_size = 0;
        if self.shape.bloom {
            let filter = std::mem::replace(&mut self.bloom, BloomBuilder::new(1000)).finish();
            let handle = self.store(&filter, Packing::Plain);
            filter_size = handle.size;
            meta.insert(b"fullfilter.rocksdb.BuiltinBloomFilter", handle);
        }
        let mut leads = std::mem::take(&mut self.leads);
        let blocks = leads.len() as u64;
        if self.shape.index == Index::TwoLevel {
            let mut top = Vec::new();
            for part in leads.chunks(PARTITION) {
                let contents = self.index_block(part);
                let handle = self.store(&contents, Packing::Plain);
                let last = part.last().map(|lead| lead.last.clone()).unwrap_or_default();
                top.push(Lead { last, first: Vec::new(), handle });
            }
            leads = top;
        }
        let contents = self.index_block(&leads);
        let index = self.store(&contents, Packing::Plain);
        if self.counts.range_deletions > 0 {
            let ranges = std::mem::replace(&mut self.ranges, Block::new(1)).finish();
            meta.insert(b"rocksdb.range_del", self.store(&ranges, Packing::Plain));
        }
        let properties = self.properties(data_bytes, blocks, index.size, filter_size);
        meta.insert(b"rocksdb.properties", self.store(&properties, Packing::Plain));
        let mut block = Block::new(1);
        for (name, handle) in meta {
            block.add(name, &encode(handle), true);
        }
        let metaindex = self.store(&block.finish(), Packing::Plain);

        let mut footer = vec![self.shape.checksum.to_byte()];
        footer.extend(encode(metaindex));
        footer.extend(encode(index));
        footer.resize(41, 0);
        footer.extend_from_slice(&5u32.to_le_bytes());
        footer.extend_from_slice(&0x88E2_41B7_85F4_CFF7u64.to_le_bytes());
        self.bytes.extend(footer);
        Table {
            bytes: self.bytes,
            smallest: self.smallest.unwrap_or_default(),
            largest: self.largest,
            sequences: self.sequences,
            data_bytes,
        }
    }

    fn properties(&self, data: u64, blocks: u64, index: u64, filter: u64) -> Vec<u8> {
        let kind: u32 = match self.shape.index {
            Index::Plain => 0,
            Index::TwoLevel => 2,
            Index::FirstKeys => 3,
        };
        let lean = u64::from(self.shape.lean_index);
        let number = |value: u64| {
            let mut out = Vec::new();
            put_varint(&mut out, value);
            out
        };
        let counts = &self.counts;
        let mut properties: BTreeMap<&str, Vec<u8>> = [
            ("rocksdb.block.based.table.index.type", kind.to_le_bytes().to_vec()),
            ("rocksdb.block.based.table.prefix.filtering", b"0".to_vec()),
            ("rocksdb.block.based.table.whole.key.filtering", b"1".to_vec()),
            ("rocksdb.comparator", Comparator::Bytewise.name().into()),
            ("rocksdb.data.size", number(data)),
            ("rocksdb.deleted.keys", number(counts.deletions)),
            ("rocksdb.filter.size", number(filter)),
            ("rocksdb.format.version", number(5)),
            ("rocksdb.index.key.is.user.key", number(lean)),
            ("rocksdb.index.size", number(index)),
            ("rocksdb.index.value.is.delta.encoded", number(lean)),
            ("rocksdb.merge.operands", number(0)),
            ("rocksdb.num.data.blocks", number(blocks)),
            ("rocksdb.num.entries", number(counts.entries)),
            ("rocksdb.num.range-deletions", number(counts.range_deletions)),
            ("rocksdb.raw.key.size", number(counts.raw_key)),
            ("rocksdb.raw.value.size", number(counts.raw_value)),
        ]
        .into();
        if self.external {
            properties.insert("rocksdb.external_sst_file.version", 2u32.to_le_bytes().into());
            properties.insert("rocksdb.external_sst_file.global_seqno", vec![0; 8]);
        }
        let mut block = Block::new(1);
        for (name, value) in properties {
            block.add(name.as_bytes(), &value, true);
        }
        block.finish()
    }
}

fn encode(handle: BlockHandle) -> Vec<u8> {
    let mut out = Vec::new();
    put_varint(&mut out, handle.offset);
    put_varint(&mut out, handle.size);
    out
}
