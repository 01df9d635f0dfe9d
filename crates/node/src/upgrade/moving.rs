//! The old node's part, from when the successor has everything open: disk by disk.
//!
//! ```text
//!            rest                at rest: State           Taken: Go
//!   [here] --------> [resting] ------------------> [said] -----------> [over]
//! ```
//!
//! 1. Each disk goes on this way by itself. The next one begins when the one before it is over or
//!    has had its [`STEP_NS`], so no guest waits for another's disk, or for more than a few
//!    messages of its own.
//! 2. The first Go is the one that counts: before it this node may give up for any reason. After it
//!    the successor is the node, and a successor that ends then is like any node that ends.
//! 3. When every disk is over, or has been coming to rest for [`REST_NS`], the successor is told to
//!    lead. Disks that are not at rest by then follow: they are forced to rest, and what they have
//!    at their devices goes along in their in-flight regions. Until the last operation of such a
//!    disk has ended here, and the successor was told so, this process stays ([`Target::force`]). A
//!    disk whose front end has no such region, or waits for an answer, follows when its device is
//!    done. Only its own guest waits.
//! 4. A disk that the successor cannot take as it is decides nothing: it waits until the successor
//!    is the node, and goes over without its connection. What was popped is done, its counters and
//!    its size go along, the front end connects again. One that cannot go over even so is opened
//!    anew.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};

use reactor::{Class, Core, JoinHandle};

use super::wire::{Line, Message};
use super::{ENDS, LOOK_NS, REST_NS, TAKE_NS};
use crate::disks::Served;
use crate::mutant::{Mutant, is};
#[cfg(doc)]
use vhost::Target;

/// How long the next disk waits for the one before it.
const STEP_NS: u64 = 20_000_000;

/// See the module text.
pub(super) struct Moves {
    core: Core,
    line: Rc<Line>,
    disks: Vec<Moving>,
    events: Rc<Events>,
    hearing: Option<JoinHandle<()>>,
    /// A disk is the successor's, or the node is.
    committed: Rc<Cell<bool>>,
    /// Why there is no successor any more.
    gone: Option<String>,
    /// How long guests waited, in microseconds.
    pauses_us: Vec<u64>,
}

/// A disk on its way.
struct Moving {
    disk: Served,
    stage: Stage,
    began_ns: u64,
    said_ns: u64,
    /// Waits until it is at rest, or has settled.
    resting: Option<JoinHandle<()>>,
    forced: bool,
    /// It goes over without its connection.
    alone: bool,
    /// Operations of it are under way although it is at rest.
    under_way: bool,
}

impl Moving {
    fn is_done(&self) -> bool {
        self.stage == Stage::Over && !self.under_way
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Here,
    Resting,
    Said,
    /// It cannot go over with its connection, and does without when there is no way back.
    Declined,
    Over,
}

enum Event {
    AtRest(usize, Result<Box<vhost::Export>, String>),
    Settled(usize),
    Heard(Result<Message, String>),
}

#[derive(Default)]
struct Events {
    queue: RefCell<VecDeque<Event>>,
    waker: RefCell<Option<Waker>>,
}

impl Events {
    fn push(&self, event: Event) {
        self.queue.borrow_mut().push_back(event);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    async fn next_until(&self, core: &Core, until_ns: u64) -> Option<Event> {
        let mut late = pin!(core.sleep_ns(until_ns.saturating_sub(core.now_ns())));
        poll_fn(|cx| {
            if let Some(event) = self.queue.borrow_mut().pop_front() {
                return Poll::Ready(Some(event));
            }
            self.waker.replace(Some(cx.waker().clone()));
            late.as_mut().poll(cx).map(|()| None)
        })
        .await
    }
}

impl Drop for Moves {
    fn drop(&mut self) {
        let resting = self.disks.iter_mut().filter_map(|moving| moving.resting.take());
        resting.chain(self.hearing.take()).for_each(JoinHandle::cancel);
    }
}

impl Moves {
    /// Of a node whose successor is ready. `committed` is set when there is no way back.
    pub fn new(core: &Core, line: Rc<Line>, disks: &[Served], committed: Rc<Cell<bool>>) -> Moves {
        let events = Rc::<Events>::default();
        let (ear, heard) = (line.clone(), events.clone());
        let hearing = core.spawn(Class::Control, async move {
            loop {
                let message = ear.hear().await.map(|(message, _)| message);
                let gone = message.is_err();
                heard.push(Event::Heard(message));
                if gone {
                    return;
                }
            }
        });
        let here = |disk: &Served| Moving {
            disk: disk.clone(),
            stage: Stage::Here,
            began_ns: 0,
            said_ns: 0,
            resting: None,
            forced: false,
            alone: false,
            under_way: false,
        };
        Moves {
            core: core.clone(),
            line,
            disks: disks.iter().map(here).collect(),
            events,
            hearing: Some(hearing),
            committed,
            gone: None,
            pauses_us: Vec::new(),
        }
    }

