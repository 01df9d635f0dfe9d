//! Writing to a database. One core owns it and puts all batches in order.
//!
//! 1. [`Writer::write`] puts a batch into the queue. The commit task takes the queued batches as
//!    one group, assigns their sequence numbers, writes the group to the log and, as the durability
//!    asks, flushes it. Meanwhile the next group gathers.
//! 2. The commit task then applies the group to the memtables, publishes its last sequence, and
//!    acknowledges every batch of it: readers on all cores see whole batches, in order.
//! 3. When the memtables are full, the commit task begins new ones and a new log, and the flush
//!    task (`flush.rs`) writes the old ones to tables of level 0. `backpressure.rs` says when
//!    writes wait for that.
//!
//! What must hold:
//!
//! - A batch is acknowledged after its group is in the log as promised.
//! - The MANIFEST is durable before a log that it makes obsolete is removed.
//! - After a failed write of a log, a blob file or the MANIFEST it is unknown how much of it is on
//!   the disk. A new file takes the place of the failed one, from what is in memory, before
//!   anything that depends on the failed write is acknowledged (`commit.rs`, `blob_writer.rs`,
//!   `manifest_writer.rs`). All reserve space before they are written, so a full disk is met
//!   earlier (`retry.rs`).

use std::collections::BTreeMap;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use fs::Dir;
use reactor::{Class, Core, timeout};
use rocksfmt::{BatchWriter, FileName, Op, WriteBatch};

use crate::db::{CfId, Db};
use crate::durability::Durability;
use crate::error::{Error, Kind, Result};
use crate::options::WriteOptions;
use crate::table::BLOCK_BYTES_MAX;
use crate::write::blob_gc;
use crate::write::blob_writer;
use crate::write::commit;
use crate::write::compaction;
use crate::write::conflict::Unwritten;
use crate::write::flush;
use crate::write::forerunner::{Forerunner, Note};
use crate::write::manifest_writer::ManifestWriter;
use crate::write::next_log;
use crate::write::retry::Task;
use crate::write::state::{Done, Generation, Pending, Request, WriteState};
use crate::write::wal_writer::{NotCreated, WalWriter};

/// The time that writes which refer to blob files have at the end to become tables.
const FLUSH_NS: u64 = 3_000_000_000;

/// Counters of a writer since the opening, and its present state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriterStats {
    /// Groups written to the log.
    pub groups: u64,
    /// Batches in them.
    pub batches: u64,
    /// Bytes of these batches.
    pub batch_bytes: u64,
    /// Bytes written to logs, padding included.
    pub log_bytes: u64,
    /// Logs begun.
    pub logs: u64,
    /// Memtables written to tables.
    pub flushed_tables: u64,
    /// Bytes of these tables.
    pub flushed_bytes: u64,
    /// Blob files begun.
    pub blob_files: u64,
    /// Values stored in blob files.
    pub blob_values: u64,
    /// Bytes of these values with their keys and headers.
    pub blob_bytes: u64,
    /// Collections of garbage in blob files.
    pub blob_collections: u64,
    /// Values that these moved to new blob files.
    pub blob_moved_values: u64,
    /// Bytes of these values with their keys and headers.
    pub blob_moved_bytes: u64,
    /// Bytes of the tables that collections wrote again.
    pub blob_tables_bytes: u64,
    /// Merges of files into a deeper level.
    pub merges: u64,
    /// Files that only changed their level.
    pub moved_files: u64,
    /// Bytes of the tables merged.
    pub merged_bytes: u64,
    /// Bytes of the tables that merges made.
    pub merged_into_bytes: u64,
    /// Tables written over recycled files.
    pub rewritten_tables: u64,
    /// Bytes of all values in complete blob files, live or not.
    pub blob_total_bytes: u64,
    /// Bytes of those that tables or logs refer to.
    pub blob_live_bytes: u64,
    /// How far blob files are on the way to the limit of their space, while garbage is collected,
    /// in percent.
    pub blob_space_pressure_percent: u64,
    /// Nanoseconds that writes were delayed so that merges keep up.
    pub slowed_ns: u64,
    /// Nanoseconds that writes were stalled by too many memtables or files of level 0.
    pub stopped_ns: u64,
    /// Bytes of memory that memtables hold now.
    pub memtable_bytes: u64,
    /// Generations of memtables that wait to be flushed.
    pub waiting_memtables: u64,
    /// Files of level 0 of the family that has most.
    pub level0_files: u64,
    /// Tables that merges leave alone, because they are damaged.
    pub damaged_tables: u64,
    /// 1 while a task waits for space on the disk.
    pub disk_full: u64,
    /// How often the disk became full.
    pub disk_full_times: u64,
    /// Requests refused because of a full disk, or because no table could be written.
    pub refused: u64,
    /// Flushes and merges that failed for another reason than a full disk, and were retried.
    pub table_failures: u64,
    /// 1 while one of these has not succeeded since.
    pub tables_failing: u64,
    /// Logs, blob files and MANIFESTs that were replaced after a failed write.
    pub heals: u64,
    /// 1 while a log or MANIFEST that failed is not replaced yet, or values of a blob file that
    /// failed are not in tables yet.
    pub healing: u64,
}

