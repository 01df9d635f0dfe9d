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

mod batch;
mod blob;
mod block;
mod block_builder;
mod block_head;
mod checksum;
mod coding;
mod compress;
mod compressor;
mod crc;
mod cursor;
mod edit;
mod entity;
mod error;
mod file_meta;
mod filter;
mod footer;
mod group_end;
mod index;
mod index_search;
mod key;
mod levels;
mod log;
mod log_physical;
mod log_scan;
mod log_start;
mod log_writer;
mod log_zstd;
mod manifest;
mod metaindex;
mod names;
mod options_file;
mod properties;
mod rangedel;
mod search;
mod sst_builder;
mod xxph3;

#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz;
#[cfg(any(test, feature = "testing"))]
mod fuzz_logs;
#[cfg(any(test, feature = "testing"))]
mod test_block;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use batch::{BATCH_HEADER_BYTES, BatchOps, BatchWriter, Marker, Op, WriteBatch, keys_noted};
pub use blob::{
    BLOB_FOOTER_BYTES, BLOB_HEADER_BYTES, BLOB_RECORD_HEADER_BYTES, BlobFooter, BlobHeader,
    BlobIndex, BlobRecord,
};
pub use block::{BlockCursor, BlockLayout, Lookup, point_lookup};
pub use block_head::{HeadLookup, head_lookup};
pub use checksum::{BLOCK_TRAILER_BYTES, BlockCheck, BlockSum, ChecksumType, compression_byte};
pub use coding::{
    Decoder, fixed32_at, fixed64_at, hash32, put_lps, put_svarint, put_varint, unzigzag,
    varint32_at, varint64_at,
};
pub use compress::{Compression, Decompressor, Dictionary};
pub use crc::{crc32c, crc32c_append, mask_crc, unmask_crc};
pub use edit::{BlobGarbage, EditKind, LEVELS_MAX, VersionEdit, WalAddition};
pub use entity::{default_column, timed_put_value};
pub use error::{Error, Kind, Result};
pub use file_meta::{BlobFileMeta, FileMeta};
pub use filter::{AlwaysMatch, BloomBuilder, FilterKey, FilterLayout};
pub use footer::{BlockHandle, FOOTER_BYTES, Footer};
pub use group_end::{GroupEnd, TornGroup};
pub use index::{IndexCursor, IndexFormat, IndexLayout, IndexType, index_lookup, index_of_one};
pub use index_search::IndexSearch;
pub use key::{
    Comparator, InternalKey, KEY_TRAILER_BYTES, SEEK_TYPE, SENTINEL_PACKED, SEQUENCE_MAX,
    ValueType, compare_bytes, pack, put_internal_key, set_seek_key, unpack, value_type,
};
pub use log::{
    LOG_BLOCK_BYTES, LOG_RECORD_BYTES_MAX, LogEnd, LogKind, LogReader, LogRecord, PredecessorWal,
    is_recyclable_log,
};
pub use log_scan::{DamageScan, LaterRecord, is_torn_group};
pub use log_start::LogStart;
pub use log_writer::LogWriter;
pub use log_zstd::looks_compressed;
pub use manifest::{ColumnFamily, ManifestReplay, ManifestState};
pub use metaindex::{FilterHandle, Metaindex};
pub use names::{FileName, parse_current};
pub use options_file::{OPTIONS_BYTES_MAX, OptionsFile};
pub use properties::Properties;
pub use rangedel::{Cover, RangeTombstones, RangeTombstonesBuilder};
pub use sst_builder::{SstBuilder, SstOptions};
pub use xxph3::xxph3;
