//! The filter of a file that is being built: one block for all keys, or partitions.
//!
//! A partition covers whole data blocks, so that the separator of its last block is its key in the
//! upper level. If the versions of a user key lie in two partitions, both have its hash.

use std::collections::VecDeque;

use crate::sst::filter::BloomBits;
use crate::sst::xxph3::xxph3;

/// Partitions that are made when a data block ends, so that the work comes in small pieces.
const PARTITIONS_AT_ONCE: usize = 4;
/// Hashes that [`FilterWriter::step`] puts into an undivided filter.
const HASHES_AT_ONCE: usize = 4096;

/// Collects the hashes of keys and makes filters of them.
#[derive(Clone, Debug)]
pub(crate) struct FilterWriter {
    millibits_per_key: u64,
    /// The hashes of the keys; those in partitions are removed sooner or later.
    hashes: Vec<u64>,
    /// The first of these that is in no partition.
    cut: usize,
    /// Of these, the number before the end of each data block that is in no partition yet.
    block_ends: VecDeque<usize>,
    /// The first of `block_ends` at which no partition was tried to be cut.
    untried: usize,
    /// Data blocks that are in partitions.
    blocks_cut: usize,
    /// Keys of a partition; `None` for an undivided filter.
    keys_per_partition: Option<usize>,
    /// Partitions that the caller has not taken, each with the number of its last data block.
    partitions: Vec<(usize, Vec<u8>)>,
    /// The undivided filter in the making, and the number of hashes that are in it.
    whole: Option<(BloomBits, usize)>,
    /// Keys in all partitions.
    keys: u64,
}

impl FilterWriter {
    pub fn new(millibits_per_key: u64) -> FilterWriter {
        FilterWriter {
            millibits_per_key,
            hashes: Vec::new(),
            cut: 0,
            block_ends: VecDeque::new(),
            untried: 0,
            blocks_cut: 0,
            keys_per_partition: None,
            partitions: Vec::new(),
            whole: None,
            keys: 0,
        }
    }

    /// Makes partitions of about `bytes` from now on, also of the keys so far.
    pub fn partition(&mut self, bytes: usize) {
        if self.keys_per_partition.is_none() && self.millibits_per_key > 0 {
            let keys = bytes as u64 * 8000 / self.millibits_per_key;
            self.keys_per_partition = Some(keys.max(1) as usize);
        }
    }

    pub fn is_partitioned(&self) -> bool {
        self.keys_per_partition.is_some()
    }

    /// Keys in the filter.
    pub fn keys(&self) -> u64 {
        self.keys + (self.hashes.len() - self.cut) as u64
    }

    /// Bytes of an undivided filter, about.
    pub fn bytes(&self) -> usize {
        (self.hashes.len() as u64 * self.millibits_per_key / 8000) as usize
    }

    /// Adds a user key. Equal keys come one after another and count once in a data block.
    #[inline]
    pub fn add(&mut self, user_key: &[u8]) {
        if self.millibits_per_key == 0 {
            return;
        }
        let hash = xxph3(user_key);
        let is_first_of_block = self.block_ends.back().is_none_or(|&end| end == self.hashes.len());
        if is_first_of_block || self.hashes.last() != Some(&hash) {
            self.hashes.push(hash);
        }
    }

    /// Ends a data block.
    pub fn end_block(&mut self) {
        if self.millibits_per_key == 0 {
            return;
        }
        self.block_ends.push_back(self.hashes.len());
        for _ in 0..PARTITIONS_AT_ONCE {
            if !self.cut(false) {
                return;
            }
        }
    }

    /// Makes the next partition, if there are keys for one; with `last` of any number of keys.
    fn cut(&mut self, last: bool) -> bool {
        let Some(keys) = self.keys_per_partition else { return false };
        while let Some(&end) = self.block_ends.get(self.untried) {
            self.untried += 1;
            if end - self.cut >= keys || (last && self.untried == self.block_ends.len()) {
                self.cut_at(end);
                return true;
            }
        }
        false
    }

    /// Makes a partition of the hashes before `end`, which are all of the blocks tried so far.
    fn cut_at(&mut self, end: usize) {
        let hashes = &self.hashes[self.cut..end];
        let mut bits = BloomBits::new(hashes.len() as u64, self.millibits_per_key);
        hashes.iter().for_each(|&hash| bits.add(hash));
        self.keys += hashes.len() as u64;
        self.cut = end;
        self.block_ends.drain(..self.untried);
        self.blocks_cut += self.untried;
        self.untried = 0;
        self.partitions.push((self.blocks_cut - 1, bits.finish()));
        if self.cut > self.hashes.len() / 2 {
            self.hashes.drain(..self.cut);
            self.block_ends.iter_mut().for_each(|later| *later -= self.cut);
            self.cut = 0;
        }
    }

    /// After the last block: does a piece of the work that is left. Returns whether there is more.
    pub fn step(&mut self) -> bool {
        if self.is_partitioned() {
            return self.cut(false) || self.cut_rest();
        }
        if self.hashes.is_empty() {
            return false;
        }
        let (bits, done) = match &mut self.whole {
            Some(whole) => whole,
            none => {
                // A key counted again for each block that its versions are in.
                self.hashes.dedup();
                let keys = self.hashes.len() as u64;
                none.insert((BloomBits::new(keys, self.millibits_per_key), 0))
            }
        };
        let until = self.hashes.len().min(*done + HASHES_AT_ONCE);
        self.hashes[*done..until].iter().for_each(|&hash| bits.add(hash));
        *done = until;
        until < self.hashes.len()
    }

    /// Makes the last partition of what is left.
    fn cut_rest(&mut self) -> bool {
        self.untried = self.block_ends.len().saturating_sub(1);
        self.cut(true)
    }

    /// The partitions so far that were not taken.
    pub fn take_partitions(&mut self) -> Vec<(usize, Vec<u8>)> {
        std::mem::take(&mut self.partitions)
    }

    /// The undivided filter, after all its steps.
    pub fn take_whole(&mut self) -> Option<Vec<u8>> {
        self.whole.take().map(|(bits, _)| bits.finish())
    }
}
