//! The cases that read, each a loop run by one task. A task ends when its meter says that the time
//! is over.

use std::rc::Rc;

use lsm::{IterOptions, Reader};
use reactor::Core;

use crate::case::Case;
use crate::keys::{KEY_LEN, absent_key, below, key};
use crate::measure::Meter;

/// Entries read between two readings of the clock in scans, where a reading costs as much as a
/// step.
const SCAN_RUN: u64 = 256;
/// How long a task that finds everything in memory runs before it yields.
pub(crate) const TURN_NS: u64 = 50_000;

/// The state of a task.
#[derive(Clone)]
pub struct Worker {
    /// Its core.
    pub core: Core,
    /// The core's reader.
    pub reader: Reader,
    /// The core's counters.
    pub meter: Rc<Meter>,
    /// The number of keys to draw from.
    pub keys: u64,
    /// Keys in a batch.
    pub batch: usize,
    /// Steps after a seek.
    pub nexts: u32,
    /// Whether these go backwards.
    pub reverse: bool,
    /// Whether to get absent keys.
    pub absent: bool,
}

impl Worker {
    /// Runs a case until the meter ends it.
    ///
    /// # Errors
    /// The engine's error, as text.
    pub async fn run(self, case: Case) -> Result<(), String> {
        let result = match case {
            Case::ReadRandom | Case::ReadWhileWriting => self.read_random().await,
            Case::MultiReadRandom => self.multi_read_random().await,
            Case::SeekRandom => self.seek_random().await,
            Case::ReadSeq => self.scan(false).await,
            Case::ReadReverse => self.scan(true).await,
            // Not a case that reads.
            _ => Ok(()),
        };
        result.map_err(|error| error.to_string())
    }

    fn random_key(&self) -> [u8; KEY_LEN] {
        key(below(self.core.random_u64(), self.keys))
    }

    /// Counts a call and returns the start time of the next one; `None` after the last. Yields at
    /// the end of a turn, because a task that never waits would starve the others.
    async fn count(&self, operations: u64, found: u64, parts: u64, from_ns: u64) -> Option<u64> {
        let now_ns = self.core.now_exact_ns();
        if !self.meter.count(operations, found, parts, from_ns, now_ns) {
            return None;
        }
        if now_ns.saturating_sub(self.core.now_ns()) < TURN_NS {
            return Some(now_ns);
        }
        self.core.yield_now().await;
        Some(self.core.now_exact_ns())
    }

    async fn read_random(&self) -> lsm::Result<()> {
        let name = if self.absent { absent_key } else { key };
        let mut from_ns = self.core.now_exact_ns();
        loop {
            let wanted = name(below(self.core.random_u64(), self.keys));
            let value = self.reader.get(0, &wanted, None).await?;
            let found = u64::from(value.is_some());
            self.meter.returned(value.as_ref().map_or(0, |value| value.len()));
            drop(value);
            match self.count(1, found, 1, from_ns).await {
                Some(next_ns) => from_ns = next_ns,
                None => return Ok(()),
            }
        }
    }

    async fn multi_read_random(&self) -> lsm::Result<()> {
        let mut keys = vec![[0; KEY_LEN]; self.batch];
        let mut from_ns = self.core.now_exact_ns();
        loop {
            keys.iter_mut().for_each(|slot| *slot = self.random_key());
            let wanted: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
            let mut found = 0;
            for value in self.reader.multi_get(0, &wanted, None).await {
                let value = value?;
                self.meter.returned(value.as_ref().map_or(0, |value| value.len()));
                found += u64::from(value.is_some());
            }
            match self.count(self.batch as u64, found, 1, from_ns).await {
                Some(next_ns) => from_ns = next_ns,
                None => return Ok(()),
            }
        }
    }

    async fn seek_random(&self) -> lsm::Result<()> {
        let mut from_ns = self.core.now_exact_ns();
        loop {
            let mut bytes = 0;
            let target = self.random_key();
            let mut iter = self.reader.iter(
                0,
                IterOptions {
                    fill_cache: true,
                    expected: Some(self.nexts as usize + 1),
                    expected_backward: self.reverse,
                    ..IterOptions::default()
                },
            )?;
            iter.seek(&target).await?;
            let found = u64::from(iter.valid() && iter.key() == target);
            let mut steps = 0;
            while steps < self.nexts && iter.valid() {
                bytes += iter.key().len() + iter.value().len();
                if self.reverse {
                    iter.prev().await?;
                } else {
                    iter.next().await?;
                }
                steps += 1;
            }
            drop(iter);
            self.meter.step(u64::from(steps));
            self.meter.returned(bytes);
            match self.count(1, found, 1, from_ns).await {
                Some(next_ns) => from_ns = next_ns,
                None => return Ok(()),
            }
        }
    }

    async fn scan(&self, reverse: bool) -> lsm::Result<()> {
        let mut from_ns = self.core.now_exact_ns();
        loop {
            let mut iter = self.reader.iter(0, IterOptions::default())?;
            if reverse {
                iter.seek_to_last().await?;
            } else {
                iter.seek_to_first().await?;
            }
            loop {
                let (mut read, mut bytes) = (0, 0);
                while read < SCAN_RUN && iter.valid() {
                    bytes += iter.key().len() + iter.value().len();
                    if reverse {
                        iter.prev().await?;
                    } else {
                        iter.next().await?;
                    }
                    read += 1;
                }
                self.meter.step(read);
                self.meter.returned(bytes);
                match self.count(read, read, read, from_ns).await {
                    Some(next_ns) => from_ns = next_ns,
                    None => return Ok(()),
                }
                if read < SCAN_RUN {
                    break;
                }
            }
        }
    }
}

/// Reads every `step`-th key from `first` on into the cache.
///
/// # Errors
/// The engine's error, as text.
pub async fn warm_up(
    core: &Core,
    reader: &Reader,
    keys: u64,
    first: u64,
    step: usize,
) -> Result<(), String> {
    for number in (first..keys).step_by(step) {
        reader.get(0, &key(number), None).await.map_err(|error| error.to_string())?;
        if core.now_exact_ns().saturating_sub(core.now_ns()) > TURN_NS {
            core.yield_now().await;
        }
    }
    Ok(())
}
