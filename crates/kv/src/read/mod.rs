//! Commands that read the database: single keys and small replies (`small`), replies of any size
//! (`stream`, over a `walk`), stretches of blob files (`stretch`), hashes of keys (`index`). Uses
//! `core`, `client` and `command`.

pub(crate) mod index;
pub(crate) mod small;
pub(crate) mod stream;
pub(crate) mod stretch;
pub(crate) mod walk;
