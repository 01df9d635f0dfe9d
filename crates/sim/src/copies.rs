//! Checkpoints, backups and ingestion of a database that is being written to, with kills and power
//! cuts at any moment.
//!
//! One task writes numbered changes, one after the other: batches, and tables that are ingested.
//! Another makes checkpoints and backups. Change n is always the same, so the contents after n
//! changes are known, and every database says which n it holds. When a process has ended:
//!
//! 1. The database holds the first n changes, among them all acknowledged ones.
//! 2. A checkpoint is there as a whole or not at all. It holds the changes up to one of those that
//!    were made while it was made, whatever was written, merged and recycled since.
//! 3. The same holds for each backup, which is also verified.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use lsm::{
    BackupDir, BatchWriter, Db, Durability, Error, IterOptions, OpenOptions, Reader, Transfer,
    WriteOptions, Writer,
};
use reactor::sim::{Crash, FailureKind, Rng, SimConfig, World};
use reactor::{Class, Core};
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
    /// Checkpoints and backups that were made.
    pub checkpoints: u64,
    /// See [`Report::checkpoints`].
    pub backups: u64,
    /// Checkpoints and backups that were compared, some of them several times.
    pub compared: u64,
    /// Copies that a crash interrupted.
    pub interrupted: u64,
    /// Table files recycled.
    pub rewritten: u64,
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

/// The contents after the first `number` changes.
fn contents(number: u64) -> Pairs {
    let all = (1..=number).flat_map(|number| Change::of(number).pairs());
    all.collect::<BTreeMap<_, _>>().into_iter().collect()
}

/// The number of changes of a database: contents that no number of changes leaves fail the test.
fn number_in(found: &Pairs, place: &str) -> u64 {
    let last = found.iter().find(|(key, _)| key == LAST);
    let last = last.map_or(0, |(_, text)| String::from_utf8_lossy(text).parse().unwrap_or(0));
    // The next change does not set the number.
    let next = match Change::of(last + 1) {
        Change::IngestApart(pairs) => found.iter().any(|(key, _)| *key == pairs[0].0),
        _ => false,
    };
    let number = last + u64::from(next);
    let expected = contents(number);
    if let Some(wrong) = found.iter().zip(&expected).find(|(found, expected)| found != expected) {
        let (found, expected) = wrong;
        let text =
            |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(20)]).into_owned();
        panic!(
            "{place} after {number} changes: {} = {} in place of {} = {}",
            text(&found.0),
            text(&found.1),
            text(&expected.0),
            text(&expected.1)
        );
    }
    assert_eq!(found.len(), expected.len(), "{place} after {number} changes");
    number
}

/// A file as SstFileWriter makes it.
fn external_table(pairs: &Pairs) -> Vec<u8> {
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

/// A copy: it holds at least the changes acknowledged when it was begun, and at most those made
/// when it was finished.
#[derive(Clone, Copy, Debug)]
struct Span {
    least: u64,
    most: u64,
    is_made: bool,
}

#[derive(Default)]
struct State {
    made: Cell<u64>,
    acknowledged: Cell<u64>,
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
        Span { least: self.acknowledged.get(), most: u64::MAX, is_made: false }
    }

    fn end(&self, span: &mut Span) {
        (span.most, span.is_made) = (self.made.get(), true);
    }

    /// After a crash: an interrupted copy, if it is there, has nothing that was made later.
    fn interrupt(&self) {
        let made = self.made.get();
        let mut interrupted = 0;
        for span in self.checkpoints.borrow_mut().values_mut() {
            interrupted += u64::from(span.most == u64::MAX);
            span.most = span.most.min(made);
        }
        for span in self.backups.borrow_mut().values_mut() {
            interrupted += u64::from(span.most == u64::MAX);
            span.most = span.most.min(made);
        }
        self.count(|report| report.interrupted += interrupted);
    }
}

struct Process {
    state: Rc<State>,
    world: World,
    rng: RefCell<Rng>,
    durability: Durability,
    changes: u64,
    ended: Cell<bool>,
}

impl Process {
    fn below(&self, limit: u64) -> u64 {
        self.rng.borrow_mut().below(limit)
    }

    async fn run(self: Rc<Self>, core: Core) -> Result<(), Error> {
        let state = &self.state;
        self.compare_copies(&core).await?;
        let options = WriteOptions {
            durability: self.durability,
            memtable_bytes: 12_000,
            manifest_bytes: 4_000,
            ..WriteOptions::default()
        };
        let opened = Db::open_for_writing(&core, Path::new(DIR), OpenOptions::default(), options);
        let (db, writer) = opened.await?;
        let found = scan(&core, &db).await?;
        let number = number_in(&found, DIR);
        let least = state.acknowledged.get();
        assert!(number >= least, "{number} of {least} acknowledged changes exist");
        assert!(number <= state.made.get(), "{number} of {} changes exist", state.made.get());
        // A kill loses nothing that a reader has seen.
        state.made.set(number);
        state.acknowledged.set(number);
        let reader = db.attach(&core);
        let copying = {
            let (this, own, writer) = (self.clone(), core.clone(), writer.clone());
            core.spawn(Class::Foreground, async move { this.copy(&own, &writer).await })
        };
        for number in number + 1..number + 1 + self.changes {
            state.made.set(number);
            self.make(&core, &writer, &reader, number).await?;
            state.acknowledged.set(number);
            state.count(|report| report.acknowledged += 1);
            if self.below(20) == 0 {
                core.sleep_ns(self.below(3_000_000)).await;
            }
        }
        self.ended.set(true);
        copying.await?;
        state.count(|report| report.rewritten += writer.stats().rewritten_tables);
        if self.below(2) == 0 {
            writer.close().await?;
        }
        drop((reader, db, writer));
        Ok(())
    }

