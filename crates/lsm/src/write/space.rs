//! A full disk, and tables that cannot be written: who waits, and what is said about it.
//!
//! Whoever finds no room for new bytes (a flush, a merge, a log that has to begin or to grow) takes
//! back what it has begun and tries again later: after a while, and when a file has gone. Nothing
//! that was acknowledged is at stake. As long as writes cannot be taken they are refused, together
//! with all that were handed over behind them; and no other is taken until everybody whose write
//! was refused has been told. So what is written never stands on something that was refused.
//!
//! A flush or a merge that fails for another reason (its table cannot be created, written, flushed
//! or read) does the same, with longer and longer pauses: no record names its tables, and what they
//! were made of is still there.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::error::{Error, Kind};
use crate::write::writer::Inner;

/// Who may find no room.
#[derive(Clone, Copy)]
pub(crate) enum Task {
    Flush,
    Merge,
    Log,
}

impl Task {
    fn name(self) -> &'static str {
        match self {
            Task::Flush => "a flush",
            Task::Merge => "a merge",
            Task::Log => "a log",
        }
    }
}

/// Shortest and longest time between two attempts, in nanoseconds.
const PAUSE_NS: u64 = 1_000_000_000;
const PAUSE_MAX_NS: u64 = 30_000_000_000;
/// Time between two looks whether a file has gone, or writing ends.
const LOOK_NS: u64 = 50_000_000;
/// After an attempt so many times as long is a pause: it may have written much in vain.
const ATTEMPT_REST: u64 = 3;
/// The pause after a failure doubles with each further one, this many times at most.
const DOUBLINGS_MAX: u32 = 5;

/// See the module text.
#[derive(Default)]
pub(crate) struct Space {
    /// What each task has met.
    short: RefCell<[Option<Error>; 3]>,
    /// How often in a row each task failed for another reason than a full disk.
    failures: RefCell<[u32; 3]>,
    /// When a log may be tried again.
    log_after_ns: Cell<u64>,
    /// Files that have been removed.
    freed: Cell<u64>,
    /// Times that the disk was found full, when it had not been.
    times: Cell<u64>,
    /// Requests refused.
    refused: Cell<u64>,
    /// Refusals that nobody has been told of yet.
    untold: Rc<Cell<u64>>,
}

/// A refusal, until it was told.
pub(crate) struct Untold(Rc<Cell<u64>>);

impl Drop for Untold {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Space {
    /// What a task has met that waits for space.
    pub fn why(&self, task: Task) -> Option<Error> {
        self.short.borrow()[task as usize].clone()
    }

    /// Whether somebody waits for space.
    pub fn is_short(&self) -> bool {
        self.short.borrow().iter().flatten().any(|error| error.kind() == Kind::Full)
    }

    /// Whether a task fails for another reason than a full disk.
    pub fn fails(&self, task: Task) -> bool {
        self.failures(task) > 0
    }

    /// How often in a row a task failed for another reason than a full disk.
    pub fn failures(&self, task: Task) -> u32 {
        self.failures.borrow()[task as usize]
    }

    /// See the fields.
    pub fn times(&self) -> u64 {
        self.times.get()
    }

    /// See the fields.
    pub fn refused(&self) -> u64 {
        self.refused.get()
    }

    /// A file has gone.
    pub fn has_grown(&self) {
        self.freed.set(self.freed.get() + 1);
        self.log_after_ns.set(0);
    }

    /// One more refusal.
    pub fn refuse(&self) -> Untold {
        self.refused.set(self.refused.get() + 1);
        self.untold.set(self.untold.get() + 1);
        Untold(self.untold.clone())
    }

    /// Whether somebody has not been told yet.
    pub fn has_untold(&self) -> bool {
        self.untold.get() > 0
    }
}

impl Inner {
    /// A task has found no room.
    pub fn is_full(&self, task: Task, error: &Error) {
        if !self.space.is_short() {
            self.space.times.set(self.space.times.get() + 1);
            tracing::warn!(
                "{}: the disk is full: {error}; reads go on, and what cannot be written is refused until there is \
                 space",
                self.dir.path().display()
            );
        }
        self.space.short.borrow_mut()[task as usize] = Some(error.clone());
        // Who waits for the task waits in vain.
        self.moved.ring();
        if let Task::Log = task {
            self.space.log_after_ns.set(self.core.now_ns() + PAUSE_NS);
        }
    }

    /// A task has done its work, or there is none.
    pub fn has_room(&self, task: Task) {
        let was = self.space.short.borrow_mut()[task as usize].take();
        let failures = std::mem::take(&mut self.space.failures.borrow_mut()[task as usize]);
        if failures > 0 {
            tracing::info!("{}: {} succeeds again", self.dir.path().display(), task.name());
        } else if was.is_some() && !self.space.is_short() {
            tracing::info!("{}: there is space again", self.dir.path().display());
        }
    }

    /// A flush or a merge that began at `since_ns` has failed, and nothing of it is left: says so,
    /// and waits until it may be tried again or the database is closed.
    pub async fn try_later(&self, task: Task, error: &Error, since_ns: u64) {
        if error.kind() == Kind::Full {
            self.is_full(task, error);
            return self.until_space(since_ns).await;
        }
        let failures = self.space.failures(task);
        let least = PAUSE_NS << failures.min(DOUBLINGS_MAX);
        let now = self.core.now_ns();
        let pause = ((now - since_ns) * ATTEMPT_REST).clamp(least, PAUSE_MAX_NS.max(least));
        tracing::error!(
            "{}: {} has failed and is tried again in {} s: {error}",
            self.dir.path().display(),
            task.name(),
            pause / 1_000_000_000
        );
        self.stats(|stats| stats.table_failures += 1);
        self.space.failures.borrow_mut()[task as usize] = failures + 1;
        self.space.short.borrow_mut()[task as usize] = Some(error.clone());
        // Who waits for the task waits in vain.
        self.moved.ring();
        while self.core.now_ns() < now + pause && !self.closing.get() && !self.has_failed() {
            self.core.sleep_ns(LOOK_NS).await;
        }
    }

    /// Waits until a task may find room that found none, in an attempt that began then.
    pub async fn until_space(&self, since_ns: u64) {
        let now = self.core.now_ns();
        let pause = ((now - since_ns) * ATTEMPT_REST).clamp(PAUSE_NS, PAUSE_MAX_NS);
        let freed = self.space.freed.get();
        let ends = || self.closing.get() || self.has_failed() || self.space.freed.get() > freed;
        while self.core.now_ns() < now + pause && !ends() {
            self.core.sleep_ns(LOOK_NS).await;
        }
    }

    /// Why a log is not tried now, if so: it was a moment ago.
    pub fn no_log_now(&self) -> Option<Error> {
        let error = self.space.why(Task::Log)?;
        (self.core.now_ns() < self.space.log_after_ns.get()).then_some(error)
    }

    /// What a write is told that is refused.
    pub fn refusal(&self) -> Error {
        let short = self.space.short.borrow();
        let is_full = |error: &&Error| error.kind() == Kind::Full;
        let why = short.iter().flatten().find(is_full).or(short.iter().flatten().next());
        let text = match why {
            None => "the disk is full".to_owned(),
            Some(error) if error.kind() == Kind::Full => format!("the disk is full: {error}"),
            Some(error) => format!("no table can be written for now: {error}"),
        };
        Error::new(Kind::Full, text)
    }
}
