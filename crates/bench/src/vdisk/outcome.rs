//! What driving a disk gave, for people and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

/// The result. As JSON its fields are the keys; names stay, new ones may come.
#[derive(Clone, Debug, Default, Serialize)]
pub struct VdiskOutcome {
    /// The case.
    pub name: &'static str,
    /// The disk that was served; null when another target was measured.
    pub disk: Option<String>,
    /// What was done: randread, randwrite, randrw, read or write.
    pub rw: &'static str,
    /// Requests per second.
    pub ops_per_second: f64,
    /// Requests that came back.
    pub operations: u64,
    /// Requests that the target answered with a failure.
    pub errors: u64,
    /// Bytes read and written per second.
    pub bytes_per_second: f64,
    /// Mean latency in microseconds, from the request's publication to the look that found it
    /// done.
    pub mean_us: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99 of 100 were not slower.
    pub p99_us: f64,
    /// 999 of 1000 were not slower.
    pub p999_us: f64,
    /// The slowest.
    pub max_us: f64,
    /// The longest time in which requests were in flight and none came back.
    pub max_pause_ms: f64,
    /// Processor time of the target's process per request, in microseconds; null when that is this
    /// process.
    pub cpu_us_per_op: Option<f64>,
    /// How often the target was gone and came back.
    pub reconnects: u64,
    /// Blocks whose data was checked; null without that.
    pub verified: Option<u64>,
    /// Seconds measured.
    pub seconds: f64,
    /// Queues.
    pub queues: u16,
    /// Requests in flight on each.
    pub depth: u16,
    /// Bytes of a request.
    pub block_size: u32,
    /// Whether the rings are packed.
    pub packed: bool,
    /// Whether each write was followed by a flush, both being one request.
    pub sync: bool,
    /// Microseconds that a slot rested before it was used again.
    pub think_us: u32,
    /// Bytes of the disk.
    pub size_bytes: u64,
    /// This program's version.
    pub millrace: &'static str,
}

impl VdiskOutcome {
    /// The result in a few lines for people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "vdisk {}: {:.0} requests a second, {:.1} MB/s, {} failed",
            self.rw,
            self.ops_per_second,
            self.bytes_per_second / 1e6,
            self.errors
        );
        let _ = writeln!(
            out,
            "latency: mean {:.2} us, p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us, longest {:.0} us",
            self.mean_us, self.p50_us, self.p99_us, self.p999_us, self.max_us
        );
        let _ = write!(out, "longest pause: {:.2} ms", self.max_pause_ms);
        let _ = match self.reconnects {
            0 => writeln!(out),
            1 => writeln!(out, "; the target came back once"),
            times => writeln!(out, "; the target came back {times} times"),
        };
        if let Some(cpu) = self.cpu_us_per_op {
            let _ = writeln!(out, "processor of the target: {cpu:.3} us per request");
        }
        if let Some(verified) = self.verified {
            let _ = writeln!(out, "data: {verified} blocks were as written");
        }
        let _ = write!(
            out,
            "{:.1} s, {} {} queue{} of depth {}, blocks of {} B, a disk of {}",
            self.seconds,
            self.queues,
            if self.packed { "packed" } else { "split" },
            if self.queues == 1 { "" } else { "s" },
            self.depth,
            self.block_size,
            node::Size(self.size_bytes)
        );
        out
    }
}

/// What disks cost that nobody uses. As JSON its fields are the keys; names stay, new ones may
/// come.
#[derive(Clone, Debug, Default, Serialize)]
pub struct IdleOutcome {
    /// The case.
    pub name: &'static str,
    /// The disk that was served so many times.
    pub disk: String,
    /// Disks, each with a front end connected.
    pub disks: u16,
    /// Rings of each.
    pub queues: u16,
    /// Seconds measured.
    pub seconds: f64,
    /// Processor time of the target's process, in per cent of one processor.
    pub cpu_percent: f64,
    /// This program's version.
    pub millrace: &'static str,
}

