//! Writes are read back, by Millrace and by RocksDB, through flushes and new openings.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{DRIVER, Model, compare, fresh_dir, key, ldb, on_one_core, write_some};
use lsm::{BatchWriter, Compression, Db, Durability, IterOptions, Kind, OpenOptions, WriteOptions};
use reactor::{Core, RuntimeConfig};

pub fn rocksdb_scan(dir: &Path) -> Model {
    let unhex = |text: &str| -> Vec<u8> {
        let digits = text.trim().trim_start_matches("0x");
        let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
        (0..digits.len()).step_by(2).map(byte).collect()
    };
    ldb(dir, &["scan", "--hex"])
        .lines()
        .filter_map(|line| line.split_once(" ==> ").or_else(|| line.split_once(" : ")))
        .map(|(key, value)| (unhex(key), unhex(value)))
        .collect()
}

fn written_read_and_judged(durability: Durability, compression: Compression) {
    let dir = fresh_dir(&format!("writing-{durability:?}-{compression:?}"));
    let mut model = Model::new();
    for round in 0..3 {
        let path = dir.clone();
        let before = model.clone();
        model = on_one_core(move |core| {
            let (path, mut model) = (path.clone(), before.clone());
            async move {
                let options = WriteOptions {
                    durability,
                    compression,
                    memtable_bytes: 600_000,
                    ..WriteOptions::default()
                };
                let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
                let (db, writer) = open.await.unwrap();
                compare(&core, &db, &model).await;
                let batches = if durability == Durability::Power { 300 } else { 1500 };
                write_some(&core, &writer, &mut model, batches).await;
                compare(&core, &db, &model).await;
                if round > 0 {
                    writer.close().await.unwrap();
                }
                let levels = &db.stat().column_families[0].levels;
                let files: Vec<usize> = levels.iter().map(|level| level.files).collect();
                let merged: usize = files[1..].iter().sum();
                assert!(files[0] <= 36 && (round == 0 || merged > 0), "{files:?}");
                model
            }
        });
    }
    assert!(rocksdb_scan(&dir) == model, "RocksDB finds something else");
    ldb(&dir, &["compact"]);
    assert!(rocksdb_scan(&dir) == model, "RocksDB finds something else after a compaction");
    // And back from RocksDB.
    let (path, expected) = (dir.clone(), model.clone());
    on_one_core(move |core| {
        let (path, model) = (path.clone(), expected.clone());
        async move {
            let options = WriteOptions { durability, ..WriteOptions::default() };
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
            let (db, writer) = open.await.unwrap();
            compare(&core, &db, &model).await;
            writer.put(b"after", b"compaction").await.unwrap();
            writer.close().await.unwrap();
        }
    });
    model.insert(b"after".to_vec(), b"compaction".to_vec());
    assert!(rocksdb_scan(&dir) == model);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn writes_at_process_are_read_by_us_and_by_rocksdb() {
    written_read_and_judged(Durability::Process, Compression::None);
}

#[test]
fn writes_at_power_are_read_by_us_and_by_rocksdb() {
    written_read_and_judged(Durability::Power, Compression::Lz4);
}

#[test]
fn a_snapshot_sees_the_same_through_flushes_and_merges() {
    let dir = fresh_dir("writing-snapshots");
    on_one_core(move |core| {
        let path = dir.clone();
        async move {
            let options = WriteOptions {
                durability: Durability::Process,
                memtable_bytes: 300_000,
                ..WriteOptions::default()
            };
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
            let (db, writer) = open.await.unwrap();
            let reader = db.attach(&core);
            let mut model = Model::new();
            let mut held: Vec<(lsm::Snapshot, Model)> = Vec::new();
            for round in 0..12 {
                write_some(&core, &writer, &mut model, 200).await;
                if round % 3 == 0 {
                    held.push((reader.snapshot().unwrap(), model.clone()));
                }
                if held.len() == 3 {
                    held.remove(0);
                }
                for (snapshot, then) in &held {
                    for n in 0..300 {
                        let key = key(n * 61);
                        let found = reader.get(0, &key, Some(snapshot)).await.unwrap();
                        assert_eq!(found.as_deref(), then.get(&key).map(|value| &value[..]));
                    }
                    let options = IterOptions { snapshot: Some(snapshot), ..Default::default() };
                    let mut iter = reader.iter(0, options).unwrap();
                    iter.seek_to_first().await.unwrap();
                    for (key, value) in then {
                        assert_eq!((iter.key(), iter.value()), (&key[..], &value[..]));
                        iter.next().await.unwrap();
                    }
                    assert!(!iter.valid());
                }
            }
            drop(held);
            writer.close().await.unwrap();
            let levels = &db.stat().column_families[0].levels;
            assert!(levels[1..].iter().any(|level| level.files > 0), "nothing was merged");
        }
    });
}

/// One core writes, the other reads: it sees whole batches, and never an older state again.
#[test]
fn another_core_sees_whole_batches_in_order() {
    const ROUNDS: u64 = 20_000;
    let dir = fresh_dir("writing-two-cores");
    let processors = reactor::processors();
    let config = RuntimeConfig {
        processors: vec![processors[0], processors[processors.len() - 1]],
        memory: 64 << 20,
        ..RuntimeConfig::default()
    };
    let shared = std::sync::Arc::new(std::sync::OnceLock::<Db>::new());
    let seen = reactor::run(&config, move |core| {
        let (path, shared) = (dir.clone(), shared.clone());
        async move {
            if core.id() == 0 {
                let options = WriteOptions {
                    durability: Durability::Process,
                    memtable_bytes: 300_000,
                    ..WriteOptions::default()
                };
                let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
                let (db, writer) = open.await.unwrap();
                assert!(shared.set(db).is_ok());
                for n in 1..=ROUNDS {
                    let mut batch = BatchWriter::new();
                    batch.put(0, b"a", &n.to_be_bytes());
                    batch.put(0, format!("filler{:04}", n % 500).as_bytes(), &[b'x'; 60]);
                    batch.put(0, b"z", &n.to_be_bytes());
                    writer.write(batch).await.unwrap();
                }
                writer.close().await.unwrap();
                return ROUNDS;
            }
            let db = loop {
                match shared.get() {
                    Some(db) => break db.clone(),
                    None => core.yield_now().await,
                }
            };
            let reader = db.attach(&core);
            let mut last = 0;
            while last < ROUNDS {
                let mut both = Vec::new();
                let snapshot = reader.snapshot().unwrap();
                for key in [b"z", b"a"] {
                    let value = reader.get(0, key, Some(&snapshot)).await.unwrap();
                    both.push(value.map_or(0, |v| u64::from_be_bytes(v[..].try_into().unwrap())));
                }
                assert_eq!(both[0], both[1], "half a batch");
                assert!(both[0] >= last, "{} after {last}", both[0]);
                last = both[0];
                core.yield_now().await;
            }
            last
        }
    })
    .expect("the runtime starts");
    assert_eq!(seen, [ROUNDS, ROUNDS]);
}

/// RocksDB gives a deletion of an empty range no sequence number when it replays a log. If it were
/// counted in a log's last batch, RocksDB would not take the next log's first batch to follow.
#[test]
fn the_deletion_of_an_empty_range_takes_no_sequence_number() {
    let dir = fresh_dir("writing-empty-range");
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let write = WriteOptions { durability: Durability::Process, ..WriteOptions::default() };
            let opened = Db::open_for_writing(&core, &path, OpenOptions::default(), write).await;
            let (db, writer) = opened.unwrap();
            let first = writer.put(b"a", b"1").await.unwrap();
            let mut batch = BatchWriter::new();
            batch.delete_range(0, b"b", b"b");
            batch.put(0, b"b", b"2");
            batch.delete_range(0, b"", b"");
            batch.delete_range(0, b"c", b"d");
            batch.delete_range(0, b"z", b"z");
            assert_eq!(writer.write(batch).await.unwrap(), first + 2);
            assert_eq!(writer.delete_range(0, b"a", b"a").await.unwrap(), first + 2);
            assert_eq!(writer.put(b"c", b"3").await.unwrap(), first + 3);
            let reader = db.attach(&core);
            for key in [b"a", b"b", b"c"] {
                assert!(reader.get(0, key, None).await.unwrap().is_some());
            }
            writer.close().await.unwrap();
        }
    });
    assert_eq!(rocksdb_scan(&dir).len(), 3);
}

