//! The engine against a `BTreeMap`: random work from proptest, in a simulated world.
//!
//! Puts, deletes, range deletes, batches, clearings, snapshots, iterators that are held during
//! writes, and new openings, with memtables so small that they are flushed and merged all the time.
//! A snapshot or an iterator sees the map as it was when it was taken.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::path::Path;

use lsm::{
    BatchWriter, Db, Durability, Iter, IterOptions, OpenOptions, Reader, Snapshot, WriteOptions,
    Writer,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use reactor::Core;
use reactor::sim::{SimConfig, World};

type Model = BTreeMap<Vec<u8>, Vec<u8>>;
type Change = (Index, Edit);

/// What is done to a key. Values and operands are a byte and how often it is repeated.
#[derive(Clone, Copy, Debug)]
enum Edit {
    Put(u8, u16),
    Merge(u8, u16),
    Delete,
    SingleDelete,
    /// All keys up to that many numbers away.
    DeleteRange(u8),
}

/// The merge operators, as RocksDB names them.
const OPERATORS: [&str; 3] =
    ["uint64add", "{id=StringAppendOperator;delimiter=, ;}", "{id=stringappendtest;delimiter=;}"];

/// The value after a merge.
fn merged(operator: usize, base: Option<&Vec<u8>>, operand: &[u8]) -> Vec<u8> {
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    let delimiter = if operator == 1 { ", " } else { "" };
    match (operator, base) {
        (0, base) => {
            let base = base.map_or(0, |base| number(base));
            base.wrapping_add(number(operand)).to_le_bytes().to_vec()
        }
        (_, None) => operand.to_vec(),
        (_, Some(base)) => [base, delimiter.as_bytes(), operand].concat(),
    }
}

#[derive(Clone, Debug)]
enum Action {
    Batch(Vec<Change>),
    /// Puts of consecutive keys, which fill memtables.
    Fill(Index, u8, u16),
    Get(Index),
    /// Keys that are looked up together, and what is written just before.
    Pipeline(Vec<Index>, Vec<Change>),
    Clear,
    Sync,
    Snapshot,
    DropSnapshot(Index),
    /// An iterator, of a snapshot or the present, and its start.
    Iterate(Option<Index>, Start),
    /// Which iterator, how many steps, and the direction.
    Step(Index, u8, bool),
    Seek(Index, Start),
    DropIterator(Index),
    Scan(Option<Index>),
    Reopen(bool),
}

#[derive(Clone, Copy, Debug)]
enum Start {
    First,
    Last,
    At(Index),
    AtOrBefore(Index),
}

fn any_change() -> impl Strategy<Value = Change> {
    let value = prop_oneof![
        3 => (any::<u8>(), 0u16..200),
        1 => (any::<u8>(), 0u16..9_000),
    ];
    let operand = (any::<u8>(), prop_oneof![2 => Just(8), 1 => 0u16..100]);
    let edit = prop_oneof![
        4 => value.prop_map(|(byte, len)| Edit::Put(byte, len)),
        4 => operand.prop_map(|(byte, len)| Edit::Merge(byte, len)),
        1 => Just(Edit::Delete),
        1 => Just(Edit::SingleDelete),
        1 => (0u8..8).prop_map(Edit::DeleteRange),
        1 => any::<u8>().prop_map(Edit::DeleteRange),
    ];
    (any::<Index>(), edit)
}

fn any_start() -> impl Strategy<Value = Start> {
    prop_oneof![
        Just(Start::First),
        Just(Start::Last),
        any::<Index>().prop_map(Start::At),
        any::<Index>().prop_map(Start::AtOrBefore),
    ]
}

fn any_action() -> impl Strategy<Value = Action> {
    let index = any::<Index>;
    prop_oneof![
        20 => vec(any_change(), 1..8).prop_map(Action::Batch),
        6 => (index(), any::<u8>(), 0u16..1_500).prop_map(|(at, n, len)| Action::Fill(at, n, len)),
        10 => index().prop_map(Action::Get),
        6 => (vec(any::<Index>(), 1..24), vec(any_change(), 0..4))
            .prop_map(|(keys, changes)| Action::Pipeline(keys, changes)),
        1 => Just(Action::Clear),
        1 => Just(Action::Sync),
        4 => Just(Action::Snapshot),
        3 => index().prop_map(Action::DropSnapshot),
        6 => (proptest::option::of(index()), any_start())
            .prop_map(|(of, start)| Action::Iterate(of, start)),
        16 => (index(), 1u8..20, any::<bool>()).prop_map(|(at, n, on)| Action::Step(at, n, on)),
        6 => (index(), any_start()).prop_map(|(at, start)| Action::Seek(at, start)),
        4 => index().prop_map(Action::DropIterator),
        3 => proptest::option::of(index()).prop_map(Action::Scan),
        2 => any::<bool>().prop_map(Action::Reopen),
    ]
}

const KEYS: usize = 300;

/// A key. Some keys are prefixes of others.
fn key(n: usize) -> Vec<u8> {
    let tail = ["", "-a", "-aa", "/much-longer-than-the-others"][n % 4];
    format!("k{:03}{tail}", n / 2).into_bytes()
}

/// An iterator, its entries, and its expected position: nowhere, or at a key.
struct Held {
    iter: Iter,
    sees: Model,
    at: Option<Vec<u8>>,
}

impl Held {
    async fn seek(&mut self, start: Start) {
        let first = |range: (Bound<Vec<u8>>, Bound<Vec<u8>>)| {
            self.sees.range(range).next().map(|(key, _)| key.clone())
        };
        let last = |range: (Bound<Vec<u8>>, Bound<Vec<u8>>)| {
            self.sees.range(range).next_back().map(|(key, _)| key.clone())
        };
        let all = (Bound::Unbounded, Bound::Unbounded);
        let (at, sought) = match start {
            Start::First => (first(all), self.iter.seek_to_first().await),
            Start::Last => (last(all), self.iter.seek_to_last().await),
            Start::At(index) => {
                let key = key(index.index(KEYS));
                let sought = self.iter.seek(&key).await;
                (first((Bound::Included(key), Bound::Unbounded)), sought)
            }
            Start::AtOrBefore(index) => {
                let key = key(index.index(KEYS));
                let sought = self.iter.seek_for_prev(&key).await;
                (last((Bound::Unbounded, Bound::Included(key))), sought)
            }
        };
        sought.unwrap();
        self.at = at;
        self.check();
    }

    async fn step(&mut self, forward: bool) {
        let Some(at) = self.at.take() else { return };
        if forward {
            self.iter.next().await.unwrap();
            let behind = (Bound::Excluded(at), Bound::Unbounded);
            self.at = self.sees.range(behind).next().map(|(key, _)| key.clone());
        } else {
            self.iter.prev().await.unwrap();
            let before = (Bound::Unbounded, Bound::Excluded(at));
            self.at = self.sees.range(before).next_back().map(|(key, _)| key.clone());
        }
        self.check();
    }

    fn check(&self) {
        assert_eq!(self.iter.valid(), self.at.is_some());
        if let Some(at) = &self.at {
            assert_eq!(self.iter.key(), at);
            assert_eq!(self.iter.value(), self.sees[at]);
        }
    }
}

struct Open {
    db: Db,
    writer: Writer,
    reader: Reader,
    snapshots: Vec<(Snapshot, Model)>,
    iterators: Vec<Held>,
    operator: usize,
}

async fn open(core: &Core, power: bool, memtable_bytes: usize, operator: usize) -> Open {
    let durability = if power { Durability::Power } else { Durability::Process };
    let merge_operator = Some(OPERATORS[operator].parse().unwrap());
    // A few hundred kilobytes fill several levels.
    let options = [
        ("max_bytes_for_level_base", "60000"),
        ("max_bytes_for_level_multiplier", "3"),
        ("target_file_size_base", "15000"),
        (
            "level_compaction_dynamic_level_bytes",
            if memtable_bytes.is_multiple_of(2) { "true" } else { "false" },
        ),
    ];
    let writing = WriteOptions {
        durability,
        memtable_bytes,
        merge_operator,
        column_family_options: options.map(|(key, value)| (key.into(), value.into())).into(),
        ..WriteOptions::default()
    };
    let reading = OpenOptions { cache_bytes: 200_000, ..OpenOptions::default() };
    let opened = Db::open_for_writing(core, Path::new("/db"), reading, writing).await;
    let (db, writer) = opened.unwrap();
    let reader = db.attach(core);
    Open { db, writer, reader, snapshots: Vec::new(), iterators: Vec::new(), operator }
}

fn pick<'a, T>(of: &'a mut [T], index: &Index) -> Option<&'a mut T> {
    if of.is_empty() { None } else { Some(index.get_mut(of)) }
}

