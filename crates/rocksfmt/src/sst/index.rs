//! Index blocks: separator keys and the handles of blocks.
//!
//! There is one entry per data block, in file order; its key is at least the last key of that block
//! and less than the first key of the next. Index blocks differ from other blocks:
//!
//! - keys are internal keys or, by a property of the file, user keys only;
//! - values may be stored as a difference to the previous entry; then there is no value length, and
//!   the difference form is used exactly if `shared != 0`;
//! - index type 3 adds the first internal key of each block to the value;
//! - index type 2 has two levels: the entries of the top block lead to index blocks of the same
//!   form. The top level of partitioned filters has that form too.
//!
//! The flags come from the file's properties and are the same for all its index blocks.

use std::ops::Range;

use crate::block::builder::BlockBuilder;
use crate::block::checksum::BLOCK_TRAILER_BYTES;
use crate::block::cursor::Cursor;
use crate::block::layout::{BlockLayout, Entries, Entry, bad_entry};
use crate::block::search;
use crate::coding::{put_varint, unzigzag, varint32_at, varint64_at};
use crate::error::{Error, Result};
use crate::key::{Comparator, KEY_TRAILER_BYTES};
use crate::sst::footer::BlockHandle;

/// Property `rocksdb.block.based.table.index.type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IndexType {
    /// One sorted block.
    #[default]
    BinarySearch,
    /// The same, with two additional blocks that a reader may ignore.
    HashSearch,
    /// Two levels.
    TwoLevel,
    /// One sorted block whose values contain the first key of each data block.
    BinarySearchWithFirstKey,
}

impl IndexType {
    /// The value of the property.
    pub fn to_u32(self) -> u32 {
        match self {
            IndexType::BinarySearch => 0,
            IndexType::HashSearch => 1,
            IndexType::TwoLevel => 2,
            IndexType::BinarySearchWithFirstKey => 3,
        }
    }

    /// Decodes the property.
    pub fn from_u32(value: u32) -> Result<IndexType> {
        Ok(match value {
            0 => IndexType::BinarySearch,
            1 => IndexType::HashSearch,
            2 => IndexType::TwoLevel,
            3 => IndexType::BinarySearchWithFirstKey,
            other => return Err(Error::unsupported(format!("index type {other}"))),
        })
    }
}

/// The encoding of a file's index blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexFormat {
    /// Keys are user keys without a trailer.
    pub user_keys: bool,
    /// Values have no length and may be differences.
    pub delta_values: bool,
    /// Values contain the first key of their block.
    pub first_keys: bool,
}

/// The layout of an index block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexLayout {
    block: BlockLayout,
    format: IndexFormat,
}

/// The value of an index entry.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IndexValue {
    pub handle: BlockHandle,
    pub first_key: (u32, u32),
}

impl IndexLayout {
    /// Parses the end of an uncompressed index block.
    pub fn parse(data: &[u8], format: IndexFormat) -> Result<IndexLayout> {
        let block = BlockLayout::parse(data)?;
        if block.is_separated() {
            return Err(Error::unsupported("index block with separated keys and values"));
        }
        Ok(IndexLayout { block, format })
    }

    /// The encoding of the entries.
    pub fn format(&self) -> IndexFormat {
        self.format
    }

    /// Number of restart points; equals the number of entries if the restart interval is 1, the
    /// default.
    pub fn restart_count(&self) -> u32 {
        self.block.restart_count()
    }

    /// The part of an internal key by which this index is ordered.
    #[inline(always)]
    pub(crate) fn target<'t>(&self, internal: &'t [u8]) -> &'t [u8] {
        if self.format.user_keys {
            &internal[..internal.len().saturating_sub(KEY_TRAILER_BYTES)]
        } else {
            internal
        }
    }

    #[inline(always)]
    fn value_at(
        &self,
        entries: &[u8],
        shared: u32,
        at: usize,
        previous: &IndexValue,
    ) -> Option<(IndexValue, usize)> {
        let (handle, at) = if self.format.delta_values && shared != 0 {
            let (delta, at) = varint64_at(entries, at)?;
            let before = previous.handle;
            let size = before.size.checked_add_signed(unzigzag(delta))?;
            let offset =
                before.offset.checked_add(before.size)?.checked_add(BLOCK_TRAILER_BYTES as u64)?;
            (BlockHandle { offset, size }, at)
        } else {
            BlockHandle::decode_at(entries, at)?
        };
        if !self.format.first_keys {
            return Some((IndexValue { handle, first_key: (0, 0) }, at));
        }
        let (len, at) = varint32_at(entries, at)?;
        let end = at + len as usize;
        (end <= entries.len())
            .then_some((IndexValue { handle, first_key: (at as u32, end as u32) }, end))
    }
}

