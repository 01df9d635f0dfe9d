//! Eventfds: how a ring is kicked and how it calls.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::time::Duration;

use crate::{Error, Result};

/// An eventfd that does not block.
#[derive(Debug)]
pub struct Event {
    file: File,
}

impl Event {
    /// A new one, its count 0.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn new() -> Result<Event> {
        // SAFETY: takes two integers and touches no memory of ours.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(Error::last("making an eventfd"));
        }
        // SAFETY: the call above gave us this descriptor, and nobody else has it.
        Ok(Event { file: unsafe { File::from_raw_fd(fd) } })
    }

    /// Adds one to its count and so wakes who waits.
    pub fn signal(&self) {
        // It fails only when the count is full, and then whoever waits is awake already.
        let _ = (&self.file).write(&1u64.to_ne_bytes());
    }

    /// Takes its count; 0 when nobody has signalled.
    pub fn take(&self) -> u64 {
        let mut count = [0; 8];
        match (&self.file).read(&mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }

    /// Waits until it is signalled and takes its count; 0 when the time was over before.
    pub fn wait(&self, timeout: Duration) -> u64 {
        if readable(self.as_fd(), timeout) { self.take() } else { 0 }
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Whether there is something to read, or the end of it, within a time.
pub(crate) fn readable(fd: BorrowedFd<'_>, timeout: Duration) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one pollfd is given, which lives on this stack until the call returns.
    unsafe { libc::poll(&raw mut poll, 1, ms) > 0 }
}