    /// Makes a change.
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
                return writer.write(batch).await.map(drop);
            }
            Change::Ingest(pairs) | Change::IngestApart(pairs) => pairs,
        };
        let path = PathBuf::from(format!("/files/{number}.sst"));
        self.world.add_file(&path, external_table(&pairs));
        let link = self.below(2) == 0;
        writer.ingest_files(&[(0, vec![path.clone()])], link, self.below(2) == 0).await?;
        self.state.count(|report| report.ingested += 1);
        for (key, value) in &pairs {
            let found = reader.get(0, key, None).await?;
            let name = String::from_utf8_lossy(key);
            assert_eq!(found.as_deref(), Some(&value[..]), "{name} after ingestion {number}");
        }
        // The database's file stays.
        core.remove(&path).await.expect("the original is there");
        Ok(())
    }

    /// Makes copies until the writer has ended.
    async fn copy(&self, core: &Core, writer: &Writer) -> Result<(), Error> {
        let state = &self.state;
        while !self.ended.get() {
            core.sleep_ns(self.below(6_000_000)).await;
            if self.below(3) > 0 {
                let path = PathBuf::from(format!("/copy{}", state.checkpoints.borrow().len()));
                let mut span = state.begin();
                state.checkpoints.borrow_mut().insert(path.clone(), span);
                writer.checkpoint(&path).await?;
                state.end(&mut span);
                state.checkpoints.borrow_mut().insert(path, span);
                state.count(|report| report.checkpoints += 1);
                continue;
            }
            let newest = newest_backup(core).await?;
            let mut span = state.begin();
            let live = writer.live_files(self.below(3) * 8_000).await?;
            // Later changes are not on the list.
            span.most = state.made.get();
            state.backups.borrow_mut().insert(newest + 1, span);
            let mut quiet = |_, _| {};
            let mut transfer = Transfer::new(core, None, &mut quiet);
            let backups = BackupDir::new(core, Path::new(BACKUPS));
            let made = backups.create(live.list(), &mut transfer).await?;
            assert_eq!(made.id, newest + 1);
            span.is_made = true;
            state.backups.borrow_mut().insert(made.id, span);
            state.count(|report| report.backups += 1);
        }
        Ok(())
    }

    /// Compares all copies with what they may hold.
    async fn compare_copies(&self, core: &Core) -> Result<(), Error> {
        let state = &self.state;
        let checkpoints = state.checkpoints.borrow().clone();
        for (path, span) in checkpoints {
            let is_there = core.list(&path).await.is_ok_and(|entries| !entries.is_empty());
            assert!(is_there || !span.is_made, "{} is missing", path.display());
            if is_there {
                compare(core, &path, span).await?;
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
            assert!(is_there || !span.is_made, "backup {id} is missing");
        }
        for backup in &listed {
            let mut quiet = |_, _| {};
            let mut transfer = Transfer::new(core, None, &mut quiet);
            let damages = backups.verify(Some(backup.id), &mut transfer).await?.damages;
            assert!(damages.is_empty(), "backup {}: {damages:?}", backup.id);
        }
        if let Some(newest) = listed.last() {
            state.restored.set(state.restored.get() + 1);
            let path = PathBuf::from(format!("/restored{}", state.restored.get()));
            let mut quiet = |_, _| {};
            let mut transfer = Transfer::new(core, None, &mut quiet);
            backups.restore(Some(newest.id), &path, &mut transfer).await?;
            compare(core, &path, spans[&newest.id]).await?;
            state.count(|report| report.compared += 1);
        }
        Ok(())
    }
}

async fn newest_backup(core: &Core) -> Result<u32, Error> {
    let backups = BackupDir::new(core, Path::new(BACKUPS));
    match backups.list().await {
        Ok((listed, _)) => Ok(listed.last().map_or(0, |backup| backup.id)),
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

async fn compare(core: &Core, path: &Path, span: Span) -> Result<(), Error> {
    let place = path.display().to_string();
    let opened = Db::open(core, path, OpenOptions::default()).await;
    let db = opened.unwrap_or_else(|error| panic!("{place}: {error}"));
    let found = scan(core, &db).await.unwrap_or_else(|error| panic!("{place}: {error}"));
    let number = number_in(&found, &place);
    assert!((span.least..=span.most).contains(&number), "{place} holds {number}: {span:?}");
    Ok(())
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
    flaw.begin(&world);
    for process in 0..=PROCESSES {
        let last = process == PROCESSES;
        let process = Rc::new(Process {
            state: state.clone(),
            world: world.clone(),
            rng: RefCell::new(rng.fork()),
            durability: Durability::Power,
            changes: if last { 0 } else { 20 + rng.below(100) },
            ended: Cell::new(last),
        });
        let crash = if rng.coin() { Crash::Kill } else { Crash::PowerCut };
        if !last && rng.below(4) > 0 {
            world.crash_at(crash, 1..[100, 400, 1_200][rng.index(3)]);
        }
        let result = world.run(|core| process.clone().run(core));
        match result.map_err(|failure| failure.kind) {
            Ok(results) => {
                if let Err(error) = &results[0] {
                    panic!("on a sound disk: {error}");
                }
                if rng.coin() {
                    world.crash(Crash::PowerCut);
                }
            }
            Err(FailureKind::Crash(_)) => {}
            Err(kind) => panic!("{kind:?}"),
        }
        state.interrupt();
    }
    flaw.end();
    let mut report = state.report.get();
    report.trace = world.trace();
    report
}
