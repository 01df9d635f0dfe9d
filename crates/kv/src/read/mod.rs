//! Replies that read the database: of a few keys (`small`), or of any size (`stream`, `walk`).

pub(crate) mod glob;
pub(crate) mod small;
pub(crate) mod stream;
pub(crate) mod walk;
