//! The state of writing, on the core that owns the database, and what its tasks share.
//!
//! Several tasks run on it: commit, flush, compaction, the healing of the MANIFEST, the sealing of
//! blob files, the collection of their garbage, and the removal of obsolete files. They wait for
//! each other with [`WriteState::changed`]. All of it belongs to one core; jobs on other cores
//! (`job.rs`) get copies.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use fs::{Dir, File, NamesMark};
use memtable::Reserve;
use reactor::{Core, Event, Oneshot};
use rocksfmt::{BatchWriter, Comparator, ManifestReplay};

use crate::db::{CfId, Db};
use crate::error::{Error, Kind, Result};
use crate::mem::Mem;
use crate::mutant::mutant;
use crate::options::WriteOptions;
use crate::write::backpressure::{Paces, Unnotified};
use crate::write::blob_gc::BlobGc;
use crate::write::blob_writer::Blobs;
use crate::write::compaction::{self, Merges};
use crate::write::conflict::Unwritten;
use crate::write::forerunner::{Forerunner, Note};
use crate::write::ingest::Ingesting;
use crate::write::live_files::Listed;
use crate::write::manifest_turn::SharedManifest;
use crate::write::manifest_writer::ManifestWriter;
use crate::write::next_log::NextLog;
use crate::write::obsolete::ObsoleteFiles;
use crate::write::retry::Retries;
use crate::write::writer::WriterStats;

/// Pause after a flush or a merge that found no memory, in nanoseconds.
const MEMORY_PAUSE_NS: u64 = 100_000_000;
/// The tasks that [`crate::Writer`] starts, besides those that merge.
const TASKS: usize = 8;

/// The state of writing.
pub(crate) struct WriteState {
    pub core: Core,
    pub dir: Dir,
    pub db: Db,
    pub options: WriteOptions,
    pub queue: Queue,
    pub flushes: Flushes,
    pub merges: Merges,
    pub blobs: Blobs,
    pub blob_gc: BlobGc,
    pub manifest: SharedManifest,
    pub obsolete: ObsoleteFiles,
    pub paces: Paces,
    pub retries: Retries,
    pub reserve: ReservedMemory,
    pub lifecycle: Lifecycle,
    /// Notified when something changed that a task of this state may wait for, other than
    /// [`Queue::arrived`].
    pub changed: Event,
    /// The first logs of column families that were cleared.
    pub cleared: RefCell<BTreeMap<u32, u64>>,
    pub next_log: NextLog,
    /// The part of the memory for memtables that a database within this one has.
    pub lent_memtable_bytes: Cell<usize>,
    /// What runs before a group with notes is written.
    pub forerunner: RefCell<Option<Rc<dyn Forerunner>>>,
    /// The number of keys of the default column family, without those in memtables.
    pub keys_in_tables: Cell<Option<u64>>,
    next_epoch: Cell<u64>,
    stats: Cell<WriterStats>,
}

/// Requests that the commit task has not taken yet.
#[derive(Default)]
pub(crate) struct Queue {
    pub requests: RefCell<VecDeque<Pending>>,
    /// Notified when a request has arrived.
    pub arrived: Event,
}

/// Memtables that become tables.
#[derive(Default)]
pub(crate) struct Flushes {
    pub waiting: RefCell<VecDeque<Generation>>,
    /// Generations that have become tables.
    pub done: Cell<u64>,
    /// How full the memtables are that are written to: 1 for full.
    pub filled: Cell<f64>,
    /// All that was written after this sequence number is in memtables.
    pub known_from: Cell<u64>,
}

/// Memory for memtables that another core has touched.
#[derive(Default)]
pub(crate) struct ReservedMemory {
    pub chunks: RefCell<Reserve>,
    /// Another core is touching more.
    pub filling: Cell<bool>,
}

/// Whether writing continues, and the work that its end waits for.
pub(crate) struct Lifecycle {
    /// The error that ended all writing.
    pub failed: RefCell<Option<Error>>,
    pub closing: Cell<bool>,
    /// The node is about to end: writes do not wait for merges any more.
    pub leaving: Cell<bool>,
    /// Callers that wait for submitted writes, and need no room in level 0 afterwards.
    pub passing: Cell<usize>,
    /// A write waits until level 0 has fewer files.
    pub stopped: Cell<bool>,
    /// The commit task runs: submitted requests may still need room in memory and in level 0.
    pub committing: Cell<bool>,
    /// Tasks and loads that the end of writing waits for.
    working: Cell<usize>,
    /// Notified when one of them has ended.
    ended: Event,
}

