//! Layers: devices over another device, which delay, limit, fail or note what goes through them.

pub(crate) mod delay;
pub(crate) mod dirty;
pub(crate) mod failing;
pub(crate) mod limit;
pub(crate) mod marks;
