//! Reads CURRENT, the MANIFEST and the logs of a directory. Writes nothing.
//!
//! A log that ends in a torn record ends there, as in RocksDB. A log of ours may end in a torn
//! group of records; records after the first gap in it are not taken. Damage followed by valid
//! newer records is not a torn tail: stock RocksDB silently drops those records; we refuse the log,
//! name file and offset, and serve only the part before it if told to (`salvage`).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use fs::Dir;
use reactor::Core;
use rocksfmt::{
    DamageScan, FileName, LOG_BLOCK_BYTES, LaterRecord, LogEnd, LogKind, LogReader, LogRecord,
    ManifestReplay, ManifestState, Marker, Op, VersionEdit, WriteBatch, is_torn_group,
    parse_current,
};

use crate::error::{Error, Kind, Result};
use crate::mem::recovered::Sorting;
use crate::open::recovery_plan::{PlannedLog, RecoveryPlan};
use crate::open::wal_replay::{Replayed, WalReplay};
use crate::options::OpenOptions;

/// Bytes of a log read at a time: whole log blocks.
const PIECE: usize = 32 * LOG_BLOCK_BYTES;

/// Linux's error numbers for a loop of symbolic links, and for a socket that is opened.
const ELOOP: i32 = 40;
const ENXIO: i32 = 6;

/// The number of the MANIFEST that CURRENT names.
pub(crate) async fn current(dir: &Dir) -> Result<u64> {
    let text = match dir.read_small("CURRENT", 4096).await {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::new(
                Kind::NoDatabase,
                format!(
                    "{}: no RocksDB database here (there is no CURRENT file)",
                    dir.path().display()
                ),
            ));
        }
        Err(e) => {
            let name = dir.path().join("CURRENT");
            return Err(match e.kind() {
                std::io::ErrorKind::IsADirectory => Error::new(
                    Kind::Corruption,
                    format!(
                        "{}: expected a file with the name of the MANIFEST, found a directory",
                        name.display()
                    ),
                ),
                // A loop of symbolic links, or a pipe or a socket.
                _ if e.raw_os_error() == Some(ELOOP)
                    || matches!(e.kind(), std::io::ErrorKind::InvalidInput)
                    || e.raw_os_error() == Some(ENXIO) =>
                {
                    Error::new(
                        Kind::Corruption,
                        format!(
                            "{}: expected a file with the name of the MANIFEST: {e}",
                            name.display()
                        ),
                    )
                }
                std::io::ErrorKind::InvalidData => Error::new(
                    Kind::Corruption,
                    format!("{}: expected only the name of the MANIFEST: {e}", name.display()),
                ),
                _ => Error::io(format_args!("cannot read {}", name.display()), &e),
            });
        }
    };
    parse_current(&text).map_err(|e| Error::format("CURRENT", &e))
}

