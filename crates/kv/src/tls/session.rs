//! One connection: between the bytes of its socket and those of its commands.
//!
//! A session holds at most [`HELD_BYTES_MAX`] of what it has received: the beginning of a record,
//! and during the handshake of a message. A client that sends more than that without sending data
//! (empty records, changes of keys) is refused.

use std::fmt;
use std::io::{IoSlice, Read, Write};

use rustls::ServerConnection;

use crate::tls::config::Tls;

/// Maximum of received bytes that have not become data.
pub(crate) const HELD_BYTES_MAX: usize = 32 * 1024;

/// The state of a TLS connection.
pub(crate) struct Session {
    connection: ServerConnection,
    /// An upper bound of the received bytes that the connection holds.
    held_bytes: usize,
    ended: bool,
}

/// Why a session cannot go on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fault {
    Tls(rustls::Error),
    /// The client does not speak TLS.
    Plain,
    TooLong,
    /// The core's TLS connections hold too much.
    NoMemory,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Tls(error) => error.fmt(f),
            Fault::Plain => f.write_str("the client does not speak TLS"),
            Fault::NoMemory => f.write_str("the memory for TLS connections is used up"),
            Fault::TooLong => write!(f, "more than {HELD_BYTES_MAX} bytes without data"),
        }
    }
}

impl From<rustls::Error> for Fault {
    fn from(error: rustls::Error) -> Fault {
        Fault::Tls(error)
    }
}

impl Session {
    /// A connection on which nothing has arrived.
    pub fn new(tls: &Tls) -> Result<Session, Fault> {
        let mut connection = ServerConnection::new(tls.config.clone())?;
        // The callers of `seal` bound what they pass.
        connection.set_buffer_limit(None);
        Ok(Session { connection, held_bytes: 0, ended: false })
    }

    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// An upper bound of the received bytes that it holds.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Whether the client has said that it sends nothing more.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Takes received bytes, and appends the data in them to `plain`. After an error there may be
    /// an alert to send: see [`Session::take_own`].
    pub fn open(&mut self, mut bytes: &[u8], plain: &mut Vec<u8>) -> Result<(), Fault> {
        while !bytes.is_empty() && !self.ended {
            let before = bytes.len();
            let is_first = self.held_bytes == 0 && self.connection.is_handshaking();
            // Reading from memory fails only where the connection takes nothing more.
            self.connection.read_tls(&mut bytes).map_err(|_| Fault::TooLong)?;
            let taken = before - bytes.len();
            let state = match self.connection.process_new_packets() {
                Ok(state) => state,
                Err(rustls::Error::InvalidMessage(_)) if is_first => {
                    return Err(Fault::Plain);
                }
                Err(error) => return Err(error.into()),
            };
            let data = state.plaintext_bytes_to_read();
            self.held_bytes += taken;
            if data > 0 {
                let from = plain.len();
                plain.resize(from + data, 0);
                let read = self.connection.reader().read_exact(&mut plain[from..]);
                debug_assert!(read.is_ok(), "there are as many bytes as it has said");
                // What remains began after a record that ended in these bytes.
                self.held_bytes = self.held_bytes.saturating_sub(data).min(taken);
            }
            self.ended = state.peer_has_closed();
            if self.held_bytes > HELD_BYTES_MAX {
                return Err(Fault::TooLong);
            }
        }
        Ok(())
    }

    /// Appends what is to be sent for these pieces, after what the connection itself has to send.
    pub fn seal(&mut self, pieces: &[IoSlice<'_>], into: &mut Vec<u8>) -> Result<(), Fault> {
        let wanted: usize = pieces.iter().map(|piece| piece.len()).sum();
        let written = self.connection.writer().write_vectored(pieces);
        debug_assert!(matches!(written, Ok(count) if count == wanted), "there is no limit");
        if !matches!(written, Ok(count) if count == wanted) {
            return Err(Fault::TooLong);
        }
        self.take_own(into);
        Ok(())
    }

    /// Appends what the connection itself has to send: its part of the handshake, alerts.
    pub fn take_own(&mut self, into: &mut Vec<u8>) {
        while self.connection.wants_write() {
            // Writing to memory does not fail.
            if !matches!(self.connection.write_tls(into), Ok(1..)) {
                return;
            }
        }
    }

    /// Says that nothing more will be sent.
    pub fn close(&mut self) {
        self.connection.send_close_notify();
    }
}
