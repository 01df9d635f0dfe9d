//! `INFO`: the node's report, section by section, in the format that Redis's tools read.
//!
//! Every core reports its own counters when asked; nothing is shared between cores for this report.
//! `metrics` has the same counters for a monitoring system; `config_get` answers `CONFIG`. Uses
//! `core`, `shard` and `command`.

mod compaction;
pub(crate) mod config_get;
pub(crate) mod exposition;
pub(crate) mod metrics;

use std::fmt::Write as _;
use std::rc::Rc;

use lsm::{CompactionStatus, DbMemory, ReaderStats, WriterStats};
use reactor::FlowReport;

use crate::core::command_stats::{CommandStats, sums};
use crate::core::state::{CoreState, KvStats};
use crate::core::tracking::TrackingStats;
use crate::node_info::{MemoryUse, NodeInfo};
use crate::settings::Settings;
use crate::shard::{Shard, ShardStats};

/// The report of one core.
#[derive(Clone, Debug, Default)]
pub(crate) struct CoreReport {
    pub core: usize,
    pub driver: &'static str,
    pub counters: Vec<(&'static str, u64)>,
    pub tasks: usize,
    pub operations_in_flight: usize,
    pub pool_bytes: usize,
    pub pool_budget_bytes: usize,
    pub registered_bytes: usize,
    pub clients: usize,
    pub blocked_clients: usize,
    pub commands: Vec<CommandStats>,
    pub scans: usize,
    pub input_bytes: usize,
    pub unsent_bytes: usize,
    pub tls_bytes: usize,
    pub pinned_bytes: usize,
    pub writes_bytes: usize,
    pub queued_bytes: usize,
    pub tracking: TrackingStats,
    pub kv: KvStats,
    pub reader: ReaderStats,
    pub flow: Vec<FlowReport>,
    pub uptime_ns: u64,
}

impl CoreReport {
    /// Reads this core's counters.
    pub fn of(state: &CoreState) -> Self {
        let core = &state.core;
        Self {
            core: core.id(),
            driver: core.driver_name(),
            counters: core.stats().list(),
            tasks: core.live_tasks(),
            operations_in_flight: core.operations_in_flight(),
            pool_bytes: core.pool().used(),
            pool_budget_bytes: core.pool().limit(),
            registered_bytes: core.pool().registered(),
            clients: state.clients.len(),
            blocked_clients: state.clients.blocked(),
            commands: state.commands.list(),
            scans: state.scans.borrow().len(),
            input_bytes: state.large.held.get(),
            unsent_bytes: state.unsent_bytes.get(),
            tls_bytes: state.secured.bytes.get(),
            pinned_bytes: state.pinned_bytes.get(),
            writes_bytes: state.writes.room.bytes(),
            queued_bytes: state.queued_bytes.get(),
            tracking: state.tracking_stats(),
            kv: *state.stats.borrow(),
            reader: state.reader.stats(),
            flow: core.flow(),
            uptime_ns: core.now_ns().saturating_sub(state.started_ns),
        }
    }
}

/// The report of the shard.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShardReport {
    pub shard: ShardStats,
    pub writer: WriterStats,
    pub failure: Option<String>,
    pub last_error: Option<String>,
    pub saved_ms: u64,
    /// Only if it was asked for: it takes longer.
    pub compaction: Option<CompactionStatus>,
}

impl ShardReport {
    /// The shard's report, from the core that owns it; `None` on a read-only node.
    pub async fn ask(state: &Rc<CoreState>) -> Option<Self> {
        let core = state.node.shard_core()?;
        state.ask(core, |there| there.writes.shard().map(Self::of)).await.flatten()
    }

    /// The same, with the state of merges.
    pub async fn ask_in_full(state: &Rc<CoreState>) -> Option<Self> {
        let core = state.node.shard_core()?;
        let in_full =
            |shard: &Shard| Self { compaction: Some(shard.compaction_status()), ..Self::of(shard) };
        state.ask(core, move |there| there.writes.shard().map(in_full)).await.flatten()
    }

