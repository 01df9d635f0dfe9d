//! The resources of a node outside its own memory and database: images, named sockets, and the
//! state that survives a restart.
//!
//! A confined node opens nothing itself. It names a disk to its launcher (`launcher`), which hands
//! it descriptors. A node that is not confined takes the same steps itself, with
//! [`LocalResources`], on which the launcher works too.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;

use bdev::{Bdev, ErrorKind, Parts};
use reactor::{Class, Core, Listener, Socket, UnixListener};
use vhost::Door;

use crate::disks::events::{EventLog, What};
use crate::disks::limits::{AllLimits, LimitChange};
use crate::disks::protocol::{Named, Opened, ToLauncher};
use crate::disks::spec::DiskSpec;
use crate::disks::state::State;
use crate::disks::transfers::{Peer, Transfer};
use crate::error::{Error, Kind};
use crate::ipc::channel::Channel;
use crate::patience::{Exclusive, Patience, patiently};

/// How many events wait for the launcher at most; more are counted.
const OUTBOX_MAX: usize = 1024;

/// Between two attempts to write the state directory.
const STATE_AGAIN_NS: u64 = 1_000_000_000;

/// A disk that is ready to be served.
pub(crate) struct Ready {
    pub device: Bdev,
    pub door: Door,
    pub write_cache: Option<bool>,
}

/// The resources that a process opens itself.
pub(crate) struct LocalResources {
    core: Core,
    /// The disks of the command line and the configuration file.
    asked: Vec<DiskSpec>,
    state: Option<State>,
    /// The limits of disks and groups, without a state directory.
    limits: RefCell<AllLimits>,
    events: EventLog,
    /// Plays the state directory of a simulated world.
    #[cfg(feature = "testing")]
    kept: RefCell<Option<Rc<dyn Kept>>>,
}

/// Plays the state directory of a simulated world.
#[cfg(feature = "testing")]
pub trait Kept {
    /// Stores a disk.
    fn keep(&self, spec: &DiskSpec);

    /// What was stored last of a disk's way to another node, in JSON.
    fn transfer(&self, name: &str) -> Option<String>;

    /// Stores that.
    fn keep_transfer(&self, name: &str, transfer: Option<String>);
}

impl LocalResources {
    pub fn new(core: &Core, asked: &[DiskSpec], state: Option<State>) -> LocalResources {
        let (limits, events) = (RefCell::default(), EventLog::new(core));
        LocalResources {
            core: core.clone(),
            asked: asked.to_vec(),
            state,
            limits,
            events,
            #[cfg(feature = "testing")]
            kept: RefCell::default(),
        }
    }

    /// Sets who plays the state directory.
    #[cfg(feature = "testing")]
    pub fn on_keep(&self, kept: Rc<dyn Kept>) {
        self.kept.replace(Some(kept));
    }

    /// What has happened.
    pub fn events(&self) -> &EventLog {
        &self.events
    }

    /// Whether attached disks come back after a restart.
    pub fn remembers(&self) -> bool {
        #[cfg(feature = "testing")]
        if self.kept.borrow().is_some() {
            return true;
        }
        self.state.is_some()
    }

    /// The state directory, if there is one.
    pub fn state(&self) -> Option<&State> {
        self.state.as_ref()
    }

    /// All named disks. Those configured at the start come first, and win over attached ones of the
    /// same name.
    pub fn disks(&self) -> Vec<Named> {
        let attached = self.state.as_ref().map(State::disks).unwrap_or_default();
        let asked: BTreeSet<_> = self.asked.iter().map(|spec| &spec.name).collect();
        let attached = attached.into_iter().filter(|spec| !asked.contains(&spec.name));
        let all = self.asked.iter().cloned().map(|spec| (spec, false));
        all.chain(attached.map(|spec| (spec, true)))
            .map(|(spec, attached)| {
                let write_cache = self.write_cache(&spec.socket);
                let transfer = self.transfer(&spec.name);
                Named { spec, attached, write_cache, transfer, stands_still: None }
            })
            .collect()
    }

