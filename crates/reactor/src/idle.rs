//! What a core does after a turn without work: it spins a little, or sleeps in the driver.
//!
//! A sleep and its wake-up cost about 40 µs of latency, and 12 µs of the sender's time when the
//! sender is another core. Spinning for the same time costs at most twice the optimum (the classic
//! bound). It pays only for work that arrives through memory: from other cores and from pollers. A
//! completion of a disk or a socket arrives by an interrupt that takes the processor from the spin
//! anyway. Measured: spinning for the disk costs three times the processor time for 4 % of latency,
//! and halves the throughput of sockets when their clients want the same processors. So a core that
//! waits only for those sleeps immediately.

/// How a core waits for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PollMode {
    /// Never sleep: lowest latency, a whole processor per core.
    Always,
    /// Spin while work through memory is expected, else sleep.
    #[default]
    Adaptive,
    /// Sleep immediately.
    Never,
}

impl std::str::FromStr for PollMode {
    type Err = String;
    fn from_str(text: &str) -> Result<PollMode, String> {
        match text {
            "always" => Ok(PollMode::Always),
            "adaptive" => Ok(PollMode::Adaptive),
            "never" => Ok(PollMode::Never),
            _ => Err(format!("must be always, adaptive or never, not '{text}'")),
        }
    }
}

impl std::fmt::Display for PollMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            PollMode::Always => "always",
            PollMode::Adaptive => "adaptive",
            PollMode::Never => "never",
        })
    }
}

/// Longest spin in nanoseconds: the cost of a sleep and a wake-up.
const SPIN_NS: u64 = 50_000;
/// One spin of the mode that never sleeps, before the next turn.
const ALWAYS_SPIN_NS: u64 = 20_000;

/// Decides between spinning and sleeping by the recent gaps between work.
pub(crate) struct Idle {
    mode: PollMode,
    /// Mean gap in nanoseconds between going idle and the next work, newest weighted 1/8.
    gap_ns: u64,
    since: Option<u64>,
}

impl Idle {
    pub fn new(mode: PollMode) -> Idle {
        Idle { mode, gap_ns: 0, since: None }
    }

    pub fn never_sleeps(&self) -> bool {
        self.mode == PollMode::Always
    }

    /// Until when to spin, if at all.
    pub fn spin_until(&mut self, now: u64, pollers: bool, messages: bool) -> Option<u64> {
        if let Some(since) = self.since {
            let gap = now.saturating_sub(since).min(100 * SPIN_NS);
            self.gap_ns = self.gap_ns - self.gap_ns / 8 + gap / 8;
        }
        self.since = Some(now);
        match self.mode {
            PollMode::Always => Some(now + ALWAYS_SPIN_NS),
            PollMode::Never => None,
            PollMode::Adaptive if !pollers && !messages => None,
            PollMode::Adaptive if self.gap_ns > 4 * SPIN_NS => None,
            PollMode::Adaptive => Some(now + SPIN_NS),
        }
    }

    /// The spin ended with work.
    pub fn found_work(&mut self) {
        self.gap_ns -= self.gap_ns / 8;
        self.since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spins_only_for_work_that_comes_through_memory_and_comes_often() {
        let mut idle = Idle::new(PollMode::Adaptive);
        assert_eq!(idle.spin_until(0, false, false), None);
        assert_eq!(idle.spin_until(10_000, true, false), Some(10_000 + SPIN_NS));
        let mut now = 0;
        for _ in 0..100 {
            now += 10_000_000;
            idle.spin_until(now, true, false);
        }
        assert_eq!(
            idle.spin_until(now + 10_000_000, true, false),
            None,
            "an idle disk costs no CPU"
        );
        for _ in 0..100 {
            idle.found_work();
        }
        assert!(idle.spin_until(now, false, true).is_some());
    }
}
