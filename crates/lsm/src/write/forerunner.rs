//! What must be durable elsewhere before a group of batches is written.
//!
//! A caller that keeps notes about values outside of the database (their deadlines, say) has to
//! write a note before its value, and wants to name the value by its sequence number, which is
//! known only when the value's group is about to be written. So a batch carries a note
//! ([`Writer::submit_noted`](crate::Writer::submit_noted)), and the commit task gives the notes of
//! a group to the [`Forerunner`], with the sequence numbers that their batches will have, and waits
//! for it. Groups are written one after the other, so the forerunner is never called twice at a
//! time.
//!
//! If the forerunner fails, or the log does afterwards, the group is refused and its sequence
//! numbers are given to later batches. The same is true after a crash in between. Who names values
//! by sequence numbers must tell such a note from one whose value was written.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;

use crate::error::Result;
use crate::write::live_files::LiveFiles;

/// What a batch brings for the forerunner.
pub type Note = Box<dyn Any>;

/// Runs before groups of batches are written.
pub trait Forerunner {
    /// Does what must be done before the batches with these notes are written. Each comes with the
    /// sequence number of the first operation of its batch; the operations of a batch are numbered
    /// one by one.
    ///
    /// # Errors
    /// Any error: the whole group is refused, as on a full disk.
    fn run(&self, notes: Vec<(u64, Note)>) -> Pin<Box<dyn Future<Output = Result<()>>>>;

    /// Makes all that was done survive a power cut, before the same is done for all that was
    /// written ([`Writer::sync`](crate::Writer::sync)).
    ///
    /// # Errors
    /// Any error: the caller of `sync` is refused.
    fn sync(&self) -> Pin<Box<dyn Future<Output = Result<()>>>>;

    /// The files of the database in which it writes, within the directory of this one, for a copy
    /// of both. No group is written meanwhile, so they hold what belongs to all that was written.
    /// `None` if there is no such database.
    ///
    /// # Errors
    /// As for [`Writer::live_files`](crate::Writer::live_files): there is no copy then.
    fn live_files(&self) -> Pin<Box<dyn Future<Output = Result<Option<LiveFiles>>>>>;
}
