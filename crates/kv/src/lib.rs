//! The key-value door: Redis's protocol in front of the engine.
//!
//! 1. Every core of a node starts a [`Server`] with a listener and a reader of its own. A
//!    connection stays on the core that accepted it.
//! 2. `connection` receives into the connection's buffer and hands it to its `session`.
//! 3. `session` takes command by command (`resp`, then `command`); `replies` answers at once what
//!    memory can answer, starts a task for what has to read, and keeps replies in the order of
//!    their commands.
//! 4. `connection` sends what is ready, everything of one turn at once.
//!
//! State belongs to one core ([`state`], reached by its connections through an `Rc`). What another
//! core has to be asked (a list of connections, a cursor it gave out, its counters) goes there as a
//! message ([`shared`]).
//!
//! What commands write goes to the [`Shard`], which one core owns: `outgoing` gathers a
//! connection's writes, `writes` takes them there and their answers back.
//!
//! What always holds: a command sees what those before it on its connection have written; each
//! command has one reply, in the order of the commands; what follows a refused `MULTI` is refused;
//! no client makes the node hold more than [`Settings`] allow, whether it sends much, reads slowly,
//! or asks for everything; what is not a request closes only the connection it came from.
//!
//! Deliberately absent: other data types than strings, more than one database, expiry,
//! transactions, subscriptions, scripts, users other than the default one.
#![forbid(unsafe_code)]

mod command;
mod connection;
mod core;
mod info;
mod password;
mod read;
mod server;
mod settings;
mod shard;

pub use core::shared::Shared;
pub use info::exposition::{CONTENT_TYPE, Exposition};
pub use info::metrics::{Glance, Reporter};
pub use info::node_info::{CpuSeconds, MemoryUse, NodeInfo};
pub use password::Password;
pub use server::Server;
pub use settings::Settings;
pub use shard::change::{Answer, Change};
pub use shard::{Shard, ShardStats};

/// The Redis whose commands, replies and error texts are spoken; clients decide by it what they may
/// ask.
pub const REDIS_VERSION: &str = "7.0.15";
