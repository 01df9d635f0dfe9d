//! Single keys of the engine, read and written from all cores and through crashes, as a history
//! that must be linearizable ([`crate::linear`]).
//!
//! A few keys are written and read all the time, so that most operations overlap with others. The
//! owner core also swaps: it reads a key and sets it, while no other task may change the key.
//! Processes are killed, at both durabilities, or power is cut, at `power` only, because writes
//! acknowledged at `process` may be lost then.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;

use lsm::{Db, Durability, Error, OpenOptions, Reader, WriteOptions, Writer};
use reactor::sim::{Crash, FailureKind, Rng, SimConfig, World};
use reactor::{Class, Core};

use crate::engine::{DIR, Flaw};
use crate::linear::{Call, Operation, Value};

/// The operations, in simulated order.
#[derive(Default)]
struct History {
    operations: Vec<Operation>,
    /// Operations without an answer yet.
    open: BTreeSet<usize>,
    now: u64,
}

impl History {
    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    fn call(&mut self, key: u64, call: Call) -> usize {
        let called = self.tick();
        self.operations.push(Operation { key, call, called, ended: u64::MAX, answer: None });
        let at = self.operations.len() - 1;
        self.open.insert(at);
        at
    }

    fn answer(&mut self, at: usize, answer: Value) {
        self.open.remove(&at);
        self.operations[at].ended = self.tick();
        self.operations[at].answer = Some(answer);
    }

    /// Operations without an answer by now get none.
    fn crash(&mut self) {
        let now = self.tick();
        for at in std::mem::take(&mut self.open) {
            self.operations[at].ended = now;
        }
    }
}

struct Process {
    history: Rc<RefCell<History>>,
    db: RefCell<Option<Db>>,
    options: WriteOptions,
    rng: RefCell<Rng>,
    /// Number of tasks that are setting a key, or whether one is swapping it.
    held: RefCell<BTreeMap<u64, Held>>,
    ended: Cell<bool>,
    keys: u64,
}

enum Held {
    Set(usize),
    Swapped,
}

fn name(key: u64) -> Vec<u8> {
    format!("key{key}").into_bytes()
}

impl Process {
    fn below(&self, limit: u64) -> u64 {
        self.rng.borrow_mut().below(limit)
    }

    fn call(&self, key: u64, call: Call) -> usize {
        self.history.borrow_mut().call(key, call)
    }

    fn answer(&self, at: usize, answer: Value) {
        self.history.borrow_mut().answer(at, answer);
    }

    async fn read(reader: &Reader, key: u64) -> Result<Value, Error> {
        let found = reader.get(0, &name(key), None).await?;
        Ok(found.map(|value| {
            let first = value.first_chunk().expect("a value begins with its number");
            u64::from_le_bytes(*first)
        }))
    }

    async fn write(&self, writer: &Writer, key: u64, value: Value) -> Result<(), Error> {
        match value {
            Some(value) => {
                let mut bytes = value.to_le_bytes().to_vec();
                bytes.resize(8 + self.below(3_000) as usize, value as u8);
                writer.put(&name(key), &bytes).await?;
            }
            None if self.below(3) == 0 => {
                let after = [&name(key)[..], &[0]].concat();
                writer.delete_range(0, &name(key), &after).await?;
            }
            None => {
                writer.delete(&name(key)).await?;
            }
        }
        Ok(())
    }

    fn may_set(&self, key: u64) -> bool {
        match self.held.borrow_mut().entry(key).or_insert(Held::Set(0)) {
            Held::Set(tasks) => *tasks += 1,
            Held::Swapped => return false,
        }
        true
    }

    fn has_set(&self, key: u64) {
        let mut held = self.held.borrow_mut();
        match held.get_mut(&key) {
            Some(Held::Set(tasks)) if *tasks > 1 => *tasks -= 1,
            _ => drop(held.remove(&key)),
        }
    }

    async fn get(&self, reader: &Reader) -> Result<(), Error> {
        let key = self.below(self.keys);
        let at = self.call(key, Call::Get);
        let found = Self::read(reader, key).await?;
        self.answer(at, found);
        Ok(())
    }

