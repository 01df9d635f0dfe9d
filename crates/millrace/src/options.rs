//! How to open a database.

use std::path::Path;

use lsm::{Compression, Durability, MergeOperator, OpenOptions, WriteOptions};

use crate::budget::Budget;
use crate::db::Db;
use crate::error::{Error, ErrorKind, Result};

/// How to open a database: a builder.
///
/// Options that a RocksDB directory brings along (its `OPTIONS` file) are obeyed, or opening is
/// refused by name.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// use millrace::{Compression, Durability, Options};
///
/// let db = Options::new()
///     .memory(64 << 20)
///     .durability(Durability::Process)
///     .compression(Compression::Lz4)
///     .open(dir.path().join("cache.db"))
///     .await?;
/// db.put("k", "v").await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    cores: usize,
    processors: Option<Vec<usize>>,
    memory: u64,
    verify_checksums: bool,
    write: WriteOptions,
}

/// Memory if nothing else is asked for.
const MEMORY: u64 = 256 << 20;
/// The least memory of each core.
const CORE_MEMORY_MIN: u64 = 16 << 20;
/// The most cores of a database.
const CORES_MAX: usize = 256;

impl Default for Options {
    fn default() -> Options {
        Options {
            cores: 1,
            processors: None,
            memory: MEMORY,
            verify_checksums: true,
            write: WriteOptions::default(),
        }
    }
}

impl Options {
    /// The defaults, which the methods name.
    pub fn new() -> Options {
        Options::default()
    }

    /// The number of threads that run the database; 1 by default. One serves the reads of several
    /// hundred tasks, and all writes. Each has a cache of its own, and keys are spread over them.
    pub fn cores(mut self, cores: usize) -> Options {
        self.cores = cores;
        self.processors = None;
        self
    }

    /// Runs one thread on each of these processors, pinned to it. By default the system decides
    /// where threads run. Use it if the program keeps its own threads away from them.
    pub fn processors(mut self, processors: impl Into<Vec<usize>>) -> Options {
        let processors = processors.into();
        self.cores = processors.len();
        self.processors = Some(processors);
        self
    }

    /// Memory for everything that the database holds: block caches, indexes and filters, memtables,
    /// reads in flight. In bytes; 256 MiB by default, at least 16 MiB for each core. What the
    /// callers hold (values, batches) is not in it.
    pub fn memory(mut self, bytes: u64) -> Options {
        self.memory = bytes;
        self
    }

    /// What an acknowledged write survives: a power cut, by default, or only the end of the
    /// process.
    pub fn durability(mut self, durability: Durability) -> Options {
        self.write.durability = durability;
        self
    }

    /// Whether to create a database, with its directory, if there is none; on by default.
    pub fn create(mut self, create: bool) -> Options {
        self.write.create = create;
        self
    }

    /// Take over a database that a RocksDB older than 7.8 wrote last. That RocksDB cannot read it
    /// afterwards. Off by default.
    pub fn adopt(mut self, adopt: bool) -> Options {
        self.write.adopt = adopt;
        self
    }

    /// How blocks of new tables are compressed, if the directory's options do not say; by default
    /// they are not.
    pub fn compression(mut self, compression: Compression) -> Options {
        self.write.compression = compression;
        self
    }

    /// The operator of [`Db::merge`] for the default column family. It is recorded when the
    /// database is created; another one than the database has is refused. Without this option the
    /// database's own applies.
    pub fn merge_operator(mut self, operator: MergeOperator) -> Options {
        self.write.merge_operator = Some(operator);
        self
    }

    /// Store values of at least this many bytes in blob files, where merges do not copy them. By
    /// default only databases whose options ask for blob files have them.
    pub fn blob_min(mut self, bytes: usize) -> Options {
        self.write.blob_min = Some(bytes);
        self
    }

    /// Check the checksum of every block that is read; on by default.
    pub fn verify_checksums(mut self, verify: bool) -> Options {
        self.verify_checksums = verify;
        self
    }

    /// One of RocksDB's options of the default column family by its name, such as
    /// `target_file_size_base`, for a database that is created. An existing one keeps its own.
    pub fn rocksdb_option(mut self, name: impl Into<String>, value: impl Into<String>) -> Options {
        self.write.column_family_options.insert(name.into(), value.into());
        self
    }

    /// Opens the database in a directory.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Locked`] if it is open already, in another process or in this one.
    /// - [`ErrorKind::InvalidOption`], [`ErrorKind::NoDatabase`], [`ErrorKind::Older`].
    /// - [`ErrorKind::Unsupported`] for a database whose options this engine cannot obey, and
    ///   [`ErrorKind::Corruption`] if its files are damaged.
    pub async fn open(&self, path: impl AsRef<Path>) -> Result<Db> {
        Db::start(self, path.as_ref()).await
    }

    /// Splits the memory, and checks everything that does not need the disk.
    pub(crate) fn budget(&self) -> Result<Budget> {
        let invalid = |what: String| Err(Error::new(ErrorKind::InvalidOption, what));
        if !(1..=CORES_MAX).contains(&self.cores) {
            return invalid(format!("cannot open with {} cores: 1 to {CORES_MAX}", self.cores));
        }
        let allowed = reactor::processors();
        let missing = self.processors.iter().flatten().find(|cpu| !allowed.contains(cpu));
        if let Some(cpu) = missing {
            return invalid(format!("this process may not use processor {cpu}"));
        }
        let least = CORE_MEMORY_MIN * self.cores as u64;
        if self.memory < least {
            return invalid(format!(
                "cannot open with {} bytes of memory: {} cores need at least {least}",
                self.memory, self.cores
            ));
        }
        Ok(Budget::split(self.memory, self.cores))
    }

    /// The configuration of the cores.
    pub(crate) fn runtime(&self, budget: &Budget) -> reactor::RuntimeConfig {
        reactor::RuntimeConfig {
            processors: self.processors.clone().unwrap_or_else(|| (0..self.cores).collect()),
            pin: self.processors.is_some(),
            memory: budget.pool,
            ..reactor::RuntimeConfig::default()
        }
    }

    /// The options of the engine.
    pub(crate) fn engine(&self, budget: &Budget) -> (OpenOptions, WriteOptions) {
        let open = OpenOptions {
            verify_checksums: self.verify_checksums,
            cache_bytes: budget.cache,
            shared_cache: true,
            memory_bytes: budget.tables,
            recovered_bytes: 2 * budget.memtable,
            ..OpenOptions::default()
        };
        (open, WriteOptions { memtable_bytes: budget.memtable, ..self.write.clone() })
    }
}
