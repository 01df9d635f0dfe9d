//! Picking in level 0: all files that can be merged go into the base level together. On request,
//! and for their age, only some files with all those that they overlap. While the base is busy, the
//! newest files are merged among themselves, so that level 0 stays short.
//!
//! A table that cannot be read is left alone, in level 0 or in the base. The order of versions
//! relative to it must not change:
//!
//! - Nothing moves past an older table of level 0 that stays. So the files between two tables that
//!   are left alone (a run) are merged among themselves.
//! - Keys that overlap a table that stays, an older one of level 0 or one of the base, cannot go to
//!   the base. They become one table of level 0 at the place of the run ([`Plan::stays`]); the rest
//!   goes to the base as usual. So level 0 stays short, however much is written.

use std::ops::Range;

use rocksfmt::Comparator;

use crate::mutant::mutant;
use crate::table_options::TablePlace;
use crate::version::{Version, user_key};
use crate::write::manual::InRange;
use crate::write::merge::LARGE_BLOCK;
use crate::write::picker::{Memory, Pick, Picker, Plan, Shape, ends_before};

/// As many times `level0_file_num_compaction_trigger`, level 0 is merged even if the other inputs
/// are much larger, so that the merge gains little; or at this part of
/// `level0_slowdown_writes_trigger`, in percent, if that is less.
const MANY: usize = 3;
const MANY_OF_SLOWDOWN: usize = 60;
/// The ratio that counts as much larger.
const MUCH_LARGER: u64 = 4;
/// The fewest files that are merged within level 0, and how far level 0 must exceed its trigger.
const WITHIN_MIN: usize = 4;
const WITHIN_EXCESS: usize = 2;

/// A range of user keys: `from` inclusive, `to` exclusive; `None` for no bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyRange {
    pub from: Option<Vec<u8>>,
    pub to: Option<Vec<u8>>,
}

impl KeyRange {
    /// Whether it has keys from `start` to before `end`.
    pub fn meets(&self, order: Comparator, start: &[u8], end: &[u8]) -> bool {
        self.from.as_ref().is_none_or(|from| order.cmp_user(from, end).is_lt())
            && self.to.as_ref().is_none_or(|to| order.cmp_user(start, to).is_lt())
    }
}

pub(super) fn least_files(stays: &[KeyRange]) -> usize {
    if stays.is_empty() { 1 } else { 2 }
}

impl Memory {
    /// The oldest files that may be merged together, at least `least`. Newest first, as given.
    fn fitting<'a>(
        &self,
        version: &Version,
        level0: &'a [u32],
        overlapped: &[u32],
        least: usize,
    ) -> &'a [u32] {
        // A source holds a block as stored, and unpacked.
        let block = |slot: u32| {
            let properties = version.table(slot).map(|table| &table.properties);
            properties.map_or(0, |p| 2 * p.data_size / p.num_data_blocks.max(1))
        };
        // Of blocks that are large values a merge holds few at a time (`Merging::shed`). If each
        // counted, a few files would be merged with all of the base, again and again.
        let is_value = |slot: u32| {
            let properties = version.table(slot).map(|table| &table.properties);
            properties.is_ok_and(|p| p.num_entries <= 2 * p.num_data_blocks)
        };
        let all = overlapped.iter().chain(level0).copied();
        let largest = all.map(block).max().unwrap_or(0);
        let mut left = self.bytes.saturating_sub(largest);
        let fits = |slot: &&u32| {
            let bytes = match is_value(**slot) {
                true => block(**slot).min(LARGE_BLOCK as u64),
                false => block(**slot),
            };
            left = left.saturating_sub(bytes);
            left > 0
        };
        let count = level0.iter().rev().take_while(fits).count().min(self.files).max(least);
        &level0[level0.len().saturating_sub(count)..]
    }
}

