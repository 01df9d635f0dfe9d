//! Range deletes: what they delete, through memtables, logs, tables and merges, and what a scan
//! over a deleted range costs.

use std::path::Path;

use crate::common::{Model, compare, fresh_dir, key, ldb, on_one_core, scan_both_ways};
use lsm::{
    BatchWriter, Db, Durability, IterOptions, Kind, OpenOptions, Reader, WriteOptions, Writer,
};
use reactor::Core;

async fn open(core: &Core, path: &Path, memtable_bytes: usize) -> (Db, Writer, Reader) {
    let durability = Durability::Process;
    let options = WriteOptions { durability, memtable_bytes, ..WriteOptions::default() };
    let open = Db::open_for_writing(core, path, OpenOptions::default(), options);
    let (db, writer) = open.await.unwrap();
    let reader = db.attach(core);
    (db, writer, reader)
}

/// Writes consecutive keys, and waits until all but the last ones are in tables.
async fn fill(core: &Core, writer: &Writer, model: &mut Model, keys: u64) {
    for from in (0..keys).step_by(50) {
        let mut batch = BatchWriter::new();
        for n in from..from + 50 {
            let value = vec![n as u8; 100];
            batch.put(0, &key(n), &value);
            model.insert(key(n), value);
        }
        writer.write(batch).await.unwrap();
    }
    while !writer.is_quiesced() {
        core.sleep_ns(1_000_000).await;
    }
}

async fn delete(writer: &Writer, model: &mut Model, from: u64, to: u64) {
    let (from, to) = (key(from), key(to));
    writer.delete_range(0, &from, &to).await.unwrap();
    model.retain(|key, _| *key < from || *key >= to);
}

#[test]
fn a_range_delete_is_seen_with_its_batch_and_survives_a_new_opening() {
    let dir = fresh_dir("range-deletes-logs");
    let path = dir.clone();
    let model = on_one_core(move |core| {
        let path = path.clone();
        async move {
            let mut model = Model::new();
            let (db, writer, reader) = open(&core, &path, 64 << 20).await;
            fill(&core, &writer, &mut model, 1000).await;
            let before = (reader.snapshot().unwrap(), model.clone());
            let mut iter = reader.iter(0, IterOptions::default()).unwrap();
            delete(&writer, &mut model, 100, 300).await;
            // One batch: a put before the deletion is gone, one after it stays.
            let mut batch = BatchWriter::new();
            batch.put(0, &key(250), b"before");
            batch.delete_range(0, &key(200), &key(400));
            batch.put(0, &key(251), b"after");
            writer.write(batch).await.unwrap();
            model.retain(|k, _| *k < key(200) || *k >= key(400));
            model.insert(key(251), b"after".to_vec());
            compare(&core, &db, &model).await;
            scan_both_ways(&mut iter, &before.1).await;
            let options = IterOptions { snapshot: Some(&before.0), ..IterOptions::default() };
            scan_both_ways(&mut reader.iter(0, options).unwrap(), &before.1).await;
            let then = reader.get(0, &key(150), Some(&before.0)).await.unwrap();
            assert!(then.is_some() && reader.get_cached(0, &key(150)).unwrap().unwrap().is_none());

            let sequence = writer.put(b"x", b"1").await.unwrap();
            model.insert(b"x".to_vec(), b"1".to_vec());
            let empty = writer.delete_range(0, b"x", b"x").await.unwrap();
            assert_eq!(empty, sequence, "it takes no number");
            let reversed = writer.delete_range(0, b"y", b"x").await.unwrap_err();
            assert_eq!(reversed.kind(), Kind::Unsupported, "{reversed}");
            let unknown = writer.delete_range(7, b"x", b"y").await.unwrap_err();
            assert_eq!(unknown.kind(), Kind::UnknownColumnFamily);
            compare(&core, &db, &model).await;
            writer.close().await.unwrap();
            drop((db, writer, reader, before, iter));

            let (db, writer, _) = open(&core, &path, 64 << 20).await;
            compare(&core, &db, &model).await;
            delete(&writer, &mut model, 800, 2000).await;
            compare(&core, &db, &model).await;
            writer.close().await.unwrap();
            model
        }
    });
    let scanned = ldb(&dir, &["scan", "--no_value"]);
    let keys: Vec<&str> = scanned.lines().collect();
    assert!(keys.iter().map(|key| key.as_bytes()).eq(model.keys()), "RocksDB finds others");
    ldb(&dir, &["checkconsistency"]);
}

/// Memtables with nothing but range deletes become tables without a block.
#[test]
fn a_hundred_thousand_range_deletes_are_bounded_by_flushes() {
    let dir = fresh_dir("range-deletes-many");
    let path = dir.clone();
    let model = on_one_core(move |core| {
        let path = path.clone();
        async move {
            let mut model = Model::new();
            let (db, writer, reader) = open(&core, &path, 64 << 20).await;
            fill(&core, &writer, &mut model, 20_000).await;
            // Those of even numbers, each many times.
            for _ in 0..20 {
                let mut batch = BatchWriter::new();
                for n in (0..20_000).step_by(2) {
                    batch.delete_range(0, &key(n), &key(n + 1));
                }
                writer.write(batch).await.unwrap();
            }
            model.retain(|key, _| key.last().unwrap() % 2 == 1);
            model.remove(&key(19_999));
            writer.delete_range(0, &key(19_999), b"z").await.unwrap();
            assert!(reader.get(0, &key(7000), None).await.unwrap().is_none());
            assert!(reader.get(0, &key(7001), None).await.unwrap().is_some());
            compare(&core, &db, &model).await;
            while !writer.is_quiesced() {
                core.sleep_ns(1_000_000).await;
            }
            assert!(writer.stats().flushed_tables >= 2, "{:?}", writer.stats());
            compare(&core, &db, &model).await;
            writer.close().await.unwrap();
            model
        }
    });
    let scanned = ldb(&dir, &["scan", "--no_value"]);
    let keys: Vec<&str> = scanned.lines().collect();
    assert!(keys.iter().map(|key| key.as_bytes()).eq(model.keys()), "RocksDB finds others");
}

