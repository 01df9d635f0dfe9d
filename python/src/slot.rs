//! A value that an operation borrows for longer than a call, and that can end before its handle.
//!
//! It belongs to the process that made it. In the child of a fork it cannot be used, and nothing of
//! it is dropped: its connections are the parent's, too.

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
    origin: Origin,
}

/// The process that something belongs to.
#[derive(Clone, Copy)]
pub struct Origin(u32);

impl Origin {
    /// This process.
    pub fn new() -> Origin {
        Origin(std::process::id())
    }

    /// Whether this is another process: the child of a fork.
    pub fn is_elsewhere(self) -> bool {
        self.0 != std::process::id()
    }

    /// Refuses the use in the child of a fork.
    pub fn check(self, py: Python<'_>, what: &str) -> PyResult<()> {
        match self.is_elsewhere() {
            false => Ok(()),
            true => {
                let text = format!(
                    "the {what} belongs to the parent of this forked process: connect after the \
                     fork, in the process that uses it"
                );
                Err(exception(py, "Closed", &text))
            }
        }
    }
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
        Slot { state: Arc::new(Mutex::new(State::Here(value))), what, origin: Origin::new() }
    }

    /// Uses the value, briefly.
    pub fn with<R>(&self, py: Python<'_>, use_it: impl FnOnce(&mut T) -> R) -> PyResult<R> {
        self.origin.check(py, self.what)?;
        match &mut *lock(&self.state) {
            State::Here(value) => Ok(use_it(value)),
            State::Lent => Err(self.lent()),
            State::Ended => Err(self.ended(py)),
        }
    }

    /// Gives the value to an operation.
    pub fn lend(&self, py: Python<'_>) -> PyResult<Lent<T>> {
        self.origin.check(py, self.what)?;
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

    /// Whether the value was taken for good.
    pub fn has_ended(&self) -> bool {
        !self.origin.is_elsewhere() && matches!(&*lock(&self.state), State::Ended)
    }

    /// Takes the value for good. `None`: it was taken before, or is the parent's.
    pub fn end(&self) -> PyResult<Option<T>> {
        if self.origin.is_elsewhere() {
            return Ok(None);
        }
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
        if let Err(elsewhere) = self.origin.check(py, self.what) {
            return elsewhere;
        }
        exception(py, "Closed", &format!("the {} has ended", self.what))
    }

    #[cold]
    fn lent(&self) -> PyErr {
        PyRuntimeError::new_err(format!("the {} is in use by another call", self.what))
    }
}

impl<T> Drop for Slot<T> {
    fn drop(&mut self) {
        if self.origin.is_elsewhere() {
            std::mem::forget(self.state.clone());
        }
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
