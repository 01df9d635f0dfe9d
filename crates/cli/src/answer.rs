//! Reads answers of a node's admin socket: figures, texts, and histograms of latencies.

use node::Size;
use serde_json::Value;

/// The kinds of requests, under the node's names for them.
pub const KINDS: [&str; 5] = ["read", "write", "flush", "discard", "zeroes"];

/// Latencies in a node's histogram: a bucket for each power of two of nanoseconds.
#[derive(Clone, Debug, Default)]
pub struct Latency {
    sum_ns: u64,
    buckets: Vec<u64>,
}

/// The exponent of the first bucket's upper bound.
const FIRST: i32 = 8;

impl Latency {
    /// Reads a node's histogram.
    pub fn of(value: &Value) -> Latency {
        let buckets = array(value, "log2_ns").iter().map(|count| count.as_u64().unwrap_or(0));
        Latency { sum_ns: number(value, "sum_ns"), buckets: buckets.collect() }
    }

    /// The sum of both.
    pub fn and(&self, other: &Latency) -> Latency {
        self.each(other, u64::wrapping_add)
    }

    /// The latencies since an earlier sample.
    pub fn since(&self, earlier: &Latency) -> Latency {
        self.each(earlier, |now, then| now.saturating_sub(then))
    }

    fn each(&self, other: &Latency, of: impl Fn(u64, u64) -> u64) -> Latency {
        let at = |latency: &Latency, at: usize| latency.buckets.get(at).copied().unwrap_or(0);
        let buckets = self.buckets.len().max(other.buckets.len());
        Latency {
            sum_ns: of(self.sum_ns, other.sum_ns),
            buckets: (0..buckets).map(|i| of(at(self, i), at(other, i))).collect(),
        }
    }

    /// The number of latencies.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Their mean; `None` if there are none.
    pub fn mean_ns(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum_ns as f64 / count as f64)
    }

    /// The latency below which this share of all lies. Latencies in a bucket are assumed to be
    /// spread evenly.
    pub fn quantile_ns(&self, share: f64) -> Option<f64> {
        let count = self.count();
        let mut left = share * count as f64;
        for (at, &n) in self.buckets.iter().enumerate() {
            if n > 0 && left <= n as f64 {
                let end = 2_f64.powi(FIRST + at as i32);
                let start = if at == 0 { 0.0 } else { end / 2.0 };
                return Some(start + (end - start) * left / n as f64);
            }
            left -= n as f64;
        }
        None
    }
}

/// A time in a unit that makes it short: `870 ns`, `12.5 µs`.
pub fn duration(ns: Option<f64>) -> String {
    let Some(ns) = ns else { return "-".to_owned() };
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.1} µs", ns / 1e3),
        ns if ns < 1e9 => format!("{:.1} ms", ns / 1e6),
        ns => format!("{:.1} s", ns / 1e9),
    }
}

/// The array with this name; empty if there is none.
pub fn array<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

/// A number of bytes in words: `1.5 GiB`; `-` if there is none.
pub fn size(value: &Value) -> String {
    value.as_u64().map_or("-".to_owned(), |bytes| Size(bytes).to_string())
}

/// The number with this name; 0 if there is none.
pub fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

/// The text with this name; empty if there is none.
pub fn text(value: &Value, name: &str) -> String {
    value[name].as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn quantiles_lie_in_their_buckets() {
        let latency = Latency::of(&json!({"sum_ns": 80_000, "log2_ns": [0, 98, 0, 0, 2]}));
        assert_eq!(latency.mean_ns(), Some(800.0));
        let median = latency.quantile_ns(0.5).unwrap();
        assert!((256.0..512.0).contains(&median), "{median}");
        let late = latency.quantile_ns(0.99).unwrap();
        assert!((2048.0..=4096.0).contains(&late), "{late}");
        let since = latency.since(&latency);
        assert_eq!((since.count(), since.mean_ns(), since.quantile_ns(0.99)), (0, None, None));
        assert_eq!(latency.and(&since).count(), 100);
    }

    #[test]
    fn times_are_written_short() {
        let written = [Some(870.4), Some(12_500.0), Some(3.2e6), Some(2e9), None].map(duration);
        assert_eq!(written, ["870 ns", "12.5 µs", "3.2 ms", "2.0 s", "-"]);
    }
}
