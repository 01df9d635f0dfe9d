//! The commit task: takes requests in their order, writes batches to the log in groups, and applies
//! them to the memtables. `writer.rs` tells the whole path of a write.
//!
//! After a failed write or flush of the log, any part of the group may be on the disk, and another
//! flush of the file would prove nothing. The log is given up:
//!
//! 1. The memtables, which hold all acknowledged writes of the log, become a generation that waits
//!    to be flushed; no log takes the place of the old one yet ([`Commit::give_up_log`]).
//! 2. Once a change of the MANIFEST has made the old log obsolete, no recovery finds the group any
//!    more ([`Commit::heal`]).
//! 3. A new log begins, and the group is written to it. If that fails, too, the group is refused
//!    after step 2: it is not there and will not be.
//!
//! If tables or the MANIFEST cannot be written either, the fate of the group stays unknown, and its
//! callers are told so. Everything after it is refused until step 2 succeeds.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memtable::Reserve;
use rocksfmt::{FileName, ManifestReplay, VersionEdit, WriteBatch};

use crate::durability::Durability;
use crate::error::{Error, Kind, Result};
use crate::file_list::{FileList, FilePrefix};
use crate::mem::live::{LiveWriter, TOMBSTONES_MAX};
use crate::mutant::mutant;
use crate::options::WriteOptions;
use crate::version::Version;
use crate::write::blob_garbage;
use crate::write::conflict::{self, GroupKeys};
use crate::write::ingest::{self, Ingesting};
use crate::write::job;
use crate::write::live_files::Listed;
use crate::write::retry::{self, Task};
use crate::write::state::{Generation, Pending, Request, WriteState};
use crate::write::wal_writer::{EmptyLog, NewLog, NotCreated, WalWriter};

/// Most bytes of batches in a group of more than one.
pub(crate) const GROUP_BYTES: usize = 512 << 10;
/// Most space that a log reserves on the disk when it is begun, in bytes.
const LOG_ROOM_MAX: u64 = 64 << 20;
/// Logs to which a group is written before it is refused.
const LOG_TRIES: u32 = 2;
/// Memtables that hold less memory than this are never full.
const MEMTABLES_SMALL: usize = 1 << 20;
/// Writes wait while memtables of at most these bytes become the anchor of a blob file.
const ANCHOR_WAIT_BYTES: usize = 8 << 20;

/// Commits until writing ends. `log` is `None` if the disk had no space for one.
pub(crate) async fn run(state: &Rc<WriteState>, log: Option<WalWriter>) {
    let live = new_memtables(state);
    let mut commit = Commit { state, log, keys: Some(0), live, began: 0, failure: None };
    let mut group = Vec::new();
    // Records that recovery skipped after a gap must never become contiguous with new ones.
    let mut waits = state.options.durability == Durability::Power || state.db.0.leftovers;
    // The memtables could not become tables when nothing was written.
    let mut stuck = false;
    loop {
        let idle = || state.queue.requests.borrow().is_empty();
        let ends = || state.is_closing() || state.has_failed();
        let switches = || !stuck && (commit.is_dense() || commit.is_awaited());
        state.queue.arrived.wait_until(|| !idle() || ends() || switches()).await;
        if idle() && ends() {
            return;
        }
        if idle() && commit.live.values().all(LiveWriter::is_empty) {
            // Its files refer to nothing, and nothing refers to the open blob files.
            state.blobs.release(&state.db);
            state.changed.notify_all();
            continue;
        }
        if idle() {
            // Perhaps nobody writes any more. Scans pass all of the tombstones for which level 0
            // has room now, and a merge waits for the table.
            stuck = commit.switch_memtables().await.is_err();
            continue;
        }
        stuck = false;
        // A clearing does not depend on recovered writes, and makes room for their table.
        let clears = state.queue.requests.borrow().front().is_some_and(|r| r.clears().is_some());
        let done = match waits && !clears {
            true => commit.wait_for_durable_recovery().await.map(|()| waits = false),
            false => Ok(()),
        };
        let done = match done {
            Ok(()) => commit.next(&mut group).await,
            Err(error) => Err(error),
        };
        match done {
            Ok(mut sequence) => {
                job::fill_reserve(state);
                for pending in group.drain(..) {
                    if let Request::Batch { batch, .. } = &pending.request {
                        sequence += u64::from(batch.count());
                    }
                    pending.done.set(Ok(sequence));
                }
                // Writers just acknowledged often submit again at once. Without this turn of the
                // core the next group, which costs a flush, would have half the writers, and each
                // writer would wait for two groups.
                if state.options.durability == Durability::Power {
                    state.core.yield_now().await;
                }
            }
            Err(error) if error.is_transient() => state.refuse(&mut group, &error),
            Err(error) => {
                for pending in group.drain(..) {
                    pending.done.set(Err(error.clone()));
                }
                state.fail(&error);
                return;
            }
        }
    }
}

