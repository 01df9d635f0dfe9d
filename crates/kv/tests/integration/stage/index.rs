//! Clients with an index of all keys, and writers, in a simulated world whose network delays,
//! divides and resets, and whose node is killed: no client says that there is no key that was made
//! by an acknowledged write.
//!
//! The clients are the real ones but for their sockets (`client::simulated`). Each key has one
//! writer, which makes and removes it by turns: its version is odd while it is there. A key whose
//! writer does not know whether a write was made is given up, and another one takes its place.
//!
//! What a client says of a key by itself must have been so
//!
//! - after a `PING` was answered: at some time since the `PING` was sent;
//! - at any time: at some time within `staleness_max`, also if it has not received anything.
//!
//! A failure names its seed; `MILLRACE_SEEDS=300` runs 300 of them, `MILLRACE_SEED=5` only this
//! one.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use client::Options;
use client::simulated::Link;
use kv::{NodeState, Settings};
use lsm::{Db, Durability, WriteOptions};
use reactor::sim::{FailureKind, NetConfig, Rng, SimConfig, World};
use reactor::{Class, Core, Socket};
use resp::{Reply, write_command};

use crate::stage::{Client, Node, crash_once, open, opened, stalling_world, start};

const CORES: usize = 3;
/// Keys of each writer at a time. A client writes as many.
const KEYS: usize = 4;
const ROUNDS: usize = 40;
const PAGE_KEYS: usize = 3;
const STALENESS_NS: u64 = 10_000_000;
const RUNS: u64 = 3;

/// What a world of writers and clients with an index has come to.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct IndexOutcome {
    /// The first violation.
    pub violation: Option<String>,
    /// Times that a client said by itself that there is no such key, and that there is a value.
    pub absent: u64,
    pub present: u64,
    /// Connections lost, and nodes killed.
    pub lost: u64,
    pub killed: u64,
    /// Answers of the index, and times that it was loaded.
    pub answers: u64,
    pub loads: u64,
    /// The trace of the world.
    pub trace: (u64, u64),
}

/// A key that is odd numbers of versions there.
struct Key {
    name: Vec<u8>,
    issued: u64,
    /// When each version was acknowledged, the last one at the end.
    acknowledged: Vec<(u64, u64)>,
}

impl Key {
    fn last(&self) -> u64 {
        self.acknowledged.last().map_or(0, |(_, version)| *version)
    }

    /// The last version that was acknowledged at a time.
    fn at(&self, ns: u64) -> u64 {
        let known = self.acknowledged.partition_point(|(then, _)| *then <= ns);
        known.checked_sub(1).map_or(0, |last| self.acknowledged[last].1)
    }

    /// Whether it may have been so since it had a version.
    fn can_be(&self, found: &Option<Vec<u8>>, since: u64) -> bool {
        match found {
            None => since.is_multiple_of(2) || self.issued > since,
            Some(value) => {
                let version = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
                version.is_some_and(|version: u64| {
                    !version.is_multiple_of(2) && (since..=self.issued).contains(&version)
                })
            }
        }
    }
}

#[derive(Default)]
struct Shared {
    opened: RefCell<Option<Db>>,
    /// Those of writers, and those of clients, by core.
    keys: RefCell<Vec<Key>>,
    names: Cell<u64>,
    links: RefCell<Vec<Link>>,
    outcome: RefCell<IndexOutcome>,
    /// Clients that have not ended.
    running: Cell<usize>,
}

impl Shared {
    /// Puts a new key, which is not there, in a place.
    fn renew(&self, place: usize) {
        let number = self.names.replace(self.names.get() + 1);
        let name = format!("key:{number}:{}", "x".repeat(20)).into_bytes();
        self.keys.borrow_mut()[place] = Key { name, issued: 0, acknowledged: Vec::new() };
    }

    /// The next version of a key, and its name.
    fn issue(&self, place: usize) -> (Vec<u8>, u64) {
        let key = &mut self.keys.borrow_mut()[place];
        key.issued += 1;
        (key.name.clone(), key.issued)
    }

    fn acknowledge(&self, place: usize, ns: u64) {
        let key = &mut self.keys.borrow_mut()[place];
        key.acknowledged.push((ns, key.issued));
    }

