//! Checkpoints, backups and ingestion of a database that is being written to, with kills and power
//! cuts at any moment, and in every third world with a disk that fails, stalls or is full.
//!
//! One task writes numbered changes, one after the other: batches, and tables that are ingested.
//! Another makes checkpoints, backups and restored directories. Change n is always the same, so the
//! contents after n changes are known, and every database says which n it holds. When a process has
//! ended:
//!
//! 1. The database holds the first n changes, among them all acknowledged ones.
//! 2. A checkpoint is there as a whole or not at all. It holds the changes up to one of those that
//!    were made while it was made, whatever was written, merged and recycled since.
//! 3. The same holds for each backup, which is also verified.
//!
//! With faults, each operation may also fail, with an error that a new attempt may not have:
//!
//! - A change that was refused is never there. One whose fate is unknown, as the error says, is not
//!   seen by this process. The next opening may find it, unless a later change was accepted.
//! - A copy that failed is absent, or there as a whole. A backup that failed is absent, unless the
//!   error says that it may be there.
//! - When the faults have ended, the same process makes changes, checkpoints, backups and restored
//!   directories again. So does the last process.
//!
//! Half of these worlds are at durability `process`. After a power cut each key may then have any
//! value since it was last durable; a copy that has returned, and an ingestion with all that is
//! older in its range, are durable as a whole.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;

use lsm::{
    BackupDir, BatchWriter, Db, Durability, Error, Forerunner, IterOptions, Kind, LiveFiles, Note,
    OpenOptions, Reader, Transfer, WITHIN, WriteOptions, Writer,
};
use reactor::sim::{
    Access, Crash, FailureKind, Fault, FaultCounts, FaultKind, Rng, SimConfig, World,
};
use reactor::{Class, Core, Mode, Opening};
use rocksfmt::{ChecksumType, ValueType};

use crate::engine::{DIR, Flaw, Pairs};
use crate::table::{Index, Packing, Shape, TableBuilder};

/// The directory of the backups.
const BACKUPS: &str = "/backups";
/// The key that changes set to their number, except for tables without overlap.
const LAST: &[u8] = b"last";
/// Processes of a world.
const PROCESSES: u64 = 4;

/// The counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Changes acknowledged.
    pub acknowledged: u64,
    /// Tables ingested, as far as that was acknowledged.
    pub ingested: u64,
    /// Checkpoints, backups and restored directories that were made.
    pub checkpoints: u64,
    /// See [`Report::checkpoints`].
    pub backups: u64,
    /// See [`Report::checkpoints`].
    pub restored: u64,
    /// Backups that were deleted.
    pub deleted: u64,
    /// Copies that were compared, some of them several times.
    pub compared: u64,
    /// Copies that a crash interrupted.
    pub interrupted: u64,
    /// Table files recycled.
    pub rewritten: u64,
    /// Processes that met faults, and those of them that could not open the database.
    pub failing: u64,
    /// See [`Report::failing`].
    pub failed_openings: u64,
    /// Changes that were refused, among them ingestions.
    pub refused: u64,
    /// See [`Report::refused`].
    pub refused_ingestions: u64,
    /// Changes of unknown fate, among them ingestions, and those that an opening found.
    pub unknown: u64,
    /// See [`Report::unknown`].
    pub unknown_ingestions: u64,
    /// See [`Report::unknown`].
    pub unknown_found: u64,
    /// Checkpoints, backups and restored directories that failed, and those of them that are there
    /// nevertheless.
    pub failed_copies: u64,
    /// See [`Report::failed_copies`].
    pub failed_and_there: u64,
    /// Openings after a power cut that may have taken acknowledged changes, those of them that
    /// needed salvage, and those that lacked some.
    pub loose: u64,
    /// See [`Report::loose`].
    pub salvaged: u64,
    /// See [`Report::loose`].
    pub shortened: u64,
    /// Copies of which the database within was compared, too.
    pub notes: u64,
    /// Faults that struck.
    pub faults: FaultCounts,
    /// The trace's hash and number of events.
    pub trace: (u64, u64),
}

enum Change {
    Batch(Pairs),
    /// A table whose keys exist.
    Ingest(Pairs),
    /// A table of keys that no other change has, and without [`LAST`].
    IngestApart(Pairs),
}

impl Change {
    /// The change with this number.
    fn of(number: u64) -> Change {
        let value = |place: u64| {
            let len = 20 + (number * 7_919 + place * 104_729) % 1_500;
            format!("{number:08}-{place}-").into_bytes().repeat(1 + len as usize / 11)
        };
        let key = |place: u64| format!("key{:03}", (number * 31 + place * 97) % 200).into_bytes();
        let mut pairs: BTreeMap<Vec<u8>, Vec<u8>> =
            (0..number % 4).map(|place| (key(place), value(place))).collect();
        let mut with_last = || {
            pairs.insert(LAST.to_vec(), format!("{number:08}").into_bytes());
            std::mem::take(&mut pairs).into_iter().collect()
        };
        match number % 11 {
            3 => Change::Ingest(with_last()),
            7 => {
                let key = |place| format!("apart{number:06}-{place}").into_bytes();
                Change::IngestApart((0..5).map(|place| (key(place), value(place))).collect())
            }
            _ => Change::Batch(with_last()),
        }
    }

