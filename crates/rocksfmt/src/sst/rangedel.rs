//! Range tombstones of one file or memtable: which sequence deletes a key?
//!
//! A tombstone `(start, end, sequence)` deletes every entry with `start <= user key < end` and a
//! smaller sequence, in its own file and all older data. Blocks written by RocksDB hold
//! non-overlapping ranges, but overlapping and unsorted ones are legal.
//!
//! The set answers from two arrays:
//!
//! - Marks: the user keys at which the newest tombstone changes, with the sequence from there on. A
//!   reader that sees all tombstones, which is nearly every reader, searches only these. `n`
//!   tombstones have at most `2n` marks, however they overlap.
//! - The tombstones by start, read as an implicit binary tree in which each node stores the largest
//!   end in its subtree (an interval tree). A reader that sees only older ones walks the path to
//!   the key and every tombstone that covers it.
//!
//! RocksDB stores all sequences with each fragment, which needs memory quadratic in the number of
//! nested ranges.
//!
//! A file's tombstones count only inside the file's bounds, because compaction splits a tombstone
//! between files by bounds, not by rewriting it: see [`RangeTombstones::set_bounds`]. Bounds apply
//! to user keys, as in RocksDB when it picks the files of a point read.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use crate::block::data::BlockCursor;
use crate::block::layout::BlockLayout;
use crate::error::{Error, Result};
use crate::key::{Comparator, InternalKey, SENTINEL_PACKED, ValueType};
use crate::sst::step_sort::StepSort;

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

/// From this key to that of the next mark, the newest tombstone has this sequence; 0 for none.
#[derive(Clone, Copy, Debug)]
struct Mark {
    key: Span,
    sequence: u64,
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

    /// Reserves room for as many tombstones and as many bytes of keys as the sets have together.
    pub fn reserve<'a>(&mut self, sets: impl IntoIterator<Item = &'a RangeTombstones>) {
        let (items, bytes) = sets
            .into_iter()
            .fold((0, 0), |(items, bytes), set| (items + set.items.len(), bytes + set.arena.len()));
        self.items.reserve_exact(items);
        self.arena.reserve_exact(bytes);
    }

    /// Adds all tombstones of a set, whatever its bounds.
    pub fn add_all(&mut self, set: &RangeTombstones) -> Result<()> {
        set.iter().try_for_each(|(start, end, sequence)| self.add(start, end, sequence))
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

    /// The finished set, at once. For many tombstones see [`RangeTombstonesBuilder::sort`].
    pub fn finish(self) -> RangeTombstones {
        self.sort().finish()
    }

    /// Begins to sort the tombstones, in steps.
    pub fn sort(self) -> RangeTombstonesSorting {
        let RangeTombstonesBuilder { comparator, arena, items } = self;
        RangeTombstonesSorting {
            comparator,
            order: StepSort::new(items.len() as u32),
            indexes: Vec::new(),
            unsorted: items,
            set: RangeTombstones { comparator, arena, ..RangeTombstones::default() },
            subtrees: None,
            marking: None,
        }
    }
}

/// Tombstones, subtrees or marks of one step.
const AT_ONCE: usize = if cfg!(test) { 3 } else { 512 };
/// Most marks on each side of a key over which [`RangeTombstones::cover`] joins tombstones.
const JOINED_MAX: usize = if cfg!(test) { 4 } else { 4096 };

/// A set of range tombstones being sorted, in steps of less than a millisecond, for jobs that share
/// their core with others.
#[derive(Clone, Debug)]
pub struct RangeTombstonesSorting {
    comparator: Comparator,
    order: StepSort,
    /// The order of the tombstones, once it is known.
    indexes: Vec<u32>,
    unsorted: Vec<Tombstone>,
    set: RangeTombstones,
    /// Once the tombstones are in order: the subtrees without their largest end. Those that depend
    /// on others come before them.
    subtrees: Option<Vec<(usize, usize)>>,
    /// Once all subtrees have theirs.
    marking: Option<Marking>,
}

impl RangeTombstonesSorting {
    /// Does the next step; false if none was left.
    pub fn step(&mut self) -> bool {
        if let Some(marking) = &mut self.marking {
            let more = marking.step(&mut self.set);
            if !more {
                self.set.marks.shrink_to_fit();
            }
            return more;
        }
        if self.subtrees.is_some() {
            self.end_subtrees();
        } else if !self.indexes.is_empty() || self.unsorted.is_empty() {
            self.arrange();
        } else {
            self.sort();
        }
        true
    }

