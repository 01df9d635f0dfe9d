//! Messages with descriptors on a Unix stream socket: kind, length of the body, how many
//! descriptors, the body. What arrives is bounded before it is taken.

use std::os::fd::{AsFd, OwnedFd};

use reactor::{Core, FDS_MAX, UnixSocket};

/// Kind, length of the body, descriptors.
const HEADER_BYTES: usize = 12;
/// What is reserved for a body before any of it has come.
const RESERVE_BYTES: usize = 64 << 10;

/// A message.
#[derive(Debug)]
pub(crate) struct Frame {
    pub kind: u32,
    pub body: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
}

/// What a side takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub body_bytes: usize,
    pub descriptors: usize,
}

/// One end.
pub(crate) struct Frames {
    socket: UnixSocket,
    limits: Limits,
}

impl Frames {
    /// On a connected socket.
    pub fn from_fd(core: &Core, fd: OwnedFd, limits: Limits) -> std::io::Result<Frames> {
        Ok(Frames { socket: UnixSocket::from_fd(core, fd)?, limits })
    }

    /// Sends a message. It is in the other's socket as a whole or, after an error, perhaps in part;
    /// one without a body is in it or not. Suspends while the socket is full; one at a time.
    pub async fn send(
        &self,
        kind: u32,
        body: &[u8],
        descriptors: &[OwnedFd],
    ) -> Result<(), String> {
        let failed = |error| format!("sending to the other process: {error}");
        let bytes = encode(kind, body, descriptors.len());
        let all: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        // Descriptors go with a byte; where there are more than one call takes, with the next byte.
        let mut chunks = all.chunks(FDS_MAX).peekable();
        let (mut rest, mut chunk) = (&bytes[..], chunks.next().unwrap_or_default());
        while chunks.peek().is_some() {
            let (byte, behind) = rest.split_at(1);
            self.socket.send(byte, chunk).await.map_err(failed)?;
            (rest, chunk) = (behind, chunks.next().unwrap_or_default());
        }
        self.socket.send(rest, chunk).await.map_err(failed)
    }

    /// The next message. Suspends until it is there.
    ///
    /// # Errors
    /// When the other has gone, or sends what is beyond the limits.
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
                Err(error) => return Err(format!("receiving from the other process: {error}")),
            }
        }
    }
}

/// The bytes of a message.
pub(crate) fn encode(kind: u32, body: &[u8], descriptors: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    for number in [kind, body.len() as u32, descriptors as u32] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.extend_from_slice(body);
    bytes
}

/// A message of which not all has come.
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

    /// How many bytes may come now, at most; 0 when there is nothing more to come.
    ///
    /// # Errors
    /// When it is beyond the limits.
    pub fn wanted(&self) -> Result<usize, String> {
        if self.descriptors.len() > self.limits.descriptors {
            return Err("it sends too many descriptors".to_owned());
        }
        let Some([_, length, descriptors]) = self.numbers() else {
            return Ok(HEADER_BYTES - self.header.len());
        };
        if length as usize > self.limits.body_bytes
            || descriptors as usize > self.limits.descriptors
        {
            return Err("it says something too long".to_owned());
        }
        Ok((length as usize - self.body.len()).min(RESERVE_BYTES))
    }

    /// Where these bytes belong, at its end.
    pub fn part(&mut self) -> &mut Vec<u8> {
        if self.header.len() < HEADER_BYTES { &mut self.header } else { &mut self.body }
    }

    /// The message, when there is nothing more to come.
    ///
    /// # Errors
    /// When other descriptors came with it than it says.
    pub fn finish(self) -> Result<Frame, String> {
        let [kind, _, expected] = self.numbers().ok_or("a message was cut short")?;
        let Arriving { body, descriptors, .. } = self;
        let found = descriptors.len();
        if found != expected as usize {
            return Err(format!("{found} descriptors came with a message of {expected}"));
        }
        Ok(Frame { kind, body, descriptors })
    }

    /// Kind, length of the body, descriptors: once the header has come.
    fn numbers(&self) -> Option<[u32; 3]> {
        let bytes: &[u8; HEADER_BYTES] = self.header.first_chunk()?;
        let number = |nth: usize| bytes[4 * nth..].first_chunk().copied().map(u32::from_le_bytes);
        Some([number(0)?, number(1)?, number(2)?])
    }
}
