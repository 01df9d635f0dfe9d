//! The vhost-user protocol: what front ends say, and what follows from it. No ring is touched here.
//!
//! `message` has the messages as bytes, `session` the state of one connection, `config` what the
//! guest is told of the disk, `handover` how all of it goes to a successor.

pub mod config;
pub mod handover;
pub mod message;
pub mod session;
pub(crate) mod unsent;