    /// Gives up the keys that may have been written.
    fn give_up(&self, places: impl Iterator<Item = usize>) {
        for place in places {
            let is_known = {
                let key = &self.keys.borrow()[place];
                key.issued == key.last()
            };
            if !is_known {
                self.renew(place);
            }
        }
    }

    /// Compares what a client says of all keys with the versions that they had.
    fn check(&self, core: usize, now_ns: u64, since: impl Fn(&Key) -> Option<u64>, why: &str) {
        let (keys, links) = (self.keys.borrow(), self.links.borrow());
        let mut outcome = self.outcome.borrow_mut();
        for key in keys.iter() {
            let Some(since) = since(key) else { continue };
            let Some(found) = links[core].look(&key.name, now_ns) else { continue };
            match found {
                None => outcome.absent += 1,
                Some(_) => outcome.present += 1,
            }
            if !key.can_be(&found, since) {
                let found = found.map(|value| String::from_utf8_lossy(&value).into_owned());
                let name = String::from_utf8_lossy(&key.name);
                outcome.violation.get_or_insert(format!(
                    "{why}: client {core} says {found:?} of {name}, which had version {since}, \
                     and {} at most",
                    key.issued
                ));
            }
        }
    }
}

fn places_of_writer(core: usize) -> std::ops::Range<usize> {
    core * KEYS..(core + 1) * KEYS
}

fn places_of_client(core: usize) -> std::ops::Range<usize> {
    (CORES + core) * KEYS..(CORES + core + 1) * KEYS
}

/// The connection of a client.
struct Connection {
    core: Core,
    shared: Rc<Shared>,
    socket: Socket,
}

impl Connection {
    async fn connect(core: &Core, world: &World, shared: &Rc<Shared>) -> io::Result<Connection> {
        let socket = world.connect(core, crate::stage::address())?;
        let connection = Connection { core: core.clone(), shared: shared.clone(), socket };
        connection.link(|link, now_ns| link.begin(now_ns)).expect("there is no TLS");
        connection.until(Link::is_ready).await?;
        Ok(connection)
    }

    fn link<T>(&self, act: impl FnOnce(&mut Link, u64) -> T) -> T {
        act(&mut self.shared.links.borrow_mut()[self.core.id()], self.core.now_ns())
    }

    /// Sends what is to be sent, and receives until something is so.
    async fn until(&self, is_so: impl Fn(&Link) -> bool) -> io::Result<()> {
        loop {
            let out = self.link(|link, _| link.take_out());
            if !out.is_empty() {
                self.socket.send(out).await.0?;
            }
            if self.link(|link, _| is_so(link)) {
                return Ok(());
            }
            let (n, bytes) = self.socket.recv(Vec::new(), 500).await;
            if n? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let taken = self.link(|link, now_ns| link.received(&bytes, now_ns));
            taken.expect("the server answers what was asked");
            self.check_always();
        }
    }

    fn check_always(&self) {
        let now_ns = self.core.now_ns();
        let since = |key: &Key| Some(now_ns.checked_sub(STALENESS_NS).map_or(0, |ns| key.at(ns)));
        self.shared.check(self.core.id(), now_ns, since, "at some time");
    }

    /// After an answer, nothing is older than its question.
    async fn check_coherent(&self) -> io::Result<()> {
        let known: Vec<(Vec<u8>, u64)> =
            self.shared.keys.borrow().iter().map(|key| (key.name.clone(), key.last())).collect();
        let ping = self.link(|link, now_ns| link.ping(now_ns));
        self.until(|link| link.has_answer(ping)).await?;
        let since = |key: &Key| {
            known.iter().find(|(name, _)| *name == key.name).map(|(_, version)| *version)
        };
        self.shared.check(self.core.id(), self.core.now_ns(), since, "after a PING");
        Ok(())
    }

    /// Writes a key of its own. Its answer tells that nothing is older.
    async fn write(&self, place: usize) -> io::Result<()> {
        let (name, version) = self.shared.issue(place);
        let value = (!version.is_multiple_of(2)).then(|| version.to_string());
        let number =
            self.link(|link, now| link.write(&name, value.as_ref().map(|it| it.as_bytes()), now));
        self.until(|link| link.has_answer(number)).await?;
        let now_ns = self.core.now_ns();
        self.shared.acknowledge(place, now_ns);
        let since = |key: &Key| (key.name == name).then_some(version);
        self.shared.check(self.core.id(), now_ns, since, "after its own write");
        Ok(())
    }

