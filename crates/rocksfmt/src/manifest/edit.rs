//! Version edits, the records of a MANIFEST.
//!
//! An edit is a sequence of `varint32 tag, payload` to the end of the record. It must be read
//! completely before it is applied, because the tag that names the column family usually comes
//! last. [`VersionEdit::decode`] keeps what this crate's users need; it checks the shape of other
//! fields and drops them.
//!
//! An unknown tag with bit 13 set has a length and is skipped; any other unknown tag is refused by
//! number. For the custom fields of a file it is the opposite: an unknown field with bit 6 set is
//! refused.

use crate::coding::{Decoder, put_lps, put_varint};
use crate::error::{Error, Result};
use crate::manifest::file_meta::{BlobFileMeta, BlobGarbage, FileMeta};
use crate::manifest::tag;

/// The number of levels that a column family may have, in OPTIONS and in the MANIFEST. RocksDB has
/// no limit; its `num_levels` is 7 and rarely changed. The bound keeps a stray number from causing
/// a large allocation.
pub const LEVELS_MAX: u32 = 256;

/// The kind of a record. Only [`EditKind::Normal`] records change files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EditKind {
    /// Adds a column family.
    ColumnFamilyAdd,
    /// Drops a column family.
    ColumnFamilyDrop,
    /// Adds write-ahead logs to those that the MANIFEST tracks.
    WalAddition,
    /// Removes write-ahead logs from them.
    WalDeletion,
    /// Everything else.
    Normal,
}

/// A live write-ahead log that the MANIFEST tracks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalAddition {
    /// The number in the file's name.
    pub number: u64,
    /// The number of its bytes that are synced, if known.
    pub synced_bytes: Option<u64>,
}

/// One record of a MANIFEST.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VersionEdit {
    /// The column family of the record; 0 if it names none.
    pub column_family: u32,
    /// The column family's comparator.
    pub comparator: Option<String>,
    /// Logs below this number hold no data that is not in the column family's files.
    pub log_number: Option<u64>,
    /// A number that no file has yet.
    pub next_file_number: Option<u64>,
    /// The largest sequence in the files.
    pub last_sequence: Option<u64>,
    /// Logs below this number may have been removed.
    pub min_log_number_to_keep: Option<u64>,
    /// The largest column family id ever assigned.
    pub max_column_family: Option<u32>,
    /// The name of an added column family.
    pub column_family_add: Option<String>,
    /// Whether the column family is dropped.
    pub column_family_drop: bool,
    /// How many records of the same atomic group follow this one.
    pub atomic_group_remaining: Option<u32>,
    /// Files that leave a level: level, number.
    pub deleted_files: Vec<(u32, u64)>,
    /// Files that enter a level.
    pub new_files: Vec<(u32, FileMeta)>,
    /// New blob files.
    pub new_blob_files: Vec<BlobFileMeta>,
    /// Blob values that died.
    pub blob_garbage: Vec<BlobGarbage>,
    /// Logs that exist.
    pub wal_additions: Vec<WalAddition>,
    /// Logs below this number have been removed.
    pub wals_deleted_below: Option<u64>,
    /// Identity of the database.
    pub db_id: Option<String>,
    /// Versions older than this timestamp may be missing (column families with timestamps).
    pub full_history_ts_low: Option<Vec<u8>>,
    /// Whether user timestamps are kept in the files; `None` if the record does not say.
    pub persist_timestamps: Option<bool>,
    /// The number of keys in the default column family's files. RocksDB skips the field and does
    /// not write it; see `docs/formats/key-count.md`.
    pub keys: Option<u64>,
    /// Whether the record has a field that only Millrace writes.
    pub ours: bool,
    /// Size of the last MANIFEST that held only a snapshot.
    pub last_compacted_manifest_bytes: Option<u64>,
}

