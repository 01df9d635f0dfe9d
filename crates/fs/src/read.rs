//! Reads of any byte range: aligned outwards for the device, trimmed for the caller.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use reactor::{Buf, File, ReadAt, Slice};

/// Attempts in all: after a short read the whole range is read again, and once after an error of
/// the device. So many reads in a row are short only where a file was cut.
const TRIES: u32 = 8;

/// A read in flight; resolves to exactly the requested bytes.
pub struct Reading {
    file: File,
    read: ReadAt,
    /// Offset of the aligned range in the file.
    offset: u64,
    /// Start of the caller's bytes in the aligned range.
    start: usize,
    len: usize,
    tries: u32,
    failed: bool,
    /// What there is before the end of the file is enough.
    may_end: bool,
}

/// The aligned range around `len` bytes at `offset`: its offset, its length, and the start of the
/// bytes in it.
fn aligned(file: &File, offset: u64, len: usize) -> (u64, usize, usize) {
    let align = file.alignment() as u64;
    let from = offset & !(align - 1);
    let start = (offset - from) as usize;
    let whole = (start + len).next_multiple_of(align as usize);
    (from, whole, start)
}

/// Refuses a range that no file has, or that is too long for a buffer.
fn checked_end(offset: u64, len: usize) -> io::Result<()> {
    match offset.checked_add(len as u64) {
        Some(end) if end <= i64::MAX as u64 && len <= reactor::BUF_MAX / 2 => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("cannot read {len} bytes at offset {offset}: the range is too long"),
        )),
    }
}

/// Starts to read `len` bytes at `offset` if memory is available now, so that several reads can run
/// before the first is awaited.
///
/// # Errors
/// `InvalidInput` for a range that no file has.
pub fn start_read(file: &File, offset: u64, len: usize) -> io::Result<Option<Reading>> {
    checked_end(offset, len)?;
    let (from, whole, start) = aligned(file, offset, len);
    Ok(file.core().alloc(whole).map(|buf| begin(file, from, start, len, buf)))
}

fn begin(file: &File, offset: u64, start: usize, len: usize, buf: Buf) -> Reading {
    let mut read = file.read_at(offset, buf);
    read.start();
    Reading {
        file: file.clone(),
        read,
        offset,
        start,
        len,
        tries: 1,
        failed: false,
        may_end: false,
    }
}

/// Reads `len` bytes at `offset`; suspends for memory and for the device.
///
/// # Errors
/// `UnexpectedEof` if the file ends before the range does, `OutOfMemory` if the bytes can never fit
/// the core's budget; otherwise the device's errors, if the range cannot be read the second time
/// either.
pub async fn read(file: &File, offset: u64, len: usize) -> io::Result<Slice> {
    begin_with(file, offset, len, |_| None).await?.await
}

/// As [`read`], for bytes that are soon released: the read may cost less.
///
/// # Errors
/// As for [`read`].
pub async fn read_briefly(file: &File, offset: u64, len: usize) -> io::Result<Slice> {
    begin_with(file, offset, len, |whole| file.core().alloc_registered(whole)).await?.await
}

/// As [`read`], but of a file that may be shorter than [`File::size`] says because it was cut since
/// it was opened: fewer bytes, or none, if it ends before the range does.
///
/// # Errors
/// As for [`read`], without `UnexpectedEof`.
pub async fn read_until_end(file: &File, offset: u64, len: usize) -> io::Result<Slice> {
    let mut reading = begin_with(file, offset, len, |_| None).await?;
    reading.may_end = true;
    reading.await
}

/// Starts a read into a buffer that `first` gives, or else into any other one. Suspends for memory.
async fn begin_with(
    file: &File,
    offset: u64,
    len: usize,
    first: impl Fn(usize) -> Option<Buf>,
) -> io::Result<Reading> {
    checked_end(offset, len)?;
    let (from, whole, start) = aligned(file, offset, len);
    let buf = match first(whole) {
        Some(buf) => buf,
        None => file.core().alloc_wait(whole).await?,
    };
    Ok(begin(file, from, start, len, buf))
}

impl Future for Reading {
    type Output = io::Result<Slice>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let (result, buf) = match Pin::new(&mut self.read).poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(done) => done,
            };
            let n = match result {
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted && self.tries < TRIES => 0,
                Err(_) if !self.failed && self.tries < TRIES => {
                    self.failed = true;
                    0
                }
                Err(e) => return Poll::Ready(Err(e)),
            };
            let need = self.start + self.len;
            if n >= need {
                return Poll::Ready(Ok(Slice::new(buf.share(), self.start..need)));
            }
            if self.tries == TRIES || self.offset + n as u64 >= self.file.size() {
                if self.may_end {
                    return Poll::Ready(Ok(Slice::new(buf.share(), self.start..n.max(self.start))));
                }
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    format!("{n} of {need} bytes at offset {}", self.offset),
                )));
            }
            self.tries += 1;
            let offset = self.offset;
            self.read = self.file.read_at(offset, buf);
        }
    }
}
