//! Memory for what must be written: the log and the MANIFEST.
//!
//! A failed write of either ends all writing, and a lack of memory is no such failure: whoever
//! holds it gives it back in the end, because everybody else gives up waiting at some time.

use std::io;

use reactor::{Buf, Core};

/// A buffer of `len` bytes; suspends until there is room.
///
/// # Errors
/// `OutOfMemory` when the whole budget could not hold it.
pub(crate) async fn memory(core: &Core, len: usize) -> io::Result<Buf> {
    loop {
        match core.alloc_wait(len).await {
            Err(error) if core.pool().could_hold(len) => {
                tracing::warn!("a log waits: {error}");
            }
            done => return done,
        }
    }
}
