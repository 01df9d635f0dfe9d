//! Garbage collection of blob files: the live values move to new files, in the order in which they
//! were written; what readers, the MANIFEST and RocksDB see stays right.
#![expect(clippy::disallowed_methods, reason = "files of the host, as they were left")]

use std::path::{Path, PathBuf};

use lsm::{BatchWriter, Db, Durability, IterOptions, OpenOptions, WriteOptions, Writer};
use reactor::Core;
use rocksfmt::{BLOB_FOOTER_BYTES, BLOB_HEADER_BYTES, BLOB_RECORD_HEADER_BYTES, BlobRecord};

use crate::blobs::{Model, is_right, key, manifest, scan, with_blobs};
use crate::common::{fresh_dir, on_one_core};

fn options(ratio: Option<f64>) -> WriteOptions {
    WriteOptions {
        durability: Durability::Process,
        memtable_bytes: 60_000,
        blob_min: Some(500),
        blob_file_bytes: 100_000,
        blob_space_max_ratio: ratio,
        ..WriteOptions::default()
    }
}

fn value(n: u64, round: u64) -> String {
    format!("{n}-{round}-").repeat(150 + (n % 50) as usize)
}

/// Writes keys, one batch each.
async fn put(writer: &Writer, keys: impl Iterator<Item = u64>, round: u64, model: &mut Model) {
    for n in keys {
        let (key, value) = (key(n), value(n, round));
        writer.put(key.as_bytes(), value.as_bytes()).await.unwrap();
        model.insert(key, value);
    }
}

/// Waits until nothing is left to be done in the background, all in tables.
async fn settle(core: &Core, writer: &Writer) {
    writer.compact(0, None, None).await.unwrap();
    while !writer.is_quiesced() {
        assert_eq!(writer.failure().map(|error| error.to_string()), None);
        core.sleep_ns(1_000_000).await;
    }
    // Files are removed one after the other.
    core.sleep_ns(300_000_000).await;
}

async fn compare(core: &Core, db: &Db, model: &Model) {
    let mut iter = db.attach(core).iter(0, IterOptions::default()).unwrap();
    iter.seek_to_first().await.unwrap();
    for (key, value) in model {
        assert!(iter.valid(), "{key} is missing");
        assert_eq!(iter.key(), key.as_bytes());
        assert!(iter.value() == value.as_bytes(), "the value of {key}");
        iter.next().await.unwrap();
    }
    assert!(!iter.valid());
}

/// The live bytes and the bytes of all live blob files.
fn space(dir: &Path) -> (u64, u64) {
    let state = manifest(dir);
    let files = state.column_families[&0].live_blob_files();
    files.fold((0, 0), |(live, total), blob| {
        (live + blob.total_bytes - blob.garbage_bytes, total + blob.total_bytes)
    })
}

/// The keys in each complete blob file that was not written by puts: with the places of its
/// records.
fn moved_keys(dir: &Path) -> Vec<Vec<String>> {
    let state = manifest(dir);
    let moved = state.column_families[&0].live_blob_files().filter(|blob| !blob.is_reserved());
    let mut files = Vec::new();
    for blob in moved {
        let bytes = std::fs::read(dir.join(format!("{:06}.blob", blob.number))).unwrap();
        let mut at = BLOB_HEADER_BYTES;
        let mut keys = Vec::new();
        while at < bytes.len() - BLOB_FOOTER_BYTES {
            let header = BlobRecord::parse(&bytes[at..at + BLOB_RECORD_HEADER_BYTES]).unwrap();
            let end = at + BLOB_RECORD_HEADER_BYTES + (header.key_len + header.value_len) as usize;
            let (key, _) = header.verify(&bytes[at..end]).unwrap();
            keys.push(String::from_utf8(key.to_vec()).unwrap());
            at = end;
        }
        files.push(keys);
    }
    files
}

fn created(name: &str) -> PathBuf {
    let dir = fresh_dir(name);
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options(None));
            let (_db, writer) = open.await.unwrap();
            // A table, without which there are no blob files.
            writer.put(b"a", b"small").await.unwrap();
            settle(&core, &writer).await;
            writer.close().await.unwrap();
        }
    });
    dir
}

