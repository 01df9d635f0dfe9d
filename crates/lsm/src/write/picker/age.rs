//! Files that are due for their age alone, as `ttl` and `periodic_compaction_seconds` say.
//!
//! - `ttl`: a file with old data moves down, level by level, until it is in the deepest level that
//!   has files. So what was deleted or overwritten long ago gives its space back, even if no new
//!   writes push it down. Outputs keep the time of the oldest data of their inputs.
//! - `periodic_compaction_seconds`: a file that was written long ago is rewritten in its level, so
//!   that compaction filters see its entries. A file of level 0 goes to the base instead.
//!
//! These are the rules of RocksDB's `ComputeExpiredTtlFiles` and
//! `ComputeFilesMarkedForPeriodicCompaction`. Files of unknown age are never due.

use crate::family_options::FamilyOptions;
use crate::version::{Family, Version};
use crate::write::picker::{Pick, Picker, Plan, Shape};

/// Most files that are tried for one pick.
const TRIED_MAX: usize = 256;

/// What is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DueForAge {
    /// Its data is older than `ttl`: it goes down a level.
    Down,
    /// It is older than `periodic_compaction_seconds`: it is rewritten.
    Rewrite,
}

/// A file that is due for its age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Aged {
    pub level: usize,
    pub slot: u32,
    /// Its number: another file may be in the slot by now.
    pub number: u64,
    pub due: DueForAge,
}

impl Aged {
    /// The index of the file in its level, if it is still there.
    pub fn place(&self, version: &Version, family: &Family) -> Option<usize> {
        let at = family.place_of(version, self.level, self.slot)?;
        (version.meta(self.slot).number == self.number).then_some(at)
    }
}

/// When a file is due to go down, and to be rewritten, in Unix seconds; `u64::MAX` for never. The
/// times are those of [`crate::version::Version::times`], `deepest` is the deepest level that has
/// files.
pub(crate) fn when_due(
    options: &FamilyOptions,
    level: usize,
    deepest: usize,
    (data, file): (u64, u64),
) -> [(u64, DueForAge); 2] {
    let after = |time: u64, age: u64| match time {
        0 => u64::MAX,
        known => known.saturating_add(age).saturating_add(1),
    };
    let down = if level < deepest { after(data, options.ttl) } else { u64::MAX };
    let rewrite = after(if file > 0 { file } else { data }, options.period);
    [(down, DueForAge::Down), (rewrite, DueForAge::Rewrite)]
}

impl Picker<'_> {
    /// A job for a file that is due for its age. No file leaves the base while level 0 waits for
    /// it.
    pub(super) fn pick_aged(&self, shape: &Shape, level0_waits: bool) -> Option<Plan> {
        let may_go = |aged: &&Aged| !(level0_waits && aged.level == shape.base);
        let tried = self.aged.iter().filter(may_go).take(TRIED_MAX);
        tried.filter_map(|aged| self.aged_plan(shape, aged)).next()
    }

    fn aged_plan(&self, shape: &Shape, aged: &Aged) -> Option<Plan> {
        let at = aged.place(self.version, self.family)?;
        match (aged.level, aged.due) {
            (0, _) => match self.pick_level0_of(shape, aged.slot) {
                Pick::Plan(plan) => Some(*plan),
                Pick::Nothing | Pick::Blocked => None,
            },
            (level, DueForAge::Down) => self.level_plan(shape, level, at..at + 1),
            (level, DueForAge::Rewrite) => self.rewrite_plan(shape, level, at..at + 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_due_once_it_is_older_than_the_options_say() {
        let options = FamilyOptions { ttl: 100, period: 500, ..FamilyOptions::default() };
        let due = |level, times, now: u64| {
            let whens = when_due(&options, level, 4, times);
            whens.into_iter().find(|when| when.0 <= now).map(|when| when.1)
        };
        let times = (1000, 2000);
        assert_eq!((due(2, times, 1100), due(2, times, 1101)), (None, Some(DueForAge::Down)));
        assert_eq!(due(4, times, 2500), None, "the deepest level has nothing below");
        assert_eq!(due(4, times, 2501), Some(DueForAge::Rewrite));
        assert_eq!(due(2, times, 2501), Some(DueForAge::Down), "it would be rewritten twice");
        assert_eq!(due(4, (1000, 0), 1501), Some(DueForAge::Rewrite), "the age of its data counts");
        assert_eq!(due(2, (0, 0), u64::MAX - 1), None, "nothing is known");
        let never = FamilyOptions { ttl: u64::MAX, period: u64::MAX, ..options };
        assert!(when_due(&never, 0, 4, times).iter().all(|when| when.0 == u64::MAX));
    }
}
