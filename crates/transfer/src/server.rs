//! The destination's end: a [`Server`].
//!
//! A connection's task reads requests; a task for each executes it at the device, and queues the
//! answer. What is about the disk as a whole is executed alone, and in order. A new connection for
//! a disk ends the one before, and begins when nothing of that is in flight: so no late write
//! follows. What requests hold is bounded for each connection and for all of them, and so is the
//! time that a source may take to say who it is, or be silent.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};

use bdev::{Bdev, CopyTarget, DeviceTarget};
use reactor::{Buf, Class, Core, Event, Listener, OwnedTask, Socket, timeout};

use crate::link::{Broken, Link, Received};
use crate::tls::Identity;
use crate::wire::{
    Belongings, Frame, Hello, Kind, OLDEST, Outcome, PIECE_BYTES_MAX, Stage, TEXT_BYTES_MAX,
    VERSION, Violation, Welcome, hash,
};

/// Maximum number of connections.
const CONNECTIONS_MAX: usize = 64;
/// Maximum number of requests in flight of a connection.
const REQUESTS_MAX: usize = 256;
/// What all requests together may hold, in bytes, at most.
const BYTES_MAX: usize = 64 << 20;
/// How long a source may take to say who it is.
const HELLO_NS: u64 = 10_000_000_000;
/// How long the requests of the connection before may take to end.
const RELEASE_NS: u64 = 5_000_000_000;
/// How long a source may be silent: it asks whether anybody is there more often.
const SILENT_NS: u64 = 30_000_000_000;
/// How long the last answer of a connection may take.
const LAST_NS: u64 = 1_000_000_000;
/// How long the accepting task waits if the system cannot give it a connection.
const RETRY_NS: u64 = 100_000_000;

/// A future of this core.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Why a disk is not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Not yet.
    Later(String),
    /// Never.
    Never(String),
}

/// The disks that wait for their data.
pub trait Destinations {
    /// Whether a source may send a disk now.
    ///
    /// # Errors
    /// Why it may not.
    fn may_begin(&self, hello: &Hello) -> Result<(), Refusal>;

    /// The disk that a source wants to send.
    fn begin<'a>(&'a self, hello: &'a Hello) -> Boxed<'a, Result<Rc<dyn Destination>, Refusal>>;
}

/// A disk that waits for its data.
pub trait Destination {
    /// Its device.
    fn device(&self) -> Bdev;

    /// What a source is told of it.
    fn welcome(&self) -> Welcome;

    /// The source gives the disk, all of which is here and durable. Suspends until that is stored.
    fn own(&self, belongings: Belongings) -> Boxed<'_, Result<(), String>>;

    /// The source wants it back. Returns false if the guest has begun to use it; else it does not
    /// begin any more. Suspends until that is stored.
    fn give_back(&self) -> Boxed<'_, Result<bool, String>>;

    /// The source has given up. Suspends until that is stored.
    fn abandon(&self) -> Boxed<'_, Result<(), String>>;
}

/// Takes disks from other nodes; see the module text. All state belongs to one core.
pub struct Server {
    core: Core,
    listener: Rc<Listener>,
    identity: Option<Identity>,
    destinations: Box<dyn Destinations>,
    /// Each is owned by its task.
    connections: RefCell<BTreeMap<u64, Weak<Connection>>>,
    /// The number of the next connection.
    next: Cell<u64>,
    bytes: Cell<usize>,
    bytes_max: usize,
    accepting: RefCell<Option<OwnedTask<()>>>,
    /// Notified when a connection has ended, and when bytes are released.
    changed: Event,
}

impl Server {
    /// Starts to take disks at a listener, which must be one of this core. With an identity, only
    /// from nodes that show a certificate which it trusts.
    pub fn start(
        core: &Core,
        listener: Listener,
        identity: Option<Identity>,
        destinations: Box<dyn Destinations>,
    ) -> Rc<Server> {
        let bytes_max = (core.pool().limit() / 4).clamp(PIECE_BYTES_MAX as usize, BYTES_MAX);
        let server = Rc::new(Server {
            core: core.clone(),
            listener: Rc::new(listener),
            identity,
            destinations,
            connections: RefCell::default(),
            next: Cell::new(0),
            bytes: Cell::new(0),
            bytes_max,
            accepting: RefCell::default(),
            changed: Event::new(),
        });
        server.resume();
        server
    }

    /// Accepts connections again, after [`Server::pause`].
    pub fn resume(self: &Rc<Self>) {
        let (weak, listener) = (Rc::downgrade(self), self.listener.clone());
        let accepting = accept(self.core.clone(), weak, listener);
        self.accepting.replace(Some(self.core.spawn(Class::Control, accepting).owned()));
    }

