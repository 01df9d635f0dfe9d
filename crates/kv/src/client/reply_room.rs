//! Admission of replies: all connections of a core share a bounded amount of memory for them.
//!
//! A reply of up to [`Settings::REPLY_BYTES_SMALL`] needs no admission: while the core's limit is
//! exceeded, a connection that has more than that unsent takes no further command. For a longer
//! reply the connection asks before memory is taken:
//!
//! 1. A reply that fits under the core's limit is admitted immediately.
//! 2. One connection is *favoured*: its reply is admitted however long it is, so every reply is
//!    made in the end.
//! 3. The others wait, in order. When memory is released, the first waiter is woken, and all that
//!    fit.
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
    favoured: Cell<Option<u64>>,
    waiting: RefCell<VecDeque<Waiter>>,
    /// The last known sum of unsent bytes.
    total: Cell<usize>,
    swept_ns: Cell<u64>,
}

struct Waiter {
    client: Rc<Client>,
    bytes: usize,
}

impl ReplyRoom {
    /// Whether a client may hold `bytes` more bytes when all clients hold `total` of `total_max`.
    /// If not, its task is woken when it may.
    pub fn admit(&self, client: &Rc<Client>, bytes: usize, total: usize, total_max: usize) -> bool {
        let is_first =
            self.waiting.borrow().front().is_none_or(|first| first.client.id == client.id);
        if total.saturating_add(bytes) > total_max && !self.is_favoured(client) {
            if self.favoured.get().is_some() || !is_first {
                self.wait(client, bytes);
                return false;
            }
            self.favoured.set(Some(client.id));
        }
        self.stop_waiting(client);
        true
    }

    fn wait(&self, client: &Rc<Client>, bytes: usize) {
        let mut waiting = self.waiting.borrow_mut();
        match waiting.iter_mut().find(|waiter| waiter.client.id == client.id) {
            Some(waiter) => waiter.bytes = bytes,
            None => waiting.push_back(Waiter { client: client.clone(), bytes }),
        }
        client.waits_for_room.set(true);
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

    fn is_favoured(&self, client: &Client) -> bool {
        self.favoured.get() == Some(client.id)
    }

    /// The client's reply has been sent.
    #[inline]
    pub fn sent(&self, client: &Client) {
        if self.is_favoured(client) {
            self.favoured.set(None);
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
    fn replies_that_fit_are_admitted_and_one_other_at_a_time() {
        let (room, clients) = some(4);
        assert!(room.admit(&clients[0], 60, 0, 100));
        assert!(room.admit(&clients[1], 60, 60, 100), "the favoured");
        assert!(!room.admit(&clients[2], 60, 120, 100));
        assert!(!room.admit(&clients[3], 50, 120, 100));
        // A reply that fits overtakes; the first of the others is favoured next.
        assert!(room.admit(&clients[3], 50, 50, 100));
        assert!(!room.admit(&clients[2], 60, 120, 100));
        room.sent(&clients[1]);
        assert!(!room.admit(&clients[3], 60, 120, 100), "another waits before it");
        assert!(room.admit(&clients[2], 60, 120, 100));
    }

    #[test]
    fn a_client_that_leaves_makes_room_for_the_next() {
        let (room, clients) = some(3);
        for (at, client) in clients.iter().enumerate() {
            assert_eq!(room.admit(client, 10, 100, 100), at == 0);
        }
        room.leave(&clients[0]);
        room.leave(&clients[1]);
        assert!(room.admit(&clients[2], 10, 100, 100));
        assert!(!clients[2].waits_for_room.get());
    }
}
