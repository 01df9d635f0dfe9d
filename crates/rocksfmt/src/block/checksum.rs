//! Block checksums of SST files: five functions, one trailer.
//!
//! Every block is followed by five bytes, `compression type, fixed32 checksum`. The checksum covers
//! the stored (possibly compressed) bytes and the type byte. From format version 6 on, a modifier
//! is added that is made of a per-file random number and the block's file offset, so that a block
//! read from the wrong place fails.
//!
//! Hot: [`BlockCheck::verify`] runs once per block read; 4 KiB take about 0.13 us with XXH3 and 0.3
//! us with crc32c. Nothing here may allocate except to build an error.

use std::hash::Hasher;

use crate::crc::{crc32c, crc32c_append, mask_crc};
use crate::error::{Error, Result};

/// Bytes after every block: compression type and checksum.
pub const BLOCK_TRAILER_BYTES: usize = 5;

/// The checksum function of a file's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChecksumType {
    /// No checksum (the context modifier of format version 6 still applies).
    None,
    /// Masked CRC-32C.
    Crc32c,
    /// XXH32.
    XxHash,
    /// The low half of XXH64.
    XxHash64,
    /// The low half of XXH3 (64 bits), the default since 7.0.
    Xxh3,
}

impl ChecksumType {
    /// Decodes the first byte of the footer.
    pub fn from_byte(byte: u8) -> Result<ChecksumType> {
        Ok(match byte {
            0 => ChecksumType::None,
            1 => ChecksumType::Crc32c,
            2 => ChecksumType::XxHash,
            3 => ChecksumType::XxHash64,
            4 => ChecksumType::Xxh3,
            other => return Err(Error::unsupported(format!("checksum type {other}"))),
        })
    }

    /// The byte stored in the footer.
    pub fn to_byte(self) -> u8 {
        match self {
            ChecksumType::None => 0,
            ChecksumType::Crc32c => 1,
            ChecksumType::XxHash => 2,
            ChecksumType::XxHash64 => 3,
            ChecksumType::Xxh3 => 4,
        }
    }

    /// The checksum of a block's bytes *including* its compression type byte at the end (also used
    /// for whole buffers, whose last byte then takes that role). An empty buffer gives 0.
    #[inline]
    pub fn compute(self, data: &[u8]) -> u32 {
        let Some((&last, body)) = data.split_last() else { return 0 };
        match self {
            ChecksumType::None => 0,
            ChecksumType::Crc32c => mask_crc(crc32c(data)),
            ChecksumType::XxHash => twox_hash::XxHash32::oneshot(0, data),
            ChecksumType::XxHash64 => twox_hash::XxHash64::oneshot(0, data) as u32,
            ChecksumType::Xxh3 => with_last_byte(twox_hash::XxHash3_64::oneshot(body), last),
        }
    }
}

/// The amount added to a checksum at `offset` of a file with base context checksum `base`.
#[inline]
pub(crate) fn context_modifier(base: u32, offset: u64) -> u32 {
    if base == 0 { 0 } else { base ^ (offset as u32).wrapping_add((offset >> 32) as u32) }
}

/// How to check the blocks of one file, from its footer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCheck {
    /// The function.
    pub kind: ChecksumType,
    /// The base context checksum; 0 below format version 6.
    pub base_context: u32,
}

impl BlockCheck {
    /// The checksum that the trailer of a block at file offset `offset` must hold; `stored` ends in
    /// the type byte.
    #[inline]
    pub fn compute(&self, stored: &[u8], offset: u64) -> u32 {
        self.kind.compute(stored).wrapping_add(context_modifier(self.base_context, offset))
    }

    /// Checks a block read from file offset `offset`: its stored bytes and the trailer of five
    /// bytes. Returns the compression type byte; the payload is `block[..block.len() - 5]`.
    #[inline]
    pub fn verify(&self, block: &[u8], offset: u64) -> Result<u8> {
        let Some((stored, sum)) = block.split_last_chunk::<4>() else {
            return Err(no_trailer(block.len()));
        };
        let Some(&compression) = stored.last() else { return Err(no_trailer(block.len())) };
        let (found, expected) = (u32::from_le_bytes(*sum), self.compute(stored, offset));
        if found != expected {
            return Err(self.mismatch(found, expected, offset));
        }
        Ok(compression)
    }

    #[cold]
    fn mismatch(&self, found: u32, expected: u32, offset: u64) -> Error {
        Error::corruption(format!(
            "block at {offset}: {:?} checksum computed {expected:08x}, stored {found:08x}",
            self.kind
        ))
    }
}

/// The checksum of a block that arrives in pieces.
pub struct BlockSum {
    check: BlockCheck,
    state: SumState,
}

enum SumState {
    None,
    Crc32c(u32),
    XxHash(twox_hash::XxHash32),
    XxHash64(twox_hash::XxHash64),
    Xxh3(Box<twox_hash::XxHash3_64>),
}