    /// The listener.
    pub fn listener(&self) -> &Listener {
        &self.listener
    }

    /// Ends all connections, and takes none until [`Server::resume`]. Suspends until nothing of
    /// them is in flight, for at most `ns`. Returns whether nothing is.
    pub async fn pause(&self, ns: u64) -> bool {
        self.accepting.take();
        self.end(|_| true);
        let ended = self.changed.wait_until(|| self.connections.borrow().is_empty());
        timeout(&self.core, ns, ended).await.is_ok()
    }

    /// Ends the connections of a disk. Suspends until nothing of them is in flight.
    pub async fn release(&self, disk: &str) {
        while self.end(|connection| connection.has(disk)) {
            self.changed.wait().await;
        }
    }

    /// Whether there may be another connection. Suspends while one ends that has not said who it
    /// is.
    async fn makes_room(&self) -> bool {
        let has_room = || self.connections.borrow().len() < CONNECTIONS_MAX;
        if has_room() {
            return true;
        }
        let oldest = self
            .connections
            .borrow()
            .values()
            .filter_map(Weak::upgrade)
            .find(|connection| connection.disk.borrow().is_none());
        let Some(oldest) = oldest else { return false };
        oldest.link.close();
        drop(oldest);
        self.changed.wait_until(has_room).await;
        true
    }

    fn release_bytes(&self, bytes: usize) {
        self.bytes.set(self.bytes.get() - bytes);
        self.changed.notify_all();
    }

    /// Ends connections. Returns whether there are such.
    fn end(&self, which: impl Fn(&Connection) -> bool) -> bool {
        let connections = self.connections.borrow();
        let found = connections.values().filter_map(Weak::upgrade).filter(|one| which(one));
        found.map(|connection| connection.link.close()).count() > 0
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Server({} connections)", self.connections.borrow().len())
    }
}

/// Accepts connections; never ends.
async fn accept(core: Core, server: Weak<Server>, listener: Rc<Listener>) {
    loop {
        let accepted = listener.accept().await;
        let Some(server) = server.upgrade() else { return };
        match accepted {
            Ok(socket) if server.makes_room().await => Connection::start(&server, socket),
            Ok(socket) => socket.shutdown(),
            Err(_) => {
                drop(server);
                core.sleep_ns(RETRY_NS).await;
            }
        }
    }
}

/// One source.
struct Connection {
    server: Rc<Server>,
    number: u64,
    link: Link,
    peer: String,
    disk: RefCell<Option<String>>,
    /// Requests in flight.
    requests: Cell<usize>,
    /// Bytes that are counted for the request that is being received.
    receiving: Cell<usize>,
    /// Notified when one has ended.
    done: Event,
}

/// A request that is executed: what it holds.
struct Permit {
    connection: Rc<Connection>,
    bytes: usize,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let Connection { server, requests, done, .. } = &*self.connection;
        requests.set(requests.get() - 1);
        done.notify_all();
        server.release_bytes(self.bytes);
    }
}

impl Connection {
    fn start(server: &Rc<Server>, socket: Socket) {
        let tls = server.identity.as_ref().map(Identity::server).transpose();
        let Ok(tls) = tls else { return socket.shutdown() };
        let number = server.next.replace(server.next.get() + 1);
        let connection = Rc::new(Connection {
            server: server.clone(),
            number,
            peer: socket.peer_addr().map_or_else(|_| String::new(), |addr| addr.to_string()),
            link: Link::new(&server.core, socket, tls),
            disk: RefCell::default(),
            requests: Cell::new(0),
            receiving: Cell::new(0),
            done: Event::new(),
        });
        server.connections.borrow_mut().insert(number, Rc::downgrade(&connection));
        server.core.spawn(Class::Background, connection.run());
    }

    fn has(&self, disk: &str) -> bool {
        self.disk.borrow().as_deref() == Some(disk)
    }

    async fn run(self: Rc<Self>) {
        let why = match self.serve().await {
            Err(why) => why,
            Ok(never) => match never {},
        };
        self.link.close();
        self.server.release_bytes(self.receiving.take());
        self.done.wait_until(|| self.requests.get() == 0).await;
        self.server.connections.borrow_mut().remove(&self.number);
        self.server.changed.notify_all();
        let (peer, disk) = (&self.peer, self.disk.borrow().clone());
        match disk {
            // Whoever scans ports must not fill the log.
            None => tracing::debug!(%peer, "no source of a disk: {why}"),
            Some(disk) => tracing::info!(%disk, %peer, "the connection to its source ends: {why}"),
        }
    }

