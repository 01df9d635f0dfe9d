//! Column families that are made and dropped while the database is open, with RocksDB as the judge.
#![expect(clippy::disallowed_methods, reason = "files of the host, as RocksDB will find them")]

use std::path::Path;

use crate::common::{fresh_dir, ldb, on_one_core};
use lsm::{
    BatchWriter, ColumnFamilyOptions, Comparator, Db, Durability, IterOptions, Kind, OpenOptions,
    WriteOptions, Writer,
};
use reactor::Core;

fn options(memtable_bytes: usize) -> WriteOptions {
    WriteOptions { durability: Durability::Process, memtable_bytes, ..WriteOptions::default() }
}

async fn open(core: &Core, dir: &Path, memtable_bytes: usize) -> (Db, Writer) {
    let reading = OpenOptions::default();
    Db::open_for_writing(core, dir, reading, options(memtable_bytes)).await.unwrap()
}

async fn create(writer: &Writer, name: &str) -> u32 {
    writer.create_column_family(name, ColumnFamilyOptions::default()).await.unwrap()
}

fn names(db: &Db) -> Vec<String> {
    db.column_families().into_iter().map(|family| family.name).collect()
}

#[test]
fn families_come_and_go_while_batches_are_written() {
    let dir = fresh_dir("families-come-and-go");
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let (db, writer) = open(&core, &path, 100_000).await;
            let (a, b) = (create(&writer, "a").await, create(&writer, "b").await);
            let error = writer.create_column_family("a", ColumnFamilyOptions::default()).await;
            assert_eq!(error.unwrap_err().kind(), Kind::Unsupported);
            for round in 0..2000u32 {
                let mut batch = BatchWriter::new();
                for family in [0, a, b] {
                    batch.put(family, &round.to_be_bytes(), &[family as u8; 100]);
                }
                writer.write(batch).await.unwrap();
            }
            // A reader keeps what it has begun with.
            let reader = db.attach(&core);
            let mut iter = reader.iter(b, IterOptions::default()).unwrap();
            iter.seek_to_first().await.unwrap();
            writer.drop_column_family(b).await.unwrap();
            for round in 0..2000u32 {
                assert!(iter.valid() && iter.key() == round.to_be_bytes());
                iter.next().await.unwrap();
            }
            let gone = reader.get(b, b"k", None).await.unwrap_err();
            assert_eq!(gone.kind(), Kind::UnknownColumnFamily);
            let gone = writer.drop_column_family(b).await.unwrap_err();
            assert_eq!(gone.kind(), Kind::UnknownColumnFamily);
            assert_eq!(writer.drop_column_family(0).await.unwrap_err().kind(), Kind::Unsupported);
            // The name may be used again, the id not; the order is the family's own.
            let reverse = ColumnFamilyOptions { comparator: Comparator::ReverseBytewise };
            let c = writer.create_column_family("b", reverse).await.unwrap();
            assert!(c > b);
            for key in ["1", "2", "3"] {
                let mut batch = BatchWriter::new();
                batch.put(c, key.as_bytes(), b"new");
                writer.write(batch).await.unwrap();
            }
            let mut iter = reader.iter(c, IterOptions::default()).unwrap();
            iter.seek_to_first().await.unwrap();
            assert_eq!(iter.key(), b"3");
            // `ldb` knows bytewise order only.
            writer.drop_column_family(c).await.unwrap();
            let d = create(&writer, "b").await;
            let mut batch = BatchWriter::new();
            batch.put(d, b"key", b"new");
            writer.write(batch).await.unwrap();
            writer.close().await.unwrap();
        }
    });
    assert_eq!(
        ldb(&dir, &["list_column_families"]),
        format!("Column families in {}: \n{{default, a, b}}\n", dir.display())
    );
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let (db, writer) = open(&core, &path, 100_000).await;
            assert_eq!(names(&db), ["default", "a", "b"]);
            let reader = db.attach(&core);
            let found = reader.get(4, b"key", None).await.unwrap();
            assert_eq!(found.as_deref(), Some(&b"new"[..]));
            let found = reader.get(1, &7u32.to_be_bytes(), None).await.unwrap();
            assert_eq!(found.as_deref(), Some(&[1; 100][..]));
            writer.close().await.unwrap();
        }
    });
    let scan = ldb(&dir, &["--column_family=a", "scan", "--hex"]);
    assert_eq!(scan.lines().filter(|line| line.starts_with("0x")).count(), 2000);
    assert!(ldb(&dir, &["checkconsistency"]).contains("OK"));
}

#[test]
fn an_options_file_follows_the_families() {
    let dir = fresh_dir("families-options");
    ldb(&dir, &["--create_if_missing", "put", "k", "v"]);
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let (_db, writer) = open(&core, &path, 100_000).await;
            let (x, y) = (create(&writer, "x").await, create(&writer, "y:#\\").await);
            for family in [x, y] {
                let mut batch = BatchWriter::new();
                batch.put(family, b"key", b"value");
                writer.write(batch).await.unwrap();
            }
            writer.drop_column_family(y).await.unwrap();
            writer.close().await.unwrap();
        }
    });
    // With these options RocksDB opens exactly the families of the file.
    let value = ldb(&dir, &["--try_load_options", "--column_family=x", "get", "key"]);
    assert_eq!(value.trim(), "value");
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let (db, writer) = open(&core, &path, 100_000).await;
            assert_eq!(names(&db), ["default", "x"]);
            writer.close().await.unwrap();
        }
    });
}

#[test]
fn a_thousand_families_take_bounded_memory() {
    let dir = fresh_dir("families-thousand");
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let (db, writer) = open(&core, &path, 4 << 20).await;
            let mut ids = Vec::new();
            for number in 1..1000 {
                ids.push(create(&writer, &format!("f{number:03}")).await);
            }
            let mut batch = BatchWriter::new();
            ids.iter().for_each(|&id| batch.put(id, b"key", &id.to_be_bytes()));
            writer.write(batch).await.unwrap();
            assert!(db.memory().memtables < 16 << 20, "{:?}", db.memory());
            let open_files = std::fs::read_dir("/proc/self/fd").unwrap().count();
            assert!(open_files < 500, "{open_files} descriptors");
            writer.close().await.unwrap();
            drop((db, writer));
            let (db, writer) = open(&core, &path, 4 << 20).await;
            assert_eq!(db.column_families().len(), 1000);
            assert!(db.memory().memtables < 16 << 20, "{:?}", db.memory());
            let reader = db.attach(&core);
            for id in ids {
                let found = reader.get(id, b"key", None).await.unwrap();
                assert_eq!(found.as_deref(), Some(&id.to_be_bytes()[..]));
            }
            writer.close().await.unwrap();
        }
    });
    let listed = ldb(&dir, &["list_column_families"]);
    assert!(listed.contains("f001") && listed.contains("f999"));
}
