//! The position of block and index cursors.
//!
//! A forward step parses the next entry and patches the key. A backward step needs the start of an
//! earlier entry, which a block does not store: the first step back walks the restart interval once
//! and records its entries in the *trail*; further steps pop from it and build the key from the
//! suffixes, starting with the bytes shared with the current key. The trail of an interval of n
//! entries takes O(n) memory, independent of the keys.
//!
//! State, set only here: `valid` says that `key`, `at`, `next` and `value` describe an entry;
//! `trail_at` is that entry's index in `trail`, or `NO_TRAIL`; `boundary` is the restart offset
//! that ends the interval of `at`, so `next == boundary` means that a restart point comes next.

use crate::block::layout::{Entries, bad_entry};
use crate::block::search;
use crate::error::Result;
use crate::key::Comparator;

const NO_TRAIL: usize = usize::MAX;

/// A position in a block whose entries `F` decodes.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<F: Entries> {
    key: Vec<u8>,
    valid: bool,
    at: usize,
    next: usize,
    value: F::Value,
    /// The restart interval of `at`.
    restart: u32,
    boundary: usize,
    trail: Vec<Step<F::Value>>,
    trail_at: usize,
}

/// An entry of the trail.
#[derive(Clone, Copy, Debug)]
struct Step<V> {
    at: u32,
    next: u32,
    suffix: u32,
    shared: u32,
    key_len: u32,
    value: V,
}

impl<F: Entries> Default for Cursor<F> {
    fn default() -> Self {
        Cursor {
            key: Vec::new(),
            valid: false,
            at: 0,
            next: 0,
            value: F::Value::default(),
            restart: 0,
            boundary: 0,
            trail: Vec::new(),
            trail_at: NO_TRAIL,
        }
    }
}

impl<F: Entries> Cursor<F> {
    #[inline]
    pub fn valid(&self) -> bool {
        self.valid
    }

    #[inline]
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    #[inline]
    pub fn value(&self) -> F::Value {
        self.value
    }

    /// The capacities of the buffers.
    #[cfg(test)]
    pub fn capacities(&self) -> (usize, usize) {
        (self.key.capacity(), self.trail.capacity())
    }

    pub fn reset(&mut self) {
        self.key.clear();
        self.valid = false;
        self.value = F::Value::default();
        self.trail_at = NO_TRAIL;
    }

    /// Puts the cursor on a key without a value that is in no block.
    pub fn place(&mut self, key: &[u8]) {
        self.reset();
        self.key.extend_from_slice(key);
        self.valid = true;
    }

    pub fn seek_to_first(&mut self, data: &[u8], format: F) -> Result<bool> {
        let Some(entries) = format.layout().entries(data) else { return self.fail() };
        if entries.is_empty() {
            self.reset();
            return Ok(false);
        }
        self.enter(0, 0);
        self.step(data, entries, format)
    }

    pub fn seek_to_last(&mut self, data: &[u8], format: F) -> Result<bool> {
        let Some(entries) = format.layout().entries(data) else { return self.fail() };
        if entries.is_empty() {
            self.reset();
            return Ok(false);
        }
        self.last_before(data, entries, format, entries.len())
    }

    pub fn seek(
        &mut self,
        data: &[u8],
        format: F,
        comparator: Comparator,
        target: &[u8],
    ) -> Result<bool> {
        let layout = format.layout();
        let Some(entries) = layout.entries(data) else { return self.fail() };
        match search::first_not_less(data, format, comparator, target, &mut self.key) {
            None => self.fail(),
            Some(search::Hit::PastEnd) => {
                self.reset();
                Ok(false)
            }
            Some(search::Hit::Entry(found)) => {
                let entry = found.entry;
                if !found.key_in_scratch {
                    self.key.clear();
                    self.key.extend_from_slice(&target[..entry.shared]);
                    self.key.extend_from_slice(&entries[entry.suffix..entry.suffix_end]);
                }
                self.at = found.at;
                self.next = entry.next;
                self.value = entry.value;
                self.restart = found.restart;
                self.boundary = layout.restart(data, found.restart + 1).unwrap_or(usize::MAX);
                self.trail_at = NO_TRAIL;
                self.valid = true;
                Ok(true)
            }
        }
    }

    pub fn seek_for_prev(
        &mut self,
        data: &[u8],
        format: F,
        comparator: Comparator,
        target: &[u8],
    ) -> Result<bool> {
        if !self.seek(data, format, comparator, target)? {
            return self.seek_to_last(data, format);
        }
        if search::compare(format, comparator, &self.key, target).is_gt() {
            return self.prev(data, format);
        }
        Ok(true)
    }

    #[inline]
    pub fn next(&mut self, data: &[u8], format: F) -> Result<bool> {
        let Some(entries) = format.layout().entries(data) else { return self.fail() };
        if !self.valid || self.next >= entries.len() {
            self.reset();
            return Ok(false);
        }
        self.step(data, entries, format)
    }

