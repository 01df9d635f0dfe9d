//! The rows of the table that read a database.

use super::Setup;
use super::bases::Base;
use super::ours::Ours;
use super::redis;
use super::row::{Row, Unit};
use super::search::Knob;
use super::work::{DISK_64_OVER_1, FIO_4K, FIO_SAME, GET, Work};

/// Keys that the cached rows draw from: half a million values, 500 MB.
const CACHED_KEYS: u64 = 500_000;
/// RocksDB's block cache in the cached rows.
const CACHED_BYTES: u64 = 2 << 30;

const GET_CACHED: &str = "millrace readrandom cached";
const GET_CACHED_1: &str = "millrace readrandom cached depth 1";
const GET_CACHED_2: &str = "millrace readrandom cached two cores";
const MULTI: &str = "millrace multireadrandom";
const SEEK: &str = "millrace seekrandom";
const SEEK_REVERSE: &str = "millrace seekrandom reverse";
const SEQ: &str = "millrace readseq";
const REVERSE: &str = "millrace readreverse";

const GET_1_PEER: &str = "rocksdb readrandom 1 thread";
const GET_PEER: &str = "rocksdb readrandom";
const CACHED_PEER: &str = "rocksdb readrandom cached";
const MULTI_PEER: &str = "rocksdb multireadrandom";
const SEEK_PEER: &str = "rocksdb seekrandom";
const SEEK_REVERSE_PEER: &str = "rocksdb seekrandom reverse";
const SEQ_PEER: &str = "rocksdb readseq";
const REVERSE_PEER: &str = "rocksdb readreverse";

/// Threads that get at the same time.
pub const THREADS: Knob =
    &[&["--threads", "32"], &["--threads", "8"], &["--threads", "16"], &["--threads", "64"]];
/// The kind of block cache.
pub const CACHES: Knob = &[&["--cache", "lru"], &["--cache", "hyperclock"]];
const ASYNC: Knob = &[&[], &["--async-io"]];
/// The read-ahead of an iterator that takes fifty steps.
const AHEAD_SHORT: Knob = &[
    &[],
    &["--readahead", "16384"],
    &["--readahead", "32768"],
    &["--readahead", "57344"],
    &["--readahead", "65536"],
    &["--readahead", "131072"],
];
/// The read-ahead of an iterator over the whole database.
const AHEAD_LONG: Knob = &[
    &[],
    &["--readahead", "262144"],
    &["--readahead", "1048576"],
    &["--readahead", "2097152"],
    &["--readahead", "4194304"],
];

/// How one of these rows' measurements is made.
pub fn measurement(setup: &Setup, name: &'static str) -> Option<Work> {
    let cache = CACHED_BYTES.to_string();
    let release = |flags: &[&str], knobs| release(name, setup.keys, flags, knobs);
    Some(match name {
        GET => ours(name, &["readrandom", "--depth", "64"]),
        GET_CACHED => cached(name, &["readrandom", "--depth", "64"], false),
        GET_CACHED_1 => cached(name, &["readrandom", "--depth", "1"], false),
        GET_CACHED_2 => cached(name, &["readrandom", "--depth", "64"], true),
        MULTI => ours(name, &["multireadrandom", "--batch", "64"]),
        SEEK => ours(name, &["seekrandom", "--nexts", "50"]),
        SEEK_REVERSE => ours(name, &["seekrandom", "--nexts", "50", "--reverse"]),
        SEQ => ours(name, &["readseq"]),
        REVERSE => ours(name, &["readreverse"]),
        GET_1_PEER => release(&["readrandom"], &[]),
        GET_PEER => release(&["readrandom"], &[THREADS]),
        CACHED_PEER => {
            let flags = ["readrandom", "--cache-bytes", &cache];
            self::release(name, setup.keys.min(CACHED_KEYS), &flags, &[CACHES])
        }
        MULTI_PEER => release(&["multireadrandom", "--batch", "64"], &[ASYNC]),
        SEEK_PEER => release(&["seekrandom", "--nexts", "50"], &[AHEAD_SHORT, ASYNC]),
        SEEK_REVERSE_PEER => {
            release(&["seekrandom", "--nexts", "50", "--reverse"], &[AHEAD_SHORT, ASYNC])
        }
        SEQ_PEER => release(&["readseq"], &[AHEAD_LONG, ASYNC]),
        REVERSE_PEER => release(&["readreverse"], &[AHEAD_LONG, ASYNC]),
        _ => return None,
    })
}

