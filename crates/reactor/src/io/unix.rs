//! Unix stream sockets that carry descriptors beside bytes: the connections of virtual machines'
//! disks. The eventfds by which both sides wake each other are in `eventfd.rs`.
//!
//! Messages are few and small (the set-up of a disk, its stop), so a receive waits until the socket
//! is readable, without a buffer, and then takes the bytes with one system call.
//!
//! In a simulated world these are descriptors of the host, too: the bytes stay in this process, and
//! the kernel moves them immediately and in order, so a seed replays it. The world decides when a
//! waiter learns of them, and into which pieces they are cut. Names belong to the host, and
//! simulated worlds cannot use them.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;

use crate::core::Core;
use crate::io::watch::Watch;

/// Most descriptors that one message may carry (the kernel's limit).
pub const FDS_MAX: usize = 253;
/// Interval in nanoseconds at which a send retries on a full socket.
const ROOM_NS: u64 = 1_000_000;
/// Retries until a send fails: ten seconds.
const ROOM_LOOKS: u32 = 10_000;

/// How long a simulated socket has no room after it has taken a part, in nanoseconds.
const CUT_NS: u64 = 20_000;

fn refuse_simulated(core: &Core) -> io::Result<()> {
    match core.inner().sim(|_| ()) {
        Some(()) => Err(io::ErrorKind::Unsupported.into()),
        None => Ok(()),
    }
}

/// The result of a system call that returns a count or -1.
pub(crate) fn outcome(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Makes a Unix socket that listens under a name, for a process that makes it before its cores run.
/// [`Listener::from_fd`](crate::Listener::from_fd) takes it if its connections carry bytes only.
///
/// # Errors
/// As for [`UnixListener::bind`].
pub fn listen_unix(path: &Path) -> io::Result<OwnedFd> {
    let (address, len) = address(path)?;
    let fd = socket()?;
    set_nonblocking(&fd)?;
    if connects(&fd, &address, len) || exists_otherwise(path) {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    // A socket on which a connection was tried cannot listen.
    let fd = socket()?;
    remove(path)?;
    // Set the rights before the bind, so that no other user can ever connect. SAFETY: takes no
    // pointers.
    unsafe { libc::fchmod(fd.as_raw_fd(), 0o600) };
    // SAFETY: `address` is a live, initialised `sockaddr_un` of at least `len` bytes.
    outcome(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) } as isize)?;
    // SAFETY: takes no pointers.
    outcome(unsafe { libc::listen(fd.as_raw_fd(), 128) } as isize)?;
    Ok(fd)
}

/// Connects to the Unix stream socket of a name, for another process or a core:
/// [`Socket::from_fd`](crate::Socket::from_fd) takes it if the connection carries bytes only. Does
/// not wait.
///
/// # Errors
/// `ConnectionRefused` or `NotFound` when nobody listens there, `WouldBlock` when too many connect
/// at the moment; others as the system gives them.
pub fn connect_unix(path: &Path) -> io::Result<OwnedFd> {
    let (address, len) = address(path)?;
    let fd = socket()?;
    set_nonblocking(&fd)?;
    // SAFETY: `address` is a live, initialised `sockaddr_un` of at least `len` bytes.
    let done = unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), len) };
    outcome(done as isize)?;
    // An operation of io_uring waits only on a socket without the flag. SAFETY: takes no pointers.
    outcome(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, 0) } as isize)?;
    Ok(fd)
}

/// A listening Unix socket of one core.
pub struct UnixListener(Watch);

impl UnixListener {
    /// Listens under a name, to which only the owner's processes may connect. A socket that an
    /// earlier process left there, without a listener, is replaced.
    ///
    /// # Errors
    /// `AddrInUse` when another process listens there, or the name belongs to a file that is not a
    /// socket; others as the system gives them.
    pub fn bind(core: &Core, path: &Path) -> io::Result<UnixListener> {
        refuse_simulated(core)?;
        UnixListener::from_fd(core, listen_unix(path)?)
    }

