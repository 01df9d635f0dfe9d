//! What a measurement gave, for people and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use crate::case::Case;
use crate::measure::Counts;

/// The result of one case. As JSON its fields are the keys; names stay, new ones may come.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    /// The case.
    pub name: &'static str,
    /// Operations per second; see [`Case::describe`] for what an operation is.
    pub ops_per_second: f64,
    /// Operations done.
    pub operations: u64,
    /// Keys asked for that were there (for scans: entries; for seeks: exact hits).
    pub found: u64,
    /// Entries per second, in cases that step.
    pub entries_per_second: Option<f64>,
    /// Median latency of a call in microseconds (of a batch, of a seek with its steps).
    pub p50_us: f64,
    /// 99 of 100 calls were not slower.
    pub p99_us: f64,
    /// 999 of 1000 calls were not slower.
    pub p999_us: f64,
    /// Processor time of the process per operation, in microseconds.
    pub cpu_us_per_op: f64,
    /// Mean size of a disk read; null when nothing was read.
    pub bytes_per_io: Option<f64>,
    /// Disk reads per operation.
    pub ios_per_op: f64,
    /// Seconds measured.
    pub seconds: f64,
    /// Seconds it took to open the database.
    pub open_seconds: f64,
    /// Cores used.
    pub cores: usize,
    /// Calls in flight per core.
    pub depth: u32,
    /// Keys in one batch, for multireadrandom.
    pub batch: Option<u32>,
    /// Steps after a seek, for seekrandom.
    pub nexts: Option<u32>,
    /// Whether those steps went backwards.
    pub reverse: Option<bool>,
    /// Keys drawn from.
    pub keys: u64,
    /// Memory for cached blocks, over all cores.
    pub cache_bytes: u64,
    /// Whether every key was read once before.
    pub cached: bool,
    /// What offsets and sizes of disk reads are multiples of, in bytes.
    pub io_alignment: usize,
    /// The driver: io_uring or epoll.
    pub driver: &'static str,
    /// This program's version.
    pub millrace: &'static str,
}

/// What the disk did in the window.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskCounts {
    /// Reads.
    pub reads: u64,
    /// Bytes they brought.
    pub bytes: u64,
}

impl Outcome {
    /// Fills in what follows from the counts.
    pub fn measure(&mut self, case: Case, counts: &Counts, disk: DiskCounts, cpu_seconds: f64) {
        self.millrace = env!("CARGO_PKG_VERSION");
        let operations = counts.operations.max(1) as f64;
        self.operations = counts.operations;
        self.found = counts.found;
        self.ops_per_second = counts.operations as f64 / self.seconds;
        self.entries_per_second = case.scans().then(|| counts.entries as f64 / self.seconds);
        self.p50_us = counts.latency_us(0.5);
        self.p99_us = counts.latency_us(0.99);
        self.p999_us = counts.latency_us(0.999);
        self.cpu_us_per_op = cpu_seconds * 1e6 / operations;
        self.bytes_per_io = (disk.reads > 0).then(|| disk.bytes as f64 / disk.reads as f64);
        self.ios_per_op = disk.reads as f64 / operations;
    }

    /// The result in a few lines for people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let _ = write!(out, "{}: {:.0} operations a second", self.name, self.ops_per_second);
        if let Some(entries) = self.entries_per_second
            && self.nexts.is_some()
        {
            let _ = write!(out, ", {entries:.0} entries a second");
        }
        let asked = self.operations;
        let _ = writeln!(out, "; found {} of {asked}", self.found);
        let _ = writeln!(
            out,
            "latency: p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us",
            self.p50_us, self.p99_us, self.p999_us
        );
        let _ = writeln!(out, "processor: {:.2} us per operation", self.cpu_us_per_op);
        match self.bytes_per_io {
            Some(bytes) => {
                let _ = writeln!(
                    out,
                    "disk: {:.3} reads per operation, {bytes:.0} bytes each",
                    self.ios_per_op
                );
            }
            None => out.push_str("disk: not read\n"),
        }
        let _ = write!(
            out,
            "{:.1} s on {} core{} at depth {}, {} keys, {} cache, {}; opened in {:.0} ms",
            self.seconds,
            self.cores,
            if self.cores == 1 { "" } else { "s" },
            self.depth,
            self.keys,
            match self.cache_bytes {
                0 => "no block".to_owned(),
                bytes => node::Size(bytes).to_string(),
            },
            self.driver,
            self.open_seconds * 1000.0
        );
        out
    }
}
