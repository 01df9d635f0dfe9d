//! A connection to a target: messages and their descriptors.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::event::readable;
use crate::message::flags;
use crate::{Error, Kind, Result};

/// Bytes of a message's header.
const HEADER: usize = 12;
/// Longest body that is received.
const BODY_MAX: usize = 4096;
/// Most descriptors that are received with a message; further ones would be lost.
const DESCRIPTORS_MAX: usize = 32;

/// A received message.
#[derive(Debug)]
pub struct Message {
    /// The number of the request or of the answered request.
    pub request: u32,
    /// The flags, including the version.
    pub flags: u32,
    /// The bytes after the header.
    pub body: Vec<u8>,
    /// The descriptors that came with it.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// Reads a little-endian number from the body.
    ///
    /// # Errors
    /// If the body is too short.
    pub fn u64_at(&self, at: usize) -> Result<u64> {
        let bytes = self.body.get(at..at + 8).ok_or_else(|| self.too_short())?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
    }

    /// Reads a little-endian number from the body.
    ///
    /// # Errors
    /// If the body is too short.
    pub fn u32_at(&self, at: usize) -> Result<u32> {
        let bytes = self.body.get(at..at + 4).ok_or_else(|| self.too_short())?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
    }

    fn too_short(&self) -> Error {
        let (request, bytes) = (self.request, self.body.len());
        Error::new(Kind::Protocol, format!("message {request}: a body of {bytes} bytes"))
    }
}

/// A stream socket that carries vhost-user messages.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
}

impl Connection {
    /// Connects to a target's socket.
    ///
    /// # Errors
    /// If no target listens there.
    pub fn connect(path: &Path) -> Result<Connection> {
        let stream = UnixStream::connect(path)
            .map_err(|e| Error::system(format!("connecting to {}", path.display()), e))?;
        Ok(Connection { stream })
    }

    /// Uses an open socket.
    pub fn new(stream: UnixStream) -> Connection {
        Connection { stream }
    }

    /// Sets the timeout for messages; `None` waits forever.
    pub fn set_timeout(&self, timeout: Option<Duration>) {
        self.stream.set_read_timeout(timeout).expect("the timeout is not 0");
    }

    /// Whether the target has closed its end or sent something.
    pub fn is_readable(&self) -> bool {
        readable(self.stream.as_fd(), Duration::ZERO)
    }

    /// The target's process ID.
    pub fn peer_pid(&self) -> Option<i32> {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: `peer` and `bytes` live on this stack, and `bytes` is the size of `peer`.
        let result = unsafe {
            libc::getsockopt(
                self.stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut peer).cast(),
                &raw mut bytes,
            )
        };
        (result == 0 && peer.pid > 0).then_some(peer.pid)
    }

    /// Sends one message. The version is added to `request_flags`.
    ///
    /// # Errors
    /// If the connection is closed.
    pub fn send(
        &self,
        request: u32,
        request_flags: u32,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<()> {
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend(request.to_le_bytes());
        bytes.extend((flags::VERSION | request_flags).to_le_bytes());
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(body);
        self.send_bytes(&bytes, fds)
    }

    /// Sends raw bytes, whether or not they are a message. The descriptors go with the first byte.
    ///
    /// # Errors
    /// If the connection is closed.
    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut sent = 0;
        while sent < bytes.len() {
            let fds = if sent == 0 { fds } else { &[] };
            match send_once(self.stream.as_fd(), &bytes[sent..], fds) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::system("sending to the target", e)),
            }
        }
        Ok(())
    }

    /// Waits for one message.
    ///
    /// # Errors
    /// If the connection is closed, after the timeout, or if the bytes are not a message.
    pub fn receive(&self) -> Result<Message> {
        let mut header = [0; HEADER];
        let mut fds = Vec::new();
        let mut got = 0;
        while got < HEADER {
            match receive_once(self.stream.as_fd(), &mut header[got..], &mut fds) {
                Ok(0) => return Err(Error::new(Kind::Closed, "the target closed the connection")),
                Ok(n) => got += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::system("waiting for the target", e)),
            }
        }
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
        let (request, message_flags, size) = (word(0), word(4), word(8) as usize);
        if message_flags & flags::VERSION_MASK != flags::VERSION || size > BODY_MAX {
            let text =
                format!("not a message: request {request}, flags {message_flags:#x}, {size} bytes");
            return Err(Error::new(Kind::Protocol, text));
        }
        let mut body = vec![0; size];
        (&self.stream)
            .read_exact(&mut body)
            .map_err(|e| Error::system("waiting for the rest of a message", e))?;
        Ok(Message { request, flags: message_flags, body, fds })
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// A control buffer for the descriptors of one message, aligned as the system's macros require.
#[repr(C, align(8))]
struct Control([u8; 256]);

fn control_len(descriptors: usize) -> usize {
    // SAFETY: the call only computes a size.
    unsafe { libc::CMSG_SPACE((descriptors * size_of::<i32>()) as u32) as usize }
}

fn send_once(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    assert!(fds.len() <= DESCRIPTORS_MAX, "more descriptors than a message takes");
    let mut control = Control([0; 256]);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: all-zero bytes are a valid, empty msghdr.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    if !fds.is_empty() {
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = control_len(fds.len());
        // SAFETY: `control` is aligned for a cmsghdr. `DESCRIPTORS_MAX` descriptors need 144 of its
        // 256 bytes, so the first header and its data are within it.
        unsafe {
            let message = libc::CMSG_FIRSTHDR(&raw const header);
            (*message).cmsg_level = libc::SOL_SOCKET;
            (*message).cmsg_type = libc::SCM_RIGHTS;
            (*message).cmsg_len = libc::CMSG_LEN(size_of_val(fds) as u32) as _;
            let data: *mut i32 = libc::CMSG_DATA(message).cast();
            for (nth, fd) in fds.iter().enumerate() {
                data.add(nth).write_unaligned(fd.as_raw_fd());
            }
        }
    }
    // SAFETY: `header` points to `part` and `control`, and `part` to `bytes`; all outlive the call,
    // which only reads them.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
}

fn receive_once(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut control = Control([0; 256]);
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: all-zero bytes are a valid, empty msghdr.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = (&raw mut control).cast();
    header.msg_controllen = control_len(DESCRIPTORS_MAX);
    // SAFETY: `header` points to `part` and `control`, and `part` to `bytes`; all outlive the call
    // and are mutably borrowed or local.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel filled `control` up to `msg_controllen` with valid headers, and each
    // descriptor in SCM_RIGHTS is new and owned by this process only.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(&raw const header);
        while !message.is_null() {
            if (*message).cmsg_level == libc::SOL_SOCKET && (*message).cmsg_type == libc::SCM_RIGHTS
            {
                let bytes = (*message).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data: *const i32 = libc::CMSG_DATA(message).cast();
                for nth in 0..bytes / size_of::<i32>() {
                    fds.push(OwnedFd::from_raw_fd(data.add(nth).read_unaligned()));
                }
            }
            message = libc::CMSG_NXTHDR(&raw const header, message);
        }
    }
    Ok(got as usize)
}
