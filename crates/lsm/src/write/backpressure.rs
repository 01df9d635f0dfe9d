//! Backpressure: how writes are kept from outrunning flushes and merges.
//!
//! Writes fill memtables; flushes turn memtables into files of level 0; merges move these into
//! deeper levels. These are the steps of backpressure, in the order in which they set in:
//!
//! 1. *Paced.* Flushes and merges run at a rate at which they end in time, and no faster: their
//!    reads and writes queue in the device before the log's groups. A flush may take half the time
//!    that the next memtables take to fill; merges work off the debt by the time that level 0 has
//!    as many files as an overload settles at. Above that, when writing ends, and before the first
//!    memtables have filled, there is no rate; flushes have none either while two generations of
//!    memtables wait ([`WriteState::set_paces`]; `pace.rs` keeps to the rate).
//! 2. *Delayed.* Each group of batches is delayed by what its bytes take at the rate that debt and
//!    the space of blob files allow (`controller.rs` has the law; [`WriteState::delay`]), and that
//!    the last free memtable allows while others wait to be flushed, or the next log is late.
//! 3. *Stalled.* New memtables are not begun while [`WAITING_MAX`] generations wait to be flushed,
//!    or level 0 has `level0_stop_writes_trigger` files ([`WriteState::wait_for_headroom`]). While
//!    merges fail for another reason than a full disk, level 0 may grow beyond that: reads get
//!    slower, and writes go on.
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
use crate::version::Version;
use crate::write::commit::GROUP_BYTES;
use crate::write::controller::{self, Admission, Drain, Level0};
use crate::write::pace::Pace;
use crate::write::picker::Picker;
use crate::write::retry::Task;
use crate::write::state::{Pending, Request, WriteState};

/// The rate at which garbage of blob files is collected while that is not urgent, in bytes per
/// second.
const BLOB_GC_RATE: u64 = 128 << 20;
/// Generations of memtables that may wait to be flushed.
const WAITING_MAX: usize = 2;
/// When the memtables have less room than this and the next log is not there yet, their room is to
/// last until it is.
const LOG_IS_LATE: f64 = 0.5;
/// Groups over which the share of tables in the bytes of batches is smoothed, and the least share
/// that counts.
const SHARE_GROUPS: f64 = 16.0;
const TABLE_SHARE_MIN: f64 = 0.001;

/// The part of its share of the disk that a flush has in any case while writes wait for it.
const FLUSH_URGENCY: f64 = 0.25;

/// The rates of flushes and merges, and the rate of writes that they follow.
pub(crate) struct Paces {
    pub flush: Arc<Pace>,
    pub merge: Arc<Pace>,
    /// Of the collection of garbage in blob files.
    pub blob_gc: Arc<Pace>,
    /// Flushes and merges run as fast as they can, but for limits of users.
    hurry: Cell<bool>,
    /// Garbage of blob files is collected as fast as that can be done.
    blob_gc_hurries: Cell<bool>,
    /// How long the last memtables took to fill, and when they were full, in nanoseconds.
    fill_ns: Cell<u64>,
    filled_at_ns: Cell<u64>,
    /// The debt of the version of this epoch, after this many jobs had begun or ended.
    debt: Cell<Option<((u64, u64), Debt)>>,
    /// The families whose level 0 may have a pressure, at that time.
    level0s: RefCell<Vec<(u32, Level0)>>,
    /// The rates at which level 0 and memtables empty while nothing paces that.
    drained: Cell<Drain>,
    flushed: Cell<Drain>,
    admission: Cell<Admission>,
    /// The part of the bytes of batches that goes to tables, smoothed; the rest are values in blob
    /// files.
    table_share: Cell<f64>,
    /// Bytes that have left level 0 by merges that have ended.
    left_level0: Cell<u64>,
}

/// What merges have to do when a job begins or ends.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Debt {
    /// Files of level 0 that merges can reduce, of the family that has most.
    pub files: usize,
    /// Files of level 0 at which that family stalls.
    pub files_stop: usize,
    /// Bytes that merges have to read and write, about.
    pub bytes: u64,
    /// The pressure of these bytes.
    pressure: f64,
    /// Files that the level 0 of any family without a pressure may get until an overload settles.
    room: f64,
}