    /// The disk of that name, if it is one of [`LocalResources::disks`].
    pub fn disk(&self, name: &str) -> Option<DiskSpec> {
        let asked = self.asked.iter().find(|spec| spec.name == name).cloned();
        asked.or_else(|| self.state.as_ref()?.disk(name))
    }

    /// What the front ends at a socket were told, if known.
    pub fn write_cache(&self, socket: &Path) -> Option<bool> {
        self.state.as_ref()?.write_cache(socket)
    }

    pub async fn keep(&self, spec: &DiskSpec) -> Result<(), Error> {
        #[cfg(feature = "testing")]
        if let Some(kept) = &*self.kept.borrow() {
            kept.keep(spec);
        }
        match &self.state {
            Some(state) => state.keep_disk(spec).await.map_err(system),
            None => Ok(()),
        }
    }

    /// Does what can be done of [`LocalResources::moved`] before the disk has moved. Suspends.
    pub async fn prepare_moved(&self, spec: &DiskSpec) {
        if let Some(state) = &self.state {
            state.prepare_disk(spec).await;
        }
    }

    /// Stores that a disk has moved. Suspends until that is durable or, if it fails, until the
    /// state directory certainly has the old device.
    pub async fn moved(&self, spec: &DiskSpec) -> Result<(), Error> {
        let kept = self.keep(spec).await;
        self.out_of_doubt(&spec.name).await;
        kept
    }

    /// Suspends until the state directory certainly has what it had before a change that has
    /// failed.
    async fn out_of_doubt(&self, disk: &str) {
        while let Some(state) = self.state.as_ref().filter(|state| state.is_in_doubt()) {
            tracing::error!(disk, "its guest waits until the state directory can be written again");
            self.core.sleep_ns(STATE_AGAIN_NS).await;
            // It is tried again.
            let _ = state.write_again().await;
        }
    }

    /// How far a disk is on its way to another node, or from one.
    pub fn transfer(&self, name: &str) -> Option<Transfer> {
        #[cfg(feature = "testing")]
        if let Some(kept) = &*self.kept.borrow() {
            return serde_json::from_str(&kept.transfer(name)?).ok();
        }
        self.state.as_ref()?.transfer(name)
    }

    /// Stores that, and limits that come along. Suspends until it is durable or, if it fails, until
    /// the state directory certainly has what it had before.
    pub async fn keep_transfer(
        &self,
        name: &str,
        transfer: Option<&Transfer>,
        limits: &[LimitChange],
    ) -> Result<(), Error> {
        #[cfg(feature = "testing")]
        if let Some(kept) = &*self.kept.borrow() {
            let text = transfer.and_then(|transfer| serde_json::to_string(transfer).ok());
            kept.keep_transfer(name, text);
        }
        let Some(state) = &self.state else { return Ok(()) };
        let stored = state.keep_transfer(name, transfer, limits).await;
        self.out_of_doubt(name).await;
        stored.map_err(system)
    }

    /// Does what can be done of [`LocalResources::keep_transfer`] before. Suspends.
    pub async fn prepare_transfer(&self, name: &str, transfer: &Transfer) {
        if let Some(state) = &self.state {
            state.prepare_transfer(name, transfer).await;
        }
    }

    /// Suspends while the state directory may have another device of a disk than it should.
    pub async fn until_certain(&self) {
        while self.state.as_ref().is_some_and(State::is_in_doubt) {
            self.core.sleep_ns(STATE_AGAIN_NS).await;
        }
    }

    pub async fn forget(&self, spec: &DiskSpec) -> Result<(), Error> {
        match &self.state {
            Some(state) => state.forget_disk(&spec.name, &spec.socket).await.map_err(system),
            None => {
                self.limits.borrow_mut().forget(&spec.name);
                Ok(())
            }
        }
    }