    fn pairs(self) -> Pairs {
        match self {
            Change::Batch(pairs) | Change::Ingest(pairs) | Change::IngestApart(pairs) => pairs,
        }
    }
}

/// All changes that the database may hold.
#[derive(Default)]
struct History {
    numbers: BTreeSet<u64>,
    /// Contents that an opening has found after acknowledged changes were lost. Each counts as a
    /// change that sets everything.
    adopted: BTreeMap<u64, Pairs>,
    /// Changes of unknown fate, which are not in `numbers`. They may be there after a crash,
    /// unless a later one was accepted.
    unknown: BTreeSet<u64>,
    /// Ingestions that were acknowledged: they are durable at any durability.
    ingested: BTreeSet<u64>,
}

fn last_in(found: &Pairs) -> u64 {
    let last = found.iter().find(|(key, _)| key == LAST);
    last.map_or(0, |(_, text)| String::from_utf8_lossy(text).parse().unwrap_or(0))
}

impl History {
    /// The contents after change `number`.
    fn contents(&self, number: u64) -> Pairs {
        let adopted = self.adopted.range(..=number).next_back();
        let (from, base) = adopted.map_or((0, Pairs::new()), |(at, pairs)| (*at, pairs.clone()));
        let later = self.numbers.range(from..=number);
        let later = later.flat_map(|&number| Change::of(number).pairs());
        base.into_iter().chain(later).collect::<BTreeMap<_, _>>().into_iter().collect()
    }

    /// The last change that a database holds, which has at most `most`, or what is wrong.
    fn find(&self, found: &Pairs, most: u64) -> Result<u64, String> {
        let adopted = self.adopted.range(..=most).next_back();
        let base = adopted.map_or((0, 0), |(at, pairs)| (last_in(pairs), *at));
        let mut number = match last_in(found) {
            last if last == base.0 => base.1,
            last => last,
        };
        if number > 0 && !self.numbers.contains(&number) && !self.adopted.contains_key(&number) {
            return Err(format!("change {number} is there"));
        }
        // The next changes may not set the number.
        for &next in self.numbers.range(number + 1..) {
            match Change::of(next) {
                Change::IngestApart(pairs) if found.iter().any(|(key, _)| *key == pairs[0].0) => {
                    number = next;
                }
                _ => break,
            }
        }
        let expected = self.contents(number);
        if let Some(wrong) = found.iter().zip(&expected).find(|(found, expected)| found != expected)
        {
            let (found, expected) = wrong;
            let text =
                |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(20)]).into_owned();
            return Err(format!(
                "after change {number}: {} = {} in place of {} = {}",
                text(&found.0),
                text(&found.1),
                text(&expected.0),
                text(&expected.1)
            ));
        }
        match found.len() == expected.len() {
            true => Ok(number),
            false => Err(format!(
                "after change {number}: {} keys in place of {}",
                found.len(),
                expected.len()
            )),
        }
    }

    /// The last change that the database holds; settles the changes of unknown fate. At most one of
    /// them is there: each one meets a log or a MANIFEST without the one before.
    fn settle(&mut self, found: &Pairs) -> (u64, u64) {
        let unknown = std::mem::take(&mut self.unknown);
        let wrong = match self.find(found, u64::MAX) {
            Ok(number) => return (number, 0),
            Err(wrong) => wrong,
        };
        for number in unknown {
            self.numbers.insert(number);
            if self.find(found, u64::MAX) == Ok(number) {
                return (number, 1);
            }
            self.numbers.remove(&number);
        }
        panic!("{DIR}: {wrong}");
    }

    /// Adopts what an opening has found after a power cut: each key must have one of the values
    /// that it had since change `durable`. Returns the number of the new contents.
    fn adopt(&mut self, found: &Pairs, durable: u64, made: u64) -> u64 {
        let mut possible: BTreeMap<Vec<u8>, Vec<Option<Vec<u8>>>> = BTreeMap::new();
        for (key, value) in self.contents(durable) {
            possible.insert(key, vec![Some(value)]);
        }
        let adopted = self.adopted.range(durable + 1..).map(|(number, pairs)| {
            for (key, values) in &mut possible {
                if !pairs.iter().any(|(other, _)| other == key) {
                    values.push(None);
                }
            }
            (*number, pairs.clone())
        });
        let changes = adopted.collect::<Vec<_>>().into_iter();
        let made_since = self.numbers.range(durable + 1..).chain(self.unknown.range(durable + 1..));
        let changes = changes.chain(made_since.map(|&n| (n, Change::of(n).pairs())));
        for (key, value) in changes.flat_map(|(_, pairs)| pairs) {
            possible.entry(key).or_insert_with(|| vec![None]).push(Some(value));
        }
        let found_map: BTreeMap<&[u8], &[u8]> =
            found.iter().map(|(key, value)| (&key[..], &value[..])).collect();
        for (key, values) in &possible {
            let value = found_map.get(&key[..]).copied();
            let fits = values.iter().any(|one| one.as_deref() == value);
            let name = String::from_utf8_lossy(key);
            assert!(fits, "{name} has a value that it never had since change {durable}");
        }
        let new = found.iter().find(|(key, _)| !possible.contains_key(key));
        assert!(new.is_none(), "{:?} was never written", new.map(|(key, _)| key));
        for &number in &self.ingested {
            if let Change::IngestApart(pairs) = Change::of(number) {
                let is_there = |(key, _): &(Vec<u8>, _)| found_map.contains_key(&key[..]);
                assert!(pairs.iter().all(is_there), "the ingested table {number} is gone");
            }
        }
        self.unknown.clear();
        self.adopted.insert(made + 1, found.clone());
        made + 1
    }
}

