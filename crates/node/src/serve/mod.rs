//! A node from start to end.
//!
//! 1. Signals are blocked, then cores started. Core 0 checks whether the port is free, opens the
//!    database and raises the phase to running; the other cores wait for that.
//! 2. Every core listens on the same address with a socket of its own and attaches its own reader.
//!    When all do, the node is ready, and reports that.
//! 3. The first signal raises the phase to draining: every core stops accepting, sends the replies
//!    in flight, and ends its connections after a grace period at the latest. When all cores have
//!    done so, core 0, which owns the shard, lets the shard finish its writes, and closes the
//!    database. Then the cores end and are joined; the reactor has its own deadline for disk
//!    operations. `SHUTDOWN` does the same.
//! 4. A second signal ends the process immediately, as does a first one before the node is ready:
//!    acknowledged writes are kept anyway.
//! 5. `SIGUSR2` hands the node over to a successor (`upgrade`).
//!
//! A core that cannot serve ends the node: otherwise the connections that the kernel hands to the
//! missing core would be lost.

pub(crate) mod admin;
pub(crate) mod info;
pub(crate) mod metrics;
pub(crate) mod open;
pub(crate) mod patience;
pub(crate) mod phases;

use std::cell::OnceCell;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kv::{Reporter, Server, Shard, Shared};
use lsm::{Db, OpenOptions, WriteOptions};
use reactor::log::{Log, NextFile, Sink};
use reactor::{Class, Core, JoinHandle, Listener, UnixListener};

use crate::config::{Config, Sandbox};
use crate::disks::outside::{Begun, Here, Outside, ToLauncher, ToNode, VERSION, patiently, remove};
use crate::disks::spec::DiskSpec;
use crate::disks::state::{State, default_state};
use crate::disks::{Disks, Served};
use crate::error::{Error, Kind};
use crate::launcher::channel::{Channel, saying};
use crate::launcher::confine::{Beneath, confine_calls, confine_paths};
use crate::launcher::frames::Limits;
use crate::launcher::{self, SAID_BYTES_MAX};
use crate::machine::Machine;
use crate::process::{
    descriptors_max, executable, raise_descriptors, resident_bytes, use_huge_pages,
};
use crate::room_for_clients::clients_max;
use crate::serve::admin::{Admin, Commands};
use crate::serve::info::Description;
use crate::serve::metrics::Sources;
use crate::serve::open::{no_directory, open, open_for_writing};
use crate::serve::patience::{Exclusive, Patience};
use crate::serve::phases::{Phase, Phases};
use crate::upgrade::{self, Predecessor, Upgrader, line_to_predecessor};

/// How long clients may take to receive replies in flight when the node stops.
const GRACE_NS: u64 = 5_000_000_000;
/// How long a process that ends immediately waits for its log.
pub(crate) const LOG_PATIENCE: Duration = Duration::from_millis(100);
/// How often core 0 polls whether all cores listen.
const LOOK_NS: u64 = 1_000_000;

/// What a node reports when it is ready.
#[derive(Clone, Debug)]
pub struct Ready {
    /// The database, if one is served.
    pub database: Option<Database>,
    /// The served disks, including those attached earlier.
    pub disks: Vec<DiskSpec>,
    /// The address of the metrics, if any.
    pub metrics: Option<SocketAddr>,
    /// The admin socket, if any.
    pub admin: Option<PathBuf>,
    /// The I/O driver in use.
    pub driver: &'static str,
}

/// A served database.
#[derive(Clone, Debug)]
pub struct Database {
    /// The address on which clients connect.
    pub listen: SocketAddr,
    /// The number of keys, approximate unless they are counted.
    pub keys: u64,
    /// Whether the number of keys is exact.
    pub counted: bool,
}

/// What a confined process has created before its confinement.
struct Confined {
    /// The launcher's process id.
    launcher: u32,
    /// The socket to the launcher.
    channel: OwnedFd,
    /// The sockets for clients and metrics, unless the predecessor listens there.
    clients: Vec<OwnedFd>,
    metrics: Option<OwnedFd>,
    /// Receives the next log file.
    log: NextFile,
    /// The result of [`confine_paths`].
    paths: Result<bool, String>,
}

