//! The work of core 0, beside that of all cores: it takes over from a predecessor, opens the
//! database and the disks, and reports that the node is ready.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use kv::{Reporter, Shard};
use lsm::{Db, OpenOptions, WriteOptions};
use reactor::{Class, Core, JoinHandle, Listener, UnixListener};

use super::commands::Admin;
use super::compactions::Compactions;
use super::confined::{FromLauncher, Link, begin};
use super::holds::Holds;
use super::info::Description;
use super::ingestions::Ingestions;
use super::metrics::{self, Sources};
use super::open::{explain, open, open_for_writing};
use super::phases::Phase;
use super::ports::{
    inherited_listener, is_in_use, listen_alone, listen_for_nbd, listen_on_all, no_nbd, no_port,
};
use super::{Clients, Database, NodeState, Opened, Ready, watch_signals};
use crate::admin;
use crate::config::{ClientDoor, Sandbox};
use crate::disks::events::What;
use crate::disks::protocol::ToLauncher;
use crate::disks::resources::{LocalResources, Outbox, Resources, remove};
use crate::disks::spec::DiskSpec;
use crate::disks::{Disks, Served};
use crate::error::{Error, Kind};
use crate::launcher;
use crate::nbd_address::NbdAddress;
use crate::patience::{Exclusive, Patience, patiently};
use crate::process::{descriptors_max, use_huge_pages};
use crate::room_for_clients::clients_max;
use crate::start::{listen_admin, open_state};
use crate::upgrade::{self, Doors, Predecessor, Upgrader, follow, line_to_predecessor};

/// What core 0 has prepared, beside what the cores share.
pub(super) struct FirstCore {
    metrics: Option<Listener>,
    nbd: Option<Listener>,
    taken: Vec<(Served, JoinHandle<()>)>,
    upgrader: Rc<Upgrader>,
    predecessor: Option<Rc<Predecessor>>,
    link: Option<Link>,
    /// The admin socket, if this process listens there.
    admin: Option<(PathBuf, UnixListener)>,
}

/// What core 0 does until a successor does it.
#[derive(Default)]
pub(super) struct Reporting {
    /// Tasks that report and answer.
    pub tasks: Vec<JoinHandle<()>>,
    /// The names of Unix sockets at which this process listens.
    pub names: Vec<PathBuf>,
}

/// Pause before another attempt to listen where the predecessor does.
const AGAIN_NS: u64 = 100_000_000;

