//! Whole parts of Millrace in a simulated world: random work and random faults from one seed,
//! checked against the dumbest model there is.
//!
//! `cargo test -p millrace-sim` runs some seeds of every scenario; `MILLRACE_SEEDS=1000` runs
//! more. A failure prints its seed and the command that replays it.
//!
//! - [`database`] makes a RocksDB directory and its model from a seed ([`table`] makes the SST
//!   files); RocksDB's own tools judge it in `tests/integration/judge.rs`;
//! - [`damage`] lets blocks rot while merges meet them;
//! - [`engine`] kills the engine and cuts its power at any moment, and compares what is left with
//!   what was written; [`history`] asks single keys from all cores meanwhile, and [`linear`] judges
//!   that;
//! - [`guest`] has a guest use a disk through real rings while the process that serves it is
//!   killed, hands the disk over or loses power at any moment. The same guest is in crate `node`'s
//!   `tests/integration/simulated.rs`, with whole processes: their upgrades meet trouble at any step;
//! - [`journal`] is the smallest log that loses nothing it has acknowledged, killed and without
//!   power at any moment, and wrong ones that are caught;
//! - [`manifest`] cuts power at every completion of a run in which the MANIFEST is replaced all the
//!   time;
//! - [`reads`] lets several cores read it while the disk fails, and then demands that everything is
//!   readable once the disk is well again.

#![forbid(unsafe_code)]

pub mod damage;
pub mod database;
pub mod engine;
pub mod guest;
pub mod history;
pub mod journal;
pub mod linear;
pub mod manifest;
pub mod reads;
pub mod seeds;
pub mod table;
