//! Writing ends in bounded time, whatever memory is lacking and whatever was submitted, in a
//! simulated world, which detects a lost wake-up as a deadlock.

use std::path::Path;

use lsm::{BatchWriter, Db, Durability, OpenOptions, WriteOptions, Writer};
use reactor::sim::{SimConfig, World};
use reactor::{Buf, Core};

const DIR: &str = "/db";
const CHUNK: usize = 256 << 10;

fn world(seed: u64, memory: usize) -> World {
    let world = World::new(seed, 1, SimConfig { memory, ..SimConfig::default() });
    world.add_dir(DIR);
    world
}

async fn open(core: &Core, cache_bytes: usize, memtable_bytes: usize) -> (Db, Writer) {
    let durability = Durability::Process;
    let options = OpenOptions { cache_bytes, ..OpenOptions::default() };
    let write = WriteOptions { durability, memtable_bytes, ..WriteOptions::default() };
    Db::open_for_writing(core, Path::new(DIR), options, write).await.unwrap()
}

fn key(number: usize) -> Vec<u8> {
    format!("key{number:06}").into_bytes()
}

#[test]
fn requests_submitted_before_the_end_are_written() {
    for seed in 0..5 {
        world(seed, 8 << 20)
            .run(|core| async move {
                let (db, writer) = open(&core, 0, 50_000).await;
                // Many times the size of the memtables that may wait to be flushed.
                let written: Vec<_> = (0..60)
                    .map(|number| {
                        let mut batch = BatchWriter::new();
                        batch.put(0, &key(number), &[7; 30_000]);
                        writer.submit(batch, None).unwrap()
                    })
                    .collect();
                writer.close().await.unwrap();
                for written in written {
                    written.await.unwrap();
                }
                let reader = db.attach(&core);
                for number in 0..60 {
                    assert!(reader.get(0, &key(number), None).await.unwrap().is_some());
                }
            })
            .unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
    }
}

/// Takes all free memory, in pieces smaller than any waiter needs.
fn take_the_rest(core: &Core) -> Vec<Buf> {
    let mut taken = Vec::new();
    for len in [64 << 10, 4096, 512] {
        while let Some(buf) = core.alloc(len) {
            taken.push(buf);
        }
    }
    taken
}

#[test]
fn the_cache_of_an_idle_reader_gives_way_to_flushes_and_merges() {
    for seed in 0..3 {
        world(seed, 4 << 20)
            .run(|core| async move {
                let (db, writer) = open(&core, 3 << 20, 200_000).await;
                for number in 0..8000 {
                    writer.put(&key(number), &[7; 1000]).await.unwrap();
                }
                let reader = db.attach(&core);
                while reader.stats().cache_bytes < (3 << 20) - CHUNK as u64 {
                    let number = core.random_u64() as usize % 8000;
                    reader.get(0, &key(number), None).await.unwrap();
                }
                // Slow requests hold the rest of the memory.
                let held = take_the_rest(&core);
                for number in 0..3000 {
                    writer.put(&key(number), &[8; 1000]).await.unwrap();
                }
                writer.close().await.unwrap();
                drop(held);
            })
            .unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
    }
}

#[test]
fn a_merge_of_large_values_stays_within_memory() {
    for seed in 0..3 {
        world(seed, 8 << 20)
            .run(|core| async move {
                let (db, writer) = open(&core, 0, 1_000_000).await;
                // One block of each table would exceed the memory.
                let since_ns = core.now_ns();
                for number in 0..60 {
                    writer.put(&key(number % 20), &vec![number as u8; 600_000]).await.unwrap();
                }
                while !writer.is_quiesced() {
                    core.sleep_ns(10_000_000).await;
                }
                let ns = core.now_ns() - since_ns;
                assert!(writer.stats().merges > 0);
                assert!(ns < 5_000_000_000, "merges have waited for memory: {ns} ns");
                writer.close().await.unwrap();
                let reader = db.attach(&core);
                for number in 40..60 {
                    let value = reader.get(0, &key(number % 20), None).await.unwrap().unwrap();
                    assert_eq!((value.len(), value[0]), (600_000, number as u8));
                }
            })
            .unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
    }
}

#[test]
fn a_merge_that_waits_for_memory_is_cancelled_at_the_end() {
    for seed in 0..3 {
        world(seed, 8 << 20)
            .run(|core| async move {
                let (db, writer) = open(&core, 0, 200_000).await;
                let mut number = 0;
                while writer.stats().level0_files < 3 {
                    writer.put(&key(number % 5), &[7; 900_000]).await.unwrap();
                    number += 1;
                }
                while !writer.is_quiesced() {
                    core.sleep_ns(10_000_000).await;
                }
                // The rest is enough for a flush, but not for a block that the merge needs.
                let held = take_the_rest(&core).split_off(10);
                while writer.stats().level0_files < 4 {
                    writer.put(b"short", &[8; 10_000]).await.unwrap();
                }
                core.sleep_ns(100_000_000).await;
                assert_eq!(writer.stats().merges, 0, "there is memory for merges");
                let since_ns = core.now_ns();
                writer.close().await.unwrap();
                let ns = core.now_ns() - since_ns;
                assert!(ns < 1_000_000_000, "it took {ns} ns");
                drop(held);
                drop((db, writer));
                // The next opening removes the tables of the merge, and nothing else.
                let (db, writer) = open(&core, 0, 200_000).await;
                let reader = db.attach(&core);
                for number in 0..number.min(5) {
                    assert!(reader.get(0, &key(number), None).await.unwrap().is_some());
                }
                writer.close().await.unwrap();
            })
            .unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
    }
}
