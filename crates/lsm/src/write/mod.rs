//! Writing: the core that puts batches in order, and its background work.
//!
//! - `writer` is the entry, and tells the path of a write. `state` is what the tasks of that core
//!   share.
//! - `commit` writes groups to the log (`wal_writer`) and to the memtables; `next_log` makes the
//!   log that comes next; `conflict` decides on batches of optimistic transactions.
//! - `flush` and `compaction` write tables and change the MANIFEST (`manifest_turn`,
//!   `manifest_writer`). Their work runs as a `job` on other cores (`merge`, `table_writer`);
//!   `picker` and `compaction_iter` decide what is merged and which versions are kept, and are
//!   pure.
//! - `aged` lists files that are due for their age.
//! - `manual` compacts on request, and pauses and limits merges; `compaction_status` reports on
//!   them.
//! - `blob_writer` stores large values in blob files; `blob_anchor` and `blob_garbage` say what the
//!   MANIFEST must hold for RocksDB to keep such a file as long as its values are needed;
//!   `blob_operands` keeps values in the log that operands may follow.
//! - `backpressure` is the law by which writes wait (`pace` is its rate); `retry` tries again after
//!   failures; `quarantine` lists damaged tables; `obsolete` removes and recycles files.
//! - `bulk_load` writes tables without the log; `ingest` takes over finished ones.
//! - `families` makes and drops column families.
//! - `forerunner` is what a caller runs before groups of batches are written.
//! - `live_files` lists the files for a copy of the database.
//!
//! It may use `read` and what all rooms share; only `open` uses it.
//!
//! A circle stays: `state` has fields of the files of this room (`backpressure`, `retry`,
//! `obsolete`, ...), which in turn add methods to `WriteState`. It is one core's state and the
//! tasks that run on it; they read and change each other's fields without messages.

mod aged;
mod backpressure;
pub(crate) mod blob_anchor;
pub(crate) mod blob_garbage;
mod blob_gc;
pub(crate) mod blob_operands;
pub(crate) mod blob_writer;
pub(crate) mod bulk_load;
pub(crate) mod commit;
pub(crate) mod compaction;
pub(crate) mod compaction_iter;
pub(crate) mod compaction_status;
pub(crate) mod conflict;
pub(crate) mod controller;
pub(crate) mod families;
pub(crate) mod flush;
pub(crate) mod forerunner;
pub(crate) mod ingest;
pub(crate) mod insist;
pub(crate) mod job;
pub(crate) mod live_files;
pub(crate) mod manifest_turn;
pub(crate) mod manifest_writer;
pub(crate) mod manual;
pub(crate) mod merge;
mod next_log;
pub(crate) mod obsolete;
pub(crate) mod pace;
pub(crate) mod picker;
pub(crate) mod quarantine;
pub(crate) mod retry;
pub(crate) mod split;
pub(crate) mod state;
pub(crate) mod table_writer;
pub(crate) mod wal_writer;
pub(crate) mod writer;
