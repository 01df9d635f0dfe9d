//! Memory of nodes: chunks, filled from front to back and freed together.
//!
//! [`Space`] decides by arithmetic alone where the next node goes, so the question "would these
//! fit?" is answered by the code that places them. [`Arena`] does as `Space` says.
//!
//! A node larger than a quarter of a chunk gets a chunk of its own, of exactly its size, and the
//! chunk in use stays in use; so at most a quarter of a chunk is lost at its end. The last chunks
//! shrink to the remainder of the limit.

use std::alloc::{Layout, handle_alloc_error};
use std::ptr::NonNull;

use crate::node::ALIGN;
use loomable::{alloc, dealloc};

/// The chunk size for a limit: a sixteenth of it, so that a small memtable is not one half-empty
/// chunk, and at most [`CHUNK_MAX`], where the cost of an allocation is negligible.
pub(crate) fn chunk_bytes(limit: usize) -> usize {
    (limit / 16).clamp(4 << 10, CHUNK_MAX)
}

/// Largest chunk for more than one node.
pub(crate) const CHUNK_MAX: usize = 1 << 20;
/// Smallest first chunk.
const CHUNK_MIN: usize = 1 << 10;

/// The account of memory: bytes reserved, bytes free, and the size of the next chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    limit: usize,
    /// Size of the next chunk. Each is twice the one before, up to `chunk_max`.
    chunk: usize,
    chunk_max: usize,
    reserved: usize,
    /// Free bytes at the end of the chunk in use.
    room: usize,
}

/// The place of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// After the node before.
    Here,
    /// At the start of a new chunk of that many bytes, which becomes the chunk in use.
    NewChunk(usize),
    /// In a chunk of its own.
    OwnChunk,
}

impl Space {
    /// An account with nothing free, where `reserved` bytes are reserved already.
    pub fn new(limit: usize, chunk: usize, reserved: usize) -> Space {
        let chunk = chunk.next_multiple_of(ALIGN);
        Space { limit, chunk, chunk_max: chunk, reserved, room: 0 }
    }

    /// Starts with a chunk of one `shares`th of the full size; chunks grow up to that.
    pub fn growing(mut self, shares: usize) -> Space {
        let first = (self.chunk_max / shares.max(1)).max(CHUNK_MIN).next_multiple_of(ALIGN);
        self.chunk = first.min(self.chunk_max);
        self
    }

    /// Sets the bytes that are reserved already.
    pub fn with_reserved(self, reserved: usize) -> Space {
        Space { reserved, ..self }
    }

    pub fn reserved(&self) -> usize {
        self.reserved
    }

    /// Takes `bytes`, a multiple of [`ALIGN`]. If the limit forbids, returns `None` and changes
    /// nothing.
    pub fn take(&mut self, bytes: usize) -> Option<Placement> {
        if bytes <= self.room {
            self.room -= bytes;
            return Some(Placement::Here);
        }
        let left = self.limit.saturating_sub(self.reserved) & !(ALIGN - 1);
        if bytes > left {
            return None;
        }
        if bytes > self.chunk / 4 {
            self.reserved += bytes;
            self.grow();
            return Some(Placement::OwnChunk);
        }
        let chunk = self.chunk.min(left);
        self.reserved += chunk;
        self.room = chunk - bytes;
        self.grow();
        Some(Placement::NewChunk(chunk))
    }

    fn grow(&mut self) {
        self.chunk = (2 * self.chunk).min(self.chunk_max);
    }
}

