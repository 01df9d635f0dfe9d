//! The writes of a shard that are not in a table file yet, sorted: an arena skip list with one
//! writer, and readers on every core that never wait and never write.
//!
//! [`Memtable::new`] gives the two ends: the [`Writer`], of which there is one, and the
//! [`Memtable`], a handle that may be cloned to any core. A reader finds entries by
//! [`Memtable::get`] or walks with a [`Cursor`]; both go on while the writer inserts. What a reader
//! found stays where it is until the last handle is gone, so a [`ValueRef`] is enough to come back
//! to a value.
//!
//! 1. [`Writer::insert`] takes memory from the arena, writes the whole node there, and links it in
//!    at level 0 and then at the levels above, each with a Release store (`writer.rs`).
//! 2. A reader follows links with Acquire loads (`list.rs`), so a node that it can reach is a whole
//!    node (`node.rs`).
//! 3. Nothing is ever unlinked or moved. The arena (`arena.rs`) is freed as a whole, by the last
//!    handle.
//!
//! It knows user keys, packed sequence numbers and bytes, and nothing of column families, range
//! tombstones, logs or which sequences are visible: whoever reads says up to which sequence.

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
