//! A node replaces itself by another program without interrupting what it serves.
//!
//! ```text
//!   the running node                                     its successor
//!   start it  ------------------ exec ---------------->  check the configuration, start cores
//!             <----------------- Hello ----------------
//!   describe  --- Disk (image, memory) ..., Doors ---->  open devices from their descriptors, map
//!             --- Prepare ---------------------------->  the guests' memory
//!             <----------------- Prepared -------------
//!   for each disk, independently:
//!   quiesce it        .- its guest waits from here
//!             --- State ------------------------------>  take it, quiesced
//!             <----------------- Taken ----------------
//!             --- Go ---------------------------------->  let it continue
//!                     '- to here
//!   leave     --- Lead -------------------------------->  be the node
//!   drain clients, close the database, end               wait for the database's lock, open it,
//!                                                        accept clients
//! ```
//!
//! 1. `Go` is a disk's token. A side without the token pops nothing: the successor's disk is
//!    quiesced until it has received the token, and the old node's disk from before `State` for
//!    ever, or until the old node gives up. The token is sent once, as a message that is in the
//!    other's socket or is not.
//! 2. The first `Go`, or `Lead` if no disk is handed over, decides which process is the node.
//!    Before it the old node may give up for any reason (the program does not start, refuses, has
//!    another version, does not answer in time, ends): it ends the successor, lets its disks
//!    continue where they were quiesced, and logs the reason. A successor that receives neither
//!    ends. A successor that has received one continues whatever happens to the old node. If the
//!    old node ends, it opens again the disks that were not handed over, as after a crash.
//! 3. Slow work is done before the disks are quiesced. No disk waits for another's device, and the
//!    node does not wait for a slow disk: that disk follows, with its requests in flight
//!    (`moving.rs`).
//! 4. No listening socket is closed, and neither is the connection of a guest: they live on in the
//!    successor, and no connection is refused meanwhile; those of clients wait to be accepted. The
//!    connections of NBD clients end before the first disk is quiesced.
//!
//! A disk is handed over as it runs, whatever the successor's configuration says of a disk of the
//! same name; disks that only the configuration has are started afterwards.

mod follow;
mod moving;
pub(crate) mod room;
mod successor;
mod wire;

use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Child;
use std::rc::Rc;
use std::sync::Arc;

use reactor::{Class, Core, Event, Program, timeout};

use crate::disks::{Disks, Served};
use crate::error::{Error, Kind};
use crate::mutant::{Mutant, is};
pub(crate) use follow::follow;
use moving::Moves;
pub(crate) use successor::{Predecessor, inherit, line_to_predecessor};
use wire::{Line, Message};
#[cfg(any(test, feature = "testing"))]
pub(crate) use wire::{fuzz, fuzz_seeds};

/// Tells a successor that its standard input is the socket on which it is handed the node.
pub(crate) const VARIABLE: &str = "MILLRACE_SUCCESSOR";
/// How long a successor may take to start, and to open what it receives.
pub(crate) const START_NS: u64 = 10_000_000_000;
/// How long changes of disks may take that were begun after [`Upgrader::settle`].
const SETTLED_NS: u64 = 1_000_000_000;
/// How long the successor waits for a disk to be quiesced before it leads without it.
const REST_NS: u64 = 2_000_000_000;
/// How long a successor may take to take its first disk, while the guest waits.
const TAKE_NS: u64 = 2_000_000_000;
/// How often the end of the node is polled, and how long a successor that has closed its end may
/// take to end.
const POLL_NS: u64 = 5_000_000;
/// The reason for giving up when the node ends.
const ENDS: &str = "ending: this node was told to end";

/// A process that has taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Successor {
    /// Its process id.
    pub pid: u32,
    /// How long the guests waited, in microseconds.
    pub pause_us: u64,
    /// Whether it is known to serve clients, too: it waits for the end of the old process.
    pub serves: bool,
}

impl Successor {
    /// The encoding of the admin protocol.
    pub fn as_json(self) -> serde_json::Value {
        serde_json::json!({
            "successor": self.pid,
            "pause_us": self.pause_us,
            "serves": self.serves,
        })
    }
}

