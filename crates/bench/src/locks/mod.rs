//! The cost of handing an operation to a shard: the reactor's mailbox against a mutex and a
//! condition variable; and of logging a line: the rings of the log against a logger under a mutex.
//!
//! 1. Threads meet at a barrier, and each hands over [`bursts::BURST`] operations as fast as it
//!    can. Its own time for them, divided by their number, is the cost of a hand-over to the
//!    caller.
//! 2. The burst ends when the shard's owner has done all operations; the throughput counts from the
//!    first start to there. So no queue is ever full, and neither side gains by leaving work
//!    undone.
//! 3. Both sides run in many short turns until the time is over.
//!
//! The mailbox's owner is a task of a core, woken as the node wakes it. The lock's owner is a
//! thread that takes one operation at a time, as a work queue of threads does; a caller that finds
//! the queue empty signals it. An operation is an addition: the hand-over is measured, not the
//! work.
//!
//! Both logs render a line where it is logged and write it to a file. With rings a burst ends when
//! the log's writer has written it, and no line is dropped; under the mutex each thread writes its
//! own lines.

#![expect(clippy::disallowed_types, reason = "the lock is what the mailbox is measured against")]
#![expect(clippy::disallowed_methods, reason = "threads that are no cores, and their clock")]

mod bursts;
mod logging;
mod outcome;
mod shard;

use std::time::Duration;

use node::Error;
use reactor::{DriverKind, PollMode};

use self::bursts::Sums;
pub use self::outcome::{LocksLine, LocksOutcome};

/// Numbers of threads that hand over.
const THREADS: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Turns of each side for each number of threads.
const TURNS: u32 = 10;

/// How to measure.
#[derive(Clone, Debug)]
pub struct LocksPlan {
    /// The processors; the first is that of the shard's core.
    pub processors: Vec<usize>,
    /// Seconds for everything together.
    pub seconds: f64,
    /// How the core waits.
    pub poll: PollMode,
    /// The driver.
    pub driver: DriverKind,
}

/// Measures.
///
/// # Errors
/// The core or the log cannot be started.
pub fn run_locks(plan: &LocksPlan) -> Result<LocksOutcome, Error> {
    Ok(LocksOutcome {
        name: "locks",
        hand_over: by_turns(
            plan,
            |threads, turn| shard::through_mailbox(plan, threads, turn),
            |threads, turn| Ok(shard::through_lock(threads, turn)),
        )?,
        log: by_turns(plan, logging::through_rings, logging::through_lock)?,
        millrace: env!("CARGO_PKG_VERSION"),
    })
}

/// Runs both sides in many short turns, for half of the time.
fn by_turns(
    plan: &LocksPlan,
    free: impl Fn(usize, Duration) -> Result<Sums, Error>,
    locked: impl Fn(usize, Duration) -> Result<Sums, Error>,
) -> Result<Vec<LocksLine>, Error> {
    let turns = f64::from(TURNS) * THREADS.len() as f64 * 4.0;
    let turn = Duration::from_secs_f64(plan.seconds / turns);
    let lines = THREADS.map(|threads| {
        let mut sums = (Sums::default(), Sums::default());
        for _ in 0..TURNS {
            sums.0.add(free(threads, turn)?);
            sums.1.add(locked(threads, turn)?);
        }
        Ok(line(threads, sums.0, sums.1))
    });
    lines.into_iter().collect()
}

fn line(threads: usize, free: Sums, locked: Sums) -> LocksLine {
    LocksLine {
        threads,
        ns: free.ns(),
        lock_ns: locked.ns(),
        ops_per_second: free.ops_per_second(),
        lock_ops_per_second: locked.ops_per_second(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hand_over_and_every_line_is_measured() {
        let plan = LocksPlan {
            processors: reactor::processors().into_iter().take(1).collect(),
            seconds: 0.3,
            poll: PollMode::Adaptive,
            driver: DriverKind::Auto,
        };
        let outcome = run_locks(&plan).unwrap();
        assert_eq!((outcome.hand_over.len(), outcome.log.len()), (THREADS.len(), THREADS.len()));
        for line in outcome.hand_over.iter().chain(&outcome.log) {
            assert!(line.ns > 0.0 && line.lock_ns > 0.0, "{line:?}");
            assert!(line.ops_per_second > 0.0 && line.lock_ops_per_second > 0.0, "{line:?}");
        }
        assert_eq!(outcome.text().lines().count(), 2 * (2 + THREADS.len()));
    }
}
