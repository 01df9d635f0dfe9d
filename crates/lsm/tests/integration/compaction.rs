//! Merging through the levels: the shape that OPTIONS ask for, compaction on request, pauses.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::pin;

use lsm::{Db, Durability, IterOptions, OpenOptions, WriteOptions, Writer};
use reactor::sim::{SimConfig, World};
use reactor::{Core, timeout};
use rocksfmt::BatchWriter;

use crate::common::{fresh_dir, key, ldb, on_first_core, on_one_core};

fn options(dynamic: bool) -> WriteOptions {
    let options = [
        ("max_bytes_for_level_base", "200000".to_owned()),
        ("max_bytes_for_level_multiplier", "4".to_owned()),
        ("target_file_size_base", "50000".to_owned()),
        ("level_compaction_dynamic_level_bytes", dynamic.to_string()),
    ];
    WriteOptions {
        durability: Durability::Process,
        memtable_bytes: 100_000,
        column_family_options: options.map(|(key, value)| (key.to_owned(), value)).into(),
        ..WriteOptions::default()
    }
}

async fn open(core: &Core, dir: &std::path::Path, options: WriteOptions) -> (Db, Writer) {
    Db::open_for_writing(core, dir, OpenOptions::default(), options).await.unwrap()
}

/// Writes keys in a scattered order; returns what is there then.
async fn write(writer: &Writer, keys: u64, rounds: u64) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut model = BTreeMap::new();
    for n in 0..keys * rounds {
        let key = key(n * 7919 % keys);
        let value = [&key[..], &n.to_le_bytes(), &[n as u8; 80]].concat();
        writer.put(&key, &value).await.unwrap();
        model.insert(key, value);
    }
    model
}

async fn quiesce(core: &Core, writer: &Writer) {
    while !writer.is_quiesced() {
        core.sleep_ns(5_000_000).await;
    }
}

async fn scan(db: &Db, core: &Core) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut iter = db.attach(core).iter(0, IterOptions::default()).unwrap();
    let mut found = BTreeMap::new();
    iter.seek_to_first().await.unwrap();
    while iter.valid() {
        found.insert(iter.key().to_vec(), iter.value().to_vec());
        iter.next().await.unwrap();
    }
    found
}

fn bytes(db: &Db) -> Vec<u64> {
    db.stat().column_families[0].levels.iter().map(|level| level.bytes).collect()
}

/// A core must not train a dictionary itself: that takes a tenth of a second and more.
#[test]
fn dictionaries_are_trained_besides_the_cores() {
    let world = World::new(1, 2, SimConfig::default());
    world.add_dir("/db");
    on_first_core(&world, |core, world| async move {
        let options = [
            ("compression", "kZSTD"),
            ("compression_opts", "{max_dict_bytes=2000;zstd_max_train_bytes=100000;}"),
        ];
        let options = WriteOptions {
            memtable_bytes: 100_000,
            column_family_options: options.map(|(key, value)| (key.into(), value.into())).into(),
            ..WriteOptions::default()
        };
        let (db, writer) = open(&core, Path::new("/db"), options).await;
        let model = write(&writer, 2000, 3).await;
        quiesce(&core, &writer).await;
        let stats = writer.stats();
        assert!(stats.flushed_tables > 1 && stats.merges > 0, "{stats:?}");
        // A table of either has one.
        assert!(world.computations() >= stats.flushed_tables + stats.merges, "{stats:?}");
        assert_eq!(scan(&db, &core).await, model);
        writer.close().await.unwrap();
    });
}

