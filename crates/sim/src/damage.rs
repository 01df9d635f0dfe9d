//! Blocks rot while a database is written, and merges read them.
//!
//! Processes, one after the other, write small tables that are merged all the time. Sometimes a
//! byte of a table's data rots; then every key is looked up, to find those that need the block.
//! From then on:
//!
//! 1. Writing never ends, and merges continue around the table.
//! 2. Every other key has its newest value, and so has each of these keys that was written since.
//! 3. The log names a table that merges skip once for each opening.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use lsm::{Db, Durability, Kind, OpenOptions, Reader, WriteOptions, Writer};
use reactor::Core;
use reactor::sim::{Rng, SimConfig, World};
use rocksfmt::{FileName, LogKind, LogReader, ManifestReplay};
use tracing::field::{Field, Visit};

use crate::engine::{DIR, Flaw};

/// The counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes that rotted.
    pub rotten: u64,
    /// Keys that could not be read right afterwards.
    pub unreadable: u64,
    /// Tables that merges skipped.
    pub left_alone: u64,
    /// Merges.
    pub merges: u64,
}

struct Life {
    world: World,
    rng: RefCell<Rng>,
    keys: u64,
    model: RefCell<BTreeMap<u64, Option<u8>>>,
    /// Keys with the newest version in a rotten block.
    lost: RefCell<BTreeSet<u64>>,
    report: RefCell<Report>,
}

fn key(number: u64) -> Vec<u8> {
    format!("key{number:05}").into_bytes()
}

impl Life {
    fn below(&self, limit: u64) -> u64 {
        self.rng.borrow_mut().below(limit)
    }

    async fn write(&self, writer: &Writer) {
        let (number, byte) = (self.below(self.keys), self.below(256) as u8);
        let value = (self.below(4) > 0).then_some(byte);
        let written = match value {
            Some(byte) => writer.put(&key(number), &[byte; 300]).await,
            None => writer.delete(&key(number)).await,
        };
        written.expect("writing continues");
        self.model.borrow_mut().insert(number, value);
        self.lost.borrow_mut().remove(&number);
    }

    /// Looks a key up. False when it cannot be read.
    async fn look(&self, reader: &Reader, number: u64) -> bool {
        let expected = self.model.borrow().get(&number).copied().flatten();
        match reader.get(0, &key(number), None).await {
            Ok(found) => {
                let expected = expected.map(|byte| vec![byte; 300]);
                assert!(found.as_deref() == expected.as_deref(), "key {number} has another value");
                true
            }
            Err(error) => {
                assert!(error.kind() == Kind::Corruption, "{error:?}");
                assert!(error.to_string().contains(".sst"), "{error}");
                false
            }
        }
    }

    async fn look_at_all(&self, reader: &Reader) {
        for number in 0..self.keys {
            let found = self.look(reader, number).await;
            assert!(found || self.lost.borrow().contains(&number), "key {number} is lost");
        }
    }

    /// The tables that the MANIFEST names, and the bytes of data in each.
    fn tables(&self) -> Vec<(u64, u64)> {
        let bytes = |name: &str| self.world.bytes(format!("{DIR}/{name}")).expect("it is there");
        let current = String::from_utf8(bytes("CURRENT").to_vec()).expect("a name");
        let (mut reader, mut replay) = (LogReader::new(LogKind::Manifest), ManifestReplay::new());
        let records = bytes(current.trim_end());
        let fed = reader.feed(&records, true, |record| replay.record(record.data));
        fed.expect("a sound MANIFEST");
        let state = replay.finish().expect("a sound MANIFEST");
        let families = state.column_families.values();
        families
            .flat_map(|family| family.files())
            .map(|(_, meta)| (meta.number, meta.size_bytes - meta.tail_bytes))
            .collect()
    }

