//! Retries after a full disk, and after failures to write tables, logs and the MANIFEST.
//!
//! A flush, a merge, or a log that has to begin or to grow may find the disk full. It then removes
//! what it has begun and retries after a pause, or when a file has been removed. No acknowledged
//! write is at stake.
//!
//! A flush or a merge that fails for another reason (its table cannot be created, written, flushed
//! or read) does the same, with pauses that double: no record names its tables, and their sources
//! are still there. So does a log that cannot be created.
//!
//! After a failed write of a log the commit task gives the log up (`commit.rs`); so it does with a
//! blob file, without which writing goes on (`blob_writer.rs`). After a failed write of the
//! MANIFEST a task of its own replaces it ([`WriteState::heal_manifest`]), unless a flush or a
//! merge does so first. Errors that show that the directory is no longer ours end writing
//! ([`Error::is_transient`]).
//!
//! Which writes are refused meanwhile is decided in `backpressure.rs`.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use reactor::timeout;

use crate::error::{Error, Kind};
use crate::write::backpressure::Unnotified;
use crate::write::state::WriteState;

/// A task that may find the disk full, or fail.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    Flush,
    Merge,
    /// The creation or the growth of a log.
    Log,
    Manifest,
}

/// All tasks.
const TASKS: [Task; 4] = [Task::Flush, Task::Merge, Task::Log, Task::Manifest];

impl Task {
    fn name(self) -> &'static str {
        match self {
            Task::Flush => "a flush",
            Task::Merge => "a merge",
            Task::Log => "a log",
            Task::Manifest => "the MANIFEST",
        }
    }

    /// What cannot be done while it fails.
    fn cannot(self) -> &'static str {
        match self {
            Task::Flush | Task::Merge => "no table can be written for now",
            Task::Log => "the log cannot be written for now",
            Task::Manifest => "the MANIFEST cannot be written for now",
        }
    }
}

/// Shortest and longest pause between two attempts, in nanoseconds.
const PAUSE_NS: u64 = 1_000_000_000;
const PAUSE_MAX_NS: u64 = 30_000_000_000;
/// How long a merge waits for what it needs first, in nanoseconds.
const ANCHOR_NS: u64 = 10_000_000_000;
/// The pause after an attempt, as a multiple of its duration: it may have written much in vain.
const ATTEMPT_PAUSE: u64 = 3;
/// The pause after a failure doubles with each further one, at most this many times.
const DOUBLINGS_MAX: u32 = 5;

/// The tasks that cannot make progress.
#[derive(Default)]
pub(crate) struct Retries {
    /// For each task, the error of its last attempt, until one succeeds.
    errors: RefCell<[Option<Error>; TASKS.len()]>,
    /// For each task, its failures in a row for another reason than a full disk.
    failures: RefCell<[u32; TASKS.len()]>,
    /// The time at which a log may be tried again.
    log_after_ns: Cell<u64>,
    /// Files that have been removed.
    removals: Cell<u64>,
    /// How often the disk became full.
    full_times: Cell<u64>,
    /// Requests that were refused.
    refused: Cell<u64>,
    /// Refusals that their callers have not seen yet.
    unnotified: Rc<Cell<u64>>,
    /// A log has failed, and its writes are not all in tables yet.
    log_is_broken: Cell<bool>,
    /// Logs, MANIFESTs, and blob files, that were replaced after a failed write.
    log_heals: Cell<u64>,
    manifest_heals: Cell<u64>,
    blob_heals: Cell<u64>,
    /// The last error of any task.
    last_error: RefCell<Option<Error>>,
}

/// The refusal of a change that could not be written and has no effect.
pub(crate) fn refused(error: &Error) -> Error {
    let text = match error.kind() {
        Kind::Full => format!("the disk is full: {error}"),
        _ => error.to_string(),
    };
    Error::new(Kind::Full, text)
}

impl Retries {
    /// The error of a task that cannot make progress.
    pub fn error(&self, task: Task) -> Option<Error> {
        self.errors.borrow()[task as usize].clone()
    }

    /// Why nothing can be written: the first error, that of a full disk before others.
    pub fn reason(&self) -> String {
        let errors = self.errors.borrow();
        let all =
            || TASKS.into_iter().filter_map(|task| Some((task, errors[task as usize].as_ref()?)));
        let full = all().find(|(_, error)| error.kind() == Kind::Full);
        match full.or_else(|| all().next()) {
            Some((_, error)) if error.kind() == Kind::Full => refused(error).to_string(),
            Some((task, error)) => format!("{}: {error}", task.cannot()),
            None => "a write before it has failed".to_owned(),
        }
    }

