//! The part of a core that other threads may touch: inbox, sleep flag and wake-up descriptor.
//!
//! A foreign thread posts a [`Remote`] and, if the core sleeps, writes its eventfd once. Cores
//! of one runtime talk through their rings (`mesh`) instead and use only the wake-up from here.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Weak};

use super::{MetaOut, Token};
use crate::inbox::{self, SendError, Sender};
use crate::sleep::SleepFlag;

/// Bits of a core's number, of which a waker has room for this many.
pub(crate) const UID_BITS: u32 = 20;

/// A task's slot and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// A message for a core.
pub enum Remote {
    /// Make a task ready.
    Wake(TaskId),
    /// A name operation has its answer.
    Meta(Token, io::Result<MetaOut>),
    /// The main task of a core of this runtime has ended.
    Ended,
}

/// Capacity of a core's inbox. Each message belongs to an operation or a task of that core, and
/// both are bounded below this.
const INBOX: usize = 1 << 21;

/// The part of a core that other threads hold.
pub struct CoreAddress {
    inbox: Sender<Remote>,
    sleep: SleepFlag,
    event: OwnedFd,
}

impl CoreAddress {
    /// # Errors
    /// When the process has no descriptor left.
    pub(crate) fn new() -> io::Result<(Arc<CoreAddress>, Inbox)> {
        // SAFETY: eventfd takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above returned a new descriptor that nobody else owns.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        let (inbox, owner) = inbox::inbox(INBOX);
        Ok((Arc::new(CoreAddress { inbox, sleep: SleepFlag::new(), event }), owner))
    }

    /// Puts a message into the core's inbox and wakes the core if it sleeps.
    pub fn post(&self, message: Remote) {
        match self.inbox.send(message) {
            // The core checks its inbox in every turn and before it sleeps.
            Ok(()) => self.wake_if_asleep(),
            // The core has ended; the message is not needed.
            Err(SendError::Closed(_)) => {}
            // Impossible: see INBOX. Losing a wake-up would hang a task, so panic.
            Err(SendError::Full(_)) => panic!("a core's inbox is full: {INBOX} messages"),
        }
    }

    /// Wakes the core if it sleeps. Call it after publishing the message.
    pub fn wake_if_asleep(&self) {
        if self.sleep.must_wake() {
            let one = 1u64.to_ne_bytes();
            // SAFETY: writes 8 bytes from a live array to a descriptor that `self` owns.
            // The only failure is a counter at its limit, and then the core is awake anyway.
            unsafe { libc::write(self.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// The descriptor that becomes readable on a wake-up.
    pub fn event_fd(&self) -> i32 {
        self.event.as_raw_fd()
    }

    /// Resets the wake-up after it was seen.
    pub fn clear_event(&self) {
        let mut count = [0u8; 8];
        // SAFETY: reads 8 bytes into a live array from a descriptor that `self` owns.
        unsafe { libc::read(self.event.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    pub(crate) fn sleep(&self) -> &SleepFlag {
        &self.sleep
    }
}

/// When dropped, tells all cores of a runtime that one of them has ended its main task, also by a
/// panic. A core serves the others until all have ended: they may be waiting for its answer.
pub(crate) struct EndNotice(pub Vec<Arc<CoreAddress>>);

impl Drop for EndNotice {
    fn drop(&mut self) {
        for shared in &self.0 {
            shared.post(Remote::Ended);
        }
    }
}

/// The core's own end of its inbox.
pub(crate) type Inbox = inbox::Inbox<Remote>;

/// All live cores of the process by their number, so that a waker, which is only a number, finds
/// its core from any thread. Not on the fast path: a waker used on its own core does not need it.
#[expect(clippy::disallowed_types, reason = "start, stop and foreign wake-ups only")]
static REGISTRY: std::sync::Mutex<BTreeMap<u32, Weak<CoreAddress>>> =
    std::sync::Mutex::new(BTreeMap::new());

static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);

fn registry<R>(f: impl FnOnce(&mut BTreeMap<u32, Weak<CoreAddress>>) -> R) -> R {
    f(&mut REGISTRY.lock().unwrap_or_else(|e| e.into_inner()))
}

/// Gives a core a number that none of the last million cores of this process had.
pub(crate) fn register(shared: &Arc<CoreAddress>) -> u32 {
    let uid = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) & ((1 << UID_BITS) - 1);
    registry(|cores| {
        cores.retain(|_, core| core.strong_count() > 0);
        cores.insert(uid, Arc::downgrade(shared));
    });
    uid
}

/// The live core with that number.
pub(crate) fn find(uid: u32) -> Option<Arc<CoreAddress>> {
    registry(|cores| cores.get(&uid).and_then(Weak::upgrade))
}
