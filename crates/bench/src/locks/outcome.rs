//! The result of the measurement, as text and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

/// The result. Its fields are the keys of the JSON.
#[derive(Clone, Debug, Serialize)]
pub struct LocksOutcome {
    /// The case.
    pub name: &'static str,
    /// Handing an operation to a shard.
    pub hand_over: Vec<LocksLine>,
    /// Logging a line.
    pub log: Vec<LocksLine>,
    /// This program's version.
    pub millrace: &'static str,
}

/// The figures of one number of threads.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LocksLine {
    /// The number of threads.
    pub threads: usize,
    /// Nanoseconds of the calling thread for each operation, without a lock.
    pub ns: f64,
    /// The same with a lock.
    pub lock_ns: f64,
    /// Operations handed over and done per second, without a lock.
    pub ops_per_second: f64,
    /// The same with a lock.
    pub lock_ops_per_second: f64,
}

impl LocksOutcome {
    /// The result as two tables of text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        table(&mut out, "handing an operation to a shard", "mailbox", &self.hand_over);
        table(&mut out, "logging a line", "rings", &self.log);
        out.truncate(out.trim_end().len());
        out
    }
}

fn table(out: &mut String, what: &str, free: &str, lines: &[LocksLine]) {
    let _ = writeln!(out, "{what}, cost to the calling thread:");
    let _ = writeln!(
        out,
        "{:>8} {free:>10} {:>10} {:>7} {:>14} {:>14}",
        "threads",
        "mutex",
        "",
        format!("{free}/s"),
        "mutex/s"
    );
    for line in lines {
        let _ = writeln!(
            out,
            "{:>8} {:>7.0} ns {:>7.0} ns {:>+6.0}% {:>14.0} {:>14.0}",
            line.threads,
            line.ns,
            line.lock_ns,
            (line.ns / line.lock_ns - 1.0) * 100.0,
            line.ops_per_second,
            line.lock_ops_per_second
        );
    }
}