    fn of(shard: &Shard) -> Self {
        Self {
            shard: shard.stats(),
            writer: shard.writer_stats(),
            failure: shard.failure().map(|error| error.to_string()),
            last_error: shard.last_error().map(|error| error.to_string()),
            saved_ms: shard.saved_unix_ms(),
            compaction: None,
        }
    }
}

/// Writes the lines of one section.
type Section = fn(&Report<'_>, &mut String);

/// The sections in the order they are written.
const SECTIONS: &[(&str, Section)] = &[
    ("Server", server),
    ("Clients", clients),
    ("Memory", memory),
    ("Persistence", persistence),
    ("Compaction", compaction::section),
    ("Stats", stats),
    ("Replication", replication),
    ("Commandstats", command_stats),
    ("CPU", cpu),
    ("Keyspace", keyspace),
    ("Cores", cores),
];

/// The section that is written only when it is asked for by name, or all sections are.
const NOT_BY_DEFAULT: &str = "Commandstats";

/// The data of a report.
pub(crate) struct Report<'a> {
    pub node: &'a dyn NodeInfo,
    pub settings: &'a Settings,
    pub cores: &'a [CoreReport],
    /// Present where the node takes writes.
    pub shard: Option<ShardReport>,
    /// Memory that the database uses for all cores.
    pub memory: DbMemory,
    /// Keys of the database, counted or estimated.
    pub keys: u64,
    /// Deadlines of keys, and keys removed because they had expired.
    pub deadlines: u64,
    pub expired: u64,
    pub unix_time_ms: u64,
}

impl Report<'_> {
    fn sum(&self, field: impl Fn(&CoreReport) -> u64) -> u64 {
        self.cores.iter().map(field).sum()
    }

    /// Writes the sections that were asked for, or the default ones when none was.
    pub fn write(&self, asked: &[Vec<u8>]) -> String {
        let wanted = |name: &str| {
            let by_default = name != NOT_BY_DEFAULT;
            let words = [name, "all", "everything", "default"];
            let words = if by_default { &words[..] } else { &words[..3] };
            asked.is_empty() && by_default
                || asked.iter().any(|asked| {
                    words.iter().any(|word| word.as_bytes().eq_ignore_ascii_case(asked))
                })
        };
        let mut text = String::new();
        for (name, section) in SECTIONS.iter().filter(|(name, _)| wanted(name)) {
            if !text.is_empty() {
                text.push_str("\r\n");
            }
            line(&mut text, format_args!("# {name}"));
            section(self, &mut text);
        }
        text
    }
}

fn line(text: &mut String, content: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = text.write_fmt(content);
    text.push_str("\r\n");
}

macro_rules! lines {
    ($text:expr, $($format:literal $(, $value:expr)*;)*) => {
        $(line($text, format_args!($format $(, $value)*));)*
    };
}
pub(crate) use lines;

fn server(report: &Report<'_>, text: &mut String) {
    let node = report.node;
    let uptime = report.cores.iter().map(|core| core.uptime_ns).max().unwrap_or(0) / 1_000_000_000;
    let driver = report.cores.first().map_or("none", |core| core.driver);
    lines!(text,
        "redis_version:{}", report.settings.redis_version;
        "millrace_version:{}", node.version();
        "redis_mode:standalone";
        "os:{}", node.operating_system();
        "arch_bits:{}", usize::BITS;
        "multiplexing_api:{}", driver;
        "process_id:{}", node.process_id();
        "run_id:{}", node.run_id();
        "tcp_port:{}", node.tcp_port();
        "server_time_usec:{}", report.unix_time_ms * 1000;
        "uptime_in_seconds:{}", uptime;
        "uptime_in_days:{}", uptime / 86_400;
        "executable:{}", node.executable();
        "config_file:{}", node.config_file();
        "data_directory:{}", node.data_directory();
        "cores:{}", report.cores.len();
    );
}

