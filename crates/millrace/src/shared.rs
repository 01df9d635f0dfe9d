//! What the handles and the cores of one database share: only its beginning and its end. Requests
//! go through the doors.
//!
//! The locks here are taken when a database is opened or closed, never for a request.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use reactor::reply::ReplySender;
use reactor::waiters::Waiters;
use reactor::{Bell, fork_generation};

use crate::door::Door;
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::near::Near;
use crate::options::Options;
use crate::request::{Read, Write};
use crate::server::{Plan, run_core};

#[expect(clippy::disallowed_types, reason = "taken at the opening and the end only")]
type Mutex<T> = std::sync::Mutex<T>;

/// The doors of an opened database.
pub(crate) struct Opened {
    pub reads: Vec<Door<Read>>,
    pub writes: Door<Write>,
}

/// The beginning and the end of a database.
pub(crate) struct Shared {
    pub path: PathBuf,
    /// Another for each opening.
    pub number: u64,
    /// See [`fork_generation`].
    generation: u64,
    stopping: AtomicBool,
    failed: AtomicBool,
    bells: Mutex<Vec<Bell>>,
    /// Where the outcome of the opening goes, until it is known.
    opener: Mutex<Option<ReplySender<Result<Engine>>>>,
    /// How it ended, after all threads did.
    outcome: OnceLock<Result<()>>,
    ended: Waiters,
    /// What callers look up themselves.
    pub near: Near,
}

fn locked<T, R>(mutex: &Mutex<T>, change: impl FnOnce(&mut T) -> R) -> R {
    change(&mut mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

impl Shared {
    /// Whether this process has the threads of the database: a forked child does not.
    #[inline]
    pub fn is_here(&self) -> bool {
        self.generation == fork_generation()
    }

    /// Whether the database is being closed, or is closed.
    #[inline]
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Whether it is being opened, and the opener has given up: it is closed when it is open.
    fn is_abandoned(&self) -> bool {
        locked(&self.opener, |opener| opener.as_ref().is_some_and(|opener| !opener.is_awaited()))
    }

    /// Whether one of its threads has panicked.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Tells all cores to stop.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        for bell in locked(&self.bells, |bells| bells.clone()) {
            bell.ring();
        }
    }

    /// A core has a bell.
    pub fn add_bell(&self, bell: Bell) {
        locked(&self.bells, |bells| bells.push(bell));
    }

    /// Hands the opened database, or why it was not opened, to the opener.
    pub fn opened(self: &Arc<Shared>, outcome: Result<Opened>) {
        if let Some(opener) = locked(&self.opener, Option::take) {
            // If the opener has given up, this drops the only handle, which closes the database.
            opener.send(outcome.map(|opened| Engine::new(self.clone(), opened)));
        }
    }

    /// Waits until all threads of the database have ended, and returns how it was closed.
    pub async fn end(&self) -> Result<()> {
        self.ended.wait_for(|| self.outcome.get().cloned()).await
    }

    fn set_end(self: &Arc<Shared>, outcome: Result<()>) {
        locked(&OPEN, |open| open.retain(|other| !Arc::ptr_eq(other, self)));
        if let Err(error) = &outcome {
            self.opened(Err(error.clone()));
        }
        let _first = self.outcome.set(outcome);
        self.ended.notify_all();
    }

    /// Why a request has no answer.
    #[cold]
    pub fn no_answer(&self) -> Error {
        if self.has_failed() {
            return panicked();
        }
        Error::new(ErrorKind::Closed, "the database was closed")
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.is_here() {
            self.near.forget();
        }
    }
}

/// The error of calls that a panic has ended.
#[cold]
pub(crate) fn panicked() -> Error {
    let text = "a thread of the database panicked: it is closed and can be opened again";
    Error::new(ErrorKind::Panicked, text)
}

/// Openings so far.
static OPENINGS: AtomicU64 = AtomicU64::new(0);

/// The databases of this process.
static OPEN: Mutex<Vec<Arc<Shared>>> = Mutex::new(Vec::new());

/// Dropped with each core's thread, whatever ends it. A core that ends before the database is being
/// closed could not be started, or has panicked: then the others stop, too.
#[derive(Clone)]
struct EndOfThread(Arc<Shared>);

impl Drop for EndOfThread {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed.store(true, Ordering::Relaxed);
        }
        self.0.stop();
    }
}

/// Starts the threads of a database, which open it and send `opener` the outcome.
#[expect(clippy::disallowed_methods, reason = "it waits for the cores, which the reactor starts")]
pub(crate) fn start(
    options: &Options,
    path: &Path,
    opener: ReplySender<Result<Engine>>,
) -> Result<()> {
    let budget = options.budget()?;
    let (open, write) = options.engine(&budget);
    let config = options.runtime(&budget);
    let shared = Arc::new(Shared {
        path: path.to_owned(),
        number: OPENINGS.fetch_add(1, Ordering::Relaxed),
        generation: fork_generation(),
        stopping: AtomicBool::new(false),
        failed: AtomicBool::new(false),
        bells: Mutex::default(),
        opener: Mutex::new(Some(opener)),
        outcome: OnceLock::new(),
        ended: Waiters::new(),
        near: Near::default(),
    });
    let plan = Plan { shared: shared.clone(), open, write, batch_bytes: budget.batches };
    locked(&OPEN, |open| open.push(shared.clone()));
    let opening = shared.clone();
    let supervise = move || {
        wait_for_closing(&shared);
        let (plan, thread) = (Arc::new(plan), EndOfThread(shared.clone()));
        let main = move |core| {
            let (plan, thread) = (plan.clone(), thread.clone());
            async move {
                let closed = run_core(core, plan).await;
                drop(thread);
                closed
            }
        };
        let ran = catch_unwind(AssertUnwindSafe(|| reactor::run(&config, main)));
        // After a panic it is still open.
        shared.near.close();
        shared.set_end(match ran {
            Ok(Ok(closed)) => closed.into_iter().collect(),
            Ok(Err(error)) => {
                let what = format!("cannot start the threads of the database: {error}");
                Err(Error::new(ErrorKind::Io, what))
            }
            Err(panic) => {
                let what = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
                let what = what.or_else(|| panic.downcast_ref::<String>().cloned());
                let what = what.unwrap_or_default();
                let text = format!("a thread of the database panicked: {what}");
                Err(Error::new(ErrorKind::Panicked, text))
            }
        });
    };
    let started = std::thread::Builder::new().name("millrace".to_owned()).spawn(supervise);
    started.map(drop).map_err(|error| {
        let error = Error::new(ErrorKind::Io, format!("cannot start a thread: {error}"));
        opening.set_end(Err(error.clone()));
        error
    })
}

/// Waits for the end of databases in the same directory that this process is closing, or is
/// opening for nobody any more.
fn wait_for_closing(opening: &Shared) {
    let place = |path: &Path| std::fs::canonicalize(path).ok();
    let Some(here) = place(&opening.path) else { return };
    let closing = locked(&OPEN, |open| {
        open.retain(|other| other.is_here());
        let closes = |other: &&Arc<Shared>| {
            other.number < opening.number
                && (other.is_stopping() || other.is_abandoned())
                && place(&other.path).as_ref() == Some(&here)
        };
        open.iter().filter(closes).cloned().collect::<Vec<_>>()
    });
    for closing in closing {
        let _how = crate::blocking::block_on(closing.end());
    }
}
