//! A [`Connection`]: the handshake, the requests and the replies of one client.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use bdev::Kind;
use reactor::{Buf, Class, Either, Event, Part, Slice, Socket, race, timeout};

use super::Server;
use super::limits::{
    CONNECTIONS_OF_DISK_MAX, HANDSHAKE_NS, HIDDEN_NS, Permit, SILENT_SECONDS, Share, patience_ns,
};
use super::volume::{EXTENTS_BYTES_MAX, Transfer, Volume};
use nbdproto::{
    Action, Chosen, Errno, ExportInfo, Exports, Handshake, Progress, REQUEST_BYTES, Replies,
    Request, Violation,
};

/// Most bytes of one receive of requests, or of the handshake.
const INPUT_BYTES: usize = 16 << 10;
/// Replies are sent together up to this many bytes.
const BATCH_BYTES: usize = 256 << 10;
/// How long a connection whose disk has gone answers requests, in nanoseconds.
const GONE_NS: u64 = 1_000_000_000;
/// How long the last replies may take when the server ends a connection, in nanoseconds.
const LAST_NS: u64 = 1_000_000_000;

/// How often a hidden disk is looked for, in nanoseconds.
const HIDDEN_LOOK_NS: u64 = 10_000_000;

/// Why the server ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The client may connect again at once.
    Restart,
    /// The disk has gone.
    Gone,
}

/// One client; see the module text.
pub struct Connection {
    server: Rc<Server>,
    number: u64,
    socket: Socket,
    /// Its address, for the log.
    peer: String,
    share: Rc<Share>,
    /// The disk that it uses.
    disk: RefCell<Option<String>>,
    end: Cell<Option<End>>,
    /// Replies that wait to be sent.
    queue: RefCell<VecDeque<Reply>>,
    /// Requests whose reply is not in the queue yet.
    outstanding: Cell<usize>,
    /// No further request is received.
    no_more: Cell<bool>,
    /// The client takes no replies any more. No further request is executed.
    dead: Cell<bool>,
    /// Notified after each change of the fields above.
    changed: Event,
}

/// A reply, with what its request holds until it is sent.
struct Reply {
    head: Vec<u8>,
    data: Option<Slice>,
    permit: Permit,
}

/// What a connection has agreed on, and what it uses.
struct Session {
    volume: Rc<Volume>,
    replies: Replies,
    structured: bool,
    allocation: bool,
}

/// Why a connection ends.
enum Why {
    /// The client has ended it, or the server.
    Done,
    /// The client has gone.
    Lost(io::Error),
    /// It has violated the protocol.
    Violation(Violation),
    /// It was too slow.
    Slow(&'static str),
    /// Something failed here.
    Failed(String),
}

impl From<Violation> for Why {
    fn from(violation: Violation) -> Why {
        Why::Violation(violation)
    }
}

impl From<io::Error> for Why {
    fn from(error: io::Error) -> Why {
        Why::Lost(error)
    }
}

impl Connection {
    /// Serves a client.
    pub fn start(server: &Rc<Server>, socket: Socket) {
        let number = server.next.replace(server.next.get() + 1);
        // A client that cannot be watched is served all the same.
        let _ = socket.fail_if_silent(SILENT_SECONDS);
        let connection = Rc::new(Connection {
            server: server.clone(),
            number,
            peer: socket.peer_addr().map_or("local".to_owned(), |addr| addr.to_string()),
            socket,
            share: Share::new(&server.budget),
            disk: RefCell::default(),
            end: Cell::new(None),
            queue: RefCell::default(),
            outstanding: Cell::new(0),
            no_more: Cell::new(false),
            dead: Cell::new(false),
            changed: Event::new(),
        });
        server.connections.borrow_mut().insert(number, connection.clone());
        server.core.spawn(Class::Foreground, connection.run());
    }

    /// Whether it uses this disk.
    pub fn uses(&self, disk: &str) -> bool {
        self.disk.borrow().as_deref() == Some(disk)
    }

    /// Tells it to end.
    pub fn end(&self, end: End) {
        self.end.set(Some(end));
        self.changed.notify_all();
    }

