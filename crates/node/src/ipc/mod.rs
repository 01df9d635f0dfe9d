//! Messages between processes of a node: between launcher and node, and between two nodes.
//!
//! This room knows nothing of what the messages mean.

pub(crate) mod channel;
pub(crate) mod frames;
