//! The processor of the calling thread.

use crate::{Error, Result};

/// Pins the calling thread to one processor.
///
/// # Errors
/// If the processor does not exist, or the thread is not allowed to run there.
pub fn pin(processor: usize) -> Result<()> {
    // SAFETY: zeroes are a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if processor >= 8 * size_of_val(&set) {
        let text = format!("processor {processor} does not exist");
        return Err(Error::new(crate::Kind::System, text));
    }
    // SAFETY: `set` is a local variable, and the check above ensures that `processor` is within it.
    unsafe { libc::CPU_SET(processor, &mut set) };
    // SAFETY: the call reads the set, with its size.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(Error::last(format!("pinning the thread to processor {processor}"))),
    }
}
