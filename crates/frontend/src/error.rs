//! Errors between a guest and its target.

use std::{fmt, io};

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The class of an error, as far as callers distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The system refused a request of this side.
    System,
    /// The connection is closed.
    Closed,
    /// A timeout.
    Timeout,
    /// The target refused a message or lacks a feature.
    Refused,
    /// The target's reply violates the protocol.
    Protocol,
    /// The target wrote invalid data into a ring.
    Ring,
}

/// An error with the operation that failed.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    text: String,
    source: Option<io::Error>,
}

impl Error {
    /// An error without a system call.
    pub fn new(kind: Kind, text: impl Into<String>) -> Error {
        Error { kind, text: text.into(), source: None }
    }

    /// A failed call of the system.
    pub fn system(text: impl Into<String>, source: io::Error) -> Error {
        let kind = match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Kind::Timeout,
            io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::UnexpectedEof => Kind::Closed,
            _ => Kind::System,
        };
        Error { kind, text: text.into(), source: Some(source) }
    }

    /// The last system call failed.
    pub(crate) fn last(text: impl Into<String>) -> Error {
        Error::system(text, io::Error::last_os_error())
    }

    /// The class of the error.
    pub fn kind(&self) -> Kind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}
