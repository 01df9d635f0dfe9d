//! Batches that are written only if certain keys were not written meanwhile, and the optimistic
//! transactions that stand on them.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;

use crate::common::on_first_core;
use lsm::{BatchWriter, Db, Kind, OpenOptions, Unwritten, WriteOptions, Writer};
use reactor::sim::{SimConfig, World};
use reactor::{Class, Core};

const DIR: &str = "/db";

fn world(seed: u64) -> World {
    let world = World::new(seed, 1, SimConfig::default());
    world.add_dir(DIR);
    world
}

async fn open(core: &Core) -> (Db, Writer) {
    let write = WriteOptions { memtable_bytes: 50_000, ..WriteOptions::default() };
    let opened = Db::open_for_writing(core, Path::new(DIR), OpenOptions::default(), write).await;
    opened.expect("it opens")
}

fn put(key: &[u8], value: &[u8]) -> BatchWriter {
    let mut batch = BatchWriter::new();
    batch.put(0, key, value);
    batch
}

fn unwritten(since: u64, keys: &[&[u8]]) -> Unwritten {
    let mut condition = Unwritten::since(since);
    keys.iter().for_each(|key| condition.key(0, key));
    condition
}

/// Writes under a condition; the kind of the error, if it is refused.
async fn write_if(writer: &Writer, condition: Unwritten) -> Result<u64, Kind> {
    let written = writer.submit_if(put(b"out", b"1"), None, condition);
    written.expect("it is queued").await.map_err(|error| error.kind())
}

#[test]
fn a_batch_is_refused_if_a_key_of_its_condition_was_written_since() {
    on_first_core(&world(1), |core, _world| async move {
        let (_db, writer) = open(&core).await;
        let before = writer.write(put(b"a", b"1")).await.unwrap();
        assert!(write_if(&writer, unwritten(before, &[b"a", b"b"])).await.is_ok());
        let after = writer.write(put(b"b", b"1")).await.unwrap();
        assert_eq!(write_if(&writer, unwritten(before, &[b"a", b"b"])).await, Err(Kind::Conflict));
        assert!(write_if(&writer, unwritten(before, &[b"a"])).await.is_ok());
        assert!(write_if(&writer, unwritten(after, &[b"a", b"b"])).await.is_ok());
        // A removal counts, even of what is not there, and so does a range.
        let mut batch = BatchWriter::new();
        batch.delete(0, b"never");
        batch.delete_range(0, b"c", b"e");
        writer.write(batch).await.unwrap();
        for key in [&b"never"[..], b"c", b"dd"] {
            assert_eq!(write_if(&writer, unwritten(after, &[key])).await, Err(Kind::Conflict));
        }
        assert!(write_if(&writer, unwritten(after, &[b"e", b"bz"])).await.is_ok());
        let family = writer.submit_if(put(b"a", b"2"), None, {
            let mut condition = Unwritten::since(after);
            condition.key(77, b"a");
            condition
        });
        assert_eq!(family.err().map(|error| error.kind()), Some(Kind::UnknownColumnFamily));
        writer.close().await.unwrap();
    });
}

#[test]
fn batches_before_it_in_the_same_group_count() {
    on_first_core(&world(2), |core, _world| async move {
        let (db, writer) = open(&core).await;
        let since = writer.write(put(b"a", b"1")).await.unwrap();
        let mut range = BatchWriter::new();
        range.delete_range(0, b"x", b"z");
        let queued = [
            writer.submit_if(put(b"a", b"2"), None, unwritten(since, &[b"a"])),
            writer.submit_if(put(b"b", b"2"), None, unwritten(since, &[b"a"])),
            writer.submit_if(put(b"c", b"2"), None, unwritten(since, &[b"b"])),
            writer.submit(range, None),
            writer.submit_if(put(b"d", b"2"), None, unwritten(since, &[b"y"])),
            writer.submit_if(put(b"e", b"2"), None, unwritten(since, &[b"z"])),
        ];
        let mut kinds = Vec::new();
        for written in queued {
            kinds.push(written.unwrap().await.map_err(|error| error.kind()).err());
        }
        // A batch that is refused writes nothing: so the third one may depend on its key.
        let conflict = Some(Kind::Conflict);
        assert_eq!(kinds, [None, conflict, None, None, conflict, None]);
        let reader = db.attach(&core);
        for (key, there) in [(b"a", true), (b"b", false), (b"c", true), (b"d", false), (b"e", true)]
        {
            assert_eq!(reader.get(0, key, None).await.unwrap().is_some(), there);
        }
        assert_eq!(writer.stats().groups, 2);
        writer.close().await.unwrap();
    });
}

#[test]
fn what_is_not_known_any_more_is_a_conflict() {
    on_first_core(&world(3), |core, _world| async move {
        let (_db, writer) = open(&core).await;
        let before = writer.write(put(b"a", b"1")).await.unwrap();
        writer.write(put(b"large", &[7; 200_000])).await.unwrap();
        while writer.stats().flushed_tables == 0 {
            writer.write(put(b"more", &[7; 1000])).await.unwrap();
            core.sleep_ns(1_000_000).await;
        }
        assert_eq!(write_if(&writer, unwritten(before, &[b"a"])).await, Err(Kind::Conflict));
        // A condition without keys depends on nothing.
        assert!(write_if(&writer, unwritten(before, &[])).await.is_ok());
        let now = writer.write(put(b"b", b"1")).await.unwrap();
        assert!(write_if(&writer, unwritten(now, &[b"a"])).await.is_ok());
        writer.clear(0).unwrap().await.unwrap();
        assert_eq!(write_if(&writer, unwritten(now, &[b"a"])).await, Err(Kind::Conflict));
        writer.close().await.unwrap();
    });
}

/// Each adds one to a counter by hand, and begins again after a conflict.
#[test]
fn increments_of_optimistic_transactions_are_never_lost() {
    for seed in 0..8 {
        on_first_core(&world(seed), move |core, _world| async move {
            let (db, writer) = open(&core).await;
            let conflicts = Rc::new(Cell::new(0));
            let tasks: Vec<_> = (0..6u8)
                .map(|task| {
                    let (core, db, writer) = (core.clone(), db.clone(), writer.clone());
                    let conflicts = conflicts.clone();
                    core.clone().spawn(Class::Foreground, async move {
                        let reader = db.attach(&core);
                        for round in 0..20u8 {
                            loop {
                                let snapshot = reader.snapshot().unwrap();
                                let since = snapshot.sequence().unwrap();
                                let old = reader.get(0, b"n", Some(&snapshot)).await.unwrap();
                                let old =
                                    old.map_or(0, |old| u64::from(old[0]) | u64::from(old[1]) << 8);
                                let new = (old + 1).to_le_bytes();
                                let mut batch = put(b"n", &new[..2]);
                                // So that memtables become tables now and then.
                                batch.put(0, &[task, round], &[0; 400]);
                                let written =
                                    writer.submit_if(batch, None, unwritten(since, &[b"n"]));
                                match written.unwrap().await {
                                    Ok(_) => break,
                                    Err(error) if error.kind() == Kind::Conflict => {
                                        conflicts.set(conflicts.get() + 1);
                                    }
                                    Err(error) => panic!("seed {seed}: {error}"),
                                }
                            }
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await;
            }
            let found = db.attach(&core).get(0, b"n", None).await.unwrap().unwrap();
            assert_eq!(found[..], [120, 0], "seed {seed}");
            assert!(conflicts.get() > 0, "seed {seed}");
            writer.close().await.unwrap();
        });
    }
}
