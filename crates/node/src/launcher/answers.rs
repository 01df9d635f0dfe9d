//! The answers to a node's questions.

use std::net::Shutdown;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use bdev::Parts;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use reactor::{Class, Core, OtherProcess, drop_in_background, timeout};

use super::Launcher;
use super::child::Child;
use super::front_door::FrontDoor;
use super::operators::Order;
use super::store::{Kept, Store};
use crate::disks::DISKS_MAX;
use crate::disks::events::What;
use crate::disks::limits::{LimitChange, Limits};
use crate::disks::protocol::{Hello, Opened, ToLauncher, VERSION};
use crate::disks::resources::remove;
use crate::disks::spec::DiskSpec;
use crate::disks::transfers::{Peer, Transfer};
use crate::error::{Error, Kind};
use crate::ipc::channel::{Question, json_answer};
use crate::patience::{Exclusive, Patience, patiently};

/// How long a node that has closed its socket may take to end.
const END_NS: u64 = 1_000_000_000;
/// Maximum number of questions that are answered beside others: those of all disks.
const OPENING_MAX: usize = 2 * DISKS_MAX;
/// Maximum length of a question in bytes.
const QUESTION_BYTES_MAX: usize = 64 << 10;

/// The descriptors of a device that is memory, or none. The last one frees its pages, which takes
/// long.
#[derive(Default)]
pub(super) struct DeviceMemory(Vec<OwnedFd>);

impl DeviceMemory {
    pub(super) fn new(descriptors: Vec<OwnedFd>) -> DeviceMemory {
        DeviceMemory(descriptors)
    }
}

impl Deref for DeviceMemory {
    type Target = [OwnedFd];

    fn deref(&self) -> &[OwnedFd] {
        &self.0
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            drop_in_background(std::mem::take(&mut self.0));
        }
    }
}

/// A disk that a node has, or had when it died.
pub(super) struct OpenDisk {
    pub(super) spec: DiskSpec,
    pub(super) holes: Option<bool>,
    /// It outlives the node.
    pub(super) memory: DeviceMemory,
    /// The end of the line on which the node's device asks for connections: [`bdev::serve_line`].
    pub(super) line: Option<OwnedFd>,
    pub(super) door: Rc<FrontDoor>,
}

impl OpenDisk {
    /// Keeps it for the next launcher.
    pub(super) fn keep_in(&self, core: &Core, store: &Rc<Store>) {
        let kept = copies(&self.memory).map(DeviceMemory::new);
        let kept = kept.and_then(|memory| Kept::new(core, store, &self.spec, self.holes, memory));
        match kept {
            Ok(kept) => self.door.keep_in(kept),
            Err(error) => {
                tracing::error!(disk = self.spec.name, "a killed launcher would lose it: {error}");
            }
        }
    }
}

/// The device to which a disk is being moved.
pub(super) struct MoveTarget {
    pub(super) spec: DiskSpec,
    pub(super) holes: Option<bool>,
    /// As in [`OpenDisk`].
    pub(super) memory: DeviceMemory,
    pub(super) line: Option<OwnedFd>,
}

