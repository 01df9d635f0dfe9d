//! Tables that cannot be written or merged, for a while or for ever, in a simulated world: writing
//! continues.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::on_first_core;
use lsm::{Db, Durability, Kind, OpenOptions, WriteOptions, Writer};
use reactor::Core;
use reactor::sim::{Access, Fault, FaultKind, SimConfig, World};

const DIR: &str = "/db";
const SECOND: u64 = 1_000_000_000;

fn world(seed: u64, memory: usize) -> World {
    let world = World::new(seed, 2, SimConfig { memory, ..SimConfig::default() });
    world.add_dir(DIR);
    world
}

async fn open(core: &Core, durability: Durability) -> (Db, Writer) {
    let options = WriteOptions { durability, memtable_bytes: 20_000, ..WriteOptions::default() };
    let opened = Db::open_for_writing(core, Path::new(DIR), OpenOptions::default(), options);
    opened.await.unwrap()
}

/// Puts a key, and retries while no table can be written. Returns the number of refusals.
async fn put(core: &Core, writer: &Writer, key: &[u8], value: &[u8]) -> u64 {
    let mut refused = 0;
    while let Err(error) = writer.put(key, value).await {
        assert_eq!(error.kind(), Kind::Full, "{error}");
        assert!(error.to_string().contains("no table can be written for now"), "{error}");
        assert!(refused < 3_000, "{error}");
        refused += 1;
        core.sleep_ns(SECOND / 10).await;
    }
    refused
}

async fn until_quiesced(core: &Core, writer: &Writer) {
    let since_ns = core.now_ns();
    while !writer.is_quiesced() {
        assert!(core.now_ns() - since_ns < 3_000 * SECOND, "{:?}", writer.stats());
        core.sleep_ns(SECOND / 10).await;
    }
}

fn key(number: u64) -> Vec<u8> {
    format!("key{number:06}").into_bytes()
}

async fn is_all_there(core: &Core, db: &Db, model: &BTreeMap<u64, u8>) {
    let reader = db.attach(core);
    for (&number, &byte) in model {
        let found = reader.get(0, &key(number), None).await.unwrap();
        assert_eq!(found.as_deref(), Some(&[byte; 1000][..]), "{number}");
    }
}

/// The faults that keep tables from being written.
fn faults() -> Vec<Fault> {
    let eio = || Fault::new(FaultKind::Error(5)).on(".sst");
    // 24: too many open files.
    let names = |errno| Fault::new(FaultKind::NameError(errno)).on(".sst");
    vec![
        eio().of(Access::Write).chance(100_000),
        eio().of(Access::Sync).chance(200_000),
        names(24).chance(100_000),
        eio().of(Access::Write).after(3).times(8),
        names(5).after(10).times(8),
    ]
}

#[test]
fn tables_that_cannot_be_written_are_retried_later() {
    let (mut failures, mut refused) = (0, 0);
    for seed in 0..30 {
        let durability = [Durability::Process, Durability::Power][seed as usize % 2];
        let world = world(seed, 64 << 20);
        let count = std::rc::Rc::new(std::cell::Cell::new((0, 0)));
        let counted = count.clone();
        on_first_core(&world, move |core, world| {
            let counted = counted.clone();
            async move {
                let (db, writer) = open(&core, durability).await;
                let mut model = BTreeMap::new();
                world.add_fault(faults().swap_remove(seed as usize % 5));
                let mut refused = 0;
                for turn in 0..600 {
                    let (number, byte) = (core.random_u64() % 300, turn as u8);
                    refused += put(&core, &writer, &key(number), &[byte; 1000]).await;
                    model.insert(number, byte);
                    assert!(writer.failure().is_none(), "{:?}", writer.failure());
                }
                is_all_there(&core, &db, &model).await;
                world.heal();
                until_quiesced(&core, &writer).await;
                let stats = writer.stats();
                assert!(stats.merges > 0 && stats.level0_files < 16, "{stats:?}");
                assert_eq!((stats.tables_failing, stats.disk_full), (0, 0));
                counted.set((stats.table_failures, refused));
                is_all_there(&core, &db, &model).await;
                writer.close().await.unwrap();
                // Tables that failed were removed, or never existed.
                let levels = &db.stat().column_families[0].levels;
                let named: usize = levels.iter().map(|level| level.files).sum();
                drop((db, writer));
                let (db, writer) = open(&core, durability).await;
                let tables = |path: &&std::path::PathBuf| path.extension() == Some("sst".as_ref());
                let there = world.paths().iter().filter(tables).count();
                assert!(there <= named + 1, "{there} tables, {named} of them named");
                is_all_there(&core, &db, &model).await;
                writer.close().await.unwrap();
            }
        });
        failures += count.get().0;
        refused += count.get().1;
    }
    assert!(failures > 200 && refused > 100, "{failures} failures, {refused} refused");
}

/// A value that is larger than the memory of a core can be written, and neither read nor merged.
#[test]
fn merges_that_never_find_memory_leave_their_tables_alone() {
    const VALUE: usize = 3_000_000;
    // After the large one, or it would be in the same block.
    let small = |turn: u8| format!("small{turn}").into_bytes();
    let world = world(1, 2 << 20);
    on_first_core(&world, move |core, _| async move {
        let (db, writer) = open(&core, Durability::Process).await;
        for turn in 0..30_u8 {
            put(&core, &writer, b"large", &vec![turn; VALUE]).await;
            put(&core, &writer, &small(turn), b"small").await;
            core.sleep_ns(SECOND).await;
        }
        until_quiesced(&core, &writer).await;
        let stats = writer.stats();
        assert!(writer.failure().is_none() && stats.damaged_tables > 0, "{stats:?}");
        // None of these merges is still retried.
        let failures = stats.table_failures;
        core.sleep_ns(100 * SECOND).await;
        assert_eq!(writer.stats().table_failures, failures);
        for turn in 0..30 {
            let found = db.attach(&core).get(0, &small(turn), None).await.unwrap();
            assert_eq!(found.as_deref(), Some(&b"small"[..]));
        }
        writer.close().await.unwrap();
    });
}
