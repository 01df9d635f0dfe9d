//! Writing: the one core that puts batches in order, and what it does in the background.
//!
//! `writer` is the entry. `commit` writes groups to the log (`wal_writer`) and to the memtables;
//! `flush` and `compaction` write tables (`job`, `table_writer`) and change the MANIFEST
//! (`manifest_writer`). `merge_plan` and `keep` decide what is merged and what is kept of it; both
//! are pure. Backpressure is in `pace` and `space`.

pub(crate) mod blob_garbage;
pub(crate) mod bulk_load;
pub(crate) mod commit;
pub(crate) mod compaction;
pub(crate) mod flush;
pub(crate) mod insist;
pub(crate) mod job;
pub(crate) mod keep;
pub(crate) mod manifest_writer;
pub(crate) mod merge_plan;
pub(crate) mod pace;
pub(crate) mod quarantine;
pub(crate) mod space;
pub(crate) mod table_writer;
pub(crate) mod wal_writer;
pub(crate) mod writer;