    async fn round(&self, rng: &mut Rng) -> io::Result<()> {
        match rng.below(10) {
            0..4 => {
                let names: Vec<Vec<u8>> =
                    self.shared.keys.borrow().iter().map(|key| key.name.clone()).collect();
                for name in names.iter().filter(|_| rng.coin()) {
                    self.link(|link, now_ns| link.get(name, now_ns));
                }
            }
            4..6 => self.write(places_of_client(self.core.id()).start + rng.index(KEYS)).await?,
            6 => self.core.sleep_ns(rng.below(3_000_000)).await,
            // It hears nothing for so long that it must not say anything.
            7 if rng.coin() => {
                self.core.sleep_ns(STALENESS_NS + rng.below(STALENESS_NS)).await;
                self.check_always();
            }
            _ => {}
        }
        self.check_coherent().await
    }
}

async fn client(core: Core, world: World, shared: Rc<Shared>, mut rng: Rng) {
    let mut connected = None;
    for _ in 0..ROUNDS {
        let done = match connected.take() {
            Some(connection) => Ok(connection),
            None => Connection::connect(&core, &world, &shared).await,
        };
        let done = match done {
            Ok(connection) => connection.round(&mut rng).await.map(|()| connection),
            Err(error) => Err(error),
        };
        match done {
            Ok(connection) if rng.below(24) > 0 => connected = Some(connection),
            _ => {
                shared.outcome.borrow_mut().lost += 1;
                shared.links.borrow_mut()[core.id()].end();
                shared.give_up(places_of_client(core.id()));
            }
        }
    }
    // It ends with its connection.
    shared.links.borrow_mut()[core.id()].end();
}

fn request(words: &[&[u8]]) -> Vec<u8> {
    let mut request = Vec::new();
    write_command(&mut request, words);
    request
}

/// Makes or removes a key, in one of the ways there are; returns the request.
fn change(name: &[u8], version: u64, rng: &mut Rng) -> Vec<u8> {
    let value = version.to_string();
    match (version.is_multiple_of(2), rng.below(4)) {
        (false, 0) => request(&[b"MSET", name, value.as_bytes()]),
        (false, 1) => request(&[b"APPEND", name, value.as_bytes()]),
        (false, 2) => request(&[b"SET", name, value.as_bytes(), b"PX", b"1000000"]),
        (false, _) => request(&[b"SET", name, value.as_bytes()]),
        (true, 0) => {
            let (from, to) = ([b"[", name].concat(), [b"(", name, b"\0"].concat());
            request(&[b"MR.DELRANGE", &from, &to])
        }
        (true, 1) => request(&[b"GETDEL", name]),
        (true, _) => request(&[b"DEL", name]),
    }
}

async fn write(core: &Core, client: &mut Client, shared: &Shared, rng: &mut Rng) -> io::Result<()> {
    // Fills memtables, so that keys are in tables, too.
    if rng.below(3) == 0 {
        client.send(request(&[b"SET", b"filler", &vec![b'x'; 2000]])).await?;
        client.reply().await?;
    }
    let places: Vec<usize> = places_of_writer(core.id()).filter(|_| rng.coin()).collect();
    let together = rng.coin();
    let mut requests = Vec::new();
    for place in &places {
        let (name, version) = shared.issue(*place);
        requests.extend(change(&name, version, rng));
    }
    if together {
        requests = [request(&[b"MULTI"]), requests, request(&[b"EXEC"])].concat();
    }
    client.send(requests).await?;
    let refused = |reply: &Reply| panic!("the server refuses: {reply:?}");
    if together {
        for _ in 0..=places.len() {
            client.reply().await?;
        }
        match client.reply().await? {
            Reply::Array(all) => {
                all.iter().filter(|reply| matches!(reply, Reply::Error(_))).for_each(refused);
            }
            reply => refused(&reply),
        }
        places.iter().for_each(|place| shared.acknowledge(*place, core.now_ns()));
    } else {
        for place in places {
            let reply = client.reply().await?;
            if matches!(reply, Reply::Error(_)) {
                refused(&reply);
            }
            shared.acknowledge(place, core.now_ns());
        }
    }
    Ok(())
}

