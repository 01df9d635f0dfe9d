//! The MANIFEST while a database is open: how much is written to it, when it is replaced, and
//! whether RocksDB reads it.
#![expect(clippy::disallowed_methods, reason = "files of the host, as RocksDB will find them")]

use std::path::Path;

use crate::common::{fresh_dir, ldb, on_one_core};
use lsm::{BatchWriter, Db, Durability, OpenOptions, WriteOptions, Writer};
use reactor::Core;
use rocksfmt::{
    FileName, LogKind, LogReader, LogWriter, ManifestReplay, ManifestState, VersionEdit,
};

/// Makes an empty database with families `f1` to `f{count - 1}` besides the default one.
fn database(dir: &Path, count: u32) {
    let first = VersionEdit {
        db_id: Some("a-database".into()),
        comparator: Some("leveldb.BytewiseComparator".into()),
        log_number: Some(0),
        next_file_number: Some(2),
        last_sequence: Some(0),
        ours: true,
        ..VersionEdit::default()
    };
    let (mut log, mut bytes) = (LogWriter::new(None, 0), Vec::new());
    log.append(&first.encode(), &mut bytes);
    for id in 1..count {
        let add = VersionEdit {
            column_family: id,
            column_family_add: Some(format!("f{id}")),
            comparator: Some("leveldb.BytewiseComparator".into()),
            log_number: Some(0),
            ..VersionEdit::default()
        };
        log.append(&add.encode(), &mut bytes);
    }
    std::fs::write(dir.join("MANIFEST-000001"), bytes).unwrap();
    std::fs::write(dir.join("IDENTITY"), "a-database").unwrap();
    std::fs::write(dir.join("CURRENT"), "MANIFEST-000001\n").unwrap();
}

/// The current MANIFEST: its number, the bytes of its records, and its state.
fn manifest(dir: &Path) -> (u64, u64, ManifestState) {
    let current = std::fs::read_to_string(dir.join("CURRENT")).unwrap();
    let Some(FileName::Manifest(number)) = FileName::parse(current.trim_end()) else {
        panic!("CURRENT says {current}")
    };
    let bytes = std::fs::read(dir.join(current.trim_end())).unwrap();
    let (mut reader, mut replay) = (LogReader::new(LogKind::Manifest), ManifestReplay::new());
    reader.feed(&bytes, true, |record| replay.record(record.data)).unwrap();
    (number, reader.good_until(), replay.finish().unwrap())
}

fn manifests(dir: &Path) -> usize {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().starts_with("MANIFEST")).count()
}

fn options(memtable_bytes: usize) -> WriteOptions {
    WriteOptions { durability: Durability::Process, memtable_bytes, ..WriteOptions::default() }
}

/// Waits until all generations but the newest are tables.
async fn flushed(core: &Core, writer: &Writer) {
    while writer.stats().waiting_memtables > 0 {
        assert_eq!(writer.failure().map(|error| error.to_string()), None);
        core.sleep_ns(1_000_000).await;
    }
}

/// Fills the memtables once: 300 KB to the families in turn.
async fn fill(core: &Core, writer: &Writer, families: &[u32], round: u8) {
    let logs = writer.stats().logs;
    for n in 0..10_000 {
        let mut batch = BatchWriter::new();
        for &family in families {
            batch.put(family, format!("key{round}-{n}").as_bytes(), &[round; 1000]);
        }
        writer.write(batch).await.unwrap();
        if writer.stats().logs > logs {
            break;
        }
    }
    flushed(core, writer).await;
}

#[test]
fn a_generation_is_one_change_and_families_without_writes_are_not_in_it() {
    const FAMILIES: u32 = 400;
    const ROUNDS: u8 = 10;
    let dir = fresh_dir("manifest-families");
    database(&dir, FAMILIES);
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options(300_000));
            let (db, writer) = open.await.unwrap();
            flushed(&core, &writer).await;
            let (number, before, _) = manifest(&path);
            for round in 0..ROUNDS {
                fill(&core, &writer, &[0, 7, 399], round).await;
            }
            let (same, after, state) = manifest(&path);
            let each = (after - before) / u64::from(ROUNDS);
            assert_eq!(same, number);
            // Some of the records are of merges.
            assert!(each <= 4_096, "{each} bytes of MANIFEST for each generation");
            assert!(state.min_log_number_to_keep > state.column_families[&8].log_number);
            // All families at once.
            let all: Vec<u32> = (0..FAMILIES).collect();
            fill(&core, &writer, &all, ROUNDS).await;
            let (_, all_after, state) = manifest(&path);
            assert!(state.column_families.values().all(|family| family.files().count() > 0));
            let each = (all_after - after) / u64::from(FAMILIES);
            assert!(each <= 320, "{each} bytes of MANIFEST for each family");
            writer.close().await.unwrap();
            drop(db);
        }
    });
    let found = ldb(&dir, &["list_column_families"]);
    assert!(found.contains("f399"), "{found}");
    for family in ["default", "f7", "f399", "f200"] {
        let name = format!("--column_family={family}");
        let found = ldb(&dir, &["scan", &name]);
        assert_eq!(found.contains("key0-0 "), family != "f200");
        assert!(found.contains(&format!("key{ROUNDS}-0 ")), "{family}");
    }
}

