//! The account of what tables keep in memory: indexes, filters, dictionaries, shared by all cores.
//!
//! An index or a filter is kept while the account has room for it. Where it has none, the table
//! keeps the place of the block, and lookups read it through their core's cache like a data block.
//! So the memory of tables stays in its bounds however many there are; what a table needs without
//! a choice (the top level of a partitioned index or filter, a dictionary) is counted too, and may
//! go beyond them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// See the module text. Any core may take and give back.
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

    /// Bytes that may be taken.
    pub fn room(&self) -> usize {
        self.budget.saturating_sub(self.used())
    }
}

/// What one table has taken; goes back with the table.
#[derive(Debug)]
pub(crate) struct Charge {
    account: Arc<TableMemory>,
    bytes: usize,
}

impl Charge {
    pub fn new(account: &Arc<TableMemory>) -> Charge {
        Charge { account: account.clone(), bytes: 0 }
    }

    /// Whether there seems to be room for so many bytes.
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

    /// Takes bytes that are needed in any case.
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
    fn no_more_is_taken_than_there_is_and_all_comes_back() {
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
