//! Several cores read a database while its disk fails; then the disk is healed.
//!
//! 1. Open the database. In some worlds names and reads fail during the opening; a failed opening
//!    tells why, and is retried after the disk is healed.
//! 2. On every core several clients get, multi-get and iterate both ways, while reads fail, come
//!    short, stall, get stuck, or return flipped bits, some of them permanently. Many requests are
//!    dropped at a random time.
//! 3. Every answer equals the model's, or is an error that names the file and the offset.
//! 4. The disk is healed. Now every core must read all keys, both ways, without an error.
//! 5. Readers and database are dropped: no file stays open, no buffer is lost, no operation stays
//!    in flight.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::ops::Bound;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;

use lsm::{Db, Error, IterOptions, Kind, OpenOptions, Reader};
use reactor::sim::{Fault, FaultCounts, FaultKind, Latency, Rng, SimConfig, World};
use reactor::{Class, Core};

use crate::database::{Database, Model, database};

/// The path of the database in the simulated world.
pub const DIR: &str = "/db";

/// The longest wait of a client when reads may be stuck.
const PATIENCE_NS: u64 = 30_000_000_000;

/// The counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Answers that equal the model's.
    pub right: u64,
    /// Errors while the disk was failing.
    pub errors: u64,
    /// Requests dropped before their answer.
    pub dropped: u64,
    /// Openings that failed.
    pub failed_openings: u64,
    /// Faults that struck.
    pub faults: FaultCounts,
    /// The trace's hash and number of events.
    pub trace: (u64, u64),
}

#[derive(Default)]
struct Tally {
    right: Cell<u64>,
    errors: Cell<u64>,
    dropped: Cell<u64>,
    failed_openings: Cell<u64>,
}

fn add(counter: &Cell<u64>) {
    counter.set(counter.get() + 1);
}

/// The shared state of one run. Its cores run on one thread.
struct Shared {
    made: Database,
    world: World,
    db: RefCell<Option<Db>>,
    tally: Tally,
    options: OpenOptions,
    /// Number of barriers that all cores have passed.
    passed: Cell<usize>,
    clients: u64,
    rounds: u64,
    patient: bool,
    small_memory: bool,
    opened_badly: Cell<bool>,
}

impl Shared {
    /// Waits until all cores have reached the barrier.
    async fn barrier(&self, core: &Core, nth: usize) {
        self.passed.set(self.passed.get() + 1);
        while self.passed.get() < nth * core.cores() {
            core.sleep_ns(50_000).await;
        }
    }

    fn db(&self) -> Db {
        self.db.borrow().clone().expect("the database was opened before the barrier")
    }

    /// Checks that an error names its object and cause.
    fn check_error(&self, error: &Error) {
        let text = error.to_string();
        let named = [".sst", ".log", "MANIFEST-", "CURRENT", "LOCK", DIR];
        match error.kind() {
            Kind::Io | Kind::Corruption => {
                assert!(named.iter().any(|name| text.contains(name)), "names no file: {text}");
                // A table that could not be opened may have failed by its name or as a whole.
                if !self.opened_badly.get() && self.db.borrow().is_some() {
                    assert!(text.contains("offset"), "names no offset: {text}");
                }
            }
            Kind::Memory => assert!(self.small_memory, "memory was not short: {text}"),
            kind => panic!("{kind:?} of a sound database on a failing disk: {text}"),
        }
        add(&self.tally.errors);
    }
}

/// Polls a future until it is done or the time is over, then drops it.
async fn for_at_most<T>(core: &Core, ns: u64, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut limit = core.sleep_ns(ns);
    std::future::poll_fn(move |cx| {
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        Pin::new(&mut limit).poll(cx).map(|()| None)
    })
    .await
}

/// One client, with its own random numbers and one request at a time.
struct Client {
    shared: Rc<Shared>,
    core: Core,
    reader: Reader,
    rng: Rng,
}

