//! The range tombstones of a memtable: one writer, and readers on every core without a lock.
//!
//! They are in runs: immutable sets, each newer than the next. A new tombstone becomes a run of its
//! own, together with those before it that are not much larger. So each is copied a few times, and
//! a reader searches few runs, the newest first, until one covers its key.
//!
//! 1. The writer makes the new list of runs, publishes it, and then the sequence of the batch.
//! 2. A reader takes its sequence and then the list. So it finds every tombstone that it may see,
//!    and those that it may not see have larger sequences.
//!
//! Readers of a memtable without range tombstones load one number, which the first one changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use rocksfmt::{Comparator, RangeTombstones, RangeTombstonesBuilder};

use crate::error::{Error, Result};

/// A run joins a newer one unless it has more than this times as many tombstones.
const GROWTH: usize = 4;
/// Runs with more tombstones together than this do not join, as long as they are no large part of
/// all: joining takes about a millisecond.
const RUN_MAX: usize = if cfg!(test) { 16 } else { 8 << 10 };
const PART: usize = 8;
/// Nor do runs that take more memory than this.
const RUN_BYTES_MAX: usize = 256 << 20;

/// Runs of range tombstones, the newest first.
#[derive(Clone, Default)]
pub(crate) struct TombstoneRuns {
    runs: Vec<Arc<RangeTombstones>>,
    len: usize,
}

impl TombstoneRuns {
    /// One run.
    pub fn of(run: RangeTombstones) -> TombstoneRuns {
        let len = run.len();
        let runs = if len == 0 { Vec::new() } else { vec![Arc::new(run)] };
        TombstoneRuns { runs, len }
    }

    /// These tombstones, and newer ones.
    pub fn with(&self, comparator: Comparator, newer: RangeTombstones) -> TombstoneRuns {
        let len = self.len + newer.len();
        let len_max = RUN_MAX.max(len / PART);
        let (mut joined, mut joined_len, mut bytes) = (0, newer.len(), newer.memory());
        for run in &self.runs {
            bytes += run.memory();
            let is_large = run.len() + joined_len > len_max || bytes > RUN_BYTES_MAX;
            if run.len() > GROWTH * joined_len || is_large {
                break;
            }
            joined += 1;
            joined_len += run.len();
        }
        let (young, old) = self.runs.split_at(joined);
        let newest = if young.is_empty() {
            newer
        } else {
            let mut all = RangeTombstonesBuilder::new(comparator);
            let sets = || young.iter().rev().map(|run| &**run).chain([&newer]);
            all.reserve(sets());
            sets().try_for_each(|set| all.add_all(set)).expect("less than 4 GiB of keys");
            all.finish()
        };
        let runs = [Arc::new(newest)].into_iter().chain(old.iter().cloned()).collect();
        TombstoneRuns { runs, len }
    }

    /// The runs, the newest first.
    pub fn runs(&self) -> &[Arc<RangeTombstones>] {
        &self.runs
    }

    /// Number of tombstones.
    pub fn len(&self) -> usize {
        self.len
    }

    /// All tombstones, in no order: start, exclusive end, and sequence.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8], u64)> {
        self.runs.iter().flat_map(|run| run.iter())
    }

    /// The largest sequence, at most `snapshot`, of a tombstone that covers the user key; 0 if
    /// there is none.
    pub fn max_sequence(&self, user_key: &[u8], snapshot: u64) -> u64 {
        let mut newest = 0;
        for run in &self.runs {
            if run.largest_sequence() > newest {
                newest = newest.max(run.max_sequence(user_key, snapshot));
            }
        }
        newest
    }

    /// Bytes of memory held.
    pub fn memory(&self) -> usize {
        self.runs.iter().map(|run| run.memory()).sum()
    }
}

/// The range tombstones of a live memtable.
pub(crate) struct LiveTombstones {
    /// The sequence of the first one; the largest number before there is one.
    first: AtomicU64,
    runs: ArcSwap<TombstoneRuns>,
}

