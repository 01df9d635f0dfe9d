//! Writing the write-ahead log: whole groups of batches, at most one of them not yet durable.
//!
//! - `process`: a group is one buffered write. It survives the end of the process.
//! - `power`: a group is padded to the device's block, written directly and flushed. It survives
//!   a power cut. The file has its room from the start, so that a flush need not wait for more
//!   than the blocks.
//!
//! At `power` every group ends in a record that says where it began, also the empty one with which
//! a log begins: recovery must know which holes a power cut can have torn (`rocksfmt`'s
//! `group_end.rs`).
//!
//! A log that is needed no more gets a new name and is written again from its start. Every record
//! has its log's number, so what is left of the old one behind its end is not taken for its own. So
//! no blocks are given back and taken again, and at `power` a flush has no block to enter into the
//! file system's books.
//!
//! A group that failed is not written again: nobody knows what of it is there.

use fs::{Dir, File, Mode};
use reactor::Core;
use rocksfmt::{FileName, GroupEnd, LogWriter};

use crate::error::{Error, Kind, Result};

/// What an acknowledged write survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Durability {
    /// The end of the process.
    Process,
    /// A power cut.
    #[default]
    Power,
}

/// What a log is to be like.
pub(crate) struct NewLog {
    pub number: u64,
    /// A log that is needed no more, to be written again.
    pub spare: Option<u64>,
    pub durability: Durability,
    /// Room that it gets at `power`, in bytes.
    pub room: u64,
    /// The sequence of its first batch.
    pub next_sequence: u64,
}

/// See the module text.
pub(crate) struct WalWriter {
    number: u64,
    name: String,
    file: File,
    log: LogWriter,
    durability: Durability,
    /// The bytes of the group under way.
    group: Vec<u8>,
    broken: bool,
}

impl WalWriter {
    /// Makes a log, of a spare one where there is one; its name is durable when this is done. Suspends for the
    /// disk.
    ///
    /// # Errors
    /// The device's.
    pub async fn create(core: &Core, dir: &Dir, new: NewLog) -> Result<WalWriter> {
        let NewLog { number, spare, durability, room, next_sequence } = new;
        let name = FileName::Wal(number).to_string();
        let io = |e: std::io::Error| Error::io(&name, &e);
        let mode = match durability {
            Durability::Process => Mode::Buffered,
            Durability::Power => Mode::Direct,
        };
        let file = match spare {
            Some(spare) => {
                dir.rename(&FileName::Wal(spare).to_string(), &name).await.map_err(io)?;
                dir.open_for_writing(&name, mode).await
            }
            None => dir.create_or_empty(&name, mode).await,
        };
        let file = core.attach(&file.map_err(io)?);
        let mut writer = WalWriter {
            number,
            name: name.clone(),
            file,
            log: LogWriter::new(Some(number), 0),
            durability,
            group: Vec::new(),
            broken: false,
        };
        if durability == Durability::Power {
            if spare.is_none() {
                writer.file.allocate(room).await.map_err(io)?;
            }
            writer.commit(next_sequence).await?;
        }
        dir.sync().await.map_err(io)?;
        Ok(writer)
    }

    /// The number in the file's name.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The file, of a log that nothing more is added to.
    pub fn into_file(self) -> File {
        self.file
    }

    /// Adds a batch to the group under way.
    pub fn add(&mut self, batch: &[u8]) {
        self.log.append(batch, &mut self.group);
    }

    /// Writes the group, and flushes it at `power`. `next_sequence` is that of the next batch.
    /// Suspends for memory and for the disk. Returns the bytes written.
    ///
    /// # Errors
    /// The device's; after one, every later call fails.
    pub async fn commit(&mut self, next_sequence: u64) -> Result<u64> {
        if std::mem::replace(&mut self.broken, true) {
            return Err(Error::new(
                Kind::Io,
                format!("{}: an earlier write of it failed: open the database again", self.name),
            ));
        }
        let start = self.log.position() - self.group.len() as u64;
        if self.durability == Durability::Power {
            let alignment = self.file.alignment().max(512);
            self.log.end_group(GroupEnd { start }, next_sequence, alignment, &mut self.group);
        }
        let io = |e: std::io::Error| Error::io(format_args!("{} at offset {start}", self.name), &e);
        let mut offset = start;
        for piece in self.group.chunks(PIECE) {
            let mut buf = self.file.core().alloc_wait(piece.len()).await.map_err(io)?;
            buf[..piece.len()].copy_from_slice(piece);
            self.file.write_at(offset, buf, piece.len()).await.0.map_err(io)?;
            offset += piece.len() as u64;
        }
        if self.durability == Durability::Power {
            self.file.sync_data().await.map_err(io)?;
        }
        self.group.clear();
        self.broken = false;
        Ok(offset - start)
    }
}

/// Largest single write in bytes; a multiple of every alignment.
const PIECE: usize = 1 << 20;
