//! The list as readers and the writer share it: the way down the levels, and who owns the memory.
//!
//! Every node is in the list of level 0, one in four also in that of level 1, one in sixteen in
//! that of level 2, and so on. A search goes right as far as it may, then a level down, beginning
//! with the head, an empty node at every level that stands before all others.
//!
//! Who may touch what: readers follow links and read nodes, no more. The writer, of which there is
//! one, stores into links and into [`Written`], which is on cache lines of its own; readers look at
//! that only when asked for a figure.

use std::cmp::Ordering;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rocksfmt::Comparator;

use crate::arena::Chunk;
use crate::node::{HEIGHT_MAX, NodePtr, NodeRef, node_bytes, prefix_of};
use loomable::{Gauge, UnsafeCell};

/// See the module text.
pub(crate) struct List {
    /// No other list of this process has it, ever: by it a kept [`NodePtr`] is known to be of a
    /// list that is alive.
    pub id: u64,
    pub comparator: Comparator,
    head: NodePtr,
    pub written: Written,
}

/// What the writer writes besides nodes. 128 bytes, not 64: the adjacent-line prefetcher of x86
/// pulls lines in pairs.
#[repr(align(128))]
pub(crate) struct Written {
    pub len: Gauge,
    pub bytes: Gauge,
    pub memory: Gauge,
    /// The memory of all nodes. Only the writer touches it, until the last handle drops it.
    pub chunks: UnsafeCell<Vec<Chunk>>,
}

// SAFETY: what is behind a shared `List` is plain values that do not change, atomics, nodes, which
// any thread may read (`node.rs`), and `chunks`, whose cell gives no access but by unsafe code: the
// writer's alone, which is unique and needs `&mut Writer` for it. Dropping a `Vec<Chunk>` on
// another thread is fine, as `Chunk` is Send.
unsafe impl Sync for List {}

impl List {
    pub fn new(comparator: Comparator) -> List {
        // Different lists need different numbers; nothing else hangs on them. 2^64 lists are never
        // made.
        static IDS: AtomicU64 = AtomicU64::new(1);
        let bytes = node_bytes(HEIGHT_MAX, 0).expect("an empty node is small");
        let chunk = Chunk::new(bytes);
        // SAFETY: a chunk is aligned, as large as asked for, and this one is ours.
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
        // SAFETY: `new` wrote it before anybody had this list, and its chunk stays as long as the
        // list.
        unsafe { self.head.get() }
    }

    /// The last node of those that are `before`, the head if there is none, and the node behind it.
    ///
    /// `before` must hold for the nodes up to some place in the order, and not for those behind it.
    /// Between the two nodes there was nothing at some moment during the call.
    #[inline(always)]
    pub fn search(
        &self,
        before: impl Fn(NodeRef<'_>) -> bool,
    ) -> (NodeRef<'_>, Option<NodeRef<'_>>) {
        let (mut at, mut behind) = (self.head(), None);
        for level in (0..HEIGHT_MAX).rev() {
            // SAFETY: the head has all levels, and other nodes were found one level up.
            (at, behind) = unsafe { go_right(at, level, behind, &before) };
        }
        (at, behind)
    }
}

/// Goes right from `at`, which is `before`, on one level; returns the last node that is `before`,
/// and the next one. `behind` is a node known not to be: where the level above ended, so often
/// where this one ends.
///
/// # Safety
///
/// `at` has a height above `level`.
#[inline(always)]
pub(crate) unsafe fn go_right<'a>(
    mut at: NodeRef<'a>,
    level: usize,
    behind: Option<NodeRef<'a>>,
    before: impl Fn(NodeRef<'a>) -> bool,
) -> (NodeRef<'a>, Option<NodeRef<'a>>) {
    loop {
        // SAFETY: `at` is as the caller promises, or was found through a link of this level, and
        // `insert_behind` puts a node only into links of levels that it has.
        let next = unsafe { at.next(level) };
        if level > 0 {
            // Looking at `next` is a cache miss, and so will be the first step down; let them run
            // together. That is worth a tenth of a search among a million entries.
            // SAFETY: `at` has this level and so those below.
            unsafe { at.prefetch_next(level - 1) };
        }
        match next {
            Some(node) if next != behind && before(node) => at = node,
            _ => return (at, next),
        }
    }
}

/// What is sought, with its prefix worked out once.
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

    /// Where a node stands, seen from the target. Not to be asked of the head.
    #[inline(always)]
    pub fn order_of(&self, node: NodeRef<'_>) -> Ordering {
        node.prefix()
            .cmp(&self.prefix)
            .then_with(|| self.comparator.cmp_user(node.user_key(), self.user_key))
            .then_with(|| self.packed.cmp(&node.packed()))
    }
}
