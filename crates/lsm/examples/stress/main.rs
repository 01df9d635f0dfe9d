//! A program that writes to a database until it is killed, and says what must be in it afterwards.
//!
//!     stress run DIR SEED DURABILITY STEPS   compares the database with the history, then writes
//! on                                            until it is killed, or closes it after STEPS steps
//!     stress check DIR SEED                  compares a database that is only read; prints its
//! step     stress expect SEED STEP                prints what a database holds after a step, for
//! others
//!
//! The history is in `history.rs`. DIR.expected holds two numbers: the last step that was to be
//! written, and the last one that was acknowledged. They are written before a step is submitted and
//! after it was acknowledged, and survive the process. The database must hold what a step between
//! them left: nothing acknowledged is lost, no step is partial, none is applied twice.
//!
//! Beside its writers the program compacts ranges of keys and makes checkpoints, DIR.copies/N, when
//! step N was acknowledged. `e2e/kills.py` makes the directory, kills the program, and has RocksDB
//! read and compact what it left.
#![allow(clippy::disallowed_methods, reason = "this is no part of a node")]

mod history;

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;

use lsm::{
    BatchWriter, CfId, Db, Durability, IterOptions, OpenOptions, Reader, WriteOptions, Writer,
};
use reactor::{Class, Core, RuntimeConfig};

use crate::history::{Change, FAMILIES, History, LAST, Model, Step};

const WRITERS: usize = 3;

/// The files beside a database.
fn beside(dir: &Path, what: &str) -> PathBuf {
    PathBuf::from(format!("{}.{what}", dir.display()))
}

/// How far the history went.
struct Expected(std::fs::File);

impl Expected {
    fn open(dir: &Path) -> Expected {
        let mut options = std::fs::OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        Expected(options.open(beside(dir, "expected")).unwrap())
    }

    /// The last step that was to be written, and the last one that was acknowledged.
    fn read(&self) -> (u64, u64) {
        let at = |offset| {
            let mut bytes = [0; 8];
            let read = self.0.read_at(&mut bytes, offset).unwrap();
            if read == 8 { u64::from_le_bytes(bytes) } else { 0 }
        };
        (at(0), at(8))
    }

    fn set_intended(&self, step: u64) {
        self.0.write_all_at(&step.to_le_bytes(), 0).unwrap();
    }

    fn set_acknowledged(&self, step: u64) {
        self.0.write_all_at(&step.to_le_bytes(), 8).unwrap();
    }
}

/// The ids of the families.
fn families(db: &Db) -> Vec<CfId> {
    let all = db.column_families();
    let id = |name: &&str| all.iter().find(|family| family.name == *name).unwrap().id;
    FAMILIES.iter().map(id).collect()
}

/// What the database holds; scans in both directions and gets must agree.
async fn contents(db: &Db, reader: &Reader) -> Model {
    let mut found = Model::default();
    for (family, pairs) in families(db).into_iter().zip(&mut found) {
        let mut iter = reader.iter(family, IterOptions::default()).unwrap();
        iter.seek_to_first().await.unwrap();
        while iter.valid() {
            pairs.insert(iter.key().to_vec(), iter.value().to_vec());
            iter.next().await.unwrap();
        }
        iter.seek_to_last().await.unwrap();
        for (key, value) in pairs.iter().rev() {
            assert!(iter.valid() && (iter.key(), iter.value()) == (&key[..], &value[..]));
            iter.prev().await.unwrap();
        }
        assert!(!iter.valid(), "a scan backwards finds more");
        let keys = history::all_keys();
        let asked: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
        for (key, got) in keys.iter().zip(reader.multi_get(family, &asked, None).await) {
            let there = got.unwrap().map(|value| value.to_vec());
            assert!(there.as_ref() == pairs.get(key), "a get and a scan differ");
        }
    }
    found
}

/// The step that a database has come to.
fn step_of(found: &Model) -> u64 {
    found[0].get(LAST).map_or(0, |text| std::str::from_utf8(text).unwrap().parse().unwrap())
}

