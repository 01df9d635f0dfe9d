//! A process that opens the database, writes to it and reads it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::rc::Rc;

use lsm::{
    BatchWriter, ColumnFamilyOptions, CompactionLimits, CompactionWatch, Db, Durability, Error,
    IterOptions, Kind, OpenOptions, Reader, Snapshot, WriteOptions, Writer, Written,
};
use reactor::sim::{Rng, World};
use reactor::{Class, Core, JoinHandle};

use super::DIR;
use super::model::{Content, LAST, Model, Pairs, batch_of, text};
use crate::families::{self, Extra};

/// The shared state of one process. Its cores run on one thread.
pub(super) struct Process {
    pub(super) model: Rc<RefCell<Model>>,
    pub(super) db: RefCell<Option<Db>>,
    pub(super) options: WriteOptions,
    pub(super) reading: OpenOptions,
    pub(super) rng: RefCell<Rng>,
    /// Merges are paused, limited, requested and cancelled.
    pub(super) controls: bool,
    /// Chance of the changes of column families and of merges.
    pub(super) changes: RefCell<Rng>,
    /// The owner has ended: the others end, too.
    pub(super) ended: Cell<bool>,
    /// The disk is full for a while.
    pub(super) scarce: bool,
    /// The disk has no other fault.
    pub(super) sound: bool,
    /// Background work comes to rest at the end.
    pub(super) rests: bool,
    /// There are merge operands and single deletes, too.
    pub(super) merges: bool,
    pub(super) world: World,
    /// The largest number of keys.
    pub(super) keys: u64,
    pub(super) families: u32,
    pub(super) batches_max: u64,
}

/// The column family of a key, with `families` families.
fn family_of(key: &[u8], families: u32) -> u32 {
    key.iter().map(|&byte| u32::from(byte)).sum::<u32>() % families
}

impl Process {
    /// A sound process of one column family with few keys.
    pub(super) fn new(world: &World, model: &Rc<RefCell<Model>>, rng: Rng) -> Self {
        Self {
            model: model.clone(),
            db: RefCell::default(),
            options: WriteOptions::default(),
            reading: OpenOptions::default(),
            rng: RefCell::new(rng),
            controls: false,
            changes: RefCell::new(Rng::new(world.seed())),
            ended: Cell::new(false),
            scarce: false,
            sound: true,
            rests: false,
            merges: false,
            world: world.clone(),
            keys: 8,
            families: 1,
            batches_max: 80,
        }
    }

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
            let looked = if self.rests && self.below(4) == 0 {
                self.hold(core, &reader).await
            } else if self.below(4) == 0 {
                let least = self.model.borrow().acknowledged.max(seen);
                let number = self.look(&reader, least).await;
                number.map(|number| seen = number.unwrap_or(seen))
            } else {
                self.get(&reader).await.expect("no read fails");
                continue;
            };
            match looked {
                Ok(()) => {}
                // The database was cleared meanwhile.
                Err(error) if error.kind() == Kind::Expired => {}
                Err(error) => panic!("no read fails: {error}"),
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

    /// The work of one core. The error is that of the opening or of writing.
    pub(super) async fn run(self: Rc<Self>, core: Core) -> Result<(), Error> {
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
