//! Block devices for virtual machines: files and block devices of the host, memory, nothing, and
//! devices that err, delay, limit or note what is written on top of them.
//!
//! [`Bdev::open`] opens a device from a URI; every core that uses it takes a [`Channel`] of its own
//! from [`Bdev::channel`]. One request:
//!
//! 1. The caller, a poller, submits an [`Io`] with the guest's segments. The channel checks range
//!    and alignment again, whatever was checked before.
//! 2. A device that answers at once (memory, null) has done it then. A file's request goes to the
//!    reactor with the guest's memory as it is: no copy, no task, no allocation.
//! 3. [`Channel::poll`] hands back what has completed, in any order: a tag and a [`Status`].
//!
//! A core that sleeps takes a turn when something has completed, and its pollers look. A channel
//! belongs to one core; what channels of one device share is read-only on the way of a request, but
//! for the budget of a limited device.
//!
//! What must hold: each tag that was accepted comes back exactly once while the channel lives; the
//! kernel touches no segment after its tag has come back; and what a dropped channel has left
//! under way holds the memory ([`Channel::hold`]) until it is done.

// Under loom only the shared bitmap exists, and `tests/loom.rs` includes it by path.
#![cfg(not(loom))]

mod channel;
mod device;
mod devices;
mod error;
mod layers;
mod mutant;
mod uri;

pub use channel::{Channel, Done, Full, Io, Kind, QUEUE_DEPTH, Status};
pub use device::{Bdev, DESCRIPTORS_MAX, Geometry, Parts};
pub use error::{Error, ErrorKind};
pub use layers::dirty::{DirtyMap, Taken};
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub use mutant::{Mutant, set_mutant};
#[cfg(feature = "testing")]
#[doc(hidden)]
pub use uri::fuzz as fuzz_uri;
pub use uri::{image_of, uri_under};
