//! A full disk, in a simulated world: which requests are refused, which succeed, and which files
//! remain.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;

use crate::common::on_first_core;
use lsm::{Db, Durability, Error, Kind, OpenOptions, WriteOptions, Writer};
use reactor::Core;
use reactor::sim::{Access, Crash, FailureKind, Fault, FaultKind, SimConfig, World};

const DIR: &str = "/db";

fn world(seed: u64) -> World {
    let world = World::new(seed, 2, SimConfig::default());
    world.add_dir(DIR);
    world
}

async fn open(core: &Core, durability: Durability) -> Result<(Db, Writer), Error> {
    let options = WriteOptions { durability, memtable_bytes: 50_000, ..WriteOptions::default() };
    Db::open_for_writing(core, Path::new(DIR), OpenOptions::default(), options).await
}

fn key(number: u64) -> Vec<u8> {
    format!("key{number:06}").into_bytes()
}

/// Writes until the disk is full. Returns the number of keys.
async fn fill(writer: &Writer, from: u64) -> u64 {
    let mut number = from;
    loop {
        match writer.put(&key(number), &[7; 1000]).await {
            Ok(_) => number += 1,
            Err(error) => {
                assert_eq!(error.kind(), Kind::Full, "{error}");
                assert!(error.to_string().contains("the disk is full"), "{error}");
                return number;
            }
        }
    }
}

async fn is_all_there(core: &Core, db: &Db, keys: u64) {
    let reader = db.attach(core);
    for number in 0..keys {
        let found = reader.get(0, &key(number), None).await.unwrap();
        assert_eq!(found.as_deref(), Some(&[7; 1000][..]), "{number}");
    }
    assert!(reader.get(0, &key(keys), None).await.unwrap().is_none());
}

/// Waits until a write succeeds.
async fn until_written(core: &Core, writer: &Writer, number: u64) {
    let since_ns = core.now_ns();
    while let Err(error) = writer.put(&key(number), &[7; 1000]).await {
        assert_eq!(error.kind(), Kind::Full, "{error}");
        assert!(core.now_ns() - since_ns < 60_000_000_000, "{:?}", writer.stats());
        core.sleep_ns(10_000_000).await;
    }
}

#[test]
fn writes_are_refused_until_there_is_space_and_reads_continue() {
    for seed in 0..30 {
        let durability = [Durability::Process, Durability::Power][seed as usize % 2];
        let world = world(seed);
        on_first_core(&world, move |core, world| async move {
            let (db, writer) = open(&core, durability).await.unwrap();
            let mut keys = 0;
            for round in 1..4 {
                world.set_capacity(Some(world.used() + 200_000 + seed * 20_000));
                keys = fill(&writer, keys).await;
                // Long enough for a retry of tables that found no space.
                core.sleep_ns(5_000_000_000).await;
                is_all_there(&core, &db, keys).await;
                assert!(writer.put(b"x", &[0; 2_000_000]).await.is_err());
                assert!(writer.failure().is_none());
                assert_eq!(writer.stats().disk_full, 1);
                assert!(writer.stats().disk_full_times >= round);
                // Tables that failed are removed.
                let tables = |path: &&std::path::PathBuf| path.extension() == Some("sst".as_ref());
                let there = world.paths().iter().filter(tables).count();
                let levels = &db.stat().column_families[0].levels;
                let named: usize = levels.iter().map(|level| level.files).sum();
                assert!(there <= named + 2, "{there} tables, {named} of them named");
                world.set_capacity(None);
                until_written(&core, &writer, keys).await;
                keys += 1;
            }
            core.sleep_ns(60_000_000_000).await;
            until_written(&core, &writer, keys).await;
            assert_eq!(writer.stats().disk_full, 0, "{:?}", writer.stats());
            writer.close().await.unwrap();
            drop((db, writer));
            let (db, _writer) = open(&core, durability).await.unwrap();
            is_all_there(&core, &db, keys + 1).await;
        });
    }
}

