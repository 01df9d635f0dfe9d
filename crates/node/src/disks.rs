//! The disks that a node gives to virtual machines: opened at the start, attached while it runs, or
//! taken over from the node before; ended with the node, or handed over to the next.
//!
//! What was asked for when the node was started comes first; what was attached comes back from the
//! state directory after it. One change is made at a time.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use bdev::Bdev;
use reactor::{Class, Core, JoinHandle};
use vhost::{Target, TargetOptions};

use crate::disk_spec::{self, DiskSpec};
use crate::error::{Error, Kind};
use crate::outside::{Named, Outside, Ready};
use crate::size::Size;
use crate::upgrade::{Arrival, Predecessor};

/// Disks at a time.
const DISKS_MAX: usize = 1024;
/// How often a change looks whether the one before it has ended, in nanoseconds.
const LOOK_NS: u64 = 1_000_000;

/// How often a disk is tried to be opened that another process has lost, in nanoseconds.
const AGAIN_NS: u64 = 100_000_000;
/// How long devices may take when the node ends, in nanoseconds.
const STOP_NS: u64 = 5_000_000_000;
/// Why a disk is not at work that follows from the node before.
const COMING: &str = "it follows from the node before, when its device has done what it is at";

/// One of them.
pub(crate) struct Disk {
    pub spec: DiskSpec,
    /// It was attached, and comes back after a restart.
    pub attached: bool,
    pub serving: Result<Serving, String>,
}

/// A disk that is there; the other case is why it is not.
pub(crate) struct Serving {
    pub target: Rc<Target>,
    serving: JoinHandle<()>,
}

/// A disk that is served, to be handed over. Clones are the same disk.
#[derive(Clone)]
pub(crate) struct Served {
    pub spec: DiskSpec,
    pub device: Bdev,
    pub target: Rc<Target>,
}