impl Open {
    /// Writes a batch with its change of the number of keys.
    async fn write(&self, batch: BatchWriter, before: usize, after: usize) {
        let delta = after as i64 - before as i64;
        self.writer.submit(batch, Some(delta)).unwrap().await.unwrap();
        if let Some(keys) = self.db.keys() {
            assert_eq!(keys, after as u64);
        }
    }

    async fn change(&mut self, model: &mut Model, changes: &[(Index, Edit)]) {
        let (mut batch, before) = (BatchWriter::new(), model.len());
        for (index, change) in changes {
            // Half of the changes are to a few keys, so that operands pile up.
            let n = index.index(2 * KEYS);
            let key = key(if n < KEYS { n } else { n % 8 });
            match change {
                Edit::Put(byte, len) => {
                    let value = vec![*byte; usize::from(*len)];
                    batch.put(0, &key, &value);
                    model.insert(key, value);
                }
                Edit::Merge(byte, len) => {
                    let operand = vec![*byte; usize::from(*len)];
                    batch.merge(0, &key, &operand);
                    let value = merged(self.operator, model.get(&key), &operand);
                    model.insert(key, value);
                }
                Edit::Delete => {
                    batch.delete(0, &key);
                    model.remove(&key);
                }
                Edit::SingleDelete => {
                    batch.single_delete(0, &key);
                    model.remove(&key);
                }
                Edit::DeleteRange(far) => {
                    let other = super::model::key(index.index(KEYS).abs_diff(usize::from(*far)));
                    let (from, to) = (key.clone().min(other.clone()), key.max(other));
                    batch.delete_range(0, &from, &to);
                    model.retain(|key, _| *key < from || *key >= to);
                }
            }
        }
        self.write(batch, before, model.len()).await;
    }

