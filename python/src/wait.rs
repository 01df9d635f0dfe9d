//! How a thread waits for a future: without the GIL, and so that Ctrl-C ends the waiting.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// Polls before the first sleep: a cached read is answered in that time if the core is awake.
const SPINS: u32 = 200;
/// How long a signal may wait for its handler. The system call of a sleeping thread does not end
/// with a signal.
const SIGNALS: Duration = Duration::from_millis(100);

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for a future. An exception of a signal's handler ends the waiting, and drops the future.
pub fn wait<T: Send>(py: Python<'_>, future: impl Future<Output = T> + Send) -> PyResult<T> {
    let mut future = pin!(future);
    let mut spins = SPINS;
    loop {
        if let Some(value) = py.detach(|| block(future.as_mut(), spins)) {
            return Ok(value);
        }
        py.check_signals()?;
        spins = 1;
    }
}

/// Waits until the future is ready, at most [`SIGNALS`].
fn block<T>(mut future: Pin<&mut impl Future<Output = T>>, spins: u32) -> Option<T> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut cx = Context::from_waker(&waker);
    for _ in 0..spins {
        if let Poll::Ready(value) = future.as_mut().poll(&mut cx) {
            return Some(value);
        }
        std::hint::spin_loop();
    }
    let until = Instant::now() + SIGNALS;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        std::thread::park_timeout(left);
        if let Poll::Ready(value) = future.as_mut().poll(&mut cx) {
            return Some(value);
        }
    }
}