impl Launcher {
    /// Answers a node's questions, and records its end.
    pub(super) fn attend(self: &Rc<Self>, node: &Rc<Child>) {
        self.core.spawn(Class::Control, node.clone().bury(self.core.clone()));
        let (launcher, attended) = (self.clone(), node.clone());
        self.core.spawn(Class::Control, async move {
            let node = attended;
            loop {
                // Else a node that takes no answers could fill the memory.
                launcher.changed.wait_until(|| node.opening() < OPENING_MAX).await;
                let question = match node.channel.next().await {
                    Ok(question) if question.length() <= QUESTION_BYTES_MAX => question,
                    Ok(_) => {
                        break tracing::error!(pid = node.pid.as_raw(), "a question is too long");
                    }
                    Err(why) => break tracing::debug!(pid = node.pid.as_raw(), "{why}"),
                };
                match question.read() {
                    Ok(ToLauncher::Open { .. } | ToLauncher::OpenTarget { .. }) => {
                        launcher.answer_beside(&node, question, false);
                        continue;
                    }
                    Ok(
                        ToLauncher::PrepareMoved { .. }
                        | ToLauncher::Moved { .. }
                        | ToLauncher::PrepareTransfer { .. }
                        | ToLauncher::KeepTransfer { .. },
                    ) => {
                        launcher.answer_beside(&node, question, true);
                        continue;
                    }
                    Ok(ToLauncher::Begin { .. }) => {
                        if node.begins() {
                            break tracing::error!(pid = node.pid.as_raw(), "it begins again");
                        }
                        launcher.begin(&node, question);
                        continue;
                    }
                    _ => {}
                }
                let answer = launcher.answer(&node, &question).await;
                if let Err(why) = node.channel.answer(&question, answer).await {
                    break tracing::warn!(pid = node.pid.as_raw(), "{why}");
                }
            }
            // Nothing is answered any more.
            let _ = node.stream.shutdown(Shutdown::Both);
            // The next node begins with what is stored.
            launcher.changed.wait_until(|| node.storing() == 0).await;
            let end = || launcher.core.process_end(node.pid.as_raw() as u32);
            if timeout(&launcher.core, END_NS, end()).await.is_err() {
                node.kill();
                let _ = end().await;
            }
            let status = match status_of(node.pid) {
                Ok(status) if status != WaitStatus::StillAlive => status,
                // It cannot be waited for, or not any more.
                _ => {
                    node.kill();
                    WaitStatus::Exited(node.pid, 1)
                }
            };
            // A move ends with its node; a successor that has failed had none.
            if Rc::ptr_eq(&launcher.current.borrow(), &node) {
                for (disk, to) in launcher.targets.take() {
                    let (uri, why) = (to.spec.uri, "its node has ended".to_owned());
                    launcher.resources.events().note(What::MoveFailed { disk, uri, why });
                }
            }
            launcher.reaping.set(launcher.reaping.get() + 1);
            node.set_ended(status);
            // What the next node restores comes first.
            node.until_it_is_buried().await;
            if let Err(error) = launcher.core.reap(node.pid.as_raw() as u32).await {
                tracing::warn!(pid = node.pid.as_raw(), "it cannot be reaped: {error}");
            }
            launcher.reaping.set(launcher.reaping.get() - 1);
            launcher.changed.notify_all();
        });
    }

    /// Lets a node begin. A spare one has to wait, so its end is noticed meanwhile.
    fn begin(self: &Rc<Self>, node: &Rc<Child>, question: Question) {
        let (launcher, node) = (self.clone(), node.clone());
        self.core.spawn(Class::Control, async move {
            let answer = launcher.answer(&node, &question).await;
            if let Err(why) = node.channel.answer(&question, answer).await {
                tracing::debug!(pid = node.pid.as_raw(), "{why}");
            }
        });
    }

    /// Answers a question beside others: the opening of a disk may take patience, and what is
    /// stored is written durably.
    fn answer_beside(self: &Rc<Self>, node: &Rc<Child>, question: Question, stores: bool) {
        let (launcher, node) = (self.clone(), node.clone());
        let counted = node.count(stores);
        self.core.spawn(Class::Control, async move {
            let answer = launcher.answer(&node, &question).await;
            if let Err(why) = node.channel.answer(&question, answer).await {
                tracing::warn!(pid = node.pid.as_raw(), "{why}");
            }
            drop(counted);
        });
    }

