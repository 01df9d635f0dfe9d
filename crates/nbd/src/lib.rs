//! An NBD server: disks for clients of the Network Block Device protocol.
//!
//! The bytes of the protocol are in the crate `nbdproto`, which never sees the reactor. This crate
//! has the sockets, and executes the requests at the devices.
#![forbid(unsafe_code)]

mod server;

pub use server::{CONNECTIONS_MAX, Counters, Disk, Disks, Server};
