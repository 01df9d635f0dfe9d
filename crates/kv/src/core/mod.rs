//! The state of a core, what the cores of a node have in common, and the messages between them.
//!
//! [`state`] is one core's part, shared by its connections through an `Rc`; [`node`] is the node's.
//! [`ask`] runs functions on other cores, [`writes`] takes writes to the shard, [`tracking`] tells
//! connections which keys were written. Uses `client`,
//! `command` and `shard`.
//!
//! A circle stays: an errand is a function over [`state::CoreState`], so the mailboxes of [`node`]
//! name that type, and the state holds the node. The shard is in it: a core's state owns the shard,
//! and the shard's only way to answer other cores is an errand there (`shard::mailbox`). A trait
//! between them would have one implementation and cost an indirect call for each answer.

pub(crate) mod ask;
pub(crate) mod command_stats;
pub(crate) mod ends;
pub(crate) mod node;
pub(crate) mod scan_table;
pub(crate) mod secured;
pub(crate) mod slow_log;
pub(crate) mod state;
mod tracked_keys;
pub(crate) mod tracked_stretches;
pub(crate) mod tracking;
pub(crate) mod writes;
