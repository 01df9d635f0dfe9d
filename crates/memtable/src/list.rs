//! The list shared by readers and the writer: the search down the levels, and the ownership of the
//! memory.
//!
//! Every node is in the list of level 0, one in four also in that of level 1, one in sixteen in
//! that of level 2, and so on. A search starts at the head, an empty node that comes before all
//! others at every level. It goes right as far as it can, then down a level.
//!
//! Access: readers only follow links and read nodes. The only writer stores into links and into
//! [`Written`], which has cache lines of its own; readers load from it only when asked for a
//! figure.

use std::cmp::Ordering;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rocksfmt::Comparator;

use crate::arena::Chunk;
use crate::node::{HEIGHT_MAX, NodePtr, NodeRef, node_bytes, prefix_of};
use loomable::{Gauge, UnsafeCell};

/// A skip list and the memory of its nodes.
pub(crate) struct List {
    /// Unique among all lists this process ever makes; it proves that a kept [`NodePtr`] belongs
    /// to a live list.
    pub id: u64,
    pub comparator: Comparator,
    head: NodePtr,
    pub written: Written,
}

/// Everything the writer writes besides nodes. Aligned to 128 bytes, not 64: the adjacent-line
/// prefetcher of x86 pulls lines in pairs.
#[repr(align(128))]
pub(crate) struct Written {
    pub len: Gauge,
    pub bytes: Gauge,
    pub memory: Gauge,
    /// The memory of all nodes. Only the writer touches it, until the last handle drops it.
    pub chunks: UnsafeCell<Vec<Chunk>>,
}

// SAFETY: a shared `List` leads to plain values that do not change, atomics, nodes, which any
// thread may read (`node.rs`), and `chunks`. The cell of `chunks` is accessed only by unsafe code
// of the writer, which is unique and needs `&mut Writer` for it. Dropping a `Vec<Chunk>` on another
// thread is sound because `Chunk` is Send.
unsafe impl Sync for List {}

impl List {
    pub fn new(comparator: Comparator) -> List {
        // Lists need different numbers; nothing else depends on them. The counter never wraps:
        // nobody makes 2^64 lists.
        static IDS: AtomicU64 = AtomicU64::new(1);
        let bytes = node_bytes(HEIGHT_MAX, 0).expect("an empty node is small");
        let chunk = Chunk::new(bytes);
        // SAFETY: a chunk is aligned, has the requested size, and this one is ours.
        let head = unsafe { NodePtr::write(chunk.start(), HEIGHT_MAX, 0, &[], 0, &[]) };
        let written = Written {
            len: Gauge::new(0),
            bytes: Gauge::new(0),
            memory: Gauge::new(bytes),
            chunks: UnsafeCell::new(vec![chunk]),
        };
        List { id: IDS.fetch_add(1, Relaxed), comparator, head, written }
    }

    /// The empty node before all others.
    #[inline(always)]
    pub fn head(&self) -> NodeRef<'_> {
        // SAFETY: `new` wrote the head before the list was shared, and its chunk lives as long as
        // the list.
        unsafe { self.head.get() }
    }

    /// The last node that is `before`, or the head if there is none, and the node after it.
    ///
    /// `before` must hold for all nodes up to some place in the order and for none after it. At
    /// some moment during the call there was no node between the two.
    #[inline(always)]
    pub fn search(
        &self,
        before: impl Fn(NodeRef<'_>) -> bool,
    ) -> (NodeRef<'_>, Option<NodeRef<'_>>) {
        let (mut at, mut after) = (self.head(), None);
        for level in (0..HEIGHT_MAX).rev() {
            // SAFETY: the head has all levels, and other nodes were found one level up.
            (at, after) = unsafe { go_right(at, level, after, &before) };
        }
        (at, after)
    }
}

/// Goes right on one level from `at`, which is `before`. Returns the last node that is `before`,
/// and the next one. `after` is a node known not to be `before`: the end of the search on the
/// level above, and often the end on this one.
///
/// # Safety
///
/// The height of `at` is above `level`.
#[inline(always)]
pub(crate) unsafe fn go_right<'a>(
    mut at: NodeRef<'a>,
    level: usize,
    after: Option<NodeRef<'a>>,
    before: impl Fn(NodeRef<'a>) -> bool,
) -> (NodeRef<'a>, Option<NodeRef<'a>>) {
    loop {
        // SAFETY: `at` is as the caller promises, or was found through a link of this level, and
        // `insert_after` puts a node only into links of levels that it has.
        let next = unsafe { at.next(level) };
        if level > 0 {
            // Reading `next` is a cache miss, and the first step down will be another; overlap
            // them. That saves a tenth of a search among a million entries. SAFETY: `at` has this
            // level and so those below.
            unsafe { at.prefetch_next(level - 1) };
        }
        match next {
            Some(node) if next != after && before(node) => at = node,
            _ => return (at, next),
        }
    }
}

/// The key to find, with its prefix computed once.
#[derive(Clone, Copy)]
pub(crate) struct Target<'k> {
    comparator: Comparator,
    prefix: u64,
    user_key: &'k [u8],
    packed: u64,
}

impl<'k> Target<'k> {
    #[inline(always)]
    pub fn new(comparator: Comparator, user_key: &'k [u8], packed: u64) -> Target<'k> {
        Target { comparator, prefix: prefix_of(comparator, user_key), user_key, packed }
    }

    /// The order of a node relative to the target. Not defined for the head.
    #[inline(always)]
    pub fn order_of(&self, node: NodeRef<'_>) -> Ordering {
        node.prefix()
            .cmp(&self.prefix)
            .then_with(|| self.comparator.cmp_user(node.user_key(), self.user_key))
            .then_with(|| self.packed.cmp(&node.packed()))
    }
}
