//! Admission of replies: all connections of a core share a bounded amount of memory for them.
//!
//! A reply of up to [`Settings::REPLY_BYTES_SMALL`] needs no admission: while the core's limit is
//! exceeded, a connection that has more than that unsent takes no further command. For a longer
//! reply the connection asks before memory is taken:
//!
//! 1. A reply that fits under the core's limit is admitted immediately.
//! 2. Otherwise the connection may become *favoured*. One reply is admitted however long it is, so
//!    every reply is made in the end. More connections are favoured while the replies of all
//!    favoured ones together fit the limit once more: one favoured client that does not read delays
//!    no other. So all replies take at most twice the limit, or the limit and one longer reply.
//! 3. The others wait, in order. When memory is released, the first waiter is woken, and all that
//!    fit.
//!
//! A favoured connection that asks for more than fits waits and keeps its favour. If all favoured
//! connections wait, the first of them is admitted: they never wait for each other.
//!
//! While a connection waits, a client that reads nothing of its replies for a while is closed: it
//! holds memory that others need. The more wait, the shorter that time. The waiters check for such
//! clients periodically; nothing is measured while nobody waits.
//!
//! Invariant: a connection that stops waiting or is no longer favoured wakes the next.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use crate::client::registry::{Client, Clients};
use crate::settings::Settings;

/// How long a client may read nothing while another waits; divided by the number of waiters.
const PATIENCE_NS: u64 = 10_000_000_000;
const PATIENCE_NS_MIN: u64 = 1_000_000_000;

/// The interval between two checks for clients that read nothing.
pub(crate) const SWEEP_NS: u64 = 250_000_000;

/// The shared state of the admissions.
#[derive(Default)]
pub(crate) struct ReplyRoom {
    /// In the order in which they were admitted.
    favoured: RefCell<Vec<Favour>>,
    waiting: RefCell<VecDeque<Waiter>>,
    /// The last known sum of unsent bytes.
    total: Cell<usize>,
    swept_ns: Cell<u64>,
}

struct Waiter {
    client: Rc<Client>,
    bytes: usize,
}

/// A favoured connection, and what was admitted since it is favoured.
struct Favour {
    client: Rc<Client>,
    bytes: usize,
}

impl ReplyRoom {
    /// Whether a client may hold `bytes` more bytes when all clients hold `total` of `total_max`.
    /// If not, its task is woken when it may.
    pub fn admit(&self, client: &Rc<Client>, bytes: usize, total: usize, total_max: usize) -> bool {
        if total.saturating_add(bytes) > total_max && !self.favour(client, bytes, total_max) {
            self.wait(client, bytes);
            return false;
        }
        self.stop_waiting(client);
        true
    }

    /// Admits a reply beyond the limit, if the connection is favoured or may become so.
    fn favour(&self, client: &Rc<Client>, bytes: usize, bytes_max: usize) -> bool {
        let mut favoured = self.favoured.borrow_mut();
        let sum = favoured.iter().fold(bytes, |sum, one| sum.saturating_add(one.bytes));
        let fits = sum <= bytes_max;
        if let Some(at) = favoured.iter().position(|one| one.client.id == client.id) {
            let others_wait = || {
                let mut others = favoured.iter().filter(|one| one.client.id != client.id);
                others.all(|one| one.client.waits_for_room.get())
            };
            if !fits && (at > 0 || !others_wait()) {
                return false;
            }
            favoured[at].bytes = favoured[at].bytes.saturating_add(bytes);
            return true;
        }
        let is_first =
            self.waiting.borrow().front().is_none_or(|first| first.client.id == client.id);
        let may = is_first && (fits || favoured.is_empty());
        if may {
            favoured.push(Favour { client: client.clone(), bytes });
        }
        may
    }

