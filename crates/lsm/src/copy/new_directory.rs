//! A directory that is whole or absent after any crash.
//!
//! 1. Its files are made in `NAME.tmp`, each durable. The first of them is [`MARK`]: it says that a
//!    copy has made this directory, so that a later one may remove what is in it. It is locked for
//!    as long as the directory is being made, and the lock ends with the process.
//! 2. The names are made durable, then the directory gets its own name.
//! 3. The mark is removed. So no other process ever has the lock while `NAME.tmp` is being renamed.
//!
//! It may have one directory with a database of its own ([`WITHIN`]), to which the same applies.
//!
//! `NAME.tmp` that a crash has left is used again or emptied. It is refused if it has no mark, or a
//! file that a copy does not make: a LOCK tells that a program has opened it as a database.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use fs::{Dir, DirEntry, LockGuard};
use reactor::Core;
use rocksfmt::FileName;

use crate::error::{Error, Kind, Result};
use crate::mutant::mutant;
use crate::open::within::WITHIN;

/// The mark of a directory that is being made.
const MARK: &str = "MILLRACE-COPY";

/// A directory that is being made.
pub(crate) struct NewDirectory {
    core: Core,
    path: PathBuf,
    draft: Dir,
    /// On the mark.
    _lock: LockGuard,
}

impl NewDirectory {
    /// Begins a directory. Without `continues`, files that an earlier attempt has left are removed.
    /// Suspends for the disk.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if the directory exists and has entries, or `NAME.tmp` has entries
    /// that no copy has made; [`Kind::Locked`] if another process is making the directory.
    pub async fn begin(core: &Core, path: &Path, continues: bool) -> Result<NewDirectory> {
        let Some(name) = path.file_name() else {
            let what = format!("{}: a new directory needs a name", path.display());
            return Err(Error::new(Kind::Unsupported, what));
        };
        // Without a slash or a dot at the end.
        let path = path.with_file_name(name);
        refuse_full(core, &path).await?;
        let mut draft_name = name.to_owned();
        draft_name.push(".tmp");
        let draft = Dir::new(core, &path.with_file_name(draft_name));
        match core.create_dir(draft.path()).await {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let entries = draft.list().await.map_err(|e| failed(&draft, &e))?;
                if !entries.is_empty() && !entries.iter().any(|entry| entry.name == MARK) {
                    return Err(in_the_way(&draft, &draft.path().join(&entries[0].name)));
                }
            }
            Err(error) => {
                let what = format_args!("cannot create {}", draft.path().display());
                return Err(Error::io(what, &error));
            }
            Ok(()) => {}
        }
        let lock = draft.lock_exclusive(MARK).await.map_err(|error| match error.kind() {
            // It has just got its name, or was given up.
            ErrorKind::WouldBlock | ErrorKind::NotFound => {
                let what = format!(
                    "{}: another process is making this directory, in {}",
                    path.display(),
                    draft.path().display()
                );
                Error::new(Kind::Locked, what)
            }
            _ => Error::io(draft.path().join(MARK).display(), &error),
        })?;
        let new = NewDirectory { core: core.clone(), path, draft, _lock: lock };
        // The other process may have finished before this one had the lock.
        refuse_full(core, &new.path).await?;
        new.refuse_others(&new.draft, &new.entries().await?)?;
        new.refuse_others(&new.within(), &new.entries_within().await?)?;
        // A power cut must not leave files without the mark.
        new.draft.sync().await.map_err(|e| new.failed(&e))?;
        if !continues {
            new.empty().await?;
        }
        Ok(new)
    }

    /// Refuses what no copy has made.
    fn refuse_others(&self, dir: &Dir, entries: &[DirEntry]) -> Result<()> {
        match entries.iter().find(|entry| !is_of_copy(entry)) {
            Some(other) => Err(in_the_way(&self.draft, &dir.path().join(&other.name))),
            None => Ok(()),
        }
    }

    /// Where to make its files.
    pub fn draft(&self) -> &Dir {
        &self.draft
    }

    /// Where to make the files of the database within, once it is made.
    pub fn within(&self) -> Dir {
        Dir::new(&self.core, &self.draft.path().join(WITHIN))
    }

    /// Makes the directory of the database within, unless it exists.
    pub async fn make_within(&self) -> Result<Dir> {
        let within = self.within();
        match self.core.create_dir(within.path()).await {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                Err(Error::io(format_args!("cannot create {}", within.path().display()), &error))
            }
            _ => Ok(within),
        }
    }

    /// The files that are there.
    pub async fn entries(&self) -> Result<Vec<DirEntry>> {
        let mut entries = self.draft.list().await.map_err(|e| self.failed(&e))?;
        entries.retain(|entry| {
            let is_within = entry.is_dir && !entry.is_link && entry.name == WITHIN;
            entry.name != MARK && !is_within
        });
        Ok(entries)
    }

    /// The files of the database within that are there.
    pub async fn entries_within(&self) -> Result<Vec<DirEntry>> {
        let within = self.within();
        match within.list().await {
            Ok(entries) => Ok(entries),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(failed(&within, &error)),
        }
    }

    fn failed(&self, error: &std::io::Error) -> Error {
        failed(&self.draft, error)
    }

    async fn empty(&self) -> Result<()> {
        for entry in self.entries().await? {
            self.draft.remove(&entry.name).await.map_err(|e| self.failed(&e))?;
        }
        self.remove_within().await
    }

    /// Removes the database within.
    pub async fn remove_within(&self) -> Result<()> {
        let within = self.within();
        for entry in self.entries_within().await? {
            within.remove(&entry.name).await.map_err(|e| failed(&within, &e))?;
        }
        match self.core.remove_dir(within.path()).await {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(&within, &error)),
            _ => Ok(()),
        }
    }

    /// Gives the directory its name. All its files are durable. Suspends for the disk.
    pub async fn finish(&self) -> Result<()> {
        if !mutant("copied_names_are_not_synced") {
            let within = self.within();
            match within.sync().await {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(failed(&within, &error));
                }
                _ => {}
            }
            self.draft.sync().await.map_err(|e| self.failed(&e))?;
        }
        let failed = |e: std::io::Error| Error::io(self.path.display(), &e);
        self.core.rename(self.draft.path(), &self.path).await.map_err(failed)?;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        self.core.sync_dir(parent.unwrap_or(Path::new("."))).await.map_err(failed)?;
        let made = Dir::new(&self.core, &self.path);
        made.remove(MARK).await.map_err(failed)?;
        made.sync().await.map_err(failed)
    }

    /// Removes what there is of it, after an error.
    pub async fn abandon(self) {
        let removed = async {
            self.empty().await?;
            // A power cut must not leave files without the mark.
            self.draft.sync().await.map_err(|e| self.failed(&e))?;
            self.draft.remove(MARK).await.map_err(|e| self.failed(&e))?;
            self.core.remove_dir(self.draft.path()).await.map_err(|e| self.failed(&e))
        };
        if let Err(error) = removed.await
            && self.core.list(self.draft.path()).await.is_ok()
        {
            tracing::warn!("cannot remove an unfinished copy: {error}");
        }
    }
}

