//! The connections of one core as the others see them: numbers, addresses, names, and how to close
//! them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::Waker;

use reactor::Event;
use resp::{Protocol, parse_i64};

use crate::client::tracking::{Tracked, TrackingState};
use crate::command::commands::{ClientFilter, ClientType, ListFilter};

/// How much a client had read when it was last looked at.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Watched {
    pub accepted: u64,
    /// Since when it has read too little; 0 if it holds no memory that others need.
    pub since_ns: u64,
}

/// The state of one connection, kept up to date by its own task.
pub(crate) struct Client {
    pub id: u64,
    pub address: Option<SocketAddr>,
    pub local_address: Option<SocketAddr>,
    pub descriptor: i32,
    pub connected_ns: u64,
    pub name: RefCell<Vec<u8>>,
    /// The name and the version of the client's library.
    pub library: RefCell<[Vec<u8>; 2]>,
    pub protocol: Cell<Protocol>,
    /// When the client last sent something.
    pub active_ns: Cell<u64>,
    /// The full name of the last command.
    pub command: Cell<&'static str>,
    /// Number of queued commands of its transaction, or -1 outside one.
    pub queued: Cell<i64>,
    /// Memory of these commands, and whether its task must drop them.
    pub queued_bytes: Cell<usize>,
    pub queue_revoked: Cell<bool>,
    pub input_bytes: Cell<usize>,
    /// A pause holds back its next command.
    pub blocked: Cell<bool>,
    pub input_room_bytes: Cell<usize>,
    pub unsent_bytes: Cell<usize>,
    /// The part of them that only the client's reading holds up.
    pub sending_bytes: Cell<usize>,
    /// Number of bytes that its socket has accepted.
    pub accepted: Rc<Cell<u64>>,
    /// When its socket last accepted bytes, or was first offered those that it has not accepted.
    pub moved_ns: Cell<u64>,
    /// What others that wait for memory have seen it read; see `reply_room`.
    pub watched: Cell<Watched>,
    /// The connection waits for memory for a reply.
    pub waits_for_room: Cell<bool>,
    /// Its place among those that wait; 0 if it does not.
    pub place: Cell<u64>,
    /// Since its last reply that was not small it has sent something after it had got all replies.
    pub reads: Cell<bool>,
    /// `CLIENT TRACKING`, and the messages about it.
    pub tracking: TrackingState,
    killed: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Client {
    /// Makes its task end now.
    pub fn kill(&self) {
        self.killed.set(true);
        self.wake();
    }

    pub fn is_killed(&self) -> bool {
        self.killed.get()
    }

    /// Wakes its task to check what has changed.
    pub fn wake(&self) {
        if let Some(waker) = self.waker.borrow().as_ref() {
            waker.wake_by_ref();
        }
    }

    /// Registers the waker of its task.
    pub fn listen(&self, waker: &Waker) {
        let mut known = self.waker.borrow_mut();
        if known.as_ref().is_none_or(|known| !known.will_wake(waker)) {
            *known = Some(waker.clone());
        }
    }

    fn has_address(address: Option<SocketAddr>, wanted: &[u8]) -> bool {
        write_address(address).as_bytes() == wanted
    }

    pub fn address_text(&self) -> String {
        write_address(self.address)
    }

    /// What it is doing, in Redis's letters.
    fn flags(&self) -> String {
        let tracked = self.tracking.tracked();
        let is = |what: fn(&Tracked) -> bool| tracked.as_deref().is_some_and(what);
        let flags = [
            ('P', self.tracking.subscribed.get()),
            ('x', self.queued.get() >= 0),
            ('t', tracked.is_some()),
            ('R', is(|tracked| tracked.broken)),
            ('B', is(|tracked| tracked.broadcast)),
        ];
        let set: String = flags.iter().filter(|(_, set)| *set).map(|(flag, _)| flag).collect();
        if set.is_empty() { "N".to_owned() } else { set }
    }

    /// Its line of `CLIENT LIST`, in Redis 7.0's format.
    pub fn describe(&self, now_ns: u64) -> Vec<u8> {
        let seconds = |since_ns: u64| now_ns.saturating_sub(since_ns) / 1_000_000_000;
        let mut line = format!("id={} ", self.id).into_bytes();
        line.extend_from_slice(
            format!(
                "addr={} laddr={} fd={} name=",
                write_address(self.address),
                write_address(self.local_address),
                self.descriptor
            )
            .as_bytes(),
        );
        line.extend_from_slice(&self.name.borrow());
        let (input, room, unsent) =
            (self.input_bytes.get(), self.input_room_bytes.get(), self.unsent_bytes.get());
        line.extend_from_slice(
            format!(
                " age={} idle={} flags={} db=0 sub={} psub=0 ssub=0 multi={} qbuf={input} \
                 qbuf-free={} argv-mem=0 multi-mem={} rbs=0 rbp=0 obl={unsent} oll=0 omem={unsent} \
                 tot-mem={} events=r cmd={} user=default redir={} resp={} lib-name=",
                seconds(self.connected_ns),
                seconds(self.active_ns.get()),
                self.flags(),
                u8::from(self.tracking.subscribed.get()),
                self.queued.get(),
                room.saturating_sub(input),
                self.queued_bytes.get(),
                room + unsent + self.queued_bytes.get() + size_of::<Self>(),
                self.command.get(),
                self.tracking.tracked().map_or(-1, |tracked| tracked.redirect as i64),
                self.protocol.get().number(),
            )
            .as_bytes(),
        );
        let library = self.library.borrow();
        line.extend_from_slice(&library[0]);
        line.extend_from_slice(b" lib-ver=");
        line.extend_from_slice(&library[1]);
        line.push(b'\n');
        line
    }
}

impl Client {
    /// Its type for `CLIENT LIST` and `CLIENT KILL`.
    fn kind(&self) -> ClientType {
        match self.tracking.subscribed.get() {
            true => ClientType::PubSub,
            false => ClientType::Normal,
        }
    }
}

fn write_address(address: Option<SocketAddr>) -> String {
    address.map_or_else(|| "?:0".to_owned(), |address| address.to_string())
}

/// The filter of `CLIENT KILL`, sent to every core.
#[derive(Clone, Debug)]
pub(crate) struct KillOrder {
    address: Option<Vec<u8>>,
    local_address: Option<Vec<u8>>,
    id: Option<u64>,
    kind: Option<ClientType>,
    /// The connection that asks: spared, or closed only after its reply.
    asker: u64,
}

impl KillOrder {
    pub fn new(filter: &ClientFilter<'_>, asker: u64) -> Self {
        Self {
            address: filter.address.map(<[u8]>::to_vec),
            local_address: filter.local_address.map(<[u8]>::to_vec),
            id: filter.id,
            kind: filter.kind,
            asker,
        }
    }
}

/// The filter of `CLIENT LIST`, sent to every core.
#[derive(Clone, Debug)]
pub(crate) enum ListOrder {
    All,
    Type(ClientType),
    Ids(Vec<u64>),
}

impl ListOrder {
    pub fn new(filter: ListFilter<'_>) -> Self {
        match filter {
            ListFilter::All => Self::All,
            ListFilter::Type(kind) => Self::Type(kind),
            ListFilter::Ids(ids) => Self::Ids(
                ids.iter()
                    .filter_map(|id| parse_i64(id).and_then(|id| u64::try_from(id).ok()))
                    .collect(),
            ),
        }
    }
}

/// Queued commands that take no more than this are not revoked.
pub(crate) const QUEUE_BYTES_SHORT: usize = 4 * 1024;
/// The interval between two looks for the longest queue.
const LOOKS_NS: u64 = 1_000_000;

/// One core's connections by number. Numbers of different cores are disjoint: core c of n issues
/// c+1, c+1+n, ...
pub(crate) struct Clients {
    list: RefCell<BTreeMap<u64, Rc<Client>>>,
    /// Notified when the last connection has gone.
    empty: Event,
    next_look_ns: Cell<u64>,
    next: Cell<u64>,
    step: u64,
}

impl Clients {
    pub fn new(core: usize, cores: usize) -> Self {
        Self {
            list: RefCell::default(),
            empty: Event::new(),
            next_look_ns: Cell::default(),
            next: Cell::new(core as u64 + 1),
            step: cores as u64,
        }
    }

