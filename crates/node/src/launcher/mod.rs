//! The launcher: the process that a user has started. It starts the node that serves guests, and
//! does for it what a confined process cannot do.
//!
//! ```text
//!   user, service manager          the launcher                       the node (confined)
//!   millrace serve    ---------->  lock the state directory, listen
//!                                  at the admin socket; start  ---->  listen for clients, confine itself,
//!                                                              <----  Begin
//!                                                              <----  Disks; Open, disk by disk
//!                                  open image, bind socket     ---->  serve the disk
//!                                                              <----  Serving
//!   disk attach  --------------->  note what was named; Run    ---->  check it
//!                                  open, bind (as above)       <----  Open, Keep
//!   SIGTERM  ------------------->  Stop                        ---->  drain, end
//!   SIGUSR2, upgrade  ---------->  start a successor, Begin with a line to the node; HandOver
//! ```
//!
//! 1. It trusts nothing that the node sends. Messages from the node are bounded, and descriptors
//!    are not accepted. The node names disks and never paths. It gets a disk only if an operator
//!    has named it: on the command line, in the configuration file, in the state directory, or in a
//!    request of the admin socket that is being run at this moment. Only such a request changes the
//!    state directory.
//! 2. It parses nothing that a guest has written, and its cores read no guest's memory.
//! 3. The node ends with the launcher, also when the launcher is killed: the kernel then kills the
//!    node, and a node whose socket is closed ends. The launcher ends with the node, with its exit
//!    code.
//! 4. It keeps no image open: the node that has an image holds its lock.
//! 5. Its process id stays the same over upgrades. When the predecessor has ended, the launcher
//!    replaces its own program by the new one, too (`execve`), and passes its descriptors to it.
//!    Until the new program resumes, the node sends nothing, and does not end with the launcher's
//!    threads.

pub(crate) mod channel;
pub(crate) mod confine;
pub(crate) mod frames;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::future::{Future, poll_fn};
use std::io::{Seek, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, execve};
use reactor::log::{Log, LogFile};
use reactor::{
    Class, Core, DriverKind, JoinHandle, PollMode, Program, RuntimeConfig, UnixListener,
};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::config::{Config, Sandbox};
use crate::disks::outside::{Begun, Here, Named, Opened, ToLauncher, ToNode, VERSION, remove};
use crate::disks::spec::DiskSpec;
use crate::disks::state::{State, remembers_disks};
use crate::error::{Error, Kind};
use crate::launcher::channel::{Channel, Question, saying};
use crate::launcher::frames::{Frames, Limits};
use crate::process::use_huge_pages;
use crate::serve::admin::{self, Commands, Request, upgraded};
use crate::serve::{LOG_PATIENCE, listen_admin, open_state, state_directory};
use crate::upgrade::{START_NS, Successor, own_program};

/// Tells a process that it is a node, and that its standard input is the socket to its launcher.
/// The value is the launcher's process id, a colon, and whether there is a node to take over from.
pub(crate) const VARIABLE: &str = "MILLRACE_LAUNCHER";
/// Tells a launcher that it continues with a running node; the estate comes on its standard input.
pub(crate) const RENEWED: &str = "MILLRACE_LAUNCHER_RENEWED";
/// The version of the estate.
const ESTATE_VERSION: u32 = 1;
/// Descriptors of the estate: the text, the channel, the lock, the admin socket.
const ESTATE_DESCRIPTORS: usize = 4;
/// How long clients at the admin socket may stay when the program is about to be replaced.
const CLIENTS_NS: u64 = 1_000_000_000;
/// Memory for buffers of the launcher's core.
const MEMORY_BYTES: usize = 4 << 20;
/// Maximum length of a node's message: the statistics of all disks are the longest.
pub(crate) const SAID_BYTES_MAX: usize = 32 << 20;
/// How long a node may take for a request of the admin socket.
const RUN_NS: u64 = 100_000_000_000;
/// How long a handover may take: the sum of its own limits, and a margin.
const HAND_OVER_NS: u64 = 30_000_000_000;
/// How long a node that has closed its socket may take to end.
const END_NS: u64 = 1_000_000_000;
/// How long a node may take to end after it was asked to: the limits of its clients and devices,
/// and the closing of its database.
const STOP_NS: u64 = 60_000_000_000;
/// How often the end of a process, and other conditions, are polled.
const LOOK_NS: u64 = 1_000_000;
/// How often a node is asked whether a waiting upgrade still makes sense.
const ASK_NS: u64 = 200_000_000;
/// Maximum number of disks being opened for a node. It opens them one after the other, except for
/// those that its predecessor has lost.
const OPENING_MAX: usize = 64;
/// How often the log file's name is checked.
const LOG_LOOK_NS: u64 = 1_000_000_000;

/// Whether a node needs a launcher: it has a guest to confine, or may get one.
pub(crate) fn is_wanted(config: &Config) -> bool {
    let named = || !config.disks.is_empty() || config.state.is_some() || config.admin.is_some();
    match config.sandbox {
        Sandbox::On => true,
        Sandbox::Off => false,
        Sandbox::Auto => named() || remembers_disks(),
    }
}

