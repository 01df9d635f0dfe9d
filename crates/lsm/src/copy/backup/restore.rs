//! Restoring a backup into a new directory.

use std::collections::BTreeMap;
use std::path::Path;

use fs::{Dir, DirEntry};

use crate::copy::backup::BackupDir;
use crate::copy::backup::meta::BackupFile;
use crate::copy::new_directory::NewDirectory;
use crate::copy::transfer::{Sum, Transfer};
use crate::error::{Error, Kind, Result};

/// A backup that was restored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestoredBackup {
    /// Its number.
    pub id: u32,
    /// The last sequence number in it.
    pub sequence: u64,
    /// Its files.
    pub files: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Bytes that an interrupted attempt has left, verified.
    pub kept_bytes: u64,
}

impl BackupDir {
    /// Restores a backup (the newest one without an `id`) into a new directory, and verifies every
    /// byte. The directory is whole and durable when this returns, and absent before. After an
    /// error or an interruption the next call takes over the files that were restored. Suspends for
    /// the disk.
    ///
    /// # Errors
    /// [`Kind::NoDatabase`] if there is no such backup; [`Kind::Unsupported`] if the new directory
    /// exists and is not empty, or something foreign is in `NAME.tmp`; [`Kind::Locked`] if another
    /// process is making the directory; [`Kind::Corruption`] if a file of the backup is damaged;
    /// the disk's errors.
    pub async fn restore(
        &self,
        id: Option<u32>,
        path: &Path,
        transfer: &mut Transfer<'_>,
    ) -> Result<RestoredBackup> {
        let backup = self.find(id).await?;
        let new = NewDirectory::begin(&self.core, path, true).await?;
        let has_within = backup.files.iter().any(BackupFile::is_within);
        match has_within {
            true => drop(new.make_within().await?),
            false => new.remove_within().await?,
        }
        let lengths = |entries: Vec<DirEntry>| -> BTreeMap<String, u64> {
            entries.into_iter().map(|entry| (entry.name, entry.size)).collect()
        };
        let within = new.within();
        let mut left = (lengths(new.entries().await?), lengths(new.entries_within().await?));
        let mut restored = RestoredBackup {
            id: backup.id,
            sequence: backup.sequence,
            files: backup.files.len() as u64,
            ..RestoredBackup::default()
        };
        for file in &backup.files {
            let bytes = self.length(file).await?;
            restored.bytes += bytes;
            transfer.expect(bytes);
        }
        for file in &backup.files {
            let name = file.name_in_database();
            let (to, there) = match file.is_within() {
                true => (&within, left.1.remove(&name)),
                false => (new.draft(), left.0.remove(&name)),
            };
            let is_kept = if let (Some(there), Some(crc32c)) = (there, file.crc32c)
                && file.bytes.is_none_or(|bytes| bytes == there)
            {
                transfer.sum(to, &name).await? == (Sum { bytes: there, crc32c })
            } else {
                false
            };
            let made = match is_kept {
                // It may be in the page cache only.
                true => sync(to, &name, transfer).await,
                false => self.restore_file(file, to, &name, transfer).await,
            };
            if let Err(error) = made {
                // The next attempt must not take it over: after a failed sync, another one may
                // succeed although the bytes are lost.
                drop(to.remove(&name).await);
                return Err(error);
            }
            if let Some(there) = there.filter(|_| is_kept) {
                transfer.skip(there);
                restored.kept_bytes += there;
            }
        }
        for (dir, left) in [(new.draft(), &left.0), (&within, &left.1)] {
            for name in left.keys() {
                let removed = dir.remove(name).await;
                removed.map_err(|e| Error::io(dir.path().join(name).display(), &e))?;
            }
        }
        new.finish().await?;
        Ok(restored)
    }

    async fn length(&self, file: &BackupFile) -> Result<u64> {
        let (dir, name) = file.place();
        let opened = self.dir(dir).open(name).await;
        let bytes = opened.map_err(|e| self.failed(&file.path, &e))?.size();
        match file.bytes {
            Some(expected) if expected != bytes => {
                let place = self.path.join(&file.path);
                let what = format!("{}: {bytes} bytes long, expected {expected}", place.display());
                Err(Error::new(Kind::Corruption, what))
            }
            _ => Ok(bytes),
        }
    }

    async fn restore_file(
        &self,
        file: &BackupFile,
        to: &Dir,
        name: &str,
        transfer: &mut Transfer<'_>,
    ) -> Result<()> {
        let (dir, own) = file.place();
        let sum = transfer.copy((&self.dir(dir), own), None, (to, name)).await?;
        match file.crc32c {
            Some(expected) if expected != sum.crc32c => {
                let place = self.path.join(&file.path);
                let what = format!(
                    "{}: the checksum is {}, expected {expected}",
                    place.display(),
                    sum.crc32c
                );
                Err(Error::new(Kind::Corruption, what))
            }
            _ => Ok(()),
        }
    }
}

/// Makes a file durable.
async fn sync(dir: &Dir, name: &str, transfer: &Transfer<'_>) -> Result<()> {
    let io = |e: std::io::Error| Error::io(dir.path().join(name).display(), &e);
    let file = dir.open(name).await.map_err(io)?;
    transfer.core().attach(&file).sync_data().await.map_err(io)
}
