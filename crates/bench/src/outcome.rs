//! The result of a measurement, as text and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use crate::case::Case;
use crate::keys::KEY_LEN;
use crate::measure::Counts;
use crate::stalls::Stalls;

/// The result of one case. Its fields are the keys of the JSON: names are stable, new ones may be
/// added.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    /// The case.
    pub name: &'static str,
    /// Operations per second; see [`Case::describe`] for what an operation is.
    pub ops_per_second: f64,
    /// Operations done.
    pub operations: u64,
    /// Requested keys that were found (scans: entries; seeks: exact hits); null if the case does
    /// not read.
    pub found: Option<u64>,
    /// Bytes of values returned by gets, and of keys and values read by iterators; null if the
    /// case does not read.
    pub returned_bytes: Option<u64>,
    /// Entries per second, in cases that step.
    pub entries_per_second: Option<f64>,
    /// Mean latency of a call in microseconds.
    pub mean_us: f64,
    /// Median latency of a call in microseconds: of a batch, of a seek with its steps.
    pub p50_us: f64,
    /// 99th percentile of the latency.
    pub p99_us: f64,
    /// 99.9th percentile of the latency.
    pub p999_us: f64,
    /// Processor time of the process per operation, in microseconds.
    pub cpu_us_per_op: f64,
    /// Mean size of a disk read; null without reads.
    pub bytes_per_io: Option<f64>,
    /// Disk reads per operation.
    pub ios_per_op: f64,
    /// Writes per second beside the reads, for readwhilewriting.
    pub writes_per_second: Option<f64>,
    /// Mean latency of those writes in microseconds.
    pub writes_mean_us: Option<f64>,
    /// 99th percentile of their latency.
    pub writes_p99_us: Option<f64>,
    /// The longest time in which a write waited and none was acknowledged; null if the case does
    /// not write.
    pub max_stall_ms: Option<f64>,
    /// The sum of those times that were longer than 10 ms.
    pub stalled_ms: Option<f64>,
    /// Bytes written to the disk in the window for each byte of keys and values, with the log and
    /// all background work; null if the case does not write.
    pub write_amplification: Option<f64>,
    /// Operations per second if the time counts that all flushes and compactions took afterwards;
    /// null without `--drain`.
    pub ops_per_second_drained: Option<f64>,
    /// That time.
    pub drain_seconds: Option<f64>,
    /// Bytes that the process has written to the device by then.
    pub device_bytes: Option<u64>,
    /// Bytes of the database on the disk by then.
    pub disk_bytes: Option<u64>,
    /// Flushes of files in the window; null if the case does not write.
    pub syncs: Option<u64>,
    /// Median time to overwrite 4 KiB directly and flush it, measured before the window; null
    /// unless writes survive a power cut.
    pub flush_us: Option<f64>,
    /// Seconds measured.
    pub seconds: f64,
    /// Seconds to open the database.
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
    /// What acknowledged writes survive: process or power.
    pub durability: Option<&'static str>,
    /// Tasks that write; null in fillseq, a bulk load.
    pub writers: Option<u32>,
    /// Bytes of a value written.
    pub value_size: Option<usize>,
    /// Bytes at which a memtable is flushed.
    pub memtable_bytes: Option<usize>,
    /// Writes started per second, if a rate was requested.
    pub rate: Option<f64>,
    /// Operations per second that arrived in an open loop, in cases of mixed operations with a
    /// requested rate.
    pub offered_per_second: Option<f64>,
    /// The mix of operations, in such cases.
    pub workload: Option<&'static str>,
    /// Sets in a hundred operations, for readrandomwriterandom.
    pub write_percent: Option<u8>,
    /// Whether the requested keys are absent.
    pub absent: bool,
    /// Peak memory of the process in bytes, if the kernel reports it.
    pub memory_max_bytes: Option<u64>,
    /// Memory for cached blocks, over all cores.
    pub cache_bytes: u64,
    /// Whether every key was read once beforehand.
    pub cached: bool,
    /// The alignment of disk reads in bytes.
    pub io_alignment: usize,
    /// The driver: io_uring or epoll.
    pub driver: &'static str,
    /// This program's version.
    pub millrace: &'static str,
}

/// The disk's counters in the window.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskCounts {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Flushes.
    pub syncs: u64,
}

impl DiskCounts {
    /// The increase since `before`.
    pub fn since(self, before: DiskCounts) -> DiskCounts {
        DiskCounts {
            reads: self.reads - before.reads,
            bytes: self.bytes - before.bytes,
            written_bytes: self.written_bytes - before.written_bytes,
            syncs: self.syncs - before.syncs,
        }
    }

    /// Adds another core's counters.
    pub fn add(&mut self, other: DiskCounts) {
        self.reads += other.reads;
        self.bytes += other.bytes;
        self.written_bytes += other.written_bytes;
        self.syncs += other.syncs;
    }
}

/// The background work that was left after the writes.
#[derive(Clone, Debug, Default)]
pub struct Drained {
    /// The time that it took.
    pub seconds: f64,
    /// Bytes that the process has written to the device, if the kernel reports them.
    pub device_bytes: Option<u64>,
    /// Bytes of the database on the disk afterwards.
    pub disk_bytes: u64,
}

