//! The commands from a connection to its rings, which may run on other cores.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Poll;

use atomic_waker::AtomicWaker;
use reactor::EventFd;
use reactor::spsc::{Consumer, Producer};

use crate::memory::GuestMemory;
use crate::memory::dirty::DirtyLog;
use crate::ring::request::Disk;

/// Most commands queued for one ring.
const COMMANDS: usize = 256;

/// Requests that a ring does not submit before [`RingHandle::release`], because operations of an
/// earlier process are still in flight: the requests that this process has not finished. They may
/// be executed again, and completed, only when no late read or write of that process can follow.
/// Until then the ring is not quiesced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    /// Whether to hold flushes too: the system reports a write error only once, possibly to a
    /// flush of that process.
    pub flushes: bool,
}

/// A command of the connection to a running ring.
pub(crate) enum Command {
    Enable(bool),
    Memory(Arc<GuestMemory>),
    Log(Option<Arc<DirtyLog>>),
    RingLog(Option<u64>),
    Call(Option<EventFd>),
    Err(Option<EventFd>),
    Kick(Option<EventFd>),
    Disk(Disk),
    Fua(bool),
    /// Dropped after all earlier commands are executed.
    Barrier(#[expect(dead_code, reason = "its drop is the signal")] WaitToken),
    /// Abandon the ring. The token is dropped when nothing of the ring is in flight.
    Abandon(WaitToken),
    /// Stop, to continue with the in-flight region, or without the front end.
    Leave,
    Stop,
}

/// A token of a [`WaitGroup`], which counts it until it is dropped.
pub(crate) struct WaitToken(Arc<WaitGroupState>);

impl Drop for WaitToken {
    fn drop(&mut self) {
        // Release: what the ring did before is visible to the connection that reads a count of 0.
        self.0.count.fetch_sub(1, Ordering::Release);
        self.0.waker.wake();
    }
}

#[derive(Default)]
struct WaitGroupState {
    count: AtomicUsize,
    waker: AtomicWaker,
}

/// Waits for several rings on different cores to drop their tokens.
#[derive(Clone, Default)]
pub(crate) struct WaitGroup(Arc<WaitGroupState>);

impl WaitGroup {
    /// Creates a token, for one ring.
    pub fn token(&self) -> WaitToken {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        WaitToken(self.0.clone())
    }

    /// Whether all tokens are dropped.
    pub fn is_done(&self) -> bool {
        self.0.count.load(Ordering::Acquire) == 0
    }

    /// Waits until all tokens are dropped. Only one task may wait. The token of a ring that has
    /// ended may live as long as its [`RingHandle`].
    pub async fn wait(&self) {
        poll_fn(|cx| {
            self.0.waker.register(cx.waker());
            if self.is_done() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

/// Signals beside the queue of commands, shared by both ends.
#[derive(Default)]
pub(super) struct Signals {
    pub(super) waker: AtomicWaker,
    /// A command found no room.
    pub(super) overflowed: AtomicBool,
    /// The [`Hold`] has ended.
    pub(super) released: AtomicBool,
    /// The image is locked.
    pub(super) locked: AtomicBool,
}

/// The connection's end of a ring's commands.
pub(crate) struct RingHandle {
    commands: Producer<Command>,
    signals: Arc<Signals>,
}

impl RingHandle {
    /// Sends a command to the ring. If the queue is full, the ring is stopped: the front end sends
    /// more than the ring can take.
    pub fn send(&mut self, command: Command) {
        if self.commands.push_published(command).is_err() {
            self.signals.overflowed.store(true, Ordering::Release);
        }
        self.signals.waker.wake();
    }

    /// Has the ring look at the disk's state again.
    pub fn wake(&self) {
        self.signals.waker.wake();
    }

    /// Ends the ring's [`Hold`].
    pub fn release(&self) {
        self.signals.released.store(true, Ordering::Release);
        self.signals.waker.wake();
    }
}

impl RingHandle {
    /// Lets the ring take requests: the image is locked.
    pub fn locked(&self) {
        self.signals.locked.store(true, Ordering::Release);
        self.signals.waker.wake();
    }
}

impl Drop for RingHandle {
    fn drop(&mut self) {
        self.send(Command::Stop);
    }
}

/// The ring's end of its commands.
pub(crate) struct CommandQueue {
    pub(super) commands: Consumer<Command>,
    pub(super) signals: Arc<Signals>,
}

pub(crate) fn command_queue() -> (RingHandle, CommandQueue) {
    let (to, from) = reactor::spsc::ring(COMMANDS);
    let signals = Arc::new(Signals::default());
    (
        RingHandle { commands: to, signals: signals.clone() },
        CommandQueue { commands: from, signals },
    )
}

/// How a ring ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingEnd {
    pub index: u16,
    /// The position at which another process would continue.
    pub base: u32,
    /// The ring does not continue: it is broken, or could not be started.
    pub broken: bool,
    /// The ring was abandoned with a flush, or a write that is flushed, in flight.
    pub flushes: bool,
}

impl RingEnd {
    /// The result of a ring that was never started.
    pub fn at(index: u16, base: u32, broken: bool) -> RingEnd {
        RingEnd { index, base, broken, flushes: false }
    }
}
