//! A device as the guest sees it.

use bdev::Geometry;

use crate::protocol::config::{Config, RangeLimits, SECTOR_BYTES, feature};
use crate::ring::request::{DATA_MAX, Disk, SERIAL_LEN};

/// Longest segment of a request in bytes. The maximum number of segments stays within [`DATA_MAX`].
const SEGMENT_BYTES_MAX: u32 = 4 << 20;
/// Most ranges in one discard or write-zeroes request.
const RANGES_MAX: u32 = 1;

/// The disk's properties as the guest sees them.
pub(super) fn config(geometry: &Geometry, queues: u16) -> Config {
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX);
    let limits = |bytes: u64| RangeLimits { sectors_max: sectors(bytes), segments_max: RANGES_MAX };
    Config {
        capacity_sectors: geometry.size_bytes / SECTOR_BYTES,
        segments_max: geometry.max_segments.min((DATA_MAX / u64::from(SEGMENT_BYTES_MAX)) as u32),
        segment_bytes_max: SEGMENT_BYTES_MAX,
        block_size: geometry.block_size,
        physical_block_size: geometry.physical_block_size,
        min_io_bytes: geometry.min_io,
        opt_io_bytes: geometry.opt_io,
        write_cache: geometry.volatile_cache,
        read_only: geometry.read_only,
        queues,
        discard: geometry.discard.then(|| limits(geometry.discard_max)),
        discard_alignment_sectors: sectors(geometry.discard_alignment.into()),
        write_zeroes: geometry.write_zeroes.then(|| limits(geometry.write_zeroes_max)),
        write_zeroes_may_unmap: geometry.zeroes_after_discard,
    }
}

/// The disk for checking requests. `features` are those that the guest has accepted.
pub(super) fn disk(config: &Config, features: u64, serial: &str) -> Disk {
    let has = |bit| features & bit != 0;
    // A driver that did not accept a limit does not know it.
    let bound = |bit, most| if has(bit) { most } else { u32::MAX };
    let mut padded = [0; SERIAL_LEN];
    for (to, from) in padded.iter_mut().zip(serial.bytes()) {
        *to = from;
    }
    let most = |limits: Option<RangeLimits>| limits.map_or(0, |limits| limits.sectors_max);
    Disk {
        capacity_sectors: config.capacity_sectors,
        block_size: config.block_size,
        read_only: config.read_only,
        discard: has(feature::DISCARD),
        write_zeroes: has(feature::WRITE_ZEROES),
        write_zeroes_may_unmap: config.write_zeroes_may_unmap,
        max_discard_sectors: most(config.discard),
        max_write_zeroes_sectors: most(config.write_zeroes),
        segments_max: bound(feature::SEG_MAX, config.segments_max),
        segment_bytes_max: bound(feature::SIZE_MAX, config.segment_bytes_max),
        serial: padded,
    }
}
