//! Tables that merges leave alone: they cannot be read, or need more memory than there is.
//!
//! The opening finds some, and merges find others. The list is not stored: after the next opening a
//! damaged table is found again.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use crate::error::{Error, Kind};
use crate::version::{Slot, Version};
use crate::write::merge;
use crate::write::merge_plan;

/// The tables that merges leave alone.
#[derive(Default)]
pub(crate) struct Quarantine {
    /// Their numbers.
    tables: RefCell<BTreeSet<u64>>,
    /// One of them needs more memory than there is.
    for_memory: Cell<bool>,
    /// The last result of [`Quarantine::level0_files`], and the epoch of its version.
    level0_files: Cell<Option<(u64, usize)>>,
}

impl Quarantine {
    /// The tables of a version, in the levels that are merged, that are known to be damaged.
    pub fn new(version: &Version) -> Quarantine {
        let quarantine = Quarantine::default();
        for family in version.families.iter().filter(|family| family.refused.is_none()) {
            for &slot in family.levels.iter().take(2).flat_map(|level| &level.slots) {
                if let Slot::Broken { error, .. } = &version.slots[slot as usize] {
                    quarantine.add(version, slot, error);
                } else if merge::truncated_tombstones(version, slot, family.comparator).is_none() {
                    let name = version.meta(slot).number;
                    let text = format!(
                        "{name:06}.sst: range deletions that reach beyond the table, in reverse order"
                    );
                    quarantine.add(version, slot, &Error::new(Kind::Unsupported, text));
                }
            }
        }
        quarantine
    }

    /// Leaves a table alone from now on, and reports it once.
    pub fn add(&self, version: &Version, slot: u32, error: &Error) {
        let number = version.meta(slot).number;
        self.level0_files.set(None);
        self.for_memory.set(self.for_memory.get() || error.kind() == Kind::Memory);
        if self.tables.borrow_mut().insert(number) {
            let advice = match error.kind() {
                Kind::Memory => "start with more memory",
                _ => "stop and restore the file from a backup",
            };
            tracing::error!(
                "merges leave {number:06}.sst alone, with what overlaps it: {error}; writing goes on: \
                 {advice}"
            );
        }
    }

    /// Whether one is left alone because there was no memory to read it.
    pub fn for_memory(&self) -> bool {
        self.for_memory.get()
    }

    /// Whether a version's table is left alone.
    pub fn holds(&self, version: &Version, slot: u32) -> bool {
        let tables = self.tables.borrow();
        !tables.is_empty() && tables.contains(&version.meta(slot).number)
    }

    /// The number of tables of a version that are left alone.
    pub fn tables(&self, version: &Version) -> usize {
        if self.tables.borrow().is_empty() {
            return 0;
        }
        let levels = version.families.iter().flat_map(|family| &family.levels);
        levels.flat_map(|level| &level.slots).filter(|slot| self.holds(version, **slot)).count()
    }

    /// Files of level 0 that merges can reduce, of the family that has most.
    pub fn level0_files(&self, version: &Version) -> usize {
        if self.tables.borrow().is_empty() {
            let levels = version.families.iter().filter_map(|family| family.levels.first());
            return levels.map(|level| level.slots.len()).max().unwrap_or(0);
        }
        if let Some((epoch, files)) = self.level0_files.get()
            && epoch == version.epoch
        {
            return files;
        }
        let left_alone = |slot| self.holds(version, slot);
        let of = |family| merge_plan::level0_files(version, family, &left_alone);
        let files = version.families.iter().map(of).max().unwrap_or(0);
        self.level0_files.set(Some((version.epoch, files)));
        files
    }
}
