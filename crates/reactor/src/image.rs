//! Disk images: a regular file or a block device that somebody else gave its size, opened as a
//! whole for a disk and, unless told otherwise, locked.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use crate::core::{Core, LockGuard};
use crate::driver::{MetaOp, MetaOut};
use crate::file::{Mode, SharedFile};

/// How to open an image.
#[derive(Clone, Copy, Debug)]
pub struct ImageOpening {
    /// For reading only.
    pub read_only: bool,
    /// Past the page cache where the file system can, which [`SharedFile::alignment`] tells, or
    /// through it.
    pub mode: Mode,
    /// Exclude others: everybody, or with `read_only` those who write. The lock belongs to the
    /// open file, so it lasts until the last operation on it is done, also when the process is
    /// killed.
    pub lock: bool,
}

/// What an image is like. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageInfo {
    /// A block device rather than a regular file.
    pub block_device: bool,
    /// What its reads and writes are multiples of at the least.
    pub block_size: u32,
    /// What it writes without reading first.
    pub physical_block_size: u32,
    /// What it likes reads and writes to be multiples of; 0 where it does not say.
    pub optimal_io: u32,
    /// Holes can be punched, and read as zeroes.
    pub punch_hole: bool,
    /// Ranges can be zeroed by one call.
    pub zero_range: bool,
}

/// An open image.
#[derive(Debug)]
pub struct Image {
    /// The file, of which each core makes its own handle.
    pub file: Arc<SharedFile>,
    /// What it is like.
    pub info: ImageInfo,
    pub(crate) _lock: Option<LockGuard>,
}

impl Core {
    /// Opens a disk image; suspends.
    ///
    /// # Errors
    /// `WouldBlock` when somebody else has it locked, or a block device is in use; `InvalidInput`
    /// when it is neither a regular file nor a block device; others as the system gives them.
    pub async fn open_image(&self, path: &Path, how: ImageOpening) -> io::Result<Image> {
        self.image(path, how, None, None).await
    }

    /// The same of an image that is open already, in a process that handed its descriptor over:
    /// the lock goes along with the open file. `path` is how it was opened there; nothing is looked
    /// up by it. `holes` is whether holes can be punched ([`ImageInfo::punch_hole`]), where that
    /// was found out there: of a block device it is in files of the system, which a confined
    /// process cannot read. Suspends.
    ///
    /// # Errors
    /// As for [`Core::open_image`].
    pub async fn take_image(
        &self,
        path: &Path,
        how: ImageOpening,
        open: OwnedFd,
        holes: Option<bool>,
    ) -> io::Result<Image> {
        self.image(path, how, Some(Arc::new(open)), holes).await
    }

    async fn image(
        &self,
        path: &Path,
        how: ImageOpening,
        open: Option<Arc<OwnedFd>>,
        holes: Option<bool>,
    ) -> io::Result<Image> {
        let op = MetaOp::OpenImage { path: path.to_owned(), how, open, holes };
        match self.meta(op).await? {
            MetaOut::Image(image) => Ok(image),
            other => unreachable!("the opening of an image answered {other:?}"),
        }
    }

    /// Looks how long an open file is now, and notes it; suspends.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn measure(&self, file: &Arc<SharedFile>) -> io::Result<u64> {
        self.meta_done(MetaOp::Measure { file: file.clone() }).await?;
        Ok(file.size())
    }
}
