//! The rows of the table that read a database.

use super::Setup;
use super::bases::Base;
use super::ours::Ours;
use super::redis::{self, Server};
use super::row::{Compare, Goal, Row, Unit};
use super::search::Knob;
use super::work::{FIO_4K, FIO_SAME, GET, Work};

/// Keys that the cached rows draw from: half a million values, that is 500 MB.
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
/// Which block cache.
pub const CACHES: Knob = &[&["--cache", "lru"], &["--cache", "hyperclock"]];
const ASYNC: Knob = &[&[], &["--async-io"]];
/// What an iterator reads ahead that takes fifty steps.
const AHEAD_SHORT: Knob = &[
    &[],
    &["--readahead", "16384"],
    &["--readahead", "32768"],
    &["--readahead", "57344"],
    &["--readahead", "65536"],
    &["--readahead", "131072"],
];
/// What one reads ahead that goes over everything.
const AHEAD_LONG: Knob = &[
    &[],
    &["--readahead", "262144"],
    &["--readahead", "1048576"],
    &["--readahead", "2097152"],
    &["--readahead", "4194304"],
];

fn ours(name: &'static str) -> Work {
    let flags: &'static [&'static str] = match name {
        GET | GET_CACHED | GET_CACHED_2 => &["readrandom", "--depth", "64"],
        GET_CACHED_1 => &["readrandom", "--depth", "1"],
        MULTI => &["multireadrandom", "--batch", "64"],
        SEEK => &["seekrandom", "--nexts", "50"],
        SEEK_REVERSE => &["seekrandom", "--nexts", "50", "--reverse"],
        SEQ => &["readseq"],
        _ => &["readreverse"],
    };
    let cached = matches!(name, GET_CACHED | GET_CACHED_1 | GET_CACHED_2);
    let two_cores = name == GET_CACHED_2;
    Work::Ours(
        name,
        Ours { flags, cached_keys: cached.then_some(CACHED_KEYS), two_cores, base: Base::Sample },
    )
}

fn release(name: &'static str, keys: u64, flags: &[&str], knobs: &'static [Knob]) -> Work {
    let mut all: Vec<String> = flags.iter().map(ToString::to_string).collect();
    all.extend(["--keys".to_owned(), keys.to_string()]);
    Work::Release { name, flags: all, knobs, base: Base::Sample }
}

fn get_one_thread(setup: &Setup) -> Vec<Work> {
    vec![ours(GET), release(GET_1_PEER, setup.keys, &["readrandom"], &[])]
}

fn get(setup: &Setup) -> Vec<Work> {
    vec![ours(GET), release(GET_PEER, setup.keys, &["readrandom"], &[THREADS])]
}

/// Our gets, and what fio can do with reads of their size.
pub fn get_fio(_: &Setup) -> Vec<Work> {
    vec![ours(GET), Work::FioSame]
}

fn multi_get(setup: &Setup) -> Vec<Work> {
    let flags = ["multireadrandom", "--batch", "64"];
    vec![ours(MULTI), release(MULTI_PEER, setup.keys, &flags, &[ASYNC])]
}

fn cached(setup: &Setup, name: &'static str) -> Vec<Work> {
    let bytes = CACHED_BYTES.to_string();
    let flags = ["readrandom", "--cache-bytes", &bytes];
    vec![ours(name), release(CACHED_PEER, setup.keys.min(CACHED_KEYS), &flags, &[CACHES])]
}

fn seeks(setup: &Setup) -> Vec<Work> {
    let flags = ["seekrandom", "--nexts", "50", "--reverse"];
    vec![
        ours(SEEK),
        release(SEEK_PEER, setup.keys, &flags[..3], &[AHEAD_SHORT, ASYNC]),
        ours(SEEK_REVERSE),
        release(SEEK_REVERSE_PEER, setup.keys, &flags, &[AHEAD_SHORT, ASYNC]),
    ]
}

fn scans(setup: &Setup) -> Vec<Work> {
    vec![
        ours(SEQ),
        release(SEQ_PEER, setup.keys, &["readseq"], &[AHEAD_LONG, ASYNC]),
        ours(REVERSE),
        release(REVERSE_PEER, setup.keys, &["readreverse"], &[AHEAD_LONG, ASYNC]),
    ]
}

fn redis_get(_: &Setup) -> Vec<Work> {
    [Server::Millrace, Server::Redis].map(|server| Work::Redis(redis::get(server))).into()
}

fn redis_get_one_by_one(_: &Setup) -> Vec<Work> {
    let load = redis::get_one_by_one;
    [Server::Millrace, Server::Redis].map(|server| Work::Redis(load(server))).into()
}

