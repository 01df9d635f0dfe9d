//! Which files hold a database at one moment.

use std::path::PathBuf;

/// The beginning of a file of the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePrefix {
    /// The number in its name.
    pub number: u64,
    /// Its length; all of it if this is `None`.
    pub bytes: Option<u64>,
}

/// A blob file that gets values: its contents at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobPrefix {
    /// The number in its name.
    pub number: u64,
    /// Where its last value ends. A footer belongs there in a copy.
    pub end: u64,
    /// The number of its values.
    pub count: u64,
}

/// The files that hold a database at one moment: a MANIFEST, the tables and blob files that it
/// names, and logs. Logs, MANIFEST and some blob files may be written to after that moment, so
/// their lengths count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileList {
    /// The directory of the database.
    pub directory: PathBuf,
    /// The last sequence number.
    pub sequence: u64,
    /// The MANIFEST.
    pub manifest: FilePrefix,
    /// The logs that hold writes that are in no table, in order.
    pub logs: Vec<FilePrefix>,
    /// The blob files that get values.
    pub open_blobs: Vec<BlobPrefix>,
    /// The files of the database within its directory ([`WITHIN`](crate::WITHIN)), if there is
    /// one. It has all that belongs to what this one holds.
    pub within: Option<Box<FileList>>,
}
