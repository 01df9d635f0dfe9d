//! The source's side of a move to another node.
//!
//! 1. The disk is copied as in any move (`moves`), to the other node ([`transfer::Sender`]), while
//!    its guest runs. When little is left, the move is ready, and stays so until the machine's own
//!    live migration stops the guest here. (If no machine uses the disk, it goes when an operator
//!    wants that.)
//! 2. When all rings have stopped, the disk is withheld from its guest, the rest is sent and made
//!    durable there, and the state directory says that the disk is *given*. Only then the other
//!    node is told that the disk is its own.
//! 3. When it has confirmed, the disk is *sent*. It stays here, withheld, until it is detached.
//!
//! If the guest continues here after all, because the machine's migration has failed, the disk is
//! taken back, unless the guest has begun there. The guest waits for the answer.
//!
//! A move that this node has begun outlives it: the next process continues, and compares what it
//! has with the destination's data by checksums, because the bitmap has gone.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;

use bdev::Copy;
use reactor::{Class, Core, Either, Listener, race, timeout};
use serde_json::Value;
use transfer::{Belongings, Dial, Hello, Sender, Shape, Stage};
use vhost::{FrontEnd, Target};

use super::Disks;
use super::moves::{Goal, Move, Stop, Switch, system, unless_stopped};
use crate::disks::events::What;
use crate::disks::limits::{LimitChange, Limits};
use crate::disks::transfers::{Peer, Transfer};
use crate::error::{Error, Kind};
use crate::mutant::{self, Mutant};

/// Pause before another attempt to decide whose a disk is.
const AGAIN_NS: u64 = 1_000_000_000;
/// How long the destination may take for something that an operator waits for.
const ANSWER_NS: u64 = 10_000_000_000;
/// When operators are told that it has not answered.
const SLOW_NS: u64 = 10_000_000_000;

/// A disk on its way to another node.
pub(super) struct Sending {
    pub id: u64,
    pub to: Peer,
    pub sender: Rc<Sender>,
    /// It goes also if no machine uses it.
    pub anyway: Cell<bool>,
    /// An earlier process has begun it.
    pub continues: bool,
    /// Its machine migrates, as far as it was seen.
    pub migrates: Cell<bool>,
    /// Its machine was migrating when an earlier process was killed: if it has gone, the disk
    /// follows.
    pub has_left: Cell<bool>,
}

impl Sending {
    /// Whether the disk may leave now.
    pub fn may_leave(&self, does: FrontEnd) -> bool {
        match does {
            FrontEnd::Stopped { moves } => moves || self.anyway.get(),
            FrontEnd::Absent { left } => left || self.anyway.get() || self.has_left.get(),
            FrontEnd::Running { .. } => false,
        }
    }

    /// Whether its guest waits until the rest has arrived: its machine has stopped here to continue
    /// there.
    pub fn guest_waits(&self, does: FrontEnd) -> bool {
        match does {
            FrontEnd::Stopped { moves } => moves,
            FrontEnd::Absent { left } => left || self.has_left.get(),
            FrontEnd::Running { .. } => false,
        }
    }

    fn stage(&self) -> Transfer {
        let (anyway, leaves) = (self.anyway.get(), self.migrates.get());
        Transfer::Sending { id: self.id, to: self.to.clone(), anyway, leaves }
    }
}

pub(super) fn usage(what: impl Into<String>) -> Error {
    Error::new(Kind::Usage, what)
}

impl Disks {
    /// How far a disk is on its way to another node, or from one.
    pub(super) fn transfer(&self, name: &str) -> Option<Transfer> {
        self.transfers.borrow().get(name).cloned()
    }

    /// Whether a disk is being copied to another node, or is about to be.
    pub(super) fn is_sending(&self, name: &str) -> bool {
        matches!(self.transfers.borrow().get(name), Some(Transfer::Sending { .. }))
    }

    /// Whether a disk's machine migrates, or has.
    pub(super) fn migrates(&self, name: &str) -> bool {
        self.target(name).is_ok_and(|target| match target.front_end() {
            FrontEnd::Running { moves } | FrontEnd::Stopped { moves } => moves,
            FrontEnd::Absent { left } => left,
        })
    }

    /// Sets how far the disks are, as a simulated state directory has it.
    #[cfg(feature = "testing")]
    pub fn set_transfers(&self, transfers: std::collections::BTreeMap<String, Transfer>) {
        self.transfers.replace(transfers);
    }

