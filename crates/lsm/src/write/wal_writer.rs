//! Writing the write-ahead log: whole groups of batches, at most one of them not yet durable.
//!
//! - `process`: a group is one buffered write. It survives the end of the process.
//! - `power`: a group is padded to the device's block, and written directly and durably. The first
//!   and a large one are written and flushed; others are one durable write. It survives a power
//!   cut.
//!
//! The file reserves its space on the disk when it is created, and more before it is needed. So a
//! write does not find the disk full, and at `power` a flush waits for the data blocks only.
//!
//! At `power` every group ends in a record that says where the group began; the log begins with an
//! empty group. So recovery knows which gaps a torn write can have left (`rocksfmt`'s
//! `group_end.rs`).
//!
//! At both levels the first record has the log's first sequence. So recovery notices that the log
//! before it is missing or lacks its end (`log_chain.rs`).
//!
//! An obsolete log is recycled: it is kept as `NNNNNN.dbtmp`, gets a new name and is written over
//! from its start. Every record has its log's number, so records of the old log after the end of
//! the new one are not taken for its own. Recycling frees and allocates no blocks, and at `power` a
//! flush has no block to enter into the file system's metadata. Two of RocksDB's
//! `wal_recovery_mode`s take the old records for damage: for these the log is truncated first.
//!
//! After a failed group the log is given up: it is unknown how much of the group is on the disk
//! (`commit.rs`).

use fs::{Dir, File, Mode};
use reactor::Core;
use rocksfmt::{FileName, GroupEnd, LOG_BLOCK_BYTES, LogStart, LogWriter};

use crate::durability::Durability;
use crate::error::{Error, Kind, Result};
use crate::file_list::FilePrefix;
use crate::write::commit::GROUP_BYTES;
use crate::write::insist;

/// How to create a log.
pub(crate) struct NewLog {
    pub number: u64,
    /// The number of a recycled log's temporary file.
    pub recycled: Option<u64>,
    /// Truncate the recycled log first.
    pub emptied: bool,
    pub durability: Durability,
    /// Space that it reserves on the disk, in bytes.
    pub room: u64,
}

/// A log could not be created.
pub(crate) struct NotCreated {
    pub error: Error,
    /// A power cut may bring it back, with the sequence with which it begins. Then no older log
    /// may be continued.
    pub may_be_there: bool,
}

/// A log that is being written.
pub(crate) struct WalWriter {
    number: u64,
    name: String,
    file: File,
    log: LogWriter,
    durability: Durability,
    /// Space that it reserves at a time.
    room: u64,
    /// The bytes of the group under way.
    group: Vec<u8>,
    /// A write failed.
    broken: bool,
}

/// A log without records. Its name is durable.
pub(crate) struct EmptyLog {
    number: u64,
    name: String,
    file: File,
    durability: Durability,
    room: u64,
}

impl EmptyLog {
    /// Makes a log, from a recycled one if there is one. Suspends for the disk.
    ///
    /// # Errors
    /// The device's.
    pub async fn make(core: &Core, dir: &Dir, new: NewLog) -> Result<EmptyLog> {
        let NewLog { number, recycled, emptied, durability, room } = new;
        let name = FileName::Wal(number).to_string();
        let mark = dir.mark();
        let mode = match durability {
            Durability::Process => Mode::Buffered,
            Durability::Power => Mode::Direct,
        };
        let old = recycled.map(|number| FileName::Temp(number).to_string());
        let made = async {
            let reopened = match &old {
                Some(old) => {
                    let room = emptied.then_some(room);
                    WalWriter::reopen(core, dir, &name, old, mode, room).await?
                }
                None => None,
            };
            let file = match reopened {
                Some(file) => file,
                None => {
                    let file = core.attach(&dir.create_or_empty(&name, mode).await?);
                    WalWriter::allocate(&file, room).await?;
                    file
                }
            };
            dir.sync_since(mark).await?;
            Ok(file)
        };
        match made.await {
            Ok(file) => Ok(EmptyLog { number, name, file, durability, room }),
            Err(error) => {
                // It holds nothing. If it cannot be removed, recovery finds an empty log.
                for name in old.iter().chain([&name]) {
                    let _ = dir.remove(name).await;
                }
                let error: std::io::Error = error;
                Err(Error::io(&name, &error).of_new_file())
            }
        }
    }

