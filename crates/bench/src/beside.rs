//! Point reads and overwrites of one database: each alone, and both at once (S3.1).
//!
//! The three loads take turns, round by round, so that the shape of the database and the state of
//! the device are about the same for all. The median of the rounds counts, for each figure by
//! itself. Each turn opens the database; merges that a turn leaves undone are work of the next turn
//! that writes.

use std::fmt::Write as _;

use node::Error;
use serde::Serialize;

use crate::case::Case;
use crate::outcome::Outcome;
use crate::run::{Plan, run};

/// The result. Its fields are the keys of the JSON.
#[derive(Clone, Debug, Serialize)]
pub struct BesideOutcome {
    /// The case.
    pub name: &'static str,
    /// Turns of each load.
    pub rounds: u32,
    /// Cores used.
    pub cores: usize,
    /// Reads in flight per core.
    pub depth: u32,
    /// Tasks that write.
    pub writers: u32,
    /// What acknowledged writes survive.
    pub durability: Option<&'static str>,
    /// One line for each load.
    pub lines: Vec<BesideLine>,
    /// Reads per second beside writes, divided by those alone.
    pub reads_ratio: f64,
    /// Mean latency of writes beside reads, divided by that of writes alone.
    pub write_latency_ratio: f64,
    /// This program's version.
    pub millrace: &'static str,
}

/// The figures of one load; those of reads are null if it has none, those of writes as well.
#[derive(Clone, Debug, Serialize)]
pub struct BesideLine {
    /// The load: reads, writes, both.
    pub load: &'static str,
    /// Gets.
    pub reads_per_second: Option<f64>,
    /// Mean latency of gets, in microseconds.
    pub read_mean_us: Option<f64>,
    /// 99th percentile of the latency of gets.
    pub read_p99_us: Option<f64>,
    /// Sets.
    pub writes_per_second: Option<f64>,
    /// Mean latency of sets, in microseconds.
    pub write_mean_us: Option<f64>,
    /// 99th percentile of the latency of sets.
    pub write_p99_us: Option<f64>,
    /// The longest time in which a set waited and none was acknowledged.
    pub max_stall_ms: Option<f64>,
    /// Processors in use, with those of flushes and merges.
    pub processors: f64,
}

const LOADS: [(&str, Case); 3] =
    [("reads", Case::ReadRandom), ("both", Case::ReadWhileWriting), ("writes", Case::Overwrite)];

/// Measures `rounds` turns of each load, as `plan` says except for its case.
///
/// # Errors
/// As for [`run`].
pub fn run_beside(plan: &Plan, rounds: u32) -> Result<BesideOutcome, Error> {
    let mut samples = [const { Vec::new() }; LOADS.len()];
    for _ in 0..rounds.max(1) {
        for ((_, case), samples) in LOADS.iter().zip(&mut samples) {
            samples.push(run(&Plan { case: *case, ..plan.clone() })?);
        }
    }
    let lines: Vec<_> =
        LOADS.iter().zip(&samples).map(|((load, case), runs)| line(load, *case, runs)).collect();
    let [reads, both, writes] = &lines[..] else { unreachable!("there are three loads") };
    let ratio = |a: Option<f64>, b: Option<f64>| a.unwrap_or(0.0) / b.unwrap_or(0.0).max(1e-9);
    Ok(BesideOutcome {
        name: Case::Beside.name(),
        rounds: rounds.max(1),
        cores: plan.processors.len(),
        depth: plan.depth,
        writers: plan.write.writers,
        durability: samples[1][0].durability,
        reads_ratio: ratio(both.reads_per_second, reads.reads_per_second),
        write_latency_ratio: ratio(both.write_mean_us, writes.write_mean_us),
        millrace: env!("CARGO_PKG_VERSION"),
        lines,
    })
}

/// The medians of a load's turns.
fn line(load: &'static str, case: Case, runs: &[Outcome]) -> BesideLine {
    let of = |figure: &dyn Fn(&Outcome) -> Option<f64>| {
        let mut values: Vec<f64> = runs.iter().filter_map(figure).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    let reads = |figure: fn(&Outcome) -> f64| of(&|run| case.reads().then(|| figure(run)));
    // The figures of a case that reads are those of its reads.
    let writes = |beside: fn(&Outcome) -> Option<f64>, alone: fn(&Outcome) -> f64| {
        of(&|run| if case.reads() { beside(run) } else { Some(alone(run)) })
    };
    BesideLine {
        load,
        reads_per_second: reads(|run| run.ops_per_second),
        read_mean_us: reads(|run| run.mean_us),
        read_p99_us: reads(|run| run.p99_us),
        writes_per_second: writes(|run| run.writes_per_second, |run| run.ops_per_second),
        write_mean_us: writes(|run| run.writes_mean_us, |run| run.mean_us),
        write_p99_us: writes(|run| run.writes_p99_us, |run| run.p99_us),
        max_stall_ms: of(&|run| run.max_stall_ms),
        processors: of(&|run| Some(run.cpu_us_per_op * run.ops_per_second / 1e6)).unwrap_or(0.0),
    }
}

impl BesideOutcome {
    /// The result as a table of text.
    pub fn text(&self) -> String {
        let mut out = format!(
            "{} cores, {} reads in flight on each, {} writers ({}), median of {}:\n",
            self.cores,
            self.depth,
            self.writers,
            self.durability.unwrap_or("no writes"),
            self.rounds
        );
        let _ = writeln!(
            out,
            "{:<7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10}",
            "load",
            "reads/s",
            "mean us",
            "p99 us",
            "writes/s",
            "mean us",
            "p99 us",
            "stall ms",
            "processors"
        );
        for line in &self.lines {
            let number =
                |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.0}"));
            let _ = writeln!(
                out,
                "{:<7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10.2}",
                line.load,
                number(line.reads_per_second),
                number(line.read_mean_us),
                number(line.read_p99_us),
                number(line.writes_per_second),
                number(line.write_mean_us),
                number(line.write_p99_us),
                number(line.max_stall_ms),
                line.processors
            );
        }
        let _ = write!(
            out,
            "reads beside writes: {:.2} of those alone; a write beside reads takes {:.2} times as long",
            self.reads_ratio, self.write_latency_ratio
        );
        out
    }
}
