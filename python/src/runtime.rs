//! The tokio runtime of asynchronous clients: one thread, which moves bytes between their sockets
//! and the tasks.

use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

/// Leaked: its thread runs until the process ends. A forked child has no such thread, and makes a
/// runtime of its own.
static RUNTIME: Mutex<Option<(u32, &'static Runtime)>> = Mutex::new(None);

/// The runtime of this process.
pub fn handle() -> PyResult<&'static Handle> {
    let mut runtime = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((owner, runtime)) = &*runtime
        && *owner == process
    {
        return Ok(runtime.handle());
    }
    let made = Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("millrace-client")
        .enable_all()
        .build()
        .map_err(|error| {
            PyOSError::new_err(format!("cannot start a thread for clients: {error}"))
        })?;
    let made: &'static Runtime = Box::leak(Box::new(made));
    *runtime = Some((process, made));
    Ok(made.handle())
}

/// A future that is polled by some other thread, and finds the runtime nevertheless.
pub struct InRuntime<F> {
    future: Pin<Box<F>>,
    handle: &'static Handle,
}

/// Lets a future that is polled elsewhere find the runtime.
pub fn in_runtime<F: Future>(future: F) -> PyResult<InRuntime<F>> {
    Ok(InRuntime { future: Box::pin(future), handle: handle()? })
}

impl<F: Future> Future for InRuntime<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let _entered = self.handle.enter();
        self.future.as_mut().poll(cx)
    }
}
