//! A connection's way to its client: the socket, or TLS over it.
//!
//! Of TLS, this file does the handshake ([`shake_hands`]), and what `input` and `output` do for a
//! plain socket. A session's own messages after the handshake wait for the next send, so that only
//! one task sends. Memory is bounded: a session says what it holds, replies are sealed in pieces,
//! and what is sealed counts as unsent.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use reactor::{Class, Core, Part, Socket, timeout};

use crate::client::gauge::Share;
use crate::client::registry::Client;
use crate::connection::input::{self, Receive, Received};
use crate::connection::output::{self, Batch, Sending, Sent};
use crate::core::secured::CONNECTION_BYTES;
use crate::core::state::CoreState;
use crate::tls::config::Tls;
use crate::tls::session::{Fault, Session};

/// How long a handshake may take.
const HANDSHAKE_NS: u64 = 10_000_000_000;

/// How long a last message waits for room in the socket.
const FAREWELL_NS: u64 = 1_000_000_000;

/// Bytes of one receive during the handshake, and the maximum afterwards: a core decrypts them in
/// one go.
const RECEIVE_BYTES: usize = 4 * 1024;
const RECEIVE_BYTES_MAX: usize = 64 * 1024;

/// Replies that are sealed at a time, and the same while unsent replies take more than half of
/// their memory: one record.
const SEAL_BYTES: usize = 64 * 1024;
const SEAL_BYTES_LEAST: usize = 16 * 1024;

/// Replies that are longer in all are a bulk transfer: they take several sends.
const BULK_BYTES: usize = 128 * 1024;

/// A larger buffer of sealed replies is not kept.
const KEPT_BYTES_MAX: usize = 4 * 1024;

/// The way to a client.
#[derive(Clone)]
pub(super) enum Link {
    Plain(Socket),
    Secure(Rc<Secure>),
}

impl Link {
    /// Receives into the buffer, after its content.
    pub async fn receive(self, receive: Receive) -> Received {
        match self {
            Link::Plain(socket) => input::receive(socket, receive).await,
            Link::Secure(secure) => Box::pin(secure.receive(receive)).await,
        }
    }

    /// Sends all bytes. `accepted` counts those that the socket has accepted. Many bytes are sent
    /// by a bulk task, so that other connections' requests come between its sends.
    pub async fn send(self, core: Core, batch: Batch, accepted: Rc<Cell<u64>>) -> Sent {
        let Batch { sending, bytes, .. } = batch;
        if bytes > BULK_BYTES {
            return core.spawn(Class::Bulk, self.send_all(sending, accepted)).owned().await;
        }
        self.send_all(sending, accepted).await
    }

    async fn send_all(self, what: Sending, accepted: Rc<Cell<u64>>) -> Sent {
        match self {
            Link::Plain(socket) => output::send(socket, what, accepted).await,
            Link::Secure(secure) => Box::pin(secure.send(what, accepted)).await,
        }
    }

    /// Sends what remains to be said, as far as the client takes it. Nothing is being sent.
    pub async fn say_farewell(&self, client: &Client, ends_well: bool) {
        let Link::Secure(secure) = self else { return };
        let mut last = Vec::new();
        {
            let mut session = secure.session.borrow_mut();
            if ends_well {
                session.close();
            }
            session.take_own(&mut last);
        }
        if !last.is_empty() && !client.is_killed() {
            let _ = timeout(&secure.state.core, FAREWELL_NS, secure.socket.send(last)).await;
        }
    }
}

/// TLS over a socket.
pub(super) struct Secure {
    state: Rc<CoreState>,
    client: Rc<Client>,
    socket: Socket,
    session: RefCell<Session>,
    /// Data that came with the end of the handshake.
    early: RefCell<Vec<u8>>,
    /// A buffer for sealed replies.
    sealed: Cell<Vec<u8>>,
    share: RefCell<Share>,
}

