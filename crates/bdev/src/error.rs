//! The error of opening or resizing a device. Requests have a [`Status`](crate::Status) instead.

use std::io;

/// The kinds that a caller may act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The URI is wrong.
    BadUri,
    /// Another process uses the device.
    Busy,
    /// The device, or this system, does not support the request.
    Unsupported,
    /// The system refused.
    Io,
}

/// An error of opening or resizing a device.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    text: String,
    source: Option<io::Error>,
}

impl Error {
    /// An error of a kind, with its text.
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> Error {
        Error { kind, text: text.into(), source: None }
    }

    pub(crate) fn uri(text: impl Into<String>) -> Error {
        Error::new(ErrorKind::BadUri, text)
    }

    pub(crate) fn io(text: impl Into<String>, source: io::Error) -> Error {
        let kind = match source.kind() {
            io::ErrorKind::WouldBlock => {
                return Error::new(
                    ErrorKind::Busy,
                    format!("{}: in use by another process (locked)", text.into()),
                );
            }
            io::ErrorKind::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        Error { kind, text: text.into(), source: Some(source) }
    }

    /// The kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.source {
            Some(source) => write!(f, "{}: {source}", self.text),
            None => f.write_str(&self.text),
        }
    }
}

// The display text includes the source.
impl std::error::Error for Error {}
