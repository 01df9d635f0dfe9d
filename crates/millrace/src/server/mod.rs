//! What runs on the cores of a database: the engine, and the poller that takes the callers'
//! requests.
//!
//! 1. Each core installs its [`Hall`] and a poller over its inboxes (`receiver.rs`).
//! 2. Core 0 creates the missing directories, opens the database, gives each core a reader, and
//!    sends all doors to the opener.
//! 3. The poller answers what is in memory at once; everything else is a task of the core
//!    (`reads.rs`, `writes.rs`, `cursors.rs`).
//! 4. When the last handle is dropped or the database is closed, the poller takes what has been
//!    sent and no more, the cores finish what is running, and core 0 closes the writer. The threads
//!    end, and the callers' readers are dropped (`near.rs`), which releases the lock of the
//!    directory.
//!
//! If a thread panics, the reactor drops its tasks and poller, and so every request that it had:
//! their callers get an error. The others see [`Shared::has_failed`] and stop as in step 4.
//!
//! It uses `request`, `door` and `shared`; nothing here runs on the callers' threads.

mod cursors;
mod hall;
mod reads;
mod receiver;
mod writes;

use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use lsm::{Db, OpenOptions, SharedReader, WriteOptions, Writer};
use reactor::{Class, Core, Either, race, timeout};

use self::hall::Hall;
use crate::door::Door;
use crate::error::{Error, Result};
use crate::request::Read;
use crate::shared::{Opened, Shared};

/// How long the writer is closed if a core has panicked: a merge that ran there never ends.
const CLOSE_NS: u64 = 5_000_000_000;

/// What the cores are started with.
#[derive(Clone)]
pub(crate) struct Plan {
    pub shared: Arc<Shared>,
    pub open: OpenOptions,
    pub write: WriteOptions,
    /// For batches that are not committed.
    pub batch_bytes: usize,
}

/// A core's main task. Returns how the database was closed.
pub(crate) async fn run_core(core: Core, plan: Arc<Plan>) -> Result<()> {
    let hall = Hall::of(&core, &plan);
    let mut writer = None;
    if core.id() == 0 {
        // Nobody else stops a database that is being opened: then another core has failed, and
        // may never answer.
        let failed = hall.changed.wait_until(|| hall.stopping.get());
        match race(Box::pin(open(&core, &plan)), failed).await {
            Either::First(Ok((opened, opened_writer))) => {
                writer = Some(opened_writer);
                plan.shared.opened(Ok(opened));
            }
            Either::First(Err(error)) => {
                plan.shared.opened(Err(error));
                plan.shared.stop();
            }
            // Whoever started the cores tells why.
            Either::Second(()) => {}
        }
    }
    hall.finished().await;
    if core.id() == 0 {
        plan.shared.near.close();
    }
    let Some(writer) = writer else { return Ok(()) };
    let closed = match plan.shared.has_failed() {
        false => writer.close().await,
        true => timeout(&core, CLOSE_NS, Box::pin(writer.close())).await.unwrap_or(Ok(())),
    };
    closed.map_err(Error::from)
}

/// Opens the database, and the doors of all cores.
async fn open(core: &Core, plan: &Arc<Plan>) -> Result<(Opened, Writer)> {
    let path = &plan.shared.path;
    if plan.write.create {
        make_directories(core, path).await.map_err(|error| {
            let what = format_args!("cannot create directory {}", path.display());
            Error::from(lsm::Error::io(what, &error))
        })?;
    }
    let (open, write) = (plan.open.clone(), plan.write.clone());
    let (db, writer) = Db::open_for_writing(core, path, open, write).await?;
    let writes = Hall::of(core, plan).serve_writes(&writer);
    let mut reads = Vec::with_capacity(core.cores());
    let mut near = Vec::with_capacity(core.cores());
    for id in 0..core.cores() {
        let (db, plan) = (db.clone(), plan.clone());
        let (door, reader) = core.call(id, move |there| serve_reads(there, &plan, &db)).await;
        reads.push(door);
        near.extend(reader);
    }
    plan.shared.near.open(near);
    Ok((Opened { reads, writes }, writer))
}

/// Makes a core answer reads, and lets callers read its cache.
fn serve_reads(core: &Core, plan: &Arc<Plan>, db: &Db) -> (Door<Read>, Option<SharedReader>) {
    let reader = db.attach(core);
    let shared = reader.shared();
    (Hall::of(core, plan).serve_reads(reader), shared)
}

/// Creates a directory and those above it that are missing, durably.
async fn make_directories(core: &Core, path: &Path) -> io::Result<()> {
    let is_missing = async |path: &Path| {
        core.list(path).await.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    let mut missing = Vec::new();
    let mut next = Some(path);
    while let Some(path) = next.filter(|path| !path.as_os_str().is_empty()) {
        if !is_missing(path).await {
            break;
        }
        missing.push(path);
        next = path.parent();
    }
    for path in missing.into_iter().rev() {
        match core.create_dir(path).await {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        core.sync_dir(parent.unwrap_or(Path::new("."))).await?;
    }
    Ok(())
}

/// Starts a task for a request.
fn spawn(hall: &Rc<Hall>, work: impl Future<Output = ()> + 'static) {
    hall.core.spawn(Class::Foreground, work);
}
