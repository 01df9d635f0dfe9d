//! A position in a memtable that moves both ways while entries are inserted.
//!
//! Nodes are never unlinked or moved, so an address is a position, and insertions do not invalidate
//! it. A cursor does not see a snapshot: it meets entries inserted ahead of it and misses those
//! inserted after it has passed. For a snapshot, skip entries with a later sequence.

use crate::list::Target;
use crate::memtable::{Entry, Memtable, ValueRef};
use crate::node::{NodePtr, NodeRef};

/// A position in a memtable: on an entry, or nowhere. It borrows nothing; every call takes its
/// memtable.
///
/// # Panics
///
/// A cursor on an entry panics when it is used with another memtable than its own. The calls that
/// position it (`first`, `last`, `seek`, `seek_for_prev`) accept any memtable.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    node: Option<NodePtr>,
    table: u64,
}

impl Cursor {
    /// A cursor on no entry.
    pub fn new() -> Cursor {
        Cursor::default()
    }

    /// Whether it is on an entry.
    #[inline]
    pub fn valid(&self) -> bool {
        self.node.is_some()
    }

    #[inline(always)]
    fn set(&mut self, table: &Memtable, node: Option<NodeRef<'_>>) -> bool {
        *self = Cursor { node: node.map(NodeRef::ptr), table: table.list.id };
        self.valid()
    }

    /// As [`set`](Self::set), but the head counts as nowhere.
    #[inline(always)]
    fn set_after_head(&mut self, table: &Memtable, node: NodeRef<'_>) -> bool {
        self.set(table, (node != table.list.head()).then_some(node))
    }

    #[inline(always)]
    fn node<'a>(&self, table: &'a Memtable) -> Option<NodeRef<'a>> {
        Some(table.node(self.node?, self.table))
    }

    /// Moves to the first entry. Without one, returns false and is nowhere.
    pub fn first(&mut self, table: &Memtable) -> bool {
        self.set(table, table.list.head().following())
    }

    /// Moves to the last entry. Without one, returns false and is nowhere.
    pub fn last(&mut self, table: &Memtable) -> bool {
        let (last, _) = table.list.search(|_| true);
        self.set_after_head(table, last)
    }

    /// Moves to the first entry at or after that key and packed number. Without one, returns false
    /// and is nowhere.
    #[inline]
    pub fn seek(&mut self, table: &Memtable, user_key: &[u8], packed: u64) -> bool {
        let target = Target::new(table.comparator(), user_key, packed);
        let (_, found) = table.list.search(|node| target.order_of(node).is_lt());
        self.set(table, found)
    }

    /// Moves to the last entry at or before that key and packed number. Without one, returns false
    /// and is nowhere.
    pub fn seek_for_prev(&mut self, table: &Memtable, user_key: &[u8], packed: u64) -> bool {
        let target = Target::new(table.comparator(), user_key, packed);
        let (found, _) = table.list.search(|node| target.order_of(node).is_le());
        self.set_after_head(table, found)
    }

    /// Moves to the next entry. At the end, or from nowhere, returns false and is nowhere.
    #[inline]
    pub fn next(&mut self, table: &Memtable) -> bool {
        let next = self.node(table).and_then(NodeRef::following);
        self.set(table, next)
    }

    /// Moves to the previous entry. At the beginning, or from nowhere, returns false and is
    /// nowhere. This is a search: there are no links back.
    pub fn prev(&mut self, table: &Memtable) -> bool {
        let Some(node) = self.node(table) else { return false };
        let target = Target::new(table.comparator(), node.user_key(), node.packed());
        let (mut before, mut next) = table.list.search(|node| target.order_of(node).is_lt());
        // At some moment there was no node between the two, so the loop ends immediately, unless
        // the same key and number were inserted twice and this is not the first of them.
        while let Some(other) = next.filter(|next| *next != node) {
            (before, next) = (other, other.following());
        }
        self.set_after_head(table, before)
    }

    /// The current entry.
    #[inline]
    pub fn entry<'a>(&self, table: &'a Memtable) -> Option<Entry<'a>> {
        Some(Entry::new(self.node(table)?, self.table))
    }

    /// The current user key; empty when nowhere.
    #[inline]
    pub fn user_key<'a>(&self, table: &'a Memtable) -> &'a [u8] {
        self.node(table).map_or(&[], NodeRef::user_key)
    }

    /// User key and packed number, in the form that tables store; empty when nowhere.
    #[inline]
    pub fn internal_key<'a>(&self, table: &'a Memtable) -> &'a [u8] {
        self.node(table).map_or(&[], NodeRef::internal_key)
    }

    /// Packed sequence and type; 0 when nowhere.
    #[inline]
    pub fn packed(&self, table: &Memtable) -> u64 {
        self.node(table).map_or(0, NodeRef::packed)
    }

    /// The current value; empty when nowhere.
    #[inline]
    pub fn value<'a>(&self, table: &'a Memtable) -> &'a [u8] {
        self.node(table).map_or(&[], NodeRef::value)
    }

    /// The current value's location, for keeping; see [`Memtable::value`].
    #[inline]
    pub fn value_ref(&self, table: &Memtable) -> Option<ValueRef> {
        Some(self.entry(table)?.value_ref())
    }
}
