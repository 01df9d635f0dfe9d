//! The properties block: an SST's description by its writer.
//!
//! A block of name → value with names strictly ascending. Most values are varint64; the index type
//! is fixed32, the two filter switches are the text "1" or "0". Properties that a reader must obey
//! are fields here; every property is also kept verbatim ([`Properties::raw`]). A missing number
//! reads as 0, and a number that does not parse is ignored, as in RocksDB, because files of many
//! versions exist. The index type is the exception: if the index cannot be read, parsing fails.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::block::data::BlockCursor;
use crate::block::layout::BlockLayout;
use crate::coding::{fixed32_at, fixed64_at, varint64_at};
use crate::error::{Error, Result};
use crate::sst::index::{IndexFormat, IndexType};

const INDEX_TYPE: &[u8] = b"rocksdb.block.based.table.index.type";
const INDEX_USER_KEYS: &[u8] = b"rocksdb.index.key.is.user.key";
const INDEX_DELTA: &[u8] = b"rocksdb.index.value.is.delta.encoded";
const WHOLE_KEY_FILTERING: &[u8] = b"rocksdb.block.based.table.whole.key.filtering";
const PREFIX_FILTERING: &[u8] = b"rocksdb.block.based.table.prefix.filtering";
const EXTERNAL_VERSION: &[u8] = b"rocksdb.external_sst_file.version";
const EXTERNAL_SEQNO: &[u8] = b"rocksdb.external_sst_file.global_seqno";
const EMBEDDED_BLOBS: &[u8] = b"rocksdb.embedded.blob.stats";
const SESSION: &[u8] = b"rocksdb.creating.session.identity";
/// Our own, which other readers take for a user's.
pub(super) const BLOB_VALUES: &str = "millrace.blob.values";
pub(super) const BLOB_BYTES: &str = "millrace.blob.bytes";
const TIMESTAMPS_PERSISTED: &[u8] = b"rocksdb.user.defined.timestamps.persisted";

