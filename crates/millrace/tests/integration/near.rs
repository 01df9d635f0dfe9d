//! Gets that the calling thread answers itself.

use std::sync::atomic::{AtomicBool, Ordering};

use millrace::{Db, Durability, ErrorKind, Options, WriteBatch, blocking};
use tempfile::tempdir;

fn key(n: u32) -> [u8; 4] {
    n.to_be_bytes()
}

fn filled(db: &blocking::Db, keys: u32) {
    let mut batch = WriteBatch::new();
    for n in 0..keys {
        batch.put(key(n), format!("{n:0>100}"));
    }
    db.write(batch).unwrap();
}

#[test]
fn what_is_in_memory_is_answered_by_the_caller() {
    let dir = tempdir().unwrap();
    for cores in [1, 2] {
        let options = Options::new().cores(cores).memory(64 << 20);
        let db = blocking::Db::open_with(&options, dir.path().join(cores.to_string())).unwrap();
        filled(&db, 1000);
        for n in 0..1000 {
            assert_eq!(db.get(key(n)).unwrap().unwrap(), format!("{n:0>100}"));
        }
        assert!(db.get("no").unwrap().is_none());
        assert_eq!(db.stats().gets_by_caller, 1001, "memtables");
        db.flush().unwrap();
        let keys = || (0..1000).map(key);
        let before = db.stats().gets_by_caller;
        assert_eq!(db.multi_get(keys()).unwrap().iter().flatten().count(), 1000);
        assert!(db.stats().gets_by_caller < before + 1000, "blocks must be read");
        let before = db.stats().gets_by_caller;
        for (n, value) in (0..).zip(db.multi_get(keys()).unwrap()) {
            assert_eq!(value.unwrap(), format!("{n:0>100}"));
        }
        assert_eq!(db.stats().gets_by_caller, before + 1000, "blocks are in memory");
        // Both ways see what the caller did, and a snapshot does not.
        let snapshot = db.snapshot().unwrap();
        db.delete_range(key(0)..key(500)).unwrap();
        db.put(key(7), "new").unwrap();
        assert_eq!(db.get(key(7)).unwrap().unwrap(), "new");
        assert!(db.get(key(8)).unwrap().is_none());
        assert_eq!(snapshot.get(key(8)).unwrap().unwrap(), format!("{:0>100}", 8));
    }
}

/// A task whose gets are all answered at once still lets others run.
#[tokio::test(flavor = "current_thread")]
async fn a_task_of_many_gets_lets_others_run() {
    let dir = tempdir().unwrap();
    let db = Db::open(dir.path()).await.unwrap();
    db.put("key", "value").await.unwrap();
    static RAN: AtomicBool = AtomicBool::new(false);
    tokio::spawn(async { RAN.store(true, Ordering::Relaxed) });
    let mut gets = 0;
    while !RAN.load(Ordering::Relaxed) {
        assert!(gets < 10_000, "the other task did not run");
        assert!(db.get("key").await.unwrap().is_some());
        gets += 1;
    }
    RAN.store(false, Ordering::Relaxed);
    tokio::spawn(async { RAN.store(true, Ordering::Relaxed) });
    db.multi_get((0..10_000).map(|_| "key")).await.unwrap();
    assert!(RAN.load(Ordering::Relaxed), "the other task did not run");
}

/// Threads that look keys up hold the database. Once `close` has returned they do not: the
/// directory can be opened, and their calls fail.
#[test]
fn an_end_during_gets_releases_the_lock_and_ends_them_with_errors() {
    let dir = tempdir().unwrap();
    let options = Options::new().memory(32 << 20).durability(Durability::Process);
    for round in 0..30_u32 {
        let db = blocking::Db::open_with(&options, dir.path()).unwrap();
        db.put(key(round), "v").unwrap();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let db = db.clone();
                std::thread::spawn(move || {
                    loop {
                        match db.get(key(round)) {
                            Ok(found) => assert_eq!(found.unwrap(), "v"),
                            Err(error) => return error.kind(),
                        }
                    }
                })
            })
            .collect();
        while db.stats().gets_by_caller < 1000 {
            std::thread::yield_now();
        }
        db.close().unwrap();
        let again = blocking::Db::open_with(&options, dir.path()).unwrap();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), ErrorKind::Closed);
        }
        assert_eq!(again.get(key(round)).unwrap().unwrap(), "v");
        again.close().unwrap();
    }
}

/// Reads of a thread alternate between the two ways while the database flushes and merges.
#[test]
fn reads_never_go_back_from_one_way_to_the_other() {
    let dir = tempdir().unwrap();
    let options = Options::new().memory(32 << 20).durability(Durability::Process);
    let db = blocking::Db::open_with(&options, dir.path()).unwrap();
    db.put("key", 0_u64.to_be_bytes()).unwrap();
    let number = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut last = 0;
                while !done.load(Ordering::Relaxed) {
                    let here = number(&db.get("key").unwrap().unwrap());
                    // A range is always handed over.
                    let there = number(&db.range("key"..).next().unwrap().unwrap().1);
                    assert!(last <= here && here <= there, "{last} {here} {there}");
                    last = there;
                }
            });
        }
        for n in 1..=1500_u64 {
            db.put("key", n.to_be_bytes()).unwrap();
            assert_eq!(number(&db.get("key").unwrap().unwrap()), n);
            if n.is_multiple_of(100) {
                db.flush().unwrap();
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(db.stats().gets_by_caller > 0);
}