    /// Takes a listening socket, for example one that another process handed over.
    ///
    /// # Errors
    /// As the system gives them.
    pub fn from_fd(core: &Core, fd: OwnedFd) -> io::Result<UnixListener> {
        set_nonblocking(&fd)?;
        Ok(UnixListener(Watch::new(core, fd)))
    }

    /// Waits for a connection.
    ///
    /// # Errors
    /// `EMFILE` and the like: the caller backs off and retries.
    pub async fn accept(&self) -> io::Result<UnixSocket> {
        loop {
            self.0.readable().await?;
            let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            let (none, no_len) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: null pointers mean that the address is not wanted.
            let fd = unsafe { libc::accept4(self.0.fd().as_raw_fd(), none, no_len, flags) };
            if fd >= 0 {
                // SAFETY: a new descriptor that nobody else owns.
                let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                return Ok(UnixSocket(Rc::new(Watch::new(self.0.inner().core(), fd))));
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::WouldBlock {
                return Err(error);
            }
        }
    }
}

impl AsFd for UnixListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
}

/// A connected Unix stream socket of one core. Clones are the same connection.
#[derive(Clone)]
pub struct UnixSocket(Rc<Watch>);

impl UnixSocket {
    /// Takes a connected socket, for example one that another process handed over. No call on it
    /// blocks, whatever that process does with the flags of the open file, which it may share.
    ///
    /// # Errors
    /// `InvalidInput` when it is another kind of descriptor.
    pub fn from_fd(core: &Core, fd: OwnedFd) -> io::Result<UnixSocket> {
        let is = |name, value| socket_option(fd.as_fd(), name).is_ok_and(|found| found == value);
        if !is(libc::SO_DOMAIN, libc::AF_UNIX) || !is(libc::SO_TYPE, libc::SOCK_STREAM) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a Unix stream socket"));
        }
        Ok(UnixSocket(Rc::new(Watch::new(core, fd))))
    }

    /// Connects to the listener of a name.
    ///
    /// # Errors
    /// `ConnectionRefused` or `NotFound` when there is none; others as the system gives them.
    pub fn connect(core: &Core, path: &Path) -> io::Result<UnixSocket> {
        refuse_simulated(core)?;
        let (address, len) = address(path)?;
        let fd = socket()?;
        // A connect to a Unix socket blocks only while the listener's queue is full. SAFETY:
        // `address` is a live, initialised `sockaddr_un` of at least `len` bytes.
        let done = unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), len) };
        outcome(done as isize)?;
        UnixSocket::from_fd(core, fd)
    }

    /// Receives up to `most` bytes, which are appended to `buf`, and the descriptors that came with
    /// them; waits until some arrive. No bytes: the other side has ended.
    ///
    /// # Errors
    /// `InvalidData` when more than [`FDS_MAX`] descriptors came; `Other` when this process has no
    /// room for them; others as the system gives them.
    pub async fn recv(&self, buf: &mut Vec<u8>, most: usize) -> io::Result<(usize, Vec<OwnedFd>)> {
        loop {
            self.readable().await?;
            match self.try_recv(buf, most) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }

    /// Waits until there is something to receive, or the other side has ended.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn readable(&self) -> io::Result<()> {
        self.0.readable().await
    }

    /// Like [`UnixSocket::recv`], without waiting.
    ///
    /// # Errors
    /// The same, and `WouldBlock` when nothing is there.
    pub fn try_recv(&self, buf: &mut Vec<u8>, most: usize) -> io::Result<(usize, Vec<OwnedFd>)> {
        receive(self.0.fd(), buf, self.0.at_once(most), 0)
    }

    /// Sends all of `bytes`, and with the first of them the descriptors. Waits while the socket is
    /// full.
    ///
    /// # Errors
    /// `TimedOut` when the other side takes nothing for ten seconds; others as the system gives
    /// them.
    pub async fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let (mut sent, mut looks) = (0, 0);
        while sent < bytes.len() {
            let fds = if sent == 0 { fds } else { &[] };
            match self.try_send(&bytes[sent..], fds) {
                Ok(n) => {
                    sent += n;
                    if sent < bytes.len() && self.0.inner().core().is_simulated() {
                        self.0.inner().core().sleep_ns(CUT_NS).await;
                    }
                }
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(_) if looks == ROOM_LOOKS => return Err(io::ErrorKind::TimedOut.into()),
                Err(_) => {
                    looks += 1;
                    self.0.inner().core().sleep_ns(ROOM_NS).await;
                }
            }
        }
        Ok(())
    }

    /// Sends as many of `bytes` as the socket has room for, at least one, and with the first of
    /// them the descriptors. Returns their number.
    ///
    /// # Errors
    /// `WouldBlock` when there is no room; others as the system gives them.
    pub fn try_send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        send(self.0.fd(), &bytes[..self.0.at_once(bytes.len())], fds)
    }

    /// The id of the process on the other side, as of its connect.
    ///
    /// # Errors
    /// As the system gives them.
    pub fn peer_pid(&self) -> io::Result<u32> {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        let fd = self.0.fd().as_raw_fd();
        let (to, level) = ((&raw mut peer).cast(), libc::SOL_SOCKET);
        // SAFETY: both pointers are to live variables, `len` tells the room.
        let done = unsafe { libc::getsockopt(fd, level, libc::SO_PEERCRED, to, &raw mut len) };
        outcome(done as isize)?;
        Ok(peer.pid as u32)
    }
}

