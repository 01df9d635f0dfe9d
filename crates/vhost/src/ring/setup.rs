//! The arguments and the faults of a ring: what every part of this room shares.

use std::fmt;

use crate::memory::{Area, GuestMemory};
pub use crate::protocol::config::feature::{
    EVENT_IDX as F_EVENT_IDX, INDIRECT_DESC as F_INDIRECT_DESC, RING_PACKED as F_RING_PACKED,
};
#[cfg(doc)]
use crate::ring::request::SEGMENTS_MAX;

/// Largest ring.
const NUM_MAX: u16 = 1 << 15;

/// Why a ring is broken, or was not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The ring's size is zero, too large, or (split) not a power of two.
    Size(u16),
    /// A part of the ring is not in guest memory.
    Unmapped(&'static str),
    /// A part of the ring is not aligned as required.
    Misaligned(&'static str),
    /// The start index is outside the ring.
    Base(u32),
    /// The in-flight region is inconsistent, or contradicts the ring.
    Inflight(&'static str),
    /// The available index is further ahead than the ring is long.
    AvailableJump {
        /// Our next index.
        next: u16,
        /// The guest's index.
        available: u16,
    },
    /// A head or buffer id is outside the ring.
    HeadRange(u16),
    /// A head or buffer id is already in flight.
    HeadBusy(u16),
    /// A descriptor's successor is outside its table.
    NextRange(u16),
    /// A chain is a loop, or longer than the ring or [`SEGMENTS_MAX`].
    ChainTooLong,
    /// A chain has more than 4 GiB.
    ChainTooLarge,
    /// A readable descriptor after a writable one.
    ReadableAfterWritable,
    /// An indirect table without the feature, inside another, or not at the end of its chain.
    IndirectUnexpected,
    /// An indirect table's length is 0, too large, or not a multiple of a descriptor's length.
    IndirectLength(u32),
    /// An indirect table is not in guest memory.
    IndirectUnmapped(u64),
    /// Memory that the front end shared no longer exists.
    MemoryLost,
    /// The guest kicks all the time without requests.
    KickStorm,
    /// The system refuses to wait for the kick.
    KickUnheard,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Size(num) => write!(f, "ring of {num} descriptors"),
            Fault::Unmapped(part) => write!(f, "{part} is outside guest memory"),
            Fault::Misaligned(part) => write!(f, "{part} is not aligned"),
            Fault::Base(base) => write!(f, "start index {base:#x} is outside the ring"),
            Fault::Inflight(what) => write!(f, "in-flight region: {what}"),
            Fault::AvailableJump { next, available } => {
                write!(f, "available index jumps from {next} to {available}")
            }
            Fault::HeadRange(head) => write!(f, "head {head} is outside the ring"),
            Fault::HeadBusy(head) => write!(f, "head {head} is in flight already"),
            Fault::NextRange(next) => write!(f, "descriptor {next} is outside its table"),
            Fault::ChainTooLong => write!(f, "descriptor chain loops or is too long"),
            Fault::ChainTooLarge => write!(f, "descriptor chain has more than 4 GiB"),
            Fault::ReadableAfterWritable => write!(f, "readable descriptor after a writable one"),
            Fault::IndirectUnexpected => {
                write!(f, "indirect table in a place where it is not allowed")
            }
            Fault::IndirectLength(len) => write!(f, "indirect table of {len} bytes"),
            Fault::IndirectUnmapped(addr) => {
                write!(f, "indirect table at {addr:#x} is outside guest memory")
            }
            Fault::KickStorm => write!(f, "kicked all the time without requests"),
            Fault::KickUnheard => write!(f, "cannot wait for its kick"),
            Fault::MemoryLost => {
                write!(
                    f,
                    "guest memory is lost: its file was truncated, or the host is out of pages"
                )
            }
        }
    }
}

impl std::error::Error for Fault {}

/// What a ring is started with.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Number of descriptors.
    pub num: u16,
    /// Front end's address of the descriptors.
    pub desc: u64,
    /// Front end's address of the available ring, or of a packed ring's driver event area.
    pub avail: u64,
    /// Front end's address of the used ring, or of a packed ring's device event area.
    pub used: u64,
    /// Guest-physical address under which writes to the used ring are marked in the dirty log, if
    /// they are logged.
    pub log: Option<u64>,
    /// The front end's start position: the available index; of a packed ring also the used index
    /// in the upper half, each with its wrap counter in bit 15.
    pub base: u32,
    /// Negotiated virtio features.
    pub features: u64,
}

impl Setup {
    pub(crate) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// The checked number of descriptors.
    pub(crate) fn size(&self) -> Result<usize, Fault> {
        match self.num {
            num @ 1..=NUM_MAX => Ok(usize::from(num)),
            num => Err(Fault::Size(num)),
        }
    }

    /// Maps and checks a part of the ring.
    pub(crate) fn area(
        memory: &GuestMemory,
        addr: u64,
        len: usize,
        align: usize,
        name: &'static str,
    ) -> Result<Area, Fault> {
        let area = memory.user_area(addr, len).ok_or(Fault::Unmapped(name))?;
        if !area.is_aligned(align) {
            return Err(Fault::Misaligned(name));
        }
        Ok(area)
    }
}

/// What recovery found when a ring was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Unfinished requests of an earlier process. The first pops return them again, in their
    /// order.
    pub resubmits: usize,
    /// Whether the front end's start index is neither the expected one nor the used index, to
    /// which a front end falls back.
    pub base_differs: bool,
}
