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
//!
//! This room is above all others. `first_core` and `confined` are the work of core 0; they share
//! the node's state with the functions here.

pub(crate) mod commands;
pub(crate) mod compactions;
mod confined;
mod first_core;
pub(crate) mod holds;
pub(crate) mod info;
pub(crate) mod ingestions;
pub(crate) mod metrics;
pub(crate) mod open;
pub(crate) mod phases;
mod ports;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kv::{Door, Server, Shard};
use lsm::{Db, Reader};
use reactor::log::Log;
use reactor::{Class, Core, JoinHandle, Listener};

use self::confined::{Confined, confine, launcher_of_this_process};
use self::first_core::{FirstCore, Reporting};
use self::phases::{Phase, Phases};
pub(crate) use self::ports::no_port;
use crate::config::{Config, DOORS_MAX};
use crate::disks::Disks;
use crate::disks::resources::remove;
use crate::disks::spec::DiskSpec;
use crate::error::{Error, Kind};
use crate::launcher;
use crate::log::LOG_PATIENCE;
use crate::machine::Machine;
use crate::nbd_address::NbdAddress;
use crate::process::{raise_descriptors, use_huge_pages};
use crate::upgrade::{self, Upgrader, line_to_predecessor};

/// How long clients may take to receive replies in flight when the node stops.
const GRACE_NS: u64 = 5_000_000_000;
/// How long a process that has handed over may take to unmap memory before it ends; less than its
/// launcher waits for its end.
const ENDS_BESIDE: Duration = Duration::from_millis(500);

/// What a node reports when it is ready.
#[derive(Clone, Debug)]
pub struct Ready {
    /// The database, if one is served.
    pub database: Option<Database>,
    /// The served disks, including those attached earlier.
    pub disks: Vec<DiskSpec>,
    /// The address of the metrics, if any.
    pub metrics: Option<SocketAddr>,
    /// Where NBD clients connect, if anywhere.
    pub nbd: Option<NbdAddress>,
    /// Where disks of other nodes come, if anywhere.
    pub moves: Option<SocketAddr>,
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
    /// The address on which clients connect with TLS; it may be the same.
    pub tls_listen: Option<SocketAddr>,
    /// The number of keys, approximate unless they are counted.
    pub keys: u64,
    /// Whether the number of keys is exact.
    pub counted: bool,
}

/// The state that the cores share.
struct NodeState {
    config: Config,
    machine: Machine,
    log: Log,
    confined: Option<Confined>,
    /// The number of cores that run.
    started: AtomicUsize,
    phases: Phases,
    opened: OnceLock<Option<Opened>>,
    listening: AtomicUsize,
    /// Each core's listening socket of the first door for clients, then of the second, to be
    /// handed over.
    doors: Vec<OnceLock<OwnedFd>>,
    /// The number of cores whose connections have ended.
    ended: AtomicUsize,
    /// A successor has the disks.
    has_successor: AtomicBool,
    failed: OnceLock<Error>,
}

