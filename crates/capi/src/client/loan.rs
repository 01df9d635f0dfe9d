//! What one operation has at a time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Code, Error, Result};

/// A place for something that operations borrow. Clones are the same place.
#[derive(Debug)]
pub(super) struct Slot<T> {
    state: Arc<Mutex<State<T>>>,
    /// What is in it, for errors.
    name: &'static str,
}

#[derive(Debug)]
enum State<T> {
    Here(T),
    Lent,
    Ended,
}

impl<T> Slot<T> {
    pub fn new(item: T, name: &'static str) -> Slot<T> {
        Slot { state: Arc::new(Mutex::new(State::Here(item))), name }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses it for a moment.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Result<R> {
        match &mut *self.lock() {
            State::Here(item) => Ok(work(item)),
            State::Lent => Err(self.lent()),
            State::Ended => Err(self.ended()),
        }
    }

    /// Takes it until the loan is dropped.
    pub fn lend(&self) -> Result<Loan<T>> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Lent) {
            State::Here(item) => Ok(Loan { item: Some(item), state: self.state.clone() }),
            State::Lent => Err(self.lent()),
            State::Ended => {
                *state = State::Ended;
                Err(self.ended())
            }
        }
    }

    /// Takes it for ever.
    pub fn end(&self) -> Result<T> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Ended) {
            State::Here(item) => Ok(item),
            State::Lent => {
                *state = State::Lent;
                Err(self.lent())
            }
            State::Ended => Err(self.ended()),
        }
    }

    #[cold]
    fn lent(&self) -> Error {
        let text = format!("an operation of the {} is on its way: wait for its end", self.name);
        Error::new(Code::Busy, text)
    }

    #[cold]
    fn ended(&self) -> Error {
        Error::argument(format!("the {} was committed", self.name))
    }
}

/// What an operation has borrowed. Its end gives it back, also if that is a cancellation.
#[derive(Debug)]
pub(super) struct Loan<T> {
    /// `None` only during the drop.
    item: Option<T>,
    state: Arc<Mutex<State<T>>>,
}

impl<T> Loan<T> {
    pub fn get(&mut self) -> Option<&mut T> {
        self.item.as_mut()
    }
}

impl<T> Drop for Loan<T> {
    fn drop(&mut self) {
        if let Some(item) = self.item.take() {
            *self.state.lock().unwrap_or_else(PoisonError::into_inner) = State::Here(item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_operation_has_it_at_a_time() {
        let slot = Slot::new(1, "thing");
        let mut loan = slot.lend().unwrap();
        assert_eq!(slot.lend().unwrap_err().code(), Code::Busy);
        assert_eq!(slot.with(|_| ()).unwrap_err().code(), Code::Busy);
        assert_eq!(slot.end().unwrap_err().code(), Code::Busy);
        *loan.get().unwrap() = 2;
        drop(loan);
        assert_eq!(slot.with(|item| *item).unwrap(), 2);
        assert_eq!(slot.end().unwrap(), 2);
        assert_eq!(slot.lend().unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(slot.with(|_| ()).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(slot.end().unwrap_err().code(), Code::InvalidArgument);
    }
}
