//! RocksDB's on-disk formats as pure functions: slices in, values out.
//!
//! Included: SST files (footer, blocks, index, filters, properties, range tombstones, compression,
//! checksums), blob files, write-ahead logs, write batches and the MANIFEST. Not included: I/O,
//! caches, policy. Callers read bytes however they like and pass them in.
//!
//! Invariants:
//! - No input makes a function here panic, loop without bound or allocate more than the input (or a
//!   limit given by the caller) justifies. Input that does not parse is an [`Error`].
//! - A warm cursor allocates nothing per entry.
//! - The formats follow RocksDB 7.8 to 11.x. A feature that is recognised but not read is
//!   [`Kind::Unsupported`], with its name in the text.

#![forbid(unsafe_code)]

mod batch;
mod block;
mod coding;
mod crc;
mod entity;
mod error;
mod key;
mod log;
mod manifest;
mod sst;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz;

pub use batch::{BATCH_HEADER_BYTES, BatchOps, BatchWriter, Marker, Op, WriteBatch, keys_noted};
pub use block::checksum::{
    BLOCK_TRAILER_BYTES, BlockCheck, BlockSum, ChecksumType, compression_byte,
};
pub use block::compress::CodecOptions;
pub use block::data::{BlockCursor, Lookup, point_lookup};
pub use block::decompress::{Compression, Decompressor, Dictionary};
pub use block::head::{HeadLookup, head_lookup};
pub use block::layout::BlockLayout;
pub use coding::{
    Decoder, fixed32_at, fixed64_at, hash32, put_lps, put_svarint, put_varint, unzigzag,
    varint32_at, varint64_at,
};
pub use crc::{crc32c, crc32c_append, mask_crc, unmask_crc};
pub use entity::{blob_columns, default_column, timed_put_value};
pub use error::{Error, Kind, Result};
pub use key::{
    Comparator, InternalKey, KEY_TRAILER_BYTES, SEEK_TYPE, SENTINEL_PACKED, SEQUENCE_MAX,
    ValueType, compare_bytes, pack, put_internal_key, set_seek_key, unpack, value_type,
};
pub use log::group_end::{GroupEnd, TornGroup};
pub use log::physical::LOG_BLOCK_BYTES;
pub use log::reader::{
    LOG_RECORD_BYTES_MAX, LogEnd, LogKind, LogReader, LogRecord, PredecessorWal, is_recyclable_log,
};
pub use log::scan::{DamageScan, LaterRecord, is_torn_group};
pub use log::start::LogStart;
pub use log::writer::LogWriter;
pub use log::zstd::looks_compressed;
pub use manifest::edit::{EditKind, LEVELS_MAX, VersionEdit, WalAddition};
pub use manifest::file_meta::{BlobFileMeta, BlobGarbage, FileMeta};
pub use manifest::names::{FileName, parse_current};
pub use manifest::options_file::{OPTIONS_BYTES_MAX, OptionsFile, escape_option};
pub use manifest::options_text::options_with_families;
pub use manifest::replay::ManifestReplay;
pub use manifest::state::{ColumnFamily, ManifestState};
pub use sst::blob::{
    BLOB_FOOTER_BYTES, BLOB_HEADER_BYTES, BLOB_RECORD_HEADER_BYTES, BlobFooter, BlobHeader,
    BlobIndex, BlobRecord,
};
pub use sst::builder::SstBuilder;
pub use sst::builder::held::DictionaryTraining;
pub use sst::builder::options::{BlockOptions, SstIdentity, SstOptions, SstTimes};
pub use sst::filter::{AlwaysMatch, BloomBuilder, FilterKey, FilterLayout};
pub use sst::footer::{BlockHandle, FOOTER_BYTES, Footer};
pub use sst::identity::session_id;
pub use sst::index::{
    IndexCursor, IndexFormat, IndexLayout, IndexType, index_lookup, index_of_one,
};
pub use sst::index_search::{IndexSearch, IndexSteps};
pub use sst::metaindex::{FilterHandle, Metaindex};
pub use sst::properties::Properties;
pub use sst::range_del_aggregator::{
    ClippedRange, Cutting, Fragments, RangeDelAggregator, RangeTombstone, clip,
};
pub use sst::rangedel::{
    Cover, RangeTombstones, RangeTombstonesBuilder, RangeTombstonesParsing, RangeTombstonesSorting,
    Stretch,
};
pub use sst::xxph3::xxph3;
