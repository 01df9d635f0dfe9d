//! The old node's side of a handover, from when the successor has opened everything: disk by disk.
//!
//! ```text
//!         quiesce            quiesced: State           Taken: Go
//!   [waiting] ----> [quiescing] ----------------> [sent] -----------> [done]
//! ```
//!
//! 1. Each disk takes these steps independently. The next disk begins when the one before it is
//!    over or has had its [`STEP_NS`], so no guest waits for another's disk, or for more than a few
//!    messages of its own.
//! 2. The first Go decides: before it this node may give up for any reason. After it the successor
//!    is the node, and a successor that then ends is like any node that ends.
//! 3. When every disk is over, or its quiescing has taken [`REST_NS`], the successor is told to
//!    lead. Disks that are not quiesced by then follow: they are forced to stop, and the operations
//!    at their devices go along in their in-flight regions. This process stays until the last
//!    operation of such a disk has ended here, and the successor has been told so
//!    ([`Target::force`]). A disk whose front end has no such region, or waits for an answer,
//!    follows when its device is done. Only its own guest waits.
//! 4. A disk that the successor cannot take as it is does not decide the upgrade: it waits until
//!    the successor is the node, and is handed over without its connection. Popped requests are
//!    done, its counters and its size go along, the front end connects again. If it cannot be
//!    handed over that way either, it is opened again.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use reactor::{Class, Core, Event, JoinHandle, timeout};

use super::wire::{Line, Message};
use super::{ENDS, POLL_NS, REST_NS, TAKE_NS};
use crate::disks::Served;
use crate::mutant::{Mutant, is};
#[cfg(doc)]
use vhost::Target;

/// How long the next disk waits for the one before it.
const STEP_NS: u64 = 20_000_000;

/// The disks being handed over.
pub(super) struct Moves {
    core: Core,
    line: Rc<Line>,
    disks: Vec<Moving>,
    steps: Rc<Steps>,
    receiving: Option<JoinHandle<()>>,
    /// A disk is the successor's, or the node is.
    committed: Rc<Cell<bool>>,
    /// Why there is no successor any more.
    gone: Option<String>,
    /// The pauses of guests, in microseconds.
    pauses_us: Vec<u64>,
}

/// A disk that is being handed over.
struct Moving {
    disk: Served,
    stage: Stage,
    began_ns: u64,
    sent_ns: u64,
    /// Waits until it is quiesced, or has settled.
    quiescing: Option<JoinHandle<()>>,
    forced: bool,
    /// It is handed over without its connection.
    alone: bool,
    /// It has operations in flight although it is quiesced.
    in_flight: bool,
}

impl Moving {
    fn is_done(&self) -> bool {
        self.stage == Stage::Done && !self.in_flight
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Quiescing,
    Sent,
    /// It cannot be handed over with its connection, and will be without it once the successor is
    /// the node.
    Declined,
    Done,
}

enum Step {
    Quiesced(usize, Result<Box<vhost::Export>, String>),
    Settled(usize),
    Received(Result<Message, String>),
}

#[derive(Default)]
struct Steps {
    queue: RefCell<VecDeque<Step>>,
    pushed: Event,
}

impl Steps {
    fn push(&self, step: Step) {
        self.queue.borrow_mut().push_back(step);
        self.pushed.notify_all();
    }

    async fn next_until(&self, core: &Core, until_ns: u64) -> Option<Step> {
        let next = self.pushed.wait_for(|| self.queue.borrow_mut().pop_front());
        timeout(core, until_ns.saturating_sub(core.now_ns()), next).await.ok()
    }
}

impl Drop for Moves {
    fn drop(&mut self) {
        let quiescing = self.disks.iter_mut().filter_map(|moving| moving.quiescing.take());
        quiescing.chain(self.receiving.take()).for_each(JoinHandle::cancel);
    }
}

impl Moves {
    /// For a node whose successor is ready. `committed` is set when the successor is the node.
    pub fn new(core: &Core, line: Rc<Line>, disks: &[Served], committed: Rc<Cell<bool>>) -> Moves {
        let steps = Rc::<Steps>::default();
        let (receiver, received) = (line.clone(), steps.clone());
        let receiving = core.spawn(Class::Control, async move {
            loop {
                let message = receiver.receive().await.map(|(message, _)| message);
                let gone = message.is_err();
                received.push(Step::Received(message));
                if gone {
                    return;
                }
            }
        });
        let here = |disk: &Served| Moving {
            disk: disk.clone(),
            stage: Stage::Waiting,
            began_ns: 0,
            sent_ns: 0,
            quiescing: None,
            forced: false,
            alone: false,
            in_flight: false,
        };
        Moves {
            core: core.clone(),
            line,
            disks: disks.iter().map(here).collect(),
            steps,
            receiving: Some(receiving),
            committed,
            gone: None,
            pauses_us: Vec::new(),
        }
    }

    /// Whether the successor is the node.
    pub fn is_committed(&self) -> bool {
        self.committed.get()
    }

