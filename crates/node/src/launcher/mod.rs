//! The launcher: the process that a user has started. It starts the node that serves guests, and
//! does for it what a confined process cannot do.
//!
//! ```text
//!   user, service manager          the launcher                       the node (confined)
//!   millrace serve    ---------->  lock the state directory, listen
//!                                  at the admin socket; start  ---->  listen, confine itself,
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
//! 2. It parses nothing that a guest has written, and its cores read no guest's memory. Of a front
//!    end's message it knows the length.
//! 3. The node ends with the launcher, also when the launcher is killed: the kernel then kills the
//!    node, and a node whose socket is closed ends. The launcher ends with a node that was told to
//!    end, or that has not served, with its exit code. When another one ends, the launcher starts
//!    it again, with the front ends' connections (`front_door`), the memory of `mem:` disks, and
//!    nothing else of it. For a node without a database a spare one stands ready: it has done
//!    everything up to Begin, whose answer it gets when it is needed.
//! 4. It keeps no image open: the node that has an image holds its lock. So a node's image is free
//!    when the last operation of the one before it has ended.
//! 5. Its process id stays the same over upgrades. When the predecessor has ended, the launcher
//!    replaces its own program by the new one, too (`execve`), and passes its descriptors to it.
//!    Until the new program resumes, the node sends nothing, and does not end with the launcher's
//!    threads.

//!
//! The launcher answers its node (`answers`), serves front ends (`front_door`), finds out which
//! disk nodes die of (`poison`), keeps its disks for a launcher after it (`store`), runs operators'
//! requests (`operators`) and upgrades (`upgrade`,
//! `estate`); all of these are parts of one object, [`Launcher`], so they refer to each other. It
//! uses the rooms `ipc`, `disks` and `upgrade`, and `admin` and `start`.

mod answers;
mod child;
pub(crate) mod confine;
mod estate;
pub(crate) mod front_door;
mod kept_config;
mod operators;
mod poison;
mod store;
#[cfg(test)]
mod tests;
pub(crate) mod to_node;
mod upgrade;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use nix::sys::wait::WaitStatus;
use reactor::log::{Log, LogFile, Sink};
use reactor::{Class, Core, DriverKind, Either, Event, PollMode, RuntimeConfig, race, timeout};

use self::answers::{MoveTarget, OpenDisk};
use self::child::{Child, Role, spawn};
pub(crate) use self::child::{SAID_BYTES_MAX, VARIABLE};
use self::estate::Beginning;
pub(crate) use self::estate::{RENEWED, is_renewed};
use self::kept_config::KeptConfig;
use self::operators::{Operators, Order};
use self::poison::Poison;
use self::store::Store;
use crate::admin::{self, Clients};
use crate::config::{Config, Sandbox};
use crate::disks::events::What;
use crate::disks::resources::{LocalResources, remove};
use crate::disks::state::remembers_disks;
use crate::error::{Error, Kind};
use crate::launcher::to_node::ToNode;
use crate::log::LOG_PATIENCE;
use crate::nbd_address::NbdAddress;
use crate::process::use_huge_pages;
use crate::upgrade::{own_program, upgraded};

