//! The process of a node.

use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use reactor::{Class, Core, Event, OtherProcess, Program, timeout};

use crate::ipc::channel::Channel;
use crate::ipc::frames::Limits;
use crate::launcher::to_node::ToNode;

/// Tells a process that it is a node, and that its standard input is the socket to its launcher.
/// The value is the launcher's process id, a colon, and the node's [`Role`].
pub(crate) const VARIABLE: &str = "MILLRACE_LAUNCHER";
/// Maximum length of a node's message: the statistics of all disks are the longest.
pub(crate) const SAID_BYTES_MAX: usize = 32 << 20;
/// How long a node may take to end after it was asked to: the limits of its clients and devices,
/// and the closing of its database.
pub(super) const STOP_NS: u64 = 60_000_000_000;

/// How long a node that has ended may leave its socket open.
const SOCKET_NS: u64 = 20_000_000;
/// How long its survivor may take to close all files.
const SURVIVOR_NS: u64 = 1_000_000_000;

/// Why a node was started.
pub(super) enum Role {
    /// To serve.
    First,
    /// To take over from another node, at this line.
    Successor(OwnedFd),
    /// To stand ready for the death of another node.
    Spare,
}

/// A node's process.
pub(super) struct Child {
    pub(super) pid: Pid,
    pub(super) channel: Channel,
    /// The channel's socket.
    pub(super) stream: UnixStream,
    /// The line to the predecessor, until the node asks for it.
    pub(super) line: Cell<Option<OwnedFd>>,
    /// Whether it has begun, or why it was refused.
    begun: RefCell<Option<Result<(), String>>>,
    /// It stands ready, and has to wait.
    waits: Cell<bool>,
    /// It was a spare node at first.
    was_spare: bool,
    serving: Cell<bool>,
    /// Memory in which its cores note what they are working on.
    pub(super) work: RefCell<Option<OwnedFd>>,
    /// It has asked to begin.
    begins: Cell<bool>,
    /// The number of its questions that are answered beside others.
    opening: Cell<usize>,
    /// The number of those whose answer is stored first.
    storing: Cell<usize>,
    ended: Cell<Option<WaitStatus>>,
    survivor: RefCell<Option<OtherProcess>>,
    /// It has ended, and its survivor, too.
    buried: Cell<bool>,
    /// The launcher's event: notified after each change of the states above, from `begun` on.
    changed: Rc<Event>,
}

impl Child {
    /// For a process that has just been started, or that runs since before this program.
    pub(super) fn new(
        core: &Core,
        pid: i32,
        socket: OwnedFd,
        changed: &Rc<Event>,
    ) -> std::io::Result<Child> {
        let stream = UnixStream::from(socket.try_clone()?);
        // No descriptors come from a node.
        let limits = Limits { body_bytes: SAID_BYTES_MAX, descriptors: 0 };
        Ok(Child {
            pid: Pid::from_raw(pid),
            channel: Channel::from_fd(core, socket, limits)?,
            stream,
            line: Cell::default(),
            begun: RefCell::default(),
            waits: Cell::new(false),
            was_spare: false,
            serving: Cell::new(false),
            work: RefCell::default(),
            begins: Cell::new(false),
            opening: Cell::new(0),
            storing: Cell::new(0),
            ended: Cell::new(None),
            survivor: RefCell::default(),
            buried: Cell::new(false),
            changed: changed.clone(),
        })
    }

    /// Whether it has begun, or why it was refused.
    pub(super) fn begun(&self) -> Option<Result<(), String>> {
        self.begun.borrow().clone()
    }

    pub(super) fn set_begun(&self, begun: Result<(), String>) {
        self.begun.replace(Some(begun));
        self.changed.notify_all();
    }

    /// Notes that it has asked to begin; returns whether it had before.
    pub(super) fn begins(&self) -> bool {
        self.begins.replace(true)
    }

    /// Whether it stands ready, and has to wait.
    pub(super) fn waits(&self) -> bool {
        self.waits.get()
    }

    /// Whether it stood ready before it served.
    pub(super) fn was_spare(&self) -> bool {
        self.was_spare
    }

    /// Lets a spare node serve.
    pub(super) fn call(&self) {
        self.waits.set(false);
        self.changed.notify_all();
    }

    pub(super) fn is_serving(&self) -> bool {
        self.serving.get()
    }

    pub(super) fn set_serving(&self) {
        self.serving.set(true);
        self.changed.notify_all();
    }

    /// The number of its questions that are answered beside others: disks being opened, and what
    /// is stored for a move.
    pub(super) fn opening(&self) -> usize {
        self.opening.get()
    }

    /// The number of those whose answer is stored first.
    pub(super) fn storing(&self) -> usize {
        self.storing.get()
    }