/// The listening sockets of a node.
#[derive(Default)]
pub(crate) struct Doors {
    /// For clients, by core.
    pub clients: Vec<OwnedFd>,
    /// For metrics.
    pub metrics: Option<OwnedFd>,
    /// For NBD clients.
    pub nbd: Option<OwnedFd>,
}

/// Hands a node over to a successor. Belongs to core 0.
pub(crate) struct Upgrader {
    core: Core,
    cores: usize,
    /// `None` until the node serves.
    disks: RefCell<Option<Rc<Disks>>>,
    /// `None` until the node serves.
    doors: RefCell<Option<Doors>>,
    /// Notified when the node serves.
    serves: Event,
    busy: Cell<bool>,
    /// A successor is the node.
    committed: Rc<Cell<bool>>,
    /// Called when the successor has taken over.
    leave: Box<dyn Fn()>,
    /// Whether the node is ending.
    ends: Box<dyn Fn() -> bool>,
}

impl Upgrader {
    /// `leave` is called when the successor has taken over. `ends` returns whether the node is
    /// ending; then an undecided upgrade is given up.
    pub fn new(
        core: &Core,
        leave: impl Fn() + 'static,
        ends: impl Fn() -> bool + 'static,
    ) -> Rc<Upgrader> {
        Rc::new(Upgrader {
            core: core.clone(),
            cores: core.cores(),
            disks: RefCell::default(),
            doors: RefCell::default(),
            serves: Event::new(),
            busy: Cell::new(false),
            committed: Rc::default(),
            leave: Box::new(leave),
            ends: Box::new(ends),
        })
    }

    /// Set when a successor is the node, even if this process is then killed.
    #[cfg(feature = "testing")]
    pub fn committed(&self) -> Rc<Cell<bool>> {
        self.committed.clone()
    }

    /// Sets what the node serves.
    pub fn ready(&self, disks: Rc<Disks>, doors: Doors) {
        self.disks.replace(Some(disks));
        self.doors.replace(Some(doors));
        self.serves.notify_all();
    }

    /// Hands the node over to a program, started as this one was. Suspends until the program
    /// serves; then this node ends. Logs the outcome, too.
    ///
    /// # Errors
    /// When the handover is not possible; then this node continues.
    pub async fn to(&self, program: &Path) -> Result<Successor, String> {
        let (disks, served) = self.begin(START_NS).await?;
        tracing::info!(program = %program.display(), "starting a successor");
        room::make(&self.core, room::STARTS_NS).await;
        let handed = self.hand_over(program, &served).await;
        if handed.is_err() {
            room::make(&self.core, 0).await;
        }
        match &handed {
            Ok((pid, _)) => {
                tracing::info!(successor = pid, "handed over: this process is ending");
            }
            Err(why) => {
                tracing::error!(program = %program.display(), "no upgrade, this node continues: {why}");
            }
        }
        let (pid, handed) = match handed {
            Ok((pid, moves)) => (pid, Ok(moves)),
            Err(why) => (0, Err(why)),
        };
        let pause_us = self.decided(&disks, handed)?;
        // With a database it serves clients when this process has closed that.
        Ok(Successor { pid, pause_us, serves: !self.has_database() })
    }

    fn has_database(&self) -> bool {
        self.doors.borrow().as_ref().is_some_and(|doors| !doors.clients.is_empty())
    }

    /// Like [`Upgrader::to`], with a successor that another process has started, at the other end
    /// of this line. Returns the longest pause of a guest, in microseconds.
    ///
    /// # Errors
    /// When the handover is not possible; then this node continues.
    pub async fn to_line(&self, line: OwnedFd) -> Result<u64, String> {
        let (disks, served) = self.begin(SETTLED_NS).await?;
        let handed = match Line::from_fd(&self.core, line) {
            Ok(line) => self.offer(Rc::new(line), &served).await,
            Err(error) => Err(format!("the line to the successor: {error}")),
        };
        self.decided(&disks, handed)
    }

    /// Waits until no disk is being changed, but not for ever: returns what is, in words.
    pub async fn settle(&self) -> Option<String> {
        let disks = self.disks.borrow().clone()?;
        disks.unchanged(&self.core, START_NS).await;
        disks.changing()
    }

