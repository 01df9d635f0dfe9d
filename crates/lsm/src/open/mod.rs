//! Opening: from a directory to a version, and whether it may be written to.
//!
//! `directory` looks at the directory first. `load` makes the state that all cores share:
//! `recovery_plan` decides from the MANIFEST and a listing what to read, `recover` reads it,
//! `wal_replay` and `log_chain` judge the logs, `blob_tails` the blob files that they refer to;
//! `unnamed` finds tables that a MANIFEST without its end does not name. An opening for writing
//! asks `gate` before it changes anything; then `create`, `adopt` and `long_logs` write, through
//! `write`.
//!
//! It may use `write`, `read` and what all rooms share. Only `inspect` uses it.

use std::path::Path;

use fs::Dir;
use reactor::Core;

use crate::db::Db;
use crate::error::Result;
use crate::open::directory::Contents;
use crate::open::gate::Consent;
use crate::open::load::{Loaded, Loader};
use crate::open::recovery_plan::first_log;
use crate::options::{OpenOptions, WriteOptions};
use crate::version::Slot;
use crate::write::writer::Writer;

pub(crate) mod adopt;
pub(crate) mod blob_tails;
pub(crate) mod create;
pub(crate) mod directory;
pub(crate) mod gate;
pub(crate) mod load;
pub(crate) mod log_chain;
pub(crate) mod long_logs;
pub(crate) mod outside;
pub(crate) mod recover;
pub(crate) mod recovery_plan;
pub(crate) mod sequential;
pub(crate) mod table_blocks;
pub(crate) mod unnamed;
pub(crate) mod wal_replay;
pub(crate) mod within;

/// Attempts to open a directory that another process changes meanwhile.
const SECONDARY_TRIES: u32 = 5;

impl Db {
    /// Opens the database in a directory for reading. Suspends for all its reads.
    ///
    /// Nothing is written. A LOCK file, if there is one, is locked shared, so that no RocksDB opens
    /// the directory for writing meanwhile. With `secondary` it is not locked, and readers get the
    /// state at the opening.
    ///
    /// # Errors
    /// [`NoDatabase`], [`Locked`], damage in CURRENT, MANIFEST or a log, an unsupported feature, or
    /// too little memory for its indexes.
    ///
    /// [`NoDatabase`]: crate::Kind::NoDatabase
    /// [`Locked`]: crate::Kind::Locked
    pub async fn open(core: &Core, path: &Path, options: OpenOptions) -> Result<Db> {
        let dir = Dir::new(core, path);
        let mut tries = 1;
        loop {
            let opened = Db::open_once(core, &dir, &options).await;
            match opened {
                // Its writer may have deleted files that the MANIFEST still named when it was read.
                Ok(db) if options.secondary && tries < SECONDARY_TRIES && db.lacks_tables() => {}
                Err(_) if options.secondary && tries < SECONDARY_TRIES => {}
                done => return done,
            }
            tries += 1;
        }
    }

    /// The database that [`Db::open_for_writing`] would create in a directory, which need not
    /// exist: nothing of it is on the disk.
    ///
    /// # Errors
    /// When this process lacks memory.
    pub async fn before_creation(
        core: &Core,
        path: &Path,
        options: &OpenOptions,
        write: &WriteOptions,
    ) -> Result<Db> {
        let (number, state) = create::first_state()?;
        let dir = Dir::new(core, path);
        let loader = Loader::new(core, &dir, options, None).with(write);
        Ok(loader.given(number, state, Vec::new()).load(None).await?.db)
    }

    async fn open_once(core: &Core, dir: &Dir, options: &OpenOptions) -> Result<Db> {
        recover::current(dir).await?;
        let lock = if options.secondary { None } else { Some(directory::lock_shared(dir).await?) };
        let loader = Loader::new(core, dir, options, None);
        Ok(loader.load(lock).await?.db)
    }

    fn lacks_tables(&self) -> bool {
        self.version().slots.iter().any(|slot| matches!(slot, Slot::Broken { .. }))
    }

    /// Opens the database in a directory for writing, with the one writer it may have. Suspends
    /// for all its reads, and for a new MANIFEST and a new log.
    ///
    /// Writes found in the log stay in memory and are written to tables in the background. Files
    /// that a crash left and nothing refers to are removed.
    ///
    /// # Errors
    /// As for [`Db::open`]; [`Locked`] also while another process reads the directory, and
    /// [`NoDatabase`] only if `create` is not set. [`Older`] if a RocksDB older than 7.8 wrote the
    /// database last and `adopt` is not set. An obstacle to writing (`gate.rs`) is reported before
    /// anything is changed.
    ///
    /// [`NoDatabase`]: crate::Kind::NoDatabase
    /// [`Locked`]: crate::Kind::Locked
    /// [`Older`]: crate::Kind::Older
    pub async fn open_for_writing(
        core: &Core,
        path: &Path,
        options: OpenOptions,
        write: WriteOptions,
    ) -> Result<(Db, Writer)> {
        let agrees = async |_: &Db| Ok(());
        let (db, writer, ()) = Db::open_for_writing_if(core, path, options, write, agrees).await?;
        Ok((db, writer))
    }

    /// The same, if the caller agrees with what is found, after the gate: the database, or the one
    /// that is to be created ([`Db::before_creation`]). It is asked before anything is changed,
    /// perhaps twice; its last answer is returned. Writes in logs that do not fit in memory are not
    /// visible yet.
    ///
    /// # Errors
    /// As for [`Db::open_for_writing`], and those of the caller.
    pub async fn open_for_writing_if<T>(
        core: &Core,
        path: &Path,
        options: OpenOptions,
        write: WriteOptions,
        agrees: impl AsyncFn(&Db) -> Result<T>,
    ) -> Result<(Db, Writer, T)> {
        let dir = Dir::new(core, path);
        let consent = Consent { adopt: write.adopt };
        let loader = || Loader::new(core, &dir, &options, Some(consent)).with(&write);
        let to_be_created = async || Db::before_creation(core, path, &options, &write).await;
        // A directory that is refused stays as it was, without a LOCK file if it had none.
        match directory::contents(&dir, write.create).await? {
            Contents::UnlockedDatabase => drop(agrees(&loader().load(None).await?.db).await?),
            Contents::Nothing => drop(agrees(&to_be_created().await?).await?),
            Contents::Database => {}
        }
        let lock = create::lock(&dir).await?;
        let mut answer = None;
        if directory::contents(&dir, write.create).await? == Contents::Nothing {
            answer = Some(agrees(&to_be_created().await?).await?);
            create::create(core, &dir, &write).await?;
        }
        let Loaded { db, long_logs, blob_tails } = loader().load(Some(lock)).await?;
        let answer = match answer {
            Some(answer) => answer,
            None => agrees(&db).await?,
        };
        adopt::note(&dir, &db).await?;
        let manifest = create::take_over(core, &dir, &db, &write).await?;
        // Without a new MANIFEST a power cut may restore an older state, which needs more logs.
        let needed_from = if manifest.is_begun() { first_log(&db.0.manifest) } else { 0 };
        let writer = Writer::new(core, &dir, &db, write, manifest);
        writer.take_over_logs(needed_from).await?;
        blob_tails::seal(&writer.0, &blob_tails).await?;
        let keys = match &long_logs {
            Some(logs) => {
                long_logs::to_tables(&writer.0, logs).await?;
                Some(0)
            }
            None => {
                let keys = db.keys().zip(db.0.manifest.keys);
                keys.and_then(|(now, before)| now.checked_signed_diff(before))
            }
        };
        writer.start(keys).await?;
        Ok((db, writer, answer))
    }
}