    pub(super) async fn answer(
        &self,
        node: &Rc<Child>,
        question: &Question,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
        match question.read()? {
            ToLauncher::Begin { version } => {
                if version != VERSION {
                    let why = format!(
                        "it uses version {version} of the launcher's protocol, not {VERSION}"
                    );
                    node.set_begun(Err(why.clone()));
                    return Err(Error::new(Kind::Unsupported, why));
                }
                node.set_begun(Ok(()));
                self.changed.wait_until(|| !node.waits() || node.has_ended()).await;
                if node.has_ended() {
                    return Err(Error::new(Kind::System, "it has ended"));
                }
                // A spare node could not listen while another one did, whose ring may do so still.
                let metrics = match self.metrics.filter(|_| node.was_spare()) {
                    Some(addr) => {
                        let listen = || reactor::listen(addr, false);
                        Some(self.listen("metrics", Exclusive::Port(addr), listen).await?)
                    }
                    None => None,
                };
                let nbd = match self.nbd.as_ref().filter(|_| node.was_spare()) {
                    Some(addr) => {
                        Some(self.listen("NBD", addr.exclusive(), || addr.listen()).await?)
                    }
                    None => None,
                };
                let open = self.open.borrow();
                let holes = open.iter().map(|(name, open)| (name.clone(), open.holes)).collect();
                let (admin, remembers) = (self.admin.clone(), self.resources.remembers());
                let restarted = self.has_served.get();
                let hello = Hello {
                    admin,
                    remembers,
                    holes,
                    metrics: metrics.is_some(),
                    nbd: nbd.is_some(),
                    restarted,
                };
                let (text, _) = json_answer(&hello)?;
                Ok((text, node.line.take().into_iter().chain(metrics).chain(nbd).collect()))
            }
            ToLauncher::Survivor { pid } => {
                if node.begun().is_some() {
                    return Err(Error::new(Kind::Usage, "it has begun"));
                }
                let survivor = OtherProcess::open(pid)
                    .map_err(|error| Error::new(Kind::System, format!("process {pid}: {error}")))?;
                node.set_survivor(survivor);
                json_answer(&())
            }
            ToLauncher::Disks => {
                self.resources.until_certain().await;
                let mut all = self.resources.disks();
                for named in &mut all {
                    named.stands_still = self.poison.stands_still(&named.spec.name);
                }
                json_answer(&all)
            }
            ToLauncher::Serving => {
                node.set_serving();
                self.store.iter().for_each(|store| store.ready());
                let process = node.pid.as_raw().unsigned_abs();
                self.resources.events().note(What::Serving { process });
                json_answer(&())
            }
            ToLauncher::Open { name } => {
                let spec = self.named(&name)?;
                self.open_disk(node, &spec).await
            }
            ToLauncher::OpenTarget { name } => {
                let ordered = |order: &Order| match order {
                    Order::Move { name: moved, uri } if *moved == name => Some(uri.clone()),
                    _ => None,
                };
                let uri = self.orders.borrow().iter().find_map(ordered);
                let uri = uri.ok_or_else(|| unasked(&name, "moved"))?;
                self.open_target(node, &DiskSpec { uri, ..self.named(&name)? }).await
            }
            ToLauncher::DropTarget { name } => {
                self.targets.borrow_mut().remove(&name);
                json_answer(&())
            }
            ToLauncher::PrepareMoved { name } => {
                self.resources.prepare_moved(&self.target(&name)?).await;
                json_answer(&())
            }
            ToLauncher::Moved { name } => {
                self.resources.moved(&self.target(&name)?).await?;
                let to = self.targets.borrow_mut().remove(&name);
                if let (Some(to), Some(open)) = (to, self.open.borrow_mut().get_mut(&name)) {
                    (open.spec, open.holes, open.memory) = (to.spec, to.holes, to.memory);
                    open.line = to.line;
                    self.store.iter().for_each(|store| open.keep_in(&self.core, store));
                }
                json_answer(&())
            }
            ToLauncher::PrepareTransfer { name, transfer } => {
                self.check_transfer(&name, Some(&transfer))?;
                self.resources.prepare_transfer(&name, &transfer).await;
                json_answer(&())
            }
            ToLauncher::KeepTransfer { name, transfer, limits } => {
                self.check_transfer(&name, transfer.as_ref())?;
                self.check_limits(&name, &limits)?;
                self.resources.keep_transfer(&name, transfer.as_ref(), &limits).await?;
                json_answer(&())
            }
            ToLauncher::Dial { name } => {
                let stored = self.resources.transfer(&name).and_then(|stored| stored.to().cloned());
                let to = stored.or_else(|| self.asked_to_send(&name));
                let to = to.ok_or_else(|| unasked(&name, "sent"))?;
                let begun = reactor::connect(to.addr).map_err(|error| {
                    Error::new(Kind::System, format!("cannot connect to {}: {error}", to.addr))
                })?;
                let (text, _) = json_answer(&())?;
                Ok((text, vec![begun]))
            }
            ToLauncher::TakeDisks => {
                let door = self.disks_door.as_ref().map(OwnedFd::try_clone).transpose();
                let door = door.map_err(|error| Error::new(Kind::System, error.to_string()))?;
                let (text, _) = json_answer(&())?;
                Ok((text, door.into_iter().collect()))
            }
            ToLauncher::Close { name } => {
                self.poison.forget(&name);
                let closed = self.open.borrow_mut().remove(&name);
                if let Some(open) = closed {
                    open.door.close();
                    remove(&open.spec.socket);
                }
                json_answer(&())
            }
            ToLauncher::Keep { name } => {
                let ordered = |order: &Order| match order {
                    Order::Attach { disk, .. } if disk.name == name => Some(disk.clone()),
                    _ => None,
                };
                let spec = self.orders.borrow().iter().find_map(ordered);
                let spec = spec.ok_or_else(|| unasked(&name, "kept"))?;
                self.resources.keep(&spec).await?;
                json_answer(&())
            }
            ToLauncher::Forget { name } => {
                if !self.orders.borrow().contains(&Order::Detach(name.clone())) {
                    return Err(unasked(&name, "forgotten"));
                }
                let open = self.open.borrow().get(&name).map(|open| open.spec.clone());
                let spec = open.or_else(|| self.resources.disk(&name));
                if let Some(spec) = spec {
                    self.resources.forget(&spec).await?;
                }
                json_answer(&())
            }
            ToLauncher::WriteCache { name, told } => {
                let socket = self.open.borrow().get(&name).map(|open| open.spec.socket.clone());
                let socket = socket.ok_or_else(|| unasked(&name, "known"))?;
                self.resources.keep_write_cache(&socket, told).await?;
                json_answer(&())
            }
            ToLauncher::Event { what } if what.is_of_launcher() => {
                Err(Error::new(Kind::Usage, "the launcher notes that itself"))
            }
            ToLauncher::Event { what } => {
                self.resources.events().note(what);
                json_answer(&())
            }
            ToLauncher::WorkPage => {
                let failed = |error: std::io::Error| Error::new(Kind::System, error.to_string());
                let page = reactor::work_page().map_err(failed)?;
                let theirs = page.try_clone().map_err(failed)?;
                node.work.replace(Some(page));
                Ok((json_answer(&())?.0, vec![theirs]))
            }
            ToLauncher::Limits => json_answer(&self.resources.limits()),
            ToLauncher::ChangeLimits { change } => {
                if !self.orders.borrow().contains(&Order::Limit(change.clone())) {
                    let name = change.name.or(change.group).unwrap_or_default();
                    return Err(unasked(&name, "limited"));
                }
                self.resources.change_limits(&change).await?;
                json_answer(&())
            }
        }
    }

