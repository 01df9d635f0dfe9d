//! One core's access to a database: its view, its channel to every file, its cache.
//!
//! A block is taken from the core's cache, else from a flight in progress, else read through the
//! core's own ring. Cores share only data that never changes (tables, indexes, filters), so two
//! reading cores share no cache line that either writes.

use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

use reactor::{Class, Core};

use crate::db::{CfId, Db};
use crate::error::{Kind, Result};
use crate::read::iter::{Iter, IterOptions};
use crate::read::point;
use crate::read::shared::SharedReader;
use crate::read::snapshot::{Registry, Snapshot};
use crate::read::state::{ReadContext, ReaderState};
use crate::read::stats::ReaderStats;
use crate::read::stretch::{self, Stretch};
use crate::read::value::{Place, Value};
use crate::read::warm;
use crate::version::Version;

/// One core's handle on a database. Clones are the same reader.
#[derive(Clone)]
pub struct Reader(pub(crate) Rc<ReaderState>);

impl Reader {
    pub(crate) fn new(db: &Db, core: &Core) -> Reader {
        Reader(ReaderState::new(db, core, db.options().cache_bytes))
    }

    /// A reader without a cache, for background work.
    pub(crate) fn uncached(db: &Db, core: &Core) -> Reader {
        Reader(ReaderState::new(db, core, 0))
    }

    /// The reader with a version that need not be the newest.
    pub(crate) fn context_at(&self, version: &Arc<Version>) -> ReadContext {
        self.0.context_at(version)
    }

    /// A future that renews the view whenever the writer has published a version, also while nobody
    /// reads. It ends at the first change after the last handle on this reader is gone.
    pub(crate) fn keep_view_new(&self) -> impl Future<Output = ()> + use<> {
        let (reader, db) = (Rc::downgrade(&self.0), Arc::downgrade(&self.0.db.0));
        let mut registered = false;
        std::future::poll_fn(move |cx| {
            let Some(db) = db.upgrade() else { return Poll::Ready(()) };
            let mine = cx.waker();
            let Some(state) = reader.upgrade() else {
                let others = |all: &Arc<Vec<Waker>>| -> Vec<Waker> {
                    all.iter().filter(|other| !other.will_wake(mine)).cloned().collect()
                };
                db.renewals.rcu(others);
                return Poll::Ready(());
            };
            drop(state.context());
            if !std::mem::replace(&mut registered, true) {
                db.renewals.rcu(|all| all.iter().chain([mine]).cloned().collect::<Vec<_>>());
            }
            Poll::Pending
        })
    }

    /// The core it reads through.
    pub fn core(&self) -> &Core {
        &self.0.core
    }

    /// The database.
    pub fn db(&self) -> &Db {
        &self.0.db
    }

    /// Creates an iterator over a column family, on no entry.
    ///
    /// # Errors
    /// The family is unknown or cannot be served.
    pub fn iter(&self, family: CfId, options: IterOptions) -> Result<Iter> {
        let (context, sequence) = self.now(options.snapshot)?;
        Iter::new(context, sequence, family, options)
    }

    /// Takes a snapshot of the state that is visible now.
    ///
    /// # Errors
    /// [`Kind::Expired`] if too many snapshots are held.
    pub fn snapshot(&self) -> Result<Snapshot> {
        Registry::take(&self.0.snapshots)
    }

    /// The sequence number to read at, and a view with everything visible at it.
    ///
    /// The view contains everything that was visible before it was taken. It also keeps entries
    /// that are visible now and that a later flush or merge drops because newer versions hide them.
    /// So sequence and view match if no version was published between taking the two.
    #[inline]
    pub(crate) fn now(&self, snapshot: Option<&Snapshot>) -> Result<(ReadContext, u64)> {
        loop {
            let context = self.0.context();
            if let Some(snapshot) = snapshot {
                // Nothing that a snapshot sees is dropped while it is held.
                return Ok((context, snapshot.sequence()?));
            }
            let sequence = self.0.db.visible();
            if context.view.version.epoch == self.0.db.0.epoch.load(Ordering::Acquire) {
                return Ok((context, sequence));
            }
        }
    }

    /// Estimates a family's live keys from the files' own counts.
    ///
    /// # Errors
    /// The family is unknown or cannot be served.
    pub fn approximate_keys(&self, family: CfId) -> Result<u64> {
        let version = &self.0.context().view.version;
        Ok(version.family(family)?.estimated_keys(version))
    }

    /// Counters since the reader was created.
    pub fn stats(&self) -> ReaderStats {
        self.0.stats()
    }

    /// Looks up a key; suspends for each block that is not in memory. `None`: no such key.
    ///
    /// # Errors
    /// Damage, a failing device, or a kind of value that cannot be served; see [`Kind`].
    pub async fn get(
        &self,
        family: CfId,
        key: &[u8],
        snapshot: Option<&Snapshot>,
    ) -> Result<Option<Value>> {
        let (context, sequence) = self.now(snapshot)?;
        point::get(&context, family, key, sequence).await
    }

