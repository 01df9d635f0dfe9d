//! The range tombstones of a flush or a compaction: which entries they delete, and which of them
//! the output keeps.
//!
//! 1. [`RangeDelAggregator::add`] takes every tombstone of the inputs, in any order. Those of a
//!    file count only within the bounds of the file's atomic unit: [`clip`] them first.
//! 2. [`RangeDelAggregator::cut`] cuts them, step by step, into fragments: ranges that do not
//!    overlap, each with the sequences of its tombstones. Of the tombstones that the same readers
//!    see, each fragment keeps only the newest.
//! 3. [`Fragments::max_sequence`] says what is deleted, as keys ascend. An entry may be dropped
//!    only if a tombstone of the same stripe covers it: every reader that sees one sees the other.
//! 4. [`Fragments::between`] gives the fragments of one output file, cut to the user keys at which
//!    the output is cut. The file's largest key is then the exclusive sentinel, which
//!    [`SstBuilder`](crate::SstBuilder) writes. The versions of a user key must be in one file.
//!
//! A stripe is what lies between two snapshots: an entry belongs to the smallest snapshot that sees
//! it, or to the tip.
//!
//! `n` tombstones have at most `2n` fragments, with a sequence for each stripe in which a tombstone
//! covers them.

use std::borrow::Cow;
use std::cell::Cell;
use std::cmp::Ordering;
use std::collections::BTreeSet;

use crate::error::{Error, Result};
use crate::key::{Comparator, InternalKey, SENTINEL_PACKED};
use crate::sst::step_sort::StepSort;

/// The range of a key in the arena.
type Span = (u32, u32);

fn slice(arena: &[u8], span: Span) -> &[u8] {
    &arena[span.0 as usize..span.1 as usize]
}

/// Collects the range tombstones of a flush or a compaction.
#[derive(Clone, Debug)]
pub struct RangeDelAggregator {
    comparator: Comparator,
    snapshots: Vec<u64>,
    arena: Vec<u8>,
    items: Vec<Item>,
}

#[derive(Clone, Copy, Debug)]
struct Item {
    start: Span,
    end: Span,
    sequence: u64,
}

impl RangeDelAggregator {
    /// An empty set. `snapshots` are the sequences at which readers read, except the newest ones.
    pub fn new(comparator: Comparator, mut snapshots: Vec<u64>) -> RangeDelAggregator {
        snapshots.sort_unstable();
        snapshots.dedup();
        RangeDelAggregator { comparator, snapshots, arena: Vec::new(), items: Vec::new() }
    }

