//! A block cache that one core fills and any thread reads.
//!
//! A core's own cache (`cache.rs`) cannot be read elsewhere: its blocks are buffers of the core,
//! with counts that are not atomic. So blocks are copied here when they are read from the disk, and
//! threads that look keys up ([`SharedReader`](crate::SharedReader)) pin what they use with an
//! `Arc`.
//!
//! Who may do what:
//!
//! - The core inserts and evicts, through [`SharedCache`]. Its pool counts the bytes, so they are
//!   part of the core's budget and are released when a read needs the memory.
//! - Any thread reads, through [`SharedBlocks`].
//! - **Nobody waits for a lock.** A reader that finds its part locked reports a miss, and the core
//!   then answers; a core that finds a part locked does not cache that block. A reader holds a lock
//!   for one search of a hash table.
//!
//! Each part is a `quick_cache` (see `cache.rs`) whose use bits are atomic, so a hit takes the lock
//! for reading. A lock is enough here: a thread takes one in 16, for some 50 ns, and lock-free
//! reclamation would have to be proven to save less than the copy of the value costs.
//!
//! An evicted block lives until the last reader has copied its value. That is one block for each
//! thread, which is not counted.

use std::cell::Cell;
use std::sync::Arc;

use quick_cache::Weighter;
use quick_cache::unsync::Cache;
use reactor::{Held, Pool};

use crate::read::block::{Block, Layout};
use crate::read::cache::{BlockKey, ENTRY_BYTES, FixedHashBuilder, NoHooks};

#[expect(clippy::disallowed_types, reason = "only tried, never waited for; not used by nodes")]
type Lock<T> = std::sync::RwLock<T>;

/// The least bytes of a part, unless there is only one.
const PART_BYTES_MIN: usize = 4 << 20;
const PARTS_MAX: usize = 16;
/// Larger blocks are not copied: they go into the core's own cache.
pub(crate) const SHARED_BLOCK_MAX: usize = 64 << 10;

/// A block for any thread.
pub(crate) struct SharedBlock {
    pub data: Box<[u8]>,
    pub layout: Layout,
}

#[derive(Clone)]
struct Footprint;

impl Weighter<BlockKey, Arc<SharedBlock>> for Footprint {
    fn weight(&self, _: &BlockKey, block: &Arc<SharedBlock>) -> u64 {
        footprint(block.data.len())
    }
}

/// Bytes that a block occupies: in size classes of four per doubling, as those of jemalloc, with
/// its entry.
fn footprint(len: usize) -> u64 {
    let step = (len.next_power_of_two() / 8).max(64);
    len.next_multiple_of(step) as u64 + ENTRY_BYTES
}

type Part = Cache<BlockKey, Arc<SharedBlock>, Footprint, FixedHashBuilder, NoHooks>;

/// The readers' end.
pub(crate) struct SharedBlocks(Box<[Lock<Part>]>);

impl SharedBlocks {
    fn part(&self, key: BlockKey) -> &Lock<Part> {
        let mixed = (key.offset ^ key.table.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        &self.0[(mixed >> 48) as usize % self.0.len()]
    }

    /// A block; `None` if it is not here, or its part is locked.
    pub fn get(&self, key: BlockKey) -> Option<Arc<SharedBlock>> {
        self.part(key).try_read().ok()?.get(&key).cloned()
    }
}

/// The end of the core that fills it.
pub(crate) struct SharedCache {
    blocks: Arc<SharedBlocks>,
    held: Held,
    used: Cell<u64>,
    budget: u64,
}

impl SharedCache {
    /// A cache of at most `bytes`, which the pool counts.
    pub fn new(pool: &Pool, bytes: usize) -> SharedCache {
        let parts = (bytes / PART_BYTES_MIN).clamp(1, PARTS_MAX);
        let each = bytes / parts;
        let part = || {
            let items = (each / 4096).max(16);
            Cache::with(items, each as u64, Footprint, FixedHashBuilder::default(), NoHooks)
        };
        SharedCache {
            blocks: Arc::new(SharedBlocks((0..parts).map(|_| Lock::new(part())).collect())),
            held: pool.hold(),
            used: Cell::new(0),
            budget: bytes as u64,
        }
    }

    pub fn blocks(&self) -> &Arc<SharedBlocks> {
        &self.blocks
    }

    pub fn used(&self) -> u64 {
        self.used.get()
    }

    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Whether it takes blocks of this length.
    pub fn takes(&self, len: usize) -> bool {
        len <= SHARED_BLOCK_MAX && footprint(len) <= self.budget / 4
    }

    /// Copies a block into the cache, if there is memory for it and its part is not locked.
    pub fn insert(&self, key: BlockKey, block: &Block) {
        let used = self.used.get();
        if !self.held.set((used + footprint(block.data.len())) as usize) {
            return;
        }
        if let Ok(mut part) = self.blocks.part(key).try_write() {
            let copy = SharedBlock { data: (&*block.data).into(), layout: block.layout };
            let before = part.weight();
            part.insert(key, Arc::new(copy));
            self.used.set(used - before + part.weight());
        }
        self.held.set(self.used.get() as usize);
    }

    /// Evicts about `bytes`, or all it has, because memory is needed elsewhere. Returns the bytes
    /// released.
    pub fn shrink(&self, bytes: u64) -> u64 {
        let before = self.used.get();
        let aim = before.saturating_sub(bytes);
        let each = self.budget / self.blocks.0.len() as u64;
        for part in &self.blocks.0 {
            let used = self.used.get();
            if used <= aim {
                break;
            }
            let Ok(mut part) = part.try_write() else { continue };
            let weight = part.weight();
            part.set_capacity(weight.saturating_sub(used - aim));
            part.set_capacity(each);
            self.used.set(used - weight + part.weight());
        }
        self.held.set(self.used.get() as usize);
        before - self.used.get()
    }
}
