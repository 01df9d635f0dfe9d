//! How one memory budget is divided.
//!
//! A sixth, at most 32 MiB, is reserved for what cannot be known in advance: tables that flushes
//! and merges are building, writes on their way to the log, and the allocator's loss between
//! buffers of different sizes. A quarter of the rest is for what all cores share: indexes, filters
//! and memtables. If the node writes, three eighths of that quarter are for memtables (the one
//! being written and those being flushed), a sixteenth is for remembering which keys exist, which
//! spares writes a read when keys are counted, and another for watched keys. The remainder of the
//! quarter is for indexes and filters; those that do not fit are read through the cores' caches.
//! The other three quarters are split evenly among the cores. Each core uses an eighth of its part
//! for what its connections have sent and not yet received, and seven eighths for its pool: block
//! cache, reads in flight, and the buffers of flushes and merges. The cache leaves room for the
//! reads, and shrinks when others need more.
//!
//! Outside the budget is a fixed part of some [`FIXED_BYTES`]: the program itself, thread stacks,
//! the rings shared with the kernel, descriptions of tables and connections. The allocator may lose
//! 15 % of the budget between allocations.
//!
//! Each core's pinned thread is the first to touch its pool, so on a machine with several memory
//! nodes the kernel places it on that core's node.

use reactor::RuntimeConfig;
use reactor::log::Log;

use crate::config::Config;

/// The parts of a node's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// For indexes and filters, shared by all cores.
    pub tables: usize,
    /// Size of a memtable, of which there are up to `MEMTABLES`; 0 if nothing is written.
    pub memtable: usize,
    /// For remembering which keys exist.
    pub known_keys: usize,
    /// For watched keys of transactions.
    pub watches: usize,
    /// Each core's buffers of connections.
    pub connections: usize,
    /// Each core's pool: block cache and reads in flight.
    pub pool: usize,
    /// The block cache's share of the pool.
    pub cache: usize,
}

/// Memory of a node outside its budget, in bytes.
pub(crate) const FIXED_BYTES: u64 = 24 << 20;
/// The smallest budget for which huge pages are worth their waste: each is 2 MiB, and a partly used
/// one is resident as a whole. Below it freed memory also goes back to the system soon.
const LARGE_MIN: u64 = 512 << 20;
/// Upper bound of the reserve for what cannot be known in advance.
const UNTOLD_MAX: u64 = 32 << 20;
/// Upper bound of the buffers for connections of one core.
const CONNECTIONS_MAX: u64 = 128 << 20;
/// The largest memtable.
const MEMTABLE_MAX: u64 = 64 << 20;
/// Upper bound of the memory for remembering which keys exist: some six million.
const KNOWN_KEYS_MAX: u64 = 256 << 20;
/// Upper bound of the memory for watched keys.
const WATCHES_MAX: u64 = 24 << 20;
/// Maximum number of memtables at a time.
const MEMTABLES: u64 = 3;
/// Upper bound of the part of a pool that the cache leaves free.
const IN_FLIGHT_MAX: u64 = 128 << 20;

impl Budget {
    /// Divides `total` among `cores`, for a node that writes or does not.
    pub fn split(total: u64, cores: usize, writes: bool) -> Budget {
        let total = total - (total / 6).min(UNTOLD_MAX);
        let shared = total / 4;
        let memtable = if writes { (shared / 8).min(MEMTABLE_MAX) } else { 0 };
        let known_keys = if writes { (shared / 16).min(KNOWN_KEYS_MAX) } else { 0 };
        let watches = if writes { (shared / 16).min(WATCHES_MAX) } else { 0 };
        let core = (total - shared) / cores.max(1) as u64;
        let connections = (core / 8).min(CONNECTIONS_MAX);
        let pool = core - connections;
        let in_flight = (pool / 4).min(IN_FLIGHT_MAX);
        let bytes = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Budget {
            tables: bytes(shared - MEMTABLES * memtable - known_keys - watches),
            memtable: bytes(memtable),
            known_keys: bytes(known_keys),
            watches: bytes(watches),
            connections: bytes(connections),
            pool: bytes(pool),
            cache: bytes(pool - in_flight),
        }
    }

    /// Memory for writes recovered from the log until they are tables: that of the memtables that
    /// do not exist yet.
    pub fn recovered(&self) -> usize {
        match self.memtable {
            0 => self.tables,
            memtable => (MEMTABLES as usize - 1) * memtable,
        }
    }

    /// The limits of a core's connections that follow from the budget.
    pub fn door(&self) -> kv::Settings {
        let usual = kv::Settings::default();
        kv::Settings {
            requests_bytes_max: usual.requests_bytes_max.min(self.connections / 2),
            unsent_total_bytes_max: usual.unsent_total_bytes_max.min(self.connections / 2),
            idle_buffer_bytes_max: usual.idle_buffer_bytes_max.min(self.connections / 8),
            queued_bytes_max: usual.queued_bytes_max.min(self.connections / 2),
            watches_bytes_max: usual.watches_bytes_max.min(self.watches),
            writes_bytes_max: usual.writes_bytes_max.min(self.connections / 4),
            pinned_bytes_max: usual.pinned_bytes_max.min(self.pool / 8),
            tls_bytes_max: usual.tls_bytes_max.min(self.connections / 2),
            tracking_bytes_max: usual.tracking_bytes_max.min(self.connections / 4),
            reads_total_max: usual.reads_total_max.min(self.connections / kv::Settings::READ_BYTES),
            ..usual
        }
    }
}

impl Config {
    /// How this node divides its memory.
    pub fn budget(&self) -> Budget {
        Budget::split(self.memory_bytes, self.processors.len(), !self.read_only)
    }

    /// Whether memory matters more than speed. Then the node uses no huge pages, and freed memory
    /// goes back to the system soon.
    pub fn has_little_memory(&self) -> bool {
        self.memory_bytes < LARGE_MIN
    }

    /// The configuration of the cores, each with a ring of its own in `log`.
    pub fn runtime(&self, log: Log, confined: bool) -> RuntimeConfig {
        RuntimeConfig {
            processors: self.processors.clone(),
            memory: self.budget().pool,
            poll: self.poll,
            driver: self.driver,
            confined,
            log: Some(log),
            ..RuntimeConfig::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_never_exceed_the_whole() {
        for total in [16 << 20, 64 << 20, 1 << 30, 512 << 30] {
            for cores in [1, 2, 7, 64] {
                let budget = Budget::split(total, cores, true);
                let core = budget.connections + budget.pool;
                let memtables = MEMTABLES as usize * budget.memtable;
                let shared = budget.tables + memtables + budget.known_keys + budget.watches;
                assert!(shared + core * cores <= total as usize);
                assert!(budget.recovered() < memtables, "there is room to write meanwhile");
                assert!(budget.cache < budget.pool, "reads in flight have room");
                assert!(budget.pool - budget.cache <= IN_FLIGHT_MAX as usize);
            }
        }
    }

    #[test]
    fn a_small_node_gives_its_connections_little() {
        let small = Budget::split(16 << 20, 1, true).door();
        let large = Budget::split(16 << 30, 1, true).door();
        assert!(small.requests_bytes_max + small.unsent_total_bytes_max <= 2 << 20);
        assert_eq!(large.requests_bytes_max, kv::Settings::default().requests_bytes_max);
    }
}
