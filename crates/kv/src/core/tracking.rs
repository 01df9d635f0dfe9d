//! The tracked connections of one core: which keys they have read, and what they are told when
//! those are written.
//!
//! 1. A connection that reads a key enters it into the table of its core, then reads it
//!    (`connection::tracking`).
//! 2. The shard announces what was written ([`CoreState::hear`]). The table's entries of these keys
//!    end, and their connections get messages. Connections with prefixes get one message for each
//!    prefix and announcement.
//! 3. A connection sends its messages after all replies that it has begun: so none overtakes the
//!    reply to the read that entered the key.
//! 4. When all messages are queued, also those for connections of other cores, the shard is told.
//!
//! A connection hears of its own writes by itself, right after their replies.
//!
//! Bounded: the keys of all tables (`tracking-table-max-keys`), of which each core has an equal
//! part; the memory of each table; the messages of each connection, and of all connections of a
//! core. A key for which there is no room is invalidated, and so are all keys of a connection that
//! does not read its messages.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use reactor::Class;
use resp::Writer;

use crate::client::gauge::Gauge;
use crate::client::registry::Client;
use crate::client::tracking::{Named, Tracked, write_invalidation};
use crate::core::state::CoreState;
use crate::core::tracked_keys::TrackedKeys;
use crate::core::tracked_stretches::TrackedStretches;
use crate::shard::announce::Written;
use crate::shard::delete_range::KeyRange;

/// Messages queued, or keys looked at, between two checkpoints of a task.
const AT_ONCE: usize = 64;
/// Keys that one read may push out of the table.
const EVICTED_BY_READ: usize = 4;
/// Messages for other cores that are gathered.
const ELSEWHERE_MAX: usize = 1024;
/// Prefixes of the connections of a core, and their bytes.
const PREFIXES_MAX: usize = 1 << 14;
const PREFIXES_BYTES_MAX: usize = 1 << 20;
/// The pause before another core is asked again that could not be.
const ASK_AGAIN_NS: u64 = 1_000_000;

const MANY_PREFIXES: &str = "ERR too many prefixes are tracked";

/// The tracked connections of one core.
pub(crate) struct Tracking {
    table: RefCell<TrackedKeys>,
    /// The keys of stretches of blob files that connections have read.
    stretches: RefCell<TrackedStretches>,
    prefixes: RefCell<Prefixes>,
    /// The connections that are tracked, or were and have not ended.
    known: RefCell<BTreeSet<u64>>,
    /// `tracking-table-max-keys` of the node; 0 for no limit.
    pub keys_max: Cell<usize>,
    /// Keys are being taken out because there are too many.
    is_evicting: Cell<bool>,
    /// Messages that wait.
    pub pushes: Gauge,
}

/// The prefixes that connections are told of.
#[derive(Default)]
struct Prefixes {
    clients: BTreeMap<Vec<u8>, BTreeSet<u64>>,
    /// How many prefixes have each length.
    lengths: BTreeMap<usize, usize>,
    /// Pairs of a prefix and a connection, and the bytes of their prefixes.
    count: usize,
    bytes: usize,
}

impl Prefixes {
    fn add(&mut self, prefix: &[u8], client: u64) {
        if !self.clients.contains_key(prefix) {
            *self.lengths.entry(prefix.len()).or_default() += 1;
        }
        if self.clients.entry(prefix.to_vec()).or_default().insert(client) {
            self.count += 1;
            self.bytes += prefix.len();
        }
    }

    fn remove(&mut self, prefix: &[u8], client: u64) {
        let Some(clients) = self.clients.get_mut(prefix) else { return };
        if clients.remove(&client) {
            self.count -= 1;
            self.bytes -= prefix.len();
        }
        if clients.is_empty() {
            self.clients.remove(prefix);
            if let Some(count) = self.lengths.get_mut(&prefix.len()) {
                *count -= 1;
            }
            self.lengths.retain(|_, count| *count > 0);
        }
    }

