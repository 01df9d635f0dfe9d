//! The clients of one core: the list of connections, and how much memory each may hold.
//!
//! [`registry`] lists the connections, by which other cores see and close them. Three limits are
//! shared by all connections of a core: `large` admits large commands, `reply_room` long replies,
//! `write_room` writes; [`gauge`] keeps their sums. A connection that is not admitted waits and is
//! woken through its [`registry::Client`]. [`tracking`] is a connection's part of `CLIENT
//! TRACKING`. Uses `command` and the settings, no other room.

pub(crate) mod gauge;
pub(crate) mod large;
pub(crate) mod registry;
pub(crate) mod reply_room;
pub(crate) mod tracking;
pub(crate) mod write_room;