/// One allocation, freed on drop.
pub(crate) struct Chunk {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a chunk owns its allocation and touches it only in `drop`, which takes `&mut self`; the
// global allocator takes memory back on any thread.
unsafe impl Send for Chunk {}

impl Chunk {
    /// Allocates that many bytes, aligned to [`ALIGN`].
    pub fn new(bytes: usize) -> Chunk {
        assert!(bytes > 0, "a chunk holds at least a node");
        let layout = Layout::from_size_align(bytes, ALIGN)
            .expect("a chunk is either under a megabyte or one node, whose lengths are 32 bits");
        // SAFETY: the layout's size is not zero, as asserted above.
        let start = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Chunk { start, layout }
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: `new` got `start` from `alloc` with this layout, neither has changed since, and
        // `drop` runs once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Chunks whose pages were touched before they are needed. The kernel allocates memory at the first
/// touch and may clear megabytes of it, which took 4 ms for 2 MiB on a virtual machine; another
/// core can do that ahead of time.
#[derive(Default)]
pub struct Reserve(Vec<Chunk>);

impl Reserve {
    /// One chunk, of the size that memtables without a limit use.
    pub fn chunk() -> Reserve {
        let chunk = Chunk::new(chunk_bytes(usize::MAX));
        for at in (0..chunk.layout.size()).step_by(PAGE) {
            // SAFETY: the address is within the chunk, which nobody else has yet.
            unsafe { chunk.start.add(at).write(0) };
        }
        Reserve(vec![chunk])
    }

    /// The number of chunks.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no chunks.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the chunks of another reserve.
    pub fn append(&mut self, mut other: Reserve) {
        self.0.append(&mut other.0);
    }

    /// A chunk of that many bytes: from the reserve, or a new one.
    fn take(&mut self, bytes: usize) -> Chunk {
        match self.0.pop_if(|chunk| chunk.layout.size() == bytes) {
            Some(chunk) => chunk,
            None => Chunk::new(bytes),
        }
    }
}

/// Smallest unit that the kernel allocates at a touch, in bytes.
const PAGE: usize = 4 << 10;

/// The writer's side of the memory: where the next node goes. The chunks belong to the list, which
/// outlives the writer.
pub(crate) struct Arena {
    space: Space,
    /// The first free byte of the chunk in use; `space.room` free bytes follow.
    free: NonNull<u8>,
}

// SAFETY: `free` points at bytes that nobody uses until this arena hands them out, which it may do
// on any thread.
unsafe impl Send for Arena {}

impl Arena {
    pub fn new(space: Space) -> Arena {
        Arena { space, free: NonNull::dangling() }
    }

    /// A copy of the account, to ask what would fit.
    pub fn space(&self) -> Space {
        self.space
    }

    /// Allocates `bytes`, a multiple of [`ALIGN`] and not 0: uninitialized memory, aligned to
    /// `ALIGN`, exclusively the caller's, that lives as long as `chunks`. If the limit forbids,
    /// returns `None` and changes nothing. A new chunk comes from `reserve` if it has one of the
    /// size.
    pub fn allocate(
        &mut self,
        chunks: &mut Vec<Chunk>,
        reserve: &mut Reserve,
        bytes: usize,
    ) -> Option<NonNull<u8>> {
        assert!(bytes != 0 && bytes.is_multiple_of(ALIGN), "{bytes} bytes for a node");
        let mut new_chunk = |bytes| {
            let chunk = reserve.take(bytes);
            let start = chunk.start;
            chunks.push(chunk);
            start
        };
        let start = match self.space.take(bytes)? {
            Placement::OwnChunk => return Some(new_chunk(bytes)),
            Placement::NewChunk(bytes) => new_chunk(bytes),
            Placement::Here => self.free,
        };
        // SAFETY: at least `bytes` bytes of the same allocation follow `start`: for a new chunk
        // because `take` made it no smaller, and otherwise because `take` found `room >= bytes` and
        // `room` bytes follow `free`. So the sum stays within the allocation or at its end.
        self.free = unsafe { start.add(bytes) };
        Some(start)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn nodes_fill_a_chunk_then_the_next_and_the_last_is_smaller() {
        let mut space = Space::new(240, 96, 0);
        let places: Vec<_> = (0..11).map(|_| space.take(24)).collect();
        let here = Some(Placement::Here);
        let new = |bytes| Some(Placement::NewChunk(bytes));
        assert_eq!(
            places,
            [new(96), here, here, here, new(96), here, here, here, new(48), here, None]
        );
        assert_eq!(space.reserved(), 240);
    }

    #[test]
    fn the_first_chunk_may_be_small_and_each_is_twice_the_one_before() {
        let mut space = Space::new(usize::MAX, 16 << 10, 0).growing(8);
        let mut chunks = Vec::new();
        while chunks.len() < 5 {
            if let Some(Placement::NewChunk(bytes)) = space.take(256) {
                chunks.push(bytes);
            }
        }
        assert_eq!(chunks, [2 << 10, 4 << 10, 8 << 10, 16 << 10, 16 << 10]);
        let mut least = Space::new(usize::MAX, 16 << 10, 0).growing(1000);
        assert_eq!(least.take(256), Some(Placement::NewChunk(CHUNK_MIN)));
        // A node too large for a small chunk makes the next chunk larger, too.
        let mut space = Space::new(usize::MAX, 16 << 10, 0).growing(16);
        assert_eq!(space.take(512), Some(Placement::OwnChunk));
        assert_eq!(space.take(512), Some(Placement::NewChunk(2 << 10)));
    }

    #[test]
    fn a_large_node_has_a_chunk_of_its_own_and_the_chunk_in_use_stays() {
        let mut space = Space::new(1000, 96, 0);
        assert_eq!(space.take(16), Some(Placement::NewChunk(96)));
        assert_eq!(space.take(800), Some(Placement::OwnChunk));
        assert_eq!((space.take(80), space.reserved()), (Some(Placement::Here), 896));
        assert_eq!(space.take(112), None);
        assert_eq!((space.take(104), space.reserved()), (Some(Placement::OwnChunk), 1000));
    }

    #[test]
    fn handed_out_memory_is_aligned_and_disjoint() {
        let mut arena = Arena::new(Space::new(1 << 16, 256, 0));
        let mut chunks = Vec::new();
        let mut taken: Vec<(usize, usize)> = Vec::new();
        for i in 0.. {
            let bytes = ALIGN * (1 + i % 13);
            let Some(start) = arena.allocate(&mut chunks, &mut Reserve::default(), bytes) else {
                break;
            };
            // SAFETY: `allocate` returned these bytes for writing.
            unsafe { start.write_bytes(0xAA, bytes) };
            assert!(start.addr().get().is_multiple_of(ALIGN));
            taken.push((start.addr().get(), bytes));
        }
        taken.sort_unstable();
        assert!(taken.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        let reserved: usize = chunks.iter().map(|chunk| chunk.layout.size()).sum();
        assert_eq!(reserved, arena.space().reserved());
        assert!(taken.len() > 1000 && reserved <= 1 << 16);
    }

    #[test]
    fn a_chunk_comes_from_the_reserve_while_that_has_one_of_its_size() {
        let mut arena = Arena::new(Space::new(usize::MAX, chunk_bytes(usize::MAX), 0));
        let (mut chunks, mut reserve) = (Vec::new(), Reserve::chunk());
        let ahead = reserve.0[0].start;
        let own = arena.allocate(&mut chunks, &mut reserve, 512 << 10).unwrap();
        assert!(own != ahead && reserve.len() == 1);
        assert_eq!(arena.allocate(&mut chunks, &mut reserve, 64), Some(ahead));
        assert!(reserve.is_empty() && chunks.len() == 2);
    }
}