impl Entries for IndexLayout {
    type Value = IndexValue;

    #[inline(always)]
    fn trailer_bytes(self) -> usize {
        if self.format.user_keys { 0 } else { KEY_TRAILER_BYTES }
    }

    #[inline(always)]
    fn layout(&self) -> &BlockLayout {
        &self.block
    }

    #[inline(always)]
    fn entry(
        self,
        entries: &[u8],
        at: usize,
        _restart: bool,
        previous: &IndexValue,
    ) -> Option<Entry<IndexValue>> {
        let (shared, at) = varint32_at(entries, at)?;
        let (non_shared, at) = varint32_at(entries, at)?;
        let (value_len, suffix) = if self.format.delta_values {
            (None, at)
        } else {
            let (len, at) = varint32_at(entries, at)?;
            (Some(len as usize), at)
        };
        let suffix_end = suffix + non_shared as usize;
        let (value, next) = match value_len {
            None => self.value_at(entries, shared, suffix_end, previous)?,
            Some(len) => {
                let next = suffix_end + len;
                (self.value_at(entries.get(..next)?, shared, suffix_end, previous)?.0, next)
            }
        };
        Some(Entry { shared: shared as usize, suffix, suffix_end, value, next })
    }

    #[inline(always)]
    fn restart_key(self, entries: &[u8], at: usize) -> Option<&[u8]> {
        let (shared, at) = varint32_at(entries, at)?;
        let (non_shared, mut at) = varint32_at(entries, at)?;
        if !self.format.delta_values {
            at = varint32_at(entries, at)?.1;
        }
        if shared != 0 {
            return None;
        }
        entries.get(at..at + non_shared as usize)
    }
}

/// Builds an index block of one entry that leads to `handle`, with its layout: the top of an index
/// that is itself a block of the file. `largest` is an internal key; no user key of the file is
/// greater than its user key.
pub fn index_of_one(
    largest: &[u8],
    handle: BlockHandle,
    user_keys: bool,
) -> (Vec<u8>, IndexLayout) {
    let mut key = largest[..largest.len().saturating_sub(KEY_TRAILER_BYTES)].to_vec();
    if !user_keys {
        // After all versions of that user key.
        key.extend_from_slice(&0u64.to_le_bytes());
    }
    let mut value = Vec::new();
    put_varint(&mut value, handle.offset);
    put_varint(&mut value, handle.size);
    let mut block = BlockBuilder::new(1);
    block.add(&key, &value);
    let data = block.finish().to_vec();
    let format = IndexFormat { user_keys, ..IndexFormat::default() };
    let layout = IndexLayout::parse(&data, format).expect("a block that was built here");
    (data, layout)
}

/// Finds the block that may hold the first entry at or after the internal key `target`; `None` if
/// every key of the file is before it. See [`crate::point_lookup`] for `scratch`.
#[inline]
pub fn index_lookup(
    data: &[u8],
    layout: &IndexLayout,
    comparator: Comparator,
    target: &[u8],
    scratch: &mut Vec<u8>,
) -> Result<Option<BlockHandle>> {
    match search::first_not_less(data, *layout, comparator, layout.target(target), scratch) {
        Some(search::Hit::Entry(found)) => Ok(Some(found.entry.value.handle)),
        Some(search::Hit::PastEnd) => Ok(None),
        None => Err(bad_entry().at("index")),
    }
}

