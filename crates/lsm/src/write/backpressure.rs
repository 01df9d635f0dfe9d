//! Backpressure: how writes are kept from outrunning flushes and merges. Every limit is here.
//!
//! Writes fill memtables; flushes turn memtables into files of level 0; merges move these into
//! level 1. These are the steps of backpressure, in the order in which they set in:
//!
//! 1. *Paced.* Flushes and merges run at a rate at which they end in time, and no faster: their
//!    reads and writes queue in the device before the log's groups. A flush may take half the time
//!    that the next memtables take to fill, a merge the time until level 0 has
//!    [`LEVEL0_FILES_HURRY`] files. With that many files, with two generations of memtables
//!    waiting, when writing ends, and before the first memtables have filled, there is no rate
//!    ([`WriteState::set_paces`]; `pace.rs` keeps to the rate).
//! 2. *Delayed.* From [`LEVEL0_FILES_DELAY`] files of level 0 on, each group of batches is delayed,
//!    so that no more bytes arrive until the merge under way has ended than level 0 has room for.
//!    So writes are slow for a while and do not stall at the end ([`WriteState::delay`]).
//! 3. *Stalled.* New memtables are not begun while [`WAITING_MAX`] generations wait to be flushed,
//!    or level 0 has [`LEVEL0_FILES_MAX`] files: reads search each of them, and RocksDB stops its
//!    writers at 36 ([`WriteState::wait_for_headroom`]). While merges fail for another reason than
//!    a full disk, level 0 may grow beyond that: reads get slower, and writes go on.
//! 4. *Refused.* If the work that a stalled write waits for cannot make progress (the disk is full,
//!    or tables cannot be written: `retry.rs`), or the log finds no space, the write is refused
//!    with [`Kind::Full`], together with all that were submitted after it. No other write is
//!    accepted until every refused caller has seen its refusal: so no write ever follows one that
//!    was refused ([`WriteState::refuse`]).
//!
//! Batches in the queue are bounded by the callers.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::write::commit::GROUP_BYTES;
use crate::write::pace::Pace;
use crate::write::retry::Task;
use crate::write::state::{Pending, Request, WriteState};

/// Files of level 0 at which flushes and merges run as fast as they can.
const LEVEL0_FILES_HURRY: usize = 14;
/// Files of level 0 from which on groups are delayed.
const LEVEL0_FILES_DELAY: usize = 16;
/// Files of level 0 at which writes stall.
const LEVEL0_FILES_MAX: usize = 24;
/// Generations of memtables that may wait to be flushed.
const WAITING_MAX: usize = 2;
/// Longest delay of a group, in nanoseconds.
const DELAY_MAX_NS: u64 = 100_000_000;

/// The rates of flushes and merges, and the rate of writes that they follow.
pub(crate) struct Paces {
    pub flush: Arc<Pace>,
    pub merge: Arc<Pace>,
    /// How long the last memtables took to fill, and when they were full, in nanoseconds.
    fill_ns: Cell<u64>,
    filled_at_ns: Cell<u64>,
}

impl Paces {
    pub fn new(now_ns: u64) -> Paces {
        Paces {
            flush: Arc::default(),
            merge: Arc::default(),
            fill_ns: Cell::new(0),
            filled_at_ns: Cell::new(now_ns),
        }
    }

    /// Notes that memtables are full.
    pub fn note_fill(&self, now_ns: u64) {
        self.fill_ns.set(now_ns.saturating_sub(self.filled_at_ns.replace(now_ns)));
    }
}

/// A refusal that its caller has not seen yet. Counted until it is dropped.
pub(crate) struct Unnotified(Rc<Cell<u64>>);

impl Unnotified {
    pub fn new(count: &Rc<Cell<u64>>) -> Unnotified {
        count.set(count.get() + 1);
        Unnotified(count.clone())
    }
}

impl Drop for Unnotified {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl WriteState {
    /// Files of level 0 that merges can reduce, of the family that has most.
    pub fn level0_files(&self) -> usize {
        self.merges.quarantine.level0_files(&self.db.0.current.load())
    }

