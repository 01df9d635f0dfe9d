//! Builds blocks that RocksDB 7.8 and newer read: prefix-compressed entries and restart points.

use crate::coding::put_varint;

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
        let mut shared = 0;
        if self.since_restart == self.interval {
            self.restarts.push(self.bytes.len() as u32);
            self.since_restart = 0;
        } else if !self.bytes.is_empty() {
            shared = self.last_key.iter().zip(key).take_while(|(a, b)| a == b).count();
        }
        put_varint(&mut self.bytes, shared as u64);
        put_varint(&mut self.bytes, (key.len() - shared) as u64);
        put_varint(&mut self.bytes, value.len() as u64);
        self.bytes.extend_from_slice(&key[shared..]);
        self.bytes.extend_from_slice(value);
        self.last_key.truncate(shared);
        self.last_key.extend_from_slice(&key[shared..]);
        self.since_restart += 1;
    }

    /// The key added last; empty in an empty block.
    pub fn last_key(&self) -> &[u8] {
        &self.last_key
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Bytes of the finished block.
    pub fn len(&self) -> usize {
        self.bytes.len() + 4 * self.restarts.len() + 4
    }

    /// The finished block. [`BlockBuilder::clear`] starts the next one.
    pub fn finish(&mut self) -> &[u8] {
        for restart in &self.restarts {
            self.bytes.extend_from_slice(&restart.to_le_bytes());
        }
        self.bytes.extend_from_slice(&(self.restarts.len() as u32).to_le_bytes());
        &self.bytes
    }

    pub fn clear(&mut self) {
        self.bytes.clear();
        self.restarts.truncate(1);
        self.since_restart = 0;
        self.last_key.clear();
    }
}
