//! An upgrade: a successor takes over from the node, and then the launcher replaces its own
//! program.

use std::cell::Cell;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;

use nix::sys::wait::WaitStatus;
use reactor::Class;

use super::child::{Child, LOOK_NS, spawn};
use super::{Launcher, within};
use crate::disks::state::State;
use crate::launcher::to_node::ToNode;
use crate::upgrade::{START_NS, Successor};

/// How long clients at the admin socket may stay when the program is about to be replaced.
const CLIENTS_NS: u64 = 1_000_000_000;
/// How long a handover may take: the sum of its own limits, and a margin.
const HAND_OVER_NS: u64 = 30_000_000_000;
/// How often a node is asked whether a waiting upgrade still makes sense.
const ASK_NS: u64 = 200_000_000;

impl Launcher {
    /// Makes a program take over from the node. Logs the outcome, too.
    pub(super) async fn upgrade(self: &Rc<Self>, program: &Path) -> Result<Successor, String> {
        // The previous upgrade may not have ended, or its successor may not serve yet.
        let since_ns = self.core.now_ns();
        self.waiting.set(self.waiting.get() + 1);
        let (mut asked_ns, mut refused) = (0, None);
        while self.upgrading.get() && self.core.now_ns() < since_ns + START_NS && refused.is_none()
        {
            if self.core.now_ns() >= asked_ns + ASK_NS {
                refused = self.why_not().await;
                asked_ns = self.core.now_ns();
            }
            self.core.sleep_ns(LOOK_NS).await;
        }
        self.waiting.set(self.waiting.get() - 1);
        if let Some(why) = refused {
            return Err(why);
        }
        let old = self.current.borrow().clone();
        if self.stopping.get() || !old.serving.get() || self.upgrading.replace(true) {
            return Err("not now: the node is starting, ending or being upgraded".to_owned());
        }
        tracing::info!(program = %program.display(), "starting a successor");
        let replaced = self.replace(&old, program).await;
        match &replaced {
            Ok(Successor { pid, .. }) => {
                tracing::info!(successor = pid, "handed over: the old process is ending");
                if self.stopping.get() {
                    // The old process was asked to end, but too late.
                    let node = self.current.borrow().clone();
                    self.core.spawn(Class::Control, node.end(self.core.clone()));
                }
                let (launcher, program) = (self.clone(), program.to_owned());
                self.core.spawn(Class::Control, async move {
                    launcher.renew(&old, &program).await;
                    launcher.upgrading.set(false);
                });
            }
            Err(why) => {
                self.upgrading.set(false);
                tracing::error!(program = %program.display(), "no upgrade, this node continues: {why}");
            }
        }
        replaced
    }

    /// Why the node cannot hand over, if it gives a reason.
    async fn why_not(&self) -> Option<String> {
        let node = self.current.borrow().clone();
        if !node.serving.get() {
            return None;
        }
        // A node of another version does not know the question.
        let asked = node.channel.ask(&ToNode::MayHandOver, &[]);
        let answer = within(&self.core, ASK_NS, asked).await.ok()?;
        answer.read::<Option<String>>().ok()?
    }