#[test]
fn a_manifest_that_has_grown_is_replaced_while_the_database_is_open() {
    // By our limit, and by a smaller one of RocksDB's.
    for (name, bound) in [("ours", 8_000), ("theirs", u64::MAX)] {
        let dir = fresh_dir(&format!("manifest-grown-{name}"));
        if name == "theirs" {
            ldb(&dir, &["put", "--create_if_missing", "first", "value"]);
            for entry in std::fs::read_dir(&dir).unwrap() {
                let path = entry.unwrap().path();
                if path.file_name().unwrap().to_string_lossy().starts_with("OPTIONS") {
                    let text = std::fs::read_to_string(&path).unwrap();
                    let small = text.replace(
                        "max_manifest_file_size=1073741824",
                        "max_manifest_file_size=8000",
                    );
                    assert_ne!(small, text);
                    std::fs::write(&path, small).unwrap();
                }
            }
        } else {
            database(&dir, 3);
        }
        let path = dir.clone();
        on_one_core(move |core| {
            let path = path.clone();
            async move {
                let options = WriteOptions { manifest_bytes: bound, ..options(100_000) };
                let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
                let (db, writer) = open.await.unwrap();
                let (first, ..) = manifest(&path);
                let mut numbers = vec![first];
                for round in 0..40 {
                    fill(&core, &writer, &[0], round).await;
                    let (number, bytes, _) = manifest(&path);
                    assert!(bytes < 3 * 8_000, "{bytes}");
                    numbers.push(number);
                }
                numbers.dedup();
                assert!(numbers.len() >= 3, "{numbers:?}");
                writer.close().await.unwrap();
                drop(db);
            }
        });
        assert!(manifests(&dir) <= 2, "{} MANIFESTs", manifests(&dir));
        ldb(&dir, &["checkconsistency"]);
        let found = ldb(&dir, &["scan"]);
        assert!((0..40).all(|round| found.contains(&format!("key{round}-0 "))));
    }
}

#[test]
fn a_record_that_is_longer_than_a_block_goes_to_a_new_manifest() {
    let dir = fresh_dir("manifest-long");
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options(100_000));
            let (db, writer) = open.await.unwrap();
            let (first, ..) = manifest(&path);
            writer.put(&[b'a'; 20_000], b"1").await.unwrap();
            writer.put(&[b'b'; 20_000], b"2").await.unwrap();
            fill(&core, &writer, &[0], 1).await;
            let (second, ..) = manifest(&path);
            assert_ne!(first, second);
            fill(&core, &writer, &[0], 2).await;
            assert_eq!(manifest(&path).0, second);
            writer.close().await.unwrap();
            drop(db);
        }
    });
    ldb(&dir, &["checkconsistency"]);
    let found = ldb(&dir, &["scan"]);
    assert!(found.contains("bbbb : 2") || found.contains("bbbb ==> 2"));
    assert!(found.contains("key2-0 "));
}

#[test]
fn families_that_rocksdb_dropped_are_gone_and_their_numbers_are_not_reused() {
    let dir = fresh_dir("manifest-dropped");
    ldb(&dir, &["put", "--create_if_missing", "key", "value"]);
    let blobs = ["--enable_blob_files", "--min_blob_size=0"];
    for name in ["one", "two"] {
        ldb(&dir, &["create_column_family", name]);
        // Some writes are in a table and a blob file, some in the log.
        for key in ["a", "b"] {
            let family = format!("--column_family={name}");
            ldb(&dir, &["put", &family, blobs[0], blobs[1], key, name]);
        }
    }
    ldb(&dir, &["drop_column_family", "one"]);
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let options = WriteOptions { manifest_bytes: 1_000, ..options(100_000) };
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
            let (db, writer) = open.await.unwrap();
            let names: Vec<_> =
                db.column_families().into_iter().map(|cf| (cf.id, cf.name)).collect();
            assert_eq!(names, [(0, "default".to_owned()), (2, "two".to_owned())]);
            for round in 0..10 {
                fill(&core, &writer, &[0, 2], round).await;
            }
            writer.close().await.unwrap();
        }
    });
    assert_eq!(manifest(&dir).2.max_column_family, 2);
    ldb(&dir, &["create_column_family", "three"]);
    assert_eq!(manifest(&dir).2.column_family("three").unwrap().id, 3);
    let found = ldb(&dir, &["scan", "--column_family=two"]);
    assert!(["a ", "b ", "key0-0 ", "key9-0 "].iter().all(|key| found.contains(key)), "{found}");
}
