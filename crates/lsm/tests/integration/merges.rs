//! Merge operators: how one is chosen, recorded and refused, long chains of operands, and RocksDB's
//! tool on what was written. `model.rs` has the random histories, `e2e/test_merges.py` those of
//! RocksDB.
#![expect(clippy::disallowed_methods, reason = "files of the host, for RocksDB's tools")]

use std::path::Path;
use std::sync::Arc;

use lsm::{
    BatchWriter, CompactionFilter, Db, Durability, FilterDecision, IterOptions, Kind,
    MergeOperator, OpenOptions, Reader, WriteOptions, Writer,
};
use reactor::Core;

use crate::common::{fresh_dir, ldb, on_one_core, on_one_core_with};

fn with(operator: &str) -> WriteOptions {
    let merge_operator = Some(operator.parse().unwrap());
    WriteOptions { merge_operator, memtable_bytes: 1 << 20, ..WriteOptions::default() }
}

async fn open(core: &Core, dir: &Path, options: WriteOptions) -> (Writer, Reader) {
    let opened = Db::open_for_writing(core, dir, OpenOptions::default(), options).await;
    let (db, writer) = opened.unwrap();
    let reader = db.attach(core);
    (writer, reader)
}

async fn get(reader: &Reader, key: &[u8]) -> Vec<u8> {
    reader.get(0, key, None).await.unwrap().expect("the key exists").to_vec()
}

#[test]
fn the_operator_chosen_at_the_creation_is_recorded() {
    let dir = fresh_dir("merges-recorded");
    on_one_core(move |core| {
        let dir = dir.clone();
        async move {
            let (writer, reader) = open(&core, &dir, with("{id=stringappend;delimiter=#:;}")).await;
            writer.merge(b"key", b"a").await.unwrap();
            writer.close().await.unwrap();
            drop((writer, reader));
            // Nothing is in a table yet.
            let (writer, reader) = open(&core, &dir, WriteOptions::default()).await;
            writer.merge(b"key", b"b").await.unwrap();
            assert_eq!(get(&reader, b"key").await, b"a#:b");
            writer.close().await.unwrap();
            drop((writer, reader));
            assert_eq!(ldb(&dir, &["--try_load_options", "get", "key"]).trim(), "a#:b");
            // ldb has written tables, and its own OPTIONS.
            let (writer, reader) = open(&core, &dir, WriteOptions::default()).await;
            writer.merge(b"key", b"c").await.unwrap();
            assert_eq!(get(&reader, b"key").await, b"a#:b#:c");
            writer.close().await.unwrap();
            drop((writer, reader));
            assert_eq!(ldb(&dir, &["--try_load_options", "compact"]).trim(), "");
            assert_eq!(ldb(&dir, &["--try_load_options", "scan"]).trim(), "key : a#:b#:c");
            let refused = Db::open_for_writing(&core, &dir, OpenOptions::default(), with("max"));
            let error = refused.await.err().unwrap();
            assert_eq!(error.kind(), Kind::Unsupported);
            let text = "has the merge operator {id=StringAppendOperator;delimiter=#:;}, not Max";
            assert!(error.to_string().contains(text), "{error}");
        }
    });
}

#[test]
fn merges_need_an_operator() {
    let dir = fresh_dir("merges-refused");
    on_one_core(move |core| {
        let dir = dir.clone();
        async move {
            let (writer, reader) = open(&core, &dir, WriteOptions::default()).await;
            let mut batch = BatchWriter::new();
            batch.put(0, b"key", b"value");
            batch.merge(0, b"key", b"operand");
            let error = writer.write(batch).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Unsupported);
            assert!(error.to_string().contains("it has no merge operator"), "{error}");
            assert!(reader.get(0, b"key", None).await.unwrap().is_none());
            writer.close().await.unwrap();
            drop((writer, reader));
            // ldb leaves an operator of its own in OPTIONS: it does not count.
            ldb(&dir, &["put", "key", "value"]);
            let (writer, reader) = open(&core, &dir, WriteOptions::default()).await;
            let error = writer.merge(b"key", b"operand").await.unwrap_err();
            assert_eq!(error.kind(), Kind::Unsupported, "{error}");
            assert_eq!(get(&reader, b"key").await, b"value");
            writer.close().await.unwrap();
        }
    });
}

