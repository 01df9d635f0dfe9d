//! Creates a database, and takes one over for writing.

use std::io;
use std::sync::atomic::Ordering;

use fs::{Dir, DirEntry, LockGuard};
use reactor::Core;
use rocksfmt::{Comparator, FileName, LogWriter, ManifestReplay, ManifestState, VersionEdit};

use crate::db::Db;
use crate::error::{Error, Kind, Result};
use crate::options::WriteOptions;
use crate::stored_options::{OLDEST, OWN_OPTIONS};
use crate::write::commit::log_room;
use crate::write::manifest_writer::ManifestWriter;
use crate::write::obsolete::may_be_written_over;

/// The number of a new database's MANIFEST.
const FIRST_MANIFEST: u64 = 1;
/// The OPTIONS file of a new database.
pub(crate) const FIRST_OPTIONS: &str = "OPTIONS-000002";
/// The file that replaces CURRENT ([`Dir::replace_small`]).
pub(crate) const CURRENT_DRAFT: &str = "CURRENT.dbtmp";

/// The file with the number of the first file that an unfinished repair has made.
pub(crate) const JOURNAL: &str = "REPAIR";

/// Obsolete tables of as many bytes as this many memtables are kept for recycling.
const MEMTABLES_KEPT: u64 = 8;

/// Takes the lock that excludes every other user of the directory, including RocksDB.
pub(crate) async fn lock(dir: &Dir) -> Result<LockGuard> {
    dir.lock_exclusive("LOCK").await.map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => Error::new(
            Kind::Locked,
            format!(
                "cannot open {}: another process has this database open: close it there",
                dir.path().display()
            ),
        ),
        _ => Error::io(format_args!("cannot lock {}", dir.path().join("LOCK").display()), &e),
    })
}

/// Creates an empty database in a directory without one; the caller has asked `gate::may_create`.
/// Suspends for the disk.
pub(crate) async fn create(core: &Core, dir: &Dir, options: &WriteOptions) -> Result<()> {
    let io = |e: io::Error| {
        Error::io(format_args!("cannot create a database in {}", dir.path().display()), &e)
    };
    let identity = format!("{:016x}-{:016x}", core.random_u64(), core.random_u64());
    dir.write_small_atomically("IDENTITY", identity.as_bytes()).await.map_err(io)?;
    let name = FileName::Manifest(FIRST_MANIFEST).to_string();
    let mut bytes = Vec::new();
    LogWriter::new(None, 0).append(&first_edit(identity).encode(), &mut bytes);
    dir.write_small_atomically(&name, &bytes).await.map_err(io)?;
    if let Some(text) = options_text(options) {
        dir.write_small_atomically(FIRST_OPTIONS, text.as_bytes()).await.map_err(io)?;
    }
    dir.write_small_atomically("CURRENT", format!("{name}\n").as_bytes()).await.map_err(io)
}

/// The record of a new database's MANIFEST.
fn first_edit(identity: String) -> VersionEdit {
    VersionEdit {
        db_id: Some(identity),
        comparator: Some(Comparator::Bytewise.name().to_owned()),
        log_number: Some(0),
        next_file_number: Some(3),
        last_sequence: Some(0),
        keys: Some(0),
        ..VersionEdit::default()
    }
}

/// The number and the state of the MANIFEST of a database that is to be created.
pub(crate) fn first_state() -> Result<(u64, ManifestState)> {
    let mut replay = ManifestReplay::new();
    let state = replay.edit(first_edit(String::new())).and_then(|()| replay.finish());
    let state = state.map_err(|e| Error::format("the MANIFEST of a new database", &e))?;
    Ok((FIRST_MANIFEST, state))
}

/// The OPTIONS file of a new database, if it differs from RocksDB's defaults: it says how.
fn options_text(options: &WriteOptions) -> Option<String> {
    let (major, minor) = OLDEST;
    let mut lines: Vec<String> = options
        .column_family_options
        .iter()
        .map(|(key, value)| format!("  {key}={value}\n"))
        .collect();
    if let Some(operator) = &options.merge_operator {
        let operator = rocksfmt::escape_option(&operator.to_option());
        lines.push(format!("  merge_operator={operator}\n"));
    }
    if lines.is_empty() {
        return None;
    }
    Some(format!(
        "{OWN_OPTIONS}\n[Version]\n  rocksdb_version={major}.{minor}.0\n  \
         options_file_version=1.1\n\n[DBOptions]\n  create_if_missing=false\n\n\
         [CFOptions \"default\"]\n{}\n\
         [TableOptions/BlockBasedTable \"default\"]\n  \n",
        lines.concat()
    ))
}

