//! The rate of flushes and merges. `backpressure.rs` sets it, on the core that owns the database;
//! the job keeps to it, on its own core. So do limits of users: a share of the core, and pauses.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use reactor::Core;

/// Slowest rate, in bytes per second.
const RATE_MIN: u64 = 32 << 20;
/// Bytes after which the clock is read.
const STEP: u64 = 128 << 10;
/// Longest sleep in nanoseconds: the rate may change meanwhile.
const SLEEP_MAX_NS: u64 = 20_000_000;
/// Lost time that a job may make up for, in nanoseconds.
const LATE_MAX_NS: u64 = 10_000_000;

/// A whole core, in the unit of [`Pace::share`].
const WHOLE: u64 = 1000;

/// A rate that one core sets and another keeps to.
#[derive(Default)]
pub(crate) struct Pace {
    /// Bytes per second; 0 for no limit.
    rate: AtomicU64,
    /// Thousandths of a core that a job may use; 0 for no limit.
    share: AtomicU64,
    /// Thousandths of the disk's share of background work that jobs have in any case.
    urgency: AtomicU64,
    /// Jobs stand still.
    held: AtomicBool,
    /// Bytes done.
    done: AtomicU64,
}

impl Pace {
    /// Sets the rate to `bytes` in `ns` nanoseconds.
    pub fn set(&self, bytes: u64, ns: u64) {
        let rate = u128::from(bytes) * 1_000_000_000 / u128::from(ns.max(1));
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        self.rate.store(rate.max(RATE_MIN), Ordering::Relaxed);
    }

    /// Lowers the rate to `limit` bytes per second, if it is above.
    pub fn cap(&self, limit: u64) {
        let rate = self.rate.load(Ordering::Relaxed);
        if rate == 0 || rate > limit {
            self.rate.store(limit.max(1), Ordering::Relaxed);
        }
    }

    /// Removes the limit.
    pub fn hurry(&self) {
        self.rate.store(0, Ordering::Relaxed);
    }

    /// Limits the part of a core's time that a job may use; `None` for no limit.
    pub fn set_share(&self, part: Option<f64>) {
        let thousandths =
            part.filter(|&part| part < 1.0).map_or(0, |part| ((part * WHOLE as f64) as u64).max(1));
        self.share.store(thousandths, Ordering::Relaxed);
    }

    /// Sets how urgent the jobs are, from 0 to 1: the least part of the disk's share of background
    /// work that they have beside requests.
    pub fn set_urgency(&self, urgency: f64) {
        let thousandths = (urgency.clamp(0.0, 1.0) * WHOLE as f64) as u64;
        self.urgency.store(thousandths, Ordering::Relaxed);
    }

    /// The same.
    pub fn urgency(&self) -> f64 {
        self.urgency.load(Ordering::Relaxed) as f64 / WHOLE as f64
    }

    /// Has jobs stand still, or go on.
    pub fn hold(&self, held: bool) {
        self.held.store(held, Ordering::Relaxed);
    }

    /// The rate, in bytes per second; `None` for no limit.
    pub fn rate(&self) -> Option<u64> {
        Some(self.rate.load(Ordering::Relaxed)).filter(|&rate| rate > 0)
    }

    /// Bytes that jobs have done so far, in steps.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }
}

/// A job that keeps to a pace.
pub(crate) struct Paced<'a> {
    pace: &'a Pace,
    bytes: u64,
    /// When the work done so far is due.
    due_ns: u64,
    /// Nanoseconds that the job has occupied its core, and the part that it has rested for.
    busy: &'a BusyTime,
    busy_ns: u64,
    /// Nanoseconds to rest, because the job may use a part of the core only.
    owed_ns: u64,
}

/// Nanoseconds that a job has occupied its core.
pub(crate) type BusyTime = Rc<Cell<u64>>;

