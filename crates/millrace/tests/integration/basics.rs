//! What each call does, from an executor and from a thread.

use millrace::{Db, ErrorKind, Options, WriteBatch, blocking};
use tempfile::tempdir;

/// The same calls from tokio and from an executor that knows nothing of it.
async fn talk(db: Db) {
    db.put("a", "1").await.unwrap();
    db.put("b", vec![b'x'; 100_000]).await.unwrap();
    assert_eq!(db.get("a").await.unwrap().unwrap(), "1");
    assert_eq!(db.get("b").await.unwrap().unwrap().len(), 100_000);
    assert!(db.get("c").await.unwrap().is_none());
    db.delete("a").await.unwrap();
    assert!(db.get("a").await.unwrap().is_none());
    let family = db.create_column_family("other").await.unwrap();
    let mut batch = WriteBatch::new();
    batch.put("a", "2").put_in(&family, "a", "3");
    db.write(batch).await.unwrap();
    let snapshot = db.snapshot().await.unwrap();
    db.flush().await.unwrap();
    db.delete("a").await.unwrap();
    assert_eq!(snapshot.get("a").await.unwrap().unwrap(), "2");
    assert_eq!(snapshot.get_in(&family, "a").await.unwrap().unwrap(), "3");
    drop(snapshot);
    db.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_tokio() {
    let dir = tempdir().unwrap();
    talk(Db::open(dir.path()).await.unwrap()).await;
}

#[test]
fn on_another_executor() {
    let dir = tempdir().unwrap();
    futures_lite::future::block_on(async { talk(Db::open(dir.path()).await.unwrap()).await });
}

#[test]
fn on_several_cores_every_key_is_found() {
    let dir = tempdir().unwrap();
    let options = Options::new().cores(3).memory(96 << 20);
    let db = blocking::Db::open_with(&options, dir.path()).unwrap();
    let keys: Vec<String> = (0..200).map(|n| format!("key{n:03}")).collect();
    let mut batch = WriteBatch::new();
    for key in &keys {
        batch.put(key, key);
    }
    db.write(batch).unwrap();
    for flushed in [false, true] {
        if flushed {
            db.flush().unwrap();
        }
        let values = db.multi_get(keys.iter().chain([&"no".to_owned()])).unwrap();
        assert!(values[200].is_none());
        for (key, value) in keys.iter().zip(values) {
            assert_eq!(value.unwrap(), *key);
            assert_eq!(db.get(key).unwrap().unwrap(), *key);
        }
        let snapshots: Vec<_> = (0..4).map(|_| db.snapshot().unwrap()).collect();
        for snapshot in &snapshots {
            assert_eq!(snapshot.get("key007").unwrap().unwrap(), "key007");
            assert_eq!(snapshot.range(..).count(), 200);
            assert_eq!(snapshot.multi_get(&keys).unwrap().iter().flatten().count(), 200);
        }
    }
}

#[test]
fn ranges_go_both_ways_through_many_chunks() {
    let dir = tempdir().unwrap();
    let db = blocking::Db::open(dir.path()).unwrap();
    let mut batch = WriteBatch::new();
    for n in 0..20_000_u32 {
        batch.put(n.to_be_bytes(), format!("{n:0>30}"));
    }
    db.write(batch).unwrap();
    let numbers = |range: blocking::Range| -> Vec<u32> {
        range
            .map(|entry| {
                let (key, value) = entry.unwrap();
                let n = u32::from_be_bytes(key[..].try_into().unwrap());
                assert_eq!(value, format!("{n:0>30}"));
                n
            })
            .collect()
    };
    let key = |n: u32| n.to_be_bytes();
    assert_eq!(numbers(db.range(..)), (0..20_000).collect::<Vec<_>>());
    assert_eq!(numbers(db.range(..).rev()), (0..20_000).rev().collect::<Vec<_>>());
    assert_eq!(numbers(db.range(key(7)..key(9000))), (7..9000).collect::<Vec<_>>());
    assert_eq!(numbers(db.range(key(7)..=key(90)).rev()), (7..=90).rev().collect::<Vec<_>>());
    assert_eq!(numbers(db.range(key(9)..key(7))), []);
    assert_eq!(numbers(db.prefix([0, 0, 1])), (256..512).collect::<Vec<_>>());
    // A range shows one moment, however long it takes.
    let mut range = db.range(..);
    assert!(range.next().is_some());
    db.delete_range(key(0)..key(20_000)).unwrap();
    db.flush().unwrap();
    db.compact_range(..).unwrap();
    assert_eq!(range.count(), 19_999);
    assert_eq!(db.range(..).count(), 0);
}

#[test]
fn a_range_that_waits_goes_on_where_it_was() {
    let dir = tempdir().unwrap();
    let db = blocking::Db::open(dir.path()).unwrap();
    let mut batch = WriteBatch::new();
    for n in 0..5000_u32 {
        batch.put(n.to_be_bytes(), "v");
    }
    db.write(batch).unwrap();
    let (mut forward, mut backward) = (db.range(..), db.range(..).rev());
    assert!(forward.next().is_some() && backward.next().is_some());
    // Long enough for the core to drop their iterators.
    std::thread::sleep(std::time::Duration::from_millis(3500));
    assert_eq!((forward.count(), backward.count()), (4999, 4999));
}

#[test]
fn wrong_options_and_names_are_refused() {
    let dir = tempdir().unwrap();
    let refused = |options: Options| {
        blocking::Db::open_with(&options, dir.path().join("new")).unwrap_err().kind()
    };
    assert_eq!(refused(Options::new().cores(0)), ErrorKind::InvalidOption);
    assert_eq!(refused(Options::new().cores(2).memory(16 << 20)), ErrorKind::InvalidOption);
    assert_eq!(refused(Options::new().processors([100_000])), ErrorKind::InvalidOption);
    assert_eq!(refused(Options::new().create(false)), ErrorKind::NoDatabase);
    let db = blocking::Db::open(dir.path().join("db")).unwrap();
    assert_eq!(db.column_family("x").unwrap_err().kind(), ErrorKind::UnknownColumnFamily);
    assert_eq!(db.create_column_family("").unwrap_err().kind(), ErrorKind::Unsupported);
    let family = db.create_column_family("x").unwrap();
    db.drop_column_family("x").unwrap();
    assert_eq!(family.get("k").unwrap_err().kind(), ErrorKind::UnknownColumnFamily);
    assert_eq!(family.put("k", "v").unwrap_err().kind(), ErrorKind::UnknownColumnFamily);
    assert_eq!(db.merge("k", "v").unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(db.delete_range("b".."a").unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn more_callers_than_there_is_room_for_all_get_their_answers() {
    let dir = tempdir().unwrap();
    // Room for a few of these batches only.
    let options = Options::new().memory(16 << 20);
    let db = blocking::Db::open_with(&options, dir.path()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    runtime.block_on(async {
        let db: Db = db.clone().into();
        let put = |n: u32| {
            let db = db.clone();
            async move { db.put(n.to_be_bytes(), vec![n as u8; 400_000]).await }
        };
        let tasks: Vec<_> = (0..40).map(|n| tokio::spawn(put(n))).collect();
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        let get = |n: u32| {
            let db = db.clone();
            async move { db.get((n % 40).to_be_bytes()).await }
        };
        let tasks: Vec<_> = (0..3000).map(|n| tokio::spawn(get(n))).collect();
        for task in tasks {
            assert_eq!(task.await.unwrap().unwrap().unwrap().len(), 400_000);
        }
    });
}

#[tokio::test]
async fn a_column_family_of_another_database_is_refused() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (one, two) = (Db::open(one.path()).await.unwrap(), Db::open(two.path()).await.unwrap());
    // They have the same number.
    let (own, other) = (
        one.create_column_family("orders").await.unwrap(),
        two.create_column_family("users").await.unwrap(),
    );
    other.put("k", "theirs").await.unwrap();
    own.put("k", "ours").await.unwrap();
    let snapshot = one.snapshot().await.unwrap();
    let refused = |error: millrace::Error| error.kind() == ErrorKind::Unsupported;
    assert!(refused(snapshot.get_in(&other, "k").await.unwrap_err()));
    assert!(refused(snapshot.multi_get_in(&other, ["k"]).await.unwrap_err()));
    let mut range = snapshot.range_in(&other, ..).rev();
    assert!(refused(range.next().await.unwrap().unwrap_err()));
    assert!(range.next().await.is_none());
    assert!(refused(snapshot.prefix_in(&other, "k").next().await.unwrap().unwrap_err()));

    let mut batch = WriteBatch::new();
    batch.put("x", "1").put_in(&own, "k", "new").delete_in(&other, "k");
    assert!(refused(one.write(batch.clone()).await.unwrap_err()));
    assert!(refused(two.write(batch.clone()).await.unwrap_err()));
    batch.clear();
    batch.put_in(&own, "k", "new");
    assert!(refused(two.write(batch.clone()).await.unwrap_err()));
    one.write(batch).await.unwrap();

    let mut transaction = one.transaction().await.unwrap();
    assert!(refused(transaction.get_in(&other, "k").await.unwrap_err()));
    transaction.put_in(&own, "k", "newer").put_in(&other, "k", "newer");
    assert!(refused(transaction.commit().await.unwrap_err()));
    assert_eq!(own.get("k").await.unwrap().unwrap(), "new");
    assert_eq!(other.get("k").await.unwrap().unwrap(), "theirs");
    assert!(one.get("x").await.unwrap().is_none());
}
