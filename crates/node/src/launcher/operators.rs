//! The clients of the admin socket.

use std::path::Path;
use std::rc::Rc;

use reactor::Core;
use serde::de::IgnoredAny;

use super::{Launcher, within};
use crate::admin::{Commands, Request};
use crate::disks::spec::DiskSpec;
use crate::error::{Error, Kind};
use crate::launcher::to_node::ToNode;
use crate::upgrade::upgraded;

/// How long a node may take for a request of the admin socket.
const RUN_NS: u64 = 100_000_000_000;

/// A change that an operator has requested at the admin socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Attach(DiskSpec),
    Detach(String),
}

impl Launcher {
    /// Lets the node run a request of the admin socket.
    pub(super) async fn relay(&self, request: Request) -> Result<String, Error> {
        let node = self.current.borrow().clone();
        let run = ToNode::Run { request };
        let answer = within(&self.core, RUN_NS, node.channel.ask(&run, &[])).await?;
        // The answer goes to the operator's program as it is, so it must be one line of JSON.
        let line = !answer.body.contains(&b'\n') && answer.read::<IgnoredAny>().is_ok();
        let text = String::from_utf8(answer.body).ok().filter(|_| line);
        text.ok_or_else(|| Error::new(Kind::System, "the node's answer is not one line of JSON"))
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
            Request::DiskAttach { disk } => Some(Order::Attach(disk.clone())),
            Request::DiskDetach { name, .. } => Some(Order::Detach(name.clone())),
            Request::Upgrade { program } => {
                let to = async |program: &Path| launcher.upgrade(program).await;
                let done = upgraded(program.clone(), to).await?;
                return Ok(done.as_json().to_string());
            }
            _ => None,
        };
        launcher.orders.borrow_mut().extend(order.clone());
        let done = launcher.relay(request).await;
        if let Some(order) = order {
            let mut orders = launcher.orders.borrow_mut();
            let at = orders.iter().position(|one| *one == order);
            at.map(|at| orders.swap_remove(at));
        }
        done
    }
}
