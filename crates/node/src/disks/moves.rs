//! Moves of a disk's data to another device, or to another node (`sending`), while a guest uses it:
//! `millrace disk move`.
//!
//! ```text
//!   copying --> ready --> switching --> done
//!      |          |           |
//!      '----------+-----------'--> failed, aborted: the disk stays where it is
//! ```
//!
//! 1. The disk is quiesced for a moment, as in an upgrade, and continues with a device that tracks
//!    writes.
//! 2. What the device has is copied, and then again what was written meanwhile ([`bdev::Copy`]).
//!    The move is *ready* when little is left; it is copied again and again until an operator wants
//!    the move to finish. If a guest writes faster than its disk is copied, its writes are limited,
//!    as a last resort, and only then.
//! 3. The disk is quiesced again. The rest is copied and made durable, the state directory gets the
//!    new device, and the disk continues there.
//!
//! Until the state directory has the new device the old one is complete, and from then on the new
//! one is: nothing is written in between, because the guest waits. So a node that dies at any
//! instant continues with a complete device. Should the state directory be in doubt, the guest
//! waits until it could be written again.
//!
//! While a disk moves, it is neither resized nor detached. A move to another device ends with its
//! node, so the node is not upgraded meanwhile; the disk stays where it is. A move to another node
//! is continued by the next process, unless it is about to switch.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;

use bdev::{Bdev, Copy, CopyTarget, DeviceTarget};
use reactor::{Class, Core, Either, Event, race, timeout};
use serde_json::{Value, json};
use transfer::Shape;
use vhost::{FrontEnd, Target};

use super::Disks;
use super::changes::Subject;
use super::export::PAUSE_NS;
use super::sending::{Sending, usage};
use crate::disks::events::What;
use crate::disks::limits::LimitChange;
use crate::disks::spec::DiskSpec;
use crate::disks::transfers::Transfer;
use crate::error::{Error, Kind};
use crate::mutant::{self, Mutant};

/// How long the requests of a disk may take to end before a switch.
const QUIESCE_NS: u64 = 2_000_000_000;
/// How long the new device may take for the rest, while the guest waits.
const SWITCH_NS: u64 = 10_000_000_000;
/// Pause before another attempt to switch, and between two rounds of a move that is ready.
const AGAIN_NS: u64 = 100_000_000;
/// The same, while a guest's machine moves to another node and stops at any moment.
const SOON_NS: u64 = 2_000_000;
/// The pause before an attempt to begin with a disk whose device has not completed its requests for
/// some attempts.
const LATER_NS: u64 = 10_000_000_000;
/// Attempts to let a disk continue with its bitmap or, if it has not moved, without.
const TRIES_MAX: u32 = 3;
/// The rest that is copied while the guest waits: what takes so long, but at least so much.
const REST_NS: u64 = 2_000_000;
const REST_BYTES_MIN: u64 = 256 << 10;
/// How long the moves may take to end that the next process is to continue, in an upgrade.
const LEAVE_NS: u64 = 5_000_000_000;
/// How long an operator waits for a process to continue a move.
const CONTINUED_NS: u64 = 10_000_000_000;
/// How often a pass of a copy looks whether others use the disk, in nanoseconds.
const LOOK_NS: u64 = 100_000_000;
/// How many rounds, and for how long, a move makes no progress before operators are told.
const FRUITLESS_MAX: u32 = 10;
const FRUITLESS_NS: u64 = 10_000_000_000;
/// How often a switch that is put off doubles what may be left at the next one.
const DOUBLINGS_MAX: u32 = 6;
/// The lowest limit of writes in bytes per second.
const WRITES_MIN: u64 = 256 << 10;
/// Smallest granule of the bitmap, and the most granules of one.
const GRANULE_MIN: u64 = 16 << 10;
const GRANULES_MAX: u64 = 64 << 20;

/// How far a move is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Copying,
    Ready,
    Switching,
    Done,
    Aborted,
    Failed(String),
}

impl Stage {
    /// The stages of a move that is under way.
    pub(super) const ACTIVE: [Stage; 3] = [Stage::Copying, Stage::Ready, Stage::Switching];

    /// As operators see it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Stage::Copying => "copying",
            Stage::Ready => "ready",
            Stage::Switching => "switching",
            Stage::Done => "done",
            Stage::Aborted => "aborted",
            Stage::Failed(_) => "failed",
        }
    }
}

/// Where a disk goes.
pub(super) enum Goal {
    /// To another device of this node, with which it is served then.
    Device(DiskSpec, Bdev),
    /// To another node.
    Node(Rc<Sending>),
}

impl Goal {
    fn uri(&self) -> String {
        match self {
            Goal::Device(spec, _) => spec.uri.clone(),
            Goal::Node(sending) => sending.to.to_string(),
        }
    }
}

/// A move, or what is remembered of one that has ended.
pub(crate) struct Move {
    uri: String,
    /// It goes to another node.
    to_node: bool,
    /// The way there.
    sending: RefCell<Option<Rc<Sending>>>,
    stage: RefCell<Stage>,
    /// It is to finish as soon as it is ready; it is to end.
    finish: Cell<bool>,
    abort: Cell<bool>,
    /// This process ends; the next one continues, if it can.
    leave: Cell<bool>,
    copy: RefCell<Option<Rc<Copy>>>,
    total_bytes: Cell<u64>,
    /// Of a move that has ended.
    copied_bytes: Cell<u64>,
    /// How much is copied in [`REST_NS`].
    rest_bytes: Cell<u64>,
    /// Switches that were put off because more was left.
    put_off: Cell<u32>,
    /// What the guest may write, in bytes per second; 0 if that is not limited.
    writes_limit: Cell<u64>,
    /// Its guest waits for the rest, so the rate that moves share does not hold for it.
    guest_waits: Cell<bool>,
    /// The longest time that the guest has waited.
    pause_us: Cell<u64>,
    began_ns: u64,
    ended_ns: Cell<u64>,
    /// Notified after each change of the wishes and of the stage.
    changed: Event,
}

