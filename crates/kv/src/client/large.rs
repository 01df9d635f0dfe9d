//! Admission of large commands: a core's connections hold them back until there is room.
//!
//! A command of up to [`Settings::REQUEST_BYTES_SMALL`] may always arrive, or of up to
//! [`Settings::REQUEST_BYTES_LEAST`] while all connections together hold much. For a larger command
//! a connection asks before it receives more of it:
//!
//! 1. One connection is *favoured*: it may receive as much as one command may have. So every
//!    command within the limit is served in the end, and two commands that have both arrived in
//!    part never wait for each other.
//! 2. The others share a quarter of that while nobody waits, so that one slow client does not hold
//!    up all.
//! 3. A connection that finds no room waits and receives nothing meanwhile, so TCP slows its client
//!    down. The first waiter is favoured next.
//!
//! A client that has room and sends next to nothing while others wait is refused after a while
//! (`pace`). The more wait, the shorter that time: otherwise each stalled client could hold the
//! others up for as long, one after the other.
//!
//! Invariant: a connection that stops waiting, for whatever reason, leaves room for waking the
//! next. So both the drop of a [`Large`] and every release of what it holds wake the first waiter.
//!
//! [`Settings::REQUEST_BYTES_SMALL`]: crate::Settings::REQUEST_BYTES_SMALL
//! [`Settings::REQUEST_BYTES_LEAST`]: crate::Settings::REQUEST_BYTES_LEAST

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use crate::client::gauge::Gauge;
use crate::client::registry::Client;
use crate::settings::Settings;

/// The others together have this fraction of the favoured connection's room.
const OTHERS_SHARE: usize = 4;

/// How long a client may send too little while another waits; divided by the square of the number
/// of waiters, so that many in a row take hardly longer than one.
pub(crate) const PATIENCE_NS: u64 = 10_000_000_000;
const PATIENCE_NS_MIN: u64 = 20_000_000;

/// The shared state of the admissions.
#[derive(Default)]
pub(crate) struct LargeRequests {
    favoured: Cell<Option<u64>>,
    waiting: RefCell<VecDeque<Rc<Client>>>,
    /// Bytes held by connections that are not favoured.
    others: Cell<usize>,
    /// Bytes of all commands that have not arrived whole or were not taken yet.
    pub held: Gauge,
}

impl LargeRequests {
    /// A command of up to this size may always arrive; less while all connections together hold
    /// much.
    pub fn small_bytes(&self, settings: &Settings) -> usize {
        match self.is_short(settings) {
            true => Settings::REQUEST_BYTES_LEAST,
            false => Settings::REQUEST_BYTES_SMALL,
        }
    }

    /// Whether all connections together hold more than half of the limit.
    pub fn is_short(&self, settings: &Settings) -> bool {
        self.held.get() > settings.requests_bytes_max / 2
    }

    fn wake_first(&self) {
        if let Some(client) = self.waiting.borrow().front() {
            client.wake();
        }
    }

    fn leave(&self, client: &Client) {
        self.waiting.borrow_mut().retain(|other| other.id != client.id);
    }
}

/// The admission of one connection.
pub(crate) struct Large {
    all: Rc<LargeRequests>,
    client: Rc<Client>,
    /// Bytes it holds as one of the others.
    bytes: usize,
    waits: bool,
}

impl Large {
    pub fn new(all: &Rc<LargeRequests>, client: &Rc<Client>) -> Self {
        Self { all: all.clone(), client: client.clone(), bytes: 0, waits: false }
    }

    /// Whether the connection may hold `bytes` bytes of a command now. If not, its task is woken
    /// when it may.
    pub fn admit(&mut self, bytes: usize, settings: &Settings) -> bool {
        if bytes <= self.all.small_bytes(settings) {
            self.done();
            return true;
        }
        let all = &*self.all;
        if self.is_favoured() || bytes <= self.bytes {
            return true;
        }
        let first = all.waiting.borrow().front().map(|client| client.id);
        let is_next = first.is_none_or(|first| first == self.client.id);
        let room = settings.requests_bytes_max / OTHERS_SHARE;
        if is_next && all.favoured.get().is_none() {
            all.favoured.set(Some(self.client.id));
            all.others.set(all.others.get() - std::mem::take(&mut self.bytes));
        } else {
            // Enough to complete a command that is just no longer small, so that it holds no room
            // while it waits for more.
            let wanted = bytes.max(Settings::REQUEST_BYTES_SMALL);
            let others = all.others.get() - self.bytes + wanted;
            if !is_next || others > room {
                if !std::mem::replace(&mut self.waits, true) {
                    let mut waiting = all.waiting.borrow_mut();
                    // Others wait for the room it holds.
                    match self.bytes > 0 {
                        true => waiting.push_front(self.client.clone()),
                        false => waiting.push_back(self.client.clone()),
                    }
                }
                return false;
            }
            all.others.set(others);
            self.bytes = wanted;
        }
        self.stop_waiting();
        true
    }

    /// Whether it waits for room.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// Whether it holds room that others may want.
    pub fn has_room(&self) -> bool {
        self.is_favoured() || self.bytes > 0
    }

