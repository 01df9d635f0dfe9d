//! Writing to a database. One core owns it and puts all batches in order.
//!
//! 1. [`Writer::write`] puts a batch into the queue. The commit task takes what has gathered as one
//!    group, gives each batch its sequence numbers, writes the group to the log and, as the
//!    durability asks, flushes it. Meanwhile the next group gathers.
//! 2. Then the group goes into the memtables, its last sequence is published, and every batch of it
//!    is acknowledged: readers on all cores see whole batches, in order.
//! 3. When the memtables have grown to their limit, new ones and a new log take their place, and
//!    the flush task (`flush.rs`) writes the old ones to tables of level 0. When two generations of
//!    memtables wait for that, so do writes.
//!
//! What must hold: a batch is acknowledged after its group is in the log as promised; the MANIFEST
//! is durable before a log that it makes needless is removed; a failed write to log or MANIFEST
//! ends all writing until the database is opened again, because nobody knows what is there. Both
//! get their room on the disk before they are written, so a full disk is met earlier (`space.rs`).

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

use fs::{Dir, File};
use memtable::Reserve;
use reactor::{Class, Core, DirEntry};
use rocksfmt::{
    BatchWriter, FileMeta, FileName, LOG_BLOCK_BYTES, ManifestReplay, Op, VersionEdit, WriteBatch,
    is_recyclable_log,
};

use crate::db::CfId;
use crate::db::Db;
use crate::durability::Durability;
use crate::error::{Error, Kind, Result};
use crate::mem::Mem;
use crate::options::WriteOptions;
use crate::recycled_tables::recycled_bytes_max;
use crate::version::Version;
use crate::write::commit;
use crate::write::compaction;
use crate::write::flush;
use crate::write::manifest_writer::ManifestWriter;
use crate::write::pace::Pace;
use crate::write::quarantine::Quarantine;
use crate::write::space::{Space, Task, Untold};
use crate::write::wal_writer::WalWriter;

/// Counters of a writer since the opening, and how things stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriterStats {
    /// Groups written to the log.
    pub groups: u64,
    /// Batches in them.
    pub batches: u64,
    /// Bytes of these batches.
    pub batch_bytes: u64,
    /// Bytes written to logs, what fills blocks included.
    pub log_bytes: u64,
    /// Logs begun.
    pub logs: u64,
    /// Memtables written to tables, and the bytes of these tables.
    pub flushed_tables: u64,
    /// See `flushed_tables`.
    pub flushed_bytes: u64,
    /// Merges of level 0 into level 1.
    pub merges: u64,
    /// Bytes of the tables merged.
    pub merged_bytes: u64,
    /// Bytes of the tables that came out.
    pub merged_into_bytes: u64,
    /// Tables written over old ones that nobody needed any more.
    pub rewritten_tables: u64,
    /// Nanoseconds that writes were held back so that merging keeps up.
    pub slowed_ns: u64,
    /// Nanoseconds that writes stood still: too many memtables or files of level 0.
    pub stopped_ns: u64,
    /// Bytes of memory that memtables hold now.
    pub memtable_bytes: u64,
    /// Generations of memtables that wait for their tables.
    pub waiting_memtables: u64,
    /// Files of level 0 of the family that has most.
    pub level0_files: u64,
    /// Tables that merges leave alone, because they are damaged.
    pub damaged_tables: u64,
    /// 1 while something waits for space on the disk.
    pub disk_full: u64,
    /// Times that this began.
    pub disk_full_times: u64,
    /// Requests refused meanwhile, or while no table could be written.
    pub refused: u64,
    /// Flushes and merges that failed for another reason than a full disk, and were tried again.
    pub table_failures: u64,
    /// 1 while one of these has not succeeded since.
    pub tables_failing: u64,
}

/// Logs that are kept to be written again, with the one that only a clearing may take.
const SPARE_LOGS: usize = 3;
/// After a removal so many times as long is rest.
const REMOVAL_REST: u64 = 3;
/// Longest rest, in nanoseconds.
const REMOVAL_REST_MAX_NS: u64 = 500_000_000;
/// Files to be removed at which there is none: disks are finite.
const DOOMED_MANY: usize = 64;
/// Files of level 0 at which flushes and merges go as fast as they can; at 16 writes are slowed
/// down.
const LEVEL0_FILES_HURRY: usize = 14;
/// Pause after a flush or a merge that found no memory, in nanoseconds.
const MEMORY_PAUSE_NS: u64 = 100_000_000;
/// Largest batch in bytes.
const BATCH_BYTES_MAX: usize = 256 << 20;
// Its value is read back as a block, which holds a little more.
const _: () = assert!(BATCH_BYTES_MAX + 4096 <= crate::table::BLOCK_BYTES_MAX);

