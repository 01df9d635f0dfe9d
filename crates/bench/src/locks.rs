//! What it costs to hand an operation to a shard: the reactor's mailbox beside a mutex and a
//! condition variable; and to log a line: the rings of the log beside a logger under a mutex.
//!
//! 1. Threads meet at a gate and each hands over [`BURST`] operations as fast as it can. Their own
//!    time for it, divided by the operations, is what a hand-over costs whoever does it.
//! 2. The burst ends when the shard's owner has done all operations; from the first start to there
//!    is what the throughput is taken from. So no queue is ever full, and no side gains by leaving
//!    work behind.
//! 3. Both sides run by turns, many short turns each, until the time is over.
//!
//! The owner of the mailbox is a task of a core, woken as the node wakes it. That of the lock is a
//! thread that takes one operation at a time, as a work queue of threads does, and whoever makes
//! the queue longer than nothing signals it. An operation is an addition: what is measured is the
//! hand-over.
//!
//! Both logs render a line where it is logged and write it to a file. With rings a burst ends when
//! the log's writer has written it, and no line is dropped; under the mutex each line is written
//! by the thread that logs it.

#![expect(clippy::disallowed_types, reason = "the lock is what the mailbox is measured against")]
#![expect(clippy::disallowed_methods, reason = "threads that are no cores, and their clock")]

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::future::poll_fn;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex, OnceLock};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use node::{Error, Kind};
use reactor::log::{Filter, Format, Log, LogFile, direct};
use reactor::mailbox::{Mailbox, Owner, Poster, Scheduled, mailbox};
use reactor::{DriverKind, PollMode, RuntimeConfig};
use serde::Serialize;
use tracing::level_filters::LevelFilter;

/// Threads that hand over.
const THREADS: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Operations of one thread in one burst.
const BURST: u64 = 1000;
/// Operations that the owner of the mailbox does before it lets others run.
const TURN: usize = 64;
/// Turns of each side for each number of threads.
const TURNS: u32 = 10;
/// Ends the owner.
const END: u64 = u64::MAX;

/// What to measure with.
#[derive(Clone, Debug)]
pub struct LocksPlan {
    /// The first is that of the shard's core.
    pub processors: Vec<usize>,
    /// For everything together.
    pub seconds: f64,
    /// How the core waits.
    pub poll: PollMode,
    /// Which driver.
    pub driver: DriverKind,
}

/// The result. As JSON its fields are the keys.
#[derive(Clone, Debug, Serialize)]
pub struct LocksOutcome {
    /// The case.
    pub name: &'static str,
    /// Handing an operation to a shard.
    pub hand_over: Vec<LocksLine>,
    /// Logging a line.
    pub log: Vec<LocksLine>,
    /// This program's version.
    pub millrace: &'static str,
}

/// One number of threads.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LocksLine {
    /// Threads.
    pub threads: usize,
    /// Nanoseconds of the thread that does it, without a lock.
    pub ns: f64,
    /// With one.
    pub lock_ns: f64,
    /// How many are handed over and done a second, without a lock.
    pub ops_per_second: f64,
    /// With one.
    pub lock_ops_per_second: f64,
}

/// One side's sums for one number of threads.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    operations: u64,
    /// Of all threads together.
    spent: Duration,
    /// From each burst's start to its end.
    wall: Duration,
}

impl Sums {
    fn add(&mut self, other: Sums) {
        self.operations += other.operations;
        self.spent += other.spent;
        self.wall += other.wall;
    }

    fn ns(&self) -> f64 {
        self.spent.as_nanos() as f64 / self.operations.max(1) as f64
    }

    fn ops_per_second(&self) -> f64 {
        self.operations as f64 / self.wall.as_secs_f64().max(1e-9)
    }
}

/// Measures.
///
/// # Errors
/// When the core or the log cannot be started.
pub fn run_locks(plan: &LocksPlan) -> Result<LocksOutcome, Error> {
    Ok(LocksOutcome {
        name: "locks",
        hand_over: by_turns(
            plan,
            |threads, turn| through_mailbox(plan, threads, turn),
            |threads, turn| Ok(through_lock(threads, turn)),
        )?,
        log: by_turns(plan, log_through_rings, log_through_lock)?,
        millrace: env!("CARGO_PKG_VERSION"),
    })
}

