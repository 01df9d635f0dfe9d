//! Operations of an asyncio loop. No thread waits for them, and no other thread takes the GIL.
//!
//! 1. [`start`] polls the operation once, which hands it over to a core of the database or to the
//!    connection, and returns an [`Operation`] with a future of the loop.
//! 2. The core answers and wakes the task: it puts the [`Task`] into the inbox of the loop's
//!    [`Channel`] and writes to its eventfd, unless somebody did so already. No lock, no GIL.
//! 3. The loop sees the eventfd readable and calls the channel, which polls all tasks in the inbox
//!    and sets the results of those that are done.
//!
//! **Cancellation**: an exception that is thrown into the coroutine that awaits an [`Operation`]
//! passes through it, and it drops the Rust future. That is safe at any await of the crate
//! `millrace`. Dropping the [`Operation`] does the same.
//!
//! **Who may touch what**: the state of a task belongs to the thread that has the GIL. A waker only
//! uses the inbox and the eventfd; a task that only wakers have holds no Python object.
//!
//! **Why no wake is lost**: as in `crates/capi/src/queue.rs`. A wake pushes, then sets `signalled`,
//! and writes to the eventfd if it was not set. The channel reads the eventfd, then clears
//! `signalled`, then pops; what it leaves, it signals again.

use std::os::fd::{AsFd, AsRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use nix::sys::eventfd::{EfdFlags, EventFd};
use pyo3::exceptions::{PyOSError, PyStopIteration};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;
use reactor::inbox::{Inbox, Sender, inbox};

use crate::answer::Outcome;
use crate::error::Failure;

/// Tasks that one call of a channel polls, so that the loop's other handles have their turn.
const TURN: usize = 512;

/// What wakers reach.
struct Shared {
    event: EventFd,
    signalled: AtomicBool,
    ready: Sender<Arc<Task>>,
}

impl Shared {
    fn signal(&self) {
        if !self.signalled.swap(true, Ordering::AcqRel) {
            // It fails only if 2^64 - 2 signals wait: then the eventfd is readable.
            let _is_readable = self.event.write(1);
        }
    }
}

/// The way from other threads to a loop: it is called when the eventfd is readable.
#[pyclass(frozen)]
struct Channel {
    shared: Arc<Shared>,
    inbox: Mutex<Inbox<Arc<Task>>>,
}

struct Running {
    operation: Pin<Box<dyn Future<Output = Outcome> + Send>>,
    /// The future of the loop.
    future: Py<PyAny>,
}

struct Task {
    /// Weak, because the inbox has tasks.
    shared: Weak<Shared>,
    /// It is in the inbox, or about to be polled.
    scheduled: AtomicBool,
    /// `None`: it is done, or was cancelled.
    state: Mutex<Option<Running>>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.scheduled.swap(true, Ordering::AcqRel)
            && let Some(shared) = self.shared.upgrade()
            && shared.ready.send(self.clone()).is_ok()
        {
            shared.signal();
        }
    }
}

impl Task {
    /// Polls the operation, and sets the result of its future if it is done.
    fn poll(self: &Arc<Self>, py: Python<'_>) -> PyResult<()> {
        let mut state = lock(&self.state);
        // A wake from here on puts it into the inbox again. It sees what this poll leaves, and this
        // poll sees what the wakes before did.
        self.scheduled.swap(false, Ordering::AcqRel);
        let Some(running) = &mut *state else { return Ok(()) };
        let waker = Waker::from(self.clone());
        let mut cx = Context::from_waker(&waker);
        let polled = catch_unwind(AssertUnwindSafe(|| running.operation.as_mut().poll(&mut cx)));
        let outcome = match polled {
            Ok(Poll::Pending) => return Ok(()),
            Ok(Poll::Ready(outcome)) => outcome,
            Err(_) => Err(Failure::Panicked),
        };
        let ended = state.take();
        // What follows runs Python code.
        drop(state);
        ended.map_or(Ok(()), |ended| settle(ended.future.bind(py), outcome))
    }
}

/// Sets the result of a future of a loop.
fn settle(future: &Bound<'_, PyAny>, outcome: Outcome) -> PyResult<()> {
    let py = future.py();
    // It was cancelled, and the coroutine does not know it yet.
    if future.call_method0(intern!(py, "done"))?.is_truthy()? {
        return Ok(());
    }
    let made = match outcome {
        Ok(answer) => answer.into_py(py),
        Err(failure) => Err(failure.into_py(py)),
    };
    match made {
        Ok(result) => future.call_method1(intern!(py, "set_result"), (result,))?,
        Err(error) => future.call_method1(intern!(py, "set_exception"), (error,))?,
    };
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Channel {
    fn new() -> PyResult<Channel> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let event = EventFd::from_value_and_flags(0, flags)
            .map_err(|error| PyOSError::new_err(format!("cannot make an eventfd: {error}")))?;
        // A task is in it at most once.
        let (ready, inbox) = inbox(usize::MAX / 2);
        let shared = Arc::new(Shared { event, signalled: AtomicBool::new(false), ready });
        Ok(Channel { shared, inbox: Mutex::new(inbox) })
    }
}

