//! What happens to disks, for whoever tells operators about it.
//!
//! A process has one observer, on the core of its disks. Rings tell it from their own cores. An
//! event is told at most as often as it is logged (`log_limit`), so that no guest can flood it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use bdev::Kind;
use reactor::{Class, Core, Event};

/// What has happened to a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskEvent {
    /// A front end has connected.
    Connected {
        /// Its process; 0 if it is not known.
        pid: u32,
    },
    /// A front end has disconnected.
    Gone {
        /// Its process; 0 if it is not known.
        pid: u32,
    },
    /// The connection of a front end was closed here.
    Closed {
        /// Its process; 0 if it is not known.
        pid: u32,
        /// The reason.
        why: String,
    },
    /// The guest has broken a ring.
    RingBroken {
        /// The ring's number.
        ring: u16,
        /// The reason.
        why: String,
    },
    /// The device has failed a request.
    DeviceError {
        /// The ring's number.
        ring: u16,
        /// The kind of request.
        kind: Kind,
        /// Where the request begins, in bytes.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// The device has no space left.
        no_space: bool,
    },
    /// The guest waits for the image's lock.
    LockAwaited {
        /// Why it does not come.
        why: String,
    },
    /// The disk has paused, because somebody else has had its image.
    Lost,
    /// The disk has paused, because the device has failed a request.
    Paused {
        /// The device has no space left.
        no_space: bool,
    },
}

/// The function that is told.
type Observe = Rc<dyn Fn(&Core, &str, DiskEvent)>;

/// How many events wait for an observer.
const EARLY_MAX: usize = 256;

#[derive(Default)]
struct Observer {
    observe: RefCell<Option<Observe>>,
    /// What has happened before there was an observer: disks that are taken over begin early.
    early: RefCell<Vec<(String, DiskEvent)>>,
}

/// Notified when a flush of one of a core's disks has failed.
#[derive(Default)]
pub(crate) struct FailedFlushes(pub Event);

/// Tells the core `home` of a disk that a flush has failed.
#[cold]
pub(crate) fn flush_failed(core: &Core, home: usize) {
    let tell = |core: &Core| core.local::<FailedFlushes>().0.notify_all();
    if core.id() == home {
        return tell(core);
    }
    let there = core.clone();
    core.spawn(Class::Control, async move { there.call(home, tell).await });
}

/// Sets the function that is told what happens to the disks of a core, with the core and the disk's
/// name. It is called on that core, and first with what has happened before.
pub fn observe(core: &Core, observer: impl Fn(&Core, &str, DiskEvent) + 'static) {
    let here = core.local::<Observer>();
    for (disk, event) in here.early.take() {
        observer(core, &disk, event);
    }
    here.observe.replace(Some(Rc::new(observer)));
}

/// Tells the observer of the core `home` what has happened to a disk.
#[cold]
pub(crate) fn tell(core: &Core, home: usize, disk: &Arc<str>, event: DiskEvent) {
    if core.id() == home {
        return tell_here(core, disk, event);
    }
    let (there, disk) = (core.clone(), disk.clone());
    core.spawn(Class::Control, async move {
        there.call(home, move |core: &Core| tell_here(core, &disk, event)).await;
    });
}

fn tell_here(core: &Core, disk: &str, event: DiskEvent) {
    let here = core.local::<Observer>();
    let observe = here.observe.borrow().clone();
    let mut early = here.early.borrow_mut();
    match observe {
        Some(observe) => {
            drop(early);
            observe(core, disk, event);
        }
        None if early.len() < EARLY_MAX => early.push((disk.to_owned(), event)),
        None => {}
    }
}