impl Client {
    /// Runs a request, perhaps with a time limit.
    async fn request<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        let ns = match self.rng.below(5) {
            0 => self.rng.below(1_000_000),
            _ if self.shared.patient => return Some(future.await),
            _ => PATIENCE_NS,
        };
        let answer = for_at_most(&self.core, ns, future).await;
        if answer.is_none() {
            add(&self.shared.tally.dropped);
        }
        answer
    }

    /// A key that exists, existed, or never existed.
    fn key(&mut self) -> Vec<u8> {
        let keys = &self.shared.made.keys;
        let mut key = keys[self.rng.index(keys.len())].clone();
        if self.rng.chance(100_000) {
            key.push(b'!');
        }
        key
    }

    async fn run(mut self) {
        for _ in 0..self.shared.rounds {
            match self.rng.below(4) {
                0 => self.multi_get().await,
                1 => self.iterate().await,
                _ => self.get().await,
            }
            if self.rng.coin() {
                self.core.sleep_ns(self.rng.below(200_000)).await;
            }
        }
    }

    async fn get(&mut self) {
        let key = self.key();
        let expected = self.shared.made.model.get(&key).cloned();
        self.reader.warm(0, &[&key, b"none"]);
        let cached = self.reader.get_cached(0, &key);
        self.judge(&key, cached.map(|answer| answer.map(|v| v.map(|v| v.to_vec()))), &expected);
        let reader = self.reader.clone();
        let answer = self.request(async { reader.get(0, &key, None).await }).await;
        self.judge(&key, answer.map(|answer| answer.map(|v| v.map(|v| v.to_vec()))), &expected);
    }

    async fn multi_get(&mut self) {
        let count = 1 + self.rng.index(40);
        let keys: Vec<Vec<u8>> = (0..count).map(|_| self.key()).collect();
        let slices: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let reader = self.reader.clone();
        let answers = self.request(reader.multi_get(0, &slices, None)).await;
        let Some(answers) = answers else { return };
        assert_eq!(answers.len(), count);
        for (key, answer) in keys.iter().zip(answers) {
            let expected = self.shared.made.model.get(key).cloned();
            self.judge(key, Some(answer.map(|v| v.map(|v| v.to_vec()))), &expected);
        }
    }

    fn judge(
        &self,
        key: &[u8],
        answer: Option<Result<Option<Vec<u8>>, Error>>,
        expected: &Option<Vec<u8>>,
    ) {
        match answer {
            None => {}
            Some(Err(error)) => self.shared.check_error(&error),
            Some(Ok(found)) => {
                assert!(
                    found == *expected,
                    "a wrong answer for {}: {:?} instead of {:?}",
                    String::from_utf8_lossy(key),
                    found.map(|v| v.len()),
                    expected.as_ref().map(Vec::len),
                );
                add(&self.shared.tally.right);
            }
        }
    }

    async fn iterate(&mut self) {
        let mut bounds = (Bound::Unbounded, Bound::Unbounded);
        let mut options = IterOptions { fill_cache: self.rng.coin(), ..IterOptions::default() };
        if self.rng.chance(300_000) {
            let lower = self.key();
            options.lower = Some(lower.clone());
            bounds.0 = Bound::Included(lower);
        }
        if self.rng.chance(300_000) {
            let upper = self.key();
            options.upper = Some(upper.clone());
            bounds.1 = Bound::Excluded(upper);
        }
        if self.rng.chance(300_000) {
            options.expected = Some(self.rng.index(100));
        }
        let shared = self.shared.clone();
        let model: Model = match (&bounds.0, &bounds.1) {
            (Bound::Included(lower), Bound::Excluded(upper)) if lower >= upper => Model::new(),
            _ => shared
                .made
                .model
                .range::<Vec<u8>, _>((bounds.0.as_ref(), bounds.1.as_ref()))
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect(),
        };
        let mut iter = match self.reader.iter(0, options) {
            Ok(iter) => iter,
            Err(error) => return self.shared.check_error(&error),
        };
        // Its required position; unknown after an error or a dropped move, until the next seek.
        let mut at: Option<Option<Vec<u8>>> = None;
        for _ in 0..2 + self.rng.below(30) {
            let key = self.key();
            let mut step = self.rng.below(10);
            if !matches!(at, Some(Some(_))) {
                step = self.rng.below(4);
            }
            let first_at = |from: Bound<&Vec<u8>>| {
                model.range::<Vec<u8>, _>((from, Bound::Unbounded)).next().map(|(k, _)| k.clone())
            };
            let last_at = |to: Bound<&Vec<u8>>| {
                model
                    .range::<Vec<u8>, _>((Bound::Unbounded, to))
                    .next_back()
                    .map(|(k, _)| k.clone())
            };
            let here = at.clone().flatten().unwrap_or_default();
            let (moved, expected) = match step {
                0 => (
                    self.request(iter.seek_to_first()).await,
                    model.first_key_value().map(|(k, _)| k.clone()),
                ),
                1 => (
                    self.request(iter.seek_to_last()).await,
                    model.last_key_value().map(|(k, _)| k.clone()),
                ),
                2 => (self.request(iter.seek(&key)).await, first_at(Bound::Included(&key))),
                3 => (self.request(iter.seek_for_prev(&key)).await, last_at(Bound::Included(&key))),
                4..8 => (self.request(iter.next()).await, first_at(Bound::Excluded(&here))),
                _ => (self.request(iter.prev()).await, last_at(Bound::Excluded(&here))),
            };
            at = match moved {
                None => None,
                Some(Err(error)) => {
                    self.shared.check_error(&error);
                    assert!(!iter.valid(), "an iterator is valid after an error");
                    None
                }
                Some(Ok(())) => {
                    let found = iter.valid().then(|| iter.key().to_vec());
                    assert!(
                        found == expected,
                        "move {step} with {key:?} from {here:?}: at {found:?}, not {expected:?}",
                    );
                    if let Some(key) = &found {
                        assert!(iter.value() == model[key], "a wrong value at {key:?}");
                    }
                    add(&self.shared.tally.right);
                    Some(found)
                }
            };
        }
    }
}

