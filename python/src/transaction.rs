//! Optimistic transactions.

use pyo3::prelude::*;

use crate::answer::Answer;
use crate::bytes::{Bytes, keys};
use crate::error::Failure;
use crate::family::{ColumnFamily, of_argument, or_default};
use crate::mode::Mode;
use crate::slot::Slot;
use crate::snapshot::Snapshot;

/// Reads and writes that take effect together at the commit, as if nobody else had done anything
/// meanwhile, or not at all.
///
/// It reads the state of its beginning and its own writes, and locks nothing. If somebody else
/// writes a key that it has read, the commit raises ConflictError and nothing is written: begin
/// again. In a `with` statement it is committed at the end, or abandoned after an exception.
#[pyclass(frozen, module = "millrace")]
pub struct Transaction {
    slot: Slot<millrace::Transaction>,
    db: millrace::Db,
    mode: Mode,
}

impl Transaction {
    pub fn new(transaction: millrace::Transaction, db: millrace::Db, mode: Mode) -> Transaction {
        Transaction { slot: Slot::new(transaction, "transaction"), db, mode }
    }
}

#[pymethods]
impl Transaction {
    /// Looks up a key, which nobody else may write until the commit.
    #[pyo3(signature = (key, default=None, *, column_family=None))]
    fn get(
        &self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        default: Option<Py<PyAny>>,
        column_family: Option<&Bound<'_, ColumnFamily>>,
    ) -> PyResult<Py<PyAny>> {
        let family = of_argument(column_family, &self.db).clone();
        let (mut lent, key) = (self.slot.lend(py)?, key.as_ref().to_vec());
        let found = self
            .mode
            .run(py, async move { Ok(Answer::Value(lent.get().get_in(&family, key).await?)) })?;
        Ok(or_default(py, found, default))
    }

    /// Looks up many keys, which nobody else may write until the commit.
    #[pyo3(signature = (keys, *, column_family=None))]
    fn multi_get(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        column_family: Option<&Bound<'_, ColumnFamily>>,
    ) -> PyResult<Py<PyAny>> {
        let family = of_argument(column_family, &self.db).clone();
        let keys = self::keys(keys)?;
        let mut lent = self.slot.lend(py)?;
        self.mode.run(py, async move {
            Ok(Answer::Values(lent.get().multi_get_in(&family, keys).await?))
        })
    }

    /// Sets a key at the commit.
    #[pyo3(signature = (key, value, *, column_family=None))]
    fn put(
        &self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        value: Bytes<'_, '_>,
        column_family: Option<&Bound<'_, ColumnFamily>>,
    ) -> PyResult<()> {
        let family = of_argument(column_family, &self.db);
        self.slot.with(py, |transaction| {
            transaction.put_in(family, key, value);
        })
    }

    /// Deletes a key at the commit.
    #[pyo3(signature = (key, *, column_family=None))]
    fn delete(
        &self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        column_family: Option<&Bound<'_, ColumnFamily>>,
    ) -> PyResult<()> {
        let family = of_argument(column_family, &self.db);
        self.slot.with(py, |transaction| {
            transaction.delete_in(family, key);
        })
    }

    /// The state that the transaction reads, without its writes. What is read there may be written
    /// by others: of use for ranges.
    fn snapshot(&self, py: Python<'_>) -> PyResult<Snapshot> {
        let snapshot = self.slot.with(py, |transaction| transaction.snapshot().clone())?;
        Ok(Snapshot::new(snapshot, self.db.clone(), self.mode))
    }

    /// Makes the writes visible and durable, all together. Raises ConflictError if a key that was
    /// read was written meanwhile; then nothing was written.
    fn commit(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let transaction = self.slot.end()?.ok_or_else(|| self.slot.ended(py))?;
        self.mode.run(py, async move {
            transaction.commit().await.map_err(Failure::Db)?;
            Ok(Answer::Nothing)
        })
    }

    /// Abandons the transaction. Nothing is written.
    fn abandon(&self) -> PyResult<()> {
        self.slot.end().map(drop)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (kind, _error, _trace))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if kind.is_some() {
            return self.abandon();
        }
        // It may have been committed or abandoned in the block.
        if self.slot.has_ended() { Ok(()) } else { self.commit(py).map(drop) }
    }
}
