//! Operations on simulated sockets: the part of [`State`] that works on the objects of `net`.
//!
//! A socket operation waits in its core's port until [`State::settle`] finds that it can proceed;
//! then its completion is due, and `reap` carries it out. If another operation was faster (two
//! receives on one stream), it waits again.

use std::io;
use std::net::SocketAddr;

use super::disk::Plan;
use super::net::{Found, Listening, Stream};
use super::state::{Descriptor, Outcome, Running, State, WAITING, When};
use super::trace::What;
use crate::driver::{Fd, IoOp, Token};
use crate::io::unix::are_readable;

/// An arrival.
pub(crate) enum Arrival {
    /// An item for a stream.
    Stream(i32),
    /// A new connection for a listener.
    Connection { listener: i32, stream: i32 },
}

/// The descriptor of a socket operation, and its kind for the trace.
fn parts(op: &IoOp) -> Option<(i32, u8)> {
    match *op {
        IoOp::Recv { fd, .. } => Some((fd, 0)),
        IoOp::Send { fd, .. } => Some((fd, 1)),
        IoOp::SendMsg { fd, .. } => Some((fd, 2)),
        IoOp::Accept { fd } => Some((fd, 3)),
        IoOp::PollIn { fd } => Some((fd, 4)),
        IoOp::Read { .. }
        | IoOp::Write { .. }
        | IoOp::SyncData { .. }
        | IoOp::ReadV { .. }
        | IoOp::WriteV { .. }
        | IoOp::Fallocate { .. } => None,
    }
}

/// The outcome of an operation whose completion is due.
pub(super) enum Performed {
    Done(i32, Vec<u8>),
    Wait,
}

impl State {
    fn stream(&mut self, fd: i32) -> Option<&mut Stream> {
        match self.descriptor(fd)? {
            Descriptor::Stream(stream) => Some(stream),
            _ => None,
        }
    }

    fn listening(&mut self, fd: i32) -> Option<&mut Listening> {
        match self.descriptor(fd)? {
            Descriptor::Listening(listening) => Some(listening),
            _ => None,
        }
    }

    /// Whether there is something to receive; `None` if the descriptor is not open or not a
    /// connection.
    fn readable(&mut self, fd: i32) -> Option<bool> {
        match self.descriptor(fd)? {
            Descriptor::Stream(stream) => Some(stream.readable()),
            Descriptor::Host(host) => Some(are_readable(&[*host])[0]),
            _ => None,
        }
    }

    /// Completes waits for descriptors of the host that are readable now.
    pub fn look_at_host(&mut self) {
        let host = |(fd, _): (&i32, _)| match self.descriptor_at(*fd) {
            Some(Descriptor::Host(host)) => Some((*fd, *host)),
            _ => None,
        };
        let (waited, on_host): (Vec<_>, Vec<_>) = self.waiting.iter().filter_map(host).unzip();
        if waited.is_empty() {
            return;
        }
        for (fd, readable) in waited.into_iter().zip(are_readable(&on_host)) {
            if readable {
                self.settle(fd);
            }
        }
    }

    fn travel_ns(&mut self) -> u64 {
        let range = self.config.net.latency_ns.clone();
        self.device.within(range)
    }

    // Calls on sockets without an operation.

    /// Listens on an address.
    pub fn listen(&mut self, addr: SocketAddr, alone: bool) -> io::Result<Fd> {
        self.close_dropped();
        let fd = self.next_descriptor();
        let bound = self.addresses.bind(addr, fd, alone);
        let addr = bound.map_err(io::Error::from_raw_os_error)?;
        Ok(self.open(Descriptor::Listening(Listening { addr, backlog: Default::default() })))
    }

    /// Connects to an address; the other side is notified later.
    pub fn connect(&mut self, addr: SocketAddr) -> io::Result<Fd> {
        self.close_dropped();
        let refused = || io::Error::from_raw_os_error(libc::ECONNREFUSED);
        let listener = self.addresses.pick(addr, &mut self.device).ok_or_else(refused)?;
        let from = self.addresses.ephemeral(addr);
        let number = self.next_descriptor();
        let client = self.open(Descriptor::Stream(Stream::new(from, addr, number + 1)));
        let stream = self.insert(Descriptor::Stream(Stream::new(addr, from, number)));
        let ns = self.travel_ns();
        let when = self.after(ns);
        self.arrivals.insert(when, Arrival::Connection { listener, stream });
        Ok(client)
    }

    /// The address of a socket: its own or the other side's.
    pub fn address(&mut self, fd: i32, remote: bool) -> io::Result<SocketAddr> {
        match self.descriptor(fd) {
            Some(Descriptor::Listening(listening)) if !remote => Ok(listening.addr),
            Some(Descriptor::Stream(stream)) if !remote => Ok(stream.local),
            Some(Descriptor::Stream(stream)) if stream.peer.is_some() => Ok(stream.remote),
            _ => Err(io::Error::from_raw_os_error(libc::ENOTCONN)),
        }
    }