/// What merges are behind at this moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backlog {
    /// See `controller.rs`.
    pub pressure: f64,
    /// Files that level 0 may get until an overload settles; not positive beyond.
    room: f64,
    /// A family has so many files in level 0 that they are to be merged.
    is_due: bool,
}

impl Paces {
    pub fn new(now_ns: u64) -> Paces {
        Paces {
            flush: Arc::default(),
            merge: Arc::default(),
            blob_gc: Arc::default(),
            hurry: Cell::new(true),
            blob_gc_hurries: Cell::new(false),
            fill_ns: Cell::new(0),
            filled_at_ns: Cell::new(now_ns),
            debt: Cell::new(None),
            level0s: RefCell::default(),
            drained: Cell::default(),
            flushed: Cell::default(),
            admission: Cell::default(),
            table_share: Cell::new(1.0),
            left_level0: Cell::new(0),
        }
    }

    /// Notes that new memtables begin, because the old ones are full or for another reason.
    pub fn begin_memtables(&self, now_ns: u64, are_full: bool) {
        let since_ns = self.filled_at_ns.replace(now_ns);
        if are_full {
            self.fill_ns.set(now_ns.saturating_sub(since_ns));
        }
    }

    /// Notes a group of batches of `bytes`, of which `to_tables` are left after large values have
    /// gone to blob files.
    pub fn note_group(&self, bytes: u64, to_tables: u64) {
        let share = to_tables as f64 / bytes.max(1) as f64;
        let before = self.table_share.get();
        self.table_share
            .set((before + (share - before) / SHARE_GROUPS).clamp(TABLE_SHARE_MIN, 1.0));
    }

