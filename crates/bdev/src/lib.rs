//! Block devices for virtual machines: files and block devices of the host, memory, exports of NBD
//! servers, null, and layers over another device that inject errors, delay, limit or track writes.
//!
//! [`Bdev::open`] opens a device from a URI. Every core that uses the device takes its own
//! [`Channel`] from [`Bdev::channel`]. One request:
//!
//! 1. The caller, a poller, submits an [`Io`] with the guest's segments. The channel checks range
//!    and alignment again, whatever was checked before.
//! 2. Memory and null devices complete the request immediately. A file's request goes to the
//!    reactor with the guest's memory as it is: no copy, no task, no allocation. That of an NBD
//!    server is copied, and goes to the core that has the connection.
//! 3. [`Channel::poll`] returns completions, in any order: a tag and a [`Status`].
//!
//! A completion makes a sleeping core take a turn, in which its pollers run. A channel belongs to
//! one core. On the path of a request the channels of one device share read-only data only, except
//! for the budget of a limited device.
//!
//! Invariants: each accepted tag comes back exactly once while the channel lives; the kernel
//! touches no segment after its tag has come back; requests that a dropped channel leaves in flight
//! hold the memory ([`Channel::hold`]) until they are done.
//!
//! A caller whose requests use buffers of the core's pool takes a [`BufChannel`] instead, which is
//! safe: it owns the buffers while their requests are in flight.
//!
//! The modules, from the bottom: `io`, `geometry` and `error`; `uri`; `devices`; then `channel`,
//! `device` and `layers`, which refer to each other because a composite device is recursive
//! (`layers`); `extents`, `buf_channel`, `task_channel` and `copy`.

// Under loom only the shared bitmap exists; `tests/loom.rs` includes it by path.
#![cfg(not(loom))]

mod buf_channel;
mod channel;
mod copy;
mod device;
mod devices;
mod error;
mod extents;
mod geometry;
mod io;
mod layers;
mod mutant;
mod task_channel;
mod uri;

pub use buf_channel::{BufChannel, BufDone, BufIo};
pub use channel::Channel;
pub use copy::{Copy, CopyTarget, DeviceTarget, TargetStep};
pub use device::{Bdev, DESCRIPTORS_MAX, Parts};
pub use devices::nbd::serve_line;
pub use error::{Error, ErrorKind};
pub use geometry::Geometry;
pub use io::{Done, Full, Io, Kind, QUEUE_DEPTH, Status};
pub use layers::dirty::{DirtyMap, Taken, register_barrier};
pub use layers::limit::{Limit, Rates};
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub use mutant::{Mutant, set_mutant};
pub use reactor::{Extent, Space};
pub use task_channel::TaskChannel;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub use uri::fuzz as fuzz_uri;
pub use uri::{file_uri, image_of, is_remote, locks_for_use, parse_rate, uri_under};