    /// Why a disk is not served to its guest here, in words, if its data is elsewhere.
    pub fn elsewhere(&self, name: &str) -> Option<String> {
        self.transfers.borrow().get(name).and_then(Transfer::text)
    }

    /// Stores that. Suspends until it is durable.
    pub(super) async fn keep_transfer(
        &self,
        name: &str,
        transfer: Option<Transfer>,
    ) -> Result<(), Error> {
        self.keep_transfer_with(name, transfer, &[]).await
    }

    /// Stores it together with changes of limits.
    pub(super) async fn keep_transfer_with(
        &self,
        name: &str,
        transfer: Option<Transfer>,
        limits: &[LimitChange],
    ) -> Result<(), Error> {
        self.resources()?.keep_transfer(name, transfer.as_ref(), limits).await?;
        match transfer {
            Some(transfer) => self.transfers.borrow_mut().insert(name.to_owned(), transfer),
            None => self.transfers.borrow_mut().remove(name),
        };
        self.changed.notify_all();
        Ok(())
    }

    /// Begins to do what can be done before that is stored.
    pub(super) fn begin_to_prepare(&self, core: &Core, name: &str, transfer: Transfer) {
        let Ok(resources) = self.resources().cloned() else { return };
        let name = name.to_owned();
        core.spawn(Class::Control, async move {
            resources.prepare_transfer(&name, &transfer).await;
        });
    }

    /// Refuses what cannot be done to a disk that is not here.
    pub(super) fn unless_elsewhere(&self, name: &str) -> Result<(), Error> {
        match self.transfer(name).as_ref().and_then(Transfer::text) {
            Some(text) => Err(usage(format!("disk {name} {text}"))
                .hint("detach it, or take it back: millrace disk move NAME --abort")),
            None => Ok(()),
        }
    }

    /// The launcher's socket at which disks of other nodes come, if there is a launcher.
    ///
    /// # Errors
    /// When it does not come.
    pub async fn door_for_disks(&self, core: &Core) -> Result<Option<Listener>, Error> {
        self.resources()?.take_disks(core).await
    }

    /// Sets how this node and others know each other.
    pub fn set_identity(&self, identity: Option<transfer::Identity>) {
        self.identity.replace(identity);
    }

    /// Begins to connect to the node to which a disk goes.
    fn sender(
        self: &Rc<Self>,
        core: &Core,
        target: &Target,
        name: &str,
        id: u64,
        to: &Peer,
        given: bool,
    ) -> Rc<Sender> {
        let hello = Hello {
            version: transfer::VERSION,
            disk: to.disk.clone(),
            transfer: id,
            shape: Shape::of(&target.device().geometry()),
            given,
        };
        let (disks, again, name, there) =
            (Rc::downgrade(self), core.clone(), name.to_owned(), to.clone());
        let dial: Dial = Box::new(move || {
            let (disks, core, name, to) =
                (disks.clone(), again.clone(), name.clone(), there.clone());
            Box::pin(async move {
                let disks = disks.upgrade().ok_or("the node has ended")?;
                let resources = disks.resources().map_err(|error| error.to_string())?.clone();
                resources.dial(&core, &name, &to).await.map_err(|error| error.to_string())
            })
        });
        let identity = self.identity.borrow().clone().map(|identity| (identity, to.host.clone()));
        Rc::new(Sender::start(core, hello, dial, identity))
    }

    /// Begins to move a disk to another node. Suspends until that takes it.
    ///
    /// # Errors
    /// When there is no disk of that name, it moves already, or the other node does not take it.
    pub async fn begin_send(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        to: Peer,
        anyway: bool,
    ) -> Result<Value, Error> {
        let _change = self.change(name).await?;
        let target = self.target(name)?;
        self.may_move(name, &target)?;
        if !self.resources()?.remembers() {
            return Err(usage("this node would not remember after a restart where its disk is")
                .hint("start it with --state DIR"));
        }
        self.unless_configured(name)?;
        let id = core.random_u64();
        let sender = self.sender(core, &target, name, id, &to, false);
        let welcome = timeout(core, ANSWER_NS, sender.welcome(false)).await;
        let refused = |why: String| system(format!("{to} does not take disk {name}: {why}"));
        let welcome = welcome.map_err(|_| refused("it does not answer".to_owned()))?;
        if welcome.map_err(refused)?.stage != Stage::Receiving {
            return Err(refused("it has this disk".to_owned()));
        }
        let sending = Rc::new(Sending {
            id,
            to: to.clone(),
            sender,
            anyway: Cell::new(anyway),
            continues: false,
            migrates: Cell::default(),
            has_left: Cell::default(),
        });
        if let Err(error) = self.keep_transfer(name, Some(sending.stage())).await {
            self.abandon(core, name, &sending.sender).await;
            return Err(error);
        }
        tracing::info!(disk = name, to = %to, "moving a disk to another node");
        self.report(core, What::MoveBegun { disk: name.to_owned(), uri: to.to_string() });
        let anyway = sending.anyway.get();
        self.start_move(core, name, target, Goal::Node(sending), anyway);
        Ok(self.moves_report(core, Some(name)))
    }

