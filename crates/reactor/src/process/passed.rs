//! Descriptors that the program which has started this process has passed to it.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// The descriptors that a service manager has passed to this process (systemd's socket activation
/// and descriptor store), with their names. They are there once: later calls return none.
///
/// # Errors
/// When the environment makes no sense, or names descriptors that are not open.
pub fn passed_descriptors() -> io::Result<Vec<(String, OwnedFd)>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let passed: Vec<_> = sd_notify::listen_fds_with_names()?.collect();
    // SAFETY: these numbers belong to the descriptors with which this process was started, nobody
    // else in it knows them, and they are taken once.
    Ok(passed.into_iter().map(|(fd, name)| (name, unsafe { OwnedFd::from_raw_fd(fd) })).collect())
}
