//! Merges for the age of files: `ttl` and `periodic_compaction_seconds`, on a clock that advances
//! by weeks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lsm::{CompactionFilter, Db, Durability, FilterDecision, OpenOptions, WriteOptions, Writer};
use reactor::Core;
use reactor::sim::{SimConfig, World};

use crate::common::{key, on_first_core};

const DAY_NS: u64 = 24 * 60 * 60 * 1_000_000_000;
/// A merge takes less.
const HOUR_NS: u64 = DAY_NS / 24;

fn world(seed: u64) -> World {
    let config = SimConfig { time_max_ns: 1000 * DAY_NS, ..SimConfig::default() };
    let world = World::new(seed, 2, config);
    world.add_dir("/db");
    world
}

fn options(more: &[(&str, &str)]) -> WriteOptions {
    let all = [
        ("level_compaction_dynamic_level_bytes", "false"),
        ("max_bytes_for_level_base", "40000"),
        ("max_bytes_for_level_multiplier", "4"),
        ("target_file_size_base", "10000"),
        ("num_levels", "5"),
    ];
    let all = all.iter().chain(more).map(|&(key, value)| (key.to_owned(), value.to_owned()));
    WriteOptions {
        durability: Durability::Process,
        memtable_bytes: 100_000,
        column_family_options: all.collect(),
        ..WriteOptions::default()
    }
}

async fn open(core: &Core, options: WriteOptions) -> (Db, Writer) {
    let dir = std::path::Path::new("/db");
    Db::open_for_writing(core, dir, OpenOptions::default(), options).await.unwrap()
}

async fn write(writer: &Writer, keys: impl Iterator<Item = u64>) {
    for n in keys {
        writer.put(&key(n), &[n as u8; 100]).await.unwrap();
    }
    drop(writer.live_files(0).await.unwrap());
}

async fn quiesce(core: &Core, writer: &Writer) {
    while !writer.is_quiesced() {
        core.sleep_ns(5_000_000).await;
    }
}

/// Files of each level.
fn files(db: &Db) -> Vec<usize> {
    db.stat().column_families[0].levels.iter().map(|level| level.files).collect()
}

fn deletions(db: &Db) -> u64 {
    db.stat().column_families[0].levels.iter().map(|level| level.deletions).sum()
}

#[test]
fn data_older_than_ttl_goes_to_the_deepest_level() {
    let world = world(1);
    on_first_core(&world, async |core, _| {
        let (db, writer) = open(&core, options(&[("ttl", "1728000")])).await;
        write(&writer, 0..8000).await;
        quiesce(&core, &writer).await;
        for n in 0..500 {
            writer.delete(&key(n * 16)).await.unwrap();
        }
        drop(writer.live_files(0).await.unwrap());
        quiesce(&core, &writer).await;
        let (young, gone) = (files(&db), deletions(&db));
        assert!(young[..young.len() - 1].iter().sum::<usize>() > 0 && gone > 0, "{young:?}");
        core.sleep_ns(19 * DAY_NS).await;
        assert_eq!((files(&db), deletions(&db)), (young, gone), "not due yet");
        core.sleep_ns(DAY_NS + HOUR_NS).await;
        let old = files(&db);
        let (deepest, above) = old.split_last().unwrap();
        assert!(*deepest > 0 && above.iter().all(|&files| files == 0), "{old:?}");
        assert_eq!(deletions(&db), 0);
        // New data stays above. When it was written is known after an opening, too.
        write(&writer, [3, 4].into_iter()).await;
        core.sleep_ns(15 * DAY_NS).await;
        assert_eq!(files(&db)[0], 1);
        writer.close().await.unwrap();
        drop((writer, db));
        let (db, writer) = open(&core, WriteOptions::default()).await;
        core.sleep_ns(4 * DAY_NS).await;
        assert_eq!(files(&db)[0], 1);
        core.sleep_ns(2 * DAY_NS).await;
        assert_eq!(files(&db)[..4], [0; 4]);
        writer.close().await.unwrap();
    });
}

