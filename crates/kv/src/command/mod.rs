//! Commands: the content of a request, without I/O.
//!
//! [`parse`](parse::parse) turns arguments into a [`Command`](commands::Command). `spec` and
//! `table` describe all commands, `lookup` finds one by its name; `refusal` holds the errors of
//! invalid ones. The values that commands work with are here too: patterns (`glob`), operations on
//! values (`operation`), `INCRBYFLOAT`'s numbers (`long_double`). This is the lowest room: it uses
//! `resp` and the engine's error type, and no other room.

pub(crate) mod args;
pub(crate) mod bits;
pub(crate) mod commands;
pub(crate) mod describe;
pub(crate) mod dump;
pub(crate) mod fields;
pub(crate) mod glob;
pub(crate) mod help;
pub(crate) mod lcs;
pub(crate) mod long_double;
pub(crate) mod lookup;
pub(crate) mod operation;
pub(crate) mod options;
pub(crate) mod parse;
pub(crate) mod range;
pub(crate) mod refusal;
pub(crate) mod said;
pub(crate) mod spec;
pub(crate) mod table;
