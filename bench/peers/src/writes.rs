//! `db_bench`'s write cases: RocksDB opened for writing with its defaults but for what is named
//! here.

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

/// What a writing case takes.
#[derive(Clone, Copy)]
pub struct Write {
    /// Keys to draw from.
    pub keys: u64,
    /// Writes of this thread, if their number ends it.
    pub num: Option<u64>,
    /// Flush the log before a write is acknowledged.
    pub sync: bool,
    /// Writes of this thread per second; as many as possible otherwise.
    pub rate: Option<f64>,
}

/// What is set beside RocksDB's defaults.
#[derive(Clone, Copy)]
pub struct Tuning {
    /// Size of a memtable at which it is flushed.
    pub memtable_bytes: usize,
    /// Memtables that may be in memory.
    pub memtables: i32,
    /// Background jobs.
    pub jobs: i32,
    /// Logs that are written over instead of new ones.
    pub recycle_logs: usize,
    /// Flush and compact with O_DIRECT.
    pub direct_writes: bool,
    /// Of the blocks of new tables.
    pub compression: DBCompressionType,
}

/// Which blocks stay in memory.
#[derive(Clone, Copy)]
pub enum Blocks<'a> {
    /// As many as RocksDB keeps by default.
    Default,
    /// None.
    Uncached,
    /// Those in this cache.
    Cached(&'a Cache),
}

/// Opens `dir` for writing; makes a database if `create`, which must not be there then.
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
    DB::open(&options, dir).map_err(|error| format!("{}: {error}", dir.display()))
}

/// What the writes had left to do.
pub struct Drained {
    /// How long it took.
    pub seconds: f64,
    /// Bytes that this process has had written to the device, from its start on, where the kernel
    /// tells.
    pub device_bytes: Option<u64>,
    /// Bytes that the database takes on the disk afterwards.
    pub disk_bytes: u64,
}

/// Waits until nothing is left to flush or to compact.
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

/// Sets random keys until the meter or their number ends it.
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