fn failed(draft: &Dir, error: &std::io::Error) -> Error {
    Error::io(draft.path().display(), error)
}

fn in_the_way(draft: &Dir, entry: &Path) -> Error {
    let what = format!(
        "{} is in the way: no interrupted copy has left this; rename or remove {}",
        entry.display(),
        draft.path().display()
    );
    Error::new(Kind::Unsupported, what)
}

/// Refuses a directory that exists and has entries.
async fn refuse_full(core: &Core, path: &Path) -> Result<()> {
    match core.list(path).await {
        Ok(entries) if entries.is_empty() => Ok(()),
        Ok(_) => {
            let what = format!("{} exists and is not empty: name a new directory", path.display());
            Err(Error::new(Kind::Unsupported, what))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io(path.display(), &error)),
    }
}

/// Whether a copy makes such an entry. It makes no symbolic links, and must not write to the target
/// of one.
fn is_of_copy(entry: &DirEntry) -> bool {
    use FileName::{Blob, Current, Manifest, Options, Sst, Wal};
    let made = matches!(
        FileName::parse(&entry.name),
        Some(Wal(_) | Sst(_) | Blob(_) | Manifest(_) | Options(_) | Current)
    );
    !entry.is_dir && !entry.is_link && (made || entry.name == "CURRENT.dbtmp")
}
