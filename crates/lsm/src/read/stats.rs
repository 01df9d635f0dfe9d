//! Counters of one core's reads.

use std::cell::Cell;

/// Counters of one core's reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReaderStats {
    /// Point lookups, including those of multi-gets.
    pub gets: u64,
    /// Point lookups that found the key.
    pub found: u64,
    /// Iterator seeks.
    pub seeks: u64,
    /// Iterator steps.
    pub steps: u64,
    /// Tombstones and covered or invisible entries that iterators skipped.
    pub skipped: u64,
    /// Blocks found in the cache.
    pub cache_hits: u64,
    /// Blocks that were read.
    pub cache_misses: u64,
    /// Blocks that another request of this core was already reading.
    pub shared_reads: u64,
    /// Bytes read ahead for iterators.
    pub read_ahead_bytes: u64,
    /// Tables that a filter excluded from a lookup.
    pub filter_negative: u64,
    /// Blocks read again after a failed checksum.
    pub rereads: u64,
    /// Bytes in the cache now.
    pub cache_bytes: u64,
    /// Budget of the cache in bytes.
    pub cache_budget: u64,
}

macro_rules! counters {
    ($($name:ident),*) => {
        #[derive(Default)]
        pub(crate) struct Counters { $(pub $name: Cell<u64>),* }
        impl Counters {
            pub fn read(&self) -> ReaderStats {
                ReaderStats { $($name: self.$name.get(),)* ..ReaderStats::default() }
            }
        }
    };
}
counters!(
    gets,
    found,
    seeks,
    steps,
    skipped,
    cache_hits,
    cache_misses,
    shared_reads,
    read_ahead_bytes,
    filter_negative,
    rereads
);

/// Adds to a counter.
#[inline]
pub(crate) fn count(counter: &Cell<u64>, n: u64) {
    counter.set(counter.get() + n);
}
