//! The engine, killed and without power at any moment, against a list of what was written.
//!
//! One core owns the database, and several of its tasks write: batches of puts and deletes, with
//! values from 10 bytes to 100 KB, into memtables so small that they are switched, flushed and
//! merged all the time. In every third world the keys are spread over several column families. The
//! MANIFEST is replaced when it has grown. All cores read. A process after the other runs on the
//! same disk, each at its own durability:
//!
//! 1. It opens the database and finds what is left. Batches are put in order when they are handed
//!    over, so that must be what the first so many of them lead to: whole batches, without a hole,
//!    and none that was acknowledged is missing. Every batch also sets one certain key to its
//!    number, which says how many there are.
//! 2. Writers write, readers compare what they see with the list, all in one moment or key by key.
//! 3. Somewhere the process is killed or power is cut, also while it opens the database; or it
//!    closes the database; or an operation on the disk fails, the writing ends, and reading goes
//!    on. Or the disk is full for a while: writes are refused and leave nothing, reading goes on,
//!    and so does writing when there is space again, in the same process.
//!
//! A power cut leaves less to be promised of what was acknowledged at `process`: then the opening
//! may be refused with damage in a log, with salvage it must succeed, and every key must have one
//! of the values it had since it was last durable.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::rc::Rc;

use lsm::{
    BatchWriter, Db, Durability, Error, IterOptions, Kind, OpenOptions, Reader, Snapshot,
    WriteOptions, Writer, Written,
};
use reactor::sim::{
    Access, Crash, FailureKind, Fault, FaultCounts, FaultKind, Rng, SimConfig, World,
};
use reactor::{Class, Core, JoinHandle};
use rocksfmt::{LogWriter, VersionEdit};

/// Where the database is in the simulated world.
pub const DIR: &str = "/db";

/// What is wrong with the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Nothing.
    None,
    /// It forgets to sync the files whose names end like this; for [`DIR`], to sync the names.
    NoSync(&'static str),
    /// One of the mutants that are built into it.
    Mutant(&'static str),
}

impl Flaw {
    /// Makes the engine wrong in a world.
    pub(crate) fn begin(self, world: &World) {
        match self {
            Flaw::None => {}
            Flaw::NoSync(end) => world.add_fault(Fault::new(FaultKind::Skip).on(end)),
            Flaw::Mutant(name) => lsm::set_mutant(name),
        }
    }

    /// Makes it right again.
    pub(crate) fn end(self) {
        if let Flaw::Mutant(_) = self {
            lsm::set_mutant("");
        }
    }
}

/// What a run did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Batches acknowledged.
    pub acknowledged: u64,
    /// Batches found by an opening that nobody had acknowledged.
    pub unacknowledged_found: u64,
    /// Whole looks at the database that were compared with the list.
    pub scans: u64,
    /// Lookups that were compared with the list.
    pub gets: u64,
    /// Databases that were loaded.
    pub loads: u64,
    /// Times that what was written was made durable.
    pub syncs: u64,
    /// Openings.
    pub openings: u64,
    /// Openings that were crashed.
    pub crashed_openings: u64,
    /// Openings that needed salvage.
    pub salvaged: u64,
    /// Openings that knew the number of keys.
    pub counted: u64,
    /// Processes killed.
    pub kills: u64,
    /// Power cuts.
    pub power_cuts: u64,
    /// Databases closed.
    pub closes: u64,
    /// Processes whose writing ended with an error.
    pub failures: u64,
    /// Batches refused because the disk was full, and times that it was found full, by processes
    /// that came to their end.
    pub refused: u64,
    /// See [`Report::refused`].
    pub full: u64,
    /// Memtables written to tables, and merges, by processes that came to their end.
    pub flushes: u64,
    /// See [`Report::flushes`].
    pub merges: u64,
    /// Tables that they wrote over old ones.
    pub rewritten: u64,
    /// Faults that struck.
    pub faults: FaultCounts,
    /// The trace's hash and number of events.
    pub trace: (u64, u64),
}