    async fn act(&mut self, model: &mut Model, action: &Action) {
        match action {
            Action::Batch(changes) => {
                self.change(model, changes).await;
            }
            Action::Fill(index, byte, len) => {
                let from = index.index(KEYS);
                for n in from..KEYS.min(from + 40) {
                    let (mut batch, before) = (BatchWriter::new(), model.len());
                    let value = vec![*byte; usize::from(*len)];
                    batch.put(0, &key(n), &value);
                    model.insert(key(n), value);
                    self.write(batch, before, model.len()).await;
                }
            }
            Action::Get(index) => {
                let key = key(index.index(KEYS));
                let found = self.reader.get(0, &key, None).await.unwrap();
                let expected = model.get(&key).map(|value| &value[..]);
                assert_eq!(found.as_deref(), expected);
                self.reader.warm(0, &[&key, b"none", b""]);
                if let Some(found) = self.reader.get_cached(0, &key) {
                    assert_eq!(found.unwrap().as_deref(), expected);
                }
                let found = self.reader.multi_get(0, &[b"none", &key, b"k"], None).await;
                assert_eq!(found[1].as_ref().unwrap().as_deref(), expected);
                let found = self.reader.contains(0, &[&key]).await;
                assert_eq!(*found[0].as_ref().unwrap(), expected.is_some());
                for (snapshot, then) in &self.snapshots {
                    let found = self.reader.get(0, &key, Some(snapshot)).await.unwrap();
                    assert_eq!(found.as_deref(), then.get(&key).map(|value| &value[..]));
                }
            }
            Action::Pipeline(keys, changes) => {
                let of = |index: &Index| key(index.index(KEYS));
                let all: Vec<Vec<u8>> = keys.iter().map(of).collect();
                let ahead: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
                self.reader.warm(0, &ahead);
                self.change(model, changes).await;
                // One of the keys may be left out.
                let left_out = keys[0].index(2 * all.len());
                for key in all.iter().enumerate().filter(|(at, _)| *at != left_out) {
                    if let Some(found) = self.reader.get_cached(0, key.1) {
                        let expected = model.get(key.1).map(|value| &value[..]);
                        assert_eq!(found.unwrap().as_deref(), expected);
                    }
                }
            }
            Action::Clear => {
                // Snapshots that were taken before expire.
                self.snapshots.clear();
                self.iterators.clear();
                self.writer.clear(0).unwrap().await.unwrap();
                model.clear();
            }
            Action::Sync => drop(self.writer.sync().unwrap().await.unwrap()),
            Action::Snapshot => {
                self.snapshots.push((self.reader.snapshot().unwrap(), model.clone()));
            }
            Action::DropSnapshot(index) if !self.snapshots.is_empty() => {
                self.snapshots.remove(index.index(self.snapshots.len()));
            }
            Action::Iterate(of, start) => {
                let (iter, sees) = match of.and_then(|of| pick(&mut self.snapshots, &of)) {
                    Some((snapshot, then)) => {
                        let options =
                            IterOptions { snapshot: Some(snapshot), ..IterOptions::default() };
                        (self.reader.iter(0, options), then.clone())
                    }
                    None => (self.reader.iter(0, IterOptions::default()), model.clone()),
                };
                let mut held = Held { iter: iter.unwrap(), sees, at: None };
                held.seek(*start).await;
                self.iterators.push(held);
            }
            Action::Step(index, steps, forward) => {
                let Some(held) = pick(&mut self.iterators, index) else { return };
                for _ in 0..*steps {
                    held.step(*forward).await;
                }
            }
            Action::Seek(index, start) => {
                let Some(held) = pick(&mut self.iterators, index) else { return };
                held.seek(*start).await;
            }
            Action::DropIterator(index) if !self.iterators.is_empty() => {
                self.iterators.remove(index.index(self.iterators.len()));
            }
            Action::Scan(of) => {
                let (snapshot, sees) = match of.and_then(|of| pick(&mut self.snapshots, &of)) {
                    Some((snapshot, then)) => (Some(&*snapshot), &*then),
                    None => (None, &*model),
                };
                let options = IterOptions { snapshot, ..IterOptions::default() };
                let mut iter = self.reader.iter(0, options).unwrap();
                iter.seek_to_first().await.unwrap();
                for (key, value) in sees {
                    assert_eq!((iter.key(), iter.value()), (&key[..], &value[..]));
                    iter.next().await.unwrap();
                }
                assert!(!iter.valid());
            }
            Action::DropSnapshot(_) | Action::DropIterator(_) | Action::Reopen(_) => {}
        }
    }
}

