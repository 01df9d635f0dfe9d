//! Disks for virtual machines through vhost-user-blk: the protocol's messages and session, the
//! rings in the guest's memory, requests, and the in-flight region that survives a crash.

mod dirty;
mod inflight;
mod memory;
mod packed;
mod request;
mod ring;
mod split;
#[cfg(test)]
mod tests;

pub use dirty::DirtyLog;
pub use inflight::{Form, InflightArea, InflightInfo, InflightRegion};
pub use memory::{Area, GuestMemory, MemoryError, REGIONS_MAX, RegionInfo};
pub use packed::PackedRing;
pub use request::{DATA_MAX, Disk, Finished, Kind, Request, SEGMENTS_MAX, SERIAL_LEN, Status};
pub use ring::{F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, Fault, Recovered, Ring, Setup};
pub use split::SplitRing;