    fn sort(&mut self) {
        let RangeTombstonesSorting { comparator, order, unsorted, set, .. } = self;
        let by_start = |a: u32, b: u32| {
            let (a, b) = (unsorted[a as usize], unsorted[b as usize]);
            let (start, other) = (slice(&set.arena, a.start), slice(&set.arena, b.start));
            comparator.cmp_user(start, other).then(b.sequence.cmp(&a.sequence))
        };
        if !order.step(by_start) {
            self.indexes = std::mem::replace(order, StepSort::new(0)).into_indexes();
            self.set.items.reserve_exact(self.unsorted.len());
        }
    }

    /// Puts tombstones into their places.
    fn arrange(&mut self) {
        let RangeTombstones { items, sequences, .. } = &mut self.set;
        let from = items.len();
        for &at in self.indexes.iter().skip(from).take(AT_ONCE) {
            let item = self.unsorted[at as usize];
            *sequences = match items.is_empty() {
                true => (item.sequence, item.sequence),
                false => (sequences.0.min(item.sequence), sequences.1.max(item.sequence)),
            };
            items.push(item);
        }
        if items.len() < self.unsorted.len() {
            return;
        }
        let mut subtrees = vec![(0, items.len())];
        let mut at = 0;
        while let Some(&(low, high)) = subtrees.get(at) {
            if high - low > AT_ONCE {
                let middle = low + (high - low) / 2;
                subtrees.extend([(low, middle), (middle + 1, high)]);
            }
            at += 1;
        }
        self.indexes = Vec::new();
        self.unsorted = Vec::new();
        self.subtrees = Some(subtrees);
    }

    /// Sets the largest ends of subtrees, the small ones first.
    fn end_subtrees(&mut self) {
        let RangeTombstones { arena, items, .. } = &mut self.set;
        let Some(subtrees) = &mut self.subtrees else { return };
        let mut left = AT_ONCE;
        while let Some((low, high)) = subtrees.pop() {
            if high - low > AT_ONCE {
                join_end_max(self.comparator, arena, items, (low, high));
                left = left.saturating_sub(1);
            } else {
                set_end_max(self.comparator, arena, &mut items[low..high]);
                left = left.saturating_sub(high - low);
            }
            if left == 0 {
                return;
            }
        }
        self.marking = Some(Marking {
            begun: BinaryHeap::new(),
            next: 0,
            at: items.first().map(|first| first.start),
        });
    }

    /// Does all remaining steps and returns the result.
    pub fn finish(mut self) -> RangeTombstones {
        while self.step() {}
        self.set
    }
}

/// Finds the marks of tombstones sorted by start.
#[derive(Clone, Debug)]
struct Marking {
    /// The tombstones that have begun, the newest first; those that have ended leave at the top.
    begun: BinaryHeap<(u64, usize)>,
    next: usize,
    /// The next key at which a mark may be; `None` after the last.
    at: Option<Span>,
}

impl Marking {
    /// Finds some marks; false if none is left.
    fn step(&mut self, set: &mut RangeTombstones) -> bool {
        let RangeTombstones { comparator, arena, items, marks, .. } = set;
        let Marking { begun, next, at } = self;
        let is_before =
            |a: Span, b: Span| comparator.cmp_user(slice(arena, a), slice(arena, b)).is_lt();
        let mut left = AT_ONCE;
        while let Some(key) = *at
            && left > 0
        {
            left -= 1;
            while left > 0
                && let Some(item) = items.get(*next)
                && !is_before(key, item.start)
            {
                begun.push((item.sequence, *next));
                *next += 1;
                left -= 1;
            }
            if items.get(*next).is_some_and(|item| !is_before(key, item.start)) {
                // Many begin at this key.
                return true;
            }
            while begun.peek().is_some_and(|&(_, index)| !is_before(key, items[index].end)) {
                begun.pop();
            }
            let newest = begun.peek().map(|&(sequence, index)| (sequence, items[index].end));
            let sequence = newest.map_or(0, |(sequence, _)| sequence);
            if marks.last().is_none_or(|last| last.sequence != sequence) {
                marks.push(Mark { key, sequence });
            }
            *at = match (newest, items.get(*next)) {
                (Some((_, end)), Some(item)) if is_before(item.start, end) => Some(item.start),
                (Some((_, end)), _) => Some(end),
                (None, Some(item)) => Some(item.start),
                (None, None) => None,
            };
        }
        at.is_some()
    }
}

