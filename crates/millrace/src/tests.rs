//! Ends that a user's program cannot bring about, or not without `unsafe`.

use reactor::testing::in_forked_child;
use tempfile::tempdir;

use crate::blocking::{self, block_on};
use crate::{Db, ErrorKind, Options};

/// Whichever thread panics, and wherever: calls that wait get an error, and so do all later ones.
/// The database can be opened again, with all that was acknowledged.
#[test]
fn a_panic_of_a_thread_reaches_all_callers() {
    let dir = tempdir().unwrap();
    let mut round = 0_u32;
    for core in [0, 1] {
        for in_task in [false, true] {
            round += 1;
            let options = Options::new().cores(2).memory(64 << 20);
            let db = blocking::Db::open_with(&options, dir.path()).unwrap();
            let same: Db = db.clone().into();
            db.put(round.to_be_bytes(), "v").unwrap();
            let error = block_on(same.engine().panic(core, in_task)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Panicked, "{error}");
            // The other core may still answer for a moment, reads or writes.
            let later = (0..).find_map(|n: u32| db.get(n.to_be_bytes()).err()).unwrap();
            assert_eq!(later.kind(), ErrorKind::Panicked, "{later}");
            let later = (0..).find_map(|_: u32| db.put("k", "v").err()).unwrap();
            assert_eq!(later.kind(), ErrorKind::Panicked, "{later}");
            let end = db.close().unwrap_err();
            assert_eq!(end.kind(), ErrorKind::Panicked);
            assert!(end.to_string().contains("on purpose"), "{end}");
        }
    }
    let db = blocking::Db::open(dir.path()).unwrap();
    for n in 1..=round {
        assert_eq!(db.get(n.to_be_bytes()).unwrap().unwrap(), "v");
    }
}

/// Dropping the last handle in the child must not release the parent's lock, which it inherits.
#[test]
fn a_forked_child_that_drops_all_handles_leaves_the_lock() {
    let dir = tempdir().unwrap();
    let db = blocking::Db::open(dir.path()).unwrap();
    db.put("key", "value").unwrap();
    let path = dir.path().to_owned();
    let mut handle = Some(db);
    let slot = &mut handle;
    let checked = in_forked_child(move || {
        drop(slot.take());
        let elsewhere = tempdir().unwrap();
        // Opening another database drops what this process still knows of the parent's.
        let other = blocking::Db::open(elsewhere.path()).unwrap();
        let locked = blocking::Db::open(&path).unwrap_err().kind() == ErrorKind::Locked;
        other.close().unwrap();
        locked
    });
    assert!(checked);
    let db = handle.unwrap();
    assert_eq!(db.get("key").unwrap().unwrap(), "value");
    let again = blocking::Db::open(dir.path()).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::Locked);
    db.close().unwrap();
}

/// The child has the handles and not the threads. It must not wait for these, nor disturb its
/// parent, also when it drops the handles.
#[test]
fn a_forked_child_gets_errors_and_harms_nothing() {
    let dir = tempdir().unwrap();
    let db = blocking::Db::open(dir.path()).unwrap();
    db.put("key", "value").unwrap();
    let snapshot = db.snapshot().unwrap();
    let copy = db.clone();
    let checked = in_forked_child(move || {
        let is = |error: crate::Error, kind| error.kind() == kind;
        let refused = is(copy.get("key").unwrap_err(), ErrorKind::Closed)
            && is(copy.put("key", "child").unwrap_err(), ErrorKind::Closed)
            && is(snapshot.get("key").unwrap_err(), ErrorKind::Closed)
            && is(copy.close().unwrap_err(), ErrorKind::Closed)
            && is(blocking::Db::open(dir_of(&copy)).unwrap_err(), ErrorKind::Locked);
        drop((snapshot, copy));
        refused
    });
    assert!(checked);
    assert_eq!(db.get("key").unwrap().unwrap(), "value");
    db.put("key", "parent").unwrap();
    assert_eq!(db.get("key").unwrap().unwrap(), "parent");
    db.close().unwrap();
}

fn dir_of(db: &blocking::Db) -> std::path::PathBuf {
    db.path().to_owned()
}
