//! Insertion.
//!
//! 1. [`Writer::insert`] draws the height of the new node and allocates memory for it. If the limit
//!    forbids, nothing has changed.
//! 2. The whole node is written; readers cannot reach it yet.
//! 3. The search for its place starts at the place of the last insertion: up until a level has a
//!    gap that contains the new key, then down again. A key directly after the last one needs no
//!    step.
//! 4. The node is linked in, level 0 first. The store into its predecessor's link makes it visible;
//!    the levels above only speed up searches. A reader that meets the node on one level finds it
//!    linked on all levels below.
//!
//! Only `&mut Writer` inserts, and a writer cannot be cloned, so plain loads and stores suffice: no
//! lock, no compare-and-swap.

use rocksfmt::{Comparator, KEY_TRAILER_BYTES};

use crate::arena::{Arena, Reserve, Space};
use crate::list::{List, Target, go_right};
use crate::memtable::Memtable;
use crate::node::{HEIGHT_MAX, NodePtr, node_bytes, prefix_of};
use loomable::{Arc, Ordering, mutant};

/// The memtable has no room for the entry; nothing was changed. A smaller entry may still fit. An
/// entry that does not fit into an empty memtable, or has more than `u32::MAX` bytes, never will.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl std::fmt::Display for Full {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the memtable is full")
    }
}

impl std::error::Error for Full {}

/// The only writer of a memtable.
pub struct Writer {
    memtable: Memtable,
    arena: Arena,
    heights: Heights,
    /// On each level, the last node at or before the place of the last insertion.
    place: [NodePtr; HEIGHT_MAX],
}

impl Writer {
    pub(crate) fn new(comparator: Comparator, space: Space, seed: u64) -> Writer {
        let list = List::new(comparator);
        let reserved = list.written.memory.load(Ordering::Relaxed);
        Writer {
            arena: Arena::new(space.with_reserved(reserved)),
            heights: Heights(seed),
            place: [list.head().ptr(); HEIGHT_MAX],
            memtable: Memtable { list: Arc::new(list) },
        }
    }

    /// The readers' handle.
    pub fn memtable(&self) -> &Memtable {
        &self.memtable
    }

    /// Inserts an entry; readers on all cores can find it from then on.
    ///
    /// The same user key and packed number may be inserted more than once, for example when a log
    /// is replayed twice. All are kept, in the order of insertion, and [`Memtable::get`] finds the
    /// first. So the result for a sequence never changes.
    pub fn insert(&mut self, user_key: &[u8], packed: u64, value: &[u8]) -> Result<(), Full> {
        self.insert_from(&mut Reserve::default(), user_key, packed, value)
    }

    /// As [`Writer::insert`], with new chunks from `reserve` while it has some.
    pub fn insert_from(
        &mut self,
        reserve: &mut Reserve,
        user_key: &[u8],
        packed: u64,
        value: &[u8],
    ) -> Result<(), Full> {
        let mut heights = self.heights;
        self.insert_at_height(heights.draw(), reserve, user_key, packed, value)?;
        self.heights = heights;
        Ok(())
    }

    /// Whether these entries would all fit if they came next and in this order; each is given as
    /// the bytes of its user key and value together. The answer is exact; ask before writing a
    /// batch to the log.
    pub fn room_for(&self, entries: impl IntoIterator<Item = usize>) -> bool {
        let (mut heights, mut space) = (self.heights, self.arena.space());
        entries.into_iter().all(|bytes| {
            node_bytes(heights.draw(), bytes).is_some_and(|bytes| space.take(bytes).is_some())
        })
    }

