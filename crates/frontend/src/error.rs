//! What can go wrong between a guest and its target.

use std::{fmt, io};

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What a caller would act upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The system refused something on this side.
    System,
    /// The connection is closed.
    Closed,
    /// Nothing came in time.
    Timeout,
    /// The target refused a message or lacks a feature.
    Refused,
    /// The target's answer is not what the protocol says.
    Protocol,
    /// The target wrote into a ring what it must not.
    Ring,
}

/// A failure, with what was being done.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    text: String,
    source: Option<io::Error>,
}

impl Error {
    /// A failure that no call of the system is behind.
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

    /// The last call of the system failed.
    pub(crate) fn last(text: impl Into<String>) -> Error {
        Error::system(text, io::Error::last_os_error())
    }

    /// What a caller would act upon.
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
