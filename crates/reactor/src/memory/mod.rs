//! Memory: aligned buffers of a core (`buf`, and `region` for those that the ring knows), ranges
//! shared with other processes, which may be lost at any time (`guard`, over the table `ranges`),
//! and files mapped into memory (`mapping`, which is resized behind a `gate`, and `resident`, what
//! a core knows of it); `prefetch` is a hint to the processor, and `background` a thread that
//! unmaps what takes long. Uses the waits of a core and the
//! open file of `driver`.

pub(crate) mod background;
pub(crate) mod buf;
pub(crate) mod gate;
pub(crate) mod guard;
pub(crate) mod mapping;
pub(crate) mod prefetch;
pub(crate) mod ranges;
pub(crate) mod region;
pub(crate) mod resident;
