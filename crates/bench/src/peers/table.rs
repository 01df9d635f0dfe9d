//! The table of the README: one row per comparison, medians over the rounds, rows we lose too.
//!
//! `measured` is the median of what the rounds gave, each round comparing what was measured next to
//! each other; behind it stand the lowest and the highest. It may differ from the quotient of the
//! medians beside it.

use std::fmt::Write as _;

use super::row::{Compare, Goal, Pick, Round, Row, Unit};
use super::sample::{Sample, median};
use super::work::FIO_SAME;

/// Rounds without which a row is not judged: a single one is luck.
const ROUNDS_MIN: usize = 3;

/// The table, and below it what it was measured on.
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
            measured(&line.figures, row),
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

/// What the rounds say of a row.
struct Line {
    ours: Option<f64>,
    theirs: Option<f64>,
    /// The figure that counts, of each round that has one; in order.
    figures: Vec<f64>,
    bound: String,
    verdict: String,
}

impl Line {
    fn new(row: &Row, rounds: &[Round]) -> Line {
        let of = |pick: Pick, figure: super::row::Figure| {
            median(rounds.iter().filter_map(|round| figure(pick(round)?)))
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
        // Such a row would compare how quickly the load is made.
        let generator = row.unit == Unit::PerSecond && bounds.contains(&"load generator");
        let verdict = match (differs, median(figures.iter().copied())) {
            (Some(why), _) => why,
            (None, None) => "not measured".to_owned(),
            (None, Some(_)) if figures.len() < ROUNDS_MIN => "too few rounds".to_owned(),
            (None, Some(figure)) => match row.goal.reached(figure) {
                _ if generator => "see the processor time".to_owned(),
                Some(true) => "reached".to_owned(),
                Some(false) => "**lost**".to_owned(),
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
            bound: if bounds.iter().any(|bound| *bound != "-") {
                bounds.join(", ")
            } else {
                String::new()
            },
            verdict,
        }
    }
}

/// What bounds ours, and the peer: what it was in most rounds.
fn bounds(row: &Row, rounds: &[Round]) -> Vec<&'static str> {
    let most = |pick: Pick| {
        let mut all: Vec<&str> =
            rounds.iter().filter_map(|round| pick(round)?.bound(round.ops(FIO_SAME))).collect();
        all.sort_unstable();
        let runs = all.chunk_by(|a, b| a == b);
        runs.max_by_key(|run| run.len()).map_or("-", |run| run[0])
    };
    match row.compare {
        Compare::Alone => vec![most(row.ours)],
        _ => vec![most(row.ours), most(row.theirs)],
    }
}

/// A figure of ours and of the peer's, one beside the other.
fn both(
    row: &Row,
    rounds: &[Round],
    figure: fn(&Sample) -> Option<f64>,
    said: fn(f64) -> String,
) -> String {
    let of = |pick: Pick| {
        median(rounds.iter().filter_map(|round| figure(pick(round)?))).map_or("-".to_owned(), said)
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

fn measured(figures: &[f64], row: &Row) -> String {
    let Some(figure) = median(figures.iter().copied()) else { return "-".to_owned() };
    let said = |figure: f64| match row.compare {
        Compare::Ratio if figure < 0.1 => format!("{figure:.4} ×"),
        Compare::Ratio => format!("{figure:.2} ×"),
        _ => number(Some(figure), row.unit),
    };
    match figures {
        [lowest, .., highest] => {
            format!("{} ({} to {})", said(figure), said(*lowest), said(*highest))
        }
        _ => said(figure),
    }
}

fn goal(row: &Row) -> String {
    let (sign, value) = match row.goal {
        Goal::AtLeast(value) => ('≥', value),
        Goal::AtMost(value) => ('≤', value),
        Goal::Told => return String::new(),
    };
    match (row.compare, row.unit) {
        (Compare::Ratio, _) if value < 0.1 => format!("{sign} {value:.4} ×"),
        (Compare::Ratio, _) => format!("{sign} {value:.2} ×"),
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
    fn a_lost_row_and_one_that_was_not_measured_stay_in_the_table() {
        let lost = one_thread(&[round(70.0, 10.0), round(70.0, 10.0), round(70.0, 10.0)]);
        assert!(lost.contains("| ≥ 8.00 × | **lost** |"), "{lost}");
        let nothing = markdown(&rows(&[]), &[Round::default()], &[]);
        assert_eq!(
            nothing.lines().filter(|line| line.contains("not measured")).count(),
            rows(&[]).len()
        );
    }

    #[test]
    fn a_row_is_not_judged_by_a_round_or_two_or_when_the_load_generator_was_at_its_end() {
        let once = one_thread(&[round(90.0, 10.0), round(90.0, 10.0)]);
        assert!(once.ends_with("| too few rounds |"), "{once}");
        let mut busy = round(90.0, 10.0);
        let sample = Sample { ops_per_second: 9.0, generator_busy: Some(1.0), ..Sample::default() };
        busy.put("rocksdb readrandom 1 thread", sample);
        let line = one_thread(&[busy.clone(), busy.clone(), busy]);
        assert!(line.contains("| -, load generator |"), "{line}");
        assert!(line.ends_with("| see the processor time |"), "{line}");
        assert!(line.contains("| - | - | - |"), "no rate is told: {line}");
    }

    #[test]
    fn conditions_stand_below() {
        let conditions = [("kernel".to_owned(), "6.1".to_owned())];
        assert!(markdown(&[], &[], &conditions).ends_with("\n- kernel: 6.1\n"));
    }
}