fn clients(report: &Report<'_>, text: &mut String) {
    let shard = report.shard.as_ref().map(|shard| shard.shard).unwrap_or_default();
    lines!(text,
        "connected_clients:{}", report.sum(|core| core.clients as u64);
        "maxclients:{}", report.settings.clients_max;
        "blocked_clients:{}", report.sum(|core| core.blocked_clients as u64);
        "tracking_clients:{}", report.sum(|core| core.tracking.clients as u64);
        "clients_input_bytes:{}", report.sum(|core| core.input_bytes as u64);
        "clients_tls_bytes:{}", report.sum(|core| core.tls_bytes as u64);
        "clients_unsent_bytes:{}", report.sum(|core| core.unsent_bytes as u64);
        "clients_pinned_bytes:{}", report.sum(|core| core.pinned_bytes as u64);
        "clients_writes_bytes:{}", report.sum(|core| core.writes_bytes as u64);
        "clients_queued_bytes:{}", report.sum(|core| core.queued_bytes as u64);
        "clients_tracking_bytes:{}", report.sum(|core| core.tracking.bytes as u64);
        "clients_invalidations_bytes:{}", report.sum(|core| core.tracking.pushes_bytes as u64);
        "watching_clients:{}", shard.watching_clients;
        "total_watched_keys:{}", shard.watched_keys;
        "clients_slow_readers:{}", report.sum(|core| core.kv.slow_readers);
        "scan_cursors:{}", report.sum(|core| core.scans as u64);
    );
}

fn memory(report: &Report<'_>, text: &mut String) {
    let node = report.node;
    let MemoryUse { resident_bytes, resident_peak_bytes, allocated_bytes } = node.memory();
    let pool = report.sum(|core| core.pool_bytes as u64);
    let memtables = report.shard.as_ref().map_or(0, |shard| shard.writer.memtable_bytes);
    lines!(text,
        "used_memory:{}", allocated_bytes;
        "used_memory_human:{}", human(allocated_bytes);
        "used_memory_rss:{}", resident_bytes;
        "used_memory_rss_human:{}", human(resident_bytes);
        "used_memory_peak:{}", resident_peak_bytes;
        "used_memory_peak_human:{}", human(resident_peak_bytes);
        "mem_fragmentation_ratio:{:.2}", resident_bytes as f64 / allocated_bytes.max(1) as f64;
        "total_system_memory:{}", node.memory_machine_bytes();
        "total_system_memory_human:{}", human(node.memory_machine_bytes());
        "maxmemory:{}", node.memory_budget_bytes();
        "maxmemory_human:{}", human(node.memory_budget_bytes());
        "maxmemory_policy:noeviction";
        "memtables_bytes:{}", memtables;
        "tables_bytes:{}", report.memory.tables;
        "tables_budget_bytes:{}", report.memory.tables_budget;
        "tables_on_demand:{}", report.memory.tables_on_demand;
        "pool_bytes:{}", pool;
        "pool_budget_bytes:{}", report.sum(|core| core.pool_budget_bytes as u64);
        "registered_bytes:{}", report.sum(|core| core.registered_bytes as u64);
        "cache_bytes:{}", report.sum(|core| core.reader.cache_bytes);
        "cache_budget_bytes:{}", report.sum(|core| core.reader.cache_budget);
    );
}

