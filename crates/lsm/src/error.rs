//! The engine's one error: a kind to act on, and the evidence.

use std::fmt;
use std::io;

/// What a caller may want to tell apart.
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
    /// The device or the system refused.
    Io,
    /// The disk is full, or no table can be written for now; the text says which. Nothing was
    /// written; it may be tried again.
    Full,
    /// More memory is needed than the budget allows.
    Memory,
    /// A snapshot or cursor was held longer than allowed, or too many are held.
    Expired,
    /// An older RocksDB wrote the database last, which could not read what is written here.
    Older,
    /// No such column family.
    UnknownColumnFamily,
}

/// Result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure of the engine. One pointer wide; built off the fast path. Cloning copies the text,
/// so that all who waited for one read hear of its failure.
#[derive(Clone)]
pub struct Error(Box<(Kind, String)>);

/// Linux's numbers for too many open files, of a process and of the machine.
const EMFILE: i32 = 24;
const ENFILE: i32 = 23;

impl Error {
    /// An error whose text says what was being done, to what, expected against found.
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
            // A file that ends early contradicts what the database says about it.
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

    /// The same of something that must not be tried again, whatever the reason.
    pub(crate) fn for_good(mut self) -> Error {
        if self.0.0 == Kind::Full {
            self.0.0 = Kind::Io;
        }
        self
    }

    /// What to do about it.
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
