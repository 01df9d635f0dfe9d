//! The lock of an image that is locked only while a virtual machine uses it (`lock=ring`), so that
//! two nodes may have it open and a machine may move from one to the other.
//!
//! 1. The first ring that starts wants the lock. Until it is there, rings run but take nothing from
//!    the guest.
//! 2. When all rings have been stopped, or the connection has ended and nothing is in flight, the
//!    lock is released, before the front end is answered.
//!
//! One task locks and unlocks, so that the two never overtake each other. It tries again while
//! somebody else has the lock: nothing announces that it is free.
//!
//! When it has the lock, it looks what has become of the image meanwhile:
//!
//! 1. The size may be another one. The guest is told.
//! 2. The machine may have used the image before, and lost the lock when its node was killed. Then
//!    requests of it wait in the in-flight region, and its guest knows what it has read. If another
//!    machine has used the image since, going on would destroy its data: the disk pauses, until an
//!    operator lets it go on. To tell, a machine that gets the lock for the first time gives a new
//!    name to its in-flight region, which its front end keeps when this process dies, and leaves
//!    the name with the image, where the file system can keep it.
//!
//! The lock belongs to the open file, which a successor gets. So a disk that is handed over is not
//! unlocked here, and locking it there once more changes nothing. The lock of a process that was
//! killed ends with its last operation.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use bdev::{Bdev, ErrorKind};
use reactor::{Class, Core, timeout};

use super::Target;
use crate::ring::inflight::InflightRegion;
use crate::target::Events;
use crate::target::observer::{self, DiskEvent};
use crate::target::trouble::Trouble;

/// The pause after the first attempt to lock the image, which then doubles, and the longest.
const AGAIN_NS: u64 = 1_000_000;
const AGAIN_MAX_NS: u64 = 100_000_000;
/// Operators hear of a lock that has not come for so long.
const TELL_NS: u64 = 1_000_000_000;

/// The state of the lock.
#[derive(Default)]
pub(super) struct ImageLock {
    wanted: Cell<bool>,
    held: Cell<bool>,
    /// The task runs.
    busy: Cell<bool>,
    /// Nothing is locked or unlocked any more.
    over: Cell<bool>,
    /// The in-flight region of the machine that wants the lock.
    region: RefCell<Option<InflightRegion>>,
}

impl ImageLock {
    pub fn is_held(&self) -> bool {
        self.held.get()
    }

    /// Whether rings wait for the lock.
    pub fn is_awaited(&self) -> bool {
        self.wanted.get() && !self.held.get() && !self.over.get()
    }

    /// Notes the in-flight region of the machine that wants the lock.
    pub fn set_region(&self, region: Option<InflightRegion>) {
        self.region.replace(region);
    }

    /// Leaves the lock as it is, for the process or the end that comes.
    pub fn leave(&self) {
        self.region.take();
        self.over.set(true);
    }
}

impl Target {
    /// Wants the image's lock for a ring, if it needs one. Returns whether the ring has to wait.
    pub(super) fn want_lock(&self) -> bool {
        if !self.device().locks_for_use() {
            return false;
        }
        self.lock.over.set(false);
        self.lock.wanted.set(true);
        self.move_lock();
        !self.lock.is_held()
    }

    /// Releases the lock: no ring runs, and nothing is in flight. Suspends until it is released,
    /// but not after the target is told to stop.
    pub(super) async fn release_lock(&self) {
        self.lock.wanted.set(false);
        self.lock.over.set(false);
        self.lock.region.take();
        if self.lock.is_held() || self.lock.busy.get() {
            self.move_lock();
            let free = || !self.lock.is_held() && !self.lock.busy.get();
            self.unless_stopped(self.events.changed.wait_until(free)).await;
        }
    }

    /// Lets the machine be the last user of an image that another one has used: an operator wants
    /// it to go on.
    pub(super) fn claim_lost(&self) {
        if !self.trouble.is_lost() || !self.lock.is_held() {
            return;
        }
        let (core, device, disk) = (self.core.clone(), self.device(), self.name.clone());
        let name = self.lock.region.borrow().as_ref().and_then(InflightRegion::name);
        let Some(name) = name else { return };
        self.core.spawn(Class::Control, async move {
            if let Err(error) = device.claim(&core, text_of(name)).await {
                tracing::warn!(disk = &*disk, "{error}");
            }
        });
    }

    /// Locks or unlocks the image, as is wanted.
    fn move_lock(&self) {
        self.events.changed.notify_all();
        let (lock, events) = (self.lock.clone(), self.events.clone());
        if lock.busy.replace(true) {
            return;
        }
        let (core, device, disk) = (self.core.clone(), self.device(), self.name.clone());
        let trouble = self.trouble.clone();
        core.clone().spawn(Class::Control, async move {
            let (mut pause_ns, began_ns, mut said) = (AGAIN_NS, core.now_ns(), false);
            while lock.wanted.get() != lock.is_held() && !lock.over.get() {
                if lock.is_held() {
                    // A ring that starts meanwhile has to wait.
                    lock.held.set(false);
                    device.unlock(&core).await;
                    events.changed.notify_all();
                    continue;
                }
                let Err(error) = device.lock(&core).await else {
                    if said {
                        tracing::info!(disk = &*disk, "the image is locked: its guest goes on");
                    }
                    begin_use(&core, &device, &disk, &lock, &trouble, &events).await;
                    lock.held.set(true);
                    events.changed.notify_all();
                    continue;
                };
                let is_long =
                    core.now_ns() >= began_ns + TELL_NS || error.kind() != ErrorKind::Busy;
                if is_long && !std::mem::replace(&mut said, true) {
                    let why = error.to_string();
                    tracing::warn!(disk = &*disk, "its guest waits for the image's lock: {why}");
                    observer::tell(&core, core.id(), &disk, DiskEvent::LockAwaited { why });
                }
                let unwanted = || !lock.wanted.get() || lock.over.get();
                let _ = timeout(&core, pause_ns, events.changed.wait_until(unwanted)).await;
                pause_ns = (pause_ns * 2).min(AGAIN_MAX_NS);
            }
            lock.busy.set(false);
            events.changed.notify_all();
        });
    }
}

/// Looks what has become of an image while it was not locked, before its machine uses it.
async fn begin_use(
    core: &Core,
    device: &Bdev,
    disk: &Arc<str>,
    lock: &ImageLock,
    trouble: &Trouble,
    events: &Rc<Events>,
) {
    match device.measure(core).await {
        Ok(true) => events.resized.set(true),
        Ok(false) => {}
        Err(error) => tracing::warn!(disk = &**disk, "its size is not known: {error}"),
    }
    // Without names nothing can tell.
    let Ok(last) = device.owner(core).await else { return };
    let region = lock.region.borrow().clone();
    let known = region.as_ref().and_then(InflightRegion::name);
    if known.is_some_and(|name| last == text_of(name).as_bytes()) {
        return;
    }
    if known.is_some() && !last.is_empty() {
        if trouble.lose() {
            tracing::error!(
                disk = &**disk,
                "another machine has used the image since this one did: the disk has paused, its \
                 requests wait for `disk resume`"
            );
            observer::tell(core, core.id(), disk, DiskEvent::Lost);
        }
        return;
    }
    let name = known.unwrap_or_else(|| core.random_u64());
    match device.claim(core, text_of(name)).await {
        Ok(()) => region.iter().for_each(|region| region.set_name(name)),
        Err(error) => tracing::warn!(disk = &**disk, "{error}"),
    }
}

/// A machine's name, as the image has it.
fn text_of(name: u64) -> String {
    format!("{name:016x}")
}
