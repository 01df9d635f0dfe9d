//! The integers and strings of all RocksDB formats.
//!
//! Fixed-width integers are little-endian; varints are unsigned LEB128 (at most 5 bytes for 32
//! bits, 10 for 64); svarints are zig-zag varints; an `lps` is a varint32 length followed by that
//! many bytes.
//!
//! There are two interfaces. [`Decoder`] walks a slice and names the field in its errors; it is for
//! data that is read once per file. [`varint32_at`] and [`varint64_at`] work on offsets and return
//! `None`; they are for the loops over block entries. A varint whose value does not fit its width
//! is refused, not truncated.

use crate::error::{Error, Result};

/// Largest encoding of a varint32.
pub const VARINT32_BYTES_MAX: usize = 5;
/// Largest encoding of a varint64.
pub const VARINT64_BYTES_MAX: usize = 10;

/// Reads a varint32 at `at`; returns the value and the offset after it.
#[inline(always)]
pub fn varint32_at(data: &[u8], at: usize) -> Option<(u32, usize)> {
    let first = *data.get(at)?;
    if first < 0x80 {
        return Some((u32::from(first), at + 1));
    }
    varint32_long(data, at)
}

#[inline]
fn varint32_long(data: &[u8], at: usize) -> Option<(u32, usize)> {
    let (value, next) = varint64_long(data, at, VARINT32_BYTES_MAX)?;
    Some((u32::try_from(value).ok()?, next))
}

/// Reads a varint64 at `at`; returns the value and the offset after it.
#[inline(always)]
pub fn varint64_at(data: &[u8], at: usize) -> Option<(u64, usize)> {
    let first = *data.get(at)?;
    if first < 0x80 {
        return Some((u64::from(first), at + 1));
    }
    varint64_long(data, at, VARINT64_BYTES_MAX)
}

#[inline]
fn varint64_long(data: &[u8], at: usize, bytes_max: usize) -> Option<(u64, usize)> {
    let mut value = 0u64;
    for (i, &byte) in data.get(at..)?.iter().take(bytes_max).enumerate() {
        let bits = u64::from(byte & 0x7f);
        if i == 9 && bits > 1 {
            return None;
        }
        value |= bits << (7 * i);
        if byte < 0x80 {
            return Some((value, at + i + 1));
        }
    }
    None
}

/// Undoes the zig-zag mapping of an svarint64.
#[inline]
pub fn unzigzag(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}

/// Reads a fixed32 at `at`.
#[inline(always)]
pub fn fixed32_at(data: &[u8], at: usize) -> Option<u32> {
    let bytes = data.get(at..)?.first_chunk::<4>()?;
    Some(u32::from_le_bytes(*bytes))
}

/// Reads a fixed64 at `at`.
#[inline(always)]
pub fn fixed64_at(data: &[u8], at: usize) -> Option<u64> {
    let bytes = data.get(at..)?.first_chunk::<8>()?;
    Some(u64::from_le_bytes(*bytes))
}

/// Appends a varint (32 or 64 bits: the encoding is the same).
pub fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends a zig-zag varint.
pub fn put_svarint(out: &mut Vec<u8>, value: i64) {
    put_varint(out, ((value << 1) ^ (value >> 63)) as u64);
}

/// Appends a length-prefixed string.
pub fn put_lps(out: &mut Vec<u8>, bytes: &[u8]) {
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Walks a slice from front to back. Every method takes the name of its field for the error.
#[derive(Clone, Copy, Debug)]
pub struct Decoder<'a> {
    rest: &'a [u8],
}

