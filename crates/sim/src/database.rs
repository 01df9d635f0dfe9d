//! A RocksDB directory and its contents, from a seed.
//!
//! A random history of puts, deletes and range deletes fills the deepest level (the oldest part),
//! the levels above, several files of level 0 and the write-ahead log, as if RocksDB had flushed
//! and compacted meanwhile. Old versions and tombstones are kept, as under snapshots.

use std::collections::BTreeMap;

use reactor::sim::{Rng, World};
use rocksfmt::testing::{BatchBuilder, EditBuilder, LogBuilder};
use rocksfmt::{ChecksumType, FileMeta, FileName, ValueType};

use crate::table::{Index, Packing, Shape, Table, TableBuilder};

/// The contents of a database: the newest value of each key.
pub type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// A directory in memory and its contents.
pub struct Database {
    /// File names and contents.
    pub files: BTreeMap<String, Vec<u8>>,
    /// The contents that a reader must find.
    pub model: Model,
    /// All user keys that were ever written, sorted.
    pub keys: Vec<Vec<u8>>,
    /// Bytes of data blocks in each table.
    pub data_bytes: BTreeMap<String, u64>,
}

impl Database {
    /// Puts the files into a directory of a simulated world.
    pub fn install(&self, world: &World, dir: &str) {
        for (name, bytes) in &self.files {
            world.add_file(format!("{dir}/{name}"), bytes.clone());
        }
    }
}

enum Op {
    Put(Vec<u8>),
    Delete,
    DeleteRange(Vec<u8>),
}

/// One epoch of the history: key, sequence, operation.
type Epoch = Vec<(Vec<u8>, u64, Op)>;

/// The key with this number: in the order of the numbers, and some are prefixes of others.
fn key(n: u64) -> Vec<u8> {
    let tail = match n % 5 {
        0 => "",
        1 => "-a",
        2 => "-bb",
        3 => "/a-rather-longer-key-than-the-others",
        _ => "z",
    };
    format!("user{:06}{tail}", n / 5 * 3).into_bytes()
}

struct History<'r> {
    rng: &'r mut Rng,
    universe: u64,
    sequence: u64,
    model: Model,
    values_max: u64,
}

impl History<'_> {
    /// Makes `count` operations and applies them to the model.
    fn epoch(&mut self, ops: u64, ranges: bool) -> Epoch {
        let mut epoch = Epoch::new();
        for n in 0..ops {
            self.sequence += 1;
            let at = self.rng.below(self.universe);
            let key = key(at);
            let op = match self.rng.below(100) {
                // The first is a put, so that every file has a block.
                _ if n == 0 => self.put(),
                0..4 if ranges => {
                    let end = self::key(at + 1 + self.rng.below(self.universe / 20 + 2));
                    Op::DeleteRange(end)
                }
                0..16 => Op::Delete,
                _ => self.put(),
            };
            match &op {
                Op::Put(value) => {
                    self.model.insert(key.clone(), value.clone());
                }
                Op::Delete => {
                    self.model.remove(&key);
                }
                Op::DeleteRange(end) => {
                    let gone: Vec<_> = self
                        .model
                        .range(key.clone()..end.clone())
                        .map(|(k, _)| k.clone())
                        .collect();
                    for key in gone {
                        self.model.remove(&key);
                    }
                }
            }
            epoch.push((key, self.sequence, op));
        }
        epoch
    }

    /// A unique value: it begins with its sequence.
    fn put(&mut self) -> Op {
        let len = match self.rng.below(20) {
            0 => 0,
            1 => self.rng.below(self.values_max * 10),
            _ => self.rng.below(self.values_max),
        };
        let mut value = self.sequence.to_le_bytes().to_vec();
        let mut filler = self.rng.fork();
        while value.len() < len as usize {
            // Half of it compresses well.
            value.extend_from_slice(&filler.next_u64().to_le_bytes());
            value.extend_from_slice(b"compress");
        }
        value.truncate(len as usize);
        Op::Put(value)
    }
}

fn shape(rng: &mut Rng) -> Shape {
    Shape {
        block_bytes: [256, 1000, 4096, 4096, 16_384][rng.index(5)],
        restart_interval: [1, 4, 16][rng.index(3)],
        checksum: [
            ChecksumType::Crc32c,
            ChecksumType::XxHash,
            ChecksumType::XxHash64,
            ChecksumType::Xxh3,
        ][rng.index(4)],
        packing: [Packing::Plain, Packing::Plain, Packing::Snappy, Packing::Lz4][rng.index(4)],
        index: [Index::Plain, Index::TwoLevel, Index::FirstKeys][rng.index(3)],
        lean_index: rng.coin(),
        bloom: !rng.chance(250_000),
    }
}

