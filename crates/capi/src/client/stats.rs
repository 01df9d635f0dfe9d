//! The counts of a client's cache.

use millrace::client::CacheStats;

use crate::bytes::array_out;
use crate::error::{Error, Result};

/// `millrace_cache_stats`: later versions add fields at the end, and move none.
const FIELDS: usize = 17;

fn fields(stats: &CacheStats) -> [u64; FIELDS] {
    let load_ns = u64::try_from(stats.index_load_time.as_nanos()).unwrap_or(u64::MAX);
    [
        stats.hits,
        stats.misses,
        stats.invalidations,
        stats.clears,
        stats.entries,
        stats.bytes_cached,
        stats.bytes_used,
        stats.stretches,
        stats.values_ahead,
        stats.values_ahead_used,
        stats.round_trips,
        stats.index_is_whole.into(),
        stats.index_keys,
        stats.index_bytes,
        stats.index_answers,
        stats.index_loads,
        load_ns,
    ]
}

/// Fills as much of the caller's structure as it has, or as this version knows, and the rest with
/// zeros.
///
/// # Safety
/// The [contract](crate#contract): `to` is null, or points to memory for `size` bytes, aligned for
/// a `u64`.
pub(super) unsafe fn write(
    to: *mut std::mem::MaybeUninit<u64>,
    size: usize,
    stats: &CacheStats,
) -> Result<()> {
    if size == 0 || !size.is_multiple_of(size_of::<u64>()) {
        let text = format!("size is {size}: pass sizeof(millrace_cache_stats)");
        return Err(Error::argument(text));
    }
    // SAFETY: the caller's promise.
    let to = unsafe { array_out(to, size / size_of::<u64>(), "stats") }?;
    let known = fields(stats).into_iter().chain(std::iter::repeat(0));
    for (field, count) in to.iter_mut().zip(known) {
        field.write(count);
    }
    Ok(())
}