/// Feeds a whole log to a reader, piece by piece, until the reader knows its end. Calls `between`
/// after every piece.
pub(crate) async fn feed(
    core: &Core,
    dir: &Dir,
    name: &str,
    reader: &mut LogReader,
    mut each: impl FnMut(LogRecord<'_>) -> Result<()>,
    mut between: impl AsyncFnMut() -> Result<()>,
) -> Result<()> {
    let shared = dir.open(name).await.map_err(|e| Error::io(format_args!("{name}"), &e))?;
    let file = core.attach(&shared);
    let size = shared.size();
    let mut offset = 0;
    if size == 0 {
        return reader.feed(&[], true, &mut each);
    }
    let mut ahead: Option<fs::Reading> = None;
    while offset < size && reader.end().is_none() {
        let len = (size - offset).min(PIECE as u64) as usize;
        let place = |e: &std::io::Error| Error::io(format_args!("{name} at offset {offset}"), e);
        let piece = match ahead.take() {
            Some(reading) => reading.await,
            None => fs::read(&file, offset, len).await,
        }
        .map_err(|e| place(&e))?;
        let next = offset + len as u64;
        if next < size {
            let len = (size - next).min(PIECE as u64) as usize;
            ahead = fs::start_read(&file, next, len).map_err(|e| place(&e))?;
        }
        reader.feed(&piece, next == size, &mut each)?;
        drop(piece);
        between().await?;
        offset = next;
    }
    Ok(())
}

/// Replays a MANIFEST.
pub(crate) async fn manifest(core: &Core, dir: &Dir, name: &str) -> Result<ManifestState> {
    let mut reader = LogReader::new(LogKind::Manifest);
    let mut replay = ManifestReplay::new();
    let each = |record: LogRecord<'_>| {
        replay
            .record(record.data)
            .map_err(|e| Error::format(format_args!("{name} at offset {}", record.offset), &e))
    };
    feed(core, dir, name, &mut reader, each, async || Ok(())).await?;
    match reader.end() {
        Some(LogEnd::Damage { offset, what }) => {
            Err(Error::new(Kind::Corruption, format!("{name} at offset {offset}: {what}")))
        }
        Some(LogEnd::Unsupported { offset, what }) => {
            Err(Error::new(Kind::Unsupported, format!("{name} at offset {offset}: {what}")))
        }
        Some(LogEnd::Truncated { offset } | LogEnd::StaleTail { offset }) => {
            // A killed writer leaves a torn last record. It is damage if more follows that is not
            // of the same group.
            let mut scan = DamageScan::new(&reader, *offset, 0);
            let mut later = find_later(core, dir, name, &mut scan).await?;
            if later.is_some() && ends_in_torn_group(core, dir, name, *offset).await? {
                let block_ends = scan.start() + LOG_BLOCK_BYTES as u64;
                let mut scan = DamageScan::new(&reader, block_ends, 0);
                later = find_later(core, dir, name, &mut scan).await?;
            }
            if let Some(later) = later {
                return Err(Error::new(
                    Kind::Corruption,
                    format!(
                        "{name} at offset {offset}: a record is cut short, but a valid one \
                         follows at {}",
                        later.offset
                    ),
                ));
            }
            replay.finish().map_err(|e| Error::format(name, &e))
        }
        _ => replay.finish().map_err(|e| Error::format(name, &e)),
    }
}

/// The numbers of the tables that records of a MANIFEST remove.
pub(crate) async fn removed_tables(core: &Core, dir: &Dir, name: &str) -> Result<BTreeSet<u64>> {
    let mut reader = LogReader::new(LogKind::Manifest);
    let mut removed = BTreeSet::new();
    let each = |record: LogRecord<'_>| {
        if let Ok(edit) = VersionEdit::decode(record.data) {
            removed.extend(edit.deleted_files.iter().map(|&(_, number)| number));
        }
        Ok(())
    };
    feed(core, dir, name, &mut reader, each, async || Ok(())).await?;
    Ok(removed)
}

/// The sequence that the first record of a log has; `None` if it has no record.
pub(crate) async fn first_sequence(
    core: &Core,
    dir: &Dir,
    name: &str,
    number: u64,
) -> Result<Option<u64>> {
    let mut reader = LogReader::new(LogKind::Wal { number });
    let (mut first, seen) = (None, Error::new(Kind::Corruption, "the first record was read"));
    let each = |record: LogRecord<'_>| match WriteBatch::parse(record.data) {
        Ok(batch) => {
            first = Some(batch.sequence());
            Err(seen.clone())
        }
        Err(_) => Err(seen.clone()),
    };
    match feed(core, dir, name, &mut reader, each, async || Ok(())).await {
        Err(error) if error.kind() != Kind::Corruption => Err(error),
        _ => Ok(first),
    }
}

/// Everything replayed since the previous piece.
pub(crate) struct Piece {
    pub memtables: BTreeMap<u32, Sorting>,
    /// Set if the piece ends with a log.
    pub border: Option<Border>,
}

/// The border between two logs.
pub(crate) struct Border {
    /// The next log.
    pub next_log: u64,
    /// The last sequence before it.
    pub last_sequence: u64,
    /// Change of the number of keys of the default column family by all logs before it, if known.
    pub keys: Option<i64>,
}

