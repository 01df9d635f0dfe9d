//! A directory that is whole or absent after any crash.
//!
//! Its files are made in `NAME.tmp`, each durable. Then the names are made durable, then the
//! directory gets its own name. `NAME.tmp` that a crash has left is used again or emptied.

use std::path::{Path, PathBuf};

use fs::{Dir, DirEntry};
use reactor::Core;
use rocksfmt::FileName;

use crate::error::{Error, Kind, Result};
use crate::mutant::mutant;

/// A directory that is being made.
pub(crate) struct NewDirectory {
    core: Core,
    path: PathBuf,
    draft: Dir,
}

impl NewDirectory {
    /// Begins a directory. Without `continues`, files that an earlier attempt has left are removed.
    /// Suspends for the disk.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if the directory exists and has entries, or the one for its draft has
    /// entries that no attempt has made.
    pub async fn begin(core: &Core, path: &Path, continues: bool) -> Result<NewDirectory> {
        let refused = |what: String| Err(Error::new(Kind::Unsupported, what));
        match core.list(path).await {
            Ok(entries) if entries.is_empty() => {}
            Ok(_) => {
                return refused(format!(
                    "{} exists and is not empty: name a new directory",
                    path.display()
                ));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io(path.display(), &error)),
        }
        let Some(name) = path.file_name() else {
            return refused(format!("{}: a new directory needs a name", path.display()));
        };
        let mut draft_name = name.to_owned();
        draft_name.push(".tmp");
        let draft = Dir::new(core, &path.with_file_name(draft_name));
        let new = NewDirectory { core: core.clone(), path: path.to_owned(), draft };
        match core.create_dir(new.draft.path()).await {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                let entries = new.draft.list().await.map_err(|e| new.failed(&e))?;
                let ours = |entry: &DirEntry| !entry.is_dir && is_file_of_database(&entry.name);
                if let Some(other) = entries.iter().find(|entry| !ours(entry)) {
                    let place = new.draft.path().join(&other.name);
                    return refused(format!("{} is in the way: remove it", place.display()));
                }
                if !continues {
                    new.empty().await?;
                }
            }
            Err(error) => {
                let what = format_args!("cannot create {}", new.draft.path().display());
                return Err(Error::io(what, &error));
            }
            Ok(()) => {}
        }
        Ok(new)
    }

    /// Where to make its files.
    pub fn draft(&self) -> &Dir {
        &self.draft
    }

    fn failed(&self, error: &std::io::Error) -> Error {
        Error::io(self.draft.path().display(), error)
    }

    async fn empty(&self) -> Result<()> {
        for entry in self.draft.list().await.map_err(|e| self.failed(&e))? {
            self.draft.remove(&entry.name).await.map_err(|e| self.failed(&e))?;
        }
        Ok(())
    }

    /// Gives the directory its name. All its files are durable. Suspends for the disk.
    pub async fn finish(self) -> Result<()> {
        if !mutant("copied_names_are_not_synced") {
            self.draft.sync().await.map_err(|e| self.failed(&e))?;
        }
        let failed = |e: std::io::Error| Error::io(self.path.display(), &e);
        self.core.rename(self.draft.path(), &self.path).await.map_err(failed)?;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        self.core.sync_dir(parent.unwrap_or(Path::new("."))).await.map_err(failed)
    }

    /// Removes what there is of it, after an error.
    pub async fn abandon(self) {
        let removed = async {
            self.empty().await?;
            self.core.remove_dir(self.draft.path()).await.map_err(|e| self.failed(&e))
        };
        if let Err(error) = removed.await {
            tracing::warn!("cannot remove an unfinished copy: {error}");
        }
    }
}

/// Whether a copy makes files of this name.
fn is_file_of_database(name: &str) -> bool {
    FileName::parse(name).is_some() || name == "CURRENT.dbtmp"
}
