//! Bounds of memory and time.
//!
//! All requests of a core together may hold a quarter of the core's pool, at most
//! [`TOTAL_BYTES_MAX`]. A connection may hold a quarter of that, so that one that takes no replies
//! leaves room for others. What waits for one disk may hold three quarters of it, because a device
//! that does not answer holds that for as long. A connection that finds no room is not read. Those
//! that wait for room of the core get it in the order in which they began to wait, so that long
//! requests are not passed by short ones for ever.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use reactor::Event;

use nbdproto::PAYLOAD_BYTES_MAX;

/// Maximum number of connections.
pub const CONNECTIONS_MAX: usize = 64;
/// Maximum number of those to one disk: one whose requests do not end counts, too.
pub const CONNECTIONS_OF_DISK_MAX: usize = CONNECTIONS_MAX / 2;
/// Maximum number of requests in flight of a connection.
pub const REQUESTS_MAX: usize = 128;
/// How long a handshake may take, in nanoseconds.
pub const HANDSHAKE_NS: u64 = 10_000_000_000;
/// How long a handshake waits for a disk that is hidden for a moment, in nanoseconds.
pub const HIDDEN_NS: u64 = 5_000_000_000;
/// A client whose machine is silent for this time has gone, in seconds.
pub const SILENT_SECONDS: u16 = 60;
/// Upper bound of the bytes that all requests of a core may hold.
const TOTAL_BYTES_MAX: usize = 4 * CONNECTION_BYTES_MAX;
/// Upper bound of those that the requests of a connection may hold: one of the longest.
const CONNECTION_BYTES_MAX: usize = PAYLOAD_BYTES_MAX as usize + REQUEST_COST;
/// Bytes that a request holds beside its data.
pub const REQUEST_COST: usize = 512;
/// How long a client may take to send a payload or to take replies: at least this, in nanoseconds,
/// and longer for more bytes.
const PATIENCE_NS: u64 = 30_000_000_000;
/// The additional time for a byte: that of one MiB a second.
const PATIENCE_NS_PER_BYTE: u64 = 1000;

const _: () = assert!(REQUESTS_MAX * REQUEST_COST < CONNECTION_BYTES_MAX / 4);

/// How long a client may take for so many bytes, in nanoseconds.
pub fn patience_ns(bytes: usize) -> u64 {
    PATIENCE_NS + PATIENCE_NS_PER_BYTE * bytes as u64
}

/// What the requests of a core may hold.
pub struct Budget {
    connection_bytes_max: usize,
    total_bytes_max: usize,
    bytes: Cell<usize>,
    /// Those that wait for room of the core, oldest first.
    line: RefCell<VecDeque<u64>>,
    /// The number of the next one.
    next: Cell<u64>,
    /// Notified after each release, and when the line has changed.
    freed: Event,
}

impl Budget {
    /// The budget of a core whose pool has `pool_bytes`.
    pub fn new(pool_bytes: usize) -> Budget {
        let total_bytes_max = (pool_bytes / 4).min(TOTAL_BYTES_MAX);
        Budget {
            connection_bytes_max: total_bytes_max / 4,
            total_bytes_max,
            bytes: Cell::new(0),
            line: RefCell::default(),
            next: Cell::new(0),
            freed: Event::new(),
        }
    }

    /// The longest payload of a request, in bytes: a power of two.
    pub fn payload_bytes_max(&self) -> u32 {
        let room = self.connection_bytes_max.saturating_sub(REQUEST_COST).max(1);
        1 << room.ilog2().min(PAYLOAD_BYTES_MAX.ilog2())
    }
}

/// What the requests of a connection hold.
pub struct Share {
    budget: Rc<Budget>,
    /// What those of the same disk hold that are not answered.
    of_disk: RefCell<Rc<Cell<usize>>>,
    bytes: Cell<usize>,
    requests: Cell<usize>,
}

impl Share {
    pub fn new(budget: &Rc<Budget>) -> Rc<Share> {
        let (of_disk, bytes, requests) = (RefCell::default(), Cell::new(0), Cell::new(0));
        Rc::new(Share { budget: budget.clone(), of_disk, bytes, requests })
    }

    /// Counts what it holds with that of the other connections to its disk.
    pub fn join(&self, of_disk: &Rc<Cell<usize>>) {
        self.of_disk.replace(of_disk.clone());
    }

    /// Waits until there is room for a request with `bytes` of data, at most
    /// [`Budget::payload_bytes_max`].
    pub async fn acquire(self: &Rc<Share>, bytes: usize) -> Permit {
        let mut place = None;
        self.budget.freed.wait_for(|| self.try_acquire(bytes, &mut place)).await
    }

