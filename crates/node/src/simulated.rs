//! The disks of a node in a simulated world. Devices, sessions, rings and both sides of an upgrade
//! are the real ones. The test plays the system: it starts and ends processes, and passes them
//! their sockets.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use bdev::Bdev;
use reactor::{Class, Core, UnixListener};
use vhost::{Door, Target};

use crate::config::{Config, Settings};
pub use crate::disks::resources::Kept;
use crate::disks::resources::{LocalResources, Ready, Resources};
use crate::disks::spec::DiskSpec;
use crate::disks::transfers::{Peer, Transfer};
use crate::disks::{Disks, Served, options};
use crate::error::{Error, Kind};
use crate::launcher::front_door;
use crate::machine::Machine;
use crate::patience::{LINGER_NS, patiently};
use crate::upgrade::{Doors, Upgrader, follow, inherit};

/// A node whose disks are real and whose system is simulated.
pub struct Node {
    core: Core,
    disks: Rc<Disks>,
    upgrader: Rc<Upgrader>,
}

/// The launcher's part of a disk, in the process that plays the launcher: it keeps the front end's
/// connection while nodes come and go. Clones are the same until one is renewed.
#[derive(Clone)]
pub struct FrontDoor {
    core: Core,
    name: String,
    door: Rc<front_door::FrontDoor>,
}

impl FrontDoor {
    /// Serves the front ends of a disk at a listening socket.
    ///
    /// # Errors
    /// As the system gives them.
    pub fn new(core: &Core, name: &str, listener: OwnedFd) -> io::Result<FrontDoor> {
        let listener = UnixListener::from_fd(core, listener)?;
        let door = front_door::FrontDoor::new(core, name, listener);
        Ok(FrontDoor { core: core.clone(), name: name.to_owned(), door })
    }

    /// Gives a node the disk, when the one before has ended. Returns the node's way in for front
    /// ends, for [`Node::start`].
    ///
    /// # Errors
    /// As the system gives them.
    pub fn attach(&self) -> io::Result<OwnedFd> {
        self.door.attach()
    }

    /// Continues in another program of the launcher.
    ///
    /// # Errors
    /// When something of the state is lost.
    pub fn renew(&mut self) -> io::Result<()> {
        self.door.freeze();
        let (state, descriptors) = self.door.export()?;
        let state = serde_json::from_str(&serde_json::to_string(&state)?)?;
        let door = front_door::FrontDoor::import(&self.core, &self.name, state, descriptors)?;
        self.door = door;
        Ok(())
    }

    /// Moves nothing any more.
    pub fn freeze(&self) {
        self.door.freeze();
    }
}

/// Returns the way in for the front ends of a disk, unless another process has it.
pub type Listen = Rc<dyn Fn(&DiskSpec) -> Option<OwnedFd>>;

impl Node {
    /// Opens disks, as patiently as a node whose predecessor was killed, and serves each on a
    /// listening socket, or a launcher's door ([`FrontDoor::attach`]). `told` is what front ends
    /// were told of the write cache, as in a state directory.
    ///
    /// # Errors
    /// When a device cannot be opened.
    pub async fn start(
        core: &Core,
        disks: Vec<(DiskSpec, OwnedFd)>,
        told: Option<bool>,
        kept: Rc<dyn Kept>,
    ) -> Result<Node, String> {
        let until_ns = core.now_ns() + LINGER_NS;
        let busy =
            |error: &bdev::Error| error.kind() == bdev::ErrorKind::Busy && core.now_ns() < until_ns;
        let mut serving = Vec::new();
        for (nth, (spec, door)) in disks.into_iter().enumerate() {
            let device = patiently(core, busy, async || Bdev::open(core, &spec.uri).await).await;
            let device = device.map_err(|error| error.to_string())?;
            let door = Door::from_fd(core, door).map_err(|error| error.to_string())?;
            let target = Target::new(core, device.clone(), options(&spec, nth));
            if stored(&*kept, &spec.name).is_some_and(|transfer| transfer.withholds()) {
                target.withhold();
            }
            target.remember(told, Box::new(|_| Box::pin(std::future::ready(Ok(())))));
            let task = {
                let target = target.clone();
                core.spawn(Class::Control, async move { target.serve(door).await })
            };
            serving.push((Served { spec, device, target }, task));
        }
        Node::with(core, serving, None, kept).await
    }

    /// Takes over from the node at the other end of a line; `specs` are the disks configured here.
    /// Disks that the node does not hand over are served at sockets of `listen`.
    ///
    /// # Errors
    /// When nothing was taken over; the text says why.
    pub async fn inherit(
        core: &Core,
        specs: &[DiskSpec],
        line: OwnedFd,
        listen: Listen,
        kept: Rc<dyn Kept>,
    ) -> Result<Node, String> {
        let settings = Settings { disk: specs.to_vec(), ..Settings::default() };
        let config = Config::new(settings, &Machine::look()).map_err(|error| error.to_string())?;
        let inherited = inherit(core, &config, line, &BTreeMap::new()).await;
        let inherited = inherited.map_err(|error| error.to_string())?;
        let before = inherited.predecessor;
        let node = Node::with(core, inherited.disks, Some(before.following()), kept).await?;
        let again = core.clone();
        let open = async move |spec: &DiskSpec| {
            let failed = |what: String| Error::new(Kind::System, what);
            let device = Bdev::open(&again, &spec.uri).await;
            let device = device.map_err(|error| failed(error.to_string()))?;
            let listener = listen(spec).ok_or_else(|| failed("somebody listens".to_owned()))?;
            let door = Door::from_fd(&again, listener);
            let door = door.map_err(|error| failed(error.to_string()))?;
            Ok(Ready { device, door, write_cache: None })
        };
        core.spawn(Class::Control, follow(node.disks.clone(), core.clone(), before, open));
        Ok(node)
    }