#[test]
fn levels_have_the_shape_that_options_ask_for() {
    for dynamic in [false, true] {
        let dir = fresh_dir(&format!("shape_{dynamic}"));
        let path = dir.clone();
        on_one_core(move |core| {
            let path = path.clone();
            async move {
                let (db, writer) = open(&core, &path, options(dynamic)).await;
                let model = write(&writer, 8000, 3).await;
                quiesce(&core, &writer).await;
                let bytes = bytes(&db);
                let all: u64 = bytes.iter().sum();
                // Some 800 KB of keys and values.
                assert!(all < 1_700_000, "{bytes:?}: obsolete versions pile up");
                if dynamic {
                    assert!(bytes.len() == 7 && bytes[6] * 10 > all * 6, "{bytes:?}");
                    assert!(
                        bytes[5] <= 260_000 && bytes[1..4].iter().sum::<u64>() == 0,
                        "{bytes:?}"
                    );
                } else {
                    assert!(
                        bytes[1] <= 200_000 && bytes[2] <= 800_000 && bytes[2] > 0,
                        "{bytes:?}"
                    );
                }
                assert_eq!(scan(&db, &core).await, model);
                writer.close().await.unwrap();
            }
        });
        ldb(&dir, &["checkconsistency"]);
    }
}

#[test]
fn a_range_is_compacted_on_request() {
    let dir = fresh_dir("compact_range");
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let (db, writer) = open(&core, &path, options(false)).await;
            let mut model = write(&writer, 4000, 2).await;
            for n in 1000..2000 {
                writer.delete(&key(n)).await.unwrap();
                model.remove(&key(n));
            }
            let first = writer.compact(0, Some(&key(1000)), Some(&key(2000))).await.unwrap();
            let some = db.stat().column_families[0].levels.clone();
            let done = writer.compact(0, None, None).await.unwrap();
            // The first may have met all files already.
            let merges = first.merges + done.merges;
            assert!(merges > 0, "{first:?}, {some:?}, {done:?}");
            let levels = db.stat().column_families[0].levels.clone();
            let occupied = levels.iter().filter(|level| level.files > 0).count();
            let deletions: u64 = levels.iter().map(|level| level.deletions).sum();
            assert_eq!((occupied, deletions), (1, 0), "{levels:?}");
            assert_eq!(levels.last().unwrap().entries, 3000, "obsolete versions are left");
            assert_eq!(scan(&db, &core).await, model);
            writer.close().await.unwrap();
        }
    });
    ldb(&dir, &["checkconsistency"]);
}

#[test]
fn a_pause_holds_until_it_is_ended() {
    let dir = fresh_dir("pause");
    on_one_core(move |core| {
        let path = dir.clone();
        async move {
            let (db, writer) = open(&core, &path, options(true)).await;
            writer.pause_compaction();
            let model = write(&writer, 4000, 2).await;
            assert_eq!((writer.stats().merges, writer.stats().moved_files), (0, 0));
            assert!(writer.stats().level0_files >= 4, "{:?}", writer.stats());
            writer.resume_compaction();
            quiesce(&core, &writer).await;
            assert!(writer.stats().level0_files < 4, "{:?}", writer.stats());
            assert_eq!(scan(&db, &core).await, model);
            writer.close().await.unwrap();
        }
    });
}

/// Opens a database whose level 0 is full of four files, pauses merges, and writes until a write
/// waits. Returns that write.
async fn stopped(core: &Core, path: &Path) -> (Db, Writer, lsm::Written) {
    let mut options = options(true);
    for name in ["level0_slowdown_writes_trigger", "level0_stop_writes_trigger"] {
        options.column_family_options.insert(name.to_owned(), "4".to_owned());
    }
    let (db, writer) = open(core, path, options).await;
    writer.pause_compaction();
    for n in 0..100_000 {
        let mut batch = BatchWriter::new();
        batch.put(0, &key(n), &[b'v'; 500]);
        let mut written = writer.submit(batch, None).unwrap();
        if timeout(core, 1_000_000_000, &mut written).await.is_err() {
            assert!(writer.compaction_status().writes_stopped, "{:?}", writer.stats());
            return (db, writer, written);
        }
    }
    panic!("writes do not stop: {:?}", writer.stats());
}