fn persistence(report: &Report<'_>, text: &mut String) {
    lines!(text, "loading:0"; "async_loading:0";);
    let Some(ShardReport { shard, writer, failure, last_error, saved_ms, .. }) = &report.shard
    else {
        lines!(text,
            "rdb_changes_since_last_save:0";
            "rdb_bgsave_in_progress:0";
            "aof_enabled:0";
            "aof_rewrite_in_progress:0";
        );
        return;
    };
    // For clients the log is what an append-only file is: every write is in it before it is
    // answered.
    let refused_for_now = (writer.tables_failing > 0 || writer.healing > 0) && shard.write_failed;
    let writes_fail = failure.is_some() || writer.disk_full > 0 || refused_for_now;
    lines!(text,
        "rdb_changes_since_last_save:{}", shard.unsaved;
        "rdb_bgsave_in_progress:0";
        "rdb_last_save_time:{}", saved_ms / 1000;
        "rdb_last_bgsave_status:{}", if shard.save_failed { "err" } else { "ok" };
        "aof_enabled:1";
        "aof_rewrite_in_progress:0";
        "aof_last_bgrewrite_status:{}", if writer.tables_failing > 0 { "err" } else { "ok" };
        "aof_last_write_status:{}", if writes_fail { "err" } else { "ok" };
        "write_failure:{}", failure.as_deref().unwrap_or("");
        "healing:{}", writer.healing;
        "heals:{}", writer.heals;
        "last_disk_error:{}", last_error.as_deref().unwrap_or("");
        "disk_full:{}", writer.disk_full;
        "disk_full_times:{}", writer.disk_full_times;
        "tables_failing:{}", writer.tables_failing;
        "table_failures:{}", writer.table_failures;
        "writes_refused:{}", writer.refused;
        "wal_groups:{}", writer.groups;
        "wal_bytes:{}", writer.log_bytes;
        "wal_files:{}", writer.logs;
        "memtable_bytes:{}", writer.memtable_bytes;
        "memtables_waiting:{}", writer.waiting_memtables;
        "flushed_tables:{}", writer.flushed_tables;
        "flushed_bytes:{}", writer.flushed_bytes;
        "merges:{}", writer.merges;
        "merged_bytes:{}", writer.merged_bytes;
        "merged_into_bytes:{}", writer.merged_into_bytes;
        "blob_files_begun:{}", writer.blob_files;
        "blob_values:{}", writer.blob_values;
        "blob_written_bytes:{}", writer.blob_bytes;
        "blob_bytes:{}", writer.blob_total_bytes;
        "blob_live_bytes:{}", writer.blob_live_bytes;
        "blob_space_amplification:{:.2}", writer.blob_space_amplification();
        "blob_space_pressure:{:.2}", writer.blob_space_pressure_percent as f64 / 100.0;
        "blob_collections:{}", writer.blob_collections;
        "blob_moved_values:{}", writer.blob_moved_values;
        "blob_moved_bytes:{}", writer.blob_moved_bytes;
        "blob_tables_bytes:{}", writer.blob_tables_bytes;
        "level0_files:{}", writer.level0_files;
        "damaged_tables:{}", writer.damaged_tables;
        "writes_slowed_usec:{}", writer.slowed_ns / 1000;
        "writes_stopped_usec:{}", writer.stopped_ns / 1000;
    );
}

fn stats(report: &Report<'_>, text: &mut String) {
    let sum = |field: fn(&KvStats) -> u64| report.sum(|core| field(&core.kv));
    lines!(text,
        "total_connections_received:{}", sum(|kv| kv.connections);
        "total_commands_processed:{}", sum(|kv| kv.commands);
        "total_net_input_bytes:{}", sum(|kv| kv.received_bytes);
        "total_net_output_bytes:{}", sum(|kv| kv.sent_bytes);
        "rejected_connections:{}", sum(|kv| kv.rejected);
        "total_tls_connections_received:{}", sum(|kv| kv.tls_connections);
        "total_tls_failures:{}", sum(|kv| kv.tls_failures);
        "expired_keys:{}", report.expired;
        "evicted_keys:0";
        "evicted_clients:{}", sum(|kv| kv.slow_closed);
        "keyspace_hits:{}", sum(|kv| kv.hits);
        "keyspace_misses:{}", sum(|kv| kv.misses);
        "transactions:{}", sum(|kv| kv.transactions);
        "transaction_conflicts:{}", sum(|kv| kv.transaction_conflicts);
        "tracking_total_keys:{}", report.sum(|core| core.tracking.keys as u64);
        "tracking_total_items:{}", report.sum(|core| core.tracking.items as u64);
        "tracking_stretch_keys:{}", report.sum(|core| core.tracking.stretch_keys as u64);
        "tracking_total_prefixes:{}", report.sum(|core| core.tracking.prefixes as u64);
        "total_error_replies:{}", sum(|kv| kv.errors + kv.protocol_errors);
        "protocol_errors:{}", sum(|kv| kv.protocol_errors);
        "total_reads_processed:{}", sum(|kv| kv.receives);
        "total_writes_processed:{}", sum(|kv| kv.sends);
        "reads_from_memory:{}", sum(|kv| kv.reads_cached);
        "reads_that_waited:{}", sum(|kv| kv.reads_waited);
    );
    if let Some(report) = &report.shard {
        lines!(text,
            "changes_processed:{}", report.shard.changes;
            "changes_written:{}", report.shard.written;
            "changes_that_waited:{}", report.shard.waited;
        );
    }
}