impl IdleOutcome {
    /// The result in a line for people.
    pub fn text(&self) -> String {
        format!(
            "vdisk idle: {} disks that nobody uses take {:.3} % of a processor\n{:.1} s, {} queues each, {}",
            self.disks, self.cpu_percent, self.seconds, self.queues, self.disk
        )
    }
}

/// Times of the same kind, in milliseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Pauses {
    /// The median.
    pub median: f64,
    /// The longest.
    pub worst: f64,
    /// All, in their order.
    pub all: Vec<f64>,
}

impl Pauses {
    /// Of these times; nothing, if there are none.
    pub(crate) fn of(all: Vec<f64>) -> Option<Pauses> {
        let mut sorted = all.clone();
        sorted.sort_by(f64::total_cmp);
        let (median, worst) = (*sorted.get(sorted.len() / 2)?, *sorted.last()?);
        Some(Pauses { median, worst, all })
    }
}

/// How long requests waited when a disk's target was replaced. As JSON its fields are the keys;
/// names stay, new ones may come.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PausesOutcome {
    /// The case.
    pub name: &'static str,
    /// The disk that was served.
    pub disk: String,
    /// What was done: randread, randwrite, randrw, read or write.
    pub rw: &'static str,
    /// How often the target was replaced.
    pub times: u32,
    /// The longest time without a completion around each replacement.
    pub pause_ms: Option<Pauses>,
    /// The same in windows in which nothing was replaced: what the machine does by itself.
    pub alone_ms: Option<Pauses>,
    /// How long the disks were at rest, as the upgraded nodes told; null for restarts.
    pub told_ms: Option<Pauses>,
    /// From the start of the new process until it took the connection; null for upgrades.
    pub ready_ms: Option<Pauses>,
    /// From that connection to the first completion; null for upgrades.
    pub first_ms: Option<Pauses>,
    /// Requests that the target answered with a failure.
    pub errors: u64,
    /// How often the front end connected anew.
    pub reconnects: u64,
    /// Blocks whose data was checked; null without that.
    pub verified: Option<u64>,
    /// Queues.
    pub queues: u16,
    /// Requests in flight on each.
    pub depth: u16,
    /// Bytes of a request.
    pub block_size: u32,
    /// Whether the rings are packed.
    pub packed: bool,
    /// This program's version.
    pub millrace: &'static str,
}

impl PausesOutcome {
    /// The result in a few lines for people.
    pub fn text(&self) -> String {
        let mut out = format!("{}: {} times\n", self.name, self.times);
        let lines = [
            ("longest wait of the guest", &self.pause_ms),
            ("the same with nothing replaced", &self.alone_ms),
            ("disks at rest, as the node told", &self.told_ms),
            ("from the start to the connection", &self.ready_ms),
            ("from there to the first completion", &self.first_ms),
        ];
        for (what, times) in lines {
            if let Some(Pauses { median, worst, .. }) = times {
                let _ = writeln!(out, "{what}: median {median:.2} ms, worst {worst:.2} ms");
            }
        }
        if let Some(verified) = self.verified {
            let _ = writeln!(out, "data: {verified} blocks were as written");
        }
        let _ = write!(
            out,
            "{} failed, {} {} queue{} of depth {}, {} of {} B, {}",
            self.errors,
            self.queues,
            if self.packed { "packed" } else { "split" },
            if self.queues == 1 { "" } else { "s" },
            self.depth,
            self.rw,
            self.block_size,
            self.disk
        );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_median_and_a_worst() {
        assert!(Pauses::of(Vec::new()).is_none());
        let times = Pauses::of(vec![3.0, 1.0, 2.0]).unwrap();
        assert_eq!((times.median, times.worst, times.all), (2.0, 3.0, vec![3.0, 1.0, 2.0]));
    }
}