    /// One client of the owner core.
    async fn change(&self, core: &Core, db: &Db, writer: &Writer, new: u64) -> Result<(), Error> {
        let reader = db.attach(core);
        for n in 0..self.below(40) {
            let key = self.below(self.keys);
            let value = (self.below(5) > 0).then_some(new + n);
            match self.below(5) {
                0 => self.get(&reader).await?,
                1 => {
                    let at = self.call(key, Call::Swap(value));
                    while self.held.borrow().contains_key(&key) {
                        core.sleep_ns(10_000).await;
                    }
                    self.held.borrow_mut().insert(key, Held::Swapped);
                    let found = Self::read(&reader, key).await?;
                    self.write(writer, key, value).await?;
                    self.held.borrow_mut().remove(&key);
                    self.answer(at, found);
                }
                // Sets of one key may overlap each other, but not a swap.
                _ => {
                    let at = self.call(key, Call::Set(value));
                    while !self.may_set(key) {
                        core.sleep_ns(10_000).await;
                    }
                    self.write(writer, key, value).await?;
                    self.has_set(key);
                    self.answer(at, None);
                }
            }
        }
        Ok(())
    }

    async fn run(self: Rc<Self>, core: Core) -> Result<(), Error> {
        if core.id() > 0 {
            while !self.ended.get() {
                let db = self.db.borrow().clone();
                let Some(db) = db else {
                    core.sleep_ns(20_000).await;
                    continue;
                };
                let reader = db.attach(&core);
                while !self.ended.get() {
                    self.get(&reader).await?;
                    core.sleep_ns(self.below(150_000)).await;
                }
            }
            return Ok(());
        }
        let reading = OpenOptions { cache_bytes: 100_000, ..OpenOptions::default() };
        let (db, writer) =
            Db::open_for_writing(&core, Path::new(DIR), reading, self.options.clone()).await?;
        self.db.replace(Some(db.clone()));
        let mut clients = Vec::new();
        for _ in 0..3 {
            let (this, handle, db, writer) =
                (self.clone(), core.clone(), db.clone(), writer.clone());
            let new = self.history.borrow_mut().tick() * 1_000_000 + self.below(1000) * 1000;
            let client = async move { this.change(&handle, &db, &writer, new).await };
            clients.push(core.spawn(Class::Foreground, client));
        }
        for client in clients {
            client.await?;
        }
        self.ended.set(true);
        self.db.take();
        Ok(())
    }
}

/// Runs several processes in one world, one after the other, and returns the history.
///
/// # Panics
/// When the database cannot be opened or used.
pub fn history(seed: u64, flaw: Flaw) -> Vec<Operation> {
    let mut rng = Rng::new(seed ^ 0x0415_7041);
    let cores = 1 + rng.index(3);
    let world = World::new(seed, cores, SimConfig::default());
    world.add_dir(DIR);
    flaw.begin(&world);
    let history: Rc<RefCell<History>> = Rc::default();
    let power = rng.coin();
    let keys = 1 + rng.below(4);
    for _ in 0..5 {
        let process = Rc::new(Process {
            history: history.clone(),
            db: RefCell::default(),
            options: WriteOptions {
                durability: if power { Durability::Power } else { Durability::Process },
                memtable_bytes: [10_000, 40_000][rng.index(2)],
                ..WriteOptions::default()
            },
            rng: RefCell::new(rng.fork()),
            held: RefCell::default(),
            ended: Cell::new(false),
            keys,
        });
        let crash = if power && rng.coin() { Crash::PowerCut } else { Crash::Kill };
        world.crash_at(crash, 1..[100, 400, 1_500][rng.index(3)]);
        let result = world.run(|core| process.clone().run(core));
        history.borrow_mut().crash();
        match result.map_err(|failure| failure.kind) {
            Ok(results) => {
                for result in results {
                    result.unwrap_or_else(|error| panic!("on a sound disk: {error}"));
                }
            }
            Err(FailureKind::Crash(_)) => {}
            Err(kind) => panic!("{kind:?}"),
        }
    }
    flaw.end();
    history.take().operations
}