impl<'a> Paced<'a> {
    /// A job that counts the time it occupies its core in `busy`.
    pub fn new(pace: &'a Pace, busy: &'a BusyTime) -> Paced<'a> {
        Paced { pace, bytes: 0, due_ns: 0, busy, busy_ns: busy.get(), owed_ns: 0 }
    }

    /// Rests while the job is held, and as long as its share of the core demands.
    async fn rest(&mut self, core: &Core) {
        let busy_ns = self.busy.get();
        let worked = busy_ns.saturating_sub(std::mem::replace(&mut self.busy_ns, busy_ns));
        let share = || self.pace.share.load(Ordering::Relaxed);
        let mut owed_ns = self.owed_ns + rest_ns(worked, share());
        loop {
            let held = self.pace.held.load(Ordering::Relaxed);
            if share() == 0 {
                owed_ns = 0;
            }
            let ns = if held { SLEEP_MAX_NS } else { owed_ns.min(SLEEP_MAX_NS) };
            if ns == 0 {
                break;
            }
            core.sleep_ns(ns).await;
            owed_ns = owed_ns.saturating_sub(ns);
        }
        self.owed_ns = owed_ns;
    }

    /// Notes that `bytes` more are done. Suspends until it is time for the next.
    pub async fn done(&mut self, core: &Core, bytes: u64) {
        self.bytes += bytes;
        if self.bytes < STEP {
            return;
        }
        let bytes = std::mem::take(&mut self.bytes);
        self.pace.done.fetch_add(bytes, Ordering::Relaxed);
        core.urge_background(self.pace.urgency());
        self.rest(core).await;
        let rate = self.pace.rate.load(Ordering::Relaxed);
        let now_ns = core.now_exact_ns();
        self.due_ns = self.due_ns.max(now_ns.saturating_sub(LATE_MAX_NS));
        if rate == 0 {
            return;
        }
        let ns = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
        self.due_ns += u64::try_from(ns).unwrap_or(SLEEP_MAX_NS).min(SLEEP_MAX_NS);
        if self.due_ns > now_ns {
            let ns = (self.due_ns - now_ns).min(SLEEP_MAX_NS);
            core.sleep_ns(ns).await;
        }
    }
}

/// The rest after `worked` nanoseconds of a job that may use thousandths of a core.
fn rest_ns(worked: u64, share: u64) -> u64 {
    match share {
        0 | WHOLE.. => 0,
        share => worked.saturating_mul(WHOLE - share) / share,
    }
}

/// The progress of a merge.
pub(crate) struct MergeProgress {
    /// Bytes of the files to be merged.
    pub bytes: u64,
    /// Bytes of their entries.
    entries: u64,
    done: MergeCounters,
}

/// What the parts of a merge count.
#[derive(Clone, Default)]
pub(crate) struct MergeCounters {
    /// Bytes of entries merged so far.
    pub entries: Arc<AtomicU64>,
    /// Bytes of tables written so far.
    pub written: Arc<AtomicU64>,
    /// Nanoseconds that the merge has occupied cores, once it has ended.
    pub busy_ns: Arc<AtomicU64>,
}

impl MergeProgress {
    /// Begins a merge of files of `bytes`, whose entries have `entries` bytes.
    pub fn new(bytes: u64, entries: u64, done: &MergeCounters) -> MergeProgress {
        MergeProgress { bytes, entries, done: done.clone() }
    }

    /// Bytes of files that are left to be merged, about.
    pub fn left(&self) -> u64 {
        self.bytes - (self.bytes as f64 * self.part()) as u64
    }

    /// The part that is done, from 0 to 1, about.
    pub fn part(&self) -> f64 {
        let done = self.done.entries.load(Ordering::Relaxed);
        (done as f64 / self.entries.max(1) as f64).min(1.0)
    }

    /// Bytes of tables written so far.
    pub fn written(&self) -> u64 {
        self.done.written.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_rests_as_its_share_of_the_core_demands() {
        assert_eq!(rest_ns(1_000_000, 0), 0, "no limit");
        assert_eq!(rest_ns(1_000_000, 500), 1_000_000);
        assert_eq!(rest_ns(1_000_000, 100), 9_000_000);
        let pace = Pace::default();
        pace.set_share(Some(0.25));
        assert_eq!(pace.share.load(Ordering::Relaxed), 250);
        pace.set_share(Some(1e-9));
        assert_eq!(pace.share.load(Ordering::Relaxed), 1);
        for whole in [Some(1.0), Some(2.0), None] {
            pace.set_share(whole);
            assert_eq!(pace.share.load(Ordering::Relaxed), 0, "{whole:?}");
        }
    }

    #[test]
    fn progress_follows_the_entries_also_of_compressed_files() {
        let done = MergeCounters::default();
        let progress = MergeProgress::new(1000, 4000, &done);
        done.entries.store(1000, Ordering::Relaxed);
        assert_eq!((progress.part(), progress.left()), (0.25, 750));
        done.entries.store(5000, Ordering::Relaxed);
        assert_eq!((progress.part(), progress.left()), (1.0, 0));
    }
}
