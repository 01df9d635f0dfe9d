//! Operations on descriptors: starting them, and the backlog of disk operations.

use std::collections::VecDeque;
use std::task::{Context, Poll};

use super::CoreState;
use crate::driver::{IoOp, Token};
use crate::flow::{DEVICES, Lane};
use crate::op::{Hold, Nature, OpId, Payload};
use crate::task::{CLASSES, Class};

/// With this many staged operations the core submits before the end of the turn.
pub(super) const STAGED_MAX: usize = 16;
/// The first threshold after a wait, for disk operations: the device may be idle.
pub(super) const STAGED_FIRST: usize = 2;

/// Disk operations that wait for queue depth, in order of arrival.
#[derive(Default)]
pub(super) struct Backlog {
    /// Of the classes up to foreground.
    foreground: [VecDeque<Waiting>; FOREGROUND],
    /// Of the other classes, by the place of their device in flow control.
    background: [[VecDeque<Waiting>; CLASSES - FOREGROUND]; DEVICES],
    len: usize,
}

type Waiting = (Token, IoOp);

/// Classes up to foreground.
const FOREGROUND: usize = Class::Foreground as usize + 1;

impl Backlog {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn push(&mut self, class: Class, place: u8, waiting: Waiting) {
        let class = class as usize;
        match class.checked_sub(FOREGROUND) {
            None => self.foreground[class].push_back(waiting),
            Some(class) => self.background[usize::from(place)][class].push_back(waiting),
        }
        self.len += 1;
    }

    fn next_foreground(&mut self) -> Option<Waiting> {
        let next = self.foreground.iter_mut().find_map(VecDeque::pop_front)?;
        self.len -= 1;
        Some(next)
    }

    fn has_background(&self, place: u8) -> bool {
        self.background[usize::from(place)].iter().any(|queue| !queue.is_empty())
    }

    fn next_background(&mut self, place: u8) -> Option<Waiting> {
        let queues = &mut self.background[usize::from(place)];
        let next = queues.iter_mut().find_map(VecDeque::pop_front)?;
        self.len -= 1;
        Some(next)
    }

    pub(super) fn remove(&mut self, token: Token) -> bool {
        let queues = self.foreground.iter_mut().chain(self.background.iter_mut().flatten());
        for queue in queues {
            if let Some(at) = queue.iter().position(|(t, _)| *t == token) {
                queue.remove(at);
                self.len -= 1;
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
            IoOp::Write { len, durable, .. } => {
                self.count_bytes(&op, u64::from(len));
                self.stats.disk_syncs.add(u64::from(durable));
            }
            IoOp::SyncData { .. } => self.stats.disk_syncs.add(1),
            _ => {}
        }
        self.stats.operations.add(1);
        let mut ops = self.ops.borrow_mut();
        let (place, direct) =
            hold.file().map_or((0, false), |file| (file.place(), file.is_direct()));
        let is_write = matches!((&hold, nature), (Hold::File { .. }, Nature::Write | Nature::Sync));
        let id = ops.insert(payload, hold, nature);
        let mut backlog = self.backlog.borrow_mut();
        let mut driver = self.driver.borrow_mut();
        let class = self.class.get();
        // Many writers wait for one write of a log.
        if is_write && class <= Class::Foreground {
            ops.set_urgent(id.token);
        }
        if is_disk {
            let in_flight = ops.disk_running - backlog.len();
            let lane = self.lane(class, place, direct, &op, in_flight, driver.capacity());
            // An operation that waits for a peer may never complete, so it takes no queue depth.
            // The number of descriptors bounds those.
            let Some(lane) = lane else {
                backlog.push(class, place, (id.token, op));
                return id;
            };
            ops.set_lane(id.token, lane);
        }
        driver.stage(id.token, op);
        // Submit early: the device should not idle until the last task of the turn has run.
        let submit_batch = if is_disk { self.submit_batch.get() } else { STAGED_MAX };
        if driver.staged() >= submit_batch {
            self.flow.submit(|| driver.now_ns());
            driver.submit();
            self.submit_batch.set((2 * submit_batch).min(STAGED_MAX));
        }
        id
    }

    /// The lane of a new disk operation, which is one of `in_flight`; `None` if it has to wait.
    fn lane(
        &self,
        class: Class,
        place: u8,
        direct: bool,
        op: &IoOp,
        in_flight: usize,
        capacity: usize,
    ) -> Option<Lane> {
        let now_ns = self.now.get();
        let room = in_flight <= capacity && in_flight <= self.disk_depth;
        if class <= Class::Foreground {
            return room.then(|| self.flow.stage(place, op, direct, now_ns));
        }
        let room = room || (in_flight <= capacity && self.flow.is_idle(place));
        if room && self.flow.may_begin(place, now_ns) {
            return Some(self.flow.begin(place));
        }
        self.flow.hold_back(place);
        None
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

    /// Stages what waits and now has room: one background operation on each device that has none,
    /// then those of requests, then those of background work.
    pub(super) fn drain_backlog(&self) {
        let mut ops = self.ops.borrow_mut();
        let mut backlog = self.backlog.borrow_mut();
        if backlog.len() == 0 {
            return;
        }
        let mut driver = self.driver.borrow_mut();
        let now_ns = self.now.get();
        let capacity = driver.capacity();
        let mut in_flight = ops.disk_running - backlog.len();
        let mut stage = |(token, op): Waiting, lane, in_flight: &mut usize| {
            ops.set_lane(token, lane);
            driver.stage(token, op);
            *in_flight += 1;
        };
        let places = 0..DEVICES as u8;
        for place in places.clone().filter(|&place| self.flow.is_idle(place)) {
            if in_flight < capacity
                && let Some(next) = backlog.next_background(place)
            {
                stage(next, self.flow.begin(place), &mut in_flight);
            }
        }
        let depth = self.disk_depth.min(capacity);
        while in_flight < depth
            && let Some(next) = backlog.next_foreground()
        {
            stage(next, Lane::None, &mut in_flight);
        }
        for place in places {
            while in_flight < depth
                && backlog.has_background(place)
                && self.flow.may_begin(place, now_ns)
                && let Some(next) = backlog.next_background(place)
            {
                stage(next, self.flow.begin(place), &mut in_flight);
            }
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