/// A seek over a deleted range reads no block of the tables in it, and does not step through them.
#[test]
fn a_scan_skips_deleted_ranges() {
    let dir = fresh_dir("range-deletes-skip");
    on_one_core(move |core| {
        let path = dir.clone();
        async move {
            let mut model = Model::new();
            let (db, writer, reader) = open(&core, &path, 300_000).await;
            fill(&core, &writer, &mut model, 20_000).await;
            let tables: usize =
                db.stat().column_families[0].levels.iter().map(|level| level.files).sum();
            assert!(tables >= 2, "{tables} tables");
            writer.close().await.unwrap();
            drop((db, writer, reader));

            let (db, writer, _) = open(&core, &path, 64 << 20).await;
            while !writer.is_quiesced() {
                core.sleep_ns(1_000_000).await;
            }
            // One on top of the other, and two that touch.
            delete(&writer, &mut model, 5000, 6000).await;
            delete(&writer, &mut model, 100, 10_000).await;
            delete(&writer, &mut model, 10_000, 19_990).await;
            let reader = db.attach(&core);
            let mut iter = reader.iter(0, IterOptions::default()).unwrap();
            let cost = |what: &str| {
                let stats = reader.stats();
                println!("{what}: {stats:?}");
                (stats.skipped, stats.read_ahead_bytes)
            };
            iter.seek(&key(100)).await.unwrap();
            assert_eq!(iter.key(), key(19_990));
            let (skipped, bytes) = cost("forward");
            assert!(skipped < 100 && bytes < 400_000, "{skipped} entries, {bytes} bytes");
            iter.seek_for_prev(&key(19_989)).await.unwrap();
            assert_eq!(iter.key(), key(99));
            let (skipped, bytes) = cost("backward");
            assert!(skipped < 200 && bytes < 800_000, "{skipped} entries, {bytes} bytes");
            scan_both_ways(&mut iter, &model).await;
            compare(&core, &db, &model).await;
            writer.close().await.unwrap();
        }
    });
}

/// Each of many small deleted ranges once cost a read of the block that the iterator was in.
#[test]
fn small_deleted_ranges_in_a_block_cost_no_read_each() {
    let dir = fresh_dir("range-deletes-small");
    on_one_core(move |core| {
        let path = dir.clone();
        async move {
            let mut model = Model::new();
            let (db, writer, reader) = open(&core, &path, 300_000).await;
            fill(&core, &writer, &mut model, 3000).await;
            writer.close().await.unwrap();
            drop((db, writer, reader));

            let (db, writer, _) = open(&core, &path, 64 << 20).await;
            while !writer.is_quiesced() {
                core.sleep_ns(1_000_000).await;
            }
            for n in 0..1000 {
                delete(&writer, &mut model, 2 * n, 2 * n + 1).await;
            }
            let reader = db.attach(&core);
            let mut iter = reader.iter(0, IterOptions::default()).unwrap();
            scan_both_ways(&mut iter, &model).await;
            let stats = reader.stats();
            assert!(stats.cache_misses < 300, "{stats:?}");
            writer.close().await.unwrap();
        }
    });
}

/// What is known around one key does not hold for keys of tables farther away.
#[test]
fn an_iterator_of_a_snapshot_sees_the_ranges_of_every_table_of_a_level() {
    let dir = fresh_dir("ranges_of_a_level");
    on_one_core(move |core| {
        let path = dir.clone();
        async move {
            let options = WriteOptions {
                durability: Durability::Process,
                column_family_options: [("target_file_size_base".into(), "4000".into())].into(),
                ..WriteOptions::default()
            };
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
            let (db, writer) = open.await.unwrap();
            let reader = db.attach(&core);
            for n in 0..200 {
                writer.put(&key(n), &[7; 200]).await.unwrap();
            }
            writer.compact(0, None, None).await.unwrap();
            let before = reader.snapshot().unwrap();
            writer.delete_range(0, &key(0), &key(50)).await.unwrap();
            let after = reader.snapshot().unwrap();
            writer.delete_range(0, &key(0), &key(200)).await.unwrap();
            writer.compact(0, None, None).await.unwrap();
            assert!(db.stat().column_families[0].levels.iter().any(|level| level.files > 3));
            for (snapshot, first) in [(&before, 0), (&after, 50)] {
                let options = IterOptions { snapshot: Some(snapshot), ..IterOptions::default() };
                let mut iter = reader.iter(0, options).unwrap();
                for _ in 0..2 {
                    iter.seek_to_last().await.unwrap();
                    assert_eq!(iter.key(), key(199));
                    iter.seek_to_first().await.unwrap();
                    assert_eq!(iter.key(), key(first));
                }
            }
            drop((before, after));
            writer.close().await.unwrap();
        }
    });
}
