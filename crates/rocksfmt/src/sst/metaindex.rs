//! The metaindex: names of meta blocks and their handles. Unknown names are skipped.

use crate::block::data::BlockCursor;
use crate::block::layout::BlockLayout;
use crate::error::Result;
use crate::sst::footer::BlockHandle;

pub(crate) const FULL_FILTER: &[u8] = b"fullfilter.rocksdb.BuiltinBloomFilter";
pub(crate) const PARTITIONED_FILTER: &[u8] = b"partitionedfilter.rocksdb.BuiltinBloomFilter";

/// The filter of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterHandle {
    /// One block for all keys.
    Full(BlockHandle),
    /// The top block, in the form of an index block, of filter partitions.
    Partitioned(BlockHandle),
}

/// The meta blocks that a reader may need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metaindex {
    /// Table properties.
    pub properties: Option<BlockHandle>,
    /// The index (from format version 6 on; before that the footer has it).
    pub index: Option<BlockHandle>,
    /// The filter.
    pub filter: Option<FilterHandle>,
    /// The compression dictionary of the data blocks.
    pub compression_dict: Option<BlockHandle>,
    /// Range tombstones.
    pub range_deletions: Option<BlockHandle>,
}

impl Metaindex {
    /// Parses the contents of a metaindex block.
    pub fn parse(data: &[u8]) -> Result<Metaindex> {
        Metaindex::parse_inner(data).map_err(|e| e.at("metaindex block"))
    }

    fn parse_inner(data: &[u8]) -> Result<Metaindex> {
        let layout = BlockLayout::parse(data)?;
        let mut cursor = BlockCursor::new();
        let mut found = Metaindex::default();
        let mut more = cursor.seek_to_first(data, &layout)?;
        while more {
            let handle =
                || BlockHandle::decode(cursor.value(data)).map(|h| (!h.is_none()).then_some(h));
            match cursor.key() {
                b"rocksdb.properties" => found.properties = handle()?,
                b"rocksdb.index" => found.index = handle()?,
                b"rocksdb.compression_dict" => found.compression_dict = handle()?,
                b"rocksdb.range_del" => found.range_deletions = handle()?,
                FULL_FILTER => found.filter = handle()?.map(FilterHandle::Full),
                PARTITIONED_FILTER => found.filter = handle()?.map(FilterHandle::Partitioned),
                _ => {}
            }
            more = cursor.next(data, &layout)?;
        }
        Ok(found)
    }
}
