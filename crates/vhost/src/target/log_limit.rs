//! Limits the log lines about a disk.
//!
//! A guest and its front end can fail, connect or break a ring a thousand times a second. So each
//! kind of event has a few lines in each [`PERIOD_NS`], and the first line of a later period tells
//! how many were suppressed. The metrics count all events.

use std::sync::atomic::{AtomicU64, Ordering};

/// Length of a period in nanoseconds.
const PERIOD_NS: u64 = 10_000_000_000;

/// Decides whether one kind of event is logged now. Any core may ask. The counts are exact if one
/// core asks at a time, and approximate if several do.
pub(crate) struct LogLimit {
    /// Most lines in a period.
    lines: u64,
    /// When the period ends; 0 before the first event.
    end_ns: AtomicU64,
    logged: AtomicU64,
    left_out: AtomicU64,
}

/// Permission to write a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogPermit {
    /// Number of suppressed events before it, if there are any.
    pub left_out: Option<u64>,
}

impl LogLimit {
    pub const fn new(lines: u64) -> LogLimit {
        LogLimit {
            lines,
            end_ns: AtomicU64::new(0),
            logged: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        }
    }

    /// Reports an event. Returns whether to log it. `now_ns` is the caller's clock.
    pub fn permit(&self, now_ns: u64) -> Option<LogPermit> {
        if now_ns >= self.end_ns.load(Ordering::Relaxed) {
            self.end_ns.store(now_ns.saturating_add(PERIOD_NS), Ordering::Relaxed);
            self.logged.store(0, Ordering::Relaxed);
        }
        if self.logged.fetch_add(1, Ordering::Relaxed) < self.lines {
            let left_out = self.left_out.swap(0, Ordering::Relaxed);
            return Some(LogPermit { left_out: Some(left_out).filter(|n| *n > 0) });
        }
        self.left_out.fetch_add(1, Ordering::Relaxed);
        None
    }
}

/// The limits of a disk's events.
pub(crate) struct LogLimits {
    /// A ring was broken.
    pub broken: LogLimit,
    /// A ring could not be started.
    pub not_started: LogLimit,
    /// The device failed a request.
    pub failed: LogLimit,
    /// The device had no space for a request.
    pub full: LogLimit,
    /// A front end has connected.
    pub connected: LogLimit,
    /// A front end has disconnected.
    pub gone: LogLimit,
    /// A front end's connection was closed, or a request was refused.
    pub refused: LogLimit,
}

impl Default for LogLimits {
    fn default() -> LogLimits {
        // Machines that start and reboot connect several times in a row.
        const OFTEN: u64 = 10;
        LogLimits {
            broken: LogLimit::new(1),
            not_started: LogLimit::new(1),
            failed: LogLimit::new(1),
            full: LogLimit::new(1),
            connected: LogLimit::new(OFTEN),
            gone: LogLimit::new(OFTEN),
            refused: LogLimit::new(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_events_is_one_line_per_period_with_the_number_suppressed() {
        let log_limit = LogLimit::new(1);
        let at = |ns: u64| log_limit.permit(ns).map(|permit| permit.left_out);
        assert_eq!(at(5), Some(None));
        for ns in 6..1006 {
            assert_eq!(at(ns), None);
        }
        assert_eq!(at(5 + PERIOD_NS), Some(Some(1000)));
        assert_eq!(at(6 + PERIOD_NS), None);
        assert_eq!(at(5 + 9 * PERIOD_NS), Some(Some(1)));
        assert_eq!(at(5 + 20 * PERIOD_NS), Some(None));
    }

    #[test]
    fn a_few_events_are_all_logged() {
        let log_limit = LogLimit::new(3);
        let logged = (0..10).filter(|ns| log_limit.permit(*ns).is_some()).count();
        assert_eq!(logged, 3);
        assert_eq!(log_limit.permit(PERIOD_NS), Some(LogPermit { left_out: Some(7) }));
    }
}
