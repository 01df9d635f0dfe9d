//! A core's block cache: `quick_cache` (a variant of CLOCK-Pro and S3-FIFO, which a scan passes
//! through without evicting blocks that are read again), bounded in bytes.
//!
//! It belongs to one core: no lock, and no cache line that another core writes. A block is charged
//! the size of its buffer plus [`ENTRY_BYTES`]. With a budget of 0 there is no cache and every read
//! goes to the device.

use quick_cache::unsync::Cache;
use quick_cache::{Lifecycle, Weighter};
use rocksfmt::BlockHandle;

use crate::read::block::Block;
use crate::version::Version;

/// Identifies a block: the number of the table's file, which is never reused, and the block's
/// offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockKey {
    pub table: u64,
    pub offset: u64,
}

impl BlockKey {
    /// The key of a block of the table in a version's slot.
    #[inline]
    pub fn of(version: &Version, slot: u32, handle: BlockHandle) -> BlockKey {
        BlockKey { table: version.meta(slot).number, offset: handle.offset }
    }
}

/// Bytes of the cache's own bookkeeping per block.
pub(crate) const ENTRY_BYTES: u64 = 128;

#[derive(Clone)]
struct Footprint;

impl Weighter<BlockKey, Block> for Footprint {
    fn weight(&self, _: &BlockKey, block: &Block) -> u64 {
        block.footprint() as u64 + ENTRY_BYTES
    }
}

/// A fixed hash, so that simulated runs are reproducible. Block keys are offsets in files that were
/// trusted enough to be opened; nobody chooses them to collide.
#[derive(Clone, Default)]
pub(crate) struct FixedHash(u64);

impl std::hash::Hasher for FixedHash {
    fn finish(&self) -> u64 {
        // The table uses the top bits for tags and the low bits for positions: mix both.
        (self.0 ^ (self.0 >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    }
}

pub(crate) type FixedHashBuilder = std::hash::BuildHasherDefault<FixedHash>;

/// The block cache of one core.
pub(crate) struct BlockCache {
    blocks: Option<Cache<BlockKey, Block, Footprint, FixedHashBuilder, NoHooks>>,
    budget: u64,
}

impl BlockCache {
    /// A cache of at most `bytes`; 0 means no cache.
    pub fn new(bytes: usize) -> BlockCache {
        let blocks = (bytes > 0).then(|| {
            let items = (bytes / 4096).max(16);
            Cache::with(items, bytes as u64, Footprint, FixedHashBuilder::default(), NoHooks)
        });
        BlockCache { blocks, budget: bytes as u64 }
    }

    #[inline]
    pub fn get(&self, key: BlockKey) -> Option<Block> {
        self.blocks.as_ref()?.get(&key).cloned()
    }

    /// A block, without counting this as a use of it.
    #[inline]
    pub fn peek(&self, key: BlockKey) -> Option<&Block> {
        self.blocks.as_ref()?.peek(&key)
    }

    pub fn insert(&mut self, key: BlockKey, block: Block) {
        if let Some(blocks) = &mut self.blocks {
            blocks.insert(key, block);
        }
    }

    /// Bytes in the cache.
    pub fn used(&self) -> u64 {
        self.blocks.as_ref().map_or(0, Cache::weight)
    }

    /// The budget in bytes.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Evicts up to `bytes` because memory is needed elsewhere. Returns the bytes released.
    pub fn shrink(&mut self, bytes: u64) -> u64 {
        let budget = self.budget;
        let Some(blocks) = self.blocks.as_mut().filter(|_| bytes > 0) else { return 0 };
        let before = blocks.weight();
        blocks.set_capacity(before.saturating_sub(bytes));
        blocks.set_capacity(budget);
        before.saturating_sub(blocks.weight())
    }
}

#[derive(Clone)]
pub(crate) struct NoHooks;

impl<V> Lifecycle<BlockKey, V> for NoHooks {
    type RequestState = ();
}