    /// The prefixes that a key begins with.
    fn of<'a>(&'a self, key: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let lengths = self.lengths.range(..=key.len());
        lengths
            .map(|(length, _)| &key[..*length])
            .filter(|prefix| self.clients.contains_key(*prefix))
    }

    /// The connections with a prefix of which a key may lie in a range.
    fn of_range(&self, range: &KeyRange) -> BTreeSet<u64> {
        let meets = |prefix: &[u8]| {
            let is_before_end = range.end.as_deref().is_none_or(|end| prefix < end);
            is_before_end && (prefix >= &range.start[..] || range.start.starts_with(prefix))
        };
        let of = self.clients.iter().filter(|(prefix, _)| meets(prefix));
        of.flat_map(|(_, clients)| clients.iter().copied()).collect()
    }
}

/// A message for a connection of another core.
struct Redirected {
    /// The connection that gets it, and the one in whose place it does.
    to: u64,
    source: u64,
    /// All keys if absent.
    keys: Option<Vec<Box<[u8]>>>,
}

/// Messages for connections of other cores.
#[derive(Default)]
struct Elsewhere(BTreeMap<usize, Vec<Redirected>>);

/// How much is tracked.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TrackingStats {
    pub clients: usize,
    pub keys: usize,
    pub items: usize,
    /// Keys of stretches, counted once for each connection.
    pub stretch_keys: usize,
    pub prefixes: usize,
    pub bytes: usize,
    pub pushes_bytes: usize,
}

impl Tracking {
    pub fn new(seed: u64, keys_max: usize) -> Self {
        Self {
            table: RefCell::new(TrackedKeys::new(seed)),
            stretches: RefCell::new(TrackedStretches::new(seed)),
            prefixes: RefCell::default(),
            known: RefCell::default(),
            keys_max: Cell::new(keys_max),
            is_evicting: Cell::new(false),
            pushes: Gauge::default(),
        }
    }

    /// Whether a connection is to be told of a key.
    pub fn has(&self, key: &[u8], client: u64) -> bool {
        self.table.borrow().has(key, client) || self.stretches.borrow().has(key, client)
    }

    /// Ends a connection's read of a key; keys of its stretches stay. False if it was not to be
    /// told of the key.
    pub fn forget(&self, key: &[u8], client: u64) -> bool {
        self.table.borrow_mut().leave(key, client) || self.stretches.borrow().has(key, client)
    }
}

