//! The successor's part.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use bdev::{Bdev, Parts};
use reactor::{Class, Core};
use vhost::handover::DiskState;
use vhost::{RegionInfo, Target};

use super::wire::{Line, Message};
use super::{TAKE_NS, VARIABLE, within};
use crate::config::Config;
use crate::disk_spec::DiskSpec;
use crate::disks::{Served, options};
use crate::error::{Error, Kind};
use crate::mutant::{Mutant, is};

/// How long after the old process's end its locks may last.
const LINGER_NS: u64 = 1_000_000_000;

/// What a node has from the one before it.
pub(crate) struct Inherited {
    /// They serve.
    pub disks: Vec<(Served, reactor::JoinHandle<()>)>,
    /// Listening sockets for clients, by core.
    pub clients: Vec<OwnedFd>,
    /// The listening socket for metrics.
    pub metrics: Option<OwnedFd>,
    pub predecessor: Predecessor,
}

/// The process that this one has taken over from.
pub(crate) struct Predecessor {
    core: Core,
    ended_ns: Rc<Cell<Option<u64>>>,
}

impl Predecessor {
    fn new(core: &Core, line: Line) -> Predecessor {
        let ended_ns = Rc::new(Cell::new(None));
        let (clock, ended) = (core.clone(), ended_ns.clone());
        core.spawn(Class::Background, async move {
            // It has nothing more to say.
            let _ = line.hear().await;
            ended.set(Some(clock.now_ns()));
        });
        Predecessor { core: core.clone(), ended_ns }
    }

    /// Whether it may still hold locks.
    pub fn may_hold_locks(&self) -> bool {
        self.ended_ns.get().is_none_or(|ended_ns| self.core.now_ns() < ended_ns + LINGER_NS)
    }
}

/// A disk on its way here.
struct Coming {
    spec: DiskSpec,
    device: Bdev,
    regions: Vec<(RegionInfo, OwnedFd)>,
}

/// The socket on which the process that started this one hands the node over, if one did that.
///
/// # Errors
/// When there is none, although there should be.
pub(crate) fn line_to_predecessor() -> Result<Option<OwnedFd>, Error> {
    if std::env::var_os(VARIABLE).is_none() {
        return Ok(None);
    }
    std::io::stdin().as_fd().try_clone_to_owned().map(Some).map_err(|error| {
        Error::new(
            Kind::Usage,
            format!("{VARIABLE} is set, but standard input is no socket: {error}"),
        )
    })
}

/// Takes over from the process at the other end of a line. `holes` is what is known of its disks.
/// Suspends until that has handed over.
///
/// # Errors
/// Why nothing was taken over; that process has been told.
pub(crate) async fn inherit(
    core: &Core,
    config: &Config,
    line: OwnedFd,
    holes: &BTreeMap<String, Option<bool>>,
) -> Result<Inherited, Error> {
    let line = Line::from_fd(core, line).map_err(|error| {
        Error::new(Kind::System, format!("the line to the running node: {error}"))
    })?;
    match converse(core, config, &line, holes).await {
        Ok((disks, clients, metrics)) => {
            let predecessor = Predecessor::new(core, line);
            Ok(Inherited { disks, clients, metrics, predecessor })
        }
        Err(why) => {
            // It may be gone, which is why.
            let _ = line.say(&Message::Refused(why.clone()), &[]).await;
            Err(Error::new(Kind::System, format!("taking over from the running node: {why}")))
        }
    }
}

type Taken = (Vec<(Served, reactor::JoinHandle<()>)>, Vec<OwnedFd>, Option<OwnedFd>);

