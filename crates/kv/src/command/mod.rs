//! Commands: what a request says, pure.
//!
//! `parse` makes a `Command` of the arguments; `table` and `spec` describe all commands, `refusal`
//! is what an invalid one is answered. Nothing here knows a connection.

pub(crate) mod args;
pub(crate) mod describe;
pub(crate) mod help;
pub(crate) mod parse;
pub(crate) mod range;
pub(crate) mod refusal;
pub(crate) mod spec;
pub(crate) mod table;
