//! The engine, with kills and power cuts at any moment, checked against a list of all writes.
//!
//! One core owns the database, and several of its tasks write: batches of puts, deletes and range
//! deletes, with values from 10 bytes to 100 KB, into memtables so small that they are switched,
//! flushed and merged all the time. In some worlds of one column family merge operands set values,
//! too (RocksDB's operator `put`), and single deletes remove values that were set once. In every
//! third world the keys are spread over several column
//! families, and another one comes and goes (`families.rs`). In three of seven worlds merges are
//! paused, limited, requested and cancelled. In three of four pairs of worlds large values go to
//! blob files, and the garbage in these is collected. The MANIFEST is replaced when it has grown.
//! All cores read. Processes run one after the other on the same disk, each at its own durability:
//!
//! 1. It opens the database and compares it with the list. Batches are ordered at their submission,
//!    so the contents must be those of the first n batches: whole batches, without a gap, including
//!    all acknowledged ones. Every batch also sets one special key to its number, which tells n.
//! 2. Writers write; readers compare the database with the list, all keys at one moment or key by
//!    key.
//! 3. At some point the process is killed or power is cut, also while it opens the database; or it
//!    closes the database; or operations on the disk fail, once or for a while: on logs, tables,
//!    the MANIFEST, CURRENT or names. Or the disk is full for a while. Writes are then refused
//!    without effect, or their fate is unknown until the next opening or the next accepted write.
//!    Reading continues, and writing continues in the same process when the disk works again. In
//!    some worlds the device also stalls for a second now and then, and one read fails: that is
//!    repeated.
//! 4. In every second world a last process meets no fault. Its writers end, merges and collections
//!    come to rest, and every level has the size that the options allow.
//!
//! After a power cut less is promised of writes acknowledged at `process`: the opening may then
//! fail with damage in a log; with salvage it must succeed, and every key must have one of the
//! values it had since it was last durable.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::rc::Rc;

use lsm::{
    BatchWriter, ColumnFamilyOptions, CompactionLimits, CompactionWatch, Db, Durability, Error,
    IterOptions, Kind, MergeOperator, OpenOptions, Reader, Snapshot, WriteOptions, Writer, Written,
};
use reactor::sim::{
    Access, Crash, FailureKind, Fault, FaultCounts, FaultKind, Rng, SimConfig, World,
};
use reactor::{Class, Core, JoinHandle};
use rocksfmt::{LogWriter, VersionEdit};

use crate::families::{self, Extra};

/// The path of the database in the simulated world.
pub const DIR: &str = "/db";

/// A fault of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// None.
    None,
    /// It does not sync files whose names have this ending; for [`DIR`], it does not sync names.
    NoSync(&'static str),
    /// One of its built-in mutants.
    Mutant(&'static str),
}

impl Flaw {
    /// Sets the fault in a world.
    pub(crate) fn begin(self, world: &World) {
        match self {
            Flaw::None => {}
            Flaw::NoSync(end) => world.add_fault(Fault::new(FaultKind::Skip).on(end)),
            Flaw::Mutant(name) => lsm::set_mutant(name),
        }
    }

    /// Removes the fault.
    pub(crate) fn end(self) {
        if let Flaw::Mutant(_) = self {
            lsm::set_mutant("");
        }
    }
}

/// The counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Batches acknowledged.
    pub acknowledged: u64,
    /// Batches found by an opening that had not been acknowledged.
    pub unacknowledged_found: u64,
    /// Full scans of the database that were compared with the list.
    pub scans: u64,
    /// Lookups that were compared with the list.
    pub gets: u64,
    /// Scans of one moment that were repeated later, and were equal.
    pub held: u64,
    /// Databases loaded.
    pub loads: u64,
    /// Syncs of all writes.
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
    /// Openings that an operation on the disk failed.
    pub failures: u64,
    /// Batches whose fate was unknown, and those of them that the next opening found.
    pub unknown: u64,
    /// See [`Report::unknown`].
    pub unknown_found: u64,
    /// Logs and MANIFESTs that were replaced after a failed write, in processes that ended
    /// normally.
    pub heals: u64,
    /// Batches refused because the disk was full, and the number of times that it was full, in
    /// processes that ended normally.
    pub refused: u64,
    /// See [`Report::refused`].
    pub full: u64,
    /// Memtables written to tables, and merges, in processes that ended normally.
    pub flushes: u64,
    /// See [`Report::flushes`].
    pub merges: u64,
    /// Table files that they recycled.
    pub rewritten: u64,
    /// Blob files that they began, and values that they stored in them.
    pub blob_files: u64,
    /// See [`Report::blob_files`].
    pub blob_values: u64,
    /// Collections of their garbage, and values that these moved.
    pub blob_collections: u64,
    /// See [`Report::blob_collections`].
    pub blob_moved: u64,
    /// Column families made and dropped.
    pub families_made: u64,
    /// See [`Report::families_made`].
    pub families_dropped: u64,
    /// Merge operands, and single deletes.
    pub operands: u64,
    /// See [`Report::operands`].
    pub single_deletes: u64,
    /// Databases that came to rest, and levels below level 0 that they then had.
    pub rested: u64,
    /// See [`Report::rested`].
    pub rested_levels: u64,
    /// Compactions on request, and those of them that were cancelled.
    pub compactions: u64,
    /// See [`Report::compactions`].
    pub cancelled: u64,
    /// Faults that struck.
    pub faults: FaultCounts,
    /// The trace's hash and number of events.
    pub trace: (u64, u64),
}

/// A unique value: it begins with its batch and its position in the batch.
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
        // Half of it compresses well.
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

