//! Tables that merges leave alone: they cannot be read, or need more memory than there is.
//!
//! The opening finds some, and merges find others. The list is not stored: after the next opening a
//! damaged table is found again.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use rocksfmt::Comparator;

use crate::error::{Error, Kind};
use crate::range_tombstones::clipped;
use crate::version::{Family, Slot, Version};

/// The tables that merges leave alone.
#[derive(Default)]
pub(crate) struct Quarantine {
    /// Their numbers.
    tables: RefCell<BTreeSet<u64>>,
    /// One of them needs more memory than there is.
    for_memory: Cell<bool>,
}

/// Why the range tombstones of a table cannot be clipped, if they cannot.
fn unclippable(version: &Version, family: &Family, slot: u32) -> Option<Error> {
    let tried = match family.comparator {
        // All or none.
        Comparator::Bytewise => 1,
        Comparator::ReverseBytewise => usize::MAX,
    };
    clipped(version, family, slot).take(tried).find_map(Result::err)
}

impl Quarantine {
    /// The tables of a version that are known to be damaged.
    pub fn new(version: &Version) -> Quarantine {
        let quarantine = Quarantine::default();
        for family in version.families.iter().filter(|family| family.refused.is_none()) {
            for &slot in family.levels.iter().flat_map(|level| &level.slots) {
                if let Slot::Broken { error, .. } = &version.slots[slot as usize] {
                    quarantine.add(version, slot, error);
                } else if let Some(error) = unclippable(version, family, slot) {
                    quarantine.add(version, slot, &error);
                }
            }
        }
        quarantine
    }

    /// Leaves a table alone from now on, and reports it once.
    pub fn add(&self, version: &Version, slot: u32, error: &Error) {
        let number = version.meta(slot).number;
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
}
