//! The eventfd of a completion queue.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// An eventfd that never blocks: readable after [`signal`](Event::signal) until
/// [`clear`](Event::clear).
#[derive(Debug)]
pub(crate) struct Event(OwnedFd);

impl Event {
    pub fn new() -> io::Result<Event> {
        // SAFETY: the call has no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened it for us, and nobody else knows it.
        Ok(Event(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Makes it readable. If its counter is full, it is readable already.
    pub fn signal(&self) {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: `one` has the 8 bytes that are read, and lives until the call returns.
        unsafe { libc::write(self.fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Makes it unreadable.
    pub fn clear(&self) {
        let mut count = [0_u8; 8];
        // SAFETY: `count` has the 8 bytes that are written, and lives until the call returns.
        unsafe { libc::read(self.fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    /// Waits until it is readable, or a signal handler has run.
    pub fn wait(&self) {
        let mut poll = libc::pollfd { fd: self.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one entry, which lives until the call returns.
        unsafe { libc::poll(&mut poll, 1, -1) };
    }
}
