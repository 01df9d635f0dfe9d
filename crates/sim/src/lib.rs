//! Whole parts of Millrace in a simulated world: random work and random faults from one seed,
//! checked against the simplest correct model.
//!
//! `cargo test -p millrace-sim` runs some seeds of every scenario; `MILLRACE_SEEDS=1000` runs
//! more. A failure prints its seed and the command that replays it.
//!
//! - [`database`] makes a RocksDB directory and its model from a seed ([`table`] makes the SST
//!   files); RocksDB's own tools judge it in `tests/integration/judge.rs`;
//! - [`damage`] lets blocks rot while merges read them;
//! - [`engine`] kills the engine and cuts its power at any moment, and compares the database with
//!   all writes; [`history`] records operations on single keys from all cores, and [`linear`]
//!   checks that they are linearizable;
//! - [`guest`] runs a guest on a disk with real rings, while the process that serves it is killed,
//!   hands the disk over or loses power at any moment. Crate `node`'s
//!   `tests/integration/simulated.rs` uses the same guest with whole processes, whose upgrades are
//!   disturbed at any step;
//! - [`journal`] is the smallest log that loses no acknowledged record, with kills and power cuts
//!   at any moment, and wrong variants that are caught;
//! - [`copies`] makes checkpoints and backups of a database that is written to and ingests tables,
//!   with kills and power cuts at any moment, and in some worlds with a disk that fails, stalls or
//!   is full: a copy is whole or absent, and stays as it was;
//! - [`repair`] lets CURRENT, the MANIFEST, a table or a log be lost or damaged after a crash, and
//!   repairs the database, with kills and power cuts at any moment of the repair, too;
//! - [`manifest`] cuts power at every completion of a run in which the MANIFEST is often replaced;
//! - [`reads`] lets several cores read the database while the disk fails, and then checks that all
//!   keys are readable after the disk is healed;
//! - [`space`] writes values over and over, and compares the space of blob files with its limit.

#![forbid(unsafe_code)]

pub mod copies;
pub mod damage;
pub mod database;
pub mod engine;
mod families;
pub mod guest;
pub mod history;
pub mod journal;
pub mod linear;
pub mod manifest;
pub mod reads;
pub mod repair;
pub mod seeds;
pub mod space;
pub mod table;