    /// Counts a question that is answered beside others, until the result is dropped.
    pub(super) fn count(self: &Rc<Self>, stores: bool) -> Counted {
        self.opening.set(self.opening.get() + 1);
        self.storing.set(self.storing.get() + usize::from(stores));
        Counted { node: self.clone(), stores }
    }

    /// Its exit status, if it has ended.
    pub(super) fn ended(&self) -> Option<WaitStatus> {
        self.ended.get()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.get().is_some()
    }

    pub(super) fn set_ended(&self, status: WaitStatus) {
        self.ended.set(Some(status));
        self.changed.notify_all();
    }

    /// Notes its survivor: a process that shares its memory and open files.
    pub(super) fn set_survivor(&self, survivor: OtherProcess) {
        self.survivor.replace(Some(survivor));
    }

    /// A descriptor of its survivor.
    pub(super) fn survivor(&self) -> Option<OwnedFd> {
        self.survivor.borrow().as_ref()?.as_fd().try_clone_to_owned().ok()
    }

    /// Waits until it has ended, and then makes sure that its survivor, if there is one, keeps
    /// neither its socket open nor its images: it could have been taken over with the node.
    pub(super) async fn bury(self: Rc<Self>, core: Core) {
        let _ = core.process_end(self.pid.as_raw() as u32).await;
        if let Some(survivor) = self.survivor.take() {
            self.end_survivor(&core, &survivor).await;
            // Process 1 is the parent of every process whose own one has ended.
            let ended = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG;
            let _ = waitid(Id::PIDFd(survivor.as_fd()), ended);
        }
        self.buried.set(true);
        self.changed.notify_all();
    }

    async fn end_survivor(&self, core: &Core, survivor: &OtherProcess) {
        let mut ends = pin!(survivor.end(core));
        if timeout(core, SOCKET_NS, ends.as_mut()).await.is_ok() {
            return;
        }
        let _ = self.stream.shutdown(Shutdown::Both);
        if timeout(core, SURVIVOR_NS, ends.as_mut()).await.is_err() {
            // If it is only slow to take the memory apart, this has no effect.
            survivor.kill();
            let _ = timeout(core, SURVIVOR_NS, ends).await;
        }
    }

    /// Waits until nothing of it has its images open.
    pub(super) async fn until_it_is_buried(&self) {
        self.changed.wait_until(|| self.buried.get()).await;
    }

    pub(super) fn kill(&self) {
        // Until it has been waited for, no other process gets its process id.
        if !self.has_ended() {
            let _ = nix::sys::signal::kill(self.pid, Signal::SIGKILL);
            // Its children may live on with its socket.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }

    /// Asks it to end in an orderly way, and kills it if it has not ended in time. The second
    /// signal kills it immediately.
    pub(super) async fn end(self: Rc<Self>, core: Core) {
        let node = self.clone();
        core.spawn(Class::Control, async move {
            if let Err(error) = node.channel.ask(&ToNode::Stop, &[]).await {
                tracing::debug!(pid = node.pid.as_raw(), "cannot ask it to end: {error}");
            }
        });
        core.sleep_ns(STOP_NS).await;
        if !self.has_ended() {
            let seconds = STOP_NS / 1_000_000_000;
            tracing::error!(pid = self.pid.as_raw(), "not ended within {seconds} s: killed");
            self.kill();
        }
    }

    /// Waits until it has ended.
    pub(super) async fn until_it_ends(&self) {
        self.changed.wait_until(|| self.has_ended()).await;
    }
}

/// A question that is being answered.
pub(super) struct Counted {
    node: Rc<Child>,
    stores: bool,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let Child { opening, storing, changed, .. } = &*self.node;
        opening.set(opening.get() - 1);
        storing.set(storing.get() - usize::from(self.stores));
        changed.notify_all();
    }
}

/// Starts a node.
pub(super) async fn spawn(
    core: &Core,
    program: &Path,
    role: Role,
    changed: &Rc<Event>,
) -> Result<Rc<Child>, String> {
    let system = |error: std::io::Error| format!("starting {}: {error}", program.display());
    let (ours, theirs) = UnixStream::pair().map_err(system)?;
    let (name, line) = match role {
        Role::First => ("first", None),
        Role::Successor(line) => ("successor", Some(line)),
        Role::Spare => ("spare", None),
    };
    let variable = OsString::from(format!("{}:{name}", std::process::id()));
    let program = Program {
        path: program.to_owned(),
        arguments: std::env::args_os().skip(1).collect(),
        variables: vec![(VARIABLE.into(), variable)],
        input: Arc::new(theirs.into()),
    };
    // The node is waited for by its process id.
    let child = core.start_process(program).await.map_err(system)?;
    let mut node = Child::new(core, child.id() as i32, ours.into(), changed).map_err(system)?;
    node.line.set(line);
    node.was_spare = name == "spare";
    node.waits.set(node.was_spare);
    Ok(Rc::new(node))
}
