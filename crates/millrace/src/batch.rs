//! Batches of writes.

use lsm::{BatchWriter, CfId};

use crate::error::Result;
use crate::family::{ColumnFamily, foreign};

/// Writes that are done together or not at all, in this order; see [`Db::write`](crate::Db::write).
///
/// The methods without a column family are for the default one.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let db = millrace::Db::open(dir.path()).await?;
/// use millrace::WriteBatch;
///
/// let names = db.create_column_family("names").await?;
/// let mut batch = WriteBatch::new();
/// batch.put("user:1", "Ada").delete("user:2").delete_range("user:5".."user:9");
/// batch.put_in(&names, "Ada", "user:1");
/// assert_eq!(batch.len(), 4);
/// db.write(batch).await?;
/// assert_eq!(names.get("Ada").await?.unwrap(), "user:1");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct WriteBatch {
    writes: BatchWriter,
    of: Of,
}

/// The open database of the column families that were named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Any,
    /// Its [`Shared::number`](crate::shared::Shared::number).
    One(u64),
    Several,
}

impl Default for WriteBatch {
    fn default() -> WriteBatch {
        WriteBatch { writes: BatchWriter::new(), of: Of::Any }
    }
}

impl WriteBatch {
    /// A batch without writes.
    pub fn new() -> WriteBatch {
        WriteBatch::default()
    }

    /// The writes, for the database of this number.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if some are for another one.
    pub(crate) fn into_inner(self, number: u64) -> Result<BatchWriter> {
        match self.of == Of::Any || self.of == Of::One(number) {
            true => Ok(self.writes),
            false => Err(foreign()),
        }
    }

    /// Notes the database of a column family, and returns the family's id.
    fn note(&mut self, family: &ColumnFamily) -> CfId {
        let number = family.engine.shared.number;
        self.of = match self.of {
            Of::Any => Of::One(number),
            Of::One(other) if other == number => Of::One(number),
            Of::One(_) | Of::Several => Of::Several,
        };
        family.id
    }

    /// Sets a key.
    pub fn put(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> &mut WriteBatch {
        self.put_at(0, key.as_ref(), value.as_ref())
    }

    /// Deletes a key.
    pub fn delete(&mut self, key: impl AsRef<[u8]>) -> &mut WriteBatch {
        self.delete_at(0, key.as_ref())
    }

    /// Deletes all keys from the start of the range to before its end.
    pub fn delete_range<K: AsRef<[u8]>>(&mut self, keys: std::ops::Range<K>) -> &mut WriteBatch {
        self.delete_range_at(0, keys.start.as_ref(), keys.end.as_ref())
    }

    /// Adds an operand to a key; see [`Db::merge`](crate::Db::merge).
    pub fn merge(&mut self, key: impl AsRef<[u8]>, operand: impl AsRef<[u8]>) -> &mut WriteBatch {
        self.merge_at(0, key.as_ref(), operand.as_ref())
    }

    /// Sets a key of a column family.
    pub fn put_in(
        &mut self,
        family: &impl AsRef<ColumnFamily>,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
    ) -> &mut WriteBatch {
        let family = self.note(family.as_ref());
        self.put_at(family, key.as_ref(), value.as_ref())
    }

    /// Deletes a key of a column family.
    pub fn delete_in(
        &mut self,
        family: &impl AsRef<ColumnFamily>,
        key: impl AsRef<[u8]>,
    ) -> &mut WriteBatch {
        let family = self.note(family.as_ref());
        self.delete_at(family, key.as_ref())
    }

    /// Deletes all keys of a column family from the start of the range to before its end.
    pub fn delete_range_in<K: AsRef<[u8]>>(
        &mut self,
        family: &impl AsRef<ColumnFamily>,
        keys: std::ops::Range<K>,
    ) -> &mut WriteBatch {
        let family = self.note(family.as_ref());
        self.delete_range_at(family, keys.start.as_ref(), keys.end.as_ref())
    }

    /// Adds an operand to a key of a column family; see [`Db::merge`](crate::Db::merge).
    pub fn merge_in(
        &mut self,
        family: &impl AsRef<ColumnFamily>,
        key: impl AsRef<[u8]>,
        operand: impl AsRef<[u8]>,
    ) -> &mut WriteBatch {
        let family = self.note(family.as_ref());
        self.merge_at(family, key.as_ref(), operand.as_ref())
    }

    /// The number of writes.
    pub fn len(&self) -> usize {
        self.writes.count() as usize
    }

    /// Whether there are no writes.
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    /// Bytes of the writes, as they go into the log. A batch may have 256 MiB.
    pub fn bytes(&self) -> usize {
        self.writes.len()
    }

    /// Removes all writes, and keeps the memory.
    pub fn clear(&mut self) {
        self.writes.clear();
        self.of = Of::Any;
    }

    pub(crate) fn put_at(&mut self, family: u32, key: &[u8], value: &[u8]) -> &mut WriteBatch {
        self.writes.put(family, key, value);
        self
    }

    pub(crate) fn delete_at(&mut self, family: u32, key: &[u8]) -> &mut WriteBatch {
        self.writes.delete(family, key);
        self
    }

    pub(crate) fn delete_range_at(
        &mut self,
        family: u32,
        start: &[u8],
        end: &[u8],
    ) -> &mut WriteBatch {
        self.writes.delete_range(family, start, end);
        self
    }

    pub(crate) fn merge_at(&mut self, family: u32, key: &[u8], value: &[u8]) -> &mut WriteBatch {
        self.writes.merge(family, key, value);
        self
    }
}