/// How many moves have ended since the process began.
#[derive(Default)]
pub(super) struct Ended {
    pub done: Cell<u64>,
    pub aborted: Cell<u64>,
    pub failed: Cell<u64>,
}

impl Ended {
    pub(super) fn count(&self, stage: &Stage) {
        let counter = match stage {
            Stage::Done => &self.done,
            Stage::Aborted => &self.aborted,
            Stage::Failed(_) => &self.failed,
            Stage::Copying | Stage::Ready | Stage::Switching => return,
        };
        counter.set(counter.get() + 1);
    }
}

/// Why a move does not go on.
pub(super) enum Stop {
    Aborted,
    /// The next process continues.
    Left,
    /// The disk was given to another node, which has not confirmed.
    Undecided,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error)
    }
}

impl From<bdev::Error> for Stop {
    fn from(error: bdev::Error) -> Stop {
        Stop::Failed(system(error.to_string()))
    }
}

pub(super) fn system(what: impl Into<String>) -> Error {
    Error::new(Kind::System, what)
}

impl Move {
    /// Whether it is under way.
    pub(super) fn is_active(&self) -> bool {
        Stage::ACTIVE.contains(&self.stage.borrow())
    }

    /// How far it is.
    pub(super) fn stage(&self) -> Stage {
        self.stage.borrow().clone()
    }

    /// The bytes that were copied so far, including those that were copied again.
    pub(super) fn copied_bytes(&self) -> u64 {
        let copy = self.copy.borrow();
        copy.as_ref().map_or(self.copied_bytes.get(), |copy| copy.copied_bytes())
    }

    /// The bytes that have yet to be copied, as far as is known now.
    pub(super) fn left_bytes(&self) -> u64 {
        self.copy.borrow().as_ref().map_or(0, |copy| copy.known_left_bytes())
    }

    /// What the guest may write, in bytes per second; 0 if that is not limited.
    pub(super) fn writes_limit(&self) -> u64 {
        self.writes_limit.get()
    }

    fn is_stopped(&self) -> bool {
        self.abort.get() || self.leave.get()
    }

    /// Lets it end: the next process continues, if it can.
    fn leave(&self) {
        self.leave.set(true);
        self.changed.notify_all();
    }

    /// Suspends until it is to end.
    pub(super) async fn until_stopped(&self) {
        self.changed.wait_until(|| self.is_stopped()).await;
    }

    /// Why it ends.
    fn stop(&self) -> Stop {
        if self.abort.get() { Stop::Aborted } else { Stop::Left }
    }

    /// Notes how long the guest has waited.
    pub(super) fn note_pause(&self, pause_us: u64) {
        self.pause_us.set(self.pause_us.get().max(pause_us));
    }

    fn set_stage(&self, stage: Stage) {
        self.stage.replace(stage);
        self.changed.notify_all();
    }

    fn report(&self, name: &str, now_ns: u64) -> Value {
        let stage = self.stage.borrow();
        let end_ns = if self.is_active() { now_ns } else { self.ended_ns.get() };
        let limit = self.writes_limit();
        let mut report = json!({
            "name": name,
            "uri": self.uri,
            "stage": stage.name(),
            "why": match &*stage {
                Stage::Failed(why) => Some(why),
                _ => None,
            },
            "finishes": self.finish.get(),
            "total_bytes": self.total_bytes.get(),
            "copied_bytes": self.copied_bytes(),
            "left_bytes": self.left_bytes(),
            "writes_bytes_per_second": (limit > 0).then_some(limit),
            "pause_us": self.pause_us.get(),
            "seconds": end_ns.saturating_sub(self.began_ns) as f64 / 1e9,
        });
        if self.to_node {
            report["to_node"] = true.into();
        }
        if let Some(sending) = &*self.sending.borrow() {
            report["sent_bytes"] = sending.sender.sent_bytes().into();
            let lost = self.is_active().then(|| sending.sender.broken()).flatten();
            report["lost_connection"] = lost.into();
        }
        report
    }
}

fn granule(size_bytes: u64) -> u64 {
    GRANULE_MIN.max((size_bytes / GRANULES_MAX).next_power_of_two())
}

impl Disks {
    /// Begins to move a disk to another device. Suspends until that is open.
    ///
    /// # Errors
    /// When there is no disk of that name, it is not one that was attached, it moves already, or
    /// the device cannot be opened or does not fit.
    pub async fn begin_move(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        uri: &str,
        finish: bool,
    ) -> Result<Value, Error> {
        let _change = self.change(name).await?;
        let target = self.target(name)?;
        self.may_move(name, &target)?;
        self.unless_configured(name)?;
        let spec = self.all.borrow()[self.find(name)?].spec.clone();
        let spec = DiskSpec { uri: uri.to_owned(), ..spec };
        let resources = self.resources()?.clone();
        let opened = resources.open_target(core, &spec).await.and_then(|device| {
            let old = Shape::of(&target.device().geometry());
            let fits = old.fits(&Shape::of(&device.geometry()));
            fits.map_err(|why| usage(format!("{uri} does not fit disk {name}: {why}")))?;
            Ok(device)
        });
        let device = match opened {
            Ok(device) => device,
            Err(error) => {
                resources.drop_target(name).await;
                return Err(error);
            }
        };
        tracing::info!(disk = name, to = uri, "moving a disk");
        self.report(core, What::MoveBegun { disk: name.to_owned(), uri: uri.to_owned() });
        self.start_move(core, name, target, Goal::Device(spec, device), finish);
        Ok(self.moves_report(core, Some(name)))
    }

    /// Refuses to move a disk that is moving, or is not here.
    pub(super) fn may_move(&self, name: &str, target: &Target) -> Result<(), Error> {
        if self.moves(name) || self.is_sending(name) {
            let what = format!("disk {name} is being moved");
            return Err(Error::new(Kind::Usage, what).hint(
                "`millrace disk move --status` shows it, `millrace disk move NAME --abort` ends it",
            ));
        }
        self.unless_elsewhere(name)?;
        if target.holds() {
            return Err(system(format!("disk {name} waits for operations of the previous node")));
        }
        Ok(())
    }