/// Memory for buffers of the launcher's core.
const MEMORY_BYTES: usize = 4 << 20;
/// A node that dies earlier than this after its start dies soon.
const SOON_NS: u64 = 1_000_000_000;
/// How many nodes may die soon, one after the other, before the launcher ends, too; the first of
/// them that is started after a pause; the first pause, which then doubles, and the longest.
const DEATHS_MAX: u32 = 10;
const DEATHS_WITHOUT_PAUSE: u32 = 3;
const PAUSE_NS: u64 = 100_000_000;
const PAUSE_MAX_NS: u64 = 3_000_000_000;
/// When a spare node is started after the node serves, and after a spare node has died.
const SPARE_NS: u64 = 1_000_000_000;
const SPARE_AGAIN_NS: u64 = 60_000_000_000;
/// How long the predecessor of a node that has died may take to end.
const PREDECESSOR_NS: u64 = 2_000_000_000;
/// The program of this process, whatever has its name now.
const THIS_PROGRAM: &str = "/proc/self/exe";
/// How often the log file's name is checked.
const LOG_POLL_NS: u64 = 1_000_000_000;

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
    // A launcher that ends takes a running node along.
    let (sink, no_file) = match crate::log::open(&config.log, None) {
        Ok(sink) => (sink, None),
        Err(error) if renewed => (Box::new(std::io::stderr()) as Sink, Some(error)),
        Err(error) => return Err(error),
    };
    let (log, _writer) = crate::log::start(&config.log, sink)?;
    // Nothing may clean up: the next launcher takes what this one has left in the store.
    crate::log::end_process_on_panic();
    for why in config.unreadable.iter().cloned().chain(no_file.map(|error| error.to_string())) {
        tracing::error!("the launcher continues, but a node that is started now would fail: {why}");
    }
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
    resources: LocalResources,
    admin: Option<PathBuf>,
    /// The admin socket, and the number of its clients.
    door: Option<OwnedFd>,
    clients: Rc<Clients>,
    /// The operators' requests that are being run.
    orders: RefCell<Vec<Order>>,
    /// The disks that a node has, by name.
    open: RefCell<BTreeMap<String, OpenDisk>>,
    /// The devices to which disks are being moved, by the disk's name.
    targets: RefCell<BTreeMap<String, MoveTarget>>,
    /// The node that serves, or is to serve.
    current: RefCell<Rc<Child>>,
    /// The process that has handed over to the node, and may not have ended.
    predecessor: RefCell<Option<Rc<Child>>>,
    /// The node that stands ready, or that has died while it did; where there is to be one.
    spare: RefCell<Option<Rc<Child>>>,
    /// A spare node is being started.
    starts_spare: Cell<bool>,
    /// Where the node serves metrics.
    metrics: Option<SocketAddr>,
    /// Where the node serves NBD clients.
    nbd: Option<NbdAddress>,
    /// The socket at which disks of other nodes come.
    disks_door: Option<OwnedFd>,
    kept_config: KeptConfig,
    /// Where the disks are kept for a launcher after this one.
    store: Option<Rc<Store>>,
    /// The disks of which nodes have died.
    poison: Poison,
    /// A node has served.
    has_served: Cell<bool>,
    /// The node is started from this program because the one under its name does not start, or has
    /// died again and again.
    uses_own: Cell<bool>,
    upgrading: Cell<bool>,
    /// The node hands its disks over to a successor: nothing is changed.
    handing_over: Cell<bool>,
    /// The number of upgrades that wait for the one before them.
    waiting: Cell<usize>,
    /// The number of nodes that have ended and are not reaped.
    reaping: Cell<usize>,
    stopping: Cell<bool>,
    /// Signals are left to the next program.
    renewing: Cell<bool>,
    /// Notified after each change of the states above, from `current` on, and of a node's.
    changed: Rc<Event>,
}

impl Launcher {
    fn start(
        core: &Core,
        config: &Config,
        log: Log,
        processors: Arc<Vec<usize>>,
        beginning: Beginning,
    ) -> Result<Rc<Launcher>, Error> {
        let Beginning {
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
        } = beginning;
        let (admin, listener) = admin.unzip();
        let door = listener.as_ref().map(|listener| listener.as_fd().try_clone_to_owned());
        let door = door.transpose().map_err(|error| system("the admin socket", &error))?;
        let launcher = Rc::new(Launcher {
            core: core.clone(),
            log,
            processors,
            resources,
            admin,
            door,
            clients: Rc::default(),
            orders: RefCell::default(),
            open: RefCell::new(open),
            targets: RefCell::new(targets),
            current: RefCell::new(node.clone()),
            predecessor: RefCell::default(),
            spare: RefCell::default(),
            starts_spare: Cell::new(false),
            metrics: config.metrics,
            nbd: config.nbd.clone(),
            disks_door,
            kept_config: KeptConfig::of(config),
            store,
            poison,
            has_served: Cell::new(restored || node.is_serving()),
            uses_own: Cell::new(false),
            upgrading: Cell::new(false),
            handing_over: Cell::new(false),
            waiting: Cell::new(0),
            reaping: Cell::new(0),
            stopping: Cell::new(false),
            renewing: Cell::new(false),
            changed,
        });
        launcher.attend(&node);
        if node.is_serving() {
            let resuming = node.clone();
            core.spawn(Class::Control, async move {
                if let Err(error) = resuming.channel.ask(&ToNode::Resume, &[]).await {
                    tracing::error!("the node does not continue with its new launcher: {error}");
                    return resuming.kill();
                }
                let _ = resuming.channel.ask(&ToNode::StartOthers, &[]).await;
            });
            tracing::info!(node = node.pid.as_raw(), "this program is the launcher now");
        }
        if let Some(listener) = listener {
            let operators = Rc::new(Operators(launcher.clone()));
            let serving = admin::serve(listener, operators, launcher.clients.clone());
            core.spawn(Class::Control, serving);
        }
        core.spawn(Class::Control, launcher.clone().watch_signals());
        // Opening a database takes longer than a start, and only one process can have it open.
        if config.data.is_none() {
            core.spawn(Class::Background, launcher.clone().keep_spare());
        }
        if let Some(path) = &config.log.file {
            core.spawn(Class::Background, launcher.clone().watch_log(path.clone()));
        }
        Ok(launcher)
    }

