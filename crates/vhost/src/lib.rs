//! Disks for virtual machines through vhost-user-blk: the protocol's messages and session, the
//! rings in the guest's memory, requests, and the in-flight region that survives a crash.

pub mod config;
pub mod fuzz_message;
pub mod handover;
pub mod message;
pub mod session;
