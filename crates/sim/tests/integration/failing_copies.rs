//! Copies and ingestions that fail at one place: what they leave, and what the next attempt does.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use lsm::{
    BackupDir, BatchWriter, Db, Durability, Error, IngestFiles, IterOptions, Kind, OpenOptions,
    Transfer, WriteOptions, Writer, place_files,
};
use reactor::Core;
use reactor::sim::{Access, Crash, FailureKind, Fault, FaultKind, SimConfig, World};
use sim::copies::external_table;
use sim::engine::{DIR, Pairs};

const BACKUPS: &str = "/backups";
const SECOND: u64 = 1_000_000_000;
const FOREVER: u64 = 1_000_000;

fn world(seed: u64) -> World {
    let world = World::new(seed, 1, SimConfig::default());
    world.add_dir(DIR);
    world.add_dir("/files");
    world
}

/// Runs a process. False if it was crashed.
fn run<F: Future<Output = ()> + 'static>(world: &World, main: impl Fn(Core, World) -> F) -> bool {
    let shared = world.clone();
    match world.run(|core| main(core, shared.clone())).map_err(|failure| failure.kind) {
        Ok(_) => true,
        Err(FailureKind::Crash(_)) => false,
        Err(kind) => panic!("{kind:?}"),
    }
}

async fn open(core: &Core) -> (Db, Writer) {
    let options = WriteOptions {
        durability: Durability::Power,
        memtable_bytes: 100_000,
        ..WriteOptions::default()
    };
    let opened = Db::open_for_writing(core, Path::new(DIR), OpenOptions::default(), options);
    opened.await.unwrap()
}

fn pair(number: u64) -> (Vec<u8>, Vec<u8>) {
    (format!("key{number:04}").into_bytes(), vec![number as u8; 1_000])
}

async fn put(writer: &Writer, number: u64) -> Result<u64, Error> {
    let (key, value) = pair(number);
    let mut batch = BatchWriter::new();
    batch.put(0, &key, &value);
    writer.write(batch).await
}

/// Writes keys from 0 on to a table.
async fn fill(writer: &Writer, count: u64) {
    for number in 0..count {
        put(writer, number).await.unwrap();
    }
    writer.flush().await.unwrap();
}

/// Checks that a directory has these keys and no other ones.
async fn has_exactly(core: &Core, path: &Path, count: u64) {
    let db = Db::open(core, path, OpenOptions::default()).await.unwrap();
    let reader = db.attach(core);
    let mut iter = reader.iter(0, IterOptions::default()).unwrap();
    let mut found = Pairs::new();
    iter.seek_to_first().await.unwrap();
    while iter.valid() {
        found.push((iter.key().to_vec(), iter.value().to_vec()));
        iter.next().await.unwrap();
    }
    assert!(found == (0..count).map(pair).collect::<Pairs>(), "{} keys", found.len());
}

async fn back_up(core: &Core, writer: &Writer) -> Result<u32, Error> {
    let live = writer.live_files(0).await?;
    let mut quiet = |_, _| {};
    let mut transfer = Transfer::new(core, None, &mut quiet);
    let backups = BackupDir::new(core, Path::new(BACKUPS));
    backups.create(live.list(), &mut transfer).await.map(|made| made.id)
}

async fn restore(core: &Core, path: &Path) -> Result<u64, Error> {
    let mut quiet = |_, _| {};
    let mut transfer = Transfer::new(core, None, &mut quiet);
    let backups = BackupDir::new(core, Path::new(BACKUPS));
    backups.restore(None, path, &mut transfer).await.map(|restored| restored.kept_bytes)
}

fn says_unknown(error: &Error) -> bool {
    error.kind() == Kind::Io && error.to_string().contains("it is unknown whether")
}

#[test]
fn a_flush_does_not_wait_for_a_manifest_that_cannot_be_written() {
    let world = world(1);
    run(&world, |core, world| async move {
        let (_db, writer) = open(&core).await;
        put(&writer, 0).await.unwrap();
        let error = Fault::new(FaultKind::Error(5)).of(Access::Sync);
        world.add_fault(error.within("MANIFEST-"));
        let path = PathBuf::from("/files/a.sst");
        world.add_file(&path, external_table(&vec![pair(7)]));
        let ingested = writer.ingest_files(&[(0, vec![path])], true, true).await;
        assert!(says_unknown(&ingested.unwrap_err()));
        let since = core.now_ns();
        writer.flush().await.unwrap();
        // It lists what is in the log.
        writer.live_files(0).await.unwrap();
        assert!(core.now_ns() - since < 60 * SECOND);
        world.heal();
        while writer.stats().flushed_tables == 0 {
            core.sleep_ns(SECOND / 10).await;
        }
        writer.close().await.unwrap();
    });
}

