//! Moving the live values of blob files into new files, in the order in which they were written.
//! The job that runs on another core.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use fs::{FileWriter, Mode, SharedFile};
use rocksfmt::{
    BLOB_HEADER_BYTES, BLOB_RECORD_HEADER_BYTES, BlobFileMeta, BlobFooter, BlobHeader, BlobIndex,
    BlobRecord, Compression, FileName, ValueType, blob_columns, crc32c_append, unpack,
};

use crate::db::CfId;
use crate::error::{Error, Kind, Result};
use crate::read::ahead::WINDOW_MAX;
use crate::read::level_iter::{Bounds, LevelIter};
use crate::read::reader::Reader;
use crate::read::walk::{Direction, Position};
use crate::version::Version;
use crate::write::blob_gc::tables::{References, count_reference};
use crate::write::job::{self, ENTRIES_AT_ONCE, Job};
use crate::write::pace::{Pace, Paced};

/// Bytes that are read at a time.
const PIECE: u64 = 256 << 10;
/// Dead bytes between two live values that are read with them.
const GAP: u64 = 16 << 10;

/// A live value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LiveValue {
    file: u64,
    /// Of the value; its header and its key come before it.
    offset: u64,
    size: u64,
    key_len: u32,
    compression: Compression,
}

impl LiveValue {
    /// Values that were written later have larger ones.
    fn place(&self) -> (u64, u64) {
        (self.file, self.offset)
    }

    fn start(&self) -> u64 {
        self.offset.saturating_sub(u64::from(self.key_len) + BLOB_RECORD_HEADER_BYTES as u64)
    }

    fn end(&self) -> u64 {
        self.offset.saturating_add(self.size)
    }
}

/// What is collected.
pub(super) struct Collecting {
    pub version: Arc<Version>,
    pub family: CfId,
    /// The files.
    pub victims: BTreeSet<u64>,
    /// The tables that may refer to them, by slot.
    pub tables: Vec<u32>,
    /// Length of a new file.
    pub file_bytes: u64,
    /// Most values. There are more if the MANIFEST counts too much garbage.
    pub values_max: usize,
    pub pace: Arc<Pace>,
}

/// A new blob file.
pub(super) struct NewBlobFile {
    pub meta: BlobFileMeta,
    pub file: Arc<SharedFile>,
}

/// Values that were moved: from where to where, sorted.
#[derive(Default)]
pub(super) struct Moved {
    pub files: Vec<NewBlobFile>,
    /// Old file and offset, and the new ones.
    values: Vec<((u64, u64), (u64, u64))>,
}

impl Moved {
    /// The new reference to a value, if it was moved.
    pub fn find(&self, index: &BlobIndex) -> Option<BlobIndex> {
        let from = (index.file_number, index.offset);
        let at = self.values.binary_search_by_key(&from, |(from, _)| *from).ok()?;
        let (file_number, offset) = self.values[at].1;
        Some(BlobIndex { file_number, offset, ..*index })
    }
}

/// The result of moving.
pub(super) enum Moving {
    Done {
        moved: Moved,
        /// The tables that do not refer to the files, by number.
        clean: BTreeSet<u64>,
        /// The references of all tables that were read, by blob file.
        referred: References,
    },
    /// A table cannot be read.
    Table(u32, Error),
    /// A blob file cannot be read, or has too many values.
    Blob(u64, Error),
}

impl Collecting {
    /// Moves all live values. The new files are durable, their names are not.
    pub async fn run(&self, job: &Job) -> Result<Moving> {
        let (mut live, mut clean) = (BTreeMap::new(), BTreeSet::new());
        let mut referred = References::new();
        let mut paced = Paced::new(&self.pace, &job.busy);
        for &slot in &self.tables {
            let before = live.len();
            let found = self.references(job, slot, &mut paced, &mut live, &mut referred).await;
            let stuck = match found {
                Ok(stuck) => stuck,
                Err(error) => return Ok(Moving::Table(slot, error)),
            };
            let meta = self.version.meta(slot);
            if let Some(number) = stuck {
                let what = "a wide-column entity refers to it, which is not moved";
                return Ok(Moving::Blob(number, Error::new(Kind::Unsupported, what)));
            }
            if live.len() == before && !self.victims.contains(&meta.oldest_blob_file) {
                clean.insert(meta.number);
            }
            if live.len() > self.values_max {
                let what = format!("more than {} values to move", self.values_max);
                let largest = self.victims.last().copied().unwrap_or_default();
                return Ok(Moving::Blob(largest, Error::new(Kind::Memory, what)));
            }
        }
        let mut copying = Copying {
            collecting: self,
            job,
            paced,
            is_unread: false,
            open: None,
            moved: Moved::default(),
        };
        let mut number = self.victims.last().copied().unwrap_or_default();
        let (mut near, mut copied) = (Vec::new(), Ok(()));
        for value in live.into_values() {
            if !continues(&near, &value) {
                copied = copying.piece(&near).await;
                near.clear();
                job.core.checkpoint().await;
            }
            if copied.is_err() {
                break;
            }
            number = value.file;
            near.push(value);
        }
        if copied.is_ok() {
            copied = copying.piece(&near).await;
        }
        if copied.is_ok() {
            copied = copying.end_file().await;
        }
        if let Err(error) = copied {
            job::remove_made(&job.dir, job.made.take().into_iter()).await;
            let is_bad = error.kind() == Kind::Corruption || copying.is_unread;
            return match is_bad && error.kind() != Kind::Memory {
                true => Ok(Moving::Blob(number, error)),
                false => Err(error),
            };
        }
        Ok(Moving::Done { moved: copying.moved, clean, referred })
    }

