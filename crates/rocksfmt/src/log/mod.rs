//! RocksDB's log format, the container of write-ahead logs and MANIFESTs.
//!
//! `physical` is the foundation; `reader` and `writer` use it, and `scan` continues where the
//! reader stops. `group_end` and `start` are records that only Millrace writes. The room uses
//! `batch`, and `manifest` for one question about a torn MANIFEST (`scan`).

pub(crate) mod group_end;
pub(crate) mod physical;
pub(crate) mod reader;
pub(crate) mod scan;
pub(crate) mod start;
pub(crate) mod writer;
pub(crate) mod zstd;

#[cfg(test)]
mod tests;