#[test]
fn clearing_a_database_makes_space() {
    for seed in 0..20 {
        let durability = [Durability::Process, Durability::Power][seed as usize % 2];
        on_first_core(&world(seed), move |core, world| async move {
            let (_db, writer) = open(&core, durability).await.unwrap();
            // Long enough for logs to become obsolete.
            for number in 0..300 {
                writer.put(&key(number), &[7; 1000]).await.unwrap();
            }
            world.set_capacity(Some(world.used() + 300_000));
            fill(&writer, 300).await;
            core.sleep_ns(1_000_000_000).await;
            writer.clear(0).unwrap().await.unwrap();
            until_written(&core, &writer, 0).await;
            assert!(writer.failure().is_none());
            writer.close().await.unwrap();
        });
    }
}

/// The recovered log is the recycled one that is kept for clearings.
#[test]
fn clearing_makes_space_after_an_opening_too() {
    for seed in 0..20 {
        let durability = [Durability::Process, Durability::Power][seed as usize % 2];
        on_first_core(&world(seed), move |core, world| async move {
            let (db, writer) = open(&core, durability).await.unwrap();
            for number in 0..40 {
                writer.put(&key(number), &[7; 1000]).await.unwrap();
            }
            writer.close().await.unwrap();
            drop((db, writer));
            let (db, writer) = open(&core, durability).await.unwrap();
            writer.put(&key(40), &[7; 1000]).await.unwrap();
            core.sleep_ns(1_000_000_000).await;
            world.set_capacity(Some(world.used()));
            writer.clear(0).unwrap().await.unwrap();
            assert!(db.attach(&core).get(0, &key(0), None).await.unwrap().is_none());
            until_written(&core, &writer, 0).await;
            writer.close().await.unwrap();
        });
    }
}

/// No table was written yet. The recycled logs of the previous process are there.
#[test]
fn clearing_makes_space_right_after_an_opening() {
    for seed in 0..20 {
        let durability = [Durability::Process, Durability::Power][seed as usize % 2];
        on_first_core(&world(seed), move |core, world| async move {
            let (db, writer) = open(&core, durability).await.unwrap();
            for number in 0..300 {
                writer.put(&key(number), &[7; 1000]).await.unwrap();
            }
            core.sleep_ns(1_000_000_000).await;
            writer.close().await.unwrap();
            drop((db, writer));
            // Space for a MANIFEST, but not for a log or a table.
            world.set_capacity(Some(world.used() + 8_000));
            let (db, writer) = open(&core, durability).await.unwrap();
            writer.clear(0).unwrap().await.unwrap();
            assert!(db.attach(&core).get(0, &key(0), None).await.unwrap().is_none());
            until_written(&core, &writer, 0).await;
            writer.close().await.unwrap();
        });
    }
}

/// The recovered writes find no space for their tables, so no write is accepted.
#[test]
fn clearing_makes_space_though_recovered_writes_find_none() {
    let refused = Rc::new(Cell::new(0));
    for seed in 0..20 {
        let durability = [Durability::Process, Durability::Power][seed as usize % 2];
        let count = refused.clone();
        on_first_core(&world(seed), move |core, world| {
            let refused = count.clone();
            async move {
                let (db, writer) = open(&core, durability).await.unwrap();
                // Long enough for a log to be recycled.
                for number in 0..60 {
                    writer.put(&key(number), &[7; 1000]).await.unwrap();
                }
                core.sleep_ns(1_000_000_000).await;
                world.add_fault(Fault::new(FaultKind::Error(28)).of(Access::Write).on(".sst"));
                world.set_capacity(Some(world.used() + 300_000 + seed * 10_000));
                let keys = fill(&writer, 60).await;
                writer.close().await.unwrap();
                drop((db, writer));
                world.set_capacity(Some(world.used() + 8_000));
                let (db, writer) = open(&core, durability).await.unwrap();
                core.sleep_ns(seed * 100_000_000).await;
                if let Err(error) = writer.put(&key(keys), &[7; 1000]).await {
                    assert_eq!(error.kind(), Kind::Full, "{error}");
                    refused.set(refused.get() + 1);
                }
                writer.clear(0).unwrap().await.unwrap();
                assert!(db.attach(&core).get(0, &key(0), None).await.unwrap().is_none());
                until_written(&core, &writer, 0).await;
                writer.close().await.unwrap();
                drop((db, writer));
                world.heal();
                world.set_capacity(None);
                let (db, _writer) = open(&core, durability).await.unwrap();
                is_all_there(&core, &db, 1).await;
            }
        });
    }
    assert!(refused.get() > 0, "recovered writes always found space");
}