    /// Returns when the serving node has ended and is not started again, with the exit code.
    async fn until_the_end(self: Rc<Self>) -> Result<i32, Error> {
        let (mut deaths, mut began_ns) = (0, self.core.now_ns());
        let status = loop {
            // A node that has handed over may wait for a device, long after its successor has
            // ended.
            let ended = || self.current.borrow().ended().filter(|_| !self.upgrading.get());
            let status = self.changed.wait_for(ended).await;
            self.note_end(status);
            let serves = self.current.borrow().is_serving();
            let soon = !serves || self.core.now_ns() < began_ns + SOON_NS;
            deaths = next_deaths(deaths, soon, self.blame(status));
            if !self.starts_again(status, deaths).await {
                break status;
            }
            began_ns = self.core.now_ns();
        };
        self.dismiss_spare().await;
        // Whoever waits for the launcher's end may open the images.
        let node = self.current.borrow().clone();
        node.until_it_is_buried().await;
        // A service manager starts the next launcher, which gets the connections from it.
        let failed = !matches!(status, WaitStatus::Exited(_, 0)) && self.has_served.get();
        let comes_again = failed && self.store.is_some();
        if !comes_again || self.stopping.get() {
            self.remove_names();
        }
        Ok(match status {
            WaitStatus::Exited(_, code) => code,
            WaitStatus::Signaled(_, signal, _) => {
                tracing::error!("the node was ended by signal {}", signal as i32);
                128 + signal as i32
            }
            _ => 1,
        })
    }

    /// Notes the end of the node for operators.
    fn note_end(&self, status: WaitStatus) {
        let process = self.current.borrow().pid.as_raw().unsigned_abs();
        let (signal, code) = match status {
            WaitStatus::Signaled(_, signal, _) => (Some(signal as i32), None),
            WaitStatus::Exited(_, code) => (None, Some(code)),
            _ => (None, None),
        };
        self.resources.events().note(What::Ended { process, signal, code });
    }

    /// Finds out which disk the node has died of, and lets that disk stand still if it has had
    /// enough deaths. Returns whether it was a disk.
    fn blame(&self, status: WaitStatus) -> bool {
        let WaitStatus::Signaled(_, signal, _) = status else { return false };
        let node = self.current.borrow();
        let killed = node.work.borrow().as_ref().and_then(reactor::killed_by);
        let Some(killed) = killed.filter(|killed| killed.signal == signal as i32) else {
            return false;
        };
        let open = self.open.borrow();
        let Some(disk) = open.keys().find(|disk| reactor::work_of(disk) == killed.work) else {
            return false;
        };
        tracing::error!(disk, signal = killed.signal, "the node died while it worked for a disk");
        if let Some(why) = self.poison.died_of(disk, killed.signal, self.core.now_ns()) {
            self.resources.events().note(What::StandsStill { disk: disk.clone(), why });
        }
        true
    }

    /// Removes the names of its sockets.
    fn remove_names(&self) {
        let left = self.open.take();
        for open in left.values() {
            remove(&open.spec.socket);
            open.door.forget();
        }
        if let Some(path) = &self.admin {
            remove(path);
        }
        // The name of another program's socket is not ours.
        let has_served = self.has_served.get() || self.current.borrow().is_serving();
        if let Some(path) = self.nbd.as_ref().and_then(NbdAddress::path).filter(|_| has_served) {
            remove(path);
        }
    }

