//! The files of a database that is not open for writing.

use std::path::Path;

use fs::{Dir, LockGuard};
use reactor::Core;
use rocksfmt::FileName;

use crate::error::{Error, Kind, Result};
use crate::file_list::{FileList, FilePrefix};
use crate::open::recovery_plan::{Listed, RecoveryPlan};
use crate::open::{directory, recover};
use crate::stored_options::StoredOptions;

/// The files of a database that is not open for writing, and remains so until this is dropped.
pub struct ClosedFiles {
    list: FileList,
    _lock: LockGuard,
}

impl ClosedFiles {
    /// Finds the files of the database in a directory, and keeps other processes from writing to it
    /// (if it has a LOCK file). Changes nothing. Suspends for the disk.
    ///
    /// # Errors
    /// [`Kind::NoDatabase`]; [`Kind::Locked`] if a process has it open for writing; damage in the
    /// MANIFEST, missing tables; [`Kind::Unsupported`] if some of its files are elsewhere.
    pub async fn of(core: &Core, path: &Path) -> Result<ClosedFiles> {
        let dir = Dir::new(core, path);
        recover::current(&dir).await?;
        let lock = directory::lock_shared(&dir).await?;
        let number = recover::current(&dir).await?;
        let name = FileName::Manifest(number).to_string();
        let manifest = recover::manifest(core, &dir, &name).await?;
        let failed =
            |e: std::io::Error| Error::io(format_args!("cannot list {}", path.display()), &e);
        let entries = dir.list().await.map_err(failed)?;
        let stored = StoredOptions::read(&dir, &entries).await?;
        directory::logs_at(core, &dir, &stored, &manifest).await?;
        if entries.iter().any(|entry| entry.is_dir && entry.name == "blob_dir") {
            let what = format!("{}: its values are in files of the old BlobDB", path.display());
            return Err(Error::new(Kind::Unsupported, what));
        }
        let listed = |entry: fs::DirEntry| Listed { name: entry.name, size_bytes: entry.size };
        let listed: Vec<Listed> = entries.into_iter().map(listed).collect();
        let plan = RecoveryPlan::new(&manifest, &listed)?;
        let logs = plan.kept_logs.iter().chain(&plan.logs);
        let list = FileList {
            directory: path.to_owned(),
            sequence: manifest.last_sequence,
            manifest: FilePrefix { number, bytes: None },
            logs: logs.map(|log| FilePrefix { number: log.number, bytes: None }).collect(),
            open_blobs: Vec::new(),
        };
        Ok(ClosedFiles { list, _lock: lock })
    }

    /// The files.
    pub fn list(&self) -> &FileList {
        &self.list
    }
}
