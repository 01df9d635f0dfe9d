//! Counting operations and their latencies.
//!
//! Each core has one [`Meter`], shared by its tasks; the meters are added up when all cores are
//! done. Reading the clock costs about 20 ns, so it is read once per operation: an operation begins
//! when its task's last one ended. Scans read it once per run of steps; each step of the run counts
//! with the mean.

use hdrhistogram::Histogram;
use std::cell::{Cell, RefCell};

/// The longest latency that the histogram distinguishes, in nanoseconds.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// One core's counters.
pub struct Meter {
    deadline_ns: u64,
    operations: Cell<u64>,
    found: Cell<u64>,
    entries: Cell<u64>,
    bytes: Cell<u64>,
    end_ns: Cell<u64>,
    latency: RefCell<Histogram<u64>>,
}

/// The counts of a core, which can be sent to another core and added up.
#[derive(Clone, Debug)]
pub struct Counts {
    /// Operations done.
    pub operations: u64,
    /// The requested keys that were found.
    pub found: u64,
    /// Entries stepped over, in cases that do.
    pub entries: u64,
    /// Bytes of values returned by gets, and of keys and values read by iterators.
    pub bytes: u64,
    /// When the last operation ended, in the core's nanoseconds.
    pub end_ns: u64,
    /// Latencies in nanoseconds.
    pub latency: Histogram<u64>,
}

impl Meter {
    /// Counts until the core's clock shows `deadline_ns`.
    pub fn new(deadline_ns: u64) -> Meter {
        Meter {
            deadline_ns,
            operations: Cell::new(0),
            found: Cell::new(0),
            entries: Cell::new(0),
            bytes: Cell::new(0),
            end_ns: Cell::new(0),
            latency: RefCell::new(histogram()),
        }
    }

    /// Counts one call, from `from_ns` to `now_ns`, that did `operations` operations and found
    /// `found` keys. If the call was `parts` equal steps, each counts with the mean latency. False
    /// when the time is over.
    #[inline]
    pub fn count(
        &self,
        operations: u64,
        found: u64,
        parts: u64,
        from_ns: u64,
        now_ns: u64,
    ) -> bool {
        let parts = parts.max(1);
        let each = now_ns.saturating_sub(from_ns) / parts;
        self.latency.borrow_mut().saturating_record_n(each, parts);
        self.operations.set(self.operations.get() + operations);
        self.found.set(self.found.get() + found);
        self.end_ns.set(now_ns);
        now_ns < self.deadline_ns
    }

    /// Moves the end of the last operation to `now_ns`.
    pub fn end(&self, now_ns: u64) {
        self.end_ns.set(now_ns);
    }

    /// Counts entries that were stepped over.
    #[inline]
    pub fn step(&self, entries: u64) {
        self.entries.set(self.entries.get() + entries);
    }

    /// Counts bytes returned to the caller.
    #[inline]
    pub fn returned(&self, bytes: usize) {
        self.bytes.set(self.bytes.get() + bytes as u64);
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        Counts {
            operations: self.operations.get(),
            found: self.found.get(),
            entries: self.entries.get(),
            bytes: self.bytes.get(),
            end_ns: self.end_ns.get(),
            latency: self.latency.borrow().clone(),
        }
    }
}

impl Default for Counts {
    fn default() -> Counts {
        Counts { operations: 0, found: 0, entries: 0, bytes: 0, end_ns: 0, latency: histogram() }
    }
}

impl Counts {
    /// Adds another core's counts.
    pub fn add(&mut self, other: &Counts) {
        self.operations += other.operations;
        self.found += other.found;
        self.entries += other.entries;
        self.bytes += other.bytes;
        self.end_ns = self.end_ns.max(other.end_ns);
        self.latency.add(&other.latency).expect("both histograms have the same bounds");
    }

    /// The mean latency, in microseconds.
    pub fn latency_mean_us(&self) -> f64 {
        self.latency.mean() / 1000.0
    }

    /// The latency quantile, in microseconds.
    pub fn latency_us(&self, quantile: f64) -> f64 {
        self.latency.value_at_quantile(quantile) as f64 / 1000.0
    }
}

/// A histogram from a nanosecond to a minute with three significant digits.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("the bounds are in order")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_cores_add_up() {
        let (one, two) = (Meter::new(1000), Meter::new(1000));
        assert!(one.count(1, 1, 1, 0, 500));
        assert!(!one.count(1, 0, 1, 500, 1500));
        two.step(10);
        assert!(two.count(10, 10, 10, 0, 900));
        let mut total = one.counts();
        total.add(&two.counts());
        assert_eq!((total.operations, total.found, total.entries), (12, 11, 10));
        assert_eq!(total.end_ns, 1500);
        assert_eq!(total.latency.len(), 12);
        assert_eq!(total.latency_us(0.5), 0.09, "ten steps of 90 ns are the median");
    }
}
