//! Appending to the MANIFEST. An opening for writing begins a new one, which starts with the whole
//! state; each later change is durable before it takes effect. A MANIFEST that has grown is
//! replaced in the same way while the database is open.
//!
//! A change is one record for each of its column families. Several records are an atomic group:
//! readers take all of them or none. They are written together:
//!
//! 1. A record does not cross the log's 32 KiB blocks. The last record in a block, and the last of
//!    the change, is padded (`rocksfmt` adds a field without meaning), so that the log ends at a
//!    sector boundary.
//! 2. The part of one block is written and flushed without its first sector. Then that sector is
//!    written and flushed, then the next block follows. A disk writes each sector as a whole, and
//!    sectors in any order. As long as the first sector is missing it is zeros: readers take them
//!    for the end of the block, and all later blocks are empty. This order is needed because
//!    RocksDB does not open a MANIFEST with a record that has a header and a wrong checksum.
//! 3. A record that is longer than a block (a merge, or a clearing, of some hundred tables) cannot
//!    be written in this way. It goes to the end of a new MANIFEST.
//!
//! A new MANIFEST and its name are durable before CURRENT is replaced by a rename. So a crash
//! leaves the old one or the new one current, and the other is removed. A full disk changes
//! nothing: space for a record is reserved before it is written, and a new MANIFEST that does not
//! fit is removed. If an opening finds no space for its MANIFEST, the first change begins it.
//!
//! After a failed write or flush of the MANIFEST, or of CURRENT, it is unknown whether the change
//! will be there after a crash; nothing that depends on it is removed meanwhile. Another write to
//! the same file would prove nothing. So the MANIFEST is replaced: first together with the change,
//! and if that fails too, before or together with the next change. Once CURRENT durably names the
//! new one, it decides: a change that failed is not in it.

use fs::{Dir, File, Mode};
use reactor::Core;
use rocksfmt::{
    FileName, LOG_BLOCK_BYTES, LogWriter, ManifestReplay, ManifestState, VersionEdit, parse_current,
};

use crate::db::Db;
use crate::error::{Error, Kind, Result};
use crate::file_list::FilePrefix;
use crate::mutant::mutant;
use crate::write::insist;

/// The unit that a disk writes as a whole, in bytes.
const SECTOR: usize = 512;
/// Bytes of a record's header.
const HEADER: usize = 7;
/// Least bytes of the field that pads a record.
const FILLER_MIN: usize = 3;
/// Space that it reserves at a time, in bytes.
const ROOM: u64 = 64 << 10;
/// Largest single write in bytes.
const PIECE: usize = 1 << 20;
/// A MANIFEST is replaced only when it is this many times as long as at its begin: with a small
/// limit, a large one must not be replaced at every change.
const GROWTH: u64 = 2;

/// The MANIFEST that is being written.
pub(crate) struct ManifestWriter {
    core: Core,
    dir: Dir,
    number: u64,
    name: String,
    /// `None` before it is begun: then `number` is that of the previous one.
    file: Option<File>,
    log: LogWriter,
    /// Bytes reserved on the disk, from its start.
    room: u64,
    /// The state after all its records.
    state: ManifestReplay,
    /// The limit of its length.
    bytes_max: u64,
    /// The length at which it is replaced: the limit, or more if it began with much.
    replace_at: u64,
    /// Files that may be removed: MANIFESTs that were replaced, and those of changes that were
    /// decided against.
    obsolete: Vec<FileName>,
    /// A write failed or is under way: the end of the file, or which MANIFEST is current, is
    /// unknown.
    undecided: bool,
    /// MANIFESTs that CURRENT may also name meanwhile.
    rivals: Vec<u64>,
    /// Files that the change under way adds.
    adding: Vec<FileName>,
    /// Files of changes that failed and may be there after a crash.
    uncertain: Vec<FileName>,
    /// How often the MANIFEST was replaced because a write of it had failed.
    heals: u64,
}