/// The properties of one SST.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Properties {
    /// The kind of index.
    pub index_type: IndexType,
    /// The encoding of its blocks.
    pub index_format: IndexFormat,
    /// Whether the filter holds whole user keys; if not, a point read must not query it.
    pub whole_key_filtering: bool,
    /// Whether the filter holds key prefixes.
    pub prefix_filtering: bool,
    /// Entries, including range tombstones.
    pub num_entries: u64,
    /// Range tombstones.
    pub num_range_deletions: u64,
    /// Point and range tombstones.
    pub num_deletions: u64,
    /// Merge operands.
    pub num_merge_operands: u64,
    /// Bytes of internal keys before compression.
    pub raw_key_size: u64,
    /// Bytes of values before compression.
    pub raw_value_size: u64,
    /// Values in blob files to which entries refer; 0 in files of other writers than Millrace.
    pub blob_values: u64,
    /// The bytes of these values.
    pub blob_bytes: u64,
    /// Stored bytes of the data blocks.
    pub data_size: u64,
    /// Stored bytes of the index.
    pub index_size: u64,
    /// Stored bytes of the filter.
    pub filter_size: u64,
    /// Data blocks; some versions write 0, so this must not be a reason to refuse a file.
    pub num_data_blocks: u64,
    /// The format version; 0 from older writers.
    pub format_version: u64,
    /// First byte after the data blocks; 0 if unknown.
    pub tail_start_offset: u64,
    /// The file's column family.
    pub column_family_id: u64,
    /// Largest sequence number in the file; 0 if unknown.
    pub largest_sequence: u64,
    /// When the oldest of its entries were written, about, in Unix seconds; 0 if unknown.
    pub creation_time: u64,
    /// When the file was written, in Unix seconds; 0 if unknown.
    pub file_creation_time: u64,
    /// Name of the comparator, or empty.
    pub comparator: Vec<u8>,
    /// Name of the merge operator, or empty, or `nullptr`.
    pub merge_operator: Vec<u8>,
    /// The value of `rocksdb.compression`.
    pub compression: Vec<u8>,
    /// Name of the prefix extractor, or empty, or `nullptr`.
    pub prefix_extractor: Vec<u8>,
    /// Whether user-defined timestamps were stripped from the keys.
    pub timestamps_stripped: bool,
    /// Whether blob values may be embedded in this file.
    pub embedded_blobs: bool,
    /// Version of the external file format, if the file was created for ingestion.
    pub external_version: Option<u32>,
    /// The global sequence number stored in an ingested file; 0 means "see the MANIFEST".
    pub external_sequence: Option<u64>,
    session: Option<Box<str>>,
    raw: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Properties {
    /// Parses the contents of a properties block.
    pub fn parse(data: &[u8]) -> Result<Properties> {
        Properties::parse_inner(data).map_err(|e| e.at("properties block"))
    }

    fn parse_inner(data: &[u8]) -> Result<Properties> {
        let mut raw = BTreeMap::new();
        let mut previous: Option<Vec<u8>> = None;
        for_each(data, |name, value| {
            if previous.as_deref().is_some_and(|p| p >= name) {
                return Err(Error::corruption(format!(
                    "{} is out of order",
                    String::from_utf8_lossy(name)
                )));
            }
            previous = Some(name.to_vec());
            raw.insert(name.to_vec(), data.get(value).unwrap_or_default().to_vec());
            Ok(())
        })?;
        let number = |name: &str| match raw.get(name.as_bytes()) {
            Some(value) => varint64_at(value, 0).map_or(0, |(v, _)| v),
            None => 0,
        };
        let bytes = |name: &str| raw.get(name.as_bytes()).cloned().unwrap_or_default();
        let flag = |name: &[u8]| {
            raw.get(name).and_then(|v| varint64_at(v, 0)).is_some_and(|(v, _)| v != 0)
        };
        let switch = |name: &[u8]| raw.get(name).is_none_or(|v| v.as_slice() != b"0");
        let index_type = match raw.get(INDEX_TYPE) {
            None => IndexType::BinarySearch,
            Some(value) => match fixed32_at(value, 0) {
                Some(v) => IndexType::from_u32(v)?,
                None => {
                    return Err(Error::corruption(format!("index type of {} bytes", value.len())));
                }
            },
        };
        Ok(Properties {
            index_type,
            index_format: IndexFormat {
                user_keys: flag(INDEX_USER_KEYS),
                delta_values: flag(INDEX_DELTA),
                first_keys: index_type == IndexType::BinarySearchWithFirstKey,
            },
            whole_key_filtering: switch(WHOLE_KEY_FILTERING),
            prefix_filtering: switch(PREFIX_FILTERING),
            num_entries: number("rocksdb.num.entries"),
            num_range_deletions: number("rocksdb.num.range-deletions"),
            num_deletions: number("rocksdb.deleted.keys"),
            num_merge_operands: number("rocksdb.merge.operands"),
            raw_key_size: number("rocksdb.raw.key.size"),
            raw_value_size: number("rocksdb.raw.value.size"),
            blob_values: number(BLOB_VALUES),
            blob_bytes: number(BLOB_BYTES),
            data_size: number("rocksdb.data.size"),
            index_size: number("rocksdb.index.size"),
            filter_size: number("rocksdb.filter.size"),
            num_data_blocks: number("rocksdb.num.data.blocks"),
            format_version: number("rocksdb.format.version"),
            tail_start_offset: number("rocksdb.tail.start.offset"),
            column_family_id: number("rocksdb.column.family.id"),
            largest_sequence: number("rocksdb.key.largest.seqno"),
            creation_time: number("rocksdb.creation.time"),
            file_creation_time: number("rocksdb.file.creation.time"),
            comparator: bytes("rocksdb.comparator"),
            merge_operator: bytes("rocksdb.merge.operator"),
            compression: bytes("rocksdb.compression"),
            prefix_extractor: bytes("rocksdb.prefix.extractor.name"),
            timestamps_stripped: raw.contains_key(TIMESTAMPS_PERSISTED)
                && !flag(TIMESTAMPS_PERSISTED),
            embedded_blobs: raw.contains_key(EMBEDDED_BLOBS),
            external_version: raw.get(EXTERNAL_VERSION).and_then(|v| fixed32_at(v, 0)),
            external_sequence: raw.get(EXTERNAL_SEQNO).and_then(|v| fixed64_at(v, 0)),
            session: raw.get(SESSION).and_then(|name| session(name)),
            raw,
        })
    }

    /// Every property by name, including the user's.
    pub fn raw(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.raw.iter().map(|(k, v)| (k.as_slice(), v.as_slice()))
    }

    /// The identity of the process that wrote the file: with the file's number it names the file
    /// among all files of all databases. `None` in files of writers that state none.
    pub fn session(&self) -> Option<&str> {
        self.session.as_deref()
    }

    /// Drops the properties by name, which are most of its memory: [`Properties::raw`] and
    /// [`Properties::get`] have none afterwards.
    pub fn forget_names(&mut self) {
        self.raw.clear();
    }

    /// One property by name.
    pub fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.raw.get(name).map(Vec::as_slice)
    }

    /// The sequence number of all entries of an ingested file, instead of the stored 0; `None` for
    /// files with their own sequences. `manifest_largest` is the file's largest sequence number in
    /// the MANIFEST.
    pub fn global_sequence(&self, manifest_largest: u64) -> Result<Option<u64>> {
        let stored = self.external_sequence;
        match (self.external_version, stored) {
            (None, None) => Ok(None),
            (None, Some(s)) => Err(Error::corruption(format!(
                "global sequence {s} in a file without external version"
            ))),
            (Some(1), None | Some(0)) => Ok(None),
            (Some(1), Some(s)) => {
                Err(Error::corruption(format!("global sequence {s} in external version 1")))
            }
            (Some(2), None | Some(0)) => Ok(Some(manifest_largest)),
            (Some(2), Some(s)) if manifest_largest == 0 || s == manifest_largest => Ok(Some(s)),
            (Some(2), Some(s)) => Err(Error::corruption(format!(
                "global sequence {s} stored, {manifest_largest} in the manifest"
            ))),
            (Some(v), _) => Err(Error::unsupported(format!("external file version {v}"))),
        }
    }

    /// The range of the global sequence number in an uncompressed properties block. It may have
    /// been patched after the block was written: if the block's checksum fails, set these bytes to
    /// zero and check again.
    pub fn global_sequence_range(data: &[u8]) -> Option<Range<usize>> {
        let mut found = None;
        for_each(data, |name, value| {
            if name == EXTERNAL_SEQNO && value.len() == 8 {
                found = Some(value);
            }
            Ok(())
        })
        .ok()?;
        found
    }
}

/// The name of a process, if it is one.
fn session(name: &[u8]) -> Option<Box<str>> {
    let is_name = name.iter().all(u8::is_ascii_alphanumeric) && (1..=64).contains(&name.len());
    std::str::from_utf8(name).ok().filter(|_| is_name).map(Box::from)
}

/// Calls `f` with every key and the range of its value.
fn for_each(data: &[u8], mut f: impl FnMut(&[u8], Range<usize>) -> Result<()>) -> Result<()> {
    let layout = BlockLayout::parse(data)?;
    let mut cursor = BlockCursor::new();
    let mut more = cursor.seek_to_first(data, &layout)?;
    while more {
        f(cursor.key(), cursor.value_range())?;
        more = cursor.next(data, &layout)?;
    }
    Ok(())
}
