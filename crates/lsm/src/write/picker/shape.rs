//! The sizes that the levels of a family aim at, what exceeds them, and how urgent that is. Pure.
//!
//! Static levels: level 1 has `max_bytes_for_level_base`, each deeper one
//! `max_bytes_for_level_multiplier` times more. Dynamic levels: the deepest level is as large as it
//! is, each level above a multiplier smaller, and level 0 is merged into the first level whose
//! target is within `max_bytes_for_level_base`, the *base*. So the deepest level always has about
//! nine tenths of the data, and the space that obsolete versions take is about a tenth.
//!
//! Both follow RocksDB's `VersionStorageInfo::CalculateBaseBytes`, so that RocksDB finds the shape
//! that it would have made.

use crate::family_options::FamilyOptions;
use crate::mutant::mutant;

/// The score of a level over its target is scaled up, so that levels with work come before levels
/// that only approach their targets.
const URGENT: f64 = 10.0;

/// The score of a level that is no longer needed: it is drained when nothing else is urgent.
const DRAINED: f64 = 1.001;

/// The targets of all levels.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shape {
    /// The level that level 0 is merged into.
    pub base: usize,
    /// Bytes by level; `u64::MAX` for those that need not be merged: level 0, those above the
    /// base, and the last one.
    pub targets: Vec<u64>,
    /// The levels from 1 to this one are more than the data needs; 0 for none. Level 0 goes into
    /// the first of them as long as it has files.
    pub unneeded: usize,
}

/// The bytes of a family's levels, and the part of them that no job is working on.
#[derive(Clone, Debug, Default)]
pub(crate) struct LevelSizes {
    /// By level; as many as the family may have.
    pub bytes: Vec<u64>,
    /// The same without the inputs of running jobs, with tombstone-dense files counted as larger.
    pub idle: Vec<u64>,
    /// How urgent it is to merge the same files because of the garbage that they hide: due from 1
    /// on; by level, or empty. References to blob files are so small that a level with many of
    /// them does not exceed its target.
    pub hides: Vec<f64>,
    /// Files of level 0 that a merge could take.
    pub level0_files: usize,
    /// Files of level 0 at which a merge begins.
    pub level0_due: usize,
}

impl Shape {
    /// The shape of a family whose levels have this many bytes.
    pub fn of(options: &FamilyOptions, bytes: &[u64]) -> Shape {
        let last = bytes.len().max(options.levels).max(2) - 1;
        if options.dynamic {
            Shape::dynamic(options, bytes, last)
        } else {
            Shape::fixed(options, last)
        }
    }

    fn fixed(options: &FamilyOptions, last: usize) -> Shape {
        let mut targets = vec![u64::MAX; last + 1];
        let mut target = options.level_base_bytes as f64;
        for (level, slot) in targets.iter_mut().enumerate().take(last).skip(1) {
            *slot = target as u64;
            target *= options.multiplier_below(level);
        }
        Shape { base: 1, targets, unneeded: 0 }
    }

    fn dynamic(options: &FamilyOptions, bytes: &[u64], last: usize) -> Shape {
        let most = options.level_base_bytes as f64;
        let multiplier = options.level_multiplier;
        let mut targets = vec![u64::MAX; last + 1];
        let occupied = || bytes.iter().enumerate().skip(1).filter(|(_, bytes)| **bytes > 0);
        let Some((first, _)) = occupied().next() else {
            return Shape { base: last, targets, unneeded: 0 };
        };
        let largest = occupied().map(|(_, &bytes)| bytes).max().unwrap_or(0) as f64;
        let of = |level: usize| largest / multiplier.powi((last - level) as i32);
        let is_small = |level: &usize| of(*level) <= most / multiplier;
        let unneeded = (first..last).rev().find(is_small).unwrap_or(0);
        let mut base = first;
        let mut target = of(first);
        if target <= most / multiplier {
            target = most / multiplier + 1.0;
        } else {
            while base > 1 && target > most {
                base -= 1;
                target /= multiplier;
            }
            target = target.min(most);
        }
        for slot in &mut targets[base..last] {
            *slot = target.max(most) as u64;
            target *= multiplier;
        }
        Shape { base, targets, unneeded }
    }

