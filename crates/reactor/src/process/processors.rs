//! The time slice of a thread.

use std::io;

/// Asks the scheduler to give the calling thread a processor that others use, too, for turns of so
/// many nanoseconds: the shorter they are, the sooner it runs when it wakes, for the same share of
/// the processor. 0 is the system's own. Kernels before 6.12 ignore it.
///
/// # Errors
/// As the system gives them.
pub fn set_time_slice(ns: u64) -> io::Result<()> {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    let bytes = size_of_val(&attributes) as libc::c_uint;
    // SAFETY: `attributes` is live and its size is given; 0 is the calling thread, and no flag is
    // defined.
    let done = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, bytes, 0) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    attributes.sched_runtime = ns;
    // SAFETY: the system only reads `attributes`, which has its size in its first field.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gets_short_turns_and_the_systems_own() {
        for ns in [500_000, 0] {
            set_time_slice(ns).unwrap();
        }
    }
}
