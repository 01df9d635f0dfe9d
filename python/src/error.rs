//! Failures as exceptions. Their classes are those of `millrace/_errors.py`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// Why an operation failed.
#[derive(Debug)]
pub enum Failure {
    /// Of a database.
    Db(millrace::Error),
    /// Of a client.
    Client(millrace::client::Error),
    /// The operation itself panicked.
    Panicked,
}

impl Failure {
    #[cold]
    pub fn into_py(self, py: Python<'_>) -> PyErr {
        match self {
            Failure::Db(error) => exception(py, &format!("{:?}", error.kind()), &error.to_string()),
            Failure::Client(error) => {
                exception(py, &format!("{:?}", error.kind()), &error.to_string())
            }
            Failure::Panicked => exception(py, "Panicked", "the operation panicked"),
        }
    }
}

impl From<millrace::Error> for Failure {
    fn from(error: millrace::Error) -> Failure {
        Failure::Db(error)
    }
}

impl From<millrace::client::Error> for Failure {
    fn from(error: millrace::client::Error) -> Failure {
        Failure::Client(error)
    }
}

/// The exception of a kind of errors, by the name that the kind has in Rust.
#[cold]
pub fn exception(py: Python<'_>, kind: &str, text: &str) -> PyErr {
    match class(py, kind) {
        Ok(class) => PyErr::from_type(class, text.to_owned()),
        Err(error) => error,
    }
}

fn class<'py>(py: Python<'py>, kind: &str) -> PyResult<Bound<'py, PyType>> {
    static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let of_kind = CLASS.get_or_try_init(py, || {
        py.import("millrace._errors")?.getattr("of_kind").map(Bound::unbind)
    })?;
    Ok(of_kind.bind(py).call1((kind,))?.cast_into::<PyType>()?)
}
