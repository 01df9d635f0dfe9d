//! CRC-32C, and the mask under which RocksDB stores it.
//!
//! SST blocks with checksum type 1, log records and blob files store `mask(crc32c(bytes))`: an
//! unmasked CRC over bytes that contain CRCs is weak.

const MASK_DELTA: u32 = 0xA282_EAD8;

/// CRC-32C (Castagnoli) of `data`.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    crc32c::crc32c(data)
}

/// CRC-32C of some bytes followed by `data`; `crc` is that of the first bytes.
#[inline]
pub fn crc32c_append(crc: u32, data: &[u8]) -> u32 {
    crc32c::crc32c_append(crc, data)
}

/// The stored form of a CRC.
#[inline]
pub fn mask_crc(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(MASK_DELTA)
}

/// Undoes [`mask_crc`].
#[inline]
pub fn unmask_crc(masked: u32) -> u32 {
    masked.wrapping_sub(MASK_DELTA).rotate_left(15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc_and_mask_match_rocksdb() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(b"hello"), 0x9A71_BB4C);
        assert_eq!(mask_crc(0x9A71_BB4C), 0x191C_1FBB);
        assert_eq!(unmask_crc(0x191C_1FBB), 0x9A71_BB4C);
        assert_eq!(crc32c_append(crc32c(b"he"), b"llo"), 0x9A71_BB4C);
    }
}