/// `ldb` leaves a table of level 0 at each start. These have range tombstones over each other.
#[test]
fn range_tombstones_of_rocksdb_are_merged() {
    let dir = fresh_dir("writing-range-tombstones");
    let mut model = Model::new();
    let put = |model: &mut Model, from: u64, to: u64, value: &str| {
        let mut args = vec!["batchput".to_owned(), "--create_if_missing".to_owned()];
        for n in from..to {
            let key = String::from_utf8(key(n)).unwrap();
            model.insert(key.clone().into_bytes(), value.as_bytes().to_vec());
            args.extend([key, value.to_owned()]);
        }
        ldb(&dir, &args.iter().map(|arg| &arg[..]).collect::<Vec<_>>());
    };
    let delete = |model: &mut Model, from: u64, to: u64| {
        let (from, to) = (key(from), key(to));
        ldb(&dir, &["deleterange", str::from_utf8(&from).unwrap(), str::from_utf8(&to).unwrap()]);
        model.retain(|key, _| *key < from || *key >= to);
    };
    put(&mut model, 0, 400, "oldest");
    delete(&mut model, 100, 300);
    put(&mut model, 150, 160, "between");
    delete(&mut model, 155, 200);
    put(&mut model, 170, 175, "newest");
    delete(&mut model, 390, 1000);
    assert!(rocksdb_scan(&dir) == model);
    let path = dir.clone();
    let model = on_one_core(move |core| {
        let (path, mut model) = (path.clone(), model.clone());
        async move {
            let options = WriteOptions { memtable_bytes: 100_000, ..WriteOptions::default() };
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
            let (db, writer) = open.await.unwrap();
            compare(&core, &db, &model).await;
            for n in 0..600 {
                let value = vec![n as u8; 3000];
                writer.put(&key(n * 7 + 500), &value).await.unwrap();
                model.insert(key(n * 7 + 500), value);
            }
            compare(&core, &db, &model).await;
            writer.close().await.unwrap();
            assert!(writer.stats().merges > 0);
            let level1 = &db.stat().column_families[0].levels[1];
            assert!(level1.files > 0 && level1.deletions == 0, "{level1:?}");
            model
        }
    });
    assert!(rocksdb_scan(&dir) == model);
    ldb(&dir, &["checkconsistency"]);
}