    /// Refuses to move a disk that is not one that was attached.
    pub(super) fn unless_configured(&self, name: &str) -> Result<(), Error> {
        if self.all.borrow()[self.find(name)?].attached {
            return Ok(());
        }
        let what = format!(
            "disk {name} is part of the node's configuration, which names its device: the next \
             start would use the old one"
        );
        Err(Error::new(Kind::Usage, what)
            .hint("move disks that were attached with `millrace disk attach`"))
    }

    /// Starts the task that moves a disk.
    pub(super) fn start_move(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        target: Rc<Target>,
        goal: Goal,
        finish: bool,
    ) {
        let moving = Rc::new(Move {
            uri: goal.uri(),
            to_node: matches!(goal, Goal::Node(_)),
            sending: RefCell::new(match &goal {
                Goal::Device(..) => None,
                Goal::Node(sending) => Some(sending.clone()),
            }),
            stage: RefCell::new(Stage::Copying),
            finish: Cell::new(finish),
            abort: Cell::new(false),
            leave: Cell::new(false),
            copy: RefCell::default(),
            total_bytes: Cell::new(0),
            copied_bytes: Cell::new(0),
            rest_bytes: Cell::new(0),
            put_off: Cell::new(0),
            writes_limit: Cell::new(0),
            guest_waits: Cell::new(false),
            pause_us: Cell::new(0),
            began_ns: core.now_ns(),
            ended_ns: Cell::new(0),
            changed: Event::new(),
        });
        self.moves.borrow_mut().insert(name.to_owned(), moving.clone());
        self.changed.notify_all();
        let (disks, again, name) = (self.clone(), core.clone(), name.to_owned());
        core.spawn(Class::Background, async move {
            disks.run_move(&again, &name, goal, &target, &moving).await;
        });
    }

    /// Whether a disk is being moved.
    pub(super) fn moves(&self, name: &str) -> bool {
        self.moves.borrow().get(name).is_some_and(|moving| moving.is_active())
    }

    /// Whether the move of a disk is ending that the next process is to continue.
    pub(super) fn leaves_move(&self, name: &str) -> bool {
        let leaves = |moving: &Rc<Move>| moving.is_active() && moving.leave.get();
        self.moves.borrow().get(name).is_some_and(leaves)
    }

    /// Whether a disk is on its way to another node, and nobody carries it there at this moment.
    fn is_uncarried(&self, name: &str) -> bool {
        self.is_sending(name) && !self.moves(name)
    }

    /// Refuses what cannot be done while a disk is being moved.
    pub(super) fn unless_moving(&self, name: &str) -> Result<(), Error> {
        match self.moves(name) || self.is_sending(name) {
            true => Err(Error::new(Kind::Usage, format!("disk {name} is being moved"))
                .hint(format!("wait for its end, or end it: millrace disk move {name} --abort"))),
            false => Ok(()),
        }
    }

    /// The names of the disks that are being moved.
    pub fn moving(&self) -> Vec<String> {
        let moves = self.moves.borrow();
        let active = moves.iter().filter(|(_, moving)| moving.is_active());
        active.map(|(name, _)| name.clone()).collect()
    }

    /// The moves that are under way, and the last one of each disk.
    pub fn moves_report(&self, core: &Core, name: Option<&str>) -> Value {
        let (moves, now_ns) = (self.moves.borrow(), core.now_ns());
        let wanted = moves.iter().filter(|(moved, _)| name.is_none_or(|name| name == *moved));
        let known = wanted.filter(|(name, _)| !self.is_uncarried(name));
        let mut all: BTreeMap<_, _> =
            known.map(|(name, moving)| (name.clone(), moving.report(name, now_ns))).collect();
        // Moves that are about to be continued.
        for (sent, transfer) in &*self.transfers.borrow() {
            if let Transfer::Sending { to, anyway, .. } = transfer
                && name.is_none_or(|name| name == sent)
                && !all.contains_key(sent)
            {
                let report = json!({
                    "name": sent,
                    "uri": to.to_string(),
                    "stage": Stage::Copying.name(),
                    "why": null,
                    "finishes": anyway,
                    "total_bytes": 0,
                    "copied_bytes": 0,
                    "left_bytes": 0,
                    "writes_bytes_per_second": null,
                    "pause_us": 0,
                    "seconds": 0.0,
                    "to_node": true,
                });
                all.insert(sent.clone(), report);
            }
        }
        let all: Vec<_> = all.into_values().collect();
        let rate = self.limits.borrow().moves;
        json!({"moves": all, "bytes_per_second": (rate > 0).then_some(rate)})
    }

    fn move_of(&self, name: &str) -> Result<Rc<Move>, Error> {
        let moving = self.moves.borrow().get(name).cloned();
        moving.filter(|moving| moving.is_active()).ok_or_else(|| {
            self.find(name).err().unwrap_or_else(|| {
                Error::new(Kind::Usage, format!("disk {name} is not being moved"))
            })
        })
    }

    /// Lets a move finish as soon as it is ready. Suspends until it is continued.
    ///
    /// # Errors
    /// When the disk is not being moved.
    pub async fn finish_move(&self, core: &Core, name: &str) -> Result<Value, Error> {
        self.until_continued(core, name).await;
        let moving = self.move_of(name)?;
        moving.finish.set(true);
        moving.sending.borrow().iter().for_each(|sending| sending.anyway.set(true));
        moving.changed.notify_all();
        Ok(self.moves_report(core, Some(name)))
    }

