//! Named files for engines: one directory of the host, or of a simulated world, through a core.
//!
//! Names go to the reactor's helper threads and may take long; reads of an open file go straight
//! to the device through the reading core's own channel, direct and aligned, without a lock or a
//! hop. Nothing here writes: a directory that is only read stays as it was, byte for byte.

#![forbid(unsafe_code)]

mod dir;
mod read;

pub use dir::Dir;
pub use reactor::{DirEntry, File, LockGuard, SharedFile, Slice};
pub use read::{Reading, read, start_read};
