//! Layers: devices over another device that delay, limit, fail or track its requests.
//!
//! Layers and channels refer to each other: a layer's channel holds the [`Channel`] of the device
//! below it, and a `Channel` holds the channel of its outermost layer. A composite device is
//! recursive, and a `match` over the kinds keeps it free of calls through a table. In the same way
//! a [`Bdev`](crate::Bdev) holds the device below each layer.
//!
//! [`Channel`]: crate::Channel

pub(crate) mod delay;
pub(crate) mod dirty;
pub(crate) mod failing;
pub(crate) mod limit;
pub(crate) mod marks;
pub(crate) mod mirror;
