//! Where the caller's thread runs.

use crate::{Error, Result};

/// Lets the calling thread run on one processor only.
///
/// # Errors
/// When there is no such processor, or it may not run there.
pub fn pin(processor: usize) -> Result<()> {
    // SAFETY: zeroes are a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if processor >= 8 * size_of_val(&set) {
        let text = format!("there is no processor {processor}");
        return Err(Error::new(crate::Kind::System, text));
    }
    // SAFETY: `set` is ours, and the processor is within it, as was just checked.
    unsafe { libc::CPU_SET(processor, &mut set) };
    // SAFETY: the set is read, for as many bytes as it has.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(Error::last(format!("going to processor {processor}"))),
    }
}
