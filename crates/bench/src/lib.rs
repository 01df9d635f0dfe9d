//! Measuring how fast a database is read, alone and beside peers.
//!
//! [`run`] measures one [`Case`], named and meant as db_bench does, and gives an [`Outcome`].
//! [`run_peers`] runs Millrace and other programs in turn on the same data and gives the table of
//! the README.
#![forbid(unsafe_code)]

mod case;
mod cases;
mod keys;
mod measure;
mod outcome;
mod peers;
mod run;

pub use case::Case;
pub use outcome::Outcome;
pub use peers::{KEYS, PeersPlan, run_peers};
pub use run::{Plan, run};
