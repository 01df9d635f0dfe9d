//! The disks of a node in a simulated world. Devices, sessions, rings and both sides of an upgrade
//! are the real ones; what the system does for a node is the test's to do: it starts and ends
//! processes, and brings them their sockets.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use bdev::Bdev;
use reactor::{Class, Core, UnixListener};
use vhost::Target;

use crate::config::{Config, Settings};
use crate::disks::outside::{Here, Outside, Ready, patiently};
use crate::disks::spec::DiskSpec;
use crate::disks::{Disks, Served, options};
use crate::error::{Error, Kind};
use crate::machine::Machine;
use crate::serve::patience::LINGER_NS;
use crate::upgrade::{Upgrader, inherit};

/// See the module text.
pub struct Node {
    core: Core,
    disks: Rc<Disks>,
    upgrader: Rc<Upgrader>,
}

/// A socket on which somebody listens for the front ends of a disk, if nobody else does.
pub type Listen = Rc<dyn Fn(&DiskSpec) -> Option<OwnedFd>>;

impl Node {
    /// Opens disks, as patiently as a node does whose predecessor was killed, and serves each on a
    /// listening socket. `told` is what front ends were told of the write cache, as a state
    /// directory has it.
    ///
    /// # Errors
    /// When a device cannot be opened.
    pub async fn start(
        core: &Core,
        disks: Vec<(DiskSpec, OwnedFd)>,
        told: Option<bool>,
    ) -> Result<Node, String> {
        let until_ns = core.now_ns() + LINGER_NS;
        let busy =
            |error: &bdev::Error| error.kind() == bdev::ErrorKind::Busy && core.now_ns() < until_ns;
        let mut serving = Vec::new();
        for (nth, (spec, listener)) in disks.into_iter().enumerate() {
            let device = patiently(core, busy, async || Bdev::open(core, &spec.uri).await).await;
            let device = device.map_err(|error| error.to_string())?;
            let listener =
                UnixListener::from_fd(core, listener).map_err(|error| error.to_string())?;
            let target = Target::new(core, device.clone(), options(&spec, nth));
            target.remember(told, Box::new(|_| Box::pin(std::future::ready(Ok(())))));
            let task = {
                let target = target.clone();
                core.spawn(Class::Control, async move { target.serve(listener).await })
            };
            serving.push((Served { spec, device, target }, task));
        }
        Node::with(core, serving, None).await
    }

    /// Takes over from the node at the other end of a line; `specs` are what is configured here.
    /// What that does not hand over is served at sockets of `listen`.
    ///
    /// # Errors
    /// Why nothing was taken over.
    pub async fn inherit(
        core: &Core,
        specs: &[DiskSpec],
        line: OwnedFd,
        listen: Listen,
    ) -> Result<Node, String> {
        let settings = Settings { disk: specs.to_vec(), ..Settings::default() };
        let config = Config::new(settings, &Machine::look()).map_err(|error| error.to_string())?;
        let inherited = inherit(core, &config, line, &BTreeMap::new()).await;
        let inherited = inherited.map_err(|error| error.to_string())?;
        let before = inherited.predecessor;
        let node = Node::with(core, inherited.disks, Some(before.following())).await?;
        let again = core.clone();
        let open = async move |spec: &DiskSpec| {
            let failed = |what: String| Error::new(Kind::System, what);
            let device = Bdev::open(&again, &spec.uri).await;
            let device = device.map_err(|error| failed(error.to_string()))?;
            let listener = listen(spec).ok_or_else(|| failed("somebody listens".to_owned()))?;
            let listener = UnixListener::from_fd(&again, listener);
            let listener = listener.map_err(|error| failed(error.to_string()))?;
            Ok(Ready { device, listener, write_cache: None })
        };
        core.spawn(Class::Control, node.disks.clone().follow(core.clone(), before, open));
        Ok(node)
    }

    async fn with(
        core: &Core,
        disks: Vec<(Served, reactor::JoinHandle<()>)>,
        following: Option<&[DiskSpec]>,
    ) -> Result<Node, String> {
        let outside = Outside::Here(Here::new(core, &[], None), false);
        let disks = Disks::start(core, outside, disks, following).await;
        let disks = Rc::new(disks.map_err(|error| error.to_string())?);
        let upgrader = Upgrader::new(core, || {}, || false);
        upgrader.ready(disks.clone(), Vec::new(), None);
        Ok(Node { core: core.clone(), disks, upgrader })
    }

    /// Hands over to the process at the other end of a line. Gives how long the guest waited that
    /// waited longest, in microseconds.
    ///
    /// # Errors
    /// Why it was not possible: then this node goes on.
    pub async fn hand_over(&self, line: OwnedFd) -> Result<u64, String> {
        self.upgrader.to_line(line).await
    }

    /// Set when a successor is the node, even if this process is killed then.
    pub fn committed(&self) -> Rc<Cell<bool>> {
        self.upgrader.committed()
    }

    /// Whether all disks are at work, and wait for nothing that the node before has under way.
    pub fn has_all(&self) -> bool {
        let mut all = !self.holds();
        self.disks.each(|disk| all &= disk.serving.is_ok());
        all
    }

    /// Whether requests of a disk wait for what the node before has under way.
    pub fn holds(&self) -> bool {
        let mut holds = false;
        self.disks.each(|disk| {
            holds |= disk.serving.as_ref().is_ok_and(|serving| serving.target.holds());
        });
        holds
    }

    /// How many requests were done that an earlier process had left unfinished.
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

    /// How many requests of a disk were given back, also by the processes before.
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

    /// Takes a disk away. Gives whether something of it is still under way.
    ///
    /// # Errors
    /// Why it is not possible.
    pub async fn detach(&self, name: &str, force: bool) -> Result<bool, String> {
        let detached = self.disks.detach(&self.core, name, force).await;
        detached.map(|detached| detached.under_way).map_err(|error| error.to_string())
    }

    /// The names of the disks that there are, at work or not.
    pub fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        self.disks.each(|disk| names.push(disk.spec.name.clone()));
        names
    }

    /// Ends it in good order.
    pub async fn stop(&self) {
        self.disks.stop(&self.core).await;
    }
}