/// Snapshots keep the operands apart, so that they fill blocks and tables of their own.
#[test]
fn a_chain_of_operands_may_span_blocks_and_tables() {
    let dir = fresh_dir("merges-chain");
    on_one_core(move |core| {
        let dir = dir.clone();
        async move {
            for name in ["{id=stringappend;delimiter=,;}", "{id=stringappendtest;delimiter=,;}"] {
                let dir = dir.join(name);
                std::fs::create_dir(&dir).unwrap();
                let (writer, reader) = open(&core, &dir, with(name)).await;
                let (mut snapshots, mut expected) = (Vec::new(), b"base".to_vec());
                writer.put(b"key", b"base").await.unwrap();
                for n in 0..1000u32 {
                    let operand = format!("{n:0100}").into_bytes();
                    writer.merge(b"key", &operand).await.unwrap();
                    writer.put(format!("other{n}").as_bytes(), &[7; 2000]).await.unwrap();
                    expected.push(b',');
                    expected.extend(&operand);
                    if snapshots.len() < 900 {
                        snapshots.push((reader.snapshot().unwrap(), expected.len()));
                    }
                }
                while !writer.is_quiesced() {
                    core.sleep_ns(10_000_000).await;
                }
                assert!(writer.stats().flushed_tables > 0);
                assert_eq!(get(&reader, b"key").await, expected);
                let many = reader.multi_get(0, &[b"key", b"none"], None).await;
                assert_eq!(many[0].as_ref().unwrap().as_deref(), Some(&expected[..]));
                for (snapshot, len) in snapshots.iter().step_by(37) {
                    let found = reader.get(0, b"key", Some(snapshot)).await.unwrap().unwrap();
                    assert_eq!(&found[..], &expected[..*len]);
                    let options =
                        IterOptions { snapshot: Some(snapshot), ..IterOptions::default() };
                    let mut iter = reader.iter(0, options).unwrap();
                    iter.seek(b"k").await.unwrap();
                    assert_eq!((iter.key(), iter.value()), (&b"key"[..], &expected[..*len]));
                    iter.next().await.unwrap();
                    iter.prev().await.unwrap();
                    assert_eq!((iter.key(), iter.value()), (&b"key"[..], &expected[..*len]));
                }
                drop(snapshots);
                writer.close().await.unwrap();
            }
        }
    });
}

#[test]
fn a_counter_may_have_any_number_of_operands_but_a_list_is_limited() {
    let dir = fresh_dir("merges-limit");
    on_one_core_with(16 << 20, move |core| {
        let dir = dir.clone();
        async move {
            for (name, len) in [("uint64add", 8), ("stringappendtest", 1000)] {
                let dir = dir.join(name);
                std::fs::create_dir(&dir).unwrap();
                let options = WriteOptions { memtable_bytes: 64 << 20, ..with(name) };
                let (writer, reader) = open(&core, &dir, options).await;
                for _ in 0..20 {
                    let mut batch = BatchWriter::new();
                    for _ in 0..1000 {
                        let mut operand = vec![0; len];
                        operand[0] = 1;
                        batch.merge(0, b"key", &operand);
                    }
                    writer.write(batch).await.unwrap();
                }
                let found = reader.get(0, b"key", None).await;
                let mut iter = reader.iter(0, IterOptions::default()).unwrap();
                let forward = iter.seek_to_first().await;
                if len == 8 {
                    assert_eq!(&found.unwrap().unwrap()[..], 20_000u64.to_le_bytes());
                    forward.unwrap();
                    assert_eq!(iter.value(), 20_000u64.to_le_bytes());
                    iter.seek_to_last().await.unwrap();
                    assert_eq!(iter.value(), 20_000u64.to_le_bytes());
                } else {
                    let error = found.unwrap_err();
                    assert_eq!(error.kind(), Kind::Memory);
                    assert!(error.to_string().contains("merge operands of a key"), "{error}");
                    assert_eq!(forward.unwrap_err().kind(), Kind::Memory);
                    let exists = reader.contains(0, &[b"key", b"none"]).await;
                    assert!(*exists[0].as_ref().unwrap() && !*exists[1].as_ref().unwrap());
                    // A value below which nothing counts.
                    writer.put(b"key", b"new").await.unwrap();
                    assert_eq!(get(&reader, b"key").await, b"new");
                }
                writer.close().await.unwrap();
            }
        }
    });
}

/// Removes keys that begin with "old".
#[derive(Debug)]
struct Old;

impl CompactionFilter for Old {
    fn name(&self) -> &str {
        "old"
    }

    fn filter(&self, key: &[u8], _: &[u8]) -> FilterDecision {
        if key.starts_with(b"old") { FilterDecision::Remove } else { FilterDecision::Keep }
    }
}

