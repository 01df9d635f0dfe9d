//! Caching readers, some of which read ahead in the order of the writes, and writers in a simulated
//! world whose network delays, divides and resets: no reader finds in its cache what was
//! overwritten by an acknowledged write.
//!
//! All writes of a key are increments, so a value tells its version. A reader that asks the node
//! for anything, and takes the invalidations that come before the answer, must then hold no value
//! older than the last increment that was acknowledged before it asked. Whatever it reads must be
//! as new.
//!
//! A failure names its seed; `MILLRACE_SEEDS=300` runs 300 of them, `MILLRACE_SEED=5` only this
//! one.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

use crate::stage::{Client, Node, open, opened, stalling_world, start, text};
use kv::{NodeState, Settings};
use lsm::{Db, WriteOptions};
use reactor::sim::{NetConfig, Rng, SimConfig, World};
use reactor::{Class, Core};
use resp::{Reply, write_command};

const CORES: usize = 3;
const KEYS: usize = 5;
const ROUNDS: usize = 40;

/// What a world of readers and writers has come to.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The first violation.
    pub violation: Option<String>,
    /// Values found in caches, invalidations of keys and of everything, and connections lost.
    pub hits: u64,
    /// Values that stretches of blob files have brought.
    pub ahead: u64,
    pub invalidated: u64,
    pub flushed: u64,
    pub lost: u64,
}

#[derive(Default)]
struct Shared {
    opened: RefCell<Option<Db>>,
    /// The last acknowledged version of each key.
    acknowledged: RefCell<[i64; KEYS]>,
    outcome: RefCell<Outcome>,
    /// All values are in blob files.
    blobs: Cell<bool>,
    /// Clients that have not ended.
    running: Cell<usize>,
}

impl Shared {
    fn acknowledge(&self, key: usize, version: i64) {
        let known = &mut self.acknowledged.borrow_mut()[key];
        *known = version.max(*known);
    }

    fn fail(&self, what: String) {
        self.outcome.borrow_mut().violation.get_or_insert(what);
    }
}

/// Long names make long messages.
fn key(number: usize) -> Vec<u8> {
    format!("key:{number}:{}", "x".repeat(50)).into_bytes()
}

fn number_of(key: &Reply) -> Option<usize> {
    text(key).split(':').nth(1)?.parse().ok()
}

fn request(words: &[&[u8]]) -> Vec<u8> {
    let mut request = Vec::new();
    write_command(&mut request, words);
    request
}

fn version(reply: &Reply) -> i64 {
    match reply {
        Reply::Null => 0,
        Reply::Integer(version) => *version,
        reply => text(reply).parse().unwrap_or_else(|_| panic!("not a version: {reply:?}")),
    }
}

/// How a reader is tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Default,
    NoLoop,
    OptIn,
    Broadcast,
    /// Another connection is told, in RESP3 or RESP2.
    Redirect(bool),
}

/// A client with a cache.
struct Reader {
    shared: Rc<Shared>,
    mode: Mode,
    client: Client,
    /// The connection that is told in its place.
    listener: Option<Client>,
    cache: BTreeMap<usize, i64>,
}

impl Reader {
    async fn connect(
        core: &Core,
        world: &World,
        shared: Rc<Shared>,
        mode: Mode,
    ) -> io::Result<Self> {
        let mut client = Client::connect(core, world);
        let mut listener = None;
        let mut words: Vec<&[u8]> = vec![b"CLIENT", b"TRACKING", b"ON"];
        let id;
        match mode {
            Mode::Default => {}
            Mode::NoLoop => words.push(b"NOLOOP"),
            Mode::OptIn => words.push(b"OPTIN"),
            Mode::Broadcast => words.extend([&b"BCAST"[..], b"PREFIX", b"key:"]),
            Mode::Redirect(version_three) => {
                let mut other = Client::connect(core, world);
                other.send(request(&[b"CLIENT", b"ID"])).await?;
                id = version(&other.reply().await?).to_string();
                other
                    .send(match version_three {
                        true => request(&[b"HELLO", b"3"]),
                        false => request(&[b"SUBSCRIBE", b"__redis__:invalidate"]),
                    })
                    .await?;
                other.reply().await?;
                words.extend([&b"REDIRECT"[..], id.as_bytes()]);
                listener = Some(other);
            }
        }
        if listener.is_none() {
            client.send(request(&[b"HELLO", b"3"])).await?;
            client.reply().await?;
        }
        client.send(request(&words)).await?;
        assert_eq!(client.reply().await?, Reply::Simple(b"OK".to_vec()));
        Ok(Self { shared, mode, client, listener, cache: BTreeMap::new() })
    }

