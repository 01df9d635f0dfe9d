//! The listening sockets for clients, metrics and NBD clients.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use reactor::{Core, Listener};

use crate::error::{Error, Kind};
use crate::nbd_address::NbdAddress;
use crate::patience::{Exclusive, Patience, patiently};

/// Listens before any core runs, with the patience of a core. A successor does not wait, because
/// its predecessor listens.
#[expect(clippy::disallowed_methods, reason = "start-up code, before any core runs")]
pub(super) fn patiently_now<T>(
    what: Exclusive,
    succeeds: bool,
    listen: impl Fn() -> std::io::Result<T>,
) -> std::io::Result<T> {
    let (patience, since) = (Patience::with(what), std::time::Instant::now());
    let now_ns = || u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
    loop {
        match listen() {
            Err(error) if is_in_use(&error) && !succeeds && patience.lasts_at(now_ns(), false) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            done => return done,
        }
    }
}

/// A socket for each core, if nobody else listens.
pub(super) fn listen_on_all(addr: SocketAddr, cores: usize) -> std::io::Result<Vec<OwnedFd>> {
    // It must not listen: whoever connected before it is closed would be cut off.
    let alone = std::net::TcpListener::from(reactor::bind(addr, false)?);
    let addr = alone.local_addr()?;
    drop(alone);
    (0..cores).map(|_| reactor::listen(addr, true)).collect()
}

/// A socket on which the predecessor already listened.
pub(super) fn inherited_listener(
    core: &Core,
    addr: SocketAddr,
    fd: OwnedFd,
) -> Result<Listener, Error> {
    Listener::from_fd(core, fd)
        .map_err(|error| Error::new(Kind::System, format!("cannot listen on {addr}: {error}")))
}

/// Listens, if nobody else does. `flag` is the user's flag for another address.
pub(super) async fn listen_alone(
    core: &Core,
    addr: SocketAddr,
    flag: &str,
) -> Result<Listener, Error> {
    let patience = Patience::with(Exclusive::Port(addr));
    let in_use = |error: &std::io::Error| is_in_use(error) && patience.lasts(core);
    let listener = patiently(core, in_use, async || core.listen_alone(addr)).await;
    listener.map_err(|error| no_port(addr, flag, &error))
}

/// Listens for NBD clients, if nobody else does.
pub(super) async fn listen_for_nbd(core: &Core, addr: &NbdAddress) -> Result<Listener, Error> {
    let patience = Patience::with(addr.exclusive());
    let in_use = |error: &std::io::Error| is_in_use(error) && patience.lasts(core);
    let fd = patiently(core, in_use, async || addr.listen()).await;
    fd.and_then(|fd| Listener::from_fd(core, fd)).map_err(|error| no_nbd(addr, &error))
}

/// The error of listening for NBD clients.
pub(crate) fn no_nbd(addr: &NbdAddress, error: &std::io::Error) -> Error {
    match addr {
        NbdAddress::Tcp(addr) => no_port(*addr, "--nbd", error),
        NbdAddress::Unix(path) if is_in_use(error) => {
            let what =
                format!("{} is in use by another program, or is not a socket", path.display());
            Error::new(Kind::PortInUse, what).hint("choose another path with --nbd unix:PATH")
        }
        NbdAddress::Unix(path) => {
            Error::new(Kind::System, format!("cannot listen at {}: {error}", path.display()))
        }
    }
}

pub(super) fn is_in_use(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::AddrInUse
}

pub(crate) fn no_port(addr: SocketAddr, flag: &str, error: &std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            Error::new(Kind::PortInUse, format!("{addr} is in use by another program")).hint(
                format!(
                    "`ss -ltnp 'sport = :{0}'` names it; or listen elsewhere, with {flag} {1}:{2}",
                    addr.port(),
                    addr.ip(),
                    addr.port().checked_add(1).unwrap_or(7000)
                ),
            )
        }
        std::io::ErrorKind::PermissionDenied => {
            Error::new(Kind::System, format!("cannot listen on {addr}: {error}"))
                .hint(format!("ports below 1024 are for root: choose a higher one with {flag}"))
        }
        std::io::ErrorKind::AddrNotAvailable => {
            Error::new(Kind::Usage, format!("{} is not an address of this machine", addr.ip()))
                .hint("`ip addr` lists the addresses it has")
        }
        _ => Error::new(Kind::System, format!("cannot listen on {addr}: {error}")),
    }
}
