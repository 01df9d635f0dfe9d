//! The node's counters as metrics: the data of `INFO` for a monitoring system, core by core.

use std::rc::Rc;

use reactor::{CoreStats, FlowReport};

use crate::core::state::CoreState;
use crate::info::exposition::Exposition;
use crate::info::{CoreReport, ShardReport, compaction};

/// Reports the metrics of all cores, on the core that created it.
#[derive(Clone)]
pub struct Reporter(pub(crate) Rc<CoreState>);

impl Reporter {
    /// Appends the metrics of all cores that answer. Suspends for their answers.
    pub async fn write(&self, text: &mut Exposition) {
        let state = &self.0;
        let cores = state.ask_all(|there| CoreReport::of(there)).await;
        let node = state.node.info();
        let uptime_ns = cores.iter().map(|core| core.uptime_ns).max().unwrap_or(0);
        text.gauge("uptime_seconds", "Seconds since the node began to serve")
            .value(uptime_ns as f64 / 1e9);
        let cpu = node.cpu_seconds();
        text.counter("cpu_seconds_total", "Processor time of the process")
            .labelled(&[("mode", &"user")], cpu.user)
            .labelled(&[("mode", &"system")], cpu.system);
        let memory = node.memory();
        text.gauge("memory_resident_bytes", "Memory that the process occupies")
            .value(memory.resident_bytes);
        text.gauge("memory_resident_peak_bytes", "Most memory that the process ever occupied")
            .value(memory.resident_peak_bytes);
        text.gauge("memory_allocated_bytes", "Memory in allocations that are in use")
            .value(memory.allocated_bytes);
        text.gauge("memory_tables_bytes", "Memory of tables: indexes, filters, descriptions")
            .value(state.reader.db().memory().tables);
        text.gauge(
            "memory_tables_budget_bytes",
            "Memory that indexes and filters may use together",
        )
        .value(state.reader.db().memory().tables_budget);
        text.gauge("memory_budget_bytes", "Memory that the node may use")
            .value(node.memory_budget_bytes());
        let counted = state.counted_keys();
        let keys = state.keys().unwrap_or(0);
        text.gauge("keys", "Keys in the database; an estimate unless they are counted").value(keys);
        text.gauge("keys_counted", "1 when the number of keys is exact")
            .value(u8::from(counted.is_some()));
        write_cores(text, &cores);
        if let Some(shard) = ShardReport::ask_in_full(state).await {
            write_shard(text, &shard);
            if let Some(status) = &shard.compaction {
                compaction::write(text, status);
            }
        }
    }
}

/// What `millrace top` shows of the database, counted since the start unless noted otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct Glance {
    /// The core that writes, if any.
    pub writing_core: Option<usize>,
    /// Present number of keys; an estimate unless they are counted.
    pub keys: u64,
    /// Present connections.
    pub connections: u64,
    /// Executed commands.
    pub commands: u64,
    /// Point lookups.
    pub gets: u64,
    /// Blocks found in the cache.
    pub cache_hits: u64,
    /// Blocks that had to be read.
    pub cache_misses: u64,
    /// Changes that wrote something.
    pub writes: u64,
    /// Counters of the engine's writer.
    pub writer: lsm::WriterStats,
}

impl Reporter {
    /// Sums up all cores that answer. Suspends for their answers.
    pub async fn glance(&self) -> Glance {
        let state = &self.0;
        let mut glance = Glance {
            writing_core: state.node.shard_core(),
            keys: state.keys().unwrap_or(0),
            ..Glance::default()
        };
        for core in state.ask_all(|there| CoreReport::of(there)).await {
            glance.connections += core.clients as u64;
            glance.commands += core.kv.commands;
            glance.gets += core.reader.gets;
            glance.cache_hits += core.reader.cache_hits;
            glance.cache_misses += core.reader.cache_misses;
        }
        if let Some(report) = ShardReport::ask(state).await {
            glance.writes = report.shard.written;
            glance.writer = report.writer;
        }
        glance
    }
}

type Value = fn(&CoreReport) -> u64;