impl WriterStats {
    /// Bytes in complete blob files for each byte of live values; 0 without any.
    pub fn blob_space_amplification(&self) -> f64 {
        match self.blob_live_bytes {
            0 => 0.0,
            live => self.blob_total_bytes as f64 / live as f64,
        }
    }
}

/// Largest batch in bytes.
const BATCH_BYTES_MAX: usize = 256 << 20;
// Its value is read back as a block, which is a little larger.
const _: () = assert!(BATCH_BYTES_MAX + 4096 <= BLOCK_BYTES_MAX);

/// A submitted request. Resolves when it is visible and as durable as was asked for, to the
/// sequence number of its last operation or to an error. It may be dropped.
pub struct Written(Rc<Done>);

impl Future for Written {
    type Output = Result<u64>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<u64>> {
        // Polled again after its end, it stays pending.
        match self.0.result.poll_recv(cx) {
            Poll::Ready(Ok(result)) => {
                drop(self.0.unnotified.take());
                Poll::Ready(result)
            }
            Poll::Ready(Err(_)) | Poll::Pending => Poll::Pending,
        }
    }
}

/// The writing end of a database, on the core that opened it for writing. Clones are the same.
#[derive(Clone)]
pub struct Writer(pub(crate) Rc<WriteState>);

impl Writer {
    /// The writer of a database that is being opened. It writes after [`Writer::start`].
    pub(crate) fn new(
        core: &Core,
        dir: &Dir,
        db: &Db,
        options: WriteOptions,
        manifest: ManifestWriter,
    ) -> Writer {
        Writer(Rc::new(WriteState::new(core, dir, db, options, manifest)))
    }

    /// Takes over the logs of earlier processes. Those with smaller numbers than `needed_from` are
    /// obsolete. Suspends for the disk.
    pub(crate) async fn take_over_logs(&self, needed_from: u64) -> Result<()> {
        let state = &*self.0;
        if state.options.durability == Durability::Power {
            sync_logs(&state.dir, &state.db.0.recovered_logs).await?;
        }
        // The others are removed together with those that hold recovered writes.
        state.recycle_logs(needed_from).await;
        Ok(())
    }

    /// Begins a log and starts the tasks that write. `keys` is the change of the number of keys by
    /// the writes that were recovered into memory, if it is known. Suspends for the disk.
    pub(crate) async fn start(&self, keys: Option<i64>) -> Result<()> {
        let (state, db) = (&self.0, &self.0.db);
        state.flushes.known_from.set(db.visible());
        let log = match commit::first_log(state).await {
            Ok(log) => Some(log),
            // The first write retries.
            Err(NotCreated { error, .. }) if error.kind() == Kind::Full => {
                state.note_full(Task::Log, &error);
                None
            }
            Err(NotCreated { error, .. }) => return Err(error),
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
            log_failed: false,
            keys,
            log: None,
            next_log: log.as_ref().map_or_else(|| db.new_number(), WalWriter::number),
            last_sequence: db.visible(),
            began: 0,
            blob_bytes: BTreeMap::new(),
        };
        state.flushes.waiting.borrow_mut().push_back(recovered);
        let commit = state.clone();
        // Many writers wait for each group: it goes ahead of the reads that are ready to run.
        state.core.spawn(Class::Control, async move {
            commit::run(&commit, log).await;
            commit.lifecycle.committing.set(false);
            commit.changed.notify_all();
            commit.end_work();
        });
        let flush = state.clone();
        state.core.spawn(Class::Background, async move {
            flush::run(&flush).await;
            flush.end_work();
        });
        let next_log = state.clone();
        state.core.spawn(Class::Background, async move {
            next_log::run(&next_log).await;
            next_log.end_work();
        });
        let sealing = state.clone();
        state.core.spawn(Class::Background, async move {
            blob_writer::run(&sealing).await;
            sealing.end_work();
        });
        let collection = state.clone();
        state.core.spawn(Class::Background, async move {
            blob_gc::run(&collection).await;
            collection.end_work();
        });
        let removal = state.clone();
        state.core.spawn(Class::Background, async move {
            removal.remove_obsolete().await;
            removal.end_work();
        });
        for _ in 0..compaction::jobs_max(&state.core) {
            let compaction = state.clone();
            state.core.spawn(Class::Background, async move {
                compaction::run(&compaction).await;
                compaction.end_work();
            });
        }
        let ages = state.clone();
        state.core.spawn(Class::Background, async move {
            ages.watch_ages().await;
            ages.end_work();
        });
        let healing = state.clone();
        state.core.spawn(Class::Background, async move {
            healing.heal_manifest().await;
            healing.end_work();
        });
        Ok(())
    }

