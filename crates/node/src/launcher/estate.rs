//! What a launcher starts with: a new node, or the estate that the previous program has left.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString};
use std::io::{Seek, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::{Pid, execve};
use reactor::{Core, Event, UnixListener};
use serde::{Deserialize, Serialize};

use super::answers::{DeviceMemory, MoveTarget, OpenDisk, copies, serve_line};
use super::child::{Child, Role, spawn};
use super::front_door::{DoorState, FrontDoor};
use super::poison::Poison;
use super::store::{Left, Store, parsed};
use super::{Launcher, VARIABLE, system};
use crate::config::Config;
use crate::disks::DISKS_MAX;
use crate::disks::events::KeptEvents;
use crate::disks::limits::AllLimits;
use crate::disks::resources::LocalResources;
use crate::disks::spec::DiskSpec;
use crate::disks::state::State;
use crate::error::{Error, Kind};
use crate::ipc::frames::{Frames, Limits};
use crate::log::LOG_PATIENCE;
use crate::patience::{Exclusive, Patience, patiently};
use crate::serve::no_port;
use crate::start::{listen_admin, open_state, state_directory};
use crate::upgrade::own_program;

/// Tells a launcher that it continues with a running node; the estate comes on its standard input.
/// The value is a [`KeptConfig`](super::kept_config::KeptConfig) in JSON.
pub(crate) const RENEWED: &str = "MILLRACE_LAUNCHER_RENEWED";
/// A pause after each disk that a launcher takes from the program before it, in nanoseconds.
const BREATH_NS: u64 = 50_000;
/// The version of the estate.
const ESTATE_VERSION: u32 = 2;
/// Most descriptors of the estate: the text, the channel, the lock, the admin socket, one for each
/// disk, the socket for disks of other nodes, the node's survivor, the memory for notes, one for
/// each move.
const ESTATE_DESCRIPTORS: usize = 7 + 2 * DISKS_MAX;
/// Most descriptors of a disk.
const DISK_DESCRIPTORS: usize = 4 + bdev::DESCRIPTORS_MAX + 2 * vhost::kept::LIVE_MAX;

/// Whether this process is a launcher that has replaced another one.
pub(crate) fn is_renewed() -> bool {
    std::env::var_os(VARIABLE).is_none() && std::env::var_os(RENEWED).is_some()
}

/// What a launcher starts with.
pub(super) struct Beginning {
    pub(super) resources: LocalResources,
    pub(super) admin: Option<(PathBuf, UnixListener)>,
    pub(super) open: BTreeMap<String, OpenDisk>,
    pub(super) targets: BTreeMap<String, MoveTarget>,
    pub(super) node: Rc<Child>,
    pub(super) poison: Poison,
    /// The event of the launcher, which the node notifies.
    pub(super) changed: Rc<Event>,
    /// The socket at which disks of other nodes come.
    pub(super) disks_door: Option<OwnedFd>,
    /// Where the disks are kept for a launcher after this one.
    pub(super) store: Option<Rc<Store>>,
    /// The launcher before this one was killed, and its front ends are still connected.
    pub(super) restored: bool,
}

/// What a launcher passes to the program that replaces it, beside descriptors: the channel to the
/// node, the state directory's lock, the admin socket, for each disk a socket on which its own
/// descriptors wait (one message has no room for all of them), and the node's survivor.
#[derive(Debug, Serialize, Deserialize)]
struct Estate {
    version: u32,
    node: i32,
    admin: Option<PathBuf>,
    locked: bool,
    open: Vec<DiskText>,
    /// The limits of disks, without a state directory.
    #[serde(default, skip_serializing_if = "AllLimits::is_empty")]
    limits: AllLimits,
    /// What has happened.
    #[serde(default)]
    events: KeptEvents,
    /// The socket at which disks of other nodes come follows the disks.
    #[serde(default)]
    takes_disks: bool,
    /// Then the descriptor of the node's survivor.
    #[serde(default)]
    survivor: bool,
    /// The disks that stand still, and why.
    #[serde(default)]
    stand_still: BTreeMap<String, String>,
    /// Then the memory in which the node's cores note their work.
    #[serde(default)]
    work: bool,
    /// Disks of this node that are being moved to other devices: for each the end of a socket
    /// follows, as for `open`.
    #[serde(default)]
    targets: Vec<TargetText>,
}

/// A device of the estate to which a disk is being moved.
#[derive(Debug, Serialize, Deserialize)]
struct TargetText {
    /// The disk as it is when it has moved.
    spec: DiskSpec,
    holes: Option<bool>,
    /// As in [`DiskText`].
    memory: usize,
    line: bool,
}

impl TargetText {
    fn of(target: &MoveTarget) -> std::io::Result<(TargetText, Vec<OwnedFd>)> {
        let MoveTarget { spec, holes, memory, line } = target;
        let descriptors = of_device(memory, line.as_ref())?;
        let (spec, memory, line) = (spec.clone(), memory.len(), line.is_some());
        Ok((TargetText { spec, holes: *holes, memory, line }, descriptors))
    }

    fn taken(self, core: &Core, descriptors: Vec<OwnedFd>) -> std::io::Result<MoveTarget> {
        let TargetText { spec, holes, memory, line } = self;
        let (memory, line, _) = parted(descriptors, memory, line);
        serve_line(core, &spec, line.as_ref())?;
        Ok(MoveTarget { spec, holes, memory, line })
    }
}

/// Copies of the descriptors of a device: of its memory, and of the end of its line.
fn of_device(memory: &[OwnedFd], line: Option<&OwnedFd>) -> std::io::Result<Vec<OwnedFd>> {
    let mut descriptors = copies(memory)?;
    descriptors.extend(line.map(OwnedFd::try_clone).transpose()?);
    Ok(descriptors)
}

/// The descriptors of a device's memory, the end of its line, and what follows them.
fn parted(
    mut descriptors: Vec<OwnedFd>,
    memory: usize,
    line: bool,
) -> (DeviceMemory, Option<OwnedFd>, Vec<OwnedFd>) {
    let mut rest = descriptors.split_off(memory.min(descriptors.len()));
    let line = (line && !rest.is_empty()).then(|| rest.remove(0));
    (DeviceMemory::new(descriptors), line, rest)
}

/// A disk of the estate.
#[derive(Debug, Serialize, Deserialize)]
struct DiskText {
    spec: DiskSpec,
    holes: Option<bool>,
    /// The number of descriptors of its device, and whether the end of a line follows.
    memory: usize,
    #[serde(default)]
    line: bool,
    /// Its number in the service manager's store, if it is kept there.
    #[serde(default)]
    kept: Option<u64>,
    door: DoorState,
}

impl Beginning {
    pub(super) async fn first(core: &Core, config: &Config) -> Result<Beginning, Error> {
        // Before a node is started, which must not inherit them.
        let passed = reactor::passed_descriptors();
        let passed =
            passed.map_err(|error| system("descriptors of the service manager", &error))?;
        let state = open_state(core, config, || false).await?;
        let admin = listen_admin(core, config, state.is_some(), || false).await?;
        let disks_door = match config.moves {
            Some(addr) => Some(listen_for_disks(core, addr).await?),
            None => None,
        };
        let own = own_program().map_err(|error| system("where this program is", &error))?;
        let changed = Rc::<Event>::default();
        let node = spawn(core, &own, Role::First, &changed).await;
        let node = node.map_err(|why| Error::new(Kind::System, why))?;
        let resources = LocalResources::new(core, &config.disks, state);
        let store = Store::of_manager(0);
        let open = match &store {
            Some(store) => restore(core, store, &resources, passed),
            None => BTreeMap::new(),
        };
        let (poison, restored) = (Poison::default(), !open.is_empty());
        let targets = BTreeMap::new();
        Ok(Beginning {
            resources,
            admin,
            open,
            targets,
            node,
            poison,
            changed,
            disks_door,
            store,
            restored,
        })
    }

    /// Starts with the estate of the previous program.
    pub(super) async fn renewed(core: &Core, config: &Config) -> Result<Beginning, Error> {
        let broken = |why: &dyn std::fmt::Display| system("cannot take the launcher's place", why);
        let limits = Limits { body_bytes: 0, descriptors: ESTATE_DESCRIPTORS };
        let socket = std::io::stdin().as_fd().try_clone_to_owned();
        let frames = socket.and_then(|socket| Frames::from_fd(core, socket, limits));
        let frame = frames.map_err(|error| broken(&error))?.receive().await;
        let mut descriptors = frame.map_err(|why| broken(&why))?.descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(|| broken(&"a descriptor is missing"));
        let estate = parsed(&mut std::fs::File::from(next()?));
        let estate: Estate = estate.map_err(|error| broken(&error))?;
        if estate.version != ESTATE_VERSION {
            return Err(broken(&format!(
                "version {} of the estate is not supported",
                estate.version
            )));
        }
        let changed = Rc::<Event>::default();
        let node = Child::new(core, estate.node, next()?, &changed);
        let node = node.map_err(|error| broken(&error))?;
        node.set_begun(Ok(()));
        node.set_serving();
        let state = match (estate.locked, state_directory(config)) {
            (true, Some(path)) => Some(State::open_locked(core, &path, next()?).await?),
            (true, None) => return Err(broken(&"there is no state directory any more")),
            (false, _) => None,
        };
        let admin = match estate.admin {
            Some(path) => {
                let door = UnixListener::from_fd(core, next()?).map_err(|error| broken(&error))?;
                Some((path, door))
            }
            None => None,
        };
        let resources = LocalResources::new(core, &config.disks, state);
        resources.set_limits_in_memory(estate.limits);
        resources.events().import(estate.events);
        let mut open = BTreeMap::new();
        let last = estate.open.iter().filter_map(|disk| disk.kept).max();
        let store = Store::of_manager(last.map_or(0, |last| last + 1));
        for DiskText { spec, holes, memory, line, kept, door } in estate.open {
            let descriptors = of_disk(core, next()?).await.map_err(|why| broken(&why))?;
            let (memory, line, rest) = parted(descriptors, memory, line);
            serve_line(core, &spec, line.as_ref()).map_err(|error| broken(&error))?;
            let door = FrontDoor::import(core, &spec.name, door, rest);
            let door = door.map_err(|error| broken(&error))?;
            let disk = OpenDisk { spec, holes, memory, line, door };
            if let Some(store) = &store {
                disk.keep_in(core, store);
                kept.iter().for_each(|&number| store.remove(number));
            }
            open.insert(disk.spec.name.clone(), disk);
            // Guests on this processor wait meanwhile.
            core.sleep_ns(BREATH_NS).await;
        }
        let disks_door = if estate.takes_disks { Some(next()?) } else { None };
        // The configuration may have another address now, or none.
        let disks_door = match (config.moves, disks_door) {
            (None, _) => None,
            (Some(addr), Some(door)) if is_at(&door, addr) => Some(door),
            (Some(addr), _) => match listen_for_disks(core, addr).await {
                Ok(door) => Some(door),
                Err(error) => {
                    tracing::error!("no disks come from other nodes: {error}");
                    None
                }
            },
        };
        if estate.survivor {
            node.set_survivor(next()?.into());
        }
        node.work.replace(if estate.work { Some(next()?) } else { None });
        let mut targets = BTreeMap::new();
        for text in estate.targets {
            let descriptors = of_disk(core, next()?).await.map_err(|why| broken(&why))?;
            let target = text.taken(core, descriptors).map_err(|error| broken(&error))?;
            targets.insert(target.spec.name.clone(), target);
        }
        let (node, poison, restored) = (Rc::new(node), Poison::of(estate.stand_still), false);
        Ok(Beginning {
            resources,
            admin,
            open,
            targets,
            node,
            poison,
            changed,
            disks_door,
            store,
            restored,
        })
    }
}

/// The descriptors of a disk, or of a device to which one is moved.
async fn of_disk(core: &Core, socket: OwnedFd) -> Result<Vec<OwnedFd>, String> {
    let limits = Limits { body_bytes: 0, descriptors: DISK_DESCRIPTORS };
    let frames = Frames::from_fd(core, socket, limits).map_err(|error| error.to_string())?;
    Ok(frames.receive().await?.descriptors)
}

/// The disks of a launcher that was killed. Its descriptors are in the service manager's store.
fn restore(
    core: &Core,
    store: &Rc<Store>,
    resources: &LocalResources,
    passed: Vec<(String, OwnedFd)>,
) -> BTreeMap<String, OpenDisk> {
    let known: Vec<_> = resources.disks().into_iter().map(|named| named.spec).collect();
    let mut open = BTreeMap::new();
    for left in store.left(core, passed) {
        let Left { spec, holes, memory, door: (state, of_door), changes, number } = left;
        if known.contains(&spec) {
            match FrontDoor::import(core, &spec.name, state, of_door) {
                Ok(door) => {
                    door.catch_up(changes);
                    let disk = OpenDisk { spec, holes, memory, line: None, door };
                    disk.keep_in(core, store);
                    if disk.door.is_connected() {
                        tracing::info!(disk = disk.spec.name, "its front end stays connected");
                    }
                    open.insert(disk.spec.name.clone(), disk);
                }
                Err(error) => tracing::error!(disk = spec.name, "it is connected anew: {error}"),
            }
        }
        // It is kept under another number now.
        store.remove(number);
    }
    open
}

/// Listens for disks of other nodes. A launcher that has just been killed may hold the port.
async fn listen_for_disks(core: &Core, addr: SocketAddr) -> Result<OwnedFd, Error> {
    let patience = Patience::with(Exclusive::Port(addr));
    let in_use = |error: &std::io::Error| {
        error.kind() == std::io::ErrorKind::AddrInUse && patience.lasts(core)
    };
    let listening = patiently(core, in_use, async || reactor::listen(addr, false)).await;
    listening.map_err(|error| no_port(addr, "--moves", &error))
}

/// Whether a socket has this address.
fn is_at(socket: &OwnedFd, addr: SocketAddr) -> bool {
    let own =
        socket.try_clone().and_then(|socket| std::net::TcpListener::from(socket).local_addr());
    own.is_ok_and(|own| own == addr || (addr.port() == 0 && own.ip() == addr.ip()))
}

/// A socket on which descriptors wait for its reader.
async fn left_in_a_socket(core: &Core, descriptors: &[OwnedFd]) -> Result<OwnedFd, String> {
    let failed = |error: std::io::Error| error.to_string();
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let limits = Limits { body_bytes: 0, descriptors: 0 };
    let frames = Frames::from_fd(core, ours.into(), limits).map_err(failed)?;
    frames.send(1, &[], descriptors).await?;
    Ok(OwnedFd::from(theirs))
}

impl Launcher {
    /// Returns only if it fails, with the reason.
    pub(super) async fn become_program(&self, node: &Child, program: &Path) -> String {
        let prepared = async {
            let failed = |error: std::io::Error| error.to_string();
            let lock =
                self.resources.state().map(State::lock).transpose().map_err(failed)?.flatten();
            let (mut disks, mut sockets) = (Vec::new(), Vec::new());
            for open in self.open.borrow().values() {
                let OpenDisk { spec, holes, memory, line, door } = open;
                let (state, own) = door.export().map_err(failed)?;
                let mut descriptors = of_device(memory, line.as_ref()).map_err(failed)?;
                descriptors.extend(own);
                let (spec, holes, memory) = (spec.clone(), *holes, memory.len());
                let (line, kept) = (line.is_some(), door.kept());
                let text = DiskText { spec, holes, memory, line, kept, door: state };
                disks.push((text, descriptors));
            }
            let mut open = Vec::new();
            for (text, descriptors) in disks {
                sockets.push(left_in_a_socket(&self.core, &descriptors).await?);
                open.push(text);
            }
            let all: Vec<_> = self.targets.borrow().values().map(TargetText::of).collect();
            let (mut targets, mut of_targets) = (Vec::new(), Vec::new());
            for target in all {
                let (text, descriptors) = target.map_err(failed)?;
                of_targets.push(left_in_a_socket(&self.core, &descriptors).await?);
                targets.push(text);
            }
            let survivor = node.survivor();
            let work = node.work.borrow().as_ref().map(OwnedFd::try_clone);
            let work = work.transpose().map_err(failed)?;
            let estate = Estate {
                version: ESTATE_VERSION,
                node: node.pid.as_raw(),
                admin: self.admin.clone(),
                locked: lock.is_some(),
                open,
                limits: self.resources.limits_in_memory(),
                events: self.resources.events().export(),
                takes_disks: self.disks_door.is_some(),
                survivor: survivor.is_some(),
                stand_still: self.poison.all(),
                work: work.is_some(),
                targets,
            };
            let text = serde_json::to_vec(&estate).map_err(|error| error.to_string())?;
            let kept = serde_json::to_string(&self.kept_config).map_err(|e| e.to_string())?;
            let memory =
                memfd_create(c"estate", MFdFlags::MFD_CLOEXEC).map_err(|e| e.to_string())?;
            let mut memory = std::fs::File::from(memory);
            memory.write_all(&text).and_then(|()| memory.rewind()).map_err(failed)?;
            let channel = node.stream.try_clone().map_err(failed)?;
            let mut descriptors = vec![OwnedFd::from(memory), channel.into()];
            descriptors.extend(lock);
            if let Some(door) = &self.door {
                descriptors.push(door.try_clone().map_err(failed)?);
            }
            descriptors.extend(sockets);
            if let Some(door) = &self.disks_door {
                descriptors.push(door.try_clone().map_err(failed)?);
            }
            descriptors.extend(survivor);
            descriptors.extend(work);
            descriptors.extend(of_targets);
            let (ours, theirs) = UnixStream::pair().map_err(failed)?;
            let limits = Limits { body_bytes: 0, descriptors: 0 };
            let frames = Frames::from_fd(&self.core, ours.into(), limits).map_err(failed)?;
            frames.send(1, &[], &descriptors).await?;
            nix::unistd::dup2_stdin(&theirs).map_err(|error| error.to_string())?;
            Ok::<_, String>((frames, kept))
        };
        // Nothing is moved any more that the next program would miss.
        self.each_door(|door| door.freeze());
        if self.closes() {
            self.each_door(FrontDoor::thaw);
            return "what a front end has sent is being closed".to_owned();
        }
        // The message stays in the socket; this end must stay open until it has been read.
        let (_frames, kept) = match prepared.await {
            Ok(prepared) => prepared,
            Err(why) => {
                self.each_door(FrontDoor::thaw);
                return why;
            }
        };
        let mut arguments = Vec::new();
        let mut variables = vec![format!("{RENEWED}={kept}").into_bytes()];
        arguments.extend(std::env::args_os().map(OsString::into_vec));
        // Descriptors of the service manager were taken long ago.
        let is_over = |name: &OsStr| name == RENEWED || name.as_bytes().starts_with(b"LISTEN_");
        for (name, value) in std::env::vars_os().filter(|(name, _)| !is_over(name)) {
            variables.push([name.as_bytes(), b"=", value.as_bytes()].concat());
        }
        let texts =
            |all: Vec<Vec<u8>>| all.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>();
        let (Ok(path), Ok(arguments), Ok(variables)) =
            (CString::new(program.as_os_str().as_bytes()), texts(arguments), texts(variables))
        else {
            self.each_door(FrontDoor::thaw);
            return "a text contains a zero byte".to_owned();
        };
        // The core's thread is pinned to one processor, and becomes the whole process.
        let mut all = CpuSet::new();
        let all_known = self.processors.iter().all(|processor| all.set(*processor).is_ok());
        if all_known {
            let _ = sched_setaffinity(Pid::from_raw(0), &all);
        }
        self.log.flush(LOG_PATIENCE);
        let Err(error) = execve(&path, &arguments, &variables);
        self.each_door(FrontDoor::thaw);
        error.to_string()
    }

    /// Whether descriptors of a front end are being admitted or closed: this program would wait for
    /// that when it ends.
    pub(super) fn closes(&self) -> bool {
        self.open.borrow().values().any(|open| open.door.is_busy())
    }

    fn each_door(&self, with: impl Fn(&Rc<FrontDoor>)) {
        self.open.borrow().values().for_each(|open| with(&open.door));
    }
}
