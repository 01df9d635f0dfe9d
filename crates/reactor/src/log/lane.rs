//! The lock-free parts of the log: one thread's lane to the writer, and the tickets of flushing
//! threads.
//!
//! 1. A thread gives a line to its [`Lane`]: it claims the producer of its ring by a swap, pushes,
//!    publishes, and releases the claim by a store. A full ring drops the line and counts it.
//! 2. The writer takes lines from the lane's other end, its [`Tap`].
//! 3. A dropped lane marks itself ended. The writer drops the tap when it has seen the mark and
//!    then finds no more lines.
//!
//! Ownership: a lane belongs to one thread, but it is in a `tracing` dispatcher, which other
//! threads may clone and use. So the producer has a claim. It is not a lock, because no thread
//! waits for it: a thread that finds it taken drops the line and counts it, as with a full ring.
//!
//! Invariant: a line that [`Lane::push`] accepted arrives once, in the order of the pushes; any
//! other line is counted.

use crate::spsc::{Consumer, Producer, ring};
use loomable::{Arc, AtomicBool, AtomicU64, Ordering, UnsafeCell, mutant, weaken};

/// The state that both ends of a lane share beside the ring.
#[derive(Debug)]
pub struct LaneState {
    dropped: AtomicU64,
    ended: AtomicBool,
}

impl LaneState {
    /// Number of lines dropped so far.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// The logging thread's end.
pub struct Lane<T> {
    claimed: AtomicBool,
    producer: UnsafeCell<Producer<T>>,
    state: Arc<LaneState>,
}

// SAFETY: the only field that is not `Sync` by itself is the producer's cell, and `push` alone
// touches it, between an Acquire swap that found `false` and a Release store. So one thread at a
// time has it, and sees the effects of the previous one; `T: Send` lets the items move between
// them.
unsafe impl<T: Send> Sync for Lane<T> {}

/// The writer's end.
pub struct Tap<T> {
    consumer: Consumer<T>,
    state: Arc<LaneState>,
}

/// Makes a lane that holds up to `capacity` lines.
///
/// # Panics
/// If `capacity` is 0: a mistake in the caller's constants.
pub fn lane<T>(capacity: usize) -> (Lane<T>, Tap<T>) {
    let (producer, consumer) = ring(capacity);
    let state = Arc::new(LaneState { dropped: AtomicU64::new(0), ended: AtomicBool::new(false) });
    let lane = Lane {
        claimed: AtomicBool::new(false),
        producer: UnsafeCell::new(producer),
        state: state.clone(),
    };
    (lane, Tap { consumer, state })
}

impl<T> Lane<T> {
    /// Hands over a line; false when it was dropped and counted. The writer may need a wake-up
    /// afterwards.
    pub fn push(&self, line: T) -> bool {
        let taken = self.claimed.swap(true, weaken(Ordering::Acquire, "log.claim_relaxed"));
        let pushed = (!taken || mutant("log.no_claim"))
            && self.producer.with_mut(|producer| {
                // SAFETY: the swap found `false`, so no other thread has the producer until the
                // store below.
                unsafe { (*producer).push_published(line) }.is_ok()
            });
        if !taken {
            self.claimed.store(false, weaken(Ordering::Release, "log.unclaim_relaxed"));
        }
        if !pushed {
            self.state.dropped.fetch_add(1, Ordering::Relaxed);
        }
        pushed
    }
}

impl<T> Drop for Lane<T> {
    fn drop(&mut self) {
        // Release: a reader of the mark sees all pushed lines.
        self.state.ended.store(true, weaken(Ordering::Release, "log.end_store_relaxed"));
    }
}

impl<T> Tap<T> {
    /// Gives at most `max` lines to `take`. False when the lane has ended and is empty.
    pub fn drain(&mut self, max: usize, take: &mut impl FnMut(T)) -> bool {
        for _ in 0..max {
            match self.consumer.pop() {
                Some(line) => take(line),
                None => break,
            }
        }
        // In this order: a lane that has ended pushes no line after this check.
        let ended = self.state.ended.load(weaken(Ordering::Acquire, "log.end_load_relaxed"));
        !ended || self.consumer.pure_check()
    }

    /// Whether a [`drain`](Self::drain) would find work: loads only.
    pub fn pure_check(&self) -> bool {
        self.consumer.pure_check()
    }

    /// The lane's counts.
    pub fn state(&self) -> &Arc<LaneState> {
        &self.state
    }
}

/// Tells a thread when its lines are written.
///
/// 1. It takes a ticket, after it has logged, and wakes the writer.
/// 2. The writer reads the newest ticket, *then* takes the lines, writes them, and calls the
///    ticket.
/// 3. The thread finds its ticket called.
#[derive(Debug)]
pub struct Tickets {
    taken: AtomicU64,
    called: AtomicU64,
}

impl Tickets {
    /// No ticket taken yet.
    pub fn new() -> Tickets {
        Tickets { taken: AtomicU64::new(0), called: AtomicU64::new(0) }
    }

    /// Takes a ticket for all lines that this thread has logged so far.
    pub fn take(&self) -> u64 {
        self.taken.fetch_add(1, weaken(Ordering::AcqRel, "log.take_relaxed")) + 1
    }

    /// Whether all lines of the ticket are written.
    pub fn is_called(&self, ticket: u64) -> bool {
        self.called.load(Ordering::Acquire) >= ticket
    }

    /// Writer, before it takes lines: the newest ticket.
    pub fn newest(&self) -> u64 {
        self.taken.load(weaken(Ordering::Acquire, "log.newest_relaxed"))
    }

    /// Writer, after it has written the lines that it took after [`newest`](Self::newest): calls
    /// that ticket.
    pub fn call(&self, ticket: u64) {
        self.called.store(ticket, Ordering::Release);
    }

    /// Whether a thread waits.
    pub fn pure_check(&self) -> bool {
        self.taken.load(Ordering::Relaxed) != self.called.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_full_lane_drops_and_counts() {
        let (lane, mut tap) = lane(2);
        assert!(lane.push(1) && lane.push(2));
        assert!(!lane.push(3) && !lane.push(4));
        assert_eq!(tap.state().dropped(), 2);
        let mut got = Vec::new();
        assert!(tap.drain(usize::MAX, &mut |line| got.push(line)));
        assert!(lane.push(5), "there is room again");
        assert!(tap.drain(1, &mut |line| got.push(line)));
        assert_eq!(got, [1, 2, 5]);
    }

    #[test]
    fn an_ended_lane_is_read_to_its_end() {
        let (lane, mut tap) = lane(4);
        assert!(lane.push(1) && lane.push(2));
        drop(lane);
        let mut got = Vec::new();
        assert!(tap.drain(1, &mut |line| got.push(line)), "there is one left");
        assert!(!tap.drain(1, &mut |line| got.push(line)));
        assert_eq!(got, [1, 2]);
    }

    #[test]
    fn a_ticket_is_called_after_the_pass_that_began_after_it() {
        let tickets = Tickets::new();
        let newest = tickets.newest();
        let mine = tickets.take();
        tickets.call(newest);
        assert!(!tickets.is_called(mine) && tickets.pure_check());
        tickets.call(tickets.newest());
        assert!(tickets.is_called(mine) && !tickets.pure_check());
    }
}
