//! The table: one row per comparison, with medians over the rounds; lost rows stay in it.
//!
//! `measured` is the median of the rounds' ratios, followed by the lowest and the highest. Each
//! ratio is of two measurements made one after the other, so it may differ from the quotient of the
//! medians beside it.
//!
//! Where the disk bounds a ratio ([`Row::disk`]), the disk's own ratio follows, and a row whose
//! goal is above it is marked "bounded by the disk" instead of "lost", unless the peer is faster
//! where the disk would allow more.

use std::fmt::Write as _;

use super::row::{Compare, Figure, Goal, Round, Row, Unit};
use super::sample::{Sample, median};
use super::work::FIO_SAME;

/// Rounds needed to judge a row: one round is luck.
const ROUNDS_MIN: usize = 3;

/// The table, followed by the conditions of the measurements.
pub fn markdown(rows: &[Row], rounds: &[Round], conditions: &[(String, String)]) -> String {
    let mut out = String::from(
        "| case | against | Millrace | peer | measured | p99 | processor | bound by | to reach | |\n\
         |---|---|---:|---:|---:|---:|---:|---|---:|---|\n",
    );
    for row in rows {
        let line = Line::new(row, rounds);
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            row.name,
            row.against,
            number(line.ours, row.unit),
            if row.compare == Compare::Alone {
                String::new()
            } else {
                number(line.theirs, row.unit)
            },
            measured(&line, row),
            both(row, rounds, |sample| sample.p99_us, |us| number(Some(us), Unit::Us)),
            both(row, rounds, |sample| sample.cpu_us_per_op, |us| number(Some(us), Unit::Us)),
            line.bound,
            goal(row),
            line.verdict,
        );
    }
    out.push('\n');
    for (name, text) in conditions {
        let _ = writeln!(out, "- {name}: {text}");
    }
    out
}

/// A row's figures over all rounds.
struct Line {
    ours: Option<f64>,
    theirs: Option<f64>,
    /// The figure that counts, of each round that has one; sorted.
    figures: Vec<f64>,
    /// The disk's own ratio, if it bounds the row.
    disk: Option<f64>,
    bound: String,
    verdict: String,
}

impl Line {
    fn new(row: &Row, rounds: &[Round]) -> Line {
        let of = |name: &str, figure: Figure| {
            median(rounds.iter().filter_map(|round| figure(round.sample(name)?)))
        };
        let mut figures = Vec::new();
        let mut differs = None;
        for round in rounds {
            match row.figure_of(round) {
                Ok(figure) => figures.extend(figure),
                Err(why) => differs = Some(why),
            }
        }
        figures.sort_by(f64::total_cmp);
        let bounds = bounds(row, rounds);
        let disk = median(rounds.iter().filter_map(|round| row.disk_ratio(round)));
        // The row would compare the load generator with itself.
        let generator = row.unit == Unit::PerSecond && bounds.contains(&"load generator");
        let verdict = match (differs, median(figures.iter().copied())) {
            (Some(why), _) => why,
            (None, None) => "not measured".to_owned(),
            (None, Some(_)) if figures.len() < ROUNDS_MIN => "too few rounds".to_owned(),
            (None, Some(figure)) => match row.goal.reached(figure) {
                _ if generator => "see the processor time".to_owned(),
                Some(true) => "reached".to_owned(),
                Some(false) => lost(row.goal, figure, disk),
                None => String::new(),
            },
        };
        if generator {
            figures.clear();
        }
        Line {
            ours: of(row.ours, row.figure).filter(|_| !generator),
            theirs: of(row.theirs, row.peer_figure).filter(|_| !generator),
            figures,
            disk,
            bound: if bounds.iter().any(|bound| *bound != "-") {
                bounds.join(", ")
            } else {
                String::new()
            },
            verdict,
        }
    }
}

/// The verdict on a goal that was not reached. The disk is no excuse for being slower than a peer
/// where the disk would allow more.
fn lost(goal: Goal, figure: f64, disk: Option<f64>) -> String {
    match (goal, disk) {
        (Goal::AtLeast(least), Some(disk)) if least > disk && figure >= disk.min(1.0) => {
            format!("bounded by the disk: {}", times(disk))
        }
        _ => "**lost**".to_owned(),
    }
}

/// What bounds our program and the peer, in most rounds.
fn bounds(row: &Row, rounds: &[Round]) -> Vec<&'static str> {
    let most = |name: &str| {
        let bound = |round: &Round| round.sample(name)?.bound(round.ops(FIO_SAME));
        let mut all: Vec<&str> = rounds.iter().filter_map(bound).collect();
        all.sort_unstable();
        let runs = all.chunk_by(|a, b| a == b);
        runs.max_by_key(|run| run.len()).map_or("-", |run| run[0])
    };
    match row.compare {
        Compare::Alone => vec![most(row.ours)],
        _ => vec![most(row.ours), most(row.theirs)],
    }
}

/// A figure of ours and the peer's, side by side.
fn both(
    row: &Row,
    rounds: &[Round],
    figure: fn(&Sample) -> Option<f64>,
    said: fn(f64) -> String,
) -> String {
    let of = |name: &str| {
        let figures = rounds.iter().filter_map(|round| figure(round.sample(name)?));
        median(figures).map_or("-".to_owned(), said)
    };
    let (ours, theirs) = (of(row.ours), of(row.theirs));
    match (ours.as_str(), theirs.as_str()) {
        ("-", "-") => String::new(),
        (_, _) if row.compare == Compare::Alone => ours,
        _ => format!("{ours}, {theirs}"),
    }
}

