//! Batches that are written only if certain keys have not been written meanwhile: what optimistic
//! transactions stand on.
//!
//! The commit task decides when it takes such a batch into a group. All earlier groups are in the
//! memtables then. For each key the newest entry and the newest range tombstone there are asked,
//! and after them the batches before it in the same group ([`GroupKeys`]). So the decision is made
//! in the order of the commits, without a lock, and it reads nothing from the disk.
//!
//! Memtables do not tell what was written before their tables were: after a flush, a clearing or an
//! ingestion nothing is known about a moment before it (`Flushes::known_from`). Then the batch is
//! refused, too.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use rocksfmt::{BatchWriter, Op, SEQUENCE_MAX, WriteBatch};

use crate::db::CfId;
use crate::error::{Error, Kind, Result};
use crate::write::state::WriteState;

/// The condition of [`Writer::submit_if`](crate::Writer::submit_if): keys that were not written
/// after a moment.
#[derive(Clone, Debug, Default)]
pub struct Unwritten {
    since: u64,
    keys: Vec<(CfId, Vec<u8>)>,
}

impl Unwritten {
    /// No key yet; nothing may have been written to the keys after the sequence number `since`, see
    /// [`Snapshot::sequence`](crate::Snapshot::sequence).
    pub fn since(since: u64) -> Self {
        Self { since, keys: Vec::new() }
    }

    /// Adds a key.
    pub fn key(&mut self, family: CfId, key: &[u8]) {
        self.keys.push((family, key.to_vec()));
    }

    /// The families of the keys.
    pub(crate) fn families(&self) -> impl Iterator<Item = CfId> {
        self.keys.iter().map(|(family, _)| *family)
    }
}

/// The keys that the batches of a group write, as far as they have been listed.
#[derive(Default)]
pub(crate) struct GroupKeys {
    /// The number of batches that have been listed.
    pub listed: usize,
    keys: BTreeSet<(CfId, Vec<u8>)>,
    ranges: Vec<(CfId, Vec<u8>, Vec<u8>)>,
}

impl GroupKeys {
    /// Lists the keys of the next batch.
    pub fn list(&mut self, batch: &mut BatchWriter) -> Result<()> {
        self.listed += 1;
        let format = |error| Error::format("a batch", &error);
        for op in WriteBatch::parse(batch.finish(0)).map_err(format)?.ops() {
            match op.map_err(format)?.1 {
                Op::Put { cf, key, .. }
                | Op::Delete { cf, key }
                | Op::SingleDelete { cf, key }
                | Op::Merge { cf, key, .. }
                | Op::BlobIndex { cf, key, .. }
                | Op::Entity { cf, key, .. }
                | Op::TimedPut { cf, key, .. } => {
                    self.keys.insert((cf, key.to_vec()));
                }
                Op::DeleteRange { cf, begin, end } => {
                    self.ranges.push((cf, begin.to_vec(), end.to_vec()));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Why a batch with this condition is not written, if so.
pub(crate) fn find(state: &WriteState, condition: &Unwritten, group: &GroupKeys) -> Option<Error> {
    let Unwritten { since, keys } = condition;
    let known_from = state.flushes.known_from.get();
    if *since < known_from && !keys.is_empty() {
        let text = format!(
            "it is not known any more what was written after sequence {since}, because memtables became tables: begin \
             the transaction again"
        );
        return Some(Error::new(Kind::Conflict, text));
    }
    let version = state.db.version();
    for pair in keys {
        let (family, key) = pair;
        let found = match version.family(*family) {
            Ok(found) => found,
            Err(error) => return Some(error),
        };
        let of_mems = found.mems.iter().map(|mem| {
            let point = mem.get(key, SEQUENCE_MAX).map_or(0, |(packed, _)| packed >> 8);
            point.max(mem.max_tombstone(key, SEQUENCE_MAX))
        });
        let newest = of_mems.max().unwrap_or(0);
        let compare = |a: &[u8], b: &[u8]| found.comparator.cmp_user(a, b);
        let covers = |(of, begin, end): &(CfId, Vec<u8>, Vec<u8>)| {
            of == family
                && compare(begin, key) != Ordering::Greater
                && compare(key, end) == Ordering::Less
        };
        if newest > *since || group.keys.contains(pair) || group.ranges.iter().any(covers) {
            let text = format!(
                "the key {:?} was written after sequence {since}: begin the transaction again",
                String::from_utf8_lossy(&key[..key.len().min(64)])
            );
            return Some(Error::new(Kind::Conflict, text));
        }
    }
    None
}
