//! The disks that a node serves to virtual machines: opened at the start, attached while it runs,
//! or taken over from the predecessor; ended with the node, or handed over to the successor.
//!
//! This room uses `ipc`, to ask the launcher; it knows nothing of upgrades. `arrivals`, `changes`,
//! `space` and `export` (for NBD clients) continue the methods of [`Disks`].
//!
//! Disks configured at the start come first; attached ones come back from the state directory after
//! them. Of each disk one change is made at a time; no disk waits for another's device.

pub(crate) mod arrivals;
mod changes;
pub(crate) mod events;
mod export;
pub(crate) mod limits;
mod moves;
pub(crate) mod protocol;
mod receiving;
pub(crate) mod report;
pub(crate) mod resources;
mod sending;
mod space;
pub(crate) mod spec;
pub(crate) mod state;
pub(crate) mod transfers;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use bdev::Bdev;
use reactor::{Class, Core, Event, JoinHandle, join_all, timeout};
use vhost::{Target, TargetOptions};

use changes::{Attaching, Subject};

pub(crate) use changes::Detached;

use crate::disks::events::{EventLog, What};
use crate::disks::limits::{AllLimits, Limits};
use crate::disks::moves::Move;
use crate::disks::protocol::Named;
use crate::disks::resources::{Ready, Resources};
use crate::disks::space::Spaces;
use crate::disks::spec::DiskSpec;
use crate::disks::transfers::Transfer;
use crate::error::{Error, Kind};

/// Maximum number of disks.
pub(crate) const DISKS_MAX: usize = 1024;
/// How many disks are opened at once at the start: enough that a launcher which gets the processor
/// for a moment has questions to answer.
const OPENED_AT_ONCE: usize = 32;
/// How often the guests that are served already are looked at while others of a node that has died
/// are not, in nanoseconds.
const POLL_NS: u64 = 1_000_000;
/// How long the last connections take until they continue, once their disks are open, in
/// nanoseconds.
const CONTINUED_NS: u64 = 3_000_000;
/// How long the other disks of a node that has died wait for one whose device does not answer, in
/// nanoseconds. Opening takes a few milliseconds.
const OPENING_NS: u64 = 200_000_000;
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
    /// Nodes have died of it, one after the other. Its launcher has its front end's connection.
    StandsStill(String),
    /// It was detached, but has operations in flight: at its device, if the target is given, or in
    /// the predecessor. Until they have ended nobody else gets its name, its socket or its image.
    Leaves(Option<Rc<Target>>),
}

impl std::fmt::Display for Absent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Absent::Failed(why) | Absent::StandsStill(why) => why,
            Absent::Follows => {
                "it follows from the previous node, once the operations at its device are done"
            }
            Absent::Lost => "the previous node has lost it: it is opened again once it is free",
            Absent::Leaves(Some(_)) => {
                "it was detached, but operations are in flight at its device: until they are done \
                 its image, its name and its socket are in use"
            }
            Absent::Leaves(None) => {
                "it was detached, but the previous node still has it, with its guest: until it is \
                 handed over its image, its name and its socket are in use"
            }
        })
    }
}

