//! How threads that are not cores tell a core that they have left work for it.
//!
//! The work itself is in a queue of the caller, an [`inbox`](crate::inbox) for example, which a
//! [`Poller`](crate::Poller) of the core empties. The order is: publish the work, then ring. The
//! poller's [`arm`](crate::Poller::arm) looks into the queue once more before the core sleeps. So
//! no work is slept through (`sleep.rs` has the proof), and a core that is awake costs the caller
//! one fence and one load.

use std::fmt;
use std::sync::Arc;

use crate::core::Core;
use crate::driver::remote::CoreAddress;

/// Wakes a core, from any thread.
#[derive(Clone)]
pub struct Bell(Arc<CoreAddress>);

impl Bell {
    /// Makes the core look for work: call it after the work was published. A core that is awake
    /// looks in its next turns anyway. Does nothing if the core has ended.
    #[inline]
    pub fn ring(&self) {
        self.0.wake_if_asleep();
    }
}

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bell").finish_non_exhaustive()
    }
}

impl Core {
    /// This core's bell.
    pub fn bell(&self) -> Bell {
        Bell(self.inner().address().clone())
    }
}
