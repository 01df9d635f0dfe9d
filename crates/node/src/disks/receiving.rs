//! The destination's side of a move from another node.
//!
//! A disk that is attached as *incoming* is served to its front end at once, but withheld from the
//! guest: rings start and stop, and take nothing. The source connects ([`transfer::Server`]), sends
//! the data, and finally gives the disk: then it is *whole*. When a ring runs, that the guest has
//! *begun* is stored, and only then its first request is taken. Until then the source may take the
//! disk back.

use std::rc::{Rc, Weak};

use bdev::Bdev;
use reactor::{Class, Core, Listener, race, timeout};
use transfer::{
    Belongings, Boxed, Destination, Destinations, Hello, Refusal, Server, Shape, Stage, Welcome,
};
use vhost::{FrontEnd, Target};

use super::Disks;
use crate::disks::events::What;
use crate::disks::limits::{LimitChange, Limits};
use crate::disks::transfers::Transfer;
use crate::error::{Error, Kind};
use crate::mutant::{self, Mutant};

/// How long requests of a source may take when the node ends.
const STOP_NS: u64 = 2_000_000_000;
/// Pause before another attempt to store that a guest has begun.
const AGAIN_NS: u64 = 100_000_000;

/// The disks of a node that wait for their data.
struct Waiting {
    core: Core,
    disks: Weak<Disks>,
}

impl Destinations for Waiting {
    fn may_begin(&self, hello: &Hello) -> Result<(), Refusal> {
        let disks = self.disks.upgrade();
        let disks = disks.ok_or_else(|| Refusal::Later("the node has ended".to_owned()))?;
        disks.may_admit(hello)
    }

    fn begin<'a>(&'a self, hello: &'a Hello) -> Boxed<'a, Result<Rc<dyn Destination>, Refusal>> {
        Box::pin(async move {
            let disks = self.disks.upgrade();
            let disks = disks.ok_or_else(|| Refusal::Later("the node has ended".to_owned()))?;
            let arrival = disks.admit(&self.core, hello).await?;
            Ok(Rc::new(arrival) as Rc<dyn Destination>)
        })
    }
}

/// A disk that a source sends.
struct Arrival {
    core: Core,
    disks: Rc<Disks>,
    target: Rc<Target>,
    name: String,
    id: u64,
    incarnation: u64,
}

impl Arrival {
    fn stage(&self) -> Stage {
        match self.disks.transfer(&self.name) {
            Some(Transfer::Incoming { id: Some(id), .. }) if id == self.id => Stage::Receiving,
            Some(Transfer::Begun { id, .. }) if id == self.id => Stage::Begun,
            _ => Stage::Whole,
        }
    }
}

impl Destination for Arrival {
    fn device(&self) -> Bdev {
        self.target.device()
    }

    fn welcome(&self) -> Welcome {
        let (version, incarnation) = (transfer::VERSION, self.incarnation);
        Welcome { version, incarnation, stage: self.stage() }
    }

    fn own(&self, belongings: Belongings) -> Boxed<'_, Result<(), String>> {
        Box::pin(async move {
            let Arrival { core, disks, target, name, .. } = self;
            let _decides = disks.decide(name).await;
            match disks.transfer(name) {
                Some(Transfer::Whole { id, .. } | Transfer::Begun { id, .. }) if id == self.id => {
                    Ok(())
                }
                Some(Transfer::Incoming { id: Some(id), limited }) if id == self.id => {
                    let runs = target.front_end().is_running();
                    let stored = disks.come(core, name, id, runs, &belongings, limited).await;
                    stored.map_err(|error| error.to_string())?;
                    match runs {
                        true => target.admit(belongings.writes_through),
                        false => disks.watch_arrived(core, name),
                    }
                    Ok(())
                }
                _ => Err(format!("disk {name} does not wait for this move any more")),
            }
        })
    }

    fn give_back(&self) -> Boxed<'_, Result<bool, String>> {
        Box::pin(async move {
            let Arrival { disks, name, .. } = self;
            let _decides = disks.decide(name).await;
            match disks.transfer(name) {
                Some(Transfer::Incoming { id: Some(id), .. }) if id == self.id => Ok(true),
                Some(Transfer::Whole { id, limited, .. }) if id == self.id => {
                    let again = Transfer::Incoming { id: Some(id), limited };
                    let stored = disks.keep_transfer(name, Some(again)).await;
                    stored.map(|()| true).map_err(|error| error.to_string())
                }
                Some(Transfer::Begun { id, .. }) if id == self.id => Ok(false),
                // It waits for another move: nobody uses this one's data.
                Some(Transfer::Incoming { .. }) => Ok(true),
                // It may have begun before it was detached.
                _ => Err(format!("disk {name} was detached there")),
            }
        })
    }

    fn abandon(&self) -> Boxed<'_, Result<(), String>> {
        Box::pin(async move {
            let Arrival { disks, name, .. } = self;
            let _decides = disks.decide(name).await;
            match disks.transfer(name) {
                Some(Transfer::Incoming { id: Some(id), limited }) if id == self.id => {
                    disks.incarnations.borrow_mut().remove(name);
                    let waits = Transfer::Incoming { id: None, limited };
                    let stored = disks.keep_transfer(name, Some(waits)).await;
                    stored.map_err(|error| error.to_string())
                }
                _ => Ok(()),
            }
        })
    }
}

