//! A simulated world: cores, clock, random numbers, disks and a network, all from one seed and on
//! one thread.
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
//! 2. Chance picks the core that takes the next turn. A core without work goes to sleep through its
//!    sleep flag, as on the host, until a completion is due, its timer fires, or another core takes
//!    the flag. A missing wake-up is a deadlock, which the world detects.
//! 3. The clock advances a little at each reading; when all cores sleep it jumps to the next event.
//!    Nothing waits in real time.
//! 4. When all cores' main tasks have ended, the cores shut down as on the host: tasks are dropped,
//!    operations cancelled and reaped; the run ends when all cores have.
//! 5. If no event is left, or too many turns or hours have passed, the run fails with a text that
//!    names the seed, the state of each core, and the newest events.
//!
//! All events go into a hash; the same seed gives the same hash ([`World::trace`]). The disk, the
//! clock and the faults outlive a run, so a second run is a restarted process.
//!
//! # Several processes
//!
//! [`World::start_process`] starts another process with a core of its own, on the same disk and
//! clock. It can be killed at the end of any of its turns, or stopped for a while; the others
//! continue. The operations of a killed process end as in a crash, and its files, locks and sockets
//! are closed.
//!
//! Processes communicate as on the host, through Unix sockets, eventfds and shared memory. These
//! are the kernel's own, because it handles them immediately and in order. The world decides when a
//! waiter learns of an event, and cuts messages through sockets anywhere, except those of up to 64
//! bytes, which the kernel takes as a whole or not at all. An open image has a descriptor that can
//! be sent; the open file and its lock last until all processes have closed it. A descriptor in a
//! message not yet received counts as open.
//!
//! # Faults
//!
//! The faults that each layer may show to its users, and those that it never shows:
//!
//! | layer | may | never |
//! |---|---|---|
//! | names | fail once or always; answer late; be locked by another process | answer for a wrong name |
//! | alignment | refuse with `EINVAL` what the kernel refuses | read or write what the kernel would not |
//! | transfer | end early at a block's edge; at the end of the file; fail and leave garbage in the buffer; flip a bit once | write beyond the buffer's end, or after the completion |
//! | medium | fail for each access to a range; have rotten bits that every read sees | change without a write; stay rotten where it is overwritten |
//! | write | take a part of its bytes; fail (a bad sector, a full disk) after writing any number of its sectors from the first on; zeroing a range and punching a hole are writes of zeroes | write elsewhere, or after its completion |
//! | sync | fail, and forget any of the changes that it should cover, so that the next one succeeds without covering them | report success for data that is not durable |
//! | time | take any time: a random latency, a stall of seconds, for ever (stuck) | delay others after a stuck one |
//! | order | complete in any order | complete an operation twice |
//! | network | cut sent bytes into pieces anywhere, delay them, stop a sender with a full window, reset a connection, refuse an accept | lose, duplicate or reorder bytes of an open connection |
//! | cancel | complete as if it had not been cancelled; be ignored by a stuck operation | lose a completion of an operation that is not stuck |
//!
//! # Crashes
//!
//! [`World::crash`] and [`World::crash_at`] end the process at any completion; [`World::run`] then
//! returns [`FailureKind::Crash`], and the next run is the next process. It finds:
//!
//! | what | when it completes | survives a kill | survives a power cut |
//! |---|---|---|---|
//! | a write, a new length, an allocation | every later read sees it | yes | after a sync of the file that was started when it had completed |
//! | a file made, renamed or removed | every process sees it | yes | after a sync of its directory that was started when it had completed |
//! | a write in flight | | any number of its sectors, from the first on | as a completed one that was not synced |
//! | an operation on names in flight | | it is done, or not | it is done, or not, and then not synced |
//! | a lock, a descriptor | | no | no |
//!
//! *Sectors* are 512 bytes at a multiple of 512 in the file. They are kept or lost as a whole,
//! also when a write covers a part of one only.
//!
//! *Unsynced writes*: chance decides for each file whether a power cut loses all of them, keeps
//! all, keeps the oldest and tears the next, or treats each independently. In the last case each
//! write is kept, lost, or torn: any subset of its sectors is kept. So a newer write may survive
//! without an older one; of two kept writes the newer wins. A file that a lost sector should have
//! extended may have the new length, with zeroes in its place.
//!
//! *Unsynced names*: likewise for each directory: all lost, all kept, the oldest kept, or each
//! independently. Linux's journalling file systems keep them in order, but POSIX promises only the
//! sync; a program that is correct with any subset is correct everywhere. A rename is one change:
//! its new name is either the old file or the new one, because all file systems of our peers
//! promise that and RocksDB's `CURRENT` depends on it. A surviving name may belong to a file whose
//! writes did not survive.
//!
//! Syncing a file does not make its name durable, although ext4 would. Syncing a directory does not
//! affect another directory. Files that tests add are durable.
//!
//! Not modelled: misdirected reads and writes (RocksDB's block checksums below format version 6 do
//! not cover a block's position); a read that sees half of a concurrent write; another file's old
//! bytes where a file grew; a device that loses data that it has reported as synced; space for
//! names and for replaced data; renames between directories.
//!
//! # Layers of this room
//!
//! `config`, `rng`, `trace`; above them the devices (`inode`, `names`, `disk`, `net`, `fault`);
//! then `state`, with its parts `files`, `sockets` and `crash`, which is below the simulated
//! driver; at the top `world` and `run`, which use the whole crate.

mod config;
mod crash;
mod disk;
mod fault;
mod files;
mod inode;
mod names;
mod net;
mod rng;
mod run;
mod sockets;
mod state;
mod trace;
mod world;

pub use config::{Latency, SimConfig};
pub use crash::Crash;
pub use fault::{Access, Fault, FaultCounts, FaultKind};
pub use net::NetConfig;
pub use rng::Rng;
pub(crate) use state::{OpMemory, Outcome, State};
pub use world::{Failure, FailureKind, Process, World};
