//! The writes of a shard that are not in a table file yet, sorted: an arena skip list with one
//! writer, and with readers on every core that never wait and never write.
//!
//! [`Memtable::new`] returns the two ends: the only [`Writer`], and the [`Memtable`], a handle that
//! can be cloned to any core. A reader finds entries with [`Memtable::get`] or walks with a
//! [`Cursor`], also while the writer inserts. An entry keeps its address until the last handle is
//! dropped, so a [`ValueRef`] is enough to find a value again.
//!
//! 1. [`Writer::insert`] takes memory from the arena, writes the whole node there, and links it in
//!    at level 0 and then at the levels above, each with a Release store (`writer.rs`).
//! 2. A reader follows links with Acquire loads (`list.rs`), so every node it reaches is complete
//!    (`node.rs`).
//! 3. Nodes are never unlinked or moved. The last handle frees the whole arena (`arena.rs`).
//!
//! The crate knows user keys, packed sequence numbers and bytes. It knows nothing of column
//! families, range tombstones, logs or visibility: the reader passes the sequence it may see.

// Under loom `tests/loom.rs` includes the modules by path.
#![cfg(not(loom))]

mod arena;
mod cursor;
mod list;
mod memtable;
mod node;
#[cfg(test)]
mod tests;
mod writer;

pub use arena::Reserve;
pub use cursor::Cursor;
pub use memtable::{Entry, Memtable, ValueRef};
pub use writer::{Full, Writer};