    async fn serve(self: &Rc<Self>) -> Result<std::convert::Infallible, Broken> {
        let core = &self.server.core;
        let first = timeout(core, HELLO_NS, self.link.next(no_data)).await;
        let slow = |_| Broken::Io("it does not say who it is".to_owned());
        let Received { frame, payload, .. } = first.map_err(slow)??;
        if frame.kind != Kind::Hello {
            return Err(Violation::Order.into());
        }
        let begun = self.begin(&payload).await?;
        let (version, destination, device) = match begun {
            Ok(begun) => begun,
            Err((outcome, text)) => {
                self.answer(frame.id, outcome, &text);
                let _ = timeout(core, LAST_NS, self.link.sent()).await;
                return Err(Broken::Io(text));
            }
        };
        // A source of an earlier version knows only its own.
        let welcome = Welcome { version, ..destination.welcome() };
        let welcome = serde_json::to_vec(&welcome).unwrap_or_default();
        let reply = Frame::new(Kind::Reply(Outcome::Done), frame.id);
        self.link.send(reply, &welcome);
        let device = Rc::new(device);
        loop {
            // A source that takes no answers is not read.
            let received = async {
                self.link.until_short().await;
                self.link.next(|len| self.room(len)).await
            };
            let received = timeout(core, SILENT_NS, received).await;
            let silent = |_| Broken::Io("it is silent".to_owned());
            let received = received.map_err(silent)??;
            let Frame { kind, id, .. } = received.frame;
            if let Kind::Own | Kind::Return | Kind::Abandon = kind {
                self.done.wait_until(|| self.requests.get() == 0).await;
                let (outcome, text) = decide(&received, &*destination).await;
                self.answer(id, outcome, &text);
                continue;
            }
            self.done.wait_until(|| self.requests.get() < REQUESTS_MAX).await;
            if kind == Kind::Compare {
                // Its data is read here.
                self.reserve(received.frame.len.min(PIECE_BYTES_MAX.into())).await;
            }
            self.requests.set(self.requests.get() + 1);
            let permit = Permit { connection: self.clone(), bytes: self.receiving.take() };
            let (destination, device) = (destination.clone(), device.clone());
            core.spawn(Class::Background, async move {
                let (outcome, text) =
                    permit.connection.execute(received, &*destination, &device).await;
                permit.connection.answer(id, outcome, &text);
                drop(permit);
            });
        }
    }

    /// The disk that a source wants to send.
    async fn begin(
        &self,
        hello: &[u8],
    ) -> Result<Result<(u32, Rc<dyn Destination>, DeviceTarget), (Outcome, String)>, Broken> {
        #[derive(serde::Deserialize)]
        struct Versioned {
            version: u32,
        }
        let read = serde_json::from_slice::<Versioned>(hello);
        let Versioned { version } = read.map_err(|_| Violation::Text)?;
        if !(OLDEST..=VERSION).contains(&version) {
            let what = format!("this node speaks version {VERSION} of the protocol, not {version}");
            return Ok(Err((Outcome::Failed, what)));
        }
        let hello: Hello = serde_json::from_slice(hello).map_err(|_| Violation::Text)?;
        let server = &self.server;
        let refused = |refusal| match refusal {
            Refusal::Later(why) => (Outcome::Later, why),
            Refusal::Never(why) => (Outcome::Failed, why),
        };
        // A stranger ends no connection.
        if let Err(refusal) = server.destinations.may_begin(&hello) {
            return Ok(Err(refused(refusal)));
        }
        // Nothing of an earlier connection may follow.
        if timeout(&server.core, RELEASE_NS, server.release(&hello.disk)).await.is_err() {
            let what = "requests of the connection before do not end".to_owned();
            return Ok(Err((Outcome::Later, what)));
        }
        self.disk.replace(Some(hello.disk.clone()));
        let destination = match server.destinations.begin(&hello).await {
            Ok(destination) => destination,
            Err(refusal) => return Ok(Err(refused(refusal))),
        };
        match DeviceTarget::new(&server.core, &destination.device()) {
            Ok(device) => Ok(Ok((version, destination, device))),
            Err(error) => Ok(Err((Outcome::Later, error.to_string()))),
        }
    }

    /// A buffer for data, when there is room.
    async fn room(&self, len: usize) -> Result<Buf, Broken> {
        self.reserve(len as u64).await;
        Ok(self.server.core.alloc_wait(len).await?)
    }

