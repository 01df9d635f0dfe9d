//! A directory of files.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use reactor::{Core, DirEntry, LockGuard, Mode, Opening, SharedFile};

/// A directory, accessed through one core.
#[derive(Clone)]
pub struct Dir {
    core: Core,
    path: PathBuf,
    failed_syncs: Rc<Cell<u64>>,
}

/// A moment in the life of a directory; see [`Dir::mark`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamesMark(u64);

impl Dir {
    /// The directory at `path`. A missing directory shows at the first use.
    pub fn new(core: &Core, path: &Path) -> Dir {
        Dir { core: core.clone(), path: path.to_owned(), failed_syncs: Rc::default() }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The entries, sorted by name.
    ///
    /// # Errors
    /// The system's errors.
    pub async fn list(&self) -> io::Result<Vec<DirEntry>> {
        self.core.list(&self.path).await
    }

    /// Opens a file for direct reads.
    ///
    /// # Errors
    /// The system's errors.
    pub async fn open(&self, name: &str) -> io::Result<Arc<SharedFile>> {
        self.core.open(&self.path.join(name), false).await
    }

    /// Makes the content of a file durable. It may have other names, so it is opened for reading
    /// only.
    pub async fn sync_file(&self, name: &str) -> io::Result<()> {
        let file = self.open(name).await?;
        self.core.attach(&file).sync_data().await
    }

    /// Reads a whole file of at most `max` bytes.
    ///
    /// # Errors
    /// `InvalidData` if the file is longer; otherwise the system's errors.
    pub async fn read_small(&self, name: &str, max: usize) -> io::Result<Vec<u8>> {
        let path = self.path.join(name);
        match self.core.read_small(&path, max).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                self.core.read_small(&path, max).await
            }
            read => read,
        }
    }

    /// Takes a shared lock on a file, against a writing process. Without the file there is no lock.
    ///
    /// # Errors
    /// `WouldBlock` if another process holds the lock exclusively.
    pub async fn lock_shared(&self, name: &str) -> io::Result<LockGuard> {
        self.core.lock_shared(&self.path.join(name)).await
    }

    // The functions below change the directory. Each suspends until a helper thread has done the
    // work.

    async fn open_as(
        &self,
        name: &str,
        opening: Opening,
        mode: Mode,
    ) -> io::Result<Arc<SharedFile>> {
        self.core.open_for_writing(&self.path.join(name), opening, mode).await
    }

    /// Creates a file for writing and reading. Its name is durable after [`Dir::sync`].
    ///
    /// # Errors
    /// `AlreadyExists` if the name is taken; otherwise the system's errors.
    pub async fn create(&self, name: &str, mode: Mode) -> io::Result<Arc<SharedFile>> {
        self.open_as(name, Opening::New, mode).await
    }

    /// Creates a file, or truncates the existing one, for writing and reading. Its name is durable
    /// after [`Dir::sync`], the truncation after a sync of the file.
    ///
    /// # Errors
    /// The system's errors.
    pub async fn create_or_empty(&self, name: &str, mode: Mode) -> io::Result<Arc<SharedFile>> {
        self.open_as(name, Opening::NewOrEmptied, mode).await
    }

    /// Opens an existing file for writing and reading. Its contents stay.
    ///
    /// # Errors
    /// `NotFound` if it does not exist; otherwise the system's errors.
    pub async fn open_for_writing(&self, name: &str, mode: Mode) -> io::Result<Arc<SharedFile>> {
        self.open_as(name, Opening::Existing, mode).await
    }

    /// Opens an existing file for writing and reading, if it has no other name. Its contents stay.
    ///
    /// # Errors
    /// `NotFound` if it does not exist; `WouldBlock` if it has another name; otherwise the system's
    /// errors.
    pub async fn open_only_name(&self, name: &str, mode: Mode) -> io::Result<Arc<SharedFile>> {
        self.open_as(name, Opening::OnlyName, mode).await
    }

    /// Opens an existing file to overwrite it, if it has no other name and nobody else has it open.
    /// Its contents stay.
    ///
    /// # Errors
    /// `NotFound` if it does not exist; `WouldBlock` if it has another name, is open elsewhere, or
    /// the system cannot tell; otherwise the system's errors.
    pub async fn open_unshared(&self, name: &str, mode: Mode) -> io::Result<Arc<SharedFile>> {
        self.open_as(name, Opening::Unshared, mode).await
    }

    /// Renames a file, replacing a file that has the new name. At any time, also after a power cut,
    /// the name refers to either the old or the new file; after [`Dir::sync`] to the new one.
    ///
    /// # Errors
    /// The system's errors.
    pub async fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.core.rename(&self.path.join(from), &self.path.join(to)).await
    }

    /// Gives a file of another directory a name in this one, in the same file system. It is durable
    /// after [`Dir::sync`].
    ///
    /// # Errors
    /// `AlreadyExists`, `CrossesDevices`; otherwise the system's errors.
    pub async fn link_from(&self, other: &Dir, name: &str, as_name: &str) -> io::Result<()> {
        self.core.link(&other.path.join(name), &self.path.join(as_name)).await
    }

    /// Removes a file's name. A process that has the file open keeps it. The removal is durable
    /// after [`Dir::sync`].
    ///
    /// # Errors
    /// The system's errors.
    pub async fn remove(&self, name: &str) -> io::Result<()> {
        self.core.remove(&self.path.join(name)).await
    }

    /// Makes the names in the directory durable, but not the contents of the files.
    ///
    /// # Errors
    /// The system's errors. After an error, names that were not durable before are in an unknown
    /// state.
    pub async fn sync(&self) -> io::Result<()> {
        let synced = self.core.sync_dir(&self.path).await;
        self.failed_syncs.set(self.failed_syncs.get() + u64::from(synced.is_err()));
        synced
    }

    /// The present moment, for [`Dir::sync_since`].
    pub fn mark(&self) -> NamesMark {
        NamesMark(self.failed_syncs.get())
    }

    /// Makes durable the names that were created after `mark`. A failed sync, of this `Dir` or a
    /// clone of it, may have lost any of the names that were not durable, and a later sync does not
    /// report them. So this fails if a sync has failed since `mark`: create the files again, under
    /// new names.
    ///
    /// # Errors
    /// The system's errors, of this sync or of one since `mark`.
    pub async fn sync_since(&self, mark: NamesMark) -> io::Result<()> {
        self.sync().await?;
        match self.mark() == mark {
            true => Ok(()),
            false => Err(io::Error::other("a sync of the directory has failed meanwhile")),
        }
    }

    /// Takes an exclusive lock on a file, creating the file if needed. The lock is held while the
    /// guard lives. It is the lock that RocksDB takes on `LOCK`, and excludes it.
    ///
    /// # Errors
    /// `WouldBlock` if any lock on the file is held, in this process or another; otherwise the
    /// system's errors.
    pub async fn lock_exclusive(&self, name: &str) -> io::Result<LockGuard> {
        self.core.lock_exclusive(&self.path.join(name)).await
    }

    /// Replaces the contents of a small file (`CURRENT`, `IDENTITY`) atomically and durably. A
    /// reader, also after a power cut, finds either all of the old or all of the new contents; once
    /// this returns, the new. Only one call per name may run at a time. Syncs the directory, and so
    /// every name in it.
    ///
    /// A crash may leave `NAME.dbtmp`, which has no meaning and may be removed.
    ///
    /// # Errors
    /// The system's errors. If the last step, the sync of the directory, fails, a power cut may
    /// leave either contents.
    pub async fn write_small_atomically(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.replace_small(name, bytes).await?;
        self.sync().await
    }

    /// As [`Dir::write_small_atomically`] without the last step: the new contents are durable after
    /// [`Dir::sync`].
    ///
    /// # Errors
    /// The system's errors.
    pub async fn replace_small(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.draft_small(name, bytes).await?;
        self.use_draft(name).await
    }

    /// The first step of [`Dir::replace_small`]: writes the new contents, durably, beside the file.
    /// [`Dir::use_draft`] is the other one.
    ///
    /// # Errors
    /// The system's errors. Then there is no draft to be used.
    pub async fn draft_small(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let file = self.create_or_empty(&draft_of(name), Mode::Buffered).await?;
        let file = self.core.attach(&file);
        let mut buf = self.core.alloc_wait(bytes.len()).await?;
        buf.copy_from_slice(bytes);
        file.write_at(0, buf, bytes.len()).await.0?;
        file.sync_data().await
    }

    /// Replaces a small file by its draft. Durable after [`Dir::sync`].
    ///
    /// # Errors
    /// The system's errors.
    pub async fn use_draft(&self, name: &str) -> io::Result<()> {
        self.rename(&draft_of(name), name).await
    }
}

fn draft_of(name: &str) -> String {
    format!("{name}.dbtmp")
}
