//! Opening disk images: a regular file or a block device of a given size, opened as a whole for a
//! disk and, if wanted, locked.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use super::Core;
use crate::driver::{Extent, Image, ImageLock, ImageOpening, MetaOp, MetaOut, SharedFile, Space};

impl Core {
    /// Opens a disk image.
    ///
    /// # Errors
    /// `WouldBlock` when it is locked, or a block device is in use; `InvalidInput` when it is
    /// neither a regular file nor a block device; others as the system gives them.
    pub async fn open_image(&self, path: &Path, how: ImageOpening) -> io::Result<Image> {
        self.image(path, how, None, None).await
    }

    /// Takes an image that another process opened and handed over by its descriptor; the lock
    /// belongs to the open file. `path` is its path there; nothing is looked up by it. `holes`
    /// tells whether holes can be punched
    /// ([`ImageInfo::punch_hole`](crate::ImageInfo::punch_hole)), if the other process knows:
    /// for a block device that is in system files, which a confined process cannot read.
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

    /// The parts of a range of an open file that are holes, and those that are not: consecutive
    /// extents from its beginning on, at most `max`. What the system does not tell is data. They
    /// may have changed when they are known here. Suspends.
    ///
    /// # Errors
    /// When the file has no descriptor.
    pub async fn extents(
        &self,
        file: &Arc<SharedFile>,
        range: Range<u64>,
        max: usize,
    ) -> io::Result<Vec<Extent>> {
        let op = MetaOp::Extents { file: file.clone(), range, max };
        match self.meta(op).await? {
            MetaOut::Extents(extents) => Ok(extents),
            other => unreachable!("a search for extents answered {other:?}"),
        }
    }

    /// Locks an open image that was opened without a lock, or unlocks it. The lock belongs to the
    /// open file, also in another process that has it. Repeating it does no harm. Suspends.
    ///
    /// # Errors
    /// `WouldBlock` when another open file has a lock that excludes this one; others as the system
    /// gives them. A simulated image cannot be locked later.
    pub async fn lock_image(&self, file: &Arc<SharedFile>, lock: ImageLock) -> io::Result<()> {
        self.meta_done(MetaOp::LockImage { file: file.clone(), lock }).await
    }

    /// Who has claimed an open image last ([`Core::claim_image`]), whatever process or host that
    /// was; empty if nobody has. Suspends.
    ///
    /// # Errors
    /// When its file system has no extended attributes; others as the system gives them. A
    /// simulated image has no owner.
    pub async fn image_owner(&self, file: &Arc<SharedFile>) -> io::Result<Vec<u8>> {
        match self.meta(MetaOp::Owner { file: file.clone(), claim: None }).await? {
            MetaOut::Bytes(owner) => Ok(owner),
            other => unreachable!("a question for an owner answered {other:?}"),
        }
    }

    /// Stores with an open image that somebody has it now. Suspends.
    ///
    /// # Errors
    /// As for [`Core::image_owner`].
    pub async fn claim_image(&self, file: &Arc<SharedFile>, owner: String) -> io::Result<()> {
        self.meta_done(MetaOp::Owner { file: file.clone(), claim: Some(owner) }).await
    }

    /// How much space an open file occupies, and how much its file system has left; `None` for a
    /// block device. A file system that does not answer holds up only this, but each question holds
    /// a thread meanwhile: do not ask the same file system again. Suspends.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn space(&self, file: &Arc<SharedFile>) -> io::Result<Option<Space>> {
        match self.meta(MetaOp::Space { file: file.clone() }).await? {
            MetaOut::Space(space) => Ok(space),
            other => unreachable!("a question for space answered {other:?}"),
        }
    }

    /// Reads the present length of an open file, and notes it.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn measure(&self, file: &Arc<SharedFile>) -> io::Result<u64> {
        self.meta_done(MetaOp::Measure { file: file.clone() }).await?;
        Ok(file.size())
    }
}
