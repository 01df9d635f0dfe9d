//! What operations return, as Python objects.

use millrace::client::Ttl;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyFloat, PyInt, PyList};

use crate::bytes;
use crate::client::{self, Client};
use crate::db;
use crate::error::Failure;
use crate::family::ColumnFamily;
use crate::mode::Mode;
use crate::snapshot::Snapshot;
use crate::transaction::Transaction;

/// How an operation ended.
pub type Outcome = Result<Answer, Failure>;

/// What an operation returns.
pub enum Answer {
    Nothing,
    Value(Option<millrace::Value>),
    View(Option<millrace::Value>),
    Values(Vec<Option<millrace::Value>>),
    Bytes(Option<Vec<u8>>),
    ManyBytes(Vec<Option<Vec<u8>>>),
    Bool(bool),
    Count(u64),
    Ttl(Ttl),
    Names(Vec<String>),
    Db(millrace::Db, Mode),
    Family(millrace::Db, millrace::ColumnFamily, Mode),
    Snapshot(millrace::Snapshot, millrace::Db, Mode),
    Transaction(millrace::Transaction, millrace::Db, Mode),
    Client(client::Kind),
}

impl Answer {
    pub fn into_py(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let made = match self {
            Answer::Nothing => py.None(),
            Answer::Value(None) | Answer::View(None) | Answer::Bytes(None) => py.None(),
            Answer::Value(Some(value)) => PyBytes::new(py, &value).into_any().unbind(),
            Answer::Bytes(Some(value)) => PyBytes::new(py, &value).into_any().unbind(),
            Answer::View(Some(value)) => bytes::view(py, value)?,
            Answer::Values(values) => list(py, &values)?,
            Answer::ManyBytes(values) => list(py, &values)?,
            Answer::Bool(is) => PyBool::new(py, is).to_owned().into_any().unbind(),
            Answer::Count(count) => PyInt::new(py, count).into_any().unbind(),
            Answer::Ttl(Ttl::NoKey) => py.None(),
            Answer::Ttl(Ttl::Forever) => PyFloat::new(py, f64::INFINITY).into_any().unbind(),
            Answer::Ttl(Ttl::Left(left)) => {
                PyFloat::new(py, left.as_secs_f64()).into_any().unbind()
            }
            Answer::Names(names) => PyList::new(py, names)?.into_any().unbind(),
            Answer::Db(db, mode) => db::new(py, db, mode)?,
            Answer::Family(db, family, mode) => {
                Py::new(py, ColumnFamily::new(db, family, mode))?.into_any()
            }
            Answer::Snapshot(snapshot, db, mode) => {
                Py::new(py, Snapshot::new(snapshot, db, mode))?.into_any()
            }
            Answer::Transaction(transaction, db, mode) => {
                Py::new(py, Transaction::new(transaction, db, mode))?.into_any()
            }
            Answer::Client(kind) => Py::new(py, Client::new(kind))?.into_any(),
        };
        Ok(made)
    }
}

fn list<T: AsRef<[u8]>>(py: Python<'_>, values: &[Option<T>]) -> PyResult<Py<PyAny>> {
    let values =
        values.iter().map(|value| value.as_ref().map(|value| PyBytes::new(py, value.as_ref())));
    Ok(PyList::new(py, values)?.into_any().unbind())
}
