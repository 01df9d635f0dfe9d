//! Expiry: when keys end, where that is written, and how it is kept from readers.
//!
//! Deadlines are in a database of their own, in the directory [`WITHIN`] of the database that they
//! are about, so that this one stays as RocksDB knows it. Its keys and values are in
//! [`record`] and `docs/formats/expiry.md`.
//!
//! 1. Every write of a value with a deadline is preceded by a record of the deadline ([`ledger`]):
//!    it is durable, at the same level, before the value is written to the log. The record names
//!    the value: by its sequence number, by the run of the node in which this was foreseen, and by
//!    a hash of its bytes. A deadline is only changed together with its value, which is written
//!    again.
//! 2. A reader ([`live`]) asks for the record first. Without a deadline that has passed, the value
//!    is what the engine says. With one the value is compared with what the record names.
//! 3. What has expired is removed in the order of deadlines ([`ledger`]), from a second set of
//!    entries. Neither a scan nor memory that grows with the number of deadlines is needed.
//!
//! Why the record cannot be mistaken, whatever instant a crash or a power cut takes:
//!
//! - Before the record is durable nothing has changed. Between record and value, the record names a
//!   sequence that the database does not have, and the record of the value that is still there is
//!   kept in it.
//! - That sequence may be given to another value later. Each run, which begins with an opening and
//!   after each refused write, notes the last sequence before it, before anything is written in it.
//!   So a record of an earlier run with a later sequence never meets a value of Millrace. RocksDB
//!   may take such a number after a crash: the hash tells that value apart.
//! - A value that is written over, with or without a deadline, by Millrace or by RocksDB, has
//!   another sequence than the record. Once deadlines exist, merges keep the sequences of values. A
//!   merge of RocksDB's into the deepest level may drop them; then its keys have no deadlines any
//!   more.
//!
//! `live` is used by the cores, `ledger` by the shard. A node that only reads removes nothing;
//! there `core::ends` tells the caches of clients. Uses the engine only.

pub(crate) mod ledger;
pub(crate) mod live;
pub(crate) mod record;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use lsm::{CfId, Db, IterOptions, Kind, OpenOptions, Reader, WITHIN};
use reactor::Core;

use crate::expiry::record::{DUE, RUNS, due_start, parse_due, run_of};

/// The column family of the deadlines' own database.
const RECORDS: lsm::CfId = 0;

/// When a key ends, in Unix milliseconds; 0 for never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Deadline(u64);

impl Deadline {
    /// Never.
    pub const NEVER: Self = Self(0);

    /// At a time in Unix milliseconds, which is not 0.
    pub fn at(unix_ms: u64) -> Self {
        Self(unix_ms)
    }

    /// The time in Unix milliseconds, if there is one.
    pub fn unix_ms(self) -> Option<u64> {
        (self.0 > 0).then_some(self.0)
    }

    /// Whether it has passed: as in Redis, a key lives through the millisecond of its deadline.
    pub fn has_passed(self, now_ms: u64) -> bool {
        self.0 > 0 && now_ms > self.0
    }
}

/// What the cores share of the deadlines of a database.
#[derive(Default)]
pub(crate) struct Expiry {
    /// There may be deadlines. Without, nothing is looked up.
    any: AtomicBool,
    /// Their database, once it is open.
    db: OnceLock<Db>,
    /// The runs and the last sequences before them, in order.
    runs: ArcSwap<Vec<(u32, u64)>>,
    /// Keys that were removed because they had expired.
    expired: AtomicU64,
}

impl Expiry {
    /// Whether there may be deadlines.
    #[inline]
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// The number of deadlines that are written down: of keys that have one, and of some that had
    /// one that has not passed yet.
    pub fn count(&self) -> u64 {
        self.db.get().and_then(Db::keys).unwrap_or(0)
    }

    /// Keys that were removed because they had expired.
    pub fn expired(&self) -> u64 {
        self.expired.load(Ordering::Relaxed)
    }

    /// Whether a record of a run may name a sequence: it is of the last run, or the sequence was
    /// written before the next run began.
    fn is_valid(&self, run: u32, sequence: u64) -> bool {
        let runs = self.runs.load();
        let next = runs.partition_point(|(known, _)| *known <= run);
        runs.get(next).is_none_or(|(_, before)| sequence <= *before)
    }

    /// Takes the deadlines' database into use. Suspends for its blocks.
    async fn adopt(&self, core: &Core, db: Db) -> lsm::Result<()> {
        let reader = db.attach(core);
        let options = IterOptions { prefix: Some(vec![RUNS]), ..IterOptions::default() };
        let mut iter = reader.iter(RECORDS, options)?;
        let mut runs = Vec::new();
        iter.seek(&[RUNS]).await?;
        while iter.valid() {
            match run_of(iter.key(), iter.value()) {
                Some(run) => runs.push(run),
                None if iter.key().first() != Some(&RUNS) => break,
                None => {}
            }
            iter.next().await?;
        }
        self.runs.store(Arc::new(runs));
        let any = db.keys() != Some(0);
        let _ = self.db.set(db);
        self.any.fetch_or(any, Ordering::Release);
        Ok(())
    }

    /// Opens the deadlines of a database that is only read. Suspends for the disk.
    ///
    /// # Errors
    /// Those of [`Db::open`], if there are deadlines.
    pub async fn open(&self, core: &Core, data: &Path, options: OpenOptions) -> lsm::Result<()> {
        match Db::open(core, &data.join(WITHIN), options).await {
            Ok(db) => self.adopt(core, db).await,
            Err(error) if error.kind() == Kind::NoDatabase => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// A key and a deadline of it that has passed.
pub(crate) type Due = (Deadline, Vec<u8>);

/// Keys whose deadlines have passed, oldest first, at most `count`, from an entry on. Suspends for
/// blocks.
async fn due_from(
    records: &Reader,
    family: CfId,
    from: &[u8],
    count: usize,
    now_ms: u64,
) -> lsm::Result<Vec<Due>> {
    let options = IterOptions {
        prefix: Some(due_start(family)),
        expected: Some(count),
        ..IterOptions::default()
    };
    let mut iter = records.iter(RECORDS, options)?;
    iter.seek(from).await?;
    let mut found = Vec::new();
    while iter.valid() && found.len() < count && iter.key().first() == Some(&DUE) {
        match parse_due(iter.key()) {
            Some((deadline, key)) if deadline.has_passed(now_ms) => {
                found.push((deadline, key.to_vec()));
            }
            _ => break,
        }
        iter.next().await?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_lives_through_the_millisecond_of_its_deadline() {
        assert!(!Deadline::NEVER.has_passed(u64::MAX));
        assert!(!Deadline::at(7).has_passed(7) && Deadline::at(7).has_passed(8));
    }

    #[test]
    fn a_record_of_an_earlier_run_names_no_sequence_of_a_later_one() {
        let expiry = Expiry::default();
        expiry.runs.store(Arc::new(vec![(1, 0), (2, 10), (4, 20)]));
        assert!(expiry.is_valid(1, 10) && !expiry.is_valid(1, 11));
        assert!(expiry.is_valid(2, 20) && !expiry.is_valid(2, 21));
        assert!(expiry.is_valid(3, 20) && expiry.is_valid(4, 1 << 40));
    }
}
