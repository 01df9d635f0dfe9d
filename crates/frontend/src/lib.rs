//! The guest's side of vhost-user-blk: the work of QEMU and of a guest's driver, without a virtual
//! machine. Tests and benchmarks drive Millrace's targets and other targets with it.
//!
//! This crate judges crate `vhost`, so it shares no code with it: messages, rings and in-flight
//! region are implemented again, from the vhost-user specification and virtio 1.2.
//!
//! It has two layers:
//!
//! 1. [`Session`] sends any message with any descriptors over a [`Connection`]; [`Memory`] is the
//!    guest's memory; [`SplitRing`] and [`PackedRing`] are a ring's bytes, in which any chain can
//!    be built and any index published; [`Inflight`] and [`DirtyLog`] are the shared memory of
//!    crash recovery and migration. With these a test can send exactly what it wants, including
//!    what no correct guest sends.
//! 2. [`Disk`] behaves like a correct guest: it does the handshake, starts the rings in QEMU's
//!    order, stops, and reconnects with the same memory. Its [`Queue`]s read and write through
//!    slots with prepared chains, so that a request costs a few stores.
//!
//! Everything blocks and runs on the caller's threads: this crate is not part of a node.

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
