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
//! 3. The others wait. When memory is released, the next waiter is woken, and all that fit.
//!
//! Clients that read take turns with all: every second turn belongs to the first waiter, the others
//! to the first one that *reads*: since its last reply that was not small it has sent something
//! after it had got all replies. So it does not wait for each of many before it that will not read,
//! but for a few, and those who have not shown that they read have their turn, too.
//!
//! A favoured connection that asks for more than fits waits and keeps its favour. If all favoured
//! connections wait, the first of them is admitted: they never wait for each other.
//!
//! While a connection waits, a client that holds memory is closed if its socket has accepted
//! nothing for a while, counted from when it last did, or less than [`BYTES_PER_S`] for that long,
//! counted from when somebody began to wait. The more wait, the shorter that time. The waiters
//! check for such clients periodically.
//!
//! Invariant: a connection that stops waiting or is no longer favoured wakes the next.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::client::registry::{Client, Clients, Watched};
use crate::settings::Settings;

/// How long a client may read too little while another waits; divided by the square of the number
/// of waiters.
const PATIENCE_NS: u64 = 10_000_000_000;
const PATIENCE_NS_MIN: u64 = 1_000_000_000;

/// The rate at which a client must read while another waits.
const BYTES_PER_S: u64 = 64 * 1024;

/// The interval between two checks for clients that read too little.
pub(crate) const SWEEP_NS: u64 = 250_000_000;

/// The shared state of the admissions.
#[derive(Default)]
pub(crate) struct ReplyRoom {
    /// In the order in which they were admitted.
    favoured: RefCell<Vec<Favour>>,
    waiting: RefCell<Waiting>,
    /// The next turn is that of the first waiter, whether it reads or not.
    first_next: Cell<bool>,
    /// The last known sum of unsent bytes.
    total: Cell<usize>,
    swept_ns: Cell<u64>,
}

/// Those who wait, by the order in which they began to.
#[derive(Default)]
struct Waiting {
    reading: BTreeMap<u64, Waiter>,
    others: BTreeMap<u64, Waiter>,
    /// The place of the last one that began to wait.
    last: u64,
}

struct Waiter {
    client: Rc<Client>,
    bytes: usize,
}

impl Waiting {
    fn len(&self) -> usize {
        self.reading.len() + self.others.len()
    }

    fn get_mut(&mut self, place: u64) -> Option<&mut Waiter> {
        match self.reading.get_mut(&place) {
            None => self.others.get_mut(&place),
            found => found,
        }
    }

    fn add(&mut self, waiter: Waiter) {
        self.last += 1;
        waiter.client.place.set(self.last);
        let queue = if waiter.client.reads.get() { &mut self.reading } else { &mut self.others };
        queue.insert(self.last, waiter);
    }

    fn remove(&mut self, place: u64) {
        if self.reading.remove(&place).is_none() {
            self.others.remove(&place);
        }
    }

    /// The first of those that read, or of all.
    fn first(&self, of_all: bool) -> Option<&Client> {
        let first = match (self.reading.first_key_value(), self.others.first_key_value()) {
            (Some(reading), Some(other)) if of_all => {
                Some(if reading.0 < other.0 { reading } else { other })
            }
            (reading, other) => reading.or(other),
        };
        first.map(|(_, waiter)| &*waiter.client)
    }
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
        let is_next = self.is_next(client) || self.waiting.borrow().len() == 0;
        let may = is_next && (fits || favoured.is_empty());
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
        if let Some(waiter) = self.waiting.borrow_mut().get_mut(client.place.get()) {
            waiter.bytes = bytes;
            return;
        }
        self.waiting.borrow_mut().add(Waiter { client: client.clone(), bytes });
        client.waits_for_room.set(true);
        // It may have been the last favoured one that did not wait.
        self.wake_first_favoured();
    }

    fn stop_waiting(&self, client: &Client) {
        if client.waits_for_room.replace(false) {
            if self.is_next(client) {
                self.first_next.set(!self.first_next.get());
            }
            self.waiting.borrow_mut().remove(client.place.take());
            self.wake_next();
        }
    }

    fn is_next(&self, client: &Client) -> bool {
        let waiting = self.waiting.borrow();
        waiting.first(self.first_next.get()).is_some_and(|next| next.id == client.id)
    }

    fn wake_next(&self) {
        if let Some(next) = self.waiting.borrow().first(self.first_next.get()) {
            next.wake();
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
            self.wake_next();
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
        if total < self.total.replace(total) && self.waiting.borrow().len() > 0 {
            self.wake_fitting(total_max.saturating_sub(total));
        }
    }

    fn wake_fitting(&self, mut room: usize) {
        self.wake_next();
        let waiting = self.waiting.borrow();
        for waiter in waiting.reading.values().chain(waiting.others.values()) {
            if room < Settings::REPLY_BYTES_SMALL {
                break;
            }
            if waiter.bytes <= room {
                room -= waiter.bytes;
                waiter.client.wake();
            }
        }
    }

    /// Closes the clients that have read too little for too long while others wait; returns how
    /// many.
    pub fn sweep(&self, clients: &Clients, now_ns: u64) -> u64 {
        let waiting = self.waiting.borrow().len() as u64;
        if waiting == 0 || now_ns.saturating_sub(self.swept_ns.get()) < SWEEP_NS {
            return 0;
        }
        // After a time without waiters nobody has been watched.
        let begins = now_ns.saturating_sub(self.swept_ns.replace(now_ns)) > 8 * SWEEP_NS;
        let patience_ns = (PATIENCE_NS / waiting.saturating_mul(waiting)).max(PATIENCE_NS_MIN);
        let mut closed = 0;
        clients.for_each(|client| {
            let held = client.sending_bytes.get();
            let slow_ns = slow_ns(client, now_ns, begins);
            if slow_ns >= patience_ns && !client.is_killed() {
                tracing::warn!(
                    "closing client {} at {}: it has read nothing, or hardly anything, for {} ms and holds {held} bytes \
                     of replies while {waiting} others wait for memory",
                    client.id,
                    client.address_text(),
                    slow_ns / 1_000_000,
                );
                closed += 1;
                client.kill();
            }
        });
        closed
    }
}

