//! Lookups by threads that are not cores: the same answers as the core's, or none.
#![allow(clippy::disallowed_methods, reason = "tests have threads that are no cores")]

use lsm::{
    BatchWriter, Compression, Db, Durability, OpenOptions, Reader, SharedReader, WriteOptions,
    Writer,
};
use reactor::Core;

use crate::common::{Model, fresh_dir, key, on_one_core, on_one_core_with, write_some};

const KEYS: u64 = 20_000;

async fn open(core: &Core, path: &std::path::Path, tables: usize) -> (Writer, Reader) {
    let options = OpenOptions {
        cache_bytes: 32 << 20,
        shared_cache: true,
        memory_bytes: tables,
        ..OpenOptions::default()
    };
    let write = WriteOptions {
        durability: Durability::Process,
        memtable_bytes: 200_000,
        compression: Compression::Lz4,
        merge_operator: Some("uint64add".parse().unwrap()),
        ..WriteOptions::default()
    };
    let (db, writer) = Db::open_for_writing(core, path, options, write).await.unwrap();
    (writer, db.attach(core))
}

/// What another thread finds for all keys.
async fn elsewhere(core: &Core, shared: &SharedReader) -> Vec<Option<Option<Vec<u8>>>> {
    let shared = shared.clone();
    let thread = std::thread::spawn(move || {
        (0..KEYS).map(|n| shared.get(0, &key(n), <[u8]>::to_vec)).collect::<Vec<_>>()
    });
    while !thread.is_finished() {
        core.sleep_ns(1_000_000).await;
    }
    thread.join().unwrap()
}

/// Compares the two for all keys; returns how many the other thread could answer.
async fn compare(core: &Core, reader: &Reader, model: &Model, merged: u64) -> usize {
    let shared = reader.shared().unwrap();
    let mut answered = 0;
    for (n, found) in (0..).zip(elsewhere(core, &shared).await) {
        let Some(found) = found else { continue };
        answered += 1;
        assert!(n >= merged || !model.contains_key(&key(n)), "operands are for the core");
        assert_eq!(found.as_ref(), model.get(&key(n)), "{n}");
    }
    answered
}

#[test]
fn another_thread_finds_what_the_core_finds() {
    // With everything in memory, and with indexes and filters that are read on demand.
    for (round, tables) in [usize::MAX, 2_000].into_iter().enumerate() {
        let dir = fresh_dir(&format!("shared-{round}"));
        on_one_core(move |core| {
            let dir = dir.clone();
            async move {
                let (writer, reader) = open(&core, &dir, tables).await;
                let mut model = Model::new();
                for from in [0, 5_000, 12_000] {
                    write_some(&core, &writer, &mut model, 1000).await;
                    let (start, end) = (key(from), key(from + 700));
                    writer.delete_range(0, &start, &end).await.unwrap();
                    model.retain(|key, _| *key < start || *key >= end);
                    compare(&core, &reader, &model, 0).await;
                }
                writer.flush().await.unwrap();
                let cold = compare(&core, &reader, &model, 0).await;
                for n in 0..KEYS {
                    let found = reader.get(0, &key(n), None).await.unwrap();
                    assert_eq!(found.as_deref(), model.get(&key(n)).map(|value| &value[..]));
                }
                let warm = compare(&core, &reader, &model, 0).await;
                // Keys at the end of a block may need the next one, and the core.
                assert!(cold < warm && warm > KEYS as usize / 2, "{cold} {warm}");
                // Operands: in the memtable, and in tables.
                let mut batch = BatchWriter::new();
                for n in 0..100 {
                    batch.delete(0, &key(n));
                    batch.merge(0, &key(n), &n.to_le_bytes());
                    model.insert(key(n), n.to_le_bytes().to_vec());
                }
                writer.write(batch).await.unwrap();
                compare(&core, &reader, &model, 100).await;
                writer.flush().await.unwrap();
                // A merge would leave blocks that nobody has read.
                while !writer.is_quiesced() {
                    core.sleep_ns(1_000_000).await;
                }
                for n in 0..KEYS {
                    let found = reader.get(0, &key(n), None).await.unwrap();
                    assert_eq!(found.as_deref(), model.get(&key(n)).map(|value| &value[..]));
                }
                let others = compare(&core, &reader, &model, 0).await;
                assert!(others > KEYS as usize / 2, "{others} of {KEYS}, {warm} before");
                writer.close().await.unwrap();
            }
        });
    }
}