    /// Keeps a spare node ready.
    async fn keep_spare(self: Rc<Self>) {
        loop {
            self.changed.wait_until(|| self.wants_spare()).await;
            let ns = match &*self.spare.borrow() {
                None => SPARE_NS,
                Some(_) => {
                    tracing::warn!("the spare node has ended; another one is started in a minute");
                    SPARE_AGAIN_NS
                }
            };
            let unwanted = self.changed.wait_until(|| !self.wants_spare());
            if timeout(&self.core, ns, unwanted).await.is_ok() {
                continue;
            }
            self.starts_spare.set(true);
            let spare = match own_program() {
                Ok(program) => spawn(&self.core, &program, Role::Spare, &self.changed).await,
                Err(error) => Err(error.to_string()),
            };
            match spare {
                Ok(spare) => {
                    tracing::info!(spare = spare.pid.as_raw(), "a spare node was started");
                    self.attend(&spare);
                    self.spare.replace(Some(spare));
                }
                Err(why) => {
                    tracing::warn!("no spare node: {why}");
                    self.core.sleep_ns(SPARE_AGAIN_NS).await;
                }
            }
            self.starts_spare.set(false);
            self.changed.notify_all();
        }
    }

    fn wants_spare(&self) -> bool {
        let is_missing = self.spare.borrow().as_ref().is_none_or(|spare| spare.has_ended());
        let node = self.current.borrow();
        let serves = node.is_serving() && !node.has_ended();
        let changes = self.upgrading.get() || self.renewing.get() || self.stopping.get();
        is_missing && serves && !changes
    }

    /// Ends the spare node, if there is one, and waits for its end.
    async fn dismiss_spare(&self) {
        self.changed.wait_until(|| !self.starts_spare.get()).await;
        if let Some(spare) = self.spare.take() {
            spare.kill();
            spare.until_it_ends().await;
            spare.until_it_is_buried().await;
        }
    }

    /// Starts a node again that has ended although nobody has asked it to. Returns false if that is
    /// not wanted, or not possible.
    async fn starts_again(self: &Rc<Self>, status: WaitStatus, mut deaths: u32) -> bool {
        self.has_served.set(self.has_served.get() || self.current.borrow().is_serving());
        let has_begun = self.current.borrow().begun().is_some_and(|begun| begun.is_ok());
        let asked = matches!(status, WaitStatus::Exited(_, 0)) || self.stopping.get();
        if asked || !self.has_served.get() {
            return false;
        }
        // The file under this program's name may have been replaced by another one.
        self.uses_own.set(!has_begun || deaths > DEATHS_WITHOUT_PAUSE);
        self.end_predecessor().await;
        loop {
            if deaths > DEATHS_MAX {
                tracing::error!(
                    "the node has ended {deaths} times, each time soon after its start: giving up"
                );
                return false;
            }
            let ns = match deaths.checked_sub(DEATHS_WITHOUT_PAUSE + 1) {
                None => 0,
                Some(nth) => (PAUSE_NS << nth).min(PAUSE_MAX_NS),
            };
            let (how, pause_ms) = (ending(status), ns / 1_000_000);
            tracing::error!(deaths, pause_ms, "the node has ended ({how}): starting it again");
            let stopping = self.changed.wait_until(|| self.stopping.get());
            if ns > 0 && timeout(&self.core, ns, stopping).await.is_ok() {
                return false;
            }
            match self.next_node().await {
                Ok(node) => {
                    self.make_current(&node);
                    node.call();
                    return true;
                }
                Err(why) => {
                    tracing::error!("cannot start the node again: {why}");
                    self.uses_own.set(true);
                    deaths += 1;
                }
            }
        }
    }

    /// The node for the place of one that has ended: the spare one, or a new one.
    async fn next_node(self: &Rc<Self>) -> Result<Rc<Child>, String> {
        if let Some(spare) = self.spare.take().filter(|spare| !spare.has_ended()) {
            tracing::info!(node = spare.pid.as_raw(), "the spare node takes its place");
            return Ok(spare);
        }
        let program = match self.uses_own.get() {
            true => {
                tracing::error!("the launcher's own program is started");
                THIS_PROGRAM.into()
            }
            false => own_program().map_err(|error| error.to_string())?,
        };
        let node = spawn(&self.core, &program, Role::First, &self.changed).await?;
        self.attend(&node);
        Ok(node)
    }