/// The space that a log reserves when it is begun, in bytes: about what fills the memtables, and
/// some for the group that ends it.
pub(crate) fn log_room(options: &WriteOptions) -> u64 {
    (options.memtable_bytes as u64).min(LOG_ROOM_MAX) + (64 << 10)
}

/// The first log after an opening, or after one that has failed. A log that an earlier process
/// recycled is left for clearings, if the disk has space for another one.
pub(crate) async fn first_log(state: &WriteState) -> std::result::Result<WalWriter, NotCreated> {
    match new_log(state, 1).await {
        Err(NotCreated { error, .. }) if error.kind() == Kind::Full => new_log(state, 0).await,
        done => done,
    }
}

/// Begins a log: the one that was made ahead, if there is one, else a new one. Leaves at least
/// `kept` recycled logs.
async fn new_log(state: &WriteState, kept: usize) -> std::result::Result<WalWriter, NotCreated> {
    let empty = match state.take_next_log().await {
        Some(empty) => empty,
        None => empty_log(state, kept)
            .await
            .map_err(|error| NotCreated { error, may_be_there: false })?,
    };
    empty.begin(&state.dir, state.db.visible() + 1).await
}

/// Makes a log without records. Leaves at least `kept` recycled logs.
pub(crate) async fn empty_log(state: &WriteState, kept: usize) -> Result<EmptyLog> {
    let number = state.db.new_number();
    if number > u32::MAX.into() {
        let text = format!("no number is left for a log: {number} has more than 32 bits");
        return Err(Error::new(Kind::Unsupported, text));
    }
    let new = NewLog {
        number,
        recycled: {
            let mut recycled = state.obsolete.recycled_logs.borrow_mut();
            if recycled.len() > kept { recycled.pop() } else { None }
        },
        emptied: !state.db.0.stored_options.take_old_records_for_the_end(),
        durability: state.options.durability,
        room: log_room(&state.options),
    };
    EmptyLog::make(&state.core, &state.dir, new).await
}

pub(crate) struct Commit<'a> {
    pub state: &'a WriteState,
    /// `None` before the first group, if the opening found no space for a log.
    pub log: Option<WalWriter>,
    /// The change of the number of keys by the log's batches, if it is known.
    keys: Option<i64>,
    /// The memtables that are written to, by column family.
    pub live: BTreeMap<u32, LiveWriter>,
    /// When the first write went to these memtables, in Unix seconds; 0 before it.
    began: u64,
    /// Why the last log was given up, until it is obsolete.
    failure: Option<Error>,
}