impl FirstCore {
    /// Takes over from the predecessor, if there is one, listens, and opens the database. Then the
    /// other cores may run.
    pub async fn prepare(
        core: &Core,
        node: &Arc<NodeState>,
    ) -> Result<(FirstCore, Option<Shard>), Error> {
        let leaving = node.clone();
        let ending = node.clone();
        let leave = move || leaving.phases.raise(Phase::Draining);
        let upgrader = Upgrader::new(core, leave, move || ending.phases.now() > Phase::Running);
        let (link, sent) = match &node.confined {
            None => {
                let (core, node, upgrader) = (core.clone(), node.clone(), upgrader.clone());
                core.clone().spawn(Class::Control, watch_signals(core, node, upgrader));
                (None, FromLauncher { line: line_to_predecessor()?, ..FromLauncher::default() })
            }
            Some(confined) => {
                let (link, sent) = begin(core, node, confined, &upgrader).await?;
                (Some(link), sent)
            }
        };
        let own = |fd: &OwnedFd| fd.try_clone().ok();
        let early = node.confined.as_ref();
        // For each door one socket a core, or none yet.
        let mut listeners: Vec<Vec<_>> = early
            .iter()
            .flat_map(|early| &early.clients)
            .map(|door| door.iter().filter_map(own).collect())
            .collect();
        let mut metrics = early.and_then(|early| own(early.metrics.as_ref()?)).or(sent.metrics);
        let mut nbd = early.and_then(|early| own(early.nbd.as_ref()?)).or(sent.nbd);
        let (mut taken, mut predecessor) = (Vec::new(), None);
        if let Some(line) = sent.line {
            let holes = link.as_ref().map(|link| link.hello.holes.clone());
            let holes = holes.unwrap_or_default();
            let inherited = upgrade::inherit(core, &node.config, line, &holes).await?;
            taken = inherited.disks;
            let mut sockets = inherited.clients.into_iter();
            let mut nth = 0;
            while sockets.len() >= core.cores() {
                listeners.resize_with(listeners.len().max(nth + 1), Vec::new);
                listeners[nth] = sockets.by_ref().take(core.cores()).collect();
                nth += 1;
            }
            metrics = inherited.metrics.or(metrics);
            // The configuration may name another address than that of the predecessor.
            let of =
                |socket: &OwnedFd| node.config.nbd.as_ref().is_some_and(|addr| addr.is_of(socket));
            nbd = inherited.nbd.filter(of).or(nbd);
            predecessor = Some(inherited.predecessor);
        }
        // Not before it serves, if another node has served meanwhile.
        use_huge_pages(!node.config.has_little_memory());
        let metrics = match (node.config.metrics, metrics) {
            (None, _) => None,
            (Some(addr), Some(fd)) => Some(inherited_listener(core, addr, fd)?),
            (Some(addr), None) => Some(listen_alone(core, addr, "--metrics").await?),
        };
        let nbd = match (&node.config.nbd, nbd) {
            (None, _) => None,
            (Some(addr), Some(fd)) => {
                Some(Listener::from_fd(core, fd).map_err(|error| no_nbd(addr, &error))?)
            }
            (Some(addr), None) => Some(listen_for_nbd(core, addr).await?),
        };
        let (mut opened, mut shard) = (None, None);
        if let Some(data) = &node.config.data {
            let doors = node.config.doors();
            // A predecessor may have had more doors.
            listeners.resize_with(doors.len(), Vec::new);
            for (sockets, door) in listeners.iter_mut().zip(&doors) {
                if sockets.is_empty() {
                    *sockets = listen_for_clients(core, door).await?;
                }
            }
            let before = predecessor.clone();
            let (database, owned) = open_database(core, node, data, listeners, before).await?;
            (opened, shard) = (Some(database), owned);
        }
        let _ = node.opened.set(opened);
        node.phases.raise(Phase::Running);
        let admin = None;
        Ok((FirstCore { metrics, nbd, taken, upgrader, predecessor, link, admin }, shard))
    }

    /// Starts the disks: those that were taken over, and those that are opened here.
    pub async fn start_disks(&mut self, core: &Core, node: &NodeState) -> Result<Rc<Disks>, Error> {
        // The predecessor has the state directory and the admin socket until it has ended.
        let before = self.predecessor.clone();
        let before_holds = || before.as_ref().is_some_and(|before| before.may_hold_locks());
        let resources = match &self.link {
            Some(Link { channel, hello, .. }) => {
                Resources::Launcher(channel.clone(), hello.remembers, Outbox::default())
            }
            None => {
                let config = &node.config;
                let state = open_state(core, config, before_holds).await?;
                self.admin = listen_admin(core, config, state.is_some(), before_holds).await?;
                let may_attach = config.sandbox == Sandbox::Off || launcher::is_wanted(config);
                Resources::Local(
                    Box::new(LocalResources::new(core, &config.disks, state)),
                    may_attach,
                )
            }
        };
        let following = before.as_ref().map(|before| before.following());
        let taken = std::mem::take(&mut self.taken);
        let restarted = self.link.as_ref().is_some_and(|link| link.hello.restarted);
        let started = Disks::start(core, resources, taken, following, restarted).await;
        if let (Err(_), Some((path, _))) = (&started, &self.admin) {
            remove(path);
        }
        let disks = Rc::new(started?);
        disks.set_identity(node.config.identity.clone());
        disks.open_lost(core);
        disks.resume_transfers(core);
        if let Some(before) = before {
            let (again, opener) = (core.clone(), disks.clone());
            let open = async move |spec: &DiskSpec| opener.open(&again, spec).await;
            core.spawn(Class::Control, follow(disks.clone(), core.clone(), before, open));
        }
        Ok(disks)
    }

