//! The resources of a node outside its own memory and database: images, named sockets, and the
//! state that survives a restart.
//!
//! A confined node opens nothing itself. It names a disk to its launcher (`launcher`), which hands
//! it descriptors. A node that is not confined takes the same steps itself, with [`Here`], on which
//! the launcher works too.

use std::collections::BTreeMap;
use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;

use bdev::{Bdev, ErrorKind, Parts};
use reactor::{Core, UnixListener};
use serde::{Deserialize, Serialize};

use crate::disks::spec::DiskSpec;
use crate::disks::state::State;
use crate::error::{Error, Kind};
use crate::launcher::channel::Channel;
use crate::serve::admin::Request;
use crate::serve::patience::{Exclusive, Patience};

/// How often an attempt is repeated, in nanoseconds.
const LOOK_NS: u64 = 1_000_000;
/// The version of the protocol between a node and its launcher.
pub(crate) const VERSION: u32 = 1;

/// A request of a confined node to its launcher.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum ToLauncher {
    /// Start: the answer is [`Begun`], with the line to the predecessor, if there is one to take
    /// over from.
    Begin { version: u32 },
    /// The named disks: a list of [`Named`].
    Disks,
    /// A disk's image and its listening socket: [`Opened`].
    Open { name: String },
    /// Remove the name of a disk's socket.
    Close { name: String },
    /// Store a disk that is being attached, for the next start.
    Keep { name: String },
    /// Forget a disk that is being detached.
    Forget { name: String },
    /// Store what a disk's guest was told of its write cache.
    WriteCache { name: String, told: Option<bool> },
    /// The node serves.
    Serving,
}

/// A request of a launcher to its node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum ToNode {
    /// Run a request of the admin socket: the answer is the result as JSON.
    Run { request: Request },
    /// Hand over on the line that comes along: the answer is the pause in microseconds.
    HandOver,
    /// Whether the node could hand over, as far as its disks go: the answer is the reason against
    /// it, or null.
    MayHandOver,
    /// End in an orderly way.
    Stop,
    /// Log into the file that comes along.
    Log,
    /// Live on when this launcher ends, and send nothing after the answer: the launcher's program
    /// is about to be replaced.
    Hold,
    /// End with the launcher again, and continue: this is the new program.
    Resume,
}

/// What a node learns at the start.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Begun {
    /// The admin socket on which the launcher listens.
    pub admin: Option<PathBuf>,
    /// Attached disks come back after a restart.
    pub remembers: bool,
    /// Whether each served disk supports punching holes, if known.
    pub holes: BTreeMap<String, Option<bool>>,
}

/// A disk that an operator has named.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Named {
    pub spec: DiskSpec,
    /// It was attached while a node ran.
    pub attached: bool,
    /// What the front ends at its socket were told of a write cache, if known.
    pub write_cache: Option<bool>,
}

/// Sent with the descriptors of a disk: those of its device, and of its socket.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Opened {
    pub holes: Option<bool>,
    pub write_cache: Option<bool>,
}

/// A disk that is ready to be served.
pub(crate) struct Ready {
    pub device: Bdev,
    pub listener: UnixListener,
    pub write_cache: Option<bool>,
}

/// The resources that a process opens itself.
pub(crate) struct Here {
    core: Core,
    /// The disks of the command line and the configuration file.
    asked: Vec<DiskSpec>,
    state: Option<State>,
}

impl Here {
    pub fn new(core: &Core, asked: &[DiskSpec], state: Option<State>) -> Here {
        Here { core: core.clone(), asked: asked.to_vec(), state }
    }

    /// Whether attached disks come back after a restart.
    pub fn remembers(&self) -> bool {
        self.state.is_some()
    }

    /// The state directory, if there is one.
    pub fn state(&self) -> Option<&State> {
        self.state.as_ref()
    }

    /// All named disks. Those configured at the start come first, and win over attached ones of the
    /// same name.
    pub fn disks(&self) -> Vec<Named> {
        let attached = self.state.as_ref().map(State::disks).unwrap_or_default();
        let attached = attached
            .into_iter()
            .filter(|spec| self.asked.iter().all(|asked| asked.name != spec.name));
        let all = self.asked.iter().cloned().map(|spec| (spec, false));
        all.chain(attached.map(|spec| (spec, true)))
            .map(|(spec, attached)| {
                let write_cache = self.write_cache(&spec.socket);
                Named { spec, attached, write_cache }
            })
            .collect()
    }

