//! What a node has beyond its own memory and database: images, sockets under names, and what is
//! remembered over a restart.
//!
//! A node that is confined opens nothing itself. It asks its launcher (`launcher`), by the name of
//! a disk, and is handed descriptors. One that is not confined does the same for itself, in the
//! same steps: [`Here`] is what both of them work on.

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

/// How often it is looked whether somebody has let go of a disk, in nanoseconds.
const LOOK_NS: u64 = 1_000_000;
/// Of what a node and its launcher say to each other.
pub(crate) const VERSION: u32 = 1;

/// What a confined node asks its launcher for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum ToLauncher {
    /// What there is to know at the start: [`Begun`], and the line to the node before, if there is
    /// one to take over from.
    Begin { version: u32 },
    /// The disks that were named: [`Named`] of each.
    Disks,
    /// A disk's image and its listening socket: [`Opened`].
    Open { name: String },
    /// The name of a disk's socket is not needed any more.
    Close { name: String },
    /// A disk that is being attached is to come back after a restart.
    Keep { name: String },
    /// One that is being detached is not.
    Forget { name: String },
    /// What a disk's guest was told of its write cache.
    WriteCache { name: String, told: Option<bool> },
    /// It serves.
    Serving,
}

/// What a launcher asks its node for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum ToNode {
    /// What came through the admin socket: the result as JSON.
    Run { request: Request },
    /// To hand over on the line that comes along: the pause in microseconds.
    HandOver,
    /// Whether it could hand over, as far as its disks go: why not, or nothing.
    MayHandOver,
    /// To end in good order.
    Stop,
    /// To log into the file that comes along.
    Log,
    /// To live on when this launcher ends, and say nothing behind the answer: its program is about
    /// to be replaced.
    Hold,
    /// To end with the launcher again, and go on: this is the new program.
    Resume,
}

/// What a node learns at the start.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Begun {
    /// Where the launcher listens for who steers the node.
    pub admin: Option<PathBuf>,
    /// Disks that are attached come back after a restart.
    pub remembers: bool,
    /// Of the disks that are served: whether holes can be punched, where that is known.
    pub holes: BTreeMap<String, Option<bool>>,
}

/// A disk that somebody has asked for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Named {
    pub spec: DiskSpec,
    /// It was attached while a node ran.
    pub attached: bool,
    /// What the front ends at its socket were told of a write cache, if that is known.
    pub write_cache: Option<bool>,
}

/// What comes with the descriptors of a disk: those of its device, and of its socket.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Opened {
    pub holes: Option<bool>,
    pub write_cache: Option<bool>,
}

/// A disk that can be served.
pub(crate) struct Ready {
    pub device: Bdev,
    pub listener: UnixListener,
    pub write_cache: Option<bool>,
}

/// What a process may do itself.
pub(crate) struct Here {
    core: Core,
    /// Those of the command line and the configuration file.
    asked: Vec<DiskSpec>,
    state: Option<State>,
}

impl Here {
    pub fn new(core: &Core, asked: &[DiskSpec], state: Option<State>) -> Here {
        Here { core: core.clone(), asked: asked.to_vec(), state }
    }

    /// Whether what is attached comes back.
    pub fn remembers(&self) -> bool {
        self.state.is_some()
    }

    /// The state directory, if there is one.
    pub fn state(&self) -> Option<&State> {
        self.state.as_ref()
    }

    /// All that were named; those that were asked for at the start come first, and win.
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

    /// What the front ends at a socket were told, if that is known.
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

    /// What a disk's device is made of, for another process, and its socket. Suspends.
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

/// Tries until it is done, or until a failure is not worth another try. Suspends between the tries.
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
        system(format!("disk {name}: listening on {}: {error}", spec.socket.display()))
    })?;
    Ok((opened, listener))
}

/// See the module text.
pub(crate) enum Outside {
    /// This process may do it, and attach disks if the other is true.
    Here(Here, bool),
    /// Another one does; what is attached comes back if the other is true.
    Launcher(Rc<Channel>, bool),
}

/// What a change of the write cache is told.
type Keeping = Pin<Box<dyn Future<Output = Result<(), String>>>>;

impl Outside {
    /// Whether what is attached comes back.
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

    /// Gives up what only one process has: another one has it from now on.
    pub fn leave(&self) {
        if let Outside::Here(Here { state: Some(state), .. }, _) = self {
            state.release();
        }
    }

    /// The disks that were named. Suspends.
    pub async fn disks(&self) -> Result<Vec<Named>, Error> {
        match self {
            Outside::Here(here, _) => Ok(here.disks()),
            Outside::Launcher(channel, _) => channel.ask(&ToLauncher::Disks, &[]).await?.read(),
        }
    }

    /// A disk that was named, ready to be served. Suspends.
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

    /// Lets go of the name of a disk's socket.
    pub async fn close(&self, spec: &DiskSpec) {
        match self {
            Outside::Here(..) => remove(&spec.socket),
            // A launcher that has gone has no use for it.
            Outside::Launcher(channel, _) => {
                let close = ToLauncher::Close { name: spec.name.clone() };
                drop(channel.ask(&close, &[]).await);
            }
        }
    }

    /// Has a disk come back after a restart. Suspends until that is durable.
    pub async fn keep(&self, spec: &DiskSpec) -> Result<(), Error> {
        match self {
            Outside::Here(here, _) => here.keep(spec).await,
            Outside::Launcher(channel, _) => {
                let keep = ToLauncher::Keep { name: spec.name.clone() };
                channel.ask(&keep, &[]).await.map(drop)
            }
        }
    }

    /// Has it come back no more. Suspends until that is durable.
    pub async fn forget(&self, spec: &DiskSpec) -> Result<(), Error> {
        match self {
            Outside::Here(here, _) => here.forget(spec).await,
            Outside::Launcher(channel, _) => {
                let forget = ToLauncher::Forget { name: spec.name.clone() };
                channel.ask(&forget, &[]).await.map(drop)
            }
        }
    }

    /// Keeps what a disk's guest was told of its write cache.
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
    // Who listens next replaces one that is left.
    let _ = std::fs::remove_file(socket);
}
