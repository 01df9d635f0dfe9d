//! Iterators over the entries of a range.
//!
//! Entries are taken from the Rust range into a page, as many as are in memory. So an entry costs
//! no future and no release of the GIL, and one whose waiter was cancelled is not lost.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::Deref;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use millrace::client;
use pyo3::exceptions::{PyRuntimeError, PyStopAsyncIteration};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::answer::Answer;
use crate::error::Failure;
use crate::mode::Mode;
use crate::runtime::in_runtime;
use crate::slot::Origin;
use crate::wait::wait;

/// Entries that are taken at a time.
const PAGE: usize = 64;

/// Where entries come from.
pub enum Source {
    Db(millrace::Range),
    Client(client::Range),
    Blocking(client::blocking::Range),
}

enum Blob {
    Value(millrace::Value),
    Bytes(Vec<u8>),
}

impl Deref for Blob {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Blob::Value(value) => value,
            Blob::Bytes(bytes) => bytes,
        }
    }
}

type Item = Result<(Blob, Blob), Failure>;

struct State {
    source: Source,
    page: VecDeque<Item>,
    ended: bool,
}

impl Source {
    /// The next entry. A source of a client that blocks is never pending.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        let from_client = |entry: client::Result<client::Entry>| match entry {
            Ok((key, value)) => Ok((Blob::Bytes(key), Blob::Bytes(value))),
            Err(error) => Err(Failure::Client(error)),
        };
        match self {
            Source::Db(range) => pin!(range.next()).poll(cx).map(|entry| {
                Some(match entry? {
                    Ok((key, value)) => Ok((Blob::Value(key), Blob::Value(value))),
                    Err(error) => Err(Failure::Db(error)),
                })
            }),
            Source::Client(range) => {
                pin!(range.next()).poll(cx).map(|entry| entry.map(from_client))
            }
            Source::Blocking(range) => Poll::Ready(range.next().map(from_client)),
        }
    }
}

impl State {
    /// Takes what is in memory. Ready: the page has an item, or the range has ended.
    fn fill(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // Each entry of a client that blocks may wait for the network.
        let most = if matches!(self.source, Source::Blocking(_)) { 1 } else { PAGE };
        while !self.ended && self.page.len() < most {
            match self.source.poll(cx) {
                Poll::Pending if self.page.is_empty() => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(Some(item)) => {
                    // After an error there are no more entries.
                    self.ended = item.is_err();
                    self.page.push_back(item);
                }
                Poll::Ready(None) => self.ended = true,
            }
        }
        Poll::Ready(())
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An iterator over the entries (key, value) of a range, or over its keys.
#[pyclass(frozen, module = "millrace")]
pub struct Range {
    state: Arc<Mutex<State>>,
    keys_only: bool,
    /// It reads from a socket with the lock held.
    blocks: bool,
    mode: Mode,
    origin: Origin,
}

impl Drop for Range {
    fn drop(&mut self) {
        if self.origin.is_elsewhere() {
            std::mem::forget(self.state.clone());
        }
    }
}

impl Range {
    pub fn new(source: Source, keys_only: bool, mode: Mode) -> Range {
        let blocks = matches!(source, Source::Blocking(_));
        let state = State { source, page: VecDeque::new(), ended: false };
        let origin = Origin::new();
        Range { state: Arc::new(Mutex::new(state)), keys_only, blocks, mode, origin }
    }

    /// The next item of the page; `None` if it is empty. With it, whether the range has ended.
    fn take(&self) -> (Option<Item>, bool) {
        let mut state = lock(&self.state);
        (state.page.pop_front(), state.ended)
    }

    fn entry(&self, py: Python<'_>, item: Item) -> PyResult<Py<PyAny>> {
        let (key, value) = item.map_err(|failure| failure.into_py(py))?;
        let key = PyBytes::new(py, &key);
        if self.keys_only {
            return Ok(key.into_any().unbind());
        }
        Ok((key, PyBytes::new(py, &value)).into_pyobject(py)?.into_any().unbind())
    }
}

#[pymethods]
impl Range {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.origin.check(py, "range")?;
        if self.mode != Mode::Blocking {
            return Err(PyRuntimeError::new_err("use `async for` with this range"));
        }
        if self.blocks {
            let item = py.detach(|| {
                let mut state = lock(&self.state);
                let _is_ready = state.fill(&mut Context::from_waker(Waker::noop()));
                state.page.pop_front()
            });
            return item.map(|item| self.entry(py, item)).transpose();
        }
        loop {
            let (item, ended) = self.take();
            match item {
                Some(item) => return self.entry(py, item).map(Some),
                None if ended => return Ok(None),
                None => {}
            }
            let filled = lock(&self.state).fill(&mut Context::from_waker(Waker::noop()));
            if filled.is_pending() {
                let state = &self.state;
                wait(py, poll_fn(|cx| lock(state).fill(cx)))?;
            }
        }
    }

    /// For `millrace.aio`: the next item if it is in memory; None: wait for `_fill`.
    fn _pop(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.origin.check(py, "range")?;
        match self.take() {
            (Some(item), _) => self.entry(py, item).map(Some),
            (None, true) => Err(PyStopAsyncIteration::new_err(())),
            (None, false) => Ok(None),
        }
    }

    /// For `millrace.aio`: waits until `_pop` has something.
    fn _fill(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.origin.check(py, "range")?;
        let state = self.state.clone();
        let is_client = matches!(lock(&self.state).source, Source::Client(_));
        let fill = poll_fn(move |cx| lock(&state).fill(cx).map(|()| Ok(Answer::Nothing)));
        match is_client {
            true => self.mode.run(py, in_runtime(fill)?),
            false => self.mode.run(py, fill),
        }
    }
}
