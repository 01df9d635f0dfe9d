//! Memory is bounded, and a database that was written opens with as little as it was written with.

mod common;

use common::{Model, compare, fresh_dir, on_one_core_with, write_some};
use lsm::{Db, Durability, Kind, OpenOptions, WriteOptions};

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
