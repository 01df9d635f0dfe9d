//! Timers: a heap of deadlines, each with the waker of the sleeping task.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::task::Waker;

struct Slot {
    generation: u32,
    fired: bool,
    waker: Option<Waker>,
}

/// A timer's slot and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TimerId {
    index: u32,
    generation: u32,
}

#[derive(Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(u64, TimerId)>>,
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Timers {
    pub fn insert(&mut self, deadline_ns: u64, waker: Waker) -> TimerId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, fired: false, waker: None });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.fired = false;
        slot.waker = Some(waker);
        let id = TimerId { index, generation: slot.generation };
        self.heap.push(Reverse((deadline_ns, id)));
        id
    }

    /// Whether the timer has fired; if not, remembers the newest waker.
    pub fn poll(&mut self, id: TimerId, waker: &Waker) -> bool {
        let slot = &mut self.slots[id.index as usize];
        if !slot.fired {
            slot.waker = Some(waker.clone());
        }
        slot.fired
    }

    /// Ends a timer, fired or not.
    pub fn remove(&mut self, id: TimerId) {
        let slot = &mut self.slots[id.index as usize];
        if slot.generation != id.generation {
            return;
        }
        slot.generation = slot.generation.wrapping_add(1);
        slot.waker = None;
        self.free.push(id.index);
        // Its heap entry is skipped when it reaches the top. Many dead entries are swept.
        if self.heap.len() > 64 && self.heap.len() > 4 * (self.slots.len() - self.free.len()) {
            let slots = &self.slots;
            self.heap
                .retain(|Reverse((_, id))| slots[id.index as usize].generation == id.generation);
        }
    }

    /// The earliest deadline of a live timer.
    pub fn next(&mut self) -> Option<u64> {
        while let Some(&Reverse((deadline, id))) = self.heap.peek() {
            if self.slots[id.index as usize].generation == id.generation {
                return Some(deadline);
            }
            self.heap.pop();
        }
        None
    }

    /// Fires all due timers and hands out their wakers.
    pub fn fire(&mut self, now_ns: u64, mut wake: impl FnMut(Waker)) {
        while let Some(deadline) = self.next() {
            if deadline > now_ns {
                return;
            }
            let Some(Reverse((_, id))) = self.heap.pop() else {
                return;
            };
            let slot = &mut self.slots[id.index as usize];
            slot.fired = true;
            if let Some(waker) = slot.waker.take() {
                wake(waker);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_fire_in_order_and_removed_ones_do_not() {
        let mut timers = Timers::default();
        let waker = Waker::noop();
        let a = timers.insert(30, waker.clone());
        let b = timers.insert(10, waker.clone());
        let c = timers.insert(20, waker.clone());
        timers.remove(b);
        assert_eq!(timers.next(), Some(20));
        let mut fired = 0;
        timers.fire(25, |_| fired += 1);
        assert_eq!(fired, 1);
        assert!(timers.poll(c, waker));
        assert!(!timers.poll(a, waker));
        let again = timers.insert(40, waker.clone());
        assert!(!timers.poll(again, waker));
    }
}
