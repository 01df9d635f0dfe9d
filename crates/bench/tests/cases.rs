//! Each case for a moment on a small database that db_bench makes: the benchmarks work, and they
//! count what the database has.

use std::path::{Path, PathBuf};
use std::process::Command;

use bench::{Case, Durability, Outcome, Plan, Workload, WritePlan};
use reactor::{DriverKind, PollMode};

const KEYS: u64 = 5000;

/// A database, removed on drop.
struct Database(PathBuf);

impl Database {
    fn make(name: &str) -> Database {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = std::fs::remove_dir_all(&dir);
        let output = Command::new("db_bench")
            .arg(format!("--db={}", dir.display()))
            .arg(format!("--num={KEYS}"))
            .args(["--benchmarks=fillseq,compact", "--value_size=1000", "--bloom_bits=10"])
            .args(["--compression_type=none", "--block_size=4096"])
            .output()
            .expect("db_bench runs: apt-get install rocksdb-tools");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Database(dir)
    }

    fn plan(&self, case: Case) -> Plan {
        Plan {
            case,
            data: self.0.clone(),
            processors: reactor::processors().into_iter().take(1).collect(),
            depth: case.depth_default(),
            seconds: 0.1,
            memory_bytes: None,
            cached: false,
            batch: 64,
            nexts: 50,
            reverse: false,
            absent: false,
            mix: Workload::reads_and_writes(10),
            keys: None,
            write: WritePlan::default(),
            poll: PollMode::Adaptive,
            driver: DriverKind::Auto,
            secondary: false,
        }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn check(outcome: &Outcome) {
    assert!(outcome.operations > 0, "{outcome:?}");
    assert_eq!(outcome.found, Some(outcome.operations), "every key is found: {outcome:?}");
    assert_eq!(outcome.keys, KEYS);
    assert!(outcome.p50_us > 0.0 && outcome.p50_us <= outcome.p999_us, "{outcome:?}");
    assert!(outcome.cpu_us_per_op > 0.0, "{outcome:?}");
}

#[test]
fn every_case_finds_every_key_it_requests() {
    let database = Database::make("bench-cases");
    for case in Case::ALL.into_iter().filter(|case| case.reads() && !case.writes()) {
        let outcome = bench::run(&database.plan(case)).expect("the database can be read");
        check(&outcome);
        assert!(outcome.bytes_per_io.is_some_and(|bytes| bytes >= 512.0), "{outcome:?}");
        assert_eq!(outcome.entries_per_second.is_some(), case.scans());
    }
    let backwards = Plan { reverse: true, ..database.plan(Case::SeekRandom) };
    check(&bench::run(&backwards).expect("the database can be read"));
}

#[test]
fn cached_blocks_are_not_read_again_on_any_core() {
    let database = Database::make("bench-cached");
    let cached = Plan {
        processors: reactor::processors().into_iter().take(2).collect(),
        memory_bytes: Some(256 << 20),
        cached: true,
        ..database.plan(Case::ReadRandom)
    };
    let outcome = bench::run(&cached).expect("the database can be read");
    check(&outcome);
    assert_eq!(outcome.bytes_per_io, None, "nothing was read from the disk: {outcome:?}");
}

#[test]
fn writes_are_counted_and_can_be_read() {
    let database = Database::make("bench-writes");
    let write = |durability| WritePlan { durability, writers: 4, ..WritePlan::default() };
    let fill = Plan {
        data: database.0.join("new"),
        keys: Some(100),
        write: WritePlan { num: Some(5000), ..write(Durability::Process) },
        ..database.plan(Case::FillRandom)
    };
    let outcome = bench::run(&fill).expect("a new database is made");
    assert_eq!((outcome.operations, outcome.found), (5000, None), "{outcome:?}");
    let written = outcome.write_amplification.expect("it was written");
    assert!(written > 1.0, "the log has every byte: {outcome:?}");
    assert!(outcome.max_stall_ms.is_some_and(|ms| ms > 0.0), "{outcome:?}");
    assert_eq!(outcome.flush_us, None);
    let read = Plan { data: fill.data.clone(), keys: Some(100), ..database.plan(Case::ReadRandom) };
    let outcome = bench::run(&read).expect("it can be read");
    assert_eq!(
        outcome.found,
        Some(outcome.operations),
        "each of the 100 keys was set: {outcome:?}"
    );
    let again = bench::run(&fill).expect_err("there is a database now");
    assert_eq!(again.kind(), node::Kind::Usage);

    // Name the number of keys: an overwritten entry counts as a key until it is compacted.
    let some = |case| Plan { keys: Some(KEYS), ..database.plan(case) };
    let overwrite = Plan { write: write(Durability::Power), ..some(Case::Overwrite) };
    let outcome = bench::run(&overwrite).expect("the database can be written");
    assert!(outcome.syncs.is_some_and(|syncs| syncs > 0), "{outcome:?}");
    assert!(outcome.flush_us.is_some_and(|us| us > 0.1), "{outcome:?}");
    check(&bench::run(&some(Case::ReadRandom)).expect("it can be read again"));
}

#[test]
fn a_bulk_load_can_be_read() {
    let database = Database::make("bench-load");
    let fill =
        Plan { data: database.0.join("new"), keys: Some(KEYS), ..database.plan(Case::FillSeq) };
    let outcome = bench::run(&fill).expect("a new database is made");
    assert_eq!((outcome.operations, outcome.max_stall_ms), (KEYS, None), "{outcome:?}");
    let written = outcome.write_amplification.expect("it was written");
    assert!((1.0..1.5).contains(&written), "every byte goes to the disk once: {outcome:?}");
    check(&bench::run(&Plan { data: fill.data, ..database.plan(Case::ReadRandom) }).unwrap());
}

#[test]
fn reads_beside_writes_find_every_key() {
    let database = Database::make("bench-both");
    let plan = Plan {
        processors: reactor::processors().into_iter().take(2).collect(),
        write: WritePlan { rate: Some(500.0), num: Some(20), ..WritePlan::default() },
        ..database.plan(Case::ReadWhileWriting)
    };
    let outcome = bench::run(&plan).expect("the database can be read and written");
    check(&outcome);
    assert!(outcome.writes_per_second.is_some_and(|rate| rate > 0.0), "{outcome:?}");
}

#[test]
fn reads_and_writes_take_turns_and_run_together() {
    let database = Database::make("bench-beside");
    let plan = Plan { keys: Some(KEYS), ..database.plan(Case::Beside) };
    let plan = Plan { write: WritePlan { num: Some(200), ..plan.write.clone() }, ..plan };
    let outcome = bench::run_beside(&plan, 1).expect("the database can be read and written");
    assert_eq!(outcome.lines.len(), 3);
    for line in &outcome.lines {
        let reads = [line.reads_per_second, line.read_mean_us, line.read_p99_us];
        let writes = [line.writes_per_second, line.write_mean_us, line.write_p99_us];
        assert!(reads.iter().all(|figure| figure.is_some() == (line.load != "writes")), "{line:?}");
        assert!(writes.iter().all(|figure| figure.is_some() == (line.load != "reads")), "{line:?}");
        assert!(reads.iter().chain(&writes).flatten().all(|figure| *figure > 0.0), "{line:?}");
    }
    assert!(outcome.reads_ratio > 0.0 && outcome.write_latency_ratio > 0.0, "{outcome:?}");
    assert_eq!(outcome.text().lines().count(), 2 + 3 + 1);
}

#[test]
fn absent_keys_are_not_found() {
    let database = Database::make("bench-absent");
    let absent = Plan { absent: true, ..database.plan(Case::ReadRandom) };
    let outcome = bench::run(&absent).expect("the database can be read");
    assert!(outcome.operations > 0 && outcome.absent, "{outcome:?}");
    assert_eq!((outcome.found, outcome.returned_bytes), (Some(0), Some(0)));
}

#[test]
fn every_workload_finds_the_keys_it_reads_on_each_core() {
    let database = Database::make("bench-ycsb");
    // D reads only the inserted keys of its own run, so it comes first.
    for letter in ["d", "a", "b", "c", "e", "f"] {
        let plan = database.plan(Case::Ycsb);
        let outcome = bench::run(&Plan {
            processors: reactor::processors().into_iter().take(2).collect(),
            memory_bytes: Some(64 << 20),
            mix: letter.parse().expect("it is one of YCSB's"),
            keys: Some(KEYS),
            write: WritePlan {
                durability: Durability::Process,
                memtable_bytes: 4 << 20,
                ..plan.write.clone()
            },
            ..plan
        })
        .expect("the database can be read and written");
        check(&outcome);
        assert_eq!(outcome.workload, Some(letter));
        assert_eq!(outcome.writes_per_second > Some(0.0), letter != "c", "{outcome:?}");
    }
}

/// With more offered than can be done, each operation waits for those before it; the last ones wait
/// for nearly the whole time by which the run exceeds its arrivals.
#[test]
fn an_open_loop_latency_includes_the_wait_for_a_free_task() {
    const SECONDS: f64 = 0.01;
    let database = Database::make("bench-open-loop");
    let plan = database.plan(Case::ReadRandomWriteRandom);
    let write =
        WritePlan { durability: Durability::Process, rate: Some(2e6), ..plan.write.clone() };
    let plan = Plan { depth: 4, seconds: SECONDS, keys: Some(KEYS), write, ..plan };
    let outcome = bench::run(&plan).expect("the database can be read and written");
    check(&outcome);
    let offered = outcome.offered_per_second.expect("a rate was named");
    assert_eq!((offered * SECONDS).round() as u64, outcome.operations, "all that arrived");
    let late_us = (outcome.seconds - SECONDS) * 1e6;
    assert!(late_us > 0.0 && outcome.p999_us > late_us * 0.9, "{outcome:?}");
    assert!(outcome.p50_us > late_us * 0.2, "{outcome:?}");
}

#[test]
fn a_directory_without_a_database_is_an_error_on_all_cores() {
    let database = Database::make("bench-nothing");
    let nowhere = Plan {
        data: database.0.join("nowhere"),
        processors: reactor::processors().into_iter().take(2).collect(),
        ..database.plan(Case::ReadRandom)
    };
    let error = bench::run(&nowhere).expect_err("there is nothing to read");
    assert_eq!(error.kind(), node::Kind::NoDatabase);
}
