//! The rows of the table that write.

use super::Setup;
use super::bases::Base;
use super::redis;
use super::row::{Figure, Row, Unit};
use super::sample::Sample;
use super::search::Knob;
use super::work::Work;
use super::writes::{LOCKS, Load, REOPEN, Write, num_power, num_process};

/// Tasks or threads that write if each write is flushed.
const SIXTEEN: &str = "16";
/// Writes per second beside the readers.
const BESIDE: &str = "10000";

/// Threads that write without a flush; RocksDB is at its best with few.
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
/// Recycled log files.
pub const LOGS: Knob = &[&[], &["--recycle-logs", "4"]];
/// Direct I/O for writing tables.
pub const DIRECT: Knob = &[&[], &["--direct-writes"]];
/// The most memtables at a time.
pub const MEMTABLES: Knob = &[&[], &["--memtables", "4"], &["--memtables", "6"]];
/// Flushes and compactions that run at the same time.
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

const FILL_KNOBS: &[Knob] = &[WRITERS, LOGS, DIRECT, MEMTABLES, JOBS];
const POWER_KNOBS: &[Knob] = &[LOGS, DIRECT, MEMTABLES, JOBS];
const BOTH_KNOBS: &[Knob] = &[READERS, LOGS, DIRECT, MEMTABLES, JOBS];

