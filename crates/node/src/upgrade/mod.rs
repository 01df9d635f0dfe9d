//! A node replaces itself by another program without letting go of what it serves.
//!
//! ```text
//!   the running node                                     its successor
//!   start it  ------------------ exec ---------------->  check the configuration, start cores
//!             <----------------- Hello ----------------
//!   describe  --- Disk (image, memory) ..., Doors ---->  open devices from their descriptors, map
//!             --- Prepare ---------------------------->  the guests' memory
//!             <----------------- Prepared -------------
//!   bring all
//!   disks to rest     .- the guests wait from here
//!             --- State ..., Take -------------------->  take all disks, at rest
//!             <----------------- Taken ----------------
//!   leave     --- Go -----------------------------------> let the disks go on
//!                     '- to here
//!   drain clients, close the database, end               wait for the database's lock, open it,
//!                                                        accept clients
//! ```
//!
//! 1. `Go` is the token. Whoever does not have it pops nothing: the successor's disks are at rest
//!    until it has heard it, those of the old node from before `State` until for ever, or until it
//!    gives up. It is said once, as a message that is in the other's socket or is not.
//! 2. Before `Go` the old node may give up for any reason (the program does not start, refuses,
//!    speaks another version, says nothing in time, ends): it ends the successor, lets its disks go
//!    on where they came to rest, and says why in its log. A successor that never hears `Go` ends.
//! 3. What is slow is done before the disks come to rest.
//! 4. Nobody's sockets are closed: listening ones and connections live on in the successor, and no
//!    connection is refused meanwhile; those of clients of the database wait to be accepted.
//!
//! What runs is handed over as it runs, whatever the successor's configuration says of a disk of
//! the same name; disks that only the configuration knows are started afterwards.

mod successor;
mod wire;

use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::future::{Future, poll_fn};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Child;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use reactor::{Class, Core, Program};

use crate::disks::{Disks, Served};
use crate::mutant::{Mutant, is};
pub(crate) use successor::{Predecessor, inherit, line_to_predecessor};
use wire::{Line, Message};
#[cfg(any(test, feature = "testing"))]
pub(crate) use wire::{fuzz, fuzz_seeds};

/// Tells a successor that its standard input is the socket on which it is handed the node.
pub(crate) const VARIABLE: &str = "MILLRACE_SUCCESSOR";
/// How long a successor may take to start, and to open what it is given.
pub(crate) const START_NS: u64 = 10_000_000_000;
/// How long what is at the devices may take, while the guests wait.
const REST_NS: u64 = 2_000_000_000;
/// How long a successor may take to take the disks, while the guests wait.
const TAKE_NS: u64 = 2_000_000_000;
/// How often it is looked whether a successor that was ended has ended.
const LOOK_NS: u64 = 5_000_000;

/// A process that has taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Successor {
    /// Its process id.
    pub pid: u32,
    /// How long the guests waited, in microseconds.
    pub pause_us: u64,
}

impl Successor {
    /// As the admin protocol has it.
    pub fn as_json(self) -> serde_json::Value {
        serde_json::json!({"successor": self.pid, "pause_us": self.pause_us})
    }
}

/// What a node can be asked for: to hand over to a successor. Belongs to core 0.
pub(crate) struct Upgrader {
    core: Core,
    cores: usize,
    /// Once the node serves.
    disks: RefCell<Option<Rc<Disks>>>,
    /// Listening sockets for clients, by core, and then the one for metrics.
    doors: RefCell<Option<(Vec<OwnedFd>, Option<OwnedFd>)>>,
    busy: Cell<bool>,
    /// Called when the successor has taken over.
    leave: Box<dyn Fn()>,
}

impl Upgrader {
    pub fn new(core: &Core, leave: impl Fn() + 'static) -> Rc<Upgrader> {
        Rc::new(Upgrader {
            core: core.clone(),
            cores: core.cores(),
            disks: RefCell::default(),
            doors: RefCell::default(),
            busy: Cell::new(false),
            leave: Box::new(leave),
        })
    }

    /// The node serves this.
    pub fn ready(&self, disks: Rc<Disks>, clients: Vec<OwnedFd>, metrics: Option<OwnedFd>) {
        self.disks.replace(Some(disks));
        self.doors.replace(Some((clients, metrics)));
    }

    /// Hands the node over to a program, started as this one was. Suspends until that serves; then
    /// this node ends. The outcome is logged, too.
    ///
    /// # Errors
    /// Why it was not possible: then this node goes on.
    pub async fn to(&self, program: &Path) -> Result<Successor, String> {
        let (disks, served) = self.begin().await?;
        tracing::info!(program = %program.display(), "starting a successor");
        let handed = self.hand_over(program, &served).await;
        match &handed {
            Ok(Successor { pid, .. }) => {
                tracing::info!(successor = pid, "handed over: what is left here comes to its end");
            }
            Err(why) => {
                tracing::error!(program = %program.display(), "no upgrade, this node goes on: {why}");
            }
        }
        self.decided(&disks, handed.is_ok());
        handed
    }

