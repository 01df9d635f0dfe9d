//! The disks that a node serves to virtual machines: opened at the start, attached while it runs,
//! or taken over from the predecessor; ended with the node, or handed over to the successor.
//!
//! Disks configured at the start come first; attached ones come back from the state directory after
//! them. One change is made at a time.

pub(crate) mod outside;
pub(crate) mod report;
pub(crate) mod spec;
pub(crate) mod state;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use bdev::Bdev;
use reactor::{Class, Core, JoinHandle};
use vhost::{Target, TargetOptions};

use crate::disks::outside::{Named, Outside, Ready};
use crate::disks::spec::DiskSpec;
use crate::error::{Error, Kind};
use crate::size::Size;
use crate::upgrade::{Arrival, Lost, Predecessor};

/// Maximum number of disks.
const DISKS_MAX: usize = 1024;
/// How often a change polls for the end of the one before it, in nanoseconds.
const LOOK_NS: u64 = 1_000_000;

/// How often the node tries to open a disk that its predecessor has lost, in nanoseconds.
const AGAIN_NS: u64 = 100_000_000;
/// How long devices may take when the node ends, in nanoseconds.
const STOP_NS: u64 = 5_000_000_000;

/// A disk of the node.
pub(crate) struct Disk {
    pub spec: DiskSpec,
    /// It was attached, and comes back after a restart.
    pub attached: bool,
    pub serving: Result<Serving, Absent>,
}

/// Why a disk is not served here.
pub(crate) enum Absent {
    /// It could not be opened.
    Failed(String),
    /// The predecessor has it, with its front end's connection if there is one.
    Follows,
    /// The predecessor has ended without handing it over.
    Lost,
    /// It was detached, but has operations in flight: at its device, if the target is given, or in
    /// the predecessor. Until they have ended nobody else gets its name, its socket or its image.
    Leaves(Option<Rc<Target>>),
}

impl std::fmt::Display for Absent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Absent::Failed(why) => why,
            Absent::Follows => {
                "it follows from the node before, once the operations at its device are done"
            }
            Absent::Lost => "the node before has lost it: it is opened again once it is free",
            Absent::Leaves(Some(_)) => {
                "it was detached, but operations are in flight at its device: until they are done \
                 its image, its name and its socket are in use"
            }
            Absent::Leaves(None) => {
                "it was detached, but the node before still has it, with its guest: until it is \
                 handed over its image, its name and its socket are in use"
            }
        })
    }
}

/// The outcome of a detach.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Detached {
    /// It comes back when the node is started in the same way.
    pub comes_back: bool,
    /// Operations are still in flight, so it has not wholly gone.
    pub under_way: bool,
}

/// The parts of a served disk.
pub(crate) struct Serving {
    pub target: Rc<Target>,
    serving: JoinHandle<()>,
}

/// A served disk, to be handed over. Clones are the same disk.
#[derive(Clone)]
pub(crate) struct Served {
    pub spec: DiskSpec,
    pub device: Bdev,
    pub target: Rc<Target>,
}

/// All disks; belongs to core 0.
#[derive(Default)]
pub(crate) struct Disks {
    outside: Option<Rc<Outside>>,
    all: RefCell<Vec<Disk>>,
    /// The number of disks there ever were: disks begin on the cores in turn.
    begun: Cell<usize>,
    changing: Cell<bool>,
    /// The current change is an upgrade.
    handing_over: Cell<bool>,
    /// Detached disks that have yet to end here.
    ending: Cell<usize>,
    /// Disks that have yet to come from the predecessor.
    coming: Cell<usize>,
    /// Hands over the disks that were not quiesced when the others were handed over.
    following: RefCell<Option<JoinHandle<()>>>,
    ended: Cell<bool>,
    /// Another process has them now, with their sockets.
    left: Cell<bool>,
}

/// The right to make a change.
struct Change<'a>(&'a Disks);

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.0.changing.set(false);
    }
}

