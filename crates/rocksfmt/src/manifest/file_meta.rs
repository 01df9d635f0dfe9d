//! A MANIFEST's description of an SST file or a blob file.

use crate::coding::{Decoder, fixed64_at, put_lps, put_varint};
use crate::error::{Error, Result};
use crate::key::{InternalKey, SEQUENCE_MAX};
use crate::manifest::tag;

/// Tags of a file's custom fields.
pub(crate) mod custom {
    pub const END: u32 = 1;
    pub const NEED_COMPACTION: u32 = 2;
    pub const MIN_LOG_NUMBER_TO_KEEP: u32 = 3;
    pub const OLDEST_BLOB_FILE: u32 = 4;
    pub const OLDEST_ANCESTOR_TIME: u32 = 5;
    pub const CREATION_TIME: u32 = 6;
    pub const CHECKSUM: u32 = 7;
    pub const CHECKSUM_FUNCTION: u32 = 8;
    pub const UNIQUE_ID: u32 = 12;
    pub const EPOCH: u32 = 13;
    pub const TAIL_BYTES: u32 = 15;
    pub const TIMESTAMPS_PERSISTED: u32 = 16;
    /// Unknown fields with this bit must not be skipped.
    pub const NOT_IGNORABLE: u32 = 1 << 6;
    pub const PATH_ID: u32 = 65;
}

/// An SST file of a level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileMeta {
    /// The number in the file's name.
    pub number: u64,
    /// The index of the database path that holds it; 0 is the database's directory.
    pub path_id: u32,
    /// Its size.
    pub size_bytes: u64,
    /// Smallest internal key.
    pub smallest: Vec<u8>,
    /// Largest internal key. If the file ends in a range tombstone, this is an exclusive sentinel.
    pub largest: Vec<u8>,
    /// Smallest sequence in the file; 0 if the MANIFEST is too old to have it.
    pub smallest_sequence: u64,
    /// Largest sequence in the file.
    pub largest_sequence: u64,
    /// Age among the files of level 0, larger is newer; 0 if the MANIFEST does not have it.
    pub epoch: u64,
    /// The oldest blob file to which it refers; 0 for none.
    pub oldest_blob_file: u64,
    /// Unix seconds; 0 for unknown.
    pub oldest_ancestor_time: u64,
    /// Unix seconds; 0 for unknown.
    pub creation_time: u64,
    /// Both halves of the file's unique id; zeros for unknown.
    pub unique_id: [u64; 2],
    /// Bytes from the first meta block to the end of the file; 0 for unknown.
    pub tail_bytes: u64,
    /// Whether keys contain their user timestamps (in a column family that has them).
    pub timestamps_persisted: bool,
}

impl FileMeta {
    /// A file of which only the size is known.
    pub fn of_size(size_bytes: u64) -> FileMeta {
        FileMeta {
            number: 0,
            path_id: 0,
            size_bytes,
            smallest: Vec::new(),
            largest: Vec::new(),
            smallest_sequence: 0,
            largest_sequence: 0,
            epoch: 0,
            oldest_blob_file: 0,
            oldest_ancestor_time: 0,
            creation_time: 0,
            unique_id: [0; 2],
            tail_bytes: 0,
            timestamps_persisted: true,
        }
    }

    /// The user key of [`FileMeta::smallest`].
    pub fn smallest_user_key(&self) -> &[u8] {
        user_key(&self.smallest)
    }

    /// The user key of [`FileMeta::largest`].
    pub fn largest_user_key(&self) -> &[u8] {
        user_key(&self.largest)
    }

