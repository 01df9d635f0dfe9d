//! Bursts of operations by threads, and their times.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

/// Operations of one thread in one burst.
pub const BURST: u64 = 1000;

/// One side's sums for one number of threads.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    operations: u64,
    /// Time of all threads together.
    spent: Duration,
    /// Time from the start of each burst to its end.
    wall: Duration,
}

impl Sums {
    /// Adds other sums.
    pub fn add(&mut self, other: Sums) {
        self.operations += other.operations;
        self.spent += other.spent;
        self.wall += other.wall;
    }

    /// Nanoseconds of a thread for each operation.
    pub fn ns(&self) -> f64 {
        self.spent.as_nanos() as f64 / self.operations.max(1) as f64
    }

    /// Operations handed over and done per second.
    pub fn ops_per_second(&self) -> f64 {
        self.operations as f64 / self.wall.as_secs_f64().max(1e-9)
    }
}

/// Runs bursts of `threads` threads until the time is over. Each thread calls `enter` once and then
/// `act` with its result, [`BURST`] times in a burst; `settle` waits until this total number of
/// acts is done.
pub fn bursts<E>(
    threads: usize,
    length: Duration,
    enter: impl Fn() -> E + Sync,
    act: impl Fn(&mut E, u64) + Sync,
    settle: impl Fn(u64) + Sync,
) -> Sums {
    let (gate, over) = (Barrier::new(threads), AtomicBool::new(false));
    let began = Instant::now();
    let now_ns = || began.elapsed().as_nanos() as u64;
    let first_ns = AtomicU64::new(u64::MAX);
    let sums = Mutex::new(Sums::default());
    let thread = |nth: usize| {
        let (mut spent, mut wall, mut operations) = (0, 0, 0);
        let mut entered = enter();
        loop {
            gate.wait();
            let from_ns = now_ns();
            first_ns.fetch_min(from_ns, Ordering::Relaxed);
            for operation in 0..BURST {
                act(&mut entered, operation);
            }
            spent += now_ns() - from_ns;
            operations += BURST;
            gate.wait();
            if nth == 0 {
                settle(operations * threads as u64);
                let to_ns = now_ns();
                wall += to_ns - first_ns.swap(u64::MAX, Ordering::Relaxed);
                over.store(to_ns >= length.as_nanos() as u64, Ordering::Relaxed);
            }
            gate.wait();
            if over.load(Ordering::Relaxed) {
                break;
            }
        }
        sums.lock().unwrap_or_else(|e| e.into_inner()).add(Sums {
            operations,
            spent: Duration::from_nanos(spent),
            wall: Duration::from_nanos(wall),
        });
    };
    std::thread::scope(|scope| {
        for nth in 0..threads {
            let thread = &thread;
            scope.spawn(move || thread(nth));
        }
    });
    sums.into_inner().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use super::super::shard::Applied;
    use super::*;

    #[test]
    fn a_burst_ends_when_its_operations_are_done() {
        let done = Applied::default();
        let sum = Mutex::new(());
        let act = |(): &mut (), operation| {
            let _one = sum.lock().unwrap();
            done.apply(operation);
        };
        let sums = bursts(4, Duration::ZERO, || (), act, |all| done.wait_for(all));
        assert_eq!(sums.operations, 4 * BURST);
        assert_eq!(done.sum(), 4 * BURST * (BURST - 1) / 2);
    }
}