/// Takes over an open directory: begins a new MANIFEST and removes files that nothing refers to,
/// except tables kept for recycling.
pub(crate) async fn take_over(
    core: &Core,
    dir: &Dir,
    db: &Db,
    options: &WriteOptions,
) -> Result<ManifestWriter> {
    let io = |e: io::Error| {
        Error::io(format_args!("cannot open {} for writing", dir.path().display()), &e)
    };
    let state = &db.0.manifest;
    let entries = dir.list().await.map_err(io)?;
    let mut next = state.next_number();
    for entry in &entries {
        if let Some(
            FileName::Wal(number)
            | FileName::Sst(number)
            | FileName::Blob(number)
            | FileName::Manifest(number)
            | FileName::Options(number)
            | FileName::Temp(number),
        ) = FileName::parse(&entry.name)
        {
            next = next.max(number.saturating_add(1));
        }
    }
    db.0.next_file.store(next + 1, Ordering::Relaxed);
    if entries.iter().any(|entry| entry.name == CURRENT_DRAFT) {
        // A crash leaves a file, which would be overwritten. A symbolic link would be followed.
        dir.remove(CURRENT_DRAFT).await.map_err(io)?;
    }
    db.0.recycled_tables.note_job(MEMTABLES_KEPT * options.memtable_bytes as u64);
    let mut manifest =
        ManifestWriter::new(core, dir, db.0.manifest_number, state, manifest_bytes(db, options));
    let mut begun = manifest.begin(next, next + 1).await;
    if is_full(&begun) {
        make_room(dir, db, &entries).await.map_err(io)?;
        begun = manifest.begin(next, next + 1).await;
    }
    if is_full(&begun) {
        tracing::warn!("{}: cannot begin a new MANIFEST: the disk is full", dir.path().display());
        // A power cut may undo the last changes of the old MANIFEST, so files that it calls
        // obsolete stay.
        return Ok(manifest);
    }
    begun?;
    manifest.take_obsolete();
    for entry in &dir.list().await.map_err(io)? {
        let tables = || state.column_families.values().flat_map(|family| family.files());
        let blobs = || state.column_families.values().flat_map(|family| family.live_blob_files());
        let gone = match FileName::parse(&entry.name) {
            Some(FileName::Temp(_)) if was_log(core, dir, entry, options).await => false,
            Some(FileName::Manifest(number)) => number != next,
            Some(FileName::Temp(_)) => true,
            // A repair is over.
            None if entry.name == JOURNAL => true,
            Some(FileName::Sst(number)) => tables().all(|(_, file)| file.number != number),
            Some(FileName::Blob(number)) => blobs().all(|blob| blob.number != number),
            _ => false,
        };
        if gone {
            discard(dir, db, entry).await;
        }
    }
    Ok(manifest)
}

/// Keeps an obsolete file for recycling, or removes it. One that remains does no harm: the next
/// opening tries again.
async fn discard(dir: &Dir, db: &Db, entry: &DirEntry) {
    let path = dir.path().join(&entry.name);
    if entry.is_dir {
        tracing::warn!(
            "{}: left alone: a directory with the name of an obsolete file",
            path.display()
        );
        return;
    }
    let number = match FileName::parse(&entry.name) {
        Some(FileName::Sst(number) | FileName::Temp(number)) => Some(number),
        _ => None,
    };
    let done = match number {
        Some(number)
            if db.0.recycled_tables.have_room(entry.size, db.0.recycled_tables.bytes_max()) =>
        {
            let spare = FileName::Temp(number).to_string();
            let renamed = dir.rename(&entry.name, &spare).await;
            renamed.map(|()| db.0.recycled_tables.put(number, entry.size))
        }
        _ => dir.remove(&entry.name).await,
    };
    if let Err(error) = done {
        tracing::warn!("{}: cannot remove the obsolete file: {error}", path.display());
    }
}

fn is_full(begun: &Result<()>) -> bool {
    begun.as_ref().is_err_and(|error| error.kind() == Kind::Full)
}

/// Removes files that no MANIFEST can name, not even after a crash: temporary files, and tables
/// newer than the last change.
async fn make_room(dir: &Dir, db: &Db, entries: &[DirEntry]) -> io::Result<()> {
    let state = &db.0.manifest;
    let tables = || state.column_families.values().flat_map(|family| family.files());
    for entry in entries.iter().filter(|entry| !entry.is_dir) {
        let gone = match FileName::parse(&entry.name) {
            Some(FileName::Temp(_)) => true,
            Some(FileName::Sst(number)) => {
                number >= state.next_file_number && tables().all(|(_, file)| file.number != number)
            }
            _ => false,
        };
        if gone {
            dir.remove(&entry.name).await?;
        }
    }
    Ok(())
}

/// Whether a temporary file is a log that an earlier process kept for recycling: the writer takes
/// it over.
async fn was_log(core: &Core, dir: &Dir, entry: &DirEntry, options: &WriteOptions) -> bool {
    entry.size <= 2 * log_room(options)
        && may_be_written_over(core, dir, &entry.name).await.unwrap_or(false)
}

/// The length at which a MANIFEST is replaced: ours, or RocksDB's if that is smaller.
fn manifest_bytes(db: &Db, options: &WriteOptions) -> u64 {
    let file = db.0.stored_options.file.as_ref();
    let said = file.and_then(|file| file.db("max_manifest_file_size"));
    let said = said.and_then(|text| text.parse().ok()).unwrap_or(u64::MAX);
    options.manifest_bytes.min(said)
}
