//! What the connections of one core share, and what cores ask each other.
//!
//! `state` is one core's part, reached by its connections through an `Rc`; `shared` is the node's.

pub(crate) mod client;
pub(crate) mod scan_table;
pub(crate) mod shared;
pub(crate) mod state;
pub(crate) mod writes;