    /// The levels that are due to be merged into the next, the most urgent first, with their
    /// scores. A level is due from 1 on.
    pub fn scores(&self, options: &FamilyOptions, sizes: &LevelSizes) -> Vec<(usize, f64)> {
        let last = self.targets.len() - 1;
        let idle = |level: usize| sizes.idle.get(level).copied().unwrap_or(0) as f64;
        let hides = |level: usize| sizes.hides.get(level).copied().unwrap_or(0.0);
        let mut scores = Vec::new();
        let mut level0 = sizes.level0_files as f64 / options.level0_trigger as f64;
        if options.dynamic {
            // Few large files: they count by their size, compared with what they are merged with.
            if idle(0) >= options.level_base_bytes as f64 {
                level0 = level0.max(1.01);
            }
        } else {
            level0 = level0.max(idle(0) / options.level_base_bytes as f64);
        }
        if level0 >= 1.0 {
            scores.push((0, if options.dynamic { level0 * URGENT } else { level0 }));
        }
        let mut coming = 0.0;
        let last = if mutant("deep_levels_are_never_due") { 2 } else { last };
        for level in 1..last {
            let (idle, target) = (idle(level), self.targets[level] as f64);
            if self.targets[level] == u64::MAX {
                // Above the base: nothing is here.
                continue;
            }
            if idle >= target {
                let score =
                    if options.dynamic { URGENT * idle / (target + coming) } else { idle / target };
                scores.push((level, score.max(1.0)));
            } else if hides(level) >= 1.0 {
                scores.push((level, hides(level)));
            } else if level <= self.unneeded && idle > 0.0 {
                scores.push((level, DRAINED));
            }
            coming += (sizes.bytes.get(level).copied().unwrap_or(0) as f64 - target).max(0.0);
        }
        scores.sort_by(|a, b| b.1.total_cmp(&a.1));
        scores
    }

    /// How full the levels are, for people: for level 0 its files divided by the trigger, for
    /// others their bytes divided by their target; 0 without a target.
    pub fn fill(&self, options: &FamilyOptions, sizes: &LevelSizes) -> Vec<f64> {
        let of = |(level, &bytes): (usize, &u64)| match (level, self.targets.get(level)) {
            (0, _) => sizes.level0_files as f64 / options.level0_trigger as f64,
            (_, Some(&target)) if target < u64::MAX => bytes as f64 / target.max(1) as f64,
            _ => 0.0,
        };
        sizes.bytes.iter().enumerate().map(of).collect()
    }