    /// Sets the rates of the flush and the merge under way for the present state.
    pub fn set_paces(&self) {
        let Paces { flush, merge, fill_ns, .. } = &self.paces;
        let fill_ns = fill_ns.get();
        let files = self.level0_files();
        let hurry = fill_ns == 0
            || files >= LEVEL0_FILES_HURRY
            || self.flushes.waiting.borrow().len() > 1
            || self.is_closing()
            || self.has_failed();
        if hurry {
            flush.hurry();
            merge.hurry();
            return;
        }
        flush.set(self.options.memtable_bytes as u64, fill_ns / 2);
        if let Some(progress) = &*self.merges.progress.borrow() {
            let fills = (LEVEL0_FILES_HURRY - files) as u64;
            merge.set(progress.left(), fill_ns.saturating_mul(fills));
        }
    }

    /// Delays the next group while merges lag.
    pub async fn delay(&self) {
        let files = self.level0_files();
        if files < LEVEL0_FILES_DELAY {
            return;
        }
        let bytes = next_group_bytes(&self.queue.requests);
        let left_ns = match &*self.merges.progress.borrow() {
            Some(progress) => progress.left_ns(self.core.now_ns()),
            None => return,
        };
        let headroom = LEVEL0_FILES_MAX.saturating_sub(files) * self.options.memtable_bytes;
        let ns = u128::from(left_ns) * bytes as u128 / headroom.max(1) as u128;
        let ns = u64::try_from(ns).unwrap_or(u64::MAX).min(DELAY_MAX_NS);
        self.core.sleep_ns(ns).await;
        self.count(|stats| stats.slowed_ns += ns);
    }

    /// Waits until new memtables may be begun.
    ///
    /// # Errors
    /// [`Kind::Full`] if the work that this waits for cannot make progress; the error that ended
    /// all writing.
    pub async fn wait_for_headroom(&self) -> Result<()> {
        let many_memtables = || self.flushes.waiting.borrow().len() >= WAITING_MAX;
        let many_files =
            || self.level0_files() >= LEVEL0_FILES_MAX && !self.retries.fails(Task::Merge);
        let is_full = || many_memtables() || many_files();
        let is_stuck = || match many_memtables() {
            true => self.retries.error(Task::Flush).is_some(),
            false => many_files() && self.retries.error(Task::Merge).is_some(),
        };
        if is_full() {
            let since_ns = self.core.now_ns();
            self.changed.wait_until(|| !is_full() || self.has_failed() || is_stuck()).await;
            let ns = self.core.now_ns() - since_ns;
            tracing::debug!(level0 = self.level0_files(), ms = ns / 1_000_000, "writes stalled");
            self.count(|stats| stats.stopped_ns += ns);
        }
        match self.failure() {
            Some(error) => Err(error),
            None if is_stuck() => Err(self.refusal()),
            None => Ok(()),
        }
    }

    /// Refuses requests, and all that were submitted after them.
    pub fn refuse(&self, first: &mut Vec<Pending>, error: &Error) {
        let all: Vec<Pending> = first.drain(..).chain(self.queue.requests.take()).collect();
        for pending in all {
            pending.done.refuse(error.clone(), self.retries.count_refusal());
        }
    }

    /// The error of a refused request.
    pub fn refusal(&self) -> Error {
        let text = match self.retries.first_error() {
            None => "the disk is full".to_owned(),
            Some(error) if error.kind() == Kind::Full => format!("the disk is full: {error}"),
            Some(error) => format!("no table can be written for now: {error}"),
        };
        Error::new(Kind::Full, text)
    }
}

/// The bytes of the batches that the next group will have, about.
fn next_group_bytes(requests: &RefCell<std::collections::VecDeque<Pending>>) -> usize {
    let requests = requests.borrow();
    let batches = requests.iter().map_while(|pending| match &pending.request {
        Request::Batch { batch, .. } => Some(batch.len()),
        _ => None,
    });
    batches.take(GROUP_BYTES / 64).sum::<usize>().min(GROUP_BYTES)
}
