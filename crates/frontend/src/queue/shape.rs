//! The dimensions of a queue, and its place in guest memory.

use crate::{Desc, Error, Kind, PackedRing, Result, SplitRing};

/// Header and status share one cache line: both are accessed for each request.
pub(super) const LINE: u64 = 64;

/// The dimensions of a queue; see [`crate::DiskOptions`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub size: u16,
    pub depth: u16,
    pub packed: bool,
    pub indirect: bool,
    pub event_index: bool,
    /// Bytes of a slot's buffer.
    pub slot_bytes: u32,
    /// Descriptors that a full buffer is divided into.
    pub segments: u16,
}

impl Shape {
    /// Descriptors of the longest chain.
    pub(super) fn stride(&self) -> u16 {
        self.segments + 2
    }

    pub(super) fn segment_bytes(&self) -> u32 {
        self.slot_bytes / u32::from(self.segments)
    }

    pub fn ring_bytes(&self) -> u64 {
        if self.packed { PackedRing::bytes(self.size) } else { SplitRing::bytes(self.size) }
            .next_multiple_of(4096)
    }

    pub(super) fn table_bytes(&self) -> u64 {
        if !self.indirect {
            return 0;
        }
        (u64::from(self.stride()) * Desc::BYTES as u64).next_multiple_of(LINE)
    }

    /// Guest memory that a queue needs. The ring comes first.
    pub fn bytes(&self) -> u64 {
        let depth = u64::from(self.depth);
        self.data_offset() + depth * u64::from(self.slot_bytes)
    }

    pub(super) fn data_offset(&self) -> u64 {
        let depth = u64::from(self.depth);
        (self.ring_bytes() + depth * (LINE + self.table_bytes())).next_multiple_of(4096)
    }

    /// Checks the dimensions.
    pub fn check(&self) -> Result<()> {
        let complaint = if !self.size.is_power_of_two() || self.size > 1 << 14 {
            "the size of a queue must be a power of two, at most 16384"
        } else if self.depth == 0 || self.slot_bytes == 0 || self.segments == 0 {
            "depth, slot size and segments must not be 0"
        } else if !self.slot_bytes.is_multiple_of(512 * u32::from(self.segments)) {
            "a slot's segments must be multiples of 512 bytes"
        } else if self.segments > 1024 {
            "a slot must have at most 1024 segments"
        } else if u32::from(self.depth) * u32::from(self.per_request()) > u32::from(self.size) {
            "the queue has too few descriptors for its depth"
        } else {
            return Ok(());
        };
        Err(Error::new(Kind::System, complaint))
    }

    /// Descriptors in the ring for one request.
    pub(super) fn per_request(&self) -> u16 {
        if self.indirect { 1 } else { self.stride() }
    }
}