    /// The limits of disks and groups.
    pub fn limits(&self) -> AllLimits {
        match &self.state {
            Some(state) => state.limits(),
            None => self.limits.borrow().clone(),
        }
    }

    /// Those that no state directory has.
    pub fn limits_in_memory(&self) -> AllLimits {
        self.limits.borrow().clone()
    }

    /// Sets those that no state directory has.
    pub fn set_limits_in_memory(&self, limits: AllLimits) {
        self.limits.replace(limits);
    }

    /// Changes them; suspends until the change is durable, if there is a state directory.
    pub async fn change_limits(&self, change: &LimitChange) -> Result<(), Error> {
        match &self.state {
            Some(state) => state.change_limits(change).await.map_err(system),
            None => {
                let mut limits = self.limits.borrow().clone();
                limits.change(change).map_err(|what| Error::new(Kind::Usage, what))?;
                self.limits.replace(limits);
                Ok(())
            }
        }
    }

    pub async fn keep_write_cache(&self, socket: &Path, told: Option<bool>) -> Result<(), Error> {
        match &self.state {
            Some(state) => state.keep_write_cache(socket, told).await.map_err(system),
            None => Ok(()),
        }
    }

    /// Opens a disk's device, for another process: see [`Parts::open`]. Suspends.
    pub async fn parts(&self, spec: &DiskSpec) -> Result<(Parts, Option<OwnedFd>), Error> {
        let core = &self.core;
        open(core, spec, async || Parts::open(core, &spec.uri).await).await
    }

    /// Listens at a disk's socket. Suspends.
    pub async fn listen(&self, spec: &DiskSpec) -> Result<UnixListener, Error> {
        listen(&self.core, spec).await
    }

    /// Opens a disk for this process. Suspends.
    async fn open(&self, spec: &DiskSpec) -> Result<Ready, Error> {
        let core = &self.core;
        let device = open(core, spec, async || Bdev::open(core, &spec.uri).await).await?;
        let door = listen(core, spec).await?.into();
        Ok(Ready { device, door, write_cache: self.write_cache(&spec.socket) })
    }
}

fn system(what: impl Into<String>) -> Error {
    Error::new(Kind::System, what)
}

/// Opens a disk's device. A process that has just been killed may hold it for a moment.
async fn open<T>(
    core: &Core,
    spec: &DiskSpec,
    open: impl AsyncFn() -> Result<T, bdev::Error>,
) -> Result<T, Error> {
    let name = &spec.name;
    let image = match bdev::image_of(&spec.uri) {
        Some(path) => Exclusive::File(path),
        None => Exclusive::Unknown(spec.uri.clone()),
    };
    let image = Patience::with(image);
    let busy = |error: &bdev::Error| error.kind() == ErrorKind::Busy && image.lasts(core);
    let opened = patiently(core, busy, open).await;
    opened.map_err(|error| system(format!("disk {name}: {error}")))
}

/// Listens at a disk's socket, which a process that has just been killed may hold, too.
async fn listen(core: &Core, spec: &DiskSpec) -> Result<UnixListener, Error> {
    let name = &spec.name;
    let socket = Patience::with(Exclusive::Socket(spec.socket.clone()));
    let in_use = |error: &std::io::Error| {
        error.kind() == std::io::ErrorKind::AddrInUse && socket.lasts(core)
    };
    let listener = patiently(core, in_use, async || UnixListener::bind(core, &spec.socket)).await;
    listener.map_err(|error| {
        system(format!("disk {name}: cannot listen on {}: {error}", spec.socket.display()))
    })
}

/// The resources of a node, opened here or by its launcher.
pub(crate) enum Resources {
    /// This process opens them; it may attach disks if the second field is true.
    Local(Box<LocalResources>, bool),
    /// The launcher opens them; attached disks come back if the second field is true.
    Launcher(Rc<Channel>, bool, Outbox),
}

