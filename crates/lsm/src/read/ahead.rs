//! Read-ahead of one table's blocks, the same in both directions.
//!
//! 1. A seek fetches one block through the cache. If the iterator's history tells how much is
//!    usually read after a seek, the seek reads that much in one request instead, and nothing more
//!    is read until it is consumed.
//! 2. Each time the consumer has used up a chunk, the window doubles, up to [`WINDOW_MAX`].
//!    Adjacent blocks are read as one chunk, several chunks at a time.
//! 3. Blocks in the cache are taken from there.
//!
//! Blocks are checked and unpacked when they are consumed. Chunks do not go into the cache, so a
//! scan does not evict what other readers use again. When memory is short, nothing is read ahead,
//! and chunks already read are released to those who need memory now; their blocks are read again
//! one by one.

use std::collections::VecDeque;
use std::mem;
use std::rc::Rc;

use fs::Slice;
use rocksfmt::{BLOCK_TRAILER_BYTES, BlockHandle, Comparator};

use crate::error::{Kind, Result};
use crate::read::block::{Block, BlockKind};
use crate::read::cache::BlockKey;
use crate::read::chunk::{Chunk, Chunks, Data};
use crate::read::state::ReadContext;
use crate::read::stats::count;
use crate::read::walk::{Direction, Position, Walk};

/// Most bytes that are scheduled or read and not yet consumed.
pub(crate) const WINDOW_MAX: usize = 1 << 20;
/// The first window wider than a block.
const WINDOW_START: usize = 16 << 10;
/// Largest single read.
const CHUNK_MAX: usize = 256 << 10;
/// Gaps between blocks up to this size (padding, from `block_align`) are read along.
const GAP_MAX: u64 = 4096;

/// The read-ahead of an iterator in one table.
pub(crate) struct ReadAhead {
    context: ReadContext,
    slot: u32,
    comparator: Comparator,
    walk: Walk,
    direction: Direction,
    /// Whether the walk is at a block that is not scheduled yet.
    more: bool,
    chunks: Rc<Chunks>,
    /// Whether the reader knows that it can reclaim the chunks' memory.
    registered: bool,
    scheduled: usize,
    window: usize,
    /// The widest window, at most [`WINDOW_MAX`].
    window_max: usize,
    /// Bytes that a seek requested at once; nothing more is fetched until they are consumed.
    quota: usize,
    /// Bytes consumed since the last seek.
    consumed: usize,
    /// The block that [`ReadAhead::next`] returned last.
    given: BlockHandle,
    keep: bool,
}

impl ReadAhead {
    pub fn new(
        context: &ReadContext,
        slot: u32,
        comparator: Comparator,
        keep: bool,
        window_max: usize,
    ) -> ReadAhead {
        ReadAhead {
            context: context.clone(),
            slot,
            comparator,
            walk: Walk::new(context, slot),
            direction: Direction::Forward,
            more: false,
            chunks: Rc::default(),
            registered: false,
            scheduled: 0,
            window: 0,
            window_max: window_max.clamp(WINDOW_START, WINDOW_MAX),
            quota: 0,
            consumed: 0,
            given: BlockHandle { offset: 0, size: 0 },
            keep,
        }
    }

    /// Bytes consumed since the last seek.
    pub fn consumed(&self) -> usize {
        self.consumed
    }

    /// The current window, for carrying over to the next table.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Drops data that was read and not consumed.
    pub fn leave(&mut self) {
        self.chunks.borrow_mut().clear();
        self.scheduled = 0;
        self.more = false;
    }

    /// Starts over at a position. `window` is a suggestion in bytes from the iterator's history; 0
    /// means none. Returns false if there is no block.
    pub async fn seek(
        &mut self,
        position: Position<'_>,
        direction: Direction,
        window: usize,
        bound: Option<&[u8]>,
    ) -> Result<bool> {
        // If this call fails or is dropped, the state must be empty.
        self.leave();
        self.consumed = 0;
        self.direction = direction;
        self.window = window.min(self.window_max);
        self.quota = if self.window < self.window_max { self.window } else { 0 };
        self.more = self.walk.go(position).await?;
        if !self.more {
            return Ok(false);
        }
        if self.window > 0 {
            self.top_up(bound).await?;
        } else {
            let handle = self.walk.handle();
            self.schedule(handle, Data::Single)?;
            self.advance(bound).await?;
        }
        Ok(true)
    }

