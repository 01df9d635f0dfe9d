//! A position in a memtable that goes both ways while entries are inserted.
//!
//! A node is never unlinked or moved, so an address is a position, and it stays right whatever is
//! inserted. What a cursor meets is not a snapshot: an entry that is inserted ahead of it is met,
//! one that is inserted behind it is not. Whoever wants a snapshot passes over the entries with a
//! later sequence.

use crate::list::Target;
use crate::memtable::{Entry, Memtable, ValueRef};
use crate::node::{NodePtr, NodeRef};

/// A position in a memtable: on an entry, or nowhere. It borrows nothing; every call takes the
/// memtable it is for.
///
/// # Panics
///
/// A cursor that stands on an entry panics when it is used with another memtable than the one it
/// was placed in. The calls that place it anew may be given any.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    node: Option<NodePtr>,
    table: u64,
}

impl Cursor {
    /// A cursor that stands nowhere.
    pub fn new() -> Cursor {
        Cursor::default()
    }

    /// Whether it stands on an entry.
    #[inline]
    pub fn valid(&self) -> bool {
        self.node.is_some()
    }

    #[inline(always)]
    fn stand(&mut self, table: &Memtable, node: Option<NodeRef<'_>>) -> bool {
        *self = Cursor { node: node.map(NodeRef::ptr), table: table.list.id };
        self.valid()
    }

    /// As [`stand`](Self::stand), but the head is nowhere.
    #[inline(always)]
    fn stand_behind_head(&mut self, table: &Memtable, node: NodeRef<'_>) -> bool {
        self.stand(table, (node != table.list.head()).then_some(node))
    }

    #[inline(always)]
    fn node<'a>(&self, table: &'a Memtable) -> Option<NodeRef<'a>> {
        Some(table.node(self.node?, self.table))
    }

    /// Goes to the first entry; false, and nowhere, if there is none.
    pub fn first(&mut self, table: &Memtable) -> bool {
        self.stand(table, table.list.head().following())
    }

    /// Goes to the last entry; false, and nowhere, if there is none.
    pub fn last(&mut self, table: &Memtable) -> bool {
        let (last, _) = table.list.search(|_| true);
        self.stand_behind_head(table, last)
    }

    /// Goes to the first entry at or behind that key and packed number; false, and nowhere, if
    /// there is none.
    #[inline]
    pub fn seek(&mut self, table: &Memtable, user_key: &[u8], packed: u64) -> bool {
        let target = Target::new(table.comparator(), user_key, packed);
        let (_, found) = table.list.search(|node| target.order_of(node).is_lt());
        self.stand(table, found)
    }

    /// Goes to the last entry at or before that key and packed number; false, and nowhere, if there
    /// is none.
    pub fn seek_for_prev(&mut self, table: &Memtable, user_key: &[u8], packed: u64) -> bool {
        let target = Target::new(table.comparator(), user_key, packed);
        let (found, _) = table.list.search(|node| target.order_of(node).is_le());
        self.stand_behind_head(table, found)
    }

    /// Goes one entry on; false, and nowhere, at the end or if it stood nowhere.
    #[inline]
    pub fn next(&mut self, table: &Memtable) -> bool {
        let next = self.node(table).and_then(NodeRef::following);
        self.stand(table, next)
    }

    /// Goes one entry back; false, and nowhere, at the beginning or if it stood nowhere. This is a
    /// search: there are no links back.
    pub fn prev(&mut self, table: &Memtable) -> bool {
        let Some(node) = self.node(table) else { return false };
        let target = Target::new(table.comparator(), node.user_key(), node.packed());
        let (mut before, mut next) = table.list.search(|node| target.order_of(node).is_lt());
        // Between the two there was nothing, so this ends at once, unless the same key and number
        // were inserted twice and this is not the first of them.
        while let Some(other) = next.filter(|next| *next != node) {
            (before, next) = (other, other.following());
        }
        self.stand_behind_head(table, before)
    }

    /// The entry stood on.
    #[inline]
    pub fn entry<'a>(&self, table: &'a Memtable) -> Option<Entry<'a>> {
        Some(Entry::new(self.node(table)?, self.table))
    }

    /// The user key stood on; empty when nowhere.
    #[inline]
    pub fn user_key<'a>(&self, table: &'a Memtable) -> &'a [u8] {
        self.node(table).map_or(&[], NodeRef::user_key)
    }

    /// User key and packed number, as tables have them; empty when nowhere.
    #[inline]
    pub fn internal_key<'a>(&self, table: &'a Memtable) -> &'a [u8] {
        self.node(table).map_or(&[], NodeRef::internal_key)
    }

    /// Sequence and type, packed; 0 when nowhere.
    #[inline]
    pub fn packed(&self, table: &Memtable) -> u64 {
        self.node(table).map_or(0, NodeRef::packed)
    }

    /// The value stood on; empty when nowhere.
    #[inline]
    pub fn value<'a>(&self, table: &'a Memtable) -> &'a [u8] {
        self.node(table).map_or(&[], NodeRef::value)
    }

    /// Where the value stood on is, for keeping; see [`Memtable::value`].
    #[inline]
    pub fn value_ref(&self, table: &Memtable) -> Option<ValueRef> {
        Some(self.entry(table)?.value_ref())
    }
}
