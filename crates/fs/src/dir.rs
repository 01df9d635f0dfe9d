//! A directory of files.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use reactor::{Core, DirEntry, LockGuard, SharedFile};

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
    /// `WouldBlock` when another process holds it exclusively.
    pub async fn lock_shared(&self, name: &str) -> io::Result<LockGuard> {
        self.core.lock_shared(&self.path.join(name)).await
    }
}
