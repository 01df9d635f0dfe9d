//! The disks of a node in a simulated world. Devices, sessions, rings and both sides of an upgrade
//! are the real ones; what the system does for a node is the test's to do: it starts and ends
//! processes, and brings them their sockets.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use bdev::Bdev;
use reactor::{Class, Core, UnixListener};
use vhost::Target;

use crate::config::{Config, Settings};
use crate::disk_spec::DiskSpec;
use crate::disks::{Disks, Served, options};
use crate::machine::Machine;
use crate::outside::{Here, Outside, patiently};
use crate::patience::LINGER_NS;
use crate::upgrade::{Upgrader, inherit};

/// See the module text.
pub struct Node {
    core: Core,
    disks: Rc<Disks>,
    upgrader: Rc<Upgrader>,
}

impl Node {
    /// Opens a disk, as patiently as a node does whose predecessor was killed, and serves it on a
    /// listening socket. `told` is what front ends were told of the write cache, as a state directory
    /// has it.
    ///
    /// # Errors
    /// When the device cannot be opened.
    pub async fn start(
        core: &Core,
        spec: &DiskSpec,
        listener: OwnedFd,
        told: Option<bool>,
    ) -> Result<Node, String> {
        let until_ns = core.now_ns() + LINGER_NS;
        let busy =
            |error: &bdev::Error| error.kind() == bdev::ErrorKind::Busy && core.now_ns() < until_ns;
        let device = patiently(core, busy, async || Bdev::open(core, &spec.uri).await).await;
        let device = device.map_err(|error| error.to_string())?;
        let listener = UnixListener::from_fd(core, listener).map_err(|error| error.to_string())?;
        let target = Target::new(core, device.clone(), options(spec, 0));
        target.remember(told, Box::new(|_| Box::pin(std::future::ready(Ok(())))));
        let serving = {
            let target = target.clone();
            core.spawn(Class::Control, async move { target.serve(listener).await })
        };
        Node::with(core, vec![(Served { spec: spec.clone(), device, target }, serving)]).await
    }

    /// Takes over from the node at the other end of a line; `spec` is what is configured here.
    ///
    /// # Errors
    /// Why nothing was taken over.
    pub async fn inherit(core: &Core, spec: &DiskSpec, line: OwnedFd) -> Result<Node, String> {
        let settings = Settings { disk: vec![spec.clone()], ..Settings::default() };
        let config = Config::new(settings, &Machine::look()).map_err(|error| error.to_string())?;
        let inherited = inherit(core, &config, line, &BTreeMap::new()).await;
        Node::with(core, inherited.map_err(|error| error.to_string())?.disks).await
    }

    async fn with(
        core: &Core,
        disks: Vec<(Served, reactor::JoinHandle<()>)>,
    ) -> Result<Node, String> {
        let outside = Outside::Here(Here::new(core, &[], None), false);
        let disks = Disks::start(core, outside, disks).await.map_err(|error| error.to_string())?;
        let (disks, upgrader) = (Rc::new(disks), Upgrader::new(core, || {}));
        upgrader.ready(disks.clone(), Vec::new(), None);
        Ok(Node { core: core.clone(), disks, upgrader })
    }

    /// Hands over to the process at the other end of a line. Gives how long the guest waited, in
    /// microseconds.
    ///
    /// # Errors
    /// Why it was not possible: then this node goes on.
    pub async fn hand_over(&self, line: OwnedFd) -> Result<u64, String> {
        self.upgrader.to_line(line).await
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

    /// Ends it in good order.
    pub async fn stop(&self) {
        self.disks.stop(&self.core).await;
    }
}
