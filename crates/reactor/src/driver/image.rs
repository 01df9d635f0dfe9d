//! Disk images as a driver opens them.

use std::sync::Arc;

use super::{LockGuard, Mode, SharedFile};

/// How to open an image.
#[derive(Clone, Copy, Debug)]
pub struct ImageOpening {
    /// Open for reading only.
    pub read_only: bool,
    /// Direct I/O where the file system supports it ([`SharedFile::alignment`] tells), or the page
    /// cache.
    pub mode: Mode,
    /// Exclude all other users, or with `read_only` all writers. The lock belongs to the open
    /// file, so it lasts until the last operation on it is done, also when the process is
    /// killed.
    pub lock: bool,
}

/// A lock of an open image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageLock {
    /// Excludes all other users.
    Exclusive,
    /// Excludes all writers.
    Shared,
    /// Excludes nobody.
    None,
}

/// Properties of an image. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageInfo {
    /// A block device rather than a regular file.
    pub block_device: bool,
    /// Smallest unit of reads and writes.
    pub block_size: u32,
    /// Unit that it writes without a read before.
    pub physical_block_size: u32,
    /// Preferred unit of reads and writes; 0 if unknown.
    pub optimal_io: u32,
    /// Holes can be punched, and read as zeroes.
    pub punch_hole: bool,
    /// Ranges can be zeroed by one call.
    pub zero_range: bool,
}

/// An open image.
#[derive(Debug)]
pub struct Image {
    /// The file; each core makes its own handle of it.
    pub file: Arc<SharedFile>,
    /// Its properties.
    pub info: ImageInfo,
    pub(crate) _lock: Option<LockGuard>,
}
