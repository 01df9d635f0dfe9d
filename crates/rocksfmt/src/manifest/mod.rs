//! The MANIFEST, and the other files that describe a database.
//!
//! `replay` applies `edit`s and makes a `state` of them, whose files `levels` sorts. `edit` uses
//! `file_meta`, and both use `tag`. `names`, `options_file` and `options_text` stand alone. The
//! room uses only the files at the crate's root.

pub(crate) mod edit;
pub(crate) mod file_meta;
pub(crate) mod levels;
pub(crate) mod names;
pub(crate) mod options_file;
pub(crate) mod options_text;
pub(crate) mod replay;
pub(crate) mod state;
pub(crate) mod tag;

#[cfg(test)]
mod tests;
