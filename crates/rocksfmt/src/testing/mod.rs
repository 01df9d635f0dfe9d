//! Builds log bytes for tests: logs, batches and version edits, well-formed unless a test asks
//! otherwise.
//!
//! The builders only follow the format (no syncs, no recovery of a file's end), so they cannot
//! replace a writer. As test code, this room may use all others.

pub(crate) mod block;

use crate::batch::tag as batch_tag;
use crate::coding::{put_lps, put_varint};
use crate::crc::{crc32c, mask_crc};
use crate::key::{pack, put_internal_key};
use crate::log::physical::{HEADER_BYTES, LOG_BLOCK_BYTES, RECYCLABLE_HEADER_BYTES, kind};
use crate::log::writer::LogWriter;
use crate::manifest::file_meta::FileMeta;
use crate::manifest::tag;

/// Builds the bytes of a log.
#[derive(Clone, Debug, Default)]
pub struct LogBuilder {
    bytes: Vec<u8>,
    recyclable: Option<u64>,
    compressed: bool,
}

impl LogBuilder {
    /// A log of the legacy form.
    pub fn legacy() -> LogBuilder {
        LogBuilder::default()
    }

    /// A log of the recyclable form with the given number.
    pub fn recyclable(number: u64) -> LogBuilder {
        LogBuilder { recyclable: Some(number), ..LogBuilder::default() }
    }

    /// Starts the log with the record that says it is compressed, and compresses all further
    /// records.
    pub fn compressed(mut self) -> LogBuilder {
        self.physical(kind::SET_COMPRESSION, None, &7u32.to_le_bytes());
        self.compressed = true;
        self
    }

    /// The bytes so far.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The finished bytes.
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }

    /// Appends bytes as they are.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut LogBuilder {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Appends one physical record at the end of the log, whether it fits into the block or not.
    pub fn physical(&mut self, kind: u8, number: Option<u64>, payload: &[u8]) -> &mut LogBuilder {
        let mut covered = vec![kind];
        if let Some(number) = number {
            covered.extend_from_slice(&(number as u32).to_le_bytes());
        }
        covered.extend_from_slice(payload);
        let crc = mask_crc(crc32c(&covered));
        self.bytes.extend_from_slice(&crc.to_le_bytes());
        self.bytes.extend_from_slice(&(payload.len() as u16).to_le_bytes());
        self.bytes.extend_from_slice(&covered);
        self
    }

    /// Appends a record without data, such as a timestamp size record, after padding the block if
    /// necessary.
    pub fn meta(&mut self, kind: u8, payload: &[u8]) -> &mut LogBuilder {
        let number = self.recyclable;
        self.pad(payload.len());
        self.physical(kind, number, payload)
    }

    /// Appends a logical record, split over blocks as needed.
    pub fn append(&mut self, data: &[u8]) -> &mut LogBuilder {
        let compressed;
        let mut record = data;
        if self.compressed {
            compressed = zstd::stream::encode_all(data, 3).expect("compressing into memory");
            record = &compressed;
        }
        let mut writer = LogWriter::new(self.recyclable, self.bytes.len() as u64);
        writer.append(record, &mut self.bytes);
        self
    }

    fn header_bytes(&self) -> usize {
        match self.recyclable {
            Some(_) => RECYCLABLE_HEADER_BYTES,
            None => HEADER_BYTES,
        }
    }

    /// Fills the block with zeros if no record with `payload` bytes fits.
    fn pad(&mut self, payload: usize) {
        let left = LOG_BLOCK_BYTES - self.bytes.len() % LOG_BLOCK_BYTES;
        if left < self.header_bytes() + payload {
            self.bytes.resize(self.bytes.len() + left, 0);
        }
    }
}

/// Builds a write batch. Column family 0 gets the short tags.
#[derive(Clone, Debug)]
pub struct BatchBuilder {
    bytes: Vec<u8>,
    count: u32,
}

impl BatchBuilder {
    /// An empty batch whose first operation has `sequence`.
    pub fn new(sequence: u64) -> BatchBuilder {
        let mut bytes = sequence.to_le_bytes().to_vec();
        bytes.extend_from_slice(&[0; 4]);
        BatchBuilder { bytes, count: 0 }
    }

    /// The finished batch, with the correct count.
    pub fn finish(self) -> Vec<u8> {
        let count = self.count;
        self.finish_with_count(count)
    }

    /// The finished batch with any count.
    pub fn finish_with_count(mut self, count: u32) -> Vec<u8> {
        self.bytes[8..12].copy_from_slice(&count.to_le_bytes());
        self.bytes
    }

    /// Appends a tag and its strings; does not count it.
    pub fn record(mut self, tag: u8, strings: &[&[u8]]) -> BatchBuilder {
        self.bytes.push(tag);
        for string in strings {
            put_lps(&mut self.bytes, string);
        }
        self
    }

    fn operation(mut self, tags: (u8, u8), cf: u32, strings: &[&[u8]]) -> BatchBuilder {
        self.count += 1;
        if cf == 0 {
            return self.record(tags.0, strings);
        }
        self.bytes.push(tags.1);
        put_varint(&mut self.bytes, u64::from(cf));
        for string in strings {
            put_lps(&mut self.bytes, string);
        }
        self
    }

    /// Sets a key.
    pub fn put(self, cf: u32, key: &[u8], value: &[u8]) -> BatchBuilder {
        self.operation((batch_tag::PUT, batch_tag::CF_PUT), cf, &[key, value])
    }

