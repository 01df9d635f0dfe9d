//! A simulated network: listeners and streams in memory, with delays, partial transfers, full
//! windows and resets.
//!
//! A stream is two pipes. Sent bytes are cut into random pieces, travel for a random time, keep
//! their order, and wait at the other side until they are received. At most one window of bytes is
//! in flight or waiting, so a side that does not read stops the sender. An end travels after the
//! data; a reset does not overtake the data, but makes arrived data unreadable, as in TCP.
//!
//! An operation that cannot proceed waits; each change of its descriptor checks all its waiters
//! again (see `State::settle`).

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Range;

use super::rng::Rng;

/// The settings of the network.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// Travel time of bytes in nanoseconds.
    pub latency_ns: Range<u64>,
    /// Most bytes in flight or waiting to be received, in each direction.
    pub window: usize,
    /// Chance in a million that a send or a receive is partial.
    pub partial: u32,
    /// Chance in a million that a send finds the connection reset.
    pub reset: u32,
    /// Chance in a million that an accept fails for lack of descriptors.
    pub accept_error: u32,
}

impl Default for NetConfig {
    fn default() -> NetConfig {
        NetConfig {
            latency_ns: 5_000..100_000,
            window: 64 << 10,
            partial: 200_000,
            reset: 0,
            accept_error: 0,
        }
    }
}

/// A listening socket.
pub(crate) struct Listening {
    pub addr: SocketAddr,
    /// Connections that have arrived, by descriptor.
    pub backlog: VecDeque<i32>,
}

/// An item in flight to a stream.
enum Travelling {
    Bytes(Vec<u8>),
    End,
    Reset,
}

/// One side of a connection.
pub(crate) struct Stream {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// The other side's descriptor; `None` once that side is closed.
    pub peer: Option<i32>,
    travelling: VecDeque<(u64, Travelling)>,
    arrived: VecDeque<u8>,
    /// Bytes in flight and arrived.
    held: usize,
    ended: bool,
    reset: bool,
    /// Whether this side has ended.
    shut: bool,
}

/// What a receive or a send finds.
pub(crate) enum Found {
    /// Wait until something changes.
    Nothing,
    Bytes(Vec<u8>),
    /// This many bytes may be sent.
    Room(usize),
    Error(i32),
}

impl Stream {
    pub fn new(local: SocketAddr, remote: SocketAddr, peer: i32) -> Stream {
        Stream {
            local,
            remote,
            peer: Some(peer),
            travelling: VecDeque::new(),
            arrived: VecDeque::new(),
            held: 0,
            ended: false,
            reset: false,
            shut: false,
        }
    }

    /// Whether a receive would complete immediately.
    pub fn readable(&self) -> bool {
        !self.arrived.is_empty() || self.ended || self.reset
    }

    pub fn receive(&mut self, len: usize, rng: &mut Rng, partial: u32) -> Found {
        if self.reset {
            return Found::Error(libc::ECONNRESET);
        }
        if self.arrived.is_empty() {
            return if self.ended || len == 0 { Found::Bytes(Vec::new()) } else { Found::Nothing };
        }
        let mut n = len.min(self.arrived.len());
        if n > 1 && rng.chance(partial) {
            n = 1 + rng.index(n - 1);
        }
        self.held -= n;
        Found::Bytes(self.arrived.drain(..n).collect())
    }

    /// Number of bytes that this side may send, given the bytes at the other side.
    pub fn room(&self, len: usize, held: usize, net: &NetConfig, rng: &mut Rng) -> Found {
        if self.reset {
            return Found::Error(libc::ECONNRESET);
        }
        if self.shut || self.peer.is_none() {
            return Found::Error(libc::EPIPE);
        }
        let mut n = len.min(net.window.saturating_sub(held));
        if n == 0 && len > 0 {
            return Found::Nothing;
        }
        if n > 1 && rng.chance(net.partial) {
            n = 1 + rng.index(n - 1);
        }
        Found::Room(n)
    }

    /// Whether a send would fail immediately.
    pub fn broken(&self) -> bool {
        self.reset || self.shut
    }

    pub fn held(&self) -> usize {
        self.held
    }

    /// Bytes not yet received.
    pub fn unread(&self) -> bool {
        self.held > 0
    }

    /// Sends an item to this side; returns its time of arrival.
    fn travel(&mut self, at: u64, what: Travelling) -> u64 {
        let at = self.travelling.back().map_or(at, |(last, _)| at.max(*last));
        self.travelling.push_back((at, what));
        at
    }

    pub fn send_bytes(&mut self, at: u64, bytes: Vec<u8>) -> u64 {
        self.held += bytes.len();
        self.travel(at, Travelling::Bytes(bytes))
    }

    pub fn send_end(&mut self, at: u64) -> u64 {
        self.travel(at, Travelling::End)
    }

    pub fn send_reset(&mut self, at: u64) -> u64 {
        self.travel(at, Travelling::Reset)
    }