/// All of them; belongs to core 0.
#[derive(Default)]
pub(crate) struct Disks {
    outside: Option<Rc<Outside>>,
    all: RefCell<Vec<Disk>>,
    /// How many there ever were: they begin on the cores by turns.
    begun: Cell<usize>,
    changing: Cell<bool>,
    /// Disks that are on their way from the node before.
    coming: Cell<usize>,
    /// Hands over those that were not at rest when the rest was handed over.
    following: RefCell<Option<JoinHandle<()>>>,
    ended: Cell<bool>,
    /// They are somebody else's now, with their sockets.
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
    /// Opens the devices and then listens: who connects finds a disk that is ready. A disk that was
    /// attached earlier and cannot be opened any more is left out, and said.
    ///
    /// # Errors
    /// When a device cannot be opened, or somebody listens on a socket already.
    pub async fn start(
        core: &Core,
        outside: Outside,
        taken: Vec<(Served, JoinHandle<()>)>,
        following: &[DiskSpec],
    ) -> Result<Disks, Error> {
        let named = outside.disks().await?;
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
            let serving = Err(COMING.to_owned());
            disks.all.borrow_mut().push(Disk { spec: spec.clone(), attached, serving });
        }
        for Named { spec, attached, .. } in named {
            if disks.find(&spec.name).is_ok() {
                continue;
            }
            let serving = match disks.serve(core, &spec).await {
                Err(error) if attached => {
                    tracing::error!("{error}; it was attached and is kept for the next start");
                    Err(error.to_string())
                }
                serving => Ok(serving?),
            };
            disks.all.borrow_mut().push(Disk { spec, attached, serving });
        }
        Ok(disks)
    }

    /// Starts those that have been named since the start, by a configuration that was changed; what
    /// cannot be started is said. Suspends.
    pub async fn start_others(&self, core: &Core) {
        let Ok(_change) = self.change(core).await else { return };
        let Some(outside) = &self.outside else { return };
        let named = match outside.disks().await {
            Ok(named) => named,
            Err(error) => return tracing::error!("which disks there are: {error}"),
        };
        for Named { spec, attached, .. } in named {
            if self.find(&spec.name).is_ok() {
                continue;
            }
            let serving = self.serve(core, &spec).await.map_err(|error| error.to_string());
            if let Err(why) = &serving {
                tracing::error!("{why}");
            }
            self.all.borrow_mut().push(Disk { spec, attached, serving });
        }
    }

    /// Puts the disks in their places that follow from the node before. Those that it does not hand
    /// over any more are opened with `open`, as soon as that is possible.
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
                    tracing::info!(disk = %spec.name, "it has followed from the node before");
                    self.arrived(&spec, Serving { target, serving }).await;
                }
                Arrival::Settled(spec) => {
                    self.coming.set(self.coming.get() - 1);
                    tracing::info!(disk = %spec.name, "the node before has nothing of it under way");
                }
                Arrival::Lost(spec, device) => {
                    let (disks, again, open) = (self.clone(), core.clone(), open.clone());
                    core.spawn(Class::Control, async move {
                        disks.open_anew(&again, &spec, device, open).await;
                    });
                }
            }
        }
    }

    /// Opens a disk that the node before has lost; `device` has what it holds, if that is memory.
    async fn open_anew(
        &self,
        core: &Core,
        spec: &DiskSpec,
        device: Option<Bdev>,
        open: impl AsyncFn(&DiskSpec) -> Result<Ready, Error>,
    ) {
        // What was taken over, if it was, has been given up.
        let serving = {
            let mut all = self.all.borrow_mut();
            let disk = all.iter_mut().find(|disk| disk.spec.name == spec.name);
            disk.and_then(|disk| std::mem::replace(&mut disk.serving, Err(COMING.to_owned())).ok())
        };
        if let Some(Serving { target, serving }) = serving {
            serving.await;
            // Its device is open, and has the lock.
            drop(target);
        }
        let mut said = String::new();
        while !self.ended.get() && self.find(&spec.name).is_ok() {
            match open(spec).await {
                Ok(ready) => {
                    let device = device.unwrap_or(ready.device);
                    let serving = self.begin(core, spec, Ready { device, ..ready });
                    return self.arrived(spec, serving).await;
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
    }

    /// A disk is there that was waited for, unless it was detached meanwhile.
    async fn arrived(&self, spec: &DiskSpec, serving: Serving) {
        self.coming.set(self.coming.get() - 1);
        let unwanted = {
            let mut all = self.all.borrow_mut();
            match all.iter_mut().find(|disk| disk.spec.name == spec.name) {
                Some(disk) => {
                    disk.serving = Ok(serving);
                    None
                }
                None => Some(serving),
            }
        };
        if let Some(serving) = unwanted {
            serving.stop().await;
            if let Ok(outside) = self.outside() {
                outside.close(spec).await;
            }
        }
    }

    /// Opens a disk as it was named, for [`Disks::follow`].
    pub async fn open(&self, core: &Core, spec: &DiskSpec) -> Result<Ready, Error> {
        self.outside()?.open(core, spec).await
    }

    /// What it has outside itself.
    fn outside(&self) -> Result<&Rc<Outside>, Error> {
        self.outside.as_ref().ok_or_else(|| Error::new(Kind::System, "the node is starting"))
    }

    async fn serve(&self, core: &Core, spec: &DiskSpec) -> Result<Serving, Error> {
        let ready = self.outside()?.open(core, spec).await?;
        Ok(self.begin(core, spec, ready))
    }

    /// Serves a disk that is open.
    fn begin(&self, core: &Core, spec: &DiskSpec, ready: Ready) -> Serving {
        let name = &spec.name;
        let Ready { device, listener, write_cache } = ready;
        let options = options(spec, self.begun.replace(self.begun.get() + 1));
        tracing::info!(disk = %name, uri = %spec.uri, socket = %spec.socket.display(), "a disk is there");
        let target = Target::new(core, device, options);
        self.remember(spec, &target, write_cache);
        let serving = {
            let target = target.clone();
            core.spawn(Class::Control, async move { target.serve(listener).await })
        };
        Serving { target, serving }
    }

    /// Has what a front end is told of the write cache kept in the state directory.
    fn remember(&self, spec: &DiskSpec, target: &Target, known: Option<bool>) {
        if let Some(outside) = self.outside.as_ref().filter(|outside| outside.remembers()) {
            let (outside, spec) = (outside.clone(), spec.clone());
            let keeper = move |told| outside.keep_write_cache(&spec, told);
            target.remember(known, Box::new(keeper));
        }
    }

    /// What is served. No change is made from now on until [`Disks::go_on`].
    ///
    /// # Errors
    /// When a change is being made, or the node is ending.
    pub fn to_hand_over(&self) -> Result<Vec<Served>, String> {
        if self.coming.get() > 0 {
            return Err("disks are still on their way from the node before".to_owned());
        }
        if self.ended.get() || self.changing.replace(true) {
            return Err("the disks are being changed".to_owned());
        }
        let all = self.all.borrow();
        let served = all.iter().filter_map(|disk| {
            let target = disk.serving.as_ref().ok()?.target.clone();
            Some(Served { spec: disk.spec.clone(), device: target.device().clone(), target })
        });
        Ok(served.collect())
    }

    /// Changes may be made again.
    pub fn go_on(&self) {
        self.changing.set(false);
    }

    /// They are somebody else's from now on, with the names of their sockets; those that have yet to
    /// be handed over when `following` has ended.
    pub fn leave(&self, following: JoinHandle<()>) {
        self.following.replace(Some(following));
        if let Some(outside) = &self.outside {
            outside.leave();
        }
        self.left.set(true);
        self.changing.set(false);
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
            return Err(Error::new(Kind::System, "the node is ending"));
        }
        self.changing.set(true);
        Ok(Change(self))
    }

    /// Calls `look` with every disk.
    pub fn each(&self, look: impl FnMut(&Disk)) {
        self.all.borrow().iter().for_each(look);
    }

    /// The place of a disk among all.
    fn find(&self, name: &str) -> Result<usize, Error> {
        let all = self.all.borrow();
        all.iter().position(|disk| disk.spec.name == name).ok_or_else(|| {
            let names: Vec<_> = all.iter().map(|disk| disk.spec.name.as_str()).collect();
            Error::new(Kind::Usage, format!("there is no disk {name}")).hint(match names.len() {
                0 => "there are no disks at all".to_owned(),
                _ => format!("there are: {}", names.join(", ")),
            })
        })
    }

    /// The disk of that name, if it is there and at work.
    pub fn target(&self, name: &str) -> Result<Rc<Target>, Error> {
        let at = self.find(name)?;
        match &self.all.borrow()[at].serving {
            Ok(serving) => Ok(serving.target.clone()),
            Err(why) => Err(Error::new(Kind::System, why.clone())),
        }
    }

    /// Adds a disk, and remembers it if there is a state directory. Gives whether it does. Suspends.
    ///
    /// # Errors
    /// When there is one of that name or socket, or it cannot be served or remembered.
    pub async fn attach(&self, core: &Core, spec: DiskSpec) -> Result<bool, Error> {
        let _change = self.change(core).await?;
        let usage = |what| Error::new(Kind::Usage, what);
        let outside = self.outside()?;
        if !outside.may_attach() {
            return Err(usage(
                "this node was not started to serve disks, and is not confined".into(),
            )
            .hint(
                "start it with --state DIR or --admin PATH: then what a guest does to it is kept \
                     in a sandbox; or with --sandbox off to go without one",
            ));
        }
        let mut specs: Vec<_> = self.all.borrow().iter().map(|disk| disk.spec.clone()).collect();
        if specs.len() == DISKS_MAX {
            return Err(usage(format!("a node has {DISKS_MAX} disks at most")));
        }
        specs.push(spec.clone());
        disk_spec::check_all(&specs).map_err(usage)?;
        let serving = self.serve(core, &spec).await?;
        if let Err(error) = outside.keep(&spec).await {
            serving.stop().await;
            outside.close(&spec).await;
            return Err(error);
        }
        self.all.borrow_mut().push(Disk { spec, attached: true, serving: Ok(serving) });
        Ok(outside.remembers())
    }

    /// Takes a disk away and forgets it. Gives whether it was attached: another one comes back when
    /// the node is started in the same way. Suspends until nothing uses its device any more.
    ///
    /// # Errors
    /// When there is none of that name, a virtual machine has it and `force` is not given, or the
    /// state directory cannot be written.
    pub async fn detach(&self, core: &Core, name: &str, force: bool) -> Result<bool, Error> {
        let _change = self.change(core).await?;
        let at = self.find(name)?;
        let spec = {
            let disk = &self.all.borrow()[at];
            let connected =
                disk.serving.as_ref().is_ok_and(|serving| serving.target.is_connected());
            if connected && !force {
                return Err(Error::new(
                    Kind::Usage,
                    format!("a virtual machine is connected to disk {name}"),
                )
                .hint(
                    "end it, or take the disk out of it; --force takes the disk away: the guest's \
                     requests then wait until a disk is attached at the same socket again",
                ));
            }
            disk.spec.clone()
        };
        let outside = self.outside()?;
        outside.forget(&spec).await?;
        let disk = self.all.borrow_mut().remove(at);
        if let Ok(serving) = disk.serving {
            serving.stop().await;
            outside.close(&spec).await;
        }
        tracing::info!(disk = %name, "a disk was detached");
        Ok(disk.attached)
    }

    /// Gives a disk another size in bytes, and tells its guest. Gives the size it had. Suspends.
    ///
    /// # Errors
    /// When there is none of that name, it is to become smaller and `shrink` is not given, or the
    /// device cannot.
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
        tracing::info!(disk = %name, from = old, to = size_bytes, "a disk was resized");
        Ok(old)
    }

    /// Ends all: what is at the devices comes to its end, what is not stays with the guests, which
    /// connect again to whoever listens next. A device that takes longer than [`STOP_NS`] is left
    /// behind: whoever serves the guest next finds in the in-flight region what was at it.
    pub async fn stop(&self, core: &Core) {
        while self.changing.get() {
            core.sleep_ns(LOOK_NS).await;
        }
        self.ended.set(true);
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
            let mut ended = pin!(serving.stop());
            let mut late = pin!(core.sleep_ns(until_ns.saturating_sub(core.now_ns())));
            let in_time = poll_fn(|cx| match ended.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(true),
                Poll::Pending => late.as_mut().poll(cx).map(|()| false),
            });
            if !in_time.await {
                tracing::error!(
                    disk = %spec.name,
                    "its device has not done what it is at within {} s: it is left behind",
                    STOP_NS / 1_000_000_000
                );
            }
            // Where they have been left the sockets' names are somebody else's.
            if let Some(outside) = self.outside.as_ref().filter(|_| !self.left.get()) {
                outside.close(&spec).await;
            }
        }
    }
}

impl Serving {
    async fn stop(self) {
        self.target.stop();
        self.serving.await;
    }
}

/// How a disk is served; the `nth` of the node.
pub(crate) fn options(spec: &DiskSpec, nth: usize) -> TargetOptions {
    TargetOptions {
        name: spec.name.clone(),
        serial: spec.serial().to_owned(),
        queues: spec.queues,
        first_core: nth,
    }
}