impl Commit<'_> {
    /// Waits until recovered writes are in a table. They are not known to be durable: after a
    /// failed flush the page cache shows bytes that no later flush writes. If a power cut took
    /// them, writes acknowledged after them would follow a gap.
    ///
    /// # Errors
    /// [`Kind::Full`] if the flush cannot make progress.
    async fn wait_for_durable_recovery(&self) -> Result<()> {
        let state = self.state;
        let durable = mutant("recovered_is_durable") && !state.db.0.leftovers;
        let done = || state.flushes.done.get() > 0 || durable;
        let stuck = || state.retries.flush_error().is_some();
        state.changed.wait_until(|| done() || state.has_failed() || stuck()).await;
        if !done() && !state.has_failed() { Err(state.refusal()) } else { Ok(()) }
    }

    /// Takes the next group of requests and does it. Returns the sequence number that was visible
    /// before.
    async fn next(&mut self, group: &mut Vec<Pending>) -> Result<u64> {
        let state = self.state;
        let is_batch = matches!(
            state.queue.requests.borrow().front(),
            Some(Pending { request: Request::Batch { .. }, .. })
        );
        if is_batch && self.is_full() {
            state.wait_for_headroom().await?;
            // The last recycled log is for clearings, which must work on a full disk.
            self.begin_log(1).await?;
        }
        if is_batch && self.wants_anchor() {
            self.make_anchor().await?;
        }
        if is_batch {
            state.flushes.filled.set(self.fill());
            state.make_next_log(self.log.is_some());
            state.delay().await;
        }
        take_group(state, group);
        let visible = state.db.visible();
        match group.first().map(|first| &first.request) {
            Some(Request::Batch { .. }) => self.commit(group).await?,
            Some(Request::Clear(_)) => {
                let mut ids: Vec<u32> = group.iter().filter_map(Pending::clears).collect();
                ids.sort_unstable();
                ids.dedup();
                state.flushes.known_from.set(visible);
                self.clear(&ids).await?;
            }
            Some(Request::Sync) => {
                let forerunner = state.forerunner.borrow().clone();
                if let Some(forerunner) = forerunner {
                    forerunner.sync().await.map_err(refused)?;
                }
                self.sync().await?;
            }
            Some(Request::SwitchMemtables) => match self.switch_memtables().await {
                Err(error) if error.kind() == Kind::Full => {}
                done => done?,
            },
            Some(Request::Ingest(ingesting)) => {
                let ingesting = ingesting.clone();
                self.ingest(&ingesting).await?;
                state.flushes.known_from.set(state.db.visible());
            }
            Some(Request::ListFiles(answer)) => {
                let listed = self.list_files().await;
                answer.replace(Some(listed));
            }
            Some(Request::Create { name, comparator }) => {
                let created = self.create_family(name, *comparator).await.map(u64::from);
                answer(group, created)?;
            }
            Some(&Request::Drop(family)) => {
                let dropped = self.drop_family(family).await.map(|()| visible);
                answer(group, dropped)?;
            }
            None => {}
        }
        Ok(visible)
    }

    /// Writes a group of batches to the log, applies it and makes it visible.
    async fn commit(&mut self, group: &mut [Pending]) -> Result<()> {
        let state = self.state;
        if state.holds_writes() {
            return Err(state.refusal());
        }
        let bytes: u64 = batches(group).map(|batch| batch.0.len() as u64).sum();
        self.heal().await?;
        let met = state.met_references(group)?;
        if !met.is_empty() {
            self.flush_all().await?;
            state.blobs.operands.note_flushed(met);
        }
        self.reserve(group.len() as u64, bytes).await?;
        // Once, whatever happens to the log.
        state.store_large_values(group).await?;
        let to_tables = batches(group).map(|batch| batch.0.len() as u64).sum();
        state.paces.note_group(bytes, to_tables);
        let first = state.db.visible() + 1;
        self.run_ahead(group, first).await?;
        let mut tries = 0;
        let next = loop {
            self.heal().await?;
            self.reserve(group.len() as u64, bytes).await?;
            let error = match self.write_log(group, first).await {
                Ok(next) => break next,
                Err(error) => error,
            };
            self.give_up_log(error.clone()).await?;
            tries += 1;
            if tries == LOG_TRIES {
                state.note_failure(Task::Log, &error);
                return Err(state.refusal());
            }
        };
        // A group that is in the log must become visible.
        self.apply(group, first).map_err(|e| Error::new(Kind::Corruption, e.to_string()))?;
        state.db.0.sequence.store(next - 1, Ordering::Release);
        Ok(())
    }

    /// Lets the forerunner run before a group that has notes for it.
    async fn run_ahead(&self, group: &mut [Pending], first: u64) -> Result<()> {
        let (mut notes, mut next) = (Vec::new(), first);
        for pending in group {
            if let Request::Batch { batch, note, .. } = &mut pending.request {
                notes.extend(note.take().map(|note| (next, note)));
                next += u64::from(batch.count());
            }
        }
        let forerunner = self.state.forerunner.borrow().clone();
        match forerunner.filter(|_| !notes.is_empty()) {
            Some(forerunner) => forerunner.run(notes).await.map_err(refused),
            None => Ok(()),
        }
    }

    /// Writes a group to the log, which has room for it. Its first sequence is `first`. Returns the
    /// sequence after the group.
    async fn write_log(&mut self, group: &mut [Pending], first: u64) -> Result<u64> {
        let Some(log) = &mut self.log else { unreachable!("it has room for the group") };
        let mut next = first;
        let mut bytes = 0;
        for batch in batches(group) {
            log.add(batch.0.finish(next));
            next += u64::from(batch.0.count());
            bytes += batch.0.len() as u64;
        }
        if mutant("acknowledge_first") {
            group.iter().for_each(|pending| pending.done.set(Ok(next - 1)));
        }
        let log_bytes = log.commit(next).await?;
        self.state.count(|stats| {
            stats.groups += 1;
            stats.batch_bytes += bytes;
            stats.log_bytes += log_bytes;
        });
        Ok(next)
    }

    /// Applies a group to the memtables.
    fn apply(&mut self, group: &mut [Pending], first: u64) -> Result<()> {
        let state = self.state;
        let reserve = &mut *state.reserve.chunks.borrow_mut();
        if self.began == 0 {
            self.began = state.core.unix_time_ms() / 1000;
        }
        let mut sequence = first;
        let mut change = Some(0i64);
        for (batch, new) in batches(group) {
            apply(batch.finish(sequence), &mut self.live, reserve)?;
            sequence += u64::from(batch.count());
            change = change.zip(new).and_then(|(all, new)| all.checked_add(new));
            state.count(|stats| stats.batches += 1);
        }
        self.keys = self.keys.zip(change).and_then(|(all, new)| all.checked_add(new));
        let keys = state.db.keys().zip(change);
        state.db.set_keys(keys.and_then(|(all, new)| all.checked_add_signed(new)));
        Ok(())
    }

    /// Whether the memtables are full. Memory counts, because small entries take much more than
    /// their bytes. Bytes count too, because many families reserve memory that they do not use, and
    /// memtables of few bytes would become many small tables. Range tombstones count, because every
    /// get searches those of a memtable.
    fn is_full(&self) -> bool {
        self.fill() >= 1.0 || self.is_dense()
    }

    /// Whether a memtable is full of tombstones, and a merge can take them to what they delete
    /// soon: level 0 has no dense table that still waits, or stays because its merge would not pay.
    fn is_dense(&self) -> bool {
        let mut dense = self.live.iter().filter(|(_, writer)| writer.is_dense()).peekable();
        if dense.peek().is_none() || !self.state.flushes.waiting.borrow().is_empty() {
            return false;
        }
        let version = self.state.db.version();
        dense.any(|(&id, _)| {
            let family = version.families.find(id);
            let level0 = family.and_then(|family| family.levels.first());
            level0.is_none_or(|level0| level0.dense().is_empty())
        })
    }

    /// Whether a merge that leaves nothing waits until the memtables are tables, or, if they are
    /// empty, until blob files are out of use.
    fn is_awaited(&self) -> bool {
        self.state.blobs.wants_flush.get() && self.state.flushes.waiting.borrow().is_empty()
    }

    /// Whether the memtables are to become tables now, so that a blob file has an anchor.
    fn wants_anchor(&self) -> bool {
        let state = self.state;
        state.blobs.wants_anchor.get()
            && self.failure.is_none()
            && state.retries.flush_error().is_none()
            && self.live.values().any(|writer| !writer.is_empty())
            && (state.flushes.waiting.borrow().is_empty() || self.are_small())
    }

    /// Whether all memtables become tables soon.
    fn are_small(&self) -> bool {
        let waiting = self.state.flushes.waiting.borrow();
        let waiting = waiting.iter().flat_map(|generation| &generation.mems);
        let bytes: usize = waiting.map(|(_, mem)| mem.memory()).sum();
        let live: usize = self.live.values().map(LiveWriter::bytes).sum();
        bytes + live <= ANCHOR_WAIT_BYTES
    }

    /// Makes tables of the memtables. Waits for small ones: meanwhile, values would go to tables
    /// that are to be in a blob file. If they cannot be written, writes go on without.
    async fn make_anchor(&mut self) -> Result<()> {
        let (state, are_small) = (self.state, self.are_small());
        match self.switch_memtables().await {
            // The disk has no space for a log, and the group may need none.
            Err(error) if error.kind() == Kind::Full => return Ok(()),
            begun => begun?,
        }
        if are_small {
            let done = || state.flushes.waiting.borrow().is_empty();
            let stuck = || state.retries.flush_error().is_some();
            state.changed.wait_until(|| done() || state.has_failed() || stuck()).await;
        }
        state.failure().map_or(Ok(()), Err)
    }

    /// How full the memtables are.
    fn fill(&self) -> f64 {
        let sum = |of: fn(&LiveWriter) -> usize| -> usize { self.live.values().map(of).sum() };
        let limit = self.state.memtable_bytes();
        let blobs = &self.state.blobs;
        let log = self.log.as_ref().map(WalWriter::number);
        let values_wait = log.is_some_and(|log| blobs.has_failed(log));
        if (blobs.wants_flush.get() || values_wait) && sum(LiveWriter::bytes) > 0 {
            return 1.0;
        }
        let memory = sum(LiveWriter::memory);
        let part = |bytes: usize, limit: usize| bytes as f64 / limit.max(1) as f64;
        let memory_part = part(memory.max(MEMTABLES_SMALL), limit);
        let bytes_part = part(sum(LiveWriter::bytes), limit / 4);
        let tombstones = self.live.values().map(LiveWriter::range_tombstones).max();
        // Merges find the garbage of blob files only once the references are in tables.
        let blobs_max = self.state.blob_generation_bytes(limit as u64);
        let blobs =
            self.state.blobs.unflushed().values().sum::<u64>() as f64 / blobs_max.max(1) as f64;
        part(memory, 2 * limit.max(MEMTABLES_SMALL))
            .max(blobs)
            .max(memory_part.min(bytes_part))
            .max(part(tombstones.unwrap_or(0), TOMBSTONES_MAX))
    }

    /// Makes sure that the log has room for a group.
    async fn reserve(&mut self, batches: u64, bytes: u64) -> Result<()> {
        let state = self.state;
        if self.log.is_none() && state.log_backs_off().is_none() {
            let first = first_log(state).await.map_err(|not| not.error);
            self.log = Some(self.note(first)?);
        }
        let Some(log) = &mut self.log else { return Err(state.refusal()) };
        if log.has_room(batches, bytes) {
            // Not before the pause is over: large and small groups may alternate.
            if state.retries.error(Task::Log).is_some() && state.log_backs_off().is_none() {
                state.note_success(Task::Log);
            }
            return Ok(());
        }
        if state.log_backs_off().is_some() {
            return Err(state.refusal());
        }
        let reserved = log.reserve(batches, bytes).await;
        self.note(reserved)
    }

    /// Notes whether a log could be created, or could grow.
    fn note<T>(&self, result: Result<T>) -> Result<T> {
        let state = self.state;
        match &result {
            Ok(_) => state.note_success(Task::Log),
            Err(error) if error.kind() == Kind::Full => state.note_full(Task::Log, error),
            Err(error) if error.is_transient() => state.note_failure(Task::Log, error),
            Err(_) => return result,
        }
        result.map_err(|_| state.refusal())
    }

    /// Begins a new log and new memtables. The old ones wait to become tables.
    async fn begin_log(&mut self, kept_recycled: usize) -> Result<()> {
        let state = self.state;
        debug_assert!(
            self.failure.is_none(),
            "the last log must be obsolete before the next begins"
        );
        if kept_recycled > 0 && state.log_backs_off().is_some() {
            return Err(state.refusal());
        }
        match new_log(state, kept_recycled).await {
            Ok(new) => {
                state.note_success(Task::Log);
                self.end_log(Some(new));
                Ok(())
            }
            Err(NotCreated { error, may_be_there }) => {
                if may_be_there {
                    state.discard_next_log().await;
                    // Recovery would find the present log to go on after the end of this one.
                    self.end_log(None);
                }
                self.note(Err(error))
            }
        }
    }

    /// Ends the log, if there is one, and begins new memtables. The old ones wait to become tables.
    /// Without a new log none may have been made ahead: its number is smaller than that from which
    /// on logs are needed.
    fn end_log(&mut self, new: Option<WalWriter>) {
        let state = self.state;
        let durability = state.options.durability;
        let next_log = new.as_ref().map_or_else(|| state.db.new_number(), WalWriter::number);
        let Some(log) = std::mem::replace(&mut self.log, new) else { return };
        state.count(|stats| stats.logs += 1);
        let version = state.db.version();
        let mems = version
            .families
            .iter()
            .filter(|family| self.live.contains_key(&family.id))
            .filter_map(|family| Some((family.id, family.mems.first()?.clone())))
            .collect();
        self.live = new_memtables(state);
        let log_number = Some(log.number());
        let keys = self.keys.replace(0);
        let log = (durability == Durability::Process).then(|| log.into_file());
        let last_sequence = state.db.visible();
        let began = std::mem::take(&mut self.began);
        let log_failed = self.failure.is_some();
        let blob_bytes = state.blobs.unflushed().clone();
        let generation = Generation {
            mems,
            log_number,
            log_failed,
            keys,
            log,
            next_log,
            last_sequence,
            began,
            blob_bytes,
        };
        state.flushes.waiting.borrow_mut().push_back(generation);
        let are_full = !state.blobs.wants_anchor.get();
        state.paces.begin_memtables(state.core.now_ns(), are_full);
        state.blobs.begin_memtables();
        state.set_paces();
        state.changed.notify_all();
    }

    /// Gives up a log that could not be written, and waits until it is obsolete: then it is as if
    /// what failed had never been tried.
    ///
    /// # Errors
    /// [`Kind::Io`] if that is not known: tables or the MANIFEST cannot be written either.
    async fn give_up_log(&mut self, error: Error) -> Result<()> {
        let state = self.state;
        state.note_broken_log(&error);
        self.failure = Some(error.clone());
        let failed_log = self.log.as_ref().map(WalWriter::number);
        if !mutant("next_log_outlives_failure") {
            state.discard_next_log().await;
        }
        self.end_log(None);
        if mutant("broken_log_goes_first")
            && let Some(number) = failed_log
        {
            let _ = state.dir.remove(&FileName::Wal(number).to_string()).await;
        }
        let Err(stuck) = self.heal().await else { return Ok(()) };
        if mutant("unknown_is_refused") {
            return Err(stuck);
        }
        let text = format!(
            "{error}; it is unknown whether this write will be there after a crash, because the log \
             cannot be replaced yet: {stuck}"
        );
        Err(Error::new(Kind::Io, text))
    }

    /// After a log was given up, waits until it is obsolete.
    ///
    /// # Errors
    /// [`Kind::Full`] if tables or the MANIFEST cannot be written.
    async fn heal(&mut self) -> Result<()> {
        let state = self.state;
        if self.failure.is_none() {
            return Ok(());
        }
        let done = || state.flushes.waiting.borrow().is_empty() || mutant("heals_at_once");
        let stuck = || state.retries.flush_error().is_some();
        state.changed.wait_until(|| done() || stuck() || state.has_failed()).await;
        match state.failure() {
            Some(error) => return Err(error),
            None if !done() => return Err(state.refusal()),
            None => {}
        }
        self.failure = None;
        state.note_healed_log();
        Ok(())
    }

    /// Removes all writes of column families. One change of the MANIFEST leaves them without
    /// tables, and makes their logs begin with a new one. If the present log is empty, it serves as
    /// the new one: that needs no space.
    async fn clear(&mut self, ids: &[u32]) -> Result<()> {
        let state = self.state;
        if self.live.values().any(|writer| !writer.is_empty()) {
            self.begin_log(0).await?;
        }
        // If there is no log yet, it will get a larger number.
        let first_log = self.log.as_ref().map_or_else(|| state.db.new_number(), WalWriter::number);
        let turn = state.manifest_turn().await?;
        let version = state.db.version();
        let mut slots = Vec::new();
        let mut edits = Vec::new();
        for &id in ids {
            let levels = version.family(id)?.levels.iter();
            slots.extend(levels.flat_map(|level| level.slots.iter().copied()));
            let edit = clearing(&version, turn.state(), id)?;
            edits.push(VersionEdit {
                log_number: Some(first_log),
                last_sequence: Some(state.db.visible()),
                ..edit
            });
        }
        let changed = turn.change(edits, |version| {
            for &slot in &slots {
                version.slots.free(slot);
            }
            for &id in ids {
                let Some(family) = version.families.find_mut(id) else { continue };
                family.mems.truncate(1);
                family.levels.fill_with(Arc::default);
            }
        });
        if let Err(error) = changed.await {
            state.hold_writes();
            return match state.holds_writes() {
                _ if !error.is_transient() => Err(error),
                true => Err(unknown_clearing(&error)),
                false => Err(retry::refused(&error)),
            };
        }
        state.cleared.borrow_mut().extend(ids.iter().map(|&id| (id, first_log)));
        ids.iter().for_each(|&id| state.blobs.clear_family(id));
        state.db.0.clears.fetch_add(1, Ordering::SeqCst);
        if ids.contains(&0) {
            state.keys_in_tables.set(Some(0));
            state.db.set_keys(Some(0));
        }
        state.remove_tables(slots.iter().map(|&slot| version.meta(slot)));
        // A flush that waits for space has less to write now.
        state.note_success(Task::Flush);
        state.note_removal();
        Ok(())
    }

    /// Begins new memtables, unless the present ones are empty.
    async fn switch_memtables(&mut self) -> Result<()> {
        if self.live.values().all(|writer| writer.is_empty()) {
            return Ok(());
        }
        self.state.wait_for_memtables().await?;
        self.begin_log(1).await
    }

    /// Adds finished tables.
    async fn ingest(&mut self, ingesting: &RefCell<Ingesting>) -> Result<()> {
        let state = self.state;
        let ready = async {
            // A group of unknown fate in a log that failed would be newer than the tables.
            if !mutant("ingestion_passes_broken_log") {
                self.heal().await?;
            }
            match ingest::needs_flush(state, ingesting)? {
                true if !mutant("ingestion_passes_memtables") => self.flush_all().await,
                _ => Ok(()),
            }
        };
        match ready.await {
            Err(error) if [Kind::Full, Kind::UnknownColumnFamily].contains(&error.kind()) => {
                return ingest::refuse(ingesting, error);
            }
            ready => ready?,
        }
        // If there is no log yet, it will get a larger number.
        let log = self.log.as_ref().map_or_else(|| state.db.new_number(), WalWriter::number);
        ingest::install(state, log, ingesting).await
    }

    /// Writes all memtables to tables. Until then no group is written.
    ///
    /// # Errors
    /// [`Kind::Full`] if that cannot make progress.
    async fn flush_all(&mut self) -> Result<()> {
        self.switch_memtables().await?;
        let state = self.state;
        let done = || state.flushes.waiting.borrow().is_empty();
        let stuck = || state.retries.flush_error().is_some();
        state.changed.wait_until(|| done() || state.has_failed() || stuck()).await;
        if !done() && !state.has_failed() { Err(state.refusal()) } else { Ok(()) }
    }

    /// The files that hold the database as it is now. No task changes the MANIFEST meanwhile, and
    /// this one alone writes logs: so tables and logs fit together.
    async fn list_files(&mut self) -> Result<Listed> {
        let state = self.state;
        // A log that failed may hold a group that must not be copied.
        self.heal().await?;
        let forerunner = state.forerunner.borrow().clone();
        let within = match forerunner {
            Some(forerunner) => forerunner.live_files().await.map_err(refused)?,
            None => None,
        };
        self.sync_blob_files().await?;
        let turn = state.manifest_turn().await?;
        let Some(manifest) = turn.file() else {
            let what = "the disk has no space for a new MANIFEST, which the opening needs";
            return Err(Error::new(Kind::Full, what));
        };
        let whole = |number| FilePrefix { number, bytes: None };
        let mut logs = Vec::new();
        for generation in &*state.flushes.waiting.borrow() {
            match generation.log_number {
                Some(number) => logs.push(whole(number)),
                None => logs.extend(state.db.0.recovered_logs.iter().copied().map(whole)),
            }
        }
        logs.extend(self.log.as_ref().map(WalWriter::written));
        // A log may be obsolete already and its generation still on the list.
        let first = turn.state().min_log_number_to_keep();
        logs.retain(|log| log.number >= first && log.bytes != Some(0));
        let sequence = state.db.visible();
        let open_blobs = state.blobs.prefixes();
        let directory = state.dir.path().to_owned();
        let files = within.as_ref().map(|within| Box::new(within.list().clone()));
        let list = FileList { directory, sequence, manifest, logs, open_blobs, within: files };
        Ok((list, within))
    }

    /// Makes all values in blob files durable to which logs refer. If that fails, all memtables
    /// become tables.
    async fn sync_blob_files(&mut self) -> Result<()> {
        self.state.sync_blob_files().await;
        match self.state.blobs.failed().is_empty() {
            true => Ok(()),
            false => self.flush_all().await,
        }
    }

    /// Makes logs durable that are not flushed with every group. If that fails, their writes become
    /// durable as tables.
    async fn sync(&mut self) -> Result<()> {
        if self.state.options.durability == Durability::Power {
            return Ok(());
        }
        self.wait_for_durable_recovery().await?;
        if let Some(error) = self.state.failure() {
            // Recovered writes are in no table, and their logs may not be durable.
            return Err(error);
        }
        self.heal().await?;
        self.sync_blob_files().await?;
        let older: Vec<_> = {
            let waiting = self.state.flushes.waiting.borrow();
            waiting.iter().filter_map(|waiting| waiting.log.clone()).collect()
        };
        for file in older.iter().chain(self.log.as_ref().map(WalWriter::file)) {
            if let Err(error) = file.sync_data().await {
                let error = Error::io(file.path().display(), &error).in_part();
                return self.give_up_log(error).await;
            }
        }
        Ok(())
    }
}