/// A file as SstFileWriter makes it.
pub fn external_table(pairs: &Pairs) -> Vec<u8> {
    let shape = Shape {
        block_bytes: 700,
        restart_interval: 4,
        checksum: ChecksumType::Crc32c,
        packing: Packing::Plain,
        index: Index::Plain,
        lean_index: false,
        bloom: true,
    };
    let mut table = TableBuilder::new(shape).external();
    for (key, value) in pairs {
        table.add(key, 0, ValueType::Value, value);
    }
    table.finish().bytes
}

/// Whether a copy is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It was interrupted, or its making failed after it got its name: whole or absent.
    Open,
    Made,
    /// It failed, or was deleted.
    Failed,
}

/// A copy: it holds at least the changes acknowledged when it was begun, and at most those made
/// when it was finished.
#[derive(Clone, Copy, Debug)]
struct Span {
    least: u64,
    most: u64,
    fate: Fate,
}

#[derive(Default)]
struct State {
    history: RefCell<History>,
    made: Cell<u64>,
    /// All changes up to this one must be there at an opening.
    acknowledged: Cell<u64>,
    /// The same after a power cut.
    durable: Cell<u64>,
    /// The logs may have writes at durability `process`.
    process_logs: Cell<bool>,
    /// Power was cut in that state. True until the database was opened, or the logs that salvage
    /// left are gone.
    is_loose: Cell<bool>,
    /// Checkpoints and restored directories.
    checkpoints: RefCell<BTreeMap<PathBuf, Span>>,
    backups: RefCell<BTreeMap<u32, Span>>,
    restored: Cell<u64>,
    report: Cell<Report>,
}

impl State {
    fn count(&self, change: impl FnOnce(&mut Report)) {
        let mut report = self.report.get();
        change(&mut report);
        self.report.set(report);
    }

    fn begin(&self) -> Span {
        Span { least: self.acknowledged.get(), most: u64::MAX, fate: Fate::Open }
    }

    fn end(&self, span: &mut Span) {
        (span.most, span.fate) = (self.made.get(), Fate::Made);
    }

    /// After a crash: an interrupted copy, if it is there, has nothing that was made later.
    fn interrupt(&self) {
        let made = self.made.get();
        let mut interrupted = 0;
        let mut checkpoints = self.checkpoints.borrow_mut();
        let mut backups = self.backups.borrow_mut();
        for span in checkpoints.values_mut().chain(backups.values_mut()) {
            interrupted += u64::from(span.most == u64::MAX);
            span.most = span.most.min(made);
        }
        self.count(|report| report.interrupted += interrupted);
    }

    /// After a power cut: what was not durable may be gone.
    fn lose_power(&self) {
        self.acknowledged.set(self.durable.get());
        self.is_loose.set(self.is_loose.get() || self.process_logs.get());
    }
}

/// Whether a new attempt may succeed.
fn is_transient(error: &Error) -> bool {
    matches!(error.kind(), Kind::Io | Kind::Full | Kind::Memory)
}

/// Whether an error says that it does not know what was done.
fn is_unknown(error: &Error) -> bool {
    error.kind() == Kind::Io && error.to_string().contains("it is unknown whether")
}

/// Notes the number of each batch in the database within, as deadlines are noted.
struct Notes(Writer);

impl Forerunner for Notes {
    fn run(&self, notes: Vec<(u64, Note)>) -> Pin<Box<dyn Future<Output = lsm::Result<()>>>> {
        let writer = self.0.clone();
        Box::pin(async move {
            for (_, note) in notes {
                let number = note.downcast::<u64>().expect("a number");
                let mut batch = BatchWriter::new();
                batch.put(0, LAST, format!("{number:08}").as_bytes());
                writer.write(batch).await?;
            }
            Ok(())
        })
    }

    fn sync(&self) -> Pin<Box<dyn Future<Output = lsm::Result<()>>>> {
        let writer = self.0.clone();
        Box::pin(async move { writer.sync()?.await.map(drop) })
    }

    fn live_files(&self) -> Pin<Box<dyn Future<Output = lsm::Result<Option<LiveFiles>>>>> {
        let writer = self.0.clone();
        Box::pin(async move { writer.live_files(u64::MAX).await.map(Some) })
    }
}

struct Process {
    state: Rc<State>,
    world: World,
    rng: RefCell<Rng>,
    durability: Durability,
    changes: u64,
    /// The world meets faults in some processes.
    is_rough: bool,
    /// Batches are noted in the database within.
    has_notes: bool,
    /// This process meets faults.
    fails: bool,
    /// The disk is full for a while.
    scarce: bool,
    /// It is the last one.
    is_last: bool,
    ended: Cell<bool>,
}

impl Process {
    fn below(&self, limit: u64) -> u64 {
        self.rng.borrow_mut().below(limit)
    }

    /// Whether something may fail.
    fn may_fail(&self) -> bool {
        self.fails || self.scarce
    }

