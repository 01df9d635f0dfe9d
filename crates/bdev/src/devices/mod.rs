//! Devices: files with four engines, memory, exports of NBD servers, and null.
//!
//! They build on `io`, `geometry`, `uri` and `error`, and know neither channels nor layers.

pub(crate) mod aio;
pub(crate) mod file;
pub(crate) mod mem;
pub(crate) mod nbd;
pub(crate) mod null;
pub(crate) mod pages;
