//! The clients of the admin socket.

use std::path::Path;
use std::pin::pin;
use std::rc::Rc;

use reactor::{Core, timeout};
use serde::de::IgnoredAny;

use super::child::Child;
use super::{Launcher, within};
use crate::admin::{Commands, Request};
use crate::disks::limits::LimitChange;
use crate::disks::spec::DiskSpec;
use crate::disks::transfers::Peer;
use crate::error::{Error, Kind};
use crate::ipc::channel::Answer;
use crate::launcher::to_node::ToNode;
use crate::upgrade::upgraded;

/// How long a node may answer nothing at all while it has a request of the admin socket. The
/// request itself may take any time.
pub(super) const SILENT_NS: u64 = 90_000_000_000;
/// How often a node that works on a request is asked whether it answers, and how long it may take.
const LOOK_NS: u64 = 5_000_000_000;
/// How long the end of a node whose channel has broken may take to be noticed.
const DIES_NS: u64 = 1_000_000_000;

/// The error when a node that has a request does not answer any more.
fn unknown() -> Error {
    let seconds = SILENT_NS / 1_000_000_000;
    let what = format!(
        "the node has not answered for {seconds} s: it is unknown whether it has done this, or will do it"
    );
    Error::new(Kind::System, what).hint(
        "look before you repeat the command: it is done when the node goes on, unless the node ends first",
    )
}

/// The error when a node dies that has a request.
fn died() -> Error {
    Error::new(Kind::System, "the node has died meanwhile: it is unknown whether it has done this")
        .hint("it is being started again; look before you repeat the command")
}

/// A change that an operator has requested at the admin socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Attach { disk: DiskSpec, incoming: bool },
    Detach(String),
    Limit(LimitChange),
    Move { name: String, uri: String },
    Send { name: String, to: Peer },
}

impl Launcher {
    /// Lets the node run a request of the admin socket. If the node dies meanwhile, the next one
    /// gets a request that only looks.
    pub(super) async fn relay(&self, request: Request) -> Result<String, Error> {
        let only_looks = request.only_looks();
        let run = ToNode::Run { request };
        let node = self.living_node().await;
        let answer = match self.run_by(&node, &run).await {
            Err(_) if node.channel.is_over() && self.has_died(&node).await => {
                if !only_looks {
                    return Err(died());
                }
                self.run_by(&*self.living_node().await, &run).await?
            }
            answer => answer?,
        };
        // The answer goes to the operator's program as it is, so it must be one line of JSON.
        let line = !answer.body.contains(&b'\n') && answer.read::<IgnoredAny>().is_ok();
        let text = String::from_utf8(answer.body).ok().filter(|_| line);
        text.ok_or_else(|| Error::new(Kind::System, "the node's answer is not one line of JSON"))
    }

    /// The node that serves, or is to serve.
    async fn living_node(&self) -> Rc<Child> {
        // One that has died is about to be started again.
        let there = self.changed.wait_until(|| !self.current.borrow().has_ended());
        let _ = timeout(&self.core, LOOK_NS, there).await;
        self.current.borrow().clone()
    }

    /// Whether a node that gives no answer has died; its end may be noticed a moment later.
    async fn has_died(&self, node: &Child) -> bool {
        let died = self.changed.wait_until(|| node.has_ended());
        timeout(&self.core, DIES_NS, died).await.is_ok()
    }

    async fn run_by(&self, node: &Child, run: &ToNode) -> Result<Answer, Error> {
        let mut asked = pin!(node.channel.ask(run, &[]));
        let mut heard_ns = self.core.now_ns();
        loop {
            match timeout(&self.core, LOOK_NS, asked.as_mut()).await {
                Ok(answer) => return answer,
                Err(_) if self.answers(node).await => heard_ns = self.core.now_ns(),
                Err(_) if self.core.now_ns() < heard_ns + SILENT_NS => {}
                Err(_) => return Err(unknown()),
            }
        }
    }