    /// Ends the process that has handed over to a node which has ended, if it still waits for a
    /// device or for clients: nothing else may work on memory, or on a server, that no lock
    /// protects, and its addresses are wanted.
    async fn end_predecessor(&self) {
        let Some(before) = self.predecessor.take().filter(|before| !before.has_ended()) else {
            return;
        };
        before.kill();
        let ends = async {
            before.until_it_ends().await;
            before.until_it_is_buried().await;
        };
        if timeout(&self.core, PREDECESSOR_NS, ends).await.is_err() {
            let pid = before.pid.as_raw();
            tracing::error!(pid, "the process before the last one does not end");
        }
    }

    /// Passes signals on: the first asks the node to end, the second ends all processes.
    async fn watch_signals(self: Rc<Self>) {
        loop {
            let signal = match self.next_signal().await {
                Ok(signal) => signal,
                Err(error) => {
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
            // A node that has just taken over does not serve yet, but ends in an orderly way. One
            // that has died is about to be started again.
            let starts = (!node.is_serving() || node.has_ended()) && !self.upgrading.get();
            let stops = self.stopping.replace(true);
            self.store.iter().for_each(|store| store.stopping());
            self.changed.notify_all();
            if stops || starts {
                node.kill();
                self.remove_names();
                self.log.flush(LOG_PATIENCE);
                std::process::exit(128 + signal);
            }
            self.core.spawn(Class::Control, node.end(self.core.clone()));
        }
    }

    /// The next signal. Takes none while signals are left to the next program.
    async fn next_signal(&self) -> std::io::Result<i32> {
        loop {
            self.changed.wait_until(|| !self.renewing.get()).await;
            let renewing = self.changed.wait_until(|| self.renewing.get());
            if let Either::Second(signal) = race(renewing, reactor::signal(&self.core)).await {
                return signal;
            }
        }
    }

    /// Hands the node the next log file when its file has been renamed.
    async fn watch_log(self: Rc<Self>, path: PathBuf) {
        let Ok(mut file) = LogFile::open(&path) else { return };
        loop {
            // Polled, because nothing announces that a file was renamed.
            self.core.sleep_ns(LOG_POLL_NS).await;
            let Ok(Some(renewed)) = file.renewed() else { continue };
            let Ok(renewed) = renewed.as_fd().try_clone_to_owned() else { continue };
            let node = self.current.borrow().clone();
            let spare = self.spare.borrow().clone().filter(|spare| !spare.has_ended());
            for node in [node].into_iter().chain(spare) {
                let Ok(renewed) = renewed.try_clone() else { continue };
                if let Err(error) = node.channel.ask(&ToNode::Log, &[renewed]).await {
                    tracing::warn!(pid = node.pid.as_raw(), "cannot hand it a log file: {error}");
                }
            }
        }
    }

    fn make_current(&self, node: &Rc<Child>) {
        self.predecessor.replace(Some(self.current.replace(node.clone())));
        self.changed.notify_all();
    }
}

/// The number of nodes that have died soon, one after the other, after another one's death. A death
/// that is laid at a disk does not count: guests must not be able to end the launcher, and the
/// number of such deaths is limited for each disk.
fn next_deaths(before: u32, soon: bool, of_disk: bool) -> u32 {
    match (soon, of_disk) {
        (true, false) => before + 1,
        (true, true) => before,
        (false, false) => 1,
        (false, true) => 0,
    }
}

/// How a process has ended, in words.
fn ending(status: WaitStatus) -> String {
    match status {
        WaitStatus::Exited(_, code) => format!("exit code {code}"),
        WaitStatus::Signaled(_, signal, _) => format!("signal {}", signal as i32),
        _ => "unknown".to_owned(),
    }
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
    timeout(core, ns, done).await.unwrap_or_else(|_| {
        let what = format!("the node has not answered within {} s", ns / 1_000_000_000);
        Err(Error::new(Kind::System, what))
    })
}
