//! The engine's one error: a kind for the caller to act on, and the evidence.

use std::fmt;
use std::io;

/// The kinds of errors that callers treat differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// There is no database in this directory.
    NoDatabase,
    /// Another process has the directory open for writing.
    Locked,
    /// Bytes contradict the format or their checksum; the text names file and offset.
    Corruption,
    /// The database uses something this engine does not serve; the text names it.
    Unsupported,
    /// The device or the system failed.
    Io,
    /// The disk is full, or no table can be written for now; the text says which. Nothing was
    /// written; the caller may retry.
    Full,
    /// The operation needs more memory than the budget allows.
    Memory,
    /// A snapshot or cursor was held longer than allowed, or too many are held.
    Expired,
    /// A key that a batch depends on was written meanwhile, or too long ago to tell. Nothing was
    /// written.
    Conflict,
    /// An older RocksDB wrote the database last. It could not read what is written here.
    Older,
    /// No such column family.
    UnknownColumnFamily,
}

/// The result of an operation of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure of the engine. One pointer wide; built off the fast path. Cloning copies the text, so
/// that all waiters of one read get its error.
#[derive(Clone)]
pub struct Error(Box<(Kind, String)>);

/// Linux's error numbers for too many open files, of the process and of the machine.
const EMFILE: i32 = 24;
const ENFILE: i32 = 23;

/// Whether an operation failed because this process or the system lacks descriptors or memory.
pub(crate) fn lacks_resources(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE))
        || error.kind() == io::ErrorKind::OutOfMemory
}

impl Error {
    /// An error. The text says what could not be done, to what, and why.
    #[cold]
    #[inline(never)]
    pub fn new(kind: Kind, what: impl Into<String>) -> Error {
        Error(Box::new((kind, what.into())))
    }

    /// A failed system call or device.
    #[cold]
    #[inline(never)]
    pub fn io(place: impl fmt::Display, error: &io::Error) -> Error {
        let kind = match error.kind() {
            // The database says that the file exists and how long it is.
            io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound => Kind::Corruption,
            io::ErrorKind::OutOfMemory => Kind::Memory,
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => Kind::Full,
            _ => Kind::Io,
        };
        let advice = match error.kind() {
            io::ErrorKind::PermissionDenied => "; this user must be allowed to",
            io::ErrorKind::ReadOnlyFilesystem => {
                "; a file system that is mounted to be read can be read only"
            }
            io::ErrorKind::FileTooLarge => {
                "; `ulimit -f` says how large a file of this process may become: raise it"
            }
            _ => match error.raw_os_error() {
                Some(EMFILE) => {
                    "; `ulimit -n` says how many files a process may have open: raise it"
                }
                Some(ENFILE) => "; /proc/sys/fs/file-max says how many files may be open: raise it",
                _ => "",
            },
        };
        Error::new(kind, format!("{place}: {error}{advice}"))
    }

    /// Bytes that do not parse.
    #[cold]
    #[inline(never)]
    pub fn format(place: impl fmt::Display, error: &rocksfmt::Error) -> Error {
        let kind = match error.kind() {
            rocksfmt::Kind::Unsupported => Kind::Unsupported,
            rocksfmt::Kind::Corruption | rocksfmt::Kind::TooLarge => Kind::Corruption,
        };
        Error::new(kind, format!("{place}: {error}"))
    }

    /// The same error of an operation that may have been done in part: [`Kind::Full`] and
    /// [`Kind::Memory`] would say that nothing was written.
    pub(crate) fn in_part(mut self) -> Error {
        if matches!(self.0.0, Kind::Full | Kind::Memory) {
            self.0.0 = Kind::Io;
        }
        self
    }

    /// The same error of an operation on a new file: a missing name is no damage.
    pub(crate) fn of_new_file(mut self) -> Error {
        if self.0.0 == Kind::Corruption {
            self.0.0 = Kind::Io;
        }
        self
    }

    /// Whether a new attempt may succeed in the same process: the device or the system failed, or
    /// something is full. Other errors of writing show that the directory is no longer ours, or
    /// that the engine is wrong.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self.kind(), Kind::Io | Kind::Full | Kind::Memory)
    }

    /// The kind, which says what to do about it.
    pub fn kind(&self) -> Kind {
        self.0.0
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

const _: () = assert!(size_of::<Result<()>>() == size_of::<usize>());
