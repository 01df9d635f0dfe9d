//! Write batches, the payload of a write-ahead log's records.
//!
//! ```text
//! fixed64 sequence of the first operation | fixed32 number of operations | records: u8 tag, fields
//! ```
//!
//! [`WriteBatch::parse`] reads the header, [`WriteBatch::ops`] walks the records without copying.
//! Every operation that writes a key takes the next sequence; log data, no-ops and the markers of
//! two-phase commit take none. At its end the iterator checks the number of operations against the
//! header. A wrong count or an unknown tag is never a torn tail, because the record's checksum
//! held: RocksDB refuses to open the database, and the caller should refuse it too.

use crate::coding::{Decoder, fixed64_at, put_lps, put_svarint, put_varint};
use crate::error::{Error, Result};
use crate::key::SEQUENCE_MAX;

/// Bytes of a batch's header.
pub const BATCH_HEADER_BYTES: usize = 12;

/// Record tags, named after the form without a column family id; the form with one has the prefix
/// `CF_`.
pub(crate) mod tag {
    pub const DELETE: u8 = 0x00;
    pub const PUT: u8 = 0x01;
    pub const MERGE: u8 = 0x02;
    pub const LOG_DATA: u8 = 0x03;
    pub const CF_DELETE: u8 = 0x04;
    pub const CF_PUT: u8 = 0x05;
    pub const CF_MERGE: u8 = 0x06;
    pub const SINGLE_DELETE: u8 = 0x07;
    pub const CF_SINGLE_DELETE: u8 = 0x08;
    pub const BEGIN_PREPARE: u8 = 0x09;
    pub const END_PREPARE: u8 = 0x0A;
    pub const COMMIT: u8 = 0x0B;
    pub const ROLLBACK: u8 = 0x0C;
    pub const NOOP: u8 = 0x0D;
    pub const CF_DELETE_RANGE: u8 = 0x0E;
    pub const DELETE_RANGE: u8 = 0x0F;
    pub const CF_BLOB_INDEX: u8 = 0x10;
    pub const BLOB_INDEX: u8 = 0x11;
    pub const BEGIN_PERSISTED_PREPARE: u8 = 0x12;
    pub const BEGIN_UNPREPARE: u8 = 0x13;
    pub const COMMIT_WITH_TIMESTAMP: u8 = 0x15;
    pub const ENTITY: u8 = 0x16;
    pub const CF_ENTITY: u8 = 0x17;
    pub const TIMED_PUT: u8 = 0x18;
    pub const CF_TIMED_PUT: u8 = 0x19;
}

/// The first bytes of the annotation that [`BatchWriter::note_keys`] writes.
const KEYS_MAGIC: &[u8; 2] = b"mk";

/// The change of the number of keys in an annotation ([`Op::LogData`]), if it holds one; see
/// `docs/formats/key-count.md`.
pub fn keys_noted(annotation: &[u8]) -> Option<i64> {
    let mut d = Decoder::new(annotation.strip_prefix(KEYS_MAGIC)?);
    let change = d.svarint64("keys").ok()?;
    d.is_empty().then_some(change)
}

/// Builds write batches in a buffer that it reuses.
#[derive(Clone, Debug)]
pub struct BatchWriter {
    bytes: Vec<u8>,
    count: u32,
}

impl Default for BatchWriter {
    fn default() -> BatchWriter {
        BatchWriter { bytes: vec![0; BATCH_HEADER_BYTES], count: 0 }
    }
}

impl BatchWriter {
    /// An empty batch.
    pub fn new() -> BatchWriter {
        BatchWriter::default()
    }

    /// Reserves room for `bytes` more bytes.
    pub fn reserve(&mut self, bytes: usize) {
        self.bytes.reserve(bytes);
    }

    /// Sets a key.
    pub fn put(&mut self, cf: u32, key: &[u8], value: &[u8]) {
        self.operation(tag::PUT, tag::CF_PUT, cf, key);
        put_lps(&mut self.bytes, value);
    }

    /// Deletes a key.
    pub fn delete(&mut self, cf: u32, key: &[u8]) {
        self.operation(tag::DELETE, tag::CF_DELETE, cf, key);
    }