/// Makes a connection out of a new socket, unless that fails, which is logged and counted.
pub(super) async fn shake_hands(
    state: &Rc<CoreState>,
    client: &Rc<Client>,
    socket: &Socket,
    tls: &Tls,
) -> Option<Link> {
    let mut share = state.secured.bytes.share();
    share.set(CONNECTION_BYTES);
    let session = match Session::new(tls) {
        Ok(session) => RefCell::new(session),
        Err(fault) => {
            fail(state, client, &fault.to_string());
            return None;
        }
    };
    let secure = Secure {
        state: state.clone(),
        client: client.clone(),
        socket: socket.clone(),
        session,
        early: RefCell::default(),
        sealed: Cell::default(),
        share: RefCell::new(share),
    };
    let why = match timeout(&state.core, HANDSHAKE_NS, secure.shake_hands()).await {
        Ok(Ok(())) => {
            state.count(|stats| stats.tls_connections += 1);
            return Some(Link::Secure(Rc::new(secure)));
        }
        Ok(Err(Failure::Ended)) => return None,
        Ok(Err(Failure::Why(why))) => why,
        Err(_) => format!("not done within {} s", HANDSHAKE_NS / 1_000_000_000),
    };
    fail(state, client, &why);
    let link = Link::Secure(Rc::new(secure));
    link.say_farewell(client, false).await;
    None
}

fn fail(state: &CoreState, client: &Client, why: &str) {
    state.count(|stats| stats.tls_failures += 1);
    state.secured.log(&state.core, client.address, "TLS handshake failed", why);
}

/// The end of a handshake.
enum Failure {
    /// The node has ended it.
    Ended,
    Why(String),
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Failure {
        Failure::Why(fault.to_string())
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Why(error.to_string())
    }
}

impl Secure {
    async fn shake_hands(&self) -> Result<(), Failure> {
        let mut talking = pin!(self.converse());
        poll_fn(|cx| {
            self.client.listen(cx.waker());
            if self.client.is_killed() || self.state.stopping.get() {
                return Poll::Ready(Err(Failure::Ended));
            }
            talking.as_mut().poll(cx)
        })
        .await
    }

    async fn converse(&self) -> Result<(), Failure> {
        let mut buffer = Vec::new();
        loop {
            buffer.clear();
            self.session.borrow_mut().take_own(&mut buffer);
            if !buffer.is_empty() {
                let (result, back) = self.socket.send(std::mem::take(&mut buffer)).await;
                result?;
                buffer = back;
                buffer.clear();
            }
            if !self.session.borrow().is_handshaking() {
                return Ok(());
            }
            let (result, back) = self.socket.recv(std::mem::take(&mut buffer), RECEIVE_BYTES).await;
            buffer = back;
            if result? == 0 {
                return Err(Failure::Why("the client has closed the connection".to_owned()));
            }
            self.session.borrow_mut().open(&buffer, &mut self.early.borrow_mut())?;
            self.account()?;
        }
    }

    /// Updates the core's sum with what this connection holds.
    fn account(&self) -> Result<(), Fault> {
        let held = self.session.borrow().held_bytes();
        self.share.borrow_mut().set(CONNECTION_BYTES + held);
        let most = self.state.node.settings().tls_bytes_max;
        match self.state.secured.bytes.get() > most && held > RECEIVE_BYTES {
            true => Err(Fault::NoMemory),
            false => Ok(()),
        }
    }

    async fn receive(self: Rc<Self>, receive: Receive) -> Received {
        let Receive { mut buffer, most, idle } = receive;
        let from = buffer.len();
        let early = self.early.take();
        if !early.is_empty() {
            buffer.extend_from_slice(&early);
            return (Ok(early.len()), buffer);
        }
        loop {
            if self.session.borrow().has_ended() {
                return (Ok(0), buffer);
            }
            if idle && let Err(error) = self.socket.readable().await {
                return (Err(error), buffer);
            }
            let (result, back) = self.socket.recv(buffer, most.min(RECEIVE_BYTES_MAX)).await;
            buffer = back;
            match result {
                Ok(1..) => {}
                ended => return (ended, buffer),
            }
            if let Err(fault) = self.open(&mut buffer, from) {
                self.state.count(|stats| stats.tls_failures += 1);
                let (core, address) = (&self.state.core, self.client.address);
                let why = fault.to_string();
                self.state.secured.log(core, address, "TLS connection broken", &why);
                return (Err(io::ErrorKind::InvalidData.into()), buffer);
            }
            if buffer.len() > from {
                return (Ok(buffer.len() - from), buffer);
            }
        }
    }