    /// Hands over all disks that are quiesced in time, and tells the successor to lead.
    ///
    /// # Errors
    /// Why nothing was handed over, for example because `ends` returns true; if
    /// [`Moves::is_committed`], that the successor has gone.
    pub async fn until_it_leads(&mut self, ends: &dyn Fn() -> bool) -> Result<(), String> {
        while !self.disks.iter().all(|moving| self.had_its_time(moving)) {
            let poll_ns = if self.committed.get() { REST_NS } else { POLL_NS };
            self.step(poll_ns).await?;
            if !self.committed.get() && ends() {
                return Err(ENDS.to_owned());
            }
        }
        // Whatever happens now, the successor is the node.
        let sent = self.line.send(&Message::Lead, &[]).await;
        sent.map_err(|why| format!("taking the disks: {why}"))?;
        self.committed.set(true);
        Ok(())
    }

    /// Records that the successor has gone after it had taken a disk.
    pub fn is_alone(&mut self, why: String) {
        self.gone = Some(why);
    }

    /// Hands over the disks that were not quiesced before, and waits for their operations in
    /// flight.
    ///
    /// # Errors
    /// When the successor has gone.
    pub async fn finish(&mut self) -> Result<(), String> {
        while !self.disks.iter().all(Moving::is_done) {
            if let Some(why) = self.gone.take() {
                return Err(why);
            }
            self.force();
            self.step(REST_NS).await?;
        }
        Ok(())
    }

    /// Forces disks to stop whose time is up. The successor leads: this node cannot continue them.
    fn force(&mut self) {
        let now_ns = self.core.now_ns();
        for moving in self.disks.iter_mut().filter(|moving| !moving.alone) {
            let late = moving.stage == Stage::Quiescing && now_ns >= moving.began_ns + REST_NS;
            if late && !std::mem::replace(&mut moving.forced, true) {
                moving.disk.target.force();
            }
        }
    }

    /// The median and the longest pause of the guests whose disks are over, in microseconds.
    pub fn pauses_us(&self) -> (u64, u64) {
        let mut all = self.pauses_us.clone();
        all.sort_unstable();
        let median = all.get(all.len().saturating_sub(1) / 2).copied().unwrap_or(0);
        (median, all.last().copied().unwrap_or(0))
    }

    /// The names of the disks that are not over.
    pub fn following(&self) -> Vec<&str> {
        let left = self.disks.iter().filter(|moving| !moving.is_done());
        left.map(|moving| &*moving.disk.spec.name).collect()
    }

    /// The names of the disks whose devices are not done.
    pub fn slow(&self) -> Vec<&str> {
        let slow =
            self.disks.iter().filter(|moving| moving.stage == Stage::Quiescing && !moving.alone);
        slow.map(|moving| &*moving.disk.spec.name).collect()
    }

    fn had_its_time(&self, moving: &Moving) -> bool {
        let waited = || self.core.now_ns() >= moving.began_ns + REST_NS;
        match moving.stage {
            Stage::Waiting => false,
            Stage::Quiescing => waited(),
            Stage::Sent => self.committed.get() && waited(),
            Stage::Declined => !self.committed.get(),
            Stage::Done => true,
        }
    }

    /// Waits for the next event, for at most `most_ns`, and handles it.
    async fn step(&mut self, most_ns: u64) -> Result<(), String> {
        self.part();
        let now_ns = self.core.now_ns();
        let in_flight = |moving: &&Moving| matches!(moving.stage, Stage::Quiescing | Stage::Sent);
        let steps = self.disks.iter().filter(in_flight).map(|moving| moving.began_ns + STEP_NS);
        let next_ns = steps.max().filter(|step_ns| *step_ns > now_ns);
        if next_ns.is_none()
            && let Some(at) = self.disks.iter().position(|moving| moving.stage == Stage::Waiting)
        {
            self.begin(at);
        }
        let times = |moving: &Moving| [moving.began_ns + REST_NS, moving.sent_ns + TAKE_NS];
        let times = self.disks.iter().filter(in_flight).flat_map(times).chain(next_ns);
        let until_ns = times.filter(|ns| *ns > now_ns).chain([now_ns + most_ns]).min();
        let until_ns = until_ns.unwrap_or(now_ns);
        match self.steps.next_until(&self.core, until_ns).await {
            Some(Step::Quiesced(at, export)) => self.quiesced(at, export).await,
            Some(Step::Settled(at)) => self.settled(at).await,
            Some(Step::Received(Ok(Message::Taken(name)))) => {
                let at = self.sent(&name)?;
                self.go(at).await
            }
            Some(Step::Received(Ok(Message::Declined(name, why)))) => {
                let at = self.sent(&name)?;
                self.lose(at, &why).await
            }
            Some(Step::Received(Ok(Message::Refused(why)))) => {
                Err(format!("taking the disks: {why}"))
            }
            Some(Step::Received(Ok(other))) => Err(format!("taking the disks: it sends {other:?}")),
            Some(Step::Received(Err(why))) => Err(format!("taking the disks: {why}")),
            None => self.give_up_late(),
        }
    }