/// The writes of the window.
#[derive(Clone, Debug, Default)]
pub struct WriteCounts {
    /// Writes and their latencies.
    pub counts: Counts,
    /// Their stalls.
    pub stalls: Stalls,
}

impl Outcome {
    /// Fills in the fields that are derived from the counts.
    pub fn measure(
        &mut self,
        case: Case,
        reads: &Counts,
        writes: Option<&WriteCounts>,
        disk: DiskCounts,
        cpu_seconds: f64,
    ) {
        let counts = match writes {
            Some(writes) if !case.reads() => &writes.counts,
            _ => reads,
        };
        self.millrace = env!("CARGO_PKG_VERSION");
        let operations = counts.operations.max(1) as f64;
        self.operations = counts.operations;
        self.found = case.reads().then_some(counts.found);
        self.returned_bytes = case.reads().then_some(counts.bytes);
        self.ops_per_second = counts.operations as f64 / self.seconds;
        self.entries_per_second = case.scans().then(|| counts.entries as f64 / self.seconds);
        self.mean_us = counts.latency_mean_us();
        self.p50_us = counts.latency_us(0.5);
        self.p99_us = counts.latency_us(0.99);
        self.p999_us = counts.latency_us(0.999);
        self.cpu_us_per_op = cpu_seconds * 1e6 / operations;
        self.bytes_per_io = (disk.reads > 0).then(|| disk.bytes as f64 / disk.reads as f64);
        self.ios_per_op = disk.reads as f64 / operations;
        if let Some(WriteCounts { counts, stalls }) = writes {
            let ms = |ns: u64| ns as f64 / 1e6;
            // A bulk load is acknowledged once, as a whole.
            let stalls = Some(stalls).filter(|_| case != Case::FillSeq);
            self.max_stall_ms = stalls.map(|stalls| ms(stalls.max_ns));
            self.stalled_ms = stalls.map(|stalls| ms(stalls.sum_ns));
            self.writes_per_second = case.reads().then(|| counts.operations as f64 / self.seconds);
            self.writes_mean_us = case.reads().then(|| counts.latency_mean_us());
            self.writes_p99_us = case.reads().then(|| counts.latency_us(0.99));
            let bytes = counts.operations * (KEY_LEN + self.value_size.unwrap_or(0)) as u64;
            self.write_amplification = Some(disk.written_bytes as f64 / bytes.max(1) as f64);
            self.syncs = Some(disk.syncs);
        }
    }

    /// Adds the background work that was left after the writes.
    pub fn add_debt(&mut self, drained: &Drained) {
        let seconds = self.seconds + drained.seconds;
        self.ops_per_second_drained = Some(self.operations as f64 / seconds);
        self.drain_seconds = Some(drained.seconds);
        self.device_bytes = drained.device_bytes;
        self.disk_bytes = Some(drained.disk_bytes);
    }

    /// Adds the lines about writes, if there were any.
    fn text_of_writes(&self, out: &mut String) {
        if let Some((rate, seconds)) = self.ops_per_second_drained.zip(self.drain_seconds) {
            let mb = |bytes: Option<u64>| bytes.unwrap_or(0) as f64 / 1e6;
            let _ = writeln!(
                out,
                "with the background work that remained: {rate:.0} operations a second ({seconds:.1} s more); \
                 {:.0} MB written to the device, {:.0} MB on the disk",
                mb(self.device_bytes),
                mb(self.disk_bytes)
            );
        }
        if let Some((longest, sum)) = self.max_stall_ms.zip(self.stalled_ms) {
            let _ = writeln!(
                out,
                "stalls of writes: longest {longest:.1} ms, sum of those over 10 ms {sum:.0} ms"
            );
        }
        if let Some((amplification, syncs)) = self.write_amplification.zip(self.syncs) {
            let _ = write!(out, "written: {amplification:.2} bytes for each, {syncs} flushes");
            match self.flush_us {
                Some(flush) => {
                    let _ = writeln!(out, "; one flush alone takes {flush:.0} us");
                }
                None => out.push('\n'),
            }
        }
    }

    /// The result as a few lines of text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let _ = write!(out, "{}: {:.0} operations a second", self.name, self.ops_per_second);
        if let Some(entries) = self.entries_per_second
            && self.nexts.is_some()
        {
            let _ = write!(out, ", {entries:.0} entries a second");
        }
        if let Some(writes) = self.writes_per_second {
            let _ = write!(out, ", {writes:.0} writes a second");
        }
        match self.found {
            Some(found) => {
                let _ = writeln!(out, "; found {found} of {}", self.operations);
            }
            None => out.push('\n'),
        }
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
        self.text_of_writes(&mut out);
        let mut parallel = String::new();
        if self.found.is_some() {
            let _ = write!(parallel, " at depth {}", self.depth);
        }
        if let Some((writers, durability)) = self.writers.zip(self.durability) {
            let _ = write!(parallel, " with {writers} writers ({durability})");
        }
        let _ = write!(
            out,
            "{:.1} s on {} core{}{}, {} keys, {} cache, {}; opened in {:.0} ms",
            self.seconds,
            self.cores,
            if self.cores == 1 { "" } else { "s" },
            parallel,
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
