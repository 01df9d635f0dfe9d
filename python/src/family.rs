//! Column families: what a database has, without what concerns all of it.

use std::ops::Bound as Limit;

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;

use crate::answer::Answer;
use crate::bytes::{Bytes, keys};
use crate::mode::Mode;
use crate::range::{Range, Source};

/// A column family of an open database: a key space of its own.
///
/// Keys and values are any objects with the buffer protocol, such as bytes, bytearray or
/// memoryview; what is returned is bytes.
#[pyclass(subclass, frozen, module = "millrace")]
pub struct ColumnFamily {
    pub db: millrace::Db,
    pub family: millrace::ColumnFamily,
    pub mode: Mode,
}

/// The bounds of a range, as Python has them: from `start` to before `stop`.
pub fn bounds(
    start: Option<Bytes<'_, '_>>,
    stop: Option<Bytes<'_, '_>>,
) -> (Limit<Vec<u8>>, Limit<Vec<u8>>) {
    let start = start.map_or(Limit::Unbounded, |key| Limit::Included(key.as_ref().to_vec()));
    let stop = stop.map_or(Limit::Unbounded, |key| Limit::Excluded(key.as_ref().to_vec()));
    (start, stop)
}

/// What a `get` returns: the default for a key that is not there.
pub fn or_default(py: Python<'_>, found: Py<PyAny>, default: Option<Py<PyAny>>) -> Py<PyAny> {
    match default {
        Some(default) if found.is_none(py) => default,
        _ => found,
    }
}

impl ColumnFamily {
    pub fn new(db: millrace::Db, family: millrace::ColumnFamily, mode: Mode) -> ColumnFamily {
        ColumnFamily { db, family, mode }
    }

    /// A write, made of the arguments without another copy.
    fn write(
        &self,
        py: Python<'_>,
        fill: impl FnOnce(&mut millrace::WriteBatch, &millrace::ColumnFamily),
    ) -> PyResult<Py<PyAny>> {
        let mut batch = millrace::WriteBatch::new();
        fill(&mut batch, &self.family);
        let db = self.db.clone();
        self.mode.run(py, async move {
            db.write(batch).await?;
            Ok(Answer::Nothing)
        })
    }

    fn entries(&self, range: millrace::Range, reverse: bool, keys_only: bool) -> Range {
        let range = if reverse { range.rev() } else { range };
        Range::new(Source::Db(range), keys_only, self.mode)
    }
}

#[pymethods]
impl ColumnFamily {
    /// The name of the column family.
    #[getter]
    fn name(&self) -> &str {
        self.family.name()
    }

    /// Looks up a key; returns `default` if there is no such key.
    #[pyo3(signature = (key, default=None))]
    fn get(
        &self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        default: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let (family, key) = (self.family.clone(), key.as_ref().to_vec());
        let found = self.mode.run(py, async move { Ok(Answer::Value(family.get(key).await?)) })?;
        Ok(or_default(py, found, default))
    }

    /// Looks up a key; returns the value as a read-only memoryview without a copy, or None.
    fn get_view(&self, py: Python<'_>, key: Bytes<'_, '_>) -> PyResult<Py<PyAny>> {
        let (family, key) = (self.family.clone(), key.as_ref().to_vec());
        self.mode.run(py, async move { Ok(Answer::View(family.get(key).await?)) })
    }

    /// Looks up many keys, and reads all that is not in memory at the same time. The values are in
    /// the order of the keys, with None for a key that is not there. Each may be of another moment;
    /// those of a snapshot are of one.
    fn multi_get(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let (family, keys) = (self.family.clone(), self::keys(keys)?);
        self.mode.run(py, async move { Ok(Answer::Values(family.multi_get(keys).await?)) })
    }

    /// Sets a key. As all writes, it is acknowledged when it is visible and as durable as the
    /// option `durability` says.
    fn put(&self, py: Python<'_>, key: Bytes<'_, '_>, value: Bytes<'_, '_>) -> PyResult<Py<PyAny>> {
        self.write(py, |batch, family| {
            batch.put_in(family, key, value);
        })
    }