    /// Ends a move; the disk stays where it is. A disk that was given to another node is taken back
    /// from there, by `force` without asking; one that waits for its data forgets the source.
    /// Suspends until that is done.
    ///
    /// # Errors
    /// When the disk is not being moved, or the other node does not give it back.
    pub async fn abort_move(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        force: bool,
    ) -> Result<Value, Error> {
        self.until_continued(core, name).await;
        let moving = self.move_of(name);
        if let Ok(moving) = &moving {
            moving.abort.set(true);
            moving.changed.notify_all();
            moving.changed.wait_until(|| !moving.is_active()).await;
        }
        let stage = match (self.transfer(name), moving) {
            (Some(Transfer::Given { .. } | Transfer::Sent { .. }), _) => {
                self.take_back(core, name, force).await?;
                "taken-back"
            }
            (_, Ok(moving)) if moving.stage() == Stage::Done => {
                let what = format!("disk {name} has already moved to {}", moving.uri);
                return Err(Error::new(Kind::Usage, what).hint("move it back, if you want that"));
            }
            (_, Ok(_)) => return Ok(self.moves_report(core, Some(name))),
            (Some(Transfer::Incoming { id: Some(id), .. }), _) => {
                self.forget_source(core, name, id).await?;
                "waits"
            }
            (Some(Transfer::Sending { to, .. }), Err(_)) => {
                self.forget_move(core, name, &to.to_string()).await?;
                "aborted"
            }
            (_, Err(error)) => return Err(error),
        };
        Ok(json!({"moves": [{"name": name, "stage": stage}]}))
    }

    /// Limits the bytes per second of all moves together, and stores that; 0 is no limit. Suspends.
    ///
    /// # Errors
    /// When it cannot be stored.
    pub async fn limit_moves(&self, core: &Core, bytes_per_second: u64) -> Result<Value, Error> {
        let change = LimitChange::of_moves(bytes_per_second);
        let _change = self.change_of(Subject::Limits).await?;
        match self.resources()?.change_limits(&change).await {
            Err(error) if error.to_string().contains("unknown field") => {
                tracing::warn!("a launcher of an earlier version does not keep the limit: {error}");
            }
            stored => stored?,
        }
        self.limits.borrow_mut().moves = bytes_per_second;
        self.share_rate();
        Ok(self.moves_report(core, None))
    }

    /// Gives each move its part of the rate, except those whose guests wait.
    pub(super) fn share_rate(&self) {
        let moves = self.moves.borrow();
        let active = || moves.values().filter(|moving| moving.is_active());
        let (rate, count) = (self.limits.borrow().moves, active().count().max(1) as u64);
        for moving in active() {
            if let Some(copy) = &*moving.copy.borrow() {
                let is_limited = rate > 0 && !moving.guest_waits.get();
                copy.limit(if is_limited { (rate / count).max(1) } else { 0 });
            }
        }
    }

    /// Notes whether the guest of a move waits for it, and lifts the rate as long as it does.
    pub(super) fn lift_rate(&self, moving: &Move, guest_waits: bool) {
        if moving.guest_waits.replace(guest_waits) != guest_waits {
            self.share_rate();
        }
    }

    /// Ends all moves. Suspends until they have ended.
    pub(super) async fn end_moves(&self) {
        let all: Vec<_> = self.moves.borrow().values().cloned().collect();
        for moving in all {
            moving.leave();
            moving.changed.wait_until(|| !moving.is_active()).await;
        }
    }

    /// Ends the moves that a successor continues. Suspends until they have ended, but not for ever.
    ///
    /// # Errors
    /// When a disk has yet to come, or no successor could continue one of the moves; then none has
    /// ended.
    pub async fn leave_moves(&self, core: &Core) -> Result<(), String> {
        self.all_came()?;
        let moves = self.moves.borrow().clone();
        let active: Vec<_> = moves.iter().filter(|(_, moving)| moving.is_active()).collect();
        let stay = active.iter().filter(|(name, moving)| !self.may_be_left(name, moving));
        let stay: Vec<_> = stay.map(|(name, _)| (*name).clone()).collect();
        if !stay.is_empty() {
            return Err(keep_their_process(&stay));
        }
        active.iter().for_each(|(_, moving)| moving.leave());
        let ended = async {
            for (_, moving) in active {
                moving.changed.wait_until(|| !moving.is_active()).await;
            }
        };
        let _ = timeout(core, LEAVE_NS, ended).await;
        Ok(())
    }

    /// Whether another process may continue a move: not if a guest would wait for that.
    fn may_be_left(&self, name: &str, moving: &Move) -> bool {
        let sending = moving.sending.borrow();
        let to_node = sending.as_ref().is_some_and(|sending| !sending.migrates.get());
        to_node && *moving.stage.borrow() != Stage::Switching && !self.migrates(name)
    }

    /// Refuses a handover when the machine of a disk whose move was left has begun to migrate.
    ///
    /// # Errors
    /// Then.
    pub fn unless_machines_leave(&self) -> Result<(), String> {
        let transfers = self.transfers.borrow();
        let leave = transfers.keys().filter(|name| self.is_sending(name) && self.migrates(name));
        let leave: Vec<_> = leave.cloned().collect();
        match leave.is_empty() {
            true => Ok(()),
            false => Err(keep_their_process(&leave)),
        }
    }

    /// Continues the moves that no successor has continued.
    pub fn continue_moves(self: &Rc<Self>, core: &Core) {
        for (name, transfer) in self.transfers.borrow().clone() {
            // Those whose disk cannot be opened are waited for since the start.
            if matches!(transfer, Transfer::Sending { .. }) && self.target(&name).is_ok() {
                self.go_on_with(core, &name, transfer);
            }
        }
    }

    /// Ends a move to another node that nobody can continue, because the disk cannot be opened.
    async fn forget_move(&self, core: &Core, name: &str, uri: &str) -> Result<(), Error> {
        let _change = self.change(name).await?;
        if !self.is_uncarried(name) {
            return Err(usage(format!("the move of disk {name} continues")));
        }
        self.keep_transfer(name, None).await?;
        tracing::warn!(disk = name, "the other node still waits for it");
        let (disk, uri, why) = (name.to_owned(), uri.to_owned(), "it was aborted".to_owned());
        self.report(core, What::MoveFailed { disk, uri, why });
        self.moves_ended.count(&Stage::Aborted);
        Ok(())
    }