/// The database that core 0 has opened for all cores.
struct Opened {
    listen: SocketAddr,
    tls_listen: Option<SocketAddr>,
    db: Db,
    door: Arc<kv::NodeState>,
    /// For each door each core's listening socket.
    listeners: Vec<Vec<OwnedFd>>,
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
    let renewed = launcher::is_renewed();
    let alone = launched.is_none() && line_to_predecessor()?.is_none();
    let succeeds = launched.map_or(!alone, |launched| launched.succeeds);
    use_huge_pages(!succeeds && !config.has_little_memory());
    if renewed || (alone && launcher::is_wanted(&config)) {
        return match launcher::run(&config, renewed)? {
            0 => Ok(()),
            // The node has reported the reason.
            code => std::process::exit(code),
        };
    }
    let (sink, confined) = match launched {
        Some(launched) => {
            let (sink, confined) = confine(&config, launched)?;
            (sink, Some(confined))
        }
        None => (crate::log::open(&config.log, None)?, None),
    };
    // While this process has one thread. Without it, copies use fences.
    let _ = bdev::register_barrier();
    // Kept until the end of this function, when the writer writes what the cores logged.
    let (log, _writer) = crate::log::start(&config.log, sink)?;
    crate::log::end_process_on_panic();
    if descriptors > descriptors_before {
        tracing::info!(
            "raised the limit of descriptors from {descriptors_before} to {descriptors}"
        );
    }
    let runtime = config.runtime(log.clone(), confined.is_some());
    let cores = config.processors.len();
    let node = Arc::new(NodeState {
        config,
        machine,
        log,
        confined,
        started: AtomicUsize::new(0),
        phases: Phases::new(cores),
        opened: OnceLock::new(),
        listening: AtomicUsize::new(0),
        doors: (0..cores * DOORS_MAX).map(|_| OnceLock::new()).collect(),
        ended: AtomicUsize::new(0),
        has_successor: AtomicBool::new(false),
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
    if node.has_successor.load(Ordering::Relaxed) {
        // On its processors, where the guests would wait for the end of this process.
        reactor::until_dropped(ENDS_BESIDE);
    }
    match node.failed.get() {
        Some(error) => Err(error.clone()),
        None => Ok(()),
    }
}

async fn serve_core(
    core: &Core,
    node: &Arc<NodeState>,
    on_ready: &impl Fn(&Ready),
) -> Result<(), Error> {
    node.started.fetch_add(1, Ordering::AcqRel);
    node.phases.wake();
    let (first, shard) = match core.id() {
        0 => {
            let (first, shard) = FirstCore::prepare(core, node).await?;
            (Some(first), shard)
        }
        _ => (None, None),
    };
    let served = serve_clients(core, node, on_ready, shard.clone(), first).await;
    let mut closed = Ok(());
    let has_successor = matches!(&served, Ok(Some(ending)) if ending.disks.have_left());
    if has_successor {
        node.has_successor.store(true, Ordering::Relaxed);
    }
    if let Some(shard) = shard {
        // Other cores may still wait for the shard's answers.
        let ended = || node.ended.load(Ordering::Acquire);
        node.phases.until(core.id(), || ended() >= node.listening.load(Ordering::Acquire)).await;
        closed = if has_successor { shard.hand_over().await } else { shard.close().await };
    }
    if let Some(ending) = served? {
        ending.finish(core, node).await;
    }
    closed.map_err(|error| Error::new(Kind::System, format!("cannot close the database: {error}")))
}

/// The clients of a core.
struct Clients<'a> {
    opened: &'a Opened,
    server: Server,
    reader: Reader,
    /// On the core that writes.
    shard: Option<Shard>,
}

impl Clients<'_> {
    /// Starts to serve them at the core's listening socket.
    fn start<'a>(
        core: &Core,
        node: &NodeState,
        opened: &'a Opened,
        shard: Option<Shard>,
    ) -> Result<Clients<'a>, Error> {
        let mut doors = Vec::new();
        for (nth, door) in node.config.doors().into_iter().enumerate() {
            let listener = opened.listeners[nth][core.id()].try_clone();
            let listener = listener.and_then(|fd| Listener::from_fd(core, fd));
            let listener = listener.map_err(|error| no_port(door.addr, door.flag, &error))?;
            if let Some(Ok(fd)) = listener.host_fd().map(|fd| fd.try_clone_to_owned()) {
                let _ = node.doors[nth * core.cores() + core.id()].set(fd);
            }
            doors.push(Door { listener, tls: door.tls });
        }
        let reader = opened.db.attach(core);
        let server = Server::start_at(core, reader.clone(), &opened.door, doors, shard.clone());
        Ok(Clients { opened, server, reader, shard })
    }

    fn database(&self) -> Database {
        let family = self.opened.door.settings().family;
        let counted = self.opened.db.keys().filter(|_| family == 0);
        let keys = counted.or(self.reader.approximate_keys(family).ok()).unwrap_or(0);
        let Opened { listen, tls_listen, .. } = *self.opened;
        Database { listen, tls_listen, keys, counted: counted.is_some() }
    }
}

async fn serve_clients(
    core: &Core,
    node: &NodeState,
    on_ready: &impl Fn(&Ready),
    shard: Option<Shard>,
    mut first: Option<FirstCore>,
) -> Result<Option<Ending>, Error> {
    // A request to end may raise the phase while core 0 is still opening the database.
    let decided = || node.opened.get().is_some() || node.phases.now() > Phase::Draining;
    node.phases.until(core.id(), decided).await;
    let Some(opened) = node.opened.get().filter(|_| node.phases.now() <= Phase::Draining) else {
        return Ok(None);
    };
    let disks = match &mut first {
        Some(first) => first.start_disks(core, node).await?,
        None => Rc::default(),
    };
    let clients = match opened {
        Some(opened) => Some(Clients::start(core, node, opened, shard.clone())?),
        None => None,
    };
    node.listening.fetch_add(1, Ordering::AcqRel);
    node.phases.wake();
    let mut reporting = Reporting::default();
    if let Some(first) = first {
        let all_listen = || node.listening.load(Ordering::Acquire) >= core.cores();
        let decided = || all_listen() || node.phases.now() != Phase::Running;
        node.phases.until(core.id(), decided).await;
        if node.phases.now() == Phase::Running {
            let clients = clients.as_ref();
            reporting = first.report_ready(core, node, &disks, clients, on_ready).await?;
        }
    }
    let server = clients.map(|clients| clients.server);
    node.phases.reached(core.id(), Phase::Draining).await;
    if let Some(shard) = &shard {
        // Otherwise writes that wait for the end of a pause would hold up the end of the node.
        shard.leave();
    }
    if disks.have_left() {
        reporting.tasks.drain(..).for_each(JoinHandle::cancel);
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
    node.phases.wake();
    Ok(Some(Ending { stopping, disks, names: reporting.names }))
}

/// What remains of a core's work when its clients have gone.
struct Ending {
    stopping: JoinHandle<()>,
    disks: Rc<Disks>,
    /// Those of [`Reporting::names`].
    names: Vec<PathBuf>,
}

impl Ending {
    async fn finish(self, core: &Core, node: &NodeState) {
        self.stopping.await;
        if !self.disks.have_left() {
            self.names.iter().for_each(|path| remove(path));
        }
        if core.id() == 0 {
            node.phases.raise(Phase::Stopped);
        } else {
            // Until then core 0 may have rings of its disks here.
            node.phases.reached(core.id(), Phase::Stopped).await;
        }
    }
}

/// Ends the node at the first signal, and the process at the second; or hands the node over.
async fn watch_signals(core: Core, node: Arc<NodeState>, upgrader: Rc<Upgrader>) {
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
