//! One measurement of one program.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

/// The share of a processor from which on it counts as fully used.
const BUSY: f64 = 0.95;
/// The share of what the disk can do from which on it counts as fully used.
const NEAR: f64 = 0.9;

/// Bytes of the reads of a block of 4 KiB with its trailer, in sectors.
const BLOCK_BYTES: f64 = 4608.0;
/// The most that a get reads.
const GET_BYTES_MAX: f64 = 8192.0;

/// Figures of one run, and what the program printed.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Sample {
    /// Operations per second.
    pub ops_per_second: f64,
    /// Processor time per operation in microseconds, where the program tells.
    pub cpu_us_per_op: Option<f64>,
    /// Median latency in microseconds, where the program tells.
    pub p50_us: Option<f64>,
    /// 99th percentile of the latency in microseconds, where the program tells.
    pub p99_us: Option<f64>,
    /// 99.9th percentile of the latency in microseconds, where the program tells.
    pub p999_us: Option<f64>,
    /// Mean size of a read, where the program tells.
    pub bytes_per_io: Option<f64>,
    /// Seconds to open the database, where the program tells.
    pub open_seconds: Option<f64>,
    /// Processors that the program might use.
    pub processors: usize,
    /// Share of its processor that the program needed that made the load, where it is another one.
    pub generator_busy: Option<f64>,
    /// The program's command line.
    pub command: String,
    /// What it reported.
    pub report: Value,
}

impl Sample {
    /// Bytes that an operation returned, where the program tells.
    pub fn bytes_per_op(&self) -> Option<f64> {
        let bytes = self.report["returned_bytes"].as_f64()?;
        Some(bytes / self.report["operations"].as_f64().filter(|n| *n > 0.0)?)
    }

    /// Reads of the disk per second, where the program tells.
    fn reads_per_second(&self) -> Option<f64> {
        if let Some(reads) = self.report["ios_per_op"].as_f64() {
            return Some(reads * self.ops_per_second);
        }
        // RocksDB's gets read a block each, and its block is in a page or two; what an iterator
        // reads at once it does not tell.
        let operations = self.report["operations"].as_f64().filter(|n| *n > 0.0)?;
        let bytes = self.report["read_bytes"].as_f64()? / operations;
        (bytes <= GET_BYTES_MAX).then_some(bytes / BLOCK_BYTES * self.ops_per_second)
    }

    /// What kept the program from being faster, as far as it was measured. `disk` is how many reads
    /// of that size a second the disk was seen to do.
    pub fn bound(&self, disk: Option<f64>) -> Option<&'static str> {
        if self.generator_busy.is_some_and(|share| share >= BUSY) {
            return Some("load generator");
        }
        let used = self.cpu_us_per_op.map(|us| us * self.ops_per_second / 1e6);
        if used.is_some_and(|used| used >= BUSY * self.processors.max(1) as f64) {
            return Some("processor");
        }
        used?;
        let reads = self.reads_per_second().unwrap_or(0.0);
        Some(if disk.is_some_and(|disk| reads >= disk * NEAR) { "disk" } else { "waiting" })
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0}/s", self.ops_per_second)?;
        if let Some(cpu) = self.cpu_us_per_op {
            write!(f, ", {cpu:.2} us of processor time each")?;
        }
        if let Some(p99) = self.p99_us {
            write!(f, ", p99 {p99:.0} us")?;
        }
        Ok(())
    }
}

/// The median; `None` when there is nothing.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    if values.is_empty() {
        return None;
    }
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    Some(match values.len() % 2 {
        0 => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_bounds_a_program_is_what_it_used_up() {
        let sample = |cpu_us, generator_busy, ios_per_op| Sample {
            ops_per_second: 50_000.0,
            cpu_us_per_op: Some(cpu_us),
            processors: 1,
            generator_busy,
            report: serde_json::json!({"ios_per_op": ios_per_op}),
            ..Sample::default()
        };
        assert_eq!(sample(1.0, Some(0.99), 0.0).bound(None), Some("load generator"));
        assert_eq!(sample(19.5, Some(0.5), 0.0).bound(None), Some("processor"));
        assert_eq!(sample(5.0, None, 1.0).bound(Some(52_000.0)), Some("disk"));
        assert_eq!(sample(5.0, None, 1.0).bound(Some(90_000.0)), Some("waiting"));
        assert_eq!(sample(5.0, None, 0.0).bound(Some(90_000.0)), Some("waiting"));
        assert_eq!(Sample::default().bound(Some(90_000.0)), None, "it tells nothing");
        let bytes = |bytes: u64| Sample {
            report: serde_json::json!({"read_bytes": bytes, "operations": 100}),
            ..sample(5.0, None, 0.0)
        };
        assert_eq!(bytes(100 * 4608).bound(Some(52_000.0)), Some("disk"));
        assert_eq!(bytes(100 * 4608).bound(Some(90_000.0)), Some("waiting"));
        assert_eq!(bytes(50 * 4608).bound(Some(52_000.0)), Some("waiting"), "half were cached");
        assert_eq!(bytes(100 << 20).bound(Some(52_000.0)), Some("waiting"), "long reads");
    }

    #[test]
    fn the_median_is_the_middle_or_between_the_two_middle_ones() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