impl ManifestWriter {
    /// A writer of changes to the current MANIFEST, which has this number and this state. They go
    /// to a new one, which is replaced when it is longer than `bytes_max`.
    pub fn new(
        core: &Core,
        dir: &Dir,
        number: u64,
        state: &ManifestState,
        bytes_max: u64,
    ) -> ManifestWriter {
        ManifestWriter {
            core: core.clone(),
            dir: dir.clone(),
            number,
            name: FileName::Manifest(number).to_string(),
            file: None,
            log: LogWriter::new(None, 0),
            room: 0,
            state: ManifestReplay::resume(state),
            bytes_max,
            replace_at: 0,
            obsolete: Vec::new(),
            undecided: false,
            rivals: Vec::new(),
            adding: Vec::new(),
            uncertain: Vec::new(),
            heals: 0,
        }
    }

    /// Writes the new MANIFEST and makes it the current one. Suspends for the disk.
    ///
    /// # Errors
    /// The device's. After [`Kind::Full`] it may be called again, and the first change does so.
    pub async fn begin(&mut self, number: u64, next_file_number: u64) -> Result<()> {
        self.replace(number, &[], next_file_number).await
    }

    /// Whether the new MANIFEST is the current one.
    pub fn is_begun(&self) -> bool {
        self.file.is_some()
    }

    /// Its number, and its length after the last change; `None` before it is begun.
    pub fn written(&self) -> Option<FilePrefix> {
        let bytes = Some(self.log.position());
        self.is_begun().then_some(FilePrefix { number: self.number, bytes })
    }

    /// The state after all records so far.
    pub fn state(&self) -> &ManifestReplay {
        &self.state
    }

    /// Files that may be removed: MANIFESTs that were replaced, and those of changes that are not
    /// in the MANIFEST.
    pub fn take_obsolete(&mut self) -> Vec<FileName> {
        std::mem::take(&mut self.obsolete)
    }

    /// Whether it is unknown what is durable: a write of the MANIFEST or of CURRENT has failed, and
    /// the MANIFEST was not replaced since.
    pub fn is_undecided(&self) -> bool {
        self.undecided
    }

    /// How often the MANIFEST was replaced because a write of it had failed.
    pub fn heals(&self) -> u64 {
        self.heals
    }

    /// If it is unknown what is durable, replaces the MANIFEST. Changes that failed are not in the
    /// new one. Suspends for the disk.
    ///
    /// # Errors
    /// As for [`ManifestWriter::append`].
    pub async fn decide(&mut self, db: &Db) -> Result<()> {
        match self.undecided {
            true => self.replace(db.new_number(), &[], db.next_file()).await,
            false => Ok(()),
        }
    }

    /// Appends a change, one record for each column family, all or none, and makes it durable.
    /// Suspends for the disk. It adds the next file's number and the last sequence.
    ///
    /// # Errors
    /// The device's; [`Kind::Locked`] and [`Kind::NoDatabase`] if another process has taken the
    /// directory. Nothing was changed, unless [`ManifestWriter::is_undecided`]: then the change may
    /// be there after a crash, until a later call succeeds. The files that the change adds are
    /// obsolete in the first case, and are kept as long as they may be needed in the second.
    pub async fn append(&mut self, db: &Db, edits: Vec<VersionEdit>) -> Result<()> {
        // A caller may have been dropped during a write.
        self.give_up(self.undecided);
        self.adding = added_by(&edits);
        let (was_undecided, rivals) = (self.undecided, self.rivals.len());
        let done = self.append_edits(db, edits).await;
        match done {
            Ok(()) => self.adding.clear(),
            Err(_) => {
                let stayed_out = was_undecided && self.rivals.len() == rivals;
                self.give_up(self.undecided && !stayed_out);
            }
        }
        done
    }

    /// Ends a change that has failed; if it may be there after a crash, its files are kept.
    fn give_up(&mut self, may_be_there: bool) {
        let files = std::mem::take(&mut self.adding);
        match may_be_there {
            true => self.uncertain.extend(files),
            false => self.obsolete.extend(files),
        }
    }

