//! How long nothing was acknowledged although something waited for it.

use std::cell::Cell;

/// A time without an acknowledgement that is longer than this is a stall.
pub const STALL_NS: u64 = 10_000_000;

/// Looks at every operation of one core: when it was handed over, when it was acknowledged.
#[derive(Debug, Default)]
pub struct StallMeter {
    waiting: Cell<u64>,
    /// Since when something waits and nothing was acknowledged.
    since_ns: Cell<u64>,
    stalls: Cell<Stalls>,
}

/// What such a meter saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    /// The longest time.
    pub max_ns: u64,
    /// The sum of those longer than [`STALL_NS`].
    pub sum_ns: u64,
}

impl StallMeter {
    /// An operation begins to wait.
    #[inline]
    pub fn begin(&self, now_ns: u64) {
        if self.waiting.get() == 0 {
            self.since_ns.set(now_ns.max(self.since_ns.get()));
        }
        self.waiting.set(self.waiting.get() + 1);
    }

    /// One was acknowledged.
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

    /// What it saw so far.
    pub fn stalls(&self) -> Stalls {
        self.stalls.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_stall_is_counted_once_however_many_wait() {
        let meter = StallMeter::default();
        for _ in 0..3 {
            meter.begin(0);
        }
        // One comes at once, then nothing for 30 ms, then both others.
        meter.end(MS);
        meter.end(31 * MS);
        meter.end(32 * MS);
        assert_eq!(meter.stalls(), Stalls { max_ns: 30 * MS, sum_ns: 30 * MS });
    }

    #[test]
    fn time_in_which_nothing_waits_is_no_stall() {
        let meter = StallMeter::default();
        meter.begin(0);
        meter.end(MS);
        meter.begin(500 * MS);
        meter.end(505 * MS);
        assert_eq!(meter.stalls(), Stalls { max_ns: 5 * MS, sum_ns: 0 });
    }
}
