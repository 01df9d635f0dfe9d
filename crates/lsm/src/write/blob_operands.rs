//! Merge operands of keys whose values are in blob files.
//!
//! When RocksDB opens a directory after a crash, it writes the logs to tables, and merges what it
//! can. That flush cannot read blob files: 7.8 stops if a reference to a blob file and then an
//! operand of the same key are in logs. So no log gets such an operand as long as logs have the
//! reference:
//!
//! - If the newest entry of the key in the memtables is a reference, the memtables become tables
//!   before the group that has the operand. After that the family's values stay in the log until an
//!   entire memtable was filled without an operand for a large value: a program that sets values
//!   and adds to them at once does not wait each time.
//! - In the group itself, values of keys that get operands stay in the log.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use rocksfmt::{Op, SEQUENCE_MAX, ValueType, WriteBatch, unpack};

use crate::db::CfId;
use crate::error::{Error, Result};
use crate::write::commit::batches;
use crate::write::state::{Pending, WriteState};

/// The memtables for which a family's values stay in the log: the present ones and the next.
const MEMTABLES: u32 = 2;

/// Which values stay in the log because of operands.
#[derive(Default)]
pub(crate) struct Operands {
    /// The keys that get operands in the present group.
    keys: RefCell<BTreeSet<(CfId, Vec<u8>)>>,
    /// Families of which all values stay, and for how many memtables.
    families: RefCell<BTreeMap<CfId, u32>>,
}

impl Operands {
    /// Whether the value that the present group sets is not to be in a blob file.
    pub fn keep_whole(&self, family: CfId, key: &[u8]) -> bool {
        let keys = self.keys.borrow();
        self.families.borrow().contains_key(&family)
            || (!keys.is_empty() && keys.contains(&(family, key.to_vec())))
    }

    /// Notes that new memtables begin.
    pub fn begin_memtables(&self) {
        self.families.borrow_mut().retain(|_, left| {
            *left -= 1;
            *left > 0
        });
    }

    /// Notes that the memtables with references that the present group's operands meet, those of
    /// these families, are tables.
    pub fn note_flushed(&self, met: BTreeSet<CfId>) {
        self.families.borrow_mut().extend(met.into_iter().map(|family| (family, MEMTABLES)));
    }
}

impl WriteState {
    /// Notes the keys that get operands from a group. Returns the families with references to
    /// blob files in memtables that these operands would follow.
    pub fn met_references(&self, group: &mut [Pending]) -> Result<BTreeSet<CfId>> {
        let operands = &self.blobs.operands;
        let mut keys = operands.keys.borrow_mut();
        keys.clear();
        let mut met = BTreeSet::new();
        if !self.blobs.has_stores() {
            return Ok(met);
        }
        let version = self.db.version();
        let merges = version.families.iter().filter(|family| family.merge.operator.is_some());
        let stores: BTreeMap<CfId, usize> = merges
            .filter_map(|family| Some((family.id, self.blobs.value_min(family.id)?)))
            .collect();
        if stores.is_empty() {
            return Ok(met);
        }
        let format = |e: rocksfmt::Error| Error::format("a batch", &e);
        for (batch, _) in batches(group) {
            for op in WriteBatch::parse(batch.finish(0)).map_err(format)?.ops() {
                match op.map_err(format)?.1 {
                    Op::Merge { cf, key, .. } if stores.contains_key(&cf) => {
                        keys.insert((cf, key.to_vec()));
                    }
                    _ => {}
                }
            }
        }
        for (id, key) in &*keys {
            let (Ok(family), Some(&value_min)) = (version.family(*id), stores.get(id)) else {
                continue;
            };
            let found = family.mems.iter().find_map(|mem| Some((mem, mem.get(key, SEQUENCE_MAX)?)));
            let Some((mem, (packed, value))) = found else { continue };
            let kind = unpack(packed).1;
            if kind == ValueType::BlobIndex as u8 {
                met.insert(*id);
            } else if kind == ValueType::Value as u8
                && mem.value(&value).len() >= value_min
                && let Some(left) = operands.families.borrow_mut().get_mut(id)
            {
                // Else it would be a reference.
                *left = MEMTABLES;
            }
        }
        Ok(met)
    }
}