/// The range tombstones of one file or memtable.
#[derive(Clone, Debug, Default)]
pub struct RangeTombstones {
    comparator: Comparator,
    arena: Vec<u8>,
    items: Vec<Tombstone>,
    marks: Vec<Mark>,
    /// The smallest and the largest sequence.
    sequences: (u64, u64),
    bounds: Option<Bounds>,
}

#[derive(Clone, Debug)]
struct Bounds {
    smallest: Vec<u8>,
    largest: Vec<u8>,
    largest_is_exclusive: bool,
}

/// Reads a range-deletion block in steps of less than a millisecond, like
/// [`RangeTombstones::parse`]. The block is passed to each.
#[derive(Debug)]
pub struct RangeTombstonesParsing {
    layout: BlockLayout,
    cursor: BlockCursor,
    more: bool,
    global_sequence: Option<u64>,
    builder: RangeTombstonesBuilder,
}

impl RangeTombstonesParsing {
    /// Begins with a block.
    ///
    /// # Errors
    /// Corruption, as for [`RangeTombstonesParsing::step`].
    pub fn new(
        data: &[u8],
        comparator: Comparator,
        global_sequence: Option<u64>,
    ) -> Result<RangeTombstonesParsing> {
        let layout = BlockLayout::parse(data)?;
        let mut cursor = BlockCursor::new();
        let more = cursor.seek_to_first(data, &layout)?;
        let builder = RangeTombstonesBuilder::new(comparator);
        Ok(RangeTombstonesParsing { layout, cursor, more, global_sequence, builder })
    }

    /// Reads some tombstones; false if none is left.
    ///
    /// # Errors
    /// Corruption: the block is damaged, or has other entries.
    pub fn step(&mut self, data: &[u8]) -> Result<bool> {
        for _ in 0..AT_ONCE {
            if !self.more {
                return Ok(false);
            }
            let key = InternalKey::parse(self.cursor.key())?;
            if key.value_type()? != ValueType::RangeDeletion {
                return Err(Error::corruption(format!("entry of type 0x{:02x}", key.packed as u8)));
            }
            let sequence = self.global_sequence.unwrap_or(key.sequence());
            self.builder.add(key.user_key, self.cursor.value(data), sequence)?;
            self.more = self.cursor.next(data, &self.layout)?;
        }
        Ok(true)
    }

