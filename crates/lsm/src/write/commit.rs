//! The commit task: takes what was handed over in its order, writes it to the log in groups and
//! then to the memtables. The module text of `writer.rs` has the whole.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memtable::Reserve;
use rocksfmt::{Op, ValueType, VersionEdit, WriteBatch, pack};

use crate::durability::Durability;
use crate::error::{Error, Kind, Result};
use crate::mem::Mem;
use crate::mutant::mutant;
use crate::options::WriteOptions;
use crate::version::{Level, Slot};
use crate::write::blob_garbage;
use crate::write::job;
use crate::write::space::Task;
use crate::write::wal_writer::{NewLog, WalWriter};
use crate::write::writer::{Generation, Inner, Pending, Request};

/// Bytes of batches that go to the log together, as long as there is more than one.
const GROUP_BYTES: usize = 512 << 10;
/// Room that a log gets beforehand, in bytes: about what fills the memtables, but not more.
const LOG_ROOM_MAX: u64 = 64 << 20;
/// Generations of memtables that may wait for their tables.
const WAITING_MAX: usize = 2;
/// Below it the memory that memtables reserve says little: their bytes alone decide.
const MEMTABLES_SMALL: usize = 1 << 20;
/// Files of level 0 from which on writes come no faster than merging gets on.
const LEVEL0_FILES_SLOW: usize = 16;
/// Files of level 0 at which writes wait: reads ask each of them, and RocksDB stops its writers at
/// 36.
const LEVEL0_FILES_MAX: usize = 24;
/// Longest that a group is held back, in nanoseconds.
const SLOWED_MAX_NS: u64 = 100_000_000;

/// Commits until writing ends.
/// `log` is `None` where there was no room for one.
pub(crate) async fn run(inner: &Rc<Inner>, log: Option<WalWriter>) {
    let mut commit = Commit { inner, log, keys: Some(0), live: new_memtables(inner) };
    let mut group = Vec::new();
    // Nor may what recovery left lying behind a hole be found together with what is written now.
    let mut waits = inner.options.durability == Durability::Power || inner.db.0.leftovers;
    loop {
        let idle = || inner.queue.borrow().is_empty();
        inner.queued.until(|| !idle() || inner.closing.get() || inner.has_failed()).await;
        if idle() {
            return;
        }
        // A clearing stands on nothing that was recovered, and makes room for its table.
        let clears = inner.queue.borrow().front().is_some_and(|first| first.clears().is_some());
        let done = match waits && !clears {
            true => commit.until_recovered_is_durable().await.map(|()| waits = false),
            false => Ok(()),
        };
        let done = match done {
            Ok(()) => commit.next(&mut group).await,
            Err(error) => Err(error),
        };
        match done {
            Ok(mut sequence) => {
                job::fill_reserve(inner);
                for pending in group.drain(..) {
                    if let Request::Batch { batch, .. } = &pending.request {
                        sequence += u64::from(batch.count());
                    }
                    pending.done.set(Ok(sequence));
                }
                // Who has waited for this group may have more to write at once. If the next group,
                // which costs a flush, did not wait for that, it would have half the writers, and
                // all would wait for two groups.
                if inner.options.durability == Durability::Power {
                    inner.core.yield_now().await;
                }
            }
            Err(error) if error.kind() == Kind::Full => inner.refuse(&mut group, &error),
            Err(error) => {
                for pending in group.drain(..) {
                    pending.done.set(Err(error.clone()));
                }
                inner.fail(&error);
                return;
            }
        }
    }
}

/// Bytes that a log has on the disk from the start.
pub(crate) fn log_room(options: &WriteOptions) -> u64 {
    // And for the end of what is just not too much.
    (options.memtable_bytes as u64).min(LOG_ROOM_MAX) + (64 << 10)
}