    pub fn len(&self) -> usize {
        self.list.borrow().len()
    }

    /// Waits until no connection is left.
    pub async fn all_gone(&self) {
        self.empty.wait_until(|| self.len() == 0).await;
    }

    /// The number of connections that wait for the end of a pause.
    pub fn blocked(&self) -> usize {
        self.list.borrow().values().filter(|client| client.blocked.get()).count()
    }

    /// Registers a connection.
    pub fn add(
        &self,
        address: Option<SocketAddr>,
        local_address: Option<SocketAddr>,
        descriptor: i32,
        now_ns: u64,
    ) -> Rc<Client> {
        let id = self.next.get();
        self.next.set(id + self.step);
        let client = Rc::new(Client {
            id,
            address,
            local_address,
            descriptor,
            connected_ns: now_ns,
            name: RefCell::default(),
            library: RefCell::default(),
            protocol: Cell::default(),
            active_ns: Cell::new(now_ns),
            command: Cell::new("NULL"),
            queued: Cell::new(-1),
            queued_bytes: Cell::default(),
            queue_revoked: Cell::default(),
            input_bytes: Cell::default(),
            blocked: Cell::default(),
            input_room_bytes: Cell::default(),
            unsent_bytes: Cell::default(),
            sending_bytes: Cell::default(),
            accepted: Rc::default(),
            moved_ns: Cell::default(),
            watched: Cell::default(),
            waits_for_room: Cell::default(),
            place: Cell::default(),
            reads: Cell::default(),
            tracking: TrackingState::default(),
            killed: Cell::default(),
            waker: RefCell::default(),
        });
        self.list.borrow_mut().insert(id, client.clone());
        client
    }

