//! Chunks: data that iterators have read ahead. Their memory can be reclaimed at any time.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::mem;

use fs::{Reading, Slice};
use rocksfmt::BlockHandle;

use crate::read::block::Block;

/// Blocks fetched by one read, in the order of consumption.
pub(crate) struct Chunk {
    pub handles: VecDeque<BlockHandle>,
    /// File offset of the first byte.
    pub offset: u64,
    pub bytes: usize,
    pub data: Data,
}

/// The data of a chunk.
pub(crate) enum Data {
    /// One block that was in the cache.
    Cached(Block),
    Reading(Reading),
    Read(Slice),
    /// Nothing: each block is fetched through the cache when it is consumed.
    Single,
}

/// The chunks of one read-ahead, in the order of consumption.
pub(crate) type Chunks = RefCell<VecDeque<Chunk>>;

impl Chunk {
    /// Releases the chunk's data and returns its size in memory. The memory of a read in flight
    /// comes back when the read ends.
    pub fn give_up(&mut self) -> usize {
        match mem::replace(&mut self.data, Data::Single) {
            Data::Cached(block) => block.footprint(),
            Data::Reading(_) => self.bytes,
            Data::Read(slice) => slice.footprint(),
            Data::Single => 0,
        }
    }
}
