//! Writing the write-ahead log: whole groups of batches, at most one of them not yet durable.
//!
//! - `process`: a group is one buffered write. It survives the end of the process.
//! - `power`: a group is padded to the device's block, written directly and flushed. It survives a
//!   power cut.
//!
//! The file has its room on the disk from the start, and gets more before it needs it: so a write
//! does not find the disk full, and at `power` a flush need not wait for more than the blocks.
//!
//! At `power` every group ends in a record that says where it began, also the empty one with which
//! a log begins: recovery must know which holes a power cut can have torn (`rocksfmt`'s
//! `group_end.rs`).
//!
//! At both levels the first record says with which sequence the log begins: recovery notices a log
//! that is missing in front of it, or lacks its end (`log_chain.rs`).
//!
//! A log that is needed no more is kept as `NNNNNN.dbtmp`, gets a new name and is written again
//! from its start. Every record has its log's number, so what is left of the old one behind its end
//! is not taken for its own. So no blocks are given back and taken again, and at `power` a flush
//! has no block to enter into the file system's books. Two of RocksDB's `wal_recovery_mode`s take
//! the old records for damage: there the kept log is emptied first.
//!
//! A group that failed is not written again: nobody knows what of it is there.

use fs::{Dir, File, Mode};
use reactor::Core;
use rocksfmt::{FileName, GroupEnd, LOG_BLOCK_BYTES, LogStart, LogWriter};

use crate::durability::Durability;
use crate::error::{Error, Kind, Result};
use crate::write::insist;

/// What a log is to be like.
pub(crate) struct NewLog {
    pub number: u64,
    /// A log that is needed no more, to be written again: the number of the temporary file.
    pub spare: Option<u64>,
    /// Nothing of the spare one may be left.
    pub emptied: bool,
    pub durability: Durability,
    /// Room that it gets on the disk, in bytes.
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
    /// Room that it gets at a time.
    room: u64,
    /// The bytes of the group under way.
    group: Vec<u8>,
    broken: bool,
}

impl WalWriter {
    /// Makes a log, of a spare one where there is one; its name is durable when this is done.
    /// Suspends for the disk.
    ///
    /// # Errors
    /// The device's.
    pub async fn create(core: &Core, dir: &Dir, new: NewLog) -> Result<WalWriter> {
        let NewLog { number, spare, emptied, durability, room, next_sequence } = new;
        let name = FileName::Wal(number).to_string();
        let io = |e: std::io::Error| Error::io(&name, &e);
        let mode = match durability {
            Durability::Process => Mode::Buffered,
            Durability::Power => Mode::Direct,
        };
        let old = spare.map(|spare| FileName::Temp(spare).to_string());
        let made = async {
            if let Some(old) = &old {
                let room = emptied.then_some(room);
                let reopened = WalWriter::reopen(core, dir, &name, old, mode, room).await?;
                if let Some(file) = reopened {
                    return Ok(file);
                }
            }
            let file = core.attach(&dir.create_or_empty(&name, mode).await?);
            WalWriter::allocate(&file, room).await?;
            Ok(file)
        };
        let file = match made.await {
            Ok(file) => file,
            Err(error) => {
                // Nothing is in it. What cannot be removed is an empty log to whoever recovers.
                for name in old.iter().chain([&name]) {
                    let _ = dir.remove(name).await;
                }
                return Err(io(error));
            }
        };
        let mut writer = WalWriter {
            number,
            name: name.clone(),
            file,
            log: LogWriter::new(Some(number), 0),
            durability,
            room,
            group: Vec::new(),
            broken: false,
        };
        match durability {
            // It goes with the first group.
            Durability::Process => writer.add(&LogStart { sequence: next_sequence }.encode()),
            Durability::Power => drop(writer.commit(next_sequence).await?),
        }
        dir.sync().await.map_err(|e| io(e).for_good())?;
        Ok(writer)
    }

    /// An old log under its new name; emptied first where it gets new room. `None` where somebody
    /// else has the file, a reader or a checkpoint of hard links: then its old name goes.
    async fn reopen(
        core: &Core,
        dir: &Dir,
        name: &str,
        old: &str,
        mode: Mode,
        room: Option<u64>,
    ) -> std::io::Result<Option<File>> {
        let mut tries = 1;
        let opened = loop {
            match dir.open_unshared(old, mode).await {
                // Who has just looked at it may not have closed it yet.
                Err(error) if is_in_use(&error) && tries < REOPEN_TRIES => {
                    tries += 1;
                    core.sleep_ns(REOPEN_PAUSE_NS).await;
                }
                done => break done,
            }
        };
        let Ok(opened) = opened else {
            // What cannot be removed, the next opening removes.
            let _ = dir.remove(old).await;
            return Ok(None);
        };
        let file = core.attach(&opened);
        if let Some(room) = room {
            file.set_len(0).await?;
            WalWriter::allocate(&file, room).await?;
            // Before it is a log's: the name may be durable earlier than the length.
            file.sync_data().await?;
        }
        dir.rename(old, name).await?;
        Ok(Some(file))
    }

    /// Gives an empty file room on the disk.
    async fn allocate(file: &File, room: u64) -> std::io::Result<()> {
        if let Err(error) = file.allocate(room).await {
            // Less is better than nothing: it grows when it must.
            file.set_len(0).await?;
            file.allocate(room / 16).await.map_err(|_| error)?;
        }
        Ok(())
    }

    /// The most that the log is long with a group of so many batches, of together so many bytes.
    fn end_with(&self, batches: u64, bytes: u64) -> u64 {
        let headers = batches * 32 + bytes / 512;
        // What ends a group, and what fills blocks.
        let rest = 2 * LOG_BLOCK_BYTES as u64;
        self.log.position() + bytes + headers + rest
    }

    /// Whether a group fits into the room that the log has.
    pub fn has_room(&self, batches: u64, bytes: u64) -> bool {
        self.end_with(batches, bytes) <= self.file.size()
    }

    /// Gets room for a group. Suspends for the disk.
    ///
    /// # Errors
    /// The device's; [`Kind::Full`] changes nothing.
    pub async fn reserve(&mut self, batches: u64, bytes: u64) -> Result<()> {
        let end = self.end_with(batches, bytes);
        let reserved = match self.file.allocate(end + self.room).await {
            Err(_) => self.file.allocate(end).await,
            done => done,
        };
        reserved.map_err(|e| Error::io(&self.name, &e))
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
        let io = |e: std::io::Error| {
            Error::io(format_args!("{} at offset {start}", self.name), &e).for_good()
        };
        let mut offset = start;
        for piece in self.group.chunks(PIECE) {
            let mut buf = insist::memory(self.file.core(), piece.len()).await.map_err(io)?;
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
/// Attempts to open an old log, and the pause between them in nanoseconds.
const REOPEN_TRIES: u32 = 5;
const REOPEN_PAUSE_NS: u64 = 1_000_000;

fn is_in_use(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::WouldBlock
}
