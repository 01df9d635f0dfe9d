//! The key-value door: Redis's protocol in front of the engine.
//!
//! 1. Every core of a node starts a [`Server`] with a listener and a reader of its own. A connection stays on the core
//!    that accepted it.
//! 2. `connection` receives into the connection's buffer and hands it to its `session`.
//! 3. `session` takes command by command (`resp`, then `command`); `replies` answers at once what memory can answer,
//!    starts a task for what has to read, and keeps replies in the order of their commands.
//! 4. `connection` sends what is ready, everything of one turn at once.
//!
//! State belongs to one core ([`state`], reached by its connections through an `Rc`). What another core has to be
//! asked (a list of connections, a cursor it gave out, its counters) goes there as a message ([`shared`]).
//!
//! What always holds: replies come in the order of the commands; no client makes the node hold more than
//! [`Settings`] allow, whether it sends much, reads slowly, or asks for everything; what is not a request closes only
//! the connection it came from.
//!
//! Deliberately absent: writing, other data types than strings, more than one database, expiry, transactions,
//! subscriptions, scripts, passwords.
#![forbid(unsafe_code)]

mod administration;
mod args;
mod client;
mod command;
mod config_get;
mod connection;
mod describe;
mod glob;
mod help;
mod info;
mod node_info;
mod output;
mod range;
mod reads;
mod refusal;
mod replies;
mod scan_table;
mod server;
mod session;
mod settings;
mod shared;
mod spec;
mod state;
mod stream;
mod table;
mod walk;

pub use node_info::{CpuSeconds, NodeInfo};
pub use server::Server;
pub use settings::Settings;
pub use shared::Shared;

/// The Redis whose commands, replies and error texts are spoken; clients decide by it what they may ask.
pub const REDIS_VERSION: &str = "7.0.15";