    /// Whether there is no way back.
    pub fn is_committed(&self) -> bool {
        self.committed.get()
    }

    /// Hands over all disks that come to rest in time, and tells the successor to lead.
    ///
    /// # Errors
    /// Why nothing was handed over, one reason being that `ends` says so; when
    /// [`Moves::is_committed`], that the successor has gone.
    pub async fn until_it_leads(&mut self, ends: &dyn Fn() -> bool) -> Result<(), String> {
        while !self.disks.iter().all(|moving| self.had_its_time(moving)) {
            let look_ns = if self.committed.get() { REST_NS } else { LOOK_NS };
            self.step(look_ns).await?;
            if !self.committed.get() && ends() {
                return Err(ENDS.to_owned());
            }
        }
        // Whatever comes now, the node is the successor.
        let said = self.line.say(&Message::Lead, &[]).await;
        said.map_err(|why| format!("taking the disks: {why}"))?;
        self.committed.set(true);
        Ok(())
    }

    /// The successor has gone after it had taken a disk.
    pub fn is_alone(&mut self, why: String) {
        self.gone = Some(why);
    }

    /// Hands over the disks that were not at rest before, and waits for what they have under way.
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

    /// Forces disks to rest whose time is up. The successor leads: there is no way back.
    fn force(&mut self) {
        let now_ns = self.core.now_ns();
        for moving in self.disks.iter_mut().filter(|moving| !moving.alone) {
            let late = moving.stage == Stage::Resting && now_ns >= moving.began_ns + REST_NS;
            if late && !std::mem::replace(&mut moving.forced, true) {
                moving.disk.target.force();
            }
        }
    }

    /// How long the guests waited whose disks are over, in microseconds: half of them no longer
    /// than the first, none longer than the second.
    pub fn pauses_us(&self) -> (u64, u64) {
        let mut all = self.pauses_us.clone();
        all.sort_unstable();
        let median = all.get(all.len().saturating_sub(1) / 2).copied().unwrap_or(0);
        (median, all.last().copied().unwrap_or(0))
    }

    /// The names of those that are not over.
    pub fn following(&self) -> Vec<&str> {
        let left = self.disks.iter().filter(|moving| !moving.is_done());
        left.map(|moving| &*moving.disk.spec.name).collect()
    }

    /// The names of those whose devices have not done what they are at.
    pub fn slow(&self) -> Vec<&str> {
        let slow =
            self.disks.iter().filter(|moving| moving.stage == Stage::Resting && !moving.alone);
        slow.map(|moving| &*moving.disk.spec.name).collect()
    }

    fn had_its_time(&self, moving: &Moving) -> bool {
        let waited = || self.core.now_ns() >= moving.began_ns + REST_NS;
        match moving.stage {
            Stage::Here => false,
            Stage::Resting => waited(),
            Stage::Said => self.committed.get() && waited(),
            Stage::Declined => !self.committed.get(),
            Stage::Over => true,
        }
    }

    /// Waits for what happens next, but not for long, and does what follows from it.
    async fn step(&mut self, most_ns: u64) -> Result<(), String> {
        self.part();
        let now_ns = self.core.now_ns();
        let under_way = |moving: &&Moving| matches!(moving.stage, Stage::Resting | Stage::Said);
        let steps = self.disks.iter().filter(under_way).map(|moving| moving.began_ns + STEP_NS);
        let next_ns = steps.max().filter(|step_ns| *step_ns > now_ns);
        if next_ns.is_none()
            && let Some(at) = self.disks.iter().position(|moving| moving.stage == Stage::Here)
        {
            self.begin(at);
        }
        let times = |moving: &Moving| [moving.began_ns + REST_NS, moving.said_ns + TAKE_NS];
        let times = self.disks.iter().filter(under_way).flat_map(times).chain(next_ns);
        let until_ns = times.filter(|ns| *ns > now_ns).chain([now_ns + most_ns]).min();
        let until_ns = until_ns.unwrap_or(now_ns);
        match self.events.next_until(&self.core, until_ns).await {
            Some(Event::AtRest(at, export)) => self.at_rest(at, export).await,
            Some(Event::Settled(at)) => self.settled(at).await,
            Some(Event::Heard(Ok(Message::Taken(name)))) => {
                let at = self.said(&name)?;
                self.go(at).await
            }
            Some(Event::Heard(Ok(Message::Declined(name, why)))) => {
                let at = self.said(&name)?;
                self.lose(at, &why).await
            }
            Some(Event::Heard(Ok(Message::Refused(why)))) => {
                Err(format!("taking the disks: {why}"))
            }
            Some(Event::Heard(Ok(other))) => Err(format!("taking the disks: it says {other:?}")),
            Some(Event::Heard(Err(why))) => Err(format!("taking the disks: {why}")),
            None => self.give_up_late(),
        }
    }