    /// How long its client may send too little, if it holds room for which others wait.
    pub fn patience_ns(&self) -> Option<u64> {
        let waiting = self.all.waiting.borrow().len() as u64;
        (self.has_room() && waiting > 0)
            .then(|| (PATIENCE_NS / waiting.saturating_mul(waiting)).max(PATIENCE_NS_MIN))
    }

    /// Releases the room: the large command has been taken, or is not wanted.
    pub fn done(&mut self) {
        let all = &*self.all;
        if self.bytes > 0 {
            all.others.set(all.others.get() - std::mem::take(&mut self.bytes));
            all.wake_first();
        }
        if self.is_favoured() {
            all.favoured.set(None);
            all.wake_first();
        }
        self.stop_waiting();
    }

    /// Whether it is the favoured connection.
    fn is_favoured(&self) -> bool {
        self.all.favoured.get() == Some(self.client.id)
    }

    /// Stops waiting and wakes the next waiter, which may find room, too.
    fn stop_waiting(&mut self) {
        if std::mem::take(&mut self.waits) {
            self.all.leave(&self.client);
            self.all.wake_first();
        }
    }
}

impl Drop for Large {
    fn drop(&mut self) {
        self.done();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    use super::*;
    use crate::client::registry::Clients;

    const SMALL: usize = Settings::REQUEST_BYTES_SMALL;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    struct One {
        large: Large,
        woken: Arc<Woken>,
    }

    impl One {
        fn take_wakes(&self) -> usize {
            self.woken.0.swap(0, Ordering::Relaxed)
        }
    }

    fn some(count: usize) -> (Settings, Rc<LargeRequests>, Vec<One>) {
        let all = Rc::new(LargeRequests::default());
        let clients = Clients::new(0, 1);
        let one = |at: usize| {
            let client = clients.add(None, None, at as i32, 0);
            let woken = Arc::new(Woken::default());
            client.listen(&Waker::from(woken.clone()));
            One { large: Large::new(&all, &client), woken }
        };
        let ones = (0..count).map(one).collect();
        (Settings { requests_bytes_max: 16 * SMALL, ..Settings::default() }, all, ones)
    }

    #[test]
    fn one_connection_may_have_all_and_the_others_share_a_quarter() {
        let (settings, _, mut ones) = some(4);
        assert!(ones[0].large.admit(2 * SMALL, &settings));
        assert!(ones[0].large.admit(16 * SMALL, &settings));
        assert!(ones[1].large.admit(3 * SMALL, &settings));
        assert!(!ones[2].large.admit(2 * SMALL, &settings));
        let patience = |one: &One| one.large.patience_ns();
        assert_eq!([patience(&ones[0]), patience(&ones[1])], [Some(PATIENCE_NS); 2]);
        assert_eq!(patience(&ones[3]), None, "it holds no room");
        // A later connection does not overtake, except for small commands and for connections that
        // hold room for which others wait.
        assert!(!ones[1].large.admit(5 * SMALL, &settings));
        assert!(ones[3].large.admit(SMALL, &settings));
        ones[0].large.done();
        assert_eq!([ones[1].take_wakes(), ones[2].take_wakes()], [1, 0]);
        assert!(ones[1].large.admit(16 * SMALL, &settings));
        assert_eq!(ones[2].take_wakes(), 1, "there may be room for the next");
        assert!(ones[2].large.admit(2 * SMALL, &settings));
    }

    #[test]
    fn the_least_may_always_arrive_while_all_hold_much() {
        let (settings, all, mut ones) = some(3);
        let mut held = all.held.share();
        held.set(9 * SMALL);
        assert_eq!(all.small_bytes(&settings), Settings::REQUEST_BYTES_LEAST);
        assert!(ones[0].large.admit(SMALL / 2, &settings) && ones[0].large.has_room());
        assert!(ones[1].large.admit(SMALL / 2, &settings) && ones[1].large.has_room());
        assert_eq!(all.others.get(), SMALL, "so it need not wait while its command is small");
        assert!(ones[2].large.admit(Settings::REQUEST_BYTES_LEAST, &settings));
        assert!(!ones[2].large.has_room());
    }

    #[test]
    fn a_waiter_that_ends_wakes_the_next() {
        let (settings, all, mut ones) = some(4);
        for (at, one) in ones.iter_mut().enumerate() {
            assert_eq!(one.large.admit(5 * SMALL, &settings), at == 0);
        }
        drop(ones.remove(1));
        assert!(ones.iter().all(|one| one.take_wakes() <= 2));
        // The favoured connection ends; the first waiter is woken and dropped before it has run.
        drop(ones.remove(0));
        assert_eq!(ones[0].take_wakes(), 1);
        drop(ones.remove(0));
        assert_eq!(ones[0].take_wakes(), 1);
        assert!(ones[0].large.admit(5 * SMALL, &settings));
        ones.clear();
        assert!(all.waiting.borrow().is_empty() && all.others.get() == 0);
        assert_eq!(all.favoured.get(), None);
    }
}
