//! The rows of the table that write.

use super::Setup;
use super::bases::Base;
use super::redis::{self, Server};
use super::row::{Goal, Row, Unit};
use super::sample::Sample;
use super::search::Knob;
use super::work::Work;
use super::writes::{LOCKS, Load, REOPEN, Write, num_power, num_process};

/// Tasks or threads that write where each write is flushed.
const SIXTEEN: &str = "16";
/// Writes a second beside the readers.
const BESIDE: &str = "10000";

/// Threads that write without a flush; RocksDB has shown its best with few.
pub const WRITERS: Knob = &[
    &["--threads", "1"],
    &["--threads", "2"],
    &["--threads", "4"],
    &["--threads", "8"],
    &["--threads", "16"],
];
/// Threads that read beside a writer.
pub const READERS: Knob =
    &[&["--threads", "16"], &["--threads", "8"], &["--threads", "32"], &["--threads", "64"]];
/// Logs that are written over.
pub const LOGS: Knob = &[&[], &["--recycle-logs", "4"]];
/// Whether tables are written with direct I/O.
pub const DIRECT: Knob = &[&[], &["--direct-writes"]];
/// Memtables that there may be.
pub const MEMTABLES: Knob = &[&[], &["--memtables", "4"], &["--memtables", "6"]];
/// Flushes and merges that run at the same time.
pub const JOBS: Knob = &[&[], &["--jobs", "4"]];

const FILL: &str = "millrace fillrandom process";
const FILL_PEER: &str = "rocksdb fillrandom";
const FILL_HALF: &str = "millrace fillrandom process at half its maximum";
const FILL_HALF_PEER: &str = "rocksdb fillrandom at half its maximum";
const FILL_POWER: &str = "millrace fillrandom power";
const FILL_POWER_PEER: &str = "rocksdb fillrandom sync";
const HALF: &str = "millrace fillrandom power at half its maximum";
const HALF_PEER: &str = "rocksdb fillrandom sync at half its maximum";
const BOTH: &str = "millrace readwhilewriting";
const BOTH_PEER: &str = "rocksdb readwhilewriting";

