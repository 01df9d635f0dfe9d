//! The next log, made ahead while the present one is written to.
//!
//! To make a log takes a name that is durable, and often space on the disk. Both wait for the file
//! system, which takes tens of milliseconds while flushes and merges keep it busy. So a task makes
//! the next log as soon as the memtables are a 64th full ([`WriteState::make_next_log`]), and
//! the group that finds them full only begins it ([`WriteState::take_next_log`]).
//!
//! The log is empty until it is begun, and every later log has a larger number. So a crash leaves
//! what one after the making of any log leaves: an empty log after all others. A log that was made
//! ahead is discarded before a number is taken from which on logs are needed
//! ([`WriteState::discard_next_log`]): with a smaller number it would be obsolete when it is begun.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::write::commit;
use crate::write::state::WriteState;
use crate::write::wal_writer::EmptyLog;

/// How full memtables are when the next log is made. A database that is hardly written to has one
/// log.
const FILLED: f64 = 1.0 / 64.0;

/// The time that making a log takes falls by this part of it with each that takes less.
const TOOK_FADES: u64 = 8;

/// The next log.
#[derive(Default)]
pub(crate) struct NextLog {
    /// It is to be made.
    wanted: Cell<bool>,
    /// It is being made.
    making: Cell<bool>,
    /// When the last one was begun to be made, and how long making one took lately, in
    /// nanoseconds.
    began_ns: Cell<u64>,
    took_ns: Cell<u64>,
    made: RefCell<Option<EmptyLog>>,
}

/// Makes logs ahead until writing ends.
pub(crate) async fn run(state: &Rc<WriteState>) {
    let next = &state.next_log;
    loop {
        state.changed.wait_until(|| next.wanted.get() || state.is_ending()).await;
        if state.is_ending() {
            break;
        }
        next.wanted.set(false);
        next.making.set(true);
        next.began_ns.set(state.core.now_ns());
        match commit::empty_log(state, 1).await {
            Ok(log) => drop(next.made.replace(Some(log))),
            // The group that needs it tries again, and reports the error.
            Err(error) => tracing::debug!("cannot make a log ahead: {error}"),
        }
        next.making.set(false);
        let (took_ns, before_ns) = (state.core.now_ns() - next.began_ns.get(), next.took_ns.get());
        next.took_ns.set(took_ns.max(before_ns - before_ns / TOOK_FADES));
        state.changed.notify_all();
    }
    if !state.has_failed() {
        state.discard_next_log().await;
    }
}

impl WriteState {
    /// Has the next log made if memtables have begun to fill; once for each log. `has_log`: there
    /// is a present log.
    pub fn make_next_log(&self, has_log: bool) {
        let next = &self.next_log;
        let is_there = next.wanted.get() || next.making.get() || next.made.borrow().is_some();
        let is_due = has_log && self.flushes.filled.get() >= FILLED;
        if is_due && !is_there && !self.retries.is_full() && self.log_backs_off().is_none() {
            next.wanted.set(true);
            self.changed.notify_all();
        }
    }

    /// If it is being made, the time that this takes, in nanoseconds: so far, or as long as lately.
    pub fn next_log_takes_ns(&self) -> Option<u64> {
        let next = &self.next_log;
        let so_far_ns = || self.core.now_ns() - next.began_ns.get();
        next.making.get().then(|| so_far_ns().max(next.took_ns.get()))
    }

    /// Takes the log that was made ahead, if one was. Waits while it is being made.
    pub async fn take_next_log(&self) -> Option<EmptyLog> {
        let next = &self.next_log;
        next.wanted.set(false);
        self.changed.wait_until(|| !next.making.get()).await;
        next.made.take()
    }

    /// Removes the log that was made ahead, if one was. An empty log that cannot be removed goes
    /// with the others at the next opening.
    pub async fn discard_next_log(&self) {
        if let Some(log) = self.take_next_log().await {
            let _ = self.dir.remove(log.name()).await;
        }
    }
}