    /// A disk that comes from another node may bring limits along, unless it has some here that no
    /// earlier attempt has brought; and those of the group that it joins if that has none here.
    fn check_limits(&self, name: &str, limits: &[LimitChange]) -> Result<(), Error> {
        let Some(first) = limits.first() else { return Ok(()) };
        let all = self.resources.limits();
        let may = match self.resources.transfer(name) {
            Some(Transfer::Incoming { id: Some(_), limited }) => {
                limited || all.of_disk(name) == Limits::default()
            }
            _ => false,
        };
        let own = first.name.as_deref() == Some(name);
        let joins = |change: &LimitChange| {
            let group = change.group.as_ref().filter(|_| change.name.is_none());
            group.is_some_and(|group| {
                first.group.as_ref() == Some(group) && all.of_group(group) == Limits::default()
            })
        };
        let of_moves = limits.iter().any(|change| change.moves.is_some());
        match may && own && !of_moves && limits[1..].iter().all(joins) {
            true => Ok(()),
            false => Err(unasked(name, "limited")),
        }
    }

    /// Where an operator wants a disk to be sent.
    fn asked_to_send(&self, name: &str) -> Option<Peer> {
        self.orders.borrow().iter().find_map(|order| match order {
            Order::Send { name: sent, to } if sent == name => Some(to.clone()),
            _ => None,
        })
    }