#[test]
fn nothing_moves_for_its_age_without_ttl() {
    let world = world(2);
    on_first_core(&world, async |core, _| {
        let (db, writer) = open(&core, options(&[("ttl", "0")])).await;
        write(&writer, 0..4000).await;
        write(&writer, [5].into_iter()).await;
        quiesce(&core, &writer).await;
        let before = files(&db);
        assert!(before.len() > 2 && before[0] > 0, "{before:?}");
        core.sleep_ns(100 * DAY_NS).await;
        assert_eq!(files(&db), before);
        writer.close().await.unwrap();
    });
}

#[test]
fn snapshots_that_are_forgotten_keep_old_values_and_places_for_an_hour_only() {
    let world = world(3);
    on_first_core(&world, async |core, _| {
        let (db, writer) = open(&core, options(&[])).await;
        let reader = db.attach(&core);
        write(&writer, 0..300).await;
        let mut forgotten = Vec::new();
        while let Ok(snapshot) = reader.snapshot() {
            forgotten.push(snapshot);
        }
        assert!(forgotten.len() >= 1000);
        for n in 0..300 {
            writer.delete(&key(n)).await.unwrap();
        }
        let entries = |db: &Db| -> u64 {
            db.stat().column_families[0].levels.iter().map(|level| level.entries).sum()
        };
        drop(writer.live_files(0).await.unwrap());
        writer.compact(0, None, None).await.unwrap();
        assert!(entries(&db) >= 300);
        assert_eq!(reader.get(0, &key(7), forgotten.last()).await.unwrap().unwrap().len(), 100);

        core.sleep_ns(HOUR_NS + HOUR_NS / 30).await;
        let error = reader.get(0, &key(7), forgotten.last()).await.unwrap_err();
        assert_eq!(error.kind(), lsm::Kind::Expired);
        write(&writer, [1000].into_iter()).await;
        let later = reader.snapshot().unwrap();
        // It is in the place of one of these.
        drop(forgotten);
        for n in (0..300).chain([1000]) {
            writer.delete(&key(n)).await.unwrap();
        }
        drop(writer.live_files(0).await.unwrap());
        writer.compact(0, None, None).await.unwrap();
        assert_eq!(reader.get(0, &key(1000), Some(&later)).await.unwrap().unwrap().len(), 100);
        assert_eq!(entries(&db), 2);
        drop(later);
        writer.close().await.unwrap();
    });
}

/// Removes keys once it is told to.
#[derive(Debug, Default)]
struct Expiring {
    asked: AtomicU64,
    expired: AtomicU64,
}

impl CompactionFilter for Expiring {
    fn name(&self) -> &str {
        "Expiring"
    }

    fn filter(&self, _: &[u8], value: &[u8]) -> FilterDecision {
        self.asked.fetch_add(1, Ordering::Relaxed);
        match u64::from(value[0]) < self.expired.load(Ordering::Relaxed) {
            true => FilterDecision::Remove,
            false => FilterDecision::Keep,
        }
    }
}

#[test]
fn a_filter_sees_each_key_once_in_a_period() {
    let world = world(3);
    on_first_core(&world, async |core, _| {
        let filter = Arc::new(Expiring::default());
        let mut options = options(&[("ttl", "0")]);
        options.compaction_filters.insert("default".to_owned(), filter.clone());
        let (db, writer) = open(&core, options).await;
        write(&writer, 0..4000).await;
        writer.compact(0, None, None).await.unwrap();
        let keys =
            || -> u64 { db.stat().column_families[0].levels.iter().map(|l| l.entries).sum() };
        assert_eq!(keys(), 4000);
        filter.expired.store(256, Ordering::Relaxed);
        let before = (files(&db), filter.asked.load(Ordering::Relaxed));
        core.sleep_ns(29 * DAY_NS).await;
        assert_eq!((files(&db), filter.asked.load(Ordering::Relaxed)), before, "not due yet");
        core.sleep_ns(DAY_NS + HOUR_NS).await;
        assert_eq!(filter.asked.load(Ordering::Relaxed), before.1 + 4000);
        assert_eq!(keys(), 0, "every key has expired");
        writer.close().await.unwrap();
    });
}
