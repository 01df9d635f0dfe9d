//! Stalls: times without an acknowledged write. A writing thread always has a write in flight, so
//! every such time counts.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// A longer time without an acknowledgement is a stall.
const STALL_NS: u64 = 10_000_000;

/// Observes the acknowledgements of all threads.
pub struct StallMeter {
    start: Instant,
    last_ns: AtomicU64,
    max_ns: AtomicU64,
    sum_ns: AtomicU64,
}

impl StallMeter {
    /// A meter that starts now.
    pub fn new() -> Self {
        Self {
            start: Instant::now(),
            last_ns: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
            sum_ns: AtomicU64::new(0),
        }
    }

    /// A write was acknowledged.
    pub fn acknowledged(&self) {
        self.at(self.start.elapsed().as_nanos() as u64);
    }

    fn at(&self, now_ns: u64) {
        let waited_ns = now_ns.saturating_sub(self.last_ns.swap(now_ns, Relaxed));
        if waited_ns > self.max_ns.load(Relaxed) {
            self.max_ns.fetch_max(waited_ns, Relaxed);
        }
        if waited_ns > STALL_NS {
            self.sum_ns.fetch_add(waited_ns, Relaxed);
        }
    }

    /// The longest time without an acknowledgement, in milliseconds.
    pub fn max_ms(&self) -> f64 {
        self.max_ns.load(Relaxed) as f64 / 1e6
    }

    /// The sum of the stalls, in milliseconds.
    pub fn sum_ms(&self) -> f64 {
        self.sum_ns.load(Relaxed) as f64 / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::StallMeter;

    #[test]
    fn only_long_times_are_stalls_and_the_longest_is_kept() {
        let meter = StallMeter::new();
        for ms in [1, 6, 26, 27, 57] {
            meter.at(ms * 1_000_000);
        }
        assert_eq!((meter.max_ms(), meter.sum_ms()), (30.0, 50.0));
    }
}
