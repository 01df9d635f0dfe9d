//! Batches of writes.

use lsm::BatchWriter;

use crate::family::ColumnFamily;

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
pub struct WriteBatch(BatchWriter);

impl Default for WriteBatch {
    fn default() -> WriteBatch {
        WriteBatch(BatchWriter::new())
    }
}

impl WriteBatch {
    /// A batch without writes.
    pub fn new() -> WriteBatch {
        WriteBatch::default()
    }

    pub(crate) fn into_inner(self) -> BatchWriter {
        self.0
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
        self.put_at(family.as_ref().id(), key.as_ref(), value.as_ref())
    }

    /// Deletes a key of a column family.
    pub fn delete_in(
        &mut self,
        family: &impl AsRef<ColumnFamily>,
        key: impl AsRef<[u8]>,
    ) -> &mut WriteBatch {
        self.delete_at(family.as_ref().id(), key.as_ref())
    }

    /// Deletes all keys of a column family from the start of the range to before its end.
    pub fn delete_range_in<K: AsRef<[u8]>>(
        &mut self,
        family: &impl AsRef<ColumnFamily>,
        keys: std::ops::Range<K>,
    ) -> &mut WriteBatch {
        self.delete_range_at(family.as_ref().id(), keys.start.as_ref(), keys.end.as_ref())
    }

    /// Adds an operand to a key of a column family; see [`Db::merge`](crate::Db::merge).
    pub fn merge_in(
        &mut self,
        family: &impl AsRef<ColumnFamily>,
        key: impl AsRef<[u8]>,
        operand: impl AsRef<[u8]>,
    ) -> &mut WriteBatch {
        self.merge_at(family.as_ref().id(), key.as_ref(), operand.as_ref())
    }

    /// The number of writes.
    pub fn len(&self) -> usize {
        self.0.count() as usize
    }

    /// Whether there are no writes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of the writes, as they go into the log. A batch may have 256 MiB.
    pub fn bytes(&self) -> usize {
        self.0.len()
    }

    /// Removes all writes, and keeps the memory.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub(crate) fn put_at(&mut self, family: u32, key: &[u8], value: &[u8]) -> &mut WriteBatch {
        self.0.put(family, key, value);
        self
    }

    pub(crate) fn delete_at(&mut self, family: u32, key: &[u8]) -> &mut WriteBatch {
        self.0.delete(family, key);
        self
    }

    pub(crate) fn delete_range_at(
        &mut self,
        family: u32,
        start: &[u8],
        end: &[u8],
    ) -> &mut WriteBatch {
        self.0.delete_range(family, start, end);
        self
    }

    pub(crate) fn merge_at(&mut self, family: u32, key: &[u8], value: &[u8]) -> &mut WriteBatch {
        self.0.merge(family, key, value);
        self
    }
}
