//! The files of a database that is not open for writing.

use std::convert::Infallible;
use std::path::Path;

use fs::{Dir, LockGuard};
use reactor::Core;
use rocksfmt::{
    DamageScan, FileName, LOG_BLOCK_BYTES, LogEnd, LogKind, LogReader, LogRecord, WriteBatch,
};

use crate::error::{Error, Kind, Result};
use crate::file_list::{FileList, FilePrefix};
use crate::open::recovery_plan::{Listed, RecoveryPlan};
use crate::open::sequential::Sequential;
use crate::open::within::WITHIN;
use crate::open::{directory, recover};
use crate::stored_options::StoredOptions;

/// The files of a database that is not open for writing, and remains so until this is dropped.
pub struct ClosedFiles {
    list: FileList,
    _lock: LockGuard,
    _within: Option<Box<ClosedFiles>>,
}

impl ClosedFiles {
    /// Finds the files of the database in a directory, and keeps other processes from writing to it
    /// (if it has a LOCK file). Changes nothing. Suspends for the disk.
    ///
    /// # Errors
    /// [`Kind::NoDatabase`]; [`Kind::Locked`] if a process has it open for writing; damage in the
    /// MANIFEST, missing tables; [`Kind::Unsupported`] if some of its files are elsewhere.
    pub async fn of(core: &Core, path: &Path) -> Result<ClosedFiles> {
        let (mut list, lock) = files_of(core, path).await?;
        let within = ClosedFiles::within(core, path).await?.map(Box::new);
        list.within = within.as_ref().map(|within| Box::new(within.list.clone()));
        Ok(ClosedFiles { list, _lock: lock, _within: within })
    }

    /// The same for the database within the directory of this one ([`WITHIN`]), if there is one.
    pub(crate) async fn within(core: &Core, path: &Path) -> Result<Option<ClosedFiles>> {
        match files_of(core, &path.join(WITHIN)).await {
            Ok((list, lock)) => Ok(Some(ClosedFiles { list, _lock: lock, _within: None })),
            Err(error) if error.kind() == Kind::NoDatabase => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The files.
    pub fn list(&self) -> &FileList {
        &self.list
    }
}

async fn files_of(core: &Core, path: &Path) -> Result<(FileList, LockGuard)> {
    let dir = Dir::new(core, path);
    recover::current(&dir).await?;
    let lock = directory::lock_shared(&dir).await?;
    let number = recover::current(&dir).await?;
    let name = FileName::Manifest(number).to_string();
    let manifest = recover::manifest(core, &dir, &name).await?;
    let failed = |e: std::io::Error| Error::io(format_args!("cannot list {}", path.display()), &e);
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
    let (mut logs, mut sequence) = (Vec::new(), manifest.last_sequence);
    for log in plan.kept_logs.iter().chain(&plan.logs) {
        let (bytes, next_sequence) = used(core, &dir, log.number).await?;
        sequence = sequence.max(next_sequence.saturating_sub(1));
        logs.push(FilePrefix { number: log.number, bytes });
    }
    let list = FileList {
        directory: path.to_owned(),
        sequence,
        manifest: FilePrefix { number, bytes: None },
        logs,
        open_blobs: Vec::new(),
        within: None,
    };
    Ok((list, lock))
}

/// The bytes of a log that a copy needs, if these are not all: without the space that was allocated
/// in advance, and the old contents of a recycled file. The last block is copied as a whole, so
/// that a reader of the copy judges the log's end in the same way. A log with damage is copied with
/// all that follows it. Also returns the sequence number after its writes.
async fn used(core: &Core, dir: &Dir, number: u64) -> Result<(Option<u64>, u64)> {
    const BLOCK: u64 = LOG_BLOCK_BYTES as u64;
    let name = FileName::Wal(number).to_string();
    let failed = |e: std::io::Error| Error::io(dir.path().join(&name).display(), &e);
    let shared = dir.open(&name).await.map_err(failed)?;
    let size = shared.size();
    let mut pieces = Sequential::new(core.attach(&shared));
    let mut reader = LogReader::new(LogKind::Wal { number });
    let (mut read, mut next_sequence, mut is_whole) = (0, 0, true);
    while read < size && reader.end().is_none() {
        let len = (size - read).min(BLOCK);
        let block = pieces.bytes(read, len as usize).await.map_err(failed)?;
        read += len;
        let each = |record: LogRecord<'_>| -> std::result::Result<(), Infallible> {
            match WriteBatch::parse(record.data) {
                Ok(batch) => next_sequence = batch.next_sequence().max(next_sequence),
                Err(_) => is_whole = false,
            }
            Ok(())
        };
        let Ok(()) = reader.feed(&block, read == size, each);
    }
    let used = match reader.end() {
        Some(LogEnd::Clean) => reader.zeros_from().map(|zeros| (zeros + 1).next_multiple_of(BLOCK)),
        Some(LogEnd::StaleTail { offset }) => {
            let mut scan = DamageScan::new(&reader, *offset, next_sequence);
            let later = recover::find_later(core, dir, &name, &mut scan).await?;
            later.is_none().then_some(read)
        }
        _ => None,
    };
    Ok((used.filter(|&used| is_whole && used < size), next_sequence))
}
