//! One measurement of one program.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The share of its processors above which a program is bounded by them.
const BUSY: f64 = 0.95;
/// The share of fio's rate above which a program is bounded by the disk.
const NEAR: f64 = 0.9;

/// Bytes of a read of a 4 KiB block with its trailer, in whole sectors.
const BLOCK_BYTES: f64 = 4608.0;
/// The most that a get reads.
const GET_BYTES_MAX: f64 = 8192.0;

/// The figures of one run, and the program's report. Figures that the program does not report are
/// `None`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Sample {
    /// Operations per second.
    pub ops_per_second: f64,
    /// Processor time per operation in microseconds.
    pub cpu_us_per_op: Option<f64>,
    /// Median latency in microseconds.
    pub p50_us: Option<f64>,
    /// 99th percentile of the latency in microseconds.
    pub p99_us: Option<f64>,
    /// 99.9th percentile of the latency in microseconds.
    pub p999_us: Option<f64>,
    /// Mean size of a read in bytes.
    pub bytes_per_io: Option<f64>,
    /// Seconds to open the database.
    pub open_seconds: Option<f64>,
    /// Processors that the program may use.
    pub processors: usize,
    /// The share of its processor that the load generator used, if that is another program.
    pub generator_busy: Option<f64>,
    /// The program's command line.
    pub command: String,
    /// The program's report.
    pub report: Value,
}

impl Sample {
    /// Bytes returned by each operation, if the program reports them.
    pub fn bytes_per_op(&self) -> Option<f64> {
        let bytes = self.report["returned_bytes"].as_f64()?;
        Some(bytes / self.report["operations"].as_f64().filter(|n| *n > 0.0)?)
    }

    /// Disk reads per second, if the program reports them.
    fn reads_per_second(&self) -> Option<f64> {
        if let Some(reads) = self.report["ios_per_op"].as_f64() {
            return Some(reads * self.ops_per_second);
        }
        // Each of RocksDB's gets reads a block, of a page or two. For iterators RocksDB reports
        // bytes, but not the number of reads.
        let operations = self.report["operations"].as_f64().filter(|n| *n > 0.0)?;
        let bytes = self.report["read_bytes"].as_f64()? / operations;
        (bytes <= GET_BYTES_MAX).then_some(bytes / BLOCK_BYTES * self.ops_per_second)
    }

    /// What kept the program from being faster, if the measurements tell. `disk` is the rate at
    /// which fio read blocks of the same size.
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

/// The median; `None` of no values.
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
    fn a_program_is_bounded_by_what_it_used_up() {
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
        assert_eq!(Sample::default().bound(Some(90_000.0)), None, "it reports nothing");
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
    fn the_median_is_the_middle_or_the_mean_of_the_two_middle_values() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
