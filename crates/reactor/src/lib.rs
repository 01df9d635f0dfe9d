//! One event loop per core: tasks, timers, files, sockets, messages between cores, and owned
//! aligned buffers, over io_uring, epoll or a simulated world.
//!
//! [`run`] starts the cores and gives each a [`Core`], the only handle on everything outside:
//! clock, files, sockets, random numbers, threads. So the simulator can replay a whole node from
//! one seed.
//!
//! A request stays on the core where it arrived. Its task starts operations, which own their
//! buffers until they complete. The loop submits all operations of a turn with one system call, and
//! runs no task while it reaps completions. See `core/turn.rs` for the turn.

// Under loom only the lock-free parts exist, and `tests/loom.rs` includes them by path.
#![cfg(not(loom))]

pub mod aio_abi;
mod buf;
mod core;
mod driver;
mod edge;
mod eventfd;
mod file;
mod file_queue;
mod foreign;
mod guard;
mod idle;
pub mod inbox;
pub mod log;
pub mod mailbox;
mod mesh;
mod net;
mod op;
mod places;
mod poller;
mod runtime;
pub mod sim;
pub mod sleep;
pub mod spsc;
mod stats;
mod task;
#[doc(hidden)]
pub mod testing;
mod timer;
mod unix;
mod wait;
mod watch;
mod write;

pub use buf::{BUF_ALIGN, BUF_MAX, Buf, Pool, Promise, SharedBuf, Slice, Spare};
pub use core::{Core, JoinHandle, OwnedTask, Sleep};
pub use driver::{
    DirEntry, Image, ImageInfo, ImageOpening, LockGuard, Mode, Opening, Program, SharedFile,
};
pub use eventfd::{EventFd, EventWatch};
pub use file::{File, ReadAt};
pub use file_queue::{FileDone, FileIo, FileQueue, QueueFull, SEGMENTS_MAX};
pub use foreign::admit;
pub use guard::{Guard, losses};
pub use idle::PollMode;
pub use net::{Listener, Socket, listen};
pub use op::Part;
pub use poller::{Poller, PollerSlot};
pub use runtime::{DriverKind, RuntimeConfig, UPGRADE, block_signals, processors, run, signal};
pub use stats::{CoreStats, Counter};
pub use task::Class;
pub use unix::{FDS_MAX, UnixListener, UnixSocket};
pub use wait::{
    Closed, Either, Elapsed, Event, Oneshot, OneshotReceiver, OneshotSender, Race, Timeout, Wait,
    oneshot, race, timeout,
};
pub use watch::Watch;
pub use write::{SyncData, WriteAt};