async fn converse(
    core: &Core,
    config: &Config,
    line: &Line,
    holes: &BTreeMap<String, Option<bool>>,
) -> Result<Taken, String> {
    line.say(&Message::Hello { cores: core.cores() as u16 }, &[]).await?;
    let mut coming = Vec::new();
    let (mut clients, mut metrics) = (Vec::new(), None);
    loop {
        match line.hear().await? {
            (Message::Disk { spec, images, regions }, descriptors) => {
                if config.disks.iter().any(|known| known.name == spec.name && *known != spec) {
                    tracing::warn!(disk = %spec.name, "it stays as it runs until it is attached anew: it is configured in another way");
                }
                let holes = holes.get(&spec.name).copied().flatten();
                let images = images.into();
                coming.push(open(core, spec, images, holes, regions, descriptors).await?);
            }
            (Message::Doors { clients: count, metrics: there }, mut descriptors) => {
                if descriptors.len() != usize::from(count) + usize::from(there) {
                    return Err("other listening sockets came than were announced".to_owned());
                }
                metrics = if there { descriptors.pop() } else { None };
                clients = descriptors;
            }
            (Message::Prepare, _) => break,
            (other, _) => return Err(format!("{other:?} comes too early")),
        }
    }
    if !clients.is_empty() && (config.data.is_none() || clients.len() != core.cores()) {
        let cores = core.cores();
        let what = if config.data.is_none() { "no database" } else { "a database" };
        return Err(format!(
            "{what} is served here on {cores} cores, there one on {}",
            clients.len()
        ));
    }
    line.say(&Message::Prepared, &[]).await?;
    let disks = take(core, line, coming).await?;
    line.say(&Message::Taken, &[]).await?;
    match line.hear_that(&Message::Go).await {
        Err(_) if is(Mutant::ServesWithoutGo) => {}
        heard => heard?,
    }
    for (disk, _) in &disks {
        disk.target.go_on();
    }
    tracing::info!(disks = disks.len(), "taken over from the node before");
    Ok((disks, clients, metrics))
}

/// Opens a disk's device from what the old process has open.
async fn open(
    core: &Core,
    spec: DiskSpec,
    images: usize,
    holes: Option<bool>,
    regions: Vec<RegionInfo>,
    mut descriptors: Vec<OwnedFd>,
) -> Result<Coming, String> {
    let name = &spec.name;
    if descriptors.len() != images + regions.len() {
        return Err(format!("disk {name}: other descriptors came than were announced"));
    }
    let memory = descriptors.split_off(images);
    let device = Bdev::take(core, &spec.uri, Parts { descriptors, holes }).await;
    let device = device.map_err(|error| format!("disk {name}: {error}"))?;
    Ok(Coming { spec, device, regions: regions.into_iter().zip(memory).collect() })
}

/// Takes the disks, which stay at rest.
async fn take(
    core: &Core,
    line: &Line,
    coming: Vec<Coming>,
) -> Result<Vec<(Served, reactor::JoinHandle<()>)>, String> {
    let mut waiting = Vec::new();
    for (at, Coming { spec, device, regions }) in coming.into_iter().enumerate() {
        let target = Target::new(core, device.clone(), options(&spec, at));
        target.map_early(&regions);
        waiting.push(Served { spec, device, target });
    }
    let mut taken = Vec::new();
    loop {
        let (document, descriptors) = match line.hear().await? {
            (Message::State(document), descriptors) => (document, descriptors),
            (Message::Take, _) if waiting.is_empty() => return Ok(taken),
            (Message::Take, _) => return Err("not all disks came".to_owned()),
            (other, _) => return Err(format!("{other:?} comes too early")),
        };
        let state = DiskState::decode(&document).map_err(|error| error.to_string())?;
        let at = waiting.iter().position(|disk| disk.spec.name == state.name);
        let disk = waiting.remove(at.ok_or("a disk came that was not announced")?);
        let name = disk.spec.name.clone();
        let serving = {
            let target = disk.target.clone();
            core.spawn(Class::Control, async move { target.take_over(&state, descriptors).await })
        };
        let rested = within(core, TAKE_NS, "taking it", disk.target.rest()).await;
        rested.map_err(|why| format!("disk {name}: {why}"))?;
        if is(Mutant::StartsEarly) {
            disk.target.go_on();
        }
        taken.push((disk, serving));
    }
}