    /// Deletes a key that was set exactly once since its last deletion.
    pub fn single_delete(&mut self, cf: u32, key: &[u8]) {
        self.operation(tag::SINGLE_DELETE, tag::CF_SINGLE_DELETE, cf, key);
    }

    /// Adds a merge operand to a key.
    pub fn merge(&mut self, cf: u32, key: &[u8], operand: &[u8]) {
        self.operation(tag::MERGE, tag::CF_MERGE, cf, key);
        put_lps(&mut self.bytes, operand);
    }

    /// Deletes the keys from `start` to `end`, exclusive.
    pub fn delete_range(&mut self, cf: u32, start: &[u8], end: &[u8]) {
        self.operation(tag::DELETE_RANGE, tag::CF_DELETE_RANGE, cf, start);
        put_lps(&mut self.bytes, end);
    }

    /// Annotates the batch with its change of the number of keys of the default column family.
    /// RocksDB ignores annotations; see `docs/formats/key-count.md`.
    pub fn note_keys(&mut self, change: i64) {
        let mut note = KEYS_MAGIC.to_vec();
        put_svarint(&mut note, change);
        // A batch with a large value would take twice its memory for this last record, which begins
        // with a tag and a length.
        self.bytes.reserve_exact(2 + note.len());
        self.bytes.push(tag::LOG_DATA);
        put_lps(&mut self.bytes, &note);
    }

    /// Replaces the values of sets by references to blob files: `store` gets column family, key and
    /// value, and writes the reference if it has stored the value. Everything else stays as it is.
    ///
    /// # Errors
    /// Corruption if the batch does not parse; then it is unchanged.
    pub fn store_values(
        &mut self,
        mut store: impl FnMut(u32, &[u8], &[u8], &mut Vec<u8>) -> bool,
    ) -> Result<()> {
        let mut index = Vec::new();
        self.replace(|op, out| {
            let Op::Put { cf, key, value } = op else { return false };
            index.clear();
            let is_stored = store(cf, key, value, &mut index);
            if is_stored {
                put_operation(out, tag::BLOB_INDEX, tag::CF_BLOB_INDEX, cf, key);
                put_lps(out, &index);
            }
            is_stored
        })
    }

    /// The opposite: replaces references to blob files by their values. `load` gets the column
    /// family and the reference, and returns the value if it is to take the reference's place.
    ///
    /// # Errors
    /// As for [`BatchWriter::store_values`].
    pub fn restore_values<'v>(
        &mut self,
        mut load: impl FnMut(u32, &[u8]) -> Option<&'v [u8]>,
    ) -> Result<()> {
        self.replace(|op, out| {
            let Op::BlobIndex { cf, key, index } = op else { return false };
            let value = load(cf, index);
            if let Some(value) = value {
                put_operation(out, tag::PUT, tag::CF_PUT, cf, key);
                put_lps(out, value);
            }
            value.is_some()
        })
    }

    /// Removes the deletions of empty ranges. They delete nothing, and RocksDB gives them no
    /// sequence number when it replays a log: after one in a log's last batch it would not find the
    /// next log's first batch to follow.
    ///
    /// # Errors
    /// As for [`BatchWriter::store_values`].
    pub fn remove_empty_ranges(&mut self) -> Result<()> {
        let mut removed = 0;
        self.replace(|op, _| {
            let is_empty = matches!(op, Op::DeleteRange { begin, end, .. } if begin == end);
            removed += u32::from(is_empty);
            is_empty
        })?;
        self.count -= removed;
        Ok(())
    }

    /// Replaces operations: `new` appends the new one, if any, and returns true, or leaves the old
    /// one.
    fn replace(&mut self, mut new: impl FnMut(Op, &mut Vec<u8>) -> bool) -> Result<()> {
        let mut changed: Option<Vec<u8>> = None;
        let mut operation = Vec::new();
        let mut d = Decoder::new(&self.bytes[BATCH_HEADER_BYTES..]);
        while !d.is_empty() {
            let start = self.bytes.len() - d.len();
            let op = read_op(&mut d)?;
            let end = self.bytes.len() - d.len();
            operation.clear();
            if new(op, &mut operation) {
                let out = changed.get_or_insert_with(|| self.bytes[..start].to_vec());
                out.extend_from_slice(&operation);
            } else if let Some(out) = &mut changed {
                out.extend_from_slice(&self.bytes[start..end]);
            }
        }
        if let Some(changed) = changed {
            self.bytes = changed;
        }
        Ok(())
    }

    /// The number of operations so far; each takes a sequence number.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Whether the batch has no operation.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes of the batch so far.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The batch, with the sequence number of its first operation.
    pub fn finish(&mut self, sequence: u64) -> &[u8] {
        self.bytes[..8].copy_from_slice(&sequence.to_le_bytes());
        self.bytes[8..12].copy_from_slice(&self.count.to_le_bytes());
        &self.bytes
    }

    /// Starts the next batch.
    pub fn clear(&mut self) {
        self.bytes.truncate(BATCH_HEADER_BYTES);
        self.count = 0;
    }

    /// Column family 0 has its own tags.
    fn operation(&mut self, tag: u8, cf_tag: u8, cf: u32, key: &[u8]) {
        self.count += 1;
        put_operation(&mut self.bytes, tag, cf_tag, cf, key);
    }
}