    /// Takes the items that have arrived by now.
    pub fn arrive(&mut self, now: u64) {
        while let Some((at, _)) = self.travelling.front()
            && *at <= now
        {
            match self.travelling.pop_front() {
                Some((_, Travelling::Bytes(bytes))) => self.arrived.extend(bytes),
                Some((_, Travelling::End)) => self.ended = true,
                Some((_, Travelling::Reset)) => self.break_off(),
                None => {}
            }
        }
    }

    /// Resets the connection on this side.
    pub fn break_off(&mut self) {
        self.reset = true;
        self.held = 0;
        self.arrived.clear();
        self.travelling.clear();
    }

    /// Shuts down both directions of this side.
    pub fn shut_down(&mut self) {
        self.shut = true;
        self.ended = true;
        self.held = 0;
        self.arrived.clear();
        self.travelling.clear();
    }
}

/// The addresses in use, and their listeners.
#[derive(Default)]
pub(crate) struct Addresses {
    listeners: BTreeMap<SocketAddr, Vec<i32>>,
    exclusive: BTreeMap<SocketAddr, i32>,
    next_port: u16,
}

impl Addresses {
    /// Takes an address; port 0 is any free one.
    pub fn bind(&mut self, addr: SocketAddr, fd: i32, alone: bool) -> Result<SocketAddr, i32> {
        let mut addr = addr;
        while addr.port() == 0 {
            self.next_port = self.next_port.wrapping_add(1);
            let candidate = SocketAddr::new(addr.ip(), 32_768 + self.next_port % 28_000);
            if !self.listeners.contains_key(&candidate) {
                addr = candidate;
            }
        }
        let others = self.listeners.get(&addr).is_some_and(|others| !others.is_empty());
        if others && (alone || self.exclusive.contains_key(&addr)) {
            return Err(libc::EADDRINUSE);
        }
        self.listeners.entry(addr).or_default().push(fd);
        if alone {
            self.exclusive.insert(addr, fd);
        }
        Ok(addr)
    }

    pub fn unbind(&mut self, addr: SocketAddr, fd: i32) {
        if let Some(listeners) = self.listeners.get_mut(&addr) {
            listeners.retain(|&other| other != fd);
        }
        if self.exclusive.get(&addr) == Some(&fd) {
            self.exclusive.remove(&addr);
        }
    }

    /// One of the listeners of an address.
    pub fn pick(&self, addr: SocketAddr, rng: &mut Rng) -> Option<i32> {
        let listeners = self.listeners.get(&addr).filter(|listeners| !listeners.is_empty())?;
        Some(listeners[rng.index(listeners.len())])
    }

    /// An address for the connecting side.
    pub fn ephemeral(&mut self, like: SocketAddr) -> SocketAddr {
        self.next_port = self.next_port.wrapping_add(1);
        SocketAddr::new(like.ip(), 32_768 + self.next_port % 28_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[test]
    fn bytes_keep_their_order_and_an_end_travels_after_them() {
        let mut rng = Rng::new(1);
        let mut stream = Stream::new(addr(1), addr(2), 0);
        assert_eq!(stream.send_bytes(50, b"ab".to_vec()), 50);
        // A later item cannot overtake, however short its travel time.
        assert_eq!(stream.send_bytes(40, b"cd".to_vec()), 50);
        stream.send_end(60);
        assert!(matches!(stream.receive(9, &mut rng, 0), Found::Nothing));
        stream.arrive(50);
        assert_eq!(stream.held(), 4);
        assert!(matches!(stream.receive(3, &mut rng, 0), Found::Bytes(b) if b == b"abc"));
        assert!(matches!(stream.receive(3, &mut rng, 0), Found::Bytes(b) if b == b"d"));
        assert!(matches!(stream.receive(3, &mut rng, 0), Found::Nothing));
        stream.arrive(60);
        assert!(matches!(stream.receive(3, &mut rng, 0), Found::Bytes(b) if b.is_empty()));
    }

    #[test]
    fn an_address_is_shared_or_exclusive() {
        let mut addresses = Addresses::default();
        assert_eq!(addresses.bind(addr(6379), 1, false), Ok(addr(6379)));
        assert_eq!(addresses.bind(addr(6379), 2, false), Ok(addr(6379)));
        assert_eq!(addresses.bind(addr(6379), 3, true), Err(libc::EADDRINUSE));
        addresses.unbind(addr(6379), 1);
        addresses.unbind(addr(6379), 2);
        assert_eq!(addresses.bind(addr(6379), 3, true), Ok(addr(6379)));
        assert_eq!(addresses.bind(addr(6379), 4, false), Err(libc::EADDRINUSE));
        let any = addresses.bind(addr(0), 5, false).unwrap();
        assert_ne!(any.port(), 0);
        assert_eq!(addresses.pick(any, &mut Rng::new(1)), Some(5));
        assert_eq!(addresses.pick(addr(1), &mut Rng::new(1)), None);
    }
}
