//! What work in the background needs to write tables. It runs on a core that does not put writes in
//! order, where there is one.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use fs::Dir;
use memtable::Reserve;
use reactor::{Class, Core};
use rocksfmt::{Compression, FileName};

use crate::db::Db;
use crate::error::Result;
use crate::writer::Inner;

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

/// Runs a job on its core and waits for its end. The tables of one that fails are removed.
pub(crate) async fn run<R: Send + 'static, Fut: Future<Output = Result<R>> + 'static>(
    core: &Core,
    place: Place,
    db: &Db,
    compression: Compression,
    work: impl FnOnce(Job) -> Fut + Send + 'static,
) -> Result<R> {
    let there = (core.id() + place as usize) % core.cores();
    let db = db.clone();
    core.spawn_on(there, Class::Background, move |there| {
        let (core, dir) = (there.clone(), Dir::new(there, db.path()));
        let made = Made::default();
        let (own, mine) = (dir.clone(), made.clone());
        let done = work(Job { core, dir, db, compression, made });
        async move {
            let result = done.await;
            if result.is_err() {
                unmake(&own, mine.take().into_iter()).await;
            }
            result
        }
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

impl Db {
    /// A number that no file has.
    pub(crate) fn new_number(&self) -> u64 {
        self.0.next_file.fetch_add(1, Ordering::Relaxed)
    }

    /// Numbers from here on no file has.
    pub(crate) fn next_file(&self) -> u64 {
        self.0.next_file.load(Ordering::Relaxed)
    }
}