fn put_operation(out: &mut Vec<u8>, tag: u8, cf_tag: u8, cf: u32, key: &[u8]) {
    if cf == 0 {
        out.push(tag);
    } else {
        out.push(cf_tag);
        put_varint(out, u64::from(cf));
    }
    put_lps(out, key);
}

/// One operation of a batch, borrowed from its bytes. `cf` is a column family's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op<'a> {
    /// Sets a key.
    Put {
        /// Column family.
        cf: u32,
        /// User key.
        key: &'a [u8],
        /// Value.
        value: &'a [u8],
    },
    /// Deletes a key.
    Delete {
        /// Column family.
        cf: u32,
        /// User key.
        key: &'a [u8],
    },
    /// Deletes a key that was set exactly once.
    SingleDelete {
        /// Column family.
        cf: u32,
        /// User key.
        key: &'a [u8],
    },
    /// Adds a merge operand to a key.
    Merge {
        /// Column family.
        cf: u32,
        /// User key.
        key: &'a [u8],
        /// Merge operand.
        operand: &'a [u8],
    },
    /// Deletes the keys from `begin` to `end`, exclusive.
    DeleteRange {
        /// Column family.
        cf: u32,
        /// First user key deleted.
        begin: &'a [u8],
        /// First user key kept.
        end: &'a [u8],
    },
    /// Sets a key to a value in a blob file.
    BlobIndex {
        /// Column family.
        cf: u32,
        /// User key.
        key: &'a [u8],
        /// Encoded reference into a blob file.
        index: &'a [u8],
    },
    /// Sets a key to several named columns.
    Entity {
        /// Column family.
        cf: u32,
        /// User key.
        key: &'a [u8],
        /// Encoded columns.
        columns: &'a [u8],
    },
    /// Sets a key, with the time it was written.
    TimedPut {
        /// Column family.
        cf: u32,
        /// User key.
        key: &'a [u8],
        /// Value, without the time.
        value: &'a [u8],
        /// Unix time in seconds.
        write_time: u64,
    },
    /// An annotation of the writer; writes nothing.
    LogData(&'a [u8]),
    /// Padding, or the boundary of a sub-batch; writes nothing.
    Noop,
    /// A marker of two-phase commit; writes nothing by itself.
    Marker(Marker<'a>),
}

/// Markers of two-phase commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker<'a> {
    /// A prepared section begins (write-committed policy).
    BeginPrepare,
    /// A prepared section begins (write-prepared policy).
    BeginPersistedPrepare,
    /// A prepared section begins (write-unprepared policy).
    BeginUnprepare,
    /// The prepared section ends; the transaction's name.
    EndPrepare(&'a [u8]),
    /// The named transaction is committed.
    Commit(&'a [u8]),
    /// The named transaction is committed at a timestamp.
    CommitWithTimestamp {
        /// The commit timestamp.
        timestamp: &'a [u8],
        /// The transaction's name.
        name: &'a [u8],
    },
    /// The named transaction is rolled back.
    Rollback(&'a [u8]),
}

impl Marker<'_> {
    /// The marker's name in RocksDB.
    pub fn name(&self) -> &'static str {
        match self {
            Marker::BeginPrepare => "BeginPrepare",
            Marker::BeginPersistedPrepare => "BeginPersistedPrepare",
            Marker::BeginUnprepare => "BeginUnprepare",
            Marker::EndPrepare(_) => "EndPrepare",
            Marker::Commit(_) => "Commit",
            Marker::CommitWithTimestamp { .. } => "CommitWithTimestamp",
            Marker::Rollback(_) => "Rollback",
        }
    }

    /// The error of a reader without two-phase commit; names the marker.
    pub fn refused(&self) -> Error {
        Error::unsupported(format!(
            "two-phase commit ({} in the write-ahead log): open and close the database with its \
             TransactionDB first",
            self.name()
        ))
    }
}

impl Op<'_> {
    /// The column family of an operation that writes a key; `None` for one that takes no sequence.
    pub fn column_family(&self) -> Option<u32> {
        match *self {
            Op::Put { cf, .. }
            | Op::Delete { cf, .. }
            | Op::SingleDelete { cf, .. }
            | Op::Merge { cf, .. }
            | Op::DeleteRange { cf, .. }
            | Op::BlobIndex { cf, .. }
            | Op::Entity { cf, .. }
            | Op::TimedPut { cf, .. } => Some(cf),
            Op::LogData(_) | Op::Noop | Op::Marker(_) => None,
        }
    }
}