/// Runs both sides in many short turns, for half the time there is.
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

/// What the owner of a shard does.
#[derive(Default)]
struct Done {
    sum: AtomicU64,
    count: AtomicU64,
}

impl Done {
    /// By the owner only: no other writes.
    fn operation(&self, operation: u64) {
        self.sum.store(self.sum.load(Ordering::Relaxed).wrapping_add(operation), Ordering::Relaxed);
        self.count.store(self.count.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    fn wait_for(&self, operations: u64) {
        while self.count.load(Ordering::Acquire) < operations {
            std::thread::yield_now();
        }
    }
}

/// Bursts of so many threads until the time is over. Each thread keeps what `enter` gives it while
/// it does `act` with it; `settle` waits until so many acts altogether have come to their end.
fn bursts<E>(
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

/// The way to the shard, and how its owner is woken.
struct Desk {
    mailbox: Mailbox<u64>,
    waker: Waker,
}

impl Desk {
    fn hand_over(&self, poster: &mut Poster<u64>, operation: u64) {
        // It has room for every burst, and is open until the end.
        if let Ok(Scheduled::Yes) = poster.post(operation) {
            self.waker.wake_by_ref();
        }
    }
}

fn through_mailbox(plan: &LocksPlan, threads: usize, length: Duration) -> Result<Sums, Error> {
    let config = RuntimeConfig {
        processors: plan.processors[..1].to_vec(),
        memory: 1 << 20,
        poll: plan.poll,
        driver: plan.driver,
        ..RuntimeConfig::default()
    };
    let (desk, done) = (Arc::new(OnceLock::new()), Arc::new(Done::default()));
    std::thread::scope(|scope| {
        let shard = (desk.clone(), done.clone());
        let core = scope.spawn(move || {
            reactor::run(&config, move |_| {
                let (desk, done) = shard.clone();
                async move { own_mailbox(&desk, &done).await }
            })
        });
        while desk.get().is_none() && !core.is_finished() {
            std::thread::yield_now();
        }
        let sums = desk.get().map(|desk: &Desk| {
            let enter = || desk.mailbox.poster();
            let act = |poster: &mut _, operation| desk.hand_over(poster, operation);
            let sums = bursts(threads, length, enter, act, |all| done.wait_for(all));
            desk.hand_over(&mut enter(), END);
            sums
        });
        let ended = core.join().map_err(|_| Error::new(Kind::System, "the core panicked"))?;
        ended.map_err(|error| Error::new(Kind::System, format!("starting a core: {error}")))?;
        sums.ok_or_else(|| Error::new(Kind::System, "the core did not start"))
    })
}

/// The shard's task; ends with [`END`].
async fn own_mailbox(desk: &OnceLock<Desk>, done: &Done) {
    let (mailbox, mut owner): (_, Owner<u64>) = mailbox(BURST as usize);
    let mut ended = false;
    poll_fn(|cx| {
        // The same task has the same waker every time, so the first is good for ever.
        desk.get_or_init(|| Desk { mailbox: mailbox.clone(), waker: cx.waker().clone() });
        let scheduled = owner.take(TURN, &mut |operation| match operation {
            END => ended = true,
            _ => done.operation(operation),
        });
        if scheduled == Scheduled::Yes {
            cx.waker().wake_by_ref();
        }
        if ended { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// A queue under a lock.
#[derive(Default)]
struct LockedQueue {
    operations: Mutex<VecDeque<u64>>,
    some: Condvar,
}

impl LockedQueue {
    fn hand_over(&self, operation: u64) {
        let mut operations = self.operations.lock().unwrap_or_else(|e| e.into_inner());
        let first = operations.is_empty();
        operations.push_back(operation);
        drop(operations);
        if first {
            self.some.notify_one();
        }
    }

    fn take(&self) -> u64 {
        let mut operations = self.operations.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            match operations.pop_front() {
                Some(operation) => return operation,
                None => {
                    operations = self.some.wait(operations).unwrap_or_else(|e| e.into_inner());
                }
            }
        }
    }
}

fn through_lock(threads: usize, length: Duration) -> Sums {
    let (queue, done) = (LockedQueue::default(), Done::default());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                match queue.take() {
                    END => return,
                    operation => done.operation(operation),
                }
            }
        });
        let act = |(): &mut (), operation| queue.hand_over(operation);
        let sums = bursts(threads, length, || (), act, |all| done.wait_for(all));
        queue.hand_over(END);
        sums
    })
}

/// A line as a node logs it.
fn log_a_line(operation: u64) {
    tracing::info!(shard = 3, bytes = operation, "a memtable was written to a table");
}

/// A file for lines, removed at the end.
struct Lines(PathBuf);

impl Lines {
    fn new() -> Lines {
        Lines(std::env::temp_dir().join(format!("millrace-bench-log-{}", std::process::id())))
    }

