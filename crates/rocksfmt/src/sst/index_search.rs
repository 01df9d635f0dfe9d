//! Speeds up lookups in a large index block.
//!
//! A binary search over restart points reads a restart offset and a key at each step; in an index
//! of 16 000 blocks that is about 28 cache misses. [`IndexSearch`] keeps a number for each restart
//! point: the first eight bytes of its user key after the prefix that all keys share. The search
//! then stays in one dense array, and only the few restart points with equal numbers are compared
//! in the block.
//!
//! It costs about nine bytes per restart point and one walk over them when a file is opened. It
//! changes no answer: if keys do not ascend, or the order is not bytewise, there is no helper, and
//! searches are plain.
//!
//! Short keys are padded with zero bytes. This is correct because if `a < b` bytewise, the padded
//! number of `a` is at most that of `b`: keys with a smaller number than the target's are less,
//! keys with a larger one are greater, and only equal numbers need a comparison.

use crate::block::layout::{Entries, bad_entry};
use crate::block::search::{self, Hit};
use crate::error::Result;
use crate::key::{Comparator, compare_bytes};
use crate::sst::footer::BlockHandle;
use crate::sst::index::IndexLayout;

/// With fewer restart points a search in the block is as fast.
const RESTARTS_MIN: u32 = 16;

/// Numbers that represent the keys of one index block.
#[derive(Clone, Debug)]
pub struct IndexSearch {
    prefix: Box<[u8]>,
    heads: Heads,
}

impl IndexSearch {
    /// Reads the restart keys of an index block; `None` if a helper is impossible or not worth its
    /// cost.
    pub fn build(data: &[u8], layout: &IndexLayout, comparator: Comparator) -> Option<IndexSearch> {
        let count = layout.restart_count();
        if comparator != Comparator::Bytewise || count < RESTARTS_MIN {
            return None;
        }
        let block = layout.layout();
        let entries = block.entries(data)?;
        let user_key = |i| {
            let key = layout.restart_key(entries, block.restart(data, i)?)?;
            key.get(..key.len().checked_sub(layout.trailer_bytes())?)
        };
        let (first, last) = (user_key(0)?, user_key(count - 1)?);
        let shared = first.iter().zip(last).take_while(|(a, b)| a == b).count();
        let prefix = &first[..shared];
        let mut heads = Vec::with_capacity(count as usize);
        let mut previous = 0;
        for i in 0..count {
            let head = head(user_key(i)?.strip_prefix(prefix)?);
            if head < previous {
                return None;
            }
            heads.push(head);
            previous = head;
        }
        Some(IndexSearch { prefix: prefix.into(), heads: Heads::new(&heads) })
    }

    /// Bytes of memory in use.
    pub fn memory(&self) -> usize {
        self.prefix.len() + self.heads.memory()
    }

    /// Same as [`crate::index_lookup`], in the block from which this was built.
    #[inline]
    pub fn lookup(
        &self,
        data: &[u8],
        layout: &IndexLayout,
        target: &[u8],
        scratch: &mut Vec<u8>,
    ) -> Result<Option<BlockHandle>> {
        handle(self.find(data, layout, layout.target(target), scratch))
    }

    /// The first step of [`IndexSearch::lookup`] of a target, and the memory that the second one
    /// reads and that is rarely in the processor's caches: a line of numbers. The steps are
    /// `begin`, [`IndexSearch::restart`], [`IndexSearch::entry`] and [`IndexSearch::finish`].
    /// `None` if no key has that number.
    #[inline]
    pub fn begin(&self, layout: &IndexLayout, target: &[u8]) -> Option<(IndexSteps, &u64)> {
        let wanted = self.wanted(user_key(layout, layout.target(target)))?;
        let leaf = self.heads.leaf(wanted)?;
        Some((IndexSteps { wanted, at: leaf }, self.heads.line(leaf)?.0.first()?))
    }

