//! What one flush of the disk costs, to compare durable writes with.

use std::io;
use std::path::Path;

use reactor::{Core, Mode, Opening};

use crate::measure::histogram;

/// Flushes measured.
const FLUSHES: u32 = 300;
/// What is written before each.
const BLOCK: usize = 4096;
/// The file, of which nothing stays behind.
const NAME: &str = "bench-flush.tmp";

/// Overwrites a block of a file in `dir` directly and flushes it, again and again. Returns the
/// median of a write with its flush, in nanoseconds.
///
/// # Errors
/// The system's.
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
        // The first one makes the file longer.
        if nth > 0 {
            latency.saturating_record(core.now_exact_ns() - from_ns);
        }
    }
    core.remove(&path).await?;
    Ok(latency.value_at_quantile(0.5))
}
