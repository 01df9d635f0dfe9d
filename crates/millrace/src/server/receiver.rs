//! The poller that takes the callers' requests. It runs in every turn of a busy core, and is armed
//! before the core sleeps; then a caller's bell ends the sleep.
//!
//! This is the hot path of every request: no lock, no allocation of its own.

use std::rc::{Rc, Weak};
use std::sync::Arc;

use reactor::Poller;
use reactor::inbox::Inbox;

use super::hall::Hall;
use super::{reads, writes};
use crate::door::Load;
use crate::request::{Read, Write};

/// Requests of one kind that are taken in one turn.
const TURN: usize = 128;

/// The core's ends of its inboxes.
pub(super) struct Receiver {
    hall: Weak<Hall>,
    inboxes: Option<Inboxes>,
    reads_room: Arc<Load>,
    writes_room: Arc<Load>,
    gets: reads::Gets,
}

struct Inboxes {
    reads: Inbox<Read>,
    writes: Inbox<Write>,
    releases: Inbox<u64>,
}

impl Receiver {
    pub fn new(
        hall: &Rc<Hall>,
        (reads, reads_room): (Inbox<Read>, Arc<Load>),
        (writes, writes_room): (Inbox<Write>, Arc<Load>),
        releases: Inbox<u64>,
    ) -> Receiver {
        Receiver {
            hall: Rc::downgrade(hall),
            inboxes: Some(Inboxes { reads, writes, releases }),
            reads_room,
            writes_room,
            gets: reads::Gets::default(),
        }
    }

    fn has_work(&self) -> bool {
        let (Some(inboxes), Some(hall)) = (&self.inboxes, self.hall.upgrade()) else {
            return false;
        };
        inboxes.releases.pure_check()
            || (inboxes.reads.pure_check() && hall.reads.has_room())
            || (inboxes.writes.pure_check() && hall.writes.has_room())
            || (hall.shared.is_stopping() && !hall.drained.get())
    }
}

impl Poller for Receiver {
    fn poll(&mut self) -> bool {
        let (Some(inboxes), Some(hall)) = (&mut self.inboxes, self.hall.upgrade()) else {
            return false;
        };
        if hall.drained.get() {
            return false;
        }
        // Before the inboxes: what was sent before the stop is served.
        let stops = hall.shared.is_stopping();
        let mut worked = false;
        while let Some(id) = inboxes.releases.pop() {
            hall.release(id);
            worked = true;
        }
        let mut taken = 0;
        while taken < TURN
            && hall.reads.has_room()
            && let Some(read) = inboxes.reads.pop()
        {
            taken += 1;
            reads::begin(&hall, read, &mut self.gets);
        }
        if taken > 0 {
            self.reads_room.notify();
            self.gets.answer(&hall);
            worked = true;
        }
        let mut taken = 0;
        let mut batches = Vec::new();
        while taken < TURN
            && hall.writes.has_room()
            && let Some(write) = inboxes.writes.pop()
        {
            taken += 1;
            writes::begin(&hall, write, &mut batches);
        }
        if taken > 0 {
            self.writes_room.notify();
            writes::await_batches(&hall, batches);
            worked = true;
        }
        let left = inboxes.reads.pure_check() || inboxes.writes.pure_check();
        if stops && !worked && !left {
            hall.drained.set(true);
            hall.stopping.set(true);
            hall.changed.notify_all();
            return true;
        }
        if stops && !hall.stopping.replace(true) {
            hall.changed.notify_all();
        }
        worked
    }

    fn pure_check(&mut self) -> bool {
        self.has_work()
    }

    fn arm(&mut self) -> bool {
        !self.has_work()
    }

    fn disarm(&mut self) {}
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // First the inboxes are closed, then those that wait for room try again, and see it.
        self.inboxes = None;
        self.reads_room.notify();
        self.writes_room.notify();
        // The core has panicked, or this is the end.
        if let Some(hall) = self.hall.upgrade() {
            hall.leave();
        }
    }
}