    /// The second step, and what the third one reads: the offset of an entry.
    #[inline]
    pub fn restart<'d>(
        &self,
        data: &'d [u8],
        layout: &IndexLayout,
        steps: &mut IndexSteps,
    ) -> Option<&'d u8> {
        steps.at = self.heads.below_in(steps.at, steps.wanted);
        data.get(layout.layout().restart_place(steps.entry_before()))
    }

    /// The third step, and what the last one reads: the entry.
    #[inline]
    pub fn entry<'d>(
        &self,
        data: &'d [u8],
        layout: &IndexLayout,
        steps: &IndexSteps,
    ) -> Option<&'d u8> {
        data.get(layout.layout().restart(data, steps.entry_before())?)
    }

    /// The last step: the answer.
    ///
    /// # Errors
    /// When the block is damaged.
    #[inline]
    pub fn finish(
        &self,
        data: &[u8],
        layout: &IndexLayout,
        target: &[u8],
        steps: &IndexSteps,
        scratch: &mut Vec<u8>,
    ) -> Result<Option<BlockHandle>> {
        let places = (steps.at, steps.at + self.heads.equal(steps.at, steps.wanted));
        handle(self.find_between(data, layout, layout.target(target), places, scratch))
    }

    /// The number of a user key that has the prefix of all.
    #[inline(always)]
    fn wanted(&self, user: &[u8]) -> Option<u64> {
        user.strip_prefix(&*self.prefix).map(head)
    }

    #[inline(always)]
    fn find(
        &self,
        data: &[u8],
        layout: &IndexLayout,
        target: &[u8],
        scratch: &mut Vec<u8>,
    ) -> Option<Hit<<IndexLayout as Entries>::Value>> {
        let user = user_key(layout, target);
        let places = match self.wanted(user) {
            Some(wanted) => {
                let low = self.heads.below(wanted);
                (low, low + self.heads.equal(low, wanted))
            }
            None if compare_bytes(user, &self.prefix).is_lt() => (0, 0),
            None => (self.heads.len, self.heads.len),
        };
        self.find_between(data, layout, target, places, scratch)
    }

    /// Searches between two restart points.
    #[inline(always)]
    fn find_between(
        &self,
        data: &[u8],
        layout: &IndexLayout,
        target: &[u8],
        (low, high): (usize, usize),
        scratch: &mut Vec<u8>,
    ) -> Option<Hit<<IndexLayout as Entries>::Value>> {
        let entries = layout.layout().entries(data)?;
        let less = search::restarts_less(
            data,
            entries,
            *layout,
            Comparator::Bytewise,
            target,
            low as u32,
            high as u32,
        )?;
        search::first_not_less_after(
            data,
            entries,
            *layout,
            Comparator::Bytewise,
            target,
            scratch,
            less,
        )
    }
}

/// How far the search of one key has come: see [`IndexSearch::begin`].
#[derive(Clone, Copy, Debug)]
pub struct IndexSteps {
    wanted: u64,
    /// A line of numbers; after the second step, how many numbers are below `wanted`.
    at: usize,
}

impl IndexSteps {
    /// The last restart point before the numbers that are not below `wanted`.
    #[inline(always)]
    fn entry_before(&self) -> u32 {
        self.at.saturating_sub(1) as u32
    }
}

/// The block to which a search has led, if there is one.
#[inline(always)]
fn handle(hit: Option<Hit<<IndexLayout as Entries>::Value>>) -> Result<Option<BlockHandle>> {
    match hit {
        Some(Hit::Entry(found)) => Ok(Some(found.entry.value.handle)),
        Some(Hit::PastEnd) => Ok(None),
        None => Err(bad_entry().at("index")),
    }
}

/// Numbers in ascending order, searched through a static tree of cache lines: each line of a level
/// holds the largest numbers of eight lines of the level below. A search of 16 000 numbers touches
/// five lines, of which the upper ones stay in the processor's caches; a binary search touches
/// eleven, each dependent on the previous one.
#[derive(Clone, Debug)]
struct Heads {
    /// All levels, from the top to the numbers themselves, each padded with the largest number.
    lines: Box<[Line]>,
    /// The start of each level in `lines`, from the top; `levels` of them are used.
    starts: [u32; LEVELS_MAX],
    levels: usize,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line([u64; 8]);

/// 8^11 is more than a block's 32-bit count of restart points.
const LEVELS_MAX: usize = 11;

impl Heads {
    fn new(sorted: &[u64]) -> Heads {
        let lines_of = |numbers: &[u64]| -> Vec<Line> {
            let (whole, rest) = numbers.as_chunks::<8>();
            let mut lines: Vec<Line> = whole.iter().map(|&line| Line(line)).collect();
            if !rest.is_empty() {
                let mut last = [u64::MAX; 8];
                last[..rest.len()].copy_from_slice(rest);
                lines.push(Line(last));
            }
            lines
        };
        let mut levels = vec![lines_of(sorted)];
        while let Some(top) = levels.last()
            && top.len() > 1
        {
            let largest: Vec<u64> = top.iter().map(|line| line.0[7]).collect();
            levels.push(lines_of(&largest));
        }
        let mut starts = [0; LEVELS_MAX];
        let mut lines = Vec::with_capacity(levels.iter().map(Vec::len).sum());
        for (start, level) in starts.iter_mut().zip(levels.iter().rev()) {
            *start = lines.len() as u32;
            lines.extend_from_slice(level);
        }
        Heads { lines: lines.into(), starts, levels: levels.len(), len: sorted.len() }
    }

