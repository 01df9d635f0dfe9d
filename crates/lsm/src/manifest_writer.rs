//! Appending to the MANIFEST. A directory that is opened for writing gets a new one, which begins
//! with everything that is known; each later change is one record, durable before it counts.
//!
//! A power cut while a record is written must leave it whole or not there at all: RocksDB does not
//! open a MANIFEST with a record whose header is there and whose checksum does not hold, and nobody
//! could tell it from damage. A disk writes sectors, each as a whole, in any order. So every record
//! begins at a sector's start and fills whole sectors (`rocksfmt` lengthens it), and its first
//! sector, with the header, is written when the others are durable. Before that there are zeros in
//! its place, which all readers take for the end. One that does not fit into the log's block begins
//! in the next; only one that is longer than a block, of some hundred tables, is not safe in this way.
//!
//! It has its room on the disk before a record is written: a full disk leaves it as it was.

use fs::{Dir, File, Mode};
use reactor::Core;
use rocksfmt::{FileName, LOG_BLOCK_BYTES, LogWriter, ManifestState, VersionEdit};

use crate::error::{Error, Kind, Result};
use crate::insist;
use crate::mutant::mutant;

/// What a disk writes as a whole, in bytes.
const SECTOR: usize = 512;
/// Of a record in front of its bytes.
const HEADER: usize = 7;
/// Room that it gets at a time, in bytes.
const ROOM: u64 = 64 << 10;
/// Largest single write in bytes.
const PIECE: usize = 1 << 20;

/// See the module text.
pub(crate) struct ManifestWriter {
    name: String,
    file: File,
    log: LogWriter,
    /// Bytes of the disk that it has, from its start on.
    room: u64,
    /// An append failed: nobody knows what the file ends in.
    broken: bool,
}

impl ManifestWriter {
    /// Writes a new MANIFEST with all that `state` says and makes it the current one. Suspends
    /// for the disk.
    ///
    /// # Errors
    /// The device's.
    pub async fn create(
        core: &Core,
        dir: &Dir,
        number: u64,
        state: &ManifestState,
        next_file_number: u64,
    ) -> Result<ManifestWriter> {
        let name = FileName::Manifest(number).to_string();
        let io = |e: std::io::Error| Error::io(&name, &e);
        // Buffered, so that it is never longer than it says.
        let file = core.attach(&dir.create_or_empty(&name, Mode::Buffered).await.map_err(io)?);
        let log = LogWriter::new(None, 0);
        let mut writer = ManifestWriter { name: name.clone(), file, log, room: 0, broken: false };
        let mut bytes = Vec::new();
        for edit in snapshot(state, next_file_number) {
            writer.log.append(&edit.encode(), &mut bytes);
        }
        while let Some(filler) = writer.misaligned() {
            writer.log.append(&filler, &mut bytes);
        }
        writer.write(0, &bytes).await?;
        // The MANIFEST's own name must last before CURRENT says it; the replacement syncs both.
        dir.sync().await.map_err(io)?;
        let current = format!("{name}\n");
        dir.write_small_atomically("CURRENT", current.as_bytes())
            .await
            .map_err(|e| Error::io("CURRENT", &e))?;
        Ok(writer)
    }

    /// Adds a record and makes it durable; suspends for the disk.
    ///
    /// # Errors
    /// The device's; after one, every later call fails. Only [`Kind::Full`] changes nothing.
    pub async fn append(&mut self, edit: &VersionEdit) -> Result<()> {
        let mut record = edit.encode();
        if !self.broken {
            self.reserve(record.len() as u64).await?;
        }
        if std::mem::replace(&mut self.broken, true) {
            return Err(Error::new(
                Kind::Io,
                format!("{}: an earlier write of it failed: open the database again", self.name),
            ));
        }
        while let Some(filler) = self.misaligned() {
            self.put(&filler).await?;
        }
        let len = filled(record.len(), SECTOR);
        VersionEdit::fill(&mut record, len);
        let left = LOG_BLOCK_BYTES - self.log.position() as usize % LOG_BLOCK_BYTES;
        if len + HEADER > left && len + HEADER <= LOG_BLOCK_BYTES {
            let mut filler = Vec::new();
            VersionEdit::fill(&mut filler, left - HEADER);
            self.put(&filler).await?;
        }
        self.put(&record).await?;
        self.broken = false;
        Ok(())
    }