    /// The error that keeps memtables from becoming tables.
    pub fn flush_error(&self) -> Option<Error> {
        self.error(Task::Flush).or_else(|| self.error(Task::Manifest))
    }

    /// The last error of a flush, a merge, a log, a blob file or the MANIFEST since the opening.
    pub fn last_error(&self) -> Option<Error> {
        self.last_error.borrow().clone()
    }

    /// Logs, blob files and MANIFESTs that were replaced after a failed write.
    pub fn heals(&self) -> u64 {
        self.log_heals.get() + self.manifest_heals.get() + self.blob_heals.get()
    }

    /// A blob file was given up.
    pub fn note_blob_heal(&self, error: &Error) {
        self.last_error.replace(Some(error.clone()));
        self.blob_heals.set(self.blob_heals.get() + 1);
    }

    pub fn set_manifest_heals(&self, heals: u64) {
        self.manifest_heals.set(heals);
    }

    /// Whether a log or the MANIFEST has failed, and no write to a new one has succeeded yet.
    pub fn is_healing(&self) -> bool {
        let waits = |task| self.error(task).is_some_and(|error| error.kind() != Kind::Full);
        self.log_is_broken.get() || waits(Task::Log) || self.error(Task::Manifest).is_some()
    }

    /// Whether a task waits for space on the disk.
    pub fn is_full(&self) -> bool {
        self.errors.borrow().iter().flatten().any(|error| error.kind() == Kind::Full)
    }

    /// How often the disk became full.
    pub fn full_times(&self) -> u64 {
        self.full_times.get()
    }

    /// Whether a task fails for another reason than a full disk.
    pub fn fails(&self, task: Task) -> bool {
        self.failures(task) > 0
    }

    /// The failures of a task in a row, for another reason than a full disk.
    pub fn failures(&self, task: Task) -> u32 {
        self.failures.borrow()[task as usize]
    }

    /// Requests that were refused.
    pub fn refused(&self) -> u64 {
        self.refused.get()
    }

    /// Counts a refusal.
    pub fn count_refusal(&self) -> Unnotified {
        self.refused.set(self.refused.get() + 1);
        Unnotified::new(&self.unnotified)
    }

    /// Whether a caller has not seen its refusal yet.
    pub fn has_unnotified(&self) -> bool {
        self.unnotified.get() > 0
    }
}

impl WriteState {
    /// A task has found the disk full.
    pub fn note_full(&self, task: Task, error: &Error) {
        if !self.retries.is_full() {
            self.retries.full_times.set(self.retries.full_times.get() + 1);
            tracing::warn!(
                "{}: the disk is full: {error}; reads go on, and what cannot be written is refused until there is \
                 space",
                self.dir.path().display()
            );
        }
        self.note_error(task, error);
        if let Task::Log = task {
            self.retries.log_after_ns.set(self.core.now_ns() + PAUSE_NS);
        }
    }

    fn note_error(&self, task: Task, error: &Error) {
        self.retries.last_error.replace(Some(error.clone()));
        self.retries.errors.borrow_mut()[task as usize] = Some(error.clone());
        // Wake the waiters: this task cannot make progress.
        self.changed.notify_all();
    }

    /// A log or the MANIFEST cannot be written.
    pub fn note_failure(&self, task: Task, error: &Error) {
        let failures = self.retries.failures(task);
        let pause = PAUSE_NS << failures.min(DOUBLINGS_MAX);
        tracing::error!(
            "{}: {} cannot be written and is tried again in {} s: {error}; reads go on; check the device",
            self.dir.path().display(),
            task.name(),
            pause / 1_000_000_000
        );
        self.retries.failures.borrow_mut()[task as usize] = failures + 1;
        self.note_error(task, error);
        if let Task::Log = task {
            self.retries.log_after_ns.set(self.core.now_ns() + pause);
        }
    }

    /// A write or a flush of the log has failed.
    pub fn note_broken_log(&self, error: &Error) {
        tracing::error!(
            "{}: {error}; everything in memory is written to tables, then a new log takes its place;              check the device",
            self.dir.path().display(),
        );
        self.retries.last_error.replace(Some(error.clone()));
        self.retries.log_is_broken.set(true);
    }

