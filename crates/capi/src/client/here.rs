//! What only the process that made it may touch.

use reactor::fork_generation;

use crate::error::{Code, Error, Result};

/// Something with sockets and threads. In a forked child it is neither used nor dropped: its
/// threads do not run there, and the connections are the parent's.
#[derive(Debug)]
pub(super) struct Here<T> {
    /// `None` only during the drop.
    inner: Option<T>,
    generation: u64,
}

impl<T> Here<T> {
    pub fn new(inner: T) -> Here<T> {
        Here { inner: Some(inner), generation: fork_generation() }
    }

    fn is_here(&self) -> bool {
        self.generation == fork_generation()
    }

    pub fn get(&self) -> Result<&T> {
        self.inner.as_ref().filter(|_| self.is_here()).ok_or_else(elsewhere)
    }

    pub fn get_mut(&mut self) -> Result<&mut T> {
        let is_here = self.is_here();
        self.inner.as_mut().filter(|_| is_here).ok_or_else(elsewhere)
    }

    pub fn take(mut self) -> Result<T> {
        match self.is_here() {
            true => self.inner.take().ok_or_else(elsewhere),
            false => Err(elsewhere()),
        }
    }
}

impl<T> Drop for Here<T> {
    fn drop(&mut self) {
        if !self.is_here() {
            std::mem::forget(self.inner.take());
        }
    }
}

#[cold]
fn elsewhere() -> Error {
    let text = "the client belongs to the parent of this forked process: connect after the fork, in \
                the process that uses it";
    Error::new(Code::Closed, text)
}