/// Name, help and value of each core's counters.
const COUNTERS: &[(&str, &str, Value)] = &[
    ("accepted_connections_total", "Connections accepted", |core| core.kv.connections),
    ("rejected_connections_total", "Connections turned away", |core| core.kv.rejected),
    ("tls_connections_total", "TLS connections whose handshake succeeded", |core| {
        core.kv.tls_connections
    }),
    ("tls_failures_total", "TLS handshakes that failed, and TLS connections that broke", |core| {
        core.kv.tls_failures
    }),
    ("commands_total", "Commands executed, refused ones not included", |core| core.kv.commands),
    ("error_replies_total", "Commands answered by an error", |core| core.kv.errors),
    ("protocol_errors_total", "Connections closed because of a protocol error", |core| {
        core.kv.protocol_errors
    }),
    ("received_bytes_total", "Bytes received from clients", |core| core.kv.received_bytes),
    ("sent_bytes_total", "Bytes sent to clients", |core| core.kv.sent_bytes),
    ("receives_total", "Times something was received from a client", |core| core.kv.receives),
    ("sends_total", "Times something was sent to a client", |core| core.kv.sends),
    ("keyspace_hits_total", "Keys that commands found", |core| core.kv.hits),
    ("keyspace_misses_total", "Keys that commands did not find", |core| core.kv.misses),
    ("reads_from_memory_total", "Reads answered from memory immediately", |core| {
        core.kv.reads_cached
    }),
    ("reads_that_waited_total", "Reads that waited for the disk", |core| core.kv.reads_waited),
    (
        "slow_closed_total",
        "Connections closed that took nothing of their replies while others waited for memory",
        |core| core.kv.slow_closed,
    ),
    ("slow_readers_total", "Times a connection's commands waited for its reader", |core| {
        core.kv.slow_readers
    }),
    ("transactions_total", "Transactions that EXEC executed", |core| core.kv.transactions),
    (
        "transaction_conflicts_total",
        "Transactions not executed because a watched key was written",
        |core| core.kv.transaction_conflicts,
    ),
    ("gets_total", "Point lookups", |core| core.reader.gets),
    ("gets_found_total", "Point lookups that found a key", |core| core.reader.found),
    ("seeks_total", "Iterators positioned", |core| core.reader.seeks),
    ("steps_total", "Steps of iterators", |core| core.reader.steps),
    ("skipped_entries_total", "Deleted or invisible entries that iterators passed over", |core| {
        core.reader.skipped
    }),
    ("cache_hits_total", "Blocks found in the cache", |core| core.reader.cache_hits),
    ("cache_misses_total", "Blocks that had to be read", |core| core.reader.cache_misses),
    ("shared_reads_total", "Blocks that another request was reading already", |core| {
        core.reader.shared_reads
    }),
    ("read_ahead_bytes_total", "Bytes read ahead of iterators", |core| {
        core.reader.read_ahead_bytes
    }),
    ("filter_negatives_total", "Times a filter spared a read", |core| core.reader.filter_negative),
    ("rereads_total", "Blocks that failed their checksum and were read once more", |core| {
        core.reader.rereads
    }),
];

/// Name, help and value of each core's gauges.
const GAUGES: &[(&str, &str, Value)] = &[
    ("connections", "Connections open", |core| core.clients as u64),
    ("scan_cursors", "Cursors of SCAN that are kept", |core| core.scans as u64),
    ("input_bytes", "Bytes of requests that are not complete or not answered yet", |core| {
        core.input_bytes as u64
    }),
    ("unsent_bytes", "Bytes of replies that clients have not taken yet", |core| {
        core.unsent_bytes as u64
    }),
    ("queued_bytes", "Bytes of queued commands of transactions", |core| core.queued_bytes as u64),
    ("tracking_clients", "Connections that are told of writes", |core| {
        core.tracking.clients as u64
    }),
    ("tracked_keys", "Keys of which connections are told", |core| core.tracking.keys as u64),
    ("tracked_stretch_keys", "Keys of stretches of which connections are told", |core| {
        core.tracking.stretch_keys as u64
    }),
    ("tracking_bytes", "Memory of the tables of these keys", |core| core.tracking.bytes as u64),
    ("invalidations_bytes", "Bytes of invalidations that wait for their connections", |core| {
        core.tracking.pushes_bytes as u64
    }),
    ("writes_bytes", "Bytes of writes that are not answered yet", |core| core.writes_bytes as u64),
    ("tls_bytes", "Memory of TLS connections", |core| core.tls_bytes as u64),
    ("pinned_bytes", "Bytes of blocks that unsent replies hold", |core| core.pinned_bytes as u64),
    ("pool_bytes", "Buffer memory in use", |core| core.pool_bytes as u64),
    ("pool_budget_bytes", "Buffer memory there is", |core| core.pool_budget_bytes as u64),
    (
        "registered_bytes",
        "Memory for short reads that is registered with the core's ring",
        |core| core.registered_bytes as u64,
    ),
    ("cache_bytes", "Bytes of blocks in the cache", |core| core.reader.cache_bytes),
    ("cache_budget_bytes", "Bytes that the cache may have", |core| core.reader.cache_budget),
    ("tasks", "Tasks alive", |core| core.tasks as u64),
    ("operations_in_flight", "Operations of disk and network under way", |core| {
        core.operations_in_flight as u64
    }),
];