    /// The connection with a number, if it has not ended.
    pub fn get(&self, id: u64) -> Option<Rc<Client>> {
        self.list.borrow().get(&id).filter(|client| !client.is_killed()).cloned()
    }

    /// The core that issued a connection's number.
    pub fn core_of(&self, id: u64) -> usize {
        (id.wrapping_sub(1) % self.step) as usize
    }

    pub fn remove(&self, id: u64) {
        self.list.borrow_mut().remove(&id);
        if self.len() == 0 {
            self.empty.notify_all();
        }
    }

    pub fn for_each(&self, each: impl FnMut(&Rc<Client>)) {
        self.list.borrow().values().for_each(each);
    }

    /// Tells the connection whose queued commands take the most memory to drop them. A queue of a
    /// few commands stays. Looks at all connections, so it does it at intervals.
    pub fn revoke_longest_queue(&self, now_ns: u64) {
        if now_ns < self.next_look_ns.get() {
            return;
        }
        self.next_look_ns.set(now_ns + LOOKS_NS);
        let list = self.list.borrow();
        let longest = list.values().max_by_key(|client| client.queued_bytes.get());
        if let Some(client) = longest.filter(|client| client.queued_bytes.get() > QUEUE_BYTES_SHORT)
            && !client.queue_revoked.replace(true)
        {
            client.wake();
        }
    }

    pub fn wake_all(&self) {
        self.list.borrow().values().for_each(|client| client.wake());
    }

    pub fn kill_all(&self) {
        self.list.borrow().values().for_each(|client| client.kill());
    }

    /// Closes all connections that match the order, except the one that gave it, which is only
    /// reported.
    pub fn kill(&self, order: &KillOrder) -> Killed {
        let mut killed = Killed::default();
        for client in self.list.borrow().values() {
            let wanted = order.kind.is_none_or(|kind| kind == client.kind())
                && order.id.is_none_or(|id| id == client.id)
                && order.address.as_ref().is_none_or(|to| Client::has_address(client.address, to))
                && order
                    .local_address
                    .as_ref()
                    .is_none_or(|to| Client::has_address(client.local_address, to));
            if !wanted || client.is_killed() {
                continue;
            }
            if client.id == order.asker {
                killed.asker = true;
            } else {
                client.kill();
                killed.others += 1;
            }
        }
        killed
    }

