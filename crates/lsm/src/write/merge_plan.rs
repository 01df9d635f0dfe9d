//! The plan of a merge: its inputs, and the levels of its outputs.
//!
//! Normally the inputs are all files of level 0 and the tables of level 1 that overlap them, and
//! the outputs go to level 1.
//!
//! A table that cannot be read is left alone, in level 0 or 1. The order of versions relative to it
//! must not change:
//!
//! - Nothing moves past an older table of level 0 that stays. So the files between two tables that
//!   are left alone (a run) are merged among themselves.
//! - Keys that overlap a table that stays, an older one of level 0 or one of level 1, cannot go to
//!   level 1. They become one table of level 0 at the place of the run ([`Plan::stays`]); the rest
//!   goes to level 1 as usual. So level 0 stays short, however much is written.

use std::ops::Range;

use rocksfmt::{Comparator, FileMeta, InternalKey, SENTINEL_PACKED};

use crate::mutant::mutant;
use crate::version::{Family, Version, user_key};

#[cfg(test)]
mod tests;

/// Files of level 0 from which on they are merged.
const LEVEL0_FILES: usize = 4;
/// Files of level 0 from which on they are merged even if the other inputs are much larger, so that
/// the merge gains little.
const LEVEL0_FILES_MANY: usize = 12;
/// The ratio that counts as much larger.
const MUCH_LARGER: u64 = 4;

/// A range of user keys: `from` inclusive, `to` exclusive; `None` for no bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Zone {
    pub from: Option<Vec<u8>>,
    pub to: Option<Vec<u8>>,
}

/// The inputs of a merge, by slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The newest first.
    pub level0: Vec<u32>,
    /// In the order of their keys.
    pub level1: Vec<u32>,
    /// Older versions of what goes to level 1 may lie in deeper levels.
    pub deeper: bool,
    /// The files overlap nothing: they only change their level.
    pub moves: bool,
    /// Keys that stay in level 0; in order, and not adjacent.
    pub stays: Vec<Zone>,
}

impl Plan {
    /// The fewest files of level 0 that this merge may take. If keys stay in level 0, a merge of
    /// one file could return the same file.
    pub fn least_files(&self) -> usize {
        least_files(&self.stays)
    }
}

fn least_files(stays: &[Zone]) -> usize {
    if stays.is_empty() { 1 } else { 2 }
}

/// The limits of a merge: files of level 0, and bytes for the current blocks of its sources.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub files: usize,
    pub bytes: u64,
}

impl Memory {
    /// The oldest files that may be merged together, at least `least`. Newest first, as given.
    fn fitting<'a>(
        &self,
        version: &Version,
        level0: &'a [u32],
        level1: &[u32],
        least: usize,
    ) -> &'a [u32] {
        // A source holds a block as stored, and unpacked.
        let block = |slot: u32| {
            let properties = version.table(slot).map(|table| &table.properties);
            properties.map_or(0, |p| 2 * p.data_size / p.num_data_blocks.max(1))
        };
        let mut left =
            self.bytes.saturating_sub(level1.iter().copied().map(block).max().unwrap_or(0));
        let fits = |slot: &&u32| {
            let bytes = block(**slot);
            left = left.saturating_sub(bytes);
            left > 0
        };
        let count = level0.iter().rev().take_while(fits).count().min(self.files).max(least);
        &level0[level0.len().saturating_sub(count)..]
    }
}

/// The next merge of a family, if one is due. `left_alone` tells the slots that must not be
/// touched.
pub(crate) fn plan(
    version: &Version,
    family: &Family,
    memory: Memory,
    left_alone: &dyn Fn(u32) -> bool,
) -> Option<Plan> {
    let planner = Planner { version, family, left_alone };
    planner.runs().find_map(|run| planner.run(run, memory))
}

/// Files of level 0 that merges can reduce.
pub(crate) fn level0_files(
    version: &Version,
    family: &Family,
    left_alone: &dyn Fn(u32) -> bool,
) -> usize {
    let planner = Planner { version, family, left_alone };
    planner.runs().map(|run| planner.worthwhile(run).len()).max().unwrap_or(0)
}

struct Planner<'a> {
    version: &'a Version,
    family: &'a Family,
    left_alone: &'a dyn Fn(u32) -> bool,
}