#[pymethods]
impl Channel {
    /// Polls the tasks that were woken.
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        // It fails if nobody has signalled.
        let _was_readable = self.shared.event.read();
        self.shared.signalled.swap(false, Ordering::AcqRel);
        let mut first_error = None;
        for _ in 0..TURN {
            let Some(task) = lock(&self.inbox).pop() else { break };
            if let Err(error) = task.poll(py) {
                first_error.get_or_insert(error);
            }
        }
        if lock(&self.inbox).pure_check() {
            self.shared.signal();
        }
        first_error.map_or(Ok(()), Err)
    }
}

/// The running loop, and the channel to it.
fn channel(py: Python<'_>) -> PyResult<(Bound<'_, PyAny>, Py<Channel>)> {
    static RUNNING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static CHANNELS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    /// The last loop and its channel. The loop has the channel as a reader.
    static LAST: Mutex<Option<(Py<PyAny>, Py<Channel>)>> = Mutex::new(None);

    let running = RUNNING.import(py, "asyncio", "get_running_loop")?.call0()?;
    if let Some((last, channel)) = &*lock(&LAST)
        && last.is(&running)
    {
        return Ok((running, channel.clone_ref(py)));
    }
    let channels = CHANNELS.get_or_try_init(py, || {
        py.import("weakref")?.getattr("WeakKeyDictionary")?.call0().map(Bound::unbind)
    })?;
    let channels = channels.bind(py);
    let known = channels.call_method1("get", (&running,))?;
    let channel = if known.is_none() {
        let made = Bound::new(py, Channel::new()?)?;
        let event = made.get().shared.event.as_fd().as_raw_fd();
        running.call_method1("add_reader", (event, &made))?;
        channels.set_item(&running, &made)?;
        made
    } else {
        known.cast_into::<Channel>()?
    };
    let channel = channel.unbind();
    let last = (running.clone().unbind(), channel.clone_ref(py));
    // What was there may run Python code when it is dropped.
    let before = lock(&LAST).replace(last);
    drop(before);
    Ok((running, channel))
}

/// An operation that goes on: an awaitable, and its iterator. When the coroutine that awaits it is
/// cancelled, or it is dropped, the operation is dropped.
#[pyclass(frozen)]
pub struct Operation {
    task: Arc<Task>,
    future: Py<PyAny>,
}

impl Operation {
    fn cancel(&self) {
        let running = lock(&self.task.state).take();
        drop(running);
    }
}

#[pymethods]
impl Operation {
    fn __await__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// As the iterator of an `asyncio.Future`: yields the future until it is done.
    fn __next__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let future = self.future.bind(py);
        if future.call_method0(intern!(py, "done"))?.is_truthy()? {
            let result = future.call_method0(intern!(py, "result"))?;
            return Err(PyStopIteration::new_err((result.unbind(),)));
        }
        future.setattr(intern!(py, "_asyncio_future_blocking"), true)?;
        Ok(self.future.clone_ref(py))
    }

    /// What the coroutine raises where it awaits: a cancellation.
    #[pyo3(signature = (*exception))]
    fn throw<'py>(
        &self,
        py: Python<'py>,
        exception: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.cancel();
        let iterator = self.future.bind(py).call_method0(intern!(py, "__await__"))?;
        iterator.call_method1(intern!(py, "throw"), exception)
    }

    fn close(&self) {
        self.cancel();
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Begins an operation of the running loop.
pub fn start(
    py: Python<'_>,
    operation: impl Future<Output = Outcome> + Send + 'static,
) -> PyResult<Py<PyAny>> {
    let (running, channel) = channel(py)?;
    let future = running.call_method0(intern!(py, "create_future"))?.unbind();
    let state = Running { operation: Box::pin(operation), future: future.clone_ref(py) };
    let task = Arc::new(Task {
        shared: Arc::downgrade(&channel.get().shared),
        scheduled: AtomicBool::new(true),
        state: Mutex::new(Some(state)),
    });
    task.poll(py)?;
    Ok(Py::new(py, Operation { task, future })?.into_any())
}
