//! How a database ends: closed, dropped in any order, by a thread that ends, by a fork, a kill or
//! a panic.

use std::process::{Command, Stdio};

use millrace::{Db, ErrorKind, Options, blocking};
use tempfile::tempdir;

#[tokio::test]
async fn everything_may_be_dropped_in_any_order() {
    let dir = tempdir().unwrap();
    for order in 0..24_usize {
        let db = Db::open(dir.path()).await.unwrap();
        let family = match db.column_family("family").await {
            Ok(family) => family,
            Err(_) => db.create_column_family("family").await.unwrap(),
        };
        for n in 0..200_u32 {
            family.put(n.to_be_bytes(), "v").await.unwrap();
        }
        let snapshot = db.snapshot().await.unwrap();
        let mut range = snapshot.range_in(&family, ..);
        assert!(range.next().await.is_some());
        let mut all: Vec<Option<Box<dyn std::any::Any>>> = vec![
            Some(Box::new(db)),
            Some(Box::new(family)),
            Some(Box::new(snapshot)),
            Some(Box::new(range)),
        ];
        // Each permutation once, by its number.
        for left in (1..=4).rev() {
            let at = (order / [0, 1, 1, 2, 6][left]) % left;
            let mut present = all.iter_mut().filter(|one| one.is_some());
            *present.nth(at).unwrap() = None;
        }
    }
    Db::open(dir.path()).await.unwrap().close().await.unwrap();
}

#[tokio::test]
async fn a_closed_database_refuses_and_can_be_opened_again() {
    let dir = tempdir().unwrap();
    for n in 0..5_u32 {
        let db = Db::open(dir.path()).await.unwrap();
        assert_eq!(db.range(..).next().await.is_some(), n > 0);
        db.put(n.to_be_bytes(), "v").await.unwrap();
        let (snapshot, mut range) = (db.snapshot().await.unwrap(), db.range(..));
        let late = db.clone();
        let (first, second) = tokio::join!(db.close(), late.close());
        first.unwrap();
        second.unwrap();
        let closed = |error: millrace::Error| assert_eq!(error.kind(), ErrorKind::Closed);
        closed(late.get("k").await.unwrap_err());
        closed(late.put("k", "v").await.unwrap_err());
        closed(late.flush().await.unwrap_err());
        closed(snapshot.get("k").await.unwrap_err());
        closed(range.next().await.unwrap().unwrap_err());
        assert!(range.next().await.is_none());
    }
    let db = Db::open(dir.path()).await.unwrap();
    for n in 0..5_u32 {
        assert_eq!(db.get(n.to_be_bytes()).await.unwrap().unwrap(), "v");
    }
}

/// Without waiting for the end of the one that was dropped.
#[tokio::test]
async fn a_database_that_is_being_closed_is_opened_after_its_end() {
    let dir = tempdir().unwrap();
    for n in 0..10_u32 {
        let db = Db::open(dir.path()).await.unwrap();
        db.put(n.to_be_bytes(), "v").await.unwrap();
        // Also in the middle of a call, unless a core answers before the caller looks.
        let mut put = Box::pin(db.put("x", "y"));
        let _begun = futures_lite::future::poll_once(&mut put).await;
        drop(put);
    }
    let db = Db::open(dir.path()).await.unwrap();
    assert_eq!(db.get("x").await.unwrap().unwrap(), "y");
}

#[test]
fn threads_may_end_before_their_calls() {
    let dir = tempdir().unwrap();
    let db = blocking::Db::open(dir.path()).unwrap();
    for n in 0..50_u32 {
        let db: Db = db.clone().into();
        std::thread::spawn(move || {
            // An executor that ends with its thread, in the middle of a call.
            futures_lite::future::block_on(async {
                let mut put = Box::pin(db.put(n.to_be_bytes(), "v"));
                let _begun = futures_lite::future::poll_once(&mut put).await;
            });
        })
        .join()
        .unwrap();
    }
    // What was begun goes on, in its order.
    db.put("last", "v").unwrap();
    assert_eq!(db.range(..).count(), 51);
}

#[test]
fn one_process_at_a_time() {
    let dir = tempdir().unwrap();
    let db = blocking::Db::open(dir.path()).unwrap();
    db.put("key", "value").unwrap();
    let open_elsewhere = || run_child("child_opens", dir.path()).output().unwrap();
    let output = open_elsewhere();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("Locked") && text.contains("another process"), "{text}");
    let again = blocking::Db::open(dir.path()).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::Locked);
    db.close().unwrap();
    let output = open_elsewhere();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("value"), "{text}");
}