/// These rows.
pub fn rows() -> Vec<Row> {
    use Goal::{AtLeast, AtMost};
    let fio_same = Row::rate(
        "readrandom, one core, depth 64",
        "fio io_uring, one job, depth 64, same request size and alignment",
        |r| r.sample(GET),
        |r| r.sample(FIO_SAME),
        get_fio,
    );
    let cpu_more = Row::cpu(
        "readrandom, processor time per get",
        "fio's per read, same request size (the difference)",
        |r| r.sample(GET),
        |r| r.sample(FIO_SAME),
        get_fio,
    );
    vec![
        fio_same.reaching(AtLeast(0.9)),
        Row::rate(
            "readrandom, one core, depth 64",
            "fio io_uring, plain 4 KiB",
            |r| r.sample(GET),
            |r| r.sample(FIO_4K),
            |_| vec![ours(GET), Work::Fio4k],
        ),
        Row::rate(
            "readrandom, one core, depth 64",
            "RocksDB release, one thread",
            |r| r.sample(GET),
            |r| r.sample(GET_1_PEER),
            get_one_thread,
        )
        .reaching(AtLeast(8.0)),
        Row::rate(
            "readrandom, one core, depth 64",
            "RocksDB release, its best number of threads on all cores",
            |r| r.sample(GET),
            |r| r.sample(GET_PEER),
            get,
        )
        .reaching(AtLeast(1.0)),
        Row::cpu(
            "readrandom, processor time per get",
            "RocksDB release, its best number of threads",
            |r| r.sample(GET),
            |r| r.sample(GET_PEER),
            get,
        )
        .reaching(AtMost(1.0 / 3.0)),
        Row { compare: Compare::Difference, ..cpu_more.reaching(AtMost(2.5)) },
        Row::rate(
            "multireadrandom, 64 keys, one caller",
            "RocksDB release with io_uring, batched MultiGet",
            |r| r.sample(MULTI),
            |r| r.sample(MULTI_PEER),
            multi_get,
        )
        .reaching(AtLeast(8.0)),
        Row::rate(
            "seekrandom, 50 nexts, one caller",
            "RocksDB release, its best read-ahead",
            |r| r.sample(SEEK),
            |r| r.sample(SEEK_PEER),
            seeks,
        )
        .reaching(AtLeast(2.0)),
        Row::rate(
            "seekrandom, 50 prevs, one caller",
            "RocksDB release, its best read-ahead",
            |r| r.sample(SEEK_REVERSE),
            |r| r.sample(SEEK_REVERSE_PEER),
            seeks,
        )
        .reaching(AtLeast(5.0)),
        Row::rate(
            "readseq",
            "RocksDB release, its best read-ahead",
            |r| r.sample(SEQ),
            |r| r.sample(SEQ_PEER),
            scans,
        )
        .reaching(AtLeast(1.2)),
        Row::rate(
            "readreverse",
            "our own readseq",
            |r| r.sample(REVERSE),
            |r| r.sample(SEQ),
            scans,
        )
        .reaching(AtLeast(0.8)),
        Row::rate(
            "readreverse",
            "RocksDB release, its best read-ahead",
            |r| r.sample(REVERSE),
            |r| r.sample(REVERSE_PEER),
            scans,
        )
        .reaching(AtLeast(8.0)),
        Row::rate(
            "everything cached, one core, depth 64",
            "RocksDB release, one thread, its better cache",
            |r| r.sample(GET_CACHED),
            |r| r.sample(CACHED_PEER),
            |setup| cached(setup, GET_CACHED),
        )
        .reaching(AtLeast(1.5)),
        Row::rate(
            "everything cached, one core, depth 1",
            "RocksDB release, one thread, its better cache",
            |r| r.sample(GET_CACHED_1),
            |r| r.sample(CACHED_PEER),
            |setup| cached(setup, GET_CACHED_1),
        )
        .reaching(AtLeast(1.0)),
        Row::rate(
            "everything cached, two cores",
            "our own one core",
            |r| r.sample(GET_CACHED_2),
            |r| r.sample(GET_CACHED),
            |_| vec![ours(GET_CACHED), ours(GET_CACHED_2)],
        )
        .reaching(AtLeast(1.8)),
        Row::rate(
            "RESP get over 100,000 keys, -P 16 -c 50 -d 1000, cached",
            "redis-server",
            |r| r.sample(redis::get(Server::Millrace).name),
            |r| r.sample(redis::get(Server::Redis).name),
            redis_get,
        )
        .reaching(AtLeast(0.95)),
        Row::cpu(
            "RESP get, processor time per request",
            "redis-server",
            |r| r.sample(redis::get(Server::Millrace).name),
            |r| r.sample(redis::get(Server::Redis).name),
            redis_get,
        )
        .reaching(AtMost(1.0)),
        Row::rate(
            "RESP get, 1,000 connections, one command at a time",
            "redis-server",
            |r| r.sample(redis::get_one_by_one(Server::Millrace).name),
            |r| r.sample(redis::get_one_by_one(Server::Redis).name),
            redis_get_one_by_one,
        ),
        Row::cpu(
            "RESP get, 1,000 connections, processor time per request",
            "redis-server",
            |r| r.sample(redis::get_one_by_one(Server::Millrace).name),
            |r| r.sample(redis::get_one_by_one(Server::Redis).name),
            redis_get_one_by_one,
        ),
        Row::alone(
            "opening the database",
            |r| r.sample(GET),
            Unit::Seconds,
            |sample| sample.open_seconds,
            |_| vec![ours(GET)],
        )
        .reaching(AtMost(0.5)),
    ]
}
