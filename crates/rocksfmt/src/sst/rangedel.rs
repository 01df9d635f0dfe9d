//! Range tombstones of one file or memtable: which sequence deletes a key?
//!
//! A tombstone `(start, end, sequence)` deletes every entry with `start <= user key < end` and a
//! smaller sequence, in its own file and all older data. Blocks written by RocksDB hold
//! non-overlapping ranges, but overlapping and unsorted ones are legal.
//!
//! The set is an array sorted by start, read as an implicit binary tree in which each node stores
//! the largest end in its subtree (an interval tree). A query walks the path to the key and every
//! tombstone that covers it; for non-overlapping ranges that is a binary search. RocksDB cuts
//! ranges into fragments, which is as fast but needs memory quadratic in the number of nested
//! ranges; the tree needs a few words for each range.
//!
//! A file's tombstones count only inside the file's bounds, because compaction splits a tombstone
//! between files by bounds, not by rewriting it: see [`RangeTombstones::set_bounds`]. Bounds apply
//! to user keys, as in RocksDB when it picks the files of a point read.

use std::cmp::Ordering;

use crate::block::data::BlockCursor;
use crate::block::layout::BlockLayout;
use crate::error::{Error, Result};
use crate::key::{Comparator, InternalKey, SENTINEL_PACKED, ValueType};

/// The range of a key in the arena.
type Span = (u32, u32);

#[derive(Clone, Copy, Debug)]
struct Tombstone {
    start: Span,
    end: Span,
    sequence: u64,
    /// The largest end in the subtree of this element.
    end_max: Span,
}

/// Builds a set of range tombstones.
#[derive(Clone, Debug, Default)]
pub struct RangeTombstonesBuilder {
    comparator: Comparator,
    arena: Vec<u8>,
    items: Vec<Tombstone>,
}

impl RangeTombstonesBuilder {
    /// Starts an empty set with the column family's order.
    pub fn new(comparator: Comparator) -> RangeTombstonesBuilder {
        RangeTombstonesBuilder { comparator, ..RangeTombstonesBuilder::default() }
    }

    /// Adds a tombstone; drops it if its range is empty.
    pub fn add(&mut self, start: &[u8], end: &[u8], sequence: u64) -> Result<()> {
        if self.comparator.cmp_user(start, end).is_ge() {
            return Ok(());
        }
        let start = self.push(start)?;
        let end = self.push(end)?;
        self.items.push(Tombstone { start, end, sequence, end_max: end });
        Ok(())
    }

    fn push(&mut self, key: &[u8]) -> Result<Span> {
        let start = self.arena.len();
        match u32::try_from(start + key.len()) {
            Ok(end) => {
                self.arena.extend_from_slice(key);
                Ok((start as u32, end))
            }
            Err(_) => Err(Error::too_large("range tombstone keys of more than 4 GiB")),
        }
    }

    /// The finished set.
    pub fn finish(self) -> RangeTombstones {
        let RangeTombstonesBuilder { comparator, arena, mut items } = self;
        items.sort_by(|a, b| {
            comparator
                .cmp_user(slice(&arena, a.start), slice(&arena, b.start))
                .then(b.sequence.cmp(&a.sequence))
        });
        set_end_max(comparator, &arena, &mut items);
        RangeTombstones { comparator, arena, items, bounds: None }
    }
}

/// The range tombstones of one file or memtable.
#[derive(Clone, Debug, Default)]
pub struct RangeTombstones {
    comparator: Comparator,
    arena: Vec<u8>,
    items: Vec<Tombstone>,
    bounds: Option<Bounds>,
}

#[derive(Clone, Debug)]
struct Bounds {
    smallest: Vec<u8>,
    largest: Vec<u8>,
    largest_is_exclusive: bool,
}

/// The deletion that covers a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cover<'a> {
    /// Entries below this sequence are deleted.
    pub sequence: u64,
    /// First key of the covered range around the queried key.
    pub start: &'a [u8],
    /// The range ends before this key. (It covers the queried key, even if that equals `end`.)
    pub end: &'a [u8],
}

impl RangeTombstones {
    /// Reads a range-deletion block. `global_sequence` replaces the stored sequences of an ingested
    /// file.
    pub fn parse(
        data: &[u8],
        comparator: Comparator,
        global_sequence: Option<u64>,
    ) -> Result<RangeTombstones> {
        RangeTombstones::parse_inner(data, comparator, global_sequence)
            .map_err(|e| e.at("range-deletion block"))
    }

