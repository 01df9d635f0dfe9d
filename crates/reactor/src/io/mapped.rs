//! A file that is read, and may be written, through a mapping where that cannot wait (S4).
//!
//! 1. An access whose pages are all in memory copies from or to the mapping: no system call.
//! 2. Any other access is an operation of the core on the same file, through the same page cache,
//!    so both see the same bytes. That is the case for a page that is not in memory, during a
//!    resize, beyond the mapping, for a long access, for a mapping that was lost (a page could not
//!    be read), and always in a simulated world.
//! 3. [`MappedFile::grow`] allocates the file's space in large steps and maps it.
//!
//! A write through the mapping is durable after [`File::sync_data`], like any other. But the first
//! write to a page since the kernel has written it back faults, and may wait for the file system,
//! which nothing tells in advance: 33 µs a page as a rule, with rare stalls of 20 to 30 ms. So a
//! core that serves requests maps only for reading.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;

use crate::io::file::File;
use crate::memory::buf::Buf;
use crate::memory::mapping::Mapping;
use crate::memory::resident::Resident;

/// Longest copy: takes some 10 µs of the core's time.
const COPY_MAX: usize = 64 << 10;
/// Bytes by which a growing file's space is allocated.
pub const GROWTH: u64 = 64 << 20;

/// One core's handle on a mapped file.
pub struct MappedFile {
    file: File,
    mapping: Option<Arc<Mapping>>,
    resident: RefCell<Resident>,
}

impl MappedFile {
    /// A handle on `file`, which is accessed through `mapping`, a mapping of the same file, if
    /// there is one.
    pub fn new(file: File, mapping: Option<Arc<Mapping>>) -> MappedFile {
        MappedFile { file, mapping, resident: RefCell::default() }
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Copies `to.len()` bytes at `offset` if that cannot wait. If false, read the file instead;
    /// `to` may hold anything then.
    #[inline]
    pub fn read_now(&self, offset: u64, to: &mut [u8]) -> bool {
        let segment = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
        // SAFETY: the segment is `to`, exclusively borrowed.
        unsafe { self.read_segments_now(offset, to.len() as u64, &[segment]) }
    }

    /// As [`read_now`](Self::read_now), to several pieces of memory.
    ///
    /// # Safety
    /// The segments are valid for writes, and together `len` bytes long.
    #[inline]
    pub unsafe fn read_segments_now(
        &self,
        offset: u64,
        len: u64,
        segments: &[libc::iovec],
    ) -> bool {
        self.access(offset, len, |view, mut at| {
            for segment in segments {
                // SAFETY: by this function's contract.
                unsafe { view.copy_out(at, segment.iov_base.cast(), segment.iov_len) };
                at += segment.iov_len;
            }
        })
    }

    /// Copies `from` to `offset` if all its pages are in memory. If false, write the file instead:
    /// the range may hold a part of the bytes. The mapping must be writable.
    ///
    /// # Panics
    /// If the mapping is not writable.
    pub fn write_now(&self, offset: u64, from: &[u8]) -> bool {
        assert!(self.mapping.as_ref().is_none_or(|mapping| mapping.is_writable()));
        // A write must report that an earlier flush failed, as an operation does.
        !self.file.shared().flush_failed()
            && self.access(offset, from.len() as u64, |view, at| {
                // SAFETY: `from` is borrowed; the mapping is writable, see above.
                unsafe { view.copy_in(at, from.as_ptr(), from.len()) }
            })
    }

    #[inline]
    fn access(
        &self,
        offset: u64,
        len: u64,
        copy: impl FnOnce(&crate::memory::mapping::View<'_>, usize),
    ) -> bool {
        let Some(mapping) = &self.mapping else { return false };
        let Ok(mut resident) = self.resident.try_borrow_mut() else { return false };
        let core = self.file.core();
        let now_ns = core.now_ns();
        if len == 0 || len > COPY_MAX as u64 || resident.rests(now_ns) {
            return false;
        }
        let copied = mapping.enter(core.id(), |view| {
            let within = offset.checked_add(len).is_some_and(|end| end <= view.len() as u64)
                && resident.covers(view, offset as usize, len as usize, now_ns);
            if within {
                copy(view, offset as usize);
            }
            within
        });
        let copied = copied == Some(true);
        let stats = core.stats();
        if copied { &stats.mapped_copies } else { &stats.mapped_misses }.add(1);
        copied
    }

    /// Fills `buf` from `offset` on: by a copy if that cannot wait, or else by a read of the file.
    /// The count is short at the file's end.
    ///
    /// # Errors
    /// The device's or the kernel's.
    pub async fn read(&self, offset: u64, mut buf: Buf) -> (io::Result<usize>, Buf) {
        if self.read_now(offset, &mut buf) {
            return (Ok(buf.len()), buf);
        }
        self.file.read_at(offset, buf).await
    }

    /// Makes the file at least `len` bytes long, in steps of [`GROWTH`], and maps all of it.
    /// Returns its length. Accesses that meet the change of the mapping are system calls
    /// meanwhile.
    ///
    /// # Errors
    /// `StorageFull` when there is no space; others as the system gives them. The mapping is then
    /// as before.
    pub async fn grow(&self, len: u64) -> io::Result<u64> {
        let len = len.checked_next_multiple_of(GROWTH).ok_or(io::ErrorKind::FileTooLarge)?;
        if self.file.size() < len {
            self.file.allocate(len).await?;
        }
        // Another core may have grown it further.
        self.remap(|| self.file.size()).await;
        Ok(len)
    }

    /// Makes the file and its mapping `len` bytes long. Durable after [`File::sync_data`].
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn set_len(&self, len: u64) -> io::Result<()> {
        // First a smaller mapping: a page beyond the end of the file raises a signal.
        if len < self.file.size() {
            self.remap(|| len).await;
        }
        let set = self.file.set_len(len).await;
        self.remap(|| self.file.size()).await;
        set
    }

    /// Changes the mapping once all accesses that have begun are over. It polls: an access is a
    /// copy of at most [`COPY_MAX`] bytes, and another resize takes one system call.
    async fn remap(&self, len: impl Fn() -> u64) {
        let Some(mapping) = &self.mapping else { return };
        loop {
            if let Some(resizing) = mapping.close() {
                while !resizing.finish(usize::try_from(len()).unwrap_or(usize::MAX)) {
                    self.file.core().yield_now().await;
                }
                return;
            }
            self.file.core().yield_now().await;
        }
    }
}
