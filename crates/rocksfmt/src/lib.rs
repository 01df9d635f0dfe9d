//! RocksDB's on-disk formats as pure functions: slices in, values out.
//!
//! What is here: SST files (footer, blocks, index, filters, properties, range tombstones, compression,
//! checksums), blob files, write-ahead logs, write batches and the manifest. What is not: any I/O, any cache,
//! any policy. Callers read bytes however they like and hand them over.
//!
//! What always holds:
//! - No byte string makes a function here panic, loop without bound or allocate more than the input (or a
//!   limit given by the caller) justifies. Whatever does not parse is an [`Error`].
//! - Nothing is written to the heap per entry once a cursor is warm.
//! - The formats follow RocksDB 7.8 to 11.x; what is recognised but not read is [`Kind::Unsupported`], with
//!   its name in the text.

#![forbid(unsafe_code)]

mod coding;
mod crc;
mod error;

pub use coding::{
    Decoder, fixed32_at, fixed64_at, hash32, put_lps, put_svarint, put_varint, unzigzag,
    varint32_at, varint64_at,
};
pub use crc::{crc32c, crc32c_append, mask_crc, unmask_crc};
pub use error::{Error, Kind, Result};
