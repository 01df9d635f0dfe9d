//! The server: it accepts connections, and executes their requests on the disks of a node.
//!
//! 1. The accepting task takes at most [`CONNECTIONS_MAX`] connections; it closes others at once.
//! 2. A connection's task (`connection`) makes the handshake, and then receives requests. The data
//!    of a write goes from the socket into a buffer of the core's pool.
//! 3. A task for each request transfers it at the [`Volume`], and queues the reply. Replies have
//!    the order in which the requests end.
//! 4. The connection's second task sends the replies, the data of a read from its buffer.
//!
//! All state belongs to one core. What requests hold is bounded (`limits`), and so is the time of
//! everything that waits for a client.
//!
//! A disk that somebody else writes to ([`Disk::is_taken`]) takes no writes here. Connections end
//! with their disk ([`Server::close`]), and for a while when the node is handed over
//! ([`Server::pause`]).

mod connection;
mod limits;
mod volume;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use bdev::Bdev;
use reactor::{Class, Core, Event, Listener, OwnedTask, timeout};

use connection::{Connection, End};
use limits::Budget;
pub use limits::CONNECTIONS_MAX;
use nbdproto::{ExportInfo, Exports};
use volume::Volume;

/// How long the accepting task waits if the system cannot give it a connection, in nanoseconds.
const RETRY_NS: u64 = 100_000_000;

/// A disk that is exported.
pub trait Disk {
    /// Its device.
    fn device(&self) -> Bdev;

    /// Whether somebody else writes to it, so that it takes no writes here.
    fn is_taken(&self) -> bool;
}

/// The disks that are exported.
pub trait Disks {
    /// The names of all disks.
    fn names(&self) -> Vec<String>;

    /// The disk of that name, if it is served.
    fn disk(&self, name: &str) -> Option<Rc<dyn Disk>>;

    /// Whether a disk of that name is not served for a moment only.
    fn is_hidden(&self, name: &str) -> bool;
}

/// What a server has done since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Connections that were accepted.
    pub accepted: u64,
    /// Connections that were closed at once, because there were too many.
    pub refused: u64,
    /// Reads that have succeeded.
    pub reads: u64,
    /// Writes that have succeeded.
    pub writes: u64,
    /// Other requests that have succeeded.
    pub others: u64,
    /// Requests that have failed.
    pub failed: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
}

/// Serves the disks of a node to NBD clients; see the module text.
pub struct Server {
    core: Core,
    listener: Rc<Listener>,
    disks: Box<dyn Disks>,
    budget: Rc<Budget>,
    volumes: RefCell<BTreeMap<String, Weak<Volume>>>,
    connections: RefCell<BTreeMap<u64, Rc<Connection>>>,
    /// The number of the next connection.
    next: Cell<u64>,
    counters: Cell<Counters>,
    accepting: RefCell<Option<OwnedTask<()>>>,
    /// Notified when a connection has ended.
    ended: Event,
}

impl Server {
    /// Starts to serve at a listener, which must be one of this core.
    pub fn start(core: &Core, listener: Listener, disks: Box<dyn Disks>) -> Rc<Server> {
        let server = Rc::new(Server {
            core: core.clone(),
            listener: Rc::new(listener),
            disks,
            budget: Rc::new(Budget::new(core.pool().limit())),
            volumes: RefCell::default(),
            connections: RefCell::default(),
            next: Cell::new(0),
            counters: Cell::default(),
            accepting: RefCell::default(),
            ended: Event::new(),
        });
        server.resume();
        server
    }

    /// The listener.
    pub fn listener(&self) -> &Listener {
        &self.listener
    }

    /// What it has done since the start.
    pub fn counters(&self) -> Counters {
        self.counters.get()
    }

    /// Number of connections.
    pub fn connections(&self) -> usize {
        self.connections.borrow().len()
    }

    /// Number of connections that use this disk.
    pub fn connections_of(&self, disk: &str) -> usize {
        self.connections.borrow().values().filter(|connection| connection.uses(disk)).count()
    }

    /// Accepts connections again, after [`Server::pause`].
    pub fn resume(self: &Rc<Self>) {
        let (weak, listener) = (Rc::downgrade(self), self.listener.clone());
        let accepting = accept(self.core.clone(), weak, listener);
        self.accepting.replace(Some(self.core.spawn(Class::Foreground, accepting).owned()));
    }

