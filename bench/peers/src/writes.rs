//! `db_bench`'s write cases: RocksDB opened for writing, with its defaults for everything that is
//! not set here.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, Options, ReadOptions, WaitForCompactOptions,
    WriteOptions,
};
use workload::Random;

use crate::keys::key;
use crate::measure::{Meter, io_bytes};
use crate::stalls::StallMeter;
use crate::values::Values;

/// The parameters of a writing thread.
#[derive(Clone, Copy)]
pub struct Write {
    /// The number of keys to draw from.
    pub keys: u64,
    /// The number of writes of this thread, if it ends the case.
    pub num: Option<u64>,
    /// Flush the log before a write is acknowledged.
    pub sync: bool,
    /// Writes of this thread per second; without it, as many as possible.
    pub rate: Option<f64>,
}

/// Options that differ from RocksDB's defaults.
#[derive(Clone, Copy)]
pub struct Tuning {
    /// Size of a memtable at which it is flushed.
    pub memtable_bytes: usize,
    /// The most memtables in memory.
    pub memtables: i32,
    /// Background jobs.
    pub jobs: i32,
    /// Recycled log files.
    pub recycle_logs: usize,
    /// Flush and compact with O_DIRECT.
    pub direct_writes: bool,
    /// Compression of new tables.
    pub compression: DBCompressionType,
    /// Values of at least this many bytes go to blob files, whose garbage is collected.
    pub blob_min: Option<u64>,
}

/// The block cache.
#[derive(Clone, Copy)]
pub enum Blocks<'a> {
    /// RocksDB's default.
    Default,
    /// None.
    Uncached,
    /// This cache, also for the values of blob files.
    Cached(&'a Cache),
}

/// Opens `dir` for writing; with `create` it must not have a database, and one is created.
pub fn open(
    dir: &Path,
    tuning: Tuning,
    create: bool,
    direct_reads: bool,
    blocks: Blocks<'_>,
) -> Result<DB, String> {
    let mut table = BlockBasedOptions::default();
    table.set_bloom_filter(10.0, false);
    match blocks {
        Blocks::Default => {}
        Blocks::Uncached => table.disable_cache(),
        Blocks::Cached(cache) => table.set_block_cache(cache),
    }
    let mut options = Options::default();
    options.set_block_based_table_factory(&table);
    options.create_if_missing(create);
    options.set_error_if_exists(create);
    options.set_compression_type(tuning.compression);
    options.set_write_buffer_size(tuning.memtable_bytes);
    options.set_max_write_buffer_number(tuning.memtables);
    options.set_max_background_jobs(tuning.jobs);
    options.set_recycle_log_file_num(tuning.recycle_logs);
    options.set_max_open_files(-1);
    options.set_use_direct_reads(direct_reads);
    options.set_use_direct_io_for_flush_and_compaction(tuning.direct_writes);
    if let Some(bytes) = tuning.blob_min {
        options.set_enable_blob_files(true);
        options.set_min_blob_size(bytes);
        options.set_enable_blob_gc(true);
        if let Blocks::Cached(cache) = blocks {
            options.set_blob_cache(cache);
        }
    }
    DB::open(&options, dir).map_err(|error| format!("{}: {error}", dir.display()))
}

/// The background work that was left after the writes.
pub struct Drained {
    /// The time that it took.
    pub seconds: f64,
    /// Bytes that this process has written to the device since its start, if the kernel reports
    /// them.
    pub device_bytes: Option<u64>,
    /// Bytes of the database on the disk afterwards.
    pub disk_bytes: u64,
}

/// Waits for all flushes and compactions.
pub fn drain(db: &DB, dir: &Path) -> Result<Drained, String> {
    let began = Instant::now();
    let options = WaitForCompactOptions::default();
    db.wait_for_compact(&options).map_err(|error| error.to_string())?;
    let seconds = began.elapsed().as_secs_f64();
    let device_bytes = io_bytes("write_bytes");
    let files = std::fs::read_dir(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let blocks = files.filter_map(|file| file.ok()?.metadata().ok()).map(|file| file.blocks());
    Ok(Drained { seconds, device_bytes, disk_bytes: blocks.sum::<u64>() * 512 })
}

/// Sets random keys until the meter or the number of writes ends it.
pub fn fill(
    db: &DB,
    write: Write,
    values: &Values,
    seed: u64,
    stalls: &StallMeter,
    meter: &mut Meter,
) -> Result<(), String> {
    let mut options = WriteOptions::default();
    options.set_sync(write.sync);
    let mut random = Random::new(seed);
    let mut values = values.clone();
    let start = Instant::now();
    for nth in 0..write.num.unwrap_or(u64::MAX) {
        if let Some(rate) = write.rate {
            let due = start + Duration::from_secs_f64(nth as f64 / rate);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            meter.begin(due);
        }
        db.put_opt(key(random.below(write.keys)), values.next(), &options)
            .map_err(|error| error.to_string())?;
        stalls.acknowledged();
        if !meter.count(1, 1) {
            break;
        }
    }
    Ok(())
}

/// Gets random keys until the meter ends it.
pub fn read(db: &DB, keys: u64, seed: u64, meter: &mut Meter) -> Result<(), String> {
    let mut options = ReadOptions::default();
    options.set_verify_checksums(true);
    let mut random = Random::new(seed);
    loop {
        let value = db
            .get_pinned_opt(key(random.below(keys)), &options)
            .map_err(|error| error.to_string())?;
        meter.returned(value.as_ref().map_or(0, |value| value.len()));
        if !meter.count(1, u64::from(value.is_some())) {
            return Ok(());
        }
    }
}