    /// Gives up a successor that has taken nothing in time.
    fn give_up_late(&self) -> Result<(), String> {
        let now_ns = self.core.now_ns();
        let late =
            |moving: &Moving| moving.stage == Stage::Sent && now_ns >= moving.sent_ns + TAKE_NS;
        match !self.committed.get() && self.disks.iter().any(late) {
            true => Err(format!("taking the disks: not done within {} s", TAKE_NS / 1_000_000_000)),
            false => Ok(()),
        }
    }

    fn begin(&mut self, at: usize) {
        let moving = &mut self.disks[at];
        moving.began_ns = self.core.now_ns();
        moving.stage = Stage::Quiescing;
        let (target, steps) = (moving.disk.target.clone(), self.steps.clone());
        moving.quiescing = Some(self.core.spawn(Class::Control, async move {
            let export = target.quiesce().await.map(Box::new);
            steps.push(Step::Quiesced(at, export));
        }));
    }

    /// Starts to hand over without their connections the disks that cannot be handed over with
    /// them, once the successor is the node.
    fn part(&mut self) {
        let committed = self.committed.get();
        for (at, moving) in self.disks.iter_mut().enumerate() {
            if !committed || moving.stage != Stage::Declined {
                continue;
            }
            (moving.stage, moving.alone) = (Stage::Quiescing, true);
            let (target, steps) = (moving.disk.target.clone(), self.steps.clone());
            moving.quiescing = Some(self.core.spawn(Class::Control, async move {
                let export = target.quiesce_disconnected().await.map(Box::new);
                steps.push(Step::Quiesced(at, export));
            }));
        }
    }

    async fn quiesced(
        &mut self,
        at: usize,
        export: Result<Box<vhost::Export>, String>,
    ) -> Result<(), String> {
        let (state, descriptors) = match export {
            Ok(export) => *export,
            Err(why) => return self.lose(at, &why).await,
        };
        let moving = &mut self.disks[at];
        moving.quiescing = None;
        moving.in_flight = state.in_flight.is_some();
        moving.stage = Stage::Sent;
        moving.sent_ns = self.core.now_ns();
        let name = moving.disk.spec.name.clone();
        if is(Mutant::GoesOnUntilGo) {
            moving.disk.target.resume();
        }
        let sent = self.line.send(&Message::State(name, state.encode()), &descriptors).await;
        sent.map_err(|why| format!("taking the disks: {why}"))
    }

    /// The index of the disk of that name, if it waits for the successor.
    fn sent(&self, name: &str) -> Result<usize, String> {
        let named = |moving: &Moving| moving.stage == Stage::Sent && moving.disk.spec.name == name;
        let at = self.disks.iter().position(named);
        at.ok_or_else(|| format!("taking the disks: {name} was not handed over"))
    }

    /// Waits until a disk has no operations in flight, to report it.
    fn settle(&mut self, at: usize) {
        let moving = &mut self.disks[at];
        if moving.in_flight {
            let (target, steps) = (moving.disk.target.clone(), self.steps.clone());
            moving.quiescing = Some(self.core.spawn(Class::Control, async move {
                target.settled().await;
                steps.push(Step::Settled(at));
            }));
        }
    }

    /// Reports that a disk has no operations in flight any more.
    async fn settled(&mut self, at: usize) -> Result<(), String> {
        let moving = &mut self.disks[at];
        (moving.quiescing, moving.in_flight) = (None, false);
        let Served { spec, device, .. } = &moving.disk;
        let message = Message::Settled(spec.name.clone(), device.flush_failed());
        let sent = self.line.send(&message, &[]).await;
        sent.map_err(|why| format!("cannot report that operations have ended: {why}"))
    }

    /// Sends Go for a disk.
    async fn go(&mut self, at: usize) -> Result<(), String> {
        let Moving { disk, began_ns, .. } = &self.disks[at];
        let (target, began_ns) = (disk.target.clone(), *began_ns);
        let sent = self.line.send(&Message::Go(disk.spec.name.clone()), &[]).await;
        sent.map_err(|why| format!("taking the disks: {why}"))?;
        // Whatever happens now, the disk is the successor's, and so is the node.
        self.committed.set(true);
        self.disks[at].stage = Stage::Done;
        self.pauses_us.push((self.core.now_ns() - began_ns) / 1000);
        match is(Mutant::OldGoesOn) {
            true => target.resume(),
            false if is(Mutant::TakesBack) => {}
            // Its resources here are not needed any more.
            false => target.stop(),
        }
        self.settle(at);
        Ok(())
    }

    /// Handles a disk that cannot be handed over as it is.
    async fn lose(&mut self, at: usize, why: &str) -> Result<(), String> {
        let moving = &mut self.disks[at];
        let disk = &moving.disk.spec.name;
        (moving.quiescing, moving.in_flight) = (None, false);
        if moving.alone {
            tracing::error!(%disk, "cannot hand it over without its connection either, it is opened again: {why}");
            return self.go(at).await;
        }
        tracing::error!(%disk, "handing it over without its connection: {why}");
        moving.stage = Stage::Declined;
        Ok(())
    }
}