impl CoreState {
    /// Begins to track a connection, or changes how.
    ///
    /// # Errors
    /// The reply to the client.
    pub(crate) fn track(&self, client: &Client, tracked: Tracked) -> Result<(), &'static str> {
        let tracking = &self.tracking;
        let mut prefixes = tracking.prefixes.borrow_mut();
        let bytes: usize = tracked.prefixes.iter().map(Vec::len).sum();
        if prefixes.count + tracked.prefixes.len() > PREFIXES_MAX
            || prefixes.bytes + bytes > PREFIXES_BYTES_MAX
        {
            return Err(MANY_PREFIXES);
        }
        tracked.prefixes.iter().for_each(|prefix| prefixes.add(prefix, client.id));
        client.tracking.set(tracked);
        if tracking.known.borrow_mut().insert(client.id) {
            self.node.track(self.core.id(), true);
        }
        Ok(())
    }

    /// Ends the tracking of a connection.
    pub(crate) fn end_tracking(&self, client: &Client) {
        self.tracking.stretches.borrow_mut().end(client.id);
        let Some(tracked) = client.tracking.end() else { return };
        let mut prefixes = self.tracking.prefixes.borrow_mut();
        tracked.prefixes.iter().for_each(|prefix| prefixes.remove(prefix, client.id));
    }

    /// Forgets a connection that has ended.
    pub(crate) fn leave_tracking(&self, client: &Client) {
        let tracking = &self.tracking;
        self.end_tracking(client);
        drop(client.tracking.take_pushes(true, None, &tracking.pushes));
        let mut known = tracking.known.borrow_mut();
        if known.remove(&client.id) && known.is_empty() {
            tracking.table.borrow_mut().clear();
            self.node.track(self.core.id(), false);
        }
    }

    /// Enters a key that a connection is about to read.
    pub(crate) fn enter_key(self: &Rc<Self>, client: u64, key: &[u8]) {
        self.tracking.table.borrow_mut().enter(key, client);
        self.evict(EVICTED_BY_READ);
    }

    /// Enters the keys of a stretch that a connection is about to look up; false if too many other
    /// connections have stretches. If there is no room for them, the connection with the most is
    /// told to drop everything.
    pub(crate) fn enter_stretch(self: &Rc<Self>, client: u64, keys: &[&[u8]]) -> bool {
        if self.clients.get(client).is_none() {
            // It has ended; nobody gets the reply.
            return true;
        }
        let stretches = &self.tracking.stretches;
        if !stretches.borrow_mut().enter(client, keys) {
            return false;
        }
        while stretches.borrow().bytes() > self.node.settings().tracking_bytes_max {
            let Some(largest) = stretches.borrow_mut().end_largest() else { break };
            if !lsm::mutant("stretches_without_room_are_not_invalidated") {
                self.tell_all([largest]);
            }
        }
        true
    }

    /// Tells connections that everything is invalid.
    fn tell_all(self: &Rc<Self>, ids: impl IntoIterator<Item = u64>) {
        let mut elsewhere = Elsewhere::default();
        for client in ids.into_iter().filter_map(|id| self.clients.get(id)) {
            self.tell(&client, Named::All, &mut elsewhere);
        }
        if !elsewhere.0.is_empty() {
            let state = self.clone();
            self.core
                .spawn(Class::Foreground, async move { state.send_elsewhere(elsewhere).await });
        }
    }

    /// The largest number of keys of this core's table.
    fn tracked_keys_max(&self) -> usize {
        match self.tracking.keys_max.get() {
            0 => usize::MAX,
            keys => keys.div_ceil(self.node.cores()),
        }
    }

    fn has_too_many_keys(&self) -> bool {
        let table = self.tracking.table.borrow();
        table.len() > self.tracked_keys_max()
            || table.bytes() > self.node.settings().tracking_bytes_max && table.len() > 1
    }

    /// Takes up to `most` keys out of a table that has too many, as if they had been written.
    fn evict(self: &Rc<Self>, most: usize) {
        let mut elsewhere = Elsewhere::default();
        for _ in 0..most {
            if !self.has_too_many_keys() {
                break;
            }
            let taken = self.tracking.table.borrow_mut().take_any(self.core.random_u64());
            let Some((key, clients)) = taken else { break };
            if lsm::mutant("evicted_keys_are_not_invalidated") {
                continue;
            }
            for id in clients {
                self.tell_reader(id, &key, None, &mut elsewhere);
            }
        }
        if !elsewhere.0.is_empty() {
            let state = self.clone();
            self.core
                .spawn(Class::Foreground, async move { state.send_elsewhere(elsewhere).await });
        }
        if self.has_too_many_keys() && !self.tracking.is_evicting.replace(true) {
            let state = self.clone();
            self.core.spawn(Class::Foreground, async move {
                while state.has_too_many_keys() {
                    state.evict(AT_ONCE);
                    state.core.checkpoint().await;
                }
                state.tracking.is_evicting.set(false);
            });
        }
    }

    /// Changes `tracking-table-max-keys`.
    pub(crate) fn set_tracked_keys_max(self: &Rc<Self>, keys: usize) {
        self.tracking.keys_max.set(keys);
        self.evict(AT_ONCE);
    }

    /// How much is tracked here.
    pub(crate) fn tracking_stats(&self) -> TrackingStats {
        let tracking = &self.tracking;
        let is_on = |id: &&u64| self.clients.get(**id).is_some_and(|one| one.tracking.is_on());
        let (table, stretches) = (tracking.table.borrow(), tracking.stretches.borrow());
        TrackingStats {
            clients: tracking.known.borrow().iter().filter(is_on).count(),
            keys: table.len(),
            items: table.items(),
            stretch_keys: stretches.len(),
            prefixes: tracking.prefixes.borrow().clients.len(),
            bytes: table.bytes() + stretches.bytes() + tracking.prefixes.borrow().bytes,
            pushes_bytes: tracking.pushes.get(),
        }
    }

    /// Invalidates what the shard has announced, and tells it when the messages are queued.
    /// Suspends for other cores, and to let other tasks run.
    pub(crate) async fn hear(self: Rc<Self>, written: Vec<Written>, number: u64) {
        let mut elsewhere = Elsewhere::default();
        let mut broadcast: BTreeMap<Vec<u8>, BTreeMap<Box<[u8]>, u64>> = BTreeMap::new();
        let mut told = 0;
        for one in written {
            match one {
                Written::Key(key, author) => {
                    for prefix in self.tracking.prefixes.borrow().of(&key) {
                        broadcast.entry(prefix.to_vec()).or_default().insert(key.clone(), author);
                    }
                    let clients = self.take_readers(&key, author);
                    for id in clients {
                        self.tell_reader(id, &key, Some(author), &mut elsewhere);
                        told += 1;
                        if told % AT_ONCE == 0 {
                            self.pause(&mut elsewhere).await;
                        }
                    }
                }
                Written::Range(range) => self.hear_range(&range, &mut elsewhere).await,
                Written::All(author) => {
                    self.tracking.table.borrow_mut().clear();
                    self.tracking.stretches.borrow_mut().clear();
                    let known: Vec<u64> = self.tracking.known.borrow().iter().copied().collect();
                    for (count, id) in known.into_iter().enumerate() {
                        if let Some(client) = self.clients.get(id)
                            && !(id == author && client.tracking.tells_itself(id))
                        {
                            self.tell(&client, Named::All, &mut elsewhere);
                        }
                        if count % AT_ONCE == AT_ONCE - 1 {
                            self.pause(&mut elsewhere).await;
                        }
                    }
                }
            }
        }
        for (prefix, keys) in broadcast {
            let clients: Vec<u64> = match self.tracking.prefixes.borrow().clients.get(&prefix) {
                Some(clients) => clients.iter().copied().collect(),
                None => continue,
            };
            for id in clients {
                self.tell_broadcast(id, &prefix, &keys, &mut elsewhere);
                told += 1;
                if told % AT_ONCE == 0 {
                    self.pause(&mut elsewhere).await;
                }
            }
        }
        self.send_elsewhere(elsewhere).await;
        self.report_heard(number);
    }

    /// Lets other tasks run, and sends messages to other cores if there are many.
    async fn pause(self: &Rc<Self>, elsewhere: &mut Elsewhere) {
        if elsewhere.0.values().map(Vec::len).sum::<usize>() >= ELSEWHERE_MAX {
            self.send_elsewhere(std::mem::take(elsewhere)).await;
        }
        self.core.checkpoint().await;
    }

    /// Tells the shard that this core has heard its announcements up to a number.
    pub(crate) fn report_heard(&self, number: u64) {
        self.posters.report_heard(self.core.id(), number);
    }

    /// Ends the entry of a key, but for the connection that has written it and hears of that by
    /// itself, or has read it again in the same transaction.
    fn take_readers(&self, key: &[u8], author: u64) -> Vec<u64> {
        let mut table = self.tracking.table.borrow_mut();
        let mut clients = table.take(key);
        if let Ok(at) = clients.binary_search(&author)
            && self.clients.get(author).is_some_and(|client| client.tracking.tells_itself(author))
        {
            clients.remove(at);
            table.enter(key, author);
        } else if self.clients.get(author).is_some_and(|client| {
            client.tracking.is_on() && client.tracking.reads_last.borrow().contains(key)
        }) {
            table.enter(key, author);
        }
        drop(table);
        for id in self.tracking.stretches.borrow().readers(key) {
            let hears_by_itself = id == author
                && self.clients.get(id).is_some_and(|client| client.tracking.tells_itself(id));
            if !hears_by_itself && !clients.contains(&id) {
                clients.push(id);
            }
        }
        clients
    }

    async fn hear_range(self: &Rc<Self>, range: &KeyRange, elsewhere: &mut Elsewhere) {
        let mut before = usize::MAX;
        loop {
            let taken = self.tracking.table.borrow_mut().take_of_range(range, &mut before, AT_ONCE);
            for (key, clients) in taken {
                for id in clients {
                    self.tell_reader(id, &key, None, elsewhere);
                }
            }
            if before == 0 {
                break;
            }
            self.pause(elsewhere).await;
        }
        // Which keys there were is not known, and neither which keys stretches had of them.
        let readers = self.tracking.stretches.borrow_mut().clear();
        for client in readers.into_iter().filter_map(|id| self.clients.get(id)) {
            self.tell(&client, Named::All, elsewhere);
        }
        let clients = self.tracking.prefixes.borrow().of_range(range);
        for client in clients.into_iter().filter_map(|id| self.clients.get(id)) {
            self.tell(&client, Named::All, elsewhere);
        }
    }

    /// Tells a connection that a key which it has read was written, or that it is no longer told.
    fn tell_reader(&self, id: u64, key: &[u8], author: Option<u64>, elsewhere: &mut Elsewhere) {
        let Some(client) = self.clients.get(id) else { return };
        let is_told = client.tracking.tracked().is_some_and(|tracked| {
            let is_own = tracked.no_loop && author == Some(id);
            !tracked.broadcast && !is_own
        });
        if is_told {
            self.tell(&client, Named::Keys(&[key]), elsewhere);
        }
    }

    /// Tells a connection of the keys with one of its prefixes.
    fn tell_broadcast(
        &self,
        id: u64,
        prefix: &[u8],
        keys: &BTreeMap<Box<[u8]>, u64>,
        elsewhere: &mut Elsewhere,
    ) {
        let Some(client) = self.clients.get(id) else { return };
        let Some(tracked) = client.tracking.tracked() else { return };
        let (no_loop, for_itself) = (tracked.no_loop, tracked.redirect != 0);
        let by_itself = client.tracking.tells_itself(id);
        let form = client.tracking.form(client.protocol.get(), for_itself);
        let mut others = Vec::new();
        for (key, author) in keys {
            match *author == id {
                true if no_loop => {}
                true if by_itself => {
                    let bytes_max = self.node.settings().tracking_pushes_bytes_max();
                    let all = &self.tracking.pushes;
                    if let Some(form) = form {
                        let now_ns = self.core.now_ns();
                        client.tracking.push_own(form, (prefix, key), all, bytes_max, now_ns);
                        client.wake();
                    }
                }
                _ => others.push(&**key),
            }
        }
        if !others.is_empty() {
            self.tell(&client, Named::Keys(&others), elsewhere);
        }
    }

    /// Queues a message for a tracked connection, or for the one that gets it in its place.
    fn tell(&self, client: &Rc<Client>, named: Named<'_>, elsewhere: &mut Elsewhere) {
        let Some(to) = client.tracking.tracked().map(|tracked| tracked.redirect) else { return };
        if to == 0 || to == client.id {
            return self.queue(client, to != 0, named);
        }
        let core = self.clients.core_of(to);
        if core != self.core.id() {
            let keys = match named {
                Named::Keys(keys) => Some(keys.iter().map(|key| Box::from(*key)).collect()),
                Named::All => None,
            };
            let message = Redirected { to, source: client.id, keys };
            return elsewhere.0.entry(core).or_default().push(message);
        }
        match self.clients.get(to) {
            Some(target) => self.queue(&target, true, named),
            None => self.break_redirection(client),
        }
    }

    /// Queues a message for a connection, if it understands one.
    fn queue(&self, client: &Client, for_another: bool, named: Named<'_>) {
        let Some(form) = client.tracking.form(client.protocol.get(), for_another) else { return };
        let mut message = Vec::new();
        write_invalidation(&mut message, form, named);
        let bytes_max = self.node.settings().tracking_pushes_bytes_max();
        client.tracking.push(form, &message, &self.tracking.pushes, bytes_max);
        client.wake();
    }

    /// The connection that gets the messages of another one has gone.
    fn break_redirection(&self, client: &Client) {
        let Some(to) = client.tracking.tracked().map(|tracked| tracked.redirect) else { return };
        client.tracking.break_redirection();
        if let Some(form) = client.tracking.form(client.protocol.get(), false) {
            let mut message = Vec::new();
            let mut writer = Writer::new(&mut message, client.protocol.get());
            writer.push(2);
            writer.bulk(b"tracking-redir-broken");
            writer.integer(to as i64);
            let bytes_max = self.node.settings().tracking_pushes_bytes_max();
            client.tracking.push(form, &message, &self.tracking.pushes, bytes_max);
            client.wake();
        }
    }

    /// Queues messages for connections of other cores. Suspends until these have them.
    async fn send_elsewhere(self: &Rc<Self>, elsewhere: Elsewhere) {
        for (core, messages) in elsewhere.0 {
            let messages = Arc::new(messages);
            let gone = loop {
                let there = messages.clone();
                let asked = self.ask(core, move |there_state| there_state.queue_redirected(&there));
                if let Some(gone) = asked.await {
                    break gone;
                }
                if self.stopping.get() {
                    break Vec::new();
                }
                self.core.sleep_ns(ASK_AGAIN_NS).await;
            };
            for client in gone.into_iter().filter_map(|id| self.clients.get(id)) {
                self.break_redirection(&client);
            }
        }
    }

    /// Queues messages for connections of this core. Returns the connections of which the one that
    /// gets their messages has gone.
    fn queue_redirected(&self, messages: &[Redirected]) -> Vec<u64> {
        let mut gone = Vec::new();
        for Redirected { to, source, keys } in messages {
            let Some(client) = self.clients.get(*to) else {
                gone.push(*source);
                continue;
            };
            match keys {
                None => self.queue(&client, true, Named::All),
                Some(keys) => {
                    let keys: Vec<&[u8]> = keys.iter().map(|key| &**key).collect();
                    self.queue(&client, true, Named::Keys(&keys));
                }
            }
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefixes_of_a_key_and_of_a_range_are_found() {
        let mut prefixes = Prefixes::default();
        for (prefix, client) in [("", 1), ("user:", 2), ("user:1", 3), ("user:", 4), ("x", 5)] {
            prefixes.add(prefix.as_bytes(), client);
        }
        let of = |prefixes: &Prefixes, key: &str| {
            let found =
                prefixes.of(key.as_bytes()).map(|p| String::from_utf8_lossy(p).into_owned());
            found.collect::<Vec<_>>()
        };
        assert_eq!(of(&prefixes, "user:17"), ["", "user:", "user:1"]);
        assert_eq!(of(&prefixes, "use"), [""]);
        let range = |start: &str, end: Option<&str>| KeyRange {
            start: start.into(),
            end: end.map(|end| end.into()),
        };
        let of_range = |range: KeyRange| prefixes.of_range(&range).into_iter().collect::<Vec<_>>();
        assert_eq!(of_range(range("user:17", Some("user:18"))), [1, 2, 3, 4]);
        assert_eq!(of_range(range("user:2", None)), [1, 2, 4, 5]);
        assert_eq!(of_range(range("a", Some("b"))), [1]);
        prefixes.remove(b"user:", 2);
        assert_eq!(of(&prefixes, "user:17"), ["", "user:", "user:1"]);
        prefixes.remove(b"user:", 4);
        assert_eq!(of(&prefixes, "user:17"), ["", "user:1"]);
        assert_eq!((prefixes.count, prefixes.bytes), (3, 7));
    }
}