    /// Notes that a merge has moved bytes out of level 0.
    pub fn note_left_level0(&self, bytes: u64) {
        self.left_level0.set(self.left_level0.get() + bytes);
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
    /// What merges are behind, with the work that running ones have done.
    pub fn backlog(&self) -> Backlog {
        let debt = self.debt();
        let mut backlog = Backlog { pressure: debt.pressure, room: debt.room, is_due: false };
        for &(family, level0) in &*self.paces.level0s.borrow() {
            let merged = self.merges.level0_merged(family);
            let left = level0.left(merged);
            backlog.pressure = backlog.pressure.max(level0.pressure(merged));
            backlog.room = backlog.room.min(level0.settled - left);
            backlog.is_due |= left > level0.due;
        }
        backlog
    }

    /// What merges had to do when the last job began or ended.
    pub fn debt(&self) -> Debt {
        let version = self.db.0.current.load();
        let now = (version.epoch, self.merges.changes());
        if let Some((then, debt)) = self.paces.debt.get()
            && then == now
        {
            return debt;
        }
        let debt = self.debt_of(&version);
        self.paces.debt.set(Some((now, debt)));
        debt
    }

    fn debt_of(&self, version: &Version) -> Debt {
        let left_alone = |slot| self.merges.quarantine.holds(version, slot);
        let mut all = Debt { files_stop: usize::MAX, room: f64::MAX, ..Debt::default() };
        let hidden_max = self.blob_hidden_max();
        let mut level0s = self.paces.level0s.borrow_mut();
        level0s.clear();
        for family in version.families.iter().filter(|family| family.refused.is_none()) {
            let options = &family.options;
            if options.manual_only {
                continue;
            }
            let picker = Picker { hidden_max, ..Picker::new(version, family, &left_alone, &[]) };
            let (shape, sizes) = picker.shape();
            let debt = shape.debt(&sizes);
            let bytes = sizes.bytes.iter().sum();
            let level0 = Level0::new(options, sizes.level0_files, sizes.level0_due);
            all.bytes += debt;
            if level0.files >= all.files {
                (all.files, all.files_stop) = (level0.files, level0.stop);
            }
            all.pressure = all.pressure.max(controller::debt_pressure(options, debt, bytes));
            match level0.counts() {
                true => level0s.push((family.id, level0)),
                false => all.room = all.room.min(level0.settled - level0.left(0.0)),
            }
        }
        all
    }

    /// Files of level 0 that merges can reduce, of the family that has most.
    pub fn level0_files(&self) -> usize {
        self.debt().files
    }

    /// Sets the rates of the flush and the merges under way for the present state.
    pub fn set_paces(&self) {
        self.paces.blob_gc_hurries.set(self.blob_pressure() >= controller::BLOB_LIMITED);
        self.follow_debt();
        let limits = self.merges.limits.get();
        let parts = self.merges.parts().max(1);
        if let Some(limit) = limits.bytes_per_second {
            self.paces.merge.cap(limit / parts as u64);
        }
        let cores = limits.cores_percent.map(|percent| f64::from(percent) / 100.0);
        self.paces.merge.set_share(cores.map(|cores| cores / parts as f64));
        let blob_gc = &self.paces.blob_gc;
        match self.paces.blob_gc_hurries.get() || self.is_closing() {
            true => blob_gc.hurry(),
            false => blob_gc.set(BLOB_GC_RATE, 1_000_000_000),
        }
        if let Some(limit) = limits.bytes_per_second {
            blob_gc.cap(limit);
        }
        blob_gc.set_share(cores);
    }

    fn follow_debt(&self) {
        let Paces { flush, merge, fill_ns, .. } = &self.paces;
        let fill_ns = fill_ns.get();
        let (debt, backlog) = (self.debt(), self.backlog());
        let waiting = self.flushes.waiting.borrow().len();
        let is_closing = self.is_closing();
        let urgency = if is_closing { 1.0 } else { controller::urgency(backlog.pressure) };
        let few_memtables = if waiting >= WAITING_MAX { FLUSH_URGENCY } else { 0.0 };
        flush.set_urgency(urgency.max(few_memtables));
        merge.set_urgency(urgency);
        let hurry = fill_ns == 0
            || backlog.room <= 0.0
            || backlog.pressure >= controller::LIMITED
            // A collection waits for merges that have its tables.
            || self.paces.blob_gc_hurries.get()
            || is_closing
            || self.has_failed();
        self.paces.hurry.set(hurry);
        // Merges at full speed would delay the flush that writes wait for.
        match hurry || waiting >= WAITING_MAX {
            true => flush.hurry(),
            false => flush.set(self.memtable_bytes() as u64, fill_ns / 2),
        }
        if hurry {
            merge.hurry();
            return;
        }
        let left = debt.bytes.max(self.merges.bytes_left());
        let ns = fill_ns as f64 * backlog.room.max(1.0);
        merge.set(left / self.merges.parts().max(1) as u64, ns as u64);
    }

    /// Delays the next group while flushes or merges lag.
    pub async fn delay(&self) {
        let Some(rate) = self.rate() else { return };
        let bytes = next_group_bytes(&self.queue.requests);
        let mut admission = self.paces.admission.get();
        let ns = admission.delay_ns(self.core.now_ns(), bytes, rate);
        self.paces.admission.set(admission);
        if ns > 0 {
            self.core.sleep_ns(ns).await;
            self.count(|stats| stats.slowed_ns += ns);
        }
    }

    /// The rate at which writes are admitted, in bytes per second; `None` for no limit.
    fn rate(&self) -> Option<f64> {
        let now_ns = self.core.now_ns();
        let mut drained = self.paces.drained.get();
        let is_draining = self.merges.drains_level0() || self.backlog().is_due;
        if is_draining && self.paces.hurry.get() {
            let under_way = self.merges.left_level0();
            drained.sample(now_ns, self.paces.left_level0.get() + under_way);
        } else {
            drained.pause();
        }
        self.paces.drained.set(drained);
        let waiting = self.flushes.waiting.borrow().len();
        let mut flushed = self.paces.flushed.get();
        if waiting < WAITING_MAX {
            flushed.pause();
        } else {
            flushed.sample(now_ns, self.paces.flush.done());
        }
        self.paces.flushed.set(flushed);
        // Pressure grows with what is written, and paces are set when a file changes.
        let hurries = self.paces.blob_gc_hurries.get();
        if !hurries && self.blob_pressure() >= controller::BLOB_LIMITED {
            self.set_paces();
        }
        self.admitted()
    }

    /// The rate by the last samples. Flushes and merges drain bytes of tables; values in blob files
    /// are not among these.
    pub fn admitted(&self) -> Option<f64> {
        let (pressure, drained) = (self.backlog().pressure, self.paces.drained.get());
        let (waiting, flushed) = (self.flushes.waiting.borrow().len(), self.paces.flushed.get());
        let by_merges = controller::rate(pressure, drained.rate());
        let room = 1.0 - self.flushes.filled.get().min(1.0);
        let by_flushes = (waiting >= WAITING_MAX)
            .then(|| controller::rate_into_last_memtable(room, flushed.rate()));
        // A log for each generation of memtables, of which at least this part is bytes of batches.
        let bytes = self.memtable_bytes() as f64 / 4.0;
        let log_ns = self.next_log_takes_ns().filter(|_| room < LOG_IS_LATE);
        let by_logs = log_ns
            .map(|ns| controller::rate_into_last_memtable(room, bytes * 1e9 / ns.max(1) as f64));
        let by_blobs = (self.blob_pressure() >= controller::BLOB_LIMITED).then(|| {
            let (room, ns) = self.blob_room();
            room as f64 * 1e9 / ns.max(1.0)
        });
        let share = self.paces.table_share.get();
        let by_tables =
            [by_merges, by_flushes, by_logs].into_iter().flatten().map(|rate| rate / share);
        by_tables.chain(by_blobs).reduce(f64::min)
    }

    /// Waits until new memtables may be begun.
    ///
    /// # Errors
    /// [`Kind::Full`] if the work that this waits for cannot make progress; the error that ended
    /// all writing.
    pub async fn wait_for_headroom(&self) -> Result<()> {
        let many_memtables = || self.flushes.waiting.borrow().len() >= WAITING_MAX;
        let many_files = || {
            let debt = self.debt();
            debt.files >= debt.files_stop && !self.retries.fails(Task::Merge) && !self.writes_pass()
        };
        let is_full = || many_memtables() || many_files();
        let is_stuck = || match many_memtables() {
            true => self.retries.flush_error().is_some(),
            false => many_files() && self.retries.error(Task::Merge).is_some(),
        };
        if is_full() {
            let since_ns = self.core.now_ns();
            let stopped = &self.lifecycle.stopped;
            let done = || {
                stopped.set(!many_memtables() && many_files());
                !is_full() || self.has_failed() || is_stuck()
            };
            self.changed.wait_until(done).await;
            stopped.set(false);
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

    /// Whether writes pass a full level 0. Those before a request of another kind do, because it
    /// must not wait for merges: they are no more than what callers had submitted. So do the last
    /// ones before the end, which merges are not waited for either.
    fn writes_pass(&self) -> bool {
        let is_other = |pending: &Pending| !matches!(pending.request, Request::Batch { .. });
        let lifecycle = &self.lifecycle;
        lifecycle.leaving.get()
            || lifecycle.passing.get() > 0
            || self.queue.requests.borrow().iter().any(is_other)
    }

    /// Waits until a generation of memtables may be begun that becomes tables at once. Level 0 may
    /// be full: it gets one more file of each family.
    ///
    /// # Errors
    /// As for [`WriteState::wait_for_headroom`].
    pub async fn wait_for_memtables(&self) -> Result<()> {
        let many = || self.flushes.waiting.borrow().len() >= WAITING_MAX;
        let is_stuck = || many() && self.retries.flush_error().is_some();
        self.changed.wait_until(|| !many() || self.has_failed() || is_stuck()).await;
        match self.failure() {
            Some(error) => Err(error),
            None if is_stuck() => Err(self.refusal()),
            None => Ok(()),
        }
    }

    /// Fails requests with an error, and refuses all that were submitted after them.
    pub fn refuse(&self, first: &mut Vec<Pending>, error: &Error) {
        let rest = if error.kind() == Kind::Full { error.clone() } else { self.refusal() };
        let first = first.drain(..).map(|pending| (pending, error));
        let queued = self.queue.requests.take().into_iter().map(|pending| (pending, &rest));
        for (pending, error) in first.chain(queued) {
            pending.done.refuse(error.clone(), self.retries.count_refusal());
        }
    }

    /// The error of a refused request, which was not written.
    pub fn refusal(&self) -> Error {
        Error::new(Kind::Full, self.retries.reason())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_in_blob_files_are_not_admitted_at_the_rate_of_tables() {
        let paces = Paces::new(0);
        let after = |groups: usize, to_tables: u64| {
            (0..groups).for_each(|_| paces.note_group(4136, to_tables));
            paces.table_share.get()
        };
        assert_eq!(after(9, 4136), 1.0);
        // A reference takes 60 bytes.
        let share = after(200, 60);
        assert!((0.014..0.016).contains(&share), "{share}");
        assert_eq!(after(200, 0), TABLE_SHARE_MIN);
        assert!(after(200, 4136) > 0.99);
    }
}
