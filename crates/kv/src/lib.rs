//! The key-value door: the Redis protocol in front of the engine.
//!
//! 1. Every core of a node starts a [`Server`] with its own listener and reader. A connection stays
//!    on the core that accepted it.
//! 2. `connection` receives into the connection's buffer and hands it to its `session`.
//! 3. `session` takes one command after the other (`resp`, then `command`). `replies` answers
//!    immediately from memory where it can, starts a task for a command that has to read, and keeps
//!    replies in the order of their commands.
//! 4. `connection` sends the replies that are ready, all of one turn together.
//!
//! State belongs to one core (`core::state`, shared by its connections through an `Rc`).
//! Questions to another core (its list of connections, a cursor it issued, its counters) are sent
//! to it as messages (`core::ask`).
//!
//! Writes go to the [`Shard`], which one core owns: `outgoing` gathers a connection's writes;
//! `core::writes` takes them to the shard and its answers back.
//!
//! Rooms, each of which uses only those before it: `expiry`, `tls`, `command`, `client`, `shard`,
//! `core`, `read`, `info`, `connection`. `shard` and `core` form the only circle, see `core`.
//!
//! Invariants: a command sees the writes of earlier commands on its connection; each command has
//! one reply, in the order of the commands; the commands of a transaction are executed with nothing
//! in between, and written as one batch; no client makes the node hold more memory than
//! [`Settings`] allow, whether it sends much, reads slowly or asks for everything; a protocol error
//! closes only the connection it came from.
//!
//! Deliberately absent: data types other than strings, more than one database,
//! channels but the one of invalidations, scripts, users other than the default one.
#![forbid(unsafe_code)]

mod client;
mod command;
mod connection;
mod core;
mod expiry;
mod info;
mod node_info;
mod password;
mod read;
mod server;
mod settings;
mod shard;
mod tls;

pub use core::node::NodeState;
pub use info::exposition::{CONTENT_TYPE, Exposition};
pub use info::metrics::{Glance, Reporter, write_flow};
pub use node_info::{CpuSeconds, MemoryUse, NodeInfo};
pub use password::Password;
pub use server::{Door, Server};
pub use settings::Settings;
pub use shard::change::{Answer, Change};
pub use shard::{Shard, ShardStats};
pub use tls::config::{Tls, TlsAuthClients, TlsFault, TlsFiles};

/// The version of Redis whose commands, replies and error texts are spoken. Clients use it to
/// decide which commands to send.
pub const REDIS_VERSION: &str = "7.0.15";