/// Overwrites a part of a file.
async fn damage(core: &Core, path: &Path, offset: u64, bytes: usize) {
    let (opening, mode) = (reactor::Opening::Existing, reactor::Mode::Buffered);
    let file = core.open_for_writing(path, opening, mode).await.unwrap();
    let mut noise = core.alloc(bytes).unwrap();
    noise.fill(0x5A);
    core.attach(&file).write_at(offset, noise, bytes).await.0.unwrap();
}

/// Writes until a merge has ended, and waits for the rest. Returns the keys written.
async fn write_and_merge(
    core: &Core,
    writer: &lsm::Writer,
    model: &mut Model,
    keys: u64,
) -> BTreeSet<Vec<u8>> {
    let mut written = BTreeSet::new();
    for turn in 0..2500 {
        let key = key(core.random_u64() % keys);
        if turn % 5 == 0 {
            writer.delete(&key).await.unwrap();
            model.remove(&key);
        } else {
            let value = vec![core.random_u64() as u8; 400];
            writer.put(&key, &value).await.unwrap();
            model.insert(key.clone(), value);
        }
        written.insert(key);
    }
    let patience = core.now_ns() + 60_000_000_000;
    while !writer.is_quiesced() && core.now_ns() < patience {
        core.sleep_ns(1_000_000).await;
    }
    written
}

/// What is wrong with a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Harm {
    Block,
    Whole,
    Cut,
    Missing,
}

const HARMS: [Harm; 2] = [Harm::Block, Harm::Missing];

/// Does this to a table of a directory.
#[expect(clippy::disallowed_methods, reason = "damages a file of the host")]
async fn harm(core: &Core, dir: &Path, sst: &str, harm: Harm) {
    let path = dir.join(sst);
    let files = core.list(dir).await.unwrap();
    let size = files.iter().find(|file| file.name == sst).unwrap().size;
    match harm {
        Harm::Block => damage(core, &path, size / 3, 16).await,
        Harm::Whole => damage(core, &path, 0, size as usize).await,
        Harm::Cut => {
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(size / 2).unwrap();
        }
        Harm::Missing => core.rename(&path, &path.with_extension("away")).await.unwrap(),
    }
}

