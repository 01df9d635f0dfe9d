//! The properties of a disk that the guest sees: the feature bits and the configuration space of
//! virtio-blk.
//!
//! The configuration space is 60 bytes, little-endian (virtio 1.2, section 5.2.4). A front end may
//! read any part of it, also beyond its end, and gets exactly as many bytes as it requested: zeroes
//! beyond the end.

use crate::protocol::message::CONFIG_BYTES_MAX;

/// Feature bits of virtio and vhost-user.
#[expect(missing_docs, reason = "the names are the specification's")]
pub mod feature {
    pub const SIZE_MAX: u64 = 1 << 1;
    pub const SEG_MAX: u64 = 1 << 2;
    pub const READ_ONLY: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Bytes in a sector: the unit of the configuration space and of requests, whatever the disk's
/// block size.
pub const SECTOR_BYTES: u64 = 512;
/// Length of the configuration space.
pub const CONFIG_SPACE_BYTES: usize = 60;
/// Offset of the write cache byte, the only one that a guest may change.
pub const WRITE_CACHE_OFFSET: u32 = 32;

/// Limits of discard or write-zeroes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeLimits {
    /// Longest range, sectors.
    pub sectors_max: u32,
    /// Most ranges in one request.
    pub segments_max: u32,
}

/// A disk as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// Most data segments in a request. A ring of `n` descriptors has room for `n - 2`.
    pub segments_max: u32,
    /// Longest data segment, bytes.
    pub segment_bytes_max: u32,
    /// Logical block size, bytes: the alignment of every request.
    pub block_size: u32,
    /// Physical block size, bytes: the best alignment.
    pub physical_block_size: u32,
    /// Smallest I/O without a penalty, bytes; 0 if unknown.
    pub min_io_bytes: u32,
    /// Best I/O size, bytes; 0 if unknown.
    pub opt_io_bytes: u32,
    /// Whether the write cache is on until the guest changes it.
    pub write_cache: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Number of rings.
    pub queues: u16,
    /// Limits of discards, if the disk supports them.
    pub discard: Option<RangeLimits>,
    /// Best alignment of a discard, sectors.
    pub discard_alignment_sectors: u32,
    /// Limits of write-zeroes requests, if the disk supports them.
    pub write_zeroes: Option<RangeLimits>,
    /// Whether write-zeroes may free the space.
    pub write_zeroes_may_unmap: bool,
}

impl Config {
    /// The feature bits of this disk, including those of the transport.
    ///
    /// FLUSH and CONFIG_WCE are offered for every writable disk, also if its writes are durable
    /// when they complete: such a disk has its write cache off. So a guest sees the same bits after
    /// the disk's policy has changed between two starts of this process, and its session continues.
    pub fn features(&self) -> u64 {
        use feature::*;
        let mut features = SIZE_MAX
            | SEG_MAX
            | BLK_SIZE
            | TOPOLOGY
            | FLUSH
            | MQ
            | INDIRECT_DESC
            | EVENT_IDX
            | VERSION_1
            | RING_PACKED
            | LOG_ALL
            | PROTOCOL_FEATURES;
        if self.read_only {
            return features | READ_ONLY;
        }
        features |= CONFIG_WCE;
        if self.discard.is_some() {
            features |= DISCARD;
        }
        if self.write_zeroes.is_some() {
            features |= WRITE_ZEROES;
        }
        features
    }