/// All writes: for every key, the values that batches gave it, in order.
#[derive(Default)]
struct Model {
    keys: BTreeMap<Vec<u8>, Vec<(u64, Option<Content>)>>,
    /// The number of the newest batch.
    batches: u64,
    /// Number of batches that must exist when a process opens the database.
    acknowledged: u64,
    /// The same after a power cut.
    durable: u64,
    /// The numbers of the clearings of the database.
    clears: Vec<u64>,
    /// The logs may have writes at durability `process`.
    process_logs: bool,
    /// Power was cut in that state. True until the database was opened, or the logs that salvage
    /// left are gone.
    loose: bool,
    /// After such an opening: the value of [`LAST`] then, and the batch number that it represents.
    adopted: Option<(u64, u64)>,
    /// Batches of unknown fate by number. Readers do not see them. They may be there after a
    /// crash, unless a later batch was accepted.
    unknown: BTreeMap<u64, Unknown>,
    /// How often a batch became unknown, and for each batch, how often before its submission.
    doubts: u64,
    /// It was unknown at some time what had been written.
    mixes: bool,
    doubts_before: BTreeMap<u64, u64>,
    extra: Extra,
    report: Report,
}

/// A batch of unknown fate.
struct Unknown {
    doubt: u64,
    changes: Vec<(Vec<u8>, Option<Content>)>,
    clears: bool,
    /// It writes to the extra column family.
    is_extra: bool,
}

/// Keys and values, sorted.
pub type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

fn text(key: &[u8]) -> String {
    String::from_utf8_lossy(key).into_owned()
}

/// The batch of a value.
fn batch_of(value: &[u8]) -> u64 {
    value.first_chunk().map_or(u64::MAX, |number| u64::from_le_bytes(*number))
}

impl Model {
    /// The value of a key after batch `number`.
    fn at(&self, key: &[u8], number: u64) -> Option<Content> {
        let changes = self.keys.get(key)?;
        let after = changes.partition_point(|(batch, _)| *batch <= number);
        changes[..after].last()?.1
    }

    /// Removes the batches after `number`.
    fn truncate(&mut self, number: u64) {
        for changes in self.keys.values_mut() {
            changes.retain(|(batch, _)| *batch <= number);
        }
        self.keys.retain(|_, changes| !changes.is_empty());
        self.batches = number;
        self.extra.truncate(number);
        self.clears.retain(|&clear| clear <= number);
        self.acknowledged = self.acknowledged.min(number);
    }

    /// Notes that a batch was refused; all later ones will be.
    fn refuse(&mut self, number: u64) {
        if number <= self.batches {
            self.truncate(number - 1);
        }
    }

    /// Notes that the fate of a batch is unknown.
    fn doubt(&mut self, number: u64) {
        let mut changes = Vec::new();
        for (key, of_key) in &mut self.keys {
            let of_batch = of_key.extract_if(.., |(batch, _)| *batch == number);
            changes.extend(of_batch.map(|(_, content)| (key.clone(), content)));
        }
        let clears = self.clears.contains(&number);
        if !clears {
            // It was submitted, and went to a log, after the fate of these was settled.
            let settled = self.doubts_before.get(&number).copied().unwrap_or(0);
            self.unknown.retain(|_, unknown| unknown.doubt >= settled);
        }
        self.clears.retain(|&clear| clear != number);
        let is_extra = self.extra.remove(number);
        self.unknown.insert(number, Unknown { doubt: self.doubts, changes, clears, is_extra });
        self.doubts += 1;
        self.report.unknown += 1;
    }

    /// Settles unknown batches by what an opening has found. They are there up to one of them.
    fn settle(&mut self, found: &Pairs) {
        let last = found.iter().find(|(key, _)| key == LAST).map(|(_, value)| batch_of(value));
        let is_last = |(number, unknown): &(&u64, &Unknown)| match unknown.clears {
            true => found.is_empty(),
            false => last == Some(**number),
        };
        let there = self.unknown.iter().filter(is_last).map(|(number, _)| *number).max();
        for (number, unknown) in std::mem::take(&mut self.unknown) {
            let is_there = there.is_some_and(|last| number <= last);
            if !is_there && !self.loose {
                continue;
            }
            self.report.unknown_found += u64::from(is_there);
            for (key, content) in unknown.changes {
                let of_key = self.keys.entry(key).or_default();
                let at = of_key.partition_point(|(batch, _)| *batch <= number);
                of_key.insert(at, (number, content));
            }
            if unknown.clears && is_there {
                self.clears.push(number);
            }
            if unknown.is_extra {
                self.extra.write(number);
            }
        }
    }

    /// The number of the newest clearing.
    fn cleared(&self) -> u64 {
        self.clears.last().copied().unwrap_or(0)
    }

    /// The number of batches, from the value of [`LAST`].
    fn number_in(&self, found: &Pairs) -> u64 {
        let last = found.iter().find(|(key, _)| key == LAST);
        let says = last.map_or(self.cleared(), |(_, value)| batch_of(value));
        match self.adopted {
            Some((last, number)) if last == says => number,
            _ => says,
        }
    }

    /// Checks that the found contents are those after batch `number`.
    fn compare(&self, found: &Pairs, number: u64) {
        let mut rest = found.iter();
        for key in self.keys.keys() {
            let Some(content) = self.at(key, number) else { continue };
            let name = text(key);
            let Some((next, value)) = rest.next() else {
                panic!("{name} is missing after batch {number}");
            };
            assert!(next == key, "{} is in place of {name} after batch {number}", text(next));
            assert!(
                *value == content.bytes(),
                "{name} is of batch {} and should be {content:?} after batch {number}",
                batch_of(value)
            );
        }
        if let Some((key, _)) = rest.next() {
            panic!("{} should not be there after batch {number}", text(key));
        }
    }

    /// Checks that each key has one of the values it had since it was durable. These values are the
    /// contents from now on.
    fn adopt(&mut self, found: &Pairs) {
        let mut left: BTreeMap<&[u8], &[u8]> =
            found.iter().map(|(key, value)| (&key[..], &value[..])).collect();
        let last = left.get(LAST).map_or(self.cleared(), |value| batch_of(value));
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
        assert!(
            left.is_empty(),
            "keys that were not written: {:?}",
            left.keys().map(|key| text(key))
        );
        self.acknowledged = now;
        self.adopted = Some((last, now));
    }
}

