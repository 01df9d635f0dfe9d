//! Gets that the caller's own thread answers, without a hand-over to a core.
//!
//! 1. [`Near::get`] takes the readers of the database, while it is open. One exists for each core,
//!    because a key's blocks are in the cache of its core.
//! 2. The reader looks into the memtables and into that cache ([`lsm::SharedReader`]).
//! 3. If the answer needs a read of the disk, or is a rare case, the caller hands the get over as
//!    before (`engine.rs`). The core reads the block into its cache: the next get finds it.
//!
//! **Why a shared cache.** A get of a cached block takes less than 1 µs, a hand-over and the
//! wake-up of its task several. So the cache of an embedded database is the one thing that threads
//! share: the core fills it and counts its memory, threads read it under locks that nobody waits
//! for. Nodes keep the core's own cache, without locks and counts. Two caches of the same blocks
//! would halve what fits into the memory, and letting threads run the core's state machine would
//! put atomic counts into every buffer of a node. This module has no lock-free code of its own.
//!
//! **The end.** The first core calls [`Near::close`] before it closes the database, so that the
//! cores are the last to have its files. After a panic the thread that started the cores does. It
//! waits for the threads that are within a get, a few microseconds unless the system has stopped
//! one. So no thread holds the lock of the directory afterwards.
//!
//! **Fairness.** A task that always finds its answer would never return to its executor. So each
//! [`YIELD_EVERY`]th answer first lets other tasks run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use lsm::{CfId, SharedReader};

use crate::value::Value;

/// Answers of one counter after which a task yields.
const YIELD_EVERY: u64 = 128;
/// Counters, so that threads seldom write the same cache line.
const COUNTERS: usize = 16;

/// A counter with its own cache lines.
#[derive(Default)]
#[repr(align(128))]
struct Counter(AtomicU64);

/// The readers of an open database.
#[derive(Default)]
pub(crate) struct Near {
    /// By core; none before the opening and after the end.
    readers: ArcSwapOption<Vec<SharedReader>>,
    answered: [Counter; COUNTERS],
}

/// An answer.
pub(crate) struct Answer {
    pub value: Option<Value>,
    /// Other tasks should run before it is returned.
    pub yields: bool,
}

impl Near {
    /// The database is open.
    pub fn open(&self, readers: Vec<SharedReader>) {
        self.readers.store(Some(Arc::new(readers)));
    }

    /// Drops the database, after all threads that use it have left it. It may wait for them.
    pub fn close(&self) {
        let Some(readers) = self.readers.swap(None) else { return };
        while Arc::strong_count(&readers) > 1 {
            std::thread::yield_now();
        }
    }

    /// Forgets the database without releasing anything of it: in a forked child it is the parent's,
    /// with its lock.
    pub fn forget(&self) {
        std::mem::forget(self.readers.swap(None));
    }

    /// Looks a key up. `None`: a core must do it. `spread` is a number of the key.
    #[inline]
    pub fn get(&self, core: usize, family: CfId, key: &[u8], spread: u64) -> Option<Answer> {
        let readers = self.readers.load();
        let value = readers.as_ref()?.get(core)?.get(family, key, Value::copy)?;
        let counter = &self.answered[spread as usize % COUNTERS].0;
        let before = counter.fetch_add(1, Ordering::Relaxed);
        Some(Answer { value, yields: before % YIELD_EVERY == YIELD_EVERY - 1 })
    }

    /// The number of answers.
    pub fn answered(&self) -> u64 {
        self.answered.iter().map(|counter| counter.0.load(Ordering::Relaxed)).sum()
    }
}

/// Lets other tasks of the executor run.
pub(crate) async fn yield_now() {
    let mut polled = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut polled, true) {
            return std::task::Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}
