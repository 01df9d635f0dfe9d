//! Compaction filters: code that removes or changes values when tables are merged.

use std::fmt::Debug;
use std::sync::Arc;

/// What becomes of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FilterDecision {
    /// It stays.
    Keep,
    /// The key is deleted.
    Remove,
    /// It is replaced.
    Change(Vec<u8>),
}

/// A filter of a column family. Merges of tables ask it for each key whose newest version is a
/// plain value that no snapshot is older than. As in RocksDB, a snapshot does not protect a value
/// from the filter. Flushes, tables that move to another level without a merge, values in blob
/// files, merge operands and entities are not filtered.
///
/// A filter is called on any core, for the same value more than once, and possibly never. It must
/// not block.
///
/// A removed key gets a tombstone, which may meet a SingleDelete that is written later: a key that
/// a filter removes must not be deleted with SingleDelete.
pub trait CompactionFilter: Debug + Send + Sync {
    /// Its name, for messages.
    fn name(&self) -> &str;

    /// Decides for the newest version of a key.
    fn filter(&self, key: &[u8], value: &[u8]) -> FilterDecision;
}

/// RocksDB's filter of this name: removes keys with an empty value.
#[derive(Clone, Copy, Debug)]
struct RemoveEmptyValue;

impl CompactionFilter for RemoveEmptyValue {
    fn name(&self) -> &str {
        "RemoveEmptyValueCompactionFilter"
    }

    fn filter(&self, _: &[u8], value: &[u8]) -> FilterDecision {
        if value.is_empty() { FilterDecision::Remove } else { FilterDecision::Keep }
    }
}

/// The built-in filter with RocksDB's name.
pub(crate) fn built_in(name: &str) -> Option<Arc<dyn CompactionFilter>> {
    (name == RemoveEmptyValue.name()).then(|| Arc::new(RemoveEmptyValue) as _)
}