/// The test of this program with a name, as a process of its own, on a directory.
fn run_child(name: &str, dir: &std::path::Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", &format!("ends::{name}"), "--ignored", "--nocapture"])
        .env("MILLRACE_CHILD_DIR", dir)
        .stderr(Stdio::null());
    command
}

fn child_dir() -> std::path::PathBuf {
    std::env::var_os("MILLRACE_CHILD_DIR").expect("started by another test").into()
}

#[test]
#[ignore = "a process that another test starts"]
fn child_opens() {
    match blocking::Db::open(child_dir()) {
        Ok(db) => println!("{:?}", db.get("key").unwrap()),
        Err(error) => println!("{error:?}"),
    }
}

/// Descriptors of this process. Its threads are gone then, with rings and memory.
#[test]
#[ignore = "a process that another test starts"]
fn child_opens_often() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut counts = Vec::new();
    for n in 0..8_u32 {
        let db = blocking::Db::open(child_dir()).unwrap();
        db.put(n.to_be_bytes(), "v").unwrap();
        let (snapshot, mut range) = (db.snapshot().unwrap(), db.range(..));
        assert!(range.next().is_some());
        if n % 2 == 0 {
            db.close().unwrap();
        }
        drop((range, snapshot, db));
        // A thread of the reactor closes files, some after the end.
        let settled = || n < 2 || descriptors() <= counts[1];
        for _ in 0..500 {
            if settled() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        counts.push(descriptors());
    }
    println!(
        "descriptors: {} {counts:?}",
        if counts[7] <= counts[1] { "as before" } else { "leaked" }
    );
}

#[test]
fn a_closed_database_leaves_nothing_open() {
    let dir = tempdir().unwrap();
    let output = run_child("child_opens_often", dir.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("descriptors: as before"), "{text}");
}

#[test]
#[ignore = "a process that another test starts, and kills"]
fn child_writes_until_it_is_killed() {
    use std::io::Write;
    let options = Options::new().durability(millrace::Durability::Process);
    let db = blocking::Db::open_with(&options, child_dir()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let db = &db;
            scope.spawn(move || {
                for n in 0_u32.. {
                    let key = [thread.to_be_bytes(), n.to_be_bytes()].concat();
                    db.put(key, n.to_le_bytes()).unwrap();
                    // One write of a whole line.
                    let line = format!("acknowledged {thread} {n}\n");
                    std::io::stdout().write_all(line.as_bytes()).unwrap();
                }
            });
        }
    });
}

#[test]
fn a_kill_loses_no_acknowledged_write() {
    use std::io::{BufRead, BufReader};
    let dir = tempdir().unwrap();
    for round in 1..=3 {
        let mut child = run_child("child_writes_until_it_is_killed", dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut acknowledged = [None; 4];
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut seen = 0;
        for line in lines {
            // The last line may be cut.
            let Ok(line) = line else { break };
            let Some((_, told)) = line.split_once("acknowledged ") else { continue };
            let Some((thread, n)) = told.split_once(' ') else { continue };
            if let (Ok(thread), Ok(n)) = (thread.parse::<usize>(), n.parse::<u32>()) {
                let newest = &mut acknowledged[thread];
                *newest = Some(n.max(newest.unwrap_or(0)));
                seen += 1;
                if seen == 500 * round {
                    child.kill().unwrap();
                }
            }
        }
        child.wait().unwrap();
        assert!(seen >= 500 * round);
        let db = blocking::Db::open(dir.path()).unwrap();
        for (thread, newest) in (0_u32..).zip(acknowledged) {
            for n in 0..=newest.unwrap_or(0) {
                let key = [thread.to_be_bytes(), n.to_be_bytes()].concat();
                let value = db.get(key).unwrap();
                assert_eq!(value.as_deref(), Some(&n.to_le_bytes()[..]), "{thread} {n}");
            }
        }
        db.delete_range([0; 8]..[255; 8]).unwrap();
    }
}

#[tokio::test]
async fn an_opening_that_was_given_up_delays_the_next_one() {
    let dir = tempdir().unwrap();
    Db::open(dir.path()).await.unwrap().close().await.unwrap();
    for _ in 0..20 {
        let mut opening = Box::pin(Db::open(dir.path()));
        assert!(futures_lite::future::poll_once(&mut opening).await.is_none());
        drop(opening);
        Db::open(dir.path()).await.unwrap().close().await.unwrap();
    }
}
