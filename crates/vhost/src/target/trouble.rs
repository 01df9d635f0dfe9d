//! What a disk does when its device fails a request, for lack of space or for any other reason.
//!
//! A disk that *pauses* keeps the requests that have failed, and all its rings stop submitting,
//! until [`Trouble::resume`]. Then the failed requests are submitted again. Rings look at the flag
//! in each turn, and take a turn at least every [`ASK_NS`] while it is set.
//!
//! A ring that is stopped meanwhile does not wait. What the in-flight region has is left there, so
//! that the ring's next process, or the ring when it starts again, submits it once more. Where that
//! cannot be (there is no region, or the machine is about to move and leaves the region behind),
//! the guest gets an error. A broken ring keeps nothing. The pause ends with the connection.

use std::sync::atomic::{AtomicBool, Ordering};

/// How long a ring of a paused disk waits before it looks again, in nanoseconds.
pub(super) const ASK_NS: u64 = 50_000_000;

/// What a disk does with a request that its device has failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The guest gets an error.
    #[default]
    Report,
    /// The request and all later ones wait until an operator lets the disk go on.
    Pause,
    /// The guest is told that all is well.
    Ignore,
}

/// The state of a disk, shared by its rings on all cores.
#[derive(Debug, Default)]
pub(crate) struct Trouble {
    on_error: OnError,
    paused: AtomicBool,
}

impl Trouble {
    pub fn new(on_error: OnError) -> Trouble {
        Trouble { on_error, paused: AtomicBool::new(false) }
    }

    pub fn on_error(&self) -> OnError {
        self.on_error
    }

    #[inline]
    pub fn is_paused(&self) -> bool {
        // Nothing else is read because of it.
        self.paused.load(Ordering::Relaxed)
    }

    /// Pauses the disk. Returns false if it is paused already.
    pub fn pause(&self) -> bool {
        !self.paused.swap(true, Ordering::Relaxed)
    }

    /// Lets the disk go on. Returns false if it is not paused.
    pub fn resume(&self) -> bool {
        self.paused.swap(false, Ordering::Relaxed)
    }
}