/// Reads all keys from the healed disk.
async fn read_everything(core: &Core, reader: &Reader, made: &Database) {
    let model = &made.model;
    let options = || IterOptions { fill_cache: true, ..IterOptions::default() };
    let mut iter = reader.iter(0, options()).unwrap();
    iter.seek_to_first().await.unwrap();
    for (key, value) in model {
        assert!(iter.valid() && iter.key() == key && iter.value() == value, "at {key:?}");
        iter.next().await.unwrap();
    }
    assert!(!iter.valid());
    iter.seek_to_last().await.unwrap();
    for (key, value) in model.iter().rev() {
        assert!(iter.valid() && iter.key() == key && iter.value() == value, "back at {key:?}");
        iter.prev().await.unwrap();
    }
    assert!(!iter.valid());
    drop(iter);
    for keys in made.keys.chunks(100) {
        let slices: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        for (key, answer) in keys.iter().zip(reader.multi_get(0, &slices, None).await) {
            let found = answer.unwrap().map(|value| value.to_vec());
            assert!(found.as_ref() == model.get(key), "{key:?}");
        }
        let key = &keys[core.random_u64() as usize % keys.len()];
        let found = reader.get(0, key, None).await.unwrap().map(|value| value.to_vec());
        assert!(found.as_ref() == model.get(key), "{key:?}");
    }
}

/// Faults after the opening, some mild and some severe.
fn add_faults(world: &World, made: &Database, rng: &mut Rng, stuck: bool) {
    let rough = 1 + rng.below(3) as u32;
    let some = |kind, per_million: u32, rng: &mut Rng| {
        if rng.chance(600_000) {
            world.add_fault(Fault::new(kind).chance(per_million * rough));
        }
    };
    some(FaultKind::Error(5), 4_000, rng);
    some(FaultKind::Short, 30_000, rng);
    some(FaultKind::Flip, 10_000, rng);
    some(FaultKind::Stall(0..2_000_000_000), 2_000, rng);
    if stuck {
        world.add_fault(Fault::new(FaultKind::Stuck).chance(2_000).times(4));
    }
    for (name, &data_bytes) in &made.data_bytes {
        if data_bytes == 0 {
            continue;
        }
        // A bad sector, and rotten bits.
        if rng.chance(50_000) {
            let start = rng.below(data_bytes) & !511;
            world.add_fault(Fault::new(FaultKind::Error(5)).on(name).range(start..start + 512));
        }
        if rng.chance(150_000) {
            let at = rng.below(data_bytes);
            world.rot(format!("{DIR}/{name}"), at, rng.below(8) as u8).expect("inside the file");
        }
    }
}

/// Faults of the opening: also of names, and rot anywhere in the tables.
fn add_opening_faults(world: &World, made: &Database, rng: &mut Rng) {
    let some = |kind, per_million: u32, rng: &mut Rng| {
        if rng.chance(500_000) {
            world.add_fault(Fault::new(kind).chance(per_million));
        }
    };
    some(FaultKind::NameError(23), 20_000, rng);
    some(FaultKind::Error(5), 20_000, rng);
    let vital = ["CURRENT", "MANIFEST-000005", "000009.log", "LOCK", DIR];
    let one = vital[rng.index(vital.len())];
    let kind = [FaultKind::Error(5), FaultKind::NameError(5)][rng.index(2)].clone();
    world.add_fault(Fault::new(kind).on(one).times(1));
    some(FaultKind::Short, 50_000, rng);
    some(FaultKind::Stall(0..1_000_000_000), 50_000, rng);
    for name in made.data_bytes.keys() {
        if rng.chance(150_000) {
            let at = rng.below(made.files[name].len() as u64);
            world.rot(format!("{DIR}/{name}"), at, rng.below(8) as u8).expect("inside the file");
        }
    }
}

async fn open(shared: &Shared, core: &Core) {
    loop {
        match Db::open(core, DIR.as_ref(), shared.options.clone()).await {
            Ok(db) => {
                *shared.db.borrow_mut() = Some(db);
                return;
            }
            Err(error) => {
                shared.check_error(&error);
                add(&shared.tally.failed_openings);
                shared.world.heal();
            }
        }
    }
}

