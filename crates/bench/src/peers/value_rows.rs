//! The rows of the table about short and long values, and about keys that are not there.

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

/// Of the bytes that `fillrandom` sets with values of 1000 B, the part that these set.
const FILL_PART: u64 = 4;
const FILL_KNOBS: &[Knob] = &[WRITERS, LOGS];

fn get(setup: &Setup, base: Base, absent: bool, [name, peer]: [&'static str; 2]) -> Vec<Work> {
    let flags: &'static [&'static str] = match absent {
        true => &["readrandom", "--depth", "64", "--absent"],
        false => &["readrandom", "--depth", "64"],
    };
    let ours = Ours { flags, cached_keys: None, two_cores: true, base };
    let mut theirs = words(&["readrandom", "--keys", &base.keys(setup).to_string()]);
    if absent {
        theirs.push("--absent".to_owned());
    }
    vec![
        Work::Ours(name, ours),
        Work::Release { name: peer, flags: theirs, knobs: &[THREADS], base },
    ]
}

fn get_short(setup: &Setup) -> Vec<Work> {
    get(setup, SHORT, false, [GET_SHORT, GET_SHORT_PEER])
}

fn get_long(setup: &Setup) -> Vec<Work> {
    get(setup, LONG, false, [GET_LONG, GET_LONG_PEER])
}

fn get_absent(setup: &Setup) -> Vec<Work> {
    get(setup, Base::Sample, true, [ABSENT, ABSENT_PEER])
}

fn fill(setup: &Setup, base: Base, [name, peer]: [&'static str; 2]) -> Vec<Work> {
    let entry = |base: Base| (KEY + base.value_size()) as u64;
    let num = num_process(setup) * entry(Base::Sample) / FILL_PART / entry(base);
    let [keys, num, size] =
        [base.keys(setup), num.max(1), base.value_size() as u64].map(|number| number.to_string());
    let common = ["fillrandom", "--keys", &keys, "--num", &num, "--value-size", &size];
    let flags = words(&[&common[..], &["--durability", "process"]].concat());
    let knobs = FILL_KNOBS;
    vec![
        Work::Write(Write::Ours { name, flags, copy: None, load: None }),
        Work::Write(Write::Release {
            name: peer,
            flags: words(&common),
            knobs,
            copy: None,
            load: None,
        }),
    ]
}

fn fill_short(setup: &Setup) -> Vec<Work> {
    fill(setup, SHORT, [FILL_SHORT, FILL_SHORT_PEER])
}

fn fill_long(setup: &Setup) -> Vec<Work> {
    fill(setup, LONG, [FILL_LONG, FILL_LONG_PEER])
}

/// These rows.
pub fn rows() -> Vec<Row> {
    const BEST: &str = "RocksDB release, its best number of threads";
    const BEST_FILL: &str = "RocksDB release (log, no sync), its best settings";
    vec![
        Row::rate(
            "readrandom, 100 B values, two cores, depth 64",
            BEST,
            |r| r.sample(GET_SHORT),
            |r| r.sample(GET_SHORT_PEER),
            get_short,
        ),
        Row::rate(
            "readrandom, 16 KiB values, two cores, depth 64",
            BEST,
            |r| r.sample(GET_LONG),
            |r| r.sample(GET_LONG_PEER),
            get_long,
        ),
        Row::rate(
            "readrandom, absent keys, two cores, depth 64",
            BEST,
            |r| r.sample(ABSENT),
            |r| r.sample(ABSENT_PEER),
            get_absent,
        ),
        Row::cpu(
            "readrandom, absent keys, processor time per get",
            BEST,
            |r| r.sample(ABSENT),
            |r| r.sample(ABSENT_PEER),
            get_absent,
        ),
        Row::rate(
            "fillrandom, 100 B values, process",
            BEST_FILL,
            |r| r.sample(FILL_SHORT),
            |r| r.sample(FILL_SHORT_PEER),
            fill_short,
        ),
        Row::rate(
            "fillrandom, 16 KiB values, process",
            BEST_FILL,
            |r| r.sample(FILL_LONG),
            |r| r.sample(FILL_LONG_PEER),
            fill_long,
        ),
    ]
}
