//! A compaction of the whole database.

use std::path::Path;
use std::time::{Duration, Instant};

use rocksdb::{BottommostLevelCompaction, CompactOptions, DB, Options};

use crate::measure::{cpu_time, io_bytes};

/// What it took.
pub struct Compacted {
    /// The time, without opening and closing.
    pub elapsed: Duration,
    /// Processor time of all threads.
    pub cpu: Duration,
    /// Bytes read from the device and written to it, if the kernel reports them.
    pub read_bytes: Option<u64>,
    pub written_bytes: Option<u64>,
}

/// Compacts all of `dir` with its own options, in up to `parts` ranges of keys at once.
pub fn run(dir: &Path, parts: u32) -> Result<Compacted, String> {
    let text = |error: rocksdb::Error| format!("{}: {error}", dir.display());
    let env = rocksdb::Env::new().map_err(text)?;
    let cache = rocksdb::Cache::new_lru_cache(32 << 20);
    let (_, families) = Options::load_latest(dir, env, true, cache).map_err(text)?;
    let mut options = Options::default();
    options.set_max_background_jobs(parts.max(2) as i32);
    options.set_max_subcompactions(parts);
    options.set_max_open_files(-1);
    options.set_use_direct_reads(true);
    options.set_use_direct_io_for_flush_and_compaction(true);
    let db = DB::open_cf_descriptors(&options, dir, families).map_err(text)?;
    let io = || (io_bytes("read_bytes"), io_bytes("write_bytes"));
    let (began, cpu, (read, written)) = (Instant::now(), cpu_time()?, io());
    let mut compact = CompactOptions::default();
    compact.set_bottommost_level_compaction(BottommostLevelCompaction::ForceOptimized);
    db.compact_range_opt(None::<&[u8]>, None::<&[u8]>, &compact);
    let (read_after, written_after) = io();
    let between = |before: Option<u64>, after: Option<u64>| Some(after? - before?);
    Ok(Compacted {
        elapsed: began.elapsed(),
        cpu: cpu_time()?.saturating_sub(cpu),
        read_bytes: between(read, read_after),
        written_bytes: between(written, written_after),
    })
}
