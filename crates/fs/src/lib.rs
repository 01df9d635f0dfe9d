//! Named files for engines: one directory of the host, or of a simulated world, accessed through a
//! core.
//!
//! Operations on names run on the reactor's helper threads and may take long. Reads and writes of
//! an open file go straight to the device through the core's own channel, without a lock or a hop.
//! A directory that is only read stays unchanged, byte for byte.
//!
//! Durability of writes and names:
//!
//! - A completed write is visible to every later read and survives the process. It survives a power
//!   cut once a sync of the file that started after it has completed.
//! - A name that was created, renamed or removed is visible immediately, and the change survives
//!   the process. It survives a power cut once a [`Dir::sync`] that started after it has completed.
//!   Until then each change may be kept or lost independently. Only [`Dir::sync`] and
//!   [`Dir::write_small_atomically`] sync the directory.
//! - A failed sync poisons the open file: nothing more is written through it. Reopening the file
//!   clears the poison but does not help: reads may return data that never becomes durable, and the
//!   next sync succeeds. So recovery copies the data it found and syncs the copy before it builds
//!   on it (`sim::journal` has the mutant that does not).

#![forbid(unsafe_code)]

mod dir;
mod read;
mod writer;

pub use dir::{Dir, NamesMark};
pub use reactor::{DirEntry, File, LockGuard, Mode, SharedFile, Slice, SyncData, WriteAt};
pub use read::{Reading, read, read_briefly, read_until_end, start_read};
pub use writer::FileWriter;
