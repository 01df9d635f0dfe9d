//! Single flight: of all requests of a core for one block at the same time, one reads it.
//!
//! The first request leads: it reads, and leaves the result for those that join meanwhile. A leader
//! that is dropped early wakes its followers, and the next one to ask leads.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use hashbrown::HashMap;

use crate::error::Result;
use crate::read::block::Block;
use crate::read::cache::{BlockKey, FixedHashBuilder};

#[derive(Default)]
struct Flight {
    waiters: Vec<Waker>,
    followers: u32,
    state: State,
}

#[derive(Default)]
enum State {
    #[default]
    Reading,
    Abandoned,
    Landed(Result<Block>),
}

/// The flights of one core.
#[derive(Default)]
pub(crate) struct Flights {
    by_key: HashMap<BlockKey, u32, FixedHashBuilder>,
    slots: Vec<Flight>,
    free: Vec<u32>,
}

/// The part of a request in a flight.
pub(crate) enum Role<'a> {
    Leader(Leader<'a>),
    Follower(Follower<'a>),
}

/// Joins the flight for a block, or starts one.
pub(crate) fn join(flights: &RefCell<Flights>, key: BlockKey) -> Role<'_> {
    let mut inner = flights.borrow_mut();
    if let Some(&slot) = inner.by_key.get(&key) {
        inner.slots[slot as usize].followers += 1;
        return Role::Follower(Follower { flights, slot });
    }
    let slot = inner.free.pop().unwrap_or_else(|| {
        inner.slots.push(Flight::default());
        (inner.slots.len() - 1) as u32
    });
    inner.by_key.insert(key, slot);
    Role::Leader(Leader { flights, key, slot, landed: false })
}

/// The request that reads the block.
pub(crate) struct Leader<'a> {
    flights: &'a RefCell<Flights>,
    key: BlockKey,
    slot: u32,
    landed: bool,
}

impl Leader<'_> {
    /// Delivers the result to the followers, if any.
    pub fn land(mut self, result: &Result<Block>) {
        self.landed = true;
        self.end(|| State::Landed(result.clone()));
    }

    fn end(&self, state: impl FnOnce() -> State) {
        let mut waiters = {
            let mut inner = self.flights.borrow_mut();
            inner.by_key.remove(&self.key);
            let flight = &mut inner.slots[self.slot as usize];
            if flight.followers == 0 {
                inner.free.push(self.slot);
                return;
            }
            flight.state = state();
            std::mem::take(&mut flight.waiters)
        };
        for waiter in waiters.drain(..) {
            waiter.wake();
        }
        // Return the vector, so that waiting allocates nothing in the steady state.
        if let Some(flight) = self.flights.borrow_mut().slots.get_mut(self.slot as usize)
            && flight.waiters.capacity() == 0
        {
            flight.waiters = waiters;
        }
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        if !self.landed {
            self.end(|| State::Abandoned);
        }
    }
}

/// Waits for the leader. Resolves to `None` if the leader was dropped: ask again.
pub(crate) struct Follower<'a> {
    flights: &'a RefCell<Flights>,
    slot: u32,
}

impl Future for Follower<'_> {
    type Output = Option<Result<Block>>;
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut inner = self.flights.borrow_mut();
        let flight = &mut inner.slots[self.slot as usize];
        match &flight.state {
            State::Landed(result) => Poll::Ready(Some(result.clone())),
            State::Abandoned => Poll::Ready(None),
            State::Reading => {
                if !flight.waiters.iter().any(|known| known.will_wake(cx.waker())) {
                    flight.waiters.push(cx.waker().clone());
                }
                Poll::Pending
            }
        }
    }
}

impl Drop for Follower<'_> {
    fn drop(&mut self) {
        let landed = {
            let mut inner = self.flights.borrow_mut();
            let flight = &mut inner.slots[self.slot as usize];
            flight.followers -= 1;
            if flight.followers > 0 || matches!(flight.state, State::Reading) {
                return;
            }
            let landed = std::mem::take(&mut flight.state);
            flight.waiters.clear();
            inner.free.push(self.slot);
            landed
        };
        drop(landed);
    }
}
