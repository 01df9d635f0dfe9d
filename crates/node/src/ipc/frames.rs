//! Messages with descriptors on a Unix stream socket: kind, length of the body, number of
//! descriptors, the body. Incoming messages are checked against limits before memory is allocated.

use std::os::fd::{AsFd, OwnedFd};

use reactor::{Core, FDS_MAX, UnixSocket};

/// Kind, length of the body, number of descriptors.
const HEADER_BYTES: usize = 12;
/// Memory reserved for a body before any of it has arrived.
const RESERVE_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Frame {
    pub kind: u32,
    pub body: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
}

/// The limits of received messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub body_bytes: usize,
    pub descriptors: usize,
}

/// One end of the socket.
pub(crate) struct Frames {
    socket: UnixSocket,
    limits: Limits,
}

impl Frames {
    /// Creates an end on a connected socket.
    pub fn from_fd(core: &Core, fd: OwnedFd, limits: Limits) -> std::io::Result<Frames> {
        Ok(Frames { socket: UnixSocket::from_fd(core, fd)?, limits })
    }

    /// Sends a message. After an error a part of it may have been sent; a message without a body is
    /// sent whole or not at all. Suspends while the socket is full. Only one caller at a time.
    pub async fn send(
        &self,
        kind: u32,
        body: &[u8],
        descriptors: &[OwnedFd],
    ) -> Result<(), String> {
        let failed = |error| format!("cannot send to the other process: {error}");
        let bytes = encode(kind, body, descriptors.len());
        let all: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        // Descriptors go with a byte. If there are more than one call takes, the next ones go with
        // the next byte.
        let mut chunks = all.chunks(FDS_MAX).peekable();
        let (mut rest, mut chunk) = (&bytes[..], chunks.next().unwrap_or_default());
        while chunks.peek().is_some() {
            let (byte, behind) = rest.split_at(1);
            self.socket.send(byte, chunk).await.map_err(failed)?;
            (rest, chunk) = (behind, chunks.next().unwrap_or_default());
        }
        self.socket.send(rest, chunk).await.map_err(failed)
    }

    /// Receives the next message. Suspends until it is complete.
    ///
    /// # Errors
    /// When the other side has gone, or exceeds the limits.
    pub async fn receive(&self) -> Result<Frame, String> {
        let mut arriving = Arriving::new(self.limits);
        loop {
            let most = arriving.wanted()?;
            if most == 0 {
                return arriving.finish();
            }
            match self.socket.recv(arriving.part(), most).await {
                Ok((0, _)) => return Err("the other process has gone".to_owned()),
                Ok((_, fds)) => arriving.descriptors.extend(fds),
                Err(error) => {
                    return Err(format!("cannot receive from the other process: {error}"));
                }
            }
        }
    }
}

/// Encodes the header and the body of a message.
pub(crate) fn encode(kind: u32, body: &[u8], descriptors: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    for number in [kind, body.len() as u32, descriptors as u32] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.extend_from_slice(body);
    bytes
}

/// A message that has arrived in part.
pub(crate) struct Arriving {
    limits: Limits,
    header: Vec<u8>,
    body: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
}

impl Arriving {
    pub fn new(limits: Limits) -> Arriving {
        Arriving { limits, header: Vec::new(), body: Vec::new(), descriptors: Vec::new() }
    }

    /// The maximum number of bytes to receive next; 0 when the message is complete.
    ///
    /// # Errors
    /// When the message exceeds the limits.
    pub fn wanted(&self) -> Result<usize, String> {
        if self.descriptors.len() > self.limits.descriptors {
            return Err("the other process sends too many descriptors".to_owned());
        }
        let Some([_, length, descriptors]) = self.numbers() else {
            return Ok(HEADER_BYTES - self.header.len());
        };
        if length as usize > self.limits.body_bytes
            || descriptors as usize > self.limits.descriptors
        {
            return Err("the other process sends a message beyond the limits".to_owned());
        }
        Ok((length as usize - self.body.len()).min(RESERVE_BYTES))
    }

    /// The buffer to which the next bytes are appended.
    pub fn part(&mut self) -> &mut Vec<u8> {
        if self.header.len() < HEADER_BYTES { &mut self.header } else { &mut self.body }
    }

    /// The message, when it is complete.
    ///
    /// # Errors
    /// When the number of descriptors differs from the header.
    pub fn finish(self) -> Result<Frame, String> {
        let [kind, _, expected] = self.numbers().ok_or("a message is incomplete")?;
        let Arriving { body, descriptors, .. } = self;
        let found = descriptors.len();
        if found != expected as usize {
            return Err(format!("{found} descriptors came with a message that has {expected}"));
        }
        Ok(Frame { kind, body, descriptors })
    }

    /// Kind, length of the body, number of descriptors; `None` before the header has arrived.
    fn numbers(&self) -> Option<[u32; 3]> {
        let bytes: &[u8; HEADER_BYTES] = self.header.first_chunk()?;
        let number = |nth: usize| bytes[4 * nth..].first_chunk().copied().map(u32::from_le_bytes);
        Some([number(0)?, number(1)?, number(2)?])
    }
}