    /// The disk, with the device to which it is being moved.
    fn target(&self, name: &str) -> Result<DiskSpec, Error> {
        let spec = self.targets.borrow().get(name).map(|to| to.spec.clone());
        spec.ok_or_else(|| unasked(name, "moved"))
    }

    /// A node only continues what operators have begun: it cannot choose where disks go.
    fn check_transfer(&self, name: &str, new: Option<&Transfer>) -> Result<(), Error> {
        let stored = self.resources.transfer(name);
        let known = stored.as_ref().and_then(Transfer::to);
        let asked = || self.asked_to_send(name);
        let attached = || {
            let orders = self.orders.borrow();
            let waits = |order: &Order| matches!(order, Order::Attach { disk, incoming: true } if disk.name == *name);
            orders.iter().any(waits)
        };
        let may = match new {
            None => true,
            Some(transfer) => match transfer.to() {
                Some(to) => known == Some(to) || asked().as_ref() == Some(to),
                None => stored.is_some() || attached(),
            },
        };
        if may { Ok(()) } else { Err(unasked(name, "sent or taken")) }
    }

    /// Opens the device to which a disk is to be moved.
    async fn open_target(
        &self,
        node: &Child,
        spec: &DiskSpec,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
        let (Parts { descriptors, holes }, line) = self.resources.parts(spec).await?;
        unless_ended(node)?;
        let failed = |error| Error::new(Kind::System, format!("disk {}: {error}", spec.name));
        let memory = memory_of(spec, &descriptors).map_err(failed)?;
        serve_line(&self.core, spec, line.as_ref()).map_err(failed)?;
        let to = MoveTarget { spec: spec.clone(), holes, memory, line };
        self.targets.borrow_mut().insert(spec.name.clone(), to);
        let (text, _) = json_answer(&Opened { holes, write_cache: None })?;
        Ok((text, descriptors))
    }

    /// Opens a disk for a node, or gives it the disk of a node that has died.
    async fn open_disk(
        &self,
        node: &Child,
        spec: &DiskSpec,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
        let failed = |error: std::io::Error| {
            Error::new(Kind::System, format!("disk {}: {error}", spec.name))
        };
        let known = || match self.open.borrow().get(&spec.name) {
            Some(open) if open.spec == *spec => {
                Some((open.door.clone(), copies(&open.memory), open.holes))
            }
            _ => None,
        };
        let (parts, line) = match known() {
            Some((_, memory, holes)) if !memory.as_ref().is_ok_and(Vec::is_empty) => {
                (Parts { descriptors: memory.map_err(failed)?, holes }, None)
            }
            _ => self.resources.parts(spec).await?,
        };
        let memory = memory_of(spec, &parts.descriptors).map_err(failed)?;
        let listener = match known() {
            Some(_) => None,
            None => Some(self.resources.listen(spec).await?),
        };
        unless_ended(node)?;
        serve_line(&self.core, spec, line.as_ref()).map_err(failed)?;
        let door = match (known(), listener) {
            (Some((door, ..)), _) => door,
            (None, Some(listener)) => FrontDoor::new(&self.core, &spec.name, listener),
            (None, None) => return Err(unasked(&spec.name, "opened")),
        };
        let write_cache = self.resources.write_cache(&spec.socket);
        let holes = parts.holes;
        let (text, _) = json_answer(&Opened { holes, write_cache })?;
        let mut descriptors = parts.descriptors;
        let attached = door.attach().inspect_err(|_| {
            if known().is_none() {
                // Nobody else knows it.
                door.close();
            }
        });
        descriptors.push(attached.map_err(failed)?);
        let open = OpenDisk { spec: spec.clone(), holes, memory, line, door };
        if let Some(store) = self.store.as_ref().filter(|_| open.door.kept().is_none()) {
            open.keep_in(&self.core, store);
        }
        let before = self.open.borrow_mut().insert(spec.name.clone(), open);
        if let Some(before) = before.filter(|before| before.spec != *spec) {
            before.door.close();
        }
        Ok((text, descriptors))
    }