    async fn append_edits(&mut self, db: &Db, mut edits: Vec<VersionEdit>) -> Result<()> {
        let count = edits.len();
        for (at, edit) in edits.iter_mut().enumerate() {
            edit.atomic_group_remaining = (count > 1).then(|| (count - 1 - at) as u32);
        }
        let records = encode(db, self.state.last_sequence(), &mut edits);
        let is_long = records.iter().any(|record| HEADER + record.len() > LOG_BLOCK_BYTES);
        let must = is_long || !self.is_begun() || self.undecided;
        let mut is_there = false;
        if must || self.log.position() >= self.replace_at {
            match self.replace_with(db, &mut edits).await {
                // The old one can still be used.
                Err(error) if !self.undecided && !must => tracing::debug!("{}: {error}", self.name),
                replaced => {
                    replaced?;
                    is_there = true;
                }
            }
        }
        if !is_there && let Err(error) = self.extend(&records).await {
            if !self.undecided {
                return Err(error);
            }
            tracing::warn!("{error}; a new MANIFEST takes its place");
            self.replace_with(db, &mut edits).await.map_err(Error::in_part)?;
        }
        for edit in edits {
            self.state.edit(edit).map_err(|e| Error::format(&self.name, &e))?;
        }
        Ok(())
    }

    /// Continues in a new file that also has a change.
    async fn replace_with(&mut self, db: &Db, edits: &mut [VersionEdit]) -> Result<()> {
        let number = db.new_number();
        let records = encode(db, self.state.last_sequence(), edits);
        self.replace(number, &records, db.next_file()).await
    }

    /// Writes records to the end of the file.
    async fn extend(&mut self, records: &[Vec<u8>]) -> Result<()> {
        let (parts, log) = pack(self.log, records);
        self.reserve(log.position()).await?;
        self.undecided = true;
        let mut at = self.log.position();
        for bytes in parts {
            self.put(at, &bytes).await?;
            at += bytes.len() as u64;
        }
        debug_assert_eq!(at, log.position());
        self.log = log;
        self.undecided = false;
        Ok(())
    }

    /// Continues in a new file, which begins with the whole state and then has `records`.
    async fn replace(&mut self, number: u64, records: &[Vec<u8>], next: u64) -> Result<()> {
        if self.undecided {
            self.check_current().await?;
        }
        let new = write_new(&self.core, &self.dir, number, &self.state, next, records).await;
        let (file, log) = match new {
            Ok(new) => new,
            Err(error) => {
                self.abandon(number).await;
                return Err(error);
            }
        };
        if mutant("old_manifest_goes_first") {
            let removed = self.dir.remove(&self.name).await;
            removed.map_err(|e| Error::io(&self.name, &e))?;
        }
        self.make_current(number).await?;
        tracing::debug!("{} is replaced: it had {} bytes", self.name, self.log.position());
        let old = self.rivals.drain(..).filter(|&rival| rival != number).chain([self.number]);
        self.obsolete.extend(old.map(FileName::Manifest));
        self.obsolete.append(&mut self.uncertain);
        self.number = number;
        self.name = FileName::Manifest(number).to_string();
        (self.file, self.log, self.room) = (Some(file), log, 0);
        self.replace_at = self.bytes_max.max(GROWTH * self.log.position());
        Ok(())
    }

    /// Makes a complete MANIFEST the current one.
    async fn make_current(&mut self, number: u64) -> Result<()> {
        let io = |e: std::io::Error| Error::io("CURRENT", &e);
        let text = format!("{}\n", FileName::Manifest(number));
        let was_undecided = std::mem::replace(&mut self.undecided, true);
        self.rivals.push(number);
        // After a failed sync, a second one need not cover the same rename.
        let mark = self.dir.mark();
        if let Err(error) = self.dir.replace_small("CURRENT", text.as_bytes()).await {
            let error = io(error);
            if matches!(error.kind(), Kind::Full | Kind::Memory) {
                self.rivals.pop();
                self.undecided = was_undecided;
                self.abandon(number).await;
            }
            return Err(error);
        }
        // Until this is done, a crash may leave either of the two current.
        self.dir.sync_since(mark).await.map_err(|e| io(e).in_part())?;
        self.undecided = false;
        self.heals += u64::from(was_undecided);
        Ok(())
    }

