//! The disks as NBD clients see them: those that are served, under their names. One that a virtual
//! machine has is read-only for them, because two writers would destroy its file system.
//!
//! A server holds the disks weakly, because they own it.

use std::rc::{Rc, Weak};

use bdev::Bdev;
use nbd::Server;
use reactor::{Core, Listener};
use vhost::Target;

use super::Disks;

/// How long requests of NBD clients may take when the node ends, in nanoseconds.
const END_NS: u64 = 2_000_000_000;
/// How long they may take when something else waits for them: the node is handed over, or a disk
/// that moves is switched. No guest waits meanwhile, and the clients' next requests wait in their
/// sockets. A slow device has many bytes in flight.
pub(super) const PAUSE_NS: u64 = 20_000_000_000;

/// The disks of a node for NBD clients.
struct Exported(Weak<Disks>);

impl nbd::Disks for Exported {
    fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        if let Some(disks) = self.0.upgrade() {
            disks.each(|disk| names.extend(disk.serving.is_ok().then(|| disk.spec.name.clone())));
        }
        names
    }

    fn disk(&self, name: &str) -> Option<Rc<dyn nbd::Disk>> {
        let disks = self.0.upgrade()?;
        let target = disks.target(name).ok().filter(|_| !disks.hidden.borrow().contains(name))?;
        // Its data is, or may be, on another node.
        let target = (!target.is_withheld()).then_some(target)?;
        Some(Rc::new(ExportedDisk(target)))
    }

    fn is_hidden(&self, name: &str) -> bool {
        self.0.upgrade().is_some_and(|disks| disks.hidden.borrow().contains(name))
    }
}

/// A served disk.
struct ExportedDisk(Rc<Target>);

impl nbd::Disk for ExportedDisk {
    fn device(&self) -> Bdev {
        self.0.device()
    }

    fn is_taken(&self) -> bool {
        // Requests of a guest that wait for the predecessor will be executed, too.
        // So may those of a guest elsewhere, if the image is locked only while a guest uses it.
        self.0.is_connected() || self.0.holds() || self.0.device().locks_for_use()
    }
}

impl Disks {
    /// Serves the disks to NBD clients at a listener of this core.
    pub fn serve_nbd(self: &Rc<Self>, core: &Core, listener: Listener) {
        let exported = Exported(Rc::downgrade(self));
        self.nbd.replace(Some(Server::start(core, listener, Box::new(exported))));
    }

    /// The server for NBD clients, if there is one.
    pub fn nbd(&self) -> Option<Rc<Server>> {
        self.nbd.borrow().clone()
    }

    /// Number of NBD clients of a disk.
    pub fn nbd_clients(&self, name: &str) -> usize {
        self.nbd().map_or(0, |server| server.connections_of(name))
    }

    /// Ends the connections of NBD clients, which may connect again to whoever listens next.
    /// Suspends until nothing of them is in flight.
    ///
    /// # Errors
    /// When the devices are not done in time. [`Disks::resume_nbd`] lets the clients come back.
    pub async fn pause_nbd(&self) -> Result<(), String> {
        match self.nbd() {
            Some(server) => server.pause(PAUSE_NS).await,
            None => Ok(()),
        }
    }

    /// Accepts NBD clients again.
    pub fn resume_nbd(&self) {
        if let Some(server) = self.nbd().filter(|_| !self.ended.get()) {
            server.resume();
        }
    }

    /// Ends the service for NBD clients. Suspends, for a bounded time.
    pub(super) async fn stop_nbd(&self) {
        let server = self.nbd.take();
        if let Some(server) = server {
            server.stop(END_NS).await;
        }
    }
}
