//! A small region of a core's memory that is registered with its ring, once and for good.
//!
//! For a direct read into other memory the kernel finds and pins the pages of the buffer, and
//! releases them at the end. For a read into the region it has done so in advance, which saves a
//! tenth of the processor time of a small read. The region is one huge page, so it is small, and
//! its buffers are for reads whose bytes are soon released: where none is free, a read takes any
//! other buffer.
//!
//! Buffers are runs of units within 64 units; one bit for each unit tells whether it is free.
//!
//! The ring's driver and the core's pool each hold the region, and a buffer holds the pool. So the
//! memory is freed after the ring was closed, and after the last operation that uses it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::ptr::NonNull;

/// Bytes of a region: a huge page, which the kernel treats as one piece.
pub(crate) const REGION_BYTES: usize = 2 << 20;
/// A pool of fewer bytes has no region: it would be too large a part of it.
const POOL_BYTES_MIN: usize = 64 * REGION_BYTES;
/// Buffers are multiples of this many bytes.
pub(crate) const UNIT: usize = 4096;
const WORDS: usize = REGION_BYTES / UNIT / 64;
/// Most units of a buffer.
pub(crate) const UNITS_MAX: usize = 64;

const LAYOUT: Layout = match Layout::from_size_align(REGION_BYTES, REGION_BYTES) {
    Ok(layout) => layout,
    Err(_) => unreachable!(),
};

/// Registered memory of one core.
pub(crate) struct Region {
    base: NonNull<u8>,
    /// The free units.
    free: [Cell<u64>; WORDS],
}

impl Region {
    /// A region for a pool of `pool_bytes`; `None` if the pool is too small for one.
    pub fn for_pool(pool_bytes: usize) -> Option<Region> {
        if pool_bytes < POOL_BYTES_MIN {
            return None;
        }
        // SAFETY: the layout has a non-zero size.
        let base = NonNull::new(unsafe { alloc_zeroed(LAYOUT) })?;
        Some(Region { base, free: [const { Cell::new(u64::MAX) }; WORDS] })
    }

    /// The whole region, to register it.
    pub fn as_iovec(&self) -> libc::iovec {
        libc::iovec { iov_base: self.base.as_ptr().cast(), iov_len: REGION_BYTES }
    }

    /// Whether `len` bytes at `ptr` lie in the region.
    #[inline]
    pub fn contains(&self, ptr: *const u8, len: usize) -> bool {
        let start = ptr.addr().wrapping_sub(self.base.addr().get());
        start < REGION_BYTES && len <= REGION_BYTES - start
    }

    /// Takes memory for `len` bytes: where it is, and its length in units. `None` if there is none
    /// now, or never for so many bytes.
    pub fn take(&self, len: usize) -> Option<(NonNull<u8>, usize)> {
        let units = len.max(1).div_ceil(UNIT);
        if units > UNITS_MAX {
            return None;
        }
        let (word, at) = self
            .free
            .iter()
            .enumerate()
            .find_map(|(n, word)| Some((n, first_run(word.get(), units)?)))?;
        self.free[word].set(self.free[word].get() & !mask(at, units));
        let offset = (word * 64 + at as usize) * UNIT;
        // SAFETY: word and bit are those of a unit of the region.
        Some((unsafe { self.base.add(offset) }, units))
    }

    /// Takes back what [`Region::take`] returned.
    pub fn give(&self, ptr: NonNull<u8>, units: usize) {
        let unit = (ptr.addr().get() - self.base.addr().get()) / UNIT;
        let word = &self.free[unit / 64];
        let given = mask(unit as u32 % 64, units);
        debug_assert_eq!(word.get() & given, 0, "given back once");
        word.set(word.get() | given);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc_zeroed` with this layout. The region's owners are gone:
        // the ring, which was closed without an operation in flight (a core that cannot drain is
        // leaked as a whole), and the pool, which the last buffer held.
        unsafe { dealloc(self.base.as_ptr(), LAYOUT) };
    }
}

/// The bits of `units` units from `at` on.
fn mask(at: u32, units: usize) -> u64 {
    (u64::MAX >> (UNITS_MAX - units)) << at
}

/// Where the first run of `units` set bits begins.
fn first_run(free: u64, units: usize) -> Option<u32> {
    // Bit n of `runs` tells that `len` bits from n on are set.
    let (mut runs, mut len) = (free, 1);
    while len < units {
        let more = len.min(units - len);
        runs &= runs >> more;
        len += more;
    }
    (runs != 0).then(|| runs.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_found_wherever_it_is() {
        for units in 1..=64 {
            for at in 0..=64 - units {
                let free = mask(at, units as usize);
                assert_eq!(first_run(free, units as usize), Some(at));
                assert_eq!(first_run(!free, 64), None);
                if units > 1 {
                    assert_eq!(first_run(free & !(1 << (at + units / 2)), units as usize), None);
                }
            }
        }
    }

    #[test]
    fn buffers_are_apart_and_come_back() {
        let region = Region::for_pool(POOL_BYTES_MIN).unwrap();
        for len in [1, 4096, 4608, 5120, 12 << 10, 100 << 10, 256 << 10] {
            let mut taken = Vec::new();
            while let Some((ptr, units)) = region.take(len) {
                assert!(units * UNIT >= len && region.contains(ptr.as_ptr(), units * UNIT));
                taken.push((ptr.addr().get(), ptr, units));
            }
            taken.sort_unstable_by_key(|&(start, ..)| start);
            let apart = taken.windows(2).all(|w| w[0].0 + w[0].2 * UNIT <= w[1].0);
            assert!(apart && taken.len() == WORDS * (64 / len.div_ceil(UNIT)), "{len}");
            for (_, ptr, units) in taken {
                region.give(ptr, units);
            }
            assert!(region.free.iter().all(|word| word.get() == u64::MAX));
        }
        assert!(region.take((256 << 10) + 1).is_none());
    }

    #[test]
    fn a_small_pool_has_none() {
        assert!(Region::for_pool(POOL_BYTES_MIN - 1).is_none());
    }
}