fn compare(found: &Model, history: &History) {
    let number = history.number;
    for ((name, found), expected) in FAMILIES.iter().zip(found).zip(&history.model) {
        for key in found.keys().chain(expected.keys()) {
            let (is, should) = (found.get(key), expected.get(key));
            let short = |value: Option<&Vec<u8>>| {
                value
                    .map(|v| (v.len(), String::from_utf8_lossy(&v[..v.len().min(40)]).into_owned()))
            };
            assert!(
                is == should,
                "step {number}, family {name}, key {}: {:?} instead of {:?}",
                String::from_utf8_lossy(key),
                short(is),
                short(should)
            );
        }
    }
}

struct Run {
    core: Core,
    dir: PathBuf,
    writer: Writer,
    families: Vec<CfId>,
    expected: Expected,
    history: RefCell<History>,
    acknowledged: Cell<u64>,
    /// An ingestion is under way: its step must be submitted before the next one.
    ingesting: Cell<bool>,
    /// The last step of this run.
    last: u64,
    writers: Cell<usize>,
}

impl Run {
    /// Opens the database and compares it with the history.
    async fn open(core: Core, dir: PathBuf, seed: u64, durability: Durability, steps: u64) -> Run {
        let options = WriteOptions {
            durability,
            create: false,
            memtable_bytes: 150_000,
            manifest_bytes: 20_000,
            ..WriteOptions::default()
        };
        let reading = OpenOptions { cache_bytes: 1 << 20, ..OpenOptions::default() };
        let (db, writer) = Db::open_for_writing(&core, &dir, reading, options).await.unwrap();
        let expected = Expected::open(&dir);
        let (intended, acknowledged) = expected.read();
        let found = contents(&db, &db.attach(&core)).await;
        let number = step_of(&found);
        assert!(number >= acknowledged, "step {number}: step {acknowledged} was acknowledged");
        assert!(number <= intended, "step {number}: step {intended} was the last to be written");
        let history = History::at(seed, number);
        compare(&found, &history);
        expected.set_acknowledged(number);
        expected.set_intended(number);
        println!("ready {number}");
        Run {
            core,
            families: families(&db),
            writer,
            expected,
            history: RefCell::new(history),
            acknowledged: Cell::new(number),
            ingesting: Cell::new(false),
            last: number.saturating_add(steps),
            writers: Cell::new(WRITERS),
            dir,
        }
    }

    fn next(&self) -> (u64, Step) {
        let mut history = self.history.borrow_mut();
        let step = history.next();
        (history.number, step)
    }

    /// One of the tasks that write.
    async fn write(&self) {
        while self.history.borrow().number < self.last {
            if self.ingesting.get() {
                self.core.sleep_ns(50_000).await;
                continue;
            }
            let (number, step) = self.next();
            self.expected.set_intended(number);
            if step.ingested {
                self.ingesting.set(true);
                self.ingest(number, &step).await;
                self.ingesting.set(false);
            } else {
                self.writer.submit(self.batch(step), None).unwrap().await.unwrap();
            }
            // Steps are acknowledged in order, but these tasks may run in another one.
            if number > self.acknowledged.get() {
                self.acknowledged.set(number);
                self.expected.set_acknowledged(number);
            }
        }
        self.writers.set(self.writers.get() - 1);
    }

    fn batch(&self, step: Step) -> BatchWriter {
        let mut batch = BatchWriter::new();
        let id = |family: usize| self.families[family];
        for change in step.changes {
            match change {
                Change::Put(family, key, value) => batch.put(id(family), &key, &value),
                Change::Merge(family, key, value) => batch.merge(id(family), &key, &value),
                Change::Delete(family, key) => batch.delete(id(family), &key),
                Change::SingleDelete(family, key) => batch.single_delete(id(family), &key),
                Change::DeleteRange(family, start, end) => {
                    batch.delete_range(id(family), &start, &end);
                }
            }
        }
        batch
    }