    /// Checks that CURRENT names a MANIFEST of this process.
    async fn check_current(&self) -> Result<()> {
        let text = self.dir.read_small("CURRENT", 4096).await.map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::new(Kind::NoDatabase, "CURRENT is gone: something has removed the database")
            }
            _ => Error::io("CURRENT", &e),
        })?;
        let named = parse_current(&text).map_err(|e| Error::format("CURRENT", &e))?;
        if named == self.number || self.rivals.contains(&named) {
            return Ok(());
        }
        let text = format!(
            "CURRENT names {}, which this process has not written: another process writes to this database",
            FileName::Manifest(named)
        );
        Err(Error::new(Kind::Locked, text))
    }

    /// Removes a MANIFEST that CURRENT does not name.
    async fn abandon(&mut self, number: u64) {
        let name = FileName::Manifest(number).to_string();
        if let Err(error) = self.dir.remove(&name).await {
            tracing::debug!("cannot remove {name}: {error}");
        }
    }

    fn file(&self) -> &File {
        match &self.file {
            Some(file) => file,
            None => unreachable!("the first change has begun it"),
        }
    }

    /// Reserves space up to `end`.
    async fn reserve(&mut self, end: u64) -> Result<()> {
        if end > self.room {
            let file = self.file();
            self.room = match file.reserve(end + ROOM).await {
                Ok(()) => end + ROOM,
                Err(_) => {
                    let reserved = file.reserve(end).await;
                    reserved.map_err(|e| Error::io(&self.name, &e))?;
                    end
                }
            };
        }
        Ok(())
    }

    /// Makes the part of one block durable, its first sector last.
    async fn put(&self, start: u64, bytes: &[u8]) -> Result<()> {
        debug_assert!(start.is_multiple_of(SECTOR as u64));
        let at_once = mutant("manifest_is_written_at_once");
        let (head, rest) = bytes.split_at(if at_once { 0 } else { bytes.len().min(SECTOR) });
        let parts = [(start + head.len() as u64, rest), (start, head)];
        for (at, bytes) in parts.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
            let written = write(self.file(), at, bytes).await;
            written.map_err(|e| Error::io(&self.name, &e).in_part())?;
            if !mutant("manifest_is_not_synced") {
                let synced = self.file().sync_data().await;
                synced.map_err(|e| Error::io(&self.name, &e).in_part())?;
            }
        }
        Ok(())
    }
}

/// The tables and blob files that a change adds. Tables that it moves are not among them.
pub(crate) fn added_by(edits: &[VersionEdit]) -> Vec<FileName> {
    let mut added = Vec::new();
    for edit in edits {
        let moved = |number| edit.deleted_files.iter().any(|(_, gone)| *gone == number);
        let tables = edit.new_files.iter().map(|(_, meta)| meta.number);
        added.extend(tables.filter(|&number| !moved(number)).map(FileName::Sst));
        added.extend(edit.new_blob_files.iter().map(|blob| FileName::Blob(blob.number)));
    }
    added
}

/// Encodes the records of a change. `last_sequence` is the MANIFEST's so far: no log that counts
/// holds it or a smaller one. It must not increase unless these logs become obsolete, or recovery
/// could not tell that one of them is missing.
fn encode(db: &Db, last_sequence: u64, edits: &mut [VersionEdit]) -> Vec<Vec<u8>> {
    let add = |edit: &mut VersionEdit| {
        edit.next_file_number = Some(db.next_file());
        edit.last_sequence = edit.last_sequence.max(Some(last_sequence));
        edit.encode()
    };
    edits.iter_mut().map(add).collect()
}

