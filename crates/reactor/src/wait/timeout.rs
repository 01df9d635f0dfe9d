//! Waits for one of two futures, and for a future with a deadline.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use crate::core::Core;

/// The deadline passed before the future was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("timed out")
    }
}

impl std::error::Error for Elapsed {}

/// Waits for `future` for at most `ns` nanoseconds, then drops it. A future that is ready at the
/// deadline wins.
///
/// # Errors
/// [`Elapsed`] when the time is over.
pub async fn timeout<T>(
    core: &Core,
    ns: u64,
    future: impl Future<Output = T>,
) -> Result<T, Elapsed> {
    match race(future, core.sleep_ns(ns)).await {
        Either::First(value) => Ok(value),
        Either::Second(()) => Err(Elapsed),
    }
}

/// Which of two futures was ready first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Either<A, B> {
    /// The first, with its output.
    First(A),
    /// The second, with its output.
    Second(B),
}

/// Waits for one of two futures and drops the other. If both are ready, the first wins.
pub async fn race<A, B>(
    first: impl Future<Output = A>,
    second: impl Future<Output = B>,
) -> Either<A, B> {
    let (mut first, mut second) = (pin!(first), pin!(second));
    poll_fn(|cx| match first.as_mut().poll(cx) {
        Poll::Ready(value) => Poll::Ready(Either::First(value)),
        Poll::Pending => second.as_mut().poll(cx).map(Either::Second),
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::task::{Context, Waker};

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