    /// The same with a successor that somebody else has started, who is at the other end of this
    /// line. Gives how long the guests waited, in microseconds.
    ///
    /// # Errors
    /// Why it was not possible: then this node goes on.
    pub async fn to_line(&self, line: OwnedFd) -> Result<u64, String> {
        let (disks, served) = self.begin().await?;
        let handed = match Line::from_fd(&self.core, line) {
            Ok(line) => self.offer(&line, &served).await,
            Err(error) => Err(format!("the line to the successor: {error}")),
        };
        self.decided(&disks, handed.is_ok());
        handed
    }

    /// What is there to be handed over; no other change is made until [`Upgrader::decided`].
    async fn begin(&self) -> Result<(Rc<Disks>, Vec<Served>), String> {
        // A node that has just taken over is ready when the one before it has ended.
        let since_ns = self.core.now_ns();
        while self.disks.borrow().is_none() && self.core.now_ns() < since_ns + START_NS {
            self.core.sleep_ns(LOOK_NS).await;
        }
        let disks = self.disks.borrow().clone();
        let Some(disks) = disks.filter(|_| !self.busy.replace(true)) else {
            return Err("not now: the node is starting, ending or being upgraded".to_owned());
        };
        match disks.to_hand_over() {
            Ok(served) => Ok((disks, served)),
            Err(why) => {
                self.busy.set(false);
                Err(why)
            }
        }
    }

    fn decided(&self, disks: &Disks, handed_over: bool) {
        if handed_over {
            disks.leave();
            (self.leave)();
        } else {
            disks.go_on();
            self.busy.set(false);
        }
    }

    async fn hand_over(&self, program: &Path, disks: &[Served]) -> Result<Successor, String> {
        let system = |error: std::io::Error| format!("starting {}: {error}", program.display());
        let (ours, theirs) = UnixStream::pair().map_err(system)?;
        let line = Line::from_fd(&self.core, ours.into()).map_err(system)?;
        let program = Program {
            path: program.to_owned(),
            arguments: std::env::args_os().skip(1).collect(),
            variables: vec![(VARIABLE.into(), OsString::from("1"))],
            input: Arc::new(theirs.into()),
        };
        let mut child = self.core.start_process(program).await.map_err(system)?;
        let pid = child.id();
        match self.offer(&line, disks).await {
            Ok(pause_us) => Ok(Successor { pid, pause_us }),
            Err(why) => {
                drop(line);
                Err(match self.end(&mut child).await {
                    Some(status) => format!("{why} ({status})"),
                    None => why,
                })
            }
        }
    }

    /// Hands over, or lets the disks go on where they are.
    async fn offer(&self, line: &Line, disks: &[Served]) -> Result<u64, String> {
        let handed = self.converse(line, disks).await;
        let goes_on = match handed {
            Ok(_) => is(Mutant::OldGoesOn),
            Err(_) => !is(Mutant::OldStaysAtRest),
        };
        if goes_on {
            disks.iter().for_each(|disk| disk.target.go_on());
        }
        handed
    }

    /// Ends a successor; says how it ended if it had ended before.
    async fn end(&self, child: &mut Child) -> Option<String> {
        // One that has closed its end is about to.
        self.core.sleep_ns(LOOK_NS).await;
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status.to_string());
        }
        // It may have ended in this moment.
        let _ = child.kill();
        while let Ok(None) = child.try_wait() {
            self.core.sleep_ns(LOOK_NS).await;
        }
        None
    }

    /// Hands over; gives how long the guests waited, in microseconds.
    async fn converse(&self, line: &Line, disks: &[Served]) -> Result<u64, String> {
        let core = &self.core;
        let cores = within(core, START_NS, "starting", async {
            match line.hear().await?.0 {
                Message::Hello { cores } => Ok(cores),
                Message::Refused(why) => Err(why),
                other => Err(format!("it begins with {other:?}")),
            }
        })
        .await?;
        if usize::from(cores) != self.cores {
            return Err(format!("it runs on {cores} cores, this node on {}", self.cores));
        }
        within(core, START_NS, "opening what it was given", self.describe(line, disks)).await?;

        let began_ns = core.now_ns();
        let states = within(core, REST_NS, "bringing the disks to rest", rest(core, disks)).await?;
        within(core, TAKE_NS, "taking the disks", async {
            for (state, descriptors) in &states {
                line.say(&Message::State(state.encode()), descriptors).await?;
            }
            line.say(&Message::Take, &[]).await?;
            line.hear_that(&Message::Taken).await
        })
        .await?;
        // Whatever comes now, the disks are the successor's: see the module text.
        line.say(&Message::Go, &[]).await?;
        let pause_us = (core.now_ns() - began_ns) / 1000;
        tracing::info!(disks = disks.len(), pause_us, "the disks are the successor's");
        Ok(pause_us)
    }

    /// Says all that can be said before the disks come to rest.
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
            line.say(&message, &descriptors).await?;
        }
        let (message, descriptors) = {
            let doors = self.doors.borrow();
            let (clients, metrics) = doors.as_ref().ok_or("the node is starting")?;
            let all = clients.iter().chain(metrics);
            let descriptors = all.map(OwnedFd::try_clone).collect::<Result<Vec<_>, _>>();
            let descriptors = descriptors.map_err(|error| format!("listening sockets: {error}"))?;
            let clients = clients.len() as u16;
            (Message::Doors { clients, metrics: metrics.is_some() }, descriptors)
        };
        line.say(&message, &descriptors).await?;
        line.say(&Message::Prepare, &[]).await?;
        line.hear_that(&Message::Prepared).await
    }
}

