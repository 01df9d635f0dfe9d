//! An embedded key-value engine that reads and writes RocksDB databases, for asynchronous programs
//! and for threads.
//!
//! A [`Db`] is a sorted map from keys to values, both byte strings, in a directory. An acknowledged
//! write survives a power cut. RocksDB 7.8 and newer can open the directory whenever this crate has
//! not; databases of RocksDB 5 to 11 are opened as they are.
//!
//! # A tour
//!
//! Open a database from any executor, and share it: clones are cheap, and all methods take `&self`.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().to_owned();
//! use millrace::{Db, WriteBatch};
//!
//! # tokio::runtime::Builder::new_current_thread().build()?.block_on(async move {
//! let db = Db::open(&path).await?; // creates what is missing
//!
//! // Keys and values are anything that is bytes.
//! db.put("user:1", "Ada").await?;
//! let name = db.get("user:1").await?;
//! assert_eq!(name.as_deref(), Some(&b"Ada"[..]));
//!
//! // Several writes, all or nothing.
//! let mut batch = WriteBatch::new();
//! batch.put("user:2", "Brian").delete("user:1");
//! db.write(batch).await?;
//!
//! // Ordered, in both directions, one moment's state.
//! let mut users = db.prefix("user:").rev();
//! while let Some(entry) = users.next().await {
//!     let (key, value) = entry?;
//!     println!("{}: {}", key.escape_ascii(), value.escape_ascii());
//! }
//!
//! // Many tasks at once share the flushes of the log.
//! let tasks: Vec<_> = (0..10_u32)
//!     .map(|n| {
//!         let db = db.clone();
//!         tokio::spawn(async move { db.put(n.to_be_bytes(), "v").await })
//!     })
//!     .collect();
//! for task in tasks {
//!     task.await??;
//! }
//!
//! db.close().await?; // or just drop it
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })
//! # }
//! ```
//!
//! - [`Options`]: threads, memory, durability, compression, and more.
//! - [`ColumnFamily`]: key spaces of their own, and batches across several.
//! - [`Snapshot`]: reads of one moment. [`Range`]: a [`Stream`](futures_core::Stream) of entries.
//! - [`Transaction`]: reads and writes that no other writer comes between.
//! - [`blocking`]: the same for plain threads.
//! - [`Client`] and [`blocking::Client`]: a node somewhere else, or a Redis server, with a coherent
//!   cache here; see [`client`].
//! - [`Error`]: each has a [kind](ErrorKind) to act on, and names what failed and why.
//!
//! # How it works
//!
//! The engine runs in threads of its own: one, unless [`Options::cores`] says otherwise. Each
//! drives an io_uring (epoll, where that is not allowed) and holds the cache of its part of the
//! keys. A get whose answer is in memory is answered by the thread that asks. Any other call puts
//! its request into a lock-free queue of such a thread and is woken with the answer. A busy thread
//! takes all requests that wait at once, reads the blocks that are not in memory at the same time,
//! and writes all batches that have come meanwhile to the log together. So a thousand tasks need
//! neither a thousand threads nor `spawn_blocking`.
//!
//! # Cancellation
//!
//! Dropping a future is safe at any await: with `tokio::select!`, with timeouts, with tasks that
//! are aborted. An operation that was handed over goes on without its caller, a write as well. One
//! that was not yet handed over, because too many were on their way, has not begun.
//!
//! # What is bounded
//!
//! [`Options::memory`] bounds what the engine holds. Requests on their way are bounded, and so are
//! the bytes of batches that are not yet in the log: callers beyond that wait. Snapshots expire
//! after an hour.
//!
//! # Processes
//!
//! One process at a time has a database open: others get [`ErrorKind::Locked`]. After a `fork`,
//! only the parent can use its handles; in the child, every call fails with
//! [`ErrorKind::Closed`]. A process that is killed loses no acknowledged write. The first opening
//! makes the process ignore `SIGXFSZ`, so that a file size limit is an error and not its end.

#![forbid(unsafe_code)]

mod batch;
pub mod blocking;
mod bounds;
mod budget;
pub mod client;
mod db;
mod door;
mod engine;
mod error;
mod family;
mod near;
mod options;
mod range;
mod request;
mod server;
mod shared;
mod snapshot;
mod stats;
#[cfg(test)]
mod tests;
mod transaction;
mod value;

#[doc(inline)]
pub use ::client::{Client, KeyRange};
pub use batch::WriteBatch;
pub use db::Db;
pub use error::{Error, ErrorKind, Result};
pub use family::ColumnFamily;
#[doc(inline)]
pub use lsm::{Compression, Durability, MergeOperator};
pub use options::Options;
pub use range::{Entry, Range};
pub use snapshot::Snapshot;
pub use stats::Stats;
pub use transaction::Transaction;
pub use value::Value;
