//! The in-flight region, which the front end keeps in case its target dies.
//!
//! The layout is that of the vhost-user specification with the alignment of C: for each queue a
//! header and one entry for each descriptor, rounded up to 64 bytes. The front end only reads it,
//! to check it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::memory::Mapping;
use crate::{Error, Kind, Result};

/// Longest region that is accepted.
const BYTES_MAX: u64 = 1 << 30;

/// A mapped region.
#[derive(Debug)]
pub struct Inflight {
    fd: OwnedFd,
    map: Mapping,
    offset: u64,
    queues: u16,
    queue_size: u16,
}

/// The header of a split ring's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the specification's names")]
pub struct SplitHeader {
    pub features: u64,
    pub version: u16,
    pub desc_num: u16,
    pub last_batch_head: u16,
    pub used_idx: u16,
}

/// An entry of a split ring's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the specification's names")]
pub struct SplitEntry {
    pub inflight: u8,
    pub next: u16,
    pub counter: u64,
}

/// The header of a packed ring's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the specification's names")]
pub struct PackedHeader {
    pub features: u64,
    pub version: u16,
    pub desc_num: u16,
    pub free_head: u16,
    pub old_free_head: u16,
    pub used_idx: u16,
    pub old_used_idx: u16,
    pub used_wrap_counter: u8,
    pub old_used_wrap_counter: u8,
}

/// An entry of a packed ring's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the specification's names")]
pub struct PackedEntry {
    pub inflight: u8,
    pub next: u16,
    pub last: u16,
    pub num: u16,
    pub counter: u64,
    pub id: u16,
    pub flags: u16,
    pub len: u32,
    pub addr: u64,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

impl Inflight {
    /// Maps a target's region for `queues` queues of `queue_size` entries.
    ///
    /// # Errors
    /// If the size is impossible, or the file is too short.
    pub fn map(
        fd: OwnedFd,
        bytes: u64,
        offset: u64,
        (queues, queue_size): (u16, u16),
    ) -> Result<Inflight> {
        if bytes == 0 || bytes > BYTES_MAX || !offset.is_multiple_of(4096) {
            let text = format!("impossible in-flight region of {bytes} bytes at offset {offset}");
            return Err(Error::new(Kind::Protocol, text));
        }
        let file = std::fs::File::from(fd);
        let length = file
            .metadata()
            .map_err(|e| Error::system("reading the size of the in-flight region's file", e))?
            .len();
        if offset.checked_add(bytes).is_none_or(|end| end > length) {
            let text = format!(
                "in-flight region of {bytes} bytes at offset {offset} in a file of {length} bytes"
            );
            return Err(Error::new(Kind::Protocol, text));
        }
        let map = Mapping::new(file.as_fd(), offset, bytes as usize, false)?;
        Ok(Inflight { fd: file.into(), map, offset, queues, queue_size })
    }

    /// {size, offset, queues, queue size}, as in messages.
    pub fn encode(&self) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..8].copy_from_slice(&self.bytes().to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..18].copy_from_slice(&self.queues.to_le_bytes());
        bytes[18..].copy_from_slice(&self.queue_size.to_le_bytes());
        bytes
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Bytes of one queue's part; the region has `queues` parts.
    pub fn queue_bytes(&self, packed: bool) -> usize {
        let (header, entry) = if packed { (32, 32) } else { (16, 16) };
        (header + entry * usize::from(self.queue_size)).next_multiple_of(64)
    }

    /// Copies bytes out.
    ///
    /// # Panics
    /// If the range is beyond the region.
    pub fn read(&self, at: usize, bytes: &mut [u8]) {
        self.map.read(at, bytes);
    }

