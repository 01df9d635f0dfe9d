//! The errors of this crate: what failed, and what to do about it.

use std::fmt;

/// The kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A flag or the configuration file asks for something invalid.
    Usage,
    /// The directory holds no RocksDB database.
    NoDatabase,
    /// Another process has the database open for writing.
    Locked,
    /// A file is damaged.
    Damaged,
    /// The database uses a feature that this version does not have.
    Unsupported,
    /// Another process listens on the port.
    PortInUse,
    /// Any other failure of the system.
    System,
}

/// A failure, with advice.
#[derive(Clone, Debug)]
pub struct Error {
    kind: Kind,
    what: String,
    hint: Option<String>,
}

impl Error {
    /// A failure; `what` is one lower-case line.
    pub fn new(kind: Kind, what: impl Into<String>) -> Error {
        Error { kind, what: what.into(), hint: None }
    }

    /// Adds what the user can do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.hint = Some(hint.into());
        self
    }

    /// The kind of the failure.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The advice, if any.
    pub fn advice(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Error {}