/// A write that was acknowledged is seen, whatever flushes and merges publish meanwhile, and
/// nothing older is seen after it.
#[test]
fn what_another_thread_sees_never_goes_back() {
    let dir = fresh_dir("shared-monotonic");
    on_one_core(move |core| {
        let dir = dir.clone();
        async move {
            let (writer, reader) = open(&core, &dir, usize::MAX).await;
            let acknowledged = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
            let (shared, least) = (reader.shared().unwrap(), acknowledged.clone());
            let thread = std::thread::spawn(move || {
                use std::sync::atomic::Ordering::Acquire;
                let (mut last, mut seen) = (0, 0);
                while last < 3_000 {
                    let least = least.load(Acquire);
                    if let Some(found) =
                        shared.get(0, b"key", |value| value[..8].try_into().unwrap())
                    {
                        let found = found.map_or(0, u64::from_le_bytes);
                        assert!(found >= least.max(last), "{found} after {least} and {last}");
                        (last, seen) = (found, seen + 1);
                    } else if least == 3_000 {
                        break;
                    }
                }
                seen
            });
            for n in 1..=3_000_u64 {
                let mut value = vec![0; 1000];
                value[..8].copy_from_slice(&n.to_le_bytes());
                writer.put(b"key", &value).await.unwrap();
                acknowledged.store(n, std::sync::atomic::Ordering::Release);
                if n.is_multiple_of(300) {
                    writer.flush().await.unwrap();
                    reader.get(0, b"key", None).await.unwrap();
                }
            }
            while !thread.is_finished() {
                core.sleep_ns(1_000_000).await;
            }
            assert!(thread.join().unwrap() > 0);
            writer.close().await.unwrap();
        }
    });
}

/// The cache keeps to its budget, which is part of the core's, and gives way to a large read.
#[test]
fn the_shared_cache_is_bounded_and_gives_way() {
    const BUDGET: usize = 4 << 20;
    let dir = fresh_dir("shared-bounded");
    on_one_core_with(6 << 20, move |core| {
        let dir = dir.clone();
        async move {
            let options =
                OpenOptions { cache_bytes: BUDGET, shared_cache: true, ..OpenOptions::default() };
            let write = WriteOptions {
                durability: Durability::Process,
                memtable_bytes: 1 << 20,
                ..WriteOptions::default()
            };
            let (db, writer) = Db::open_for_writing(&core, &dir, options, write).await.unwrap();
            let value = |n: u64| vec![n as u8; 1000];
            for n in 0..KEYS {
                writer.put(&key(n), &value(n)).await.unwrap();
            }
            writer.put(b"large", &vec![b'x'; 4 << 20]).await.unwrap();
            writer.flush().await.unwrap();
            let reader = db.attach(&core);
            let shared = reader.shared().unwrap();
            // The last keys share a block with the large value.
            for n in 0..KEYS - 100 {
                let found = reader.get(0, &key(n), None).await.unwrap();
                assert_eq!(found.as_deref(), Some(&value(n)[..]));
                let stats = reader.stats();
                assert!(stats.cache_bytes <= BUDGET as u64, "{stats:?}");
                assert!(core.pool().used() <= core.pool().limit());
            }
            let full = reader.stats().cache_bytes;
            let used = core.pool().used() as u64;
            assert!(full > BUDGET as u64 / 2 && used >= full, "{full} of {BUDGET}, {used}");
            assert!(elsewhere(&core, &shared).await.iter().flatten().count() > 1000);
            let found = reader.get(0, b"large", None).await.unwrap().unwrap();
            assert_eq!(found.len(), 4 << 20);
            assert!(reader.stats().cache_bytes < full);
            assert!(shared.get(0, b"large", <[u8]>::len).is_none(), "too large to be copied");
            drop((found, reader));
            writer.close().await.unwrap();
        }
    });
}
