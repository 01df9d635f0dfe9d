//! The race of `millrace bench race` on an embedded RocksDB: the same keys, values, threads and
//! passes, without a network.
//!
//! A phase is one window of all threads. The threads do not read the clock between its operations.
//! Sets reach the log without a sync, as with durability `process`. Every value is verified where
//! RocksDB has it, without a copy.

use std::path::PathBuf;

use clap::Args;
use rocksdb::{DB, ReadOptions, WriteOptions};
use serde_json::{Value, json};
use workload::race::{Entries, Share, VALUE_BYTES};

use crate::database::CacheKind;
use crate::measure::{self, Outcome};
use crate::writes::{self, Blocks};
use crate::{Codec, NO_END, TuningFlags, rocksdb_version};

/// The flags.
#[derive(Args, Clone)]
pub struct Flags {
    /// The directory of a new database.
    #[arg(long)]
    data: PathBuf,
    /// Threads.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: u64,
    /// Sets of each thread.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 36))]
    sets: u64,
    /// Gets of each thread at random among all keys, in a last pass.
    #[arg(long, default_value_t = 0)]
    random: u64,
    /// Size of the block cache, which also has the values of blob files; 0 means none.
    #[arg(long, default_value_t = 512 << 20)]
    cache_bytes: usize,
    /// The kind of block cache.
    #[arg(long, value_enum, default_value_t = CacheKind::Lru)]
    cache: CacheKind,
    /// Read through the kernel's page cache instead of with O_DIRECT.
    #[arg(long)]
    buffered: bool,
    #[command(flatten)]
    tuning: TuningFlags,
}

/// Races.
pub fn run(flags: &Flags) -> Result<Value, String> {
    let tuning = flags.tuning.tuning(Codec::None);
    let cache = (flags.cache_bytes > 0).then(|| flags.cache.cache(flags.cache_bytes));
    let blocks = cache.as_ref().map_or(Blocks::Uncached, Blocks::Cached);
    let db = writes::open(&flags.data, tuning, true, !flags.buffered, blocks)?;
    let entries = Entries::new();
    // The number of operations is known, and each of them has succeeded at the end.
    let phase = |work: &(dyn Fn(Share) -> Result<u64, String> + Sync)| {
        measure::window(flags.threads as usize, NO_END, |thread, meter| {
            let (threads, sets) = (flags.threads, flags.sets);
            let done = work(Share { thread: thread as u64, threads, sets })?;
            meter.count(done, done);
            Ok(())
        })
    };
    let write = phase(&|share| set_all(&db, &entries, share))?;
    let sequential = phase(&|share| get_all(&db, &entries, share.written()))?;
    let hot = phase(&|share| get_all(&db, &entries, share.hot()))?;
    let random = match flags.random {
        0 => None,
        gets => Some(phase(&|share| get_all(&db, &entries, share.random(gets)))?),
    };
    let seconds = |outcome: &Outcome| outcome.elapsed.as_secs_f64();
    let cpu = |outcome: &Outcome| outcome.cpu.as_secs_f64();
    let read_bytes = |outcome: &Outcome| outcome.read_bytes;
    Ok(json!({
        "case": "race",
        "write_s": seconds(&write),
        "sequential_s": seconds(&sequential),
        "hot_s": seconds(&hot),
        "random_s": random.as_ref().map_or(0.0, seconds),
        "total_s": seconds(&write) + seconds(&sequential) + seconds(&hot),
        "writes": write.operations,
        "sequential_verified": sequential.operations,
        "hot_verified": hot.operations,
        "random_verified": random.as_ref().map_or(0, |random| random.operations),
        "write_cpu_s": cpu(&write),
        "sequential_cpu_s": cpu(&sequential),
        "hot_cpu_s": cpu(&hot),
        "random_cpu_s": random.as_ref().map_or(0.0, cpu),
        "sequential_read_bytes": read_bytes(&sequential),
        "hot_read_bytes": read_bytes(&hot),
        "random_read_bytes": random.as_ref().and_then(read_bytes),
        "value_size": VALUE_BYTES,
        "rocksdb": rocksdb_version(),
        "flags": {
            "data": flags.data, "threads": flags.threads, "sets": flags.sets, "random": flags.random,
            "cache_bytes": flags.cache_bytes, "cache": flags.cache.name(), "direct": !flags.buffered,
            "memtable_bytes": tuning.memtable_bytes, "memtables": tuning.memtables, "jobs": tuning.jobs,
            "recycle_logs": tuning.recycle_logs, "direct_writes": tuning.direct_writes,
            "blob_min": tuning.blob_min,
        },
    }))
}

/// Sets what one thread writes; how many.
fn set_all(db: &DB, entries: &Entries, share: Share) -> Result<u64, String> {
    let options = WriteOptions::default();
    let mut value = vec![0; VALUE_BYTES];
    for number in share.written() {
        let key = entries.fill(number, &mut value);
        db.put_opt(key, &value, &options).map_err(|error| error.to_string())?;
    }
    Ok(share.sets)
}

/// Gets and verifies the values with these numbers; how many.
fn get_all(db: &DB, entries: &Entries, numbers: impl Iterator<Item = u64>) -> Result<u64, String> {
    let mut options = ReadOptions::default();
    options.set_verify_checksums(true);
    let mut verified = 0;
    for number in numbers {
        let value = db
            .get_pinned_opt(entries.key(number), &options)
            .map_err(|error| error.to_string())?
            .ok_or_else(|| format!("key number {number} is lost"))?;
        if !entries.is_value(number, &value) {
            return Err(format!("the value of key number {number} is not what was written"));
        }
        verified += 1;
    }
    Ok(verified)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    #[test]
    fn every_value_is_verified_in_tables_and_in_blob_files() {
        for (name, more) in [("tables", vec![]), ("blobs", vec!["--blob-min", "1024"])] {
            let dir =
                std::env::temp_dir().join(format!("peers-race-{name}-{}", std::process::id()));
            let line = ["race", "--threads", "2", "--sets", "300", "--random", "50", "--data"];
            let line = line.into_iter().chain([dir.to_str().unwrap()]).chain(more);
            let flags = Line::parse_from(line.chain(["--memtable-bytes", "131072"])).flags;
            let result = run(&flags);
            let blobs = std::fs::read_dir(&dir)
                .unwrap()
                .filter(|entry| entry.as_ref().unwrap().path().extension() == Some("blob".as_ref()))
                .count();
            std::fs::remove_dir_all(&dir).unwrap();
            let result = result.unwrap();
            assert_eq!(result["writes"], 600);
            assert_eq!(result["sequential_verified"], 600);
            assert_eq!(result["hot_verified"], 660);
            assert_eq!(result["random_verified"], 100);
            assert_eq!(blobs > 0, name == "blobs");
        }
    }

    #[test]
    fn a_lost_and_a_wrong_value_end_the_race() {
        let dir = std::env::temp_dir().join(format!("peers-race-wrong-{}", std::process::id()));
        let db = DB::open_default(&dir).unwrap();
        let entries = Entries::new();
        let share = Share { thread: 0, threads: 1, sets: 20 };
        set_all(&db, &entries, share).unwrap();
        let whole = get_all(&db, &entries, share.written());
        db.put(entries.key(7), [0; VALUE_BYTES]).unwrap();
        let wrong = get_all(&db, &entries, share.written());
        db.delete(entries.key(7)).unwrap();
        let lost = get_all(&db, &entries, share.written());
        drop(db);
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(whole, Ok(20));
        assert!(wrong.unwrap_err().contains("number 7 is not"));
        assert!(lost.unwrap_err().contains("number 7 is lost"));
    }
}
