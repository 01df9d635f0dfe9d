//! How the memory of a database is divided.
//!
//! A sixth, at most 32 MiB, is kept for what cannot be known in advance: tables that are being
//! built, and the allocator's loss. A quarter of the rest is shared by all cores: up to three
//! memtables, each an eighth of the quarter and at most 64 MiB, and indexes and filters. An eighth
//! is for batches on their way to the log, at most 64 MiB. The remainder is divided evenly among
//! the cores: block cache, and a quarter (at most 128 MiB) for reads in flight and background work.

/// The parts, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    /// For indexes and filters, shared by all cores.
    pub tables: usize,
    /// Size of a memtable.
    pub memtable: usize,
    /// For batches that are not committed yet.
    pub batches: usize,
    /// Each core's buffers: block cache and reads in flight.
    pub pool: usize,
    /// The cache's part of these.
    pub cache: usize,
}

const UNTOLD_MAX: u64 = 32 << 20;
const MEMTABLE_MAX: u64 = 64 << 20;
/// Most memtables at a time: one that is written to, and those being flushed.
const MEMTABLES: u64 = 3;
const BATCHES_MAX: u64 = 64 << 20;
const IN_FLIGHT_MAX: u64 = 128 << 20;

impl Budget {
    /// Divides `total` among `cores`.
    pub fn split(total: u64, cores: usize) -> Budget {
        let total = total - (total / 6).min(UNTOLD_MAX);
        let shared = total / 4;
        let memtable = (shared / 8).min(MEMTABLE_MAX);
        let batches = (total / 8).min(BATCHES_MAX);
        let pool = (total - shared - batches) / cores.max(1) as u64;
        let bytes = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Budget {
            tables: bytes(shared - MEMTABLES * memtable),
            memtable: bytes(memtable),
            batches: bytes(batches),
            pool: bytes(pool),
            cache: bytes(pool - (pool / 4).min(IN_FLIGHT_MAX)),
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
                let budget = Budget::split(total, cores);
                let shared = budget.tables + 3 * budget.memtable + budget.batches;
                assert!(shared + budget.pool * cores <= total as usize);
                assert!(budget.cache < budget.pool && budget.memtable > 0);
            }
        }
    }
}