    /// Adds the references of a table: those to the files to `found`, and all to `referred`.
    /// Returns a file to which a wide-column entity refers.
    async fn references(
        &self,
        job: &Job,
        slot: u32,
        paced: &mut Paced<'_>,
        found: &mut BTreeMap<(u64, u64), LiveValue>,
        referred: &mut References,
    ) -> Result<Option<u64>> {
        let mut stuck = None;
        let mut entries = entries(job, &self.version, self.family, slot).await?;
        let mut steps = 0;
        while entries.valid() {
            if unpack(entries.packed()).1 == ValueType::BlobIndex as u8
                && let Ok(index) = BlobIndex::parse(&entries.value())
            {
                let key_len = entries.user_key().len();
                count_reference(referred, &index, key_len);
                if self.victims.contains(&index.file_number) {
                    let value = LiveValue {
                        file: index.file_number,
                        offset: index.offset,
                        size: index.size,
                        key_len: key_len as u32,
                        compression: index.compression,
                    };
                    found.insert(value.place(), value);
                }
            }
            if unpack(entries.packed()).1 == ValueType::WideColumnEntity as u8
                && let Ok(columns) = blob_columns(&entries.value())
            {
                for index in columns {
                    count_reference(referred, &index, entries.user_key().len());
                    if self.victims.contains(&index.file_number) {
                        stuck = Some(index.file_number);
                    }
                }
            }
            let bytes = entries.user_key().len() + entries.value().len();
            paced.done(&job.core, bytes as u64).await;
            entries.step(Direction::Forward).await?;
            steps += 1;
            if steps % ENTRIES_AT_ONCE == 0 {
                job.core.checkpoint().await;
            }
        }
        Ok(stuck)
    }
}

/// All entries of a table, from the first.
pub(super) async fn entries(
    job: &Job,
    version: &Arc<Version>,
    family: CfId,
    slot: u32,
) -> Result<LevelIter> {
    let comparator = version.family(family)?.comparator;
    let context = Reader::uncached(&job.db, &job.core).context_at(version);
    let run = vec![slot].into();
    let bounds = Rc::new(Bounds::default());
    let mut iter = LevelIter::new(&context, comparator, run, &bounds, false, WINDOW_MAX, false);
    iter.seek(Position::First, Direction::Forward).await?;
    Ok(iter)
}

/// Whether a value is read together with those before it.
fn continues(before: &[LiveValue], next: &LiveValue) -> bool {
    let (Some(first), Some(last)) = (before.first(), before.last()) else { return true };
    next.file == first.file
        && next.start() >= last.end()
        && next.start() - last.end() <= GAP
        && next.end() - first.start() <= PIECE
}

/// Reads a part of a blob file; once more if the device fails the read.
async fn read(file: &fs::File, at: u64, len: usize) -> std::io::Result<fs::Slice> {
    match fs::read(file, at, len).await {
        Err(error) if error.kind() != std::io::ErrorKind::OutOfMemory => {
            fs::read(file, at, len).await
        }
        read => read,
    }
}

/// Values that are being copied.
struct Copying<'a> {
    collecting: &'a Collecting,
    job: &'a Job,
    paced: Paced<'a>,
    /// A blob file could not be read.
    is_unread: bool,
    open: Option<OpenFile>,
    moved: Moved,
}

struct OpenFile {
    number: u64,
    writer: FileWriter,
    compression: Compression,
    count: u64,
}