    /// Takes the room, or a place in the line for that of the core.
    fn try_acquire(self: &Rc<Share>, bytes: usize, place: &mut Option<Place>) -> Option<Permit> {
        let bytes = bytes + REQUEST_COST;
        let (budget, of_disk) = (&self.budget, self.of_disk.borrow());
        if self.requests.get() >= REQUESTS_MAX
            || self.bytes.get() + bytes > budget.connection_bytes_max
            || of_disk.get() + bytes > budget.total_bytes_max / 4 * 3
        {
            // Whoever is behind it need not wait for its disk.
            *place = None;
            return None;
        }
        let number = place.get_or_insert_with(|| Place::last(budget)).number;
        let is_first = budget.line.borrow().front() == Some(&number);
        if !is_first || budget.bytes.get() + bytes > budget.total_bytes_max {
            return None;
        }
        *place = None;
        self.requests.set(self.requests.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
        of_disk.set(of_disk.get() + bytes);
        budget.bytes.set(budget.bytes.get() + bytes);
        Some(Permit { share: self.clone(), of_disk: Some(of_disk.clone()), bytes })
    }
}

/// A place in the line of a budget, until this is dropped.
struct Place {
    budget: Rc<Budget>,
    number: u64,
}

impl Place {
    fn last(budget: &Rc<Budget>) -> Place {
        let number = budget.next.replace(budget.next.get() + 1);
        budget.line.borrow_mut().push_back(number);
        Place { budget: budget.clone(), number }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut line = self.budget.line.borrow_mut();
        line.retain(|number| *number != self.number);
        if !line.is_empty() {
            self.budget.freed.notify_all();
        }
    }
}

/// What one request holds, until this is dropped.
pub struct Permit {
    share: Rc<Share>,
    of_disk: Option<Rc<Cell<usize>>>,
    bytes: usize,
}

impl Permit {
    /// The disk has answered: from now on the request holds no part of what others may have there.
    pub fn answered(&mut self) {
        if let Some(of_disk) = self.of_disk.take() {
            of_disk.set(of_disk.get() - self.bytes);
            self.share.budget.freed.notify_all();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.answered();
        let Share { budget, bytes, requests, .. } = &*self.share;
        requests.set(requests.get() - 1);
        bytes.set(bytes.get() - self.bytes);
        budget.bytes.set(budget.bytes.get() - self.bytes);
        budget.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn the_longest_payload_fits_a_connection_and_four_connections_fit_the_core() {
        for pool in [1 << 20, 8 << 20, 300 << 20, 4 << 30] {
            let budget = Rc::new(Budget::new(pool));
            let payload = budget.payload_bytes_max() as usize;
            assert!(payload.is_power_of_two());
            assert!((32 << 10..=32 << 20).contains(&payload));
            let all: Vec<_> = (0..4).map(|_| Share::new(&budget)).collect();
            let permits: Vec<_> =
                all.iter().map(|share| share.try_acquire(payload, &mut None)).collect();
            assert!(permits.iter().all(Option::is_some));
            assert!(all[0].try_acquire(payload, &mut None).is_none());
            assert!(budget.bytes.get() <= pool / 4);
            drop(permits);
            assert_eq!(budget.bytes.get(), 0);
        }
    }

    #[test]
    fn a_disk_that_does_not_answer_leaves_room_for_others() {
        let budget = Rc::new(Budget::new(1 << 30));
        let payload = budget.payload_bytes_max() as usize;
        let of_disk = Rc::<Cell<usize>>::default();
        let hung: Vec<_> = (0..9).map(|_| Share::new(&budget)).collect();
        hung.iter().for_each(|share| share.join(&of_disk));
        let mut places: Vec<_> = hung.iter().map(|_| None).collect();
        let mut held = Vec::new();
        for (share, place) in hung.iter().zip(&mut places) {
            held.extend(share.try_acquire(payload, place));
        }
        assert_eq!(held.len(), 3);
        let others: Vec<_> = (0..1).map(|_| Share::new(&budget)).collect();
        let taken = others.iter().filter_map(|share| share.try_acquire(payload, &mut None));
        assert_eq!(taken.collect::<Vec<_>>().len(), 1);
        drop(held);
        assert_eq!(of_disk.get(), 0);
        assert!(hung[5].try_acquire(payload, &mut places[5]).is_some());
    }

    #[test]
    fn small_requests_are_bounded_by_their_number() {
        let budget = Rc::new(Budget::new(1 << 30));
        let share = Share::new(&budget);
        let permits: Vec<_> = std::iter::from_fn(|| share.try_acquire(0, &mut None)).collect();
        assert_eq!(permits.len(), REQUESTS_MAX);
        assert!(Share::new(&budget).try_acquire(0, &mut None).is_some());
    }

    #[test]
    fn the_oldest_waiter_for_the_total_takes_first() {
        let budget = Rc::new(Budget::new(8 << 20));
        let shares: Vec<_> = (0..7).map(|_| Share::new(&budget)).collect();
        let mut cx = Context::from_waker(Waker::noop());
        let mut taken: Vec<_> =
            shares[..4].iter().map(|s| s.try_acquire(500 << 10, &mut None)).collect();
        assert!(taken.iter().all(Option::is_some));
        let mut long = Box::pin(shares[4].acquire(100 << 10));
        let mut gone = Box::pin(shares[5].acquire(100 << 10));
        let mut short = Box::pin(shares[6].acquire(512));
        assert!(long.as_mut().poll(&mut cx).is_pending());
        assert!(gone.as_mut().poll(&mut cx).is_pending());
        assert!(short.as_mut().poll(&mut cx).is_pending(), "it would fit");
        // One that has no room in its own share is not in the line.
        assert!(pin!(shares[0].acquire(100 << 10)).poll(&mut cx).is_pending());
        taken.pop();
        assert!(short.as_mut().poll(&mut cx).is_pending(), "others are older");
        assert!(long.as_mut().poll(&mut cx).is_ready());
        assert!(short.as_mut().poll(&mut cx).is_pending());
        drop(gone);
        assert!(short.as_mut().poll(&mut cx).is_ready());
        assert!(budget.line.borrow().is_empty());
    }
}
