//! The index of a file that is being built.
//!
//! Data blocks follow each other from the beginning of the file without gaps, so the sizes of the
//! blocks give their handles. Keys are kept as internal keys. If in the end no two neighbouring
//! blocks share a user key, the index is written with user keys only, which is shorter.

use crate::block::builder::BlockBuilder;
use crate::block::checksum::BLOCK_TRAILER_BYTES;
use crate::key::{Comparator, KEY_TRAILER_BYTES, SEQUENCE_MAX, ValueType, pack};
use crate::sst::footer::BlockHandle;

/// Above the types of all entries that every supported version knows.
const SEPARATOR_TYPE: u8 = ValueType::WideColumnEntity as u8;
/// Bytes of an index entry besides its key, about.
const ENTRY_BYTES: usize = 12;

/// The separators and sizes of the data blocks so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct IndexEntries {
    /// The separators, one after another, and where each ends.
    keys: Vec<u8>,
    key_ends: Vec<usize>,
    /// The stored sizes of the blocks, without trailers. Blocks that are held back have none yet.
    sizes: Vec<u64>,
    /// Two neighbouring blocks have versions of one user key.
    shares_user_keys: bool,
}

impl IndexEntries {
    /// Blocks that have a separator.
    pub fn len(&self) -> usize {
        self.key_ends.len()
    }

    /// Bytes of an index of one level, about.
    pub fn bytes(&self) -> usize {
        self.keys.len() + self.key_ends.len() * ENTRY_BYTES
    }

    /// Whether the index is written with user keys.
    pub fn has_user_keys(&self) -> bool {
        !self.shares_user_keys
    }

    /// Adds the separator between a block that ends with `last` and one that begins with `next`:
    /// the shortest key at or after `last` and before all versions of `next`. Without `next` the
    /// block is the last one.
    pub fn separate(&mut self, comparator: Comparator, last: &[u8], next: Option<&[u8]>) {
        let user_len = last.len() - KEY_TRAILER_BYTES;
        let start = self.keys.len();
        self.keys.extend_from_slice(last);
        if let Some(next) = next {
            let user = &mut self.keys[start..start + user_len];
            self.shares_user_keys |= user == next;
            if comparator == Comparator::Bytewise
                && let Some(len) = shorten(user, next)
            {
                let trailer = pack(SEQUENCE_MAX, SEPARATOR_TYPE).to_le_bytes();
                self.keys.truncate(start + len);
                self.keys.extend_from_slice(&trailer);
            }
        }
        self.key_ends.push(self.keys.len());
    }

    /// Adds the stored size of the next block.
    pub fn block(&mut self, size: u64) {
        self.sizes.push(size);
    }

    /// The key of an entry in the form in which it is written.
    pub fn key(&self, at: usize) -> &[u8] {
        let start = if at == 0 { 0 } else { self.key_ends[at - 1] };
        let key = &self.keys[start..self.key_ends[at]];
        match self.has_user_keys() {
            true => &key[..key.len() - KEY_TRAILER_BYTES],
            false => key,
        }
    }
}

/// Writes the blocks of an index from its entries.
#[derive(Clone, Debug)]
pub(crate) struct IndexBlocks {
    block: BlockBuilder,
    /// The next entry.
    at: usize,
    /// The block of the last entry, or an empty one at the beginning.
    last: BlockHandle,
}

impl IndexBlocks {
    pub fn new(restart_interval: u32) -> IndexBlocks {
        IndexBlocks {
            block: BlockBuilder::new(restart_interval),
            at: 0,
            last: BlockHandle::default(),
        }
    }

    /// The next block of the lower level, and the number of entries so far; `None` after the last.
    pub fn next(&mut self, entries: &IndexEntries, limits: BlockLimits) -> Option<(&[u8], usize)> {
        if self.at == entries.len() {
            return None;
        }
        self.fill(entries, Some(limits));
        Some((self.block.finish(), self.at))
    }

    /// One block of all entries.
    pub fn whole(&mut self, entries: &IndexEntries) -> &[u8] {
        self.fill(entries, None);
        self.block.finish()
    }

