//! Disks that follow from the predecessor, after this node has begun to lead.

use std::rc::Rc;

use bdev::Bdev;
use reactor::{Core, JoinHandle};

use super::resources::Ready;
use super::{Absent, Disk, Disks, Served, Serving};
use crate::disks::spec::DiskSpec;
use crate::error::Error;

/// How often the node tries to open a disk that its predecessor has lost, in nanoseconds.
const AGAIN_NS: u64 = 100_000_000;

/// A disk that the old process has not handed over, or that had operations in flight when the old
/// process ended, so that their end is not known: it has to be opened again.
pub(crate) struct Lost {
    pub spec: DiskSpec,
    /// The device, if its data is in memory.
    pub device: Option<Bdev>,
    /// Counters that continue, as far as they arrived.
    pub statistics: Vec<(String, u64)>,
}

impl Disks {
    /// Installs a disk that the predecessor has handed over. If it is `unsettled`, operations of
    /// the predecessor are in flight: then [`Disks::has_settled`] follows, or it is lost.
    pub async fn has_followed(
        self: &Rc<Self>,
        core: &Core,
        served: Served,
        serving: JoinHandle<()>,
        unsettled: bool,
    ) {
        self.coming.set(self.coming.get() + usize::from(unsettled));
        let Served { spec, target, .. } = served;
        self.withhold(&spec.name, &target);
        self.remember(&spec, &target, None);
        let leaves = |disk: &mut Disk| matches!(disk.serving, Err(Absent::Leaves(_)));
        if self.with(&spec.name, leaves) != Some(true) {
            self.note_limits(core, &spec, &target);
        }
        tracing::info!(disk = %spec.name, "taken over from the previous node after its requests");
        self.arrived(core, &spec, Serving { target, serving }).await;
    }

    /// Records that the predecessor has no operations in flight any more at a disk.
    pub fn has_settled(&self, spec: &DiskSpec) {
        self.coming.set(self.coming.get() - 1);
        tracing::info!(disk = %spec.name, "the previous node has no request of it in flight");
    }

    /// Opens a disk that the predecessor has lost.
    pub async fn open_again(
        self: Rc<Self>,
        core: &Core,
        lost: Lost,
        open: impl AsyncFn(&DiskSpec) -> Result<Ready, Error>,
    ) {
        let Lost { spec, device, mut statistics } = lost;
        // If it was taken over, it has been released.
        let taken = self.with(&spec.name, |disk| match &disk.serving {
            Err(Absent::Leaves(_)) => None,
            _ => std::mem::replace(&mut disk.serving, Err(Absent::Lost)).ok(),
        });
        if let Some(Serving { target, serving }) = taken.flatten() {
            serving.await;
            statistics = target.statistics();
            // Its device is open, and holds the lock.
            drop(target);
        }
        let mut said = String::new();
        let wanted = || self.with(&spec.name, |disk| matches!(disk.serving, Err(Absent::Lost)));
        while !self.ended.get() && wanted() == Some(true) {
            match open(&spec).await {
                Ok(ready) => {
                    let device = device.unwrap_or(ready.device);
                    let serving = self.begin(core, &spec, Ready { device, ..ready });
                    serving.target.take_statistics(&statistics);
                    return self.arrived(core, &spec, serving).await;
                }
                Err(error) => {
                    let why = error.to_string();
                    if why != said {
                        tracing::warn!(disk = %spec.name, "it is not free yet: {why}");
                        said = why;
                    }
                    // Polled: another process, or the kernel, releases the image.
                    core.sleep_ns(AGAIN_NS).await;
                }
            }
        }
        self.coming.set(self.coming.get() - 1);
        // It was detached meanwhile.
        let leaves = self.with(&spec.name, |disk| match &disk.serving {
            Err(Absent::Leaves(Some(target))) => {
                target.release(false);
                false
            }
            Err(Absent::Leaves(None)) => true,
            _ => false,
        });
        if leaves == Some(true) {
            self.gone(&spec.name);
        }
    }

    /// Installs a disk that has come. If it was detached meanwhile, ends it.
    pub(super) async fn arrived(self: &Rc<Self>, core: &Core, spec: &DiskSpec, serving: Serving) {
        self.coming.set(self.coming.get() - 1);
        let leaves = |disk: &mut Disk| matches!(disk.serving, Err(Absent::Leaves(_)));
        if self.with(&spec.name, leaves) == Some(true) {
            self.end(core, &spec.name, serving);
            if let Some(resources) = self.resources.as_ref().filter(|_| !self.left.get()) {
                resources.close(spec).await;
            }
            return;
        }
        self.with(&spec.name, |disk| disk.serving = Ok(serving));
    }

    /// Removes a detached disk from the list.
    pub(super) fn gone(&self, name: &str) {
        let leaves = |disk: &Disk| matches!(disk.serving, Err(Absent::Leaves(_)));
        self.all.borrow_mut().retain(|disk| disk.spec.name != name || !leaves(disk));
        self.changed.notify_all();
    }
}