#[test]
fn copies_and_clearings_do_not_wait_for_the_end_of_a_pause() {
    on_one_core(|core| async move {
        let dir = fresh_dir("stopped-copy");
        let (db, writer, waiting) = stopped(&core, &dir).await;
        let files = timeout(&core, 5_000_000_000, pin!(writer.live_files(0))).await;
        drop(files.expect("a copy waits for the end of the pause").unwrap());
        waiting.await.unwrap();
        // The next writes wait again.
        let mut batch = BatchWriter::new();
        batch.put(0, b"last", &[b'v'; 200_000]);
        writer.submit(batch, None).unwrap().await.unwrap();
        let mut again = writer.submit(one(b"again"), None).unwrap();
        assert!(timeout(&core, 300_000_000, &mut again).await.is_err());
        let passing = writer.let_pass();
        again.await.unwrap();
        drop(passing);
        let cleared = timeout(&core, 5_000_000_000, writer.clear(0).unwrap()).await;
        cleared.expect("a clearing waits for the end of the pause").unwrap();
        assert_eq!(scan(&db, &core).await.len(), 0);
        writer.put(b"k", b"v").await.unwrap();
        assert!(writer.compaction_is_paused());
        writer.close().await.unwrap();
    });
}

#[test]
fn the_end_does_not_wait_for_the_end_of_a_pause() {
    for leaves in [false, true] {
        on_one_core(move |core| async move {
            let dir = fresh_dir("stopped-end");
            let (_, writer, waiting) = stopped(&core, &dir).await;
            if leaves {
                writer.leave();
                let written = timeout(&core, 5_000_000_000, waiting).await;
                written.expect("a write waits although the end is near").unwrap();
                writer.pause_compaction();
                assert!(!writer.compaction_is_paused(), "the end has begun");
            }
            let closed = timeout(&core, 10_000_000_000, pin!(writer.close())).await;
            closed.expect("the end waits for the end of the pause").unwrap();
        });
    }
}

fn one(key: &[u8]) -> BatchWriter {
    let mut batch = BatchWriter::new();
    batch.put(0, key, b"v");
    batch
}

/// Writes many batches of 1000 keys.
async fn write_all(writer: &Writer, keys: u64, add: impl Fn(&mut BatchWriter, &[u8])) {
    for first in (0..keys).step_by(1000) {
        let mut batch = BatchWriter::default();
        for n in first..first + 1000 {
            add(&mut batch, format!("{n:08}").as_bytes());
        }
        writer.submit(batch, None).unwrap().await.unwrap();
    }
}

#[test]
fn deleted_keys_go_before_a_memtable_is_full() {
    let tables = |disable: bool, name: &'static str| {
        on_one_core(move |core| async move {
            let more = [("disable_auto_compactions".to_owned(), disable.to_string())];
            let options = WriteOptions {
                durability: Durability::Process,
                column_family_options: more.into(),
                ..WriteOptions::default()
            };
            let (db, writer) = open(&core, &fresh_dir(name), options).await;
            write_all(&writer, 300_000, |batch, key| batch.put(0, key, b"value")).await;
            drop(writer.live_files(0).await.unwrap());
            let before = writer.stats().flushed_tables;
            for _ in 0..4 {
                write_all(&writer, 100_000, |batch, key| batch.delete(0, key)).await;
                quiesce(&core, &writer).await;
            }
            let stat = db.stat();
            let entries: u64 =
                stat.column_families[0].levels.iter().map(|level| level.entries).sum();
            let flushed = writer.stats().flushed_tables - before;
            writer.close().await.unwrap();
            (flushed, entries)
        })
    };
    let (flushed, entries) = tables(false, "deleted_keys_go");
    assert!(flushed > 1 && entries <= 200_000, "{flushed} {entries}");
    // What no merge takes away does not become many small tables.
    let (flushed, entries) = tables(true, "deleted_keys_stay");
    assert!(flushed == 1 && entries > 300_000, "{flushed} {entries}");
}
