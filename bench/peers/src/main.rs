//! `millrace-peers`: RocksDB's newest release, measured on the same database and the same cases as
//! Millrace.
//!
//! Debian's `db_bench` is built with assertions on and is not a fair peer where the processor is
//! the bound. This program links the crate `rocksdb` as a release build for this machine and
//! repeats `db_bench`'s cases.
//!
//! Flow: flags ([`Flags`]) -> one read-only [`rocksdb::DB`] ([`database`]) -> a warm-up if there is
//! a cache -> one [`cases`] loop per thread inside one measured window ([`measure`]) -> one JSON
//! object on stdout. Cases that write ([`writes`]) or mix both ([`mix`]) open the database for
//! writing, and also report stalls ([`stalls`]). The race ([`race`]) has a window for each phase.
//! One case has no database: [`pingpong`], the bound of blocking clients.
//!
//! Invariants: a database that is only read is opened read-only and without its lock; nothing but
//! the case runs inside the window.
#![forbid(unsafe_code)]

mod cases;
mod compact;
mod database;
mod keys;
mod measure;
mod mix;
mod pingpong;
mod race;
mod stalls;
mod values;
mod writes;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use serde_json::json;

use cases::{Case, Reads};
use database::CacheKind;
use mix::{Arrivals, Worker};
use rocksdb::{Cache, DB, DBCompressionType, WriteOptions};
use stalls::StallMeter;
use values::Values;
use workload::{Mix, Plan, Random, Source, arrivals};
use writes::{Blocks, Tuning, Write};

/// The command line.
#[derive(Parser)]
#[command(version, about)]
struct Flags {
    #[command(subcommand)]
    case: CaseFlags,
}

/// The flags of cases that read.
#[derive(Args, Clone)]
struct Common {
    /// The database's directory; opened read-only.
    #[arg(long)]
    data: PathBuf,
    /// Keys in the database, numbered from 0 as db_bench does.
    #[arg(long)]
    keys: u64,
    /// How long to measure.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Size of the block cache; 0 means none. With a cache the keys are read once beforehand.
    #[arg(long, default_value_t = 0)]
    cache_bytes: usize,
    /// The kind of block cache.
    #[arg(long, value_enum, default_value_t = CacheKind::Lru)]
    cache: CacheKind,
    /// Read through the kernel's page cache instead of with O_DIRECT.
    #[arg(long)]
    buffered: bool,
    /// Threads, each with its own random numbers.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Seed of the first thread's random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// RocksDB's read-ahead for iterators in bytes; 0 means RocksDB's default.
    #[arg(long, default_value_t = 0)]
    readahead: usize,
    /// RocksDB's asynchronous reads (`ReadOptions::async_io`), for MultiGet and iterators.
    #[arg(long)]
    async_io: bool,
}

/// The cases, named as db_bench names them.
#[derive(Subcommand, Clone)]
enum CaseFlags {
    /// Get random keys.
    Readrandom {
        #[command(flatten)]
        common: Common,
        /// Get absent keys.
        #[arg(long)]
        absent: bool,
    },
    /// MultiGet batches of random keys; operations are keys, latencies are of whole batches.
    Multireadrandom {
        #[command(flatten)]
        common: Common,
        /// Keys in a batch.
        #[arg(long, default_value_t = 64)]
        batch: usize,
    },
    /// Seek to a random key with a new iterator, then step.
    Seekrandom {
        #[command(flatten)]
        common: Common,
        /// Steps after the seek.
        #[arg(long, default_value_t = 50)]
        nexts: usize,
        /// Step backwards.
        #[arg(long)]
        reverse: bool,
    },
    /// Read everything forwards, from the start again when the end is reached.
    Readseq {
        #[command(flatten)]
        common: Common,
    },
    /// Read everything backwards, from the end again when the start is reached.
    Readreverse {
        #[command(flatten)]
        common: Common,
    },
    /// Set random keys of a new database.
    Fillrandom {
        #[command(flatten)]
        write: WriteFlags,
    },
    /// Set random keys of an existing database.
    Overwrite {
        #[command(flatten)]
        write: WriteFlags,
    },
    /// Get random keys while one more thread sets keys.
    Readwhilewriting {
        #[command(flatten)]
        write: WriteFlags,
    },
    /// Get or set random keys.
    Readrandomwriterandom {
        #[command(flatten)]
        mix: MixFlags,
        /// Sets in a hundred operations.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u8).range(0..=100))]
        write_percent: u8,
    },
    /// Compact the whole database with its own options.
    Compact {
        /// The database's directory.
        #[arg(long)]
        data: PathBuf,
        /// Ranges of keys that are compacted at once (`max_subcompactions`).
        #[arg(long, default_value_t = 1)]
        parts: u32,
    },
    /// One of YCSB's workloads.
    Ycsb {
        #[command(flatten)]
        mix: MixFlags,
        /// The workload: a to f.
        #[arg(long)]
        workload: Mix,
    },
    /// `millrace bench race` without a network: threads set, get and verify values of 4 KiB.
    Race(race::Flags),
    /// Threads that send requests over TCP and wait for short replies, against a server that does
    /// nothing else.
    Pingpong(pingpong::Flags),
}

