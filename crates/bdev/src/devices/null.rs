//! A device that does nothing: a read leaves the memory as it is.

use crate::geometry::{Geometry, SEGMENTS};

/// A device that does nothing.
pub(crate) struct NullDevice;

impl NullDevice {
    pub fn geometry(size_bytes: u64, block_size: u32) -> Geometry {
        Geometry {
            size_bytes,
            block_size,
            physical_block_size: block_size,
            min_io: block_size,
            opt_io: 0,
            read_only: false,
            volatile_cache: false,
            discard: true,
            write_zeroes: true,
            zeroes_after_discard: false,
            max_segments: SEGMENTS,
            discard_alignment: block_size,
            discard_max: 1 << 30,
            write_zeroes_max: 1 << 30,
        }
    }
}