    /// Gets room for a record of so many bytes.
    async fn reserve(&mut self, bytes: u64) -> Result<()> {
        // What fills blocks and sectors, and headers.
        let end = self.log.position() + bytes + bytes / 512 + 2 * LOG_BLOCK_BYTES as u64;
        if end > self.room {
            self.room = match self.file.reserve(end + ROOM).await {
                Ok(()) => end + ROOM,
                Err(_) => {
                    let reserved = self.file.reserve(end).await;
                    reserved.map_err(|e| Error::io(&self.name, &e))?;
                    end
                }
            };
        }
        Ok(())
    }

    /// A record that says nothing, if one is needed up to the end of a sector. After one that has two headers,
    /// because it is longer than a block.
    fn misaligned(&self) -> Option<Vec<u8>> {
        let over = self.log.position() as usize % SECTOR;
        let mut filler = Vec::new();
        VersionEdit::fill(&mut filler, filled(0, SECTOR - over));
        (over > 0).then_some(filler)
    }

    /// Makes a record durable.
    async fn put(&mut self, record: &[u8]) -> Result<()> {
        let (start, mut bytes) = (self.log.position(), Vec::new());
        self.log.append(record, &mut bytes);
        let first = SECTOR - start as usize % SECTOR;
        let (head, rest) = bytes.split_at(first.min(bytes.len()));
        if !rest.is_empty() {
            self.write(start + first as u64, rest).await?;
        }
        self.write(start, head).await
    }

    async fn write(&self, start: u64, bytes: &[u8]) -> Result<()> {
        let io = |e: std::io::Error| Error::io(&self.name, &e).for_good();
        let mut offset = start;
        for piece in bytes.chunks(PIECE) {
            let mut buf = insist::memory(self.file.core(), piece.len()).await.map_err(io)?;
            buf[..piece.len()].copy_from_slice(piece);
            self.file.write_at(offset, buf, piece.len()).await.0.map_err(io)?;
            offset += piece.len() as u64;
        }
        if mutant("manifest_is_not_synced") {
            return Ok(());
        }
        self.file.sync_data().await.map_err(io)
    }
}

/// The length that a record of `len` bytes is lengthened to, so that with its header it reaches as far as the end of
/// the first sector, of which `first` bytes are left, or of a later one.
fn filled(len: usize, first: usize) -> usize {
    let mut end = first;
    // The shortest filler takes three bytes.
    while end < HEADER + len || (1..3).contains(&(end - HEADER - len)) {
        end += SECTOR;
    }
    end - HEADER
}

/// The records that a new MANIFEST begins with. A record that adds a column family changes no
/// files: RocksDB would ignore them.
fn snapshot(state: &ManifestState, next_file_number: u64) -> Vec<VersionEdit> {
    let mut edits = vec![VersionEdit {
        db_id: state.db_id.clone(),
        next_file_number: Some(next_file_number),
        max_column_family: Some(state.max_column_family),
        last_sequence: Some(state.last_sequence),
        min_log_number_to_keep: Some(state.min_log_number_to_keep).filter(|&number| number > 0),
        ..VersionEdit::default()
    }];
    for family in state.column_families.values() {
        let add = family.id != 0;
        edits.push(VersionEdit {
            column_family: family.id,
            column_family_add: add.then(|| family.name.clone()),
            comparator: Some(family.comparator_name.clone()),
            log_number: Some(family.log_number),
            ..VersionEdit::default()
        });
        edits.push(VersionEdit {
            column_family: family.id,
            log_number: Some(family.log_number),
            keys: state.keys.filter(|_| family.id == 0),
            new_files: family.files().map(|(level, file)| (level as u32, file.clone())).collect(),
            new_blob_files: family.live_blob_files().cloned().collect(),
            ..VersionEdit::default()
        });
    }
    edits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_end_where_sectors_do() {
        for len in 0..2000 {
            for first in [SECTOR, 1, 6, 7, 8, 9, 10, 11, 300, 511] {
                let filled = filled(len, first);
                let more = filled - len;
                assert!(more == 0 || more >= 3, "{len} and {more}");
                assert!(more < 2 * SECTOR && (filled + HEADER) % SECTOR == first % SECTOR);
            }
        }
    }
}
