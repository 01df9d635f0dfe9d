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
        let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
        for number in [kind, body.len() as u32, descriptors.len() as u32] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(body);
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
        let (mut bytes, mut descriptors) = (Vec::new(), Vec::new());
        self.fill(&mut bytes, HEADER_BYTES, &mut descriptors).await?;
        let number = |at: usize| {
            let bytes: Option<[u8; 4]> = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
            bytes.map_or(u32::MAX, u32::from_le_bytes)
        };
        let (kind, length, expected) = (number(0), number(4) as usize, number(8) as usize);
        if length > self.limits.body_bytes || expected > self.limits.descriptors {
            return Err("it says something too long".to_owned());
        }
        let mut body = Vec::new();
        self.fill(&mut body, length, &mut descriptors).await?;
        let found = descriptors.len();
        if found != expected {
            return Err(format!("{found} descriptors came with a message of {expected}"));
        }
        Ok(Frame { kind, body, descriptors })
    }

    async fn fill(
        &self,
        bytes: &mut Vec<u8>,
        length: usize,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<(), String> {
        while bytes.len() < length {
            let most = (length - bytes.len()).min(RESERVE_BYTES);
            match self.socket.recv(bytes, most).await {
                Ok((0, _)) => return Err("the other process has gone".to_owned()),
                Ok((_, fds)) => descriptors.extend(fds),
                Err(error) => return Err(format!("receiving from the other process: {error}")),
            }
            if descriptors.len() > self.limits.descriptors {
                return Err("it sends too many descriptors".to_owned());
            }
        }
        Ok(())
    }
}
