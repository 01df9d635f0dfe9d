//! The range tombstones that an iterator sees, over all memtables and tables.
//!
//! An iterator asks for key after key. So [`Covering`] remembers the range around the last key in
//! which no tombstone begins or ends, and searches again only outside of it.

use std::sync::Arc;

use rocksfmt::{Comparator, Cover, RangeTombstones, Stretch};

use crate::read::walk::Direction;
use crate::version::{Family, Version, user_key};

/// Tombstones that are searched together.
enum Set {
    /// A run of a memtable's tombstones.
    Run(Arc<RangeTombstones>),
    /// The slots of the tables of a level that have tombstones, in the order of keys; or a single
    /// table of level 0.
    Tables(Arc<Vec<u32>>),
}

/// All tombstones of a column family, up to a sequence.
pub(crate) struct Covering {
    comparator: Comparator,
    sequence: u64,
    sets: Vec<Set>,
    last: Known,
}

/// The newest tombstone over a range: 0 for none.
#[derive(Default)]
struct Known {
    newest: u64,
    /// `None` does not limit.
    from: Option<Vec<u8>>,
    /// The end, exclusive. Nothing is known if it equals the start.
    to: Option<Vec<u8>>,
}

impl Covering {
    /// The tombstones of a family that readers at `sequence` see.
    pub fn new(family: &Family, sequence: u64) -> Covering {
        let mut sets = Vec::new();
        for all in family.mems.iter().filter_map(|mem| mem.tombstones()) {
            let seen = all.runs().iter().filter(|run| run.smallest_sequence() <= sequence);
            sets.extend(seen.cloned().map(Set::Run));
        }
        for (depth, level) in family.levels.iter().enumerate() {
            let with = level.covering();
            match depth {
                0 => sets.extend(with.iter().map(|&slot| Set::Tables(Arc::new(vec![slot])))),
                _ if with.is_empty() => {}
                _ => sets.push(Set::Tables(with.clone())),
            }
        }
        let last = Known { newest: 0, from: Some(Vec::new()), to: Some(Vec::new()) };
        Covering { comparator: family.comparator, sequence, sets, last }
    }

    /// Whether there are no tombstones.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    /// The sequence of the newest tombstone over a key: entries below it are deleted. 0 for none.
    #[inline]
    pub fn newest(&mut self, version: &Version, key: &[u8]) -> u64 {
        let order = self.comparator;
        let from = |from: &[u8]| order.cmp_user(from, key).is_le();
        let to = |to: &[u8]| order.cmp_user(key, to).is_lt();
        if self.last.from.as_deref().is_none_or(from) && self.last.to.as_deref().is_none_or(to) {
            return self.last.newest;
        }
        self.search(version, key)
    }

    fn search(&mut self, version: &Version, key: &[u8]) -> u64 {
        let order = self.comparator;
        let mut newest = 0;
        let (mut from, mut to): (Option<Vec<u8>>, Option<Vec<u8>>) = (None, None);
        let mut limit = |start: Option<&[u8]>, end: Option<&[u8]>| {
            if let Some(start) = start
                && from.as_deref().is_none_or(|from| order.cmp_user(start, from).is_gt())
            {
                from = Some(start.to_vec());
            }
            if let Some(end) = end
                && to.as_deref().is_none_or(|to| order.cmp_user(end, to).is_lt())
            {
                to = Some(end.to_vec());
            }
        };
        for set in &self.sets {
            for tombstones in near(set, order, version, key) {
                let Stretch { sequence, start, end } = tombstones.stretch(key, self.sequence);
                newest = newest.max(sequence);
                limit(start, end);
            }
            if let Set::Tables(slots) = set {
                let (start, end) = searched(slots, order, version, key);
                limit(start, end);
            }
        }
        self.last = Known { newest, from, to };
        newest
    }

    /// Of the ranges around a key in which everything up to `data_sequence` is deleted, the one
    /// that reaches farthest in a direction.
    pub fn cover<'a>(
        &'a self,
        version: &'a Version,
        key: &[u8],
        data_sequence: u64,
        direction: Direction,
    ) -> Option<Cover<'a>> {
        let order = self.comparator;
        self.sets
            .iter()
            .flat_map(|set| near(set, order, version, key))
            .filter_map(|tombstones| tombstones.cover(key, self.sequence, data_sequence))
            .filter(|cover| cover.sequence > data_sequence)
            .max_by(|a, b| match direction {
                Direction::Forward => order.cmp_user(a.end, b.end),
                Direction::Backward => order.cmp_user(b.start, a.start),
            })
    }
}

/// The keys from the first to before the second: [`near`] has all tables of a level that may cover
/// them. `None` for no limit.
fn searched<'a>(
    slots: &[u32],
    order: Comparator,
    version: &'a Version,
    key: &[u8],
) -> (Option<&'a [u8]>, Option<&'a [u8]>) {
    let smallest = |slot: u32| user_key(&version.meta(slot).smallest);
    let after = slots.partition_point(|&slot| order.cmp_user(smallest(slot), key).is_le());
    let start = if after > 2 { Some(smallest(slots[after - 1])) } else { None };
    (start, slots.get(after + 1).map(|&slot| smallest(slot)))
}

/// The tombstones of a set that may cover a key or limit the range around it.
fn near<'a>(
    set: &'a Set,
    order: Comparator,
    version: &'a Version,
    key: &[u8],
) -> impl Iterator<Item = &'a RangeTombstones> {
    let (run, tables) = match set {
        Set::Run(run) => (Some(&**run), &[][..]),
        Set::Tables(slots) => {
            // The table that may hold the key, the one before, which may end with the key, and the
            // one after.
            let starts =
                |&slot: &u32| order.cmp_user(user_key(&version.meta(slot).smallest), key).is_le();
            let after = slots.partition_point(starts);
            (None, &slots[after.saturating_sub(2)..slots.len().min(after + 1)])
        }
    };
    run.into_iter().chain(tables.iter().filter_map(|&slot| version.tombstones(slot)))
}
