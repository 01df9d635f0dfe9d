//! Checkpoints: a directory that holds the database as it is at one moment, made of hard links.
//!
//! Tables and complete blob files never change, so links to them suffice. MANIFEST, logs and the
//! blob files that still get values are copied as far as they count, and CURRENT is written last.
//! If the new directory is in another file system, everything is copied.

use std::io::ErrorKind;
use std::path::Path;

use fs::Dir;
use rocksfmt::FileName;

use crate::copy::closed::ClosedFiles;
use crate::copy::contents::{Contents, Source};
use crate::copy::new_directory::NewDirectory;
use crate::copy::transfer::Transfer;
use crate::error::{Error, Result};
use crate::file_list::FileList;
use crate::write::writer::Writer;

/// Longest logs that a checkpoint of an open database copies, in bytes: then their writes become
/// tables first, which can be linked.
const LOG_BYTES_MAX: u64 = 16 << 20;

/// What a checkpoint consists of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// The last sequence number in it.
    pub sequence: u64,
    /// Its files.
    pub files: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Bytes of files that share their space with the database.
    pub linked_bytes: u64,
}

impl Writer {
    /// Makes a checkpoint in a new directory: all that was submitted before, in all column
    /// families. Reads and writes go on meanwhile. Suspends for the disk.
    ///
    /// # Errors
    /// As for [`checkpoint`] and [`Writer::live_files`].
    pub async fn checkpoint(&self, path: &Path) -> Result<Checkpoint> {
        let _working = self.0.begin_work()?;
        let live = self.live_files(LOG_BYTES_MAX).await?;
        let mut list = live.list().clone();
        // A program that does not know of the database within has not opened it.
        let closed = match list.within {
            Some(_) => None,
            None => ClosedFiles::within(&self.0.core, self.0.db.path()).await?,
        };
        if let Some(closed) = &closed {
            list.within = Some(Box::new(closed.list().clone()));
        }
        let mut progress = |_, _| {};
        let mut transfer = Transfer::new(&self.0.core, None, &mut progress);
        checkpoint(&list, path, &mut transfer).await
    }
}

/// Makes a checkpoint of the files of a list in a new directory, which is whole and durable when
/// this returns, and absent if it fails or is interrupted. Suspends for the disk.
///
/// # Errors
/// [`Kind::Unsupported`](crate::Kind::Unsupported) if the directory exists and is not empty, or
/// something foreign is in `NAME.tmp`; [`Kind::Locked`](crate::Kind::Locked) if another process is
/// making the directory; a missing file; the disk's errors.
pub async fn checkpoint(
    list: &FileList,
    path: &Path,
    transfer: &mut Transfer<'_>,
) -> Result<Checkpoint> {
    let new = NewDirectory::begin(&transfer.core(), path, false).await?;
    let made = async {
        let mut made = Checkpoint { sequence: list.sequence, ..Checkpoint::default() };
        fill(list, new.draft(), transfer, &mut made).await?;
        if let Some(within) = &list.within {
            fill(within, &new.make_within().await?, transfer, &mut made).await?;
        }
        new.finish().await.map(|()| made)
    };
    let made = made.await;
    if made.is_err() {
        new.abandon().await;
    }
    made
}

async fn fill(
    list: &FileList,
    to: &Dir,
    transfer: &mut Transfer<'_>,
    made: &mut Checkpoint,
) -> Result<()> {
    let from = Dir::new(&transfer.core(), &list.directory);
    let manifest = FileName::Manifest(list.manifest.number).to_string();
    let sum = transfer.copy((&from, &manifest), list.manifest.bytes, (to, &manifest)).await?;
    made.add(sum.bytes);
    let contents = Contents::of(&transfer.core(), list, to).await?;
    transfer.expect(sum.bytes + contents.bytes());
    for file in contents.tables.iter().chain(&contents.blobs) {
        if file.part.is_none() && link(&from, file, to).await? {
            made.linked_bytes += file.bytes;
            transfer.skip(file.bytes);
        } else {
            transfer.copy_part((&from, &file.name), file.prefix(), (to, &file.name)).await?;
        }
        made.add(file.bytes);
    }
    if let Some(options) = &contents.options {
        transfer.copy((&from, &options.name), None, (to, &options.name)).await?;
        made.add(options.bytes);
    }
    for log in &list.logs {
        let name = FileName::Wal(log.number).to_string();
        made.add(transfer.copy((&from, &name), log.bytes, (to, &name)).await?.bytes);
    }
    let current = format!("{manifest}\n");
    let written = to.replace_small("CURRENT", current.as_bytes()).await;
    written.map_err(|e| Error::io(to.path().join("CURRENT").display(), &e))?;
    made.add(current.len() as u64);
    Ok(())
}

impl Checkpoint {
    fn add(&mut self, bytes: u64) {
        self.files += 1;
        self.bytes += bytes;
    }
}

/// Links a file. Returns false if it has to be copied: the directories are in different file
/// systems, the file system has no links or the file has too many, or this user may not link it.
async fn link(from: &Dir, file: &Source, to: &Dir) -> Result<bool> {
    match to.link_from(from, &file.name, &file.name).await {
        Ok(()) => Ok(true),
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::CrossesDevices
                    | ErrorKind::PermissionDenied
                    | ErrorKind::TooManyLinks
                    | ErrorKind::Unsupported
            ) =>
        {
            Ok(false)
        }
        Err(error) => Err(Error::io(from.path().join(&file.name).display(), &error)),
    }
}