    /// Adds a tombstone; drops it if its range is empty.
    ///
    /// # Errors
    /// The keys have more than 4 GiB.
    pub fn add(&mut self, start: &[u8], end: &[u8], sequence: u64) -> Result<()> {
        if self.comparator.cmp_user(start, end).is_ge() {
            return Ok(());
        }
        let (start, end) = (self.push(start)?, self.push(end)?);
        self.items.push(Item { start, end, sequence });
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

    /// Begins to cut the tombstones into fragments.
    pub fn cut(self) -> Cutting {
        let len = self.items.len() as u32;
        Cutting {
            by_start: StepSort::new(len),
            by_end: StepSort::new(len),
            sorted: None,
            over: BTreeSet::new(),
            fragments: Vec::new(),
            sequences: Vec::new(),
            all: self,
        }
    }

    /// Cuts the tombstones into fragments, at once.
    pub fn finish(self) -> Fragments {
        let mut cutting = self.cut();
        while cutting.step() {}
        cutting.finish()
    }

    fn order(&self, a: Span, b: Span) -> Ordering {
        self.comparator.cmp_user(slice(&self.arena, a), slice(&self.arena, b))
    }
}

/// Fragments in one step of [`Cutting`].
const FRAGMENTS_AT_ONCE: usize = 512;

/// Cuts tombstones into fragments, in steps of less than a millisecond.
#[derive(Clone, Debug)]
pub struct Cutting {
    all: RangeDelAggregator,
    by_start: StepSort,
    by_end: StepSort,
    /// The order of the tombstones, once it is known.
    sorted: Option<Sorted>,
    /// The tombstones over the present range, by sequence.
    over: BTreeSet<(u64, u32)>,
    fragments: Vec<Fragment>,
    sequences: Vec<u64>,
}

/// Tombstones by start and by end, and how many of each have begun and ended.
#[derive(Clone, Debug)]
struct Sorted {
    by_start: Vec<u32>,
    by_end: Vec<u32>,
    begun: usize,
    ended: usize,
}

impl Cutting {
    /// Does the next step; false if none was left.
    pub fn step(&mut self) -> bool {
        let Cutting { all, by_start, by_end, .. } = self;
        let item = |at: u32| all.items[at as usize];
        let Some(mut sorted) = self.sorted.take() else {
            let more = by_start.step(|a, b| all.order(item(a).start, item(b).start))
                || by_end.step(|a, b| all.order(item(a).end, item(b).end));
            if !more {
                let take =
                    |sort: &mut StepSort| std::mem::replace(sort, StepSort::new(0)).into_indexes();
                let (by_start, by_end) = (take(by_start), take(by_end));
                self.sorted = Some(Sorted { by_start, by_end, begun: 0, ended: 0 });
            }
            return true;
        };
        let mut left = FRAGMENTS_AT_ONCE;
        while left > 0 && sorted.ended < sorted.by_end.len() {
            self.fragment(&mut sorted);
            left -= 1;
        }
        let more = sorted.ended < sorted.by_end.len();
        self.sorted = Some(sorted);
        more
    }

    /// Cuts the next fragment.
    fn fragment(&mut self, sorted: &mut Sorted) {
        let Cutting { all, over, fragments, sequences, .. } = self;
        let item = |at: u32| all.items[at as usize];
        let Sorted { by_start, by_end, begun, ended } = sorted;
        let end = item(by_end[*ended]).end;
        let at = match by_start.get(*begun) {
            Some(&next) if all.order(item(next).start, end).is_lt() => item(next).start,
            _ => end,
        };
        while let Some(&next) = by_start.get(*begun)
            && all.order(item(next).start, at).is_le()
        {
            over.insert((item(next).sequence, next));
            *begun += 1;
        }
        while let Some(&next) = by_end.get(*ended)
            && all.order(item(next).end, at).is_le()
        {
            over.remove(&(item(next).sequence, next));
            *ended += 1;
        }
        let first = sequences.len();
        newest_by_stripe(over, &all.snapshots, sequences);
        // A fragment ends where the next one begins, or where the gap after it does.
        let same = match fragments.last() {
            Some(last) => sequences[last.first as usize..first] == sequences[first..],
            None => sequences.is_empty(),
        };
        match same {
            true => sequences.truncate(first),
            false => fragments.push(Fragment { start: at, first: first as u32 }),
        }
    }

    /// The fragments, after the last step.
    pub fn finish(self) -> Fragments {
        let RangeDelAggregator { comparator, arena, .. } = self.all;
        let Cutting { fragments, sequences, .. } = self;
        Fragments { comparator, arena, fragments, sequences, at: Cell::new(0) }
    }
}

/// Appends the newest sequence of each stripe, the newest first.
fn newest_by_stripe(over: &BTreeSet<(u64, u32)>, snapshots: &[u64], out: &mut Vec<u64>) {
    let mut next = over.last();
    while let Some(&(sequence, _)) = next {
        out.push(sequence);
        // The next older stripe ends with the largest snapshot that does not see this one.
        let older = snapshots.partition_point(|&snapshot| snapshot < sequence);
        next = match older.checked_sub(1) {
            Some(at) => over.range(..=(snapshots[at], u32::MAX)).next_back(),
            None => None,
        };
    }
}

/// The sequences over a range; the range ends where the next fragment starts.
#[derive(Clone, Copy, Debug)]
struct Fragment {
    start: Span,
    /// The index of its first sequence; they end with the first one of the next fragment.
    first: u32,
}

/// A range that a tombstone deletes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeTombstone<'a> {
    /// First user key deleted.
    pub start: &'a [u8],
    /// First user key kept.
    pub end: &'a [u8],
    /// Entries below this sequence are deleted.
    pub sequence: u64,
}