    /// Continues what an earlier process has begun.
    pub fn resume_transfers(self: &Rc<Self>, core: &Core) {
        // What was handed over is as the predecessor had it.
        self.each(|disk| {
            if let Ok(serving) = &disk.serving {
                self.withhold(&disk.spec.name, &serving.target);
            }
        });
        for (name, transfer) in self.transfers.borrow().clone() {
            self.go_on_with(core, &name, transfer);
        }
    }

    /// Continues what has been begun with a disk.
    pub(super) fn go_on_with(self: &Rc<Self>, core: &Core, name: &str, transfer: Transfer) {
        match transfer {
            Transfer::Sending { id, .. } => {
                let (disks, again, name) = (self.clone(), core.clone(), name.to_owned());
                core.spawn(Class::Control, async move {
                    disks.resume_sending(&again, &name, id).await;
                });
            }
            Transfer::Given { id, to } => self.watch(core, name, id, &to, true),
            Transfer::Sent { id, to } => self.watch(core, name, id, &to, false),
            Transfer::Whole { .. } => self.watch_arrived(core, name),
            Transfer::Incoming { .. } | Transfer::Begun { .. } => {}
        }
    }

    async fn resume_sending(self: &Rc<Self>, core: &Core, name: &str, move_id: u64) {
        // It may follow from the predecessor, or wait for its requests there.
        let is_here = || self.target(name).is_ok_and(|target| !target.holds());
        let there = || is_here() || self.ended.get() || self.find(name).is_err();
        while !there() {
            core.sleep_ns(AGAIN_NS).await;
        }
        // What this process has left has to end first.
        self.changed.wait_until(|| !self.leaves_move(name)).await;
        let Ok(_change) = self.change(name).await else { return };
        let Ok(target) = self.target(name) else { return };
        let Some(Transfer::Sending { id, to, anyway, leaves }) = self.transfer(name) else {
            // It may have been detached.
            return;
        };
        if id != move_id || self.moves(name) {
            return;
        }
        tracing::info!(disk = name, to = %to, "a disk's move to another node continues");
        let sender = self.sender(core, &target, name, id, &to, false);
        sender.compare(true);
        let sending = Rc::new(Sending {
            id,
            to,
            sender,
            anyway: Cell::new(anyway),
            continues: true,
            migrates: Cell::new(leaves),
            has_left: Cell::new(leaves),
        });
        self.start_move(core, name, target, Goal::Node(sending), anyway);
    }

    /// Notes, also for the next process, whether a disk's machine migrates, and what operators
    /// want. Nobody else stores how far it is meanwhile.
    pub(super) async fn note_migration(&self, name: &str, sending: &Sending, does: FrontEnd) {
        let migrates = match does {
            FrontEnd::Running { moves } => {
                sending.has_left.set(false);
                moves
            }
            FrontEnd::Stopped { moves: true } => true,
            // It was killed.
            FrontEnd::Absent { left: false } if !sending.has_left.get() => false,
            FrontEnd::Stopped { .. } | FrontEnd::Absent { .. } => sending.migrates.get(),
        };
        sending.migrates.set(migrates);
        // An operator may want something else meanwhile.
        while self.transfer(name) != Some(sending.stage()) {
            if let Err(error) = self.keep_transfer(name, Some(sending.stage())).await {
                tracing::warn!(
                    disk = name,
                    "the next process will not know whether it leaves: {error}"
                );
                return;
            }
        }
    }

