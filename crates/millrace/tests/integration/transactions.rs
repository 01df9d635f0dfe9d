//! Optimistic transactions: what they see, what conflicts, and that they are serializable.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millrace::{Db, ErrorKind, Options, WriteBatch, blocking};
use proptest::prelude::*;
use tempfile::tempdir;

fn is_conflict(result: millrace::Result<()>) -> bool {
    match result {
        Ok(()) => false,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
            true
        }
    }
}

#[test]
fn a_transaction_reads_its_beginning_and_its_own_writes() {
    let dir = tempdir().unwrap();
    let db = blocking::Db::open(dir.path()).unwrap();
    let family = db.create_column_family("family").unwrap();
    db.put("a", "1").unwrap();
    db.put("b", "2").unwrap();
    let mut transaction = db.transaction().unwrap();
    transaction.put("a", "mine").delete("b").put_in(&family, "a", "there");
    assert_eq!(transaction.get("a").unwrap().unwrap(), "mine");
    assert!(transaction.get("b").unwrap().is_none());
    assert!(transaction.get_in(&family, "b").unwrap().is_none());
    let seen = transaction.multi_get(["b", "a", "c"]).unwrap();
    assert_eq!(seen, [None, Some("mine".into()), None]);
    let seen = transaction.multi_get_in(&family, ["a", "b"]).unwrap();
    assert_eq!(seen, [Some("there".into()), None]);
    assert_eq!(transaction.snapshot().get("a").unwrap().unwrap(), "1");
    // Others do not see it before its commit, nor does it see them.
    assert_eq!(db.get("a").unwrap().unwrap(), "1");
    db.put("d", "new").unwrap();
    assert!(transaction.snapshot().get("d").unwrap().is_none());
    transaction.commit().unwrap();
    assert_eq!(db.get("a").unwrap().unwrap(), "mine");
    assert!(db.get("b").unwrap().is_none());
    assert_eq!(family.get("a").unwrap().unwrap(), "there");
    // One that is dropped has done nothing.
    db.transaction().unwrap().put("a", "dropped");
    assert_eq!(db.get("a").unwrap().unwrap(), "mine");
}

