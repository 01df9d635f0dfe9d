//! The writing side of deadlines, on the shard's core.
//!
//! - [`Ledger::run`], the engine's [`Forerunner`], writes the records of a group of values before
//!   the group is written. A record then has an entry for each value of the group, and the newest
//!   one before, which may be that of the value that is still there.
//! - [`Ledger::due`] lists what has expired, in the order of deadlines; the shard removes these
//!   keys, each as a change of its key, and [`Ledger::settle`] then removes their records. Both run
//!   one at a time with `run`, because they read records and write them again.
//! - The database is made when the first deadline is written.

use std::cell::{Cell, OnceCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lsm::{BatchWriter, CfId, Forerunner, LiveFiles, Note, Reader, Writer};
use reactor::{Core, Event};

use crate::expiry::record::{
    Entry, after_due, decode, due_key, due_start, encode, ranges_of, record_key, run_entry,
};
use crate::expiry::{Deadline, Due, Expiry, RECORDS, due_from};

/// Records looked up together.
const TOGETHER: usize = 64;

/// What a batch says of its values with deadlines.
#[derive(Debug)]
pub(crate) struct Noted {
    /// The number of operations of the batch before the one that sets the value.
    pub at: u64,
    pub key: Vec<u8>,
    /// Hash of the value.
    pub hash: u64,
    pub deadline: Deadline,
}

/// The deadlines, for the shard. Clones are the same.
#[derive(Clone)]
pub(crate) struct Ledger(Rc<State>);

struct State {
    core: Core,
    family: CfId,
    shared: Arc<Expiry>,
    /// The database that the deadlines are about.
    main: Writer,
    values: Reader,
    records: OnceCell<(Reader, Writer)>,
    /// The next write of the main database begins a run.
    new_run: Cell<bool>,
    /// Records are being changed.
    busy: Cell<bool>,
    changed: Event,
}

/// The right to change records.
struct Turn<'a>(&'a State);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.busy.set(false);
        self.0.changed.notify_all();
    }
}

impl Ledger {
    /// `values` and `main` are those of the database that the deadlines are about.
    pub fn new(core: &Core, family: CfId, values: Reader, main: Writer) -> Self {
        let ledger = Self(Rc::new(State {
            core: core.clone(),
            family,
            shared: Arc::default(),
            main: main.clone(),
            values,
            records: OnceCell::new(),
            new_run: Cell::new(true),
            busy: Cell::new(false),
            changed: Event::new(),
        }));
        main.set_forerunner(Some(Rc::new(ledger.clone())));
        ledger
    }

    /// What the cores share.
    pub fn shared(&self) -> &Arc<Expiry> {
        &self.0.shared
    }

    /// Opens the deadlines that there are. Suspends for the disk.
    ///
    /// # Errors
    /// Those of [`Writer::open_within`].
    pub async fn open(&self) -> lsm::Result<()> {
        let _turn = self.0.turn().await;
        self.0.open(false).await
    }

    /// Whether the next batch must have a note, be it empty.
    pub fn must_note(&self) -> bool {
        self.0.new_run.get() && self.0.records.get().is_some()
    }

    /// There are deadlines from now on.
    pub fn begin(&self) {
        if !self.0.shared.any() {
            self.0.values.db().keep_sequences();
            self.0.shared.any.store(true, Ordering::Release);
            self.0.changed.notify_all();
        }
    }

    /// A write was refused: the sequences that records have named will be given to others.
    pub fn refused(&self) {
        self.0.new_run.set(true);
    }

    /// Suspends until there may be deadlines.
    pub async fn wait(&self) {
        self.0.changed.wait_until(|| self.0.shared.any() && self.0.records.get().is_some()).await;
    }

    /// Forgets all deadlines, because all keys were removed. Suspends until that is durable.
    pub async fn clear(&self) {
        let _turn = self.0.turn().await;
        let Some((_, writer)) = self.0.records.get() else { return };
        // The deadlines of other column families stay.
        let written = match self.0.values.db().column_families().len() {
            0 | 1 => writer.clear(RECORDS),
            _ => {
                let mut batch = BatchWriter::new();
                for (start, end) in ranges_of(self.0.family) {
                    batch.delete_range(RECORDS, &start, &end);
                }
                writer.submit(batch, None)
            }
        };
        let cleared = match written {
            Ok(written) => written.await,
            Err(error) => Err(error),
        };
        self.0.new_run.set(true);
        // If it was not cleared, the records name values that are not there any more.
        if let Err(error) = cleared {
            tracing::warn!("deadlines of removed keys stay until they have passed: {error}");
        }
    }