impl Disks {
    /// Opens the devices and then listens, so that a client that connects finds the disk ready. A
    /// disk that was attached earlier and cannot be opened any more is left out, and logged.
    ///
    /// # Errors
    /// When a device cannot be opened, or another process listens on a socket. With a predecessor
    /// (`following`) this is only logged, because the other disks are already served.
    pub async fn start(
        core: &Core,
        outside: Outside,
        taken: Vec<(Served, JoinHandle<()>)>,
        following: Option<&[DiskSpec]>,
    ) -> Result<Disks, Error> {
        let named = outside.disks().await?;
        let takes_over = following.is_some();
        let following = following.unwrap_or_default();
        let outside = Some(Rc::new(outside));
        let begun = taken.len() + following.len();
        let disks = Disks { outside, begun: begun.into(), ..Disks::default() };
        let known = |spec: &DiskSpec| named.iter().find(|named| named.spec.name == spec.name);
        for (Served { spec, target, .. }, serving) in taken {
            disks.remember(&spec, &target, known(&spec).and_then(|named| named.write_cache));
            let attached = known(&spec).is_none_or(|named| named.attached);
            let serving = Ok(Serving { target, serving });
            disks.all.borrow_mut().push(Disk { spec, attached, serving });
        }
        disks.coming.set(following.len());
        for spec in following {
            let attached = known(spec).is_none_or(|named| named.attached);
            let serving = Err(Absent::Follows);
            disks.all.borrow_mut().push(Disk { spec: spec.clone(), attached, serving });
        }
        for Named { spec, attached, .. } in named {
            if disks.find(&spec.name).is_ok() {
                continue;
            }
            let serving = match disks.serve(core, &spec).await {
                Err(error) if attached || takes_over => {
                    tracing::error!("{error}; it stays configured for the next start");
                    Err(Absent::Failed(error.to_string()))
                }
                serving => Ok(serving?),
            };
            disks.all.borrow_mut().push(Disk { spec, attached, serving });
        }
        Ok(disks)
    }

    /// Starts the disks that a changed configuration has named since the start; logs those that
    /// cannot be started. Suspends.
    pub async fn start_others(&self, core: &Core) {
        let Ok(_change) = self.change(core).await else { return };
        let Some(outside) = &self.outside else { return };
        let named = match outside.disks().await {
            Ok(named) => named,
            Err(error) => return tracing::error!("cannot list the disks: {error}"),
        };
        for Named { spec, attached, .. } in named {
            if self.find(&spec.name).is_ok() {
                continue;
            }
            let serving = self.serve(core, &spec).await.map_err(|error| {
                tracing::error!("{error}");
                Absent::Failed(error.to_string())
            });
            self.all.borrow_mut().push(Disk { spec, attached, serving });
        }
    }

    /// Adds the disks that follow from the predecessor. Those that it does not hand over are opened
    /// with `open`, as soon as that is possible.
    pub async fn follow(
        self: Rc<Self>,
        core: Core,
        predecessor: Rc<Predecessor>,
        open: impl AsyncFn(&DiskSpec) -> Result<Ready, Error> + Clone + 'static,
    ) {
        while let Some(arrival) = predecessor.next().await {
            match arrival {
                Arrival::Serves(served, serving, unsettled) => {
                    self.coming.set(self.coming.get() + usize::from(unsettled));
                    let Served { spec, target, .. } = *served;
                    self.remember(&spec, &target, None);
                    tracing::info!(disk = %spec.name, "followed from the node before");
                    self.arrived(&core, &spec, Serving { target, serving }).await;
                }
                Arrival::Settled(spec) => {
                    self.coming.set(self.coming.get() - 1);
                    tracing::info!(disk = %spec.name, "the node before has nothing of it in flight");
                }
                Arrival::Lost(lost) => {
                    let (disks, again, open) = (self.clone(), core.clone(), open.clone());
                    core.spawn(Class::Control, async move {
                        disks.open_anew(&again, lost, open).await;
                    });
                }
            }
        }
    }