    /// Writes a batch, all or nothing. Suspends until it is visible and as durable as was asked
    /// for; returns the sequence number of its last operation.
    ///
    /// # Errors
    /// - [`Kind::UnknownColumnFamily`]; [`Kind::Unsupported`] for a range whose end comes before
    ///   its start, and for merges in a family without a merge operator; [`Kind::Memory`] for a
    ///   batch of more than 256 MiB.
    /// - [`Kind::Full`] when the disk has no room for it, or the log, tables or the MANIFEST cannot
    ///   be written for now. It is not written, and neither is any batch that was submitted after
    ///   it until all refused callers have seen their refusals.
    /// - [`Kind::Io`] when the log failed and cannot be replaced yet. The batch is not visible; if
    ///   the process ends now, it may be there after the next opening. Once a later batch was
    ///   written, it will not be. The batches after it are refused as above.
    /// - [`Kind::Locked`] or another kind when writing has ended: see [`Writer::failure`].
    pub async fn write(&self, batch: BatchWriter) -> Result<u64> {
        self.submit(batch, None)?.await
    }

    /// Queues a batch after all that were submitted before. The future resolves like
    /// [`Writer::write`]; the batch is written even if the future is dropped.
    ///
    /// `keys` is the change of the number of keys of the default column family. Without it
    /// [`Db::keys`] is unknown from then on.
    ///
    /// # Errors
    /// Those of [`Writer::write`] that are known before the log is written: then the batch is not
    /// written.
    pub fn submit(&self, mut batch: BatchWriter, keys: Option<i64>) -> Result<Written> {
        self.prepare(&mut batch, keys)?;
        if batch.is_empty() {
            let done = Rc::new(Done::default());
            done.set(Ok(self.0.db.visible()));
            return Ok(Written(done));
        }
        self.request(Request::Batch { batch, keys, condition: None, note: None })
    }

    /// As [`Writer::submit`], with a note for the [`Forerunner`], which runs before the batch is
    /// written. A deletion of an empty range takes no sequence number.
    ///
    /// # Errors
    /// Those of [`Writer::submit`]. The future resolves to [`Kind::Full`] if the forerunner failed:
    /// nothing was written.
    pub fn submit_noted(
        &self,
        mut batch: BatchWriter,
        keys: Option<i64>,
        note: Note,
    ) -> Result<Written> {
        self.prepare(&mut batch, keys)?;
        self.request(Request::Batch { batch, keys, condition: None, note: Some(note) })
    }

    /// Runs something before each group with notes, or nothing any more.
    pub fn set_forerunner(&self, forerunner: Option<Rc<dyn Forerunner>>) {
        self.0.forerunner.replace(forerunner);
    }

    /// As [`Writer::submit`], but the batch is written only if some keys have not been written
    /// since a moment: an optimistic transaction reads at a snapshot, and then submits its
    /// writes under the condition that nobody has written what it has read.
    ///
    /// # Errors
    /// Those of [`Writer::submit`]. The future resolves to [`Kind::Conflict`] if a key was written,
    /// or if the moment is so long ago that this is not known any more: the memtables of that time
    /// have become tables, or a family was cleared. Then nothing was written.
    pub fn submit_if(
        &self,
        mut batch: BatchWriter,
        keys: Option<i64>,
        condition: Unwritten,
    ) -> Result<Written> {
        let version = self.0.db.version();
        condition.families().try_for_each(|family| version.family(family).map(drop))?;
        self.prepare(&mut batch, keys)?;
        let condition = Some(Box::new(condition));
        self.request(Request::Batch { batch, keys, condition, note: None })
    }