    /// Whether the disks could be handed over, as far as is known.
    ///
    /// # Errors
    /// When they could not; the text says why.
    pub fn may_hand_over(&self) -> Result<(), String> {
        self.disks.borrow().as_ref().map_or(Ok(()), |disks| disks.all_came())
    }

    /// What is to be handed over, when changes of disks have ended, for which it waits for so many
    /// nanoseconds. No other change is made until [`Upgrader::decided`].
    async fn begin(&self, changes_ns: u64) -> Result<(Rc<Disks>, Vec<Served>), String> {
        // A node that has just taken over is ready when its predecessor has ended.
        let serves = self.serves.wait_until(|| self.disks.borrow().is_some());
        let _ = timeout(&self.core, START_NS, serves).await;
        let disks = self.disks.borrow().clone();
        let Some(disks) = disks.filter(|_| !self.busy.replace(true)) else {
            return Err("not now: the node is starting, ending or being upgraded".to_owned());
        };
        disks.unchanged(&self.core, changes_ns).await;
        let left = disks.leave_moves(&self.core).await;
        // Others may have begun meanwhile.
        disks.unchanged(&self.core, changes_ns).await;
        match left.and_then(|()| disks.to_hand_over()) {
            Ok(served) => Ok((disks, served)),
            Err(why) => {
                disks.continue_moves(&self.core);
                self.busy.set(false);
                Err(why)
            }
        }
    }

    /// Lets the node end, or continue; returns the longest pause of a guest, in microseconds.
    fn decided(&self, disks: &Rc<Disks>, handed: Result<Moves, String>) -> Result<u64, String> {
        let mut moves = match handed {
            Ok(moves) => moves,
            Err(why) => {
                disks.resume();
                disks.continue_moves(&self.core);
                disks.resume_nbd();
                disks.resume_receiving();
                self.busy.set(false);
                return Err(why);
            }
        };
        let (_, longest_us) = moves.pauses_us();
        let following = self.core.spawn(Class::Control, async move {
            if let Err(why) = moves.finish().await {
                let disks = moves.following().join(", ");
                tracing::error!(disks, "the successor has ended: {why}");
            }
        });
        disks.leave(following);
        (self.leave)();
        Ok(longest_us)
    }

    async fn hand_over(&self, program: &Path, disks: &[Served]) -> Result<(u32, Moves), String> {
        let system = |error: std::io::Error| format!("starting {}: {error}", program.display());
        let (ours, theirs) = UnixStream::pair().map_err(system)?;
        let line = Rc::new(Line::from_fd(&self.core, ours.into()).map_err(system)?);
        let program = Program {
            path: program.to_owned(),
            arguments: std::env::args_os().skip(1).collect(),
            variables: vec![(VARIABLE.into(), OsString::from("1"))],
            input: Arc::new(theirs.into()),
        };
        let mut child = self.core.start_process(program).await.map_err(system)?;
        let pid = child.id();
        match self.offer(line, disks).await {
            Ok(moves) => Ok((pid, moves)),
            Err(why) => Err(match self.end(&mut child).await {
                Some(status) => format!("{why} ({status})"),
                None => why,
            }),
        }
    }

    /// Hands over, or lets the disks continue where they are.
    async fn offer(&self, line: Rc<Line>, disks: &[Served]) -> Result<Moves, String> {
        let handed = self.converse(line, disks).await;
        if handed.is_err() && !is(Mutant::OldStaysAtRest) {
            disks.iter().for_each(|disk| disk.target.resume());
        }
        handed
    }