/// The range tombstones of a flush or a compaction, cut into fragments.
#[derive(Clone, Debug)]
pub struct Fragments {
    comparator: Comparator,
    arena: Vec<u8>,
    /// By ascending start. Gaps are fragments without sequences; the last one is such a gap.
    fragments: Vec<Fragment>,
    /// For each fragment, descending.
    sequences: Vec<u64>,
    /// The number of fragments that start at or before the key of the last query.
    at: Cell<usize>,
}

impl Fragments {
    /// Whether there are no tombstones.
    pub fn is_empty(&self) -> bool {
        self.fragments.is_empty()
    }

    /// The largest sequence, at most `at`, of a tombstone that covers the user key; 0 if there is
    /// none. `at` is one of the snapshots, or newer than all tombstones. Ascending keys are fast.
    #[inline]
    pub fn max_sequence(&self, user_key: &[u8], at: u64) -> u64 {
        if self.fragments.is_empty() {
            return 0;
        }
        self.advance(user_key);
        let Some(fragment) = self.at.get().checked_sub(1) else { return 0 };
        let over = self.sequences(fragment);
        over.iter().copied().find(|&sequence| sequence <= at).unwrap_or(0)
    }

    /// Moves `at` to a key.
    fn advance(&self, user_key: &[u8]) {
        let starts = |at: usize| {
            self.fragments.get(at).is_some_and(|fragment| {
                self.comparator.cmp_user(slice(&self.arena, fragment.start), user_key).is_le()
            })
        };
        let mut at = self.at.get();
        if at > 0 && !starts(at - 1) {
            // The keys went back.
            at = 0;
        }
        let mut step = 1;
        while starts(at + step - 1) {
            at += step;
            step *= 2;
        }
        while step > 0 {
            if starts(at + step - 1) {
                at += step;
            }
            step /= 2;
        }
        self.at.set(at);
    }

    /// The range of a fragment by its number, with an exclusive end; `None` after the last one.
    /// Fragments are in the order of their keys.
    pub fn range(&self, at: usize) -> Option<(&[u8], &[u8])> {
        // The last one is a gap.
        let end = slice(&self.arena, self.fragments.get(at + 1)?.start);
        Some((slice(&self.arena, self.fragments[at].start), end))
    }

    /// The first fragment that ends after a user key.
    pub fn find(&self, user_key: &[u8]) -> usize {
        let starts = |fragment: &Fragment| {
            self.comparator.cmp_user(slice(&self.arena, fragment.start), user_key).is_le()
        };
        self.fragments.partition_point(starts).saturating_sub(1)
    }

    /// The sequences of a fragment, descending; none of a gap.
    pub fn sequences(&self, at: usize) -> &[u64] {
        let first = self.fragments[at].first as usize;
        let end = self.fragments.get(at + 1).map_or(self.sequences.len(), |f| f.first as usize);
        &self.sequences[first..end]
    }

    /// The tombstones from user key `from` to before `to`, cut to these, in the order of a table:
    /// by start, those of a range the newest first. `None` does not limit.
    pub fn between<'a>(
        &'a self,
        from: Option<&'a [u8]>,
        to: Option<&'a [u8]>,
    ) -> impl Iterator<Item = RangeTombstone<'a>> {
        let order = self.comparator;
        let start_of = move |at: usize| slice(&self.arena, self.fragments[at].start);
        let first = from.map_or(0, |from| self.find(from));
        // The last fragment is a gap.
        let all = first..self.fragments.len().saturating_sub(1);
        all.take_while(move |&at| to.is_none_or(|to| order.cmp_user(start_of(at), to).is_lt()))
            .flat_map(move |at| {
                let (start, end) = (start_of(at), start_of(at + 1));
                let start =
                    from.filter(|from| order.cmp_user(start, from).is_lt()).unwrap_or(start);
                let end = to.filter(|to| order.cmp_user(end, to).is_gt()).unwrap_or(end);
                let some = order.cmp_user(start, end).is_lt();
                let sequences = if some { self.sequences(at) } else { &[] };
                sequences.iter().map(move |&sequence| RangeTombstone { start, end, sequence })
            })
    }
}