    /// Opens a disk that the predecessor has lost.
    async fn open_anew(
        self: Rc<Self>,
        core: &Core,
        lost: Lost,
        open: impl AsyncFn(&DiskSpec) -> Result<Ready, Error>,
    ) {
        let Lost { spec, device, mut statistics } = lost;
        // If it was taken over, it has been released.
        let taken = self.with(&spec.name, |disk| match &disk.serving {
            Err(Absent::Leaves(_)) => None,
            _ => std::mem::replace(&mut disk.serving, Err(Absent::Lost)).ok(),
        });
        if let Some(Serving { target, serving }) = taken.flatten() {
            serving.await;
            statistics = target.statistics();
            // Its device is open, and holds the lock.
            drop(target);
        }
        let mut said = String::new();
        let wanted = || self.with(&spec.name, |disk| matches!(disk.serving, Err(Absent::Lost)));
        while !self.ended.get() && wanted() == Some(true) {
            match open(&spec).await {
                Ok(ready) => {
                    let device = device.unwrap_or(ready.device);
                    let serving = self.begin(core, &spec, Ready { device, ..ready });
                    serving.target.take_statistics(&statistics);
                    return self.arrived(core, &spec, serving).await;
                }
                Err(error) => {
                    let why = error.to_string();
                    if why != said {
                        tracing::warn!(disk = %spec.name, "it is not free yet: {why}");
                        said = why;
                    }
                    core.sleep_ns(AGAIN_NS).await;
                }
            }
        }
        self.coming.set(self.coming.get() - 1);
        // It was detached meanwhile.
        let leaves = self.with(&spec.name, |disk| match &disk.serving {
            Err(Absent::Leaves(Some(target))) => {
                target.release(false);
                false
            }
            Err(Absent::Leaves(None)) => true,
            _ => false,
        });
        if leaves == Some(true) {
            self.gone(&spec.name);
        }
    }

    /// Installs a disk that has come. If it was detached meanwhile, ends it.
    async fn arrived(self: &Rc<Self>, core: &Core, spec: &DiskSpec, serving: Serving) {
        self.coming.set(self.coming.get() - 1);
        let leaves = |disk: &mut Disk| matches!(disk.serving, Err(Absent::Leaves(_)));
        if self.with(&spec.name, leaves) == Some(true) {
            self.end(core, &spec.name, serving);
            if let Some(outside) = self.outside.as_ref().filter(|_| !self.left.get()) {
                outside.close(spec).await;
            }
            return;
        }
        self.with(&spec.name, |disk| disk.serving = Ok(serving));
    }

    /// Calls `look` with the disk of that name, if there is one.
    fn with<T>(&self, name: &str, look: impl FnOnce(&mut Disk) -> T) -> Option<T> {
        let mut all = self.all.borrow_mut();
        all.iter_mut().find(|disk| disk.spec.name == name).map(look)
    }

    /// Removes a detached disk from the list.
    fn gone(&self, name: &str) {
        let leaves = |disk: &Disk| matches!(disk.serving, Err(Absent::Leaves(_)));
        self.all.borrow_mut().retain(|disk| disk.spec.name != name || !leaves(disk));
    }

    /// Ends a detached disk. A device that takes longer than [`STOP_NS`] is abandoned; the disk is
    /// removed when nothing is in flight there any more.
    fn end(self: &Rc<Self>, core: &Core, name: &str, serving: Serving) {
        let Serving { target, mut serving } = serving;
        self.with(name, |disk| disk.serving = Err(Absent::Leaves(Some(target.clone()))));
        target.stop();
        self.ending.set(self.ending.get() + 1);
        let (disks, again, name) = (self.clone(), core.clone(), name.to_owned());
        core.spawn(Class::Control, async move {
            if !in_time(&again, again.now_ns() + STOP_NS, &mut serving).await {
                tracing::error!(
                    disk = %name,
                    "it was detached, but its device is not done within {} s: it is abandoned, \
                     and its image stays locked until the device is done",
                    STOP_NS / 1_000_000_000
                );
                target.stop_now();
                serving.await;
            }
            target.settled().await;
            while target.holds() {
                again.sleep_ns(LOOK_NS).await;
            }
            drop(target);
            disks.gone(&name);
            disks.ending.set(disks.ending.get() - 1);
            tracing::info!(disk = %name, "nothing is in flight any more for a detached disk");
        });
    }