/// Replays the logs that are needed. Whenever more is held than memory allows (`recovered_bytes`),
/// `piece` gets everything replayed since its last call, oldest first; the rest is returned. A log
/// that has begun in an earlier piece also ends a piece, and so do others if the plan says so
/// (`border_bytes`).
pub(crate) async fn logs(
    core: &Core,
    dir: &Dir,
    plan: &RecoveryPlan,
    state: &ManifestState,
    options: &OpenOptions,
    warnings: &mut Vec<String>,
    mut piece: impl AsyncFnMut(Piece) -> Result<()>,
) -> Result<Replayed> {
    let mut replay = WalReplay::new(state, options.recovered_bytes as u64);
    replay.memtables.expect(plan.log_bytes());
    if plan.empty_logs_may_count {
        replay.empty_logs_may_count();
    }
    if plan.logs_are_alone {
        replay.logs_are_alone();
    }
    replay.blob_tails.clone_from(&plan.blob_tails);
    let replay = RefCell::new(replay);
    let mut salvaged = false;
    let mut is_begun = false;
    for (at, log) in plan.logs.iter().enumerate() {
        let read = async {
            let between = async || {
                if !replay.borrow().memtables.are_full() {
                    return Ok(());
                }
                is_begun = true;
                let memtables = replay.borrow_mut().memtables.take_piece();
                piece(Piece { memtables, border: None }).await
            };
            replay_log(core, dir, log, &replay, between).await?;
            let Some(next) = plan.logs.get(at + 1) else { return Ok(()) };
            if !is_begun
                && plan.border_bytes.is_none_or(|bytes| replay.borrow().memtables.held() < bytes)
            {
                return Ok(());
            }
            is_begun = false;
            let memtables = replay.borrow_mut().memtables.take_piece();
            let (keys, last_sequence) = (replay.borrow().keys(), replay.borrow().last_sequence());
            let border = Border { next_log: next.number, last_sequence, keys };
            piece(Piece { memtables, border: Some(border) }).await
        };
        match read.await {
            Ok(()) => {}
            Err(error) if options.salvage && error.kind() == Kind::Corruption => {
                warnings.push(format!("{error}; the rest of the logs is not served"));
                salvaged = true;
                break;
            }
            Err(error) if replay.borrow().lacks_values => {
                warnings.push(format!("{error}: the log ends there, as after a power cut"));
                salvaged = true;
                break;
            }
            Err(error) if error.kind() == Kind::Corruption => {
                return Err(Error::new(
                    Kind::Corruption,
                    format!("{error}; open with --salvage to serve everything before it"),
                ));
            }
            Err(error) => return Err(error),
        }
    }
    let mut replayed = replay.into_inner().finish();
    replayed.leftovers |= salvaged;
    warnings.append(&mut replayed.warnings);
    trace(&replayed, plan);
    Ok(replayed)
}

fn trace(replayed: &Replayed, plan: &RecoveryPlan) {
    tracing::debug!(
        "replayed {} operations from {} bytes of log",
        replayed.operations,
        plan.log_bytes()
    );
    for (number, end) in &replayed.tails {
        tracing::info!("{}: ends early, as after a crash: {end:?}", FileName::Wal(*number));
    }
}

/// Replays one log and judges its end. Calls `between` after every piece of the file.
async fn replay_log(
    core: &Core,
    dir: &Dir,
    log: &PlannedLog,
    replay: &RefCell<WalReplay>,
    between: impl AsyncFnMut() -> Result<()>,
) -> Result<()> {
    let mut reader = replay.borrow_mut().begin(log.number);
    let each = |record: LogRecord<'_>| replay.borrow_mut().record(record);
    feed(core, dir, &log.name, &mut reader, each, between).await?;
    let mut scan = replay.borrow().scan(&reader);
    let later = match &mut scan {
        Some(scan) => find_later(core, dir, &log.name, scan).await?,
        None => None,
    };
    replay.borrow_mut().end(&reader, scan.as_ref(), later)
}