impl VersionEdit {
    /// The record, with tags in RocksDB's order. Fields about logs are not written, because
    /// recycled logs cannot be identified by size.
    ///
    /// # Panics
    /// If the edit adds or drops a column family and also changes files: RocksDB silently ignores
    /// the files of such a record.
    pub fn encode(&self) -> Vec<u8> {
        let changes_files = !(self.new_files.is_empty()
            && self.deleted_files.is_empty()
            && self.new_blob_files.is_empty()
            && self.blob_garbage.is_empty());
        assert!(
            !changes_files || self.kind() == EditKind::Normal,
            "a record that adds or drops a column family must not change files"
        );
        let mut out = Vec::new();
        let mut string = |tag: u32, text: &Option<String>| {
            if let Some(text) = text {
                put_varint(&mut out, u64::from(tag));
                put_lps(&mut out, text.as_bytes());
            }
        };
        string(tag::DB_ID, &self.db_id);
        string(tag::COMPARATOR, &self.comparator);
        let mut number = |tag: u32, value: Option<u64>| {
            if let Some(value) = value {
                put_varint(&mut out, u64::from(tag));
                put_varint(&mut out, value);
            }
        };
        number(tag::LOG_NUMBER, self.log_number);
        number(tag::PREV_LOG_NUMBER, self.log_number.map(|_| 0));
        number(tag::NEXT_FILE_NUMBER, self.next_file_number);
        number(tag::MAX_COLUMN_FAMILY, self.max_column_family.map(u64::from));
        number(tag::MIN_LOG_NUMBER_TO_KEEP, self.min_log_number_to_keep);
        number(tag::LAST_SEQUENCE, self.last_sequence);
        for &(level, file) in &self.deleted_files {
            for number in [u64::from(tag::DELETED_FILE), u64::from(level), file] {
                put_varint(&mut out, number);
            }
        }
        for (level, file) in &self.new_files {
            file.encode(*level, &mut out);
        }
        for file in &self.new_blob_files {
            file.encode(&mut out);
        }
        for garbage in &self.blob_garbage {
            garbage.encode(&mut out);
        }
        if let Some(persisted) = self.persist_timestamps {
            put_varint(&mut out, u64::from(tag::PERSIST_TIMESTAMPS));
            put_lps(&mut out, &[u8::from(persisted)]);
        }
        if let Some(keys) = self.keys {
            let mut value = Vec::new();
            put_varint(&mut value, keys);
            put_varint(&mut out, u64::from(tag::KEYS));
            put_lps(&mut out, &value);
        } else if self.ours {
            put_varint(&mut out, u64::from(tag::FILLER));
            put_lps(&mut out, &[]);
        }
        if self.column_family != 0 {
            put_varint(&mut out, u64::from(tag::COLUMN_FAMILY));
            put_varint(&mut out, u64::from(self.column_family));
        }
        if let Some(name) = &self.column_family_add {
            put_varint(&mut out, u64::from(tag::COLUMN_FAMILY_ADD));
            put_lps(&mut out, name.as_bytes());
        }
        if self.column_family_drop {
            put_varint(&mut out, u64::from(tag::COLUMN_FAMILY_DROP));
        }
        if let Some(remaining) = self.atomic_group_remaining {
            put_varint(&mut out, u64::from(tag::IN_ATOMIC_GROUP));
            put_varint(&mut out, u64::from(remaining));
        }
        out
    }

    /// Pads an encoded record to `len` bytes with a field that every reader skips. `len` must be
    /// the record's length or at least three more.
    pub fn fill(record: &mut Vec<u8>, len: usize) {
        let mut room = len.saturating_sub(record.len());
        if room == 0 {
            return;
        }
        put_varint(record, u64::from(tag::FILLER));
        room = room.saturating_sub(2);
        // The length and as many bytes must fill the room exactly; this may need a length with one
        // byte more than necessary.
        let length_bytes = [129, 16_386].iter().filter(|&&more| room >= more).count() + 1;
        let zeros = room.saturating_sub(length_bytes);
        for byte in 0..length_bytes {
            let more = if byte + 1 < length_bytes { 0x80 } else { 0 };
            record.push((zeros >> (7 * byte)) as u8 & 0x7F | more);
        }
        record.resize(record.len() + zeros, 0);
    }

    /// Reads a whole record.
    pub fn decode(record: &[u8]) -> Result<VersionEdit> {
        let mut edit = VersionEdit::default();
        let mut d = Decoder::new(record);
        while !d.is_empty() {
            let at = record.len() - d.len();
            let tag = d.varint32("version edit tag")?;
            edit.field(tag, &mut d)
                .map_err(|e| e.at(format!("version edit tag {tag} at byte {at}")))?;
        }
        Ok(edit)
    }

    /// The kind of the record: the first that applies.
    pub fn kind(&self) -> EditKind {
        if self.column_family_add.is_some() {
            EditKind::ColumnFamilyAdd
        } else if self.column_family_drop {
            EditKind::ColumnFamilyDrop
        } else if !self.wal_additions.is_empty() {
            EditKind::WalAddition
        } else if self.wals_deleted_below.is_some() {
            EditKind::WalDeletion
        } else {
            EditKind::Normal
        }
    }