/// A request of a caller.
pub(crate) enum Request {
    Batch {
        batch: BatchWriter,
        /// The change of the number of keys, if it is known.
        keys: Option<i64>,
        /// It is written only if this holds.
        condition: Option<Box<Unwritten>>,
        /// For the [`Forerunner`].
        note: Option<Note>,
    },
    /// Clear a column family.
    Clear(u32),
    /// Make a column family. The result is its id.
    Create { name: String, comparator: Comparator },
    /// Drop a column family.
    Drop(u32),
    /// Make durable all that was submitted before.
    Sync,
    /// Begin new memtables, if the present ones hold anything and the disk has space for a log.
    SwitchMemtables,
    /// Add finished tables.
    Ingest(Rc<RefCell<Ingesting>>),
    /// Say which files hold the database now. The answer is put there.
    ListFiles(Rc<RefCell<Option<Result<Listed>>>>),
}

/// A request and its result.
pub(crate) struct Pending {
    pub request: Request,
    pub done: Rc<Done>,
}

impl Pending {
    /// The column family that it clears, if it does.
    pub fn clears(&self) -> Option<u32> {
        match self.request {
            Request::Clear(family) => Some(family),
            _ => None,
        }
    }
}

/// The result of a request, once it is known: the last sequence number of its batch.
#[derive(Default)]
pub(crate) struct Done {
    pub result: Oneshot<Result<u64>>,
    /// It was refused, and the caller has not seen that yet.
    pub unnotified: Cell<Option<Unnotified>>,
}

impl Done {
    pub fn refuse(&self, error: Error, unnotified: Unnotified) {
        self.unnotified.set(Some(unnotified));
        self.set(Err(error));
    }

    /// Sets the result. Only the first one counts.
    pub fn set(&self, result: Result<u64>) {
        let _ = self.result.send(result);
    }
}

/// Memtables that become tables together, their log, and the first log that is not theirs.
#[derive(Clone)]
pub(crate) struct Generation {
    pub mems: Vec<(u32, Arc<Mem>)>,
    /// `None` for recovered writes: they come from all logs there were.
    pub log_number: Option<u64>,
    /// A write of the log has failed: the file is not used again.
    pub log_failed: bool,
    /// The change of the number of keys by these memtables, if it is known.
    pub keys: Option<i64>,
    /// The log, unless it is known to be durable.
    pub log: Option<File>,
    pub next_log: u64,
    /// The last sequence before that log.
    pub last_sequence: u64,
    /// When the first write went to these memtables, in Unix seconds; 0 for unknown.
    pub began: u64,
    /// Bytes that each family has stored in blob files meanwhile.
    pub blob_bytes: BTreeMap<CfId, u64>,
}

impl Generation {
    /// Whether its log is durable and holds nothing else. Only then may some families have tables
    /// while the others need the log: a crash could leave a batch in some of its families only.
    pub fn may_be_divided(&self) -> bool {
        self.log_number.is_some() && !self.log_failed && self.log.is_none()
    }
}

impl WriteState {
    pub fn new(
        core: &Core,
        dir: &Dir,
        db: &Db,
        options: WriteOptions,
        manifest: ManifestWriter,
    ) -> WriteState {
        let epochs = db.version().slots.iter().map(|slot| slot.meta().epoch).max();
        let blobs = Blobs::new(db, &options);
        let families: Vec<u32> = db.version().families.iter().map(|family| family.id).collect();
        let state = WriteState {
            core: core.clone(),
            dir: dir.clone(),
            db: db.clone(),
            options,
            queue: Queue::default(),
            flushes: Flushes::default(),
            merges: Merges::new(&db.version()),
            blobs,
            blob_gc: BlobGc::default(),
            manifest: SharedManifest::new(manifest),
            obsolete: ObsoleteFiles::default(),
            paces: Paces::new(core.now_ns()),
            retries: Retries::default(),
            reserve: ReservedMemory::default(),
            lifecycle: Lifecycle {
                failed: RefCell::new(None),
                closing: Cell::new(false),
                leaving: Cell::new(false),
                passing: Cell::new(0),
                stopped: Cell::new(false),
                committing: Cell::new(true),
                working: Cell::new(TASKS + compaction::jobs_max(core)),
                ended: Event::default(),
            },
            changed: Event::default(),
            cleared: RefCell::default(),
            next_log: NextLog::default(),
            lent_memtable_bytes: Cell::default(),
            forerunner: RefCell::default(),
            keys_in_tables: Cell::new(db.0.manifest.keys),
            next_epoch: Cell::new(epochs.unwrap_or(0) + 1),
            stats: Cell::default(),
        };
        state.note_blob_files(&ManifestReplay::resume(&db.0.manifest), families.into_iter());
        state
    }