/// Events that are to be told to the launcher, in their order.
#[derive(Default)]
pub(crate) struct Outbox {
    events: RefCell<VecDeque<What>>,
    /// The number of those that found no room.
    lost: Cell<u64>,
    sending: Cell<bool>,
}

/// The future that stores a change of the write cache.
type Keeping = Pin<Box<dyn Future<Output = Result<(), String>>>>;

impl Resources {
    /// Whether attached disks come back after a restart.
    pub fn remembers(&self) -> bool {
        match self {
            Resources::Local(local, _) => local.remembers(),
            Resources::Launcher(_, remembers, _) => *remembers,
        }
    }

    /// Whether disks may be attached to this process.
    pub fn may_attach(&self) -> bool {
        matches!(self, Resources::Launcher(..) | Resources::Local(_, true))
    }

    /// Releases the state directory: another process has it from now on.
    pub fn leave(&self) {
        if let Resources::Local(local, _) = self
            && let Some(state) = &local.state
        {
            state.release();
        }
    }

    /// Notes for operators what has happened.
    pub fn report(self: &Rc<Self>, core: &Core, what: What) {
        let outbox = match &**self {
            Resources::Local(local, _) => return local.events.note(what),
            Resources::Launcher(.., outbox) => outbox,
        };
        let mut events = outbox.events.borrow_mut();
        if events.len() < OUTBOX_MAX {
            events.push_back(what.shortened());
        } else {
            outbox.lost.set(outbox.lost.get() + 1);
        }
        if !outbox.sending.replace(true) {
            let resources = self.clone();
            core.spawn(Class::Control, async move { resources.send_events().await });
        }
    }

    /// Tells the launcher what waits to be told.
    async fn send_events(&self) {
        let Resources::Launcher(channel, _, outbox) = self else { return };
        let next = || {
            let event = outbox.events.borrow_mut().pop_front();
            let lost = || match outbox.lost.take() {
                0 => None,
                count => Some(What::Lost { count }),
            };
            event.or_else(lost)
        };
        while let Some(what) = next() {
            // A launcher of another version may not know it, or the launcher has ended.
            let _ = channel.ask(&ToLauncher::Event { what }, &[]).await;
        }
        outbox.sending.set(false);
    }

    /// The events that this process keeps.
    pub fn events(&self) -> Option<&EventLog> {
        match self {
            Resources::Local(local, _) => Some(&local.events),
            Resources::Launcher(..) => None,
        }
    }

    /// The named disks. Suspends.
    pub async fn disks(&self) -> Result<Vec<Named>, Error> {
        match self {
            Resources::Local(local, _) => Ok(local.disks()),
            Resources::Launcher(channel, ..) => channel.ask(&ToLauncher::Disks, &[]).await?.read(),
        }
    }

    /// Opens a named disk. Suspends.
    pub async fn open(&self, core: &Core, spec: &DiskSpec) -> Result<Ready, Error> {
        let channel = match self {
            Resources::Local(local, _) => return local.open(spec).await,
            Resources::Launcher(channel, ..) => channel,
        };
        let name = spec.name.clone();
        let answer = channel.ask(&ToLauncher::Open { name }, &[]).await?;
        let Opened { holes, write_cache } = answer.read()?;
        let mut descriptors = answer.descriptors;
        let failed = |why: String| system(format!("disk {}: {why}", spec.name));
        let door = descriptors.pop().ok_or_else(|| failed("no socket came".to_owned()))?;
        let door = Door::from_fd(core, door).map_err(|error| failed(error.to_string()))?;
        let device = Bdev::take(core, &spec.uri, Parts { descriptors, holes }).await;
        let device = device.map_err(|error| failed(error.to_string()))?;
        Ok(Ready { device, door, write_cache })
    }

