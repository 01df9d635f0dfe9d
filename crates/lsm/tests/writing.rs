//! What is written is read back, by us and by RocksDB, through flushes and new openings.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lsm::{BatchWriter, Compression, Db, Durability, IterOptions, OpenOptions, WriteOptions};
use reactor::{Core, RuntimeConfig};

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn fresh_dir(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

fn on_one_core<T: Send + 'static, F>(main: impl Fn(Core) -> F + Clone + Send + 'static) -> T
where
    F: Future<Output = T> + 'static,
{
    let config = RuntimeConfig {
        processors: reactor::processors()[..1].to_vec(),
        memory: 64 << 20,
        ..RuntimeConfig::default()
    };
    reactor::run(&config, main).expect("the runtime starts").remove(0)
}

fn ldb(dir: &Path, args: &[&str]) -> String {
    let out = Command::new("ldb")
        .arg(format!("--db={}", dir.display()))
        .args(args)
        .output()
        .expect("ldb runs: install Debian's rocksdb-tools (./test does)");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "ldb {args:?}: {}{}", text(&out.stdout), text(&out.stderr));
    text(&out.stdout)
}

fn rocksdb_scan(dir: &Path) -> Model {
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

fn key(n: u64) -> Vec<u8> {
    format!("key{:06}", n % 20_000).into_bytes()
}

/// Some thousand batches; the model is what they lead to.
async fn write_some(core: &Core, writer: &lsm::Writer, model: &mut Model, batches: usize) {
    for _ in 0..batches {
        let mut batch = BatchWriter::new();
        for _ in 0..1 + core.random_u64() % 20 {
            let key = key(core.random_u64());
            if core.random_u64().is_multiple_of(4) {
                batch.delete(0, &key);
                model.remove(&key);
            } else {
                let value = vec![core.random_u64() as u8; core.random_u64() as usize % 300];
                batch.put(0, &key, &value);
                model.insert(key, value);
            }
        }
        writer.write(batch).await.unwrap();
    }
}

async fn compare(core: &Core, db: &Db, model: &Model) {
    let reader = db.attach(core);
    for n in 0..2000 {
        let key = key(n * 7);
        let found = reader.get(0, &key, None).await.unwrap();
        assert_eq!(found.as_deref(), model.get(&key).map(|value| &value[..]), "{n}");
    }
    let mut iter = reader.iter(0, IterOptions::default()).unwrap();
    iter.seek_to_first().await.unwrap();
    for (key, value) in model {
        assert_eq!((iter.key(), iter.value()), (&key[..], &value[..]));
        iter.next().await.unwrap();
    }
    assert!(!iter.valid());
    iter.seek_to_last().await.unwrap();
    for (key, value) in model.iter().rev() {
        assert_eq!((iter.key(), iter.value()), (&key[..], &value[..]));
        iter.prev().await.unwrap();
    }
    assert!(!iter.valid());
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
                let options =
                    WriteOptions { durability, compression, memtable_bytes: 600_000, create: true };
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
                assert!(files[0] <= 20 && (round == 0 || files[1] > 0), "{files:?}");
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
fn what_is_written_for_the_process_is_read_by_us_and_by_rocksdb() {
    written_read_and_judged(Durability::Process, Compression::None);
}

#[test]
fn what_is_written_for_a_power_cut_is_read_by_us_and_by_rocksdb() {
    written_read_and_judged(Durability::Power, Compression::Lz4);
}

#[test]
fn a_snapshot_sees_what_was_there_through_flushes_and_merges() {
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
            assert!(levels[1].files > 0, "nothing was merged");
        }
    });
}

/// One core writes, the other reads: what it has seen once it sees again, and whole batches.
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
            .args(["--exact", "the_process_that_is_killed", "--nocapture", "--test-threads=1"])
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
    // Whole batches: each key has its siblings.
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
