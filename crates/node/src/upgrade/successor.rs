//! The successor's side of a handover.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use bdev::{Bdev, Parts};
use reactor::{Class, Core, Event, JoinHandle};
use vhost::handover::{DiskState, HandoverError};
use vhost::{RegionInfo, Target};

use super::wire::{Line, Message};
use super::{TAKE_NS, VARIABLE, room, within};
use crate::config::{Config, DOORS_MAX};
use crate::disks::arrivals::Lost;
use crate::disks::spec::DiskSpec;
use crate::disks::{Served, options};
use crate::error::{Error, Kind};
use crate::mutant::{Mutant, is};

/// How long the old process's locks may outlive it.
const LINGER_NS: u64 = 1_000_000_000;

/// What a node receives from its predecessor.
pub(crate) struct Inherited {
    /// Served disks.
    pub disks: Vec<(Served, JoinHandle<()>)>,
    /// Listening sockets for clients, by core.
    pub clients: Vec<OwnedFd>,
    /// The listening socket for metrics.
    pub metrics: Option<OwnedFd>,
    /// The listening socket for NBD clients.
    pub nbd: Option<OwnedFd>,
    pub predecessor: Rc<Predecessor>,
}

/// The process that this one has taken over from, and the disks that follow.
pub(crate) struct Predecessor {
    core: Core,
    following: Vec<DiskSpec>,
    arrived: RefCell<VecDeque<Arrival>>,
    /// The number of disks whose arrival has not been returned yet.
    left: Cell<usize>,
    /// Notified by each arrival.
    arrives: Event,
    ended_ns: Cell<Option<u64>>,
}

/// The arrival of a disk that followed.
pub(crate) enum Arrival {
    /// It is served. The flag says whether requests that the old process has begun wait for its
    /// operations in flight: then [`Arrival::Settled`] follows, or [`Arrival::Lost`].
    Serves(Box<Served>, JoinHandle<()>, bool),
    /// Its requests wait no longer.
    Settled(DiskSpec),
    Lost(Lost),
}

impl Arrival {
    /// The disk.
    fn spec(&self) -> &DiskSpec {
        match self {
            Arrival::Serves(served, ..) => &served.spec,
            Arrival::Settled(spec) | Arrival::Lost(Lost { spec, .. }) => spec,
        }
    }
}

impl Predecessor {
    /// Whether the old process may still hold locks.
    pub fn may_hold_locks(&self) -> bool {
        self.ended_ns.get().is_none_or(|ended_ns| self.core.now_ns() < ended_ns + LINGER_NS)
    }

    /// The disks that were not taken over when this node began to lead.
    pub fn following(&self) -> &[DiskSpec] {
        &self.following
    }

    /// The next disk that has followed; `None` when no more will come. Only one task may wait at a
    /// time.
    pub async fn next(&self) -> Option<Arrival> {
        let next = || {
            if let Some(arrival) = self.arrived.borrow_mut().pop_front() {
                self.left.set(self.left.get() - 1);
                return Some(Some(arrival));
            }
            (self.left.get() == 0).then_some(None)
        };
        self.arrives.wait_for(next).await
    }

    fn arrive(&self, arrival: Arrival) {
        if let Arrival::Serves(.., true) = arrival {
            self.left.set(self.left.get() + 1);
        }
        self.arrived.borrow_mut().push_back(arrival);
        self.arrives.notify_all();
    }

    /// Takes the disks that follow, until the old process has ended.
    async fn follow(self: Rc<Self>, mut taking: Taking) {
        let why = loop {
            match taking.next().await {
                Ok(Received::Over(arrival)) => self.arrive(arrival),
                Ok(Received::Nothing | Received::Lead) => {}
                Err(why) => break why,
            }
        };
        self.has_ended(taking, &why);
    }

    /// Handles the end of the old process: nothing more comes from it or is sent to it.
    fn has_ended(&self, taking: Taking, why: &str) {
        self.ended_ns.set(Some(self.core.now_ns()));
        let core = self.core.clone();
        self.core.spawn(Class::Control, async move { room::make(&core, 0).await });
        for lost in taking.left() {
            let disk = &lost.spec().name;
            tracing::warn!(%disk, "the previous node ended before the disk was handed over: opening it again: {why}");
            self.arrive(lost);
        }
    }
}

