//! What the blob files of a column family hold, for checking the references to it.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};

use rocksfmt::{BlobIndex, ColumnFamily};

/// Most records that are remembered; of files with more, only the length is.
const RECORDS_MAX: usize = 4 << 20;

/// The blob files of a column family.
#[derive(Default)]
pub(crate) struct BlobRecords {
    files: BTreeMap<u64, FileRecords>,
    held: usize,
}

/// The records of a blob file.
pub(crate) enum FileRecords {
    /// It is missing or damaged, which is reported once.
    Unknown,
    /// It has values up to this offset.
    Length(u64),
    /// Its records, by the offset of the value.
    All(Vec<Record>),
}

/// A record of a blob file.
#[derive(Clone, Copy)]
pub(crate) struct Record {
    /// Where the value begins.
    offset: u64,
    /// Its length; longer ones have this.
    len: u32,
    key: u32,
}

impl Record {
    /// The record of a key.
    pub fn new(key: &[u8], offset: u64, len: u64) -> Record {
        Record { offset, len: saturated(len), key: hash(key) }
    }
}

impl BlobRecords {
    /// The live blob files of a family, of which nothing is known yet.
    pub fn of(family: &ColumnFamily) -> BlobRecords {
        let files = family.live_blob_files().map(|blob| (blob.number, FileRecords::Unknown));
        BlobRecords { files: files.collect(), held: 0 }
    }

    /// How many records of the next file can be remembered.
    pub fn room(&self) -> usize {
        RECORDS_MAX - self.held
    }

    /// Notes what a file has.
    pub fn put(&mut self, number: u64, records: FileRecords) {
        if let FileRecords::All(all) = &records {
            self.held += all.len();
        }
        self.files.insert(number, records);
    }

    /// What is wrong with the reference of a key, if anything is.
    pub fn find(&self, user_key: &[u8], index: &BlobIndex) -> Option<&'static str> {
        // The value is in the table itself.
        if index.file_number == 0 {
            return None;
        }
        let end = index.offset.saturating_add(index.size);
        match self.files.get(&index.file_number) {
            None => Some("which the MANIFEST does not name"),
            Some(FileRecords::Unknown) => None,
            Some(FileRecords::Length(len)) => (end > *len).then_some("which ends before them"),
            Some(FileRecords::All(all)) => {
                let at = all.binary_search_by_key(&index.offset, |record| record.offset);
                let is_it = at.is_ok_and(|at| {
                    all[at].len == saturated(index.size) && all[at].key == hash(user_key)
                });
                (!is_it).then_some("which has no such values there")
            }
        }
    }
}

fn saturated(len: u64) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

fn hash(key: &[u8]) -> u32 {
    let mut hasher = DefaultHasher::new();
    hasher.write(key);
    hasher.finish() as u32
}