    /// Starts to report metrics and to answer operators, and reports that the node is ready.
    pub async fn report_ready(
        self,
        core: &Core,
        node: &NodeState,
        disks: &Rc<Disks>,
        clients: Option<&Clients<'_>>,
        on_ready: &impl Fn(&Ready),
    ) -> Result<Reporting, Error> {
        let mut reporting = Reporting::default();
        let watching = disks.clone().watch_space(core.clone());
        reporting.tasks.push(core.spawn(Class::Background, watching));
        let own = |fd: &OwnedFd| fd.try_clone().ok();
        let listening = node.doors.iter().filter_map(|door| own(door.get()?)).collect();
        let link = self.link.as_ref();
        let door = |listener: &Option<Listener>| {
            listener.as_ref().and_then(Listener::host_fd)?.try_clone_to_owned().ok()
        };
        let doors =
            Doors { clients: listening, metrics: door(&self.metrics), nbd: door(&self.nbd) };
        self.upgrader.ready(disks.clone(), doors);
        let nbd = match (self.nbd, &node.config.nbd) {
            (Some(listener), Some(addr)) => {
                if link.is_none() {
                    reporting.names.extend(addr.path().cloned());
                }
                let addr = listener.local_addr().map_or(addr.clone(), NbdAddress::Tcp);
                disks.serve_nbd(core, listener);
                Some(addr)
            }
            _ => None,
        };
        let moves = match node.config.moves {
            Some(addr) => Some(receive_disks(core, disks, addr, self.predecessor.is_some()).await?),
            None => None,
        };
        let reporter = || clients.map(|clients| clients.server.reporter());
        let metrics = match self.metrics {
            Some(metrics) => {
                let (addr, task) = tell_metrics(core, node, reporter(), disks.clone(), metrics)?;
                reporting.tasks.push(task);
                Some(addr)
            }
            None => None,
        };
        let admin = |upgrader| {
            let shard = clients.and_then(|clients| clients.shard.clone());
            let (holds, compactions) =
                (Holds::new(core, shard.clone()), Compactions::new(core, shard.clone()));
            let ingestions = Ingestions::new(shard);
            let (core, disks) = (core.clone(), disks.clone());
            Admin { core, disks, reporter: reporter(), holds, compactions, ingestions, upgrader }
        };
        let mut admin_at = None;
        if let Some((path, listener)) = self.admin {
            let admin = Rc::new(admin(Some(self.upgrader)));
            let answering = admin::serve(listener, admin, Rc::default());
            reporting.tasks.push(core.spawn(Class::Control, answering));
            reporting.names.push(path.clone());
            admin_at = Some(path);
        } else if let Some(link) = &self.link {
            link.admin.fill(admin(None));
        }
        let database = clients.map(Clients::database);
        let (driver, cores) = (core.driver_name(), core.cores());
        match &database {
            Some(Database { listen, tls_listen: None, keys, .. }) => {
                tracing::info!(%listen, driver, keys, cores, "serving");
            }
            Some(Database { listen, tls_listen: Some(tls_listen), keys, .. }) => {
                tracing::info!(%listen, %tls_listen, driver, keys, cores, "serving");
            }
            None => tracing::info!(driver, cores, "serving"),
        }
        let mut served = Vec::new();
        disks.each(|disk| served.extend(disk.serving.is_ok().then(|| disk.spec.clone())));
        let admin = admin_at.or_else(|| link?.hello.admin.clone());
        // Do this first: a process that has read that the node serves may ask it to end in an
        // orderly way.
        match link {
            Some(link) => drop(link.channel.ask(&ToLauncher::Serving, &[]).await?),
            None => disks.report(core, What::Serving { process: std::process::id() }),
        }
        on_ready(&Ready { database, disks: served, metrics, nbd, moves, admin, driver });
        Ok(reporting)
    }
}

/// Listens for clients, with a socket for each core.
async fn listen_for_clients(core: &Core, door: &ClientDoor) -> Result<Vec<OwnedFd>, Error> {
    let addr = door.addr;
    let patience = Patience::with(Exclusive::Port(addr));
    let in_use = |error: &std::io::Error| is_in_use(error) && patience.lasts(core);
    let listening = patiently(core, in_use, async || listen_on_all(addr, core.cores())).await;
    listening.map_err(|error| no_port(addr, door.flag, &error))
}

