//! The rows of the table about short and long values, and about absent keys.

use super::Setup;
use super::bases::{Base, KEY};
use super::ours::Ours;
use super::read_rows::THREADS;
use super::row::Row;
use super::search::Knob;
use super::work::Work;
use super::write_rows::{LOGS, WRITERS, words};
use super::writes::{Write, num_process};

const SHORT: Base = Base::Values(100);
const LONG: Base = Base::Values(16 << 10);

const GET_SHORT: &str = "millrace readrandom 100 B";
const GET_SHORT_PEER: &str = "rocksdb readrandom 100 B";
const GET_LONG: &str = "millrace readrandom 16 KiB";
const GET_LONG_PEER: &str = "rocksdb readrandom 16 KiB";
const ABSENT: &str = "millrace readrandom absent";
const ABSENT_PEER: &str = "rocksdb readrandom absent";
const FILL_SHORT: &str = "millrace fillrandom 100 B";
const FILL_SHORT_PEER: &str = "rocksdb fillrandom 100 B";
const FILL_LONG: &str = "millrace fillrandom 16 KiB";
const FILL_LONG_PEER: &str = "rocksdb fillrandom 16 KiB";

/// These set a fourth of the bytes that `fillrandom` sets with values of 1000 B.
const FILL_PART: u64 = 4;
const FILL_KNOBS: &[Knob] = &[WRITERS, LOGS];

/// How one of these rows' measurements is made.
pub fn measurement(setup: &Setup, name: &'static str) -> Option<Work> {
    Some(match name {
        GET_SHORT => get(name, SHORT, &["readrandom", "--depth", "64"]),
        GET_LONG => get(name, LONG, &["readrandom", "--depth", "64"]),
        ABSENT => get(name, Base::Sample, &["readrandom", "--depth", "64", "--absent"]),
        GET_SHORT_PEER => get_peer(setup, name, SHORT, &["readrandom"]),
        GET_LONG_PEER => get_peer(setup, name, LONG, &["readrandom"]),
        ABSENT_PEER => get_peer(setup, name, Base::Sample, &["readrandom", "--absent"]),
        FILL_SHORT | FILL_LONG => {
            let base = if name == FILL_SHORT { SHORT } else { LONG };
            let flags = [fill(setup, base), words(&["--durability", "process"])].concat();
            Work::Write(Write::Ours { name, flags, copy: None, load: None })
        }
        FILL_SHORT_PEER | FILL_LONG_PEER => {
            let base = if name == FILL_SHORT_PEER { SHORT } else { LONG };
            let (flags, knobs) = (fill(setup, base), FILL_KNOBS);
            Work::Write(Write::Release { name, flags, knobs, copy: None, load: None })
        }
        _ => return None,
    })
}

fn get(name: &'static str, base: Base, flags: &'static [&'static str]) -> Work {
    Work::Ours(name, Ours { flags, cached_keys: None, two_cores: true, base })
}

fn get_peer(setup: &Setup, name: &'static str, base: Base, flags: &[&str]) -> Work {
    let flags = [words(flags), words(&["--keys", &base.keys(setup).to_string()])].concat();
    Work::Release { name, flags, knobs: &[THREADS], base }
}

fn fill(setup: &Setup, base: Base) -> Vec<String> {
    let entry = |base: Base| (KEY + base.value_size()) as u64;
    let num = num_process(setup) * entry(Base::Sample) / FILL_PART / entry(base);
    let [keys, num, size] =
        [base.keys(setup), num.max(1), base.value_size() as u64].map(|number| number.to_string());
    words(&["fillrandom", "--keys", &keys, "--num", &num, "--value-size", &size])
}

/// These rows.
#[rustfmt::skip]
pub fn rows() -> Vec<Row> {
    const BEST: &str = "RocksDB release, its best number of threads";
    const BEST_FILL: &str = "RocksDB release (log, no sync), its best settings";
    let short = "readrandom, 100 B values, two cores, depth 64";
    let long = "readrandom, 16 KiB values, two cores, depth 64";
    vec![
        Row::rate(short, BEST, [GET_SHORT, GET_SHORT_PEER]),
        Row::rate(long, BEST, [GET_LONG, GET_LONG_PEER]),
        Row::rate("readrandom, absent keys, two cores, depth 64", BEST, [ABSENT, ABSENT_PEER]),
        Row::cpu("readrandom, absent keys, processor time per get", BEST, [ABSENT, ABSENT_PEER]),
        Row::rate("fillrandom, 100 B values, process", BEST_FILL, [FILL_SHORT, FILL_SHORT_PEER]),
        Row::rate("fillrandom, 16 KiB values, process", BEST_FILL, [FILL_LONG, FILL_LONG_PEER]),
    ]
}
