//! Files that are full of tombstones: scans pass all of them, and what they delete takes space.
//! They go down, level by level, when nothing is due for its size, until they meet what they delete
//! in the deepest level, where both are dropped.
//!
//! A file is left where it is if its merge would mostly rewrite entries that stay: tombstones that
//! lie far apart cost a scan little.

use crate::write::picker::{Pick, Picker, Plan, Shape};

/// Most files that are tried for one pick.
const TRIED_MAX: usize = 64;
/// A merge may rewrite this many entries of the next level for each tombstone.
const REWRITTEN_MAX: u64 = 10;

impl Picker<'_> {
    /// Whether files full of tombstones are above others.
    pub(super) fn has_dense(&self) -> bool {
        self.levels_above_others().any(|level| !self.family.levels[level].dense().is_empty())
    }

    /// The levels above the deepest that has files, and level 0 if it has several.
    fn levels_above_others(&self) -> impl Iterator<Item = usize> {
        let levels = &self.family.levels;
        let deepest = levels.iter().rposition(|level| !level.slots.is_empty()).unwrap_or(0);
        0..deepest.max(usize::from(self.level(0).len() > 1))
    }

    /// A job for a file that is full of tombstones. No file leaves the base while level 0 waits for
    /// it.
    pub(super) fn pick_dense(&self, shape: &Shape, level0_waits: bool) -> Option<Plan> {
        let levels = self.levels_above_others().filter(|&at| !(level0_waits && at == shape.base));
        let files = levels.flat_map(|at| {
            let dense = self.family.levels[at].dense();
            dense.iter().map(move |&slot| (at, slot))
        });
        let idle = files.filter(|&(_, slot)| !(self.left_alone)(slot) && !self.is_busy(slot));
        let mut plans = idle.take(TRIED_MAX).filter_map(|(level, slot)| match level {
            0 => match self.pick_level0_of(shape, slot) {
                Pick::Plan(plan) => Some(*plan),
                Pick::Nothing | Pick::Blocked => None,
            },
            _ => {
                let at = self.family.place_of(self.version, level, slot)?;
                self.level_plan(shape, level, at..at + 1)
            }
        });
        plans.find(|plan| plan.stays.is_empty() && self.pays(plan))
    }

    /// Whether a merge drops a good part of what it rewrites.
    fn pays(&self, plan: &Plan) -> bool {
        let sum = |slots: &[u32], of: fn(&crate::table::Table) -> u64| -> u64 {
            let tables = slots.iter().filter_map(|&slot| self.version.table(slot).ok());
            tables.map(of).sum()
        };
        let tombstones = sum(&plan.inputs, |table| table.deletions());
        let rewritten = sum(&plan.overlapped, |table| table.properties.num_entries);
        rewritten <= tombstones.saturating_mul(REWRITTEN_MAX)
    }

    /// Whether files may move to another level as they are. Of those full of tombstones a merge
    /// drops much even if nothing is below.
    pub(super) fn may_move_files(
        &self,
        shape: &Shape,
        (from, to): (usize, usize),
        files: &[u32],
    ) -> bool {
        self.may_move(shape, from, to) && !self.any_dense(files)
    }

    /// Whether one of these files is full of tombstones.
    pub(super) fn any_dense(&self, files: &[u32]) -> bool {
        files.iter().any(|&slot| self.version.slots[slot as usize].is_dense())
    }
}