    /// Ends both directions of a connection.
    pub fn shut_down(&mut self, fd: i32, reset: bool) {
        let Some(stream) = self.stream(fd) else { return };
        let (unread, peer) = (stream.unread(), stream.peer);
        stream.shut_down();
        if let Some(peer) = peer {
            self.tell_end(peer, unread || reset);
        }
        self.settle(fd);
    }

    /// Resets all connections, as a failing network would. Returns the number of sides.
    pub fn reset_connections(&mut self) -> usize {
        let streams: Vec<i32> = self
            .descriptors()
            .filter(|(_, d)| matches!(d, Descriptor::Stream(_)))
            .map(|(fd, _)| fd)
            .collect();
        for &fd in &streams {
            if let Some(stream) = self.stream(fd) {
                stream.break_off();
            }
            self.settle(fd);
        }
        streams.len()
    }

    /// Sends the end of the stream to the other side.
    fn tell_end(&mut self, peer: i32, reset: bool) {
        let ns = self.travel_ns();
        let when = self.after(ns);
        let Some(stream) = self.stream(peer) else { return };
        let at = if reset { stream.send_reset(when.0) } else { stream.send_end(when.0) };
        self.arrivals.insert((at, when.1), Arrival::Stream(peer));
    }

    /// Notes that a socket's descriptor was closed.
    pub(super) fn closed_socket(&mut self, fd: i32, descriptor: Descriptor) {
        match descriptor {
            Descriptor::Stream(stream) => {
                if let Some(peer) = stream.peer {
                    if let Some(other) = self.stream(peer) {
                        other.peer = None;
                    }
                    self.tell_end(peer, stream.unread());
                    self.settle(peer);
                }
            }
            Descriptor::Listening(listening) => {
                self.addresses.unbind(listening.addr, fd);
                for stream in listening.backlog {
                    self.refuse_connection(stream);
                }
            }
            Descriptor::File(_) | Descriptor::Lock { .. } | Descriptor::Host(_) => {}
        }
    }

    /// Drops a connection that will not be accepted.
    fn refuse_connection(&mut self, stream: i32) {
        let peer = self.stream(stream).and_then(|stream| stream.peer);
        self.remove(stream);
        if let Some(peer) = peer {
            if let Some(other) = self.stream(peer) {
                other.peer = None;
            }
            self.tell_end(peer, true);
        }
    }

    /// Takes the items that have arrived by now.
    pub fn arrive(&mut self) {
        while let Some(entry) = self.arrivals.first_entry()
            && entry.key().0 <= self.now
        {
            let now = self.now;
            match entry.remove() {
                Arrival::Stream(fd) => {
                    if let Some(stream) = self.stream(fd) {
                        stream.arrive(now);
                    }
                    self.settle(fd);
                }
                Arrival::Connection { listener, stream } => match self.listening(listener) {
                    Some(listening) => {
                        listening.backlog.push_back(stream);
                        self.settle(listener);
                    }
                    None => self.refuse_connection(stream),
                },
            }
        }
    }

    pub fn next_arrival(&self) -> Option<u64> {
        self.arrivals.keys().next().map(|when| when.0)
    }

    // Operations.

    /// Puts a socket operation into its port. A wrong descriptor is an error, as on the host.
    pub(super) fn submit_socket(&mut self, core: usize, token: Token, op: IoOp) -> (When, Running) {
        let Some((fd, kind)) = parts(&op) else { return self.refuse(token, op, libc::EINVAL) };
        self.note(core, token, What::Socket { fd, kind });
        let fits = match self.descriptor(fd) {
            None => return self.refuse(token, op, libc::EBADF),
            Some(Descriptor::Stream(_)) => kind != 3,
            Some(Descriptor::Listening(_)) => kind == 3,
            Some(Descriptor::Host(_)) => kind == 4,
            Some(_) => false,
        };
        if !fits {
            return self.refuse(token, op, libc::ENOTSOCK);
        }
        let running = Running::new(token, op, Plan::default());
        if self.would_wait(&op) {
            self.waiting.entry(fd).or_default().push((core, token));
            let order = self.after(0).1;
            return ((WAITING, order), running);
        }
        let ns = self.device.below(2_000);
        (self.after(ns), running)
    }

    /// Completes the waiting operations of a descriptor that can proceed now.
    fn settle(&mut self, fd: i32) {
        // The other side may wait for the room that this side makes.
        let Some(waiting) = self.waiting.remove(&fd) else { return };
        for (core, token) in waiting {
            let Some((when, running)) = self.ports[core].take(token) else { continue };
            let same = running.result.is_none() && parts(&running.op).is_some_and(|p| p.0 == fd);
            if !same || when.0 != WAITING {
                self.ports[core].put(when, running);
            } else if self.would_wait(&running.op) {
                self.ports[core].put(when, running);
                self.waiting.entry(fd).or_default().push((core, token));
            } else {
                let ns = self.device.below(2_000);
                let when = self.after(ns);
                self.ports[core].put(when, running);
            }
        }
    }

