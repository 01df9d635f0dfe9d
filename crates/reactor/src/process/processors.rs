//! The processors: which ones this process may use, and its threads' turns on them.

use std::io;

/// The processors that this process may use, in order.
pub fn processors() -> Vec<usize> {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is live and its size is given.
    let done = unsafe { libc::sched_getaffinity(0, std::mem::size_of_val(&set), &raw mut set) };
    if done != 0 {
        return vec![0];
    }
    (0..libc::CPU_SETSIZE as usize)
        // SAFETY: the index is below CPU_SETSIZE.
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
        .collect()
}

/// Keeps the calling thread on a processor, or says that it cannot.
pub(crate) fn pin(cpu: usize) {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if cpu >= libc::CPU_SETSIZE as usize {
        return;
    }
    // SAFETY: the index is below CPU_SETSIZE; the set is live and its size is given.
    let done = unsafe {
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, std::mem::size_of_val(&set), &raw const set)
    };
    if done != 0 {
        tracing::warn!("cannot pin a core to processor {cpu}: {}", io::Error::last_os_error());
    }
}

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
