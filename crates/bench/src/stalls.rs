//! Stalls: times in which writes waited and none was acknowledged.

use std::cell::Cell;

/// A longer time without an acknowledgement is a stall.
pub const STALL_NS: u64 = 10_000_000;

/// Observes when each operation of one core was submitted and acknowledged.
#[derive(Debug, Default)]
pub struct StallMeter {
    waiting: Cell<u64>,
    /// Start of the present time in which something waits and nothing was acknowledged.
    since_ns: Cell<u64>,
    stalls: Cell<Stalls>,
}

/// The stalls that a [`StallMeter`] observed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    /// The longest time without an acknowledgement.
    pub max_ns: u64,
    /// The sum of such times longer than [`STALL_NS`].
    pub sum_ns: u64,
}

impl StallMeter {
    /// An operation was submitted.
    #[inline]
    pub fn begin(&self, now_ns: u64) {
        if self.waiting.get() == 0 {
            self.since_ns.set(now_ns.max(self.since_ns.get()));
        }
        self.waiting.set(self.waiting.get() + 1);
    }

    /// An operation was acknowledged.
    #[inline]
    pub fn end(&self, now_ns: u64) {
        let waited_ns = now_ns.saturating_sub(self.since_ns.get());
        let mut stalls = self.stalls.get();
        stalls.max_ns = stalls.max_ns.max(waited_ns);
        if waited_ns > STALL_NS {
            stalls.sum_ns += waited_ns;
        }
        self.stalls.set(stalls);
        self.waiting.set(self.waiting.get() - 1);
        self.since_ns.set(now_ns);
    }

    /// The stalls so far.
    pub fn stalls(&self) -> Stalls {
        self.stalls.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_stall_counts_once_for_any_number_of_waiters() {
        let meter = StallMeter::default();
        for _ in 0..3 {
            meter.begin(0);
        }
        // One after a millisecond, nothing for 30 ms, then both others.
        meter.end(MS);
        meter.end(31 * MS);
        meter.end(32 * MS);
        assert_eq!(meter.stalls(), Stalls { max_ns: 30 * MS, sum_ns: 30 * MS });
    }

    #[test]
    fn idle_time_is_not_a_stall() {
        let meter = StallMeter::default();
        meter.begin(0);
        meter.end(MS);
        meter.begin(500 * MS);
        meter.end(505 * MS);
        assert_eq!(meter.stalls(), Stalls { max_ns: 5 * MS, sum_ns: 0 });
    }
}
