//! The phases of a node, known to all its cores.
//!
//! Core 0 advances the phase; each core's main task waits for phases. A phase is only ever raised.
//! A waiting core sleeps: the change wakes it through its task's waker, which works from any
//! thread.
//!
//! | phase | meaning |
//! |---|---|
//! | starting | core 0 opens the database, the others wait |
//! | running | every core listens and serves |
//! | draining | no core accepts; received requests are answered, until a deadline |
//! | stopped | nothing is left to do, or the deadline has passed: cores end |

use std::sync::atomic::{AtomicU8, Ordering};
use std::task::Poll;

use atomic_waker::AtomicWaker;

/// A phase of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Core 0 opens what all share.
    Starting,
    /// The node serves.
    Running,
    /// The node finishes what it has begun.
    Draining,
    /// Cores end.
    Stopped,
}

const PHASES: [Phase; 4] = [Phase::Starting, Phase::Running, Phase::Draining, Phase::Stopped];

/// The node's phase, and one waiter per core.
#[derive(Debug)]
pub struct Phases {
    now: AtomicU8,
    waiting: Vec<AtomicWaker>,
}

impl Phases {
    /// The first phase of a node with `cores` cores.
    pub fn new(cores: usize) -> Phases {
        Phases {
            now: AtomicU8::new(Phase::Starting as u8),
            waiting: (0..cores).map(|_| AtomicWaker::new()).collect(),
        }
    }

    /// The phase the node is in.
    pub fn now(&self) -> Phase {
        PHASES[usize::from(self.now.load(Ordering::Acquire)).min(PHASES.len() - 1)]
    }

    /// Raises the phase and wakes the waiting cores. Never lowers it.
    pub fn raise(&self, phase: Phase) {
        self.now.fetch_max(phase as u8, Ordering::AcqRel);
        self.wake();
    }

    /// Wakes the cores that wait: a condition of [`Phases::until`] may have become true.
    pub fn wake(&self) {
        for waker in &self.waiting {
            waker.wake();
        }
    }

    /// Waits until the node is at least in `phase`, and returns its phase then. At most one task of
    /// each core waits at a time.
    pub async fn reached(&self, core: usize, phase: Phase) -> Phase {
        self.until(core, || self.now() >= phase).await;
        self.now()
    }

    /// Waits until `ready` returns true: for a condition that other cores change, each change
    /// followed by [`Phases::wake`]. At most one task of each core waits at a time.
    pub async fn until(&self, core: usize, ready: impl Fn() -> bool) {
        std::future::poll_fn(|cx| {
            // Register first, so that a change after the check finds the waker.
            self.waiting[core].register(cx.waker());
            if ready() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn a_wait_ends_at_its_phase_or_beyond_and_never_goes_back() {
        let phases = Phases::new(1);
        let mut cx = Context::from_waker(Waker::noop());
        let mut running = pin!(phases.reached(0, Phase::Running));
        assert!(running.as_mut().poll(&mut cx).is_pending());
        phases.raise(Phase::Draining);
        phases.raise(Phase::Running);
        assert_eq!(running.as_mut().poll(&mut cx), Poll::Ready(Phase::Draining));
    }
}