    /// Lets a byte of some table's data rot, and finds the keys that need it.
    async fn rot(&self, core: &Core, reader: &Reader) {
        let tables = self.tables();
        if tables.is_empty() {
            return;
        }
        let (number, data_bytes) = tables[self.below(tables.len() as u64) as usize];
        let path = format!("{DIR}/{}", FileName::Sst(number));
        let (offset, bit) = (self.below(data_bytes), self.below(8) as u8);
        if self.world.rot(&path, offset, bit).is_err() {
            // It was just merged away.
            return;
        }
        // Readers get the MANIFEST's tables a moment later.
        core.sleep_ns(5_000_000).await;
        let mut unreadable = 0;
        for number in 0..self.keys {
            if !self.look(reader, number).await {
                self.lost.borrow_mut().insert(number);
                unreadable += 1;
            }
        }
        let report = &mut *self.report.borrow_mut();
        report.rotten += 1;
        report.unreadable += unreadable;
    }

    /// One process.
    async fn live(&self, core: &Core) {
        let options = WriteOptions {
            durability: Durability::Process,
            memtable_bytes: 8_000,
            ..WriteOptions::default()
        };
        // Every read goes to the disk.
        let reading = OpenOptions { cache_bytes: 0, ..OpenOptions::default() };
        let open = Db::open_for_writing(core, Path::new(DIR), reading, options);
        let (db, writer) = open.await.expect("only data has rotted");
        let reader = db.attach(core);
        self.look_at_all(&reader).await;
        for _ in 0..4 {
            for _ in 0..self.below(300) {
                self.write(&writer).await;
                if self.below(10) == 0 {
                    core.sleep_ns(self.below(2_000_000)).await;
                }
            }
            if self.below(3) > 0 {
                self.rot(core, &reader).await;
            }
        }
        let mut patience = 1_000;
        while !writer.is_quiesced() {
            patience -= 1;
            assert!(patience > 0, "merges do not end: {:?}", writer.stats());
            core.sleep_ns(100_000_000).await;
        }
        self.look_at_all(&reader).await;
        let stats = writer.stats();
        // A merge begins with 12 files at the latest, without those that it leaves alone.
        assert!(stats.level0_files < 16 + stats.damaged_tables, "level 0 has grown: {stats:?}");
        assert_eq!((stats.disk_full, stats.tables_failing), (0, 0));
        {
            let report = &mut *self.report.borrow_mut();
            report.left_alone += stats.damaged_tables;
            report.merges += stats.merges;
        }
        if self.below(2) == 0 {
            writer.close().await.expect("writing has not ended");
        }
    }
}

/// Runs some processes in one world.
///
/// # Panics
/// When data is lost, or writing or merging ends.
pub fn damage(seed: u64, flaw: Flaw) -> Report {
    let mut rng = Rng::new(seed ^ 0x0DA_3A6E);
    let world = World::new(seed, 1 + rng.index(2), SimConfig::default());
    world.add_dir(DIR);
    flaw.begin(&world);
    let life = Rc::new(Life {
        world: world.clone(),
        keys: [20, 100, 300][rng.index(3)],
        rng: RefCell::new(rng.fork()),
        model: RefCell::default(),
        lost: RefCell::default(),
        report: RefCell::default(),
    });
    for _ in 0..3 {
        let said = Said::default();
        let life = life.clone();
        let run = || {
            world.run(move |core| {
                let life = life.clone();
                async move {
                    if core.id() == 0 {
                        life.live(&core).await;
                    }
                }
            })
        };
        tracing::subscriber::with_default(said.clone(), run).expect("there is no other failure");
        said.check();
    }
    flaw.end();
    *life.report.borrow()
}

/// Counts the log's lines about skipped tables.
#[derive(Clone, Default)]
struct Said(Arc<[Slot; SLOTS]>);

/// A line about a table, and its count.
#[derive(Default)]
struct Slot {
    name: OnceLock<String>,
    times: AtomicU64,
}

const SLOTS: usize = 32;

impl Said {
    fn note(&self, text: &str) {
        let Some(rest) = text.strip_prefix("merges leave ") else { return };
        let name = rest.split(' ').next().unwrap_or_default();
        for slot in &*self.0 {
            if slot.name.get_or_init(|| name.to_owned()) == name {
                slot.times.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
    }

    fn check(&self) {
        for slot in &*self.0 {
            let times = slot.times.load(Ordering::Relaxed);
            assert!(times < 2, "{:?} is said {times} times", slot.name);
        }
    }
}

struct Message<'a>(&'a Said);

impl Visit for Message<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0.note(&format!("{value:?}"));
        }
    }
}

impl tracing::Subscriber for Said {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut Message(self));
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}
