//! The crate's one error.

use std::fmt;

/// The result of an operation of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The kinds of errors that callers treat differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is no database in the directory, and [`Options::create`](crate::Options::create) is
    /// off.
    NoDatabase,
    /// The database is open already, in another process or in this one.
    Locked,
    /// Bytes on the disk contradict the format or their checksum; the text names file and offset.
    Corruption,
    /// The database or the call asks for something that this engine does not do; the text names it.
    Unsupported,
    /// The device or the system failed.
    Io,
    /// The disk is full, or cannot be written for now. Nothing was written; a later attempt may
    /// succeed.
    Full,
    /// The operation needs more memory than [`Options::memory`](crate::Options::memory) allows.
    Memory,
    /// A snapshot was held longer than an hour, or too many are held.
    Expired,
    /// A RocksDB older than 7.8 wrote the database last. It could not read what is written here;
    /// see [`Options::adopt`](crate::Options::adopt).
    Older,
    /// No column family has this name, or it was dropped.
    UnknownColumnFamily,
    /// An option is impossible; the text names it.
    InvalidOption,
    /// The database was closed, or belongs to the parent of this forked process.
    Closed,
    /// A thread of the database panicked. The database is closed; open it again.
    Panicked,
}

impl From<lsm::Kind> for ErrorKind {
    fn from(kind: lsm::Kind) -> ErrorKind {
        match kind {
            lsm::Kind::NoDatabase => ErrorKind::NoDatabase,
            lsm::Kind::Locked => ErrorKind::Locked,
            lsm::Kind::Corruption => ErrorKind::Corruption,
            lsm::Kind::Unsupported => ErrorKind::Unsupported,
            lsm::Kind::Io => ErrorKind::Io,
            lsm::Kind::Full => ErrorKind::Full,
            lsm::Kind::Memory => ErrorKind::Memory,
            lsm::Kind::Expired => ErrorKind::Expired,
            lsm::Kind::Older => ErrorKind::Older,
            lsm::Kind::UnknownColumnFamily => ErrorKind::UnknownColumnFamily,
        }
    }
}

/// A failed operation: its [kind](Error::kind), and a text that says what could not be done and
/// why.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// use millrace::{ErrorKind, Options};
///
/// let missing = dir.path().join("missing");
/// let error = Options::new().create(false).open(&missing).await.unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::NoDatabase);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Error(Box<(ErrorKind, String)>);

impl Error {
    #[cold]
    pub(crate) fn new(kind: ErrorKind, what: impl Into<String>) -> Error {
        Error(Box::new((kind, what.into())))
    }

    /// What to do about it.
    pub fn kind(&self) -> ErrorKind {
        self.0.0
    }
}

impl From<lsm::Error> for Error {
    #[cold]
    fn from(error: lsm::Error) -> Error {
        Error::new(error.kind().into(), error.to_string())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.1)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.0.0, self.0.1)
    }
}

impl std::error::Error for Error {}

/// A program that returns [`std::io::Error`] may use `?` on this crate's errors.
impl From<Error> for std::io::Error {
    fn from(error: Error) -> std::io::Error {
        std::io::Error::other(error)
    }
}
