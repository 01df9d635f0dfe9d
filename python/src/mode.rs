//! How the caller gets an answer.

use pyo3::prelude::*;

use crate::answer::Outcome;
use crate::{task, wait};

/// How the caller gets an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The call waits and returns it.
    Blocking,
    /// The call returns an awaitable of the running loop.
    Loop,
}

impl Mode {
    pub fn new(waits: bool) -> Mode {
        if waits { Mode::Blocking } else { Mode::Loop }
    }

    /// Runs an operation: returns its result, or an awaitable of it.
    pub fn run(
        self,
        py: Python<'_>,
        operation: impl Future<Output = Outcome> + Send + 'static,
    ) -> PyResult<Py<PyAny>> {
        match self {
            Mode::Blocking => match wait::wait(py, operation)? {
                Ok(answer) => answer.into_py(py),
                Err(failure) => Err(failure.into_py(py)),
            },
            Mode::Loop => task::start(py, operation),
        }
    }
}