async fn writer(core: Core, world: World, shared: Rc<Shared>, mut rng: Rng) {
    let mut client = Client::connect(&core, &world);
    for _ in 0..ROUNDS {
        if write(&core, &mut client, &shared, &mut rng).await.is_err() {
            client = Client::connect(&core, &world);
            shared.give_up(places_of_writer(core.id()));
        }
        if rng.coin() {
            core.sleep_ns(rng.below(500_000)).await;
        }
    }
}

async fn serve(core: Core, world: World, shared: Rc<Shared>, node: Arc<NodeState>, run: u64) {
    let id = core.id();
    let mut shard = None;
    if id == 0 {
        let write = WriteOptions {
            durability: Durability::Process,
            memtable_bytes: 20_000,
            ..WriteOptions::default()
        };
        let (db, owned) = open(&core, write).await;
        owned.open_deadlines().await.expect("the deadlines open");
        owned.attach(&node).await;
        shard = Some(owned);
        shared.opened.replace(Some(db));
    }
    let db = opened(&core, &shared.opened).await;
    let server = start(&core, &db, &node, shard.clone()).await;
    let mut rng = Rng::new(world.seed() ^ (id as u64) << 32 ^ run << 20);
    let reads = core
        .spawn(Class::Foreground, client(core.clone(), world.clone(), shared.clone(), rng.fork()));
    writer(core.clone(), world.clone(), shared.clone(), rng.fork()).await;
    reads.await;
    shared.running.set(shared.running.get() - 1);
    while shared.running.get() > 0 {
        core.sleep_ns(1_000_000).await;
    }
    server.stop(1_000_000_000).await;
    if let Some(shard) = shard {
        shared.opened.replace(None);
        shard.close().await.expect("it closes");
    }
}

/// Runs clients and writers on every core of a node that is killed and started again.
pub fn index(seed: u64) -> IndexOutcome {
    let mut rng = Rng::new(seed ^ 0x1D);
    let reset = [0, 2000][rng.index(2)];
    let window = [600, 64 << 10][rng.index(2)];
    let latency_ns = [5_000..100_000, 100..2_000][rng.index(2)].clone();
    let net = NetConfig { reset, window, latency_ns, ..NetConfig::default() };
    let config = SimConfig { net, ..SimConfig::default() };
    let world = stalling_world(seed, CORES, config, 2_000_000, 50_000);
    let shared: Rc<Shared> = Rc::default();
    for place in 0..2 * CORES * KEYS {
        shared.keys.borrow_mut().push(Key {
            name: Vec::new(),
            issued: 0,
            acknowledged: Vec::new(),
        });
        shared.renew(place);
    }
    for _ in 0..CORES {
        let options = Options::new()
            .cache(64 << 10)
            .index(1 << 20)
            .staleness_max(Duration::from_nanos(STALENESS_NS));
        let link = Link::new(options, PAGE_KEYS).expect("the options are possible");
        shared.links.borrow_mut().push(link);
    }
    let settings = Settings {
        // Little room for messages in half of the worlds.
        unsent_total_bytes_max: [1200, 1 << 20][rng.index(2)],
        ..Settings::default()
    };
    for run in 0..RUNS {
        if run + 1 < RUNS {
            crash_once(&world, &mut rng, Durability::Process, 50..1500);
        }
        let node = NodeState::new(CORES, settings.clone(), Node);
        shared.running.set(CORES);
        let (inside, all) = (world.clone(), shared.clone());
        let ended =
            world.run(move |core| serve(core, inside.clone(), all.clone(), node.clone(), run));
        match ended {
            Ok(_) => assert_eq!(world.open_sockets(), 0, "seed {seed}: a socket was left open"),
            Err(failure) if matches!(failure.kind, FailureKind::Crash(_)) => {
                shared.outcome.borrow_mut().killed += 1;
            }
            Err(failure) => panic!("seed {seed}: {failure}"),
        }
        shared.opened.replace(None);
        shared.links.borrow_mut().iter_mut().for_each(Link::end);
        shared.give_up(0..2 * CORES * KEYS);
        if shared.outcome.borrow().violation.is_some() {
            break;
        }
    }
    let mut outcome = shared.outcome.take();
    for stats in shared.links.borrow().iter().map(Link::stats) {
        outcome.answers += stats.index_answers;
        outcome.loads += stats.index_loads;
    }
    IndexOutcome { trace: world.trace(), ..outcome }
}
