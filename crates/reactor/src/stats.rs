//! Counters of one core. Written by that core only, without atomics; other cores ask by message.

use std::cell::Cell;

/// One counter.
#[derive(Debug, Default)]
pub struct Counter(Cell<u64>);

impl Counter {
    /// Adds `n`.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.set(self.0.get().wrapping_add(n));
    }

    /// The sum so far.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.get()
    }
}

macro_rules! counters {
    ($(#[doc = $doc:literal] $name:ident),* $(,)?) => {
        /// Counters of one core since it started.
        #[derive(Debug, Default)]
        pub struct CoreStats { $(#[doc = $doc] pub $name: Counter),* }

        impl CoreStats {
            /// The help text of each counter, in the order of [`CoreStats::list`].
            pub const HELP: &[(&'static str, &'static str)] = &[$((stringify!($name), $doc)),*];


            /// All counters by name, in a fixed order.
            pub fn list(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.get())),*]
            }
        }
    };
}

counters! {
    /// Turns of the loop.
    turns,
    /// Tasks polled.
    polls,
    /// Operations started.
    operations,
    /// Completions reaped.
    completions,
    /// Calls into the driver.
    enters,
    /// Calls among them that could wait.
    sleeps,
    /// Messages from other cores.
    messages,
    /// Reads sent to files.
    disk_reads,
    /// Bytes they asked for.
    disk_bytes,
    /// Writes sent to files.
    disk_writes,
    /// Bytes they brought.
    disk_write_bytes,
    /// Syncs of files.
    disk_syncs,
    /// Accesses of mapped files that were copies, without a system call.
    mapped_copies,
    /// Accesses of mapped files that were left to the file, because a copy might have waited.
    mapped_misses,
    /// Times a task waited for the memory budget.
    memory_waits,
}
