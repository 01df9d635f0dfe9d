//! A confined node: what it opens first, how it confines itself, and its conversation with the
//! launcher.

use std::cell::OnceCell;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use reactor::log::{NextFile, Sink};
use reactor::{Class, Core, Event, Survivor};

use super::NodeState;
use super::commands::Admin;
use super::open::no_directory;
use super::phases::Phase;
use super::ports::{listen_on_all, no_nbd, no_port, patiently_now};
use crate::admin::Commands;
use crate::config::{Config, Sandbox};
use crate::disks::protocol::{Hello, ToLauncher, VERSION};
use crate::error::{Error, Kind};
use crate::ipc::channel::{Channel, json_answer};
use crate::ipc::frames::Limits;
use crate::launcher::confine::{Beneath, confine_calls, confine_paths};
use crate::launcher::to_node::ToNode;
use crate::launcher::{self, SAID_BYTES_MAX};
use crate::patience::Exclusive;
use crate::process::{executable, resident_bytes, working_directory};
use crate::upgrade::{Upgrader, room};

/// What a confined process has created before its confinement.
pub(super) struct Confined {
    /// The launcher's process id.
    pub launcher: u32,
    /// The socket to the launcher.
    pub channel: OwnedFd,
    /// The sockets for clients, for each door, and for metrics, unless the predecessor listens
    /// there.
    pub clients: Vec<Vec<OwnedFd>>,
    pub metrics: Option<OwnedFd>,
    /// The socket for NBD clients, in the same way.
    pub nbd: Option<OwnedFd>,
    /// Receives the next log file.
    pub log: NextFile,
    /// Makes this process end at once when it is killed.
    pub survivor: Option<Survivor>,
    /// The result of [`confine_paths`].
    pub paths: Result<bool, String>,
}

/// The link to the launcher.
pub(super) struct Link {
    pub channel: Rc<Channel>,
    pub hello: Hello,
    /// Runs the requests of the launcher's admin socket, once the node serves.
    pub admin: Rc<AdminSlot>,
}

/// The answer to a request of the launcher.
type Answered = Result<(Vec<u8>, Vec<OwnedFd>), Error>;

/// The commands of the node, once it serves.
#[derive(Default)]
pub(super) struct AdminSlot {
    admin: OnceCell<Admin>,
    filled: Event,
}

impl AdminSlot {
    pub fn fill(&self, admin: Admin) {
        let _ = self.admin.set(admin);
        self.filled.notify_all();
    }

    fn get(&self) -> Option<&Admin> {
        self.admin.get()
    }

    /// Waits until the node serves.
    async fn filled(&self) -> &Admin {
        self.filled.wait_for(|| self.admin.get()).await
    }
}

/// What the launcher that has started this process tells it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launched {
    /// The launcher's process id.
    pub launcher: u32,
    /// Another node serves meanwhile: the one to take over from, or the one whose death this one
    /// stands ready for.
    pub succeeds: bool,
    /// It stands ready. The launcher listens for it when it is needed: if this process did so in
    /// the moment in which the other node dies, the launcher could not.
    pub is_spare: bool,
}

/// What the launcher that has started this process tells it, if there is one.
pub(super) fn launcher_of_this_process() -> Option<Launched> {
    let text = std::env::var(launcher::VARIABLE).ok()?;
    let (launcher, role) = text.split_once(':')?;
    let launcher = launcher.parse().ok()?;
    Some(Launched { launcher, succeeds: role != "first", is_spare: role == "spare" })
}

/// Creates what a confined process cannot create any more, and confines this process as far as one
/// thread can, before it starts any other.
pub(super) fn confine(config: &Config, launched: Launched) -> Result<(Sink, Confined), Error> {
    let Launched { launcher, succeeds, is_spare } = launched;
    let system = |what: &str, error: &dyn std::fmt::Display| {
        Error::new(Kind::System, format!("{what}: {error}"))
    };
    let channel = std::io::stdin().as_fd().try_clone_to_owned();
    let channel =
        channel.map_err(|error| system("cannot duplicate the socket to the launcher", &error))?;
    let next = NextFile::default();
    let sink = crate::log::open(&config.log, Some(next.clone()))?;
    // Cache these now; the sandbox will hide them.
    resident_bytes();
    executable();
    working_directory();
    // If the predecessor listens there, it hands the sockets over.
    let handed = |error: Error| if succeeds { Ok(()) } else { Err(error) };
    let (mut clients, mut metrics) = (Vec::new(), None);
    if let Some(data) = &config.data {
        for door in config.doors() {
            let listen = || listen_on_all(door.addr, config.processors.len());
            clients.push(match patiently_now(Exclusive::Port(door.addr), succeeds, listen) {
                Ok(sockets) => sockets,
                Err(error) => {
                    handed(no_port(door.addr, door.flag, &error))?;
                    Vec::new()
                }
            });
        }
        if !config.read_only {
            make_directory_now(data)?;
        }
    }
    if let Some(addr) = config.metrics.filter(|_| !is_spare) {
        match patiently_now(Exclusive::Port(addr), succeeds, || reactor::listen(addr, false)) {
            Ok(socket) => metrics = Some(socket),
            Err(error) => handed(no_port(addr, "--metrics", &error))?,
        }
    }
    let mut nbd = None;
    if let Some(addr) = config.nbd.as_ref().filter(|_| !is_spare) {
        match patiently_now(addr.exclusive(), succeeds, || addr.listen()) {
            Ok(socket) => nbd = Some(socket),
            Err(error) => handed(no_nbd(addr, &error))?,
        }
    }
    // A database's memory is to be free before its successor needs as much.
    let survivor = match config.data {
        None => Survivor::prepare().inspect_err(no_survivor).ok(),
        Some(_) => None,
    };
    let data = config.data.as_deref().filter(|data| data.exists());
    let outside = data.map(lsm::outside).unwrap_or_default();
    let (writable, outside) = (!config.read_only, &outside[..]);
    let paths = confine_paths(data.map(|directory| Beneath { directory, writable, outside }));
    if config.sandbox == Sandbox::On && paths != Ok(true) {
        let why =
            paths.err().unwrap_or_else(|| "this kernel's Landlock is older than 6.12".to_owned());
        return Err(Error::new(Kind::System, format!("this node cannot be confined: {why}"))
            .hint("--sandbox auto confines it as far as possible"));
    }
    Ok((sink, Confined { launcher, channel, clients, metrics, nbd, log: next, survivor, paths }))
}

