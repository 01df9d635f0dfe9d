//! Internal keys: a user key, then `fixed64 (sequence << 8 | type)`.
//!
//! Order: user keys ascend under the column family's [`Comparator`]; equal user keys are ordered by
//! the packed number *descending*, so the newest version comes first. To find the newest version
//! visible at sequence S, seek to `(user key, S, SEEK_TYPE)`: it sorts before every entry of that
//! user key with a sequence of at most S.
//!
//! Hot: the comparison functions run about ten times per index lookup. They compare eight bytes at
//! a time and do not call memcmp, whose call costs more than the work for keys of 10 to 40 bytes.

use std::cmp::Ordering;

use crate::coding::fixed64_at;
use crate::error::{Error, Result};

/// Bytes after the user key in an internal key.
pub const KEY_TRAILER_BYTES: usize = 8;
/// The largest sequence number.
pub const SEQUENCE_MAX: u64 = (1 << 56) - 1;
/// The type byte of seek keys. It is above every real type, so it sorts first among entries of one
/// sequence.
pub const SEEK_TYPE: u8 = 0x7F;
/// The trailer of the exclusive upper bound of a file that ends in a range tombstone.
pub const SENTINEL_PACKED: u64 = SEQUENCE_MAX << 8 | ValueType::RangeDeletion as u64;

/// The type of an SST entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum ValueType {
    /// A tombstone.
    Deletion = 0x00,
    /// A plain value.
    Value = 0x01,
    /// A merge operand.
    Merge = 0x02,
    /// A tombstone for exactly one older value; reads treat it like a deletion.
    SingleDeletion = 0x07,
    /// A range tombstone; occurs only in range-deletion blocks and file bounds.
    RangeDeletion = 0x0F,
    /// A reference into a blob file.
    BlobIndex = 0x11,
    /// A tombstone of a column family with user timestamps.
    DeletionWithTimestamp = 0x14,
    /// A set of named columns.
    WideColumnEntity = 0x16,
    /// A value followed by a preferred sequence ("TimedPut").
    ValuePreferredSeqno = 0x18,
}

impl ValueType {
    /// Decodes a type byte; `None` if no SST entry may have it.
    #[inline]
    pub fn from_byte(byte: u8) -> Option<ValueType> {
        Some(match byte {
            0x00 => ValueType::Deletion,
            0x01 => ValueType::Value,
            0x02 => ValueType::Merge,
            0x07 => ValueType::SingleDeletion,
            0x0F => ValueType::RangeDeletion,
            0x11 => ValueType::BlobIndex,
            0x14 => ValueType::DeletionWithTimestamp,
            0x16 => ValueType::WideColumnEntity,
            0x18 => ValueType::ValuePreferredSeqno,
            _ => return None,
        })
    }

    /// Whether a point read that finds this entry returns "not found".
    #[inline]
    pub fn is_tombstone(self) -> bool {
        matches!(
            self,
            ValueType::Deletion | ValueType::SingleDeletion | ValueType::DeletionWithTimestamp
        )
    }
}

/// Packs a sequence number and a type byte into a key trailer.
#[inline]
pub fn pack(sequence: u64, type_byte: u8) -> u64 {
    sequence << 8 | u64::from(type_byte)
}

/// Splits a key trailer into sequence number and type byte.
#[inline]
pub fn unpack(packed: u64) -> (u64, u8) {
    (packed >> 8, packed as u8)
}

/// Appends an internal key.
pub fn put_internal_key(out: &mut Vec<u8>, user_key: &[u8], packed: u64) {
    out.extend_from_slice(user_key);
    out.extend_from_slice(&packed.to_le_bytes());
}

/// Replaces `out` by the seek key for the newest version of `user_key` visible at `sequence`.
#[inline]
pub fn set_seek_key(out: &mut Vec<u8>, user_key: &[u8], sequence: u64) {
    out.clear();
    put_internal_key(out, user_key, pack(sequence, SEEK_TYPE));
}

/// An internal key split into its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InternalKey<'a> {
    /// The user's key.
    pub user_key: &'a [u8],
    /// Sequence and type; see [`unpack`].
    pub packed: u64,
}