    /// Opens a named disk, for [`Disks::follow`].
    pub async fn open(&self, core: &Core, spec: &DiskSpec) -> Result<Ready, Error> {
        self.outside()?.open(core, spec).await
    }

    /// The node's resources.
    fn outside(&self) -> Result<&Rc<Outside>, Error> {
        self.outside.as_ref().ok_or_else(|| Error::new(Kind::System, "the node is starting"))
    }

    async fn serve(&self, core: &Core, spec: &DiskSpec) -> Result<Serving, Error> {
        let ready = self.outside()?.open(core, spec).await?;
        Ok(self.begin(core, spec, ready))
    }

    /// Serves an open disk.
    fn begin(&self, core: &Core, spec: &DiskSpec, ready: Ready) -> Serving {
        let name = &spec.name;
        let Ready { device, listener, write_cache } = ready;
        let options = options(spec, self.begun.replace(self.begun.get() + 1));
        tracing::info!(disk = %name, uri = %spec.uri, socket = %spec.socket.display(), "serving a disk");
        let target = Target::new(core, device, options);
        self.remember(spec, &target, write_cache);
        let serving = {
            let target = target.clone();
            core.spawn(Class::Control, async move { target.serve(listener).await })
        };
        Serving { target, serving }
    }

    /// Stores what a front end is told of the write cache in the state directory.
    fn remember(&self, spec: &DiskSpec, target: &Target, known: Option<bool>) {
        if let Some(outside) = self.outside.as_ref().filter(|outside| outside.remembers()) {
            let (outside, spec) = (outside.clone(), spec.clone());
            let keeper = move |told| outside.keep_write_cache(&spec, told);
            target.remember(known, Box::new(keeper));
        }
    }

    /// Whether no disk has yet to come from the predecessor.
    ///
    /// # Errors
    /// Names the disks that have yet to come, or whose requests wait for operations there.
    pub fn all_came(&self) -> Result<(), String> {
        if self.coming.get() == 0 {
            return Ok(());
        }
        let all = self.all.borrow();
        let comes = |disk: &&Disk| match &disk.serving {
            Ok(serving) => serving.target.holds(),
            Err(Absent::Follows | Absent::Lost | Absent::Leaves(None)) => true,
            Err(_) => false,
        };
        let names: Vec<_> = all.iter().filter(comes).map(|disk| &*disk.spec.name).collect();
        let names = names.join(", ");
        Err(format!("disks are still on their way from the node before: {names}"))
    }

    /// The served disks. No change is made from now on until [`Disks::go_on`].
    ///
    /// # Errors
    /// When a change is being made, or the node is ending.
    pub fn to_hand_over(&self) -> Result<Vec<Served>, String> {
        self.all_came()?;
        if self.ended.get() || self.changing.replace(true) {
            return Err("the disks are being changed".to_owned());
        }
        self.handing_over.set(true);
        let all = self.all.borrow();
        let served = all.iter().filter_map(|disk| {
            let target = disk.serving.as_ref().ok()?.target.clone();
            Some(Served { spec: disk.spec.clone(), device: target.device().clone(), target })
        });
        Ok(served.collect())
    }

    /// Admits changes again.
    pub fn go_on(&self) {
        self.handing_over.set(false);
        self.changing.set(false);
    }

    /// Releases the disks to another process, with the names of their sockets; those that are not
    /// handed over yet, when `following` has ended.
    pub fn leave(&self, following: JoinHandle<()>) {
        self.following.replace(Some(following));
        if let Some(outside) = &self.outside {
            outside.leave();
        }
        self.left.set(true);
        self.go_on();
    }

    /// Whether [`Disks::leave`] was called.
    pub fn have_left(&self) -> bool {
        self.left.get()
    }

