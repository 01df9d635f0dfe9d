//! One measurement of one program.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

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
    /// The program's command line.
    pub command: String,
    /// What it reported.
    pub report: Value,
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
    fn the_median_is_the_middle_or_between_the_two_middle_ones() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