    async fn run(self: Rc<Self>, core: Core) -> Result<(), Error> {
        let state = &self.state;
        self.compare_copies(&core).await?;
        if self.fails && self.below(3) > 0 {
            add_faults(&self.world, &mut self.rng.borrow_mut());
        }
        let (db, writer) = match self.open(&core).await {
            Err(error) if self.fails && is_transient(&error) => {
                state.count(|report| report.failed_openings += 1);
                return Ok(());
            }
            opened => opened?,
        };
        if self.fails {
            add_faults(&self.world, &mut self.rng.borrow_mut());
        }
        let mut within = None;
        if self.has_notes {
            let (_, notes) = writer.open_within(true).await?.expect("it is created");
            writer.set_forerunner(Some(Rc::new(Notes(notes.clone()))));
            within = Some(notes);
        }
        let reader = db.attach(&core);
        let copying = {
            let (this, own, writer) = (self.clone(), core.clone(), writer.clone());
            core.spawn(Class::Foreground, async move { this.copy(&own, &writer).await })
        };
        let filling = self.scarce.then(|| {
            let (this, own) = (self.clone(), core.clone());
            core.spawn(Class::Foreground, async move { this.fill(&own).await })
        });
        for _ in 0..self.changes {
            if !self.change(&core, &writer, &reader).await? {
                core.sleep_ns(self.below(200_000_000)).await;
            }
            if self.below(20) == 0 {
                core.sleep_ns(self.below(3_000_000)).await;
            }
        }
        self.ended.set(true);
        copying.await?;
        if let Some(filling) = filling {
            filling.await;
        }
        if self.may_fail() {
            self.world.heal();
            self.go_on(&core, &writer, &reader).await?;
        }
        if self.may_fail() || (self.is_rough && self.is_last) {
            self.do_all(&core, &writer, &reader).await?;
        }
        state.count(|report| report.rewritten += writer.stats().rewritten_tables);
        writer.set_forerunner(None);
        if self.below(2) == 0 {
            writer.close().await?;
            if let Some(notes) = &within {
                notes.close().await?;
            }
        }
        drop(within);
        drop((reader, db, writer));
        if self.is_rough && self.is_last {
            self.compare_copies(&core).await?;
        }
        Ok(())
    }

    /// Opens the database and compares it with the changes.
    async fn open(&self, core: &Core) -> Result<(Db, Writer), Error> {
        let state = &self.state;
        let options = WriteOptions {
            durability: self.durability,
            memtable_bytes: 12_000,
            manifest_bytes: 4_000,
            ..WriteOptions::default()
        };
        let open = |reading| Db::open_for_writing(core, Path::new(DIR), reading, options.clone());
        let (is_loose, mut is_salvaged) = (state.is_loose.get(), false);
        let (db, writer) = match open(OpenOptions::default()).await {
            Err(error) if is_loose && error.kind() == Kind::Corruption => {
                assert!(error.to_string().contains(".log"), "damage outside of logs: {error}");
                is_salvaged = true;
                open(OpenOptions { salvage: true, ..OpenOptions::default() }).await?
            }
            opened => opened?,
        };
        let found = scan(core, &db).await?;
        let (least, made) = (state.acknowledged.get(), state.made.get());
        let mut history = state.history.borrow_mut();
        let number = if is_loose {
            let number = history.adopt(&found, state.durable.get(), made);
            let is_whole = found == history.contents(made);
            state.count(|report| {
                report.loose += 1;
                report.salvaged += u64::from(is_salvaged);
                report.shortened += u64::from(!is_whole);
            });
            state.made.set(number);
            number
        } else {
            let (number, unknown) = history.settle(&found);
            assert!(number >= least, "{number} of {least} acknowledged changes exist");
            assert!(number <= made, "{number} of {made} changes exist");
            history.numbers.split_off(&(number + 1));
            state.count(|report| report.unknown_found += unknown);
            number
        };
        state.is_loose.set(is_salvaged);
        // A kill loses nothing that a reader has seen.
        state.acknowledged.set(number);
        if self.durability == Durability::Process {
            state.process_logs.set(true);
        }
        Ok((db, writer))
    }

