//! Where NBD clients connect.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use crate::patience::Exclusive;

/// Where NBD clients connect: `HOST:PORT`, or `unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    /// An address of this machine.
    Tcp(SocketAddr),
    /// The name of a Unix socket, for processes of the same user.
    Unix(PathBuf),
}

impl NbdAddress {
    /// Listens there. A Unix socket that an earlier process left is replaced. Does not suspend.
    ///
    /// # Errors
    /// `AddrInUse` when another process listens there; others as the system gives them.
    pub(crate) fn listen(&self) -> std::io::Result<OwnedFd> {
        match self {
            NbdAddress::Tcp(addr) => reactor::listen(*addr, false),
            NbdAddress::Unix(path) => reactor::listen_unix(path),
        }
    }

    /// Whether a socket listens there.
    pub(crate) fn is_of(&self, socket: &OwnedFd) -> bool {
        let Ok(socket) = socket.try_clone() else { return false };
        match self {
            NbdAddress::Tcp(addr) => {
                let found = TcpListener::from(socket).local_addr();
                found.is_ok_and(|found| found == *addr)
            }
            NbdAddress::Unix(path) => {
                let found = UnixListener::from(socket).local_addr();
                found.is_ok_and(|found| found.as_pathname() == Some(path))
            }
        }
    }

    /// What only one process can have.
    pub(crate) fn exclusive(&self) -> Exclusive {
        match self {
            NbdAddress::Tcp(addr) => Exclusive::Port(*addr),
            NbdAddress::Unix(path) => Exclusive::Socket(path.clone()),
        }
    }

    /// The name to remove when nobody listens there any more.
    pub(crate) fn path(&self) -> Option<&PathBuf> {
        match self {
            NbdAddress::Tcp(_) => None,
            NbdAddress::Unix(path) => Some(path),
        }
    }
}

impl std::fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NbdAddress::Tcp(addr) => write!(f, "{addr}"),
            NbdAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}
