//! The account of the memory of tables: indexes, filters and dictionaries, shared by all cores.
//!
//! An index or a filter stays in memory while the account has room for it. Otherwise the table
//! keeps the handle of the block, and lookups read it through their core's cache like a data block.
//! So the memory of tables stays within its limit however many tables there are. Parts that a table
//! cannot do without (the top level of a partitioned index or filter, a dictionary) are counted
//! too, and may exceed the limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The account. Any core may take from it and return to it.
#[derive(Debug)]
pub(crate) struct TableMemory {
    budget: usize,
    used: AtomicUsize,
}

impl TableMemory {
    pub fn new(budget: usize) -> Arc<TableMemory> {
        Arc::new(TableMemory { budget, used: AtomicUsize::new(0) })
    }

    /// Bytes taken.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub fn budget(&self) -> usize {
        self.budget
    }

    /// Bytes that are left.
    pub fn room(&self) -> usize {
        self.budget.saturating_sub(self.used())
    }
}

/// The bytes that one table has taken. They are returned when it is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    account: Arc<TableMemory>,
    bytes: usize,
}

impl Charge {
    pub fn new(account: &Arc<TableMemory>) -> Charge {
        Charge { account: account.clone(), bytes: 0 }
    }

    /// Whether the account seems to have `bytes` left.
    pub fn may_take(&self, bytes: usize) -> bool {
        bytes <= self.account.room()
    }

    /// Takes bytes if there is room.
    pub fn take(&mut self, bytes: usize) -> bool {
        let used = self.account.used.fetch_add(bytes, Ordering::Relaxed);
        if used.saturating_add(bytes) > self.account.budget {
            self.account.used.fetch_sub(bytes, Ordering::Relaxed);
            return false;
        }
        self.bytes += bytes;
        true
    }

    /// Takes bytes even if they exceed the limit.
    pub fn take_anyway(&mut self, bytes: usize) {
        self.account.used.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_taken_than_is_left_and_all_is_returned() {
        let account = TableMemory::new(100);
        let mut one = Charge::new(&account);
        let mut two = Charge::new(&account);
        assert!(one.take(60) && !two.take(60) && two.take(40));
        assert!(!two.may_take(1) && account.used() == 100);
        two.take_anyway(7);
        drop(one);
        assert_eq!((account.used(), account.room()), (47, 53));
        drop(two);
        assert_eq!(account.used(), 0);
    }
}
