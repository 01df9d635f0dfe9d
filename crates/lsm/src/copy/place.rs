//! Putting files into the directory of a database, to be ingested.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use fs::Dir;
use rocksfmt::FileName;

use crate::copy::transfer::Transfer;
use crate::error::{Error, Result};
use crate::mutant::mutant;
use crate::write::ingest::{IngestFiles, Ingested};
use crate::write::writer::Writer;

/// Puts files into the directory of a database under temporary names with these numbers: as hard
/// links if `link` is set and the file system allows it, else as copies. They are durable when this
/// returns; their names need not be. Suspends for the disk.
///
/// # Errors
/// The disk's. Then none of the files is left in the directory.
pub async fn place_files(
    files: &[(PathBuf, u64)],
    directory: &Path,
    link: bool,
    transfer: &mut Transfer<'_>,
) -> Result<()> {
    let core = transfer.core();
    let to = Dir::new(&core, directory);
    let placed = async {
        for (path, _) in files {
            let file = core.open(path, true).await;
            transfer.expect(file.map_err(|e| Error::io(path.display(), &e))?.size());
        }
        for (path, number) in files {
            place(path, *number, &to, link, transfer).await?;
        }
        Ok(())
    };
    let placed = placed.await;
    if placed.is_err() {
        remove_placed(files.iter().map(|(_, number)| *number), &to).await;
    }
    placed
}

async fn remove_placed(numbers: impl Iterator<Item = u64>, dir: &Dir) {
    for number in numbers {
        // It may not have been made.
        let _ = dir.remove(&FileName::Temp(number).to_string()).await;
    }
}

async fn place(
    path: &Path,
    number: u64,
    to: &Dir,
    link: bool,
    transfer: &mut Transfer<'_>,
) -> Result<()> {
    let io = |e: std::io::Error| Error::io(path.display(), &e);
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let from = Dir::new(&transfer.core(), parent.unwrap_or(Path::new(".")));
    let own = path.file_name().and_then(|name| name.to_str());
    let own = own.ok_or_else(|| io(ErrorKind::InvalidInput.into()))?;
    let name = FileName::Temp(number).to_string();
    if link {
        match to.link_from(&from, own, &name).await {
            Ok(()) => {
                // Its writer may not have made it durable.
                let file = transfer.core().attach(&to.open(&name).await.map_err(io)?);
                if !mutant("linked_file_is_not_synced") {
                    file.sync_data().await.map_err(io)?;
                }
                transfer.skip(file.size());
                return Ok(());
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::AlreadyExists | ErrorKind::NotFound) =>
            {
                return Err(io(error));
            }
            // It is in another file system, or another user's.
            Err(_) => {}
        }
    }
    transfer.copy((&from, own), None, (to, &name)).await.map(drop)
}

impl Writer {
    /// Ingests files from anywhere into column families: links them with `link`, else copies them.
    /// See [`Writer::ingest`] for the rest.
    ///
    /// # Errors
    /// As for [`Writer::ingest`] and [`place_files`].
    pub async fn ingest_files(
        &self,
        files: &[(crate::CfId, Vec<PathBuf>)],
        link: bool,
        verify: bool,
    ) -> Result<Ingested> {
        let state = &self.0;
        let (mut all, mut ingested) = (Vec::new(), Vec::new());
        for (family, paths) in files {
            let numbers = self.reserve_files(paths.len());
            all.extend(paths.iter().cloned().zip(numbers.iter().copied()));
            ingested.push(IngestFiles { family: *family, numbers });
        }
        let mut progress = |_, _| {};
        let mut transfer = Transfer::new(&state.core, None, &mut progress);
        place_files(&all, state.dir.path(), link, &mut transfer).await?;
        self.ingest(&ingested, verify).await
    }
}
