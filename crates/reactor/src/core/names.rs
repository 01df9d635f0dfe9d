//! Operations on names: opening, listing, renaming, removing and locking files. A driver lets them
//! run on a helper thread or simulates them.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::{Core, CoreState};
use crate::driver::{DirEntry, LockGuard, MetaOp, MetaOut, Mode, Opening, SharedFile};
use crate::io::file::File;
use crate::op::{Hold, Nature, OpId, Payload};

impl Core {
    pub(crate) async fn meta(&self, op: MetaOp) -> io::Result<MetaOut> {
        let id = self.0.start_meta(op);
        MetaWait { core: self.clone(), id: Some(id) }.await
    }

    /// Opens a file for reading: with direct I/O where the file system supports it, unless
    /// `buffered`.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn open(&self, path: &Path, buffered: bool) -> io::Result<Arc<SharedFile>> {
        match self.meta(MetaOp::Open { path: path.to_owned(), buffered }).await? {
            MetaOut::File(file) => Ok(file),
            other => unreachable!("an open answered {other:?}"),
        }
    }

    /// This core's handle on an open file.
    pub fn attach(&self, file: &Arc<SharedFile>) -> File {
        File::new(self.clone(), file.clone())
    }

    /// The entries of a directory, sorted by name.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        match self.meta(MetaOp::List { path: path.to_owned() }).await? {
            MetaOut::List(entries) => Ok(entries),
            other => unreachable!("a listing answered {other:?}"),
        }
    }

    /// The whole of a file of at most `max` bytes.
    ///
    /// # Errors
    /// `InvalidData` when it is longer; others as the system gives them.
    pub async fn read_small(&self, path: &Path, max: usize) -> io::Result<Vec<u8>> {
        match self.meta(MetaOp::ReadSmall { path: path.to_owned(), max }).await? {
            MetaOut::Bytes(bytes) => Ok(bytes),
            other => unreachable!("a small read answered {other:?}"),
        }
    }

    /// Opens or makes a file for reading and writing. `Mode::Direct` falls back to the page cache
    /// where the file system has no direct I/O; [`SharedFile::alignment`] tells. The file's name is
    /// durable after a [`Core::sync_dir`] of its directory.
    ///
    /// # Errors
    /// As `opening` says; others as the system gives them.
    pub async fn open_for_writing(
        &self,
        path: &Path,
        opening: Opening,
        mode: Mode,
    ) -> io::Result<Arc<SharedFile>> {
        let path = path.to_owned();
        match self.meta(MetaOp::OpenForWriting { path, opening, mode }).await? {
            MetaOut::File(file) => Ok(file),
            other => unreachable!("an open answered {other:?}"),
        }
    }

    /// A name operation without a result.
    pub(crate) async fn meta_done(&self, op: MetaOp) -> io::Result<()> {
        match self.meta(op).await? {
            MetaOut::Done => Ok(()),
            other => unreachable!("an operation without a result answered {other:?}"),
        }
    }

    /// Renames a file atomically; an existing file of the new name is replaced. Or renames a
    /// directory; an empty one of the new name is replaced. Durable after a [`Core::sync_dir`].
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.meta_done(MetaOp::Rename { from: from.to_owned(), to: to.to_owned() }).await
    }

    /// Gives a file a second name in the same file system. If `from` is a symbolic link, its target
    /// gets the name. Durable after a [`Core::sync_dir`] of the new name's directory.
    ///
    /// # Errors
    /// `AlreadyExists` when the new name is taken, `CrossesDevices` when it is in another file
    /// system; others as the system gives them.
    pub async fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.meta_done(MetaOp::Link { from: from.to_owned(), to: to.to_owned() }).await
    }

    /// Makes a directory in an existing one. Durable after a [`Core::sync_dir`] of the parent.
    ///
    /// # Errors
    /// `AlreadyExists` when the name is taken; others as the system gives them.
    pub async fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.meta_done(MetaOp::CreateDir { path: path.to_owned() }).await
    }

    /// Removes an empty directory. Durable after a [`Core::sync_dir`] of the parent.
    ///
    /// # Errors
    /// `DirectoryNotEmpty`; others as the system gives them.
    pub async fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.meta_done(MetaOp::RemoveDir { path: path.to_owned() }).await
    }

    /// Removes a file's name; open handles keep the file. Durable after a [`Core::sync_dir`].
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn remove(&self, path: &Path) -> io::Result<()> {
        self.meta_done(MetaOp::Remove { path: path.to_owned() }).await
    }

    /// Makes the names of a directory durable: all files made, renamed and removed before. The
    /// files' contents are not covered.
    ///
    /// # Errors
    /// As the system gives them; the state of names that were not yet durable is then unknown.
    pub async fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.meta_done(MetaOp::SyncDir { path: path.to_owned() }).await
    }

    /// Takes an exclusive lock on a file, which is made if it is missing; the guard holds it. It
    /// excludes RocksDB's lock, and every other lock of this process.
    ///
    /// # Errors
    /// `WouldBlock` when another holder has any lock on it.
    pub async fn lock_exclusive(&self, path: &Path) -> io::Result<LockGuard> {
        match self.meta(MetaOp::LockExclusive { path: path.to_owned() }).await? {
            MetaOut::Lock(fd) => Ok(LockGuard::new(fd)),
            other => unreachable!("a lock answered {other:?}"),
        }
    }

    /// Takes a shared lock on a file; the guard holds it. No lock is taken if there is no file.
    ///
    /// # Errors
    /// `WouldBlock` when another holder has an exclusive lock.
    pub async fn lock_shared(&self, path: &Path) -> io::Result<LockGuard> {
        match self.meta(MetaOp::LockShared { path: path.to_owned() }).await? {
            MetaOut::Lock(fd) => Ok(LockGuard::new(fd)),
            other => unreachable!("a lock answered {other:?}"),
        }
    }
}

impl CoreState {
    fn start_meta(&self, op: MetaOp) -> OpId {
        self.stats.operations.add(1);
        // A file system that hangs answers when its server is back, or never.
        let nature = match &op {
            MetaOp::Space { .. } => Nature::Question,
            _ => Nature::Plain,
        };
        let id = self.ops.borrow_mut().insert(Payload::None, Hold::None, nature);
        self.driver.borrow_mut().meta(id.token, op, &self.shared);
        id
    }
}

struct MetaWait {
    core: Core,
    id: Option<OpId>,
}

impl Future for MetaWait {
    type Output = io::Result<MetaOut>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let id = self.id.expect("a finished operation is not polled again");
        match self.core.0.poll_op(id, cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready((_, payload)) => {
                self.id = None;
                let Payload::Meta(answer) = payload else {
                    unreachable!("a name operation returns its answer")
                };
                Poll::Ready(answer)
            }
        }
    }
}

impl Drop for MetaWait {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.core.0.drop_op(id, false);
        }
    }
}
