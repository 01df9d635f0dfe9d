//! Where the cores of a measurement meet, before and after the window.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use lsm::Db;
use node::Error;
use reactor::Core;

/// How far ahead the start of the window is set.
const HEAD_START_NS: u64 = 5_000_000;
/// The pause between two polls for the other cores.
pub const POLL_NS: u64 = 1_000_000;

/// What the cores share besides the database.
#[derive(Default)]
pub struct Meeting {
    db: OnceLock<Result<(Db, f64), Error>>,
    /// The operations of a case that mixes them.
    workload: OnceLock<Arc<workload::Plan>>,
    ready: AtomicUsize,
    /// Start of the window in monotonic nanoseconds; 0 until it is set.
    from_ns: AtomicU64,
    done: AtomicUsize,
}

impl Meeting {
    /// Hands the database, and the seconds that its opening took, to all cores. Called once, by
    /// core 0.
    pub fn set_db(&self, opened: Result<(Db, f64), Error>) {
        let _ = self.db.set(opened);
    }

    /// Waits for the database.
    pub async fn db(&self, core: &Core) -> Result<(&Db, f64), Error> {
        loop {
            match self.db.get() {
                Some(Ok((db, seconds))) => return Ok((db, *seconds)),
                Some(Err(error)) => return Err(error.clone()),
                None => core.sleep_ns(POLL_NS).await,
            }
        }
    }

    /// Sets the operations of a case that mixes them. Called once, by core 0.
    pub fn set_workload(&self, plan: workload::Plan) {
        let _ = self.workload.set(Arc::new(plan));
    }

    /// The operations of a case that mixes them.
    pub fn workload(&self) -> Option<Arc<workload::Plan>> {
        self.workload.get().cloned()
    }

    /// Waits until every core is ready and the window starts; returns its start.
    pub async fn begin(&self, core: &Core) -> u64 {
        self.ready.fetch_add(1, Ordering::AcqRel);
        if core.id() == 0 {
            while self.ready.load(Ordering::Acquire) < core.cores() {
                core.sleep_ns(POLL_NS).await;
            }
            self.from_ns.store(core.now_exact_ns() + HEAD_START_NS, Ordering::Release);
        }
        let from_ns = loop {
            match self.from_ns.load(Ordering::Acquire) {
                0 => core.sleep_ns(POLL_NS).await,
                from_ns => break from_ns,
            }
        };
        core.sleep_ns(from_ns.saturating_sub(core.now_exact_ns())).await;
        from_ns
    }

    /// Waits until the tasks of every core are done.
    pub async fn end(&self, core: &Core) {
        self.done.fetch_add(1, Ordering::AcqRel);
        while self.done.load(Ordering::Acquire) < core.cores() {
            core.sleep_ns(POLL_NS).await;
        }
    }
}