/// A value that no other write has: it begins with its batch and its place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Content {
    batch: u64,
    place: u16,
    len: u32,
}

impl Content {
    fn bytes(self) -> Vec<u8> {
        let mut bytes = self.batch.to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.place.to_le_bytes());
        let fill = (self.batch as u8).wrapping_mul(31).wrapping_add(self.place as u8);
        let len = self.len as usize;
        // Half of it is easy to compress.
        bytes.resize(bytes.len().max(len / 2), fill);
        let mut noise = self.batch | 1;
        while bytes.len() < len {
            noise = noise.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            bytes.extend_from_slice(&noise.to_le_bytes());
        }
        bytes.truncate(len.max(10));
        bytes
    }
}

/// The key that every batch sets to its number.
const LAST: &[u8] = b"last";

/// What was written: for every key, what batches made of it, in order.
#[derive(Default)]
struct Model {
    keys: BTreeMap<Vec<u8>, Vec<(u64, Option<Content>)>>,
    /// The number of the newest batch.
    batches: u64,
    /// So many must be there when a process opens the database.
    acknowledged: u64,
    /// So many after a power cut.
    durable: u64,
    /// The newest number that stands for a clearing of the database.
    cleared: u64,
    /// The logs may hold what was written at `process`.
    process_logs: bool,
    /// Power was cut then. So it is until the database was opened, or what salvage left is gone.
    loose: bool,
    /// After such an opening: what [`LAST`] said then, and which number that stands for.
    adopted: Option<(u64, u64)>,
    report: Report,
}

/// Keys and values, sorted.
pub type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

fn text(key: &[u8]) -> String {
    String::from_utf8_lossy(key).into_owned()
}

/// The batch that a value is of.
fn batch_of(value: &[u8]) -> u64 {
    value.first_chunk().map_or(u64::MAX, |number| u64::from_le_bytes(*number))
}

impl Model {
    /// What a key is after batch `number`.
    fn at(&self, key: &[u8], number: u64) -> Option<Content> {
        let changes = self.keys.get(key)?;
        let after = changes.partition_point(|(batch, _)| *batch <= number);
        changes[..after].last()?.1
    }

    /// The batches after `number` have never been.
    fn truncate(&mut self, number: u64) {
        for changes in self.keys.values_mut() {
            changes.retain(|(batch, _)| *batch <= number);
        }
        self.keys.retain(|_, changes| !changes.is_empty());
        self.batches = number;
        self.cleared = self.cleared.min(number);
        self.acknowledged = self.acknowledged.min(number);
    }

    /// A batch was refused, and all behind it will be.
    fn refuse(&mut self, number: u64) {
        if number <= self.batches {
            self.truncate(number - 1);
        }
    }

    /// How many batches there are, from what [`LAST`] says.
    fn number_in(&self, found: &Pairs) -> u64 {
        let last = found.iter().find(|(key, _)| key == LAST);
        let says = last.map_or(self.cleared, |(_, value)| batch_of(value));
        match self.adopted {
            Some((last, number)) if last == says => number,
            _ => says,
        }
    }

    /// Whether all that was found is what batch `number` led to.
    fn compare(&self, found: &Pairs, number: u64) {
        let mut rest = found.iter();
        for key in self.keys.keys() {
            let Some(content) = self.at(key, number) else { continue };
            let name = text(key);
            let Some((next, value)) = rest.next() else {
                panic!("{name} is missing after batch {number}");
            };
            assert!(next == key, "{} stands where {name} should after batch {number}", text(next));
            assert!(
                *value == content.bytes(),
                "{name} is of batch {} and should be {content:?}",
                batch_of(value)
            );
        }
        if let Some((key, _)) = rest.next() {
            panic!("{} should not be there after batch {number}", text(key));
        }
    }