/// Writes a MANIFEST that is not current yet: records that lead to `state`, then `records`. It is
/// durable when this returns, and so is its name.
async fn write_new(
    core: &Core,
    dir: &Dir,
    number: u64,
    state: &ManifestReplay,
    next_file_number: u64,
    records: &[Vec<u8>],
) -> Result<(File, LogWriter)> {
    let name = FileName::Manifest(number).to_string();
    let io = |e: std::io::Error| Error::io(&name, &e).of_new_file();
    let mark = dir.mark();
    // Buffered, so that the file is never longer than its records.
    let file = core.attach(&dir.create_or_empty(&name, Mode::Buffered).await.map_err(io)?);
    let mut log = LogWriter::new(None, 0);
    let (mut at, mut bytes) = (0, Vec::new());
    for edit in state.snapshot(next_file_number) {
        log.append(&edit.encode(), &mut bytes);
        if bytes.len() >= PIECE {
            write(&file, at, &bytes).await.map_err(io)?;
            at += bytes.len() as u64;
            bytes.clear();
        }
        core.checkpoint().await;
    }
    for record in records {
        log.append(record, &mut bytes);
    }
    // A record without meaning fills the sector, or reaches to the end of a later one.
    while !log.position().is_multiple_of(SECTOR as u64) {
        let mut filler = Vec::new();
        let over = log.position() as usize % SECTOR;
        VersionEdit::fill(&mut filler, filled(0, SECTOR - over));
        log.append(&filler, &mut bytes);
    }
    write(&file, at, &bytes).await.map_err(io)?;
    if !(mutant("manifest_is_not_synced") || mutant("new_manifest_is_not_synced")) {
        file.sync_data().await.map_err(io)?;
    }
    // The MANIFEST's name must be durable before CURRENT has it.
    dir.sync_since(mark).await.map_err(io)?;
    Ok((file, log))
}

async fn write(file: &File, start: u64, bytes: &[u8]) -> std::io::Result<()> {
    let mut offset = start;
    for piece in bytes.chunks(PIECE) {
        let mut buf = insist::memory(file.core(), piece.len()).await?;
        buf[..piece.len()].copy_from_slice(piece);
        file.write_at(offset, buf, piece.len()).await.0?;
        offset += piece.len() as u64;
    }
    Ok(())
}

/// The length to which a record of `len` bytes is padded, so that with its header it ends with a
/// sector. `first` bytes are left in the first sector.
fn filled(len: usize, first: usize) -> usize {
    let mut end = first;
    while end < HEADER + len || (1..FILLER_MIN).contains(&(end - HEADER - len)) {
        end += SECTOR;
    }
    end - HEADER
}