/// A file that is to go, and its length where it may be kept as a spare.
struct Doomed {
    file: FileName,
    keep_bytes: Option<u64>,
}

/// Something to be done in its order.
pub(crate) enum Request {
    Batch {
        batch: BatchWriter,
        /// By how many it changes the number of keys, if that is known.
        keys: Option<i64>,
    },
    /// Everything of a column family goes.
    Clear(u32),
    /// What was written before is to survive a power cut.
    Sync,
}

/// A request, and who waits for it.
pub(crate) struct Pending {
    pub request: Request,
    pub done: Rc<Done>,
}

impl Pending {
    /// The column family that it clears, if it does.
    pub fn clears(&self) -> Option<u32> {
        match self.request {
            Request::Clear(family) => Some(family),
            Request::Batch { .. } | Request::Sync => None,
        }
    }
}

/// What became of a batch: its last sequence.
#[derive(Default)]
pub(crate) struct Done {
    result: RefCell<Option<Result<u64>>>,
    waker: Cell<Option<Waker>>,
    /// There is no room for it.
    untold: Cell<Option<Untold>>,
}

impl Done {
    pub fn refuse(&self, error: Error, untold: Untold) {
        self.untold.set(Some(untold));
        self.set(Err(error));
    }

    pub fn set(&self, result: Result<u64>) {
        self.result.replace(Some(result));
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// A batch that was handed over: ends when it is as durable as was asked for and visible, with the
/// sequence number of its last operation, or with what went wrong. It may be dropped.
pub struct Written(Rc<Done>);

impl Future for Written {
    type Output = Result<u64>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<u64>> {
        match self.0.result.take() {
            Some(result) => {
                drop(self.0.untold.take());
                Poll::Ready(result)
            }
            None => {
                self.0.waker.set(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}

/// Lets one task sleep until another has something for it.
#[derive(Default)]
pub(crate) struct Signal(RefCell<Vec<Waker>>);

impl Signal {
    pub fn ring(&self) {
        for waker in self.0.take() {
            waker.wake();
        }
    }

    /// Waits until `ready` holds; asked anew after every ring.
    pub async fn until(&self, ready: impl Fn() -> bool) {
        poll_fn(|cx| {
            if ready() {
                return Poll::Ready(());
            }
            self.0.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// Memtables that are to become tables, their log, and the first log that is not theirs.
pub(crate) struct Generation {
    pub mems: Vec<(u32, Arc<Mem>)>,
    /// `None` for what was recovered: from all logs there were.
    pub log_number: Option<u64>,
    /// By how many they change the number of keys, if that is known.
    pub keys: Option<i64>,
    /// Where it is not known to be durable.
    pub log: Option<File>,
    pub next_log: u64,
    /// The last sequence before that log.
    pub last_sequence: u64,
}

pub(crate) struct Inner {
    pub core: Core,
    pub dir: Dir,
    pub db: Db,
    pub options: WriteOptions,
    pub queue: RefCell<VecDeque<Pending>>,
    /// Rings when something has come into the queue.
    pub queued: Signal,
    pub waiting: RefCell<VecDeque<Generation>>,
    /// Generations that have become tables.
    pub gone: Cell<u64>,
    /// Rings when a generation has come, and when one has gone.
    pub moved: Signal,
    next_epoch: Cell<u64>,
    /// The first logs of column families that were cleared.
    pub cleared: RefCell<BTreeMap<u32, u64>>,
    /// The number of keys of the default column family without what is in memtables.
    pub keys_in_tables: Cell<Option<u64>>,
    /// Away while somebody changes it.
    manifest: RefCell<Option<ManifestWriter>>,
    manifest_back: Signal,
    /// How long the memtables took to fill that were filled last, and when that was, in
    /// nanoseconds.
    pub fill_ns: Cell<u64>,
    pub filled_at_ns: Cell<u64>,
    /// Memory for memtables that was touched by another core.
    pub reserve: RefCell<Reserve>,
    /// More of it is on its way.
    pub reserving: Cell<bool>,
    pub flush_pace: Arc<Pace>,
    pub merge_pace: Arc<Pace>,
    /// How far the merge is that is under way.
    pub progress: RefCell<Option<compaction::Progress>>,
    /// Tables that merges leave alone.
    pub quarantine: Quarantine,
    /// Files that are needed no more.
    doomed: RefCell<VecDeque<Doomed>>,
    /// Logs that are needed no more, as temporary files of these numbers.
    pub spare_logs: RefCell<Vec<u64>>,
    stats: Cell<WriterStats>,
    pub space: Space,
    /// What ended all writing.
    pub failed: RefCell<Option<Error>>,
    pub closing: Cell<bool>,
    /// The commit task runs: what was handed over may still need room in memory and in level 0.
    pub committing: Cell<bool>,
    /// Files of level 0 that one merge may take: fewer after one that lacked memory.
    pub merge_files_max: Cell<usize>,
    /// Tasks that are still at work.
    working: Cell<usize>,
    ended: Signal,
}

/// The one who may change the MANIFEST. Nobody else adds or removes tables meanwhile.
pub(crate) struct ManifestTurn<'a> {
    inner: &'a Inner,
    manifest: Option<ManifestWriter>,
}

impl ManifestTurn<'_> {
    /// Makes a change durable, one edit for each column family, and shows it to all who begin to
    /// read from then on. Suspends for the disk.
    pub async fn change(
        mut self,
        edits: Vec<VersionEdit>,
        apply: impl FnOnce(&mut Version),
    ) -> Result<()> {
        let Some(manifest) = &mut self.manifest else {
            unreachable!("a turn has the manifest until it ends")
        };
        let families: Vec<u32> = edits.iter().map(|edit| edit.column_family).collect();
        manifest.append(&self.inner.db, edits).await?;
        let mut dead = Vec::new();
        self.inner.db.publish(|version| {
            apply(version);
            let mut changed = version.families.iter_mut();
            while let Some(family) = changed.find(|family| families.contains(&family.id)) {
                if family.blobs.is_empty() {
                    continue;
                }
                let live = manifest.state().live_blob_files(family.id);
                family.blobs.retain(|(number, _)| {
                    let is_live = live.iter().any(|blob| blob.number == *number);
                    if !is_live {
                        dead.push(FileName::Blob(*number));
                    }
                    is_live
                });
            }
        });
        dead.extend(manifest.take_replaced().into_iter().map(FileName::Manifest));
        self.inner.remove_files(dead);
        Ok(())
    }

    /// What the MANIFEST says now.
    pub fn state(&self) -> &ManifestReplay {
        match &self.manifest {
            Some(manifest) => manifest.state(),
            None => unreachable!("a turn has the manifest until it ends"),
        }
    }
}

impl Drop for ManifestTurn<'_> {
    fn drop(&mut self) {
        self.inner.manifest.replace(self.manifest.take());
        self.inner.manifest_back.ring();
    }
}

/// Flushes the logs that were recovered from. A group that was written and not flushed when its
/// process was killed is read from now on; a power cut must not take it back.
async fn sync_logs(core: &Core, dir: &Dir, logs: &[u64]) -> Result<()> {
    for &number in logs {
        let name = FileName::Wal(number).to_string();
        let io = |e: std::io::Error| Error::io(&name, &e);
        // Only to read: it may be a link.
        let file = dir.open(&name).await.map_err(io)?;
        core.attach(&file).sync_data().await.map_err(io)?;
    }
    Ok(())
}

/// Whether a log has records that say which log they belong to, so that they are not taken for
/// those of a log that is written over it. Suspends for the disk.
pub(crate) async fn may_be_written_over(
    core: &Core,
    dir: &Dir,
    name: &str,
) -> std::io::Result<bool> {
    let file = core.attach(&dir.open(name).await?);
    let len = file.size().min(LOG_BLOCK_BYTES as u64) as usize;
    Ok(len > 0 && is_recyclable_log(&fs::read(&file, 0, len).await?))
}

impl Inner {
    /// The number of the next flush: a newer file of level 0 has a larger one.
    pub fn new_epoch(&self) -> u64 {
        let epoch = self.next_epoch.get();
        self.next_epoch.set(epoch + 1);
        epoch
    }

    /// Counts.
    pub fn stats(&self, change: impl FnOnce(&mut WriterStats)) {
        let mut stats = self.stats.get();
        change(&mut stats);
        self.stats.set(stats);
    }

    /// Waits until nobody else changes the MANIFEST.
    pub async fn manifest_turn(&self) -> Result<ManifestTurn<'_>> {
        self.manifest_back.until(|| self.manifest.borrow().is_some()).await;
        if let Some(error) = &*self.failed.borrow() {
            return Err(error.clone());
        }
        Ok(ManifestTurn { inner: self, manifest: self.manifest.take() })
    }

    /// Makes durable which files there are.
    pub async fn sync_names(&self) -> Result<()> {
        let synced = self.dir.sync().await;
        // Of names whose flush has failed nobody knows whether a second one would cover them.
        synced.map_err(|e| Error::io(self.dir.path().display(), &e).for_good())
    }

    /// Removes tables that the MANIFEST does not name any more, or keeps them to be written again.
    /// Whoever reads them still has them open.
    pub fn remove_tables<'a>(&self, metas: impl Iterator<Item = &'a FileMeta>) {
        let doomed = metas.map(|meta| Doomed {
            file: FileName::Sst(meta.number),
            keep_bytes: Some(meta.size_bytes),
        });
        self.doomed.borrow_mut().extend(doomed);
        self.moved.ring();
    }

    /// Removes files that are needed no more: MANIFESTs that CURRENT does not name, blob files that
    /// the MANIFEST does not keep, tables that it has never named. Whoever reads them still has
    /// them open.
    pub fn remove_files(&self, files: Vec<FileName>) {
        let doomed = |file| Doomed { file, keep_bytes: None };
        self.doomed.borrow_mut().extend(files.into_iter().map(doomed));
        self.moved.ring();
    }
    /// Makes spares of files, or removes them, one after the other until writing ends. A device may
    /// stand still while it is told of the blocks that are free (50 ms for 64 MiB were measured),
    /// so it gets time for other things in between, unless there is much to remove. What is
    /// left lying, in a crash or after an error, the next opening takes care of.
    async fn remove_doomed(&self) {
        let spares = &self.db.0.recycled_tables;
        loop {
            let ends = || self.closing.get() || self.has_failed();
            // On a full disk nothing is kept that is not needed.
            let gives_up = || self.space.is_short() && !spares.is_empty();
            self.moved.until(|| !self.doomed.borrow().is_empty() || gives_up() || ends()).await;
            let limit = match self.space.is_short() {
                true => 0,
                false => recycled_bytes_max(&self.db.0.current.load()),
            };
            let doomed = self.doomed.borrow_mut().pop_front();
            if doomed.is_none() && !gives_up() {
                return;
            }
            let mut name = doomed.as_ref().map(|doomed| doomed.file.to_string());
            if let Some(Doomed { file: FileName::Sst(number), keep_bytes: Some(bytes) }) = doomed
                && spares.have_room(bytes, limit)
                && let Some(table) = &name
            {
                match self.dir.rename(table, &FileName::Temp(number).to_string()).await {
                    Ok(()) => spares.put(number, bytes),
                    Err(error) => tracing::warn!("{table} could not be renamed: {error}"),
                }
                name = None;
            }
            while let Some(name) = name.take().or_else(|| spares.take_beyond(limit)) {
                self.remove_and_rest(&name).await;
            }
        }
    }

    async fn remove(&self, name: &str) {
        if let Err(error) = self.dir.remove(name).await {
            tracing::warn!("{name} could not be removed: {error}");
        }
        self.space.has_grown();
    }

    async fn remove_and_rest(&self, name: &str) {
        let since_ns = self.core.now_ns();
        self.remove(name).await;
        let ends = self.closing.get() || self.has_failed();
        if self.doomed.borrow().len() < DOOMED_MANY && !ends {
            let ns = self.core.now_ns() - since_ns;
            self.core.sleep_ns((ns * REMOVAL_REST).min(REMOVAL_REST_MAX_NS)).await;
        }
    }

    /// Keeps a few of the logs that the MANIFEST has made needless, to be written again, and
    /// removes the others. What cannot be removed, the next opening removes.
    ///
    /// A kept one is a log no more: who repairs the directory takes all logs for writes that are in
    /// no table, and RocksDB's repair then finds each of them twice and drops the tables.
    pub async fn log_is_old(&self, generation: &Generation) {
        let others = match generation.log_number {
            Some(number) if self.spare_logs.borrow().len() < SPARE_LOGS => {
                self.keep_log(number).await;
                Vec::new()
            }
            Some(number) => vec![FileName::Wal(number)],
            None => self.keep_logs(generation.next_log).await,
        };
        self.remove_files(others);
    }

    /// The same at once, of all logs below a number, which the MANIFEST has made needless.
    pub async fn remove_logs(&self, below: u64) {
        for file in self.keep_logs(below).await {
            self.remove(&file.to_string()).await;
        }
    }

    /// Removes all that is kept to be written again, at once: there is no room.
    pub async fn remove_spares(&self) {
        let spares = &self.db.0.recycled_tables;
        while let Some(name) = spares.take_beyond(0) {
            self.remove(&name).await;
        }
        for number in self.spare_logs.take() {
            self.remove(&FileName::Temp(number).to_string()).await;
        }
    }

    /// Keeps a log, under the name of a temporary file.
    async fn keep_log(&self, number: u64) {
        let log = FileName::Wal(number);
        match self.dir.rename(&log.to_string(), &FileName::Temp(number).to_string()).await {
            Ok(()) => self.spare_logs.borrow_mut().push(number),
            Err(error) => {
                tracing::warn!("{log} could not be renamed: {error}");
                self.remove_files(vec![log]);
            }
        }
    }

    /// Keeps a few of the logs below a number, which nobody needs, and of those that were kept
    /// before. Returns the others.
    async fn keep_logs(&self, below: u64) -> Vec<FileName> {
        // One of these may get another name while the rest is looked at.
        let kept = self.spare_logs.borrow().clone();
        let listed = self.dir.list().await.unwrap_or_else(|error| {
            let path = self.dir.path().display();
            tracing::warn!("{path}: old logs stay until the next opening: {error}");
            Vec::new()
        });
        let mut others = Vec::new();
        for DirEntry { name, size, .. } in listed {
            let wanted = self.spare_logs.borrow().len() < SPARE_LOGS
                && size <= 2 * commit::log_room(&self.options);
            let fits =
                async || may_be_written_over(&self.core, &self.dir, &name).await.unwrap_or(false);
            match FileName::parse(&name) {
                Some(FileName::Wal(number)) if number < below => {
                    if wanted && fits().await {
                        self.keep_log(number).await;
                    } else {
                        others.push(FileName::Wal(number));
                    }
                }
                // Others are tables, which are kept or removed elsewhere.
                Some(file @ FileName::Temp(number))
                    if !kept.contains(&number)
                        && !self.db.0.recycled_tables.has(number)
                        && fits().await =>
                {
                    match wanted {
                        true => self.spare_logs.borrow_mut().push(number),
                        false => others.push(file),
                    }
                }
                _ => {}
            }
        }
        others
    }

    /// The first log after an opening. One that an earlier process kept for clearings is left for
    /// them, if the disk has room for another one.
    pub async fn first_log(&self) -> Result<WalWriter> {
        match commit::new_log(self, 1).await {
            Err(error) if error.kind() == Kind::Full => commit::new_log(self, 0).await,
            done => done,
        }
    }

    /// Says how fast the flush and the merge are to go that are under way, as things stand now;
    /// see `pace.rs`.
    pub fn set_paces(&self) {
        let fill_ns = self.fill_ns.get();
        let files = commit::level0_files(self);
        let hurry = fill_ns == 0
            || files >= LEVEL0_FILES_HURRY
            || self.waiting.borrow().len() > 1
            || self.closing.get()
            || self.has_failed();
        if hurry {
            self.flush_pace.hurry();
            self.merge_pace.hurry();
            return;
        }
        self.flush_pace.set(self.options.memtable_bytes as u64, fill_ns / 2);
        if let Some(progress) = &*self.progress.borrow() {
            let fills = (LEVEL0_FILES_HURRY - files) as u64;
            self.merge_pace.set(progress.left(), fill_ns.saturating_mul(fills));
        }
    }

    /// Refuses what there is no room for, and all that was handed over behind it.
    pub fn refuse(&self, first: &mut Vec<Pending>, error: &Error) {
        let all: Vec<Pending> = first.drain(..).chain(self.queue.take()).collect();
        for pending in all {
            pending.done.refuse(error.clone(), self.space.refuse());
        }
    }

    /// Ends all writing.
    pub fn fail(&self, error: &Error) {
        let error = &error.clone().for_good();
        tracing::error!("{}: writing ends: {error}", self.dir.path().display());
        self.failed.borrow_mut().get_or_insert_with(|| error.clone());
        for pending in self.queue.take() {
            pending.done.set(Err(error.clone()));
        }
        self.set_paces();
        self.queued.ring();
        self.moved.ring();
    }

    /// Whether flushes and merges end: nobody waits for them any more.
    pub fn rests(&self) -> bool {
        self.has_failed() || (self.closing.get() && !self.committing.get())
    }

    /// A flush or a merge has found no memory: it tries again after a while.
    pub async fn lacks_memory(&self, what: &str, error: &Error) {
        tracing::warn!("{}: {what} is tried again: {error}", self.dir.path().display());
        self.core.sleep_ns(MEMORY_PAUSE_NS).await;
    }

    pub fn has_failed(&self) -> bool {
        self.failed.borrow().is_some()
    }

    fn ends(&self) {
        self.working.set(self.working.get() - 1);
        self.ended.ring();
    }

    /// Whether something may be begun.
    fn is_open(&self) -> Result<()> {
        if let Some(error) = &*self.failed.borrow() {
            return Err(error.clone());
        }
        if self.space.has_untold() {
            return Err(self.refusal());
        }
        if self.closing.get() {
            return Err(Error::new(Kind::Io, "the database is being closed"));
        }
        Ok(())
    }

    /// Begins something that the end of writing has to wait for.
    pub fn work(&self) -> Result<Work<'_>> {
        self.is_open()?;
        self.working.set(self.working.get() + 1);
        Ok(Work(self))
    }
}

/// Something that the end of writing waits for, until this is dropped.
pub(crate) struct Work<'a>(&'a Inner);

impl Drop for Work<'_> {
    fn drop(&mut self) {
        self.0.ends();
    }
}

/// The writing end of a database, on the core that opened it for writing; see the module text.
/// Clones are the same.
#[derive(Clone)]
pub struct Writer(pub(crate) Rc<Inner>);

impl Writer {
    /// The writer of a database that is being opened. It writes after [`Writer::start`].
    pub(crate) fn new(
        core: &Core,
        dir: &Dir,
        db: &Db,
        options: WriteOptions,
        manifest: ManifestWriter,
    ) -> Writer {
        let epochs = db.version().slots.iter().map(|slot| slot.meta().epoch).max();
        let inner = Rc::new(Inner {
            core: core.clone(),
            dir: dir.clone(),
            db: db.clone(),
            options,
            queue: RefCell::default(),
            queued: Signal::default(),
            waiting: RefCell::default(),
            gone: Cell::new(0),
            moved: Signal::default(),
            cleared: RefCell::default(),
            keys_in_tables: Cell::new(db.0.manifest.keys),
            next_epoch: Cell::new(epochs.unwrap_or(0) + 1),
            manifest: RefCell::new(Some(manifest)),
            manifest_back: Signal::default(),
            fill_ns: Cell::new(0),
            filled_at_ns: Cell::new(core.now_ns()),
            reserve: RefCell::default(),
            reserving: Cell::new(false),
            flush_pace: Arc::default(),
            merge_pace: Arc::default(),
            progress: RefCell::default(),
            quarantine: Quarantine::new(&db.version()),
            doomed: RefCell::default(),
            spare_logs: RefCell::default(),
            stats: Cell::default(),
            space: Space::default(),
            failed: RefCell::new(None),
            closing: Cell::new(false),
            committing: Cell::new(true),
            merge_files_max: Cell::new(usize::MAX),
            working: Cell::new(4),
            ended: Signal::default(),
        });
        Writer(inner)
    }

    /// Takes over the logs of earlier processes. Those with smaller numbers than `needed_from` are
    /// obsolete. Suspends for the disk.
    pub(crate) async fn take_over_logs(&self, needed_from: u64) -> Result<()> {
        let inner = &*self.0;
        if inner.options.durability == Durability::Power {
            sync_logs(&inner.core, &inner.dir, &inner.db.0.recovered_logs).await?;
        }
        // The others are removed together with those that hold recovered writes.
        inner.keep_logs(needed_from).await;
        Ok(())
    }

    /// Begins a log and starts the tasks that write. `keys` is the change of the number of keys by
    /// the writes that were recovered into memory, if it is known. Suspends for the disk.
    pub(crate) async fn start(&self, keys: Option<i64>) -> Result<()> {
        let (inner, db) = (&self.0, &self.0.db);
        let log = match inner.first_log().await {
            // The first write tries again.
            Err(error) if error.kind() == Kind::Full => {
                inner.is_full(Task::Log, &error);
                None
            }
            log => Some(log?),
        };
        // Recovered writes are the first generation that becomes tables.
        let mems = db
            .version()
            .families
            .iter()
            .flat_map(|family| family.mems.iter().map(|mem| (family.id, mem.clone())))
            .collect();
        let recovered = Generation {
            mems,
            log_number: None,
            keys,
            log: None,
            next_log: log.as_ref().map_or_else(|| db.new_number(), WalWriter::number),
            last_sequence: db.visible(),
        };
        inner.waiting.borrow_mut().push_back(recovered);
        let commit = inner.clone();
        inner.core.spawn(Class::Foreground, async move {
            commit::run(&commit, log).await;
            commit.committing.set(false);
            commit.moved.ring();
            commit.ends();
        });
        let flush = inner.clone();
        inner.core.spawn(Class::Background, async move {
            flush::run(&flush).await;
            flush.ends();
        });
        let removal = inner.clone();
        inner.core.spawn(Class::Background, async move {
            removal.remove_doomed().await;
            removal.ends();
        });
        let compaction = inner.clone();
        inner.core.spawn(Class::Background, async move {
            compaction::run(&compaction).await;
            compaction.ends();
        });
        Ok(())
    }

    /// Writes a batch, all or nothing. Suspends until it is as durable as was asked for and
    /// visible; returns the sequence number of its last operation.
    ///
    /// # Errors
    /// [`Kind::UnknownColumnFamily`], [`Kind::Unsupported`] for range deletions, [`Kind::Memory`]
    /// for a batch of more than 256 MiB, [`Kind::Full`] when there is no room for it on the disk:
    /// then it is not written, nor is any that was handed over behind it before everybody who
    /// was refused has been told; and [`Kind::Io`] when the log cannot be written: then it is
    /// not known whether the batch will be there after the next opening.
    pub async fn write(&self, batch: BatchWriter) -> Result<u64> {
        self.submit(batch, None)?.await
    }

    /// Puts a batch behind all that were handed over before; the future ends like
    /// [`Writer::write`], and the batch is written though nobody waits for it.
    ///
    /// `keys` is by how many the batch changes the number of keys of the default column family.
    /// Without it [`Db::keys`] knows no number from then on.
    ///
    /// # Errors
    /// Those of [`Writer::write`] that are known before the log is written: then the batch is not
    /// written.
    pub fn submit(&self, mut batch: BatchWriter, keys: Option<i64>) -> Result<Written> {
        if batch.len() > BATCH_BYTES_MAX {
            let text = format!("a batch of {} bytes, at most {BATCH_BYTES_MAX}", batch.len());
            return Err(Error::new(Kind::Memory, text));
        }
        self.check(batch.finish(0))?;
        if let Some(keys) = keys {
            batch.note_keys(keys);
        }
        if batch.is_empty() {
            let done = Rc::new(Done::default());
            done.set(Ok(self.0.db.visible()));
            return Ok(Written(done));
        }
        self.request(Request::Batch { batch, keys })
    }

    /// Removes everything that was written to a column family before; what is handed over later
    /// stays. Takes the space at once, whatever its size. Suspends until it is durable and visible.
    /// Snapshots that were taken before end. Families of which the clearings follow each other
    /// without a wait are cleared at once: after a crash all of them are empty, or none.
    ///
    /// # Errors
    /// [`Kind::UnknownColumnFamily`]; else as for [`Writer::write`].
    pub fn clear(&self, family: CfId) -> Result<Written> {
        self.0.db.version().family(family)?;
        self.request(Request::Clear(family))
    }

    /// Ends when all that was handed over before survives a power cut, whatever the durability.
    ///
    /// # Errors
    /// As for [`Writer::write`].
    pub fn sync(&self) -> Result<Written> {
        self.request(Request::Sync)
    }

    fn request(&self, request: Request) -> Result<Written> {
        let inner = &*self.0;
        inner.is_open()?;
        let done = Rc::new(Done::default());
        inner.queue.borrow_mut().push_back(Pending { request, done: done.clone() });
        inner.queued.ring();
        Ok(Written(done))
    }

    /// Whether no memtable waits to be flushed and no merge is due or under way: all background
    /// work that was caused by the writes so far is done.
    pub fn is_at_rest(&self) -> bool {
        let inner = &self.0;
        inner.waiting.borrow().is_empty()
            && inner.progress.borrow().is_none()
            && !compaction::is_due(inner, &inner.db.version())
    }

    /// Counters since the opening, and how things stand now.
    pub fn stats(&self) -> WriterStats {
        let inner = &*self.0;
        let version = inner.db.version();
        let level0 = version.families.iter().filter_map(|family| family.levels.first());
        let mems = version.families.iter().flat_map(|family| &family.mems);
        WriterStats {
            memtable_bytes: mems.map(|mem| mem.memory() as u64).sum(),
            waiting_memtables: inner.waiting.borrow().len() as u64,
            rewritten_tables: inner.db.0.recycled_tables.rewritten.load(Ordering::Relaxed),
            level0_files: level0.map(|level| level.slots.len() as u64).max().unwrap_or(0),
            damaged_tables: inner.quarantine.tables(&version) as u64,
            disk_full: inner.space.is_short().into(),
            disk_full_times: inner.space.times(),
            refused: inner.space.refused(),
            tables_failing: [Task::Flush, Task::Merge].iter().any(|&t| inner.space.fails(t)).into(),
            ..inner.stats.get()
        }
    }

    /// What ended all writing, if something did.
    pub fn failure(&self) -> Option<Error> {
        self.0.failed.borrow().clone()
    }

    /// Only what can be applied goes into the log.
    fn check(&self, batch: &[u8]) -> Result<()> {
        let format = |e: rocksfmt::Error| Error::format("a batch", &e);
        let version = self.0.db.version();
        for op in WriteBatch::parse(batch).map_err(format)?.ops() {
            let (_, op) = op.map_err(format)?;
            if let Some(id) = op.column_family() {
                version.family(id)?;
            }
            if !matches!(op, Op::Put { .. } | Op::Delete { .. }) {
                return Err(Error::new(Kind::Unsupported, format!("writing {op:?}")));
            }
        }
        Ok(())
    }

    /// Sets a key of the default column family; see [`Writer::write`].
    ///
    /// # Errors
    /// As for [`Writer::write`].
    pub async fn put(&self, key: &[u8], value: &[u8]) -> Result<u64> {
        let mut batch = BatchWriter::new();
        batch.put(0, key, value);
        self.write(batch).await
    }

    /// Deletes a key of the default column family; see [`Writer::write`].
    ///
    /// # Errors
    /// As for [`Writer::write`].
    pub async fn delete(&self, key: &[u8]) -> Result<u64> {
        let mut batch = BatchWriter::new();
        batch.delete(0, key);
        self.write(batch).await
    }

    /// Ends writing: what was handed over before is still written. Suspends until that is done and
    /// no table is being written. Merges and flushes under way are given up: what is in
    /// memtables stays in the log. What was recovered from older logs is given three seconds to
    /// become tables.
    ///
    /// # Errors
    /// What ended the writing earlier, if something did.
    pub async fn close(&self) -> Result<()> {
        let inner = &*self.0;
        inner.closing.set(true);
        inner.set_paces();
        inner.queued.ring();
        inner.moved.ring();
        inner.ended.until(|| inner.working.get() == 0).await;
        match &*inner.failed.borrow() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}