/// The state that the cores share.
struct Node {
    config: Config,
    machine: Machine,
    log: Log,
    confined: Option<Confined>,
    /// The number of cores that run.
    started: AtomicUsize,
    phases: Phases,
    opened: OnceLock<Option<Opened>>,
    listening: AtomicUsize,
    /// Each core's listening socket for clients, to be handed over.
    doors: Vec<OnceLock<OwnedFd>>,
    /// The number of cores whose connections have ended.
    ended: AtomicUsize,
    failed: OnceLock<Error>,
}

/// The database that core 0 has opened for all cores.
struct Opened {
    listen: SocketAddr,
    db: Db,
    door: Arc<Shared>,
    /// Each core's listening socket.
    listeners: Vec<OwnedFd>,
}

/// Serves until a signal ends the node. `on_ready` is called once, when all cores listen.
///
/// # Errors
/// When the port is in use, the database cannot be opened, or a core cannot be started.
pub fn serve(
    config: Config,
    machine: Machine,
    on_ready: impl Fn(&Ready) + Clone + Send + 'static,
) -> Result<(), Error> {
    reactor::block_signals();
    let (descriptors_before, descriptors) = raise_descriptors();
    let launched = launcher_of_this_process();
    let renewed = launched.is_none() && std::env::var_os(launcher::RENEWED).is_some();
    let alone = launched.is_none() && line_to_predecessor()?.is_none();
    let succeeds = launched.map_or(!alone, |(_, succeeds)| succeeds);
    use_huge_pages(!succeeds && !config.has_little_memory());
    if renewed || (alone && launcher::is_wanted(&config)) {
        return match launcher::run(&config, renewed)? {
            0 => Ok(()),
            // The node has reported the reason.
            code => std::process::exit(code),
        };
    }
    let (sink, confined) = match launched {
        Some((launcher, succeeds)) => {
            let (sink, confined) = confine(&config, launcher, succeeds)?;
            (sink, Some(confined))
        }
        None => (crate::log::open(&config.log, None)?, None),
    };
    // Kept until the end of this function, when the writer writes what the cores logged.
    let (log, _writer) = crate::log::start(&config.log, sink)?;
    if descriptors > descriptors_before {
        tracing::info!(
            "raised the limit of descriptors from {descriptors_before} to {descriptors}"
        );
    }
    let runtime = config.runtime(log.clone(), confined.is_some());
    let cores = config.processors.len();
    let node = Arc::new(Node {
        config,
        machine,
        log,
        confined,
        started: AtomicUsize::new(0),
        phases: Phases::new(cores),
        opened: OnceLock::new(),
        listening: AtomicUsize::new(0),
        doors: (0..cores).map(|_| OnceLock::new()).collect(),
        ended: AtomicUsize::new(0),
        failed: OnceLock::new(),
    });
    let shared = node.clone();
    reactor::run(&runtime, move |core| {
        let (node, on_ready) = (shared.clone(), on_ready.clone());
        async move {
            if let Err(error) = serve_core(&core, &node, &on_ready).await {
                // Report the first failure; later ones follow from it.
                let _ = node.failed.set(error);
                node.phases.raise(Phase::Stopped);
            }
        }
    })
    .map_err(|error| Error::new(Kind::System, format!("cannot start the cores: {error}")))?;
    match node.failed.get() {
        Some(error) => Err(error.clone()),
        None => Ok(()),
    }
}