    /// Takes an invalidation; returns any other reply.
    fn take(&mut self, reply: Reply) -> Option<Reply> {
        let words = match &reply {
            Reply::Push(words) | Reply::Array(words) => words,
            _ => return Some(reply),
        };
        match words.first().map(text).as_deref() {
            Some("invalidate" | "message") => {}
            _ => return Some(reply),
        }
        let mut outcome = self.shared.outcome.borrow_mut();
        match words.last() {
            Some(Reply::Array(keys)) => {
                for key in keys.iter().filter_map(number_of) {
                    outcome.invalidated += 1;
                    self.cache.remove(&key);
                }
            }
            _ => {
                outcome.flushed += 1;
                self.cache.clear();
            }
        }
        None
    }

    /// The next reply on the connection that reads.
    async fn reply(&mut self) -> io::Result<Reply> {
        loop {
            let reply = self.client.reply().await?;
            if let Some(reply) = self.take(reply) {
                return Ok(reply);
            }
        }
    }

    /// Notes a value that was read, which must be as new as what was acknowledged before.
    fn note(&mut self, key: usize, reply: &Reply, floor: &[i64; KEYS]) {
        let found = version(reply);
        if found < floor[key] {
            self.shared
                .fail(format!("{:?} read {found} of {key}, after {}", self.mode, floor[key]));
        }
        self.cache.insert(key, found);
    }

    fn get(&self, key: &[u8]) -> Vec<u8> {
        self.caching(&[b"GET", key])
    }

    /// A command whose keys are entered.
    fn caching(&self, words: &[&[u8]]) -> Vec<u8> {
        let request_bytes = request(words);
        match self.mode {
            Mode::OptIn => [request(&[b"CLIENT", b"CACHING", b"YES"]), request_bytes].concat(),
            _ => request_bytes,
        }
    }

    async fn get_reply(&mut self) -> io::Result<Reply> {
        if self.mode == Mode::OptIn {
            assert_eq!(self.reply().await?, Reply::Simple(b"OK".to_vec()));
        }
        self.reply().await
    }

    /// Reads keys, sent together.
    async fn read(&mut self, keys: &[usize]) -> io::Result<()> {
        let floor = *self.shared.acknowledged.borrow();
        let requests: Vec<u8> = keys.iter().flat_map(|number| self.get(&key(*number))).collect();
        self.client.send(requests).await?;
        for key in keys {
            let reply = self.get_reply().await?;
            self.note(*key, &reply, &floor);
        }
        Ok(())
    }

    /// Reads a key, and what is stored around it.
    async fn read_ahead(&mut self, number: usize, from: u64) -> io::Result<()> {
        let floor = *self.shared.acknowledged.borrow();
        self.client.send(self.caching(&[b"MR.GET", &key(number)])).await?;
        let reply = self.get_reply().await?;
        let Reply::Array(words) = &reply else {
            self.note(number, &reply, &floor);
            return Ok(());
        };
        self.note(number, words.last().expect("a value"), &floor);
        let [file, _, _] = &words[..] else { return Ok(()) };
        let (file, from) = (version(file).to_string(), from.to_string());
        let floor = *self.shared.acknowledged.borrow();
        let words: [&[u8]; 4] = [b"MR.STRETCH", file.as_bytes(), from.as_bytes(), b"100000"];
        self.client.send(self.caching(&words)).await?;
        let reply = self.get_reply().await?;
        let Reply::Array(frames) = &reply else { panic!("no stretch: {reply:?}") };
        for frame in &frames[1..] {
            let mut rest = frame.as_bytes().expect("a frame");
            while let Some((header, after)) = rest.split_first_chunk::<16>() {
                let length = |at: usize| {
                    u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes")) as usize
                };
                let (key, after) = after.split_at(length(0));
                let (value, after) = after.split_at(length(4));
                if let Some(number) = number_of(&Reply::Bulk(key.to_vec())) {
                    self.note(number, &Reply::Bulk(value.to_vec()), &floor);
                    self.shared.outcome.borrow_mut().ahead += 1;
                }
                rest = after;
            }
        }
        Ok(())
    }