/// Millrace opens a database with a damaged table twice, and writes.
fn writing_continues_beside_a_damaged_table(
    dir: &Path,
    model: &Model,
    keys: u64,
    sst: &str,
    what: Harm,
) {
    let (path, model, sst) = (dir.to_owned(), model.clone(), sst.to_owned());
    on_one_core(move |core| {
        let (path, mut model, sst) = (path.clone(), model.clone(), sst.clone());
        async move {
            harm(&core, &path, &sst, what).await;
            let mut written = BTreeSet::new();
            for _ in 0..2 {
                let options = WriteOptions {
                    durability: Durability::Process,
                    memtable_bytes: 30_000,
                    ..WriteOptions::default()
                };
                let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
                let (db, writer) = open.await.unwrap();
                written.extend(write_and_merge(&core, &writer, &mut model, keys).await);
                assert!(writer.failure().is_none(), "{:?}", writer.failure());
                let stats = writer.stats();
                assert_eq!(stats.damaged_tables, 1);
                assert!(stats.merges > 3 && stats.level0_files < 16, "{stats:?}");
                let reader = db.attach(&core);
                for n in 0..keys {
                    let key = key(n);
                    match reader.get(0, &key, None).await {
                        Ok(found) => {
                            assert_eq!(found.as_deref(), model.get(&key).map(|v| &v[..]), "{n}");
                        }
                        // Keys in the damaged block.
                        Err(error) => {
                            assert_eq!(error.kind(), Kind::Corruption);
                            assert!(!written.contains(&key), "{n}: {error}");
                            assert!(error.to_string().contains(&sst), "{error}");
                        }
                    }
                }
                writer.close().await.unwrap();
            }
            if what != Harm::Missing {
                return;
            }
            // When the table is there again, so is everything.
            let table = path.join(&sst);
            core.rename(&table.with_extension("away"), &table).await.unwrap();
            let db = Db::open(&core, &path, OpenOptions::default()).await.unwrap();
            let reader = db.attach(&core);
            for n in 0..keys {
                let key = key(n);
                let found = reader.get(0, &key, None).await.unwrap();
                assert_eq!(found.as_deref(), model.get(&key).map(|v| &v[..]), "{n}");
            }
        }
    });
    if matches!(what, Harm::Block | Harm::Missing) {
        // RocksDB opens a database only if it can open every table.
        ldb(dir, &["checkconsistency"]);
    }
}

/// A database of RocksDB with `keys` keys in level 1, in tables of about `file_bytes`.
fn in_level_1(dir: &Path, keys: u64, file_bytes: u64) -> Model {
    let mut model = Model::new();
    let mut args = vec!["batchput".to_owned(), "--create_if_missing".to_owned()];
    for n in 0..keys {
        let (key, value) = (String::from_utf8(key(n)).unwrap(), format!("{n:0200}"));
        model.insert(key.clone().into_bytes(), value.clone().into_bytes());
        args.extend([key, value]);
    }
    ldb(dir, &args.iter().map(|arg| &arg[..]).collect::<Vec<_>>());
    let bytes = format!("--file_size={file_bytes}");
    ldb(dir, &["compact", &bytes, "--compression_type=no", "--block_size=1024"]);
    model
}

fn tables(dir: &Path) -> Vec<String> {
    let mut tables = names(dir, ".sst");
    tables.sort();
    tables
}

#[test]
fn a_damaged_table_of_level_1_is_left_alone() {
    // A family that lacks all of its tables is refused.
    for what in [Harm::Whole, Harm::Cut] {
        let dir = fresh_dir(&format!("writing-damaged-one-{what:?}"));
        let model = in_level_1(&dir, 1500, 1 << 20);
        let all = tables(&dir);
        assert_eq!(all.len(), 1, "{all:?}");
        writing_continues_beside_a_damaged_table(&dir, &model, 1500, &all[0], what);
    }
}

#[test]
fn tables_that_do_not_overlap_a_damaged_one_are_merged() {
    for what in HARMS {
        let dir = fresh_dir(&format!("writing-damaged-many-{what:?}"));
        let model = in_level_1(&dir, 1500, 20_000);
        let all = tables(&dir);
        assert!(all.len() > 6, "{all:?}");
        writing_continues_beside_a_damaged_table(&dir, &model, 1500, &all[all.len() / 2], what);
        let in_level0: u64 = level0_bytes(&dir);
        assert!(in_level0 < 400_000, "what overlaps stays, not all: {in_level0}");
    }
}

