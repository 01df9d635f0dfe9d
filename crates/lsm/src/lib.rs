//! The engine: reads RocksDB databases as they are, asynchronously, from any core.
//!
//! [`Db::open`] recovers a directory without writing to it; [`Db::attach`] gives a core its
//! [`Reader`], with a channel to every file and a cache of its own. From there:
//!
//! - a get awaits at most a few blocks and holds nothing meanwhile; a cached one never suspends;
//! - a multi-get sends all the reads it needs at once;
//! - iterators go both ways with the same read-ahead.
//!
//! What cores share never changes: tables with their indexes and filters, and the recovered
//! writes. So readers share no lock and no line that any of them writes.

#![forbid(unsafe_code)]

mod ahead;
mod blob;
mod block;
mod cache;
mod check;
mod db;
mod error;
mod flight;
mod iter;
mod level_iter;
mod memtable;
mod point;
mod reader;
mod recover;
mod recovery_plan;
mod seek;
mod snapshot;
mod stat;
mod table;
mod value;
mod version;
mod wal_replay;
mod walk;

pub use check::{CheckReport, Damage, check};
pub use db::{ColumnFamilyInfo, Db, OpenOptions};
pub use error::{Error, Kind, Result};
pub use iter::{Iter, IterOptions};
pub use reader::{CfId, Reader, ReaderStats};
pub use snapshot::Snapshot;
pub use stat::{FamilyStat, LevelStat, Stat};
pub use value::Value;
