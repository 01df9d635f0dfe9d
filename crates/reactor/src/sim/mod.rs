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
//! 4. When all cores' main tasks have ended, the cores shut down as on the host: tasks are
//!    dropped, operations cancelled and reaped; the run ends when all cores have.
//! 5. If nothing can happen any more, or too many turns or hours have passed, the run fails with
//!    a text that names the seed, what each core waits for, and the newest events.
//!
//! Everything that happens goes into a hash; the same seed gives the same hash ([`World::trace`]).
//! The disk, the clock and the faults outlive a run, so a second run is a restarted process.
//!
//! # Faults
//!
//! What each layer may do to a reader, and what a reader may rely on:
//!
//! | layer | may | does not |
//! |---|---|---|
//! | names | fail once or always; answer late; be locked by another process | answer for a wrong name |
//! | alignment | refuse with `EINVAL` what the kernel refuses | read what the kernel would not |
//! | transfer | end early at a block's edge; at the end of the file; fail and leave garbage in the buffer; flip a bit once | write behind the buffer's end, or after the completion |
//! | medium | fail wherever a range is touched; hold rotten bits that every read finds | change while it is not written |
//! | time | take any time: a random latency, a stall of seconds, for ever (stuck) | delay other reads behind a stuck one |
//! | order | complete in any order | complete an operation twice |
//! | network | cut what is sent into pieces anywhere, delay it, hold a sender whose window is full, reset a connection, refuse an accept | lose, double or reorder bytes of a connection that stands |
//! | cancel | complete as if it had not been cancelled; be ignored by what is stuck | lose a completion of what is not stuck |
//!
//! Not modelled yet: writes and what a power loss does to them (nothing writes), and misdirected
//! reads (RocksDB's block checksums below format version 6 do not cover a block's place).

mod config;
mod disk;
mod fault;
mod net;
mod rng;
mod sockets;
mod state;
mod trace;
mod world;

pub use config::{Latency, SimConfig};
pub use fault::{Fault, FaultCounts, FaultKind};
pub use net::NetConfig;
pub use rng::Rng;
pub(crate) use state::{Outcome, State};
pub use world::{Failure, FailureKind, World};
