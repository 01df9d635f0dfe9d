//! Named files for engines: one directory of the host, or of a simulated world, through a core.
//!
//! Names go to the reactor's helper threads and may take long; reads and writes of an open file
//! go straight to the device through the core's own channel, without a lock or a hop. A directory
//! that is only read stays as it was, byte for byte.
//!
//! What is durable when, for whoever writes:
//!
//! - a write that has completed is seen by every later read and survives the process. It survives a
//!   power cut once a sync of the file has completed that was started after it;
//! - a name that was made, renamed or removed is seen at once and survives the process. It survives
//!   a power cut once a [`Dir::sync`] has completed that was started after it. Until then each
//!   change may be kept or lost by itself. The directory is never synced unasked, but by
//!   [`Dir::write_small_atomically`];
//! - after a failed sync the open file is poisoned: nothing is written through it any more. Opening
//!   it again clears that, and does not help: reads may see what will never be durable, and the
//!   next sync succeeds. So a recovery copies what it found and syncs the copy before it builds on
//!   it (`sim::journal` has the mutant that does not).

#![forbid(unsafe_code)]

mod dir;
mod read;
mod writer;

pub use dir::Dir;
pub use reactor::{DirEntry, File, LockGuard, Mode, SharedFile, Slice, SyncData, WriteAt};
pub use read::{Reading, read, start_read};
pub use writer::FileWriter;
