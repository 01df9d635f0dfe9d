//! An upgrade: a successor takes over from the node, and then the launcher replaces its own
//! program.

use std::cell::Cell;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;

use nix::sys::wait::WaitStatus;
use reactor::{Class, race, timeout};

use super::child::{Child, Role, STOP_NS, spawn};
use super::operators::SILENT_NS;
use super::{Launcher, within};
use crate::disks::events::What;
use crate::disks::state::State;
use crate::launcher::to_node::ToNode;
use crate::upgrade::{START_NS, Successor};

/// How long clients at the admin socket may stay when the program is about to be replaced.
const CLIENTS_NS: u64 = 1_000_000_000;
/// The pause before another attempt to replace the program.
const AGAIN_NS: u64 = 100_000_000;
/// How long the node may wait for the answers to its last questions.
const ANSWERS_NS: u64 = 250_000_000;
/// How long a handover may take: the sum of its own limits, and a margin; and so much more for each
/// disk. A successor that was killed after it had taken a disk would end everything.
const HAND_OVER_NS: u64 = 60_000_000_000;
const HAND_OVER_DISK_NS: u64 = 25_000_000;
/// How long a process that has closed its end may take to be seen as ended.
const ABOUT_TO_END_NS: u64 = 5_000_000;
/// How long the report of an upgrade waits until the successor has opened the database.
const OPEN_NS: u64 = 30_000_000_000;
/// How long the dead may take to be reaped before the program is replaced.
const REAPED_NS: u64 = 2_000_000_000;
/// How often a node is asked whether a waiting upgrade still makes sense.
const ASK_NS: u64 = 200_000_000;

impl Launcher {
    /// Makes a program take over from the node. Logs the outcome, too.
    pub(super) async fn upgrade(self: &Rc<Self>, program: &Path) -> Result<Successor, String> {
        // The previous upgrade may not have ended, or its successor may not serve yet.
        self.set_waiting(self.waiting.get() + 1);
        let refused = self.until_not_upgrading().await;
        self.set_waiting(self.waiting.get() - 1);
        refused?;
        let old = self.current.borrow().clone();
        if self.stopping.get() || !old.is_serving() || self.upgrading.replace(true) {
            return Err("not now: the node is starting, ending or being upgraded".to_owned());
        }
        // If the successor dies before it serves, it is started again.
        self.has_served.set(true);
        tracing::info!(program = %program.display(), "starting a successor");
        let replaced = self.replace(&old, program).await;
        match &replaced {
            Ok(handed) => {
                let (handed, pid) = (*handed, handed.pid);
                tracing::info!(successor = pid, "handed over: the old process is ending");
                let (name, pause_us) = (program.display().to_string(), handed.pause_us);
                let events = self.resources.events();
                events.note(What::Upgraded { program: name, process: pid, pause_us });
                if self.stopping.get() {
                    // The old process was asked to end, but too late.
                    let node = self.current.borrow().clone();
                    self.core.spawn(Class::Control, node.end(self.core.clone()));
                }
                let (launcher, program) = (self.clone(), program.to_owned());
                let predecessor = old.clone();
                self.core.spawn(Class::Control, async move {
                    launcher.renew(&predecessor, &program).await;
                    launcher.end_upgrade();
                });
                return self.until_it_serves(&old, handed).await;
            }
            Err(why) => {
                self.end_upgrade();
                tracing::error!(program = %program.display(), "no upgrade, this node continues: {why}");
                let (name, why) = (program.display().to_string(), why.clone());
                self.resources.events().note(What::UpgradeFailed { program: name, why });
            }
        }
        replaced
    }

    /// Waits until a successor serves clients, too. It does after the old process has closed the
    /// database; if that takes too long, the old process is killed: acknowledged writes are in the
    /// log.
    ///
    /// # Errors
    /// If the successor ends before.
    async fn until_it_serves(&self, old: &Child, handed: Successor) -> Result<Successor, String> {
        let node = self.current.borrow().clone();
        let decided = || node.is_serving() || node.has_ended();
        let closed = || decided() || old.has_ended();
        if timeout(&self.core, STOP_NS, self.changed.wait_until(closed)).await.is_err() {
            let seconds = STOP_NS / 1_000_000_000;
            let pid = old.pid.as_raw();
            tracing::error!(pid, "the old process has not ended within {seconds} s: killed");
            old.kill();
        }
        // Opening the database may take longer than any program waits for an answer.
        let _ = timeout(&self.core, OPEN_NS, self.changed.wait_until(decided)).await;
        match node.has_ended() && !node.is_serving() {
            true => Err("the successor took over, and has ended before it served".to_owned()),
            false => Ok(Successor { serves: node.is_serving(), ..handed }),
        }
    }

