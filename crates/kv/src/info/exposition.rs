//! Prometheus's text format, version 0.0.4: the body of a scrape of metrics.
//!
//! A metric is a name with its help and type, once, followed by a line for each set of labels.
//! Names are in base units (bytes, seconds); those of counters end in `_total`.

use std::fmt::{Display, Write};

/// The media type of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A text in progress.
#[derive(Debug, Default)]
pub struct Exposition(String);

impl Exposition {
    /// Begins a metric that never decreases while the process lives. `name` ends in `_total`.
    pub fn counter(&mut self, name: &str, help: &str) -> Metric<'_> {
        self.metric(name, help, "counter")
    }

    /// Begins a metric that may increase and decrease.
    pub fn gauge(&mut self, name: &str, help: &str) -> Metric<'_> {
        self.metric(name, help, "gauge")
    }

    /// Begins a metric whose values are distributions.
    pub fn histogram(&mut self, name: &str, help: &str) -> Metric<'_> {
        self.metric(name, help, "histogram")
    }

    fn metric(&mut self, name: &str, help: &str, kind: &str) -> Metric<'_> {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP millrace_{name} {help}\n# TYPE millrace_{name} {kind}");
        Metric { text: &mut self.0, name: name.to_owned() }
    }

    /// The text so far.
    pub fn finish(self) -> String {
        self.0
    }
}

/// A metric in progress.
pub struct Metric<'a> {
    text: &'a mut String,
    name: String,
}

impl Metric<'_> {
    /// Adds a value.
    pub fn value(self, value: impl Display) -> Self {
        self.labelled(&[], value)
    }

    /// Adds a value with labels, given as names and values.
    pub fn labelled(mut self, labels: &[(&str, &dyn Display)], value: impl Display) -> Self {
        self.line("", labels, value);
        self
    }

    /// Adds a distribution of a histogram. `buckets` are the upper ends in ascending order, and the
    /// number of values between two of them; `count` and `sum` are of all values.
    pub fn distribution(
        mut self,
        labels: &[(&str, &dyn Display)],
        buckets: impl IntoIterator<Item = (f64, u64)>,
        count: u64,
        sum: f64,
    ) -> Self {
        let mut below = 0;
        for (end, n) in buckets {
            below += n;
            self.line("_bucket", &[labels, &[("le", &end)]].concat(), below);
        }
        self.line("_bucket", &[labels, &[("le", &"+Inf")]].concat(), count);
        self.line("_sum", labels, sum);
        self.line("_count", labels, count);
        self
    }

    fn line(&mut self, suffix: &str, labels: &[(&str, &dyn Display)], value: impl Display) {
        let _ = write!(self.text, "millrace_{}{suffix}", self.name);
        for (n, (name, what)) in labels.iter().enumerate() {
            let what = what.to_string();
            let escaped = what.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.text, "{}{name}=\"{escaped}\"", if n == 0 { '{' } else { ',' });
        }
        let _ = writeln!(self.text, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_counts_the_values_below_each_end() {
        let mut text = Exposition::default();
        let buckets = [(0.5, 2), (1.0, 3)];
        text.histogram("seconds", "Seconds").distribution(&[("of", &"a")], buckets, 6, 7.5);
        let said = text.finish();
        let lines: Vec<&str> = said.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "# TYPE millrace_seconds histogram",
                "millrace_seconds_bucket{of=\"a\",le=\"0.5\"} 2",
                "millrace_seconds_bucket{of=\"a\",le=\"1\"} 5",
                "millrace_seconds_bucket{of=\"a\",le=\"+Inf\"} 6",
                "millrace_seconds_sum{of=\"a\"} 7.5",
                "millrace_seconds_count{of=\"a\"} 6",
            ]
        );
    }

    #[test]
    fn a_metric_is_declared_once_with_a_line_per_value() {
        let mut text = Exposition::default();
        text.gauge("bytes", "Bytes held").labelled(&[("core", &0), ("of", &"a\\\"\n")], 7).value(8);
        text.counter("seconds_total", "Seconds").value(0.5);
        assert_eq!(
            text.finish(),
            "# HELP millrace_bytes Bytes held\n# TYPE millrace_bytes gauge\n\
             millrace_bytes{core=\"0\",of=\"a\\\\\\\"\\n\"} 7\nmillrace_bytes 8\n\
             # HELP millrace_seconds_total Seconds\n# TYPE millrace_seconds_total counter\n\
             millrace_seconds_total 0.5\n"
        );
    }
}