    /// Ends a successor; returns its exit status if it had ended before.
    async fn end(&self, child: &mut Child) -> Option<String> {
        // A successor that has closed its end is about to end.
        let _ = timeout(&self.core, POLL_NS, self.core.process_end(child.id())).await;
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status.to_string());
        }
        // It may have ended at this moment.
        let _ = child.kill();
        let _ = self.core.process_end(child.id()).await;
        // Reaps it.
        let _ = child.try_wait();
        None
    }

    /// Hands over. The caller has to finish the returned moves.
    async fn converse(&self, line: Rc<Line>, disks: &[Served]) -> Result<Moves, String> {
        let core = &self.core;
        self.unless_it_ends(self.prepare(&line, disks)).await?;
        // No request of an NBD client may be in flight here while the successor serves.
        let served = self.disks.borrow().clone();
        if let Some(served) = served {
            served.unless_machines_leave()?;
            self.unless_it_ends(served.pause_nbd()).await?;
            self.unless_it_ends(served.pause_receiving()).await?;
        }
        let kept = line.clone();
        let mut moves = Moves::new(core, line, disks, self.committed.clone());
        match moves.until_it_leads(&self.ends).await {
            Err(why) if !moves.is_committed() => return Err(why),
            Err(why) => {
                tracing::error!("the successor has ended after it had taken disks: {why}");
                if is(Mutant::TakesBack) {
                    disks.iter().for_each(|disk| disk.target.resume());
                }
                moves.is_alone(why);
            }
            Ok(()) => {}
        }
        let (median_us, pause_us) = moves.pauses_us();
        let slow = moves.slow().join(", ");
        if !slow.is_empty() {
            tracing::warn!(
                disks = slow,
                "their devices are not done: they follow with their requests in flight"
            );
        }
        tracing::info!(disks = disks.len(), pause_us, median_us, "the node is the successor");
        // The successor takes the end of the line for the end of this process, which has the
        // database's lock until then.
        if self.has_database() {
            self.core.spawn(Class::Control, async move {
                let _line = kept;
                std::future::pending::<()>().await;
            });
        }
        Ok(moves)
    }

    /// Waits for `done` unless the node ends meanwhile.
    async fn unless_it_ends<T>(
        &self,
        done: impl Future<Output = Result<T, String>>,
    ) -> Result<T, String> {
        let mut done = pin!(done);
        loop {
            match timeout(&self.core, POLL_NS, done.as_mut()).await {
                Ok(done) => return done,
                // Polled, because another core may end the node.
                Err(_) if (self.ends)() => return Err(ENDS.to_owned()),
                Err(_) => {}
            }
        }
    }

    /// Lets the successor start, and open what it will get.
    async fn prepare(&self, line: &Line, disks: &[Served]) -> Result<(), String> {
        let core = &self.core;
        let cores = within(core, START_NS, "starting", async {
            match line.receive().await?.0 {
                Message::Hello { cores } => Ok(cores),
                Message::Refused(why) => Err(why),
                other => Err(format!("it begins with {other:?}, not Hello")),
            }
        })
        .await?;
        if usize::from(cores) != self.cores {
            return Err(format!("it runs on {cores} cores, this node on {}", self.cores));
        }
        within(core, START_NS, "opening what it was given", self.describe(line, disks)).await
    }

    /// Sends everything that can be sent before the disks are quiesced.
    async fn describe(&self, line: &Line, disks: &[Served]) -> Result<(), String> {
        for disk in disks {
            let name = &disk.spec.name;
            let failed = |error: &dyn std::fmt::Display| format!("disk {name}: {error}");
            let images = disk.device.descriptors().map_err(|error| failed(&error))?;
            let memory = disk.target.memory().map_err(|error| failed(&error))?;
            let (regions, files): (Vec<_>, Vec<_>) = memory.into_iter().unzip();
            let message =
                Message::Disk { spec: disk.spec.clone(), images: images.len() as u16, regions };
            let mut descriptors = Vec::new();
            for image in images {
                descriptors.push(image.try_clone_to_owned().map_err(|error| failed(&error))?);
            }
            descriptors.extend(files);
            line.send(&message, &descriptors).await?;
        }
        let (message, descriptors, nbd) = {
            let doors = self.doors.borrow();
            let Doors { clients, metrics, nbd } = doors.as_ref().ok_or("the node is starting")?;
            let failed = |error: std::io::Error| format!("listening sockets: {error}");
            let all = clients.iter().chain(metrics);
            let descriptors = all.map(OwnedFd::try_clone).collect::<Result<Vec<_>, _>>();
            let nbd = nbd.as_ref().map(OwnedFd::try_clone).transpose().map_err(failed)?;
            let clients = clients.len() as u16;
            let message = Message::Doors { clients, metrics: metrics.is_some() };
            (message, descriptors.map_err(failed)?, nbd)
        };
        line.send(&message, &descriptors).await?;
        if let Some(nbd) = nbd {
            line.send(&Message::NbdDoor, &[nbd]).await?;
        }
        line.send(&Message::Prepare, &[]).await?;
        line.expect(&Message::Prepared).await
    }
}