/// Searches logs that all families have flushed and that are kept only for this, for transactions
/// that were prepared but not ended. Returns the obstacle, if any.
pub(crate) async fn prepared(
    core: &Core,
    dir: &Dir,
    kept: &[PlannedLog],
) -> Result<Option<String>> {
    let mut open = BTreeSet::new();
    for log in kept {
        if let Some(damage) = find_prepared(core, dir, log, &mut open).await? {
            return Ok(Some(format!(
                "{} is kept for prepared transactions (allow_2pc), but cannot be read: {damage}. \
                 Open and close the database once with DB::Open, without allow_2pc, to remove it",
                log.name
            )));
        }
    }
    Ok(open.first().map(|name| {
        format!(
            "a log that all column families have flushed holds {} prepared transactions \
             (allow_2pc), for example {:?}: commit them or roll them back with TransactionDB",
            open.len(),
            String::from_utf8_lossy(&name[..name.len().min(64)])
        )
    }))
}

/// Follows prepared transactions through a log: `open` has those that are not ended. Returns the
/// damage, if the log has any.
async fn find_prepared(
    core: &Core,
    dir: &Dir,
    log: &PlannedLog,
    open: &mut BTreeSet<Vec<u8>>,
) -> Result<Option<String>> {
    let mut reader = LogReader::new(LogKind::Wal { number: log.number });
    let each = |record: LogRecord<'_>| {
        let format = |e| Error::format(format_args!("{} at {}", log.name, record.offset), &e);
        for op in WriteBatch::parse(record.data).map_err(format)?.ops() {
            let Op::Marker(marker) = op.map_err(format)?.1 else { continue };
            match marker {
                Marker::EndPrepare(name) => drop(open.insert(name.to_vec())),
                Marker::Commit(name)
                | Marker::CommitWithTimestamp { name, .. }
                | Marker::Rollback(name) => drop(open.remove(name)),
                // The end of the section has the name.
                Marker::BeginPrepare | Marker::BeginPersistedPrepare | Marker::BeginUnprepare => {}
            }
        }
        Ok(())
    };
    let read = feed(core, dir, &log.name, &mut reader, each, async || Ok(())).await;
    match (read, reader.end()) {
        (Err(error), _) if [Kind::Corruption, Kind::Unsupported].contains(&error.kind()) => {
            Ok(Some(error.to_string()))
        }
        (Err(error), _) => Err(error),
        (Ok(()), Some(LogEnd::Clean)) => Ok(None),
        (Ok(()), Some(LogEnd::Truncated { offset } | LogEnd::StaleTail { offset })) => {
            let mut scan = DamageScan::new(&reader, *offset, 0);
            let later = find_later(core, dir, &log.name, &mut scan).await?;
            Ok(later.map(|later| {
                format!(
                    "{} at {offset}: damage before a valid record at {}",
                    log.name, later.offset
                )
            }))
        }
        (Ok(()), end) => Ok(Some(format!("{}: {end:?}", log.name))),
    }
}

/// Whether everything in the MANIFEST after `offset`, within its block, belongs to one atomic
/// group.
async fn ends_in_torn_group(core: &Core, dir: &Dir, name: &str, offset: u64) -> Result<bool> {
    let place = |e: std::io::Error| Error::io(format_args!("{name} at offset {offset}"), &e);
    let shared = dir.open(name).await.map_err(place)?;
    let at = offset as usize % LOG_BLOCK_BYTES;
    let start = offset - at as u64;
    let len = (shared.size() - start).min(LOG_BLOCK_BYTES as u64) as usize;
    let block = fs::read(&core.attach(&shared), start, len).await.map_err(place)?;
    Ok(is_torn_group(&block, at + 1))
}

/// Searches the rest of a log for valid records newer than its first damage.
pub(crate) async fn find_later(
    core: &Core,
    dir: &Dir,
    name: &str,
    scan: &mut DamageScan,
) -> Result<Option<LaterRecord>> {
    let shared = dir.open(name).await.map_err(|e| Error::io(format_args!("{name}"), &e))?;
    let file = core.attach(&shared);
    let mut offset = scan.start();
    while offset < shared.size() {
        let len = (shared.size() - offset).min(PIECE as u64) as usize;
        let piece = fs::read(&file, offset, len)
            .await
            .map_err(|e| Error::io(format_args!("{name} at offset {offset}"), &e))?;
        if let Some(later) = scan.push(offset, &piece) {
            return Ok(Some(later));
        }
        offset += len as u64;
    }
    Ok(None)
}