    fn field(&mut self, tag: u32, d: &mut Decoder<'_>) -> Result<()> {
        match tag {
            tag::COMPARATOR => self.comparator = Some(text(d, "comparator name")?),
            tag::LOG_NUMBER => self.log_number = Some(d.varint64("log number")?),
            tag::NEXT_FILE_NUMBER => self.next_file_number = Some(d.varint64("next file number")?),
            tag::LAST_SEQUENCE => self.last_sequence = Some(d.varint64("last sequence")?),
            tag::COMPACT_CURSOR => {
                level(d)?;
                d.lps("compaction cursor")?;
            }
            tag::DELETED_FILE => {
                let level = level(d)?;
                self.deleted_files.push((level, d.varint64("file number")?));
            }
            tag::NEW_FILE | tag::NEW_FILE2 | tag::NEW_FILE3 | tag::NEW_FILE4 => {
                let level = level(d)?;
                let (file, min_log) = FileMeta::decode(tag, d)?;
                self.new_files.push((level, file));
                if min_log.is_some() {
                    self.min_log_number_to_keep = self.min_log_number_to_keep.max(min_log);
                }
            }
            tag::PREV_LOG_NUMBER => {
                d.varint64("previous log number")?;
            }
            tag::MIN_LOG_NUMBER_TO_KEEP => {
                self.min_log_number_to_keep = Some(d.varint64("minimum log number to keep")?);
            }
            tag::COLUMN_FAMILY => self.column_family = d.varint32("column family id")?,
            tag::COLUMN_FAMILY_ADD => {
                self.column_family_add = Some(text(d, "column family name")?);
            }
            tag::COLUMN_FAMILY_DROP => self.column_family_drop = true,
            tag::MAX_COLUMN_FAMILY => {
                self.max_column_family = Some(d.varint32("largest column family id")?);
            }
            tag::IN_ATOMIC_GROUP => {
                self.atomic_group_remaining = Some(d.varint32("records left in atomic group")?);
            }
            tag::BLOB_FILE_ADDITION | tag::OLD_BLOB_FILE_ADDITION => {
                self.new_blob_files.push(BlobFileMeta::decode(d)?);
            }
            tag::BLOB_FILE_GARBAGE | tag::OLD_BLOB_FILE_GARBAGE => {
                self.blob_garbage.push(BlobGarbage::decode(d)?);
            }
            tag::DB_ID => self.db_id = Some(text(d, "database id")?),
            tag::OLD_WAL_ADDITION => self.wal_additions.push(wal_addition(d)?),
            tag::WAL_ADDITION => {
                let mut inner = Decoder::new(d.lps("log addition")?);
                self.wal_additions.push(wal_addition(&mut inner)?);
            }
            tag::OLD_WAL_DELETION => {
                self.wals_deleted_below = Some(d.varint64("log deletion")?);
            }
            tag::WAL_DELETION => {
                let mut inner = Decoder::new(d.lps("log deletion")?);
                self.wals_deleted_below = Some(inner.varint64("log deletion")?);
            }
            tag::FULL_HISTORY_TS_LOW => {
                let low = d.lps("low timestamp")?;
                if low.is_empty() {
                    return Err(Error::corruption("low timestamp is empty"));
                }
                self.full_history_ts_low = Some(low.to_vec());
            }
            tag::KEYS => {
                let mut inner = Decoder::new(d.lps("number of keys")?);
                self.keys = Some(inner.varint64("number of keys")?);
                self.ours = true;
            }
            tag::FILLER => {
                d.lps("filler")?;
                self.ours = true;
            }
            tag::PERSIST_TIMESTAMPS => match d.lps("timestamp persistence")? {
                &[flag] => self.persist_timestamps = Some(flag != 0),
                other => {
                    return Err(Error::corruption(format!(
                        "timestamp persistence has {} bytes, expected 1",
                        other.len()
                    )));
                }
            },
            tag::LAST_COMPACTED_MANIFEST_BYTES => {
                let mut inner = Decoder::new(d.lps("compacted manifest size")?);
                self.last_compacted_manifest_bytes =
                    Some(inner.varint64("compacted manifest size")?);
            }
            _ if tag & tag::IGNORABLE != 0 => {
                d.lps("payload of an ignorable tag")?;
            }
            _ => return Err(Error::unsupported("unknown tag")),
        }
        Ok(())
    }
}

/// Names are bytes in the format and text in this crate: others are refused, because they could not
/// be written again as they were.
fn text(d: &mut Decoder<'_>, what: &'static str) -> Result<String> {
    let bytes = d.lps(what)?;
    String::from_utf8(bytes.to_vec()).map_err(|_| {
        Error::unsupported(format!("the {what} \"{}\" is not UTF-8", bytes.escape_ascii()))
    })
}

fn level(d: &mut Decoder<'_>) -> Result<u32> {
    let level = d.varint32("level")?;
    if level >= LEVELS_MAX {
        // The record has a checksum: it is no damage.
        return Err(Error::unsupported(format!(
            "level {level}, the largest is {}",
            LEVELS_MAX - 1
        )));
    }
    Ok(level)
}

fn wal_addition(d: &mut Decoder<'_>) -> Result<WalAddition> {
    let mut addition = WalAddition { number: d.varint64("log number")?, synced_bytes: None };
    loop {
        match d.varint32("log addition tag")? {
            1 => return Ok(addition),
            2 => addition.synced_bytes = Some(d.varint64("synced log size")?),
            other => {
                return Err(Error::unsupported(format!("unknown log addition tag {other}")));
            }
        }
    }
}

#[cfg(test)]
mod tests;
