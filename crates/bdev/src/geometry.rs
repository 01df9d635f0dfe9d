//! Properties of a device.

/// Properties of a device. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the device, a multiple of the block.
    pub size_bytes: u64,
    /// The logical block; offsets and lengths are multiples of it. A power of two, at least 512.
    pub block_size: u32,
    /// The unit that the device writes without reading first.
    pub physical_block_size: u32,
    /// Reads and writes should be multiples of this.
    pub min_io: u32,
    /// The best multiple for reads and writes; 0 if it makes no difference.
    pub opt_io: u32,
    /// The device takes no writes.
    pub read_only: bool,
    /// A completed write is durable only after a flush. If this is false, every completed write is
    /// durable.
    pub volatile_cache: bool,
    /// The device takes discards.
    pub discard: bool,
    /// The device takes requests to write zeroes.
    pub write_zeroes: bool,
    /// Discarded ranges read as zeroes.
    pub zeroes_after_discard: bool,
    /// Maximum number of segments of a request.
    pub max_segments: u32,
    /// Offsets and lengths of discards should be multiples of this.
    pub discard_alignment: u32,
    /// The longest useful discard.
    pub discard_max: u64,
    /// The longest useful range of zeroes.
    pub write_zeroes_max: u64,
}

/// Maximum number of segments of a request: a guest's ring of 256 less header and status.
pub(crate) const SEGMENTS: u32 = 254;
/// The longest discard and the longest range of zeroes of a device that keeps data elsewhere. They
/// are the same for all of these, so that a disk can move from each to each.
pub(crate) const DISCARD_MAX: u64 = 256 << 20;
pub(crate) const ZEROES_MAX: u64 = 64 << 20;