    /// Makes the next change. Returns whether it was made.
    async fn change(&self, core: &Core, writer: &Writer, reader: &Reader) -> Result<bool, Error> {
        let state = &self.state;
        let number = state.made.get() + 1;
        state.made.set(number);
        state.history.borrow_mut().numbers.insert(number);
        let is_batch = matches!(Change::of(number), Change::Batch(_));
        let error = match self.make(core, writer, reader, number).await {
            Ok(()) => {
                let mut history = state.history.borrow_mut();
                history.unknown.clear();
                if !is_batch {
                    history.ingested.insert(number);
                }
                state.acknowledged.set(number);
                state.is_loose.set(false);
                if self.durability == Durability::Power {
                    state.process_logs.set(false);
                    state.durable.set(number);
                }
                // It needs all that is older to be in tables.
                if matches!(Change::of(number), Change::Ingest(_)) {
                    state.durable.set(number);
                }
                state.count(|report| report.acknowledged += 1);
                return Ok(true);
            }
            Err(error) if self.may_fail() => error,
            Err(error) => return Err(error),
        };
        let is_refused = match is_batch {
            true => error.kind() == Kind::Full,
            false => is_transient(&error) && !is_unknown(&error),
        };
        let is_unknown = !is_refused && error.kind() == Kind::Io;
        assert!(is_refused || is_unknown, "change {number}: {error:?}");
        assert!(is_refused || self.fails, "a full disk leaves nothing unknown: {error:?}");
        self.forget(number, is_unknown);
        state.count(|report| {
            let (counter, ingestions) = match is_unknown {
                true => (&mut report.unknown, &mut report.unknown_ingestions),
                false => (&mut report.refused, &mut report.refused_ingestions),
            };
            *counter += 1;
            *ingestions += u64::from(!is_batch);
        });
        // This process does not see it.
        for (key, value) in Change::of(number).pairs() {
            match reader.get(0, &key, None).await {
                Ok(found) => {
                    let name = String::from_utf8_lossy(&key);
                    let is_seen = found.as_deref() == Some(&value[..]);
                    assert!(!is_seen, "{name} is that of change {number}, which failed: {error}");
                }
                Err(error) => assert!(self.fails && is_transient(&error), "{error:?}"),
            }
        }
        if is_unknown && self.below(3) == 0 {
            self.world.crash([Crash::Kill, Crash::PowerCut][self.below(2) as usize]);
            std::future::pending::<()>().await;
        }
        Ok(false)
    }

    /// Notes that a change failed.
    fn forget(&self, number: u64, is_unknown: bool) {
        let mut history = self.state.history.borrow_mut();
        history.numbers.remove(&number);
        if is_unknown {
            history.unknown.insert(number);
        }
    }

    /// Does a change.
    async fn make(
        &self,
        core: &Core,
        writer: &Writer,
        reader: &Reader,
        number: u64,
    ) -> Result<(), Error> {
        let pairs = match Change::of(number) {
            Change::Batch(pairs) => {
                let mut batch = BatchWriter::new();
                for (key, value) in &pairs {
                    batch.put(0, key, value);
                }
                if self.has_notes {
                    let noted = writer.submit_noted(batch, None, Box::new(number))?;
                    return noted.await.map(drop);
                }
                return writer.write(batch).await.map(drop);
            }
            Change::Ingest(pairs) | Change::IngestApart(pairs) => pairs,
        };
        let path = PathBuf::from(format!("/files/{number}.sst"));
        let bytes = external_table(&pairs);
        if self.below(2) == 0 || self.write_file(core, &path, &bytes).await.is_err() {
            self.world.add_file(&path, &bytes[..]);
        }
        let link = self.below(2) == 0;
        let files = [(0, vec![path.clone()])];
        let ingested = writer.ingest_files(&files, link, self.below(2) == 0).await;
        let original = self.world.bytes(&path).expect("the original is there");
        assert!(*original == bytes[..], "the original has changed");
        ingested?;
        self.state.count(|report| report.ingested += 1);
        for (key, value) in &pairs {
            let name = String::from_utf8_lossy(key);
            match reader.get(0, key, None).await {
                Err(error) if self.fails && is_transient(&error) => {}
                found => {
                    assert_eq!(found?.as_deref(), Some(&value[..]), "{name} of ingestion {number}");
                }
            }
        }
        // The database's file stays.
        let removed = core.remove(&path).await;
        assert!(removed.is_ok() || self.fails, "the original is there");
        Ok(())
    }

    /// Writes a file that is not durable.
    async fn write_file(&self, core: &Core, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
        let file = core.open_for_writing(path, Opening::New, Mode::Buffered).await?;
        let mut buf = core.alloc_wait(bytes.len()).await?;
        buf.copy_from_slice(bytes);
        core.attach(&file).write_at(0, buf, bytes.len()).await.0
    }

    /// Fills the disk for a while, several times.
    async fn fill(&self, core: &Core) {
        for _ in 0..1 + self.below(4) {
            core.sleep_ns(self.below(40_000_000)).await;
            let left = self.below([500, 5_000, 20_000, 60_000][self.below(4) as usize]);
            self.world.set_capacity(Some(self.world.used() + left));
            core.sleep_ns(self.below(1_000_000_000)).await;
            self.world.set_capacity(None);
        }
    }

    /// Checks that writing continues when the faults have ended.
    async fn go_on(&self, core: &Core, writer: &Writer, reader: &Reader) -> Result<(), Error> {
        for _ in 0..200 {
            if self.change(core, writer, reader).await? {
                return Ok(());
            }
            core.sleep_ns(500_000_000).await;
        }
        panic!("writing does not continue: {:?}, {:?}", writer.failure(), writer.stats());
    }

    /// Checks that each operation succeeds on a sound disk. An ingestion shows that nothing waits
    /// for another attempt any more.
    async fn do_all(&self, core: &Core, writer: &Writer, reader: &Reader) -> Result<(), Error> {
        while !matches!(Change::of(self.state.made.get()), Change::Ingest(_)) {
            let before = self.state.made.get();
            self.go_on(core, writer, reader).await?;
            let tries = self.state.made.get() - before;
            assert!(tries == 1 || !self.is_last, "a change failed on a sound disk");
        }
        assert!(self.checkpoint(writer).await?, "a checkpoint failed on a sound disk");
        assert!(self.back_up(core, writer).await?, "a backup failed on a sound disk");
        assert!(self.restore(core).await?, "a restore failed on a sound disk");
        Ok(())
    }

