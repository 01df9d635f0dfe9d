//! Commands that read the database: single keys and small replies (`small`), replies of any size
//! (`stream`, over a `walk`).

pub(crate) mod glob;
pub(crate) mod small;
pub(crate) mod stream;
pub(crate) mod walk;
