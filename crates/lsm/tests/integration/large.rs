//! Large numbers: families, files, range tombstones, and keys and values of a large size. With
//! MILLRACE_LONG=1 the numbers are those of large databases.

use std::path::Path;

use crate::common::{Model, fresh_dir, ldb, on_one_core, scan_both_ways};
use lsm::{
    BatchWriter, ColumnFamilyOptions, Db, Durability, IterOptions, OpenOptions, WriteOptions,
    Writer,
};
use reactor::Core;

/// The number for the short form or for the long one.
fn number(short: u32, long: u32) -> u32 {
    if std::env::var_os("MILLRACE_LONG").is_some() { long } else { short }
}

async fn open(core: &Core, path: &Path, write: WriteOptions) -> (Db, Writer) {
    let write = WriteOptions { durability: Durability::Process, ..write };
    Db::open_for_writing(core, path, OpenOptions::default(), write).await.unwrap()
}

async fn quiesced(core: &Core, writer: &Writer) {
    while !writer.is_quiesced() {
        core.sleep_ns(1_000_000).await;
    }
}

fn files(db: &Db, family: usize) -> usize {
    db.stat().column_families[family].levels.iter().map(|level| level.files).sum()
}

/// Families are made, written in common batches, flushed, dropped and found again.
#[test]
fn a_thousand_families_are_made_written_and_dropped() {
    let dir = fresh_dir("large-families");
    let count = number(300, 1000);
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let (db, writer) = open(&core, &path, WriteOptions::default()).await;
            let mut ids = Vec::new();
            for n in 0..count {
                let made = writer
                    .create_column_family(&format!("f{n}"), ColumnFamilyOptions::default())
                    .await;
                ids.push(made.unwrap());
            }
            assert!(ids.is_sorted() && db.column_families().len() == count as usize + 1);
            for round in 0..3u32 {
                let mut batch = BatchWriter::new();
                for &id in &ids {
                    batch.put(id, &round.to_be_bytes(), &id.to_be_bytes());
                }
                writer.write(batch).await.unwrap();
            }
            let memory = db.memory().memtables;
            assert!(memory < 8 << 20, "{memory} bytes for memtables");
            for &id in ids.iter().step_by(2) {
                writer.drop_column_family(id).await.unwrap();
            }
            writer.close().await.unwrap();
            drop((db, writer));

            // The log becomes a table of each family.
            let (db, writer) = open(&core, &path, WriteOptions::default()).await;
            quiesced(&core, &writer).await;
            let reader = db.attach(&core);
            assert_eq!(db.column_families().len(), 1 + count as usize / 2);
            for (at, &id) in ids.iter().enumerate() {
                let found = reader.get(id, &2u32.to_be_bytes(), None).await;
                match at % 2 {
                    0 => assert!(found.is_err()),
                    _ => assert_eq!(found.unwrap().as_deref(), Some(&id.to_be_bytes()[..])),
                }
            }
            assert_eq!(writer.stats().flushed_tables, u64::from(count) / 2);
            writer.close().await.unwrap();
        }
    });
    let listed = ldb(&dir, &["list_column_families"]);
    assert_eq!(listed.matches(", f").count(), count as usize / 2);
    assert!(listed.contains("f1,") && !listed.contains("f0,"));
}

