//! The engine: reads RocksDB databases in place, asynchronously, from any core, and writes them.
//!
//! [`Db::open`] recovers a directory without writing to it; [`Db::attach`] gives a core its
//! [`Reader`], with a channel to every file and a cache of its own. From there:
//!
//! - a get awaits at most a few blocks and holds nothing meanwhile; with cached blocks it never
//!   suspends;
//! - a multi-get sends all the reads it needs at once;
//! - iterators go in both directions with the same read-ahead.
//!
//! [`Db::open_for_writing`] also gives the one [`Writer`]: batches go to the log in groups and then
//! into memtables, which are written to tables and merged in the background. RocksDB 7.8 and newer
//! can open the directory at any time after the process has ended.
//!
//! State that cores share never changes, except the memtables, which one core fills while all read,
//! and the atomics that name the newest version and the newest sequence. So readers share no lock
//! and no cache line that any of them writes.
//!
//! [`checkpoint`] and [`BackupDir`] copy a database, whether it is open or not.
//!
//! The crate has rooms, and imports point one way: `inspect` and `copy` use `open`, `open` uses
//! `write`, `write` uses `read`, and all use the files at the top: errors, options, tables,
//! memtables, versions, and [`Db`], the state that cores share.

#![forbid(unsafe_code)]

mod compaction_filter;
mod copy;
mod db;
mod durability;
mod error;
mod family_list;
mod family_options;
mod file_list;
mod inspect;
mod level_keys;
mod mem;
mod merge_operator;
mod mutant;
mod open;
mod option_value;
mod options;
mod range_tombstones;
mod read;
mod recycled_tables;
mod slots;
mod stored_options;
mod table;
mod table_memory;
mod table_options;
mod version;
mod write;

pub use compaction_filter::{CompactionFilter, FilterDecision};
pub use copy::backup::create::CreatedBackup;
pub use copy::backup::meta::{Backup, BackupFile};
pub use copy::backup::restore::RestoredBackup;
pub use copy::backup::{BackupDir, VerifiedBackup};
pub use copy::checkpoint::{Checkpoint, checkpoint};
pub use copy::closed::ClosedFiles;
pub use copy::place::place_files;
pub use copy::transfer::Transfer;
pub use db::{CfId, ColumnFamilyInfo, Db, DbMemory};
pub use durability::Durability;
pub use error::{Error, Kind, Result};
pub use file_list::{BlobPrefix, FileList, FilePrefix};
pub use inspect::check::{CheckReport, Damage, check, check_file};
pub use inspect::repair::{Loss, RepairReport, repair};
pub use inspect::stat::{FamilyStat, LevelStat, Stat};
pub use merge_operator::MergeOperator;
#[doc(hidden)]
pub use mutant::mutant;
#[cfg(feature = "mutants")]
pub use mutant::set_mutant;
pub use open::outside::outside;
pub use open::within::WITHIN;
pub use options::{OpenOptions, WriteOptions};
pub use read::iter::{Iter, IterOptions};
pub use read::reader::Reader;
pub use read::shared::SharedReader;
pub use read::snapshot::Snapshot;
pub use read::stats::ReaderStats;
pub use read::stretch::{STRETCH_RECORD_BYTES_MAX, Stretch, StretchRecord};
pub use read::value::{Place, Value};
pub use read::warm::WARM_MAX;
pub use rocksfmt::{BatchWriter, Comparator, Compression, Op, WriteBatch};
pub use write::compaction_status::{
    CompactionJob, CompactionStatus, FamilyCompaction, LevelCompaction, LevelCounters,
};
pub use write::conflict::Unwritten;
pub use write::families::ColumnFamilyOptions;
pub use write::forerunner::{Forerunner, Note};
pub use write::ingest::{IngestFiles, Ingested, Ingestion};
pub use write::live_files::LiveFiles;
pub use write::manual::{Compacted, CompactionLimits, CompactionWatch, LetPass};
pub use write::writer::{Writer, WriterStats, Written};
