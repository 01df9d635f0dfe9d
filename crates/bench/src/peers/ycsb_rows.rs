//! The rows of the table that are YCSB's workloads: data ten times the memory, its blocks
//! compressed, both programs with the same memory and the same codec.

use super::Setup;
use super::bases::Base;
use super::read_rows::{CACHES, THREADS};
use super::row::{Row, Unit};
use super::search::Knob;
use super::work::Work;
use super::write_rows::{JOBS, LOGS, words};
use super::writes::Write;

/// The data, in multiples of the memory.
const TIMES: u64 = 10;
/// The memory, in multiples of a memtable.
const MEMTABLES: u64 = 16;

/// What a scan of 1 to 100 entries reads ahead.
const AHEAD: Knob = &[&[], &["--readahead", "16384"], &["--readahead", "57344"]];
const KNOBS: &[Knob] = &[THREADS, CACHES, LOGS, JOBS];
const SCAN_KNOBS: &[Knob] = &[THREADS, AHEAD, CACHES, JOBS];

fn ycsb(setup: &Setup, workload: &str, [name, peer]: [&'static str; 2]) -> Vec<Work> {
    let (base, copy) = (Base::Lz4, Some(Base::Lz4));
    let memory = base.bytes(setup) / TIMES;
    let [keys, memtable] = [base.keys(setup), memory / MEMTABLES].map(|number| number.to_string());
    let memory = memory.to_string();
    let common = [
        "ycsb",
        "--workload",
        workload,
        "--keys",
        &keys,
        "--memory",
        &memory,
        "--compression",
        "lz4",
    ];
    let flags =
        words(&[&common[..], &["--memtable", &memtable, "--durability", "process"]].concat());
    let peer_flags = words(&[&common[..], &["--memtable-bytes", &memtable]].concat());
    let knobs = if workload == "e" { SCAN_KNOBS } else { KNOBS };
    vec![
        Work::Write(Write::Ours { name, flags, copy, load: None }),
        Work::Write(Write::Release { name: peer, flags: peer_flags, knobs, copy, load: None }),
    ]
}

macro_rules! workload {
    ($letter:literal, $name:literal) => {{
        const OURS: &str = concat!("millrace ycsb ", $letter);
        const PEER: &str = concat!("rocksdb ycsb ", $letter);
        fn works(setup: &Setup) -> Vec<Work> {
            ycsb(setup, $letter, [OURS, PEER])
        }
        let row = |name| Row::rate(name, BEST, |r| r.sample(OURS), |r| r.sample(PEER), works);
        [row($name), row(concat!($name, ", p99")).of(Unit::Us, |sample| sample.p99_us)]
    }};
}

const BEST: &str = "RocksDB release, the same memory and codec, its best settings";

/// These rows.
pub fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    rows.extend(workload!("a", "YCSB A: 50 % reads, 50 % updates"));
    rows.extend(workload!("b", "YCSB B: 95 % reads, 5 % updates"));
    rows.extend(workload!("c", "YCSB C: reads"));
    rows.extend(workload!("d", "YCSB D: 95 % reads of the latest, 5 % inserts"));
    rows.extend(workload!("e", "YCSB E: 95 % scans of 1 to 100, 5 % inserts"));
    rows.extend(workload!("f", "YCSB F: 50 % reads, 50 % read-modify-writes"));
    rows
}