async fn serve_core(
    core: &Core,
    node: &Arc<Node>,
    on_ready: &impl Fn(&Ready),
) -> Result<(), Error> {
    let mut shard = None;
    let mut first = First::default();
    node.started.fetch_add(1, Ordering::AcqRel);
    if core.id() == 0 {
        let leaving = node.clone();
        let ending = node.clone();
        let leave = move || leaving.phases.raise(Phase::Draining);
        let upgrader = Upgrader::new(core, leave, move || ending.phases.now() > Phase::Running);
        let line = match &node.confined {
            None => {
                let (core, node, upgrader) = (core.clone(), node.clone(), upgrader.clone());
                core.clone().spawn(Class::Control, watch_signals(core, node, upgrader));
                line_to_predecessor()?
            }
            Some(confined) => {
                let (link, line) = begin(core, node, confined, &upgrader).await?;
                first.link = Some(link);
                line
            }
        };
        let own = |fd: &OwnedFd| fd.try_clone().ok();
        let early = node.confined.as_ref();
        let mut listeners: Vec<_> =
            early.iter().flat_map(|early| early.clients.iter().filter_map(own)).collect();
        let mut metrics = early.and_then(|early| own(early.metrics.as_ref()?));
        let mut predecessor = None;
        if let Some(line) = line {
            let holes = first.link.as_ref().map(|link| link.begun.holes.clone());
            let holes = holes.unwrap_or_default();
            let inherited = upgrade::inherit(core, &node.config, line, &holes).await?;
            first.taken = inherited.disks;
            if !inherited.clients.is_empty() {
                listeners = inherited.clients;
            }
            metrics = inherited.metrics.or(metrics);
            predecessor = Some(inherited.predecessor);
            use_huge_pages(!node.config.has_little_memory());
        }
        first.predecessor.clone_from(&predecessor);
        first.upgrader = Some(upgrader);
        first.metrics = match (node.config.metrics, metrics) {
            (None, _) => None,
            (Some(addr), Some(fd)) => Some(inherited_listener(core, addr, fd)?),
            (Some(addr), None) => Some(listen_alone(core, addr, "--metrics").await?),
        };
        let mut opened = None;
        if let Some(data) = &node.config.data {
            if listeners.is_empty() {
                let addr = node.config.listen;
                let patience = Patience::with(Exclusive::Port(addr));
                let in_use = |error: &std::io::Error| is_in_use(error) && patience.lasts(core);
                let listen = async || listen_on_all(addr, core.cores());
                let listening = patiently(core, in_use, listen).await;
                listeners = listening.map_err(|error| no_port(addr, "--listen", &error))?;
            }
            let (database, owned) = prepare(core, node, data, listeners, predecessor).await?;
            (opened, shard) = (Some(database), owned);
        }
        let _ = node.opened.set(opened);
        node.phases.raise(Phase::Running);
    }
    let served = serve_clients(core, node, on_ready, shard.clone(), first).await;
    let mut closed = Ok(());
    if let Some(shard) = shard {
        // Other cores may still wait for the shard's answers.
        while node.ended.load(Ordering::Acquire) < node.listening.load(Ordering::Acquire) {
            core.sleep_ns(LOOK_NS).await;
        }
        closed = shard.close().await;
    }
    if let Some(ending) = served? {
        ending.finish(core, node).await;
    }
    closed.map_err(|error| Error::new(Kind::System, format!("cannot close the database: {error}")))
}

/// What core 0 has to do in addition to the work of all cores.
#[derive(Default)]
struct First {
    metrics: Option<Listener>,
    taken: Vec<(Served, JoinHandle<()>)>,
    upgrader: Option<Rc<Upgrader>>,
    predecessor: Option<Rc<Predecessor>>,
    link: Option<Link>,
}

/// The link to the launcher.
struct Link {
    channel: Rc<Channel>,
    begun: Begun,
    /// Runs the requests of the launcher's admin socket, once the node serves.
    admin: Rc<OnceCell<Admin>>,
}