/// Makes a log. `kept` spare ones are left alone.
pub(crate) async fn new_log(inner: &Inner, kept: usize) -> Result<WalWriter> {
    let number = inner.db.new_number();
    if number > u32::MAX.into() {
        let text = format!("no number is left for a log: {number} has more than 32 bits");
        return Err(Error::new(Kind::Unsupported, text));
    }
    let new = NewLog {
        number,
        spare: {
            let mut spares = inner.spare_logs.borrow_mut();
            if spares.len() > kept { spares.pop() } else { None }
        },
        emptied: !inner.db.0.stored_options.take_old_records_for_the_end(),
        durability: inner.options.durability,
        room: log_room(&inner.options),
        next_sequence: inner.db.visible() + 1,
    };
    WalWriter::create(&inner.core, &inner.dir, new).await
}

struct Commit<'a> {
    inner: &'a Inner,
    /// `None` before the first group, if the opening found no room for it.
    log: Option<WalWriter>,
    /// By how many what is in the log changes the number of keys, if that is known.
    keys: Option<i64>,
    /// The memtables that are written to, by column family.
    live: BTreeMap<u32, memtable::Writer>,
}

impl Commit<'_> {
    /// What was recovered is not known to be durable: after a flush that failed, the page cache
    /// shows what no later flush writes. Were a power cut to take it, what is acknowledged on
    /// top of it would lie behind a hole. So it is written anew first, to a table.
    ///
    /// # Errors
    /// When there is no room for it.
    async fn until_recovered_is_durable(&self) -> Result<()> {
        let inner = self.inner;
        let durable = mutant("recovered_is_durable") && !inner.db.0.leftovers;
        let gone = || inner.gone.get() > 0 || durable;
        let full = || inner.space.why(Task::Flush).is_some();
        inner.moved.until(|| gone() || inner.has_failed() || full()).await;
        if !gone() && !inner.has_failed() { Err(inner.refusal()) } else { Ok(()) }
    }

    /// Takes what goes together and does it. Returns the sequence number that was visible before.
    async fn next(&mut self, group: &mut Vec<Pending>) -> Result<u64> {
        let inner = self.inner;
        let is_batch = matches!(
            inner.queue.borrow().front(),
            Some(Pending { request: Request::Batch { .. }, .. })
        );
        if is_batch && self.is_full() {
            self.until_there_is_room().await?;
            // The last one is for whoever clears the database, which must work on a full disk.
            self.begin_log(1).await?;
        }
        if is_batch {
            self.slow_down().await;
        }
        take_group(inner, group);
        let visible = inner.db.visible();
        match group.first().map(|first| &first.request) {
            Some(Request::Batch { .. }) => self.commit(group).await?,
            Some(Request::Clear(_)) => {
                let mut ids: Vec<u32> = group.iter().filter_map(Pending::clears).collect();
                ids.sort_unstable();
                ids.dedup();
                self.clear(&ids).await?;
            }
            Some(Request::Sync) => self.sync().await?,
            None => {}
        }
        Ok(visible)
    }

    /// Writes a group of batches.
    async fn commit(&mut self, group: &mut [Pending]) -> Result<()> {
        let inner = self.inner;
        let first = inner.db.visible() + 1;
        let mut next = first;
        let mut bytes: u64 = batches(group).map(|batch| batch.0.len() as u64).sum();
        self.reserve(group.len() as u64, bytes).await?;
        let Some(log) = &mut self.log else { unreachable!("it has room for the group") };
        bytes = 0;
        for batch in batches(group) {
            log.add(batch.0.finish(next));
            next += u64::from(batch.0.count());
            bytes += batch.0.len() as u64;
        }
        if mutant("acknowledge_first") {
            group.iter().for_each(|pending| pending.done.set(Ok(next - 1)));
        }
        let log_bytes = log.commit(next).await?;
        inner.stats(|stats| {
            stats.groups += 1;
            stats.batch_bytes += bytes;
            stats.log_bytes += log_bytes;
        });
        let reserve = &mut *inner.reserve.borrow_mut();
        let mut sequence = first;
        let mut change = Some(0i64);
        for (batch, new) in batches(group) {
            apply(batch.finish(sequence), &mut self.live, reserve)?;
            sequence += u64::from(batch.count());
            change = change.zip(new).and_then(|(all, new)| all.checked_add(new));
            inner.stats(|stats| stats.batches += 1);
        }
        self.keys = self.keys.zip(change).and_then(|(all, new)| all.checked_add(new));
        let keys = inner.db.keys().zip(change);
        inner.db.set_keys(keys.and_then(|(all, new)| all.checked_add_signed(new)));
        inner.db.0.sequence.store(next - 1, Ordering::Release);
        Ok(())
    }

    /// Small entries take much more memory than their bytes, and many families reserve much that
    /// they do not use; but memtables of a few bytes would be many small tables.
    fn is_full(&self) -> bool {
        let sum = |of: fn(&memtable::Memtable) -> usize| -> usize {
            self.live.values().map(|writer| of(writer.memtable())).sum()
        };
        let limit = self.inner.options.memtable_bytes;
        let memory = sum(memtable::Memtable::memory);
        memory >= 2 * limit.max(MEMTABLES_SMALL)
            || (memory.max(MEMTABLES_SMALL) >= limit && sum(memtable::Memtable::bytes) >= limit / 4)
    }

    /// Makes sure that the log has room for a group.
    async fn reserve(&mut self, batches: u64, bytes: u64) -> Result<()> {
        let inner = self.inner;
        if self.log.is_none() && inner.no_log_now().is_none() {
            self.log = Some(self.tried(inner.first_log().await)?);
        }
        let Some(log) = &mut self.log else { return Err(inner.refusal()) };
        if log.has_room(batches, bytes) {
            // Not at once: large and small groups may take turns.
            if inner.space.why(Task::Log).is_some() && inner.no_log_now().is_none() {
                inner.has_room(Task::Log);
            }
            return Ok(());
        }
        if inner.no_log_now().is_some() {
            return Err(inner.refusal());
        }
        let reserved = log.reserve(batches, bytes).await;
        self.tried(reserved)
    }

    /// Notes whether there was room for a log.
    fn tried<T>(&self, result: Result<T>) -> Result<T> {
        let inner = self.inner;
        match result {
            Err(error) if error.kind() == Kind::Full => {
                inner.is_full(Task::Log, &error);
                Err(inner.refusal())
            }
            result => {
                inner.has_room(Task::Log);
                result
            }
        }
    }

    async fn until_there_is_room(&self) -> Result<()> {
        let inner = self.inner;
        let many = || inner.waiting.borrow().len() >= WAITING_MAX;
        // Level 0 grows while merges fail: reads get slower, and writes go on.
        let long = || level0_files(inner) >= LEVEL0_FILES_MAX && !inner.space.fails(Task::Merge);
        let full = || many() || long();
        let in_vain = || {
            (many() && inner.space.why(Task::Flush).is_some())
                || (full() && !many() && inner.space.why(Task::Merge).is_some())
        };
        if full() {
            let since_ns = inner.core.now_ns();
            inner.moved.until(|| !full() || inner.has_failed() || in_vain()).await;
            let ns = inner.core.now_ns() - since_ns;
            tracing::debug!(
                level0 = level0_files(inner),
                ms = ns / 1_000_000,
                "writes stood still"
            );
            inner.stats(|stats| stats.stopped_ns += ns);
        }
        let failed = inner.failed.borrow().clone();
        if failed.is_none() && in_vain() {
            return Err(inner.refusal());
        }
        failed.map_or(Ok(()), Err)
    }

    /// Holds writes back while merging is behind, so that they are slow for a while rather than
    /// stand still in the end: as many bytes may come until the merge under way has ended as there
    /// is room for in level 0.
    async fn slow_down(&self) {
        let inner = self.inner;
        let files = level0_files(inner);
        if files < LEVEL0_FILES_SLOW {
            return;
        }
        let bytes: usize = {
            let queue = inner.queue.borrow();
            let batches = queue.iter().map_while(|pending| match &pending.request {
                Request::Batch { batch, .. } => Some(batch.len()),
                _ => None,
            });
            batches.take(GROUP_BYTES / 64).sum::<usize>().min(GROUP_BYTES)
        };
        let left_ns = match &*inner.progress.borrow() {
            Some(progress) => progress.left_ns(inner.core.now_ns()),
            None => return,
        };
        let room = LEVEL0_FILES_MAX.saturating_sub(files) * inner.options.memtable_bytes;
        let ns = u128::from(left_ns) * bytes as u128 / room.max(1) as u128;
        let ns = u64::try_from(ns).unwrap_or(u64::MAX).min(SLOWED_MAX_NS);
        inner.core.sleep_ns(ns).await;
        inner.stats(|stats| stats.slowed_ns += ns);
    }

    /// Begins a new log and new memtables; the old ones wait to become tables.
    async fn begin_log(&mut self, kept_spares: usize) -> Result<()> {
        let inner = self.inner;
        let durability = inner.options.durability;
        if kept_spares > 0 && inner.no_log_now().is_some() {
            return Err(inner.refusal());
        }
        let new = self.tried(new_log(inner, kept_spares).await)?;
        let next_log = new.number();
        let Some(log) = self.log.replace(new) else { return Ok(()) };
        inner.stats(|stats| stats.logs += 1);
        let version = inner.db.version();
        let mems = version
            .families
            .iter()
            .filter(|family| self.live.contains_key(&family.id))
            .filter_map(|family| Some((family.id, family.mems.first()?.clone())))
            .collect();
        self.live = new_memtables(inner);
        let log_number = Some(log.number());
        let keys = self.keys.replace(0);
        let log = (durability == Durability::Process).then(|| log.into_file());
        let last_sequence = inner.db.visible();
        let generation = Generation { mems, log_number, keys, log, next_log, last_sequence };
        inner.waiting.borrow_mut().push_back(generation);
        let now_ns = inner.core.now_ns();
        inner.fill_ns.set(now_ns.saturating_sub(inner.filled_at_ns.replace(now_ns)));
        inner.set_paces();
        inner.moved.ring();
        Ok(())
    }

    /// Removes all that column families have. From one change of the MANIFEST on they have no
    /// tables, and their logs begin with a new one. One in which nothing is will do: it needs no
    /// room.
    async fn clear(&mut self, ids: &[u32]) -> Result<()> {
        let inner = self.inner;
        if self.live.values().any(|writer| !writer.memtable().is_empty()) {
            self.begin_log(0).await?;
        }
        // Where there is no log yet, it gets a larger number.
        let first_log = self.log.as_ref().map_or_else(|| inner.db.new_number(), WalWriter::number);
        let turn = inner.manifest_turn().await?;
        let version = inner.db.version();
        let mut files = Vec::new();
        let mut edits = Vec::new();
        for &id in ids {
            let levels = version.family(id)?.levels.iter().enumerate();
            let of_family: Vec<(u32, u32)> = levels
                .flat_map(|(at, level)| level.slots.iter().map(move |&slot| (at as u32, slot)))
                .collect();
            let number = |&(level, slot): &(u32, u32)| (level, version.meta(slot).number);
            edits.push(VersionEdit {
                column_family: id,
                log_number: Some(first_log),
                last_sequence: Some(inner.db.visible()),
                keys: (id == 0).then_some(0),
                deleted_files: of_family.iter().map(number).collect(),
                blob_garbage: blob_garbage::all_alive(turn.state(), id),
                ..VersionEdit::default()
            });
            files.extend(of_family.into_iter().map(|(_, slot)| slot));
        }
        turn.change(edits, |version| {
            for &slot in &files {
                version.slots[slot as usize] = Slot::Free;
            }
            for family in version.families.iter_mut().filter(|family| ids.contains(&family.id)) {
                family.mems.truncate(1);
                family.levels.fill_with(Level::default);
            }
        })
        .await?;
        inner.cleared.borrow_mut().extend(ids.iter().map(|&id| (id, first_log)));
        inner.db.0.clears.fetch_add(1, Ordering::SeqCst);
        if ids.contains(&0) {
            inner.keys_in_tables.set(Some(0));
            inner.db.set_keys(Some(0));
        }
        inner.remove_tables(files.iter().map(|&slot| version.meta(slot)));
        // A flush that waits for space has less to write now.
        inner.has_room(Task::Flush);
        inner.space.has_grown();
        inner.moved.ring();
        Ok(())
    }

    /// Makes durable what is in logs that are flushed at no group's end.
    async fn sync(&self) -> Result<()> {
        if self.inner.options.durability == Durability::Power {
            return Ok(());
        }
        self.until_recovered_is_durable().await?;
        if let Some(error) = &*self.inner.failed.borrow() {
            // What was recovered is in no table, and of its logs nothing is known.
            return Err(error.clone());
        }
        let older: Vec<_> = {
            let waiting = self.inner.waiting.borrow();
            waiting.iter().filter_map(|waiting| waiting.log.clone()).collect()
        };
        for file in older.iter().chain(self.log.as_ref().map(WalWriter::file)) {
            let synced = file.sync_data().await;
            synced.map_err(|e| Error::io(file.path().display(), &e).for_good())?;
        }
        Ok(())
    }
}

