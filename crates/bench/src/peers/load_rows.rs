//! The rows of the table about latency at an offered load: gets with durable sets among them, in an
//! open loop.
//!
//! First each program shows its maximum. Then it is offered parts of that, at times that are fixed
//! beforehand, and a latency counts from the time at which the operation was to begin. `--plot`
//! draws the same figures, as throughput and p99.

use super::Setup;
use super::bases::Base;
use super::plot::{Chart, Curve};
use super::read_rows::THREADS;
use super::row::{Figure, Round, Row, Unit};
use super::sample::median;
use super::search::Knob;
use super::work::{FIO_SAME, Work};
use super::write_rows::{DIRECT, JOBS, LOGS, MEMTABLES, words};
use super::writes::{Load, Write};

/// The beginning of these rows' names.
pub const NAME: &str = "90 % gets, 10 % durable sets";

const MAX: &str = "millrace mixed";
const MAX_PEER: &str = "rocksdb mixed";
const BEST: &str = "RocksDB release, sync, its best settings";
const KNOBS: &[Knob] = &[THREADS, LOGS, DIRECT, MEMTABLES, JOBS];

/// An offered load, in hundredths of the maximum, and both measurements at it.
const LOADS: [(u8, &str, &str); 5] = [
    (20, "millrace mixed at 20 %", "rocksdb mixed at 20 %"),
    (40, "millrace mixed at 40 %", "rocksdb mixed at 40 %"),
    (60, "millrace mixed at 60 %", "rocksdb mixed at 60 %"),
    (80, "millrace mixed at 80 %", "rocksdb mixed at 80 %"),
    (90, "millrace mixed at 90 %", "rocksdb mixed at 90 %"),
];

/// How one of these rows' measurements is made.
pub fn measurement(setup: &Setup, name: &'static str) -> Option<Work> {
    let (of, load) = match name {
        MAX | MAX_PEER => (name, None),
        _ => {
            let (percent, ours, _) =
                LOADS.into_iter().find(|(_, ours, peer)| [*ours, *peer].contains(&name))?;
            let of = if name == ours { MAX } else { MAX_PEER };
            (of, Some(Load { of, share: f64::from(percent) / 100.0 }))
        }
    };
    let keys = setup.keys.to_string();
    let mut flags = words(&["readrandomwriterandom", "--write-percent", "10", "--keys", &keys]);
    let copy = Some(Base::Sample);
    Some(Work::Write(if of == MAX {
        flags.extend(words(&["--durability", "power"]));
        Write::Ours { name, flags, copy, load }
    } else {
        flags.push("--sync".to_owned());
        Write::Release { name, flags, knobs: KNOBS, copy, load }
    }))
}

/// These rows.
pub fn rows() -> Vec<Row> {
    let most = Row::rate(format!("{NAME}, two cores, depth 64"), BEST, [MAX, MAX_PEER]);
    // fio's reads are the ceiling in the plot.
    let mut rows = vec![most.after(FIO_SAME)];
    let quantiles: [(&str, Figure); 3] = [
        ("p50", |sample| sample.p50_us),
        ("p99", |sample| sample.p99_us),
        ("p99.9", |sample| sample.p999_us),
    ];
    for (percent, ours, peer) in LOADS {
        for (quantile, figure) in quantiles {
            let name = format!("{NAME}, offered {percent} % of its maximum, {quantile}");
            rows.push(Row::rate(name, BEST, [ours, peer]).of(Unit::Us, figure).after(FIO_SAME));
        }
    }
    rows
}

/// Whether a row is drawn by `--plot`.
pub fn is_load(row: &Row) -> bool {
    row.name.starts_with(NAME) && row.unit == Unit::Us
}

/// The medians of the rounds, as curves.
pub fn chart(rounds: &[Round]) -> Chart {
    let middle = |name: &str, figure: Figure| {
        median(rounds.iter().filter_map(|round| figure(round.sample(name)?)))
    };
    let point =
        |name: &str| Some((middle(name, |s| Some(s.ops_per_second))?, middle(name, |s| s.p99_us)?));
    let curve = |label: &str, names: [&str; 5]| Curve {
        label: label.to_owned(),
        points: names.into_iter().filter_map(point).collect(),
    };
    Chart {
        title: format!("{NAME}, open loop: p99 against throughput"),
        curves: vec![
            curve("Millrace", LOADS.map(|load| load.1)),
            curve("RocksDB", LOADS.map(|load| load.2)),
        ],
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
            round.put(LOADS[0].1, sample.clone());
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
