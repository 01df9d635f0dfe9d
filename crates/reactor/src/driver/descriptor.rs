//! Descriptors: of the host, of its regular files, and of a simulated world; and locks on them.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use super::host::{self, Cleaner};
use crate::inbox::Sender;

/// A descriptor of the host, or a number of the simulator's.
#[derive(Debug)]
pub enum Fd {
    /// Closed when dropped.
    Host(OwnedFd),
    /// A regular file of the host, closed by another thread when dropped.
    File(HostFile),
    /// Known to one simulated world only.
    Sim(SimFd),
}

/// A regular file's descriptor. Closing the last one of a removed file frees its blocks, which can
/// take long: another thread does it.
#[derive(Debug)]
pub struct HostFile {
    /// `None` only while this is dropped.
    fd: Option<OwnedFd>,
    cleaner: Cleaner,
}

impl HostFile {
    pub(crate) fn new(fd: OwnedFd, cleaner: &Cleaner) -> HostFile {
        HostFile { fd: Some(fd), cleaner: cleaner.clone() }
    }

    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(OwnedFd::as_fd)
    }

    pub(super) fn number(&self) -> i32 {
        self.fd.as_ref().map_or(-1, OwnedFd::as_raw_fd)
    }
}

impl Drop for HostFile {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.cleaner.close(fd);
        }
    }
}

/// A descriptor of a simulated world, which is told when this is dropped.
#[derive(Debug)]
pub struct SimFd {
    number: i32,
    closing: Sender<i32>,
    host: Option<OwnedFd>,
}

impl SimFd {
    pub(crate) fn new(number: i32, closing: Sender<i32>) -> SimFd {
        SimFd { number, closing, host: None }
    }

    /// Adds the descriptor of the host that belongs to it.
    pub(crate) fn with_host(mut self, fd: OwnedFd) -> SimFd {
        self.host = Some(fd);
        self
    }

    /// The descriptor of the host that belongs to it.
    pub(crate) fn host(&self) -> Option<BorrowedFd<'_>> {
        self.host.as_ref().map(OwnedFd::as_fd)
    }
}

impl Drop for SimFd {
    fn drop(&mut self) {
        // The channel has room for all descriptors. If the world is gone, the message is not
        // needed.
        let _ = self.closing.send(self.number);
    }
}

impl Fd {
    pub(crate) fn number(&self) -> i32 {
        match self {
            Fd::Host(fd) => fd.as_raw_fd(),
            Fd::File(file) => file.number(),
            Fd::Sim(fd) => fd.number,
        }
    }
}

/// A lock on a file, released when dropped. If its open file was shared with another process, that
/// process must drop it, too.
#[derive(Debug)]
pub struct LockGuard {
    fd: Option<Fd>,
    /// Whether another process may have the open file.
    shared: AtomicBool,
}

impl LockGuard {
    pub(crate) fn new(fd: Option<Fd>) -> LockGuard {
        LockGuard { fd, shared: AtomicBool::new(false) }
    }

    /// A lock that another process handed over with its open file ([`LockGuard::descriptor`]).
    pub fn held(fd: OwnedFd) -> LockGuard {
        LockGuard { fd: Some(Fd::Host(fd)), shared: AtomicBool::new(true) }
    }

    /// The open file, if it is the host's; from now on another process may have it.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.shared.store(true, Ordering::Relaxed);
        match &self.fd {
            Some(Fd::Host(fd)) => Some(fd.as_fd()),
            _ => None,
        }
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        // Closing it is not enough: a process that a thread is starting has a copy of each
        // descriptor until it runs its program.
        if let Some(Fd::Host(fd)) = &self.fd
            && !self.shared.load(Ordering::Relaxed)
        {
            host::unlock(fd);
        }
    }
}
