//! The guest's side of vhost-user-blk: what QEMU and the driver of a guest do together, without a
//! virtual machine. Tests and benchmarks drive a target with it, ours or somebody else's.
//!
//! It judges crate `vhost`, so it shares nothing with it: messages, rings and in-flight region are
//! written here a second time, from the vhost-user text and virtio 1.2.
//!
//! Two floors:
//!
//! 1. [`Session`] says any message with any descriptors over a [`Connection`]; [`Memory`] is the
//!    guest's memory; [`SplitRing`] and [`PackedRing`] are a ring's bytes, in which any chain can
//!    be built and any index published; [`Inflight`] and [`DirtyLog`] are the shared memory of
//!    crash recovery and migration. With these a test says exactly what it means, also what no
//!    honest guest would say.
//! 2. [`Disk`] does what an honest guest does: the handshake, the start of the rings in QEMU's
//!    order, stop, and reconnection with the same memory. Its [`Queue`]s read and write by slots
//!    whose chains are laid out beforehand, so that a request costs a few stores.
//!
//! Everything blocks and runs on the caller's threads: this is no part of a node.

mod connection;
mod disk;
mod error;
mod event;
mod inflight;
mod log;
mod memory;
pub mod message;
mod packed;
mod processor;
mod queue;
mod session;
mod split;

pub use connection::{Connection, Message};
pub use disk::{Config, Disk, DiskOptions};
pub use error::{Error, Kind, Result};
pub use event::Event;
pub use inflight::{Inflight, PackedEntry, PackedHeader, SplitEntry, SplitHeader};
pub use log::DirtyLog;
pub use memory::{Memory, Pages, Region};
pub use packed::{PackedDesc, PackedRing};
pub use processor::pin;
pub use queue::{Completion, Queue, Request, Slot, Status};
pub use session::Session;
pub use split::{Desc, SplitRing};