/// A disk that is being handed over to this process.
struct Coming {
    spec: DiskSpec,
    /// The index of the disk in the node.
    nth: usize,
    /// Or why it could not be opened.
    opened: Result<(Bdev, Rc<Target>), String>,
    /// The counters in its state.
    statistics: Vec<(String, u64)>,
    stage: Stage,
}

impl Coming {
    /// Prepares for a second attempt, because the disk could not be taken as it was.
    fn decline(&mut self, core: &Core) {
        self.stage = Stage::Declined;
        if let Ok((device, target)) = &mut self.opened {
            target.stop();
            *target = Target::new(core, device.clone(), options(&self.spec, self.nth));
        }
    }

    /// A disk to be opened again. If operations of the old process may still be in flight at the
    /// device, its lock has to be taken again, too.
    fn lost(self) -> Arrival {
        let Coming { spec, opened, statistics, .. } = self;
        let device = opened.ok().and_then(|(device, target)| {
            target.stop();
            device.is_memory().then_some(device)
        });
        Arrival::Lost(Lost { spec, device, statistics })
    }
}

enum Stage {
    /// With the old process.
    Remote,
    /// Quiesced, here too.
    Quiesced(JoinHandle<()>),
    /// It could not be taken as it was.
    Declined,
}

/// The socket on which the parent process hands the node over, if it does.
///
/// # Errors
/// When the variable is set, but standard input is not a socket.
pub(crate) fn line_to_predecessor() -> Result<Option<OwnedFd>, Error> {
    if std::env::var_os(VARIABLE).is_none() {
        return Ok(None);
    }
    std::io::stdin().as_fd().try_clone_to_owned().map(Some).map_err(|error| {
        Error::new(
            Kind::Usage,
            format!("{VARIABLE} is set, but standard input is not a socket: {error}"),
        )
    })
}

/// Takes over from the process at the other end of a line. `holes` is what is known of its disks.
/// Suspends until the handover is done.
///
/// # Errors
/// When nothing was taken over; the other process has been told why.
pub(crate) async fn inherit(
    core: &Core,
    config: &Config,
    line: OwnedFd,
    holes: &BTreeMap<String, Option<bool>>,
) -> Result<Inherited, Error> {
    let line = Line::from_fd(core, line).map_err(|error| {
        Error::new(Kind::System, format!("cannot use the line to the running node: {error}"))
    })?;
    let line = Rc::new(line);
    room::make(core, room::STARTS_NS).await;
    match converse(core, config, &line, holes).await {
        Ok(inherited) => {
            room::make(core, room::ENDS_NS).await;
            Ok(inherited)
        }
        Err(why) => {
            // The other process may have gone, which is then the reason.
            let _ = line.send(&Message::Refused(why.clone()), &[]).await;
            Err(Error::new(Kind::System, format!("cannot take over from the running node: {why}")))
        }
    }
}

/// What the old process has described.
struct Described {
    coming: Vec<Coming>,
    clients: Vec<OwnedFd>,
    metrics: Option<OwnedFd>,
    nbd: Option<OwnedFd>,
}

impl Described {
    /// Receives the description, and opens the disks.
    async fn receive(
        core: &Core,
        config: &Config,
        line: &Line,
        holes: &BTreeMap<String, Option<bool>>,
    ) -> Result<Described, String> {
        let mut coming = Vec::new();
        let (mut clients, mut metrics, mut nbd) = (Vec::new(), None, None);
        loop {
            match line.receive().await? {
                (Message::Disk { spec, images, regions }, descriptors) => {
                    if config.disks.iter().any(|known| known.name == spec.name && *known != spec) {
                        tracing::warn!(disk = %spec.name, "the new configuration applies when the disk is attached again");
                    }
                    let holes = holes.get(&spec.name).copied().flatten();
                    let images = images.into();
                    let nth = coming.len();
                    coming.push(open(core, nth, spec, images, holes, regions, descriptors).await?);
                }
                (Message::Doors { clients: count, metrics: there }, mut descriptors) => {
                    if descriptors.len() != usize::from(count) + usize::from(there) {
                        return Err("the number of listening sockets differs from that announced"
                            .to_owned());
                    }
                    metrics = if there { descriptors.pop() } else { None };
                    clients = descriptors;
                }
                (Message::NbdDoor, mut descriptors) => nbd = descriptors.pop(),
                (Message::Prepare, _) => break,
                (other, _) => return Err(format!("{other:?} comes too early")),
            }
        }
        let cores = core.cores();
        let doors = clients.len() / cores;
        let fits = clients.len() == doors * cores && doors <= DOORS_MAX;
        if !clients.is_empty() && (config.data.is_none() || !fits) {
            let what = if config.data.is_none() { "no database" } else { "a database" };
            return Err(format!(
                "{what} is served here on {cores} cores, there one at {} sockets",
                clients.len()
            ));
        }
        Ok(Described { coming, clients, metrics, nbd })
    }
}

