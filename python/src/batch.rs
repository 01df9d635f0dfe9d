//! Batches of writes.

use pyo3::prelude::*;

use crate::bytes::Bytes;
use crate::family::ColumnFamily;
use crate::options::seconds;

/// Writes to a database that are done together or not at all, in this order; see Db.write.
#[pyclass(module = "millrace")]
pub struct WriteBatch {
    pub batch: millrace::WriteBatch,
}

#[pymethods]
impl WriteBatch {
    #[new]
    fn new() -> WriteBatch {
        WriteBatch { batch: millrace::WriteBatch::new() }
    }

    /// Sets a key.
    #[pyo3(signature = (key, value, *, column_family=None))]
    fn put(
        &mut self,
        key: Bytes<'_, '_>,
        value: Bytes<'_, '_>,
        column_family: Option<&Bound<'_, ColumnFamily>>,
    ) {
        match column_family {
            None => self.batch.put(key, value),
            Some(family) => self.batch.put_in(&family.get().family, key, value),
        };
    }

    /// Deletes a key.
    #[pyo3(signature = (key, *, column_family=None))]
    fn delete(&mut self, key: Bytes<'_, '_>, column_family: Option<&Bound<'_, ColumnFamily>>) {
        match column_family {
            None => self.batch.delete(key),
            Some(family) => self.batch.delete_in(&family.get().family, key),
        };
    }

    /// Deletes all keys from `start` to before `stop`.
    #[pyo3(signature = (start, stop, *, column_family=None))]
    fn delete_range(
        &mut self,
        start: Bytes<'_, '_>,
        stop: Bytes<'_, '_>,
        column_family: Option<&Bound<'_, ColumnFamily>>,
    ) {
        let keys = start.as_ref()..stop.as_ref();
        match column_family {
            None => self.batch.delete_range(keys),
            Some(family) => self.batch.delete_range_in(&family.get().family, keys),
        };
    }

    /// Adds an operand to a key; see Db.merge.
    #[pyo3(signature = (key, operand, *, column_family=None))]
    fn merge(
        &mut self,
        key: Bytes<'_, '_>,
        operand: Bytes<'_, '_>,
        column_family: Option<&Bound<'_, ColumnFamily>>,
    ) {
        match column_family {
            None => self.batch.merge(key, operand),
            Some(family) => self.batch.merge_in(&family.get().family, key, operand),
        };
    }

    /// Bytes of the writes, as they go into the log. A batch may have 256 MiB.
    #[getter]
    fn size(&self) -> usize {
        self.batch.bytes()
    }

    /// Removes all writes.
    fn clear(&mut self) {
        self.batch.clear();
    }

    fn __len__(&self) -> usize {
        self.batch.len()
    }
}

/// Writes to a server that are done together or not at all, in this order; see Client.write.
#[pyclass(module = "millrace")]
pub struct ClientBatch {
    pub batch: millrace::client::WriteBatch,
}

#[pymethods]
impl ClientBatch {
    #[new]
    fn new() -> ClientBatch {
        ClientBatch { batch: millrace::client::WriteBatch::new() }
    }

    /// Sets a key. With `ttl` the server removes it after so many seconds, from the moment when it
    /// makes the batch, which may have 4,000 such keys.
    #[pyo3(signature = (key, value, *, ttl=None))]
    fn set(
        &mut self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        value: Bytes<'_, '_>,
        ttl: Option<f64>,
    ) -> PyResult<()> {
        match ttl {
            None => self.batch.set(key, value),
            Some(ttl) => self.batch.set_with_ttl(key, value, seconds(py, "ttl", ttl)?),
        };
        Ok(())
    }

    /// Deletes a key.
    fn delete(&mut self, key: Bytes<'_, '_>) {
        self.batch.delete(key);
    }

    /// Deletes all keys from `start` to before `stop`: only on a Millrace node.
    fn delete_range(&mut self, start: Bytes<'_, '_>, stop: Bytes<'_, '_>) {
        self.batch.delete_range(start.as_ref()..stop.as_ref());
    }

    /// Bytes of all keys and values. A batch may have 256 MiB.
    #[getter]
    fn size(&self) -> usize {
        self.batch.bytes()
    }

    /// Removes all writes.
    fn clear(&mut self) {
        self.batch.clear();
    }

    fn __len__(&self) -> usize {
        self.batch.len()
    }
}
