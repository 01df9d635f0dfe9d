//! Shared by the tests of the server in a simulated world: a node without information, and a
//! client.

pub mod expiry;
pub mod index;
pub mod tracking;
pub mod transactions;

use std::io;
use std::net::SocketAddr;
use std::ops::Range;

use kv::{CpuSeconds, MemoryUse, NodeInfo, NodeState, Server, Shard};
use lsm::{Db, Durability, OpenOptions, WriteOptions};
use reactor::sim::{Access, Crash, Fault, FaultKind, Rng, SimConfig, World};
use reactor::{Core, Socket};
use resp::{Decoder, DecoderLimits, Reply, write_command};

/// The directory of the database.
pub const DIR: &str = "/db";

pub fn address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 6379))
}

/// The information of a node.
pub struct Node;

impl NodeInfo for Node {
    fn version(&self) -> String {
        "0".to_owned()
    }
    fn run_id(&self) -> String {
        "0".repeat(40)
    }
    fn tcp_port(&self) -> u16 {
        6379
    }
    fn process_id(&self) -> u32 {
        1
    }
    fn operating_system(&self) -> String {
        "none".to_owned()
    }
    fn executable(&self) -> String {
        String::new()
    }
    fn config_file(&self) -> String {
        String::new()
    }
    fn data_directory(&self) -> String {
        DIR.to_owned()
    }
    fn memory(&self) -> MemoryUse {
        MemoryUse::default()
    }
    fn memory_budget_bytes(&self) -> u64 {
        0
    }
    fn memory_machine_bytes(&self) -> u64 {
        0
    }
    fn cpu_seconds(&self) -> CpuSeconds {
        CpuSeconds::default()
    }
    fn shut_down(&self) {}
    fn settings(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// A world with the directory of the database, in which operations take up to `stall_ns` longer, at
/// this chance, and writes at twice the chance.
pub fn stalling_world(
    seed: u64,
    cores: usize,
    config: SimConfig,
    stall_ns: u64,
    per_million: u32,
) -> World {
    let world = World::new(seed, cores, SimConfig { capacity: 100_000, ..config });
    world.add_dir(DIR);
    let stall = FaultKind::Stall(0..stall_ns);
    world.add_fault(Fault::new(stall.clone()).chance(per_million));
    world.add_fault(Fault::new(stall).of(Access::Write).chance(per_million));
    world
}

/// Has the world crash during one of these operations: at `power` half of the crashes are power
/// cuts. At `process` a power cut may leave any subset of the writes.
pub fn crash_once(world: &World, rng: &mut Rng, durability: Durability, range: Range<u64>) {
    let crash = match durability {
        Durability::Power if rng.coin() => Crash::PowerCut,
        _ => Crash::Kill,
    };
    world.crash_at(crash, range);
}

/// Options by which memtables are switched often.
pub fn small_memtables(durability: Durability) -> WriteOptions {
    WriteOptions { durability, memtable_bytes: 20_000, ..WriteOptions::default() }
}

/// Opens the database. Neither the database nor the shard has a cache, so keys have to be read.
pub async fn open(core: &Core, write: WriteOptions) -> (Db, Shard) {
    let options = OpenOptions { cache_bytes: 0, ..OpenOptions::default() };
    let opened = Db::open_for_writing(core, DIR.as_ref(), options, write).await;
    let (db, writer) = opened.expect("it opens");
    let shard = Shard::with_memory(core, db.attach(core), writer, 0, 0);
    (db, shard)
}

/// Starts the server, and waits until clients can connect to it on every core.
pub async fn start(
    core: &Core,
    db: &Db,
    node: &std::sync::Arc<NodeState>,
    shard: Option<Shard>,
) -> Server {
    let listener = core.listen(address()).expect("it listens");
    let server = Server::start(core, db.attach(core), node, listener, shard);
    core.sleep_ns(1_000_000).await;
    server
}

/// Waits until the first core has opened the database.
pub async fn opened(core: &Core, db: &std::cell::RefCell<Option<Db>>) -> Db {
    loop {
        if let Some(db) = db.borrow().as_ref() {
            return db.clone();
        }
        core.sleep_ns(100_000).await;
    }
}

/// A client that waits for each reply.
pub struct Client {
    pub socket: Socket,
    decoder: Decoder,
}

impl Client {
    pub fn connect(core: &Core, world: &World) -> Client {
        let socket = world.connect(core, address()).expect("the server listens");
        Client { socket, decoder: Decoder::new(DecoderLimits::default()) }
    }

    pub async fn send(&self, bytes: Vec<u8>) -> io::Result<()> {
        self.socket.send(bytes).await.0
    }

    pub async fn reply(&mut self) -> io::Result<Reply> {
        loop {
            if let Some(reply) = self.decoder.next_reply().expect("replies are well formed") {
                return Ok(reply);
            }
            let (n, bytes) = self.socket.recv(Vec::new(), 4000).await;
            if n? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.decoder.feed(&bytes);
        }
    }

    pub async fn call(&mut self, words: &[&str]) -> Reply {
        let words: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
        let mut request = Vec::new();
        write_command(&mut request, &words);
        self.send(request).await.expect("the connection is open");
        self.reply().await.expect("there is a reply")
    }
}

pub fn text(reply: &Reply) -> String {
    String::from_utf8_lossy(reply.as_bytes().unwrap_or_default()).into_owned()
}

pub fn integer(reply: &Reply) -> i64 {
    match reply {
        Reply::Integer(value) => *value,
        other => panic!("no integer: {other:?}"),
    }
}

/// The seeds to play: `MILLRACE_SEED` alone, or `MILLRACE_SEEDS` of them, or `count`.
pub fn seeds(count: u64) -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    match number("MILLRACE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("MILLRACE_SEEDS").unwrap_or(count),
    }
}
