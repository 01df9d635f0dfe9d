//! Sequential writing of a whole file: SST files, manifests, blob files.
//!
//! Appended data gathers in a buffer of [`CHUNK`] bytes. Full buffers are written while the next
//! one fills: up to [`WRITES_MAX`] at a time, fewer if memory is short. An append waits for the
//! disk when no buffer is left.
//!
//! A direct file is written in whole blocks. A sync in mid-block writes that block padded with
//! zeroes; later appends rewrite it in place, with the same beginning. Until [`FileWriter::finish`]
//! has cut it to its length, a direct file may end in padding zeroes; so a log that must be
//! readable after a crash should be buffered.

use std::collections::VecDeque;
use std::io;

use reactor::{Buf, File, WriteAt};

/// Bytes gathered before a write; a multiple of every block size we meet.
const CHUNK: usize = 256 << 10;

/// Most chunks that are being written. A disk that serves each of them slowly, because it is far
/// away or serves others, still writes at its full rate.
const WRITES_MAX: usize = 4;

/// The chunks of one writer may take this part of its core's memory, if they are more than two.
const MEMORY_SHARE: usize = 32;

/// Appends to a file from its start.
pub struct FileWriter {
    file: File,
    /// Data not yet written, or to be written again. `None` only while a call writes it.
    buf: Option<Buf>,
    /// Offset of `buf` in the file: a multiple of the file's alignment.
    offset: u64,
    filled: usize,
    /// Bytes of `buf` that have been written.
    written: usize,
    /// Chunks that are being written, in their order.
    under_way: VecDeque<WriteAt>,
    /// A call failed or was dropped before it was done, so the file's contents are unknown.
    broken: bool,
}

impl FileWriter {
    /// A writer that begins at the start of a file, over its present contents. Suspends for memory.
    ///
    /// # Errors
    /// `OutOfMemory` if a chunk can never fit the core's budget, `Unsupported` if the blocks of a
    /// direct file are larger than a chunk.
    pub async fn new(file: &File) -> io::Result<FileWriter> {
        if !CHUNK.is_multiple_of(file.alignment()) {
            let text =
                format!("cannot write blocks of {} bytes: larger than {CHUNK}", file.alignment());
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let buf = file.core().alloc_wait(CHUNK).await?;
        Ok(FileWriter {
            file: file.clone(),
            buf: Some(buf),
            offset: 0,
            filled: 0,
            written: 0,
            under_way: VecDeque::new(),
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

    /// Appends `bytes`. Suspends for memory, and for the disk when it is slower than the caller.
    ///
    /// # Errors
    /// The disk's, possibly of a write that an earlier call started. After an error, and after a
    /// call that was dropped before it was done, the writer is broken and every later call fails.
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

    /// Makes all appended data durable; suspends for the disk.
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

    /// Writes the remaining data, cuts the file to its length and makes all of it durable. Suspends
    /// for the disk. Returns the length.
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

    /// Marks the writer broken until the call that begins here succeeds.
    fn begin(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.broken, true) {
            return Err(io::Error::other(
                "cannot write: an earlier write of this file failed or was dropped",
            ));
        }
        Ok(())
    }

    /// Waits for the oldest write in flight and returns its buffer.
    async fn settle(&mut self) -> io::Result<Option<Buf>> {
        let Some(write) = self.under_way.front_mut() else {
            return Ok(None);
        };
        let (result, buf) = write.await;
        self.under_way.pop_front();
        result.map(|()| Some(buf))
    }

    /// Starts to write the full buffer and continues with another.
    async fn hand_over(&mut self) -> io::Result<()> {
        let core = self.file.core();
        let most = (core.pool().limit() / MEMORY_SHARE / CHUNK).clamp(2, WRITES_MAX + 1) - 1;
        let spare = if self.under_way.len() < most { core.alloc(CHUNK) } else { None };
        let next = match spare {
            Some(buf) => buf,
            None => match self.settle().await? {
                Some(buf) => buf,
                None => self.file.core().alloc_wait(CHUNK).await?,
            },
        };
        if let Some(full) = self.buf.replace(next) {
            let mut write = self.file.write_at(self.offset, full, CHUNK);
            write.start();
            self.under_way.push_back(write);
        }
        self.offset += CHUNK as u64;
        (self.filled, self.written) = (0, 0);
        Ok(())
    }

    /// Writes all appended data and waits for it. The partial last block of a direct file stays in
    /// the buffer, to be rewritten with the data that follows.
    async fn flush(&mut self) -> io::Result<()> {
        while self.settle().await?.is_some() {}
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

/// The buffer. It is absent only while a call writes it, and a call that ended there left the
/// writer broken.
fn own(buf: &mut Option<Buf>) -> &mut Buf {
    buf.as_mut().expect("a writer that is not broken has its buffer")
}