    /// Waits for the change before this one.
    async fn change(&self, core: &Core) -> Result<Change<'_>, Error> {
        while self.changing.get() {
            core.sleep_ns(LOOK_NS).await;
        }
        if self.ended.get() {
            return Err(ends());
        }
        self.changing.set(true);
        Ok(Change(self))
    }

    /// Calls `look` with every disk.
    pub fn each(&self, look: impl FnMut(&Disk)) {
        self.all.borrow().iter().for_each(look);
    }

    /// The index of a disk.
    fn find(&self, name: &str) -> Result<usize, Error> {
        let all = self.all.borrow();
        all.iter().position(|disk| disk.spec.name == name).ok_or_else(|| {
            let names: Vec<_> = all.iter().map(|disk| disk.spec.name.as_str()).collect();
            Error::new(Kind::Usage, format!("there is no disk {name}")).hint(match names.len() {
                0 => "there are no disks at all".to_owned(),
                _ => format!("the disks are: {}", names.join(", ")),
            })
        })
    }

    /// The target of the disk of that name, if it is served.
    pub fn target(&self, name: &str) -> Result<Rc<Target>, Error> {
        let at = self.find(name)?;
        match &self.all.borrow()[at].serving {
            Ok(serving) => Ok(serving.target.clone()),
            Err(why) => Err(Error::new(Kind::System, format!("disk {name}: {why}"))),
        }
    }

    /// Adds a disk, and stores it if there is a state directory. Returns whether it is stored.
    /// Suspends.
    ///
    /// # Errors
    /// When its name or socket is taken, or it cannot be served or stored.
    pub async fn attach(&self, core: &Core, spec: DiskSpec) -> Result<bool, Error> {
        let _change = self.change(core).await?;
        let usage = |what| Error::new(Kind::Usage, what);
        let outside = self.outside()?;
        if !outside.may_attach() {
            return Err(usage(
                "this node was not started to serve disks, and is not confined".into(),
            )
            .hint(
                "start it with --state DIR or --admin PATH, which confine its guests to a \
                     sandbox; or with --sandbox off to go without one",
            ));
        }
        self.check_free(&spec)?;
        let mut specs: Vec<_> = self.all.borrow().iter().map(|disk| disk.spec.clone()).collect();
        if specs.len() == DISKS_MAX {
            return Err(usage(format!("a node has at most {DISKS_MAX} disks")));
        }
        specs.push(spec.clone());
        spec::check_all(&specs).map_err(usage)?;
        let serving = self.serve(core, &spec).await?;
        let kept = match self.ended.get() {
            true => Err(ends()),
            false => outside.keep(&spec).await,
        };
        if let Err(error) = kept {
            serving.stop().await;
            outside.close(&spec).await;
            return Err(error);
        }
        self.all.borrow_mut().push(Disk { spec, attached: true, serving: Ok(serving) });
        Ok(outside.remembers())
    }

    /// Refuses a disk with the name or the socket of a detached one that has not gone.
    fn check_free(&self, spec: &DiskSpec) -> Result<(), Error> {
        let all = self.all.borrow();
        let leaves = |disk: &&Disk| matches!(disk.serving, Err(Absent::Leaves(_)));
        let same = |disk: &&Disk| disk.spec.name == spec.name || disk.spec.socket == spec.socket;
        match all.iter().filter(leaves).find(same) {
            None => Ok(()),
            Some(Disk { spec: DiskSpec { name, .. }, serving, .. }) => {
                let why = serving.as_ref().err().map(Absent::to_string).unwrap_or_default();
                Err(Error::new(Kind::Usage, format!("disk {name} has not gone: {why}"))
                    .hint("`millrace disk list` shows it until then"))
            }
        }
    }

    /// Removes a disk and forgets it. Suspends until nothing uses its device any more, but at most
    /// [`STOP_NS`]: then operations in flight are abandoned. Other changes may be made meanwhile.
    ///
    /// # Errors
    /// When there is no disk of that name, a virtual machine is connected and `force` is not given,
    /// or the state directory cannot be written.
    pub async fn detach(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        force: bool,
    ) -> Result<Detached, Error> {
        let change = self.change(core).await?;
        let at = self.find(name)?;
        let (spec, attached) = {
            let disk = &self.all.borrow()[at];
            let refused = match &disk.serving {
                Ok(serving) if serving.target.is_connected() && !force => {
                    Some(format!("a virtual machine is connected to disk {name}"))
                }
                Err(Absent::Follows) if !force => Some(format!(
                    "disk {name} follows from the node before, once the operations at its device are \
                     done; a virtual machine may be connected to it"
                )),
                Err(why @ Absent::Leaves(_)) => {
                    return Err(Error::new(Kind::Usage, format!("disk {name}: {why}")));
                }
                _ => None,
            };
            if let Some(refused) = refused {
                return Err(Error::new(Kind::Usage, refused).hint(
                    "end it, or remove the disk from it; --force takes the disk away: the guest's \
                     requests then wait until a disk is attached at the same socket again",
                ));
            }
            (disk.spec.clone(), disk.attached)
        };
        let outside = self.outside()?;
        outside.forget(&spec).await?;
        // A disk that follows may have come meanwhile.
        let was =
            self.with(name, |disk| std::mem::replace(&mut disk.serving, Err(Absent::Leaves(None))));
        if !matches!(was, Some(Err(Absent::Failed(_)))) {
            outside.close(&spec).await;
        }
        match was {
            Some(Ok(serving)) => self.end(core, name, serving),
            // It is removed when it has come, or cannot come any more.
            Some(Err(Absent::Follows | Absent::Lost)) => {}
            _ => self.gone(name),
        }
        drop(change);
        let until_ns = core.now_ns() + STOP_NS + LOOK_NS;
        let leaves = |disk: &mut Disk| matches!(disk.serving, Err(Absent::Leaves(_)));
        while self.with(name, leaves) == Some(true) && core.now_ns() < until_ns && !self.ended.get()
        {
            core.sleep_ns(LOOK_NS).await;
        }
        tracing::info!(disk = %name, "detached a disk");
        let under_way = self.with(name, leaves) == Some(true);
        Ok(Detached { comes_back: !attached, under_way })
    }

    /// Changes the size of a disk, in bytes, and tells its guest. Returns the old size. Suspends.
    ///
    /// # Errors
    /// When there is no disk of that name, the new size is smaller and `shrink` is not given, or
    /// the device cannot have it.
    pub async fn resize(
        &self,
        core: &Core,
        name: &str,
        size_bytes: u64,
        shrink: bool,
    ) -> Result<u64, Error> {
        let _change = self.change(core).await?;
        let target = self.target(name)?;
        let old = target.device().size_bytes();
        if size_bytes < old && !shrink {
            let what = format!(
                "disk {name} has {}: its last {} would be lost, with all that the guest keeps there",
                Size(old),
                Size(old - size_bytes)
            );
            return Err(Error::new(Kind::Usage, what).hint(
                "make file system and partitions smaller in the guest first, then add --shrink",
            ));
        }
        let resized = target.resize(size_bytes).await;
        resized.map_err(|error| Error::new(Kind::System, format!("disk {name}: {error}")))?;
        tracing::info!(disk = %name, from = old, to = size_bytes, "resized a disk");
        Ok(old)
    }

    /// Ends all disks: completes the requests at the devices. Other requests stay with the guests,
    /// which connect again to the next listener. A device that takes longer than [`STOP_NS`] is
    /// abandoned: the next process to serve the guest finds its requests in the in-flight region. A
    /// change is not waited for any longer either, except for an upgrade, which gives up on its
    /// own.
    pub async fn stop(&self, core: &Core) {
        self.ended.set(true);
        while self.handing_over.get() {
            core.sleep_ns(LOOK_NS).await;
        }
        let following = self.following.take();
        if let Some(following) = following {
            following.await;
        }
        let all = self.all.take();
        let served: Vec<_> =
            all.into_iter().filter_map(|disk| Some((disk.spec, disk.serving.ok()?))).collect();
        for (_, serving) in &served {
            serving.target.stop();
        }
        let until_ns = core.now_ns() + STOP_NS;
        for (spec, serving) in served {
            if !in_time(core, until_ns, serving.stop()).await {
                tracing::error!(
                    disk = %spec.name,
                    "its device is not done within {} s: it is abandoned",
                    STOP_NS / 1_000_000_000
                );
            }
            // After a handover another process has the sockets' names.
            if let Some(outside) = self.outside.as_ref().filter(|_| !self.left.get()) {
                outside.close(&spec).await;
            }
        }
        let busy = || self.changing.get() || self.ending.get() > 0;
        while busy() && core.now_ns() < until_ns {
            core.sleep_ns(LOOK_NS).await;
        }
    }
}