    /// Reads keys in a transaction, and increments one of them.
    async fn transact(&mut self, keys: &[usize], written: usize) -> io::Result<()> {
        let floor = *self.shared.acknowledged.borrow();
        let mut requests = request(&[b"MULTI"]);
        for number in keys {
            requests.extend(request(&[b"GET", &key(*number)]));
        }
        requests.extend(request(&[b"INCR", &key(written)]));
        requests.extend(request(&[b"EXEC"]));
        if self.mode == Mode::OptIn {
            requests = [request(&[b"CLIENT", b"CACHING", b"YES"]), requests].concat();
        }
        self.client.send(requests).await?;
        let before = keys.len() + 2 + usize::from(self.mode == Mode::OptIn);
        for _ in 0..before {
            self.reply().await?;
        }
        let Reply::Array(found) = self.reply().await? else { panic!("no answer to EXEC") };
        for (key, reply) in keys.iter().zip(&found) {
            self.note(*key, reply, &floor);
        }
        let last = found.last().map_or(0, version);
        self.wrote(written, last);
        Ok(())
    }

    /// The connection itself has written a key.
    fn wrote(&mut self, key: usize, version: i64) {
        self.shared.acknowledge(key, version);
        if self.mode == Mode::NoLoop {
            self.cache.remove(&key);
        }
    }

    async fn increment(&mut self, number: usize) -> io::Result<()> {
        self.client.send(request(&[b"INCR", &key(number)])).await?;
        let reply = self.reply().await?;
        self.wrote(number, version(&reply));
        Ok(())
    }

    /// Takes all invalidations of writes acknowledged so far, and checks the cache.
    async fn check(&mut self) -> io::Result<()> {
        let floor = *self.shared.acknowledged.borrow();
        match self.listener.take() {
            None => {
                self.client.send(request(&[b"PING"])).await?;
                self.reply().await?;
            }
            Some(mut listener) => {
                let asked = listener.send(request(&[b"PING"])).await;
                let mut taken = asked;
                while taken.is_ok() {
                    match listener.reply().await {
                        Ok(reply) if self.take(reply.clone()).is_some() => break,
                        Ok(_) => {}
                        Err(error) => taken = Err(error),
                    }
                }
                self.listener = Some(listener);
                taken?;
            }
        }
        for (key, found) in &self.cache {
            self.shared.outcome.borrow_mut().hits += 1;
            if *found < floor[*key] {
                let text = format!("{:?} holds {found} of {key}, after {}", self.mode, floor[*key]);
                self.shared.fail(text);
            }
        }
        Ok(())
    }

    async fn round(&mut self, core: &Core, rng: &mut Rng) -> io::Result<()> {
        let some: Vec<usize> = (0..KEYS).filter(|_| rng.coin()).collect();
        match rng.below(10) {
            0..4 => self.read(&some).await?,
            8 | 9 => self.read_ahead(rng.index(KEYS), [0, rng.below(3000)][rng.index(2)]).await?,
            4 => self.increment(rng.index(KEYS)).await?,
            5 => self.transact(&some, rng.index(KEYS)).await?,
            // It reads nothing for a while.
            6 => core.sleep_ns(rng.below(3_000_000)).await,
            _ => {
                self.read(&some).await?;
                self.increment(rng.index(KEYS)).await?;
            }
        }
        self.check().await
    }
}

async fn reader(core: Core, world: World, shared: Rc<Shared>, mut rng: Rng) {
    let modes = [
        Mode::Default,
        Mode::NoLoop,
        Mode::OptIn,
        Mode::Broadcast,
        Mode::Redirect(true),
        Mode::Redirect(false),
    ];
    let mut connected = None;
    for _ in 0..ROUNDS {
        let mode = modes[rng.index(modes.len())];
        // What it has cached is gone with the connection.
        let mut now = match connected.take() {
            Some(now) => now,
            None => match Reader::connect(&core, &world, shared.clone(), mode).await {
                Ok(now) => now,
                Err(_) => continue,
            },
        };
        match now.round(&core, &mut rng).await {
            Ok(()) if rng.below(16) > 0 => connected = Some(now),
            _ => shared.outcome.borrow_mut().lost += 1,
        }
    }
}

