//! The dirty log of a live migration: a shared bitmap with one bit for each 4096-byte page of guest
//! memory.
//!
//! The front end takes the bits (swapping words with zero) and then copies the pages. So a bit is
//! set after the bytes are written, never before, and always with a locked instruction: a check
//! whether it is already set could read the old bit before our bytes are visible to the front end
//! that clears it.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use crate::memory::account::Account;
use crate::memory::{Area, MemoryError};

/// log2 of the bytes that one bit stands for, whatever the host's page size.
const PAGE_SHIFT: u32 = 12;

/// A mapped dirty log, shared by all rings of a device.
#[derive(Clone, Debug)]
pub struct DirtyLog {
    bitmap: Area,
}

impl DirtyLog {
    /// Maps the log that the front end sent: `size` bytes at `offset` of the file.
    pub fn map(fd: BorrowedFd<'_>, size: u64, offset: u64) -> Result<DirtyLog, MemoryError> {
        DirtyLog::map_for(&Account::default(), fd, size, offset)
    }

    /// Like [`DirtyLog::map`], counted in a front end's account.
    pub(crate) fn map_for(
        account: &Account,
        fd: BorrowedFd<'_>,
        size: u64,
        offset: u64,
    ) -> Result<DirtyLog, MemoryError> {
        Ok(DirtyLog { bitmap: Area::map_for(account, fd, offset, size)? })
    }

    /// See [`Area::is_lost`].
    pub fn is_lost(&self) -> bool {
        self.bitmap.is_lost()
    }

    /// Marks the written pages of `len` bytes at a guest-physical address. Pages beyond the log's
    /// end are ignored: the front end did not ask for them.
    pub fn mark(&self, addr: u64, len: u64) {
        let Some(last) = len.checked_sub(1) else { return };
        let Some(end) = (self.bitmap.len() as u64).checked_mul(8) else { return };
        let first = addr >> PAGE_SHIFT;
        let last = (addr.saturating_add(last) >> PAGE_SHIFT).min(end.saturating_sub(1));
        let mut page = first;
        while page <= last && page < end {
            // Set the bits of all pages in one byte of the bitmap together.
            let through = (page | 7).min(last);
            let bits = (0xff_u8 << (page & 7)) & (0xff_u8 >> (7 - (through & 7)));
            self.bitmap.set_bits((page >> 3) as usize, bits, Ordering::SeqCst);
            page = through + 1;
        }
    }
}