#[test]
fn a_restored_file_whose_sync_failed_is_restored_again() {
    let (mut failed, mut kept) = (0, 0);
    for seed in 0..40 {
        let world = world(seed);
        let restored = Path::new("/restored");
        let counts = Rc::new(Cell::new((0, 0)));
        let own = counts.clone();
        run(&world, |core, world| {
            let own = own.clone();
            async move {
                let (_db, writer) = open(&core).await;
                fill(&writer, 20).await;
                back_up(&core, &writer).await.unwrap();
                let error = Fault::new(FaultKind::Error(5)).of(Access::Sync).within("/restored");
                world.add_fault(error.after(seed % 5).times(1));
                let first = restore(&core, restored).await;
                world.heal();
                if first.is_err() {
                    let bytes = restore(&core, restored).await.unwrap();
                    own.set((1, u64::from(bytes > 0)));
                }
            }
        });
        failed += counts.get().0;
        kept += counts.get().1;
        world.crash(Crash::PowerCut);
        run(&world, |core, _| async move { has_exactly(&core, restored, 20).await });
    }
    assert!(failed > 10 && kept > 5, "{failed} failed, {kept} of them were continued");
}

#[test]
fn a_checkpoint_that_was_given_up_is_not_in_the_way_after_a_power_cut() {
    for seed in 0..40 {
        let world = world(seed);
        run(&world, |core, world| async move {
            let (_db, writer) = open(&core).await;
            fill(&writer, 20).await;
            let error = Fault::new(FaultKind::Error(5)).of(Access::Sync).within("/copy.tmp");
            world.add_fault(error.after(1).times(1));
            writer.checkpoint(Path::new("/copy")).await.unwrap_err();
        });
        world.heal();
        world.crash(Crash::PowerCut);
        run(&world, |core, _| async move {
            let (_db, writer) = open(&core).await;
            writer.checkpoint(Path::new("/copy")).await.unwrap();
            has_exactly(&core, Path::new("/copy"), 20).await;
        });
    }
}

#[test]
fn a_backup_that_failed_is_absent_unless_the_error_says_that_this_is_unknown() {
    let (mut absent, mut unknown) = (0, 0);
    for after in 0..12 {
        let world = world(after);
        let counts = Rc::new(Cell::new((0, 0)));
        let own = counts.clone();
        run(&world, |core, world| {
            let own = own.clone();
            async move {
                let (_db, writer) = open(&core).await;
                fill(&writer, 5).await;
                let error = Fault::new(FaultKind::NameError(5)).within("/backups/meta");
                world.add_fault(error.after(after).times(1));
                let made = back_up(&core, &writer).await;
                world.heal();
                let is_there = world.bytes("/backups/meta/1").is_ok();
                match made {
                    Ok(_) => assert!(is_there),
                    Err(error) => {
                        assert_eq!(is_there, says_unknown(&error), "{error}");
                        own.set((u64::from(!is_there), u64::from(is_there)));
                    }
                }
                back_up(&core, &writer).await.unwrap();
                restore(&core, Path::new("/restored")).await.unwrap();
                has_exactly(&core, Path::new("/restored"), 5).await;
            }
        });
        absent += counts.get().0;
        unknown += counts.get().1;
    }
    assert!(absent > 2 && unknown == 1, "{absent} absent, {unknown} unknown");
}

#[test]
fn a_backup_with_the_number_of_a_deleted_one_does_not_harm_what_a_power_cut_brings_back() {
    let mut cuts = 0;
    for seed in 0..100 {
        let world = world(seed);
        run(&world, |core, _| async move {
            let (_db, writer) = open(&core).await;
            fill(&writer, 5).await;
            back_up(&core, &writer).await.unwrap();
        });
        // Its deletion is killed.
        world.crash_at(Crash::Kill, 1..20);
        run(&world, |core, _| async move {
            BackupDir::new(&core, Path::new(BACKUPS)).delete(&[1]).await.unwrap();
        });
        world.crash_at(Crash::PowerCut, 1..60);
        cuts += u64::from(!run(&world, |core, _| async move {
            let (_db, writer) = open(&core).await;
            back_up(&core, &writer).await.unwrap();
        }));
        run(&world, |core, _| async move {
            let backups = BackupDir::new(&core, Path::new(BACKUPS));
            let (listed, damaged) = backups.list().await.unwrap();
            assert!(damaged.is_empty(), "{damaged:?}");
            for backup in listed {
                let mut quiet = |_, _| {};
                let mut transfer = Transfer::new(&core, None, &mut quiet);
                let verified = backups.verify(Some(backup.id), &mut transfer).await.unwrap();
                assert!(verified.damages.is_empty(), "{:?}", verified.damages);
            }
        });
    }
    assert!(cuts > 30, "{cuts}");
}