async fn write(client: &mut Client, shared: &Shared, rng: &mut Rng) -> io::Result<()> {
    // Fills memtables, so that keys are in tables and have to be read.
    if rng.below(3) == 0 {
        client.send(request(&[b"SET", b"filler", &vec![b'x'; 2000]])).await?;
        client.reply().await?;
    }
    let keys: Vec<usize> = (0..1 + rng.index(4)).map(|_| rng.index(KEYS)).collect();
    let together = rng.coin();
    let mut requests: Vec<u8> =
        keys.iter().flat_map(|number| request(&[b"INCR", &key(*number)])).collect();
    if together {
        requests = [request(&[b"MULTI"]), requests, request(&[b"EXEC"])].concat();
    }
    client.send(requests).await?;
    if together {
        for _ in 0..=keys.len() {
            client.reply().await?;
        }
        if let Reply::Array(found) = client.reply().await? {
            keys.iter().zip(&found).for_each(|(key, now)| shared.acknowledge(*key, version(now)));
        }
    } else {
        for key in keys {
            shared.acknowledge(key, version(&client.reply().await?));
        }
    }
    Ok(())
}

async fn writer(core: Core, world: World, shared: Rc<Shared>, mut rng: Rng) {
    let mut client = Client::connect(&core, &world);
    for _ in 0..ROUNDS {
        if write(&mut client, &shared, &mut rng).await.is_err() {
            client = Client::connect(&core, &world);
        }
        if rng.coin() {
            core.sleep_ns(rng.below(500_000)).await;
        }
    }
}

async fn serve(core: Core, world: World, shared: Rc<Shared>, node: std::sync::Arc<NodeState>) {
    let (id, seed) = (core.id(), world.seed());
    let mut shard = None;
    if id == 0 {
        let blobs = shared.blobs.get();
        let write = WriteOptions {
            memtable_bytes: if blobs { 4_000 } else { 20_000 },
            blob_min: blobs.then_some(1),
            blob_file_bytes: 16 << 10,
            ..WriteOptions::default()
        };
        let (db, owned) = open(&core, write).await;
        owned.attach(&node).await;
        shard = Some(owned);
        shared.opened.replace(Some(db));
    }
    let db = opened(&core, &shared.opened).await;
    let server = start(&core, &db, &node, shard.clone()).await;
    let mut rng = Rng::new(seed ^ (id as u64) << 32);
    let reads = core
        .spawn(Class::Foreground, reader(core.clone(), world.clone(), shared.clone(), rng.fork()));
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

/// Runs readers and writers on every core of a node.
pub fn tracking(seed: u64) -> Outcome {
    let mut rng = Rng::new(seed ^ 0x7C);
    let reset = [0, 2000][rng.index(2)];
    let window = [600, 64 << 10][rng.index(2)];
    // In a quick network answers and messages between cores race.
    let latency_ns = [5_000..100_000, 100..2_000][rng.index(2)].clone();
    let net = NetConfig { reset, window, latency_ns, ..NetConfig::default() };
    let config = SimConfig { net, ..SimConfig::default() };
    let world = stalling_world(seed, CORES, config, 2_000_000, 50_000);
    let settings = Settings {
        // Two keys on each core, or as many as there are; little room for messages in half of the
        // worlds.
        tracking_keys_max: [2 * CORES, 0][rng.index(2)],
        // Room for the stretches of one connection in half of them.
        tracking_bytes_max: [8_000, 1 << 20][rng.index(2)],
        unsent_total_bytes_max: [1200, 1 << 20][rng.index(2)],
        ..Settings::default()
    };
    let node = NodeState::new(CORES, settings, Node);
    let shared: Rc<Shared> = Rc::default();
    shared.running.set(CORES);
    shared.blobs.set(rng.coin());
    let (inside, all) = (world.clone(), shared.clone());
    let ended = world.run(move |core| serve(core, inside.clone(), all.clone(), node.clone()));
    if let Err(failure) = ended {
        panic!("seed {seed}: {failure}");
    }
    assert_eq!(world.open_sockets(), 0, "seed {seed}: a socket was left open");
    shared.outcome.take()
}
