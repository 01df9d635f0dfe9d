//! What is in a directory, before the database in it is opened.

use std::path::Path;

use fs::{Dir, DirEntry, LockGuard};
use reactor::Core;
use rocksfmt::{FileName, ManifestState};

use crate::error::{Error, Kind, Result, lacks_resources};
use crate::open::gate::{self, LogsAt};
use crate::open::recover;
use crate::open::recovery_plan::first_log;
use crate::stored_options::StoredOptions;

/// Takes the lock that excludes writers. Does nothing if there is no LOCK file.
pub(crate) async fn lock_shared(dir: &Dir) -> Result<LockGuard> {
    dir.lock_shared("LOCK").await.map_err(|e| match e.kind() {
        std::io::ErrorKind::WouldBlock => Error::new(
            Kind::Locked,
            format!(
                "{}: another process has this database open for writing; close it there, or read \
                 its state as of now with --secondary",
                dir.path().display()
            ),
        ),
        _ => Error::io(format_args!("cannot lock {}", dir.path().join("LOCK").display()), &e),
    })
}

/// The contents of a directory that is to be opened for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    /// Nothing: a database may be created.
    Nothing,
    /// A database that never had a LOCK file, for example a checkpoint.
    UnlockedDatabase,
    /// A database.
    Database,
}

/// Looks at a directory before anything is written. Suspends for the disk.
///
/// # Errors
/// [`Kind::NoDatabase`] if there is none and none may be created here.
pub(crate) async fn contents(dir: &Dir, create: bool) -> Result<Contents> {
    let entries = match dir.list().await {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            return Err(Error::io(format_args!("cannot list {}", dir.path().display()), &error));
        }
    };
    let has = |name: &str| entries.iter().any(|entry| entry.name == name);
    if has("CURRENT") {
        return Ok(if has("LOCK") { Contents::Database } else { Contents::UnlockedDatabase });
    }
    match create {
        true => gate::may_create(dir.path(), &entries)?,
        false => drop(recover::current(dir).await?),
    }
    Ok(Contents::Nothing)
}

/// The text of the IDENTITY file; empty if there is none that can be read: nothing depends on it.
///
/// # Errors
/// When this process lacks descriptors or memory.
pub(crate) async fn identity(dir: &Dir) -> Result<String> {
    const IDENTITY_BYTES_MAX: usize = 4096;
    match dir.read_small("IDENTITY", IDENTITY_BYTES_MAX).await {
        Ok(text) => Ok(String::from_utf8_lossy(&text).trim_end_matches('\n').to_owned()),
        Err(error) if lacks_resources(&error) => Err(Error::io("IDENTITY", &error)),
        Err(_) => Ok(String::new()),
    }
}

/// Where the logs are. Older versions of RocksDB always wrote `wal_dir`, and a copy of a database
/// still has the original's. So a `wal_dir` that has a CURRENT is not for logs alone: it is the
/// directory of another database.
///
/// # Errors
/// [`Kind::Unsupported`] if logs that count are elsewhere: they are not read.
pub(crate) async fn logs_at(
    core: &Core,
    dir: &Dir,
    stored: &StoredOptions,
    manifest: &ManifestState,
) -> Result<LogsAt> {
    let Some(named) = stored.db("wal_dir").filter(|named| Path::new(named) != dir.path()) else {
        return Ok(LogsAt::Here);
    };
    let entries = match core.list(Path::new(named)).await {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(LogsAt::Here),
        // It may be the original's, as above.
        Err(_) if stored.is_older() => return Ok(LogsAt::Elsewhere),
        Err(error) => return Err(Error::io(format_args!("cannot list {named} (wal_dir)"), &error)),
    };
    if entries.iter().any(|entry| entry.name == "CURRENT") {
        return Ok(LogsAt::Here);
    }
    let first = first_log(manifest);
    let counts = |entry: &DirEntry| {
        matches!(FileName::parse(&entry.name), Some(FileName::Wal(n)) if n >= first)
            && entry.size > 0
    };
    if entries.iter().any(counts) {
        return Err(Error::new(
            Kind::Unsupported,
            format!(
                "{}: its logs are in another directory, {named} (wal_dir), which is not supported: \
                 opening and closing it with RocksDB puts what is in them into tables",
                dir.path().display()
            ),
        ));
    }
    Ok(LogsAt::Elsewhere)
}
