//! Databases.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::prelude::*;

use crate::answer::Answer;
use crate::batch::WriteBatch;
use crate::family::ColumnFamily;
use crate::mode::Mode;
use crate::options;

/// An open database, and its default column family.
///
/// It may be used from any thread. In a `with` statement it is closed at the end.
#[pyclass(frozen, extends = ColumnFamily, module = "millrace")]
pub struct Db;

/// A handle of a database.
pub fn new(py: Python<'_>, db: millrace::Db, mode: Mode) -> PyResult<Py<PyAny>> {
    let family = db.default_column_family().clone();
    let db = PyClassInitializer::from(ColumnFamily::new(db, family, mode)).add_subclass(Db);
    Ok(Py::new(py, db)?.into_any())
}

/// Opens the database in a directory.
#[pyfunction]
#[pyo3(signature = (path, waits, *, cores=None, processors=None, memory=None, durability=None,
    create=None, adopt=None, compression=None, merge_operator=None, blob_min=None,
    verify_checksums=None, rocksdb_options=None))]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub fn open(
    py: Python<'_>,
    path: PathBuf,
    waits: bool,
    cores: Option<usize>,
    processors: Option<Vec<usize>>,
    memory: Option<u64>,
    durability: Option<&str>,
    create: Option<bool>,
    adopt: Option<bool>,
    compression: Option<&str>,
    merge_operator: Option<&str>,
    blob_min: Option<usize>,
    verify_checksums: Option<bool>,
    rocksdb_options: Option<BTreeMap<String, String>>,
) -> PyResult<Py<PyAny>> {
    let mut chosen = millrace::Options::new();
    if let Some(cores) = cores {
        chosen = chosen.cores(cores);
    }
    if let Some(processors) = processors {
        chosen = chosen.processors(processors);
    }
    if let Some(bytes) = memory {
        chosen = chosen.memory(bytes);
    }
    if let Some(word) = durability {
        chosen = chosen.durability(options::durability(py, word)?);
    }
    if let Some(create) = create {
        chosen = chosen.create(create);
    }
    if let Some(adopt) = adopt {
        chosen = chosen.adopt(adopt);
    }
    if let Some(word) = compression {
        chosen = chosen.compression(options::compression(py, word)?);
    }
    if let Some(name) = merge_operator {
        chosen = chosen.merge_operator(options::merge_operator(py, name)?);
    }
    if let Some(bytes) = blob_min {
        chosen = chosen.blob_min(bytes);
    }
    if let Some(verify) = verify_checksums {
        chosen = chosen.verify_checksums(verify);
    }
    for (name, value) in rocksdb_options.unwrap_or_default() {
        chosen = chosen.rocksdb_option(name, value);
    }
    let mode = Mode::new(waits);
    mode.run(py, async move { Ok(Answer::Db(chosen.open(path).await?, mode)) })
}

/// Runs an operation of the whole database.
macro_rules! run {
    ($slf:ident, |$db:ident, $mode:ident| $answer:expr) => {{
        let family = $slf.as_super().get();
        let ($db, $mode) = (family.db.clone(), family.mode);
        $mode.run($slf.py(), async move { Ok($answer) })
    }};
}

#[pymethods]
impl Db {
    /// The directory.
    #[getter]
    fn path(slf: &Bound<'_, Self>) -> PathBuf {
        slf.as_super().get().db.path().to_owned()
    }

    /// Writes a batch, all of it or nothing. The batch may be used again.
    fn write(slf: &Bound<'_, Self>, batch: &Bound<'_, WriteBatch>) -> PyResult<Py<PyAny>> {
        let batch = batch.borrow().batch.clone();
        run!(slf, |db, _mode| {
            db.write(batch).await?;
            Answer::Nothing
        })
    }

    /// Takes a snapshot of the present state. It expires after an hour.
    fn snapshot(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        run!(slf, |db, mode| Answer::Snapshot(db.snapshot().await?, db, mode))
    }

    /// Begins an optimistic transaction, which reads the present state.
    fn transaction(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        run!(slf, |db, mode| Answer::Transaction(db.transaction().await?, db, mode))
    }

    /// The names of all column families, the default one first.
    fn column_families(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        run!(slf, |db, _mode| Answer::Names(db.column_families().await?))
    }

    /// The column family with a name.
    fn column_family(slf: &Bound<'_, Self>, name: String) -> PyResult<Py<PyAny>> {
        run!(slf, |db, mode| {
            let family = db.column_family(&name).await?;
            Answer::Family(db, family, mode)
        })
    }

    /// Creates a column family. It is durable when this returns.
    fn create_column_family(slf: &Bound<'_, Self>, name: String) -> PyResult<Py<PyAny>> {
        run!(slf, |db, mode| {
            let family = db.create_column_family(&name).await?;
            Answer::Family(db, family, mode)
        })
    }

    /// Drops a column family with everything in it.
    fn drop_column_family(slf: &Bound<'_, Self>, name: String) -> PyResult<Py<PyAny>> {
        run!(slf, |db, _mode| {
            db.drop_column_family(&name).await?;
            Answer::Nothing
        })
    }

    /// Makes a checkpoint in a new directory: a copy that can be opened, of hard links where the
    /// file system allows.
    fn checkpoint(slf: &Bound<'_, Self>, path: PathBuf) -> PyResult<Py<PyAny>> {
        run!(slf, |db, _mode| {
            db.checkpoint(path).await?;
            Answer::Nothing
        })
    }

    /// Makes everything that was acknowledged before survive a power cut: of use with
    /// `durability="process"`.
    fn sync(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        run!(slf, |db, _mode| {
            db.sync().await?;
            Answer::Nothing
        })
    }

    /// Writes all memtables to tables. It is not needed for durability.
    fn flush(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        run!(slf, |db, _mode| {
            db.flush().await?;
            Answer::Nothing
        })
    }

    /// Closes the database for all handles: what was sent before is done, later calls raise
    /// ClosedError. Returns when its threads have ended and its lock is released. A second call
    /// does nothing.
    fn close(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        run!(slf, |db, _mode| {
            db.close().await?;
            Answer::Nothing
        })
    }

    fn __enter__<'py>(slf: &Bound<'py, Self>) -> Bound<'py, Self> {
        slf.clone()
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(slf: &Bound<'_, Self>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        Self::close(slf).map(drop)
    }

    fn __repr__(slf: &Bound<'_, Self>) -> String {
        format!("<millrace.Db {:?}>", slf.as_super().get().db.path())
    }
}