    /// The debt: the bytes that merges have to read and write until no level exceeds its target,
    /// about. Level 0 counts once it is due.
    pub fn debt(&self, sizes: &LevelSizes) -> u64 {
        let bytes = |level: usize| sizes.bytes.get(level).copied().unwrap_or(0) as f64;
        let last = self.targets.len() - 1;
        let mut debt = 0.0;
        let mut coming = 0.0;
        if sizes.level0_files >= sizes.level0_due {
            coming = bytes(0);
            debt = bytes(0) + bytes(self.base);
        }
        for level in self.base..last {
            let size = bytes(level) + coming;
            coming = (size - self.targets[level] as f64).max(0.0);
            if coming > 0.0 {
                debt += coming * (bytes(level + 1) / size.max(1.0) + 1.0);
            }
        }
        debt as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    fn options(dynamic: bool) -> FamilyOptions {
        FamilyOptions { dynamic, level_base_bytes: 100 * MB, ..FamilyOptions::default() }
    }

    fn sizes(level0_files: usize, bytes: &[u64]) -> LevelSizes {
        let (bytes, idle) = (bytes.to_vec(), bytes.to_vec());
        LevelSizes { bytes, idle, hides: Vec::new(), level0_files, level0_due: 4 }
    }

    #[test]
    fn fixed_levels_grow_by_the_multiplier() {
        let shape = Shape::of(&options(false), &[0; 7]);
        assert_eq!(shape.base, 1);
        assert_eq!(shape.targets[1..4], [100 * MB, 1000 * MB, 10_000 * MB]);
        assert_eq!((shape.targets[0], shape.targets[6]), (u64::MAX, u64::MAX));
    }

    #[test]
    fn dynamic_levels_follow_the_deepest() {
        let base = |bytes: [u64; 7]| Shape::of(&options(true), &bytes).base;
        assert_eq!(base([5, 0, 0, 0, 0, 0, 0]), 6, "an empty database fills its last level");
        assert_eq!(base([5, 0, 0, 0, 0, 0, 90 * MB]), 6);
        assert_eq!(base([5, 0, 0, 0, 0, 0, 101 * MB]), 5);
        assert_eq!(base([5, 0, 0, 0, 0, MB, 999 * MB]), 5);
        assert_eq!(base([5, 0, 0, 0, 0, MB, 1001 * MB]), 4);
        // RocksDB fills a level that exists first, even if it need not be there.
        assert_eq!(base([5, 0, MB, 0, 0, 0, 90 * MB]), 2);
        let shape = Shape::of(&options(true), &[0, 0, 0, 0, 0, 60 * MB, 2000 * MB]);
        assert_eq!((shape.base, shape.targets[4], shape.targets[5]), (4, 100 * MB, 200 * MB));
    }

    #[test]
    fn levels_that_are_no_longer_needed_are_drained() {
        let options = options(true);
        let due = |files, bytes: &[u64]| -> Vec<usize> {
            let shape = Shape::of(&options, bytes);
            shape.scores(&options, &sizes(files, bytes)).iter().map(|score| score.0).collect()
        };
        // A tenth of the last level is within the tenth of what a level has at least.
        assert_eq!(due(0, &[0, 0, 0, MB, MB, MB, 90 * MB]), [3, 4, 5]);
        assert_eq!(due(4, &[0, 0, 0, MB, MB, MB, 90 * MB]), [0, 3, 4, 5], "level 0 comes first");
        assert_eq!(due(0, &[0, 0, 0, 0, MB, MB, 101 * MB]), [4], "level 5 is needed");
        assert_eq!(due(0, &[0, 0, 0, 0, 0, 90 * MB, 0]), [5], "the last level has nothing yet");
        assert_eq!(Shape::of(&options, &[0; 7]).unneeded, 0);
    }

    #[test]
    fn a_level_is_due_when_it_exceeds_its_target() {
        let options = options(false);
        let shape = Shape::of(&options, &[0; 7]);
        let due = |files, bytes: &[u64]| -> Vec<usize> {
            shape.scores(&options, &sizes(files, bytes)).iter().map(|score| score.0).collect()
        };
        assert_eq!(due(3, &[MB, 99 * MB, 999 * MB]), []);
        assert_eq!(due(4, &[MB, 99 * MB, 999 * MB]), [0]);
        assert_eq!(due(4, &[MB, 300 * MB, 2000 * MB]), [1, 2, 0]);
        assert_eq!(due(1, &[101 * MB, 0, 0]), [0], "few files, but many bytes");
    }

    #[test]
    fn a_level_is_due_when_it_hides_much_garbage() {
        let options = options(true);
        let bytes = [0, 0, 0, 0, 0, MB, 400 * MB];
        let shape = Shape::of(&options, &bytes);
        let due = |hides: f64| {
            let hides = vec![0.0, 0.0, 0.0, 0.0, 0.0, hides, 0.0];
            shape.scores(&options, &LevelSizes { hides, ..sizes(0, &bytes) })
        };
        assert_eq!((due(0.9), due(2.0)), (vec![], vec![(5, 2.0)]));
    }

    #[test]
    fn a_level_that_is_about_to_receive_much_waits() {
        let options = options(true);
        let bytes = [0, 0, 0, 0, 3000 * MB, 11_000 * MB, 100_000 * MB];
        let shape = Shape::of(&options, &bytes);
        let scores = shape.scores(&options, &sizes(8, &bytes));
        let levels: Vec<usize> = scores.iter().map(|score| score.0).collect();
        assert_eq!(shape.base, 3);
        assert_eq!(levels, [4, 0, 5], "level 5 exceeds its target less than what level 4 sends");
    }

    #[test]
    fn debt_is_what_is_to_be_merged() {
        let options = options(false);
        let shape = Shape::of(&options, &[0; 7]);
        assert_eq!(shape.debt(&sizes(3, &[30 * MB, 90 * MB])), 0);
        assert_eq!(shape.debt(&sizes(4, &[5 * MB, 90 * MB])), 95 * MB);
        let debt = shape.debt(&sizes(0, &[0, 200 * MB, 400 * MB]));
        assert_eq!(debt, 100 * MB + 200 * MB, "the excess, and its share of the next level");
    }
}