impl Picker<'_> {
    /// Files of level 0 that merges into the base can reduce.
    pub(super) fn level0_files(&self, base: usize) -> usize {
        self.runs().map(|run| self.worthwhile(run, base).len()).max().unwrap_or(0)
    }

    /// Files of level 0 from which on it is merged, however much larger the other inputs are.
    fn level0_many(&self) -> usize {
        let options = self.options();
        let most = options.level0_slowdown * MANY_OF_SLOWDOWN / 100;
        (MANY * options.level0_trigger).min(most).max(options.level0_trigger)
    }

    /// Files of level 0 at which a merge begins, if level 0 has `bytes` and the base `base_bytes`.
    pub(super) fn level0_due(&self, bytes: u64, base_bytes: u64) -> usize {
        let trigger = self.options().level0_trigger;
        let each = bytes / self.level(0).len().max(1) as u64;
        match each {
            _ if self.hidden(self.level(0)) >= self.hidden_max => trigger,
            0 => trigger,
            each => (base_bytes.div_ceil(MUCH_LARGER * each) as usize)
                .clamp(trigger, self.level0_many()),
        }
    }

    /// A job that merges level 0 into the base.
    pub(super) fn pick_level0(&self, shape: &Shape) -> Pick {
        if self.running.iter().any(|plan| plan.start == 0) {
            return Pick::Blocked;
        }
        let mut blocked = false;
        for run in self.runs() {
            match self.run(run, shape) {
                Pick::Nothing => {}
                Pick::Blocked => blocked = true,
                plan @ Pick::Plan(_) => return plan,
            }
        }
        if blocked { Pick::Blocked } else { Pick::Nothing }
    }

    /// A job that merges files of level 0 that have keys of a range, and entries up to the sequence
    /// `until`, with those that they overlap.
    pub(super) fn pick_level0_in(&self, shape: &Shape, range: &KeyRange, until: u64) -> InRange {
        let mut found = InRange::Nothing;
        for &slot in self.level(0) {
            if !self.meets(range, slot) || self.meta(slot).smallest_sequence > until {
                continue;
            }
            match self.pick_level0_of(shape, slot) {
                Pick::Plan(plan) => return InRange::Plan(plan),
                Pick::Blocked => found = InRange::Blocked,
                Pick::Nothing => {}
            }
        }
        found
    }

    /// A job that merges a file of level 0 into the base, with all those that it overlaps.
    pub(super) fn pick_level0_of(&self, shape: &Shape, slot: u32) -> Pick {
        let at = self.level(0).iter().position(|&other| other == slot);
        let run = at.and_then(|at| self.runs().find(|run| run.contains(&at)));
        let Some(run) = run else { return Pick::Nothing };
        if self.running.iter().any(|plan| plan.start == 0) {
            return Pick::Blocked;
        }
        let stays = self.zones(&run, shape.base);
        let mut inputs = self.level(0)[run].to_vec();
        if stays.is_empty() {
            self.keep_overlapping(&mut inputs, slot);
        }
        self.level0_plan(&inputs, shape, stays, true)
    }

    /// Keeps those files that overlap one of them, or a file that does so, and so on: no other file
    /// has a key between their first and their last.
    fn keep_overlapping(&self, files: &mut Vec<u32>, of: u32) {
        let order = self.order();
        let mut hull = self.hull(&[of]);
        loop {
            let Some((first, last)) = hull else { return };
            let touches = |slot: &u32| {
                let meta = self.meta(*slot);
                order.cmp_user(user_key(&meta.smallest), last).is_le()
                    && order.cmp_user(user_key(&meta.largest), first).is_ge()
            };
            let touching: Vec<u32> = files.iter().copied().filter(touches).collect();
            let wider = self.hull(&touching);
            if wider == hull {
                *files = touching;
                return;
            }
            hull = wider;
        }
    }

    /// A job that merges the newest files of level 0 into one, while those below are busy
    /// (`PickIntraL0Compaction` of RocksDB): as long as each more file makes it cheaper for each
    /// file less.
    pub(super) fn pick_within_level0(&self, shape: &Shape) -> Option<Plan> {
        let level0 = self.level(0);
        let runs_already = |plan: &Plan| plan.start == 0 && plan.output == 0;
        if level0.len() < self.options().level0_trigger + WITHIN_EXCESS
            || self.running.iter().any(|plan| runs_already(plan))
        {
            return None;
        }
        // An ingested file may be newer than writes in memory, which will be above it.
        let is_ingested =
            |slot: u32| self.version.table(slot).is_ok_and(|table| table.global_sequence.is_some());
        let stays = |slot: u32| self.is_busy(slot) || (self.left_alone)(slot) || is_ingested(slot);
        let files = &level0[..level0.iter().position(|&slot| stays(slot)).unwrap_or(level0.len())];
        let most = self.options().level_base_bytes.min(self.options().compaction_bytes);
        let (mut count, mut bytes, mut each) = (0, 0u64, u64::MAX);
        for &slot in files {
            bytes += self.meta(slot).size_bytes;
            let now = bytes / (count as u64).max(1);
            if now > each || bytes > most {
                break;
            }
            each = if count == 0 { u64::MAX } else { now };
            count += 1;
        }
        let files = self.memory.fitting(self.version, &files[..count], &[], 0);
        if files.len() < WITHIN_MIN {
            return None;
        }
        let (first, last) = self.hull(files)?;
        Some(Plan {
            start: 0,
            output: 0,
            moves: false,
            hull: (first.to_vec(), last.to_vec()),
            inputs: files.to_vec(),
            overlapped: Vec::new(),
            stays: vec![KeyRange { from: None, to: None }],
            file_bytes: self.file_bytes(shape, shape.base),
            place: TablePlace::FLUSH,
        })
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
    fn worthwhile(&self, mut run: Range<usize>, base: usize) -> Range<usize> {
        if self.zones(&run, base).is_empty() {
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

    /// A merge of a run.
    fn run(&self, run: Range<usize>, shape: &Shape) -> Pick {
        let options = self.options();
        let is_few = |run: &Range<usize>| {
            run.len() < options.level0_trigger
                && self.bytes(&self.level(0)[run.clone()]) < options.level_base_bytes
        };
        if run.is_empty() || is_few(&run) {
            return Pick::Nothing;
        }
        let run = self.worthwhile(run, shape.base);
        if run.is_empty() || is_few(&run) {
            return Pick::Nothing;
        }
        let stays = self.zones(&run, shape.base);
        self.level0_plan(&self.level(0)[run], shape, stays, false)
    }

    /// A merge of files of level 0. If it is `wanted`, it need not be worthwhile.
    fn level0_plan(
        &self,
        inputs: &[u32],
        shape: &Shape,
        stays: Vec<KeyRange>,
        wanted: bool,
    ) -> Pick {
        let base = shape.base;
        let Some(overlapped) = self.overlapped_below_level0(inputs, base, &stays) else {
            return Pick::Nothing;
        };
        if !wanted
            && inputs.len() < self.level0_many()
            && self.bytes(inputs) * MUCH_LARGER < self.bytes(&overlapped)
            && self.hidden(inputs) < self.hidden_max
        {
            return Pick::Nothing;
        }
        // The oldest files: older versions may move below newer ones that stay, not the reverse.
        let inputs =
            self.memory.fitting(self.version, inputs, &overlapped, least_files(&stays)).to_vec();
        let all: Vec<u32> = inputs.iter().chain(&overlapped).copied().collect();
        let Some(hull) = self.hull(&all) else { return Pick::Nothing };
        if inputs.len() < least_files(&stays) {
            return Pick::Nothing;
        }
        if !self.may_run(&all, base, hull) {
            return Pick::Blocked;
        }
        Pick::Plan(Box::new(Plan {
            start: 0,
            output: base,
            moves: overlapped.is_empty()
                && stays.is_empty()
                && self.are_apart(&inputs)
                && self.may_move_files(shape, (0, base), &inputs),
            hull: (hull.0.to_vec(), hull.1.to_vec()),
            inputs,
            overlapped,
            stays,
            file_bytes: self.file_bytes(shape, base),
            place: self.place(shape, base),
        }))
    }

    /// The files of the base that files of level 0 overlap, without those that stay as they are.
    fn overlapped_below_level0(
        &self,
        inputs: &[u32],
        base: usize,
        stays: &[KeyRange],
    ) -> Option<Vec<u32>> {
        let all = self.level(base);
        let overlapping = self.overlapping(all, self.hull(inputs)?);
        let overlapped = &all[self.whole_keys(all, overlapping)];
        let goes_along = |slot: &&u32| !stays.iter().any(|zone| self.meets(zone, **slot));
        Some(overlapped.iter().filter(goes_along).copied().collect())
    }

    /// Whether no two files have a user key in common, in the order in which readers would find
    /// them in one level.
    fn are_apart(&self, files: &[u32]) -> bool {
        let order = self.order();
        let smallest = |slot: u32| user_key(&self.meta(slot).smallest);
        let mut sorted = files.to_vec();
        sorted.sort_by(|&a, &b| order.cmp_user(smallest(a), smallest(b)));
        sorted.windows(2).all(|two| {
            order.cmp_user(user_key(&self.meta(two[0]).largest), smallest(two[1])).is_lt()
        })
    }

    /// The keys of a run that cannot go to the base.
    fn zones(&self, run: &Range<usize>, base: usize) -> Vec<KeyRange> {
        let (level0, below) = (self.level(0), self.level(base));
        let mut zones: Vec<KeyRange> =
            level0[run.end..].iter().map(|&slot| self.zone(slot)).collect();
        let mut groups: Vec<Range<usize>> = Vec::new();
        let damaged = below.iter().any(|&slot| (self.left_alone)(slot));
        if (zones.is_empty() && !damaged) || mutant("damage_is_overtaken") {
            return zones;
        }
        if self.order() != Comparator::Bytewise {
            // Only this order has a range that ends just after a key.
            return vec![KeyRange { from: None, to: None }];
        }
        for at in 0..below.len() {
            match groups.last_mut() {
                Some(group) if self.split_before(below, at) => group.end = at + 1,
                _ => groups.push(at..at + 1),
            }
        }
        // A table of the base that overlaps keys that stay above it stays too; and so on.
        groups.retain(|group| {
            let damaged = below[group.clone()].iter().any(|&slot| (self.left_alone)(slot));
            if damaged {
                zones.extend(below[group.clone()].iter().map(|&slot| self.zone(slot)));
            }
            !damaged
        });
        loop {
            zones = joined(self.order(), zones);
            let known = groups.len();
            let mut met = Vec::new();
            groups.retain(|group| {
                let slots = &below[group.clone()];
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
    fn zone(&self, slot: u32) -> KeyRange {
        let meta = self.meta(slot);
        let mut to = user_key(&meta.largest).to_vec();
        if !ends_before(meta) {
            to.push(0);
        }
        KeyRange { from: Some(user_key(&meta.smallest).to_vec()), to: Some(to) }
    }

    /// Whether a file has keys of a range, by its bounds.
    pub fn meets(&self, zone: &KeyRange, slot: u32) -> bool {
        let meta = self.meta(slot);
        self.touches(zone, (user_key(&meta.smallest), user_key(&meta.largest)))
    }

    /// Whether a zone has keys between two, both included.
    fn touches(&self, zone: &KeyRange, (first, last): (&[u8], &[u8])) -> bool {
        zone.from.as_ref().is_none_or(|from| self.order().cmp_user(from, last).is_le())
            && zone.to.as_ref().is_none_or(|to| self.order().cmp_user(to, first).is_gt())
    }
}

/// Sorts zones that have both bounds, and joins those that overlap or are adjacent.
fn joined(order: Comparator, mut zones: Vec<KeyRange>) -> Vec<KeyRange> {
    let bound = |bound: &Option<Vec<u8>>| bound.clone().unwrap_or_default();
    zones.sort_by(|a, b| order.cmp_user(&bound(&a.from), &bound(&b.from)));
    let mut joined: Vec<KeyRange> = Vec::new();
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
