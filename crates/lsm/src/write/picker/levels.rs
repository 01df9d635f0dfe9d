//! Picking in level 1 and below: one file, or a few, are merged into the next level.

use std::ops::Range;

use crate::version::user_key;
use crate::write::manual::InRange;
use crate::write::picker::{KeyRange, Pick, Picker, Plan, Shape};

/// Most files of a level that are compared for one pick. The search of a larger level begins at
/// another place each time.
const COMPARED_MAX: usize = 2048;
/// Most files that move together.
const MOVED_MAX: usize = 64;

impl Picker<'_> {
    /// A job that merges a part of a level into the next.
    pub(super) fn pick_level(&self, shape: &Shape, level: usize) -> Pick {
        let files = self.level(level);
        let mut candidates = self.candidates(level);
        candidates.sort_by_key(|&(cost, _)| cost);
        let found =
            candidates.iter().find_map(|&(_, at)| self.level_plan(shape, level, at..at + 1));
        match found {
            Some(plan) => Pick::Plan(Box::new(plan)),
            None if files.is_empty() => Pick::Nothing,
            None => Pick::Blocked,
        }
    }

    /// A job that merges a file of a level that has keys of a range, the first one that does not
    /// end before or at the key `after`. Files that must stay because others are left alone are
    /// passed over.
    pub(super) fn pick_level_in(
        &self,
        shape: &Shape,
        level: usize,
        range: &KeyRange,
        after: Option<&[u8]>,
    ) -> InRange {
        let (files, next) = (self.level(level), self.level(level + 1));
        for (at, &slot) in files.iter().enumerate() {
            let largest = user_key(&self.meta(slot).largest);
            let is_done = after.is_some_and(|after| self.order().cmp_user(largest, after).is_le());
            if is_done || !self.meets(range, slot) {
                continue;
            }
            if let Some(plan) = self.level_plan(shape, level, at..at + 1) {
                return InRange::Plan(Box::new(plan));
            }
            let chosen = &files[self.whole_keys(files, at..at + 1)];
            let below = self.below(chosen, next).map_or(&[][..], |below| &next[below]);
            if !chosen.iter().chain(below).any(|&slot| (self.left_alone)(slot)) {
                return InRange::Blocked;
            }
        }
        InRange::Nothing
    }

    /// The files of a level that may be merged, each with its cost: the bytes of the next level
    /// that are rewritten for each byte that moves down.
    fn candidates(&self, level: usize) -> Vec<(u64, usize)> {
        let files = self.level(level);
        let next = self.level(level + 1);
        let from = if files.len() > COMPARED_MAX { self.turn % files.len() } else { 0 };
        let some = (0..files.len().min(COMPARED_MAX)).map(|at| (from + at) % files.len());
        let idle = some.filter(|&at| !(self.left_alone)(files[at]) && !self.is_busy(files[at]));
        let cost = |at: usize| {
            let meta = self.meta(files[at]);
            let hull = (user_key(&meta.smallest), user_key(&meta.largest));
            let below = self.bytes(&next[self.overlapping(next, hull)]);
            let bytes = self.version.compensated_bytes(files[at]).max(1);
            let cost = u128::from(below) * 1024 / u128::from(bytes);
            (u64::try_from(cost).unwrap_or(u64::MAX), at)
        };
        idle.map(cost).collect()
    }

    /// The job that merges a stretch of a level, and what goes with it, if it may run.
    pub(super) fn level_plan(
        &self,
        shape: &Shape,
        level: usize,
        seed: Range<usize>,
    ) -> Option<Plan> {
        let (files, next) = (self.level(level), self.level(level + 1));
        let mut chosen = self.whole_keys(files, seed);
        let mut below = self.below(&files[chosen.clone()], next)?;
        if !self.may_take(level, &files[chosen.clone()], &next[below.clone()]) {
            return None;
        }
        let way = (level, level + 1);
        if below.is_empty() && self.may_move_files(shape, way, &files[chosen.clone()]) {
            let target = if level <= shape.unneeded { 0 } else { shape.targets[level] };
            chosen = self.extend_move(level, chosen, target);
        } else if let Some(wider) = self.widened(level, &chosen, &below) {
            chosen = wider;
        }
        below = self.below(&files[chosen.clone()], next)?;
        let inputs = files[chosen].to_vec();
        let overlapped = next[below].to_vec();
        let all: Vec<u32> = inputs.iter().chain(&overlapped).copied().collect();
        let (first, last) = self.hull(&all)?;
        Some(Plan {
            start: level,
            output: level + 1,
            moves: overlapped.is_empty() && self.may_move_files(shape, way, &inputs),
            hull: (first.to_vec(), last.to_vec()),
            inputs,
            overlapped,
            stays: Vec::new(),
            file_bytes: self.file_bytes(shape, level + 1),
            place: self.place(shape, level + 1),
        })
    }

    /// The files of the next level that files overlap, whole keys included.
    fn below(&self, inputs: &[u32], next: &[u32]) -> Option<Range<usize>> {
        Some(self.whole_keys(next, self.overlapping(next, self.hull(inputs)?)))
    }

    /// The job that rewrites a stretch of a level in its place, if it may run.
    pub(super) fn rewrite_plan(
        &self,
        shape: &Shape,
        level: usize,
        seed: Range<usize>,
    ) -> Option<Plan> {
        let files = self.level(level);
        let inputs = files[self.whole_keys(files, seed)].to_vec();
        let (first, last) = self.hull(&inputs)?;
        let left_alone = inputs.iter().any(|&slot| (self.left_alone)(slot));
        if left_alone || !self.may_run(&inputs, level, (first, last)) {
            return None;
        }
        Some(Plan {
            start: level,
            output: level,
            moves: false,
            hull: (first.to_vec(), last.to_vec()),
            inputs,
            overlapped: Vec::new(),
            stays: Vec::new(),
            file_bytes: self.file_bytes(shape, level),
            place: self.place(shape, level),
        })
    }

    fn may_take(&self, level: usize, inputs: &[u32], overlapped: &[u32]) -> bool {
        let all: Vec<u32> = inputs.iter().chain(overlapped).copied().collect();
        let Some(hull) = self.hull(&all) else { return false };
        !all.iter().any(|&slot| (self.left_alone)(slot)) && self.may_run(&all, level + 1, hull)
    }

    /// More files that go along without more of the next level: all that lie within the range of
    /// the files that are rewritten anyway.
    fn widened(
        &self,
        level: usize,
        chosen: &Range<usize>,
        below: &Range<usize>,
    ) -> Option<Range<usize>> {
        let (files, next) = (self.level(level), self.level(level + 1));
        let all: Vec<u32> =
            files[chosen.clone()].iter().chain(&next[below.clone()]).copied().collect();
        let wider = self.whole_keys(files, self.overlapping(files, self.hull(&all)?));
        if wider.len() <= chosen.len() || self.below(&files[wider.clone()], next)? != *below {
            return None;
        }
        let (inputs, overlapped) = (&files[wider.clone()], &next[below.clone()]);
        let fits = self.bytes(inputs) + self.bytes(overlapped) <= self.options().compaction_bytes;
        (fits && self.may_take(level, inputs, overlapped)).then_some(wider)
    }

    /// Adds the files after those that move, as long as they move, too, and the level exceeds its
    /// target.
    fn extend_move(&self, level: usize, chosen: Range<usize>, target: u64) -> Range<usize> {
        let (files, next) = (self.level(level), self.level(level + 1));
        let bytes = self.family.levels.get(level).map_or(0, |level| level.bytes());
        let mut excess = bytes.saturating_sub(target);
        let mut moved = chosen;
        while moved.len() < MOVED_MAX && moved.end < files.len() {
            excess = excess.saturating_sub(self.meta(files[moved.end - 1]).size_bytes);
            let longer = self.whole_keys(files, moved.start..moved.end + 1);
            let inputs = &files[longer.clone()];
            let moves = self.below(inputs, next).is_some_and(|below| below.is_empty())
                && !self.any_dense(inputs);
            if excess == 0 || !moves || !self.may_take(level, inputs, &[]) {
                break;
            }
            moved = longer;
        }
        moved
    }
}
