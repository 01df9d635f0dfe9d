//! Logs larger than the memory for recovery: the opening turns them into tables, piece by piece.
//!
//! 1. The opening has replayed them once without keeping anything, so that damage and unsupported
//!    contents are found before anything is written.
//! 2. [`to_tables`] replays them again. Each piece that fits into memory becomes one table for each
//!    column family that it writes to.
//! 3. When a piece ends together with a log, and the names of the tables are durable, one change of
//!    the MANIFEST adds the tables and drops the logs up to there. Then these logs are removed,
//!    which makes room for the next piece.
//!
//! If the disk is full, all files kept for recycling are removed, and from then on each log is a
//! piece.
//!
//! Nobody reads or writes during this. A crash leaves the logs that no change has covered, and
//! perhaps unnamed tables, which the next opening removes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use fs::NamesMark;
use rocksfmt::ManifestState;

use crate::error::{Error, Kind, Result};
use crate::mem::Mem;
use crate::mem::recovered::Sorting;
use crate::open::recover::{self, Border, Piece};
use crate::open::recovery_plan::RecoveryPlan;
use crate::table::Table;
use crate::version::{Family, Version};
use crate::write::blob_garbage::BlobMeter;
use crate::write::flush::{self, Flushed};
use crate::write::job::{Job, MadeFiles, remove_made};
use crate::write::pace::{BusyTime, Pace};
use crate::write::state::{Generation, WriteState};

/// Turns the logs into tables. Suspends for the disk.
///
/// # Errors
/// [`Kind::Full`] if the tables of a log do not fit: the unfinished tables are removed, and logs
/// that are in no table stay unchanged.
pub(crate) async fn to_tables(writes: &WriteState, logs: &RecoveryPlan) -> Result<()> {
    let job = Job {
        core: writes.core.clone(),
        dir: writes.dir.clone(),
        db: writes.db.clone(),
        compression: writes.options.compression,
        made: MadeFiles::default(),
        busy: BusyTime::default(),
    };
    let mut pieces = Pieces {
        writes,
        version: writes.db.version(),
        first_log: Cell::new(writes.db.0.manifest.min_log_number_to_keep),
        last_sequence: Cell::new(writes.db.0.manifest.last_sequence),
        keys: Cell::new(0),
        tables: RefCell::default(),
        blobs: RefCell::default(),
        job,
        is_tight: false,
        mark: writes.dir.mark(),
    };
    let half = Some(writes.db.options().recovered_bytes as u64 / 2);
    let mut rest = RecoveryPlan { border_bytes: half, ..logs.clone() };
    let mut state = writes.db.0.manifest.clone();
    while let Err(error) = pieces.of(&rest, &state).await {
        remove_made(&writes.dir, pieces.job.made.take().into_iter()).await;
        pieces.tables.take();
        pieces.blobs.take();
        // Earlier logs are in tables.
        rest.logs.retain(|log| log.number >= pieces.first_log.get());
        if error.kind() != Kind::Full {
            return Err(error);
        }
        if pieces.is_tight {
            return Err(no_room(writes, &rest, &error));
        }
        state.min_log_number_to_keep = pieces.first_log.get();
        state.last_sequence = state.last_sequence.max(pieces.last_sequence.get());
        pieces.is_tight = true;
        rest.border_bytes = Some(0);
        writes.remove_recycled().await;
    }
    tracing::info!(
        bytes = logs.log_bytes(),
        "made tables of write-ahead logs that exceed the memory for recovery"
    );
    Ok(())
}

/// The error when tables of the first log do not fit.
fn no_room(writes: &WriteState, rest: &RecoveryPlan, error: &Error) -> Error {
    let first = rest.logs.first();
    Error::new(
        Kind::Full,
        format!(
            "{}: cannot recover {} MiB of write-ahead logs: they exceed the {} MiB of memory for this, and the \
             disk is full: {error}. Free {} bytes on this disk, or raise --memory",
            writes.dir.path().display(),
            rest.log_bytes() >> 20,
            writes.db.options().recovered_bytes >> 20,
            first.map_or(0, |log| log.size_bytes),
        ),
    )
}