/// The value of a metric of the shard.
type Written = fn(&ShardReport) -> u64;

const SHARD_COUNTERS: &[(&str, &str, Written)] = &[
    ("changes_total", "Changes made or refused", |shard| shard.shard.changes),
    ("changes_written_total", "Changes that wrote something", |shard| shard.shard.written),
    ("changes_that_waited_total", "Changes that waited for a read or another change", |shard| {
        shard.shard.waited
    }),
    ("write_groups_total", "Groups of batches written to the log", |shard| shard.writer.groups),
    ("write_batches_total", "Batches written", |shard| shard.writer.batches),
    ("write_batch_bytes_total", "Bytes of batches", |shard| shard.writer.batch_bytes),
    ("wal_bytes_total", "Bytes written to write-ahead logs", |shard| shard.writer.log_bytes),
    ("wal_files_total", "Write-ahead logs begun", |shard| shard.writer.logs),
    ("flushed_tables_total", "Tables written from memtables", |shard| shard.writer.flushed_tables),
    ("flushed_bytes_total", "Bytes of these tables", |shard| shard.writer.flushed_bytes),
    ("blob_files_total", "Blob files begun", |shard| shard.writer.blob_files),
    ("blob_values_total", "Values stored in blob files", |shard| shard.writer.blob_values),
    ("blob_written_bytes_total", "Bytes of these values with keys and headers", |shard| {
        shard.writer.blob_bytes
    }),
    ("blob_collections_total", "Collections of garbage in blob files", |shard| {
        shard.writer.blob_collections
    }),
    ("blob_moved_values_total", "Values that these moved to new blob files", |shard| {
        shard.writer.blob_moved_values
    }),
    ("blob_moved_bytes_total", "Bytes of these values with keys and headers", |shard| {
        shard.writer.blob_moved_bytes
    }),
    ("blob_tables_bytes_total", "Bytes of the tables that these wrote again", |shard| {
        shard.writer.blob_tables_bytes
    }),
    ("compactions_total", "Merges of tables", |shard| shard.writer.merges),
    ("compaction_read_bytes_total", "Bytes of the tables merged", |shard| {
        shard.writer.merged_bytes
    }),
    ("disk_full_times_total", "Times that the disk was found full", |shard| {
        shard.writer.disk_full_times
    }),
    (
        "writes_refused_total",
        "Batches refused because the disk was full, or something could not be written for now",
        |shard| shard.writer.refused,
    ),
    (
        "heals_total",
        "Logs, MANIFESTs and blob files that were replaced after a failed write",
        |shard| shard.writer.heals,
    ),
    ("table_failures_total", "Flushes and merges that failed and were tried again", |shard| {
        shard.writer.table_failures
    }),
    ("compaction_written_bytes_total", "Bytes of the tables that merges made", |shard| {
        shard.writer.merged_into_bytes
    }),
];

const SHARD_GAUGES: &[(&str, &str, Written)] = &[
    ("writing_failed", "1 when writing has ended until a restart", |shard| {
        u64::from(shard.failure.is_some())
    }),
    ("healing", "1 while a log or MANIFEST that failed is not replaced yet", |shard| {
        shard.writer.healing
    }),
    ("disk_full", "1 while writes, flushes or merges wait for space on the disk", |shard| {
        shard.writer.disk_full
    }),
    ("tables_failing", "1 while a flush or a merge that failed has not succeeded since", |shard| {
        shard.writer.tables_failing
    }),
    ("unsaved_changes", "Changes since everything was last made to survive a power cut", |shard| {
        shard.shard.unsaved
    }),
    ("watched_keys", "Keys that connections watch", |shard| shard.shard.watched_keys),
    ("memtable_bytes", "Memory of memtables", |shard| shard.writer.memtable_bytes),
    ("memtables_waiting", "Generations of memtables that wait to become tables", |shard| {
        shard.writer.waiting_memtables
    }),
    ("level0_files", "Tables of level 0 in the column family that has most", |shard| {
        shard.writer.level0_files
    }),
    ("blob_bytes", "Bytes of all values in complete blob files, live or not", |shard| {
        shard.writer.blob_total_bytes
    }),
    ("blob_live_bytes", "Bytes of those that tables or logs refer to", |shard| {
        shard.writer.blob_live_bytes
    }),
    (
        "blob_space_pressure_percent",
        "How far blob files are on the way to the limit of their space",
        |shard| shard.writer.blob_space_pressure_percent,
    ),
    ("damaged_tables", "Tables that merges leave alone, because they are damaged", |shard| {
        shard.writer.damaged_tables
    }),
];