    /// Whether each key has one of the values it had since it was durable. Then that is how it is
    /// from now on.
    fn adopt(&mut self, found: &Pairs) {
        let mut left: BTreeMap<&[u8], &[u8]> =
            found.iter().map(|(key, value)| (&key[..], &value[..])).collect();
        let last = left.get(LAST).map_or(self.cleared, |value| batch_of(value));
        let now = self.batches;
        for (key, changes) in &mut self.keys {
            let value = left.remove(&key[..]);
            let first = changes.partition_point(|(batch, _)| *batch <= self.durable);
            let possible = &changes[first.saturating_sub(1)..];
            let is = match possible
                .iter()
                .find(|(_, content)| content.map(Content::bytes).as_deref() == value)
            {
                Some((_, is)) => *is,
                None => {
                    let says = value.map(batch_of);
                    let name = text(key);
                    assert!(
                        first == 0 && value.is_none(),
                        "{name} is of batch {says:?} and should be one of {possible:?}"
                    );
                    None
                }
            };
            changes.push((now, is));
        }
        assert!(left.is_empty(), "nobody wrote {:?}", left.keys().map(|key| text(key)));
        self.acknowledged = now;
        self.adopted = Some((last, now));
    }
}

/// Everything that one process shares. Its cores are one thread.
struct Process {
    model: Rc<RefCell<Model>>,
    db: RefCell<Option<Db>>,
    options: WriteOptions,
    reading: OpenOptions,
    rng: RefCell<Rng>,
    /// The owner is done: the others end, too.
    ended: Cell<bool>,
    /// The disk is full for a while.
    scarce: bool,
    /// And nothing else is wrong with it.
    sound: bool,
    world: World,
    /// How many keys there may be.
    keys: u64,
    families: u32,
    batches_max: u64,
}

/// The column family of a key, where there are so many.
fn family_of(key: &[u8], families: u32) -> u32 {
    key.iter().map(|&byte| u32::from(byte)).sum::<u32>() % families
}

/// Makes a database with several column families.
pub(crate) fn add_families(world: &World, families: u32) {
    let first = VersionEdit {
        db_id: Some("a database".into()),
        comparator: Some("leveldb.BytewiseComparator".into()),
        log_number: Some(0),
        next_file_number: Some(2),
        last_sequence: Some(0),
        keys: Some(0),
        ..VersionEdit::default()
    };
    let (mut log, mut bytes) = (LogWriter::new(None, 0), Vec::new());
    log.append(&first.encode(), &mut bytes);
    for id in 1..families {
        let add = VersionEdit {
            column_family: id,
            column_family_add: Some(format!("f{id}")),
            comparator: Some("leveldb.BytewiseComparator".into()),
            log_number: Some(0),
            ..VersionEdit::default()
        };
        log.append(&add.encode(), &mut bytes);
    }
    world.add_file(format!("{DIR}/MANIFEST-000001"), bytes);
    world.add_file(format!("{DIR}/IDENTITY"), b"a database".to_vec());
    world.add_file(format!("{DIR}/CURRENT"), b"MANIFEST-000001\n".to_vec());
}

impl Process {
    fn below(&self, limit: u64) -> u64 {
        self.rng.borrow_mut().below(limit)
    }

    /// A random key; some are the beginning of others.
    fn key(&self) -> Vec<u8> {
        let n = self.below(self.keys);
        let tail = ["", "-a", "-a-long-tail-that-others-do-not-have", "/", "z"][n as usize % 5];
        format!("key{:04}{tail}", n / 2).into_bytes()
    }

    fn len(&self) -> u32 {
        let (least, most) = match self.below(100) {
            0..60 => (10, 100),
            60..90 => (100, 1_500),
            90..99 => (1_500, 12_000),
            _ => (12_000, 100_000),
        };
        (least + self.below(most - least)) as u32
    }

