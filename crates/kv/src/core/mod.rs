//! The state of a core, and the messages between cores.
//!
//! `state` is one core's part, shared by its connections through an `Rc`; `shared` is the node's.

pub(crate) mod client;
pub(crate) mod scan_table;
pub(crate) mod shared;
pub(crate) mod state;
pub(crate) mod writes;
