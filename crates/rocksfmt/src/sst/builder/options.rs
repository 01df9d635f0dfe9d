//! The options of a table.

use crate::block::checksum::ChecksumType;
use crate::block::compress::CodecOptions;
use crate::block::decompress::Compression;
use crate::key::Comparator;

/// The options of a file.
#[derive(Clone, Debug)]
pub struct SstOptions {
    /// The column family's order.
    pub comparator: Comparator,
    /// The column family's id.
    pub column_family: u32,
    /// The column family's name.
    pub column_family_name: String,
    /// The size and form of blocks.
    pub blocks: BlockOptions,
    /// For data blocks, and for index blocks if [`BlockOptions::compress_index`] says so.
    pub compression: Compression,
    /// How it compresses.
    pub codec: CodecOptions,
    /// What makes the file unique.
    pub identity: SstIdentity,
    /// The ages of the file.
    pub times: SstTimes,
}

impl Default for SstOptions {
    fn default() -> SstOptions {
        SstOptions {
            comparator: Comparator::Bytewise,
            column_family: 0,
            column_family_name: "default".to_owned(),
            blocks: BlockOptions::default(),
            compression: Compression::None,
            codec: CodecOptions::default(),
            identity: SstIdentity::default(),
            times: SstTimes::default(),
        }
    }
}

/// The size and form of a file's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockOptions {
    /// Bytes of entries at which a data block ends.
    pub block_bytes: usize,
    /// A block also ends before an entry that would exceed its size, if at most this percentage of
    /// it is left.
    pub deviation_percent: u32,
    /// Entries per restart point of data blocks.
    pub restart_interval: u32,
    /// Entries per restart point of index blocks.
    pub index_restart_interval: u32,
    /// Index blocks are compressed, too.
    pub compress_index: bool,
    /// The checksum of all blocks.
    pub checksum: ChecksumType,
    /// Thousandths of a bit of filter for each key; 0 for no filter.
    pub filter_millibits_per_key: u64,
    /// The index has two levels.
    pub partition_index: bool,
    /// The filter has two levels. Only with `partition_index`.
    pub partition_filter: bool,
    /// Bytes of each block of the lower level.
    pub partition_bytes: usize,
    /// Bytes of index and filter together above which both have two levels in any case. A builder
    /// needs up to six times this memory for the hashes of the keys of an undivided filter.
    pub whole_bytes_max: usize,
}

impl Default for BlockOptions {
    fn default() -> BlockOptions {
        BlockOptions {
            block_bytes: 4096,
            deviation_percent: 10,
            restart_interval: 16,
            index_restart_interval: 1,
            compress_index: false,
            checksum: ChecksumType::Xxh3,
            filter_millibits_per_key: 10_000,
            partition_index: false,
            partition_filter: false,
            partition_bytes: 4096,
            whole_bytes_max: usize::MAX,
        }
    }
}

/// What makes a file unique among all files of all databases. RocksDB makes names in backups and
/// keys of caches of it. With an empty session it is not written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SstIdentity {
    /// The database's id.
    pub database: String,
    /// The id of the opening: [`session_id`](crate::session_id).
    pub session: String,
    /// The file's number. Never used twice in a session.
    pub number: u64,
}

/// The ages of a file, in Unix seconds; 0 for unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SstTimes {
    /// When the file is written.
    pub created: u64,
    /// The least age of the files that its entries come from, or of its oldest entry.
    pub oldest_ancestor: u64,
    /// When the oldest entry was written, if it comes from a memtable.
    pub oldest_key: u64,
}