    /// What was just admitted is not used now; the connection will ask again for it.
    pub fn give_back(&self, client: &Client, bytes: usize) {
        let mut favoured = self.favoured.borrow_mut();
        if let Some(one) = favoured.iter_mut().find(|one| one.client.id == client.id) {
            one.bytes = one.bytes.saturating_sub(bytes);
        }
    }

    fn wait(&self, client: &Rc<Client>, bytes: usize) {
        let mut waiting = self.waiting.borrow_mut();
        match waiting.iter_mut().find(|waiter| waiter.client.id == client.id) {
            Some(waiter) => waiter.bytes = bytes,
            None => waiting.push_back(Waiter { client: client.clone(), bytes }),
        }
        if !client.waits_for_room.replace(true) {
            // It may have been the last favoured one that did not wait.
            self.wake_first_favoured();
        }
    }

    fn stop_waiting(&self, client: &Client) {
        if client.waits_for_room.replace(false) {
            self.waiting.borrow_mut().retain(|waiter| waiter.client.id != client.id);
            self.wake_first();
        }
    }

    fn wake_first(&self) {
        if let Some(first) = self.waiting.borrow().front() {
            first.client.wake();
        }
    }

    fn wake_first_favoured(&self) {
        if let Some(first) = self.favoured.borrow().first()
            && first.client.waits_for_room.get()
        {
            first.client.wake();
        }
    }

    /// The client's reply has been sent.
    #[inline]
    pub fn sent(&self, client: &Client) {
        if !self.favoured.borrow().is_empty() {
            self.end_favour(client);
        }
    }

    fn end_favour(&self, client: &Client) {
        let mut favoured = self.favoured.borrow_mut();
        let before = favoured.len();
        favoured.retain(|one| one.client.id != client.id);
        if favoured.len() < before {
            drop(favoured);
            self.wake_first_favoured();
            self.wake_first();
        }
    }

    /// The client leaves: it neither waits nor is favoured any more.
    pub fn leave(&self, client: &Client) {
        self.stop_waiting(client);
        self.sent(client);
    }

    /// Notes that all clients hold `total` bytes now.
    #[inline]
    pub fn changed(&self, total: usize, total_max: usize) {
        if total < self.total.replace(total) && !self.waiting.borrow().is_empty() {
            self.wake_fitting(total_max.saturating_sub(total));
        }
    }

    fn wake_fitting(&self, mut room: usize) {
        self.wake_first();
        for waiter in &*self.waiting.borrow() {
            if room < Settings::REPLY_BYTES_SMALL {
                break;
            }
            if waiter.bytes <= room {
                room -= waiter.bytes;
                waiter.client.wake();
            }
        }
    }