    /// Replaces what is in the buffer from `from` on by the data in it.
    fn open(&self, buffer: &mut Vec<u8>, from: usize) -> Result<(), Fault> {
        let mut scratch = self.state.secured.scratch.borrow_mut();
        scratch.clear();
        scratch.extend_from_slice(&buffer[from..]);
        buffer.truncate(from);
        self.session.borrow_mut().open(&scratch, buffer)?;
        self.account()
    }

    async fn send(self: Rc<Self>, what: Sending, accepted: Rc<Cell<u64>>) -> Sent {
        let result = match &what {
            Sending::Bytes(bytes) => self.send_all(&[bytes], &accepted).await,
            Sending::Parts(parts) => {
                let pieces: Vec<&[u8]> = parts.iter().map(Part::as_slice).collect();
                self.send_all(&pieces, &accepted).await
            }
        };
        match what {
            Sending::Parts(mut parts) => {
                parts.clear();
                (result, Sending::Parts(parts))
            }
            bytes => (result, bytes),
        }
    }

    /// Seals the pieces and sends them, some at a time.
    async fn send_all(&self, pieces: &[&[u8]], accepted: &Cell<u64>) -> io::Result<()> {
        let mut sealed = self.sealed.take();
        let mut room = self.state.unsent_bytes.share();
        let mut rest = Rest { pieces, from: 0 };
        loop {
            let total_max = self.state.node.settings().unsent_total_bytes_max;
            let most = match self.state.unsent_bytes.get() > total_max / 2 {
                true => SEAL_BYTES_LEAST,
                false => SEAL_BYTES,
            };
            let next = rest.take(most);
            if next.is_empty() {
                break;
            }
            sealed.clear();
            if let Err(fault) = self.session.borrow_mut().seal(&next, &mut sealed) {
                return Err(io::Error::other(fault.to_string()));
            }
            room.set(sealed.capacity());
            let mut sent = 0;
            while sent < sealed.len() {
                let (result, back) = self.socket.send_some(sealed, sent).await;
                sealed = back;
                match result? {
                    0 => return Err(io::ErrorKind::WriteZero.into()),
                    taken => {
                        sent += taken;
                        accepted.set(accepted.get() + taken as u64);
                    }
                }
            }
        }
        if sealed.capacity() <= KEPT_BYTES_MAX {
            self.sealed.set(sealed);
        }
        Ok(())
    }
}

/// What is left of some pieces.
struct Rest<'a> {
    pieces: &'a [&'a [u8]],
    /// Bytes of the first piece that were taken.
    from: usize,
}

impl<'a> Rest<'a> {
    /// Takes up to `most` bytes.
    fn take(&mut self, mut most: usize) -> Vec<IoSlice<'a>> {
        let mut taken = Vec::new();
        while most > 0
            && let Some((first, others)) = self.pieces.split_first()
        {
            let rest = &first[self.from..];
            let count = rest.len().min(most);
            if count > 0 {
                taken.push(IoSlice::new(&rest[..count]));
                most -= count;
            }
            if count == rest.len() {
                (self.pieces, self.from) = (others, 0);
            } else {
                self.from += count;
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_taken_in_order_and_cut_where_they_must_be() {
        let bytes: Vec<u8> = (0..100).collect();
        let pieces = [&bytes[..1], &[], &bytes[1..50], &bytes[50..50], &bytes[50..]];
        for most in [1, 2, 7, 49, 50, 99, 100, 1000] {
            let mut rest = Rest { pieces: &pieces, from: 0 };
            let mut all = Vec::new();
            loop {
                let taken = rest.take(most);
                let count: usize = taken.iter().map(|piece| piece.len()).sum();
                if count == 0 {
                    break;
                }
                assert!(count <= most);
                taken.iter().for_each(|piece| all.extend_from_slice(piece));
            }
            assert_eq!(all, bytes, "{most}");
        }
    }
}