#[test]
fn garbage_is_collected_and_everything_stays_right() {
    let dir = created("blob-gc");
    let mut model = Model::from([("a".to_owned(), "small".to_owned())]);
    for round in 0..3 {
        let (path, before) = (dir.clone(), model.clone());
        let (after, collections) = on_one_core(move |core| {
            let (path, mut model) = (path.clone(), before.clone());
            async move {
                let options = options(Some(1.3));
                let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
                let (db, writer) = open.await.unwrap();
                put(&writer, 0..400, 10 * round, &mut model).await;
                // Readers of the past keep what they see.
                let snapshot = db.attach(&core).snapshot().unwrap();
                let old = model.clone();
                for pass in 1..4 {
                    put(&writer, (0..400).filter(|n| n % 7 != pass), 10 * round + pass, &mut model)
                        .await;
                }
                let mut batch = BatchWriter::new();
                batch.delete_range(0, key(20).as_bytes(), key(60).as_bytes());
                writer.write(batch).await.unwrap();
                model.retain(|at, _| !(key(20)..key(60)).contains(at));
                settle(&core, &writer).await;
                let reader = db.attach(&core);
                for (key, value) in &old {
                    let found = reader.get(0, key.as_bytes(), Some(&snapshot)).await.unwrap();
                    assert!(found.as_deref() == Some(value.as_bytes()), "{key} of the snapshot");
                }
                drop(snapshot);
                compare(&core, &db, &model).await;
                settle(&core, &writer).await;
                compare(&core, &db, &model).await;
                let stats = writer.stats();
                writer.close().await.unwrap();
                (model, stats.blob_collections)
            }
        });
        model = after;
        assert!(collections > 0, "nothing was collected");
        // What the MANIFEST counts is what tables refer to, also after it was copied.
        is_right(&dir);
        let (live, total) = space(&dir);
        assert!(total < 2 * live, "{total} bytes for {live}");
        assert!(scan(&dir) == model, "RocksDB sees other contents");
        is_right(&dir);
    }
}

#[test]
fn values_keep_the_order_in_which_they_were_written() {
    let dir = created("blob-gc-order");
    let path = dir.clone();
    // Every second value stays alive; keys are written in an order that is not theirs.
    let order: Vec<u64> = (0..200).map(|n| n * 73 % 200).collect();
    let written = order.clone();
    on_one_core(move |core| {
        let (path, order) = (path.clone(), written.clone());
        async move {
            let options = options(Some(1.2));
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
            let (_db, writer) = open.await.unwrap();
            let mut model = Model::new();
            put(&writer, order.iter().copied(), 1, &mut model).await;
            writer.compact(0, None, None).await.unwrap();
            for &n in order.iter().filter(|&&n| n % 4 != 0) {
                writer.delete(key(n).as_bytes()).await.unwrap();
            }
            settle(&core, &writer).await;
            writer.close().await.unwrap();
        }
    });
    let files = moved_keys(&dir);
    assert!(files.iter().map(Vec::len).sum::<usize>() > 10, "{files:?}");
    let rank = |name: &String| order.iter().position(|&n| key(n) == *name).unwrap();
    for keys in files {
        assert!(keys.is_sorted_by_key(rank), "{keys:?} is not the order of the writes");
    }
}

#[test]
fn a_family_made_at_run_time_has_blob_files() {
    let dir = created("blob-gc-families");
    let path = dir.clone();
    let put = |batch: &mut BatchWriter, family, n, text: &str| {
        batch.put(family, key(n).as_bytes(), text.as_bytes());
    };
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options(None));
            let (db, writer) = open.await.unwrap();
            let made = writer.create_column_family("made", lsm::ColumnFamilyOptions::default());
            let made = made.await.unwrap();
            let mut small = BatchWriter::new();
            put(&mut small, made, 1, "small");
            writer.write(small).await.unwrap();
            // A table, without which it has no blob file.
            settle(&core, &writer).await;
            writer.compact(made, None, None).await.unwrap();
            let before = writer.stats().blob_values;
            let mut large = BatchWriter::new();
            put(&mut large, made, 2, &value(2, 0));
            writer.write(large).await.unwrap();
            assert_eq!(writer.stats().blob_values, before + 1);
            let found = db.attach(&core).get(made, key(2).as_bytes(), None).await.unwrap();
            assert!(found.as_deref() == Some(value(2, 0).as_bytes()));
            writer.drop_column_family(made).await.unwrap();
            writer.close().await.unwrap();
        }
    });
    let state = manifest(&dir);
    assert_eq!(state.column_families.keys().collect::<Vec<_>>(), [&0]);
    is_right(&dir);
}

