//! TLS between a connection's socket and its commands, by rustls. No I/O.
//!
//! [`config`] makes what all connections of a door share from certificates and keys; [`session`] is
//! one connection: it turns received bytes into plain ones, and replies into bytes to send. Uses
//! nothing of this crate.
//!
//! Sessions are not resumed: a cache of them would be shared by all cores.

pub(crate) mod config;
pub(crate) mod session;
#[cfg(test)]
mod tests;
mod validity;
