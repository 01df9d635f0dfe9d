//! One physical record of a log.
//!
//! ```text
//! legacy header      fixed32 masked crc | fixed16 length | u8 type                        7 bytes
//! recyclable header  fixed32 masked crc | fixed16 length | u8 type | fixed32 log number   11 bytes
//! ```
//!
//! The log number is the low half. The checksum covers everything from the type on, but not the
//! length: after a record that fails it, nothing in the block can be trusted.

use crate::crc::{crc32c, mask_crc};

/// The size of a log block.
pub const LOG_BLOCK_BYTES: usize = 32 * 1024;

pub(crate) const HEADER_BYTES: usize = 7;
pub(crate) const RECYCLABLE_HEADER_BYTES: usize = 11;

/// Physical record types; the recyclable forms of 1 to 4 are 5 to 8.
pub(crate) mod kind {
    pub const ZERO: u8 = 0;
    pub const FULL: u8 = 1;
    pub const FIRST: u8 = 2;
    pub const MIDDLE: u8 = 3;
    pub const LAST: u8 = 4;
    pub const RECYCLABLE_FULL: u8 = 5;
    pub const RECYCLABLE_FIRST: u8 = 6;
    pub const RECYCLABLE_LAST: u8 = 8;
    pub const SET_COMPRESSION: u8 = 9;
    pub const TIMESTAMP_SIZE: u8 = 10;
    pub const RECYCLABLE_TIMESTAMP_SIZE: u8 = 11;
    pub const PREDECESSOR: u8 = 130;
    pub const RECYCLABLE_PREDECESSOR: u8 = 131;
    /// A reader may ignore unknown types from here on.
    pub const IGNORABLE: u8 = 128;
}

/// The physical record at an offset of a block.
pub(crate) enum Physical<'a> {
    /// Too few bytes for any header.
    Trailer,
    /// A header of type 0 and length 0.
    Zeros,
    /// A whole record whose checksum holds; `bytes` includes its header.
    Record { kind: u8, payload: &'a [u8], bytes: usize },
    /// A recyclable header with another file's number.
    Stale { kind: u8 },
    /// The header, or the payload it announces, extends beyond the given bytes.
    Short { length: usize },
    /// The stored checksum does not match the bytes.
    Checksum { expected: u32, found: u32, recyclable: bool },
}

pub(crate) fn has_recyclable_header(kind: u8) -> bool {
    matches!(
        kind,
        kind::RECYCLABLE_FULL
            ..=kind::RECYCLABLE_LAST
                | kind::RECYCLABLE_TIMESTAMP_SIZE
                | kind::RECYCLABLE_PREDECESSOR
    )
}

/// Reads the physical record at the start of `rest`, the remainder of its block. The log number is
/// compared before the checksum, because stale records are the normal end of a recycled file.
pub(crate) fn physical(rest: &[u8], log_number_low: Option<u32>) -> Physical<'_> {
    let Some(header) = rest.first_chunk::<HEADER_BYTES>() else {
        return Physical::Trailer;
    };
    let stored = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    let length = usize::from(u16::from_le_bytes([header[4], header[5]]));
    let kind = header[6];
    if kind == kind::ZERO && length == 0 {
        return Physical::Zeros;
    }
    let recyclable = has_recyclable_header(kind);
    let mut header_bytes = HEADER_BYTES;
    if recyclable {
        header_bytes = RECYCLABLE_HEADER_BYTES;
        let Some(number) = rest[HEADER_BYTES..].first_chunk::<4>() else {
            return Physical::Short { length };
        };
        if log_number_low.is_some_and(|low| low != u32::from_le_bytes(*number)) {
            return Physical::Stale { kind };
        }
    }
    let Some(covered) = rest.get(HEADER_BYTES - 1..header_bytes + length) else {
        return Physical::Short { length };
    };
    let expected = mask_crc(crc32c(covered));
    if expected != stored {
        return Physical::Checksum { expected, found: stored, recyclable };
    }
    Physical::Record {
        kind,
        payload: &rest[header_bytes..header_bytes + length],
        bytes: header_bytes + length,
    }
}