    pub(crate) fn insert_at_height(
        &mut self,
        height: usize,
        reserve: &mut Reserve,
        user_key: &[u8],
        packed: u64,
        value: &[u8],
    ) -> Result<(), Full> {
        assert!((1..=HEIGHT_MAX).contains(&height), "a node of height {height}");
        let list = &*self.memtable.list;
        let comparator = list.comparator;
        let payload = user_key.len() + value.len();
        let bytes = node_bytes(height, payload).ok_or(Full)?;
        let arena = &mut self.arena;
        let memory = list.written.chunks.with_mut(|chunks| {
            // SAFETY: the list's chunks are touched only here and when the list is dropped. There
            // is one writer, borrowed exclusively, and it keeps the list from being dropped.
            arena.allocate(unsafe { &mut *chunks }, reserve, bytes)
        });
        let memory = memory.ok_or(Full)?;
        let prefix = prefix_of(comparator, user_key);
        // SAFETY: the arena returned that many aligned bytes, exclusively ours.
        let node = unsafe { NodePtr::write(memory, height, prefix, user_key, packed, value) };
        self.seek(&Target::new(comparator, user_key, packed));
        self.link(node, height);

        let written = &self.memtable.list.written;
        let add = |gauge: &loomable::Gauge, n| {
            gauge.store(gauge.load(Ordering::Relaxed) + n, Ordering::Relaxed);
        };
        add(&written.len, 1);
        add(&written.bytes, payload + KEY_TRAILER_BYTES);
        written.memory.store(self.arena.space().reserved(), Ordering::Relaxed);
        Ok(())
    }

    /// Moves `place` to where the target belongs: after all nodes that are at or before it.
    #[inline]
    fn seek(&mut self, target: &Target<'_>) {
        let Writer { memtable, place, .. } = self;
        let head = memtable.list.head();
        // SAFETY: nodes in `place` were written by this writer and live as long as its list.
        let at_place = |ptr: NodePtr| unsafe { ptr.get() };
        let before = |node| target.order_of(node).is_le();

        // The higher the level, the further left is the node in `place`.
        let forward = place[0] == head.ptr() || before(at_place(place[0]));
        let (mut level, mut after) = (0, None);
        while level < HEIGHT_MAX {
            let left = at_place(place[level]);
            if forward || left == head || before(left) {
                // SAFETY: a node is put into `place` only at a level that it has.
                let next = unsafe { left.next(level) };
                if !next.is_some_and(before) {
                    after = next;
                    break;
                }
            }
            level += 1;
        }
        if level == 0 {
            return;
        }
        let mut at = match forward {
            true => at_place(place[level - 1]),
            false if level < HEIGHT_MAX => at_place(place[level]),
            false => head,
        };
        for level in (0..level).rev() {
            // SAFETY: `at` was in `place` for this level or for one above, or was found one level
            // up, or is the head: in each case it has this level.
            (at, after) = unsafe { go_right(at, level, after, before) };
            place[level] = at.ptr();
        }
    }

    /// Links the node in at `place`, and moves `place` to it.
    #[inline]
    fn link(&mut self, node: NodePtr, height: usize) {
        for step in 0..height {
            let level = if mutant("memtable.upper_first") { height - 1 - step } else { step };
            // SAFETY: both were written by this writer and live as long as its list; the node has
            // `height` levels and the node in `place` has the level. We are the writer, and the
            // node is new.
            unsafe { self.place[level].get().insert_after(level, node.get()) };
            self.place[level] = node;
        }
    }
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("memtable", &self.memtable).finish_non_exhaustive()
    }
}

/// Draws heights: one in four goes a level up. SplitMix64: each number is a function of a counter,
/// so a copy predicts the original's draws.
#[derive(Clone, Copy)]
struct Heights(u64);

impl Heights {
    #[inline]
    fn draw(&mut self) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        (1 + z.trailing_zeros() as usize / 2).min(HEIGHT_MAX)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_in_four_goes_a_level_up() {
        let mut heights = Heights(7);
        let mut count = [0_usize; HEIGHT_MAX + 1];
        (0..1 << 20).for_each(|_| count[heights.draw()] += 1);
        for level in 1..6 {
            let above: usize = count[level + 1..].iter().sum();
            let here = count[level] + above;
            assert!((above as f64 / here as f64 - 0.25).abs() < 0.02, "level {level}: {count:?}");
        }
        assert_eq!(count[0], 0);
    }
}
