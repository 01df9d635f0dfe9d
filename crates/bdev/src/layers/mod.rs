//! Layers: devices over another device that delay, limit, fail or track its requests.

pub(crate) mod delay;
pub(crate) mod dirty;
pub(crate) mod failing;
pub(crate) mod limit;
pub(crate) mod marks;