fn ours(name: &'static str, flags: &'static [&'static str]) -> Work {
    Work::Ours(name, Ours { flags, ..Ours::default() })
}

fn cached(name: &'static str, flags: &'static [&'static str], two_cores: bool) -> Work {
    let cached_keys = Some(CACHED_KEYS);
    Work::Ours(name, Ours { flags, cached_keys, two_cores, ..Ours::default() })
}

fn release(name: &'static str, keys: u64, flags: &[&str], knobs: &'static [Knob]) -> Work {
    let mut all: Vec<String> = flags.iter().map(ToString::to_string).collect();
    all.extend(["--keys".to_owned(), keys.to_string()]);
    Work::Release { name, flags: all, knobs, base: Base::Sample }
}

const ONE_CORE: &str = "readrandom, one core, depth 64";
const GET_CPU: &str = "readrandom, processor time per get";
const RESP_GET: &str = "RESP get over 100,000 keys, -P 16 -c 50 -d 1000, cached";
const RESP_ONE_BY_ONE: &str = "RESP get, 1,000 connections, one command at a time";
const RESP_ONE_BY_ONE_CPU: &str = "RESP get, 1,000 connections, processor time per request";

const FIO_SAME_SIZE: &str = "fio io_uring, one job, depth 64, same request size and alignment";
const FIO_PER_READ: &str = "fio's per read, same request size (the difference)";
const ONE_THREAD: &str = "RocksDB release, one thread";
const BEST_THREADS: &str = "RocksDB release, its best number of threads on all cores";
const BEST_THREADS_CPU: &str = "RocksDB release, its best number of threads";
const MULTI_GET: &str = "RocksDB release with io_uring, batched MultiGet";
const BEST_AHEAD: &str = "RocksDB release, its best read-ahead";
const BEST_CACHE: &str = "RocksDB release, one thread, its better cache";
const REDIS: &str = "redis-server";

/// These rows.
#[rustfmt::skip]
pub fn rows() -> Vec<Row> {
    let multi = "multireadrandom, 64 keys, one caller";
    vec![
        Row::rate(ONE_CORE, FIO_SAME_SIZE, [GET, FIO_SAME]).at_least(0.9),
        Row::rate(ONE_CORE, "fio io_uring, plain 4 KiB", [GET, FIO_4K]),
        Row::rate(ONE_CORE, ONE_THREAD, [GET, GET_1_PEER]).at_least(8.0).bounded_by(DISK_64_OVER_1),
        Row::rate(ONE_CORE, BEST_THREADS, [GET, GET_PEER]).at_least(1.0),
        Row::cpu(GET_CPU, BEST_THREADS_CPU, [GET, GET_PEER]).at_most(1.0 / 3.0),
        Row::cpu(GET_CPU, FIO_PER_READ, [GET, FIO_SAME]).at_most(2.5).difference(),
        Row::rate(multi, MULTI_GET, [MULTI, MULTI_PEER]).at_least(8.0).bounded_by(DISK_64_OVER_1),
        Row::rate("seekrandom, 50 nexts, one caller", BEST_AHEAD, [SEEK, SEEK_PEER])
            .at_least(2.0).bounded_by(DISK_64_OVER_1),
        Row::rate("seekrandom, 50 prevs, one caller", BEST_AHEAD, [SEEK_REVERSE, SEEK_REVERSE_PEER])
            .at_least(5.0),
        Row::rate("readseq", BEST_AHEAD, [SEQ, SEQ_PEER]).at_least(1.2),
        Row::rate("readreverse", "our own readseq", [REVERSE, SEQ]).at_least(0.8),
        Row::rate("readreverse", BEST_AHEAD, [REVERSE, REVERSE_PEER]).at_least(8.0),
        Row::rate("everything cached, one core, depth 64", BEST_CACHE, [GET_CACHED, CACHED_PEER])
            .at_least(1.5),
        Row::rate("everything cached, one core, depth 1", BEST_CACHE, [GET_CACHED_1, CACHED_PEER])
            .at_least(1.0),
        Row::rate("everything cached, two cores", "our own one core", [GET_CACHED_2, GET_CACHED])
            .at_least(1.8),
        Row::rate(RESP_GET, REDIS, redis::GET).at_least(0.95),
        Row::cpu("RESP get, processor time per request", REDIS, redis::GET).at_most(1.0),
        Row::rate(RESP_ONE_BY_ONE, REDIS, redis::GET_ONE_BY_ONE),
        Row::cpu(RESP_ONE_BY_ONE_CPU, REDIS, redis::GET_ONE_BY_ONE),
        Row::alone("opening the database", GET, Unit::Seconds, |sample| sample.open_seconds)
            .at_most(0.5),
    ]
}