    /// Suspends while nobody carries out the move of a disk to another node, but not for ever: from
    /// the end of a process until the next one continues.
    async fn until_continued(&self, core: &Core, name: &str) {
        let ends = || self.ended.get() || self.left.get();
        let goes_on = || ends() || !self.handing_over.get() && !self.is_uncarried(name);
        let _ = timeout(core, CONTINUED_NS, self.changed.wait_until(goes_on)).await;
    }

    async fn run_move(
        self: Rc<Self>,
        core: &Core,
        name: &str,
        goal: Goal,
        target: &Target,
        moving: &Move,
    ) {
        let old = target.device().untracked();
        let moved = self.carry_out(core, name, &goal, target, moving).await;
        target.limit_writes(0);
        moving.writes_limit.set(0);
        if moved.is_err() {
            self.end_mirror(core, moving).await;
        }
        let (disk, uri) = (name.to_owned(), moving.uri.clone());
        if let (Err(Stop::Left), Goal::Node(sending)) = (&moved, &goal) {
            self.note_migration(name, sending, target.front_end()).await;
        }
        let moved = match moved {
            Err(Stop::Left) if moving.abort.get() => Err(Stop::Aborted),
            moved => moved,
        };
        // Whoever continues it makes another bitmap.
        let is_left = moving.to_node && matches!(moved, Err(Stop::Left));
        if (moved.is_err() || moving.to_node) && !is_left {
            self.go_back(core, name, target, moving, &old).await;
        }
        let given = match &goal {
            Goal::Node(sending) if matches!(moved, Ok(()) | Err(Stop::Undecided)) => {
                Some((sending.id, sending.to.clone()))
            }
            _ => None,
        };
        let ended = match moved {
            Ok(()) => {
                let pause_us = moving.pause_us.get();
                tracing::info!(disk = name, to = uri, pause_us, "moved a disk");
                Some((Stage::Done, What::Moved { disk, uri, pause_us }))
            }
            Err(Stop::Left) if is_left => {
                tracing::info!(disk = name, to = uri, "the next process continues the move");
                None
            }
            Err(stop) => {
                match &goal {
                    Goal::Node(_) if matches!(stop, Stop::Undecided) => {}
                    Goal::Node(sending) => self.give_up(core, name, sending).await,
                    Goal::Device(..) => {
                        if let Ok(resources) = self.resources() {
                            resources.drop_target(name).await;
                        }
                    }
                }
                let (stage, why) = match stop {
                    Stop::Aborted => (Stage::Aborted, "it was aborted".to_owned()),
                    Stop::Left => (Stage::Aborted, "the node ends".to_owned()),
                    Stop::Undecided => {
                        (Stage::Aborted, format!("it was given to {uri}, which has not confirmed"))
                    }
                    Stop::Failed(error) => (Stage::Failed(error.to_string()), error.to_string()),
                };
                tracing::warn!(disk = name, to = uri, "a disk has not moved: {why}");
                Some((stage, What::MoveFailed { disk, uri, why }))
            }
        };
        moving.ended_ns.set(core.now_ns());
        if let Goal::Node(sending) = &goal {
            // It would say hello again.
            sending.sender.end();
        }
        if let Some((id, to)) = given {
            let undecided = matches!(self.transfer(name), Some(Transfer::Given { .. }));
            self.watch(core, name, id, &to, undecided);
        }
        let copy = moving.copy.take();
        moving.copied_bytes.set(copy.map_or(0, |copy| copy.copied_bytes()));
        match ended {
            Some((stage, what)) => {
                self.report(core, what);
                self.moves_ended.count(&stage);
                moving.set_stage(stage);
            }
            None => {
                self.moves.borrow_mut().remove(name);
                moving.set_stage(Stage::Aborted);
            }
        }
        self.share_rate();
        self.changed.notify_all();
    }

    /// Ends what is under way to the new device, but does not wait for ever for it.
    async fn end_mirror(&self, core: &Core, moving: &Move) {
        let copy = moving.copy.borrow().clone();
        if let Some(copy) = copy {
            copy.mirror(false);
            let _ = timeout(core, QUIESCE_NS, copy.until_mirrored()).await;
        }
    }

    /// Lets the disk use its old device without the bitmap. If that is not possible, it keeps the
    /// bitmap, which does no harm.
    async fn go_back(&self, core: &Core, name: &str, target: &Target, moving: &Move, old: &Bdev) {
        for _ in 0..TRIES_MAX {
            if moving.copy.borrow().is_none() || self.ended.get() {
                // Nothing has been switched, or nothing is used any more.
                return;
            }
            let back = async || Ok(old.clone());
            match self.swap(core, name, target, moving, back).await {
                Ok(()) => return,
                Err(error) => tracing::warn!(disk = name, "{error}; it has its bitmap for now"),
            }
            core.sleep_ns(AGAIN_NS).await;
        }
    }

    /// Quiesces a disk, and lets it continue with the device that `then` returns; with the one that
    /// it had, if that fails.
    async fn swap(
        &self,
        core: &Core,
        name: &str,
        target: &Target,
        moving: &Move,
        then: impl AsyncFnOnce() -> Result<Bdev, Error>,
    ) -> Result<(), Error> {
        let _change = self.change(name).await?;
        // NBD clients write past the rings. They may come back afterwards.
        self.hidden.borrow_mut().insert(name.to_owned());
        let swapped = async {
            if let Some(server) = self.nbd()
                && !server.release(name, PAUSE_NS).await
            {
                return Err(system(format!("disk {name}: an NBD client's requests do not end")));
            }
            let began_ns = core.now_exact_ns();
            let quiesced = match timeout(core, QUIESCE_NS, target.quiesce()).await {
                Ok(Ok(copies)) => {
                    // The disk has the originals, so nothing is unmapped here.
                    drop(copies);
                    let quiesced_us = (core.now_exact_ns() - began_ns) / 1000;
                    tracing::debug!(disk = name, quiesced_us, "its guest waits");
                    then().await.map(|device| target.replace_device(device))
                }
                Ok(Err(why)) => Err(system(format!("disk {name} cannot be quiesced: {why}"))),
                Err(_) => Err(system(format!("disk {name}: its device's requests do not end"))),
            };
            target.resume();
            let pause_us = (core.now_exact_ns() - began_ns) / 1000;
            moving.note_pause(pause_us);
            quiesced
        };
        let swapped = swapped.await;
        self.hidden.borrow_mut().remove(name);
        swapped
    }