/// The right to decide whose a disk is.
pub(super) struct Decides<'a>(&'a Disks, String);

impl Drop for Decides<'_> {
    fn drop(&mut self) {
        self.0.deciding.borrow_mut().remove(&self.1);
        self.0.changed.notify_all();
    }
}

impl Disks {
    /// Takes disks from other nodes at a listener of this core.
    pub fn receive(self: &Rc<Self>, core: &Core, listener: Listener) {
        let waiting = Waiting { core: core.clone(), disks: Rc::downgrade(self) };
        let identity = self.identity.borrow().clone();
        let server = Server::start(core, listener, identity, Box::new(waiting));
        self.receiver.replace(Some(server));
    }

    /// Ends the connections of sources, which connect again to whoever listens next. Suspends until
    /// nothing of them is in flight.
    ///
    /// # Errors
    /// When a device is not done in time. [`Disks::resume_receiving`] lets the sources come back.
    pub async fn pause_receiving(&self) -> Result<(), String> {
        let receiver = self.receiver.borrow().clone();
        match receiver {
            Some(receiver) if !receiver.pause(STOP_NS).await => {
                Err("a device is not done with the data of a disk that comes".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// Takes disks again.
    pub fn resume_receiving(&self) {
        if let Some(receiver) = self.receiver.borrow().as_ref().filter(|_| !self.ended.get()) {
            receiver.resume();
        }
    }

    /// Takes no more disks. Suspends, for a bounded time.
    pub(super) async fn stop_receiving(&self) {
        if let Err(why) = self.pause_receiving().await {
            tracing::error!("{why}: it is abandoned");
        }
        self.receiver.take();
    }

    /// Waits for those who decide about the same disk.
    async fn decide(&self, name: &str) -> Decides<'_> {
        self.changed.wait_until(|| !self.deciding.borrow().contains(name)).await;
        self.deciding.borrow_mut().insert(name.to_owned());
        Decides(self, name.to_owned())
    }

    /// Whether a disk waits for a source.
    fn may_admit(&self, hello: &Hello) -> Result<(), Refusal> {
        let (name, id) = (&hello.disk, hello.transfer);
        let never = |what: String| Err(Refusal::Never(what));
        match self.transfer(name) {
            // It may take back what never was whole here.
            Some(Transfer::Incoming { id: None, .. }) if self.ended_here.borrow().contains(&id) => {
                match hello.given {
                    true => Ok(()),
                    false => never(format!(
                        "its disk {name} waits for another move: this one was ended there"
                    )),
                }
            }
            Some(Transfer::Incoming { id: None, .. }) if hello.given => never(format!(
                "its disk {name} waits for a move, and knows nothing of this one, which is over"
            )),
            Some(Transfer::Incoming { id: None, .. }) => Ok(()),
            Some(
                Transfer::Incoming { id: Some(known), .. }
                | Transfer::Whole { id: known, .. }
                | Transfer::Begun { id: known, .. },
            ) if known == id => Ok(()),
            Some(Transfer::Incoming { .. }) => never(format!(
                "its disk {name} waits for another move; `millrace disk move {name} --abort` there ends that"
            )),
            _ if self.find(name).is_err() => never(format!("it has no disk {name}")),
            _ => never(format!(
                "its disk {name} does not wait for a move: attach it with --incoming there"
            )),
        }
    }

    /// Admits a source.
    async fn admit(self: &Rc<Self>, core: &Core, hello: &Hello) -> Result<Arrival, Refusal> {
        let (name, id) = (&hello.disk, hello.transfer);
        let never = |what: String| Err(Refusal::Never(what));
        let _decides = self.decide(name).await;
        self.may_admit(hello)?;
        let target = self.target(name).map_err(|error| Refusal::Later(error.to_string()))?;
        if mutant::is(Mutant::BeginsEarly) {
            target.admit(false);
        }
        if let Err(why) = hello.shape.fits(&Shape::of(&target.device().geometry())) {
            return never(format!("its device does not fit: {why}"));
        }
        if let Some(Transfer::Incoming { id: None, limited }) = self.transfer(name)
            && !hello.given
        {
            let bound = Transfer::Incoming { id: Some(id), limited };
            let stored = self.keep_transfer(name, Some(bound)).await;
            stored.map_err(|error| Refusal::Later(error.to_string()))?;
            tracing::info!(disk = %name, "a disk comes from another node");
            self.report(core, What::Coming { disk: name.clone() });
        }
        let known = self.incarnations.borrow().get(name).copied().filter(|known| known.0 == id);
        let (_, incarnation) = known.unwrap_or_else(|| (id, core.random_u64()));
        self.incarnations.borrow_mut().insert(name.clone(), (id, incarnation));
        Ok(Arrival {
            core: core.clone(),
            disks: self.clone(),
            target,
            name: name.clone(),
            id,
            incarnation,
        })
    }

    /// Stores that all of a disk is here, with its limits, and whether its guest begins.
    async fn come(
        &self,
        core: &Core,
        name: &str,
        id: u64,
        runs: bool,
        belongings: &Belongings,
        limited: bool,
    ) -> Result<(), Error> {
        let _change = self.change_of_limits().await;
        let mut brought = self.brought(name, belongings, limited);
        let writes_through = belongings.writes_through;
        let stage = |limited| match runs {
            true => Transfer::Begun { id, writes_through },
            false => Transfer::Whole { id, writes_through, limited },
        };
        let with = stage(limited || !brought.is_empty());
        match self.keep_transfer_with(name, Some(with), &brought).await {
            // A launcher of an earlier version does not store both at once.
            Err(error) if error.to_string().contains("unknown field") && !brought.is_empty() => {
                tracing::warn!(disk = name, "it does not have the limits of its source: {error}");
                brought.clear();
                self.keep_transfer(name, Some(stage(limited))).await?;
            }
            stored => stored?,
        }
        brought.iter().for_each(|change| self.has_limits(core, change));
        tracing::info!(disk = name, "a disk has come from another node");
        self.report(core, What::Came { disk: name.to_owned() });
        if runs {
            self.report(core, What::Begun { disk: name.to_owned() });
        }
        Ok(())
    }

    /// The changes of limits that come along with a disk: its own and its group, unless it has some
    /// here that no earlier attempt has brought; and its group's, unless that has some here.
    fn brought(&self, name: &str, belongings: &Belongings, limited: bool) -> Vec<LimitChange> {
        let Belongings { limits: own, group, .. } = belongings;
        let mut all = self.limits();
        let has_some = all.of_disk(name) != Limits::default();
        let brings_some = *own != transfer::Limits::default() || group.is_some();
        if has_some && !limited || !has_some && !brings_some {
            return Vec::new();
        }
        let change = |of: &transfer::Limits| LimitChange {
            iops: Some(of.iops),
            bytes_per_second: Some(of.bytes_per_second),
            burst_ns: Some(of.burst_ns),
            ..LimitChange::default()
        };
        let joins = group.as_ref().map_or("", |(group, _)| group).to_owned();
        let mut changes =
            vec![LimitChange { name: Some(name.to_owned()), group: Some(joins), ..change(own) }];
        if let Some((group, limits)) = group
            && *limits != transfer::Limits::default()
            && all.of_group(group) == Limits::default()
        {
            changes.push(LimitChange { group: Some(group.clone()), ..change(limits) });
        }
        // The group's are of no use without the disk's own.
        let mut fitting = 0;
        for change in &changes {
            if let Err(why) = all.change(change) {
                tracing::warn!(disk = name, "it does not have all limits of its source: {why}");
                break;
            }
            fitting += 1;
        }
        changes.truncate(fitting);
        changes
    }

    /// Lets the guest of a disk that is whole begin as soon as it wants to.
    pub(super) fn watch_arrived(self: &Rc<Self>, core: &Core, name: &str) {
        let (disks, again, name) = (self.clone(), core.clone(), name.to_owned());
        core.spawn(Class::Control, async move {
            disks.begin_when_wanted(&again, &name).await;
        });
    }

    async fn begin_when_wanted(&self, core: &Core, name: &str) {
        let is_whole = || matches!(self.transfer(name), Some(Transfer::Whole { .. }));
        while is_whole() && !self.ended.get() {
            let Ok(target) = self.target(name) else {
                core.sleep_ns(AGAIN_NS).await;
                continue;
            };
            if let Some(Transfer::Whole { id, writes_through, .. }) = self.transfer(name) {
                self.begin_to_prepare(core, name, Transfer::Begun { id, writes_through });
            }
            let other = self.changed.wait_until(|| self.ended.get() || !is_whole());
            race(other, target.until_front_end(FrontEnd::is_running)).await;
            let _decides = self.decide(name).await;
            let Some(Transfer::Whole { id, writes_through, .. }) = self.transfer(name) else {
                return;
            };
            if !target.front_end().is_running() {
                continue;
            }
            if mutant::is(Mutant::BeginsWithoutStoring) {
                return target.admit(writes_through);
            }
            match self.keep_transfer(name, Some(Transfer::Begun { id, writes_through })).await {
                Ok(()) => {
                    target.admit(writes_through);
                    return self.report(core, What::Begun { disk: name.to_owned() });
                }
                Err(error) => {
                    tracing::error!(disk = name, "its guest waits: {error}");
                    core.sleep_ns(AGAIN_NS).await;
                }
            }
        }
    }

    /// Forgets the source of a disk, which may then be sent anew, by another move. Suspends, for a
    /// bounded time.
    ///
    /// # Errors
    /// When that cannot be stored, or the disk has come meanwhile.
    pub(super) async fn forget_source(
        &self,
        core: &Core,
        name: &str,
        id: u64,
    ) -> Result<(), Error> {
        let receiver = self.receiver.borrow().clone();
        if let Some(receiver) = receiver
            && timeout(core, STOP_NS, receiver.release(name)).await.is_err()
        {
            let what = format!("disk {name}: its device is not done with the data of its source");
            return Err(Error::new(Kind::System, what));
        }
        let _decides = self.decide(name).await;
        let limited = match self.transfer(name) {
            Some(Transfer::Incoming { id: Some(known), limited }) if known == id => limited,
            _ => return Err(Error::new(Kind::Usage, format!("disk {name} has come meanwhile"))),
        };
        self.ended_here.borrow_mut().insert(id);
        self.incarnations.borrow_mut().remove(name);
        self.keep_transfer(name, Some(Transfer::Incoming { id: None, limited })).await
    }

    /// Forgets how far a detached disk is; the state directory has forgotten it. Suspends until no
    /// source writes to it any more, for a bounded time.
    pub(super) async fn forget_transfer(&self, core: &Core, name: &str) {
        let receiver = self.receiver.borrow().clone();
        if let Some(receiver) = receiver
            && timeout(core, STOP_NS, receiver.release(name)).await.is_err()
        {
            tracing::error!(
                disk = name,
                "its device is not done with the data of its source: it is abandoned"
            );
        }
        self.incarnations.borrow_mut().remove(name);
        if self.transfers.borrow_mut().remove(name).is_some()
            && let Ok(resources) = self.resources()
        {
            // A source has changed it meanwhile.
            let _ = resources.keep_transfer(name, None, &[]).await;
        }
        self.changed.notify_all();
    }
}
