//! The engine: reads RocksDB databases as they are, asynchronously, from any core, and writes them.
//!
//! [`Db::open`] recovers a directory without writing to it; [`Db::attach`] gives a core its
//! [`Reader`], with a channel to every file and a cache of its own. From there:
//!
//! - a get awaits at most a few blocks and holds nothing meanwhile; a cached one never suspends;
//! - a multi-get sends all the reads it needs at once;
//! - iterators go both ways with the same read-ahead.
//!
//! [`Db::open_for_writing`] also gives the one [`Writer`]: batches go to the log in groups and then
//! into memtables, which are written to tables and merged in the background. RocksDB 7.8 and newer
//! open what is left, at any time.
//!
//! What cores share never changes, but for the memtables, which one core fills while all read, and
//! for what says which version and which sequence are the newest. So readers share no lock and no
//! line that any of them writes.

#![forbid(unsafe_code)]

mod db;
mod durability;
mod error;
mod inspect;
mod mem;
mod mutant;
mod open;
mod options;
mod read;
mod recycled_tables;
mod stored_options;
mod table;
mod table_memory;
mod version;
mod write;

pub use db::{CfId, ColumnFamilyInfo, Db, DbMemory};
pub use durability::Durability;
pub use error::{Error, Kind, Result};
pub use inspect::check::{CheckReport, Damage, check};
pub use inspect::stat::{FamilyStat, LevelStat, Stat};
#[cfg(feature = "mutants")]
pub use mutant::set_mutant;
pub use open::outside::outside;
pub use options::{OpenOptions, WriteOptions};
pub use read::iter::{Iter, IterOptions};
pub use read::reader::Reader;
pub use read::snapshot::Snapshot;
pub use read::stats::ReaderStats;
pub use read::value::Value;
pub use rocksfmt::{BatchWriter, Compression, Op, WriteBatch};
pub use write::writer::{Writer, WriterStats, Written};
