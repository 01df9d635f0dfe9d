//! The rate of flushes and merges. `backpressure.rs` sets it, on the core that owns the database;
//! the job keeps to it, on its own core.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use reactor::Core;

/// Slowest rate, in bytes per second.
const RATE_MIN: u64 = 32 << 20;
/// Bytes after which the clock is read.
const STEP: u64 = 128 << 10;
/// Longest sleep in nanoseconds: the rate may change meanwhile.
const SLEEP_MAX_NS: u64 = 20_000_000;
/// Lost time that a job may make up for, in nanoseconds.
const LATE_MAX_NS: u64 = 10_000_000;

/// A rate that one core sets and another keeps to.
#[derive(Default)]
pub(crate) struct Pace {
    /// Bytes per second; 0 for no limit.
    rate: AtomicU64,
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
}

impl<'a> Paced<'a> {
    pub fn new(pace: &'a Pace) -> Paced<'a> {
        Paced { pace, bytes: 0, due_ns: 0 }
    }

    /// Notes that `bytes` more are done. Suspends until it is time for the next.
    pub async fn done(&mut self, core: &Core, bytes: u64) {
        self.bytes += bytes;
        if self.bytes < STEP {
            return;
        }
        let bytes = std::mem::take(&mut self.bytes);
        self.pace.done.fetch_add(bytes, Ordering::Relaxed);
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

/// The progress of a merge.
pub(crate) struct MergeProgress {
    /// Bytes to be merged.
    bytes: u64,
    /// Bytes merged so far, about. The job counts them.
    done: Arc<AtomicU64>,
}

impl MergeProgress {
    /// Begins a merge of `bytes`. The job counts the bytes that are done in `done`.
    pub fn new(bytes: u64, done: &Arc<AtomicU64>) -> MergeProgress {
        MergeProgress { bytes, done: done.clone() }
    }

    /// Bytes that are left to be merged, about.
    pub fn left(&self) -> u64 {
        self.bytes.saturating_sub(self.done.load(Ordering::Relaxed))
    }

    /// The part that is done, from 0 to 1, about.
    pub fn part(&self) -> f64 {
        1.0 - self.left() as f64 / self.bytes.max(1) as f64
    }
}