async fn serve_clients(
    core: &Core,
    node: &Node,
    on_ready: &impl Fn(&Ready),
    shard: Option<Shard>,
    first: First,
) -> Result<Option<Ending>, Error> {
    if node.phases.reached(core.id(), Phase::Running).await > Phase::Draining {
        return Ok(None);
    }
    let opened = node.opened.get().expect("core 0 has opened the database before it raised");
    let (mut disks, mut steering) = (Rc::new(Disks::default()), None);
    if core.id() == 0 {
        // The predecessor has the state directory and the admin socket until it has ended.
        let before = first.predecessor.clone();
        let before_holds = || before.as_ref().is_some_and(|before| before.may_hold_locks());
        let outside = match &first.link {
            Some(Link { channel, begun, .. }) => {
                Outside::Launcher(channel.clone(), begun.remembers)
            }
            None => {
                let state = open_state(core, &node.config, before_holds).await?;
                steering = listen_admin(core, &node.config, state.is_some(), before_holds).await?;
                let config = &node.config;
                let may_attach = config.sandbox == Sandbox::Off || launcher::is_wanted(config);
                Outside::Here(Here::new(core, &config.disks, state), may_attach)
            }
        };
        let following = before.as_ref().map(|before| before.following());
        let started = Disks::start(core, outside, first.taken, following).await;
        if let (Err(_), Some((path, _))) = (&started, &steering) {
            remove(path);
        }
        disks = Rc::new(started?);
        if let Some(before) = before {
            let (again, opener) = (core.clone(), disks.clone());
            let open = async move |spec: &DiskSpec| opener.open(&again, spec).await;
            core.spawn(Class::Control, disks.clone().follow(core.clone(), before, open));
        }
    }
    let (mut clients, mut admin_at) = (None, None);
    // Tasks that report and answer until a successor does.
    let mut telling = Vec::new();
    if let Some(opened) = opened {
        let listener = opened.listeners[core.id()].try_clone();
        let listener = listener.and_then(|fd| Listener::from_fd(core, fd));
        let listener = listener.map_err(|error| no_port(opened.listen, "--listen", &error))?;
        if let Some(Ok(fd)) = listener.host_fd().map(|fd| fd.try_clone_to_owned()) {
            let _ = node.doors[core.id()].set(fd);
        }
        let reader = opened.db.attach(core);
        let server = Server::start(core, reader.clone(), &opened.door, listener, shard);
        clients = Some((opened, server, reader));
    }
    node.listening.fetch_add(1, Ordering::AcqRel);
    if core.id() == 0 {
        while node.listening.load(Ordering::Acquire) < core.cores()
            && node.phases.now() == Phase::Running
        {
            core.sleep_ns(LOOK_NS).await;
        }
        if node.phases.now() == Phase::Running {
            let upgrader = first.upgrader.expect("core 0 has made one");
            let own = |fd: &OwnedFd| fd.try_clone().ok();
            let doors = node.doors.iter().filter_map(|door| own(door.get()?)).collect();
            let metrics = first.metrics.as_ref().and_then(Listener::host_fd);
            let metrics = metrics.and_then(|fd| fd.try_clone_to_owned().ok());
            upgrader.ready(disks.clone(), doors, metrics);
            let metrics = match first.metrics {
                Some(metrics) => {
                    let reporter = clients.as_ref().map(|(_, server, _)| server.reporter());
                    let (addr, task) = tell_metrics(core, node, reporter, disks.clone(), metrics)?;
                    telling.push(task);
                    Some(addr)
                }
                None => None,
            };
            let database = clients.as_ref().map(|(opened, _, reader)| {
                let counted = opened.db.keys();
                let keys = counted.or(reader.approximate_keys(0).ok()).unwrap_or(0);
                Database { listen: opened.listen, keys, counted: counted.is_some() }
            });
            let admin = |upgrader| {
                let reporter = clients.as_ref().map(|(_, server, _)| server.reporter());
                let (core, disks) = (core.clone(), disks.clone());
                Admin { core, disks, reporter, upgrader }
            };
            if let Some((path, listener)) = steering.take() {
                let admin = Rc::new(admin(Some(upgrader)));
                let answering = admin::serve(listener, admin, Rc::default());
                telling.push(core.spawn(Class::Control, answering));
                admin_at = Some(path);
            } else if let Some(link) = &first.link {
                let _ = link.admin.set(admin(None));
            }
            let (driver, cores) = (core.driver_name(), core.cores());
            match &database {
                Some(Database { listen, keys, .. }) => {
                    tracing::info!(%listen, driver, keys, cores, "serving");
                }
                None => tracing::info!(driver, cores, "serving"),
            }
            let mut served = Vec::new();
            disks.each(|disk| served.extend(disk.serving.is_ok().then(|| disk.spec.clone())));
            let link = first.link.as_ref();
            let admin = admin_at.clone().or_else(|| link?.begun.admin.clone());
            // Do this first: a process that has read that the node serves may ask it to end in an
            // orderly way.
            if let Some(link) = link {
                link.channel.ask(&ToLauncher::Serving, &[]).await?;
            }
            on_ready(&Ready { database, disks: served, metrics, admin, driver });
        }
    }
    let server = clients.map(|(_, server, _)| server);
    node.phases.reached(core.id(), Phase::Draining).await;
    if disks.have_left() {
        telling.drain(..).for_each(JoinHandle::cancel);
    }
    // Beside the clients: neither waits for the other.
    let stopping = {
        let (core, disks) = (core.clone(), disks.clone());
        core.clone().spawn(Class::Control, async move { disks.stop(&core).await })
    };
    if let Some(server) = server {
        server.stop(GRACE_NS).await;
    }
    node.ended.fetch_add(1, Ordering::AcqRel);
    Ok(Some(Ending { stopping, disks, admin_at }))
}