#[test]
fn an_iterator_returns_all_keys_around_a_table_that_cannot_be_read() {
    for what in [Harm::Whole, Harm::Missing] {
        let dir = fresh_dir(&format!("writing-damaged-iterated-{what:?}"));
        let model = in_level_1(&dir, 1500, 20_000);
        let all = tables(&dir);
        on_one_core(move |core| {
            let (dir, model, sst) = (dir.clone(), model.clone(), all[all.len() / 2].clone());
            async move {
                harm(&core, &dir, &sst, what).await;
                let db = Db::open(&core, &dir, OpenOptions::default()).await.unwrap();
                let reader = db.attach(&core);
                let mut lost = Vec::new();
                for key in model.keys() {
                    match reader.get(0, key, None).await {
                        Ok(found) => assert_eq!(found.as_deref(), model.get(key).map(|v| &v[..])),
                        Err(error) => {
                            assert!(error.to_string().contains(&sst), "{error}");
                            lost.push(key.clone());
                        }
                    }
                }
                let (first, last) = (lost.first().unwrap(), lost.last().unwrap());
                assert!(lost.len() < model.len() / 3);
                let before: Vec<&Vec<u8>> = model.keys().filter(|key| *key < first).collect();
                let after: Vec<&Vec<u8>> = model.keys().filter(|key| *key > last).collect();
                let mut iter = reader.iter(0, IterOptions::default()).unwrap();
                iter.seek_to_first().await.unwrap();
                for (at, key) in before.iter().enumerate() {
                    assert_eq!(iter.key(), &key[..]);
                    match iter.next().await {
                        Ok(()) => {}
                        Err(error) => {
                            assert!(error.to_string().contains(&sst), "{error}");
                            assert_eq!(at + 1, before.len());
                        }
                    }
                }
                assert!(!iter.valid());
                iter.seek_to_last().await.unwrap();
                for (at, key) in after.iter().rev().enumerate() {
                    assert_eq!(iter.key(), &key[..]);
                    assert_eq!(iter.prev().await.is_err(), at + 1 == after.len());
                }
                assert!(!iter.valid());
                // It turns around beside the table, on both sides.
                iter.seek(before[before.len() - 1]).await.unwrap();
                iter.prev().await.unwrap();
                assert_eq!(iter.key(), &before[before.len() - 2][..]);
                iter.next().await.unwrap();
                assert_eq!(iter.key(), &before[before.len() - 1][..]);
                iter.next().await.unwrap_err();
                iter.seek_for_prev(after[0]).await.unwrap();
                iter.next().await.unwrap();
                assert_eq!(iter.key(), &after[1][..]);
                iter.prev().await.unwrap();
                assert_eq!(iter.key(), &after[0][..]);
                iter.prev().await.unwrap_err();
                for key in [first, last, &lost[lost.len() / 2]] {
                    iter.seek(key).await.unwrap_err();
                    iter.seek_for_prev(key).await.unwrap_err();
                }
                // Within bounds that exclude the table there is no error.
                let bounds = IterOptions { upper: Some(first.clone()), ..IterOptions::default() };
                let mut iter = reader.iter(0, bounds).unwrap();
                iter.seek_to_last().await.unwrap();
                assert_eq!(iter.key(), &before[before.len() - 1][..]);
                iter.next().await.unwrap();
                assert!(!iter.valid());
            }
        });
    }
}

fn level0_bytes(dir: &Path) -> u64 {
    let dir = dir.to_owned();
    on_one_core(move |core| {
        let dir = dir.clone();
        async move {
            let db = Db::open(&core, &dir, OpenOptions::default()).await.unwrap();
            db.stat().column_families[0].levels[0].bytes
        }
    })
}

#[test]
fn a_damaged_table_of_level_0_is_left_alone() {
    for what in HARMS {
        let dir = fresh_dir(&format!("writing-damaged-zero-{what:?}"));
        let mut model = in_level_1(&dir, 1500, 20_000);
        let before = tables(&dir);
        let mut args = vec!["batchput".to_owned()];
        for n in 300..600 {
            args.extend([String::from_utf8(key(n)).unwrap(), "newer".repeat(20)]);
            model.insert(key(n), "newer".repeat(20).into_bytes());
        }
        ldb(&dir, &args.iter().map(|arg| &arg[..]).collect::<Vec<_>>());
        // The next process makes a table of it.
        ldb(&dir, &["put", "key000001", "value"]);
        model.insert(key(1), b"value".to_vec());
        let new = tables(&dir).into_iter().find(|table| !before.contains(table)).unwrap();
        writing_continues_beside_a_damaged_table(&dir, &model, 1500, &new, what);
    }
}

#[test]
fn clearing_removes_all_writes_before_it_and_none_after() {
    let dir = fresh_dir("writing-cleared");
    let path = dir.clone();
    let model = on_one_core(move |core| {
        let path = path.clone();
        async move {
            let mut model = Model::new();
            let options = WriteOptions {
                durability: Durability::Process,
                memtable_bytes: 200_000,
                ..WriteOptions::default()
            };
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
            let (db, writer) = open.await.unwrap();
            for _ in 0..6 {
                let mut gone = Model::new();
                write_some(&core, &writer, &mut gone, 1 + core.random_u64() as usize % 800).await;
                let snapshot = db.attach(&core).snapshot().unwrap();
                let reader = db.attach(&core);
                let cleared = writer.clear(0).unwrap();
                let after = writer.submit(
                    {
                        let mut batch = BatchWriter::new();
                        batch.put(0, b"after", b"it");
                        batch
                    },
                    None,
                );
                cleared.await.unwrap();
                after.unwrap().await.unwrap();
                model = Model::from([(b"after".to_vec(), b"it".to_vec())]);
                compare(&core, &db, &model).await;
                let error = reader.get(0, b"after", Some(&snapshot)).await.unwrap_err();
                assert_eq!(error.kind(), lsm::Kind::Expired);
                write_some(&core, &writer, &mut model, 100).await;
                compare(&core, &db, &model).await;
            }
            writer.sync().unwrap().await.unwrap();
            writer.close().await.unwrap();
            let files = core.list(&path).await.unwrap();
            assert!(files.len() < 20, "{files:?}");
            model
        }
    });
    assert!(rocksdb_scan(&dir) == model);
}