impl LiveTombstones {
    pub fn new() -> LiveTombstones {
        LiveTombstones { first: AtomicU64::new(u64::MAX), runs: ArcSwap::default() }
    }

    /// Adds a tombstone with a larger sequence than all before it. Only the memtable's writer may
    /// call it.
    pub fn add(
        &self,
        comparator: Comparator,
        start: &[u8],
        end: &[u8],
        sequence: u64,
    ) -> Result<()> {
        let mut newer = RangeTombstonesBuilder::new(comparator);
        newer.add(start, end, sequence).map_err(|e| Error::format("a range deletion", &e))?;
        let newer = newer.finish();
        if newer.is_empty() {
            return Ok(());
        }
        let runs = self.runs.load().with(comparator, newer);
        self.runs.store(Arc::new(runs));
        if self.first.load(Ordering::Relaxed) == u64::MAX {
            // After the runs: who sees the sequence finds them.
            self.first.store(sequence, Ordering::Release);
        }
        Ok(())
    }

    /// As [`TombstoneRuns::max_sequence`].
    #[inline]
    pub fn max_sequence(&self, user_key: &[u8], snapshot: u64) -> u64 {
        match self.first.load(Ordering::Acquire) <= snapshot {
            true => self.search(user_key, snapshot),
            false => 0,
        }
    }

    #[cold]
    fn search(&self, user_key: &[u8], snapshot: u64) -> u64 {
        self.runs.load().max_sequence(user_key, snapshot)
    }

    /// The tombstones added so far; `None` if there are none.
    pub fn all(&self) -> Option<Arc<TombstoneRuns>> {
        (self.first.load(Ordering::Acquire) != u64::MAX).then(|| self.runs.load_full())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn add(all: &LiveTombstones, start: u16, end: u16, sequence: u64) {
        let (start, end) = (start.to_be_bytes(), end.to_be_bytes());
        all.add(Comparator::Bytewise, &start, &end, sequence).unwrap();
    }

    #[test]
    fn runs_are_few_and_none_is_lost() {
        let all = LiveTombstones::new();
        assert!(all.all().is_none());
        let count = 1000;
        for n in 1..=count {
            add(&all, n, n + 1, n.into());
            let runs = all.all().unwrap();
            assert_eq!((runs.len(), runs.iter().count()), (n.into(), n.into()));
            // Of two neighbours, one or both together are large.
            let few = usize::from(n) > PART * RUN_MAX || runs.runs().len() <= 2 * PART + 6;
            assert!(few, "{} runs of {n}", runs.runs().len());
            let newest_first = |pair: &[Arc<RangeTombstones>]| {
                pair[0].smallest_sequence() > pair[1].largest_sequence()
            };
            assert!(runs.runs().windows(2).all(newest_first));
        }
        for n in 1..=count {
            let key = n.to_be_bytes();
            assert_eq!(all.max_sequence(&key, u64::MAX), n.into());
            assert_eq!(all.max_sequence(&key, u64::from(n) - 1), 0);
        }
        add(&all, 7, 7, 2000);
        assert_eq!(all.all().unwrap().len(), count.into(), "an empty range adds nothing");
    }

    proptest! {
        #[test]
        fn every_reader_finds_the_newest_that_it_sees(
            ranges in prop::collection::vec((0u16..20, 0u16..20), 0..80),
        ) {
            let all = LiveTombstones::new();
            for (sequence, &(start, end)) in (1..).zip(&ranges) {
                add(&all, start, end, sequence);
            }
            for key in 0u16..20 {
                for snapshot in 0..=ranges.len() as u64 {
                    let covers = |(_, r): &(u64, &(u16, u16))| r.0 <= key && key < r.1;
                    let seen = (1..=snapshot).zip(&ranges).filter(covers);
                    let expected = seen.map(|(sequence, _)| sequence).max().unwrap_or(0);
                    prop_assert_eq!(all.max_sequence(&key.to_be_bytes(), snapshot), expected);
                }
            }
        }
    }
}
