//! The rows of the table that are YCSB's workloads: the data is ten times the memory and
//! compressed, and both programs have the same memory and the same codec.

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

/// The read-ahead of a scan of 1 to 100 entries.
const AHEAD: Knob = &[&[], &["--readahead", "16384"], &["--readahead", "57344"]];
const KNOBS: &[Knob] = &[THREADS, CACHES, LOGS, JOBS];
const SCAN_KNOBS: &[Knob] = &[THREADS, AHEAD, CACHES, JOBS];

const BEST: &str = "RocksDB release, the same memory and codec, its best settings";

/// A workload: its letter, our measurement, the peer's, and the name of its row.
const WORKLOADS: [(&str, &str, &str, &str); 6] = [
    ("a", "millrace ycsb a", "rocksdb ycsb a", "YCSB A: 50 % reads, 50 % updates"),
    ("b", "millrace ycsb b", "rocksdb ycsb b", "YCSB B: 95 % reads, 5 % updates"),
    ("c", "millrace ycsb c", "rocksdb ycsb c", "YCSB C: reads"),
    ("d", "millrace ycsb d", "rocksdb ycsb d", "YCSB D: 95 % reads of the latest, 5 % inserts"),
    ("e", "millrace ycsb e", "rocksdb ycsb e", "YCSB E: 95 % scans of 1 to 100, 5 % inserts"),
    ("f", "millrace ycsb f", "rocksdb ycsb f", "YCSB F: 50 % reads, 50 % read-modify-writes"),
];

/// How one of these rows' measurements is made.
pub fn measurement(setup: &Setup, name: &'static str) -> Option<Work> {
    let (letter, ours, ..) =
        WORKLOADS.into_iter().find(|(_, ours, peer, _)| [*ours, *peer].contains(&name))?;
    let (base, copy) = (Base::Lz4, Some(Base::Lz4));
    let memory = base.bytes(setup) / TIMES;
    let [keys, memory, memtable] =
        [base.keys(setup), memory, memory / MEMTABLES].map(|number| number.to_string());
    let mut flags = words(&["ycsb", "--workload", letter, "--keys", &keys]);
    flags.extend(words(&["--memory", &memory, "--compression", "lz4"]));
    Some(Work::Write(if name == ours {
        flags.extend(words(&["--memtable", &memtable, "--durability", "process"]));
        Write::Ours { name, flags, copy, load: None }
    } else {
        flags.extend(words(&["--memtable-bytes", &memtable]));
        let knobs = if letter == "e" { SCAN_KNOBS } else { KNOBS };
        Write::Release { name, flags, knobs, copy, load: None }
    }))
}

/// These rows.
pub fn rows() -> Vec<Row> {
    let pair = |(_, ours, peer, name): (_, _, _, &str)| {
        let row = |name: String| Row::rate(name, BEST, [ours, peer]);
        [row(name.to_owned()), row(format!("{name}, p99")).of(Unit::Us, |sample| sample.p99_us)]
    };
    WORKLOADS.into_iter().flat_map(pair).collect()
}
