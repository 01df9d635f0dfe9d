//! Memory for writes that must not fail: those of the log and the MANIFEST.
//!
//! A failed write of either ends all writing. A lack of memory does not have to: all other holders
//! of memory stop waiting for more at some time and release it. So this waits until there is some.

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