/// Lays out records, none of them longer than a block, after a log that ends with a sector. Returns
/// the part of each block, and the log after them, which also ends with a sector.
fn pack(mut log: LogWriter, records: &[Vec<u8>]) -> (Vec<Vec<u8>>, LogWriter) {
    let left = |log: &LogWriter| LOG_BLOCK_BYTES - log.position() as usize % LOG_BLOCK_BYTES;
    let (mut parts, mut bytes) = (Vec::new(), Vec::new());
    for (at, record) in records.iter().enumerate() {
        if HEADER + record.len() > left(&log) {
            // The first record does not fit into the block.
            let mut filler = Vec::new();
            VersionEdit::fill(&mut filler, left(&log) - HEADER);
            log.append(&filler, &mut bytes);
            parts.push(std::mem::take(&mut bytes));
        }
        let end = HEADER + record.len();
        let room = left(&log) - end;
        // The padding: to the end of the block if the next record does not fit into it, to the end
        // of a sector if there is no next record.
        let more = match records.get(at + 1) {
            Some(next) if HEADER + next.len() <= room => 0,
            Some(_) => room,
            None => {
                let more = (log.position() as usize + end).next_multiple_of(SECTOR)
                    - (log.position() as usize + end);
                let again = (1..FILLER_MIN).contains(&more) && more < room;
                if again { more + SECTOR } else { more }
            }
        };
        let mut record = record.clone();
        if more >= FILLER_MIN {
            let len = record.len() + more;
            VersionEdit::fill(&mut record, len);
            log.append(&record, &mut bytes);
        } else {
            // Too little for a field. No header fits at the block's end, so zeros are valid there.
            log.append(&record, &mut bytes);
            bytes.resize(bytes.len() + more, 0);
            log = LogWriter::new(None, log.position() + more as u64);
        }
        if left(&log) == LOG_BLOCK_BYTES {
            parts.push(std::mem::take(&mut bytes));
        }
    }
    if !bytes.is_empty() {
        parts.push(bytes);
    }
    (parts, log)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rocksfmt::{LogEnd, LogKind, LogReader, is_torn_group};

    #[test]
    fn records_end_where_sectors_do() {
        for len in 0..2000 {
            for first in [SECTOR, 1, 6, 7, 8, 9, 10, 11, 300, 511] {
                let filled = filled(len, first);
                let more = filled - len;
                assert!(more == 0 || more >= FILLER_MIN, "{len} and {more}");
                assert!(more < 2 * SECTOR && (filled + HEADER) % SECTOR == first % SECTOR);
            }
        }
    }

    /// A record of an atomic group with `len` bytes, at least 8.
    fn record(len: usize, remaining: usize) -> Vec<u8> {
        let edit = VersionEdit {
            atomic_group_remaining: Some(remaining as u32),
            ..VersionEdit::default()
        };
        let mut record = edit.encode();
        VersionEdit::fill(&mut record, len);
        record
    }

    /// The number of whole records without fillers.
    fn read(bytes: &[u8]) -> (usize, LogEnd, u64) {
        let mut reader = LogReader::new(LogKind::Manifest);
        let mut count = 0;
        let fed = reader.feed(bytes, true, |record| {
            let edit = VersionEdit::decode(record.data).unwrap();
            count += usize::from(edit.atomic_group_remaining.is_some());
            Ok::<_, rocksfmt::Error>(())
        });
        fed.unwrap();
        (count, reader.end().unwrap().clone(), reader.good_until())
    }

    fn len() -> impl Strategy<Value = usize> {
        const MOST: usize = LOG_BLOCK_BYTES - HEADER;
        prop_oneof![
            8usize..300,
            480usize..520,
            9_000usize..17_000,
            MOST - 2 * SECTOR..=MOST,
            MOST - 4..=MOST,
        ]
    }

    proptest! {
        /// Any sectors of a part may be on the disk when power is cut before its first one is
        /// written. Readers see the parts before it, whole, and then the end.
        #[test]
        fn no_prefix_of_a_group_is_taken_for_damage(
            before in 0usize..65,
            lens in proptest::collection::vec(len(), 1..12),
            lost in proptest::collection::vec(any::<bool>(), 64),
        ) {
            let count = lens.len();
            let records: Vec<Vec<u8>> = lens
                .iter()
                .enumerate()
                .map(|(at, &len)| record(len, count - 1 - at))
                .collect();
            let mut disk = Vec::new();
            let mut log = LogWriter::new(None, 0);
            if before > 0 {
                let mut filler = Vec::new();
                VersionEdit::fill(&mut filler, before * SECTOR - HEADER);
                log.append(&filler, &mut disk);
            }
            let (parts, end) = pack(log, &records);
            let mut whole = 0;
            for part in parts {
                prop_assert_eq!(part.len() % SECTOR, 0);
                prop_assert!(disk.len() % LOG_BLOCK_BYTES + part.len() <= LOG_BLOCK_BYTES);
                // Without the first sector, and without some others.
                let mut torn = disk.clone();
                torn.extend_from_slice(&part);
                let start = disk.len();
                for (at, _) in lost.iter().enumerate().filter(|(at, lost)| *at == 0 || **lost) {
                    let range = start + at * SECTOR..(start + (at + 1) * SECTOR).min(torn.len());
                    if let Some(sector) = torn.get_mut(range) {
                        sector.fill(0);
                    }
                }
                let (found, end, good) = read(&torn);
                prop_assert_eq!(found, whole);
                match end {
                    LogEnd::Clean => {}
                    LogEnd::Truncated { offset } => {
                        prop_assert!(offset <= start as u64 && offset >= good);
                        let block = start - start % LOG_BLOCK_BYTES;
                        let rest = &torn[block..];
                        // Nothing, or members of the group.
                        let mut scan = rocksfmt::DamageScan::new(&reader_of(&torn), offset, 0);
                        if scan.push(block as u64, rest).is_some() {
                            prop_assert!(is_torn_group(rest, offset as usize % LOG_BLOCK_BYTES + 1));
                        }
                    }
                    other => prop_assert!(false, "{other:?}"),
                }
                disk.extend_from_slice(&part);
                whole = read(&disk).0;
            }
            prop_assert_eq!((whole, disk.len() as u64), (count, end.position()));
            prop_assert_eq!(read(&disk).1, LogEnd::Clean);
        }
    }

    fn reader_of(bytes: &[u8]) -> LogReader {
        let mut reader = LogReader::new(LogKind::Manifest);
        reader.feed(bytes, true, |_| Ok::<_, rocksfmt::Error>(())).unwrap();
        reader
    }
}