    fn would_wait(&mut self, op: &IoOp) -> bool {
        let window = self.config.net.window;
        match *op {
            IoOp::Recv { fd, .. } => self.stream(fd).is_some_and(|stream| !stream.readable()),
            IoOp::PollIn { fd } => self.readable(fd) == Some(false),
            IoOp::Accept { fd } => self.listening(fd).is_some_and(|l| l.backlog.is_empty()),
            IoOp::Send { fd, .. } | IoOp::SendMsg { fd, .. } => {
                let Some(stream) = self.stream(fd) else { return false };
                match stream.peer {
                    Some(peer) if !stream.broken() => {
                        self.stream(peer).is_some_and(|other| other.held() >= window)
                    }
                    _ => false,
                }
            }
            IoOp::Read { .. }
            | IoOp::Write { .. }
            | IoOp::SyncData { .. }
            | IoOp::ReadV { .. }
            | IoOp::WriteV { .. }
            | IoOp::Fallocate { .. } => false,
        }
    }

    /// Carries out a socket operation. `fetch` reads the first bytes that it sends.
    pub(super) fn perform_socket(
        &mut self,
        op: &IoOp,
        fetch: &mut dyn FnMut(&IoOp, usize) -> Vec<u8>,
        send_len: usize,
    ) -> Performed {
        let net = self.config.net.clone();
        match *op {
            IoOp::Accept { fd } => {
                let error = self.device.chance(net.accept_error);
                let Some(listening) = self.listening(fd) else {
                    return Performed::Done(-libc::EBADF, Vec::new());
                };
                if listening.backlog.is_empty() {
                    return Performed::Wait;
                }
                if error {
                    return Performed::Done(-libc::EMFILE, Vec::new());
                }
                let stream = listening.backlog.pop_front().unwrap_or(-libc::ECONNABORTED);
                Performed::Done(stream, Vec::new())
            }
            IoOp::PollIn { fd } => match self.readable(fd) {
                None => Performed::Done(-libc::EBADF, Vec::new()),
                Some(true) => Performed::Done(i32::from(libc::POLLIN), Vec::new()),
                Some(false) => Performed::Wait,
            },
            IoOp::Recv { fd, len, .. } => {
                let mut rng = self.device.fork();
                let Some(stream) = self.stream(fd) else {
                    return Performed::Done(-libc::EBADF, Vec::new());
                };
                let peer = stream.peer;
                match stream.receive(len as usize, &mut rng, net.partial) {
                    Found::Nothing | Found::Room(_) => Performed::Wait,
                    Found::Error(errno) => Performed::Done(-errno, Vec::new()),
                    Found::Bytes(bytes) => {
                        // The other side has room now.
                        if let Some(peer) = peer {
                            self.settle(peer);
                        }
                        Performed::Done(bytes.len() as i32, bytes)
                    }
                }
            }
            IoOp::Send { fd, .. } | IoOp::SendMsg { fd, .. } => {
                if self.device.chance(net.reset) {
                    self.break_connection(fd);
                }
                let mut rng = self.device.fork();
                let peer = self.stream(fd).and_then(|stream| stream.peer);
                let held = peer.and_then(|peer| self.stream(peer)).map_or(0, |other| other.held());
                let Some(stream) = self.stream(fd) else {
                    return Performed::Done(-libc::EBADF, Vec::new());
                };
                match stream.room(send_len, held, &net, &mut rng) {
                    Found::Nothing | Found::Bytes(_) => Performed::Wait,
                    Found::Error(errno) => Performed::Done(-errno, Vec::new()),
                    Found::Room(n) => {
                        let bytes = fetch(op, n);
                        let ns = self.travel_ns();
                        let when = self.after(ns);
                        if let Some(peer) = peer
                            && let Some(other) = self.stream(peer)
                        {
                            let at = other.send_bytes(when.0, bytes);
                            self.arrivals.insert((at, when.1), Arrival::Stream(peer));
                        }
                        Performed::Done(n as i32, Vec::new())
                    }
                }
            }
            IoOp::Read { .. }
            | IoOp::Write { .. }
            | IoOp::SyncData { .. }
            | IoOp::ReadV { .. }
            | IoOp::WriteV { .. }
            | IoOp::Fallocate { .. } => Performed::Done(-libc::EINVAL, Vec::new()),
        }
    }

    /// Resets one connection, on both sides.
    fn break_connection(&mut self, fd: i32) {
        let peer = self.stream(fd).and_then(|stream| {
            stream.break_off();
            stream.peer
        });
        if let Some(peer) = peer {
            self.tell_end(peer, true);
        }
    }

    /// Makes the operation wait again: another one was faster.
    pub(super) fn wait_again(&mut self, core: usize, running: Running) {
        if let Some((fd, _)) = parts(&running.op) {
            self.waiting.entry(fd).or_default().push((core, running.token));
        }
        let order = self.after(0).1;
        self.ports[core].put((WAITING, order), running);
    }
}

impl Outcome {
    /// An outcome without bytes.
    pub(super) fn plain(token: Token, op: IoOp, result: i32) -> Outcome {
        Outcome { token, op, result, bytes: Vec::new() }
    }
}
