//! The rows of the table that write.

use super::Setup;
use super::rows::{Compare, Goal, Round, Row, Unit, Work};
use super::sample::Sample;
use super::writes::{LOCKS, REOPEN, Write, num_power, num_process};

/// Numbers of threads among which RocksDB's best is looked for.
const THREADS: [u32; 5] = [1, 2, 4, 8, 16];
/// The same for Debian's db_bench, which has shown its best with few.
const DEBIAN_THREADS: [u32; 3] = [1, 2, 4];
/// Tasks or threads that write where each write is flushed, and that read beside a writer.
const SIXTEEN: &str = "16";
/// Writes a second beside the readers.
const BESIDE: &str = "10000";

const FILL: &str = "millrace fillrandom process";
const FILL_POWER: &str = "millrace fillrandom power";
const FILL_POWER_PEER: &str = "rocksdb fillrandom sync";
const HALF: &str = "millrace fillrandom power at half the maximum";
const BOTH: &str = "millrace readwhilewriting";
const BOTH_PEER: &str = "rocksdb readwhilewriting";

fn threads_name(threads: u32) -> String {
    format!("rocksdb fillrandom {threads} threads")
}

fn debian_name(threads: u32) -> String {
    format!("debian fillrandom {threads} threads")
}

fn best_fill(round: &Round) -> Option<&Sample> {
    round.best(THREADS.map(threads_name).into_iter().chain(DEBIAN_THREADS.map(debian_name)))
}

/// Debian's db_bench tells neither stalls nor processor time.
fn best_release(round: &Round) -> Option<&Sample> {
    round.best(THREADS.map(threads_name))
}