impl BlockSum {
    /// Starts with no bytes.
    pub fn new(check: BlockCheck) -> BlockSum {
        let state = match check.kind {
            ChecksumType::None => SumState::None,
            ChecksumType::Crc32c => SumState::Crc32c(0),
            ChecksumType::XxHash => SumState::XxHash(twox_hash::XxHash32::with_seed(0)),
            ChecksumType::XxHash64 => SumState::XxHash64(twox_hash::XxHash64::with_seed(0)),
            ChecksumType::Xxh3 => SumState::Xxh3(Box::default()),
        };
        BlockSum { check, state }
    }

    /// Adds the next bytes of the payload.
    pub fn add(&mut self, piece: &[u8]) {
        match &mut self.state {
            SumState::None => {}
            SumState::Crc32c(sum) => *sum = crc32c_append(*sum, piece),
            SumState::XxHash(hash) => hash.write(piece),
            SumState::XxHash64(hash) => hash.write(piece),
            SumState::Xxh3(hash) => hash.write(piece),
        }
    }

    /// Checks the whole block at file offset `offset` against its trailer.
    pub fn verify(mut self, trailer: [u8; BLOCK_TRAILER_BYTES], offset: u64) -> Result<()> {
        let [last, sum @ ..] = trailer;
        if !matches!(self.state, SumState::Xxh3(_)) {
            self.add(&[last]);
        }
        let sum_of_bytes = match &self.state {
            SumState::None => 0,
            SumState::Crc32c(sum) => mask_crc(*sum),
            SumState::XxHash(hash) => hash.finish_32(),
            SumState::XxHash64(hash) => hash.finish() as u32,
            SumState::Xxh3(hash) => with_last_byte(hash.finish(), last),
        };
        let modifier = context_modifier(self.check.base_context, offset);
        let (found, expected) = (u32::from_le_bytes(sum), sum_of_bytes.wrapping_add(modifier));
        if found != expected {
            return Err(self.check.mismatch(found, expected, offset));
        }
        Ok(())
    }
}

/// XXH3 takes the type byte separately.
#[inline]
fn with_last_byte(hash: u64, last: u8) -> u32 {
    hash as u32 ^ u32::from(last).wrapping_mul(0x6B90_83D9)
}

/// The compression type byte of a block with its trailer, without checking the checksum.
#[inline]
pub fn compression_byte(block: &[u8]) -> Result<u8> {
    match block.len().checked_sub(BLOCK_TRAILER_BYTES) {
        Some(at) => Ok(block[at]),
        None => Err(no_trailer(block.len())),
    }
}

#[cold]
fn no_trailer(len: usize) -> Error {
    Error::corruption(format!("block of {len} bytes has no room for its trailer"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_have_the_checksum_of_the_whole_block() {
        let data: Vec<u8> = (0..5000_u32).map(|n| ((n * n) >> 3) as u8).collect();
        for kind in (0..5).map(|byte| ChecksumType::from_byte(byte).unwrap()) {
            for (base_context, cut) in [(0, 0), (7, 1), (9, 300), (11, 4999), (13, 5000)] {
                let check = BlockCheck { kind, base_context };
                let stored = [&data[..], &[4]].concat();
                let verify = |sum: u32| {
                    let mut pieces = BlockSum::new(check);
                    pieces.add(&data[..cut]);
                    pieces.add(&data[cut..]);
                    let [a, b, c, d] = sum.to_le_bytes();
                    pieces.verify([4, a, b, c, d], 1 << 33)
                };
                let sum = check.compute(&stored, 1 << 33);
                verify(sum).unwrap();
                verify(sum ^ 256).unwrap_err();
            }
        }
    }

    #[test]
    fn every_type_matches_rocksdb() {
        let data = b"hello world\x01";
        for (kind, want) in [
            (ChecksumType::None, 0),
            (ChecksumType::Crc32c, 0x55D5_BDC5),
            (ChecksumType::XxHash, 0xDC8B_119E),
            (ChecksumType::XxHash64, 0x93E4_BF87),
            (ChecksumType::Xxh3, 0x2B76_1B52u32),
        ] {
            assert_eq!(kind.compute(data), want, "{kind:?}");
            assert_eq!(kind.compute(b""), 0);
            assert_eq!(ChecksumType::from_byte(kind.to_byte()).unwrap(), kind);
        }
        assert_eq!(ChecksumType::from_byte(5).unwrap_err().kind(), crate::Kind::Unsupported);
    }

    #[test]
    fn a_block_moved_within_its_file_fails_when_the_file_has_a_context() {
        let check = BlockCheck { kind: ChecksumType::Xxh3, base_context: 0x1234_5678 };
        let mut block = b"payload\0".to_vec();
        block.extend(check.compute(b"payload\0", 4096).to_le_bytes());
        assert_eq!(check.verify(&block, 4096).unwrap(), 0);
        assert!(check.verify(&block, 8192).is_err());
        for i in 0..block.len() {
            block[i] ^= 0x10;
            assert!(check.verify(&block, 4096).is_err(), "flip in byte {i}");
            block[i] ^= 0x10;
        }
        for len in 0..BLOCK_TRAILER_BYTES {
            assert!(check.verify(&block[..len], 0).is_err());
            assert!(compression_byte(&block[..len]).is_err());
        }
    }
}