    /// What the front ends at a socket were told, if known.
    pub fn write_cache(&self, socket: &Path) -> Option<bool> {
        self.state.as_ref()?.write_cache(socket)
    }

    pub async fn keep(&self, spec: &DiskSpec) -> Result<(), Error> {
        match &self.state {
            Some(state) => state.keep_disk(spec).await.map_err(system),
            None => Ok(()),
        }
    }

    pub async fn forget(&self, spec: &DiskSpec) -> Result<(), Error> {
        match &self.state {
            Some(state) => state.forget_disk(&spec.name, &spec.socket).await.map_err(system),
            None => Ok(()),
        }
    }

    pub async fn keep_write_cache(&self, socket: &Path, told: Option<bool>) -> Result<(), Error> {
        match &self.state {
            Some(state) => state.keep_write_cache(socket, told).await.map_err(system),
            None => Ok(()),
        }
    }

    /// Opens a disk's device, for another process, and its socket. Suspends.
    pub async fn parts(&self, spec: &DiskSpec) -> Result<(Parts, OwnedFd), Error> {
        let core = &self.core;
        let (parts, listener) =
            open(core, spec, async || Parts::open(core, &spec.uri).await).await?;
        let own = listener.as_fd().try_clone_to_owned();
        Ok((parts, own.map_err(|error| system(format!("disk {}: {error}", spec.name)))?))
    }

    /// Opens a disk for this process. Suspends.
    async fn open(&self, spec: &DiskSpec) -> Result<Ready, Error> {
        let core = &self.core;
        let (device, listener) =
            open(core, spec, async || Bdev::open(core, &spec.uri).await).await?;
        Ok(Ready { device, listener, write_cache: self.write_cache(&spec.socket) })
    }
}

fn system(what: impl Into<String>) -> Error {
    Error::new(Kind::System, what)
}

/// Repeats `attempt` until it succeeds or `again` refuses its error. Suspends between the attempts.
/// Polls, because no other process tells when it releases a file or a socket.
pub(crate) async fn patiently<T, E>(
    core: &Core,
    again: impl Fn(&E) -> bool,
    attempt: impl AsyncFn() -> Result<T, E>,
) -> Result<T, E> {
    loop {
        match attempt().await {
            Err(error) if again(&error) => core.sleep_ns(LOOK_NS).await,
            done => return done,
        }
    }
}

/// Opens a disk, and listens at its socket. A process that has just been killed may hold either for
/// a moment.
async fn open<T>(
    core: &Core,
    spec: &DiskSpec,
    open: impl AsyncFn() -> Result<T, bdev::Error>,
) -> Result<(T, UnixListener), Error> {
    let name = &spec.name;
    let image = match bdev::image_of(&spec.uri) {
        Some(path) => Exclusive::File(path),
        None => Exclusive::Unknown(spec.uri.clone()),
    };
    let image = Patience::with(image);
    let busy = |error: &bdev::Error| error.kind() == ErrorKind::Busy && image.lasts(core);
    let opened = patiently(core, busy, open).await;
    let opened = opened.map_err(|error| system(format!("disk {name}: {error}")))?;
    let socket = Patience::with(Exclusive::Socket(spec.socket.clone()));
    let in_use = |error: &std::io::Error| {
        error.kind() == std::io::ErrorKind::AddrInUse && socket.lasts(core)
    };
    let listener = patiently(core, in_use, async || UnixListener::bind(core, &spec.socket)).await;
    let listener = listener.map_err(|error| {
        system(format!("disk {name}: cannot listen on {}: {error}", spec.socket.display()))
    })?;
    Ok((opened, listener))
}

/// The resources of a node, opened here or by its launcher.
pub(crate) enum Outside {
    /// This process opens them; it may attach disks if the second field is true.
    Here(Here, bool),
    /// The launcher opens them; attached disks come back if the second field is true.
    Launcher(Rc<Channel>, bool),
}

