//! The input of a connection: received bytes from which commands are taken.

use std::io;

use reactor::Socket;
use resp::{Limits, Parser};

/// Bytes of one receive.
pub(super) const RECEIVE_BYTES: usize = 16 * 1024;

/// Bytes of one receive of a long argument.
const RECEIVE_LONG_BYTES: usize = 1024 * 1024;

/// Received bytes that were not taken yet.
pub(super) struct Input {
    pub buffer: Vec<u8>,
    pub consumed: usize,
    pub parser: Parser,
    /// Bytes that the command at the end still lacks; `None` when whole ones may be left.
    pub missing: Option<usize>,
    /// The client sends no more.
    pub ended: bool,
}

impl Input {
    pub fn new(limits: Limits) -> Self {
        Self {
            buffer: Vec::new(),
            consumed: 0,
            parser: Parser::new(limits),
            missing: Some(1),
            ended: false,
        }
    }

    /// Removes the bytes that have been taken.
    pub fn compact(&mut self) {
        if self.consumed == self.buffer.len() {
            self.buffer.clear();
            if self.buffer.capacity() > 4 * RECEIVE_BYTES {
                self.buffer = Vec::new();
            }
        } else if self.consumed > 0 {
            self.buffer.drain(..self.consumed);
            if self.buffer.capacity() > 4 * RECEIVE_BYTES && self.buffer.len() <= RECEIVE_BYTES {
                self.buffer.shrink_to_fit();
            }
        }
        self.consumed = 0;
        if self.buffer.is_empty() {
            self.missing = Some(1);
            if self.parser.heap_bytes() > RECEIVE_BYTES {
                self.parser.release();
            }
        }
    }

    /// Discards everything: nothing more is taken or received.
    pub fn discard(&mut self) {
        self.buffer = Vec::new();
        (self.consumed, self.missing) = (0, None);
    }

    /// How much to receive next, at least `least`. Of a long argument as much as has arrived
    /// already, so that announcing one takes no memory.
    pub fn wanted(&self, least: usize) -> usize {
        let most = self.buffer.len().clamp(least, RECEIVE_LONG_BYTES);
        self.missing.unwrap_or(1).clamp(least, most)
    }

    /// Whether no command of more than `small` bytes is arriving.
    pub fn is_small(&self, least: usize, small: usize) -> bool {
        let bytes =
            if self.missing.is_some() { self.room_wanted(least) } else { self.buffer.len() };
        bytes <= small
    }

    /// Bytes that it holds after the next receive.
    pub fn room_wanted(&self, least: usize) -> usize {
        self.buffer.len() + self.wanted(least)
    }

    /// Memory of received bytes that were not taken.
    pub fn room_bytes(&self) -> usize {
        match self.buffer.is_empty() {
            true => 0,
            false => self.buffer.capacity() + self.parser.heap_bytes(),
        }
    }
}

/// A receive to be started.
pub(super) struct Receive {
    pub buffer: Vec<u8>,
    pub most: usize,
    /// Wait without memory until something has arrived.
    pub idle: bool,
}

/// The result of a receive, and its buffer.
pub(super) type Received = (io::Result<usize>, Vec<u8>);

/// Receives into the buffer, after its content.
pub(super) async fn receive(socket: Socket, receive: Receive) -> Received {
    let Receive { buffer, most, idle } = receive;
    if idle && let Err(error) = socket.readable().await {
        return (Err(error), buffer);
    }
    socket.recv(buffer, most).await
}
