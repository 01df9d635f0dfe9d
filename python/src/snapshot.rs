//! Snapshots.

use pyo3::prelude::*;

use crate::answer::Answer;
use crate::bytes::{Bytes, keys};
use crate::family::{ColumnFamily, bounds, of_argument, or_default};
use crate::mode::Mode;
use crate::range::{Range, Source};
use crate::slot::Slot;

/// The state of a database at one moment, in all column families.
///
/// It keeps old values on the disk until it is closed, or nobody has it any more; it expires after
/// an hour. In a `with` statement it is closed at the end.
#[pyclass(frozen, module = "millrace")]
pub struct Snapshot {
    slot: Slot<millrace::Snapshot>,
    db: millrace::Db,
    mode: Mode,
}

impl Snapshot {
    pub fn new(snapshot: millrace::Snapshot, db: millrace::Db, mode: Mode) -> Snapshot {
        Snapshot { slot: Slot::new(snapshot, "snapshot"), db, mode }
    }

    fn snapshot(&self, py: Python<'_>) -> PyResult<millrace::Snapshot> {
        self.slot.with(py, |snapshot| snapshot.clone())
    }

    fn entries(&self, range: millrace::Range, reverse: bool, keys_only: bool) -> Range {
        let range = if reverse { range.rev() } else { range };
        Range::new(Source::Db(range), keys_only, self.mode)
    }
}

#[pymethods]
impl Snapshot {
    /// Looks up a key; returns `default` if there is no such key.
    #[pyo3(signature = (key, default=None, *, column_family=None))]
    fn get(
        &self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        default: Option<Py<PyAny>>,
        column_family: Option<&Bound<'_, ColumnFamily>>,
    ) -> PyResult<Py<PyAny>> {
        let family = of_argument(column_family, &self.db).clone();
        let (snapshot, key) = (self.snapshot(py)?, key.as_ref().to_vec());
        let found = self
            .mode
            .run(py, async move { Ok(Answer::Value(snapshot.get_in(&family, key).await?)) })?;
        Ok(or_default(py, found, default))
    }

    /// Looks up many keys, all at this moment.
    #[pyo3(signature = (keys, *, column_family=None))]
    fn multi_get(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        column_family: Option<&Bound<'_, ColumnFamily>>,
    ) -> PyResult<Py<PyAny>> {
        let family = of_argument(column_family, &self.db).clone();
        let (snapshot, keys) = (self.snapshot(py)?, self::keys(keys)?);
        self.mode
            .run(py, async move { Ok(Answer::Values(snapshot.multi_get_in(&family, keys).await?)) })
    }

    /// Iterates over the entries (key, value) from `start` to before `stop`; with `reverse` from
    /// the last to the first.
    #[pyo3(signature = (start=None, stop=None, *, reverse=false, column_family=None))]
    fn range(
        &self,
        py: Python<'_>,
        start: Option<Bytes<'_, '_>>,
        stop: Option<Bytes<'_, '_>>,
        reverse: bool,
        column_family: Option<&Bound<'_, ColumnFamily>>,
    ) -> PyResult<Range> {
        let family = of_argument(column_family, &self.db);
        let range = self.snapshot(py)?.range_in(family, bounds(start, stop));
        Ok(self.entries(range, reverse, false))
    }

    /// Iterates over the entries whose keys begin with `prefix`.
    #[pyo3(signature = (prefix, *, reverse=false, column_family=None))]
    fn prefix(
        &self,
        py: Python<'_>,
        prefix: Bytes<'_, '_>,
        reverse: bool,
        column_family: Option<&Bound<'_, ColumnFamily>>,
    ) -> PyResult<Range> {
        let family = of_argument(column_family, &self.db);
        let range = self.snapshot(py)?.prefix_in(family, prefix);
        Ok(self.entries(range, reverse, false))
    }

    /// Iterates over the keys from `start` to before `stop`.
    #[pyo3(signature = (start=None, stop=None, *, reverse=false, column_family=None))]
    fn keys(
        &self,
        py: Python<'_>,
        start: Option<Bytes<'_, '_>>,
        stop: Option<Bytes<'_, '_>>,
        reverse: bool,
        column_family: Option<&Bound<'_, ColumnFamily>>,
    ) -> PyResult<Range> {
        let family = of_argument(column_family, &self.db);
        let range = self.snapshot(py)?.range_in(family, bounds(start, stop));
        Ok(self.entries(range, reverse, true))
    }

    /// Releases the snapshot. Iterators of it go on.
    fn close(&self) -> PyResult<()> {
        self.slot.end().map(drop)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close()
    }
}
