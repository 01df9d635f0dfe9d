//! Opening: from a directory to a version, and whether it may be written to.
//!
//! `recovery_plan` decides from the MANIFEST and a listing what is read, `recover` reads it,
//! `wal_replay` and `log_chain` judge the logs. `gate` is asked before anything is written;
//! `create` and `adopt` begin to write. It uses `write` for what an opening writes.

pub(crate) mod adopt;
pub(crate) mod choices;
pub(crate) mod create;
pub(crate) mod gate;
pub(crate) mod log_chain;
pub(crate) mod long_logs;
pub(crate) mod outside;
pub(crate) mod recover;
pub(crate) mod recovered;
pub(crate) mod recovery_plan;
pub(crate) mod wal_replay;