    /// Sends the rest while the guest does not run, and lets the other node have the disk.
    pub(super) async fn give(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        target: &Target,
        moving: &Move,
        copy: &Copy,
        sending: &Sending,
    ) -> Result<(), Switch> {
        let later = |what: &str| Switch::Later(system(format!("disk {name}: {what}")));
        if !sending.may_leave(target.front_end()) || !target.withhold() {
            return Err(later("its guest runs"));
        }
        let began_ns = core.now_exact_ns();
        let since_us = || (core.now_exact_ns() - began_ns) / 1000;
        let rest_bytes = copy.known_left_bytes();
        if let Some(server) = self.nbd()
            && !server.release(name, super::export::PAUSE_NS).await
        {
            target.admit(false);
            return Err(later("an NBD client's requests do not end"));
        }
        let stays = Cell::new(false);
        let rest = async {
            copy.be_gentle(false);
            self.lift_rate(moving, true);
            while copy.count_left_bytes().await > 0
                && !stays.get()
                && !mutant::is(Mutant::SwitchesBeforeTheLastBlock)
            {
                copy.pass().await?;
            }
            let sent_us = since_us();
            copy.flush().await?;
            let durable_us = since_us();
            tracing::debug!(disk = name, rest_bytes, sent_us, durable_us, "the rest is there");
            Ok(())
        };
        let mut rest = pin!(told_if_slow(core, name, &sending.to, rest));
        let given = Transfer::Given { id: sending.id, to: sending.to.clone() };
        self.begin_to_prepare(core, name, given.clone());
        let goes_on = async {
            let runs = target.until_front_end(FrontEnd::is_running);
            race(runs, moving.until_stopped()).await;
        };
        let given = match race(goes_on, rest.as_mut()).await {
            Either::First(_) => {
                target.admit(false);
                self.lift_rate(moving, false);
                // What was taken from the bitmap must arrive before the next pass.
                stays.set(true);
                return Err(match unless_stopped(moving, rest).await {
                    Err(Stop::Failed(error)) => Switch::Failed(error),
                    _ => later("its guest continues here"),
                });
            }
            Either::Second(Err(error)) => Err(Switch::Failed(system(error.to_string()))),
            Either::Second(Ok(())) if sending.sender.is_renewed() => {
                Err(later("the other node was started again"))
            }
            Either::Second(Ok(())) => {
                sending.sender.gives(true);
                self.keep_transfer(name, Some(given)).await.map_err(Switch::Failed)
            }
        };
        if let Err(why) = given {
            sending.sender.gives(false);
            target.admit(false);
            return Err(why);
        }
        let Sending { id, to, .. } = sending;
        let sender = sending.sender.clone();
        tracing::debug!(disk = name, stored_us = since_us(), "the disk is given");
        let stops = async || moving.until_stopped().await;
        let has_it = match sender.is_renewed() || sender.is_refused() {
            // Its disk was attached anew while this was stored, and has not all of the data.
            true => Some(false),
            false => self.resolve(core, name, target, *id, to, sender.clone(), stops).await,
        };
        match has_it {
            None => return Err(Switch::Undecided),
            Some(true) => {
                moving.note_pause(since_us());
                return Ok(());
            }
            Some(false) => sender.gives(false),
        }
        // Until it is stored, the next process would ask the other node.
        sending.migrates.set(false);
        while let Err(error) = self.keep_transfer(name, Some(sending.stage())).await {
            tracing::error!(disk = name, "its guest waits: {error}");
            core.sleep_ns(AGAIN_NS).await;
            if self.ended.get() {
                return Err(Switch::Undecided);
            }
        }
        target.admit(false);
        Err(later("its guest continues here"))
    }

    /// What goes along with a disk.
    fn belongings(&self, name: &str, target: &Target) -> Belongings {
        let all = self.limits.borrow();
        let of = |limits: &Limits| transfer::Limits {
            iops: limits.iops,
            bytes_per_second: limits.bytes_per_second,
            burst_ns: limits.burst_ns,
        };
        let own = all.of_disk(name);
        Belongings {
            writes_through: target.write_cache() == Some(false),
            limits: of(&own),
            group: own.group.map(|group| (group.clone(), of(&all.of_group(&group)))),
        }
    }