/// Owned flags.
pub fn words(all: &[&str]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

/// How one of these rows' measurements is made.
pub fn measurement(setup: &Setup, name: &'static str) -> Option<Work> {
    let keys = setup.keys.to_string();
    let (process, power) = (num_process(setup).to_string(), num_power(setup).to_string());
    // Random sets, and then all background work that they leave.
    let fill = ["fillrandom", "--keys", &keys, "--num", &process, "--drain"];
    let fill_power = ["fillrandom", "--keys", &keys, "--num", &power];
    let both = ["readwhilewriting", "--keys", &keys, "--rate", BESIDE];
    let half = |of| Some(Load { of, share: 0.5 });
    let ours = |common: &[&str], own: &[&str], load| {
        let (flags, copy) = ([words(common), words(own)].concat(), copy(name));
        Work::Write(Write::Ours { name, flags, copy, load })
    };
    let release = |common: &[&str], own: &[&str], knobs, load| {
        let (flags, copy) = ([words(common), words(own)].concat(), copy(name));
        Work::Write(Write::Release { name, flags, knobs, copy, load })
    };
    let our_power = ["--durability", "power", "--writers", SIXTEEN];
    let peer_power = ["--sync", "--threads", SIXTEEN];
    Some(match name {
        FILL => ours(&fill, &["--durability", "process"], None),
        FILL_PEER => release(&fill, &[], FILL_KNOBS, None),
        FILL_HALF => ours(&fill, &["--durability", "process"], half(FILL)),
        FILL_HALF_PEER => release(&fill, &[], FILL_KNOBS, half(FILL_PEER)),
        FILL_POWER => ours(&fill_power, &our_power, None),
        FILL_POWER_PEER => release(&fill_power, &peer_power, POWER_KNOBS, None),
        HALF => ours(&fill_power, &our_power, half(FILL_POWER)),
        HALF_PEER => release(&fill_power, &peer_power, POWER_KNOBS, half(FILL_POWER_PEER)),
        BOTH => ours(&both, &["--durability", "process"], None),
        BOTH_PEER => release(&both, &[], BOTH_KNOBS, None),
        REOPEN => Work::Write(Write::Reopen),
        LOCKS => Work::Write(Write::Locks),
        _ => return None,
    })
}

/// The database that a measurement writes to a copy of.
fn copy(name: &str) -> Option<Base> {
    [BOTH, BOTH_PEER].contains(&name).then_some(Base::Sample)
}

/// A number of the program's report.
fn reported(sample: &Sample, name: &str) -> Option<f64> {
    sample.report[name].as_f64()
}

/// The share of the time that was spent in stalls of more than 10 ms, in per cent.
fn stalled_percent(sample: &Sample) -> Option<f64> {
    Some(reported(sample, "stalled_ms")? / 10.0 / reported(sample, "seconds")?)
}

/// Bytes written to the device for each byte of keys and values that was set.
fn written_times(sample: &Sample) -> Option<f64> {
    Some(reported(sample, "device_bytes")? / (reported(sample, "operations")? * ENTRY_BYTES))
}

/// Bytes on the disk after all background work, for each byte of live keys and values.
fn space_times(sample: &Sample) -> Option<f64> {
    let keys =
        sample.report["keys"].as_f64().or_else(|| sample.report["flags"]["keys"].as_f64())?;
    // The expected number of different keys among those drawn.
    let live = keys * (1.0 - (-reported(sample, "operations")? / keys).exp());
    Some(reported(sample, "disk_bytes")? / (live * ENTRY_BYTES))
}

/// Bytes of a key and its value.
const ENTRY_BYTES: f64 = 1016.0;

/// Microseconds of a hand-over, or of a line of the log, by this number of threads.
fn lock_us(sample: &Sample, what: &str, threads: u64, key: &str) -> Option<f64> {
    let line = sample.report[what].as_array()?.iter().find(|line| line["threads"] == threads)?;
    Some(line[key].as_f64()? / 1000.0)
}

/// These rows.
pub fn rows() -> Vec<Row> {
    let mut rows = fills();
    rows.extend(others());
    rows.extend(locks());
    rows
}

/// Random sets of a new database.
#[rustfmt::skip]
fn fills() -> Vec<Row> {
    const BEST: &str = "RocksDB release (log, no sync), its best settings";
    const BEST_SYNC: &str = "RocksDB release, sync, 16 threads, its best settings";
    const ONE_FLUSH: &str = "one flush: 4 KiB overwritten directly and fdatasync";
    let p999: Figure = |sample| sample.p999_us;
    let fill = |name| Row::rate(format!("fillrandom, {name}"), BEST, [FILL, FILL_PEER]);
    let fill_half = |name| {
        let name = format!("fillrandom, process, at half its maximum, {name}");
        Row::rate(name, BEST, [FILL_HALF, FILL_HALF_PEER])
    };
    let power_half = |name, against, both| {
        Row::rate(format!("fillrandom, power, at half its maximum, {name}"), against, both)
    };
    vec![
        fill("16 B keys, 1000 B values, process").at_least(1.2),
        fill("process, drained: flushed and merged to the end")
            .of(Unit::PerSecond, |sample| reported(sample, "ops_per_second_drained")),
        fill("process, drained, bytes on the device").of(Unit::Times, written_times),
        fill("process, drained, bytes on the disk").of(Unit::Times, space_times),
        fill("process, time in stalls over 10 ms").of(Unit::Percent, stalled_percent),
        fill("process, p99.9 of a set").of(Unit::Us, p999),
        fill("process, processor time per set").of(Unit::Us, |sample| sample.cpu_us_per_op),
        fill_half("time in stalls over 10 ms").of(Unit::Percent, stalled_percent),
        fill_half("p99.9 of a set").of(Unit::Us, p999),
        Row::rate("fillrandom, power, 16 writers", BEST_SYNC, [FILL_POWER, FILL_POWER_PEER])
            .at_least(2.0),
        power_half("p99.9 of a set", BEST_SYNC, [HALF, HALF_PEER]).of(Unit::Us, p999),
        power_half("time in stalls over 10 ms", BEST_SYNC, [HALF, HALF_PEER])
            .of(Unit::Percent, stalled_percent),
        power_half("p99.9 of a set", ONE_FLUSH, [HALF, HALF])
            .of(Unit::Us, p999).with(|sample| reported(sample, "flush_us")).at_most(4.0),
    ]
}

fn others() -> Vec<Row> {
    const WRITER: &str = "RocksDB release, its best number of threads, and a writer";
    const EVERYSEC: &str = "redis-server, appendonly everysec";
    let both = "readwhilewriting, two cores, depth 64, 10,000 sets/s, process";
    let resp = "RESP set over 100,000 keys, -P 16 -c 50 -d 1000, process";
    let reopen = "opening after kill -9 with 1 GiB of log";
    vec![
        Row::rate(both, WRITER, [BOTH, BOTH_PEER]),
        Row::rate(resp, EVERYSEC, redis::SET).at_least(0.9),
        Row::cpu("RESP set, processor time per request", EVERYSEC, redis::SET),
        Row::alone(reopen, REOPEN, Unit::Seconds, |sample| sample.open_seconds).at_most(2.0),
    ]
}

/// The report of `bench locks`.
#[rustfmt::skip]
fn locks() -> Vec<Row> {
    const QUEUE: &str = "a queue under a mutex, and a condition variable";
    const LOGGER: &str = "a logger under a mutex that writes each line";
    let row = |name, against, ours: Figure, theirs: Figure, most| {
        Row::rate(name, against, [LOCKS, LOCKS]).of(Unit::Us, ours).with(theirs).at_most(most)
    };
    vec![
        row("handing an operation to a shard, 1 thread", QUEUE,
            |s| lock_us(s, "hand_over", 1, "ns"), |s| lock_us(s, "hand_over", 1, "lock_ns"), 1.0),
        row("handing an operation to a shard, 8 threads", QUEUE,
            |s| lock_us(s, "hand_over", 8, "ns"), |s| lock_us(s, "hand_over", 8, "lock_ns"), 0.2),
        row("handing an operation to a shard, 32 threads", QUEUE,
            |s| lock_us(s, "hand_over", 32, "ns"), |s| lock_us(s, "hand_over", 32, "lock_ns"), 0.2),
        row("logging a line, 1 thread", LOGGER,
            |s| lock_us(s, "log", 1, "ns"), |s| lock_us(s, "log", 1, "lock_ns"), 1.0),
        row("logging a line, 8 threads", LOGGER,
            |s| lock_us(s, "log", 8, "ns"), |s| lock_us(s, "log", 8, "lock_ns"), 0.2),
        row("logging a line, 32 threads", LOGGER,
            |s| lock_us(s, "log", 32, "ns"), |s| lock_us(s, "log", 32, "lock_ns"), 0.2),
    ]
}
