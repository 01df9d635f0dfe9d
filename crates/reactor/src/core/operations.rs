//! Operations on descriptors: starting them, and the backlog of disk operations.

use std::collections::VecDeque;
use std::task::{Context, Poll};

use super::CoreState;
use crate::driver::{IoOp, Token};
use crate::op::{Hold, Nature, OpId, Payload};
use crate::task::{CLASSES, Class};

/// With this many staged operations the core submits before the end of the turn.
pub(super) const STAGED_MAX: usize = 16;
/// The first threshold after a wait, for disk operations: the device may be idle.
pub(super) const STAGED_FIRST: usize = 2;
/// With more disk operations in flight, those of background work wait.
const BACKGROUND_DEPTH: usize = 32;

/// Disk operations that wait for queue depth, by class, in order of arrival.
#[derive(Default)]
pub(super) struct Backlog([VecDeque<(Token, IoOp)>; CLASSES]);

impl Backlog {
    pub(super) fn len(&self) -> usize {
        self.0.iter().map(VecDeque::len).sum()
    }

    pub(super) fn remove(&mut self, token: Token) -> bool {
        for queue in &mut self.0 {
            if let Some(at) = queue.iter().position(|(t, _)| *t == token) {
                queue.remove(at);
                return true;
            }
        }
        false
    }
}

impl CoreState {
    /// Starts an operation: stages it, or puts it into the backlog until there is room.
    pub(crate) fn start(&self, op: IoOp, payload: Payload, hold: Hold) -> OpId {
        let nature = Nature::of(&op);
        let is_disk = nature.is_disk();
        match op {
            IoOp::Read { len, .. } => self.count_bytes(&op, u64::from(len)),
            IoOp::Write { len, .. } => self.count_bytes(&op, u64::from(len)),
            IoOp::SyncData { .. } => self.stats.disk_syncs.add(1),
            _ => {}
        }
        self.stats.operations.add(1);
        let mut ops = self.ops.borrow_mut();
        let id = ops.insert(payload, hold, nature);
        let mut backlog = self.backlog.borrow_mut();
        let mut driver = self.driver.borrow_mut();
        let class = self.class.get();
        let disk_in_flight = ops.disk_running - backlog.len();
        let room = disk_in_flight <= driver.capacity();
        let disk_room = disk_in_flight <= self.disk_depth
            && (class <= Class::Foreground || disk_in_flight <= BACKGROUND_DEPTH);
        // An operation that waits for a peer may never complete, so it takes no queue depth. The
        // number of descriptors bounds those.
        if is_disk && (!room || !disk_room) {
            backlog.0[class as usize].push_back((id.token, op));
        } else {
            driver.stage(id.token, op);
            // Submit early: the device should not idle until the last task of the turn has run.
            let submit_batch = if is_disk { self.submit_batch.get() } else { STAGED_MAX };
            if driver.staged() >= submit_batch {
                driver.submit();
                self.submit_batch.set((2 * submit_batch).min(STAGED_MAX));
            }
        }
        id
    }

    /// Counts a read or a write of `len` bytes.
    pub(crate) fn count_bytes(&self, op: &IoOp, len: u64) {
        match op {
            IoOp::Read { .. } | IoOp::ReadV { .. } => {
                self.stats.disk_reads.add(1);
                self.stats.disk_bytes.add(len);
            }
            IoOp::Write { .. } | IoOp::WriteV { .. } => {
                self.stats.disk_writes.add(1);
                self.stats.disk_write_bytes.add(len);
            }
            _ => {}
        }
    }

    pub(super) fn drain_backlog(&self) {
        let ops = self.ops.borrow();
        let mut backlog = self.backlog.borrow_mut();
        let mut driver = self.driver.borrow_mut();
        while backlog.len() > 0 {
            let in_flight = ops.disk_running - backlog.len();
            let depth = self.disk_depth.min(driver.capacity());
            let next = if in_flight < depth
                && let Some(next) = backlog.0[..2].iter_mut().find_map(VecDeque::pop_front)
            {
                next
            } else if in_flight < depth.min(BACKGROUND_DEPTH)
                && let Some(next) = backlog.0[2..].iter_mut().find_map(VecDeque::pop_front)
            {
                next
            } else {
                return;
            };
            driver.stage(next.0, next.1);
        }
    }

    pub(crate) fn poll_op(&self, id: OpId, cx: &mut Context<'_>) -> Poll<(i32, Payload)> {
        match self.ops.borrow_mut().take_done(id, cx.waker()) {
            Some(done) => Poll::Ready(done),
            None => Poll::Pending,
        }
    }

    /// Notes that the future of an operation was dropped.
    pub(crate) fn drop_op(&self, id: OpId, cancel: bool) {
        let running = self.ops.borrow_mut().orphan(id);
        if !running {
            return;
        }
        if self.backlog.borrow_mut().remove(id.token) {
            let ended = self.ops.borrow_mut().complete(id.token, -libc::ECANCELED);
            ended.tell();
        } else if cancel {
            self.driver.borrow_mut().cancel(id.token);
        }
    }
}