    /// Finds out whose a disk is that was given. Suspends until that is certain: true if it is the
    /// other node's; or until it `stops`.
    #[allow(clippy::too_many_arguments, reason = "each is something else")]
    async fn resolve(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        target: &Target,
        id: u64,
        to: &Peer,
        mut sender: Rc<Sender>,
        stops: impl AsyncFn(),
    ) -> Option<bool> {
        let mut told = String::new();
        loop {
            let runs = target.front_end().is_running();
            let asked = async {
                if runs && mutant::is(Mutant::ServesWithoutAsking) {
                    Some(Ok(false))
                } else if runs {
                    Some(sender.take_back().await.map(|back| !back))
                } else {
                    let belongings = self.belongings(name, target);
                    let owns = sender.own(&belongings);
                    match race(target.until_front_end(FrontEnd::is_running), owns).await {
                        Either::First(()) => None,
                        Either::Second(owns) => Some(owns.map(|()| true)),
                    }
                }
            };
            let asked = told_if_slow(core, name, to, asked);
            let decided = match race(stops(), asked).await {
                Either::First(()) => return None,
                Either::Second(None) => continue,
                Either::Second(Some(decided)) => decided,
            };
            let why = match decided {
                Ok(false) => return Some(false),
                Ok(true) => {
                    tracing::debug!(disk = name, "the other node owns the disk");
                    let sent = Transfer::Sent { id, to: to.clone() };
                    match self.keep_transfer(name, Some(sent)).await {
                        Ok(()) => return Some(true),
                        Err(error) => error.to_string(),
                    }
                }
                Err(why) => why,
            };
            if told != why {
                tracing::warn!(disk = name, to = %to, "it is not known whose it is: {why}");
                told = why;
            }
            if let Either::First(()) = race(stops(), core.sleep_ns(AGAIN_NS)).await {
                return None;
            }
            if sender.is_refused() {
                sender = self.sender(core, target, name, id, to, true);
            }
        }
    }

    /// Watches a disk that was given to another node: a guest that uses it here gets it back, if it
    /// has not begun there. `undecided`: whose it is ends a move, which nobody has told.
    pub(super) fn watch(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        id: u64,
        to: &Peer,
        undecided: bool,
    ) {
        if !self.watched.borrow_mut().insert(name.to_owned()) {
            return;
        }
        let (disks, again, name, to) = (self.clone(), core.clone(), name.to_owned(), to.clone());
        core.spawn(Class::Control, async move {
            disks.watch_given(&again, &name, id, &to, undecided).await;
            disks.watched.borrow_mut().remove(&name);
            disks.changed.notify_all();
        });
    }

    /// Suspends until nobody may watch any more whether a disk comes back.
    async fn until_unwatched(&self, name: &str, id: u64) {
        let is_over = || {
            let given = self.transfer(name).is_some_and(|transfer| transfer.is_given(id));
            self.ended.get() || !given || self.taking_back.borrow().contains(name)
        };
        self.changed.wait_until(is_over).await;
    }

    async fn watch_given(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        id: u64,
        to: &Peer,
        mut undecided: bool,
    ) {
        let over = async || self.until_unwatched(name, id).await;
        loop {
            let Ok(target) = self.target(name) else {
                match race(over(), core.sleep_ns(AGAIN_NS)).await {
                    Either::First(()) => return,
                    Either::Second(()) => continue,
                }
            };
            if let Some(Transfer::Sent { .. }) = self.transfer(name) {
                let runs = target.until_front_end(FrontEnd::is_running);
                if let Either::First(()) = race(over(), runs).await {
                    return;
                }
                // If it is given back, and the answer is lost, it is asked again.
                let asks = Transfer::Given { id, to: to.clone() };
                if let Err(error) = self.keep_transfer(name, Some(asks)).await {
                    tracing::error!(disk = name, "its guest waits: {error}");
                    core.sleep_ns(AGAIN_NS).await;
                    continue;
                }
            }
            let sender = self.sender(core, &target, name, id, to, true);
            let gone = async || {
                let gone = self.changed.wait_until(|| self.target(name).is_err());
                race(over(), gone).await;
            };
            let has_it = self.resolve(core, name, &target, id, to, sender.clone(), gone).await;
            if has_it == Some(true) && std::mem::take(&mut undecided) {
                let (disk, uri) = (name.to_owned(), to.to_string());
                self.report(core, What::Moved { disk, uri, pause_us: 0 });
                self.moves_ended.count(&super::moves::Stage::Done);
            }
            match has_it {
                None if self.target(name).is_err() => {}
                None => return,
                Some(true) if target.front_end().is_running() => {
                    let why = "its guest has begun there".to_owned();
                    tracing::error!(disk = name, to = %to, "a guest waits for a disk that has moved");
                    let (disk, uri) = (name.to_owned(), to.to_string());
                    self.report(core, What::Elsewhere { disk, uri, why });
                    let ends = target.until_front_end(|does| !does.is_running());
                    race(over(), ends).await;
                }
                Some(true) => {}
                Some(false) => {
                    // A destination that has forgotten the move gives nothing back.
                    self.serve_again(core, name, &target, to).await;
                    return self.abandon(core, name, &sender).await;
                }
            }
        }
    }

