//! Reading: gets, multi-gets and iterators of one core.
//!
//! `reader` is the entry point. `point` looks keys up; `iter` walks over all sorted runs,
//! `level_iter` and `walk` over one; `ahead` reads their blocks ahead. `block`, `cache` and
//! `flight` bring blocks into memory, `blob` values from blob files. This room uses the state that
//! all cores share (`db`, `version`, `table`, `mem`), and nothing of `write` or `open`.

pub(crate) mod ahead;
pub(crate) mod blob;
pub(crate) mod block;
pub(crate) mod cache;
pub(crate) mod flight;
pub(crate) mod iter;
pub(crate) mod level_iter;
pub(crate) mod point;
pub(crate) mod reader;
pub(crate) mod seek;
pub(crate) mod snapshot;
pub(crate) mod value;
pub(crate) mod walk;
