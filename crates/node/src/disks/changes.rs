//! Changes of the disks while the node runs: of each disk one at a time, whatever happens to
//! others.

use std::rc::Rc;

use reactor::{Class, Core, timeout};

use super::{Absent, DISKS_MAX, Disk, Disks, STOP_NS, Serving, ends};
use crate::disks::events::What;
use crate::disks::limits::{AllLimits, LimitChange};
use crate::disks::spec::{self, DiskSpec};
use crate::disks::transfers::Transfer;
use crate::error::{Error, Kind};
use crate::size::Size;

/// How often a detached disk is polled whose requests wait for the predecessor, in nanoseconds.
const HOLDS_NS: u64 = 1_000_000;

/// A disk that is being attached, as long as this lives: its name and its socket are taken.
pub(super) struct Attaching<'a> {
    disks: &'a Disks,
    name: &'a str,
}

impl<'a> Attaching<'a> {
    pub(super) fn new(disks: &'a Disks, spec: &'a DiskSpec) -> Attaching<'a> {
        disks.attaching.borrow_mut().push(spec.clone());
        Attaching { disks, name: &spec.name }
    }
}

impl Drop for Attaching<'_> {
    fn drop(&mut self) {
        self.disks.attaching.borrow_mut().retain(|spec| spec.name != self.name);
    }
}

/// The outcome of a detach.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Detached {
    /// It comes back when the node is started in the same way.
    pub comes_back: bool,
    /// Operations are still in flight, so it has not wholly gone.
    pub under_way: bool,
}

/// What a change is of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    Disk(String),
    /// The limits of all disks and groups. Who changes a disk's takes the disk first.
    Limits,
}

/// The right to make a change.
pub(super) struct Change<'a> {
    disks: &'a Disks,
    subject: Subject,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.disks.changing.borrow_mut().remove(&self.subject);
        self.disks.changed.notify_all();
    }
}

