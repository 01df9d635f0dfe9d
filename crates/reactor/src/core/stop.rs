//! The end of a core: its tasks end, its operations are cancelled and reaped, and only then is its
//! memory freed.

use super::Core;
use crate::driver::Wait;
use crate::task;

/// Longest wait of a stopping core before it checks its messages again.
pub(crate) const DRAIN_NS: u64 = 10_000_000;

impl Core {
    /// Ends every task and waits at most `patience_ns` until the driver is done with every buffer.
    /// True when it is.
    pub(crate) fn shut_down(&self, patience_ns: u64) -> bool {
        let give_up = self.stop(patience_ns);
        while !self.drained() {
            if self.now_exact_ns() >= give_up {
                return false;
            }
            self.drain(Wait::Ns(DRAIN_NS));
        }
        true
    }

    /// Ends every task and cancels every operation that may be cancelled. Returns the deadline of
    /// the wait for the others.
    pub(crate) fn stop(&self, patience_ns: u64) -> u64 {
        let inner = &*self.0;
        self.end_tasks();
        let _entered = task::enter(inner);
        drop(inner.pollers.take());
        // Dropped pollers may have started tasks.
        self.end_tasks();
        let unfinished = inner.ops.borrow().unfinished();
        for token in unfinished {
            if inner.backlog.borrow_mut().remove(token) {
                let ended = inner.ops.borrow_mut().complete(token, -libc::ECANCELED);
                ended.tell();
            } else if inner.ops.borrow().may_cancel(token) {
                inner.driver.borrow_mut().cancel(token);
            }
        }
        self.now_exact_ns().saturating_add(patience_ns)
    }

    /// Whether the main tasks of all cores have ended, so that no more calls can come.
    pub(crate) fn all_ended(&self) -> bool {
        self.0.ended.get() >= self.0.cores
    }

    /// Whether the driver is done with every buffer.
    pub(crate) fn drained(&self) -> bool {
        self.0.ops.borrow().is_drained()
    }

    /// One step of the wait for [`Core::drained`]. Tasks that messages of other cores start
    /// meanwhile are ended.
    pub(crate) fn drain(&self, wait: Wait) {
        {
            let _entered = task::enter(&self.0);
            self.0.enter(wait);
            self.take_messages();
        }
        self.end_tasks();
    }

    /// Frees what unfinished operations own. Only for a driver that is known to have forgotten
    /// them.
    pub(crate) fn abandon(&self) {
        let unfinished = self.0.ops.borrow().unfinished();
        for token in unfinished {
            let ended = self.0.ops.borrow_mut().complete(token, -libc::ECANCELED);
            ended.tell();
        }
    }

    fn end_tasks(&self) {
        let _entered = task::enter(&self.0);
        // Dropping a future may start or drop tasks and operations.
        loop {
            let futures = self.0.tasks.borrow_mut().clear();
            if futures.is_empty() {
                break;
            }
            drop(futures);
        }
    }
}