/// Range tombstones that a snapshot keeps: no table has all of them, and readers find what the
/// ranges leave.
#[test]
fn a_million_range_tombstones_are_merged_into_tables_of_some() {
    let dir = fresh_dir("large-ranges");
    let count = number(150_000, 1_000_000);
    let path = dir.clone();
    let model = on_one_core(move |core| {
        let path = path.clone();
        async move {
            let key = |n: u32, more: &str| format!("k{n:08}{more}").into_bytes();
            let (db, writer) = open(&core, &path, WriteOptions::default()).await;
            let mut model = Model::new();
            // A key in every tenth range, and one between two ranges.
            let mut batch = BatchWriter::new();
            for n in (0..count).step_by(1000) {
                batch.put(0, &key(n, "a"), b"deleted");
                batch.put(0, &key(n, "x"), b"stays");
                model.insert(key(n, "x"), b"stays".to_vec());
            }
            writer.write(batch).await.unwrap();
            writer.compact(0, None, None).await.unwrap();
            let reader = db.attach(&core);
            let before = reader.snapshot().unwrap();
            for from in (0..count).step_by(1000) {
                let mut batch = BatchWriter::new();
                for n in from..from + 1000 {
                    batch.delete_range(0, &key(n, ""), &key(n, "c"));
                }
                writer.write(batch).await.unwrap();
            }
            writer.compact(0, None, None).await.unwrap();
            assert!(files(&db, 0) >= count as usize / (64 << 10), "{} files", files(&db, 0));
            for _ in 0..2 {
                let reader = db.attach(&core);
                let mut iter = reader.iter(0, IterOptions::default()).unwrap();
                scan_both_ways(&mut iter, &model).await;
                let options = IterOptions { snapshot: Some(&before), ..IterOptions::default() };
                let mut old = reader.iter(0, options).unwrap();
                old.seek_to_first().await.unwrap();
                assert_eq!(old.key(), key(0, "a"));
                assert!(reader.get(0, &key(5000, "a"), None).await.unwrap().is_none());
                assert!(reader.get(0, &key(5000, "a"), Some(&before)).await.unwrap().is_some());
            }
            drop(before);
            writer.close().await.unwrap();
            drop((db, writer, reader));

            // Once no reader needs them, a compaction drops them.
            let (db, writer) = open(&core, &path, WriteOptions::default()).await;
            let mut iter = db.attach(&core).iter(0, IterOptions::default()).unwrap();
            scan_both_ways(&mut iter, &model).await;
            writer.delete_range(0, b"a", b"b").await.unwrap();
            writer.close().await.unwrap();
            model
        }
    });
    ldb(&dir, &["checkconsistency"]);
    let scanned = ldb(&dir, &["scan", "--no_value"]);
    assert!(scanned.lines().map(str::as_bytes).eq(model.keys()), "RocksDB finds others");
}

/// Deleted keys and their tombstones go away without a new write, so that scans need not pass them.
#[test]
fn tombstones_meet_what_they_delete_without_being_asked_to() {
    let dir = fresh_dir("large-tombstones");
    on_one_core(move |core| {
        let path = dir.clone();
        async move {
            let key = |n: u32| format!("k{n:08}").into_bytes();
            let (db, writer) = open(&core, &path, WriteOptions::default()).await;
            let count = number(40_000, 1_000_000);
            let write = async |writer: &Writer, is_put: bool| {
                for from in (0..count).step_by(1000) {
                    let mut batch = BatchWriter::new();
                    for n in from..from + 1000 {
                        match is_put {
                            true => batch.put(0, &key(n), &[7; 100]),
                            false => batch.delete(0, &key(n)),
                        }
                    }
                    writer.write(batch).await.unwrap();
                }
            };
            write(&writer, true).await;
            writer.put(b"z", b"last").await.unwrap();
            writer.compact(0, None, None).await.unwrap();
            write(&writer, false).await;
            writer.close().await.unwrap();
            drop((db, writer));

            // One table of tombstones: level 0 is far from its trigger.
            let (db, writer) = open(&core, &path, WriteOptions::default()).await;
            quiesced(&core, &writer).await;
            let reader = db.attach(&core);
            let mut iter = reader.iter(0, IterOptions::default()).unwrap();
            iter.seek_to_first().await.unwrap();
            assert_eq!(iter.key(), b"z");
            let skipped = reader.stats().skipped;
            assert!(skipped < 100, "{skipped} entries skipped");
            assert_eq!(files(&db, 0), 1);
            writer.close().await.unwrap();
        }
    });
}

