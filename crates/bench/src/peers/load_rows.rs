//! The rows of the table about latency at an offered load: gets with durable sets among them, that
//! arrive whether or not earlier ones are done.
//!
//! First each program shows the most that it can do. Then it is offered parts of that, at times
//! that are fixed beforehand, and a latency counts from the time at which its operation was to
//! begin. The same figures, as throughput and p99, are what `--plot` draws.

use super::Setup;
use super::bases::Base;
use super::plot::{Chart, Curve};
use super::read_rows::{THREADS, get_fio};
use super::row::{Round, Row, Unit};
use super::sample::median;
use super::search::Knob;
use super::work::{FIO_SAME, Work};
use super::write_rows::{DIRECT, JOBS, LOGS, MEMTABLES, words};
use super::writes::{Load, Write};

/// What the names of these rows begin with.
pub const NAME: &str = "90 % gets, 10 % durable sets";

const MOST: &str = "millrace mixed";
const MOST_PEER: &str = "rocksdb mixed";
const BEST: &str = "RocksDB release, sync, its best settings";
const KNOBS: &[Knob] = &[THREADS, LOGS, DIRECT, MEMTABLES, JOBS];

fn common(setup: &Setup) -> Vec<String> {
    let keys = setup.keys.to_string();
    words(&["readrandomwriterandom", "--write-percent", "10", "--keys", &keys])
}

/// What both can do at most, or do at a part of it.
fn mixed(
    setup: &Setup,
    [name, peer]: [&'static str; 2],
    [load, peer_load]: [Option<Load>; 2],
) -> Vec<Work> {
    let (mut flags, mut peer_flags) = (common(setup), common(setup));
    flags.extend(words(&["--durability", "power"]));
    peer_flags.push("--sync".to_owned());
    let copy = Some(Base::Sample);
    vec![
        Work::Write(Write::Ours { name, flags, copy, load }),
        Work::Write(Write::Release {
            name: peer,
            flags: peer_flags,
            knobs: KNOBS,
            copy,
            load: peer_load,
        }),
    ]
}

fn most(setup: &Setup) -> Vec<Work> {
    let mut works = get_fio(setup);
    works.extend(mixed(setup, [MOST, MOST_PEER], [None; 2]));
    works
}

/// The names of both at each offered load, in hundredths of the most.
const LOADS: [(u8, &str, &str); 5] = [
    (20, names::OURS_20, names::PEER_20),
    (40, names::OURS_40, names::PEER_40),
    (60, names::OURS_60, names::PEER_60),
    (80, names::OURS_80, names::PEER_80),
    (90, names::OURS_90, names::PEER_90),
];

mod names {
    pub const OURS_20: &str = "millrace mixed at 20 %";
    pub const OURS_40: &str = "millrace mixed at 40 %";
    pub const OURS_60: &str = "millrace mixed at 60 %";
    pub const OURS_80: &str = "millrace mixed at 80 %";
    pub const OURS_90: &str = "millrace mixed at 90 %";
    pub const PEER_20: &str = "rocksdb mixed at 20 %";
    pub const PEER_40: &str = "rocksdb mixed at 40 %";
    pub const PEER_60: &str = "rocksdb mixed at 60 %";
    pub const PEER_80: &str = "rocksdb mixed at 80 %";
    pub const PEER_90: &str = "rocksdb mixed at 90 %";
}

/// The rows at one offered load.
macro_rules! at {
    ($percent:literal, $ours:expr, $peer:expr) => {{
        fn works(setup: &Setup) -> Vec<Work> {
            let share = $percent as f64 / 100.0;
            let loads = [MOST, MOST_PEER].map(|of| Some(Load { of, share }));
            let mut works = most(setup);
            works.extend(mixed(setup, [$ours, $peer], loads));
            works
        }
        let row = |name| Row::rate(name, BEST, |r| r.sample($ours), |r| r.sample($peer), works);
        [
            row(concat!(
                "90 % gets, 10 % durable sets, offered ",
                $percent,
                " % of its maximum, p50"
            ))
            .of(Unit::Us, |sample| sample.p50_us),
            row(concat!(
                "90 % gets, 10 % durable sets, offered ",
                $percent,
                " % of its maximum, p99"
            ))
            .of(Unit::Us, |sample| sample.p99_us),
            row(concat!(
                "90 % gets, 10 % durable sets, offered ",
                $percent,
                " % of its maximum, p99.9"
            ))
            .of(Unit::Us, |sample| sample.p999_us),
        ]
    }};
}

/// These rows.
pub fn rows() -> Vec<Row> {
    let mut rows = vec![Row::rate(
        "90 % gets, 10 % durable sets, two cores, depth 64",
        BEST,
        |r| r.sample(MOST),
        |r| r.sample(MOST_PEER),
        most,
    )];
    rows.extend(at!(20, names::OURS_20, names::PEER_20));
    rows.extend(at!(40, names::OURS_40, names::PEER_40));
    rows.extend(at!(60, names::OURS_60, names::PEER_60));
    rows.extend(at!(80, names::OURS_80, names::PEER_80));
    rows.extend(at!(90, names::OURS_90, names::PEER_90));
    rows
}

/// Whether a row is one of those that are drawn.
pub fn is_load(row: &Row) -> bool {
    row.name.starts_with(NAME) && row.unit == Unit::Us
}

/// What the rounds say, as curves.
pub fn chart(rounds: &[Round]) -> Chart {
    let middle = |name: &str, figure: fn(&super::sample::Sample) -> Option<f64>| {
        median(rounds.iter().filter_map(|round| figure(round.sample(name)?)))
    };
    let curve = |label: &str, pick: fn(&(u8, &'static str, &'static str)) -> &'static str| {
        let point = |load| {
            let name = pick(load);
            Some((middle(name, |s| Some(s.ops_per_second))?, middle(name, |s| s.p99_us)?))
        };
        Curve { label: label.to_owned(), points: LOADS.iter().filter_map(point).collect() }
    };
    Chart {
        title: format!("{NAME}, open loop: p99 against throughput"),
        curves: vec![curve("Millrace", |load| load.1), curve("RocksDB", |load| load.2)],
        ceiling: middle(FIO_SAME, |sample| Some(sample.ops_per_second)),
        ceiling_label: "the disk's ceiling: random reads of fio".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::Sample;
    use super::*;

    #[test]
    fn the_chart_has_the_medians_of_the_rounds() {
        let round = |ops_per_second: f64, p99: f64| {
            let mut round = Round::default();
            let sample = Sample { ops_per_second, p99_us: Some(p99), ..Sample::default() };
            round.put(names::OURS_20, sample.clone());
            round.put(FIO_SAME, sample);
            round
        };
        let chart = chart(&[round(10.0, 1.0), round(30.0, 3.0), round(20.0, 9.0)]);
        assert_eq!(chart.curves[0].points, [(20.0, 3.0)]);
        assert!(chart.curves[1].points.is_empty());
        assert_eq!(chart.ceiling, Some(20.0));
    }

    #[test]
    fn every_load_has_its_three_rows() {
        let drawn = rows().iter().filter(|row| is_load(row)).count();
        assert_eq!(drawn, 3 * LOADS.len());
    }
}