    /// Everything that a broken log should hold is in tables.
    pub fn note_healed_log(&self) {
        tracing::info!(
            "{}: everything is in tables, and a new log begins: writing goes on",
            self.dir.path().display()
        );
        self.retries.log_is_broken.set(false);
        self.retries.log_heals.set(self.retries.log_heals.get() + 1);
    }

    /// Replaces the MANIFEST after failed writes, until writing ends.
    pub async fn heal_manifest(&self) {
        let fails = || self.retries.error(Task::Manifest).is_some();
        let ends = || self.is_closing() || self.has_failed();
        loop {
            self.changed.wait_until(|| fails() || ends()).await;
            let failures = self.retries.failures(Task::Manifest).saturating_sub(1);
            self.pause(PAUSE_NS << failures.min(DOUBLINGS_MAX), || !fails()).await;
            if ends() {
                return;
            }
            let Ok(turn) = self.manifest_turn().await else { return };
            if let Err(error) = turn.decide().await
                && !error.is_transient()
            {
                return self.fail(&error);
            }
        }
    }

    /// A task has succeeded, or has nothing to do.
    pub fn note_success(&self, task: Task) {
        let was = self.retries.errors.borrow_mut()[task as usize].take();
        let failures = std::mem::take(&mut self.retries.failures.borrow_mut()[task as usize]);
        if failures > 0 {
            tracing::info!("{}: {} succeeds again", self.dir.path().display(), task.name());
            self.changed.notify_all();
        } else if was.is_some() && !self.retries.is_full() {
            tracing::info!("{}: there is space again", self.dir.path().display());
        }
    }

    /// A file has been removed: retries need not wait.
    pub fn note_removal(&self) {
        self.retries.removals.set(self.retries.removals.get() + 1);
        self.retries.log_after_ns.set(0);
        self.changed.notify_all();
    }

    /// Reports the failure of a flush or a merge that began at `since_ns` and left nothing, and
    /// waits until it may be retried or writing ends.
    pub async fn back_off(&self, task: Task, error: &Error, since_ns: u64) {
        if error.kind() == Kind::Full {
            self.note_full(task, error);
            return self.wait_for_space(since_ns).await;
        }
        let failures = self.retries.failures(task);
        let least = PAUSE_NS << failures.min(DOUBLINGS_MAX);
        let now = self.core.now_ns();
        let pause = ((now - since_ns) * ATTEMPT_PAUSE).clamp(least, PAUSE_MAX_NS.max(least));
        tracing::error!(
            "{}: {} has failed and is tried again in {} s: {error}",
            self.dir.path().display(),
            task.name(),
            pause / 1_000_000_000
        );
        self.count(|stats| stats.table_failures += 1);
        self.retries.failures.borrow_mut()[task as usize] = failures + 1;
        self.note_error(task, error);
        self.pause(pause, || false).await;
    }

    /// Waits until a task may find space, after an attempt that began at `since_ns`.
    async fn wait_for_space(&self, since_ns: u64) {
        let ns = self.core.now_ns() - since_ns;
        let pause = (ns * ATTEMPT_PAUSE).clamp(PAUSE_NS, PAUSE_MAX_NS);
        let removals = self.retries.removals.get();
        self.pause(pause, || self.retries.removals.get() > removals).await;
    }

    /// Waits for a time, until `ready` holds, or until writing ends.
    pub async fn pause(&self, ns: u64, ready: impl Fn() -> bool) {
        let ends = || self.is_closing() || self.has_failed() || ready();
        // It does not matter which of the two ends the pause.
        let _ = timeout(&self.core, ns, self.changed.wait_until(ends)).await;
    }

    /// Waits until memtables are tables, or logs need no blob file any more, if a change of the
    /// MANIFEST has failed because it left no table as the anchor of one. Returns whether that is
    /// so.
    pub async fn wait_for_anchor(&self) -> bool {
        let wants = || self.blobs.wants_flush.get();
        if !wants() {
            return false;
        }
        self.pause(ANCHOR_NS, || !wants() || self.retries.flush_error().is_some()).await;
        !wants()
    }

    /// The error of a log that was tried a moment ago and is not tried now.
    pub fn log_backs_off(&self) -> Option<Error> {
        let error = self.retries.error(Task::Log)?;
        (self.core.now_ns() < self.retries.log_after_ns.get()).then_some(error)
    }
}