/// The flags of cases that mix operations. Their `--rate` is that of operations, at times that are
/// fixed beforehand.
#[derive(Args, Clone)]
struct MixFlags {
    #[command(flatten)]
    write: WriteFlags,
    /// Bytes of memory: memtables, indexes and filters are taken from it, the rest is block cache.
    /// Without it there is no block cache.
    #[arg(long)]
    memory: Option<usize>,
    /// The kind of block cache.
    #[arg(long, value_enum, default_value_t = CacheKind::Lru)]
    cache: CacheKind,
    /// Compression of the tables written.
    #[arg(long, value_enum, default_value_t = Codec::None)]
    compression: Codec,
    /// RocksDB's read-ahead for iterators in bytes; 0 means RocksDB's default.
    #[arg(long, default_value_t = 0)]
    readahead: usize,
}

/// The compression of blocks.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Codec {
    /// None.
    None,
    /// LZ4.
    Lz4,
}

impl From<Codec> for DBCompressionType {
    fn from(codec: Codec) -> DBCompressionType {
        match codec {
            Codec::None => DBCompressionType::None,
            Codec::Lz4 => DBCompressionType::Lz4,
        }
    }
}

/// RocksDB's options for writing.
#[derive(Args, Clone)]
struct TuningFlags {
    /// Size of a memtable at which it is flushed.
    #[arg(long, default_value_t = 64 << 20)]
    memtable_bytes: usize,
    /// The most memtables in memory (`max_write_buffer_number`).
    #[arg(long, default_value_t = 2)]
    memtables: i32,
    /// Background jobs (`max_background_jobs`).
    #[arg(long, default_value_t = 2)]
    jobs: i32,
    /// Recycled log files (`recycle_log_file_num`).
    #[arg(long, default_value_t = 0)]
    recycle_logs: usize,
    /// Flush and compact with O_DIRECT.
    #[arg(long)]
    direct_writes: bool,
    /// Write values of at least this many bytes to blob files, and collect their garbage.
    #[arg(long)]
    blob_min: Option<u64>,
}

impl TuningFlags {
    fn tuning(&self, codec: Codec) -> Tuning {
        Tuning {
            memtable_bytes: self.memtable_bytes,
            memtables: self.memtables,
            jobs: self.jobs,
            recycle_logs: self.recycle_logs,
            direct_writes: self.direct_writes,
            compression: codec.into(),
            blob_min: self.blob_min,
        }
    }
}