    async fn replace(self: &Rc<Self>, old: &Child, program: &Path) -> Result<Successor, String> {
        let system = |error: std::io::Error| format!("starting {}: {error}", program.display());
        let (ours, theirs) = UnixStream::pair().map_err(system)?;
        let node = spawn(&self.core, program, Some(theirs.into())).await?;
        self.attend(&node);
        let asked_ns = Cell::new(0);
        let handed = async {
            // A program that is not a node, or does not know launchers, never begins.
            let since_ns = self.core.now_ns();
            while node.begun.borrow().is_none() {
                if node.ended.get().is_some() {
                    return Err("starting: the other process has gone".to_owned());
                }
                if self.stopping.get() {
                    return Err("ending: this node was told to end".to_owned());
                }
                if self.core.now_ns() > since_ns + START_NS {
                    let seconds = START_NS / 1_000_000_000;
                    return Err(format!("starting: not done within {seconds} s"));
                }
                self.core.sleep_ns(LOOK_NS).await;
            }
            node.begun.borrow().clone().expect("it has just been looked at")?;
            let line = [ours.into()];
            asked_ns.set(self.core.now_ns());
            let asked = old.channel.ask(&ToNode::HandOver, &line);
            let answer = within(&self.core, HAND_OVER_NS, asked).await;
            answer.and_then(|answer| answer.read::<u64>()).map_err(|error| error.to_string())
        };
        match handed.await {
            Ok(pause_us) => {
                self.make_current(&node);
                Ok(Successor { pid: node.pid.as_raw() as u32, pause_us })
            }
            Err(why) => {
                // A process that has closed its end is about to end.
                self.core.sleep_ns(5 * LOOK_NS).await;
                if self.has_taken_over(old, &node).await {
                    tracing::warn!("the node before ended while it handed over: {why}");
                    self.make_current(&node);
                    let pause_us = (self.core.now_ns() - asked_ns.get()) / 1000;
                    return Ok(Successor { pid: node.pid.as_raw() as u32, pause_us });
                }
                let by_itself = node.ended.get();
                node.kill();
                node.until_it_ends(&self.core).await;
                Err(match by_itself {
                    Some(WaitStatus::Exited(_, code)) => format!("{why} (exit status: {code})"),
                    Some(WaitStatus::Signaled(_, signal, _)) => format!("{why} ({signal})"),
                    _ => why,
                })
            }
        }
    }

    /// Whether a successor serves although its predecessor has not reported the handover, because
    /// the predecessor has ended. Without the token the successor would have ended, too.
    pub(super) async fn has_taken_over(&self, old: &Child, node: &Child) -> bool {
        let since_ns = self.core.now_ns();
        let patient = || self.core.now_ns() < since_ns + START_NS && !self.stopping.get();
        while old.ended.get().is_some()
            && node.ended.get().is_none()
            && !node.serving.get()
            && patient()
        {
            self.core.sleep_ns(LOOK_NS).await;
        }
        old.ended.get().is_some() && node.ended.get().is_none() && node.serving.get()
    }

    /// Replaces this program by the node's, once the predecessor has ended. Returns if that is not
    /// possible, or not wanted any more: then this program continues.
    async fn renew(self: &Rc<Self>, old: &Child, program: &Path) {
        let core = &self.core;
        let node = self.current.borrow().clone();
        while (old.ended.get().is_none() || !node.serving.get()) && node.ended.get().is_none() {
            core.sleep_ns(LOOK_NS).await;
        }
        let since_ns = core.now_ns();
        let unwanted =
            || self.stopping.get() || self.waiting.get() > 0 || node.ended.get().is_some();
        // Clients that stay longer are disconnected.
        let patient = || core.now_ns() < since_ns + CLIENTS_NS;
        while self.clients.get() > 0 && patient() && !unwanted() {
            core.sleep_ns(LOOK_NS).await;
        }
        if unwanted() {
            return;
        }
        // From here on, incoming messages wait in the sockets.
        if let Err(error) = node.channel.ask(&ToNode::Hold, &[]).await {
            return tracing::warn!("the launcher stays as it is: {error}");
        }
        self.renewing.set(true);
        if let Some(waker) = self.signals.take() {
            waker.wake();
        }
        // The node's earlier requests are answered first.
        while self.resources.state().is_some_and(State::is_writing) || node.opening.get() > 0 {
            core.sleep_ns(LOOK_NS).await;
        }
        if !unwanted() {
            let why = self.become_program(&node, program).await;
            tracing::warn!(program = %program.display(), "the launcher stays as it is: {why}");
        }
        self.renewing.set(false);
        if let Err(error) = node.channel.ask(&ToNode::Resume, &[]).await {
            tracing::error!("the node does not continue: {error}");
            node.kill();
        }
    }
}
