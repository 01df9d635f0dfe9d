//! The database against a sorted map, through the asynchronous calls of 1,000 tasks.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace::{Db, Options, WriteBatch};
use proptest::prelude::*;
use tempfile::tempdir;

/// What a task does to its own keys.
#[derive(Clone, Debug)]
enum Step {
    Put(u8, u16),
    Delete(u8),
    DeleteRange(u8, u8),
    Batch(Vec<(u8, Option<u16>)>),
    Get(u8),
    MultiGet(Vec<u8>),
    Range(u8, u8, bool),
    AtSnapshot(u8, u16),
    Flush,
    Compact,
}

fn step() -> impl Strategy<Value = Step> {
    let key = 0_u8..20;
    prop_oneof![
        10 => (key.clone(), any::<u16>()).prop_map(|(k, v)| Step::Put(k, v)),
        4 => key.clone().prop_map(Step::Delete),
        2 => (key.clone(), key.clone()).prop_map(|(a, b)| Step::DeleteRange(a.min(b), a.max(b))),
        3 => prop::collection::vec((key.clone(), any::<Option<u16>>()), 0..6).prop_map(Step::Batch),
        8 => key.clone().prop_map(Step::Get),
        3 => prop::collection::vec(key.clone(), 0..6).prop_map(Step::MultiGet),
        4 => (key.clone(), key.clone(), any::<bool>()).prop_map(|(a, b, r)| Step::Range(a, b, r)),
        2 => (key, any::<u16>()).prop_map(|(k, v)| Step::AtSnapshot(k, v)),
        1 => Just(Step::Flush),
        1 => Just(Step::Compact),
    ]
}

/// A task's own key: tasks share the database, not the keys.
fn key(task: u32, key: u8) -> Vec<u8> {
    format!("{task:04}/{key:02}").into_bytes()
}

type Map = BTreeMap<u8, u16>;

async fn run(db: Db, task: u32, steps: Vec<Step>) -> Map {
    let mut map = Map::new();
    let bytes = |value: u16| vec![value as u8; usize::from(value % 300)];
    let same = |found: Option<millrace::Value>, value: Option<&u16>| {
        assert_eq!(found.as_deref(), value.map(|&value| bytes(value)).as_deref());
    };
    for step in steps {
        match step {
            Step::Put(k, v) => {
                db.put(key(task, k), bytes(v)).await.unwrap();
                map.insert(k, v);
            }
            Step::Delete(k) => {
                db.delete(key(task, k)).await.unwrap();
                map.remove(&k);
            }
            Step::DeleteRange(a, b) => {
                db.delete_range(key(task, a)..key(task, b)).await.unwrap();
                map.retain(|k, _| !(a..b).contains(k));
            }
            Step::Batch(writes) => {
                let mut batch = WriteBatch::new();
                for (k, v) in writes {
                    match v {
                        Some(v) => {
                            batch.put(key(task, k), bytes(v));
                            map.insert(k, v);
                        }
                        None => {
                            batch.delete(key(task, k));
                            map.remove(&k);
                        }
                    }
                }
                db.write(batch).await.unwrap();
            }
            Step::Get(k) => same(db.get(key(task, k)).await.unwrap(), map.get(&k)),
            Step::MultiGet(keys) => {
                let found = db.multi_get(keys.iter().map(|&k| key(task, k))).await.unwrap();
                for (k, found) in keys.iter().zip(found) {
                    same(found, map.get(k));
                }
            }
            Step::Range(a, b, reverse) => {
                let range = db.range(key(task, a)..key(task, b));
                let mut range = if reverse { range.rev() } else { range };
                let mut expected: Vec<_> = map.iter().filter(|(k, _)| (a..b).contains(k)).collect();
                if reverse {
                    expected.reverse();
                }
                for (&k, v) in expected {
                    let (found, value) = range.next().await.unwrap().unwrap();
                    assert_eq!(found, key(task, k));
                    same(Some(value), Some(v));
                }
                assert!(range.next().await.is_none());
            }
            Step::AtSnapshot(k, v) => {
                let snapshot = db.snapshot().await.unwrap();
                db.put(key(task, k), bytes(v)).await.unwrap();
                same(snapshot.get(key(task, k)).await.unwrap(), map.get(&k));
                map.insert(k, v);
            }
            // Few tasks: each of these is work for everybody.
            Step::Flush if task.is_multiple_of(50) => db.flush().await.unwrap(),
            Step::Compact if task.is_multiple_of(100) => db.compact_range(..).await.unwrap(),
            Step::Flush | Step::Compact => {}
        }
    }
    map
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, max_shrink_iters: 8, ..ProptestConfig::default() })]

    #[test]
    fn a_thousand_tasks_see_their_writes(
        cores in 1_usize..3,
        scripts in prop::collection::vec(prop::collection::vec(step(), 1..25), 40),
    ) {
        let scripts = Arc::new(scripts);
        let dir = tempdir().unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
        runtime.block_on(async {
            let options = Options::new().cores(cores).memory(64 << 20);
            let db = options.open(dir.path()).await.unwrap();
            let tasks: Vec<_> = (0..1000_u32)
                .map(|task| {
                    let steps = scripts[task as usize % scripts.len()].clone();
                    tokio::spawn(run(db.clone(), task, steps))
                })
                .collect();
            let mut maps = Vec::new();
            for task in tasks {
                maps.push(task.await.unwrap());
            }
            assert!(db.stats().gets_by_caller > 0, "no get was answered by its own thread");
            db.close().await.unwrap();
            // Everything is there after the next opening, and nothing else.
            let db = options.open(dir.path()).await.unwrap();
            let mut range = db.range(..);
            for (task, map) in (0..).zip(&maps) {
                for &k in map.keys() {
                    assert_eq!(range.next().await.unwrap().unwrap().0, key(task, k));
                }
            }
            assert!(range.next().await.is_none());
        });
    }
}
