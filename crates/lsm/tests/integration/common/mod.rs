//! Helpers of the engine's tests: a directory, a core to run on, random writes with their model,
//! and RocksDB's own tool.
#![allow(dead_code, reason = "each suite uses its part")]
#![allow(clippy::disallowed_methods, reason = "tests are no part of a node")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use lsm::{BatchWriter, Db, Iter, IterOptions, Writer};
use reactor::Core;
use reactor::sim::World;

/// Chooses the reactor's driver.
pub const DRIVER: &str = "MILLRACE_DRIVER";

/// An empty directory of this name.
pub fn fresh_dir(name: &str) -> PathBuf {
    // The same test may run on another driver at the same time.
    let driver = std::env::var(DRIVER).unwrap_or_default();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}{driver}"));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// Runs `main` on one core that has 64 MiB for its buffers.
pub fn on_one_core<T: Send + 'static, F>(main: impl Fn(Core) -> F + Clone + Send + 'static) -> T
where
    F: Future<Output = T> + 'static,
{
    on_one_core_with(64 << 20, main)
}

/// Runs `main` on one core with this many bytes for its buffers.
pub fn on_one_core_with<T: Send + 'static, F>(
    memory: usize,
    main: impl Fn(Core) -> F + Clone + Send + 'static,
) -> T
where
    F: Future<Output = T> + 'static,
{
    reactor::testing::on_one_core(memory, main)
}

/// The output of RocksDB's `ldb` for the database in `dir`. It must succeed.
pub fn ldb(dir: &Path, args: &[&str]) -> String {
    let out = Command::new("ldb")
        .arg(format!("--db={}", dir.display()))
        .args(args)
        .output()
        .expect("ldb runs: install Debian's rocksdb-tools (./test does)");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "ldb {args:?}: {}{}", text(&out.stdout), text(&out.stderr));
    text(&out.stdout)
}

/// The contents of a database.
pub type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// One of 20,000 keys.
pub fn key(n: u64) -> Vec<u8> {
    format!("key{:06}", n % 20_000).into_bytes()
}

/// Writes random batches, and applies them to the model.
pub async fn write_some(core: &Core, writer: &Writer, model: &mut Model, batches: usize) {
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
        if core.random_u64().is_multiple_of(20) {
            let from = core.random_u64() % 19_000;
            let (from, to) = (key(from), key(from + core.random_u64() % 500));
            batch.delete_range(0, &from, &to);
            model.retain(|key, _| *key < from || *key >= to);
        }
        writer.write(batch).await.unwrap();
    }
}

/// Compares a database with a model: gets, scans in both directions, and seeks.
pub async fn compare(core: &Core, db: &Db, model: &Model) {
    let reader = db.attach(core);
    for n in 0..1000 {
        let key = key(n * 17);
        let found = reader.get(0, &key, None).await.unwrap();
        assert_eq!(found.as_deref(), model.get(&key).map(|value| &value[..]), "{n}");
    }
    let keys: Vec<Vec<u8>> = (0..200).map(|n| key(n * 97 + 5)).collect();
    let asked: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    for (found, key) in reader.multi_get(0, &asked, None).await.into_iter().zip(&keys) {
        assert_eq!(found.unwrap().as_deref(), model.get(key).map(|value| &value[..]));
    }
    let mut iter = reader.iter(0, IterOptions::default()).unwrap();
    scan_both_ways(&mut iter, model).await;
    for n in 0..200 {
        let from = key(n * 101);
        iter.seek(&from).await.unwrap();
        let found = iter.valid().then(|| iter.key().to_vec());
        assert_eq!(found.as_ref(), model.range(from..).next().map(|(key, _)| key));
    }
}

/// Walks over all entries, from each end to the other.
pub async fn scan_both_ways(iter: &mut Iter, model: &Model) {
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

/// Runs `main` on the first core of a world.
pub fn on_first_core<F, Fut>(world: &World, main: F)
where
    F: Fn(Core, World) -> Fut + 'static,
    Fut: Future<Output = ()> + 'static,
{
    let inside = world.clone();
    let run = world.run(move |core| {
        let main = (core.id() == 0).then(|| main(core, inside.clone()));
        async move {
            if let Some(main) = main {
                main.await;
            }
        }
    });
    run.unwrap();
}