    /// Makes copies until the writer has ended.
    async fn copy(&self, core: &Core, writer: &Writer) -> Result<(), Error> {
        while !self.ended.get() {
            // Faults last for seconds.
            let most = if self.may_fail() { 60_000_000 } else { 6_000_000 };
            core.sleep_ns(self.below(most)).await;
            match self.below(3) {
                0 if self.below(6) == 0 => self.delete_backup(core).await?,
                0 => self.back_up(core, writer).await?,
                1 if self.may_fail() => self.restore(core).await?,
                _ => self.checkpoint(writer).await?,
            };
        }
        Ok(())
    }

    /// Whether a copy was made. A failure is an error only if nothing may fail.
    fn is_made(&self, made: Result<(), Error>) -> Result<bool, Error> {
        match made {
            Err(error) if self.may_fail() && is_transient(&error) => {
                self.state.count(|report| report.failed_copies += 1);
                Ok(false)
            }
            made => made.map(|()| true),
        }
    }

    /// The fate of a directory after its making.
    fn fate_of(&self, path: &Path, is_made: bool) -> Fate {
        let is_there = self.world.paths().iter().any(|file| file.parent() == Some(path));
        self.state.count(|report| report.failed_and_there += u64::from(is_there && !is_made));
        match is_there {
            true if is_made => Fate::Made,
            // The error came after it got its name, and may have lost that.
            true => Fate::Open,
            false => Fate::Failed,
        }
    }

    async fn checkpoint(&self, writer: &Writer) -> Result<bool, Error> {
        let state = &self.state;
        let path = self.new_path("/copy");
        let mut span = state.begin();
        state.checkpoints.borrow_mut().insert(path.clone(), span);
        let is_made = self.is_made(writer.checkpoint(&path).await.map(drop))?;
        state.end(&mut span);
        span.fate = self.fate_of(&path, is_made);
        assert!(span.fate == Fate::Made || !is_made, "{} is missing", path.display());
        state.checkpoints.borrow_mut().insert(path, span);
        state.count(|report| report.checkpoints += u64::from(is_made));
        Ok(is_made)
    }

    /// The path of the next copy: one that failed before, if there is one.
    fn new_path(&self, prefix: &str) -> PathBuf {
        let copies = self.state.checkpoints.borrow();
        let of_kind = || copies.iter().filter(|(path, _)| path.to_string_lossy().contains(prefix));
        let failed = of_kind().find(|(_, span)| span.fate == Fate::Failed);
        match failed {
            Some((path, _)) => path.clone(),
            None => PathBuf::from(format!("{prefix}{}", of_kind().count())),
        }
    }

    async fn back_up(&self, core: &Core, writer: &Writer) -> Result<bool, Error> {
        let state = &self.state;
        let newest = match newest_backup(core).await {
            Err(error) if self.may_fail() && is_transient(&error) => return Ok(false),
            newest => newest?,
        };
        let mut span = state.begin();
        let live = match writer.live_files(self.below(3) * 8_000).await {
            Err(error) if self.may_fail() && is_transient(&error) => return Ok(false),
            live => live?,
        };
        // Later changes are not on the list.
        span.most = state.made.get();
        let before = state.backups.borrow().get(&(newest + 1)).copied();
        // One of that number was perhaps not deleted durably.
        let before = before.filter(|before| before.fate == Fate::Open);
        if let Some(before) = before {
            let least = span.least.min(before.least);
            state.backups.borrow_mut().insert(newest + 1, Span { least, ..span });
        } else {
            state.backups.borrow_mut().insert(newest + 1, span);
        }
        let mut quiet = |_, _| {};
        let mut transfer = Transfer::new(core, None, &mut quiet);
        let backups = BackupDir::new(core, Path::new(BACKUPS));
        let made = backups.create(live.list(), &mut transfer).await;
        let says_unknown = made.as_ref().is_err_and(is_unknown);
        let made = made.map(|made| assert_eq!(made.id, newest + 1));
        let is_made = self.is_made(made)?;
        span.fate = match is_made {
            true => Fate::Made,
            false if says_unknown || before.is_some() => Fate::Open,
            false => Fate::Failed,
        };
        if let Some(before) = before.filter(|_| !is_made) {
            span.least = span.least.min(before.least);
        }
        state.backups.borrow_mut().insert(newest + 1, span);
        state.count(|report| report.backups += u64::from(is_made));
        Ok(is_made)
    }

    /// Deletes one of the backups. Returns whether it did.
    async fn delete_backup(&self, core: &Core) -> Result<bool, Error> {
        let state = &self.state;
        let made = |(id, span): (&u32, &Span)| (span.fate == Fate::Made).then_some(*id);
        let made: Vec<u32> = state.backups.borrow().iter().filter_map(made).collect();
        if made.is_empty() {
            return Ok(false);
        }
        let id = made[self.below(made.len() as u64) as usize];
        let note = |fate| {
            if let Some(span) = state.backups.borrow_mut().get_mut(&id) {
                span.fate = fate;
            }
        };
        note(Fate::Open);
        let deleted = BackupDir::new(core, Path::new(BACKUPS)).delete(&[id]).await;
        let is_deleted = self.is_made(deleted.map(drop))?;
        if is_deleted {
            note(Fate::Failed);
            state.count(|report| report.deleted += 1);
        }
        Ok(is_deleted)
    }