fn words(all: &[&str]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

fn ours(name: &'static str, flags: &[&str], copy: bool) -> Work {
    Work::Write(Write::Ours { name, flags: words(flags), copy, half_of: None })
}

fn release(name: &str, flags: &[&str], copy: bool) -> Work {
    Work::Write(Write::Release { name: name.to_owned(), flags: words(flags), copy })
}

fn fill(setup: &Setup) -> Vec<Work> {
    let (keys, num) = (setup.keys.to_string(), num_process(setup).to_string());
    let common = ["fillrandom", "--keys", &keys, "--num", &num];
    let mut works = vec![ours(FILL, &[&common[..], &["--durability", "process"]].concat(), false)];
    for threads in THREADS {
        let count = threads.to_string();
        let flags = [&common[..], &["--threads", &count]].concat();
        works.push(release(&threads_name(threads), &flags, false));
    }
    works.extend(
        DEBIAN_THREADS
            .map(|threads| Work::Write(Write::Debian { name: debian_name(threads), threads })),
    );
    works
}

fn fill_power(setup: &Setup) -> Vec<Work> {
    let (keys, num) = (setup.keys.to_string(), num_power(setup).to_string());
    let common = ["fillrandom", "--keys", &keys, "--num", &num];
    let our = [&common[..], &["--durability", "power", "--writers", SIXTEEN]].concat();
    let their = [&common[..], &["--sync", "--threads", SIXTEEN]].concat();
    vec![ours(FILL_POWER, &our, false), release(FILL_POWER_PEER, &their, false)]
}

fn half(setup: &Setup) -> Vec<Work> {
    let (keys, num) = (setup.keys.to_string(), num_power(setup).to_string());
    let flags = ["fillrandom", "--keys", &keys, "--num", &num, "--durability", "power"];
    let mut works = fill_power(setup);
    works.truncate(1);
    let flags = words(&[&flags[..], &["--writers", SIXTEEN]].concat());
    let half_of = Some(FILL_POWER);
    works.push(Work::Write(Write::Ours { name: HALF, flags, copy: false, half_of }));
    works
}

fn both(setup: &Setup) -> Vec<Work> {
    let keys = setup.keys.to_string();
    let common = ["readwhilewriting", "--keys", &keys, "--rate", BESIDE];
    let our = [&common[..], &["--durability", "process"]].concat();
    let their = [&common[..], &["--threads", SIXTEEN]].concat();
    vec![ours(BOTH, &our, true), release(BOTH_PEER, &their, true)]
}

/// Microseconds of a hand-over, or of a line of the log, by so many threads.
fn lock_us(round: &Round, what: &str, threads: u64, key: &str) -> Option<f64> {
    let lines = round.sample(LOCKS)?.report[what].as_array()?;
    let line = lines.iter().find(|line| line["threads"] == threads)?;
    Some(line[key].as_f64()? / 1000.0)
}

fn locks(_: &Setup) -> Vec<Work> {
    vec![Work::Write(Write::Locks)]
}

/// These rows.
pub fn rows() -> Vec<Row> {
    vec![
        Row {
            name: "fillrandom, 16 B keys, 1000 B values, process",
            against: "the better of RocksDB release (WAL, no sync) and Debian's db_bench, best number of threads",
            ours: |r| r.ops(FILL),
            theirs: |r| best_fill(r).map(|sample| sample.ops_per_second),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(1.2),
            works: fill,
        },
        Row {
            name: "fillrandom, process, longest stall",
            against: "RocksDB release, its best number of threads",
            ours: |r| Some(r.sample(FILL)?.report["max_stall_ms"].as_f64()? / 1000.0),
            theirs: |r| Some(best_release(r)?.report["max_stall_ms"].as_f64()? / 1000.0),
            compare: Compare::Ratio,
            unit: Unit::Seconds,
            goal: Goal::Told,
            works: fill,
        },
        Row {
            name: "fillrandom, process, processor time per write",
            against: "RocksDB release, its best number of threads",
            ours: |r| r.sample(FILL)?.cpu_us_per_op,
            theirs: |r| best_release(r)?.cpu_us_per_op,
            compare: Compare::Ratio,
            unit: Unit::Us,
            goal: Goal::Told,
            works: fill,
        },
        Row {
            name: "fillrandom, power, 16 writers",
            against: "RocksDB release, sync, 16 threads",
            ours: |r| r.ops(FILL_POWER),
            theirs: |r| r.ops(FILL_POWER_PEER),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(2.0),
            works: fill_power,
        },
        Row {
            name: "p99.9 of a set at half the maximum load, power, 16 writers",
            against: "one flush: 4 KiB overwritten directly and fdatasync",
            ours: |r| r.sample(HALF)?.p999_us,
            theirs: |r| r.sample(HALF)?.report["flush_us"].as_f64(),
            compare: Compare::Ratio,
            unit: Unit::Us,
            goal: Goal::AtMost(4.0),
            works: half,
        },
        Row {
            name: "readwhilewriting, two cores, depth 64, 10,000 sets/s, process",
            against: "RocksDB release, 16 threads and a writer",
            ours: |r| r.ops(BOTH),
            theirs: |r| r.ops(BOTH_PEER),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::Told,
            works: both,
        },
        Row {
            name: "RESP set, -P 16 -c 50 -d 1000, process",
            against: "redis-server, appendonly everysec",
            ours: |r| r.ops("millrace resp set"),
            theirs: |r| r.ops("redis resp set"),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::AtLeast(0.9),
            works: |_| vec![Work::NodeSet(false), Work::RedisSet(false)],
        },
        Row {
            name: "RESP set over 100,000 keys (-r)",
            against: "redis-server, appendonly everysec",
            ours: |r| r.ops("millrace resp set many"),
            theirs: |r| r.ops("redis resp set many"),
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::Told,
            works: |_| vec![Work::NodeSet(true), Work::RedisSet(true)],
        },
        Row {
            name: "opening after kill -9 with 1 GiB of log",
            against: "-",
            ours: |r| r.sample(REOPEN)?.open_seconds,
            theirs: |_| None,
            compare: Compare::Alone,
            unit: Unit::Seconds,
            goal: Goal::AtMost(2.0),
            works: |_| vec![Work::Write(Write::Reopen)],
        },
        Row {
            name: "handing an operation to a shard, 1 thread",
            against: "a queue under a mutex, and a condition variable",
            ours: |r| lock_us(r, "hand_over", 1, "ns"),
            theirs: |r| lock_us(r, "hand_over", 1, "lock_ns"),
            compare: Compare::Ratio,
            unit: Unit::Us,
            goal: Goal::AtMost(1.0),
            works: locks,
        },
        Row {
            name: "handing an operation to a shard, 8 threads",
            against: "a queue under a mutex, and a condition variable",
            ours: |r| lock_us(r, "hand_over", 8, "ns"),
            theirs: |r| lock_us(r, "hand_over", 8, "lock_ns"),
            compare: Compare::Ratio,
            unit: Unit::Us,
            goal: Goal::AtMost(0.2),
            works: locks,
        },
        Row {
            name: "handing an operation to a shard, 32 threads",
            against: "a queue under a mutex, and a condition variable",
            ours: |r| lock_us(r, "hand_over", 32, "ns"),
            theirs: |r| lock_us(r, "hand_over", 32, "lock_ns"),
            compare: Compare::Ratio,
            unit: Unit::Us,
            goal: Goal::AtMost(0.2),
            works: locks,
        },
        Row {
            name: "logging a line, 1 thread",
            against: "a logger under a mutex that writes each line",
            ours: |r| lock_us(r, "log", 1, "ns"),
            theirs: |r| lock_us(r, "log", 1, "lock_ns"),
            compare: Compare::Ratio,
            unit: Unit::Us,
            goal: Goal::AtMost(1.0),
            works: locks,
        },
        Row {
            name: "logging a line, 8 threads",
            against: "a logger under a mutex that writes each line",
            ours: |r| lock_us(r, "log", 8, "ns"),
            theirs: |r| lock_us(r, "log", 8, "lock_ns"),
            compare: Compare::Ratio,
            unit: Unit::Us,
            goal: Goal::AtMost(0.2),
            works: locks,
        },
        Row {
            name: "logging a line, 32 threads",
            against: "a logger under a mutex that writes each line",
            ours: |r| lock_us(r, "log", 32, "ns"),
            theirs: |r| lock_us(r, "log", 32, "lock_ns"),
            compare: Compare::Ratio,
            unit: Unit::Us,
            goal: Goal::AtMost(0.2),
            works: locks,
        },
    ]
}