    async fn carry_out(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        goal: &Goal,
        target: &Target,
        moving: &Move,
    ) -> Result<(), Stop> {
        let old = target.device().untracked();
        let granule = granule(old.size_bytes());
        let (tracked, to): (_, Box<dyn CopyTarget>) = match goal {
            Goal::Device(_, device) => {
                let mirrored = old.mirrored(core, granule, device).await?;
                (mirrored, Box::new(DeviceTarget::new(core, device)?))
            }
            Goal::Node(sending) => {
                (old.tracked(core, granule).await?, Box::new(sending.sender.clone()))
            }
        };
        let copy = Rc::new(Copy::new(core, &tracked, to)?);
        let mut tries = 1;
        while let Err(error) =
            self.swap(core, name, target, moving, async || Ok(tracked.clone())).await
        {
            if moving.is_stopped() {
                return Err(moving.stop());
            }
            // Its device may be slow for a moment. A move that has come so far is not given up.
            let continues = matches!(goal, Goal::Node(sending) if sending.continues);
            if tries == TRIES_MAX && !continues || self.ended.get() {
                return Err(error.into());
            }
            if tries == TRIES_MAX {
                tracing::warn!(disk = name, "{error}; its move waits for that");
            }
            let pause_ns = if tries < TRIES_MAX { AGAIN_NS } else { LATER_NS };
            let _ = timeout(core, pause_ns, moving.until_stopped()).await;
            tries = tries.saturating_add(1);
        }
        moving.copy.replace(Some(copy.clone()));
        self.share_rate();
        unless_stopped(moving, copy.begin()).await?;
        copy.mirror(true);
        moving.total_bytes.set(copy.count_left_bytes().await);
        // Others use the disk: leave them room, unless that takes too long.
        let (mut may_be_gentle, mut before) = (true, u64::MAX);
        let mut fruitless = Fruitless::default();
        let guest_waits = |does| match goal {
            Goal::Device(..) => false,
            Goal::Node(sending) => sending.guest_waits(does),
        };
        loop {
            self.lift_rate(moving, guest_waits(target.front_end()));
            let (began_ns, before_pass) = (core.now_ns(), writes(target));
            let looking = async {
                let mut requests = completions(target);
                copy.be_gentle(may_be_gentle && copy.is_gentle());
                loop {
                    let waits = moving.guest_waits.get();
                    let changes = target.until_front_end(|does| guest_waits(does) != waits);
                    if timeout(core, LOOK_NS, changes).await.is_ok() {
                        self.lift_rate(moving, !waits);
                    }
                    let now = completions(target);
                    let is_used = now > requests && !moving.guest_waits.get();
                    copy.be_gentle(may_be_gentle && is_used);
                    requests = now;
                }
            };
            let passed = unless_stopped(moving, copy.pass());
            let bytes = match race(passed, looking).await {
                Either::First(bytes) => bytes?,
                Either::Second(never) => never,
            };
            let ns = (core.now_ns() - began_ns).max(1);
            if let Goal::Node(sending) = goal {
                let again = sending.sender.take_renewed();
                sending.sender.compare(again);
                if again {
                    unless_stopped(moving, copy.begin()).await?;
                    continue;
                }
            }
            let per_second = |bytes: u64| {
                let rate = u128::from(bytes) * 1_000_000_000 / u128::from(ns);
                u64::try_from(rate).unwrap_or(u64::MAX)
            };
            let rate = per_second(bytes);
            let counting_ns = core.now_exact_ns();
            let left = copy.count_left_bytes().await;
            let count_ns = core.now_exact_ns().saturating_sub(counting_ns);
            let rest = rate.saturating_mul(REST_NS) / 1_000_000_000;
            let most = rest.max(REST_BYTES_MIN);
            moving.rest_bytes.set(rest);
            // A guest that has stopped here waits there.
            let leaves = match goal {
                Goal::Device(..) => false,
                Goal::Node(sending) => {
                    self.note_migration(name, sending, target.front_end()).await;
                    sending.may_leave(target.front_end())
                }
            };
            if left > most && !leaves {
                moving.set_stage(Stage::Copying);
                let is_stalled = left > before / 4 * 3;
                before = left;
                let wanted = moving.finish.get() || moving.to_node;
                if wanted && fruitless.goes_on_for_long(is_stalled, core.now_ns()) {
                    tracing::warn!(
                        disk = name,
                        left_bytes = left,
                        "its move makes no progress: the disk changes as fast as it is copied"
                    );
                }
                if is_stalled && may_be_gentle {
                    may_be_gentle = false;
                } else if is_stalled && wanted {
                    let (writes, written) = writes(target);
                    let writes = writes.saturating_sub(before_pass.0);
                    let written = written.saturating_sub(before_pass.1);
                    let explained = written.saturating_add(writes.saturating_mul(2 * granule));
                    if explained < left {
                        // A client of NBD: slowing the guest down would not help.
                        continue;
                    }
                    // Half of what can be copied, as far as that can be told: what the same writes
                    // mark at another rate is not known. So it is tried in steps.
                    let written = per_second(written);
                    let half = u128::from(written) * u128::from(bytes) / (2 * u128::from(left));
                    let half = u64::try_from(half).unwrap_or(u64::MAX);
                    let limit = half.clamp(written / 2, written - written / 4);
                    self.limit_writes(core, name, target, moving, limit);
                }
                continue;
            }
            (may_be_gentle, before) = (moving.writes_limit.get() == 0, u64::MAX);
            fruitless.goes_on_for_long(false, core.now_ns());
            let may_switch = match goal {
                Goal::Device(..) => moving.finish.get(),
                Goal::Node(_) => leaves,
            };
            if !may_switch {
                moving.set_stage(Stage::Ready);
                match goal {
                    Goal::Device(..) => {
                        let wanted = moving
                            .changed
                            .wait_until(|| moving.finish.get() || moving.is_stopped());
                        let _ = timeout(core, AGAIN_NS, wanted).await;
                    }
                    Goal::Node(sending) => {
                        let leaves = target.until_front_end(|does| sending.may_leave(does));
                        let wanted = moving.changed.wait_until(|| {
                            moving.is_stopped() || sending.may_leave(target.front_end())
                        });
                        let moves = target.front_end() == FrontEnd::Running { moves: true };
                        // A long bitmap is not read all the time.
                        let ns =
                            if moves { SOON_NS.max(4 * count_ns).min(AGAIN_NS) } else { AGAIN_NS };
                        let wanted = timeout(core, ns, race(leaves, wanted));
                        if let Either::Second(why) = race(wanted, sending.sender.refused()).await {
                            return Err(Stop::Failed(system(why)));
                        }
                    }
                }
                continue;
            }
            moving.set_stage(Stage::Switching);
            let switched = match goal {
                Goal::Device(spec, device) => {
                    self.switch(core, spec, device, target, moving, &copy).await
                }
                Goal::Node(sending) => self.give(core, name, target, moving, &copy, sending).await,
            };
            self.lift_rate(moving, guest_waits(target.front_end()));
            match switched {
                Ok(()) => return Ok(()),
                Err(Switch::Later(why)) => {
                    tracing::warn!(disk = name, "{why}; the switch is tried again");
                    core.sleep_ns(AGAIN_NS).await;
                    if moving.is_stopped() {
                        return Err(moving.stop());
                    }
                }
                Err(Switch::Undecided) => return Err(Stop::Undecided),
                Err(Switch::Failed(_)) if moving.is_stopped() => return Err(moving.stop()),
                Err(Switch::Failed(error)) => return Err(Stop::Failed(error)),
            }
        }
    }

