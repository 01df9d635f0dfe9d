//! The block: sorted entries with shared key prefixes, and an array of restart points.
//!
//! ```text
//! entry*  restart_offset: fixed32 × R  [hash index]  [values_offset: fixed32]  footer: fixed32
//! entry = varint32 shared, varint32 non_shared, varint32 value_len, key suffix, value
//! ```
//!
//! A key is the first `shared` bytes of its predecessor plus the suffix; at a restart point
//! A key is the first `shared` bytes of its predecessor plus the suffix; at a restart point
//! `shared` is 0. The footer word holds R in bits 0 to 27 and flags above: a hash index, which is
//! skipped; keys and values in separate sections (since 11.0); a hint about key spacing, which is
//! ignored.
//!
//! A block is read and decompressed once, [`BlockLayout::parse`] parses its end once, and both are
//! kept in a cache. Lookups ([`point_lookup`]) and cursors ([`BlockCursor`]) take data and layout
//! as arguments and borrow neither, so a cursor can live next to a reference-counted buffer.
//!
//! Every offset is checked where it is used, so a layout used with the wrong bytes gives wrong
//! answers or errors, never a panic. Every step of a walk advances by at least two bytes, so all
//! loops end.

pub(crate) mod builder;
pub(crate) mod checksum;
pub(crate) mod compress;
pub(crate) mod compressor;
pub(crate) mod cursor;
pub(crate) mod head;
pub(crate) mod search;

use std::cmp::Ordering;
use std::ops::Range;

use crate::block::cursor::Cursor;
use crate::coding::{fixed32_at, varint32_at};
use crate::error::{Error, Result};
use crate::key::Comparator;

const _: () = assert!(usize::BITS >= 64, "offset arithmetic relies on 64-bit usize");

pub(crate) const FLAG_HASH_INDEX: u32 = 1 << 31;
pub(crate) const FLAG_RESERVED: u32 = 1 << 30;
const FLAG_UNIFORM: u32 = 1 << 29;
pub(crate) const FLAG_SEPARATED: u32 = 1 << 28;
pub(crate) const RESTART_COUNT_MASK: u32 = FLAG_SEPARATED - 1;

/// The offsets of a block's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    /// End of the entries (of the key section if values are separate).
    entries_end: u32,
    /// Start of the restart array.
    restarts: u32,
    restart_count: u32,
    /// Start of the value section; `u32::MAX` if each value follows its key.
    values: u32,
}

const NOT_SEPARATED: u32 = u32::MAX;

impl BlockLayout {
    /// Parses the end of an uncompressed block and checks the restart array.
    pub fn parse(data: &[u8]) -> Result<BlockLayout> {
        let Some(mut end) = data.len().checked_sub(4).filter(|_| u32::try_from(data.len()).is_ok())
        else {
            return Err(Error::corruption(format!("block of {} bytes", data.len())));
        };
        let footer = fixed32_at(data, end).unwrap_or(0);
        if footer & FLAG_RESERVED != 0 {
            return Err(Error::unsupported(format!(
                "block footer {footer:08x} uses a reserved bit"
            )));
        }
        let restart_count = footer & RESTART_COUNT_MASK;
        let overrun = || {
            Error::corruption(format!(
                "block footer {footer:08x} does not fit {} bytes",
                data.len()
            ))
        };
        let mut values = None;
        if footer & FLAG_SEPARATED != 0 {
            end = end.checked_sub(4).ok_or_else(overrun)?;
            values = fixed32_at(data, end);
        }
        if footer & FLAG_HASH_INDEX != 0 {
            end = end.checked_sub(2).ok_or_else(overrun)?;
            let buckets = usize::from(u16::from_le_bytes([data[end], data[end + 1]]));
            end = end.checked_sub(buckets).ok_or_else(overrun)?;
        }
        let restarts = end.checked_sub(restart_count as usize * 4).ok_or_else(overrun)?;
        if restart_count == 0 {
            return Err(Error::corruption("block without restart points"));
        }
        let entries_end = values.map_or(restarts, |v| v as usize);
        if entries_end > restarts {
            return Err(Error::corruption(format!(
                "values start at {entries_end}, behind them is {restarts}"
            )));
        }
        let layout = BlockLayout {
            entries_end: entries_end as u32,
            restarts: restarts as u32,
            restart_count,
            values: values.unwrap_or(NOT_SEPARATED),
        };
        layout.check_restarts(data)?;
        let _ = footer & FLAG_UNIFORM;
        Ok(layout)
    }

    fn check_restarts(&self, data: &[u8]) -> Result<()> {
        let array =
            &data[self.restarts as usize..self.restarts as usize + self.restart_count as usize * 4];
        let mut previous = None;
        for word in array.as_chunks::<4>().0 {
            let offset = u32::from_le_bytes(*word);
            let ascends = previous.map_or(offset == 0, |p| offset > p);
            let inside = offset < self.entries_end || (offset == 0 && self.restart_count == 1);
            if !ascends || !inside {
                return Err(Error::corruption(format!(
                    "restart offset {offset} behind {previous:?} in a block with {} bytes of entries",
                    self.entries_end
                )));
            }
            previous = Some(offset);
        }
        Ok(())
    }

    /// Number of restart points.
    pub fn restart_count(&self) -> u32 {
        self.restart_count
    }

    /// Whether the block has no entries.
    pub fn is_empty(&self) -> bool {
        self.entries_end == 0
    }

    /// Whether keys and values are in separate sections.
    pub(crate) fn is_separated(&self) -> bool {
        self.values != NOT_SEPARATED
    }

    /// Index of the last restart point before offset `at`; 0 if there is none.
    pub(crate) fn restart_before(&self, data: &[u8], at: usize) -> u32 {
        let (mut low, mut high) = (0, self.restart_count);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.restart(data, middle).is_some_and(|offset| offset < at) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low.saturating_sub(1)
    }

