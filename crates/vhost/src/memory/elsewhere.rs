//! Memory of front ends is given back by a thread of its own.
//!
//! Whoever closes or unmaps a file of memory last frees its pages. That takes the system 200 ms and
//! more for each GiB, and when a virtual machine has ended it is us. So mappings of guest memory,
//! and descriptors that a front end has sent, are dropped by this thread, in the order in which
//! they were given to it. While a front end's message is looked at, duplicates of its descriptors
//! are kept, so that what is dropped then is not the last one either.
//!
//! Nothing that comes here can make the thread wait for somebody: see [`reactor::admit`].

#![expect(clippy::disallowed_types, reason = "the thread at the other end may wait")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

#[expect(
    clippy::disallowed_types,
    reason = "the thread at the other end has nothing else to do"
)]
use std::sync::mpsc::{Receiver, SendError, Sender, channel};

/// Things that wait to be dropped, beyond which front ends that send more have to wait.
const WAITING_MAX: usize = 1024;

type Thing = Box<dyn Send>;

static THREAD: OnceLock<Option<Sender<Thing>>> = OnceLock::new();
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Drops something there. Waits for nothing.
pub(crate) fn drop_elsewhere(what: impl Send + 'static) {
    let Some(thread) = THREAD.get_or_init(start) else { return drop(what) };
    WAITING.fetch_add(1, Ordering::Relaxed);
    // The thread never ends.
    if let Err(SendError(what)) = thread.send(Box::new(what)) {
        drop(what);
    }
}

/// Whether much waits there.
pub(crate) fn is_full() -> bool {
    WAITING.load(Ordering::Relaxed) > WAITING_MAX
}

/// None if the system has no thread for it; then everything is dropped where it is.
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