    /// As [`Reader::get`], with the sequence number of the entry that gives the value: of the
    /// newest operand, if it is merged; 0 if a merge has dropped it (see
    /// [`Db::keep_sequences`]).
    ///
    /// # Errors
    /// Those of [`Reader::get`].
    pub async fn get_numbered(
        &self,
        family: CfId,
        key: &[u8],
        snapshot: Option<&Snapshot>,
    ) -> Result<Option<(Value, u64)>> {
        let (context, sequence) = self.now(snapshot)?;
        point::get_numbered(&context, family, key, sequence).await
    }

    /// Looks up a key in memory only. `None`: a block must be read.
    pub fn get_cached(&self, family: CfId, key: &[u8]) -> Option<Result<Option<Value>>> {
        match self.now(None) {
            Ok((context, sequence)) => point::get_cached(&context, family, key, sequence),
            Err(error) => Some(Err(error)),
        }
    }

    /// What other threads need to look up keys in memory. `None` without
    /// [`OpenOptions::shared_cache`](crate::OpenOptions::shared_cache).
    pub fn shared(&self) -> Option<SharedReader> {
        self.0.shared_blocks().map(|blocks| SharedReader::new(&self.0.db, blocks))
    }

    /// Brings what [`Reader::get_cached`] of these keys will read into the processor's caches: the
    /// lookups of several keys overlap their waits for memory. For keys that are looked up next, of
    /// which the first [`WARM_MAX`](crate::WARM_MAX) count. Answers nothing, and changes no answer.
    pub fn warm(&self, family: CfId, keys: &[&[u8]]) {
        if let Ok((context, sequence)) = self.now(None) {
            warm::warm(&context, family, keys, sequence);
        }
    }

    /// Looks up many keys: all filters first, then all needed blocks at once. The answers are in
    /// the order of the keys. Suspends as [`Reader::get`] does.
    pub async fn multi_get(
        &self,
        family: CfId,
        keys: &[&[u8]],
        snapshot: Option<&Snapshot>,
    ) -> Vec<Result<Option<Value>>> {
        match self.now(snapshot) {
            Ok((context, sequence)) => point::multi_get(&context, family, keys, sequence).await,
            Err(error) => keys.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    /// Where the values of keys are in blob files; these are not read. `None`: the key has no
    /// value, or it is elsewhere, or compressed. Suspends as [`Reader::multi_get`] does.
    pub async fn places(
        &self,
        family: CfId,
        keys: &[&[u8]],
        snapshot: Option<&Snapshot>,
    ) -> Vec<Result<Option<Place>>> {
        match self.now(snapshot) {
            Ok((context, sequence)) => point::places(&context, family, keys, sequence).await,
            Err(error) => keys.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    /// Reads the records that begin in `bytes` bytes of a blob file from the offset `from` on, with
    /// one large read that leaves the cache alone. They may be of values that were overwritten, or
    /// not records at all: the caller compares them with [`Reader::places`]. Records of more than
    /// [`STRETCH_RECORD_BYTES_MAX`](crate::STRETCH_RECORD_BYTES_MAX) are left out. `None`: there is
    /// no such file, or nothing there.
    ///
    /// # Errors
    /// A failing device, or no memory.
    pub async fn stretch(
        &self,
        family: CfId,
        file: u64,
        from: u64,
        bytes: usize,
    ) -> Result<Option<Stretch>> {
        let (context, _) = self.now(None)?;
        stretch::read(&context, family, file, from, bytes).await
    }

    /// The number of the blob file that was written after another, if there is one. Several cores
    /// write files of their own at the same time.
    ///
    /// # Errors
    /// There is no such family.
    pub fn next_blob_file(&self, family: CfId, file: u64) -> Result<Option<u64>> {
        let (context, _) = self.now(None)?;
        let blobs = &context.view.version.family(family)?.blobs;
        let next = blobs.partition_point(|(number, _)| *number <= file);
        Ok(blobs.get(next).map(|(number, _)| *number))
    }

    /// Which of many keys exist: as [`Reader::multi_get`], but a value in a blob file or in an
    /// uncompressed block need not fit into memory.
    pub async fn contains(&self, family: CfId, keys: &[&[u8]]) -> Vec<Result<bool>> {
        let (context, sequence) = match self.now(None) {
            Ok(now) => now,
            Err(error) => return keys.iter().map(|_| Err(error.clone())).collect(),
        };
        let mut answers = Vec::with_capacity(keys.len());
        let found = point::multi_get(&context, family, keys, sequence).await;
        for (key, found) in keys.iter().zip(found) {
            answers.push(match found {
                Err(error) if error.kind() == Kind::Memory => {
                    point::contains(&context, family, key, sequence).await
                }
                found => found.map(|value| value.is_some()),
            });
        }
        answers
    }
}

impl Db {
    /// A reader for one core, with a cache of its own. A task of the core renews its view while the
    /// core does not read: an old view would hold memtables and deleted files.
    pub fn attach(&self, core: &Core) -> Reader {
        let reader = Reader::new(self, core);
        core.spawn(Class::Background, reader.keep_view_new());
        reader
    }
}
