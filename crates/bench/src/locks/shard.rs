//! Handing operations to a shard: through the reactor's mailbox, and through a locked queue.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::task::{Poll, Waker};
use std::time::Duration;

use node::{Error, Kind};
use reactor::RuntimeConfig;
use reactor::mailbox::{Mailbox, Owner, Poster, Scheduled, mailbox};

use super::LocksPlan;
use super::bursts::{BURST, Sums, bursts};

/// Operations that the mailbox's owner does in a turn.
const TURN: usize = 64;
/// The operation that ends the owner.
const END: u64 = u64::MAX;

/// The operations that a shard's owner has done.
#[derive(Default)]
pub struct Applied {
    sum: AtomicU64,
    count: AtomicU64,
}

impl Applied {
    /// Does an operation. Called by the owner only: these atomics have one writer.
    pub fn apply(&self, operation: u64) {
        self.sum.store(self.sum.load(Ordering::Relaxed).wrapping_add(operation), Ordering::Relaxed);
        self.count.store(self.count.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// The sum of the operations.
    #[cfg(test)]
    pub fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }

    /// Waits until this number of operations is done.
    pub fn wait_for(&self, operations: u64) {
        while self.count.load(Ordering::Acquire) < operations {
            std::thread::yield_now();
        }
    }
}

/// The shard's mailbox and its owner's waker.
struct Shard {
    mailbox: Mailbox<u64>,
    waker: Waker,
}

impl Shard {
    fn hand_over(&self, poster: &mut Poster<u64>, operation: u64) {
        // The mailbox has room for every burst, and is open until the end.
        if let Ok(Scheduled::Yes) = poster.post(operation) {
            self.waker.wake_by_ref();
        }
    }
}

/// Bursts of operations through the mailbox of a core's task.
pub fn through_mailbox(plan: &LocksPlan, threads: usize, length: Duration) -> Result<Sums, Error> {
    let config = RuntimeConfig {
        processors: plan.processors[..1].to_vec(),
        memory: 1 << 20,
        poll: plan.poll,
        driver: plan.driver,
        ..RuntimeConfig::default()
    };
    let (shard, done) = (Arc::new(OnceLock::new()), Arc::new(Applied::default()));
    std::thread::scope(|scope| {
        let of_core = (shard.clone(), done.clone());
        let core = scope.spawn(move || {
            reactor::run(&config, move |_| {
                let (shard, done) = of_core.clone();
                async move { own_mailbox(&shard, &done).await }
            })
        });
        while shard.get().is_none() && !core.is_finished() {
            std::thread::yield_now();
        }
        let sums = shard.get().map(|shard: &Shard| {
            let enter = || shard.mailbox.poster();
            let act = |poster: &mut _, operation| shard.hand_over(poster, operation);
            let sums = bursts(threads, length, enter, act, |all| done.wait_for(all));
            shard.hand_over(&mut enter(), END);
            sums
        });
        let ended = core.join().map_err(|_| Error::new(Kind::System, "the core panicked"))?;
        ended.map_err(|error| Error::new(Kind::System, format!("cannot start a core: {error}")))?;
        sums.ok_or_else(|| Error::new(Kind::System, "the core did not start"))
    })
}

/// The owner's task; ends with [`END`].
async fn own_mailbox(shard: &OnceLock<Shard>, done: &Applied) {
    let (mailbox, mut owner): (_, Owner<u64>) = mailbox(BURST as usize);
    let mut ended = false;
    poll_fn(|cx| {
        // A task has one waker, so the first one stays valid.
        shard.get_or_init(|| Shard { mailbox: mailbox.clone(), waker: cx.waker().clone() });
        let scheduled = owner.take(TURN, &mut |operation| match operation {
            END => ended = true,
            _ => done.apply(operation),
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
    not_empty: Condvar,
}

impl LockedQueue {
    fn hand_over(&self, operation: u64) {
        let mut operations = self.operations.lock().unwrap_or_else(|e| e.into_inner());
        let first = operations.is_empty();
        operations.push_back(operation);
        drop(operations);
        if first {
            self.not_empty.notify_one();
        }
    }

    fn take(&self) -> u64 {
        let mut operations = self.operations.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            match operations.pop_front() {
                Some(operation) => return operation,
                None => {
                    operations = self.not_empty.wait(operations).unwrap_or_else(|e| e.into_inner());
                }
            }
        }
    }
}

/// Bursts of operations through a locked queue and its thread.
pub fn through_lock(threads: usize, length: Duration) -> Sums {
    let (queue, done) = (LockedQueue::default(), Applied::default());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                match queue.take() {
                    END => return,
                    operation => done.apply(operation),
                }
            }
        });
        let act = |(): &mut (), operation| queue.hand_over(operation);
        let sums = bursts(threads, length, || (), act, |all| done.wait_for(all));
        queue.hand_over(END);
        sums
    })
}
