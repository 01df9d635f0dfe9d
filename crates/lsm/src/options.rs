//! Options of an opening, for reading and for writing.

use std::collections::BTreeMap;
use std::sync::Arc;

use rocksfmt::Compression;

use crate::compaction_filter::CompactionFilter;
use crate::durability::Durability;
use crate::merge_operator::MergeOperator;

/// How to open a database.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Serve the state at the opening even while another process writes.
    pub secondary: bool,
    /// If the log is damaged in its middle, serve what can be read instead of refusing.
    pub salvage: bool,
    /// Check every block's checksum when it is read.
    pub verify_checksums: bool,
    /// Block cache of each reader in bytes; 0 for none.
    pub cache_bytes: usize,
    /// Let other threads read the caches: see [`Reader::shared`](crate::Reader::shared). Blocks
    /// are copied into such a cache, and cores copy them out of it, so it is slower for the
    /// cores.
    pub shared_cache: bool,
    /// Memory for all indexes and filters, in bytes. Those that do not fit are read on demand.
    pub memory_bytes: usize,
    /// Memory for writes recovered from the log, in bytes. If they need more, opening for writing
    /// first writes them to tables, and opening for reading fails.
    pub recovered_bytes: usize,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            secondary: false,
            salvage: false,
            verify_checksums: true,
            cache_bytes: 0,
            shared_cache: false,
            memory_bytes: usize::MAX,
            recovered_bytes: usize::MAX,
        }
    }
}

/// How to write to a database.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    /// What an acknowledged write survives.
    pub durability: Durability,
    /// Create the database if it does not exist.
    pub create: bool,
    /// Take over a database that a RocksDB older than 7.8 wrote last. That RocksDB cannot read it
    /// afterwards.
    pub adopt: bool,
    /// Bytes of memtables at which they are written to tables.
    pub memtable_bytes: usize,
    /// For the data blocks of tables.
    pub compression: Compression,
    /// Values of at least this many bytes go to blob files; without it, none.
    pub blob_min: Option<usize>,
    /// Length of a blob file in bytes, unless the OPTIONS of a database with blob files say
    /// another (`blob_file_size`).
    pub blob_file_bytes: u64,
    /// The limit of the space of tables and blob files, as a multiple of the live values in them;
    /// more than 1. Blob files may have 32 MiB of garbage in any case. On the way to the limit
    /// garbage is collected and writes are slowed; values that would exceed it go to tables.
    /// Without it, 2 in databases whose OPTIONS do not speak of blob files, and what OPTIONS say
    /// in others.
    pub blob_space_max_ratio: Option<f64>,
    /// Length at which the MANIFEST is replaced by one that holds the present state only, in
    /// bytes. RocksDB's `max_manifest_file_size` from OPTIONS applies if it is smaller.
    pub manifest_bytes: u64,
    /// The merge operator of the default column family. It is recorded when the database is
    /// created. Another one than the database has is refused. Without this option, the
    /// database's own applies.
    pub merge_operator: Option<MergeOperator>,
    /// RocksDB's options of the default column family by their names (`target_file_size_base`,
    /// ...), for a database that is created. An existing one keeps its own.
    pub column_family_options: BTreeMap<String, String>,
    /// Compaction filters by the names of their column families. They replace those that the
    /// database's options name.
    pub compaction_filters: BTreeMap<String, Arc<dyn CompactionFilter>>,
}

impl Default for WriteOptions {
    fn default() -> Self {
        WriteOptions {
            durability: Durability::default(),
            create: true,
            adopt: false,
            memtable_bytes: 64 << 20,
            compression: Compression::None,
            blob_min: None,
            blob_file_bytes: 64 << 20,
            blob_space_max_ratio: None,
            manifest_bytes: 16 << 20,
            merge_operator: None,
            column_family_options: BTreeMap::new(),
            compaction_filters: BTreeMap::new(),
        }
    }
}