    fn parse_inner(
        data: &[u8],
        comparator: Comparator,
        global_sequence: Option<u64>,
    ) -> Result<RangeTombstones> {
        let layout = BlockLayout::parse(data)?;
        let mut builder = RangeTombstonesBuilder::new(comparator);
        let mut cursor = BlockCursor::new();
        let mut more = cursor.seek_to_first(data, &layout)?;
        while more {
            let key = InternalKey::parse(cursor.key())?;
            if key.value_type()? != ValueType::RangeDeletion {
                return Err(Error::corruption(format!("entry of type 0x{:02x}", key.packed as u8)));
            }
            builder.add(
                key.user_key,
                cursor.value(data),
                global_sequence.unwrap_or(key.sequence()),
            )?;
            more = cursor.next(data, &layout)?;
        }
        Ok(builder.finish())
    }

    /// Limits the tombstones to a file's bounds, the internal keys in the MANIFEST.
    pub fn set_bounds(&mut self, smallest: &[u8], largest: &[u8]) -> Result<()> {
        let (smallest, largest) = (InternalKey::parse(smallest)?, InternalKey::parse(largest)?);
        self.bounds = Some(Bounds {
            smallest: smallest.user_key.to_vec(),
            largest: largest.user_key.to_vec(),
            largest_is_exclusive: largest.packed == SENTINEL_PACKED,
        });
        Ok(())
    }

    /// Whether there are no tombstones.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Number of tombstones.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Bytes of memory in use.
    pub fn memory(&self) -> usize {
        self.arena.capacity() + self.items.capacity() * size_of::<Tombstone>()
    }

    /// All tombstones by ascending start, as stored: `(start, end, sequence)`, not limited to the
    /// bounds.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8], u64)> {
        self.items
            .iter()
            .map(|t| (slice(&self.arena, t.start), slice(&self.arena, t.end), t.sequence))
    }

    /// The largest sequence, at most `snapshot`, of a tombstone that covers the user key; 0 if
    /// there is none.
    #[inline]
    pub fn max_sequence(&self, user_key: &[u8], snapshot: u64) -> u64 {
        if self.items.is_empty() || !self.in_bounds(user_key) {
            return 0;
        }
        self.strongest(user_key, snapshot).map_or(0, |t| t.sequence)
    }

    /// Like [`RangeTombstones::max_sequence`], with the range around the key that this sequence
    /// covers, limited to the file's bounds. In data that is older throughout, an iterator may skip
    /// to the end of the range (or, backwards, to before its start).
    pub fn cover(&self, user_key: &[u8], snapshot: u64) -> Option<Cover<'_>> {
        if self.items.is_empty() || !self.in_bounds(user_key) {
            return None;
        }
        let found = self.strongest(user_key, snapshot)?;
        let mut cover = Cover {
            sequence: found.sequence,
            start: slice(&self.arena, found.start),
            end: slice(&self.arena, found.end),
        };
        if let Some(bounds) = &self.bounds {
            if self.comparator.cmp_user(cover.start, &bounds.smallest).is_lt() {
                cover.start = &bounds.smallest;
            }
            if self.comparator.cmp_user(cover.end, &bounds.largest).is_gt() {
                cover.end = &bounds.largest;
            }
        }
        Some(cover)
    }

    fn in_bounds(&self, user_key: &[u8]) -> bool {
        let Some(bounds) = &self.bounds else { return true };
        if self.comparator.cmp_user(user_key, &bounds.smallest).is_lt() {
            return false;
        }
        match self.comparator.cmp_user(user_key, &bounds.largest) {
            Ordering::Less => true,
            Ordering::Equal => !bounds.largest_is_exclusive,
            Ordering::Greater => false,
        }
    }

    /// The covering tombstone with the largest sequence, at most `snapshot`.
    fn strongest(&self, user_key: &[u8], snapshot: u64) -> Option<&Tombstone> {
        let mut best: Option<&Tombstone> = None;
        // Subtrees to visit; the depth is the logarithm of the count, which is below 2^32.
        let mut stack = [(0usize, 0usize); 40];
        stack[0] = (0, self.items.len());
        let mut depth = 1;
        while depth > 0 {
            depth -= 1;
            let (mut low, mut high) = stack[depth];
            while low < high {
                let middle = low + (high - low) / 2;
                let item = &self.items[middle];
                if self.comparator.cmp_user(slice(&self.arena, item.end_max), user_key).is_le() {
                    break;
                }
                if self.comparator.cmp_user(slice(&self.arena, item.start), user_key).is_gt() {
                    high = middle;
                    continue;
                }
                let covers =
                    self.comparator.cmp_user(user_key, slice(&self.arena, item.end)).is_lt();
                if covers
                    && item.sequence <= snapshot
                    && best.is_none_or(|b| b.sequence < item.sequence)
                {
                    best = Some(item);
                }
                if low < middle {
                    stack[depth] = (low, middle);
                    depth += 1;
                }
                low = middle + 1;
            }
        }
        best
    }
}

