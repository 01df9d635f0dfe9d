//! Lookups in the first bytes of a block that is too large for memory.
//!
//! A long value ends its block, so all keys are near the beginning, and a lookup that needs only
//! the key can do without the value.

use crate::block::layout::{
    FLAG_HASH_INDEX, FLAG_RESERVED, FLAG_SEPARATED, RESTART_COUNT_MASK, header3,
};
use crate::key::{Comparator, split_lenient};

/// The result of a lookup in the beginning of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadLookup {
    /// The first entry at or after the seek key has its user key: sequence and type, see
    /// [`crate::unpack`].
    Found(u64),
    /// The first entry at or after the seek key has another user key.
    Absent,
    /// Every entry of the block is before the seek key.
    PastEnd,
}

/// Finds the first entry at or after the internal key `target` in `head`, the first bytes of an
/// uncompressed data block of `len` bytes whose last four are `footer`. `None` if these bytes are
/// not enough.
pub fn head_lookup(
    head: &[u8],
    len: usize,
    footer: u32,
    comparator: Comparator,
    target: &[u8],
) -> Option<HeadLookup> {
    if footer & (FLAG_RESERVED | FLAG_HASH_INDEX | FLAG_SEPARATED) != 0 {
        return None;
    }
    let restarts = 4 * (footer & RESTART_COUNT_MASK) as usize;
    let entries_end = len.checked_sub(restarts + 4)?;
    let (user, _) = split_lenient(target);
    let (mut at, mut key) = (0, Vec::new());
    while at < entries_end {
        let (shared, non_shared, value_len, suffix) = header3(head, at)?;
        if shared as usize > key.len() {
            return None;
        }
        let suffix_end = suffix + non_shared as usize;
        key.truncate(shared as usize);
        key.extend_from_slice(head.get(suffix..suffix_end)?);
        if comparator.cmp_internal(&key, target).is_ge() {
            let (found, packed) = split_lenient(&key);
            let same = comparator.cmp_user(found, user).is_eq();
            return Some(if same { HeadLookup::Found(packed) } else { HeadLookup::Absent });
        }
        at = suffix_end + value_len as usize;
    }
    (at == entries_end).then_some(HeadLookup::PastEnd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::builder::BlockBuilder;
    use crate::{BlockLayout, Lookup, pack, point_lookup};

    fn internal(user: &str, sequence: u64) -> Vec<u8> {
        [user.as_bytes(), &pack(sequence, 1).to_le_bytes()].concat()
    }

    #[test]
    fn the_beginning_gives_the_answer_of_the_whole_block_or_none() {
        let mut builder = BlockBuilder::new(3);
        for (user, sequence, len) in
            [("aa", 9, 5), ("aa", 7, 0), ("ab", 3, 200), ("b", 4, 1), ("bcd", 8, 70_000)]
        {
            builder.add(&internal(user, sequence), &vec![7; len]);
        }
        let block = builder.finish();
        let layout = BlockLayout::parse(block).unwrap();
        let footer = u32::from_le_bytes(*block.last_chunk().unwrap());
        let comparator = Comparator::Bytewise;
        for user in ["a", "aa", "aaa", "ab", "b", "bc", "bcd", "bce", "c"] {
            for sequence in [1, 3, 5, 7, 8, 9, 100] {
                let target = internal(user, sequence);
                let whole = point_lookup(block, &layout, comparator, &target, &mut Vec::new());
                let whole = match whole.unwrap() {
                    Lookup::Found { packed, .. } => HeadLookup::Found(packed),
                    Lookup::Absent => HeadLookup::Absent,
                    Lookup::PastEnd => HeadLookup::PastEnd,
                };
                let mut told = 0;
                for cut in [0, 1, 3, 20, 100, 250, 300, 1000, block.len()] {
                    let head = &block[..cut];
                    let said = head_lookup(head, block.len(), footer, comparator, &target);
                    assert!(said.is_none_or(|said| said == whole), "{user} {sequence} {cut}");
                    told += u32::from(said.is_some());
                }
                assert!(told > 1, "{user} {sequence}");
            }
        }
    }

    #[test]
    fn random_bytes_do_not_panic() {
        let mut noise = 1_u64;
        let mut bytes = [0; 64];
        for _ in 0..100_000 {
            for byte in &mut bytes {
                noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let long = (noise >> 40).is_multiple_of(32);
                *byte = (noise >> 59) as u8 | if long { 0x80 } else { 0 };
            }
            let len = (noise >> 20) as usize & 1023;
            let footer = (noise >> 32) as u32 & 0xF000_001F;
            let _ = head_lookup(&bytes, len, footer, Comparator::Bytewise, b"k12345678");
        }
    }
}
