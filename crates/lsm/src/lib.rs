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

mod adopt;
mod ahead;
mod blob;
mod blob_garbage;
mod block;
mod bulk_load;
mod cache;
mod check;
mod choices;
mod commit;
mod compaction;
mod create;
mod db;
mod durability;
mod error;
mod flight;
mod flush;
mod gate;
mod insist;
mod iter;
mod job;
mod keep;
mod level_iter;
mod log_chain;
mod long_logs;
mod manifest_writer;
mod mem;
mod merge_plan;
mod mutant;
mod outside;
mod pace;
mod point;
mod quarantine;
mod reader;
mod recover;
mod recovered;
mod recovery_plan;
mod seek;
mod snapshot;
mod space;
mod spares;
mod stat;
mod table;
mod table_memory;
mod table_writer;
mod value;
mod version;
mod wal_replay;
mod wal_writer;
mod walk;
mod writer;

pub use check::{CheckReport, Damage, check};
pub use db::{ColumnFamilyInfo, Db, DbMemory, OpenOptions};
pub use error::{Error, Kind, Result};
pub use iter::{Iter, IterOptions};
#[cfg(feature = "mutants")]
pub use mutant::set_mutant;
pub use outside::outside;
pub use reader::{CfId, Reader, ReaderStats};
pub use rocksfmt::{BatchWriter, Compression, Op, WriteBatch};
pub use snapshot::Snapshot;
pub use stat::{FamilyStat, LevelStat, Stat};
pub use value::Value;
pub use wal_writer::Durability;
pub use writer::{WriteOptions, Writer, WriterStats, Written};