    /// Ends all connections, without an error for their clients: requests in flight are answered,
    /// others are lost, and the clients may connect again. None is accepted until
    /// [`Server::resume`]. Suspends until nothing is in flight, for at most `ns`.
    ///
    /// # Errors
    /// When the devices are not done then. Names their disks.
    pub async fn pause(&self, ns: u64) -> Result<(), String> {
        drop(self.accepting.take());
        self.end_connections(|_| Some(End::Restart));
        let all_ended = self.ended.wait_until(|| self.connections.borrow().is_empty());
        let _ = timeout(&self.core, ns, all_ended).await;
        let mut busy = Vec::new();
        for (name, volume) in &*self.volumes.borrow() {
            if volume.upgrade().is_some_and(|volume| !volume.is_idle()) {
                busy.push(name.clone());
            }
        }
        match busy.is_empty() {
            true => Ok(()),
            false => Err(format!(
                "requests of NBD clients are in flight at the devices of these disks: {}",
                busy.join(", ")
            )),
        }
    }

    /// Ends the connections of a disk as [`Server::pause`] does. [`Disks::disk`] must not return
    /// the disk meanwhile. Suspends until nothing of them is in flight, for at most `ns`.
    /// Returns whether nothing is; what is stays in flight. If nothing is, the server uses the
    /// disk's device no more: the next connection opens the one that the disk then has.
    pub async fn release(&self, disk: &str, ns: u64) -> bool {
        self.end_connections(|connection| connection.uses(disk).then_some(End::Restart));
        let ended = self.ended.wait_until(|| self.connections_of(disk) == 0);
        let _ = timeout(&self.core, ns, ended).await;
        let volume = self.volumes.borrow().get(disk).and_then(Weak::upgrade);
        let Some(volume) = volume else { return true };
        if !volume.is_idle() {
            return false;
        }
        // A connection whose client is slow still holds it; the next ones open the disk again.
        volume.close();
        self.volumes.borrow_mut().remove(disk);
        true
    }

    /// Ends the use of a disk: later requests fail with `ESHUTDOWN`, and its connections are
    /// closed. Suspends until nothing is in flight at the device, for at most `ns`; what is in
    /// flight then is abandoned. Returns whether nothing was. [`Disks::disk`] must not return the
    /// disk any more.
    pub async fn close(&self, disk: &str, ns: u64) -> bool {
        let volume = self.volumes.borrow_mut().remove(disk).and_then(|volume| volume.upgrade());
        let Some(volume) = volume else { return true };
        volume.close();
        self.end_connections(|connection| connection.uses(disk).then_some(End::Gone));
        let done = timeout(&self.core, ns, volume.idle()).await.is_ok();
        volume.abandon();
        done
    }

    /// Ends everything: as [`Server::pause`], and abandons what is in flight after `ns`.
    pub async fn stop(&self, ns: u64) {
        if let Err(why) = self.pause(ns).await {
            tracing::error!("{why}: they are abandoned");
        }
        let volumes = self.volumes.take();
        volumes.values().filter_map(Weak::upgrade).for_each(|volume| volume.abandon());
    }

    /// Tells connections to end.
    fn end_connections(&self, how: impl Fn(&Connection) -> Option<End>) {
        for connection in self.connections.borrow().values() {
            if let Some(end) = how(connection) {
                connection.end(end);
            }
        }
    }

    /// The volume of a disk, for a connection.
    fn volume(&self, name: &str) -> Result<Rc<Volume>, String> {
        let disk = self.disks.disk(name).ok_or_else(|| format!("no disk {name}"))?;
        let known = self.volumes.borrow().get(name).and_then(Weak::upgrade);
        if let Some(volume) = known.filter(|volume| !volume.is_closed()) {
            return Ok(volume);
        }
        let volume = Volume::open(&self.core, disk).map_err(|error| error.to_string())?;
        let mut volumes = self.volumes.borrow_mut();
        volumes.retain(|_, volume| volume.strong_count() > 0);
        volumes.insert(name.to_owned(), Rc::downgrade(&volume));
        Ok(volume)
    }

    fn count(&self, count: impl FnOnce(&mut Counters)) {
        let mut counters = self.counters.get();
        count(&mut counters);
        self.counters.set(counters);
    }
}

impl Exports for Server {
    fn names(&self) -> Vec<String> {
        self.disks.names()
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        let disk = self.disks.disk(name)?;
        Some(volume::describe(&*disk, self.budget.payload_bytes_max()))
    }
}

/// Accepts connections; never ends.
async fn accept(core: Core, server: Weak<Server>, listener: Rc<Listener>) {
    loop {
        let accepted = listener.accept().await;
        let Some(server) = server.upgrade() else { return };
        match accepted {
            Ok(socket) if server.connections() < CONNECTIONS_MAX => {
                server.count(|counters| counters.accepted += 1);
                Connection::start(&server, socket);
            }
            Ok(socket) => {
                server.count(|counters| counters.refused += 1);
                socket.shutdown();
            }
            Err(_) => {
                drop(server);
                core.sleep_ns(RETRY_NS).await;
            }
        }
    }
}
