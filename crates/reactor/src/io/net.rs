//! Stream sockets: one listener per core, and connections.
//!
//! An operation takes its buffer by value and returns it with the result. A receive that is dropped
//! before it is done loses its bytes, so the connection must then be closed.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::mem::size_of;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::core::Core;
use crate::driver::{Fd, IoOp};
use crate::io::file::io_result;
use crate::memory::buf::Buf;
use crate::op::{Hold, Message, OpId, Part, Payload};

/// Most bytes of one send, or of one receive into a buffer. The kernel copies them while the core
/// waits, and with it all other connections.
const SEND_BYTES_MAX: usize = 64 << 10;

/// A close does not wait until everything was sent, and drops it.
const AT_ONCE: libc::linger = libc::linger { l_onoff: 1, l_linger: 0 };

pub(crate) struct SocketInner {
    fd: Fd,
    core: Core,
}

impl SocketInner {
    pub(crate) fn fd(&self) -> &Fd {
        &self.fd
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    fn address(&self, remote: bool) -> io::Result<SocketAddr> {
        match &self.fd {
            Fd::File(_) => Err(io::ErrorKind::NotConnected.into()),
            Fd::Host(fd) => address(fd, if remote { libc::getpeername } else { libc::getsockname }),
            Fd::Sim(_) => {
                let answer = self.core.inner().sim(|sim| sim.address(self.fd.number(), remote));
                answer.unwrap_or_else(|| Err(io::ErrorKind::NotConnected.into()))
            }
        }
    }
}

/// A connection of one core. Clones are the same connection, so one task can read while another
/// writes. It is closed with the last clone and the last operation.
#[derive(Clone)]
pub struct Socket(Rc<SocketInner>);

/// Makes a socket that listens on `addr`, for a process that makes it before its cores run: see
/// [`Listener::from_fd`]. With `shared_port`, other sockets with the same option may listen there,
/// too.
///
/// # Errors
/// As for [`Core::listen`] and [`Core::listen_alone`].
pub fn listen(addr: SocketAddr, shared_port: bool) -> io::Result<OwnedFd> {
    let fd = bind(addr, shared_port)?;
    // SAFETY: takes no pointers.
    if unsafe { libc::listen(fd.as_raw_fd(), 1024) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// Makes a socket that has the address `addr` and does not listen: nobody can connect to it. With
/// `shared_port`, other sockets with the same option may have the address, too.
///
/// # Errors
/// As for [`listen`]; `AddrInUse` if somebody listens there.
pub fn bind(addr: SocketAddr, shared_port: bool) -> io::Result<OwnedFd> {
    let fd = stream(addr, 0)?;
    set_option(&fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    if shared_port {
        set_option(&fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
    }
    let (storage, len) = to_sockaddr(addr);
    // SAFETY: `storage` is a live, initialised sockaddr of at least `len` bytes.
    if unsafe { libc::bind(fd.as_raw_fd(), (&raw const storage).cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// Begins a connection to `addr`, for another process or a core: see [`Socket::from_fd`]. Does not
/// wait for the other side.
///
/// # Errors
/// As the system gives them, if it can tell at once.
pub fn connect(addr: SocketAddr) -> io::Result<OwnedFd> {
    let fd = stream(addr, libc::SOCK_NONBLOCK)?;
    let (storage, len) = to_sockaddr(addr);
    // SAFETY: `storage` is a live, initialised sockaddr of at least `len` bytes.
    if unsafe { libc::connect(fd.as_raw_fd(), (&raw const storage).cast(), len) } != 0 {
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINPROGRESS) {
            return Err(error);
        }
    }
    // An operation of io_uring waits only on a socket without the flag.
    // SAFETY: takes no pointers.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// A new socket of the family of `addr`.
fn stream(addr: SocketAddr, flags: i32) -> io::Result<OwnedFd> {
    let family = if addr.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: takes no pointers.
    let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | flags, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A listening socket of one core.
pub struct Listener {
    socket: Rc<SocketInner>,
}

impl Listener {
    /// Listens on `addr`. Every core has its own listener on the address, and the kernel spreads
    /// the connections (`SO_REUSEPORT`).
    ///
    /// # Errors
    /// `AddrInUse` when another process listens there; other errors as the system gives them.
    pub(crate) fn bind(core: &Core, addr: SocketAddr, shared_port: bool) -> io::Result<Listener> {
        if let Some(fd) = core.inner().sim(|sim| sim.listen(addr, !shared_port)) {
            return Ok(Listener { socket: Rc::new(SocketInner { fd: fd?, core: core.clone() }) });
        }
        let fd = Fd::Host(listen(addr, shared_port)?);
        Ok(Listener { socket: Rc::new(SocketInner { fd, core: core.clone() }) })
    }

    /// Takes a listening socket, of TCP or a Unix stream socket, that another process handed over
    /// or that was made before the cores ran.
    ///
    /// # Errors
    /// `Unsupported` in a simulated world.
    pub fn from_fd(core: &Core, fd: OwnedFd) -> io::Result<Listener> {
        if core.is_simulated() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Listener { socket: Rc::new(SocketInner { fd: Fd::Host(fd), core: core.clone() }) })
    }

    /// The host's descriptor, to be handed over; `None` in a simulated world.
    pub fn host_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.socket.fd {
            Fd::Host(fd) => Some(fd.as_fd()),
            Fd::File(_) | Fd::Sim(_) => None,
        }
    }

    /// The address it listens on.
    ///
    /// # Errors
    /// As the system gives them.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.address(false)
    }

    /// Waits for a connection.
    ///
    /// # Errors
    /// `EMFILE` and the like: the caller backs off and retries.
    pub async fn accept(&self) -> io::Result<Socket> {
        let core = self.socket.core.clone();
        let op = IoOp::Accept { fd: self.socket.fd.number() };
        let hold = Hold::Socket { _socket: self.socket.clone() };
        let (result, _) = SocketOp::start(&core, op, Payload::None, hold).await;
        let fd = io_result(result)? as i32;
        let fd = core.inner().adopt(fd);
        if let Fd::Host(fd) = &fd {
            set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1).ok();
        }
        Ok(Socket(Rc::new(SocketInner { fd, core })))
    }
}

impl Socket {
    /// Wraps a connected stream socket.
    pub(crate) fn new(core: &Core, fd: Fd) -> Socket {
        Socket(Rc::new(SocketInner { fd, core: core.clone() }))
    }

    /// Takes a connection that was begun by [`connect`], here or in another process. Its first
    /// send waits until it is made, and tells if it is refused; nobody limits that time.
    ///
    /// # Errors
    /// `Unsupported` in a simulated world.
    pub fn from_fd(core: &Core, fd: OwnedFd) -> io::Result<Socket> {
        if core.is_simulated() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        set_option(&fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1).ok();
        Ok(Socket::new(core, Fd::Host(fd)))
    }

    /// Begins a connection: see [`Core::connect`].
    pub(crate) fn connect(core: &Core, addr: SocketAddr) -> io::Result<Socket> {
        match core.inner().sim(|sim| sim.connect(addr)) {
            Some(fd) => Ok(Socket::new(core, fd?)),
            None => Socket::from_fd(core, connect(addr)?),
        }
    }

    pub(crate) fn inner(&self) -> &SocketInner {
        &self.0
    }

    /// The other side's address.
    ///
    /// # Errors
    /// As the system gives them, once the connection is gone.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.0.address(true)
    }

    /// This side's address.
    ///
    /// # Errors
    /// As the system gives them.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.address(false)
    }

    /// Lets the connection fail if the other side's machine is silent for so many seconds: it
    /// acknowledges nothing that was sent, or answers no probe when nothing was. A program that
    /// only does not read is not silent, and neither is the other side of a Unix socket. Does
    /// nothing in a simulated world.
    ///
    /// # Errors
    /// As the system gives them.
    pub fn fail_if_silent(&self, seconds: u16) -> io::Result<()> {
        let Fd::Host(fd) = &self.0.fd else { return Ok(()) };
        // Another family than TCP's.
        if self.local_addr().is_err() {
            return Ok(());
        }
        let seconds = i32::from(seconds);
        set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
        // A probe after a quarter of the time, and then as often.
        let probe = (seconds / 4).max(1);
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, probe)?;
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, probe)?;
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3)?;
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, seconds * 1000)
    }

    /// The descriptor's number, for lists and logs.
    pub fn number(&self) -> i32 {
        self.0.fd.number()
    }

    fn op(&self, op: IoOp, payload: Payload) -> SocketOp {
        SocketOp::start(&self.0.core, op, payload, Hold::Socket { _socket: self.0.clone() })
    }

    /// Waits until there is something to receive (or the connection has ended), without a buffer:
    /// the wait of an idle connection.
    pub async fn readable(&self) -> io::Result<()> {
        let (result, _) = self.op(IoOp::PollIn { fd: self.number() }, Payload::None).await;
        io_result(result).map(|_| ())
    }

    /// Receives up to `most` bytes and appends them to `buf`; waits until some arrive. 0 means the
    /// other side has ended.
    pub async fn recv(&self, mut buf: Vec<u8>, most: usize) -> (io::Result<usize>, Vec<u8>) {
        buf.reserve(most);
        let spare = buf.spare_capacity_mut();
        let op = IoOp::Recv {
            fd: self.number(),
            ptr: spare.as_mut_ptr().cast(),
            len: most.min(i32::MAX as usize) as u32,
        };
        let (result, payload) = self.op(op, Payload::Bytes(buf)).await;
        let Payload::Bytes(mut buf) = payload else { unreachable!("a receive owns its bytes") };
        let result = io_result(result);
        if let Ok(n) = result {
            // SAFETY: the receive wrote `n <= most` bytes after `buf.len()`, inside the capacity
            // reserved above; the operation owned the vector meanwhile.
            unsafe { buf.set_len(buf.len() + n) };
        }
        (result, buf)
    }

    /// Receives into `buf` from `from` on, at most 64 KiB; waits until some bytes arrive. Returns
    /// their number: 0 means that the other side has ended, or that there is no room.
    ///
    /// # Panics
    /// When `from` lies outside the buffer.
    pub async fn recv_into(&self, mut buf: Buf, from: usize) -> (io::Result<usize>, Buf) {
        let rest = &mut buf[from..];
        let op = IoOp::Recv {
            fd: self.number(),
            ptr: rest.as_mut_ptr().cast(),
            len: rest.len().min(SEND_BYTES_MAX) as u32,
        };
        let (result, payload) = self.op(op, Payload::Buf(buf)).await;
        let Payload::Buf(buf) = payload else { unreachable!("a receive owns its buffer") };
        (io_result(result), buf)
    }

    /// Sends at most 64 KiB of `buf` from `from` on, once; waits until the socket takes some bytes.
    /// Returns their number.
    pub async fn send_some(&self, buf: Vec<u8>, from: usize) -> (io::Result<usize>, Vec<u8>) {
        let rest = &buf[from..];
        let op = IoOp::Send {
            fd: self.number(),
            ptr: rest.as_ptr(),
            len: rest.len().min(SEND_BYTES_MAX) as u32,
        };
        let (result, payload) = self.op(op, Payload::Bytes(buf)).await;
        let Payload::Bytes(buf) = payload else { unreachable!("a send owns its bytes") };
        (io_result(result), buf)
    }

    /// Sends all of `buf`; waits while the socket is full. Returns the buffer for reuse.
    pub async fn send(&self, mut buf: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        let mut sent = 0;
        while sent < buf.len() {
            let (result, back) = self.send_some(buf, sent).await;
            buf = back;
            match result {
                Ok(0) => return (Err(io::ErrorKind::WriteZero.into()), buf),
                Ok(n) => sent += n,
                Err(error) => return (Err(error), buf),
            }
        }
        (Ok(()), buf)
    }

    /// Sends all the pieces in order, shared ones without a copy; waits while the socket is full.
    /// Returns the emptied vector for reuse. `accepted` counts the bytes that the socket has
    /// accepted.
    pub async fn send_parts(
        &self,
        mut parts: Vec<Part>,
        accepted: &Cell<u64>,
    ) -> (io::Result<()>, Vec<Part>) {
        let total: usize = parts.iter().map(Part::len).sum();
        let mut sent = 0;
        while sent < total {
            let mut iov = Vec::with_capacity(parts.len().min(1024));
            let (mut skip, mut room) = (sent, SEND_BYTES_MAX);
            for part in &parts {
                let bytes = part.as_slice();
                if skip >= bytes.len() {
                    skip -= bytes.len();
                    continue;
                }
                let bytes = &bytes[skip..];
                let bytes = &bytes[..bytes.len().min(room)];
                (skip, room) = (0, room - bytes.len());
                iov.push(libc::iovec {
                    iov_base: bytes.as_ptr().cast_mut().cast(),
                    iov_len: bytes.len(),
                });
                if iov.len() == 1024 || room == 0 {
                    break;
                }
            }
            // SAFETY: `msghdr` is a plain C struct for which all zeroes is a valid value.
            let header: libc::msghdr = unsafe { std::mem::zeroed() };
            let mut message = Box::new(Message { parts, iov, header });
            message.header.msg_iov = message.iov.as_mut_ptr();
            message.header.msg_iovlen = message.iov.len();
            let op = IoOp::SendMsg { fd: self.number(), msg: &raw const message.header };
            let (result, payload) = self.op(op, Payload::Parts(message)).await;
            let Payload::Parts(message) = payload else {
                unreachable!("a vectored send owns its message")
            };
            parts = message.parts;
            match io_result(result) {
                Ok(0) => return (Err(io::ErrorKind::WriteZero.into()), parts),
                Ok(n) => {
                    sent += n;
                    accepted.set(accepted.get() + n as u64);
                }
                Err(error) => return (Err(error), parts),
            }
        }
        parts.clear();
        (Ok(()), parts)
    }

    /// Ends both directions now; operations in flight complete with their present result.
    pub fn shutdown(&self) {
        self.end(false);
    }

    /// Like [`Socket::shutdown`], and the close of the connection drops what was sent and has not
    /// reached the other side, whose sends then fail at once. The same as a shutdown for a Unix
    /// socket, which has nothing on its way.
    pub fn reset(&self) {
        self.end(true);
    }

    fn end(&self, reset: bool) {
        match &self.0.fd {
            Fd::File(_) => {}
            Fd::Host(fd) => {
                if reset {
                    // Without it the connection ends all the same.
                    let _ = set_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, AT_ONCE);
                }
                // SAFETY: takes no pointers; the descriptor is owned by `self`.
                unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_RDWR) };
            }
            Fd::Sim(_) => {
                self.0.core.inner().sim(|sim| sim.shut_down(self.number(), reset));
            }
        }
    }
}