    /// Closes the clients that have read nothing for too long while others wait; returns how many.
    pub fn sweep(&self, clients: &Clients, now_ns: u64) -> u64 {
        let waiting = self.waiting.borrow().len() as u64;
        if waiting == 0 || now_ns.saturating_sub(self.swept_ns.get()) < SWEEP_NS {
            return 0;
        }
        // After a time without waiters nobody has been watched.
        let begins = now_ns.saturating_sub(self.swept_ns.replace(now_ns)) > 8 * SWEEP_NS;
        let patience_ns = (PATIENCE_NS / waiting).max(PATIENCE_NS_MIN);
        let mut closed = 0;
        clients.for_each(|client| {
            let held = client.sending_bytes.get();
            if held <= Settings::REPLY_BYTES_SMALL || begins {
                client.watched.set((client.sends.get(), now_ns));
                return;
            }
            let (sends, since_ns) = client.watched.get();
            if sends != client.sends.get() || since_ns == 0 {
                client.watched.set((client.sends.get(), now_ns));
            } else if now_ns - since_ns >= patience_ns && !client.is_killed() {
                tracing::warn!(
                    "closing client {} at {}: it has read nothing for {} ms and holds {held} bytes of replies while \
                     {waiting} others wait for memory",
                    client.id,
                    client.address_text(),
                    (now_ns - since_ns) / 1_000_000,
                );
                closed += 1;
                client.kill();
            }
        });
        closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(count: i32) -> (ReplyRoom, Vec<Rc<Client>>) {
        let clients = Clients::new(0, 1);
        (ReplyRoom::default(), (0..count).map(|at| clients.add(None, None, at, 0)).collect())
    }

    #[test]
    fn replies_that_fit_are_admitted_and_one_longer_one() {
        let (room, clients) = some(4);
        assert!(room.admit(&clients[0], 60, 0, 100));
        assert!(room.admit(&clients[1], 60, 60, 100), "the favoured");
        assert!(!room.admit(&clients[2], 60, 120, 100), "both would not fit the limit once more");
        assert!(!room.admit(&clients[3], 40, 120, 100), "another waits before it");
        // A reply that fits overtakes; the first of the others is favoured next.
        assert!(room.admit(&clients[3], 50, 50, 100));
        assert!(!room.admit(&clients[2], 60, 120, 100));
        room.sent(&clients[1]);
        assert!(!room.admit(&clients[3], 60, 120, 100), "another waits before it");
        assert!(room.admit(&clients[2], 600, 120, 100), "however long it is");
        assert!(room.admit(&clients[2], 600, 720, 100), "also the next reply of the only one");
    }

    #[test]
    fn more_are_favoured_while_their_replies_fit_the_limit_once_more() {
        let (room, clients) = some(12);
        // One that does not read keeps its favour.
        assert!(room.admit(&clients[0], 30, 100, 100));
        let (mut total, mut admitted) = (130, 0);
        for client in &clients[1..] {
            if room.admit(client, 10, total, 100) {
                (total, admitted) = (total + 10, admitted + 1);
            }
        }
        assert_eq!((total, admitted), (200, 7), "twice the limit");
        // Those that read make room for all others, one after the other.
        let mut reading: VecDeque<_> = clients[1..8].iter().collect();
        let mut waiting: VecDeque<_> = clients[8..].iter().collect();
        while let Some(client) = waiting.pop_front() {
            room.sent(reading.pop_front().unwrap());
            assert!(room.admit(client, 10, 190, 100));
            reading.push_back(client);
        }
        assert!(room.favoured.borrow().iter().map(|one| one.bytes).sum::<usize>() <= 100);
    }

    #[test]
    fn favoured_connections_do_not_wait_for_each_other() {
        let (room, clients) = some(3);
        for client in &clients {
            assert!(room.admit(client, 30, 100, 100));
        }
        assert!(!room.admit(&clients[0], 50, 190, 100), "others may finish");
        assert!(!room.admit(&clients[2], 50, 190, 100));
        assert!(!room.admit(&clients[1], 50, 190, 100));
        assert!(!room.admit(&clients[2], 50, 190, 100));
        assert!(room.admit(&clients[0], 50, 190, 100), "all wait, and it is the first");
        room.leave(&clients[0]);
        assert!(!clients[0].waits_for_room.get());
        assert!(!room.admit(&clients[2], 50, 160, 100));
        assert!(room.admit(&clients[1], 50, 160, 100), "the next one is the first");
    }

    #[test]
    fn what_is_given_back_is_not_counted_twice() {
        let (room, clients) = some(2);
        assert!(room.admit(&clients[0], 50, 100, 100));
        room.give_back(&clients[0], 50);
        assert!(room.admit(&clients[0], 50, 100, 100));
        assert!(room.admit(&clients[1], 50, 150, 100));
    }

    #[test]
    fn a_client_that_leaves_makes_room_for_the_next() {
        let (room, clients) = some(3);
        for (at, client) in clients.iter().enumerate() {
            assert_eq!(room.admit(client, 100, 100, 100), at == 0);
        }
        room.leave(&clients[0]);
        room.leave(&clients[1]);
        assert!(room.admit(&clients[2], 100, 100, 100));
        assert!(!clients[2].waits_for_room.get());
    }
}
