//! Opening the database the way the benchmark asks for.
//!
//! Read-only, so neither the directory nor its lock is touched. Index and filter blocks are held in
//! memory by the table readers, as RocksDB does by default, and every file is opened at once
//! (`max_open_files` -1).

use std::path::Path;

use clap::ValueEnum;
use rocksdb::{BlockBasedOptions, Cache, ColumnFamilyDescriptor, DB, Options};

/// Which of RocksDB's block caches serves the cached cases.
#[derive(Clone, Copy, ValueEnum)]
pub enum CacheKind {
    /// The sharded LRU list.
    Lru,
    /// The lock-free clock, sizing its entries by itself.
    Hyperclock,
}

impl CacheKind {
    /// The name the flag has.
    pub fn name(self) -> &'static str {
        match self {
            CacheKind::Lru => "lru",
            CacheKind::Hyperclock => "hyperclock",
        }
    }

    /// Such a cache of so many bytes.
    pub fn cache(self, bytes: usize) -> Cache {
        match self {
            CacheKind::Lru => Cache::new_lru_cache(bytes),
            CacheKind::Hyperclock => Cache::new_hyper_clock_cache(bytes, 0),
        }
    }
}

/// The opened database, and its block cache if it has one.
pub struct Database {
    /// RocksDB, read-only.
    pub db: DB,
    /// The block cache, to report how full it was.
    pub cache: Option<Cache>,
}

/// Opens `dir` read-only.
pub fn open(
    dir: &Path,
    cache_bytes: usize,
    kind: CacheKind,
    buffered: bool,
) -> Result<Database, String> {
    let mut table = BlockBasedOptions::default();
    // Only tells a reader that filters may be used; the files say which kind they have.
    table.set_bloom_filter(10.0, false);
    let cache = (cache_bytes > 0).then(|| kind.cache(cache_bytes));
    match &cache {
        Some(cache) => table.set_block_cache(cache),
        None => table.disable_cache(),
    }
    let mut options = Options::default();
    options.set_block_based_table_factory(&table);
    options.set_max_open_files(-1);
    options.set_use_direct_reads(!buffered);
    // By name alone a column family would be opened with RocksDB's default options, its cache of 32
    // MiB included.
    let family = ColumnFamilyDescriptor::new("default", options.clone());
    let db = DB::open_cf_descriptors_read_only(&options, dir, [family], false)
        .map_err(|error| format!("{}: {error}", dir.display()))?;
    Ok(Database { db, cache })
}