    /// Turns around at the block that holds the internal key `at`: drops the schedule; the next
    /// block is the one on the other side.
    pub async fn turn(
        &mut self,
        at: &[u8],
        direction: Direction,
        bound: Option<&[u8]>,
    ) -> Result<()> {
        self.leave();
        self.quota = 0;
        self.direction = direction;
        self.more = self.walk.go(Position::AtOrAfter(at)).await?;
        if self.more {
            self.advance(bound).await?;
        }
        Ok(())
    }

    fn stored_len(&self, handle: BlockHandle) -> Result<usize> {
        self.context.view.version.table(self.slot)?.stored_len(handle)
    }

    /// Schedules one block.
    fn schedule(&mut self, handle: BlockHandle, data: Data) -> Result<()> {
        let bytes = self.stored_len(handle)?;
        self.scheduled += bytes;
        let handles = VecDeque::from([handle]);
        self.chunks.borrow_mut().push_back(Chunk { handles, offset: handle.offset, bytes, data });
        Ok(())
    }

    /// Moves the walk to the next block, unless the bound excludes it.
    async fn advance(&mut self, bound: Option<&[u8]>) -> Result<()> {
        // The separator is at or after every key of its block and before every key of the next.
        let beyond = |walk: &Walk| {
            bound.is_some_and(|bound| match self.direction {
                Direction::Forward => self.comparator.cmp_user(walk.separator(), bound).is_ge(),
                Direction::Backward => self.comparator.cmp_user(walk.separator(), bound).is_lt(),
            })
        };
        if self.direction == Direction::Forward && beyond(&self.walk) {
            self.more = false;
            return Ok(());
        }
        self.more = self.walk.step(self.direction).await?;
        if self.more && self.direction == Direction::Backward {
            let beyond = bound.is_some_and(|bound| {
                self.comparator.cmp_user(self.walk.separator(), bound).is_lt()
            });
            self.more = !beyond;
        }
        Ok(())
    }

    /// Schedules chunks until the window is full.
    async fn top_up(&mut self, bound: Option<&[u8]>) -> Result<()> {
        // After a seek, one read; for a stream several, so that one is always in flight.
        let chunks = if self.consumed < self.quota { 1 } else { 2 };
        let chunk_max = (self.window / chunks).clamp(1, CHUNK_MAX);
        while self.more && self.scheduled < self.window {
            let first = self.walk.handle();
            let key = BlockKey::of(&self.context.view.version, self.slot, first);
            if let Some(block) = self.context.state.cached(key) {
                self.schedule(first, Data::Cached(block))?;
                self.advance(bound).await?;
                continue;
            }
            let mut chunk = self.gather(bound, chunk_max).await?;
            let file = self.context.view.file(self.slot)?;
            let state = &self.context.state;
            let Some(reading) = state.read_ahead(file, chunk.offset, chunk.bytes) else {
                // No spare memory: block by block.
                for handle in chunk.handles {
                    self.schedule(handle, Data::Single)?;
                }
                return Ok(());
            };
            count(&state.counters.read_ahead_bytes, chunk.bytes as u64);
            self.scheduled += chunk.bytes;
            if !mem::replace(&mut self.registered, true) {
                state.add_read_ahead(&self.chunks);
            }
            chunk.data = Data::Reading(reading);
            self.chunks.borrow_mut().push_back(chunk);
        }
        Ok(())
    }

