//! A node: configuration, placement of cores, wiring, metrics, log, and an orderly end.
//!
//! This code runs at start and at the end; none of it is on the path of a request. This is the only
//! crate that reads a configuration file, and the only one that knows both the user's settings and
//! the machine.
//!
//! The rooms, each using only those before it: the files of this folder (configuration, errors,
//! placement); `ipc`; `disks`; `upgrade`; `launcher`; `serve`. `admin` and `start` stand between
//! `disks` and `launcher`.
#![forbid(unsafe_code)]

mod admin;
mod budget;
mod config;
mod cores;
mod disks;
mod error;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz;
mod ipc;
mod launcher;
mod log;
mod machine;
mod mutant;
mod nbd_address;
mod patience;
mod process;
mod redis_version;
mod room_for_clients;
mod serve;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod simulated;
mod size;
mod start;
mod tls;
mod upgrade;

pub use admin::{Request, VERSION as ADMIN_VERSION};
pub use bdev::{image_of, parse_rate, uri_under};
pub use budget::Budget;
pub use config::{CORE_MEMORY_MIN, Config, DEFAULT_FAMILY, LISTEN_DEFAULT, Sandbox, Settings};
pub use cores::{Allowed, CoreChoice, place, write_list};
pub use disks::limits::LimitChange;
pub use disks::spec::{DiskSpec, QUEUES_MAX};
pub use disks::state::{ADMIN_SOCKET, STATE_VARIABLE, default_state};
pub use disks::transfers::Peer;
pub use error::{Error, Kind};
pub use kv::TlsAuthClients;
pub use launcher::confine::{Beneath, confine_calls, confine_paths};
pub use log::{LOG_VARIABLE, LogConfig, start_tool_log};
pub use machine::Machine;
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub use mutant::{Mutant, set_mutant};
pub use nbd_address::NbdAddress;
pub use process::{CpuTime, count_memory_with, memory_use, resident_bytes};

pub use redis_version::RedisVersion;
pub use serve::compactions::LEASE_NS;
pub use serve::holds::HOLD_NS;
pub use serve::open::{explain, open, open_for_writing};
pub use serve::{Database, Ready, serve};
pub use size::Size;
pub use tls::TlsConfig;