/// Names in a directory with this ending.
#[expect(clippy::disallowed_methods, reason = "the test looks at the directory from outside")]
fn names(dir: &Path, end: &str) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(end)).collect()
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test looks at the directory from outside")]
fn obsolete_tables_are_recycled_unless_a_reader_may_have_them() {
    let dir = fresh_dir("writing-again");
    let checkpoint = fresh_dir("writing-again-checkpoint");
    let mut models = vec![Model::new()];
    for round in 0..3 {
        let (path, before) = (dir.clone(), models[round].clone());
        let model = on_one_core(move |core| {
            let (path, mut model) = (path.clone(), before.clone());
            async move {
                let options = WriteOptions {
                    durability: Durability::Process,
                    memtable_bytes: 200_000,
                    ..WriteOptions::default()
                };
                let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
                let (db, writer) = open.await.unwrap();
                write_some(&core, &writer, &mut model, 500).await;
                let reader = db.attach(&core);
                let mut iter = reader.iter(0, IterOptions::default()).unwrap();
                iter.seek_to_first().await.unwrap();
                let seen = model.clone();
                write_some(&core, &writer, &mut model, 3000).await;
                compare(&core, &db, &model).await;
                for (key, value) in &seen {
                    assert_eq!((iter.key(), iter.value()), (&key[..], &value[..]));
                    iter.next().await.unwrap();
                }
                assert!(!iter.valid());
                writer.close().await.unwrap();
                let stats = writer.stats();
                assert!(stats.merges > 2 && stats.rewritten_tables > 5, "{stats:?}");
                model
            }
        });
        models.push(model);
        if round == 0 {
            // Tables as hard links, the rest as copies.
            for entry in std::fs::read_dir(&dir).unwrap() {
                let entry = entry.unwrap();
                let to = checkpoint.join(entry.file_name());
                if entry.path().extension().is_some_and(|extension| extension == "sst") {
                    std::fs::hard_link(entry.path(), to).unwrap();
                } else if entry.file_name() != "LOCK" {
                    std::fs::copy(entry.path(), to).unwrap();
                }
            }
        }
    }
    assert!(rocksdb_scan(&checkpoint) == models[1], "the checkpoint was written over");
    // Logs; recycled tables do not stay.
    assert!((1..=3).contains(&names(&dir, ".dbtmp").len()), "{:?}", names(&dir, ".dbtmp"));
    assert!(rocksdb_scan(&dir) == models[3]);
    ldb(&dir, &["put", "key000001", "of RocksDB"]);
    assert_eq!(names(&dir, ".dbtmp"), [""; 0], "to RocksDB they are garbage");
    models[3].insert(b"key000001".to_vec(), b"of RocksDB".to_vec());
    assert!(rocksdb_scan(&dir) == models[3]);
}

/// Writes with their changes of the number of keys. The database is opened again each time.
#[test]
fn the_number_of_keys_is_kept() {
    for durability in [Durability::Process, Durability::Power] {
        let dir = fresh_dir(&format!("writing-counted-{durability:?}"));
        let mut model = Model::new();
        for round in 0..5_u64 {
            let (path, before) = (dir.clone(), model.clone());
            model = on_one_core(move |core| {
                let (path, mut model) = (path.clone(), before.clone());
                async move {
                    let options = WriteOptions {
                        durability,
                        memtable_bytes: 60_000,
                        ..WriteOptions::default()
                    };
                    let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
                    let (db, writer) = open.await.unwrap();
                    assert_eq!(db.keys(), Some(model.len() as u64), "round {round}");
                    if round == 3 {
                        writer.clear(0).unwrap().await.unwrap();
                        model.clear();
                        assert_eq!(db.keys(), Some(0));
                    }
                    for n in 0..200 + 40 * round {
                        let key = key(core.random_u64() % 500);
                        let mut batch = BatchWriter::new();
                        let was = model.remove(&key).is_some();
                        let is = n % 3 > 0;
                        if is {
                            batch.put(0, &key, &[7; 700]);
                            model.insert(key, vec![7; 700]);
                        } else {
                            batch.delete(0, &key);
                        }
                        let keys = i64::from(is) - i64::from(was);
                        writer.submit(batch, Some(keys)).unwrap().await.unwrap();
                    }
                    assert_eq!(db.keys(), Some(model.len() as u64));
                    if round % 2 == 0 {
                        writer.close().await.unwrap();
                    }
                    model
                }
            });
        }
        // RocksDB does not count keys: after it has opened the database, their number is unknown.
        ldb(&dir, &["put", "another", "key"]);
        let path = dir.clone();
        let keys = on_one_core(move |core| {
            let path = path.clone();
            async move { Db::open(&core, &path, OpenOptions::default()).await.unwrap().keys() }
        });
        assert_eq!(keys, None);
    }
}