/// One file of an epoch's entries, which are sorted.
fn table(shape: Shape, entries: &Epoch) -> Table {
    let mut builder = TableBuilder::new(shape);
    for (key, sequence, op) in entries {
        match op {
            Op::Put(value) => builder.add(key, *sequence, ValueType::Value, value),
            Op::Delete => builder.add(key, *sequence, ValueType::Deletion, b""),
            Op::DeleteRange(end) => builder.add_range(key, end, *sequence),
        }
    }
    builder.finish()
}

/// Cuts a sorted epoch into at most `parts` files, between user keys.
fn cut(mut entries: Epoch, parts: usize) -> Vec<Epoch> {
    let len = entries.len() / parts.max(1) + 1;
    let mut files = Vec::new();
    while entries.len() > len {
        let at = (len..entries.len()).find(|&at| entries[at - 1].0 != entries[at].0);
        let Some(at) = at else { break };
        let rest = entries.split_off(at);
        files.push(std::mem::replace(&mut entries, rest));
    }
    files.push(entries);
    files
}

fn sorted(mut epoch: Epoch) -> Epoch {
    epoch.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
    epoch
}

/// A database that depends on `seed` only.
pub fn database(seed: u64) -> Database {
    let mut rng = Rng::new(seed);
    let universe = 200 + rng.below(1800);
    let values_max = [40, 400, 1500][rng.index(3)];
    let mut files = BTreeMap::new();
    let mut data_bytes = BTreeMap::new();
    let mut edit = EditBuilder::new().string(1, b"leveldb.BytewiseComparator");
    let (mut number, mut epoch_number) = (10, 1);
    let mut add = |edit: EditBuilder, level: u32, shape: Shape, entries: &Epoch| {
        let table = table(shape, entries);
        number += 1;
        epoch_number += 1;
        let meta = FileMeta {
            number,
            size_bytes: table.bytes.len() as u64,
            smallest: table.smallest,
            largest: table.largest,
            smallest_sequence: table.sequences.0,
            largest_sequence: table.sequences.1,
            epoch: epoch_number,
            tail_bytes: table.bytes.len() as u64 - table.data_bytes,
            ..rocksfmt::testing::file_meta(number, b"", b"", (0, 0))
        };
        let name = FileName::Sst(number).to_string();
        data_bytes.insert(name.clone(), table.data_bytes);
        files.insert(name, table.bytes);
        edit.add_file(level, &meta)
    };

    let mut history =
        History { rng: &mut rng, universe, sequence: 0, model: Model::new(), values_max };
    for (level, ops, parts) in [(3, universe * 2, 5), (2, universe / 2, 3), (1, universe / 5, 2)] {
        // Range tombstones of a level with several files are cut at their edges; a level of
        // one file needs no cutting.
        let parts = if history.rng.chance(250_000) { 1 } else { parts };
        let epoch = history.epoch(ops, parts == 1);
        let shape = shape(history.rng);
        for entries in cut(sorted(epoch), parts) {
            edit = add(edit, level, shape, &entries);
        }
    }
    for _ in 0..history.rng.below(5) {
        let ops = 1 + history.rng.below(universe / 8 + 2);
        let epoch = history.epoch(ops, true);
        let shape = shape(history.rng);
        edit = add(edit, 0, shape, &sorted(epoch));
    }
    let flushed = history.sequence;
    let ops = history.rng.below(universe / 8 + 2);
    let unflushed = history.epoch(ops, true);
    let (last, model) = (history.sequence, history.model);

    const LOG: u64 = 9;
    const MANIFEST: u64 = 5;
    let mut log = if rng.coin() { LogBuilder::legacy() } else { LogBuilder::recyclable(LOG) };
    let mut at = 0;
    while at < unflushed.len() {
        let some = (1 + rng.index(5)).min(unflushed.len() - at);
        let mut batch = BatchBuilder::new(unflushed[at].1);
        for (key, _, op) in &unflushed[at..at + some] {
            batch = match op {
                Op::Put(value) => batch.put(0, key, value),
                Op::Delete => batch.delete(0, key),
                Op::DeleteRange(end) => batch.delete_range(0, key, end),
            };
        }
        log.append(&batch.finish());
        at += some;
    }
    files.insert(FileName::Wal(LOG).to_string(), log.finish());
    let edit = edit.required(LOG, 100, flushed).finish();
    let mut manifest = LogBuilder::legacy();
    manifest.append(&edit);
    files.insert(FileName::Manifest(MANIFEST).to_string(), manifest.finish());
    files.insert("CURRENT".to_owned(), format!("{}\n", FileName::Manifest(MANIFEST)).into_bytes());
    files.insert("LOCK".to_owned(), Vec::new());
    debug_assert!(last >= flushed);
    let keys = (0..universe).map(key).collect();
    Database { files, model, keys, data_bytes }
}