/// A table is prepared while no log can be written, and the process ends.
#[test]
fn an_interrupted_ingestion_without_a_log_is_not_taken_for_a_lost_end_of_the_manifest() {
    let world = world(2);
    run(&world, |core, world| async move {
        let (_db, writer) = open(&core).await;
        fill(&writer, 3).await;
        world.add_fault(Fault::new(FaultKind::Error(5)).of(Access::Sync).on(".log").times(FOREVER));
        let refused = put(&writer, 3).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::Full, "{refused}");
        let path = PathBuf::from("/files/a.sst");
        world.add_file(&path, external_table(&vec![pair(7)]));
        let numbers = writer.reserve_files(1);
        let mut quiet = |_, _| {};
        let mut transfer = Transfer::new(&core, None, &mut quiet);
        let files = [(path, numbers[0])];
        place_files(&files, Path::new(DIR), true, &mut transfer).await.unwrap();
        let files = [IngestFiles { family: 0, numbers }];
        let _prepared =
            writer.prepare_ingestion(&files, true).await.unwrap_or_else(|e| panic!("{e}"));
        world.crash(Crash::Kill);
    });
    world.heal();
    run(&world, |core, _| async move {
        let (db, writer) = open(&core).await;
        put(&writer, 3).await.unwrap();
        writer.close().await.unwrap();
        drop((db, writer));
        has_exactly(&core, Path::new(DIR), 4).await;
    });
}

/// The log fails, and so does the table that would take its place; then tables can be written.
async fn leave_unknown(writer: &Writer, world: &World) {
    world.add_fault(Fault::new(FaultKind::Error(5)).of(Access::Sync).on(".log").times(1));
    world.add_fault(Fault::new(FaultKind::Error(5)).of(Access::Write).on(".sst").times(1));
    let mut batch = BatchWriter::new();
    batch.put(0, &pair(3).0, b"of unknown fate");
    let unknown = writer.write(batch).await.unwrap_err();
    assert!(says_unknown(&unknown), "{unknown}");
}

#[test]
fn an_ingestion_is_not_overtaken_by_an_older_write_of_unknown_fate() {
    let world = world(3);
    run(&world, |core, world| async move {
        let (_db, writer) = open(&core).await;
        for number in 0..3 {
            put(&writer, number).await.unwrap();
        }
        leave_unknown(&writer, &world).await;
        let path = PathBuf::from("/files/a.sst");
        world.add_file(&path, external_table(&vec![pair(3)]));
        let ingest = async || writer.ingest_files(&[(0, vec![path.clone()])], true, true).await;
        let refused = ingest().await.unwrap_err();
        assert_eq!(refused.kind(), Kind::Full, "{refused}");
        while let Err(error) = ingest().await {
            assert_eq!(error.kind(), Kind::Full, "{error}");
            core.sleep_ns(SECOND / 10).await;
        }
        world.crash(Crash::Kill);
    });
    run(&world, |core, _| async move { has_exactly(&core, Path::new(DIR), 4).await });
}

#[test]
fn a_bulk_load_is_not_overtaken_by_an_older_write_of_unknown_fate() {
    let world = world(4);
    run(&world, |core, world| async move {
        let (_db, writer) = open(&core).await;
        for number in 0..3 {
            put(&writer, number).await.unwrap();
        }
        leave_unknown(&writer, &world).await;
        let load = async || {
            let mut left = Some(pair(3));
            let next = async |key: &mut Vec<u8>, value: &mut Vec<u8>| {
                let Some((own_key, own_value)) = left.take() else { return Ok(false) };
                key.extend(own_key);
                value.extend(own_value);
                Ok(true)
            };
            writer.bulk_load(0, next).await
        };
        let refused = load().await.unwrap_err();
        assert_eq!(refused.kind(), Kind::Full, "{refused}");
        while let Err(error) = load().await {
            assert_eq!(error.kind(), Kind::Full, "{error}");
            core.sleep_ns(SECOND / 10).await;
        }
        world.crash(Crash::Kill);
    });
    run(&world, |core, _| async move { has_exactly(&core, Path::new(DIR), 4).await });
}