/// The progress of the conversion.
struct Pieces<'a> {
    writes: &'a WriteState,
    job: Job,
    version: Arc<Version>,
    /// The first log that is needed, by the MANIFEST.
    first_log: Cell<u64>,
    /// The last sequence before it.
    last_sequence: Cell<u64>,
    /// Change of the number of keys by the logs that are in tables.
    keys: Cell<i64>,
    /// Tables that the MANIFEST does not name yet, by family, oldest first.
    tables: RefCell<BTreeMap<u32, Vec<Table>>>,
    /// The references to blob files in these logs and tables.
    blobs: RefCell<BlobMeter>,
    /// Whether the disk was full.
    is_tight: bool,
    mark: NamesMark,
}

impl Pieces<'_> {
    /// Makes tables of these logs, which begin after everything that is in tables.
    async fn of(&self, logs: &RecoveryPlan, state: &ManifestState) -> Result<()> {
        let (writes, options) = (self.writes, self.writes.db.options());
        // The opening has already reported them.
        let mut warnings = Vec::new();
        let before = self.keys.get();
        let counted = |keys: Option<i64>| keys.and_then(|keys| keys.checked_add(before));
        let piece = async |piece: Piece| {
            self.write(piece.memtables).await?;
            match piece.border {
                Some(Border { next_log, last_sequence, keys }) => {
                    self.install(next_log, last_sequence, counted(keys)).await?;
                }
                None => return Ok(()),
            }
            if self.is_tight {
                writes.remove_recycled().await;
            }
            Ok(())
        };
        let (core, dir) = (&writes.core, &writes.dir);
        let rest = recover::logs(core, dir, logs, state, options, &mut warnings, piece);
        let rest = rest.await?;
        self.write(rest.memtables).await?;
        self.install(writes.db.new_number(), rest.last_sequence, counted(rest.keys)).await
    }

    /// Makes tables of a piece.
    async fn write(&self, piece: BTreeMap<u32, Sorting>) -> Result<()> {
        let pace = Arc::<Pace>::default();
        for (id, mut sorting) in piece {
            let family = self.version.families.find(id);
            let Some(family) = family.filter(|family| family.refused.is_none()) else { continue };
            while sorting.step() {
                self.job.core.checkpoint().await;
            }
            let mem = Mem::Recovered(sorting.finish());
            let mut blobs = self.blobs.take();
            let table = flush::table(&self.job, family, &mem, 0, &pace, &mut blobs, None).await?;
            self.blobs.replace(blobs);
            self.tables.borrow_mut().entry(id).or_default().push(table);
        }
        Ok(())
    }

    /// Replaces the logs below `next_log`, which end with `last_sequence`, with the tables. All
    /// logs so far change the number of keys by `keys`.
    async fn install(&self, next_log: u64, last_sequence: u64, keys: Option<i64>) -> Result<()> {
        let writes = self.writes;
        writes.sync_names(self.mark).await?;
        // Only a replay of both logs detects a gap between them.
        let keys = writes.db.keys().and(keys);
        let change = keys.and_then(|keys| keys.checked_sub(self.keys.get()));
        let covered = Generation {
            mems: Vec::new(),
            log_number: None,
            log_failed: false,
            keys: change,
            log: None,
            next_log,
            last_sequence,
            began: 0,
            blob_bytes: BTreeMap::new(),
        };
        let mut tables = self.tables.take();
        let blobs = self.blobs.take();
        // A family without tables no longer needs the logs either.
        let flushed = |family: &Arc<Family>| Flushed {
            id: family.id,
            mems: Vec::new(),
            tables: tables.remove(&family.id).unwrap_or_default(),
            // Blob files belong to one family each.
            blobs: blobs.clone(),
        };
        let served = self.version.families.iter().filter(|family| family.refused.is_none());
        let all = served.map(flushed).collect();
        let made = self.job.made.take();
        let installed = flush::install(writes, &covered, all, true).await;
        if installed.as_ref().is_err_and(|error| error.kind() == Kind::Full) {
            // Now, to make room: the task that removes files has not begun.
            remove_made(&writes.dir, made.into_iter()).await;
        }
        installed?;
        self.first_log.set(next_log);
        self.last_sequence.set(last_sequence);
        self.keys.set(keys.unwrap_or(0));
        writes.remove_logs(next_log).await;
        Ok(())
    }
}
