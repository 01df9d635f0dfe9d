//! A value that an operation borrows for longer than a call, and that can end before its handle.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::error::exception;

enum State<T> {
    Here(T),
    /// An operation has it, and gives it back.
    Lent,
    Ended,
}

/// A place for a value.
pub struct Slot<T> {
    state: Arc<Mutex<State<T>>>,
    /// What it is, for the texts of errors.
    what: &'static str,
}

/// A value that is given back when this is dropped, also with an operation that was cancelled.
pub struct Lent<T> {
    state: Arc<Mutex<State<T>>>,
    value: Option<T>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Slot<T> {
    pub fn new(value: T, what: &'static str) -> Slot<T> {
        Slot { state: Arc::new(Mutex::new(State::Here(value))), what }
    }

    /// Uses the value, briefly.
    pub fn with<R>(&self, py: Python<'_>, use_it: impl FnOnce(&mut T) -> R) -> PyResult<R> {
        match &mut *lock(&self.state) {
            State::Here(value) => Ok(use_it(value)),
            State::Lent => Err(self.lent()),
            State::Ended => Err(self.ended(py)),
        }
    }

    /// Gives the value to an operation.
    pub fn lend(&self, py: Python<'_>) -> PyResult<Lent<T>> {
        let mut state = lock(&self.state);
        match std::mem::replace(&mut *state, State::Lent) {
            State::Here(value) => Ok(Lent { state: self.state.clone(), value: Some(value) }),
            State::Lent => Err(self.lent()),
            State::Ended => {
                *state = State::Ended;
                Err(self.ended(py))
            }
        }
    }

    /// Takes the value for good. `None`: it was taken before.
    pub fn end(&self) -> PyResult<Option<T>> {
        let mut state = lock(&self.state);
        match std::mem::replace(&mut *state, State::Ended) {
            State::Here(value) => Ok(Some(value)),
            State::Ended => Ok(None),
            State::Lent => {
                *state = State::Lent;
                Err(self.lent())
            }
        }
    }

    #[cold]
    pub fn ended(&self, py: Python<'_>) -> PyErr {
        exception(py, "Closed", &format!("the {} has ended", self.what))
    }

    #[cold]
    fn lent(&self) -> PyErr {
        PyRuntimeError::new_err(format!("the {} is in use by another call", self.what))
    }
}

impl<T> Lent<T> {
    pub fn get(&mut self) -> &mut T {
        self.value.as_mut().expect("only the drop takes it")
    }
}

impl<T> Drop for Lent<T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            *lock(&self.state) = State::Here(value);
        }
    }
}