    /// The lines of the connections that the order selects, by number.
    pub fn describe(&self, order: &ListOrder, now_ns: u64) -> Vec<(u64, Vec<u8>)> {
        let list = self.list.borrow();
        let line = |client: &Rc<Client>| (client.id, client.describe(now_ns));
        match order {
            ListOrder::All => list.values().map(line).collect(),
            ListOrder::Type(kind) => {
                list.values().filter(|client| client.kind() == *kind).map(line).collect()
            }
            ListOrder::Ids(ids) => ids.iter().filter_map(|id| list.get(id)).map(line).collect(),
        }
    }
}

/// The result of a kill order on one core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Killed {
    pub others: u64,
    /// Whether the connection that gave the order matches it.
    pub asker: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter() -> ClientFilter<'static> {
        ClientFilter::default()
    }

    fn address(port: u16) -> Option<SocketAddr> {
        Some(SocketAddr::from(([127, 0, 0, 1], port)))
    }

    #[test]
    fn the_longest_queue_is_revoked_but_no_short_one() {
        let clients = Clients::new(0, 1);
        let all: Vec<_> = (0..3).map(|at| clients.add(None, None, at, 0)).collect();
        all[2].queued_bytes.set(QUEUE_BYTES_SHORT);
        clients.revoke_longest_queue(0);
        assert!(!all.iter().any(|client| client.queue_revoked.get()));
        all[1].queued_bytes.set(QUEUE_BYTES_SHORT + 1);
        clients.revoke_longest_queue(LOOKS_NS);
        let revoked = |client: &Rc<Client>| client.queue_revoked.get();
        assert_eq!([revoked(&all[0]), revoked(&all[1]), revoked(&all[2])], [false, true, false]);
    }

    #[test]
    fn numbers_of_two_cores_are_disjoint() {
        let (a, b) = (Clients::new(0, 2), Clients::new(1, 2));
        let ids = |clients: &Clients| -> Vec<u64> {
            (0..3).map(|_| clients.add(None, None, 0, 0).id).collect()
        };
        assert_eq!(ids(&a), [1, 3, 5]);
        assert_eq!(ids(&b), [2, 4, 6]);
    }

    #[test]
    fn a_kill_order_matches_all_its_filters() {
        let clients = Clients::new(0, 1);
        let a = clients.add(address(1), address(9), 3, 0);
        let b = clients.add(address(2), address(9), 4, 0);
        let order = KillOrder::new(
            &ClientFilter { id: Some(a.id), address: Some(b"127.0.0.1:2"), ..filter() },
            99,
        );
        assert_eq!(clients.kill(&order), Killed::default());
        let order = KillOrder::new(&ClientFilter { address: Some(b"127.0.0.1:2"), ..filter() }, 99);
        assert_eq!(clients.kill(&order), Killed { others: 1, asker: false });
        assert!(b.is_killed() && !a.is_killed());
        let order =
            KillOrder::new(&ClientFilter { local_address: Some(b"127.0.0.1:9"), ..filter() }, a.id);
        assert_eq!(clients.kill(&order), Killed { others: 0, asker: true });
        assert!(!a.is_killed(), "the asking connection is closed after the reply");
    }

    #[test]
    fn a_line_has_redis_fields_in_redis_order() {
        let clients = Clients::new(0, 1);
        let client = clients.add(address(54952), address(7399), 8, 0);
        *client.name.borrow_mut() = b"me".to_vec();
        let line = String::from_utf8(client.describe(5_000_000_000)).unwrap();
        let fields: Vec<&str> =
            line.trim_end().split(' ').map(|field| field.split('=').next().unwrap()).collect();
        assert_eq!(
            fields,
            [
                "id",
                "addr",
                "laddr",
                "fd",
                "name",
                "age",
                "idle",
                "flags",
                "db",
                "sub",
                "psub",
                "ssub",
                "multi",
                "qbuf",
                "qbuf-free",
                "argv-mem",
                "multi-mem",
                "rbs",
                "rbp",
                "obl",
                "oll",
                "omem",
                "tot-mem",
                "events",
                "cmd",
                "user",
                "redir",
                "resp",
                "lib-name",
                "lib-ver"
            ]
        );
        assert!(
            line.starts_with("id=1 addr=127.0.0.1:54952 laddr=127.0.0.1:7399 fd=8 name=me age=5 ")
        );
        assert!(line.ends_with('\n'));
    }
}