    async fn with(
        core: &Core,
        disks: Vec<(Served, reactor::JoinHandle<()>)>,
        following: Option<&[DiskSpec]>,
        kept: Rc<dyn Kept>,
    ) -> Result<Node, String> {
        let local = LocalResources::new(core, &[], None);
        let served = disks.iter().map(|(served, _)| &served.spec);
        let all = served.chain(following.into_iter().flatten());
        let names: Vec<_> = all.map(|spec| spec.name.clone()).collect();
        let transfers = names.into_iter().filter_map(|name| {
            let transfer = stored(&*kept, &name)?;
            Some((name, transfer))
        });
        let transfers = transfers.collect();
        local.on_keep(kept);
        let resources = Resources::Local(Box::new(local), false);
        let disks = Disks::start(core, resources, disks, following, false).await;
        let disks = Rc::new(disks.map_err(|error| error.to_string())?);
        disks.set_transfers(transfers);
        disks.resume_transfers(core);
        let upgrader = Upgrader::new(core, || {}, || false);
        upgrader.ready(disks.clone(), Doors::default());
        Ok(Node { core: core.clone(), disks, upgrader })
    }

    /// Hands over to the process at the other end of a line. Returns the longest pause of a guest,
    /// in microseconds.
    ///
    /// # Errors
    /// When the handover is not possible; then this node continues.
    pub async fn hand_over(&self, line: OwnedFd) -> Result<u64, String> {
        self.upgrader.to_line(line).await
    }

    /// Set when a successor is the node, even if this process is then killed.
    pub fn committed(&self) -> Rc<Cell<bool>> {
        self.upgrader.committed()
    }

    /// Whether all disks are served and wait for nothing in flight at the predecessor.
    pub fn has_all(&self) -> bool {
        let mut all = !self.holds();
        self.disks.each(|disk| all &= disk.serving.is_ok());
        all
    }

    /// Whether requests of a disk wait for operations in flight at the predecessor.
    pub fn holds(&self) -> bool {
        let mut holds = false;
        self.disks.each(|disk| {
            holds |= disk.serving.as_ref().is_ok_and(|serving| serving.target.holds());
        });
        holds
    }

    /// The number of requests that were repeated because an earlier process had left them
    /// unfinished.
    pub fn resubmitted(&self) -> u64 {
        let mut count = 0;
        self.disks.each(|disk| {
            if let Ok(serving) = &disk.serving {
                count +=
                    serving.target.stats().iter().map(|ring| ring.resubmitted.get()).sum::<u64>();
            }
        });
        count
    }

    /// The number of completed requests of a disk, including those of the processes before.
    pub fn completions(&self, name: &str) -> u64 {
        let mut count = 0;
        self.disks.each(|disk| {
            if let Ok(serving) = &disk.serving
                && disk.spec.name == name
            {
                let stats = serving.target.stats().iter();
                count += stats.map(|ring| ring.completions.get()).sum::<u64>();
            }
        });
        count
    }

    /// Begins to move a disk to another device.
    ///
    /// # Errors
    /// When this is not possible; the text says why.
    pub async fn begin_move(&self, name: &str, uri: &str, finish: bool) -> Result<(), String> {
        let begun = self.disks.begin_move(&self.core, name, uri, finish).await;
        begun.map(drop).map_err(|error| error.to_string())
    }

    /// Takes disks from other nodes.
    ///
    /// # Errors
    /// When somebody else does so there.
    pub fn receive(&self, addr: SocketAddr) -> std::io::Result<()> {
        self.disks.receive(&self.core, self.core.listen_alone(addr)?);
        Ok(())
    }

    /// Begins to move a disk to another node; `anyway` also if no machine uses it.
    ///
    /// # Errors
    /// When this is not possible; the text says why.
    pub async fn begin_send(
        &self,
        name: &str,
        addr: SocketAddr,
        anyway: bool,
    ) -> Result<(), String> {
        let to = Peer { addr, host: addr.ip().to_string(), disk: name.to_owned() };
        let begun = self.disks.begin_send(&self.core, name, to, anyway).await;
        begun.map(drop).map_err(|error| error.to_string())
    }

    /// Lets a move finish, or ends it.
    pub async fn end_move(&self, name: &str, finish: bool) {
        // It may have ended.
        let _ = match finish {
            true => self.disks.finish_move(&self.core, name).await,
            false => self.disks.abort_move(&self.core, name, false).await,
        };
    }

    /// Whether a disk is being moved.
    pub fn is_moving(&self) -> bool {
        !self.disks.moving().is_empty()
    }

    /// Removes a disk. Returns whether something of it is still in flight.
    ///
    /// # Errors
    /// When this is not possible; the text says why.
    pub async fn detach(&self, name: &str, force: bool) -> Result<bool, String> {
        let detached = self.disks.detach(&self.core, name, force).await;
        detached.map(|detached| detached.under_way).map_err(|error| error.to_string())
    }

    /// The names of all disks, served or not.
    pub fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        self.disks.each(|disk| names.push(disk.spec.name.clone()));
        names
    }

    /// Ends the node in an orderly way.
    pub async fn stop(&self) {
        self.disks.stop(&self.core).await;
    }
}

/// How far a disk is on its way to another node, as the state directory has it.
fn stored(kept: &dyn Kept, name: &str) -> Option<Transfer> {
    serde_json::from_str(&kept.transfer(name)?).ok()
}
