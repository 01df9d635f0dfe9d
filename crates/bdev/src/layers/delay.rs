//! `delay:` delays the completions of a device, by a time for each kind or a random time in an
//! interval; so they may come in another order than the device's.
//!
//! The device has already done the request: only its completion is delayed. Nothing is allocated in
//! operation; a sleeping core takes a turn when the next completion is due.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use reactor::Core;

use crate::channel::Channel;
use crate::io::{Done, Io, QUEUE_DEPTH, Status};

pub(crate) struct DelayChannel {
    pub over: Channel,
    core: Core,
    ns: [(u64, u64); 5],
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Delayed completions: due time, a sequence number that keeps equal times in order, slot.
    held: BinaryHeap<Reverse<(u64, u64, u32)>>,
    order: u64,
    /// Empty between calls.
    batch: Vec<Done>,
}

#[derive(Clone, Copy)]
struct Slot {
    tag: u64,
    kind: u8,
    status: Status,
}

impl DelayChannel {
    pub fn new(over: Channel, ns: [(u64, u64); 5], core: &Core) -> DelayChannel {
        DelayChannel {
            over,
            core: core.clone(),
            ns,
            slots: vec![Slot { tag: 0, kind: 0, status: Status::Ok }; QUEUE_DEPTH],
            free: (0..QUEUE_DEPTH as u32).rev().collect(),
            held: BinaryHeap::with_capacity(QUEUE_DEPTH),
            order: 0,
            batch: Vec::with_capacity(QUEUE_DEPTH),
        }
    }

    /// # Safety
    /// As for [`Channel::submit`].
    pub unsafe fn submit(&mut self, io: &Io<'_>, done: &mut Vec<Done>) {
        let full = Done { tag: io.tag, status: Status::IoError };
        // Unreachable, here and below: there are as many slots as the channel above takes requests.
        let Some(slot) = self.free.pop() else { return done.push(full) };
        let kind = io.kind.index() as u8;
        self.slots[slot as usize] = Slot { tag: io.tag, kind, status: Status::Ok };
        // SAFETY: by this function's contract.
        if unsafe { self.over.submit(&Io { tag: slot.into(), ..*io }) }.is_err() {
            self.free.push(slot);
            done.push(full);
        }
    }

    pub fn poll(&mut self, done: &mut Vec<Done>) {
        let now = self.core.now_ns();
        self.over.poll(&mut self.batch);
        for Done { tag, status } in self.batch.drain(..) {
            let slot = &mut self.slots[tag as usize];
            slot.status = status;
            let (from, to) = self.ns[slot.kind as usize];
            let ns =
                if from == to { from } else { from + self.core.random_u64() % (to - from + 1) };
            self.order += 1;
            self.held.push(Reverse((now.saturating_add(ns), self.order, tag as u32)));
        }
        while let Some(&Reverse((due, _, slot))) = self.held.peek() {
            if due > now {
                self.core.turn_at(due);
                return;
            }
            self.held.pop();
            let Slot { tag, status, .. } = self.slots[slot as usize];
            self.free.push(slot);
            done.push(Done { tag, status });
        }
    }

    pub fn ready(&self) -> bool {
        let due = self.held.peek().is_some_and(|Reverse((due, ..))| *due <= self.core.now_ns());
        due || self.over.ready()
    }
}