    /// Deletes a key, whether it exists or not.
    fn delete(&self, py: Python<'_>, key: Bytes<'_, '_>) -> PyResult<Py<PyAny>> {
        self.write(py, |batch, family| {
            batch.delete_in(family, key);
        })
    }

    /// Deletes all keys from `start` to before `stop`, with one write.
    fn delete_range(
        &self,
        py: Python<'_>,
        start: Bytes<'_, '_>,
        stop: Bytes<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        self.write(py, |batch, family| {
            batch.delete_range_in(family, start.as_ref()..stop.as_ref());
        })
    }

    /// Adds an operand to a key, which the merge operator combines with its value when it is read.
    fn merge(
        &self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        operand: Bytes<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        self.write(py, |batch, family| {
            batch.merge_in(family, key, operand);
        })
    }

    /// Iterates over the entries (key, value) from `start` to before `stop`, in the order of the
    /// keys, all of one moment; with `reverse` from the last to the first.
    #[pyo3(signature = (start=None, stop=None, *, reverse=false))]
    fn range(
        &self,
        start: Option<Bytes<'_, '_>>,
        stop: Option<Bytes<'_, '_>>,
        reverse: bool,
    ) -> Range {
        self.entries(self.family.range(bounds(start, stop)), reverse, false)
    }

    /// Iterates over the entries whose keys begin with `prefix`.
    #[pyo3(signature = (prefix, *, reverse=false))]
    fn prefix(&self, prefix: Bytes<'_, '_>, reverse: bool) -> Range {
        self.entries(self.family.prefix(prefix), reverse, false)
    }

    /// Iterates over the keys from `start` to before `stop`.
    #[pyo3(signature = (start=None, stop=None, *, reverse=false))]
    fn keys(
        &self,
        start: Option<Bytes<'_, '_>>,
        stop: Option<Bytes<'_, '_>>,
        reverse: bool,
    ) -> Range {
        self.entries(self.family.range(bounds(start, stop)), reverse, true)
    }

    /// Compacts the tables from `start` to before `stop` into the deepest level.
    #[pyo3(signature = (start=None, stop=None))]
    fn compact(
        &self,
        py: Python<'_>,
        start: Option<Bytes<'_, '_>>,
        stop: Option<Bytes<'_, '_>>,
    ) -> PyResult<Py<PyAny>> {
        let (family, bounds) = (self.family.clone(), bounds(start, stop));
        self.mode.run(py, async move {
            family.compact_range(bounds).await?;
            Ok(Answer::Nothing)
        })
    }

    /// The value of a key; KeyError if there is no such key.
    fn __getitem__(&self, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let found = self.get(key.py(), key.extract()?, None)?;
        match found.is_none(key.py()) {
            true => Err(PyKeyError::new_err(key.clone().unbind())),
            false => Ok(found),
        }
    }

    fn __setitem__(
        &self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        value: Bytes<'_, '_>,
    ) -> PyResult<()> {
        self.put(py, key, value).map(drop)
    }

    /// Deletes a key; a key that is not there is no error.
    fn __delitem__(&self, py: Python<'_>, key: Bytes<'_, '_>) -> PyResult<()> {
        self.delete(py, key).map(drop)
    }

    fn __contains__(&self, py: Python<'_>, key: Bytes<'_, '_>) -> PyResult<bool> {
        Ok(!self.get(py, key, None)?.is_none(py))
    }

    fn __iter__(&self) -> Range {
        self.keys(None, None, false)
    }

    fn __repr__(&self) -> String {
        format!("<millrace.ColumnFamily {:?}>", self.family.name())
    }
}

/// The family of an argument, or the default one.
pub fn of_argument<'a>(
    family: Option<&'a Bound<'_, ColumnFamily>>,
    db: &'a millrace::Db,
) -> &'a millrace::ColumnFamily {
    family.map_or_else(|| db.default_column_family(), |family| &family.get().family)
}
