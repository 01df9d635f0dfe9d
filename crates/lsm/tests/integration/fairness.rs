//! Walks over memtables let other tasks run.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;

use lsm::{BatchWriter, Db, Durability, Iter, IterOptions, OpenOptions, WriteOptions, Writer};
use reactor::{Class, Core, RuntimeConfig};

/// Entries that a walk passes over.
const MANY: u64 = 100_000;
/// How often another task must run meanwhile.
const TURNS: u64 = 10;

fn key(n: u64) -> Vec<u8> {
    format!("key{n:08}").into_bytes()
}

/// How often another task of the core ran while `work` did.
async fn turns<T>(core: &Core, work: impl Future<Output = T>) -> (u64, T) {
    let (count, ended) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
    let (counts, ends, other) = (count.clone(), ended.clone(), core.clone());
    let task = core.spawn(Class::Foreground, async move {
        while !ends.get() {
            counts.set(counts.get() + 1);
            other.yield_now().await;
        }
    });
    core.yield_now().await;
    let before = count.get();
    let result = work.await;
    let turns = count.get() - before;
    ended.set(true);
    task.await;
    (turns, result)
}

async fn is_fair(core: &Core, what: &str, work: impl Future<Output = lsm::Result<()>>) {
    let (turns, result) = turns(core, work).await;
    result.unwrap();
    assert!(turns >= TURNS, "another task ran {turns} times during {what}");
}

async fn fill(writer: &Writer, put: impl Fn(&mut BatchWriter, u64)) {
    for first in (0..MANY).step_by(1_000) {
        let mut batch = BatchWriter::new();
        (first..first + 1_000).for_each(|n| put(&mut batch, n));
        writer.write(batch).await.unwrap();
    }
}

/// Walks over a database that has tombstones only, in both directions and from the middle.
async fn walk_tombstones(core: &Core, db: &Db) {
    let reader = db.attach(core);
    let mut iter: Iter = reader.iter(0, IterOptions::default()).unwrap();
    is_fair(core, "seek_to_first", iter.seek_to_first()).await;
    assert!(!iter.valid());
    is_fair(core, "seek_to_last", iter.seek_to_last()).await;
    assert!(!iter.valid());
    let middle = key(MANY / 2);
    is_fair(core, "seek", iter.seek(&middle)).await;
    is_fair(core, "seek_for_prev", iter.seek_for_prev(&middle)).await;
    assert!(!iter.valid());
}

async fn main(core: Core) {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fairness");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    let options = WriteOptions {
        durability: Durability::Process,
        memtable_bytes: 1 << 30,
        ..WriteOptions::default()
    };
    let open = || Db::open_for_writing(&core, &dir, OpenOptions::default(), options.clone());
    let (db, writer) = open().await.unwrap();
    fill(&writer, |batch, n| batch.delete(0, &key(n))).await;
    walk_tombstones(&core, &db).await;
    writer.close().await.unwrap();
    drop((db, writer));
    // The same, recovered from the log.
    let db = Db::open(&core, &dir, OpenOptions::default()).await.unwrap();
    walk_tombstones(&core, &db).await;
    drop(db);

    // One key with many versions, of which a snapshot sees the first.
    std::fs::remove_dir_all(&dir).unwrap();
    std::fs::create_dir_all(&dir).unwrap();
    let (db, writer) = open().await.unwrap();
    writer.put(b"a", b"first").await.unwrap();
    writer.put(b"k", b"first").await.unwrap();
    writer.put(b"z", b"first").await.unwrap();
    let reader = db.attach(&core);
    let snapshot = reader.snapshot().unwrap();
    fill(&writer, |batch, n| batch.put(0, b"k", &n.to_le_bytes())).await;
    let old = IterOptions { snapshot: Some(&snapshot), ..IterOptions::default() };
    let mut iter = reader.iter(0, old).unwrap();
    is_fair(&core, "seek among versions", iter.seek(b"b")).await;
    assert_eq!((iter.key(), iter.value()), (&b"k"[..], &b"first"[..]));
    is_fair(&core, "prev after them", async {
        iter.seek(b"z").await?;
        iter.prev().await
    })
    .await;
    assert_eq!((iter.key(), iter.value()), (&b"k"[..], &b"first"[..]));
    let mut iter = reader.iter(0, IterOptions::default()).unwrap();
    is_fair(&core, "backward among versions", iter.seek_for_prev(b"y")).await;
    assert_eq!((iter.key(), iter.value()), (&b"k"[..], &(MANY - 1).to_le_bytes()[..]));
    is_fair(&core, "a turn behind them", async {
        iter.seek(b"k").await?;
        iter.next().await
    })
    .await;
    assert_eq!(iter.key(), b"z");
    drop(iter);
    // A lookup finds its version directly, however many there are.
    let found = reader.get(0, b"k", Some(&snapshot)).await.unwrap();
    assert_eq!(found.as_deref(), Some(&b"first"[..]));
    drop(snapshot);
    writer.close().await.unwrap();
}

#[test]
fn walks_over_memtables_let_other_tasks_run() {
    let config = RuntimeConfig {
        processors: reactor::processors()[..1].to_vec(),
        memory: 64 << 20,
        ..RuntimeConfig::default()
    };
    reactor::run(&config, main).expect("the runtime starts");
}