    async fn run(self: Rc<Self>) {
        let why = match self.serve().await {
            Ok(()) => Why::Done,
            Err(why) => why,
        };
        self.dead.set(true);
        drop(self.queue.take());
        self.socket.shutdown();
        // Its requests are still at the device, and hold the socket: it counts until they are done.
        self.changed.wait_until(|| self.outstanding.get() == 0).await;
        self.server.connections.borrow_mut().remove(&self.number);
        self.server.ended.notify_all();
        let disk = self.disk.borrow().clone().unwrap_or_default();
        let peer = &self.peer;
        match why {
            Why::Done if disk.is_empty() => {}
            // Whoever scans ports must not fill the log.
            Why::Violation(what) if disk.is_empty() => {
                tracing::debug!(%peer, "not an NBD client: {what}");
            }
            Why::Slow(_) if disk.is_empty() => tracing::debug!(%peer, "an NBD client is silent"),
            Why::Done => tracing::info!(%disk, %peer, "an NBD client has left"),
            Why::Lost(error) => tracing::debug!(%disk, %peer, "an NBD client is lost: {error}"),
            Why::Violation(what) => {
                tracing::warn!(%disk, %peer, "an NBD client is disconnected: {what}");
            }
            Why::Slow(what) => {
                tracing::warn!(%disk, %peer, "an NBD client is disconnected: it takes too long {what}");
            }
            Why::Failed(what) => {
                tracing::error!(%disk, %peer, "an NBD client is disconnected: {what}");
            }
        }
    }

    async fn serve(self: &Rc<Self>) -> Result<(), Why> {
        let core = &self.server.core;
        let ended = self.changed.wait_until(|| self.end.get().is_some());
        let handshake = race(ended, timeout(core, HANDSHAKE_NS, self.shake_hands())).await;
        let (chosen, input) = match handshake {
            Either::First(()) => return Ok(()),
            Either::Second(done) => match done.map_err(|_| Why::Slow("to shake hands"))?? {
                Some(chosen) => chosen,
                None => return Ok(()),
            },
        };
        let Chosen { name, structured, allocation } = chosen;
        if self.server.connections_of(&name) >= CONNECTIONS_OF_DISK_MAX {
            let why = format!("disk {name} has {CONNECTIONS_OF_DISK_MAX} connections");
            return Err(Why::Failed(why));
        }
        let volume = self.server.volume(&name).map_err(Why::Failed)?;
        self.share.join(volume.held());
        tracing::info!(disk = %name, peer = %self.peer, "an NBD client has connected");
        self.disk.replace(Some(name));
        let replies = Replies { structured };
        let session = Session { volume, replies, structured, allocation };
        let sender = self.clone();
        let mut sending =
            core.spawn(Class::Foreground, async move { sender.send_replies().await }).owned();
        // A client that takes no replies may have repeated its requests on another connection:
        // those that were received and not started must not be executed any more.
        let lost = self.changed.wait_until(|| self.dead.get());
        let ended = race(lost, self.told_to_end());
        let received = race(ended, self.receive(&session, input)).await;
        self.no_more.set(true);
        self.changed.notify_all();
        let received = match received {
            Either::First(_) => Ok(()),
            Either::Second(received) => received,
        };
        received?;
        let sent = match self.end.get() {
            None => race(self.told_to_end(), &mut sending).await,
            Some(_) => Either::First(()),
        };
        match sent {
            Either::Second(sent) => sent,
            // Slow devices are waited for by those who end the connection, slow clients are not.
            Either::First(()) => {
                self.changed.wait_until(|| self.outstanding.get() == 0).await;
                timeout(core, LAST_NS, sending).await.unwrap_or(Ok(()))
            }
        }
    }

    /// Returns when the server ends the connection: at once, or after a while in which requests
    /// are still answered.
    async fn told_to_end(&self) {
        self.changed.wait_until(|| self.end.get().is_some()).await;
        if self.end.get() == Some(End::Gone) {
            let restart = self.changed.wait_until(|| self.end.get() == Some(End::Restart));
            let _ = timeout(&self.server.core, GONE_NS, restart).await;
        }
    }

