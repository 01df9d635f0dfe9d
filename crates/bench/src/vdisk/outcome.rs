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
    /// Mean latency in microseconds, from the request's publication to the look that found it done.
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

/// What disks cost that nobody uses. As JSON its fields are the keys; names stay, new ones may come.
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
