//! The positions of `SCAN`s: a bounded table from cursors to keys.
//!
//! A cursor is a number of 64 bits; a position among ordered keys is a key. So every core keeps a
//! table of positions, and a cursor names an entry of it:
//!
//! ```text
//!   bits  63 62 ............ 28 27 ...... 10 9 ..... 0
//!         0  generation (35)    slot (18)    core (10)
//! ```
//!
//! The generation is never 0 and never reused, so a cursor is never 0, and a cursor whose entry has
//! been taken for another scan is recognised. A cursor works on every connection: a connection that
//! gets a cursor of another core asks that core.
//!
//! An entry is kept after it has been used, so that a client may repeat a call whose reply was
//! lost, but used entries are evicted first. So a table of N entries serves N scans at a time,
//! however long or fast each of them is; when all are unused, the oldest entry is evicted. Keys may
//! be long: the table is bounded in bytes too.

use std::collections::VecDeque;

/// Entries of one core's table.
pub const SCAN_ENTRIES_MAX: usize = 4096;

/// Bytes of keys in one core's table.
pub const SCAN_BYTES_MAX: usize = 4 * 1024 * 1024;

const CORE_BITS: u32 = 10;
const SLOT_BITS: u32 = 18;

const _: () = assert!(SCAN_ENTRIES_MAX <= 1 << SLOT_BITS);

#[derive(Debug, Default)]
struct Entry {
    /// 0 when free.
    generation: u64,
    used: bool,
    key: Vec<u8>,
}

/// One core's positions.
#[derive(Debug)]
pub struct ScanTable {
    core: u64,
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Slots and generations in the order of their creation: those not used yet, and those used.
    /// Either may name an entry that has been evicted or used meanwhile; it is then skipped.
    live: VecDeque<(u32, u64)>,
    used: VecDeque<(u32, u64)>,
    generation: u64,
    bytes: usize,
    entries_max: usize,
    bytes_max: usize,
}

/// The core whose table a cursor names.
pub fn core_of(cursor: u64) -> usize {
    (cursor & ((1 << CORE_BITS) - 1)) as usize
}

impl ScanTable {
    /// An empty table of core `core`, which is below 1024.
    pub fn new(core: usize) -> Self {
        Self::with_limits(core, SCAN_ENTRIES_MAX, SCAN_BYTES_MAX)
    }

    fn with_limits(core: usize, entries_max: usize, bytes_max: usize) -> Self {
        Self {
            core: core as u64 & ((1 << CORE_BITS) - 1),
            entries: Vec::new(),
            free: Vec::new(),
            live: VecDeque::new(),
            used: VecDeque::new(),
            generation: 0,
            bytes: 0,
            entries_max,
            bytes_max,
        }
    }

    /// Entries that hold a position.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Whether no entry holds a position.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Stores the last key returned and returns the cursor of the position after it.
    pub fn put(&mut self, key: &[u8]) -> u64 {
        while !self.is_empty()
            && (self.len() == self.entries_max || self.bytes + key.len() > self.bytes_max)
        {
            self.drop_one();
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry::default());
            (self.entries.len() - 1) as u32
        });
        self.generation += 1;
        let entry = &mut self.entries[slot as usize];
        entry.generation = self.generation;
        entry.used = false;
        entry.key = key.to_vec();
        self.bytes += key.len();
        self.live.push_back((slot, self.generation));
        self.trim();
        (self.generation << (CORE_BITS + SLOT_BITS)) | (u64::from(slot) << CORE_BITS) | self.core
    }

    /// The key after which `cursor` continues; `None` when its entry has been evicted or never
    /// existed.
    pub fn get(&mut self, cursor: u64) -> Option<&[u8]> {
        let slot = (cursor >> CORE_BITS) & ((1 << SLOT_BITS) - 1);
        let generation = cursor >> (CORE_BITS + SLOT_BITS);
        let entry = self.entries.get_mut(slot as usize)?;
        if generation == 0
            || entry.generation != generation
            || cursor & ((1 << CORE_BITS) - 1) != self.core
        {
            return None;
        }
        if !entry.used {
            entry.used = true;
            self.used.push_back((slot as u32, generation));
        }
        Some(&self.entries[slot as usize].key)
    }

    /// Evicts the oldest used entry, or else the oldest entry.
    fn drop_one(&mut self) {
        while let Some((slot, generation)) = self.used.pop_front().or_else(|| self.live.pop_front())
        {
            let entry = &mut self.entries[slot as usize];
            if entry.generation == generation {
                self.bytes -= entry.key.len();
                *entry = Entry::default();
                self.free.push(slot);
                return;
            }
        }
    }

    /// Removes used and evicted entries from `live` once they are the greater part: each is removed
    /// once.
    fn trim(&mut self) {
        if self.live.len() > 2 * self.entries_max {
            let entries = &self.entries;
            self.live.retain(|&(slot, generation)| {
                let entry = &entries[slot as usize];
                entry.generation == generation && !entry.used
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_can_be_used_more_than_once() {
        let mut table = ScanTable::new(3);
        let cursor = table.put(b"key");
        assert_ne!(cursor, 0);
        assert!(cursor < 1 << 63);
        assert_eq!(core_of(cursor), 3);
        assert_eq!(table.get(cursor), Some(&b"key"[..]));
        assert_eq!(table.get(cursor), Some(&b"key"[..]));
    }

    #[test]
    fn unknown_cursors_are_recognised() {
        let mut table = ScanTable::new(0);
        let cursor = table.put(b"key");
        for wrong in [0, 1, cursor + 1, cursor + (1 << CORE_BITS), cursor + (1 << 40), u64::MAX] {
            assert_eq!(table.get(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_fast_scan_does_not_push_out_a_slow_one() {
        let mut table = ScanTable::with_limits(0, 8, 1000);
        let slow = table.put(b"slow");
        let mut fast = table.put(b"fast");
        for _ in 0..1000 {
            assert!(table.get(fast).is_some());
            fast = table.put(b"fast");
        }
        assert_eq!(table.get(slow), Some(&b"slow"[..]));
        assert!(
            table.live.len() <= 17 && table.used.len() <= 8,
            "{} {}",
            table.live.len(),
            table.used.len()
        );
    }

    #[test]
    fn the_oldest_of_too_many_scans_loses_its_place() {
        let mut table = ScanTable::with_limits(0, 4, 1000);
        let cursors: Vec<u64> = (0..5u8).map(|n| table.put(&[n])).collect();
        assert_eq!(table.len(), 4);
        assert_eq!(table.get(cursors[0]), None);
        for (n, cursor) in cursors.iter().enumerate().skip(1) {
            assert_eq!(table.get(*cursor), Some(&[n as u8][..]));
        }
    }

    #[test]
    fn long_keys_displace_several_others() {
        let mut table = ScanTable::with_limits(0, 100, 1000);
        for _ in 0..50 {
            table.put(&[b'x'; 300]);
            assert!(table.len() <= 3 && table.bytes <= 1000);
        }
        let cursor = table.put(&[b'x'; 5000]);
        assert_eq!(table.len(), 1, "a key beyond the limit is kept alone");
        assert!(table.get(cursor).is_some());
    }
}