fn number(value: Option<f64>, unit: Unit) -> String {
    let Some(value) = value else { return "-".to_owned() };
    match unit {
        Unit::PerSecond if value >= 10_000.0 => format!("{:.1} k/s", value / 1000.0),
        Unit::PerSecond => format!("{value:.0}/s"),
        Unit::Us if value < 1.0 => format!("{value:.3} us"),
        Unit::Us if value >= 1000.0 => format!("{value:.0} us"),
        Unit::Us => format!("{value:.2} us"),
        Unit::Percent => format!("{value:.2} %"),
        Unit::Seconds => format!("{value:.3} s"),
        Unit::Times => format!("{value:.2}"),
    }
}

/// The figure that counts with its range, and the disk's own ratio if it bounds the row.
fn measured(line: &Line, row: &Row) -> String {
    let Some(figure) = median(line.figures.iter().copied()) else { return "-".to_owned() };
    let said = |figure: f64| match row.compare {
        Compare::Ratio => times(figure),
        _ => number(Some(figure), row.unit),
    };
    let range = match line.figures.as_slice() {
        [lowest, .., highest] => format!(" ({} to {})", said(*lowest), said(*highest)),
        _ => String::new(),
    };
    let disk = line.disk.map_or(String::new(), |disk| format!("; disk {}", times(disk)));
    format!("{}{range}{disk}", said(figure))
}

fn times(ratio: f64) -> String {
    if ratio < 0.1 { format!("{ratio:.4} ×") } else { format!("{ratio:.2} ×") }
}

fn goal(row: &Row) -> String {
    let (sign, value) = match row.goal {
        Goal::AtLeast(value) => ('≥', value),
        Goal::AtMost(value) => ('≤', value),
        Goal::None => return String::new(),
    };
    match (row.compare, row.unit) {
        (Compare::Ratio, _) => format!("{sign} {}", times(value)),
        (_, Unit::Percent) => format!("{sign} {value:.1} %"),
        (_, Unit::Seconds) => format!("{sign} {value:.1} s"),
        (_, Unit::Us) => format!("{sign} {value:.1} us"),
        (_, Unit::PerSecond) => format!("{sign} {value:.0}/s"),
        (_, Unit::Times) => format!("{sign} {value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows;
    use super::*;

    fn round(ours: f64, theirs: f64) -> Round {
        let mut round = Round::default();
        let sample = |ops_per_second| Sample { ops_per_second, ..Sample::default() };
        round.put("millrace readrandom", sample(ours));
        round.put("rocksdb readrandom 1 thread", sample(theirs));
        round
    }

    fn one_thread(rounds: &[Round]) -> String {
        let table = markdown(&rows(&["one thread".to_owned()]), rounds, &[]);
        table.lines().nth(2).unwrap().to_owned()
    }

    #[test]
    fn a_ratio_is_taken_within_a_round_and_the_median_counts() {
        let rounds = [round(80_000.0, 10_000.0), round(50.0, 1.0), round(90_000.0, 30_000.0)];
        assert_eq!(
            one_thread(&rounds),
            "| readrandom, one core, depth 64 | RocksDB release, one thread | 80.0 k/s | \
             10.0 k/s | 8.00 × (3.00 × to 50.00 ×) |  |  |  | ≥ 8.00 × | reached |"
        );
    }

    #[test]
    fn a_goal_above_the_disks_own_ratio_is_bounded_by_the_disk() {
        let with_disk = |ours: f64, at_64: f64| {
            let mut round = round(ours, 10.0);
            let sample = |ops_per_second| Sample { ops_per_second, ..Sample::default() };
            round.put("fio same size", sample(at_64));
            round.put("fio same size depth 1", sample(10.0));
            round
        };
        let line = |ours, at_64| one_thread(&[(); 3].map(|()| with_disk(ours, at_64)));
        let bounded = line(70.0, 75.0);
        assert!(bounded.contains("7.00 × (7.00 × to 7.00 ×); disk 7.50 ×"), "{bounded}");
        assert!(bounded.ends_with("| ≥ 8.00 × | bounded by the disk: 7.50 × |"), "{bounded}");
        for lost in [line(70.0, 90.0), line(9.0, 75.0)] {
            assert!(lost.ends_with("| ≥ 8.00 × | **lost** |"), "{lost}");
        }
    }

    #[test]
    fn lost_and_unmeasured_rows_stay_in_the_table() {
        let lost = one_thread(&[round(70.0, 10.0), round(70.0, 10.0), round(70.0, 10.0)]);
        assert!(lost.contains("| ≥ 8.00 × | **lost** |"), "{lost}");
        let nothing = markdown(&rows(&[]), &[Round::default()], &[]);
        assert_eq!(
            nothing.lines().filter(|line| line.contains("not measured")).count(),
            rows(&[]).len()
        );
    }

    #[test]
    fn a_row_is_not_judged_by_two_rounds_or_with_a_saturated_load_generator() {
        let once = one_thread(&[round(90.0, 10.0), round(90.0, 10.0)]);
        assert!(once.ends_with("| too few rounds |"), "{once}");
        let mut busy = round(90.0, 10.0);
        let sample = Sample { ops_per_second: 9.0, generator_busy: Some(1.0), ..Sample::default() };
        busy.put("rocksdb readrandom 1 thread", sample);
        let line = one_thread(&[busy.clone(), busy.clone(), busy]);
        assert!(line.contains("| -, load generator |"), "{line}");
        assert!(line.ends_with("| see the processor time |"), "{line}");
        assert!(line.contains("| - | - | - |"), "no rate is shown: {line}");
    }

    #[test]
    fn conditions_follow_the_table() {
        let conditions = [("kernel".to_owned(), "6.1".to_owned())];
        assert!(markdown(&[], &[], &conditions).ends_with("\n- kernel: 6.1\n"));
    }
}