    /// Serves a disk again that the other node does not have.
    async fn serve_again(&self, core: &Core, name: &str, target: &Target, to: &Peer) {
        while let Err(error) = self.keep_transfer(name, None).await {
            tracing::error!(disk = name, "its guest waits: {error}");
            core.sleep_ns(AGAIN_NS).await;
        }
        target.admit(false);
        tracing::info!(disk = name, from = %to, "a disk was taken back");
        self.report(core, What::TakenBack { disk: name.to_owned(), uri: to.to_string() });
    }

    /// Takes a disk back that was given to another node; asks that, unless it is to be forced.
    ///
    /// # Errors
    /// When the guest has begun there, or the other node does not answer.
    pub(super) async fn take_back(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        force: bool,
    ) -> Result<(), Error> {
        if !self.taking_back.borrow_mut().insert(name.to_owned()) {
            return Err(usage(format!("disk {name} is being taken back")));
        }
        self.changed.notify_all();
        // What is being asked and stored comes first.
        self.changed.wait_until(|| !self.watched.borrow().contains(name)).await;
        let transfer = self.transfer(name);
        let taken = match &transfer {
            Some(Transfer::Given { id, to } | Transfer::Sent { id, to }) => {
                self.take_back_now(core, name, *id, to, force).await
            }
            // Its guest has taken it back.
            _ => Ok(()),
        };
        self.taking_back.borrow_mut().remove(name);
        if taken.is_err() {
            transfer.into_iter().for_each(|transfer| self.go_on_with(core, name, transfer));
        }
        taken
    }

    async fn take_back_now(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        id: u64,
        to: &Peer,
        force: bool,
    ) -> Result<(), Error> {
        let target = self.target(name)?;
        if force {
            self.serve_again(core, name, &target, to).await;
            return Ok(());
        }
        // If it is given back, and the answer is lost, it is asked again.
        self.keep_transfer(name, Some(Transfer::Given { id, to: to.clone() })).await?;
        let sender = self.sender(core, &target, name, id, to, true);
        let asked = async {
            sender.welcome(false).await?;
            sender.take_back().await
        };
        let hint =
            "--force serves it here without asking; never do that while its guest may use it there";
        match timeout(core, ANSWER_NS, asked).await {
            Ok(Ok(true)) => {
                self.serve_again(core, name, &target, to).await;
                self.abandon(core, name, &sender).await;
                Ok(())
            }
            Ok(Ok(false)) => {
                self.keep_transfer(name, Some(Transfer::Sent { id, to: to.clone() })).await?;
                Err(usage(format!("disk {name}: its guest has begun at {to}")))
            }
            Ok(Err(why)) => {
                Err(system(format!("{to} does not give disk {name} back: {why}")).hint(hint))
            }
            Err(_) => Err(system(format!("{to} does not answer")).hint(hint)),
        }
    }

    /// Lets the other node forget a disk that it does not get, if it answers. Ends the connection.
    async fn abandon(&self, core: &Core, name: &str, sender: &Sender) {
        if !matches!(timeout(core, AGAIN_NS, sender.abandon()).await, Ok(Ok(()))) {
            tracing::warn!(disk = name, "the other node still waits for it");
        }
        // It would say hello again.
        sender.end();
    }

    /// The end of a move that has not moved the disk: the other node forgets it, if it answers.
    pub(super) async fn give_up(&self, core: &Core, name: &str, sending: &Sending) {
        self.abandon(core, name, &sending.sender).await;
        let mut told = false;
        while let Err(error) = self.keep_transfer(name, None).await {
            if !std::mem::replace(&mut told, true) {
                tracing::error!(disk = name, "the end of its move cannot be stored: {error}");
            }
            core.sleep_ns(AGAIN_NS).await;
            if self.ended.get() {
                // The next process continues it.
                return;
            }
        }
    }
}

/// Tells operators if the other node takes long to answer: a guest may wait for it.
async fn told_if_slow<T>(core: &Core, disk: &str, to: &Peer, done: impl Future<Output = T>) -> T {
    let mut done = pin!(done);
    match timeout(core, SLOW_NS, done.as_mut()).await {
        Ok(done) => done,
        Err(_) => {
            let seconds = SLOW_NS / 1_000_000_000;
            tracing::warn!(disk, %to, "the other node has not got all, or has not answered, for {seconds} s, and a guest may wait for that");
            done.await
        }
    }
}