/// Start and exclusive end of a clipped range.
pub type ClippedRange<'a> = (&'a [u8], Cow<'a, [u8]>);

/// Clips a file's tombstone to the bounds of the file's atomic unit, given as internal keys: the
/// smallest key of the unit's first file and the largest of its last. An atomic unit is a run of
/// adjacent files of a level whose borders share a user key. `None`: nothing is left.
///
/// # Errors
/// Corruption for bounds that are not internal keys; unsupported if the range would have to end
/// directly after a key, and the order of keys has no key there. (Stock RocksDB writes no such
/// bounds: the last key of a unit is a sentinel wherever a tombstone ends after it.)
pub fn clip<'a>(
    comparator: Comparator,
    (start, end): (&'a [u8], &'a [u8]),
    smallest: &'a [u8],
    largest: &'a [u8],
) -> Result<Option<ClippedRange<'a>>> {
    let smallest = InternalKey::parse(smallest)?.user_key;
    let largest = InternalKey::parse(largest)?;
    let start = if comparator.cmp_user(start, smallest).is_lt() { smallest } else { start };
    let end = if comparator.cmp_user(end, largest.user_key).is_le() {
        Cow::Borrowed(end)
    } else if largest.packed == SENTINEL_PACKED {
        Cow::Borrowed(largest.user_key)
    } else if comparator == Comparator::Bytewise {
        // Directly after the largest key, which is included.
        let mut after = largest.user_key.to_vec();
        after.push(0);
        Cow::Owned(after)
    } else {
        return Err(Error::unsupported("a range tombstone that ends with the last key of a file"));
    };
    Ok(comparator.cmp_user(start, &end).is_lt().then_some((start, end)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::key::{pack, put_internal_key};

    fn internal(user: &[u8], packed: u64) -> Vec<u8> {
        let mut key = Vec::new();
        put_internal_key(&mut key, user, packed);
        key
    }

    fn fragments(items: &[(u8, u8, u64)], snapshots: &[u64]) -> Fragments {
        let mut all = RangeDelAggregator::new(Comparator::Bytewise, snapshots.to_vec());
        for &(start, end, sequence) in items {
            all.add(&[start], &[end], sequence).unwrap();
        }
        all.finish()
    }

    fn listed(all: &Fragments, from: Option<u8>, to: Option<u8>) -> Vec<(u8, u8, u64)> {
        let (from, to) = (from.map(|key| [key]), to.map(|key| [key]));
        let (from, to) = (from.as_ref().map(|key| &key[..]), to.as_ref().map(|key| &key[..]));
        all.between(from, to).map(|t| (t.start[0], t.end[0], t.sequence)).collect()
    }

    #[test]
    fn a_fragment_keeps_the_newest_tombstone_of_each_stripe() {
        let items = [(1, 9, 3), (2, 5, 4), (2, 5, 7), (4, 6, 8), (5, 7, 12)];
        let all = fragments(&items, &[]);
        assert_eq!(
            listed(&all, None, None),
            [(1, 2, 3), (2, 4, 7), (4, 5, 8), (5, 7, 12), (7, 9, 3)]
        );
        let all = fragments(&items, &[3, 10]);
        let of_four = [(4, 5, 8), (4, 5, 3), (5, 6, 12), (5, 6, 8), (5, 6, 3)];
        assert_eq!(listed(&all, Some(4), Some(6)), of_four);
        assert_eq!((all.max_sequence(&[5], 3), all.max_sequence(&[5], 10)), (3, 8));
        assert_eq!((all.max_sequence(&[5], 99), all.max_sequence(&[7], 99)), (12, 3));
        assert_eq!(all.max_sequence(&[1], 99), 3, "keys may go back");
        assert_eq!((all.max_sequence(&[0], 99), all.max_sequence(&[9], 99)), (0, 0));
    }

    #[test]
    fn a_range_is_cut_where_the_output_is_cut() {
        let all = fragments(&[(1, 9, 3)], &[]);
        assert_eq!(listed(&all, None, Some(4)), [(1, 4, 3)]);
        assert_eq!(listed(&all, Some(4), Some(6)), [(4, 6, 3)]);
        assert_eq!(listed(&all, Some(6), None), [(6, 9, 3)]);
        assert_eq!(listed(&all, Some(9), None), []);
        assert_eq!(listed(&all, None, Some(1)), []);
    }

    #[test]
    fn a_range_is_clipped_to_the_bounds_of_its_unit() {
        let order = Comparator::Bytewise;
        let clipped = |start: &[u8], end: &[u8], largest: u64| {
            let (smallest, largest) = (internal(b"c", pack(9, 1)), internal(b"m", largest));
            let found = clip(order, (start, end), &smallest, &largest).unwrap();
            found.map(|(start, end)| (start.to_vec(), end.into_owned()))
        };
        let some = |start: &[u8], end: &[u8]| Some((start.to_vec(), end.to_vec()));
        assert_eq!(clipped(b"a", b"z", SENTINEL_PACKED), some(b"c", b"m"));
        assert_eq!(clipped(b"a", b"z", pack(4, 1)), some(b"c", b"m\0"));
        assert_eq!(clipped(b"a", b"m", pack(4, 1)), some(b"c", b"m"));
        assert_eq!(clipped(b"d", b"e", SENTINEL_PACKED), some(b"d", b"e"));
        assert_eq!(clipped(b"a", b"b", SENTINEL_PACKED), None);
        assert_eq!(clipped(b"x", b"z", SENTINEL_PACKED), None);
        let reverse = Comparator::ReverseBytewise;
        let (first, last) = (internal(b"m", pack(9, 1)), internal(b"c", pack(9, 1)));
        assert!(clip(reverse, (b"z", b"a"), &first, &last).is_err());
        assert!(clip(reverse, (b"z", b"d"), &first, &last).is_ok());
    }

    proptest! {
        /// Every reader finds the same keys deleted by the fragments as by the tombstones, also if
        /// they are cut in two.
        #[test]
        fn fragments_delete_what_the_tombstones_delete(
            items in prop::collection::vec((0u8..20, 0u8..20, 1u64..30), 0..40),
            snapshots in prop::collection::vec(0u64..30, 0..4),
            cut in 0u8..20,
        ) {
            let all = fragments(&items, &snapshots);
            let mut parts = listed(&all, None, Some(cut));
            parts.extend(listed(&all, Some(cut), None));
            let mut sorted = snapshots.clone();
            sorted.sort_unstable();
            for key in 0u8..21 {
                let newest = |of: &[(u8, u8, u64)], low: u64, high: u64| {
                    let over = |t: &&(u8, u8, u64)| t.0 <= key && key < t.1;
                    let visible = |t: &(u8, u8, u64)| low < t.2 && t.2 <= high;
                    of.iter().filter(over).filter(|t| visible(t)).map(|t| t.2).max()
                };
                for &at in sorted.iter().chain([&99]) {
                    prop_assert_eq!(newest(&items, 0, at), newest(&parts, 0, at));
                }
                for &at in sorted.iter().chain([&99]) {
                    let expected = newest(&items, 0, at).unwrap_or(0);
                    prop_assert_eq!(all.max_sequence(&[key], at), expected, "{} at {}", key, at);
                }
            }
            let is_sorted = listed(&all, None, None).windows(2).all(|pair| {
                pair[0].1 <= pair[1].0 || (pair[0].0, pair[0].1) == (pair[1].0, pair[1].1)
            });
            prop_assert!(is_sorted, "fragments overlap");
        }
    }
}