async fn run(
    core: Core,
    power: bool,
    memtable_bytes: usize,
    operator: usize,
    actions: Vec<Action>,
) -> (u64, u64) {
    let mut model = Model::new();
    let mut now = open(&core, power, memtable_bytes, operator).await;
    let (mut flushes, mut merges) = (0, 0);
    let end = [Action::Reopen(power), Action::Scan(None)];
    for action in actions.iter().chain(&end) {
        if let Action::Reopen(power) = *action {
            now.writer.close().await.unwrap();
            let stats = now.writer.stats();
            (flushes, merges) = (flushes + stats.flushed_tables, merges + stats.merges);
            drop(now);
            now = open(&core, power, memtable_bytes, operator).await;
        } else {
            now.act(&mut model, action).await;
        }
    }
    now.writer.close().await.unwrap();
    (flushes, merges)
}

#[test]
fn the_engine_is_a_sorted_map() {
    let (mut flushes, mut merges) = (0, 0);
    let usual = ProptestConfig::default();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        // Each case is many operations and a world of its own.
        cases: usual.cases.div_ceil(4),
        max_shrink_iters: 400,
        failure_persistence: None,
        ..usual
    });
    let worlds = (
        any::<u64>(),
        1usize..3,
        any::<bool>(),
        prop_oneof![Just(10_000usize), Just(40_000)],
        0..OPERATORS.len(),
        vec(any_action(), 1..250),
    );
    let counts = std::cell::RefCell::new((&mut flushes, &mut merges));
    let result = runner.run(&worlds, |(seed, cores, power, memtable_bytes, operator, actions)| {
        let world = World::new(seed, cores, SimConfig::default());
        world.add_dir("/db");
        let run = |core: Core| {
            let actions = if core.id() == 0 { actions.clone() } else { Vec::new() };
            async move {
                match core.id() {
                    0 => run(core, power, memtable_bytes, operator, actions).await,
                    _ => (0, 0),
                }
            }
        };
        let ended = world.run(run).map_err(|failure| TestCaseError::fail(failure.to_string()))?;
        let mut counts = counts.borrow_mut();
        *counts.0 += ended[0].0;
        *counts.1 += ended[0].1;
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
    println!("{flushes} flushes, {merges} merges");
    assert!(flushes > 500 && merges > 50, "{flushes} flushes, {merges} merges");
}