impl Disks {
    /// Waits for the change of a disk before this one.
    pub(super) async fn change(&self, name: &str) -> Result<Change<'_>, Error> {
        self.change_of(Subject::Disk(name.to_owned())).await
    }

    pub(super) async fn change_of(&self, subject: Subject) -> Result<Change<'_>, Error> {
        let is_free = || !self.handing_over.get() && self.is_free(&subject);
        self.changed.wait_until(is_free).await;
        if self.ended.get() || self.left.get() {
            return Err(ends());
        }
        Ok(self.begin_change(subject))
    }

    /// Waits for the change of limits before this one. It may be made while disks are handed over
    /// and while the node ends.
    pub(super) async fn change_of_limits(&self) -> Change<'_> {
        self.changed.wait_until(|| self.is_free(&Subject::Limits)).await;
        self.begin_change(Subject::Limits)
    }

    fn is_free(&self, subject: &Subject) -> bool {
        !self.changing.borrow().contains(subject)
    }

    fn begin_change(&self, subject: Subject) -> Change<'_> {
        self.changing.borrow_mut().insert(subject.clone());
        Change { disks: self, subject }
    }

    /// Ends a detached disk. A device that takes longer than [`STOP_NS`] is abandoned; the disk is
    /// removed when nothing is in flight there any more.
    pub(super) fn end(self: &Rc<Self>, core: &Core, name: &str, serving: Serving) {
        let Serving { target, mut serving } = serving;
        self.with(name, |disk| disk.serving = Err(Absent::Leaves(Some(target.clone()))));
        target.stop();
        self.ending.set(self.ending.get() + 1);
        let (disks, again, name) = (self.clone(), core.clone(), name.to_owned());
        core.spawn(Class::Control, async move {
            if timeout(&again, STOP_NS, &mut serving).await.is_err() {
                tracing::error!(
                    disk = %name,
                    "it was detached, but its device is not done within {} s: it is abandoned, \
                     and its image stays locked until the device is done",
                    STOP_NS / 1_000_000_000
                );
                target.stop_now();
                serving.await;
            }
            target.settled().await;
            // Polled, because a target does not notify the release of its requests.
            while target.holds() {
                again.sleep_ns(HOLDS_NS).await;
            }
            drop(target);
            disks.gone(&name);
            disks.ending.set(disks.ending.get() - 1);
            disks.changed.notify_all();
            tracing::info!(disk = %name, "nothing is in flight any more for a detached disk");
        });
    }

    /// Adds a disk, and stores it if there is a state directory. Returns whether it is stored.
    /// Suspends.
    ///
    /// # Errors
    /// When its name or socket is taken, or it cannot be served or stored.
    pub async fn attach(&self, core: &Core, spec: DiskSpec, incoming: bool) -> Result<bool, Error> {
        let _change = self.change(&spec.name).await?;
        let usage = |what| Error::new(Kind::Usage, what);
        let resources = self.resources()?;
        if !resources.may_attach() {
            return Err(usage(
                "this node was not started to serve disks, and is not confined".into(),
            )
            .hint(
                "start it with --state DIR or --admin PATH, which confine its guests to a \
                     sandbox; or with --sandbox off to go without one",
            ));
        }
        self.check_free(&spec)?;
        let mut specs: Vec<_> = self.all.borrow().iter().map(|disk| disk.spec.clone()).collect();
        specs.extend(self.attaching.borrow().iter().cloned());
        if specs.len() == DISKS_MAX {
            return Err(usage(format!("a node has at most {DISKS_MAX} disks")));
        }
        specs.push(spec.clone());
        spec::check_all(&specs).map_err(usage)?;
        if incoming && !resources.remembers() {
            return Err(usage(
                "a disk that comes from another node needs a state directory".into(),
            )
            .hint("start the node with --state DIR"));
        }
        if incoming && bdev::locks_for_use(&spec.uri) {
            return Err(usage("a disk that comes from another node is locked all the time".into())
                .hint("attach it with lock=on"));
        }
        let _attaching = Attaching::new(self, &spec);
        // Before it is served, and also if it was left by an attach that has failed.
        let transfer = incoming.then_some(Transfer::Incoming { id: None, limited: false });
        self.keep_transfer(&spec.name, transfer).await?;
        let serving = match self.serve(core, &spec).await {
            Ok(serving) => serving,
            Err(error) => {
                if incoming {
                    // An attach that succeeds removes it.
                    let _ = self.keep_transfer(&spec.name, None).await;
                }
                resources.give_up(&spec.name).await;
                return Err(error);
            }
        };
        let kept = match self.ended.get() {
            true => Err(ends()),
            false => resources.keep(&spec).await,
        };
        if let Err(error) = kept {
            serving.stop().await;
            resources.close(&spec).await;
            return Err(error);
        }
        let (disk, uri) = (spec.name.clone(), spec.uri.clone());
        self.all.borrow_mut().push(Disk {
            spec: spec.clone(),
            attached: true,
            serving: Ok(serving),
        });
        self.report(core, What::Attached { disk, uri });
        Ok(resources.remembers())
    }

    /// Refuses a disk with the name or the socket of a detached one that has not gone.
    pub(super) fn check_free(&self, spec: &DiskSpec) -> Result<(), Error> {
        let all = self.all.borrow();
        let leaves = |disk: &&Disk| matches!(disk.serving, Err(Absent::Leaves(_)));
        let same = |disk: &&Disk| disk.spec.name == spec.name || disk.spec.socket == spec.socket;
        match all.iter().filter(leaves).find(same) {
            None => Ok(()),
            Some(Disk { spec: DiskSpec { name, .. }, serving, .. }) => {
                let why = serving.as_ref().err().map(Absent::to_string).unwrap_or_default();
                Err(Error::new(Kind::Usage, format!("disk {name} has not gone: {why}"))
                    .hint("`millrace disk list` shows it until then"))
            }
        }
    }

    /// Removes a disk and forgets it. Suspends until nothing uses its device any more, but at most
    /// [`STOP_NS`]: then operations in flight are abandoned. Other changes may be made meanwhile.
    ///
    /// # Errors
    /// When there is no disk of that name, a virtual machine or an NBD client is connected and
    /// `force` is not given, or the state directory cannot be written.
    pub async fn detach(
        self: &Rc<Self>,
        core: &Core,
        name: &str,
        force: bool,
    ) -> Result<Detached, Error> {
        let change = self.change(name).await?;
        let at = self.find(name)?;
        self.unless_moving(name)?;
        let (spec, attached) = {
            let disk = &self.all.borrow()[at];
            let refused = match &disk.serving {
                Ok(serving) if serving.target.is_connected() && !force => {
                    Some(format!("a virtual machine is connected to disk {name}"))
                }
                Err(Absent::StandsStill(_)) if !force => Some(format!(
                    "disk {name} stands still; a virtual machine may be connected to it"
                )),
                Err(Absent::Follows) if !force => Some(format!(
                    "disk {name} follows from the previous node, once the operations at its device are \
                     done; a virtual machine may be connected to it"
                )),
                Err(why @ Absent::Leaves(_)) => {
                    return Err(Error::new(Kind::Usage, format!("disk {name}: {why}")));
                }
                _ => None,
            };
            if let Some(Transfer::Given { to, .. }) = self.transfer(name)
                && !force
            {
                let what = format!("disk {name} was given to {to}, which has not confirmed");
                return Err(Error::new(Kind::Usage, what).hint(
                    "take it back: millrace disk move NAME --abort; --force takes the disk away: \
                     then nobody tells that node that the disk is its own",
                ));
            }
            if let Some(refused) = refused {
                return Err(Error::new(Kind::Usage, refused).hint(
                    "end it, or remove the disk from it; --force takes the disk away: the guest's \
                     requests then wait until a disk is attached at the same socket again",
                ));
            }
            if self.nbd_clients(name) > 0 && !force {
                let what = format!("an NBD client is connected to disk {name}");
                return Err(Error::new(Kind::Usage, what).hint(
                    "disconnect it; --force closes its connection: requests then fail with \
                     ESHUTDOWN",
                ));
            }
            (disk.spec.clone(), disk.attached)
        };
        let resources = self.resources()?;
        // From now on no source changes how far it is.
        let transfer = self.transfers.borrow_mut().remove(name);
        if let Err(error) = resources.forget(&spec).await {
            if let Some(transfer) = transfer {
                self.transfers.borrow_mut().insert(name.to_owned(), transfer.clone());
                self.go_on_with(core, name, transfer);
            }
            return Err(error);
        }
        self.limits.borrow_mut().forget(name);
        // The next disk of this name has not moved.
        self.moves.borrow_mut().remove(name);
        self.forget_transfer(core, name).await;
        // A disk that follows may have come meanwhile.
        let was =
            self.with(name, |disk| std::mem::replace(&mut disk.serving, Err(Absent::Leaves(None))));
        if !matches!(was, Some(Err(Absent::Failed(_)))) {
            resources.close(&spec).await;
        }
        if let Some(server) = self.nbd()
            && !server.close(name, STOP_NS).await
        {
            tracing::error!(disk = %name, "its device is not done with requests of NBD clients: they are abandoned");
        }
        match was {
            Some(Ok(serving)) => self.end(core, name, serving),
            // It is removed when it has come, or cannot come any more.
            Some(Err(Absent::Follows | Absent::Lost)) => {}
            _ => self.gone(name),
        }
        drop(change);
        let leaves = |disk: &mut Disk| matches!(disk.serving, Err(Absent::Leaves(_)));
        let gone = || self.with(name, leaves) != Some(true) || self.ended.get();
        let _ = timeout(core, STOP_NS + HOLDS_NS, self.changed.wait_until(gone)).await;
        tracing::info!(disk = %name, "detached a disk");
        self.report(core, What::Detached { disk: name.to_owned() });
        let under_way = self.with(name, leaves) == Some(true);
        Ok(Detached { comes_back: !attached, under_way })
    }

    /// Changes the limits of a disk or of a group, and stores them. Returns all limits. Suspends.
    ///
    /// # Errors
    /// When there is no disk of that name, or the change cannot be stored.
    pub async fn change_limits(
        &self,
        core: &Core,
        change: &LimitChange,
    ) -> Result<AllLimits, Error> {
        let _of_disk = match &change.name {
            Some(name) => Some(self.change(name).await?),
            None => None,
        };
        let _change = self.change_of(Subject::Limits).await?;
        // Disks that follow bring their limits along, and those of their groups. One that is lost
        // finds its own when it is opened.
        match &change.name {
            None => self.all_followed().map_err(|why| Error::new(Kind::System, why))?,
            Some(name) => match &self.all.borrow()[self.find(name)?].serving {
                Err(why @ Absent::Leaves(_)) => {
                    return Err(Error::new(Kind::Usage, format!("disk {name}: {why}")));
                }
                Err(why @ Absent::Follows) => {
                    return Err(Error::new(Kind::System, format!("disk {name}: {why}")));
                }
                _ => {}
            },
        }
        self.limits().change(change).map_err(|what| Error::new(Kind::Usage, what))?;
        self.resources()?.change_limits(change).await?;
        self.has_limits(core, change);
        if let Some(name) = &change.name {
            let mut transfers = self.transfers.borrow_mut();
            transfers.get_mut(name).into_iter().for_each(Transfer::has_own_limits);
        }
        Ok(self.limits())
    }

    /// Makes a stored change of limits.
    pub(super) fn has_limits(&self, core: &Core, change: &LimitChange) {
        // It was checked, and others of limits wait.
        let _ = self.limits.borrow_mut().change(change);
        let (disk, group) = (change.name.clone(), change.group.clone());
        // A disk's group is one of its limits.
        let group = group.filter(|_| disk.is_none());
        self.report(core, What::Limited { disk, group });
        match (&change.name, &change.group) {
            (Some(name), _) => {
                // A disk that could not be opened gets its limits when it can.
                if let Ok(target) = self.target(name) {
                    self.apply_limits(core, name, &target);
                }
                let limits = self.limits.borrow().of_disk(name);
                tracing::info!(disk = %name, ?limits, "changed its limits");
            }
            (None, Some(group)) => {
                let limits = self.limits.borrow().of_group(group);
                vhost::set_group_limits(core, group, limits.rates());
                tracing::info!(%group, ?limits, "changed the limits of a group");
            }
            (None, None) => {}
        }
    }

    /// Lets a disk that has paused or stands still go on. Returns false if it does neither.
    /// Suspends.
    ///
    /// # Errors
    /// When there is no disk of that name, it is not served, or it cannot be opened.
    pub async fn go_on(&self, core: &Core, name: &str) -> Result<bool, Error> {
        let goes_on = self.goes_on(core, name).await? || self.target(name)?.go_on();
        if goes_on {
            tracing::info!(disk = %name, "the disk goes on");
            self.report(core, What::Resumed { disk: name.to_owned() });
        }
        Ok(goes_on)
    }

    /// Opens a disk that stands still. Returns false if it does not.
    async fn goes_on(&self, core: &Core, name: &str) -> Result<bool, Error> {
        let stands_still = || {
            let at = self.find(name).ok()?;
            let all = self.all.borrow();
            matches!(all[at].serving, Err(Absent::StandsStill(_))).then(|| all[at].spec.clone())
        };
        if stands_still().is_none() {
            return Ok(false);
        }
        let _change = self.change(name).await?;
        let Some(spec) = stands_still() else { return Ok(false) };
        let serving = self.serve(core, &spec).await?;
        self.with(name, |disk| disk.serving = Ok(serving));
        Ok(true)
    }

    /// Refuses to move a disk from or to an image that is locked only while a guest uses it: while
    /// it is copied another node could change it.
    pub fn refuse_ring_lock(&self, name: &str, uri: &str) -> Result<(), Error> {
        let from = self.target(name)?.device().locks_for_use();
        if !from && !bdev::locks_for_use(uri) {
            return Ok(());
        }
        let what = format!("disk {name}: a disk is not moved from or to an image with lock=ring");
        Err(Error::new(Kind::Usage, what).hint("attach it with lock=on"))
    }

    /// Changes the size of a disk, in bytes, and tells its guest. Returns the old size. Suspends.
    ///
    /// # Errors
    /// When there is no disk of that name, the new size is smaller and `shrink` is not given, or
    /// the device cannot have it.
    pub async fn resize(
        &self,
        core: &Core,
        name: &str,
        size_bytes: u64,
        shrink: bool,
    ) -> Result<u64, Error> {
        let _change = self.change(name).await?;
        let target = self.target(name)?;
        self.unless_moving(name)?;
        self.unless_elsewhere(name)?;
        if !target.may_change() {
            let what = format!("disk {name}: its image is not locked (lock=ring)");
            let hint = "resize it while its machine runs at this node";
            return Err(Error::new(Kind::Usage, what).hint(hint));
        }
        let old = target.device().size_bytes();
        if size_bytes < old && !shrink {
            let what = format!(
                "disk {name} has {}: its last {} would be lost, with all that the guest keeps there",
                Size(old),
                Size(old - size_bytes)
            );
            return Err(Error::new(Kind::Usage, what).hint(
                "make file system and partitions smaller in the guest first, then add --shrink",
            ));
        }
        let resized = target.resize(size_bytes).await;
        resized.map_err(|error| Error::new(Kind::System, format!("disk {name}: {error}")))?;
        tracing::info!(disk = %name, from = old, to = size_bytes, "resized a disk");
        let disk = name.to_owned();
        self.report(core, What::Resized { disk, old_size_bytes: old, size_bytes });
        Ok(old)
    }
}