/// The error of a clearing when a write of the MANIFEST has failed.
fn unknown_clearing(error: &Error) -> Error {
    let text = format!("{error}; it is unknown whether this clearing will be done after a crash");
    Error::new(Kind::Io, text)
}

/// The edit that removes all tables of a column family, and all values in its blob files.
fn clearing(version: &Version, manifest: &ManifestReplay, id: u32) -> Result<VersionEdit> {
    let levels = version.family(id)?.levels.iter().enumerate();
    let tables = levels.flat_map(|(at, level)| level.slots.iter().map(move |&slot| (at, slot)));
    Ok(VersionEdit {
        column_family: id,
        keys: (id == 0).then_some(0),
        deleted_files: tables.map(|(at, slot)| (at as u32, version.meta(slot).number)).collect(),
        blob_garbage: blob_garbage::all_alive(manifest, id),
        ..VersionEdit::default()
    })
}

/// The batches of a group, each with its change of the number of keys.
pub(crate) fn batches(
    group: &mut [Pending],
) -> impl Iterator<Item = (&mut rocksfmt::BatchWriter, Option<i64>)> {
    group.iter_mut().filter_map(|pending| match &mut pending.request {
        Request::Batch { batch, keys, .. } => Some((batch, *keys)),
        _ => None,
    })
}

