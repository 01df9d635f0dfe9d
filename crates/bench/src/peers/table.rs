//! The table of the README: one row per comparison, medians over the rounds, rows we lose too.

use std::fmt::Write as _;

use super::rows::{Compare, Goal, Round, Row, Unit};
use super::sample::median;

/// The table, and below it what it was measured on.
pub fn markdown(rows: &[Row], rounds: &[Round], conditions: &[(String, String)]) -> String {
    let mut out = String::from(
        "| case | against | Millrace | peer | measured | to reach | |\n\
         |---|---|---:|---:|---:|---:|---|\n",
    );
    for row in rows {
        let over_rounds =
            |figure: &dyn Fn(&Round) -> Option<f64>| median(rounds.iter().filter_map(figure));
        let ours = over_rounds(&row.ours);
        let theirs = over_rounds(&row.theirs);
        let figure = over_rounds(&|round: &Round| row.figure(round));
        let verdict = match figure.map(|figure| row.goal.reached(figure)) {
            Some(Some(true)) => "reached",
            Some(Some(false)) => "**lost**",
            Some(None) => "",
            None => "not measured",
        };
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {verdict} |",
            row.name,
            row.against,
            number(ours, row.unit),
            if row.compare == Compare::Alone { String::new() } else { number(theirs, row.unit) },
            measured(figure, row),
            goal(row),
        );
    }
    out.push('\n');
    for (name, text) in conditions {
        let _ = writeln!(out, "- {name}: {text}");
    }
    out
}

fn number(value: Option<f64>, unit: Unit) -> String {
    let Some(value) = value else { return "-".to_owned() };
    match unit {
        Unit::PerSecond if value >= 10_000.0 => format!("{:.1} k/s", value / 1000.0),
        Unit::PerSecond => format!("{value:.0}/s"),
        Unit::Us if value < 1.0 => format!("{value:.3} us"),
        Unit::Us => format!("{value:.2} us"),
        Unit::Percent => format!("{value:.2} %"),
        Unit::Seconds => format!("{value:.3} s"),
    }
}

fn measured(figure: Option<f64>, row: &Row) -> String {
    match (figure, row.compare) {
        (None, _) => "-".to_owned(),
        (Some(figure), Compare::Ratio) if figure < 0.1 => format!("{figure:.4} ×"),
        (Some(figure), Compare::Ratio) => format!("{figure:.2} ×"),
        (figure, _) => number(figure, row.unit),
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
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::rows;
    use super::super::sample::Sample;
    use super::*;

    fn round(ours: f64, theirs: f64) -> Round {
        let mut round = Round::default();
        let sample = |ops_per_second| Sample { ops_per_second, ..Sample::default() };
        round.put("millrace readrandom", sample(ours));
        round.put("rocksdb readrandom 1 thread", sample(theirs));
        round
    }

    #[test]
    fn a_ratio_is_taken_within_a_round_and_the_median_counts() {
        let rounds = [round(80_000.0, 10_000.0), round(50.0, 1.0), round(90_000.0, 30_000.0)];
        let table = markdown(&rows(Some("one thread")), &rounds, &[]);
        let line = table.lines().nth(2).unwrap();
        assert_eq!(
            line,
            "| readrandom, one core, depth 64 | RocksDB release, one thread | 80.0 k/s | \
             10.0 k/s | 8.00 × | ≥ 8.00 × | reached |"
        );
    }

    #[test]
    fn a_lost_row_and_one_that_was_not_measured_stay_in_the_table() {
        let lost = markdown(&rows(Some("one thread")), &[round(70.0, 10.0)], &[]);
        assert!(lost.contains("| 7.00 × | ≥ 8.00 × | **lost** |"), "{lost}");
        let nothing = markdown(&rows(None), &[Round::default()], &[]);
        assert_eq!(
            nothing.lines().filter(|line| line.contains("not measured")).count(),
            rows(None).len()
        );
    }

    #[test]
    fn conditions_stand_below() {
        let conditions = [("kernel".to_owned(), "6.1".to_owned())];
        assert!(markdown(&[], &[], &conditions).ends_with("\n- kernel: 6.1\n"));
    }
}