    /// A successor that has taken nothing in time is given up.
    fn give_up_late(&self) -> Result<(), String> {
        let now_ns = self.core.now_ns();
        let late =
            |moving: &Moving| moving.stage == Stage::Said && now_ns >= moving.said_ns + TAKE_NS;
        match !self.committed.get() && self.disks.iter().any(late) {
            true => Err(format!("taking the disks: not done within {} s", TAKE_NS / 1_000_000_000)),
            false => Ok(()),
        }
    }

    fn begin(&mut self, at: usize) {
        let moving = &mut self.disks[at];
        moving.began_ns = self.core.now_ns();
        moving.stage = Stage::Resting;
        let (target, events) = (moving.disk.target.clone(), self.events.clone());
        moving.resting = Some(self.core.spawn(Class::Control, async move {
            let export = target.rest().await.map(Box::new);
            events.push(Event::AtRest(at, export));
        }));
    }

    /// Has disks go over without their connections that cannot with them, when there is no way
    /// back.
    fn part(&mut self) {
        let committed = self.committed.get();
        for (at, moving) in self.disks.iter_mut().enumerate() {
            if !committed || moving.stage != Stage::Declined {
                continue;
            }
            (moving.stage, moving.alone) = (Stage::Resting, true);
            let (target, events) = (moving.disk.target.clone(), self.events.clone());
            moving.resting = Some(self.core.spawn(Class::Control, async move {
                let export = target.rest_alone().await.map(Box::new);
                events.push(Event::AtRest(at, export));
            }));
        }
    }

    async fn at_rest(
        &mut self,
        at: usize,
        export: Result<Box<vhost::Export>, String>,
    ) -> Result<(), String> {
        let (state, descriptors) = match export {
            Ok(export) => *export,
            Err(why) => return self.lose(at, &why).await,
        };
        let moving = &mut self.disks[at];
        moving.resting = None;
        moving.under_way = state.under_way.is_some();
        moving.stage = Stage::Said;
        moving.said_ns = self.core.now_ns();
        let name = moving.disk.spec.name.clone();
        if is(Mutant::GoesOnUntilGo) {
            moving.disk.target.go_on();
        }
        let said = self.line.say(&Message::State(name, state.encode()), &descriptors).await;
        said.map_err(|why| format!("taking the disks: {why}"))
    }

    /// The disk of that name, if it waits for the successor.
    fn said(&self, name: &str) -> Result<usize, String> {
        let named = |moving: &Moving| moving.stage == Stage::Said && moving.disk.spec.name == name;
        let at = self.disks.iter().position(named);
        at.ok_or_else(|| format!("taking the disks: {name} was not handed over"))
    }

    /// Tells of it when nothing of a disk is under way any more.
    fn settle(&mut self, at: usize) {
        let moving = &mut self.disks[at];
        if moving.under_way {
            let (target, events) = (moving.disk.target.clone(), self.events.clone());
            moving.resting = Some(self.core.spawn(Class::Control, async move {
                target.settled().await;
                events.push(Event::Settled(at));
            }));
        }
    }

    /// Nothing of a disk is under way any more.
    async fn settled(&mut self, at: usize) -> Result<(), String> {
        let moving = &mut self.disks[at];
        (moving.resting, moving.under_way) = (None, false);
        let Served { spec, device, .. } = &moving.disk;
        let message = Message::Settled(spec.name.clone(), device.flush_failed());
        let said = self.line.say(&message, &[]).await;
        said.map_err(|why| format!("what was under way has ended: {why}"))
    }

    /// Lets the successor go on with a disk.
    async fn go(&mut self, at: usize) -> Result<(), String> {
        let Moving { disk, began_ns, .. } = &self.disks[at];
        let (target, began_ns) = (disk.target.clone(), *began_ns);
        let said = self.line.say(&Message::Go(disk.spec.name.clone()), &[]).await;
        said.map_err(|why| format!("taking the disks: {why}"))?;
        // Whatever comes now, the disk is the successor's, and so is the node.
        self.committed.set(true);
        self.disks[at].stage = Stage::Over;
        self.pauses_us.push((self.core.now_ns() - began_ns) / 1000);
        match is(Mutant::OldGoesOn) {
            true => target.go_on(),
            false if is(Mutant::TakesBack) => {}
            // What it has open here is not needed any more.
            false => target.stop(),
        }
        self.settle(at);
        Ok(())
    }

    /// A disk cannot go over as it is.
    async fn lose(&mut self, at: usize, why: &str) -> Result<(), String> {
        let moving = &mut self.disks[at];
        let disk = &moving.disk.spec.name;
        (moving.resting, moving.under_way) = (None, false);
        if moving.alone {
            tracing::error!(%disk, "nor without its connection, it is opened anew: {why}");
            return self.go(at).await;
        }
        tracing::error!(%disk, "it goes over without its connection: {why}");
        moving.stage = Stage::Declined;
        Ok(())
    }
}