impl Planner<'_> {
    fn level(&self, at: usize) -> &[u32] {
        self.family.levels.get(at).map_or(&[], |level| &level.slots)
    }

    fn meta(&self, slot: u32) -> &FileMeta {
        self.version.meta(slot)
    }

    fn order(&self) -> Comparator {
        self.family.comparator
    }

    fn bytes(&self, slots: &[u32]) -> u64 {
        slots.iter().map(|&slot| self.meta(slot).size_bytes).sum()
    }

    /// The stretches of level 0 between files that are left alone, by index, the newest first.
    fn runs(&self) -> impl Iterator<Item = Range<usize>> {
        let level0 = self.level(0);
        let mut runs = Vec::new();
        let mut from = 0;
        for (at, &slot) in level0.iter().enumerate() {
            if (self.left_alone)(slot) {
                runs.push(from..at);
                from = at + 1;
            }
        }
        runs.push(from..level0.len());
        runs.into_iter()
    }

    /// A run without its oldest files, if these are much larger than the rest: a large file that
    /// stays in level 0 is not rewritten for every few new files.
    fn worthwhile(&self, mut run: Range<usize>) -> Range<usize> {
        if self.zones(&run).is_empty() {
            return run;
        }
        let level0 = self.level(0);
        while let [newer @ .., oldest] = &level0[run.clone()]
            && !newer.is_empty()
            && self.bytes(&[*oldest]) > MUCH_LARGER * self.bytes(newer)
        {
            run.end -= 1;
        }
        run
    }

    fn run(&self, run: Range<usize>, memory: Memory) -> Option<Plan> {
        if run.len() < LEVEL0_FILES || self.family.refused.is_some() {
            return None;
        }
        let run = self.worthwhile(run);
        if run.len() < LEVEL0_FILES {
            return None;
        }
        let stays = self.zones(&run);
        let level0 = self.level(0)[run].to_vec();
        let (first, last) = self.hull(&level0)?;
        let order = self.order();
        let all = self.level(1);
        let overlaps = |slot: &u32| {
            let meta = self.meta(*slot);
            order.cmp_user(user_key(&meta.largest), first).is_ge()
                && order.cmp_user(user_key(&meta.smallest), last).is_le()
        };
        let from = all.iter().position(overlaps).unwrap_or(all.len());
        let to = all.iter().rposition(overlaps).map_or(from, |last| last + 1);
        let level1 = &all[self.whole_keys(all, from..to)];
        let goes_along = |slot: &&u32| !stays.iter().any(|zone| self.meets(zone, **slot));
        let level1: Vec<u32> = level1.iter().filter(goes_along).copied().collect();
        if level0.len() < LEVEL0_FILES_MANY
            && self.bytes(&level0) * MUCH_LARGER < self.bytes(&level1)
        {
            return None;
        }
        // The oldest files: older versions may move below newer ones that stay, not the reverse.
        let least = least_files(&stays);
        let level0 = memory.fitting(self.version, &level0, &level1, least).to_vec();
        let deeper = self.family.levels.iter().skip(2).any(|level| !level.slots.is_empty());
        let mut sorted = level0.clone();
        let smallest = |slot: u32| user_key(&self.meta(slot).smallest);
        sorted.sort_by(|&a, &b| order.cmp_user(smallest(a), smallest(b)));
        let apart = sorted.windows(2).all(|two| {
            order.cmp_user(user_key(&self.meta(two[0]).largest), smallest(two[1])).is_lt()
        });
        let moves = apart && level1.is_empty() && stays.is_empty();
        Some(Plan { level0, level1, deeper, moves, stays })
    }

    /// The first and the last user key of files.
    fn hull(&self, slots: &[u32]) -> Option<(&[u8], &[u8])> {
        let order = |a: &&[u8], b: &&[u8]| self.order().cmp_user(a, b);
        let smallest = slots.iter().map(|&slot| user_key(&self.meta(slot).smallest));
        let largest = slots.iter().map(|&slot| user_key(&self.meta(slot).largest));
        Some((smallest.min_by(order)?, largest.max_by(order)?))
    }

    /// Whether the table of level 1 at this index begins with versions of the key that the table
    /// before it ends with.
    fn split_before(&self, level1: &[u32], at: usize) -> bool {
        let (left, right) = (self.meta(level1[at - 1]), self.meta(level1[at]));
        let (largest, smallest) = (user_key(&left.largest), user_key(&right.smallest));
        !ends_before(left) && self.order().cmp_user(largest, smallest).is_ge()
    }

    /// Extends a stretch of level 1 to both sides until no user key has versions both inside and
    /// outside of it: RocksDB splits the versions of a key over tables.
    fn whole_keys(&self, level1: &[u32], mut range: Range<usize>) -> Range<usize> {
        if mutant("neighbours_stay_behind") {
            return range;
        }
        while !range.is_empty() && range.start > 0 && self.split_before(level1, range.start) {
            range.start -= 1;
        }
        while !range.is_empty() && range.end < level1.len() && self.split_before(level1, range.end)
        {
            range.end += 1;
        }
        range
    }

    /// The keys of a run that cannot go to level 1.
    fn zones(&self, run: &Range<usize>) -> Vec<Zone> {
        let (level0, level1) = (self.level(0), self.level(1));
        let mut zones: Vec<Zone> = level0[run.end..].iter().map(|&slot| self.zone(slot)).collect();
        let mut groups: Vec<Range<usize>> = Vec::new();
        let damaged = level1.iter().any(|&slot| (self.left_alone)(slot));
        if (zones.is_empty() && !damaged) || mutant("damage_is_overtaken") {
            return zones;
        }
        if self.order() != Comparator::Bytewise {
            // Only this order has a range that ends just after a key.
            return vec![Zone { from: None, to: None }];
        }
        for at in 0..level1.len() {
            match groups.last_mut() {
                Some(group) if self.split_before(level1, at) => group.end = at + 1,
                _ => groups.push(at..at + 1),
            }
        }
        // A table of level 1 that overlaps keys that stay above it stays too; and so on.
        groups.retain(|group| {
            let damaged = level1[group.clone()].iter().any(|&slot| (self.left_alone)(slot));
            if damaged {
                zones.extend(level1[group.clone()].iter().map(|&slot| self.zone(slot)));
            }
            !damaged
        });
        loop {
            zones = joined(self.order(), zones);
            let known = groups.len();
            let mut met = Vec::new();
            groups.retain(|group| {
                let slots = &level1[group.clone()];
                let meets =
                    slots.iter().any(|slot| zones.iter().any(|zone| self.meets(zone, *slot)));
                if meets {
                    met.extend(slots.iter().map(|&slot| self.zone(slot)));
                }
                !meets
            });
            zones.append(&mut met);
            if groups.len() == known {
                break;
            }
        }
        let hull = self.hull(&level0[run.clone()]);
        zones.into_iter().filter(|zone| hull.is_some_and(|hull| self.touches(zone, hull))).collect()
    }

    /// The keys within a table's bounds.
    fn zone(&self, slot: u32) -> Zone {
        let meta = self.meta(slot);
        let mut to = user_key(&meta.largest).to_vec();
        if !ends_before(meta) {
            to.push(0);
        }
        Zone { from: Some(user_key(&meta.smallest).to_vec()), to: Some(to) }
    }

    fn meets(&self, zone: &Zone, slot: u32) -> bool {
        let meta = self.meta(slot);
        self.touches(zone, (user_key(&meta.smallest), user_key(&meta.largest)))
    }

    /// Whether a zone has keys between two, both included.
    fn touches(&self, zone: &Zone, (first, last): (&[u8], &[u8])) -> bool {
        zone.from.as_ref().is_none_or(|from| self.order().cmp_user(from, last).is_le())
            && zone.to.as_ref().is_none_or(|to| self.order().cmp_user(to, first).is_gt())
    }
}

/// Whether a table's largest key is the exclusive end of a range tombstone.
fn ends_before(meta: &FileMeta) -> bool {
    InternalKey::parse(&meta.largest).is_ok_and(|largest| largest.packed == SENTINEL_PACKED)
}

/// Sorts zones that have both bounds, and joins those that overlap or are adjacent.
fn joined(order: Comparator, mut zones: Vec<Zone>) -> Vec<Zone> {
    let bound = |bound: &Option<Vec<u8>>| bound.clone().unwrap_or_default();
    zones.sort_by(|a, b| order.cmp_user(&bound(&a.from), &bound(&b.from)));
    let mut joined: Vec<Zone> = Vec::new();
    for zone in zones {
        match joined.last_mut() {
            Some(last) if order.cmp_user(&bound(&last.to), &bound(&zone.from)).is_ge() => {
                if order.cmp_user(&bound(&zone.to), &bound(&last.to)).is_gt() {
                    last.to = zone.to;
                }
            }
            _ => joined.push(zone),
        }
    }
    joined
}
