//! Disks for virtual machines through vhost-user-blk: the protocol's messages and session, the
//! rings in guest memory, requests, and the in-flight region that survives a crash.
//!
//! A [`Target`] serves one disk. The layers below it do no I/O: [`message`] and [`session`] are the
//! protocol, [`Ring`] and its requests are guest memory.

pub mod bytes;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz;
pub mod fuzz_message;
mod memory;
mod protocol;
mod ring;
mod target;
#[cfg(test)]
mod tests;

pub use memory::account::NoRoom;
pub use memory::dirty::DirtyLog;
pub use memory::{Area, GuestMemory, MemoryError, REGIONS_MAX, RegionInfo};
pub use protocol::{config, handover, kept, message, ring_state, session};
pub use ring::inflight::{Form, InflightArea, InflightInfo, InflightRegion};
pub use ring::packed::PackedRing;
pub use ring::request::{DATA_MAX, Disk, Finished, Request, SEGMENTS_MAX, SERIAL_LEN, Status};
pub use ring::split::SplitRing;
pub use ring::{F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, Fault, Recovered, Ring, Setup};
pub use target::door::Door;
pub use target::observer::{DiskEvent, observe};
#[cfg(feature = "testing")]
#[doc(hidden)]
pub use target::standalone;
pub use target::stats::{Counter, KindStats, LATENCY_BUCKETS, Latency, QueueStats};
pub use target::{
    Export, FrontEnd, OnError, Target, TargetOptions, WriteCacheStore, limit_groups,
    set_group_limits,
};
