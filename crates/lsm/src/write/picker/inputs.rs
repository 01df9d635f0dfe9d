//! The inputs of a merge: which files overlap, and where a level may be cut.

use std::cmp::Ordering;
use std::ops::Range;

use crate::mutant::mutant;
use crate::version::user_key;
use crate::write::picker::{Picker, ends_before};

impl Picker<'_> {
    /// The first and the last user key of files.
    pub(super) fn hull(&self, slots: &[u32]) -> Option<(&[u8], &[u8])> {
        let order = |a: &&[u8], b: &&[u8]| self.order().cmp_user(a, b);
        let smallest = slots.iter().map(|&slot| user_key(&self.meta(slot).smallest));
        let largest = slots.iter().map(|&slot| user_key(&self.meta(slot).largest));
        Some((smallest.min_by(order)?, largest.max_by(order)?))
    }

    /// The files of a sorted level that have keys between two user keys, both included; empty, at
    /// the place where they would be, if none has.
    pub(super) fn overlapping(&self, level: &[u32], hull: (&[u8], &[u8])) -> Range<usize> {
        let order = self.order();
        let from = level.partition_point(|&slot| {
            let meta = self.meta(slot);
            match order.cmp_user(user_key(&meta.largest), hull.0) {
                Ordering::Less => true,
                Ordering::Equal => ends_before(meta),
                Ordering::Greater => false,
            }
        });
        let to = level.partition_point(|&slot| {
            order.cmp_user(user_key(&self.meta(slot).smallest), hull.1).is_le()
        });
        from..to.max(from)
    }

    /// Whether the table of a sorted level at this index begins with versions of the key that the
    /// table before it ends with.
    pub(super) fn split_before(&self, level: &[u32], at: usize) -> bool {
        let (left, right) = (self.meta(level[at - 1]), self.meta(level[at]));
        let (largest, smallest) = (user_key(&left.largest), user_key(&right.smallest));
        !ends_before(left) && self.order().cmp_user(largest, smallest).is_ge()
    }

    /// Extends a stretch of a sorted level to both sides until no user key has versions both
    /// inside and outside of it: RocksDB splits the versions of a key over tables.
    pub(super) fn whole_keys(&self, level: &[u32], mut range: Range<usize>) -> Range<usize> {
        if mutant("neighbours_stay_behind") {
            return range;
        }
        while !range.is_empty() && range.start > 0 && self.split_before(level, range.start) {
            range.start -= 1;
        }
        while !range.is_empty() && range.end < level.len() && self.split_before(level, range.end) {
            range.end += 1;
        }
        range
    }
}