    /// Deletes a key.
    pub fn delete(self, cf: u32, key: &[u8]) -> BatchBuilder {
        self.operation((batch_tag::DELETE, batch_tag::CF_DELETE), cf, &[key])
    }

    /// Deletes a key that was set exactly once.
    pub fn single_delete(self, cf: u32, key: &[u8]) -> BatchBuilder {
        let tags = (batch_tag::SINGLE_DELETE, batch_tag::CF_SINGLE_DELETE);
        self.operation(tags, cf, &[key])
    }

    /// Adds a merge operand.
    pub fn merge(self, cf: u32, key: &[u8], operand: &[u8]) -> BatchBuilder {
        self.operation((batch_tag::MERGE, batch_tag::CF_MERGE), cf, &[key, operand])
    }

    /// Deletes a range of keys.
    pub fn delete_range(self, cf: u32, begin: &[u8], end: &[u8]) -> BatchBuilder {
        let tags = (batch_tag::DELETE_RANGE, batch_tag::CF_DELETE_RANGE);
        self.operation(tags, cf, &[begin, end])
    }

    /// Sets a key to a blob reference.
    pub fn blob_index(self, cf: u32, key: &[u8], index: &[u8]) -> BatchBuilder {
        let tags = (batch_tag::BLOB_INDEX, batch_tag::CF_BLOB_INDEX);
        self.operation(tags, cf, &[key, index])
    }

    /// Sets a key to encoded columns.
    pub fn entity(self, cf: u32, key: &[u8], columns: &[u8]) -> BatchBuilder {
        self.operation((batch_tag::ENTITY, batch_tag::CF_ENTITY), cf, &[key, columns])
    }

    /// Sets a key with its time of writing.
    pub fn timed_put(self, cf: u32, key: &[u8], value: &[u8], time: u64) -> BatchBuilder {
        let packed = [value, &time.to_le_bytes()].concat();
        let tags = (batch_tag::TIMED_PUT, batch_tag::CF_TIMED_PUT);
        self.operation(tags, cf, &[key, &packed])
    }

    /// Adds an annotation.
    pub fn log_data(self, data: &[u8]) -> BatchBuilder {
        self.record(batch_tag::LOG_DATA, &[data])
    }
}

/// Builds a version edit, tag by tag.
#[derive(Clone, Debug, Default)]
pub struct EditBuilder {
    bytes: Vec<u8>,
}

impl EditBuilder {
    /// An edit without tags.
    pub fn new() -> EditBuilder {
        EditBuilder::default()
    }

    /// The finished record.
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }

    /// Appends a tag followed by varints.
    pub fn numbers(mut self, tag: u32, numbers: &[u64]) -> EditBuilder {
        put_varint(&mut self.bytes, u64::from(tag));
        for &number in numbers {
            put_varint(&mut self.bytes, number);
        }
        self
    }

    /// Appends a tag followed by a string.
    pub fn string(mut self, tag: u32, string: &[u8]) -> EditBuilder {
        put_varint(&mut self.bytes, u64::from(tag));
        put_lps(&mut self.bytes, string);
        self
    }

    /// Appends bytes as they are.
    pub fn raw(mut self, bytes: &[u8]) -> EditBuilder {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// The fields that every database has: log number, next file number, last sequence.
    pub fn required(self, log: u64, next_file: u64, last_sequence: u64) -> EditBuilder {
        self.numbers(tag::LOG_NUMBER, &[log])
            .numbers(tag::NEXT_FILE_NUMBER, &[next_file])
            .numbers(tag::LAST_SEQUENCE, &[last_sequence])
    }

    /// Sets the record's column family.
    pub fn column_family(self, id: u32) -> EditBuilder {
        self.numbers(tag::COLUMN_FAMILY, &[u64::from(id)])
    }

    /// Adds the record's column family, with a comparator.
    pub fn add_column_family(self, name: &str, comparator: &str) -> EditBuilder {
        self.string(tag::COLUMN_FAMILY_ADD, name.as_bytes())
            .string(tag::COMPARATOR, comparator.as_bytes())
    }

    /// Removes a file from a level.
    pub fn delete_file(self, level: u32, number: u64) -> EditBuilder {
        self.numbers(tag::DELETED_FILE, &[u64::from(level), number])
    }

    /// Adds a file to a level, in the current form.
    pub fn add_file(mut self, level: u32, file: &FileMeta) -> EditBuilder {
        file.encode(level, &mut self.bytes);
        self
    }
}

/// A file of values from `smallest` to `largest` user key with the given sequences.
pub fn file_meta(number: u64, smallest: &[u8], largest: &[u8], sequences: (u64, u64)) -> FileMeta {
    let key = |user: &[u8], sequence| {
        let mut key = Vec::new();
        put_internal_key(&mut key, user, pack(sequence, 1));
        key
    };
    FileMeta {
        number,
        path_id: 0,
        size_bytes: 1000 + number,
        smallest: key(smallest, sequences.1),
        largest: key(largest, sequences.0),
        smallest_sequence: sequences.0,
        largest_sequence: sequences.1,
        epoch: 0,
        oldest_blob_file: 0,
        oldest_ancestor_time: 0,
        creation_time: 0,
        unique_id: [0; 2],
        tail_bytes: 0,
        timestamps_persisted: true,
    }
}