/// What has become of a disk that the start opens.
enum Opening {
    Served(Serving),
    Failed(Error),
    /// It goes on in [`Disks::opening`].
    Lasts,
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
    resources: Option<Rc<Resources>>,
    all: RefCell<Vec<Disk>>,
    /// Disks whose opening has lasted longer than [`OPENING_NS`]; [`Disks::open_lost`] waits for
    /// them.
    opening: RefCell<BTreeMap<String, JoinHandle<Result<Ready, Error>>>>,
    /// The number of disks there ever were: disks begin on the cores in turn.
    begun: Cell<usize>,
    limits: RefCell<AllLimits>,
    /// What is being changed.
    changing: RefCell<BTreeSet<Subject>>,
    /// Disks that are being attached.
    attaching: RefCell<Vec<DiskSpec>>,
    /// An upgrade is under way: nothing is changed.
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
    /// Serves them to NBD clients.
    nbd: RefCell<Option<Rc<nbd::Server>>>,
    /// Disks that NBD clients cannot use at this moment.
    hidden: RefCell<BTreeSet<String>>,
    /// The moves under way, and the last one of each disk, by the disk's name.
    moves: RefCell<BTreeMap<String, Rc<Move>>>,
    moves_ended: moves::Ended,
    /// How far disks are on their way to other nodes, or from them.
    transfers: RefCell<BTreeMap<String, Transfer>>,
    /// Disks whose way is being changed.
    deciding: RefCell<BTreeSet<String>>,
    /// How this node and others know each other.
    identity: RefCell<Option<transfer::Identity>>,
    /// Takes disks from other nodes.
    receiver: RefCell<Option<Rc<transfer::Server>>>,
    /// The disks that are coming: the move, and what is said of this process then.
    incarnations: RefCell<BTreeMap<String, (u64, u64)>>,
    /// The moves to this node that operators have ended here.
    ended_here: RefCell<BTreeSet<u64>>,
    /// The disks that were given to other nodes whose return is watched, and those of them of
    /// which an operator decides.
    watched: RefCell<BTreeSet<String>>,
    taking_back: RefCell<BTreeSet<String>>,
    /// The space of images.
    spaces: Rc<Spaces>,
    /// Notified when a change has ended, a detached disk has gone, or the node ends.
    changed: Event,
}