impl<'a> InternalKey<'a> {
    /// Splits off the trailer; `None` if the key is too short. The type byte is not checked.
    #[inline(always)]
    pub fn split(key: &'a [u8]) -> Option<InternalKey<'a>> {
        let (user_key, trailer) = key.split_last_chunk::<8>()?;
        Some(InternalKey { user_key, packed: u64::from_le_bytes(*trailer) })
    }

    /// Splits and checks a key read from a file.
    pub fn parse(key: &'a [u8]) -> Result<InternalKey<'a>> {
        let Some(parsed) = InternalKey::split(key) else {
            return Err(Error::corruption(format!("internal key of {} bytes", key.len())));
        };
        parsed.value_type()?;
        Ok(parsed)
    }

    /// The sequence number.
    #[inline]
    pub fn sequence(&self) -> u64 {
        self.packed >> 8
    }

    /// The type; a byte that no SST entry may have is corruption.
    #[inline]
    pub fn value_type(&self) -> Result<ValueType> {
        value_type(self.packed)
    }
}

/// The type in a key trailer; a byte that no SST entry may have is corruption.
#[inline]
pub fn value_type(packed: u64) -> Result<ValueType> {
    match ValueType::from_byte(packed as u8) {
        Some(t) => Ok(t),
        None => Err(bad_type(packed)),
    }
}

#[cold]
fn bad_type(packed: u64) -> Error {
    Error::corruption(format!("entry type 0x{:02x} at sequence {}", packed as u8, packed >> 8))
}

/// The order of user keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Comparator {
    /// `leveldb.BytewiseComparator`: memcmp, a prefix before its extensions.
    #[default]
    Bytewise,
    /// `rocksdb.ReverseBytewiseComparator`: the opposite order.
    ReverseBytewise,
}

impl Comparator {
    /// The comparator with this name in the MANIFEST.
    pub fn from_name(name: &[u8]) -> Result<Comparator> {
        match name {
            b"leveldb.BytewiseComparator" => Ok(Comparator::Bytewise),
            b"rocksdb.ReverseBytewiseComparator" => Ok(Comparator::ReverseBytewise),
            b"leveldb.BytewiseComparator.u64ts" | b"rocksdb.ReverseBytewiseComparator.u64ts" => {
                Err(Error::unsupported(format!(
                    "comparator {} (user-defined timestamps)",
                    String::from_utf8_lossy(name)
                )))
            }
            other => {
                Err(Error::unsupported(format!("comparator {}", String::from_utf8_lossy(other))))
            }
        }
    }

    /// The name in the MANIFEST.
    pub fn name(self) -> &'static str {
        match self {
            Comparator::Bytewise => "leveldb.BytewiseComparator",
            Comparator::ReverseBytewise => "rocksdb.ReverseBytewiseComparator",
        }
    }

    /// Compares two user keys.
    #[inline(always)]
    pub fn cmp_user(self, a: &[u8], b: &[u8]) -> Ordering {
        let order = compare_bytes(a, b);
        match self {
            Comparator::Bytewise => order,
            Comparator::ReverseBytewise => order.reverse(),
        }
    }

    /// Compares two internal keys. A key without a trailer (corruption that a parser missed) counts
    /// as a user key with trailer 0: the order stays total, and nothing panics.
    #[inline(always)]
    pub fn cmp_internal(self, a: &[u8], b: &[u8]) -> Ordering {
        let (a, a_packed) = split_lenient(a);
        let (b, b_packed) = split_lenient(b);
        self.cmp_user(a, b).then_with(|| b_packed.cmp(&a_packed))
    }
}

#[inline(always)]
pub(crate) fn split_lenient(key: &[u8]) -> (&[u8], u64) {
    match key.split_last_chunk::<8>() {
        Some((user, trailer)) => (user, u64::from_le_bytes(*trailer)),
        None => (key, 0),
    }
}

