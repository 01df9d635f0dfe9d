//! The time of one flush of the disk, for comparison with durable writes.

use std::io;
use std::path::Path;

use reactor::{Core, Mode, Opening};

use crate::measure::histogram;

/// The number of flushes measured.
const FLUSHES: u32 = 300;
/// Bytes written before each.
const BLOCK: usize = 4096;
/// The file, removed afterwards.
const NAME: &str = "bench-flush.tmp";

/// Repeatedly overwrites a block of a file in `dir` directly and flushes it. Returns the median
/// time of a write with its flush, in nanoseconds.
///
/// # Errors
/// The system's error.
pub async fn flush_ns(core: &Core, dir: &Path) -> io::Result<u64> {
    let path = dir.join(NAME);
    let file = core.open_for_writing(&path, Opening::NewOrEmptied, Mode::Direct).await?;
    let file = core.attach(&file);
    let mut latency = histogram();
    let mut buf = core.alloc_wait(BLOCK).await?;
    buf.fill(1);
    for nth in 0..=FLUSHES {
        let from_ns = core.now_exact_ns();
        let (result, back) = file.write_at(0, buf, BLOCK).await;
        result?;
        buf = back;
        file.sync_data().await?;
        // The first write extends the file.
        if nth > 0 {
            latency.saturating_record(core.now_exact_ns() - from_ns);
        }
    }
    core.remove(&path).await?;
    Ok(latency.value_at_quantile(0.5))
}