    /// Waits until a request may have a buffer of so many bytes, and counts them.
    async fn reserve(&self, bytes: u64) {
        let (server, bytes) = (&self.server, bytes as usize);
        // One piece of a disk is always taken: other disks may wait for their devices.
        let fits = || self.requests.get() == 0 || server.bytes.get() + bytes <= server.bytes_max;
        server.changed.wait_until(fits).await;
        server.bytes.set(server.bytes.get() + bytes);
        self.receiving.set(bytes);
    }

    fn answer(&self, id: u64, outcome: Outcome, text: &str) {
        let mut end = text.len().min(TEXT_BYTES_MAX as usize);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.link.send(Frame::new(Kind::Reply(outcome), id), &text.as_bytes()[..end]);
    }

    /// Executes a request. Suspends.
    async fn execute(
        &self,
        received: Received,
        destination: &dyn Destination,
        device: &DeviceTarget,
    ) -> (Outcome, String) {
        let Received { frame, data, payload } = received;
        let Frame { kind, offset, len, .. } = frame;
        let done = match kind {
            Kind::Write | Kind::Clear | Kind::Compare => {
                if let Err(why) = check_range(destination, &frame) {
                    return (Outcome::Failed, why);
                }
                let step = match (kind, data) {
                    (Kind::Write, Some(data)) => device.write(offset, len, data).await,
                    (Kind::Clear, _) => device.clear(offset, len).await,
                    _ => return self.compare(offset, len, &payload, device).await,
                };
                step.map_err(|error| error.to_string())
            }
            Kind::Flush => device.flush().await.map_err(|error| error.to_string()),
            Kind::Ping => Ok(()),
            _ => Err("it comes out of order".to_owned()),
        };
        outcome(done)
    }

    /// Whether the data here has this checksum.
    async fn compare(
        &self,
        offset: u64,
        len: u64,
        wanted: &[u8],
        device: &DeviceTarget,
    ) -> (Outcome, String) {
        let buf = match self.server.core.alloc_wait(len as usize).await {
            Ok(buf) => buf,
            Err(error) => {
                // The source repeats it.
                self.link.close();
                return (Outcome::Failed, error.to_string());
            }
        };
        match device.read(offset, len, buf).await {
            Ok(buf) if hash(&buf[..len as usize]) == wanted => (Outcome::Done, String::new()),
            Ok(_) => (Outcome::Differs, String::new()),
            Err(error) => (Outcome::Failed, error.to_string()),
        }
    }
}

/// Executes a request about the disk as a whole. Suspends.
async fn decide(received: &Received, destination: &dyn Destination) -> (Outcome, String) {
    outcome(match received.frame.kind {
        Kind::Own if received.payload.is_empty() => {
            let writes_through = received.frame.len > 0;
            destination.own(Belongings { writes_through, ..Belongings::default() }).await
        }
        Kind::Own => match serde_json::from_slice(&received.payload) {
            Ok(belongings) => destination.own(belongings).await,
            Err(_) => Err(Violation::Text.to_string()),
        },
        Kind::Return => match destination.give_back().await {
            Ok(false) => return (Outcome::Begun, String::new()),
            given => given.map(drop),
        },
        _ => destination.abandon().await,
    })
}

fn outcome(done: Result<(), String>) -> (Outcome, String) {
    match done {
        Ok(()) => (Outcome::Done, String::new()),
        Err(why) => (Outcome::Failed, why),
    }
}

/// Refuses data that the disk has no place for, or does not take now.
fn check_range(destination: &dyn Destination, frame: &Frame) -> Result<(), String> {
    let &Frame { kind, offset, len, payload_bytes, .. } = frame;
    if destination.welcome().stage != Stage::Receiving {
        return Err("the disk takes no data any more".to_owned());
    }
    let geometry = destination.device().geometry();
    let block = u64::from(geometry.block_size);
    let end = offset.checked_add(len).filter(|end| *end <= geometry.size_bytes);
    let aligned = offset % block == 0 && len % block == 0 && len > 0;
    let fits = match kind {
        Kind::Write => u64::from(payload_bytes) == len,
        Kind::Compare => len <= u64::from(PIECE_BYTES_MAX),
        _ => true,
    };
    match end.is_some() && aligned && fits {
        true => Ok(()),
        false => Err(format!("{len} bytes at {offset} are no part of the disk")),
    }
}

/// Nothing but a write brings data.
async fn no_data(_: usize) -> Result<Buf, Broken> {
    Err(Violation::Order.into())
}
