//! A directory of files.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use reactor::{Core, DirEntry, LockGuard, Mode, Opening, SharedFile};

/// A directory, reached through one core.
#[derive(Clone)]
pub struct Dir {
    core: Core,
    path: PathBuf,
}

impl Dir {
    /// The directory at `path`; whether it is there shows at the first use.
    pub fn new(core: &Core, path: &Path) -> Dir {
        Dir { core: core.clone(), path: path.to_owned() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The entries, sorted by name.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn list(&self) -> io::Result<Vec<DirEntry>> {
        self.core.list(&self.path).await
    }

    /// Opens a file for direct reads.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn open(&self, name: &str) -> io::Result<Arc<SharedFile>> {
        self.core.open(&self.path.join(name), false).await
    }

    /// The whole of a file of at most `max` bytes.
    ///
    /// # Errors
    /// `InvalidData` when it is longer; others as the system gives them.
    pub async fn read_small(&self, name: &str, max: usize) -> io::Result<Vec<u8>> {
        self.core.read_small(&self.path.join(name), max).await
    }

    /// A shared lock on a file, against a process that writes; no lock where there is no file.
    ///
    /// # Errors
    /// `WouldBlock` when somebody holds it exclusively.
    pub async fn lock_shared(&self, name: &str) -> io::Result<LockGuard> {
        self.core.lock_shared(&self.path.join(name)).await
    }

    // What follows changes the directory. All of it suspends until a helper thread has done it.

    async fn open_as(
        &self,
        name: &str,
        opening: Opening,
        mode: Mode,
    ) -> io::Result<Arc<SharedFile>> {
        self.core.open_for_writing(&self.path.join(name), opening, mode).await
    }

    /// Makes a file, for writing and reading. Its name is durable after [`Dir::sync`].
    ///
    /// # Errors
    /// `AlreadyExists` when there is a file of that name; others as the system gives them.
    pub async fn create(&self, name: &str, mode: Mode) -> io::Result<Arc<SharedFile>> {
        self.open_as(name, Opening::New, mode).await
    }

    /// Makes a file, or empties the one that is there, for writing and reading. Its name is
    /// durable after [`Dir::sync`]; that it is empty, after a sync of the file.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn create_or_empty(&self, name: &str, mode: Mode) -> io::Result<Arc<SharedFile>> {
        self.open_as(name, Opening::NewOrEmptied, mode).await
    }

    /// Opens a file that is there, for writing and reading. It keeps what it holds.
    ///
    /// # Errors
    /// `NotFound` when there is none; others as the system gives them.
    pub async fn open_for_writing(&self, name: &str, mode: Mode) -> io::Result<Arc<SharedFile>> {
        self.open_as(name, Opening::Existing, mode).await
    }

    /// Opens a file that is there, has no other name and that nobody else has open, to be written
    /// over. It keeps what it holds.
    ///
    /// # Errors
    /// `NotFound` when there is none, `WouldBlock` when it has another name, is open elsewhere, or
    /// the system does not tell; others as the system gives them.
    pub async fn open_unshared(&self, name: &str, mode: Mode) -> io::Result<Arc<SharedFile>> {
        self.open_as(name, Opening::Unshared, mode).await
    }

    /// Gives a file another name, in the place of a file that has that name. Who looks sees the
    /// one or the other, and so does who looks after a power cut; the new one surely after
    /// [`Dir::sync`].
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.core.rename(&self.path.join(from), &self.path.join(to)).await
    }

    /// Removes a file's name; who has it open keeps the file. Gone for good after [`Dir::sync`].
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn remove(&self, name: &str) -> io::Result<()> {
        self.core.remove(&self.path.join(name)).await
    }

    /// Makes durable which names there are. Says nothing of what the files hold.
    ///
    /// # Errors
    /// As the system gives them; then nothing is known of names that were not durable before.
    pub async fn sync(&self) -> io::Result<()> {
        self.core.sync_dir(&self.path).await
    }

    /// An exclusive lock on a file, which is made if it is missing; held as long as the guard.
    /// It is the lock that RocksDB takes on `LOCK`, and excludes it.
    ///
    /// # Errors
    /// `WouldBlock` when another process or another part of this one holds any lock on it; others
    /// as the system gives them.
    pub async fn lock_exclusive(&self, name: &str) -> io::Result<LockGuard> {
        self.core.lock_exclusive(&self.path.join(name)).await
    }

    /// Replaces what a small file holds, durably: for `CURRENT` and `IDENTITY`. Whoever opens it,
    /// also after a power cut at any time, finds all of the old or all of the new; the new once
    /// this is done. One at a time for each name. Syncs the directory, and so every name in it.
    ///
    /// A crash may leave `NAME.dbtmp`, which means nothing and may be removed.
    ///
    /// # Errors
    /// As the system gives them. After an error of the last step, the sync of the directory,
    /// either may be found after a power cut.
    pub async fn write_small_atomically(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.replace_small(name, bytes).await?;
        self.sync().await
    }

    /// The same without the last step: the new is found for certain after [`Dir::sync`].
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn replace_small(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let draft = format!("{name}.dbtmp");
        let file = self.create_or_empty(&draft, Mode::Buffered).await?;
        let file = self.core.attach(&file);
        let mut buf = self.core.alloc_wait(bytes.len()).await?;
        buf.copy_from_slice(bytes);
        file.write_at(0, buf, bytes.len()).await.0?;
        file.sync_data().await?;
        self.rename(&draft, name).await
    }
}