fn replication(_: &Report<'_>, text: &mut String) {
    // Nothing is replicated; clients' topology discovery expects these lines.
    lines!(text, "role:master"; "connected_slaves:0"; "master_repl_offset:0";);
}

fn command_stats(report: &Report<'_>, text: &mut String) {
    for (name, stats) in sums(report.cores.iter().map(|core| &core.commands[..])) {
        let CommandStats { calls, time_ns, rejected, failed } = stats;
        let each = time_ns as f64 / 1000.0 / calls.max(1) as f64;
        lines!(text,
            "cmdstat_{}:calls={},usec={},usec_per_call={:.2},rejected_calls={},failed_calls={}",
            name, calls, time_ns / 1000, each, rejected, failed;
        );
    }
}

fn cpu(report: &Report<'_>, text: &mut String) {
    let seconds = report.node.cpu_seconds();
    lines!(text, "used_cpu_sys:{:.6}", seconds.system; "used_cpu_user:{:.6}", seconds.user;);
}

fn keyspace(report: &Report<'_>, text: &mut String) {
    if report.keys > 0 {
        lines!(text, "db0:keys={},expires={},avg_ttl=0", report.keys, report.deadlines;);
    }
}

fn cores(report: &Report<'_>, text: &mut String) {
    for core in report.cores {
        // One line a core, as for Redis's `cmdstat_...`: fields separated by commas.
        let mut fields = format!(
            "core{}:driver={},tasks={},in_flight={},clients={},pool_bytes={},pool_budget_bytes={}",
            core.core,
            core.driver,
            core.tasks,
            core.operations_in_flight,
            core.clients,
            core.pool_bytes,
            core.pool_budget_bytes
        );
        let reader = &core.reader;
        let reads = [
            ("commands", core.kv.commands),
            ("gets", reader.gets),
            ("found", reader.found),
            ("cache_hits", reader.cache_hits),
            ("cache_misses", reader.cache_misses),
            ("shared_reads", reader.shared_reads),
            ("cache_bytes", reader.cache_bytes),
            ("filter_negative", reader.filter_negative),
            ("seeks", reader.seeks),
            ("steps", reader.steps),
            ("skipped", reader.skipped),
            ("read_ahead_bytes", reader.read_ahead_bytes),
            ("rereads", reader.rereads),
        ];
        for (name, value) in core.counters.iter().chain(&reads) {
            // Writing to a string cannot fail.
            let _ = write!(fields, ",{name}={value}");
        }
        lines!(text, "{}", fields;);
        for (at, flow) in core.flow.iter().enumerate() {
            let us = |ns: u32| f64::from(ns) / 1000.0;
            lines!(text, "core{}_flow{}:device={},background_depth={},background_in_flight={},\
                background_held_back={},read_us={:.1},read_floor_us={:.1},write_us={:.1},\
                write_floor_us={:.1}",
                core.core, at, flow.device_name(), flow.depth, flow.in_flight, flow.held_back,
                us(flow.read_ns), us(flow.read_floor_ns), us(flow.write_ns), us(flow.write_floor_ns););
        }
    }
}

