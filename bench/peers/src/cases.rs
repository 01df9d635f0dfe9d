//! `db_bench`'s read cases, one loop each. A loop ends when its meter says that the time is over.

use rocksdb::{DB, DBRawIterator, ReadOptions};
use workload::Random;

use crate::database::Database;
use crate::keys::{KEY_LEN, absent_key, key};
use crate::measure::Meter;

/// Keys read between two readings of the clock in scans, where a reading costs more than a step.
const SCAN_RUN: u64 = 256;

/// One case with its parameters.
#[derive(Clone, Copy)]
pub enum Case {
    /// One get of a random key.
    Get {
        /// Whether to get absent keys.
        absent: bool,
    },
    /// One MultiGet of `batch` random keys.
    MultiGet {
        /// Keys in a batch.
        batch: usize,
    },
    /// One seek to a random key and `nexts` steps.
    Seek {
        /// Steps after the seek.
        nexts: usize,
        /// Step backwards.
        reverse: bool,
    },
    /// Everything in order.
    Scan {
        /// From the end to the start.
        reverse: bool,
    },
}

/// RocksDB's read options.
#[derive(Clone, Copy, Default)]
pub struct Reads {
    /// Bytes that iterators read ahead; 0 means RocksDB's default.
    pub readahead: usize,
    /// Asynchronous reads.
    pub async_io: bool,
}

impl Reads {
    /// These options as RocksDB's type.
    pub fn options(self) -> ReadOptions {
        let mut options = ReadOptions::default();
        options.set_verify_checksums(true);
        options.set_async_io(self.async_io);
        if self.readahead > 0 {
            options.set_readahead_size(self.readahead);
        }
        options
    }
}

/// Runs `case` on one thread until the meter ends it.
pub fn run(
    case: Case,
    database: &Database,
    keys: u64,
    reads: Reads,
    seed: u64,
    meter: &mut Meter,
) -> Result<(), String> {
    let db = &database.db;
    let mut random = Random::new(seed);
    match case {
        Case::Get { absent } => get(db, keys, absent, reads, &mut random, meter),
        Case::MultiGet { batch } => multi_get(db, keys, batch, reads, &mut random, meter),
        Case::Seek { nexts, reverse } => seek(db, keys, nexts, reverse, reads, &mut random, meter),
        Case::Scan { reverse } => scan(db, reverse, reads, meter),
    }
}

/// Reads the first `keys` keys once in order, into the cache.
pub fn warm_up(db: &DB, keys: u64) -> Result<(), String> {
    let mut iter = db.raw_iterator_opt(Reads::default().options());
    iter.seek_to_first();
    let mut read = 0;
    while iter.valid() && read < keys {
        iter.next();
        read += 1;
    }
    iter.status().map_err(|error| error.to_string())
}

fn get(
    db: &DB,
    keys: u64,
    absent: bool,
    reads: Reads,
    random: &mut Random,
    meter: &mut Meter,
) -> Result<(), String> {
    let options = reads.options();
    let name = if absent { absent_key } else { key };
    loop {
        let value = db
            .get_pinned_opt(name(random.below(keys)), &options)
            .map_err(|error| error.to_string())?;
        meter.returned(value.as_ref().map_or(0, |value| value.len()));
        if !meter.count(1, u64::from(value.is_some())) {
            return Ok(());
        }
    }
}

fn multi_get(
    db: &DB,
    keys: u64,
    batch: usize,
    reads: Reads,
    random: &mut Random,
    meter: &mut Meter,
) -> Result<(), String> {
    let options = reads.options();
    let family = db.cf_handle("default").ok_or("there is no default column family")?;
    let mut wanted = vec![[0_u8; KEY_LEN]; batch];
    loop {
        wanted.iter_mut().for_each(|slot| *slot = key(random.below(keys)));
        let mut found = 0;
        for value in db.batched_multi_get_cf_opt(family, &wanted, false, &options) {
            let value = value.map_err(|error| error.to_string())?;
            meter.returned(value.as_ref().map_or(0, |value| value.len()));
            found += u64::from(value.is_some());
        }
        if !meter.count(batch as u64, found) {
            return Ok(());
        }
    }
}

fn seek(
    db: &DB,
    keys: u64,
    nexts: usize,
    reverse: bool,
    reads: Reads,
    random: &mut Random,
    meter: &mut Meter,
) -> Result<(), String> {
    loop {
        let mut bytes = 0;
        let target = key(random.below(keys));
        let mut iter = db.raw_iterator_opt(reads.options());
        iter.seek(target);
        let found = u64::from(iter.key() == Some(&target[..]));
        for _ in 0..nexts {
            if !iter.valid() {
                break;
            }
            bytes += touch(&iter);
            if reverse { iter.prev() } else { iter.next() }
        }
        iter.status().map_err(|error| error.to_string())?;
        drop(iter);
        meter.returned(bytes);
        if !meter.count(1, found) {
            return Ok(());
        }
    }
}

fn scan(db: &DB, reverse: bool, reads: Reads, meter: &mut Meter) -> Result<(), String> {
    loop {
        let mut iter = db.raw_iterator_opt(reads.options());
        if reverse {
            iter.seek_to_last()
        } else {
            iter.seek_to_first()
        }
        loop {
            let (mut read, mut bytes) = (0, 0);
            while read < SCAN_RUN && iter.valid() {
                bytes += touch(&iter);
                if reverse {
                    iter.prev()
                } else {
                    iter.next()
                }
                read += 1;
            }
            iter.status().map_err(|error| error.to_string())?;
            meter.returned(bytes);
            if !meter.count_run(read, read, read) {
                return Ok(());
            }
            if read < SCAN_RUN {
                break;
            }
        }
    }
}

/// The bytes of key and value, as db_bench counts them.
pub fn touch(iter: &DBRawIterator<'_>) -> usize {
    iter.item().map_or(0, |(key, value)| key.len() + value.len())
}
