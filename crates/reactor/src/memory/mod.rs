//! Memory: aligned buffers of a core (`buf`), and ranges shared with other processes, which may be
//! lost at any time (`guard`, over the table `ranges`). Uses only the waits of a core.

pub(crate) mod buf;
pub(crate) mod guard;
pub(crate) mod ranges;
