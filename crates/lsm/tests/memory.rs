//! Memory is bounded, and a database that was written opens with as little as it was written with.

mod common;

use std::collections::BTreeMap;

use common::{fresh_dir, on_one_core_with};
use lsm::{BatchWriter, Db, Durability, IterOptions, Kind, OpenOptions, WriteOptions, Writer};
use reactor::Core;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn key(n: u64) -> Vec<u8> {
    format!("key{:06}", n % 20_000).into_bytes()
}

async fn write_some(core: &Core, writer: &Writer, model: &mut Model, batches: usize) {
    for _ in 0..batches {
        let mut batch = BatchWriter::new();
        for _ in 0..10 {
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
    for n in 0..200 {
        let from = key(n * 101);
        iter.seek(&from).await.unwrap();
        let found = iter.valid().then(|| iter.key().to_vec());
        assert_eq!(found.as_ref(), model.range(from..).next().map(|(key, _)| key));
    }
}

/// Indexes and filters of 30 tables take a hundred times what they may here.
#[test]
fn indexes_and_filters_that_find_no_room_are_read_on_demand() {
    const BYTES: usize = 2_000;
    let dir = fresh_dir("memory-tables");
    let mut model = Model::new();
    for memory_bytes in [usize::MAX, BYTES, usize::MAX] {
        let (path, before) = (dir.clone(), model.clone());
        model = on_one_core_with(16 << 20, move |core| {
            let (path, mut model) = (path.clone(), before.clone());
            async move {
                let options =
                    OpenOptions { memory_bytes, cache_bytes: 1 << 20, ..OpenOptions::default() };
                let write = WriteOptions {
                    durability: Durability::Process,
                    memtable_bytes: 200_000,
                    ..WriteOptions::default()
                };
                let (db, writer) =
                    Db::open_for_writing(&core, &path, options, write).await.unwrap();
                compare(&core, &db, &model).await;
                write_some(&core, &writer, &mut model, 1500).await;
                compare(&core, &db, &model).await;
                writer.close().await.unwrap();
                assert!(writer.stats().merges > 0);
                let memory = db.memory();
                match memory_bytes {
                    BYTES => assert!(memory.tables <= BYTES && memory.tables_on_demand > 0),
                    _ => assert!(memory.tables > BYTES && memory.tables_on_demand == 0),
                }
                model
            }
        });
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Without the second replay this was refused: the logs hold four times what memory may.
#[test]
fn logs_longer_than_memory_become_tables_at_the_opening() {
    let dir = fresh_dir("memory-logs");
    let options = |recovered_bytes| OpenOptions { recovered_bytes, ..OpenOptions::default() };
    let path = dir.clone();
    let model = on_one_core_with(16 << 20, move |core| {
        let path = path.clone();
        async move {
            let mut model = Model::new();
            let write = WriteOptions { durability: Durability::Process, ..WriteOptions::default() };
            let open = Db::open_for_writing(&core, &path, options(usize::MAX), write);
            let (_db, writer) = open.await.unwrap();
            write_some(&core, &writer, &mut model, 4000).await;
            writer.close().await.unwrap();
            model
        }
    });
    for (round, durability) in [Durability::Power, Durability::Process].into_iter().enumerate() {
        let (path, model) = (dir.clone(), model.clone());
        on_one_core_with(16 << 20, move |core| {
            let (path, model) = (path.clone(), model.clone());
            async move {
                if round == 0 {
                    let Err(error) = Db::open(&core, &path, options(1_000_000)).await else {
                        panic!("a reader has no place for tables")
                    };
                    assert_eq!(error.kind(), Kind::Memory);
                    assert!(error.to_string().contains("without --read-only"), "{error}");
                }
                let write = WriteOptions { durability, ..WriteOptions::default() };
                let open = Db::open_for_writing(&core, &path, options(1_000_000), write);
                let (db, writer) = open.await.unwrap();
                let family = &db.stat().column_families[0];
                let files: usize = family.levels.iter().map(|level| level.files).sum();
                // The second log is a short one.
                let in_memory = if round == 0 { 0 } else { 2 };
                assert!(files > 3 || round > 0, "{files} tables");
                assert_eq!(family.memtable_entries, in_memory);
                compare(&core, &db, &model).await;
                writer.put(b"zzz", b"after").await.unwrap();
                writer.delete(b"zzz").await.unwrap();
                writer.close().await.unwrap();
            }
        });
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