/// The refusal of requests that a forerunner has failed.
fn refused(error: Error) -> Error {
    Error::new(Kind::Full, error.to_string())
}

/// Answers one request. An error that does not end writing concerns this request only.
fn answer(group: &[Pending], result: Result<u64>) -> Result<()> {
    let ends =
        |error: &&Error| matches!(error.kind(), Kind::Corruption | Kind::Locked | Kind::NoDatabase);
    if let Some(error) = result.as_ref().err().filter(ends) {
        return Err(error.clone());
    }
    group.iter().for_each(|pending| pending.done.set(result.clone()));
    Ok(())
}

/// Takes consecutive batches, or consecutive clearings, or one request of another kind.
fn take_group(state: &WriteState, group: &mut Vec<Pending>) {
    let mut queue = state.queue.requests.borrow_mut();
    let mut bytes = 0;
    let mut written = GroupKeys::default();
    while let Some(next) = queue.front() {
        let joins = match (group.first().map(|first| &first.request), &next.request) {
            (None, _) | (Some(Request::Clear(_)), Request::Clear(_)) => true,
            (Some(Request::Batch { .. }), Request::Batch { batch, .. }) => {
                bytes + batch.len() <= GROUP_BYTES
            }
            _ => false,
        };
        if !joins {
            return;
        }
        let Some(next) = queue.pop_front() else { return };
        if let Request::Batch { batch, condition, .. } = &next.request {
            let conflict = condition.as_ref().map(|condition| {
                let listed = written.listed;
                batches(group).skip(listed).try_for_each(|(batch, _)| written.list(batch))?;
                conflict::find(state, condition, &written).map_or(Ok(()), Err)
            });
            if let Some(Err(error)) = conflict {
                next.done.set(Err(error));
                continue;
            }
            bytes += batch.len();
        }
        group.push(next);
    }
}

/// Begins memtables for all column families that can be written, and publishes them.
fn new_memtables(state: &WriteState) -> BTreeMap<u32, LiveWriter> {
    let mut live = BTreeMap::new();
    state.db.publish(|version| {
        let shares = version.families.len();
        for at in 0..shares {
            if version.families[at].refused.is_some() {
                continue;
            }
            let family = version.families.at_mut(at);
            let (bytes, seed) = (state.options.memtable_bytes, state.core.random_u64());
            let (writer, mem) = LiveWriter::new(family.comparator, bytes, shares, seed);
            family.mems.insert(0, mem);
            live.insert(family.id, writer);
        }
    });
    live
}

/// Applies a batch to the memtables. It was checked, and memtables have no limit of their own.
fn apply(batch: &[u8], live: &mut BTreeMap<u32, LiveWriter>, reserve: &mut Reserve) -> Result<()> {
    let format = |e: rocksfmt::Error| Error::format("a batch", &e);
    for op in WriteBatch::parse(batch).map_err(format)?.ops() {
        let (sequence, op) = op.map_err(format)?;
        if let Some(writer) = op.column_family().and_then(|cf| live.get_mut(&cf)) {
            writer.apply(reserve, sequence, &op)?;
        }
    }
    Ok(())
}
