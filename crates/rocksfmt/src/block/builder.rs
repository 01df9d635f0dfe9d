//! Builds blocks that RocksDB 7.8 and newer read: prefix-compressed entries and restart points.

use crate::coding::{put_svarint, put_varint};
use crate::key::compare_with_prefix;
use crate::sst::footer::BlockHandle;

/// Memory in bytes that a builder keeps from one block to the next.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// Builds one block after another. The caller adds keys in ascending order.
#[derive(Clone, Debug)]
pub(crate) struct BlockBuilder {
    /// Entries per restart point.
    interval: u32,
    bytes: Vec<u8>,
    restarts: Vec<u32>,
    since_restart: u32,
    last_key: Vec<u8>,
}

impl BlockBuilder {
    pub fn new(interval: u32) -> BlockBuilder {
        BlockBuilder {
            interval: interval.max(1),
            bytes: Vec::new(),
            restarts: vec![0],
            since_restart: 0,
            last_key: Vec::new(),
        }
    }

    pub fn add(&mut self, key: &[u8], value: &[u8]) {
        let shared = self.shared(key);
        put_varint(&mut self.bytes, shared as u64);
        put_varint(&mut self.bytes, (key.len() - shared) as u64);
        put_varint(&mut self.bytes, value.len() as u64);
        self.bytes.extend_from_slice(&key[shared..]);
        self.bytes.extend_from_slice(value);
    }

    /// Adds an entry of an index with delta-encoded values: the handle is a difference to
    /// `previous`, the block directly before it in the file, if the keys share bytes.
    pub fn add_index(&mut self, key: &[u8], handle: BlockHandle, previous: BlockHandle) {
        let shared = self.shared(key);
        put_varint(&mut self.bytes, shared as u64);
        put_varint(&mut self.bytes, (key.len() - shared) as u64);
        self.bytes.extend_from_slice(&key[shared..]);
        if shared == 0 {
            handle.put(&mut self.bytes);
        } else {
            put_svarint(&mut self.bytes, handle.size.wrapping_sub(previous.size) as i64);
        }
    }

    /// Begins an entry; returns the number of bytes that its key shares with the previous one.
    fn shared(&mut self, key: &[u8]) -> usize {
        let mut shared = 0;
        if self.since_restart == self.interval {
            self.restarts.push(self.bytes.len() as u32);
            self.since_restart = 0;
        } else if !self.bytes.is_empty() {
            (_, shared) = compare_with_prefix(&self.last_key, key);
        }
        self.last_key.truncate(shared);
        self.last_key.extend_from_slice(&key[shared..]);
        self.since_restart += 1;
        shared
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Bytes of the finished block.
    pub fn len(&self) -> usize {
        self.bytes.len() + 4 * self.restarts.len() + 4
    }

    /// Bytes of the finished block if an entry is added, about: RocksDB's estimate, which ignores
    /// that keys share bytes.
    pub fn len_with(&self, key: &[u8], value: &[u8]) -> usize {
        let restart = if self.since_restart >= self.interval { 4 } else { 0 };
        let lengths = 4 + varint_len(key.len()) + varint_len(value.len());
        self.len() + key.len() + value.len() + restart + lengths
    }

    /// The finished block. [`BlockBuilder::clear`] starts the next one.
    pub fn finish(&mut self) -> &[u8] {
        // A block of a large value would take twice its memory for these.
        self.bytes.reserve_exact(4 * self.restarts.len() + 4);
        for restart in &self.restarts {
            self.bytes.extend_from_slice(&restart.to_le_bytes());
        }
        self.bytes.extend_from_slice(&(self.restarts.len() as u32).to_le_bytes());
        &self.bytes
    }

    pub fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_BYTES_MAX);
        self.restarts.truncate(1);
        self.since_restart = 0;
        self.last_key.clear();
    }
}

/// Bytes of a varint.
fn varint_len(value: usize) -> usize {
    (value.max(1).ilog2() / 7 + 1) as usize
}
