//! The work of a benchmark on a key-value store: which operations, on which keys, and when.
//!
//! Millrace's benchmark and the program of `bench/peers` both link this crate, so that both sides
//! of a row do the same work.
//!
//! 1. A [`Mix`] says how many of a hundred operations read, update, insert, scan, or read and then
//!    write, and how their keys are distributed: YCSB's workloads A to F, or reads and writes.
//! 2. A [`Plan`] is a mix over a number of keys, shared by all threads or tasks. Each of them draws
//!    its [`Operation`]s from its own [`Source`].
//! 3. [`arrivals`] fixes the start times of an open loop's operations beforehand.
//! 4. [`race`] has the keys, the values and the order of the race, whose passes are of fixed
//!    length.
//!
//! Nothing here reads a clock or does I/O.
#![forbid(unsafe_code)]

mod arrivals;
mod mix;
mod newest;
pub mod race;
mod random;
mod source;
mod zipf;

pub use arrivals::arrivals;
pub use mix::{Mix, Shares, Spread};
pub use newest::Newest;
pub use random::Random;
pub use source::{Operation, Plan, SCAN_MAX, Source};
pub use zipf::{THETA, Zipf, scrambled};