/// Waits for `done` for at most `ns`.
async fn within<T>(
    core: &Core,
    ns: u64,
    what: &str,
    done: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let late = || Err(format!("not done within {} s", ns / 1_000_000_000));
    let done = timeout(core, ns, done).await.unwrap_or_else(|_| late());
    done.map_err(|why| format!("{what}: {why}"))
}

/// Upgrades to a program, by default the one under the node's own name.
pub(crate) async fn upgraded(
    program: Option<PathBuf>,
    to: impl AsyncFnOnce(&Path) -> Result<Successor, String>,
) -> Result<Successor, Error> {
    let upgraded = match program.map_or_else(own_program, Ok) {
        Ok(program) => to(&program).await,
        Err(error) => Err(format!("cannot find this program: {error}")),
    };
    upgraded.map_err(|why| {
        Error::new(Kind::System, format!("no upgrade: {why}")).hint(
            "nothing has changed, the node continues; the other program's messages are where the \
             node's log is",
        )
    })
}

/// The program under this one's own name: after an update of the files, the new one.
pub(crate) fn own_program() -> std::io::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let text = own.to_string_lossy();
    Ok(text.strip_suffix(" (deleted)").map_or(own.clone(), PathBuf::from))
}

#[cfg(test)]
mod tests {
    use bdev::Bdev;
    use reactor::{RuntimeConfig, UnixListener, UnixSocket};
    use vhost::Target;
    use vhost::handover::DiskState;

    use super::*;
    use crate::disks::options;

    fn line(core: &Core, end: UnixStream) -> Rc<Line> {
        Rc::new(Line::from_fd(core, end.into()).unwrap())
    }

