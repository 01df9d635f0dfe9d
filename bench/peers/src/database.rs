//! Opening the database to be read.
//!
//! It is opened read-only, so neither the directory nor its lock is touched. The table readers hold
//! index and filter blocks in memory, as by default in RocksDB, and every file is opened at the
//! start (`max_open_files` -1).

use std::path::Path;

use clap::ValueEnum;
use rocksdb::{BlockBasedOptions, Cache, ColumnFamilyDescriptor, DB, Options};

/// The kinds of RocksDB's block caches.
#[derive(Clone, Copy, ValueEnum)]
pub enum CacheKind {
    /// The sharded LRU list.
    Lru,
    /// The lock-free clock, which estimates the size of its entries itself.
    Hyperclock,
}

impl CacheKind {
    /// The flag's value.
    pub fn name(self) -> &'static str {
        match self {
            CacheKind::Lru => "lru",
            CacheKind::Hyperclock => "hyperclock",
        }
    }

    /// A cache of this kind.
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
    /// The block cache, to report its use.
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
    // Only allows a reader to use filters; the files name their kind.
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
    // Without its own options the column family would get RocksDB's defaults, with a cache of 32
    // MiB.
    let family = ColumnFamilyDescriptor::new("default", options.clone());
    let db = DB::open_cf_descriptors_read_only(&options, dir, [family], false)
        .map_err(|error| format!("{}: {error}", dir.display()))?;
    Ok(Database { db, cache })
}