    /// Hands a batch over. Returns its number.
    fn submit(&self, writer: &Writer) -> Result<(u64, Written), Error> {
        let mut model = self.model.borrow_mut();
        let number = model.batches + 1;
        let mut batch = BatchWriter::new();
        let mut changes: Vec<(Vec<u8>, Option<Content>)> = Vec::new();
        let ops = if self.below(4) == 0 { self.below(12) } else { self.below(3) };
        for place in 0..ops {
            let content = Content { batch: number, place: place as u16, len: self.len() };
            changes.push((self.key(), (self.below(4) > 0).then_some(content)));
        }
        changes.push((LAST.to_vec(), Some(Content { batch: number, place: 99, len: 10 })));
        let mut delta = 0;
        for (key, content) in &changes {
            let family = family_of(key, self.families);
            if family == 0 {
                delta -= i64::from(model.at(key, number).is_some());
                delta += i64::from(content.is_some());
            }
            match content {
                Some(content) => batch.put(family, key, &content.bytes()),
                None => batch.delete(family, key),
            }
            model.keys.entry(key.clone()).or_default().push((number, *content));
        }
        match writer.submit(batch, Some(delta)) {
            Ok(written) => {
                model.batches = number;
                Ok((number, written))
            }
            Err(error) => {
                model.truncate(number - 1);
                Err(error)
            }
        }
    }

    /// Hands over that the database be cleared, which counts as a batch.
    fn clear(&self, writer: &Writer) -> Result<(u64, Written), Error> {
        let mut written = writer.clear(0)?;
        for family in 1..self.families {
            written = writer.clear(family)?;
        }
        let mut model = self.model.borrow_mut();
        model.batches += 1;
        let number = model.batches;
        model.cleared = number;
        for changes in model.keys.values_mut() {
            changes.push((number, None));
        }
        Ok((number, written))
    }

    /// Loads a database that has nothing, which counts as a batch.
    async fn load(&self, writer: &Writer) -> Result<(), Error> {
        let mut entries = BTreeMap::new();
        for place in 0..self.below(60) {
            let content = Content { batch: 1, place: place as u16, len: self.len() };
            entries.insert(self.key(), content);
        }
        entries.insert(LAST.to_vec(), Content { batch: 1, place: 99, len: 10 });
        {
            let mut model = self.model.borrow_mut();
            model.batches = 1;
            for (key, content) in &entries {
                model.keys.insert(key.clone(), vec![(1, Some(*content))]);
            }
        }
        let mut left = entries.into_iter();
        let load = writer.bulk_load(0, async |key, value| {
            let Some((next, content)) = left.next() else { return Ok(false) };
            key.extend_from_slice(&next);
            value.extend_from_slice(&content.bytes());
            Ok(true)
        });
        if let Err(error) = load.await {
            if error.kind() == Kind::Full && self.scarce {
                self.model.borrow_mut().truncate(0);
                return Ok(());
            }
            return Err(error);
        }
        let mut model = self.model.borrow_mut();
        (model.acknowledged, model.durable) = (1, 1);
        model.report.loads += 1;
        Ok(())
    }

    /// What was handed over before is durable after this.
    async fn sync(&self, writer: &Writer) -> Result<(), Error> {
        let number = self.model.borrow().batches;
        let synced = match writer.sync() {
            Ok(synced) => synced.await,
            Err(error) => Err(error),
        };
        match synced {
            Err(error) if error.kind() == Kind::Full && self.scarce => return Ok(()),
            synced => synced?,
        };
        let mut model = self.model.borrow_mut();
        model.durable = model.durable.max(number);
        model.report.syncs += 1;
        Ok(())
    }

    fn acknowledge(&self, number: u64) {
        let mut model = self.model.borrow_mut();
        model.report.acknowledged += 1;
        model.acknowledged = model.acknowledged.max(number);
        // What salvage left in the logs is gone by now.
        model.loose = false;
        if self.options.durability == Durability::Power {
            model.durable = model.durable.max(number);
            // And what earlier processes left there is in tables.
            model.process_logs = false;
        }
    }