/// A position in an index block; like [`crate::BlockCursor`] it borrows nothing.
#[derive(Clone, Debug, Default)]
pub struct IndexCursor {
    inner: Cursor<IndexLayout>,
}

impl IndexCursor {
    /// A cursor without a position.
    pub fn new() -> IndexCursor {
        IndexCursor::default()
    }

    /// Whether the cursor is on an entry.
    #[inline]
    pub fn valid(&self) -> bool {
        self.inner.valid()
    }

    /// The separator: a user key or an internal key, depending on [`IndexFormat::user_keys`].
    #[inline]
    pub fn key(&self) -> &[u8] {
        self.inner.key()
    }

    /// The block of this entry; `(0, 0)` without a position.
    #[inline]
    pub fn handle(&self) -> BlockHandle {
        self.inner.value().handle
    }

    /// The range of the first internal key of this entry's block (index type 3 only; else empty).
    #[inline]
    pub fn first_key_range(&self) -> Range<usize> {
        let (start, end) = self.inner.value().first_key;
        start as usize..end as usize
    }

    /// Clears the position; keeps the buffers.
    pub fn reset(&mut self) {
        self.inner.reset();
    }

    /// Moves to the first entry. This and the other moves return whether they reached an entry.
    pub fn seek_to_first(&mut self, data: &[u8], layout: &IndexLayout) -> Result<bool> {
        self.inner.seek_to_first(data, *layout)
    }

    /// Moves to the last entry.
    pub fn seek_to_last(&mut self, data: &[u8], layout: &IndexLayout) -> Result<bool> {
        self.inner.seek_to_last(data, *layout)
    }

    /// Moves to the block that may hold the first entry at or after the internal key `target`.
    pub fn seek(
        &mut self,
        data: &[u8],
        layout: &IndexLayout,
        comparator: Comparator,
        target: &[u8],
    ) -> Result<bool> {
        self.inner.seek(data, *layout, comparator, layout.target(target))
    }

    /// Moves to the last block that may hold an entry at or before the internal key `target`: the
    /// block of [`IndexCursor::seek`], or the last block if the target is after all of them. If
    /// that block turns out to start after the target, the wanted entry is the last one of the
    /// previous block.
    pub fn seek_for_prev(
        &mut self,
        data: &[u8],
        layout: &IndexLayout,
        comparator: Comparator,
        target: &[u8],
    ) -> Result<bool> {
        if self.seek(data, layout, comparator, target)? {
            return Ok(true);
        }
        self.seek_to_last(data, layout)
    }

    /// Moves to the next entry.
    #[inline]
    pub fn next(&mut self, data: &[u8], layout: &IndexLayout) -> Result<bool> {
        self.inner.next(data, *layout)
    }