/// An operation on a socket; dropping it cancels.
struct SocketOp {
    core: Core,
    id: Option<OpId>,
}

impl SocketOp {
    fn start(core: &Core, op: IoOp, payload: Payload, hold: Hold) -> SocketOp {
        SocketOp { core: core.clone(), id: Some(core.inner().start(op, payload, hold)) }
    }
}

impl Future for SocketOp {
    type Output = (i32, Payload);
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<(i32, Payload)> {
        let id = self.id.expect("a finished operation is not polled again");
        let done = self.core.inner().poll_op(id, cx);
        if done.is_ready() {
            self.id = None;
        }
        done
    }
}

impl Drop for SocketOp {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.core.inner().drop_op(id, true);
        }
    }
}

/// Waits until the caller's descriptor is readable; used for signals.
pub(crate) async fn readable(core: &Core, fd: &Rc<OwnedFd>) -> io::Result<()> {
    let socket = Socket::new(core, Fd::Host(fd.try_clone()?));
    socket.readable().await
}

fn set_option<T>(fd: &OwnedFd, level: i32, name: i32, value: T) -> io::Result<()> {
    // SAFETY: passes a pointer to a live value and its size.
    let done = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

pub(crate) fn to_sockaddr(addr: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let len = match addr {
        SocketAddr::V4(v4) => {
            let sin = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: `sockaddr_storage` is at least as large and aligned as `sockaddr_in`.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(sin) };
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(v6) => {
            let sin6 = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above, for `sockaddr_in6`.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(sin6) };
            size_of::<libc::sockaddr_in6>()
        }
    };
    (storage, len as libc::socklen_t)
}

type NameCall = unsafe extern "C" fn(i32, *mut libc::sockaddr, *mut libc::socklen_t) -> i32;

fn address(fd: &OwnedFd, call: NameCall) -> io::Result<SocketAddr> {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    // SAFETY: both pointers are to live variables, `len` tells the room.
    if unsafe { call(fd.as_raw_fd(), (&raw mut storage).cast(), &raw mut len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that a `sockaddr_in` was written there.
            let sin = unsafe { &*(&raw const storage).cast::<libc::sockaddr_in>() };
            let ip = std::net::Ipv4Addr::from(sin.sin_addr.s_addr.to_ne_bytes());
            Ok(SocketAddr::from((ip, u16::from_be(sin.sin_port))))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that a `sockaddr_in6` was written there.
            let sin6 = unsafe { &*(&raw const storage).cast::<libc::sockaddr_in6>() };
            let ip = std::net::Ipv6Addr::from(sin6.sin6_addr.s6_addr);
            Ok(SocketAddr::from((ip, u16::from_be(sin6.sin6_port))))
        }
        other => Err(io::Error::other(format!("address of family {other}"))),
    }
}
