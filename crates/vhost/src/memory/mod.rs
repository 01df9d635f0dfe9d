//! The guest's memory: regions of shared files that the front end sends, mapped once, and the only
//! way to access them.
//!
//! The guest writes its memory while we read it, so there is never a Rust reference to it. Data is
//! copied into private memory first and checked there. [`Area`] is a long-lived part (of a ring, an
//! in-flight region, the dirty log); [`GuestMemory`] translates the addresses in requests. Both
//! check each access against their bounds. All unsafe code for shared memory is in this folder.
//!
//! A [`GuestMemory`] is an immutable table. Adding or removing a region creates a new table that
//! shares the mappings of the old one, so a core may continue with its own table until it takes the
//! new one. A mapping is unmapped with the last table or area that holds it.
//!
//! The size of a file is checked when it is mapped. The guest cannot change it, but the front end
//! can truncate the file, and huge pages may run out. An access to missing memory then reads zeroes
//! ([`reactor::Guard`]), and the mapping is lost from then on ([`GuestMemory::is_lost`],
//! [`Area::is_lost`]). Check this whenever [`reactor::losses`] has changed, before acting on what
//! was read and before reporting what was written.
//!
//! `account` limits what front ends can map. `area` maps files,
//! `guest` makes tables of their regions, and `dirty` is the dirty log. Of the other rooms this
//! one uses only `protocol::message`, for the numbers of a region.

pub(crate) mod account;
mod area;
pub(crate) mod dirty;
mod error;
#[cfg(test)]
pub(crate) mod faults;
mod guest;

pub use area::Area;
pub(crate) use area::full_fence;
pub use error::{MemoryError, REGIONS_MAX};
pub use guest::GuestMemory;
pub(crate) use guest::Lookup;

pub use crate::protocol::message::RegionInfo;