    /// The number of the next flush. A newer file of level 0 has a larger one.
    pub fn new_epoch(&self) -> u64 {
        let epoch = self.next_epoch.get();
        self.next_epoch.set(epoch + 1);
        epoch
    }

    /// Bytes of memtables at which they are written to tables.
    pub fn memtable_bytes(&self) -> usize {
        self.options.memtable_bytes - self.lent_memtable_bytes.get()
    }

    /// The counters so far.
    pub fn stats(&self) -> WriterStats {
        self.stats.get()
    }

    /// Changes counters.
    pub fn count(&self, change: impl FnOnce(&mut WriterStats)) {
        let mut stats = self.stats.get();
        change(&mut stats);
        self.stats.set(stats);
    }

    /// Makes durable the names of files that were created after `mark`.
    ///
    /// # Errors
    /// The device's: the names may be lost, whatever a later sync reports.
    pub async fn sync_names(&self, mark: NamesMark) -> Result<()> {
        let synced = self.dir.sync_since(mark).await;
        synced.map_err(|e| Error::io(self.dir.path().display(), &e).in_part())
    }

    /// Ends all writing.
    pub fn fail(&self, error: &Error) {
        tracing::error!(
            "{}: writing ends: {error}; stop the node and see to the directory",
            self.dir.path().display()
        );
        self.lifecycle.failed.borrow_mut().get_or_insert_with(|| error.clone());
        for pending in self.queue.requests.take() {
            pending.done.set(Err(error.clone()));
        }
        self.set_paces();
        self.queue.arrived.notify_all();
        self.changed.notify_all();
    }

    /// The error that ended all writing, if one did.
    pub fn failure(&self) -> Option<Error> {
        self.lifecycle.failed.borrow().clone()
    }

    pub fn has_failed(&self) -> bool {
        self.lifecycle.failed.borrow().is_some()
    }

    pub fn is_closing(&self) -> bool {
        self.lifecycle.closing.get()
    }

    /// Whether flushes and merges are to end: nothing waits for them any more.
    pub fn is_ending(&self) -> bool {
        self.has_failed() || (self.is_closing() && !self.lifecycle.committing.get())
    }

    /// Pauses after a flush or a merge that found no memory, and is to be retried.
    pub async fn pause_for_memory(&self, what: &str, error: &Error) {
        tracing::warn!("{}: {what} is tried again: {error}", self.dir.path().display());
        self.core.sleep_ns(MEMORY_PAUSE_NS).await;
    }

    /// Fails if no new request may be accepted.
    pub fn check_open(&self) -> Result<()> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        if self.retries.has_unnotified() {
            return Err(self.refusal());
        }
        if self.is_closing() {
            return Err(Error::new(Kind::Io, "the database is being closed"));
        }
        Ok(())
    }

    /// Begins work that the end of writing has to wait for.
    pub fn begin_work(&self) -> Result<Work<'_>> {
        self.check_open()?;
        self.lifecycle.working.set(self.lifecycle.working.get() + 1);
        Ok(Work(self))
    }

    /// Notes that a task, or work, has ended.
    pub fn end_work(&self) {
        self.lifecycle.working.set(self.lifecycle.working.get() - 1);
        self.lifecycle.ended.notify_all();
    }

    /// Ends a pause of merges, and lets writes pass a full level 0: the end is near.
    pub fn leave(&self) {
        self.lifecycle.leaving.set(true);
        self.hold_merges(false);
    }

    /// Pauses merges and the collection of garbage in blob files, or lets them go on.
    pub fn hold_merges(&self, held: bool) {
        self.paces.merge.hold(held);
        self.paces.blob_gc.hold(held);
        self.merges.paused.set(held && !mutant("merges_begin_in_a_pause"));
        self.merges.note_change();
        self.changed.notify_all();
    }

    /// Ends writing and waits until all tasks and all work have ended.
    pub async fn close(&self) {
        self.lifecycle.closing.set(true);
        self.leave();
        self.set_paces();
        self.queue.arrived.notify_all();
        self.changed.notify_all();
        self.lifecycle.ended.wait_until(|| self.lifecycle.working.get() == 0).await;
    }
}

/// Work that the end of writing waits for, until this is dropped.
pub(crate) struct Work<'a>(&'a WriteState);

impl Drop for Work<'_> {
    fn drop(&mut self) {
        self.0.end_work();
    }
}