    /// The number of numbers below `wanted`. Only the branch at the end depends on the numbers.
    #[inline(always)]
    fn below(&self, wanted: u64) -> usize {
        let mut at = 0;
        for &start in &self.starts[..self.levels] {
            // If all numbers are below, this runs past a level's lines, into those of the next
            // level or past the end: what it counts there only increases an index that
            // is already too large.
            let Some(line) = self.lines.get(start as usize + at) else { return self.len };
            at = at * 8 + line.0.iter().map(|&head| usize::from(head < wanted)).sum::<usize>();
        }
        at.min(self.len)
    }

    /// The line of numbers at which [`Heads::below`] ends.
    #[inline(always)]
    fn leaf(&self, wanted: u64) -> Option<usize> {
        let mut at = 0;
        for &start in &self.starts[..self.levels - 1] {
            let line = self.lines.get(start as usize + at)?;
            at = at * 8 + line.0.iter().map(|&head| usize::from(head < wanted)).sum::<usize>();
        }
        Some(at)
    }

    #[inline(always)]
    fn line(&self, leaf: usize) -> Option<&Line> {
        self.lines.get(self.starts[self.levels - 1] as usize + leaf)
    }

    /// As [`Heads::below`], given its line.
    #[inline(always)]
    fn below_in(&self, leaf: usize, wanted: u64) -> usize {
        let Some(line) = self.line(leaf) else { return self.len };
        let below = line.0.iter().map(|&head| usize::from(head < wanted)).sum::<usize>();
        (leaf * 8 + below).min(self.len)
    }

    #[inline(always)]
    fn get(&self, at: usize) -> Option<u64> {
        if at >= self.len {
            return None;
        }
        let leaves = self.starts[self.levels - 1] as usize;
        Some(self.lines[leaves + at / 8].0[at % 8])
    }

    /// How many numbers, starting with the `low`th, equal `wanted`.
    #[inline(always)]
    fn equal(&self, low: usize, wanted: u64) -> usize {
        if self.get(low) != Some(wanted) {
            0
        } else if self.get(low + 1) != Some(wanted) {
            1
        } else {
            wanted.checked_add(1).map_or(self.len, |next| self.below(next)) - low
        }
    }

    fn memory(&self) -> usize {
        std::mem::size_of_val(&*self.lines)
    }
}

/// A key of this index without its trailer.
#[inline(always)]
fn user_key<'k>(layout: &IndexLayout, key: &'k [u8]) -> &'k [u8] {
    &key[..key.len().saturating_sub(layout.trailer_bytes())]
}