fn no_survivor(why: &std::io::Error) {
    tracing::warn!("guests will wait longer if this process is killed: no survivor of it: {why}");
}

/// Makes the kernel kill this process when its launcher ends. The setting belongs to the calling
/// thread: the same thread has to take it back.
fn end_with_launcher(launcher: u32) -> Result<(), Error> {
    nix::sys::prctl::set_pdeathsig(Some(nix::sys::signal::Signal::SIGKILL)).map_err(|error| {
        Error::new(Kind::System, format!("cannot end with the launcher: {error}"))
    })?;
    // The launcher may have ended before the call.
    match nix::unistd::getppid().as_raw() as u32 == launcher {
        true => Ok(()),
        false => Err(Error::new(Kind::System, "the launcher has ended")),
    }
}

/// Creates a database's directory, durably, unless it exists.
#[expect(clippy::disallowed_methods, reason = "start-up code, before any core runs")]
fn make_directory_now(data: &Path) -> Result<(), Error> {
    let made = match std::fs::create_dir(data) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
        Ok(()) => {
            let above = data.parent().filter(|above| *above != Path::new(""));
            std::fs::File::open(above.unwrap_or(Path::new("."))).and_then(|above| above.sync_all())
        }
    };
    made.map_err(|error| no_directory(data, &error))
}

/// What a launcher has sent with its first answer.
#[derive(Default)]
pub(super) struct FromLauncher {
    /// The line to the predecessor, if there is one to take over from.
    pub line: Option<OwnedFd>,
    /// The socket for metrics, if the launcher listens.
    pub metrics: Option<OwnedFd>,
    /// The socket for NBD clients, if the launcher listens.
    pub nbd: Option<OwnedFd>,
}

/// Confines all threads and starts the conversation with the launcher. A spare node waits here
/// until it is needed.
pub(super) async fn begin(
    core: &Core,
    node: &Arc<NodeState>,
    confined: &Confined,
    upgrader: &Rc<Upgrader>,
) -> Result<(Link, FromLauncher), Error> {
    end_with_launcher(confined.launcher)?;
    // No ring can be made afterwards.
    let all_run = || node.started.load(Ordering::Acquire) >= core.cores();
    node.phases.until(core.id(), all_run).await;
    let survivor = confined.survivor.as_ref().map(Survivor::start);
    let survivor = survivor.and_then(|pid| pid.inspect_err(no_survivor).ok());
    let calls = confine_calls(node.config.data.is_some());
    match (&confined.paths, &calls) {
        (Ok(true), Ok(())) => tracing::info!("confined: paths, system calls, network and signals"),
        (_, Err(why)) if node.config.sandbox == Sandbox::On => {
            return Err(Error::new(Kind::System, format!("this node cannot be confined: {why}"))
                .hint("--sandbox auto confines it as far as possible"));
        }
        (paths, calls) => {
            let (calls_ok, paths_ok) = (calls.is_ok(), paths.is_ok());
            let why = match (paths, calls) {
                (Err(why), _) | (_, Err(why)) => why,
                _ => "this kernel's Landlock is older than 6.12",
            };
            tracing::warn!(paths = paths_ok, calls = calls_ok, "only partly confined: {why}");
        }
    }
    // The largest message brings a disk's device and its socket.
    let descriptors = bdev::DESCRIPTORS_MAX + 1;
    let limits = Limits { body_bytes: SAID_BYTES_MAX, descriptors };
    let socket = confined.channel.try_clone();
    let channel = socket.and_then(|socket| Channel::from_fd(core, socket, limits));
    let channel = channel.map(Rc::new).map_err(|error| {
        Error::new(Kind::System, format!("cannot use the socket to the launcher: {error}"))
    })?;
    let admin = Rc::<AdminSlot>::default();
    let requests = Requests {
        core: core.clone(),
        node: node.clone(),
        channel: channel.clone(),
        upgrader: upgrader.clone(),
        admin: admin.clone(),
    };
    core.spawn(Class::Control, Rc::new(requests).run());
    if let Some(pid) = survivor {
        // An older launcher refuses the question, and does not kill a survivor that stays.
        let _ = channel.ask(&ToLauncher::Survivor { pid }, &[]).await;
    }
    let hello = channel.ask(&ToLauncher::Begin { version: VERSION }, &[]).await?;
    let link = Link { channel, hello: hello.read()?, admin };
    // A launcher of an earlier version does not know the question.
    if let Ok(answer) = link.channel.ask(&ToLauncher::WorkPage, &[]).await
        && let Some(page) = answer.descriptors.first()
        && let Err(error) = reactor::note_work_in(page)
    {
        tracing::warn!("if a disk makes this node die, nobody will know which one: {error}");
    }
    let mut descriptors = hello.descriptors;
    let mut last = |comes: bool| if comes { descriptors.pop() } else { None };
    let (nbd, metrics) = (last(link.hello.nbd), last(link.hello.metrics));
    let line = descriptors.pop();
    Ok((link, FromLauncher { line, metrics, nbd }))
}