    /// The entries (the key section if values are separate); `None` if `data` is not this layout's
    /// block.
    #[inline(always)]
    pub(crate) fn entries<'d>(&self, data: &'d [u8]) -> Option<&'d [u8]> {
        data.get(..self.entries_end as usize)
    }

    /// Offset of restart point `index`.
    #[inline(always)]
    pub(crate) fn restart(&self, data: &[u8], index: u32) -> Option<usize> {
        if index >= self.restart_count {
            return None;
        }
        fixed32_at(data, self.restarts as usize + index as usize * 4).map(|o| o as usize)
    }
}

/// A decoded entry header, as offsets into the block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry<V> {
    /// Bytes taken from the previous key.
    pub shared: usize,
    /// Start of the key suffix.
    pub suffix: usize,
    /// End of the key suffix.
    pub suffix_end: usize,
    /// The decoded value.
    pub value: V,
    /// Start of the next entry.
    pub next: usize,
}

/// How to decode the entries of a kind of block: this is where data blocks and index blocks differ.
pub(crate) trait Entries: Copy {
    /// The decoded value of an entry.
    type Value: Copy + Default;
    /// Bytes at the end of each key that are not part of the user key.
    fn trailer_bytes(self) -> usize;
    /// The block's layout.
    fn layout(&self) -> &BlockLayout;
    /// Decodes the entry at `at`. `entries` is [`BlockLayout::entries`]; `restart` says that `at`
    /// is a restart point; `previous` is the value of the previous entry (the default at a restart
    /// point).
    fn entry(
        self,
        entries: &[u8],
        at: usize,
        restart: bool,
        previous: &Self::Value,
    ) -> Option<Entry<Self::Value>>;
    /// The key at a restart point, without decoding its value.
    fn restart_key(self, entries: &[u8], at: usize) -> Option<&[u8]>;
}

/// The range of a value in its block.
pub(crate) type ValueSpan = (u32, u32);

impl Entries for BlockLayout {
    type Value = ValueSpan;

    #[inline(always)]
    fn trailer_bytes(self) -> usize {
        crate::key::KEY_TRAILER_BYTES
    }

    #[inline(always)]
    fn layout(&self) -> &BlockLayout {
        self
    }

    #[inline(always)]
    fn entry(
        self,
        entries: &[u8],
        at: usize,
        restart: bool,
        previous: &ValueSpan,
    ) -> Option<Entry<ValueSpan>> {
        let (shared, non_shared, value_len, suffix) = header3(entries, at)?;
        if self.values == NOT_SEPARATED {
            let suffix_end = suffix + non_shared as usize;
            let next = suffix_end + value_len as usize;
            if next > entries.len() {
                return None;
            }
            let value = (suffix_end as u32, next as u32);
            return Some(Entry { shared: shared as usize, suffix, suffix_end, value, next });
        }
        let (start, suffix) = if restart {
            let (start, suffix) = varint32_at(entries, suffix)?;
            (self.values.checked_add(start)?, suffix)
        } else {
            (previous.1, suffix)
        };
        let next = suffix + non_shared as usize;
        let value_end = start.checked_add(value_len)?;
        if next > entries.len() || value_end > self.restarts || start < self.values {
            return None;
        }
        Some(Entry {
            shared: shared as usize,
            suffix,
            suffix_end: next,
            value: (start, value_end),
            next,
        })
    }

    #[inline(always)]
    fn restart_key(self, entries: &[u8], at: usize) -> Option<&[u8]> {
        let (shared, non_shared, _, mut suffix) = header3(entries, at)?;
        if self.values != NOT_SEPARATED {
            suffix = varint32_at(entries, suffix)?.1;
        }
        if shared != 0 {
            return None;
        }
        entries.get(suffix..suffix + non_shared as usize)
    }
}

/// Reads three varint32, nearly always of one byte each.
#[inline(always)]
pub(crate) fn header3(data: &[u8], at: usize) -> Option<(u32, u32, u32, usize)> {
    if let Some(&[a, b, c]) = data.get(at..)?.first_chunk::<3>()
        && (a | b | c) < 0x80
    {
        return Some((u32::from(a), u32::from(b), u32::from(c), at + 3));
    }
    let (a, at) = varint32_at(data, at)?;
    let (b, at) = varint32_at(data, at)?;
    let (c, at) = varint32_at(data, at)?;
    Some((a, b, c, at))
}

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

#[cold]
#[inline(never)]
pub(crate) fn bad_entry() -> Error {
    Error::corruption("block entry does not parse")
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

    #[test]
    fn a_reserved_footer_bit_is_refused() {
        let data = [0, 0, 0, 0, 1, 0, 0, 0x40];
        assert_eq!(BlockLayout::parse(&data).unwrap_err().kind(), crate::Kind::Unsupported);
    }

    #[test]
    fn impossible_restart_arrays_are_refused() {
        let mut b = BlockBuilder::new(Form::Plain, 1);
        b.add(b"aaaaaaaaa", b"1");
        b.add(b"bbbbbbbbb", b"2");
        let good = b.finish();
        BlockLayout::parse(&good).unwrap();
        let restarts = good.len() - 12;
        for (at, value) in
            [(0, 1u32), (4, 0), (4, restarts as u32), (4, u32::MAX), (8, 0), (8, 1 << 20)]
        {
            let mut bad = good.clone();
            bad[restarts + at..restarts + at + 4].copy_from_slice(&value.to_le_bytes());
            assert!(BlockLayout::parse(&bad).is_err(), "{value} at {at}");
        }
        for len in 0..8 {
            assert!(BlockLayout::parse(&vec![0xFF; len]).is_err());
        }
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