impl AsFd for UnixSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
}

/// One end of a connection that carries whole packets with descriptors, between two processes of
/// ours: a packet is there with all its bytes and descriptors, or it is not there. Clones are the
/// same end. A simulated world cuts no packets.
#[derive(Clone)]
pub struct UnixPackets(Rc<Watch>);

/// A packet, and the descriptors that came with it.
pub type Packet = (Vec<u8>, Vec<OwnedFd>);

impl UnixPackets {
    /// Creates both ends of a connection.
    ///
    /// # Errors
    /// As the system gives them.
    pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
        let mut fds = [0; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        // SAFETY: a live array of two numbers.
        let done = unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) };
        outcome(done as isize)?;
        // SAFETY: new descriptors that nobody else owns.
        Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
    }

    /// Whether a descriptor is an end of such a connection.
    pub fn is_one(fd: BorrowedFd<'_>) -> bool {
        let is = |name, value| socket_option(fd, name).is_ok_and(|found| found == value);
        is(libc::SO_DOMAIN, libc::AF_UNIX) && is(libc::SO_TYPE, libc::SOCK_SEQPACKET)
    }

    /// Takes an end.
    ///
    /// # Errors
    /// `InvalidInput` when it is another kind of descriptor.
    pub fn from_fd(core: &Core, fd: OwnedFd) -> io::Result<UnixPackets> {
        if !UnixPackets::is_one(fd.as_fd()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a Unix packet socket"));
        }
        Ok(UnixPackets(Rc::new(Watch::new(core, fd))))
    }

    /// Waits for the next packet, of at most `most` bytes. An empty one: the other side has ended.
    ///
    /// # Errors
    /// `InvalidData` when a packet is longer, or more than [`FDS_MAX`] descriptors came; others as
    /// the system gives them.
    pub async fn recv(&self, most: usize) -> io::Result<Packet> {
        loop {
            self.0.readable().await?;
            match self.try_recv(most) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }

    /// Like [`UnixPackets::recv`], without waiting.
    ///
    /// # Errors
    /// The same, and `WouldBlock` when there is no packet.
    pub fn try_recv(&self, most: usize) -> io::Result<Packet> {
        let mut bytes = Vec::new();
        loop {
            // One byte more shows a longer packet.
            match receive(self.0.fd(), &mut bytes, most + 1, 0) {
                // The other side has ended and left packets of ours unread: its own come first.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
                Ok((length, _)) if length > most => {
                    let what = format!("a packet of more than {most} bytes");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
                done => return done.map(|(_, fds)| (bytes, fds)),
            }
        }
    }

    /// Copies of all packets that wait, of at most `most` bytes each; they stay.
    ///
    /// # Errors
    /// As for [`UnixPackets::recv`].
    pub fn peek_all(&self, most: usize) -> io::Result<Vec<Packet>> {
        // Each peek goes on where the one before has ended.
        let (from, len) = (0_i32, size_of::<i32>() as libc::socklen_t);
        let (fd, at) = (self.0.fd().as_raw_fd(), (&raw const from).cast());
        // SAFETY: passes a pointer to a live value and its size.
        let set = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF, at, len) };
        outcome(set as isize)?;
        let mut packets = Vec::new();
        loop {
            let mut bytes = Vec::new();
            match receive(self.0.fd(), &mut bytes, most, libc::MSG_PEEK) {
                // The end.
                Ok((0, _)) => return Ok(packets),
                Ok((_, fds)) => packets.push((bytes, fds)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(packets),
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends a packet, whole or not at all.
    ///
    /// # Errors
    /// `WouldBlock` when there is no room; others as the system gives them.
    pub fn try_send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        send(self.0.fd(), bytes, fds).map(drop)
    }

    /// Sends nothing more: the other side receives what was sent, and then the end.
    pub fn end(&self) {
        // SAFETY: takes no pointers.
        unsafe { libc::shutdown(self.0.fd().as_raw_fd(), libc::SHUT_WR) };
    }
}

impl AsFd for UnixPackets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
}

/// Which of these are readable, have failed, or have lost their other side.
pub(crate) fn are_readable(fds: &[RawFd]) -> Vec<bool> {
    let ask = |&fd: &RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut all: Vec<_> = fds.iter().map(ask).collect();
    // SAFETY: the given number of pollfds, which live until the call returns.
    unsafe { libc::poll(all.as_mut_ptr(), all.len() as libc::nfds_t, 0) };
    all.iter().map(|one| one.revents != 0).collect()
}

fn socket() -> io::Result<OwnedFd> {
    // SAFETY: takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    outcome(fd as isize)?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    let bytes = path.as_os_str().as_bytes();
    // The last byte stays 0 and ends the name.
    if bytes.is_empty() || bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        let most = address.sun_path.len() - 1;
        let what = format!("the name of a socket has from 1 to {most} bytes: {}", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok((address, size_of::<libc::sockaddr_un>() as libc::socklen_t))
}

/// Whether there is a listener, possibly with a full queue.
fn connects(fd: &OwnedFd, address: &libc::sockaddr_un, len: libc::socklen_t) -> bool {
    let address = std::ptr::from_ref(address).cast();
    // SAFETY: a live, initialised `sockaddr_un` of at least `len` bytes.
    let done = unsafe { libc::connect(fd.as_raw_fd(), address, len) };
    done == 0 || io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
}

/// Whether the name belongs to a file that is not a socket.
fn exists_otherwise(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    path.symlink_metadata().is_ok_and(|found| !found.file_type().is_socket())
}

#[expect(clippy::disallowed_methods, reason = "the name of a socket, before it is made")]
fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Reads a numeric option of a socket. Fails on any other descriptor; never blocks.
pub(crate) fn socket_option(fd: BorrowedFd<'_>, name: i32) -> io::Result<i32> {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    let to = (&raw mut value).cast();
    // SAFETY: both pointers are to live variables, `len` tells the room.
    let done =
        unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, to, &raw mut len) };
    outcome(done as isize).map(|_| value)
}