    /// Limits the guest's writes, or limits them more.
    fn limit_writes(&self, core: &Core, name: &str, target: &Target, moving: &Move, limit: u64) {
        let limit = limit.max(WRITES_MIN);
        let before = moving.writes_limit.get();
        if before > 0 && limit >= before {
            return;
        }
        moving.writes_limit.set(limit);
        target.limit_writes(limit);
        tracing::warn!(
            disk = name,
            bytes_per_second = limit,
            "its guest writes faster than the disk is copied: its writes are limited until it has moved"
        );
        self.report(core, What::WritesLimited { disk: name.to_owned(), bytes_per_second: limit });
    }

    /// Copies the rest while the guest waits, and lets the disk continue with the new device.
    async fn switch(
        &self,
        core: &Core,
        spec: &DiskSpec,
        device: &Bdev,
        target: &Target,
        moving: &Move,
        copy: &Copy,
    ) -> Result<(), Switch> {
        let resources = self.resources().map_err(Switch::Failed)?;
        // Most of it is durable before the guest has to wait, and what it has written meanwhile is
        // copied.
        let prepared = async {
            copy.flush().await?;
            copy.pass().await
        };
        match unless_stopped(moving, prepared).await {
            Ok(_) => {}
            Err(Stop::Failed(error)) => return Err(Switch::Failed(error)),
            Err(_) => return Err(Switch::Later(system("the move ends"))),
        }
        // Last, because a file system may write what it has noted of the copy, too.
        resources.prepare_moved(spec).await;
        let fatal = Cell::new(false);
        let then = async || {
            let began_ns = core.now_exact_ns();
            let since_us = || (core.now_exact_ns() - began_ns) / 1000;
            let failed = |why: Error| {
                fatal.set(true);
                why
            };
            copy.be_gentle(false);
            self.lift_rate(moving, true);
            if !mutant::is(Mutant::SwitchesBeforeTheLastBlock)
                && timeout(core, QUIESCE_NS, copy.until_mirrored()).await.is_err()
            {
                return Err(system(format!("disk {}: its new device takes too long", spec.name)));
            }
            // Requests that wait for a limit begin at the latest now, however long each is.
            let put_off = moving.put_off.get();
            let rest = moving.rest_bytes.get();
            let most = rest.saturating_mul(4 << put_off.min(DOUBLINGS_MAX));
            let mut left = copy.count_left_bytes().await;
            if left > most.max(4 * REST_BYTES_MIN) {
                moving.put_off.set(put_off.saturating_add(1));
                return Err(system(format!("the guest of disk {} has written much", spec.name)));
            }
            let rest_bytes = left;
            let copied_us = Cell::new(0);
            let rest = async {
                while left > 0 && !mutant::is(Mutant::SwitchesBeforeTheLastBlock) {
                    copy.pass().await?;
                    left = copy.count_left_bytes().await;
                }
                copied_us.set(since_us());
                copy.flush().await
            };
            match timeout(core, SWITCH_NS, unless_stopped(moving, rest)).await {
                Ok(Ok(())) => {}
                Ok(Err(Stop::Failed(error))) => return Err(failed(error)),
                Ok(Err(_)) => return Err(failed(system("the move ends"))),
                Err(_) => {
                    let what = format!("disk {}: its new device takes too long", spec.name);
                    return Err(failed(system(what)));
                }
            }
            let durable_us = since_us();
            resources.moved(spec).await.inspect_err(|_| fatal.set(true))?;
            let (disk, copied_us, stored_us) = (&spec.name, copied_us.get(), since_us());
            tracing::debug!(disk, rest_bytes, copied_us, durable_us, stored_us, "it has moved");
            Ok(device.clone())
        };
        match self.swap(core, &spec.name, target, moving, then).await {
            Ok(()) => {
                self.with(&spec.name, |disk| disk.spec = spec.clone());
                Ok(())
            }
            Err(error) if fatal.get() || self.ended.get() => Err(Switch::Failed(error)),
            Err(error) => Err(Switch::Later(error)),
        }
    }
}

fn keep_their_process(names: &[String]) -> String {
    let names = names.join(", ");
    format!("disks are being moved, and no other process could continue that now: {names}")
}