#[test]
fn a_filter_of_the_program_removes_keys_when_tables_are_merged() {
    let dir = fresh_dir("merges-filter");
    on_one_core(move |core| {
        let dir = dir.clone();
        async move {
            let mut options = WriteOptions { memtable_bytes: 100_000, ..WriteOptions::default() };
            options.compaction_filters.insert("default".into(), Arc::new(Old));
            let (writer, reader) = open(&core, &dir, options).await;
            writer.put(b"keep", b"value").await.unwrap();
            let snapshot = reader.snapshot().unwrap();
            writer.put(b"old", b"value").await.unwrap();
            let fill = async || {
                let merges = writer.stats().merges;
                while writer.stats().merges < merges + 2 {
                    writer.put(&core.random_u64().to_le_bytes(), &[1; 1000]).await.unwrap();
                }
            };
            fill().await;
            assert_eq!(get(&reader, b"old").await, b"value", "newer than a snapshot");
            drop(snapshot);
            // Again, so that a merge meets it.
            writer.put(b"old", b"value").await.unwrap();
            fill().await;
            assert!(reader.get(0, b"old", None).await.unwrap().is_none());
            assert_eq!(get(&reader, b"keep").await, b"value");
            writer.close().await.unwrap();
        }
    });
}

#[test]
fn names_of_operators_are_parsed() {
    assert_eq!("put_v1".parse::<MergeOperator>().unwrap().name(), "PutOperator");
    assert!("sortlist".parse::<MergeOperator>().is_err());
}

/// A crash now: RocksDB opens a copy for writing, and finds these keys.
fn rocksdb_recovers(dir: &Path, expected: &[(&str, String)]) {
    let copy = fresh_dir("merges-crashed");
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().is_some_and(|name| name != "LOCK") {
            std::fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
        }
    }
    ldb(&copy, &["--try_load_options", "put", "other", "o"]);
    for (key, value) in expected {
        let found = ldb(&copy, &["--try_load_options", "get", key]);
        assert!(found.trim() == value, "{key}: {} of {} bytes", found.trim().len(), value.len());
    }
}

/// RocksDB's flush after a crash cannot merge operands with values in blob files: no log has a
/// reference to one and then an operand.
#[test]
fn rocksdb_recovers_operands_for_large_values() {
    let dir = fresh_dir("merges-blobs");
    on_one_core(move |core| {
        let dir = dir.clone();
        async move {
            let options = WriteOptions {
                blob_min: Some(100),
                durability: Durability::Process,
                ..with("{id=stringappend;delimiter=,;}")
            };
            let (writer, reader) = open(&core, &dir, options).await;
            // A table, without which there is no blob file.
            writer.put(b"small", b"s").await.unwrap();
            writer.flush().await.unwrap();
            let large = |tag: &str| tag.repeat(200);
            let in_blobs = || writer.stats().blob_values;
            // The memtables become tables before the operand.
            writer.put(b"first", large("1").as_bytes()).await.unwrap();
            writer.merge(b"small", b"t").await.unwrap();
            assert_eq!((in_blobs(), writer.stats().flushed_tables), (1, 1));
            writer.merge(b"first", b"a").await.unwrap();
            assert_eq!(writer.stats().flushed_tables, 2);
            let mut expected = vec![("first", large("1") + ",a"), ("small", "s,t".to_owned())];
            rocksdb_recovers(&dir, &expected);
            // After that values stay in the log, for these memtables and the next.
            for (key, tag) in [("second", "2"), ("third", "3")] {
                writer.put(key.as_bytes(), large(tag).as_bytes()).await.unwrap();
                writer.merge(key.as_bytes(), b"a").await.unwrap();
                expected.push((key, large(tag) + ",a"));
                rocksdb_recovers(&dir, &expected);
                writer.flush().await.unwrap();
            }
            assert_eq!((in_blobs(), writer.stats().flushed_tables), (1, 4));
            // The second operand counts as one for a large value.
            for expected in [1, 2] {
                writer.put(b"fourth", large("4").as_bytes()).await.unwrap();
                writer.flush().await.unwrap();
                assert_eq!(in_blobs(), expected);
            }
            // In one group, the value that gets an operand stays in the log, the other does not.
            let mut batch = BatchWriter::new();
            for key in [b"fifth", b"sixth"] {
                batch.put(0, key, large("5").as_bytes());
            }
            batch.merge(0, b"fifth", b"a");
            batch.merge(0, b"fourth", b"a");
            writer.write(batch).await.unwrap();
            assert_eq!((in_blobs(), writer.stats().flushed_tables), (3, 6));
            expected.push(("fifth", large("5") + ",a"));
            expected.push(("fourth", large("4") + ",a"));
            expected.push(("sixth", large("5")));
            rocksdb_recovers(&dir, &expected);
            for (key, value) in &expected {
                assert!(get(&reader, key.as_bytes()).await == value.as_bytes(), "{key}");
            }
            writer.close().await.unwrap();
            rocksdb_recovers(&dir, &expected);
        }
    });
}