    /// Listens for clients of a kind, in place of a node that has died.
    async fn listen(
        &self,
        kind: &str,
        what: Exclusive,
        listen: impl Fn() -> std::io::Result<OwnedFd>,
    ) -> Result<OwnedFd, Error> {
        let patience = Patience::with(what.clone());
        let in_use = |error: &std::io::Error| {
            error.kind() == std::io::ErrorKind::AddrInUse && patience.lasts(&self.core)
        };
        patiently(&self.core, in_use, async || listen()).await.map_err(|error| {
            Error::new(Kind::System, format!("cannot listen for {kind} on {what}: {error}"))
        })
    }

    /// A disk that an operator has named.
    fn named(&self, name: &str) -> Result<DiskSpec, Error> {
        // The node refuses an attach of a disk that it has, and may open that one meanwhile.
        let known = self
            .resources
            .disk(name)
            .filter(|spec| self.open.borrow().get(name).is_some_and(|open| open.spec == *spec));
        if let Some(spec) = known {
            return Ok(spec);
        }
        for order in self.orders.borrow().iter() {
            match order {
                Order::Attach { disk, .. } if disk.name == name => return Ok(disk.clone()),
                _ => {}
            }
        }
        let known = self.resources.disk(name);
        // Without a state directory only the launcher remembers an attached disk.
        let open = || self.open.borrow().get(name).map(|open| open.spec.clone());
        known.or_else(open).ok_or_else(|| unasked(name, "opened"))
    }
}

/// The descriptors of a device that is memory, which outlives the node.
fn memory_of(spec: &DiskSpec, descriptors: &[OwnedFd]) -> std::io::Result<DeviceMemory> {
    match bdev::image_of(&spec.uri).is_some() || bdev::is_remote(&spec.uri) {
        true => Ok(DeviceMemory::default()),
        false => copies(descriptors).map(DeviceMemory::new),
    }
}

/// Makes the connections of a device that is elsewhere, as long as a node has it.
pub(super) fn serve_line(
    core: &Core,
    spec: &DiskSpec,
    line: Option<&OwnedFd>,
) -> std::io::Result<()> {
    match line {
        Some(line) => bdev::serve_line(core, &spec.uri, line.try_clone()?),
        None => Ok(()),
    }
}

pub(super) fn copies(descriptors: &[OwnedFd]) -> std::io::Result<Vec<OwnedFd>> {
    descriptors.iter().map(OwnedFd::try_clone).collect()
}

/// How a child has ended. Its number stays its own.
fn status_of(pid: Pid) -> nix::Result<WaitStatus> {
    waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT)
}

/// Refuses what a node has asked for that has ended meanwhile: another one may have it.
///
/// # Errors
/// Then.
fn unless_ended(node: &Child) -> Result<(), Error> {
    match node.has_ended() {
        true => Err(Error::new(Kind::System, "it has ended")),
        false => Ok(()),
    }
}

fn unasked(name: &str, done: &str) -> Error {
    Error::new(Kind::Usage, format!("nobody has asked for disk {name} to be {done}"))
}