#[test]
fn a_database_that_is_closed_or_opened_on_a_full_disk_keeps_everything() {
    for seed in 0..30 {
        let durability = [Durability::Process, Durability::Power][seed as usize % 2];
        let world = world(seed);
        on_first_core(&world, move |core, world| async move {
            let (db, writer) = open(&core, durability).await.unwrap();
            world.set_capacity(Some(world.used() + 300_000));
            let keys = fill(&writer, 0).await;
            writer.close().await.unwrap();
            drop((db, writer));
            for more in [0, 2_000, 150_000] {
                world.set_capacity(Some(world.used() + more));
                let (db, writer) = open(&core, durability).await.unwrap();
                is_all_there(&core, &db, keys).await;
                writer.close().await.unwrap();
            }
            world.set_capacity(None);
            let (db, writer) = open(&core, durability).await.unwrap();
            is_all_there(&core, &db, keys).await;
            until_written(&core, &writer, keys).await;
            is_all_there(&core, &db, keys + 1).await;
        });
    }
}

/// There is no space for a MANIFEST or a log.
#[test]
fn an_opening_without_any_space_continues_when_there_is_some() {
    let without_manifest = Rc::new(Cell::new(0));
    for seed in 0..20 {
        let durability = [Durability::Process, Durability::Power][seed as usize % 2];
        let count = without_manifest.clone();
        on_first_core(&world(seed), move |core, world| {
            let count = count.clone();
            async move {
                let keys = leave_logs(&core, &world, durability).await;
                world.add_fault(Fault::new(FaultKind::Error(28)).of(Access::Write).on(".sst"));
                let current = || world.bytes(format!("{DIR}/CURRENT")).unwrap();
                for _ in 0..4 {
                    world.set_capacity(Some(world.used()));
                    let before = current();
                    let (db, writer) = open(&core, durability).await.unwrap();
                    count.set(count.get() + u64::from(current() == before));
                    is_all_there(&core, &db, keys).await;
                    writer.close().await.unwrap();
                }
                let (db, writer) = open(&core, durability).await.unwrap();
                let error = writer.put(&key(keys), &[7; 1000]).await.unwrap_err();
                assert_eq!(error.kind(), Kind::Full, "{error}");
                assert_eq!(writer.stats().disk_full, 1);
                world.heal();
                world.set_capacity(None);
                let mut keys = keys;
                if seed % 4 > 1 {
                    writer.clear(0).unwrap().await.unwrap();
                    keys = 0;
                }
                until_written(&core, &writer, keys).await;
                is_all_there(&core, &db, keys + 1).await;
                writer.close().await.unwrap();
                drop((db, writer));
                let (db, _writer) = open(&core, durability).await.unwrap();
                is_all_there(&core, &db, keys + 1).await;
            }
        });
    }
    assert!(without_manifest.get() > 20, "{}", without_manifest.get());
}

/// A power cut may leave any part of a change of the MANIFEST that does not fit into one block.
#[test]
fn a_long_record_torn_by_a_power_cut_is_ignored() {
    let (mut cuts, mut torn) = (0, 0);
    for seed in 0..60 {
        let world = world(seed);
        world.crash_at(Crash::PowerCut, 60..400);
        let acknowledged = Rc::new(Cell::new(0));
        let noted = acknowledged.clone();
        let long = |number: u64| [key(number), vec![b'k'; 25_000]].concat();
        let run = world.run(move |core| {
            let noted = noted.clone();
            async move {
                if core.id() > 0 {
                    return;
                }
                let (_db, writer) = open(&core, Durability::Power).await.unwrap();
                for number in 0..200 {
                    writer.put(&long(number), b"value").await.unwrap();
                    noted.set(number + 1);
                }
            }
        });
        match run.map_err(|failure| failure.kind) {
            Err(FailureKind::Crash(_)) => cuts += 1,
            other => assert!(other.is_ok(), "{other:?}"),
        }
        torn += world.faults().torn;
        let opened = world.bytes(format!("{DIR}/CURRENT")).is_ok();
        assert!(opened || acknowledged.get() == 0);
        on_first_core(&world, move |core, _| {
            let acknowledged = acknowledged.get();
            async move {
                let (db, _writer) = open(&core, Durability::Power).await.unwrap();
                let reader = db.attach(&core);
                for number in 0..acknowledged {
                    let found = reader.get(0, &long(number), None).await.unwrap();
                    assert_eq!(found.as_deref(), Some(&b"value"[..]), "{number}");
                }
            }
        });
    }
    assert!(cuts > 30 && torn > 3, "{cuts} {torn}");
}

