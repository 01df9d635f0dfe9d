//! A helper that makes lookups in a large index block faster than its bytes allow.
//!
//! A binary search over restart points reads a restart offset and a key at each of its steps; in an index of
//! 16 000 blocks that is some 28 cache misses. [`IndexSearch`] keeps, for each restart point, eight bytes of its user
//! key behind the prefix that all keys share, as a number: the steps of the search then stay in one dense array,
//! and only the few restart points with equal numbers are compared in the block.
//!
//! It costs eight bytes per restart point and one walk over them when a file is opened. It changes no answer: keys
//! that do not ascend, or an order other than bytewise, give no helper and plain searches.
//!
//! Why padding short keys with zero bytes is right: if `a < b` bytewise, the padded number of `a` is at most that
//! of `b`. So keys with a smaller number than the target's are less, those with a larger one are greater, and only
//! equal numbers leave something to compare.

use std::hint::select_unpredictable;

use crate::block::{Entries, bad_entry};
use crate::error::Result;
use crate::footer::BlockHandle;
use crate::index::IndexLayout;
use crate::key::{Comparator, compare_bytes};
use crate::search::{self, Hit};

/// Fewer restart points than this are searched as fast in the block.
const RESTARTS_MIN: u32 = 16;

/// Numbers that stand for the keys of one index block.
#[derive(Clone, Debug)]
pub struct IndexSearch {
    prefix: Box<[u8]>,
    heads: Box<[u64]>,
}

impl IndexSearch {
    /// Reads the restart keys of an index block; `None` if a helper is not possible or not worth it.
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
        Some(IndexSearch { prefix: prefix.into(), heads: heads.into() })
    }

    /// Bytes of memory held.
    pub fn memory(&self) -> usize {
        self.prefix.len() + self.heads.len() * 8
    }

    /// As [`crate::index_lookup`] in the block this was built from.
    #[inline]
    pub fn lookup(
        &self,
        data: &[u8],
        layout: &IndexLayout,
        target: &[u8],
        scratch: &mut Vec<u8>,
    ) -> Result<Option<BlockHandle>> {
        match self.find(data, layout, layout.target(target), scratch) {
            Some(Hit::Entry(found)) => Ok(Some(found.entry.value.handle)),
            Some(Hit::PastEnd) => Ok(None),
            None => Err(bad_entry().at("index")),
        }
    }

    #[inline(always)]
    fn find(
        &self,
        data: &[u8],
        layout: &IndexLayout,
        target: &[u8],
        scratch: &mut Vec<u8>,
    ) -> Option<Hit<<IndexLayout as Entries>::Value>> {
        let entries = layout.layout().entries(data)?;
        let user = &target[..target.len().saturating_sub(layout.trailer_bytes())];
        let (low, high) = match user.strip_prefix(&*self.prefix) {
            Some(rest) => {
                let wanted = head(rest);
                let low = lower_bound(&self.heads, wanted);
                let equal = match self.heads.get(low..low + 2) {
                    Some(&[a, b]) if b != wanted => usize::from(a == wanted),
                    _ => self.heads[low..].partition_point(|&h| h == wanted),
                };
                (low, low + equal)
            }
            None if compare_bytes(user, &self.prefix).is_lt() => (0, 0),
            None => (self.heads.len(), self.heads.len()),
        };
        let less = search::restarts_less(
            data,
            entries,
            *layout,
            Comparator::Bytewise,
            target,
            low as u32,
            high as u32,
        )?;
        search::first_not_less_behind(
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

/// Number of elements below `wanted` in an ascending slice. Written without branches on the data: a mispredicted
/// branch at each second step would cost more than the loads.
#[inline(always)]
fn lower_bound(heads: &[u64], wanted: u64) -> usize {
    let (mut base, mut size) = (0, heads.len());
    while size > 1 {
        let half = size / 2;
        base = select_unpredictable(heads[base + half - 1] < wanted, base + half, base);
        size -= half;
    }
    base + usize::from(size == 1 && heads[base] < wanted)
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
    use crate::index::{IndexFormat, index_lookup};
    use crate::key::{pack, put_internal_key};
    use crate::test_block::{BlockBuilder, Form};
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
            }
        }
    }
}