impl Copying<'_> {
    /// Copies values that are near each other.
    async fn piece(&mut self, values: &[LiveValue]) -> Result<()> {
        let (Some(first), Some(last)) = (values.first(), values.last()) else { return Ok(()) };
        let family = self.collecting.version.family(self.collecting.family)?;
        let place = || format!("{} at offset {}", FileName::Blob(first.file), first.start());
        let missing = || Error::new(Kind::Corruption, format!("{} is missing", place()));
        let at = family.blobs.binary_search_by_key(&first.file, |(number, _)| *number);
        let shared = &family.blobs[at.map_err(|_| missing())?].1.file;
        let file = self.job.core.attach(shared);
        for value in values {
            let range = value.as_index().record_range(value.key_len as usize, file.size());
            range.map_err(|e| Error::format(place(), &e))?;
        }
        let io = |e: std::io::Error| Error::io(place(), &e);
        let bytes = last.end() - first.start();
        if bytes > PIECE {
            return self.large(&file, first).await;
        }
        let piece = read(&file, first.start(), bytes as usize).await;
        self.is_unread = piece.is_err();
        let piece = piece.map_err(io)?;
        for value in values {
            let from = (value.start() - first.start()) as usize;
            let record = &piece[from..from + (value.end() - value.start()) as usize];
            let parsed = parse(value, record)?;
            parsed.verify(record).map_err(|e| Error::format(place(), &e))?;
            self.begin(value).await?;
            self.append(record).await?;
            self.note(value);
        }
        Ok(())
    }

    /// Copies a large value, a part at a time.
    async fn large(&mut self, file: &fs::File, value: &LiveValue) -> Result<()> {
        let place = || format!("{} at offset {}", FileName::Blob(value.file), value.start());
        let io = |e: std::io::Error| Error::io(place(), &e);
        self.begin(value).await?;
        let (mut at, mut header, mut crc) = (value.start(), None, 0);
        while at < value.end() {
            let len = (value.end() - at).min(PIECE) as usize;
            let piece = read(file, at, len).await;
            self.is_unread = piece.is_err();
            let piece = piece.map_err(io)?;
            let skipped = match header {
                Some(_) => 0,
                None => {
                    header = Some(parse(value, &piece)?);
                    BLOB_RECORD_HEADER_BYTES
                }
            };
            crc = crc32c_append(crc, &piece[skipped..]);
            self.append(&piece).await?;
            at += len as u64;
            self.job.core.checkpoint().await;
        }
        if let Some(header) = header {
            header.verify_crc(crc).map_err(|e| Error::format(place(), &e))?;
        }
        self.note(value);
        Ok(())
    }

    /// Makes sure that there is a file with room for a value.
    async fn begin(&mut self, value: &LiveValue) -> Result<()> {
        let limit = self.collecting.file_bytes;
        let fits = self.open.as_ref().is_some_and(|open| {
            open.compression == value.compression
                && open.writer.len() + (value.end() - value.start()) <= limit
        });
        if fits {
            return Ok(());
        }
        self.end_file().await?;
        let job = self.job;
        let number = job.db.new_number();
        job.made.borrow_mut().push(FileName::Blob(number));
        let name = FileName::Blob(number).to_string();
        let io = |e: std::io::Error| Error::io(&name, &e);
        let file = job.dir.create_or_empty(&name, Mode::Direct).await.map_err(io)?;
        let mut writer = FileWriter::new(&job.core.attach(&file)).await.map_err(io)?;
        let (column_family_id, compression) = (self.collecting.family, value.compression);
        let header = BlobHeader { column_family_id, compression }.encode();
        writer.append(&header).await.map_err(io)?;
        self.open = Some(OpenFile { number, writer, compression, count: 0 });
        Ok(())
    }

    async fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let Some(open) = &mut self.open else { unreachable!("`begin` was called") };
        let written = open.writer.append(bytes).await;
        written.map_err(|e| Error::io(FileName::Blob(open.number), &e))?;
        self.paced.done(&self.job.core, bytes.len() as u64).await;
        Ok(())
    }

    /// Notes that a value was copied to the end of the open file.
    fn note(&mut self, value: &LiveValue) {
        let Some(open) = &mut self.open else { unreachable!("`begin` was called") };
        open.count += 1;
        let to = (open.number, open.writer.len() - value.size);
        self.moved.values.push(((value.file, value.offset), to));
    }

    /// Completes the open file.
    async fn end_file(&mut self) -> Result<()> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        let name = FileName::Blob(open.number).to_string();
        let io = |e: std::io::Error| Error::io(&name, &e);
        let (number, total_count) = (open.number, open.count);
        let total_bytes = open.writer.len() - BLOB_HEADER_BYTES as u64;
        let footer = BlobFooter { count: total_count }.encode();
        open.writer.append(&footer).await.map_err(io)?;
        open.writer.finish().await.map_err(io)?;
        let meta =
            BlobFileMeta { number, total_count, total_bytes, garbage_count: 0, garbage_bytes: 0 };
        let file = self.job.dir.open(&name).await.map_err(io)?;
        self.moved.files.push(NewBlobFile { meta, file });
        Ok(())
    }
}

impl LiveValue {
    fn as_index(&self) -> BlobIndex {
        let LiveValue { file, offset, size, compression, .. } = *self;
        BlobIndex { file_number: file, offset, size, compression }
    }
}

/// The header of a value's record, which must have the lengths of the reference.
fn parse(value: &LiveValue, record: &[u8]) -> Result<BlobRecord> {
    let place = || format!("{} at offset {}", FileName::Blob(value.file), value.start());
    let header = record.get(..BLOB_RECORD_HEADER_BYTES).unwrap_or_default();
    let header = BlobRecord::parse(header).map_err(|e| Error::format(place(), &e))?;
    if (header.key_len, header.value_len) != (u64::from(value.key_len), value.size) {
        let what = format!("{}: the record has other lengths than its reference", place());
        return Err(Error::new(Kind::Corruption, what));
    }
    Ok(header)
}