/// The flags of cases that write.
#[derive(Args, Clone)]
struct WriteFlags {
    /// The database's directory; empty for fillrandom.
    #[arg(long)]
    data: PathBuf,
    /// Keys to draw from, numbered from 0 as db_bench does.
    #[arg(long)]
    keys: u64,
    /// How long to measure.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// End after this number of writes instead.
    #[arg(long)]
    num: Option<u64>,
    /// Threads that write in fillrandom and overwrite, and that read in readwhilewriting.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Flush the log before a write is acknowledged.
    #[arg(long)]
    sync: bool,
    /// Writes per second; without it, as many as possible.
    #[arg(long)]
    rate: Option<f64>,
    /// Bytes of a value.
    #[arg(long, default_value_t = 1000)]
    value_size: usize,
    #[command(flatten)]
    tuning: TuningFlags,
    /// After the writes, wait for all flushes and compactions, and report how long they took.
    #[arg(long)]
    drain: bool,
    /// Seed of the first thread's random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// A case that reads, one that writes (with readers if `reads`), one that mixes both, a compaction,
/// the race, or its bound.
enum Work {
    Read(&'static str, Case, Common),
    Write { name: &'static str, reads: bool, flags: WriteFlags },
    Mix { name: &'static str, mix: Mix, flags: MixFlags },
    Compact { data: PathBuf, parts: u32 },
    Race(race::Flags),
    Pingpong(pingpong::Flags),
}

impl CaseFlags {
    fn split(self) -> Work {
        let (name, case, common) = match self {
            CaseFlags::Readrandom { common, absent } => {
                ("readrandom", Case::Get { absent }, common)
            }
            CaseFlags::Multireadrandom { common, batch } => {
                ("multireadrandom", Case::MultiGet { batch }, common)
            }
            CaseFlags::Seekrandom { common, nexts, reverse } => {
                ("seekrandom", Case::Seek { nexts, reverse }, common)
            }
            CaseFlags::Readseq { common } => ("readseq", Case::Scan { reverse: false }, common),
            CaseFlags::Readreverse { common } => {
                ("readreverse", Case::Scan { reverse: true }, common)
            }
            CaseFlags::Fillrandom { write: flags } => {
                return Work::Write { name: "fillrandom", reads: false, flags };
            }
            CaseFlags::Overwrite { write: flags } => {
                return Work::Write { name: "overwrite", reads: false, flags };
            }
            CaseFlags::Readwhilewriting { write: flags } => {
                return Work::Write { name: "readwhilewriting", reads: true, flags };
            }
            CaseFlags::Readrandomwriterandom { mix: flags, write_percent } => {
                let mix = Mix::reads_and_writes(write_percent);
                return Work::Mix { name: "readrandomwriterandom", mix, flags };
            }
            CaseFlags::Compact { data, parts } => return Work::Compact { data, parts },
            CaseFlags::Race(flags) => return Work::Race(flags),
            CaseFlags::Pingpong(flags) => return Work::Pingpong(flags),
            CaseFlags::Ycsb { mix: flags, workload: mix } => {
                return Work::Mix { name: "ycsb", mix, flags };
            }
        };
        Work::Read(name, case, common)
    }
}

/// RocksDB's version as pinned by the lock file: `0.19.0+11.8.1` is 11.8.1.
fn rocksdb_version() -> &'static str {
    let lock = include_str!("../Cargo.lock");
    lock.split("name = \"librocksdb-sys\"")
        .nth(1)
        .and_then(|rest| rest.split('"').nth(1))
        .and_then(|version| version.split('+').nth(1))
        .unwrap_or("unknown")
}

/// The window of a case that ends after a number of operations.
const NO_END: Duration = Duration::from_secs(100_000);

fn run_write(name: &str, reads: bool, flags: &WriteFlags) -> Result<serde_json::Value, String> {
    if flags.keys == 0 || flags.threads == 0 {
        return Err("--keys and --threads must be above 0".to_owned());
    }
    let began = Instant::now();
    let tuning = flags.tuning.tuning(Codec::None);
    let create = name == "fillrandom";
    let db = writes::open(&flags.data, tuning, create, reads, Blocks::Default)?;
    let open_seconds = began.elapsed().as_secs_f64();
    let writers = if reads { 1 } else { flags.threads };
    let share = |thread: usize| Write {
        keys: flags.keys,
        num: flags
            .num
            .map(|num| num / writers as u64 + u64::from((thread as u64) < num % writers as u64)),
        sync: flags.sync,
        rate: flags.rate.map(|rate| rate / writers as f64),
    };
    let values = Values::new(flags.value_size, &mut Random::new(flags.seed));
    let length = match flags.num {
        Some(_) if !reads => NO_END,
        _ => Duration::from_secs_f64(flags.seconds),
    };
    let stalls = StallMeter::new();
    let seed = |thread: usize| flags.seed + thread as u64;
    let write = || {
        measure::window(writers, length, |thread, meter| {
            writes::fill(&db, share(thread), &values, seed(thread), &stalls, meter)
        })
    };
    let (outcome, beside) = if reads {
        std::thread::scope(|scope| {
            let writing = scope.spawn(write);
            let outcome = measure::window(flags.threads, length, |thread, meter| {
                writes::read(&db, flags.keys, seed(thread) + 1000, meter)
            });
            let beside = writing.join().map_err(|_| "the writer panicked".to_owned())?;
            Ok::<_, String>((outcome?, Some(beside?)))
        })?
    } else {
        (write()?, None)
    };
    let drained = if flags.drain { Some(writes::drain(&db, &flags.data)?) } else { None };
    let latency = &outcome.latency;
    let us = |quantile| latency.value_at_quantile(quantile) as f64 / 1000.0;
    let seconds = outcome.elapsed.as_secs_f64();
    let with_debt = drained.as_ref().map(|drained| seconds + drained.seconds);
    Ok(json!({
        "case": name,
        "ops_per_second": outcome.operations as f64 / outcome.elapsed.as_secs_f64(),
        "ops_per_second_drained": with_debt.map(|seconds| outcome.operations as f64 / seconds),
        "drain_seconds": drained.as_ref().map(|drained| drained.seconds),
        "device_bytes": drained.as_ref().and_then(|drained| drained.device_bytes),
        "disk_bytes": drained.as_ref().map(|drained| drained.disk_bytes),
        "operations": outcome.operations,
        "found": reads.then_some(outcome.found),
        "returned_bytes": reads.then_some(outcome.bytes),
        "rate": flags.rate,
        "writes_per_second": beside.map(|writes| writes.operations as f64 / writes.elapsed.as_secs_f64()),
        "max_stall_ms": stalls.max_ms(),
        "stalled_ms": stalls.sum_ms(),
        "p50_us": us(0.5),
        "p99_us": us(0.99),
        "p999_us": us(0.999),
        "cpu_us_per_op": outcome.cpu.as_secs_f64() * 1e6 / outcome.operations.max(1) as f64,
        "seconds": outcome.elapsed.as_secs_f64(),
        "read_bytes": outcome.read_bytes,
        "open_seconds": open_seconds,
        "rocksdb": rocksdb_version(),
        "flags": {
            "data": flags.data, "keys": flags.keys, "num": flags.num, "threads": flags.threads,
            "sync": flags.sync, "rate": flags.rate, "value_size": flags.value_size,
            "memtable_bytes": tuning.memtable_bytes, "memtables": tuning.memtables, "jobs": tuning.jobs,
            "recycle_logs": tuning.recycle_logs, "direct_writes": tuning.direct_writes, "drain": flags.drain,
            "blob_min": tuning.blob_min, "seed": flags.seed,
        },
    }))
}

fn run_compact(data: &std::path::Path, parts: u32) -> Result<serde_json::Value, String> {
    let done = compact::run(data, parts)?;
    Ok(json!({
        "case": "compact",
        "seconds": done.elapsed.as_secs_f64(),
        "cpu_seconds": done.cpu.as_secs_f64(),
        "read_bytes": done.read_bytes,
        "written_bytes": done.written_bytes,
        "rocksdb": rocksdb_version(),
        "flags": { "data": data, "parts": parts },
    }))
}

fn run_mix(name: &str, mix: Mix, all: &MixFlags) -> Result<serde_json::Value, String> {
    let flags = &all.write;
    if flags.keys == 0 || flags.threads == 0 {
        return Err("--keys and --threads must be above 0".to_owned());
    }
    let tuning = flags.tuning.tuning(all.compression);
    let cache = all.memory.map(|bytes| all.cache.cache(bytes));
    let blocks = cache.as_ref().map_or(Blocks::Uncached, Blocks::Cached);
    let db = writes::open(&flags.data, tuning, false, true, blocks)?;
    let cache_bytes = match (&cache, all.memory) {
        (Some(cache), Some(memory)) => Some(limit(&db, cache, memory, tuning)?),
        _ => None,
    };
    let plan = Arc::new(Plan::new(mix, flags.keys));
    let values = Values::new(flags.value_size, &mut Random::new(flags.seed));
    let times = flags.rate.map(|rate| Arrivals::new(arrivals(rate, flags.seconds, flags.seed)));
    let stalls = StallMeter::new();
    let reads = Reads { readahead: all.readahead, async_io: false };
    let length = Duration::from_secs_f64(flags.seconds);
    let outcome = measure::window(flags.threads, length, |thread, meter| {
        let mut puts = WriteOptions::default();
        puts.set_sync(flags.sync);
        let worker = Worker {
            db: &db,
            source: Source::new(plan.clone(), flags.seed + thread as u64),
            values: values.clone(),
            reads,
            gets: reads.options(),
            puts,
            arrivals: times.as_ref(),
            stalls: &stalls,
        };
        worker.run(meter)
    })?;
    let us = |quantile| outcome.latency.value_at_quantile(quantile) as f64 / 1000.0;
    let seconds = outcome.elapsed.as_secs_f64();
    Ok(json!({
        "case": name,
        "workload": mix.name,
        "ops_per_second": outcome.operations as f64 / seconds,
        "offered_per_second": times.as_ref().map(|times| times.len() as f64 / flags.seconds),
        "operations": outcome.operations,
        "found": outcome.found,
        "returned_bytes": outcome.bytes,
        "read_bytes": outcome.read_bytes,
        "memory_max_bytes": measure::memory_max_bytes(),
        "cache_bytes": cache_bytes,
        "p50_us": us(0.5),
        "p99_us": us(0.99),
        "p999_us": us(0.999),
        "cpu_us_per_op": outcome.cpu.as_secs_f64() * 1e6 / outcome.operations.max(1) as f64,
        "seconds": seconds,
        "rocksdb": rocksdb_version(),
        "flags": {
            "data": flags.data, "keys": flags.keys, "threads": flags.threads, "sync": flags.sync, "rate": flags.rate,
            "value_size": flags.value_size, "memory": all.memory, "cache": all.cache.name(),
            "memtable_bytes": tuning.memtable_bytes, "memtables": tuning.memtables, "jobs": tuning.jobs,
            "recycle_logs": tuning.recycle_logs, "direct_writes": tuning.direct_writes,
            "readahead": all.readahead, "seed": flags.seed,
        },
    }))
}

/// Limits a cache to the memory that memtables, indexes and filters leave; returns that limit.
fn limit(db: &DB, cache: &Cache, memory: usize, tuning: Tuning) -> Result<usize, String> {
    let tables = db
        .property_int_value(rocksdb::properties::ESTIMATE_TABLE_READERS_MEM)
        .map_err(|error| error.to_string())?;
    let memtables = tuning.memtable_bytes * usize::try_from(tuning.memtables).unwrap_or(0);
    let others = memtables + usize::try_from(tables.unwrap_or(0)).unwrap_or(usize::MAX);
    let left = memory.checked_sub(others).filter(|left| *left > 0);
    let left = left.ok_or_else(|| {
        format!("memtables, indexes and filters need {others} bytes: name more --memory")
    })?;
    let mut cache = cache.clone();
    cache.set_capacity(left);
    Ok(left)
}

fn run(flags: CaseFlags) -> Result<serde_json::Value, String> {
    let (name, case, common) = match flags.split() {
        Work::Read(name, case, common) => (name, case, common),
        Work::Write { name, reads, flags } => return run_write(name, reads, &flags),
        Work::Mix { name, mix, flags } => return run_mix(name, mix, &flags),
        Work::Compact { data, parts } => return run_compact(&data, parts),
        Work::Race(flags) => return race::run(&flags),
        Work::Pingpong(flags) => return pingpong::run(&flags),
    };
    if common.keys == 0 || common.threads == 0 || common.seconds.is_nan() || common.seconds <= 0.0 {
        return Err("--keys, --threads and --seconds must be above 0".to_owned());
    }
    let database = database::open(&common.data, common.cache_bytes, common.cache, common.buffered)?;
    if common.cache_bytes > 0 {
        cases::warm_up(&database.db, common.keys)?;
    }
    let length = Duration::from_secs_f64(common.seconds);
    let outcome = measure::window(common.threads, length, |thread, meter| {
        cases::run(
            case,
            &database,
            common.keys,
            Reads { readahead: common.readahead, async_io: common.async_io },
            common.seed + thread as u64,
            meter,
        )
    })?;
    let latency = &outcome.latency;
    let us = |quantile| latency.value_at_quantile(quantile) as f64 / 1000.0;
    Ok(json!({
        "case": name,
        "ops_per_second": outcome.operations as f64 / outcome.elapsed.as_secs_f64(),
        "operations": outcome.operations,
        "found": outcome.found,
        "returned_bytes": outcome.bytes,
        "p50_us": us(0.5),
        "p99_us": us(0.99),
        "p999_us": us(0.999),
        "cpu_us_per_op": outcome.cpu.as_secs_f64() * 1e6 / outcome.operations.max(1) as f64,
        "seconds": outcome.elapsed.as_secs_f64(),
        "read_bytes": outcome.read_bytes,
        "absent": matches!(case, Case::Get { absent: true }),
        "cache_used_bytes": database.cache.as_ref().map_or(0, rocksdb::Cache::get_usage),
        "rocksdb": rocksdb_version(),
        "flags": {
            "data": common.data, "keys": common.keys, "threads": common.threads, "cache_bytes": common.cache_bytes,
            "cache": common.cache.name(), "direct": !common.buffered,
            "verify_checksums": true, "readahead": common.readahead,
            "async_io": common.async_io, "seed": common.seed,
            "batch": match case { Case::MultiGet { batch } => Some(batch), _ => None },
            "nexts": match case { Case::Seek { nexts, .. } => Some(nexts), _ => None },
            "reverse": match case { Case::Seek { reverse, .. } | Case::Scan { reverse } => Some(reverse), _ => None },
        },
    }))
}

fn main() -> ExitCode {
    match run(Flags::parse().case) {
        Ok(result) => {
            println!("{result}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("millrace-peers: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::rocksdb_version;

    #[test]
    fn the_version_of_rocksdb_comes_from_the_lock_file() {
        let version = rocksdb_version();
        assert!(version.split('.').count() == 3, "{version}");
        assert!(version.split('.').all(|part| part.parse::<u32>().is_ok()), "{version}");
    }
}