fn set_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    // SAFETY: takes no pointers.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    outcome(flags as isize)?;
    // SAFETY: takes no pointers.
    let done = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
    outcome(done as isize).map(drop)
}

/// Room for the control message of [`FDS_MAX`] descriptors, aligned as its header asks.
#[repr(C)]
struct Control {
    _align: [libc::cmsghdr; 0],
    bytes: [u8; CONTROL_BYTES],
}

// SAFETY: computes a size from numbers only.
const CONTROL_BYTES: usize =
    unsafe { libc::CMSG_SPACE((FDS_MAX * size_of::<libc::c_int>()) as u32) } as usize;

fn receive(
    fd: BorrowedFd<'_>,
    buf: &mut Vec<u8>,
    most: usize,
    flags: i32,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    buf.reserve(most);
    let spare = buf.spare_capacity_mut();
    let mut iov = libc::iovec { iov_base: spare.as_mut_ptr().cast(), iov_len: most };
    let mut control = Control { _align: [], bytes: [0; CONTROL_BYTES] };
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut iov;
    header.msg_iovlen = 1;
    header.msg_control = control.bytes.as_mut_ptr().cast();
    header.msg_controllen = CONTROL_BYTES;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC | flags;
    // SAFETY: the header points to `iov`, which points to `most` bytes of reserved room, and to
    // `control` with its size; all live until the call returns.
    let received = outcome(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, flags) })?;
    // SAFETY: the kernel wrote `received <= most` bytes after `buf.len()`, inside the capacity.
    unsafe { buf.set_len(buf.len() + received) };
    let fds = descriptors(&header);
    if header.msg_flags & libc::MSG_CTRUNC != 0 {
        if fds.len() < FDS_MAX {
            // There was room in the control message: the process is at its limit.
            return Err(io::Error::other(
                "cannot receive the descriptors of a message: too many open files: raise \
                 `ulimit -n` (LimitNOFILE)",
            ));
        }
        let what = format!("more than {FDS_MAX} descriptors with one message");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok((received, fds))
}