/// A batch: its header and its records.
#[derive(Clone, Copy, Debug)]
pub struct WriteBatch<'a> {
    sequence: u64,
    count: u32,
    records: &'a [u8],
}

impl<'a> WriteBatch<'a> {
    /// Reads the header of a batch.
    pub fn parse(data: &'a [u8]) -> Result<WriteBatch<'a>> {
        let Some((header, records)) = data.split_first_chunk::<BATCH_HEADER_BYTES>() else {
            return Err(Error::corruption(format!(
                "write batch of {} bytes is shorter than its header",
                data.len()
            )));
        };
        let mut d = Decoder::new(header);
        let batch = WriteBatch {
            sequence: d.fixed64("batch sequence")?,
            count: d.fixed32("batch count")?,
            records,
        };
        match batch.sequence.checked_add(u64::from(batch.count)) {
            Some(next) if next <= SEQUENCE_MAX + 1 => Ok(batch),
            _ => Err(Error::corruption(format!(
                "write batch of {} operations at sequence {} runs past the largest sequence",
                batch.count, batch.sequence
            ))),
        }
    }

    /// The sequence of the first operation.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The number of operations in the header.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The sequence the next batch normally begins with.
    pub fn next_sequence(&self) -> u64 {
        self.sequence + u64::from(self.count)
    }

    /// Walks the records. Each comes with its sequence, or with that of the next operation if it
    /// takes none. Ends after the first error.
    pub fn ops(&self) -> BatchOps<'a> {
        BatchOps {
            d: Decoder::new(self.records),
            sequence: self.sequence,
            left: self.count,
            count: self.count,
            done: false,
        }
    }

    /// Walks the whole batch; afterwards [`WriteBatch::ops`] cannot fail.
    pub fn verify(&self) -> Result<()> {
        self.ops().try_for_each(|op| op.map(drop))
    }
}

/// Iterator over a batch's operations.
#[derive(Clone, Debug)]
pub struct BatchOps<'a> {
    d: Decoder<'a>,
    sequence: u64,
    left: u32,
    count: u32,
    done: bool,
}

impl<'a> Iterator for BatchOps<'a> {
    type Item = Result<(u64, Op<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let item = self.read().transpose();
        self.done = !matches!(item, Some(Ok(_)));
        item
    }
}

