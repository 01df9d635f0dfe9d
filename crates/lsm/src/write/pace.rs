//! How fast flushes and merges go.
//!
//! What they read and write queues in the device before the log's groups. So each goes at a rate at
//! which it ends in time, and no faster: a flush within half the time that the next memtables take
//! to fill, a merge before level 0 has so many files that writes are slowed down. Where it is late
//! already, where writing ends, and where no memtable has filled yet, there is no rate.

use std::sync::atomic::{AtomicU64, Ordering};

use reactor::Core;

/// Slowest rate, in bytes per second.
const RATE_MIN: u64 = 32 << 20;
/// Bytes after which the clock is looked at.
const STEP: u64 = 128 << 10;
/// Longest sleep in nanoseconds: the rate may change meanwhile.
const SLEEP_MAX_NS: u64 = 20_000_000;
/// What may be made up for of a time in which nothing got on, in nanoseconds.
const LATE_MAX_NS: u64 = 10_000_000;

/// A rate that one core sets and another keeps to.
#[derive(Default)]
pub(crate) struct Pace {
    /// Bytes per second; 0 for as many as there can be.
    rate: AtomicU64,
    /// Nanoseconds slept.
    slept_ns: AtomicU64,
}

impl Pace {
    /// So many bytes in so many nanoseconds.
    pub fn set(&self, bytes: u64, ns: u64) {
        let rate = u128::from(bytes) * 1_000_000_000 / u128::from(ns.max(1));
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        self.rate.store(rate.max(RATE_MIN), Ordering::Relaxed);
    }

    /// As fast as it can.
    pub fn hurry(&self) {
        self.rate.store(0, Ordering::Relaxed);
    }

    /// Nanoseconds slept so far.
    pub fn slept_ns(&self) -> u64 {
        self.slept_ns.load(Ordering::Relaxed)
    }
}

/// Keeps to a pace.
pub(crate) struct Paced<'a> {
    pace: &'a Pace,
    bytes: u64,
    /// When what was done so far is due.
    due_ns: u64,
}

impl<'a> Paced<'a> {
    pub fn new(pace: &'a Pace) -> Paced<'a> {
        Paced { pace, bytes: 0, due_ns: 0 }
    }

    /// So many bytes more are done; suspends until it is time for the next.
    pub async fn done(&mut self, core: &Core, bytes: u64) {
        self.bytes += bytes;
        if self.bytes < STEP {
            return;
        }
        let bytes = std::mem::take(&mut self.bytes);
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
            self.pace.slept_ns.fetch_add(ns, Ordering::Relaxed);
        }
    }
}