/// The descriptors that a received header's control messages brought.
fn descriptors(header: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: `header` is as `recvmsg` left it: control points to `msg_controllen` live bytes.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !message.is_null() {
        // SAFETY: not null, so it points to a whole header inside the control bytes.
        let cmsg = unsafe { message.read_unaligned() };
        if cmsg.cmsg_level == libc::SOL_SOCKET && cmsg.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: computes from numbers only.
            let head = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = (cmsg.cmsg_len as usize - head) / size_of::<libc::c_int>();
            // SAFETY: points to the data after the header that `message` points to.
            let first = unsafe { libc::CMSG_DATA(message) }.cast::<libc::c_int>();
            for at in 0..count {
                // SAFETY: `at` is below the number of descriptors that the kernel wrote there.
                let number = unsafe { first.add(at).read_unaligned() };
                // SAFETY: the kernel made it for this message, so it has no other owner.
                fds.push(unsafe { OwnedFd::from_raw_fd(number) });
            }
        }
        // SAFETY: `header` and `message` are those of above.
        message = unsafe { libc::CMSG_NXTHDR(header, message) };
    }
    fds
}

fn send(fd: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if fds.len() > FDS_MAX {
        let what = format!("{} descriptors with one message: at most {FDS_MAX}", fds.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control { _align: [], bytes: [0; CONTROL_BYTES] };
    // SAFETY: a plain C struct for which all zeroes is a valid value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut iov;
    header.msg_iovlen = 1;
    if !fds.is_empty() {
        let data = (fds.len() * size_of::<libc::c_int>()) as u32;
        header.msg_control = control.bytes.as_mut_ptr().cast();
        // SAFETY: computes from numbers only.
        header.msg_controllen = unsafe { libc::CMSG_SPACE(data) } as usize;
        // SAFETY: control points to `msg_controllen` live bytes, aligned for a header, and has room
        // for one and `data` bytes after it.
        unsafe {
            let message = libc::CMSG_FIRSTHDR(&raw const header);
            (*message).cmsg_level = libc::SOL_SOCKET;
            (*message).cmsg_type = libc::SCM_RIGHTS;
            (*message).cmsg_len = libc::CMSG_LEN(data) as usize;
            let first = libc::CMSG_DATA(message).cast::<libc::c_int>();
            for (at, fd) in fds.iter().enumerate() {
                first.add(at).write_unaligned(fd.as_raw_fd());
            }
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the header points to `iov`, which points to the live `bytes`, and to `control`.
    outcome(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const header, flags) })
}
