//! The properties of a file that is being built.

use std::collections::BTreeMap;

use crate::block::builder::BlockBuilder;
use crate::block::checksum::BLOCK_TRAILER_BYTES;
use crate::block::decompress::Compression;
use crate::coding::put_varint;
use crate::sst::builder::SstBuilder;
use crate::sst::index::IndexType;
use crate::sst::properties::{BLOB_BYTES, BLOB_VALUES};

/// Of the files of all supported versions of RocksDB.
const FORMAT_VERSION: u64 = 5;

/// Properties by name, which is the order of their block.
#[derive(Default)]
struct Named(BTreeMap<&'static str, Vec<u8>>);

impl Named {
    fn number(&mut self, name: &'static str, value: u64) {
        let mut bytes = Vec::new();
        put_varint(&mut bytes, value);
        self.0.insert(name, bytes);
    }

    fn text(&mut self, name: &'static str, value: &str) {
        self.0.insert(name, value.as_bytes().to_vec());
    }
}

impl SstBuilder {
    /// The properties block, after all other blocks except the metaindex.
    pub(super) fn properties(&self) -> Vec<u8> {
        let mut all = Named::default();
        self.put_counts(&mut all);
        self.put_form(&mut all);
        self.put_origin(&mut all);
        let mut block = BlockBuilder::new(u32::MAX);
        for (name, value) in &all.0 {
            block.add(name.as_bytes(), value);
        }
        block.finish().to_vec()
    }

    fn put_counts(&self, all: &mut Named) {
        let (totals, tail) = (&self.totals, &self.tail);
        all.number("rocksdb.num.entries", totals.entries);
        all.number("rocksdb.num.range-deletions", totals.range_deletions);
        all.number("rocksdb.deleted.keys", totals.deletions);
        all.number("rocksdb.merge.operands", totals.merges);
        all.number("rocksdb.raw.key.size", totals.raw_key_bytes);
        all.number("rocksdb.raw.value.size", totals.raw_value_bytes);
        all.number("rocksdb.num.data.blocks", totals.data_blocks);
        all.number("rocksdb.num.filter_entries", self.filter.keys());
        all.number("rocksdb.data.size", tail.start);
        all.number("rocksdb.tail.start.offset", tail.start);
        all.number("rocksdb.index.size", tail.index_bytes() + BLOCK_TRAILER_BYTES as u64);
        all.number("rocksdb.index.partitions", tail.index_parts.len() as u64);
        all.number("rocksdb.top-level.index.size", tail.top_index_bytes());
        all.number("rocksdb.filter.size", tail.filter_bytes());
        if totals.blob_values > 0 {
            all.number(BLOB_VALUES, totals.blob_values);
            all.number(BLOB_BYTES, totals.blob_bytes);
        }
    }

    fn put_form(&self, all: &mut Named) {
        let index_type = match self.is_partitioned {
            true => IndexType::TwoLevel,
            false => IndexType::BinarySearch,
        };
        let index_type = index_type.to_u32().to_le_bytes().to_vec();
        all.0.insert("rocksdb.block.based.table.index.type", index_type);
        all.number("rocksdb.index.key.is.user.key", u64::from(self.index.has_user_keys()));
        all.number("rocksdb.index.value.is.delta.encoded", 1);
        all.number("rocksdb.format.version", FORMAT_VERSION);
        all.text("rocksdb.comparator", self.options.comparator.name());
        // RocksDB makes no decompressor if the file claims to need none.
        let compression = match self.out.has_compressed {
            true => self.options.compression,
            false => Compression::None,
        };
        all.text("rocksdb.compression", compression.name());
        all.text("rocksdb.block.based.table.whole.key.filtering", "1");
        all.text("rocksdb.block.based.table.prefix.filtering", "0");
        all.text("rocksdb.merge.operator", &self.merge_operator);
        all.text("rocksdb.prefix.extractor.name", "nullptr");
        all.text("rocksdb.property.collectors", "[]");
        if self.tail.has_filter() {
            all.text("rocksdb.filter.policy", "bloomfilter");
        }
    }

    fn put_origin(&self, all: &mut Named) {
        let times = &self.options.times;
        all.number("rocksdb.column.family.id", u64::from(self.options.column_family));
        all.text("rocksdb.column.family.name", &self.options.column_family_name);
        all.number("rocksdb.creation.time", times.oldest_ancestor);
        all.number("rocksdb.file.creation.time", times.created);
        all.number("rocksdb.oldest.key.time", times.oldest_key);
        let identity = &self.options.identity;
        if !identity.session.is_empty() {
            all.text("rocksdb.creating.db.identity", &identity.database);
            all.text("rocksdb.creating.session.identity", &identity.session);
            all.number("rocksdb.original.file.number", identity.number);
        }
    }
}