async fn one_core(core: Core, shared: Rc<Shared>, mut rng: Rng) -> reactor::Pool {
    if core.id() == 0 {
        if rng.chance(300_000) {
            shared.opened_badly.set(true);
            add_opening_faults(&shared.world, &shared.made, &mut rng);
        }
        open(&shared, &core).await;
        shared.world.heal();
        add_faults(&shared.world, &shared.made, &mut rng, !shared.patient);
    }
    shared.barrier(&core, 1).await;
    let reader = shared.db().attach(&core);
    let clients: Vec<_> = (0..shared.clients)
        .map(|_| {
            let (shared, core, reader) = (shared.clone(), core.clone(), reader.clone());
            let class = [Class::Foreground, Class::Background][rng.index(2)];
            let client = Client { shared, core: core.clone(), reader, rng: rng.fork() };
            core.spawn(class, client.run())
        })
        .collect();
    for client in clients {
        // Some clients disconnect in the middle of a request.
        if rng.chance(100_000) {
            core.sleep_ns(rng.below(3_000_000)).await;
            client.cancel();
        } else {
            client.await;
        }
    }
    drop(reader);
    shared.barrier(&core, 2).await;
    if core.id() == 0 {
        shared.world.heal();
        // A table that could not be opened stays closed until the database is opened again.
        *shared.db.borrow_mut() = None;
        open(&shared, &core).await;
    }
    shared.barrier(&core, 3).await;
    let reader = shared.db().attach(&core);
    read_everything(&core, &reader, &shared.made).await;
    drop(reader);
    shared.barrier(&core, 4).await;
    *shared.db.borrow_mut() = None;
    while core.operations_in_flight() > 0 {
        core.sleep_ns(1_000_000).await;
    }
    assert_eq!(core.pool().used(), 0, "buffers leaked");
    core.pool().clone()
}

/// Runs one seed.
///
/// # Panics
/// On a wrong answer, a deadlock, or a leak; the seed is printed.
pub fn reads(seed: u64) -> Report {
    reads_checking(seed, true)
}

/// Runs one seed with a reader that checks blocks, or one that does not: the latter must fail, or
/// the simulation would not detect rot.
///
/// # Panics
/// As [`reads`].
pub fn reads_checking(seed: u64, verify_checksums: bool) -> Report {
    let mut rng = Rng::new(seed);
    let made = database(rng.next_u64());
    let cores = 1 + rng.index(3);
    let small_memory = rng.chance(300_000);
    let patient = !rng.chance(200_000);
    // Stuck operations occupy the device's queue permanently; some depth must be left.
    let disk_depth = if patient { [4, 64, 256][rng.index(3)] } else { 64 };
    let config = SimConfig {
        memory: if small_memory { 1 << 20 } else { 64 << 20 },
        disk_depth,
        capacity: [8, 100, 6000][rng.index(3)],
        block: [512, 4096][rng.index(2)],
        read: Latency {
            base_ns: [1_000, 60_000][rng.index(2)],
            spread_ns: rng.below(200_000),
            per_kib_ns: rng.below(1_000),
        },
        ..SimConfig::default()
    };
    let world = World::new(rng.next_u64(), cores, config);
    made.install(&world, DIR);
    let cache_bytes = [0, 64 << 10, 16 << 20][rng.index(3)];
    let shared = Rc::new(Shared {
        made,
        world: world.clone(),
        db: RefCell::new(None),
        tally: Tally::default(),
        options: OpenOptions { cache_bytes, verify_checksums, ..OpenOptions::default() },
        passed: Cell::new(0),
        clients: 1 + rng.below(8),
        rounds: 10 + rng.below(30),
        patient,
        small_memory,
        opened_badly: Cell::new(false),
    });
    let seeds: Vec<Rng> = (0..cores).map(|_| rng.fork()).collect();
    let again = shared.clone();
    let run = world.run(move |core| {
        let rng = seeds[core.id()].clone();
        one_core(core, again.clone(), rng)
    });
    let pools = run.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(pools.iter().all(|pool| pool.used() == 0));
    assert_eq!((world.open_files(), world.abandoned()), (0, 0), "files open, operations lost");
    assert_eq!(world.locks_held(format!("{DIR}/LOCK")), 0);
    let tally = &shared.tally;
    Report {
        right: tally.right.get(),
        errors: tally.errors.get(),
        dropped: tally.dropped.get(),
        failed_openings: tally.failed_openings.get(),
        faults: world.faults(),
        trace: world.trace(),
    }
}