    /// Begins a block and adds entries up to `limits`.
    fn fill(&mut self, entries: &IndexEntries, limits: Option<BlockLimits>) {
        self.block.clear();
        while self.at < entries.len() {
            let key = entries.key(self.at);
            let ends = |limits: BlockLimits| limits.end_before(&self.block, key, &[0; 6]);
            if !self.block.is_empty() && limits.is_some_and(ends) {
                break;
            }
            let offset = match self.at {
                0 => 0,
                _ => self.last.offset + self.last.size + BLOCK_TRAILER_BYTES as u64,
            };
            let handle = BlockHandle { offset, size: entries.sizes[self.at] };
            self.block.add_index(key, handle, self.last);
            self.last = handle;
            self.at += 1;
        }
    }
}

/// Builds the upper level of an index or a filter: for each block of the lower level its last entry
/// in `entries`, and its handle. These blocks follow each other without gaps.
pub(crate) fn top_level(
    entries: &IndexEntries,
    parts: &[(usize, BlockHandle)],
    restart_interval: u32,
) -> Vec<u8> {
    let mut block = BlockBuilder::new(restart_interval);
    let mut previous = BlockHandle::default();
    for &(last, handle) in parts {
        block.add_index(entries.key(last), handle, previous);
        previous = handle;
    }
    block.finish().to_vec()
}

/// When a block ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockLimits {
    /// It ends once it has this many bytes,
    bytes: usize,
    /// and, if it has more than this many, before an entry that would exceed them.
    nearly: usize,
}

impl BlockLimits {
    pub fn new(bytes: usize, deviation_percent: u32) -> BlockLimits {
        let percent = 100 - deviation_percent.min(100) as usize;
        BlockLimits { bytes, nearly: bytes.saturating_mul(percent).div_ceil(100) }
    }

    /// Whether a block is complete.
    #[inline]
    pub fn end_after(self, block: &BlockBuilder) -> bool {
        block.len() >= self.bytes
    }

    /// Whether a block ends before an entry.
    #[inline]
    pub fn end_before(self, block: &BlockBuilder, key: &[u8], value: &[u8]) -> bool {
        let len = block.len();
        len >= self.bytes || (len > self.nearly && block.len_with(key, value) > self.bytes)
    }
}

/// Turns `key` into a shorter one that is greater but less than `limit`, and returns its length.
/// `None` if there is none; `key` is then unchanged.
fn shorten(key: &mut [u8], limit: &[u8]) -> Option<usize> {
    let common = key.iter().zip(limit).take_while(|(a, b)| a == b).count();
    let (&mine, &theirs) = (key.get(common)?, limit.get(common)?);
    if mine >= theirs {
        return None;
    }
    if common + 1 < limit.len() || mine + 1 < theirs {
        if common + 1 >= key.len() {
            return None;
        }
        key[common] += 1;
        return Some(common + 1);
    }
    // The limit ends in the next byte: increase a later byte of the key.
    let at = key.iter().skip(common + 1).position(|&byte| byte != 0xFF)? + common + 1;
    if at + 1 >= key.len() {
        return None;
    }
    key[at] += 1;
    Some(at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shorter_key_lies_between_two_keys() {
        for (key, limit, expected) in [
            ("abcde", "abd", None),
            ("abcde", "abe", Some("abd")),
            ("abcde", "abdx", Some("abd")),
            ("ab", "abc", None),
            ("ab", "ac", None),
            ("abcd", "ac", Some("abd")),
            ("a", "b", None),
        ] {
            let mut bytes = key.as_bytes().to_vec();
            let got = shorten(&mut bytes, limit.as_bytes()).map(|len| bytes[..len].to_vec());
            if let Some(got) = &got {
                assert!(got.as_slice() > key.as_bytes() && got.as_slice() < limit.as_bytes());
            } else {
                assert_eq!(bytes, key.as_bytes());
            }
            assert_eq!(
                got.is_some(),
                expected.is_some() || key == "abcde",
                "{key} {limit}: {got:?}"
            );
        }
    }
}
