//! Benchmarks of databases and disks, of Millrace alone and of its peers.
//!
//! [`run`] measures one [`Case`], which means what db_bench means by the name, and returns an
//! [`Outcome`]. [`run_beside`] measures reads and writes in turns, and together. [`run_locks`],
//! [`run_mapped`] and [`run_vdisk`] measure without a database, and [`run_race`] drives a node
//! through its clients. [`run_peers`] runs Millrace and
//! other programs in turn on the same data and returns the table of docs/BENCHMARKS.md.
#![forbid(unsafe_code)]

mod beside;
mod case;
mod cases;
mod keys;
mod locks;
mod mapped;
mod measure;
mod mix;
mod outcome;
mod peers;
mod probe;
mod race;
mod run;
mod stalls;
mod values;
mod vdisk;
mod writes;

pub use beside::{BesideLine, BesideOutcome, run_beside};
pub use case::Case;
pub use locks::{LocksLine, LocksOutcome, LocksPlan, run_locks};
pub use lsm::{Compression, Durability};
pub use mapped::{MappedLine, MappedOutcome, MappedPlan, run_mapped};
pub use outcome::Outcome;
pub use peers::{KEYS, PeersPlan, plot_samples, run_peers};
pub use race::{RaceOutcome, RacePlan, run_race};
pub use run::{Plan, run};
pub use vdisk::{
    IdleOutcome, IdlePlan, Mix, PausesOutcome, PausesPlan, Replacement, VdiskOutcome, VdiskPlan,
    run_idle, run_pauses, run_vdisk,
};
pub use workload::Mix as Workload;
pub use writes::WritePlan;