    /// Moves to the previous entry, in amortised constant time.
    pub fn prev(&mut self, data: &[u8], layout: &IndexLayout) -> Result<bool> {
        self.inner.prev(data, *layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{pack, put_internal_key};
    use crate::testing::block::{BlockBuilder, Form};
    use proptest::prelude::*;

    fn internal(user: &[u8], sequence: u64) -> Vec<u8> {
        let mut key = Vec::new();
        put_internal_key(&mut key, user, pack(sequence, 1));
        key
    }

    #[test]
    fn a_delta_in_an_interval_that_shares_nothing_is_a_full_handle() {
        let format = IndexFormat { user_keys: true, delta_values: true, first_keys: false };
        let mut b = BlockBuilder::new(Form::Index(format), 8);
        b.add_index(b"ab", BlockHandle { offset: 0, size: 100 }, b"");
        b.add_index(b"ac", BlockHandle { offset: 105, size: 50 }, b"");
        b.add_index(b"b", BlockHandle { offset: 4096, size: 7 }, b"");
        let data = b.finish();
        let layout = IndexLayout::parse(&data, format).unwrap();
        let mut scratch = Vec::new();
        let mut find = |user: &[u8]| {
            index_lookup(&data, &layout, Comparator::Bytewise, &internal(user, 9), &mut scratch)
                .unwrap()
        };
        assert_eq!(find(b"aa"), Some(BlockHandle { offset: 0, size: 100 }));
        assert_eq!(find(b"ac"), Some(BlockHandle { offset: 105, size: 50 }));
        assert_eq!(find(b"ad"), Some(BlockHandle { offset: 4096, size: 7 }));
        assert_eq!(find(b"c"), None);
    }

    #[test]
    fn unknown_index_types_are_refused_by_number() {
        assert!(IndexType::from_u32(4).unwrap_err().to_string().contains("index type 4"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

        #[test]
        fn lookups_and_cursors_agree_with_a_sorted_list(
            users in proptest::collection::btree_set(proptest::collection::vec(97u8..101, 1..8), 0..60),
            versions: bool,
            targets in proptest::collection::vec((proptest::collection::vec(96u8..102, 0..8), 0u64..6), 1..30),
            steps in proptest::collection::vec(any::<bool>(), 0..60),
            interval in prop_oneof![Just(1usize), 2usize..5, Just(8), Just(16)],
            user_keys: bool,
            delta_values: bool,
            first_keys: bool,
        ) {
            let format = IndexFormat { user_keys, delta_values, first_keys };
            let comparator = Comparator::Bytewise;
            let mut keys = Vec::new();
            for user in &users {
                if user_keys {
                    keys.push(user.clone());
                } else {
                    keys.push(internal(user, 5));
                    if versions {
                        keys.push(internal(user, 3));
                    }
                }
            }
            let mut builder = BlockBuilder::new(Form::Index(format), interval);
            let mut model = Vec::new();
            let mut offset = 0;
            for (i, key) in keys.iter().enumerate() {
                let handle = BlockHandle { offset, size: (i * 977 % 5000) as u64 };
                offset += handle.size + 5;
                let first = if first_keys { format!("first{i}").into_bytes() } else { Vec::new() };
                builder.add_index(key, handle, &first);
                model.push((key.clone(), handle, first));
            }
            let data = builder.finish();
            let layout = IndexLayout::parse(&data, format).unwrap();
            let mut cursor = IndexCursor::new();
            let mut scratch = Vec::new();
            let n = model.len();
            let mut at = None;
            let mut steps = steps.into_iter();
            for (user, sequence) in targets {
                let target = internal(&user, sequence);
                let i = model.partition_point(|(k, ..)| match user_keys {
                    true => k.as_slice() < user.as_slice(),
                    false => comparator.cmp_internal(k, &target).is_lt(),
                });
                let expected = model.get(i).map(|m| m.1);
                prop_assert_eq!(index_lookup(&data, &layout, comparator, &target, &mut scratch).unwrap(), expected);
                if sequence == 0 {
                    let found = cursor.seek_for_prev(&data, &layout, comparator, &target).unwrap();
                    prop_assert_eq!(found, n > 0);
                    at = Some(i.min(n.saturating_sub(1))).filter(|_| n > 0);
                } else {
                    prop_assert_eq!(cursor.seek(&data, &layout, comparator, &target).unwrap(), i < n);
                    at = Some(i).filter(|&i| i < n);
                }
                for forward in steps.by_ref().take(4) {
                    if let Some(i) = at {
                        prop_assert_eq!(cursor.key(), &model[i].0[..]);
                        prop_assert_eq!(cursor.handle(), model[i].1);
                        prop_assert_eq!(&data[cursor.first_key_range()], &model[i].2[..]);
                    }
                    let moved = if forward { cursor.next(&data, &layout) } else { cursor.prev(&data, &layout) };
                    at = match forward {
                        true => at.map(|i| i + 1).filter(|&i| i < n),
                        false => at.and_then(|i| i.checked_sub(1)),
                    };
                    prop_assert_eq!(moved.unwrap(), at.is_some());
                }
            }
            prop_assert_eq!(cursor.valid(), at.is_some());
            let mut more = cursor.seek_to_last(&data, &layout).unwrap();
            for m in model.iter().rev() {
                prop_assert!(more);
                prop_assert_eq!((cursor.key(), cursor.handle()), (&m.0[..], m.1));
                more = cursor.prev(&data, &layout).unwrap();
            }
            prop_assert!(!more);
        }
    }
}