const CHILD: &str = "MILLRACE_TEST_WRITES_TO";

/// The process that is killed: this test program, told by the environment where to write.
#[test]
fn the_process_that_is_killed() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let (durability, dir) = task.split_once(' ').unwrap();
    let durability = if durability == "power" { Durability::Power } else { Durability::Process };
    let path = PathBuf::from(dir);
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let options =
                WriteOptions { durability, memtable_bytes: 400_000, ..WriteOptions::default() };
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
            let (db, writer) = open.await.unwrap();
            let reader = db.attach(&core);
            let last = reader.get(0, b"last", None).await.unwrap();
            let mut next = last.map_or(0, |v| u64::from_be_bytes(v[..].try_into().unwrap()));
            loop {
                next += 1;
                let mut batch = BatchWriter::new();
                for part in 0..3 {
                    let key = format!("n{next:08}-{part}");
                    batch.put(0, key.as_bytes(), &vec![next as u8; (next % 700) as usize]);
                }
                batch.put(0, b"last", &next.to_be_bytes());
                writer.write(batch).await.unwrap();
                println!("done {next}");
            }
        }
    });
}

fn nothing_is_lost_by_a_kill(name: &str, cycles: usize) {
    let dir = fresh_dir(&format!("writing-killed-{name}"));
    let mut acknowledged: Vec<u64> = Vec::new();
    for cycle in 0..cycles {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "writing::the_process_that_is_killed",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(CHILD, format!("{name} {}", dir.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut left = 40 + cycle * 211 % 2000;
        for line in lines {
            let line = line.unwrap();
            if let Some(n) = line.split("done ").nth(1) {
                acknowledged.push(n.trim().parse().unwrap());
                left -= 1;
                if left == 0 {
                    break;
                }
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(acknowledged.len() > cycles * 40);
    let found = rocksdb_scan(&dir);
    let (path, known) = (dir.clone(), acknowledged.clone());
    on_one_core(move |core| {
        let (path, known) = (path.clone(), known.clone());
        async move {
            let options = WriteOptions::default();
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
            let (db, writer) = open.await.unwrap();
            let reader = db.attach(&core);
            for n in known {
                for part in 0..3 {
                    let key = format!("n{n:08}-{part}");
                    let value = reader.get(0, key.as_bytes(), None).await.unwrap();
                    assert_eq!(
                        value.as_deref(),
                        Some(&vec![n as u8; (n % 700) as usize][..]),
                        "{key}"
                    );
                }
            }
            writer.close().await.unwrap();
        }
    });
    for n in acknowledged {
        assert!(found.contains_key(format!("n{n:08}-2").as_bytes()), "RocksDB lost {n}");
    }
    // Whole batches: each key has the others of its batch.
    for key in found.keys().filter(|key| key.starts_with(b"n")) {
        let stem = std::str::from_utf8(&key[..9]).unwrap();
        assert!((0..3).all(|part| found.contains_key(format!("{stem}-{part}").as_bytes())));
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn kill_9_loses_nothing_that_was_acknowledged_for_the_process() {
    nothing_is_lost_by_a_kill("process", 12);
}

#[test]
fn kill_9_loses_nothing_that_was_acknowledged_for_a_power_cut() {
    nothing_is_lost_by_a_kill("power", 6);
}

/// Without io_uring, files are written by threads: the same must hold.
#[test]
fn it_holds_on_the_epoll_driver_too() {
    let tests = [
        "writing::writes_at_power_are_read_by_us_and_by_rocksdb",
        "writing::another_core_sees_whole_batches_in_order",
        "writing::kill_9_loses_nothing_that_was_acknowledged_for_the_process",
        "writing::kill_9_loses_nothing_that_was_acknowledged_for_a_power_cut",
    ];
    let done = Command::new(std::env::current_exe().unwrap())
        .arg("--exact")
        .args(tests)
        .env(DRIVER, "epoll")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{said}");
    assert!(said.contains(&format!("{} passed", tests.len())), "{said}");
}

/// Loads the keys of a range of numbers, each with a value of `size` bytes.
async fn load(
    writer: &lsm::Writer,
    model: &mut Model,
    numbers: std::ops::Range<u64>,
    size: usize,
) -> lsm::Result<u64> {
    let mut left = numbers.clone();
    let entry = |n: u64| (key(n), vec![n as u8; size]);
    let loaded = writer
        .bulk_load(0, async |key, value| {
            let Some(n) = left.next() else { return Ok(false) };
            let (k, v) = entry(n);
            key.extend_from_slice(&k);
            value.extend_from_slice(&v);
            Ok(true)
        })
        .await?;
    model.extend(numbers.map(entry));
    Ok(loaded)
}

#[test]
fn a_load_is_in_the_bottom_level_for_us_and_for_rocksdb() {
    let dir = fresh_dir("writing-loaded");
    let path = dir.clone();
    let mut model = on_one_core(move |core| {
        let path = path.clone();
        async move {
            let mut model = Model::new();
            let open =
                Db::open_for_writing(&core, &path, OpenOptions::default(), WriteOptions::default());
            let (db, writer) = open.await.unwrap();
            // More than one table, into a database that has no sequence number yet.
            assert_eq!(load(&writer, &mut model, 0..4200, 16_000).await.unwrap(), 4200);
            assert_eq!(db.keys(), Some(4200));
            assert_eq!(load(&writer, &mut model, 0..0, 10).await.unwrap(), 0);
            compare(&core, &db, &model).await;
            // After the keys that are there, with newer writes over all of them.
            writer.put(&key(10_000), b"between").await.unwrap();
            model.insert(key(10_000), b"between".to_vec());
            load(&writer, &mut model, 12_000..13_000, 100).await.unwrap();
            load(&writer, &mut model, 9_000..9_500, 100).await.unwrap();
            for n in (0..13_000).step_by(3) {
                writer.put(&key(n), b"newer").await.unwrap();
                model.insert(key(n), b"newer".to_vec());
                writer.delete(&key(n + 1)).await.unwrap();
                model.remove(&key(n + 1));
            }
            compare(&core, &db, &model).await;
            let levels = &db.stat().column_families[0].levels;
            assert!(levels[6].files >= 4, "{levels:?}");
            writer.close().await.unwrap();
            model
        }
    });
    ldb(&dir, &["checkconsistency"]);
    assert!(rocksdb_scan(&dir) == model, "RocksDB finds something else");
    ldb(&dir, &["compact"]);
    // Into a database that RocksDB has written.
    let path = dir.clone();
    model = on_one_core(move |core| {
        let (path, mut model) = (path.clone(), model.clone());
        async move {
            let open =
                Db::open_for_writing(&core, &path, OpenOptions::default(), WriteOptions::default());
            let (db, writer) = open.await.unwrap();
            load(&writer, &mut model, 15_000..16_000, 100).await.unwrap();
            compare(&core, &db, &model).await;
            model
        }
    });
    assert!(rocksdb_scan(&dir) == model);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_load_that_fails_leaves_nothing() {
    let dir = fresh_dir("writing-load-refused");
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let mut model = Model::new();
            let open =
                Db::open_for_writing(&core, &path, OpenOptions::default(), WriteOptions::default());
            let (db, writer) = open.await.unwrap();
            writer.put(&key(500), b"in memory").await.unwrap();
            model.insert(key(500), b"in memory".to_vec());
            load(&writer, &mut model, 1000..2000, 100).await.unwrap();
            let before = model.clone();
            let refused = async |writer: &lsm::Writer, numbers| {
                let error = load(writer, &mut Model::new(), numbers, 100).await.unwrap_err();
                assert_eq!(error.kind(), Kind::Unsupported, "{error}");
                error.to_string()
            };
            let text = refused(&writer, 400..501).await;
            assert!(text.contains("in memory"), "{text}");
            // The bounds of a table count, its first and its last key too.
            for numbers in [1999..2500, 900..1001, 1200..1300] {
                let text = refused(&writer, numbers).await;
                assert!(text.contains("there is table"), "{text}");
            }
            let mut left = [b"a", b"b", b"b"].into_iter();
            let twice = writer.bulk_load(0, async |key, _| {
                let Some(next) = left.next() else { return Ok(false) };
                key.extend_from_slice(next);
                Ok(true)
            });
            let error = twice.await.unwrap_err().to_string();
            assert!(error.contains("entry 2 of a bulk load"), "{error}");
            let unknown = writer.bulk_load(7, async |_, _| Ok(false)).await.unwrap_err();
            assert_eq!(unknown.kind(), Kind::UnknownColumnFamily);
            // Beside the keys that are there, none of these prevents a load.
            load(&writer, &mut model, 501..1000, 100).await.unwrap();
            load(&writer, &mut model, 0..500, 100).await.unwrap();
            compare(&core, &db, &model).await;
            assert_eq!(model.len(), before.len() + 999);
            writer.close().await.unwrap();
            let error = load(&writer, &mut model, 3000..3001, 1).await.unwrap_err();
            assert!(error.to_string().contains("closed"), "{error}");
        }
    });
    std::fs::remove_dir_all(&dir).unwrap();
}
