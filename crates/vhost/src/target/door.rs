//! Where front ends come in: at a listening socket, or by way of the launcher, which listens.

use std::future::pending;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use reactor::{Core, UnixListener, UnixPackets};

use crate::target::link::{Earlier, KeptLink, Link};

/// The way in for front ends.
pub enum Door {
    /// This process listens.
    Listener(UnixListener),
    /// The launcher listens. Each packet brings one connection.
    Launcher(UnixPackets),
}

impl Door {
    /// Takes a listening socket, or the packet socket of a launcher.
    ///
    /// # Errors
    /// When it is another kind of descriptor.
    pub fn from_fd(core: &Core, fd: OwnedFd) -> io::Result<Door> {
        match UnixPackets::is_one(fd.as_fd()) {
            true => UnixPackets::from_fd(core, fd).map(Door::Launcher),
            false => UnixListener::from_fd(core, fd).map(Door::Listener),
        }
    }

    /// The next connection. If it has had a session in another process, that comes along. A
    /// dropped future takes none.
    pub(super) async fn accept(&self, core: &Core) -> io::Result<(Link, Option<Earlier>)> {
        match self {
            Door::Listener(listener) => Ok((Link::direct(listener.accept().await?), None)),
            Door::Launcher(packets) => {
                let (bytes, mut fds) = packets.recv(1).await?;
                if bytes.is_empty() {
                    // The launcher has closed the disk.
                    return pending().await;
                }
                let fd = fds.pop().ok_or(io::ErrorKind::InvalidData)?;
                let (link, earlier) = KeptLink::begin(core, fd)?;
                Ok((Link::Kept(link), earlier))
            }
        }
    }
}

impl From<UnixListener> for Door {
    fn from(listener: UnixListener) -> Door {
        Door::Listener(listener)
    }
}

impl AsFd for Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Door::Listener(listener) => listener.as_fd(),
            Door::Launcher(packets) => packets.as_fd(),
        }
    }
}