    /// Opens the device to which a disk is to be moved. Suspends.
    pub async fn open_target(&self, core: &Core, spec: &DiskSpec) -> Result<Bdev, Error> {
        let channel = match self {
            Resources::Local(..) => {
                return open(core, spec, async || Bdev::open(core, &spec.uri).await).await;
            }
            Resources::Launcher(channel, ..) => channel,
        };
        let name = spec.name.clone();
        let answer = channel.ask(&ToLauncher::OpenTarget { name }, &[]).await?;
        let Opened { holes, .. } = answer.read()?;
        let parts = Parts { descriptors: answer.descriptors, holes };
        let device = Bdev::take(core, &spec.uri, parts).await;
        device.map_err(|error| system(format!("disk {}: {error}", spec.name)))
    }

    /// Forgets the device to which a disk was to be moved.
    pub async fn drop_target(&self, name: &str) {
        if let Resources::Launcher(channel, ..) = self {
            let drop_target = ToLauncher::DropTarget { name: name.to_owned() };
            drop(channel.ask(&drop_target, &[]).await);
        }
    }

    /// Does what can be done of [`Resources::moved`] while the guest need not wait. Suspends.
    pub async fn prepare_moved(&self, spec: &DiskSpec) {
        match self {
            Resources::Local(local, _) => local.prepare_moved(spec).await,
            Resources::Launcher(channel, ..) => {
                let prepare = ToLauncher::PrepareMoved { name: spec.name.clone() };
                // A launcher of another version may not know it.
                let _ = channel.ask(&prepare, &[]).await;
            }
        }
    }

    /// Stores that a disk has moved to the device that was opened for it. Suspends until that is
    /// durable.
    ///
    /// # Errors
    /// When it cannot be stored; then the next start uses the old device.
    pub async fn moved(&self, spec: &DiskSpec) -> Result<(), Error> {
        match self {
            Resources::Local(local, _) => local.moved(spec).await,
            Resources::Launcher(channel, ..) => {
                let moved = ToLauncher::Moved { name: spec.name.clone() };
                channel.ask(&moved, &[]).await.map(drop)
            }
        }
    }

    /// Stores how far a disk is on its way to another node, or from one, and limits that come
    /// along. Suspends until that is durable.
    ///
    /// # Errors
    /// When it cannot be stored; then nothing has changed.
    pub async fn keep_transfer(
        &self,
        name: &str,
        transfer: Option<&Transfer>,
        limits: &[LimitChange],
    ) -> Result<(), Error> {
        match self {
            Resources::Local(local, _) => local.keep_transfer(name, transfer, limits).await,
            Resources::Launcher(channel, ..) => {
                let (name, transfer) = (name.to_owned(), transfer.cloned());
                let keep = ToLauncher::KeepTransfer { name, transfer, limits: limits.to_vec() };
                channel.ask(&keep, &[]).await.map(drop)
            }
        }
    }

    /// Does what can be done of [`Resources::keep_transfer`] while no guest waits. Suspends.
    pub async fn prepare_transfer(&self, name: &str, transfer: &Transfer) {
        match self {
            Resources::Local(local, _) => local.prepare_transfer(name, transfer).await,
            Resources::Launcher(channel, ..) => {
                let (name, transfer) = (name.to_owned(), transfer.clone());
                let prepare = ToLauncher::PrepareTransfer { name, transfer };
                // A launcher of another version may not know it.
                let _ = channel.ask(&prepare, &[]).await;
            }
        }
    }

    /// Begins a connection to the node to which a disk goes.
    ///
    /// # Errors
    /// As the system gives them, if it can tell at once.
    pub async fn dial(&self, core: &Core, name: &str, to: &Peer) -> Result<Socket, Error> {
        let failed = |error: std::io::Error| system(format!("{}: {error}", to.addr));
        match self {
            Resources::Local(..) => core.connect(to.addr).map_err(failed),
            Resources::Launcher(channel, ..) => {
                let dial = ToLauncher::Dial { name: name.to_owned() };
                let begun = channel.ask(&dial, &[]).await?.descriptors.pop();
                let begun = begun.ok_or_else(|| system("no connection came"))?;
                Socket::from_fd(core, begun).map_err(failed)
            }
        }
    }

