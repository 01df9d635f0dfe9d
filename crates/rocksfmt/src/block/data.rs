//! Lookups and cursors in blocks of internal keys.

use std::cmp::Ordering;
use std::ops::Range;

use crate::block::cursor::Cursor;
use crate::block::layout::{BlockLayout, bad_entry};
use crate::block::search;
use crate::error::Result;
use crate::key::Comparator;

/// The result of a point lookup in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The first entry at or after the seek key has its user key.
    Found {
        /// Sequence and type; see [`crate::unpack`].
        packed: u64,
        /// Start of the value in the block.
        start: u32,
        /// End of the value in the block.
        end: u32,
    },
    /// The first entry at or after the seek key has another user key: the file has no visible
    /// version.
    Absent,
    /// Every entry is before the seek key: the next block may have it.
    PastEnd,
}

impl Lookup {
    /// The value's range, if an entry was found.
    #[inline]
    pub fn value_range(&self) -> Option<Range<usize>> {
        match *self {
            Lookup::Found { start, end, .. } => Some(start as usize..end as usize),
            _ => None,
        }
    }
}

/// Finds the first entry of a data block at or after the internal key `target`, and tells whether
/// it is a version of the same user key.
///
/// `scratch` is used only when versions of one user key share trailer bytes, so that whole keys
/// must be built. Reuse it for many lookups.
#[inline]
pub fn point_lookup(
    data: &[u8],
    layout: &BlockLayout,
    comparator: Comparator,
    target: &[u8],
    scratch: &mut Vec<u8>,
) -> Result<Lookup> {
    match search::first_not_less(data, *layout, comparator, target, scratch) {
        Some(search::Hit::Entry(found)) if found.equal_user_key => {
            let (start, end) = found.entry.value;
            Ok(Lookup::Found { packed: found.packed, start, end })
        }
        Some(search::Hit::Entry(_)) => Ok(Lookup::Absent),
        Some(search::Hit::PastEnd) => Ok(Lookup::PastEnd),
        None => Err(bad_entry()),
    }
}

/// A position in a block of internal keys (data and range-deletion blocks).
///
/// Borrows nothing: every method that moves takes the block's data and layout, which must be the
/// same from one positioning call to the next. Allocates nothing once its buffers have grown to the
/// size of the keys.
#[derive(Clone, Debug, Default)]
pub struct BlockCursor {
    inner: Cursor<BlockLayout>,
}

impl BlockCursor {
    /// A cursor without a position.
    pub fn new() -> BlockCursor {
        BlockCursor::default()
    }

    /// Whether the cursor is on an entry.
    #[inline]
    pub fn valid(&self) -> bool {
        self.inner.valid()
    }

    /// The internal key at the cursor; empty without a position.
    #[inline]
    pub fn key(&self) -> &[u8] {
        self.inner.key()
    }

    /// The range of the value in the block.
    #[inline]
    pub fn value_range(&self) -> Range<usize> {
        let (start, end) = self.inner.value();
        start as usize..end as usize
    }

