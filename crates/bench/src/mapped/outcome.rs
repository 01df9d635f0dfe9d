//! The result of the measurement, as text and as JSON.

use std::fmt::Write as _;

use node::Size;
use serde::Serialize;

/// The result. Its fields are the keys of the JSON.
#[derive(Clone, Debug, Serialize)]
pub struct MappedOutcome {
    /// The case.
    pub name: &'static str,
    /// Bytes of the file.
    pub size_bytes: u64,
    /// Operations in flight.
    pub depth: u32,
    /// One line for each load and way.
    pub lines: Vec<MappedLine>,
    /// This program's version.
    pub millrace: &'static str,
}

/// The figures of one way at one load.
#[derive(Clone, Debug, Serialize)]
pub struct MappedLine {
    /// The load: read, 50/50, update, insert.
    pub load: &'static str,
    /// The way.
    pub way: &'static str,
    /// Operations of 4 KiB.
    pub operations: u64,
    /// The same per second, until everything written is durable.
    pub ops_per_second: f64,
    /// Processor time of the process per operation, in microseconds.
    pub cpu_us_per_op: f64,
    /// Median latency in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the latency.
    pub p99_us: f64,
    /// The longest latency.
    pub max_us: f64,
    /// The share of operations that were copies from or to the mapping.
    pub copied: f64,
}

impl MappedOutcome {
    /// The result as a table of text.
    pub fn text(&self) -> String {
        let mut out = format!(
            "a file of {} in pages of 4 KiB, {} operations in flight:\n",
            Size(self.size_bytes),
            self.depth
        );
        let _ = writeln!(
            out,
            "{:<7} {:<24} {:>9} {:>7} {:>9} {:>9} {:>9} {:>9} {:>7}",
            "load", "way", "ops/s", "", "CPU us", "p50 us", "p99 us", "max us", "copied"
        );
        for line in &self.lines {
            let first = self.lines.iter().find(|other| other.load == line.load);
            let base = first.map_or(1.0, |first| first.ops_per_second).max(1e-9);
            let _ = writeln!(
                out,
                "{:<7} {:<24} {:>9.0} {:>6.2}x {:>9.2} {:>9.1} {:>9.1} {:>9.0} {:>6.0}%",
                line.load,
                line.way,
                line.ops_per_second,
                line.ops_per_second / base,
                line.cpu_us_per_op,
                line.p50_us,
                line.p99_us,
                line.max_us,
                line.copied * 100.0
            );
        }
        out.truncate(out.trim_end().len());
        out
    }
}