/// Flags as a program takes them.
pub fn words(all: &[&str]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

fn ours(name: &'static str, flags: &[&str]) -> Work {
    Work::Write(Write::Ours { name, flags: words(flags), copy: None, load: None })
}

fn release(name: &'static str, flags: &[&str], knobs: &'static [Knob]) -> Work {
    let flags = words(flags);
    Work::Write(Write::Release { name, flags, knobs, copy: None, load: None })
}

/// Random sets, then all that they leave to be done.
fn fill(setup: &Setup) -> Vec<Work> {
    let (keys, num) = (setup.keys.to_string(), num_process(setup).to_string());
    let common = ["fillrandom", "--keys", &keys, "--num", &num, "--drain"];
    vec![
        ours(FILL, &[&common[..], &["--durability", "process"]].concat()),
        release(FILL_PEER, &common, &[WRITERS, LOGS, DIRECT, MEMTABLES, JOBS]),
    ]
}

/// The same, each at half of what it can do.
fn fill_half(setup: &Setup) -> Vec<Work> {
    half_of(fill(setup), [FILL, FILL_PEER], [FILL_HALF, FILL_HALF_PEER])
}

fn fill_power(setup: &Setup) -> Vec<Work> {
    let (keys, num) = (setup.keys.to_string(), num_power(setup).to_string());
    let common = ["fillrandom", "--keys", &keys, "--num", &num];
    let our = [&common[..], &["--durability", "power", "--writers", SIXTEEN]].concat();
    let their = [&common[..], &["--sync", "--threads", SIXTEEN]].concat();
    vec![ours(FILL_POWER, &our), release(FILL_POWER_PEER, &their, &[LOGS, DIRECT, MEMTABLES, JOBS])]
}

fn power_half(setup: &Setup) -> Vec<Work> {
    half_of(fill_power(setup), [FILL_POWER, FILL_POWER_PEER], [HALF, HALF_PEER])
}

/// Adds the same measurements at half the rate.
fn half_of(
    mut works: Vec<Work>,
    [ours, theirs]: [&'static str; 2],
    [our_half, their_half]: [&'static str; 2],
) -> Vec<Work> {
    for work in works.clone() {
        works.push(match work {
            Work::Write(Write::Ours { flags, copy, .. }) => {
                let load = Some(Load { of: ours, share: 0.5 });
                Work::Write(Write::Ours { name: our_half, flags, copy, load })
            }
            Work::Write(Write::Release { flags, knobs, copy, .. }) => Work::Write(Write::Release {
                name: their_half,
                flags,
                knobs,
                copy,
                load: Some(Load { of: theirs, share: 0.5 }),
            }),
            other => other,
        });
    }
    works
}

fn both(setup: &Setup) -> Vec<Work> {
    let keys = setup.keys.to_string();
    let common = ["readwhilewriting", "--keys", &keys, "--rate", BESIDE];
    let flags = words(&[&common[..], &["--durability", "process"]].concat());
    vec![
        Work::Write(Write::Ours { name: BOTH, flags, copy: Some(Base::Sample), load: None }),
        Work::Write(Write::Release {
            name: BOTH_PEER,
            flags: words(&common),
            knobs: &[READERS, LOGS, DIRECT, MEMTABLES, JOBS],
            copy: Some(Base::Sample),
            load: None,
        }),
    ]
}

fn redis_set(_: &Setup) -> Vec<Work> {
    [Server::Millrace, Server::Redis].map(|server| Work::Redis(redis::set(server))).into()
}

fn told(sample: &Sample, name: &str) -> Option<f64> {
    sample.report[name].as_f64()
}

/// Seconds in stalls of more than 10 ms, of a hundred seconds of writing.
fn stalled_percent(sample: &Sample) -> Option<f64> {
    Some(told(sample, "stalled_ms")? / 10.0 / told(sample, "seconds")?)
}

/// Bytes on the device for each byte of keys and values that was set.
fn written_times(sample: &Sample) -> Option<f64> {
    Some(told(sample, "device_bytes")? / (told(sample, "operations")? * ENTRY_BYTES))
}

/// Bytes on the disk, when all is at rest, for each byte of the keys and values that are there.
fn space_times(sample: &Sample) -> Option<f64> {
    let keys =
        sample.report["keys"].as_f64().or_else(|| sample.report["flags"]["keys"].as_f64())?;
    // Of `keys` keys, so many have been drawn at least once.
    let live = keys * (1.0 - (-told(sample, "operations")? / keys).exp());
    Some(told(sample, "disk_bytes")? / (live * ENTRY_BYTES))
}

/// Bytes of a key and its value.
const ENTRY_BYTES: f64 = 1016.0;

/// Microseconds of a hand-over, or of a line of the log, by so many threads.
fn lock_us(sample: &Sample, what: &str, threads: u64, key: &str) -> Option<f64> {
    let line = sample.report[what].as_array()?.iter().find(|line| line["threads"] == threads)?;
    Some(line[key].as_f64()? / 1000.0)
}

/// A row of what `bench locks` reports.
macro_rules! lock {
    ($name:literal, $against:literal, $what:literal, $threads:literal, $goal:expr) => {
        Row {
            peer_figure: |sample| lock_us(sample, $what, $threads, "lock_ns"),
            ..Row::rate(
                $name,
                $against,
                |r| r.sample(LOCKS),
                |r| r.sample(LOCKS),
                |_| vec![Work::Write(Write::Locks)],
            )
            .of(Unit::Us, |sample| lock_us(sample, $what, $threads, "ns"))
            .reaching(Goal::AtMost($goal))
        }
    };
}

/// These rows.
pub fn rows() -> Vec<Row> {
    let mut rows = fills();
    rows.extend(others());
    rows
}

/// What sets random keys of a new database.
fn fills() -> Vec<Row> {
    use Goal::{AtLeast, AtMost};
    const BEST: &str = "RocksDB release (log, no sync), its best settings";
    const BEST_SYNC: &str = "RocksDB release, sync, 16 threads, its best settings";
    let fill_row = |name, unit, figure| {
        Row::rate(name, BEST, |r| r.sample(FILL), |r| r.sample(FILL_PEER), fill).of(unit, figure)
    };
    let half_row = |name, unit, figure| {
        Row::rate(name, BEST, |r| r.sample(FILL_HALF), |r| r.sample(FILL_HALF_PEER), fill_half)
            .of(unit, figure)
    };
    let power_row = |name, unit, figure| {
        Row::rate(name, BEST_SYNC, |r| r.sample(HALF), |r| r.sample(HALF_PEER), power_half)
            .of(unit, figure)
    };
    vec![
        Row::rate(
            "fillrandom, 16 B keys, 1000 B values, process",
            BEST,
            |r| r.sample(FILL),
            |r| r.sample(FILL_PEER),
            fill,
        )
        .reaching(AtLeast(1.2)),
        fill_row(
            "fillrandom, process, drained: flushed and merged to the end",
            Unit::PerSecond,
            |s| told(s, "ops_per_second_drained"),
        ),
        fill_row("fillrandom, process, drained, bytes on the device", Unit::Times, written_times),
        fill_row("fillrandom, process, drained, bytes on the disk", Unit::Times, space_times),
        fill_row("fillrandom, process, time in stalls over 10 ms", Unit::Percent, stalled_percent),
        fill_row("fillrandom, process, p99.9 of a set", Unit::Us, |s| s.p999_us),
        Row::cpu(
            "fillrandom, process, processor time per set",
            BEST,
            |r| r.sample(FILL),
            |r| r.sample(FILL_PEER),
            fill,
        ),
        half_row(
            "fillrandom, process, at half its maximum, time in stalls over 10 ms",
            Unit::Percent,
            stalled_percent,
        ),
        half_row("fillrandom, process, at half its maximum, p99.9 of a set", Unit::Us, |s| {
            s.p999_us
        }),
        Row::rate(
            "fillrandom, power, 16 writers",
            BEST_SYNC,
            |r| r.sample(FILL_POWER),
            |r| r.sample(FILL_POWER_PEER),
            fill_power,
        )
        .reaching(AtLeast(2.0)),
        power_row("fillrandom, power, at half its maximum, p99.9 of a set", Unit::Us, |s| {
            s.p999_us
        }),
        power_row(
            "fillrandom, power, at half its maximum, time in stalls over 10 ms",
            Unit::Percent,
            stalled_percent,
        ),
        Row {
            peer_figure: |sample| told(sample, "flush_us"),
            ..Row::rate(
                "fillrandom, power, at half its maximum, p99.9 of a set",
                "one flush: 4 KiB overwritten directly and fdatasync",
                |r| r.sample(HALF),
                |r| r.sample(HALF),
                power_half,
            )
            .of(Unit::Us, |sample| sample.p999_us)
            .reaching(AtMost(4.0))
        },
    ]
}

fn others() -> Vec<Row> {
    use Goal::{AtLeast, AtMost};
    vec![
        Row::rate(
            "readwhilewriting, two cores, depth 64, 10,000 sets/s, process",
            "RocksDB release, its best number of threads, and a writer",
            |r| r.sample(BOTH),
            |r| r.sample(BOTH_PEER),
            both,
        ),
        Row::rate(
            "RESP set over 100,000 keys, -P 16 -c 50 -d 1000, process",
            "redis-server, appendonly everysec",
            |r| r.sample(redis::set(Server::Millrace).name),
            |r| r.sample(redis::set(Server::Redis).name),
            redis_set,
        )
        .reaching(AtLeast(0.9)),
        Row::cpu(
            "RESP set, processor time per request",
            "redis-server, appendonly everysec",
            |r| r.sample(redis::set(Server::Millrace).name),
            |r| r.sample(redis::set(Server::Redis).name),
            redis_set,
        ),
        Row::alone(
            "opening after kill -9 with 1 GiB of log",
            |r| r.sample(REOPEN),
            Unit::Seconds,
            |sample| sample.open_seconds,
            |_| vec![Work::Write(Write::Reopen)],
        )
        .reaching(AtMost(2.0)),
        lock!(
            "handing an operation to a shard, 1 thread",
            "a queue under a mutex, and a condition variable",
            "hand_over",
            1,
            1.0
        ),
        lock!(
            "handing an operation to a shard, 8 threads",
            "a queue under a mutex, and a condition variable",
            "hand_over",
            8,
            0.2
        ),
        lock!(
            "handing an operation to a shard, 32 threads",
            "a queue under a mutex, and a condition variable",
            "hand_over",
            32,
            0.2
        ),
        lock!(
            "logging a line, 1 thread",
            "a logger under a mutex that writes each line",
            "log",
            1,
            1.0
        ),
        lock!(
            "logging a line, 8 threads",
            "a logger under a mutex that writes each line",
            "log",
            8,
            0.2
        ),
        lock!(
            "logging a line, 32 threads",
            "a logger under a mutex that writes each line",
            "log",
            32,
            0.2
        ),
    ]
}