/// The batches of a group, and by how many each changes the keys.
fn batches(
    group: &mut [Pending],
) -> impl Iterator<Item = (&mut rocksfmt::BatchWriter, Option<i64>)> {
    group.iter_mut().filter_map(|pending| match &mut pending.request {
        Request::Batch { batch, keys } => Some((batch, *keys)),
        Request::Clear(_) | Request::Sync => None,
    })
}

/// Batches that follow each other, or clearings that do, or one request of another kind.
fn take_group(inner: &Inner, group: &mut Vec<Pending>) {
    let mut queue = inner.queue.borrow_mut();
    let mut bytes = 0;
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
        if let Request::Batch { batch, .. } = &next.request {
            bytes += batch.len();
        }
        group.extend(queue.pop_front());
    }
}

/// New memtables for all column families that can be written, in the version that readers take.
fn new_memtables(inner: &Inner) -> BTreeMap<u32, memtable::Writer> {
    let mut live = BTreeMap::new();
    inner.db.publish(|version| {
        let shares = version.families.len();
        for family in version.families.iter_mut().filter(|family| family.refused.is_none()) {
            let (bytes, seed) = (inner.options.memtable_bytes, inner.core.random_u64());
            let (writer, table) = memtable::Memtable::share(family.comparator, bytes, shares, seed);
            family.mems.insert(0, Arc::new(Mem::Live(table)));
            live.insert(family.id, writer);
        }
    });
    live
}

/// Puts a batch into the memtables. It was checked, and they have no limit of their own.
fn apply(
    batch: &[u8],
    live: &mut BTreeMap<u32, memtable::Writer>,
    reserve: &mut Reserve,
) -> Result<()> {
    let format = |e: rocksfmt::Error| Error::format("a batch", &e);
    for op in WriteBatch::parse(batch).map_err(format)?.ops() {
        let (sequence, op) = op.map_err(format)?;
        let (cf, key, kind, value) = match op {
            Op::Put { cf, key, value } => (cf, key, ValueType::Value, value),
            Op::Delete { cf, key } => (cf, key, ValueType::Deletion, &b""[..]),
            _ => continue,
        };
        let Some(writer) = live.get_mut(&cf) else { continue };
        writer
            .insert_from(reserve, key, pack(sequence, kind as u8), value)
            .map_err(|e| Error::new(Kind::Memory, e.to_string()))?;
    }
    Ok(())
}

/// Files of level 0 that wait to be merged, of the family that has most.
pub(crate) fn level0_files(inner: &Inner) -> usize {
    inner.quarantine.level0_files(&inner.db.0.current.load())
}