#[test]
fn every_way_to_write_a_key_that_was_read_is_a_conflict() {
    let dir = tempdir().unwrap();
    let options = Options::new().merge_operator(millrace::MergeOperator::UInt64Add);
    let db = blocking::Db::open_with(&options, dir.path()).unwrap();
    let family = db.create_column_family("family").unwrap();
    type Change<'a> = &'a dyn Fn();
    let one = 1_u64.to_le_bytes();
    let batch = || {
        let mut batch = WriteBatch::new();
        batch.put("other", "v").put("key", one);
        db.write(batch).unwrap();
    };
    let transaction = || {
        let mut transaction = db.transaction().unwrap();
        transaction.put("key", one);
        transaction.commit().unwrap();
    };
    let changes: [(Change<'_>, bool); 8] = [
        (&|| db.put("key", one).unwrap(), true),
        (&|| db.delete("key").unwrap(), true),
        (&|| db.delete_range("k".."l").unwrap(), true),
        (&|| db.merge("key", one).unwrap(), true),
        (&batch, true),
        (&transaction, true),
        (&|| db.put("other", one).unwrap(), false),
        (&|| family.put("key", one).unwrap(), false),
    ];
    for (at, (change, conflicts)) in changes.into_iter().enumerate() {
        for absent in [false, true] {
            match absent {
                true => db.delete("key").unwrap(),
                false => db.put("key", one).unwrap(),
            }
            let mut transaction = db.transaction().unwrap();
            assert_eq!(transaction.get("key").unwrap().is_none(), absent);
            transaction.put("result", "v");
            change();
            assert_eq!(is_conflict(transaction.commit()), conflicts, "change {at}");
            assert_eq!(db.get("result").unwrap().is_none(), conflicts, "change {at}");
            db.delete("result").unwrap();
        }
    }
    // What was only written, or only read at the snapshot, may be written by others.
    let mut blind = db.transaction().unwrap();
    blind.snapshot().get("key").unwrap();
    blind.put("key", "mine");
    db.put("key", one).unwrap();
    blind.commit().unwrap();
    assert_eq!(db.get("key").unwrap().unwrap(), "mine");
    // One without writes has nothing that could conflict.
    let mut reads = db.transaction().unwrap();
    assert_eq!(reads.get("key").unwrap().unwrap(), "mine");
    db.put("key", one).unwrap();
    reads.commit().unwrap();
    // What was written before a flush is not known any more.
    let mut old = db.transaction().unwrap();
    assert!(old.get("key").unwrap().is_some());
    old.put("result", "v");
    db.put("other", "v").unwrap();
    db.flush().unwrap();
    assert!(is_conflict(old.commit()));
    // A family that was dropped.
    let mut late = db.transaction().unwrap();
    late.get_in(&family, "key").unwrap();
    late.put("result", "v");
    db.drop_column_family("family").unwrap();
    assert_eq!(late.commit().unwrap_err().kind(), ErrorKind::UnknownColumnFamily);
}

/// What a transaction does: keys that it reads, and of these the ones that it writes.
type Script = Vec<(u8, bool)>;

/// A transaction that was committed: what it read, and what it wrote. A version of a key is its
/// number, counted up by each write, and the transaction that wrote it.
#[derive(Debug)]
struct Committed {
    id: u64,
    read: BTreeMap<u8, (u64, u64)>,
    wrote: Vec<u8>,
}

fn version_of(value: Option<&[u8]>) -> (u64, u64) {
    let Some(value) = value else { return (0, 0) };
    let number = |at: usize| u64::from_le_bytes(value[at..at + 8].try_into().unwrap());
    (number(0), number(8))
}

async fn run(db: Db, script: Script, ids: Arc<AtomicU64>) -> Committed {
    loop {
        let id = ids.fetch_add(1, Ordering::Relaxed);
        let mut transaction = db.transaction().await.unwrap();
        let (mut read, mut wrote) = (BTreeMap::new(), Vec::new());
        for &(key, writes) in &script {
            if wrote.contains(&key) {
                continue;
            }
            let found = transaction.get([key]).await.unwrap();
            let version = version_of(found.as_deref());
            read.insert(key, version);
            if writes {
                let value = [(version.0 + 1).to_le_bytes(), id.to_le_bytes()].concat();
                transaction.put([key], value);
                wrote.push(key);
            }
        }
        if !is_conflict(transaction.commit().await) {
            return Committed { id, read, wrote };
        }
    }
}

/// Whether there is a serial order: no cycle among "wrote the version that was read", "wrote the
/// next version" and "read the version before it".
fn check_serializable(all: &[Committed]) {
    let mut writers = BTreeMap::new();
    for one in all {
        for key in &one.wrote {
            let (number, _) = one.read[key];
            let same = writers.insert((*key, number + 1), one.id);
            assert!(same.is_none(), "{one:?} and transaction {same:?} wrote the same version");
        }
    }
    // The transactions that must come before each.
    let mut before: BTreeMap<u64, Vec<u64>> = all.iter().map(|one| (one.id, vec![])).collect();
    for one in all {
        for (key, (number, writer)) in &one.read {
            if *number > 0 {
                assert_eq!(writers.get(&(*key, *number)), Some(writer), "{one:?} read a ghost");
                before.get_mut(&one.id).unwrap().push(*writer);
            }
            if let Some(next) = writers.get(&(*key, number + 1))
                && *next != one.id
            {
                before.get_mut(next).unwrap().push(one.id);
            }
        }
    }
    while !before.is_empty() {
        let free: Vec<u64> = before
            .iter()
            .filter(|(_, earlier)| earlier.iter().all(|id| !before.contains_key(id)))
            .map(|(id, _)| *id)
            .collect();
        assert!(!free.is_empty(), "a cycle among the transactions {:?}", before.keys());
        for id in free {
            before.remove(&id);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, max_shrink_iters: 8, ..ProptestConfig::default() })]

    #[test]
    fn transactions_of_many_tasks_are_serializable(
        cores in 1_usize..3,
        scripts in prop::collection::vec(prop::collection::vec((0_u8..6, any::<bool>()), 1..5), 200),
    ) {
        let dir = tempdir().unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().enable_time().build().unwrap();
        let committed = runtime.block_on(async {
            let options = Options::new()
                .cores(cores)
                .memory(64 << 20)
                .durability(millrace::Durability::Process);
            let db = options.open(dir.path()).await.unwrap();
            let ids = Arc::new(AtomicU64::new(1));
            let tasks: Vec<_> = scripts
                .into_iter()
                .map(|script| tokio::spawn(run(db.clone(), script, ids.clone())))
                .collect();
            for _ in 0..5 {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
                db.flush().await.unwrap();
            }
            let mut committed = Vec::new();
            for task in tasks {
                committed.push(task.await.unwrap());
            }
            committed
        });
        check_serializable(&committed);
    }
}