    /// Writes some batches, one after the other or a few at once.
    async fn write(&self, core: &Core, writer: &Writer) -> Result<(), Error> {
        let at_once = 1 + self.below(4) as usize;
        let mut waiting: VecDeque<(u64, Written)> = VecDeque::new();
        for _ in 0..self.below(self.batches_max) {
            if waiting.len() >= at_once
                && let Some(first) = waiting.pop_front()
                && !self.is_done(first).await?
            {
                // All behind it are refused, too.
                for next in waiting.drain(..) {
                    assert!(!self.is_done(next).await?, "a batch behind one that was refused");
                }
                core.sleep_ns(self.below(200_000_000)).await;
            }
            if self.below(8) == 0 {
                core.sleep_ns(self.below(400_000)).await;
            }
            let submitted = match self.below(300) {
                0 => self.clear(writer),
                _ => self.submit(writer),
            };
            match submitted {
                Ok(written) => waiting.push_back(written),
                // Somebody has not heard yet that he was refused.
                Err(error) if error.kind() == Kind::Full && self.scarce => {}
                Err(error) => return Err(error),
            }
            if self.below(100) == 0 {
                self.sync(writer).await?;
            }
        }
        for next in waiting {
            self.is_done(next).await?;
        }
        Ok(())
    }

    /// Waits for a batch. False when it was refused.
    async fn is_done(&self, (number, written): (u64, Written)) -> Result<bool, Error> {
        match written.await {
            Ok(_) => self.acknowledge(number),
            Err(error) if error.kind() == Kind::Full && self.scarce => {
                self.model.borrow_mut().refuse(number);
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Fills the disk for a while, some times.
    async fn fill(&self, core: &Core) {
        for _ in 0..1 + self.below(4) {
            core.sleep_ns(self.below(20_000_000)).await;
            let left = self.below([500, 10_000, 60_000, 200_000][self.below(4) as usize]);
            self.world.set_capacity(Some(self.world.used() + left));
            core.sleep_ns(self.below(2_000_000_000)).await;
            self.world.set_capacity(None);
        }
    }

    /// There is space again: writing must go on.
    async fn goes_on(&self, core: &Core, writer: &Writer) -> Result<(), Error> {
        for _ in 0..200 {
            if let Ok(written) = self.submit(writer)
                && self.is_done(written).await?
            {
                return Ok(());
            }
            core.sleep_ns(500_000_000).await;
        }
        panic!("writing does not go on: {:?}, {:?}", writer.failure(), writer.stats());
    }

    /// All that is there in one moment, forward or backward.
    async fn scan(&self, reader: &Reader, backward: bool) -> Result<Pairs, Error> {
        if self.families == 1 {
            return Self::scan_family(reader, 0, None, backward).await;
        }
        let snapshot = reader.snapshot()?;
        let mut found = Vec::new();
        for family in 0..self.families {
            let pairs = Self::scan_family(reader, family, Some(&snapshot), backward).await?;
            assert!(pairs.iter().all(|(key, _)| family_of(key, self.families) == family));
            assert!(pairs.is_sorted());
            found.extend(pairs);
        }
        found.sort();
        Ok(found)
    }

    async fn scan_family(
        reader: &Reader,
        family: u32,
        snapshot: Option<&Snapshot>,
        backward: bool,
    ) -> Result<Pairs, Error> {
        let mut found = Vec::new();
        let mut iter = reader.iter(family, IterOptions { snapshot, ..IterOptions::default() })?;
        if backward {
            iter.seek_to_last().await?;
        } else {
            iter.seek_to_first().await?;
        }
        while iter.valid() {
            found.push((iter.key().to_vec(), iter.value().to_vec()));
            if backward {
                iter.prev().await?;
            } else {
                iter.next().await?;
            }
        }
        if backward {
            found.reverse();
        }
        Ok(found)
    }

    /// Compares all that is there with the list. Returns how many batches that is, if it is not
    /// nothing: nothing may have been there more than once.
    async fn look(&self, reader: &Reader, least: u64) -> Result<Option<u64>, Error> {
        let backward = self.below(2) == 0;
        let found = self.scan(reader, backward).await?;
        let mut model = self.model.borrow_mut();
        let number = model.number_in(&found);
        assert!(number >= least, "{number} of {least} acknowledged batches are there");
        assert!(number <= model.batches, "batch {number} of {} was never written", model.batches);
        model.compare(&found, number);
        model.report.scans += 1;
        Ok((!found.is_empty()).then_some(number))
    }

    /// One key: not older than what was acknowledged before, not newer than what was handed over.
    async fn get(&self, reader: &Reader) -> Result<(), Error> {
        let key = self.key();
        let least = self.model.borrow().acknowledged;
        let found = reader.get(family_of(&key, self.families), &key, None).await?;
        let mut model = self.model.borrow_mut();
        let fits =
            |number| model.at(&key, number).map(Content::bytes).as_deref() == found.as_deref();
        let changes = model.keys.get(&key).into_iter().flatten().map(|(batch, _)| *batch);
        let fits = fits(least) || changes.filter(|batch| *batch > least).any(fits);
        assert!(fits, "{} has a value that it never had", String::from_utf8_lossy(&key));
        model.report.gets += 1;
        Ok(())
    }

    /// Reads until the owner is done.
    async fn read(&self, core: &Core, db: &Db) {
        let reader = db.attach(core);
        let mut seen = 0;
        while !self.ended.get() {
            // The disk is full for seconds.
            let most = if self.scarce { 60_000_000 } else { 600_000 };
            core.sleep_ns(self.below(most)).await;
            if self.below(4) == 0 {
                let least = self.model.borrow().acknowledged.max(seen);
                match self.look(&reader, least).await {
                    Ok(number) => seen = number.unwrap_or(seen),
                    // The database was cleared meanwhile.
                    Err(error) if error.kind() == Kind::Expired => {}
                    Err(error) => panic!("no read fails: {error}"),
                }
            } else {
                self.get(&reader).await.expect("no read fails");
            }
        }
    }

    /// Opens the database and demands that what must be there is.
    async fn open(&self, core: &Core) -> Result<(Db, Writer), Error> {
        let open =
            |reading| Db::open_for_writing(core, Path::new(DIR), reading, self.options.clone());
        let loose = self.model.borrow().loose;
        let mut salvaged = false;
        let (db, writer) = match open(self.reading.clone()).await {
            Err(error) if loose && error.kind() == Kind::Corruption => {
                assert!(error.to_string().contains(".log"), "damage outside of logs: {error}");
                salvaged = true;
                open(OpenOptions { salvage: true, ..self.reading.clone() }).await?
            }
            opened => opened?,
        };
        let keys = db.keys();
        let found = self.scan(&db.attach(core), false).await?;
        let mut model = self.model.borrow_mut();
        let number = model.number_in(&found);
        if loose {
            model.adopt(&found);
            model.loose = salvaged;
        } else {
            let least = model.acknowledged;
            assert!(number >= least, "{number} of {least} acknowledged batches are there");
            let most = model.batches;
            assert!(number <= most, "batch {number} of {most} was never written");
            model.compare(&found, number);
            model.report.unacknowledged_found += number - least;
            model.truncate(number);
            // A kill takes nothing away that was seen.
            model.acknowledged = number;
        }
        if let Some(keys) = keys {
            let of_default = found.iter().filter(|(key, _)| family_of(key, self.families) == 0);
            assert_eq!(keys, of_default.count() as u64, "the number of keys");
            model.report.counted += 1;
        }
        model.report.salvaged += u64::from(salvaged);
        model.report.openings += 1;
        model.process_logs |= self.options.durability == Durability::Process;
        Ok((db, writer))
    }

    /// What the owner core does. The error is of the opening or of the writing.
    async fn own(self: &Rc<Self>, core: &Core) -> Result<(), Error> {
        let (db, writer) = self.open(core).await?;
        self.db.replace(Some(db.clone()));
        let is_new = self.model.borrow().batches == 0;
        if is_new && self.families == 1 && self.below(3) == 0 {
            self.load(&writer).await?;
        }
        let mut writers: Vec<JoinHandle<Result<(), Error>>> = Vec::new();
        for _ in 0..1 + self.below(3) {
            let (this, handle, writer) = (self.clone(), core.clone(), writer.clone());
            let write = async move { this.write(&handle, &writer).await };
            writers.push(core.spawn(Class::Foreground, write));
        }
        let (this, handle, own) = (self.clone(), core.clone(), db.clone());
        core.spawn(Class::Foreground, async move { this.read(&handle, &own).await });
        let (this, handle) = (self.clone(), core.clone());
        let fill = self
            .scarce
            .then(|| core.spawn(Class::Foreground, async move { this.fill(&handle).await }));
        let mut result = Ok(());
        for task in writers {
            result = result.and(task.await);
        }
        if let Some(fill) = fill {
            fill.await;
            if self.sound {
                assert!(result.is_ok(), "a full disk ends nothing: {result:?}");
                self.goes_on(core, &writer).await?;
            }
        }
        if result.is_ok() && self.below(2) == 0 {
            result = writer.close().await;
            self.model.borrow_mut().report.closes += u64::from(result.is_ok());
        }
        // Reading goes on, whatever has become of the writing.
        let least = self.model.borrow().acknowledged;
        self.look(&db.attach(core), least).await.expect("no read fails");
        let stats = writer.stats();
        let report = &mut self.model.borrow_mut().report;
        report.refused += stats.refused;
        report.full += stats.disk_full_times;
        report.flushes += stats.flushed_tables;
        report.merges += stats.merges;
        report.rewritten += stats.rewritten_tables;
        result
    }

    async fn run(self: Rc<Self>, core: Core) -> Result<(), Error> {
        if core.id() == 0 {
            let result = self.own(&core).await;
            self.ended.set(true);
            self.db.take();
            return result;
        }
        while !self.ended.get() {
            let db = self.db.borrow().clone();
            if let Some(db) = db {
                self.read(&core, &db).await;
            }
            core.sleep_ns(20_000).await;
        }
        Ok(())
    }
}

/// Faults of one process.
fn add_faults(world: &World, rng: &mut Rng) {
    let error = |errno| Fault::new(FaultKind::Error(errno));
    match rng.below(4) {
        // The disk is full, for as long as this process lives.
        0 => world.add_fault(error(28).of(Access::Write).after(rng.below(60))),
        1 => world.add_fault(error(5).of(Access::Sync).after(rng.below(40)).times(1)),
        2 => world.add_fault(error(5).of(Access::Write).after(rng.below(60)).times(1)),
        _ => world.add_fault(Fault::new(FaultKind::NameError(5)).after(rng.below(40)).times(1)),
    }
    world.add_fault(Fault::new(FaultKind::Short).of(Access::Write).chance(20_000));
    world.add_fault(Fault::new(FaultKind::Stall(0..5_000_000)).of(Access::Sync).chance(20_000));
}

/// Runs several processes in one world, one after the other.
///
/// # Panics
/// When the database loses or makes up something.
pub fn engine(seed: u64, flaw: Flaw) -> Report {
    engine_judged(seed, flaw, |_| None)
}

/// The same, and between two processes somebody else may say what he finds in the directory when
/// nothing that must be there is missing for him.
///
/// # Panics
/// As [`engine`]; also when he finds something else.
pub fn engine_judged(
    seed: u64,
    flaw: Flaw,
    mut judge: impl FnMut(&World) -> Option<Pairs>,
) -> Report {
    let mut rng = Rng::new(seed ^ 0x0E11_61E5);
    let cores = 1 + rng.index(3);
    let world = World::new(seed, cores, SimConfig::default());
    world.add_dir(DIR);
    let model: Rc<RefCell<Model>> = Rc::default();
    let failing = rng.below(3) == 0;
    let scarce = seed % 4 == 1;
    // Worlds of one durability, and worlds in which it changes.
    let durability = [None, Some(Durability::Power), Some(Durability::Process)][rng.index(3)];
    let keys = [8, 60, 400][rng.index(3)];
    let families = if seed % 3 == 2 { 4 } else { 1 };
    if families > 1 {
        add_families(&world, families);
    }
    for _ in 0..5 {
        world.heal();
        // The process may find the disk as full as the last one did.
        if !scarce || rng.coin() {
            world.set_capacity(None);
        }
        flaw.begin(&world);
        if rng.below(4) == 0 {
            // Tables take long, and writes go on meanwhile.
            let stall = FaultKind::Stall(1_000_000..30_000_000);
            world.add_fault(Fault::new(stall).of(Access::Sync).on(".sst"));
        }
        let fails = failing && rng.coin();
        if fails {
            add_faults(&world, &mut rng);
        }
        let either = [Durability::Power, Durability::Process][rng.index(2)];
        let process = Rc::new(Process {
            model: model.clone(),
            db: RefCell::default(),
            options: WriteOptions {
                durability: durability.unwrap_or(either),
                memtable_bytes: [20_000, 60_000, 200_000][rng.index(3)],
                manifest_bytes: [3_000, 40_000][rng.index(2)],
                ..WriteOptions::default()
            },
            reading: OpenOptions {
                cache_bytes: rng.index(2) * 100_000,
                memory_bytes: [2_000, usize::MAX][rng.index(2)],
                recovered_bytes: [10_000, usize::MAX][rng.index(2)],
                ..OpenOptions::default()
            },
            rng: RefCell::new(rng.fork()),
            ended: Cell::new(false),
            scarce,
            sound: !fails,
            world: world.clone(),
            keys,
            families,
            batches_max: [80, if scarce { 400 } else { 80 }, 80, 400][rng.index(4)],
        });
        let crash = if rng.coin() { Crash::Kill } else { Crash::PowerCut };
        // Early ones meet the opening.
        let latest = [30, 150, 600, 3_000][rng.index(4)];
        world.crash_at(crash, 1..if scarce { 4 * latest } else { latest });
        let openings = model.borrow().report.openings;
        let result = world.run(|core| process.clone().run(core));
        let opened = model.borrow().report.openings > openings;
        let mut model = model.borrow_mut();
        let mut cut = false;
        match result.map_err(|failure| failure.kind) {
            Ok(results) => {
                if let Err(error) = &results[0] {
                    assert!(fails || (scarce && !opened), "on a sound disk: {error}");
                    model.report.failures += 1;
                }
                // Power may be cut while nobody has it open, too.
                if rng.below(3) == 0 {
                    world.crash(Crash::PowerCut);
                    cut = true;
                }
            }
            Err(FailureKind::Crash(crash)) => {
                model.report.crashed_openings += u64::from(!opened);
                model.report.kills += u64::from(crash == Crash::Kill);
                cut = crash == Crash::PowerCut;
            }
            Err(kind) => panic!("{kind:?}"),
        }
        if cut {
            model.report.power_cuts += 1;
            model.acknowledged = model.durable;
            model.loose |= model.process_logs;
        }
        let is_made = world.bytes(format!("{DIR}/CURRENT")).is_ok();
        if is_made
            && !model.loose
            && let Some(found) = judge(&world)
        {
            let (number, least) = (model.number_in(&found), model.acknowledged);
            assert!(number >= least, "the judge finds {number} of {least} acknowledged batches");
            model.compare(&found, number);
        }
    }
    flaw.end();
    let mut report = model.borrow().report;
    report.faults = world.faults();
    report.trace = world.trace();
    report
}
