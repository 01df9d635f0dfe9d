//! Breaks a ring: for lost memory, or a fault of the guest.

use std::rc::Rc;

use super::Queue;
use crate::ring::Fault;
use crate::target::observer::{self, DiskEvent};

impl Queue {
    /// Breaks the ring if some of its memory is lost. Costs one load while no memory is lost.
    #[inline]
    pub(super) fn check_memory(&mut self) {
        if reactor::losses() != self.losses {
            self.break_if_lost();
        }
    }

    #[cold]
    pub(super) fn break_if_lost(&mut self) {
        self.losses = reactor::losses();
        let log = self.log.as_ref().is_some_and(|log| log.is_lost());
        if log || self.memory.is_lost() || self.ring.is_lost() || self.is_old_memory_lost() {
            self.break_off(Fault::MemoryLost);
        }
    }

    /// Whether memory is lost that only earlier requests use.
    pub(super) fn is_old_memory_lost(&self) -> bool {
        let mut last = None;
        self.popped_with.iter().flatten().any(|guard| {
            let seen = last.replace(guard).is_some_and(|last| Rc::ptr_eq(last, guard));
            !seen && guard.memory.is_lost()
        })
    }

    /// Breaks the ring if it is not broken yet. Requests that are not submitted are dropped.
    #[cold]
    pub(super) fn break_off(&mut self, fault: Fault) {
        if self.reported {
            return;
        }
        let waiting = self.deferred.drain(..).chain(self.held.drain(..));
        self.tags.extend(waiting.chain(self.failed.drain(..)));
        self.limits.begun();
        for nth in 0..self.tags.len() {
            self.forget_memory_of(self.tags[nth]);
        }
        self.ring.break_off(fault, &mut self.tags);
        self.broke(fault);
        if let Some(waker) = self.waiting.as_ref() {
            waker.wake_by_ref();
        }
    }

    /// Tells the observer of the disks what has happened here.
    #[cold]
    pub(super) fn tell(&self, event: DiskEvent) {
        observer::tell(&self.core, self.home, &self.disk_name, event);
    }

    #[cold]
    pub(super) fn broke(&mut self, fault: Fault) {
        if std::mem::replace(&mut self.reported, true) {
            return;
        }
        if let Some(permit) = self.log_limits.broken.permit(self.core.now_ns()) {
            let (disk, ring, left_out) = (&*self.disk_name, self.index, permit.left_out);
            tracing::warn!(disk, ring, left_out, "the guest broke a ring: {fault}");
            self.tell(DiskEvent::RingBroken { ring, why: fault.to_string() });
        }
        self.stats.broken.add(1);
        if let Some(err) = &self.err {
            err.signal();
        }
    }
}