#[test]
fn a_family_without_tables_has_a_blob_file_from_the_second_group_on() {
    let dir = created("blob-gc-first");
    let path = dir.clone();
    let made = on_one_core(move |core| {
        let path = path.clone();
        async move {
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options(None));
            let (db, writer) = open.await.unwrap();
            let made = writer.create_column_family("made", lsm::ColumnFamilyOptions::default());
            let made = made.await.unwrap();
            let (reader, mut counts) = (db.attach(&core), Vec::new());
            // The second time after a clearing, which leaves no table.
            for _ in 0..2 {
                let before = writer.stats().blob_values;
                for n in 0..20 {
                    let mut large = BatchWriter::new();
                    large.put(made, key(n).as_bytes(), value(n, 0).as_bytes());
                    writer.write(large).await.unwrap();
                }
                counts.push(writer.stats().blob_values - before);
                for n in 0..20 {
                    let found = reader.get(made, key(n).as_bytes(), None).await.unwrap();
                    assert!(found.as_deref() == Some(value(n, 0).as_bytes()));
                }
                writer.clear(made).unwrap().await.unwrap();
            }
            assert_eq!(counts, [19, 19]);
            // Small values need no anchor.
            let logs = writer.stats().logs;
            for n in 0..20 {
                let mut small = BatchWriter::new();
                small.put(made, key(n).as_bytes(), b"small");
                writer.write(small).await.unwrap();
            }
            assert_eq!(writer.stats().logs, logs);
            writer.close().await.unwrap();
            made
        }
    });
    assert!(manifest(&dir).column_families.contains_key(&made));
}

/// The merge leaves no table, and a value in a memtable is in a blob file, which needs one: the
/// merge once failed until somebody wrote.
#[test]
fn a_merge_that_leaves_nothing_waits_for_the_table_of_a_large_value() {
    let dir = fresh_dir("nothing_left");
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options(None));
            let (db, writer) = open.await.unwrap();
            writer.pause_compaction();
            for round in 0..6 {
                for n in 0..20 {
                    match round % 2 {
                        0 => writer.put(key(n).as_bytes(), b"small").await.unwrap(),
                        _ => writer.delete(key(n).as_bytes()).await.unwrap(),
                    };
                }
                writer.flush().await.unwrap();
            }
            let large = value(100, 0);
            writer.put(key(100).as_bytes(), large.as_bytes()).await.unwrap();
            assert_eq!(writer.stats().blob_values, 1);
            writer.resume_compaction();
            while !writer.is_quiesced() {
                core.sleep_ns(1_000_000).await;
            }
            let stats = writer.stats();
            assert_eq!((stats.table_failures, stats.tables_failing), (0, 0), "{stats:?}");
            let reader = db.attach(&core);
            let found = reader.get(0, key(100).as_bytes(), None).await.unwrap();
            assert!(found.as_deref() == Some(large.as_bytes()));
            assert_eq!(reader.get(0, key(3).as_bytes(), None).await.unwrap().as_deref(), None);
            writer.close().await.unwrap();
        }
    });
    is_right(&dir);
}

#[test]
fn options_decide_about_blob_files_and_their_garbage() {
    // OPTIONS with blob files for values of 50 bytes, and without the collection of garbage.
    let (dir, _) = with_blobs("options");
    let overwrite = |blob_min, ratio| {
        let path = dir.clone();
        on_one_core(move |core| {
            let path = path.clone();
            async move {
                let options = WriteOptions { blob_min, ..options(ratio) };
                let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
                let (_db, writer) = open.await.unwrap();
                for n in (0..150).filter(|n| n % 5 != 0) {
                    writer.put(key(n).as_bytes(), &[b'o'; 60]).await.unwrap();
                }
                settle(&core, &writer).await;
                let stats = writer.stats();
                writer.close().await.unwrap();
                (stats.blob_values, stats.blob_collections)
            }
        })
    };
    let (values, collections) = overwrite(None, None);
    assert!(values >= 120 && collections == 0, "{values} values, {collections} collections");
    assert_eq!(overwrite(Some(61), None).0, 0, "the option of the opening takes precedence");
    let (_, collections) = overwrite(None, Some(1.1));
    assert!(collections > 0, "a limit of space takes precedence");
    is_right(&dir);
}