/// For how long a client has read nothing or, since it is watched, too little. `begins` says that
/// it has not been watched.
fn slow_ns(client: &Client, now_ns: u64, begins: bool) -> u64 {
    let (accepted, held) = (client.accepted.get(), client.sending_bytes.get());
    if held <= Settings::REPLY_BYTES_SMALL {
        client.watched.set(Watched { accepted, since_ns: 0 });
        return 0;
    }
    let last = client.watched.get();
    let since_ns = if begins || last.since_ns == 0 {
        now_ns
    } else {
        let read_ns = (accepted - last.accepted).saturating_mul(1_000_000_000) / BYTES_PER_S;
        last.since_ns.saturating_add(read_ns).min(now_ns)
    };
    client.watched.set(Watched { accepted, since_ns });
    now_ns.saturating_sub(since_ns.min(client.moved_ns.get()))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

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
    fn clients_that_read_take_turns_with_all() {
        let (room, clients) = some(9);
        assert!(room.admit(&clients[0], 100, 100, 100));
        for client in &clients[5..] {
            client.reads.set(true);
        }
        for client in &clients[1..] {
            assert!(!room.admit(client, 100, 200, 100));
        }
        let (mut order, mut last) = (Vec::new(), 0);
        while order.len() < 8 {
            room.sent(&clients[last]);
            // All of them ask, in any order.
            let may = |at: &usize| room.admit(&clients[*at], 100, 200, 100);
            last = [4, 8, 1, 5, 3, 7, 2, 6].into_iter().find(may).expect("one is admitted");
            order.push(last);
        }
        assert_eq!(order, [5, 1, 6, 2, 7, 3, 8, 4]);
    }

    #[test]
    fn a_client_that_waits_keeps_its_place() {
        let (room, clients) = some(3);
        assert!(room.admit(&clients[0], 100, 100, 100));
        assert!(!room.admit(&clients[1], 100, 200, 100) && !room.admit(&clients[2], 90, 200, 100));
        assert!(!room.admit(&clients[1], 80, 200, 100));
        room.sent(&clients[0]);
        assert!(!room.admit(&clients[2], 90, 100, 100));
        assert!(room.admit(&clients[1], 80, 100, 100));
    }

    const S: u64 = 1_000_000_000;

    /// Two clients, of which the first holds a long reply since `since_ns` and the second waits.
    fn one_waits_for_another(since_ns: u64) -> (ReplyRoom, Clients, Rc<Client>, Rc<Client>) {
        let clients = Clients::new(0, 1);
        let (holds, waits) = (clients.add(None, None, 0, 0), clients.add(None, None, 1, 0));
        let room = ReplyRoom::default();
        holds.sending_bytes.set(1 << 20);
        holds.moved_ns.set(since_ns);
        assert!(room.admit(&holds, 1 << 20, 0, 1 << 20));
        room.favour(&holds, 1 << 20, 1 << 20);
        assert!(!room.admit(&waits, 1 << 20, 1 << 20, 1 << 20));
        (room, clients, holds, waits)
    }

    #[test]
    fn a_client_that_has_stood_still_is_closed_at_the_first_sweep() {
        let (room, clients, holds, _waits) = one_waits_for_another(5 * S);
        assert_eq!(room.sweep(&clients, 15 * S), 1);
        assert!(holds.is_killed());
        let (room, clients, holds, _waits) = one_waits_for_another(6 * S);
        assert_eq!(room.sweep(&clients, 15 * S), 0);
        assert_eq!(room.sweep(&clients, 16 * S), 1);
        assert!(holds.is_killed());
    }

    #[test]
    fn a_client_that_reads_too_little_is_closed_and_one_that_reads_enough_is_not() {
        for (bytes_per_s, closed) in [(1000, true), (50_000, true), (70_000, false)] {
            let (room, clients, holds, waits) = one_waits_for_another(5 * S);
            for at in 0..240 {
                let now_ns = 6 * S + at * SWEEP_NS;
                holds.accepted.set(bytes_per_s * at / 4);
                holds.moved_ns.set(now_ns);
                room.sweep(&clients, now_ns);
            }
            assert_eq!((holds.is_killed(), waits.is_killed()), (closed, false), "{bytes_per_s}");
        }
    }

    #[test]
    fn a_client_that_reads_slowly_while_nobody_waits_gets_time_when_somebody_does() {
        let (room, clients, holds, _waits) = one_waits_for_another(5 * S);
        holds.accepted.set(1000);
        holds.moved_ns.set(500 * S);
        assert_eq!(room.sweep(&clients, 500 * S), 0);
        holds.accepted.set(1_000_000);
        holds.moved_ns.set(501 * S);
        assert_eq!(room.sweep(&clients, 501 * S), 0);
        assert!(!holds.is_killed());
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
