//! The results of driving a disk, as text and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

/// The result of a load. Its fields are the keys of the JSON: names are stable, new ones may be
/// added.
#[derive(Clone, Debug, Default, Serialize)]
pub struct VdiskOutcome {
    /// The case.
    pub name: &'static str,
    /// The disk that was served; null if another target was measured.
    pub disk: Option<String>,
    /// The requests: randread, randwrite, randrw, read or write.
    pub rw: &'static str,
    /// Requests per second.
    pub ops_per_second: f64,
    /// Completed requests.
    pub operations: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Bytes read and written per second.
    pub bytes_per_second: f64,
    /// Mean latency in microseconds, from a request's publication to the poll that found it
    /// completed.
    pub mean_us: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile of the latency.
    pub p99_us: f64,
    /// 99.9th percentile of the latency.
    pub p999_us: f64,
    /// The longest latency.
    pub max_us: f64,
    /// The longest time with requests in flight and no completion.
    pub max_pause_ms: f64,
    /// Processor time of the target's process per request, in microseconds; null if that is this
    /// process.
    pub cpu_us_per_op: Option<f64>,
    /// The number of times that the target went away and came back.
    pub reconnects: u64,
    /// Blocks whose data was verified; null without verification.
    pub verified: Option<u64>,
    /// Seconds measured.
    pub seconds: f64,
    /// Queues.
    pub queues: u16,
    /// Requests in flight on each queue.
    pub depth: u16,
    /// Bytes of a request.
    pub block_size: u32,
    /// Whether the rings are packed.
    pub packed: bool,
    /// Whether each write was followed by a flush and both counted as one request.
    pub sync: bool,
    /// Microseconds that a slot was idle before its next request.
    pub think_us: u32,
    /// Bytes of the disk.
    pub size_bytes: u64,
    /// This program's version.
    pub millrace: &'static str,
}

impl VdiskOutcome {
    /// The result as a few lines of text.
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

/// The cost of idle disks. Its fields are the keys of the JSON: names are stable, new ones may be
/// added.
#[derive(Clone, Debug, Default, Serialize)]
pub struct IdleOutcome {
    /// The case.
    pub name: &'static str,
    /// The URI, served once for each disk.
    pub disk: String,
    /// The number of disks, each with a connected front end.
    pub disks: u16,
    /// Queues of each.
    pub queues: u16,
    /// Seconds measured.
    pub seconds: f64,
    /// Processor time of the target's process, in per cent of one processor.
    pub cpu_percent: f64,
    /// This program's version.
    pub millrace: &'static str,
}

impl IdleOutcome {
    /// The result as a line of text.
    pub fn text(&self) -> String {
        format!(
            "vdisk idle: {} idle disks take {:.3} % of a processor\n{:.1} s, {} queues each, {}",
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
    /// All, in order.
    pub all: Vec<f64>,
}

impl Pauses {
    /// The median and worst of these times; `None` without times.
    pub(crate) fn of(all: Vec<f64>) -> Option<Pauses> {
        let mut sorted = all.clone();
        sorted.sort_by(f64::total_cmp);
        let (median, worst) = (*sorted.get(sorted.len() / 2)?, *sorted.last()?);
        Some(Pauses { median, worst, all })
    }
}

/// How long requests waited when a disk's target was replaced. Its fields are the keys of the JSON:
/// names are stable, new ones may be added.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PausesOutcome {
    /// The case.
    pub name: &'static str,
    /// The disk that was served.
    pub disk: String,
    /// The number of such disks, each with a guest.
    pub disks: u16,
    /// The requests: randread, randwrite, randrw, read or write.
    pub rw: &'static str,
    /// The number of replacements.
    pub times: u32,
    /// Each guest's longest time without a completion around each replacement: of each in turn,
    /// all guests'.
    pub pause_ms: Option<Pauses>,
    /// The same in windows without a replacement: the machine's own pauses.
    pub alone_ms: Option<Pauses>,
    /// The longest of all guests' around each replacement.
    pub longest_pause_ms: Option<Pauses>,
    /// The same in windows without a replacement.
    pub longest_alone_ms: Option<Pauses>,
    /// How long the disks were quiesced, as the upgraded nodes reported; null for restarts.
    pub told_ms: Option<Pauses>,
    /// Requests that failed.
    pub errors: u64,
    /// The number of times that the front end connected again.
    pub reconnects: u64,
    /// Blocks whose data was verified; null without verification.
    pub verified: Option<u64>,
    /// Queues.
    pub queues: u16,
    /// Requests in flight on each queue.
    pub depth: u16,
    /// Bytes of a request.
    pub block_size: u32,
    /// Whether the rings are packed.
    pub packed: bool,
    /// This program's version.
    pub millrace: &'static str,
}

impl PausesOutcome {
    /// The result as a few lines of text.
    pub fn text(&self) -> String {
        let mut out = format!("{}: {} times\n", self.name, self.times);
        let lines = [
            ("longest wait of each guest", &self.pause_ms),
            ("the same with nothing replaced", &self.alone_ms),
            ("longest wait of all guests", &self.longest_pause_ms),
            ("the same with nothing replaced", &self.longest_alone_ms),
            ("disks quiesced, as the node reported", &self.told_ms),
        ];
        // Of one guest the two are the same.
        let is_same = |nth| self.disks == 1 && (2..4).contains(&nth);
        for (nth, (what, times)) in lines.into_iter().enumerate() {
            if is_same(nth) {
                continue;
            }
            if let Some(Pauses { median, worst, .. }) = times {
                let _ = writeln!(out, "{what}: median {median:.2} ms, worst {worst:.2} ms");
            }
        }
        if let Some(verified) = self.verified {
            let _ = writeln!(out, "data: {verified} blocks were as written");
        }
        let _ = write!(
            out,
            "{} failed, {} disk{}, {} {} queue{} of depth {}, {} of {} B, {}",
            self.errors,
            self.disks,
            if self.disks == 1 { "" } else { "s" },
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
    fn pauses_have_a_median_and_a_worst() {
        assert!(Pauses::of(Vec::new()).is_none());
        let times = Pauses::of(vec![3.0, 1.0, 2.0]).unwrap();
        assert_eq!((times.median, times.worst, times.all), (2.0, 3.0, vec![3.0, 1.0, 2.0]));
    }
}