    /// Its file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Begins the log with the sequence of its first batch. Suspends for the disk at `power`.
    ///
    /// # Errors
    /// The device's. The log is removed.
    pub async fn begin(
        self,
        dir: &Dir,
        next_sequence: u64,
    ) -> std::result::Result<WalWriter, NotCreated> {
        let EmptyLog { number, name, file, durability, room } = self;
        let mut writer = WalWriter {
            number,
            name,
            file,
            log: LogWriter::new(Some(number), 0),
            durability,
            room,
            group: Vec::new(),
            broken: false,
        };
        match durability {
            // Written with the first group.
            Durability::Process => writer.add(&LogStart { sequence: next_sequence }.encode()),
            Durability::Power => {
                if let Err(error) = writer.commit(next_sequence).await {
                    let (mark, name) = (dir.mark(), &writer.name);
                    let is_gone =
                        dir.remove(name).await.is_ok() && dir.sync_since(mark).await.is_ok();
                    return Err(NotCreated { error, may_be_there: !is_gone });
                }
            }
        }
        Ok(writer)
    }
}

impl WalWriter {
    /// Opens a recycled log under its new name. With `room` it is truncated first and reserves that
    /// space. Returns `None` if a reader or a checkpoint of hard links has the file: then its old
    /// name is removed.
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
                // A process that has just inspected it may not have closed it yet.
                Err(error) if is_in_use(&error) && tries < REOPEN_TRIES => {
                    tries += 1;
                    core.sleep_ns(REOPEN_PAUSE_NS).await;
                }
                done => break done,
            }
        };
        let Ok(opened) = opened else {
            // If this fails, the next opening removes it.
            let _ = dir.remove(old).await;
            return Ok(None);
        };
        let file = core.attach(&opened);
        if let Some(room) = room {
            file.set_len(0).await?;
            WalWriter::allocate(&file, room).await?;
            // Before the rename, because the name may become durable before the length.
            file.sync_data().await?;
        }
        dir.rename(old, name).await?;
        Ok(Some(file))
    }

    /// Reserves space for an empty file on the disk.
    async fn allocate(file: &File, room: u64) -> std::io::Result<()> {
        if let Err(error) = file.allocate(room).await {
            // Less space is better than none: the log grows when it has to.
            file.set_len(0).await?;
            file.allocate(room / 16).await.map_err(|_| error)?;
        }
        Ok(())
    }

    /// The largest length of the log after a group of `batches` with `bytes` in total.
    fn end_with(&self, batches: u64, bytes: u64) -> u64 {
        let headers = batches * 32 + bytes / 512;
        // The group's end record, and padding.
        let rest = 2 * LOG_BLOCK_BYTES as u64;
        self.log.position() + bytes + headers + rest
    }

    /// Whether a group fits into the reserved space.
    pub fn has_room(&self, batches: u64, bytes: u64) -> bool {
        self.end_with(batches, bytes) <= self.file.size()
    }

    /// Reserves space for a group. Suspends for the disk.
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

    /// Its number, and its length after the last group.
    pub fn written(&self) -> FilePrefix {
        let bytes = Some(self.log.position() - self.group.len() as u64);
        FilePrefix { number: self.number, bytes }
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The file of a log that is complete.
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
                format!("{}: an earlier write of it failed", self.name),
            ));
        }
        let start = self.log.position() - self.group.len() as u64;
        if self.durability == Durability::Power {
            let alignment = self.file.alignment().max(512);
            self.log.end_group(GroupEnd { start }, next_sequence, alignment, &mut self.group);
        }
        let io = |e: std::io::Error| {
            Error::io(format_args!("{} at offset {start}", self.name), &e).in_part()
        };
        let mut offset = start;
        let is_power = self.durability == Durability::Power;
        // A durable write covers neither other pieces nor the length and the blocks of a new file.
        let in_one = is_power && self.group.len() <= PIECE && start > 0;
        for piece in self.group.chunks(PIECE) {
            let len = piece.len();
            let mut buf = insist::memory(self.file.core(), len).await.map_err(io)?;
            buf[..len].copy_from_slice(piece);
            let write = match in_one {
                true => self.file.write_durably_at(offset, buf, len),
                false => self.file.write_at(offset, buf, len),
            };
            write.await.0.map_err(io)?;
            offset += len as u64;
        }
        if is_power && !in_one {
            self.file.sync_data().await.map_err(io)?;
        }
        self.group.clear();
        self.group.shrink_to(2 * GROUP_BYTES);
        self.broken = false;
        Ok(offset - start)
    }
}

/// Largest single write in bytes; a multiple of every alignment.
const PIECE: usize = 1 << 20;
/// Attempts to open a recycled log, and the pause between them in nanoseconds.
const REOPEN_TRIES: u32 = 5;
const REOPEN_PAUSE_NS: u64 = 1_000_000;

fn is_in_use(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::WouldBlock
}