/// Waits for `done` until a time; returns whether it was done.
async fn in_time(core: &Core, until_ns: u64, done: impl Future<Output = ()>) -> bool {
    let (mut done, mut late) =
        (pin!(done), pin!(core.sleep_ns(until_ns.saturating_sub(core.now_ns()))));
    poll_fn(|cx| match done.as_mut().poll(cx) {
        Poll::Ready(()) => Poll::Ready(true),
        Poll::Pending => late.as_mut().poll(cx).map(|()| false),
    })
    .await
}

fn ends() -> Error {
    Error::new(Kind::System, "the node is ending")
}

impl Serving {
    async fn stop(self) {
        self.target.stop();
        self.serving.await;
    }
}

/// The options of a target; the disk is the `nth` of the node.
pub(crate) fn options(spec: &DiskSpec, nth: usize) -> TargetOptions {
    TargetOptions {
        name: spec.name.clone(),
        serial: spec.serial().to_owned(),
        queues: spec.queues,
        first_core: nth,
    }
}

#[cfg(test)]
mod tests {
    use reactor::sim::{SimConfig, World};

    use super::*;
    use crate::disks::outside::Here;

    #[test]
    fn a_disk_that_follows_counts_as_connected_until_it_has_come() {
        let world = World::new(1, 1, SimConfig::default());
        let run = world.run(|core| async move {
            let spec = |name: &str| -> DiskSpec {
                format!("name={name} uri=mem:1M socket=/nowhere/{name}.sock").parse().unwrap()
            };
            let outside = Outside::Here(Here::new(&core, &[], None), true);
            let following = [spec("s"), spec("t")];
            let disks = Disks::start(&core, outside, Vec::new(), Some(&following)).await.unwrap();
            let disks = Rc::new(disks);
            let error = disks.detach(&core, "s", false).await.unwrap_err();
            assert!(error.to_string().contains("disk s follows"), "{error}");
            assert!(error.advice().unwrap().contains("--force"));
            let why = disks.all_came().unwrap_err();
            assert!(why.ends_with("from the node before: s, t"), "{why}");

            // By force it goes as soon as it has come. Its name and its socket are not free before.
            let began_ns = core.now_ns();
            let detached = disks.detach(&core, "s", true).await.unwrap();
            assert!(detached.under_way && core.now_ns() < began_ns + 2 * STOP_NS);
            for other in [spec("s"), DiskSpec { socket: spec("s").socket, ..spec("u") }] {
                let error = disks.attach(&core, other).await.unwrap_err().to_string();
                assert!(error.starts_with("disk s has not gone: it was detached"), "{error}");
            }
            assert!(disks.to_hand_over().is_err());
            let device = Bdev::open(&core, "mem:1M").await.unwrap();
            let come = |name: &str| {
                let target = Target::new(&core, device.clone(), options(&spec(name), 0));
                Serving { target, serving: core.spawn(Class::Control, async {}) }
            };
            disks.arrived(&core, &spec("s"), come("s")).await;
            disks.arrived(&core, &spec("t"), come("t")).await;
            while disks.find("s").is_ok() {
                core.sleep_ns(LOOK_NS).await;
            }
            assert!(disks.target("t").is_ok() && disks.all_came().is_ok());
            assert_eq!(disks.to_hand_over().unwrap().len(), 1);
        });
        run.unwrap();
    }
}
