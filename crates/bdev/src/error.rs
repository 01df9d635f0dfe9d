//! Why a device could not be opened or resized. Requests have a [`Status`](crate::Status) instead.

use std::io;

/// What a caller may act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The URI is wrong.
    BadUri,
    /// Somebody else uses the device.
    Busy,
    /// The device, or this system, cannot do what was asked for.
    Unsupported,
    /// The system refused.
    Io,
}

/// See the module text.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    text: String,
    source: Option<io::Error>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Error {
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
                    format!("{}: in use by somebody else (locked)", text.into()),
                );
            }
            io::ErrorKind::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        Error { kind, text: text.into(), source: Some(source) }
    }

    /// What a caller may act on.
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

// The text has its source in it.
impl std::error::Error for Error {}