/// Opens the database once, for all cores. Clients that connect meanwhile wait.
async fn open_database(
    core: &Core,
    node: &Arc<NodeState>,
    data: &Path,
    listeners: Vec<Vec<OwnedFd>>,
    predecessor: Option<Rc<Predecessor>>,
) -> Result<(Opened, Option<Shard>), Error> {
    let config = &node.config;
    let mut addresses = Vec::new();
    for (sockets, door) in listeners.iter().zip(config.doors()) {
        let addr = sockets[0].try_clone();
        let addr = addr.and_then(|first| std::net::TcpListener::from(first).local_addr());
        let addr = addr.map_err(|error| no_port(door.addr, door.flag, &error))?;
        addresses.push((addr, door.tls.is_some()));
    }
    let listen = addresses[0].0;
    let tls_listen = addresses.iter().find(|(_, has_tls)| *has_tls).map(|(addr, _)| *addr);
    let warning = config
        .tls
        .as_ref()
        .and_then(|tls| tls.warning(i64::try_from(core.unix_time_ms() / 1000).unwrap_or(i64::MAX)));
    if let Some(warning) = warning {
        tracing::warn!("{warning}");
    }
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
    let (db, writer, family) = if config.read_only {
        let db = patiently(core, held, async || open(core, data, options.clone()).await).await?;
        let family = db.column_family(&config.column_family);
        let family = family.map_err(|error| explain(data, &error))?;
        (db, None, family)
    } else {
        let write = WriteOptions {
            durability: config.durability,
            adopt: config.adopt,
            memtable_bytes: budget.memtable,
            blob_min: config.blob_min,
            blob_space_max_ratio: config.blob_space_max_ratio,
            ..WriteOptions::default()
        };
        let agrees = async |db: &Db| db.column_family(&config.column_family);
        let open =
            async || open_for_writing(core, data, options.clone(), write.clone(), agrees).await;
        let (db, writer, family) = patiently(core, held, open).await?;
        (db, Some(writer), family)
    };
    let first_free =
        listeners[0][0].try_clone().map_or(0, |fd| fd.as_raw_fd().unsigned_abs().into());
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
        tls_port: tls_listen.map_or(0, |addr| addr.port()),
        driver: core.driver_name(),
        run_id,
    };
    let of_nbd = if config.nbd.is_some() { nbd::CONNECTIONS_MAX as u64 } else { 0 };
    let clients_max = clients_max(core.cores(), descriptors_max(), first_free + of_nbd)?;
    let password = config.password.clone();
    let debug_commands = config.debug_commands;
    let redis_version = config.redis_version.to_string();
    let settings = kv::Settings {
        family,
        password,
        clients_max,
        debug_commands,
        redis_version,
        ..budget.door()
    };
    let door = kv::NodeState::new(core.cores(), settings, description);
    let shard = writer
        .map(|writer| Shard::with_memory(core, db.attach(core), writer, family, budget.known_keys));
    match &shard {
        Some(shard) => {
            let explain = |error| explain(data, &error);
            let open = async || shard.open_deadlines().await.map_err(explain);
            patiently(core, held, open).await?;
        }
        None => {
            // A small part of the budget, as where they are written.
            let reading = OpenOptions {
                cache_bytes: budget.cache / 16,
                memory_bytes: budget.tables / 16,
                ..options.clone()
            };
            let explain = |error| explain(data, &error);
            let reading = &reading;
            let open =
                async || door.open_deadlines(core, data, reading.clone()).await.map_err(explain);
            patiently(core, held, open).await?;
        }
    }
    if let Some(shard) = &shard {
        shard.attach(&door).await;
    }
    Ok((Opened { listen, tls_listen, db, door, listeners }, shard))
}

/// Starts to serve metrics, and returns the address.
fn tell_metrics(
    core: &Core,
    node: &NodeState,
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

/// Takes disks from other nodes: at the launcher's socket, or at one of this process. A predecessor
/// without a launcher listens until it has ended. Returns the address.
async fn receive_disks(
    core: &Core,
    disks: &Rc<Disks>,
    addr: SocketAddr,
    follows: bool,
) -> Result<SocketAddr, Error> {
    let listener = match disks.door_for_disks(core).await? {
        Some(listener) => listener,
        None if follows => {
            let (again, disks) = (core.clone(), disks.clone());
            core.spawn(Class::Control, async move {
                loop {
                    match again.listen_alone(addr) {
                        Ok(listener) => return disks.receive(&again, listener),
                        Err(_) => again.sleep_ns(AGAIN_NS).await,
                    }
                }
            });
            return Ok(addr);
        }
        None => listen_alone(core, addr, "--moves").await?,
    };
    let addr = listener.local_addr().unwrap_or(addr);
    disks.receive(core, listener);
    Ok(addr)
}
