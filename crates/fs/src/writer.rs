//! Writing a file from its start to its end: SST files, manifests, blob files.
//!
//! What is appended gathers in a buffer of [`CHUNK`] bytes. A full one is written while the next
//! is filled; there are two, so a writer holds at most two chunks of its core's memory, and
//! whoever appends waits for the disk when both are full.
//!
//! A direct file is written in whole blocks. A sync in the middle of one writes it padded with
//! zeroes, and writes it again, in the same place and with the same beginning, when more has come.
//! Until [`FileWriter::finish`] has cut it to its length, such a file is longer than what was
//! appended, by zeroes; so a log that others may have to read after a crash is better buffered.

use std::io;

use reactor::{Buf, File, WriteAt};

/// Bytes that are gathered before they are written; a multiple of every block size we meet.
const CHUNK: usize = 256 << 10;

/// See the module text.
pub struct FileWriter {
    file: File,
    /// What has not been handed to the disk, or not for the last time. Away while it is written.
    buf: Option<Buf>,
    /// Where in the file it begins: a multiple of the file's alignment.
    offset: u64,
    filled: usize,
    /// Bytes of `buf` that have been handed to the disk already.
    written: usize,
    under_way: Option<WriteAt>,
    /// A call failed or was dropped before it was done, so nobody knows what the file holds.
    broken: bool,
}

impl FileWriter {
    /// A writer that begins at the start of a file, in the place of what that holds. Suspends for
    /// memory.
    ///
    /// # Errors
    /// `OutOfMemory` when the core's budget could never hold a chunk, `Unsupported` when a direct
    /// file's blocks are larger than one.
    pub async fn new(file: &File) -> io::Result<FileWriter> {
        if !CHUNK.is_multiple_of(file.alignment()) {
            let text = format!("blocks of {} bytes", file.alignment());
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let buf = file.core().alloc_wait(CHUNK).await?;
        Ok(FileWriter {
            file: file.clone(),
            buf: Some(buf),
            offset: 0,
            filled: 0,
            written: 0,
            under_way: None,
            broken: false,
        })
    }

    /// Bytes appended so far.
    pub fn len(&self) -> u64 {
        self.offset + self.filled as u64
    }

    /// Whether nothing has been appended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The file it writes.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Appends `bytes`. Suspends for memory and for the disk, when it is slower than the caller.
    ///
    /// # Errors
    /// The disk's, perhaps of a write that an earlier call began. After an error, and after a
    /// call that was dropped before it was done, the writer is broken: every later call says so.
    pub async fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        self.begin()?;
        while !bytes.is_empty() {
            let n = bytes.len().min(CHUNK - self.filled);
            own(&mut self.buf)[self.filled..self.filled + n].copy_from_slice(&bytes[..n]);
            self.filled += n;
            bytes = &bytes[n..];
            if self.filled == CHUNK {
                self.hand_over().await?;
            }
        }
        self.broken = false;
        Ok(())
    }

    /// Makes durable what has been appended; suspends for the disk.
    ///
    /// # Errors
    /// As for [`FileWriter::append`].
    pub async fn sync(&mut self) -> io::Result<()> {
        self.begin()?;
        self.flush().await?;
        self.file.sync_data().await?;
        self.broken = false;
        Ok(())
    }

    /// Writes what is left, cuts the file to its length and makes all of it durable. Suspends for
    /// the disk. Returns the length.
    ///
    /// # Errors
    /// As for [`FileWriter::append`].
    pub async fn finish(mut self) -> io::Result<u64> {
        self.begin()?;
        self.flush().await?;
        if self.file.size() > self.len() {
            self.file.set_len(self.len()).await?;
        }
        self.file.sync_data().await?;
        Ok(self.len())
    }

    /// The writer counts as broken until the call that begins here is done.
    fn begin(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.broken, true) {
            return Err(io::Error::other("an earlier write of this file failed or was dropped"));
        }
        Ok(())
    }

    /// Waits for the write under way. Returns its buffer.
    async fn settle(&mut self) -> io::Result<Option<Buf>> {
        let Some(write) = &mut self.under_way else {
            return Ok(None);
        };
        let (result, buf) = write.await;
        self.under_way = None;
        result.map(|()| Some(buf))
    }

    /// Begins to write a full buffer and goes on with the other.
    async fn hand_over(&mut self) -> io::Result<()> {
        let next = match self.settle().await? {
            Some(buf) => buf,
            None => self.file.core().alloc_wait(CHUNK).await?,
        };
        if let Some(full) = self.buf.replace(next) {
            let mut write = self.file.write_at(self.offset, full, CHUNK);
            write.start();
            self.under_way = Some(write);
        }
        self.offset += CHUNK as u64;
        (self.filled, self.written) = (0, 0);
        Ok(())
    }

    /// Writes all that has been appended, and waits for it. What a direct file has of its last
    /// block stays in the buffer, to be written again with what follows it.
    async fn flush(&mut self) -> io::Result<()> {
        self.settle().await?;
        if self.filled == self.written {
            return Ok(());
        }
        let align = self.file.alignment();
        let whole = self.filled.next_multiple_of(align);
        own(&mut self.buf)[self.filled..whole].fill(0);
        let kept = self.filled % align;
        let done = self.filled - kept;
        if let Some(buf) = self.buf.take() {
            let (result, mut buf) = self.file.write_at(self.offset, buf, whole).await;
            result?;
            buf.copy_within(done..self.filled, 0);
            self.buf = Some(buf);
        }
        self.offset += done as u64;
        (self.filled, self.written) = (kept, kept);
        Ok(())
    }
}

/// The buffer: it is away only while a call writes it, and a call that ended there broke the
/// writer.
fn own(buf: &mut Option<Buf>) -> &mut Buf {
    buf.as_mut().expect("a writer that is not broken has its buffer")
}
