//! What work in the background needs to write tables. It runs on a core that does not put writes in
//! order, where there is one.

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
use crate::write::writer::Inner;

/// See the module text.
pub(crate) struct Job {
    pub core: Core,
    pub dir: Dir,
    pub db: Db,
    pub compression: Compression,
    /// The tables it has made.
    pub made: Made,
}

/// Numbers of tables.
pub(crate) type Made = Rc<RefCell<Vec<u64>>>;

/// Removes tables that have come to nothing. What cannot be removed, the next opening removes.
pub(crate) async fn unmake(dir: &Dir, made: impl Iterator<Item = u64>) {
    for number in made {
        let name = FileName::Sst(number).to_string();
        if let Err(error) = dir.remove(&name).await {
            tracing::debug!("{name} could not be removed: {error}");
        }
    }
}

/// Entries between two looks at whether others want the core.
pub(crate) const ENTRIES_AT_ONCE: usize = 32;

/// Chunks of memory, of a megabyte each, that are kept touched for the memtables, and how many of
/// them: none where memtables are so small that their chunks are smaller.
const RESERVE: usize = 6;
const RESERVE_MEMTABLES_MIN: usize = 16 << 20;

/// Where a job runs, as seen from the core that puts writes in order: merges, which are the most
/// work, on the next core, flushes on the one behind that. With two cores that is the first again.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    Merge = 1,
    Flush = 2,
}

/// How often a job looks whether it is still wanted, in nanoseconds.
const LOOK_NS: u64 = 20_000_000;

/// Runs a job on its core and waits for its end. The tables of one that fails are removed.
///
/// `None`: it was given up, because writing has ended `grace_ns` ago. What a job waits for then, a
/// device or memory that others hold, does not keep the database open.
pub(crate) async fn run<R: Send + 'static, Fut: Future<Output = Result<R>> + 'static>(
    inner: &Inner,
    place: Place,
    grace_ns: u64,
    work: impl FnOnce(Job) -> Fut + Send + 'static,
) -> Result<Option<R>> {
    let core = &inner.core;
    let there = (core.id() + place as usize) % core.cores();
    let (db, compression) = (inner.db.clone(), inner.options.compression);
    let given_up = Arc::new(AtomicBool::new(false));
    let is_given_up = given_up.clone();
    let mut job = pin!(core.spawn_on(there, Class::Background, move |there| {
        let (core, dir) = (there.clone(), Dir::new(there, db.path()));
        let made = Made::default();
        let (own, mine, clock) = (dir.clone(), made.clone(), there.clone());
        let done = work(Job { core, dir, db, compression, made });
        async move {
            let result = while_wanted(&clock, &is_given_up, done).await;
            if !matches!(result, Some(Ok(_))) {
                unmake(&own, mine.take().into_iter()).await;
            }
            result.transpose()
        }
    }));
    let mut end = pin!(async {
        inner.moved.until(|| inner.rests()).await;
        core.sleep_ns(grace_ns).await;
    });
    poll_fn(|cx| {
        if !given_up.load(Ordering::Relaxed) && end.as_mut().poll(cx).is_ready() {
            given_up.store(true, Ordering::Relaxed);
        }
        job.as_mut().poll(cx)
    })
    .await
}

/// What comes of a job, unless it is given up before.
async fn while_wanted<R>(
    core: &Core,
    is_given_up: &AtomicBool,
    job: impl Future<Output = R>,
) -> Option<R> {
    let mut job = pin!(job);
    let mut look = core.sleep_ns(LOOK_NS);
    poll_fn(|cx| {
        if let Poll::Ready(result) = job.as_mut().poll(cx) {
            return Poll::Ready(Some(result));
        }
        while Pin::new(&mut look).poll(cx).is_ready() {
            if is_given_up.load(Ordering::Relaxed) {
                return Poll::Ready(None);
            }
            look = core.sleep_ns(LOOK_NS);
        }
        Poll::Pending
    })
    .await
}

/// Sees to it that there is memory for memtables that another core has touched. Called after every
/// group, so that nothing is kept where nothing is written.
pub(crate) fn fill_reserve(inner: &Rc<Inner>) {
    let core = &inner.core;
    if inner.reserve.borrow().len() >= RESERVE
        || inner.options.memtable_bytes < RESERVE_MEMTABLES_MIN
        || core.cores() == 1
        || inner.reserving.replace(true)
    {
        return;
    }
    let there = (core.id() + Place::Merge as usize) % core.cores();
    // A database that is closed meanwhile is not kept open, nor locked, by this.
    let (core, inner) = (core.clone(), Rc::downgrade(inner));
    core.clone().spawn(Class::Background, async move {
        let touched = core.spawn_on(there, Class::Background, |_| async { Reserve::chunk() });
        let touched = touched.await;
        if let Some(inner) = inner.upgrade() {
            inner.reserve.borrow_mut().append(touched);
            inner.reserving.set(false);
        }
    });
}