/// The future that stores a change of the write cache.
type Keeping = Pin<Box<dyn Future<Output = Result<(), String>>>>;

impl Outside {
    /// Whether attached disks come back after a restart.
    pub fn remembers(&self) -> bool {
        match self {
            Outside::Here(here, _) => here.remembers(),
            Outside::Launcher(_, remembers) => *remembers,
        }
    }

    /// Whether disks may be attached to this process.
    pub fn may_attach(&self) -> bool {
        matches!(self, Outside::Launcher(..) | Outside::Here(_, true))
    }

    /// Releases the state directory: another process has it from now on.
    pub fn leave(&self) {
        if let Outside::Here(Here { state: Some(state), .. }, _) = self {
            state.release();
        }
    }

    /// The named disks. Suspends.
    pub async fn disks(&self) -> Result<Vec<Named>, Error> {
        match self {
            Outside::Here(here, _) => Ok(here.disks()),
            Outside::Launcher(channel, _) => channel.ask(&ToLauncher::Disks, &[]).await?.read(),
        }
    }

    /// Opens a named disk. Suspends.
    pub async fn open(&self, core: &Core, spec: &DiskSpec) -> Result<Ready, Error> {
        let channel = match self {
            Outside::Here(here, _) => return here.open(spec).await,
            Outside::Launcher(channel, _) => channel,
        };
        let name = spec.name.clone();
        let answer = channel.ask(&ToLauncher::Open { name }, &[]).await?;
        let Opened { holes, write_cache } = answer.read()?;
        let mut descriptors = answer.descriptors;
        let failed = |why: String| system(format!("disk {}: {why}", spec.name));
        let listener = descriptors.pop().ok_or_else(|| failed("no socket came".to_owned()))?;
        let listener = UnixListener::from_fd(core, listener);
        let listener = listener.map_err(|error| failed(error.to_string()))?;
        let device = Bdev::take(core, &spec.uri, Parts { descriptors, holes }).await;
        let device = device.map_err(|error| failed(error.to_string()))?;
        Ok(Ready { device, listener, write_cache })
    }

    /// Removes the name of a disk's socket.
    pub async fn close(&self, spec: &DiskSpec) {
        match self {
            Outside::Here(..) => remove(&spec.socket),
            // If the launcher has ended, nobody needs the name to be removed.
            Outside::Launcher(channel, _) => {
                let close = ToLauncher::Close { name: spec.name.clone() };
                drop(channel.ask(&close, &[]).await);
            }
        }
    }

    /// Stores a disk for the next start. Suspends until that is durable.
    pub async fn keep(&self, spec: &DiskSpec) -> Result<(), Error> {
        match self {
            Outside::Here(here, _) => here.keep(spec).await,
            Outside::Launcher(channel, _) => {
                let keep = ToLauncher::Keep { name: spec.name.clone() };
                channel.ask(&keep, &[]).await.map(drop)
            }
        }
    }

    /// Forgets a stored disk. Suspends until that is durable.
    pub async fn forget(&self, spec: &DiskSpec) -> Result<(), Error> {
        match self {
            Outside::Here(here, _) => here.forget(spec).await,
            Outside::Launcher(channel, _) => {
                let forget = ToLauncher::Forget { name: spec.name.clone() };
                channel.ask(&forget, &[]).await.map(drop)
            }
        }
    }

    /// Stores what a disk's guest was told of its write cache.
    pub fn keep_write_cache(self: &Rc<Self>, spec: &DiskSpec, told: Option<bool>) -> Keeping {
        let (outside, spec) = (self.clone(), spec.clone());
        Box::pin(async move {
            let kept = match &*outside {
                Outside::Here(here, _) => here.keep_write_cache(&spec.socket, told).await,
                Outside::Launcher(channel, _) => {
                    let keep = ToLauncher::WriteCache { name: spec.name, told };
                    channel.ask(&keep, &[]).await.map(drop)
                }
            };
            kept.map_err(|error| error.to_string())
        })
    }
}

/// Removes the name of a socket.
#[expect(clippy::disallowed_methods, reason = "the end of a disk or a node")]
pub(crate) fn remove(socket: &Path) {
    // The next listener replaces a name that is left.
    let _ = std::fs::remove_file(socket);
}