/// The shared state of one process. Its cores run on one thread.
struct Process {
    model: Rc<RefCell<Model>>,
    db: RefCell<Option<Db>>,
    options: WriteOptions,
    reading: OpenOptions,
    rng: RefCell<Rng>,
    /// Merges are paused, limited, requested and cancelled.
    controls: bool,
    /// Chance of the changes of column families and of merges.
    changes: RefCell<Rng>,
    /// The owner has ended: the others end, too.
    ended: Cell<bool>,
    /// The disk is full for a while.
    scarce: bool,
    /// The disk has no other fault.
    sound: bool,
    /// Background work comes to rest at the end.
    rests: bool,
    /// There are merge operands and single deletes, too.
    merges: bool,
    world: World,
    /// The largest number of keys.
    keys: u64,
    families: u32,
    batches_max: u64,
}

/// The column family of a key, with `families` families.
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

    /// The same for the changes of column families and of merges.
    fn chance(&self, limit: u64) -> u64 {
        self.changes.borrow_mut().below(limit)
    }

    /// A random key; some are prefixes of others.
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

    /// Submits a batch. Returns its number.
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
        if self.below(12) == 0 {
            delta += self.delete_range(&mut model, number, &mut batch);
        }
        for (key, content) in changes {
            let family = family_of(&key, self.families);
            let exists = model.at(&key, number).is_some();
            let is_single = self.has_single_deletes(&mut model, &key);
            let content = match content {
                None if is_single && !exists => continue,
                Some(_) if is_single && exists => None,
                content => content,
            };
            if family == 0 {
                delta += i64::from(content.is_some()) - i64::from(exists);
            }
            match content {
                Some(content) if self.is_operand(content) && !is_single => {
                    batch.merge(family, &key, &content.bytes());
                    model.report.operands += 1;
                }
                Some(content) => batch.put(family, &key, &content.bytes()),
                None if is_single => {
                    batch.single_delete(family, &key);
                    model.report.single_deletes += 1;
                }
                None => batch.delete(family, &key),
            }
            model.keys.entry(key).or_default().push((number, content));
        }
        if let Some(extra) = model.extra.id().filter(|_| self.chance(3) == 0) {
            batch.put(extra, families::KEY, &Extra::value(number));
            model.extra.write(number);
        }
        match writer.submit(batch, Some(delta)) {
            Ok(written) => {
                model.batches = number;
                let doubts = model.doubts;
                model.doubts_before.insert(number, doubts);
                Ok((number, written))
            }
            Err(error) => {
                model.truncate(number - 1);
                Err(error)
            }
        }
    }

    /// Whether a content is a merge operand.
    fn is_operand(&self, content: Content) -> bool {
        self.merges && (content.batch + u64::from(content.place)).is_multiple_of(3)
    }

    /// Whether a key is only ever set while it does not exist, by a put, and deleted by single
    /// deletes: RocksDB allows no other mixture. That ends when it is unknown what was written.
    fn has_single_deletes(&self, model: &mut Model, key: &[u8]) -> bool {
        model.mixes |= model.doubts > 0 || model.adopted.is_some() || model.loose;
        self.merges && !model.mixes && key.ends_with(b"z")
    }

    /// Deletes a range of keys in all column families. Returns the change of the number of keys.
    fn delete_range(&self, model: &mut Model, number: u64, batch: &mut BatchWriter) -> i64 {
        let (a, b) = (self.key(), self.key());
        let (start, end) = (a.clone().min(b.clone()), a.max(b));
        for family in 0..self.families {
            batch.delete_range(family, &start, &end);
        }
        let mut delta = 0;
        let gone: Vec<Vec<u8>> = model.keys.range(start..end).map(|(key, _)| key.clone()).collect();
        for key in gone {
            let is_counted = family_of(&key, self.families) == 0;
            delta -= i64::from(is_counted && model.at(&key, number).is_some());
            model.keys.entry(key).or_default().push((number, None));
        }
        delta
    }

    /// Submits a clearing of the database, which counts as a batch.
    fn clear(&self, writer: &Writer) -> Result<(u64, Written), Error> {
        let mut written = writer.clear(0)?;
        for family in 1..self.families {
            written = writer.clear(family)?;
        }
        let mut model = self.model.borrow_mut();
        model.batches += 1;
        let number = model.batches;
        model.clears.push(number);
        let doubts = model.doubts;
        model.doubts_before.insert(number, doubts);
        for changes in model.keys.values_mut() {
            changes.push((number, None));
        }
        Ok((number, written))
    }

    /// Loads an empty database, which counts as a batch.
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
            let mut model = self.model.borrow_mut();
            match error.kind() {
                Kind::Full if self.scarce => model.truncate(0),
                Kind::Full | Kind::Memory if !self.sound => model.truncate(0),
                Kind::Io if !self.sound => model.doubt(1),
                _ => return Err(error),
            }
            return Ok(());
        }
        let mut model = self.model.borrow_mut();
        (model.acknowledged, model.durable) = (1, 1);
        model.report.loads += 1;
        Ok(())
    }

    /// Makes all batches submitted before durable.
    async fn sync(&self, writer: &Writer) -> Result<(), Error> {
        let number = self.model.borrow().batches;
        let synced = match writer.sync() {
            Ok(synced) => synced.await,
            Err(error) => Err(error),
        };
        match synced {
            Err(error) if self.refuses(&error) || self.doubts(&error) => return Ok(()),
            synced => synced?,
        };
        let mut model = self.model.borrow_mut();
        model.durable = model.durable.max(number);
        model.report.syncs += 1;
        Ok(())
    }

    /// Whether an error says that something was not written.
    fn refuses(&self, error: &Error) -> bool {
        error.kind() == Kind::Full && (self.scarce || !self.sound)
    }

    /// Whether an error says that the fate of something is unknown.
    fn doubts(&self, error: &Error) -> bool {
        error.kind() == Kind::Io && !self.sound
    }

    fn acknowledge(&self, number: u64) {
        let mut model = self.model.borrow_mut();
        model.report.acknowledged += 1;
        model.acknowledged = model.acknowledged.max(number);
        model.unknown.retain(|unknown, _| *unknown > number);
        // The logs that salvage left are gone by now.
        model.loose = false;
        if self.options.durability == Durability::Power {
            model.durable = model.durable.max(number);
            // Writes that earlier processes left there are in tables.
            model.process_logs = false;
        }
    }

    /// Writes some batches, one after the other or a few together.
    async fn write(&self, core: &Core, writer: &Writer) -> Result<(), Error> {
        let mut waiting = VecDeque::new();
        let written = self.write_some(core, writer, &mut waiting).await;
        // The list must know of those that were refused: others may be accepted afterwards.
        for next in waiting {
            let done = self.is_done(next).await;
            if written.is_ok() {
                done?;
            }
        }
        written
    }

    async fn write_some(
        &self,
        core: &Core,
        writer: &Writer,
        waiting: &mut VecDeque<(u64, Written)>,
    ) -> Result<(), Error> {
        let at_once = 1 + self.below(4) as usize;
        for _ in 0..self.below(self.batches_max) {
            if waiting.len() >= at_once
                && let Some(first) = waiting.pop_front()
                && !self.is_done(first).await?
            {
                // All later ones are refused, too.
                for next in waiting.drain(..) {
                    assert!(!self.is_done(next).await?, "a batch after a refused one was accepted");
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
                // A waiter has not yet learned that its batch was refused.
                Err(error) if self.refuses(&error) => {}
                Err(error) => return Err(error),
            }
            if self.below(100) == 0 {
                self.sync(writer).await?;
            }
        }
        Ok(())
    }

    /// Waits for a batch. False when it was refused.
    async fn is_done(&self, (number, written): (u64, Written)) -> Result<bool, Error> {
        match written.await {
            Ok(_) => self.acknowledge(number),
            Err(error) if self.refuses(&error) => {
                self.model.borrow_mut().refuse(number);
                return Ok(false);
            }
            Err(error) if self.doubts(&error) => {
                self.model.borrow_mut().doubt(number);
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Makes and drops a column family, several times.
    async fn change_families(&self, core: &Core, writer: &Writer) -> Result<(), Error> {
        for _ in 0..self.chance(8) {
            core.sleep_ns(self.chance([50_000, 1_000_000, 20_000_000][self.chance(3) as usize]))
                .await;
            let (is_gone, id) = {
                let extra = &self.model.borrow().extra;
                (extra.is_gone(), extra.id())
            };
            let changed = match id {
                Some(id) => {
                    self.model.borrow_mut().extra.begin_dropping();
                    writer.drop_column_family(id).await.map(|()| None)
                }
                None if is_gone => {
                    self.model.borrow_mut().extra.begin_making();
                    let options = ColumnFamilyOptions::default();
                    writer.create_column_family(families::NAME, options).await.map(Some)
                }
                // Its fate is unknown until the next opening.
                None => return Ok(()),
            };
            let model = &mut *self.model.borrow_mut();
            let now = match changed {
                Ok(now) => {
                    let count = match now {
                        Some(_) => &mut model.report.families_made,
                        None => &mut model.report.families_dropped,
                    };
                    *count += 1;
                    now
                }
                Err(error) if self.refuses(&error) => id,
                // The next MANIFEST was not made.
                Err(error) if error.kind() == Kind::Memory && !self.sound => id,
                Err(error) if self.doubts(&error) => return Ok(()),
                Err(error) => return Err(error),
            };
            match now {
                Some(id) => model.extra.note_there(id),
                None => model.extra.note_gone(),
            }
        }
        Ok(())
    }

    /// Pauses, limits, requests and cancels merges, several times.
    async fn control_merges(&self, core: &Core, writer: &Writer) -> Result<(), Error> {
        for _ in 0..self.chance(6) {
            let a_while =
                |this: &Self| this.chance([20_000, 500_000, 10_000_000][this.chance(3) as usize]);
            core.sleep_ns(a_while(self)).await;
            match self.chance(4) {
                0 => {
                    writer.pause_compaction();
                    let since_ns = core.now_ns();
                    core.sleep_ns(a_while(self)).await;
                    let paused_ns = core.now_ns() - since_ns;
                    for job in writer.compaction_status().jobs {
                        assert!(job.ns >= paused_ns, "a merge has begun in a pause: {job:?}");
                    }
                    writer.resume_compaction();
                }
                1 => writer.limit_compaction(CompactionLimits {
                    cores_percent: [None, Some(1), Some(30)][self.chance(3) as usize],
                    bytes_per_second: [None, Some(100_000), Some(10_000_000)]
                        [self.chance(3) as usize],
                }),
                _ => {
                    let (watch, family) =
                        (CompactionWatch::default(), self.chance(self.families.into()));
                    let (own, watched) = (writer.clone(), watch.clone());
                    let compact = async move {
                        own.compact_watched(family as u32, None, None, &watched).await
                    };
                    let compaction = core.spawn(Class::Background, compact);
                    core.sleep_ns(a_while(self)).await;
                    let mut is_cut = false;
                    if self.chance(3) > 0 {
                        let jobs = writer.compaction_status().jobs;
                        is_cut = jobs.iter().any(|job| job.is_requested);
                        writer.cancel_compaction(&watch);
                        self.model.borrow_mut().report.cancelled += 1;
                    }
                    let compacted = compaction.await;
                    self.model.borrow_mut().report.compactions += 1;
                    if let Ok(compacted) = &compacted {
                        assert!(compacted.cancelled || !is_cut, "a compaction was not cancelled");
                    }
                    match compacted {
                        Err(error) if self.refuses(&error) || self.doubts(&error) => {}
                        Err(error) if error.kind() == Kind::Memory && !self.sound => {}
                        // A merge that leaves no table must wait for the flush of values in logs.
                        Err(error)
                            if error.kind() == Kind::Memory && self.options.blob_min.is_some() => {}
                        compacted => drop(compacted?),
                    }
                }
            }
        }
        writer.limit_compaction(CompactionLimits::default());
        Ok(())
    }

    /// Fills the disk for a while, several times.
    async fn fill(&self, core: &Core) {
        for _ in 0..1 + self.below(4) {
            core.sleep_ns(self.below(20_000_000)).await;
            let left = self.below([500, 10_000, 60_000, 200_000][self.below(4) as usize]);
            self.world.set_capacity(Some(self.world.used() + left));
            core.sleep_ns(self.below(2_000_000_000)).await;
            self.world.set_capacity(None);
        }
    }

    /// Checks that writing continues when there is space again.
    async fn goes_on(&self, core: &Core, writer: &Writer) -> Result<(), Error> {
        for _ in 0..200 {
            match self.submit(writer) {
                Ok(written) => {
                    if self.is_done(written).await? {
                        return Ok(());
                    }
                }
                Err(error) if writer.failure().is_some() => return Err(error),
                Err(_) => {}
            }
            core.sleep_ns(500_000_000).await;
        }
        panic!("writing does not continue: {:?}, {:?}", writer.failure(), writer.stats());
    }

    /// Waits until nothing is left to be flushed, merged or collected, and checks the sizes of the
    /// levels. A flush, a merge or a collection that is due takes milliseconds.
    async fn rest(&self, core: &Core, db: &Db, writer: &Writer) {
        for _ in 0..3_000 {
            if writer.is_quiesced() {
                break;
            }
            core.sleep_ns(20_000_000).await;
        }
        assert!(writer.is_quiesced(), "background work does not end: {:?}", writer.stats());
        let option = |name: &str, default: f64| {
            let given = self.options.column_family_options.get(name);
            given.map_or(default, |text| text.parse().expect("a number"))
        };
        let base = option("max_bytes_for_level_base", 268_435_456.0);
        let multiplier = option("max_bytes_for_level_multiplier", 10.0);
        let dynamic = "level_compaction_dynamic_level_bytes";
        let dynamic =
            self.options.column_family_options.get(dynamic).is_some_and(|on| on == "true");
        let mut levels = 0;
        for family in db.stat().column_families {
            let files = family.levels.first().map_or(0, |level| level.files);
            // A merge that would rewrite much waits for three times the trigger.
            assert!(files < 12, "level 0 of {} has {files} files", family.name);
            let bytes: Vec<f64> = family.levels.iter().map(|level| level.bytes as f64).collect();
            let filled = bytes.iter().skip(1).filter(|&&bytes| bytes > 0.0).count();
            levels += filled as u64;
            let Some(last) = bytes.iter().rposition(|&bytes| bytes > 0.0) else { continue };
            // The deepest level that the options allow has no limit.
            let allowed = option("num_levels", 7.0) as usize - 1;
            if dynamic {
                let above: f64 = bytes[1..last.max(1)].iter().sum();
                let most = bytes[last] / (multiplier - 1.0) + base;
                assert!(above <= most, "{above} bytes above the deepest level: {bytes:?}");
            } else {
                let mut target = base;
                for &bytes in bytes.iter().take(allowed).skip(1) {
                    assert!(bytes <= target, "a level of {target} bytes is too large: {bytes}");
                    target *= multiplier;
                }
            }
        }
        let report = &mut self.model.borrow_mut().report;
        report.rested += 1;
        report.rested_levels += levels;
    }

    /// Scans a moment twice: merges between the scans must keep what it sees.
    async fn hold(&self, core: &Core, reader: &Reader) -> Result<(), Error> {
        let snapshot = reader.snapshot()?;
        let before = self.scan_at(reader, Some(&snapshot), false).await?;
        if before.is_empty() {
            // A new database that is loaded meanwhile has all values from its beginning.
            return Ok(());
        }
        core.sleep_ns(self.below(30_000_000)).await;
        let after = self.scan_at(reader, Some(&snapshot), self.below(2) == 0).await?;
        if before != after {
            let text = |pairs: &Pairs| -> Vec<String> {
                let one = |(key, value): &(Vec<u8>, Vec<u8>)| {
                    format!("{} of batch {} ({} B)", text(key), batch_of(value), value.len())
                };
                pairs.iter().map(one).collect()
            };
            let (before, after) = (text(&before), text(&after));
            let gone = before.iter().filter(|line| !after.contains(line)).collect::<Vec<_>>();
            let new = after.iter().filter(|line| !before.contains(line)).collect::<Vec<_>>();
            panic!("a snapshot has changed: {gone:?} became {new:?} of {}", before.len());
        }
        self.model.borrow_mut().report.held += 1;
        Ok(())
    }

    /// Reads the whole database at one moment, forward or backward.
    async fn scan(&self, reader: &Reader, backward: bool) -> Result<Pairs, Error> {
        if self.families == 1 {
            return self.scan_at(reader, None, backward).await;
        }
        let snapshot = reader.snapshot()?;
        self.scan_at(reader, Some(&snapshot), backward).await
    }

    async fn scan_at(
        &self,
        reader: &Reader,
        snapshot: Option<&Snapshot>,
        backward: bool,
    ) -> Result<Pairs, Error> {
        if self.families == 1 {
            return Self::scan_family(reader, 0, snapshot, backward).await;
        }
        let mut found = Vec::new();
        for family in 0..self.families {
            let pairs = Self::scan_family(reader, family, snapshot, backward).await?;
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

    /// Compares the whole database with the list. Returns its number of batches, unless it is
    /// empty, which may be the state after several batches.
    async fn look(&self, reader: &Reader, least: u64) -> Result<Option<u64>, Error> {
        let backward = self.below(2) == 0;
        let found = self.scan(reader, backward).await?;
        let mut model = self.model.borrow_mut();
        let number = model.number_in(&found);
        assert!(number >= least, "{number} of {least} acknowledged batches exist");
        assert!(number <= model.batches, "batch {number} of {} was never written", model.batches);
        model.compare(&found, number);
        model.report.scans += 1;
        Ok((!found.is_empty()).then_some(number))
    }

    /// Checks one key: not older than the acknowledged batches, not newer than the submitted ones.
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

    /// Reads until the owner has ended.
    async fn read(&self, core: &Core, db: &Db) {
        let reader = db.attach(core);
        let mut seen = 0;
        while !self.ended.get() {
            // The disk is full for seconds.
            let most = if self.scarce { 60_000_000 } else { 600_000 };
            core.sleep_ns(self.below(most)).await;
            if self.rests && self.below(4) == 0 {
                match self.hold(core, &reader).await {
                    Ok(()) => {}
                    // The database was cleared meanwhile.
                    Err(error) if error.kind() == Kind::Expired => {}
                    Err(error) => panic!("no read fails: {error}"),
                }
            } else if self.below(4) == 0 {
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

    /// Opens the database and checks that all required batches exist.
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
        let reader = db.attach(core);
        let found = self.scan(&reader, false).await?;
        let extra = db.column_families().into_iter().find(|family| family.name == families::NAME);
        let extra = match extra {
            Some(family) => {
                let value = reader.get(family.id, families::KEY, None).await?;
                Some((family.id, value.map(|value| value.to_vec())))
            }
            None => None,
        };
        let mut model = self.model.borrow_mut();
        model.settle(&found);
        let number = model.number_in(&found);
        model.extra.settle(extra, (!loose).then_some(number));
        if loose {
            model.adopt(&found);
            model.loose = salvaged;
        } else {
            let least = model.acknowledged;
            assert!(number >= least, "{number} of {least} acknowledged batches exist");
            let most = model.batches;
            assert!(number <= most, "batch {number} of {most} was never written");
            model.compare(&found, number);
            model.report.unacknowledged_found += number - least;
            model.truncate(number);
            // A kill loses nothing that a reader has seen.
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

    /// The owner core's work. The error is that of the opening or of writing.
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
        if self.families > 1 {
            let (this, handle, writer) = (self.clone(), core.clone(), writer.clone());
            let change = async move { this.change_families(&handle, &writer).await };
            writers.push(core.spawn(Class::Foreground, change));
        }
        if self.controls {
            let (this, handle, writer) = (self.clone(), core.clone(), writer.clone());
            let control = async move { this.control_merges(&handle, &writer).await };
            writers.push(core.spawn(Class::Foreground, control));
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
        }
        if !self.sound {
            self.world.heal();
        }
        if result.is_ok() && (self.scarce || !self.sound) {
            result = self.goes_on(core, &writer).await;
        }
        assert!(result.is_ok(), "the disk ended writing: {result:?}");
        if self.rests {
            self.rest(core, &db, &writer).await;
        }
        if result.is_ok() && self.below(2) == 0 {
            result = writer.close().await;
            self.model.borrow_mut().report.closes += u64::from(result.is_ok());
        }
        // Reading continues, whether or not writing has ended.
        let least = self.model.borrow().acknowledged;
        self.look(&db.attach(core), least).await.expect("no read fails");
        let stats = writer.stats();
        let report = &mut self.model.borrow_mut().report;
        report.refused += stats.refused;
        report.heals += stats.heals;
        report.full += stats.disk_full_times;
        report.flushes += stats.flushed_tables;
        report.merges += stats.merges;
        report.rewritten += stats.rewritten_tables;
        report.blob_files += stats.blob_files;
        report.blob_values += stats.blob_values;
        report.blob_collections += stats.blob_collections;
        report.blob_moved += stats.blob_moved_values;
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
    // Once, or for a while; everywhere, or on one kind of file.
    let times = [1, 1, 2, 3, 12, 1_000_000][rng.index(6)];
    let place = ["", ".log", ".log", ".sst", "MANIFEST", "CURRENT.dbtmp", DIR][rng.index(7)];
    let on = |fault: Fault, after| {
        let fault = fault.after(after).times(times);
        match place {
            "" => fault,
            "MANIFEST" => fault.within("MANIFEST-"),
            place => fault.on(place),
        }
    };
    let after = rng.below(if place.is_empty() { 60 } else { 20 });
    match rng.below(8) {
        // A log fails, and so do tables for a while.
        6 | 7 => {
            let log = if rng.coin() { Access::Sync } else { Access::Write };
            world.add_fault(error(5).of(log).on(".log").after(after).times(1));
            let table = match rng.below(3) {
                0 => error(5).of(Access::Write).on(".sst"),
                1 => error(5).of(Access::Sync).on(".sst"),
                _ => Fault::new(FaultKind::NameError(24)).on(".sst"),
            };
            world.add_fault(table.times(1 + rng.below(12)));
        }
        // The device is gone for a while.
        5 => {
            for access in [Access::Write, Access::Sync] {
                world.add_fault(error(5).of(access).after(after).times(1_000_000));
            }
            world.add_fault(Fault::new(FaultKind::NameError(5)).after(after).times(1_000_000));
        }
        // Some system calls find the disk full although there is space.
        0 => world.add_fault(on(error(28).of(Access::Write), after)),
        1 => world.add_fault(on(error(5).of(Access::Sync), after)),
        2 => world.add_fault(on(error(5).of(Access::Write), after)),
        3 => world.add_fault(on(error(12).of(Access::Write), after)),
        _ => world.add_fault(on(Fault::new(FaultKind::NameError(5)), after)),
    }
    if rng.coin() {
        world.add_fault(on(error(5).of(Access::Sync), 0).chance(200_000));
        world.add_fault(on(Fault::new(FaultKind::NameError(5)), 0).chance(100_000));
    }
    world.add_fault(Fault::new(FaultKind::Short).of(Access::Write).chance(20_000));
    world.add_fault(Fault::new(FaultKind::Stall(0..5_000_000)).of(Access::Sync).chance(20_000));
}

/// Blob files that fail, once or for a while.
fn add_blob_faults(world: &World, rng: &mut Rng) {
    let access = if rng.below(3) == 0 { Access::Write } else { Access::Sync };
    let fault = Fault::new(FaultKind::Error([5, 28][rng.index(2)])).of(access).on(".blob");
    let times = [1, 1, 3, 1_000_000][rng.index(4)];
    world.add_fault(fault.after(rng.below(12)).times(times));
}

/// A device that now and then stalls for a second, transfers less than requested, and fails one
/// read: nobody may notice more than the time.
fn add_roughness(world: &World, rng: &mut Rng) {
    for access in [Access::Read, Access::Write, Access::Sync] {
        let stall = Fault::new(FaultKind::Stall(500_000_000..1_500_000_000)).of(access);
        world.add_fault(stall.after(rng.below(200)).times(1 + rng.below(3)));
    }
    world.add_fault(Fault::new(FaultKind::Short).chance(20_000));
    // A read that fails is repeated once, so no more than one may fail.
    world.add_fault(Fault::new(FaultKind::Error(5)).after(rng.below(150)).times(1));
}

/// In worlds from this seed on, every process meets failing operations.
pub const FAILING: u64 = 1 << 32;

/// Runs several processes in one world, one after the other.
///
/// # Panics
/// When the database loses or invents data.
pub fn engine(seed: u64, flaw: Flaw) -> Report {
    run(seed, flaw, true, |_| None)
}

/// Options by which a few hundred kilobytes fill several levels.
fn small_levels(rng: &mut Rng) -> BTreeMap<String, String> {
    let options = [
        ("num_levels", 3 + rng.below(5)),
        ("max_bytes_for_level_base", 20_000 + rng.below(200_000)),
        ("max_bytes_for_level_multiplier", 2 + rng.below(4)),
        ("target_file_size_base", 4_000 + rng.below(60_000)),
        ("max_compaction_bytes", 50_000 + rng.below(500_000)),
    ];
    let options = options.map(|(name, value)| (name.to_owned(), value.to_string()));
    let dynamic = ("level_compaction_dynamic_level_bytes".to_owned(), rng.coin().to_string());
    options.into_iter().chain([dynamic]).collect()
}

/// The same; between two processes a judge may read the directory and report the number of batches
/// that it finds.
///
/// # Panics
/// As [`engine`]; also when the judge finds other contents.
pub fn engine_judged(seed: u64, flaw: Flaw, judge: impl FnMut(&World) -> Option<Pairs>) -> Report {
    run(seed, flaw, true, judge)
}

fn run(
    seed: u64,
    flaw: Flaw,
    may_merge: bool,
    mut judge: impl FnMut(&World) -> Option<Pairs>,
) -> Report {
    let mut rng = Rng::new(seed ^ 0x0E11_61E5);
    let cores = 1 + rng.index(3);
    let world = World::new(seed, cores, SimConfig::default());
    world.add_dir(DIR);
    let model: Rc<RefCell<Model>> = Rc::default();
    let failing = seed >= FAILING || rng.below(3) == 0;
    let scarce = seed % 4 == 1;
    let mut roughness = (seed % 5 == 4).then(|| Rng::new(seed ^ 0x57A1));
    // Blob files are as short as possible.
    let blob_min = [None, Some(300), Some(30), Some(3_000)][seed as usize / 2 % 4];
    // Their garbage is collected early, late, or not.
    let blob_space = [Some(1.1), Some(1.5), Some(1.1), Some(100.0)][seed as usize / 8 % 4];
    let mut blob_faults = (failing && blob_min.is_some()).then(|| Rng::new(seed ^ 0xB10B));
    let mut changes = Rng::new(seed ^ 0xC4A2);
    // Some worlds have one durability; in others it changes.
    let durability = [None, Some(Durability::Power), Some(Durability::Process)][rng.index(3)];
    let keys = [8, 60, 400][rng.index(3)];
    let families = if seed % 3 == 2 { 4 } else { 1 };
    let column_family_options =
        if rng.below(3) > 0 { small_levels(&mut rng) } else { BTreeMap::new() };
    if families > 1 {
        add_families(&world, families);
    }
    let merges = may_merge && seed % 4 == 3 && families == 1;
    for nth in 0..if seed.is_multiple_of(2) { 6 } else { 5 } {
        let rests = nth == 5;
        let (failing, scarce) = (failing && !rests, scarce && !rests);
        world.heal();
        // The disk may be as full for this process as for the last one.
        if !scarce || rng.coin() {
            world.set_capacity(None);
        }
        flaw.begin(&world);
        if rng.below(4) == 0 {
            // Tables take long, and writes continue meanwhile.
            let stall = FaultKind::Stall(1_000_000..30_000_000);
            world.add_fault(Fault::new(stall).of(Access::Sync).on(".sst"));
        }
        let fails = failing && (seed >= FAILING || rng.coin());
        if fails {
            add_faults(&world, &mut rng);
            if let Some(rng) = &mut blob_faults
                && rng.coin()
            {
                add_blob_faults(&world, rng);
            }
        }
        if let Some(rng) = roughness.as_mut().filter(|_| !rests) {
            add_roughness(&world, rng);
        }
        let either = [Durability::Power, Durability::Process][rng.index(2)];
        let process = Rc::new(Process {
            model: model.clone(),
            db: RefCell::default(),
            options: WriteOptions {
                durability: durability.unwrap_or(either),
                memtable_bytes: [20_000, 60_000, 200_000][rng.index(3)],
                manifest_bytes: [3_000, 40_000][rng.index(2)],
                column_family_options: column_family_options.clone(),
                blob_min,
                blob_file_bytes: 1,
                blob_space_max_ratio: blob_space,
                merge_operator: merges.then_some(MergeOperator::Put),
                ..WriteOptions::default()
            },
            reading: OpenOptions {
                cache_bytes: rng.index(2) * 100_000,
                memory_bytes: [2_000, usize::MAX][rng.index(2)],
                recovered_bytes: [10_000, usize::MAX][rng.index(2)],
                ..OpenOptions::default()
            },
            rng: RefCell::new(rng.fork()),
            controls: seed % 7 < 3 && !rests,
            changes: RefCell::new(changes.fork()),
            ended: Cell::new(false),
            scarce,
            sound: !fails,
            rests,
            merges,
            world: world.clone(),
            keys,
            families,
            batches_max: [80, if scarce { 400 } else { 80 }, 80, 400][rng.index(4)],
        });
        let crash = if rng.coin() { Crash::Kill } else { Crash::PowerCut };
        // Early crashes occur during the opening.
        let latest = [30, 150, 600, 3_000][rng.index(4)];
        if !rests {
            world.crash_at(crash, 1..if scarce { 4 * latest } else { latest });
        }
        let openings = model.borrow().report.openings;
        let result = world.run(|core| process.clone().run(core));
        let opened = model.borrow().report.openings > openings;
        let mut model = model.borrow_mut();
        let mut cut = false;
        match result.map_err(|failure| failure.kind) {
            Ok(results) => {
                if let Err(error) = &results[0] {
                    assert!(!opened && (fails || scarce), "writing or closing fails: {error}");
                    model.report.failures += 1;
                }
                // Power may also be cut while the database is not open.
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
            && let Some(mut found) = judge(&world)
        {
            found.retain(|(key, _)| key != families::KEY);
            model.settle(&found);
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

/// Pairs of processes at `power`: in the first one flushes of the log fail, no table can be made
/// instead, and it is killed; the second one finds writes that only the page cache has, and power
/// is cut soon after it was opened. What the second one has acknowledged must be there.
///
/// # Panics
/// When the database loses or invents data.
pub fn doubtful(seed: u64, flaw: Flaw) -> Report {
    let mut rng = Rng::new(seed ^ 0xD0B7);
    let world = World::new(seed, 1, SimConfig::default());
    world.add_dir(DIR);
    let model: Rc<RefCell<Model>> = Rc::default();
    let column_family_options = small_levels(&mut rng);
    for run in 0..7 {
        world.heal();
        flaw.begin(&world);
        let fails = run % 2 == 0 && run < 6;
        if fails {
            let after = rng.below(12);
            let error = Fault::new(FaultKind::Error(5)).of(Access::Sync).on(".log");
            world.add_fault(error.after(after).times(1_000_000));
            world.add_fault(Fault::new(FaultKind::NameError(24)).on(".sst").times(1_000_000));
        } else {
            // The flush of what was recovered takes long.
            let stall = FaultKind::Stall(1_000_000..30_000_000);
            world.add_fault(Fault::new(stall).of(Access::Sync).on(".sst"));
        }
        let process = Rc::new(Process {
            model: model.clone(),
            db: RefCell::default(),
            options: WriteOptions {
                durability: Durability::Power,
                memtable_bytes: 200_000,
                column_family_options: column_family_options.clone(),
                ..WriteOptions::default()
            },
            reading: OpenOptions::default(),
            rng: RefCell::new(rng.fork()),
            controls: false,
            changes: RefCell::new(Rng::new(seed)),
            ended: Cell::new(false),
            scarce: false,
            sound: !fails,
            rests: false,
            merges: false,
            world: world.clone(),
            keys: 8,
            families: 1,
            batches_max: 80,
        });
        match run {
            6 => {}
            _ if fails => world.crash_at(Crash::Kill, 40..160),
            _ => world.crash_at(Crash::PowerCut, 20..200),
        }
        let result = world.run(|core| process.clone().run(core));
        let mut model = model.borrow_mut();
        match result.map_err(|failure| failure.kind) {
            Ok(results) => {
                let opens = results[0].is_ok() || fails;
                assert!(opens, "writing or closing fails: {:?}", results[0]);
            }
            Err(FailureKind::Crash(Crash::Kill)) => model.report.kills += 1,
            Err(FailureKind::Crash(Crash::PowerCut)) => {
                model.report.power_cuts += 1;
                model.acknowledged = model.durable;
            }
            Err(kind) => panic!("{kind:?}"),
        }
    }
    flaw.end();
    let mut report = model.borrow().report;
    report.faults = world.faults();
    report.trace = world.trace();
    report
}

/// One process in which a fault strikes once, and one that opens what it left. Returns whether the
/// fault struck. A failed read is repeated, so nothing may fail for one.
///
/// # Panics
/// When the database loses or invents data, or does not continue.
pub fn failing_once(seed: u64, fault: Fault, reads: bool) -> bool {
    let mut rng = Rng::new(seed ^ 0x0FA1);
    let world = World::new(seed, 1 + rng.index(2), SimConfig::default());
    world.add_dir(DIR);
    let model: Rc<RefCell<Model>> = Rc::default();
    let durability = [Durability::Power, Durability::Process][rng.index(2)];
    let blob_min = [None, Some(300)][rng.index(2)];
    let mut struck = false;
    for sound in [false, true] {
        if !sound {
            world.add_fault(fault.clone().times(1));
        }
        let process = Rc::new(Process {
            model: model.clone(),
            db: RefCell::default(),
            options: WriteOptions {
                durability,
                memtable_bytes: 20_000,
                manifest_bytes: 3_000,
                column_family_options: small_levels(&mut rng),
                blob_min,
                blob_file_bytes: 1,
                ..WriteOptions::default()
            },
            reading: OpenOptions { recovered_bytes: 10_000, ..OpenOptions::default() },
            rng: RefCell::new(rng.fork()),
            controls: false,
            changes: RefCell::new(Rng::new(seed)),
            ended: Cell::new(false),
            scarce: false,
            sound: sound || reads,
            rests: false,
            merges: false,
            world: world.clone(),
            keys: 60,
            families: 1,
            batches_max: 60,
        });
        let results = world.run(|core| process.clone().run(core));
        let results = results.unwrap_or_else(|failure| panic!("{:?}", failure.kind));
        if let Err(error) = &results[0] {
            let opened = model.borrow().report.openings > 0;
            assert!(!sound && !reads && !opened, "writing or closing fails: {error}");
        }
        world.heal();
        struck |= world.faults() != FaultCounts::default();
    }
    struck
}