    /// Begins to sort the tombstones, after the last step.
    pub fn sort(self) -> RangeTombstonesSorting {
        self.builder.sort()
    }
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

/// The newest visible deletion of a key, and the range around the key where it is the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch<'a> {
    /// Entries below this sequence are deleted; 0 if no tombstone covers the key.
    pub sequence: u64,
    /// First key of the range; `None` if nothing limits it.
    pub start: Option<&'a [u8]>,
    /// The range ends before this key; `None` if nothing limits it. (The queried key belongs to
    /// the range, even if it equals `end`.)
    pub end: Option<&'a [u8]>,
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
        let mut parsing = RangeTombstonesParsing::new(data, comparator, global_sequence)?;
        while parsing.step(data)? {}
        Ok(parsing.sort().finish())
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
        self.arena.capacity()
            + self.items.capacity() * size_of::<Tombstone>()
            + self.marks.capacity() * size_of::<Mark>()
    }

    /// The smallest sequence; 0 without tombstones.
    pub fn smallest_sequence(&self) -> u64 {
        self.sequences.0
    }

    /// The largest sequence; 0 without tombstones.
    pub fn largest_sequence(&self) -> u64 {
        self.sequences.1
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
        if snapshot < self.sequences.0 || self.items.is_empty() || !self.in_bounds(user_key) {
            return 0;
        }
        if snapshot < self.sequences.1 {
            return self.strongest(user_key, snapshot).map_or(0, |t| t.sequence);
        }
        self.mark(user_key).map_or(0, |at| self.marks[at].sequence)
    }

    /// Like [`RangeTombstones::max_sequence`], with a range around the key in which every key is
    /// deleted below this sequence or a larger one, limited to the file's bounds. In data whose
    /// sequences are at most `data_sequence` and below the cover's, an iterator may skip to the end
    /// of the range (or, backwards, to before its start): adjacent tombstones are joined as long as
    /// all are newer than `data_sequence`, some thousands of them.
    pub fn cover(&self, user_key: &[u8], snapshot: u64, data_sequence: u64) -> Option<Cover<'_>> {
        if snapshot < self.sequences.0 || self.items.is_empty() || !self.in_bounds(user_key) {
            return None;
        }
        let mut cover = if snapshot < self.sequences.1 {
            let found = self.strongest(user_key, snapshot)?;
            Cover {
                sequence: found.sequence,
                start: slice(&self.arena, found.start),
                end: slice(&self.arena, found.end),
            }
        } else {
            let at = self.mark(user_key).filter(|&at| self.marks[at].sequence > 0)?;
            let least = self.marks[at].sequence.min(data_sequence.saturating_add(1));
            let reaches = |mark: &Mark| mark.sequence >= least;
            let before = self.marks[..at].iter().rev().take(JOINED_MAX);
            let before = before.take_while(|mark| reaches(mark)).count();
            let after = self.marks[at..].iter().take(JOINED_MAX);
            let after = after.take_while(|mark| reaches(mark)).count();
            Cover {
                sequence: self.marks[at].sequence,
                start: slice(&self.arena, self.marks[at - before].key),
                // The last mark has no tombstone.
                end: slice(&self.arena, self.marks[at + after].key),
            }
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

    /// The newest deletion of a key that `snapshot` sees, with the keys around it that have the
    /// same: an iterator asks again when it leaves them.
    pub fn stretch<'a>(&'a self, user_key: &'a [u8], snapshot: u64) -> Stretch<'a> {
        let everywhere = Stretch { sequence: 0, start: None, end: None };
        if snapshot < self.sequences.0 || self.items.is_empty() {
            return everywhere;
        }
        if let Some(bounds) = &self.bounds {
            if self.comparator.cmp_user(user_key, &bounds.smallest).is_lt() {
                return Stretch { end: Some(&bounds.smallest), ..everywhere };
            }
            if !self.in_bounds(user_key) {
                return Stretch { start: Some(user_key), ..everywhere };
            }
        }
        if snapshot < self.sequences.1 {
            // Only this key is known.
            let sequence = self.strongest(user_key, snapshot).map_or(0, |t| t.sequence);
            return Stretch { sequence, start: Some(user_key), end: Some(user_key) };
        }
        let key = |at: usize| self.marks.get(at).map(|mark| slice(&self.arena, mark.key));
        let mut stretch = match self.mark(user_key) {
            None => Stretch { end: key(0), ..everywhere },
            Some(at) => {
                Stretch { sequence: self.marks[at].sequence, start: key(at), end: key(at + 1) }
            }
        };
        if let Some(bounds) = &self.bounds {
            let order = |key: &[u8], bound: &[u8]| self.comparator.cmp_user(key, bound);
            if stretch.start.is_none_or(|start| order(start, &bounds.smallest).is_lt()) {
                stretch.start = Some(&bounds.smallest);
            }
            if stretch.end.is_none_or(|end| order(end, &bounds.largest).is_gt()) {
                stretch.end = Some(&bounds.largest);
            }
        }
        stretch
    }

    /// The last mark at or before a key.
    #[inline]
    fn mark(&self, user_key: &[u8]) -> Option<usize> {
        let is_at_or_before =
            |mark: &Mark| self.comparator.cmp_user(slice(&self.arena, mark.key), user_key).is_le();
        self.marks.partition_point(is_at_or_before).checked_sub(1)
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

/// Sets `end_max` of every subtree.
fn set_end_max(comparator: Comparator, arena: &[u8], items: &mut [Tombstone]) {
    let middle = items.len() / 2;
    if let Some((left, right)) = items.split_at_mut_checked(middle)
        && let Some((_, right)) = right.split_first_mut()
    {
        set_end_max(comparator, arena, left);
        set_end_max(comparator, arena, right);
        join_end_max(comparator, arena, items, (0, items.len()));
    }
}

/// Sets the `end_max` of a subtree's root, whose children have theirs.
fn join_end_max(
    comparator: Comparator,
    arena: &[u8],
    items: &mut [Tombstone],
    (low, high): (usize, usize),
) {
    let root = |low: usize, high: usize| low + (high - low) / 2;
    let middle = root(low, high);
    let mut end_max = items[middle].end;
    for (low, high) in [(low, middle), (middle + 1, high)] {
        if low < high {
            let end = items[root(low, high)].end_max;
            if comparator.cmp_user(slice(arena, end), slice(arena, end_max)).is_gt() {
                end_max = end;
            }
        }
    }
    items[middle].end_max = end_max;
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
        assert_eq!(t.cover(b"c", 99, 0), Some(Cover { sequence: 9, start: b"b", end: b"d" }));
    }

    #[test]
    fn bounds_cut_tombstones_and_a_sentinel_is_exclusive() {
        let mut b = RangeTombstonesBuilder::new(Comparator::Bytewise);
        b.add(b"a", b"z", 7).unwrap();
        let mut t = b.finish();
        t.set_bounds(&internal(b"c", pack(3, 1)), &internal(b"m", SENTINEL_PACKED)).unwrap();
        let covered = |t: &RangeTombstones, key: &[u8]| t.max_sequence(key, 99) == 7;
        assert!(!covered(&t, b"b") && covered(&t, b"c") && covered(&t, b"l") && !covered(&t, b"m"));
        assert_eq!(t.cover(b"d", 99, 0), Some(Cover { sequence: 7, start: b"c", end: b"m" }));
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

    #[test]
    fn many_tombstones_are_sorted_in_short_steps() {
        let mut b = RangeTombstonesBuilder::new(Comparator::Bytewise);
        let count = 10_000u32;
        for n in 0..count {
            // Each overlaps two others, and many begin at one key.
            let start = if n % 10 == 0 { 0 } else { n.wrapping_mul(7919) % count };
            b.add(&start.to_be_bytes(), &(start + 3).to_be_bytes(), u64::from(n) + 1).unwrap();
        }
        let mut sorting = b.sort();
        let mut done = 0;
        let mut steps = 0;
        while sorting.step() {
            let now = sorting.set.items.len() + sorting.set.marks.len();
            assert!(now - done <= AT_ONCE, "{} in one step", now - done);
            (done, steps) = (now, steps + 1);
        }
        assert!(steps >= 3 * count as usize / AT_ONCE, "{steps} steps");
        assert_eq!(sorting.finish().len(), count as usize);
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
                    let stretch = t.stretch(&[key], snapshot).sequence;
                    prop_assert_eq!(stretch, want, "stretch of {} at {}", key, snapshot);
                }
            }
        }

        #[test]
        fn the_ranges_around_a_key_have_what_they_say(
            items in proptest::collection::vec((0u8..30, 0u8..30, 1u64..20), 0..40),
            bounds in proptest::option::of((0u8..30, 0u8..30, any::<bool>())),
            snapshot in 0u64..21,
            data in 0u64..20,
        ) {
            let mut b = RangeTombstonesBuilder::new(Comparator::Bytewise);
            for &(start, end, sequence) in &items {
                b.add(&[start], &[end], sequence).unwrap();
            }
            let mut t = b.finish();
            if let Some((a, b, sentinel)) = bounds {
                let (low, high) = (a.min(b), a.max(b));
                let packed = if sentinel { SENTINEL_PACKED } else { pack(3, 1) };
                t.set_bounds(&internal(&[low], pack(3, 1)), &internal(&[high], packed)).unwrap();
            }
            for key in 0u8..31 {
                let key = [key];
                let within = |start: Option<&[u8]>, end: Option<&[u8]>| {
                    let (start, end) = (start.map(<[u8]>::to_vec), end.map(<[u8]>::to_vec));
                    (0u8..31).filter(move |&other| {
                        start.as_ref().is_none_or(|s| s[..] <= [other][..])
                            && end.as_ref().is_none_or(|e| [other][..] < e[..])
                    })
                };
                let stretch = t.stretch(&key, snapshot);
                for other in within(stretch.start, stretch.end) {
                    prop_assert_eq!(t.max_sequence(&[other], snapshot), stretch.sequence);
                }
                let cover = t.cover(&key, snapshot, data);
                prop_assert_eq!(cover.map_or(0, |c| c.sequence), stretch.sequence);
                if let Some(cover) = cover.filter(|cover| cover.sequence > data) {
                    for other in within(Some(cover.start), Some(cover.end)) {
                        prop_assert!(t.max_sequence(&[other], snapshot) > data);
                    }
                }
            }
        }
    }
}