    /// Restores the newest backup.
    async fn restore(&self, core: &Core) -> Result<bool, Error> {
        let state = &self.state;
        let newest = match newest_backup(core).await {
            Err(error) if self.may_fail() && is_transient(&error) => return Ok(false),
            newest => newest?,
        };
        let span = state.backups.borrow().get(&newest).copied();
        let Some(span) = span else { return Ok(false) };
        let path = self.new_path("/restored");
        state.checkpoints.borrow_mut().insert(path.clone(), Span { fate: Fate::Open, ..span });
        let mut quiet = |_, _| {};
        let mut transfer = Transfer::new(core, None, &mut quiet);
        let backups = BackupDir::new(core, Path::new(BACKUPS));
        let restored = backups.restore(Some(newest), &path, &mut transfer).await;
        let is_made = self.is_made(restored.map(drop))?;
        let fate = self.fate_of(&path, is_made);
        assert!(fate == Fate::Made || !is_made, "{} is missing", path.display());
        state.checkpoints.borrow_mut().insert(path, Span { fate, ..span });
        state.count(|report| report.restored += u64::from(is_made));
        Ok(is_made)
    }

    /// Compares all copies with what they may hold.
    async fn compare_copies(&self, core: &Core) -> Result<(), Error> {
        let state = &self.state;
        let checkpoints = state.checkpoints.borrow().clone();
        for (path, span) in checkpoints {
            let is_there = core.list(&path).await.is_ok_and(|entries| !entries.is_empty());
            check_fate(&path.display().to_string(), span.fate, is_there);
            if is_there {
                self.compare(core, &path, span).await?;
                state.count(|report| report.compared += 1);
            }
        }
        let backups = BackupDir::new(core, Path::new(BACKUPS));
        if core.list(&Path::new(BACKUPS).join("meta")).await.is_err() {
            return Ok(());
        }
        let (listed, damaged) = backups.list().await?;
        assert!(damaged.is_empty(), "{damaged:?}");
        let spans = state.backups.borrow().clone();
        for (id, span) in &spans {
            let is_there = listed.iter().any(|backup| backup.id == *id);
            check_fate(&format!("backup {id}"), span.fate, is_there);
        }
        for backup in &listed {
            let mut quiet = |_, _| {};
            let mut transfer = Transfer::new(core, None, &mut quiet);
            let damages = backups.verify(Some(backup.id), &mut transfer).await?.damages;
            assert!(damages.is_empty(), "backup {}: {damages:?}", backup.id);
        }
        if let Some(newest) = listed.last() {
            state.restored.set(state.restored.get() + 1);
            let path = PathBuf::from(format!("/checked{}", state.restored.get()));
            let mut quiet = |_, _| {};
            let mut transfer = Transfer::new(core, None, &mut quiet);
            backups.restore(Some(newest.id), &path, &mut transfer).await?;
            self.compare(core, &path, spans[&newest.id]).await?;
            state.count(|report| report.compared += 1);
        }
        Ok(())
    }

    async fn compare(&self, core: &Core, path: &Path, span: Span) -> Result<(), Error> {
        let place = path.display();
        let opened = Db::open(core, path, OpenOptions::default()).await;
        let db = opened.unwrap_or_else(|error| panic!("{place}: {error}"));
        let found = scan(core, &db).await.unwrap_or_else(|error| panic!("{place}: {error}"));
        let number = self.state.history.borrow().find(&found, span.most);
        let number = number.unwrap_or_else(|wrong| panic!("{place}: {wrong}: {span:?}"));
        assert!((span.least..=span.most).contains(&number), "{place} holds {number}: {span:?}");
        if self.has_notes {
            // The note of the last batch, or of the next one if a crash came before its log.
            let within = Db::open(core, &path.join(WITHIN), OpenOptions::default()).await;
            let within = within.unwrap_or_else(|error| panic!("{place}: {error}"));
            let noted = last_in(&scan(core, &within).await?);
            let is_batch = |number: &u64| matches!(Change::of(*number), Change::Batch(_));
            let last = (1..=number).rev().find(is_batch).unwrap_or(0);
            let span = last..=number + 1;
            assert!(span.contains(&noted), "{place} holds {number} and the note of {noted}");
            self.state.count(|report| report.notes += 1);
        }
        Ok(())
    }
}

fn check_fate(copy: &str, fate: Fate, is_there: bool) {
    match fate {
        Fate::Open => {}
        Fate::Made => assert!(is_there, "{copy} is missing"),
        Fate::Failed => assert!(!is_there, "{copy} is there, and failed or was deleted"),
    }
}

async fn newest_backup(core: &Core) -> Result<u32, Error> {
    let backups = BackupDir::new(core, Path::new(BACKUPS));
    match backups.list().await {
        Ok((listed, damaged)) => match damaged.into_iter().next() {
            Some(error) => Err(error),
            None => Ok(listed.last().map_or(0, |backup| backup.id)),
        },
        Err(error) if error.kind() == lsm::Kind::NoDatabase => Ok(0),
        Err(error) => Err(error),
    }
}