    pub fn prev(&mut self, data: &[u8], format: F) -> Result<bool> {
        let Some(entries) = format.layout().entries(data) else { return self.fail() };
        if !self.valid || self.at == 0 {
            self.reset();
            return Ok(false);
        }
        match self.trail_at {
            NO_TRAIL | 0 => self.last_before(data, entries, format, self.at),
            current => {
                let keep = self.trail[current].shared as usize;
                self.land(entries, current - 1, keep)
            }
        }
    }

    /// Prepares to step onto restart point `index` at `offset`.
    #[inline]
    fn enter(&mut self, index: u32, offset: usize) {
        self.restart = index;
        self.next = offset;
        self.boundary = offset;
        self.key.clear();
        self.trail_at = NO_TRAIL;
    }

    /// Parses the entry at `next`, which is inside the block, and moves to it.
    #[inline(always)]
    fn step(&mut self, data: &[u8], entries: &[u8], format: F) -> Result<bool> {
        let at = self.next;
        let restart = at == self.boundary;
        let entry = match format.entry(entries, at, restart, &self.value) {
            Some(entry) if entry.shared <= self.key.len() => entry,
            _ => return self.fail(),
        };
        if restart {
            if entry.shared != 0 {
                return self.fail();
            }
            self.cross_boundary(data, format);
        }
        self.key.truncate(entry.shared);
        self.key.extend_from_slice(&entries[entry.suffix..entry.suffix_end]);
        self.value = entry.value;
        self.at = at;
        self.next = entry.next;
        self.valid = true;
        if self.trail_at != NO_TRAIL {
            self.trail_at += 1;
            if restart || self.trail_at >= self.trail.len() {
                self.trail_at = NO_TRAIL;
            }
        }
        Ok(true)
    }

    /// Updates the interval when the cursor steps onto a restart point.
    #[inline]
    fn cross_boundary(&mut self, data: &[u8], format: F) {
        let layout = format.layout();
        if layout.restart(data, self.restart) != Some(self.boundary) {
            self.restart += 1;
        }
        self.boundary = layout.restart(data, self.restart + 1).unwrap_or(usize::MAX);
    }

    /// Moves to the last entry that starts before `limit`, which must be the start of an entry or
    /// the end.
    fn last_before(
        &mut self,
        data: &[u8],
        entries: &[u8],
        format: F,
        limit: usize,
    ) -> Result<bool> {
        let layout = format.layout();
        let index = layout.restart_before(data, limit);
        let Some(start) = layout.restart(data, index).filter(|&s| s < limit) else {
            return self.fail();
        };
        self.trail.clear();
        let (mut at, mut key_len, mut value) = (start, 0, F::Value::default());
        while at < limit {
            let entry = match format.entry(entries, at, at == start, &value) {
                Some(entry) if entry.shared <= key_len => entry,
                _ => return self.fail(),
            };
            key_len = entry.shared + entry.suffix_end - entry.suffix;
            self.trail.push(Step {
                at: at as u32,
                next: entry.next as u32,
                suffix: entry.suffix as u32,
                shared: entry.shared as u32,
                key_len: key_len as u32,
                value: entry.value,
            });
            value = entry.value;
            at = entry.next;
        }
        if at != limit {
            return self.fail();
        }
        self.restart = index;
        self.boundary = layout.restart(data, index + 1).unwrap_or(usize::MAX);
        let last = self.trail.len() - 1;
        self.land(entries, last, 0)
    }

    /// Moves to entry `index` of the trail. The first `keep` bytes of the current key belong to its
    /// key.
    fn land(&mut self, entries: &[u8], index: usize, keep: usize) -> Result<bool> {
        let here = self.trail[index];
        let keep = keep.min(self.key.len());
        self.key.resize(here.key_len as usize, 0);
        // The bytes from `keep` on come from this entry's suffix and, further left, from earlier
        // suffixes.
        let mut missing = here.key_len as usize;
        for step in self.trail[..=index].iter().rev() {
            if missing <= keep {
                break;
            }
            let shared = step.shared as usize;
            if shared < missing {
                let from = shared.max(keep);
                let suffix = step.suffix as usize;
                let Some(bytes) = entries.get(suffix + from - shared..suffix + missing - shared)
                else {
                    return self.fail();
                };
                self.key[from..missing].copy_from_slice(bytes);
                missing = from;
            }
        }
        self.at = here.at as usize;
        self.next = here.next as usize;
        self.value = here.value;
        self.valid = true;
        self.trail_at = index;
        Ok(true)
    }

    #[cold]
    fn fail(&mut self) -> Result<bool> {
        self.reset();
        Err(bad_entry())
    }
}