    /// The value at the cursor; empty without a position or if `data` is another block.
    #[inline]
    pub fn value<'d>(&self, data: &'d [u8]) -> &'d [u8] {
        data.get(self.value_range()).unwrap_or_default()
    }

    /// Clears the position; keeps the buffers.
    pub fn reset(&mut self) {
        self.inner.reset();
    }

    /// Puts the cursor on a key without a value that is in no block. Only [`BlockCursor::key`],
    /// [`BlockCursor::valid`], [`BlockCursor::reset`] and the seeks may follow.
    pub fn place(&mut self, key: &[u8]) {
        self.inner.place(key);
    }

    /// Moves to the first entry. This and the other moves return whether they reached an entry.
    pub fn seek_to_first(&mut self, data: &[u8], layout: &BlockLayout) -> Result<bool> {
        self.inner.seek_to_first(data, *layout)
    }

    /// Moves to the last entry.
    pub fn seek_to_last(&mut self, data: &[u8], layout: &BlockLayout) -> Result<bool> {
        self.inner.seek_to_last(data, *layout)
    }

    /// Moves to the first entry at or after the internal key `target`.
    pub fn seek(
        &mut self,
        data: &[u8],
        layout: &BlockLayout,
        comparator: Comparator,
        target: &[u8],
    ) -> Result<bool> {
        self.inner.seek(data, *layout, comparator, target)
    }

    /// Moves to the last entry at or before the internal key `target`.
    pub fn seek_for_prev(
        &mut self,
        data: &[u8],
        layout: &BlockLayout,
        comparator: Comparator,
        target: &[u8],
    ) -> Result<bool> {
        self.inner.seek_for_prev(data, *layout, comparator, target)
    }

    /// Moves to the next entry.
    #[inline]
    pub fn next(&mut self, data: &[u8], layout: &BlockLayout) -> Result<bool> {
        self.inner.next(data, *layout)
    }

    /// Moves to the previous entry, in amortised constant time.
    pub fn prev(&mut self, data: &[u8], layout: &BlockLayout) -> Result<bool> {
        self.inner.prev(data, *layout)
    }

    /// Compares the key at the cursor with an internal key.
    #[inline]
    pub fn cmp(&self, comparator: Comparator, target: &[u8]) -> Ordering {
        comparator.cmp_internal(self.key(), target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{SEEK_TYPE, pack, put_internal_key};
    use crate::testing::block::{BlockBuilder, Form};
    use proptest::prelude::*;

    fn internal(user: &[u8], sequence: u64, type_byte: u8) -> Vec<u8> {
        let mut key = Vec::new();
        put_internal_key(&mut key, user, pack(sequence, type_byte));
        key
    }

    #[test]
    fn the_empty_block_has_no_entry() {
        let data = [0, 0, 0, 0, 1, 0, 0, 0];
        let layout = BlockLayout::parse(&data).unwrap();
        assert!(layout.is_empty());
        let mut c = BlockCursor::new();
        assert!(!c.seek_to_first(&data, &layout).unwrap());
        assert!(!c.seek_to_last(&data, &layout).unwrap());
        let target = internal(b"k", 1, 1);
        assert!(!c.seek(&data, &layout, Comparator::Bytewise, &target).unwrap());
        let found = point_lookup(&data, &layout, Comparator::Bytewise, &target, &mut Vec::new());
        assert_eq!(found.unwrap(), Lookup::PastEnd);
    }

    #[test]
    fn a_block_from_rocksdb_reads_back() {
        let hex = "000a0161620105000000000000780209006300040000000000000000000001000000";
        let data: Vec<u8> = (0..hex.len())
            .step_by(2)
            .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap())
            .collect();
        let layout = BlockLayout::parse(&data).unwrap();
        let mut c = BlockCursor::new();
        assert!(c.seek_to_first(&data, &layout).unwrap());
        assert_eq!((c.key(), c.value(&data)), (&internal(b"ab", 5, 1)[..], &b"x"[..]));
        assert!(c.next(&data, &layout).unwrap());
        assert_eq!((c.key(), c.value(&data)), (&internal(b"abc", 4, 0)[..], &b""[..]));
        assert!(!c.next(&data, &layout).unwrap());

        let mut b = BlockBuilder::new(Form::Plain, 16);
        b.add(&internal(b"ab", 5, 1), b"x");
        b.add(&internal(b"abc", 4, 0), b"");
        assert_eq!(b.finish(), data);
    }

    /// Warm buffers must not grow when the same work is repeated.
    #[test]
    fn buffers_stop_growing() {
        let mut b = BlockBuilder::new(Form::Plain, 16);
        for i in 0..100 {
            b.add(&internal(format!("key{i:05}").as_bytes(), 1, 1), b"v");
        }
        let data = b.finish();
        let layout = BlockLayout::parse(&data).unwrap();
        let mut c = BlockCursor::new();
        let walk = |c: &mut BlockCursor| {
            let mut n = 0;
            let mut more = c.seek_to_last(&data, &layout).unwrap();
            while more {
                n += 1;
                more = c.prev(&data, &layout).unwrap();
            }
            n
        };
        assert_eq!(walk(&mut c), 100);
        let warm = c.inner.capacities();
        assert_eq!(walk(&mut c), 100);
        assert_eq!(c.inner.capacities(), warm);
    }

    #[derive(Clone, Debug)]
    enum Op {
        First,
        Last,
        Next,
        Prev,
        Seek(Vec<u8>),
        SeekForPrev(Vec<u8>),
    }

    /// Short keys over few letters: prefixes, equal user keys and shared trailer bytes are common.
    fn user_key() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(
            prop_oneof![Just(0u8), Just(1), Just(b'a'), Just(b'b'), Just(255)],
            0..7,
        )
    }

    fn internal_key() -> impl Strategy<Value = Vec<u8>> {
        (
            user_key(),
            prop_oneof![0u64..4, 254u64..260],
            prop_oneof![Just(0u8), Just(1), Just(SEEK_TYPE)],
        )
            .prop_map(|(user, sequence, t)| internal(&user, sequence, t))
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            Just(Op::First),
            Just(Op::Last),
            Just(Op::Next),
            Just(Op::Next),
            Just(Op::Prev),
            Just(Op::Prev),
            internal_key().prop_map(Op::Seek),
            internal_key().prop_map(Op::SeekForPrev),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

        #[test]
        fn cursors_and_lookups_agree_with_a_sorted_list(
            keys in proptest::collection::vec(internal_key(), 0..60),
            ops in proptest::collection::vec(op(), 1..80),
            interval in prop_oneof![Just(1usize), 2usize..5, Just(16), Just(1000)],
            separated: bool,
            reverse: bool,
            buckets in proptest::option::of(0u16..40),
        ) {
            let comparator = if reverse { Comparator::ReverseBytewise } else { Comparator::Bytewise };
            let mut keys = keys;
            keys.sort_by(|a, b| comparator.cmp_internal(a, b));
            keys.dedup();
            let model: Vec<(Vec<u8>, Vec<u8>)> =
                keys.into_iter().enumerate().map(|(i, k)| (k, vec![b'v'; i * 7 % 200])).collect();
            let form = if separated { Form::Separated } else { Form::Plain };
            let mut builder = BlockBuilder::new(form, interval);
            if let Some(n) = buckets {
                builder = builder.hash_buckets(n);
            }
            for (key, value) in &model {
                builder.add(key, value);
            }
            let data = builder.finish();
            let layout = BlockLayout::parse(&data).unwrap();
            let mut scratch = Vec::new();
            let mut cursor = BlockCursor::new();
            let mut at: Option<usize> = None;
            let n = model.len();
            for op in ops {
                let not_less = |t: &[u8]| model.partition_point(|(k, _)| comparator.cmp_internal(k, t).is_lt());
                let arrived = match &op {
                    Op::First => { at = Some(0).filter(|_| n > 0); cursor.seek_to_first(&data, &layout) }
                    Op::Last => { at = n.checked_sub(1); cursor.seek_to_last(&data, &layout) }
                    Op::Next => { at = at.map(|i| i + 1).filter(|&i| i < n); cursor.next(&data, &layout) }
                    Op::Prev => { at = at.and_then(|i| i.checked_sub(1)); cursor.prev(&data, &layout) }
                    Op::Seek(t) => {
                        let i = not_less(t);
                        at = Some(i).filter(|&i| i < n);
                        let found = point_lookup(&data, &layout, comparator, t, &mut scratch).unwrap();
                        let same = at.filter(|&i| model[i].0[..model[i].0.len() - 8] == t[..t.len() - 8]);
                        match (found, at, same) {
                            (Lookup::PastEnd, None, _) | (Lookup::Absent, Some(_), None) => {}
                            (Lookup::Found { packed, start, end }, _, Some(i)) => {
                                prop_assert_eq!(&packed.to_le_bytes(), &model[i].0[model[i].0.len() - 8..]);
                                prop_assert_eq!(&data[start as usize..end as usize], &model[i].1[..]);
                            }
                            other => prop_assert!(false, "lookup {:?}", other),
                        }
                        cursor.seek(&data, &layout, comparator, t)
                    }
                    Op::SeekForPrev(t) => {
                        let i = not_less(t);
                        at = if i < n && model[i].0 == *t { Some(i) } else { i.checked_sub(1) };
                        cursor.seek_for_prev(&data, &layout, comparator, t)
                    }
                };
                prop_assert_eq!(arrived.unwrap(), at.is_some(), "{:?}", op);
                prop_assert_eq!(cursor.valid(), at.is_some());
                if let Some(i) = at {
                    prop_assert_eq!(cursor.key(), &model[i].0[..], "{:?}", op);
                    prop_assert_eq!(cursor.value(&data), &model[i].1[..]);
                }
            }
        }
    }
}
