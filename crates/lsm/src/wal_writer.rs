//! Writing the write-ahead log: whole groups of batches, at most one of them not yet durable.
//!
//! - `process`: a group is one buffered write. It survives the end of the process.
//! - `power`: a group is padded to the device's block, written directly and flushed. It survives
//!   a power cut. The file has its room from the start, so that a flush need not wait for more
//!   than the blocks.
//!
//! A group that failed is not written again: nobody knows what of it is there.

use fs::{Dir, File, Mode};
use reactor::Core;
use rocksfmt::{FileName, LogWriter};

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

/// Room that a new log gets, in bytes.
const ALLOCATED: u64 = 64 << 20;

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
    /// Makes a log; its name is durable when this is done. Suspends for the disk.
    ///
    /// # Errors
    /// The device's.
    pub async fn create(
        core: &Core,
        dir: &Dir,
        number: u64,
        durability: Durability,
    ) -> Result<WalWriter> {
        let name = FileName::Wal(number).to_string();
        let io = |e: std::io::Error| Error::io(&name, &e);
        let mode = match durability {
            Durability::Process => Mode::Buffered,
            Durability::Power => Mode::Direct,
        };
        let file = core.attach(&dir.create_or_empty(&name, mode).await.map_err(io)?);
        if durability == Durability::Power {
            file.allocate(ALLOCATED).await.map_err(io)?;
            file.sync_data().await.map_err(io)?;
        }
        dir.sync().await.map_err(io)?;
        Ok(WalWriter {
            number,
            name: name.clone(),
            file,
            log: LogWriter::new(Some(number), 0),
            durability,
            group: Vec::new(),
            broken: false,
        })
    }

    /// The number in the file's name.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Adds a batch to the group under way.
    pub fn add(&mut self, batch: &[u8]) {
        self.log.append(batch, &mut self.group);
    }

    /// Writes the group, and flushes it at `power`. `next_sequence` is that of the next batch.
    /// Suspends for memory and for the disk.
    ///
    /// # Errors
    /// The device's; after one, every later call fails.
    pub async fn commit(&mut self, next_sequence: u64) -> Result<()> {
        if std::mem::replace(&mut self.broken, true) {
            return Err(Error::new(
                Kind::Io,
                format!("{}: an earlier write of it failed: open the database again", self.name),
            ));
        }
        let start = self.log.position() - self.group.len() as u64;
        if self.durability == Durability::Power {
            self.log.pad(self.file.alignment().max(512), next_sequence, &mut self.group);
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
        Ok(())
    }
}

/// Largest single write in bytes; a multiple of every alignment.
const PIECE: usize = 1 << 20;