/// Launches a node, and returns its exit code when it has ended.
///
/// # Errors
/// When the state directory or the admin socket is not available, or the node cannot be started.
pub(crate) fn run(config: &Config, renewed: bool) -> Result<i32, Error> {
    use_huge_pages(false);
    let sink = crate::log::open(&config.log, None)?;
    let (log, _writer) = crate::log::start(&config.log, sink)?;
    // Use another processor than the node's cores, if there is one.
    let all = reactor::processors();
    let free = all.iter().rev().find(|processor| !config.processors.contains(processor));
    let processor = free.or(all.last()).copied().unwrap_or(0);
    let runtime = RuntimeConfig {
        processors: vec![processor],
        memory: MEMORY_BYTES,
        poll: PollMode::Never,
        driver: DriverKind::Epoll,
        log: Some(log.clone()),
        ..RuntimeConfig::default()
    };
    let (config, all) = (config.clone(), Arc::new(all));
    let ended = reactor::run(&runtime, move |core| {
        let (config, log, all) = (config.clone(), log.clone(), all.clone());
        async move {
            let beginning = match renewed {
                false => Beginning::first(&core, &config).await?,
                true => Beginning::renewed(&core, &config).await?,
            };
            Launcher::start(&core, &config, log, all, beginning)?.until_the_end().await
        }
    });
    let ended = ended.map_err(|error| Error::new(Kind::System, format!("a core: {error}")))?;
    ended.into_iter().next().expect("there is one core")
}

/// The launcher of a node.
struct Launcher {
    core: Core,
    log: Log,
    /// The processors that this process could use before its core was pinned.
    processors: Arc<Vec<usize>>,
    here: Here,
    admin: Option<PathBuf>,
    /// The admin socket, and the number of its clients.
    door: Option<OwnedFd>,
    clients: Rc<Cell<usize>>,
    /// The operators' requests that are being run.
    orders: RefCell<Vec<Order>>,
    /// The disks that a node has, by name.
    open: RefCell<BTreeMap<String, Open>>,
    /// The node that serves, or is to serve.
    current: RefCell<Rc<Node>>,
    /// Waits for another node to become the current one.
    replaced: RefCell<Option<Waker>>,
    upgrading: Cell<bool>,
    /// The number of upgrades that wait for the one before them.
    waiting: Cell<usize>,
    stopping: Cell<bool>,
    /// Whether signals are left to the next program, and the waiter for a signal.
    renewing: Cell<bool>,
    signals: RefCell<Option<Waker>>,
}

/// What a launcher starts with.
struct Beginning {
    here: Here,
    admin: Option<(PathBuf, UnixListener)>,
    open: BTreeMap<String, Open>,
    node: Rc<Node>,
}

/// What a launcher passes to the program that replaces it, beside descriptors: the channel to the
/// node, the state directory's lock, the admin socket.
#[derive(Debug, Serialize, Deserialize)]
struct Estate {
    version: u32,
    node: i32,
    admin: Option<PathBuf>,
    locked: bool,
    open: Vec<Open>,
}

/// A change that an operator has requested at the admin socket.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Order {
    Attach(DiskSpec),
    Detach(String),
}

/// A disk that a node has.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Open {
    spec: DiskSpec,
    holes: Option<bool>,
}

/// A node's process.
struct Node {
    pid: Pid,
    channel: Channel,
    /// The channel's socket.
    stream: UnixStream,
    /// The line to the predecessor, until the node asks for it.
    line: Cell<Option<OwnedFd>>,
    /// Whether it has begun, or why it was refused.
    begun: RefCell<Option<Result<(), String>>>,
    serving: Cell<bool>,
    /// The number of disks being opened for it.
    opening: Cell<usize>,
    ended: Cell<Option<WaitStatus>>,
    attended: RefCell<Option<JoinHandle<()>>>,
}

impl Node {
    /// For a process that has just been started, or that runs since before this program.
    fn new(core: &Core, pid: i32, socket: OwnedFd) -> std::io::Result<Node> {
        let stream = UnixStream::from(socket.try_clone()?);
        // No descriptors come from a node.
        let limits = Limits { body_bytes: SAID_BYTES_MAX, descriptors: 0 };
        Ok(Node {
            pid: Pid::from_raw(pid),
            channel: Channel::from_fd(core, socket, limits)?,
            stream,
            line: Cell::default(),
            begun: RefCell::default(),
            serving: Cell::new(false),
            opening: Cell::new(0),
            ended: Cell::new(None),
            attended: RefCell::default(),
        })
    }