/// The launcher's requests, and what they work on.
struct Requests {
    core: Core,
    node: Arc<NodeState>,
    channel: Rc<Channel>,
    upgrader: Rc<Upgrader>,
    admin: Rc<AdminSlot>,
}

impl Requests {
    /// Runs the requests, each in a task of its own.
    async fn run(self: Rc<Self>) {
        loop {
            let Ok(mut question) = self.channel.next().await else {
                // The launcher has ended: end as if killed.
                std::process::exit(1);
            };
            let requests = self.clone();
            self.core.spawn(Class::Control, async move {
                let descriptor = question.descriptors.pop();
                let (holds, answer) = match question.read::<ToNode>() {
                    Ok(ToNode::Hold) => (true, requests.hold().await),
                    Ok(wanted) => (false, requests.answer(wanted, descriptor).await),
                    Err(error) => (false, Err(error)),
                };
                let holds = holds && answer.is_ok();
                // If the launcher has ended, this process ends too.
                let _ = requests.channel.answer(&question, answer).await;
                if holds {
                    requests.channel.hold(true);
                }
            });
        }
    }

    async fn answer(&self, wanted: ToNode, descriptor: Option<OwnedFd>) -> Answered {
        let missing = || Error::new(Kind::System, "no descriptor came along");
        match wanted {
            ToNode::Run { request } => {
                let result = self.admin.filled().await.run(request).await;
                result.map(|text| (text.into(), Vec::new()))
            }
            ToNode::HandOver => {
                let line = descriptor.ok_or_else(missing)?;
                let handed = self.upgrader.to_line(line).await;
                let pause_us = handed.map_err(|why| Error::new(Kind::System, why))?;
                json_answer(&pause_us)
            }
            ToNode::MakeRoom { room } => {
                room::make(&self.core, if room { room::STARTS_NS } else { 0 }).await;
                json_answer(&())
            }
            ToNode::Settle => json_answer(&self.upgrader.settle().await),
            ToNode::MayHandOver => json_answer(&self.upgrader.may_hand_over().err()),
            ToNode::Stop => {
                tracing::info!(
                    "stopping: sending the replies in flight; a second signal ends the node immediately"
                );
                self.node.phases.raise(Phase::Draining);
                json_answer(&())
            }
            ToNode::Log => {
                let file = descriptor.ok_or_else(missing)?;
                if let Some(confined) = &self.node.confined {
                    confined.log.put(file);
                }
                json_answer(&())
            }
            ToNode::Hold => self.hold().await,
            ToNode::Resume => self.resume().await,
            ToNode::StartOthers => {
                if let Some(admin) = self.admin.get() {
                    admin.disks.start_others(&self.core).await;
                }
                json_answer(&())
            }
        }
    }

    /// Lets the node live on when the launcher ends.
    async fn hold(&self) -> Answered {
        let failed = |error| Error::new(Kind::System, format!("cannot live on: {error}"));
        nix::sys::prctl::set_pdeathsig(None).map_err(failed)?;
        room::make(&self.core, room::STARTS_NS).await;
        json_answer(&())
    }

    /// Makes the node end with its launcher again, which may have another program now.
    async fn resume(&self) -> Answered {
        let launcher = self.node.confined.as_ref().map(|confined| confined.launcher);
        if launcher.is_none_or(|launcher| end_with_launcher(launcher).is_err()) {
            std::process::exit(1);
        }
        self.channel.hold(false);
        room::make(&self.core, 0).await;
        json_answer(&())
    }
}
