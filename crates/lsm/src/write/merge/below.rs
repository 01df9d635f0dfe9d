//! What lies below the output of a merge.

use rocksfmt::Comparator;

use crate::version::{Family, Version, user_key};
use crate::write::picker::Plan;

/// The files of the levels below a merge's output, asked key by key in ascending order.
pub(in crate::write) struct Below<'a> {
    version: &'a Version,
    order: Comparator,
    /// The files of each level that may have keys of the merge, and the first that does not end
    /// before the last key that was asked for.
    levels: Vec<(&'a [u32], usize)>,
}

impl<'a> Below<'a> {
    pub fn new(version: &'a Version, family: &'a Family, plan: &Plan) -> Below<'a> {
        let order = family.comparator;
        let (first, last) = &plan.hull;
        let overlapping = |slots: &'a [u32]| {
            let ends_before =
                |slot: &u32| order.cmp_user(user_key(&version.meta(*slot).largest), first).is_lt();
            let begins_within =
                |slot: &u32| order.cmp_user(user_key(&version.meta(*slot).smallest), last).is_le();
            let from = slots.partition_point(ends_before);
            let to = slots.partition_point(begins_within);
            &slots[from..to.max(from)]
        };
        let deeper = family.levels.iter().skip(plan.output + 1);
        let levels = deeper.map(|level| (overlapping(&level.slots), 0));
        Below { version, order, levels: levels.filter(|level| !level.0.is_empty()).collect() }
    }

    /// Whether nothing lies below any key of the merge.
    pub fn is_empty(&self) -> bool {
        self.levels.is_empty()
    }

    /// The files of the first level that has some: an output that overlaps many of them is
    /// expensive to merge later.
    pub fn grandparents(&self) -> &'a [u32] {
        self.levels.first().map_or(&[], |level| level.0)
    }

    /// Whether a file may have versions of a key. Keys must ascend.
    pub fn may_have(&mut self, key: &[u8]) -> bool {
        let (version, order) = (self.version, self.order);
        self.levels.iter_mut().any(|(slots, at)| {
            let ends_before =
                |slot: u32| order.cmp_user(user_key(&version.meta(slot).largest), key).is_lt();
            while slots.get(*at).is_some_and(|&slot| ends_before(slot)) {
                *at += 1;
            }
            slots.get(*at).is_some_and(|&slot| {
                order.cmp_user(user_key(&version.meta(slot).smallest), key).is_le()
            })
        })
    }

    /// Whether a file may have keys from `start` to before `end`.
    pub fn may_have_any(&self, start: &[u8], end: &[u8]) -> bool {
        let (version, order) = (self.version, self.order);
        self.levels.iter().any(|(slots, _)| {
            let at = slots.partition_point(|&slot| {
                order.cmp_user(user_key(&version.meta(slot).largest), start).is_lt()
            });
            slots.get(at).is_some_and(|&slot| {
                order.cmp_user(user_key(&version.meta(slot).smallest), end).is_lt()
            })
        })
    }
}
