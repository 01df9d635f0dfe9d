//! The readers' types: the shared handle, an entry, and the address of a value.

use rocksfmt::{Comparator, SEEK_TYPE, SEQUENCE_MAX, pack};

use crate::arena::Space;
use crate::list::{List, Target};
use crate::node::{NodePtr, NodeRef};
use crate::writer::Writer;
use loomable::{Arc, Ordering};

/// A handle for reading a memtable on any core while its [`Writer`] inserts.
///
/// Reads write to no shared memory. Cloning and dropping a handle does count references, so give
/// each core one handle and pass references. The last handle frees the memory; the writer holds one
/// too.
#[derive(Clone)]
pub struct Memtable {
    pub(crate) list: Arc<List>,
}

impl Memtable {
    /// Creates an empty memtable that reserves at most `limit_bytes` of memory, including some
    /// hundred bytes that every memtable has. `seed` decides the shape of the list but not the
    /// result of any call: the same seed and calls give the same shape.
    pub fn new(comparator: Comparator, limit_bytes: usize, seed: u64) -> (Writer, Memtable) {
        let space = Space::new(limit_bytes, crate::arena::chunk_bytes(limit_bytes), 0);
        Memtable::with_space(comparator, space, seed)
    }

    /// Creates an empty memtable without a limit, one of `shares` that use some `share_bytes`
    /// together. Its first chunk is small enough for all of them to have one.
    pub fn share(
        comparator: Comparator,
        share_bytes: usize,
        shares: usize,
        seed: u64,
    ) -> (Writer, Memtable) {
        let space = Space::new(usize::MAX, crate::arena::chunk_bytes(share_bytes), 0);
        Memtable::with_space(comparator, space.growing(shares), seed)
    }

    fn with_space(comparator: Comparator, space: Space, seed: u64) -> (Writer, Memtable) {
        let writer = Writer::new(comparator, space, seed);
        let memtable = writer.memtable().clone();
        (writer, memtable)
    }

    /// The order of the user keys.
    pub fn comparator(&self) -> Comparator {
        self.list.comparator
    }

    /// The newest entry of a user key with a sequence of at most `sequence`.
    ///
    /// The type does not matter: a tombstone is an entry too.
    #[inline]
    pub fn get(&self, user_key: &[u8], sequence: u64) -> Option<Entry<'_>> {
        let packed = pack(sequence.min(SEQUENCE_MAX), SEEK_TYPE);
        let target = Target::new(self.list.comparator, user_key, packed);
        let (_, found) = self.list.search(|node| target.order_of(node).is_lt());
        let node = found.filter(|node| node.user_key() == user_key)?;
        Some(Entry { node, table: self.list.id })
    }

    /// The value that `value` refers to: no search, one read of the node.
    ///
    /// # Panics
    ///
    /// If `value` is of another memtable: a mistake of the caller that must not become a wrong
    /// answer.
    #[inline]
    pub fn value(&self, value: ValueRef) -> &[u8] {
        self.node(value.node, value.table).value()
    }

    /// The node at an address that was kept together with its list's number.
    #[inline(always)]
    pub(crate) fn node(&self, node: NodePtr, table: u64) -> NodeRef<'_> {
        assert!(table == self.list.id, "a position in another memtable");
        // SAFETY: an address kept with a list's number came from a `NodeRef` of that list, so the
        // node's `write` happened before that, and safe code, which orders, brought it here.
        // Numbers are unique, so the list is this one, and it and all its nodes live while `self`
        // is borrowed.
        unsafe { node.get() }
    }

    /// The number of entries; approximate while the writer inserts.
    pub fn len(&self) -> usize {
        self.list.written.len.load(Ordering::Relaxed)
    }

    /// Whether nothing has been inserted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of user keys, packed numbers and values; approximate while the writer inserts.
    pub fn bytes(&self) -> usize {
        self.list.written.bytes.load(Ordering::Relaxed)
    }

    /// Bytes of memory reserved: never above the limit, except that the head of the list always
    /// exists.
    pub fn memory(&self) -> usize {
        self.list.written.memory.load(Ordering::Relaxed)
    }
}

impl std::fmt::Debug for Memtable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memtable")
            .field("len", &self.len())
            .field("bytes", &self.bytes())
            .field("memory", &self.memory())
            .finish_non_exhaustive()
    }
}

/// An entry that was found. It stays readable while the handle that it was found through is
/// borrowed.
#[derive(Clone, Copy)]
pub struct Entry<'a> {
    node: NodeRef<'a>,
    table: u64,
}

impl<'a> Entry<'a> {
    pub(crate) fn new(node: NodeRef<'a>, table: u64) -> Entry<'a> {
        Entry { node, table }
    }

    /// The user's key.
    #[inline]
    pub fn user_key(&self) -> &'a [u8] {
        self.node.user_key()
    }

    /// User key and packed number, in the form that tables store.
    #[inline]
    pub fn internal_key(&self) -> &'a [u8] {
        self.node.internal_key()
    }

    /// Sequence and type, packed.
    #[inline]
    pub fn packed(&self) -> u64 {
        self.node.packed()
    }

    /// The value.
    #[inline]
    pub fn value(&self) -> &'a [u8] {
        self.node.value()
    }

    /// The value's location, for keeping; see [`Memtable::value`].
    #[inline]
    pub fn value_ref(&self) -> ValueRef {
        ValueRef { node: self.node.ptr(), table: self.table }
    }
}

impl std::fmt::Debug for Entry<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry")
            .field("user_key", &self.user_key())
            .field("packed", &self.packed())
            .field("value_bytes", &self.value().len())
            .finish()
    }
}

/// The location of a value. It borrows nothing; [`Memtable::value`] of any handle to its memtable
/// returns the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueRef {
    node: NodePtr,
    table: u64,
}
