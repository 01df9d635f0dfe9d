//! Futures that are dropped at each of their awaits, or between any two of them.

use std::future::Future;
use std::pin::Pin;

use futures_lite::future::poll_once;
use millrace::{Db, Options, WriteBatch};
use tempfile::tempdir;

fn assert_send<T: Send>(value: T) -> T {
    value
}

#[test]
fn handles_and_futures_go_to_other_threads() {
    fn is_shared<T: Send + Sync + 'static>() {}
    is_shared::<Db>();
    is_shared::<millrace::ColumnFamily>();
    is_shared::<millrace::Snapshot>();
    is_shared::<millrace::Value>();
    is_shared::<millrace::Error>();
    is_shared::<millrace::WriteBatch>();
    is_shared::<millrace::blocking::Db>();
    is_shared::<millrace::Transaction>();
    fn is_sent<T: Send + 'static>() {}
    is_sent::<millrace::Range>();
    is_sent::<millrace::blocking::Range>();
    let _unused = |db: Db| {
        drop(assert_send(db.get("k")));
        drop(assert_send(db.put("k", "v")));
        drop(assert_send(db.snapshot()));
        drop(assert_send(db.multi_get(["k"])));
        drop(assert_send(db.close()));
        drop(assert_send(Db::open("x")));
    };
}

type Call<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// One call of each kind.
fn calls<'a>(db: &'a Db, dir: &'a std::path::Path, n: u32) -> Vec<Call<'a>> {
    let key = n.to_be_bytes();
    vec![
        Box::pin(async move { drop(db.get("there").await) }),
        Box::pin(async move { drop(db.get(key).await) }),
        Box::pin(async move { drop(db.multi_get(["there", "not"]).await) }),
        Box::pin(async move { drop(db.put(key, "v").await) }),
        Box::pin(async move { drop(db.delete(key).await) }),
        Box::pin(async move { drop(db.delete_range(key..key).await) }),
        Box::pin(async move {
            let mut batch = WriteBatch::new();
            batch.put(key, vec![1; 10_000]);
            drop(db.write(batch).await);
        }),
        Box::pin(async move {
            let snapshot = db.snapshot().await.unwrap();
            drop(snapshot.get("there").await);
            drop(snapshot.range(..).rev().next().await);
        }),
        Box::pin(async move {
            let mut range = db.range(..);
            for _ in 0..100 {
                drop(range.next().await);
            }
        }),
        Box::pin(async move {
            let mut transaction = db.transaction().await.unwrap();
            drop(transaction.get("there").await);
            transaction.put(key, "v");
            drop(transaction.commit().await);
        }),
        Box::pin(async move { drop(db.column_families().await) }),
        Box::pin(async move { drop(db.column_family("default").await) }),
        Box::pin(async move {
            let name = format!("family{n}");
            drop(db.create_column_family(&name).await);
            drop(db.drop_column_family(&name).await);
        }),
        Box::pin(async move { drop(db.sync().await) }),
        Box::pin(async move { drop(db.flush().await) }),
        Box::pin(async move { drop(db.compact_range(..).await) }),
        Box::pin(async move { drop(db.checkpoint(dir.join(format!("copy{n}"))).await) }),
    ]
}

/// Each kind of call is dropped after 0, 1, 2, ... polls, with pauses in which the core goes on.
/// Afterwards nothing is held: all snapshots that the cores can hold can be taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_future_may_be_dropped_after_any_poll() {
    let (dir, copies) = (tempdir().unwrap(), tempdir().unwrap());
    let db = Options::new().memory(32 << 20).open(dir.path()).await.unwrap();
    db.put("there", "v").await.unwrap();
    for n in 0..500_u32 {
        db.put(n.to_be_bytes(), "v").await.unwrap();
    }
    let kinds = calls(&db, copies.path(), 0).len();
    for polls in 0..8 {
        for kind in 0..kinds {
            let n = 1000 + polls * 100 + kind as u32;
            let mut call = calls(&db, copies.path(), n).swap_remove(kind);
            for poll in 0..polls {
                if poll_once(&mut call).await.is_some() {
                    break;
                }
                match poll % 2 {
                    0 => tokio::task::yield_now().await,
                    _ => tokio::time::sleep(std::time::Duration::from_micros(300)).await,
                }
            }
        }
    }
    let mut held = Vec::new();
    for _ in 0..1000 {
        held.push(db.snapshot().await.unwrap());
    }
    assert_eq!(db.get("there").await.unwrap().unwrap(), "v");
    drop(held);
    db.close().await.unwrap();
}

#[tokio::test]
async fn an_opening_may_be_dropped() {
    let dir = tempdir().unwrap();
    for polls in 0..6 {
        let mut opening = Box::pin(Db::open(dir.path()));
        for _ in 0..polls {
            if poll_once(&mut opening).await.is_some() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        drop(opening);
    }
    // Those that go on without their caller close themselves.
    let deadline = std::time::Duration::from_secs(20);
    let opened = tokio::time::timeout(deadline, async {
        loop {
            match Db::open(dir.path()).await {
                Ok(db) => return db,
                Err(error) => assert_eq!(error.kind(), millrace::ErrorKind::Locked),
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    });
    opened.await.unwrap().put("k", "v").await.unwrap();
}

/// Callers beyond the bound wait, and may give up while they do.
#[tokio::test]
async fn callers_that_wait_for_room_may_give_up() {
    let dir = tempdir().unwrap();
    let db = Db::open(dir.path()).await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..5000_u32 {
        let mut get = Box::pin(db.get(n.to_be_bytes()));
        if poll_once(&mut get).await.is_none() {
            waiting.push(get);
        }
    }
    // Each second one, among them many that wait for room.
    let left = waiting.into_iter().step_by(2);
    for get in left {
        assert!(get.await.unwrap().is_none());
    }
}