    /// Reads the payload of a new-file tag after its level. Also returns the smallest log number to
    /// keep, which old writers stored here.
    pub(crate) fn decode(tag: u32, d: &mut Decoder<'_>) -> Result<(FileMeta, Option<u64>)> {
        let number = d.varint64("file number")?;
        let path_id = match tag {
            tag::NEW_FILE3 => d.varint32("path id")?,
            _ => 0,
        };
        let size_bytes = d.varint64("file size")?;
        let smallest = bound(d, "smallest key")?;
        let largest = bound(d, "largest key")?;
        let mut file =
            FileMeta { number, path_id, smallest, largest, ..FileMeta::of_size(size_bytes) };
        if tag != tag::NEW_FILE {
            file.smallest_sequence = d.varint64("smallest sequence")?;
            file.largest_sequence = d.varint64("largest sequence")?;
            if file.largest_sequence > SEQUENCE_MAX {
                return Err(Error::corruption(format!(
                    "file {number} has largest sequence {}, the format ends at {SEQUENCE_MAX}",
                    file.largest_sequence
                )));
            }
        }
        let mut min_log = None;
        if tag == tag::NEW_FILE4 {
            loop {
                let field = d.varint32("file field tag")?;
                if field == custom::END {
                    break;
                }
                let value = d.lps("file field")?;
                file.custom(field, value, &mut min_log)
                    .map_err(|e| e.at(format!("field {field} of file {number}")))?;
            }
        }
        Ok((file, min_log))
    }

    /// Appends a new-file field of the current form, tag and level first.
    pub(crate) fn encode(&self, level: u32, out: &mut Vec<u8>) {
        put_varint(out, u64::from(tag::NEW_FILE4));
        put_varint(out, u64::from(level));
        put_varint(out, self.number);
        put_varint(out, self.size_bytes);
        put_lps(out, &self.smallest);
        put_lps(out, &self.largest);
        put_varint(out, self.smallest_sequence);
        put_varint(out, self.largest_sequence);
        for (field, value) in [
            (custom::OLDEST_BLOB_FILE, self.oldest_blob_file),
            (custom::OLDEST_ANCESTOR_TIME, self.oldest_ancestor_time),
            (custom::CREATION_TIME, self.creation_time),
            (custom::EPOCH, self.epoch),
            (custom::TAIL_BYTES, self.tail_bytes),
        ] {
            if value != 0 {
                let mut varint = Vec::new();
                put_varint(&mut varint, value);
                put_varint(out, u64::from(field));
                put_lps(out, &varint);
            }
        }
        if self.unique_id != [0; 2] {
            put_varint(out, u64::from(custom::UNIQUE_ID));
            put_lps(out, &self.unique_id.map(u64::to_le_bytes).concat());
        }
        if self.path_id != 0 {
            put_varint(out, u64::from(custom::PATH_ID));
            put_lps(out, &[self.path_id as u8]);
        }
        if !self.timestamps_persisted {
            put_varint(out, u64::from(custom::TIMESTAMPS_PERSISTED));
            put_lps(out, &[0]);
        }
        put_varint(out, u64::from(custom::END));
    }

    fn custom(&mut self, field: u32, value: &[u8], min_log: &mut Option<u64>) -> Result<()> {
        let number = |name| Decoder::new(value).varint64(name);
        let byte = |name: &str| match value {
            &[byte] => Ok(byte),
            _ => Err(Error::corruption(format!("{name} has {} bytes, expected 1", value.len()))),
        };
        match field {
            custom::NEED_COMPACTION => {
                byte("compaction mark")?;
            }
            custom::MIN_LOG_NUMBER_TO_KEEP => {
                *min_log = Some(Decoder::new(value).fixed64("minimum log number to keep")?);
            }
            custom::OLDEST_BLOB_FILE => self.oldest_blob_file = number("oldest blob file")?,
            custom::OLDEST_ANCESTOR_TIME => self.oldest_ancestor_time = number("ancestor time")?,
            custom::CREATION_TIME => self.creation_time = number("creation time")?,
            custom::CHECKSUM | custom::CHECKSUM_FUNCTION => {}
            custom::UNIQUE_ID => match (fixed64_at(value, 0), fixed64_at(value, 8)) {
                (Some(low), Some(high)) if value.len() == 16 => self.unique_id = [low, high],
                _ => {
                    return Err(Error::corruption(format!(
                        "unique id has {} bytes, expected 16",
                        value.len()
                    )));
                }
            },
            custom::EPOCH => self.epoch = number("epoch number")?,
            custom::TAIL_BYTES => self.tail_bytes = number("tail size")?,
            custom::TIMESTAMPS_PERSISTED => {
                self.timestamps_persisted = byte("timestamp persistence")? != 0;
            }
            custom::PATH_ID => self.path_id = u32::from(byte("path id")?),
            _ if field & custom::NOT_IGNORABLE != 0 => {
                return Err(Error::unsupported("unknown file field"));
            }
            _ => {}
        }
        if self.path_id > 3 {
            return Err(Error::corruption(format!("path id {}", self.path_id)));
        }
        Ok(())
    }
}