impl<'a> Decoder<'a> {
    /// Starts at the first byte of `data`.
    pub fn new(data: &'a [u8]) -> Decoder<'a> {
        Decoder { rest: data }
    }

    /// The bytes that are not read yet.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// The number of bytes that are not read yet.
    pub fn len(&self) -> usize {
        self.rest.len()
    }

    /// Whether everything has been read.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next `len` bytes.
    pub fn bytes(&mut self, len: usize, field: &'static str) -> Result<&'a [u8]> {
        match self.rest.split_at_checked(len) {
            Some((head, tail)) => {
                self.rest = tail;
                Ok(head)
            }
            None => Err(short(field, len as u64, self.rest.len())),
        }
    }

    /// One byte.
    pub fn u8(&mut self, field: &'static str) -> Result<u8> {
        Ok(self.bytes(1, field)?[0])
    }

    /// A little-endian 16-bit integer.
    pub fn fixed16(&mut self, field: &'static str) -> Result<u16> {
        let b = self.bytes(2, field)?;
        Ok(u16::from_le_bytes([b[0], b[1]]))
    }

    /// A little-endian 32-bit integer.
    pub fn fixed32(&mut self, field: &'static str) -> Result<u32> {
        match fixed32_at(self.rest, 0) {
            Some(value) => {
                self.rest = &self.rest[4..];
                Ok(value)
            }
            None => Err(short(field, 4, self.rest.len())),
        }
    }

    /// A little-endian 64-bit integer.
    pub fn fixed64(&mut self, field: &'static str) -> Result<u64> {
        match fixed64_at(self.rest, 0) {
            Some(value) => {
                self.rest = &self.rest[8..];
                Ok(value)
            }
            None => Err(short(field, 8, self.rest.len())),
        }
    }

    /// A varint of at most 32 bits.
    pub fn varint32(&mut self, field: &'static str) -> Result<u32> {
        match varint32_at(self.rest, 0) {
            Some((value, next)) => {
                self.rest = &self.rest[next..];
                Ok(value)
            }
            None => Err(bad_varint(field, 32)),
        }
    }

    /// A varint of at most 64 bits.
    pub fn varint64(&mut self, field: &'static str) -> Result<u64> {
        match varint64_at(self.rest, 0) {
            Some((value, next)) => {
                self.rest = &self.rest[next..];
                Ok(value)
            }
            None => Err(bad_varint(field, 64)),
        }
    }

    /// A zig-zag varint.
    pub fn svarint64(&mut self, field: &'static str) -> Result<i64> {
        self.varint64(field).map(unzigzag)
    }

    /// A length-prefixed string.
    pub fn lps(&mut self, field: &'static str) -> Result<&'a [u8]> {
        let len = self.varint32(field)?;
        self.bytes(len as usize, field)
    }
}

#[cold]
fn short(field: &'static str, needed: u64, left: usize) -> Error {
    Error::corruption(format!("{field} needs {needed} bytes, {left} left"))
}

#[cold]
fn bad_varint(field: &'static str, bits: u32) -> Error {
    Error::corruption(format!("{field} is not a varint of {bits} bits"))
}

/// The format's 32-bit hash (a Murmur variant), used by the data-block hash index and by the legacy
/// Bloom filter. The one to three tail bytes are *sign-extended*; this accident is part of the
/// format.
pub fn hash32(data: &[u8], seed: u32) -> u32 {
    const M: u32 = 0xC6A4_A793;
    let mut h = seed ^ (data.len() as u32).wrapping_mul(M);
    let (words, tail) = data.as_chunks::<4>();
    for word in words {
        h = h.wrapping_add(u32::from_le_bytes(*word)).wrapping_mul(M);
        h ^= h >> 16;
    }
    if !tail.is_empty() {
        for (i, &byte) in tail.iter().enumerate() {
            h = h.wrapping_add((i32::from(byte as i8) as u32) << (8 * i));
        }
        h = h.wrapping_mul(M);
        h ^= h >> 24;
    }
    h
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varints_survive_a_round_trip_at_every_width() {
        for shift in 0..64 {
            for value in [1u64 << shift, (1u64 << shift) - 1, u64::MAX >> shift] {
                let mut out = vec![0xEE];
                put_varint(&mut out, value);
                assert_eq!(varint64_at(&out, 1), Some((value, out.len())));
                let narrow = u32::try_from(value).ok().map(|v| (v, out.len()));
                assert_eq!(varint32_at(&out, 1), narrow, "{value:x}");
                let mut d = Decoder::new(&out[1..]);
                assert_eq!(d.varint64("v").unwrap(), value);
                assert!(d.is_empty());
            }
        }
        for value in [0, 1, -1, i64::MAX, i64::MIN, -123_456] {
            let mut out = Vec::new();
            put_svarint(&mut out, value);
            assert_eq!(Decoder::new(&out).svarint64("v").unwrap(), value);
        }
    }

    #[test]
    fn a_varint_that_does_not_fit_or_has_no_end_is_refused() {
        assert_eq!(varint32_at(&[0xff, 0xff, 0xff, 0xff, 0x1f], 0), None);
        assert_eq!(varint32_at(&[0xff, 0xff, 0xff, 0xff, 0x0f], 0), Some((u32::MAX, 5)));
        assert_eq!(varint32_at(&[0x80; 9], 0), None);
        assert_eq!(varint64_at(&[0xff; 20], 0), None);
        assert_eq!(varint64_at(&[0x80], 0), None);
        assert_eq!(varint64_at(&[], 0), None);
        assert_eq!(varint64_at(&[1], 7), None);
        let mut ten = [0xff; 10];
        ten[9] = 2;
        assert_eq!(varint64_at(&ten, 0), None);
    }

    #[test]
    fn a_string_longer_than_the_input_names_its_field() {
        let e = Decoder::new(&[5, b'a']).lps("column family name").unwrap_err();
        assert_eq!(e.to_string(), "corruption: column family name needs 5 bytes, 1 left");
    }

    #[test]
    fn hash32_matches_rocksdb() {
        const SEED: u32 = 0xBC9F_1D34;
        let bytes: Vec<u8> = (0..200).collect();
        for (data, want) in [
            (&b""[..], 0xBC9F_1D34u32),
            (b"a", 0x286E_9DB0),
            (b"abc", 0x855D_012F),
            (b"abcd", 0xB9C8_3353),
            (b"hello world", 0x008D_FDDB),
            (&bytes, 0xE08E_60DA),
        ] {
            assert_eq!(hash32(data, SEED), want, "{data:?}");
        }
    }
}
