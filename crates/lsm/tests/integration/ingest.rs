//! Ingestion of tables that RocksDB's SstFileWriter made: visible at once, newer than what was
//! there, and read in the same way by RocksDB afterwards.
#![expect(clippy::disallowed_methods, reason = "files of the host, as RocksDB left them")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lsm::{Db, Durability, Ingested, IterOptions, Kind, OpenOptions, WriteOptions, Writer};
use reactor::Core;

use crate::common::{Model, compare, fresh_dir, key, ldb, on_one_core, write_some};
use crate::writing::rocksdb_scan;

/// Has RocksDB make a table of these entries, and applies them to the model.
fn make(path: &Path, numbers: impl Iterator<Item = u64>, value: &str, model: &mut Model) {
    let mut child = Command::new("ldb")
        .arg(format!("--db={}", path.with_extension("unused").display()))
        .args(["--create_if_missing", "write_extern_sst"])
        .arg(path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("install Debian's rocksdb-tools (./test does)");
    let mut input = child.stdin.take().unwrap();
    for n in numbers {
        let key = key(n);
        let text = String::from_utf8(key.clone()).unwrap();
        writeln!(input, "{text} ==> {value}").unwrap();
        model.insert(key, value.as_bytes().to_vec());
    }
    drop(input);
    assert!(child.wait().unwrap().success());
}

async fn open(core: &Core, path: &Path, durability: Durability) -> (Db, Writer) {
    let options = WriteOptions { durability, memtable_bytes: 200_000, ..WriteOptions::default() };
    Db::open_for_writing(core, path, OpenOptions::default(), options).await.unwrap()
}

async fn ingest(writer: &Writer, files: Vec<PathBuf>) -> lsm::Result<Ingested> {
    writer.ingest_files(&[(0, files)], true, true).await
}

#[test]
fn ingested_tables_are_newer_than_what_was_there_and_older_than_what_follows() {
    for durability in [Durability::Process, Durability::Power] {
        let dir = fresh_dir(&format!("ingest-{durability:?}"));
        let base = dir.clone();
        let expected = on_one_core(move |core| {
            let base = base.clone();
            async move {
                let path = base.join("db");
                std::fs::create_dir(&path).unwrap();
                let (db, writer) = open(&core, &path, durability).await;
                let mut model = Model::new();
                let first = base.join("first.sst");
                make(&first, 5000..6000, "first", &mut model);
                let done = ingest(&writer, vec![first.clone()]).await.unwrap();
                // Nothing was there: the deepest level, without a sequence number.
                assert_eq!((done.entries, done.sequence), (1000, 0));
                assert_eq!(done.levels, [6]);
                assert_eq!(db.keys(), Some(1000));
                compare(&core, &db, &model).await;
                let batches = if durability == Durability::Power { 60 } else { 300 };
                for round in 0..4u64 {
                    write_some(&core, &writer, &mut model, batches).await;
                    let reader = db.attach(&core);
                    let snapshot = reader.snapshot().unwrap();
                    let before = model.clone();
                    let files: Vec<PathBuf> =
                        (0..3).map(|part| base.join(format!("{round}-{part}.sst"))).collect();
                    for (file, part) in files.iter().zip(0..) {
                        let at = 1000 * round + 7000 * part;
                        make(file, (at..at + 900).step_by(3), &format!("{round}"), &mut model);
                    }
                    let done = ingest(&writer, files).await.unwrap();
                    assert!(done.sequence > 0 && done.entries == 900, "{done:?}");
                    compare(&core, &db, &model).await;
                    let options =
                        IterOptions { snapshot: Some(&snapshot), ..IterOptions::default() };
                    let mut iter = reader.iter(0, options).unwrap();
                    crate::common::scan_both_ways(&mut iter, &before).await;
                }
                write_some(&core, &writer, &mut model, 20).await;
                compare(&core, &db, &model).await;
                writer.close().await.unwrap();
                drop((db, writer));
                let (db, writer) = open(&core, &path, durability).await;
                compare(&core, &db, &model).await;
                write_some(&core, &writer, &mut model, batches).await;
                compare(&core, &db, &model).await;
                writer.close().await.unwrap();
                drop((db, writer));
                let report = lsm::check(&core, &path, &OpenOptions::default(), |_, _| {}).await;
                assert_eq!(report.unwrap().damages, []);
                // The originals are as they were: links that were never written to.
                ldb(&base.join("other"), &["put", "--create_if_missing", "a", "b"]);
                let file = first.display().to_string();
                ldb(&base.join("other"), &["ingest_extern_sst", &file]);
                model
            }
        });
        ldb(&dir.join("db"), &["checkconsistency"]);
        assert!(rocksdb_scan(&dir.join("db")) == expected, "RocksDB finds something else");
        ldb(&dir.join("db"), &["compact"]);
        assert!(rocksdb_scan(&dir.join("db")) == expected);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

/// The entries of an ingested table have other sequences than its bounds: backward, a range
/// tombstone that hides the table beside it must not hide its last key.
#[test]
fn a_range_tombstone_beside_an_ingested_table_hides_none_of_it() {
    let dir = fresh_dir("ingest-beside");
    on_one_core(move |core| {
        let base = dir.clone();
        async move {
            let path = base.join("db");
            std::fs::create_dir(&path).unwrap();
            let (db, writer) = open(&core, &path, Durability::Process).await;
            let mut model = Model::new();
            let (high, low) = (base.join("high.sst"), base.join("low.sst"));
            make(&high, 500..600, "high", &mut model);
            ingest(&writer, vec![high]).await.unwrap();
            let mut batch = lsm::BatchWriter::new();
            batch.delete_range(0, &key(450), &key(900));
            writer.write(batch).await.unwrap();
            model.retain(|other, _| *other < key(450));
            let reader = db.attach(&core);
            let snapshot = reader.snapshot().unwrap();
            make(&low, 100..200, "low", &mut model);
            let done = ingest(&writer, vec![low]).await.unwrap();
            assert!(done.sequence > 0, "{done:?}");
            drop(snapshot);
            compare(&core, &db, &model).await;
            let mut iter = reader.iter(0, IterOptions::default()).unwrap();
            crate::common::scan_both_ways(&mut iter, &model).await;
            std::fs::remove_dir_all(&base).unwrap();
        }
    });
}

#[test]
fn the_number_of_keys_stays_exact_without_overlap_and_is_unknown_after_one() {
    let dir = fresh_dir("ingest-keys");
    on_one_core(move |core| {
        let base = dir.clone();
        async move {
            let path = base.join("db");
            std::fs::create_dir(&path).unwrap();
            let (db, writer) = open(&core, &path, Durability::Process).await;
            let mut model = Model::new();
            let mut batch = lsm::BatchWriter::new();
            batch.put(0, &key(0), b"0");
            writer.submit(batch, Some(1)).unwrap().await.unwrap();
            for (name, numbers, keys) in [
                ("a", 10..20, Some(11)),
                ("b", 30..40, Some(21)),
                ("c", 5..8, Some(24)),
                ("d", 39..50, None),
            ] {
                make(&base.join(name), numbers, name, &mut model);
                ingest(&writer, vec![base.join(name)]).await.unwrap();
                assert_eq!(db.keys(), keys, "{name}");
                // The same after a recovery of what the disk has now.
                let copy = base.join(format!("copy-{name}"));
                writer.checkpoint(&copy).await.unwrap();
                let copied = Db::open(&core, &copy, OpenOptions::default()).await.unwrap();
                assert_eq!(copied.keys(), keys, "{name}");
                assert!(copied.warnings().is_empty(), "{:?}", copied.warnings());
            }
            writer.close().await.unwrap();
            std::fs::remove_dir_all(&base).unwrap();
        }
    });
}

#[test]
fn files_that_cannot_be_ingested_are_refused_and_leave_nothing() {
    let dir = fresh_dir("ingest-refused");
    on_one_core(move |core| {
        let base = dir.clone();
        async move {
            let path = base.join("db");
            std::fs::create_dir(&path).unwrap();
            let (db, writer) = open(&core, &path, Durability::Process).await;
            let mut model = Model::new();
            make(&base.join("a"), 0..100, "a", &mut model);
            make(&base.join("b"), 99..120, "b", &mut Model::new());
            let mut bytes = std::fs::read(base.join("a")).unwrap();
            bytes[200] ^= 1;
            std::fs::write(base.join("damaged"), &bytes).unwrap();
            std::fs::write(base.join("short"), b"short").unwrap();
            // Of a database, not of SstFileWriter.
            ldb(&base.join("other"), &["put", "--create_if_missing", "a", "b"]);
            ldb(&base.join("other"), &["compact"]);
            let listed = std::fs::read_dir(base.join("other")).unwrap();
            let mut listed = listed.map(|entry| entry.unwrap().path());
            let table = listed.find(|path| path.extension() == Some("sst".as_ref())).unwrap();
            for (files, kind, what) in [
                (vec![base.join("a"), base.join("b")], Kind::Unsupported, "overlap"),
                (vec![base.join("a"), base.join("damaged")], Kind::Corruption, "checksum"),
                (vec![base.join("short")], Kind::Corruption, ""),
                (vec![table], Kind::Unsupported, "SstFileWriter"),
                (vec![base.join("none")], Kind::Corruption, "none"),
            ] {
                let error = ingest(&writer, files).await.unwrap_err();
                assert!(error.kind() == kind && error.to_string().contains(what), "{error}");
            }
            let unknown = writer.ingest_files(&[(7, vec![base.join("a")])], false, true).await;
            assert_eq!(unknown.unwrap_err().kind(), Kind::UnknownColumnFamily);
            compare(&core, &db, &Model::new()).await;
            let left = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name());
            let left: Vec<_> = left
                .filter(|name| {
                    let name = name.to_string_lossy();
                    name.ends_with(".sst") || name.ends_with(".dbtmp")
                })
                .collect();
            assert!(left.is_empty(), "{left:?}");
            ingest(&writer, vec![base.join("a")]).await.unwrap();
            compare(&core, &db, &model).await;
            writer.close().await.unwrap();
            std::fs::remove_dir_all(&base).unwrap();
        }
    });
}
