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
pub(crate) struct Seldom {
    /// Lines in a period.
    lines: u64,
    /// When the period ends; 0 before the first event.
    end_ns: AtomicU64,
    said: AtomicU64,
    left_out: AtomicU64,
}

/// Permission to write a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// Number of suppressed events before it, if there are any.
    pub left_out: Option<u64>,
}

impl Seldom {
    pub const fn new(lines: u64) -> Seldom {
        Seldom {
            lines,
            end_ns: AtomicU64::new(0),
            said: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        }
    }

    /// Reports an event. Returns whether to log it. `now_ns` is the caller's clock.
    pub fn line(&self, now_ns: u64) -> Option<Line> {
        if now_ns >= self.end_ns.load(Ordering::Relaxed) {
            self.end_ns.store(now_ns.saturating_add(PERIOD_NS), Ordering::Relaxed);
            self.said.store(0, Ordering::Relaxed);
        }
        if self.said.fetch_add(1, Ordering::Relaxed) < self.lines {
            let left_out = self.left_out.swap(0, Ordering::Relaxed);
            return Some(Line { left_out: Some(left_out).filter(|n| *n > 0) });
        }
        self.left_out.fetch_add(1, Ordering::Relaxed);
        None
    }
}

/// The limits of a disk's events.
pub(crate) struct Lines {
    /// A ring was broken.
    pub broken: Seldom,
    /// A ring could not be started.
    pub not_started: Seldom,
    /// The device failed a request.
    pub failed: Seldom,
    /// The device had no space for a request.
    pub full: Seldom,
    /// A front end has connected.
    pub connected: Seldom,
    /// A front end has disconnected.
    pub gone: Seldom,
    /// A front end's connection was closed, or a request was refused.
    pub refused: Seldom,
}

impl Default for Lines {
    fn default() -> Lines {
        // Machines that start and reboot connect several times in a row.
        const OFTEN: u64 = 10;
        Lines {
            broken: Seldom::new(1),
            not_started: Seldom::new(1),
            failed: Seldom::new(1),
            full: Seldom::new(1),
            connected: Seldom::new(OFTEN),
            gone: Seldom::new(OFTEN),
            refused: Seldom::new(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_events_is_one_line_per_period_with_the_number_suppressed() {
        let seldom = Seldom::new(1);
        let at = |ns: u64| seldom.line(ns).map(|line| line.left_out);
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
        let seldom = Seldom::new(3);
        let said = (0..10).filter(|ns| seldom.line(*ns).is_some()).count();
        assert_eq!(said, 3);
        assert_eq!(seldom.line(PERIOD_NS), Some(Line { left_out: Some(7) }));
    }
}
