//! The memtables that a replay fills: which operations count, and how much memory they take.

use std::collections::{BTreeMap, BTreeSet};

use rocksfmt::{ColumnFamily, ManifestState, Op, WriteBatch, keys_noted};

use crate::error::Result;
use crate::mem::recovered::{RecoveredBuilder, Sorting};

struct Family {
    log_number: u64,
    /// `None` if the order of keys is unknown.
    builder: Option<RecoveredBuilder>,
}

/// A memtable for each column family.
pub(crate) struct Memtables {
    families: BTreeMap<u32, Family>,
    memory_max: u64,
    memory: u64,
    /// Bytes of all logs, if announced.
    log_bytes: u64,
    /// The column families with writes in the logs but no memtable, because their order of keys is
    /// unknown.
    pub unread: BTreeSet<u32>,
}

/// The effect of a batch.
pub(super) struct Applied {
    /// Operations in it, including skipped ones.
    pub operations: u64,
    /// Whether it writes to the default column family.
    pub changes_keys: bool,
    /// The change of the number of keys that it states.
    pub keys_noted: Option<i64>,
}

impl Memtables {
    /// Empty memtables, which are full at `memory_max` bytes.
    pub fn new(state: &ManifestState, memory_max: u64) -> Memtables {
        let family = |cf: &ColumnFamily| Family {
            log_number: cf.log_number,
            builder: cf.comparator().ok().map(RecoveredBuilder::new),
        };
        Memtables {
            families: state.column_families.iter().map(|(&id, cf)| (id, family(cf))).collect(),
            memory_max,
            memory: 0,
            log_bytes: 0,
            unread: BTreeSet::new(),
        }
    }

    /// Announces the total bytes of all logs, before the first one: about what will be held.
    pub fn expect(&mut self, log_bytes: u64) {
        self.log_bytes = log_bytes;
    }

    /// Whether they hold more than they should, so that a piece must be taken.
    pub fn are_full(&self) -> bool {
        self.memory > self.memory_max
    }

    /// Bytes held: replayed since the last piece.
    pub fn held(&self) -> u64 {
        self.memory
    }

    /// Takes everything replayed since the last piece, not sorted yet. It is older than everything
    /// that follows.
    pub fn take_piece(&mut self) -> BTreeMap<u32, Sorting> {
        let mut piece = BTreeMap::new();
        for (&id, family) in &mut self.families {
            let builder = family.builder.as_mut();
            let Some(builder) = builder.filter(|builder| !builder.is_empty()) else { continue };
            let new = RecoveredBuilder::new(builder.comparator());
            piece.insert(id, std::mem::replace(builder, new).freeze());
        }
        self.memory = 0;
        piece
    }

    /// Applies a batch from log `number`. `format` adds the batch's place to an error.
    pub(super) fn apply(
        &mut self,
        number: u64,
        batch: &WriteBatch<'_>,
        format: impl Fn(&rocksfmt::Error) -> crate::Error,
    ) -> Result<Applied> {
        let mut applied = Applied { operations: 0, changes_keys: false, keys_noted: None };
        for op in batch.ops() {
            let (sequence, op) = op.map_err(|e| format(&e))?;
            if let Op::LogData(annotation) = op {
                applied.keys_noted = applied.keys_noted.or(keys_noted(annotation));
            }
            if let Op::Marker(marker) = op {
                return Err(format(&marker.refused()));
            }
            let Some(id) = op.column_family() else { continue };
            applied.operations += 1;
            let Some(family) = self.families.get_mut(&id) else { continue };
            if number < family.log_number {
                continue;
            }
            let Some(builder) = &mut family.builder else {
                self.unread.insert(id);
                continue;
            };
            applied.changes_keys |= id == 0;
            if builder.is_empty() {
                let left = self.log_bytes.min(self.memory_max).saturating_sub(self.memory);
                builder.reserve(usize::try_from(left).unwrap_or(0));
            }
            let held = builder.memory();
            builder.apply(sequence, &op)?;
            self.memory += (builder.memory() - held) as u64;
        }
        Ok(applied)
    }
}