/// Compares like memcmp; a prefix sorts before its extensions.
#[inline(always)]
pub fn compare_bytes(a: &[u8], b: &[u8]) -> Ordering {
    let common = a.len().min(b.len());
    // No iterators: a build without link-time optimization calls their functions for each word.
    let (mut a_rest, mut b_rest) = (a, b);
    while let (Some((x, a_next)), Some((y, b_next))) =
        (a_rest.split_first_chunk::<8>(), b_rest.split_first_chunk::<8>())
    {
        if x != y {
            return u64::from_be_bytes(*x).cmp(&u64::from_be_bytes(*y));
        }
        (a_rest, b_rest) = (a_next, b_next);
    }
    if common >= 8 {
        // The last eight common bytes overlap bytes that are equal, so the first difference in this
        // word is the first difference of the keys.
        if let (Some(x), Some(y)) = (a[..common].last_chunk::<8>(), b[..common].last_chunk::<8>())
            && x != y
        {
            return u64::from_be_bytes(*x).cmp(&u64::from_be_bytes(*y));
        }
    } else {
        for (x, y) in a.iter().zip(b) {
            if x != y {
                return x.cmp(y);
            }
        }
    }
    a.len().cmp(&b.len())
}

/// Compares like memcmp and returns the length of the common prefix.
#[inline(always)]
pub(crate) fn compare_with_prefix(a: &[u8], b: &[u8]) -> (Ordering, usize) {
    let common = a.len().min(b.len());
    let mut at = 0;
    while let (Some(x), Some(y)) = (fixed64_at(&a[..common], at), fixed64_at(&b[..common], at)) {
        if x != y {
            return (
                x.swap_bytes().cmp(&y.swap_bytes()),
                at + ((x ^ y).trailing_zeros() / 8) as usize,
            );
        }
        at += 8;
    }
    for i in at..common {
        if a[i] != b[i] {
            return (a[i].cmp(&b[i]), i);
        }
    }
    (a.len().cmp(&b.len()), common)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn newer_versions_of_a_key_sort_first() {
        let key = |user: &[u8], seq, t| {
            let mut k = Vec::new();
            put_internal_key(&mut k, user, pack(seq, t));
            k
        };
        let c = Comparator::Bytewise;
        assert_eq!(c.cmp_internal(&key(b"a", 9, 1), &key(b"a", 8, 1)), Ordering::Less);
        assert_eq!(c.cmp_internal(&key(b"a", 9, 1), &key(b"b", 10, 1)), Ordering::Less);
        assert_eq!(c.cmp_internal(&key(b"a", 9, SEEK_TYPE), &key(b"a", 9, 0x18)), Ordering::Less);
        let r = Comparator::ReverseBytewise;
        assert_eq!(r.cmp_internal(&key(b"b", 1, 1), &key(b"a", 1, 1)), Ordering::Less);
        assert_eq!(r.cmp_internal(&key(b"a", 9, 1), &key(b"a", 8, 1)), Ordering::Less);
        assert_eq!(SENTINEL_PACKED.to_le_bytes(), [0x0F, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF]);
    }

    #[test]
    fn timestamps_are_refused_by_name() {
        let e = Comparator::from_name(b"leveldb.BytewiseComparator.u64ts").unwrap_err();
        assert_eq!(e.kind(), crate::Kind::Unsupported);
        assert!(e.to_string().contains("u64ts"));
        for c in [Comparator::Bytewise, Comparator::ReverseBytewise] {
            assert_eq!(Comparator::from_name(c.name().as_bytes()).unwrap(), c);
        }
    }

    #[test]
    fn keys_with_impossible_types_or_without_a_trailer_are_corrupt() {
        assert!(InternalKey::parse(b"1234567").is_err());
        assert!(InternalKey::parse(b"k\x19\0\0\0\0\0\0\0").is_err());
        assert_eq!(InternalKey::parse(b"k\x01\x05\0\0\0\0\0\0").unwrap().sequence(), 5);
    }

    proptest! {
        #[test]
        fn comparisons_agree_with_slices(prefix in proptest::collection::vec(any::<u8>(), 0..30),
                                         a in proptest::collection::vec(any::<u8>(), 0..12),
                                         b in proptest::collection::vec(any::<u8>(), 0..12)) {
            let a: Vec<u8> = prefix.iter().chain(&a).copied().collect();
            let b: Vec<u8> = prefix.iter().chain(&b).copied().collect();
            prop_assert_eq!(compare_bytes(&a, &b), a.cmp(&b));
            let common = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
            prop_assert_eq!(compare_with_prefix(&a, &b), (a.cmp(&b), common));
        }
    }
}