    /// Keys whose deadlines have passed, oldest first, at most `count`, after one of them or from
    /// the beginning. Suspends for blocks.
    pub async fn due(
        &self,
        after: Option<&Due>,
        count: usize,
        now_ms: u64,
    ) -> lsm::Result<Vec<Due>> {
        let Some((reader, _)) = self.0.records.get() else { return Ok(Vec::new()) };
        let family = self.0.family;
        let from = after.map_or_else(|| due_start(family), |last| after_due(family, last));
        due_from(reader, family, &from, count, now_ms).await
    }

    /// Removes what is written about deadlines whose keys are gone, or have others by now. Suspends
    /// until that is written.
    ///
    /// # Errors
    /// Those of the engine.
    pub async fn settle(&self, done: &[Due]) -> lsm::Result<()> {
        let state = &*self.0;
        let _turn = state.turn().await;
        let Some((reader, writer)) = state.records.get() else { return Ok(()) };
        let (mut batch, mut fewer) = (BatchWriter::new(), 0);
        let mut left: BTreeMap<&[u8], Vec<Entry>> = BTreeMap::new();
        for some in done.chunks(TOGETHER) {
            let names: Vec<_> = some.iter().map(|(_, key)| record_key(state.family, key)).collect();
            let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
            let found = reader.multi_get(RECORDS, &names, None).await;
            for ((deadline, key), record) in some.iter().zip(found) {
                batch.delete(RECORDS, &due_key(state.family, *deadline, key));
                let record = match record {
                    Ok(Some(record)) => record,
                    Ok(None) => continue,
                    // The records of others are settled all the same.
                    Err(error) if error.kind() == lsm::Kind::Corruption => continue,
                    Err(error) => return Err(error),
                };
                let entries = left.entry(key).or_insert_with(|| decode(&record).collect());
                entries.retain(|entry| entry.deadline != *deadline);
            }
            state.core.yield_now().await;
        }
        for (key, entries) in left {
            let name = record_key(state.family, key);
            match entries.is_empty() {
                true => {
                    batch.delete(RECORDS, &name);
                    fewer += 1;
                }
                false => batch.put(RECORDS, &name, &encode(&entries)),
            }
        }
        writer.submit(batch, Some(-fewer))?.await?;
        Ok(())
    }

    /// Counts keys that were removed because they had expired.
    pub fn count_expired(&self, keys: u64) {
        self.0.shared.expired.fetch_add(keys, Ordering::Relaxed);
    }

    /// Ends writing; suspends until then.
    ///
    /// # Errors
    /// Those of [`Writer::close`].
    pub async fn close(&self) -> lsm::Result<()> {
        // It has the writer, and the writer has it.
        self.0.main.set_forerunner(None);
        match self.0.records.get() {
            Some((_, writer)) => writer.close().await,
            None => Ok(()),
        }
    }

    /// As [`Ledger::close`], for a successor: [`Writer::hand_over`].
    ///
    /// # Errors
    /// Those of [`Writer::hand_over`].
    pub async fn hand_over(&self) -> lsm::Result<()> {
        // It has the writer, and the writer has it.
        self.0.main.set_forerunner(None);
        match self.0.records.get() {
            Some((_, writer)) => writer.hand_over().await,
            None => Ok(()),
        }
    }
}