async fn scan(core: &Core, db: &Db) -> Result<Pairs, Error> {
    let reader = db.attach(core);
    let mut iter = reader.iter(0, IterOptions::default())?;
    let mut found = Vec::new();
    iter.seek_to_first().await?;
    while iter.valid() {
        found.push((iter.key().to_vec(), iter.value().to_vec()));
        iter.next().await?;
    }
    Ok(found)
}

/// Faults of one process: up to three, each on one kind of file, once or for a while; or such that
/// the fate of a change becomes unknown.
fn add_faults(world: &World, rng: &mut Rng) {
    let error = |errno| Fault::new(FaultKind::Error(errno));
    let others = match rng.below(5) {
        // A log fails, and so do tables for a while.
        0 => {
            let access = [Access::Write, Access::Sync][rng.index(2)];
            world.add_fault(error(5).of(access).on(".log").after(rng.below(20)).times(1));
            world.add_fault(error(5).of(Access::Write).on(".sst").times(1 + rng.below(40)));
            0
        }
        // The MANIFEST fails, and so does the one that would take its place.
        1 => {
            let (access, times) = ([Access::Write, Access::Sync][rng.index(2)], 2 + rng.below(6));
            let fault = error(5).of(access).within("/MANIFEST-");
            world.add_fault(fault.after(rng.below(60)).times(times));
            0
        }
        _ => 1 + rng.below(3),
    };
    for _ in 0..others {
        let (part, end) = [
            ("", ""),
            (DIR, ".log"),
            (DIR, ".sst"),
            (DIR, ".dbtmp"),
            ("/MANIFEST-", ""),
            ("/CURRENT", ""),
            ("", DIR),
            ("/files/", ""),
            ("/copy", ""),
            ("/copy", ".tmp"),
            ("/backups", ""),
            ("/backups/meta", ""),
            ("/backups/shared", ""),
            ("/restored", ""),
            ("", "/"),
        ][rng.index(15)];
        let fault = match rng.below(8) {
            0 => error(5).of(Access::Read),
            1 => error(5).of(Access::Write),
            2 => error(28).of(Access::Write),
            3 | 4 => error(5).of(Access::Sync),
            5 => Fault::new(FaultKind::NameError(28)),
            _ => Fault::new(FaultKind::NameError(5)),
        };
        let times = [1, 1, 2, 3, 12, 1_000_000][rng.index(6)];
        world.add_fault(fault.within(part).on(end).after(rng.below(25)).times(times));
    }
    for access in [Access::Read, Access::Write, Access::Sync] {
        let stall = Fault::new(FaultKind::Stall(1_000_000..1_000_000_000)).of(access);
        world.add_fault(stall.after(rng.below(200)).times(1 + rng.below(3)));
    }
    world.add_fault(Fault::new(FaultKind::Short).chance(20_000));
    world.add_fault(Fault::new(FaultKind::Short).of(Access::Write).chance(20_000));
}

/// Whether a world meets faults.
fn is_rough(seed: u64) -> bool {
    seed % 3 == 2
}

/// Runs several processes in one world, one after the other.
///
/// # Panics
/// When the database or a copy is not as it must be.
pub fn copies(seed: u64, flaw: Flaw) -> Report {
    let mut rng = Rng::new(seed ^ 0xC0_B1E5);
    let world = World::new(seed, 1, SimConfig::default());
    world.add_dir(DIR);
    world.add_dir("/files");
    let state = Rc::new(State::default());
    let is_rough = is_rough(seed);
    // Some worlds have one durability; in others it changes.
    let durability = match is_rough {
        true => [Some(Durability::Power), Some(Durability::Process), None][rng.index(3)],
        false => Some(Durability::Power),
    };
    for nth in 0..=PROCESSES {
        let is_last = nth == PROCESSES;
        world.heal();
        world.set_capacity(None);
        flaw.begin(&world);
        let fails = is_rough && !is_last && rng.below(3) > 0;
        let scarce = is_rough && !is_last && rng.below(4) == 0;
        let either = [Durability::Power, Durability::Process][rng.index(2)];
        let process = Rc::new(Process {
            durability: durability.unwrap_or(either),
            state: state.clone(),
            world: world.clone(),
            rng: RefCell::new(rng.fork()),
            changes: if is_last { 0 } else { 20 + rng.below(100) },
            is_rough,
            has_notes: !is_rough && seed % 5 == 4,
            fails,
            scarce,
            is_last,
            ended: Cell::new(is_last),
        });
        state.count(|report| report.failing += u64::from(fails || scarce));
        let crash = if rng.coin() { Crash::Kill } else { Crash::PowerCut };
        if !is_last && rng.below(4) > 0 {
            world.crash_at(crash, 1..[100, 400, 1_200][rng.index(3)]);
        }
        let result = world.run(|core| process.clone().run(core));
        match result.map_err(|failure| failure.kind) {
            Ok(results) => {
                if let Err(error) = &results[0] {
                    panic!("on a sound disk: {error:?}");
                }
                if rng.coin() {
                    world.crash(Crash::PowerCut);
                    state.lose_power();
                }
            }
            Err(FailureKind::Crash(crash)) => {
                if crash == Crash::PowerCut {
                    state.lose_power();
                }
            }
            Err(kind) => panic!("{kind:?}: {}", world.newest_events()),
        }
        state.interrupt();
    }
    flaw.end();
    let mut report = state.report.get();
    report.faults = world.faults();
    report.trace = world.trace();
    report
}
