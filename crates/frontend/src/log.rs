//! The dirty log of a migration: one bit for each 4 KiB page of guest memory that the target wrote.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use crate::memory::{Mapping, memfd};
use crate::{Pages, Result};

/// Bytes of a page in the log, whatever the host's page size.
const PAGE: u64 = 4096;

/// A mapped dirty log.
#[derive(Debug)]
pub struct DirtyLog {
    fd: OwnedFd,
    map: Mapping,
}

impl DirtyLog {
    /// Creates an empty log for guest addresses below `end`.
    ///
    /// # Errors
    /// If the system has no memory for it.
    pub fn new(end: u64) -> Result<DirtyLog> {
        let bytes = end.div_ceil(PAGE * 64) * 8;
        let fd = memfd(c"log", bytes, Pages::Small)?;
        let map = Mapping::new(fd.as_fd(), 0, bytes as usize, true)?;
        Ok(DirtyLog { fd, map })
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Returns the addresses of the pages that were written since the last call, and clears their
    /// bits.
    pub fn take(&self) -> Vec<u64> {
        let mut pages = Vec::new();
        for word in 0..self.map.len() / 8 {
            let bits = self.map.u64_at(word * 8).swap(0, Ordering::AcqRel);
            let set = (0..64).filter(|bit| bits >> bit & 1 == 1);
            pages.extend(set.map(|bit| (word as u64 * 64 + bit) * PAGE));
        }
        pages
    }
}

impl AsFd for DirtyLog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_taken_once() {
        let log = DirtyLog::new(256 << 20).unwrap();
        assert_eq!(log.bytes(), 0x2000);
        log.map.write(0x1fff, &[0x81]);
        assert_eq!(log.take(), [(256 << 20) - 8 * PAGE, (256 << 20) - PAGE]);
        assert_eq!(log.take(), []);
    }
}
