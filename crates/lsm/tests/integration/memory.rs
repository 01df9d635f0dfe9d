//! Memory is bounded, and a database can be opened with as little memory as it was written with.

use std::path::Path;
use std::rc::Rc;

use crate::common::{Model, compare, fresh_dir, on_one_core, on_one_core_with, write_some};
use lsm::{Compression, Db, Durability, IterOptions, Kind, OpenOptions, WriteOptions, Writer};
use reactor::Class;
use reactor::sim::{SimConfig, World};

/// The indexes and filters of 30 tables take a hundred times the memory that they may.
#[test]
fn indexes_and_filters_that_do_not_fit_are_read_on_demand() {
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
                    BYTES => {
                        // What a table cannot do without may exceed the limit.
                        let fits = memory.tables <= 2 * BYTES && memory.tables_on_demand > 0;
                        assert!(fits, "{memory:?} {:?}", writer.stats());
                    }
                    _ => assert!(memory.tables > BYTES && memory.tables_on_demand == 0),
                }
                model
            }
        });
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Without the second replay this was refused: the logs hold four times the memory.
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
                    assert!(error.to_string().contains("open it once for writing"), "{error}");
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

/// So both together have the memory for memtables that one had.
#[test]
fn a_database_within_another_takes_a_quarter_of_its_memtables() {
    /// Writes until the memtables are full. Returns the number of writes.
    async fn fill(writer: &Writer) -> f64 {
        let mut writes: u32 = 0;
        while writer.stats().logs == 0 {
            writer.put(&writes.to_be_bytes(), &[7; 1000]).await.unwrap();
            writes += 1;
        }
        f64::from(writes)
    }
    let filled = |with_another: bool| {
        let dir = fresh_dir("memory-within");
        let path = dir.clone();
        let filled = on_one_core(move |core| {
            let path = path.clone();
            async move {
                let durability = Durability::Process;
                let write =
                    WriteOptions { durability, memtable_bytes: 8 << 20, ..WriteOptions::default() };
                let open = Db::open_for_writing(&core, &path, OpenOptions::default(), write);
                let (_db, writer) = open.await.unwrap();
                let mut within = 0.0;
                if with_another {
                    let (_, other) = writer.open_within(true).await.unwrap().unwrap();
                    within = fill(&other).await;
                    other.close().await.unwrap();
                    drop(other);
                    // Another opening takes nothing more.
                    let (_, other) = writer.open_within(false).await.unwrap().unwrap();
                    other.close().await.unwrap();
                }
                let outside = fill(&writer).await;
                writer.close().await.unwrap();
                (outside, within)
            }
        });
        std::fs::remove_dir_all(&dir).unwrap();
        filled
    };
    let (alone, _) = filled(false);
    let (outside, within) = filled(true);
    let parts = (outside / alone, within / alone);
    assert!((0.7..0.8).contains(&parts.0) && (0.2..0.3).contains(&parts.1), "{parts:?}");
}

#[test]
fn a_merge_reads_ahead_beside_a_cache_that_is_full() {
    let config = SimConfig { memory: 16 << 20, ..SimConfig::default() };
    let world = World::new(1, 1, config);
    world.add_dir("/db");
    let done = world.run(|core| async move {
        let options = OpenOptions { cache_bytes: 12 << 20, ..OpenOptions::default() };
        let durability = Durability::Process;
        let write = WriteOptions { durability, memtable_bytes: 1 << 20, ..WriteOptions::default() };
        let (db, writer) =
            Db::open_for_writing(&core, Path::new("/db"), options, write).await.unwrap();
        let reader = db.attach(&core);
        let mut number: u64 = 0;
        let mut noise = 1_u64;
        // Incompressible values, all over the keys.
        let mut put = async |count: u64| {
            for _ in 0..count {
                number += 1;
                let value: Vec<u8> = (0..1000)
                    .map(|_| {
                        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        (noise >> 56) as u8
                    })
                    .collect();
                let key = format!("key{:06}", number * 7919 % 20_000);
                writer.put(key.as_bytes(), &value).await.unwrap();
            }
            while !writer.is_quiesced() {
                core.sleep_ns(10_000_000).await;
            }
        };
        put(20_000).await;
        let mut at = 0;
        while reader.stats().cache_bytes < 11 << 20 {
            at += 1;
            assert!(at < 100_000, "{:?}", reader.stats());
            let key = format!("key{:06}", at * 31 % 20_000);
            reader.get(0, key.as_bytes(), None).await.unwrap();
        }
        let (reads, before) = (core.stats().disk_reads.get(), writer.stats());
        put(6_000).await;
        let (reads, after) = (core.stats().disk_reads.get() - reads, writer.stats());
        let merged = after.merged_bytes - before.merged_bytes;
        assert!(merged > 10 << 20, "{merged}");
        assert!(reads * (32 << 10) < merged, "{reads} reads for {merged} bytes");
        writer.close().await.unwrap();
    });
    done.unwrap_or_else(|failure| panic!("{failure}"));
}

