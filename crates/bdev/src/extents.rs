//! Which parts of a device are holes: they occupy no space, and read as zeroes. And how much space
//! all others occupy.

use reactor::{Core, Extent, Space};

use crate::device::{Bdev, Device};
use crate::geometry::Geometry;

impl Bdev {
    /// The parts of a range of the device that are holes, and those that are not: consecutive
    /// extents from `offset` on, at least one, at most `max`, which together may be shorter than
    /// `len`. Each has whole blocks. A device that does not tell has no holes. Requests may have
    /// changed them when they are known here. Suspends.
    ///
    /// The range lies in the device and has whole blocks, at least one; `max` is not 0.
    pub async fn extents(&self, core: &Core, offset: u64, len: u64, max: usize) -> Vec<Extent> {
        let found = match self.lowest().device() {
            Device::Mem(mem) => mem.extents(offset, len, max),
            Device::File(file) => file.extents(core, offset, len, max).await,
            Device::Nbd(nbd) => nbd.extents(offset, len, max).await,
            Device::Null(_)
            | Device::Failing { .. }
            | Device::Delay { .. }
            | Device::Limit { .. }
            | Device::Dirty { .. } => Vec::new(),
        };
        let Geometry { block_size, .. } = self.geometry();
        whole_blocks(&found, offset, len, block_size.into())
    }

    /// The space that the device's image occupies, and that its file system has left; `None` if it
    /// has no image file, or the system does not tell. Suspends, for as long as the file system
    /// likes.
    pub async fn space(&self, core: &Core) -> Option<Space> {
        match self.lowest().device() {
            Device::File(file) => file.space(core).await,
            _ => None,
        }
    }

    /// The number of the file system of the device's image, or of the block device: what does not
    /// answer holds up questions for the space of all that have it. `None` if it has no image.
    pub fn file_system(&self) -> Option<u64> {
        match self.lowest().device() {
            Device::File(file) => Some(file.file_system()),
            _ => None,
        }
    }
}

/// The same extents in whole blocks: a block of which a part is data is data. If there are none
/// left, everything is.
fn whole_blocks(found: &[Extent], offset: u64, len: u64, block: u64) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    let (mut at, mut done) = (offset, offset);
    for Extent { len: found, is_hole } in found {
        let end = (at + found).min(offset + len);
        // A hole begins and ends at the blocks inside it, data at those around it.
        let (from, to) = match is_hole {
            true => (at.next_multiple_of(block), end / block * block),
            false => (at / block * block, end.next_multiple_of(block)),
        };
        at = end;
        let from = from.max(done);
        if from >= to {
            continue;
        }
        // What lies between two holes and in neither is data.
        for (len, is_hole) in [(from - done, false), (to - from, *is_hole)] {
            match extents.last_mut() {
                _ if len == 0 => {}
                Some(last) if last.is_hole == is_hole => last.len += len,
                _ => extents.push(Extent { len, is_hole }),
            }
        }
        done = to;
    }
    if extents.is_empty() {
        extents.push(Extent { len, is_hole: false });
    }
    extents
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(found: &[(u64, bool)], len: u64) -> Vec<(u64, bool)> {
        let found: Vec<_> = found.iter().map(|&(len, is_hole)| Extent { len, is_hole }).collect();
        let whole = whole_blocks(&found, 8192, len, 4096);
        whole.iter().map(|extent| (extent.len, extent.is_hole)).collect()
    }

    #[test]
    fn a_block_with_some_data_is_data() {
        let (hole, data) = (true, false);
        assert_eq!(rounded(&[(8192, hole), (4096, data)], 12288), [(8192, hole), (4096, data)]);
        assert_eq!(
            rounded(&[(5000, hole), (100, data), (7188, hole)], 12288),
            [(4096, hole), (4096, data), (4096, hole)]
        );
        // Holes that are shorter than a block.
        assert_eq!(rounded(&[(100, data), (4000, hole), (4092, data)], 8192), [(8192, data)]);
        assert_eq!(rounded(&[(100, hole)], 8192), [(8192, data)]);
        assert_eq!(
            rounded(&[(4095, hole), (1, data), (4096, hole)], 8192),
            [(4096, data), (4096, hole)]
        );
        // No more than what was asked for, and no less than something.
        assert_eq!(rounded(&[(1 << 20, hole)], 8192), [(8192, hole)]);
        assert_eq!(rounded(&[], 8192), [(8192, data)]);
    }
}