/// The first eight bytes as a number that sorts like them; missing bytes are zero.
#[inline(always)]
fn head(key: &[u8]) -> u64 {
    if let Some(bytes) = key.first_chunk::<8>() {
        return u64::from_be_bytes(*bytes);
    }
    let mut bytes = [0; 8];
    for (to, from) in bytes.iter_mut().zip(key) {
        *to = *from;
    }
    u64::from_be_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{pack, put_internal_key};
    use crate::sst::index::{IndexFormat, index_lookup};
    use crate::testing::block::{BlockBuilder, Form};
    use proptest::prelude::*;

    fn internal(user: &[u8], sequence: u64) -> Vec<u8> {
        let mut key = Vec::new();
        put_internal_key(&mut key, user, pack(sequence, 1));
        key
    }

    fn build(keys: &[Vec<u8>], format: IndexFormat, interval: usize) -> Vec<u8> {
        let mut b = BlockBuilder::new(Form::Index(format), interval);
        let mut offset = 0;
        for key in keys {
            b.add_index(key, BlockHandle { offset, size: 95 }, b"");
            offset += 100;
        }
        b.finish()
    }

    #[test]
    fn small_blocks_and_other_orders_get_no_helper() {
        let format = IndexFormat { user_keys: true, ..IndexFormat::default() };
        let keys: Vec<Vec<u8>> = (10u8..40).map(|i| vec![i]).collect();
        let data = build(&keys, format, 1);
        let layout = IndexLayout::parse(&data, format).unwrap();
        assert!(IndexSearch::build(&data, &layout, Comparator::Bytewise).is_some());
        assert!(IndexSearch::build(&data, &layout, Comparator::ReverseBytewise).is_none());
        let few = build(&keys[..10], format, 1);
        let layout = IndexLayout::parse(&few, format).unwrap();
        assert!(IndexSearch::build(&few, &layout, Comparator::Bytewise).is_none());
    }

    #[test]
    fn keys_that_do_not_ascend_get_no_helper() {
        let format = IndexFormat { user_keys: true, ..IndexFormat::default() };
        let mut keys: Vec<Vec<u8>> = (10u8..40).map(|i| vec![i]).collect();
        keys.swap(3, 20);
        let data = build(&keys, format, 1);
        let layout = IndexLayout::parse(&data, format).unwrap();
        assert!(IndexSearch::build(&data, &layout, Comparator::Bytewise).is_none());
    }

    proptest! {
        #[test]
        fn the_tree_counts_what_is_below_and_equal(
            mut numbers in proptest::collection::vec(
                prop_oneof![0u64..40, Just(u64::MAX), Just(u64::MAX - 1), any::<u64>()], 1..700),
            wanted in proptest::collection::vec(
                prop_oneof![0u64..42, Just(u64::MAX), Just(u64::MAX - 1), any::<u64>()], 20),
        ) {
            numbers.sort_unstable();
            let heads = Heads::new(&numbers);
            for wanted in wanted.into_iter().chain(numbers.clone()) {
                let low = numbers.partition_point(|&n| n < wanted);
                prop_assert_eq!(heads.below(wanted), low);
                prop_assert_eq!(heads.equal(low, wanted), numbers.partition_point(|&n| n <= wanted) - low);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

        #[test]
        fn the_helper_changes_no_answer(
            prefix in proptest::collection::vec(97u8..99, 0..4),
            tails in proptest::collection::btree_set(
                proptest::collection::vec(prop_oneof![Just(0u8), Just(97), Just(98), Just(255)], 0..14), 16..120),
            targets in proptest::collection::vec(
                (any::<bool>(), proptest::collection::vec(prop_oneof![Just(0u8), Just(97), Just(98), Just(255)], 0..14),
                 any::<proptest::sample::Index>(), 0u64..6), 40),
            user_keys: bool,
            delta_values: bool,
            interval in prop_oneof![Just(1usize), Just(2), Just(4)],
        ) {
            let format = IndexFormat { user_keys, delta_values, first_keys: false };
            let users: Vec<Vec<u8>> = tails.iter().map(|t| [&prefix[..], t].concat()).collect();
            let keys: Vec<Vec<u8>> = users.iter().flat_map(|u| match user_keys {
                true => vec![u.clone()],
                false => vec![internal(u, 4), internal(u, 2)],
            }).collect();
            let data = build(&keys, format, interval);
            let layout = IndexLayout::parse(&data, format).unwrap();
            let helper = IndexSearch::build(&data, &layout, Comparator::Bytewise);
            prop_assert_eq!(helper.is_some(), layout.restart_count() >= 16);
            let Some(helper) = helper else { return Ok(()) };
            let mut scratch = Vec::new();
            for (known, tail, pick, sequence) in targets {
                let user = match known {
                    true => pick.get(&users).clone(),
                    false => [&prefix[..pick.index(prefix.len() + 1)], &tail].concat(),
                };
                let target = internal(&user, sequence);
                let plain = index_lookup(&data, &layout, Comparator::Bytewise, &target, &mut scratch).unwrap();
                prop_assert_eq!(helper.lookup(&data, &layout, &target, &mut scratch).unwrap(), plain);
                let Some((mut steps, _)) = helper.begin(&layout, &target) else { continue };
                helper.restart(&data, &layout, &mut steps);
                let found = helper.finish(&data, &layout, &target, &steps, &mut scratch);
                prop_assert_eq!(found.unwrap(), plain);
            }
        }
    }
}
