//! The tags of a version edit.

pub const COMPARATOR: u32 = 1;
pub const LOG_NUMBER: u32 = 2;
pub const NEXT_FILE_NUMBER: u32 = 3;
pub const LAST_SEQUENCE: u32 = 4;
pub const COMPACT_CURSOR: u32 = 5;
pub const DELETED_FILE: u32 = 6;
pub const NEW_FILE: u32 = 7;
pub const PREV_LOG_NUMBER: u32 = 9;
pub const MIN_LOG_NUMBER_TO_KEEP: u32 = 10;
pub const NEW_FILE2: u32 = 100;
pub const NEW_FILE3: u32 = 102;
pub const NEW_FILE4: u32 = 103;
pub const COLUMN_FAMILY: u32 = 200;
pub const COLUMN_FAMILY_ADD: u32 = 201;
pub const COLUMN_FAMILY_DROP: u32 = 202;
pub const MAX_COLUMN_FAMILY: u32 = 203;
pub const IN_ATOMIC_GROUP: u32 = 300;
pub const BLOB_FILE_ADDITION: u32 = 400;
pub const BLOB_FILE_GARBAGE: u32 = 401;
/// Unknown tags with this bit have a length and can be skipped.
pub const IGNORABLE: u32 = 1 << 13;
pub const DB_ID: u32 = 8193;
pub const OLD_BLOB_FILE_ADDITION: u32 = 8194;
pub const OLD_BLOB_FILE_GARBAGE: u32 = 8195;
pub const OLD_WAL_ADDITION: u32 = 8196;
pub const OLD_WAL_DELETION: u32 = 8197;
pub const FULL_HISTORY_TS_LOW: u32 = 8198;
pub const WAL_ADDITION: u32 = 8199;
pub const WAL_DELETION: u32 = 8200;
pub const PERSIST_TIMESTAMPS: u32 = 8201;
pub const LAST_COMPACTED_MANIFEST_BYTES: u32 = 8203;
/// Millrace's: zeros that pad a record.
pub const FILLER: u32 = IGNORABLE | 0xF00;
/// Millrace's: the number of keys.
pub const KEYS: u32 = IGNORABLE | 0xF01;