async fn converse(
    core: &Core,
    config: &Config,
    line: &Rc<Line>,
    holes: &BTreeMap<String, Option<bool>>,
) -> Result<Inherited, String> {
    line.send(&Message::Hello { cores: core.cores() as u16 }, &[]).await?;
    let described = Described::receive(core, config, line, holes).await?;
    let Described { coming, clients, metrics, nbd } = described;
    line.send(&Message::Prepared, &[]).await?;
    let mut taking = Taking {
        core: core.clone(),
        line: line.clone(),
        coming,
        settling: Vec::new(),
        has_taken: false,
        leads: false,
    };
    let (mut disks, mut arrived) = (Vec::new(), VecDeque::new());
    let ended = loop {
        match taking.next().await {
            Ok(Received::Over(Arrival::Serves(served, serving, _))) => {
                disks.push((*served, serving))
            }
            // It is opened with those that follow.
            Ok(Received::Over(lost)) => arrived.push_back(lost),
            Ok(Received::Nothing) => {}
            Ok(Received::Lead) => break None,
            // It has handed over, and then ended: this process is the node.
            Err(why) if !disks.is_empty() || !arrived.is_empty() => break Some(why),
            Err(why) if is(Mutant::ServesWithoutGo) => {
                for Coming { spec, opened, stage, .. } in taking.coming.drain(..) {
                    if let (Stage::Quiesced(serving), Ok((device, target))) = (stage, opened) {
                        target.resume();
                        disks.push((Served { spec, device, target }, serving));
                    }
                }
                break Some(why);
            }
            Err(why) => return Err(why),
        }
    };
    let coming = taking.coming.iter().map(|coming| &coming.spec);
    let following: Vec<_> = arrived.iter().map(Arrival::spec).chain(coming).cloned().collect();
    tracing::info!(
        disks = disks.len(),
        following = following.len(),
        "taken over from the previous node"
    );
    let predecessor = Rc::new(Predecessor {
        core: core.clone(),
        left: Cell::new(following.len()),
        following,
        arrived: RefCell::new(arrived),
        arrives: Event::new(),
        ended_ns: Cell::new(None),
    });
    match ended {
        None => drop(core.spawn(Class::Control, predecessor.clone().follow(taking))),
        Some(why) => predecessor.has_ended(taking, &why),
    }
    Ok(Inherited { disks, clients, metrics, nbd, predecessor })
}

/// Opens a disk's device from the old process's descriptors; the disk is the `nth` of the node.
async fn open(
    core: &Core,
    nth: usize,
    spec: DiskSpec,
    images: usize,
    holes: Option<bool>,
    regions: Vec<RegionInfo>,
    mut descriptors: Vec<OwnedFd>,
) -> Result<Coming, String> {
    let name = &spec.name;
    if descriptors.len() != images + regions.len() {
        return Err(format!("disk {name}: the number of descriptors differs from that announced"));
    }
    let memory = descriptors.split_off(images);
    let device = Bdev::take(core, &spec.uri, Parts { descriptors, holes }).await;
    let opened = device.map_err(|error| error.to_string()).map(|device| {
        let target = Target::new(core, device.clone(), options(&spec, nth));
        target.map_early(&regions.into_iter().zip(memory).collect::<Vec<_>>());
        (device, target)
    });
    Ok(Coming { spec, nth, opened, statistics: Vec::new(), stage: Stage::Remote })
}

/// What the old process has sent.
enum Received {
    Nothing,
    /// A disk is now this node's.
    Over(Arrival),
    Lead,
}

