//! Devices: files with three engines, files mapped into memory, and memory.

pub(crate) mod aio;
pub(crate) mod file;
pub(crate) mod mapped;
pub(crate) mod mem;
pub(crate) mod pages;
