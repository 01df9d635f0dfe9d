//! Replies for a front end that may not read them. Only the front end's own next message waits for
//! them: meanwhile the disk can be quiesced or stopped, and unsent replies are handed over to
//! another process.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use reactor::{Core, UnixSocket};

/// Interval of attempts to send to a full socket, in nanoseconds: the reactor announces only
/// readable sockets.
const RETRY_NS: u64 = 1_000_000;
/// Failed attempts before the front end is disconnected: ten seconds.
const ATTEMPTS_MAX: u32 = 10_000;

/// The messages to send, in order.
#[derive(Default)]
pub(crate) struct Unsent {
    messages: VecDeque<Message>,
    /// Failed attempts since a byte was sent.
    attempts: u32,
}

/// The rest of a message, and a descriptor that goes with its first byte.
struct Message {
    bytes: Vec<u8>,
    fd: Option<OwnedFd>,
}

impl Unsent {
    /// Adds a message. An empty one is ignored.
    pub fn push(&mut self, bytes: Vec<u8>, fd: Option<OwnedFd>) {
        if !bytes.is_empty() {
            self.messages.push_back(Message { bytes, fd });
        }
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Sends as much as the socket has room for.
    ///
    /// # Errors
    /// If the front end has closed the connection.
    pub fn send(&mut self, socket: &UnixSocket) -> io::Result<()> {
        while let Some(Message { bytes, fd }) = self.messages.front_mut() {
            let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
            let sent = match socket.try_send(bytes, &fds) {
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            *fd = None;
            self.attempts = 0;
            bytes.drain(..sent);
            if bytes.is_empty() {
                self.messages.pop_front();
            }
        }
        Ok(())
    }

    /// Suspends until everything is sent. If the future is dropped earlier, the rest stays here.
    ///
    /// # Errors
    /// If the front end has closed the connection, or takes nothing for ten seconds.
    pub async fn all_sent(&mut self, core: &Core, socket: &UnixSocket) -> io::Result<()> {
        loop {
            self.send(socket)?;
            if self.messages.is_empty() {
                return Ok(());
            }
            if self.attempts == ATTEMPTS_MAX {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the front end reads no replies",
                ));
            }
            self.attempts += 1;
            core.sleep_ns(RETRY_NS).await;
        }
    }

    /// Returns all bytes, and the descriptor that goes with the first of them; `None` if a later
    /// message has a descriptor.
    pub fn parts(&self) -> Option<(Vec<u8>, Option<&OwnedFd>)> {
        let fd = self.messages.front().and_then(|first| first.fd.as_ref());
        let alone = self.messages.iter().skip(1).all(|later| later.fd.is_none());
        let bytes = self.messages.iter().flat_map(|message| &message.bytes).copied();
        alone.then(|| (bytes.collect(), fd))
    }
}
