//! Waiting until a descriptor of the host is readable.
//!
//! In a simulated world the descriptor is the host's, too; the world decides when the waiter learns
//! that it is readable, and how many bytes go through it at once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::core::Core;
use crate::driver::Fd;
use crate::io::net::{Socket, SocketInner};

/// The longest message that a simulated world never cuts: the kernel takes this many bytes at once
/// or none.
const WHOLE_BYTES: usize = 64;

/// A descriptor that one core watches: a socket, a pipe, an eventfd, a pidfd, a timerfd.
pub struct Watch(Socket);

impl Watch {
    /// Watches `fd`. Nothing is registered until [`Watch::readable`] is polled.
    pub fn new(core: &Core, fd: OwnedFd) -> Watch {
        let fd = match core.inner().sim(|sim| sim.watch(&fd)) {
            Some(number) => Fd::Sim(number.with_host(fd)),
            None => Fd::Host(fd),
        };
        Watch(Socket::new(core, fd))
    }

    /// Waits until a read of the descriptor would not block: there is something to read, the other
    /// side has closed it, or it has failed. The wait may be dropped at any time.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn readable(&self) -> io::Result<()> {
        self.0.readable().await
    }

    /// How many of `len` bytes go through at once: in a simulated world perhaps not all.
    pub(crate) fn at_once(&self, len: usize) -> usize {
        if len <= WHOLE_BYTES {
            return len;
        }
        self.inner().core().inner().sim(|sim| sim.at_once(len)).unwrap_or(len)
    }

    pub(crate) fn inner(&self) -> &SocketInner {
        self.0.inner()
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self.inner().fd() {
            Fd::Host(fd) => fd.as_fd(),
            Fd::Sim(fd) => fd.host().expect("made of a descriptor of the host"),
            Fd::File(_) => unreachable!("made of a descriptor of the host"),
        }
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}