/// What remains of a core's work when its clients have gone.
struct Ending {
    stopping: JoinHandle<()>,
    disks: Rc<Disks>,
    admin_at: Option<PathBuf>,
}

impl Ending {
    async fn finish(self, core: &Core, node: &Node) {
        self.stopping.await;
        if let Some(path) = self.admin_at.filter(|_| !self.disks.have_left()) {
            remove(&path);
        }
        if core.id() == 0 {
            node.phases.raise(Phase::Stopped);
        } else {
            // Until then core 0 may have rings of its disks here.
            node.phases.reached(core.id(), Phase::Stopped).await;
        }
    }
}

/// The process id of the launcher that has started this process, and whether there is a node to
/// take over from.
fn launcher_of_this_process() -> Option<(u32, bool)> {
    let text = std::env::var(launcher::VARIABLE).ok()?;
    let (launcher, role) = text.split_once(':')?;
    Some((launcher.parse().ok()?, role == "successor"))
}

/// Creates what a confined process cannot create any more, and confines this process as far as one
/// thread can, before it starts any other.
fn confine(config: &Config, launcher: u32, succeeds: bool) -> Result<(Sink, Confined), Error> {
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
    // If the predecessor listens there, it hands the sockets over.
    let handed = |error: Error| if succeeds { Ok(()) } else { Err(error) };
    let (mut clients, mut metrics) = (Vec::new(), None);
    if let Some(data) = &config.data {
        let listen = || listen_on_all(config.listen, config.processors.len());
        match patiently_now(config.listen, succeeds, listen) {
            Ok(sockets) => clients = sockets,
            Err(error) => handed(no_port(config.listen, "--listen", &error))?,
        }
        if !config.read_only {
            make_directory_now(data)?;
        }
    }
    if let Some(addr) = config.metrics {
        match patiently_now(addr, succeeds, || reactor::listen(addr, false)) {
            Ok(socket) => metrics = Some(socket),
            Err(error) => handed(no_port(addr, "--metrics", &error))?,
        }
    }
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
    Ok((sink, Confined { launcher, channel, clients, metrics, log: next, paths }))
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

/// Listens before any core runs, with the patience of a core. A successor does not wait, because
/// its predecessor listens.
#[expect(clippy::disallowed_methods, reason = "start-up code, before any core runs")]
fn patiently_now<T>(
    addr: SocketAddr,
    succeeds: bool,
    listen: impl Fn() -> std::io::Result<T>,
) -> std::io::Result<T> {
    let (patience, since) = (Patience::with(Exclusive::Port(addr)), std::time::Instant::now());
    let now_ns = || u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
    loop {
        match listen() {
            Err(error) if is_in_use(&error) && !succeeds && patience.lasts_at(now_ns(), false) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            done => return done,
        }
    }
}

/// A socket for each core, if nobody else listens.
fn listen_on_all(addr: SocketAddr, cores: usize) -> std::io::Result<Vec<OwnedFd>> {
    let alone = std::net::TcpListener::from(reactor::listen(addr, false)?);
    let addr = alone.local_addr()?;
    drop(alone);
    (0..cores).map(|_| reactor::listen(addr, true)).collect()
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

/// Confines all threads and starts the conversation with the launcher. Returns the line to the
/// predecessor, if there is one to take over from.
async fn begin(
    core: &Core,
    node: &Arc<Node>,
    confined: &Confined,
    upgrader: &Rc<Upgrader>,
) -> Result<(Link, Option<OwnedFd>), Error> {
    end_with_launcher(confined.launcher)?;
    // No ring can be made afterwards.
    while node.started.load(Ordering::Acquire) < core.cores() {
        core.sleep_ns(LOOK_NS).await;
    }
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
    let admin = Rc::new(OnceCell::new());
    {
        let (core, node, upgrader) = (core.clone(), node.clone(), upgrader.clone());
        let (channel, admin) = (channel.clone(), admin.clone());
        let answering = answer_launcher(core.clone(), node, channel, upgrader, admin);
        core.spawn(Class::Control, answering);
    }
    let begun = channel.ask(&ToLauncher::Begin { version: VERSION }, &[]).await?;
    let link = Link { channel, begun: begun.read()?, admin };
    Ok((link, begun.descriptors.into_iter().next()))
}

/// Runs the launcher's requests.
async fn answer_launcher(
    core: Core,
    node: Arc<Node>,
    channel: Rc<Channel>,
    upgrader: Rc<Upgrader>,
    admin: Rc<OnceCell<Admin>>,
) {
    loop {
        let Ok(mut question) = channel.next().await else {
            // The launcher has ended: end as if killed.
            std::process::exit(1);
        };
        let descriptor = question.descriptors.pop();
        let wanted = question.read::<ToNode>();
        let (core, node, channel) = (core.clone(), node.clone(), channel.clone());
        let (upgrader, admin) = (upgrader.clone(), admin.clone());
        core.clone().spawn(Class::Control, async move {
            let missing = || Error::new(Kind::System, "no descriptor came along");
            let hold = matches!(wanted, Ok(ToNode::Hold));
            let answer = match (wanted, descriptor) {
                (Ok(ToNode::Stop), _) => {
                    tracing::info!(
                        "stopping: sending the replies in flight; a second signal ends the node immediately"
                    );
                    node.phases.raise(Phase::Draining);
                    saying(&())
                }
                (Ok(ToNode::Log), Some(file)) => {
                    if let Some(confined) = &node.confined {
                        confined.log.put(file);
                    }
                    saying(&())
                }
                (Ok(ToNode::HandOver), Some(line)) => match upgrader.to_line(line).await {
                    Ok(pause_us) => saying(&pause_us),
                    Err(why) => Err(Error::new(Kind::System, why)),
                },
                (Ok(ToNode::MayHandOver), _) => saying(&upgrader.may_hand_over().err()),
                (Ok(ToNode::Log | ToNode::HandOver), None) => Err(missing()),
                (Ok(ToNode::Hold), _) => {
                    let ended = nix::sys::prctl::set_pdeathsig(None);
                    let failed = |error| Error::new(Kind::System, format!("cannot live on: {error}"));
                    ended.map_err(failed).and_then(|()| saying(&()))
                }
                (Ok(ToNode::Resume), _) => {
                    let launcher = node.confined.as_ref().map(|confined| confined.launcher);
                    if launcher.is_none_or(|launcher| end_with_launcher(launcher).is_err()) {
                        std::process::exit(1);
                    }
                    channel.hold(false);
                    // The new program has read the configuration again.
                    core.clone().spawn(Class::Control, async move {
                        if let Some(admin) = admin.get() {
                            admin.disks.start_others(&core).await;
                        }
                    });
                    saying(&())
                }
                (Ok(ToNode::Run { request }), _) => loop {
                    match admin.get() {
                        Some(admin) => {
                            break admin.run(request).await.map(|text| (text.into(), Vec::new()));
                        }
                        None => core.sleep_ns(LOOK_NS).await,
                    }
                },
                (Err(error), _) => Err(error),
            };
            // If the launcher has ended, this process ends too.
            let hold = hold && answer.is_ok();
            let _ = channel.answer(&question, answer).await;
            if hold {
                channel.hold(true);
            }
        });
    }
}

/// The state directory, if there is a place for it.
pub(crate) fn state_directory(config: &Config) -> Option<PathBuf> {
    config.state.clone().or_else(default_state)
}

/// Opens the state directory. If it was not named, it may be missing or in use: then nothing is
/// kept over a restart.
pub(crate) async fn open_state(
    core: &Core,
    config: &Config,
    before_holds: impl Fn() -> bool,
) -> Result<Option<State>, Error> {
    let Some(path) = state_directory(config) else { return Ok(None) };
    let patience = Patience::with(Exclusive::File(path.join("LOCK")));
    let patient = || before_holds() || patience.lasts(core);
    let locked = |error: &Error| error.kind() == Kind::Locked && patient();
    let opened = patiently(core, locked, async || State::open(core, &path).await).await;
    if config.state.is_some() {
        return opened.map(Some);
    }
    match opened {
        Ok(state) => Ok(Some(state)),
        Err(error) if matches!(error.kind(), Kind::Locked | Kind::System) => {
            let hint = error.advice().unwrap_or_default();
            tracing::info!("no state is kept over a restart: {error}; {hint}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Listens at the admin socket: at the configured path, or in the state directory.
pub(crate) async fn listen_admin(
    core: &Core,
    config: &Config,
    has_state: bool,
    before_holds: impl Fn() -> bool,
) -> Result<Option<(PathBuf, UnixListener)>, Error> {
    let state = state_directory(config).filter(|_| has_state);
    let Some(path) = config.admin.clone().or(state.as_deref().map(admin::socket_in)) else {
        return Ok(None);
    };
    let patience = Patience::with(Exclusive::Socket(path.clone()));
    let in_use =
        |error: &Error| error.kind() == Kind::Locked && (before_holds() || patience.lasts(core));
    let listener = patiently(core, in_use, async || admin::listen(core, &path)).await;
    match listener {
        Ok(listener) => Ok(Some((path, listener))),
        Err(error) if config.admin.is_none() && config.state.is_none() => {
            tracing::info!("this node has no admin socket: {error}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Opens the database once, for all cores. Clients that connect meanwhile wait.
async fn prepare(
    core: &Core,
    node: &Arc<Node>,
    data: &Path,
    listeners: Vec<OwnedFd>,
    predecessor: Option<Rc<Predecessor>>,
) -> Result<(Opened, Option<Shard>), Error> {
    let config = &node.config;
    let listen = listeners[0].try_clone();
    let listen = listen.and_then(|first| std::net::TcpListener::from(first).local_addr());
    let listen = listen.map_err(|error| no_port(config.listen, "--listen", &error))?;
    let budget = config.budget();
    let options = OpenOptions {
        secondary: config.secondary,
        salvage: config.salvage,
        cache_bytes: budget.cache,
        memory_bytes: budget.tables,
        recovered_bytes: budget.recovered(),
        ..OpenOptions::default()
    };
    // The predecessor has it open until its clients have received their replies.
    let patience = Patience::with(Exclusive::File(data.join("LOCK")));
    let held = |error: &Error| {
        let before_holds = || predecessor.as_ref().is_some_and(|before| before.may_hold_locks());
        error.kind() == Kind::Locked && (before_holds() || patience.lasts(core))
    };
    let (db, writer) = if config.read_only {
        (patiently(core, held, async || open(core, data, options.clone()).await).await?, None)
    } else {
        let write = WriteOptions {
            durability: config.durability,
            adopt: config.adopt,
            memtable_bytes: budget.memtable,
            ..WriteOptions::default()
        };
        let open = async || open_for_writing(core, data, options.clone(), write.clone()).await;
        let (db, writer) = patiently(core, held, open).await?;
        (db, Some(writer))
    };
    let first_free = listeners[0].try_clone().map_or(0, |fd| fd.as_raw_fd().unsigned_abs().into());
    for warning in db.warnings() {
        tracing::warn!("{warning}");
    }
    let run_id: String =
        (0..3).map(|_| format!("{:016x}", core.random_u64())).collect::<String>()[..40].to_owned();
    let itself = Arc::downgrade(node);
    let description = Description {
        stop: Box::new(move || {
            if let Some(node) = itself.upgrade() {
                node.phases.raise(Phase::Draining);
            }
        }),
        config: config.clone(),
        machine: node.machine.clone(),
        port: listen.port(),
        driver: core.driver_name(),
        run_id,
    };
    let clients_max = clients_max(core.cores(), descriptors_max(), first_free)?;
    let password = config.password.clone();
    let settings = kv::Settings { password, clients_max, ..budget.door() };
    let door = Shared::new(core.cores(), settings, description);
    let shard =
        writer.map(|writer| Shard::with_memory(core, db.attach(core), writer, budget.known_keys));
    if let Some(shard) = &shard {
        shard.attach(&door).await;
    }
    Ok((Opened { listen, db, door, listeners }, shard))
}

/// Starts to serve metrics, and returns the address.
fn tell_metrics(
    core: &Core,
    node: &Node,
    reporter: Option<Reporter>,
    disks: Rc<Disks>,
    listener: Listener,
) -> Result<(SocketAddr, JoinHandle<()>), Error> {
    let addr = listener
        .local_addr()
        .map_err(|error| Error::new(Kind::System, format!("cannot listen for metrics: {error}")))?;
    let sources = Sources {
        reporter,
        disks,
        log: node.log.clone(),
        started_ns: core.now_ns(),
        memory_bytes: node.config.memory_bytes,
    };
    let telling = core.spawn(Class::Background, metrics::serve(core.clone(), listener, sources));
    Ok((addr, telling))
}

/// A socket on which the predecessor already listened.
fn inherited_listener(core: &Core, addr: SocketAddr, fd: OwnedFd) -> Result<Listener, Error> {
    Listener::from_fd(core, fd)
        .map_err(|error| Error::new(Kind::System, format!("cannot listen on {addr}: {error}")))
}

/// Listens, if nobody else does. `flag` is the user's flag for another address.
async fn listen_alone(core: &Core, addr: SocketAddr, flag: &str) -> Result<Listener, Error> {
    let patience = Patience::with(Exclusive::Port(addr));
    let in_use = |error: &std::io::Error| is_in_use(error) && patience.lasts(core);
    let listener = patiently(core, in_use, async || core.listen_alone(addr)).await;
    listener.map_err(|error| no_port(addr, flag, &error))
}

fn is_in_use(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::AddrInUse
}

fn no_port(addr: SocketAddr, flag: &str, error: &std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            Error::new(Kind::PortInUse, format!("{addr} is in use by another program")).hint(
                format!(
                    "`ss -ltnp 'sport = :{0}'` names it; or listen elsewhere, with {flag} {1}:{2}",
                    addr.port(),
                    addr.ip(),
                    addr.port().checked_add(1).unwrap_or(7000)
                ),
            )
        }
        std::io::ErrorKind::PermissionDenied => {
            Error::new(Kind::System, format!("cannot listen on {addr}: {error}"))
                .hint(format!("ports below 1024 are for root: choose a higher one with {flag}"))
        }
        std::io::ErrorKind::AddrNotAvailable => {
            Error::new(Kind::Usage, format!("{} is not an address of this machine", addr.ip()))
                .hint("`ip addr` lists the addresses it has")
        }
        _ => Error::new(Kind::System, format!("cannot listen on {addr}: {error}")),
    }
}

/// Ends the node at the first signal, and the process at the second; or hands the node over.
async fn watch_signals(core: Core, node: Arc<Node>, upgrader: Rc<Upgrader>) {
    loop {
        let signal = match reactor::signal(&core).await {
            Ok(signal) => signal,
            Err(error) => {
                tracing::error!("cannot wait for signals: {error}; only SIGKILL ends this node");
                return;
            }
        };
        if signal == reactor::UPGRADE {
            let upgrader = upgrader.clone();
            core.spawn(Class::Control, async move {
                match upgrade::own_program() {
                    // The outcome is logged.
                    Ok(program) => drop(upgrader.to(&program).await),
                    Err(error) => tracing::error!("no upgrade: cannot find this program: {error}"),
                }
            });
            continue;
        }
        if node.phases.now() != Phase::Running {
            // Not ready yet, or the second signal. An orderly end is not needed, because
            // acknowledged writes are in the write-ahead log; but the log lines are written.
            node.log.flush(LOG_PATIENCE);
            std::process::exit(128 + signal);
        }
        tracing::info!(
            "stopping: sending the replies in flight; a second signal ends the node immediately"
        );
        node.phases.raise(Phase::Draining);
    }
}
