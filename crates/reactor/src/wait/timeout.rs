//! Waits for one of two futures, and for a future with a deadline.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::core::{Core, Sleep};

/// The deadline passed before the future was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("timed out")
    }
}

impl std::error::Error for Elapsed {}

/// Waits for `future` for at most `ns` nanoseconds from now: `Err(Elapsed)` when the time is over.
/// A future that is ready at the deadline wins.
pub fn timeout<F: Future>(core: &Core, ns: u64, future: F) -> Timeout<F> {
    Timeout(race(future, core.sleep_ns(ns)))
}

/// Which of two futures was ready first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Either<A, B> {
    /// The first, with its output.
    First(A),
    /// The second, with its output.
    Second(B),
}

/// Waits for one of two futures. If both are ready, the first wins.
pub fn race<A: Future, B: Future>(first: A, second: B) -> Race<A, B> {
    Race { first, second }
}

/// The future of [`race`]. It has the size of its two parts, which an `async fn` would store twice.
#[must_use = "futures do nothing unless awaited"]
pub struct Race<A, B> {
    first: A,
    second: B,
}

impl<A: Future, B: Future> Future for Race<A, B> {
    type Output = Either<A::Output, B::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: both fields are pinned whenever `self` is: neither is ever moved out of it, the
        // type has no `Drop` of its own, and it is `Unpin` only if both fields are.
        let (first, second) = unsafe {
            let this = self.get_unchecked_mut();
            (Pin::new_unchecked(&mut this.first), Pin::new_unchecked(&mut this.second))
        };
        match first.poll(cx) {
            Poll::Ready(value) => Poll::Ready(Either::First(value)),
            Poll::Pending => second.poll(cx).map(Either::Second),
        }
    }
}

/// The future of [`timeout`].
#[must_use = "futures do nothing unless awaited"]
pub struct Timeout<F>(Race<F, Sleep>);

impl<F: Future> Future for Timeout<F> {
    type Output = Result<F::Output, Elapsed>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: as in `Race`.
        let race = unsafe { self.map_unchecked_mut(|this| &mut this.0) };
        race.poll(cx).map(|ended| match ended {
            Either::First(value) => Ok(value),
            Either::Second(()) => Err(Elapsed),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::pin::pin;
    use std::task::Waker;

    use super::*;

    fn now<T>(future: impl Future<Output = T>) -> Poll<T> {
        pin!(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn the_first_future_wins_a_tie() {
        assert_eq!(now(race(ready(1), ready(2))), Poll::Ready(Either::First(1)));
        assert_eq!(now(race(pending::<()>(), ready(2))), Poll::Ready(Either::Second(2)));
        assert!(now(race(pending::<()>(), pending::<()>())).is_pending());
    }
}