    /// Has RocksDB make a table, and ingests it.
    async fn ingest(&self, number: u64, step: &Step) {
        let path = beside(&self.dir, &format!("{number}.sst"));
        let unused = beside(&self.dir, "unused");
        let mut child = Command::new("ldb")
            .arg(format!("--db={}", unused.display()))
            .args(["--create_if_missing", "write_extern_sst"])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("install Debian's rocksdb-tools (./test does)");
        let mut input = child.stdin.take().unwrap();
        for change in &step.changes {
            let Change::Put(_, key, value) = change else { unreachable!("only puts are ingested") };
            let text = |bytes| std::str::from_utf8(bytes).unwrap();
            writeln!(input, "{} ==> {}", text(key), text(value)).unwrap();
        }
        drop(input);
        assert!(child.wait().unwrap().success());
        let files = [(self.families[0], vec![path.clone()])];
        let link = number.is_multiple_of(2);
        let done = self.writer.ingest_files(&files, link, true).await.unwrap();
        assert_eq!(done.entries, step.changes.len() as u64);
        std::fs::remove_file(path).unwrap();
    }

    /// Compacts ranges of keys and makes checkpoints while others write.
    async fn disturb(&self) {
        let copies = beside(&self.dir, "copies");
        std::fs::create_dir_all(&copies).unwrap();
        while self.writers.get() > 0 {
            let random = self.core.random_u64();
            self.core.sleep_ns(random % 40_000_000).await;
            if random.is_multiple_of(3) {
                let copy = copies.join(self.acknowledged.get().to_string());
                if !copy.exists() {
                    self.writer.checkpoint(&copy).await.unwrap();
                }
                continue;
            }
            let keys = history::all_keys();
            let at = random as usize % keys.len();
            let (mut from, mut to) = (Some(&keys[at][..]), keys.get(at + 20).map(|key| &key[..]));
            if random.is_multiple_of(5) {
                (from, to) = (None, None);
            }
            let family = self.families[random as usize % self.families.len()];
            self.writer.compact(family, from, to).await.unwrap();
        }
    }
}

async fn run(core: Core, dir: PathBuf, seed: u64, durability: Durability, steps: u64) {
    let run = Rc::new(Run::open(core.clone(), dir, seed, durability, steps).await);
    let mut tasks = Vec::new();
    for _ in 0..WRITERS {
        let run = run.clone();
        tasks.push(core.spawn(Class::Foreground, async move { run.write().await }));
    }
    let disturbing = run.clone();
    tasks.push(core.spawn(Class::Foreground, async move { disturbing.disturb().await }));
    for task in tasks {
        task.await;
    }
    let number = run.history.borrow().number;
    assert_eq!(run.acknowledged.get(), number);
    run.writer.close().await.unwrap();
    println!("closed {number}");
}

async fn check(core: Core, dir: PathBuf, seed: u64) {
    let db = Db::open(&core, &dir, OpenOptions::default()).await.unwrap();
    let found = contents(&db, &db.attach(&core)).await;
    let number = step_of(&found);
    compare(&found, &History::at(seed, number));
    println!("{number}");
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments[at].parse::<u64>().unwrap();
    if arguments[0] == "expect" {
        let history = History::at(number(1), number(2));
        let mut out = std::io::stdout().lock();
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        for (name, family) in FAMILIES.iter().zip(&history.model) {
            for (key, value) in family {
                writeln!(out, "{name} {} {}", hex(key), hex(value)).unwrap();
            }
        }
        return;
    }
    let (dir, seed) = (PathBuf::from(&arguments[1]), number(2));
    let processors = reactor::processors().into_iter().take(2).collect();
    let config = RuntimeConfig { processors, memory: 64 << 20, ..RuntimeConfig::default() };
    let is_run = arguments[0] == "run";
    let steps = if is_run { number(4) } else { 0 };
    let durability = match arguments.get(3).map(String::as_str) {
        Some("power") => Durability::Power,
        _ => Durability::Process,
    };
    let started = reactor::run(&config, move |core: Core| {
        let dir = dir.clone();
        async move {
            match core.id() {
                0 if is_run => run(core, dir, seed, durability, steps).await,
                0 => check(core, dir, seed).await,
                _ => {}
            }
        }
    });
    started.unwrap();
}