/// Why a disk was not switched.
pub(super) enum Switch {
    /// It may be tried again.
    Later(Error),
    /// The disk was given to another node, which has not confirmed.
    Undecided,
    Failed(Error),
}

/// Rounds of a move that have made no progress.
#[derive(Default)]
struct Fruitless {
    rounds: u32,
    since_ns: u64,
    told: bool,
}

impl Fruitless {
    /// Counts a round. Returns true once in a move, when there were many for a long time.
    fn goes_on_for_long(&mut self, is_stalled: bool, now_ns: u64) -> bool {
        if !is_stalled {
            self.rounds = 0;
            return false;
        }
        if self.rounds == 0 {
            self.since_ns = now_ns;
        }
        self.rounds = self.rounds.saturating_add(1);
        let long = self.rounds >= FRUITLESS_MAX && now_ns >= self.since_ns + FRUITLESS_NS;
        long && !std::mem::replace(&mut self.told, true)
    }
}

/// Requests of guests that change a disk, and the bytes of their ranges.
fn writes(target: &Target) -> (u64, u64) {
    let rings = target.stats().iter();
    let kinds = rings.flat_map(|ring| [&ring.writes, &ring.discards, &ring.zeroes]);
    kinds.fold((0, 0), |(requests, bytes), kind| {
        (requests + kind.requests.get(), bytes + kind.bytes.get())
    })
}

/// Number of requests that a disk has completed.
fn completions(target: &Target) -> u64 {
    target.stats().iter().map(|ring| ring.completions.get()).sum()
}

/// Waits for a step of a move, unless the move is to end before.
pub(super) async fn unless_stopped<T>(
    moving: &Move,
    step: impl Future<Output = Result<T, bdev::Error>>,
) -> Result<T, Stop> {
    match race(moving.until_stopped(), step).await {
        Either::First(()) => Err(moving.stop()),
        Either::Second(done) => Ok(done?),
    }
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};

    use reactor::sim::{SimConfig, World};
    use vhost::Door;

    use super::*;
    use crate::disks::resources::{LocalResources, Resources};
    use crate::disks::{Serving, options};

    /// A node with disks that can be moved.
    async fn serving(core: &Core, names: &[&str]) -> Rc<Disks> {
        let spec = |name: &&str| -> DiskSpec {
            format!("name={name} uri=mem:1M socket=/nowhere/{name}.sock").parse().unwrap()
        };
        let specs: Vec<_> = names.iter().map(spec).collect();
        let resources = Resources::Local(Box::new(LocalResources::new(core, &[], None)), true);
        let disks = Disks::start(core, resources, Vec::new(), Some(&specs), false).await;
        let disks = Rc::new(disks.unwrap());
        for spec in &specs {
            let device = Bdev::open(core, &spec.uri).await.unwrap();
            let target = Target::new(core, device, options(spec, 0));
            let name = format!("millrace-moves-{}-{}", std::process::id(), spec.name);
            let address = SocketAddr::from_abstract_name(name).unwrap();
            let listener = UnixListener::bind_addr(&address).unwrap();
            let door = Door::from_fd(core, listener.into()).unwrap();
            let serves = target.clone();
            let serving = core.spawn(Class::Control, async move { serves.serve(door).await });
            disks.arrived(core, spec, Serving { target, serving }).await;
        }
        disks
    }

    #[test]
    fn a_move_whose_guest_waits_is_not_limited_and_a_detached_disk_has_none() {
        let world = World::new(1, 1, SimConfig::default());
        let run = world.run(|core| async move {
            let disks = serving(&core, &["a", "b", "c"]).await;
            disks.limits.borrow_mut().moves = 1 << 20;
            let rate = |name: &str| {
                let moves = disks.moves.borrow();
                moves[name].copy.borrow().as_ref().map(|copy| copy.rate())
            };
            let begin = async |name: &str| {
                disks.begin_move(&core, name, "mem:1M", false).await.unwrap();
                let moving = disks.moves.borrow()[name].clone();
                moving.changed.wait_until(|| moving.stage() == Stage::Ready).await;
                moving
            };
            let moving = begin("a").await;
            assert_eq!(rate("a"), Some(1 << 20));
            disks.lift_rate(&moving, true);
            assert_eq!(rate("a"), Some(0));
            // Others begin, end, and get another limit.
            disks.begin_move(&core, "b", "mem:1M", false).await.unwrap();
            disks.share_rate();
            assert_eq!(rate("a"), Some(0));
            disks.lift_rate(&moving, false);
            begin("c").await;
            assert_eq!(["a", "b", "c"].map(rate), [Some((1 << 20) / 3); 3]);
            for name in ["b", "c"] {
                disks.abort_move(&core, name, false).await.unwrap();
            }
            assert_eq!(rate("a"), Some(1 << 20));
            let known = || -> Vec<String> { disks.moves.borrow().keys().cloned().collect() };
            assert_eq!(known(), ["a", "b", "c"]);
            disks.detach(&core, "b", false).await.unwrap();
            assert_eq!(known(), ["a", "c"]);
            disks.finish_move(&core, "a").await.unwrap();
            moving.changed.wait_until(|| moving.stage() == Stage::Done).await;
            assert!(!moving.guest_waits.get());
            disks.stop(&core).await;
        });
        run.unwrap();
    }

    #[test]
    fn operators_are_told_once_of_a_move_without_progress() {
        let mut fruitless = Fruitless::default();
        let second = |at: u64| at * FRUITLESS_NS / 10;
        assert!(!(0..30).any(|at| fruitless.goes_on_for_long(at % 3 > 0, second(at))));
        // Many rounds in a short time are no cause, and nor are few in a long one.
        assert!(!(0..100).any(|at| fruitless.goes_on_for_long(true, second(30) + at)));
        assert!(!fruitless.goes_on_for_long(false, second(50)));
        assert!(!(0..5).any(|at| fruitless.goes_on_for_long(true, second(60 + 10 * at))));
        let told = (0..30).filter(|at| fruitless.goes_on_for_long(true, second(200 + at)));
        assert_eq!(told.count(), 1);
    }
}