    /// Copies bytes in, to simulate the state after a crash.
    ///
    /// # Panics
    /// If the range is beyond the region.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        self.map.write(at, bytes);
    }

    fn header<const N: usize>(&self, queue: u16, packed: bool) -> [u8; N] {
        let mut bytes = [0; N];
        self.read(usize::from(queue) * self.queue_bytes(packed), &mut bytes);
        bytes
    }

    fn entry<const N: usize>(&self, queue: u16, index: u16, packed: bool) -> [u8; N] {
        assert!(index < self.queue_size);
        let mut bytes = [0; N];
        let first = usize::from(queue) * self.queue_bytes(packed) + N;
        self.read(first + usize::from(index) * N, &mut bytes);
        bytes
    }

    /// The header of a split ring's part.
    pub fn split_header(&self, queue: u16) -> SplitHeader {
        let bytes: [u8; 16] = self.header(queue, false);
        SplitHeader {
            features: u64_at(&bytes, 0),
            version: u16_at(&bytes, 8),
            desc_num: u16_at(&bytes, 10),
            last_batch_head: u16_at(&bytes, 12),
            used_idx: u16_at(&bytes, 14),
        }
    }

    /// An entry of a split ring's part.
    pub fn split_entry(&self, queue: u16, index: u16) -> SplitEntry {
        let bytes: [u8; 16] = self.entry(queue, index, false);
        SplitEntry { inflight: bytes[0], next: u16_at(&bytes, 6), counter: u64_at(&bytes, 8) }
    }

    /// The heads of a split ring that are marked as in flight.
    pub fn split_in_flight(&self, queue: u16) -> Vec<u16> {
        (0..self.queue_size).filter(|head| self.split_entry(queue, *head).inflight == 1).collect()
    }

    /// The header of a packed ring's part.
    pub fn packed_header(&self, queue: u16) -> PackedHeader {
        let bytes: [u8; 32] = self.header(queue, true);
        PackedHeader {
            features: u64_at(&bytes, 0),
            version: u16_at(&bytes, 8),
            desc_num: u16_at(&bytes, 10),
            free_head: u16_at(&bytes, 12),
            old_free_head: u16_at(&bytes, 14),
            used_idx: u16_at(&bytes, 16),
            old_used_idx: u16_at(&bytes, 18),
            used_wrap_counter: bytes[20],
            old_used_wrap_counter: bytes[21],
        }
    }

    /// An entry of a packed ring's part.
    pub fn packed_entry(&self, queue: u16, index: u16) -> PackedEntry {
        let bytes: [u8; 32] = self.entry(queue, index, true);
        PackedEntry {
            inflight: bytes[0],
            next: u16_at(&bytes, 2),
            last: u16_at(&bytes, 4),
            num: u16_at(&bytes, 6),
            counter: u64_at(&bytes, 8),
            id: u16_at(&bytes, 16),
            flags: u16_at(&bytes, 18),
            len: u32_at(&bytes, 20),
            addr: u64_at(&bytes, 24),
        }
    }
}

impl AsFd for Inflight {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pages;
    use crate::memory::memfd;

    fn region(bytes: u64) -> Result<Inflight> {
        Inflight::map(memfd(c"t", 4224, Pages::Small).unwrap(), bytes, 0, (2, 128))
    }

    #[test]
    fn queues_of_a_split_ring_are_at_the_specified_offsets() {
        let region = region(4224).unwrap();
        assert_eq!(region.queue_bytes(false), 2112);
        region.write(2112 + 10, &[128, 0, 5, 0, 9, 0]);
        // Entry 7 of queue 1.
        region.write(2112 + 16 + 7 * 16, &[1, 0, 0, 0, 0, 0, 3, 0, 8]);
        let header = region.split_header(1);
        assert_eq!((header.desc_num, header.last_batch_head, header.used_idx), (128, 5, 9));
        let entry = SplitEntry { inflight: 1, next: 3, counter: 8 };
        assert_eq!(region.split_entry(1, 7), entry);
        assert_eq!((region.split_in_flight(0), region.split_in_flight(1)), (vec![], vec![7]));
    }

    #[test]
    fn a_region_beyond_its_file_is_refused() {
        assert_eq!(region(4225).unwrap_err().kind(), Kind::Protocol);
        assert_eq!(region(0).unwrap_err().kind(), Kind::Protocol);
        assert_eq!(region(u64::MAX).unwrap_err().kind(), Kind::Protocol);
    }
}
