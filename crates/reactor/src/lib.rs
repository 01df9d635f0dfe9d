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

mod channels;
mod core;
mod driver;
mod flow;
mod idle;
mod io;
pub mod log;
mod memory;
mod op;
mod poller;
mod process;
mod runtime;
pub mod sim;
mod stats;
mod task;
#[doc(hidden)]
pub mod testing;
mod timer;
mod wait;

pub use channels::bell::Bell;
pub use channels::{inbox, mailbox, reply, sleep, spsc, waiters};
pub use core::{Core, JoinHandle, OtherProcess, OwnedTask, Sleep};
pub use driver::{
    DirEntry, Extent, Image, ImageInfo, ImageLock, ImageOpening, LockGuard, Mode, Opening, Program,
    SharedFile, Space,
};
pub use flow::FlowReport;
pub use idle::PollMode;
pub use io::aio_abi;
pub use io::eventfd::{EventFd, EventWatch};
pub use io::file::{File, ReadAt};
pub use io::file_queue::{FileDone, FileIo, FileQueue, QueueFull, SEGMENTS_MAX};
pub use io::foreign::{admit, close_door, close_foreign, may_admit};
pub use io::mapped::{GROWTH, MappedFile};
pub use io::net::{Listener, Socket, bind, connect, listen};
pub use io::unix::{
    FDS_MAX, Packet, UnixListener, UnixPackets, UnixSocket, connect_unix, listen_unix,
};
pub use io::watch::Watch;
pub use io::write::{SyncData, WriteAt};
pub use memory::background::{drop_in_background, is_background_full, unmap, until_dropped};
pub use memory::buf::{BUF_ALIGN, BUF_MAX, Buf, Held, Pool, Promise, SharedBuf, Slice, Spare};
pub use memory::guard::{Guard, losses};
pub use memory::mapping::Mapping;
pub use memory::prefetch::prefetch;
pub use op::Part;
pub use poller::{Poller, PollerSlot};
pub use process::fork::fork_generation;
pub use process::passed::passed_descriptors;
pub use process::processors::{processors, set_time_slice};
pub use process::survivor::Survivor;
pub use process::work::{Killed, killed_by, note_work_in, work_of, work_page};
pub use runtime::{DriverKind, RuntimeConfig, UPGRADE, block_signals, run, signal};
pub use stats::{CoreStats, Counter};
pub use task::Class;
pub use wait::{
    Closed, Either, Elapsed, Event, Oneshot, OneshotReceiver, OneshotSender, Race, Timeout, Wait,
    join_all, oneshot, race, timeout,
};
