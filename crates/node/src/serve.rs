//! A node from start to end.
//!
//! 1. Signals are blocked, then cores started. Core 0 finds out whether the port is free, opens
//!    the database and raises the phase to running; the other cores wait for that.
//! 2. Every core listens for itself on the same address and attaches a reader of its own. When
//!    all do, the node is ready, and says so.
//! 3. The first signal raises the phase to draining: every core accepts no more, sends the replies
//!    that are under way, and ends its connections after a grace at the latest. There is nothing
//!    to flush, because nothing is written. Then the cores end and are joined; the reactor gives
//!    operations of the disk a deadline of its own.
//! 4. A second signal ends the process at once, as does a first one before the node is ready.
//!
//! A core that cannot serve ends the node: half a node would lose the connections that the kernel
//! hands to the missing core.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use kv::{Server, Shared};
use lsm::{Db, OpenOptions};
use reactor::{Class, Core, Listener};

use crate::config::Config;
use crate::error::{Error, Kind};
use crate::info::Description;
use crate::machine::Machine;
use crate::open::open;
use crate::phases::{Phase, Phases};

/// How long clients may take to receive what is under way when the node stops.
const GRACE_NS: u64 = 5_000_000_000;
/// How often core 0 looks whether all cores listen.
const LOOK_NS: u64 = 1_000_000;

/// What a node says when it is ready.
#[derive(Clone, Debug)]
pub struct Ready {
    /// Where it listens.
    pub listen: SocketAddr,
    /// The driver in use.
    pub driver: &'static str,
    /// About how many keys the database has.
    pub keys: u64,
    /// What was wrong with the database and did not prevent opening it.
    pub warnings: Vec<String>,
}

/// What the cores share.
struct Node {
    config: Config,
    machine: Machine,
    phases: Phases,
    opened: OnceLock<Opened>,
    listening: AtomicUsize,
    failed: OnceLock<Error>,
}

/// What core 0 has prepared for all.
struct Opened {
    listen: SocketAddr,
    db: Db,
    door: Arc<Shared>,
}

/// Serves until a signal says stop. `on_ready` is called once, when all cores listen.
///
/// # Errors
/// When the port is in use, the database cannot be opened, or a core cannot be started.
pub fn serve(
    config: Config,
    machine: Machine,
    on_ready: impl Fn(&Ready) + Clone + Send + 'static,
) -> Result<(), Error> {
    reactor::block_signals();
    let runtime = config.runtime();
    let cores = config.processors.len();
    let node = Arc::new(Node {
        config,
        machine,
        phases: Phases::new(cores),
        opened: OnceLock::new(),
        listening: AtomicUsize::new(0),
        failed: OnceLock::new(),
    });
    let shared = node.clone();
    reactor::run(&runtime, move |core| {
        let (node, on_ready) = (shared.clone(), on_ready.clone());
        async move {
            if let Err(error) = serve_core(&core, &node, &on_ready).await {
                // The first failure is the one to tell; those after it follow from it.
                let _ = node.failed.set(error);
                node.phases.raise(Phase::Stopped);
            }
        }
    })
    .map_err(|error| Error::new(Kind::System, format!("starting the cores: {error}")))?;
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
    if core.id() == 0 {
        core.spawn(Class::Control, watch_signals(core.clone(), node.clone()));
        let opened = prepare(core, node).await?;
        let _ = node.opened.set(opened);
        node.phases.raise(Phase::Running);
    }
    if node.phases.reached(core.id(), Phase::Running).await > Phase::Draining {
        return Ok(());
    }
    let opened = node.opened.get().expect("core 0 has opened the database before it raised");
    let listener = core.listen(opened.listen).map_err(|error| no_port(opened.listen, &error))?;
    let reader = opened.db.attach(core);
    let server = Server::start(core, reader.clone(), &opened.door, listener);
    node.listening.fetch_add(1, Ordering::AcqRel);
    if core.id() == 0 {
        while node.listening.load(Ordering::Acquire) < core.cores()
            && node.phases.now() == Phase::Running
        {
            core.sleep_ns(LOOK_NS).await;
        }
        if node.phases.now() == Phase::Running {
            on_ready(&Ready {
                listen: opened.listen,
                driver: core.driver_name(),
                keys: reader.approximate_keys(0).unwrap_or(0),
                warnings: opened.db.warnings().to_vec(),
            });
        }
    }
    drop(reader);
    node.phases.reached(core.id(), Phase::Draining).await;
    server.stop(GRACE_NS).await;
    Ok(())
}

/// Finds out whether the port is free and opens the database: once, for all cores.
async fn prepare(core: &Core, node: &Node) -> Result<Opened, Error> {
    let config = &node.config;
    let listen = {
        // Cores share their port with each other, so only this listener would notice somebody else.
        let alone = core.listen_alone(config.listen);
        alone.and_then(|listener: Listener| listener.local_addr())
    }
    .map_err(|error| no_port(config.listen, &error))?;
    let budget = config.budget();
    let options = OpenOptions {
        secondary: config.secondary,
        salvage: config.salvage,
        cache_bytes: budget.cache,
        memory_bytes: budget.shared,
        ..OpenOptions::default()
    };
    let db = open(core, &config.data, options).await?;
    let run_id: String =
        (0..3).map(|_| format!("{:016x}", core.random_u64())).collect::<String>()[..40].to_owned();
    let description = Description {
        config: config.clone(),
        machine: node.machine.clone(),
        port: listen.port(),
        driver: core.driver_name(),
        run_id,
        database_bytes: db.memory(),
    };
    let door = Shared::new(core.cores(), budget.door(), description);
    Ok(Opened { listen, db, door })
}

fn no_port(addr: SocketAddr, error: &std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => Error::new(
            Kind::PortInUse,
            format!("{addr} is in use by another program"),
        )
        .hint(format!(
            "`ss -ltnp 'sport = :{0}'` names it; or listen elsewhere, with --listen {1}:{2}",
            addr.port(),
            addr.ip(),
            addr.port().checked_add(1).unwrap_or(7000)
        )),
        std::io::ErrorKind::PermissionDenied => {
            Error::new(Kind::System, format!("listening on {addr}: {error}"))
                .hint("ports below 1024 are for root: choose a higher one with --listen")
        }
        std::io::ErrorKind::AddrNotAvailable => {
            Error::new(Kind::Usage, format!("{} is no address of this machine", addr.ip()))
                .hint("`ip addr` lists the addresses it has")
        }
        _ => Error::new(Kind::System, format!("listening on {addr}: {error}")),
    }
}

/// Ends the node at the first signal, and the process at the second.
async fn watch_signals(core: Core, node: Arc<Node>) {
    loop {
        let signal = match reactor::stop_signal(&core).await {
            Ok(signal) => signal,
            Err(error) => {
                tracing::error!("waiting for signals: {error}; only SIGKILL ends this node");
                return;
            }
        };
        if node.phases.now() != Phase::Running {
            // Not ready yet, or asked for the second time. Nothing here needs an orderly end.
            std::process::exit(128 + signal);
        }
        tracing::info!("stopping: replies under way are sent; a second signal ends it at once");
        node.phases.raise(Phase::Draining);
    }
}