/// The disks that are being handed over.
struct Taking {
    core: Core,
    line: Rc<Line>,
    coming: Vec<Coming>,
    /// Served disks for which the old process has operations in flight.
    settling: Vec<Served>,
    /// The old process was told that a disk was taken.
    has_taken: bool,
    leads: bool,
}

impl Taking {
    /// Handles the next message of the old process.
    ///
    /// # Errors
    /// When it has gone, or sends an invalid message.
    async fn next(&mut self) -> Result<Received, String> {
        match self.line.receive().await? {
            (Message::State(name, document), descriptors) => {
                let at = self.place(&name)?;
                let state = match DiskState::decode(&document) {
                    // Other disks' states cannot be read either, and the old node can still
                    // continue.
                    Err(error @ HandoverError::Version(_)) if !self.has_taken && !self.leads => {
                        return Err(error.to_string());
                    }
                    state => state.map_err(|error| error.to_string()),
                };
                let taken = match state {
                    Ok(state) => self.take(at, state, descriptors).await,
                    Err(why) => Err(why),
                };
                let message = match taken {
                    Ok(()) => {
                        self.has_taken = true;
                        Message::Taken(name)
                    }
                    Err(why) => {
                        self.coming[at].decline(&self.core);
                        Message::Declined(name, why)
                    }
                };
                self.line.send(&message, &[]).await?;
                Ok(Received::Nothing)
            }
            (Message::Go(name), _) => {
                let coming = self.coming.remove(self.place(&name)?);
                Ok(Received::Over(match coming {
                    Coming {
                        spec,
                        opened: Ok((device, target)),
                        stage: Stage::Quiesced(serving),
                        ..
                    } => {
                        let served = Served { spec, device, target };
                        served.target.resume();
                        let holds = served.target.holds();
                        if holds {
                            let disk = &served.spec.name;
                            tracing::warn!(%disk, "the previous node still has requests of this disk in flight: they are resubmitted when those are done");
                            self.settling.push(served.clone());
                        }
                        if is(Mutant::ReleasesEarly) {
                            served.target.release(false);
                        }
                        Arrival::Serves(Box::new(served), serving, holds)
                    }
                    coming => coming.lost(),
                }))
            }
            (Message::Lead, _) => {
                self.leads = true;
                Ok(Received::Lead)
            }
            (Message::Settled(name, flush_failed), _) => {
                let at = self.settling.iter().position(|served| served.spec.name == name);
                let at = at.ok_or_else(|| format!("nothing of {name} was under way"))?;
                let Served { spec, target, .. } = self.settling.remove(at);
                target.release(flush_failed);
                Ok(Received::Over(Arrival::Settled(spec)))
            }
            (other, _) => Err(format!("{other:?} comes too early")),
        }
    }

    /// The index of a disk that has not come.
    fn place(&self, name: &str) -> Result<usize, String> {
        let at = self.coming.iter().position(|coming| coming.spec.name == name);
        at.ok_or_else(|| "a disk came that was not announced".to_owned())
    }

    /// Takes a disk, which stays quiesced.
    async fn take(
        &mut self,
        at: usize,
        state: DiskState,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), String> {
        let Coming { spec, opened, statistics, stage, .. } = &mut self.coming[at];
        statistics.clone_from(&state.statistics);
        let (_, target) = opened.as_ref().map_err(Clone::clone)?;
        if state.name != spec.name {
            return Err("it is the state of another disk".to_owned());
        }
        if state.in_flight.is_some() && !self.leads {
            return Err("its device is not done, and the old node can still continue".to_owned());
        }
        let target = target.clone();
        let serving = {
            let target = target.clone();
            self.core
                .spawn(Class::Control, async move { target.take_over(&state, descriptors).await })
        };
        within(&self.core, TAKE_NS, "taking it", target.quiesce()).await?;
        if is(Mutant::StartsEarly) {
            target.resume();
        }
        *stage = Stage::Quiesced(serving);
        Ok(())
    }

    /// The disks that have not come, and never will.
    fn left(self) -> Vec<Arrival> {
        // Their counters are with the disks that serve.
        let settling = self.settling.into_iter().map(|Served { spec, device, target }| {
            target.stop_now();
            let device = device.is_memory().then_some(device);
            Arrival::Lost(Lost { spec, device, statistics: Vec::new() })
        });
        self.coming.into_iter().map(Coming::lost).chain(settling).collect()
    }
}
