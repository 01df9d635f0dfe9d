//! A simulated world: cores, clock, chance, disks and a network, all from one seed and on one
//! thread.
//!
//! ```
//! use reactor::sim::{SimConfig, World};
//!
//! let world = World::new(1, 2, SimConfig::default());
//! world.add_file("/db/a", vec![7u8; 1 << 20]);
//! let sums = world
//!     .run(|core| async move {
//!         let file = core.open("/db/a".as_ref(), false).await.unwrap();
//!         let buf = core.alloc(4096).unwrap();
//!         let (n, buf) = core.attach(&file).read_at(8192, buf).await;
//!         buf[..n.unwrap()].iter().map(|&b| u64::from(b)).sum::<u64>()
//!     })
//!     .unwrap();
//! assert_eq!(sums, [7 * 4096; 2]);
//! ```
//!
//! A run, step by step:
//!
//! 1. [`World::run`] makes the cores as [`crate::run`] does, with the same loop, operation table,
//!    rings between cores, inboxes and shut-down; only the driver differs.
//! 2. Chance picks which core takes the next turn. A core that has nothing to do goes to sleep
//!    through its sleep flag, as on the host, and sleeps until a completion is due, its timer
//!    fires, or another core took the flag. A wake-up that nobody sends is a deadlock, and found.
//! 3. The clock moves a little whenever it is read; when all cores sleep it jumps to the next
//!    event. Nothing waits for real.
//! 4. When all cores' main tasks have ended, the cores shut down as on the host: tasks are dropped,
//!    operations cancelled and reaped; the run ends when all cores have.
//! 5. If nothing can happen any more, or too many turns or hours have passed, the run fails with a
//!    text that names the seed, what each core waits for, and the newest events.
//!
//! Everything that happens goes into a hash; the same seed gives the same hash ([`World::trace`]).
//! The disk, the clock and the faults outlive a run, so a second run is a restarted process.
//!
//! # Several processes
//!
//! [`World::start_process`] starts a process beside those cores, with a core of its own, on the
//! same disk and by the same clock. It can be killed at the end of any of its turns, or stopped for
//! a while, and the others go on. What is under way in one that is killed ends as in a crash, and
//! its files, locks and sockets are closed.
//!
//! Processes reach each other by what they share, as on the host: Unix sockets, eventfds and
//! memory. These are the kernel's, for what it does with them it does at once and in order. The
//! world decides when somebody who waits for one learns of it, and cuts what goes through a socket
//! anywhere, but for what has 64 bytes or less, which the kernel takes as a whole or not. An image
//! that is open has a descriptor that can be sent along; the open file and its lock last until all
//! processes have closed it, and messages that nobody has received count.
//!
//! # Faults
//!
//! What each layer may do to whoever uses it, and what one may rely on:
//!
//! | layer | may | does not |
//! |---|---|---|
//! | names | fail once or always; answer late; be locked by another process | answer for a wrong name |
//! | alignment | refuse with `EINVAL` what the kernel refuses | read or write what the kernel would not |
//! | transfer | end early at a block's edge; at the end of the file; fail and leave garbage in the buffer; flip a bit once | write behind the buffer's end, or after the completion |
//! | medium | fail wherever a range is touched; hold rotten bits that every read finds | change while it is not written; stay rotten where it is written over |
//! | write | take part of what it is given; fail (a bad sector, a full disk) and have written any number of its sectors from the first on; zeroing a range and punching a hole are writes of zeroes | write elsewhere, or after its completion |
//! | sync | fail, and forget for good any of what it was to cover, so that the next one succeeds and covers nothing | report success for what is not durable |
//! | time | take any time: a random latency, a stall of seconds, for ever (stuck) | delay others behind a stuck one |
//! | order | complete in any order | complete an operation twice |
//! | network | cut what is sent into pieces anywhere, delay it, hold a sender whose window is full, reset a connection, refuse an accept | lose, double or reorder bytes of a connection that stands |
//! | cancel | complete as if it had not been cancelled; be ignored by what is stuck | lose a completion of what is not stuck |
//!
//! # Crashes
//!
//! [`World::crash`] and [`World::crash_at`] end the process at any completion; [`World::run`] then
//! returns [`FailureKind::Crash`], and the next run is the process after it. What it finds:
//!
//! | what | when it completes | survives a kill | survives a power cut |
//! |---|---|---|---|
//! | a write, a new length, an allocation | every later read sees it | yes | after a sync of the file that was started when it had completed |
//! | a file made, renamed or removed | everybody sees it | yes | after a sync of its directory that was started when it had completed |
//! | a write under way | | any number of its sectors, from the first on | as one that completed and was not synced |
//! | an operation on names under way | | it is done, or not | it is done, or not, and then not synced |
//! | a lock, a descriptor | | no | no |
//!
//! *Sectors* are 512 bytes at a multiple of 512 in the file. They are kept or lost as a whole,
//! also when a write covers a part of one only.
//!
//! *Unsynced writes*: chance decides for each file whether a power cut loses all of them, keeps
//! all, keeps the oldest and tears the next, or treats each by itself. Treated by itself a write is
//! kept, lost, or torn: any of its sectors, whichever, is kept. So a newer write may be there
//! without an older one; of two that are kept the newer wins. A file that a lost sector should
//! have made longer may have the length without it, and zeroes in its place.
//!
//! *Unsynced names*: likewise for each directory: all lost, all kept, the oldest kept, or any of
//! them by itself. Linux's journalling file systems keep them in order; POSIX promises no more
//! than the sync does, and what is right with any subset is right everywhere. A rename is one
//! change: its new name is either the old file or the new one, because all file systems that our
//! peers run on promise that and RocksDB's `CURRENT` rests on it. A name says nothing of its
//! file's bytes: one that survives may name a file whose writes did not.
//!
//! Syncing a file does not make its name durable, although ext4 would. Syncing a directory makes
//! durable nothing of another directory. Tests that add files themselves add durable ones.
//!
//! Not modelled: misdirected reads and writes (RocksDB's block checksums below format version 6
//! do not cover a block's place); a read that meets a write under way and sees half of it; another
//! file's old bytes where a file grew; a device that loses what it has reported as synced; room
//! for names and for what a write replaces; renames between directories.

mod config;
mod crash;
mod disk;
mod fault;
mod inode;
mod names;
mod net;
mod rng;
mod sockets;
mod state;
mod trace;
mod world;

pub use config::{Latency, SimConfig};
pub use crash::Crash;
pub use fault::{Access, Fault, FaultCounts, FaultKind};
pub use net::NetConfig;
pub use rng::Rng;
pub(crate) use state::{Outcome, Place, State};
pub use world::{Failure, FailureKind, Process, World};