impl State {
    async fn turn(&self) -> Turn<'_> {
        self.changed.wait_until(|| !self.busy.get()).await;
        self.busy.set(true);
        Turn(self)
    }

    /// Opens the database of deadlines, if it is not open.
    async fn open(&self, create: bool) -> lsm::Result<()> {
        if self.records.get().is_some() {
            return Ok(());
        }
        let Some((db, writer)) = self.main.open_within(create).await? else {
            return Ok(());
        };
        self.values.db().keep_sequences();
        self.shared.adopt(&self.core, db.clone()).await?;
        let _ = self.records.set((db.attach(&self.core), writer));
        self.changed.notify_all();
        Ok(())
    }

    /// Writes the records of a group.
    async fn note(&self, notes: Vec<(u64, Note)>) -> lsm::Result<()> {
        let has_deadlines =
            |note: &Note| note.downcast_ref::<Vec<Noted>>().is_some_and(|noted| !noted.is_empty());
        let _turn = self.turn().await;
        self.open(notes.iter().any(|(_, note)| has_deadlines(note))).await?;
        let Some((reader, writer)) = self.records.get() else { return Ok(()) };
        let mut batch = BatchWriter::new();
        let runs = self.shared.runs.load_full();
        let mut run = runs.last().map_or(0, |(run, _)| *run);
        // Groups are written one after the other, so this is the last sequence before the group.
        let before = self.values.db().visible_sequence();
        let begins = self.new_run.get() || run == 0;
        if begins {
            run += 1;
            let (key, value) = run_entry(run, before);
            if !lsm::mutant("runs_are_not_noted") {
                batch.put(RECORDS, &key, &value);
            }
        }
        let mut new: BTreeMap<Vec<u8>, Vec<Entry>> = BTreeMap::new();
        for (first, note) in notes {
            let Ok(noted) = note.downcast::<Vec<Noted>>() else { continue };
            for Noted { at, key, hash, deadline } in *noted {
                let entry = Entry { run, sequence: first + at, hash, deadline };
                new.entry(key).or_default().push(entry);
            }
        }
        let mut more = 0;
        // Entries of one kind are together, and in their order: so the memtable finds the place of
        // each near that of the one before.
        let mut due: Vec<Vec<u8>> = Vec::with_capacity(new.len());
        let keys: Vec<Vec<u8>> = new.keys().map(|key| record_key(self.family, key)).collect();
        let mut new = new.into_iter();
        for names in keys.chunks(TOGETHER) {
            let some: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
            let found = reader.multi_get(RECORDS, &some, None).await;
            for ((found, name), (key, mut entries)) in found.into_iter().zip(names).zip(&mut new) {
                let old: Vec<Entry> = match found {
                    Ok(record) => {
                        more += i64::from(record.is_none());
                        record.map(|record| decode(&record).collect()).unwrap_or_default()
                    }
                    // Its deadline is lost, and replaced. Others' writes must not fail for it.
                    Err(error) if error.kind() == lsm::Kind::Corruption => Vec::new(),
                    Err(error) => return Err(error),
                };
                // Only the newest of them can be that of the value that is there now.
                let written = |entry: &Entry| {
                    entry.sequence <= before && self.shared.is_valid(entry.run, entry.sequence)
                };
                let kept = old.iter().copied().filter(written);
                let kept = kept.max_by_key(|entry| entry.sequence);
                let of_key = |entry: &Entry| due_key(self.family, entry.deadline, &key);
                due.extend(entries.iter().map(of_key));
                entries.splice(0..0, kept);
                for entry in &old {
                    if entries.iter().all(|other| other.deadline != entry.deadline) {
                        batch.delete(RECORDS, &of_key(entry));
                    }
                }
                batch.put(RECORDS, name, &encode(&entries));
            }
        }
        due.sort_unstable();
        due.iter().for_each(|entry| batch.put(RECORDS, entry, b""));
        if batch.is_empty() {
            return Ok(());
        }
        writer.submit(batch, Some(more))?.await?;
        if begins {
            let mut all = runs.to_vec();
            all.push((run, before));
            self.shared.runs.store(Arc::new(all));
            self.new_run.set(false);
        }
        Ok(())
    }
}

impl Forerunner for Ledger {
    fn run(&self, notes: Vec<(u64, Note)>) -> Pin<Box<dyn Future<Output = lsm::Result<()>>>> {
        let ledger = self.clone();
        Box::pin(async move {
            if lsm::mutant("deadlines_come_later") {
                let again = ledger.clone();
                ledger.0.core.spawn(reactor::Class::Background, async move {
                    again.0.core.sleep_ns(3_000_000).await;
                    let _ = again.0.note(notes).await;
                });
                return Ok(());
            }
            ledger.0.note(notes).await
        })
    }

    fn sync(&self) -> Pin<Box<dyn Future<Output = lsm::Result<()>>>> {
        let ledger = self.clone();
        Box::pin(async move {
            match ledger.0.records.get() {
                Some((_, writer)) => writer.sync()?.await.map(drop),
                None => Ok(()),
            }
        })
    }

    fn live_files(&self) -> Pin<Box<dyn Future<Output = lsm::Result<Option<LiveFiles>>>>> {
        let ledger = self.clone();
        Box::pin(async move {
            // They may be being opened.
            let _turn = ledger.0.turn().await;
            match ledger.0.records.get() {
                // Writes of the main database wait meanwhile: there is no time for a flush.
                Some((_, writer)) => writer.live_files(u64::MAX).await.map(Some),
                None => Ok(None),
            }
        })
    }
}
