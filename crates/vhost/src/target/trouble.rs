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
//!
//! A disk that is *lost* has paused because somebody else has had its image, so that what its guest
//! has begun may destroy what is there now. Nothing is submitted then, not even by a ring that
//! stops.
//!
//! A disk that is *withheld* from its guest takes no request at all: its data is, or may be,
//! elsewhere. Its rings start and stop, but leave everything to the guest.

use std::sync::atomic::{AtomicU8, Ordering};

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

/// The disk has paused.
const PAUSED: u8 = 1;
/// The disk is withheld from its guest.
const WITHHELD: u8 = 2;
/// The disk has paused because somebody else has had its image.
const LOST: u8 = 4;

/// The state of a disk, shared by its rings on all cores.
#[derive(Debug, Default)]
pub(crate) struct Trouble {
    on_error: OnError,
    state: AtomicU8,
}

impl Trouble {
    pub fn new(on_error: OnError) -> Trouble {
        Trouble { on_error, state: AtomicU8::new(0) }
    }

    pub fn on_error(&self) -> OnError {
        self.on_error
    }

    // Nothing else is read because of the state: relaxed.

    #[inline]
    pub fn is_paused(&self) -> bool {
        self.state.load(Ordering::Relaxed) & PAUSED != 0
    }

    /// Whether a ring submits nothing. One that stops does not wait for the end of a pause.
    #[inline]
    pub fn stands_still(&self, stopping: bool) -> bool {
        let state = self.state.load(Ordering::Relaxed);
        state & (WITHHELD | LOST) != 0 || (state != 0 && !stopping)
    }

    /// Pauses the disk. Returns false if it is paused already.
    pub fn pause(&self) -> bool {
        self.state.fetch_or(PAUSED, Ordering::Relaxed) & PAUSED == 0
    }

    /// Lets the disk go on. Returns false if it is not paused.
    pub fn resume(&self) -> bool {
        self.state.fetch_and(!(PAUSED | LOST), Ordering::Relaxed) & PAUSED != 0
    }

    /// Pauses the disk, because somebody else has had its image. Returns false if that is known.
    pub fn lose(&self) -> bool {
        self.state.fetch_or(PAUSED | LOST, Ordering::Relaxed) & LOST == 0
    }

    #[inline]
    pub fn is_lost(&self) -> bool {
        self.state.load(Ordering::Relaxed) & LOST != 0
    }

    #[inline]
    pub fn is_withheld(&self) -> bool {
        self.state.load(Ordering::Relaxed) & WITHHELD != 0
    }

    /// Withholds the disk from its guest. No ring may run.
    pub fn withhold(&self) {
        self.state.fetch_or(WITHHELD, Ordering::Relaxed);
    }

    /// Gives the disk to its guest.
    pub fn admit(&self) {
        self.state.fetch_and(!WITHHELD, Ordering::Relaxed);
    }
}
