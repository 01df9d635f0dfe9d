//! Reading: gets, multi-gets and iterators of one core.
//!
//! Imports point down this list:
//!
//! - `reader`: the entry point, one core's handle on a database.
//! - `shared`: lookups of what is in memory by threads that are not cores.
//! - `point` looks keys up. `iter` merges all sorted runs, `level_iter` iterates over one, `ahead`
//!   reads its blocks ahead, `walk` finds them in the index. `covering` has the range tombstones
//!   that an iterator sees.
//! - `warm` brings what the lookups of several keys will read into the processor's caches.
//! - `operands` merges the operands that a read finds.
//! - `load` brings blocks and blobs into memory; `blob` finds values in blob files.
//! - `state`: what the reader of one core owns. `ReadContext` is a reader with the view that one
//!   operation uses.
//! - `run`: the tables of a sorted run. `shared_cache`: a cache that any thread reads. `view`,
//!   `value`, `snapshot`, `chunk`, `flight`, `cache`, `block`, `seek`, `stats`: the parts.
//!
//! This room uses the state that all cores share (`db`, `version`, `table`, `mem`), and nothing of
//! `write` or `open`.

pub(crate) mod ahead;
pub(crate) mod blob;
mod block;
mod cache;
mod chunk;
mod covering;
mod flight;
pub(crate) mod iter;
pub(crate) mod level_iter;
mod load;
mod operands;
mod point;
pub(crate) mod reader;
pub(crate) mod run;
mod seek;
pub(crate) mod shared;
pub(crate) mod shared_cache;
pub(crate) mod snapshot;
mod state;
pub(crate) mod stats;
pub(crate) mod stretch;
pub(crate) mod value;
mod view;
pub(crate) mod walk;
pub(crate) mod warm;
