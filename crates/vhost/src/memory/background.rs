//! A thread that releases the memory of front ends.
//!
//! The process that closes or unmaps a memory file last frees its pages. This takes the kernel 200
//! ms and more for each GiB, and after a virtual machine has ended that process is this one. So
//! this thread drops mappings of guest memory and descriptors that a front end has sent, in the
//! order in which it receives them. While a front end's message is handled, duplicates of its
//! descriptors are kept, so that no descriptor closed meanwhile is the last one.
//!
//! Dropping never blocks on another process: see [`reactor::admit`].

#![expect(clippy::disallowed_types, reason = "the thread at the other end may wait")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

#[expect(
    clippy::disallowed_types,
    reason = "the thread at the other end has nothing else to do"
)]
use std::sync::mpsc::{Receiver, SendError, Sender, channel};

/// Most waiting objects before front ends that send more have to wait.
const WAITING_MAX: usize = 1024;

type Thing = Box<dyn Send>;

static THREAD: OnceLock<Option<Sender<Thing>>> = OnceLock::new();
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Drops an object on the thread, without waiting: what a front end has sent, or its memory.
pub fn drop_in_background(what: impl Send + 'static) {
    let Some(thread) = THREAD.get_or_init(start) else { return drop(what) };
    WAITING.fetch_add(1, Ordering::Relaxed);
    // The thread never ends, so this cannot happen.
    if let Err(SendError(what)) = thread.send(Box::new(what)) {
        drop(what);
    }
}

/// Whether too many objects are waiting: then front ends that send more have to wait.
pub fn is_full() -> bool {
    WAITING.load(Ordering::Relaxed) > WAITING_MAX
}

/// Returns `None` if the system refuses a thread: then objects are dropped by their owner.
#[expect(clippy::disallowed_methods, reason = "what it does may take seconds")]
fn start() -> Option<Sender<Thing>> {
    let (to, from): (_, Receiver<Thing>) = channel();
    let body = move || {
        for what in from {
            drop(what);
            WAITING.fetch_sub(1, Ordering::Relaxed);
        }
    };
    std::thread::Builder::new().name("millrace-unmap".to_owned()).spawn(body).ok().map(|_| to)
}