fn slice(arena: &[u8], span: Span) -> &[u8] {
    &arena[span.0 as usize..span.1 as usize]
}

/// Sets `end_max` of every subtree; returns the `end_max` of the whole slice.
fn set_end_max(comparator: Comparator, arena: &[u8], items: &mut [Tombstone]) -> Option<Span> {
    if items.is_empty() {
        return None;
    }
    let (left, rest) = items.split_at_mut(items.len() / 2);
    let (middle, right) = rest.split_first_mut()?;
    let mut end_max = middle.end;
    for child in [set_end_max(comparator, arena, left), set_end_max(comparator, arena, right)] {
        if let Some(end) = child
            && comparator.cmp_user(slice(arena, end), slice(arena, end_max)).is_gt()
        {
            end_max = end;
        }
    }
    middle.end_max = end_max;
    Some(end_max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{pack, put_internal_key};
    use crate::testing::block::{BlockBuilder, Form};
    use proptest::prelude::*;

    fn internal(user: &[u8], packed: u64) -> Vec<u8> {
        let mut key = Vec::new();
        put_internal_key(&mut key, user, packed);
        key
    }

    #[test]
    fn a_block_is_read_and_its_tombstones_end_before_their_end_key() {
        let mut b = BlockBuilder::new(Form::Plain, 1);
        b.add(&internal(b"b", pack(9, 0x0F)), b"d");
        b.add(&internal(b"b", pack(4, 0x0F)), b"d");
        b.add(&internal(b"x", pack(2, 0x0F)), b"z");
        let t = RangeTombstones::parse(&b.finish(), Comparator::Bytewise, None).unwrap();
        assert_eq!(t.len(), 3);
        for (key, snapshot, want) in
            [("a", 99, 0), ("b", 99, 9), ("c", 8, 4), ("c", 3, 0), ("d", 99, 0), ("y", 99, 2)]
        {
            assert_eq!(t.max_sequence(key.as_bytes(), snapshot), want, "{key} at {snapshot}");
        }
        assert_eq!(t.cover(b"c", 99), Some(Cover { sequence: 9, start: b"b", end: b"d" }));
    }

    #[test]
    fn bounds_cut_tombstones_and_a_sentinel_is_exclusive() {
        let mut b = RangeTombstonesBuilder::new(Comparator::Bytewise);
        b.add(b"a", b"z", 7).unwrap();
        let mut t = b.finish();
        t.set_bounds(&internal(b"c", pack(3, 1)), &internal(b"m", SENTINEL_PACKED)).unwrap();
        let covered = |t: &RangeTombstones, key: &[u8]| t.max_sequence(key, 99) == 7;
        assert!(!covered(&t, b"b") && covered(&t, b"c") && covered(&t, b"l") && !covered(&t, b"m"));
        assert_eq!(t.cover(b"d", 99), Some(Cover { sequence: 7, start: b"c", end: b"m" }));
        t.set_bounds(&internal(b"c", pack(3, 1)), &internal(b"m", pack(3, 1))).unwrap();
        assert!(covered(&t, b"m") && !covered(&t, b"n"));
    }

    #[test]
    fn a_point_entry_in_the_block_is_corruption() {
        let mut b = BlockBuilder::new(Form::Plain, 1);
        b.add(&internal(b"b", pack(9, 1)), b"d");
        assert!(RangeTombstones::parse(&b.finish(), Comparator::Bytewise, None).is_err());
    }

    #[test]
    fn an_ingested_file_deletes_at_its_global_sequence() {
        let mut b = BlockBuilder::new(Form::Plain, 1);
        b.add(&internal(b"b", pack(0, 0x0F)), b"d");
        let t = RangeTombstones::parse(&b.finish(), Comparator::Bytewise, Some(77)).unwrap();
        assert_eq!(t.max_sequence(b"c", 77), 77);
    }

    proptest! {
        #[test]
        fn queries_agree_with_a_check_of_every_tombstone(
            items in proptest::collection::vec((0u8..30, 0u8..30, 1u64..20), 0..60),
            reverse: bool,
        ) {
            let comparator = if reverse { Comparator::ReverseBytewise } else { Comparator::Bytewise };
            let mut b = RangeTombstonesBuilder::new(comparator);
            for &(start, end, sequence) in &items {
                b.add(&[start], &[end], sequence).unwrap();
            }
            let t = b.finish();
            for key in 0u8..31 {
                for snapshot in 0..20 {
                    let want = items.iter().filter(|&&(s, e, q)| {
                        let inside = if reverse { s >= key && key > e } else { s <= key && key < e };
                        inside && q <= snapshot
                    }).map(|i| i.2).max().unwrap_or(0);
                    prop_assert_eq!(t.max_sequence(&[key], snapshot), want, "key {} snapshot {}", key, snapshot);
                }
            }
        }
    }
}