fn user_key(internal: &[u8]) -> &[u8] {
    &internal[..internal.len().saturating_sub(8)]
}

/// A bound must be an internal key with a type of RocksDB.
fn bound(d: &mut Decoder<'_>, field: &'static str) -> Result<Vec<u8>> {
    let key = d.lps(field)?;
    let parsed = InternalKey::split(key);
    // A bound need not be an entry. Where a range tombstone is cut, RocksDB writes the type that is
    // above all types that it knows, which is another one in each version.
    if parsed.is_none_or(|key| key.packed as u8 > BOUND_TYPE_MAX) {
        InternalKey::parse(key).map_err(|e| e.at(field))?;
    }
    Ok(key.to_vec())
}

/// The largest type of RocksDB's entries (`kMaxValue`).
const BOUND_TYPE_MAX: u8 = 0x7f;

/// A blob file of a column family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobFileMeta {
    /// The number in the file's name.
    pub number: u64,
    /// The number of its values.
    pub total_count: u64,
    /// Their bytes, including headers and keys.
    pub total_bytes: u64,
    /// The number of dead values.
    pub garbage_count: u64,
    /// Their bytes.
    pub garbage_bytes: u64,
}

impl BlobFileMeta {
    /// Reads a blob file addition.
    pub(crate) fn decode(d: &mut Decoder<'_>) -> Result<BlobFileMeta> {
        let file = BlobFileMeta {
            number: d.varint64("blob file number")?,
            total_count: d.varint64("blob count")?,
            total_bytes: d.varint64("blob bytes")?,
            garbage_count: 0,
            garbage_bytes: 0,
        };
        d.lps("blob checksum method")?;
        d.lps("blob checksum")?;
        BlobFileMeta::skip_custom_fields(d)?;
        Ok(file)
    }

    /// Appends a blob file addition, tag first, and its garbage if there is any.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        for number in
            [u64::from(tag::BLOB_FILE_ADDITION), self.number, self.total_count, self.total_bytes]
        {
            put_varint(out, number);
        }
        // No checksum method, no checksum, no custom fields.
        out.extend_from_slice(&[0, 0, 0]);
        if self.garbage_count > 0 {
            let (number, count) = (self.number, self.garbage_count);
            BlobGarbage { number, count, bytes: self.garbage_bytes }.encode(out);
        }
    }

    pub(crate) fn skip_custom_fields(d: &mut Decoder<'_>) -> Result<()> {
        loop {
            let field = d.varint32("blob field tag")?;
            if field == 0 {
                return Ok(());
            }
            if field & custom::NOT_IGNORABLE != 0 {
                return Err(Error::unsupported(format!("unknown blob field {field}")));
            }
            d.lps("blob field")?;
        }
    }
}

/// Values of a blob file to which nothing refers any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobGarbage {
    /// The blob file.
    pub number: u64,
    /// The number of values that died.
    pub count: u64,
    /// Their bytes, including headers and keys.
    pub bytes: u64,
}

impl BlobGarbage {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        for number in [u64::from(tag::BLOB_FILE_GARBAGE), self.number, self.count, self.bytes] {
            put_varint(out, number);
        }
        out.push(0);
    }

    /// Reads a blob file garbage field.
    pub(crate) fn decode(d: &mut Decoder<'_>) -> Result<BlobGarbage> {
        let garbage = BlobGarbage {
            number: d.varint64("blob file number")?,
            count: d.varint64("blob garbage count")?,
            bytes: d.varint64("blob garbage bytes")?,
        };
        BlobFileMeta::skip_custom_fields(d)?;
        Ok(garbage)
    }
}