    /// Removes all that was written to a column family before. Writes that are submitted later
    /// stay. The space is released immediately, whatever its size. Resolves when the clearing is
    /// durable and visible. Snapshots taken before expire. Consecutive clearings are one change:
    /// after a crash all of their families are empty, or none.
    ///
    /// # Errors
    /// [`Kind::UnknownColumnFamily`]; else as for [`Writer::write`].
    pub fn clear(&self, family: CfId) -> Result<Written> {
        self.0.db.version().family(family)?;
        self.request(Request::Clear(family))
    }

    /// Resolves when all that was submitted before survives a power cut, whatever the durability.
    ///
    /// # Errors
    /// As for [`Writer::write`].
    pub fn sync(&self) -> Result<Written> {
        self.request(Request::Sync)
    }

    pub(crate) fn request(&self, request: Request) -> Result<Written> {
        let state = &*self.0;
        state.check_open()?;
        let done = Rc::new(Done::default());
        let is_batch = matches!(request, Request::Batch { .. });
        state.queue.requests.borrow_mut().push_back(Pending { request, done: done.clone() });
        state.queue.arrived.notify_all();
        if !is_batch {
            // Writes before it may wait for room in level 0.
            state.changed.notify_all();
        }
        Ok(Written(done))
    }

    /// Whether the background work is quiesced: no memtable waits to be flushed, and no merge or
    /// collection of garbage is due or under way.
    pub fn is_quiesced(&self) -> bool {
        let state = &self.0;
        state.flushes.waiting.borrow().is_empty()
            && state.merges.running.borrow().is_empty()
            && !compaction::is_due(state, &state.db.version())
            && !blob_gc::is_due(state)
    }

    /// Counters since the opening, and the present state.
    pub fn stats(&self) -> WriterStats {
        let state = &*self.0;
        let retries = &state.retries;
        let version = state.db.version();
        let level0 = version.families.iter().filter_map(|family| family.levels.first());
        let mems = version.families.iter().flat_map(|family| &family.mems);
        let (blob_total_bytes, blob_live_bytes) = state.blob_gc.space.bytes();
        WriterStats {
            memtable_bytes: mems.map(|mem| mem.memory() as u64).sum(),
            waiting_memtables: state.flushes.waiting.borrow().len() as u64,
            blob_total_bytes,
            blob_live_bytes,
            blob_space_pressure_percent: (state.blob_pressure() * 100.0) as u64,
            rewritten_tables: state.db.0.recycled_tables.rewritten.load(Ordering::Relaxed),
            level0_files: level0.map(|level| level.slots.len() as u64).max().unwrap_or(0),
            damaged_tables: state.merges.quarantine.tables(&version) as u64,
            disk_full: retries.is_full().into(),
            disk_full_times: retries.full_times(),
            refused: retries.refused(),
            tables_failing: [Task::Flush, Task::Merge].iter().any(|&t| retries.fails(t)).into(),
            heals: retries.heals(),
            healing: (retries.is_healing() || !state.blobs.failed().is_empty()).into(),
            ..state.stats()
        }
    }

    /// The error that ended all writing, if one did: the directory is no longer ours, or the engine
    /// is wrong. Errors of the device do not end writing.
    pub fn failure(&self) -> Option<Error> {
        self.0.failure()
    }

    /// The last error of a flush, a merge, a log, a blob file or the MANIFEST since the opening.
    pub fn last_error(&self) -> Option<Error> {
        self.0.retries.last_error()
    }

