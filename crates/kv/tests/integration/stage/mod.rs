//! Shared by the tests of the server in a simulated world: a node without information, and a
//! client.

pub mod expiry;
pub mod tracking;
pub mod transactions;

use std::io;
use std::net::SocketAddr;

use kv::{CpuSeconds, MemoryUse, NodeInfo};
use reactor::sim::World;
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