    /// Makes the handshake. Returns what was agreed on, and what the client has sent after it;
    /// `None` if the client has ended it.
    async fn shake_hands(&self) -> Result<Option<(Chosen, Input)>, Why> {
        let (sent, mut out) = self.socket.send(Handshake::greeting().to_vec()).await;
        sent?;
        let (mut handshake, mut input) = (Handshake::default(), Input::default());
        let core = &self.server.core;
        let until_ns = core.now_ns() + HIDDEN_NS;
        loop {
            out.clear();
            let asked = Asked { server: &self.server, hidden: Cell::new(false) };
            let mut next = handshake.clone();
            let (used, progress) = next.take(input.rest(), &asked, &mut out)?;
            if asked.hidden.get() && core.now_ns() < until_ns {
                // The disk comes back soon: the option is taken then.
                core.sleep_ns(HIDDEN_LOOK_NS).await;
                continue;
            }
            handshake = next;
            input.skip(used);
            if !out.is_empty() {
                let (sent, back) = self.socket.send(out).await;
                sent?;
                out = back;
            }
            match progress {
                Progress::Serve(chosen) => return Ok(Some((chosen, input))),
                Progress::Ended => return Ok(None),
                Progress::More if used > 0 => {}
                Progress::More => {
                    if !input.receive(&self.socket).await? {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Receives requests, and starts them.
    async fn receive(self: &Rc<Self>, session: &Session, mut input: Input) -> Result<(), Why> {
        loop {
            let Some(request) = Request::parse(input.rest())? else {
                let begun = !input.rest().is_empty();
                let more = input.until(&self.socket, if begun { REQUEST_BYTES } else { 1 });
                let more = match begun {
                    // An idle client may be silent as long as it likes.
                    false => more.await,
                    true => timeout(&self.server.core, patience_ns(REQUEST_BYTES), more)
                        .await
                        .map_err(|_| Why::Slow("to send a request"))?,
                };
                if !more? {
                    return Ok(());
                }
                continue;
            };
            input.skip(REQUEST_BYTES);
            let payload = request.payload_len() as usize;
            let rules = session.volume.rules(session.structured, session.allocation);
            let checked = rules.and_then(|mut rules| {
                rules.payload_bytes_max = self.server.budget.payload_bytes_max();
                request.check(&rules)
            });
            if request.disconnects() {
                return Ok(());
            }
            let data = match checked {
                Ok(Action::Read | Action::Write { .. }) => request.len as usize,
                _ => 0,
            };
            let held = match checked {
                Ok(Action::BlockStatus { .. }) => EXTENTS_BYTES_MAX,
                _ => data,
            };
            let permit = self.share.acquire(held).await;
            let buf = match data {
                0 => Ok(None),
                len => self.server.core.alloc_wait(len).await.map(Some),
            };
            let started = match (checked, buf) {
                (Err(errno), _) => Err(errno),
                (Ok(_), Err(_)) => Err(Errno::NoMemory),
                (Ok(action), Ok(buf)) => Ok((action, buf)),
            };
            match started {
                Err(errno) => {
                    let patience_ns = patience_ns(payload);
                    let skipped = input.discard(&self.socket, payload);
                    let skipped = timeout(&self.server.core, patience_ns, skipped).await;
                    skipped.map_err(|_| Why::Slow("to send data"))??;
                    self.fail(session, &request, errno, permit);
                }
                Ok((action, mut buf)) => {
                    if payload > 0
                        && let Some(empty) = buf.take()
                    {
                        let filled = input.fill(&self.socket, empty);
                        let filled = timeout(&self.server.core, patience_ns(payload), filled).await;
                        buf = Some(filled.map_err(|_| Why::Slow("to send data"))??);
                    }
                    self.outstanding.set(self.outstanding.get() + 1);
                    let (connection, volume) = (self.clone(), session.volume.clone());
                    let replies = session.replies;
                    self.server.core.spawn(Class::Foreground, async move {
                        connection.execute(&volume, replies, request, action, buf, permit).await;
                        connection.outstanding.set(connection.outstanding.get() - 1);
                        connection.changed.notify_all();
                    });
                }
            }
        }
    }

    /// Executes a request, and queues its reply.
    async fn execute(
        &self,
        volume: &Volume,
        replies: Replies,
        request: Request,
        action: Action,
        buf: Option<Buf>,
        permit: Permit,
    ) {
        let Request { cookie, offset, len, .. } = request;
        let (kind, fua) = match action {
            Action::Read => (Kind::Read, false),
            Action::Write { fua } => (Kind::Write, fua),
            Action::Flush => (Kind::Flush, false),
            Action::Trim { fua } => (Kind::Discard, fua),
            Action::WriteZeroes { fua, unmap } => (Kind::WriteZeroes { unmap }, fua),
            Action::BlockStatus { one } => {
                let found = volume.extents(offset, len, one).await;
                let mut head = Vec::new();
                match &found {
                    Ok(extents) => replies.block_status(&mut head, cookie, extents),
                    Err(errno) => replies.error(&mut head, cookie, *errno),
                }
                self.server.count(|counters| match found {
                    Ok(_) => counters.others += 1,
                    Err(_) => counters.failed += 1,
                });
                return self.queue(Reply { head, data: None, permit });
            }
            Action::Disconnect => return,
        };
        let transfer = Transfer { kind, offset, len: len.into(), fua };
        let (done, buf) = volume.transfer(transfer, buf).await;
        let mut head = Vec::new();
        let mut data = None;
        match (done, kind) {
            (Err(errno), _) => replies.error(&mut head, cookie, errno),
            (Ok(()), Kind::Read) => {
                replies.read(&mut head, cookie, offset, len);
                data = buf.map(|buf| Slice::new(buf.share(), 0..len as usize));
            }
            (Ok(()), _) => replies.done(&mut head, cookie),
        }
        self.server.count(|counters| match (done, kind) {
            (Err(_), _) => counters.failed += 1,
            (Ok(()), Kind::Read) => {
                counters.reads += 1;
                counters.read_bytes += u64::from(len);
            }
            (Ok(()), Kind::Write) => {
                counters.writes += 1;
                counters.written_bytes += u64::from(len);
            }
            (Ok(()), _) => counters.others += 1,
        });
        self.queue(Reply { head, data, permit });
    }

    /// Queues the reply to a request that is not executed.
    fn fail(&self, session: &Session, request: &Request, errno: Errno, permit: Permit) {
        self.server.count(|counters| counters.failed += 1);
        let mut head = Vec::new();
        session.replies.error(&mut head, request.cookie, errno);
        self.queue(Reply { head, data: None, permit });
    }

    fn queue(&self, mut reply: Reply) {
        reply.permit.answered();
        if !self.dead.get() {
            self.queue.borrow_mut().push_back(reply);
            self.changed.notify_all();
        }
    }

    /// Sends replies until all requests are answered and no further one is received.
    async fn send_replies(&self) -> Result<(), Why> {
        let mut parts = Vec::new();
        loop {
            let ended = || self.no_more.get() && self.outstanding.get() == 0;
            self.changed.wait_until(|| !self.queue.borrow().is_empty() || ended()).await;
            let (mut permits, mut bytes) = (Vec::new(), 0);
            while bytes < BATCH_BYTES
                && let Some(Reply { head, data, permit }) = { self.queue.borrow_mut().pop_front() }
            {
                bytes += head.len() + data.as_ref().map_or(0, |data| data.len());
                match parts.last_mut() {
                    Some(Part::Bytes(before)) => before.extend_from_slice(&head),
                    _ => parts.push(Part::Bytes(head)),
                }
                parts.extend(data.map(Part::Slice));
                permits.push(permit);
            }
            if parts.is_empty() {
                return Ok(());
            }
            let accepted = Cell::new(0);
            let sending = self.socket.send_parts(parts, &accepted);
            let sent = timeout(&self.server.core, patience_ns(bytes), sending).await;
            let failed = match sent {
                Ok((Ok(()), back)) => {
                    parts = back;
                    continue;
                }
                Ok((Err(error), _)) => Why::Lost(error),
                Err(_) => Why::Slow("to take replies"),
            };
            self.dead.set(true);
            // Wakes the receiving task, too.
            self.changed.notify_all();
            drop(self.queue.take());
            self.socket.shutdown();
            return Err(failed);
        }
    }
}

/// The exports of a server, and whether a client has asked for one that is hidden.
struct Asked<'a> {
    server: &'a Server,
    hidden: Cell<bool>,
}

impl Exports for Asked<'_> {
    fn names(&self) -> Vec<String> {
        self.server.names()
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        self.hidden.set(self.hidden.get() || self.server.disks.is_hidden(name));
        self.server.find(name)
    }
}

/// Bytes that were received and not used yet.
#[derive(Default)]
struct Input {
    bytes: Vec<u8>,
    at: usize,
}

impl Input {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.at..]
    }

    /// Skips bytes that are there.
    fn skip(&mut self, n: usize) {
        self.at += n;
    }

    /// Receives more; false if the client has ended.
    async fn receive(&mut self, socket: &Socket) -> io::Result<bool> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.drain(..std::mem::take(&mut self.at));
        let (received, bytes) = socket.recv(bytes, INPUT_BYTES).await;
        self.bytes = bytes;
        Ok(received? > 0)
    }

    /// Receives until there are at least `n` bytes; false if the client has ended.
    async fn until(&mut self, socket: &Socket, n: usize) -> io::Result<bool> {
        while self.rest().len() < n {
            if !self.receive(socket).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Fills a buffer with the next bytes.
    async fn fill(&mut self, socket: &Socket, mut buf: Buf) -> io::Result<Buf> {
        let mut at = self.rest().len().min(buf.len());
        buf[..at].copy_from_slice(&self.rest()[..at]);
        self.skip(at);
        while at < buf.len() {
            let (received, back) = socket.recv_into(buf, at).await;
            buf = back;
            match received? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => at += n,
            }
        }
        Ok(buf)
    }

    /// Skips the next `n` bytes.
    async fn discard(&mut self, socket: &Socket, mut n: usize) -> io::Result<()> {
        loop {
            let skipped = self.rest().len().min(n);
            self.skip(skipped);
            n -= skipped;
            if n == 0 {
                return Ok(());
            }
            if !self.receive(socket).await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}