    /// The launcher's socket at which disks of other nodes come, if there is a launcher.
    ///
    /// # Errors
    /// When it does not come.
    pub async fn take_disks(&self, core: &Core) -> Result<Option<Listener>, Error> {
        let Resources::Launcher(channel, ..) = self else { return Ok(None) };
        let socket = channel.ask(&ToLauncher::TakeDisks, &[]).await?.descriptors.pop();
        let socket = socket.ok_or_else(|| system("no socket came"))?;
        let listener = Listener::from_fd(core, socket);
        listener.map(Some).map_err(|error| system(error.to_string()))
    }

    /// Forgets a disk that could not be attached: the launcher may have opened it.
    pub async fn give_up(&self, name: &str) {
        if let Resources::Launcher(channel, ..) = self {
            let close = ToLauncher::Close { name: name.to_owned() };
            drop(channel.ask(&close, &[]).await);
        }
    }

    /// Removes the name of a disk's socket.
    pub async fn close(&self, spec: &DiskSpec) {
        match self {
            Resources::Local(..) => remove(&spec.socket),
            // If the launcher has ended, nobody needs the name to be removed.
            Resources::Launcher(channel, ..) => {
                let close = ToLauncher::Close { name: spec.name.clone() };
                drop(channel.ask(&close, &[]).await);
            }
        }
    }

    /// Stores a disk for the next start. Suspends until that is durable.
    pub async fn keep(&self, spec: &DiskSpec) -> Result<(), Error> {
        match self {
            Resources::Local(local, _) => local.keep(spec).await,
            Resources::Launcher(channel, ..) => {
                let keep = ToLauncher::Keep { name: spec.name.clone() };
                channel.ask(&keep, &[]).await.map(drop)
            }
        }
    }

    /// Forgets a stored disk. Suspends until that is durable.
    pub async fn forget(&self, spec: &DiskSpec) -> Result<(), Error> {
        match self {
            Resources::Local(local, _) => local.forget(spec).await,
            Resources::Launcher(channel, ..) => {
                let forget = ToLauncher::Forget { name: spec.name.clone() };
                channel.ask(&forget, &[]).await.map(drop)
            }
        }
    }

    /// The limits of disks and groups. Suspends.
    pub async fn limits(&self) -> Result<AllLimits, Error> {
        match self {
            Resources::Local(local, _) => Ok(local.limits()),
            Resources::Launcher(channel, ..) => channel.ask(&ToLauncher::Limits, &[]).await?.read(),
        }
    }

    /// Stores a change of limits for the next start. Suspends until that is durable.
    pub async fn change_limits(&self, change: &LimitChange) -> Result<(), Error> {
        match self {
            Resources::Local(local, _) => local.change_limits(change).await,
            Resources::Launcher(channel, ..) => {
                let change = ToLauncher::ChangeLimits { change: change.clone() };
                channel.ask(&change, &[]).await.map(drop)
            }
        }
    }

    /// Stores what a disk's guest was told of its write cache.
    pub fn keep_write_cache(self: &Rc<Self>, spec: &DiskSpec, told: Option<bool>) -> Keeping {
        let (resources, spec) = (self.clone(), spec.clone());
        Box::pin(async move {
            let kept = match &*resources {
                Resources::Local(local, _) => local.keep_write_cache(&spec.socket, told).await,
                Resources::Launcher(channel, ..) => {
                    let keep = ToLauncher::WriteCache { name: spec.name, told };
                    channel.ask(&keep, &[]).await.map(drop)
                }
            };
            kept.map_err(|error| error.to_string())
        })
    }
}

/// Removes the name of a socket.
#[expect(clippy::disallowed_methods, reason = "the end of a disk or a node")]
pub(crate) fn remove(socket: &Path) {
    // The next listener replaces a name that is left.
    let _ = std::fs::remove_file(socket);
}
