//! The vhost-user protocol: the messages of front ends, and what follows from them. No I/O, and no
//! access to a ring.
//!
//! Each file uses only those before it: `message` has the messages as bytes, `config` the disk's
//! properties that the guest sees, `ring_state` a ring as the front end has set it up, `handover`
//! the state that a successor takes over, `session` one connection. The room uses no other room,
//! only `bytes`.

pub mod config;
pub mod handover;
pub mod kept;
pub mod message;
pub mod ring_state;
pub mod session;
