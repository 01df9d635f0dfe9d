//! Builds blocks for tests: every entry form and footer flag, directly from the format's
//! description.

use crate::coding::{put_lps, put_svarint, put_varint};
use crate::sst::footer::BlockHandle;
use crate::sst::index::IndexFormat;

/// Form of the entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Plain,
    /// Values in a separate section.
    Separated,
    Index(IndexFormat),
}

pub struct BlockBuilder {
    form: Form,
    interval: usize,
    out: Vec<u8>,
    values: Vec<u8>,
    restarts: Vec<u32>,
    count: usize,
    last_key: Vec<u8>,
    last_handle: BlockHandle,
    hash_buckets: Option<u16>,
}

impl BlockBuilder {
    pub fn new(form: Form, interval: usize) -> BlockBuilder {
        BlockBuilder {
            form,
            interval,
            out: Vec::new(),
            values: Vec::new(),
            restarts: vec![0],
            count: 0,
            last_key: Vec::new(),
            last_handle: BlockHandle::default(),
            hash_buckets: None,
        }
    }

    /// Adds a hash index with this number of (meaningless) buckets.
    pub fn hash_buckets(mut self, buckets: u16) -> BlockBuilder {
        self.hash_buckets = Some(buckets);
        self
    }

    /// Starts an entry: writes `shared` and `non_shared`; returns `shared` and whether this is a
    /// restart point.
    fn prefix(&mut self, key: &[u8]) -> (usize, bool) {
        let restart = self.count.is_multiple_of(self.interval);
        if restart && self.count > 0 {
            self.restarts.push(self.out.len() as u32);
        }
        let shared = match restart {
            true => 0,
            false => self.last_key.iter().zip(key).take_while(|(a, b)| a == b).count(),
        };
        put_varint(&mut self.out, shared as u64);
        put_varint(&mut self.out, (key.len() - shared) as u64);
        self.count += 1;
        self.last_key = key.to_vec();
        (shared, restart)
    }

    pub fn add(&mut self, key: &[u8], value: &[u8]) {
        let (shared, restart) = self.prefix(key);
        put_varint(&mut self.out, value.len() as u64);
        if self.form == Form::Separated {
            if restart {
                put_varint(&mut self.out, self.values.len() as u64);
            }
            self.values.extend(value);
        }
        self.out.extend(&key[shared..]);
        if self.form == Form::Plain {
            self.out.extend(value);
        }
    }

    pub fn add_index(&mut self, key: &[u8], handle: BlockHandle, first_key: &[u8]) {
        let Form::Index(format) = self.form else { panic!("not an index block") };
        let (shared, _) = self.prefix(key);
        let mut value = Vec::new();
        if format.delta_values && shared != 0 {
            assert_eq!(handle.offset, self.last_handle.offset + self.last_handle.size + 5);
            put_svarint(&mut value, handle.size as i64 - self.last_handle.size as i64);
        } else {
            put_varint(&mut value, handle.offset);
            put_varint(&mut value, handle.size);
        }
        if format.first_keys {
            put_lps(&mut value, first_key);
        }
        if !format.delta_values {
            put_varint(&mut self.out, value.len() as u64);
        }
        self.out.extend(&key[shared..]);
        self.out.extend(value);
        self.last_handle = handle;
    }

    pub fn finish(mut self) -> Vec<u8> {
        let mut footer = self.restarts.len() as u32;
        let values_offset = self.out.len() as u32;
        self.out.extend(&self.values);
        for restart in &self.restarts {
            self.out.extend(restart.to_le_bytes());
        }
        if let Some(buckets) = self.hash_buckets {
            footer |= 1 << 31;
            self.out.resize(self.out.len() + buckets as usize, 0xFF);
            self.out.extend(buckets.to_le_bytes());
        }
        if self.form == Form::Separated {
            footer |= 1 << 28;
            self.out.extend(values_offset.to_le_bytes());
        }
        self.out.extend(footer.to_le_bytes());
        self.out
    }
}