impl<'a> BatchOps<'a> {
    fn read(&mut self) -> Result<Option<(u64, Op<'a>)>> {
        if self.d.is_empty() {
            if self.left != 0 {
                return Err(Error::corruption(format!(
                    "write batch at sequence {} has {} operations, its header announces {}",
                    self.first(),
                    self.count - self.left,
                    self.count
                )));
            }
            return Ok(None);
        }
        let op = read_op(&mut self.d)?;
        let sequence = self.sequence;
        if op.column_family().is_some() {
            if self.left == 0 {
                return Err(Error::corruption(format!(
                    "write batch at sequence {} has more operations than the {} its header announces",
                    self.first(),
                    self.count
                )));
            }
            self.left -= 1;
            self.sequence += 1;
        }
        Ok(Some((sequence, op)))
    }

    fn first(&self) -> u64 {
        self.sequence - u64::from(self.count - self.left)
    }
}

fn read_op<'a>(d: &mut Decoder<'a>) -> Result<Op<'a>> {
    let tag = d.u8("batch tag")?;
    let cf = match tag {
        tag::CF_DELETE
        | tag::CF_PUT
        | tag::CF_MERGE
        | tag::CF_SINGLE_DELETE
        | tag::CF_DELETE_RANGE
        | tag::CF_BLOB_INDEX
        | tag::CF_ENTITY
        | tag::CF_TIMED_PUT => d.varint32("column family of a batch operation")?,
        _ => 0,
    };
    Ok(match tag {
        tag::PUT | tag::CF_PUT => {
            Op::Put { cf, key: d.lps("put key")?, value: d.lps("put value")? }
        }
        tag::DELETE | tag::CF_DELETE => Op::Delete { cf, key: d.lps("delete key")? },
        tag::SINGLE_DELETE | tag::CF_SINGLE_DELETE => {
            Op::SingleDelete { cf, key: d.lps("single delete key")? }
        }
        tag::MERGE | tag::CF_MERGE => {
            Op::Merge { cf, key: d.lps("merge key")?, operand: d.lps("merge operand")? }
        }
        tag::DELETE_RANGE | tag::CF_DELETE_RANGE => Op::DeleteRange {
            cf,
            begin: d.lps("range delete begin")?,
            end: d.lps("range delete end")?,
        },
        tag::BLOB_INDEX | tag::CF_BLOB_INDEX => {
            Op::BlobIndex { cf, key: d.lps("blob index key")?, index: d.lps("blob index")? }
        }
        tag::ENTITY | tag::CF_ENTITY => {
            Op::Entity { cf, key: d.lps("entity key")?, columns: d.lps("entity columns")? }
        }
        tag::TIMED_PUT | tag::CF_TIMED_PUT => {
            let key = d.lps("timed put key")?;
            let packed = d.lps("timed put value")?;
            let Some((value, time)) = packed.split_last_chunk::<8>() else {
                return Err(Error::corruption(format!(
                    "timed put value of {} bytes has no write time",
                    packed.len()
                )));
            };
            Op::TimedPut { cf, key, value, write_time: fixed64_at(time, 0).unwrap_or_default() }
        }
        tag::LOG_DATA => Op::LogData(d.lps("log data")?),
        tag::NOOP => Op::Noop,
        tag::BEGIN_PREPARE => Op::Marker(Marker::BeginPrepare),
        tag::BEGIN_PERSISTED_PREPARE => Op::Marker(Marker::BeginPersistedPrepare),
        tag::BEGIN_UNPREPARE => Op::Marker(Marker::BeginUnprepare),
        tag::END_PREPARE => Op::Marker(Marker::EndPrepare(d.lps("prepared transaction")?)),
        tag::COMMIT => Op::Marker(Marker::Commit(d.lps("committed transaction")?)),
        tag::ROLLBACK => Op::Marker(Marker::Rollback(d.lps("rolled back transaction")?)),
        tag::COMMIT_WITH_TIMESTAMP => Op::Marker(Marker::CommitWithTimestamp {
            timestamp: d.lps("commit timestamp")?,
            name: d.lps("committed transaction")?,
        }),
        other => {
            return Err(Error::unsupported(format!("unknown write batch tag 0x{other:02x}")));
        }
    })
}

#[cfg(test)]
mod tests;