    /// The whole configuration space. `write_cache` is the cache's current state.
    pub fn space(&self, write_cache: bool) -> [u8; CONFIG_SPACE_BYTES] {
        let block = self.block_size.max(1);
        let physical_exponent = (self.physical_block_size.max(block) / block).ilog2() as u8;
        let min_io_blocks = u16::try_from(self.min_io_bytes / block).unwrap_or(u16::MAX);
        let discard = self.discard.unwrap_or(RangeLimits { sectors_max: 0, segments_max: 0 });
        let zeroes = self.write_zeroes.unwrap_or(RangeLimits { sectors_max: 0, segments_max: 0 });

        let mut space = [0; CONFIG_SPACE_BYTES];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.capacity_sectors.to_le_bytes());
        put(8, &self.segment_bytes_max.to_le_bytes());
        // 16: geometry (cylinders, heads, sectors); its feature is not offered.
        put(12, &self.segments_max.to_le_bytes());
        put(20, &self.block_size.to_le_bytes());
        put(24, &[physical_exponent]);
        // 25: the first aligned block is block 0.
        put(26, &min_io_blocks.to_le_bytes());
        put(28, &(self.opt_io_bytes / block).to_le_bytes());
        put(32, &[u8::from(write_cache)]);
        put(34, &self.queues.to_le_bytes());
        put(36, &discard.sectors_max.to_le_bytes());
        put(40, &discard.segments_max.to_le_bytes());
        put(44, &self.discard_alignment_sectors.to_le_bytes());
        put(48, &zeroes.sectors_max.to_le_bytes());
        put(52, &zeroes.segments_max.to_le_bytes());
        put(56, &[u8::from(self.write_zeroes_may_unmap)]);
        space
    }

    /// Returns `size` bytes of the configuration space from `offset`, with zeroes beyond its end,
    /// or `None` if the range is beyond the longest possible configuration space.
    pub fn read(&self, write_cache: bool, offset: u32, size: u32) -> Option<Vec<u8>> {
        let end = offset.checked_add(size)? as usize;
        if end > CONFIG_BYTES_MAX {
            return None;
        }
        let mut bytes = self.space(write_cache).to_vec();
        bytes.resize(CONFIG_BYTES_MAX, 0);
        Some(bytes[offset as usize..end].to_vec())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn config() -> Config {
        Config {
            capacity_sectors: 0x0001_0203_0405_0607,
            segments_max: 126,
            segment_bytes_max: 0x40_0000,
            block_size: 512,
            physical_block_size: 4096,
            min_io_bytes: 4096,
            opt_io_bytes: 65536,
            write_cache: true,
            read_only: false,
            queues: 2,
            discard: Some(RangeLimits { sectors_max: 0x1_0000, segments_max: 1 }),
            discard_alignment_sectors: 8,
            write_zeroes: Some(RangeLimits { sectors_max: 0x2_0000, segments_max: 2 }),
            write_zeroes_may_unmap: true,
        }
    }

    #[test]
    fn the_space_has_every_field_where_virtio_has_it() {
        #[rustfmt::skip]
        let expected: [u8; 60] = [
            7, 6, 5, 4, 3, 2, 1, 0,                 // capacity
            0, 0, 0x40, 0,  126, 0, 0, 0,           // size_max, seg_max
            0, 0, 0, 0,  0, 2, 0, 0,                // geometry, blk_size
            3, 0, 8, 0,  128, 0, 0, 0,              // topology
            1, 0, 2, 0,                             // wce, unused, num_queues
            0, 0, 1, 0,  1, 0, 0, 0,  8, 0, 0, 0,   // discard
            0, 0, 2, 0,  2, 0, 0, 0,  1, 0, 0, 0,   // write zeroes
        ];
        assert_eq!(config().space(true), expected);
        assert_eq!(config().space(false)[32], 0);
    }

    #[test]
    fn a_read_has_exactly_the_size_asked_for() {
        let config = config();
        let space = config.space(true);
        assert_eq!(config.read(true, 0, 57).unwrap(), space[..57]);
        assert_eq!(config.read(true, 20, 4).unwrap(), space[20..24]);
        let long = config.read(true, 0, 256).unwrap();
        assert_eq!((&long[..60], &long[60..]), (&space[..], &[0; 196][..]));
        assert_eq!(config.read(true, 200, 56).unwrap(), [0; 56]);
        assert_eq!(config.read(true, 0, 257), None);
        assert_eq!(config.read(true, u32::MAX, 2), None);
    }

    #[test]
    fn features_follow_the_disk() {
        use feature::*;
        let all = config();
        assert_eq!(all.features(), 0x5_7400_7e46);
        let bare = Config { discard: None, write_zeroes: None, ..all };
        assert_eq!(all.features() & !bare.features(), DISCARD | WRITE_ZEROES);
        let read_only = Config { read_only: true, ..all };
        assert_eq!(
            read_only.features() & (READ_ONLY | CONFIG_WCE | DISCARD | WRITE_ZEROES),
            READ_ONLY
        );
    }

    #[test]
    fn blocks_of_4096_count_the_topology_in_blocks() {
        let config = Config { block_size: 4096, ..config() };
        assert_eq!(config.space(true)[24..32], [0, 0, 1, 0, 16, 0, 0, 0]);
    }
}