    fn open(&self) -> Result<Box<LogFile>, Error> {
        let failed = |e| Error::new(Kind::System, format!("opening {}: {e}", self.0.display()));
        LogFile::open(&self.0).map(Box::new).map_err(failed)
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// How long the log's writer may take for a burst.
const PATIENCE: Duration = Duration::from_secs(10);

fn log_through_rings(threads: usize, length: Duration) -> Result<Sums, Error> {
    let lines = Lines::new();
    let filter = Filter::level(LevelFilter::INFO);
    let (log, _writer) = Log::start(Format::Text, filter, lines.open()?)
        .map_err(|error| Error::new(Kind::System, format!("starting the log: {error}")))?;
    let written = AtomicBool::new(true);
    let settle = |_| {
        if !log.flush(PATIENCE) {
            written.store(false, Ordering::Relaxed);
        }
    };
    let sums = bursts(threads, length, || log.enter(None), |_, nth| log_a_line(nth), settle);
    match (log.dropped(), written.into_inner()) {
        (0, true) => Ok(sums),
        (dropped, _) => {
            let what = format!("the log did not keep up: {dropped} lines were dropped");
            Err(Error::new(Kind::System, what))
        }
    }
}

fn log_through_lock(threads: usize, length: Duration) -> Result<Sums, Error> {
    let lines = Lines::new();
    let log = direct(Format::Text, Filter::level(LevelFilter::INFO), lines.open()?);
    let enter = || tracing::dispatcher::set_default(&log);
    Ok(bursts(threads, length, enter, |_, nth| log_a_line(nth), |_| ()))
}

impl LocksOutcome {
    /// The result as two tables for people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        table(&mut out, "handing an operation to a shard", "mailbox", &self.hand_over);
        table(&mut out, "logging a line", "rings", &self.log);
        out.truncate(out.trim_end().len());
        out
    }
}

fn table(out: &mut String, what: &str, free: &str, lines: &[LocksLine]) {
    let _ = writeln!(out, "{what}, by the thread that does it:");
    let _ = writeln!(
        out,
        "{:>8} {free:>10} {:>10} {:>7} {:>14} {:>14}",
        "threads",
        "mutex",
        "",
        format!("{free}/s"),
        "mutex/s"
    );
    for line in lines {
        let _ = writeln!(
            out,
            "{:>8} {:>7.0} ns {:>7.0} ns {:>+6.0}% {:>14.0} {:>14.0}",
            line.threads,
            line.ns,
            line.lock_ns,
            (line.ns / line.lock_ns - 1.0) * 100.0,
            line.ops_per_second,
            line.lock_ops_per_second
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_that_is_handed_over_is_done() {
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

    #[test]
    fn a_burst_ends_when_its_operations_are_done() {
        let done = Done::default();
        let sum = Mutex::new(());
        let act = |(): &mut (), operation| {
            let _one = sum.lock().unwrap();
            done.operation(operation);
        };
        let sums = bursts(4, Duration::ZERO, || (), act, |all| done.wait_for(all));
        assert_eq!(sums.operations, 4 * BURST);
        assert_eq!(done.sum.load(Ordering::Relaxed), 4 * BURST * (BURST - 1) / 2);
    }
}