    /// Plays a successor that ends after this many of its steps; returns the old node's outcome.
    async fn with_successor(core: &Core, disk: &Served, steps: usize) -> Result<Moves, String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (ours, theirs) = (line(core, ours), line(core, theirs));
        let upgrader = Upgrader::new(core, || {}, || false);
        upgrader.ready(Rc::default(), Doors::default());
        let successor = core.spawn(Class::Control, async move {
            let says = [Message::Hello { cores: 1 }, Message::Prepared, Message::Taken("a".into())];
            for (step, say) in says.iter().take(steps).enumerate() {
                theirs.send(say, &[]).await.unwrap();
                // The messages before the next step: Disk, Doors, Prepare; State; Go, Lead.
                for _ in 0..[3, 1, 2][step] {
                    match theirs.receive().await {
                        Ok((Message::State(name, document), descriptors)) => {
                            let state = DiskState::decode(&document).unwrap();
                            assert_eq!((&*state.name, &*name, descriptors.len()), ("a", "a", 1));
                        }
                        Ok((Message::Go(_), _)) => assert_eq!(step, 2, "the token came too early"),
                        Ok(_) => {}
                        Err(why) => panic!("{why}"),
                    }
                }
            }
        });
        let outcome = upgrader.converse(ours, std::slice::from_ref(disk)).await;
        successor.await;
        outcome
    }

    /// A disk at a socket in the temporary directory, and the task that serves it.
    async fn served(core: &Core, name: &str, uri: &str) -> (Served, reactor::JoinHandle<()>) {
        let socket = format!("millrace-upgrade-{}-{name}.sock", std::process::id());
        let socket = std::env::temp_dir().join(socket);
        let spec = format!("name={name} uri={uri} socket={}", socket.display());
        let spec: crate::DiskSpec = spec.parse().unwrap();
        let device = Bdev::open(core, &spec.uri).await.unwrap();
        let target = Target::new(core, device.clone(), options(&spec, 0));
        let listener = UnixListener::bind(core, &socket).unwrap();
        let serving = {
            let target = target.clone();
            core.spawn(Class::Control, async move { target.serve(listener).await })
        };
        (Served { spec, device, target }, serving)
    }

    #[expect(clippy::disallowed_methods, reason = "a test's own file")]
    fn remove(disk: &Served) {
        assert!(disk.spec.socket.exists(), "the name is the successor's");
        std::fs::remove_file(&disk.spec.socket).unwrap();
    }

    fn run(test: impl AsyncFn(Core) + Clone + Send + 'static) {
        let config =
            RuntimeConfig { processors: vec![0], memory: 16 << 20, ..RuntimeConfig::default() };
        reactor::run(&config, move |core| {
            let test = test.clone();
            async move { test(core).await }
        })
        .unwrap();
    }

    #[test]
    fn before_the_token_is_sent_the_disk_can_continue_where_it_is() {
        run(async |core| {
            let (disk, serving) = served(&core, "a", "null:1M").await;
            for (steps, why) in [(0, "starting"), (1, "opening"), (2, "taking")] {
                let error = with_successor(&core, &disk, steps).await.err().unwrap();
                assert!(error.contains("has gone") && error.contains(why), "{error}");
                disk.target.resume();
                let front_end = UnixSocket::connect(&core, &disk.spec.socket).unwrap();
                while !disk.target.is_connected() {
                    core.sleep_ns(100_000).await;
                }
                drop(front_end);
                while disk.target.is_connected() {
                    core.sleep_ns(100_000).await;
                }
            }
            with_successor(&core, &disk, 3).await.unwrap();
            serving.await;
            assert!(UnixSocket::connect(&core, &disk.spec.socket).is_err(), "nobody listens here");
            remove(&disk);
        });
    }

    #[test]
    fn a_disk_that_cannot_be_quiesced_delays_neither_the_node_nor_other_disks() {
        run(async |core| {
            // A target that is never told to end is never quiesced.
            let (quick, _) = served(&core, "quick", "null:1M").await;
            let (slow, serving) = served(&core, "slow", "null:1M").await;
            serving.cancel();
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (ours, theirs) = (line(&core, ours), line(&core, theirs));
            let heard = core.spawn(Class::Control, async move {
                let mut kinds = Vec::new();
                while let Ok((message, _)) = theirs.receive().await {
                    if let Message::State(name, _) = &message {
                        theirs.send(&Message::Taken(name.clone()), &[]).await.unwrap();
                    }
                    kinds.push(format!("{message:?}"));
                    if message == Message::Lead {
                        break;
                    }
                }
                kinds
            });
            let disks = [slow.clone(), quick.clone()];
            let mut moves = Moves::new(&core, ours, &disks, Rc::default());
            moves.until_it_leads(&|| false).await.unwrap();
            assert_eq!(moves.following(), ["slow"]);
            let (_, longest_us) = moves.pauses_us();
            assert!(longest_us < REST_NS / 1000, "{longest_us}");
            // The successor has gone after that.
            let heard = heard.await;
            assert!(heard[0].starts_with("State(\"quick\""), "{heard:?}");
            assert_eq!(heard[1..], ["Go(\"quick\")", "Lead"]);
            assert!(moves.finish().await.unwrap_err().contains("has gone"));
            [quick, slow].iter().for_each(remove);
        });
    }

    #[test]
    fn an_upgrade_that_is_not_decided_ends_with_the_node() {
        run(async |core| {
            let (slow, serving) = served(&core, "ends", "null:1M").await;
            serving.cancel();
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let ours = line(&core, ours);
            let ends = Cell::new(false);
            let mut moves =
                Moves::new(&core, ours.clone(), std::slice::from_ref(&slow), Rc::default());
            let began_ns = core.now_ns();
            let asks = || ends.replace(true);
            assert_eq!(moves.until_it_leads(&asks).await.unwrap_err(), ENDS);
            assert!(core.now_ns() < began_ns + REST_NS && !moves.is_committed());
            // A silent successor is not waited for either.
            let upgrader = Upgrader::new(&core, || {}, || true);
            upgrader.ready(Rc::default(), Doors::default());
            let error = upgrader.converse(ours, &[]).await.err().unwrap();
            assert_eq!(error, ENDS);
            remove(&slow);
        });
    }

    #[test]
    fn a_wait_that_takes_too_long_is_abandoned() {
        let config =
            RuntimeConfig { processors: vec![0], memory: 16 << 20, ..RuntimeConfig::default() };
        let main = |core: Core| async move {
            let never = std::future::pending::<Result<(), String>>();
            within(&core, 1_000_000, "waiting", never).await
        };
        let error = reactor::run(&config, main).unwrap().pop().unwrap().unwrap_err();
        assert_eq!(error, "waiting: not done within 0 s");
    }
}