/// Formats a number of bytes as Redis does: `1.98M`.
fn human(bytes: u64) -> String {
    const UNITS: &[(u64, char)] = &[(1 << 40, 'T'), (1 << 30, 'G'), (1 << 20, 'M'), (1 << 10, 'K')];
    UNITS.iter().find(|(size, _)| bytes >= *size).map_or_else(
        || format!("{bytes}B"),
        |(size, unit)| format!("{:.2}{unit}", bytes as f64 / *size as f64),
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::node_info::CpuSeconds;

    pub(crate) struct TestNode;

    impl NodeInfo for TestNode {
        fn version(&self) -> String {
            "0.1.0".to_owned()
        }
        fn run_id(&self) -> String {
            "0".repeat(40)
        }
        fn tcp_port(&self) -> u16 {
            6379
        }
        fn process_id(&self) -> u32 {
            7
        }
        fn operating_system(&self) -> String {
            "Linux".to_owned()
        }
        fn executable(&self) -> String {
            "/bin/millrace".to_owned()
        }
        fn config_file(&self) -> String {
            String::new()
        }
        fn data_directory(&self) -> String {
            "/data".to_owned()
        }
        fn memory(&self) -> MemoryUse {
            let resident_bytes = 2 << 20;
            MemoryUse { resident_bytes, resident_peak_bytes: 3 << 20, allocated_bytes: 1 << 20 }
        }
        fn memory_budget_bytes(&self) -> u64 {
            1 << 30
        }
        fn memory_machine_bytes(&self) -> u64 {
            1 << 34
        }
        fn cpu_seconds(&self) -> CpuSeconds {
            CpuSeconds { system: 0.5, user: 1.25 }
        }
        fn shut_down(&self) {}
        fn settings(&self) -> Vec<(String, String)> {
            vec![("cores".to_owned(), "0,1".to_owned())]
        }
    }

    fn report(asked: &[&str]) -> String {
        let core = |core| CoreReport {
            core,
            driver: "io_uring",
            counters: vec![("turns", 5)],
            clients: 3,
            ..CoreReport::default()
        };
        let cores = [core(0), core(1)];
        let report = Report {
            node: &TestNode,
            settings: &Settings::default(),
            cores: &cores,
            shard: Some(ShardReport::default()),
            memory: DbMemory::default(),
            keys: 12,
            deadlines: 0,
            expired: 0,
            unix_time_ms: 1,
        };
        report.write(&asked.iter().map(|word| word.as_bytes().to_vec()).collect::<Vec<_>>())
    }

    #[test]
    fn all_sections_are_written_by_default_one_when_named_none_when_unknown() {
        let headers = |text: &str| text.lines().filter(|line| line.starts_with('#')).count();
        assert_eq!(headers(&report(&[])), SECTIONS.len() - 1);
        assert_eq!(headers(&report(&["default"])), SECTIONS.len() - 1);
        assert_eq!(headers(&report(&["everything"])), SECTIONS.len());
        assert_eq!(report(&["KEYSPACE"]), "# Keyspace\r\ndb0:keys=12,expires=0,avg_ttl=0\r\n");
        assert_eq!(
            report(&["cpu", "keyspace"]),
            "# CPU\r\nused_cpu_sys:0.500000\r\nused_cpu_user:1.250000\r\n\r\n\
             # Keyspace\r\ndb0:keys=12,expires=0,avg_ttl=0\r\n"
        );
        assert_eq!(report(&["nosuch"]), "");
    }

    #[test]
    fn every_line_is_a_header_or_a_name_with_a_value() {
        for line in report(&[]).split("\r\n").filter(|line| !line.is_empty()) {
            assert!(line.starts_with("# ") || line.contains(':'), "{line}");
        }
    }

    #[test]
    fn cores_report_one_by_one_and_are_summed() {
        let text = report(&[]);
        assert!(text.contains("connected_clients:6\r\n"));
        assert!(text.contains("\r\ncore1:driver=io_uring,") && text.contains(",turns=5"));
    }

    #[test]
    fn used_memory_is_that_of_the_process() {
        let text = report(&["memory"]);
        assert!(text.contains("\r\nused_memory:1048576\r\n"), "{text}");
        assert!(text.contains("\r\nused_memory_rss:2097152\r\n"), "{text}");
        assert!(text.contains("\r\nmem_fragmentation_ratio:2.00\r\n"), "{text}");
    }

    #[test]
    fn sizes_are_shortened_as_redis_does() {
        assert_eq!(human(0), "0B");
        assert_eq!(human(1023), "1023B");
        assert_eq!(human(2_079_736), "1.98M");
        assert_eq!(human(25_276_514_304), "23.54G");
    }
}