    /// Whether a node answers a question that it answers at once.
    async fn answers(&self, node: &Child) -> bool {
        within(&self.core, LOOK_NS, node.channel.ask(&ToNode::MayHandOver, &[])).await.is_ok()
    }
}

impl Order {
    /// The disk that is to be opened, and what is done to it.
    fn opens(&self) -> Option<(&str, &'static str)> {
        match self {
            Order::Attach { disk, .. } => Some((&disk.name, "attached")),
            Order::Move { name, .. } | Order::Send { name, .. } => Some((name, "moved")),
            Order::Detach(_) | Order::Limit(_) => None,
        }
    }
}

/// An order that the node may carry out as long as this lives.
struct Ordered<'a> {
    launcher: &'a Launcher,
    order: Order,
}

impl<'a> Ordered<'a> {
    /// # Errors
    /// When the disk is being attached or moved: the node's questions name only the disk.
    fn new(launcher: &'a Launcher, order: Order) -> Result<Ordered<'a>, Error> {
        let mut orders = launcher.orders.borrow_mut();
        if let Some((name, _)) = order.opens()
            && let Some((_, done)) =
                orders.iter().filter_map(Order::opens).find(|(other, _)| *other == name)
        {
            let what = format!("disk {name} is being {done}");
            return Err(Error::new(Kind::Usage, what).hint("wait for the end of that command"));
        }
        orders.push(order.clone());
        drop(orders);
        Ok(Ordered { launcher, order })
    }
}

impl Drop for Ordered<'_> {
    fn drop(&mut self) {
        let mut orders = self.launcher.orders.borrow_mut();
        let at = orders.iter().position(|one| *one == self.order);
        at.map(|at| orders.swap_remove(at));
        drop(orders);
        self.launcher.changed.notify_all();
    }
}

/// The clients of the admin socket.
pub(super) struct Operators(pub(super) Rc<Launcher>);

impl Commands for Operators {
    fn core(&self) -> &Core {
        &self.0.core
    }

    async fn run(&self, request: Request) -> Result<String, Error> {
        let launcher = &self.0;
        let order = match &request {
            Request::DiskAttach { disk, incoming } => {
                Some(Order::Attach { disk: disk.clone(), incoming: *incoming })
            }
            Request::DiskDetach { name, .. } => Some(Order::Detach(name.clone())),
            Request::DiskLimit { change } => Some(Order::Limit(change.clone())),
            Request::DiskMoveLimit { bytes_per_second } => {
                Some(Order::Limit(LimitChange::of_moves(*bytes_per_second)))
            }
            Request::DiskMove { name, uri, .. } => {
                Some(Order::Move { name: name.clone(), uri: uri.clone() })
            }
            Request::DiskSend { name, to, .. } => {
                Some(Order::Send { name: name.clone(), to: to.clone() })
            }
            Request::Events { log, after, wait } => {
                let events = launcher.resources.events();
                return Ok(events.after(log.as_deref(), *after, *wait).await.to_string());
            }
            Request::Upgrade { program } => {
                let to = async |program: &Path| launcher.upgrade(program).await;
                let done = upgraded(program.clone(), to).await?;
                return Ok(done.as_json().to_string());
            }
            _ => None,
        };
        let resumed = match &request {
            Request::DiskResume { name } => Some(name.clone()),
            _ => None,
        };
        // It is for the node, and for the launcher's program, that have the disks then.
        let waits = || launcher.renewing.get() || launcher.handing_over.get();
        if request.changes_a_disk() {
            launcher.changed.wait_until(|| !waits()).await;
        }
        let order = match order {
            Some(order) => Some(Ordered::new(launcher, order)?),
            None => None,
        };
        let done = launcher.relay(request).await;
        drop(order);
        if let (Some(name), Ok(_)) = (resumed, &done) {
            launcher.poison.forget(&name);
        }
        done
    }
}