/// A memtable full of tombstones waits for those of level 0, and becomes a table after them
/// although nobody writes any more.
#[test]
fn tombstones_leave_the_memtable_when_nobody_writes() {
    let dir = fresh_dir("large-tombstones-memtable");
    on_one_core(move |core| {
        let path = dir.clone();
        async move {
            let key = |n: u32| format!("k{n:08}").into_bytes();
            let (db, writer) = open(&core, &path, WriteOptions::default()).await;
            const COUNT: u32 = 150_000;
            let write = async |is_put: bool| {
                for from in (0..COUNT).step_by(1000) {
                    let mut batch = BatchWriter::new();
                    for n in from..from + 1000 {
                        match is_put {
                            true => batch.put(0, &key(n), b"v"),
                            false => batch.delete(0, &key(n)),
                        }
                    }
                    writer.write(batch).await.unwrap();
                }
            };
            write(true).await;
            writer.put(b"z", b"last").await.unwrap();
            writer.compact(0, None, None).await.unwrap();
            let reader = db.attach(&core);
            let skipped = async || {
                let before = reader.stats().skipped;
                let mut iter = reader.iter(0, IterOptions::default()).unwrap();
                iter.seek_to_first().await.unwrap();
                assert_eq!(iter.key(), b"z");
                reader.stats().skipped - before
            };
            writer.pause_compaction();
            write(false).await;
            let all = skipped().await;
            assert!(all > u64::from(COUNT), "{all} entries skipped");
            writer.resume_compaction();
            let mut turns = 0;
            while skipped().await > 100 {
                turns += 1;
                assert!(turns < 10_000, "they stay");
                core.sleep_ns(1_000_000).await;
            }
            writer.close().await.unwrap();
        }
    });
}

/// Tombstones whose merge would rewrite mostly what stays are left where they are.
#[test]
fn tombstones_that_lie_far_apart_wait_for_their_level() {
    let dir = fresh_dir("large-tombstones-apart");
    on_one_core(move |core| {
        let path = dir.clone();
        async move {
            let key = |n: u32| format!("k{n:08}").into_bytes();
            let (db, writer) = open(&core, &path, WriteOptions::default()).await;
            for from in (0..100_000).step_by(1000) {
                let mut batch = BatchWriter::new();
                (from..from + 1000).for_each(|n| batch.put(0, &key(n), b"v"));
                writer.write(batch).await.unwrap();
            }
            writer.compact(0, None, None).await.unwrap();
            let mut batch = BatchWriter::new();
            (0..100_000).step_by(20).for_each(|n| batch.delete(0, &key(n)));
            writer.write(batch).await.unwrap();
            writer.close().await.unwrap();
            drop((db, writer));

            let (db, writer) = open(&core, &path, WriteOptions::default()).await;
            quiesced(&core, &writer).await;
            assert_eq!(db.stat().column_families[0].levels[0].files, 1);
            writer.close().await.unwrap();
        }
    });
}

/// Ten thousand files: each merge and flush changes a few of them.
#[test]
fn a_database_of_ten_thousand_files_is_opened_written_and_merged() {
    let dir = fresh_dir("large-files");
    let count = number(1500, 10_000);
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let small = [
                ("target_file_size_base".to_owned(), "2000".to_owned()),
                ("compression".to_owned(), "kNoCompression".to_owned()),
            ];
            let write = || WriteOptions {
                column_family_options: small.clone().into(),
                ..WriteOptions::default()
            };
            let (db, writer) = open(&core, &path, write()).await;
            let key = |n: u32| format!("k{n:08}").into_bytes();
            let mut model = Model::new();
            // A few entries are a block, and a block is a file.
            let entries = 6 * count;
            let load = writer.bulk_load(0, async |k, v| {
                let n = model.len() as u32;
                if n == entries {
                    return Ok(false);
                }
                k.extend_from_slice(&key(n));
                v.extend_from_slice(&[n as u8; 1000]);
                model.insert(k.clone(), v.clone());
                Ok(true)
            });
            load.await.unwrap();
            assert!(files(&db, 0) >= count as usize, "{} files", files(&db, 0));
            writer.close().await.unwrap();
            drop((db, writer));

            let (db, writer) = open(&core, &path, write()).await;
            let before = files(&db, 0);
            let mut batch = BatchWriter::new();
            // A third of the files: a merge of all needs two descriptors for each, more than many
            // systems allow.
            for n in (0..entries / 3).step_by(100) {
                batch.delete(0, &key(n));
                model.remove(&key(n));
            }
            writer.write(batch).await.unwrap();
            writer.compact(0, Some(&key(0)), Some(&key(count))).await.unwrap();
            let reader = db.attach(&core);
            scan_both_ways(&mut reader.iter(0, IterOptions::default()).unwrap(), &model).await;
            assert!(files(&db, 0) + entries as usize / 100 >= before);
            writer.close().await.unwrap();
        }
    });
    ldb(&dir, &["checkconsistency"]);
}