    /// Checks that a batch can be applied, and completes it, before it goes into the log.
    fn prepare(&self, batch: &mut BatchWriter, keys: Option<i64>) -> Result<()> {
        if batch.len() > BATCH_BYTES_MAX {
            let text = format!("a batch of {} bytes, at most {BATCH_BYTES_MAX}", batch.len());
            return Err(Error::new(Kind::Memory, text));
        }
        let format = |e: rocksfmt::Error| Error::format("a batch", &e);
        let version = self.0.db.version();
        let mut has_empty_range = false;
        for op in WriteBatch::parse(batch.finish(0)).map_err(format)?.ops() {
            let (_, op) = op.map_err(format)?;
            if let Some(id) = op.column_family() {
                version.family(id)?;
            }
            match op {
                Op::Put { .. } | Op::Delete { .. } | Op::SingleDelete { .. } => {}
                Op::Merge { cf, .. } => {
                    let family = version.family(cf)?;
                    family.merge.check_writing(&family.name)?;
                }
                // RocksDB refuses it when it applies the batch, also one that it finds in a log.
                Op::DeleteRange { cf, begin, end }
                    if version.family(cf)?.comparator.cmp_user(begin, end).is_gt() =>
                {
                    let text = "cannot delete a range: its end comes before its start";
                    return Err(Error::new(Kind::Unsupported, text));
                }
                Op::DeleteRange { begin, end, .. } => has_empty_range |= begin == end,
                _ => return Err(Error::new(Kind::Unsupported, format!("writing {op:?}"))),
            }
        }
        if has_empty_range {
            batch.remove_empty_ranges().map_err(format)?;
        }
        if let Some(keys) = keys {
            batch.note_keys(keys);
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

    /// Deletes a key of the default column family that was set exactly once since its last
    /// deletion; see [`Writer::write`]. The value and the deletion cancel out when they are
    /// compacted. It must not be used for a key that was set twice, merged, or deleted in
    /// another way: RocksDB then shows old values again, or reports corruption.
    ///
    /// # Errors
    /// As for [`Writer::write`].
    pub async fn single_delete(&self, key: &[u8]) -> Result<u64> {
        let mut batch = BatchWriter::new();
        batch.single_delete(0, key);
        self.write(batch).await
    }

    /// Adds an operand of the merge operator to a key of the default column family; see
    /// [`Writer::write`].
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if the column family has no merge operator, or one that is not built
    /// in; else as for [`Writer::write`].
    pub async fn merge(&self, key: &[u8], operand: &[u8]) -> Result<u64> {
        let mut batch = BatchWriter::new();
        batch.merge(0, key, operand);
        self.write(batch).await
    }

    /// Deletes all keys of a column family from `start` to before `end`, at the cost of one write;
    /// see [`Writer::write`]. With equal keys it deletes nothing. [`Db::keys`] is unknown
    /// afterwards: nobody counts the keys. A caller that did can use [`Writer::submit`].
    ///
    /// # Errors
    /// As for [`Writer::write`].
    pub async fn delete_range(&self, family: CfId, start: &[u8], end: &[u8]) -> Result<u64> {
        let mut batch = BatchWriter::new();
        batch.delete_range(family, start, end);
        self.write(batch).await
    }

    /// Ends writing. Requests that were submitted before are still done. Suspends until then, and
    /// until no table is being written. Merges and flushes under way are cancelled: writes in
    /// memtables stay in the log. Writes recovered from older logs get three seconds to become
    /// tables; so do writes that refer to blob files, which RocksDB cannot read from a log without
    /// opening the database for writing.
    ///
    /// # Errors
    /// The error that ended the writing earlier, if one did.
    pub async fn close(&self) -> Result<()> {
        let state = &self.0;
        state.leave();
        let some_wait = !state.flushes.waiting.borrow().is_empty() && state.blobs.are_in_logs();
        if (!state.blobs.unflushed().is_empty() || some_wait) && !state.has_failed() {
            // What cannot be flushed stays in the log.
            let _ = timeout(&state.core, FLUSH_NS, pin!(self.flush())).await;
        }
        self.hand_over().await
    }

    /// As [`Writer::close`], but all writes stay in the log: for a successor that opens the
    /// database at once.
    ///
    /// # Errors
    /// Those of [`Writer::close`].
    pub async fn hand_over(&self) -> Result<()> {
        self.0.close().await;
        self.failure().map_or(Ok(()), Err)
    }
}

/// Flushes the logs that were recovered. Such a log may hold a group that was written and not
/// flushed when its process was killed. Readers see it from now on, so a power cut must not take it
/// back.
async fn sync_logs(dir: &Dir, logs: &[u64]) -> Result<()> {
    for &number in logs {
        let name = FileName::Wal(number).to_string();
        dir.sync_file(&name).await.map_err(|error| Error::io(&name, &error))?;
    }
    Ok(())
}