    /// Waits for the end of the upgrade before this one, if there is one, but not for ever.
    ///
    /// # Errors
    /// When the node says that it could not hand over.
    async fn until_not_upgrading(&self) -> Result<(), String> {
        let until_ns = self.core.now_ns() + START_NS;
        let idle = || !self.upgrading.get();
        while !idle() && self.core.now_ns() < until_ns {
            if let Some(why) = self.why_not().await {
                return Err(why);
            }
            let ns = ASK_NS.min(until_ns.saturating_sub(self.core.now_ns()));
            let _ = timeout(&self.core, ns, self.changed.wait_until(idle)).await;
        }
        Ok(())
    }

    fn set_waiting(&self, waiting: usize) {
        self.waiting.set(waiting);
        self.changed.notify_all();
    }

    fn end_upgrade(&self) {
        self.upgrading.set(false);
        self.changed.notify_all();
    }

    fn set_handing_over(&self, handing_over: bool) {
        self.handing_over.set(handing_over);
        self.changed.notify_all();
    }

    fn set_renewing(&self, renewing: bool) {
        self.renewing.set(renewing);
        self.changed.notify_all();
    }

    /// Why the node cannot hand over, if it gives a reason.
    async fn why_not(&self) -> Option<String> {
        let node = self.current.borrow().clone();
        if !node.is_serving() {
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
        let role = Role::Successor(theirs.into());
        // A node of another version does not know it.
        let room = async |room| {
            let make = ToNode::MakeRoom { room };
            let asked = old.channel.ask(&make, &[]);
            let _ = within(&self.core, ASK_NS, asked).await;
        };
        room(true).await;
        let node = spawn(&self.core, program, role, &self.changed).await;
        let replaced = match node {
            Ok(node) => self.hand_over(old, &node, ours).await,
            Err(why) => Err(why),
        };
        if replaced.is_err() {
            room(false).await;
        }
        replaced
    }

    /// Makes a successor that starts the node, or ends it.
    async fn hand_over(
        self: &Rc<Self>,
        old: &Child,
        node: &Rc<Child>,
        ours: UnixStream,
    ) -> Result<Successor, String> {
        self.attend(node);
        let asked_ns = Cell::new(0);
        let handed = async {
            self.until_begun(node).await?;
            let line = [ours.into()];
            // Meanwhile other disks are changed. A node of another version does not know it.
            let settled = within(&self.core, 2 * START_NS, old.channel.ask(&ToNode::Settle, &[]));
            if let Some(why) = settled.await.ok().and_then(|answer| answer.read().ok()).flatten() {
                return Err(why);
            }
            asked_ns.set(self.core.now_ns());
            self.set_handing_over(true);
            let asked = old.channel.ask(&ToNode::HandOver, &line);
            let disks = self.open.borrow().len() as u64;
            let ns = HAND_OVER_NS + disks * HAND_OVER_DISK_NS;
            let answer = within(&self.core, ns, asked).await;
            answer.and_then(|answer| answer.read::<u64>()).map_err(|error| error.to_string())
        };
        let handed = handed.await;
        self.decide(old, node, handed, asked_ns.get()).await
    }

    /// Makes a successor the node, or ends it.
    async fn decide(
        &self,
        old: &Child,
        node: &Rc<Child>,
        handed: Result<u64, String>,
        asked_ns: u64,
    ) -> Result<Successor, String> {
        match handed {
            Ok(pause_us) => {
                self.make_current(node);
                self.set_handing_over(false);
                Ok(Successor { pid: node.pid.as_raw() as u32, pause_us, serves: false })
            }
            Err(why) => {
                // A process that has closed its end is about to end.
                self.core.sleep_ns(ABOUT_TO_END_NS).await;
                let has_taken_over = self.has_taken_over(old, node).await;
                if has_taken_over {
                    self.make_current(node);
                }
                self.set_handing_over(false);
                if has_taken_over {
                    tracing::warn!("the previous node ended while it handed over: {why}");
                    let pause_us = (self.core.now_ns() - asked_ns) / 1000;
                    return Ok(Successor {
                        pid: node.pid.as_raw() as u32,
                        pause_us,
                        serves: false,
                    });
                }
                let by_itself = node.ended();
                node.kill();
                node.until_it_ends().await;
                Err(match by_itself {
                    Some(WaitStatus::Exited(_, code)) => format!("{why} (exit status: {code})"),
                    Some(WaitStatus::Signaled(_, signal, _)) => format!("{why} ({signal})"),
                    _ => why,
                })
            }
        }
    }

    /// Waits until a successor has begun.
    async fn until_begun(&self, node: &Child) -> Result<(), String> {
        let begun = self.changed.wait_for(|| {
            if let Some(begun) = node.begun() {
                return Some(begun);
            }
            if node.has_ended() {
                return Some(Err("starting: the other process has gone".to_owned()));
            }
            let ends = || Err("ending: this node was told to end".to_owned());
            self.stopping.get().then(ends)
        });
        // A program that is not a node, or does not know launchers, never begins.
        timeout(&self.core, START_NS, begun).await.unwrap_or_else(|_| {
            Err(format!("starting: not done within {} s", START_NS / 1_000_000_000))
        })
    }

    /// Whether a successor serves although its predecessor has not reported the handover, because
    /// the predecessor has ended. Without the token the successor would have ended, too.
    pub(super) async fn has_taken_over(&self, old: &Child, node: &Child) -> bool {
        let undecided = || old.has_ended() && !node.has_ended() && !node.is_serving();
        let decided = self.changed.wait_until(|| !undecided() || self.stopping.get());
        let _ = timeout(&self.core, START_NS, decided).await;
        old.has_ended() && !node.has_ended() && node.is_serving()
    }

    /// Replaces this program by the node's, once the predecessor has ended. Returns if that is not
    /// possible, or not wanted any more: then this program continues.
    async fn renew(self: &Rc<Self>, old: &Child, program: &Path) {
        let core = &self.core;
        let node = self.current.borrow().clone();
        let succeeded = || old.has_ended() && node.is_serving();
        self.changed.wait_until(|| succeeded() || node.has_ended()).await;
        let unwanted = || self.stopping.get() || self.waiting.get() > 0 || node.has_ended();
        // Other disks do not wait for the device of one that is being opened.
        let has_orders = || node.opening() > 0 || !self.orders.borrow().is_empty();
        let writes = || self.resources.state().is_some_and(State::is_writing);
        let (mut tried, mut clients_ns) = (false, CLIENTS_NS);
        while !tried {
            self.changed.wait_until(|| unwanted() || !has_orders()).await;
            while self.closes() && !unwanted() {
                core.sleep_ns(AGAIN_NS).await;
            }
            if unwanted() {
                return;
            }
            // It is a node of this program.
            self.dismiss_spare().await;
            // Those that connect now wait. Those that stay longer are disconnected.
            self.clients.close(true);
            self.resources.events().close(true);
            let left = race(self.clients.until_none(), self.changed.wait_until(unwanted));
            let _ = timeout(core, std::mem::take(&mut clients_ns), left).await;
            // The next program does not know them.
            let reaped = self.changed.wait_until(|| unwanted() || self.reaping.get() == 0);
            let _ = timeout(core, REAPED_NS, reaped).await;
            if !unwanted() && !has_orders() && !writes() && !self.closes() {
                tried = self.become_program_of(&node, program, &unwanted).await;
            }
            self.resources.events().close(false);
            self.clients.close(false);
            if !tried {
                // Clients are served in between.
                core.sleep_ns(AGAIN_NS).await;
            }
        }
    }

    /// Replaces this program while the node holds its messages back. Returns whether that was
    /// tried: not while the node waits for an answer.
    async fn become_program_of(
        &self,
        node: &Rc<Child>,
        program: &Path,
        unwanted: &dyn Fn() -> bool,
    ) -> bool {
        self.set_renewing(true);
        // From here on, incoming messages wait in the sockets.
        let held = within(&self.core, START_NS, node.channel.ask(&ToNode::Hold, &[])).await;
        if let Err(error) = &held {
            tracing::warn!("the launcher stays as it is: {error}");
        }
        let answered = timeout(&self.core, ANSWERS_NS, self.until_all_is_answered(node)).await;
        let tries = answered.is_ok() && !unwanted();
        if tries && held.is_ok() {
            let why = self.become_program(node, program).await;
            tracing::warn!(program = %program.display(), "the launcher stays as it is: {why}");
        }
        self.set_renewing(false);
        let resumed = within(&self.core, SILENT_NS, node.channel.ask(&ToNode::Resume, &[])).await;
        if let Err(error) = resumed {
            tracing::error!("the node does not continue: {error}");
            node.kill();
        }
        tries || held.is_err()
    }

    /// Waits until a node that asks nothing any more has all answers.
    async fn until_all_is_answered(&self, node: &Child) {
        let state = self.resources.state();
        while state.is_some_and(State::is_writing) || node.opening() > 0 {
            if let Some(state) = state {
                state.until_written().await;
            }
            self.changed.wait_until(|| node.opening() == 0).await;
        }
    }
}