impl Disks {
    /// Opens the devices and then listens, so that a client that connects finds the disk ready. A
    /// disk that was attached earlier and cannot be opened any more is left out, and logged. Each
    /// disk is served once it is open, whatever others do; this suspends until all are.
    ///
    /// # Errors
    /// When a device cannot be opened, or another process listens on a socket: that of the first
    /// such disk. With a predecessor (`following`) this is only logged, because the other disks are
    /// already served. If a node that has died had them (`restarted`), it is logged, and
    /// [`Disks::open_lost`] tries again; it also waits for the disks that open slowly.
    pub async fn start(
        core: &Core,
        resources: Resources,
        taken: Vec<(Served, JoinHandle<()>)>,
        following: Option<&[DiskSpec]>,
        restarted: bool,
    ) -> Result<Disks, Error> {
        let named = resources.disks().await?;
        let limits = resources.limits().await?.into();
        let takes_over = following.is_some();
        let following = following.unwrap_or_default();
        let resources = Rc::new(resources);
        let (told, spaces) = (Rc::downgrade(&resources), Rc::<Spaces>::default());
        let teller = spaces.clone();
        vhost::observe(core, move |core, disk, event| {
            if let Some(resources) = told.upgrade() {
                teller.tell(core, &resources, What::of_disk(disk, event));
            }
        });
        let resources = Some(resources);
        let begun = taken.len() + following.len();
        let transfers = named
            .iter()
            .filter_map(|named| Some((named.spec.name.clone(), named.transfer.clone()?)));
        let transfers = RefCell::new(transfers.collect());
        let begun = begun.into();
        let disks = Disks { resources, begun, limits, transfers, spaces, ..Disks::default() };
        let known = |spec: &DiskSpec| named.iter().find(|named| named.spec.name == spec.name);
        for (Served { spec, target, .. }, serving) in taken {
            disks.remember(&spec, &target, known(&spec).and_then(|named| named.write_cache));
            disks.note_limits(core, &spec, &target);
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
        let missing = named.into_iter().filter(|named| disks.find(&named.spec.name).is_err());
        let (still, missing): (Vec<_>, Vec<_>) =
            missing.partition(|named| named.stands_still.is_some());
        for Named { spec, attached, stands_still, .. } in still {
            let why = stands_still.unwrap_or_default();
            tracing::error!(disk = %spec.name, "{why}");
            let serving = Err(Absent::StandsStill(why));
            disks.all.borrow_mut().push(Disk { spec, attached, serving });
        }
        let lost = restarted && !takes_over;
        if lost {
            core.poll_seldom(POLL_NS, u64::MAX);
            let opened = disks.open_missing(core, &missing, lost, takes_over).await;
            core.poll_seldom(POLL_NS, core.now_ns() + CONTINUED_NS);
            opened?;
        } else {
            // If an attached disk has an image that is configured for another one now, it must not
            // lock it first.
            let configured = missing.iter().take_while(|named| !named.attached).count();
            for some in [&missing[..configured], &missing[configured..]] {
                disks.open_missing(core, some, lost, takes_over).await?;
            }
        }
        Ok(disks)
    }

    /// Opens disks at the start, several at once, and lists them in their order.
    async fn open_missing(
        &self,
        core: &Core,
        missing: &[Named],
        lost: bool,
        takes_over: bool,
    ) -> Result<(), Error> {
        let fails = |named: &Named| !(lost || named.attached || takes_over);
        let (next, has_failed) = (Cell::new(0), Cell::new(false));
        let opened: Vec<_> = missing.iter().map(|_| Cell::new(None)).collect();
        let opener = async || {
            while !has_failed.get() {
                let at = next.replace(next.get() + 1);
                let Some(named) = missing.get(at) else { break };
                let opening = self.open_at_start(core, &named.spec, lost).await;
                has_failed
                    .set(has_failed.get() || fails(named) && matches!(opening, Opening::Failed(_)));
                opened[at].set(Some(opening));
            }
        };
        let openers = (0..OPENED_AT_ONCE.min(missing.len())).map(|_| Box::pin(opener()) as _);
        join_all(openers.collect()).await;
        for (named, opening) in missing.iter().zip(opened) {
            let Named { spec, attached, .. } = named;
            let serving = match opening.into_inner() {
                Some(Opening::Served(serving)) => Ok(serving),
                Some(Opening::Lasts) => {
                    tracing::warn!(disk = %spec.name, "it opens slowly: the others do not wait");
                    self.coming.set(self.coming.get() + 1);
                    Err(Absent::Lost)
                }
                Some(Opening::Failed(error)) if lost => {
                    tracing::error!("{error}; it is tried again");
                    self.coming.set(self.coming.get() + 1);
                    Err(Absent::Lost)
                }
                Some(Opening::Failed(error)) if fails(named) => return Err(error),
                Some(Opening::Failed(error)) => {
                    tracing::error!("{error}; it stays configured for the next start");
                    Err(self.could_not_open(core, spec, &error).await)
                }
                // An earlier one has failed.
                None => break,
            };
            let (spec, attached) = (spec.clone(), *attached);
            self.all.borrow_mut().push(Disk { spec, attached, serving });
        }
        Ok(())
    }

    /// Opens and serves a disk. If it is `lost`, its opening may go on, because others wait. It is
    /// not given up then: what it has locked would stay so until the operations under way end.
    async fn open_at_start(&self, core: &Core, spec: &DiskSpec, lost: bool) -> Opening {
        let resources = match self.resources() {
            Ok(resources) => resources.clone(),
            Err(error) => return Opening::Failed(error),
        };
        let opened = if lost {
            let (own, of) = (core.clone(), spec.clone());
            let opening = async move { resources.open(&own, &of).await };
            let mut opening = core.spawn(Class::Control, opening);
            match timeout(core, OPENING_NS, &mut opening).await {
                Ok(opened) => opened,
                Err(_) => {
                    self.opening.borrow_mut().insert(spec.name.clone(), opening);
                    return Opening::Lasts;
                }
            }
        } else {
            resources.open(core, spec).await
        };
        match opened {
            Ok(ready) => Opening::Served(self.begin(core, spec, ready)),
            Err(error) => Opening::Failed(error),
        }
    }

    /// Opens the disks of a node that has died which could not be opened at the start, or are being
    /// opened since.
    pub fn open_lost(self: &Rc<Self>, core: &Core) {
        let mut lost = Vec::new();
        self.each(|disk| {
            if let Err(Absent::Lost) = disk.serving {
                lost.push(disk.spec.clone());
            }
        });
        for spec in lost {
            let (disks, again, opener) = (self.clone(), core.clone(), self.clone());
            core.spawn(Class::Control, async move {
                let name = spec.name.clone();
                let open = async |spec: &DiskSpec| {
                    let begun = opener.opening.borrow_mut().remove(&spec.name);
                    match begun {
                        Some(opening) => opening.await,
                        None => opener.open(&again, spec).await,
                    }
                };
                let lost = arrivals::Lost { spec, device: None, statistics: Vec::new() };
                disks.open_again(&again, lost, open).await;
                // It was not wanted any more.
                opener.opening.borrow_mut().remove(&name);
            });
        }
    }

    /// Starts the disks that a changed configuration has named since the start; logs those that
    /// cannot be started. Suspends.
    pub async fn start_others(&self, core: &Core) {
        let Some(resources) = &self.resources else { return };
        let named = match resources.disks().await {
            Ok(named) => named,
            Err(error) => return tracing::error!("cannot list the disks: {error}"),
        };
        // A disk that is being attached is listed, too.
        let missing = |named: &Named| {
            let name = &named.spec.name;
            let attaches = self.attaching.borrow().iter().any(|spec| spec.name == *name);
            named.stands_still.is_none() && self.find(name).is_err() && !attaches
        };
        let missing = named.into_iter().filter(missing);
        // None waits for the device of another one.
        let starting = missing.map(|named| Box::pin(self.start_other(core, named)) as _);
        join_all(starting.collect()).await;
    }

    async fn start_other(&self, core: &Core, named: Named) {
        let Named { spec, attached, .. } = named;
        let Ok(_change) = self.change(&spec.name).await else { return };
        if self.find(&spec.name).is_ok() {
            return;
        }
        let _attaching = Attaching::new(self, &spec);
        let serving = match self.serve(core, &spec).await {
            Ok(serving) => Ok(serving),
            Err(error) => {
                tracing::error!("{error}");
                Err(self.could_not_open(core, &spec, &error).await)
            }
        };
        self.all.borrow_mut().push(Disk { spec: spec.clone(), attached, serving });
    }

    /// Tells operators of a disk that could not be opened, and closes what was opened for it.
    async fn could_not_open(&self, core: &Core, spec: &DiskSpec, error: &Error) -> Absent {
        let (disk, why) = (spec.name.clone(), error.to_string());
        self.report(core, What::NotOpened { disk, why: why.clone() });
        if let Some(resources) = &self.resources {
            resources.give_up(&spec.name).await;
        }
        Absent::Failed(why)
    }

    /// Notes for operators what has happened.
    pub fn report(&self, core: &Core, what: What) {
        if let Some(resources) = &self.resources {
            self.spaces.tell(core, resources, what);
        }
    }

    /// The events that this process keeps, if it has no launcher.
    pub fn events(&self) -> Option<&EventLog> {
        self.resources.as_ref()?.events()
    }

    /// Calls `look` with the disk of that name, if there is one.
    fn with<T>(&self, name: &str, look: impl FnOnce(&mut Disk) -> T) -> Option<T> {
        let mut all = self.all.borrow_mut();
        all.iter_mut().find(|disk| disk.spec.name == name).map(look)
    }

    /// Opens a named disk, for a disk that follows.
    pub async fn open(&self, core: &Core, spec: &DiskSpec) -> Result<Ready, Error> {
        self.resources()?.open(core, spec).await
    }

    /// The node's resources.
    fn resources(&self) -> Result<&Rc<Resources>, Error> {
        self.resources.as_ref().ok_or_else(|| Error::new(Kind::System, "the node is starting"))
    }

    async fn serve(&self, core: &Core, spec: &DiskSpec) -> Result<Serving, Error> {
        let ready = self.resources()?.open(core, spec).await?;
        Ok(self.begin(core, spec, ready))
    }

    /// Serves an open disk.
    fn begin(&self, core: &Core, spec: &DiskSpec, ready: Ready) -> Serving {
        let name = &spec.name;
        let Ready { device, door, write_cache } = ready;
        let options = options(spec, self.begun.replace(self.begun.get() + 1));
        tracing::info!(disk = %name, uri = %spec.uri, socket = %spec.socket.display(), "serving a disk");
        let target = Target::new(core, device, options);
        self.withhold(name, &target);
        self.remember(spec, &target, write_cache);
        self.apply_limits(core, &spec.name, &target);
        let serving = {
            let target = target.clone();
            core.spawn(Class::Control, async move { target.serve(door).await })
        };
        Serving { target, serving }
    }

    /// Withholds a disk from its guest whose data is, or may be, elsewhere; admits the guest of one
    /// that the predecessor has withheld until then.
    fn withhold(&self, name: &str, target: &Target) {
        if self.transfers.borrow().get(name).is_some_and(Transfer::withholds) {
            target.withhold();
        } else if target.is_withheld() || self.has_begun_without_cache(name) {
            target.admit(self.has_begun_without_cache(name));
        }
    }

    /// Whether the guest of a disk has come from another node where it has switched the write cache
    /// off.
    fn has_begun_without_cache(&self, name: &str) -> bool {
        let transfers = self.transfers.borrow();
        matches!(transfers.get(name), Some(Transfer::Begun { writes_through: true, .. }))
    }

    /// Stores what a front end is told of the write cache in the state directory, which has
    /// `known`; a disk that was handed over knows it itself.
    fn remember(&self, spec: &DiskSpec, target: &Target, known: Option<bool>) {
        if let Some(resources) = self.resources.as_ref().filter(|resources| resources.remembers()) {
            let came = self.has_begun_without_cache(&spec.name).then_some(false);
            let (resources, spec) = (resources.clone(), spec.clone());
            let keeper = move |told| resources.keep_write_cache(&spec, told);
            target.remember(known.or(target.write_cache()).or(came), Box::new(keeper));
        }
    }

    /// Gives a disk the limits that it and its group have.
    fn apply_limits(&self, core: &Core, name: &str, target: &Target) {
        let limits = self.limits.borrow();
        let own = limits.of_disk(name);
        target.set_limits(own.rates());
        target.join_group(own.group.as_deref());
        if let Some(group) = &own.group {
            vhost::set_group_limits(core, group, limits.of_group(group).rates());
        }
    }

    /// Notes the limits with which a disk has come from the predecessor.
    fn note_limits(&self, core: &Core, spec: &DiskSpec, target: &Target) {
        let mut limits = self.limits.borrow_mut();
        let (rates, group) = target.limits();
        limits.note(&spec.name, Limits::of(rates, group));
        for (group, rates, _) in vhost::limit_groups(core) {
            if !rates.are_off() {
                limits.groups.insert(group, Limits::of(rates, None));
            }
        }
    }

    /// The limits of disks and groups.
    pub fn limits(&self) -> AllLimits {
        self.limits.borrow().clone()
    }

    /// Whether no disk has yet to come from the predecessor.
    ///
    /// # Errors
    /// Names the disks that have yet to come, or whose requests wait for operations there.
    pub fn all_came(&self) -> Result<(), String> {
        match self.coming.get() {
            0 => Ok(()),
            _ => Err(on_their_way(&self.coming_names(true))),
        }
    }

    /// The same, but does not wait for those that a node has left when it died.
    fn all_followed(&self) -> Result<(), String> {
        match self.coming_names(false) {
            names if self.coming.get() == 0 || names.is_empty() => Ok(()),
            names => Err(on_their_way(&names)),
        }
    }

    fn coming_names(&self, lost: bool) -> Vec<String> {
        let all = self.all.borrow();
        let comes = |disk: &&Disk| match &disk.serving {
            Ok(serving) => serving.target.holds(),
            Err(Absent::Follows | Absent::Leaves(None)) => true,
            Err(Absent::Lost) => lost,
            Err(_) => false,
        };
        all.iter().filter(comes).map(|disk| disk.spec.name.clone()).collect()
    }

    /// Waits until no change is being made, for at most `ns`.
    pub async fn unchanged(&self, core: &Core, ns: u64) {
        let unchanged = || self.changing.borrow().is_empty();
        let _ = timeout(core, ns, self.changed.wait_until(unchanged)).await;
    }

    /// What is being changed, in words.
    pub fn changing(&self) -> Option<String> {
        self.changing.borrow().first().map(|subject| match subject {
            Subject::Disk(name) => format!("disk {name} is being changed"),
            Subject::Limits => "limits are being changed".to_owned(),
        })
    }

    /// The served disks. No change is made from now on until [`Disks::resume`].
    ///
    /// # Errors
    /// When a change is being made, or the node is ending.
    pub fn to_hand_over(&self) -> Result<Vec<Served>, String> {
        self.all_came()?;
        let moving = self.moving();
        if !moving.is_empty() {
            return Err(format!("moves of disks have not ended: {}", moving.join(", ")));
        }
        if self.ended.get() {
            return Err("this node is ending".to_owned());
        }
        if let Some(why) = self.changing() {
            return Err(why);
        }
        if self.handing_over.replace(true) {
            return Err("the disks are being handed over".to_owned());
        }
        let all = self.all.borrow();
        let served = all.iter().filter_map(|disk| {
            let target = disk.serving.as_ref().ok()?.target.clone();
            // The successor needs no bitmap that a failed move has left.
            let device = target.device().untracked();
            Some(Served { spec: disk.spec.clone(), device, target })
        });
        Ok(served.collect())
    }

    /// Admits changes again.
    pub fn resume(&self) {
        self.handing_over.set(false);
        self.changed.notify_all();
    }

    /// Releases the disks to another process, with the names of their sockets; those that are not
    /// handed over yet, when `following` has ended.
    pub fn leave(&self, following: JoinHandle<()>) {
        self.following.replace(Some(following));
        if let Some(resources) = &self.resources {
            resources.leave();
        }
        self.left.set(true);
        self.resume();
    }

    /// Whether [`Disks::leave`] was called.
    pub fn have_left(&self) -> bool {
        self.left.get()
    }

    /// Calls `look` with every disk.
    pub fn each(&self, look: impl FnMut(&Disk)) {
        self.all.borrow().iter().for_each(look);
    }

    /// Refuses the name of no disk.
    ///
    /// # Errors
    /// Then.
    pub fn unless_unknown(&self, name: &str) -> Result<(), Error> {
        self.find(name).map(drop)
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

    /// Ends all disks: completes the requests at the devices. Other requests stay with the guests,
    /// which connect again to the next listener. A device that takes longer than [`STOP_NS`] is
    /// abandoned: the next process to serve the guest finds its requests in the in-flight region. A
    /// change is not waited for any longer either, except for an upgrade, which gives up on its
    /// own.
    pub async fn stop(&self, core: &Core) {
        self.ended.set(true);
        self.changed.notify_all();
        self.changed.wait_until(|| !self.handing_over.get()).await;
        if timeout(core, STOP_NS, self.end_moves()).await.is_err() {
            tracing::error!("a move has not ended: its disk stays as the state directory has it");
        }
        self.stop_receiving().await;
        self.stop_nbd().await;
        let following = self.following.take();
        if let Some(following) = following {
            following.await;
        }
        let all = self.all.take();
        let served: Vec<_> =
            all.into_iter().filter_map(|disk| Some((disk.spec, disk.serving.ok()?))).collect();
        for (_, serving) in &served {
            // After a handover only those are served here that the successor has died without.
            match self.left.get() {
                true => serving.target.leave(),
                false => serving.target.stop(),
            }
        }
        let until_ns = core.now_ns() + STOP_NS;
        for (spec, serving) in served {
            let ns = until_ns.saturating_sub(core.now_ns());
            if timeout(core, ns, serving.stop()).await.is_err() {
                tracing::error!(
                    disk = %spec.name,
                    "its device is not done within {} s: it is abandoned",
                    STOP_NS / 1_000_000_000
                );
            }
            // After a handover another process has the sockets' names.
            if let Some(resources) = self.resources.as_ref().filter(|_| !self.left.get()) {
                resources.close(&spec).await;
            }
        }
        let idle = || self.changing.borrow().is_empty() && self.ending.get() == 0;
        let ns = until_ns.saturating_sub(core.now_ns());
        let _ = timeout(core, ns, self.changed.wait_until(idle)).await;
    }
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
        on_error: spec.on_error.into(),
    }
}

fn on_their_way(names: &[String]) -> String {
    format!("disks are still on their way from the previous node: {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use reactor::sim::{SimConfig, World};

    use super::*;
    use crate::disks::limits::LimitChange;
    use crate::disks::resources::LocalResources;

    #[test]
    fn a_disk_that_follows_counts_as_connected_until_it_has_come() {
        let world = World::new(1, 1, SimConfig::default());
        let run = world.run(|core| async move {
            let spec = |name: &str| -> DiskSpec {
                format!("name={name} uri=mem:1M socket=/nowhere/{name}.sock").parse().unwrap()
            };
            let resources = Resources::Local(Box::new(LocalResources::new(&core, &[], None)), true);
            let following = [spec("s"), spec("t")];
            let disks =
                Disks::start(&core, resources, Vec::new(), Some(&following), false).await.unwrap();
            let disks = Rc::new(disks);
            let error = disks.detach(&core, "s", false).await.unwrap_err();
            assert!(error.to_string().contains("disk s follows"), "{error}");
            assert!(error.advice().unwrap().contains("--force"));
            let why = disks.all_came().unwrap_err();
            assert!(why.ends_with("from the previous node: s, t"), "{why}");

            // By force it goes as soon as it has come. Its name and its socket are not free before.
            let began_ns = core.now_ns();
            let detached = disks.detach(&core, "s", true).await.unwrap();
            assert!(detached.under_way && core.now_ns() < began_ns + 2 * STOP_NS);
            for other in [spec("s"), DiskSpec { socket: spec("s").socket, ..spec("u") }] {
                let error = disks.attach(&core, other, false).await.unwrap_err().to_string();
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
                core.sleep_ns(1_000_000).await;
            }
            assert!(disks.target("t").is_ok() && disks.all_came().is_ok());

            // While a change of one disk hangs, the others are changed.
            let hangs = disks.change("other").await.unwrap();
            assert_eq!(disks.resize(&core, "t", 2 << 20, false).await.unwrap(), 1 << 20);
            let iops =
                LimitChange { name: Some("t".into()), iops: Some(9), ..LimitChange::default() };
            assert_eq!(disks.change_limits(&core, &iops).await.unwrap().of_disk("t").iops, 9);
            drop(hangs);
            let hangs = disks.change("t").await.unwrap();
            let again = timeout(&core, 1_000_000, disks.resize(&core, "t", 3 << 20, false));
            assert!(again.await.is_err(), "two changes of one disk at once");
            drop(hangs);
            // A disk that is being attached has its socket, too.
            let v = spec("v");
            let hanging = Attaching::new(&disks, &v);
            let twin = DiskSpec { socket: spec("v").socket, ..spec("w") };
            let error = disks.attach(&core, twin, false).await.unwrap_err().to_string();
            assert!(error.contains("v.sock"), "{error}");
            drop(hanging);

            // A change under way, such as the launcher's own right after an upgrade.
            let (changing, clock) = (disks.clone(), core.clone());
            let change = core.spawn(Class::Control, async move {
                let _change = changing.change("t").await.unwrap();
                clock.sleep_ns(20_000_000).await;
            });
            core.sleep_ns(1_000_000).await;
            disks.unchanged(&core, 5_000_000).await;
            assert_eq!(disks.to_hand_over().err().unwrap(), "disk t is being changed");
            disks.unchanged(&core, 1_000_000_000).await;
            assert_eq!(disks.to_hand_over().unwrap().len(), 1);
            change.await;
        });
        run.unwrap();
    }
}