/// Brings all disks to rest at once.
async fn rest(core: &Core, disks: &[Served]) -> Result<Vec<vhost::Export>, String> {
    let begin = |disk: &Served| {
        let target = disk.target.clone();
        core.spawn(Class::Control, async move { target.rest().await })
    };
    let resting: Vec<_> = disks.iter().map(begin).collect();
    let mut states = Vec::new();
    for (disk, resting) in disks.iter().zip(resting) {
        states.push(resting.await.map_err(|why| format!("disk {}: {why}", disk.spec.name))?);
    }
    Ok(states)
}

/// Waits for something, but not for ever.
async fn within<T>(
    core: &Core,
    ns: u64,
    what: &str,
    done: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let (mut done, mut late) = (pin!(done), pin!(core.sleep_ns(ns)));
    let done = poll_fn(|cx| match (done.as_mut().poll(cx), late.as_mut().poll(cx)) {
        (Poll::Ready(done), _) => Poll::Ready(done),
        (Poll::Pending, Poll::Ready(())) => {
            Poll::Ready(Err(format!("not done within {} s", ns / 1_000_000_000)))
        }
        (Poll::Pending, Poll::Pending) => Poll::Pending,
    })
    .await;
    done.map_err(|why| format!("{what}: {why}"))
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

    /// Plays a successor that ends after so many of its steps; what the old node says of it.
    async fn with_successor(core: &Core, disk: &Served, steps: usize) -> Result<u64, String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let line = |end: UnixStream| Line::from_fd(core, end.into()).unwrap();
        let (ours, theirs) = (line(ours), line(theirs));
        let upgrader = Upgrader::new(core, || {});
        upgrader.ready(Rc::default(), Vec::new(), None);
        let successor = core.spawn(Class::Control, async move {
            let says = [Message::Hello { cores: 1 }, Message::Prepared, Message::Taken];
            for (step, say) in says.iter().take(steps).enumerate() {
                theirs.say(say, &[]).await.unwrap();
                // What comes before the next step: Disk, Doors, Prepare; State, Take; Go.
                for _ in 0..[3, 2, 1][step] {
                    match theirs.hear().await {
                        Ok((Message::State(document), descriptors)) => {
                            let state = DiskState::decode(&document).unwrap();
                            assert_eq!((&*state.name, descriptors.len()), ("a", 1));
                        }
                        Ok((Message::Go, _)) => assert_eq!(step, 2, "the token came too early"),
                        Ok(_) => {}
                        Err(why) => panic!("{why}"),
                    }
                }
            }
        });
        let outcome = upgrader.converse(&ours, std::slice::from_ref(disk)).await;
        successor.await;
        outcome
    }

    #[test]
    fn until_the_token_is_given_the_disk_can_go_on_where_it_is() {
        let name = format!("millrace-upgrade-{}.sock", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let spec: crate::DiskSpec =
            format!("name=a uri=null:1M socket={}", socket.display()).parse().unwrap();
        let config =
            RuntimeConfig { processors: vec![0], memory: 16 << 20, ..RuntimeConfig::default() };
        let path = socket.clone();
        reactor::run(&config, move |core| {
            let (spec, socket) = (spec.clone(), path.clone());
            async move {
                let device = Bdev::open(&core, &spec.uri).await.unwrap();
                let target = Target::new(&core, device.clone(), options(&spec, 0));
                let listener = UnixListener::bind(&core, &socket).unwrap();
                let serving = {
                    let target = target.clone();
                    core.spawn(Class::Control, async move { target.serve(listener).await })
                };
                let disk = Served { spec, device, target };
                for (steps, why) in [(0, "starting"), (1, "opening"), (2, "taking")] {
                    let error = with_successor(&core, &disk, steps).await.unwrap_err();
                    assert!(error.contains("has gone") && error.contains(why), "{error}");
                    disk.target.go_on();
                    let front_end = UnixSocket::connect(&core, &socket).unwrap();
                    while !disk.target.is_connected() {
                        core.sleep_ns(100_000).await;
                    }
                    drop(front_end);
                    while disk.target.is_connected() {
                        core.sleep_ns(100_000).await;
                    }
                }
                with_successor(&core, &disk, 3).await.unwrap();
                let front_end = UnixSocket::connect(&core, &socket).unwrap();
                core.sleep_ns(5_000_000).await;
                assert!(!disk.target.is_connected(), "it is the successor's to accept");
                drop(front_end);
                disk.target.stop();
                serving.await;
            }
        })
        .unwrap();
        assert!(socket.exists(), "the name is the successor's");
        #[expect(clippy::disallowed_methods, reason = "a test's own file")]
        std::fs::remove_file(socket).unwrap();
    }

    #[test]
    fn what_takes_too_long_is_given_up() {
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
