//! A node: configuration, placing of cores, wiring, metrics, log, and an orderly end.
//!
//! What runs here runs at start and at the end; nothing of it is on the way of a request. This is
//! the only crate that reads a configuration file, and the only one that knows both what a user
//! may ask for and what the machine has.
#![forbid(unsafe_code)]

mod config;
mod cores;
mod error;
mod log;
mod machine;
mod phases;
mod size;

pub use config::{CORE_MEMORY_MIN, Config, LISTEN_DEFAULT, Settings};
pub use cores::{Allowed, CoreChoice, place, write_list};
pub use error::{Error, Kind};
pub use log::{LogStyle, start_log};
pub use machine::Machine;
pub use phases::{Phase, Phases};
pub use size::Size;