/// Opens with less memory than the logs need.
async fn open_long(core: &Core, durability: Durability) -> Result<(Db, Writer), Error> {
    let options = WriteOptions { durability, memtable_bytes: 50_000, ..WriteOptions::default() };
    let reading = OpenOptions { recovered_bytes: 30_000, ..OpenOptions::default() };
    Db::open_for_writing(core, Path::new(DIR), reading, options).await
}

/// Writes logs that do not become tables. Returns the number of keys.
async fn leave_logs(core: &Core, world: &World, durability: Durability) -> u64 {
    let options = WriteOptions { durability, memtable_bytes: 200_000, ..WriteOptions::default() };
    let reading = OpenOptions::default();
    let open = Db::open_for_writing(core, Path::new(DIR), reading, options).await;
    let (db, writer) = open.unwrap();
    world.add_fault(Fault::new(FaultKind::Error(28)).of(Access::Write).on(".sst"));
    world.set_capacity(Some(world.used() + 1_000_000));
    let keys = fill(&writer, 0).await;
    writer.close().await.unwrap();
    drop((db, writer));
    world.heal();
    world.set_capacity(None);
    keys
}

fn logs_and_tables(world: &World) -> (u64, usize) {
    let paths = world.paths();
    let ends = |end: &str| {
        let it = paths.iter().filter(move |path| path.extension() == Some(end.as_ref()));
        it.cloned().collect::<Vec<_>>()
    };
    let bytes = |path: &std::path::PathBuf| world.bytes(path).unwrap().len() as u64;
    (ends("log").iter().map(bytes).sum(), ends("sst").len())
}

/// There is space for the tables of one log, but not for those of all.
#[test]
fn long_logs_become_tables_one_by_one_with_little_space() {
    for seed in 0..20 {
        let durability = [Durability::Process, Durability::Power][seed as usize % 2];
        on_first_core(&world(seed), move |core, world| async move {
            let keys = leave_logs(&core, &world, durability).await;
            let room = 70_000 + seed * 2_000;
            assert!(keys * 1000 > room + 30_000, "{keys} keys");
            world.set_capacity(Some(world.used() + room));
            let (db, writer) = open_long(&core, durability).await.unwrap();
            is_all_there(&core, &db, keys).await;
            until_written(&core, &writer, keys).await;
            writer.close().await.unwrap();
            drop((db, writer));
            let (db, _writer) = open(&core, durability).await.unwrap();
            is_all_there(&core, &db, keys + 1).await;
        });
    }
}

#[test]
fn long_logs_that_find_no_space_stay_as_they_are() {
    for seed in 0..20 {
        let durability = [Durability::Process, Durability::Power][seed as usize % 2];
        on_first_core(&world(seed), move |core, world| async move {
            let keys = leave_logs(&core, &world, durability).await;
            let before = logs_and_tables(&world);
            world.add_fault(Fault::new(FaultKind::Error(28)).of(Access::Write).on(".sst"));
            for _ in 0..3 {
                let error = match open_long(&core, durability).await {
                    Ok(_) => panic!("there was room"),
                    Err(error) => error,
                };
                assert_eq!(error.kind(), Kind::Full, "{error}");
                let text = error.to_string();
                assert!(text.contains("/db: ") && text.contains("Free "), "{error}");
                assert_eq!(logs_and_tables(&world), before);
            }
            // With enough memory they can be read.
            let (db, writer) = open(&core, durability).await.unwrap();
            is_all_there(&core, &db, keys).await;
            writer.close().await.unwrap();
            drop((db, writer));
            world.heal();
            let (db, _writer) = open_long(&core, durability).await.unwrap();
            is_all_there(&core, &db, keys).await;
        });
    }
}
