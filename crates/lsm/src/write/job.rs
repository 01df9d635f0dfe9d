//! Jobs: background work that writes tables. They run on other cores than the one that owns the
//! database, if there are any.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use fs::Dir;
use memtable::Reserve;
use reactor::{Class, Core};
use rocksfmt::{Compression, FileName};

use crate::db::Db;
use crate::error::Result;
use crate::write::pace::BusyTime;
use crate::write::state::WriteState;

/// What a job needs to write tables.
pub(crate) struct Job {
    pub core: Core,
    pub dir: Dir,
    pub db: Db,
    pub compression: Compression,
    /// The files that it has made.
    pub made: MadeFiles,
    /// The time that it has occupied its core.
    pub busy: BusyTime,
}

/// Tables and blob files.
pub(crate) type MadeFiles = Rc<RefCell<Vec<FileName>>>;

/// Removes the files of a failed job. Those that cannot be removed are left to the next opening.
pub(crate) async fn remove_made(dir: &Dir, made: impl Iterator<Item = FileName>) {
    for name in made.map(|file| file.to_string()) {
        if let Err(error) = dir.remove(&name).await {
            tracing::debug!("cannot remove {name}: {error}");
        }
    }
}

/// Entries between two checks whether other tasks want the core.
pub(crate) const ENTRIES_AT_ONCE: usize = 32;

/// Chunks of memory, of a megabyte each, that are kept in reserve for the memtables.
const RESERVE: usize = 6;
/// Smaller memtables have smaller chunks: nothing is kept in reserve for them.
const RESERVE_MEMTABLES_MIN: usize = 16 << 20;

/// The core of a job.
#[derive(Clone, Copy)]
pub(crate) enum JobCore {
    /// Merges are the most work: they begin at the core after the owner, one core for each that
    /// runs.
    Merge(usize),
    /// The core after that of the first merge. With two cores that is the owner.
    Flush,
}

impl JobCore {
    fn id(self, core: &Core) -> usize {
        let after = match self {
            JobCore::Merge(at) => 1 + at,
            JobCore::Flush => 2,
        };
        (core.id() + after) % core.cores()
    }
}

/// Interval at which a job polls whether it was cancelled, in nanoseconds. The owner is another
/// core, so an `Event` cannot tell it.
const CANCEL_POLL_NS: u64 = 20_000_000;

/// Runs a job on its core and waits for its end. The tables of a failed job are removed.
///
/// Returns `None` if the job was cancelled, because writing ended `grace_ns` ago. So a job that
/// waits for a device, or for memory that others hold, does not keep the database open.
pub(crate) async fn run<R: Send + 'static, Fut: Future<Output = Result<R>> + 'static>(
    state: &WriteState,
    place: JobCore,
    grace_ns: u64,
    work: impl FnOnce(Job) -> Fut + Send + 'static,
) -> Result<Option<R>> {
    run_unless(state, place, grace_ns, &|| false, work).await
}

/// The same. Also returns `None` once `is_unwanted`, after a notification of
/// [`WriteState::changed`].
pub(crate) async fn run_unless<R: Send + 'static, Fut: Future<Output = Result<R>> + 'static>(
    state: &WriteState,
    place: JobCore,
    grace_ns: u64,
    is_unwanted: &dyn Fn() -> bool,
    work: impl FnOnce(Job) -> Fut + Send + 'static,
) -> Result<Option<R>> {
    let core = &state.core;
    let there = place.id(core);
    let (db, compression) = (state.db.clone(), state.options.compression);
    let cancelled = Arc::new(AtomicBool::new(false));
    let is_cancelled = cancelled.clone();
    let mut job = pin!(core.spawn_on(there, Class::Background, move |there| {
        let (core, dir) = (there.clone(), Dir::new(there, db.path()));
        let (made, busy) = (MadeFiles::default(), BusyTime::default());
        let (own, mine, clock) = (dir.clone(), made.clone(), there.clone());
        let done = work(Job { core, dir, db, compression, made, busy: busy.clone() });
        async move {
            let result = unless_cancelled(&clock, &is_cancelled, &busy, done).await;
            if !matches!(result, Some(Ok(_))) {
                remove_made(&own, mine.take().into_iter()).await;
            }
            result.transpose()
        }
    }));
    let mut end = pin!(async {
        state.changed.wait_until(|| state.is_ending() || is_unwanted()).await;
        core.sleep_ns(grace_ns).await;
    });
    poll_fn(|cx| {
        if !cancelled.load(Ordering::Relaxed) && end.as_mut().poll(cx).is_ready() {
            cancelled.store(true, Ordering::Relaxed);
        }
        job.as_mut().poll(cx)
    })
    .await
}

/// The result of a job, unless it is cancelled before. Counts the time that it takes.
async fn unless_cancelled<R>(
    core: &Core,
    is_cancelled: &AtomicBool,
    busy: &BusyTime,
    job: impl Future<Output = R>,
) -> Option<R> {
    let mut job = pin!(job);
    let mut poll = core.sleep_ns(CANCEL_POLL_NS);
    poll_fn(|cx| {
        let since_ns = core.now_exact_ns();
        let polled = job.as_mut().poll(cx);
        busy.set(busy.get() + core.now_exact_ns().saturating_sub(since_ns));
        if let Poll::Ready(result) = polled {
            return Poll::Ready(Some(result));
        }
        while Pin::new(&mut poll).poll(cx).is_ready() {
            if is_cancelled.load(Ordering::Relaxed) {
                return Poll::Ready(None);
            }
            poll = core.sleep_ns(CANCEL_POLL_NS);
        }
        Poll::Pending
    })
    .await
}

/// Has another core touch memory for memtables, if the reserve is low. Called after every group, so
/// that an idle database keeps no reserve.
pub(crate) fn fill_reserve(state: &Rc<WriteState>) {
    let core = &state.core;
    if state.reserve.chunks.borrow().len() >= RESERVE
        || state.options.memtable_bytes < RESERVE_MEMTABLES_MIN
        || core.cores() == 1
        || state.reserve.filling.replace(true)
    {
        return;
    }
    let there = JobCore::Merge(0).id(core);
    // A weak reference: this must not keep a closed database open or locked.
    let (core, state) = (core.clone(), Rc::downgrade(state));
    core.clone().spawn(Class::Background, async move {
        let touched = core.spawn_on(there, Class::Background, |_| async { Reserve::chunk() });
        let touched = touched.await;
        if let Some(state) = state.upgrade() {
            state.reserve.chunks.borrow_mut().append(touched);
            state.reserve.filling.set(false);
        }
    });
}