    /// Takes adjacent blocks from the walk, for one read of about `chunk_max` bytes.
    async fn gather(&mut self, bound: Option<&[u8]>, chunk_max: usize) -> Result<Chunk> {
        let first = self.walk.handle();
        let mut handles = VecDeque::with_capacity(chunk_max / 4096 + 1);
        let (mut from, mut to) = (first.offset, first.offset + self.stored_len(first)? as u64);
        handles.push_back(first);
        self.advance(bound).await?;
        while self.more && (to - from) < chunk_max as u64 {
            let handle = self.walk.handle();
            let end = handle.offset + self.stored_len(handle)? as u64;
            let near = match self.direction {
                Direction::Forward => handle.offset >= to && handle.offset - to <= GAP_MAX,
                Direction::Backward => end <= from && from - end <= GAP_MAX,
            };
            if !near {
                break;
            }
            from = from.min(handle.offset);
            to = to.max(end);
            handles.push_back(handle);
            self.advance(bound).await?;
        }
        Ok(Chunk { handles, offset: from, bytes: (to - from) as usize, data: Data::Single })
    }

    /// The next block in this direction; `None` at the end.
    pub async fn next(&mut self, bound: Option<&[u8]>) -> Result<Option<Block>> {
        loop {
            if let Some(handle) = self.next_handle() {
                self.consumed += handle.size as usize + BLOCK_TRAILER_BYTES;
                self.given = handle;
                return self.take(handle).await.map(Some);
            }
            if self
                .chunks
                .borrow_mut()
                .pop_front()
                .map(|chunk| self.scheduled -= chunk.bytes)
                .is_some()
            {
                // Keep the device busy while the rest is consumed.
                if self.consumed >= self.quota
                    && !self.chunks.borrow().is_empty()
                    && self.more
                    && self.scheduled < self.window / 2
                {
                    self.widen();
                    self.top_up(bound).await?;
                }
                continue;
            }
            if !self.more {
                return Ok(None);
            }
            self.widen();
            self.top_up(bound).await?;
        }
    }

    /// The next block of the first chunk; `None` at the chunk's end.
    fn next_handle(&self) -> Option<BlockHandle> {
        self.chunks.borrow_mut().front_mut()?.handles.pop_front()
    }

    /// Returns the last block again. Suspends for it.
    pub async fn again(&self) -> Result<Block> {
        let (state, view) = (&self.context.state, &self.context.view);
        state.block(view, self.slot, self.given, BlockKind::Data, self.keep).await
    }

    fn widen(&mut self) {
        self.window = (self.window * 2).clamp(WINDOW_START, self.window_max);
    }

    /// Takes a block of the first chunk.
    async fn take(&mut self, handle: BlockHandle) -> Result<Block> {
        let state = &*self.context.state;
        let view = &*self.context.view;
        // The data leaves the queue while this suspends, so a release of chunks skips it.
        let (offset, data) = match self.chunks.borrow_mut().front_mut() {
            Some(chunk) => (chunk.offset, mem::replace(&mut chunk.data, Data::Single)),
            None => unreachable!("a handle was just taken from the first chunk"),
        };
        let slice = match data {
            Data::Cached(block) => return Ok(block),
            Data::Read(slice) => Some(slice),
            // After a failure, fetch each block separately: perhaps only one of them is unreadable.
            Data::Reading(reading) => reading.await.ok(),
            Data::Single => None,
        };
        if let Some(slice) = slice {
            let table = view.version.table(self.slot)?;
            let start = (handle.offset - offset) as usize;
            let stored = slice.slice(start..start + handle.size as usize + BLOCK_TRAILER_BYTES);
            match state.unpack_now(table, handle, stored, BlockKind::Data) {
                // No memory, and the chunk holds some.
                Err(_) => drop(slice),
                // Read again on its own below before it is reported as damaged.
                Ok(Err(error)) if error.kind() == Kind::Corruption => self.put_back(slice),
                Ok(done) => {
                    self.put_back(slice);
                    return done;
                }
            }
        }
        state.block(view, self.slot, handle, BlockKind::Data, self.keep).await
    }

    /// Keeps the first chunk's bytes if it has more blocks.
    fn put_back(&self, slice: Slice) {
        if let Some(chunk) = self.chunks.borrow_mut().front_mut()
            && !chunk.handles.is_empty()
        {
            chunk.data = Data::Read(slice);
        }
    }
}