    fn kill(&self) {
        // Until it has been waited for, no other process gets its process id.
        if self.ended.get().is_none() {
            let _ = nix::sys::signal::kill(self.pid, Signal::SIGKILL);
            // Its children may live on with its socket.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }

    /// Asks it to end in an orderly way, and kills it if it has not ended in time. The second
    /// signal kills it immediately.
    async fn end(self: Rc<Self>, core: Core) {
        let node = self.clone();
        core.spawn(Class::Control, async move {
            if let Err(error) = node.channel.ask(&ToNode::Stop, &[]).await {
                tracing::debug!(pid = node.pid.as_raw(), "cannot ask it to end: {error}");
            }
        });
        core.sleep_ns(STOP_NS).await;
        if self.ended.get().is_none() {
            let seconds = STOP_NS / 1_000_000_000;
            tracing::error!(pid = self.pid.as_raw(), "not ended within {seconds} s: killed");
            self.kill();
        }
    }

    /// Waits until it has ended.
    async fn until_it_ends(&self, core: &Core) -> Option<WaitStatus> {
        let attended = self.attended.borrow_mut().take();
        match attended {
            Some(attended) => attended.await,
            None => {
                while self.ended.get().is_none() {
                    core.sleep_ns(LOOK_NS).await;
                }
            }
        }
        self.ended.get()
    }
}

impl Beginning {
    async fn first(core: &Core, config: &Config) -> Result<Beginning, Error> {
        let state = open_state(core, config, || false).await?;
        let admin = listen_admin(core, config, state.is_some(), || false).await?;
        let own = own_program().map_err(|error| system("where this program is", &error))?;
        let node = spawn(core, &own, None).await.map_err(|why| Error::new(Kind::System, why))?;
        let here = Here::new(core, &config.disks, state);
        Ok(Beginning { here, admin, open: BTreeMap::new(), node })
    }

    /// Starts with the estate of the previous program.
    async fn renewed(core: &Core, config: &Config) -> Result<Beginning, Error> {
        let broken = |why: &dyn std::fmt::Display| system("cannot take the launcher's place", why);
        let limits = Limits { body_bytes: 0, descriptors: ESTATE_DESCRIPTORS };
        let socket = std::io::stdin().as_fd().try_clone_to_owned();
        let frames = socket.and_then(|socket| Frames::from_fd(core, socket, limits));
        let frame = frames.map_err(|error| broken(&error))?.receive().await;
        let mut descriptors = frame.map_err(|why| broken(&why))?.descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(|| broken(&"a descriptor is missing"));
        let estate: Estate = serde_json::from_reader(std::fs::File::from(next()?))
            .map_err(|error| broken(&error))?;
        if estate.version != ESTATE_VERSION {
            return Err(broken(&format!(
                "version {} of the estate is not supported",
                estate.version
            )));
        }
        let node = Node::new(core, estate.node, next()?).map_err(|error| broken(&error))?;
        node.begun.replace(Some(Ok(())));
        node.serving.set(true);
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
        let here = Here::new(core, &config.disks, state);
        let open = estate.open.into_iter().map(|open| (open.spec.name.clone(), open)).collect();
        Ok(Beginning { here, admin, open, node: Rc::new(node) })
    }
}

impl Launcher {
    fn start(
        core: &Core,
        config: &Config,
        log: Log,
        processors: Arc<Vec<usize>>,
        beginning: Beginning,
    ) -> Result<Rc<Launcher>, Error> {
        let Beginning { here, admin, open, node } = beginning;
        let (admin, listener) = admin.unzip();
        let door = listener.as_ref().map(|listener| listener.as_fd().try_clone_to_owned());
        let door = door.transpose().map_err(|error| system("the admin socket", &error))?;
        let launcher = Rc::new(Launcher {
            core: core.clone(),
            log,
            processors,
            here,
            admin,
            door,
            clients: Rc::default(),
            orders: RefCell::default(),
            open: RefCell::new(open),
            current: RefCell::new(node.clone()),
            replaced: RefCell::default(),
            upgrading: Cell::new(false),
            waiting: Cell::new(0),
            stopping: Cell::new(false),
            renewing: Cell::new(false),
            signals: RefCell::default(),
        });
        launcher.attend(&node);
        if node.serving.get() {
            let resuming = node.clone();
            core.spawn(Class::Control, async move {
                if let Err(error) = resuming.channel.ask(&ToNode::Resume, &[]).await {
                    tracing::error!("the node does not continue with its new launcher: {error}");
                    resuming.kill();
                }
            });
            tracing::info!(node = node.pid.as_raw(), "this program is the launcher now");
        }
        if let Some(listener) = listener {
            let operators = Rc::new(Operators(launcher.clone()));
            let serving = admin::serve(listener, operators, launcher.clients.clone());
            core.spawn(Class::Control, serving);
        }
        core.spawn(Class::Control, launcher.clone().watch_signals());
        if let Some(path) = &config.log.file {
            core.spawn(Class::Background, launcher.clone().watch_log(path.clone()));
        }
        Ok(launcher)
    }

    /// Returns when the serving node has ended, with the exit code.
    async fn until_the_end(self: Rc<Self>) -> Result<i32, Error> {
        let status = loop {
            let node = self.current.borrow().clone();
            // A node that has handed over may wait for a device, long after its successor has
            // ended.
            let is_current = || Rc::ptr_eq(&node, &self.current.borrow());
            let mut end = pin!(node.until_it_ends(&self.core));
            let ended = poll_fn(|cx| {
                if !is_current() {
                    return Poll::Ready(None);
                }
                self.replaced.replace(Some(cx.waker().clone()));
                end.as_mut().poll(cx).map(Some)
            });
            if let Some(status) = ended.await
                && is_current()
                && !self.upgrading.get()
            {
                break status;
            }
            self.core.sleep_ns(LOOK_NS).await;
        };
        let left = self.open.take();
        left.values().for_each(|open| remove(&open.spec.socket));
        if let Some(path) = &self.admin {
            remove(path);
        }
        Ok(match status {
            Some(WaitStatus::Exited(_, code)) => code,
            Some(WaitStatus::Signaled(_, signal, _)) => {
                tracing::error!("the node was ended by signal {}", signal as i32);
                128 + signal as i32
            }
            _ => 1,
        })
    }

    /// Answers a node's questions, and records its end.
    fn attend(self: &Rc<Self>, node: &Rc<Node>) {
        let (launcher, attended) = (self.clone(), node.clone());
        let attending = self.core.spawn(Class::Control, async move {
            let node = attended;
            loop {
                let question = match node.channel.next().await {
                    Ok(question) => question,
                    Err(why) => break tracing::debug!(pid = node.pid.as_raw(), "{why}"),
                };
                if matches!(question.read(), Ok(ToLauncher::Open { .. })) {
                    launcher.open(&node, question);
                    continue;
                }
                let answer = launcher.answer(&node, &question).await;
                if let Err(why) = node.channel.answer(&question, answer).await {
                    break tracing::warn!(pid = node.pid.as_raw(), "{why}");
                }
            }
            let core = &launcher.core;
            let until_ns = core.now_ns() + END_NS;
            let status = loop {
                match waitpid(node.pid, Some(WaitPidFlag::WNOHANG)) {
                    Ok(WaitStatus::StillAlive) => {}
                    Ok(status) => break status,
                    Err(_) => break WaitStatus::Exited(node.pid, 1),
                }
                if core.now_ns() > until_ns {
                    node.kill();
                }
                core.sleep_ns(LOOK_NS).await;
            };
            node.ended.set(Some(status));
        });
        node.attended.replace(Some(attending));
    }

    /// Opens a disk for a node. That may take patience, so other requests do not wait for it.
    fn open(self: &Rc<Self>, node: &Rc<Node>, question: Question) {
        let (launcher, node) = (self.clone(), node.clone());
        self.core.spawn(Class::Control, async move {
            let count = node.opening.get();
            node.opening.set(count + 1);
            let answer = match count < OPENING_MAX {
                true => launcher.answer(&node, &question).await,
                false => Err(Error::new(
                    Kind::System,
                    format!("{OPENING_MAX} disks are being opened already"),
                )),
            };
            if let Err(why) = node.channel.answer(&question, answer).await {
                tracing::warn!(pid = node.pid.as_raw(), "{why}");
            }
            node.opening.set(node.opening.get() - 1);
        });
    }

    async fn answer(
        &self,
        node: &Rc<Node>,
        question: &Question,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
        match question.read()? {
            ToLauncher::Begin { version } => {
                if version != VERSION {
                    let why = format!(
                        "it uses version {version} of the launcher's protocol, not {VERSION}"
                    );
                    node.begun.replace(Some(Err(why.clone())));
                    return Err(Error::new(Kind::Unsupported, why));
                }
                node.begun.replace(Some(Ok(())));
                let open = self.open.borrow();
                let holes = open.iter().map(|(name, open)| (name.clone(), open.holes)).collect();
                let (admin, remembers) = (self.admin.clone(), self.here.remembers());
                let (text, _) = saying(&Begun { admin, remembers, holes })?;
                Ok((text, node.line.take().into_iter().collect()))
            }
            ToLauncher::Disks => saying(&self.here.disks()),
            ToLauncher::Serving => {
                node.serving.set(true);
                saying(&())
            }
            ToLauncher::Open { name } => {
                let spec = self.named(&name)?;
                let (parts, socket) = self.here.parts(&spec).await?;
                let write_cache = self.here.write_cache(&spec.socket);
                let (text, _) = saying(&Opened { holes: parts.holes, write_cache })?;
                self.open.borrow_mut().insert(name, Open { spec, holes: parts.holes });
                let mut descriptors = parts.descriptors;
                descriptors.push(socket);
                Ok((text, descriptors))
            }
            ToLauncher::Close { name } => {
                let closed = self.open.borrow_mut().remove(&name);
                if let Some(open) = closed {
                    remove(&open.spec.socket);
                }
                saying(&())
            }
            ToLauncher::Keep { name } => {
                let ordered = |order: &Order| match order {
                    Order::Attach(spec) if spec.name == name => Some(spec.clone()),
                    _ => None,
                };
                let spec = self.orders.borrow().iter().find_map(ordered);
                let spec = spec.ok_or_else(|| unasked(&name, "kept"))?;
                self.here.keep(&spec).await?;
                saying(&())
            }
            ToLauncher::Forget { name } => {
                if !self.orders.borrow().contains(&Order::Detach(name.clone())) {
                    return Err(unasked(&name, "forgotten"));
                }
                let open = self.open.borrow().get(&name).map(|open| open.spec.clone());
                let known = || self.here.disks().into_iter().map(|named| named.spec);
                let spec = open.or_else(|| known().find(|spec| spec.name == name));
                if let Some(spec) = spec {
                    self.here.forget(&spec).await?;
                }
                saying(&())
            }
            ToLauncher::WriteCache { name, told } => {
                let socket = self.open.borrow().get(&name).map(|open| open.spec.socket.clone());
                let socket = socket.ok_or_else(|| unasked(&name, "known"))?;
                self.here.keep_write_cache(&socket, told).await?;
                saying(&())
            }
        }
    }

    /// A disk that an operator has named.
    fn named(&self, name: &str) -> Result<DiskSpec, Error> {
        for order in self.orders.borrow().iter() {
            match order {
                Order::Attach(spec) if spec.name == name => return Ok(spec.clone()),
                _ => {}
            }
        }
        let mut all = self.here.disks().into_iter();
        let known = all.find(|Named { spec, .. }| spec.name == name);
        known.map(|named| named.spec).ok_or_else(|| unasked(name, "opened"))
    }

    /// Passes signals on: the first asks the node to end, the second ends all processes.
    async fn watch_signals(self: Rc<Self>) {
        loop {
            let signal = match self.next_signal().await {
                Some(Ok(signal)) => signal,
                // Later signals are for the program that replaces this one.
                None => {
                    self.core.sleep_ns(LOOK_NS).await;
                    continue;
                }
                Some(Err(error)) => {
                    tracing::error!(
                        "cannot wait for signals: {error}; only SIGKILL ends this node"
                    );
                    return;
                }
            };
            if signal == reactor::UPGRADE {
                let launcher = self.clone();
                self.core.spawn(Class::Control, async move {
                    // The outcome is logged.
                    let to = async |program: &Path| launcher.upgrade(program).await;
                    drop(upgraded(None, to).await);
                });
                continue;
            }
            let node = self.current.borrow().clone();
            // A node that has just taken over does not serve yet, but ends in an orderly way.
            let starts = !node.serving.get() && !self.upgrading.get();
            if self.stopping.replace(true) || starts {
                node.kill();
                self.log.flush(LOG_PATIENCE);
                std::process::exit(128 + signal);
            }
            self.core.spawn(Class::Control, node.end(self.core.clone()));
        }
    }

    /// The next signal; `None` while signals are left to the next program.
    async fn next_signal(&self) -> Option<std::io::Result<i32>> {
        let mut signal = pin!(reactor::signal(&self.core));
        poll_fn(|cx| {
            if self.renewing.get() {
                return Poll::Ready(None);
            }
            self.signals.replace(Some(cx.waker().clone()));
            signal.as_mut().poll(cx).map(Some)
        })
        .await
    }

    /// Hands the node the next log file when its file has been renamed.
    async fn watch_log(self: Rc<Self>, path: PathBuf) {
        let Ok(mut file) = LogFile::open(&path) else { return };
        loop {
            self.core.sleep_ns(LOG_LOOK_NS).await;
            let Ok(Some(renewed)) = file.renewed() else { continue };
            let Ok(renewed) = renewed.as_fd().try_clone_to_owned() else { continue };
            let node = self.current.borrow().clone();
            if let Err(error) = node.channel.ask(&ToNode::Log, &[renewed]).await {
                tracing::warn!(pid = node.pid.as_raw(), "cannot hand it a log file: {error}");
            }
        }
    }

    /// Makes a program take over from the node. Logs the outcome, too.
    async fn upgrade(self: &Rc<Self>, program: &Path) -> Result<Successor, String> {
        // The previous upgrade may not have ended, or its successor may not serve yet.
        let since_ns = self.core.now_ns();
        self.waiting.set(self.waiting.get() + 1);
        let (mut asked_ns, mut refused) = (0, None);
        while self.upgrading.get() && self.core.now_ns() < since_ns + START_NS && refused.is_none()
        {
            if self.core.now_ns() >= asked_ns + ASK_NS {
                refused = self.why_not().await;
                asked_ns = self.core.now_ns();
            }
            self.core.sleep_ns(LOOK_NS).await;
        }
        self.waiting.set(self.waiting.get() - 1);
        if let Some(why) = refused {
            return Err(why);
        }
        let old = self.current.borrow().clone();
        if self.stopping.get() || !old.serving.get() || self.upgrading.replace(true) {
            return Err("not now: the node is starting, ending or being upgraded".to_owned());
        }
        tracing::info!(program = %program.display(), "starting a successor");
        let replaced = self.replace(&old, program).await;
        match &replaced {
            Ok(Successor { pid, .. }) => {
                tracing::info!(successor = pid, "handed over: the old process is ending");
                if self.stopping.get() {
                    // The old process was asked to end, but too late.
                    let node = self.current.borrow().clone();
                    self.core.spawn(Class::Control, node.end(self.core.clone()));
                }
                let (launcher, program) = (self.clone(), program.to_owned());
                self.core.spawn(Class::Control, async move {
                    launcher.renew(&old, &program).await;
                    launcher.upgrading.set(false);
                });
            }
            Err(why) => {
                self.upgrading.set(false);
                tracing::error!(program = %program.display(), "no upgrade, this node continues: {why}");
            }
        }
        replaced
    }

    /// Why the node cannot hand over, if it gives a reason.
    async fn why_not(&self) -> Option<String> {
        let node = self.current.borrow().clone();
        if !node.serving.get() {
            return None;
        }
        // A node of another version does not know the question.
        let asked = node.channel.ask(&ToNode::MayHandOver, &[]);
        let answer = within(&self.core, ASK_NS, asked).await.ok()?;
        answer.read::<Option<String>>().ok()?
    }

    async fn replace(self: &Rc<Self>, old: &Node, program: &Path) -> Result<Successor, String> {
        let system = |error: std::io::Error| format!("starting {}: {error}", program.display());
        let (ours, theirs) = UnixStream::pair().map_err(system)?;
        let node = spawn(&self.core, program, Some(theirs.into())).await?;
        self.attend(&node);
        let asked_ns = Cell::new(0);
        let handed = async {
            // A program that is not a node, or does not know launchers, never begins.
            let since_ns = self.core.now_ns();
            while node.begun.borrow().is_none() {
                if node.ended.get().is_some() {
                    return Err("starting: the other process has gone".to_owned());
                }
                if self.stopping.get() {
                    return Err("ending: this node was told to end".to_owned());
                }
                if self.core.now_ns() > since_ns + START_NS {
                    let seconds = START_NS / 1_000_000_000;
                    return Err(format!("starting: not done within {seconds} s"));
                }
                self.core.sleep_ns(LOOK_NS).await;
            }
            node.begun.borrow().clone().expect("it has just been looked at")?;
            let line = [ours.into()];
            asked_ns.set(self.core.now_ns());
            let asked = old.channel.ask(&ToNode::HandOver, &line);
            let answer = within(&self.core, HAND_OVER_NS, asked).await;
            answer.and_then(|answer| answer.read::<u64>()).map_err(|error| error.to_string())
        };
        match handed.await {
            Ok(pause_us) => {
                self.make_current(&node);
                Ok(Successor { pid: node.pid.as_raw() as u32, pause_us })
            }
            Err(why) => {
                // A process that has closed its end is about to end.
                self.core.sleep_ns(5 * LOOK_NS).await;
                if self.has_taken_over(old, &node).await {
                    tracing::warn!("the node before ended while it handed over: {why}");
                    self.make_current(&node);
                    let pause_us = (self.core.now_ns() - asked_ns.get()) / 1000;
                    return Ok(Successor { pid: node.pid.as_raw() as u32, pause_us });
                }
                let by_itself = node.ended.get();
                node.kill();
                node.until_it_ends(&self.core).await;
                Err(match by_itself {
                    Some(WaitStatus::Exited(_, code)) => format!("{why} (exit status: {code})"),
                    Some(WaitStatus::Signaled(_, signal, _)) => format!("{why} ({signal})"),
                    _ => why,
                })
            }
        }
    }

    fn make_current(&self, node: &Rc<Node>) {
        self.current.replace(node.clone());
        if let Some(waiting) = self.replaced.take() {
            waiting.wake();
        }
    }

    /// Whether a successor serves although its predecessor has not reported the handover, because
    /// the predecessor has ended. Without the token the successor would have ended, too.
    async fn has_taken_over(&self, old: &Node, node: &Node) -> bool {
        let since_ns = self.core.now_ns();
        let patient = || self.core.now_ns() < since_ns + START_NS && !self.stopping.get();
        while old.ended.get().is_some()
            && node.ended.get().is_none()
            && !node.serving.get()
            && patient()
        {
            self.core.sleep_ns(LOOK_NS).await;
        }
        old.ended.get().is_some() && node.ended.get().is_none() && node.serving.get()
    }

    /// Replaces this program by the node's, once the predecessor has ended. Returns if that is not
    /// possible, or not wanted any more: then this program continues.
    async fn renew(self: &Rc<Self>, old: &Node, program: &Path) {
        let core = &self.core;
        let node = self.current.borrow().clone();
        while (old.ended.get().is_none() || !node.serving.get()) && node.ended.get().is_none() {
            core.sleep_ns(LOOK_NS).await;
        }
        let since_ns = core.now_ns();
        let unwanted =
            || self.stopping.get() || self.waiting.get() > 0 || node.ended.get().is_some();
        // Clients that stay longer are disconnected.
        let patient = || core.now_ns() < since_ns + CLIENTS_NS;
        while self.clients.get() > 0 && patient() && !unwanted() {
            core.sleep_ns(LOOK_NS).await;
        }
        if unwanted() {
            return;
        }
        // From here on, incoming messages wait in the sockets.
        if let Err(error) = node.channel.ask(&ToNode::Hold, &[]).await {
            return tracing::warn!("the launcher stays as it is: {error}");
        }
        self.renewing.set(true);
        if let Some(waker) = self.signals.take() {
            waker.wake();
        }
        // The node's earlier requests are answered first.
        while self.here.state().is_some_and(State::is_writing) || node.opening.get() > 0 {
            core.sleep_ns(LOOK_NS).await;
        }
        if !unwanted() {
            let why = self.become_program(&node, program).await;
            tracing::warn!(program = %program.display(), "the launcher stays as it is: {why}");
        }
        self.renewing.set(false);
        if let Err(error) = node.channel.ask(&ToNode::Resume, &[]).await {
            tracing::error!("the node does not continue: {error}");
            node.kill();
        }
    }

    /// Returns only if it fails, with the reason.
    async fn become_program(&self, node: &Node, program: &Path) -> String {
        let prepared = async {
            let failed = |error: std::io::Error| error.to_string();
            let lock = self.here.state().map(State::lock).transpose().map_err(failed)?.flatten();
            let estate = Estate {
                version: ESTATE_VERSION,
                node: node.pid.as_raw(),
                admin: self.admin.clone(),
                locked: lock.is_some(),
                open: self.open.borrow().values().cloned().collect(),
            };
            let text = serde_json::to_vec(&estate).map_err(|error| error.to_string())?;
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
            let (ours, theirs) = UnixStream::pair().map_err(failed)?;
            let limits = Limits { body_bytes: 0, descriptors: 0 };
            let frames = Frames::from_fd(&self.core, ours.into(), limits).map_err(failed)?;
            frames.send(1, &[], &descriptors).await?;
            nix::unistd::dup2_stdin(&theirs).map_err(|error| error.to_string())?;
            Ok::<_, String>(frames)
        };
        // The message stays in the socket; this end must stay open until it has been read.
        let _frames = match prepared.await {
            Ok(frames) => frames,
            Err(why) => return why,
        };
        let mut arguments = Vec::new();
        let mut variables = vec![format!("{RENEWED}=1").into_bytes()];
        arguments.extend(std::env::args_os().map(OsString::into_vec));
        for (name, value) in std::env::vars_os().filter(|(name, _)| name != RENEWED) {
            variables.push([name.as_bytes(), b"=", value.as_bytes()].concat());
        }
        let texts =
            |all: Vec<Vec<u8>>| all.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>();
        let (Ok(path), Ok(arguments), Ok(variables)) =
            (CString::new(program.as_os_str().as_bytes()), texts(arguments), texts(variables))
        else {
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
        error.to_string()
    }

    /// Lets the node run a request of the admin socket.
    async fn relay(&self, request: Request) -> Result<String, Error> {
        let node = self.current.borrow().clone();
        let run = ToNode::Run { request };
        let answer = within(&self.core, RUN_NS, node.channel.ask(&run, &[])).await?;
        // The answer goes to the operator's program as it is, so it must be one line of JSON.
        let line = !answer.body.contains(&b'\n') && answer.read::<IgnoredAny>().is_ok();
        let text = String::from_utf8(answer.body).ok().filter(|_| line);
        text.ok_or_else(|| Error::new(Kind::System, "the node's answer is not one line of JSON"))
    }
}

/// The clients of the admin socket.
struct Operators(Rc<Launcher>);

impl Commands for Operators {
    fn core(&self) -> &Core {
        &self.0.core
    }

    async fn run(&self, request: Request) -> Result<String, Error> {
        let launcher = &self.0;
        let order = match &request {
            Request::DiskAttach { disk } => Some(Order::Attach(disk.clone())),
            Request::DiskDetach { name, .. } => Some(Order::Detach(name.clone())),
            Request::Upgrade { program } => {
                let to = async |program: &Path| launcher.upgrade(program).await;
                let done = upgraded(program.clone(), to).await?;
                return Ok(done.as_json().to_string());
            }
            _ => None,
        };
        launcher.orders.borrow_mut().extend(order.clone());
        let done = launcher.relay(request).await;
        if let Some(order) = order {
            let mut orders = launcher.orders.borrow_mut();
            let at = orders.iter().position(|one| *one == order);
            at.map(|at| orders.swap_remove(at));
        }
        done
    }
}

fn unasked(name: &str, done: &str) -> Error {
    Error::new(Kind::Usage, format!("nobody has asked for disk {name} to be {done}"))
}

/// Starts a node, which takes over at a line if there is one.
async fn spawn(core: &Core, program: &Path, line: Option<OwnedFd>) -> Result<Rc<Node>, String> {
    let system = |error: std::io::Error| format!("starting {}: {error}", program.display());
    let (ours, theirs) = UnixStream::pair().map_err(system)?;
    let role = if line.is_some() { "successor" } else { "first" };
    let variable = OsString::from(format!("{}:{role}", std::process::id()));
    let program = Program {
        path: program.to_owned(),
        arguments: std::env::args_os().skip(1).collect(),
        variables: vec![(VARIABLE.into(), variable)],
        input: Arc::new(theirs.into()),
    };
    // The node is waited for by its process id.
    let child = core.start_process(program).await.map_err(system)?;
    let node = Node::new(core, child.id() as i32, ours.into()).map_err(system)?;
    node.line.set(line);
    Ok(Rc::new(node))
}

fn system(what: &str, why: &dyn std::fmt::Display) -> Error {
    Error::new(Kind::System, format!("{what}: {why}"))
}

/// Waits for an answer for at most `ns`.
async fn within<T>(
    core: &Core,
    ns: u64,
    done: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let (mut done, mut late) = (pin!(done), pin!(core.sleep_ns(ns)));
    poll_fn(|cx| match (done.as_mut().poll(cx), late.as_mut().poll(cx)) {
        (Poll::Ready(done), _) => Poll::Ready(done),
        (Poll::Pending, Poll::Ready(())) => {
            let what = format!("the node has not answered within {} s", ns / 1_000_000_000);
            Poll::Ready(Err(Error::new(Kind::System, what)))
        }
        (Poll::Pending, Poll::Pending) => Poll::Pending,
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Machine, Settings};

    /// A new directory for a test.
    fn directory(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("millrace-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(&root).unwrap();
        root
    }

    fn one_core() -> RuntimeConfig {
        RuntimeConfig {
            processors: vec![reactor::processors()[0]],
            memory: MEMORY_BYTES,
            driver: DriverKind::Epoll,
            ..RuntimeConfig::default()
        }
    }

    /// A launcher whose node is played by the test.
    async fn launcher(core: &Core, root: &Path) -> (Rc<Launcher>, Rc<Node>) {
        let node = spawn(core, Path::new("/bin/true"), None).await.unwrap();
        let state = State::open(core, &root.join("state")).await.unwrap();
        let sink = Box::new(std::io::sink());
        let (log, _) = Log::start(Default::default(), "off".parse().unwrap(), sink).unwrap();
        let here = Here::new(core, &[disk(root, "asked")], Some(state));
        let beginning = Beginning { here, admin: None, open: BTreeMap::new(), node: node.clone() };
        let settings = Settings::from_toml("admin = 'none.sock'").unwrap();
        let config = Config::new(settings, &Machine::look()).unwrap();
        let launcher = Launcher::start(core, &config, log, Arc::default(), beginning).unwrap();
        (launcher, node)
    }

    fn disk(root: &Path, name: &str) -> DiskSpec {
        let root = root.display();
        format!("name={name} uri=file:{root}/{name}.img socket={root}/{name}.sock").parse().unwrap()
    }

    #[test]
    fn a_node_gets_what_an_operator_has_named_and_nothing_else() {
        let root = directory("launcher");
        for name in ["asked", "later", "other"] {
            let image = new_file(&root.join(format!("{name}.img")));
            image.set_len(1 << 20).unwrap();
        }
        let place = root.clone();
        reactor::run(&one_core(), move |core| {
            let root = place.clone();
            async move {
                let (launcher, node) = launcher(&core, &root).await;
                let say = async |text: &str| {
                    let answer = launcher.answer(&node, &Question::of(text)).await;
                    answer.map(|(_, descriptors)| descriptors.len()).map_err(|e| e.to_string())
                };
                let nobody = async |text: &str| {
                    let error = say(text).await.unwrap_err();
                    assert!(error.starts_with("nobody has asked for disk"), "{text}: {error}");
                };
                // A disk named at the start: an image and a socket.
                assert_eq!(say(r#"{"ask":"open","name":"asked"}"#).await, Ok(2));
                assert!(root.join("asked.sock").exists());
                // A disk that nobody has named, by any name.
                for name in ["other", "later", "", "../other", "/etc/passwd", "asked\0"] {
                    for ask in ["open", "keep", "forget", "write-cache"] {
                        let text = serde_json::json!({"ask": ask, "name": name}).to_string();
                        nobody(&text).await;
                    }
                    let close = serde_json::json!({"ask": "close", "name": name}).to_string();
                    assert_eq!(say(&close).await, Ok(0));
                }
                // No question takes a path.
                for text in [
                    r#"{"ask":"open","name":"asked","uri":"file:/etc/passwd"}"#,
                    r#"{"ask":"open","uri":"file:/etc/passwd"}"#,
                    r#"{"ask":"attach","name":"other"}"#,
                    r#"{"ask":"keep"}"#,
                    "[]",
                    "",
                ] {
                    assert!(say(text).await.is_err(), "{text}");
                }
                // A named disk is not stored or forgotten without an order either.
                nobody(r#"{"ask":"keep","name":"asked"}"#).await;
                nobody(r#"{"ask":"forget","name":"asked"}"#).await;

                // An operator's order applies to its disk, while it is being run.
                let order = Order::Attach(disk(&root, "later"));
                launcher.orders.borrow_mut().push(order);
                nobody(r#"{"ask":"open","name":"other"}"#).await;
                assert_eq!(say(r#"{"ask":"open","name":"later"}"#).await, Ok(2));
                assert_eq!(say(r#"{"ask":"keep","name":"later"}"#).await, Ok(0));
                nobody(r#"{"ask":"forget","name":"later"}"#).await;
                launcher.orders.borrow_mut().clear();
                nobody(r#"{"ask":"keep","name":"later"}"#).await;
                let kept = launcher.here.disks();
                let kept: Vec<_> = kept.iter().map(|named| &*named.spec.name).collect();
                assert_eq!(kept, ["asked", "later"]);
                let told = r#"{"ask":"write-cache","name":"later","told":false}"#;
                assert_eq!(say(told).await, Ok(0));
                let socket = root.join("later.sock");
                assert_eq!(launcher.here.write_cache(&socket), Some(false));

                launcher.orders.borrow_mut().push(Order::Detach("later".into()));
                assert_eq!(say(r#"{"ask":"forget","name":"later"}"#).await, Ok(0));
                assert_eq!(say(r#"{"ask":"close","name":"later"}"#).await, Ok(0));
                assert!(!socket.exists() && launcher.here.write_cache(&socket).is_none());
                assert_eq!(launcher.here.disks().len(), 1);

                let other = r#"{"ask":"begin","version":2}"#;
                assert!(say(other).await.unwrap_err().contains("version 2"));
                node.kill();
            }
        })
        .unwrap();
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[expect(clippy::disallowed_methods, reason = "a test's own file")]
    fn new_file(path: &Path) -> std::fs::File {
        std::fs::File::create(path).unwrap()
    }

    #[test]
    fn a_successor_that_serves_is_kept_when_the_node_before_it_has_ended() {
        let root = directory("replaced");
        let place = root.clone();
        reactor::run(&one_core(), move |core| {
            let root = place.clone();
            async move {
                let (launcher, old) = launcher(&core, &root).await;
                let next = || spawn(&core, Path::new("/bin/true"), None);
                let ended = Some(WaitStatus::Exited(Pid::from_raw(1), 0));
                // The old node lives, so the handover has failed for another reason.
                let node = next().await.unwrap();
                node.serving.set(true);
                old.ended.set(None);
                assert!(!launcher.has_taken_over(&old, &node).await);
                // It has ended; the successor reports a moment later that it serves, or ends, too.
                old.ended.set(ended);
                for serves in [true, false] {
                    let node = next().await.unwrap();
                    let (clock, later) = (core.clone(), node.clone());
                    let saying = core.spawn(Class::Control, async move {
                        clock.sleep_ns(3 * LOOK_NS).await;
                        match serves {
                            true => later.serving.set(true),
                            false => later.ended.set(ended),
                        }
                    });
                    assert_eq!(launcher.has_taken_over(&old, &node).await, serves);
                    saying.await;
                }
            }
        })
        .unwrap();
        std::fs::remove_dir_all(&root).unwrap();
    }

    /// A serving node that the test plays: the other end of its channel, which answers every
    /// question with this text.
    fn played(core: &Core, launcher: &Rc<Launcher>, says: &'static str) -> Rc<Channel> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let node = Rc::new(Node::new(core, i32::MAX, ours.into()).unwrap());
        node.serving.set(true);
        launcher.attend(&node);
        launcher.make_current(&node);
        let limits = Limits { body_bytes: SAID_BYTES_MAX, descriptors: 9 };
        let channel = Rc::new(Channel::from_fd(core, theirs.into(), limits).unwrap());
        let ear = channel.clone();
        core.spawn(Class::Control, async move {
            while let Ok(question) = ear.next().await {
                let answer = (says.as_bytes().to_vec(), Vec::new());
                ear.answer(&question, Ok(answer)).await.unwrap();
            }
        });
        channel
    }

    #[test]
    fn patience_with_one_disk_delays_nothing_else() {
        let root = directory("patient");
        new_file(&root.join("held.img")).set_len(1 << 20).unwrap();
        // Under another name, so that the holder is not found, which takes all patience.
        std::fs::hard_link(root.join("held.img"), root.join("asked.img")).unwrap();
        let place = root.clone();
        reactor::run(&one_core(), move |core| {
            let root = place.clone();
            async move {
                let (launcher, _) = launcher(&core, &root).await;
                let channel = played(&core, &launcher, "{}");
                // Another process has the image.
                let held = launcher.here.parts(&disk(&root, "held")).await.unwrap();
                let opened = Rc::new(Cell::new(false));
                let (done, asks) = (opened.clone(), channel.clone());
                core.spawn(Class::Control, async move {
                    let open = ToLauncher::Open { name: "asked".into() };
                    asks.ask(&open, &[]).await.unwrap();
                    done.set(true);
                });
                core.sleep_ns(20 * LOOK_NS).await;
                let listed = launcher.relay(Request::DiskList).await.unwrap();
                core.sleep_ns(20 * LOOK_NS).await;
                assert!(listed == "{}" && !opened.get(), "it waited until that was given up");
                drop(held);
                while !opened.get() {
                    core.sleep_ns(LOOK_NS).await;
                }
            }
        })
        .unwrap();
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn an_upgrade_is_refused_immediately_while_disks_follow() {
        let root = directory("follow");
        let place = root.clone();
        reactor::run(&one_core(), move |core| {
            let root = place.clone();
            async move {
                let (launcher, _) = launcher(&core, &root).await;
                let _channel = played(&core, &launcher, r#""disks are still on their way""#);
                launcher.upgrading.set(true);
                let since_ns = core.now_ns();
                let why = launcher.upgrade(Path::new("/bin/true")).await.unwrap_err();
                assert_eq!(why, "disks are still on their way");
                assert!(core.now_ns() < since_ns + START_NS / 2, "it waited for the old process");
            }
        })
        .unwrap();
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_node_that_may_have_disks_is_launched() {
        let wanted = |text: &str| {
            let settings = Settings::from_toml(text).unwrap();
            is_wanted(&Config::new(settings, &Machine::look()).unwrap())
        };
        let disk = "[[disk]]\nname='a'\nuri='null:1G'\nsocket='s'";
        assert!(wanted(disk) && wanted("state = 'd'") && wanted("admin = 'a.sock'"));
        assert!(!wanted(&format!("sandbox = 'off'\n{disk}")));
        assert!(wanted("data = 'd'\nsandbox = 'on'"));
    }
}
