//! Copies of a database: checkpoints and backups.
//!
//! A [`FileList`](crate::FileList) says which files hold the database at one moment. It comes from
//! the writer of an open database ([`Writer::live_files`](crate::Writer::live_files)), possibly in
//! another process, or from a directory that is not open for writing (`closed`). Everything else
//! only reads these files:
//!
//! 1. `contents` replays the MANIFEST and finds the tables and blob files that it names.
//! 2. `transfer` copies bytes, with their checksum, at a limited rate, and reports progress.
//! 3. `checkpoint` makes a directory of hard links; `backup` keeps many states of a database in a
//!    directory, each file once.
//! 4. `new_directory` makes a directory that is whole or absent after any crash.
//!
//! `place` is the other direction: it puts files into a directory, to be ingested.
//!
//! It may use `open`, `write`, and what all rooms share. Nothing uses it.

pub(crate) mod backup;
pub(crate) mod checkpoint;
pub(crate) mod closed;
pub(crate) mod contents;
pub(crate) mod new_directory;
pub(crate) mod place;
pub(crate) mod transfer;