/// A deadlock was possible: every holder of memory waited for more. Scans kept their read-ahead,
/// each began with a part of the blocks that it needs, and a get kept a block until there was
/// memory to unpack it.
#[test]
fn many_reads_at_once_share_little_memory() {
    for compression in [Compression::Lz4, Compression::None] {
        let config = SimConfig { memory: 6 << 20, ..SimConfig::default() };
        let world = World::new(2, 1, config);
        world.add_dir("/db");
        let done = world.run(move |core| async move {
            let options = OpenOptions { cache_bytes: 3 << 20, ..OpenOptions::default() };
            let write = WriteOptions {
                durability: Durability::Process,
                memtable_bytes: 1 << 20,
                compression,
                ..WriteOptions::default()
            };
            let (db, writer) =
                Db::open_for_writing(&core, Path::new("/db"), options, write).await.unwrap();
            let mut model = Model::new();
            let mut random = 1_u64;
            let level0 = || db.stat().column_families[0].levels[0].files;
            while model.len() < 8_000 || level0() < 3 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let key = format!("key{:05}", (random >> 33) % 20_000).into_bytes();
                let value = random.to_string().repeat(50).into_bytes();
                writer.put(&key, &value).await.unwrap();
                model.insert(key, value);
            }
            let reader = db.attach(&core);
            let model = Rc::new(model);
            let scans: Vec<_> = (0..200_u64)
                .map(|nth| {
                    let (core, reader, model) = (core.clone(), reader.clone(), model.clone());
                    core.clone().spawn(Class::Foreground, async move {
                        for round in 0..5 {
                            let from = format!("key{:05}", (nth * 97 + round * 4001) % 20_000);
                            let options =
                                IterOptions { expected: Some(60), ..IterOptions::default() };
                            let mut iter = reader.iter(0, options).unwrap();
                            iter.seek(from.as_bytes()).await.unwrap();
                            for (key, value) in model.range(from.into_bytes()..).take(60) {
                                assert_eq!((iter.key(), iter.value()), (&key[..], &value[..]));
                                iter.next().await.unwrap();
                            }
                        }
                    })
                })
                .collect();
            for scan in scans {
                scan.await;
            }
            let gets: Vec<_> = (0..4_000_u64)
                .map(|nth| {
                    let (reader, model) = (reader.clone(), model.clone());
                    core.spawn(Class::Foreground, async move {
                        let key = format!("key{:05}", nth * 7919 % 20_000).into_bytes();
                        let found = reader.get(0, &key, None).await.unwrap();
                        assert_eq!(found.as_deref(), model.get(&key).map(|value| &value[..]));
                    })
                })
                .collect();
            for get in gets {
                get.await;
            }
            writer.close().await.unwrap();
        });
        done.unwrap_or_else(|failure| panic!("{compression:?}: {failure}"));
    }
}

/// A value was written with more memory than there is now. It can be neither read nor merged, but
/// it can be found, overwritten and removed. Every operation on its key failed before.
#[test]
#[expect(clippy::disallowed_methods, reason = "the damage is done on the host")]
fn a_value_larger_than_memory_is_there_and_can_be_removed() {
    const LARGE: usize = 9 << 20;
    let dir = fresh_dir("memory-large");
    let write = || WriteOptions {
        durability: Durability::Process,
        memtable_bytes: 1 << 20,
        ..WriteOptions::default()
    };
    let path = dir.clone();
    on_one_core_with(64 << 20, move |core| {
        let path = path.clone();
        async move {
            let (_db, writer) =
                Db::open_for_writing(&core, &path, OpenOptions::default(), write()).await.unwrap();
            for number in 0..300 {
                writer.put(format!("key{number:03}").as_bytes(), &[7; 100]).await.unwrap();
            }
            for key in [&b"key100"[..], b"key200", b"key200+"] {
                writer.put(key, &vec![b'v'; LARGE]).await.unwrap();
            }
            while !writer.is_quiesced() {
                core.sleep_ns(10_000_000).await;
            }
            writer.close().await.unwrap();
        }
    });
    let path = dir.clone();
    on_one_core_with(6 << 20, move |core| {
        let path = path.clone();
        async move {
            let options = || OpenOptions { cache_bytes: 1 << 20, ..OpenOptions::default() };
            let (db, writer) =
                Db::open_for_writing(&core, &path, options(), write()).await.unwrap();
            let reader = db.attach(&core);
            let contains = async |keys: &[&str]| {
                let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
                let found = reader.contains(0, &keys).await;
                found.into_iter().collect::<lsm::Result<Vec<bool>>>().unwrap()
            };
            let failed = reader.get(0, b"key200", None).await.unwrap_err();
            assert_eq!(failed.kind(), Kind::Memory, "{failed}");
            let keys = ["key099", "key100", "key100x", "key101", "key200", "key200+", "key2000"];
            assert_eq!(contains(&keys).await, [true, true, false, true, true, true, false]);
            writer.delete(b"key100").await.unwrap();
            writer.put(b"key200", b"small").await.unwrap();
            assert_eq!(contains(&["key100", "key200"]).await, [false, true]);
            assert_eq!(reader.get(0, b"key100", None).await.unwrap().as_deref(), None);
            let found = reader.get(0, b"key200", None).await.unwrap();
            assert_eq!(found.as_deref(), Some(&b"small"[..]));
            writer.close().await.unwrap();
        }
    });
    // Flip a bit of the value, which is never unpacked.
    for entry in std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.extension().is_some_and(|ending| ending == "sst") {
            let mut bytes = std::fs::read(&entry).unwrap();
            for at in (4 << 20..bytes.len().saturating_sub(1 << 20)).step_by(4 << 20) {
                bytes[at] ^= 1;
            }
            std::fs::write(&entry, bytes).unwrap();
        }
    }
    let path = dir.clone();
    on_one_core_with(6 << 20, move |core| {
        let path = path.clone();
        async move {
            let options = OpenOptions { cache_bytes: 1 << 20, ..OpenOptions::default() };
            let db = Db::open(&core, &path, options).await.unwrap();
            let answer = db.attach(&core).contains(0, &[b"key200+"]).await.remove(0);
            assert_eq!(answer.unwrap_err().kind(), Kind::Corruption);
        }
    });
    std::fs::remove_dir_all(&dir).unwrap();
}