fn write_cores(text: &mut Exposition, cores: &[CoreReport]) {
    for (name, help, value) in COUNTERS {
        let metric = text.counter(name, help);
        cores
            .iter()
            .fold(metric, |metric, core| metric.labelled(&[("core", &core.core)], value(core)));
    }
    for (name, help, value) in GAUGES {
        let metric = text.gauge(name, help);
        cores
            .iter()
            .fold(metric, |metric, core| metric.labelled(&[("core", &core.core)], value(core)));
    }
    for (at, (name, help)) in CoreStats::HELP.iter().enumerate() {
        let metric =
            text.counter(&format!("reactor_{name}_total"), help.trim().trim_end_matches('.'));
        cores.iter().fold(metric, |metric, core| match core.counters.get(at) {
            Some((_, value)) => metric.labelled(&[("core", &core.core)], value),
            None => metric,
        });
    }
    let flows: Vec<_> = cores.iter().map(|core| (core.core, core.flow.clone())).collect();
    write_flow(text, &flows);
}

/// Writes the state of flow control, by core and device.
pub fn write_flow(text: &mut Exposition, cores: &[(usize, Vec<FlowReport>)]) {
    for (name, help, value) in FlowReport::METRICS {
        let mut metric = if name.ends_with("_total") {
            text.counter(name, help)
        } else {
            text.gauge(name, help)
        };
        for (core, flow) in
            cores.iter().flat_map(|(core, flows)| flows.iter().map(move |f| (core, f)))
        {
            let labels: [(&str, &dyn std::fmt::Display); 2] =
                [("core", core), ("device", &flow.device_name())];
            metric = metric.labelled(&labels, value(flow));
        }
    }
}

/// The shard belongs to one core, so each of its metrics has one value.
fn write_shard(text: &mut Exposition, shard: &ShardReport) {
    for (name, help, value) in SHARD_COUNTERS {
        text.counter(name, help).value(value(shard));
    }
    for (name, help, value) in SHARD_GAUGES {
        text.gauge(name, help).value(value(shard));
    }
    let held = "Seconds that writes were held back because tables must be flushed or merged first";
    text.counter("write_stall_seconds_total", held)
        .labelled(&[("kind", &"slowed")], shard.writer.slowed_ns as f64 / 1e9)
        .labelled(&[("kind", &"stopped")], shard.writer.stopped_ns as f64 / 1e9);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use lsm::WriterStats;

    use super::*;

    fn report(core: usize) -> CoreReport {
        CoreReport {
            core,
            clients: 3 + core,
            counters: CoreStats::default().list(),
            flow: vec![FlowReport::default()],
            ..CoreReport::default()
        }
    }

    fn text(cores: &[CoreReport]) -> String {
        let mut text = Exposition::default();
        write_cores(&mut text, cores);
        text.finish()
    }

    #[test]
    fn every_metric_is_declared_once_and_has_a_line_per_core() {
        let text = text(&[report(0), report(1)]);
        assert!(text.contains(
            "# HELP millrace_connections Connections open\n# TYPE millrace_connections gauge\n\
             millrace_connections{core=\"0\"} 3\nmillrace_connections{core=\"1\"} 4\n"
        ));
        assert!(text.contains("# HELP millrace_reactor_turns_total Turns of the loop\n"));
        let mut declared = BTreeSet::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                // Newer formats take a counter's name without its suffix for the name of the
                // metric.
                let plain = name.strip_suffix("_total").unwrap_or(name);
                assert!(declared.insert(plain), "{plain} twice");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                let lines = text.lines().filter(|line| line.starts_with(&format!("{name}{{")));
                assert_eq!(lines.count(), 2, "{name}");
            }
        }
    }

    #[test]
    fn the_shards_metrics_include_its_stalls() {
        let writer =
            WriterStats { slowed_ns: 1_500_000_000, level0_files: 4, ..Default::default() };
        let mut text = Exposition::default();
        write_shard(&mut text, &ShardReport { writer, ..ShardReport::default() });
        let text = text.finish();
        assert!(text.contains("\nmillrace_level0_files 4\n"), "{text}");
        assert!(text.contains("\nmillrace_writing_failed 0\n"), "{text}");
        assert!(text.contains("\nmillrace_write_stall_seconds_total{kind=\"slowed\"} 1.5\n"));
    }
}
