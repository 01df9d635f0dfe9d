//! Disks for virtual machines through vhost-user-blk: the protocol's messages and session, the
//! rings in the guest's memory, requests, and the in-flight region that survives a crash.
//!
//! A [`Target`] serves one disk. What is below it does no I/O: [`message`] and [`session`] are the
//! protocol, [`Ring`] and its requests are the guest's memory.

mod account;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod alone;
pub mod config;
mod dirty;
mod elsewhere;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz;
pub mod fuzz_message;
pub mod handover;
mod inflight;
mod memory;
pub mod message;
mod packed;
mod queue;
mod request;
mod ring;
mod seldom;
pub mod session;
mod share;
mod split;
mod stats;
mod target;
#[cfg(test)]
mod tests;
mod unsent;

pub use account::NoRoom;
pub use dirty::DirtyLog;
pub use inflight::{Form, InflightArea, InflightInfo, InflightRegion};
pub use memory::{Area, GuestMemory, MemoryError, REGIONS_MAX, RegionInfo};
pub use packed::PackedRing;
pub use request::{DATA_MAX, Disk, Finished, Kind, Request, SEGMENTS_MAX, SERIAL_LEN, Status};
pub use ring::{F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, Fault, Recovered, Ring, Setup};
pub use split::SplitRing;
pub use stats::{Counter, KindStats, LATENCY_BUCKETS, Latency, QueueStats};
pub use target::{Export, Keeper, Target, TargetOptions};
