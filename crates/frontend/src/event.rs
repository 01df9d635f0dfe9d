//! Eventfds: the kick, call and err descriptors of rings.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::time::Duration;

use crate::{Error, Result};

/// A non-blocking eventfd.
#[derive(Debug)]
pub struct Event {
    file: File,
}

impl Event {
    /// Creates an eventfd with a count of 0.
    ///
    /// # Errors
    /// If the system has no descriptors left.
    pub fn new() -> Result<Event> {
        // SAFETY: the call takes two integers and accesses no memory of this process.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(Error::last("creating an eventfd"));
        }
        // SAFETY: the call above returned this descriptor, and nothing else owns it.
        Ok(Event { file: unsafe { File::from_raw_fd(fd) } })
    }

    /// Increments the count, which wakes the waiter.
    pub fn signal(&self) {
        // This fails only if the count is at its maximum, and then the waiter is already awake.
        let _ = (&self.file).write(&1u64.to_ne_bytes());
    }

    /// Returns the count and resets it to 0.
    pub fn take(&self) -> u64 {
        let mut count = [0; 8];
        match (&self.file).read(&mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }

    /// Waits for a signal and returns the count; 0 after `timeout`.
    pub fn wait(&self, timeout: Duration) -> u64 {
        if readable(self.as_fd(), timeout) { self.take() } else { 0 }
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Whether data or the end of the stream can be read within `timeout`.
pub(crate) fn readable(fd: BorrowedFd<'_>, timeout: Duration) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: the call gets one pollfd, which lives on this stack until the call returns.
    unsafe { libc::poll(&raw mut poll, 1, ms) > 0 }
}
