//! An open file that any core may hold. What its writers change (the size, and whether a flush
//! failed) has cache lines of its own.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use loomable::CachePadded;

use super::Fd;
use crate::memory::buf::BUF_ALIGN;

/// What must exist under the name of a file that is opened for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Nothing: makes the file, or fails with `AlreadyExists`.
    New,
    /// Anything: an existing file is emptied.
    NewOrEmptied,
    /// A file, which keeps its contents; else `NotFound`.
    Existing,
    /// A file, else `NotFound`, that has no other name, else `WouldBlock`. It keeps its contents.
    OnlyName,
    /// A file, else `NotFound`, that has no other name and is open nowhere else, in this process or
    /// another; else, or where the system does not tell, `WouldBlock`. It keeps its contents, and
    /// the caller may overwrite it as long as it shares it with nobody.
    Unshared,
}

/// How a file is written, and read through the same handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// With direct I/O, where the file system supports it: offsets and lengths are multiples of
    /// [`SharedFile::alignment`].
    Direct,
    /// Through the page cache.
    Buffered,
}

/// An open file, shared between cores.
#[derive(Debug)]
pub struct SharedFile {
    fd: Fd,
    path: PathBuf,
    alignment: u32,
    memory_alignment: u32,
    device: u64,
    is_image: bool,
    written: CachePadded<Written>,
}

/// The fields that writers change.
#[derive(Debug)]
struct Written {
    size: AtomicU64,
    flush_failed: AtomicBool,
}

impl SharedFile {
    /// `size` is in bytes, as found when opened; `alignment` is that of offsets and lengths in
    /// bytes, 1 when the file is read and written through the page cache.
    pub fn new(fd: Fd, path: PathBuf, size: u64, alignment: u32) -> SharedFile {
        debug_assert!(alignment.is_power_of_two());
        let written = Written { size: size.into(), flush_failed: false.into() };
        let memory_alignment = if alignment == 1 { 1 } else { BUF_ALIGN as u32 };
        SharedFile {
            fd,
            path,
            alignment,
            memory_alignment,
            device: 0,
            is_image: false,
            written: CachePadded(written),
        }
    }

    /// Sets the alignment that direct I/O needs of memory, if it differs from that of a
    /// [`Buf`](crate::Buf).
    pub(crate) fn with_memory_alignment(self, memory_alignment: u32) -> SharedFile {
        debug_assert!(memory_alignment.is_power_of_two());
        SharedFile { memory_alignment, ..self }
    }

    /// Sets the number of the device that it is on.
    pub(crate) fn with_device(self, device: u64) -> SharedFile {
        SharedFile { device, ..self }
    }

    /// Notes that it was opened as a disk image.
    pub(crate) fn of_image(self) -> SharedFile {
        SharedFile { is_image: true, ..self }
    }

    pub(crate) fn is_image(&self) -> bool {
        self.is_image
    }

    /// The number of the device that it is on; 0 in a simulated world.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// Size in bytes: as found when opened, grown by writes through this file since .
    pub fn size(&self) -> u64 {
        self.written.size.load(Ordering::Relaxed)
    }

    /// The host's descriptor, for a kernel interface for which the reactor has no operation; `None`
    /// in a simulated world.
    pub fn host_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.fd {
            Fd::Host(fd) => Some(fd.as_fd()),
            Fd::File(file) => file.fd(),
            Fd::Sim(_) => None,
        }
    }

    /// The descriptor with which another process can take over this open file and its lock. In a
    /// simulated world it represents the open file, and only images have one.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.fd {
            Fd::Sim(fd) => fd.host(),
            Fd::Host(_) | Fd::File(_) => self.host_fd(),
        }
    }

    pub(crate) fn fd(&self) -> &Fd {
        &self.fd
    }

    /// Notes that the file has at least `size` bytes.
    pub(crate) fn grow_size(&self, size: u64) {
        if self.size() < size {
            self.written.size.fetch_max(size, Ordering::Relaxed);
        }
    }

    /// Notes that the file has `size` bytes.
    pub(crate) fn set_size(&self, size: u64) {
        self.written.size.store(size, Ordering::Relaxed);
    }

    /// Whether a flush has failed, so that the file takes no more writes.
    pub fn flush_failed(&self) -> bool {
        self.written.flush_failed.load(Ordering::Relaxed)
    }

    /// Poisons the file: a flush has failed, here or in the process that had it open before, so it
    /// takes no more writes.
    pub fn set_flush_failed(&self) {
        self.written.flush_failed.store(true, Ordering::Relaxed);
    }

    /// The path under which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Alignment in bytes of offsets and lengths of reads and writes.
    pub fn alignment(&self) -> usize {
        self.alignment as usize
    }

    /// Alignment in bytes of the addresses of a [`FileQueue`](crate::FileQueue)'s segments. Their
    /// lengths are multiples of [`SharedFile::alignment`].
    pub fn memory_alignment(&self) -> usize {
        self.memory_alignment as usize
    }
}
